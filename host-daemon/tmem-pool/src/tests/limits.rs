// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of limits: which tenant loses pages when memory is needed, and which puts are refused.

use super::{
    OPEN, POOL, add, config, fill, finalize_raw, get, maintain_all, new_engine, noise,
    partly_noise, put, put_raw,
};
use crate::config::{
    EVICTIONS_PER_PUT_PAGE, INDEX_ROOM_BYTES, RAW_DIVISOR, RAW_PAGES_MAX, RAW_PAGES_MIN,
    RECLAIM_DIVISOR, STALE_RAW_MAX, SWEEP_NS, reclaim_high_bytes,
};
use crate::evict::unshared;
use crate::state::Reason;
use crate::{
    AdmissionError, Engine, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, Page, Put, PutResult, Quota,
    Tenant, TenantSpec, Time,
};
use PutResult::{Refused, Stored};

/// Charge in bytes of a page that does not compress.
const NOISE_CHARGE: u64 = PAGE_SIZE as u64 + PAGE_METADATA_CHARGE_BYTES;

fn limited(limit_bytes: u64) -> Quota {
    Quota {
        limit_bytes: Some(limit_bytes),
        ..OPEN
    }
}

#[test]
fn a_tenant_over_its_limit_evicts_its_own_oldest_pages() {
    let engine = new_engine(4 << 20);
    let a = add(&engine, "a", None, limited(10 * NOISE_CHARGE));
    let b = add(&engine, "b", None, OPEN);
    fill(&b, 1, 20);
    assert_eq!(fill(&a, 1, 15), 15);
    let stats = a.stats();
    assert_eq!((stats.pages, stats.charged_bytes), (10, 10 * NOISE_CHARGE));
    assert_eq!((stats.evictions, stats.evictions_limit), (5, 5));
    assert_eq!((b.stats().pages, b.stats().evictions), (20, 0));
    for index in 0..5 {
        assert_eq!(
            get(&a, 1, index, 1),
            None,
            "page {index} was not evicted, although it is one of the oldest five"
        );
    }
    for index in 5..15 {
        assert!(
            get(&a, 1, index, 1).is_some(),
            "page {index} was evicted, although it is not one of the oldest five"
        );
    }
    engine.check_invariants();
}

#[test]
fn a_page_whose_charge_exceeds_the_limit_is_refused_without_eviction() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, limited(NOISE_CHARGE - 1));
    assert_eq!(put(&tenant, 1, 2, 1, &noise(1)), Refused);
    tenant.set_quota(OPEN).unwrap();
    assert_eq!(put(&tenant, 1, 0, 1, &[7; PAGE_SIZE]), Stored);
    assert_eq!(put(&tenant, 1, 1, 1, &[8; PAGE_SIZE]), Stored);
    tenant.set_quota(limited(NOISE_CHARGE - 1)).unwrap();
    // A put stores a page raw (uncompressed) at first, so even a same-filled page needs room for a
    // raw page.
    assert_eq!(put(&tenant, 1, 2, 1, &[9; PAGE_SIZE]), Refused);
    assert_eq!(tenant.stats().evictions, 0);
    // A put that is refused must also drop the older page under its key.
    assert_eq!(put(&tenant, 1, 1, 2, &noise(1)), Refused);
    assert_eq!(get(&tenant, 1, 1, 1), None);
    assert_eq!(get(&tenant, 1, 1, 2), None);
    assert!(get(&tenant, 1, 0, 1).is_some());
    assert_eq!(tenant.stats().puts_refused, 3);
    assert_eq!((engine.stats().blobs, engine.stats().pages), (0, 0));
}

#[test]
fn the_number_of_keys_of_a_tenant_is_limited() {
    let engine = Engine::with(config(64 << 20), crate::hash::PageHash::of, 100).unwrap();
    let tenant = add(&engine, "a", None, OPEN);
    let stored = (0..150)
        .filter(|&i| put(&tenant, i, 0, 1, &[0; PAGE_SIZE]) == Stored)
        .count();
    assert_eq!(stored, 100);
    // Keys of detached pages (dropped, not freed yet) still count against the limit. Otherwise a
    // guest that fills and clears its pools repeatedly would take more and more memory.
    tenant.clear();
    tenant.create_pool(POOL).unwrap();
    assert_eq!(put(&tenant, 1, 0, 1, &[0; PAGE_SIZE]), Refused);
    maintain_all(&engine);
    assert_eq!(put(&tenant, 1, 0, 1, &[0; PAGE_SIZE]), Stored);
}

/// Puts and removes 40,000 objects with one page each. The engine must free each object with its
/// last page, so that the limit of keys also limits the number of objects.
#[test]
fn an_object_is_freed_with_its_last_page() {
    let engine = new_engine(64 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(put(&tenant, u64::MAX, 0, 1, &[0; PAGE_SIZE]), Stored);
    maintain_all(&engine);
    let before = engine.stats().metadata_bytes;
    for round in 0..20 {
        for object in 1..=2000 {
            let object = round * 2000 + object;
            assert_eq!(put(&tenant, object, 0, 1, &[7; PAGE_SIZE]), Stored);
            match object % 3 {
                0 => assert!(get(&tenant, object, 0, 1).is_some()),
                1 => drop(tenant.flush(POOL, object, 0, None)),
                _ => drop(tenant.flush(POOL, object, 0, Some(1))),
            }
        }
        maintain_all(&engine);
    }
    let after = engine.stats().metadata_bytes;
    assert!(
        after < before + (256 << 10),
        "metadata grew from {before} B to {after} B, although all objects are gone"
    );
}

/// Puts incompressible pages of an object until one is refused, without background work, and
/// returns the number of stored pages.
fn burst(tenant: &Tenant, object: u64) -> u64 {
    let page = |index: &u64| noise(object << 32 | index);
    let stored = |index: &u64| put_raw(tenant, object, *index, 1, &page(index)) == Stored;
    (0..100_000).take_while(stored).count() as u64
}

/// Quota of a tenant that is entitled to this number of bytes and cannot have more.
fn fixed(bytes: u64) -> Quota {
    Quota {
        reserve_bytes: bytes,
        limit_bytes: Some(bytes),
        weight: 0,
    }
}

/// Quota of a tenant that is entitled to nothing and has no limit.
const GUEST: Quota = Quota { weight: 0, ..OPEN };

/// Puts pages of four VMs without background work, as a burst does that is much faster than
/// compression. Each VM may use its entitlement for raw pages, and no more than that.
#[test]
fn a_burst_of_raw_pages_fills_the_entitlement_of_each_tenant() {
    const SIZE: u64 = 48 << 20;
    const ENTITLED: u64 = 10 << 20;
    let engine = new_engine(SIZE);
    let tenants = ["a", "b", "c", "d"].map(|name| add(&engine, name, None, fixed(ENTITLED)));
    let expected = ENTITLED / NOISE_CHARGE;
    assert!(
        expected > 3 * ENTITLED / RAW_DIVISOR / PAGE_SIZE as u64,
        "the test is too weak: {expected} pages are few"
    );
    for tenant in &tenants {
        assert_eq!(tenant.stats().nursery_pages_max, expected);
        assert_eq!(burst(tenant, 1), expected);
        let stats = tenant.stats();
        assert_eq!((stats.puts_refused, stats.refused_nursery), (1, 1));
        assert_eq!(
            (stats.nursery_pages, stats.nursery_pages_max),
            (expected, expected)
        );
        assert!(stats.charged_bytes <= ENTITLED);
    }
    assert!(engine.stats().held_bytes <= SIZE);
    let evictions = tenants.each_ref().map(|tenant| tenant.stats().evictions);
    assert_eq!(
        evictions, [0; 4],
        "a tenant lost pages within its entitlement"
    );
    engine.check_invariants();
    maintain_all(&engine);
    for tenant in &tenants {
        assert_eq!(
            (tenant.stats().nursery_pages, tenant.stats().pages),
            (0, expected)
        );
    }
}

/// A tenant above its entitlement may have the smallest number of raw pages whatever the other
/// tenants do, and more while the pool has free memory. This memory does not include the memory
/// that the pool keeps free for puts.
#[test]
fn raw_pages_above_the_entitlement_use_only_free_memory() {
    const SIZE: u64 = 48 << 20;
    let engine = new_engine(SIZE);
    let owner = add(&engine, "owner", None, OPEN);
    let guest = add(&engine, "guest", None, GUEST);
    let stored = burst(&guest, 1);
    assert!(
        stored > 10 * u64::from(RAW_PAGES_MIN),
        "a tenant without entitlement stored only {stored} raw pages in an empty pool"
    );
    let stats = engine.stats();
    assert!(
        stats.held_bytes + reclaim_high_bytes(SIZE) <= SIZE,
        "raw pages used the memory that the pool keeps free: {stats:?}"
    );
    assert_eq!((stats.pages, guest.stats().evictions), (stored, 0));
    // The other tenant takes the memory to which it is entitled.
    let owned = burst(&owner, 2);
    assert!(
        owned * NOISE_CHARGE > SIZE - (2 << 20),
        "only {owned} pages are stored"
    );
    assert_eq!(owner.stats().evictions, 0);
    maintain_all(&engine);
    assert!(engine.stats().held_bytes <= SIZE);
    guest.flush(POOL, 1, 0, None).unwrap();
    maintain_all(&engine);
    // Leave memory for these pages, but less than the pool keeps free.
    let used_bytes = guest.engine().used_bytes();
    engine.resize(used_bytes + 300 * PAGE_SIZE as u64);
    assert_eq!(guest.engine().spare_raw_pages(), 0);
    assert_eq!(
        burst(&guest, 3),
        RAW_PAGES_MIN.into(),
        "in a full pool, a tenant without entitlement has another number of raw pages"
    );
    engine.check_invariants();
}

/// Background workers finalize pages of all tenants in turns, so a tenant with many raw pages does
/// not delay those of another tenant.
#[test]
fn a_burst_of_one_tenant_does_not_delay_raw_pages_of_another() {
    let engine = new_engine(32 << 20);
    let hostile = add(&engine, "hostile", None, GUEST);
    let other = add(&engine, "other", None, OPEN);
    burst(&hostile, 1);
    for round in 0..8 {
        for index in 0..16 {
            let index = round * 16 + index;
            assert_eq!(
                put_raw(&other, 2, index, 1, &noise(1 << 40 | index)),
                Stored
            );
        }
        let before = hostile.stats().finalized_raw;
        while other.stats().nursery_pages > 0 {
            engine.maintain(Time(0), 1);
        }
        let done = hostile.stats().finalized_raw - before;
        assert!(
            done <= 24,
            "{done} pages of the other tenant were finalized before these 16"
        );
    }
    assert!(hostile.stats().nursery_pages > 0, "the test is too weak");
}

/// A tenant whose limit is its entitlement must not see, in the number of raw pages that it may
/// have, how much memory other tenants use.
#[test]
fn other_tenants_do_not_change_the_number_of_raw_pages_of_a_limited_tenant() {
    let quota = fixed(3 << 20);
    let [alone, beside] = [false, true].map(|beside| {
        let engine = new_engine(16 << 20);
        let tenant = add(&engine, "a", None, quota);
        let other = add(&engine, "b", None, GUEST);
        if beside {
            burst(&other, 9);
        }
        let mut stored = Vec::new();
        for object in 1..4 {
            stored.push((tenant.stats().nursery_pages_max, burst(&tenant, object)));
            finalize_raw(&tenant);
            tenant.flush(POOL, object, 0, Some(300)).unwrap();
        }
        stored
    });
    assert_eq!(alone, beside);
}

/// The number of raw pages that a tenant may always have grows with its entitlement. It lies between
/// four put requests of the largest size and as many pages as one core compresses in about 10 ms.
#[test]
fn a_tenant_at_its_entitlement_may_have_some_raw_pages() {
    for (bytes, expected) in [(4 << 20, RAW_PAGES_MIN), (1 << 30, RAW_PAGES_MAX)] {
        let engine = new_engine(64 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        tenant.shared().entitle(bytes);
        let state = tenant.shared().lock(&engine.totals);
        assert_eq!(state.raw_min, expected);
    }
}

/// Puts and gets raw pages again and again, so that the queue of raw pages has many entries of
/// pages that are gone. The queue must not grow without bound, and each step of background work
/// must remove only some of them under the tenant's lock.
#[test]
fn stale_entries_of_the_raw_queue_are_bounded_and_removed_in_steps() {
    let engine = new_engine(16 << 20);
    let tenant = add(&engine, "a", None, fixed(4 << 20));
    let raw_max = tenant.stats().nursery_pages_max;
    let mut refused = 0;
    for _ in 0..3 * raw_max {
        match put_raw(&tenant, 1, 1, 1, &[1; PAGE_SIZE]) {
            Stored => assert!(get(&tenant, 1, 1, 1).is_some()),
            Refused => refused += 1,
        }
    }
    assert_eq!(
        refused, raw_max,
        "the queue is not twice the number of raw pages"
    );
    let shared = tenant.shared();
    for left in (0..(2 * raw_max).div_ceil(STALE_RAW_MAX as u64)).rev() {
        assert!(shared.has_raw());
        assert_eq!(engine.finalize(shared), Some(usize::from(left > 0)));
    }
    assert!(!shared.has_raw());
    assert_eq!(put_raw(&tenant, 1, 1, 1, &[1; PAGE_SIZE]), Stored);
    engine.check_invariants();
}

#[test]
fn other_background_work_progresses_during_continuous_puts() {
    let engine = new_engine(8 << 20);
    let (leaves, shrinks, stays) = (
        add(&engine, "a", None, OPEN),
        add(&engine, "b", None, OPEN),
        add(&engine, "c", None, OPEN),
    );
    fill(&leaves, 1, 64);
    fill(&shrinks, 1, 64);
    drop(leaves);
    shrinks.set_quota(limited(32 * NOISE_CHARGE)).unwrap();
    let (page, mut results) = (partly_noise(1, 4), [Stored; 64]);
    for round in 0..64 {
        let puts = [0; 64].map(|_: u8| Put {
            object: 1,
            index: 0,
            cookie: 1,
            workingset: false,
            page: &page,
        });
        let puts: Vec<Put<'_>> = puts
            .into_iter()
            .zip(round * 64..)
            .map(|(put, index)| Put { index, ..put })
            .collect();
        stays.put(POOL, &puts, &mut results).unwrap();
        assert_eq!(results, [Stored; 64]);
        // Finalize as many pages as were just put, except in the first round, so that some raw
        // pages always wait to be finalized.
        engine.maintain(Time(0), 32);
        if round > 0 {
            engine.maintain(Time(0), 32);
        }
    }
    assert!(
        stays.stats().nursery_pages > 0,
        "the test is too weak: no raw page waits to be finalized after the last put"
    );
    let stats = engine.stats();
    assert_eq!((stats.detached_pages, stats.removed_tenants), (0, 0));
    assert!(shrinks.stats().charged_bytes <= 32 * NOISE_CHARGE);
}

#[test]
fn shrinking_the_pool_evicts_same_filled_pages() {
    let engine = new_engine(16 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..20_000 {
        // Put each page in an object of its own, so that each also takes a tree node of its own.
        assert_eq!(put(&tenant, index, 0, 1, &[0; PAGE_SIZE]), Stored);
    }
    maintain_all(&engine);
    let held_bytes = engine.stats().held_bytes;
    assert!(
        held_bytes > 2 << 20,
        "the test is too weak: the pages take only {held_bytes} B"
    );
    engine.resize(1 << 20);
    maintain_all(&engine);
    let stats = engine.stats();
    assert!(
        stats.held_bytes <= 1 << 20,
        "the pool holds more than its new size of 1 MiB: {stats:?}"
    );
}

#[test]
fn maintain_compacts_until_the_heap_is_dense() {
    let engine = new_engine(32 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..4_000 {
        assert_eq!(put(&tenant, 1, index, 1, &partly_noise(index, 3)), Stored);
    }
    for index in (0..4_000).filter(|index| index % 4 != 0) {
        tenant.flush(POOL, 1, index, Some(1)).unwrap();
    }
    let heap = &tenant.engine().store.heap;
    assert!(heap.is_sparse() && heap.has_spare());
    maintain_all(&engine);
    assert!(
        !(heap.is_sparse() && heap.has_spare()),
        "background work stopped while compaction could free spans: {:?}",
        heap.stats()
    );
}

#[test]
fn maintain_releases_idle_frames() {
    // Give the pool a much larger largest size. The limit of idle frames (unused memory that is
    // kept) must depend on the present size only.
    let mut config = config(64 << 20);
    config.size_max_bytes = 16 << 30;
    let engine = Engine::new(config).unwrap();
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(fill(&tenant, 1, 6_000), 6_000);
    tenant.clear();
    maintain_all(&engine);
    let stats = engine.stats();
    assert_eq!(stats.frames_bytes, 16 << 20);
}

/// Tests that the frames which a compaction after a sweep empties go back to the system as well.
#[test]
fn a_sweep_leaves_neither_spare_spans_nor_idle_frames() {
    let engine = new_engine(32 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..4_000 {
        assert_eq!(put(&tenant, 1, index, 1, &partly_noise(index, 3)), Stored);
        engine.maintain(Time(0), 64);
    }
    maintain_all(&engine);
    let heap = &tenant.engine().store.heap;
    // Make spare spans, but too few for a compaction before the sweep ends.
    for index in (0..4_000).step_by(100) {
        tenant.flush(POOL, 1, index, Some(1)).unwrap();
    }
    assert!(
        heap.has_spare() && !heap.is_sparse(),
        "the test is too weak: {:?}",
        heap.stats()
    );
    while engine.maintain(Time(SWEEP_NS), 64) {}
    assert_eq!((heap.has_spare(), heap.idle_frames()), (false, 0));
}

#[test]
fn maintain_stops_when_compaction_frees_nothing() {
    let engine = new_engine(32 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    // Put a few pages of each length, so that no span (group of adjacent frames) is full.
    for index in 0..200 {
        let page = partly_noise(index, 1 + index as usize % 7);
        assert_eq!(put(&tenant, 1, index, 1, &page), Stored);
    }
    maintain_all(&engine);
    let heap = &tenant.engine().store.heap;
    let stats = heap.stats();
    assert!(stats.payload_bytes < stats.frames_bytes * 19 / 20);
    assert!(
        !heap.is_sparse() && !heap.has_spare(),
        "the heap is still sparse or has spare spans after compaction: {stats:?}"
    );
}

#[test]
fn emptied_pools_are_freed_in_bounded_steps() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for nr in 0..200 {
        tenant.create_pool(10 + nr).unwrap();
        let mut results = [Stored];
        let put = Put {
            object: 1,
            index: 0,
            cookie: 1,
            workingset: false,
            page: &[0; PAGE_SIZE],
        };
        tenant.put(10 + nr, &[put], &mut results).unwrap();
        tenant.destroy_pool(10 + nr).unwrap();
    }
    // The eviction frees the pages of the destroyed pools. It leaves the empty pools themselves for
    // `free_detached`.
    let (mut state, mut freed) = (tenant.shared().lock(&tenant.engine().totals), Vec::new());
    assert_eq!(state.evict(1, Reason::Pool, &unshared, &mut freed), 200);
    assert_eq!(state.free_detached(16, &mut freed), 16);
    assert!(state.index.has_detached());
    while state.free_detached(16, &mut freed) > 0 {}
    assert!(!state.index.has_detached());
    drop(state);
    tenant.engine().release_all(freed);
    maintain_all(&engine);
}

/// Tests that a put is stored in a full pool of any size: the growth of the tables by the put
/// itself must not look like a lack of memory for the index.
#[test]
fn a_full_pool_stores_each_put_although_its_tables_grow() {
    for more_bytes in (0..8 * PAGE_SIZE as u64).step_by(64) {
        let engine = new_engine(40 * NOISE_CHARGE + INDEX_ROOM_BYTES + more_bytes);
        let tenant = add(&engine, "web1", None, OPEN);
        assert_eq!(fill(&tenant, 1, 60), 60, "{more_bytes} more bytes");
    }
}

#[test]
fn a_full_pool_evicts_the_tenant_most_above_its_entitlement() {
    let engine = new_engine(400 * NOISE_CHARGE + INDEX_ROOM_BYTES);
    let reserve = Quota {
        reserve_bytes: 150 * NOISE_CHARGE,
        ..OPEN
    };
    let reserved = add(&engine, "reserved", None, reserve);
    let greedy = add(&engine, "greedy", None, OPEN);
    let modest = add(&engine, "modest", None, OPEN);
    fill(&modest, 1, 60);
    fill(&reserved, 1, 150);
    // The greedy tenant can take the memory that other tenants leave unused. After that, its puts
    // evict only its own pages.
    assert_eq!(fill(&greedy, 1, 600), 600);
    assert_eq!(
        (reserved.stats().evictions, modest.stats().evictions),
        (0, 0)
    );
    assert!(
        greedy.stats().pages > 120,
        "the greedy tenant did not get the memory that other tenants leave unused: {:?}",
        greedy.stats()
    );
    assert!(greedy.stats().evictions > 0);
    engine.check_invariants();
    // Let the tenant `modest` take more of its share. Its puts evict pages of the greedy tenant.
    assert_eq!(fill(&modest, 2, 20), 20);
    assert_eq!((modest.stats().pages, modest.stats().evictions), (80, 0));
    assert_eq!(reserved.stats().pages, 150);
    let stats = engine.stats();
    assert!(stats.held_bytes <= stats.size_bytes);
    maintain_all(&engine);
}

#[test]
fn background_work_frees_memory_before_puts_need_it() {
    const SIZE: u64 = 16 << 20;
    let engine = new_engine(SIZE);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 2 * SIZE / PAGE_SIZE as u64);
    // Repeat the burst of puts until background work has to evict pages, whatever memory is free at
    // first.
    let mut object = 1;
    for _ in 0..8 {
        maintain_all(&engine);
        let before = tenant.stats().evictions;
        // Number of pages that take three quarters of the memory that is free at the low watermark.
        let burst = SIZE / RECLAIM_DIVISOR / 2 / PAGE_SIZE as u64 * 3 / 4;
        object += 1;
        for index in 0..burst {
            let page = noise(object << 32 | index);
            assert_eq!(put_raw(&tenant, object, index, 1, &page), Stored);
        }
        assert_eq!(
            tenant.stats().evictions,
            before,
            "puts evicted pages although the pool had free memory for them"
        );
    }
    engine.check_invariants();
}

/// Fills a pool with short pages, and then puts incompressible pages while other pages wait to be
/// finalized. Several short pages have to be evicted to free the memory for one incompressible
/// page. Another tenant is above its limit, so that background work has other work as well.
#[test]
fn background_work_frees_memory_as_fast_as_puts_take_it() {
    const SIZE: u64 = 16 << 20;
    let engine = new_engine(SIZE);
    let tenant = add(&engine, "a", None, OPEN);
    let limited_tenant = add(&engine, "b", None, OPEN);
    for index in 0..2_000 {
        put(&limited_tenant, 1, index, 1, &[7; PAGE_SIZE]);
    }
    for index in 0..16_000 {
        put(&tenant, 1, index, 1, &partly_noise(index, 2));
    }
    maintain_all(&engine);
    limited_tenant
        .set_quota(limited(PAGE_METADATA_CHARGE_BYTES))
        .unwrap();
    let before = tenant.stats().evictions;
    for round in 0..100u64 {
        let evicted = tenant.stats().evictions;
        for index in round * 16..(round + 1) * 16 {
            assert_eq!(put_raw(&tenant, 2, index, 1, &noise(index)), Stored);
        }
        assert_eq!(
            tenant.stats().evictions,
            evicted,
            "puts of round {round} evicted pages, which background work should have evicted before"
        );
        // Finalize pages, up to eight in each call, but leave about 32 raw pages, so that some
        // pages always wait to be finalized.
        for _ in 0..8 {
            if tenant.stats().nursery_pages > 32 {
                engine.maintain(Time(0), 8);
            }
        }
    }
    assert!(
        tenant.stats().nursery_pages > 0 && tenant.stats().evictions > before + 1600,
        "the test is too weak: no raw page is left, or too few pages were evicted: {:?}",
        tenant.stats()
    );
    engine.check_invariants();
}

#[test]
fn background_work_evicts_a_tenant_only_down_to_its_entitlement() {
    const PAGES: u64 = 1200;
    let engine = new_engine(8 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, PAGES);
    let shared = tenant.shared();
    let owed_bytes = shared.excess_bytes() + i128::from(shared.entitled_bytes.get());
    shared
        .entitled_bytes
        .set(owed_bytes as u64 - NOISE_CHARGE - 1);
    // The tenant is above its entitlement by one byte more than the charge of a page, so background
    // work must evict exactly two pages.
    assert_eq!(engine.evict_excess(16), 2);
    assert_eq!(tenant.stats().pages, PAGES - 2);
    // Another thread may have chosen this tenant before the two pages were evicted. The eviction of
    // that thread, which begins now, must find no excess any more.
    let entitled_bytes = shared.entitled_bytes.get();
    let mut freed = Vec::new();
    let mut state = shared.lock(&engine.totals);
    assert_eq!(
        state.evict_above(entitled_bytes, 16, Reason::Pool, &unshared, &mut freed),
        0
    );
    drop(state);
    assert_eq!(engine.evict_excess(16), 0);
}

#[test]
fn the_high_watermark_of_free_memory_has_a_maximum() {
    for (size_bytes, high_bytes) in [
        (64 << 20, 2 << 20),
        (4 << 30, 128 << 20),
        (16 << 40, 128 << 20),
    ] {
        assert_eq!(reclaim_high_bytes(size_bytes), high_bytes);
    }
}

/// Lets a sweep end while many frames are idle. They go back to the system in several steps of
/// background work, because each batch costs system calls.
#[test]
fn idle_frames_are_released_in_bounded_steps_after_a_sweep() {
    const BATCH_BYTES: u64 = 64 * PAGE_SIZE as u64;
    let engine = new_engine(64 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 3_000);
    tenant.drop_pages();
    maintain_all(&engine);
    let mut frames_bytes = engine.stats().frames_bytes;
    assert!(
        frames_bytes > 40 * BATCH_BYTES,
        "the test is too weak: the heap has only {frames_bytes} B of idle frames"
    );
    for _ in 0..1_000 {
        let more = engine.maintain(Time(SWEEP_NS), 1);
        let left_bytes = engine.stats().frames_bytes;
        assert!(
            frames_bytes - left_bytes <= BATCH_BYTES,
            "one step of background work released {} B, more than {BATCH_BYTES} B",
            frames_bytes - left_bytes
        );
        frames_bytes = left_bytes;
        if !more {
            break;
        }
    }
    assert_eq!(frames_bytes, 0);
    engine.check_invariants();
}

/// Lets a pool become full although its only tenant is within its entitlement. That is possible
/// because tables that never shrink take a part of the pool. Background work must not evict pages
/// to have free memory.
#[test]
fn background_work_evicts_nothing_if_no_tenant_is_above_its_entitlement() {
    const SIZE: u64 = 4 << 20;
    let engine = new_engine(64 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..30_000u64 {
        let mut page = [0; PAGE_SIZE];
        page[..8].copy_from_slice(&(index + 1).to_le_bytes());
        assert_eq!(put(&tenant, 1, index, 1, &page), Stored);
    }
    tenant.drop_pages();
    maintain_all(&engine);
    engine.resize(SIZE);
    let mut index = 0;
    while tenant.stats().evictions == 0 {
        put(&tenant, 2, index, 1, &noise(index));
        index += 1;
    }
    let before = tenant.stats();
    assert!(
        before.charged_bytes < before.entitled_bytes,
        "the test is too weak: the tenant is above its entitlement: {before:?}"
    );
    maintain_all(&engine);
    // A few evictions are allowed, because the pool may exceed its size by the index memory of the
    // last pages. Freeing memory up to the high watermark would evict about 30 pages.
    let evicted = tenant.stats().evictions - before.evictions;
    assert!(
        evicted < 12,
        "background work evicted {evicted} pages of a tenant within its entitlement, not fewer \
         than 12"
    );
}

#[test]
fn background_work_evicts_no_page_of_a_tenant_within_its_entitlement() {
    const SIZE: u64 = 4 << 20;
    let engine = new_engine(SIZE);
    let modest = add(&engine, "modest", None, OPEN);
    let greedy = add(&engine, "greedy", None, OPEN);
    fill(&modest, 1, 200);
    fill(&greedy, 1, 1200);
    maintain_all(&engine);
    let free_bytes = SIZE - engine.used_bytes();
    assert!(
        free_bytes >= SIZE / RECLAIM_DIVISOR / 2,
        "only {free_bytes} B are free after the background work"
    );
    assert_eq!((modest.stats().pages, modest.stats().evictions), (200, 0));
    assert!(greedy.stats().evictions > 0);
    engine.check_invariants();
}

/// Puts incompressible pages until the tenant is charged nine tenths of its entitlement. The
/// function repeats the puts up to ten times. Some of them are refused until enough neighbouring
/// keys of the other tenant are gone, because index memory is released in chunks.
fn takes_what_it_is_entitled_to(tenant: &Tenant, other: &Tenant) {
    let entitled_bytes = tenant.stats().entitled_bytes;
    let mut object = 0;
    while tenant.stats().charged_bytes < entitled_bytes * 9 / 10 {
        object += 1;
        assert!(
            object <= 10,
            "a tenant does not reach its entitlement: {:?}, beside {:?}",
            tenant.stats(),
            other.stats()
        );
        fill(tenant, object, entitled_bytes / NOISE_CHARGE);
    }
}

/// Puts same-filled pages, each in an object of its own, until the pool is full. Of all pages,
/// these take the most memory for their charge. Returns the number of pages put.
fn fill_with_keys(tenant: &Tenant) -> u64 {
    let mut object = 0;
    while tenant.stats().evictions < 100 {
        put(tenant, object, 0, 1, &[0; PAGE_SIZE]);
        object += 1;
    }
    object
}

#[test]
fn a_tenant_gets_its_entitlement_in_a_pool_full_of_index_entries() {
    let engine = new_engine(8 << 20);
    let keys = add(&engine, "keys", None, OPEN);
    fill_with_keys(&keys);
    let stats = engine.stats();
    assert!(
        stats.metadata_bytes > stats.size_bytes / 2,
        "the test is too weak: keys take less than half of the pool: {stats:?}"
    );
    let pages = add(&engine, "pages", None, OPEN);
    takes_what_it_is_entitled_to(&pages, &keys);
    assert!(keys.stats().charged_bytes >= keys.stats().entitled_bytes);
    maintain_all(&engine);
}

/// Fills the pool with keys of one tenant and flushes most of them. Then the charge of the
/// remaining pages is far below the memory of the tenant's index. Another tenant must still get its
/// entitlement.
#[test]
fn a_tenant_gets_its_entitlement_beside_a_tenant_with_a_sparse_index() {
    let engine = new_engine(8 << 20);
    let keys = add(&engine, "keys", None, OPEN);
    let objects = fill_with_keys(&keys);
    for object in (0..objects).filter(|object| object % 32 != 0) {
        keys.flush(POOL, object, 0, None).unwrap();
    }
    maintain_all(&engine);
    let (stats, of_keys) = (engine.stats(), keys.stats());
    assert!(
        stats.metadata_bytes > stats.size_bytes / 2,
        "the test is too weak: keys take less than half of the pool: {stats:?}"
    );
    assert!(
        of_keys.charged_bytes < stats.size_bytes / 8,
        "the test is too weak: the remaining pages are charged too much: {of_keys:?}"
    );
    let pages = add(&engine, "pages", None, OPEN);
    takes_what_it_is_entitled_to(&pages, &keys);
    maintain_all(&engine);
}

/// Lets many tenants fill the pool one after the other. No tenant may keep index memory for the
/// keys of its evicted pages.
#[test]
fn index_memory_of_evicted_pages_is_released() {
    const TENANTS: u64 = 12;
    let engine = new_engine(8 << 20);
    let tenants: Vec<Tenant> = (0..TENANTS)
        .map(|nr| add(&engine, &format!("{nr}"), None, OPEN))
        .collect();
    for tenant in &tenants {
        for index in 0..20_000 {
            put(tenant, 1, index, 1, &[index as u8; PAGE_SIZE]);
        }
    }
    let stats = engine.stats();
    let pages: u64 = tenants.iter().map(|tenant| tenant.stats().pages).sum();
    assert!(
        stats.metadata_bytes / pages <= 100,
        "metadata takes {} B for each held page, more than 100 B: {stats:?}",
        stats.metadata_bytes / pages
    );
    maintain_all(&engine);
}

#[test]
fn a_put_is_refused_if_page_and_metadata_do_not_fit_into_the_pool() {
    let engine = new_engine(6 << 10);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(put(&tenant, 1, 0, 1, &noise(1)), Refused);
    assert_eq!((tenant.stats().pages, engine.stats().payload_bytes), (0, 0));
    engine.check_invariants();
}

#[test]
fn a_reserve_above_the_unreserved_part_of_the_pool_is_refused() {
    let engine = new_engine(1000);
    let quota = |reserve_bytes, limit_bytes| Quota {
        reserve_bytes,
        limit_bytes,
        weight: 1,
    };
    let add = |name: &str, quota| {
        engine.add_tenant(TenantSpec {
            name: name.into(),
            trust_domain: None,
            quota,
        })
    };
    let a = add("a", quota(600, None)).unwrap();
    let error = |tenant: &str, reserve_bytes, available_bytes| {
        Some(AdmissionError {
            tenant: tenant.into(),
            reserve_bytes,
            available_bytes,
        })
    };
    assert_eq!(add("b", quota(401, None)).err(), error("b", 401, 400));
    // Only the part of a reserve that is within the tenant's limit has to fit into the pool.
    let b = add("b", quota(u64::MAX, Some(400))).unwrap();
    assert_eq!(a.set_quota(quota(601, None)).err(), error("a", 601, 600));
    assert_eq!(
        a.stats().reserve_bytes,
        600,
        "a refused quota changed the reserve"
    );
    assert_eq!(
        (a.stats().entitled_bytes, b.stats().entitled_bytes),
        (600, 400)
    );
    a.set_quota(quota(100, None)).unwrap();
    assert_eq!(
        (a.stats().entitled_bytes, b.stats().entitled_bytes),
        (600, 400)
    );
    // If the pool is smaller than the sum of all reserves, entitlements are scaled down.
    engine.resize(250);
    assert_eq!(
        (a.stats().entitled_bytes, b.stats().entitled_bytes),
        (50, 200)
    );
    // A reserve has to fit into the configured size of the pool, not into the size to which the
    // pool was shrunk.
    assert_eq!(add("c", quota(501, None)).err(), error("c", 501, 500));
    a.set_quota(quota(600, None)).unwrap();
    a.set_quota(quota(100, None)).unwrap();
    // When a tenant departs, its reserve is free at once.
    drop(b);
    assert_eq!(a.stats().entitled_bytes, 250);
    assert!(add("c", quota(150, None)).is_ok());
}

fn reserve(reserve_bytes: u64) -> Quota {
    Quota {
        reserve_bytes,
        ..OPEN
    }
}

#[test]
fn reserves_are_limited_by_the_configured_size_of_a_shrunk_pool() {
    let engine = new_engine(1000);
    let try_add = |name: &str, reserve_bytes| {
        engine.add_tenant(TenantSpec {
            name: name.into(),
            trust_domain: None,
            quota: reserve(reserve_bytes),
        })
    };
    engine.set_configured_size(2000);
    engine.resize(500);
    let a = try_add("a", 1500)
        .expect("a reserve that fits into the configured size of the pool was refused");
    drop(a);
    engine.set_configured_size(400);
    let error = try_add("a", 500)
        .expect_err("a reserve above the configured size of the pool was admitted");
    assert_eq!((error.reserve_bytes, error.available_bytes), (500, 400));
    // Reserves that exist when the configured size becomes smaller are kept. A tenant can lower its
    // reserve even if the sum of all reserves still does not fit.
    engine.set_configured_size(2000);
    let (a, b) = (try_add("a", 1000).unwrap(), try_add("b", 900).unwrap());
    engine.set_configured_size(400);
    a.set_quota(reserve(1001))
        .expect_err("a larger reserve was admitted although it does not fit");
    a.set_quota(reserve(1000))
        .expect("an unchanged reserve was refused");
    a.set_quota(reserve(600))
        .expect("a smaller reserve was refused");
    b.set_quota(reserve(901))
        .expect_err("a larger reserve was admitted although it does not fit");
    assert_eq!(
        (a.stats().reserve_bytes, b.stats().reserve_bytes),
        (600, 900)
    );
    try_add("c", 1).expect_err(
        "a reserve of 1 B was admitted although the reserves exceed the configured size",
    );
    try_add("c", 0).expect("a tenant without a reserve was refused");
}

#[test]
fn pool_size_and_quotas_change_atomically() {
    let engine = new_engine(1000);
    let (a, b) = (
        add(&engine, "a", None, reserve(500)),
        add(&engine, "b", None, reserve(500)),
    );
    let c = add(&engine, "c", None, OPEN);
    let reserves = || [&a, &b, &c].map(|tenant| tenant.stats().reserve_bytes);
    let entitled = || [&a, &b, &c].map(|tenant| tenant.stats().entitled_bytes);
    // The result of configure() must not depend on the order of the quotas.
    for (of_a, of_b) in [(600, 400), (400, 600)] {
        for quotas in [
            [(&a, reserve(of_a)), (&b, reserve(of_b))],
            [(&b, reserve(of_b)), (&a, reserve(of_a))],
        ] {
            engine
                .configure(None, &quotas)
                .expect("two reserves that fit into the configured size were refused");
            assert_eq!((reserves(), entitled()), ([of_a, of_b, 0], [of_a, of_b, 0]));
        }
    }
    let wrong = |configured_bytes, quotas: &[(&Tenant, Quota)]| {
        let error = engine
            .configure(configured_bytes, quotas)
            .expect_err("reserves above the configured size were admitted");
        assert_eq!((reserves(), entitled()), ([400, 600, 0], [400, 600, 0]));
        c.set_quota(reserve(1))
            .expect_err("a refused call of configure() changed the configured size");
        (error.tenant, error.reserve_bytes, error.available_bytes)
    };
    // The error must name a tenant whose reserve does not fit, whether the call changes its quota
    // or not. If all other reserves fit, the error names a tenant whose reserve grows.
    let quotas = [(&a, reserve(601)), (&b, reserve(400))];
    assert_eq!(wrong(None, &quotas), ("a".into(), 601, 600));
    assert_eq!(
        wrong(Some(2000), &[(&a, reserve(1401))]),
        ("a".into(), 1401, 1400)
    );
    assert_eq!(wrong(Some(999), &[]), ("b".into(), 600, 599));
    assert_eq!(
        wrong(Some(999), &[(&c, reserve(0))]),
        ("b".into(), 600, 599)
    );
    // Change the configured size and reserves together: first to a smaller size with smaller
    // reserves, then to a larger size with larger reserves.
    let quotas = [(&a, reserve(100)), (&b, reserve(100)), (&c, reserve(100))];
    engine
        .configure(Some(300), &quotas)
        .expect("three reserves of 100 B were refused in a pool of 300 B");
    a.set_quota(reserve(101))
        .expect_err("a larger reserve was admitted although the configured size is reserved");
    engine
        .configure(Some(3000), &[(&a, reserve(2800))])
        .expect("three reserves of 3,000 B in total were refused in a pool of 3,000 B");
    assert_eq!(reserves(), [2800, 100, 100]);
    // If an operator has made the configured size too small for all reserves, a tenant can still
    // ask for a smaller reserve or for its present reserve.
    engine.set_configured_size(1000);
    engine
        .configure(None, &[(&a, reserve(2800)), (&b, reserve(50))])
        .expect("reserves that do not grow were refused");
    let quotas = [(&a, reserve(900)), (&b, reserve(51))];
    let error = engine.configure(None, &quotas).expect_err(
        "tenant b got a larger reserve although the reserves exceed the configured size",
    );
    assert_eq!((error.tenant.as_str(), error.available_bytes), ("b", 0));
}

#[test]
fn entitlements_change_as_tenants_join_and_leave() {
    let engine = new_engine(1000);
    let weighted = |weight| Quota { weight, ..OPEN };
    let a = add(&engine, "a", None, weighted(1));
    assert_eq!(a.stats().entitled_bytes, 1000);
    let b = add(&engine, "b", None, weighted(3));
    assert_eq!(
        (a.stats().entitled_bytes, b.stats().entitled_bytes),
        (250, 750)
    );
    engine.resize(2000);
    assert_eq!(
        (a.stats().entitled_bytes, b.stats().entitled_bytes),
        (500, 1500)
    );
    let clone = b.clone();
    drop(b);
    assert_eq!(
        a.stats().entitled_bytes,
        500,
        "tenant b lost its entitlement with one of its two handles"
    );
    drop(clone);
    assert_eq!(a.stats().entitled_bytes, 2000);
}

#[test]
fn a_shrunk_pool_evicts_pages_in_bounded_steps() {
    let engine = new_engine(400 * NOISE_CHARGE + INDEX_ROOM_BYTES);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    fill(&a, 1, 120);
    fill(&b, 1, 240);
    engine.resize(200 * NOISE_CHARGE + INDEX_ROOM_BYTES);
    assert_eq!(engine.stats().pages, 360, "resize() itself evicted pages");
    assert!(engine.maintain(Time(0), 20));
    let evicted = engine.stats().evictions;
    assert!(
        (1..=20).contains(&evicted),
        "a step of 20 pages evicted {evicted} pages, not 1 to 20"
    );
    assert_eq!(
        a.stats().evictions,
        0,
        "pages of tenant a were evicted although tenant b is further above its entitlement"
    );
    maintain_all(&engine);
    let stats = engine.stats();
    assert!(
        stats.held_bytes <= stats.size_bytes && stats.pages > 150,
        "the pool holds more than its size, or evicted too many pages: {stats:?}"
    );
    assert!(
        a.stats().pages.abs_diff(b.stats().pages) < 40,
        "the equally entitled tenants a and b differ too much: {} and {} pages",
        a.stats().pages,
        b.stats().pages
    );
}

#[test]
fn a_put_evicts_a_bounded_number_of_pages() {
    let engine = new_engine(2000 * NOISE_CHARGE);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 1500);
    engine.resize(8 * NOISE_CHARGE);
    assert_eq!(
        put(&tenant, 2, 0, 1, &noise(1)),
        Refused,
        "a page was stored although the pool is still far above its size"
    );
    let evictions = tenant.stats().evictions;
    assert!(
        (1..=EVICTIONS_PER_PUT_PAGE as u64).contains(&evictions),
        "a put in a pool above its size evicted {evictions} pages, not 1 to {EVICTIONS_PER_PUT_PAGE}"
    );
    // If a tenant is above a limit that was lowered, its put evicts no more than
    // EVICTIONS_PER_PUT_PAGE pages either.
    engine.resize(2000 * NOISE_CHARGE);
    tenant.set_quota(limited(8 * NOISE_CHARGE)).unwrap();
    assert_eq!(put(&tenant, 2, 0, 1, &noise(1)), Refused);
    let more = tenant.stats().evictions - evictions;
    assert!(
        (1..=EVICTIONS_PER_PUT_PAGE as u64).contains(&more),
        "a put of a tenant above its limit evicted {more} pages, not 1 to {EVICTIONS_PER_PUT_PAGE}"
    );
    maintain_all(&engine);
    assert_eq!(tenant.stats().pages, 8);
    assert_eq!(put(&tenant, 2, 0, 1, &noise(1)), Stored);
}

/// A guest gets its raw pages back before they are finalized. Then the tenant's queue of raw pages
/// has only stale entries, whose pages are gone. These entries must not delay the raw pages of
/// other tenants.
#[test]
fn stale_raw_queue_entries_do_not_delay_pages_of_other_tenants() {
    let engine = new_engine(4 << 20);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    let put_raw = |tenant: &Tenant, index, page: &Page| {
        assert_eq!(put_raw(tenant, 1, index, 1, page), Stored);
    };
    // Repeat the test, because background work does not always begin with the same tenant.
    for turn in 0..3 {
        put_raw(&a, turn, &noise(turn));
        assert!(get(&a, 1, turn, 1).is_some());
        assert!(
            a.shared().has_raw(),
            "the queue of raw pages of tenant a has no stale entry"
        );
        (0..8).for_each(|index| put_raw(&b, index, &noise(100 + 8 * turn + index)));
        assert_eq!(b.stats().nursery_pages, 8);
        engine.maintain(Time(0), 1024);
        assert_eq!(
            b.stats().nursery_pages,
            0,
            "tenant b still has raw pages in repetition {turn}"
        );
        assert!(!a.shared().has_raw());
    }
    engine.check_invariants();
}

#[test]
fn flushed_pages_are_freed_before_another_tenant_is_evicted() {
    let engine = new_engine(100 * NOISE_CHARGE + INDEX_ROOM_BYTES);
    let (a, b) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    fill(&a, 1, 60);
    a.flush(POOL, 1, 0, None).unwrap();
    assert_eq!(a.stats().detached_pages, 60);
    assert_eq!(fill(&b, 1, 80), 80);
    assert_eq!((a.stats().evictions, b.stats().evictions), (0, 0));
    assert!(a.stats().detached_pages < 60);
    engine.check_invariants();
}
