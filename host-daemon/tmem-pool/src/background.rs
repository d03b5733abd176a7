// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Background work: finalizes (deduplicates and compresses) new pages, reclaims memory before puts
//! need it, compacts the heap, returns idle frames to the system, and recompresses cold pages.
//!
//! The work consists of chores. Each chore has a step and a predicate that tells whether the step
//! would do something. The caller's threads run the steps ([`Engine::maintain`]).

use crate::blob::{Encoded, Prepared};
use crate::codec;
use crate::config::{
    EVICT_STEP_PAGES, EVICTIONS_PER_PUT_PAGE, FINALIZE_PAGES, PAGE_SIZE, Page, STALE_RAW_MAX, Time,
    reclaim_high_bytes,
};
use crate::engine::Engine;
use crate::heap::{self, FRAME_BYTES};
use crate::index::entry::Content;
use crate::raw_queue::RawPage;
use crate::state::{Freed, Reason};
use crate::tenant_shared::TenantShared;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Kind of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Finalizing new pages: finding equal pages, and compressing the other pages with lz4. This
    /// kind includes evictions that free memory for the final forms.
    Finalize,
    /// Compressing cold pages with zstd. The sweep, a periodic pass over all stored pages, does it.
    Recompress,
    /// Freeing memory: freeing the pages of dropped objects, pools and tenants, evicting pages,
    /// compacting the heap, and returning memory to the system.
    Reclaim,
}

impl Work {
    /// All kinds of background work.
    pub const ALL: [Work; 3] = [Work::Finalize, Work::Recompress, Work::Reclaim];
}

/// Interval in steps of background work. While there are raw (new, uncompressed) pages, every step
/// whose number is a multiple of this constant does other work in addition to finalizing pages and
/// freeing as much memory as they took.
const CHORES_EVERY: usize = 4;

/// Interval in steps of background work. Every step whose number is a multiple of this constant
/// continues the sweep, even if there is other work, so that the sweep keeps its pace under
/// constant load. Such a step recompresses up to SWEEP_PAGES cold pages, while the steps of an
/// interval finalize about eight times as many new pages.
const SWEEP_EVERY: usize = 32;
const _: () = assert!(SWEEP_EVERY.is_multiple_of(CHORES_EVERY));

/// Number of detached pages (dropped, and not freed yet) that a step frees for each page that it
/// finalizes. With at least two, dropped pages disappear faster than new pages can take their place,
/// even while guests put pages as fast as the pool finalizes them. Freeing two pages costs about 1 µs,
/// a fifth of the time of finalizing one.
const FREED_PER_FINALIZED: usize = 2;

/// A chore: one of the things that background work does.
pub(crate) struct Chore {
    /// Returns whether there may be work for `run`. May err if other threads change the pool meanwhile.
    pub is_due: fn(&Engine, Time) -> bool,
    /// Does a step of the chore, for about this number of pages. Returns the amount of work done in
    /// pages, blobs or frames, where 0 means that nothing is left to do.
    pub run: fn(&Engine, Time, usize) -> usize,
}

const FINALIZE: Chore = Chore {
    // Finalize raw pages.
    is_due: |engine, _| engine.any_member(TenantShared::has_raw),
    run: |engine, _, _| engine.finalize_step(),
};

/// Chores that reclaim memory, in their order. A step of background work does only the first of
/// them that has work.
const RECLAIM: [Chore; 5] = [
    Chore {
        // Free detached pages. This chore is the first, because a step that finalizes pages has
        // freed detached pages already and begins with the second.
        is_due: |engine, _| engine.any_tenant_has_detached(),
        run: |engine, _, pages| engine.free_detached(pages),
    },
    Chore {
        // Shrink the pool to its size.
        is_due: |engine, _| {
            let has_pages = |tenant: &TenantShared| tenant.charged_bytes.get() > 0;
            engine.is_over() && engine.any_member(has_pages)
        },
        run: |engine, _, pages| engine.shrink_step(pages),
    },
    Chore {
        // Shrink a tenant to its limit.
        is_due: |engine, _| engine.tenant_over_limit().is_some(),
        run: |engine, _, _| engine.limit_step(),
    },
    Chore {
        // Free memory for future puts.
        is_due: |engine, _| engine.may_reclaim_to_watermark(),
        run: |engine, _, pages| engine.reclaim_to_watermark(pages),
    },
    Chore {
        // Compact the heap.
        is_due: |engine, _| {
            let heap = &engine.store.heap;
            let wants = engine.background.compact_all.load(Relaxed) || heap.is_sparse();
            wants && heap.has_spare()
        },
        run: |engine, _, pages| engine.compact_step(pages),
    },
];

const RELEASE: Chore = Chore {
    // Release idle frames.
    is_due: |engine, _| engine.store.heap.idle_excess(engine.idle_frames_kept()) > 0,
    run: |engine, _, _| engine.release_idle_frames(),
};

const RECOMPRESS: Chore = Chore {
    // Recompress cold pages.
    is_due: |engine, now| {
        let sweep = &engine.background.sweep;
        sweep.is_late(now, engine.store.heap.places())
    },
    run: |engine, now, _| engine.recompress_step(now),
};

/// Returns all chores.
pub(crate) fn chores() -> impl Iterator<Item = &'static Chore> {
    RECLAIM.iter().chain([&FINALIZE, &RELEASE, &RECOMPRESS])
}

impl Engine {
    /// Does background work for at most about `budget` pages. It finalizes (deduplicates and
    /// compresses) new pages, frees dropped pages, evicts pages above the pool's size or a tenant's
    /// limit, and recompresses cold pages. Returns true if more work is left. Any number of threads
    /// may call this method at the same time.
    pub fn maintain(&self, now: Time, budget: usize) -> bool {
        self.maintain_reporting(now, budget, &mut |_| {})
    }

    /// Does background work as [`maintain`](Self::maintain) does, and reports its kinds. Before
    /// each piece of work it calls `begins` with the kind of that work, which may be the kind of
    /// the piece before. The engine holds no lock while it calls `begins`. For about eight pages of
    /// work, it calls `begins` up to three times.
    pub fn maintain_reporting(
        &self,
        now: Time,
        budget: usize,
        begins: &mut dyn FnMut(Work),
    ) -> bool {
        let mut left = budget;
        while left > 0 {
            let done = self.maintain_step(now, left.min(EVICT_STEP_PAGES), begins);
            if done == 0 {
                return false;
            }
            left = left.saturating_sub(done);
        }
        self.has_work(now)
    }

    /// Continues the sweep, which recompresses cold pages, up to the handle that is due by `now`.
    /// Returns the number of handles visited.
    fn recompress_step(&self, now: Time) -> usize {
        let sweep = &self.background.sweep;
        let visited = sweep.step(&self.store, now, || self.frames_bytes_max());
        if visited.has_ended {
            // The sweep has ended, so another one begins. Once in each sweep, return all frames
            // that are idle now to the system, in batches in the next steps. Frames that are in
            // frequent use are soon taken again.
            self.release_all_idle_frames();
            self.background.compact_all.store(true, Relaxed);
        }
        visited.handles
    }

    /// Makes the next steps return all frames that are idle now to the system.
    fn release_all_idle_frames(&self) {
        let idle = self.store.heap.idle_frames();
        self.background.idle_due.store(idle, Relaxed);
    }

    /// Compacts the heap if much of its memory is unused, or completely after a sweep has ended.
    /// Returns the number of moved blobs.
    fn compact_step(&self, pages: usize) -> usize {
        let compact_all = &self.background.compact_all;
        if !self.store.heap.is_sparse() && !compact_all.load(Relaxed) {
            return 0;
        }
        let moved = self.compact(pages);
        if moved == 0 && compact_all.swap(false, Relaxed) {
            // Also return the frames that the full compaction has emptied, in the next steps.
            self.release_all_idle_frames();
        }
        moved
    }

    /// Reclaims memory if the pool exceeds its size. Returns the number of steps done.
    fn shrink_step(&self, pages: usize) -> usize {
        if !self.is_over() {
            self.is_shrinking.store(false, Relaxed);
            return 0;
        }
        let mut steps_left = pages;
        self.reclaim_step(&mut steps_left);
        pages - steps_left
    }

    /// Evicts a page of a tenant whose limit was lowered below its charge. Evicts only one page, so
    /// that the charge does not fall further below the limit than necessary. Returns the number of
    /// steps done.
    fn limit_step(&self) -> usize {
        let tenant = self.tenant_over_limit();
        tenant.map_or(0, |tenant| self.evict_from(&tenant, 1, Reason::Limit))
    }

    fn any_member(&self, is_so: impl Fn(&TenantShared) -> bool) -> bool {
        let membership = self.membership();
        membership
            .members
            .iter()
            .any(|member| is_so(&member.tenant))
    }

    /// Does one step of background work: finalizing, reclaiming or continuing the sweep. `begins`
    /// is called before each kind of work. Returns the amount of work done in pages, blobs or
    /// frames, where 0 means that nothing is left to do.
    fn maintain_step(&self, now: Time, pages: usize, begins: &mut dyn FnMut(Work)) -> usize {
        let run = |chore: &Chore| (chore.run)(self, now, pages);
        begins(Work::Finalize);
        // Finalize raw (uncompressed) pages first. Until then they take about twice the memory of
        // their final forms, and new pages are refused if there are too many raw pages. But guests
        // can put pages as fast as the pool finalizes them, so every CHORES_EVERY-th step does
        // other work as well.
        let finalized = run(&FINALIZE);
        let step = self.background.steps.fetch_add(1, Relaxed);
        let does_chores = finalized == 0 || step.is_multiple_of(CHORES_EVERY);
        let frees = finalized > 0 && self.any_tenant_has_detached();
        let reclaims = finalized > 0 && self.update_watermark().is_some();
        if !does_chores && !frees && !reclaims {
            return finalized;
        }
        begins(Work::Reclaim);
        let mut done = finalized;
        if frees {
            // These pages have a budget of their own and do not count as done. Otherwise dropped
            // pages of one guest would delay finalizing, and the pool would refuse new pages.
            self.free_detached(FREED_PER_FINALIZED * finalized);
        }
        if reclaims {
            done += self.reclaim_for_finalized(finalized);
        }
        if !does_chores {
            return done;
        }
        let chores = if frees { &RECLAIM[1..] } else { &RECLAIM[..] };
        let reclaimed = chores.iter().map(run).find(|&done| done > 0);
        done += reclaimed.unwrap_or(0) + run(&RELEASE);
        if done == 0 || step.is_multiple_of(SWEEP_EVERY) {
            begins(Work::Recompress);
            done += run(&RECOMPRESS);
        }
        done
    }

    /// Returns whether any chore is due.
    fn has_work(&self, now: Time) -> bool {
        chores().any(|chore| (chore.is_due)(self, now))
    }

    // ---- new pages ----------------------------------------------------------------------------

    /// Finalizes (deduplicates and compresses) some raw pages of the tenant whose turn it is, or of
    /// the next tenant that has raw pages. Returns the number of finalized pages, which is also 0
    /// if there was no memory for the final form of a page.
    fn finalize_step(&self) -> usize {
        let turn = self.background.finalize_steps.fetch_add(1, Relaxed);
        let mut from = 0;
        loop {
            // Release the membership lock before pages are finalized. Finalizing may evict pages,
            // and an eviction takes this lock to choose a tenant.
            let next = {
                let membership = self.membership();
                let members = &membership.members;
                let mut order = (from..members.len()).map(|i| (i, (turn + i) % members.len()));
                order
                    .find(|&(_, at)| members[at].tenant.has_raw())
                    .map(|(i, at)| (i, Arc::clone(&members[at].tenant)))
            };
            let Some((i, tenant)) = next else {
                return 0;
            };
            match self.finalize(&tenant) {
                // All raw pages of this tenant were removed before they were finalized. Try the
                // tenants after it in the list, so that their pages need not wait for the next
                // step. This tenant is not tried again, so the loop ends.
                Some(0) => from = i + 1,
                finalized => return finalized.unwrap_or(0),
            }
        }
    }

    /// Finalizes (deduplicates and compresses) up to [`FINALIZE_PAGES`] raw pages of the tenant.
    /// Returns the number of these pages, or None if there was no memory for the final form of one
    /// of them. If the call found only entries of pages that are no longer raw, and more entries
    /// wait, it returns 1, because it has done about the work for a page.
    pub(crate) fn finalize(&self, tenant: &TenantShared) -> Option<usize> {
        let mut work = [RawPage::default(); FINALIZE_PAGES];
        let mut checks = [0; FINALIZE_PAGES];
        let (mut nr, mut stale_left) = (0, STALE_RAW_MAX);
        let mut state = tenant.lock(&self.totals);
        state.prefetch_raw(FINALIZE_PAGES, |blob| {
            self.store.prefetch_content(Content::Raw(blob));
        });
        while nr < FINALIZE_PAGES
            && let Some(page) = state.next_raw(&mut stale_left)
        {
            // Take another reference to the raw blob. It keeps the page's bytes if another thread
            // removes the page before its final form is stored.
            if self.store.share_blob(page.blob) {
                work[nr] = page;
                checks[nr] = state.index.entries[page.id].check;
                nr += 1;
            }
        }
        let has_more = state.has_raw();
        drop(state);
        if nr == 0 {
            return Some(usize::from(has_more));
        }
        let work = &work[..nr];
        for page in work {
            self.store.prefetch_raw(page.blob);
        }
        let mut finalized = [None; FINALIZE_PAGES];
        let mut buffer = self.background.scratch.take();
        if let Some(buffer) = &mut buffer {
            let [one, two] = buffer.pages() else {
                unreachable!("scratch memory does not have two pages");
            };
            // Store a compressed page only after the next page is compressed. In the meantime the
            // processor loads the memory that is reserved for the compressed page.
            let (mut empty, mut full) = (one, two);
            let mut encoded: Option<(usize, Encoded)> = None;
            let complete = |encoded, buffer: &Page| self.store.complete(encoded, buffer);
            for (nth, (&RawPage { blob, .. }, check)) in work.iter().zip(checks).enumerate() {
                // If this page may equal the compressed page that is not stored yet, store that
                // page first. Only then can this page find and share it.
                if let Some((before, page)) = encoded
                    && self.store.may_equal(blob, &page)
                {
                    finalized[before] = Some(complete(page, full));
                    encoded = None;
                }
                let prepared = self.prepare(blob, check, empty);
                if let Some((before, page)) = encoded.take() {
                    finalized[before] = Some(complete(page, full));
                }
                match prepared {
                    Some(Prepared::Finalized(found)) => finalized[nth] = Some(found),
                    Some(Prepared::Encoded(page)) => {
                        encoded = Some((nth, page));
                        std::mem::swap(&mut empty, &mut full);
                    }
                    None => {}
                }
            }
            if let Some((last, page)) = encoded {
                finalized[last] = Some(complete(page, full));
            }
        }
        if let Some(buffer) = buffer {
            self.background.scratch.put_back(buffer);
        }
        // Wipe the remains of stored pages that this thread has decompressed to compare them.
        codec::wipe();
        let mut freed = Freed::new();
        let mut state = tenant.lock(&self.totals);
        // Handle the results in reverse order, so that pages for which there was no memory return
        // to the queue in their old order.
        for (&page, finalized) in work.iter().zip(finalized).rev() {
            match finalized {
                Some(finalized) => state.finalize(page, finalized, &mut freed),
                None => state.put_raw_back(page),
            }
            freed.push(Content::Raw(page.blob));
        }
        drop(state);
        self.release_all(freed);
        let failed = finalized[..nr].iter().any(Option::is_none);
        (!failed).then_some(nr)
    }

    // ---- memory for future puts ---------------------------------------------------------------

    /// Decides whether background work should evict pages now: it begins below the low watermark,
    /// which is half of the high one, and ends at the high watermark. Returns the high watermark
    /// (free memory in bytes) if background work should evict pages, and None otherwise.
    fn update_watermark(&self) -> Option<u64> {
        let size_bytes = self.size_bytes.get();
        let high_bytes = reclaim_high_bytes(size_bytes);
        let free_bytes = size_bytes.saturating_sub(self.used_bytes());
        let before = self.background.is_reclaiming.load(Relaxed);
        let wanted_bytes = if before { high_bytes } else { high_bytes / 2 };
        let is_reclaiming = free_bytes < wanted_bytes;
        if is_reclaiming != before {
            self.background.is_reclaiming.store(is_reclaiming, Relaxed);
        }
        is_reclaiming.then_some(high_bytes)
    }

    /// Returns the memory in bytes that would be used ([`used_bytes`](Self::used_bytes)) if the
    /// heap were compacted completely. Evictions compare this value with the watermark, so that
    /// they do not evict more pages than necessary.
    fn used_compacted_bytes(&self) -> u64 {
        let spare_bytes = self.store.heap.spare_bytes();
        self.used_bytes().saturating_sub(spare_bytes)
    }

    /// Returns whether compaction alone, without evictions, frees memory up to the high watermark.
    fn compaction_suffices(&self, high_bytes: u64) -> bool {
        self.used_compacted_bytes().saturating_add(high_bytes) <= self.size_bytes.get()
    }

    /// Returns whether [`reclaim_to_watermark`](Self::reclaim_to_watermark) would free memory now.
    fn may_reclaim_to_watermark(&self) -> bool {
        self.update_watermark().is_some_and(|high_bytes| {
            match self.compaction_suffices(high_bytes) {
                true => self.store.heap.has_spare(),
                false => {
                    let may_lose = |tenant: &TenantShared| {
                        tenant.charged_bytes.get() > 0 && tenant.excess_bytes() > 0
                    };
                    self.any_tenant_has_detached() || self.any_member(may_lose)
                }
            }
        })
    }

    /// Does one step of freeing memory for future puts. The step compacts the heap if that frees
    /// enough. Otherwise it frees detached pages, and then evicts pages, but only of tenants above
    /// their entitlement, because no tenant needs the memory yet. Returns the number of steps. 0
    /// means that enough memory is free, or that no page may be evicted.
    fn reclaim_to_watermark(&self, pages: usize) -> usize {
        let Some(high_bytes) = self.update_watermark() else {
            return 0;
        };
        match self.compaction_suffices(high_bytes) {
            true => self.compact(pages),
            false => self.evict_excess(pages),
        }
    }

    /// Frees as much memory for future puts as `finalized` raw pages take, if background work
    /// should evict pages now. A background worker calls this function after it has finalized that
    /// many pages. So puts cannot take memory faster than background work frees it, whatever other
    /// work there is. Frees detached pages first, and then evicts only pages of tenants above their
    /// entitlement. It frees and evicts at most as many pages as puts of `finalized` pages may evict
    /// themselves. Returns the number of steps done.
    fn reclaim_for_finalized(&self, finalized: usize) -> usize {
        let Some(high_bytes) = self.update_watermark() else {
            return 0;
        };
        let share_bytes = (finalized * PAGE_SIZE) as u64;
        let enough_bytes = self.size_bytes.get().saturating_sub(high_bytes);
        let least_bytes = self.used_compacted_bytes().saturating_sub(share_bytes);
        let target_bytes = enough_bytes.max(least_bytes);
        let mut steps = 0;
        while steps < finalized * EVICTIONS_PER_PUT_PAGE
            && self.used_compacted_bytes() > target_bytes
        {
            let done = self.evict_excess(finalized);
            if done == 0 {
                break;
            }
            steps += done;
        }
        // Evictions leave unused slots between stored pages, but a put needs a whole frame for each
        // page. So also compact the heap, if compaction can free a frame for each of the finalized
        // pages.
        if self.store.heap.spare_bytes() >= share_bytes {
            steps += self.compact(2 * finalized);
        }
        steps
    }

    // ---- idle frames --------------------------------------------------------------------------

    /// Returns the number of idle frames (of 4 KiB, unused, but with memory) that the pool keeps
    /// for new pages now. The number follows from the pool's present size. The pool's largest size
    /// is unsuitable, because it may be the size of the host's memory. The number is smaller if the
    /// pool holds more memory than its size, or if frames are left to return after a sweep.
    fn idle_frames_kept(&self) -> u64 {
        let size_bytes = self.size_bytes.get();
        let over_bytes = self.held_bytes().saturating_sub(size_bytes);
        let over = over_bytes.div_ceil(FRAME_BYTES as u64);
        let gone = over.max(self.background.idle_due.load(Relaxed));
        let stay = self.store.heap.idle_frames().saturating_sub(gone);
        heap::idle_frames(size_bytes).min(stay)
    }

    /// Gives idle frames back to the system: those that the pool does not keep, but at most one
    /// batch in each call. Returns the number of frames given back.
    fn release_idle_frames(&self) -> usize {
        let released = self.store.heap.release_idle_above(self.idle_frames_kept());
        let due = self.background.idle_due.load(Relaxed);
        if due > 0 {
            // As long as frames have to be returned after a sweep, the pool does not keep all idle
            // frames. So if the heap released no frame, no frame is idle any more, and nothing
            // is left to return.
            let left = if released == 0 {
                0
            } else {
                due.saturating_sub(released)
            };
            self.background.idle_due.store(left, Relaxed);
        }
        released as usize
    }
}
