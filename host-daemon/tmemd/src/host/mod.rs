// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Code for the daemon's host: clock and entropy, heartbeats and the watchdog, the sandbox,
//! resource usage, memory pressure, and the background worker threads.
//!
//! Belongs here: code that talks to the host kernel or the service manager and knows no VM. Out of
//! scope: guest memory, see `memory/`.

pub mod available;
pub(crate) mod background;
pub(crate) mod clock;
pub mod heartbeat;
pub mod pressure;
pub mod sandbox;
pub(crate) mod usage;
pub mod watchdog;
