// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-bench: what virtio-tmem costs beside what it cannot do without.
//!
//! Everything measured is a ratio of two things, by turns in one run, since times say more of the
//! machine than of the program. Replays of traces measure no time: they count hits. Of many VMs on
//! one daemon times are told as they are, to be held against bounds.

mod bare;
mod corpus;
mod engine;
mod measure;
mod memcached;
mod memory;
mod path;
mod replay;
#[cfg(test)]
mod replay_test;
mod report;
mod rig;
mod slice;
mod threads;
mod times;
mod timing;
mod vms;
mod zram;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure virtio-tmem beside what it cannot do without.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The storage engine beside copying, hashing, lz4 and zram, on pages of this machine's files.
    Engine(EngineArgs),
    /// The path from a guest's virtqueue to the engine and back, beside the engine, zram and memcached.
    Path(path::Args),
    /// Hit ratios of all policies over pool sizes, on traces that tmemd recorded.
    Replay(replay::Args),
    /// How long a VM waits for its pages beside another that keeps the worker busy.
    Slice(slice::Args),
    /// Whether a guest can tell by time that a VM of another trust domain has a page.
    Timing(timing::Args),
    /// Many VMs on one tmemd: what it takes, a storm of connections, a large VM that leaves.
    Vms(vms::Args),
}

/// What can be measured alone, where the whole takes too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// What a page costs.
    Times,
    /// What a page takes.
    Memory,
    /// What two related servers take, the files of which --trees names.
    Servers,
    /// What a second thread gains.
    Threads,
}

/// What the engine is measured with.
#[derive(clap::Args)]
struct EngineArgs {
    /// Pages from the files of this directory, instead of a choice from the whole machine.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Two trees of files that are alike, as two servers of one system have them.
    #[arg(long, num_args = 2, value_name = "DIR")]
    trees: Vec<PathBuf>,
    /// How many pages. They should not fit into the processor's caches.
    #[arg(long, default_value_t = 98_304, value_name = "NUMBER")]
    pages: usize,
    /// How often each thing is measured; the medians count.
    #[arg(long, default_value_t = 100, value_name = "NUMBER")]
    rounds: usize,
    /// Only this part. The others' figures are told as not measured.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Which files and pages are chosen, and in which order they come.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    /// The result for machines, on standard output.
    #[arg(long)]
    json: bool,
}

impl EngineArgs {
    fn measures(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Engine(args) => engine::run(&args),
        Command::Path(args) => path::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Slice(args) => slice::run(&args),
        Command::Timing(args) => timing::run(&args),
        Command::Vms(args) => vms::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tmem-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
