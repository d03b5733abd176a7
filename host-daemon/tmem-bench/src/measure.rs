// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times of operations that are measured alternately, their medians, and ratios with confidence
//! intervals.

use rustix::time::{ClockId, clock_gettime};

/// Returns the processor time of this thread in nanoseconds. The time of other threads does not
/// count, although they can slow this thread by using the processor's caches.
pub fn cpu_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Times of one operation in nanoseconds per page, one value for each round.
#[derive(Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Runs the operation once, for `pages` pages, and adds its time.
    pub fn time<R>(&mut self, pages: usize, what: impl FnOnce() -> R) -> R {
        let since = cpu_ns();
        let result = what();
        self.push((cpu_ns() - since) / pages as f64);
        result
    }

    /// Adds the time of a round in nanoseconds per page.
    pub fn push(&mut self, ns_per_page: f64) {
        self.0.push(ns_per_page);
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the ratio of the medians of two operations. It suits operations that were not
    /// measured equally often.
    pub fn medians_by(&self, other: &Samples) -> Ratio {
        let (own, other) = (Ratio::of(self.0.clone()), Ratio::of(other.0.clone()));
        Ratio {
            value: own.value / other.value,
            low: own.low / other.high,
            high: own.high / other.low,
        }
    }

    /// Returns the value of the latest round.
    pub fn last(&self) -> f64 {
        *self.0.last().expect("no round was measured before last()")
    }

    /// Returns the median.
    pub fn median(&self) -> f64 {
        Ratio::of(self.0.clone()).value
    }

    /// Returns the ratio to another operation: the median of the ratios of all rounds. Both
    /// operations were measured in each round.
    pub fn ratio_to(&self, other: &Samples) -> Ratio {
        Ratio::of(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

/// The median of the ratios of all rounds, with its 95 % confidence interval.
#[derive(Clone, Copy, Debug)]
pub struct Ratio {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

impl Ratio {
    /// Returns a ratio without a confidence interval, for a value that is counted and not timed.
    pub fn exact(value: f64) -> Ratio {
        Ratio {
            value,
            low: value,
            high: value,
        }
    }

    /// Returns the median of values. Its interval is that of order statistics, which assumes
    /// nothing about the distribution of the values.
    pub fn of(mut values: Vec<f64>) -> Ratio {
        values.sort_by(f64::total_cmp);
        let len = values.len();
        let middle = (values[(len - 1) / 2] + values[len / 2]) / 2.0;
        // Normal approximation of the binomial distribution: 1.96 standard deviations of sqrt(n) /
        // 2.
        let half = 0.98 * (len as f64).sqrt();
        let low = (len as f64 / 2.0 - half).floor().max(0.0) as usize;
        let high = (len as f64 / 2.0 + half).ceil().min(len as f64 - 1.0) as usize;
        Ratio {
            value: middle,
            low: values[low],
            high: values[high],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_the_median_with_a_confidence_interval() {
        let ratio = Ratio::of((1..=101).rev().map(f64::from).collect());
        assert_eq!((ratio.value, ratio.low, ratio.high), (51.0, 41.0, 62.0));
        let few = Ratio::of(vec![3.0, 1.0]);
        assert_eq!((few.value, few.low, few.high), (2.0, 1.0, 3.0));
    }
}
