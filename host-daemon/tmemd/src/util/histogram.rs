// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Latency histogram whose bucket bounds double from bucket to bucket. Measuring costs two reads of
//! the clock for each request.
//!
//! Out of scope: an unbounded number of buckets, and bucket bounds that a guest chooses.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of buckets. The first bucket counts times below 1 µs. The upper bounds of the next
/// buckets are 2, 4, … 16,384 µs. The largest bound is longer than a drain (answering a queue's
/// requests before its memory changes) may take. The last bucket counts all longer times.
pub const BUCKETS: usize = 16;

/// Latency histogram that any thread may update.
#[derive(Debug, Default)]
pub struct Histogram {
    sum_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    /// Counts one request that took `time`.
    pub fn count(&self, time: Duration) {
        let us = time.as_micros() as u64;
        let bucket = (u64::BITS - us.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// Returns the sum and the buckets in the form of the control interface.
    pub fn read(&self) -> tmem_control::Histogram {
        let int = |number: &AtomicU64| i64::try_from(number.load(Relaxed)).unwrap_or(i64::MAX);
        tmem_control::Histogram {
            sum_ns: int(&self.sum_ns),
            buckets: self.buckets.iter().map(int).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_counted_in_the_bucket_of_its_range() {
        for (ns, bucket) in [
            (0, 0),
            (999, 0),
            (1_000, 1),
            (1_999, 1),
            (2_000, 2),
            (3_999, 2),
            (4_000, 3),
            (16_383_999, 14),
            (16_384_000, 15),
            (u64::MAX, 15),
        ] {
            let histogram = Histogram::default();
            histogram.count(Duration::from_nanos(ns));
            let read = histogram.read();
            let mut wanted = vec![0; BUCKETS];
            wanted[bucket] = 1;
            assert_eq!(
                read.buckets, wanted,
                "a latency of {ns} ns was counted in the wrong bucket"
            );
            assert_eq!(read.sum_ns, i64::try_from(ns).unwrap_or(i64::MAX));
        }
    }
}
