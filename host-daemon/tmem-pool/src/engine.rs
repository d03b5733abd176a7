// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine: the list of all tenants, and the size of the memory that they share (the pool).
//! Methods of the engine are also in reclaim.rs (which tenant loses pages), in background.rs, and
//! in tenant/, beside the handles to tenants.
//!
//! Locks: the membership lock guards the list of tenants and their quotas. A thread takes it for
//! reading to choose the tenant that loses pages, and for writing to add, remove or change a
//! tenant. It is the outermost lock.

use crate::blob::Store;
use crate::config::{
    EngineConfig, INDEX_ROOM_BYTES, INDEX_ROOM_DIVISOR, KEYS_PER_TENANT_MAX, PAGE_SIZE, Quota,
    TABLES_ROOM_BYTES, TENANT_METADATA_BYTES, TenantSpec, reclaim_high_bytes,
};
use crate::error::AdmissionError;
use crate::hash::{HashFn, PageHash};
use crate::index::Chunks;
use crate::index::entry::Gauges;
use crate::membership::Membership;
use crate::poison;
use crate::secret::ScratchPages;
use crate::state::{Freed, RAW_CHARGE_BYTES};
use crate::stats::EngineStats;
use crate::sweep::Sweep;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::tenant_shared::{TenantParams, TenantShared};
use crate::totals::{Sum, Totals};
use crossbeam_utils::CachePadded;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The storage engine: all tenants and the memory for their pages. Any thread may call any of its
/// methods at any time.
pub struct Engine {
    pub(crate) store: Store,
    pub(crate) totals: Totals,
    pub(crate) size_bytes: Sum,
    size_max_bytes: u64,
    params: TenantParams,
    /// True if the pool was shrunk and still exceeds its new size. While it is true, evictions that
    /// free memory of the pool count as `evictions_shrink`.
    pub(crate) is_shrinking: AtomicBool,
    pub(crate) background: BackgroundState,
    membership: RwLock<Membership>,
}

/// State that all threads with background work share.
pub(crate) struct BackgroundState {
    /// Number of finalize steps so far. This number modulo the number of tenants is the position in
    /// the list of tenants at which the next finalize step begins, so that the tenants take turns.
    pub finalize_steps: CachePadded<AtomicUsize>,
    /// Number of steps that freed detached pages.
    pub free_steps: CachePadded<AtomicUsize>,
    /// Number of steps of background work so far. The number decides which steps do other work in
    /// addition to finalizing new pages and evicting pages for them.
    pub steps: CachePadded<AtomicUsize>,
    /// True if a sweep (a pass over all blobs) has ended since the last full compaction. Background
    /// work then compacts the heap even if little of its memory is unused.
    pub compact_all: AtomicBool,
    /// True while background work evicts pages. It begins when less memory is free than the low
    /// watermark, and ends when as much memory is free as the high watermark.
    pub is_reclaiming: AtomicBool,
    /// Number of frames that background work still has to return to the system. The end of a sweep
    /// (a pass over all blobs) sets it to the number of idle frames, which are unused and have
    /// memory.
    pub idle_due: AtomicU64,
    /// Scratch pages of background workers, two for each.
    pub scratch: ScratchPages,
    /// The sweep, which recompresses cold pages.
    pub sweep: Sweep,
}

impl BackgroundState {
    fn new() -> BackgroundState {
        BackgroundState {
            finalize_steps: CachePadded::default(),
            free_steps: CachePadded::default(),
            steps: CachePadded::default(),
            compact_all: AtomicBool::new(false),
            is_reclaiming: AtomicBool::new(false),
            idle_due: AtomicU64::new(0),
            scratch: ScratchPages::default(),
            sweep: Sweep::default(),
        }
    }
}

/// Name of the data that the membership lock guards, for log messages.
const MEMBERSHIP: &str = "the list of tenants";

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

    /// Changes quotas, and the configured size if `configured_bytes` has a value, as
    /// [`Engine::configure`] does.
    pub(crate) fn set_quotas(
        &self,
        configured_bytes: Option<u64>,
        quotas: &[(&Arc<TenantShared>, Quota)],
    ) -> Result<(), AdmissionError> {
        let configured_bytes = configured_bytes.map(|bytes| bytes.min(self.size_max_bytes));
        self.membership_mut().configure(configured_bytes, quotas)
    }

    /// Adds a tenant to the members.
    pub(crate) fn add_member(&self, spec: TenantSpec) -> Result<Arc<TenantShared>, AdmissionError> {
        let make = |spec: &TenantSpec, domains| TenantShared::new(spec, domains, &self.params);
        let tenant = self.membership_mut().add(spec, make)?;
        self.totals.tenants.add(1);
        Ok(tenant)
    }

    /// Removes a tenant, whose last handle was dropped, from the members.
    pub(crate) fn remove_member(&self, tenant: &Arc<TenantShared>) {
        if self.membership_mut().remove(tenant) {
            self.remove_from_totals(tenant);
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
    pub(crate) fn frames_bytes_max(&self) -> u64 {
        let taken_bytes = self.metadata_bytes() + self.index_room_bytes();
        self.size_bytes.get().saturating_sub(taken_bytes)
    }

    fn index_room_bytes(&self) -> u64 {
        INDEX_ROOM_BYTES + self.size_bytes.get() / INDEX_ROOM_DIVISOR
    }

    /// Returns whether the pool uses more memory than its size. Frames without stored bytes do not
    /// count, because the heap releases them when other parts of the pool need the memory.
    pub(crate) fn is_over(&self) -> bool {
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

    /// Returns the number of raw pages for which the pool has free memory, without the memory that
    /// background work keeps free for puts.
    pub(crate) fn spare_raw_pages(&self) -> u64 {
        let size_bytes = self.size_bytes.get();
        let taken_bytes = self.used_bytes() + reclaim_high_bytes(size_bytes);
        size_bytes.saturating_sub(taken_bytes) / RAW_CHARGE_BYTES
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

    /// Removes a departed tenant, whose pages are all freed, from the totals.
    fn remove_from_totals(&self, tenant: &TenantShared) {
        self.totals.tenants.sub(1);
        tenant.remove_from_totals(&self.totals);
    }

    /// Returns whether a tenant, departed or not, has detached pages.
    pub(crate) fn any_tenant_has_detached(&self) -> bool {
        self.totals.tenants_with_detached.get() > 0
    }

    /// Removes a departed tenant from the list of departed tenants if its pages are all freed. Does
    /// nothing for a tenant that has not departed, or that still has pages.
    pub(crate) fn remove_departed(&self, tenant: &Arc<TenantShared>) {
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
        if tenant.has_detached() {
            return;
        }
        let departed = &mut membership.departed;
        if let Some(at) = departed.iter().position(|other| Arc::ptr_eq(other, tenant)) {
            departed.swap_remove(at);
            self.remove_from_totals(tenant);
        }
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
            is_shrinking: AtomicBool::new(false),
            background: BackgroundState::new(),
            membership: RwLock::new(Membership::new(size_bytes)),
        }))
    }

    /// Changes the pool's present size in bytes, at most to its largest size. The caller shrinks
    /// the pool while the host needs the memory for something else. Calls of
    /// [`maintain`](Self::maintain) and puts then evict pages in bounded steps until the pool fits.
    /// If the size is below the sum of all reserves, each entitlement is the tenant's reserve,
    /// scaled down in proportion. The present size does not matter for the admission of reserves,
    /// which have to fit into the configured size
    /// ([`set_configured_size`](Self::set_configured_size)).
    pub fn resize(&self, size_bytes: u64) {
        let size_bytes = size_bytes.min(self.size_max_bytes);
        let mut membership = self.membership_mut();
        let before_bytes = self.size_bytes.get();
        self.size_bytes.set(size_bytes);
        membership.resize(size_bytes);
        if size_bytes != before_bytes {
            let is_shrinking = size_bytes < before_bytes && self.is_over();
            self.is_shrinking.store(is_shrinking, Relaxed);
        }
    }

    /// Returns the sum of the reserves of all tenants in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.membership().reserved_bytes()
    }

    /// Sets the configured size in bytes: the size that the pool has while the host needs no memory
    /// back. At first it is the size with which the engine was created, and it is at most the
    /// pool's largest size. A new reserve must fit into the configured size beside the reserves of
    /// other tenants; existing reserves stay. [`resize`](Self::resize) changes the present size.
    pub fn set_configured_size(&self, configured_bytes: u64) {
        let configured_bytes = configured_bytes.min(self.size_max_bytes);
        self.membership_mut().set_configured_size(configured_bytes);
    }

    /// Returns the largest size in bytes to which [`resize`](Self::resize) can set the pool.
    pub fn size_max_bytes(&self) -> u64 {
        self.size_max_bytes
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
            removed_tenants: membership.departed.len() as u64,
            zstd_saved_bytes: self.store.zstd_saved_bytes.get(),
            ..EngineStats::from(&self.store.counters)
        };
        stats.held_bytes = stats.frames_bytes + stats.metadata_bytes;
        stats.add_counters(membership.departed_counters);
        let mut detached = Gauges::default();
        for member in &membership.members {
            let state = member.tenant.lock(&self.totals);
            let gauges = state.index.gauges;
            stats.pages += u64::from(gauges.pages);
            stats.same_filled_pages += u64::from(gauges.same_filled_pages);
            stats.nursery_pages += u64::from(gauges.nursery_pages);
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
