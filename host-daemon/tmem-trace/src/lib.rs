// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traces of requests to a pool, estimates of the hits that a pool of another size would have, and the
//! table of statistics.
//!
//! | module | contents | users |
//! | --- | --- | --- |
//! | [`format`](mod@format) | writer and reader of traces | `tmemd --trace`, `tmemctl trace`, `tmem-bench policies` |
//! | [`estimate`] | hits with more memory, misses with less, and the error bounds of both | the engine, `tmemctl advise` |
//! | [`statistics`] | table of all statistics | the engine, `tmemd`, `tmemctl`, `tmem-exporter` |
//!
//! The crate has no dependencies, so that the engine and the tools can share it: the tools do not
//! link the engine.

pub mod estimate;
pub mod format;
#[cfg(test)]
#[path = "../../tmem-pool/src/tests/rng.rs"]
mod rng;
pub mod statistics;
