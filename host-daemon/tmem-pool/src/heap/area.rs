// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Area: the address space and the records of all spans that have one number of frames.
//!
//! The spans of an area are adjacent. So the frames that occupy memory lie close together, and so
//! do their page table entries: eight entries share a cache line of the processor, and 512 share a
//! page of the kernel's page table. Both matter for raw pages, each of which has a span of its own.

use super::HEAP;
use super::class::SLOTS_MAX;
use super::region::{FRAME_BYTES, Region, Table, Zeroed};
use crate::poison;
use crate::sync::AtomicU64;
use std::cell::Cell;
use std::io;

/// Record of a span, which is a group of 1 to 12 adjacent frames of 4 KiB. The lock of the span's
/// size class, or the lock of free spans, guards the record. A span that is in no list belongs to
/// the thread that took it out. A span with a raw page is never in a list of its class, and belongs
/// to the owner of the page's handle.
#[derive(Debug)]
pub(super) struct Span {
    /// Bitmap: bit n is 1 if slot n is used.
    pub(super) used: Cell<u32>,
    /// Previous span of the list of a class, or [`IDLE`] or [`BARE`] in a list of free spans.
    pub(super) prev: Cell<u32>,
    /// Next span of the list.
    pub(super) next: Cell<u32>,
}

/// Value of `prev` in the record of an idle span: a number that no span has.
pub(super) const IDLE: u32 = u32::MAX;
/// Value of `prev` in the record of a bare span in a list: a number that no span has.
pub(super) const BARE: u32 = u32::MAX - 1;

// The record of a span must be small, because each raw page has a span of its own.
const _: () = assert!(size_of::<Span>() == 12 && SLOTS_MAX == u32::BITS as usize);

impl Span {
    /// Returns the number of used slots.
    pub(super) fn nr_used(&self) -> u8 {
        self.used.get().count_ones() as u8
    }

    /// Takes the free slot with the lowest number, of a span with `slots` slots. A full span can be
    /// here only if a list of spans is damaged. The process then ends: there is no slot that the
    /// caller could use.
    pub(super) fn take_slot(&self, slots: u8) -> u8 {
        let used = self.used.get();
        let slot = used.trailing_ones() as u8;
        if slot >= slots {
            poison::abort_inconsistent(HEAP);
        }
        self.used.set(used | 1 << slot);
        slot
    }

    /// Makes a used slot free. Ends the process if the slot is free already, because then two
    /// threads believe that the slot is theirs.
    pub(super) fn free_slot(&self, slot: u8) {
        let used = self.used.get();
        if used >> slot & 1 == 0 {
            poison::abort_inconsistent(HEAP);
        }
        self.used.set(used & !(1 << slot));
    }

    /// Returns the numbers of the used slots.
    pub(super) fn used_slots(&self) -> impl Iterator<Item = u8> + use<> {
        let used = self.used.get();
        (0..SLOTS_MAX as u8).filter(move |slot| used >> slot & 1 != 0)
    }
}

// SAFETY: all zero is a valid span without used slots.
unsafe impl Zeroed for Span {}
// SAFETY: the cells are accessed only under the locks that guard them, or by the thread that owns the
// span. A span changes its owner through one of these locks, or with the last reference to the content
// of its raw page, which a thread drops with acquire and release order.
unsafe impl Sync for Span {}

/// All spans with one number of frames. Their numbers begin with 1, because number 0 means no span.
/// Spans of two areas may have equal numbers.
#[derive(Debug)]
pub(super) struct Area {
    /// Address space of a span in bytes, which is the memory of its frames.
    span_bytes: usize,
    /// Address space of the spans.
    data: Region,
    /// Records of the spans.
    spans: Table<Span>,
    /// One more than the largest number that a span may have.
    end: u64,
    /// Lowest number of a span of this area that was never used. It changes only under the lock of
    /// free spans.
    pub(super) fresh: AtomicU64,
}

impl Area {
    /// Reserves an area whose spans can take `bytes_max` bytes of memory.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(super) fn reserve(frames: u8, bytes_max: u64) -> io::Result<Area> {
        let span_bytes = usize::from(frames) * FRAME_BYTES;
        // Span number 0 is never used.
        let spans = (bytes_max / span_bytes as u64 + 2).min(BARE.into()) as usize;
        Ok(Area {
            span_bytes,
            data: Region::reserve(spans * span_bytes)?,
            spans: Table::reserve(spans)?,
            end: spans as u64,
            fresh: AtomicU64::new(1),
        })
    }

    /// Returns the address of byte `offset` of a span.
    pub(super) fn at(&self, span: u32, offset: usize) -> *mut u8 {
        let offset = span as usize * self.span_bytes + offset;
        self.data.at(offset).as_ptr()
    }

    /// Returns the record of a span. The caller holds the lock that guards the record, or owns the
    /// span ([`Span`]).
    pub(super) fn span(&self, span: u32) -> &Span {
        self.spans.get(span)
    }

    /// Prefetches the record of a span into the cache.
    pub(super) fn prefetch(&self, span: u32) {
        self.spans.prefetch(span);
    }

    /// Returns one more than the largest number that a span may have.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Returns whether all memory of the area is locked in RAM, so that it is never swapped.
    pub(super) fn is_locked(&self) -> bool {
        self.data.is_locked() && self.spans.is_locked()
    }

    /// Gives the frames of `nr` adjacent spans back to the system.
    ///
    /// # Safety
    /// No slot of these spans is used, and no other thread can take one during the call.
    pub(super) unsafe fn release(&self, first: u32, nr: usize) {
        let offset = first as usize * self.span_bytes;
        // SAFETY: the caller guarantees that no other code uses the frames.
        unsafe { self.data.release(offset, nr * self.span_bytes) };
    }
}
