// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signals eventfds without blocking through an io_uring, on hosts whose AIO is used up.
//!
//! A ring signals one registered eventfd for each completion that it posts. The kernel does not
//! block then: it does not increase a full counter, which is already signalled. A notification
//! therefore registers the eventfd, submits an operation that does nothing, and unregisters the
//! eventfd. Writing to the eventfd through the ring would not work, see `notifier.rs`.
//!
//! Limits: three system calls for each notification, and one notification at a time in the process.
//! Before Linux 5.18, two of these calls also wait for an RCU grace period, which takes milliseconds.
//! The ring is restricted to this use before its first use, like those of the workers (`uring.rs`).
//!
//! System calls: io_uring_setup and io_uring_register at the start; io_uring_register and
//! io_uring_enter for each notification.

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Number of operations that the ring can queue. A notification waits until its only operation is
/// complete.
const ENTRIES: u32 = 1;

/// Codes of io_uring_register(2) that the ring accepts: IORING_REGISTER_EVENTFD and
/// IORING_UNREGISTER_EVENTFD of linux/io_uring.h.
const REGISTERS: [u8; 2] = [4, 5];

/// An io_uring that signals eventfds.
pub struct NotifierRing {
    /// Guards the ring and its registered eventfd. Leaf lock.
    ring: Mutex<IoUring>,
}

impl NotifierRing {
    /// Creates the ring.
    ///
    /// # Errors
    /// The kernel is older than 5.10 or does not permit io_uring.
    pub fn new() -> io::Result<NotifierRing> {
        let ring: IoUring = IoUring::builder().setup_r_disabled().build(ENTRIES)?;
        let [register, unregister] = REGISTERS.map(Restriction::register_op);
        let only = Restriction::sqe_op(opcode::Nop::CODE);
        let submitter = ring.submitter();
        submitter.register_restrictions(&mut [register, unregister, only])?;
        submitter.register_enable_rings()?;
        Ok(NotifierRing {
            ring: Mutex::new(ring),
        })
    }

    /// Signals an eventfd. Never blocks, whatever other processes do with the eventfd.
    ///
    /// # Errors
    /// The descriptor is no eventfd, or the kernel lacks memory.
    pub fn signal(&self, fd: &OwnedFd) -> io::Result<()> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.submitter().register_eventfd(fd.as_raw_fd())?;
        // If the submission queue is full, an earlier notification could not submit its operation.
        // That operation is submitted now, and signals the eventfd that is registered now.
        // SAFETY: the operation does nothing and refers to no memory.
        let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        let done = loop {
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => break done,
            }
        };
        ring.completion().for_each(drop);
        // The eventfd of the next notification can be registered only if this one no longer is.
        ring.submitter().unregister_eventfd()?;
        done.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use tmem_model::{Missing, skipped};

    /// An attacker who controls a thread could submit operations of other kinds, which seccomp does
    /// not see.
    #[test]
    fn the_ring_refuses_operations_that_notifications_do_not_use() {
        let ring = match NotifierRing::new() {
            Ok(ring) => ring,
            Err(error) => return skipped(Missing::IoUring, error),
        };
        let mut io = ring.ring.lock().expect("the lock is poisoned");
        let cancel = opcode::AsyncCancel::new(7).build().user_data(3);
        // SAFETY: the operation refers to no memory.
        unsafe { io.submission().push(&cancel) }.expect("the submission queue has no free entry");
        io.submit_and_wait(1).expect("cannot submit to io_uring");
        let refused = io.completion().next().map(|entry| entry.result());
        assert_eq!(refused, Some(-libc::EACCES));
        io.submitter()
            .register_files(&[0])
            .expect_err("the ring accepted files");
    }

    #[test]
    fn a_failed_notification_does_not_disturb_the_next_one() {
        let ring = match NotifierRing::new() {
            Ok(ring) => ring,
            Err(error) => return skipped(Missing::IoUring, error),
        };
        let fd = || eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        let (first, second) = (fd(), fd());
        let file = std::fs::File::open("/dev/null").expect("cannot open /dev/null");
        ring.signal(&file.into())
            .expect_err("a file that is no eventfd was signalled");
        for fd in [&first, &second, &second] {
            ring.signal(fd)
                .expect("the ring did not signal the eventfd");
        }
        for (fd, expected) in [(first, 1), (second, 2)] {
            let mut bytes = [0; 8];
            rustix::io::read(&fd, &mut bytes).expect("the eventfd is not signalled");
            assert_eq!(u64::from_ne_bytes(bytes), expected);
        }
    }
}
