// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Properties of the simulated pool with each policy, on random requests.

use super::lists::Lists;
use super::optimum::Optimum;
use super::pool::{Policy, Pool, Reput, hits};
use super::requests::{Key, Kind, Put, requests};
use super::s3_fifo::S3Fifo;
use super::sieve::Sieve;
use super::traces::outcome;
use std::collections::BTreeSet;
use tmem_pool::PolicyKind;
use tmem_trace::format::{Event, ObjectKey, Op, SizeClass};

const SIZE_BYTES: u64 = 60_000;

const EVENTS: u64 = 30_000;

/// Put of a page with a charge of one byte that the guest has used once.
pub(super) const PUT: Put = Put {
    bytes: 1,
    used_again: false,
};

/// Gets a page and puts it again, as a guest does that uses the page once.
pub(super) fn hit(policy: &mut impl Policy, key: Key) {
    policy.get(key);
    policy.put(key, PUT);
}

/// Policy first-in, first-out. The engine has this policy, too, so that the hits of both can be
/// compared.
struct Fifo(Lists<1>);

impl Policy for Fifo {
    fn put(&mut self, key: Key, _put: Put) {
        self.0.push(0, key);
    }

    fn get(&mut self, key: Key) {
        self.0.remove(key);
    }

    fn flush(&mut self, key: Key) {
        self.0.remove(key);
    }

    fn evict(&mut self) -> Option<Key> {
        let key = self.0.oldest(0)?;
        self.0.remove(key);
        Some(key)
    }
}

/// Returns random requests of three tenants: mostly puts and gets of 120 pages, also flushes of
/// pages, ranges, objects and pools.
fn events(seed: u64) -> Vec<Event> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut event = |time_us| {
        let object = ObjectKey {
            pool: rng.u16(..2),
            object: rng.u64(..3),
        };
        let page = rng.u64(..20);
        let op = match rng.u8(..100) {
            0..50 => Op::Put {
                object,
                page,
                workingset: rng.bool(),
                size: SizeClass::from_bytes(rng.usize(..=4096)),
            },
            50..94 => Op::Get {
                object,
                page,
                hit: false,
            },
            94..98 => Op::Flush {
                object,
                page,
                nr_pages: rng.bool().then_some(rng.u64(..4)),
            },
            98 => Op::FlushObject(object),
            _ if rng.bool() => Op::DestroyPool(object.pool),
            _ => Op::Clear,
        };
        let tenant = rng.u32(..3);
        Event {
            time_us,
            tenant,
            op,
        }
    };
    (0..EVENTS).map(&mut event).collect()
}

/// Checks, after each request, that the pool does not exceed its size, and that each hit returns a
/// page that was put, and that was neither flushed nor returned since.
fn check<P: Policy>(policy: impl Fn(usize) -> P) {
    for seed in 1..=3 {
        let requests = requests(&events(seed));
        let mut pool = Pool::new(SIZE_BYTES, &requests.keys, &policy);
        let (mut stored, mut hits) = (BTreeSet::new(), 0);
        for request in &requests.list {
            let hit = pool.apply(request.tenant, request.key, request.kind);
            let page = (request.tenant, request.key);
            match request.kind {
                Kind::Put(_) => _ = stored.insert(page),
                Kind::Get | Kind::Flush => {
                    let known = stored.remove(&page);
                    assert!(known || !hit, "seed {seed}: the page {page:?} was a hit");
                }
            }
            hits += u64::from(hit);
            let charged_bytes = pool.charged_bytes();
            assert!(
                charged_bytes <= SIZE_BYTES,
                "seed {seed}: the pool has {charged_bytes} B, more than {SIZE_BYTES} B"
            );
        }
        let (need_bytes, possible) = Optimum::new(&requests).need();
        assert!(
            need_bytes > SIZE_BYTES && hits > 500 && hits < possible,
            "the pool is never full: {need_bytes} B needed, {hits} of {possible} hits"
        );
    }
}

#[test]
fn no_policy_exceeds_the_pool_or_returns_a_flushed_page() {
    check(|keys| Fifo(Lists::new(keys)));
    for reput in [Reput::KeepsPlace, Reput::NewPlace] {
        check(|keys| S3Fifo::new(keys, reput));
        check(|keys| Sieve::new(keys, reput));
    }
}

/// Compares hits of the simulated pool with those of the engine, both with FIFO. Equal hits show
/// that the simulated pool accounts for memory as the engine does, so the comparison of policies
/// measures only policies.
#[test]
fn the_simulated_pool_has_exactly_the_hits_of_the_engine() {
    for seed in 1..=3 {
        let events = events(seed);
        let engine = outcome(&events, PolicyKind::Fifo, SIZE_BYTES, seed).expect("no memory");
        let requests = requests(&events);
        assert_eq!(requests.gets(), engine.gets);
        let simulated = hits(&requests, SIZE_BYTES, |keys| Fifo(Lists::new(keys)));
        assert_eq!(simulated, engine.hits, "seed {seed}");
    }
}

/// Compares all policies with the optimum, with pages of equal size.
#[test]
fn no_policy_has_more_hits_than_the_optimum() {
    for seed in 1..=3 {
        let equal = |event: &Event| {
            let mut event = *event;
            if let Op::Put { size, .. } = &mut event.op {
                *size = SizeClass::from_bytes(1024);
            }
            event
        };
        let requests = requests(&events(seed).iter().map(equal).collect::<Vec<_>>());
        let optimum = Optimum::new(&requests).hits(SIZE_BYTES).0;
        for reput in [Reput::KeepsPlace, Reput::NewPlace] {
            let s3_fifo = hits(&requests, SIZE_BYTES, |keys| S3Fifo::new(keys, reput));
            let sieve = hits(&requests, SIZE_BYTES, |keys| Sieve::new(keys, reput));
            assert!(s3_fifo <= optimum && sieve <= optimum);
        }
    }
}
