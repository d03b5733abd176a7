// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon without sockets and background threads, for the simulator, the fuzzer and benchmarks.

use std::sync::Arc;
use tmem_pool::{Engine, EngineConfig, Quota, Tenant, TenantSpec, Time};
use tmemd::VmConfig;
use tmemd::events::bus::Events;
use tmemd::parts::{BackgroundWorkers, ClockAndEntropy, ConnectionContext, Vm, Workers};

/// Weight of a tenant for which the caller of [`HeadlessDaemon`] gives no quota.
const WEIGHT: u32 = 100;

/// A daemon with the real engine and the real data path, but without sockets and threads. The code
/// that uses it calls the background work, and provides workers with or without threads.
pub struct HeadlessDaemon {
    /// The engine, which stores the pages of all VMs.
    pub engine: Arc<Engine>,
    /// Background workers, which have no threads: [`HeadlessDaemon::maintain`] does their work.
    pub background: Arc<BackgroundWorkers>,
    /// Source of times and random numbers, which the simulator can replace.
    pub clock: ClockAndEntropy,
}

impl HeadlessDaemon {
    /// Creates a daemon with an empty pool of `size_bytes` bytes. `seed` is the seed of the
    /// engine's hashes.
    pub fn new(size_bytes: u64, seed: u64, clock: ClockAndEntropy) -> HeadlessDaemon {
        let engine = Engine::new(EngineConfig::new(size_bytes, seed))
            .expect("cannot reserve address space for the pool");
        let background = BackgroundWorkers::start(engine.clone(), &clock, 0, &Arc::default());
        HeadlessDaemon {
            engine,
            background: background.expect("cannot create background workers without threads"),
            clock,
        }
    }

    /// Adds a tenant (the record of a VM in the pool) with a reserve and without a limit.
    pub fn tenant(&self, name: &str, trust_domain: Option<&str>, reserve_bytes: u64) -> Tenant {
        let quota = Quota {
            reserve_bytes,
            limit_bytes: None,
            weight: WEIGHT,
        };
        self.tenant_with(name, trust_domain, quota)
    }

    /// Adds a tenant (the record of a VM in the pool) with the given quota.
    pub fn tenant_with(&self, name: &str, trust_domain: Option<&str>, quota: Quota) -> Tenant {
        let mut spec = TenantSpec::new(name, quota);
        spec.trust_domain = trust_domain.map(Into::into);
        self.engine
            .add_tenant(spec)
            .expect("the reserve does not fit into the pool")
    }

    /// Creates a VM whose pages are stored as those of `tenant`.
    pub fn vm(&self, name: &str, tenant: Tenant, events: Arc<Events>) -> Arc<Vm> {
        let config: VmConfig = format!("name={name},socket=none")
            .parse()
            .expect("the VM's name is invalid");
        Arc::new(Vm::new(config, tenant, None, events))
    }

    /// Returns the context that a connection of a VM needs: `workers`, the background workers and
    /// the clock.
    pub fn context(&self, workers: Workers) -> ConnectionContext {
        ConnectionContext {
            workers: Arc::new(workers),
            background: self.background.clone(),
            clock: self.clock.clone(),
        }
    }

    /// Does the background workers' work for at most `pages` pages, with `now_ns` as the current
    /// time. Returns true if more work is left.
    pub fn maintain(&self, now_ns: u64, pages: usize) -> bool {
        self.engine.maintain(Time(now_ns), pages)
    }
}
