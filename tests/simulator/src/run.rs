// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs one script of the simulator, or the scripts of many seeds on several threads.
//!
//! A panic in the code of the daemon or the pool counts as a failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::mutation::Mutation;
use crate::oracle::Failure;
use crate::script::Script;
use crate::world::World;

/// Number of counters of a run.
pub const COUNTS: usize = 8;
/// Counters of a run: pages stored, hit, refused and lost, stale requests, pages retained, REFs
/// answered with HELD, and REFs answered with GONE although the device had the page before.
pub type Counts = [u64; COUNTS];

/// Result of the run of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The first broken rule, with the number of the step at which an oracle saw it. A panic counts
    /// as a broken rule at the last step of the script.
    pub failure: Option<(usize, Failure)>,
    /// Counters of the run's pages and requests.
    pub counts: Counts,
    /// Virtual time at the end of the run, in nanoseconds.
    pub now_ns: u64,
}

/// Runs a script and returns its result.
#[must_use]
pub fn run(script: &Script) -> Outcome {
    caught(script, &mut |_| {})
}

/// Runs a script, and passes a line for each step and its result to `tell`.
pub fn run_traced(script: &Script, mut tell: impl FnMut(String)) -> Outcome {
    caught(script, &mut |line| tell(line()))
}

type Tell<'a> = &'a mut dyn FnMut(&dyn Fn() -> String);

fn caught(script: &Script, tell: Tell<'_>) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| play(script, tell))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        let failure = Failure {
            rule: "panic",
            what: text.unwrap_or_default(),
        };
        Outcome {
            failure: Some((script.steps.len(), failure)),
            counts: [0; COUNTS],
            now_ns: 0,
        }
    })
}

fn play(script: &Script, tell: Tell<'_>) -> Outcome {
    let mut world = World::new(&script.setup);
    tell(&|| format!("{:?}", script.setup));
    for step in &script.steps {
        world.step(*step);
        tell(&|| format!("{:4} {step:?}: {}", world.at, world.digest()));
        if world.failure().is_some() {
            break;
        }
    }
    if world.failure().is_none() {
        world.end();
        tell(&|| format!("{:4} end: {}", world.at, world.digest()));
    }
    Outcome {
        failure: world.failure().map(|failure| (world.at, failure)),
        counts: world.counts(),
        now_ns: world.now_ns(),
    }
}

/// A seed whose run failed.
#[derive(Clone, Debug)]
pub struct Found {
    /// Number of the seed.
    pub seed: u64,
    /// Number of the step at which the run failed.
    pub at: usize,
    /// The failure that an oracle found.
    pub failure: Failure,
}

/// Results of the runs of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Number of seeds whose runs ended.
    pub seeds: u64,
    /// Sums of the counters over all runs, as in [`Outcome`].
    pub counts: Counts,
    /// Virtual time of all runs together, in nanoseconds.
    pub now_ns: u64,
    /// The smallest seed that failed.
    pub found: Option<Found>,
}

/// Runs `count` seeds from `first` on until one fails. With several threads the result is still the
/// smallest seed that fails. Calls `progress` with the number of completed seeds.
pub fn run_seeds(
    (first, count): (u64, u64),
    mutation: Option<Mutation>,
    threads: usize,
    progress: impl Fn(u64) + Sync,
) -> Totals {
    let next = AtomicU64::new(first);
    let end = AtomicU64::new(first + count);
    let totals = Mutex::new(Totals::default());
    let work = || loop {
        let seed = next.fetch_add(1, Relaxed);
        if seed >= end.load(Relaxed) {
            return;
        }
        let outcome = run(&Script::draw(seed, mutation));
        let mut totals = totals
            .lock()
            .expect("another thread panicked while it added its totals");
        totals.seeds += 1;
        totals.now_ns += outcome.now_ns;
        let sums = totals.counts.iter_mut().zip(outcome.counts);
        sums.for_each(|(sum, n)| *sum += n);
        if let Some((at, failure)) = outcome.failure
            && totals.found.as_ref().is_none_or(|found| seed < found.seed)
        {
            // Let no thread begin a seed above this one, which has failed. Threads still finish
            // smaller seeds that they have begun, because one of these may fail, too.
            end.fetch_min(seed, Relaxed);
            totals.found = Some(Found { seed, at, failure });
        }
        let seeds = totals.seeds;
        drop(totals);
        progress(seeds);
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    totals
        .into_inner()
        .expect("another thread panicked while it added its totals")
}
