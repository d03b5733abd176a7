// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limit that permits a burst of actions, and after the burst a constant rate. The generic
//! cell rate algorithm stores one number per limit and needs no lock.
//!
//! Out of scope: the limited action itself, and the treatment of an action beyond the rate.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Start of the time scale in ns for rate limits that do not use the daemon's clock.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Converts a time to nanoseconds since [`START`]. Returns 0 for a time before `START`.
pub(crate) fn since_start_ns(now: Instant) -> u64 {
    now.saturating_duration_since(*START).as_nanos() as u64
}

/// Rate limit of one kind of action. A new limit admits a complete burst at once.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    /// Time in ns at which all work admitted so far would be done, if it were done at the permitted
    /// rate.
    through_ns: AtomicU64,
}

impl RateLimit {
    pub(crate) const fn new() -> RateLimit {
        RateLimit {
            through_ns: AtomicU64::new(0),
        }
    }

    /// Admits work that takes `cost_ns` at the permitted rate. Returns false, and counts nothing,
    /// if the work admitted earlier still takes `burst_ns` or longer from now on. Work that begins
    /// within the limit is admitted completely, even if it ends beyond the limit.
    pub(crate) fn admit(&self, now_ns: u64, cost_ns: u64, burst_ns: u64) -> bool {
        let admitted = |through_ns: u64| {
            let from_ns = through_ns.max(now_ns);
            (from_ns - now_ns < burst_ns).then(|| from_ns.saturating_add(cost_ns))
        };
        let order = Ordering::Relaxed;
        self.through_ns.fetch_update(order, order, admitted).is_ok()
    }

    /// Admits one of the first `burst` actions, and after the burst one action in each `period`.
    /// Returns true if the action is admitted.
    pub(crate) fn take(&self, now_ns: u64, burst: u32, period: Duration) -> bool {
        let period_ns = period.as_nanos() as u64;
        self.admit(now_ns, period_ns, period_ns * u64::from(burst))
    }

    /// Takes back the cost of an action that was admitted but not carried out.
    pub(crate) fn refund(&self, cost: Duration) {
        let cost_ns = cost.as_nanos() as u64;
        self.through_ns.fetch_sub(cost_ns, Ordering::Relaxed);
    }
}
