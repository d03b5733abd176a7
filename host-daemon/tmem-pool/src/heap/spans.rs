// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Free spans. A span is a group of 1 to 12 adjacent frames of 4 KiB. A free span has no used slots
//! and belongs to no size class. It is called idle if its frames occupy memory, and bare if it has
//! none. Size classes take free spans and give them back. Idle frames above a limit go back to the
//! system, in batches.
//!
//! No thread makes a system call while it holds the lock of free spans.

use super::area::{BARE, IDLE};
use super::class::{Class, SPAN_FRAMES_MAX};
use super::region::{FRAME_BYTES, Zeroed};
use super::{HEAP, Heap};
use crate::config::RAW_DIVISOR;
use crate::fail;
use crate::poison;
use std::sync::atomic::Ordering::Relaxed;

/// Smallest limit of idle frames. Idle frames keep their memory, so that storing bytes after
/// freeing others causes no page fault. The value is 16 MiB, the memory for the raw pages of a few
/// busy tenants.
const IDLE_FRAMES_MIN: u64 = 4096;

/// Returns the number of idle frames that a pool of this size keeps: frames without stored bytes
/// that are not returned to the system. It is as large as the number of raw pages that all tenants
/// may have whatever their charges are, because raw pages come and go.
pub(crate) fn idle_frames(size_bytes: u64) -> u64 {
    (size_bytes / RAW_DIVISOR / FRAME_BYTES as u64).max(IDLE_FRAMES_MIN)
}

/// Largest number of spans whose frames go back to the system in one batch. Adjacent spans of a
/// batch share one system call.
pub(super) const RELEASE_SPANS_MAX: usize = 64;

/// Largest number of idle frames that a thread returns to the system while it takes spans for a
/// blob or for the raw pages of a put, in addition to the frames that it needs. Further frames are
/// returned later, by background work.
pub(super) const RELEASE_FRAMES_MAX: i64 = 64;

#[derive(Debug, Default)]
pub(super) struct FreeSpans {
    /// First idle span of each list. The list at index n has the idle spans with n + 1 frames. All
    /// bytes of idle spans are zero.
    pub(super) idle: [u32; SPAN_FRAMES_MAX],
    /// First bare span of each list. The list at index n has the spans of n + 1 frames that occupy
    /// no memory.
    pub(super) bare: [u32; SPAN_FRAMES_MAX],
}

impl<X: Zeroed> Heap<X> {
    /// Takes a free span of `frames` frames for a size class ([`take_spans`](Self::take_spans)).
    pub(super) fn take_span(
        &self,
        frames: u8,
        bytes_max: u64,
        release_max: &mut i64,
    ) -> Option<u32> {
        let mut span = [0];
        let taken = self.take_spans(frames, &mut span, bytes_max, release_max);
        (taken == 1).then_some(span[0])
    }

    /// Takes free spans of `frames` frames for a size class, one for each element of `spans`, under
    /// one acquisition of the lock. If the heap's memory would exceed `bytes_max` bytes, first
    /// returns idle frames to the system: at most the number of frames that the spans take from the
    /// system, plus `release_max`. Adds the frames that the spans take from the system to
    /// `release_max`, and subtracts the returned frames. Only whole spans are returned, so
    /// `release_max` may become slightly negative; later calls then return less. Returns the number
    /// of elements that were set. It is smaller if the heap has no memory for all spans.
    pub(super) fn take_spans(
        &self,
        frames: u8,
        spans: &mut [u32],
        bytes_max: u64,
        release_max: &mut i64,
    ) -> usize {
        let frames_max = bytes_max / FRAME_BYTES as u64;
        let mut nr = 0;
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        while nr < spans.len() {
            let now = self.sums.frames.load(Relaxed);
            let busy = now - self.sums.idle_frames.load(Relaxed);
            if busy + u64::from(frames) > frames_max {
                break;
            }
            let more = match free.idle[usize::from(frames) - 1] {
                0 => frames,
                _ => 0,
            };
            // Release idle spans above the limit of memory even if this thread could use one of
            // them. The limit may have become lower, because other parts of the pool have grown.
            let over = (now + u64::from(more)).saturating_sub(frames_max);
            let allowed = *release_max + i64::from(more);
            let wanted = over.min(allowed.max(0) as u64);
            if wanted == 0 {
                *release_max = allowed;
                let taken = match more {
                    0 => self.take_idle(&mut free, frames),
                    _ => self.take_bare(&mut free, frames),
                };
                let Some(span) = taken else {
                    break;
                };
                spans[nr] = span;
                nr += 1;
                continue;
            }
            let mut batch = Batch::default();
            self.choose_idle(&mut free, wanted, &mut batch);
            if batch.len == 0 {
                // There is no memory now, because other threads are returning the idle frames to
                // the system.
                break;
            }
            drop(free);
            // A batch may have a few more frames than wanted, because spans are not divided. Then
            // `release_max` becomes negative, and the calls for the next spans return fewer frames
            // to the system.
            *release_max -= self.release(batch) as i64;
            free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        }
        nr
    }

    fn take_idle(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        let span = self.unlist_idle(free, frames)?;
        self.sums.idle_frames.fetch_sub(frames.into(), Relaxed);
        Some(span)
    }

    /// Takes an idle span with this number of frames out of its list, if there is one. The sum of
    /// idle frames still includes the span.
    fn unlist_idle(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        let head = &mut free.idle[usize::from(frames) - 1];
        let span = *head;
        if span == 0 {
            return None;
        }
        let s = self.area(frames).span(span);
        // A list of idle spans that names another span is damaged. Continuing could use one span
        // twice, or loop without end.
        if s.prev.replace(0) != IDLE || s.used.get() != 0 {
            poison::abort_inconsistent(HEAP);
        }
        *head = s.next.get();
        // Prefetch the record of the span that the next call will use.
        self.area(frames).prefetch(*head);
        Some(span)
    }

    fn take_bare(&self, free: &mut FreeSpans, frames: u8) -> Option<u32> {
        if fail::memory() {
            return None;
        }
        let area = self.area(frames);
        let head = &mut free.bare[usize::from(frames) - 1];
        let span = if *head != 0 {
            let s = area.span(*head);
            // A list of bare spans that names another span is damaged. Continuing could use one
            // span twice.
            if s.prev.replace(0) != BARE || s.used.get() != 0 {
                poison::abort_inconsistent(HEAP);
            }
            std::mem::replace(head, s.next.get())
        } else {
            let fresh = area.fresh.load(Relaxed);
            if fresh >= area.end() {
                return None;
            }
            area.fresh.store(fresh + 1, Relaxed);
            fresh as u32
        };
        self.sums.frames.fetch_add(frames.into(), Relaxed);
        Some(span)
    }

    /// Takes back spans without used slots, which are all zero, from their class.
    pub(super) fn list_idle(&self, class: &Class, spans: &[u32]) {
        let area = self.area(class.frames);
        // Link the spans before taking the lock. The span that was freed last comes first, because
        // its memory is most likely in the processor's cache.
        let mut first = 0;
        for &span in spans {
            let s = area.span(span);
            s.prev.set(IDLE);
            s.next.set(first);
            first = span;
        }
        let Some(&tail) = spans.first() else {
            return;
        };
        let frames = spans.len() as u64 * u64::from(class.frames);
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        let head = &mut free.idle[usize::from(class.frames) - 1];
        area.span(tail).next.set(std::mem::replace(head, first));
        self.sums.idle_frames.fetch_add(frames, Relaxed);
    }

    // ---- returning memory to the system -------------------------------------------------------

    /// Returns by how much the number of idle frames (unused, but with memory) exceeds `stay`.
    pub(crate) fn idle_excess(&self, stay: u64) -> u64 {
        self.idle_frames().saturating_sub(stay)
    }

    /// Gives some of the idle frames above `stay` back to the system. Returns the number of frames
    /// given back.
    pub(crate) fn release_idle_above(&self, stay: u64) -> u64 {
        match self.idle_excess(stay) {
            0 => 0,
            excess => self.release_some(excess),
        }
    }

    /// Gives the frames of all free spans back to the system.
    #[cfg(test)]
    pub(crate) fn release_idle(&self) {
        while self.release_some(u64::MAX) > 0 {}
    }

    /// Gives about `frames` idle frames back to the system, but at most one batch. Returns the
    /// number of frames given back.
    fn release_some(&self, frames: u64) -> u64 {
        let mut batch = Batch::default();
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        self.choose_idle(&mut free, frames, &mut batch);
        drop(free);
        self.release(batch)
    }

    /// Moves idle spans from their lists to the batch, the longest first, until the moved spans
    /// have `frames` frames or the batch is full.
    fn choose_idle(&self, free: &mut FreeSpans, frames: u64, batch: &mut Batch) {
        let mut chosen = 0;
        for length in (1..=SPAN_FRAMES_MAX as u8).rev() {
            while chosen < frames
                && batch.len < RELEASE_SPANS_MAX
                && let Some(span) = self.unlist_idle(free, length)
            {
                batch.spans[batch.len] = (length, span);
                batch.len += 1;
                chosen += u64::from(length);
            }
        }
    }

    /// Gives the frames of a batch of spans back to the system, and lists the spans as bare.
    /// Returns the number of frames given back. The caller does not hold the lock of free spans,
    /// because the system call takes microseconds and interrupts all processors that run this
    /// process.
    fn release(&self, mut batch: Batch) -> u64 {
        let spans = &mut batch.spans[..batch.len];
        spans.sort_unstable();
        let adjacent = |a: &(u8, u32), b: &(u8, u32)| a.0 == b.0 && a.1 + 1 == b.1;
        for run in spans.chunk_by(adjacent) {
            let (frames, first) = run[0];
            // SAFETY: no slot of these spans is used, and no thread can take one until they are
            // listed.
            unsafe { self.area(frames).release(first, run.len()) };
        }
        let mut released = 0;
        let mut free = poison::guard_or_abort(self.free_spans.lock(), HEAP);
        for &(frames, span) in &*spans {
            let s = self.area(frames).span(span);
            released += u64::from(frames);
            let head = &mut free.bare[usize::from(frames) - 1];
            s.prev.set(BARE);
            s.next.set(std::mem::replace(head, span));
        }
        self.sums.frames.fetch_sub(released, Relaxed);
        self.sums.idle_frames.fetch_sub(released, Relaxed);
        released
    }
}

/// A batch of spans whose frames a thread is about to return to the system, each with its number of
/// frames. The spans are in no list.
struct Batch {
    spans: [(u8, u32); RELEASE_SPANS_MAX],
    len: usize,
}

impl Default for Batch {
    fn default() -> Batch {
        Batch {
            spans: [(0, 0); RELEASE_SPANS_MAX],
            len: 0,
        }
    }
}
