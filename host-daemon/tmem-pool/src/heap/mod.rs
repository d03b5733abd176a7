// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Heap for the stored bytes of all tenants. Its memory can be returned to the system.
//!
//! Bytes lie in slots of size classes (class.rs). Slots lie in spans, which are groups of 1 to 12
//! adjacent frames of 4 KiB. Spans with the same number of frames lie in one area of reserved
//! address space (area.rs). Storing bytes returns a handle instead of an address, because
//! compaction moves bytes from sparse spans to full ones. A freed slot is zeroed before it can be
//! used again. A span without used slots is all zero, and the frames of all but a few such spans go
//! back to the system.
//!
//! Readers and compaction share only one 64-bit atomic word for each handle. The word contains the
//! place of the bytes, their length and the number of readers. A reader increments the number of
//! readers and learns the place in the same atomic step. Compaction copies the bytes, which never
//! change, at any time. It then replaces the word only if the word is unchanged and has no readers.
//! So a reader keeps the bytes in place without blocking another thread, and later readers find the
//! new place.
//!
//! No thread holds the locks of two classes. No thread copies bytes into or out of a slot while it
//! holds a lock, except in compaction.
//!
//! Locks: the lock of a class guards its lists, and all data of its spans and slots except the
//! stored bytes and the headers of slots. A header is atomic: the thread that has reserved the slot
//! writes it without the lock. The same applies to the record of a span that is in no list, such as
//! that of a raw page. A thread that holds the lock of a class may take the lock of free spans or the
//! lock of spare handles, but never both.

mod area;
mod class;
mod compact;
mod handles;
mod region;
mod spans;

use self::area::{Area, Span};
use self::class::{Class, Classes, SLOTS_MAX, SPAN_FRAMES_MAX};
use self::handles::{FreeHandles, HANDLES_STEP, SpareHandles};
use self::region::LINE_BYTES;
pub(crate) use self::region::{FRAME_BYTES, Region, Table, Zeroed, prefetch, prefetch_lines};
pub(crate) use self::spans::idle_frames;
use self::spans::{FreeSpans, RELEASE_FRAMES_MAX};
use crate::config::{PAGE_SIZE, Page};
use crate::poison;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crossbeam_utils::CachePadded;
use std::io;
use std::slice;
use std::sync::atomic::AtomicU32 as AtomicHeader;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use zeroize::optimization_barrier;

/// Smallest number of handles of a heap, so that there are some for each size class.
const HANDLES_MIN: u64 = HANDLES_STEP as u64 * 256;

/// Number of groups into which a class sorts its partly used spans, by how full they are. New bytes
/// go to the fullest spans, and compaction empties the emptiest ones.
const GROUPS: usize = 8;

/// Largest number of whole pages that a thread reserves or frees under one acquisition of the
/// heap's locks.
const PAGES_TOGETHER: usize = 64;

/// Name of the data that the heap's locks guard, for log messages.
const HEAP: &str = "the heap";

// ---- words of handles -------------------------------------------------------------------------

const PINS_BITS: u32 = 15;
const LEN_BITS: u32 = 12;
const SLOT_BITS: u32 = 5;
/// Number of bits of a span's number in the word of a handle. They suffice for raw pages of almost
/// 16 TiB, each of which has a span of its own.
const SPAN_BITS: u32 = 32;
const _: () = assert!(PINS_BITS + LEN_BITS + SLOT_BITS + SPAN_BITS == u64::BITS);
const _: () = assert!(1 << SLOT_BITS >= SLOTS_MAX && 1 << LEN_BITS >= PAGE_SIZE);
const PINS: u64 = (1 << PINS_BITS) - 1;

/// Largest number of readers of one blob. A thread has up to 64 readers of one blob, because all
/// pages of a get may be equal. The daemon has at most 64 workers, so there are at most 4,096
/// readers. The bit field of the word has room for 1,024 more than this maximum. A thread
/// increments the number before it sees that there are too many readers, and the number must not
/// overflow into the length.
const PINS_MAX: u64 = PINS - 1024;
const _: () = assert!(PINS_MAX > 64 * 64);

/// Place and length of a handle's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    span: u32,
    slot: u8,
    len: usize,
}

impl Place {
    fn of(word: u64) -> Place {
        let word = word >> PINS_BITS;
        Place {
            len: (word & ((1 << LEN_BITS) - 1)) as usize + 1,
            slot: (word >> LEN_BITS & ((1 << SLOT_BITS) - 1)) as u8,
            span: (word >> (LEN_BITS + SLOT_BITS)) as u32,
        }
    }

    /// Returns the word of a handle whose bytes are at this place and have no readers.
    fn word(self) -> u64 {
        let len = self.len as u64 - 1;
        let at = u64::from(self.span) << SLOT_BITS | u64::from(self.slot);
        (at << LEN_BITS | len) << PINS_BITS
    }
}

/// Handle of stored bytes: a number that stays the same when compaction moves the bytes. A caller
/// that frees a handle makes sure that no other thread uses the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(pub u32);

#[derive(Debug)]
struct ClassState {
    class: Class,
    /// First span of each group, where spans are grouped by how full they are. Full spans are in no
    /// group.
    heads: [u32; GROUPS],
    spans: u32,
    used_slots: u32,
    payload_bytes: u64,
    /// Number of spans of this class that `Sums::spare_frames` includes, because compaction could
    /// empty them.
    spare_spans: u32,
    free_handles: FreeHandles,
}

// ---- heap -------------------------------------------------------------------------------------

/// Record of a handle: the atomic word with the place of its bytes, and the data that the user of
/// the heap keeps with the handle.
#[derive(Debug)]
struct HandleRecord<X> {
    word: AtomicU64,
    extra: X,
}

// SAFETY: all zero is a valid value for both fields, the word and the data of the heap's user.
unsafe impl<X: Zeroed> Zeroed for HandleRecord<X> {}

/// Heap of stored bytes, each under a handle. With each handle the heap stores a value of type `X`
/// for the user of the heap, and never reads this value. An `X` is all zero at first. When a handle
/// is used again, its `X` is as the handle's last user left it.
#[derive(Debug)]
pub(crate) struct Heap<X> {
    /// Address space and records of the spans. The spans in the area at index n have n + 1 frames.
    areas: Box<[Area]>,
    handles: Table<HandleRecord<X>>,
    classes: Classes,
    states: Box<[CachePadded<Mutex<ClassState>>]>,
    free_spans: CachePadded<Mutex<FreeSpans>>,
    spare_handles: SpareHandles,
    sums: CachePadded<Sums>,
}

/// Sums over the whole heap, which threads can read without holding its locks.
#[derive(Debug, Default)]
struct Sums {
    frames: AtomicU64,
    /// The part of `frames` that belongs to spans without used slots. It changes under the lock of
    /// free spans.
    idle_frames: AtomicU64,
    /// The part of `frames` that compaction could free by moving the used slots of each class
    /// together.
    spare_frames: AtomicU64,
}

/// Statistics of a heap. Other threads may change the heap while the statistics are read, so the
/// figures may be of different instants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeapStats {
    /// Sum of the lengths of all stored blobs, in bytes.
    pub payload_bytes: u64,
    /// Number of stored blobs, which is the number of handles in use.
    pub blobs: u64,
    /// Memory in bytes of the frames for slots, used and free.
    pub frames_bytes: u64,
    /// Memory in bytes of the records of handles and spans, and of the numbers of spare handles. It
    /// never shrinks.
    pub table_bytes: u64,
}

impl<X: Zeroed> Heap<X> {
    /// Creates an empty heap for up to `bytes_max` bytes of frames.
    ///
    /// # Errors
    /// The system does not provide the address space.
    /// [`ADDRESS_SPACE_TIMES`](crate::ADDRESS_SPACE_TIMES) gives its size as a multiple of the
    /// pool's size.
    pub(crate) fn new(bytes_max: u64) -> io::Result<Heap<X>> {
        // Each area has address space for the whole heap, because all spans may have the same
        // number of frames.
        let area = |frames| Area::reserve(frames, bytes_max);
        let areas: io::Result<Box<[Area]>> = (1..=SPAN_FRAMES_MAX as u8).map(area).collect();
        // The number of handles limits the number of blobs. It is chosen for blobs of 256 B,
        // because few pages compress to less.
        let handles = (bytes_max / 256 + HANDLES_MIN).min(u32::MAX.into());
        let classes = Classes::new();
        let states = (0..classes.len()).map(|nr| {
            CachePadded::new(Mutex::new(ClassState {
                class: classes.get(nr as u8),
                heads: [0; GROUPS],
                spans: 0,
                used_slots: 0,
                payload_bytes: 0,
                spare_spans: 0,
                free_handles: FreeHandles::new(),
            }))
        });
        Ok(Heap {
            areas: areas?,
            handles: Table::reserve(handles as usize)?,
            states: states.collect(),
            classes,
            free_spans: CachePadded::default(),
            spare_handles: SpareHandles::new(handles as u32)?,
            sums: CachePadded::default(),
        })
    }

    /// Stores 1 to 4,096 bytes and returns their handle. Returns None if there is no free handle,
    /// or if the heap's memory would exceed `frames_bytes_max` bytes.
    #[cfg(test)]
    pub(crate) fn store(&self, bytes: &[u8], frames_bytes_max: u64) -> Option<Handle> {
        let handle = self.reserve(bytes.len(), frames_bytes_max)?;
        self.write(handle, bytes);
        Some(handle)
    }

    /// Reserves a slot for `len` bytes (1 to 4,096), prefetches the slot into the cache, and
    /// returns its handle. The caller writes the bytes later ([`write`](Self::write)). Returns None
    /// if there is no free handle, or if the heap's memory would exceed `frames_bytes_max` bytes.
    pub(crate) fn reserve(&self, len: usize, frames_bytes_max: u64) -> Option<Handle> {
        assert!((1..=PAGE_SIZE).contains(&len));
        let mut state = self.lock(self.classes.for_len(len));
        let mut release_max = RELEASE_FRAMES_MAX;
        let place = self.reserve_in(&mut state, len, frames_bytes_max, &mut release_max)?;
        let at = self.bytes_at(&state.class, place.1);
        drop(state);
        (0..len)
            .step_by(LINE_BYTES)
            .for_each(|line| prefetch(at.wrapping_add(line)));
        Some(place.0)
    }

    /// Reserves a slot of the class `state` for `len` bytes. Returns None if there is no free
    /// handle, or if the heap's memory would exceed `frames_bytes_max` bytes. `release_max` is the
    /// number of idle frames that the call may return to the system
    /// ([`take_spans`](Self::take_spans)).
    fn reserve_in(
        &self,
        state: &mut ClassState,
        len: usize,
        frames_bytes_max: u64,
        release_max: &mut i64,
    ) -> Option<(Handle, Place)> {
        let handle = self.take_handle(state)?;
        let Some((span, slot)) = self.take_slot(state, frames_bytes_max, release_max) else {
            self.free_handle(state, handle);
            return None;
        };
        let place = Place { span, slot, len };
        // The word counts this thread as a reader, so that compaction does not move the slot before
        // this thread has written its bytes.
        self.word(handle).store(place.word() + 1, Relaxed);
        state.payload_bytes += len as u64;
        Some((Handle(handle), place))
    }

    /// Writes bytes to a slot that this thread has reserved for exactly that many bytes. After the
    /// call, the thread may pass the handle to other threads.
    pub(crate) fn write(&self, handle: Handle, bytes: &[u8]) {
        self.write_with(handle, bytes.len(), |slot| slot.copy_from_slice(bytes));
    }

    /// Calls `write` with the `len` bytes of a slot that this thread has reserved for exactly that
    /// many bytes, and returns the result. After the call, the thread may pass the handle to other
    /// threads.
    fn write_with<R>(&self, handle: Handle, len: usize, write: impl FnOnce(&mut [u8]) -> R) -> R {
        let word = self.word(handle.0);
        let place = Place::of(word.load(Relaxed));
        assert_eq!(
            place.len, len,
            "the number of bytes written to a slot differs from the number reserved"
        );
        let class = self.class_of(place);
        let at = self.bytes_at(&class, place);
        // SAFETY: the slot belongs to this thread, which alone knows the handle. The slot has at
        // least this many bytes, all of which are initialized: the memory of a new slot is zero.
        // The slice is not used after the bytes are published.
        let result = write(unsafe { slice::from_raw_parts_mut(at, len) });
        // Write the header only now and not in `reserve_in`, which holds the class's lock. The
        // first write to a slot whose address is in no TLB stops the processor for some 200 ns.
        self.set_header(&class, place.span, place.slot, handle.0);
        // Release: a thread that reads this word also sees the written bytes. A plain store
        // suffices, because no other thread knows the handle. An atomic read-modify-write would
        // wait until the written bytes have left the store buffer.
        word.store(place.word(), Release);
        result
    }

    /// Reserves frames for whole pages, one for each element of `handles`. Takes each lock once for
    /// PAGES_TOGETHER pages, and holds only one lock at a time. Returns the number of elements that
    /// were set. It is smaller if there is no free handle, or if the heap's memory would exceed
    /// `frames_bytes_max` bytes. The caller then fills each reserved frame ([`fill`](Self::fill)) or
    /// frees its handle.
    pub(crate) fn reserve_pages(&self, handles: &mut [Handle], frames_bytes_max: u64) -> usize {
        let nr = self.classes.for_len(PAGE_SIZE);
        let class = self.classes.get(nr);
        // The limit of frames to return to the system applies to all pages together.
        let mut release_max = RELEASE_FRAMES_MAX;
        let mut reserved = 0;
        for handles in handles.chunks_mut(PAGES_TOGETHER) {
            let mut spans = [0; PAGES_TOGETHER];
            let spans = &mut spans[..handles.len()];
            let taken = self.take_spans(class.frames, spans, frames_bytes_max, &mut release_max);
            let mut state = self.lock(nr);
            let mut pages = 0;
            while pages < taken
                && let Some(handle) = self.take_handle(&mut state)
            {
                handles[pages] = Handle(handle);
                pages += 1;
            }
            state.add_pages(pages);
            drop(state);
            for (&Handle(handle), &span) in handles.iter().zip(&spans[..pages]) {
                let slot = self.span(&class, span).take_slot(class.slots);
                let place = Place {
                    span,
                    slot,
                    len: PAGE_SIZE,
                };
                self.word(handle).store(place.word() + 1, Relaxed);
            }
            self.list_idle(&class, &spans[pages..taken]);
            reserved += pages;
            if pages < handles.len() {
                break;
            }
        }
        reserved
    }

    /// Calls `copy` to copy a page to a frame that this thread has reserved. If `copy` returns
    /// true, returns the result of `read` for the copy, and the thread may pass the handle to other
    /// threads. Otherwise returns None. The frame then has unspecified bytes, and the caller frees
    /// the handle.
    pub(crate) fn fill<R>(
        &self,
        handle: Handle,
        copy: impl FnOnce(&mut Page) -> bool,
        read: impl FnOnce(&Page) -> R,
    ) -> Option<R> {
        self.write_with(handle, PAGE_SIZE, |slot| {
            let frame: &mut Page = slot
                .try_into()
                .expect("the slot of a copied page is not as long as a page");
            copy(frame).then(|| read(frame))
        })
    }

    /// Calls `read` with the bytes of a handle, and returns the result.
    pub(crate) fn read<R>(&self, handle: Handle, read: impl FnOnce(&[u8]) -> R) -> R {
        read(self.reader(handle).bytes())
    }

    /// Returns a reader of a handle's bytes. Compaction does not move the bytes until the reader is
    /// dropped.
    pub(crate) fn reader(&self, Handle(handle): Handle) -> Reader<'_> {
        let place = self.pin(handle);
        Reader {
            word: self.word(handle),
            at: self.bytes_at(&self.class_of(place), place),
            len: place.len,
        }
    }

    /// Returns the number of bytes stored under the handle.
    pub(crate) fn len(&self, handle: Handle) -> usize {
        Place::of(self.word(handle.0).load(Relaxed)).len
    }

    /// Zeroes the bytes of a handle, and frees the slot and the handle. The slot may be reserved
    /// and not written. The caller makes sure that no other thread uses the handle.
    pub(crate) fn free(&self, handle: Handle) {
        let Handle(handle) = handle;
        // Pin the place, so that compaction does not move the bytes.
        let place = self.pin(handle);
        self.free_handle(&mut self.free_place(place), handle);
    }

    /// Zeroes and frees the frames of whole pages, and frees their handles. Takes each lock once for
    /// PAGES_TOGETHER pages, and holds only one lock at a time. The caller makes sure that no other
    /// thread uses the handles.
    pub(crate) fn free_pages(&self, handles: &[Handle]) {
        let nr = self.classes.for_len(PAGE_SIZE);
        let class = self.classes.get(nr);
        for handles in handles.chunks(PAGES_TOGETHER) {
            let mut spans = [0; PAGES_TOGETHER];
            let spans = &mut spans[..handles.len()];
            for (&Handle(handle), span) in handles.iter().zip(&mut *spans) {
                let place = Place::of(self.word(handle).load(Relaxed));
                assert_eq!(
                    place.len, PAGE_SIZE,
                    "free_pages() got the handle of a blob that is not a page"
                );
                // SAFETY: no thread reads the frame, because the handle is freed. Compaction never
                // copies a slot that is the only one of its span.
                unsafe { zero(self.bytes_at(&class, place), place.len) };
                self.span(&class, place.span).free_slot(place.slot);
                *span = place.span;
            }
            let mut state = self.lock(nr);
            state.remove_pages(handles.len());
            for &Handle(handle) in handles {
                self.free_handle(&mut state, handle);
            }
            drop(state);
            self.list_idle(&class, spans);
        }
    }

    /// Returns whether the bytes of a handle are a whole page, which has a frame of its own.
    pub(crate) fn is_page(&self, handle: Handle) -> bool {
        self.len(handle) == PAGE_SIZE
    }

    /// Replaces the bytes of a handle by other bytes that decode to the same page. The caller makes
    /// sure that no thread frees the handle in the meantime. Returns false, and keeps the old
    /// bytes, if a thread is reading them or if the heap's memory would exceed `frames_bytes_max`
    /// bytes.
    pub(crate) fn replace(&self, handle: Handle, bytes: &[u8], frames_bytes_max: u64) -> bool {
        assert!((1..=PAGE_SIZE).contains(&bytes.len()));
        let Handle(handle) = handle;
        let nr = self.classes.for_len(bytes.len());
        let mut state = self.lock(nr);
        let mut release_max = RELEASE_FRAMES_MAX;
        let Some((span, slot)) = self.take_slot(&mut state, frames_bytes_max, &mut release_max)
        else {
            return false;
        };
        // For a short time two slots name the handle in their headers, and the handle's word still
        // names the old slot. Compaction does not move the new slot, because the word does not name
        // it.
        self.set_header(&state.class, span, slot, handle);
        let new = Place {
            span,
            slot,
            len: bytes.len(),
        };
        let at = self.bytes_at(&state.class, new);
        state.payload_bytes += bytes.len() as u64;
        drop(state);
        // SAFETY: the slot belongs to this thread and has room for the bytes. Other threads find a
        // slot only through the atomic word of its handle, in which `fetch_update` stores the new
        // place after this copy.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let unread = |word| (word & PINS == 0).then(|| new.word());
        let replaced = self.word(handle).fetch_update(AcqRel, Acquire, unread);
        let gone = replaced.map_or(new, Place::of);
        drop(self.free_place(gone));
        replaced.is_ok()
    }

    /// Returns whether all memory of the heap is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.areas.iter().all(Area::is_locked)
            && self.handles.is_locked()
            && self.spare_handles.is_locked()
    }

    /// Returns the lowest handle that was never given to a size class. All handles in use are
    /// smaller.
    pub(crate) fn places(&self) -> u32 {
        self.spare_handles.fresh()
    }

    /// Returns an upper bound of the number of handles that were ever in use at one time. The heap
    /// creates handles in steps of HANDLES_STEP, and this number never falls.
    fn handles_used(&self) -> u64 {
        self.spare_handles.fresh().into()
    }

    /// Returns the memory for slots in bytes, used and free.
    pub(crate) fn frames_bytes(&self) -> u64 {
        self.sums.frames.load(Relaxed) * FRAME_BYTES as u64
    }

    /// Returns the memory in bytes of the spans that have used slots.
    pub(crate) fn busy_bytes(&self) -> u64 {
        let frames = self.sums.frames.load(Relaxed);
        frames.saturating_sub(self.idle_frames()) * FRAME_BYTES as u64
    }

    /// Returns the number of frames that occupy memory and belong to spans without used slots.
    pub(crate) fn idle_frames(&self) -> u64 {
        self.sums.idle_frames.load(Relaxed)
    }

    /// Returns the memory in bytes of the records of handles and spans, and of the numbers of spare
    /// handles. It never shrinks.
    pub(crate) fn table_bytes(&self) -> u64 {
        let fresh = self.areas.iter().map(|area| area.fresh.load(Relaxed));
        fresh.sum::<u64>() * size_of::<Span>() as u64
            + self.handles_used() * size_of::<HandleRecord<X>>() as u64
            + self.spare_handles.bytes()
    }

    #[cfg(test)]
    pub(crate) fn damage(&self, Handle(handle): Handle, at: usize) {
        let place = self.pin(handle);
        let bytes = self.bytes_at(&self.class_of(place), place);
        // SAFETY: the address is a byte of the slot, and the test has no reader of it.
        unsafe { *bytes.add(at % place.len) ^= 0x10 };
        unpin(self.word(handle));
    }

    /// Returns statistics of the heap. The call takes the lock of one class after the other, so the
    /// sums may not be of one instant.
    pub(crate) fn stats(&self) -> HeapStats {
        let mut stats = HeapStats {
            frames_bytes: self.frames_bytes(),
            table_bytes: self.table_bytes(),
            ..HeapStats::default()
        };
        for nr in 0..self.classes.len() as u8 {
            let state = self.lock(nr);
            stats.payload_bytes += state.payload_bytes;
            stats.blobs += u64::from(state.used_slots);
        }
        stats
    }

    // ---- handles ------------------------------------------------------------------------------

    fn word(&self, handle: u32) -> &AtomicU64 {
        &self.handles.get(handle).word
    }

    /// Returns the data that the user of the heap keeps with a handle.
    pub(crate) fn extra(&self, Handle(handle): Handle) -> &X {
        &self.handles.get(handle).extra
    }

    /// Prefetches the record of a handle into the cache.
    pub(crate) fn prefetch(&self, Handle(handle): Handle) {
        self.handles.prefetch(handle);
    }

    /// Prefetches the beginning of a handle's bytes into the cache. Also prefetches the record of
    /// the span that contains the bytes, which freeing them changes.
    pub(crate) fn prefetch_bytes(&self, Handle(handle): Handle) {
        let place = Place::of(self.word(handle).load(Relaxed));
        let class = self.class_of(place);
        prefetch_lines(self.bytes_at(&class, place));
        self.area(class.frames).prefetch(place.span);
    }

    /// Returns the largest number of handles that the heap can have.
    pub(crate) fn handles_max(&self) -> usize {
        self.handles.capacity()
    }

    fn take_handle(&self, state: &mut ClassState) -> Option<u32> {
        let free = &mut state.free_handles;
        if free.all().is_empty() {
            if !free.refill(&self.spare_handles) {
                return None;
            }
            for &handle in free.all().iter().rev() {
                self.handles.prefetch(handle);
            }
        }
        free.take()
    }

    fn free_handle(&self, state: &mut ClassState, handle: u32) {
        state.free_handles.release(handle, &self.spare_handles);
    }

    fn pin(&self, handle: u32) -> Place {
        // Acquire: if compaction has moved the bytes, this thread sees the bytes at their new
        // place.
        let before = self.word(handle).fetch_add(1, Acquire);
        if before & PINS >= PINS_MAX {
            poison::abort_inconsistent(HEAP);
        }
        Place::of(before)
    }

    // ---- slots --------------------------------------------------------------------------------

    fn lock(&self, nr: u8) -> MutexGuard<'_, ClassState> {
        poison::guard_or_abort(self.states[usize::from(nr)].lock(), HEAP)
    }

    /// Returns the size class of the slot at a place. The length of the slot's bytes determines the
    /// class.
    fn class_of(&self, place: Place) -> Class {
        self.classes.get(self.classes.for_len(place.len))
    }

    /// Returns the area of the spans with this number of frames.
    fn area(&self, frames: u8) -> &Area {
        &self.areas[usize::from(frames) - 1]
    }

    /// Returns the record of a span of a class. The caller holds the lock that guards the record, or
    /// owns the span ([`Span`]).
    fn span(&self, class: &Class, span: u32) -> &Span {
        self.area(class.frames).span(span)
    }

    fn slot_at(&self, class: &Class, span: u32, slot: u8) -> *mut u8 {
        let offset = usize::from(slot) * usize::from(class.slot_bytes);
        self.area(class.frames).at(span, offset)
    }

    fn bytes_at(&self, class: &Class, place: Place) -> *mut u8 {
        let at = self.slot_at(class, place.span, place.slot);
        // SAFETY: a slot is longer than its header, so the address after the header is inside the
        // slot.
        unsafe { at.add(class.header_bytes.into()) }
    }

    /// Returns the header of a slot: the handle of the slot's bytes. It is 0 if the slot is free, or
    /// if a thread has reserved the slot and has not written its bytes yet. Handle 0 is never used.
    /// The class is not that of raw pages, whose slots have no header.
    fn header(&self, class: &Class, span: u32, slot: u8) -> &AtomicHeader {
        let at = self.slot_at(class, span, slot);
        // SAFETY: the address is in the region, which lives as long as self, and is aligned as
        // slots are. All threads access the header as an atomic, except for `Region::release`, which
        // is called for spans that no thread uses.
        unsafe { AtomicHeader::from_ptr(at.cast()) }
    }

    /// Writes the header of a slot, if the slots of the class have headers. The thread that has
    /// reserved the slot may do this without the class's lock. Compaction, which reads the header
    /// under that lock, then finds 0 or the handle. The handle's word tells whether the bytes may be
    /// moved.
    fn set_header(&self, class: &Class, span: u32, slot: u8, header: u32) {
        if class.header_bytes != 0 {
            self.header(class, span, slot).store(header, Relaxed);
        }
    }

    fn take_slot(
        &self,
        state: &mut ClassState,
        bytes_max: u64,
        release_max: &mut i64,
    ) -> Option<(u32, u8)> {
        let partly = state.heads.iter().rev().find(|&&span| span != 0).copied();
        let (span, slot) = match partly {
            Some(span) => (span, self.take_slot_of(state, span)),
            None => {
                let span = self.take_span(state.class.frames, bytes_max, release_max)?;
                state.spans += 1;
                (span, self.take_unlisted(state, span))
            }
        };
        self.count_spare(state);
        Some((span, slot))
    }

    /// Takes a free slot of a span that is in no list.
    fn take_unlisted(&self, state: &mut ClassState, span: u32) -> u8 {
        let slots = state.class.slots;
        let slot = self.span(&state.class, span).take_slot(slots);
        state.used_slots += 1;
        self.list(state, span);
        slot
    }

    /// Takes a free slot of a span that is not full, and returns the number of the slot.
    fn take_slot_of(&self, state: &mut ClassState, span: u32) -> u8 {
        self.unlist(state, span);
        self.take_unlisted(state, span)
    }

    /// Zeroes and frees a slot that no thread reads any more. Returns the guard of the lock of the
    /// slot's class.
    fn free_place(&self, place: Place) -> MutexGuard<'_, ClassState> {
        let nr = self.classes.for_len(place.len);
        let class = self.classes.get(nr);
        if class.slots > 1 {
            let mut state = self.lock(nr);
            state.payload_bytes -= place.len as u64;
            self.zero_and_free_slot(&mut state, place);
            return state;
        }
        // The slot is the only one of its span, as for raw pages. Compaction never copies such
        // slots, so this thread can zero the slot without the lock. SAFETY: the caller guarantees
        // that no thread reads the place.
        unsafe { zero(self.bytes_at(&class, place), place.len) };
        let mut state = self.lock(nr);
        state.payload_bytes -= place.len as u64;
        self.free_slot(&mut state, place.span, place.slot);
        state
    }

    /// Zeroes and frees a slot that no thread reads any more. The caller holds the lock of the
    /// class, so that compaction does not copy the slot at the same time.
    fn zero_and_free_slot(&self, state: &mut ClassState, place: Place) {
        // SAFETY: the caller guarantees that no thread reads the place.
        unsafe { zero(self.bytes_at(&state.class, place), place.len) };
        self.free_slot(state, place.span, place.slot);
    }

    fn free_slot(&self, state: &mut ClassState, span: u32, slot: u8) {
        let class = state.class;
        self.unlist(state, span);
        self.set_header(&class, span, slot, 0);
        let s = self.span(&class, span);
        s.free_slot(slot);
        state.used_slots -= 1;
        if s.used.get() == 0 {
            state.spans -= 1;
            self.list_idle(&class, &[span]);
        } else {
            self.list(state, span);
        }
        self.count_spare(state);
    }

    // ---- lists of spans -----------------------------------------------------------------------

    /// Adds a span to the list of its group (spans are grouped by how full they are). Does nothing
    /// for a full span, which is in no list.
    fn list(&self, state: &mut ClassState, span: u32) {
        let area = self.area(state.class.frames);
        let s = area.span(span);
        let Some(group) = state.group(s.nr_used()) else {
            return;
        };
        let next = std::mem::replace(&mut state.heads[group], span);
        s.prev.set(0);
        s.next.set(next);
        if next != 0 {
            area.span(next).prev.set(span);
        }
    }

    fn unlist(&self, state: &mut ClassState, span: u32) {
        let area = self.area(state.class.frames);
        let s = area.span(span);
        let Some(group) = state.group(s.nr_used()) else {
            return;
        };
        let (prev, next) = (s.prev.get(), s.next.get());
        let before = match prev {
            0 => state.heads[group],
            _ => area.span(prev).next.get(),
        };
        if before != span || (next != 0 && area.span(next).prev.get() != span) {
            poison::abort_inconsistent(HEAP);
        }
        if prev == 0 {
            state.heads[group] = next;
        } else {
            area.span(prev).next.set(next);
        }
        if next != 0 {
            area.span(next).prev.set(prev);
        }
    }
}

impl ClassState {
    /// Counts whole pages, each in a span of its own. Such spans are full, so they are in no list.
    fn add_pages(&mut self, pages: usize) {
        self.spans += pages as u32;
        self.used_slots += pages as u32;
        self.payload_bytes += (pages * PAGE_SIZE) as u64;
    }

    /// Stops counting whole pages, each in a span of its own.
    fn remove_pages(&mut self, pages: usize) {
        self.spans -= pages as u32;
        self.used_slots -= pages as u32;
        self.payload_bytes -= (pages * PAGE_SIZE) as u64;
    }

    fn group(&self, used: u8) -> Option<usize> {
        (used < self.class.slots)
            .then(|| usize::from(used) * GROUPS / usize::from(self.class.slots))
    }
}

/// Reader of stored bytes ([`Heap::reader`]): while it exists, compaction does not move the bytes.
/// No thread may free the handle before the reader is dropped.
pub(crate) struct Reader<'a> {
    word: &'a AtomicU64,
    at: *const u8,
    len: usize,
}

impl Reader<'_> {
    /// Returns the stored bytes, which the reader keeps in place.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes were written before other threads got the handle. Compaction does not
        // move them, because the reader pins them. No thread frees them, because the owner of the
        // reader keeps the handle.
        unsafe { slice::from_raw_parts(self.at, self.len) }
    }

    /// Prefetches the beginning of the stored bytes into the cache.
    pub(crate) fn prefetch(&self) {
        prefetch_lines(self.at);
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        unpin(self.word);
    }
}

fn unpin(word: &AtomicU64) {
    // Release: this thread's reads come before another thread frees the place, and this thread's
    // writes come before compaction copies the bytes.
    word.fetch_sub(1, Release);
}

/// Overwrites bytes with zeroes in a way that the compiler does not remove.
///
/// # Safety
/// The bytes are valid for writes, and no other code accesses them.
unsafe fn zero(at: *mut u8, len: usize) {
    // SAFETY: the caller guarantees that no other code accesses the bytes.
    unsafe {
        at.write_bytes(0, len);
        optimization_barrier(slice::from_raw_parts(at, len));
    }
}

#[cfg(test)]
mod tests;
