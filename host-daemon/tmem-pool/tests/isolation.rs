// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test of the isolation of trust domains. The answers to a tenant and its charges must not depend
//! on the pages of a tenant of another trust domain. The answers must be the same to the bit, also
//! while the pool is full, pages are evicted and puts are refused. `tmem-bench timing` measures
//! whether the times of requests depend on pages of other trust domains.

use std::sync::Arc;
use tmem_pool::{
    Engine, EngineConfig, GetResult, PAGE_SIZE, Page, Put, PutResult, Quota, Tenant, TenantSpec,
    TenantStats, Time,
};

const MIB: u64 = 1 << 20;

/// Number of pages that the tenant puts; the other tenant puts half as many. The pages of both
/// tenants together are more than the pool can hold.
const PAGES: u64 = 3000;

/// Number of pages of a put.
const BATCH: u64 = 32;

/// Number that is XORed to every byte of a page to make another page. For a page of noise and for a
/// page of one repeated byte, the stored size stays the same.
const OTHER: u8 = 0x5a;

/// Returns the page with this number. One third of all pages is noise, one third has one repeated
/// byte, and one third is partly noise. The other tenant has different pages instead of those of
/// the last third.
fn page(number: u64) -> Page {
    let noise = match number % 3 {
        0 => 0,
        1 => PAGE_SIZE,
        _ => PAGE_SIZE / 3,
    };
    let mut rng = fastrand(number);
    std::array::from_fn(|at| if at < noise { rng() } else { number as u8 })
}

/// Returns a page of the other tenant. It is the page that [`page`] returns, with `change` XORed to
/// every byte, if that does not affect the stored size. Otherwise it is a page that the first
/// tenant never has.
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

fn put(tenant: &Tenant, first: u64, page: impl Fn(u64) -> Page) -> Vec<PutResult> {
    let pages: Vec<Page> = (first..first + BATCH).map(page).collect();
    let put = |(page, index)| Put {
        object: 1,
        index,
        cookie: index + 1,
        workingset: false,
        page,
    };
    let puts: Vec<Put<'_>> = pages.iter().zip(first..).map(put).collect();
    let mut results = vec![PutResult::Refused; puts.len()];
    tenant.put(1, &puts, &mut results).unwrap();
    results
}

fn get(tenant: &Tenant, index: u64) -> (GetResult, Page) {
    let (mut result, mut out) = ([GetResult::Miss], [[0; PAGE_SIZE]]);
    let cookie = [index + 1];
    drop(
        tenant
            .get(1, 1, index, &cookie, &mut out, &mut result)
            .unwrap(),
    );
    // The bytes that come with a miss are unspecified.
    let page = if result[0] == GetResult::Miss {
        [0; PAGE_SIZE]
    } else {
        out[0]
    };
    (result[0], page)
}

/// All that a tenant can see: the answers to its requests, and its statistics.
#[derive(PartialEq)]
struct Seen {
    puts: Vec<Vec<PutResult>>,
    gets: Vec<(GetResult, Page)>,
    stats: Vec<TenantStats>,
}

/// Puts and gets pages of one tenant while another tenant, of the trust domain `domain`, holds
/// pages. `change` is passed to [`others`]: with 0 both tenants have the same pages, except for
/// those of the last third. Returns the answers to the first tenant.
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
        // Background work runs only after every tenth put, so that some puts are refused.
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
fn pages_of_another_domain_change_no_answer_and_no_charge() {
    for limit_bytes in [None, Some(MIB)] {
        let (same, others) = (
            beside("there", 0, limit_bytes),
            beside("there", OTHER, limit_bytes),
        );
        assert!(
            same.puts == others.puts,
            "the answers to puts depend on the pages of another trust domain"
        );
        assert!(
            same.gets == others.gets,
            "the answers to gets depend on the pages of another trust domain"
        );
        for (same, others) in same.stats.iter().zip(&others.stats) {
            assert_eq!(same, others);
        }
        // Assert that the test had hits, evictions and refused puts.
        let stats = same.stats.last().unwrap();
        assert!(
            stats.hits > 0 && stats.evictions > 0 && stats.puts_refused > 0,
            "the test is too weak: it had no hit, no eviction or no refused put: {stats:?}"
        );
    }
    // Inside one trust domain, the answers depend on the other tenant's pages. This shows that the
    // test is able to find a leak.
    assert!(beside("own", 0, None) != beside("own", OTHER, None));
}
