// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times of things done by turns, their medians, and ratios with intervals.

use rustix::time::{ClockId, clock_gettime};

/// Processor time of this thread, in nanoseconds: what else runs on the machine takes caches from
/// it, but not its turns.
pub fn cpu_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Nanoseconds a page of one thing, a value for each round.
#[derive(Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Does it once, for so many pages.
    pub fn time<R>(&mut self, pages: usize, what: impl FnOnce() -> R) -> R {
        let since = cpu_ns();
        let result = what();
        self.push((cpu_ns() - since) / pages as f64);
        result
    }

    /// A round's value.
    pub fn push(&mut self, ns_per_page: f64) {
        self.0.push(ns_per_page);
    }

    /// Nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Median by median, for things that were not measured as often.
    pub fn medians_by(&self, other: &Samples) -> Ratio {
        let (own, other) = (Ratio::of(self.0.clone()), Ratio::of(other.0.clone()));
        Ratio {
            value: own.value / other.value,
            low: own.low / other.high,
            high: own.high / other.low,
        }
    }

    /// Of the latest round.
    pub fn last(&self) -> f64 {
        *self.0.last().expect("it was measured")
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        Ratio::of(self.0.clone()).value
    }

    /// Each round's against that of another thing in the same round.
    pub fn ratio_to(&self, other: &Samples) -> Ratio {
        Ratio::of(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

/// The median of the ratios of all rounds, and where it lies with 95 % confidence.
#[derive(Clone, Copy, Debug)]
pub struct Ratio {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

impl Ratio {
    /// Something that is counted, not timed: it is the same each time.
    pub fn exact(value: f64) -> Ratio {
        Ratio {
            value,
            low: value,
            high: value,
        }
    }

    /// The interval is that of order statistics, which assumes nothing of how values are spread.
    pub fn of(mut values: Vec<f64>) -> Ratio {
        values.sort_by(f64::total_cmp);
        let len = values.len();
        let middle = (values[(len - 1) / 2] + values[len / 2]) / 2.0;
        // Normal approximation of the binomial one: 1.96 standard deviations of sqrt(n) / 2.
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
    fn median_and_interval() {
        let ratio = Ratio::of((1..=101).rev().map(f64::from).collect());
        assert_eq!((ratio.value, ratio.low, ratio.high), (51.0, 41.0, 62.0));
        let few = Ratio::of(vec![3.0, 1.0]);
        assert_eq!((few.value, few.low, few.high), (2.0, 1.0, 3.0));
    }
}
