// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compaction: moves stored bytes from sparse spans (groups of adjacent frames) to full ones. Spans
//! become empty in this way, and their memory goes back to the system. Compaction works on one span
//! at a time, under the lock of the span's class.
//!
//! Compaction never moves bytes that a thread reads or writes, because that thread has pinned their
//! place. If a thread is replacing the bytes of a handle, compaction does not move the new bytes
//! either.

use super::region::{FRAME_BYTES, Zeroed};
use super::{ClassState, Heap, PINS, Place};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// Divisor for the amount of unused memory at which compaction runs. It runs if it could free more
/// frames than the number of frames in spans with used slots, divided by this number. So at most
/// 1.6 % of these frames are left unused. The one partly used span that each class needs does not
/// count, because compaction cannot free it. In a small pool such spans are a large part of the
/// memory.
const SPARSE_DIVISOR: u64 = 64;

/// Largest number of spans of a class that one step of compaction tries in vain. A try is in vain
/// if readers keep all used slots of the span in place.
const COMPACT_TRIES: usize = 4;

impl<X: Zeroed> Heap<X> {
    /// Moves the bytes of up to about `slots` slots from sparse spans to full ones, until no class
    /// has a spare span. A class has a spare span if its used slots would fit into fewer spans than
    /// it has. Returns the number of moved slots. The number is 0 if nothing is left to move, or if
    /// readers keep the bytes in place.
    pub(crate) fn compact(&self, slots: usize) -> usize {
        let mut moved = 0;
        if !self.has_spare() {
            return moved;
        }
        for nr in 0..self.classes.len() as u8 {
            while moved < slots {
                let mut state = self.lock(nr);
                let Some(done) = self.compact_span(&mut state) else {
                    break;
                };
                moved += done;
                if done == 0 {
                    break;
                }
            }
        }
        moved
    }

    /// Returns whether compaction could free so much unused memory that it is worth its work.
    pub(crate) fn is_sparse(&self) -> bool {
        self.spare_frames() > self.busy_bytes() / FRAME_BYTES as u64 / SPARSE_DIVISOR
    }

    /// Returns whether compaction could empty at least one span.
    pub(crate) fn has_spare(&self) -> bool {
        self.spare_frames() > 0
    }

    fn spare_frames(&self) -> u64 {
        self.sums.spare_frames.load(Relaxed)
    }

    /// Updates the sum of frames that compaction could free, after a change of the slots or spans
    /// of the class `state`.
    pub(super) fn count_spare(&self, state: &mut ClassState) {
        let spare = state.spare_spans_now();
        let before = std::mem::replace(&mut state.spare_spans, spare);
        if spare != before {
            let frames = u64::from(state.class.frames);
            let sum = &self.sums.spare_frames;
            sum.fetch_add(u64::from(spare) * frames, Relaxed);
            sum.fetch_sub(u64::from(before) * frames, Relaxed);
        }
    }

    /// Returns the memory, in bytes, of the frames that compaction could free.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spare_frames() * FRAME_BYTES as u64
    }

    /// Moves the bytes of a class's sparsest span to other spans, if the class has a spare span
    /// (more spans than its used slots need). Returns the number of moved slots, or None if the
    /// class has no spare span.
    fn compact_span(&self, state: &mut ClassState) -> Option<usize> {
        if state.spare_spans == 0 {
            return None;
        }
        let mut source = *state.heads.iter().find(|&&span| span != 0)?;
        for _ in 0..COMPACT_TRIES {
            let moved = self.empty_span(state, source);
            if moved > 0 {
                return Some(moved);
            }
            source = self.span(&state.class, source).next.get();
            if source == 0 {
                break;
            }
        }
        Some(0)
    }

    fn empty_span(&self, state: &mut ClassState, source: u32) -> usize {
        let class = state.class;
        let mut moved = 0;
        for slot in self.span(&class, source).used_slots() {
            // The class has a spare span, so another span has a free slot.
            let Some(target) = self.fullest_but(state, source) else {
                break;
            };
            // A reserved slot without bytes has the header 0. Handle 0 is never used, so its word
            // does not name the slot, and the slot is skipped below.
            let handle = self.header(&class, source, slot).load(Relaxed);
            // Acquire: the thread that wrote the bytes changed the word in release order
            // afterwards. So this thread sees these bytes.
            let word = self.word(handle).load(Acquire);
            if word & PINS != 0 {
                continue;
            }
            let from = Place::of(word);
            if self.class_of(from) != class || (from.span, from.slot) != (source, slot) {
                // The word of the handle names another slot. A thread is replacing the handle's
                // bytes, so the handle has two slots for a short time. Do not move the slot that
                // the word does not name. Compare the classes, too: spans of different areas may
                // have equal numbers.
                continue;
            }
            let to = Place {
                span: target,
                slot: self.take_slot_of(state, target),
                len: from.len,
            };
            let (old, new) = (self.bytes_at(&class, from), self.bytes_at(&class, to));
            // SAFETY: the old and the new slot are different slots of one class. The old slot's
            // bytes do not change, because freeing the slot takes the class's lock, which this
            // thread holds.
            unsafe { new.copy_from_nonoverlapping(old, from.len) };
            let replaced = self
                .word(handle)
                .compare_exchange(word, to.word(), AcqRel, Relaxed)
                .is_ok();
            let gone = if replaced { from } else { to };
            if replaced {
                self.set_header(&class, to.span, to.slot, handle);
                moved += 1;
            }
            let last = replaced && self.span(&class, source).nr_used() == 1;
            // Free the slot that the handle's word does not name. No thread reads it: it is either
            // the new slot, which no other thread knows, or the old slot, which had no reader when
            // the word was changed.
            self.zero_and_free_slot(state, gone);
            if last {
                break;
            }
        }
        moved
    }

    fn fullest_but(&self, state: &ClassState, source: u32) -> Option<u32> {
        for &head in state.heads.iter().rev() {
            if head != 0 && head != source {
                return Some(head);
            }
            if head == source && self.span(&state.class, head).next.get() != 0 {
                return Some(self.span(&state.class, head).next.get());
            }
        }
        None
    }
}

impl ClassState {
    /// Returns the number of spans of this class that would be empty if all used slots were moved
    /// together.
    pub(super) fn spare_spans_now(&self) -> u32 {
        self.spans - self.used_slots.div_ceil(self.class.slots.into())
    }
}
