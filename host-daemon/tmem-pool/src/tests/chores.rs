// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that the predicate of each chore of background work agrees with the chore's step.

use super::rng::{Rng, for_each_seed};
use super::{OPEN, POOL, add, get_retaining, new_engine, noise, partly_noise, put, put_raw};
use crate::PutResult::Stored;
use crate::background::chores;
use crate::config::{EVICT_STEP_PAGES, SWEEP_NS, reclaim_high_bytes};
use crate::{PAGE_SIZE, Quota, Tenant, Time};
use std::cell::RefCell;

const SIZE_BYTES: u64 = 4 << 20;
const PAGES: u64 = 1000;

/// Does something that makes chores due: puts and drops pages, and changes sizes.
fn change(rng: &mut Rng, tenants: &[Tenant], resize: impl Fn(u64)) {
    let tenant = &tenants[rng.below(tenants.len() as u64) as usize];
    let object = 1 + rng.below(3);
    match rng.below(20) {
        0 => resize(rng.below(SIZE_BYTES)),
        1 => resize(SIZE_BYTES),
        2 => {
            let limit_bytes = Some(rng.below(SIZE_BYTES));
            tenant
                .set_quota(Quota {
                    limit_bytes,
                    ..OPEN
                })
                .unwrap();
        }
        3 => tenant.set_quota(OPEN).unwrap(),
        4 => tenant.flush(POOL, object, 0, None).unwrap(),
        5..8 => {
            // Leave gaps between stored pages, so that compaction frees memory.
            for index in (0..PAGES).step_by(2 + rng.below(9) as usize) {
                tenant.flush(POOL, object, index, Some(1)).unwrap();
            }
        }
        8..10 => {
            for index in 0..rng.below(PAGES) {
                get_retaining(tenant, object, index, 1);
            }
        }
        _ => {
            for index in 0..rng.below(PAGES) {
                let page = match rng.below(3) {
                    0 => [index as u8; PAGE_SIZE],
                    1 => partly_noise(rng.next(), 1 + rng.below(6) as usize),
                    _ => noise(rng.next()),
                };
                put_raw(tenant, object, index, 1, &page);
            }
        }
    }
}

/// The engine decides by the predicates of the chores whether work is left. A chore whose predicate
/// is false must therefore have nothing to do.
#[test]
fn a_chore_that_is_not_due_does_nothing() {
    let worked = RefCell::new(vec![0; chores().count()]);
    for_each_seed("a_chore_that_is_not_due_does_nothing", 4, |seed| {
        let mut rng = Rng::new(seed);
        let engine = new_engine(SIZE_BYTES);
        let tenants = ["a", "b"].map(|name| add(&engine, name, None, OPEN));
        let mut now = Time(0);
        for _ in 0..60 {
            change(&mut rng, &tenants, |bytes| engine.resize(bytes));
            now.0 += rng.below(SWEEP_NS / 2);
            for _ in 0..rng.below(60) {
                let nth = rng.below(worked.borrow().len() as u64) as usize;
                let chore = chores().nth(nth).unwrap();
                let is_due = (chore.is_due)(&engine, now);
                let done = (chore.run)(&engine, now, EVICT_STEP_PAGES);
                assert!(
                    is_due || done == 0,
                    "chore {nth} was not due and did work for {done} pages"
                );
                worked.borrow_mut()[nth] += done;
            }
        }
        engine.check_invariants();
    });
    assert!(
        worked.borrow().iter().all(|&done| done > 0),
        "the test is too weak: a chore had no work at all: {worked:?}"
    );
}

/// Compaction alone may free enough memory for future puts, even if no tenant is above its
/// entitlement and no page may be evicted. This work must be due, too.
#[test]
fn compaction_for_future_puts_is_due_without_a_tenant_above_its_entitlement() {
    const SIZE_BYTES: u64 = 2 << 20;
    let engine = new_engine(SIZE_BYTES);
    let tenant = add(&engine, "a", None, OPEN);
    let reclaim = chores().nth(3).unwrap();
    let mut pages = 0;
    while engine.used_bytes() + reclaim_high_bytes(SIZE_BYTES) / 4 < SIZE_BYTES {
        assert_eq!(put(&tenant, 1, pages, 1, &partly_noise(pages, 6)), Stored);
        pages += 1;
    }
    assert!(tenant.shared().excess_bytes() <= 0);
    assert!(!(reclaim.is_due)(&engine, Time(0)));
    // Drop pages of different spans, until compaction can free enough memory.
    let mut dropped = (0..pages).step_by(12);
    while !(reclaim.is_due)(&engine, Time(0)) {
        let index = dropped.next().expect("reclaim was never due");
        tenant.flush(POOL, 1, index, Some(1)).unwrap();
    }
    assert!((reclaim.run)(&engine, Time(0), EVICT_STEP_PAGES) > 0);
    assert_eq!(tenant.stats().evictions, 0);
    engine.check_invariants();
}
