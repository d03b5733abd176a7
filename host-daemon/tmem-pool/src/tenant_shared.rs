// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of a tenant that all threads of the engine share, and its lock.
//!
//! A panic under a tenant's lock empties that tenant, because its state is unknown after the panic.
//! The process continues. If the lock stayed poisoned instead, it would also stop threads that work
//! for other tenants, for example to evict pages.

use crate::config::{
    DomainId, PAGE_SIZE, PolicyKind, RAW_DIVISOR, RAW_PAGES_MAX, RAW_PAGES_MIN, TenantSpec,
};
use crate::index::{Chunks, Sharing};
use crate::state::State;
use crate::stats::Counters;
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::totals::{Sum, Totals};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Parameters that the engine passes to each new tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantParams {
    pub seed: u64,
    pub chunks: Arc<Chunks>,
    pub keys_per_tenant_max: u32,
    pub policy: PolicyKind,
}

/// The part of a tenant that all threads of the engine share. Its sums and flags are copies of
/// values that the tenant's lock guards, for threads that do not hold the lock.
#[derive(Debug)]
pub(crate) struct TenantShared {
    name: String,
    domain: DomainId,
    private_domain: DomainId,
    state: Mutex<State>,
    params: TenantParams,
    pub charged_bytes: Sum,
    pub entitled_bytes: Sum,
    /// Bytes that are compared with the entitlement: the tenant's charge or, if that is larger, its
    /// stored bytes and index memory. Stored bytes and index memory together may be more than the
    /// charge, because the memory of a key is released only when all neighbouring keys are gone.
    owed_bytes: Sum,
    /// Memory in bytes of the tenant's index, eviction policy, estimator and queue of raw pages.
    index_bytes: Sum,
    /// True if the engine's totals include this tenant. A thread clears the flag under the tenant's
    /// lock when the tenant has departed.
    is_in_totals: AtomicBool,
    /// True if the tenant has detached pages: dropped with their object or pool, and not freed yet.
    has_detached: AtomicBool,
    /// True if the tenant's queue of raw pages (not finalized yet) is not empty.
    has_raw: AtomicBool,
    /// True if the tenant has retained pages, which a get returned and left in the pool.
    has_retained: AtomicBool,
    mismatch_logged: AtomicBool,
}

impl TenantShared {
    /// Creates the record of a tenant. `private_domain` is the domain of its private pools.
    pub(crate) fn new(
        spec: &TenantSpec,
        (domain, private_domain): (DomainId, DomainId),
        params: &TenantParams,
    ) -> TenantShared {
        let limit_bytes = spec.quota.limit_bytes.unwrap_or(u64::MAX);
        TenantShared {
            name: spec.name.clone(),
            domain,
            private_domain,
            state: Mutex::new(State::new(
                params.seed,
                params.keys_per_tenant_max,
                limit_bytes,
                params.policy,
                &params.chunks,
            )),
            params: params.clone(),
            charged_bytes: Sum::default(),
            entitled_bytes: Sum::default(),
            owed_bytes: Sum::default(),
            index_bytes: Sum::default(),
            is_in_totals: AtomicBool::new(true),
            has_detached: AtomicBool::new(false),
            has_raw: AtomicBool::new(false),
            has_retained: AtomicBool::new(false),
            mismatch_logged: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the domain inside which equal pages of a pool are stored once.
    pub(crate) fn domain(&self, sharing: Sharing) -> DomainId {
        match sharing {
            Sharing::Domain => self.domain,
            Sharing::Tenant => self.private_domain,
        }
    }

    /// Returns whether the tenant has detached pages: dropped with their object or pool, and not
    /// freed yet.
    pub(crate) fn has_detached(&self) -> bool {
        self.has_detached.load(Relaxed)
    }

    /// Returns whether the tenant's queue of raw pages (not finalized yet) had entries when a
    /// thread last released the lock.
    pub(crate) fn has_raw(&self) -> bool {
        self.has_raw.load(Relaxed)
    }

    /// Returns whether the tenant had retained pages, which a get returned and left in the pool,
    /// when a thread last released the lock.
    pub(crate) fn has_retained(&self) -> bool {
        self.has_retained.load(Relaxed)
    }

    /// Returns how far the tenant is above its entitlement, in bytes. The result is negative if the
    /// tenant is below its entitlement. The entitlement is compared with `owed_bytes` instead of
    /// the charge. Otherwise a tenant that has lost most of its pages could keep the index memory
    /// of the lost pages, to which other tenants are entitled.
    pub(crate) fn excess_bytes(&self) -> i128 {
        i128::from(self.owed_bytes.get()) - i128::from(self.entitled_bytes.get())
    }

    /// Sets the tenant's entitlement in bytes, and the number of raw pages that the tenant may
    /// always have, which follows from it.
    pub(crate) fn entitle(&self, bytes: u64) {
        self.entitled_bytes.set(bytes);
        let raw = bytes / RAW_DIVISOR / PAGE_SIZE as u64;
        let raw = raw.clamp(RAW_PAGES_MIN.into(), RAW_PAGES_MAX.into());
        let mut state = self.state();
        (state.raw_min, state.entitled_bytes) = (raw as u32, bytes);
    }

    pub(crate) fn set_limit(&self, limit_bytes: Option<u64>) {
        self.state().limit_bytes = limit_bytes.unwrap_or(u64::MAX);
    }

    /// Removes the departed tenant from the totals. After that, only threads that are still working
    /// on the tenant have references to it.
    pub(crate) fn remove_from_totals(&self, totals: &Totals) {
        let _state = self.state();
        self.is_in_totals.store(false, Relaxed);
        totals.index_bytes.sub(self.index_bytes.get());
    }

    pub(crate) fn counters(&self) -> Counters {
        self.state().counters
    }

    pub(crate) fn lock<'a>(&'a self, totals: &'a Totals) -> Locked<'a> {
        Locked {
            tenant: self,
            totals,
            state: self.state(),
            unwinding: std::thread::panicking(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        LOCKED_TIMES.set(LOCKED_TIMES.get() + 1);
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            let pages = state.index.gauges.pages;
            tracing::error!(
                tenant = %self.name,
                pages,
                "a bug in the engine: a panic left this tenant's pages in an unknown state; the \
                 pages are dropped, and their memory is lost until the process restarts"
            );
            let TenantParams {
                keys_per_tenant_max,
                policy,
                ..
            } = &self.params;
            state.abandon(*keys_per_tenant_max, *policy);
            self.state.clear_poison();
            state
        })
    }

    /// Logs that a page does not match its hash. It does so only once for each tenant, because a
    /// faulty host would cause a message at every get.
    pub(crate) fn log_mismatch(&self, object: u64, index: u64) {
        if !self.mismatch_logged.swap(true, Relaxed) {
            tracing::error!(
                tenant = %self.name,
                object,
                index,
                "a stored page failed its check and was answered as a miss: this host's memory or \
                 the engine is at fault; further such pages of this tenant are only counted"
            );
        }
    }
}

/// Guard of a tenant's lock, which gives access to the tenant's state. Dropping it updates the
/// copies of the state's values in [`TenantShared`].
pub(crate) struct Locked<'a> {
    tenant: &'a TenantShared,
    totals: &'a Totals,
    state: MutexGuard<'a, State>,
    /// True if the thread was already unwinding after a panic when it took the lock.
    unwinding: bool,
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Locked {
            tenant,
            totals,
            state,
            unwinding,
        } = self;
        if std::thread::panicking() && !*unwinding {
            // A panic under the lock has poisoned it. The next thread that takes the lock empties
            // the tenant.
            return;
        }
        tenant.charged_bytes.set(state.charged_bytes());
        let has_detached = state.index.has_detached();
        match (
            tenant.has_detached.swap(has_detached, Relaxed),
            has_detached,
        ) {
            (false, true) => totals.tenants_with_detached.add(1),
            (true, false) => totals.tenants_with_detached.sub(1),
            _ => {}
        }
        tenant.has_raw.store(state.has_raw(), Relaxed);
        tenant.has_retained.store(state.has_retained(), Relaxed);
        let (before, now) = (tenant.index_bytes.get(), state.bytes());
        tenant.owed_bytes.set(state.owed_bytes(now));
        if before != now && tenant.is_in_totals.load(Relaxed) {
            tenant.index_bytes.set(now);
            totals.index_bytes.change(before, now);
        }
    }
}

#[cfg(test)]
thread_local! {
    /// Counter for tests: how often this thread has taken the lock of a tenant.
    static LOCKED_TIMES: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns how often this thread has taken the lock of a tenant.
#[cfg(test)]
pub(crate) fn locked_times() -> u64 {
    LOCKED_TIMES.get()
}
