// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stored page contents: raw as they came, then compressed, one copy of equal pages of a trust
//! domain.
//!
//! A blob is named by the number of its place in the heap, and lives as long as it has references,
//! which are counted: entries have one each, and so has whoever works on it. The table of equal
//! pages only knows where one may be and holds no reference; whoever finds a blob through it
//! compares every byte before sharing it. It never joins pages of two domains, nor pages that only
//! hash alike.
//!
//! Locks: those of the table (dedup.rs), which are never held together with one of the heap.

use crate::account::Sum;
use crate::codec::{self, Corrupt, DENSER_BYTES, Denser};
use crate::config::{PAGE_SIZE, Page};
use crate::dedup::{Dedup, Links};
use crate::entry::Content;
use crate::hash::{HashFn, PageHash, check_bits, place_bits, table_bits};
use crate::heap::{self, Handle, Heap, Zeroed};
use crate::sync::AtomicU32;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// A trust domain; never reused.
pub(crate) type DomainId = u32;

/// What the store keeps for a blob beside its bytes: with the heap's word it is 24 B.
#[derive(Debug)]
pub(crate) struct Record {
    /// Of the page.
    hash: AtomicU32,
    /// Of a listed blob, plus 1; 0: not listed.
    domain: AtomicU32,
    /// Of the table.
    next: AtomicU32,
    /// References in the lower half, then what the page took when it was first compressed, which is
    /// what it is charged, and what the sweep has found.
    state: AtomicU32,
}

const REFS: u32 = (1 << 16) - 1;
/// More references than this are not given: an equal page is stored again. Enough for all that a
/// few hundred VMs have in common.
const REFS_MAX: u32 = 1 << 15;
const FIRST_SHIFT: u32 = 16;
const FIRST_BYTES: u32 = (1 << 13) - 1;
const _: () = assert!(PAGE_SIZE as u32 <= FIRST_BYTES);
/// The sweep passed it once.
const SEEN: u32 = 1 << 29;
/// And a second time: it is as dense as it gets.
const DENSE: u32 = 1 << 30;

// SAFETY: atomics.
unsafe impl Zeroed for Record {}

/// All blobs, and the table that finds equal ones.
#[derive(Debug)]
pub(crate) struct Store {
    pub heap: Heap<Record>,
    hash: HashFn,
    hasher: PageHash,
    pub dedup: Dedup,
    /// Cold blobs that became smaller, ever.
    pub denser_blobs: Sum,
    /// By so much.
    pub denser_saved_bytes: Sum,
    /// What those that are there now take less than when they were first compressed.
    pub dense_gain_bytes: Sum,
}

/// A page's final form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settled {
    /// A blob comes with a reference of its own.
    pub content: Content,
    pub stored_bytes: usize,
    /// An equal page was there already.
    pub shared: bool,
}

/// See [`Store::reader`].
pub(crate) enum Reader<'a> {
    Same(u32),
    Bytes(heap::Reader<'a>),
}

impl Reader<'_> {
    /// Brings the beginning of the bytes into the cache.
    pub(crate) fn prefetch(&self) {
        if let Reader::Bytes(reader) = self {
            reader.prefetch();
        }
    }
}

impl Store {
    /// For up to `bytes_max` of stored bytes.
    ///
    /// # Errors
    /// The system has not the address space.
    pub(crate) fn new(bytes_max: u64, hash: HashFn, seed: u64) -> io::Result<Store> {
        let heap = Heap::new(bytes_max)?;
        Ok(Store {
            hash,
            hasher: PageHash::new(seed),
            dedup: Dedup::new(heap.handles_max())?,
            denser_blobs: Sum::default(),
            denser_saved_bytes: Sum::default(),
            dense_gain_bytes: Sum::default(),
            heap,
        })
    }

    /// All of its memory is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.heap.is_locked() && self.dedup.is_locked()
    }

    /// Memory of the table.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.dedup.bytes()
    }

    // ---- references ---------------------------------------------------------------------------

    fn record(&self, blob: u32) -> &Record {
        self.heap.extra(Handle(blob))
    }

    /// Stores a page as it is. Returns the blob, with one reference, and the check of its bytes.
    /// None: that would take more than `frames_bytes_max` of memory.
    pub(crate) fn put_raw(&self, page: &Page, frames_bytes_max: u64) -> Option<(u32, u32)> {
        let Handle(blob) = self.heap.store(page, frames_bytes_max)?;
        // Of the copy: what the guest does to the page meanwhile is no matter.
        let hash = self.heap.read(Handle(blob), |copy| {
            let copy = copy.try_into().expect("a raw blob is a page");
            (self.hash)(&self.hasher, copy)
        });
        let record = self.record(blob);
        record.hash.store(table_bits(hash), Relaxed);
        record.domain.store(0, Relaxed);
        // Release: the sweep may take a reference of any blob that has some.
        record.state.store(1, Release);
        Some((blob, check_bits(hash)))
    }

    /// One more reference for a holder of one. False: it has as many as it may.
    pub(crate) fn share(&self, blob: u32) -> bool {
        let more = |state| (1..REFS_MAX).contains(&(state & REFS)).then_some(state + 1);
        let state = &self.record(blob).state;
        state.fetch_update(Acquire, Relaxed, more).is_ok()
    }

    /// Gives a reference up. With the last one the bytes go.
    pub(crate) fn release(&self, blob: u32) {
        // Release: whoever frees it does so after our reads.
        let state = self.record(blob).state.fetch_sub(1, AcqRel);
        if state & REFS == 1 {
            self.unlist(blob);
            if state & DENSE != 0 {
                self.dense_gain_bytes.sub(self.dense_gain(blob));
            }
            self.heap.free(Handle(blob));
        }
    }

    /// Brings what is known of a blob into the cache.
    pub(crate) fn prefetch(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.heap.prefetch(Handle(blob));
        }
    }

    /// Brings the place where pages equal to a raw one are listed into the cache.
    pub(crate) fn prefetch_place(&self, raw: u32, domain: DomainId) {
        self.dedup.prefetch(self.place(raw, domain));
    }

    /// And the first that is listed there, and the beginning of the raw one's bytes.
    pub(crate) fn prefetch_raw(&self, raw: u32, domain: DomainId) {
        self.heap.prefetch_bytes(Handle(raw));
        let first = self.dedup.first(self.place(raw, domain));
        self.heap.prefetch(Handle(first));
    }

    fn place(&self, blob: u32, domain: DomainId) -> u64 {
        place_bits(self.record(blob).hash.load(Relaxed), domain)
    }

    /// And where it is listed.
    pub(crate) fn prefetch_listed(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.dedup.prefetch(self.hash(blob));
        }
    }

    /// Gives up what an entry had.
    pub(crate) fn release_content(&self, content: Content) {
        match content {
            Content::Same(_) => {}
            Content::Raw(blob) | Content::Blob(blob) => self.release(blob),
        }
    }

    /// A holder of a reference, which it keeps, begins to read.
    pub(crate) fn reader(&self, content: Content) -> Reader<'_> {
        match content {
            Content::Same(pattern) => Reader::Same(pattern),
            Content::Raw(blob) | Content::Blob(blob) => {
                Reader::Bytes(self.heap.reader(Handle(blob)))
            }
        }
    }

    /// Restores a page. `out` is unspecified after an error.
    pub(crate) fn read(
        &self,
        reader: &Reader<'_>,
        check: u32,
        out: &mut Page,
    ) -> Result<(), Corrupt> {
        match reader {
            Reader::Same(pattern) => codec::fill(*pattern, out),
            Reader::Bytes(reader) => codec::decode(reader.bytes(), out)?,
        }
        if check_bits((self.hash)(&self.hasher, out)) == check {
            Ok(())
        } else {
            Err(Corrupt)
        }
    }

    // ---- final forms --------------------------------------------------------------------------

    /// Finds the final form of a raw blob, of which the caller has a reference and keeps it. None:
    /// there is no memory for it now.
    pub(crate) fn settle(
        &self,
        raw: u32,
        domain: DomainId,
        frames_bytes_max: u64,
        buffer: &mut Page,
    ) -> Option<Settled> {
        self.heap.read(Handle(raw), |page| {
            let page: &Page = page.try_into().expect("a raw blob is a page");
            if let Some(pattern) = codec::same_filled(page) {
                return Some(Settled {
                    content: Content::Same(pattern),
                    stored_bytes: 0,
                    shared: false,
                });
            }
            let hash = self.record(raw).hash.load(Relaxed);
            if let Some(blob) = self.find_equal(domain, hash, page, buffer) {
                return Some(Settled {
                    content: Content::Blob(blob),
                    stored_bytes: self.first_bytes(blob),
                    shared: true,
                });
            }
            let first = |bytes: usize| (bytes as u32) << FIRST_SHIFT;
            let (blob, stored_bytes) = match codec::encode(page, buffer) {
                Some(bytes) => {
                    let Handle(blob) = self.heap.store(bytes, frames_bytes_max)?;
                    let record = self.record(blob);
                    record.hash.store(hash, Relaxed);
                    record.domain.store(0, Relaxed);
                    record.state.store(1 | first(bytes.len()), Release);
                    (blob, bytes.len())
                }
                // It stays where it is.
                None => {
                    self.share(raw).then_some(())?;
                    // Until now it was 0.
                    let state = &self.record(raw).state;
                    state.fetch_or(first(PAGE_SIZE), Relaxed);
                    (raw, PAGE_SIZE)
                }
            };
            self.list(blob, domain, hash);
            Some(Settled {
                content: Content::Blob(blob),
                stored_bytes,
                shared: false,
            })
        })
    }

    fn first_bytes(&self, blob: u32) -> usize {
        (self.record(blob).state.load(Relaxed) >> FIRST_SHIFT & FIRST_BYTES) as usize
    }

    /// By how much a blob is smaller than when it was first compressed. The caller has a reference, or
    /// gave the last one up.
    fn dense_gain(&self, blob: u32) -> u64 {
        // Of a raw one the former is 0.
        let first_bytes = self.first_bytes(blob);
        first_bytes.saturating_sub(self.heap.len(Handle(blob))) as u64
    }

    /// Looks at a place in the heap whose turn it is in the sweep. A blob that is found a second
    /// time has been there for a whole sweep: it is made denser, if that gains something. True: it
    /// was worked on.
    pub(crate) fn sweep(
        &self,
        blob: u32,
        frames_bytes_max: u64,
        denser: &mut Denser,
        [page, buffer]: &mut [Page; 2],
    ) -> bool {
        // With a reference it stays what it is.
        if !self.share(blob) {
            return false;
        }
        let record = self.record(blob);
        let state = record.state.load(Relaxed);
        let listed = record.domain.load(Relaxed) != 0;
        let mut worked = false;
        if listed && state & DENSE == 0 && DENSER_BYTES.contains(&self.first_bytes(blob)) {
            worked = state & SEEN != 0;
            record
                .state
                .fetch_or(if worked { DENSE } else { SEEN }, Relaxed);
        }
        if worked {
            let handle = Handle(blob);
            let len = self.heap.len(handle);
            let decoded = self.heap.read(handle, |bytes| codec::decode(bytes, page));
            if decoded.is_ok()
                && let Some(bytes) = denser.encode(page, buffer, len)
            {
                if self.heap.replace(handle, bytes, frames_bytes_max) {
                    self.denser_blobs.add(1);
                    self.denser_saved_bytes.add((len - bytes.len()) as u64);
                    self.dense_gain_bytes.add(self.dense_gain(blob));
                } else {
                    // Another time.
                    record.state.fetch_and(!DENSE, Relaxed);
                }
            }
        }
        self.release(blob);
        worked
    }

    /// A reference to a blob of the domain with these bytes.
    fn find_equal(
        &self,
        domain: DomainId,
        hash: u32,
        page: &Page,
        other: &mut Page,
    ) -> Option<u32> {
        let chain = self.dedup.lock(place_bits(hash, domain));
        let found = chain.find(self, |blob| self.is_listed_as(blob, domain, hash));
        // Under the lock: the last to release a blob takes it out before it frees it.
        let blob = found.filter(|&blob| self.share(blob))?;
        drop(chain);
        let decoded = self
            .heap
            .read(Handle(blob), |bytes| codec::decode(bytes, other));
        if decoded.is_ok() && other == page {
            return Some(blob);
        }
        self.release(blob);
        None
    }

    // ---- table --------------------------------------------------------------------------------

    fn is_listed_as(&self, blob: u32, domain: DomainId, hash: u32) -> bool {
        let record = self.record(blob);
        record.hash.load(Relaxed) == hash && record.domain.load(Relaxed) == domain + 1
    }

    /// Makes a blob findable. One place for each hash of a domain, so that probing is bounded: a
    /// page that collides with one that is there is stored and not shared.
    fn list(&self, blob: u32, domain: DomainId, hash: u32) {
        let chain = self.dedup.lock(place_bits(hash, domain));
        let found = chain.find(self, |other| self.is_listed_as(other, domain, hash));
        if found.is_none() {
            self.record(blob).domain.store(domain + 1, Relaxed);
            self.dedup.add(self, chain, blob);
        }
    }

    /// The caller gave the last reference up.
    fn unlist(&self, blob: u32) {
        if self.record(blob).domain.load(Relaxed) != 0 {
            self.dedup.remove(self, blob);
            self.record(blob).domain.store(0, Relaxed);
        }
    }

    // ---- invariants ---------------------------------------------------------------------------

    /// `refs`, by blob, are all there are; the table lists live ones only, in their places.
    pub(crate) fn check(&self, refs: &std::collections::HashMap<u32, (DomainId, u32)>) {
        assert_eq!(self.heap.stats().blobs, refs.len() as u64, "blobs");
        for (&blob, &(_, refs)) in refs {
            let counted = self.record(blob).state.load(Relaxed) & REFS;
            assert_eq!(counted, refs, "references of a blob");
        }
        let payload = refs.keys().map(|&blob| self.heap.len(Handle(blob)) as u64);
        let said = self.heap.stats().payload_bytes;
        assert_eq!(payload.sum::<u64>(), said, "payload");
        let gain: u64 = refs.keys().map(|&blob| self.dense_gain(blob)).sum();
        assert_eq!(gain, self.dense_gain_bytes.get(), "gain of dense blobs");
        let mut listed = 0;
        self.dedup.check(self, |blob| {
            let (domain, _) = refs.get(&blob).expect("a listed blob has references");
            let hash = self.record(blob).hash.load(Relaxed);
            assert!(
                self.is_listed_as(blob, *domain, hash),
                "domain of a listed blob"
            );
            listed += 1;
        });
        let said = refs
            .keys()
            .filter(|&&blob| self.record(blob).domain.load(Relaxed) != 0);
        assert_eq!(listed, said.count(), "listed blobs");
    }

    /// Changes a stored byte, as a bad memory cell would.
    #[cfg(test)]
    pub(crate) fn damage(&self, content: Content, at: usize) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.heap.damage(Handle(blob), at);
        }
    }
}

impl Links for Store {
    fn hash(&self, blob: u32) -> u64 {
        let domain = self.record(blob).domain.load(Relaxed).wrapping_sub(1);
        self.place(blob, domain)
    }

    fn next(&self, blob: u32) -> u32 {
        self.record(blob).next.load(Relaxed)
    }

    fn set_next(&self, blob: u32, next: u32) {
        self.record(blob).next.store(next, Relaxed);
    }
}
