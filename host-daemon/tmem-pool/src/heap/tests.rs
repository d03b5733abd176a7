// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the heap: random operations compared with a model of its contents, and threads that
//! read during compaction.

use super::area::IDLE;
use super::class::HEADER_BYTES;
use super::spans::{RELEASE_FRAMES_MAX, RELEASE_SPANS_MAX};
use super::*;
use crate::fail;
use crate::tests::rng::{Rng, for_each_seed};
use std::sync::atomic::AtomicBool;

const BYTES_MAX: u64 = if cfg!(miri) { 1 << 20 } else { 64 << 20 };

/// Returns `len` bytes, each of which depends on `id` and on its position.
fn bytes_of(id: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (i % 8 * 8)) as u8 ^ i as u8)
        .collect()
}

fn len_of(rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => PAGE_SIZE,
        1 => 1 + rng.below(64) as usize,
        _ => 1 + rng.below(3840) as usize,
    }
}

impl<X: Zeroed> Heap<X> {
    /// Panics while this thread holds the lock of a size class, as a bug could.
    pub(crate) fn panic_under_a_lock(&self) {
        let _state = self.lock(0);
        panic!("the test causes this panic under a lock of the heap on purpose");
    }

    /// Recounts the heap's sums and lists, and asserts that they are right and that exactly `live`
    /// slots are used. No other thread may be using the heap.
    pub(crate) fn check(&self, live: usize) {
        let (mut used, mut frames, mut spans, mut spare) = (0, 0, 0, 0);
        let (mut used_handles, mut not_used) = (Vec::new(), Vec::new());
        for nr in 0..self.classes.len() as u8 {
            let state = self.lock(nr);
            let mut partly = 0;
            for (group, &head) in state.heads.iter().enumerate() {
                let (mut at, mut prev) = (head, 0);
                while at != 0 {
                    let s = self.span(&state.class, at);
                    assert_eq!(
                        s.prev.get(),
                        prev,
                        "span {at} does not link back to the span before it in its list"
                    );
                    assert_eq!(
                        state.group(s.nr_used()),
                        Some(group),
                        "span {at} is in another list than its number of used slots requires"
                    );
                    for slot in s.used_slots() {
                        let handle = self.header(&state.class, at, slot).load(Relaxed);
                        used_handles.push(handle);
                        let word = self.word(handle).load(Relaxed);
                        let place = Place::of(word);
                        assert_eq!(
                            word & PINS,
                            0,
                            "the blob in slot {slot} of span {at} has readers, although no thread \
                             uses the heap"
                        );
                        assert_eq!(
                            (self.class_of(place), place.span, place.slot),
                            (state.class, at, slot),
                            "the handle in the header of slot {slot} of span {at} is wrong"
                        );
                    }
                    let free = |slot: &u8| s.used.get() >> slot & 1 == 0;
                    for slot in (0..state.class.slots).filter(free) {
                        let slot_at = self.slot_at(&state.class, at, slot);
                        let step = if cfg!(miri) { 61 } else { 1 };
                        for i in (0..usize::from(state.class.slot_bytes)).step_by(step) {
                            // SAFETY: the address is in the slot, and no other call is running.
                            let byte = unsafe { slot_at.add(i).read() };
                            assert_eq!(
                                byte, 0,
                                "byte {i} of free slot {slot} of span {at} is not zero"
                            );
                        }
                    }
                    partly += u32::from(s.nr_used());
                    (prev, at) = (at, s.next.get());
                }
            }
            assert_eq!(
                (state.used_slots - partly) % u32::from(state.class.slots),
                0
            );
            assert_eq!(
                state.spare_spans,
                state.spare_spans_now(),
                "size class {nr} counts another number of spare spans than it has"
            );
            spare += u64::from(state.spare_spans) * u64::from(state.class.frames);
            used += state.used_slots;
            spans += state.spans;
        }
        assert_eq!(
            used as usize, live,
            "the number of used slots differs from the number of live blobs"
        );
        assert_eq!(
            self.spare_bytes(),
            spare * FRAME_BYTES as u64,
            "the heap's sum of spare bytes differs from the recount"
        );
        let mut handles = live;
        for nr in 0..self.classes.len() as u8 {
            let free = &self.lock(nr).free_handles;
            handles += free.all().len();
            not_used.extend(free.all());
        }
        let spare_handles = self.spare_handles.all();
        handles += spare_handles.len();
        not_used.extend(spare_handles);
        let nr_not_used = not_used.len();
        not_used.sort_unstable();
        not_used.dedup();
        assert_eq!(
            not_used.len(),
            nr_not_used,
            "a handle occurs twice among the free and spare handles"
        );
        for handle in used_handles {
            assert!(
                not_used.binary_search(&handle).is_err(),
                "handle {handle} is free or spare, and a slot names it"
            );
        }
        assert_eq!(
            handles + 1,
            self.places() as usize,
            "the used, free and spare handles do not add up to the number of all handles of the \
             heap"
        );
        let free = self
            .free_spans
            .lock()
            .expect("another thread panicked while it held a lock of the heap");
        let (mut listed, mut fresh, mut idle_frames, mut bare_frames) = (spans, 0, 0, 0);
        for (length, area) in (1..).zip(&self.areas) {
            let mut at = free.idle[length - 1];
            while at != 0 {
                listed += 1;
                idle_frames += length as u64;
                let s = area.span(at);
                assert_eq!((s.prev.get(), s.used.get()), (IDLE, 0));
                // Miri takes a second for each MiB, so check only one byte in 61 there.
                let step = if cfg!(miri) { 61 } else { 1 };
                for i in (0..length * FRAME_BYTES).step_by(step) {
                    // SAFETY: the address is in the region, and no other call is running.
                    let byte = unsafe { area.at(at, i).read() };
                    assert_eq!(byte, 0, "byte {i} of idle span {at} is not zero");
                }
                at = s.next.get();
            }
            let mut at = free.bare[length - 1];
            while at != 0 {
                listed += 1;
                bare_frames += length as u64;
                assert_eq!(area.span(at).used.get(), 0);
                at = area.span(at).next.get();
            }
            let end = area.fresh.load(Relaxed) as u32;
            fresh += end - 1;
            frames += u64::from(end - 1) * length as u64;
        }
        assert_eq!(
            self.sums.idle_frames.load(Relaxed),
            idle_frames,
            "the heap's sum of idle frames differs from the recount"
        );
        assert_eq!(
            listed, fresh,
            "the spans of classes, the idle spans and the bare spans do not add up to the number of all spans"
        );
        assert_eq!(
            self.sums.frames.load(Relaxed),
            frames - bare_frames,
            "the heap's sum of frames differs from the recount"
        );
    }
}

#[test]
fn heap_blobs_read_back_unchanged() {
    let (seeds, steps) = if cfg!(miri) { (1, 300) } else { (16, 20_000) };
    for_each_seed("heap", seeds, |seed| {
        let mut rng = Rng::new(seed);
        let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
        let mut live: Vec<(Handle, u64, usize)> = Vec::new();
        let max = [BYTES_MAX, BYTES_MAX / 16, 1 << 16][rng.below(3) as usize];
        let mut refused = 0;
        for id in 0..steps {
            // The heap grows for 2,000 steps and shrinks for the next 2,000 steps, again and again.
            let store = rng.below(10) < if id / 2000 % 2 == 0 { 7 } else { 3 };
            if store {
                let len = len_of(&mut rng);
                match heap.store(&bytes_of(id, len), max) {
                    Some(handle) => live.push((handle, id, len)),
                    None => refused += 1,
                }
            } else if !live.is_empty() {
                let at = rng.below(live.len() as u64) as usize;
                let (handle, id, len) = live.swap_remove(at);
                heap.read(handle, |bytes| assert_eq!(bytes, bytes_of(id, len)));
                heap.free(handle);
            }
            if rng.one_in(8) && !live.is_empty() {
                let at = rng.below(live.len() as u64) as usize;
                let (handle, new_len) = (live[at].0, len_of(&mut rng));
                if heap.replace(handle, &bytes_of(id, new_len), max) {
                    (live[at].1, live[at].2) = (id, new_len);
                }
            }
            if rng.one_in(500) {
                heap.compact(rng.below(2000) as usize);
                if rng.one_in(4) {
                    heap.release_idle();
                }
                heap.check(live.len());
            }
            assert!(heap.stats().frames_bytes <= max);
        }
        for (handle, id, len) in &live {
            assert_eq!(heap.len(*handle), *len);
            heap.read(*handle, |bytes| assert_eq!(bytes, bytes_of(*id, *len)));
        }
        let payload: usize = live.iter().map(|(_, _, len)| len).sum();
        assert_eq!(heap.stats().payload_bytes, payload as u64);
        while heap.compact(1000) > 0 {}
        assert_eq!(
            heap.spare_bytes(),
            0,
            "compaction left spare bytes although no reader held a blob"
        );
        heap.check(live.len());
        println!(
            "the heap refused to store {refused} blobs; {} blobs are stored; {:?}",
            live.len(),
            heap.stats()
        );
        for (handle, id, len) in live {
            heap.read(handle, |bytes| assert_eq!(bytes, bytes_of(id, len)));
            heap.free(handle);
        }
        heap.release_idle();
        heap.check(0);
        assert_eq!(
            heap.stats().frames_bytes,
            0,
            "the heap keeps frames although it is empty"
        );
    });
}

#[test]
#[cfg_attr(miri, ignore = "needs too many handles for miri")]
fn freed_handles_are_reused_for_blobs_of_other_lengths() {
    const BYTES: u64 = 1 << 20;
    let heap = Heap::<()>::new(BYTES).expect("cannot reserve address space for the heap");
    let bytes = [1; PAGE_SIZE];
    // Fill all memory with blobs of one length, free them, and continue with the next length. In
    // total, this stores more than twice as many blobs as there are handles.
    let (mut stored, mut seen) = (0, 0);
    for len in (300..PAGE_SIZE).rev().step_by(16) {
        let store = || heap.store(&bytes[..len], BYTES);
        let live: Vec<Handle> = std::iter::from_fn(store).collect();
        let least = BYTES as usize * 8 / 10 / (len + HEADER_BYTES).next_multiple_of(16);
        assert!(
            live.len() >= least,
            "the heap stores only {} blobs of {len} B, fewer than {least}",
            live.len()
        );
        stored += live.len();
        seen = seen.max(live.len());
        live.into_iter().for_each(|handle| heap.free(handle));
        heap.check(0);
    }
    println!(
        "stored and freed {stored} blobs, with only {} handles",
        heap.places()
    );
    assert!(stored > 2 * heap.handles_max());
    // Each size class may keep almost twice HANDLES_STEP free handles.
    let kept = heap.classes.len() * 2 * HANDLES_STEP;
    assert!(heap.places() as usize <= seen + kept);
}

#[test]
#[cfg_attr(miri, ignore = "needs too many handles for miri")]
fn storing_a_blob_fails_if_no_handle_is_free() {
    const BYTES: u64 = 1 << 20;
    let heap = Heap::<()>::new(BYTES).expect("cannot reserve address space for the heap");
    // Store blobs of one byte. The memory suffices for more of them than there are handles.
    let store = || heap.store(&[1], BYTES);
    let live: Vec<Handle> = std::iter::from_fn(store).collect();
    let max = heap.handles_max();
    assert!(heap.frames_bytes() < BYTES && live.len() < max);
    assert!(
        live.len() > max - 2 * HANDLES_STEP,
        "only {} blobs were stored, although there are {max} handles",
        live.len()
    );
    heap.check(live.len());
    assert_eq!(heap.store(&[1; 2000], BYTES), None);
    for handle in live {
        heap.free(handle);
    }
    heap.store(&[1; 2000], BYTES)
        .expect("the heap has no memory for the blob");
    heap.check(1);
}

#[test]
fn reserved_pages_can_be_filled_and_freed_in_batches() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let page_of = |id| -> Page {
        bytes_of(id, PAGE_SIZE)
            .try_into()
            .expect("the generated bytes are not as long as a page")
    };
    // Allow memory for only 40 of the 64 pages.
    let mut handles = [Handle(0); 64];
    let nr = heap.reserve_pages(&mut handles, 40 * FRAME_BYTES as u64);
    assert_eq!(nr, 40);
    let handles = &handles[..nr];
    for (id, &handle) in handles.iter().enumerate() {
        let copy = |frame: &mut Page| {
            *frame = page_of(id as u64);
            true
        };
        assert_eq!(
            heap.fill(handle, copy, |copy| *copy),
            Some(page_of(id as u64))
        );
    }
    heap.check(nr);
    for (id, &handle) in handles.iter().enumerate() {
        assert!(heap.is_page(handle));
        heap.read(handle, |bytes| assert_eq!(bytes, page_of(id as u64)));
    }
    let (freed, kept) = handles.split_at(25);
    heap.free_pages(freed);
    heap.check(kept.len());
    for (id, &handle) in kept.iter().enumerate() {
        heap.read(handle, |bytes| assert_eq!(bytes, page_of(id as u64 + 25)));
    }
    heap.free_pages(kept);
    // `check` also asserts that all freed frames are zero.
    heap.check(0);
}

/// Lets the memory for frames or handles run out while pages are reserved. All spans without a
/// handle must be free again.
#[test]
fn pages_that_cannot_be_reserved_leave_no_span_behind() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let (mut reserved_all, mut reserved_some) = (0, 0);
    for seed in 0..40 {
        let mut handles = [Handle(0); 150];
        fail::one_in(60, seed);
        let nr = heap.reserve_pages(&mut handles, BYTES_MAX);
        fail::one_in(0, 0);
        heap.check(nr);
        if nr == handles.len() {
            reserved_all += 1;
        } else if nr > 0 {
            reserved_some += 1;
        }
        heap.free_pages(&handles[..nr]);
        heap.check(0);
        if seed % 8 == 0 {
            heap.release_idle();
        }
    }
    assert!(
        reserved_all > 0 && reserved_some > 0,
        "the test is too weak: all pages were reserved {reserved_all} times, some {reserved_some} \
         times"
    );
}

#[test]
fn a_reserved_page_that_is_not_filled_can_be_freed() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let mut handles = [Handle(0); 2];
    assert_eq!(heap.reserve_pages(&mut handles, BYTES_MAX), 2);
    // The copy of the first page fails after half of the page. The second page is never copied.
    let copy = |frame: &mut Page| {
        frame[..PAGE_SIZE / 2].fill(7);
        false
    };
    let read = |_: &Page| panic!("the heap read a page whose copy had failed");
    assert_eq!(heap.fill(handles[0], copy, read), None);
    handles.iter().for_each(|&handle| heap.free(handle));
    // `check` also asserts that all freed frames are zero.
    heap.check(0);
}

#[test]
fn compaction_does_not_move_a_slot_before_it_is_written() {
    const LEN: usize = 1000;
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let store = |id| {
        let handle = heap.store(&bytes_of(id, LEN), BYTES_MAX);
        handle.expect("the heap has no memory for the blob")
    };
    let live: Vec<Handle> = (0..200).map(store).collect();
    let reserved = heap
        .reserve(LEN, BYTES_MAX)
        .expect("the heap has no memory for the blob");
    // Free nine of ten slots, so that compaction tries to empty nearly all spans.
    let (kept, freed): (Vec<_>, Vec<_>) = live
        .into_iter()
        .enumerate()
        .partition(|(nr, _)| nr % 10 == 0);
    freed.into_iter().for_each(|(_, handle)| heap.free(handle));
    assert!(heap.has_spare());
    let place = Place::of(heap.word(reserved.0).load(Relaxed));
    while heap.compact(64) > 0 {}
    assert_eq!(Place::of(heap.word(reserved.0).load(Relaxed)), place);
    heap.write(reserved, &bytes_of(1000, LEN));
    heap.read(reserved, |bytes| assert_eq!(bytes, bytes_of(1000, LEN)));
    heap.free(reserved);
    for (id, handle) in kept {
        heap.read(handle, |bytes| assert_eq!(bytes, bytes_of(id as u64, LEN)));
        heap.free(handle);
    }
    heap.check(0);
}

/// Replaces a blob's bytes by bytes of another length, and compacts the heap before the new bytes
/// are published. The old and the new span have the same number in different areas, and the slots
/// have the same number, too.
#[test]
fn compaction_does_not_confuse_spans_of_equal_number() {
    const LEN: usize = 1000;
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let store = |id, len| {
        let handle = heap.store(&bytes_of(id, len), BYTES_MAX);
        handle.expect("the heap has no memory for the blob")
    };
    let place_of = |Handle(handle): Handle| Place::of(heap.word(handle).load(Relaxed));
    let frames_of = |len| heap.classes.get(heap.classes.for_len(len)).frames;
    let other_len = (1200..3800).find(|&len| frames_of(len) != frames_of(LEN));
    let other_len = other_len.expect("all size classes have spans of the same length");
    let replaced = store(0, LEN);
    let (nr, old) = (heap.classes.for_len(other_len), place_of(replaced));
    let mut state = heap.lock(nr);
    let (span, slot) = heap
        .take_slot(&mut state, BYTES_MAX, &mut { RELEASE_FRAMES_MAX })
        .expect("the heap has no memory for the blob");
    assert_eq!((span, slot), (old.span, old.slot));
    heap.set_header(&state.class, span, slot, replaced.0);
    drop(state);
    // Fill three spans of the new length. Then free all blobs of the first two spans, and one of the
    // third span, so that compaction tries to move the new slot to the third span.
    let slots = usize::from(heap.classes.get(nr).slots);
    let others = (1..3 * slots).map(|id| store(id as u64, other_len));
    let others: Vec<Handle> = others.collect();
    let (freed, kept) = others.split_at(2 * slots);
    freed.iter().for_each(|&handle| heap.free(handle));
    assert!(heap.has_spare());
    while heap.compact(64) > 0 {}
    assert_eq!(place_of(replaced), old);
    heap.read(replaced, |bytes| assert_eq!(bytes, bytes_of(0, LEN)));
    // Give the slot back, as after a replacement that failed.
    let new = Place {
        span,
        slot,
        len: other_len,
    };
    heap.lock(nr).payload_bytes += other_len as u64;
    drop(heap.free_place(new));
    heap.free(replaced);
    kept.iter().for_each(|&handle| heap.free(handle));
    heap.check(0);
}

#[test]
fn storing_a_blob_releases_a_bounded_number_of_idle_frames() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let page = [1; PAGE_SIZE];
    let nr = if cfg!(miri) { 100 } else { 1000 };
    let store = || {
        heap.store(&page, BYTES_MAX)
            .expect("the heap has no memory for the blob")
    };
    let live: Vec<Handle> = (0..nr).map(|_| store()).collect();
    live.into_iter().for_each(|handle| heap.free(handle));
    // Lower the limit of the heap's memory, as if the pool was shrunk.
    let most = 8 * FRAME_BYTES as u64;
    let small = heap
        .store(&page[..100], most)
        .expect("the heap has no memory for the blob");
    let left = heap.stats().frames_bytes / FRAME_BYTES as u64;
    assert!(
        left < nr && left >= nr - RELEASE_FRAMES_MAX as u64 - 16,
        "storing one blob released no idle frame or too many: {left} of {nr} are left"
    );
    heap.free(small);
    heap.release_idle();
    heap.check(0);
}

#[test]
fn reserving_pages_releases_a_bounded_number_of_idle_frames() {
    const NR: u64 = 1000;
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    // Try idle spans of one frame, which a page can use, and longer ones, which it cannot use.
    for len in [PAGE_SIZE, 600] {
        let bytes = vec![1; len];
        let frames = || heap.stats().frames_bytes / FRAME_BYTES as u64;
        let mut live = Vec::new();
        while frames() < NR {
            live.push(
                heap.store(&bytes, BYTES_MAX)
                    .expect("the heap has no memory for the blob"),
            );
        }
        live.into_iter().for_each(|handle| heap.free(handle));
        let before = frames();
        // Lower the limit of the heap's memory, as if the pool was shrunk.
        let most = 80 * FRAME_BYTES as u64;
        let mut pages = [Handle(0); 64];
        assert_eq!(heap.reserve_pages(&mut pages, most), pages.len());
        let left = frames();
        assert!(
            left < before && left >= before - RELEASE_FRAMES_MAX as u64 - 16,
            "reserving 64 pages released no idle frame of blobs of {len} B or too many: {left} of \
             {before} are left"
        );
        for page in pages {
            heap.write(page, &[1; PAGE_SIZE]);
            heap.free(page);
        }
        heap.release_idle();
        heap.check(0);
    }
}

#[test]
fn storing_a_blob_releases_idle_frames_above_a_lowered_limit() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let page = [1; PAGE_SIZE];
    let store = |max| {
        heap.store(&page, max)
            .expect("the heap has no memory for the blob")
    };
    let mut live: Vec<Handle> = (0..40).map(|_| store(BYTES_MAX)).collect();
    live.drain(10..).for_each(|handle| heap.free(handle));
    let max = 20 * FRAME_BYTES as u64;
    live.push(store(max));
    assert_eq!(heap.stats().frames_bytes, max);
    heap.check(live.len());
}

#[test]
fn trimming_releases_idle_frames_and_keeps_adjacent_used_frames() {
    const STAY: u64 = 10;
    let nr = if cfg!(miri) { 60 } else { 3000 };
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let store = |id| {
        let page = bytes_of(id, PAGE_SIZE);
        (
            id,
            heap.store(&page, BYTES_MAX)
                .expect("the heap has no memory for the blob"),
        )
    };
    let (gone, live): (Vec<_>, Vec<_>) = (0..nr).map(store).partition(|(id, _)| id % 5 != 0);
    assert_eq!(heap.idle_excess(STAY), 0);
    for (_, handle) in &gone {
        heap.free(*handle);
    }
    assert_eq!(heap.idle_excess(STAY), gone.len() as u64 - STAY);
    let mut steps = 0;
    while heap.release_idle_above(STAY) > 0 {
        steps += 1;
    }
    assert_eq!(heap.idle_excess(STAY), 0);
    let frames = heap.stats().frames_bytes / FRAME_BYTES as u64;
    assert_eq!(frames, live.len() as u64 + STAY);
    let excess = gone.len() - STAY as usize;
    assert_eq!(steps, excess.div_ceil(RELEASE_SPANS_MAX));
    for &(id, handle) in &live {
        heap.read(handle, |bytes| assert_eq!(bytes, bytes_of(id, PAGE_SIZE)));
    }
    heap.check(live.len());
}

#[test]
fn reads_are_correct_during_compaction() {
    let steps = if cfg!(miri) { 40 } else { 20_000 };
    // On a busy machine, the thread that compacts may run seldom. The others go on for this many
    // times as many steps until it has moved a blob.
    let times_max = if cfg!(miri) { 1 } else { 50 };
    for_each_seed("heap-threads", if cfg!(miri) { 1 } else { 4 }, |seed| {
        let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
        let (over, moved) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..3)
                .map(|worker| {
                    let (heap, moved) = (&heap, &moved);
                    let mut rng = Rng::new(seed * 8 + worker);
                    scope.spawn(move || {
                        let mut live: Vec<(Handle, u64, usize)> = Vec::new();
                        for step in 0..steps * times_max {
                            if step >= steps && moved.load(Relaxed) {
                                break;
                            }
                            let id = worker << 32 | step;
                            let len = len_of(&mut rng).min(200) + 2000 * (id as usize % 2);
                            if live.len() < 30 || rng.one_in(2) {
                                let handle = heap.store(&bytes_of(id, len), BYTES_MAX);
                                live.push((
                                    handle.expect("the heap has no memory for the blob"),
                                    id,
                                    len,
                                ));
                            } else {
                                let at = rng.below(live.len() as u64) as usize;
                                let (handle, id, len) = live.swap_remove(at);
                                heap.read(handle, |b| assert_eq!(b, bytes_of(id, len)));
                                heap.free(handle);
                            }
                            if !live.is_empty() {
                                let at = rng.below(live.len() as u64) as usize;
                                if rng.one_in(3) {
                                    let len = len_of(&mut rng).min(200);
                                    let bytes = bytes_of(live[at].1, len);
                                    // The replacement must succeed: no other thread reads the
                                    // bytes, and compaction is not counted as a reader of them.
                                    assert!(heap.replace(live[at].0, &bytes, BYTES_MAX));
                                    live[at].2 = len;
                                }
                                let (handle, id, len) = &live[at];
                                heap.read(*handle, |b| assert_eq!(b, bytes_of(*id, *len)));
                            }
                        }
                        for (handle, id, len) in live {
                            heap.read(handle, |b| assert_eq!(b, bytes_of(id, len)));
                            heap.free(handle);
                        }
                    })
                })
                .collect();
            let compactor = scope.spawn(|| {
                while !over.load(Relaxed) {
                    if heap.compact(16) > 0 {
                        moved.store(true, Relaxed);
                    }
                    std::thread::yield_now();
                }
            });
            for worker in workers {
                worker
                    .join()
                    .expect("a thread that stores and reads blobs panicked");
            }
            over.store(true, Relaxed);
            compactor
                .join()
                .expect("the thread that compacts the heap panicked");
            assert!(
                cfg!(miri) || moved.load(Relaxed),
                "compaction moved no blob during the test"
            );
        });
        heap.check(0);
    });
}

/// Two threads reserve and fill raw pages, and a third one frees them, while a fourth one stores blobs
/// and returns idle frames to the system. The records of the spans of raw pages pass from thread to
/// thread without a lock of the heap.
#[test]
fn raw_pages_pass_between_threads() {
    const PRODUCERS: u64 = 2;
    let groups = if cfg!(miri) { 4 } else { 2_000 };
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let (sender, receiver) = std::sync::mpsc::channel::<(u64, Vec<Handle>)>();
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let (heap, sender) = (&heap, sender.clone());
            scope.spawn(move || {
                for group in 0..groups {
                    let id = producer << 32 | group;
                    let mut handles = vec![Handle(0); 1 + group as usize % 20];
                    let nr = heap.reserve_pages(&mut handles, BYTES_MAX / 2);
                    handles.truncate(nr);
                    for &handle in &handles {
                        let fill = |frame: &mut Page| {
                            frame.fill(id as u8);
                            true
                        };
                        assert!(heap.fill(handle, fill, |_| ()).is_some());
                    }
                    sender
                        .send((id, handles))
                        .expect("the thread that frees pages has ended");
                }
            });
        }
        drop(sender);
        let heap = &heap;
        scope.spawn(move || {
            let mut rng = Rng::new(1);
            for _ in 0..PRODUCERS * groups {
                let bytes = bytes_of(rng.below(1 << 20), len_of(&mut rng));
                if let Some(handle) = heap.store(&bytes, BYTES_MAX / 2) {
                    heap.read(handle, |read| assert_eq!(read, bytes));
                    heap.free(handle);
                }
                heap.release_idle();
            }
        });
        let mut pages = 0;
        for (id, handles) in receiver {
            for &handle in &handles {
                heap.read(handle, |page| assert!(page.iter().all(|&b| b == id as u8)));
            }
            pages += handles.len();
            heap.free_pages(&handles);
        }
        assert!(pages > 0, "the test is too weak: no page was reserved");
    });
    heap.check(0);
}

#[test]
fn heap_waste_is_bounded_after_churn_and_mass_deletion() {
    // Returns a random length of a stored page in bytes. The distribution was measured for real
    // pages after lz4 compression.
    fn len(rng: &mut Rng) -> usize {
        let (low, high) = match rng.below(100) {
            0..11 => (200, 1024),
            11..46 => (1024, 2048),
            46..78 => (2048, 3072),
            78..94 => (3072, 3840),
            _ => return PAGE_SIZE,
        };
        (low + rng.below(high - low)) as usize
    }
    let blobs = if cfg!(miri) { 100 } else { 32_768 };
    let heap = Heap::<()>::new(512 << 20).expect("cannot reserve address space for the heap");
    let mut rng = Rng::new(1);
    let bytes = vec![1; PAGE_SIZE];
    let store = |rng: &mut Rng| {
        heap.store(&bytes[..len(rng)], 512 << 20)
            .expect("the heap has no memory for the blob")
    };
    let mut live: Vec<Handle> = (0..blobs).map(|_| store(&mut rng)).collect();
    let ratio = || {
        let stats = heap.stats();
        stats.payload_bytes as f64 / heap.busy_bytes() as f64
    };
    let filled = ratio();
    for _ in 0..8 * blobs {
        let at = rng.below(blobs) as usize;
        let new = store(&mut rng);
        heap.free(std::mem::replace(&mut live[at], new));
        if rng.one_in(1000) {
            heap.compact(100);
        }
    }
    let churned = ratio();
    while heap.compact(1000) > 0 {}
    heap.release_idle();
    let compacted = ratio();
    for handle in live.split_off(blobs as usize / 2) {
        heap.free(handle);
    }
    let halved = ratio();
    while heap.compact(1000) > 0 {}
    heap.release_idle();
    println!(
        "payload / memory: filled {filled:.3}, after churn {churned:.3} (compacted {compacted:.3}), \
         after deleting half {halved:.3}, compacted {:.3}",
        ratio()
    );
    if !cfg!(miri) {
        assert!(churned >= 0.94 && ratio() >= 0.94);
    }
    for handle in live {
        heap.free(handle);
    }
}

/// Opens PINS_MAX readers of a blob. Asserts that their number does not overflow into other fields
/// of the blob's word.
#[test]
#[cfg(not(miri))]
fn a_blob_can_have_the_maximum_number_of_readers() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let handle = heap
        .store(b"bytes", BYTES_MAX)
        .expect("the heap has no memory for the blob");
    let readers: Vec<_> = (0..PINS_MAX).map(|_| heap.reader(handle)).collect();
    assert_eq!(heap.len(handle), 5);
    assert!(readers.iter().all(|reader| reader.bytes() == b"bytes"));
    drop(readers);
    heap.free(handle);
    heap.check(0);
}

#[test]
#[ignore = "ends its process: see too_many_readers_of_a_blob_abort_the_process"]
fn exceeding_the_maximum_number_of_readers_of_a_blob_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let handle = heap
        .store(b"bytes", BYTES_MAX)
        .expect("the heap has no memory for the blob");
    (0..=PINS_MAX).for_each(|_| std::mem::forget(heap.reader(handle)));
}

#[test]
#[cfg(not(miri))]
fn too_many_readers_of_a_blob_abort_the_process() {
    crate::tests::aborts("heap::tests::exceeding_the_maximum_number_of_readers_of_a_blob_aborts");
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn releasing_a_circular_list_of_idle_spans_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let page = [1; PAGE_SIZE];
    let handles = [(); 2].map(|()| {
        heap.store(&page, BYTES_MAX)
            .expect("the heap has no memory for the blob")
    });
    handles.into_iter().for_each(|handle| heap.free(handle));
    let first = heap
        .free_spans
        .lock()
        .expect("another thread panicked while it held a lock of the heap")
        .idle[0];
    heap.area(1).span(first).next.set(first);
    heap.release_idle();
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn taking_spans_from_a_circular_list_of_bare_spans_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let bytes = [1; PAGE_SIZE];
    let store = |len: usize| heap.store(&bytes[..len], BYTES_MAX);
    // Use two size classes, which would both use free slots of the span.
    let class_of = |len: usize| heap.classes.get(heap.classes.for_len(len));
    let mut lens = (100..2000).filter(|&len| class_of(len).frames == 1);
    let one = lens.next().expect("no size class has spans of one frame");
    let other = lens.find(|&len| class_of(len) != class_of(one));
    let other = other.expect("only one size class has spans of one frame");
    heap.free(store(one).expect("the heap has no memory for the blob"));
    heap.release_idle();
    let first = heap
        .free_spans
        .lock()
        .expect("another thread panicked while it held a lock of the heap")
        .bare[0];
    assert_ne!(first, 0);
    heap.area(1).span(first).next.set(first);
    let _ = [store(one), store(other)];
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn taking_a_slot_of_a_full_span_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let store = || heap.store(&[1; 2000], BYTES_MAX);
    let nr = heap.classes.for_len(2000);
    let blobs: Vec<_> = (0..heap.classes.get(nr).slots).map(|_| store()).collect();
    let first = blobs[0].expect("the heap has no memory for the blob");
    let full = Place::of(heap.word(first.0).load(Relaxed)).span;
    assert_eq!(heap.lock(nr).heads, [0; GROUPS]);
    heap.lock(nr).heads[0] = full;
    let _ = store();
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn freeing_a_slot_twice_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let [freed, _kept] = [(); 2].map(|()| {
        heap.store(&[1; 1000], BYTES_MAX)
            .expect("the heap has no memory for the blob")
    });
    let place = Place::of(heap.word(freed.0).load(Relaxed));
    drop(heap.free_place(place));
    drop(heap.free_place(place));
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn freeing_a_blob_in_a_span_missing_from_its_list_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let handle = heap
        .store(&[1; 2000], BYTES_MAX)
        .expect("the heap has no memory for the blob");
    let nr = heap.classes.for_len(2000);
    heap.lock(nr).heads = [0; GROUPS];
    heap.free(handle);
}

#[test]
#[ignore = "ends its process: see damaged_span_lists_abort_the_process"]
fn a_span_list_with_a_wrong_back_link_aborts() {
    let heap = Heap::<()>::new(BYTES_MAX).expect("cannot reserve address space for the heap");
    let nr = heap.classes.for_len(2000);
    // Prepare a list of two spans, each of which has a free slot.
    let mut handles: Vec<_> = (0..2 * SLOTS_MAX)
        .map(|_| {
            heap.store(&[1; 2000], BYTES_MAX)
                .expect("the heap has no memory for the blob")
        })
        .collect();
    let span_of = |handle: Handle| Place::of(heap.word(handle.0).load(Relaxed)).span;
    let first = span_of(handles[0]);
    let second = handles.iter().map(|&handle| span_of(handle));
    let second = second
        .into_iter()
        .find(|&span| span != first)
        .expect("all blobs are in one span, but the test needs two spans");
    for span in [first, second] {
        let at = handles.iter().position(|&handle| span_of(handle) == span);
        heap.free(handles.remove(at.expect("the span contains no blob of the test")));
    }
    assert!(heap.lock(nr).heads.contains(&second));
    let area = heap.area(heap.classes.get(nr).frames);
    assert_eq!(area.span(second).next.get(), first);
    area.span(first).prev.set(0);
    let at = handles.iter().position(|&handle| span_of(handle) == second);
    heap.free(handles.remove(at.expect("the span contains no blob of the test")));
}

#[test]
#[cfg(not(miri))]
fn damaged_span_lists_abort_the_process() {
    for name in [
        "releasing_a_circular_list_of_idle_spans_aborts",
        "taking_spans_from_a_circular_list_of_bare_spans_aborts",
        "taking_a_slot_of_a_full_span_aborts",
        "freeing_a_slot_twice_aborts",
        "freeing_a_blob_in_a_span_missing_from_its_list_aborts",
        "a_span_list_with_a_wrong_back_link_aborts",
    ] {
        crate::tests::aborts(&format!("heap::tests::{name}"));
    }
}
