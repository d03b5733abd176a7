// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adaptive polling: how long a worker polls an empty vring before it requests a kick.
//!
//! A kick and the wake-up of the worker after it take longer than most requests, so polling pays if
//! the driver sends its next request soon. The last pause between two requests predicts the next
//! pause. If the pause before the last request was shorter than the bound (`poll_max`), the vring
//! is polled for up to the bound; otherwise it is not polled. A quiet or slow driver therefore
//! costs polling time only once, and no pause costs more than the bound. Out of scope: which vrings
//! are polled, see `worker.rs`.

/// Decides whether a worker polls one empty vring.
#[derive(Debug, Default)]
pub struct Polling {
    /// Time in ns at which the vring became empty; None while it contains requests.
    empty_since_ns: Option<u64>,
    /// Whether the last pause between two requests was shorter than the bound. If so, the next
    /// pause is expected to be short, too, and the worker polls the vring.
    expects_short_pause: bool,
}

impl Polling {
    /// Records that the vring is empty. Returns the time in ns until which the worker shall poll
    /// the vring; None if the worker shall request a kick instead.
    pub fn record_empty(&mut self, now_ns: u64, max_ns: u64) -> Option<u64> {
        let since_ns = *self.empty_since_ns.get_or_insert(now_ns);
        let until_ns = since_ns.saturating_add(max_ns);
        (self.expects_short_pause && now_ns < until_ns).then_some(until_ns)
    }

    /// Records that the vring contains a request.
    pub fn record_request(&mut self, now_ns: u64, max_ns: u64) {
        if let Some(since_ns) = self.empty_since_ns.take() {
            self.expects_short_pause = now_ns.saturating_sub(since_ns) < max_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50;

    #[test]
    fn a_ring_is_polled_after_a_pause_shorter_than_the_poll_limit() {
        let mut polling = Polling::default();
        assert_eq!(
            polling.record_empty(1000, MAX),
            None,
            "the ring was polled before any pause was measured"
        );
        polling.record_request(1000 + MAX - 1, MAX);
        assert_eq!(polling.record_empty(2000, MAX), Some(2000 + MAX));
        assert_eq!(
            polling.record_empty(2000 + MAX - 1, MAX),
            Some(2000 + MAX),
            "the poll does not end MAX ns after its beginning"
        );
        assert_eq!(
            polling.record_empty(2000 + MAX, MAX),
            None,
            "the poll did not end after MAX ns"
        );
        assert_eq!(polling.record_empty(9000, MAX), None);
        polling.record_request(9000, MAX);
        assert_eq!(
            polling.record_empty(9000, MAX),
            None,
            "the ring was polled after a pause longer than the limit"
        );
        polling.record_request(9000, MAX);
        assert_eq!(polling.record_empty(9010, MAX), Some(9010 + MAX));
        // Requests that arrive before the vring is found empty again do not change the prediction.
        polling.record_request(9020, MAX);
        polling.record_request(9900, MAX);
        assert_eq!(polling.record_empty(9900, MAX), Some(9900 + MAX));
    }

    #[test]
    fn a_poll_limit_of_0_disables_polling() {
        let mut polling = Polling::default();
        for now in 0..9 {
            assert_eq!(polling.record_empty(now, 0), None);
            polling.record_request(now, 0);
        }
    }
}
