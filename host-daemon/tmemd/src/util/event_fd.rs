// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signalling and resetting eventfds.
//!
//! Out of scope: interrupting a guest through an eventfd that its front end owns, see
//! `queue/notifier.rs`.

use rustix::io::ReadWriteFlags;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

/// Adds 1 to an eventfd of the daemon's own. An eventfd whose counter is full is signalled already,
/// so the error is ignored. For an eventfd of a front end use `queue::notifier::notify`: a plain
/// write to it may block.
pub fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Resets an eventfd's counter to 0. The call never blocks, even if the peer that shares the file
/// changes its flags, or reads the eventfd between the caller's poll(2) and this read.
pub fn consume(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    let mut buffers = [IoSliceMut::new(&mut count)];
    let _ = rustix::io::preadv2(fd, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT);
}

/// Offset -1 of preadv2(2), which stands for the file's own position. An eventfd has no position.
const NO_OFFSET: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, Timespec, eventfd};
    use std::sync::mpsc;

    #[test]
    fn consume_resets_the_counter_and_never_blocks() {
        // This eventfd lacks O_NONBLOCK, as if a front end had cleared the flag. A plain read of it
        // would block while its counter is 0.
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
                .expect("the test no longer waits for the message");
        });
        let left = done.recv_timeout(std::time::Duration::from_secs(30));
        assert_eq!(
            left,
            Ok(0),
            "consume left a signal in the eventfd or blocked"
        );
    }
}
