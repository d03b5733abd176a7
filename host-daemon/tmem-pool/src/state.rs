// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of one tenant: its keys, queues and counters, and every change to them. The tenant's lock
//! guards the state.
//!
//! No function of this file copies, compresses or hashes contents, or accesses another tenant. A
//! call that removes pages returns their references to stored contents in `freed`. The caller
//! releases these references after it has released the lock. Each call takes bounded time. Objects,
//! pools and whole tenants may have many pages, so they are detached (made unreachable) in one
//! step, and their pages are removed later in small steps.

use crate::blob::{Contents, Finalized};
use crate::config::PolicyKind;
use crate::config::{
    EVICTIONS_PER_PUT_PAGE, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, POOLS_PER_TENANT_MAX,
    RETAIN_GROWN_DIVISOR, RETAIN_GROWTH_SHIFT, RETAIN_MARGIN_DIVISOR, RETAIN_PAY_PAGES,
    RETAIN_PAY_ROUNDS, STALE_SKIPS_MAX,
};
use crate::cost::{
    DROP_ESTIMATE_NS, ESTIMATE_NS_MAX, KEY_NS, MISS_NS, REF_NS, drop_all_estimates_ns_max,
    estimator_ns,
};
use crate::error::{CreateError, NoPool};
use crate::evict::queue::Queue;
use crate::evict::{self, Arrival, Leave, Policy, References, unshared};
use crate::index::entry::{Content, Entry};
use crate::index::{Chunks, Entries, Id, Index, Key, PoolRef, Sharing};
use crate::raw_queue::{RawPage, RawQueue};
use crate::request::{GET_PAGES_MAX, Get, Put, Ref};
use crate::stats::{Counters, TenantStats};
use std::sync::Arc;
use tmem_trace::estimate::Estimator;

/// Largest number of pages of a whole object that a flush removes one by one. A larger object is
/// detached from the index at once, and its pages are freed later.
pub(crate) const DETACH_PAGES_MIN: u32 = 16;

/// Largest number of pages of a flushed range whose keys are removed from the estimator one by one,
/// by hashing each key. For a larger range, the flush walks over all keys that the estimator
/// follows.
pub(crate) const FLUSH_HASHES_MAX: u64 = 64;

/// Largest length of a tenant's queue of raw pages, as a multiple of the number of raw pages that
/// the tenant may have. The queue also has entries of pages that are no longer raw.
const RAW_QUEUE_DIVISOR: u64 = 2;

/// Charge in bytes of a raw page, which is not compressed yet.
pub(crate) const RAW_CHARGE_BYTES: u64 = PAGE_METADATA_CHARGE_BYTES + PAGE_SIZE as u64;

/// State of a tenant, which the tenant's lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub index: Index,
    pub policy: Box<dyn Policy>,
    /// Queue of retained pages, which a get returned and left in the pool, in the order of the
    /// gets. Retained pages are in no queue of the policy.
    pub retained: Queue,
    /// Bound in bytes: gets retain pages only while the tenant's charge is at most this bound. An
    /// eviction sets the bound somewhat below the charge. Each page that a get does not retain
    /// because of the bound raises it a little, once `retain_unpaid_pages` is 0.
    retain_max_bytes: u64,
    /// Number of pages that gets must not retain before the bound may rise. Each eviction increases
    /// it.
    retain_unpaid_pages: u64,
    /// Queue of the entries that were put as raw (uncompressed) pages, with their blobs, the oldest
    /// first. Some of the pages may have been removed or finalized since.
    raw: RawQueue,
    /// Number of raw pages that the tenant may have whatever its charge is.
    pub raw_min: u32,
    /// Entitlement of the tenant in bytes. Raw pages may fill it.
    pub entitled_bytes: u64,
    pub limit_bytes: u64,
    pub estimator: Estimator<Key>,
    pub counters: Counters,
}

/// Reason why pages of a tenant are evicted. It selects the counters that count the evicted pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The charge of the tenant would exceed, or exceeds, the tenant's own limit.
    Limit,
    /// The pool is full, or background work frees memory for future puts.
    Pool,
    /// The pool was shrunk and still exceeds its new size.
    Shrink,
    /// An operator drops the tenant's pages. They count as flushed, not as evicted.
    Flush,
}

/// Reason why a page of a put is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Too many raw pages of the tenant wait to be finalized (deduplicated and compressed).
    Nursery,
    /// The pool has no memory for the page or for its key.
    Pool,
    /// The page does not fit under the tenant's own limit, even after a bounded number of
    /// evictions.
    Limit,
    /// The system has no memory for the key, or the tenant has its largest number of keys.
    Keys,
    /// The source of the page could not copy it.
    Unreadable,
}

/// A page to store, whose bytes are already in a raw (uncompressed) blob.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewPage {
    pub object: u64,
    pub index: u64,
    pub cookie: u64,
    pub workingset: bool,
    pub blob: u32,
    pub check: u32,
    /// Hash of the page's key, which [`State::prefetch_put`] returned.
    pub key_hash: u64,
}

/// Memory that the pool has for new pages of a tenant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// True if the pool has memory for index entries.
    pub has_index: bool,
    /// Number of raw pages for which the pool has free memory.
    pub spare_pages: u64,
}

/// A page that a get has found. The get then reads the page's stored content without the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub content: Content,
    /// Check bits of the page's hash, with which the get checks the page that it reads.
    pub check: u32,
    /// True if the page was already retained (left in the pool by an earlier get) before this get.
    pub was_retained: bool,
    /// True if this get leaves the page in the pool as a retained page.
    pub retained: bool,
}

/// References to stored contents that the caller has to release after it has released the tenant's
/// lock.
pub(crate) type Freed = Vec<Content>;

impl State {
    /// Creates the state of a tenant without pools. `seed` is the seed of the index's hashes, and the
    /// policy's hash is derived from it.
    pub(crate) fn new(
        seed: u64,
        keys_max: u32,
        limit_bytes: u64,
        policy: PolicyKind,
        chunks: &Arc<Chunks>,
    ) -> State {
        State {
            index: Index::new(seed, keys_max, chunks),
            policy: evict::policy(policy, seed, chunks),
            retained: Queue::default(),
            retain_max_bytes: u64::MAX,
            retain_unpaid_pages: 0,
            raw: RawQueue::default(),
            raw_min: 0,
            entitled_bytes: 0,
            limit_bytes,
            estimator: Estimator::default(),
            counters: Counters::default(),
        }
    }

    /// Empties the state without reading its contents, which are unknown after a panic. No key is
    /// found any more. The memory of the tenant's pages is lost, because the panic leaves unknown
    /// which references were already released.
    pub(crate) fn abandon(&mut self, keys_max: u32, policy: PolicyKind) {
        self.index.abandon(keys_max);
        self.policy = evict::policy(policy, self.index.seed(), self.index.chunks());
        self.retained = Queue::default();
        self.raw = RawQueue::default();
        self.estimator = Estimator::default();
        let Counters {
            puts,
            puts_refused,
            hits,
            retained_hits,
            evictions,
            replaced_pages,
            hash_mismatches,
            ..
        } = self.counters;
        let got = hits + hash_mismatches - retained_hits;
        let else_gone = puts_refused + got + evictions + replaced_pages;
        self.counters.flushed_pages = puts.saturating_sub(else_gone);
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.index.gauges.charged_bytes()
    }

    /// Returns the number of bytes that a put compares with the tenant's limit: the charge, and what
    /// detached pages (dropped, and not freed yet) were charged. Without these, a guest that fills
    /// and drops its pools faster than background work frees the pages would exceed its limit.
    fn limited_bytes(&self) -> u64 {
        self.charged_bytes() + self.index.detached.charged_bytes()
    }

    /// Returns the number of bytes that is compared with the tenant's entitlement. It is the
    /// tenant's charge or, if that is larger, the sum of its stored bytes and `index_bytes`.
    pub(crate) fn owed_bytes(&self, index_bytes: u64) -> u64 {
        let held_bytes = self.index.gauges.stored_bytes + index_bytes;
        self.charged_bytes().max(held_bytes)
    }

    /// Returns the memory in bytes of the tenant's index, eviction policy, estimator and queue of
    /// raw pages.
    pub(crate) fn bytes(&self) -> u64 {
        let raw = self.raw.bytes() as u64;
        self.index.bytes() + self.policy.bytes() + self.estimator.bytes() + raw
    }

    /// Returns the cost in nanoseconds of visiting and removing sampled keys in all
    /// calls of the estimator so far. The constant cost of each call is not included.
    pub(crate) fn estimator_ns(&self) -> u64 {
        estimator_ns(&self.estimator)
    }

    /// Returns gauges and counters of the tenant. The fields of quota and entitlement have their
    /// default values.
    /// `spare_pages` is the number of raw pages for which the pool has free memory.
    pub(crate) fn stats(&self, spare_pages: u64) -> TenantStats {
        let estimates = self.estimator.estimates();
        let gauges = self.index.gauges;
        TenantStats {
            pages: gauges.pages.into(),
            charged_bytes: gauges.charged_bytes(),
            original_bytes: u64::from(gauges.pages) * PAGE_SIZE as u64,
            compressed_bytes: gauges.stored_bytes,
            same_filled_pages: gauges.same_filled_pages.into(),
            nursery_pages: gauges.nursery_pages.into(),
            shared_pages: gauges.shared_pages.into(),
            retained_pages: gauges.retained_pages.into(),
            gain_hits: estimates.gain_hits,
            loss_hits: estimates.loss_hits,
            loss_hits_seen: estimates.loss_hits_seen,
            gain_steps: self.estimator.nr_passed(),
            nursery_pages_max: self.raw_max(spare_pages),
            detached_pages: self.index.detached.pages.into(),
            pools: self.index.nr_pools() as u64,
            ..TenantStats::from(self.counters)
        }
    }

    // ---- pools --------------------------------------------------------------------------------

    pub(crate) fn create_pool(&mut self, nr: u32, sharing: Sharing) -> Result<(), CreateError> {
        if self.index.pool(nr).is_some() {
            return Err(CreateError::Exists);
        }
        if self.index.nr_pools() >= POOLS_PER_TENANT_MAX {
            return Err(CreateError::Limit);
        }
        self.index
            .create_pool(nr, sharing)
            .map_err(|_| CreateError::Limit)
    }

    pub(crate) fn pool(&self, nr: u32) -> Result<PoolRef, NoPool> {
        self.index.pool(nr).ok_or(NoPool)
    }

    /// Detaches a pool: its pages are no longer found, and background work frees them later.
    pub(crate) fn destroy_pool(&mut self, nr: u32) -> Result<(), NoPool> {
        let pool = self.pool(nr)?;
        let before = self.index.gauges.pages;
        self.index.detach_pool(pool);
        self.estimator.drop_where(|key| key.pool == nr);
        self.counters.flushed_pages += u64::from(before - self.index.gauges.pages);
        Ok(())
    }

    /// Detaches all pools: no page is found any more, and background work frees the pages later.
    pub(crate) fn clear(&mut self) {
        self.counters.flushed_pages += u64::from(self.index.gauges.pages);
        self.index.detach_all();
        self.estimator.drop_where(|_| true);
    }

    // ---- pages --------------------------------------------------------------------------------

    /// Returns the number of pages for which the tenant has room, which the estimator needs. A
    /// tenant that has evicted nothing so far has room for any number of pages.
    fn room_pages(&self) -> u64 {
        match self.counters.evictions {
            0 => u64::MAX,
            _ => self.index.gauges.pages.into(),
        }
    }

    fn remove(&mut self, id: Id, leave: Leave) -> Entry {
        let key = if leave == Leave::Dropped {
            None
        } else {
            self.index.key(id)
        };
        let (leave, key_hash) = match key {
            Some(key) => (leave, self.index.key_hash(key)),
            None => (Leave::Dropped, 0),
        };
        self.remove_as(id, leave, key_hash)
    }

    fn remove_as(&mut self, id: Id, leave: Leave, key_hash: u64) -> Entry {
        self.unqueue(id, leave, key_hash);
        self.index.remove(id)
    }

    /// Removes an entry from its queue: that of retained pages, or a queue of the eviction policy.
    fn unqueue(&mut self, id: Id, leave: Leave, key_hash: u64) {
        let entries = &mut self.index.entries;
        if entries[id].is_retained() {
            self.retained.remove(entries, id);
        } else {
            self.policy.remove(entries, id, leave, key_hash);
        }
    }

    /// Prefetches the memory that [`put`](Self::put) reads for this key, and returns the hash of
    /// the key.
    pub(crate) fn prefetch_put(&self, pool: PoolRef, object: u64, index: u64) -> u64 {
        let key_hash = self.index.key_hash(self.index.key_of(pool, object, index));
        self.policy.prefetch(key_hash);
        key_hash
    }

    /// Stores a page under its key, in place of an older page. Returns false if the page is
    /// refused. Then there is no page under the key any more, and the new page's blob is in
    /// `freed`.
    pub(crate) fn put(
        &mut self,
        pool: PoolRef,
        put: NewPage,
        room: Room,
        freed: &mut Freed,
    ) -> bool {
        let NewPage {
            object,
            index,
            cookie,
            workingset,
            blob,
            check,
            key_hash,
        } = put;
        self.counters.puts += 1;
        self.drop_page(pool, object, index, freed);
        let key = self.index.key_of(pool, object, index);
        let room_pages = self.room_pages();
        self.estimator.put(key, key_hash, room_pages);
        let content = Content::Raw(blob);
        let refusal = if !room.has_index {
            Refusal::Pool
        } else if self.raw_room(room.spare_pages) == 0 {
            Refusal::Nursery
        } else if !self.evict_for_put(freed) {
            Refusal::Limit
        } else {
            let entry = Entry::new(cookie, check, content, PAGE_SIZE, false);
            if let Ok(id) = self.index.insert(pool, object, index, entry) {
                let arrival = Arrival {
                    key_hash,
                    workingset,
                };
                self.policy.insert(&mut self.index.entries, id, arrival);
                self.raw.push_back(RawPage { id, blob });
                return true;
            }
            Refusal::Keys
        };
        self.count_refused(refusal);
        freed.push(content);
        false
    }

    fn count_refused(&mut self, refusal: Refusal) {
        let counters = &mut self.counters;
        counters.puts_refused += 1;
        *match refusal {
            Refusal::Nursery => &mut counters.refused_nursery,
            Refusal::Pool => &mut counters.refused_pool,
            Refusal::Limit => &mut counters.refused_limit,
            Refusal::Keys => &mut counters.refused_keys,
            // This reason has no counter of its own, because the daemon ends the connection of a VM
            // whose memory it cannot read.
            Refusal::Unreadable => return,
        } += 1;
    }

    /// Refuses a page of a put that was not copied, and drops the older page under its key.
    pub(crate) fn refuse(
        &mut self,
        pool: PoolRef,
        put: &Put<'_>,
        refusal: Refusal,
        freed: &mut Freed,
    ) {
        self.counters.puts += 1;
        self.count_refused(refusal);
        self.drop_page(pool, put.object, put.index, freed);
    }

    fn drop_page(&mut self, pool: PoolRef, object: u64, index: u64, freed: &mut Freed) {
        let old = self.index.find(pool, object, index);
        if old != 0 {
            freed.push(self.remove(old, Leave::Dropped).content());
            self.counters.replaced_pages += 1;
        }
    }

    /// Frees detached pages of this tenant, and then evicts pages, until another raw page fits under
    /// the tenant's limit, in a bounded number of steps. Returns false if a page still does not fit. The reason is a limit
    /// that is smaller than the charge of a page, or a lowered limit that is far below the tenant's
    /// charge.
    fn evict_for_put(&mut self, freed: &mut Freed) -> bool {
        const {
            let same_filled = RAW_CHARGE_BYTES.div_ceil(PAGE_METADATA_CHARGE_BYTES);
            assert!(same_filled <= EVICTIONS_PER_PUT_PAGE as u64);
        }
        let Some(room_bytes) = self.limit_bytes.checked_sub(RAW_CHARGE_BYTES) else {
            return false;
        };
        for _ in 0..EVICTIONS_PER_PUT_PAGE {
            if self.limited_bytes() <= room_bytes {
                return true;
            }
            if self.free_detached(1, freed) == 0 {
                self.evict(1, Reason::Limit, &unshared, freed);
            }
        }
        self.limited_bytes() <= room_bytes
    }

    /// Looks up the pages that a get requests, and returns those found in `taken`, whose elements
    /// must be None before. It removes each found page from the index, or retains it. For each of
    /// them, the caller owns a reference to the contents. The call ends before the first page whose
    /// cost could exceed the budget. It returns the number of pages looked up, hits and misses. A
    /// found page counts as a hit. If it turns out to be damaged, the caller corrects the counters.
    ///
    /// A page whose bit in `get.retain` is set may stay as a retained page. Its entry then keeps
    /// its reference to the contents, and the call takes another reference for the caller. If it
    /// cannot take one, it removes the page.
    ///
    /// The call reads the records of all pages in steps. In each step, it prefetches for all pages
    /// what the next step reads, so that the processor loads the records of several pages at the
    /// same time.
    pub(crate) fn take(
        &mut self,
        pool: PoolRef,
        get: &Get<'_>,
        taken: &mut [Option<Taken>],
        contents: &impl Contents,
    ) -> usize {
        let mut ids: [Id; GET_PAGES_MAX] = [0; GET_PAGES_MAX];
        let ids = &mut ids[..get.cookies.len()];
        // Hashes of the keys of pages that have an entry.
        let mut key_hashes = [0; GET_PAGES_MAX];
        self.index
            .find_consecutive(pool, get.object, get.index, ids);
        ids.iter().for_each(|&id| self.index.entries.prefetch(id));
        for (nth, &id) in ids.iter().enumerate().filter(|&(_, &id)| id != 0) {
            let entry = &self.index.entries[id];
            contents.prefetch(entry.content());
            key_hashes[nth] = self.prefetch_put(pool, get.object, get.index + nth as u64);
            // Prefetch the entries before and after this entry in its queue, because removing this
            // entry changes their links. Those of the same leaf are probably wanted pages, too.
            for neighbour in [entry.prev, entry.next] {
                if !Entries::same_leaf(id, neighbour) {
                    self.index.entries.prefetch(neighbour);
                }
            }
        }
        let room_pages = self.room_pages();
        let used_pages = self.index.gauges.pages.into();
        let estimator_before_ns = self.estimator_ns();
        let (mut cost_ns, mut done, mut hits) = (0, 0, 0);
        for ((&id, &cookie), taken) in ids.iter().zip(get.cookies).zip(taken) {
            let entry = (id != 0).then(|| &self.index.entries[id]);
            let held = entry.filter(|entry| entry.cookie == cookie).cloned();
            let was_retained = held.as_ref().is_some_and(Entry::is_retained);
            cost_ns += match &held {
                Some(entry) => contents.get_ns_max(entry.content()),
                None => MISS_NS,
            };
            cost_ns += if was_retained { REF_NS } else { 0 };
            // For a retained page, the get calls the estimator twice: first for the reference (REF)
            // that the guest should have sent, and then for the get itself.
            let estimates_ns_max = (1 + u64::from(was_retained)) * ESTIMATE_NS_MAX;
            let estimator_ns = self.estimator_ns() - estimator_before_ns;
            if cost_ns + estimator_ns + estimates_ns_max > get.budget_ns {
                break;
            }
            self.counters.cookie_mismatches += u64::from(id != 0 && held.is_none());
            let index = get.index + done as u64;
            let key = self.index.key_of(pool, get.object, index);
            let key_hash = match id {
                0 => self.index.key_hash(key),
                _ => key_hashes[done],
            };
            let hit = held.is_some();
            if let Some(entry) = held {
                let (content, check) = (entry.content(), entry.check);
                // A guest requests a retained page only after it has evicted the page from its page
                // cache. So the reference (REF) that reports this eviction is late or was lost. Do
                // the work of that reference now.
                if was_retained {
                    self.end_retention(id, key, key_hash);
                }
                let retained =
                    self.may_retain() && get.retain >> done & 1 != 0 && contents.share(content);
                if retained {
                    self.retain(id, key_hash);
                    self.counters.retained_hits += 1;
                } else {
                    self.remove_as(id, Leave::Got, key_hash);
                }
                *taken = Some(Taken {
                    content,
                    check,
                    was_retained,
                    retained,
                });
                hits += 1;
            } else {
                self.policy.record_miss(key_hash);
            }
            let proportional = self.policy.hits_are_proportional();
            self.estimator
                .get(key_hash, hit, room_pages, used_pages, proportional);
            done += 1;
        }
        self.counters.gets += done as u64;
        self.counters.hits += hits;
        done
    }

    // ---- retained pages -----------------------------------------------------------------------

    pub(crate) fn has_retained(&self) -> bool {
        self.retained.len() > 0
    }

    /// Returns whether the tenant's charge allows a get to retain the page that it returns. If it
    /// does not, pays for evicted pages, or raises the bound of the charge a little if all are paid
    /// for. So later gets may retain pages again. Each page that a get returns pays, whether the
    /// guest lets the pool retain it or not, because a guest whose retained pages were evicted lets
    /// the pool retain only few pages.
    fn may_retain(&mut self) -> bool {
        let charged_bytes = self.charged_bytes();
        if charged_bytes <= self.retain_max_bytes {
            return true;
        }
        if charged_bytes - self.retain_max_bytes > charged_bytes / RETAIN_GROWN_DIVISOR {
            self.retain_max_bytes = u64::MAX;
            self.retain_unpaid_pages = 0;
            return true;
        }
        if self.retain_unpaid_pages > 0 {
            self.retain_unpaid_pages -= 1;
            return false;
        }
        let more_bytes = (charged_bytes >> RETAIN_GROWTH_SHIFT).max(1);
        self.retain_max_bytes = self.retain_max_bytes.saturating_add(more_bytes);
        false
    }

    /// Makes a page retained: moves it from the eviction policy's queue to the queue of retained
    /// pages.
    fn retain(&mut self, id: Id, key_hash: u64) {
        self.unqueue(id, Leave::Got, key_hash);
        self.index.change(id, |entry| entry.set_retained(true));
        self.retained.push(&mut self.index.entries, id);
    }

    /// Ends the retention of a page: moves it from the queue of retained pages to the eviction
    /// policy. Policy and estimator are called as for a put. Does nothing if the page is not
    /// retained.
    fn end_retention(&mut self, id: Id, key: Key, key_hash: u64) {
        if !self.index.entries[id].is_retained() {
            return;
        }
        self.retained.remove(&mut self.index.entries, id);
        self.index.change(id, |entry| entry.set_retained(false));
        let room_pages = self.room_pages();
        self.estimator.put(key, key_hash, room_pages);
        let arrival = Arrival {
            key_hash,
            workingset: false,
        };
        self.policy.insert(&mut self.index.entries, id, arrival);
    }

    /// Executes a reference (REF), by which the guest reports that it has evicted a page unchanged.
    /// Returns true if the pool has the page with this cookie; the page is not retained any more.
    /// Leaves a page with another cookie unchanged, and returns false.
    pub(crate) fn refer(
        &mut self,
        pool: PoolRef,
        &Ref {
            object,
            index,
            cookie,
        }: &Ref,
    ) -> bool {
        self.counters.refs += 1;
        let id = self.index.find(pool, object, index);
        let key = self.index.key_of(pool, object, index);
        let key_hash = self.index.key_hash(key);
        if id == 0 {
            // The pool has already evicted the retained page. Without retention, the guest would
            // now put the page, so report a put to the estimator. With more memory, the pool would
            // still have the page.
            let room_pages = self.room_pages();
            self.estimator.put(key, key_hash, room_pages);
            self.counters.refs_gone += 1;
            return false;
        }
        if self.index.entries[id].cookie != cookie {
            self.counters.refs_gone += 1;
            return false;
        }
        self.end_retention(id, key, key_hash);
        true
    }

    /// Drops the page with the key and cookie of a reference. Returns the page's content, or None if
    /// there is no such page.
    pub(crate) fn drop_ref(
        &mut self,
        pool: PoolRef,
        &Ref {
            object,
            index,
            cookie,
        }: &Ref,
    ) -> Option<Content> {
        let id = self.index.find(pool, object, index);
        if id == 0 || self.index.entries[id].cookie != cookie {
            return None;
        }
        Some(self.remove(id, Leave::Dropped).content())
    }

    // ---- eviction and flushes -----------------------------------------------------------------

    /// Evicts up to `pages` pages, retained pages first. Returns the number of steps. It includes
    /// detached pages (dropped earlier) that the call found in the queues and freed. 0 means that
    /// there is nothing to evict. `references` is used only if the pool needs the memory: other
    /// tenants do not influence which pages a tenant loses because of its own limit.
    pub(crate) fn evict(
        &mut self,
        pages: usize,
        reason: Reason,
        references: References<'_>,
        freed: &mut Freed,
    ) -> usize {
        let references = match reason {
            Reason::Pool | Reason::Shrink => references,
            Reason::Limit | Reason::Flush => &unshared,
        };
        let (mut evicted, mut skipped, mut retained) = (0, 0, 0);
        while evicted < pages && skipped < STALE_SKIPS_MAX {
            let victim = self.retained.head();
            let Some(id) = victim.or_else(|| self.policy.victim(&mut self.index, references))
            else {
                break;
            };
            let live = self.index.key(id).is_some();
            retained += u64::from(live && victim.is_some());
            let leave = match reason {
                Reason::Flush => Leave::Dropped,
                Reason::Limit | Reason::Pool | Reason::Shrink => Leave::Evicted,
            };
            freed.push(self.remove(id, leave).content());
            evicted += usize::from(live);
            skipped += usize::from(!live);
        }
        if reason != Reason::Flush {
            self.counters.evictions_retained += retained;
            let charged_bytes = self.charged_bytes();
            if evicted > 0 {
                self.retain_max_bytes = charged_bytes - charged_bytes / RETAIN_MARGIN_DIVISOR;
            }
            let unpaid = self.retain_unpaid_pages + evicted as u64 * RETAIN_PAY_PAGES;
            self.retain_unpaid_pages =
                unpaid.min(u64::from(self.index.gauges.pages) * RETAIN_PAY_ROUNDS);
        }
        let counters = &mut self.counters;
        let evicted_pages = evicted as u64;
        match reason {
            Reason::Flush => counters.flushed_pages += evicted_pages,
            Reason::Pool => {
                counters.evictions += evicted_pages;
                counters.evictions_pool += evicted_pages;
            }
            Reason::Limit => {
                counters.evictions += evicted_pages;
                counters.evictions_limit += evicted_pages;
            }
            Reason::Shrink => {
                counters.evictions += evicted_pages;
                counters.evictions_shrink += evicted_pages;
            }
        }
        evicted + skipped
    }

    /// Evicts up to `pages` pages as [`evict`](Self::evict) does, until the tenant owes at most
    /// `floor_bytes` ([`owed_bytes`](Self::owed_bytes)). Returns the number of steps.
    pub(crate) fn evict_above(
        &mut self,
        floor_bytes: u64,
        pages: usize,
        reason: Reason,
        references: References<'_>,
        freed: &mut Freed,
    ) -> usize {
        let mut steps = 0;
        while steps < pages && self.owed_bytes(self.bytes()) > floor_bytes {
            match self.evict(1, reason, references, freed) {
                0 => break,
                done => steps += done,
            }
        }
        steps
    }

    /// Drops up to `pages_max` pages of a range, or a whole object at once. Returns true if more
    /// pages of the range may be left; the caller then calls again. After a call that returns
    /// false, the caller calls [`drop_estimates`](Self::drop_estimates).
    pub(crate) fn flush(
        &mut self,
        pool: PoolRef,
        range: Range,
        pages_max: usize,
        freed: &mut Freed,
    ) -> bool {
        let Range {
            object,
            mut index,
            last,
        } = range;
        if self.index.object_pages(pool, object) == 0 {
            return false;
        }
        if (index, last) == (0, u64::MAX)
            && self.index.object_pages(pool, object) > DETACH_PAGES_MIN
        {
            self.counters.flushed_pages += u64::from(self.index.detach_object(pool, object));
            return false;
        }
        for _ in 0..pages_max {
            match self.index.next(pool, object, index) {
                Some((at, id)) if at <= last => {
                    index = at;
                    freed.push(self.remove(id, Leave::Dropped).content());
                    self.counters.flushed_pages += 1;
                }
                _ => return false,
            }
        }
        true
    }

    /// Returns the largest cost of [`drop_estimates`](Self::drop_estimates) for this range, in nanoseconds.
    pub(crate) fn drop_estimates_ns_max(&self, Range { index, last, .. }: Range) -> u64 {
        match last - index {
            FLUSH_HASHES_MAX.. => drop_all_estimates_ns_max(&self.estimator),
            others => (others + 1) * (KEY_NS + DROP_ESTIMATE_NS),
        }
    }

    /// Removes the keys of a flushed range from the estimator, because the guest does not request
    /// flushed pages again. Also removes keys of pages in the range that were evicted earlier. The
    /// caller calls this function once for each range, after the pages are dropped. The call may
    /// walk over all keys that the estimator follows. The eviction policy learns of the keys only if
    /// there are at most FLUSH_HASHES_MAX.
    pub(crate) fn drop_estimates(
        &mut self,
        pool: PoolRef,
        Range {
            object,
            index,
            last,
        }: Range,
    ) {
        if last - index >= FLUSH_HASHES_MAX {
            let pool = self.index.key_of(pool, object, index).pool;
            self.estimator.drop_where(|key| {
                (key.pool, key.object) == (pool, object) && (index..=last).contains(&key.index)
            });
            return;
        }
        for index in index..=last {
            let key = self.index.key_of(pool, object, index);
            let key_hash = self.index.key_hash(key);
            self.estimator.drop_page(key_hash);
            self.policy.record_flush(key_hash);
        }
    }

    /// Frees detached pages (pages that were dropped with their object or pool) in up to `steps`
    /// steps. Returns the number of steps done, where 0 means that no detached page is left.
    pub(crate) fn free_detached(&mut self, steps: usize, freed: &mut Freed) -> usize {
        let mut done = 0;
        while done < steps {
            let Some(id) = self.index.any_detached(&mut done, steps) else {
                break;
            };
            freed.push(self.remove(id, Leave::Dropped).content());
            done += 1;
        }
        done
    }

    // ---- raw pages ----------------------------------------------------------------------------

    pub(crate) fn has_raw(&self) -> bool {
        !self.raw.is_empty()
    }

    fn raw_pages(&self) -> u64 {
        (self.index.gauges.nursery_pages + self.index.detached.nursery_pages).into()
    }

    /// Returns how many raw pages (not finalized yet) the tenant may have now. Above `raw_min`, raw
    /// pages use memory that nothing else uses: the rest of the tenant's entitlement, or the free
    /// memory of the pool, which has room for `spare_pages` raw pages. In the second case, a put
    /// must not make the tenant exceed its limit, because it would evict pages of the tenant.
    fn raw_max(&self, spare_pages: u64) -> u64 {
        let limited_bytes = self.limited_bytes();
        let below = |bytes: u64| bytes.saturating_sub(limited_bytes) / RAW_CHARGE_BYTES;
        let spare_pages = spare_pages.min(below(self.limit_bytes));
        let more = below(self.entitled_bytes).max(spare_pages);
        (self.raw_pages() + more).max(self.raw_min.into())
    }

    /// Returns how many more raw pages (not finalized yet) the tenant may have. `spare_pages` is
    /// the number of raw pages for which the pool has free memory.
    pub(crate) fn raw_room(&self, spare_pages: u64) -> usize {
        let raw_max = self.raw_max(spare_pages);
        let queue_room = (RAW_QUEUE_DIVISOR * raw_max).saturating_sub(self.raw.len() as u64);
        raw_max.saturating_sub(self.raw_pages()).min(queue_room) as usize
    }

    /// Prefetches the entries of the first raw pages in the queue into the cache. Calls `blob` with
    /// the blob that the queue names for each of these entries.
    pub(crate) fn prefetch_raw(&self, pages: usize, blob: impl Fn(u32)) {
        for raw in self.raw.iter().take(pages) {
            self.index.entries.prefetch(raw.id);
            blob(raw.blob);
        }
    }

    /// Removes entries from the head of the queue of raw pages, up to and including the first that
    /// is still a raw page. Returns that page. The entry keeps its reference to the blob. Subtracts
    /// the number of removed entries of other pages from `stale_max`. Returns None if no raw page
    /// is left, or if that number is used up.
    ///
    /// The queue may name a raw page twice: a page of an old entry was removed, and a new page got the
    /// same entry and blob. The first call claims the page, so that no worker finalizes it again and
    /// finds it equal to itself.
    pub(crate) fn next_raw(&mut self, stale_max: &mut usize) -> Option<RawPage> {
        while *stale_max > 0 {
            let page = self.raw.pop_front()?;
            if self.is_raw(page) && !self.index.entries[page.id].is_claimed() {
                self.index.entries[page.id].set_claimed(true);
                return Some(page);
            }
            *stale_max -= 1;
        }
        None
    }

    /// Returns a raw page to the head of the queue of raw pages, because there was no memory for
    /// its final form.
    pub(crate) fn put_raw_back(&mut self, page: RawPage) {
        if self.is_raw(page) {
            self.index.entries[page.id].set_claimed(false);
            self.raw.push_front(page);
        }
    }

    /// Returns whether the entry is still a raw page with this blob. The entry may by now belong to
    /// another raw page, whose blob has the same number by chance. Finalizing that page instead is
    /// correct as well.
    fn is_raw(&self, RawPage { id, blob }: RawPage) -> bool {
        self.index
            .entries
            .get(id)
            .is_some_and(|entry| entry.content() == Content::Raw(blob))
    }

    /// Stores the final form (the result of deduplication and compression) of a raw page in its
    /// entry. If the page was removed or is no longer raw, adds the final form to `freed` instead.
    pub(crate) fn finalize(&mut self, page: RawPage, finalized: Finalized, freed: &mut Freed) {
        let Finalized {
            content,
            stored_bytes,
            shared,
        } = finalized;
        if !self.is_raw(page) {
            freed.push(content);
            return;
        }
        freed.push(Content::Raw(page.blob));
        let counters = &mut self.counters;
        *match content {
            Content::Same(_) => &mut counters.finalized_same_filled,
            _ if shared => &mut counters.finalized_shared,
            _ if stored_bytes == PAGE_SIZE => &mut counters.finalized_raw,
            _ => &mut counters.finalized_compressed,
        } += 1;
        self.index.change(page.id, |entry| {
            entry.set_content(content, stored_bytes, shared)
        });
    }
}

/// Range of pages of an object, from page `index` to page `last`, both included.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub object: u64,
    pub index: u64,
    pub last: u64,
}

#[cfg(test)]
impl State {
    /// Returns the entry of the page with this key, or None if there is none.
    pub(crate) fn peek(
        &self,
        Key {
            pool,
            object,
            index,
        }: Key,
    ) -> Option<Id> {
        let id = self.index.find(self.index.pool(pool)?, object, index);
        (id != 0).then_some(id)
    }
}
