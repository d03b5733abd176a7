// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of the daemon that the control interface reads and changes, and the snapshot of its
//! statistics.

use crate::control::snapshot::Snapshot;
use crate::events::bus::Events;
use crate::host::background::BackgroundWorkers;
use crate::host::clock::ClockAndEntropy;
use crate::host::pressure::PoolSize;
use crate::queue::worker::Workers;
use crate::vm::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use tmem_control as api;
use tmem_pool::Engine;

/// Statistics that the control interface returns, all read at about the same time.
#[derive(Debug)]
pub struct Figures {
    /// Identity and quota of each VM.
    pub list: Vec<api::Vm>,
    /// Statistics of the daemon.
    pub daemon: api::DaemonStats,
    /// Statistics of the pool.
    pub pool: api::PoolStats,
    /// Statistics of each VM.
    pub vms: Vec<api::VmStats>,
    /// Four amounts in bytes: memory that the pool holds; memory that it could free; memory that it
    /// could free without going below the VMs' reserves; unused memory in its page frames.
    pub freeable: [i64; 4],
}

/// The parts of the daemon that the control sockets read and change.
pub struct Sources {
    /// The engine, which stores the pages of all VMs.
    pub engine: Arc<Engine>,
    /// The registry of the VMs that the daemon serves.
    pub registry: Arc<Registry>,
    /// The data workers, which answer requests of guests.
    pub workers: Arc<Workers>,
    /// The background workers, which compress and evict pages.
    pub background: Arc<BackgroundWorkers>,
    /// The configured size and the current size of the pool.
    pub size: Arc<PoolSize>,
    /// The subscribers to events, to which events are sent.
    pub events: Arc<Events>,
    /// Unix time of the daemon's start, in seconds.
    pub start_time_seconds: i64,
    /// Largest value of the counter `cpu_other_ms` that was returned so far. A counter must not
    /// decrease, so no smaller value is returned.
    pub cpu_other_ms: AtomicI64,
    /// The daemon's clock. The control interface reads the uptime from it.
    pub clock: ClockAndEntropy,
    /// Snapshot of the statistics that all read-only clients share.
    pub snapshot: Snapshot<Figures>,
}
