// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine: the list of all tenants, and the size of the memory that they share (the pool). This
//! file also has the background work, and the choice of the tenant that loses pages when the pool
//! is full.
//!
//! Locks: the membership lock guards the list of tenants and their quotas. A thread takes it for
//! reading to choose the tenant that loses pages, and for writing to add, remove or change a
//! tenant. It is the outermost lock.

use crate::blob::{Encoded, Prepared, Store};
use crate::codec::{self, Denser};
use crate::config::{
    EVICT_STEP_PAGES, EVICTIONS_PER_PUT_PAGE, EngineConfig, FINALIZE_PAGES, INDEX_ROOM_BYTES,
    INDEX_ROOM_PART, KEYS_PER_TENANT_MAX, PAGE_SIZE, Page, Quota, SWEEP_NS, SWEEP_PAGES,
    SWEEP_STEP, TABLES_ROOM_BYTES, TENANT_METADATA_BYTES, TenantSpec, Time, reclaim_high_bytes,
};
use crate::error::AdmissionError;
use crate::hash::{HashFn, PageHash};
use crate::heap::{self, FRAME_BYTES, Handle};
use crate::index::Chunks;
use crate::index::entry::{Content, Gauges};
use crate::membership::Membership;
use crate::poison;
use crate::secret::SecretPages;
use crate::state::{Freed, Reason};
use crate::stats::EngineStats;
use crate::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use crate::tenant_shared::{TenantParams, TenantShared};
use crate::totals::{Sum, Totals};
use crossbeam_utils::CachePadded;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Kind of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Finalizing new pages: finding equal pages, and compressing the other pages with lz4. This
    /// kind includes evictions that free memory for the final forms.
    Finalize,
    /// Compressing cold pages with zstd. The sweep, a periodic pass over all stored pages, does it.
    Recompress,
    /// Freeing memory: freeing the pages of dropped objects, pools and tenants, evicting pages,
    /// compacting the heap, and returning memory to the system.
    MakeRoom,
}

impl Work {
    /// All kinds of background work.
    pub const ALL: [Work; 3] = [Work::Finalize, Work::Recompress, Work::MakeRoom];
}

/// The storage engine: all tenants and the memory for their pages. Any thread may call any of its
/// methods at any time.
pub struct Engine {
    pub(crate) store: Store,
    pub(crate) totals: Totals,
    pub(crate) size_bytes: Sum,
    size_max_bytes: u64,
    params: TenantParams,
    /// Number of finalize steps so far. This number modulo the number of tenants is the position in
    /// the list of tenants at which the next finalize step begins, so that the tenants take turns.
    turn: CachePadded<AtomicUsize>,
    /// Number of steps of background work so far. The number decides which steps do other work in
    /// addition to finalizing new pages and evicting pages for them.
    chores: CachePadded<AtomicUsize>,
    /// True if a sweep (a pass over all stored pages) has ended since the last full compaction.
    /// Background work then compacts the heap even if little of its memory is unused.
    compact_all: AtomicBool,
    /// True if the pool was shrunk and still exceeds its new size. While it is true, evictions that
    /// free memory of the pool count as `evictions_shrink`.
    shrinks: AtomicBool,
    /// True while background work evicts pages. It begins when less memory is free than the low
    /// watermark, and ends when as much memory is free as the high watermark.
    reclaims: AtomicBool,
    /// Number of frames that background work still has to return to the system. The end of a sweep
    /// (a pass over all blobs) sets it to the number of idle frames, which are unused and have
    /// memory.
    idle_due: AtomicU64,
    /// Scratch pages for background workers: those that no worker is using, all of them zeroed. The
    /// lock is a leaf lock: its holder takes no other lock.
    buffers: Mutex<Vec<SecretPages>>,
    /// Progress of the sweep, which recompresses cold pages. A thread that cannot take this lock at
    /// once leaves the sweep to the thread that holds the lock. The holder may take locks of the
    /// store.
    sweep: Mutex<Sweep>,
    membership: RwLock<Membership>,
}

/// Interval in steps of background work. While there are raw (new, uncompressed) pages, every step
/// whose number is a multiple of this constant does other work in addition to finalizing pages and
/// freeing as much memory as they took.
const CHORES_EVERY: usize = 4;

/// Interval in steps of background work. Every step whose number is a multiple of this constant
/// continues the sweep, even if there is other work, so that the sweep keeps its pace under
/// constant load. Such a step recompresses up to SWEEP_PAGES cold pages, while the steps of an
/// interval finalize about eight times as many new pages.
const SWEEP_EVERY: usize = 32;
const _: () = assert!(SWEEP_EVERY.is_multiple_of(CHORES_EVERY));

/// Returns how many of the heap's handles a sweep that began at `begun` should have visited by now.
/// `places` is the number of all handles.
fn due_by(begun: Time, now: Time, places: u32) -> u32 {
    let elapsed_ns = now.0.saturating_sub(begun.0);
    let due = u128::from(places) * u128::from(elapsed_ns) / u128::from(SWEEP_NS);
    due.min(places.into()) as u32
}

/// State of the sweep, which recompresses cold pages ([`Store::sweep`]). A sweep is a pass over all
/// blobs (stored contents) within a fixed time. When one sweep ends, the next one begins.
struct Sweep {
    begun: Time,
    /// Number of the handle of the heap that the sweep visits next.
    next: u32,
    denser: Denser,
    /// Two scratch pages of the sweep: a decompressed page and its new compressed form.
    buffer: SecretPages,
}

/// Name of the data that the membership lock guards, for log messages.
const MEMBERSHIP: &str = "the list of tenants";
/// Name of the data that the lock of the scratch pages guards, for log messages.
const BUFFERS: &str = "the buffers";

impl Engine {
    pub(crate) fn membership(&self) -> RwLockReadGuard<'_, Membership> {
        poison::guard_or_abort(self.membership.read(), MEMBERSHIP)
    }

    pub(crate) fn membership_mut(&self) -> RwLockWriteGuard<'_, Membership> {
        poison::guard_or_abort(self.membership.write(), MEMBERSHIP)
    }

    pub(crate) fn quota(&self, tenant: &Arc<TenantShared>) -> Quota {
        self.membership().quota(tenant)
    }

    /// Changes quotas, and the full size if `full_bytes` has a value, as [`Engine::configure`] does.
    pub(crate) fn set_quotas(
        &self,
        full_bytes: Option<u64>,
        quotas: &[(&Arc<TenantShared>, Quota)],
    ) -> Result<(), AdmissionError> {
        let full_bytes = full_bytes.map(|bytes| bytes.min(self.size_max_bytes));
        self.membership_mut().configure(full_bytes, quotas)
    }

    /// Adds a tenant to the members.
    pub(crate) fn add_member(&self, spec: TenantSpec) -> Result<Arc<TenantShared>, AdmissionError> {
        let make = |spec: &TenantSpec, domain| TenantShared::new(spec, domain, &self.params);
        let tenant = self.membership_mut().add(spec, make)?;
        self.totals.tenants.add(1);
        Ok(tenant)
    }

    pub(crate) fn depart(&self, tenant: &Arc<TenantShared>) {
        if self.membership_mut().depart(tenant) {
            self.forgotten(tenant);
        }
    }

    // ---- memory of the pool -------------------------------------------------------------------

    fn metadata_bytes(&self) -> u64 {
        self.store.metadata_bytes()
            + self.store.heap.table_bytes()
            + self.totals.index_bytes.get()
            + self.totals.tenants.get() * TENANT_METADATA_BYTES
    }

    /// Returns the memory that the pool holds, in bytes, metadata included.
    pub fn held_bytes(&self) -> u64 {
        self.store.heap.frames_bytes() + self.metadata_bytes()
    }

    /// Returns how many bytes of the pool's size are left for stored pages, after metadata and the
    /// memory that is reserved for the growth of indexes.
    fn frames_bytes_max(&self) -> u64 {
        let taken_bytes = self.metadata_bytes() + self.index_room_bytes();
        self.size_bytes.get().saturating_sub(taken_bytes)
    }

    /// Returns the number of idle frames (of 4 KiB, unused, but with memory) that the pool keeps
    /// for new pages now. The number follows from the pool's present size. The pool's largest size
    /// is unsuitable, because it may be the size of the host's memory. The number is smaller if the
    /// pool holds more memory than its size, or if frames are left to return after a sweep.
    fn idle_frames(&self) -> u64 {
        let size_bytes = self.size_bytes.get();
        let over_bytes = self.held_bytes().saturating_sub(size_bytes);
        let over = over_bytes.div_ceil(FRAME_BYTES as u64);
        let gone = over.max(self.idle_due.load(Relaxed));
        let stay = self.store.heap.idle_frames().saturating_sub(gone);
        heap::idle_frames(size_bytes).min(stay)
    }

    /// Gives idle frames back to the system: those that the pool does not keep, but at most one
    /// batch in each call. Returns the number of frames given back.
    fn trim(&self) -> usize {
        let released = self.store.heap.trim(self.idle_frames());
        let due = self.idle_due.load(Relaxed);
        if due > 0 {
            // As long as frames have to be returned after a sweep, the pool does not keep all idle
            // frames. So if `heap.trim` released no frame, no frame is idle any more, and nothing
            // is left to return.
            let left = if released == 0 {
                0
            } else {
                due.saturating_sub(released)
            };
            self.idle_due.store(left, Relaxed);
        }
        released as usize
    }

    fn index_room_bytes(&self) -> u64 {
        INDEX_ROOM_BYTES + self.size_bytes.get() / INDEX_ROOM_PART
    }

    /// Returns whether the pool uses more memory than its size. Frames without stored bytes do not
    /// count, because the heap releases them when other parts of the pool need the memory.
    fn is_over(&self) -> bool {
        // Compare sums instead of differences: metadata alone may exceed the pool's size, for
        // example the metadata of many same-filled pages after the pool was shrunk.
        self.used_bytes() > self.size_bytes.get()
    }

    /// Returns the memory of the pool in bytes that is not available for new pages. It consists of
    /// frames with stored bytes, metadata, and the memory that is reserved for the growth of
    /// indexes.
    pub(crate) fn used_bytes(&self) -> u64 {
        let used_bytes = self.store.heap.busy_bytes() + self.metadata_bytes();
        used_bytes.saturating_add(self.index_room_bytes())
    }

    /// Returns the high watermark (free memory in bytes) up to which background work should evict
    /// pages now. Returns None if it should not evict pages. Evictions begin below half of the high
    /// watermark.
    fn reclaim_bytes(&self) -> Option<u64> {
        let size_bytes = self.size_bytes.get();
        let high_bytes = reclaim_high_bytes(size_bytes);
        let free_bytes = size_bytes.saturating_sub(self.used_bytes());
        let before = self.reclaims.load(Relaxed);
        let wanted_bytes = if before { high_bytes } else { high_bytes / 2 };
        let reclaims = free_bytes < wanted_bytes;
        if reclaims != before {
            self.reclaims.store(reclaims, Relaxed);
        }
        reclaims.then_some(high_bytes)
    }

    /// Returns the memory in bytes that would be used ([`used_bytes`](Self::used_bytes)) if the
    /// heap were compacted completely. Evictions compare this value with the watermark, so that
    /// they do not evict more pages than necessary.
    fn used_compacted_bytes(&self) -> u64 {
        let spare_bytes = self.store.heap.spare_bytes();
        self.used_bytes().saturating_sub(spare_bytes)
    }

    /// Does one step of freeing memory for future puts. The step compacts the heap if that frees
    /// enough. Otherwise it evicts pages, but only of tenants above their entitlement, because no
    /// tenant needs the memory yet. Returns the number of steps. 0 means that enough memory is
    /// free, or that no page may be evicted.
    fn reclaim(&self, pages: usize) -> usize {
        let Some(high_bytes) = self.reclaim_bytes() else {
            return 0;
        };
        let used_bytes = self.used_compacted_bytes();
        if used_bytes.saturating_add(high_bytes) <= self.size_bytes.get() {
            return self.compact(pages);
        }
        self.evict_excess(pages)
    }

    /// Frees as much memory for future puts as `finalized` raw pages take, if background work
    /// should evict pages now. A background worker calls this function after it has finalized that
    /// many pages. So puts cannot take memory faster than background work frees it, whatever other
    /// work there is. Evicts only pages of tenants above their entitlement. It evicts at most as
    /// many pages as puts of `finalized` pages may evict themselves. Returns the number of steps
    /// done.
    fn reclaim_for(&self, finalized: usize) -> usize {
        let Some(high_bytes) = self.reclaim_bytes() else {
            return 0;
        };
        let share_bytes = (finalized * PAGE_SIZE) as u64;
        let enough_bytes = self.size_bytes.get().saturating_sub(high_bytes);
        let least_bytes = self.used_compacted_bytes().saturating_sub(share_bytes);
        let target_bytes = enough_bytes.max(least_bytes);
        let mut steps = 0;
        while steps < finalized * EVICTIONS_PER_PUT_PAGE
            && self.used_compacted_bytes() > target_bytes
        {
            let done = self.evict_excess(finalized);
            if done == 0 {
                break;
            }
            steps += done;
        }
        // Evictions leave unused slots between stored pages, but a put needs a whole frame for each
        // page. So also compact the heap, if compaction can free a frame for each of the finalized
        // pages.
        if self.store.heap.spare_bytes() >= share_bytes {
            steps += self.compact(2 * finalized);
        }
        steps
    }

    /// Returns whether the pool has memory for more index entries. If it has none, the caller
    /// refuses puts. The caller has reserved memory for a group of pages before, so the tables may
    /// have grown a little since the pool's size was checked.
    pub(crate) fn has_index_room(&self) -> bool {
        self.used_bytes() <= self.size_bytes.get().saturating_add(TABLES_ROOM_BYTES)
    }

    pub(crate) fn release_all(&self, freed: Freed) {
        self.store.release_all(&freed);
    }

    /// Frees memory of the pool in up to `steps` steps, and lowers `steps` by the number of steps
    /// done. The steps free detached pages (pages that were dropped earlier). If there are none,
    /// they compact the heap if much of its memory is unused, and otherwise evict pages. Returns
    /// false if there is nothing to do, or if no step is left.
    fn room_step(&self, steps: &mut usize) -> bool {
        let step = EVICT_STEP_PAGES.min(*steps);
        if step == 0 {
            return false;
        }
        let mut done = self.reap(step);
        if done == 0 && self.store.heap.is_sparse() {
            done = self.compact(step);
        }
        if done == 0 {
            done = self.evict(step);
        }
        *steps = steps.saturating_sub(done);
        done > 0
    }

    fn compact(&self, slots: usize) -> usize {
        let moved = self.store.heap.compact(slots);
        self.totals.moved_blobs.add(moved as u64);
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
            if reserved == blobs.len() || !self.room_step(steps) {
                return reserved;
            }
        }
    }

    /// Takes two scratch pages, which the caller needs to finalize pages. Returns None if the
    /// system has no memory.
    pub(crate) fn take_buffer(&self) -> Option<SecretPages> {
        let kept = poison::guard_or_abort(self.buffers.lock(), BUFFERS).pop();
        kept.or_else(|| SecretPages::new(2).ok())
    }

    /// Takes back scratch pages from a background worker. Wipes them first, because they may
    /// contain bytes of a tenant, which must not stay in memory after the tenant departs.
    pub(crate) fn give_buffer(&self, mut buffer: SecretPages) {
        buffer.wipe();
        poison::guard_or_abort(self.buffers.lock(), BUFFERS).push(buffer);
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
            if !self.room_step(&mut steps) {
                return None;
            }
        }
    }

    /// Frees up to `pages` detached pages (pages that were dropped earlier), those of departed
    /// tenants first. Returns the number of steps done.
    fn reap(&self, pages: usize) -> usize {
        let membership = self.membership();
        let tenants = membership
            .departed
            .iter()
            .chain(membership.members.iter().map(|m| &m.tenant));
        let Some(tenant) = tenants.into_iter().find(|t| t.has_dead()).cloned() else {
            return 0;
        };
        drop(membership);
        let mut freed = Freed::with_capacity(pages);
        let steps = tenant.lock(&self.totals).reap(pages, &mut freed);
        self.release_all(freed);
        if !tenant.has_dead() {
            self.forget(&tenant);
        }
        steps
    }

    /// Removes a departed tenant, whose pages are all freed, from the totals.
    fn forgotten(&self, tenant: &TenantShared) {
        self.totals.tenants.sub(1);
        tenant.forgotten(&self.totals);
    }

    /// Removes a departed tenant from the list of departed tenants if its pages are all freed. Does
    /// nothing for a tenant that has not departed, or that still has pages.
    pub(crate) fn forget(&self, tenant: &Arc<TenantShared>) {
        if !self
            .membership()
            .departed
            .iter()
            .any(|departed| Arc::ptr_eq(departed, tenant))
        {
            return;
        }
        let mut membership = self.membership_mut();
        // Check again for detached pages, now under the lock. The caller may have checked before
        // the tenant's last handle was dropped, which detaches all pages. This second check is
        // final, because no page is detached after the departure. If pages are left, the thread
        // that frees the last of them calls this function again.
        if tenant.has_dead() {
            return;
        }
        let departed = &mut membership.departed;
        if let Some(at) = departed.iter().position(|other| Arc::ptr_eq(other, tenant)) {
            departed.swap_remove(at);
            self.forgotten(tenant);
        }
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
        match self.shrinks.load(Relaxed) {
            true => Reason::Shrink,
            false => Reason::Pool,
        }
    }

    /// Evicts up to `pages` pages of the tenant that is most above its entitlement
    /// ([`victim`](Self::victim)). Evicts pages even if no tenant is above its entitlement. Returns
    /// the number of steps done.
    fn evict(&self, pages: usize) -> usize {
        let victim = self.victim(|_| true);
        victim.map_or(0, |victim| {
            self.evict_from(&victim, pages, self.pool_reason())
        })
    }

    /// Evicts up to `pages` pages of the tenant that is most above its entitlement
    /// ([`victim`](Self::victim)), until the tenant is no longer above its entitlement. Returns the
    /// number of steps done, which is 0 if no tenant is above its entitlement.
    pub(crate) fn evict_excess(&self, pages: usize) -> usize {
        let Some(victim) = self.victim(|tenant| tenant.excess_bytes() > 0) else {
            return 0;
        };
        let mut freed = Freed::with_capacity(pages);
        // Read the entitlement here and compare under the tenant's lock. Several threads may have
        // seen the same excess, and only the first of them may evict the pages.
        let entitled_bytes = victim.entitled_bytes.get();
        let mut state = victim.lock(&self.totals);
        let steps = state.evict_above(entitled_bytes, pages, self.pool_reason(), &mut freed);
        drop(state);
        self.release_all(freed);
        steps
    }

    #[cfg(test)]
    pub(crate) fn evict_one(&self) -> usize {
        self.evict(1)
    }

    pub(crate) fn evict_from(&self, tenant: &TenantShared, pages: usize, reason: Reason) -> usize {
        let mut freed = Freed::with_capacity(pages);
        let steps = tenant.lock(&self.totals).evict(pages, reason, &mut freed);
        self.release_all(freed);
        steps
    }

    /// Returns a tenant that is charged more than its own limit, if there is one. There is such a
    /// tenant only after its limit was lowered.
    fn over_limit(&self) -> Option<Arc<TenantShared>> {
        let membership = self.membership();
        let over = membership.members.iter().find(|member| {
            let limit_bytes = member.quota.limit_bytes.unwrap_or(u64::MAX);
            member.tenant.charged_bytes.get() > limit_bytes
        });
        over.map(|member| Arc::clone(&member.tenant))
    }

    /// Finalizes (deduplicates and compresses) some raw pages of the tenant whose turn it is, or of
    /// the next tenant that has raw pages. Returns the number of finalized pages, which is also 0
    /// if there was no memory for the final form of a page.
    fn finalize_step(&self) -> usize {
        let turn = self.turn.fetch_add(1, Relaxed);
        let mut from = 0;
        loop {
            // Release the membership lock before pages are finalized. Finalizing may evict pages,
            // and an eviction takes this lock to choose a tenant.
            let next = {
                let membership = self.membership();
                let members = &membership.members;
                let mut order = (from..members.len()).map(|i| (i, (turn + i) % members.len()));
                order
                    .find(|&(_, at)| members[at].tenant.has_raw())
                    .map(|(i, at)| (i, Arc::clone(&members[at].tenant)))
            };
            let Some((i, tenant)) = next else {
                return 0;
            };
            match self.finalize(&tenant) {
                // All raw pages of this tenant were removed before they were finalized. Try the
                // tenants after it in the list, so that their pages need not wait for the next
                // step. This tenant is not tried again, so the loop ends.
                Some(0) => from = i + 1,
                finalized => return finalized.unwrap_or(0),
            }
        }
    }

    /// Finalizes (deduplicates and compresses) up to [`FINALIZE_PAGES`] raw pages of the tenant.
    /// Returns the number of these pages, or None if there was no memory for the final form of one
    /// of them.
    pub(crate) fn finalize(&self, tenant: &TenantShared) -> Option<usize> {
        let mut work = [(0, 0); FINALIZE_PAGES];
        let mut checks = [0; FINALIZE_PAGES];
        let mut nr = 0;
        let mut state = tenant.lock(&self.totals);
        state.prefetch_raw(FINALIZE_PAGES, |blob| {
            self.store.prefetch_content(Content::Raw(blob));
        });
        while nr < FINALIZE_PAGES
            && let Some((id, blob)) = state.next_raw()
        {
            // Take another reference to the raw blob. It keeps the page's bytes if another thread
            // removes the page before its final form is stored.
            if self.store.share(blob) {
                work[nr] = (id, blob);
                checks[nr] = state.index.entries[id].check;
                nr += 1;
            }
        }
        drop(state);
        if nr == 0 {
            return Some(0);
        }
        let work = &work[..nr];
        for &(_, blob) in work {
            self.store.prefetch_raw(blob);
        }
        let mut finalized = [None; FINALIZE_PAGES];
        let mut buffer = self.take_buffer();
        if let Some(buffer) = &mut buffer {
            let [one, two] = buffer.pages() else {
                unreachable!("scratch memory does not have two pages");
            };
            // Store a compressed page only after the next page is compressed. In the meantime the
            // processor loads the memory that is reserved for the compressed page.
            let (mut empty, mut full) = (one, two);
            let mut encoded: Option<(usize, Encoded)> = None;
            let complete = |encoded, buffer: &Page| self.store.complete(encoded, buffer);
            for (nth, (&(_, blob), check)) in work.iter().zip(checks).enumerate() {
                // If this page may equal the compressed page that is not stored yet, store that
                // page first. Only then can this page find and share it.
                if let Some((before, page)) = encoded
                    && self.store.may_equal(blob, &page)
                {
                    finalized[before] = Some(complete(page, full));
                    encoded = None;
                }
                let prepared = self.prepare(blob, check, empty);
                if let Some((before, page)) = encoded.take() {
                    finalized[before] = Some(complete(page, full));
                }
                match prepared {
                    Some(Prepared::Finalized(found)) => finalized[nth] = Some(found),
                    Some(Prepared::Encoded(page)) => {
                        encoded = Some((nth, page));
                        std::mem::swap(&mut empty, &mut full);
                    }
                    None => {}
                }
            }
            if let Some((last, page)) = encoded {
                finalized[last] = Some(complete(page, full));
            }
        }
        if let Some(buffer) = buffer {
            self.give_buffer(buffer);
        }
        // Wipe the remains of stored pages that this thread has decompressed to compare them.
        codec::wipe();
        let mut freed = Freed::new();
        let mut state = tenant.lock(&self.totals);
        // Handle the results in reverse order, so that pages for which there was no memory return
        // to the queue in their old order.
        for (&(id, blob), finalized) in work.iter().zip(finalized).rev() {
            match finalized {
                Some(finalized) => state.finalize((id, blob), finalized, &mut freed),
                None => state.raw_again(id, blob),
            }
            freed.push(Content::Raw(blob));
        }
        drop(state);
        self.release_all(freed);
        let failed = finalized[..nr].iter().any(Option::is_none);
        (!failed).then_some(nr)
    }

    /// Continues the sweep (the pass that recompresses cold pages) up to the handle that is due by
    /// `now`. Visits at most SWEEP_STEP handles and recompresses at most SWEEP_PAGES pages. Returns
    /// the number of handles visited.
    fn sweep_step(&self, now: Time) -> usize {
        // If another thread holds this lock, it runs the sweep, so this thread does nothing.
        let Ok(mut sweep) = self.sweep.try_lock() else {
            return 0;
        };
        let Sweep {
            begun,
            next,
            denser,
            buffer,
        } = &mut *sweep;
        let places = self.store.heap.places();
        let due = due_by(*begun, now, places);
        let (first, mut worked) = (*next, 0);
        let pages: &mut [Page; 2] = buffer
            .pages()
            .try_into()
            .expect("the buffer for recompressing cold pages does not have two pages");
        while *next < due && *next - first < SWEEP_STEP && worked < SWEEP_PAGES {
            let frames_bytes_max = self.frames_bytes_max();
            let dense = self.store.sweep(*next, frames_bytes_max, denser, pages);
            worked += usize::from(dense);
            *next += 1;
        }
        if worked > 0 {
            buffer.wipe();
            denser.wipe();
            codec::wipe();
        }
        let looked = *next - first;
        if *next >= places {
            (*begun, *next) = (now, 1);
            // The sweep has ended, so another one begins. Once in each sweep, return all frames
            // that are idle now to the system, in batches in the next steps. Frames that are in
            // frequent use are soon taken again.
            self.idle_due.store(self.store.heap.idle_frames(), Relaxed);
            self.compact_all.store(true, Relaxed);
        }
        looked as usize
    }

    /// Does one step of background work: finalizing, freeing memory or continuing the sweep.
    /// `begins` is called before each kind of work. Returns the amount of work done in pages, blobs
    /// or frames, where 0 means that nothing is left to do.
    fn maintain_step(&self, now: Time, pages: usize, begins: &mut dyn FnMut(Work)) -> usize {
        begins(Work::Finalize);
        // Finalize raw (uncompressed) pages first. Until then they take about twice the memory of
        // their final forms, and new pages are refused if there are too many raw pages. But guests
        // can put pages as fast as the pool finalizes them, so every CHORES_EVERY-th step does
        // other work as well.
        let finalized = self.finalize_step();
        let turn = self.chores.fetch_add(1, Relaxed);
        let chores = finalized == 0 || turn.is_multiple_of(CHORES_EVERY);
        let reclaims = finalized > 0 && self.reclaim_bytes().is_some();
        if !chores && !reclaims {
            return finalized;
        }
        begins(Work::MakeRoom);
        let mut done = finalized;
        if reclaims {
            done += self.reclaim_for(finalized);
        }
        if !chores {
            return done;
        }
        done += self.chore(pages) + self.trim();
        if done == 0 || turn.is_multiple_of(SWEEP_EVERY) {
            begins(Work::Recompress);
            return done + self.sweep_step(now);
        }
        done
    }

    /// Does one step of the work that frees memory: freeing dropped pages, eviction or compaction.
    /// Returns the amount of work done in pages, blobs or frames, where 0 means that nothing is
    /// left to do.
    fn chore(&self, pages: usize) -> usize {
        let reaped = self.reap(pages);
        if reaped > 0 {
            return reaped;
        }
        let mut steps = pages;
        let is_over = self.is_over();
        if !is_over {
            self.shrinks.store(false, Relaxed);
        }
        if is_over && self.room_step(&mut steps) {
            return pages - steps;
        }
        if let Some(tenant) = self.over_limit() {
            // The tenant's limit was lowered below its charge. Evict only one page, so that the
            // charge does not fall further below the limit than necessary.
            return self.evict_from(&tenant, 1, Reason::Limit);
        }
        let reclaimed = self.reclaim(pages);
        if reclaimed > 0 {
            return reclaimed;
        }
        if self.store.heap.is_sparse() || self.compact_all.load(Relaxed) {
            let moved = self.compact(pages);
            if moved == 0 && self.compact_all.swap(false, Relaxed) {
                // Also return the frames that the full compaction has emptied, in the next steps.
                self.idle_due.store(self.store.heap.idle_frames(), Relaxed);
            }
            return moved;
        }
        0
    }

    fn has_work(&self, now: Time) -> bool {
        let membership = self.membership();
        let members = || membership.members.iter().map(|member| &member.tenant);
        let dead = membership
            .departed
            .iter()
            .chain(members())
            .any(|t| t.has_dead());
        let evictable = || members().any(|tenant| tenant.charged_bytes.get() > 0);
        let raw = members().any(|tenant| tenant.has_raw());
        let over = self.is_over() && evictable();
        let above =
            || members().any(|tenant| tenant.charged_bytes.get() > 0 && tenant.excess_bytes() > 0);
        let low = self.reclaim_bytes().is_some() && above();
        drop(membership);
        let sweep_is_late = self
            .sweep
            .try_lock()
            .is_ok_and(|sweep| sweep.next < due_by(sweep.begun, now, self.store.heap.places()));
        let heap = &self.store.heap;
        let idle = heap.idle_excess(self.idle_frames()) > 0;
        let compact = self.compact_all.load(Relaxed) || heap.is_sparse();
        let sparse = compact && heap.has_spare();
        dead || raw || over || low || idle || sparse || sweep_is_late || self.over_limit().is_some()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("size_bytes", &self.size_bytes.get())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Creates an engine with an empty pool and no tenants.
    ///
    /// # Errors
    /// The system does not provide the address space for the pool's largest size.
    pub fn new(config: EngineConfig) -> io::Result<Arc<Engine>> {
        Engine::with(config, PageHash::of, KEYS_PER_TENANT_MAX)
    }

    /// Creates an engine with the given hash function for pages and the given limit of keys for
    /// each tenant. Only tests use other values than [`new`](Self::new).
    pub(crate) fn with(
        config: EngineConfig,
        hash: HashFn,
        keys_per_tenant_max: u32,
    ) -> io::Result<Arc<Engine>> {
        let EngineConfig {
            size_bytes,
            size_max_bytes,
            seed,
            policy,
        } = config;
        let size_max_bytes = size_max_bytes.max(size_bytes);
        let size = Sum::default();
        size.set(size_bytes);
        Ok(Arc::new(Engine {
            store: Store::new(size_max_bytes, hash, seed)?,
            totals: Totals::default(),
            size_bytes: size,
            size_max_bytes,
            params: TenantParams {
                seed,
                chunks: Arc::new(Chunks::reserve(size_max_bytes)?),
                keys_per_tenant_max,
                policy,
            },
            turn: CachePadded::default(),
            chores: CachePadded::default(),
            compact_all: AtomicBool::new(false),
            shrinks: AtomicBool::new(false),
            reclaims: AtomicBool::new(false),
            idle_due: AtomicU64::new(0),
            buffers: Mutex::default(),
            sweep: Mutex::new(Sweep {
                begun: Time(0),
                next: 1,
                denser: Denser::new()?,
                buffer: SecretPages::new(2)?,
            }),
            membership: RwLock::new(Membership::new(size_bytes)),
        }))
    }

    /// Changes the pool's present size in bytes, at most to its largest size. The caller shrinks
    /// the pool while the host needs the memory for something else. Calls of
    /// [`maintain`](Self::maintain) and puts then evict pages in bounded steps until the pool fits.
    /// If the size is below the sum of all reserves, each entitlement is the tenant's reserve,
    /// scaled down in proportion. The present size does not matter for the admission of reserves,
    /// which have to fit into the full size ([`set_full`](Self::set_full)).
    pub fn resize(&self, size_bytes: u64) {
        let size_bytes = size_bytes.min(self.size_max_bytes);
        let mut membership = self.membership_mut();
        let before_bytes = self.size_bytes.get();
        self.size_bytes.set(size_bytes);
        membership.resize(size_bytes);
        if size_bytes != before_bytes {
            let shrinks = size_bytes < before_bytes && self.is_over();
            self.shrinks.store(shrinks, Relaxed);
        }
    }

    /// Returns the sum of the reserves of all tenants in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.membership().reserved_bytes()
    }

    /// Sets the full size in bytes: the size that the pool has while the host needs no memory back.
    /// At first it is the size with which the engine was created, and it is at most the pool's
    /// largest size. A new reserve must fit into the full size beside the reserves of other
    /// tenants; existing reserves stay. [`resize`](Self::resize) changes the present size.
    pub fn set_full(&self, full_bytes: u64) {
        let full_bytes = full_bytes.min(self.size_max_bytes);
        self.membership_mut().set_full(full_bytes);
    }

    /// Returns the largest size in bytes to which [`resize`](Self::resize) can set the pool.
    pub fn size_max_bytes(&self) -> u64 {
        self.size_max_bytes
    }

    /// Does background work for at most about `budget` pages. It finalizes (deduplicates and
    /// compresses) new pages, frees dropped pages, evicts pages above the pool's size or a tenant's
    /// limit, and recompresses cold pages. Returns true if more work is left. Any number of threads
    /// may call this method at the same time.
    pub fn maintain(&self, now: Time, budget: usize) -> bool {
        self.maintain_reporting(now, budget, &mut |_| {})
    }

    /// Does background work as [`maintain`](Self::maintain) does, and reports its kinds. Before
    /// each piece of work it calls `begins` with the kind of that work, which may be the kind of
    /// the piece before. The engine holds no lock while it calls `begins`. For about eight pages of
    /// work, it calls `begins` up to three times.
    pub fn maintain_reporting(
        &self,
        now: Time,
        budget: usize,
        begins: &mut dyn FnMut(Work),
    ) -> bool {
        let mut left = budget;
        while left > 0 {
            let done = self.maintain_step(now, left.min(EVICT_STEP_PAGES), begins);
            if done == 0 {
                return false;
            }
            left = left.saturating_sub(done);
        }
        self.has_work(now)
    }

    /// Returns gauges and counters as of now. The call reads the figures of one tenant after the
    /// other, so they are not of the same instant.
    pub fn stats(&self) -> EngineStats {
        let membership = self.membership();
        let heap = self.store.heap.stats();
        let mut stats = EngineStats {
            size_bytes: self.size_bytes.get(),
            payload_bytes: heap.payload_bytes,
            frames_bytes: heap.frames_bytes,
            metadata_bytes: self.metadata_bytes(),
            tables_bytes: heap.table_bytes,
            tenants: membership.members.len() as u64,
            blobs: heap.blobs,
            reserved_bytes: membership.reserved_bytes(),
            departed_tenants: membership.departed.len() as u64,
            moved_blobs: self.totals.moved_blobs.get(),
            denser_blobs: self.store.denser_blobs.get(),
            denser_saved_bytes: self.store.denser_saved_bytes.get(),
            dense_gain_bytes: self.store.dense_gain_bytes.get(),
            ..EngineStats::default()
        };
        stats.held_bytes = stats.frames_bytes + stats.metadata_bytes;
        stats.add_counters(membership.gone);
        let mut detached = Gauges::default();
        for member in &membership.members {
            let state = member.tenant.lock(&self.totals);
            let gauges = state.index.gauges;
            stats.pages += u64::from(gauges.pages);
            stats.same_filled_pages += u64::from(gauges.same_filled_pages);
            stats.raw_pages += u64::from(gauges.raw_pages);
            stats.retained_pages += u64::from(gauges.retained_pages);
            stats.compressed_bytes += gauges.stored_bytes;
            stats.charged_bytes += gauges.charged_bytes();
            detached.add(state.index.detached);
            stats.add_counters(state.counters);
        }
        for departed in &membership.departed {
            detached.add(departed.lock(&self.totals).index.detached);
        }
        stats.detached_pages = detached.pages.into();
        let with_blob = stats.pages + stats.detached_pages
            - stats.same_filled_pages
            - u64::from(detached.same_filled_pages);
        // A put in progress may have stored a page for which there is no key yet. So there may be
        // more blobs than keys with a blob.
        stats.shared_pages = with_blob.saturating_sub(stats.blobs);
        stats.original_bytes = stats.pages * PAGE_SIZE as u64;
        stats
    }

    /// Returns whether all memory of the pool is locked in RAM, so that it is never swapped. It is
    /// locked if the system allowed the process to lock the pool's address space, which is
    /// [`ADDRESS_SPACE_TIMES`](crate::ADDRESS_SPACE_TIMES) times the pool's largest size.
    pub fn is_locked(&self) -> bool {
        self.store.is_locked() && self.params.chunks.is_locked()
    }
}
