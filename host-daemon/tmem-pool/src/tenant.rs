// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A tenant's handle: what one VM may do to the pool.
//!
//! Hashing, compression, comparison and decompression run with no lock held. The tenant's lock
//! guards its `State`; a thread holds at most one tenant's lock. Order: registry, tenant, dedup
//! shard.

use crate::account::Sum;
use crate::blob::DomainId;
use crate::config::{
    EVICTIONS_PER_PUT_PAGE, KEY_METADATA_BYTES, OBJECT_METADATA_BYTES, PAGE_SIZE, PUT_GROUP_PAGES,
    Page, QUEUE_METADATA_BYTES, Quota, TenantSpec, Time,
};
use crate::entry::{Entry, Prepared};
use crate::error::{AdmissionError, CreateError, NoPool};
use crate::evict::Key;
use crate::pool;
use crate::state::{NewPage, Range, State};
use crate::stats::TenantStats;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

/// Pages that a get or a flush handles under one hold of the lock.
const LOCKED_PAGES_MAX: usize = 64;

/// A page to put. `object` and `index` are the key within the pool.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Object, usually a file.
    pub object: u64,
    /// Page within the object.
    pub index: u64,
    /// Stored as it is; a get must name the same.
    pub cookie: u64,
    /// The guest's hint that the page was active there.
    pub workingset: bool,
    /// The contents. They must not change during the call.
    pub page: &'a Page,
}

/// Answer to a put page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutResult {
    /// Held, unless it is evicted.
    Stored,
    /// Not held, and nothing else under its key either.
    Refused,
}

/// Answer to a page asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetResult {
    /// The page was returned and is no longer held.
    Hit {
        /// The stored cookie: the one asked for.
        cookie: u64,
    },
    /// Not held under this key and cookie.
    Miss,
}

/// A tenant as others see it. Its sums mirror what the lock guards, for those who do not hold it.
#[derive(Debug)]
pub(crate) struct Inner {
    name: String,
    domain: DomainId,
    state: Mutex<State>,
    pub charged_bytes: Sum,
    pub entitled_bytes: Sum,
    /// Steps of reaping are left.
    has_dead: AtomicBool,
    mismatch_logged: AtomicBool,
}

impl Inner {
    pub(crate) fn new(spec: &TenantSpec, domain: DomainId, keys_max: u64) -> Inner {
        Inner {
            name: spec.name.clone(),
            domain,
            state: Mutex::new(State::new(
                spec.quota.limit_bytes.unwrap_or(u64::MAX),
                keys_max,
            )),
            charged_bytes: Sum::default(),
            entitled_bytes: Sum::default(),
            has_dead: AtomicBool::new(false),
            mismatch_logged: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn domain(&self) -> DomainId {
        self.domain
    }

    /// Something is detached and not yet freed.
    pub(crate) fn has_dead(&self) -> bool {
        self.has_dead.load(Relaxed)
    }

    /// How far it is above its entitlement, in bytes; negative below.
    pub(crate) fn excess_bytes(&self) -> i128 {
        i128::from(self.charged_bytes.get()) - i128::from(self.entitled_bytes.get())
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let state = self
            .state
            .lock()
            .expect("a panic under a tenant's lock left it unknown");
        Locked {
            tenant: self,
            state,
        }
    }

    /// Says so once: a broken host would say it at every get.
    fn log_mismatch(&self, key: Key) {
        if !self.mismatch_logged.swap(true, Relaxed) {
            tracing::error!(
                tenant = %self.name,
                pool = key.pool,
                object = key.object,
                index = key.index,
                "a stored page failed its check and was answered as a miss: this host's memory or \
                 the engine is at fault; further ones are only counted"
            );
        }
    }
}

/// A tenant's state under its lock; the mirrors are brought up to date at the end.
pub(crate) struct Locked<'a> {
    tenant: &'a Inner,
    state: MutexGuard<'a, State>,
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
        self.tenant.charged_bytes.set(self.state.charged_bytes());
        self.tenant
            .has_dead
            .store(!self.state.dead.is_empty(), Relaxed);
    }
}

/// Ends the tenant when the last handle goes.
struct Handle {
    pool: Arc<pool::Inner>,
    tenant: Arc<Inner>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.tenant.lock().clear(&self.pool.store.account);
        self.pool.depart(&self.tenant);
    }
}

/// One tenant. Clones are handles to the same one; dropping the last drops its pages (freed behind,
/// by [`Pool::maintain`](crate::Pool::maintain)).
#[derive(Clone)]
pub struct Tenant(Arc<Handle>);

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant")
            .field("name", &self.0.tenant.name)
            .finish_non_exhaustive()
    }
}

impl Tenant {
    pub(crate) fn new(pool: Arc<pool::Inner>, tenant: Arc<Inner>) -> Tenant {
        Tenant(Arc::new(Handle { pool, tenant }))
    }

    /// The name that it was added with.
    pub fn name(&self) -> &str {
        &self.0.tenant.name
    }

    /// Makes an empty pool. The id is range-checked by the caller's protocol; here any u32 will do.
    ///
    /// # Errors
    /// `Exists` if a live pool of the tenant has the id, `Limit` if it has too many.
    pub fn create_pool(&self, id: u32) -> Result<(), CreateError> {
        self.0
            .tenant
            .lock()
            .create_pool(&self.0.pool.store.account, id)
    }

    /// Ends a pool and its pages in constant time; they are freed behind.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn destroy_pool(&self, id: u32) -> Result<(), NoPool> {
        self.0
            .tenant
            .lock()
            .destroy_pool(&self.0.pool.store.account, id)
    }

    /// Stores pages, in their order: of one key given twice, the later counts. `results` has the
    /// length of `pages`. A refused page leaves nothing under its key.
    ///
    /// A page that would exceed the tenant's limit evicts the tenant's own oldest ones. A page for
    /// which the pool has no room evicts, in bounded steps, those of the tenant most above its
    /// entitlement. It is refused if that does not suffice, and never waits.
    ///
    /// # Errors
    /// The tenant has no such pool, or it ended during the call; then all results are `Refused`.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn put(
        &self,
        _now: Time,
        pool: u32,
        pages: &[Put<'_>],
        results: &mut [PutResult],
    ) -> Result<(), NoPool> {
        assert_eq!(pages.len(), results.len(), "a result for each page");
        results.fill(PutResult::Refused);
        let incarnation = self.0.tenant.lock().incarnation(pool)?;
        let groups = pages
            .chunks(PUT_GROUP_PAGES)
            .zip(results.chunks_mut(PUT_GROUP_PAGES));
        for (pages, group_results) in groups {
            if let Err(NoPool) = self.put_group(pool, incarnation, pages, group_results) {
                results.fill(PutResult::Refused);
                return Err(NoPool);
            }
        }
        Ok(())
    }

    fn put_group(
        &self,
        pool: u32,
        incarnation: u64,
        pages: &[Put<'_>],
        results: &mut [PutResult],
    ) -> Result<(), NoPool> {
        let Handle {
            pool: engine,
            tenant,
        } = &*self.0;
        let mut prepared: [Option<Prepared>; PUT_GROUP_PAGES] = Default::default();
        for (put, prepared) in pages.iter().zip(&mut prepared) {
            let store = &engine.store;
            *prepared = Some(Prepared::new(
                store,
                tenant.domain,
                engine.hash,
                engine.seed,
                put.page,
            ));
        }
        let key_bytes = KEY_METADATA_BYTES + QUEUE_METADATA_BYTES + OBJECT_METADATA_BYTES;
        let budget = pages.len() * EVICTIONS_PER_PUT_PAGE;
        engine.make_room(pages.len() as u64 * key_bytes, budget);

        let mut freed = Vec::new();
        let mut state = tenant.lock();
        if state.incarnation(pool) != Ok(incarnation) {
            return Err(NoPool);
        }
        let size_bytes = engine.size_bytes.get();
        for ((put, prepared), result) in pages.iter().zip(prepared).zip(results) {
            let page = NewPage {
                key: Key {
                    pool,
                    object: put.object,
                    index: put.index,
                },
                cookie: put.cookie,
                workingset: put.workingset,
                prepared: prepared.expect("each page was prepared"),
            };
            if state.put(&engine.store.account, size_bytes, page, &mut freed) {
                *result = PutResult::Stored;
            }
        }
        drop(state);
        Ok(())
    }

    /// Gets pages `index ..` of one object, one for each cookie. `cookies`, `out` and `results`
    /// have one length. A hit removes the page; `out` of a miss is unspecified. Bytes are checked
    /// against the hash of those that were put: what fails is a miss and counted in
    /// `hash_mismatches`.
    ///
    /// # Errors
    /// The tenant has no such pool; then all results are `Miss`.
    ///
    /// # Panics
    /// If the slices differ in length.
    // Six values make a get; a struct of them would only be taken apart again.
    #[allow(clippy::too_many_arguments)]
    pub fn get(
        &self,
        _now: Time,
        pool: u32,
        object: u64,
        index: u64,
        cookies: &[u64],
        out: &mut [Page],
        results: &mut [GetResult],
    ) -> Result<(), NoPool> {
        assert_eq!(cookies.len(), out.len(), "a page for each cookie");
        assert_eq!(cookies.len(), results.len(), "a result for each cookie");
        results.fill(GetResult::Miss);
        self.0.tenant.lock().incarnation(pool)?;
        let mut index = Some(index);
        let chunks = cookies
            .chunks(LOCKED_PAGES_MAX)
            .zip(out.chunks_mut(LOCKED_PAGES_MAX))
            .zip(results.chunks_mut(LOCKED_PAGES_MAX));
        for ((cookies, out), results) in chunks {
            let Some(first) = index else { break };
            self.get_chunk(
                Key {
                    pool,
                    object,
                    index: first,
                },
                cookies,
                out,
                results,
            );
            index = first.checked_add(cookies.len() as u64);
        }
        Ok(())
    }

    fn get_chunk(&self, first: Key, cookies: &[u64], out: &mut [Page], results: &mut [GetResult]) {
        let Handle {
            pool: engine,
            tenant,
        } = &*self.0;
        let keys = (first.index..=u64::MAX).map(|index| Key { index, ..first });
        let mut taken: [Option<Entry>; LOCKED_PAGES_MAX] = [const { None }; LOCKED_PAGES_MAX];
        let mut state = tenant.lock();
        for ((cookie, key), taken) in cookies.iter().zip(keys.clone()).zip(&mut taken) {
            *taken = state.take(&engine.store.account, key, *cookie);
        }
        drop(state);

        let (mut hits, mut mismatches) = (0, 0);
        for (((entry, key), out), result) in taken.into_iter().zip(keys).zip(out).zip(results) {
            let Some(entry) = entry else { continue };
            if entry.read(engine.hash, engine.seed, out).is_ok() {
                *result = GetResult::Hit {
                    cookie: entry.cookie,
                };
                hits += 1;
            } else {
                tenant.log_mismatch(key);
                mismatches += 1;
            }
        }
        if hits + mismatches > 0 {
            let mut state = tenant.lock();
            state.counters.hits += hits;
            state.counters.hash_mismatches += mismatches;
        }
    }

    /// Drops pages `index ..` of one object; `nr_pages` None: to its end. The time is in proportion
    /// to the pages found; a whole object (index 0, to the end) goes in constant time and is freed
    /// behind.
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
        self.flush_some(pool, object, index, nr_pages, &mut { usize::MAX })
            .map(|_| ())
    }

    /// A [`flush`](Self::flush) in steps, for callers that others wait for: it drops at most
    /// `budget` pages and lowers it by as many. True: all is dropped; false: the budget is spent,
    /// and the same call with a new one goes on.
    ///
    /// # Errors
    /// The tenant has no such pool.
    pub fn flush_some(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        nr_pages: Option<u64>,
        budget: &mut usize,
    ) -> Result<bool, NoPool> {
        let Handle {
            pool: engine,
            tenant,
        } = &*self.0;
        let incarnation = tenant.lock().incarnation(pool)?;
        let last = match nr_pages {
            None => u64::MAX,
            Some(0) => return Ok(true),
            Some(nr_pages) => index.saturating_add(nr_pages - 1),
        };
        let range = Range {
            pool,
            object,
            index,
            last,
        };
        loop {
            let mut freed = Vec::new();
            let mut state = tenant.lock();
            // A pool that ended meanwhile has nothing to drop; a new one of its id is not meant.
            if state.incarnation(pool) != Ok(incarnation) {
                return Ok(true);
            }
            let pages_max = LOCKED_PAGES_MAX.min(*budget);
            let more = state.flush(&engine.store.account, range, pages_max, &mut freed)?;
            drop(state);
            *budget -= freed.len();
            if !more || *budget == 0 {
                return Ok(!more);
            }
        }
    }

    /// Empties the tenant in constant time: pools, objects, pages, which are freed behind. Quota
    /// and trust domain stay.
    pub fn clear(&self) {
        self.0.tenant.lock().clear(&self.0.pool.store.account);
    }

    /// Changes the quota. Pages above a lower limit go in steps of
    /// [`Pool::maintain`](crate::Pool::maintain) and of puts.
    ///
    /// # Errors
    /// The reserve does not fit beside those of the others; then nothing changes.
    pub fn set_quota(&self, quota: Quota) -> Result<(), AdmissionError> {
        self.0.pool.set_quota(&self.0.tenant, quota)
    }

    /// Gauges and counters as of now.
    pub fn stats(&self) -> TenantStats {
        let Handle {
            pool: engine,
            tenant,
        } = &*self.0;
        let quota = engine.quota(tenant);
        let state = tenant.lock();
        let (gauges, counters) = (state.index.gauges, state.counters);
        let mut stats = TenantStats {
            pages: gauges.pages.into(),
            charged_bytes: gauges.charged_bytes(),
            entitled_bytes: tenant.entitled_bytes.get(),
            original_bytes: u64::from(gauges.pages) * PAGE_SIZE as u64,
            compressed_bytes: gauges.compressed_bytes,
            same_filled_pages: gauges.same_filled_pages.into(),
            shared_pages: gauges.shared_pages.into(),
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
            detached_pages: state.detached.pages.into(),
            pools: state.index.pools.len() as u64,
            ..TenantStats::default()
        };
        stats.set_quota(quota);
        stats
    }
}

#[cfg(test)]
impl Tenant {
    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0.tenant
    }

    pub(crate) fn pool(&self) -> &Arc<pool::Inner> {
        &self.0.pool
    }

    /// The cookie held under (pool, object, index), and the page read into `read`, all left in
    /// place.
    pub(crate) fn peek_with(
        &self,
        (pool, object, index): (u32, u64, u64),
        read: Option<(crate::hash::HashFn, u64, &mut Page)>,
    ) -> Option<u64> {
        let state = self.0.tenant.lock();
        let entry = state.index.get(Key {
            pool,
            object,
            index,
        })?;
        if let Some((hash, seed, out)) = read {
            entry
                .read(hash, seed, out)
                .expect("a stored page passes its check");
        }
        Some(entry.cookie)
    }

    pub(crate) fn peek(&self, key: (u32, u64, u64)) -> Option<u64> {
        self.peek_with(key, None)
    }
}
