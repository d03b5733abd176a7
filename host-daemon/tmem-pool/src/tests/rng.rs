// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seeded random numbers for tests, and the seeds of test runs.
//!
//! A failing run prints its seed. The environment variable `TMEM_SEED=<number>` runs that seed
//! alone, and `TMEM_SEEDS=<number>` runs that many seeds.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Random number generator SplitMix64 (Steele, Lea and Flood, 2014), which has one word of state.
/// It is good enough for random choices in tests.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `n`, which must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns true once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Runs a test with `count` seeds. The environment variable `TMEM_SEEDS` replaces `count`. With
/// `TMEM_SEED`, the test runs with that seed only.
pub fn for_each_seed(name: &str, count: u64, test: impl Fn(u64)) {
    for_each_seed_from(1, name, count, test);
}

/// Runs a test with `count` seeds, as [`for_each_seed`] does. The first seed is `first`.
pub fn for_each_seed_from(first: u64, name: &str, count: u64, test: impl Fn(u64)) {
    let number = |name: &str| -> Option<u64> {
        let text = std::env::var(name).ok()?;
        Some(
            text.parse()
                .unwrap_or_else(|_| panic!("{name}={text} is not a decimal number")),
        )
    };
    let given = number("TMEM_SEED");
    let count = number("TMEM_SEEDS").unwrap_or(count);
    let seeds: Vec<u64> = given.map_or_else(|| (first..first + count).collect(), |seed| vec![seed]);
    for seed in seeds {
        println!("{name}: TMEM_SEED={seed}");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            eprintln!("{name} failed; replay with TMEM_SEED={seed}");
            resume_unwind(panic);
        }
    }
}
