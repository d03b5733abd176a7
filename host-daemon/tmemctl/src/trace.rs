// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmemctl trace`: summarizes a trace of requests that `tmemd --trace` recorded. docs/traces.md
//! describes the format. `tmem-bench policies` sends the requests of a trace to another pool.

use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::table::{Align, percent, table};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tmem_trace::format::{Op, Reader};

/// Options of `trace`.
#[derive(Args, Clone)]
pub struct TraceArguments {
    /// Path of the trace, uncompressed
    file: PathBuf,
}

/// Numbers of requests of one VM in a trace, by kind and result.
#[derive(Default, Serialize)]
struct Part {
    vm: u32,
    puts: u64,
    gets: u64,
    hits: u64,
    gets_retaining: u64,
    refs: u64,
    refs_gone: u64,
    flushes: u64,
    clears: u64,
}

/// Prints the summary of a trace.
pub fn run(arguments: &TraceArguments) -> Result<Output, Failure> {
    let path = arguments.file.display();
    let failed = |what: String| Failure(format!("trace {path}: {what}"), Code::Failed);
    let bytes = std::fs::read(&arguments.file).map_err(|error| failed(error.to_string()))?;
    let compressed = bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    let reader = Reader::new(&bytes).map_err(|error| match compressed {
        true => failed("it is compressed: decompress it with zstd -d first".into()),
        false => failed(error.to_string()),
    })?;
    let mut parts: BTreeMap<u32, Part> = BTreeMap::new();
    let (mut events, mut time_us, mut whole) = (0u64, 0, true);
    for event in reader {
        // If the daemon was killed, the last event of the trace may be incomplete.
        let Ok(event) = event else {
            whole = false;
            break;
        };
        events += 1;
        time_us = event.time_us;
        let part = parts.entry(event.tenant).or_default();
        part.vm = event.tenant;
        match event.op {
            Op::Put { .. } => part.puts += 1,
            Op::Get { hit, .. } => {
                part.gets += 1;
                part.hits += u64::from(hit);
            }
            Op::GetRetaining { hit, .. } => {
                part.gets += 1;
                part.hits += u64::from(hit);
                part.gets_retaining += 1;
            }
            Op::Ref { held, .. } => {
                part.refs += 1;
                part.refs_gone += u64::from(!held);
            }
            Op::Flush { .. } | Op::FlushObject(_) | Op::DestroyPool(_) => part.flushes += 1,
            Op::Clear => part.clears += 1,
        }
    }
    let parts: Vec<Part> = parts.into_values().collect();
    let columns = [
        "VM",
        "PUTS",
        "GETS",
        "HITS",
        "HIT RATE",
        "RETAINING",
        "REFS",
        "GONE",
        "FLUSHES",
        "CLEARS",
    ];
    let row = |part: &Part| {
        vec![
            part.vm.to_string(),
            part.puts.to_string(),
            part.gets.to_string(),
            part.hits.to_string(),
            percent(part.hits as i64, part.gets as i64),
            part.gets_retaining.to_string(),
            part.refs.to_string(),
            part.refs_gone.to_string(),
            part.flushes.to_string(),
            part.clears.to_string(),
        ]
    };
    let seconds = time_us as f64 / 1e6;
    let cut = if whole {
        ""
    } else {
        "; the end of the trace is missing"
    };
    let text = format!(
        "{events} events in {seconds:.1} s{cut}\n\n{}",
        table(
            &columns.map(|head| (head, Align::Right)),
            &parts.iter().map(row).collect::<Vec<_>>()
        )
    );
    let json = serde_json::json!({
        "events": events, "seconds": seconds, "complete": whole, "vms": parts,
    });
    Ok(Output { text, json })
}
