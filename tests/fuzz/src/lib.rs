// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fuzz targets: guests and front ends that do whatever a fuzzer's bytes say.
//!
//! A target is a function of bytes that panics if the daemon breaks a promise. `tests/fuzz/targets/`
//! runs the targets under libFuzzer, guided by coverage, and keeps interesting inputs in
//! `fuzz/corpus/`. The tests of this crate run the targets with that corpus again, without
//! libFuzzer.
//!
//! - [`requests`]: the bytes are requests, in well-formed chains. Each answer must be as specified,
//!   and the daemon must write nothing else.
//! - [`rings`]: the bytes are rings, descriptors, requests, and concurrent actions. Answers must be
//!   as specified. Where a concurrent change makes the requests unknown, the target checks only
//!   bounds, the order of answers and the pages of another VM, the neighbour.
//! - [`messages`]: the bytes are vhost-user messages, sent through the socket. The daemon must
//!   continue and serve another VM, the neighbour.
//!
//! Out of scope: sequences that only a well-behaved guest sends, which `tmem-model` and `tmem-simulator`
//! test.

mod host;
mod input;
mod judge;
mod machine;
mod messages;
mod ram;
mod requests;
mod rings;

pub use messages::run as messages;
pub use requests::run as requests;
pub use rings::run as rings;

/// Name and function of a fuzz target.
pub type Target = (&'static str, fn(&[u8]));

/// All fuzz targets.
pub const TARGETS: [Target; 3] = [
    ("requests", requests),
    ("rings", rings),
    ("messages", messages),
];
