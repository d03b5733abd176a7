// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a worker waits for kicks.
//!
//! The trait is the whole of what the rest of the daemon knows of it. io_uring is its first choice
//! (uring.rs), epoll serves where that is missing or forbidden (epoll.rs). Never here: what a kick
//! is for, and calls, which are rung by bell.rs whoever waits.

use crate::config::settings::EventLoop;
use crate::queue::epoll::Epoll;
use crate::queue::uring::Uring;
use rustix::io::ReadWriteFlags;
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Waits for any of many eventfds to be signalled.
///
/// What is reported must be consumed: whether a signal that is not is reported again is open.
/// One thread waits, any thread may do the rest.
pub trait Poller: Send + Sync {
    /// Watches an eventfd, until it is removed; `token`, which no other has or had, is what `wait`
    /// reports for it.
    fn add(&self, fd: &Arc<OwnedFd>, token: u64) -> io::Result<()>;
    /// Ends watching it. What was signalled may be reported once more, and a reference to the file
    /// may be kept until the next wait.
    fn remove(&self, fd: &OwnedFd, token: u64) -> io::Result<()>;
    /// Replaces `ready` by the tokens of some that are signalled. With `block` it waits until one
    /// is, or until a wake; it may end sooner.
    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()>;
    /// Ends a wait, now or the next one.
    fn wake(&self);
}

/// The token of the wake descriptor.
pub const WAKE: u64 = u64::MAX;

/// Pollers for so many workers: of the kind that is wanted, or of the best that the kernel gives.
///
/// # Errors
/// The kernel does not give the kind that was named.
pub fn create(wanted: EventLoop, count: usize) -> io::Result<Vec<Box<dyn Poller>>> {
    let urings = || -> io::Result<Vec<Box<dyn Poller>>> {
        (0..count)
            .map(|_| Ok(Box::new(Uring::new()?) as Box<dyn Poller>))
            .collect()
    };
    let epolls = || -> io::Result<Vec<Box<dyn Poller>>> {
        (0..count)
            .map(|_| Ok(Box::new(Epoll::new()?) as Box<dyn Poller>))
            .collect()
    };
    match wanted {
        EventLoop::Epoll => epolls(),
        EventLoop::IoUring => urings().map_err(|error| {
            io::Error::other(format!(
                "event_loop = \"io_uring\" is not possible here: {error}; it needs Linux 6.1 and \
                 kernel.io_uring_disabled = 0; \"auto\" takes epoll instead"
            ))
        }),
        EventLoop::Auto => urings().or_else(|error| {
            tracing::info!("workers wait with epoll, since io_uring is not possible here: {error}");
            epolls()
        }),
    }
}

/// Adds one to an eventfd of the daemon's own; one that is full is signalled already. For those of a
/// front end there is `bell::ring`, since a write to them may wait.
pub fn signal(fd: &OwnedFd) {
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
    use rustix::event::{EventfdFlags, Timespec, eventfd};
    use rustix::io::Errno;
    use std::sync::mpsc;
    use std::time::Duration;
    use tmem_sim::{Missing, skipped};

    fn pollers() -> Vec<(EventLoop, Box<dyn Poller>)> {
        let one = |kind| create(kind, 1).map(|mut pollers| (kind, pollers.remove(0)));
        let mut pollers = vec![one(EventLoop::Epoll).expect("every kernel has it")];
        match one(EventLoop::IoUring) {
            Ok(uring) => pollers.push(uring),
            Err(error) => skipped(Missing::IoUring, error),
        }
        pollers
    }

    fn descriptor() -> Arc<OwnedFd> {
        Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd"))
    }

    /// Tokens that a look finds, until there are some or the time is up.
    fn looks(poller: &dyn Poller, time: Duration) -> Vec<u64> {
        let begun = std::time::Instant::now();
        let mut ready = Vec::new();
        while ready.is_empty() && begun.elapsed() < time {
            poller.wait(&mut ready, false).expect("it can wait");
        }
        ready
    }

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn what_is_signalled_is_reported_until_it_is_removed() {
        for (kind, poller) in pollers() {
            let (a, b) = (descriptor(), descriptor());
            // Before it is watched, and after.
            signal(&a);
            poller.add(&a, 7).expect("an eventfd");
            poller.add(&b, 8).expect("an eventfd");
            assert_eq!(looks(&*poller, LONG), [7], "{kind:?}");
            consume(&a);
            assert_eq!(looks(&*poller, SHORT), [0; 0], "{kind:?}: consumed");
            for _ in 0..3 {
                signal(&b);
                signal(&b);
                assert_eq!(looks(&*poller, LONG), [8], "{kind:?}");
                consume(&b);
            }
            poller.remove(&b, 8).expect("watched");
            assert_eq!(looks(&*poller, SHORT), [0; 0], "{kind:?}");
            signal(&b);
            assert_eq!(looks(&*poller, SHORT), [0; 0], "{kind:?}: removed");
            signal(&a);
            assert_eq!(
                looks(&*poller, LONG),
                [7],
                "{kind:?}: the other is still watched"
            );
        }
    }

    #[test]
    fn a_wake_and_a_new_descriptor_end_a_wait() {
        for (kind, poller) in pollers() {
            let poller: Arc<dyn Poller> = poller.into();
            let (fd, other) = (descriptor(), poller.clone());
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                let mut ready = Vec::new();
                for _ in 0..2 {
                    other.wait(&mut ready, true).expect("it can wait");
                    sender.send(()).expect("waited for");
                }
                while ready.is_empty() {
                    other.wait(&mut ready, true).expect("it can wait");
                }
                assert_eq!(ready, [5]);
                sender.send(()).expect("waited for");
            });
            // One that comes before the wait counts.
            for _ in 0..2 {
                poller.wake();
                assert_eq!(done.recv_timeout(LONG), Ok(()), "{kind:?}");
            }
            signal(&fd);
            poller.add(&fd, 5).expect("an eventfd");
            assert_eq!(done.recv_timeout(LONG), Ok(()), "{kind:?}");
        }
    }

    /// Also one that the poller comes across on its way to sleep, when it ends what was removed.
    #[test]
    fn a_wake_beside_a_removal_ends_a_wait() {
        for (kind, poller) in pollers() {
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                let fd = descriptor();
                poller.add(&fd, 7).expect("an eventfd");
                assert_eq!(looks(&*poller, SHORT), [0; 0], "{kind:?}");
                poller.remove(&fd, 7).expect("watched");
                poller.wake();
                let result = poller.wait(&mut Vec::new(), true);
                sender.send(result.is_ok()).expect("waited for");
            });
            assert_eq!(done.recv_timeout(LONG), Ok(true), "{kind:?}");
        }
    }

    /// Whatever was signalled when. A file that stays open is memory of the kernel's, of which a front end
    /// that changes its kicks in a loop could take more and more.
    #[test]
    fn what_is_removed_is_let_go() {
        const BEFORE: usize = 1;
        const WATCHED: usize = 2;
        const REPORTED: usize = 4;
        for (kind, poller) in pollers() {
            for signals in 0..8 {
                // Of a pipe it shows whether anybody has the other end.
                let (end, other) = std::io::pipe().expect("a pipe");
                let end: Arc<OwnedFd> = Arc::new(end.into());
                let signal = |when| {
                    if signals & when != 0 {
                        rustix::io::write(&other, &[1]).expect("somebody has the other end");
                    }
                };
                let (token, mut ready) = (signals as u64, Vec::new());
                signal(BEFORE);
                poller.add(&end, token).expect("a pipe");
                if signals & (WATCHED | REPORTED) != 0 {
                    poller.wait(&mut ready, false).expect("it can wait");
                    signal(WATCHED);
                }
                if signals & REPORTED != 0 {
                    poller.wait(&mut ready, false).expect("it can wait");
                    signal(REPORTED);
                }
                poller.remove(&end, token).expect("watched");
                drop(end);
                for _ in 0..2 {
                    poller.wait(&mut ready, false).expect("it can wait");
                }
                let kept = rustix::io::write(&other, &[1]);
                assert_eq!(kept, Err(Errno::PIPE), "{kind:?}, signalled at {signals}");
            }
        }
    }

    /// More than either takes at once.
    #[test]
    fn a_thousand_signals_at_once() {
        for (kind, poller) in pollers() {
            let all: Vec<_> = (0..1000).map(|_| descriptor()).collect();
            for (token, fd) in all.iter().enumerate() {
                poller.add(fd, token as u64).expect("an eventfd");
            }
            for _ in 0..3 {
                let mut seen = std::collections::BTreeSet::new();
                all.iter().for_each(|fd| signal(fd));
                while seen.len() < all.len() {
                    let ready = looks(&*poller, LONG);
                    assert!(!ready.is_empty(), "{kind:?}: {} of 1000", seen.len());
                    ready
                        .iter()
                        .for_each(|token| consume(&all[*token as usize]));
                    seen.extend(ready);
                }
            }
        }
    }

    #[test]
    fn consuming_takes_all_and_never_waits() {
        // As a front end can make it at any time: it would wait in an ordinary read.
        let fd = eventfd(3, EventfdFlags::CLOEXEC).expect("eventfd");
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
