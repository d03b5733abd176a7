// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a chain whose execution the end of a slice interrupts. Before the next slice of the
//! chain, a drain begins, the guest overwrites the request, or the chain's pool is destroyed.

use super::*;

/// A drain returns an interrupted chain to the ring as not taken. The next back end that uses the
/// ring executes the chain from its beginning.
#[test]
fn a_drain_returns_an_interrupted_chain_to_the_ring() {
    let mut guest = guest();
    guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::More, 0));
    let hits = guest.link.vm.tenant.stats().hits as usize;
    guest.vring.begin_drain();
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    let mut state = guest.vring.lock();
    assert_eq!(
        state.queue.next_avail(),
        0,
        "the next available index counts the interrupted chain as taken"
    );
    assert!(
        state.unfinished.is_some(),
        "a drain without ring changes discarded the interrupted chain"
    );
    state.set_base(0);
    assert!(state.unfinished.is_none());
    guest.vring.configure(&mut state);
    drop(state);
    guest.vring.end_drain();
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.used(), 1);
    let mut expected = [wire::P_HIT; 64];
    expected[..hits].fill(wire::P_MISS);
    assert_eq!(
        guest.results(answer, 64),
        expected,
        "the restarted chain did not miss exactly the first {hits} pages, which were taken before"
    );
}

/// A drain that does not change the ring, for example because the VMM adds a memory region, does
/// not restart an interrupted chain.
#[test]
fn an_interrupted_chain_continues_after_a_drain_without_ring_changes() {
    let mut guest = guest();
    guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    guest.vring.begin_drain();
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    {
        let mut state = guest.vring.lock();
        state.memory = guest.memory.clone();
        guest.vring.configure(&mut state);
    }
    guest.vring.end_drain();
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.results(answer, 64), [wire::P_HIT; 64]);
}

/// The pool of a request may be destroyed, or its generation may end, between two slices of the
/// request. The answer then contains no page, as if that had happened before the first slice.
#[test]
fn an_interrupted_get_returns_no_page_after_its_pool_or_generation_ends() {
    for (what, status) in [("pool", wire::S_NO_POOL), ("generation", wire::S_STALE)] {
        let mut guest = guest();
        guest.store_dense(64);
        let get = guest.get(0, 64);
        assert_eq!(
            guest.run_slice(),
            SliceEnd::More,
            "the get was answered in one slice before its {what} ended"
        );
        if what == "pool" {
            guest
                .link
                .vm
                .tenant
                .destroy_pool(1)
                .expect("the tenant has no pool with this id");
        } else {
            let generation = &guest.link.generation;
            generation.store(GENERATION + 1, Ordering::SeqCst);
        }
        while guest.run_slice() == SliceEnd::More {}
        assert_eq!(
            guest.used(),
            1,
            "the get was not answered after its {what} ended"
        );
        assert_eq!(
            guest.bytes(get, 1),
            [status],
            "the get has the wrong status after its {what} ended"
        );
        assert_eq!(
            guest.results(get, 64),
            [wire::P_MISS; 64],
            "the get returned a page after its {what} ended"
        );
        let length = guest.bytes(USED + 4 + 4, 4);
        assert_eq!(
            length,
            (8 + 64 * 16u32).to_le_bytes(),
            "the get has the wrong used length after its {what} ended"
        );
    }
}

/// If a guest overwrites an interrupted request with another one, the worker executes the new
/// request from its beginning.
#[test]
fn a_request_that_replaces_an_interrupted_request_is_executed_in_full() {
    let mut guest = guest();
    guest.store_dense(64);
    let get = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let taken = guest.link.vm.tenant.stats().hits;
    // The new request has the same size and names a pool that does not exist.
    let mut other = req(wire::T_GET, 64);
    other.pool = 2.into();
    let at = GuestAddress(get - (24 + 16 + 64 * 8));
    let memory = &guest.memory.guest;
    memory
        .write_slice(other.as_bytes(), at)
        .expect("the address is outside of the guest's memory");
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(
        (guest.bytes(get, 1), guest.used()),
        (vec![wire::S_NO_POOL], 1)
    );
    assert_eq!(guest.results(get, 64), [wire::P_MISS; 64]);
    assert_eq!(guest.link.vm.tenant.stats().hits, taken);
}

/// A chain that is interrupted counts only once against the rate limit of its VM. A chain that
/// began within the limit is finished.
#[test]
fn an_interrupted_chain_counts_once_against_the_rate_limit() {
    let mut guest = guest();
    guest.store_dense(64);
    guest.pages_per_second.store(1, Ordering::SeqCst);
    let get = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.results(get, 64), [wire::P_HIT; 64]);
}
