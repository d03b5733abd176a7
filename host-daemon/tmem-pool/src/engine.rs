// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine: the list of all tenants, the size of the memory that they share (the pool),
//! background work, and the choice of the tenant whose pages are evicted when the pool is full.
//!
//! Locks: the membership's lock guards tenants and quotas. A thread takes it for reading to look
//! for a victim, and for writing when a tenant is added, removed or changed. It is the outermost
//! lock.

use crate::blob::{DomainId, Finalized, Store};
use crate::codec::{self, Denser};
use crate::config::{
    EVICT_STEP_PAGES, EVICTIONS_PER_PUT_PAGE, EngineConfig, INDEX_ROOM_BYTES, INDEX_ROOM_PART,
    KEYS_PER_TENANT_MAX, PAGE_SIZE, Page, PolicyKind, Quota, SWEEP_NS, SWEEP_PAGES, SWEEP_STEP,
    TENANT_METADATA_BYTES, TenantSpec, Time,
};
use crate::entry::Gauges;
use crate::error::AdmissionError;
use crate::hash::{HashFn, PageHash};
use crate::heap;
use crate::index::Chunks;
use crate::membership::Membership;
use crate::poison;
use crate::secret::SecretPages;
use crate::state::{Freed, Reason};
use crate::stats::EngineStats;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::tenant::{Tenant, TenantShared};
use crate::totals::{Sum, Totals};
use crossbeam_utils::CachePadded;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Kind of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Finalizing new pages: finding equal pages and compressing the others with lz4. This includes
    /// evictions that free memory for the final form.
    Finalize,
    /// Compressing cold pages with zstd. The sweep, a periodic pass over all stored pages, does it.
    Recompress,
    /// Freeing the pages of dropped objects, pools and tenants; evicting pages; compacting the
    /// heap; returning memory to the system.
    MakeRoom,
}

impl Work {
    /// All kinds of work.
    pub const ALL: [Work; 3] = [Work::Finalize, Work::Recompress, Work::MakeRoom];
}

/// Parameters that the engine passes to each new tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantParams {
    pub seed: u64,
    pub chunks: Arc<Chunks>,
    pub keys_per_tenant_max: u32,
    pub policy: PolicyKind,
}

/// The storage engine: all tenants and the memory for their pages. Any thread may call it at any
/// time.
pub struct Engine {
    pub(crate) store: Store,
    pub(crate) totals: Totals,
    pub(crate) size_bytes: Sum,
    size_max_bytes: u64,
    params: TenantParams,
    /// Number of finalize steps so far. This number modulo the number of tenants is the position in
    /// the list of tenants at which the next step begins, so that the tenants take turns.
    turn: CachePadded<AtomicUsize>,
    /// Number of steps of background work so far. The number decides which steps do other work in
    /// addition to finalizing.
    chores: CachePadded<AtomicUsize>,
    /// True if a sweep has ended since the last full compaction. Background work then compacts the
    /// heap even if little of its memory is unused.
    compact_all: AtomicBool,
    /// True if the pool was shrunk and still exceeds its new size. Evictions that free memory of
    /// the pool are then counted as caused by the shrinking.
    shrinks: AtomicBool,
    /// Scratch pages that no background worker is using, all of them zeroed. The lock is a leaf
    /// lock.
    buffers: Mutex<Vec<SecretPages>>,
    /// Progress of the sweep. A thread that cannot take this lock at once leaves the sweep to the
    /// thread that holds it. The holder may take locks of the store.
    sweep: Mutex<Sweep>,
    membership: RwLock<Membership>,
}

/// While there are raw pages, one in this many steps of background work does other work in addition
/// to finalizing.
const CHORES_EVERY: usize = 4;

/// Returns how many of the heap's `places` a sweep that began at `begun` should have visited by
/// now.
fn due_by(begun: Time, now: Time, places: u32) -> u32 {
    let elapsed_ns = now.0.saturating_sub(begun.0);
    let due = u128::from(places) * u128::from(elapsed_ns) / u128::from(SWEEP_NS);
    due.min(places.into()) as u32
}

/// State of the sweep: a pass over all blobs within a fixed time, repeated without end. It
/// recompresses blobs that have become cold ([`Store::sweep`]).
struct Sweep {
    begun: Time,
    /// Number of the next place of the heap that the sweep visits.
    next: u32,
    denser: Denser,
    /// Scratch pages: a page and its compressed form.
    buffer: SecretPages,
}

/// Name of the membership lock, for log messages.
const MEMBERSHIP: &str = "the list of tenants";
/// Name of the lock of the scratch pages, for log messages.
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

    pub(crate) fn set_quota(
        &self,
        tenant: &Arc<TenantShared>,
        quota: Quota,
    ) -> Result<(), AdmissionError> {
        self.membership_mut().set_quota(tenant, quota)
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

    /// Returns the part of the pool's size that is left for stored bytes.
    fn frames_bytes_max(&self) -> u64 {
        let taken_bytes = self.metadata_bytes() + self.index_room_bytes();
        self.size_bytes.get().saturating_sub(taken_bytes)
    }

    /// Returns the number of unused frames that the pool keeps for new pages. The number follows
    /// from the pool's present size. The largest size is unsuitable, because it may be the size of
    /// the host's memory.
    fn idle_frames(&self) -> u64 {
        heap::idle_frames(self.size_bytes.get())
    }

    fn index_room_bytes(&self) -> u64 {
        INDEX_ROOM_BYTES + self.size_bytes.get() / INDEX_ROOM_PART
    }

    /// Returns whether the pool uses more memory than its size. Empty frames do not count, because
    /// they are released when the memory is needed elsewhere.
    fn is_over(&self) -> bool {
        // Compare sums instead of differences: metadata alone may exceed the pool's size, for
        // example the metadata of many same-filled pages after the pool was shrunk.
        let used_bytes = self.store.heap.busy_bytes() + self.metadata_bytes();
        used_bytes.saturating_add(self.index_room_bytes()) > self.size_bytes.get()
    }

    /// Returns whether the pool has memory for more index entries. If it has none, puts are
    /// refused.
    pub(crate) fn has_index_room(&self) -> bool {
        !self.is_over()
    }

    pub(crate) fn release_all(&self, freed: Freed) {
        for content in freed {
            self.store.release_content(content);
        }
    }

    /// Does up to `steps` steps of work that frees memory, and lowers `steps` by their number. It
    /// frees detached pages, compacts the heap if much of its memory is unused, and otherwise
    /// evicts pages. Returns false if there is nothing to do, or if no step is left.
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

    /// Copies a page into the store. If necessary, frees memory for it in up to `steps` steps.
    /// Returns None if these steps do not free enough.
    pub(crate) fn put_raw(&self, page: &Page, steps: &mut usize) -> Option<(u32, u32)> {
        loop {
            if let Some(raw) = self.store.put_raw(page, self.frames_bytes_max()) {
                return Some(raw);
            }
            if !self.room_step(steps) {
                return None;
            }
        }
    }

    /// Takes a scratch page for finalizing pages. Returns None if the system has no memory.
    pub(crate) fn take_buffer(&self) -> Option<SecretPages> {
        let kept = poison::guard_or_abort(self.buffers.lock(), BUFFERS).pop();
        kept.or_else(|| SecretPages::new(1).ok())
    }

    /// Gives a scratch page back. The page is wiped first, because it may contain bytes of a
    /// tenant, which must not stay in memory after the tenant departs.
    pub(crate) fn give_buffer(&self, mut buffer: SecretPages) {
        buffer.wipe();
        poison::guard_or_abort(self.buffers.lock(), BUFFERS).push(buffer);
    }

    /// Finds the final form of a raw page, and frees memory for it if necessary.
    pub(crate) fn finalize(
        &self,
        blob: u32,
        domain: DomainId,
        buffer: &mut Page,
    ) -> Option<Finalized> {
        let mut steps = EVICTIONS_PER_PUT_PAGE;
        loop {
            let frames_bytes_max = self.frames_bytes_max();
            if let Some(finalized) = self.store.finalize(blob, domain, frames_bytes_max, buffer) {
                return Some(finalized);
            }
            if !self.room_step(&mut steps) {
                return None;
            }
        }
    }

    /// Frees up to `pages` detached pages, those of departed tenants first. Returns the number of
    /// steps.
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

    /// Removes a tenant from the totals. The tenant has departed, and all its pages are freed.
    fn forgotten(&self, tenant: &TenantShared) {
        self.totals.tenants.sub(1);
        tenant.forgotten(&self.totals);
    }

    /// Removes a departed tenant whose pages are all freed. Does nothing for a tenant that is still
    /// a member, or that has departed and has pages left.
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
        // The caller saw no detached pages. But it may have looked before the tenant's last handle
        // was dropped, which detaches all pages. This check is final, because no page is detached
        // after the departure. If pages are left, the thread that frees the last of them calls this
        // function again.
        if tenant.has_dead() {
            return;
        }
        let departed = &mut membership.departed;
        if let Some(at) = departed.iter().position(|other| Arc::ptr_eq(other, tenant)) {
            departed.swap_remove(at);
            self.forgotten(tenant);
        }
    }

    /// Evicts up to `pages` pages of the tenant most above its entitlement. Retained pages of
    /// tenants above their entitlement come first, because they are still in memory of their
    /// guests. Retained pages of tenants below their entitlement stay, because such a tenant never
    /// loses a page to another tenant. Returns the number of steps.
    fn evict(&self, pages: usize) -> usize {
        let victim = {
            let membership = self.membership();
            let tenants = membership.members.iter().map(|member| &member.tenant);
            let holders = tenants.filter(|tenant| tenant.charged_bytes.get() > 0);
            let order = |tenant: &&Arc<TenantShared>| {
                let excess_bytes = tenant.excess_bytes();
                (excess_bytes > 0 && tenant.has_retained(), excess_bytes)
            };
            holders.max_by_key(order).cloned()
        };
        let reason = match self.shrinks.load(Relaxed) {
            true => Reason::Shrink,
            false => Reason::Pool,
        };
        victim.map_or(0, |victim| self.evict_from(&victim, pages, reason))
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

    /// Returns a tenant that is charged more than its own limit, if there is one. This happens when
    /// the limit was lowered.
    fn over_limit(&self) -> Option<Arc<TenantShared>> {
        let membership = self.membership();
        let over = membership.members.iter().find(|member| {
            let limit_bytes = member.quota.limit_bytes.unwrap_or(u64::MAX);
            member.tenant.charged_bytes.get() > limit_bytes
        });
        over.map(|member| Arc::clone(&member.tenant))
    }

    /// Finalizes some raw pages of the tenant whose turn it is, or of the next tenant that has raw
    /// pages. Returns the number of finalized pages.
    fn finalize_step(&self) -> usize {
        let turn = self.turn.fetch_add(1, Relaxed);
        let mut from = 0;
        loop {
            // Release the membership lock before pages are finalized, because evictions take it to
            // look for a victim.
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
            match tenant.finalize(self) {
                // All raw pages of this tenant were removed before they were finalized. Try the
                // tenants after it in the list, so that their pages need not wait for the next
                // step. This tenant is not tried again, so the loop ends.
                Some(0) => from = i + 1,
                finalized => return finalized.unwrap_or(0),
            }
        }
    }

    /// Continues the sweep up to the place that is due by now. Returns the number of places
    /// visited.
    fn sweep_step(&self, now: Time) -> usize {
        // If another thread runs the sweep, there is nothing to do here.
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
            .expect("the sweep's buffer does not have two pages");
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
            // A sweep has ended: return all idle frames to the system. Frames that are in frequent
            // use are soon taken again.
            self.store.heap.release_idle();
            self.compact_all.store(true, Relaxed);
        }
        looked as usize
    }

    /// Does one step of background work of any kind. Returns the amount of work done, in pages,
    /// blobs or frames; 0 means that nothing is left to do.
    fn maintain_step(&self, now: Time, pages: usize, begins: &mut dyn FnMut(Work)) -> usize {
        begins(Work::Finalize);
        // Raw pages come first, because they take twice the memory until they are finalized, and
        // new pages are refused if there are too many. But guests can put as fast as the pool
        // finalizes, so every CHORES_EVERY-th step does other work as well.
        let finalized = self.finalize_step();
        let turn = self.chores.fetch_add(1, Relaxed);
        if finalized > 0 && !turn.is_multiple_of(CHORES_EVERY) {
            return finalized;
        }
        begins(Work::MakeRoom);
        let done =
            finalized + self.chore(pages) + self.store.heap.trim(self.idle_frames()) as usize;
        if done == 0 {
            begins(Work::Recompress);
            return self.sweep_step(now);
        }
        done
    }

    /// Does one step of freeing, eviction or compaction. Returns the amount of work done, in pages,
    /// blobs or frames; 0 means that nothing is left to do.
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
        if self.held_bytes() > self.size_bytes.get() {
            self.store.heap.release_idle();
        }
        if let Some(tenant) = self.over_limit() {
            // Evict only one page, so that the tenant's charge does not fall further below the
            // limit than necessary.
            return self.evict_from(&tenant, 1, Reason::Limit);
        }
        if self.store.heap.is_sparse() || self.compact_all.load(Relaxed) {
            let moved = self.compact(pages);
            if moved == 0 {
                self.compact_all.store(false, Relaxed);
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
        drop(membership);
        let sweep_is_late = self
            .sweep
            .try_lock()
            .is_ok_and(|sweep| sweep.next < due_by(sweep.begun, now, self.store.heap.places()));
        let heap = &self.store.heap;
        let idle = heap.idle_excess(self.idle_frames()) > 0;
        let compact = self.compact_all.load(Relaxed) || heap.is_sparse();
        let sparse = compact && heap.has_spare();
        dead || raw || over || idle || sparse || sweep_is_late || self.over_limit().is_some()
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
    /// Creates an empty pool without tenants.
    ///
    /// # Errors
    /// The system does not provide the address space for the largest size.
    pub fn new(config: EngineConfig) -> io::Result<Arc<Engine>> {
        Engine::with(config, PageHash::of, KEYS_PER_TENANT_MAX)
    }

    /// Creates a pool with another hash function and another limit of keys, for tests.
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

    /// Adds a tenant without pools.
    ///
    /// # Errors
    /// The tenant's reserve does not fit beside those of the other tenants.
    pub fn add_tenant(self: &Arc<Engine>, spec: TenantSpec) -> Result<Tenant, AdmissionError> {
        let make = |spec: &TenantSpec, domain| TenantShared::new(spec, domain, &self.params);
        let tenant = self.membership_mut().add(spec, make)?;
        self.totals.tenants.add(1);
        Ok(Tenant::new(Arc::clone(self), tenant))
    }

    /// Changes the pool's present size in bytes, at most to its largest size. The caller shrinks
    /// the pool while the host needs the memory for something else. Calls of
    /// [`maintain`](Self::maintain) and puts evict the excess in bounded steps. If the size is
    /// below the sum of all reserves, the entitlements are the reserves, scaled down in proportion.
    /// The present size does not matter for the admission of reserves, which have to fit into the
    /// full size ([`set_full`](Self::set_full)).
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

    /// Sets the full size in bytes: the size that the pool has while the host needs no memory back.
    /// At first it is the size that the pool was created with. A new reserve must fit into the full
    /// size beside the reserves of other tenants; existing reserves stay. [`resize`](Self::resize)
    /// changes the present size.
    pub fn set_full(&self, full_bytes: u64) {
        let full_bytes = full_bytes.min(self.size_max_bytes);
        self.membership_mut().set_full(full_bytes);
    }

    /// Changes the full size, if one is given, and the quotas of tenants in one step, so that the
    /// caller need not find an order in which each single change is allowed.
    /// [`resize`](Self::resize) changes the present size.
    ///
    /// # Errors
    /// A reserve does not fit; then nothing changes. If the call changes the full size, this may be
    /// a reserve that the call does not change.
    pub fn configure(
        &self,
        full_bytes: Option<u64>,
        quotas: &[(&Tenant, Quota)],
    ) -> Result<(), AdmissionError> {
        let full_bytes = full_bytes.map(|bytes| bytes.min(self.size_max_bytes));
        let quotas: Vec<_> = quotas
            .iter()
            .map(|&(tenant, quota)| (tenant.shared(), quota))
            .collect();
        self.membership_mut().configure(full_bytes, &quotas)
    }

    /// Returns the largest size for [`resize`](Self::resize), in bytes.
    pub fn size_max_bytes(&self) -> u64 {
        self.size_max_bytes
    }

    /// Does background work for at most about `budget` pages: finalizes raw pages, frees detached
    /// pages, and evicts pages above the pool's size or a tenant's limit. Returns true if more work
    /// is left. Any number of threads may call this method at the same time.
    pub fn maintain(&self, now: Time, budget: usize) -> bool {
        self.maintain_reporting(now, budget, &mut |_| {})
    }

    /// Does background work as [`maintain`](Self::maintain) does, and reports its kinds. Before
    /// each piece of work it calls `begins` with the kind of that work, which may be the same as
    /// before. The engine holds no lock during these calls. There are up to three of them for about
    /// eight pages of work.
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

    /// Returns gauges and counters as of now. The figures of different tenants are read one after
    /// the other, not at the same instant.
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
        // A put in progress may have a blob and no key yet, so that there may be more blobs than
        // keys with one.
        stats.shared_pages = with_blob.saturating_sub(stats.blobs);
        stats.original_bytes = stats.pages * PAGE_SIZE as u64;
        stats
    }

    /// Returns whether all memory of the pool is locked in RAM, so that it is never swapped. It is
    /// locked if the system allowed the pool to lock its address space, which is
    /// [`ADDRESS_SPACE_TIMES`](crate::ADDRESS_SPACE_TIMES) times its largest size.
    pub fn is_locked(&self) -> bool {
        self.store.is_locked() && self.params.chunks.is_locked()
    }
}
