// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Token bucket: a burst, and after it one token per period.
//!
//! Out of scope: the action that needs a token, and its handling without one.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A token bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    burst: u32,
    period: Duration,
    /// Guards the tokens that are spent, and when the last one was earned back. Leaf lock.
    state: Mutex<(u32, Option<Instant>)>,
}

impl Bucket {
    /// Creates a full bucket. The period is a whole number of seconds.
    pub(crate) const fn new(burst: u32, period: Duration) -> Bucket {
        Bucket {
            burst,
            period,
            state: Mutex::new((0, None)),
        }
    }

    /// Takes a token. Returns false if there is none.
    pub(crate) fn take(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (spent, earned) = &mut *state;
        let since = earned.get_or_insert(now);
        let back = now.saturating_duration_since(*since).as_secs() / self.period.as_secs();
        if back > 0 {
            *spent = spent.saturating_sub(u32::try_from(back).unwrap_or(u32::MAX));
            *since = now;
        }
        let admitted = *spent < self.burst;
        *spent += u32::from(admitted);
        admitted
    }

    /// Returns a token that was not used.
    pub(crate) fn give_back(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = state.0.saturating_sub(1);
    }
}
