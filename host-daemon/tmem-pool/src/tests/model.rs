// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random operations of several tenants, compared with a model after every step.
//!
//! The model has the last page put under each key. A get may return that page with its cookie, or a
//! miss. After each step, every page that the engine has must be in the model. Each page that only
//! the model has must have been counted as evicted.

use super::rng::{Rng, for_each_seed, for_each_seed_from};
use super::{maintain_all, noise, partly_noise};
use crate::config::{EVICTIONS_PER_PUT_PAGE, FINALIZE_PAGES, INDEX_ROOM_BYTES};
use crate::fail;
use crate::hash::{HashFn, PageHash};
use crate::{
    AdmissionError, CreateError, Engine, EngineConfig, Get, GetResult, NoPool, PAGE_SIZE, Page,
    PolicyKind, Put, PutResult, Quota, Ref, Tenant, TenantSpec, Time,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

const STEPS: u64 = 1000;
/// Number of steps between two comparisons of page contents, because reading contents takes long.
/// Keys are compared after each step.
const CONTENTS_EVERY: u64 = 8;
const KEYS_MAX: u32 = 120;
const CORPUS: usize = 40;

type Key = (u32, u64, u64);

struct Modelled {
    tenant: Tenant,
    pools: BTreeSet<u32>,
    /// Pages that the tenant should have: for each key, the cookie, and the index of the page's
    /// contents in the test's list of pages.
    pages: BTreeMap<Key, (u64, usize)>,
    evictions_seen: u64,
    /// Number of evictions of pages that were not retained, as of the last comparison.
    others_evicted: u64,
    quota: Quota,
}

struct World {
    rng: Rng,
    engine: Arc<Engine>,
    corpus: Vec<Page>,
    tenants: Vec<Modelled>,
    cookie: u64,
    names: u64,
    /// Rate of injected failures: one allocation in this number fails, on average. 0 means that
    /// none fails.
    fails_one_in: u64,
    hits: u64,
    /// Counter: pages that a get returned and left in the pool.
    retained: u64,
    /// Counter: references (REF) to pages that the engine still had.
    refs: u64,
    evictions: u64,
}

fn corpus(seed: u64) -> Vec<Page> {
    let mut pages: Vec<Page> = (0..CORPUS as u64)
        .map(|i| match i % 5 {
            0 => [(i / 10) as u8; PAGE_SIZE],
            1 => noise(seed + i),
            eighths => partly_noise(seed + i, eighths as usize),
        })
        .collect();
    // Make two pairs of pages that differ in the last byte only.
    pages[2] = pages[3];
    pages[2][PAGE_SIZE - 1] ^= 1;
    pages[6] = pages[11];
    pages[6][PAGE_SIZE - 1] ^= 1;
    pages
}

impl World {
    fn new(seed: u64, hash: HashFn, fails_one_in: u64) -> World {
        let mut rng = Rng::new(seed);
        let size_bytes = INDEX_ROOM_BYTES + (64 << 10) + rng.below(512 << 10);
        let config = EngineConfig {
            size_bytes,
            size_max_bytes: 16 << 20,
            seed,
            policy: if rng.one_in(4) {
                PolicyKind::Lru
            } else {
                PolicyKind::AdaptiveTwoQueue
            },
        };
        let engine = Engine::with(config, hash, KEYS_MAX).unwrap();
        let corpus = corpus(seed);
        let (tenants, names) = (Vec::new(), 0);
        let cookie = rng.next();
        World {
            rng,
            engine,
            corpus,
            tenants,
            cookie,
            names,
            fails_one_in,
            hits: 0,
            retained: 0,
            refs: 0,
            evictions: 0,
        }
    }

    fn quota(&mut self) -> Quota {
        let rng = &mut self.rng;
        Quota {
            reserve_bytes: rng.below(64 << 10),
            limit_bytes: rng.one_in(2).then(|| rng.below(256 << 10)),
            weight: rng.below(4) as u32,
        }
    }

    fn add_tenant(&mut self) {
        let domain = self.rng.below(3);
        let trust_domain = (domain > 0).then(|| format!("domain {domain}"));
        let quota = self.quota();
        self.names += 1;
        let name = format!("vm {}", self.names);
        match self.engine.add_tenant(TenantSpec {
            name: name.clone(),
            trust_domain,
            quota,
        }) {
            Ok(tenant) => self.tenants.push(Modelled {
                tenant,
                pools: BTreeSet::new(),
                pages: BTreeMap::new(),
                evictions_seen: 0,
                others_evicted: 0,
                quota,
            }),
            Err(AdmissionError {
                tenant,
                reserve_bytes,
                available_bytes,
            }) => {
                assert_eq!(tenant, name);
                assert!(reserve_bytes > available_bytes);
            }
        }
    }

    /// Does one random operation. Returns true if it was a put.
    fn step(&mut self) -> bool {
        let kind = self.rng.below(100);
        if self.tenants.is_empty() || (self.tenants.len() < 4 && kind < 4) {
            self.add_tenant();
            return false;
        }
        let at = self.rng.below(self.tenants.len() as u64) as usize;
        match kind {
            0..60 => self.put(at),
            60..76 => self.get(at),
            76..82 => self.refer(at),
            82..90 => self.flush(at),
            90..93 => self.pools(at),
            93 => {
                self.tenants[at].tenant.clear();
                self.tenants[at].pools.clear();
                self.tenants[at].pages.clear();
            }
            94 => drop(self.tenants.swap_remove(at)),
            95 => {
                let quota = self.quota();
                if self.tenants[at].tenant.set_quota(quota).is_ok() {
                    self.tenants[at].quota = quota;
                }
            }
            96 => {
                let size_bytes = INDEX_ROOM_BYTES + self.rng.below(768 << 10);
                self.engine.resize(size_bytes);
            }
            _ => {
                let before = self.engine.stats();
                let budget = self.rng.below(100) as usize;
                fail::one_in(self.fails_one_in, budget as u64);
                let more = self.engine.maintain(Time(0), budget);
                fail::one_in(0, 0);
                let after = self.engine.stats();
                let evicted = after.evictions - before.evictions;
                let freed = before.detached_pages - after.detached_pages;
                // The budget bounds the number of finalized pages, except that the last step may
                // exceed it. Finalizing a page may evict other pages.
                let most = (budget + FINALIZE_PAGES) * (1 + EVICTIONS_PER_PUT_PAGE);
                let most = most as u64;
                assert!(
                    evicted + freed <= most,
                    "maintain() with a budget of {budget} pages evicted {evicted} and freed {freed} pages, more than {most}"
                );
                if !more {
                    assert_eq!(after.detached_pages + after.removed_tenants, 0);
                    assert!(
                        after.held_bytes <= after.size_bytes || after.pages == 0,
                        "maintain() ended while the pool was above its size: {after:?}"
                    );
                }
            }
        }
        kind < 60
    }

    /// Returns a pool number. In most cases, the tenant has a pool with this number.
    fn pick_pool(&mut self, at: usize) -> u32 {
        if self.rng.one_in(20) {
            return 1 + self.rng.below(3) as u32;
        }
        let pools = &self.tenants[at].pools;
        let nth = self.rng.below(pools.len().max(1) as u64) as usize;
        pools.iter().nth(nth).copied().unwrap_or(1)
    }

    fn put(&mut self, at: usize) {
        let pool = self.pick_pool(at);
        let object = 1 + self.rng.below(3);
        let puts: Vec<(u64, u64, u64, usize)> = (0..1 + self.rng.below(20))
            .map(|_| {
                self.cookie = self.cookie.wrapping_add(1);
                let object = if self.rng.one_in(4) {
                    4 + self.rng.below(20)
                } else {
                    object
                };
                let page = self.rng.below(CORPUS as u64) as usize;
                (object, self.rng.below(40), self.cookie, page)
            })
            .collect();
        let pages: Vec<Put<'_>> = puts
            .iter()
            .map(|&(object, index, cookie, page)| {
                let page = &self.corpus[page];
                Put {
                    object,
                    index,
                    cookie,
                    workingset: index % 2 == 0,
                    page,
                }
            })
            .collect();
        let mut results = vec![PutResult::Stored; pages.len()];
        let before = (self.engine.stats(), self.tenants[at].tenant.stats());
        let vm = &mut self.tenants[at];
        fail::one_in(self.fails_one_in, self.cookie);
        let answer = vm.tenant.put(pool, &pages, &mut results);
        fail::one_in(0, 0);
        let after = (self.engine.stats(), vm.tenant.stats());
        if !vm.pools.contains(&pool) {
            assert_eq!(answer, Err(NoPool));
            assert_eq!(after, before);
            assert!(results.iter().all(|result| *result == PutResult::Refused));
            return;
        }
        assert!(answer.is_ok());
        let mut most = after.0.size_bytes;
        if before.0.held_bytes > most {
            // The pool exceeds its size after a resize. Until enough pages are evicted, an index
            // may still grow.
            most = before.0.held_bytes + INDEX_ROOM_BYTES;
        }
        assert!(
            after.0.held_bytes <= most,
            "the pool holds {} B after a put, more than {most} B",
            after.0.held_bytes
        );
        let limit_bytes = vm.quota.limit_bytes.unwrap_or(u64::MAX);
        let most = before.1.charged_bytes.max(limit_bytes);
        assert!(
            after.1.charged_bytes <= most,
            "the tenant is charged {} B after a put, more than {most} B",
            after.1.charged_bytes
        );
        let evicted = after.0.evictions - before.0.evictions;
        let evictions_max = 2 * crate::config::EVICTIONS_PER_PUT_PAGE * pages.len();
        assert!(
            evicted <= evictions_max as u64,
            "a put of {} pages evicted {evicted} pages, more than {evictions_max}",
            pages.len()
        );
        for (&(object, index, cookie, page), result) in puts.iter().zip(results) {
            let key = (pool, object, index);
            match result {
                PutResult::Stored => vm.pages.insert(key, (cookie, page)),
                PutResult::Refused => vm.pages.remove(&key),
            };
        }
    }

    fn get(&mut self, at: usize) {
        let pool = self.pick_pool(at);
        let (object, index) = (1 + self.rng.below(3), self.rng.below(40));
        let vm = &mut self.tenants[at];
        let cookies: Vec<u64> = (0..1 + self.rng.below(24))
            .map(|i| {
                let held = vm
                    .pages
                    .get(&(pool, object, index + i))
                    .map(|(cookie, _)| *cookie);
                // For some pages, the get names a wrong cookie, which differs from the right one in
                // one bit.
                let flip = u64::from(self.rng.one_in(10)) << self.rng.below(64);
                held.unwrap_or(self.cookie) ^ flip
            })
            .collect();
        let mut out = vec![[0x5a; PAGE_SIZE]; cookies.len()];
        let mut results = vec![GetResult::Miss; cookies.len()];
        let retain = self.rng.next() & (self.rng.next() * self.rng.below(2));
        let get = Get {
            retain,
            ..Get::new(object, index, &cookies)
        };
        let answer = vm.tenant.get(pool, &get, &mut out, &mut results);
        assert_eq!(
            answer.map(drop),
            if vm.pools.contains(&pool) {
                Ok(())
            } else {
                Err(NoPool)
            }
        );
        for (i, result) in results.iter().enumerate() {
            let key = (pool, object, index + i as u64);
            let (cookie, retained) = match *result {
                GetResult::Miss => continue,
                GetResult::Hit { cookie } => (cookie, false),
                GetResult::Retained { cookie } => (cookie, true),
            };
            assert_eq!(cookie, cookies[i]);
            assert!(
                !retained || retain >> i & 1 != 0,
                "the page {key:?} is retained although the get does not allow it"
            );
            let found = match retained {
                true => vm.pages.get(&key).copied(),
                false => vm.pages.remove(&key),
            };
            let (last, page) =
                found.expect("a get returned a page that was never put or was already returned");
            self.retained += u64::from(retained);
            assert_eq!(
                cookie, last,
                "a get of {key:?} returned a page with another cookie than that of the last put"
            );
            assert!(
                out[i] == self.corpus[page],
                "a get returned wrong bytes for the key {key:?}"
            );
            self.hits += 1;
        }
        // Assert that the engine does not have the pages that the get missed. If the engine has
        // lost a page, `compare` reports that, because the engine has not counted the page as
        // evicted.
        for (i, result) in results.iter().enumerate() {
            let key = (pool, object, index + i as u64);
            let held = vm
                .tenant
                .peek(key)
                .is_some_and(|cookie| cookie == cookies[i]);
            assert!(
                *result != GetResult::Miss || !held,
                "a get of {key:?} missed, although the engine holds the page"
            );
        }
    }

    /// Sends references (REF) to random pages. A reference must find a page only if the engine has
    /// the page under the named key and cookie. All other pages must stay unchanged.
    fn refer(&mut self, at: usize) {
        let pool = self.pick_pool(at);
        let object = 1 + self.rng.below(3);
        let vm = &mut self.tenants[at];
        let refs: Vec<Ref> = (0..1 + self.rng.below(24))
            .map(|_| {
                let index = self.rng.below(40);
                let held = vm.pages.get(&(pool, object, index));
                let flip = u64::from(self.rng.one_in(10)) << self.rng.below(64);
                let cookie = held.map_or(self.cookie, |(cookie, _)| *cookie) ^ flip;
                Ref {
                    object,
                    index,
                    cookie,
                }
            })
            .collect();
        let has = |page: &Ref| vm.tenant.peek((pool, page.object, page.index)) == Some(page.cookie);
        let expected: Vec<bool> = refs.iter().map(has).collect();
        if !vm.pools.contains(&pool) {
            assert_eq!(vm.tenant.drop_refs(pool, &refs), Err(NoPool));
        } else if self.rng.one_in(5) {
            assert!(vm.tenant.drop_refs(pool, &refs).is_ok());
            for page in &refs {
                let key = (pool, page.object, page.index);
                if vm.pages.get(&key).is_some_and(|held| held.0 == page.cookie) {
                    vm.pages.remove(&key);
                }
            }
            return;
        }
        let mut held = vec![true; refs.len()];
        let answer = vm.tenant.refer(pool, &refs, &mut held).map(drop);
        let live = vm.pools.contains(&pool);
        assert_eq!(answer, if live { Ok(()) } else { Err(NoPool) });
        assert_eq!(held, expected);
        self.refs += held.into_iter().filter(|held| *held).count() as u64;
    }

    fn flush(&mut self, at: usize) {
        let pool = self.pick_pool(at);
        let object = 1 + self.rng.below(4);
        let index = self.rng.below(40) * self.rng.below(2);
        let nr_pages = (!self.rng.one_in(2)).then(|| self.rng.below(50));
        let vm = &mut self.tenants[at];
        let answer = vm.tenant.flush(pool, object, index, nr_pages);
        assert_eq!(
            answer,
            if vm.pools.contains(&pool) {
                Ok(())
            } else {
                Err(NoPool)
            }
        );
        let end = nr_pages.map_or(u64::MAX, |n| index + n);
        let range = index..end;
        vm.pages
            .retain(|key, _| (key.0, key.1) != (pool, object) || !range.contains(&key.2));
    }

    fn pools(&mut self, at: usize) {
        let id = 1 + self.rng.below(3) as u32;
        let vm = &mut self.tenants[at];
        if self.rng.one_in(3) {
            let existed = vm.pools.remove(&id);
            let answer = vm.tenant.destroy_pool(id);
            assert_eq!(answer, if existed { Ok(()) } else { Err(NoPool) });
            vm.pages.retain(|key, _| key.0 != id);
        } else {
            let fresh = vm.pools.insert(id);
            // The content of a page never depends on whether its pool is private.
            let answer = if id == 3 {
                vm.tenant.create_private_pool(id)
            } else {
                vm.tenant.create_pool(id)
            };
            assert_eq!(
                answer,
                if fresh {
                    Ok(())
                } else {
                    Err(CreateError::Exists)
                }
            );
        }
    }

    /// Asserts that the engine has only pages of the model, and that it has counted each missing
    /// page as evicted. Then removes the missing pages from the model.
    fn compare(&mut self, contents: bool, after_put: bool) {
        self.engine.check_invariants();
        if contents {
            let heap = &self.engine.store.heap;
            heap.check(self.engine.stats().blobs as usize);
        }
        for vm in &mut self.tenants {
            let (engine, corpus) = (vm.tenant.engine(), &self.corpus);
            let before = vm.pages.len();
            vm.pages.retain(|&key, &mut (cookie, page)| {
                let mut out = [0x77; PAGE_SIZE];
                let read = contents.then_some(&mut out);
                let Some(found) = vm.tenant.peek_with(key, read) else {
                    return false;
                };
                assert_eq!(
                    found, cookie,
                    "the engine holds another cookie than that of the last put of {key:?}"
                );
                assert!(
                    !contents || out == corpus[page],
                    "the engine holds wrong bytes for the key {key:?}"
                );
                true
            });
            let stats = vm.tenant.stats();
            assert_eq!(
                stats.pages,
                vm.pages.len() as u64,
                "the engine counts another number of pages than the model has"
            );
            let gone = (before - vm.pages.len()) as u64;
            // After a put, fewer pages may be missing than were evicted. The put may have evicted a
            // page and then stored a new page under its key.
            let evicted = stats.evictions - vm.evictions_seen;
            assert!(
                gone == evicted || (after_put && gone < evicted),
                "{gone} pages are gone, but the engine counted {evicted} pages as evicted"
            );
            self.evictions += gone;
            let others = stats.evictions - stats.evictions_retained;
            assert!(
                others == vm.others_evicted || stats.retained_pages == 0,
                "a held page was evicted although there are {} retained pages",
                stats.retained_pages
            );
            vm.others_evicted = others;
            vm.evictions_seen = stats.evictions;
            assert_eq!(stats.pools, vm.pools.len() as u64);
            assert_eq!(stats.hash_mismatches, 0);
            assert!(stats.pages + stats.detached_pages <= u64::from(KEYS_MAX));
            assert!(engine.size_bytes.get() >= stats.entitled_bytes);
        }
    }

    /// Runs all steps. Returns the numbers of hits and evictions.
    fn run(&mut self) -> (u64, u64) {
        for step in 0..STEPS {
            let put = self.step();
            self.compare(step % CONTENTS_EVERY == 0, put);
        }
        self.tenants.clear();
        maintain_all(&self.engine);
        let stats = self.engine.stats();
        assert_eq!((stats.payload_bytes, stats.blobs, stats.tenants), (0, 0, 0));
        (self.hits, self.evictions)
    }
}

fn one_bit(_: &PageHash, page: &Page) -> u128 {
    u128::from(page[0] & 1)
}

fn model(seed: u64, hash: HashFn, fails_one_in: u64) {
    let mut world = World::new(seed, hash, fails_one_in);
    let (hits, evictions) = world.run();
    assert!(
        hits > 0 && evictions > 0,
        "the test is too weak: seed {seed} causes no hit or no eviction"
    );
    assert!(
        fails_one_in > 0 || (world.retained > 0 && world.refs > 0),
        "the test is too weak: seed {seed} causes no retained page or no reference"
    );
}

#[test]
fn a_get_returns_the_last_put_or_a_miss() {
    for_each_seed("model", 6, |seed| model(seed, PageHash::of, 0));
}

#[test]
fn a_get_returns_the_last_put_when_hashes_collide() {
    // Use a hash function with only two values, so that different pages often have equal hashes.
    for_each_seed("model with collisions", 3, |seed| {
        model(seed, one_bit, 0);
    });
}

#[test]
fn a_get_returns_the_last_put_when_allocations_fail() {
    for_each_seed("model without memory", 4, |seed| {
        model(seed, PageHash::of, [3, 20][seed as usize % 2]);
    });
}

/// Fuzz test of `make fuzz`: runs with new seeds for `TMEM_SECONDS` seconds. With `TMEM_SEED`, each
/// run has that seed.
#[test]
#[ignore = "runs for TMEM_SECONDS seconds: make fuzz"]
fn random_engine_operations_match_the_model() {
    let seconds = std::env::var("TMEM_SECONDS").map_or(60, |text| {
        text.parse()
            .expect("TMEM_SECONDS is not a number of seconds")
    });
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let first = since_1970.expect("the clock is before 1970").as_secs() << 16;
    let (end, mut runs) = (Instant::now() + Duration::from_secs(seconds), 0);
    while Instant::now() < end {
        for_each_seed_from(first + runs, "fuzz", 1, |seed| {
            let mut rng = Rng::new(seed);
            let hash = if rng.one_in(4) { one_bit } else { PageHash::of };
            let fails_one_in = [0, 0, 5, 50][rng.below(4) as usize];
            World::new(seed, hash, fails_one_in).run();
        });
        runs += 1;
    }
    println!("{runs} runs of {STEPS} steps");
}
