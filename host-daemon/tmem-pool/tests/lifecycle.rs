// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the life of a page through the public interface: the guest puts, gets, replaces and
//! flushes the page, and drops it with its pool.

use crate::common::tenant;
use std::sync::Arc;
use tmem_pool::{
    CreateError, Engine, Get, GetResult, NoPool, PAGE_SIZE, POOLS_PER_TENANT_MAX, Page, Put,
    PutResult, Tenant, Time,
};

fn new_engine() -> Arc<Engine> {
    crate::common::engine(16 << 20)
}

/// Returns three different pages: one that compresses, one that does not compress, and one of a
/// single repeated byte.
fn pages() -> [Page; 3] {
    let mut text = [0; PAGE_SIZE];
    text.iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i / 16) as u8);
    let mut noise = [0; PAGE_SIZE];
    let mut x = 1u64;
    noise.iter_mut().for_each(|b| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *b = (x >> 56) as u8;
    });
    [text, noise, [9; PAGE_SIZE]]
}

fn put(tenant: &Tenant, index: u64, cookie: u64, page: &Page) -> PutResult {
    let mut results = [PutResult::Refused];
    let put = Put {
        object: 5,
        index,
        cookie,
        workingset: false,
        page,
    };
    tenant.put(1, &[put], &mut results).unwrap();
    results[0]
}

fn get(tenant: &Tenant, index: u64, cookie: u64) -> Option<Page> {
    let (mut out, mut results) = ([[0xaa; PAGE_SIZE]], [GetResult::Miss]);
    tenant
        .get(1, &Get::new(5, index, &[cookie]), &mut out, &mut results)
        .unwrap();
    match results[0] {
        GetResult::Hit { cookie: stored } => {
            assert_eq!(stored, cookie);
            Some(out[0])
        }
        GetResult::Miss => None,
        GetResult::Retained { .. } => {
            panic!("a get retained a page although its retain bits are 0")
        }
    }
}

#[test]
fn a_get_removes_the_page_that_it_returns() {
    let engine = new_engine();
    let tenant = tenant(&engine, "a");
    for (index, page) in pages().iter().enumerate() {
        assert_eq!(put(&tenant, index as u64, 100, page), PutResult::Stored);
    }
    assert_eq!(tenant.stats().nursery_pages, 3);
    while engine.maintain(Time(0), 64) {}
    let stats = tenant.stats();
    let forms = (
        stats.nursery_pages,
        stats.same_filled_pages,
        stats.shared_pages,
    );
    assert_eq!((stats.pages, forms), (3, (0, 1, 0)));
    assert_eq!(engine.stats().blobs, 2);
    for (index, page) in pages().iter().enumerate() {
        assert_eq!(get(&tenant, index as u64, 100), Some(*page));
        assert_eq!(
            get(&tenant, index as u64, 100),
            None,
            "a second get returned the page that the first get removed"
        );
    }
    // A get must also return a page that is not finalized (deduplicated and compressed) yet.
    for (index, page) in pages().iter().enumerate() {
        put(&tenant, index as u64, 100, page);
        assert_eq!(get(&tenant, index as u64, 100), Some(*page));
    }
    let stats = engine.stats();
    assert_eq!((stats.pages, stats.blobs, stats.payload_bytes), (0, 0, 0));
    assert_eq!((stats.gets, stats.hits, stats.puts), (9, 6, 6));
}

#[test]
fn all_64_bits_of_a_cookie_are_compared() {
    let engine = new_engine();
    let tenant = tenant(&engine, "a");
    let [page, ..] = pages();
    put(&tenant, 0, 1 << 63 | 1, &page);
    assert_eq!(get(&tenant, 0, 1), None);
    assert_eq!(get(&tenant, 0, 1 << 63), None);
    assert_eq!(tenant.stats().cookie_mismatches, 2);
    assert_eq!(get(&tenant, 0, 1 << 63 | 1), Some(page));
}

#[test]
fn each_page_of_a_get_has_its_own_result() {
    let engine = new_engine();
    let tenant = tenant(&engine, "a");
    let [text, noise, same] = pages();
    put(&tenant, 10, 1, &text);
    put(&tenant, 12, 3, &noise);
    put(&tenant, u64::MAX, 4, &same);
    let mut out = [[0; PAGE_SIZE]; 4];
    let mut results = [GetResult::Hit { cookie: 99 }; 4];
    tenant
        .get(1, &Get::new(5, 9, &[7, 1, 2, 3]), &mut out, &mut results)
        .unwrap();
    let hit = |cookie| GetResult::Hit { cookie };
    assert_eq!(results, [GetResult::Miss, hit(1), GetResult::Miss, hit(3)]);
    assert_eq!((out[1], out[3]), (text, noise));
    // Request pages beyond the page number u64::MAX. There are no such pages, so the get reports
    // misses.
    tenant
        .get(
            1,
            &Get::new(5, u64::MAX - 1, &[4, 4, 4, 4]),
            &mut out,
            &mut results,
        )
        .unwrap();
    assert_eq!(
        results,
        [GetResult::Miss, hit(4), GetResult::Miss, GetResult::Miss]
    );
    assert_eq!(out[1], same);
}

#[test]
fn the_last_put_of_a_key_in_a_batch_wins() {
    let engine = new_engine();
    let tenant = tenant(&engine, "a");
    let [text, noise, _] = pages();
    let put = |cookie, page| Put {
        object: 5,
        index: 0,
        cookie,
        workingset: false,
        page,
    };
    let mut results = [PutResult::Refused; 2];
    tenant
        .put(1, &[put(1, &text), put(2, &noise)], &mut results)
        .unwrap();
    assert_eq!(results, [PutResult::Stored; 2]);
    assert_eq!(tenant.stats().replaced_pages, 1);
    assert_eq!(get(&tenant, 0, 1), None);
    assert_eq!(get(&tenant, 0, 2), Some(noise));
}

#[test]
fn a_flush_drops_only_pages_in_its_range() {
    let engine = new_engine();
    let tenant = tenant(&engine, "a");
    let [text, ..] = pages();
    for index in (0..200).chain([u64::MAX]) {
        put(&tenant, index, 1, &text);
    }
    tenant.flush(1, 5, 10, Some(150)).unwrap();
    tenant.flush(1, 5, 0, Some(0)).unwrap();
    tenant.flush(1, 6, 0, None).unwrap();
    assert_eq!(tenant.stats().flushed_pages, 150);
    assert_eq!(get(&tenant, 10, 1), None);
    assert_eq!(get(&tenant, 159, 1), None);
    assert!(get(&tenant, 9, 1).is_some());
    assert!(get(&tenant, 160, 1).is_some());
    tenant.flush(1, 5, 180, None).unwrap();
    assert_eq!(get(&tenant, u64::MAX, 1), None);
    assert!(get(&tenant, 179, 1).is_some());
}

#[test]
fn a_tenant_cannot_reach_pools_of_another_tenant() {
    let engine = new_engine();
    let (a, b) = (tenant(&engine, "a"), tenant(&engine, "b"));
    let [text, ..] = pages();
    put(&a, 0, 1, &text);
    assert_eq!(get(&b, 0, 1), None);
    assert_eq!(a.create_pool(1), Err(CreateError::Exists));
    for id in 2..=POOLS_PER_TENANT_MAX as u32 {
        a.create_pool(id).unwrap();
    }
    assert_eq!(a.create_pool(9999), Err(CreateError::Limit));
    b.create_pool(9999).unwrap();
    a.destroy_pool(2).unwrap();
    assert_eq!(a.destroy_pool(2), Err(NoPool));
    assert_eq!(a.flush(2, 5, 0, None), Err(NoPool));
    let mut put_results = [PutResult::Stored];
    let page = Put {
        object: 5,
        index: 0,
        cookie: 1,
        workingset: false,
        page: &text,
    };
    assert_eq!(a.put(2, &[page], &mut put_results), Err(NoPool));
    assert_eq!(put_results, [PutResult::Refused]);
    let (mut out, mut results) = ([text], [GetResult::Hit { cookie: 1 }]);
    assert_eq!(
        a.get(2, &Get::new(5, 0, &[1]), &mut out, &mut results)
            .err(),
        Some(NoPool)
    );
    assert_eq!(results, [GetResult::Miss]);
    a.create_pool(9999).unwrap();
    assert!(get(&a, 0, 1).is_some());
}
