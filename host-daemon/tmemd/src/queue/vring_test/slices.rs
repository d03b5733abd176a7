// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of scheduling slices: the work in a slice is bounded, and work that is left continues in
//! the next slice.

use super::*;
use crate::queue::slice::SLICE_NS;

#[test]
fn one_slice_answers_a_bounded_number_of_puts() {
    let mut guest = guest();
    for index in 0..70 {
        guest.put(index, 1);
    }
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let answered = guest.used();
    assert!(
        (30..=66).contains(&answered),
        "one slice answered {answered} of 70 puts, not 30 to 66"
    );
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert_eq!(guest.used(), 70);
}

/// Maximum number of pages that a slice can drop. Dropping a page costs more than 250 ns.
const DROPPED_PER_SLICE_MAX: u64 = SLICE_NS / 250;

/// In this test, each chain flushes one range of many pages that have no stored bytes. Such pages
/// are the fastest to drop.
#[test]
fn flush_work_is_bounded_per_slice_over_many_chains() {
    const CHAINS: u64 = 64;
    const PAGES: u64 = 511;
    let mut guest = guest();
    for index in 0..CHAINS * PAGES {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    for chain in 0..CHAINS {
        guest.send(&flush(chain * PAGES, PAGES), 8);
    }
    let (mut held, mut slices) = (CHAINS * PAGES, 0);
    loop {
        let end = guest.run_slice();
        let now = guest.link.vm.tenant.stats().pages;
        assert!(
            held - now <= DROPPED_PER_SLICE_MAX,
            "one slice reduced {held} pages to {now}: it dropped more than {DROPPED_PER_SLICE_MAX}"
        );
        assert!(now < held, "a slice of the flush dropped no page");
        (held, slices) = (now, slices + 1);
        if end == SliceEnd::Idle {
            break;
        }
    }
    assert_eq!((held, u64::from(guest.used())), (0, CHAINS));
    assert!(slices >= CHAINS * PAGES / DROPPED_PER_SLICE_MAX);
}

/// The flush of a large range visits all keys that the pool samples to estimate how many hits
/// another amount of memory would give. This also costs time if the range contains no page.
#[test]
fn flush_work_on_ranges_without_pages_is_bounded_per_slice() {
    const STEP_NS_MIN: u64 = 1;
    let mut guest = guest();
    for index in 0..1000 {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    let range = wire::Range {
        object: 2.into(),
        index: 0.into(),
        nr_pages: 1000.into(),
    };
    let ranges = vec![range; wire::BATCH_MAX];
    let bytes = [
        req(wire::T_FLUSH, ranges.len()).as_bytes(),
        ranges.as_bytes(),
    ]
    .concat();
    for _ in 0..10 {
        guest.send(&bytes, 8);
    }
    let steps = |guest: &Guest| guest.link.vm.tenant.stats().gain_steps;
    let (mut before, mut slices) = (steps(&guest), 0);
    let all = before + 10 * 64 * 1000;
    while guest.used() < 10 {
        guest.run_slice();
        let now = steps(&guest);
        assert!(now > before, "a slice of the flush visited no page number");
        assert!(
            (now - before) * STEP_NS_MIN <= SLICE_NS / 2,
            "one slice visited page numbers {before} to {now}, more than half of its time allows"
        );
        (before, slices) = (now, slices + 1);
    }
    assert_eq!(
        before, all,
        "the flush did not visit each page number of its ranges exactly once"
    );
    assert!(
        slices >= 7,
        "the flush of all ranges took {slices} slices, expected at least 7"
    );
}

/// A GET of a batch of 64 pages in zstd form takes two slices, because decompressing them takes
/// longer than one slice.
#[test]
fn a_get_of_64_zstd_pages_takes_two_slices() {
    let mut guest = guest();
    let expected = guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::More, 0));
    let hits = guest.link.vm.tenant.stats().hits;
    assert!(
        (20..=33).contains(&hits),
        "one slice returned {hits} pages, not 20 to 33 (decompressing one page takes 6 µs)"
    );
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    assert_eq!(guest.bytes(answer, 1), [wire::S_OK]);
    assert_eq!(guest.results(answer, 64), [wire::P_HIT; 64]);
    let data = guest.bytes(answer + 8 + 64 * 16, 64 * PAGE_SIZE);
    assert!(
        data == expected.concat(),
        "the get returned a page that is missing, repeated or in the wrong place"
    );
    let length = guest.bytes(USED + 4 + 4, 4);
    assert_eq!(length, (8 + 64 * (16 + 4096) as u32).to_le_bytes());
}

/// A slice also ends when its time is over. Nevertheless, each slice makes progress, even if its
/// time is over when the slice begins.
#[test]
fn requests_of_each_type_resume_after_the_end_of_a_slice() {
    let mut guest = guest();
    guest.clock.step_ns.store(SLICE_NS, Ordering::Relaxed);
    let turns = |guest: &mut Guest, used: u16| {
        let mut turns = 0;
        while guest.used() < used {
            assert_ne!(
                guest.run_slice(),
                SliceEnd::Idle,
                "the queue became idle before {used} chains were answered"
            );
            turns += 1;
            assert!(turns < 100, "the chain was not answered after 100 slices");
        }
        turns
    };
    let put = guest.put(3, 64);
    assert!(turns(&mut guest, 1) > 5);
    assert_eq!(guest.bytes(put, 1), [wire::S_OK]);
    assert_eq!(guest.bytes(put + 8, 64), [wire::P_STORED; 64]);
    // Only the first 32 of the 64 pages from index 35 on are in the pool.
    let get = guest.get(35, 64);
    assert!(turns(&mut guest, 2) > 1);
    let results = [[wire::P_HIT; 32], [wire::P_MISS; 32]].concat();
    assert_eq!(guest.results(get, 64), results);
    for page in 0..32 {
        let data = guest.bytes(get + 8 + 64 * 16 + page * 4096, 4096);
        assert_eq!(data, [35 + page as u8; 4096]);
    }
    let length = guest.bytes(USED + 4 + 8 + 4, 4);
    let written = 8 + 64 * 16 + 32 * 4096u32;
    assert_eq!(
        length,
        written.to_le_bytes(),
        "the used length does not end after the last page that was found"
    );
    let ranges = [(3, 16), (19, 16)].map(|(index, nr_pages): (u64, u64)| wire::Range {
        object: 1.into(),
        index: index.into(),
        nr_pages: nr_pages.into(),
    });
    let flush = [req(wire::T_FLUSH, 2).as_bytes(), ranges.as_bytes()].concat();
    let flushed = guest.send(&flush, 8);
    assert!(turns(&mut guest, 3) > 1);
    assert_eq!(guest.bytes(flushed, 1), [wire::S_OK]);
    assert_eq!(guest.link.vm.tenant.stats().pages, 0);
}

/// A flush drops all pages in its range, possibly the complete pool. Other VMs, and a drain of the
/// queue, wait only until the current slice of the flush ends.
#[test]
fn a_large_flush_takes_many_slices() {
    let mut guest = guest();
    for index in 0..3000 {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    let flush = flush(1, wire::TO_END);
    let answer = guest.send(&flush, 8);
    let get = guest.get(5, 1);
    let mut held = 3000;
    let mut turns = 0;
    while guest.run_slice() == SliceEnd::More {
        turns += 1;
        let (before, now) = (held, guest.link.vm.tenant.stats().pages);
        assert!(
            now < before && before - now <= DROPPED_PER_SLICE_MAX,
            "one slice reduced {before} pages to {now}: expected 1 to {DROPPED_PER_SLICE_MAX} fewer"
        );
        held = now;
        if turns == 2 {
            let state = guest.vring.lock();
            assert_eq!(
                (state.queue.next_avail(), guest.used()),
                (0, 0),
                "the ring's indexes count the unfinished flush as taken or answered"
            );
        }
    }
    assert!(
        turns >= 4,
        "the flush took {turns} slices, expected at least 4"
    );
    assert_eq!(
        guest.link.vm.tenant.stats().pages,
        1,
        "the flush did not leave exactly the page with index 0"
    );
    assert_eq!(guest.used(), 2);
    assert_eq!(guest.bytes(answer, 1), [wire::S_OK]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
}

/// The cost of each descriptor counts against the slice, because a guest may split a small request
/// into a thousand descriptors.
#[test]
fn the_cost_of_descriptors_counts_against_the_slice() {
    let mut guest = guest();
    for _ in 0..70 {
        let table = guest.free;
        let (request, answer) = (table + 16 * 200, table + 16 * 200 + 24);
        guest.free = answer + 8;
        guest
            .memory
            .guest
            .write_slice(
                req(wire::T_POOL_DESTROY, 0).as_bytes(),
                GuestAddress(request),
            )
            .expect("the address is outside of the guest's memory");
        for number in 0..200u16 {
            let (address, length, flags) = match number {
                0 => (request, 24u32, NEXT),
                199 => (answer, 8, WRITE),
                _ => (request, 0, NEXT),
            };
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((number + 1).to_le_bytes());
            let at = GuestAddress(table + 16 * u64::from(number));
            guest
                .memory
                .guest
                .write_slice(&bytes, at)
                .expect("the address is outside of the guest's memory");
        }
        guest.send_indirect(table, 200);
    }
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let answered = u32::from(guest.used());
    // A request costs 13 µs: 10 µs for its 200 descriptors and 3 µs for the chain. A slice of 200
    // µs therefore answers at most 16 requests.
    assert!(
        (1..=16).contains(&answered),
        "one slice answered {answered} of 70 requests, not 1 to 16"
    );
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.used(), 70);
}

/// The run queue serves owners in turn. All vrings of a VM must therefore have the same owner, and
/// vrings of different VMs must have different owners.
#[test]
fn all_vrings_of_a_vm_have_the_same_owner_in_the_run_queue() {
    let (one, other) = (guest(), guest());
    let second = Vring::new(2, 0, one.link.clone());
    assert_eq!(one.vring.owner(), second.owner());
    assert_ne!(one.vring.owner(), other.vring.owner());
}
