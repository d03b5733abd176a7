// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares eviction policies on recorded traces and on generated loads, by the share of gets that
//! are hits: the engine's own policies and the optimum.
//!
//! The engine's policies are the engine's code (replay.rs). docs/benchmarks/policy.md has the
//! results and the choice.

mod loads;
mod optimum;
mod replay;
#[cfg(test)]
mod replay_test;
mod requests;
mod shared;
mod traces;

#[cfg(test)]
pub use {loads::guest, requests::without_hints};

use crate::report::progress;
use loads::Load;
use optimum::Optimum;
use shared::{SharedLoad, SharedRow};
use std::path::{Path, PathBuf};
use tmem_pool::PolicyKind;
use tmem_trace::format::{Event, Op};

/// Names of the compared policies, in the order of all results. The optimum is the last.
const POLICIES: [&str; 3] = ["lru", "adaptive-two-queue", "optimum"];

/// Position of the optimum in [`POLICIES`]. It knows all later requests, so the engine cannot use
/// it.
const OPTIMUM: usize = POLICIES.len() - 1;

/// Pool sizes by default, in percent of the memory that the optimum needs for all possible hits.
const PERCENT: [u64; 7] = [25, 50, 75, 86, 95, 100, 150];

const MIB: f64 = (1 << 20) as f64;

/// Hit ratios of all policies, 0 to 1.
type Ratios = [f64; POLICIES.len()];

/// Options of the comparison of eviction policies.
#[derive(clap::Args)]
pub struct Args {
    /// Traces that `tmemd --trace` recorded, compressed by zstd or not. tests/traces of the source
    /// has six. Without a trace, only generated loads are compared.
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Generated loads that are compared, all by default. A simulated guest with an LRU page cache
    /// of 2,000 pages reads, so the pool sees only the reads that miss there and the pages that are
    /// evicted there.
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',', value_enum, default_values_t = Load::ALL)]
    loads: Vec<Load>,
    /// Loads of four VMs with equal pages that are compared, all by default.
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',', value_enum, default_values_t = SharedLoad::ALL)]
    shared_loads: Vec<SharedLoad>,
    /// Sizes of the pool in percent of the smallest pool in which the optimum loses no hit. For
    /// loads of four VMs, in percent of the memory that the pool holds if it never evicts.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = PERCENT)]
    percent: Vec<u64>,
    /// Sizes of the pool in MiB, instead of percent.
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        conflicts_with = "percent"
    )]
    size_mib: Vec<u64>,
    /// Number of seeds, from 1, for the generated loads and for the hashes of the engine. The
    /// report shows mean hit ratios over all seeds.
    #[arg(long, value_name = "NUMBER", default_value_t = 3,
        value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Ignore the hint of guests that a page was used again after it was read.
    #[arg(long)]
    no_hints: bool,
}

/// A size of the pool, as the command line gives it.
#[derive(Clone, Copy)]
enum PoolSize {
    /// Percent of the smallest pool in which the optimum loses no hit.
    Percent(u64),
    Mib(u64),
}

impl PoolSize {
    fn bytes(self, need_bytes: u64) -> u64 {
        match self {
            PoolSize::Percent(percent) => need_bytes.saturating_mul(percent) / 100,
            PoolSize::Mib(mib) => mib << 20,
        }
    }

    /// Returns the percent, or None if the size is in MiB.
    fn percent(self) -> Option<u64> {
        match self {
            PoolSize::Percent(percent) => Some(percent),
            PoolSize::Mib(_) => None,
        }
    }
}

impl Args {
    fn sizes(&self) -> Vec<PoolSize> {
        match self.size_mib.is_empty() {
            true => self
                .percent
                .iter()
                .copied()
                .map(PoolSize::Percent)
                .collect(),
            false => self.size_mib.iter().copied().map(PoolSize::Mib).collect(),
        }
    }
}

/// Results of a load with one pool size.
struct AtSize {
    size: PoolSize,
    /// Mean size of the pool over all seeds, in bytes.
    size_bytes: u64,
    /// Hit ratio of each policy, as the mean over all seeds.
    ratios: Ratios,
    /// Largest difference between the hit ratios of one policy with two different seeds.
    spread: f64,
}

/// Results of a load with all pool sizes.
struct Row {
    name: String,
    recorded: bool,
    sizes: Vec<AtSize>,
}

/// Returns the number of gets.
fn gets(events: &[Event]) -> u64 {
    let gets = events
        .iter()
        .filter(|event| matches!(event.op, Op::Get { .. }));
    gets.count() as u64
}

/// Returns the hit ratios of all policies in a pool of this size.
fn ratios(
    events: &[Event],
    optimum: &Optimum,
    size_bytes: u64,
    seed: u64,
) -> Result<Ratios, String> {
    let engine = |policy| {
        let outcome = traces::outcome(events, policy, size_bytes, seed);
        outcome.map(|outcome| outcome.hits)
    };
    let hits: [u64; POLICIES.len()] = [
        engine(PolicyKind::Lru)?,
        engine(PolicyKind::AdaptiveTwoQueue)?,
        optimum.hits(size_bytes).0,
    ];
    let gets = gets(events).max(1) as f64;
    Ok(hits.map(|hits| hits as f64 / gets))
}

/// Compares the policies on one load. `events` returns the events for a seed.
fn row(
    name: &str,
    recorded: bool,
    events: impl Fn(u64) -> Vec<Event>,
    args: &Args,
) -> Result<Row, String> {
    let sizes = args.sizes();
    let mut seen: Vec<Vec<(u64, Ratios)>> = vec![Vec::new(); sizes.len()];
    for seed in 1..=args.seeds {
        let mut events = events(seed);
        if args.no_hints {
            events = requests::without_hints(events);
        }
        let optimum = Optimum::new(&events);
        let need_bytes = optimum.need().0;
        progress(&format!("{name}: seed {seed} of {}", args.seeds));
        for (size, seen) in sizes.iter().zip(&mut seen) {
            let size_bytes = size.bytes(need_bytes);
            let ratios = ratios(&events, &optimum, size_bytes, seed)?;
            seen.push((size_bytes, ratios));
        }
    }
    let at_size = |(size, seen): (&PoolSize, Vec<(u64, Ratios)>)| {
        let policy = |nr: usize| seen.iter().map(move |(_, ratios)| ratios[nr]);
        let range = |nr| policy(nr).fold(0.0, f64::max) - policy(nr).fold(1.0, f64::min);
        let bytes = seen.iter().map(|(size_bytes, _)| size_bytes);
        AtSize {
            size: *size,
            size_bytes: bytes.sum::<u64>() / args.seeds,
            ratios: std::array::from_fn(|nr| policy(nr).sum::<f64>() / args.seeds as f64),
            spread: (0..POLICIES.len()).map(range).fold(0.0, f64::max),
        }
    };
    Ok(Row {
        name: name.into(),
        recorded,
        sizes: sizes.iter().zip(seen).map(at_size).collect(),
    })
}

/// Summary over all loads and pool sizes, from which a policy is chosen.
struct Summary {
    /// Mean hit ratio of each policy.
    mean: Ratios,
    /// Largest loss of each policy against the best other one with the same load and pool size, as
    /// a difference of hit ratios. The optimum is left out of the comparison.
    loss_max: Ratios,
    /// Largest difference between the hit ratios of one policy with two different seeds.
    spread_max: f64,
}

fn summary(rows: &[Row]) -> Summary {
    let all: Vec<&AtSize> = rows.iter().flat_map(|row| &row.sizes).collect();
    let best = |at: &AtSize| at.ratios[..OPTIMUM].iter().copied().fold(0.0, f64::max);
    let mean = |nr: usize| all.iter().map(|at| at.ratios[nr]).sum::<f64>() / all.len() as f64;
    let loss = |nr: usize| {
        let losses = all.iter().map(|at| best(at) - at.ratios[nr]);
        losses.fold(0.0, f64::max)
    };
    Summary {
        mean: std::array::from_fn(mean),
        loss_max: std::array::from_fn(loss),
        spread_max: all.iter().map(|at| at.spread).fold(0.0, f64::max),
    }
}

fn print_shared(rows: &[SharedRow]) {
    println!(
        "\nHits of four VMs of one trust domain with 90 % equal files, in the real engine, in percent \
         of all\ngets. The size of a pool is given in percent of the memory that it holds if it \
         never evicts.\n"
    );
    println!("load             pool   lru  adaptive-two-queue");
    for row in rows {
        for (percent, [lru, ours]) in &row.sizes {
            let (lru, ours) = (100.0 * lru, 100.0 * ours);
            println!(
                "{:14} {percent:>4} %  {lru:4.1}  {ours:18.1}",
                row.load.name()
            );
        }
    }
}

fn print(rows: &[Row], summary: &Summary) {
    let line = |name: &str, pool: &str, cells: &[String]| {
        print!("{name:14} {pool:>16}");
        for (cell, policy) in cells.iter().zip(POLICIES) {
            print!("  {cell:>width$}", width = policy.len());
        }
        println!();
    };
    let percent = |ratio: &f64| format!("{:.1}", 100.0 * ratio);
    let cells = |ratios: &[f64]| ratios.iter().map(percent).collect::<Vec<_>>();
    println!(
        "Hits in percent of all gets. The size of a pool is given in percent of the smallest pool\n\
         in which the optimum loses no hit.\n"
    );
    line("load", "pool", &POLICIES.map(String::from));
    for row in rows {
        for at in &row.sizes {
            let mib = at.size_bytes as f64 / MIB;
            let percent = at.size.percent().map(|percent| format!("{percent} % "));
            let pool = format!("{}{mib:.1} MiB", percent.unwrap_or_default());
            let kind = if row.recorded { "trace " } else { "" };
            let name = format!("{kind}{}", row.name);
            line(&name, &pool, &cells(&at.ratios));
        }
    }
    line("mean", "", &cells(&summary.mean));
    line("largest loss", "", &cells(&summary.loss_max[..OPTIMUM]));
    println!(
        "\nThe largest loss is the largest difference, in points, to the best policy with the same\n\
         load and pool, without the optimum. With another seed, a hit ratio differs by at most \
         {:.1}\npoints.",
        100.0 * summary.spread_max
    );
}

/// Returns the name of a trace's file without its extensions.
fn trace_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let name = name.to_string_lossy();
    name.split('.').next().unwrap_or_default().to_string()
}

/// Compares the policies and prints the results.
///
/// # Errors
/// A trace cannot be read, or there is no load.
pub fn run(args: &Args) -> Result<(), String> {
    let mut rows = Vec::new();
    for path in &args.traces {
        let events = requests::without_retention(&traces::load(path)?);
        rows.push(row(&trace_name(path), true, |_| events.clone(), args)?);
    }
    for load in &args.loads {
        rows.push(row(&load.name(), false, |seed| load.events(seed), args)?);
    }
    // Pools in MiB have no percentage of the memory that a load of several VMs needs.
    let percent = if args.size_mib.is_empty() {
        &args.percent[..]
    } else {
        &[]
    };
    let shared = args.shared_loads.iter();
    let shared = shared.map(|&load| shared::row(load, percent, args.seeds));
    let shared = shared.collect::<Result<Vec<_>, _>>()?;
    progress("");
    let summary = summary(&rows);
    print(&rows, &summary);
    print_shared(&shared);
    Ok(())
}
