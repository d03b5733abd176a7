// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: the host daemon of virtio-tmem, as a library and a small binary.
//!
//! One process serves all VMs of a host: a vhost-user connection for each VM, and one pool for all.
//!
//! | directory | contents |
//! | --- | --- |
//! | `config/` | settings, the configuration file, users and groups that it names |
//! | `util/` | eventfds, token bucket, limits of log lines and requests, latency histogram |
//! | `events/` | events for clients of the control interface, and their limit for each VM |
//! | `host/` | clock, heartbeats, watchdog, sandbox, resource usage, memory pressure, background workers |
//! | `socket/` | listening sockets, credentials of peers |
//! | `memory/` | guest memory: table, mappings, dirty log, lost pages, check of the front end |
//! | `vm/` | state of a VM, registry of all VMs, store of added VMs, trace recorder |
//! | `queue/` | data path: workers, scheduling, virtqueues, requests, interrupts |
//! | `vhost/` | vhost-user connection and device |
//! | `control/` | varlink interface, statistics |
//! | `daemon/` | start, reload, stop, accepting connections |
//!
//! Code imports from directories further up in this table only; a test in `module_graph_test.rs`
//! fails on a cycle between directories or files.
//!
//! # Lock order
//!
//! A thread that holds a lock of this list takes only locks that are further down in it:
//!
//! 1. The configuration of a reload.
//! 2. The registry of VMs. Only the acceptor and control clients take it, so no guest or VMM waits
//!    for it.
//! 3. The size of the pool (`host/pressure.rs`).
//! 4. The vrings of a connection. Its control thread may hold all of them, in the order of their
//!    numbers; a worker tries to lock one.
//! 5. Leaf locks, of which a thread holds one at a time: a worker's kicks or inbox, the dirty log's
//!    map, a VM's report, a trace, and the pool's own locks. Only a poller's ring is held while the
//!    poller's list of changes is taken.
//!
//! A thread that sends an event takes three locks in this order: the VM's waiting events, the list
//! of subscribers, and the queue of one subscriber. While it holds them, it takes no other lock
//! except that of the VM's name.

pub mod config;
mod control;
mod daemon;
pub mod events;
pub mod host;
mod memory;
#[cfg(test)]
mod module_graph_test;
pub mod queue;
mod socket;
mod util;
mod vhost;
mod vm;

pub use config::settings::{Config, ConfigError, PressureConfig, TraceConfig, VmConfig};
pub use daemon::lifecycle::{Daemon, StartError};

/// Parts of the daemon without threads and sockets, for the simulator, the fuzzer and the
/// benchmarks only.
#[doc(hidden)]
pub mod parts {
    pub use crate::host::background::BackgroundWorkers;
    pub use crate::host::clock::{ClockAndEntropy, SimulatedClock};
    pub use crate::memory::peer::{HungUp, Peer};
    pub use crate::queue::worker::{WorkerContext, Workers};
    pub use crate::vhost::connection::{ConnectionContext, Session, serve};
    pub use crate::vhost::device::Device;
    pub use crate::vm::state::Vm;
}
