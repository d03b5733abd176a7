// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of retained pages, which a get returns and leaves in the pool. They test the states of
//! these pages, their place in the order of eviction, and their effect on guests that read a
//! working set again and again.

use super::rng::{Rng, for_each_seed, for_each_seed_from};
use super::{
    OPEN, POOL, add, config, fill, get, get_retaining, maintain_all, new_engine, noise,
    partly_noise, put, put_raw, refer,
};
use crate::config::{RETAIN_GROWTH_SHIFT, RETAIN_PAY_PAGES, RETAIN_PAY_ROUNDS};
use crate::state::Reason;
use crate::{
    Engine, Get, GetResult, NoPool, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, PolicyKind, PutResult,
    Quota, Ref, ShadowMemory, ShadowTenant, Tenant,
};
use std::collections::{BTreeMap, VecDeque};
use tmem_trace::estimate::{
    GAIN_OVER_USUAL, GAIN_PERCENT, GAIN_UNDER_MAX, LOSS_PERCENT, LOSS_UNDER_USUAL,
};

/// Charge in bytes of a page that does not compress.
const NOISE_CHARGE: u64 = PAGE_METADATA_CHARGE_BYTES + PAGE_SIZE as u64;

/// Gets the first `pages` pages of an object, and asserts that all of them are retained (left in
/// the pool). The helper `fill` has put these pages.
fn retain_all(tenant: &Tenant, object: u64, pages: u64) {
    for index in 0..pages {
        let (_, retained) = get_retaining(tenant, object, index, 1).unwrap();
        assert!(
            retained,
            "a get removed page {index} instead of retaining it"
        );
    }
}

fn counts(tenant: &Tenant) -> (u64, u64) {
    let stats = tenant.stats();
    (stats.pages, stats.retained_pages)
}

#[test]
fn a_ref_turns_a_retained_page_into_a_held_page() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for (index, page) in [noise(1), partly_noise(2, 4), [3; PAGE_SIZE]]
        .into_iter()
        .enumerate()
    {
        let index = index as u64;
        put(&tenant, 1, index, 7, &page);
        let charged_bytes = tenant.stats().charged_bytes;
        for _ in 0..2 {
            assert_eq!(get_retaining(&tenant, 1, index, 7), Some((page, true)));
            assert_eq!(counts(&tenant), (index + 1, 1));
        }
        assert_eq!(
            tenant.stats().charged_bytes,
            charged_bytes,
            "the charge of a retained page differs from that of a held page"
        );
        // Send the reference twice: the repeated reference must change nothing.
        for _ in 0..2 {
            assert!(refer(&tenant, 1, index, 7));
            assert_eq!(counts(&tenant), (index + 1, 0));
        }
    }
    // If a get does not allow the pool to retain its page, it removes the page, whether the page
    // was retained before or not.
    assert!(get_retaining(&tenant, 1, 0, 7).unwrap().1);
    assert_eq!(get(&tenant, 1, 0, 7), Some(noise(1)));
    assert_eq!(get(&tenant, 1, 1, 7), Some(partly_noise(2, 4)));
    assert_eq!(counts(&tenant), (1, 0));
    let stats = tenant.stats();
    assert_eq!((stats.hits, stats.retained_hits), (9, 7));
    assert_eq!((stats.refs, stats.refs_gone), (6, 0));
    maintain_all(&engine);
}

#[test]
fn a_get_retains_only_pages_whose_retain_bit_is_set() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 64);
    let mut out = vec![[0; PAGE_SIZE]; 64];
    let mut results = vec![GetResult::Miss; 64];
    let retain = 0x8000_0000_0000_0005;
    let get = Get {
        retain,
        ..Get::new(1, 0, &[1; 64])
    };
    drop(tenant.get(POOL, &get, &mut out, &mut results));
    for (nth, result) in results.iter().enumerate() {
        let expected = match [0, 2, 63].contains(&nth) {
            true => GetResult::Retained { cookie: 1 },
            false => GetResult::Hit { cookie: 1 },
        };
        assert_eq!(
            *result, expected,
            "the get returned a wrong result for page {nth}"
        );
    }
    assert_eq!(counts(&tenant), (3, 3));
    maintain_all(&engine);
}

#[test]
fn a_ref_with_a_wrong_cookie_changes_nothing() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert!(
        !refer(&tenant, 1, 0, 7),
        "refer() reports that a page is held that was never put"
    );
    put(&tenant, 1, 0, 7, &noise(1));
    assert!(get_retaining(&tenant, 1, 0, 7).unwrap().1);
    for bit in 0..64 {
        assert!(!refer(&tenant, 1, 0, 7 ^ 1 << bit));
        assert_eq!(counts(&tenant), (1, 1));
    }
    // Replace the retained page by a put. A late reference to the older page must be answered with
    // false and must leave the newer page unchanged.
    put(&tenant, 1, 0, 8, &noise(2));
    assert_eq!(counts(&tenant), (1, 0));
    assert!(!refer(&tenant, 1, 0, 7));
    let late = Ref {
        object: 1,
        index: 0,
        cookie: 7,
    };
    tenant.drop_refs(POOL, &[late]).unwrap();
    assert_eq!(get_retaining(&tenant, 1, 0, 8), Some((noise(2), true)));
    // Drop the retained page by a flush, so that a reference no longer finds it.
    tenant.flush(POOL, 1, 0, Some(1)).unwrap();
    assert!(!refer(&tenant, 1, 0, 8));
    assert_eq!(counts(&tenant), (0, 0));
    let stats = tenant.stats();
    assert_eq!(stats.refs_gone, stats.refs);
    maintain_all(&engine);
}

#[test]
fn drop_refs_drops_exactly_the_pages_with_the_named_cookies() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    fill(&tenant, 1, 3);
    retain_all(&tenant, 1, 2);
    let refs = [(0, 1), (1, 2), (2, 1)].map(|(index, cookie)| Ref {
        object: 1,
        index,
        cookie,
    });
    tenant.drop_refs(POOL, &refs).unwrap();
    assert_eq!(
        counts(&tenant),
        (1, 1),
        "drop_refs() did not drop exactly the pages with the named cookies"
    );
    assert_eq!(tenant.stats().flushed_pages, 2);
    assert_eq!(tenant.drop_refs(9, &refs).map(drop), Err(NoPool));
    assert_eq!(
        tenant.refer(9, &refs, &mut [true; 3]).map(drop),
        Err(NoPool)
    );
    maintain_all(&engine);
}

#[test]
fn retained_pages_are_dropped_with_their_object_or_pool() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for end in 0..3 {
        fill(&tenant, 1, 40);
        retain_all(&tenant, 1, 40);
        engine.check_invariants();
        match end {
            0 => tenant.flush(POOL, 1, 0, None).unwrap(),
            1 => tenant.destroy_pool(POOL).unwrap(),
            _ => tenant.clear(),
        }
        engine.check_invariants();
        assert_eq!(counts(&tenant), (0, 0));
        maintain_all(&engine);
        if end > 0 {
            tenant.create_pool(POOL).unwrap();
        } else {
            assert!(!refer(&tenant, 1, 0, 1));
        }
    }
}

#[test]
fn retained_pages_are_evicted_before_held_pages() {
    let engine = new_engine(4 << 20);
    let limit = Quota {
        limit_bytes: Some(100 * NOISE_CHARGE),
        ..OPEN
    };
    let tenant = add(&engine, "a", None, limit);
    fill(&tenant, 1, 50);
    fill(&tenant, 2, 50);
    // Retain the newest pages. A policy that considers only age would evict them last, but the
    // engine must evict them first.
    retain_all(&tenant, 2, 50);
    assert_eq!(fill(&tenant, 3, 50), 50);
    let stats = tenant.stats();
    assert_eq!((stats.pages, stats.retained_pages), (100, 0));
    assert_eq!((stats.evictions, stats.evictions_retained), (50, 50));
    assert!((0..50).all(|index| tenant.peek((POOL, 1, index)).is_some()));
    assert!((0..50).all(|index| !refer(&tenant, 2, index, 1)));
    assert_eq!(fill(&tenant, 4, 10), 10);
    assert_eq!(tenant.stats().evictions_retained, 50);
    maintain_all(&engine);
}

#[test]
fn retained_pages_of_a_tenant_above_its_entitlement_are_evicted_first() {
    let engine = new_engine(400 * NOISE_CHARGE);
    let reserve = Quota {
        reserve_bytes: 100 * NOISE_CHARGE,
        weight: 0,
        ..OPEN
    };
    let idle = add(
        &engine,
        "idle",
        None,
        Quota {
            reserve_bytes: 200 * NOISE_CHARGE,
            ..reserve
        },
    );
    let protected = add(&engine, "protected", None, reserve);
    let retaining = add(&engine, "retaining", None, Quota { weight: 1, ..OPEN });
    let holding = add(&engine, "holding", None, Quota { weight: 1, ..OPEN });
    fill(&protected, 1, 60);
    retain_all(&protected, 1, 60);
    fill(&retaining, 1, 80);
    retain_all(&retaining, 1, 80);
    // The tenant `holding` has no retained pages. It is further above its entitlement than the
    // tenant `retaining`, whose retained pages must be evicted first nevertheless.
    assert_eq!(fill(&holding, 1, 180), 180);
    assert!(holding.shared().excess_bytes() > retaining.shared().excess_bytes());
    assert!(retaining.shared().excess_bytes() > 0);
    let before = holding.stats().evictions;
    for _ in 0..10 {
        assert_eq!(engine.evict(1), 1);
    }
    assert_eq!(
        holding.stats().evictions,
        before,
        "held pages were evicted before retained pages of a tenant above its entitlement"
    );
    assert!(retaining.stats().evictions_retained >= 10);
    assert_eq!(
        protected.stats().evictions,
        0,
        "a tenant below its entitlement lost pages"
    );
    // As soon as the tenant `retaining` is within its entitlement, it keeps its retained pages, and
    // pages of the tenant `holding` are evicted.
    for _ in 0..60 {
        assert_eq!(engine.evict(1), 1);
    }
    assert!(holding.stats().evictions > before);
    assert!(retaining.stats().retained_pages > 0);
    assert_eq!(protected.stats().evictions, 0);
    drop(idle);
}

/// Evicts three quarters of a tenant's pages, as a full pool does, and lets the tenant grow again in
/// a pool that is nearly empty. The gets of its guest must soon retain pages again, also if the guest
/// lets the pool retain only some pages, because references (REF) found none before.
#[test]
fn gets_retain_pages_again_soon_after_a_full_pool() {
    const PAGES: u64 = 400;
    const GETS_MAX: u64 = 4096;
    // A charge that is only 5 % larger than at the last eviction does not show that the pool has
    // room. Gets first do not retain RETAIN_PAY_ROUNDS pages for each page of the tenant. Then each
    // get that does not retain its page raises the charge up to which gets retain pages, in all by
    // an eighth of the charge.
    const GETS_MAX_NEAR: u64 = 100 * RETAIN_PAY_ROUNDS + (1 << RETAIN_GROWTH_SHIFT) / 8;
    for (left, more, every, gets_max) in [
        (100, 150, 1, GETS_MAX),
        (100, 150, 32, GETS_MAX),
        (100, 40, 32, GETS_MAX),
        (100, 3900, 1, GETS_MAX),
        (100, 5, 32, GETS_MAX_NEAR),
    ] {
        let engine = new_engine(64 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        fill(&tenant, 1, PAGES);
        for _ in left..PAGES {
            engine.evict_from(tenant.shared(), 1, Reason::Pool);
        }
        assert_eq!(counts(&tenant), (left, 0));
        fill(&tenant, 2, more);
        let mut gets = 0;
        loop {
            let index = gets % more;
            let retained = match gets % every {
                0 => get_retaining(&tenant, 2, index, 1).unwrap().1,
                _ => get(&tenant, 2, index, 1).is_none(),
            };
            if retained {
                break;
            }
            gets += 1;
            assert!(
                gets < gets_max,
                "{left} pages left and {more} put, 1 of {every} pages allowed: no page is retained"
            );
            put(&tenant, 2, index, 1, &noise(index));
        }
        println!("{left} pages left, {more} put, 1 of {every} allowed: {gets} gets");
        if gets_max == GETS_MAX {
            assert_eq!(fill(&tenant, 3, 50), 50);
            retain_all(&tenant, 3, 50);
        }
        maintain_all(&engine);
    }
}

/// Sends the same gets for two tenants. For one tenant, the guest puts the pages that it evicts.
/// For the other tenant, the pool retains the pages and the guest sends references (REF). The
/// policy must evict the pages of both tenants in the same order.
#[test]
fn the_eviction_policy_treats_a_ref_like_a_put() {
    for_each_seed("reuse", 4, |seed| {
        let orders = [false, true].map(|retain| {
            let engine = Engine::new(crate::EngineConfig {
                seed,
                ..config(16 << 20)
            })
            .unwrap();
            let tenant = add(&engine, "a", None, OPEN);
            let mut rng = Rng::new(seed);
            for _ in 0..2000 {
                let index = rng.below(200);
                if rng.one_in(3) {
                    assert_eq!(
                        put_raw(&tenant, 1, index, 1, &[1; PAGE_SIZE]),
                        PutResult::Stored
                    );
                    maintain_all(&engine);
                    continue;
                }
                let found = match retain {
                    true => get_retaining(&tenant, 1, index, 1).is_some(),
                    false => get(&tenant, 1, index, 1).is_some(),
                };
                if !found {
                    continue;
                }
                if retain {
                    assert!(refer(&tenant, 1, index, 1));
                } else {
                    assert_eq!(
                        put_raw(&tenant, 1, index, 1, &[1; PAGE_SIZE]),
                        PutResult::Stored
                    );
                    maintain_all(&engine);
                }
            }
            let gain_hits = tenant.stats().gain_hits;
            let mut order = Vec::new();
            while tenant.stats().pages > 0 {
                let held = |&index: &u64| tenant.peek((POOL, 1, index)).is_some();
                let before: Vec<u64> = (0..200).filter(held).collect();
                engine.evict_from(tenant.shared(), 1, Reason::Limit);
                order.extend(before.into_iter().filter(|index| !held(index)));
            }
            (order, gain_hits)
        });
        assert!(orders[0].0.len() > 50);
        assert_eq!(orders[0], orders[1]);
    });
}

/// Charge in bytes of a page of the simulated guest.
const SHADOW_CHARGE: u64 = STORED_BYTES as u64 + PAGE_METADATA_CHARGE_BYTES;
const STORED_BYTES: usize = 1024;

/// Figures of a simulated guest's reads. All fields count pages.
#[derive(Debug, Default)]
struct Reads {
    /// Number of pages that the guest read and that were not in its page cache.
    misses: u64,
    /// Number of pages that the guest had to read from its disk, because the pool did not return
    /// them.
    disk: u64,
    puts: u64,
    refs: u64,
    gone: u64,
    /// Estimates of the engine: misses that would be hits with more memory (`gain`), and hits that
    /// would be misses with less memory (`loss`).
    gain: [u64; 3],
    loss: [u64; 3],
    loss_seen: u64,
    /// Number of pages that the pool had at the end of the simulation.
    used: u64,
}

/// Simulates a guest whose page cache has room for `cache` pages, and a pool with room for `pool`
/// pages. A full page cache evicts the page that has been in it for the longest time. Each call of
/// `next` returns the number of the page that the guest reads next. If `retain` is true, gets may
/// leave pages in the pool. A full pool evicts `step` pages at a time. Returns the figures of the
/// second half of all reads.
fn read(
    retain: bool,
    (cache, pool, step): (usize, u64, u64),
    reads: usize,
    mut next: impl FnMut() -> u64,
) -> Reads {
    let size_bytes = pool * SHADOW_CHARGE;
    let memory = ShadowMemory::reserve(1 << 30).unwrap();
    let mut tenant = ShadowTenant::new(PolicyKind::default(), 7, &memory);
    assert!(tenant.ensure_pool(POOL));
    // `cached` has the pages in the guest's page cache, each with a flag that is true if the pool
    // retains the page. `index` has the entries of the guest driver's index: pages that the pool
    // may have.
    let (mut order, mut cached) = (VecDeque::new(), BTreeMap::new());
    let mut index = BTreeMap::new();
    let mut found = Reads::default();
    let mut first = tenant.stats();
    for nth in 0..reads {
        if nth == reads / 2 {
            found = Reads::default();
            first = tenant.stats();
        }
        let page = next();
        if cached.contains_key(&page) {
            continue;
        }
        let result = match index.remove(&page) {
            Some(()) => tenant.get_retaining(POOL, (1, page), retain),
            None => GetResult::Miss,
        };
        found.misses += 1;
        found.disk += u64::from(result == GetResult::Miss);
        order.push_back(page);
        cached.insert(page, matches!(result, GetResult::Retained { .. }));
        if order.len() <= cache {
            continue;
        }
        let evicted = order.pop_front().unwrap();
        if cached.remove(&evicted).unwrap() {
            found.refs += 1;
            if tenant.refer(POOL, (1, evicted)) {
                index.insert(evicted, ());
            } else {
                found.gone += 1;
            }
        } else {
            found.puts += 1;
            assert!(tenant.put(POOL, (1, evicted), false, STORED_BYTES));
            index.insert(evicted, ());
        }
        if tenant.charged_bytes() > size_bytes {
            while tenant.charged_bytes() > size_bytes - (step - 1) * SHADOW_CHARGE {
                tenant.evict();
            }
        }
    }
    let last = tenant.stats();
    let since = |last: [u64; 3], first: [u64; 3]| [0, 1, 2].map(|nth| last[nth] - first[nth]);
    found.gain = since(last.gain_hits, first.gain_hits);
    found.loss = since(last.loss_hits, first.loss_hits);
    found.loss_seen = last.loss_hits_seen - first.loss_hits_seen;
    found.used = last.pages;
    found
}

/// Compares the estimates of hits with more and with less memory with simulations of pools of those
/// sizes. The estimates must be good with and without retained pages.
#[test]
fn hit_estimates_are_accurate_with_and_without_retained_pages() {
    const SET: u64 = 1500;
    const READS: usize = 30_000;
    let run = |retain, pool| {
        let mut rng = Rng::new(9);
        read(retain, (300, pool, 1), READS, || match rng.one_in(2) {
            true => rng.below(SET / 8),
            false => rng.below(SET),
        })
    };
    for retain in [false, true] {
        for pool in [600, 2400] {
            let now = run(retain, pool);
            let percent = |pages: i64| 100.0 * pages as f64 / now.misses as f64;
            for nth in 0..3 {
                let more = run(retain, pool * (100 + GAIN_PERCENT[nth]) / 100);
                let gained = percent(now.disk as i64 - more.disk as i64);
                let said = percent(now.gain[nth] as i64);
                println!(
                    "retain {retain}, pool of {pool} pages, {} % more memory: {gained:.1} % of all \
                     reads gained, {said:.1} % estimated",
                    GAIN_PERCENT[nth]
                );
                assert!(
                    said - gained < GAIN_OVER_USUAL && gained - said < GAIN_UNDER_MAX,
                    "retain {retain}, pool of {pool} pages, {} % more: the estimate is {said:.1} % \
                     of all reads, but {gained:.1} % are gained",
                    GAIN_PERCENT[nth]
                );
                let less = run(retain, now.used * (100 - LOSS_PERCENT[nth]) / 100);
                let lost = percent(less.disk as i64 - now.disk as i64);
                let hits = (now.misses - now.disk) as f64;
                let share = now.loss[nth] as f64 / now.loss_seen.max(1) as f64;
                let said = percent((hits * share) as i64);
                println!(
                    "retain {retain}, pool of {pool} pages, {} % less memory: {lost:.1} % of all \
                     reads lost, {said:.1} % estimated",
                    LOSS_PERCENT[nth]
                );
                assert!(
                    lost - said < LOSS_UNDER_USUAL,
                    "retain {retain}, pool of {pool} pages, {} % less: the estimate is {said:.1} % \
                     of all reads, but {lost:.1} % are lost",
                    LOSS_PERCENT[nth]
                );
            }
        }
    }
}

/// Order in which a simulated guest reads the pages of its working set.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// The guest reads all pages in a loop.
    Cyclic,
    /// The guest reads at random. Half of all reads go to an eighth of the pages.
    Hot,
    /// The guest reads at random. The probability of the page of rank n is in proportion to 1 / n.
    Zipf,
}

/// Returns a function that returns the number of the page that a guest reads next. `set` is the
/// number of pages of the working set.
fn reads_of(order: Order, set: u64, seed: u64) -> impl FnMut() -> u64 {
    let mut rng = Rng::new(seed);
    let mut turn = 0;
    let sums: Vec<u64> = (1..=set)
        .scan(0, |sum, rank| {
            *sum += (1 << 40) / rank;
            Some(*sum)
        })
        .collect();
    move || match order {
        Order::Cyclic => {
            turn += 1;
            turn % set
        }
        Order::Hot => match rng.one_in(2) {
            true => rng.below(set / 8),
            false => rng.below(set),
        },
        Order::Zipf => {
            let draw = rng.below(*sums.last().unwrap());
            // The factor spreads the popular pages over the working set, so that they are not
            // neighbours.
            sums.partition_point(|sum| *sum <= draw) as u64 * 577 % set
        }
    }
}

/// Divisor for the tolerance when disk reads with and without retained pages are compared, for
/// guests that read at random. With retained pages, the guest may have one more disk read for each
/// 256 pages that it reads and that are not in its page cache. The reason is that tries to retain
/// more pages change the history from which the policy learns. In 8 runs of each case, a run with
/// retained pages had between 12 fewer disk reads and 9 more, in 2,400 to 4,500 reads. The sum over
/// all cases and runs was 52 more disk reads in 500,000.
const HISTORY_DIVISOR: u64 = 256;

/// Simulates a guest that reads a working set in a loop or at random. With retained pages, the
/// guest must not read its disk more often than without them, whatever the size of the pool. When
/// the guest sends references (REF), only few of the retained pages may already be evicted.
#[test]
fn retaining_pages_does_not_increase_disk_reads() {
    const SET: u64 = 1500;
    const CACHE: usize = 500;
    const READS: usize = 20_000;
    let needed = SET - CACHE as u64;
    for_each_seed_from(5, "never worse", 1, |seed| {
        for percent in [25, 50, 100, 110, 150] {
            for order in [Order::Cyclic, Order::Hot, Order::Zipf] {
                let pool = needed * percent / 100;
                // Background workers free a 64th of a full pool at a time.
                let step = pool / 64;
                let room = (CACHE, pool, step);
                // A loop shows the cost of evicted retained pages best, after several tries of the
                // pool to retain more pages.
                let reads = match order {
                    Order::Cyclic => 3 * READS,
                    Order::Hot | Order::Zipf => READS,
                };
                let [without, with] = [false, true]
                    .map(|retain| read(retain, room, reads, reads_of(order, SET, seed)));
                println!(
                    "pool of {percent} % of the need, order {order:?}: hits and disk reads without \
                     retained pages {without:?}, with them {with:?}"
                );
                // A try of the pool to retain more pages may evict the pages that one step frees.
                // Many gets whose pages are not retained pay for each of them.
                let tries = with.misses / RETAIN_PAY_PAGES + 2 * step;
                let other_history = match order {
                    Order::Cyclic => 0,
                    Order::Hot | Order::Zipf => with.misses / HISTORY_DIVISOR,
                };
                let allowed = tries + other_history;
                assert!(
                    with.disk <= without.disk + allowed,
                    "pool of {percent} %, {order:?}: {} disk reads with retained pages, {} without",
                    with.disk,
                    without.disk
                );
                assert!(
                    with.gone <= allowed,
                    "pool of {percent} %, {order:?}: {} of {} REFs were answered with GONE",
                    with.gone,
                    with.refs
                );
                if percent >= 150 {
                    // Subtract the puts of pages that the guest has read from its disk, because the
                    // pool has no copy of them yet.
                    let copies = with.puts.saturating_sub(with.disk);
                    assert!(
                        copies * 20 < with.refs,
                        "the guest put {copies} pages again beside {} REFs, not fewer than one in \
                         20",
                        with.refs
                    );
                }
            }
        }
    });
}
