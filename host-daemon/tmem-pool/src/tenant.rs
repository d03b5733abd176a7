// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handle to a tenant, with the operations of one VM on the pool.
//!
//! Copying, hashing, compression, comparison and decompression run with no lock held. The tenant's
//! lock guards its `State`. A thread holds at most one tenant's lock, and takes it after the
//! membership lock.
//!
//! A panic under a tenant's lock empties that tenant, because its state is unknown after the panic.
//! The process continues. If the lock stayed poisoned instead, it would also stop threads that work
//! for other tenants, for example to evict pages.

use crate::blob::{DomainId, Encoded, Prepared, Reader, Store};
use crate::codec;
use crate::config::{
    EVICT_STEP_PAGES, EVICTIONS_PER_PUT_PAGE, FINALIZE_PAGES, PAGE_SIZE, PUT_GROUP_PAGES, Page,
    Quota, RAW_PAGES_MAX, RAW_PAGES_MIN, RAW_PART, TenantSpec,
};
use crate::cost::{
    DROP_NS, DROP_SAME_NS, EVICT_NS, GET_DENSE_NS, GET_NS, GET_SAME_NS, KEY_NS, MISS_NS, PUT_NS,
    RANGE_NS, REF_NS, REFUSE_NS,
};
use crate::engine::{Engine, TenantParams};
use crate::entry::Content;
use crate::error::{AdmissionError, CreateError, NoPool};
use crate::heap::{Handle, prefetch_lines};
#[cfg(test)]
use crate::index::Key;
use crate::index::PoolRef;
use crate::state::{
    FLUSH_HASHES_MAX, Freed, NewPage, Range, Reason, Refusal, State, Taken, Wanted,
};
use crate::stats::{Counters, TenantStats};
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::totals::{Sum, Totals};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Number of stored pages whose first bytes a get prefetches together. An access to an address that
/// is not in the TLB waits for a page walk, but the processor does several page walks at the same
/// time.
const GET_TOGETHER: usize = 16;

/// Largest number of pages that a flush or a reference request (REF) handles before it releases the
/// tenant's lock.
const LOCKED_PAGES_MAX: usize = 64;

/// Largest number of pages of one get: a full batch of the device. A get takes the tenant's lock
/// once for all its pages. With this number it holds the lock for about 10 µs.
pub const GET_PAGES_MAX: usize = 64;

/// Source of the contents of a page to put. A [`Page`] in memory that does not change is a source.
/// A source that reads memory of another process implements this trait, so that a put copies the
/// page only once.
pub trait PageSource {
    /// Copies the contents to `frame`, and returns true. Returns false if the contents cannot be
    /// read. The put then refuses the page and wipes the frame.
    ///
    /// A put calls this function at most once for each page, and holds no lock during the call, so
    /// that the function may wait. It does not call the function for a page for which it has no
    /// memory. It uses only the bytes in `frame`, so the memory that the function reads may change
    /// at any time.
    fn copy_to(&self, frame: &mut Page) -> bool;

    /// Prefetches the beginning of the contents into the processor's cache.
    fn prefetch(&self) {}
}

impl PageSource for Page {
    fn copy_to(&self, frame: &mut Page) -> bool {
        frame.copy_from_slice(self);
        true
    }

    fn prefetch(&self) {
        prefetch_lines(self.as_ptr());
    }
}

/// A page to put. The fields `object` and `index` are the page's key within the pool.
#[derive(Clone, Copy)]
pub struct Put<'a> {
    /// Number of the object, usually a file.
    pub object: u64,
    /// Number of the page within the object.
    pub index: u64,
    /// Cookie: a number that the guest chooses for this version of the page. A get must name it.
    pub cookie: u64,
    /// Hint of the guest: true if the page was active in the guest's page cache.
    pub workingset: bool,
    /// Contents of the page, or a source that copies them.
    pub page: &'a dyn PageSource,
}

impl fmt::Debug for Put<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Put")
            .field("object", &self.object)
            .field("index", &self.index)
            .field("cookie", &self.cookie)
            .field("workingset", &self.workingset)
            .finish_non_exhaustive()
    }
}

/// Result for one page of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutResult {
    /// The page is stored, and stays until it is removed or evicted.
    Stored,
    /// The page is not stored, and an older page under its key, if there was one, was dropped.
    Refused,
}

/// Result for one page of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetResult {
    /// The page was returned and is no longer in the pool.
    Hit {
        /// Cookie with which the page was put. It equals the cookie in the get.
        cookie: u64,
    },
    /// The page was returned and is retained: it stays in the pool, and is evicted before pages of
    /// the tenant that are not retained.
    Retained {
        /// Cookie with which the page was put. It equals the cookie in the get.
        cookie: u64,
    },
    /// The pool has no page with this key and cookie.
    Miss,
}

/// One page of a reference request (REF), by which the guest reports that it has evicted retained
/// pages unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ref {
    /// Number of the object, usually a file.
    pub object: u64,
    /// Number of the page within the object.
    pub index: u64,
    /// Cookie with which the page was put.
    pub cookie: u64,
}

/// The part of a tenant that all threads of the engine share. Its sums and flags are copies of
/// values that the tenant's lock guards, for threads that do not hold the lock.
#[derive(Debug)]
pub(crate) struct TenantShared {
    name: String,
    domain: DomainId,
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
    /// True if the engine's totals no longer include this tenant, which has departed. A thread sets
    /// the flag under the tenant's lock.
    forgotten: AtomicBool,
    /// True if the tenant has detached pages: dropped with their object or pool, and not freed yet.
    has_dead: AtomicBool,
    /// True if the tenant's queue of raw pages (not finalized yet) is not empty.
    has_raw: AtomicBool,
    /// True if the tenant has retained pages, which a get returned and left in the pool.
    has_retained: AtomicBool,
    mismatch_logged: AtomicBool,
}

impl TenantShared {
    pub(crate) fn new(spec: &TenantSpec, domain: DomainId, params: &TenantParams) -> TenantShared {
        let limit_bytes = spec.quota.limit_bytes.unwrap_or(u64::MAX);
        TenantShared {
            name: spec.name.clone(),
            domain,
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
            forgotten: AtomicBool::new(false),
            has_dead: AtomicBool::new(false),
            has_raw: AtomicBool::new(false),
            has_retained: AtomicBool::new(false),
            mismatch_logged: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn domain(&self) -> DomainId {
        self.domain
    }

    /// Returns whether the tenant has detached pages: dropped with their object or pool, and not
    /// freed yet.
    pub(crate) fn has_dead(&self) -> bool {
        self.has_dead.load(Relaxed)
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

    /// Sets the tenant's entitlement in bytes, and the limit of raw pages that follows from it.
    pub(crate) fn entitle(&self, bytes: u64) {
        self.entitled_bytes.set(bytes);
        let raw = bytes / RAW_PART / PAGE_SIZE as u64;
        let raw = raw.clamp(RAW_PAGES_MIN.into(), RAW_PAGES_MAX.into());
        self.state().raw_max = raw as u32;
    }

    pub(crate) fn set_limit(&self, limit_bytes: Option<u64>) {
        self.state().limit_bytes = limit_bytes.unwrap_or(u64::MAX);
    }

    /// Removes the departed tenant from the totals. After that, only threads that are still working
    /// on the tenant have references to it.
    pub(crate) fn forgotten(&self, totals: &Totals) {
        let _state = self.state();
        self.forgotten.store(true, Relaxed);
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

    /// Finalizes (deduplicates and compresses) up to [`FINALIZE_PAGES`] raw pages of the tenant.
    /// Returns the number of these pages, or None if there was no memory for the final form of one
    /// of them.
    pub(crate) fn finalize(&self, engine: &Engine) -> Option<usize> {
        let mut work = [(0, 0); FINALIZE_PAGES];
        let mut checks = [0; FINALIZE_PAGES];
        let mut nr = 0;
        let mut state = self.lock(&engine.totals);
        state.prefetch_raw(FINALIZE_PAGES, |blob| {
            engine.store.prefetch_content(Content::Raw(blob));
        });
        while nr < FINALIZE_PAGES
            && let Some((id, blob)) = state.next_raw()
        {
            // Take another reference to the raw blob. It keeps the page's bytes if another thread
            // removes the page before its final form is stored.
            if engine.store.share(blob) {
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
            engine.store.prefetch_raw(blob);
        }
        let mut finalized = [None; FINALIZE_PAGES];
        let mut buffer = engine.take_buffer();
        if let Some(buffer) = &mut buffer {
            let [one, two] = buffer.pages() else {
                unreachable!("scratch memory does not have two pages");
            };
            // Store a compressed page only after the next page is compressed. In the meantime the
            // processor loads the memory that is reserved for the compressed page.
            let (mut empty, mut full) = (one, two);
            let mut encoded: Option<(usize, Encoded)> = None;
            let complete = |encoded, buffer: &Page| engine.store.complete(encoded, buffer);
            for (nth, (&(_, blob), check)) in work.iter().zip(checks).enumerate() {
                // If this page may equal the compressed page that is not stored yet, store that
                // page first. Only then can this page find and share it.
                if let Some((before, page)) = encoded
                    && engine.store.may_equal(blob, &page)
                {
                    finalized[before] = Some(complete(page, full));
                    encoded = None;
                }
                let prepared = engine.prepare(blob, check, empty);
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
            engine.give_buffer(buffer);
        }
        // Wipe the remains of stored pages that this thread has decompressed to compare them.
        codec::wipe();
        let mut freed = Freed::new();
        let mut state = self.lock(&engine.totals);
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
        engine.release_all(freed);
        let failed = finalized[..nr].iter().any(Option::is_none);
        (!failed).then_some(nr)
    }

    /// Logs that a page does not match its hash. It does so only once for each tenant, because a
    /// faulty host would cause a message at every get.
    fn log_mismatch(&self, object: u64, index: u64) {
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
        tenant.has_dead.store(state.index.has_detached(), Relaxed);
        tenant.has_raw.store(state.has_raw(), Relaxed);
        tenant.has_retained.store(state.has_retained(), Relaxed);
        let (before, now) = (tenant.index_bytes.get(), state.bytes());
        tenant.owed_bytes.set(state.owed_bytes(now));
        if before != now && !tenant.forgotten.load(Relaxed) {
            tenant.index_bytes.set(now);
            totals.index_bytes.change(before, now);
        }
    }
}

/// Returns the cost of dropping a page with this content, in nanoseconds.
fn drop_ns(content: &Content) -> u64 {
    match content {
        Content::Same(_) => DROP_SAME_NS,
        Content::Raw(_) | Content::Blob(_) => DROP_NS,
    }
}

/// Result of a get: how many pages it handled, what it cost, and the stored contents of the
/// returned pages. Dropping this value releases these contents. The caller should answer the guest
/// first, because releasing is a fifth of the work of a get.
#[derive(Debug)]
pub struct Spent<'a> {
    store: &'a Store,
    /// Contents to which this value owns references. Only the first `nr` elements are valid. The
    /// array is part of the value, so that a get allocates no memory.
    contents: [Content; GET_PAGES_MAX],
    nr: usize,
    pages: usize,
    cost_ns: u64,
}

impl Spent<'_> {
    /// Returns the number of pages that the get has handled, both hits and misses.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the cost of the get in nanoseconds. It includes the cost of dropping this value.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns
    }
}

impl Drop for Spent<'_> {
    fn drop(&mut self) {
        self.store.release_all(&self.contents[..self.nr]);
        // Wipe the remains of decompressed pages only now, when no guest waits for an answer.
        codec::wipe();
    }
}

/// Blobs that a put has reserved, and copies of its pages in these blobs. Dropping this value frees
/// the blobs, also after a panic of a [`PageSource`].
struct Copies<'a> {
    store: &'a Store,
    blobs: &'a [Handle],
    /// Number of the blob and check bits of each page. None for a page that is not copied.
    raw: [Option<(u32, u32)>; PUT_GROUP_PAGES],
    kept: bool,
}

impl<'a> Copies<'a> {
    fn new(store: &'a Store, blobs: &'a [Handle]) -> Copies<'a> {
        Copies {
            store,
            blobs,
            raw: [None; PUT_GROUP_PAGES],
            kept: false,
        }
    }

    /// Returns the copies, to whose blobs the caller then owns references. Frees the blobs of pages
    /// that are not copied.
    fn keep(mut self) -> [Option<(u32, u32)>; PUT_GROUP_PAGES] {
        self.kept = true;
        self.raw
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        for (&reserved, copy) in self.blobs.iter().zip(self.raw) {
            match copy {
                None => self.store.heap.free(reserved),
                Some((blob, _)) if !self.kept => self.store.release(blob),
                Some(_) => {}
            }
        }
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
        self.engine.depart(&self.tenant);
    }
}

/// Handle to one tenant. A clone is another handle to that tenant. Dropping the last handle drops
/// the tenant's pages, which [`Engine::maintain`](crate::Engine::maintain) frees later.
#[derive(Clone)]
pub struct Tenant(Arc<TenantOwner>);

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant")
            .field("name", &self.0.tenant.name)
            .finish_non_exhaustive()
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
        &self.0.tenant.name
    }

    /// Creates an empty pool with the number `id`. The engine accepts any number, so the caller
    /// checks its range.
    ///
    /// # Errors
    /// `Exists` if the tenant already has a live pool with this number, `Limit` if the tenant has
    /// too many pools.
    pub fn create_pool(&self, id: u32) -> Result<(), CreateError> {
        self.0.lock().create_pool(id)
    }

    /// Removes a pool with its pages in constant time. Background work frees the pages later.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn destroy_pool(&self, id: u32) -> Result<(), NoPool> {
        self.0.lock().destroy_pool(id)
    }

    /// Stores pages in their order: if a key occurs twice, the later page replaces the earlier one.
    /// `results` must have the length of `pages`. If a page is refused, an older page under its key
    /// is dropped nevertheless.
    ///
    /// The call copies the pages, and [`Engine::maintain`](crate::Engine::maintain) deduplicates
    /// and compresses them later. A page is refused if too many pages of the tenant wait for that.
    /// A page that would exceed the tenant's limit evicts the tenant's own oldest pages. If the
    /// pool has no memory for a page, the call evicts pages of the tenant that is most above its
    /// entitlement, in bounded steps. It refuses the page if that does not suffice, and never
    /// waits. A page is also refused if its [`PageSource`] cannot copy it.
    ///
    /// Returns the cost in nanoseconds. It is at most [`PUT_NS_MAX`](crate::PUT_NS_MAX) for each
    /// page, plus the cost of removing keys that the estimator no longer has to follow. Each key is
    /// removed once, so later puts do not pay for it again.
    ///
    /// # Errors
    /// The tenant has no such pool, or the pool was destroyed during the call. All results are then
    /// `Refused`.
    ///
    /// # Panics
    /// If the slices differ in length. If a [`PageSource`] panics, its page and the pages that were
    /// copied together with it are not put, and older pages under their keys stay.
    pub fn put(
        &self,
        pool: u32,
        pages: &[Put<'_>],
        results: &mut [PutResult],
    ) -> Result<u64, NoPool> {
        assert_eq!(
            pages.len(),
            results.len(),
            "put() was called with different numbers of pages and results"
        );
        results.fill(PutResult::Refused);
        let pool = self.0.lock().pool(pool)?;
        let groups = pages
            .chunks(PUT_GROUP_PAGES)
            .zip(results.chunks_mut(PUT_GROUP_PAGES));
        let mut cost_ns = 0;
        for (pages, group_results) in groups {
            let Some(group_ns) = self.put_group(pool, pages, group_results) else {
                results.fill(PutResult::Refused);
                return Err(NoPool);
            };
            cost_ns += group_ns;
        }
        Ok(cost_ns)
    }

    /// Stores a group of up to [`PUT_GROUP_PAGES`] pages of a put. Returns the cost in nanoseconds,
    /// or None if the pool was destroyed.
    fn put_group(
        &self,
        pool: PoolRef,
        pages: &[Put<'_>],
        results: &mut [PutResult],
    ) -> Option<u64> {
        let engine = &self.0.engine;
        // Copy no more pages than the tenant may add to its raw pages. Further pages are refused.
        let raw_room = self.0.lock().raw_room();
        let steps_max = pages.len() * EVICTIONS_PER_PUT_PAGE;
        let mut steps = steps_max;
        for put in pages.iter().take(raw_room) {
            put.page.prefetch();
        }
        // Reserve the memory of all pages before the first page is copied. While copied bytes are
        // on their way to memory, each access to a lock or an atomic waits for them.
        let mut blobs = [Handle(0); PUT_GROUP_PAGES];
        let blobs = &mut blobs[..raw_room.min(pages.len())];
        let reserved = engine.reserve_raw(blobs, &mut steps);
        let blobs = &blobs[..reserved];
        let mut copies = Copies::new(&engine.store, blobs);
        for ((put, copy), &blob) in pages.iter().zip(&mut copies.raw).zip(blobs) {
            *copy = engine.store.put_raw(blob, self.0.tenant.domain, put.page);
        }
        let raw = copies.keep();
        let has_index_room = engine.has_index_room();
        let mut freed = Freed::new();
        let mut state = self.0.lock();
        let estimator_before_ns = state.estimator_ns();
        let live = state.index.is_live(pool);
        let mut key_hashes = [0; PUT_GROUP_PAGES];
        if live {
            for (put, key_hash) in pages[..reserved].iter().zip(&mut key_hashes) {
                *key_hash = state.prefetch_put(pool, put.object, put.index);
            }
        }
        for (nth, ((put, raw), result)) in pages.iter().zip(raw).zip(results).enumerate() {
            let Some((blob, check)) = raw else {
                if live {
                    let refusal = match nth {
                        _ if nth < reserved => Refusal::Unreadable,
                        _ if nth < raw_room => Refusal::Pool,
                        _ => Refusal::Nursery,
                    };
                    state.refuse(pool, (put.object, put.index), refusal, &mut freed);
                }
                continue;
            };
            if !live {
                freed.push(Content::Raw(blob));
                continue;
            }
            let page = NewPage {
                object: put.object,
                index: put.index,
                cookie: put.cookie,
                workingset: put.workingset,
                blob,
                check,
                key_hash: key_hashes[nth],
            };
            if state.put(pool, page, has_index_room, &mut freed) {
                *result = PutResult::Stored;
            }
        }
        let estimator_ns = state.estimator_ns() - estimator_before_ns;
        drop(state);
        let evicted = steps_max - steps + freed.len();
        engine.release_all(freed);
        let cost_ns = reserved as u64 * PUT_NS
            + (pages.len() - reserved) as u64 * REFUSE_NS
            + evicted as u64 * EVICT_NS
            + estimator_ns;
        live.then_some(cost_ns)
    }

    /// Gets consecutive pages of one object, beginning with page `index`, one for each cookie.
    /// `cookies`, `out` and `results` must have the same length. A hit removes the page from the
    /// pool. For a miss, the contents of the page in `out` are unspecified. The get compares the
    /// restored bytes with the hash of the bytes that were put. If they differ, the result is a
    /// miss, which is counted in `hash_mismatches`.
    ///
    /// # Errors
    /// The tenant has no such pool; then all results are `Miss`.
    ///
    /// # Panics
    /// If the slices differ in length, or have more than [`GET_PAGES_MAX`] elements.
    pub fn get(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        cookies: &[u64],
        out: &mut [Page],
        results: &mut [GetResult],
    ) -> Result<Spent<'_>, NoPool> {
        self.get_some(pool, (object, index), cookies, out, results, u64::MAX)
    }

    /// Does a [`get`](Self::get) of as many pages as cost at most `budget_ns` nanoseconds, computed
    /// from the constants of `cost.rs`. It is for threads that have to serve other VMs in between.
    /// [`Spent::pages`] returns the number of pages handled. The get neither looks up nor removes
    /// further pages, and their result is `Miss`. With a budget of
    /// [`GET_NS_MAX`](crate::GET_NS_MAX) or more, a call handles at least one page.
    ///
    /// In two cases a get may cost more than the budget, because the cost of a page is estimated
    /// before the page is read. First, a background worker may be compressing the page with zstd at
    /// this moment. Second, for a retained page, the tenant may have less room than before, so that
    /// the estimator removes keys that it follows.
    ///
    /// # Errors
    /// The tenant has no such pool; then all results are `Miss`.
    ///
    /// # Panics
    /// If the slices differ in length, or have more than [`GET_PAGES_MAX`] elements.
    pub fn get_some(
        &self,
        pool: u32,
        (object, index): (u64, u64),
        cookies: &[u64],
        out: &mut [Page],
        results: &mut [GetResult],
        budget_ns: u64,
    ) -> Result<Spent<'_>, NoPool> {
        let asked = (cookies, 0);
        self.get_retaining(pool, (object, index), asked, out, results, budget_ns)
    }

    /// Does a [`get_some`](Self::get_some) that may retain pages, that is, leave pages that it
    /// returns in the pool. If bit n of `retain` is 1, the engine may retain page n. The engine
    /// decides this for each page.
    ///
    /// # Errors
    /// The tenant has no such pool; then all results are `Miss`.
    ///
    /// # Panics
    /// If the slices differ in length, or have more than [`GET_PAGES_MAX`] elements.
    pub fn get_retaining(
        &self,
        pool: u32,
        (object, index): (u64, u64),
        (cookies, retain): (&[u64], u64),
        out: &mut [Page],
        results: &mut [GetResult],
        budget_ns: u64,
    ) -> Result<Spent<'_>, NoPool> {
        // The mask `retain` must have a bit for each page of a get.
        const { assert!(GET_PAGES_MAX <= u64::BITS as usize) };
        assert!(
            cookies.len() == out.len() && cookies.len() == results.len(),
            "a get has {} cookies, {} pages and {} results",
            cookies.len(),
            out.len(),
            results.len()
        );
        let TenantOwner { engine, tenant } = &*self.0;
        let store = &engine.store;
        results.fill(GetResult::Miss);
        // Leave out cookies of pages beyond the page number u64::MAX, because there are no such
        // pages.
        let nr = (u64::MAX - index)
            .saturating_add(1)
            .min(cookies.len() as u64) as usize;
        let mut taken = [None; GET_PAGES_MAX];
        let wanted = Wanted {
            object,
            index,
            cookies: &cookies[..nr],
            retain,
            budget_ns,
        };
        let mut state = self.0.lock();
        let pool = state.pool(pool)?;
        let estimator_before_ns = state.estimator_ns();
        let prefetch = |content| store.prefetch_content(content);
        let get_ns_max = |content| store.get_ns_max(content);
        let share = |content| store.share_content(content);
        let looked_up = state.take(pool, &wanted, &mut taken[..nr], prefetch, get_ns_max, share);
        let estimator_ns = state.estimator_ns() - estimator_before_ns;
        drop(state);

        let mut spent = Spent {
            store,
            contents: [Content::Same(0); GET_PAGES_MAX],
            nr: 0,
            pages: if looked_up == nr {
                cookies.len()
            } else {
                looked_up
            },
            cost_ns: estimator_ns,
        };
        // Open the readers of all pages before the first page is read. An open reader keeps its
        // page in place. Opening a reader is an atomic access. If it came after the copy of another
        // page, it would wait until the copied bytes have reached memory.
        let taken = &taken[..looked_up];
        let mut readers = [const { None }; GET_PAGES_MAX];
        for (reader, taken) in readers.iter_mut().zip(taken) {
            *reader = taken.map(|Taken { content, .. }| store.reader(content));
        }
        let mut ahead = readers[..looked_up].chunks(GET_TOGETHER);
        let mut fetch = || {
            let next = ahead.next().unwrap_or_default();
            next.iter().flatten().for_each(Reader::prefetch);
        };
        fetch();
        let mut mismatches = 0;
        for (i, (taken, reader)) in taken.iter().zip(&readers).enumerate() {
            if i.is_multiple_of(GET_TOGETHER) {
                fetch();
            }
            let (Some(taken), Some(reader)) = (*taken, reader) else {
                spent.cost_ns += MISS_NS;
                continue;
            };
            let Taken {
                content,
                check,
                was_retained,
                retained,
            } = taken;
            if store.read(reader, check, &mut out[i]).is_ok() {
                let cookie = cookies[i];
                results[i] = match retained {
                    false => GetResult::Hit { cookie },
                    true => GetResult::Retained { cookie },
                };
            } else {
                tenant.log_mismatch(object, index + i as u64);
                mismatches += 1;
                if retained {
                    self.drop_damaged(pool, (object, index + i as u64), cookies[i]);
                }
            }
            spent.cost_ns += match reader {
                Reader::Same(_) => GET_SAME_NS,
                Reader::Bytes(bytes) if codec::is_dense(bytes.bytes()) => GET_DENSE_NS,
                Reader::Bytes(_) => GET_NS,
            };
            spent.cost_ns += if was_retained { REF_NS } else { 0 };
            spent.contents[spent.nr] = content;
            spent.nr += 1;
        }
        if mismatches > 0 {
            let counters = &mut self.0.lock().counters;
            counters.hits -= mismatches;
            counters.hash_mismatches += mismatches;
        }
        Ok(spent)
    }

    /// Drops a retained page whose bytes do not match its hash.
    fn drop_damaged(&self, pool: PoolRef, key: (u64, u64), cookie: u64) {
        let mut state = self.0.lock();
        if !state.index.is_live(pool) {
            return;
        }
        // If another thread has removed the page in the meantime, that thread has already counted
        // the removal.
        if let Some(content) = state.drop_cookie(pool, key, cookie) {
            state.counters.retains -= 1;
            drop(state);
            self.0.engine.store.release_content(content);
        }
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
                *held = state.refer(pool, page.object, page.index, page.cookie);
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
                let key = (page.object, page.index);
                freed.extend(state.drop_cookie(pool, key, page.cookie));
            }
            state.counters.refs += refs.len() as u64;
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
        self.flush_some(pool, object, index, nr_pages, &mut { u64::MAX })
            .map(|_| ())
    }

    /// Does a [`flush`](Self::flush) in steps, for threads that have to serve other VMs in between.
    /// A call costs at most `budget_ns` nanoseconds, computed from the constants of `cost.rs`, and
    /// lowers `budget_ns` by its cost. Returns true if all pages are dropped. Returns false if the
    /// budget does not suffice for the next step. The caller then repeats the call with a new
    /// budget of [`FLUSH_NS_MIN`](crate::FLUSH_NS_MIN) or more.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn flush_some(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        nr_pages: Option<u64>,
        budget_ns: &mut u64,
    ) -> Result<bool, NoPool> {
        let pool = self.0.lock().pool(pool)?;
        let last = match nr_pages {
            None => u64::MAX,
            Some(0) => return Ok(true),
            Some(nr_pages) => index.saturating_add(nr_pages - 1),
        };
        let range = Range {
            object,
            index,
            last,
        };
        loop {
            let Some(left_ns) = budget_ns.checked_sub(RANGE_NS) else {
                return Ok(false);
            };
            *budget_ns = left_ns;
            let mut freed = Freed::new();
            let mut state = self.0.lock();
            // If the pool was destroyed in the meantime, there are no pages to drop. The flush does
            // not apply to a new pool with the same number.
            if !state.index.is_live(pool) {
                return Ok(true);
            }
            let pages_max = (left_ns / DROP_NS).min(LOCKED_PAGES_MAX as u64) as usize;
            let more = state.flush(pool, range, pages_max, &mut freed);
            let dropped_ns = freed.iter().map(drop_ns).sum::<u64>();
            *budget_ns = budget_ns.saturating_sub(dropped_ns);
            let done = !more && state.forget_ns_max(range) <= *budget_ns;
            if done {
                let estimator_before_ns = state.estimator_ns();
                state.forget(pool, range);
                let keys_ns = match last - index {
                    nr if nr < FLUSH_HASHES_MAX => (nr + 1) * KEY_NS,
                    _ => 0,
                };
                *budget_ns -= state.estimator_ns() - estimator_before_ns + keys_ns;
            }
            drop(state);
            self.0.engine.release_all(freed);
            if done {
                return Ok(true);
            }
            if !more || *budget_ns < RANGE_NS + DROP_NS {
                return Ok(false);
            }
        }
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
        self.0.engine.set_quota(&self.0.tenant, quota)
    }

    /// Returns the tenant's gauges and counters as of now.
    pub fn stats(&self) -> TenantStats {
        let TenantOwner { engine, tenant } = &*self.0;
        let quota = engine.quota(tenant);
        let state = self.0.lock();
        let mut stats = state.stats();
        stats.entitled_bytes = tenant.entitled_bytes.get();
        stats.set_quota(quota);
        stats
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
