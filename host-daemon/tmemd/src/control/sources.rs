// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of the daemon that the control interface works on, and the statistics that it caches.

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

/// The statistics that the interface returns, all taken at about the same time.
#[derive(Debug)]
pub struct Figures {
    /// The VMs and their quotas.
    pub list: Vec<api::Vm>,
    /// Statistics of the daemon.
    pub daemon: api::DaemonStats,
    /// Statistics of the pool.
    pub pool: api::PoolStats,
    /// Statistics of each VM.
    pub vms: Vec<api::VmStats>,
    /// Bytes that the pool holds, bytes that it could free, bytes that it could free without going
    /// below a reserve, and unused bytes in the pool's page frames.
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
    /// The configured and the current size of the pool.
    pub size: Arc<PoolSize>,
    /// The subscribers to events.
    pub events: Arc<Events>,
    /// Unix time of the daemon's start, in seconds.
    pub start_time_seconds: i64,
    /// Largest value of `cpu_other_ms` that was returned.
    pub cpu_other_ms: AtomicI64,
    /// The daemon's clock, from which the uptime is read.
    pub clock: ClockAndEntropy,
    /// Snapshot of the statistics that all read-only clients share.
    pub snapshot: Snapshot<Figures>,
}
