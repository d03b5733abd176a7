// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times of operations that a benchmark measures alternately, their medians, and ratios with
//! confidence intervals.

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
    /// Runs the operation `what` once, for `pages` pages, and adds its processor time per page.
    pub fn time<R>(&mut self, pages: usize, what: impl FnOnce() -> R) -> R {
        let since = cpu_ns();
        let result = what();
        self.push((cpu_ns() - since) / pages as f64);
        result
    }

    /// Adds the time that the operation took in one round, in nanoseconds per page.
    pub fn push(&mut self, ns_per_page: f64) {
        self.0.push(ns_per_page);
    }

    /// Returns whether no time has been added.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the median time of this operation, divided by the median time of the operation
    /// `other`. The operations need not have been measured equally often.
    pub fn medians_by(&self, other: &Samples) -> Ratio {
        let (mut own, mut others) = (Vec::new(), Vec::new());
        Ratio::bootstrap(|pick| {
            pick.sample(&self.0, &mut own);
            pick.sample(&other.0, &mut others);
            median(&mut own) / median(&mut others)
        })
    }

    /// Returns the time of the latest round in nanoseconds per page.
    pub fn last(&self) -> f64 {
        *self.0.last().expect("no round was measured before last()")
    }

    /// Returns the median time in nanoseconds per page.
    pub fn median(&self) -> f64 {
        self.median_with_interval().value
    }

    /// Returns the median of all rounds, with its bootstrap interval.
    pub fn median_with_interval(&self) -> Ratio {
        Ratio::of(self.0.clone())
    }

    /// Returns the median over all rounds of the time of this operation, divided by that of the
    /// operation `other`. Each round must have measured both operations.
    pub fn ratio_to(&self, other: &Samples) -> Ratio {
        Ratio::of(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

/// A ratio of times, usually the median of the ratios of all rounds, with its 95 % confidence
/// interval.
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

    /// Returns the median of the values, with its bootstrap interval.
    pub fn of(values: Vec<f64>) -> Ratio {
        let mut drawn = Vec::new();
        Ratio::bootstrap(|pick| {
            pick.sample(&values, &mut drawn);
            median(&mut drawn)
        })
    }

    /// Computes a statistic of samples and its bootstrap interval (percentile method of Efron and
    /// Tibshirani). The function `statistic` takes its samples through the given [`Pick`], which
    /// returns the samples themselves in the first call and resamples in all other calls. The
    /// interval assumes nothing about the distribution of the samples except that they are
    /// independent.
    pub fn bootstrap(mut statistic: impl FnMut(&mut Pick) -> f64) -> Ratio {
        let value = statistic(&mut Pick(None));
        let mut pick = Pick(Some(fastrand::Rng::with_seed(1)));
        let mut resampled: Vec<f64> = (0..RESAMPLES).map(|_| statistic(&mut pick)).collect();
        resampled.sort_by(f64::total_cmp);
        let tail = (RESAMPLES as f64 * (1.0 - CONFIDENCE) / 2.0) as usize;
        Ratio {
            value,
            low: resampled[tail],
            high: resampled[RESAMPLES - 1 - tail],
        }
    }
}

/// Number of resamples of a bootstrap. With 1,000 resamples, 25 lie beyond each end of the
/// interval.
const RESAMPLES: usize = 1000;

/// Confidence level of all confidence intervals.
const CONFIDENCE: f64 = 0.95;

/// Source of the samples for one evaluation of a bootstrapped statistic. With None, it returns all
/// samples as they are; with a random generator, it resamples.
pub struct Pick(Option<fastrand::Rng>);

impl Pick {
    /// Fills `drawn` with `samples.len()` samples, drawn at random with replacement. In the first
    /// evaluation of the statistic, copies the samples as they are.
    pub fn sample<T: Clone>(&mut self, samples: &[T], drawn: &mut Vec<T>) {
        drawn.clear();
        match &mut self.0 {
            None => drawn.extend_from_slice(samples),
            Some(rng) => {
                drawn.extend(
                    samples
                        .iter()
                        .map(|_| samples[rng.usize(..samples.len())].clone()),
                );
            }
        }
    }
}

/// Returns the median of the values, and changes their order in the slice.
fn median(values: &mut [f64]) -> f64 {
    let odd = !values.len().is_multiple_of(2);
    let (below, &mut upper, _) = values.select_nth_unstable_by(values.len() / 2, f64::total_cmp);
    let lower = below.iter().copied().max_by(f64::total_cmp);
    match lower {
        Some(lower) if !odd => (lower + upper) / 2.0,
        _ => upper,
    }
}

/// Returns the smallest value that at least the share `part` (0 to 1) of all values do not exceed.
/// Changes the order of the values in the slice.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    let nth = (values.len() as f64 * part).ceil() as usize;
    *values
        .select_nth_unstable_by(nth.max(1) - 1, f64::total_cmp)
        .1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_a_median_with_a_bootstrap_interval() {
        let ratio = Ratio::of((1..=101).rev().map(f64::from).collect());
        assert_eq!(ratio.value, 51.0);
        assert!((38.0..47.0).contains(&ratio.low) && (55.0..64.0).contains(&ratio.high));
        let few = Ratio::of(vec![3.0, 1.0]);
        assert_eq!((few.value, few.low, few.high), (2.0, 1.0, 3.0));
    }

    #[test]
    fn bootstrap_intervals_cover_the_true_median_in_at_least_90_percent() {
        const SETS: usize = 200;
        let mut rng = fastrand::Rng::with_seed(7);
        let covered = (0..SETS).filter(|_| {
            // Draw from an exponential distribution, whose median is ln 2. It is skewed, as times
            // are.
            let draw = || -(1.0 - rng.f64()).ln();
            let ratio = Ratio::of(std::iter::repeat_with(draw).take(41).collect());
            (ratio.low..=ratio.high).contains(&2f64.ln())
        });
        let covered = covered.count();
        assert!(
            (180..=199).contains(&covered),
            "{covered} of {SETS} intervals contain the true median, not 180 to 199"
        );
    }

    #[test]
    fn quantile_is_the_nearest_rank_value() {
        let mut values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut values, 0.99), 198.0);
        assert_eq!(quantile(&mut values, 1.0), 200.0);
        assert_eq!(quantile(&mut [5.0], 0.01), 5.0);
    }
}
