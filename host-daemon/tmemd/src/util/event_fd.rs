// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signalling and resetting eventfds.
//!
//! Out of scope: the eventfds through which the daemon interrupts a guest, which belong to a VM's
//! front end. See `queue/notifier.rs`.

use rustix::io::ReadWriteFlags;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

/// Adds 1 to the counter of an eventfd that only the daemon uses. If the counter is full, the write
/// fails; the error is ignored, because such an eventfd is signalled already. An eventfd of a front
/// end must be signalled with `queue::notifier::interrupt`, because a plain write to it may block.
pub fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Resets an eventfd's counter to 0. The call never blocks, even if another process shares the
/// eventfd and changes its file flags, or reads it after the caller's poll(2).
pub fn consume(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    let mut buffers = [IoSliceMut::new(&mut count)];
    let _ = rustix::io::preadv2(fd, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT);
}

/// File offset -1 for preadv2(2), which means the current position of the file. An eventfd ignores
/// the position.
const NO_OFFSET: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, Timespec, eventfd};
    use std::sync::mpsc;

    #[test]
    fn consume_resets_the_counter_and_never_blocks() {
        // This eventfd does not have the flag O_NONBLOCK, as if a VM's front end had cleared the
        // flag. A plain read of the eventfd would block while its counter is 0.
        let fd = eventfd(3, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            consume(&fd);
            let mut polled = [rustix::event::PollFd::new(
                &fd,
                rustix::event::PollFlags::IN,
            )];
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let left =
                rustix::event::poll(&mut polled, Some(&now)).expect("cannot poll the eventfd");
            consume(&fd);
            sender
                .send(left)
                .expect("the receiver of the message was dropped");
        });
        let left = done.recv_timeout(std::time::Duration::from_secs(30));
        assert_eq!(
            left,
            Ok(0),
            "consume left a signal in the eventfd or blocked"
        );
    }
}
