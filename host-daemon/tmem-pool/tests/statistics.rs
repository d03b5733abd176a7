// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the statistics: each refused page and each evicted page must be counted with exactly
//! one reason.

use crate::common::{engine, tenant};
use tmem_pool::{PAGE_SIZE, Page, Put, PutResult, Quota, Tenant, Time, Work};

const MIB: u64 = 1 << 20;

/// Returns a page that does not compress.
fn noise(seed: u64) -> Page {
    let mut rng = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::array::from_fn(|_| {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        (rng >> 32) as u8
    })
}

fn put(tenant: &Tenant, index: u64, page: &Page) -> PutResult {
    let put = Put {
        object: 1,
        index,
        cookie: 1,
        workingset: false,
        page,
    };
    let mut result = [PutResult::Refused];
    tenant.put(1, &[put], &mut result).unwrap();
    result[0]
}

#[test]
fn each_finalized_page_is_counted_under_exactly_one_form() {
    let engine = engine(16 * MIB);
    let a = tenant(&engine, "a");
    let mut half = noise(1);
    half[PAGE_SIZE / 2..].fill(0);
    for (index, page) in [[0; PAGE_SIZE], half, half, noise(2)].iter().enumerate() {
        assert_eq!(put(&a, index as u64, page), PutResult::Stored);
    }
    assert_eq!(a.stats().nursery_pages, 4);
    while engine.maintain(Time(0), 64) {}
    let stats = a.stats();
    let finalized = [
        stats.finalized_same_filled,
        stats.finalized_shared,
        stats.finalized_compressed,
        stats.finalized_raw,
    ];
    assert_eq!((finalized, stats.nursery_pages), ([1, 1, 1, 1], 0));
    assert_eq!(put(&a, 0, &noise(3)), PutResult::Stored);
    assert_eq!(a.stats().replaced_pages, 1);
}

/// Watches the statistics whenever maintain_reporting() reports the kind of its next work. The
/// counters of a kind may change only between the report of that kind and the next report. So a
/// caller can measure the time of each kind of work.
#[test]
fn maintain_reports_the_kind_of_its_work() {
    const TEN_MINUTES_NS: u64 = 600_000_000_000;
    let engine = engine(16 * MIB);
    let a = tenant(&engine, "a");
    let done = |work: Work| {
        let (all, own) = (engine.stats(), a.stats());
        match work {
            Work::Finalize => own.finalized_compressed + own.finalized_raw,
            Work::Recompress => all.recompressed_blobs,
            Work::Reclaim => all.moved_blobs + own.flushed_pages - all.detached_pages,
        }
    };
    let mut changes = [0; 3];
    let mut maintain = |now: u64| {
        let mut at = None;
        let mut seen = Work::ALL.map(done);
        let mut look = |begins: Option<Work>| {
            let now = Work::ALL.map(done);
            for (work, (now, seen)) in Work::ALL.into_iter().zip(now.iter().zip(&seen)) {
                assert!(
                    now == seen || at == Some(work),
                    "maintain() did work of the kind {work:?} and reported {at:?}"
                );
                changes[work as usize] += u32::from(now != seen);
            }
            (at, seen) = (begins, now);
        };
        while engine.maintain_reporting(Time(now), 64, &mut |work| look(Some(work))) {}
        look(None);
    };
    for index in 0..200 {
        // Put pages of four letters in random order. lz4 saves little of such a page, and zstd
        // compresses it to a quarter.
        let page = noise(index).map(|byte| b"tmem"[usize::from(byte % 4)]);
        assert_eq!(put(&a, index, &page), PutResult::Stored);
    }
    maintain(0);
    a.flush(1, 1, 0, Some(99)).unwrap();
    // Put new pages while the flushed pages still wait to be freed.
    for index in 200..400 {
        assert_eq!(put(&a, index, &noise(index)), PutResult::Stored);
    }
    maintain(0);
    (1..5).for_each(|half| maintain(half * TEN_MINUTES_NS / 2));
    assert!(
        !changes.contains(&0),
        "the test is too weak: maintain() did some kind of work never: {changes:?}"
    );
}

#[test]
fn each_refused_put_is_counted_with_its_reason() {
    let engine = engine(16 * MIB);
    let a = tenant(&engine, "a");
    // With this limit, the pool has memory for all pages that the tenant may have.
    let limit = |limit_bytes| Quota {
        reserve_bytes: 0,
        limit_bytes: Some(limit_bytes),
        weight: 1,
    };
    a.set_quota(limit(2 * MIB)).unwrap();
    let max = a.stats().nursery_pages_max;
    for index in 0..max + 3 {
        put(&a, index, &noise(index));
    }
    let stats = a.stats();
    assert_eq!((stats.puts_refused, stats.refused_nursery), (3, 3));
    // Set a limit that is below the charge of a single page, so that each further put is refused.
    a.set_quota(limit(1)).unwrap();
    while engine.maintain(Time(0), 64) {}
    put(&a, 0, &noise(0));
    let stats = a.stats();
    assert_eq!((stats.puts_refused, stats.refused_limit), (4, 1));
    assert_eq!(stats.evictions, stats.evictions_limit);
}

#[test]
fn evictions_by_a_shrink_are_counted_separately() {
    let engine = engine(16 * MIB);
    let a = tenant(&engine, "a");
    for index in 0..8192 {
        put(&a, index, &noise(index));
        while engine.maintain(Time(0), 64) {}
    }
    let full = a.stats();
    assert!(full.evictions > 1000);
    assert_eq!((full.evictions_limit, full.evictions_shrink), (0, 0));
    engine.resize(8 * MIB);
    while engine.maintain(Time(0), 64) {}
    let smaller = a.stats();
    assert!(smaller.evictions_shrink > 1000);
    assert_eq!(smaller.evictions - full.evictions, smaller.evictions_shrink);
    // The pool now fits its size. From now on, pages are evicted only to make room for new pages.
    for index in 8192..9192 {
        put(&a, index, &noise(index));
        while engine.maintain(Time(0), 64) {}
    }
    assert_eq!(a.stats().evictions_shrink, smaller.evictions_shrink);
    assert_eq!(engine.stats().evictions_shrink, smaller.evictions_shrink);
    engine.resize(16 * MIB);
    while engine.maintain(Time(0), 64) {}
    assert_eq!(a.stats().evictions_shrink, smaller.evictions_shrink);
}

#[test]
fn drop_pages_counts_as_a_flush_and_keeps_pools() {
    let engine = engine(16 * MIB);
    let a = tenant(&engine, "a");
    for index in 0..200 {
        assert_eq!(put(&a, index, &noise(index)), PutResult::Stored);
    }
    while engine.maintain(Time(0), 64) {}
    assert_eq!(a.drop_pages(), 200);
    let stats = a.stats();
    assert_eq!(
        (stats.pages, stats.flushed_pages, stats.evictions),
        (0, 200, 0)
    );
    assert_eq!(engine.stats().payload_bytes, 0);
    assert_eq!(
        put(&a, 1, &noise(1)),
        PutResult::Stored,
        "drop_pages() destroyed the tenant's pool"
    );
    assert_eq!(a.drop_pages(), 1);
}
