// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of retained pages and REF requests.

use super::*;
use crate::queue::slice::SLICE_NS;

/// Two GETs return a page that stays in the pool (retained). After a REF, the pool keeps the page
/// as after a put. A GET that does not allow the pool to retain the page removes it.
#[test]
fn retained_pages_are_returned_again_and_kept_after_a_ref() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(5, 3);
    let (first, second) = (guest.get_retaining(5, 3, 5), guest.get_retaining(5, 3, 1));
    let (referred, other) = (guest.refer(5, 3, 0), guest.refer(5, 3, 9));
    guest.run_slice();
    assert_eq!(guest.results(first, 3), [wire::P_HIT; 3]);
    assert_eq!(
        guest.flags(first, 3),
        [wire::GET_RETAINED, 0, wire::GET_RETAINED]
    );
    let data = first + 8 + 3 * 16;
    assert_eq!(guest.bytes(data + 2 * 4096, 4096), [7; 4096]);
    assert_eq!(
        guest.results(second, 3),
        [wire::P_HIT, wire::P_MISS, wire::P_HIT]
    );
    assert_eq!(guest.flags(second, 3), [wire::GET_RETAINED, 0, 0]);
    let ok = [wire::S_OK, 0, 0, 0, 0, 0, 0, 0];
    let answered = |results: [u8; 3]| [&ok[..], &results].concat();
    assert_eq!(
        guest.bytes(referred, 11),
        answered([wire::P_HELD, wire::P_GONE, wire::P_GONE])
    );
    assert_eq!(guest.bytes(other, 11), answered([wire::P_GONE; 3]));
    assert_eq!(guest.pages(), (1, 0));
    let get = guest.get(5, 1);
    guest.run_slice();
    assert_eq!(
        (guest.results(get, 1), guest.flags(get, 1)),
        (vec![wire::P_HIT], vec![0])
    );
    assert_eq!(guest.pages(), (0, 0));
}

/// A driver that has not accepted the feature bit of retained pages gets the answers of a device
/// without the feature.
#[test]
fn pages_are_not_retained_without_the_retain_feature() {
    let mut guest = guest();
    guest.put(0, 1);
    let (get, referred) = (guest.get_retaining(0, 1, 1), guest.refer(0, 1, 0));
    guest.run_slice();
    assert_eq!(guest.bytes(get, 1), [wire::S_BAD]);
    assert_eq!(guest.bytes(referred, 1), [wire::S_UNSUPPORTED]);
    assert_eq!(guest.pages(), (1, 0));
}

#[test]
fn a_stale_ref_changes_nothing() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 2);
    guest.get_retaining(0, 1, 1);
    guest.run_slice();
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    let (referred, get) = (guest.refer(0, 2, 0), guest.get_retaining(0, 2, 3));
    guest.run_slice();
    assert_eq!(
        guest.bytes(referred, 10),
        [
            wire::S_STALE,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            wire::P_GONE,
            wire::P_GONE
        ]
    );
    assert_eq!(guest.results(get, 2), [wire::P_MISS; 2]);
    assert_eq!(guest.pages(), (2, 1));
}

#[test]
fn refs_to_a_missing_pool_are_answered_gone() {
    let mut guest = guest();
    guest.accept_retain();
    let tenant = guest.link.vm.tenant.clone();
    tenant
        .destroy_pool(1)
        .expect("the tenant has a pool with this id");
    for limit_ns in [u64::MAX, 0] {
        guest.vring.cut_at_ns.store(limit_ns, Ordering::SeqCst);
        let referred = guest.refer(0, 1, 0);
        guest.run_slice();
        assert_eq!(
            guest.bytes(referred, 9),
            [wire::S_NO_POOL, 0, 0, 0, 0, 0, 0, 0, wire::P_GONE]
        );
    }
}

/// The driver forgets a page that is answered with GONE, so the pool must drop the page.
#[test]
fn refs_that_are_not_executed_drop_their_pages() {
    for cause in ["drain", "rate", "frozen"] {
        let mut guest = guest();
        guest.accept_retain();
        guest.put(0, 3);
        guest.get_retaining(0, 2, 3);
        guest.run_slice();
        assert_eq!(guest.pages(), (3, 2));
        match cause {
            "drain" => guest.vring.cut_at_ns.store(0, Ordering::SeqCst),
            "rate" => {
                guest.pages_per_second.store(1, Ordering::SeqCst);
                guest.get(100, 64);
                guest.run_slice();
            }
            _ => guest.link.vm.frozen.store(true, Ordering::SeqCst),
        }
        let (referred, other) = (guest.refer(0, 1, 0), guest.refer(1, 1, 9));
        guest.run_slice();
        for answer in [referred, other] {
            assert_eq!(
                guest.bytes(answer, 9),
                [wire::S_OK, 0, 0, 0, 0, 0, 0, 0, wire::P_GONE],
                "{cause}: the REF was not answered GONE"
            );
        }
        // Page 0 has been dropped. The REF of page 1 has a wrong cookie and changes nothing.
        assert_eq!(
            guest.pages(),
            (2, 1),
            "{cause}: the pool does not hold the expected pages"
        );
        let stats = guest.link.vm.tenant.stats();
        assert_eq!(
            (stats.refs, stats.refs_gone),
            (2, 2),
            "{cause}: the counters do not show two REFs whose pages were gone"
        );
    }
}

#[test]
fn a_get_of_a_frozen_vm_retains_no_page() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 2);
    guest.run_slice();
    guest.link.vm.frozen.store(true, Ordering::SeqCst);
    let get = guest.get_retaining(0, 2, 3);
    guest.run_slice();
    assert_eq!(
        (guest.results(get, 2), guest.flags(get, 2)),
        (vec![wire::P_HIT; 2], vec![0; 2])
    );
    assert_eq!(guest.pages(), (0, 0));
}

/// Each read of the clock uses up the time of a slice. Each slice therefore processes only a few
/// pages.
#[test]
fn interrupted_refs_and_retaining_gets_continue_in_the_next_slice() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 64);
    guest.run_slice();
    while guest.used() < 1 {
        guest.run_slice();
    }
    guest.clock.step_ns.store(SLICE_NS, Ordering::SeqCst);
    let every_third = 0x9249_2492_4924_9249;
    let get = guest.get_retaining(0, 64, every_third);
    let mut slices = 0;
    while guest.used() < 2 {
        guest.run_slice();
        slices += 1;
    }
    assert!(
        slices > 1,
        "the GET of retained pages was answered in one slice"
    );
    assert_eq!(guest.results(get, 64), [wire::P_HIT; 64]);
    let flags: Vec<u8> = (0..64).map(|page| u8::from(page % 3 == 0)).collect();
    assert_eq!(guest.flags(get, 64), flags);
    let referred = guest.refer(0, 64, 0);
    let mut slices = 0;
    while guest.used() < 3 {
        guest.run_slice();
        slices += 1;
    }
    assert!(slices > 1, "the REF was answered in one slice");
    let held = flags.iter().map(|&flag| match flag {
        0 => wire::P_GONE,
        _ => wire::P_HELD,
    });
    assert_eq!(guest.bytes(referred + 8, 64), held.collect::<Vec<u8>>());
    assert_eq!(guest.pages(), (22, 0));
}
