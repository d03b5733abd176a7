// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: the host daemon of virtio-tmem, as a library and a thin binary.
//!
//! One process serves all VMs of a host: a vhost-user connection for each VM, a pool for all.
//!
//! | file | its idea |
//! | --- | --- |
//! | `config.rs`, `file.rs`, `account.rs` | what it is told, and where that is written; users and groups of it |
//! | `daemon.rs`, `sockets.rs` | start, stop, listening sockets |
//! | `registry.rs`, `notes.rs` | which VMs there are, and what is noted of them for the next start |
//! | `connection.rs`, `device.rs` | a connection's control thread and its messages |
//! | `reply.rs` | how replies are sent without a call that could pass descriptors |
//! | `memory.rs`, `dirty.rs` | guest memory and the dirty log |
//! | `lost.rs` | what if a page of them is gone when it is touched |
//! | `peer.rs` | whether that memory is still the guest's: the front end is there |
//! | `worker.rs`, `poller.rs` | data workers, how they wait: with `uring.rs` or `epoll.rs` |
//! | `bell.rs`, `polling.rs` | calls, which never wait; how long to look before asking for a kick |
//! | `run_queue.rs`, `slice.rs`, `vring.rs` | whose turn it is, how much work a turn may do, what is done in a turn |
//! | `chain.rs`, `request.rs`, `execute.rs` | a descriptor chain, what it asks, what is done |
//! | `vm.rs`, `rate.rs`, `background.rs` | a VM and its counters, how much it may ask for, background work |
//! | `control.rs`, `events.rs`, `event_limit.rs` | control interface, who is told what happened, how much of it a VM can cause |
//! | `snapshot.rs` | figures that clients which only read share for a short time |
//! | `log_limit.rs`, `bucket.rs` | how many lines of log others can cause, how often something may happen |
//! | `statistics.rs`, `latency.rs`, `usage.rs` | figures: all of them, times of requests, what the daemon takes |
//! | `pressure.rs` | the pool gives way when the host is short of memory |
//! | `heartbeats.rs`, `watchdog.rs` | whether each thread goes on, and who is told if one does not |
//! | `sandbox.rs` | what the process can still do when somebody else steers it |
//! | `recorder.rs` | what guests ask, into a file |
//! | `clock.rs` | time and chance, which a simulator can give |
//!
//! Threads and locks: a connection's control thread may hold all its vrings' locks, in the order of
//! their numbers; a worker tries one vring's lock. Under them come a worker's registry or inbox,
//! the ring that it waits in and what that is to be told, the dirty log's map, a VM's report, a trace and the pool's own locks, each taken with none of the
//! others. Above all is the registry's lock, which the acceptor and control clients alone take, and
//! no thread that a guest or its VMM waits for; above it only the one of a reload. Above the pool's own
//! is that of its size. Who tells an event holds the list of subscribers and one's queue, and nothing
//! is taken under them; above them, and the VM's name, is the lock of what a VM's limit has waiting.

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

/// The daemon without its threads and sockets, for the simulator and the benchmark alone.
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
