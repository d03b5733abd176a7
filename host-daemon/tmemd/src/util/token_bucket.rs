// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How often something may happen: so many times at once, and after them once for each period.
//!
//! Never here: what, and what becomes of the times that are too many.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Times that it may happen.
#[derive(Debug)]
pub(crate) struct Bucket {
    burst: u32,
    period: Duration,
    /// Guards (times spent of the burst, when the last was earned back). Taken last.
    state: Mutex<(u32, Option<Instant>)>,
}

impl Bucket {
    /// A full one. A period is a whole number of seconds.
    pub(crate) const fn new(burst: u32, period: Duration) -> Bucket {
        Bucket {
            burst,
            period,
            state: Mutex::new((0, None)),
        }
    }

    /// Whether it may happen now, which is then counted.
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

    /// It did not happen.
    pub(crate) fn give_back(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = state.0.saturating_sub(1);
    }
}
