// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-bench: what virtio-tmem costs beside what it cannot do without.
//!
//! Everything is a ratio of two things measured by turns in one run, since times say more of the
//! machine than of the program.

mod corpus;
mod engine;
mod measure;

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
    /// The storage engine beside copying, hashing and lz4 alone, on pages of this machine's files.
    Engine(EngineArgs),
}

/// What the engine is measured with.
#[derive(clap::Args)]
struct EngineArgs {
    /// Pages from the files of this directory, instead of a choice from the whole machine.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// How many pages. They should not fit into the processor's caches.
    #[arg(long, default_value_t = 65_536, value_name = "NUMBER")]
    pages: usize,
    /// How often each thing is measured; the medians count.
    #[arg(long, default_value_t = 40, value_name = "NUMBER")]
    rounds: usize,
    /// Which files and pages are chosen, and in which order they come.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    /// The result for machines, on standard output.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let Command::Engine(args) = Args::parse().command;
    match engine::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tmem-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
