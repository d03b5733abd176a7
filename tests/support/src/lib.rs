// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Daemons for tests, the simulator, the fuzzer and the benchmarks.
//!
//! [`TestDaemon`] is a complete daemon in the test's process, with its files in a directory of its
//! own. [`HeadlessDaemon`] is a daemon without sockets and background threads. The code that uses
//! it calls the background work. Out of scope: guests, which are in `tmem-model`. [`module_graph`]
//! finds import cycles in a crate.

mod daemon;
mod headless;
pub mod module_graph;

pub use daemon::TestDaemon;
pub use headless::HeadlessDaemon;
