// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Choice of the implementation with which workers wait for kicks: io_uring (`uring.rs`), or epoll
//! (`epoll.rs`) where io_uring is missing or forbidden.

use crate::config::settings::EventLoop;
use crate::queue::epoll::Epoll;
use crate::queue::poller::Poller;
use crate::queue::uring::Uring;
use std::io;

/// Creates one poller for each of `count` workers: of the wanted kind, or with `Auto` of the best kind
/// that the kernel provides.
///
/// # Errors
/// The kernel does not provide the wanted kind.
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
                "event_loop = \"io_uring\" is not available: {error}. It needs Linux 6.1 and \
                 kernel.io_uring_disabled = 0; \"auto\" takes epoll instead"
            ))
        }),
        EventLoop::Auto => urings().or_else(|error| {
            tracing::info!("workers wait with epoll because io_uring is not available: {error}");
            epolls()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::event_fd::{consume, signal};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
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

    /// Polls without blocking until a token is reported or the time is over. Returns the tokens.
    fn poll_for(poller: &dyn Poller, time: Duration) -> Vec<u64> {
        let begun = std::time::Instant::now();
        let mut ready = Vec::new();
        while ready.is_empty() && begun.elapsed() < time {
            poller.wait(&mut ready, false).expect("the wait succeeds");
        }
        ready
    }

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_signal_is_reported_until_its_eventfd_is_removed() {
        for (kind, poller) in pollers() {
            let (a, b) = (descriptor(), descriptor());
            // Signalled before it is watched.
            signal(&a);
            poller.add(&a, 7).expect("an eventfd");
            poller.add(&b, 8).expect("an eventfd");
            assert_eq!(poll_for(&*poller, LONG), [7], "{kind:?}");
            consume(&a);
            assert_eq!(poll_for(&*poller, SHORT), [0; 0], "{kind:?}: consumed");
            for _ in 0..3 {
                signal(&b);
                signal(&b);
                assert_eq!(poll_for(&*poller, LONG), [8], "{kind:?}");
                consume(&b);
            }
            poller.remove(&b, 8).expect("watched");
            assert_eq!(poll_for(&*poller, SHORT), [0; 0], "{kind:?}");
            signal(&b);
            assert_eq!(poll_for(&*poller, SHORT), [0; 0], "{kind:?}: removed");
            signal(&a);
            assert_eq!(
                poll_for(&*poller, LONG),
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
                    other.wait(&mut ready, true).expect("the wait succeeds");
                    sender.send(()).expect("waited for");
                }
                while ready.is_empty() {
                    other.wait(&mut ready, true).expect("the wait succeeds");
                }
                assert_eq!(ready, [5]);
                sender.send(()).expect("waited for");
            });
            // A wake that precedes the wait ends it, too.
            for _ in 0..2 {
                poller.wake();
                assert_eq!(done.recv_timeout(LONG), Ok(()), "{kind:?}");
            }
            signal(&fd);
            poller.add(&fd, 5).expect("an eventfd");
            assert_eq!(done.recv_timeout(LONG), Ok(()), "{kind:?}");
        }
    }

    /// The poller may find the wake while it processes the removal, just before it would sleep.
    #[test]
    fn a_wake_during_a_removal_ends_a_wait() {
        for (kind, poller) in pollers() {
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                let fd = descriptor();
                poller.add(&fd, 7).expect("an eventfd");
                assert_eq!(poll_for(&*poller, SHORT), [0; 0], "{kind:?}");
                poller.remove(&fd, 7).expect("watched");
                poller.wake();
                let result = poller.wait(&mut Vec::new(), true);
                sender.send(result.is_ok()).expect("waited for");
            });
            assert_eq!(done.recv_timeout(LONG), Ok(true), "{kind:?}");
        }
    }

    /// Holds for signals at any time. A file that stayed open would be kernel memory, and a front end that
    /// replaces its kicks in a loop could use up more and more of it.
    #[test]
    fn a_removed_file_is_released() {
        const BEFORE: usize = 1;
        const WATCHED: usize = 2;
        const REPORTED: usize = 4;
        for (kind, poller) in pollers() {
            for signals in 0..8 {
                // A write to a pipe shows whether its other end is still open.
                let (end, other) = std::io::pipe().expect("a pipe");
                let end: Arc<OwnedFd> = Arc::new(end.into());
                let signal = |when| {
                    if signals & when != 0 {
                        rustix::io::write(&other, &[1]).expect("the other end is open");
                    }
                };
                let (token, mut ready) = (signals as u64, Vec::new());
                signal(BEFORE);
                poller.add(&end, token).expect("a pipe");
                if signals & (WATCHED | REPORTED) != 0 {
                    poller.wait(&mut ready, false).expect("the wait succeeds");
                    signal(WATCHED);
                }
                if signals & REPORTED != 0 {
                    poller.wait(&mut ready, false).expect("the wait succeeds");
                    signal(REPORTED);
                }
                poller.remove(&end, token).expect("watched");
                drop(end);
                for _ in 0..2 {
                    poller.wait(&mut ready, false).expect("the wait succeeds");
                }
                let kept = rustix::io::write(&other, &[1]);
                assert_eq!(kept, Err(Errno::PIPE), "{kind:?}, signalled at {signals}");
            }
        }
    }

    /// A thousand is more than either implementation reports in one call.
    #[test]
    fn a_thousand_simultaneous_signals_are_all_reported() {
        for (kind, poller) in pollers() {
            let all: Vec<_> = (0..1000).map(|_| descriptor()).collect();
            for (token, fd) in all.iter().enumerate() {
                poller.add(fd, token as u64).expect("an eventfd");
            }
            for _ in 0..3 {
                let mut seen = std::collections::BTreeSet::new();
                all.iter().for_each(|fd| signal(fd));
                while seen.len() < all.len() {
                    let ready = poll_for(&*poller, LONG);
                    assert!(!ready.is_empty(), "{kind:?}: {} of 1000", seen.len());
                    ready
                        .iter()
                        .for_each(|token| consume(&all[*token as usize]));
                    seen.extend(ready);
                }
            }
        }
    }
}
