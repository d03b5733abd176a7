// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Daemons that run in the process of a test, for tests, the simulator, the fuzzer and benchmarks.
//!
//! [`TestDaemon`] is a complete daemon with its files in a directory of its own. [`HeadlessDaemon`]
//! is a daemon without sockets and background threads. The code that uses it calls the background
//! work, and sends the messages of a VMM by calls ([`set_up_ring`]). No other module of this crate
//! uses the daemon's code, because the guest and the oracle are written from the specification
//! alone.

mod complete;
mod headless;
mod messages;

pub use complete::TestDaemon;
pub use headless::HeadlessDaemon;
pub use messages::{RingSetup, generation, notifiers, set_up_ring, stop_ring};
