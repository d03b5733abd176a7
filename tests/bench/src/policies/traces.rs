// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads traces and replays them with one of the engine's eviction policies in a pool of any size.
//!
//! docs/traces.md describes how tmemd records traces, their contents, and what a replay leaves out.

pub use super::replay::Outcome;
use super::replay::Replay;
use std::path::Path;
use tmem_pool::PolicyKind;
use tmem_trace::format::{Event, Reader, TraceError};

/// Largest size of a decompressed trace in bytes: sixteen times the size at which recording ends by
/// default. A trace whose header gives a larger size is refused.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// First bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

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
