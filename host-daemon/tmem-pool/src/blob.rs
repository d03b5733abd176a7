// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stored page contents. A page is first stored raw, as the guest sent it, and compressed later.
//! Equal pages of a trust domain are stored once.
//!
//! A blob is the stored content of one or more equal pages. Its name is the number of its place in
//! the heap, and it lives as long as it has references. References are counted: each entry has one,
//! and so has each thread that works on the blob. The table of equal pages holds no reference and
//! only says where an equal blob may be. A thread that finds a blob through the table compares
//! every byte before it shares the blob. The store never shares a blob between two domains, nor
//! between pages whose hashes are equal but whose bytes differ.
//!
//! Locks: this file uses the locks of the table of equal pages (dedup.rs). No thread holds one of
//! them together with a lock of the heap.

use crate::codec::{self, Corrupt, DENSER_BYTES, Denser};
use crate::config::{PAGE_SIZE, Page};
use crate::cost::{GET_DENSE_NS, GET_NS, GET_SAME_NS};
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

/// Record of a blob, kept apart from its bytes. The record and the heap's word for the blob take 24
/// B together.
#[derive(Debug)]
pub(crate) struct BlobRecord {
    /// Bits of the page's hash by which the table of equal pages finds the blob.
    hash: AtomicU32,
    /// Trust domain of a listed blob plus 1. 0 means that the blob is not listed in the table of
    /// equal pages.
    domain: AtomicU32,
    /// Next blob of the chain in the table of equal pages.
    next: AtomicU32,
    /// Three bit fields. The lower 16 bits count references. The next 13 bits are the number of
    /// bytes that the page took when it was first compressed, for which the tenant is charged. The
    /// highest bits are the flags of the sweep.
    state: AtomicU32,
}

const REFS: u32 = (1 << 16) - 1;
/// Largest number of references of a blob. Further equal pages are stored in another blob. The
/// limit suffices for the pages that a few hundred VMs have in common.
const REFS_MAX: u32 = 1 << 15;
const FIRST_SHIFT: u32 = 16;
const FIRST_BYTES: u32 = (1 << 13) - 1;
const _: () = assert!(PAGE_SIZE as u32 <= FIRST_BYTES);
/// Flag: one sweep, a periodic pass over all blobs, has visited the blob.
const SEEN: u32 = 1 << 29;
/// Flag: a second sweep has visited the blob and has tried to recompress it. Later sweeps skip the
/// blob.
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
    /// Counter: cold blobs that the sweep made smaller by recompressing them.
    pub denser_blobs: Sum,
    /// Counter, bytes: sum of the bytes that the sweep saved by recompressing cold blobs.
    pub denser_saved_bytes: Sum,
    /// Gauge, bytes: difference between the first compressed size and the present size, summed over
    /// all blobs in the store.
    pub dense_gain_bytes: Sum,
}

/// Form in which a page stays stored after deduplication and compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finalized {
    /// Place of the content. If it is a blob, the caller owns one reference to it.
    pub content: Content,
    pub stored_bytes: usize,
    /// True if the store already had an equal page, whose blob the page now shares.
    pub shared: bool,
}

/// Access to the stored form of one page while the page is read ([`Store::reader`]).
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

    /// Returns whether all memory of the store is locked in RAM, so that it is never swapped.
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

    /// Stores a page uncompressed. Returns the blob, with one reference, and the check bits of its
    /// hash. Returns None if the heap would take more than `frames_bytes_max` bytes of memory.
    pub(crate) fn put_raw(&self, page: &Page, frames_bytes_max: u64) -> Option<(u32, u32)> {
        let Handle(blob) = self.heap.store(page, frames_bytes_max)?;
        // Hash the copy and not the guest's page, because the guest may change its page in the
        // meantime.
        let hash = self.heap.read(Handle(blob), |copy| {
            let copy = copy
                .try_into()
                .expect("a raw blob does not have the length of a page");
            (self.hash)(&self.hasher, copy)
        });
        let record = self.record(blob);
        record.hash.store(table_bits(hash), Relaxed);
        record.domain.store(0, Relaxed);
        // Release: a thread of the sweep that sees this reference count also sees the record's
        // other fields.
        record.state.store(1, Release);
        Some((blob, check_bits(hash)))
    }

    /// Takes another reference to a blob. Returns false if the blob has no reference, or already
    /// has the largest allowed number.
    pub(crate) fn share(&self, blob: u32) -> bool {
        let more = |state| (1..REFS_MAX).contains(&(state & REFS)).then_some(state + 1);
        let state = &self.record(blob).state;
        state.fetch_update(Acquire, Relaxed, more).is_ok()
    }

    /// Takes another reference to the contents of a page, as [`share`](Self::share) does. Contents
    /// without a blob need none.
    pub(crate) fn share_content(&self, content: Content) -> bool {
        match content {
            Content::Same(_) => true,
            Content::Raw(blob) | Content::Blob(blob) => self.share(blob),
        }
    }

    /// Releases a reference to a blob. Releasing the last one frees the blob's bytes.
    pub(crate) fn release(&self, blob: u32) {
        // Release and acquire: the thread that frees the blob does so after the reads of all
        // threads that released a reference before.
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

    /// Prefetches the bucket of the table of equal pages in which blobs equal to a raw blob are
    /// listed.
    pub(crate) fn prefetch_place(&self, raw: u32, domain: DomainId) {
        self.dedup.prefetch(self.place(raw, domain));
    }

    /// Prefetches the first blob in the raw blob's bucket of the table of equal pages, and the
    /// beginning of the raw blob's bytes.
    pub(crate) fn prefetch_raw(&self, raw: u32, domain: DomainId) {
        self.heap.prefetch_bytes(Handle(raw));
        let first = self.dedup.first(self.place(raw, domain));
        self.heap.prefetch(Handle(first));
    }

    fn place(&self, blob: u32, domain: DomainId) -> u64 {
        place_bits(self.record(blob).hash.load(Relaxed), domain)
    }

    /// Prefetches the bucket of the table of equal pages in which the content's blob is listed.
    pub(crate) fn prefetch_listed(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.dedup.prefetch(self.hash(blob));
        }
    }

    /// Releases an index entry's reference to its content.
    pub(crate) fn release_content(&self, content: Content) {
        match content {
            Content::Same(_) => {}
            Content::Raw(blob) | Content::Blob(blob) => self.release(blob),
        }
    }

    /// Begins to read a page. The caller holds a reference to the content, and keeps it for the
    /// lifetime of the reader.
    pub(crate) fn reader(&self, content: Content) -> Reader<'_> {
        match content {
            Content::Same(pattern) => Reader::Same(pattern),
            Content::Raw(blob) | Content::Blob(blob) => {
                Reader::Bytes(self.heap.reader(Handle(blob)))
            }
        }
    }

    /// Returns the largest cost of getting a page with this content, in nanoseconds. A blob that
    /// the sweep is just recompressing may cost more.
    pub(crate) fn get_ns_max(&self, content: Content) -> u64 {
        match content {
            Content::Same(_) => GET_SAME_NS,
            Content::Blob(blob) if self.record(blob).state.load(Relaxed) & DENSE != 0 => {
                GET_DENSE_NS
            }
            Content::Raw(_) | Content::Blob(_) => GET_NS,
        }
    }

    /// Restores a page into `out` and compares its hash with the check bits. After an error, the
    /// contents of `out` are unspecified.
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

    /// Finds the final form of a raw blob: a pattern, an equal blob, or a compressed blob. The
    /// caller holds a reference to the raw blob and keeps it. Returns None if there is no memory
    /// for the final form now.
    pub(crate) fn finalize(
        &self,
        raw: u32,
        domain: DomainId,
        frames_bytes_max: u64,
        buffer: &mut Page,
    ) -> Option<Finalized> {
        self.heap.read(Handle(raw), |page| {
            let page: &Page = page
                .try_into()
                .expect("a raw blob does not have the length of a page");
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
                // The page does not compress. Its raw blob becomes the final form.
                None => {
                    self.share(raw).then_some(())?;
                    // The field for the size at first compression is still 0, so that adding the
                    // size sets it.
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
    /// holds a reference to the blob, or has just released the last one.
    fn dense_gain(&self, blob: u32) -> u64 {
        // For a blob that is still raw, the size at first compression is 0.
        let first_bytes = self.first_bytes(blob);
        first_bytes.saturating_sub(self.heap.len(Handle(blob))) as u64
    }

    /// Handles one blob in a sweep. A blob is eligible if the table of equal pages lists it and its
    /// length at first compression is within [`DENSER_BYTES`]. An eligible blob that no sweep has
    /// seen is marked as seen. An eligible blob that an earlier sweep has marked is cold, and is
    /// compressed again with zstd if that makes it smaller. Returns true if the blob was compressed
    /// again, even if it did not become smaller.
    pub(crate) fn sweep(
        &self,
        blob: u32,
        frames_bytes_max: u64,
        denser: &mut Denser,
        [page, buffer]: &mut [Page; 2],
    ) -> bool {
        // The reference that is taken here keeps the blob from being freed during compression.
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
                    // There was no memory for the new form, or a thread was reading the blob. A
                    // later sweep tries again.
                    record.state.fetch_and(!DENSE, Relaxed);
                }
            }
        }
        self.release(blob);
        worked
    }

    /// Looks for a blob of the domain with the same bytes as a page. Returns the blob, with a
    /// reference for the caller.
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

    // ---- table of equal pages -----------------------------------------------------------------

    fn is_listed_as(&self, blob: u32, domain: DomainId, hash: u32) -> bool {
        let record = self.record(blob);
        record.hash.load(Relaxed) == hash && record.domain.load(Relaxed) == domain + 1
    }

    /// Lists a blob in the table of equal pages. The table lists only one blob for each hash of a
    /// domain, so that look-ups are bounded. A different page with the same hash is stored without
    /// being listed, so that no other page can share it.
    fn list(&self, blob: u32, domain: DomainId, hash: u32) {
        let chain = self.dedup.lock(place_bits(hash, domain));
        let found = chain.find(self, |other| self.is_listed_as(other, domain, hash));
        if found.is_none() {
            self.record(blob).domain.store(domain + 1, Relaxed);
            self.dedup.add(self, chain, blob);
        }
    }

    /// Removes a blob from the table of equal pages. The caller has released the last reference to
    /// the blob.
    fn unlist(&self, blob: u32) {
        if self.record(blob).domain.load(Relaxed) != 0 {
            self.dedup.remove(self, blob);
            self.record(blob).domain.store(0, Relaxed);
        }
    }

    // ---- invariants ---------------------------------------------------------------------------

    /// Asserts that the blobs have exactly the references in `refs`, and that the table lists only
    /// live blobs, each in the bucket of its hash. `refs` gives the trust domain and the number of
    /// references of each blob.
    pub(crate) fn check(&self, refs: &std::collections::HashMap<u32, (DomainId, u32)>) {
        assert_eq!(
            self.heap.stats().blobs,
            refs.len() as u64,
            "the number of blobs in the heap differs from the number of blobs that entries refer to"
        );
        for (&blob, &(_, refs)) in refs {
            let counted = self.record(blob).state.load(Relaxed) & REFS;
            assert_eq!(
                counted, refs,
                "the reference count of blob {blob} differs from the number of entries that refer to it"
            );
        }
        let payload = refs.keys().map(|&blob| self.heap.len(Handle(blob)) as u64);
        let payload_sum = self.heap.stats().payload_bytes;
        assert_eq!(
            payload.sum::<u64>(),
            payload_sum,
            "the heap's sum of stored bytes differs from the sum of all blobs' lengths"
        );
        let gain: u64 = refs.keys().map(|&blob| self.dense_gain(blob)).sum();
        assert_eq!(
            gain,
            self.dense_gain_bytes.get(),
            "the sum of bytes saved by recompression differs from the recount over all blobs"
        );
        let mut listed = 0;
        self.dedup.check(self, |blob| {
            let (domain, _) = refs
                .get(&blob)
                .expect("a blob that the table of equal pages lists has no reference");
            let hash = self.record(blob).hash.load(Relaxed);
            assert!(
                self.is_listed_as(blob, *domain, hash),
                "blob {blob} is listed under another trust domain than that of its entries"
            );
            listed += 1;
        });
        let marked_listed = refs
            .keys()
            .filter(|&&blob| self.record(blob).domain.load(Relaxed) != 0);
        assert_eq!(
            listed,
            marked_listed.count(),
            "the number of blobs in the table of equal pages differs from the number of blobs marked as listed"
        );
    }

    /// Flips a bit of a stored byte, as a faulty memory cell would.
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
