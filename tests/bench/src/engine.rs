// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of the storage engine (`tmem-pool`). It runs all parts of the benchmark and prints the
//! measured ratios next to their targets.

use crate::corpus::{self, Corpus};
use crate::load::{self, Load};
use crate::machine::{self, Machine};
use crate::measure::{Ratio, Samples};
use crate::report::{Results, Target, progress};
use crate::times::{self, Sized, Times};
use crate::zram::Zram;
use crate::{EngineArgs, Part, growth, memory, threads};
use tmem_pool::PageHash;

/// Runs the benchmark of the engine and prints the results.
///
/// # Errors
/// The machine's files have too few pages, or the system has no memory for a pool.
pub fn run(args: &EngineArgs) -> Result<(), String> {
    progress("reading files");
    let corpus = corpus::load(args.corpus.as_deref(), args.pages(), args.seed)?;
    let pages = times::compressible_pages(&corpus.pages, &PageHash::new(42));
    if pages.len() < times::PAGES_MIN {
        return Err(format!(
            "lz4 shrinks only {} of the test pages, too few for the benchmark: raise --pages",
            pages.len()
        ));
    }
    progress("touching memory");
    machine::touch_memory();
    let (mut times, mut results) = (Times::default(), Results::default());
    if args.measures(Part::Times) {
        let zram = measure_times(args, &pages, &mut times)?;
        add_times(&mut results, &times, &zram);
    }
    if args.measures(Part::Memory) {
        add_memory(&mut results, args, &corpus)?;
    }
    let machine = Machine::read();
    let load = match args.measures(Part::Load) {
        true => {
            let pages = pages.iter().map(|sized| &*sized.page);
            Some(load::run(
                pages,
                args.load_effort(),
                args.seed,
                &machine,
                progress,
            )?)
        }
        false => None,
    };
    if let Some(load) = &load {
        load.add_to(&mut results);
    }
    if args.measures(Part::Growth) {
        progress("adding objects");
        let longest_us = growth::longest_put_us(args.objects())?;
        results.add(
            "growth_longest_put_us",
            Target::AtMost(200.0),
            Ok(Ratio::exact(longest_us)),
        );
    }
    if args.measures(Part::Threads) {
        let scaling = threads::scaling(&pages, args.thread_rounds(), progress);
        let (time, work) = match scaling {
            Ok(scaling) => (Ok(scaling.time), Ok(scaling.work)),
            Err(reason) => (Err(reason.clone()), Err(reason)),
        };
        results.add("threads_scaling_ratio", Target::AtLeast(0.95), time);
        results.add("threads_work_ratio", Target::None, work);
        let sweep = threads::sweep(&pages, args.thread_rounds(), progress);
        let mut add = |key, target, value: fn(&threads::Sweep) -> Ratio| {
            results.add(
                key,
                target,
                sweep.as_ref().map(value).map_err(String::clone),
            );
        };
        add("sweep_tib_minutes", Target::None, |sweep| sweep.minutes);
        add("sweep_scaling_ratio", Target::AtLeast(0.95), |sweep| {
            sweep.scaling
        });
        add("sweep_tib_minutes_of_8", Target::AtMost(30.0), |sweep| {
            sweep.minutes_of_8
        });
    }
    progress("");
    let classes: Vec<_> = corpus
        .classes
        .iter()
        .map(|(name, had)| format!("{name} {had}"))
        .collect();
    println!(
        "{} pages of files, none same-filled and no two equal: {}. lz4 compresses them to {:.3} of \
         their size. {} of them compress, and these are timed.\n",
        corpus.pages.len(),
        classes.join(", "),
        memory::lz4_fraction(&corpus.pages),
        pages.len()
    );
    println!("{}\n", machine.text());
    println!("{:40} {:>9}   processor time, median", "ns a page", "");
    for (what, ns) in medians(&times, load.as_ref()) {
        println!("{what:40} {ns:9.0}");
    }
    results.print();
    if let Some(load) = &load {
        load.print();
    }
    Ok(())
}

/// Measures the times of all operations of the engine and of the baselines. The inner result is an
/// error with the reason if zram was not measured.
///
/// # Errors
/// The system does not provide the address space for a pool, or the zram device fails.
fn measure_times(
    args: &EngineArgs,
    pages: &[Sized],
    times: &mut Times,
) -> Result<Result<(), String>, String> {
    let mut zram = Zram::new(pages.len());
    progress("filling a pool");
    let rig = times::fill(times, pages)?;
    let peer = zram.as_mut().ok();
    times::run(args.rounds(), args.seed, &rig, pages, peer, times, progress)?;
    progress("recompressing cold pages");
    times::recompress(times, &rig, pages.len());
    Ok(zram.map(drop))
}

fn add_memory(results: &mut Results, args: &EngineArgs, corpus: &Corpus) -> Result<(), String> {
    progress("measuring memory");
    let held = memory::measure_held(&corpus.pages)?;
    results.add(
        "bytes_vs_lz4",
        Target::AtMost(0.84),
        Ok(Ratio::exact(held.vs_lz4)),
    );
    results.add(
        "bytes_vs_lz4_warm",
        Target::None,
        Ok(Ratio::exact(held.vs_lz4_warm)),
    );
    let (churned, half) = memory::churn(
        &corpus.pages,
        args.seed,
        args.replacements_per_blob(),
        progress,
    )?;
    results.add(
        "churn_efficiency",
        Target::AtLeast(0.94),
        Ok(Ratio::exact(churned)),
    );
    results.add(
        "half_efficiency",
        Target::AtLeast(0.95),
        Ok(Ratio::exact(half)),
    );
    results.add(
        "metadata_bytes_per_page",
        Target::AtMost(60.0),
        Ok(Ratio::exact(held.metadata_bytes_per_page)),
    );
    Ok(())
}

fn add_times(results: &mut Results, times: &Times, zram: &Result<(), String>) {
    let mut add = |key, target, ratio| results.add(key, target, Ok(ratio));
    add(
        "put_ack_ratio",
        Target::AtMost(1.4),
        times.put_ack.ratio_to(&times.copy_hash),
    );
    add(
        "put_full_ratio",
        Target::AtLeast(0.9),
        times.hash_compress.ratio_to(&times.put_full),
    );
    add(
        "get_ratio",
        Target::AtLeast(0.9),
        times.decompress.ratio_to(&times.get),
    );
    add(
        "get_freed_ratio",
        Target::AtLeast(0.82),
        times.decompress.ratio_to(&times.get_freed),
    );
    add(
        "get_nursery_ratio",
        Target::AtMost(1.5),
        times.get_raw.ratio_to(&times.copy),
    );
    let (full, get, ack) = (&times.put_full, &times.get, &times.put_ack);
    for (key, target, peer, ours) in [
        ("zram_put_full_speedup", 1.1, &times.zram_write, full),
        ("zram_get_speedup", 1.6, &times.zram_read, get),
        // `zram_ack_speedup` compares a put, which is acknowledged before the engine compresses the
        // page, with a write to zram, which compresses the page before it returns.
        ("zram_ack_speedup", 5.0, &times.zram_write, ack),
    ] {
        let speedup = zram.clone().map(|()| peer.medians_by(ours));
        results.add(key, Target::AtLeast(target), speedup);
    }
}

/// Returns the names of all timed operations, each with its median time in nanoseconds per page.
/// With `load`, the times of [`Load::times`] follow, some of which are 99th percentiles in
/// nanoseconds per call.
fn medians(times: &Times, load: Option<&Load>) -> impl Iterator<Item = (String, f64)> {
    let measured = all_times(times).filter(|(_, samples)| !samples.is_empty());
    let medians = measured.map(|(name, samples)| (name.into(), samples.median()));
    medians.chain(load.map(Load::times).unwrap_or_default())
}

fn all_times(times: &Times) -> impl Iterator<Item = (&'static str, &Samples)> {
    [
        ("copy of pages read shortly before", &times.copy),
        ("cold copy and xxh3", &times.copy_hash),
        ("xxh3 and LZ4_compress_fast", &times.hash_compress),
        ("LZ4_decompress_safe, cold", &times.decompress),
        ("put, acknowledged", &times.put_ack),
        ("put, until it is in its blob", &times.put_full),
        ("the same while the pool grows", &times.put_growing),
        ("get of an lz4 page", &times.get),
        ("and freeing it", &times.free),
        ("get of a raw page", &times.get_raw),
        ("zram write", &times.zram_write),
        ("zram read", &times.zram_read),
        ("recompressing all that is cold", &times.recompress),
    ]
    .into_iter()
}
