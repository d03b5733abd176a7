// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests in which many threads use the engine at the same time. Each thread has keys of its own, so
//! it knows which answers are allowed.

use super::rng::{Rng, for_each_seed};
use super::{OPEN, POOL, add, maintain_all, new_engine, noise, partly_noise, put, text};
use crate::background::chores;
use crate::config::SWEEP_NS;
use crate::{
    Engine, Get, GetResult, PAGE_SIZE, Page, Put, PutResult, Quota, Tenant, TenantSpec, Time,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

const WORKERS: u64 = 4;
const ROUNDS: u64 = 400;

/// Puts, flushes and gets pages of one object. Only this thread uses the object, but other threads
/// may use its tenant. `model` has the pages that a get may return.
fn work(tenant: &Tenant, object: u64, seed: u64, corpus: &[Page], hits: &AtomicU64) {
    let mut rng = Rng::new(seed);
    let mut model: HashMap<u64, (u64, usize)> = HashMap::new();
    let mut cookie = rng.next();
    for _ in 0..ROUNDS {
        let puts: Vec<(u64, usize)> = (0..1 + rng.below(12))
            .map(|_| (rng.below(64), rng.below(corpus.len() as u64) as usize))
            .collect();
        let first = cookie;
        let pages: Vec<Put<'_>> = puts
            .iter()
            .map(|&(index, page)| {
                cookie = cookie.wrapping_add(1);
                Put {
                    object,
                    index,
                    cookie,
                    workingset: false,
                    page: &corpus[page],
                }
            })
            .collect();
        let mut results = vec![PutResult::Refused; pages.len()];
        tenant.put(POOL, &pages, &mut results).unwrap();
        for (nth, (&(index, page), result)) in puts.iter().zip(&results).enumerate() {
            match result {
                PutResult::Stored => {
                    model.insert(index, (first.wrapping_add(nth as u64 + 1), page))
                }
                PutResult::Refused => model.remove(&index),
            };
        }
        let index = rng.below(64);
        if rng.one_in(8) {
            let nr_pages = (!rng.one_in(4)).then(|| rng.below(20));
            tenant.flush(POOL, object, index, nr_pages).unwrap();
            let end = nr_pages.map_or(u64::MAX, |n| index + n);
            model.retain(|at, _| !(index..end).contains(at));
        }
        let cookies: Vec<u64> = (index..index + 1 + rng.below(16))
            .map(|at| model.get(&at).map_or(1, |(cookie, _)| *cookie))
            .collect();
        let mut out = vec![[0; PAGE_SIZE]; cookies.len()];
        let mut results = vec![GetResult::Miss; cookies.len()];
        tenant
            .get(
                POOL,
                &Get::new(object, index, &cookies),
                &mut out,
                &mut results,
            )
            .unwrap();
        for (nth, result) in results.iter().enumerate() {
            let held = model.remove(&(index + nth as u64));
            let GetResult::Hit { cookie } = *result else {
                continue;
            };
            let (last, page) =
                held.expect("a get returned a page that was never put or was already returned");
            assert_eq!(cookie, last);
            assert!(out[nth] == corpus[page], "a get returned wrong bytes");
            hits.fetch_add(1, Relaxed);
        }
    }
}

/// Repeatedly adds a tenant to the trust domain of other threads' tenants, fills it, clears it and
/// drops it, until `done` is true.
fn come_and_go(engine: &Arc<Engine>, seed: u64, corpus: &[Page], done: &AtomicBool) {
    let mut rng = Rng::new(seed);
    while !done.load(Relaxed) {
        let reserve_bytes = rng.below(20_000);
        let quota = Quota {
            reserve_bytes,
            limit_bytes: Some(100_000),
            weight: 1,
        };
        let trust_domain = Some("all".into());
        let spec = TenantSpec {
            name: "guest".into(),
            trust_domain,
            quota,
        };
        let tenant = engine.add_tenant(spec).unwrap();
        for round in 0..1 + rng.below(6) {
            let id = 1 + round as u32;
            tenant.create_pool(id).unwrap();
            let mut results = [PutResult::Refused];
            for index in 0..rng.below(60) {
                let page = &corpus[rng.below(corpus.len() as u64) as usize];
                let put = Put {
                    object: 1,
                    index,
                    cookie: 1,
                    workingset: true,
                    page,
                };
                tenant.put(id, &[put], &mut results).unwrap();
            }
            match rng.below(3) {
                0 => tenant.destroy_pool(id).unwrap(),
                1 => {
                    tenant.clear();
                    break;
                }
                _ => {}
            }
        }
    }
}

fn keep_house(engine: &Engine, seed: u64, tenant: &Tenant, now_ns: &AtomicU64, done: &AtomicBool) {
    let mut rng = Rng::new(seed);
    while !done.load(Relaxed) {
        engine.resize((400 << 10) + rng.below(600 << 10));
        let now = Time(now_ns.fetch_add(SWEEP_NS / 8, Relaxed));
        engine.maintain(now, 1 + rng.below(40) as usize);
        // The workers put pages all the time, so that `maintain` seldom continues the sweep.
        let recompress = chores().last().expect("there are no chores");
        (recompress.run)(engine, now, 1);
        let limit_bytes = rng.one_in(2).then(|| 50_000 + rng.below(500_000));
        tenant
            .set_quota(Quota {
                limit_bytes,
                ..OPEN
            })
            .unwrap();
        let (all, one) = (engine.stats(), tenant.stats());
        assert_eq!((all.hash_mismatches, one.hash_mismatches), (0, 0));
        thread::yield_now();
    }
}

#[test]
fn concurrent_operations_return_correct_pages() {
    let corpus: Vec<Page> = (0..32)
        .map(|i| match i % 4 {
            0 => noise(i),
            1 => text(i),
            _ => partly_noise(i, i as usize % 8),
        })
        .collect();
    for_each_seed("threads", 4, |seed| {
        let engine = new_engine(800 << 10);
        let tenants = [
            add(&engine, "a", Some("all"), OPEN),
            add(&engine, "b", Some("all"), OPEN),
            add(&engine, "c", None, OPEN),
        ];
        let (done, hits) = (AtomicBool::new(false), AtomicU64::new(0));
        let now_ns = AtomicU64::new(0);
        thread::scope(|scope| {
            let (engine, corpus, done, hits) = (&engine, &corpus, &done, &hits);
            let now_ns = &now_ns;
            let workers: Vec<_> = (0..WORKERS)
                .map(|worker| {
                    let tenant = tenants[worker as usize % tenants.len()].clone();
                    let seed = seed * 1000 + worker;
                    scope.spawn(move || work(&tenant, 1 + worker, seed, corpus, hits))
                })
                .collect();
            let others = [
                scope.spawn(move || come_and_go(engine, seed, corpus, done)),
                scope.spawn({
                    let tenant = tenants[0].clone();
                    move || keep_house(engine, seed, &tenant, now_ns, done)
                }),
                scope.spawn({
                    let tenant = tenants[1].clone();
                    move || keep_house(engine, seed + 1, &tenant, now_ns, done)
                }),
            ];
            let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            done.store(true, Relaxed);
            for thread in ended.into_iter().chain(others.map(|other| other.join())) {
                thread.unwrap();
            }
        });
        assert!(
            hits.load(Relaxed) > 0,
            "the test is too weak: no get was a hit"
        );
        engine.check_invariants();
        drop(tenants);
        maintain_all(&engine);
        let stats = engine.stats();
        assert_eq!((stats.blobs, stats.payload_bytes, stats.tenants), (0, 0, 0));
    });
}

/// Calls `remove_departed` as a background worker would that saw no detached pages of a tenant just before
/// the tenant departed. Departing detaches the tenant's pages, so the call must do nothing. A test
/// in `interleavings.rs` covers this case with threads.
#[test]
fn a_departed_tenant_is_kept_while_it_has_pages() {
    let engine = new_engine(800 << 10);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(put(&tenant, 1, 1, 1, &noise(1)), PutResult::Stored);
    let departed = Arc::clone(tenant.shared());
    drop(tenant);
    engine.remove_departed(&departed);
    let stats = engine.stats();
    assert_eq!((stats.removed_tenants, stats.blobs), (1, 1));
    maintain_all(&engine);
    let stats = engine.stats();
    assert_eq!((stats.removed_tenants, stats.blobs), (0, 0));
}
