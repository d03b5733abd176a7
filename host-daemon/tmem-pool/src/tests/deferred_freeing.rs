// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of deferred freeing: pages are detached in one step, so that they are no longer found, and
//! are freed later in small steps.

use super::{OPEN, POOL, add, fill, get, maintain_all, new_engine, noise, partly_noise, put};
use crate::PutResult::Stored;
use crate::config::TENANT_METADATA_BYTES;
use crate::cost::{DROP_SAME_NS, FOLLOWED_NS};
use crate::{Engine, FLUSH_NS_MIN, PAGE_SIZE, Page, Tenant, Time};

/// Puts 100 pages of `tenant` and drops them with the function `empty`. Asserts that the tenant is
/// empty immediately, and that background work then frees the pages in bounded steps.
fn is_freed_later(engine: &Engine, tenant: Tenant, empty: impl FnOnce(Tenant) -> Option<Tenant>) {
    // Put pages that compress, and some same-filled pages, in one object.
    for index in 0..100 {
        let page: Page = if index % 10 == 0 {
            [1; PAGE_SIZE]
        } else {
            partly_noise(index, 5)
        };
        assert_eq!(put(&tenant, 1, index, 1, &page), Stored);
    }
    let before = engine.stats();
    let tenant = empty(tenant);
    let after = engine.stats();
    assert_eq!(
        (after.pages, after.detached_pages, after.flushed_pages),
        (0, 100, 100)
    );
    assert_eq!(
        after.payload_bytes, before.payload_bytes,
        "the stored bytes of detached pages no longer count, although they are not freed yet"
    );
    assert_eq!(after.blobs, before.blobs);
    engine.check_invariants();
    if let Some(tenant) = &tenant {
        // The tenant must be empty at once, and must be usable while the detached pages are freed.
        let _ = tenant.create_pool(POOL);
        assert_eq!(tenant.stats().charged_bytes, 0);
        assert_eq!(get(tenant, 1, 1, 1), None);
        assert_eq!(put(tenant, 1, 1, 2, &noise(1)), Stored);
    }
    let mut detached = 100;
    while engine.maintain(Time(0), 10) {
        let now = engine.stats().detached_pages;
        assert!(
            detached - now <= 10,
            "maintain() with a budget of 10 pages freed more: detached pages fell from {detached} \
             to {now}"
        );
        detached = now;
        engine.check_invariants();
    }
    assert!(
        detached <= 10,
        "the last call of maintain() with a budget of 10 pages freed {detached} pages"
    );
    assert_eq!(engine.stats().detached_pages, 0);
    match &tenant {
        Some(tenant) => assert_eq!(
            get(tenant, 1, 1, 2),
            Some(noise(1)),
            "freeing detached pages removed a page that was put later"
        ),
        None => assert_eq!(engine.stats().removed_tenants, 0),
    }
    let stats = engine.stats();
    assert_eq!((stats.payload_bytes, stats.blobs, stats.pages), (0, 0, 0));
    engine.check_invariants();
}

#[test]
fn a_flushed_object_is_detached_at_once_and_freed_later() {
    let engine = new_engine(4 << 20);
    is_freed_later(&engine, add(&engine, "a", None, OPEN), |tenant| {
        tenant.flush(POOL, 1, 0, None).unwrap();
        Some(tenant)
    });
}

#[test]
fn a_destroyed_pool_is_detached_at_once_and_freed_later() {
    let engine = new_engine(4 << 20);
    is_freed_later(&engine, add(&engine, "a", None, OPEN), |tenant| {
        tenant.destroy_pool(POOL).unwrap();
        Some(tenant)
    });
}

#[test]
fn a_cleared_tenant_is_detached_at_once_and_freed_later() {
    let engine = new_engine(4 << 20);
    is_freed_later(&engine, add(&engine, "a", None, OPEN), |tenant| {
        tenant.clear();
        assert_eq!(tenant.stats().pools, 0);
        Some(tenant)
    });
}

#[test]
fn a_departed_tenant_is_detached_at_once_and_freed_later() {
    let engine = new_engine(4 << 20);
    is_freed_later(&engine, add(&engine, "a", None, OPEN), |tenant| {
        drop(tenant);
        assert_eq!(
            (engine.stats().tenants, engine.stats().removed_tenants),
            (0, 1)
        );
        None
    });
}

#[test]
fn clearing_a_tenant_also_frees_objects_detached_by_a_flush() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 40);
    fill(&tenant, 2, 40);
    tenant.flush(POOL, 1, 0, None).unwrap();
    tenant.clear();
    tenant.create_pool(POOL).unwrap();
    fill(&tenant, 2, 40);
    maintain_all(&engine);
    assert_eq!((tenant.stats().pages, engine.stats().blobs), (40, 40));
    // The eviction queue must contain exactly the 40 live pages, so exactly these can be evicted.
    engine.resize(0);
    maintain_all(&engine);
    assert_eq!((tenant.stats().evictions, engine.stats().blobs), (40, 0));
}

/// Creates and destroys empty pools. They must be freed at once, because a guest can create and
/// destroy pools faster than background work would free them.
#[test]
fn destroyed_empty_pools_are_freed_at_once() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for id in 2..100 {
        tenant.create_pool(id).unwrap();
        tenant.destroy_pool(id).unwrap();
        tenant.clear();
    }
    assert!(!tenant.shared().has_detached());
    engine.check_invariants();
}

/// Destroys a pool with one page. The engine must count the memory of the pool and of the page
/// until it has freed this memory.
#[test]
fn memory_of_a_destroyed_pool_is_counted_until_freed() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(fill(&tenant, 1, 1), 1);
    let held_bytes = engine.stats().held_bytes;
    tenant.destroy_pool(POOL).unwrap();
    let payload_bytes = engine.stats().payload_bytes;
    assert_eq!(payload_bytes, PAGE_SIZE as u64);
    assert!(engine.stats().held_bytes > held_bytes - 1024);
    maintain_all(&engine);
    assert_eq!(engine.stats().payload_bytes, 0);
    let fixed_bytes = TENANT_METADATA_BYTES + engine.store.metadata_bytes();
    let left_bytes = engine.stats().metadata_bytes - fixed_bytes;
    assert!(
        left_bytes < 4 << 10,
        "{left_bytes} B of metadata are left after the pool was freed"
    );
}

/// Flushes ranges of more than FLUSH_HASHES_MAX pages. For such a range, the flush must walk
/// exactly once over all keys that the estimator follows, whatever the number of the flush's steps.
/// It must count the cost of that walk.
#[test]
fn a_large_flush_scans_the_hit_estimator_once() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(fill(&tenant, 1, 500), 500);
    let before = tenant.stats().gain_steps;
    let mut calls = 0;
    loop {
        calls += 1;
        let flushed = tenant.flush_some(POOL, 1, 1, None, FLUSH_NS_MIN);
        if flushed.unwrap().is_complete {
            break;
        }
    }
    assert!(
        calls > 3,
        "the flush took only {calls} calls, not more than 3"
    );
    assert_eq!(tenant.stats().gain_steps - before, 500);
    assert_eq!(fill(&tenant, 2, 1000), 1000);
    let before = tenant.stats().gain_steps;
    // Flush an object that has no pages. The flush must walk over the estimator's keys
    // nevertheless.
    let flushed = tenant.flush_some(POOL, 3, 0, Some(1000), FLUSH_NS_MIN);
    let flushed = flushed.unwrap();
    assert!(flushed.is_complete);
    let steps = tenant.stats().gain_steps - before;
    assert_eq!(
        steps, 1001,
        "the flush did not walk over the 1,000 keys of object 2 and the key of page 0 of object 1"
    );
    assert!(flushed.cost_ns >= steps * FOLLOWED_NS);
}

#[test]
fn each_step_of_a_flush_stays_within_its_time_budget() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(fill(&tenant, 1, 200), 200);
    let mut steps = 0;
    loop {
        let before = tenant.stats().pages;
        let flushed = tenant.flush_some(POOL, 1, 1, None, FLUSH_NS_MIN);
        let flushed = flushed.unwrap();
        let dropped = before - tenant.stats().pages;
        let spent_ns = flushed.cost_ns;
        assert!(spent_ns <= FLUSH_NS_MIN);
        assert!(
            dropped * DROP_SAME_NS <= spent_ns,
            "the flush dropped {dropped} pages and counted only {spent_ns} ns for them"
        );
        steps += 1;
        if flushed.is_complete {
            break;
        }
        assert!(dropped > 0, "step {steps} of the flush dropped no page");
    }
    assert!(
        (3..=10).contains(&steps),
        "the flush took {steps} steps, not 3 to 10"
    );
    assert_eq!(tenant.stats().pages, 1);
    // With a budget of 0 ns, a flush does not even look up the object, so it never completes.
    for object in [2, 1] {
        let flushed = tenant.flush_some(POOL, object, 1, None, 0).unwrap();
        assert_eq!((flushed.is_complete, flushed.cost_ns), (false, 0));
    }
    engine.check_invariants();
}
