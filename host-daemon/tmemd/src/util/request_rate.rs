// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How many pages a VM may ask for in a second, if its host's operator says.
//!
//! Turns are fair among VMs, but what one VM asks for while nobody else wants anything is bounded by the
//! workers alone. Beyond its rate a VM is answered at once and gets nothing: pages are refused and missed,
//! which costs a tenth of what storing them does. Never here: waiting. A guest that is slowed down by a
//! host that lets it wait takes the wait for a fault of the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a VM may ask for at once after it was quiet: a second's pages, so that a file is read at full speed
/// by a guest that does so now and then.
const BURST_NS: u64 = 1_000_000_000;

/// The rate of a VM.
#[derive(Debug, Default)]
pub struct RequestRate {
    /// Pages in a second, the same for all VMs; 0: as many as it likes.
    per_second: Arc<AtomicU64>,
    /// By the daemon's clock, when all that it asked for would be through at that rate.
    through_ns: AtomicU64,
}

impl RequestRate {
    /// Of a VM that was quiet.
    pub fn new(per_second: &Arc<AtomicU64>) -> RequestRate {
        RequestRate {
            per_second: per_second.clone(),
            through_ns: AtomicU64::new(0),
        }
    }

    /// Whether it may have so many pages now, which are then counted. A request that begins within the rate
    /// is within it whole, so that some always are.
    pub fn admit(&self, now_ns: u64, pages: u32) -> bool {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return true;
        }
        let time_ns = u64::from(pages).saturating_mul(1_000_000_000) / per_second;
        let admitted = |through_ns: u64| {
            let from_ns = through_ns.max(now_ns);
            (from_ns - now_ns < BURST_NS).then(|| from_ns.saturating_add(time_ns))
        };
        let order = Ordering::Relaxed;
        self.through_ns.fetch_update(order, order, admitted).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Pages of requests of `batch` that are admitted at each of these times, of 10,000 asked for.
    fn admitted(rate: &RequestRate, batch: u32, times: &[u64]) -> Vec<u32> {
        let at = |now: &u64| {
            let requests = (0..10_000 / batch).filter(|_| rate.admit(*now, batch));
            requests.count() as u32 * batch
        };
        times.iter().map(at).collect()
    }

    #[test]
    fn as_many_as_it_says_and_a_second_at_once() {
        let per_second = Arc::new(AtomicU64::new(1000));
        let times = [5 * SECOND, 5 * SECOND, 5 * SECOND + SECOND / 2, 9 * SECOND];
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 1, &times), [1000, 0, 500, 1000]);
        // The last of them begins within the rate.
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &times), [1024, 0, 512, 1024]);
        // Slower than a batch a second: one now and then.
        per_second.store(1, Ordering::Relaxed);
        let rate = RequestRate::new(&per_second);
        let times = [SECOND, 2 * SECOND, 63 * SECOND, 65 * SECOND];
        assert_eq!(admitted(&rate, 64, &times), [64, 0, 0, 64]);
    }

    #[test]
    fn without_a_rate_all_are() {
        let rate = RequestRate::default();
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        // And whatever is said, nothing overflows.
        let per_second = Arc::new(AtomicU64::new(u64::MAX));
        let rate = RequestRate::new(&per_second);
        assert_eq!(admitted(&rate, 64, &[0, u64::MAX]), [9984, 9984]);
        per_second.store(1, Ordering::Relaxed);
        assert!(rate.admit(u64::MAX, u32::MAX) && !rate.admit(0, 1));
    }
}
