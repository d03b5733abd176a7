// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the answers to valid, stale and rate-limited requests.

use super::*;

/// Requests beyond a VM's rate limit are answered at once. The pages of a put are refused and leave
/// nothing under their keys. The pages of a get are missed and stay in the pool.
#[test]
fn requests_above_the_rate_limit_are_answered_at_once() {
    let mut guest = guest();
    guest.put(0, 2);
    guest.run_slice();
    // At one page per second, a batch of 64 pages uses up the rate of about a minute.
    guest.pages_per_second.store(1, Ordering::SeqCst);
    let first = guest.get(5, 64);
    guest.run_slice();
    assert_eq!(
        guest.results(first, 64),
        [wire::P_MISS; 64],
        "a get returned a page that was never put"
    );
    let counters = guest.link.clone();
    let limited = move || counters.vm.counters.limited_pages.load(Ordering::Relaxed);
    assert_eq!(limited(), 0);
    let (put, missed) = (guest.put(0, 1), guest.get(1, 1));
    let flush = flush(20, 1);
    let flushed = guest.send(&flush, 8);
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 5),
        "a request above the rate limit was not answered at once"
    );
    assert_eq!(guest.bytes(put, 1), [wire::S_OK]);
    assert_eq!(guest.bytes(put, 9)[8], wire::P_REFUSED);
    assert_eq!(guest.bytes(missed, 1), [wire::S_OK]);
    assert_eq!(guest.results(missed, 1), [wire::P_MISS]);
    assert_eq!(guest.bytes(flushed, 1), [wire::S_OK]);
    assert_eq!(limited(), 2);
    guest.pages_per_second.store(0, Ordering::SeqCst);
    let both = guest.get(0, 2);
    guest.run_slice();
    assert_eq!(
        guest.results(both, 2),
        [wire::P_MISS, wire::P_HIT],
        "page 0 was kept although a later put of it was refused, or page 1 was lost"
    );
    assert_eq!(limited(), 2);
}

/// A VM beyond its rate limit can still flush, so that the pool keeps no page that the VM wants to
/// drop.
#[test]
fn flushes_are_not_rate_limited() {
    let mut guest = guest();
    guest.put(0, 4);
    guest.run_slice();
    guest.pages_per_second.store(1, Ordering::SeqCst);
    guest.get(5, 64);
    let flush = flush(1, 2);
    guest.send(&flush, 8);
    guest.run_slice();
    guest.pages_per_second.store(0, Ordering::SeqCst);
    let all = guest.get(0, 4);
    guest.run_slice();
    let (hit, miss) = (wire::P_HIT, wire::P_MISS);
    assert_eq!(guest.results(all, 4), [hit, miss, miss, hit]);
}

#[test]
fn a_stale_request_changes_nothing() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.run_slice();
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    let (get, put) = (guest.get(0, 1), guest.put(0, 1));
    guest.run_slice();
    assert_eq!(guest.bytes(get, 1), [wire::S_STALE]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
    assert_eq!(
        guest.bytes(put, 9),
        [wire::S_STALE, 0, 0, 0, 0, 0, 0, 0, wire::P_REFUSED]
    );
    guest.link.generation.store(GENERATION, Ordering::SeqCst);
    let get = guest.get(0, 1);
    guest.run_slice();
    assert_eq!(guest.results(get, 1), [wire::P_HIT]);
}

/// A request with several errors gets the status of the check that comes first (SPEC.md,
/// "Precedence of statuses").
#[test]
fn statuses_follow_the_precedence_in_the_specification() {
    let mut guest = guest();
    let flush = |object: u64, pool: u32| {
        let header = Req {
            pool: pool.into(),
            ..req(wire::T_FLUSH, 1)
        };
        let range = wire::Range {
            object: object.into(),
            index: 0.into(),
            nr_pages: 1.into(),
        };
        [header.as_bytes(), range.as_bytes()].concat()
    };
    let dead_pool = 9;
    let expected = [
        // A request of an unknown type, which also has a wrong size and an old generation number.
        (req(99, 1).as_bytes().to_vec(), wire::S_UNSUPPORTED),
        // Two requests with an old generation number: one belongs on the control queue, and the
        // other names object 0.
        (
            req(wire::T_POOL_DESTROY, 0).as_bytes().to_vec(),
            wire::S_BAD,
        ),
        (flush(0, dead_pool), wire::S_BAD),
        // A GENERATION on a request queue.
        (req(wire::T_GENERATION, 0).as_bytes().to_vec(), wire::S_BAD),
        // A FLUSH of a pool that does not exist, which also has an old generation number.
        (flush(1, dead_pool), wire::S_STALE),
    ];
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    for (request, status) in expected {
        let answer = guest.send(&request, 8);
        guest.run_slice();
        assert_eq!(guest.bytes(answer, 1), [status]);
    }
    guest.link.generation.store(GENERATION, Ordering::SeqCst);
    let answer = guest.send(&flush(1, dead_pool), 8);
    guest.run_slice();
    assert_eq!(guest.bytes(answer, 1), [wire::S_NO_POOL]);
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_answered_bad() {
    let mut guest = guest();
    let flush = flush(0, 1);
    for (turned, status) in [(false, wire::S_OK), (true, wire::S_BAD)] {
        let head = guest.heads;
        let answer = guest.send(&flush, 8);
        if turned {
            guest.descriptor(head, answer, 8, WRITE | NEXT);
            guest.descriptor(head + 1, answer - flush.len() as u64, flush.len(), 0);
        }
        guest.run_slice();
        assert_eq!(guest.bytes(answer, 1), [status]);
    }
}
