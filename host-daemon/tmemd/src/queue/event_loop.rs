// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Choice of the poller with which workers wait for kicks: io_uring (`uring.rs`), or epoll
//! (`epoll.rs`) where io_uring is missing or forbidden.

use crate::config::settings::EventLoop;
use crate::queue::epoll::Epoll;
use crate::queue::poller::Poller;
use crate::queue::uring::Uring;
use std::io;

/// Creates a poller of the wanted kind for each of `count` workers. `Auto` means io_uring if the
/// kernel provides io_uring, and otherwise epoll.
///
/// # Errors
/// The kernel does not provide the wanted kind of poller.
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
    use tmem_model::{Missing, skipped};

    fn pollers() -> Vec<(EventLoop, Box<dyn Poller>)> {
        let one = |kind| create(kind, 1).map(|mut pollers| (kind, pollers.remove(0)));
        let mut pollers = vec![one(EventLoop::Epoll).expect("the kernel has no epoll")];
        match one(EventLoop::IoUring) {
            Ok(uring) => pollers.push(uring),
            Err(error) => skipped(Missing::IoUring, error),
        }
        pollers
    }

    fn descriptor() -> Arc<OwnedFd> {
        Arc::new(
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .expect("cannot create an eventfd"),
        )
    }

    /// Calls the poller repeatedly without blocking, until it reports a token or `time` has passed.
    /// Returns the reported tokens.
    fn poll_for(poller: &dyn Poller, time: Duration) -> Vec<u64> {
        let begun = std::time::Instant::now();
        let mut ready = Vec::new();
        while ready.is_empty() && begun.elapsed() < time {
            poller
                .wait(&mut ready, false)
                .expect("cannot wait for descriptors");
        }
        ready
    }

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn each_eventfd_signal_is_reported_until_the_eventfd_is_removed() {
        for (kind, poller) in pollers() {
            let (a, b) = (descriptor(), descriptor());
            // This eventfd is signalled before the poller watches it. The poller must report it
            // nevertheless.
            signal(&a);
            poller.add(&a, 7).expect("cannot watch the eventfd");
            poller.add(&b, 8).expect("cannot watch the eventfd");
            assert_eq!(
                poll_for(&*poller, LONG),
                [7],
                "{kind:?} does not report the signalled eventfd"
            );
            consume(&a);
            assert_eq!(
                poll_for(&*poller, SHORT),
                [0; 0],
                "{kind:?} reports the eventfd again without a new signal"
            );
            for _ in 0..3 {
                signal(&b);
                signal(&b);
                assert_eq!(
                    poll_for(&*poller, LONG),
                    [8],
                    "{kind:?} does not report the eventfd that was signalled before it waited"
                );
                consume(&b);
            }
            poller.remove(&b, 8).expect("the descriptor is not watched");
            assert_eq!(
                poll_for(&*poller, SHORT),
                [0; 0],
                "{kind:?} reports an eventfd that was removed"
            );
            signal(&b);
            assert_eq!(
                poll_for(&*poller, SHORT),
                [0; 0],
                "{kind:?} reports an eventfd that was signalled after its removal"
            );
            signal(&a);
            assert_eq!(
                poll_for(&*poller, LONG),
                [7],
                "{kind:?} does not report the eventfd that was not removed"
            );
        }
    }

    /// A read of an eventfd with EFD_SEMAPHORE subtracts only 1 from its counter, so the eventfd may
    /// stay readable for ever. A worker must not spin because of such a kick.
    #[test]
    fn an_eventfd_that_stays_readable_is_reported_once_for_each_signal() {
        for (kind, poller) in pollers() {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
            let fd = Arc::new(eventfd(1000, flags).expect("cannot create an eventfd"));
            poller.add(&fd, 7).expect("cannot watch the eventfd");
            for _ in 0..3 {
                assert_eq!(
                    poll_for(&*poller, LONG),
                    [7],
                    "{kind:?} does not report the signal"
                );
                consume(&fd);
                assert_eq!(
                    poll_for(&*poller, SHORT),
                    [0; 0],
                    "{kind:?} reports the eventfd again without a new signal"
                );
                signal(&fd);
            }
        }
    }

    #[test]
    fn a_wait_for_events_ends_after_a_wake_or_a_new_descriptor() {
        for (kind, poller) in pollers() {
            let poller: Arc<dyn Poller> = poller.into();
            let (fd, other) = (descriptor(), poller.clone());
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                let mut ready = Vec::new();
                for _ in 0..2 {
                    other
                        .wait(&mut ready, true)
                        .expect("cannot wait for descriptors");
                    sender
                        .send(())
                        .expect("the receiver of the message was dropped");
                }
                while ready.is_empty() {
                    other
                        .wait(&mut ready, true)
                        .expect("cannot wait for descriptors");
                }
                assert_eq!(ready, [5]);
                sender
                    .send(())
                    .expect("the receiver of the message was dropped");
            });
            // If wake() is called while no thread waits, it ends the next wait.
            for _ in 0..2 {
                poller.wake();
                assert_eq!(
                    done.recv_timeout(LONG),
                    Ok(()),
                    "{kind:?}: wake() did not end the wait"
                );
            }
            signal(&fd);
            poller.add(&fd, 5).expect("cannot watch the eventfd");
            assert_eq!(
                done.recv_timeout(LONG),
                Ok(()),
                "{kind:?}: a signalled eventfd that was added did not end the wait"
            );
        }
    }

    /// A call of wake() must end the next wait, even if the poller receives the wake-up while it
    /// removes another eventfd, before it begins to wait.
    #[test]
    fn a_wake_during_a_descriptor_removal_ends_the_next_wait() {
        for (kind, poller) in pollers() {
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                let fd = descriptor();
                poller.add(&fd, 7).expect("cannot watch the eventfd");
                assert_eq!(
                    poll_for(&*poller, SHORT),
                    [0; 0],
                    "{kind:?} reports an eventfd that was not signalled"
                );
                poller
                    .remove(&fd, 7)
                    .expect("the descriptor is not watched");
                poller.wake();
                let result = poller.wait(&mut Vec::new(), true);
                sender
                    .send(result.is_ok())
                    .expect("the receiver of the message was dropped");
            });
            assert_eq!(
                done.recv_timeout(LONG),
                Ok(true),
                "{kind:?}: the wait after a removal and wake() did not end"
            );
        }
    }

    /// A poller releases an eventfd that is removed. It does so whether the eventfd was signalled
    /// before it was added, while it was watched, or after its signal was reported. Otherwise the
    /// eventfd would stay in kernel memory, and a front end that replaces its kicks in a loop could
    /// use up that memory.
    #[test]
    fn the_event_loop_closes_its_reference_to_a_removed_descriptor() {
        const BEFORE: usize = 1;
        const WATCHED: usize = 2;
        const REPORTED: usize = 4;
        for (kind, poller) in pollers() {
            for signals in 0..8 {
                // The test adds one end of a pipe to the poller, instead of an eventfd. A write to
                // the other end fails once the poller has released the first end.
                let (end, other) = std::io::pipe().expect("cannot create a pipe");
                let end: Arc<OwnedFd> = Arc::new(end.into());
                let signal = |when| {
                    if signals & when != 0 {
                        rustix::io::write(&other, &[1])
                            .expect("the other end of the pipe is closed");
                    }
                };
                let (token, mut ready) = (signals as u64, Vec::new());
                signal(BEFORE);
                poller.add(&end, token).expect("cannot watch the pipe");
                if signals & (WATCHED | REPORTED) != 0 {
                    poller
                        .wait(&mut ready, false)
                        .expect("cannot wait for descriptors");
                    signal(WATCHED);
                }
                if signals & REPORTED != 0 {
                    poller
                        .wait(&mut ready, false)
                        .expect("cannot wait for descriptors");
                    signal(REPORTED);
                }
                poller
                    .remove(&end, token)
                    .expect("the descriptor is not watched");
                drop(end);
                for _ in 0..2 {
                    poller
                        .wait(&mut ready, false)
                        .expect("cannot wait for descriptors");
                }
                let kept = rustix::io::write(&other, &[1]);
                assert_eq!(
                    kept,
                    Err(Errno::PIPE),
                    "{kind:?}, signals {signals:#b}: the poller still holds the removed descriptor"
                );
            }
        }
    }

    /// The number of simultaneous signals, 1,000, is more than epoll or io_uring reports in one
    /// call.
    #[test]
    fn a_thousand_simultaneous_eventfd_signals_are_all_reported() {
        for (kind, poller) in pollers() {
            let all: Vec<_> = (0..1000).map(|_| descriptor()).collect();
            for (token, fd) in all.iter().enumerate() {
                poller
                    .add(fd, token as u64)
                    .expect("cannot watch the eventfd");
            }
            for _ in 0..3 {
                let mut seen = std::collections::BTreeSet::new();
                all.iter().for_each(|fd| signal(fd));
                while seen.len() < all.len() {
                    let ready = poll_for(&*poller, LONG);
                    assert!(
                        !ready.is_empty(),
                        "{kind:?} reported only {} of 1000 eventfds",
                        seen.len()
                    );
                    ready
                        .iter()
                        .for_each(|token| consume(&all[*token as usize]));
                    seen.extend(ready);
                }
            }
        }
    }
}
