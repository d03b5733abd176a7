// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shadow tenant: one tenant with the index, eviction policy, charge and estimates of the engine,
//! but with only the sizes of pages instead of their contents.
//!
//! `tmem-bench policies` sends the requests of a trace to a shadow tenant. Unlike in the engine, a
//! page has its final size at once, and dropped pages are freed at once.

use crate::blob::{Contents, Finalized};
use crate::config::{KEYS_PER_TENANT_MAX, PolicyKind};
use crate::evict::unshared;
use crate::index::entry::Content;
use crate::index::{Chunks, Sharing};
use crate::request::{Get, GetResult, Ref};
use crate::state::{Freed, NewPage, Range, Reason, Room, State, Taken};
use crate::stats::TenantStats;
use std::io;
use std::sync::Arc;

/// Memory for the indexes of shadow tenants. Clones of this value share one memory.
#[derive(Clone, Debug)]
pub struct ShadowMemory(Arc<Chunks>);

impl ShadowMemory {
    /// Reserves address space for `bytes_max` bytes of indexes.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub fn reserve(bytes_max: u64) -> io::Result<ShadowMemory> {
        Ok(ShadowMemory(Arc::new(Chunks::reserve(bytes_max)?)))
    }
}

/// The contents of pages that have none: they cost nothing and need no references.
struct NoContents;

impl Contents for NoContents {
    fn prefetch(&self, _: Content) {}

    fn get_ns_max(&self, _: Content) -> u64 {
        0
    }

    fn share(&self, _: Content) -> bool {
        true
    }
}

/// A tenant without page contents and without a limit. It evicts a page only when the caller calls
/// [`evict`](Self::evict).
#[derive(Debug)]
pub struct ShadowTenant(State);

impl ShadowTenant {
    /// Creates an empty tenant. The seed determines the hashes of keys, which the index and the
    /// policy use.
    pub fn new(policy: PolicyKind, seed: u64, memory: &ShadowMemory) -> ShadowTenant {
        let state = State::new(seed, KEYS_PER_TENANT_MAX, u64::MAX, policy, &memory.0);
        ShadowTenant(state)
    }

    /// Creates a pool, unless the tenant already has it. Returns false if the tenant has too many
    /// pools, or if there is no memory. Returns true if the tenant now has the pool.
    pub fn ensure_pool(&mut self, pool: u32) -> bool {
        self.0.pool(pool).is_ok() || self.0.create_pool(pool, Sharing::Domain).is_ok()
    }

    /// Puts a page with its final size in bytes. The page replaces the page under its key, if there
    /// is one. Returns false if the pool does not exist, if the tenant has too many keys, or if
    /// there is no memory.
    pub fn put(
        &mut self,
        pool: u32,
        (object, index): (u64, u64),
        workingset: bool,
        stored_bytes: usize,
    ) -> bool {
        let Ok(pool) = self.0.pool(pool) else {
            return false;
        };
        let page = NewPage {
            object,
            index,
            cookie: 0,
            workingset,
            blob: 0,
            check: 0,
            key_hash: self.0.prefetch_put(pool, object, index),
        };
        let mut freed = Freed::new();
        let room = Room {
            has_index: true,
            spare_pages: u64::MAX,
        };
        if !self.0.put(pool, page, room, &mut freed) {
            return false;
        }
        let mut stale_max = usize::MAX;
        let raw = self
            .0
            .next_raw(&mut stale_max)
            .expect("the page that was just put is not raw");
        let finalized = Finalized {
            content: Content::Same(0),
            stored_bytes,
            shared: false,
        };
        self.0.finalize(raw, finalized, &mut freed);
        true
    }

    /// Gets a page and removes it from the tenant. Returns true if the tenant had the page.
    pub fn get(&mut self, pool: u32, key: (u64, u64)) -> bool {
        self.get_retaining(pool, key, false) != GetResult::Miss
    }

    /// Gets a page. If `retain` is true, the tenant may keep the page as a retained page, although
    /// the guest has it, too.
    pub fn get_retaining(
        &mut self,
        pool: u32,
        (object, index): (u64, u64),
        retain: bool,
    ) -> GetResult {
        let Ok(pool) = self.0.pool(pool) else {
            return GetResult::Miss;
        };
        let get = Get {
            retain: retain.into(),
            ..Get::new(object, index, &[0])
        };
        let mut taken = [None];
        self.0.take(pool, &get, &mut taken, &NoContents);
        match taken[0] {
            None => GetResult::Miss,
            Some(Taken { retained: true, .. }) => GetResult::Retained { cookie: 0 },
            Some(_) => GetResult::Hit { cookie: 0 },
        }
    }

    /// Returns the stored size of a page in bytes, or None if the tenant does not have the page.
    pub fn stored_bytes(&self, pool: u32, (object, index): (u64, u64)) -> Option<usize> {
        let id = self.0.index.find(self.0.pool(pool).ok()?, object, index);
        (id != 0).then(|| self.0.index.entries[id].gauges().stored_bytes as usize)
    }

    /// Executes a reference (REF), by which a guest reports that it has evicted a retained page
    /// unchanged. Returns true if the tenant still has the page.
    pub fn refer(&mut self, pool: u32, (object, index): (u64, u64)) -> bool {
        let Ok(pool) = self.0.pool(pool) else {
            return false;
        };
        let page = Ref {
            object,
            index,
            cookie: 0,
        };
        self.0.refer(pool, &page)
    }

    /// Drops `nr_pages` pages of an object, beginning with page `index`. With None, drops all pages
    /// from there to the object's end.
    pub fn flush(&mut self, pool: u32, object: u64, index: u64, nr_pages: Option<u64>) {
        let last = match nr_pages {
            None => u64::MAX,
            Some(0) => return,
            Some(nr_pages) => index.saturating_add(nr_pages - 1),
        };
        let Ok(pool) = self.0.pool(pool) else { return };
        let range = Range {
            object,
            index,
            last,
        };
        let mut freed = Freed::new();
        while self.0.flush(pool, range, usize::MAX, &mut freed) {}
        self.0.drop_estimates(pool, range);
        self.free_all_detached();
    }

    /// Removes a pool with its pages, if the tenant has the pool.
    pub fn destroy_pool(&mut self, pool: u32) {
        if self.0.destroy_pool(pool).is_ok() {
            self.free_all_detached();
        }
    }

    /// Removes all pools with their pages.
    pub fn clear(&mut self) {
        self.0.clear();
        self.free_all_detached();
    }

    /// Evicts the page that the policy chooses, as the engine does when the pool is full.
    pub fn evict(&mut self) {
        self.0.evict(1, Reason::Pool, &unshared, &mut Freed::new());
    }

    /// Returns the tenant's charge in bytes.
    pub fn charged_bytes(&self) -> u64 {
        self.0.charged_bytes()
    }

    /// Returns the tenant's gauges and counters as of now. The fields of quota and entitlement are
    /// not set.
    pub fn stats(&self) -> TenantStats {
        self.0.stats(u64::MAX)
    }

    fn free_all_detached(&mut self) {
        while self.0.index.has_detached() {
            self.0.free_detached(usize::MAX, &mut Freed::new());
        }
    }
}
