// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limit on the pages per second that a VM may put, get or flush, if the operator sets one
//! (`vm_pages_per_second`).
//!
//! Scheduling slices share the workers fairly among VMs, but a single VM may use all workers while
//! no other VM needs them. The daemon answers a request beyond the rate at once: it refuses or
//! misses the request's pages, which costs a tenth of storing them. Out of scope: delaying a
//! request, because a guest would take a delay for a fault of the device.

use crate::util::rate_limit::RateLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Burst that a VM may use after a pause, in ns: as many pages as the rate permits in one second. A
/// guest that reads a file only now and then can therefore read it at full speed.
const BURST_NS: u64 = 1_000_000_000;

/// Rate limit of one VM's requests.
#[derive(Debug, Default)]
pub struct RequestRate {
    /// Permitted rate in pages per second; 0 for no limit. All VMs share this number.
    per_second: Arc<AtomicU64>,
    /// Limit that counts the pages of this VM. Its times are those of the daemon's clock.
    limit: RateLimit,
}

impl RequestRate {
    /// Creates the rate limit of a VM that has sent no request yet.
    pub fn new(per_second: &Arc<AtomicU64>) -> RequestRate {
        RequestRate {
            per_second: per_second.clone(),
            limit: RateLimit::new(),
        }
    }

    /// Counts the pages of a request. Returns false, and counts nothing, if the request exceeds the
    /// rate. A request that begins within the rate is admitted completely, because otherwise a
    /// request with more pages than the burst would never be admitted.
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

    /// Tries to admit 10,000 pages, in batches of `batch` pages, at each time of `times`. Returns
    /// the number of pages that are admitted at each time.
    fn admitted(rate: &RequestRate, batch: u32, times: &[u64]) -> Vec<u32> {
        let at = |now: &u64| {
            let requests = (0..10_000 / batch).filter(|_| rate.admit(*now, batch));
            requests.count() as u32 * batch
        };
        times.iter().map(at).collect()
    }

    #[test]
    fn the_rate_limit_allows_a_burst_of_one_second_and_then_the_rate() {
        let per_second = Arc::new(AtomicU64::new(1000));
        let times = [5 * SECOND, 5 * SECOND, 5 * SECOND + SECOND / 2, 9 * SECOND];
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 1, &times), [1000, 0, 500, 1000]);
        // The last batch of a burst begins within the rate and is admitted completely. The burst
        // therefore has 1,024 instead of 1,000 pages.
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &times), [1024, 0, 512, 1024]);
        // A batch is admitted even if it has more pages than the rate permits in a second.
        per_second.store(1, Ordering::Relaxed);
        let rate = RequestRate::new(&per_second);
        let times = [SECOND, 2 * SECOND, 63 * SECOND, 65 * SECOND];
        assert_eq!(admitted(&rate, 64, &times), [64, 0, 0, 64]);
    }

    #[test]
    fn all_requests_are_admitted_without_a_rate_limit() {
        let rate = RequestRate::default();
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        // Extreme rates and times cause no arithmetic overflow.
        let per_second = Arc::new(AtomicU64::new(u64::MAX));
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        per_second.store(1, Ordering::Relaxed);
        assert!(rate.admit(u64::MAX, u32::MAX) && !rate.admit(0, 1));
    }
}
