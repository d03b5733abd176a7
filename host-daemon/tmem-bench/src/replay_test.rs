// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the replay tool shows, held: on traces of real guests, in tests/traces, and on seeded ones.
//!
//! The default policy is at least as good as LRU; the engine's guess of what more room would bring is
//! as far off as is said here.

use crate::replay::{EIGHTHS, load, outcome};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use tmem_pool::trace::{Event, ObjectKey, Op, SizeClass};
use tmem_pool::{GAIN_PERCENT, PolicyKind};

/// Of the index's hashes and of what is random.
const SEED: u64 = 1;

/// Sizes for guesses, in sixteenths of what a trace would fill. Not a half: twice as much is just
/// where all fits, and there a page more or less decides over a loop.
const GUESS_SIXTEENTHS: [u64; 3] = [4, 6, 7];

/// How far off a guess of what more room brings may be, in parts of all gets: any, and the mean. It
/// takes the order of puts for that of eviction, which the default policy improves upon, so where few
/// pages are of much use it says too little.
const GAIN_ERROR_MAX: f64 = 0.16;
/// See [`GAIN_ERROR_MAX`].
const GAIN_ERROR_MEAN_MAX: f64 = 0.05;

/// The recorded ones, by name.
fn recorded() -> Vec<(String, Vec<Event>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
    let entries = std::fs::read_dir(&folder).expect("tests/traces");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "zst"));
    paths.sort();
    assert!(paths.len() >= 5, "{paths:?}");
    let name = |path: &PathBuf| {
        path.file_name()
            .expect("name")
            .to_string_lossy()
            .into_owned()
    };
    paths
        .iter()
        .map(|path| (name(path), load(path).expect("a trace")))
        .collect()
}

fn peak_bytes(events: &[Event]) -> u64 {
    let whole = outcome(events, PolicyKind::Fifo, u64::MAX, 1).expect("replays");
    whole.peak_bytes
}

/// Hit ratio with a policy, the mean of all sizes.
fn mean_ratio(events: &[Event], policy: PolicyKind, seed: u64) -> f64 {
    let peak = peak_bytes(events);
    let ratio = |eighths| {
        let at = outcome(events, policy, peak * eighths / 8, seed).expect("replays");
        at.hit_ratio()
    };
    EIGHTHS.map(ratio).sum::<f64>() / EIGHTHS.count() as f64
}

#[test]
fn default_policy_is_no_worse_than_lru_and_better_on_the_mean() {
    let mut sums = (0.0, 0.0);
    for (name, events) in recorded() {
        let lru = mean_ratio(&events, PolicyKind::Lru, SEED);
        let ours = mean_ratio(&events, PolicyKind::default(), SEED);
        println!("{name}: lru {lru:.4}, default {ours:.4}");
        assert!(ours >= lru, "{name}: lru {lru}, default {ours}");
        sums = (sums.0 + lru, sums.1 + ours);
    }
    assert!(sums.1 > sums.0, "lru {}, default {}", sums.0, sums.1);
}

/// A guest with a page cache of its own, which puts what has been used longest ago and gets what it
/// has not. `next` says which page it reads.
fn guest(reads: u64, cache_pages: usize, mut next: impl FnMut(u64) -> u64) -> Vec<Event> {
    let (mut events, mut used, mut order) = (Vec::new(), HashMap::new(), BTreeMap::new());
    let place = |page: u64| {
        let object = ObjectKey {
            pool: 0,
            object: page / 64,
        };
        (object, page % 64)
    };
    for time_us in 0..reads {
        let page = next(time_us);
        if let Some(before) = used.insert(page, time_us) {
            order.remove(&before);
            order.insert(time_us, page);
            continue;
        }
        let mut event = |op| {
            events.push(Event {
                time_us,
                tenant: 0,
                op,
            });
        };
        let (object, index) = place(page);
        event(Op::Get {
            object,
            page: index,
            hit: false,
        });
        order.insert(time_us, page);
        if used.len() > cache_pages {
            let (_, oldest) = order.pop_first().expect("it has one");
            used.remove(&oldest);
            let (object, index) = place(oldest);
            event(Op::Put {
                object,
                page: index,
                workingset: false,
                size: SizeClass::of_bytes(512 + (oldest % 5 * 700) as usize),
            });
        }
    }
    events
}

/// Reads of which some pages get more than others, in each of several ways.
fn synthetic(seed: u64) -> Vec<(String, Vec<Event>)> {
    const PAGES: u64 = 8_000;
    const READS: u64 = 60_000;
    const CACHE: usize = 800;
    let rng = || fastrand::Rng::with_seed(seed);
    // Page n with a chance in proportion to 1/(n + 1), scattered over the objects.
    let zipf = |rng: &mut fastrand::Rng| {
        let nth = ((PAGES as f64).powf(rng.f64()) - 1.0) as u64;
        nth.wrapping_mul(7919) % PAGES
    };
    let (mut one, mut two, mut three, mut four) = (rng(), rng(), rng(), rng());
    vec![
        (
            format!("zipf {seed}"),
            guest(READS, CACHE, |_| zipf(&mut one)),
        ),
        (
            format!("spans {seed}"),
            guest(READS, CACHE, |_| {
                let span = [PAGES / 10, PAGES / 3, PAGES][two.usize(..3)];
                two.u64(..span)
            }),
        ),
        (
            format!("zipf and streams {seed}"),
            guest(READS, CACHE, |nth| match nth / 2_000 % 4 {
                3 => PAGES + nth,
                _ => zipf(&mut three),
            }),
        ),
        (
            format!("changing {seed}"),
            guest(READS, CACHE, |nth| zipf(&mut four) + nth / 15_000 * 2_000),
        ),
    ]
}

/// The engine's guess of hits that more room would bring, against replays with more room.
#[test]
fn gains_are_guessed_within_bounds() {
    let mut traces = recorded();
    traces.extend(synthetic(SEED));
    let mut errors = Vec::new();
    for (name, events) in traces {
        let peak = peak_bytes(&events);
        for sixteenths in GUESS_SIXTEENTHS {
            let size = peak * sixteenths / 16;
            let run = |size| outcome(&events, PolicyKind::default(), size, SEED).expect("replays");
            let base = run(size);
            for (guess, percent) in base.gain_hits.into_iter().zip(GAIN_PERCENT) {
                let more = run(size * (100 + percent) / 100).hits as f64 - base.hits as f64;
                let error = (guess as f64 - more) / base.gets as f64;
                println!(
                    "{name}, {sixteenths}/16 and {percent} % more: {:.3} of {} gets, said {:.3}: {error:+.3}",
                    more / base.gets as f64,
                    base.gets,
                    guess as f64 / base.gets as f64
                );
                errors.push(error.abs());
            }
        }
    }
    let worst = errors.iter().copied().fold(0.0, f64::max);
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    println!(
        "of {} guesses the worst is off by {worst:.3}, the mean by {mean:.3}",
        errors.len()
    );
    assert!(
        worst <= GAIN_ERROR_MAX && mean <= GAIN_ERROR_MEAN_MAX,
        "{worst}, {mean}"
    );
}
