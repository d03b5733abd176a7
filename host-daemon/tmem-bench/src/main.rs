// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-bench: the cost of virtio-tmem, compared with the work that it cannot avoid.
//!
//! Most figures are ratios of two operations, measured in turns in one run, because absolute times
//! depend on the machine more than on the program. Replays of traces measure no time: they count
//! hits. The benchmark of many VMs on one daemon reports absolute times, for a comparison with
//! bounds.

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

/// Measure virtio-tmem, compared with the work that it cannot avoid.
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
    /// The path from a guest's virtqueue to the engine and back, compared with the engine, zram and
    /// memcached.
    Path(path::Args),
    /// Hit ratios of all policies over pool sizes, on traces that tmemd recorded.
    Replay(replay::Args),
    /// How long a VM waits for its pages while another VM keeps the worker busy.
    Slice(slice::Args),
    /// Whether a guest can find out by timing that a VM of another trust domain has a page.
    Timing(timing::Args),
    /// Many VMs on one tmemd: its resources, all VMs connecting at once, a large VM that
    /// disconnects.
    Vms(vms::Args),
}

/// Part of the engine's benchmark, to be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Time for each page.
    Times,
    /// Memory for each page.
    Memory,
    /// Memory of two related servers, whose files --trees names.
    Servers,
    /// Gain from a second thread.
    Threads,
}

/// Options of the engine's benchmark.
#[derive(clap::Args)]
struct EngineArgs {
    /// Pages from the files of this directory, instead of a choice from the whole machine.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Two similar trees of files, as two servers of one system have them.
    #[arg(long, num_args = 2, value_name = "DIR")]
    trees: Vec<PathBuf>,
    /// Number of pages. They should not fit into the processor's caches.
    #[arg(long, default_value_t = 98_304, value_name = "NUMBER")]
    pages: usize,
    /// How often each operation is measured; the medians count.
    #[arg(long, default_value_t = 100, value_name = "NUMBER")]
    rounds: usize,
    /// Measure this part only. The figures of the other parts are reported as not measured.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Seed of the choice of files and pages, and of their order.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    /// Print the result as JSON on standard output.
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
