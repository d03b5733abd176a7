// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Heartbeats, which show whether the threads that VMs need make progress.
//!
//! A thread increments the counter of its heartbeat at the beginning of every bounded piece of
//! work. It marks itself as resting before it waits for another thread or process, or does work
//! without a bound (such as unmapping a terabyte). A resting thread is not checked. So an idle
//! daemon does not count as hung, and neither does a thread that waits for the rest of a front
//! end's message. Incrementing the counter is cheap: it writes a word of memory that no other
//! thread writes. Out of scope: the reaction to a thread that hangs, see `watchdog.rs`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of consecutive checks that must find a thread at the same piece of work before the thread
/// counts as hung, unless it has a limit of its own. The limit is a number of checks instead of a
/// time. While the complete daemon is
/// stopped, time passes, but no check is made.
pub const MISSED_CHECKS_MAX: u32 = 4;

/// Value of a heartbeat's counter after its thread has ended normally.
const ENDED: u64 = u64::MAX;

/// The heartbeats of a daemon's threads.
#[derive(Default)]
pub struct Heartbeats {
    /// Guards the list of heartbeats with the results of earlier checks. Leaf lock.
    watched: Mutex<Vec<Watched>>,
}

struct Watched {
    name: String,
    beats: Arc<AtomicU64>,
    /// Value of the heartbeat's counter at the last check.
    seen: u64,
    /// Number of consecutive checks that found the thread at the same piece of work.
    missed_checks: u32,
    /// Number of such checks from which the thread counts as hung.
    missed_checks_max: u32,
}

/// Heartbeat of one thread, with which the thread shows that it makes progress.
pub struct Heartbeat {
    /// Counter of the thread's progress. It is odd while the thread works, with another value for
    /// each piece of work, and even while the thread rests.
    beats: Arc<AtomicU64>,
}

impl Heartbeats {
    /// Registers the heartbeat of a thread for the checks. The thread rests at first.
    pub fn register(&self, name: &str) -> Heartbeat {
        self.register_patient(name, MISSED_CHECKS_MAX)
    }

    /// Registers the heartbeat of a thread whose pieces of work may take long. The thread counts as
    /// hung after `missed_checks_max` checks instead of [`MISSED_CHECKS_MAX`].
    pub fn register_patient(&self, name: &str, missed_checks_max: u32) -> Heartbeat {
        let beats = Arc::new(AtomicU64::new(0));
        self.lock().push(Watched {
            name: name.into(),
            beats: beats.clone(),
            seen: 0,
            missed_checks: 0,
            missed_checks_max,
        });
        Heartbeat { beats }
    }

    /// Checks the heartbeats of all threads. Returns the names of the threads that hang.
    pub fn check(&self) -> Vec<String> {
        let mut watched = self.lock();
        watched.retain(|one| one.beats.load(Ordering::Relaxed) != ENDED);
        let mut hang = Vec::new();
        for one in watched.iter_mut() {
            let beats = one.beats.load(Ordering::Relaxed);
            one.missed_checks = match beats == one.seen && beats % 2 == 1 {
                true => one.missed_checks.saturating_add(1),
                false => 0,
            };
            one.seen = beats;
            if one.missed_checks >= one.missed_checks_max {
                hang.push(one.name.clone());
            }
        }
        hang
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heartbeat {
    /// Marks the thread as working. The thread calls this at the beginning of each bounded piece of
    /// work.
    pub fn work(&self) {
        let beats = self.beats.load(Ordering::Relaxed);
        self.beats.store((beats | 1) + 2, Ordering::Relaxed);
    }

    /// Marks the thread as resting. The thread calls this before it waits for another thread or
    /// process, or begins work without a bound.
    pub fn rest(&self) {
        let beats = self.beats.load(Ordering::Relaxed);
        self.beats.store((beats + 1) & !1, Ordering::Relaxed);
    }

    /// Makes the thread count as hung for ever. A thread that VMs need calls this function when it
    /// must end because of an error.
    pub fn lose(self) {
        self.work();
        std::mem::forget(self);
    }
}

impl Drop for Heartbeat {
    /// Ends the heartbeat when its thread drops it. A thread that panics counts as hung. Any other
    /// thread that drops its heartbeat has ended normally.
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.work(),
            false => self.beats.store(ENDED, Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(heartbeats: &Heartbeats, times: u32) -> Vec<String> {
        (0..times)
            .map(|_| heartbeats.check())
            .last()
            .unwrap_or_default()
    }

    #[test]
    fn a_thread_without_progress_counts_as_hung() {
        let heartbeats = Heartbeats::default();
        let (one, other) = (heartbeats.register("one"), heartbeats.register("other"));
        one.work();
        for _ in 0..2 * MISSED_CHECKS_MAX {
            other.work();
            let hang = heartbeats.check();
            other.rest();
            assert!(
                hang.is_empty() || hang == ["one"],
                "a thread other than \"one\" was reported as hung: {hang:?}"
            );
        }
        assert_eq!(heartbeats.check(), ["one"]);
        one.work();
        assert!(
            heartbeats.check().is_empty(),
            "a thread that made progress again was reported as hung"
        );
        assert_eq!(checks(&heartbeats, MISSED_CHECKS_MAX), ["one"]);
    }

    #[test]
    fn a_patient_thread_counts_as_hung_later() {
        let heartbeats = Heartbeats::default();
        let heartbeat = heartbeats.register_patient("patient", 3 * MISSED_CHECKS_MAX);
        heartbeat.work();
        assert!(checks(&heartbeats, 3 * MISSED_CHECKS_MAX).is_empty());
        assert_eq!(checks(&heartbeats, 1), ["patient"]);
    }

    #[test]
    fn a_resting_thread_does_not_count_as_hung() {
        let heartbeats = Heartbeats::default();
        let heartbeat = heartbeats.register("idle");
        assert!(
            checks(&heartbeats, 3 * MISSED_CHECKS_MAX).is_empty(),
            "a thread that never began to work was reported as hung"
        );
        heartbeat.work();
        heartbeat.rest();
        heartbeat.rest();
        assert!(checks(&heartbeats, 3 * MISSED_CHECKS_MAX).is_empty());
    }

    #[test]
    fn a_thread_with_progress_does_not_count_as_hung() {
        let heartbeats = Heartbeats::default();
        let heartbeat = heartbeats.register("busy");
        for _ in 0..3 * MISSED_CHECKS_MAX {
            heartbeat.work();
            assert!(checks(&heartbeats, MISSED_CHECKS_MAX).is_empty());
        }
        // After a rest, the thread works on another piece of work. The missed checks are therefore
        // counted from 0 again.
        heartbeat.rest();
        heartbeat.work();
        assert!(checks(&heartbeats, MISSED_CHECKS_MAX).is_empty());
    }

    #[test]
    fn a_panicked_thread_counts_as_hung_and_an_ended_thread_does_not() {
        let heartbeats = Arc::new(Heartbeats::default());
        for panics in [false, true] {
            let heartbeat = heartbeats.register("thread");
            let thread = std::thread::spawn(move || {
                heartbeat.rest();
                assert!(!panics, "a simulated bug");
            });
            assert_eq!(thread.join().is_err(), panics);
            let hang = checks(&heartbeats, 1 + MISSED_CHECKS_MAX);
            assert_eq!(
                hang.len(),
                usize::from(panics),
                "hung threads are {hang:?}; the thread must be among them exactly if it panicked \
                 ({panics})"
            );
        }
        heartbeats.register("given up").lose();
        assert_eq!(checks(&heartbeats, 1 + MISSED_CHECKS_MAX).len(), 2);
    }
}
