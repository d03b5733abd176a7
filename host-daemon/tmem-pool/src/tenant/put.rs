// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts: a put copies pages into the pool and adds their keys to the tenant's index.

use super::Tenant;
use crate::blob::Store;
use crate::config::{EVICTIONS_PER_PUT_PAGE, PUT_GROUP_PAGES, Page};
use crate::cost::{EVICT_NS, PUT_NS, REFUSE_NS};
use crate::error::NoPool;
use crate::heap::{Handle, prefetch_lines};
use crate::index::PoolRef;
use crate::index::entry::Content;
use crate::state::{Freed, NewPage, Refusal};
use std::fmt;

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
            *copy = engine.store.put_raw(blob, self.0.tenant.domain(), put.page);
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
}
