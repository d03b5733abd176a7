// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Free spans, which belong to no class. A free span is called idle if it has frames, and bare if
//! it has none. Size classes take free spans and give them back. Idle frames above a limit go back
//! to the system, in batches.
//!
//! No thread makes a system call while it holds the lock of free spans.

use super::class::{Class, SPAN_BYTES, SPAN_FRAMES_MAX};
use super::region::{FRAME_BYTES, Zeroed};
use super::{HEAP, Heap};
use crate::config::RAW_PART;
use crate::fail;
use crate::poison;
use std::sync::atomic::Ordering::Relaxed;

/// Smallest number of idle frames that are kept, so that storing bytes after freeing others causes
/// no page fault. They are 16 MiB, the memory for the raw pages of a few busy tenants.
const IDLE_FRAMES_MIN: u64 = 4096;

/// Returns the number of idle frames that a pool of this size keeps. It keeps as many as the raw
/// pages of all tenants may take, because raw pages come and go.
pub(crate) fn idle_frames(size_bytes: u64) -> u64 {
    (size_bytes / RAW_PART / FRAME_BYTES as u64).max(IDLE_FRAMES_MIN)
}

/// Largest number of spans whose frames are given back in one batch. Adjacent spans of a batch
/// share one system call.
pub(super) const RELEASE_SPANS_MAX: usize = 64;

/// Largest number of idle frames that a thread that takes a span returns to the system in addition
/// to the number that it needs. Further frames are returned later, because the thread holds the
/// lock of a size class.
pub(super) const RELEASE_FRAMES_MAX: u64 = 64;

#[derive(Debug, Default)]
pub(super) struct FreeSpans {
    /// Lists of idle spans with 1, 2, ... frames. All bytes of idle spans are zero.
    pub(super) idle: [u32; SPAN_FRAMES_MAX],
    /// List of spans without frames.
    pub(super) bare: u32,
}

impl<X: Zeroed> Heap<X> {
    pub(super) fn take_span(&self, frames: u8, bytes_max: u64) -> Option<u32> {
        let frames_max = bytes_max / FRAME_BYTES as u64;
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        let (mut released, enough) = (0, u64::from(frames) + RELEASE_FRAMES_MAX);
        let span = loop {
            let now = self.sums.frames.load(Relaxed);
            let busy = now - self.sums.idle_frames.load(Relaxed);
            if busy + u64::from(frames) > frames_max {
                return None;
            }
            let more = match free.idle[usize::from(frames) - 1] {
                0 => frames.into(),
                _ => 0,
            };
            // Release idle spans above the limit even if this thread could use one of them, because
            // other memory of the pool may have grown.
            let over = (now + more).saturating_sub(frames_max);
            let wanted = over.min(enough - released);
            if wanted == 0 {
                break match self.take_idle(&mut free, frames) {
                    Some(span) => span,
                    None => self.take_bare(&mut free, frames)?,
                };
            }
            let mut batch = Batch::default();
            self.choose_idle(&mut free, wanted, &mut batch);
            if batch.len == 0 {
                // There is no memory now, because other threads are just returning the idle frames
                // to the system.
                return None;
            }
            drop(free);
            released = enough.min(released + self.release(batch));
            free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        };
        drop(free);
        let s = self.span(span);
        s.free.set(0);
        s.fresh.set(0);
        Some(span)
    }

    fn take_idle(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        let span = self.unlist_idle(free, frames)?;
        self.sums.idle_frames.fetch_sub(frames.into(), Relaxed);
        Some(span)
    }

    /// Takes an idle span out of its list. The sum of idle frames still includes the span.
    fn unlist_idle(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        let head = &mut free.idle[usize::from(frames) - 1];
        let span = *head;
        if span == 0 {
            return None;
        }
        // The number of frames differs only if the list is damaged. Continuing could use one span
        // twice, or loop without end.
        if self.span(span).frames.get() != frames {
            poison::abort_inconsistent(HEAP);
        }
        *head = self.span(span).next.get();
        Some(span)
    }

    fn take_bare(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        if fail::memory() {
            return None;
        }
        let span = if free.bare != 0 {
            let next = self.span(free.bare).next.get();
            std::mem::replace(&mut free.bare, next)
        } else {
            let fresh = self.sums.fresh_span.load(Relaxed);
            if fresh >= self.spans.capacity() as u64 {
                return None;
            }
            self.sums.fresh_span.store(fresh + 1, Relaxed);
            fresh as u32
        };
        self.span(span).frames.set(frames);
        self.sums.frames.fetch_add(frames.into(), Relaxed);
        Some(span)
    }

    /// Frees a span without used slots. All its slots are zero except for their headers.
    pub(super) fn give_span(&self, class: &Class, span: u32) {
        let s = self.span(span);
        for slot in 0..s.fresh.get() {
            self.set_header(class, span, slot, 0);
        }
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        let head = &mut free.idle[usize::from(class.frames) - 1];
        s.next.set(std::mem::replace(head, span));
        self.sums
            .idle_frames
            .fetch_add(class.frames.into(), Relaxed);
    }

    // ---- returning memory to the system -------------------------------------------------------

    /// Returns by how much the number of idle frames exceeds `stay`.
    pub(crate) fn idle_excess(&self, stay: u64) -> u64 {
        let idle = self.sums.idle_frames.load(Relaxed);
        idle.saturating_sub(stay)
    }

    /// Gives some of the idle frames above `stay` back to the system. Returns the number of these
    /// frames.
    pub(crate) fn trim(&self, stay: u64) -> u64 {
        match self.idle_excess(stay) {
            0 => 0,
            excess => self.release_some(excess),
        }
    }

    /// Gives the frames of all free spans back to the system.
    pub(crate) fn release_idle(&self) {
        while self.release_some(u64::MAX) > 0 {}
    }

    /// Gives about `frames` idle frames back to the system, but at most a batch. Returns the number
    /// of frames.
    fn release_some(&self, frames: u64) -> u64 {
        let mut batch = Batch::default();
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        self.choose_idle(&mut free, frames, &mut batch);
        drop(free);
        self.release(batch)
    }

    /// Takes idle spans out of their lists, the longest first, until they have `frames` frames or
    /// fill the batch.
    fn choose_idle(&self, free: &mut FreeSpans, frames: u64, batch: &mut Batch) {
        let mut chosen = 0;
        for length in (1..=SPAN_FRAMES_MAX as u8).rev() {
            while chosen < frames
                && batch.len < RELEASE_SPANS_MAX
                && let Some(span) = self.unlist_idle(free, length)
            {
                batch.spans[batch.len] = span;
                batch.len += 1;
                chosen += u64::from(length);
            }
        }
    }

    /// Gives the frames of spans that are in no list back to the system. Returns the number of
    /// frames. The caller does not hold the lock of free spans, because the system call takes
    /// microseconds and interrupts all processors that run this process.
    fn release(&self, mut batch: Batch) -> u64 {
        let spans = &mut batch.spans[..batch.len];
        spans.sort_unstable();
        for run in spans.chunk_by(|a, b| a + 1 == *b) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let last_frames = usize::from(self.span(last).frames.get());
            // SAFETY: no slot of these spans is used, and no thread can take one until they are
            // listed.
            unsafe {
                self.data.release(
                    first as usize * SPAN_BYTES,
                    (last - first) as usize * SPAN_BYTES + last_frames * FRAME_BYTES,
                );
            }
        }
        let mut released = 0;
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        for &span in &*spans {
            let s = self.span(span);
            released += u64::from(s.frames.replace(0));
            s.next.set(std::mem::replace(&mut free.bare, span));
        }
        self.sums.frames.fetch_sub(released, Relaxed);
        self.sums.idle_frames.fetch_sub(released, Relaxed);
        released
    }
}

/// A batch of spans that are in no list.
struct Batch {
    spans: [u32; RELEASE_SPANS_MAX],
    len: usize,
}

impl Default for Batch {
    fn default() -> Batch {
        Batch {
            spans: [0; RELEASE_SPANS_MAX],
            len: 0,
        }
    }
}
