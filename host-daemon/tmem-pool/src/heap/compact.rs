// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compaction: moves bytes of sparse spans to full ones, so that spans become empty and go back to
//! the system. It works on one span at a time, under the lock of the span's class.
//!
//! Compaction never moves bytes that a thread reads or writes, because the thread has pinned their
//! place. It does not move bytes that another thread is replacing either.

use super::region::{FRAME_BYTES, Zeroed};
use super::{ClassState, Heap, PINS, Place, USED};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// Compaction runs if it could free more than one in this many of the frames of spans with used
/// slots. So the frames that compaction could still free afterwards are at most 1.6 % of these.
/// The partly used span that remains in each class does not count, because compaction cannot free
/// it. In a small pool such spans are a large part of the memory.
const SPARSE_PART: u64 = 64;

/// Largest number of spans that one step of compaction tries in vain, because readers pin slots in
/// them.
const COMPACT_TRIES: usize = 4;

impl<X: Zeroed> Heap<X> {
    /// Moves the bytes of up to about `slots` slots from sparse spans to full ones, until no class
    /// has a spare span. A class has a spare span if its used slots would fit into fewer spans than
    /// it has. Returns the number of moved slots. 0 means that nothing is left to do, or that
    /// readers pin the bytes that are to be moved.
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

    /// Returns whether there is enough unused memory between the bytes to make compaction worth its
    /// work.
    pub(crate) fn is_sparse(&self) -> bool {
        self.spare_frames() > self.busy_bytes() / FRAME_BYTES as u64 / SPARSE_PART
    }

    /// Returns whether compaction could empty at least one span.
    pub(crate) fn has_spare(&self) -> bool {
        self.spare_frames() > 0
    }

    fn spare_frames(&self) -> u64 {
        self.sums.spare_frames.load(Relaxed)
    }

    /// Updates the sum of spare frames after a change of a class's slots or spans.
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

    /// Returns the bytes of the frames that compaction could free.
    #[cfg(test)]
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spare_frames() * FRAME_BYTES as u64
    }

    /// Empties the sparsest span of a class that has a spare span. Returns the number of moved
    /// slots, or None if the class has no spare span.
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
            source = self.span(source).next.get();
            if source == 0 {
                break;
            }
        }
        Some(0)
    }

    fn empty_span(&self, state: &mut ClassState, source: u32) -> usize {
        let class = state.class;
        let mut moved = 0;
        for slot in 0..self.span(source).fresh.get() {
            let header = self.header(&class, source, slot);
            if header & USED == 0 {
                continue;
            }
            // Because the class has a spare span, another span has a free slot.
            let Some(target) = self.fullest_but(state, source) else {
                break;
            };
            let handle = header & !USED;
            // Acquire: pairs with the release order in which the thread that wrote the bytes
            // changed the word afterwards.
            let word = self.word(handle).load(Acquire);
            if word & PINS != 0 {
                continue;
            }
            let from = Place::of(word);
            if (from.span, from.slot) != (source, slot) {
                // The word names another slot: a thread is replacing the handle's bytes, so the
                // handle has two slots, of which this is one.
                continue;
            }
            let to = Place {
                span: target,
                slot: self.take_slot_of(state, target),
                len: from.len,
            };
            let (old, new) = (self.bytes_at(&class, from), self.bytes_at(&class, to));
            // SAFETY: these are two slots of one class. The old slot's bytes do not change, because
            // freeing the slot takes the class's lock, which this thread holds.
            unsafe { new.copy_from_nonoverlapping(old, from.len) };
            let replaced = self
                .word(handle)
                .compare_exchange(word, to.word(), AcqRel, Relaxed)
                .is_ok();
            let gone = if replaced { from } else { to };
            if replaced {
                self.set_header(&class, to.span, to.slot, USED | handle);
                moved += 1;
            }
            let last = replaced && self.span(source).used.get() == 1;
            // No thread reads the slot `gone`. It is either the new slot, which no other thread
            // knows, or the old slot, which had no reader when the handle's word was changed.
            self.give_bytes(state, gone);
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
            if head == source && self.span(head).next.get() != 0 {
                return Some(self.span(head).next.get());
            }
        }
        None
    }
}

impl ClassState {
    /// Returns the number of spans that would be free if all used slots were moved together.
    pub(super) fn spare_spans_now(&self) -> u32 {
        self.spans - self.used_slots.div_ceil(self.class.slots.into())
    }
}
