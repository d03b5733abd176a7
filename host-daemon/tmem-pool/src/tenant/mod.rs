// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handle to a tenant, with the operations of one VM on the pool. Puts are in put.rs, gets in
//! get.rs, and the state that the engine's threads share is in tenant_shared.rs.
//!
//! Copying, hashing, compression, comparison and decompression run with no lock held. The tenant's
//! lock guards its `State`. A thread holds at most one tenant's lock, and takes it after the
//! membership lock.

mod get;
mod put;

pub use get::Spent;

use crate::config::{EVICT_STEP_PAGES, Quota, TenantSpec};
use crate::cost::{DROP_NS, DROP_SAME_NS, KEY_NS, RANGE_NS, REF_NS};
use crate::engine::Engine;
use crate::error::{AdmissionError, CreateError, NoPool};
use crate::index::Sharing;
use crate::index::entry::Content;
use crate::request::{Flushed, Ref};
use crate::state::{FLUSH_HASHES_MAX, Freed, Range, Reason};
use crate::stats::TenantStats;
use crate::tenant_shared::{Locked, TenantShared};
use std::fmt;
use std::sync::Arc;
#[cfg(test)]
use {crate::config::Page, crate::index::Key};

/// Largest number of pages that a flush or a reference request (REF) handles before it releases the
/// tenant's lock.
const LOCKED_PAGES_MAX: usize = 64;

/// Returns the cost of dropping a page with this content, in nanoseconds.
fn drop_ns(content: &Content) -> u64 {
    match content {
        Content::Same(_) => DROP_SAME_NS,
        Content::Raw(_) | Content::Blob(_) => DROP_NS,
    }
}

/// Owner of a tenant, which all handles of the tenant share. Dropping the owner removes the tenant
/// from the engine.
struct TenantOwner {
    engine: Arc<Engine>,
    tenant: Arc<TenantShared>,
}

impl TenantOwner {
    fn lock(&self) -> Locked<'_> {
        self.tenant.lock(&self.engine.totals)
    }
}

impl Drop for TenantOwner {
    fn drop(&mut self) {
        self.lock().clear();
        self.engine.remove_member(&self.tenant);
    }
}

/// Handle to one tenant. A clone is another handle to that tenant. Dropping the last handle drops
/// the tenant's pages, which [`Engine::maintain`](crate::Engine::maintain) frees later.
#[derive(Clone)]
pub struct Tenant(Arc<TenantOwner>);

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Functions of the engine that take or return handles to tenants.
impl Engine {
    /// Adds a tenant, which has no pools at first.
    ///
    /// # Errors
    /// The tenant's reserve does not fit beside the reserves of the other tenants.
    pub fn add_tenant(self: &Arc<Engine>, spec: TenantSpec) -> Result<Tenant, AdmissionError> {
        let tenant = self.add_member(spec)?;
        Ok(Tenant::new(Arc::clone(self), tenant))
    }

    /// Changes quotas of tenants, and the configured size if `configured_bytes` has a value, all in
    /// one step. So the caller need not find an order in which each single change is allowed.
    /// [`resize`](Self::resize) changes the present size.
    ///
    /// # Errors
    /// A reserve does not fit into the configured size; then nothing changes. If the call changes
    /// the configured size, the error may name a tenant whose quota the call does not change.
    pub fn configure(
        &self,
        configured_bytes: Option<u64>,
        quotas: &[(&Tenant, Quota)],
    ) -> Result<(), AdmissionError> {
        let quotas: Vec<_> = quotas
            .iter()
            .map(|&(tenant, quota)| (tenant.shared(), quota))
            .collect();
        self.set_quotas(configured_bytes, &quotas)
    }
}

impl Tenant {
    pub(crate) fn new(engine: Arc<Engine>, tenant: Arc<TenantShared>) -> Tenant {
        Tenant(Arc::new(TenantOwner { engine, tenant }))
    }

    pub(crate) fn shared(&self) -> &Arc<TenantShared> {
        &self.0.tenant
    }

    /// Returns the name under which the tenant was added.
    pub fn name(&self) -> &str {
        self.0.tenant.name()
    }

    /// Creates an empty pool with the number `id`. The engine accepts any number, so the caller
    /// checks its range.
    ///
    /// # Errors
    /// `Exists` if the tenant already has a live pool with this number, `Limit` if the tenant has
    /// too many pools.
    pub fn create_pool(&self, id: u32) -> Result<(), CreateError> {
        self.0.lock().create_pool(id, Sharing::Domain)
    }

    /// Creates an empty pool as [`create_pool`](Self::create_pool) does, whose pages are never
    /// stored together with equal pages of other tenants, not even of the same trust domain. Pages
    /// of the tenant's private pools may share their bytes with each other.
    ///
    /// # Errors
    /// As for `create_pool`.
    pub fn create_private_pool(&self, id: u32) -> Result<(), CreateError> {
        self.0.lock().create_pool(id, Sharing::Tenant)
    }

    /// Returns whether the tenant has a pool with this number.
    pub fn has_pool(&self, id: u32) -> bool {
        self.0.lock().pool(id).is_ok()
    }

    /// Removes a pool with its pages in constant time. Background work frees the pages later.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn destroy_pool(&self, id: u32) -> Result<(), NoPool> {
        self.0.lock().destroy_pool(id)
    }

    /// Executes references (REF), by which the guest reports that it has evicted retained pages
    /// unchanged. A page with the named key and cookie then is no longer retained, as after a put.
    /// Sets the element of `held` to true if the pool has such a page. Leaves a page with another
    /// cookie unchanged. A repeated reference changes nothing.
    ///
    /// Returns the cost in nanoseconds. It is at most [`REF_NS_MAX`](crate::REF_NS_MAX) for each
    /// page, plus the cost of removing keys that the estimator no longer has to follow.
    ///
    /// # Errors
    /// The tenant has no such pool, or the pool was destroyed during the call. Then `held` is false
    /// for all pages.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn refer(&self, pool: u32, refs: &[Ref], held: &mut [bool]) -> Result<u64, NoPool> {
        assert_eq!(
            refs.len(),
            held.len(),
            "refer() was called with different numbers of references and results"
        );
        held.fill(false);
        let pool = self.0.lock().pool(pool)?;
        let mut cost_ns = refs.len() as u64 * REF_NS;
        let groups = refs.chunks(LOCKED_PAGES_MAX);
        for (refs, group_held) in groups.zip(held.chunks_mut(LOCKED_PAGES_MAX)) {
            let mut state = self.0.lock();
            if !state.index.is_live(pool) {
                drop(state);
                held.fill(false);
                return Err(NoPool);
            }
            let estimator_before_ns = state.estimator_ns();
            for (page, held) in refs.iter().zip(group_held) {
                *held = state.refer(pool, page);
            }
            cost_ns += state.estimator_ns() - estimator_before_ns;
        }
        Ok(cost_ns)
    }

    /// Drops the pages that the references name, whether they are retained or not. A caller that
    /// cannot keep pages at the moment calls `drop_refs` instead of [`refer`](Self::refer). Leaves
    /// a page with another cookie unchanged. Returns the cost in nanoseconds, at most
    /// [`REF_NS_MAX`](crate::REF_NS_MAX) for each page.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn drop_refs(&self, pool: u32, refs: &[Ref]) -> Result<u64, NoPool> {
        let pool = self.0.lock().pool(pool)?;
        let mut cost_ns = refs.len() as u64 * REF_NS;
        for refs in refs.chunks(LOCKED_PAGES_MAX) {
            let mut freed = Freed::new();
            let mut state = self.0.lock();
            if !state.index.is_live(pool) {
                break;
            }
            for page in refs {
                freed.extend(state.drop_ref(pool, page));
            }
            state.counters.refs += refs.len() as u64;
            state.counters.refs_gone += refs.len() as u64;
            state.counters.flushed_pages += freed.len() as u64;
            drop(state);
            cost_ns += freed.iter().map(drop_ns).sum::<u64>();
            self.0.engine.release_all(freed);
        }
        Ok(cost_ns)
    }

    /// Drops `nr_pages` pages of one object, beginning with page `index`. With None, drops all
    /// pages from there to the object's end. The time is proportional to the number of pages found.
    /// But a large object that is dropped as a whole (from page 0 to its end) takes constant time,
    /// and is freed later.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn flush(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        nr_pages: Option<u64>,
    ) -> Result<(), NoPool> {
        self.flush_some(pool, object, index, nr_pages, u64::MAX)
            .map(drop)
    }

    /// Does a [`flush`](Self::flush) in steps, for threads that have to serve other VMs in between.
    /// A call costs at most `budget_ns` nanoseconds, computed from the constants of `cost.rs`. If
    /// the budget does not suffice for the next step, the flush is incomplete. The caller then
    /// repeats the call with a new budget of [`FLUSH_NS_MIN`](crate::FLUSH_NS_MIN) or more.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn flush_some(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        nr_pages: Option<u64>,
        budget_ns: u64,
    ) -> Result<Flushed, NoPool> {
        let pool = self.0.lock().pool(pool)?;
        let last = match nr_pages {
            None => u64::MAX,
            Some(0) => return Ok(Flushed::default()),
            Some(nr_pages) => index.saturating_add(nr_pages - 1),
        };
        let range = Range {
            object,
            index,
            last,
        };
        let mut left_ns = budget_ns;
        let is_complete = loop {
            let Some(rest_ns) = left_ns.checked_sub(RANGE_NS) else {
                break false;
            };
            left_ns = rest_ns;
            let mut freed = Freed::new();
            let mut state = self.0.lock();
            // If the pool was destroyed in the meantime, there are no pages to drop. The flush does
            // not apply to a new pool with the same number.
            if !state.index.is_live(pool) {
                break true;
            }
            let pages_max = (left_ns / DROP_NS).min(LOCKED_PAGES_MAX as u64) as usize;
            let more = state.flush(pool, range, pages_max, &mut freed);
            let dropped_ns = freed.iter().map(drop_ns).sum::<u64>();
            left_ns = left_ns.saturating_sub(dropped_ns);
            let done = !more && state.drop_estimates_ns_max(range) <= left_ns;
            if done {
                let estimator_before_ns = state.estimator_ns();
                state.drop_estimates(pool, range);
                let keys_ns = match last - index {
                    nr if nr < FLUSH_HASHES_MAX => (nr + 1) * KEY_NS,
                    _ => 0,
                };
                left_ns -= state.estimator_ns() - estimator_before_ns + keys_ns;
            }
            drop(state);
            self.0.engine.release_all(freed);
            if done {
                break true;
            }
            if !more || left_ns < RANGE_NS + DROP_NS {
                break false;
            }
        };
        Ok(Flushed {
            is_complete,
            cost_ns: budget_ns - left_ns,
        })
    }

    /// Drops the pages that the tenant has now, a few at a time. The tenant's pools stay. Returns
    /// the number of dropped pages. The call is for operators: it takes about 1 µs for each page,
    /// and the memory of the pages is free when it returns.
    pub fn drop_pages(&self) -> u64 {
        let (mut left, before) = {
            let mut state = self.0.lock();
            // The estimator must not count later misses of these pages as misses that more memory
            // would have prevented. So remove their keys from it.
            state.estimator.drop_where(|_| true);
            let pages = u64::from(state.index.gauges.pages);
            (pages, pages)
        };
        while left > 0 {
            let step = (EVICT_STEP_PAGES as u64).min(left) as usize;
            let (engine, tenant) = (&self.0.engine, &self.0.tenant);
            let done = engine.evict_from(tenant, step, Reason::Flush) as u64;
            if done == 0 {
                break;
            }
            left = left.saturating_sub(done);
        }
        before - left
    }

    /// Removes all pools of the tenant with their pages in constant time. Background work frees the
    /// pages later. Quota and trust domain stay.
    pub fn clear(&self) {
        self.0.lock().clear();
    }

    /// Changes the tenant's quota. If the limit becomes lower than the charge,
    /// [`Engine::maintain`](crate::Engine::maintain) and puts evict pages of the tenant in steps.
    ///
    /// # Errors
    /// The reserve does not fit beside the reserves of the other tenants; then nothing changes.
    pub fn set_quota(&self, quota: Quota) -> Result<(), AdmissionError> {
        let quotas = [(&self.0.tenant, quota)];
        self.0.engine.set_quotas(None, &quotas)
    }

    /// Returns the tenant's gauges and counters as of now.
    pub fn stats(&self) -> TenantStats {
        let TenantOwner { engine, tenant } = &*self.0;
        let quota = engine.quota(tenant);
        let state = self.0.lock();
        let mut stats = state.stats(engine.spare_raw_pages());
        stats.entitled_bytes = tenant.entitled_bytes.get();
        stats.set_quota(quota);
        stats
    }
}

#[cfg(test)]
impl Tenant {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.0.engine
    }

    /// Returns the cookie of the page with the key (pool, object, index), or None if there is no
    /// such page. Copies the page to `read`, if that has a value. Does not remove the page.
    pub(crate) fn peek_with(
        &self,
        (pool, object, index): (u32, u64, u64),
        read: Option<&mut Page>,
    ) -> Option<u64> {
        let state = self.0.lock();
        let key = Key {
            pool,
            object,
            index,
        };
        let entry = &state.index.entries[state.peek(key)?];
        if let Some(out) = read {
            let store = &self.0.engine.store;
            let read = store.read(&store.reader(entry.content()), entry.check, out);
            read.expect("a stored page is damaged");
        }
        Some(entry.cookie)
    }

    pub(crate) fn peek(&self, key: (u32, u64, u64)) -> Option<u64> {
        self.peek_with(key, None)
    }
}
