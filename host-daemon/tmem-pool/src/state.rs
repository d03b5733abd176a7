// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of one tenant: its keys, queues and counters, and every change to them. The tenant's lock
//! guards the state.
//!
//! No function of this file copies, compresses or hashes contents, or accesses another tenant.
//! References to contents that a call gives up are returned in `freed`, and the caller releases
//! them after it has released the lock. Each call takes bounded time. Objects, pools and whole
//! tenants may have many pages, so they are detached in one step and removed in small steps.

use crate::blob::Finalized;
use crate::config::PolicyKind;
use crate::config::{
    EVICTIONS_PER_PUT_PAGE, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, POOLS_PER_TENANT_MAX,
    RETAIN_GROWTH_SHIFT, RETAIN_MARGIN_PART, STALE_SKIPS_MAX,
};
use crate::cost::{
    ESTIMATE_NS_MAX, FORGET_NS, KEY_NS, MISS_NS, REF_NS, estimator_ns, forget_all_ns_max,
};
use crate::entry::{Content, Entry};
use crate::error::{CreateError, NoPool};
use crate::evict::queue::Queue;
use crate::evict::{self, Arrival, Leave, Policy};
use crate::index::{Chunks, Id, Index, Key, PoolRef};
use crate::stats::{Counters, TenantStats};
use crate::tenant::GET_PAGES_MAX;
use std::collections::VecDeque;
use std::sync::Arc;
use tmem_trace::estimate::Estimator;

/// Largest number of pages of an object that a flush frees itself. A larger object is detached from
/// the index at once, and its pages are freed later.
pub(crate) const DETACH_PAGES_MIN: u32 = 16;

/// Largest number of pages of a flush that removes its keys from the estimator by hashing each of
/// them. A larger flush walks over all followed keys instead.
pub(crate) const FLUSH_HASHES_MAX: u64 = 64;

/// Largest length of the queue of raw pages, as a multiple of the number of raw pages that the
/// tenant may have. The queue includes entries of pages that are no longer raw.
const RAW_QUEUE_PART: usize = 2;

/// State of a tenant. The tenant's lock guards it.
#[derive(Debug)]
pub(crate) struct State {
    pub index: Index,
    pub policy: Box<dyn Policy>,
    /// Retained pages, in the order of their gets. They are in no queue of the policy.
    pub retained: Queue,
    /// Charge in bytes up to which gets retain pages. An eviction sets this bound somewhat below
    /// the charge, and each page that is not retained for lack of room raises the bound a little.
    retain_max_bytes: u64,
    /// Queue of entries that were put as raw pages, with their blobs, the oldest first. Some of
    /// them may no longer be raw.
    raw: VecDeque<(Id, u32)>,
    pub raw_max: u32,
    pub limit_bytes: u64,
    pub estimator: Estimator<Key>,
    pub counters: Counters,
}

/// Reason why pages are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The tenant is over its own limit.
    Limit,
    /// The pool is over its size.
    Pool,
    /// The pool is over its size because it was shrunk.
    Shrink,
    /// An operator flushed the tenant's pages.
    Flush,
}

/// Reason why a page is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Too many raw pages wait for their final form.
    Nursery,
    /// The pool has no room.
    Pool,
    /// The tenant is at its limit, and its pages are not evicted fast enough.
    Limit,
    /// There is no memory for the key, or the tenant has too many keys.
    Keys,
}

/// A page to store, in raw form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewPage {
    pub object: u64,
    pub index: u64,
    pub cookie: u64,
    pub workingset: bool,
    pub blob: u32,
    pub check: u32,
}

/// Consecutive pages of an object that a get wants, one for each cookie. The number of the last
/// page does not exceed the largest page number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub object: u64,
    pub index: u64,
    pub cookies: &'a [u64],
    /// Bit n is 1 if the get may retain page n.
    pub retain: u64,
    /// Largest cost of the get in nanoseconds.
    pub budget_ns: u64,
}

/// A page that a get returns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub content: Content,
    /// Check bits of the page's hash.
    pub check: u32,
    /// True if the page was retained before the get.
    pub was_retained: bool,
    /// True if the page stays in the index as a retained page.
    pub retained: bool,
}

/// References to stored contents that the caller has to release.
pub(crate) type Freed = Vec<Content>;

impl State {
    /// Creates an empty state. `seed` is the seed of the index's hashes.
    pub(crate) fn new(
        seed: u64,
        keys_max: u32,
        limit_bytes: u64,
        policy: PolicyKind,
        chunks: &Arc<Chunks>,
    ) -> State {
        State {
            index: Index::new(seed, keys_max, chunks),
            policy: evict::policy(policy, chunks),
            retained: Queue::default(),
            retain_max_bytes: u64::MAX,
            raw: VecDeque::new(),
            raw_max: 0,
            limit_bytes,
            estimator: Estimator::default(),
            counters: Counters::default(),
        }
    }

    /// Empties the state without reading its contents, which are unknown after a panic. No key is
    /// found any more. The memory of the tenant's pages is lost, because it is not known which
    /// references were already released.
    pub(crate) fn abandon(&mut self, keys_max: u32, policy: PolicyKind) {
        self.index.abandon(keys_max);
        self.policy = evict::policy(policy, self.index.chunks());
        self.retained = Queue::default();
        self.raw = VecDeque::new();
        self.estimator = Estimator::default();
        let Counters {
            puts,
            puts_refused,
            hits,
            retains,
            evictions,
            replaced_pages,
            hash_mismatches,
            ..
        } = self.counters;
        let got = hits + hash_mismatches - retains;
        let else_gone = puts_refused + got + evictions + replaced_pages;
        self.counters.flushed_pages = puts.saturating_sub(else_gone);
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.index.gauges.charged_bytes()
    }

    /// Returns the tenant's charge in bytes, or the sum of its stored bytes and `index_bytes`,
    /// whichever is larger.
    pub(crate) fn owed_bytes(&self, index_bytes: u64) -> u64 {
        let held_bytes = self.index.gauges.stored_bytes + index_bytes;
        self.charged_bytes().max(held_bytes)
    }

    /// Returns the memory of keys and queues in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let raw = self.raw.capacity() * size_of::<(Id, u32)>();
        self.index.bytes() + self.policy.bytes() + self.estimator.bytes() + raw as u64
    }

    /// Returns the cost in nanoseconds of all followed keys that the estimator has visited or
    /// removed so far. The constant cost of each call is not included.
    pub(crate) fn estimator_ns(&self) -> u64 {
        estimator_ns(&self.estimator)
    }

    /// Returns gauges and counters. The fields of quota and entitlement have their default values.
    pub(crate) fn stats(&self) -> TenantStats {
        let estimates = self.estimator.estimates();
        let (gauges, counters) = (self.index.gauges, self.counters);
        TenantStats {
            pages: gauges.pages.into(),
            charged_bytes: gauges.charged_bytes(),
            original_bytes: u64::from(gauges.pages) * PAGE_SIZE as u64,
            compressed_bytes: gauges.stored_bytes,
            same_filled_pages: gauges.same_filled_pages.into(),
            raw_pages: gauges.raw_pages.into(),
            shared_pages: gauges.shared_pages.into(),
            retained_pages: gauges.retained_pages.into(),
            puts: counters.puts,
            puts_refused: counters.puts_refused,
            gets: counters.gets,
            hits: counters.hits,
            evictions: counters.evictions,
            flushed_pages: counters.flushed_pages,
            hash_mismatches: counters.hash_mismatches,
            evictions_limit: counters.evictions_limit,
            replaced_pages: counters.replaced_pages,
            cookie_mismatches: counters.cookie_mismatches,
            evictions_shrink: counters.evictions_shrink,
            evictions_retained: counters.evictions_retained,
            retains: counters.retains,
            refs: counters.refs,
            refs_held: counters.refs_held,
            refused_nursery: counters.refused_nursery,
            refused_pool: counters.refused_pool,
            refused_limit: counters.refused_limit,
            refused_keys: counters.refused_keys,
            finalized_same_filled: counters.finalized_same_filled,
            finalized_shared: counters.finalized_shared,
            finalized_compressed: counters.finalized_compressed,
            finalized_raw: counters.finalized_raw,
            gain_hits: estimates.gain_hits,
            loss_hits: estimates.loss_hits,
            loss_hits_seen: estimates.loss_hits_seen,
            gain_steps: self.estimator.passed(),
            raw_pages_max: self.raw_max.into(),
            detached_pages: self.index.detached.pages.into(),
            pools: self.index.nr_pools() as u64,
            ..TenantStats::default()
        }
    }

    // ---- pools --------------------------------------------------------------------------------

    pub(crate) fn create_pool(&mut self, nr: u32) -> Result<(), CreateError> {
        if self.index.pool(nr).is_some() {
            return Err(CreateError::Exists);
        }
        if self.index.nr_pools() >= POOLS_PER_TENANT_MAX {
            return Err(CreateError::Limit);
        }
        self.index.create_pool(nr).map_err(|_| CreateError::Limit)
    }

    pub(crate) fn pool(&self, nr: u32) -> Result<PoolRef, NoPool> {
        self.index.pool(nr).ok_or(NoPool)
    }

    /// Detaches a pool at once. Its pages are freed later.
    pub(crate) fn destroy_pool(&mut self, nr: u32) -> Result<(), NoPool> {
        let pool = self.pool(nr)?;
        let before = self.index.gauges.pages;
        self.index.detach_pool(pool);
        self.estimator.drop_where(|key| key.pool == nr);
        self.counters.flushed_pages += u64::from(before - self.index.gauges.pages);
        Ok(())
    }

    /// Detaches all pools at once. Their pages are freed later.
    pub(crate) fn clear(&mut self) {
        self.counters.flushed_pages += u64::from(self.index.gauges.pages);
        self.index.detach_all();
        self.estimator.drop_where(|_| true);
    }

    // ---- pages --------------------------------------------------------------------------------

    /// Returns, for the estimator, the number of pages for which the tenant has room. A tenant that
    /// has evicted nothing so far has room for any number.
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

    /// Removes an entry from its queue.
    fn unqueue(&mut self, id: Id, leave: Leave, key_hash: u64) {
        let entries = &mut self.index.entries;
        if entries[id].is_retained() {
            self.retained.remove(entries, id);
        } else {
            self.policy.remove(entries, id, leave, key_hash);
        }
    }

    /// Stores a page in place of the page that was held under its key. `room` is true if the pool
    /// has room for index entries. Returns false if the page is refused. Then nothing is held under
    /// the key, and the page's blob is in `freed`.
    pub(crate) fn put(
        &mut self,
        pool: PoolRef,
        put: NewPage,
        room: bool,
        freed: &mut Freed,
    ) -> bool {
        let NewPage {
            object,
            index,
            cookie,
            workingset,
            blob,
            check,
        } = put;
        self.counters.puts += 1;
        self.drop_page(pool, object, index, freed);
        let key = self.index.key_of(pool, object, index);
        let key_hash = self.index.key_hash(key);
        let room_pages = self.room_pages();
        self.estimator.put(key, key_hash, room_pages);
        let content = Content::Raw(blob);
        let refusal = if !room {
            Refusal::Pool
        } else if self.raw_room() == 0 {
            Refusal::Nursery
        } else if !self.make_room(freed) {
            Refusal::Limit
        } else {
            let entry = Entry::new(cookie, check, content, PAGE_SIZE, false);
            if let Ok(id) = self.index.insert(pool, object, index, entry) {
                let arrival = Arrival {
                    key_hash,
                    workingset,
                };
                self.policy.insert(&mut self.index.entries, id, arrival);
                self.raw.push_back((id, blob));
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
        } += 1;
    }

    /// Refuses a page that was not copied, and drops the page that is held under its key.
    pub(crate) fn refuse(
        &mut self,
        pool: PoolRef,
        (object, index): (u64, u64),
        refusal: Refusal,
        freed: &mut Freed,
    ) {
        self.counters.puts += 1;
        self.count_refused(refusal);
        self.drop_page(pool, object, index, freed);
    }

    fn drop_page(&mut self, pool: PoolRef, object: u64, index: u64, freed: &mut Freed) {
        let old = self.index.find(pool, object, index);
        if old != 0 {
            freed.push(self.remove(old, Leave::Dropped).content());
            self.counters.replaced_pages += 1;
        }
    }

    /// Evicts this tenant's own pages until a raw page fits under its limit, in a bounded number of
    /// steps. Returns false if the page still does not fit, because the tenant is far over a limit
    /// that was lowered.
    fn make_room(&mut self, freed: &mut Freed) -> bool {
        const RAW_CHARGE: u64 = PAGE_METADATA_CHARGE_BYTES + PAGE_SIZE as u64;
        const {
            assert!(
                RAW_CHARGE.div_ceil(PAGE_METADATA_CHARGE_BYTES) <= EVICTIONS_PER_PUT_PAGE as u64
            );
        }
        let Some(room_bytes) = self.limit_bytes.checked_sub(RAW_CHARGE) else {
            return false;
        };
        for _ in 0..EVICTIONS_PER_PUT_PAGE {
            if self.charged_bytes() <= room_bytes {
                return true;
            }
            self.evict(1, Reason::Limit, freed);
        }
        self.charged_bytes() <= room_bytes
    }

    /// Removes the wanted pages that are held, and returns them in `taken`, whose elements are
    /// None before. The caller owns their references. The call ends before the first page whose
    /// cost could exceed the budget. Returns the number of pages before that one, hits and misses.
    /// A page that fails its check afterwards is counted as a hit until the caller corrects that.
    ///
    /// A page whose bit in `retain` is set may stay as a retained page. Its entry then keeps its
    /// reference to the contents, and `share` takes another reference for the caller. If `share`
    /// returns false because it cannot take one, the page is removed.
    ///
    /// The call reads the records of all pages in steps, and prefetches for all of them what the
    /// next step reads. So the processor loads the records of several pages at the same time.
    /// `prefetch` prefetches the record of a content, and `get_ns_max` returns the largest cost of
    /// getting it.
    pub(crate) fn take(
        &mut self,
        pool: PoolRef,
        wanted: &Wanted<'_>,
        taken: &mut [Option<Taken>],
        prefetch: impl Fn(Content),
        get_ns_max: impl Fn(Content) -> u64,
        share: impl Fn(Content) -> bool,
    ) -> usize {
        let mut ids: [Id; GET_PAGES_MAX] = [0; GET_PAGES_MAX];
        let ids = &mut ids[..wanted.cookies.len()];
        self.index.find_run(pool, wanted.object, wanted.index, ids);
        ids.iter().for_each(|&id| self.index.entries.prefetch(id));
        for &id in ids.iter().filter(|&&id| id != 0) {
            let entry = &self.index.entries[id];
            prefetch(entry.content());
            // Removing this entry from its queue changes the entries before and after it.
            self.index.entries.prefetch(entry.prev);
            self.index.entries.prefetch(entry.next);
        }
        let room_pages = self.room_pages();
        let used_pages = self.index.gauges.pages.into();
        let estimator_before_ns = self.estimator_ns();
        let (mut cost_ns, mut done, mut hits) = (0, 0, 0);
        for ((&id, &cookie), taken) in ids.iter().zip(wanted.cookies).zip(taken) {
            let entry = (id != 0).then(|| &self.index.entries[id]);
            let held = entry.filter(|entry| entry.cookie == cookie);
            let was_retained = held.is_some_and(Entry::is_retained);
            cost_ns += held.map_or(MISS_NS, |entry| get_ns_max(entry.content()));
            cost_ns += if was_retained { REF_NS } else { 0 };
            // For a retained page, the estimator is called twice.
            let estimates_ns_max = (1 + u64::from(was_retained)) * ESTIMATE_NS_MAX;
            let estimator_ns = self.estimator_ns() - estimator_before_ns;
            if cost_ns + estimator_ns + estimates_ns_max > wanted.budget_ns {
                break;
            }
            let held = held.is_some();
            self.counters.cookie_mismatches += u64::from(id != 0 && !held);
            let index = wanted.index + done as u64;
            let key = self.index.key_of(pool, wanted.object, index);
            let key_hash = self.index.key_hash(key);
            if held {
                // If the page is retained: the guest requests a page only after evicting it, so the
                // reference that reports the eviction is late or was lost. Do the work of that
                // reference now.
                self.end_retention(id, key, key_hash);
                let entry = &self.index.entries[id];
                let (content, check) = (entry.content(), entry.check);
                let retained =
                    wanted.retain >> done & 1 != 0 && self.may_retain() && share(content);
                if retained {
                    self.retain(id, key_hash);
                    self.counters.retains += 1;
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
            }
            self.estimator.get(key_hash, held, room_pages, used_pages);
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

    /// Returns whether the tenant's charge allows retaining the page that a get returns. If it does
    /// not, raises the bound of the charge a little, so that later gets may retain pages again.
    fn may_retain(&mut self) -> bool {
        let charged_bytes = self.charged_bytes();
        if charged_bytes <= self.retain_max_bytes {
            return true;
        }
        let more_bytes = (charged_bytes >> RETAIN_GROWTH_SHIFT).max(1);
        self.retain_max_bytes = self.retain_max_bytes.saturating_add(more_bytes);
        false
    }

    /// Makes a held page retained.
    fn retain(&mut self, id: Id, key_hash: u64) {
        self.unqueue(id, Leave::Got, key_hash);
        self.index.change(id, |entry| entry.set_retained(true));
        self.retained.push(&mut self.index.entries, id);
    }

    /// Makes a retained page held. Policy and estimator see what they would see at a put. Does
    /// nothing if the page is not retained.
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

    /// Executes a reference (REF): the guest reports that it has evicted a page whose contents are
    /// those of the page with this cookie. Returns whether the page is held now. A page with
    /// another cookie is left alone.
    pub(crate) fn refer(&mut self, pool: PoolRef, object: u64, index: u64, cookie: u64) -> bool {
        self.counters.refs += 1;
        let id = self.index.find(pool, object, index);
        let key = self.index.key_of(pool, object, index);
        let key_hash = self.index.key_hash(key);
        if id == 0 {
            // Report a put to the estimator. Without retained pages, the guest would have put the
            // page here. With more memory, the pool would still hold the page.
            let room_pages = self.room_pages();
            self.estimator.put(key, key_hash, room_pages);
            return false;
        }
        if self.index.entries[id].cookie != cookie {
            return false;
        }
        self.end_retention(id, key, key_hash);
        self.counters.refs_held += 1;
        true
    }

    /// Drops the page with this key and cookie, if there is one.
    pub(crate) fn drop_cookie(
        &mut self,
        pool: PoolRef,
        (object, index): (u64, u64),
        cookie: u64,
    ) -> Option<Content> {
        let id = self.index.find(pool, object, index);
        if id == 0 || self.index.entries[id].cookie != cookie {
            return None;
        }
        Some(self.remove(id, Leave::Dropped).content())
    }

    // ---- eviction and flushes -----------------------------------------------------------------

    /// Evicts up to `pages` pages, retained ones first. Returns the number of steps, which includes
    /// the detached pages that were freed on the way. 0 means that there is nothing to evict.
    pub(crate) fn evict(&mut self, pages: usize, reason: Reason, freed: &mut Freed) -> usize {
        let (mut evicted, mut skipped, mut retained) = (0, 0, 0);
        while evicted < pages && skipped < STALE_SKIPS_MAX {
            let victim = self.retained.head();
            let Some(id) = victim.or_else(|| self.policy.victim(&mut self.index.entries)) else {
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
                self.retain_max_bytes = charged_bytes - charged_bytes / RETAIN_MARGIN_PART;
            }
        }
        let counters = &mut self.counters;
        let evicted_pages = evicted as u64;
        match reason {
            Reason::Flush => counters.flushed_pages += evicted_pages,
            Reason::Pool => counters.evictions += evicted_pages,
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

    /// Drops up to `pages_max` pages of `index ..= last`, or a whole object at once. Returns true
    /// if there may be more pages to drop. If it returns false, the caller calls
    /// [`forget`](Self::forget) next.
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

    /// Returns the largest cost of [`forget`](Self::forget) in nanoseconds.
    pub(crate) fn forget_ns_max(&self, Range { index, last, .. }: Range) -> u64 {
        match last - index {
            FLUSH_HASHES_MAX.. => forget_all_ns_max(&self.estimator),
            others => (others + 1) * (KEY_NS + FORGET_NS),
        }
    }

    /// Removes the keys of a flushed range from the estimator, because the guest does not request
    /// flushed pages again. This includes keys whose pages were evicted earlier. The caller calls
    /// it once for each range, after the pages are dropped. The call may walk over all followed
    /// keys.
    pub(crate) fn forget(
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
        }
    }

    /// Frees up to `steps` detached pages. Returns the number of steps, where 0 means that no
    /// detached page is left.
    pub(crate) fn reap(&mut self, steps: usize, freed: &mut Freed) -> usize {
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

    /// Returns how many more raw pages the tenant may have.
    pub(crate) fn raw_room(&self) -> usize {
        let raw = self.index.gauges.raw_pages + self.index.detached.raw_pages;
        let queue = RAW_QUEUE_PART * self.raw_max as usize;
        let room = self.raw_max.saturating_sub(raw) as usize;
        room.min(queue.saturating_sub(self.raw.len()))
    }

    /// Prefetches the entries of the next raw pages into the cache. Calls `blob` with the blob of
    /// each entry that is still raw.
    pub(crate) fn prefetch_raw(&self, pages: usize, blob: impl Fn(u32)) {
        for &(id, raw) in self.raw.iter().take(pages) {
            self.index.entries.prefetch(id);
            blob(raw);
        }
    }

    /// Removes the next page that is still raw from the queue and returns it. The entry keeps its
    /// reference to the blob.
    pub(crate) fn next_raw(&mut self) -> Option<(Id, u32)> {
        while let Some((id, blob)) = self.raw.pop_front() {
            if self.is_raw(id, blob) {
                return Some((id, blob));
            }
        }
        self.raw.shrink_to(64);
        None
    }

    /// Returns a raw page to the head of the queue, because there was no memory for its final form.
    pub(crate) fn raw_again(&mut self, id: Id, blob: u32) {
        self.raw.push_front((id, blob));
    }

    /// Returns whether the entry is a raw page with this blob. The page may have been replaced by
    /// another raw page whose entry and blob have the same numbers. That page can be finalized as
    /// well.
    fn is_raw(&self, id: Id, blob: u32) -> bool {
        self.index
            .entries
            .get(id)
            .is_some_and(|entry| entry.content() == Content::Raw(blob))
    }

    /// Gives a raw page its final form. If the page was removed or is no longer raw, releases the
    /// final form instead.
    pub(crate) fn finalize(
        &mut self,
        (id, blob): (Id, u32),
        finalized: Finalized,
        freed: &mut Freed,
    ) {
        let Finalized {
            content,
            stored_bytes,
            shared,
        } = finalized;
        if !self.is_raw(id, blob) {
            freed.push(content);
            return;
        }
        freed.push(Content::Raw(blob));
        let counters = &mut self.counters;
        *match content {
            Content::Same(_) => &mut counters.finalized_same_filled,
            _ if shared => &mut counters.finalized_shared,
            _ if stored_bytes == PAGE_SIZE => &mut counters.finalized_raw,
            _ => &mut counters.finalized_compressed,
        } += 1;
        self.index
            .change(id, |entry| entry.set_content(content, stored_bytes, shared));
    }
}

/// Range of pages of an object: `index ..= last`.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub object: u64,
    pub index: u64,
    pub last: u64,
}

#[cfg(test)]
impl State {
    /// Returns the entry of a page without removing it from the index.
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
