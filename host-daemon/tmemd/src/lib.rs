// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: the host daemon of virtio-tmem, as a library and a thin binary.
//!
//! One process serves all VMs of a host: a vhost-user connection for each VM, a pool for all.
//!
//! | file | its idea |
//! | --- | --- |
//! | `config.rs`, `file.rs` | what it is told, and where that is written |
//! | `daemon.rs`, `sockets.rs` | start, stop, listening sockets |
//! | `registry.rs`, `notes.rs` | which VMs there are, and what is noted of them for the next start |
//! | `connection.rs`, `device.rs` | a connection's control thread and its messages |
//! | `memory.rs`, `dirty.rs` | guest memory and the dirty log |
//! | `peer.rs` | whether that memory is still the guest's: the front end is there |
//! | `worker.rs`, `poller.rs` | data workers, how they wait |
//! | `run_queue.rs`, `vring.rs` | whose turn it is, what is done in a turn |
//! | `chain.rs`, `request.rs`, `execute.rs` | a descriptor chain, what it asks, what is done |
//! | `vm.rs`, `janitor.rs` | a VM and its counters, background work |
//! | `control.rs`, `events.rs` | control interface, who is told what happened |
//! | `statistics.rs`, `latency.rs`, `usage.rs` | figures: all of them, times of requests, what the daemon takes |
//! | `pressure.rs` | the pool gives way when the host is short of memory |
//! | `recorder.rs` | what guests ask, into a file |
//! | `outside.rs` | time and chance, which a simulator can give |
//!
//! Threads and locks: a connection's control thread may hold all its vrings' locks, in the order of
//! their numbers; a worker tries one vring's lock. Under them come a worker's registry or inbox,
//! the dirty log's map, a VM's report, a trace and the pool's own locks, each taken with none of the
//! others. Above all is the registry's lock, which the acceptor and control clients alone take, and
//! no thread that a guest or its VMM waits for; above it only the one of a reload. Above the pool's own
//! is that of its size. Who tells an event holds the list of subscribers and one's queue, and nothing
//! is taken under them.

mod chain;
pub mod config;
mod connection;
mod control;
mod daemon;
mod device;
mod dirty;
pub mod events;
mod execute;
pub mod file;
mod janitor;
mod latency;
mod memory;
mod notes;
mod outside;
mod peer;
mod poller;
pub mod pressure;
mod recorder;
mod registry;
pub mod request;
mod run_queue;
mod sockets;
mod statistics;
mod usage;
mod vm;
mod vring;
mod worker;

pub use config::{Config, ConfigError, PressureConfig, TraceConfig, VmConfig};
pub use daemon::{Daemon, StartError};

/// The daemon without its threads and sockets, for the simulator alone.
#[doc(hidden)]
pub mod parts {
    pub use crate::connection::{Session, Shared};
    pub use crate::device::Device;
    pub use crate::janitor::Janitor;
    pub use crate::outside::{Outside, Told};
    pub use crate::peer::{HungUp, Peer};
    pub use crate::vm::Vm;
    pub use crate::worker::{Hands, Workers};
}
