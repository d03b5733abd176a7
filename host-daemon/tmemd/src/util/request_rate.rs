// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limit of a VM in pages per second, if the operator sets one.
//!
//! Slices share the workers fairly among VMs, but a single VM may use all of them if no other VM
//! needs them. A request beyond the rate is answered at once: its pages are refused or missed,
//! which costs a tenth of storing them. Out of scope: delaying a request, because a guest would
//! take a delay for a fault of the device.

use crate::util::rate_limit::RateLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Burst of a VM that sent few requests before: the pages of one second, in ns. So a guest that
/// reads a file now and then reads it at full speed.
const BURST_NS: u64 = 1_000_000_000;

/// The rate limit of a VM.
#[derive(Debug, Default)]
pub struct RequestRate {
    /// Pages per second, the same for all VMs; 0 for no limit.
    per_second: Arc<AtomicU64>,
    /// Rate limit on the pages of the VM. Its times are those of the daemon's clock.
    limit: RateLimit,
}

impl RequestRate {
    /// Creates the rate limit of a VM that sent no request yet.
    pub fn new(per_second: &Arc<AtomicU64>) -> RequestRate {
        RequestRate {
            per_second: per_second.clone(),
            limit: RateLimit::new(),
        }
    }

    /// Counts the pages of a request. Returns false if the request exceeds the rate. A request that
    /// begins within the rate is admitted completely. Otherwise a request with more pages than the
    /// burst would never be admitted.
    pub fn admit(&self, now_ns: u64, pages: u32) -> bool {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return true;
        }
        let time_ns = u64::from(pages).saturating_mul(1_000_000_000) / per_second;
        self.limit.admit(now_ns, time_ns, BURST_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Requests 10,000 pages in batches of `batch` at each of the given times. Returns how many of
    /// them are admitted at each time.
    fn admitted(rate: &RequestRate, batch: u32, times: &[u64]) -> Vec<u32> {
        let at = |now: &u64| {
            let requests = (0..10_000 / batch).filter(|_| rate.admit(*now, batch));
            requests.count() as u32 * batch
        };
        times.iter().map(at).collect()
    }

    #[test]
    fn the_rate_holds_with_a_burst_of_one_second() {
        let per_second = Arc::new(AtomicU64::new(1000));
        let times = [5 * SECOND, 5 * SECOND, 5 * SECOND + SECOND / 2, 9 * SECOND];
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 1, &times), [1000, 0, 500, 1000]);
        // The last batch begins within the rate and is admitted completely.
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &times), [1024, 0, 512, 1024]);
        // With a rate below one batch per second, some batches are admitted.
        per_second.store(1, Ordering::Relaxed);
        let rate = RequestRate::new(&per_second);
        let times = [SECOND, 2 * SECOND, 63 * SECOND, 65 * SECOND];
        assert_eq!(admitted(&rate, 64, &times), [64, 0, 0, 64]);
    }

    #[test]
    fn without_a_rate_all_requests_are_admitted() {
        let rate = RequestRate::default();
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        // Extreme values do not overflow.
        let per_second = Arc::new(AtomicU64::new(u64::MAX));
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        per_second.store(1, Ordering::Relaxed);
        assert!(rate.admit(u64::MAX, u32::MAX) && !rate.admit(0, 1));
    }
}
