// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of deferred freeing: pages are detached in one step, so that they are no longer found, and
//! are freed later in small steps.

use super::{OPEN, POOL, add, fill, get, maintain_all, new_engine, noise, partly_noise, put};
use crate::PutResult::{Refused, Stored};
use crate::config::TENANT_METADATA_BYTES;
use crate::cost::{DROP_SAME_NS, FOLLOWED_NS};
use crate::{
    Engine, FLUSH_NS_MIN, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, Page, Put, Quota, Tenant, Time,
};

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

/// Number of pages of one put request in the tests of dropped pages.
const BATCH: usize = 64;

/// Charge in bytes of a page that does not compress.
const NOISE_CHARGE: u64 = PAGE_SIZE as u64 + PAGE_METADATA_CHARGE_BYTES;

/// Puts BATCH pages of an object that do not compress, beginning with page `first`, in one request.
/// Returns the number of stored pages.
fn put_batch(tenant: &Tenant, object: u64, first: u64) -> u64 {
    let page = |index: u64| noise(object << 32 | index);
    let pages: Vec<Page> = (first..first + BATCH as u64).map(page).collect();
    let mut puts = Vec::with_capacity(BATCH);
    for (index, page) in (first..).zip(&pages) {
        puts.push(Put {
            object,
            index,
            cookie: 1,
            workingset: false,
            page,
        });
    }
    let mut results = [Refused; BATCH];
    tenant.put(POOL, &puts, &mut results).unwrap();
    results.iter().filter(|&&result| result == Stored).count() as u64
}

/// A large VM reboots in a full pool while another VM keeps putting pages, so that background work
/// is never idle. The active VM must lose no page while dropped pages occupy memory. Dropped pages
/// must be freed at least as fast as new pages take memory.
#[test]
fn a_busy_tenant_loses_no_page_while_dropped_pages_of_a_rebooted_tenant_are_in_memory() {
    let engine = new_engine(16 << 20);
    // Each of these tenants takes a share of the pool, so that `active` is above its entitlement.
    let idle: Vec<Tenant> = (0..8)
        .map(|nr| add(&engine, &format!("idle{nr}"), None, OPEN))
        .collect();
    let (big, active) = (
        add(&engine, "big", None, OPEN),
        add(&engine, "active", None, OPEN),
    );
    for first in (0..1700).step_by(BATCH) {
        put_batch(&big, 1, first);
        put_batch(&active, 1, first);
        maintain_all(&engine);
    }
    assert_eq!(engine.stats().evictions, 0, "the pool is too small");
    let shared = active.shared();
    assert!(
        shared.excess_bytes() > 0,
        "the active tenant is not above its entitlement, so nothing would evict its pages"
    );
    big.clear();
    let dropped = engine.stats().detached_pages;
    let (mut first, mut stored) = (10_000, 0);
    while engine.stats().detached_pages > 0 {
        stored += put_batch(&active, 1, first);
        first += BATCH as u64;
        engine.maintain(Time(0), BATCH);
        if engine.stats().detached_pages > 0 {
            assert_eq!(
                active.stats().evictions,
                0,
                "live pages were evicted while {} dropped pages are in memory",
                engine.stats().detached_pages
            );
        }
        assert!(
            first < 20_000,
            "{} of {dropped} dropped pages are in memory after {stored} puts",
            engine.stats().detached_pages
        );
    }
    assert!(
        stored <= dropped,
        "{stored} pages were stored while {dropped} dropped pages were freed"
    );
    assert!(idle.iter().all(|tenant| tenant.stats().evictions == 0));
    engine.check_invariants();
}

/// A guest with a limit fills its pool and destroys it, again and again. Its dropped pages must
/// count against its limit, so that it never holds more memory than that, and its neighbour must
/// lose no page.
#[test]
fn dropped_pages_count_against_the_limit_of_their_tenant() {
    const LIMIT_BYTES: u64 = 2 << 20;
    let engine = new_engine(16 << 20);
    let idle: Vec<Tenant> = (0..8)
        .map(|nr| add(&engine, &format!("idle{nr}"), None, OPEN))
        .collect();
    let quota = Quota {
        limit_bytes: Some(LIMIT_BYTES),
        ..OPEN
    };
    let (limited, neighbour) = (
        add(&engine, "limited", None, quota),
        add(&engine, "neighbour", None, OPEN),
    );
    for first in (0..2900).step_by(BATCH) {
        put_batch(&neighbour, 1, first);
        maintain_all(&engine);
    }
    assert!(neighbour.shared().excess_bytes() > 0);
    let mut stored = 0;
    for _ in 0..40 {
        for first in (0..256).step_by(BATCH) {
            stored += put_batch(&limited, 1, first);
            engine.maintain(Time(0), BATCH);
            let state = limited.shared().lock(&engine.totals);
            let (live, dropped) = (state.index.gauges, state.index.detached);
            let bytes = live.charged_bytes() + dropped.charged_bytes();
            assert!(
                bytes <= LIMIT_BYTES,
                "the tenant holds {bytes} B in live and dropped pages, above its limit"
            );
        }
        limited.destroy_pool(POOL).unwrap();
        limited.create_pool(POOL).unwrap();
        assert_eq!(
            (neighbour.stats().evictions, limited.stats().evictions),
            (0, 0),
            "live pages were evicted while dropped pages are in memory"
        );
    }
    assert!(
        stored > 40 * 200,
        "only {stored} pages of the tenant were stored in 40 rounds"
    );
    assert!(idle.iter().all(|tenant| tenant.stats().pages == 0));
    engine.check_invariants();
}

/// Evictions that free memory for later puts choose a tenant only if no tenant has dropped pages.
#[test]
fn evictions_for_the_pool_free_dropped_pages_first() {
    let engine = new_engine(4 << 20);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    fill(&a, 1, 30);
    fill(&b, 1, 300);
    a.flush(POOL, 1, 0, None).unwrap();
    b.shared().entitled_bytes.set(0);
    assert_eq!(engine.evict_excess(16), 16);
    assert_eq!((a.stats().detached_pages, b.stats().evictions), (14, 0));
    assert!(engine.evict_excess(16) >= 14);
    assert_eq!((a.stats().detached_pages, b.stats().evictions), (0, 0));
    assert_eq!(engine.evict_excess(16), 16);
    assert_eq!(b.stats().evictions, 16);
}

/// A put of a tenant at its limit frees the tenant's own dropped pages before it evicts a page.
#[test]
fn a_put_at_the_limit_frees_dropped_pages_before_it_evicts() {
    let engine = new_engine(4 << 20);
    let quota = Quota {
        limit_bytes: Some(40 * NOISE_CHARGE),
        ..OPEN
    };
    let tenant = add(&engine, "a", None, quota);
    fill(&tenant, 1, 20);
    fill(&tenant, 2, 20);
    tenant.flush(POOL, 1, 0, None).unwrap();
    for (index, dropped) in (20..40).zip((0..20).rev()) {
        assert_eq!(put(&tenant, 2, index, 1, &noise(index)), Stored);
        let stats = tenant.stats();
        assert_eq!((stats.detached_pages, stats.evictions), (dropped, 0));
    }
    assert_eq!(put(&tenant, 2, 40, 1, &noise(40)), Stored);
    assert_eq!(tenant.stats().evictions, 1);
    engine.check_invariants();
}

/// Frees dropped pages beside new pages that are finalized. The dropped pages must not count
/// against the budget of background work, because the budget limits how many new pages it accepts.
#[test]
fn freeing_dropped_pages_takes_no_budget_from_new_pages() {
    let engine = new_engine(16 << 20);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    fill(&a, 1, 1000);
    a.clear();
    assert_eq!(put_batch(&b, 1, 0), BATCH as u64);
    assert_eq!(put_batch(&b, 1, 64), BATCH as u64);
    engine.maintain(Time(0), BATCH);
    assert_eq!(b.stats().nursery_pages, BATCH as u64);
    assert_eq!(a.stats().detached_pages, 1000 - 2 * BATCH as u64);
}

/// Dropped pages of one tenant are freed soon, however many another one drops.
#[test]
fn tenants_take_turns_when_dropped_pages_are_freed() {
    let engine = new_engine(16 << 20);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    fill(&a, 1, 1000);
    fill(&b, 1, 100);
    a.clear();
    b.clear();
    engine.maintain(Time(0), 300);
    assert_eq!(b.stats().detached_pages, 0);
    assert!(a.stats().detached_pages > 700);
}
