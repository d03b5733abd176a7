// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the memory of a worker: it allocates nothing while it serves, and its buffers are not
//! in core dumps and keep no page of a private pool.

use super::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Allocator that counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed unchanged to the system's allocator. Counting allocates nothing,
// because the counter is initialized at compile time and needs no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller of `alloc` promises what the system's allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller of `dealloc` promises what the system's allocator requires.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn a_get_of_64_pages_allocates_no_memory() {
    for retain in [0, u64::MAX] {
        get_64_pages_without_allocation(retain);
    }
}

/// Sends a GET for 64 pages, some of which are raw, same-filled, compressed or missing. Checks that
/// the worker allocates no memory. If bit n of `retain` is set, the pool may retain page n.
fn get_64_pages_without_allocation(retain: u64) {
    let mut guest = guest();
    guest.accept_retain();
    for index in 0..48u64 {
        let mut page = [index as u8; PAGE_SIZE];
        if index % 2 == 0 {
            page[..8].copy_from_slice(&(index + 1).to_le_bytes());
        }
        guest.store(index, &page);
    }
    while guest.engine.maintain(tmem_pool::Time(0), 64) {}
    guest.put(48, 8);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    let stats = guest.link.vm.tenant.stats();
    assert_eq!((stats.nursery_pages, stats.same_filled_pages), (8, 24));
    let answer = guest.get_retaining(0, 64, retain);
    let before = ALLOCATIONS.get();
    let end = guest.run_slice();
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!((end, guest.used()), (SliceEnd::Idle, 2));
    let results = [&[wire::P_HIT; 56][..], &[wire::P_MISS; 8]].concat();
    assert_eq!(guest.results(answer, 64), results);
    let stayed = if retain == 0 { 0 } else { 56 };
    assert_eq!(guest.pages(), (stayed, stayed));
    assert!(
        guest.interrupted(),
        "the guest was not interrupted for the answer to its GET"
    );
}

/// The next GET may be shorter, so that it would not overwrite all pages of this one.
#[test]
fn worker_buffers_keep_no_page_of_a_private_pool() {
    for (private, kept) in [(true, 0), (false, 5)] {
        let mut guest = guest();
        let tenant = &guest.link.vm.tenant;
        if private {
            tenant.destroy_pool(1).expect("the pool does not exist");
            tenant.create_private_pool(1).expect("the pool exists");
        }
        guest.put(5, 3);
        let answer = guest.get(5, 3);
        guest.run_slice();
        assert_eq!(guest.results(answer, 3), [wire::P_HIT; 3]);
        let first = guest.scratch.pages.pages()[0];
        assert_eq!(first, [kept; PAGE_SIZE], "private: {private}");
    }
}

#[test]
fn worker_buffers_are_excluded_from_core_dumps() {
    let mut scratch = Scratch::new().expect("cannot map the worker's buffers");
    let buffers = [
        scratch.head.pages().as_ptr() as usize,
        scratch.pages.pages().as_ptr() as usize,
    ];
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("cannot read the file");
    let mut undumped = Vec::new();
    let mut range = 0..0;
    for line in smaps.lines() {
        let address = |text| usize::from_str_radix(text, 16).ok();
        let first = line.split(' ').next().unwrap_or_default().split_once('-');
        if let Some((Some(start), Some(end))) = first.map(|(a, b)| (address(a), address(b))) {
            range = start..end;
        } else if line.starts_with("VmFlags:") && line.contains(" dd") {
            undumped.push(range.clone());
        }
    }
    for buffer in buffers {
        let inside = undumped.iter().any(|range| range.contains(&buffer));
        assert!(
            inside,
            "the buffer at {buffer:#x} is in none of the mappings without core dump: {undumped:x?}"
        );
    }
}
