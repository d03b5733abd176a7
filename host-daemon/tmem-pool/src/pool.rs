// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pool: all tenants, one size, and the choice of whose pages go when it is full.
//!
//! Locks: the registry's guards membership and quotas, is taken for reading by those who look for
//! a victim and for writing when tenants come, go or change. It is the outermost lock.

use crate::account::Sum;
use crate::blob::Store;
use crate::config::{
    EVICT_STEP_PAGES, KEYS_PER_TENANT_MAX, PAGE_SIZE, PoolConfig, Quota, TenantSpec, Time,
};
use crate::entry::Gauges;
use crate::error::AdmissionError;
use crate::hash::{self, HashFn};
use crate::registry::Registry;
use crate::state::Reason;
use crate::stats::PoolStats;
use crate::tenant::{self, Tenant};
use std::fmt;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) struct Inner {
    pub store: Arc<Store>,
    pub size_bytes: Sum,
    pub seed: u64,
    pub hash: HashFn,
    keys_per_tenant_max: u64,
    registry: RwLock<Registry>,
}

const POISONED: &str = "a panic under the registry's lock left it unknown";

impl Inner {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Registry> {
        self.registry.read().expect(POISONED)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Registry> {
        self.registry.write().expect(POISONED)
    }

    pub(crate) fn quota(&self, tenant: &Arc<tenant::Inner>) -> Quota {
        self.read().quota(tenant)
    }

    pub(crate) fn set_quota(
        &self,
        tenant: &Arc<tenant::Inner>,
        quota: Quota,
    ) -> Result<(), AdmissionError> {
        self.write().set_quota(tenant, quota)
    }

    pub(crate) fn depart(&self, tenant: &Arc<tenant::Inner>) {
        if self.write().depart(tenant) {
            self.store.account.tenants.sub(1);
        }
    }

    fn is_over(&self, extra_bytes: u64) -> bool {
        self.store.account.held_bytes() + extra_bytes > self.size_bytes.get()
    }

    /// Frees or evicts pages, in at most about `budget` steps, until `extra_bytes` more fit. True
    /// if they do.
    pub(crate) fn make_room(&self, extra_bytes: u64, mut budget: usize) -> bool {
        while self.is_over(extra_bytes) {
            let step = budget.min(EVICT_STEP_PAGES);
            let mut done = self.reap(step);
            if done == 0 {
                done = self.evict(step);
            }
            if done == 0 {
                return false;
            }
            budget = budget.saturating_sub(done);
        }
        true
    }

    /// Frees up to `pages` that were detached: those of departed tenants first. Returns the steps
    /// made.
    fn reap(&self, pages: usize) -> usize {
        let registry = self.read();
        let tenants = registry
            .departed
            .iter()
            .chain(registry.members.iter().map(|m| &m.tenant));
        let Some(tenant) = tenants.into_iter().find(|t| t.has_dead()).cloned() else {
            return 0;
        };
        drop(registry);
        let mut freed = Vec::with_capacity(pages);
        let steps = tenant.lock().reap(&self.store.account, pages, &mut freed);
        drop(freed);
        if !tenant.has_dead() {
            self.forget(&tenant);
        }
        steps
    }

    /// Removes a tenant that left and is empty.
    fn forget(&self, tenant: &Arc<tenant::Inner>) {
        if !self
            .read()
            .departed
            .iter()
            .any(|departed| Arc::ptr_eq(departed, tenant))
        {
            return;
        }
        let mut registry = self.write();
        let before = registry.departed.len();
        registry
            .departed
            .retain(|departed| !Arc::ptr_eq(departed, tenant));
        self.store
            .account
            .tenants
            .sub((before - registry.departed.len()) as u64);
    }

    /// Evicts up to `pages` of the tenant most above its entitlement. Returns the steps made.
    fn evict(&self, pages: usize) -> usize {
        let victim = {
            let registry = self.read();
            let tenants = registry.members.iter().map(|member| &member.tenant);
            let holders = tenants.filter(|tenant| tenant.charged_bytes.get() > 0);
            holders.max_by_key(|tenant| tenant.excess_bytes()).cloned()
        };
        victim.map_or(0, |victim| self.evict_from(&victim, pages, Reason::Pool))
    }

    fn evict_from(&self, tenant: &tenant::Inner, pages: usize, reason: Reason) -> usize {
        let mut freed = Vec::with_capacity(pages);
        tenant
            .lock()
            .evict(&self.store.account, pages, reason, &mut freed)
    }

    /// A tenant above its own limit, as it can be when that was lowered.
    fn over_limit(&self) -> Option<Arc<tenant::Inner>> {
        let registry = self.read();
        let over = registry.members.iter().find(|member| {
            let limit_bytes = member.quota.limit_bytes.unwrap_or(u64::MAX);
            member.tenant.charged_bytes.get() > limit_bytes
        });
        over.map(|member| Arc::clone(&member.tenant))
    }

    /// One step of background work. 0: nothing is left to do.
    fn maintain_step(&self, pages: usize) -> usize {
        let reaped = self.reap(pages);
        if reaped > 0 {
            return reaped;
        }
        if self.is_over(0) {
            let evicted = self.evict(pages.min(EVICT_STEP_PAGES));
            if evicted > 0 {
                return evicted;
            }
        }
        // One page at a time, so as not to go below the limit.
        self.over_limit()
            .map_or(0, |tenant| self.evict_from(&tenant, 1, Reason::Limit))
    }

    fn has_work(&self) -> bool {
        let registry = self.read();
        let members = || registry.members.iter().map(|member| &member.tenant);
        let dead = registry
            .departed
            .iter()
            .chain(members())
            .any(|t| t.has_dead());
        let evictable = || members().any(|tenant| tenant.charged_bytes.get() > 0);
        let over = self.is_over(0) && evictable();
        drop(registry);
        dead || over || self.over_limit().is_some()
    }
}

/// The storage engine. Clones are handles to the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("size_bytes", &self.0.size_bytes.get())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// An empty pool without tenants.
    pub fn new(config: PoolConfig) -> Pool {
        Pool::with(config, hash::page_hash, KEYS_PER_TENANT_MAX)
    }

    /// Another hash and limit, for tests.
    pub(crate) fn with(config: PoolConfig, hash: HashFn, keys_per_tenant_max: u64) -> Pool {
        let PoolConfig { size_bytes, seed } = config;
        let size = Sum::default();
        size.set(size_bytes);
        Pool(Arc::new(Inner {
            store: Arc::new(Store::new(size_bytes)),
            size_bytes: size,
            seed,
            hash,
            keys_per_tenant_max,
            registry: RwLock::new(Registry::new(size_bytes)),
        }))
    }

    /// Adds a tenant without pools.
    ///
    /// # Errors
    /// Its reserve does not fit beside those of the others.
    pub fn add_tenant(&self, spec: TenantSpec) -> Result<Tenant, AdmissionError> {
        let inner = &self.0;
        let make =
            |spec: &TenantSpec, domain| tenant::Inner::new(spec, domain, inner.keys_per_tenant_max);
        let tenant = inner.write().add(spec, make)?;
        inner.store.account.tenants.add(1);
        Ok(Tenant::new(Arc::clone(inner), tenant))
    }

    /// Changes the size. What is too much is evicted in bounded steps of
    /// [`maintain`](Self::maintain) and of puts. Below the sum of all reserves, these scale down.
    pub fn resize(&self, size_bytes: u64) {
        let mut registry = self.0.write();
        self.0.size_bytes.set(size_bytes);
        registry.resize(size_bytes);
    }

    /// Background work: freeing what was detached, eviction down to the size and to limits. At most
    /// about `budget` pages; true if more is left.
    pub fn maintain(&self, _now: Time, budget: usize) -> bool {
        let mut left = budget;
        while left > 0 {
            let done = self.0.maintain_step(left.min(EVICT_STEP_PAGES));
            if done == 0 {
                return false;
            }
            left = left.saturating_sub(done);
        }
        self.0.has_work()
    }

    /// Gauges and counters as of now; those of different tenants are not of one instant.
    pub fn stats(&self) -> PoolStats {
        let registry = self.0.read();
        let account = &self.0.store.account;
        let mut stats = PoolStats {
            size_bytes: self.0.size_bytes.get(),
            payload_bytes: account.payload_bytes.get(),
            metadata_bytes: account.metadata_bytes(),
            tenants: registry.members.len() as u64,
            blobs: account.blobs.get(),
            reserved_bytes: registry.reserved_bytes(),
            departed_tenants: registry.departed.len() as u64,
            ..PoolStats::default()
        };
        stats.held_bytes = stats.payload_bytes + stats.metadata_bytes;
        stats.add_counters(registry.gone);
        let mut detached = Gauges::default();
        for member in &registry.members {
            let state = member.tenant.lock();
            let gauges = state.index.gauges;
            stats.pages += u64::from(gauges.pages);
            stats.same_filled_pages += u64::from(gauges.same_filled_pages);
            stats.compressed_bytes += gauges.compressed_bytes;
            stats.charged_bytes += gauges.charged_bytes();
            detached.add(state.detached);
            stats.add_counters(state.counters);
        }
        for departed in &registry.departed {
            detached.add(departed.lock().detached);
        }
        stats.detached_pages = detached.pages.into();
        let with_blob = stats.pages + stats.detached_pages
            - stats.same_filled_pages
            - u64::from(detached.same_filled_pages);
        // A put in progress may have a blob and no key yet.
        stats.shared_pages = with_blob.saturating_sub(stats.blobs);
        stats.original_bytes = stats.pages * PAGE_SIZE as u64;
        stats
    }
}

impl Pool {
    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }
}
