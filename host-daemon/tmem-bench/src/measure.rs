// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times of things done by turns, and their medians.

use std::time::Instant;

/// Nanoseconds a page of one thing, a value for each round.
#[derive(Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Does it once, for so many pages.
    pub fn time<R>(&mut self, pages: usize, what: impl FnOnce() -> R) -> R {
        let since = Instant::now();
        let result = what();
        self.push(since.elapsed().as_nanos() as f64 / pages as f64);
        result
    }

    /// A round's value.
    pub fn push(&mut self, ns_per_page: f64) {
        self.0.push(ns_per_page);
    }

    /// Of the latest round.
    pub fn last(&self) -> f64 {
        *self.0.last().expect("it was measured")
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        median(self.0.clone())
    }

    /// The middle of the ratios of each round to that of another thing in the same round.
    pub fn ratio_to(&self, other: &Samples) -> f64 {
        median(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}
