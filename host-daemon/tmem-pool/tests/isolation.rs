// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test of the isolation of trust domains. The answers to a tenant's requests and the tenant's
//! charge must not depend on the pages of a tenant of another trust domain. The answers must be the
//! same to the bit, also while the pool is full, pages are evicted and puts are refused. The cost
//! that the engine reports for a request must be the same, too. It includes the evictions of a put
//! that finds no free memory, so a put into a full pool does as much work whatever pages the other
//! tenant has. The command `tmem-bench timing` measures whether the times of requests depend on
//! pages of other trust domains.

use std::sync::Arc;
use tmem_pool::{
    Engine, EngineConfig, Get, GetResult, PAGE_SIZE, Page, Put, PutResult, Quota, Tenant,
    TenantSpec, TenantStats, Time,
};

const MIB: u64 = 1 << 20;

/// Number of pages that the observed tenant puts. The other tenant puts half as many. The pages of
/// both tenants together are more than the pool can hold.
const PAGES: u64 = 3000;

/// Number of pages of each put.
const BATCH: u64 = 32;

/// Number that is XORed to every byte of a page to make another page. For a page of noise and for a
/// page of one repeated byte, the stored size does not change.
const OTHER: u8 = 0x5a;

/// Returns the observed tenant's page with this number. By its number, a page is all noise, has one
/// repeated byte, or is partly noise. One third of the pages is of each kind.
fn page(number: u64) -> Page {
    let noise = match number % 3 {
        0 => 0,
        1 => PAGE_SIZE,
        _ => PAGE_SIZE / 3,
    };
    let mut rng = fastrand(number);
    std::array::from_fn(|at| if at < noise { rng() } else { number as u8 })
}

/// Returns the other tenant's page with this number. A page of noise or of one repeated byte is the
/// observed tenant's page with every byte XORed with `change`, which does not affect the stored
/// size. Otherwise it is a page that the observed tenant never has.
fn others(number: u64, change: u8) -> Page {
    match number % 3 {
        2 => page(number + 3 * PAGES),
        _ => page(number).map(|byte| byte ^ change),
    }
}

fn fastrand(seed: u64) -> impl FnMut() -> u8 {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    }
}

fn add(engine: &Arc<Engine>, domain: &str, limit_bytes: Option<u64>) -> Tenant {
    let quota = Quota {
        reserve_bytes: 0,
        limit_bytes,
        weight: 1,
    };
    let mut spec = TenantSpec::new(domain, quota);
    spec.trust_domain = Some(domain.into());
    let tenant = engine.add_tenant(spec).unwrap();
    tenant.create_pool(1).unwrap();
    tenant
}

/// Puts a batch of pages. Returns the answers, and the cost in nanoseconds.
fn put(tenant: &Tenant, first: u64, page: impl Fn(u64) -> Page) -> (Vec<PutResult>, u64) {
    let pages: Vec<Page> = (first..first + BATCH).map(page).collect();
    let pages = pages.iter().zip(first..);
    let puts: Vec<Put<'_>> = pages
        .map(|(page, index)| Put {
            object: 1,
            index,
            cookie: index + 1,
            workingset: false,
            page,
        })
        .collect();
    let mut results = vec![PutResult::Refused; puts.len()];
    let cost_ns = tenant.put(1, &puts, &mut results).unwrap();
    (results, cost_ns)
}

/// Gets a page. Returns the answer with the page, and the cost in nanoseconds.
fn get(tenant: &Tenant, index: u64) -> (GetResult, Page, u64) {
    let (mut result, mut out) = ([GetResult::Miss], [[0; PAGE_SIZE]]);
    let cookie = [index + 1];
    let spent = tenant
        .get(1, &Get::new(1, index, &cookie), &mut out, &mut result)
        .unwrap();
    let cost_ns = spent.cost_ns();
    drop(spent);
    // The contents of `out` after a miss are unspecified, so replace them by zeroes.
    let page = if result[0] == GetResult::Miss {
        [0; PAGE_SIZE]
    } else {
        out[0]
    };
    (result[0], page, cost_ns)
}

/// All that the observed tenant can see: the answers to its requests with their costs, and its
/// statistics.
#[derive(PartialEq)]
struct Seen {
    puts: Vec<(Vec<PutResult>, u64)>,
    gets: Vec<(GetResult, Page, u64)>,
    stats: Vec<TenantStats>,
}

/// Puts and gets pages of the observed tenant while another tenant, in the trust domain `domain`,
/// has pages. `change` is passed to [`others`]. With 0, two thirds of the other tenant's pages
/// equal pages of the observed tenant. Returns what the observed tenant can see.
fn beside(domain: &str, change: u8, limit_bytes: Option<u64>) -> Seen {
    let engine = Engine::new(EngineConfig::new(4 * MIB, 7)).unwrap();
    let other = add(&engine, domain, None);
    let own = add(&engine, "own", limit_bytes);
    for first in (0..PAGES / 2).step_by(BATCH as usize) {
        put(&other, first, |number| others(number, change));
        while engine.maintain(Time(0), 64) {}
    }
    let mut seen = Seen {
        puts: Vec::new(),
        gets: Vec::new(),
        stats: Vec::new(),
    };
    for first in (0..PAGES).step_by(BATCH as usize) {
        seen.puts.push(put(&own, first, page));
        // Run background work only after every tenth put, so that some puts are refused.
        if first % (10 * BATCH) == 0 {
            while engine.maintain(Time(0), 64) {}
        }
        seen.gets.push(get(&own, first / 2));
        seen.stats.push(own.stats());
    }
    while engine.maintain(Time(0), 64) {}
    seen.gets.extend((0..PAGES).map(|index| get(&own, index)));
    seen.stats.push(own.stats());
    seen
}

#[test]
fn pages_of_another_trust_domain_do_not_change_answers_or_charges() {
    for limit_bytes in [None, Some(MIB)] {
        let (same, others) = (
            beside("there", 0, limit_bytes),
            beside("there", OTHER, limit_bytes),
        );
        assert!(
            same.puts == others.puts,
            "the answers to puts or their costs depend on the pages of another trust domain"
        );
        assert!(
            same.gets == others.gets,
            "the answers to gets or their costs depend on the pages of another trust domain"
        );
        for (same, others) in same.stats.iter().zip(&others.stats) {
            assert_eq!(same, others);
        }
        // Assert that the run had hits, evictions and refused puts.
        let stats = same.stats.last().unwrap();
        assert!(
            stats.hits > 0 && stats.evictions > 0 && stats.puts_refused > 0,
            "the test is too weak: it had no hit, no eviction or no refused put: {stats:?}"
        );
    }
    // If both tenants are in one trust domain, the answers do depend on the other tenant's pages.
    // This shows that the test is able to find a leak.
    assert!(beside("own", 0, None) != beside("own", OTHER, None));
}
