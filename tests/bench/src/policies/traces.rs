// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replays traces with the engine's eviction policies and several pool sizes. Reports the share of
//! gets that are hits.
//!
//! docs/traces.md describes how tmemd records traces, their contents, and what a replay leaves out.

pub use super::replay::Outcome;
use super::replay::Replay;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tmem_pool::PolicyKind;
use tmem_trace::format::{Event, Reader, TraceError};

/// Default pool sizes, in eighths of the memory that the trace would fill without evictions. With
/// the smallest size most pages are evicted, with the largest size only a few.
pub const EIGHTHS: std::ops::RangeInclusive<u64> = 1..=7;

/// Largest size of a decompressed trace in bytes: sixteen times the size at which recording ends by
/// default. A trace whose header gives a larger size is refused.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// First bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

const MIB: f64 = (1 << 20) as f64;

/// Options of a replay.
#[derive(clap::Args)]
pub struct Args {
    /// Traces that `tmemd --trace` recorded, compressed by zstd or not.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Sizes of the pool in MiB. The default is seven sizes, in eighths of the memory that each
    /// trace would fill.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    size_mib: Vec<u64>,
    /// Seed of the hashes of keys, which the index and the policies use.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// Results of a replay with one policy and one pool size.
#[derive(serde::Serialize)]
struct Run {
    hit_ratio: f64,
    hits: u64,
    evictions: u64,
    /// The engine's estimates of additional hits in a pool with 25, 50 and 100 % more memory.
    gain_hits: [u64; 3],
    /// The engine's estimates of lost hits: hits that would have been misses with 25, 50 and 75 %
    /// less memory. `loss_hits_seen` is the estimate of the number of all hits, of which
    /// `loss_hits` would be lost.
    loss_hits: [u64; 3],
    loss_hits_seen: u64,
}

#[derive(serde::Serialize)]
struct AtSize {
    size_bytes: u64,
    policies: BTreeMap<&'static str, Run>,
}

#[derive(serde::Serialize)]
struct Trace {
    trace: String,
    events: usize,
    tenants: usize,
    seconds: f64,
    puts: u64,
    gets: u64,
    /// Largest charge in bytes in a pool that never evicts. `hit_ratio_max` is the hit ratio of
    /// that pool.
    peak_bytes: u64,
    hit_ratio_max: f64,
    sizes: Vec<AtSize>,
    /// Mean hit ratio of each policy over all pool sizes, 0 to 1.
    mean: BTreeMap<&'static str, f64>,
}

#[derive(serde::Serialize)]
struct Replayed {
    traces: Vec<Trace>,
    /// Mean hit ratio of each policy over all traces, 0 to 1.
    mean: BTreeMap<&'static str, f64>,
}

/// Reads all events of a trace file. If the file ends within an event, for example because the
/// daemon was killed, returns the events before it.
///
/// # Errors
/// The file cannot be read or is not a trace.
pub fn load(path: &Path) -> Result<Vec<Event>, String> {
    let named = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let mut bytes = std::fs::read(path).map_err(|error| named(&error))?;
    if bytes.starts_with(&ZSTD_MAGIC) {
        bytes = decompress(&bytes).map_err(|error| named(&error))?;
    }
    let mut events = Vec::new();
    for event in Reader::new(&bytes).map_err(|error| named(&error))? {
        match event {
            Ok(event) => events.push(event),
            Err(TraceError::Cut) => eprintln!("{}", named(&TraceError::Cut)),
            Err(error) => return Err(named(&error)),
        }
    }
    Ok(events)
}

fn decompress(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let size = zstd_safe::get_frame_content_size(bytes).ok().flatten();
    let size = size.ok_or(
        "the zstd frame does not state its uncompressed size: compress a file, not a pipe",
    )?;
    if size > TRACE_BYTES_MAX {
        return Err(format!(
            "the trace has {size} bytes uncompressed; the maximum is {TRACE_BYTES_MAX}"
        ));
    }
    let mut out = vec![0; size as usize];
    let len = zstd_safe::decompress(&mut out[..], bytes)
        .map_err(|code| format!("zstd: {}", zstd_safe::get_error_name(code)))?;
    out.truncate(len);
    Ok(out)
}

/// Replays the events of a trace with this policy in a pool of this size, and returns the results.
///
/// # Errors
/// The trace has more keys or pools than an engine allows, or the system has no memory.
pub fn outcome(
    events: &[Event],
    policy: PolicyKind,
    size_bytes: u64,
    seed: u64,
) -> Result<Outcome, String> {
    let replay = Replay::new(policy, size_bytes, seed);
    let mut replay =
        replay.map_err(|error| format!("cannot reserve memory for a replay: {error}"))?;
    for event in events {
        if !replay.apply(event) {
            return Err(
                "a tenant of the trace has more keys or pools than allowed, or there is no memory"
                    .into(),
            );
        }
    }
    Ok(replay.outcome())
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let len = values.len();
    values.sum::<f64>() / len as f64
}

fn trace(path: &Path, args: &Args) -> Result<Trace, String> {
    let events = load(path)?;
    let unevicted = outcome(&events, PolicyKind::Fifo, u64::MAX, args.seed)?;
    let mut sizes: Vec<u64> = args.size_mib.iter().map(|mib| mib << 20).collect();
    if sizes.is_empty() {
        sizes = EIGHTHS
            .map(|eighths| unevicted.peak_bytes * eighths / 8)
            .collect();
    }
    let mut at_sizes = Vec::new();
    for size_bytes in sizes {
        let mut policies = BTreeMap::new();
        for policy in PolicyKind::ALL {
            let outcome = outcome(&events, policy, size_bytes, args.seed)?;
            let run = Run {
                hit_ratio: outcome.hit_ratio(),
                hits: outcome.hits,
                evictions: outcome.evictions,
                gain_hits: outcome.gain_hits,
                loss_hits: outcome.loss_hits,
                loss_hits_seen: outcome.loss_hits_seen,
            };
            policies.insert(policy.name(), run);
        }
        at_sizes.push(AtSize {
            size_bytes,
            policies,
        });
    }
    let of_policy = |policy: PolicyKind| {
        let ratios = at_sizes
            .iter()
            .map(|at| at.policies[policy.name()].hit_ratio);
        (policy.name(), mean(ratios))
    };
    let tenants: BTreeSet<u32> = events.iter().map(|event| event.tenant).collect();
    Ok(Trace {
        trace: path.display().to_string(),
        events: events.len(),
        tenants: tenants.len(),
        seconds: events.last().map_or(0, |event| event.time_us) as f64 / 1e6,
        puts: unevicted.puts,
        gets: unevicted.gets,
        peak_bytes: unevicted.peak_bytes,
        hit_ratio_max: unevicted.hit_ratio(),
        mean: PolicyKind::ALL.map(of_policy).into(),
        sizes: at_sizes,
    })
}

fn print(result: &Replayed) {
    let row = |first: String, ratios: &mut dyn Iterator<Item = f64>| {
        print!("{first:>14}");
        ratios.for_each(|ratio| print!("{:18.1} %", 100.0 * ratio));
        println!();
    };
    for trace in &result.traces {
        println!(
            "{}: {} puts and {} gets in {:.0} s, tenants: {}; without eviction {:.1} MiB and {:.1} % hits",
            trace.trace,
            trace.puts,
            trace.gets,
            trace.seconds,
            trace.tenants,
            trace.peak_bytes as f64 / MIB,
            100.0 * trace.hit_ratio_max
        );
        print!("{:>14}", "pool");
        PolicyKind::ALL
            .iter()
            .for_each(|policy| print!("{:>20}", policy.name()));
        println!();
        for at in &trace.sizes {
            let ratios = PolicyKind::ALL.map(|policy| at.policies[policy.name()].hit_ratio);
            row(
                format!("{:.1} MiB", at.size_bytes as f64 / MIB),
                &mut ratios.into_iter(),
            );
        }
        let means = PolicyKind::ALL.map(|policy| trace.mean[policy.name()]);
        row("mean".into(), &mut means.into_iter());
        println!();
    }
    let means = PolicyKind::ALL.map(|policy| result.mean[policy.name()]);
    row("all traces".into(), &mut means.into_iter());
}

/// Replays the traces and prints the results.
///
/// # Errors
/// A trace cannot be read.
pub fn run(args: &Args) -> Result<(), String> {
    let traces: Result<Vec<Trace>, String> =
        args.traces.iter().map(|path| trace(path, args)).collect();
    let traces = traces?;
    let of_policy = |policy: PolicyKind| {
        let ratios = traces.iter().map(|trace| trace.mean[policy.name()]);
        (policy.name(), mean(ratios))
    };
    let result = Replayed {
        mean: PolicyKind::ALL.map(of_policy).into(),
        traces,
    };
    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&result).expect("the results cannot be written as JSON")
        );
    } else {
        print(&result);
    }
    Ok(())
}
