// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a tenant is answered, and how it is charged, does not depend on what one of another trust domain holds:
//! the same to the bit, while the pool is full, pages go and puts are refused. That times do not either is
//! `tmem-bench timing`'s to show.

use tmem_pool::{
    GetResult, PAGE_SIZE, Page, Pool, PoolConfig, Put, PutResult, Quota, Tenant, TenantSpec,
    TenantStats, Time,
};

const MIB: u64 = 1 << 20;

/// Pages of either tenant: more than the pool takes of both.
const PAGES: u64 = 3000;

/// Pages of a put, and between two rounds of background work.
const BATCH: u64 = 32;

/// Every byte changed so is another page. One of noise takes the same room, and so does one of a single byte.
const OTHER: u8 = 0x5a;

/// Of pages one third is noise, one a single byte, and one, which the other tenant has others of, in between.
fn page(number: u64) -> Page {
    let noise = match number % 3 {
        0 => 0,
        1 => PAGE_SIZE,
        _ => PAGE_SIZE / 3,
    };
    let mut rng = fastrand(number);
    std::array::from_fn(|at| if at < noise { rng() } else { number as u8 })
}

/// What the other tenant has: the same where its size is no matter of its bytes, or, with a change, others.
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

fn add(pool: &Pool, domain: &str, limit_bytes: Option<u64>) -> Tenant {
    let spec = TenantSpec {
        name: domain.into(),
        trust_domain: Some(domain.into()),
        quota: Quota {
            reserve_bytes: 0,
            limit_bytes,
            weight: 1,
        },
    };
    let tenant = pool.add_tenant(spec).unwrap();
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
    tenant.put(Time(0), 1, &puts, &mut results).unwrap();
    results
}

fn get(tenant: &Tenant, index: u64) -> (GetResult, Page) {
    let (mut result, mut out) = ([GetResult::Miss], [[0; PAGE_SIZE]]);
    let cookie = [index + 1];
    drop(
        tenant
            .get(Time(0), 1, 1, index, &cookie, &mut out, &mut result)
            .unwrap(),
    );
    // What comes with a miss means nothing.
    let page = if result[0] == GetResult::Miss {
        [0; PAGE_SIZE]
    } else {
        out[0]
    };
    (result[0], page)
}

/// All that a tenant is answered, and what is told of it.
#[derive(PartialEq)]
struct Seen {
    puts: Vec<Vec<PutResult>>,
    gets: Vec<(GetResult, Page)>,
    stats: Vec<TenantStats>,
}

/// A tenant puts and gets beside one of that trust domain, who holds the same pages, or others.
fn beside(domain: &str, change: u8, limit_bytes: Option<u64>) -> Seen {
    let pool = Pool::new(PoolConfig {
        size_bytes: 4 * MIB,
        size_max_bytes: 0,
        seed: 7,
        policy: Default::default(),
    })
    .unwrap();
    let other = add(&pool, domain, None);
    let own = add(&pool, "own", limit_bytes);
    for first in (0..PAGES / 2).step_by(BATCH as usize) {
        put(&other, first, |number| others(number, change));
        while pool.maintain(Time(0), 64) {}
    }
    let mut seen = Seen {
        puts: Vec::new(),
        gets: Vec::new(),
        stats: Vec::new(),
    };
    for first in (0..PAGES).step_by(BATCH as usize) {
        seen.puts.push(put(&own, first, page));
        // Now and then it is quicker than the background.
        if first % (10 * BATCH) == 0 {
            while pool.maintain(Time(0), 64) {}
        }
        seen.gets.push(get(&own, first / 2));
        seen.stats.push(own.stats());
    }
    while pool.maintain(Time(0), 64) {}
    seen.gets.extend((0..PAGES).map(|index| get(&own, index)));
    seen.stats.push(own.stats());
    seen
}

#[test]
fn who_holds_the_same_elsewhere_changes_nothing() {
    for limit_bytes in [None, Some(MIB)] {
        let (same, others) = (
            beside("there", 0, limit_bytes),
            beside("there", OTHER, limit_bytes),
        );
        assert!(same.puts == others.puts, "puts are answered otherwise");
        assert!(same.gets == others.gets, "gets are answered otherwise");
        for (same, others) in same.stats.iter().zip(&others.stats) {
            assert_eq!(same, others);
        }
        // It was tight enough for all that can happen.
        let stats = same.stats.last().unwrap();
        assert!(
            stats.hits > 0 && stats.evictions > 0 && stats.puts_refused > 0,
            "{stats:?}"
        );
    }
    // And would be seen, as it is inside of a domain.
    assert!(beside("own", 0, None) != beside("own", OTHER, None));
}
