// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a worker waits for kicks.
//!
//! The trait is the whole of what the rest of the daemon knows of it, so that another mechanism
//! can take epoll's place. It is level-triggered: a kick that is not consumed is reported again.

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::ReadWriteFlags;
use std::io::{self, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Waits for any of many file descriptors to be readable.
pub trait Poller: Send + Sync {
    /// Watches a descriptor, until it is removed; `token` is what `wait` reports for it.
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()>;
    /// Ends watching a descriptor.
    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()>;
    /// Replaces `ready` by the tokens of some readable descriptors; waits for one, or for a wake,
    /// if `block` is set.
    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()>;
    /// Ends a wait, now or the next one.
    fn wake(&self);
}

/// The token of the wake descriptor.
const WAKE: u64 = u64::MAX;

/// Events taken at once; the others are reported by the next wait.
const EVENTS_MAX: usize = 256;

/// epoll and an eventfd to wake it.
pub struct Epoll {
    epoll: OwnedFd,
    wake: OwnedFd,
}

impl Epoll {
    /// A poller that watches nothing.
    pub fn new() -> io::Result<Epoll> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Epoll { epoll, wake })
    }
}

impl Poller for Epoll {
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(token),
            EventFlags::IN,
        )?)
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()> {
        ready.clear();
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let timeout = if block { None } else { Some(&none) };
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            match event.data.u64() {
                WAKE => consume(&self.wake),
                token => ready.push(token),
            }
        }
        Ok(())
    }

    fn wake(&self) {
        signal(&self.wake);
    }
}

/// Adds one to an eventfd; one that is full is signalled already.
pub fn signal(fd: &OwnedFd) {
    // Nothing can be done about another error: the descriptor is the peer's, and so is the loss.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Takes all signals from an eventfd. It never waits, whatever the peer does with the flags of the
/// file that it shares, or takes away between the poll and the read.
pub fn consume(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    let mut buffers = [IoSliceMut::new(&mut count)];
    let _ = rustix::io::preadv2(fd, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT);
}

/// -1: at the file's position, of which an eventfd has none.
const NO_OFFSET: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn consuming_takes_all_and_never_waits() {
        // As a front end can make it at any time: it would wait in an ordinary read.
        let fd = rustix::event::eventfd(3, EventfdFlags::CLOEXEC).expect("eventfd");
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
            let left = rustix::event::poll(&mut polled, Some(&now)).expect("poll");
            consume(&fd);
            sender.send(left).expect("waited for");
        });
        let left = done.recv_timeout(std::time::Duration::from_secs(30));
        assert_eq!(left, Ok(0), "signals left, or it waits");
    }
}
