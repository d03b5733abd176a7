// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts: a put copies pages into the pool and adds their keys to the tenant's index.

use super::Tenant;
use crate::blob::{RawCopy, Store};
use crate::config::{EVICTIONS_PER_PUT_PAGE, PUT_GROUP_PAGES};
use crate::cost::{EVICT_NS, PUT_NS, REFUSE_NS};
use crate::error::NoPool;
use crate::heap::Handle;
use crate::index::PoolRef;
use crate::index::entry::Content;
use crate::request::{Put, PutResult};
use crate::state::{Freed, NewPage, Refusal, Room};

/// Blobs that a put has reserved, and copies of its pages in these blobs. Dropping this value frees
/// the blobs, also after a panic of a [`PageSource`].
struct Copies<'a> {
    store: &'a Store,
    blobs: &'a [Handle],
    /// Copy of each page. None for a page that is not copied.
    raw: [Option<RawCopy>; PUT_GROUP_PAGES],
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
    fn keep(mut self) -> [Option<RawCopy>; PUT_GROUP_PAGES] {
        self.kept = true;
        self.raw
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        for (&reserved, copy) in self.blobs.iter().zip(self.raw) {
            match copy {
                None => self.store.heap.free(reserved),
                Some(RawCopy { blob, .. }) if !self.kept => self.store.release(blob),
                Some(_) => {}
            }
        }
    }
}

/// Result of storing a group of pages.
struct StoredGroup {
    cost_ns: u64,
    /// Number of raw pages that the tenant may add after this group.
    raw_room: usize,
}

impl Tenant {
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
        let state = self.0.lock();
        let pool = state.pool(pool)?;
        let mut raw_room = state.raw_room(self.0.engine.spare_raw_pages());
        drop(state);
        let groups = pages
            .chunks(PUT_GROUP_PAGES)
            .zip(results.chunks_mut(PUT_GROUP_PAGES));
        let mut cost_ns = 0;
        for (pages, group_results) in groups {
            let Some(group) = self.put_group(pool, raw_room, pages, group_results) else {
                results.fill(PutResult::Refused);
                return Err(NoPool);
            };
            cost_ns += group.cost_ns;
            raw_room = group.raw_room;
        }
        Ok(cost_ns)
    }

    /// Stores a group of up to [`PUT_GROUP_PAGES`] pages of a put. Copies at most `raw_room` pages,
    /// the number that the tenant may add to its raw pages, and refuses further pages. Returns None
    /// if the pool was destroyed.
    ///
    /// A put takes the tenant's lock once before its first group, for `raw_room`, and once for each
    /// group. One acquisition does not suffice: the number of pages to copy must be known before the
    /// copying, and no lock may be held during it, because a [`PageSource`](crate::PageSource) may
    /// wait.
    fn put_group(
        &self,
        pool: PoolRef,
        raw_room: usize,
        pages: &[Put<'_>],
        results: &mut [PutResult],
    ) -> Option<StoredGroup> {
        let engine = &self.0.engine;
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
        let domain = self.0.tenant.domain(pool.sharing);
        let mut copies = Copies::new(&engine.store, blobs);
        for ((put, copy), &blob) in pages.iter().zip(&mut copies.raw).zip(blobs) {
            *copy = engine.store.put_raw(blob, domain, put.page);
        }
        let raw = copies.keep();
        let room = Room {
            has_index: engine.has_index_room(),
            // The group's blobs are reserved, so their memory is no longer spare.
            spare_pages: engine.spare_raw_pages() + reserved as u64,
        };
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
            let Some(RawCopy { blob, check }) = raw else {
                if live {
                    let refusal = match nth {
                        _ if nth < reserved => Refusal::Unreadable,
                        _ if nth < raw_room => Refusal::Pool,
                        _ => Refusal::Nursery,
                    };
                    state.refuse(pool, put, refusal, &mut freed);
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
            if state.put(pool, page, room, &mut freed) {
                *result = PutResult::Stored;
            }
        }
        let estimator_ns = state.estimator_ns() - estimator_before_ns;
        let raw_room = state.raw_room(room.spare_pages - reserved as u64);
        drop(state);
        let evicted = steps_max - steps + freed.len();
        engine.release_all(freed);
        let cost_ns = reserved as u64 * PUT_NS
            + (pages.len() - reserved) as u64 * REFUSE_NS
            + evicted as u64 * EVICT_NS
            + estimator_ns;
        live.then_some(StoredGroup { cost_ns, raw_room })
    }
}
