// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Index entry of one page, 28 bytes long. It has the page's cookie, the place of its contents,
//! check bits of their hash, the stored size, and the links of an eviction queue.

use super::arena::Id;
use crate::config::{PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE};
use crate::heap::Zeroed;

/// Place of a page's contents. A blob is named by its number in the store (blob.rs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The page repeats these four bytes, so no bytes are stored in the heap.
    Same(u32),
    /// The page is stored uncompressed in this blob and waits to be finalized (deduplicated and
    /// compressed).
    Raw(u32),
    /// The page is stored in its final form in this blob, which other entries of the trust domain
    /// may share.
    Blob(u32),
}

/// Index entry of a page. The fields `prev` and `next` are links of the eviction policy's queues
/// or, for a retained page, of the queue of retained pages.
#[derive(Clone, Debug, Default)]
#[repr(C, packed(4))]
pub(crate) struct Entry {
    pub cookie: u64,
    pub prev: Id,
    pub next: Id,
    /// Check bits: a part of the hash of the page. A get compares them with the hash of the page
    /// that it has restored.
    pub check: u32,
    content: u32,
    bits: u32,
}

// Entries take most of the metadata's memory. Without `packed`, an entry would take 32 B, because
// its size would be a multiple of the alignment of the cookie.
const _: () = assert!(size_of::<Entry>() == 28);

// Bit fields of `Entry::bits`: stored bytes, kind of content, the flags for a retained page and for a
// raw page that is being finalized, and the eviction policy's bits. The kind KIND_SHARED means that the blob was already stored for another
// page.
const STORED_BITS: u32 = 13;
const STORED: u32 = (1 << STORED_BITS) - 1;
const _: () = assert!(PAGE_SIZE as u32 <= STORED);
const KIND_SHIFT: u32 = STORED_BITS;
const KIND: u32 = 3 << KIND_SHIFT;
const KIND_SAME: u32 = 0;
const KIND_RAW: u32 = 1 << KIND_SHIFT;
const KIND_BLOB: u32 = 2 << KIND_SHIFT;
const KIND_SHARED: u32 = 3 << KIND_SHIFT;
const RETAINED: u32 = 1 << 15;
const CLAIMED: u32 = 1 << 16;
const POLICY_SHIFT: u32 = 17;
const POLICY: u32 = 0x7fff << POLICY_SHIFT;

impl Entry {
    /// Creates an entry. The tenant is charged `stored_bytes` for the page in addition to its
    /// metadata. `shared` is true if the store already had an equal page.
    pub(crate) fn new(
        cookie: u64,
        check: u32,
        content: Content,
        stored_bytes: usize,
        shared: bool,
    ) -> Entry {
        let mut entry = Entry {
            cookie,
            check,
            ..Entry::default()
        };
        entry.set_content(content, stored_bytes, shared);
        entry
    }

    pub(crate) fn content(&self) -> Content {
        match self.bits & KIND {
            KIND_SAME => Content::Same(self.content),
            KIND_RAW => Content::Raw(self.content),
            _ => Content::Blob(self.content),
        }
    }

    /// Replaces the place and the stored size of the page's contents, for example when the page is
    /// finalized.
    pub(crate) fn set_content(&mut self, content: Content, stored_bytes: usize, shared: bool) {
        debug_assert!(stored_bytes <= PAGE_SIZE);
        debug_assert!(!shared || matches!(content, Content::Blob(_)));
        let (kind, value) = match content {
            Content::Same(pattern) => (KIND_SAME, pattern),
            Content::Raw(slot) => (KIND_RAW, slot),
            Content::Blob(blob) if shared => (KIND_SHARED, blob),
            Content::Blob(blob) => (KIND_BLOB, blob),
        };
        self.content = value;
        self.bits = self.bits & (POLICY | RETAINED) | kind | stored_bytes as u32;
    }

    /// Returns whether the page is retained: a get returned it and left it in the pool, and the
    /// guest has not sent a reference (REF) to it since.
    pub(crate) fn is_retained(&self) -> bool {
        self.bits & RETAINED != 0
    }

    /// Returns whether a background worker is finalizing this raw page.
    pub(crate) fn is_claimed(&self) -> bool {
        self.bits & CLAIMED != 0
    }

    pub(crate) fn set_claimed(&mut self, claimed: bool) {
        self.bits = self.bits & !CLAIMED | if claimed { CLAIMED } else { 0 };
    }

    pub(crate) fn set_retained(&mut self, retained: bool) {
        self.bits = self.bits & !RETAINED | if retained { RETAINED } else { 0 };
    }

    /// Returns the 15 bits in which the eviction policy keeps its data about the page.
    pub(crate) fn policy_bits(&self) -> u16 {
        (self.bits >> POLICY_SHIFT) as u16
    }

    pub(crate) fn set_policy_bits(&mut self, bits: u16) {
        self.bits = self.bits & !POLICY | u32::from(bits) << POLICY_SHIFT;
    }

    /// Returns the amounts by which this entry increases its tenant's gauges.
    pub(crate) fn gauges(&self) -> Gauges {
        let kind = |wanted| u32::from(self.bits & KIND == wanted);
        Gauges {
            pages: 1,
            same_filled_pages: kind(KIND_SAME),
            nursery_pages: kind(KIND_RAW),
            shared_pages: kind(KIND_SHARED),
            retained_pages: self.is_retained().into(),
            stored_bytes: (self.bits & STORED).into(),
        }
    }
}

// SAFETY: all fields of an entry are integers, for which all bits zero is a valid value.
unsafe impl Zeroed for Entry {}

/// Gauges: sums over the index entries of an object, a pool or a tenant.
/// Packed, because each object has gauges, and their size would otherwise be a multiple of 8 B.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, packed(4))]
pub(crate) struct Gauges {
    pub pages: u32,
    pub same_filled_pages: u32,
    /// Pages that are stored uncompressed and wait to be finalized (pages in the nursery).
    pub nursery_pages: u32,
    pub shared_pages: u32,
    pub retained_pages: u32,
    pub stored_bytes: u64,
}

impl Gauges {
    pub(crate) fn add(&mut self, other: Gauges) {
        self.pages += other.pages;
        self.same_filled_pages += other.same_filled_pages;
        self.nursery_pages += other.nursery_pages;
        self.shared_pages += other.shared_pages;
        self.retained_pages += other.retained_pages;
        self.stored_bytes += other.stored_bytes;
    }

    pub(crate) fn sub(&mut self, other: Gauges) {
        self.pages -= other.pages;
        self.same_filled_pages -= other.same_filled_pages;
        self.nursery_pages -= other.nursery_pages;
        self.shared_pages -= other.shared_pages;
        self.retained_pages -= other.retained_pages;
        self.stored_bytes -= other.stored_bytes;
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.stored_bytes + u64::from(self.pages) * PAGE_METADATA_CHARGE_BYTES
    }
}
