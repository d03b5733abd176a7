// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a drain, and of a hang-up of the front end.

use super::*;
use crate::util::event_fd::consume;

#[test]
fn a_drained_or_locked_vring_takes_no_chain() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.vring.begin_drain();
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 0),
        "a chain was taken during a drain"
    );
    {
        let _state = guest.vring.lock();
        assert_eq!(
            guest.vring.run_slice(&mut guest.scratch, 0),
            SliceEnd::Idle,
            "a chain was taken while the control thread had the lock"
        );
        guest.vring.end_drain();
        assert_eq!(
            guest.vring.run_slice(&mut guest.scratch, 0),
            SliceEnd::Locked,
            "the worker does not know that another worker has the lock"
        );
    }
    assert_eq!(guest.used(), 0);
    guest.run_slice();
    assert_eq!(guest.used(), 1);
}

/// Before it reads each group of pages, the worker checks that the front end is connected.
#[test]
fn a_worker_reads_no_more_pages_when_the_front_end_hangs_up() {
    const PAGES: usize = 20;
    let stored = [0, 1, 2, 3, 4, 5].map(|checks| {
        let mut guest = guest();
        guest.put(1, PAGES);
        guest.link.peer.hang_up_after(checks);
        assert_eq!(guest.run_slice(), SliceEnd::Idle);
        assert_eq!(guest.used(), 0);
        guest.pages().0
    });
    assert_eq!((&stored[..3], stored[5]), (&[0; 3][..], PAGES as u64));
    // The front end hung up after the first group of pages.
    assert!(
        (1..PAGES as u64).contains(&stored[3]),
        "the worker stored {} of {PAGES} pages although the front end hung up between two groups",
        stored[3]
    );
}

/// Before it writes each part of an answer, the worker checks that the front end is connected.
#[test]
fn a_worker_stops_writing_an_answer_when_the_front_end_hangs_up() {
    const PAGES: usize = 20;
    let stages = [
        // Each row begins with the number of checks that succeed before the front end hangs up.
        // Then come the expected status, number of written pages, used index and event index.
        (0, [0, 0, 1, 1]),
        (1, [0, 0, 1, 1]),
        (2, [0, 0, 1, 1]),
        (3, [1, 0, 1, 1]),
        (4, [1, 16, 1, 1]),
        (5, [1, PAGES, 1, 1]),
        (6, [1, PAGES, 2, 1]),
        (7, [1, PAGES, 2, 2]),
    ];
    for (checks, expected) in stages {
        let mut guest = guest();
        guest.vring.lock().queue.set_event_idx(true);
        guest.put(1, PAGES);
        assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
        consume(&guest.call);
        let answer = guest.get(1, PAGES);
        let all = |guest: &Guest| guest.bytes(0, MEMORY_BYTES as usize);
        let before = all(&guest);
        guest.link.peer.hang_up_after(checks);
        assert_eq!(guest.run_slice(), SliceEnd::Idle);
        let results = guest.results(answer, PAGES);
        let data = guest.bytes(answer + 8 + 16 * PAGES as u64, PAGES * PAGE_SIZE);
        let kick_at = guest.bytes(USED + 4 + 8 * u64::from(SIZE), 2);
        let seen = [
            usize::from(results == [wire::P_HIT; PAGES]),
            data.chunks(PAGE_SIZE).filter(|page| page[4095] > 0).count(),
            usize::from(guest.used()),
            usize::from(kick_at[0]),
        ];
        assert_eq!(
            seen, expected,
            "hang-up after {checks} checks of the front end: the written parts of the answer are \
             wrong"
        );
        if checks < 3 {
            assert!(
                before == all(&guest),
                "guest memory changed although the front end hung up after {checks} checks"
            );
        }
        assert_eq!(
            guest.stopped().is_some(),
            checks < 7,
            "hang-up after {checks} checks of the front end: the queue must stop below 7 checks \
             only"
        );
        let stopped = guest
            .link
            .vm
            .counters
            .queues_stopped
            .load(Ordering::Relaxed);
        assert_eq!(stopped, 0, "the hang-up was counted as a stopped queue");
        // From here on, checks of the front end succeed again, but the ring stays stopped.
        guest.link.peer.hang_up_after(u64::MAX);
        guest.put(50, 1);
        let offered = all(&guest);
        guest.run_slice();
        assert_eq!(
            offered == all(&guest),
            checks < 7,
            "hang-up after {checks} checks of the front end: a stopped queue wrote to guest \
             memory, or a running queue wrote no answer"
        );
    }
}

/// Without EVENT_IDX, a slice begins by writing a flag to guest memory to disable kicks. After a
/// hang-up of the front end, the slice must not write that flag either.
#[test]
fn a_slice_after_a_hang_up_does_not_write_the_kick_flag() {
    let mut guest = guest();
    guest.put(1, 1);
    let before = guest.bytes(0, MEMORY_BYTES as usize);
    guest.link.peer.hang_up_after(0);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert!(before == guest.bytes(0, MEMORY_BYTES as usize));
}

/// After the drain cut, the remaining pages of a PUT are refused and leave nothing under their
/// keys. The remaining pages of a GET are missed.
#[test]
fn after_the_drain_cut_puts_are_refused_and_gets_miss() {
    let mut guest = guest();
    guest.put(0, 2);
    guest.run_slice();
    // The time of the drain cut has passed, but no drain has told the worker to leave the vring. So
    // the worker takes the chains, and answers them after the cut.
    guest.vring.cut_at_ns.store(0, Ordering::SeqCst);
    let (put, missed) = (guest.put(0, 1), guest.get(1, 1));
    guest.run_slice();
    guest.vring.end_drain();
    assert_eq!(guest.bytes(put, 9)[8], wire::P_REFUSED);
    assert_eq!(guest.results(missed, 1), [wire::P_MISS]);
    assert_eq!(
        guest
            .link
            .vm
            .counters
            .drain_cut_pages
            .load(Ordering::Relaxed),
        2
    );
    let both = guest.get(0, 2);
    guest.run_slice();
    assert_eq!(
        guest.results(both, 2),
        [wire::P_MISS, wire::P_HIT],
        "page 0 was kept although a later put of it was refused, or page 1 was lost"
    );
}

/// The drain cut changes the results of pages, but not the status of a request.
#[test]
fn requests_after_the_drain_cut_still_report_missing_pools() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.run_slice();
    let tenant = guest.link.vm.tenant.clone();
    tenant
        .destroy_pool(1)
        .expect("the tenant has no pool with this id");
    guest.vring.cut_at_ns.store(0, Ordering::SeqCst);
    let (put, get) = (guest.put(0, 1), guest.get(0, 1));
    guest.run_slice();
    assert_eq!(guest.bytes(put, 9)[0], wire::S_NO_POOL);
    assert_eq!(guest.bytes(get, 1), [wire::S_NO_POOL]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
}
