// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmem-simulator [--seeds N] [--first N] [--mutation NAME] [--threads N] [--trace]`: runs the
//! simulator with many seeds, or with the seed in TMEM_SEED, and shrinks the first failure.
//!
//! Exits with 1 if a run broke a rule, and with 2 if the arguments are invalid.

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tmem_simulator::{Mutation, Script, run_seeds, run_traced, shrink};

/// Default number of seeds to run.
const SEEDS: u64 = 4_000;
/// Time between two lines that report the progress.
const PROGRESS: Duration = Duration::from_secs(10);

struct Arguments {
    first: u64,
    seeds: u64,
    threads: usize,
    mutation: Option<Mutation>,
    trace: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut out = Arguments {
        first: 1,
        seeds: SEEDS,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        mutation: None,
        trace: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--trace" {
            out.trace = true;
            continue;
        }
        let value = words.next().ok_or(format!("{word} needs a value"))?;
        let number = || {
            let number = value.parse::<u64>();
            number.map_err(|_| format!("the value of {word} is not a number: {value}"))
        };
        match word.as_str() {
            "--first" => out.first = number()?,
            "--seeds" => out.seeds = number()?,
            "--threads" => out.threads = number()? as usize,
            "--mutation" => {
                let known = Mutation::ALL.iter().map(|m| format!("{m:?}"));
                let known = known.collect::<Vec<_>>().join(", ");
                let named = Mutation::named(&value);
                out.mutation = Some(named.ok_or(format!(
                    "unknown mutation {value}: the mutations are {known}"
                ))?);
            }
            _ => return Err(format!("unknown option: {word}")),
        }
    }
    if let Ok(seed) = std::env::var("TMEM_SEED") {
        let number = seed.parse::<u64>();
        out.first = number.map_err(|_| format!("TMEM_SEED={seed} is not a number"))?;
        out.seeds = 1;
    }
    Ok(out)
}

/// Removes steps from the script of a failing seed while it still fails. Prints the remaining steps
/// and the failure. If `whole` is true, prints the run of the full script first.
fn explain(seed: u64, mutation: Option<Mutation>, whole: bool) {
    let script = Script::draw(seed, mutation);
    if whole {
        run_traced(&script, |line| println!("{line}"));
    }
    let Some((short, failure)) = shrink(&script) else {
        return;
    };
    let (from, to) = (script.steps.len(), short.steps.len());
    println!("\nthe failing script, shortened from {from} steps to {to} steps:");
    run_traced(&short, |line| println!("{line}"));
    println!("{}: {}", failure.rule, failure.what);
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("tmem-simulator: {error}");
            return ExitCode::from(2);
        }
    };
    let Arguments {
        first,
        seeds,
        threads,
        mutation,
        trace,
    } = arguments;
    let begun = Instant::now();
    let last_report = Mutex::new(begun);
    let progress = |done: u64| {
        let mut last_report = last_report
            .lock()
            .expect("another thread panicked while it printed the progress");
        if last_report.elapsed() >= PROGRESS {
            *last_report = Instant::now();
            let per_second = done as f64 / begun.elapsed().as_secs_f64();
            eprintln!("{done} of {seeds} seeds are simulated, {per_second:.0} per second");
        }
    };
    let totals = run_seeds((first, seeds), mutation, threads, progress);
    let [stored, hits, refused, lost, stale, retained, held, gone] = totals.counts;
    println!(
        "{} seeds in {:.1} s, {:.0} s of virtual time: {stored} pages stored, {hits} hits, \
         {refused} puts refused, {lost} pages lost by the device, \
         {stale} requests answered with STALE, {retained} pages retained, \
         {held} REFs answered with HELD, {gone} with GONE",
        totals.seeds,
        begun.elapsed().as_secs_f64(),
        totals.now_ns as f64 / 1e9,
    );
    match totals.found {
        Some(found) => {
            let name = mutation.map_or(String::new(), |m| format!(" --mutation {m:?}"));
            println!(
                "{}: {}\nat step {} of TMEM_SEED={seed}; replay with\n\
                 TMEM_SEED={seed} cargo run --release -p tmem-simulator --{name} --trace",
                found.failure.rule,
                found.failure.what,
                found.at,
                seed = found.seed
            );
            explain(found.seed, mutation, trace);
            ExitCode::FAILURE
        }
        None if trace => {
            explain(first, mutation, true);
            ExitCode::SUCCESS
        }
        None => ExitCode::SUCCESS,
    }
}
