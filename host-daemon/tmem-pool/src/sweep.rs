// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sweep: a periodic pass over all blobs (stored contents) that recompresses cold ones with
//! zstd. When one sweep ends, the next one begins.
//!
//! Several threads work on a sweep at the same time. Each of them takes a few handles that are due,
//! visits them, and takes the next ones. So no two threads visit the same blob in one sweep, and a
//! thread that has other work leaves nothing behind.
//!
//! Locks: both locks of this file are leaf locks, and a thread holds neither of them while it visits
//! a blob.

use crate::blob::Store;
use crate::codec::{self, Denser};
use crate::config::{
    Page, SWEEP_HANDLES, SWEEP_NS, SWEEP_PAGES, SWEEP_STEP, SWEEP_THREADS_MAX, Time,
};
use crate::poison;
use crate::secret::SecretPages;
use crate::sync::{Mutex, MutexGuard};
use crossbeam_utils::CachePadded;
use std::io;
use std::ops::Range;

/// Name of the data that the locks of the sweep guard, for log messages.
const SWEEP: &str = "the sweep";

/// The sweep, which visits all blobs within a fixed time.
#[derive(Default)]
pub(crate) struct Sweep {
    progress: CachePadded<Mutex<Progress>>,
    recompressors: Mutex<Recompressors>,
}

/// Progress of the sweep.
struct Progress {
    begun: Time,
    /// Number of the handle of the heap that a thread visits next.
    next: u32,
}

impl Default for Progress {
    fn default() -> Progress {
        Progress {
            begun: Time(0),
            next: 1,
        }
    }
}

/// Handles that one thread visits.
struct Claim {
    handles: Range<u32>,
    /// True if these are the last handles of the sweep, so that the next claim is of another sweep.
    is_last: bool,
}

/// Working memory of the threads that recompress blobs.
#[derive(Default)]
struct Recompressors {
    /// Working memory that no thread is using.
    free: Vec<Recompressor>,
    /// Number of threads whose working memory was created, SWEEP_THREADS_MAX at most. A thread that
    /// panics in the sweep loses its memory for good.
    created: usize,
}

/// Working memory of a thread that recompresses blobs. It has no bytes of pages while it is free.
struct Recompressor {
    denser: Denser,
    /// Two scratch pages: a decompressed page and its new compressed form.
    buffer: SecretPages,
}

/// Result of a step of the sweep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Visited {
    /// Number of handles visited.
    pub handles: usize,
    /// True if these handles were the last ones, so that the next step begins another sweep.
    pub has_ended: bool,
}

impl Progress {
    /// Returns how many of the heap's `handles` handles the sweep should have visited by now.
    fn due(&self, now: Time, handles: u32) -> u32 {
        let elapsed_ns = now.0.saturating_sub(self.begun.0);
        let due = u128::from(handles) * u128::from(elapsed_ns) / u128::from(SWEEP_NS);
        due.min(handles.into()) as u32
    }

    /// Takes at most SWEEP_HANDLES of the handles that are due by `now`. After the last handle of
    /// the heap, another sweep begins.
    fn claim(&mut self, now: Time, handles: u32) -> Claim {
        let first = self.next;
        let end_max = first.saturating_add(SWEEP_HANDLES);
        let end = self.due(now, handles).clamp(first, end_max);
        self.next = end;
        let is_last = end >= handles;
        if is_last {
            (self.begun, self.next) = (now, 1);
        }
        Claim {
            handles: first..end,
            is_last,
        }
    }
}

impl Recompressor {
    fn new() -> io::Result<Recompressor> {
        Ok(Recompressor {
            denser: Denser::new()?,
            buffer: SecretPages::new(2)?,
        })
    }

    /// Visits a handle. Returns true if its blob was recompressed.
    fn visit(&mut self, store: &Store, handle: u32, frames_bytes_max: u64) -> bool {
        let pages: &mut [Page; 2] = self
            .buffer
            .pages()
            .try_into()
            .expect("the buffer for recompressing cold pages does not have two pages");
        store.recompress_if_cold(handle, frames_bytes_max, &mut self.denser, pages)
    }

    /// Overwrites bytes of pages with zeroes.
    fn wipe(&mut self) {
        self.buffer.wipe();
        self.denser.wipe();
        codec::wipe();
    }
}

impl Sweep {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        poison::guard_or_abort(self.progress.lock(), SWEEP)
    }

    fn recompressors(&self) -> MutexGuard<'_, Recompressors> {
        poison::guard_or_abort(self.recompressors.lock(), SWEEP)
    }

    /// Returns whether handles of the heap are due that the sweep has not visited yet.
    pub(crate) fn is_late(&self, now: Time, handles: u32) -> bool {
        let progress = self.progress();
        progress.next < progress.due(now, handles)
    }

    /// Takes working memory for the calling thread. Returns None if SWEEP_THREADS_MAX threads have
    /// some, or if the system has no memory.
    fn take_recompressor(&self) -> Option<Recompressor> {
        let mut all = self.recompressors();
        if let Some(free) = all.free.pop() {
            return Some(free);
        }
        if all.created == SWEEP_THREADS_MAX {
            return None;
        }
        all.created += 1;
        drop(all);
        let created = Recompressor::new();
        if created.is_err() {
            self.recompressors().created -= 1;
        }
        created.ok()
    }

    /// Continues the sweep up to the handle that is due by `now`. Visits at most SWEEP_STEP handles
    /// and recompresses at most SWEEP_PAGES pages. `frames_bytes_max` returns the bytes that the
    /// heap may take at the moment. Visits nothing if SWEEP_THREADS_MAX other threads are in this
    /// function.
    pub(crate) fn step(
        &self,
        store: &Store,
        now: Time,
        frames_bytes_max: impl Fn() -> u64,
    ) -> Visited {
        let mut visited = Visited::default();
        let Some(mut recompressor) = self.take_recompressor() else {
            return visited;
        };
        let mut recompressed = 0;
        while visited.handles < SWEEP_STEP as usize
            && recompressed + SWEEP_HANDLES as usize <= SWEEP_PAGES
            && !visited.has_ended
        {
            let claim = self.progress().claim(now, store.heap.places());
            let handles = claim.handles.len();
            for handle in claim.handles {
                let was_cold = recompressor.visit(store, handle, frames_bytes_max());
                recompressed += usize::from(was_cold);
            }
            visited.handles += handles;
            visited.has_ended = claim.is_last;
            if handles == 0 {
                break;
            }
        }
        if recompressed > 0 {
            recompressor.wipe();
        }
        self.recompressors().free.push(recompressor);
        visited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use crate::tests::{OPEN, add, get, new_engine, put, text};
    use crate::{Engine, Tenant};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn claims_contain_each_handle_once_and_only_when_it_is_due() {
        for_each_seed(
            "claims_contain_each_handle_once_and_only_when_it_is_due",
            50,
            |seed| {
                let mut rng = Rng::new(seed);
                let handles = 1 + rng.below(500) as u32;
                let (mut progress, mut now) = (Progress::default(), Time(0));
                for _ in 0..3 {
                    let (begun, mut next) = (now.0, 1);
                    loop {
                        now.0 += rng.below(SWEEP_NS / 50);
                        let claim = progress.claim(now, handles);
                        assert_eq!(claim.handles.start, next);
                        next = claim.handles.end;
                        let due_ns = u128::from(SWEEP_NS) * u128::from(next);
                        let elapsed_ns = u128::from(now.0 - begun) * u128::from(handles);
                        assert!(
                            claim.handles.is_empty() || due_ns <= elapsed_ns,
                            "handle {next} of {handles} is not due"
                        );
                        if claim.is_last {
                            break;
                        }
                    }
                    assert_eq!(next, handles);
                }
            },
        );
    }

    #[test]
    fn the_last_claim_ends_at_the_largest_handle() {
        let mut progress = Progress {
            next: u32::MAX - 5,
            ..Progress::default()
        };
        let claim = progress.claim(Time(SWEEP_NS), u32::MAX);
        assert_eq!(claim.handles, u32::MAX - 5..u32::MAX);
        assert!(claim.is_last);
    }

    /// Returns an engine with this number of pages that the next sweep recompresses.
    fn cold(pages: u64) -> (Arc<Engine>, Tenant) {
        let engine = new_engine(16 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        for index in 0..pages {
            put(&tenant, 1, index, 1, &text(index));
        }
        while engine.maintain(Time(SWEEP_NS), 64) {}
        assert_eq!(engine.stats().recompressed_blobs, 0);
        (engine, tenant)
    }

    #[test]
    fn a_bounded_number_of_threads_works_on_a_sweep() {
        const PAGES: u64 = 100;
        let (engine, _tenant) = cold(PAGES);
        let sweep = &engine.background.sweep;
        // These threads are in the middle of a step.
        let others: Vec<_> = (1..SWEEP_THREADS_MAX)
            .map(|_| sweep.take_recompressor())
            .collect();
        assert!(others.iter().all(Option::is_some));
        let last = sweep.take_recompressor().unwrap();
        while engine.maintain(Time(2 * SWEEP_NS), 64) {}
        assert_eq!(engine.stats().recompressed_blobs, 0);
        sweep.recompressors().free.push(last);
        while engine.maintain(Time(2 * SWEEP_NS), 64) {}
        assert_eq!(engine.stats().recompressed_blobs, PAGES);
        engine.check_invariants();
    }

    #[test]
    fn threads_of_a_sweep_recompress_each_page_once() {
        const PAGES: u64 = 1500;
        let (engine, tenant) = cold(PAGES);
        let visited = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let bytes_max = || engine.frames_bytes_max();
                    let now = Time(2 * SWEEP_NS - 1);
                    while let step = engine.background.sweep.step(&engine.store, now, bytes_max)
                        && step.handles > 0
                    {
                        visited.fetch_add(step.handles as u64, Relaxed);
                    }
                });
            }
        });
        let handles = u64::from(engine.store.heap.places());
        assert!(
            visited.load(Relaxed) < handles,
            "the threads visited more than the {handles} handles of the heap"
        );
        while engine.maintain(Time(2 * SWEEP_NS), 64) {}
        assert_eq!(engine.stats().recompressed_blobs, PAGES);
        for index in 0..PAGES {
            assert!(get(&tenant, 1, index, 1) == Some(text(index)));
        }
        engine.check_invariants();
    }
}
