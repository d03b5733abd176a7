// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reclaim: frees memory of the pool, and chooses the tenant that loses pages.
//!
//! To *reclaim* is to free detached pages (dropped earlier), to compact the heap, or to evict pages
//! of a tenant, in this order. Puts reclaim memory if the pool is full, and background work
//! (background.rs) does it before. Which pages of the chosen tenant are evicted is up to its
//! eviction policy (`evict/`).

use crate::blob::Prepared;
use crate::config::{EVICT_STEP_PAGES, EVICTIONS_PER_PUT_PAGE, Page};
use crate::engine::Engine;
use crate::heap::Handle;
use crate::state::{Freed, Reason};
use crate::tenant_shared::TenantShared;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Engine {
    /// Frees memory of the pool in up to `steps` steps, and lowers `steps` by the number of steps
    /// done. The steps free detached pages (pages that were dropped earlier). If there are none,
    /// they compact the heap if much of its memory is unused, and otherwise evict pages. Returns
    /// false if there is nothing to do, or if no step is left.
    pub(crate) fn reclaim_step(&self, steps: &mut usize) -> bool {
        let step = EVICT_STEP_PAGES.min(*steps);
        if step == 0 {
            return false;
        }
        let mut done = self.free_detached(step);
        if done == 0 && self.store.heap.is_sparse() {
            done = self.compact(step);
        }
        if done == 0 {
            done = self.evict(step);
        }
        *steps = steps.saturating_sub(done);
        done > 0
    }

    /// Moves up to `slots` blobs to other spans of the heap, so that spans become empty. Returns the
    /// number of moved blobs.
    pub(crate) fn compact(&self, slots: usize) -> usize {
        let moved = self.store.heap.compact(slots);
        self.store.counters.moved_blobs.add(moved as u64);
        moved
    }

    /// Reserves blobs for raw (uncompressed) pages, one for each element of `blobs`. If the pool is
    /// full, it first frees memory in up to `steps` steps. Returns the number of reserved blobs,
    /// which is smaller if these steps do not free enough. The caller stores a page in each
    /// reserved blob, or frees the blob.
    pub(crate) fn reserve_raw(&self, blobs: &mut [Handle], steps: &mut usize) -> usize {
        let mut reserved = 0;
        loop {
            let more = &mut blobs[reserved..];
            reserved += self.store.reserve_raw(more, self.frames_bytes_max());
            if reserved == blobs.len() || !self.reclaim_step(steps) {
                return reserved;
            }
        }
    }

    /// Finds the final form of a raw page with [`Store::prepare`], and frees memory of the pool for
    /// it if necessary. `check` are the check bits of the page's hash. Returns None if that does not
    /// free enough.
    pub(crate) fn prepare(&self, blob: u32, check: u32, buffer: &mut Page) -> Option<Prepared> {
        let mut steps = EVICTIONS_PER_PUT_PAGE;
        loop {
            let frames_bytes_max = self.frames_bytes_max();
            if let Some(prepared) = self.store.prepare(blob, check, frames_bytes_max, buffer) {
                return Some(prepared);
            }
            if !self.reclaim_step(&mut steps) {
                return None;
            }
        }
    }

    /// Frees up to `pages` detached pages (pages that were dropped earlier) of one tenant. Tenants
    /// take turns, because a guest expects that its freed pages leave the pool soon, however many
    /// pages another one drops. Returns the number of steps done.
    pub(crate) fn free_detached(&self, pages: usize) -> usize {
        if !self.any_tenant_has_detached() {
            return 0;
        }
        let turn = self.background.free_steps.fetch_add(1, Relaxed);
        let membership = self.membership();
        let tenants = membership.tenants();
        let detached: Vec<_> = tenants.filter(|tenant| tenant.has_detached()).collect();
        let Some(&tenant) = detached.get(turn % detached.len().max(1)) else {
            return 0;
        };
        let tenant = Arc::clone(tenant);
        drop(membership);
        let mut freed = Freed::with_capacity(pages);
        let steps = tenant.lock(&self.totals).free_detached(pages, &mut freed);
        self.release_all(freed);
        if !tenant.has_detached() {
            self.remove_departed(&tenant);
        }
        steps
    }

    /// Returns the tenant that loses the next pages. Candidates are the tenants that have pages and
    /// for which `may_lose` is true; the result is None if there is none. If some candidates are
    /// above their entitlement and have retained pages, the function chooses only among these,
    /// because their guests still have copies of retained pages. The victim is the candidate that
    /// is most above its entitlement. Retained pages of a tenant below its entitlement do not
    /// count, because such a tenant should not lose pages to another tenant.
    fn victim(&self, may_lose: impl Fn(&TenantShared) -> bool) -> Option<Arc<TenantShared>> {
        let membership = self.membership();
        let tenants = membership.members.iter().map(|member| &member.tenant);
        let holders = tenants.filter(|tenant| tenant.charged_bytes.get() > 0 && may_lose(tenant));
        let order = |tenant: &&Arc<TenantShared>| {
            let excess_bytes = tenant.excess_bytes();
            (excess_bytes > 0 && tenant.has_retained(), excess_bytes)
        };
        holders.max_by_key(order).cloned()
    }

    /// Returns the reason under which evictions for the pool count now: shrinking, if the pool was
    /// shrunk and still exceeds its size, and otherwise a full pool.
    fn pool_reason(&self) -> Reason {
        match self.is_shrinking.load(Relaxed) {
            true => Reason::Shrink,
            false => Reason::Pool,
        }
    }

    /// Evicts up to `pages` pages of the tenant that is most above its entitlement
    /// ([`victim`](Self::victim)). Evicts pages even if no tenant is above its entitlement. Returns
    /// the number of steps done.
    pub(crate) fn evict(&self, pages: usize) -> usize {
        let victim = self.victim(|_| true);
        victim.map_or(0, |victim| {
            self.evict_from(&victim, pages, self.pool_reason())
        })
    }

    /// Frees up to `pages` detached pages (pages that were dropped earlier). If there are none,
    /// evicts up to `pages` pages of the tenant that is most above its entitlement
    /// ([`victim`](Self::victim)), until the tenant is no longer above its entitlement. Returns the
    /// number of steps done, which is 0 if no page is detached and no tenant is above its
    /// entitlement.
    pub(crate) fn evict_excess(&self, pages: usize) -> usize {
        let freed = self.free_detached(pages);
        if freed > 0 {
            return freed;
        }
        let Some(victim) = self.victim(|tenant| tenant.excess_bytes() > 0) else {
            return 0;
        };
        let mut freed = Freed::with_capacity(pages);
        // Read the entitlement here and compare under the tenant's lock. Several threads may have
        // seen the same excess, and only the first of them may evict the pages.
        let entitled_bytes = victim.entitled_bytes.get();
        let mut state = victim.lock(&self.totals);
        let steps = state.evict_above(
            entitled_bytes,
            pages,
            self.pool_reason(),
            &|content| self.store.references(content),
            &mut freed,
        );
        drop(state);
        self.release_all(freed);
        steps
    }

    /// Evicts up to `pages` pages of a tenant. Returns the number of steps done.
    pub(crate) fn evict_from(&self, tenant: &TenantShared, pages: usize, reason: Reason) -> usize {
        let mut freed = Freed::with_capacity(pages);
        let references = |content| self.store.references(content);
        let mut state = tenant.lock(&self.totals);
        let steps = state.evict(pages, reason, &references, &mut freed);
        drop(state);
        self.release_all(freed);
        steps
    }

    /// Returns a tenant that is charged more than its own limit, if there is one. There is such a
    /// tenant only after its limit was lowered.
    pub(crate) fn tenant_over_limit(&self) -> Option<Arc<TenantShared>> {
        let membership = self.membership();
        let over = membership.members.iter().find(|member| {
            let limit_bytes = member.quota.limit_bytes.unwrap_or(u64::MAX);
            member.tenant.charged_bytes.get() > limit_bytes
        });
        over.map(|member| Arc::clone(&member.tenant))
    }
}
