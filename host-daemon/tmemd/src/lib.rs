// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: the host daemon of virtio-tmem. Almost all its code is in this library; the binary in
//! `main.rs` is small.
//!
//! One process serves all VMs of a host. It has one vhost-user connection for each VM, and one pool
//! that stores the pages of all VMs.
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
//! Code imports from directories further up in this table only; `tests/model/tests/module_graph.rs`
//! fails on a cycle between directories or files.
//!
//! # Lock order
//!
//! A thread that holds a lock of this list takes only locks that are further down in the list:
//!
//! 1. The lock of the configuration. A reload holds it.
//! 2. The lock of the registry of VMs. Only the acceptor and control clients take it, so no guest
//!    or VMM waits for it.
//! 3. The lock of the pool's size (`host/pressure.rs`).
//! 4. The locks of a connection's vrings. The connection's control thread may hold the locks of all
//!    its vrings, and takes them in the order of the vrings' numbers. A worker only tries to lock
//!    one vring.
//! 5. Leaf locks, of which a thread holds one at a time: the lock of a worker's kicks or inbox, of
//!    the dirty log's map, of a VM's report, of a trace, and the pool's own locks. There is one
//!    exception: a thread that holds the lock of a poller's ring may take the lock of the poller's
//!    list of changes.
//!
//! A thread that sends an event takes three locks in this order: the lock of the VM's waiting
//! events, that of the list of subscribers, and that of one subscriber's queue. While it holds
//! them, it takes no other lock except that of the VM's name.

pub mod config;
mod control;
mod daemon;
pub mod events;
pub mod host;
mod memory;
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
