// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stored page contents: raw as they came, then compressed, one copy for equal pages of a trust
//! domain.
//!
//! A blob is named by the number of its place in the heap, and lives as long as it has references.
//! References are counted: each entry has one, and so has each thread that works on the blob. The
//! table of equal pages holds no reference and only says where an equal blob may be. A thread that
//! finds a blob through the table compares every byte before it shares the blob. The store never
//! shares a blob between two domains, nor between pages whose hashes are equal but whose bytes
//! differ.
//!
//! Locks: those of the table (dedup.rs), which no thread holds together with a lock of the heap.

use crate::codec::{self, Corrupt, DENSER_BYTES, Denser};
use crate::config::{PAGE_SIZE, Page};
use crate::dedup::{Dedup, Links};
use crate::entry::Content;
use crate::hash::{HashFn, PageHash, check_bits, place_bits, table_bits};
use crate::heap::{self, Handle, Heap, Zeroed};
use crate::sync::AtomicU32;
use crate::totals::Sum;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Number of a trust domain. Numbers are never reused.
pub(crate) type DomainId = u32;

/// Record of a blob beside its bytes. With the word that the heap keeps for the blob it takes 24 B.
#[derive(Debug)]
pub(crate) struct BlobRecord {
    /// The table's part of the hash of the page.
    hash: AtomicU32,
    /// Trust domain of a listed blob plus 1. 0: the blob is not listed in the table of equal pages.
    domain: AtomicU32,
    /// Next blob of the chain in the table of equal pages.
    next: AtomicU32,
    /// Three fields. The lower half counts references. Then follow the bytes that the page took
    /// when it was first compressed, for which the tenant is charged, and the flags of the sweep.
    state: AtomicU32,
}

const REFS: u32 = (1 << 16) - 1;
/// Most references of a blob. An equal page beyond that is stored again. The limit suffices for
/// everything that a few hundred VMs have in common.
const REFS_MAX: u32 = 1 << 15;
const FIRST_SHIFT: u32 = 16;
const FIRST_BYTES: u32 = (1 << 13) - 1;
const _: () = assert!(PAGE_SIZE as u32 <= FIRST_BYTES);
/// Flag: the sweep has passed the blob once.
const SEEN: u32 = 1 << 29;
/// Flag: the sweep has passed the blob a second time, and will not try again to compress it
/// further.
const DENSE: u32 = 1 << 30;

// SAFETY: a record consists of atomics, for which zero is a valid value.
unsafe impl Zeroed for BlobRecord {}

/// Store of all blobs, with the table that finds equal ones.
#[derive(Debug)]
pub(crate) struct Store {
    pub heap: Heap<BlobRecord>,
    hash: HashFn,
    hasher: PageHash,
    pub dedup: Dedup,
    /// Counter: cold blobs that became smaller.
    pub denser_blobs: Sum,
    /// Counter, bytes: by how much these cold blobs became smaller.
    pub denser_saved_bytes: Sum,
    /// Gauge, bytes: by how much the present blobs are smaller than when they were first
    /// compressed.
    pub dense_gain_bytes: Sum,
}

/// Final form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finalized {
    /// Where the content is. A blob comes with a reference for the caller.
    pub content: Content,
    pub stored_bytes: usize,
    /// The store already had an equal page.
    pub shared: bool,
}

/// An open read of one page; [`Store::reader`] returns it.
pub(crate) enum Reader<'a> {
    Same(u32),
    Bytes(heap::Reader<'a>),
}

impl Reader<'_> {
    /// Prefetches the beginning of the bytes into the cache.
    pub(crate) fn prefetch(&self) {
        if let Reader::Bytes(reader) = self {
            reader.prefetch();
        }
    }
}

impl Store {
    /// Creates a store for up to `bytes_max` of stored bytes.
    ///
    /// # Errors
    /// The system does not provide the address space.
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

    /// Returns whether all memory of the store is locked, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.heap.is_locked() && self.dedup.is_locked()
    }

    /// Returns the memory of the table of equal pages in bytes.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.dedup.bytes()
    }

    // ---- references ---------------------------------------------------------------------------

    fn record(&self, blob: u32) -> &BlobRecord {
        self.heap.extra(Handle(blob))
    }

    /// Stores a page as it is. Returns the blob, with one reference, and the check bits of its
    /// hash. None: storing the page would take more than `frames_bytes_max` of memory.
    pub(crate) fn put_raw(&self, page: &Page, frames_bytes_max: u64) -> Option<(u32, u32)> {
        let Handle(blob) = self.heap.store(page, frames_bytes_max)?;
        // Hash the copy: the guest may change its page in the meantime.
        let hash = self.heap.read(Handle(blob), |copy| {
            let copy = copy.try_into().expect("a raw blob is a page");
            (self.hash)(&self.hasher, copy)
        });
        let record = self.record(blob);
        record.hash.store(table_bits(hash), Relaxed);
        record.domain.store(0, Relaxed);
        // Release: from now on the sweep may take a reference of this blob and read its record.
        record.state.store(1, Release);
        Some((blob, check_bits(hash)))
    }

    /// Takes one more reference for a caller that holds one. False: the blob has as many references
    /// as it may.
    pub(crate) fn share(&self, blob: u32) -> bool {
        let more = |state| (1..REFS_MAX).contains(&(state & REFS)).then_some(state + 1);
        let state = &self.record(blob).state;
        state.fetch_update(Acquire, Relaxed, more).is_ok()
    }

    /// Gives a reference up. The last reference frees the bytes.
    pub(crate) fn release(&self, blob: u32) {
        // Release: the thread that frees the blob does so after our reads.
        let state = self.record(blob).state.fetch_sub(1, AcqRel);
        if state & REFS == 1 {
            self.unlist(blob);
            if state & DENSE != 0 {
                self.dense_gain_bytes.sub(self.dense_gain(blob));
            }
            self.heap.free(Handle(blob));
        }
    }

    /// Prefetches the heap's record of a blob into the cache.
    pub(crate) fn prefetch(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.heap.prefetch(Handle(blob));
        }
    }

    /// Prefetches the bucket in which pages equal to a raw blob are listed.
    pub(crate) fn prefetch_place(&self, raw: u32, domain: DomainId) {
        self.dedup.prefetch(self.place(raw, domain));
    }

    /// Prefetches the first blob that is listed in the bucket of a raw blob, and the beginning of
    /// the raw blob's bytes.
    pub(crate) fn prefetch_raw(&self, raw: u32, domain: DomainId) {
        self.heap.prefetch_bytes(Handle(raw));
        let first = self.dedup.first(self.place(raw, domain));
        self.heap.prefetch(Handle(first));
    }

    fn place(&self, blob: u32, domain: DomainId) -> u64 {
        place_bits(self.record(blob).hash.load(Relaxed), domain)
    }

    /// Prefetches the bucket in which the content's blob is listed.
    pub(crate) fn prefetch_listed(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.dedup.prefetch(self.hash(blob));
        }
    }

    /// Gives up the reference of an entry.
    pub(crate) fn release_content(&self, content: Content) {
        match content {
            Content::Same(_) => {}
            Content::Raw(blob) | Content::Blob(blob) => self.release(blob),
        }
    }

    /// Begins to read. The caller holds a reference and keeps it for the lifetime of the reader.
    pub(crate) fn reader(&self, content: Content) -> Reader<'_> {
        match content {
            Content::Same(pattern) => Reader::Same(pattern),
            Content::Raw(blob) | Content::Blob(blob) => {
                Reader::Bytes(self.heap.reader(Handle(blob)))
            }
        }
    }

    /// Restores a page and checks it. `out` is unspecified after an error.
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

    /// Finds the final form of a raw blob. The caller holds a reference to the blob and keeps it.
    /// None: there is no memory for the final form now.
    pub(crate) fn finalize(
        &self,
        raw: u32,
        domain: DomainId,
        frames_bytes_max: u64,
        buffer: &mut Page,
    ) -> Option<Finalized> {
        self.heap.read(Handle(raw), |page| {
            let page: &Page = page.try_into().expect("a raw blob is a page");
            if let Some(pattern) = codec::same_filled(page) {
                return Some(Finalized {
                    content: Content::Same(pattern),
                    stored_bytes: 0,
                    shared: false,
                });
            }
            let hash = self.record(raw).hash.load(Relaxed);
            if let Some(blob) = self.find_equal(domain, hash, page, buffer) {
                return Some(Finalized {
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
                // The page does not compress: the raw blob becomes the final form.
                None => {
                    self.share(raw).then_some(())?;
                    // The size at first compression was 0 so far.
                    let state = &self.record(raw).state;
                    state.fetch_or(first(PAGE_SIZE), Relaxed);
                    (raw, PAGE_SIZE)
                }
            };
            self.list(blob, domain, hash);
            Some(Finalized {
                content: Content::Blob(blob),
                stored_bytes,
                shared: false,
            })
        })
    }

    fn first_bytes(&self, blob: u32) -> usize {
        (self.record(blob).state.load(Relaxed) >> FIRST_SHIFT & FIRST_BYTES) as usize
    }

    /// Returns by how many bytes a blob is smaller than when it was first compressed. The caller
    /// holds a reference, or has just given up the last one.
    fn dense_gain(&self, blob: u32) -> u64 {
        // The first size of a raw blob is 0.
        let first_bytes = self.first_bytes(blob);
        first_bytes.saturating_sub(self.heap.len(Handle(blob))) as u64
    }

    /// Marks a blob as seen by the sweep. A blob that the previous sweep had already marked is
    /// compressed further, if that makes it smaller. Returns true if the blob was due for
    /// compression.
    pub(crate) fn sweep(
        &self,
        blob: u32,
        frames_bytes_max: u64,
        denser: &mut Denser,
        [page, buffer]: &mut [Page; 2],
    ) -> bool {
        // The reference keeps the blob from being freed.
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
                    // There was no memory now: a later sweep tries again.
                    record.state.fetch_and(!DENSE, Relaxed);
                }
            }
        }
        self.release(blob);
        worked
    }

    /// Returns a blob of the domain with these bytes, and takes a reference of it.
    fn find_equal(
        &self,
        domain: DomainId,
        hash: u32,
        page: &Page,
        other: &mut Page,
    ) -> Option<u32> {
        let chain = self.dedup.lock(place_bits(hash, domain));
        let found = chain.find(self, |blob| self.is_listed_as(blob, domain, hash));
        // Take the reference under the lock: the thread that gives up the last reference takes the
        // blob out of the table before it frees it.
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

    /// Lists a blob in the table of equal pages. The table has one place for each hash of a domain,
    /// so that probing is bounded: a page whose hash is already listed is stored and not shared.
    fn list(&self, blob: u32, domain: DomainId, hash: u32) {
        let chain = self.dedup.lock(place_bits(hash, domain));
        let found = chain.find(self, |other| self.is_listed_as(other, domain, hash));
        if found.is_none() {
            self.record(blob).domain.store(domain + 1, Relaxed);
            self.dedup.add(self, chain, blob);
        }
    }

    /// Takes a blob out of the table. The caller gave up the last reference.
    fn unlist(&self, blob: u32) {
        if self.record(blob).domain.load(Relaxed) != 0 {
            self.dedup.remove(self, blob);
            self.record(blob).domain.store(0, Relaxed);
        }
    }

    // ---- invariants ---------------------------------------------------------------------------

    /// Asserts that `refs`, by blob, are all references, and that the table lists live blobs only,
    /// in their buckets.
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
