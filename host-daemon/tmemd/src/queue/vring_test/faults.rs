// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of faults of the guest, the VMM, the host and the daemon, which stop a queue or end the
//! connection.

use super::*;
use crate::util::event_fd::consume;

/// A chain may have no space for a status. The daemon then stops the queue, signals the VMM's error
/// eventfd, and returns the chain to the ring.
#[test]
fn an_unanswerable_request_stops_the_queue() {
    let mut guest = guest();
    let error = eventfd(0, EventfdFlags::NONBLOCK).expect("cannot create an eventfd");
    guest.vring.lock().error = Some(error.try_clone().expect("cannot duplicate the descriptor"));
    guest.put(0, 1);
    guest.send(req(wire::T_POOL_DESTROY, 0).as_bytes(), 7);
    guest.put(1, 1);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert_eq!(
        guest.used(),
        1,
        "the request before the faulty one was not answered"
    );
    assert!(
        guest.interrupted(),
        "the guest was not interrupted for the answered request"
    );
    assert!(
        guest
            .stopped()
            .expect("the queue did not stop")
            .contains("7 writable bytes")
    );
    assert!(
        rustix::io::read(&error, &mut [0; 8]).is_ok(),
        "the error eventfd did not report the fault to the VMM"
    );
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 1),
        "the stopped queue answered a request"
    );
    let mut state = guest.vring.lock();
    assert_eq!(
        state.queue.next_avail(),
        1,
        "the ring base that the VMM reads is not the index of the faulty chain"
    );
    state.set_base(1);
    guest.vring.configure(&mut state);
    assert!(
        state.is_running(),
        "the queue does not run after the VMM set it up again"
    );
}

#[test]
fn an_answer_out_of_order_is_never_published() {
    let mut guest = guest();
    let answer = guest.send(&flush(0, 1), 8);
    guest.send(&flush(1, 1), 8);
    // To simulate a bug of the daemon, the test makes the worker skip the first chain.
    guest.vring.lock().queue.set_next_avail(1);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    let why = guest.stopped().expect("the queue did not stop");
    assert!(
        why.contains("a bug in the daemon"),
        "the reason for the stop does not say that the daemon has a bug: {why}"
    );
    assert_eq!(guest.used(), 0);
    assert_eq!(guest.bytes(answer, 8), [0; 8]);
}

#[test]
fn a_ring_base_that_is_no_index_in_flight_is_refused() {
    let size = SIZE;
    for (base, used, avail) in [
        (1, 0, 0),
        (0, 1, 1),
        (0, 1, 0),
        (4, 0, 3),
        (0, 2, 3),
        (0, 0, size + 1),
        (2, u16::MAX, 1),
    ] {
        let guest = guest_with_indices(base, used, avail);
        let reason = guest.stopped().expect("the queue did not stop");
        assert!(
            reason.contains(&format!("starts the ring at {base}")),
            "the reason for the stop does not give base {base}: {reason}"
        );
    }
    // A VMM that lost its back end replays the chains in flight, or skips some or all of them. The
    // ring starts at its used index in each case.
    for (base, used, avail) in [(0, 0, size), (size, 0, size), (2, 0, 3), (1, u16::MAX, 1)] {
        let guest = guest_with_indices(base, used, avail);
        assert_eq!(guest.stopped(), None, "base {base} is an index in flight");
        let state = guest.vring.lock();
        assert_eq!(
            (state.queue.next_avail(), state.queue.next_used()),
            (used, used)
        );
    }
    let mut guest = guest_at(u16::MAX, u16::MAX);
    guest.put(0, 1);
    guest.put(1, 1);
    guest.run_slice();
    assert_eq!(
        (guest.stopped(), guest.used()),
        (None, 1),
        "the request at the wrap of the ring's index was not answered"
    );
}

#[test]
fn rings_outside_of_guest_memory_do_not_run() {
    let mut guest = guest();
    {
        let mut state = guest.vring.lock();
        state.memory = Arc::new(Memory::empty(&Default::default(), &Default::default()));
        guest.vring.configure(&mut state);
        assert!(
            !state.is_running(),
            "the ring was started without guest memory"
        );
    }
    guest.put(0, 1);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    let (descriptor, available, used) = (USER + TABLE, USER + AVAIL, USER + USED);
    for odd in [USER + MEMORY_BYTES - 8, USER - 8, u64::MAX - 15, u64::MAX] {
        for (descriptor, available, used) in [
            (odd, available, used),
            (descriptor, odd, used),
            (descriptor, available, odd),
        ] {
            let mut state = guest.vring.lock();
            state.memory = guest.memory.clone();
            state.addresses = Some(RingAddresses {
                descriptor,
                available,
                used,
            });
            guest.vring.configure(&mut state);
            assert!(
                !state.is_running(),
                "a ring runs although a part of it is at {odd:#x}, outside of guest memory"
            );
        }
    }
    let mut state = guest.vring.lock();
    state.addresses = Some(RingAddresses {
        descriptor: USER + TABLE + 1,
        available: USER + AVAIL,
        used: USER + USED,
    });
    guest.vring.configure(&mut state);
    assert!(
        state
            .stopped
            .as_ref()
            .is_some_and(|reason| reason.contains("ring addresses are invalid"))
    );
}

#[test]
fn a_queue_stops_after_its_worker_panics() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.vring.stop_after_panic();
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    assert_eq!(
        guest
            .link
            .vm
            .counters
            .queues_stopped
            .load(Ordering::Relaxed),
        1
    );
    consume(&guest.call);
}

/// In each case of this test, a page that a request needs is lost just before the worker accesses
/// it. The connection must end without an answer. Nothing may be stored or dropped because of the
/// zeros that the worker reads.
#[test]
fn a_lost_page_of_the_guest_ends_the_connection() {
    const HELD: u64 = 40;
    // REQUEST is the guest address of the request. It is the beginning of a page that contains no
    // part of the ring. Each case has the name and the address of the page that is lost.
    const REQUEST: u64 = DATA + 0x10000;
    let cases = [
        ("table", TABLE),
        ("available ring", AVAIL),
        ("used ring", USED),
        ("request", REQUEST),
        ("data", REQUEST + PAGE_SIZE as u64),
        ("answer", REQUEST + 4 * PAGE_SIZE as u64),
    ];
    for base in [0, 5] {
        for (what, page) in cases {
            let mut guest = guest_at(base, base);
            let own = UnixStream::pair().expect("cannot create a socket pair");
            let _place = crate::vm::state::Connected::claim(&guest.link.vm, &own.0)
                .expect("another connection has claimed the VM");
            guest.put(HELD, 8);
            assert_eq!(guest.run_slice(), SliceEnd::Idle);
            let before = guest.engine.stats().pages;
            assert_eq!(
                (guest.used(), before),
                (base + 1, 8),
                "{what}: the request before the loss was not answered"
            );
            guest.free = REQUEST;
            if what == "answer" {
                guest.get(HELD, 8);
            } else {
                guest.put(0, 4);
            }
            let address = guest.memory.guest.get_host_address(GuestAddress(page));
            crate::memory::sigbus::take_away(
                address.expect("the address is outside of the guest's memory"),
                PAGE_SIZE,
            );

            assert_eq!(guest.run_slice(), SliceEnd::Idle);
            let reason = guest
                .stopped()
                .unwrap_or_else(|| panic!("{what}: the queue runs on lost memory"));
            assert!(
                reason.contains("was lost"),
                "{what}: the reason for the stop does not say that memory was lost: {reason}"
            );
            if what != "used ring" {
                assert_eq!(
                    guest.used(),
                    base + 1,
                    "{what}: a request was answered from lost memory"
                );
            }
            let stored = guest.engine.stats().pages;
            let expected = if what == "answer" { 0 } else { before };
            assert_eq!(
                stored, expected,
                "{what}: {stored} pages are stored, expected {expected}"
            );
            let counters = &guest.link.vm.counters;
            let faults = counters.queues_stopped.load(Ordering::Relaxed);
            assert_eq!(
                faults, 0,
                "{what}: the lost page was counted as a fault of the guest"
            );
            let ended =
                Peer::new(own.1.try_clone().expect("cannot duplicate the descriptor")).check();
            assert_eq!(
                ended,
                Err(HungUp),
                "{what}: the connection did not end after the loss of a page"
            );
        }
    }
}

/// A page of a PUT is lost after the worker has copied earlier pages of the same group. The later
/// pages must not be stored as zeros, and nothing may stay under their keys.
#[test]
fn pages_of_a_put_on_lost_memory_are_refused_and_older_pages_dropped() {
    const REQUEST: u64 = DATA + 0x10000;
    let mut guest = guest();
    guest.put(0, 4);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    assert_eq!(guest.pages(), (4, 0));
    // The head of the request takes 152 bytes, so the page that is lost contains the end of the
    // third page of the PUT and the beginning of the fourth page.
    guest.free = REQUEST;
    guest.put_version(0, 4, 1);
    let lost = GuestAddress(REQUEST + 3 * PAGE_SIZE as u64);
    let address = guest.memory.guest.get_host_address(lost);
    crate::memory::sigbus::take_away(
        address.expect("the address is outside of the guest's memory"),
        PAGE_SIZE,
    );
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    let reason = guest.stopped().expect("the queue runs on lost memory");
    assert!(
        reason.contains("was lost"),
        "the reason for the stop does not say that memory was lost: {reason}"
    );
    guest.engine.check_invariants();
    let (mut pages, mut found) = ([[0; PAGE_SIZE]; 4], [tmem_pool::GetResult::Miss; 4]);
    let tenant = &guest.link.vm.tenant;
    tenant
        .get(
            1,
            &tmem_pool::Get::new(1, 0, &[1001, 1002, 1003, 1004]),
            &mut pages,
            &mut found,
        )
        .map(drop)
        .expect("the tenant has no pool with this id");
    let hits = found.map(|result| result != tmem_pool::GetResult::Miss);
    assert_eq!(hits, [true, true, false, false]);
    assert_eq!(pages[..2], [[100; PAGE_SIZE], [101; PAGE_SIZE]]);
    assert_eq!(guest.pages(), (0, 0));
}

/// The worker does not read the contents of a PUT that it refuses, so a lost page among them does
/// not end the connection.
#[test]
fn the_contents_of_a_refused_put_are_not_read() {
    const REQUEST: u64 = DATA + 0x10000;
    let mut guest = guest();
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    guest.free = REQUEST;
    let answer = guest.put(0, 4);
    let lost = GuestAddress(REQUEST + PAGE_SIZE as u64);
    let address = guest.memory.guest.get_host_address(lost);
    crate::memory::sigbus::take_away(
        address.expect("the address is outside of the guest's memory"),
        PAGE_SIZE,
    );
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    assert_eq!(guest.bytes(answer, 1), [wire::S_STALE]);
    assert_eq!(guest.bytes(answer + 8, 4), [wire::P_REFUSED; 4]);
    assert!(!guest.memory.lost.is_lost());
}
