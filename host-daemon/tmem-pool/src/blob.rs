// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Store of page contents. A page is first stored raw, as the guest sent it, and compressed later.
//! Equal pages of a trust domain are stored once.
//!
//! A blob is the stored content of one or more equal pages. The number of a blob is the number of
//! its handle in the heap. A blob lives as long as it has references, which are counted. Each index
//! entry holds a reference to its blob, and so does each thread that works on a blob. The table of
//! equal pages holds no reference. It only says where a blob with equal bytes may be. A thread that
//! finds a blob through the table compares every byte before it shares the blob. The store never
//! shares a blob between two domains, nor between pages whose hashes are equal but whose bytes
//! differ.
//!
//! The table finds a blob by its tag: 48 bits of the page's hash, mixed with the trust domain. The
//! blob's record has 32 bits of the tag, which are called the place. The slot of the table has the
//! other 16 bits.
//!
//! Locks: this file uses the locks of the table of equal pages (dedup.rs). No thread holds one of
//! them together with a lock of the heap.

use crate::codec::{self, Corrupt, DENSER_BYTES, Denser};
use crate::config::{DomainId, PAGE_SIZE, Page};
use crate::cost::{GET_DENSE_NS, GET_NS, GET_SAME_NS};
use crate::dedup::{Dedup, Records};
use crate::hash::{HashFn, PageHash, check_bits, place_bits, slot_tag};
use crate::heap::{self, Handle, Heap, Zeroed};
use crate::index::entry::Content;
use crate::request::PageSource;
use crate::stats::PoolCounters;
use crate::sync::AtomicU32;
use crate::totals::Sum;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Prefetch distance in a list of blobs to free: while a thread frees one blob, the processor loads
/// the memory of the blob that is this many places further in the list.
const FREE_AHEAD: usize = 3;

/// Largest number of raw pages that `release_all` frees under one acquisition of the heap's lock.
const FREE_TOGETHER: usize = 16;

/// Record of a blob, kept apart from the blob's bytes. The record takes 8 B. The atomic word in
/// which the heap stores the place of the blob's bytes takes another 8 B.
#[derive(Debug)]
pub(crate) struct BlobRecord {
    /// The part of the blob's tag that selects its two buckets in the table of equal pages
    /// ([`place_bits`]).
    place: AtomicU32,
    /// Bit fields. The lower 16 bits count the references to the blob. The next 13 bits are the
    /// number of bytes that the page took when it was first compressed, which is what the tenant is
    /// charged. Bits 29 and 30 are the flags SEEN and DENSE of the sweep, which recompresses cold
    /// blobs. Bit 31 is the flag LISTED.
    state: AtomicU32,
}

const REFS: u32 = (1 << 16) - 1;
/// Largest number of references to a blob. Further equal pages are stored in another blob. The
/// limit suffices for the pages that a few hundred VMs have in common.
const REFS_MAX: u32 = 1 << 15;
const FIRST_SHIFT: u32 = 16;
const FIRST_BYTES: u32 = (1 << 13) - 1;
const _: () = assert!(PAGE_SIZE as u32 <= FIRST_BYTES);
/// Flag in the state of a blob: one sweep (a periodic pass that recompresses cold blobs) has
/// visited the blob. The next sweep recompresses it.
const SEEN: u32 = 1 << 29;
/// Flag in the state of a blob: a second sweep has visited the blob and has tried to recompress it
/// with zstd. Later sweeps skip the blob.
const DENSE: u32 = 1 << 30;
/// Flag in the state of a blob: the table of equal pages lists the blob. It changes only under the
/// lock of the blob's buckets.
const LISTED: u32 = 1 << 31;

// SAFETY: a record consists of atomics, for which zero is a valid value.
unsafe impl Zeroed for BlobRecord {}

/// Store of the contents of all tenants' pages, and the table that finds equal pages.
#[derive(Debug)]
pub(crate) struct Store {
    pub heap: Heap<BlobRecord>,
    hash: HashFn,
    hasher: PageHash,
    pub dedup: Dedup,
    /// Counters of the whole pool. The sweep, a periodic pass over all blobs, recompresses blobs.
    pub counters: PoolCounters,
    /// Gauge, bytes: difference between a blob's size at its first compression and its present
    /// size, summed over all blobs in the store.
    pub zstd_saved_bytes: Sum,
}

/// Copy of a page, which is stored raw (uncompressed).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawCopy {
    pub blob: u32,
    /// Check bits of the page's hash.
    pub check: u32,
}

/// Access to contents that a get needs while it holds the tenant's lock.
pub(crate) trait Contents {
    /// Prefetches the record of a content.
    fn prefetch(&self, content: Content);

    /// Returns the largest cost of getting a page with this content, in nanoseconds.
    fn get_ns_max(&self, content: Content) -> u64;

    /// Takes another reference to a content. Returns false if that is impossible.
    fn share(&self, content: Content) -> bool;
}

impl Contents for Store {
    fn prefetch(&self, content: Content) {
        self.prefetch_content(content);
    }

    /// Returns the largest cost of getting a page with this content, in nanoseconds. The cost may
    /// be higher if the sweep recompresses the content with zstd in the meantime.
    fn get_ns_max(&self, content: Content) -> u64 {
        match content {
            Content::Same(_) => GET_SAME_NS,
            Content::Blob(blob) if self.record(blob).state.load(Relaxed) & DENSE != 0 => {
                GET_DENSE_NS
            }
            Content::Raw(_) | Content::Blob(_) => GET_NS,
        }
    }

    /// Takes another reference to the content of a page, and returns false if that is impossible
    /// ([`Store::share_blob`]). A pattern has no blob, so it needs no reference.
    fn share(&self, content: Content) -> bool {
        match content {
            Content::Same(_) => true,
            Content::Raw(blob) | Content::Blob(blob) => self.share_blob(blob),
        }
    }
}

/// Result of finalizing a page (deduplication and compression): the form in which the page stays
/// stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finalized {
    /// The page's content: a repeated pattern or a blob. If it is a blob, the caller owns one
    /// reference to the blob.
    pub content: Content,
    pub stored_bytes: usize,
    /// True if the store already had an equal page, whose blob the finalized page now shares.
    pub shared: bool,
}

/// Result of [`Store::prepare`], the first step of finalizing a page (deduplication and
/// compression).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prepared {
    /// The page has its final form, and nothing is left to do.
    Finalized(Finalized),
    /// The page is compressed and memory is reserved for it. [`Store::complete`] copies it there.
    Encoded(Encoded),
}

/// Compressed page that is still in the caller's buffer. [`Store::complete`] copies it to the
/// memory that is reserved for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded {
    blob: Handle,
    /// Length of the compressed page in bytes.
    len: usize,
    tag: Tag,
}

/// Tag of a blob: 48 bits by which the table of equal pages finds it. The part `place` also depends
/// on the trust domain, so the tag of a page never finds an equal blob of another domain.
#[derive(Clone, Copy, Debug)]
struct Tag {
    place: u32,
    slot: u16,
}

/// Access to the stored form of one page while the page is read ([`Store::reader`]).
pub(crate) enum Reader<'a> {
    Same(u32),
    Bytes(heap::Reader<'a>),
}

impl Reader<'_> {
    /// Prefetches the beginning of the page's stored bytes into the cache.
    pub(crate) fn prefetch(&self) {
        if let Reader::Bytes(reader) = self {
            reader.prefetch();
        }
    }
}

impl Store {
    /// Creates a store for up to `bytes_max` bytes of page contents.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(crate) fn new(bytes_max: u64, hash: HashFn, seed: u64) -> io::Result<Store> {
        let heap = Heap::new(bytes_max)?;
        Ok(Store {
            hash,
            hasher: PageHash::new(seed),
            dedup: Dedup::new(heap.handles_max())?,
            counters: PoolCounters::default(),
            zstd_saved_bytes: Sum::default(),
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

    /// Reserves blobs for uncompressed pages, one for each element of `blobs`. Returns the number
    /// of reserved blobs, which is smaller if the heap has no free handle, or would take more than
    /// `frames_bytes_max` bytes of memory. The caller stores a page in each reserved blob, or frees
    /// the blob.
    pub(crate) fn reserve_raw(&self, blobs: &mut [Handle], frames_bytes_max: u64) -> usize {
        self.heap.reserve_pages(blobs, frames_bytes_max)
    }

    /// Stores a page of the domain uncompressed in a reserved blob, to which the caller then owns one
    /// reference. Returns None if the source cannot copy the page. The blob then is still reserved.
    pub(crate) fn put_raw(
        &self,
        reserved: Handle,
        domain: DomainId,
        page: &dyn PageSource,
    ) -> Option<RawCopy> {
        let Handle(blob) = reserved;
        // Hash the copy and not the guest's page, because the guest may change its page in the
        // meantime.
        let copy = |frame: &mut Page| page.copy_to(frame);
        let hash = |copy: &Page| (self.hash)(&self.hasher, copy);
        let hash = self.heap.fill(reserved, copy, hash)?;
        let record = self.record(blob);
        record.place.store(place_bits(hash, domain), Relaxed);
        // Release: a thread of the sweep that reads this state, and so sees the reference, also
        // sees the other fields of the record.
        record.state.store(1, Release);
        let check = check_bits(hash);
        Some(RawCopy { blob, check })
    }

    /// Returns the number of pages that share a content. Each thread that reads the content at this
    /// moment counts as another page. A page that is raw or same-filled counts as the only one.
    pub(crate) fn references(&self, content: Content) -> u32 {
        match content {
            Content::Blob(blob) => self.record(blob).state.load(Relaxed) & REFS,
            Content::Raw(_) | Content::Same(_) => 1,
        }
    }

    /// Takes another reference to a blob. Returns false if the blob has no reference, or already
    /// has the largest allowed number.
    pub(crate) fn share_blob(&self, blob: u32) -> bool {
        let more = |state| (1..REFS_MAX).contains(&(state & REFS)).then_some(state + 1);
        let state = &self.record(blob).state;
        state.fetch_update(Acquire, Relaxed, more).is_ok()
    }

    /// Releases a reference to a blob. The release of the last reference frees the blob's bytes.
    pub(crate) fn release(&self, blob: u32) {
        if self.release_ref(blob) {
            self.heap.free(Handle(blob));
        }
    }

    /// Releases a reference to a blob. Returns true if it was the last reference. The table of
    /// equal pages then no longer lists the blob, and the caller has to free the blob's bytes.
    fn release_ref(&self, blob: u32) -> bool {
        // Release and acquire order: the thread that releases the last reference frees the blob.
        // All other threads have finished reading the blob before that.
        let state = self.record(blob).state.fetch_sub(1, AcqRel);
        if state & REFS != 1 {
            return false;
        }
        self.unlist(blob);
        if state & DENSE != 0 {
            self.zstd_saved_bytes.sub(self.zstd_saved(blob));
        }
        true
    }

    /// Prefetches the heap's record of a content's blob into the cache.
    pub(crate) fn prefetch_content(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            self.heap.prefetch(Handle(blob));
        }
    }

    /// Prefetches the buckets of the table of equal pages in which a blob equal to the uncompressed
    /// blob `raw` would be listed. Also prefetches the beginning of the bytes of `raw`.
    pub(crate) fn prefetch_raw(&self, raw: u32) {
        self.heap.prefetch_bytes(Handle(raw));
        self.dedup.prefetch(self.place(raw));
    }

    /// Releases an index entry's reference to its content.
    pub(crate) fn release_content(&self, content: Content) {
        match content {
            Content::Same(_) => {}
            Content::Raw(blob) | Content::Blob(blob) => self.release(blob),
        }
    }

    /// Releases the caller's reference to each of these contents. While it frees one blob, it
    /// prefetches the memory that freeing the next blobs changes. It frees uncompressed blobs in
    /// groups.
    pub(crate) fn release_all(&self, contents: &[Content]) {
        contents
            .iter()
            .for_each(|&content| self.prefetch_content(content));
        for &content in contents.iter().take(FREE_AHEAD) {
            self.prefetch_freed(content);
        }
        let mut pages = [Handle(0); FREE_TOGETHER];
        let mut nr = 0;
        for (nth, &content) in contents.iter().enumerate() {
            if let Some(&ahead) = contents.get(nth + FREE_AHEAD) {
                self.prefetch_freed(ahead);
            }
            let (Content::Raw(blob) | Content::Blob(blob)) = content else {
                continue;
            };
            if !self.release_ref(blob) {
                continue;
            }
            if !self.heap.is_page(Handle(blob)) {
                self.heap.free(Handle(blob));
                continue;
            }
            pages[nr] = Handle(blob);
            nr += 1;
            if nr == FREE_TOGETHER {
                self.heap.free_pages(&pages);
                nr = 0;
            }
        }
        if nr > 0 {
            self.heap.free_pages(&pages[..nr]);
        }
    }

    /// Prefetches what freeing a content changes: the blob's buckets in the table of equal pages and
    /// the blob's bytes. Also prefetches the record of the span (group of heap frames) that
    /// contains the bytes.
    fn prefetch_freed(&self, content: Content) {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            if self.is_listed(blob) {
                self.dedup.prefetch(self.place(blob));
            }
            self.heap.prefetch_bytes(Handle(blob));
        }
    }

    /// Returns a reader of a page's content. The caller holds a reference to the content until the
    /// reader is dropped.
    pub(crate) fn reader(&self, content: Content) -> Reader<'_> {
        match content {
            Content::Same(pattern) => Reader::Same(pattern),
            Content::Raw(blob) | Content::Blob(blob) => {
                Reader::Bytes(self.heap.reader(Handle(blob)))
            }
        }
    }

    /// Restores a page into `out`. Returns an error if the stored bytes do not decode, or if the
    /// hash of the page does not match the check bits. The contents of `out` are then unspecified.
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

    /// Finds the final form of a raw page, which is still stored as the guest sent it. The form is
    /// a pattern, an equal blob, a compressed blob, or the raw blob itself. `check` are the check
    /// bits of the page's hash. The caller holds a reference to the raw blob and keeps it. Returns
    /// None if there is no memory for the final form now.
    ///
    /// If the result is `Prepared::Encoded`, the compressed page is in `buffer` and is not stored
    /// yet. The caller then passes the buffer to [`complete`](Self::complete). Until that call, no
    /// other thread finds the page in the table of equal pages. Between the two calls, the
    /// processor loads the memory that was reserved for the compressed page.
    pub(crate) fn prepare(
        &self,
        raw: u32,
        check: u32,
        frames_bytes_max: u64,
        buffer: &mut Page,
    ) -> Option<Prepared> {
        self.heap.read(Handle(raw), |page| {
            let page: &Page = page
                .try_into()
                .expect("a raw blob is not as long as a page");
            if let Some(pattern) = codec::same_filled(page) {
                return Some(Prepared::Finalized(Finalized {
                    content: Content::Same(pattern),
                    stored_bytes: 0,
                    shared: false,
                }));
            }
            let tag = Tag {
                place: self.place(raw),
                slot: slot_tag(check),
            };
            if let Some(blob) = self.find_equal(tag, page, buffer) {
                return Some(Prepared::Finalized(self.shared(blob)));
            }
            if let Some(len) = codec::encode(page, buffer).map(<[u8]>::len) {
                let blob = self.heap.reserve(len, frames_bytes_max)?;
                return Some(Prepared::Encoded(Encoded { blob, len, tag }));
            }
            // The page does not compress, so its raw blob becomes the final form. Take a reference
            // for that.
            self.share_blob(raw).then_some(())?;
            // In the state of a raw blob, the field for the size at the first compression is 0. An
            // OR with the size, shifted to that field, therefore sets the field.
            let state = &self.record(raw).state;
            state.fetch_or((PAGE_SIZE as u32) << FIRST_SHIFT, Relaxed);
            if let Some(other) = self.list(raw, tag)
                && let Some(blob) = self.keep_if_equal(other, page, buffer)
            {
                self.release(raw);
                return Some(Prepared::Finalized(self.shared(blob)));
            }
            Some(Prepared::Finalized(Finalized {
                content: Content::Blob(raw),
                stored_bytes: PAGE_SIZE,
                shared: false,
            }))
        })
    }

    /// Returns the final form of a page that is equal to a stored blob. The caller owns a reference
    /// to the blob.
    fn shared(&self, blob: u32) -> Finalized {
        Finalized {
            content: Content::Blob(blob),
            stored_bytes: self.first_bytes(blob),
            shared: true,
        }
    }

    /// Copies a compressed page from `buffer` to the memory that was reserved for it, and lists the
    /// page in the table of equal pages. If another thread has stored and listed an equal page
    /// since [`prepare`](Self::prepare), the page shares that blob, and its own memory is freed.
    pub(crate) fn complete(&self, encoded: Encoded, buffer: &Page) -> Finalized {
        let Encoded { blob, len, tag } = encoded;
        self.heap.write(blob, &buffer[..len]);
        let Handle(blob) = blob;
        let record = self.record(blob);
        record.place.store(tag.place, Relaxed);
        record.state.store(1 | (len as u32) << FIRST_SHIFT, Release);
        if let Some(other) = self.list(blob, tag) {
            // Equal compressed bytes decode to equal pages, so no page has to be decompressed. The
            // other blob still has its first form: it was stored a moment ago, and the sweep
            // recompresses a blob only at its second visit.
            let equal = |bytes: &[u8]| *bytes == buffer[..len];
            if self.heap.read(Handle(other), equal) {
                self.release(blob);
                return self.shared(other);
            }
            self.release(other);
        }
        Finalized {
            content: Content::Blob(blob),
            stored_bytes: len,
            shared: false,
        }
    }

    /// Returns whether a raw page may be equal to a compressed page that is not listed in the table
    /// of equal pages yet.
    pub(crate) fn may_equal(&self, raw: u32, encoded: &Encoded) -> bool {
        self.place(raw) == encoded.tag.place
    }

    fn first_bytes(&self, blob: u32) -> usize {
        (self.record(blob).state.load(Relaxed) >> FIRST_SHIFT & FIRST_BYTES) as usize
    }

    /// Returns by how many bytes a blob is smaller than when it was first compressed. The caller
    /// holds a reference to the blob, or has just released the last one.
    fn zstd_saved(&self, blob: u32) -> u64 {
        // A raw blob that is not finalized yet has 0 as the size at the first compression. The
        // result is 0, because the subtraction saturates.
        let first_bytes = self.first_bytes(blob);
        first_bytes.saturating_sub(self.heap.len(Handle(blob))) as u64
    }

    /// Handles one blob in a sweep, a periodic pass over all blobs. A blob is eligible for
    /// recompression if its length at the first compression is within [`DENSER_BYTES`]. Raw pages
    /// that are not finalized yet have no such length. The first sweep that visits an eligible blob
    /// marks it with the flag SEEN. The next sweep compresses the blob with zstd, and stores the
    /// result if it is not longer than before. Returns true if the blob was compressed, whether the
    /// result was stored or not. If two threads visit a blob at the same time, at most one of them
    /// compresses it.
    pub(crate) fn recompress_if_cold(
        &self,
        blob: u32,
        frames_bytes_max: u64,
        denser: &mut Denser,
        [page, buffer]: &mut [Page; 2],
    ) -> bool {
        // Take a reference, so that no other thread frees the blob while this thread compresses it.
        if !self.share_blob(blob) {
            return false;
        }
        let record = self.record(blob);
        let state = record.state.load(Relaxed);
        let mut worked = false;
        if state & DENSE == 0 && DENSER_BYTES.contains(&self.first_bytes(blob)) {
            let flag = if state & SEEN != 0 { DENSE } else { SEEN };
            // Another thread may have set the flag since. If it is DENSE, that thread compresses
            // the blob.
            worked = record.state.fetch_or(flag, Relaxed) & flag == 0 && flag == DENSE;
        }
        if worked {
            let handle = Handle(blob);
            let len = self.heap.len(handle);
            let decoded = self.heap.read(handle, |bytes| codec::decode(bytes, page));
            if decoded.is_ok()
                && let Some(bytes) = denser.encode(page, buffer, len)
            {
                if self.heap.replace(handle, bytes, frames_bytes_max) {
                    self.counters.recompressed_blobs.add(1);
                    self.counters
                        .recompressed_saved_bytes
                        .add((len - bytes.len()) as u64);
                    self.zstd_saved_bytes.add(self.zstd_saved(blob));
                } else {
                    // The zstd form was not stored, because there was no memory for it or another
                    // thread was reading the blob. Remove the flag DENSE, so that a later sweep
                    // tries again.
                    record.state.fetch_and(!DENSE, Relaxed);
                }
            }
        }
        self.release(blob);
        worked
    }

    /// Looks in the table of equal pages for a blob that has this tag and the same bytes as `page`.
    /// Returns the blob, to which the caller then owns a reference. `other` is scratch memory.
    fn find_equal(&self, tag: Tag, page: &Page, other: &mut Page) -> Option<u32> {
        let pair = self.dedup.lock(tag.place);
        let found = pair.find(tag.slot, |blob| self.place(blob) == tag.place);
        // Take the reference under the lock of the buckets. A thread that releases a blob's last
        // reference takes the blob out of the table before it frees the blob, so the blob found
        // here is not freed.
        let blob = found.filter(|&blob| self.share_blob(blob))?;
        drop(pair);
        self.keep_if_equal(blob, page, other)
    }

    /// Compares the decompressed bytes of a blob with `page`. Returns the blob if they are equal.
    /// Otherwise releases the caller's reference to the blob. `other` is scratch memory.
    fn keep_if_equal(&self, blob: u32, page: &Page, other: &mut Page) -> Option<u32> {
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

    /// Returns whether the table of equal pages lists a blob. Without the lock of the blob's buckets,
    /// the value true is only a hint: another blob may take the blob's slot.
    fn is_listed(&self, blob: u32) -> bool {
        self.record(blob).state.load(Relaxed) & LISTED != 0
    }

    /// Lists a blob in the table of equal pages, where other pages can find and share it. The table
    /// lists only one blob for each tag. If it already lists another blob with the tag, `blob` stays
    /// unlisted, so that no other page can share it. The call then returns the other blob, to which
    /// the caller then owns a reference, unless the other blob has its largest number of
    /// references.
    fn list(&self, blob: u32, tag: Tag) -> Option<u32> {
        let pair = self.dedup.lock(tag.place);
        let found = pair.find(tag.slot, |other| self.place(other) == tag.place);
        if found.is_none() {
            self.record(blob).state.fetch_or(LISTED, Relaxed);
            self.dedup.add(self, pair, blob, tag.slot);
            return None;
        }
        // Take the reference under the lock of the buckets. Otherwise another thread could
        // release the last reference to the blob and free it.
        found.filter(|&other| self.share_blob(other))
    }

    /// Removes a blob from the table of equal pages, if the table lists it. The caller has released
    /// the last reference to the blob.
    fn unlist(&self, blob: u32) {
        if !self.is_listed(blob) {
            return;
        }
        let pair = self.dedup.lock(self.place(blob));
        // Look again under the lock: another thread may have joined two buckets of the table, and
        // the joined bucket may have had no free slot for this blob. Then the blob is no longer
        // listed.
        if self.is_listed(blob) {
            self.set_unlisted(blob);
            self.dedup.remove(self, pair, blob);
        }
    }

    // ---- invariants ---------------------------------------------------------------------------

    /// Asserts that `refs` has all blobs with their correct numbers of references. Also asserts
    /// that the table of equal pages lists only these blobs, each in a bucket of its place. `refs`
    /// has, for each blob, its domain and the number of entries that refer to the blob.
    pub(crate) fn check(&self, refs: &std::collections::HashMap<u32, (Option<DomainId>, u32)>) {
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
        let saved_bytes: u64 = refs.keys().map(|&blob| self.zstd_saved(blob)).sum();
        assert_eq!(
            saved_bytes,
            self.zstd_saved_bytes.get(),
            "the sum of bytes saved by recompression differs from the recount over all blobs"
        );
        let mut listed = 0;
        self.dedup.check(self, |blob| {
            assert!(
                refs.contains_key(&blob),
                "blob {blob} is in the table of equal pages and has no reference"
            );
            assert!(
                self.is_listed(blob),
                "blob {blob} is in the table of equal pages and is not marked as listed"
            );
            listed += 1;
        });
        let marked_listed = refs.keys().filter(|&&blob| self.is_listed(blob));
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

impl Records for Store {
    fn place(&self, blob: u32) -> u32 {
        self.record(blob).place.load(Relaxed)
    }

    fn prefetch(&self, blob: u32) {
        self.heap.prefetch(Handle(blob));
    }

    fn set_unlisted(&self, blob: u32) {
        self.record(blob).state.fetch_and(!LISTED, Relaxed);
    }
}
