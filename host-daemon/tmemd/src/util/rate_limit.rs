// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limit: a burst, and after it a constant rate. The generic cell rate algorithm needs one
//! number for it and no lock.
//!
//! Out of scope: the limited action itself, and what happens to an action beyond the rate.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time that counts as 0 for the rate limits that do not use the daemon's clock.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Converts a time to nanoseconds since [`START`]; earlier times are 0.
pub(crate) fn since_start_ns(now: Instant) -> u64 {
    now.saturating_duration_since(*START).as_nanos() as u64
}

/// A rate limit. A new value admits a complete burst.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    /// Time in ns at which all admitted work would be done at the permitted rate.
    through_ns: AtomicU64,
}

impl RateLimit {
    pub(crate) const fn new() -> RateLimit {
        RateLimit {
            through_ns: AtomicU64::new(0),
        }
    }

    /// Counts work that takes `cost_ns` at the permitted rate. Returns false, and counts nothing,
    /// if the work admitted so far takes `burst_ns` or longer from now on. Work that begins within
    /// the rate is admitted completely.
    pub(crate) fn admit(&self, now_ns: u64, cost_ns: u64, burst_ns: u64) -> bool {
        let admitted = |through_ns: u64| {
            let from_ns = through_ns.max(now_ns);
            (from_ns - now_ns < burst_ns).then(|| from_ns.saturating_add(cost_ns))
        };
        let order = Ordering::Relaxed;
        self.through_ns.fetch_update(order, order, admitted).is_ok()
    }

    /// Admits one of `burst` actions at once, and one in each `period` after them.
    pub(crate) fn take(&self, now_ns: u64, burst: u32, period: Duration) -> bool {
        let period_ns = period.as_nanos() as u64;
        self.admit(now_ns, period_ns, period_ns * u64::from(burst))
    }

    /// Takes back the cost of an admitted action that was not carried out, so that it no longer
    /// counts.
    pub(crate) fn give_back(&self, cost: Duration) {
        let cost_ns = cost.as_nanos() as u64;
        self.through_ns.fetch_sub(cost_ns, Ordering::Relaxed);
    }
}
