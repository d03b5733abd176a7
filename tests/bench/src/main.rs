// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-bench: benchmarks of virtio-tmem, most of them compared with the work that it cannot avoid.
//!
//! Most figures are ratios of two operations, measured alternately in one run, because absolute
//! times depend on the machine more than on the program. Replays of traces measure no time: they
//! count hits.

mod bare;
mod corpus;
mod engine;
mod growth;
mod keys;
mod load;
mod machine;
mod measure;
mod memory;
mod path;
mod policies;
mod report;
mod rig;
mod threads;
mod times;
mod timing;
mod zram;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure virtio-tmem, compared with the work that it cannot avoid, such as copying pages.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The storage engine, compared with copying, hashing, lz4 and zram, on pages of this machine's
    /// files.
    Engine(EngineArgs),
    /// The path of requests from a guest's virtqueue to the storage engine and back, compared with
    /// the engine alone and with zram.
    ///
    /// It also measures how long a VM waits for its pages while another VM keeps the worker busy.
    Path(path::Args),
    /// Hit ratios of the engine's eviction policies and the optimum, on recorded traces and on
    /// generated loads.
    ///
    /// lru and adaptive-two-queue are the engine's own code. The optimum knows all later requests,
    /// so no real policy can reach it. The comparison measures no time and takes about a minute.
    /// docs/benchmarks/policy.md discusses the results.
    Policies(policies::Args),
    /// Times, pauses and memory of a pool with up to 10^8 keys.
    Keys(keys::Args),
    /// Whether a guest can find out by timing that a VM of another trust domain has a page.
    Timing(timing::Args),
}

/// Part of the benchmark of the storage engine, which can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Time that each operation of the engine takes for a page.
    Times,
    /// Memory that the pool takes for each page.
    Memory,
    /// Gain in the speed of background work from a second thread, and time of a sweep.
    Threads,
    /// Time for each page in a full pool, with 256 tenants, with keys in random order, with tables
    /// larger than the processor's caches, and while the pool grows.
    Load,
    /// Longest put while a tenant gets millions of objects of one page.
    Growth,
}

/// Options of the benchmark of the storage engine.
#[derive(clap::Args)]
struct EngineArgs {
    /// Take the test pages from the files of this directory, instead of files of the whole machine.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Number of test pages, 98,304 by default. Together they should not fit into the processor's
    /// caches.
    #[arg(long, value_name = "NUMBER")]
    pages: Option<usize>,
    /// Number of times that each operation is measured, 100 by default. Results are medians.
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<usize>,
    /// Measure for less than a minute: half of the pages, 16 rounds, fewer replacements of pages,
    /// smaller tables.
    #[arg(long)]
    quick: bool,
    /// Measure this part only. The report shows the figures of the other parts as not measured.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Seed of the random choice of files and pages, and of their order.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
}

impl EngineArgs {
    fn measures(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }

    fn pages(&self) -> usize {
        self.pages
            .unwrap_or(if self.quick { 49_152 } else { 98_304 })
    }

    /// Returns how often the memory benchmark replaces each blob (stored contents of a page), on
    /// average, before it measures the pool's memory.
    fn replacements_per_blob(&self) -> usize {
        if self.quick { 4 } else { 20 }
    }

    /// Returns the number of rounds that measure the gain from a second thread.
    fn thread_rounds(&self) -> usize {
        if self.quick { 4 } else { self.rounds() }
    }

    /// Returns the number of rounds of the benchmark under load, and the wanted size of its large
    /// tables as a multiple of the last-level cache.
    fn load_effort(&self) -> (usize, u64) {
        (self.rounds(), if self.quick { 1 } else { 4 })
    }

    /// Returns the number of objects that a tenant gets while the benchmark looks for the longest put.
    fn objects(&self) -> u64 {
        if self.quick { 1 << 20 } else { 4 << 20 }
    }

    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 16 } else { 100 })
    }
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Engine(args) => engine::run(&args),
        Command::Path(args) => path::run(&args),
        Command::Policies(args) => policies::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Timing(args) => timing::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tmem-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
