// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the default eviction policy in the engine: VMs that read more pages in a loop than the
//! pool can hold, and the isolation of the policy between tenants.

use super::rng::Rng;
use super::{OPEN, add, get, maintain_all, new_engine, partly_noise, put_raw};
use crate::{
    Engine, PAGE_METADATA_CHARGE_BYTES, Page, PolicyKind, Quota, ShadowMemory, ShadowTenant,
    Tenant, Time,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// A guest that reads its pages in a loop. Its page cache has room for an eighth of them.
struct Reader {
    tenant: Tenant,
    /// Pages in the order in which the guest reads them.
    order: Vec<u64>,
    cached: VecDeque<u64>,
    /// Number that makes the pages different that only this guest has.
    own: u64,
    common_percent: u64,
}

impl Reader {
    fn new(tenant: Tenant, own: u64, pages: u64, common_percent: u64) -> Reader {
        // Files of 16 pages, in an order that differs between guests.
        let mut files: Vec<u64> = (0..pages / 16).collect();
        let mut rng = Rng::new(own);
        for nth in (1..files.len()).rev() {
            files.swap(nth, rng.below(nth as u64 + 1) as usize);
        }
        let order = files.iter().flat_map(|file| file * 16..(file + 1) * 16);
        Reader {
            tenant,
            order: order.collect(),
            cached: VecDeque::new(),
            own,
            common_percent,
        }
    }

    fn page(&self, index: u64) -> Page {
        match index / 16 * 37 % 100 < self.common_percent {
            true => partly_noise(index, 2),
            false => partly_noise(self.own << 32 | index, 2),
        }
    }

    /// Reads the page that is the `nth` of the loop. Returns whether the pool had it.
    fn read(&mut self, nth: usize) -> bool {
        let index = self.order[nth];
        let hit = get(&self.tenant, 1, index, 1).is_some();
        self.cached.push_back(index);
        if self.cached.len() > self.order.len() / 8 {
            let evicted = self.cached.pop_front().expect("the page cache is empty");
            // The pool may refuse a page if it is full.
            put_raw(&self.tenant, 1, evicted, 1, &self.page(evicted));
        }
        hit
    }
}

/// Lets all guests read their pages `rounds` times. Returns the percentage of hits after the first
/// `warm` rounds.
fn percent(engine: &Engine, readers: &mut [Reader], rounds: usize, warm: usize) -> u64 {
    let (mut hits, mut gets) = (0, 0);
    for round in 0..rounds {
        for nth in 0..readers[0].order.len() {
            for reader in &mut *readers {
                let hit = reader.read(nth);
                hits += u64::from(hit && round >= warm);
                gets += u64::from(round >= warm);
            }
            if nth.is_multiple_of(16) {
                while engine.maintain(Time(0), 64) {}
            }
        }
    }
    engine.check_invariants();
    100 * hits / gets
}

fn readers(engine: &Arc<Engine>, count: u64, pages: u64, common_percent: u64) -> Vec<Reader> {
    let reader = |own| {
        let tenant = add(engine, &format!("vm{own}"), Some("domain"), OPEN);
        Reader::new(tenant, own, pages, common_percent)
    };
    (1..=count).map(reader).collect()
}

/// Returns the percentage of hits in a pool with this percentage of the memory that is used
/// without evictions.
fn hits_of_loops(count: u64, pages: u64, common_percent: u64, size_percent: u64) -> u64 {
    let engine = new_engine(48 << 20);
    let mut all = readers(&engine, count, pages, common_percent);
    let possible = percent(&engine, &mut all, 3, 1);
    assert_eq!(possible, 100, "the test is too weak: the pool is too small");
    let used_bytes = all[0].tenant.engine().used_bytes();
    drop(all);
    let engine = new_engine(used_bytes * size_percent / 100);
    let mut all = readers(&engine, count, pages, common_percent);
    let percent = percent(&engine, &mut all, 12, 6);
    println!("{count} VMs, pool of {size_percent} %: {percent} % of the gets are hits");
    percent
}

#[test]
#[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
fn a_loop_that_is_larger_than_the_pool_has_hits() {
    let percent = hits_of_loops(1, 2048, 0, 86);
    assert!(percent >= 60, "{percent} % of the gets are hits");
}

/// Four VMs have the same files, and read them in different orders. They keep the pages that they
/// have in common.
#[test]
#[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
fn vms_with_common_pages_keep_the_common_pages() {
    let percent = hits_of_loops(4, 4096, 90, 86);
    assert!(percent >= 70, "{percent} % of the gets are hits");
}

/// A tenant that evicts its own pages, because it has reached its limit or the limit was lowered, must
/// not see what other tenants do: neither in its own trust domain nor in another, and whatever pages
/// they have.
#[test]
#[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
fn other_tenants_do_not_change_which_pages_a_limited_tenant_keeps() {
    let quota = Quota {
        reserve_bytes: 1 << 20,
        limit_bytes: Some(1 << 20),
        weight: 0,
    };
    let seen = [None, Some("domain"), Some("other")].map(|domain| {
        let engine = new_engine(32 << 20);
        let tenant = add(&engine, "a", Some("domain"), quota);
        let mut reader = Reader::new(tenant, 1, 1024, 90);
        let mut neighbour = domain.map(|domain| {
            let tenant = add(&engine, "b", Some(domain), OPEN);
            Reader::new(tenant, 2, 1024, 90)
        });
        let mut hits = Vec::new();
        for nth in (0..1024).cycle().take(8 * 1024) {
            if let Some(neighbour) = &mut neighbour {
                neighbour.read(1023 - nth);
            }
            hits.push(reader.read(nth));
            while engine.maintain(Time(0), 64) {}
        }
        maintain_all(&engine);
        let lower = Quota {
            reserve_bytes: 1 << 19,
            limit_bytes: Some(1 << 19),
            ..quota
        };
        reader.tenant.set_quota(lower).unwrap();
        maintain_all(&engine);
        hits.extend((0..1024).map(|page| get(&reader.tenant, 1, page, 1).is_some()));
        let stats = reader.tenant.stats();
        assert!(stats.evictions_limit > 1000 && stats.evictions_pool == 0);
        hits
    });
    assert!(seen[0].iter().filter(|hit| **hit).count() > 500);
    assert!(seen[0] == seen[1] && seen[0] == seen[2]);
}

/// Number of pages for which a shadow tenant has room.
const ROOM: u64 = 1000;

/// Reads pages of a shadow tenant. Returns the percentage of hits in the second half of the reads.
fn shadow_hits(policy: PolicyKind, reads: u64, mut next: impl FnMut(u64) -> u64) -> u64 {
    const STORED_BYTES: usize = 1024;
    const CACHE: usize = 100;
    let memory = ShadowMemory::reserve(1 << 30).unwrap();
    let mut tenant = ShadowTenant::new(policy, 3, &memory);
    assert!(tenant.ensure_pool(1));
    let (mut cached, mut hits, mut gets) = (VecDeque::new(), 0, 0);
    for nth in 0..reads {
        let page = next(nth);
        if cached.contains(&page) {
            continue;
        }
        let hit = tenant.get(1, (1, page));
        hits += u64::from(hit && nth >= reads / 2);
        gets += u64::from(nth >= reads / 2);
        cached.push_back(page);
        if cached.len() > CACHE {
            let evicted = cached.pop_front().expect("the page cache is empty");
            assert!(tenant.put(1, (1, evicted), false, STORED_BYTES));
        }
        while tenant.charged_bytes() > ROOM * (STORED_BYTES as u64 + PAGE_METADATA_CHARGE_BYTES) {
            tenant.evict();
        }
    }
    100 * hits / gets
}

/// The order of eviction follows the load: a loop that does not fit has hits, and pages of a working
/// set that fits and changes again and again are evicted by age.
#[test]
#[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
fn the_order_of_eviction_follows_the_load() {
    let shadow_hits = |reads, next: fn(u64) -> u64| shadow_hits(PolicyKind::default(), reads, next);
    let looped = shadow_hits(40_000, |nth| nth % 1300);
    assert!(looped >= 65, "a loop of 1,300 pages has {looped} % hits");
    // The working set changes after each 5,000 reads.
    let changing = shadow_hits(80_000, |nth| nth % 900 + nth / 5000 * 900);
    assert!(
        changing >= 76,
        "changing loops of 900 pages have {changing} % hits"
    );
    // A loop for some time, then a working set that changes.
    let both = shadow_hits(80_000, |nth| match nth {
        0..40_000 => nth % 1300,
        _ => 2000 + nth % 900 + nth / 5000 * 900,
    });
    assert!(
        both >= 70,
        "after a loop, changing loops have {both} % hits"
    );
}

/// A load that alternates between a loop that does not fit and a loop that fits makes the policy
/// change its order again and again. The changes must not cost much more than they gain. With larger
/// loops than these, the order by age alone has up to 9 points fewer hits than LRU.
#[test]
#[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
fn alternating_loops_have_about_as_many_hits_as_with_lru() {
    let mut worst = (0, String::new());
    for (large, large_reads, small, small_reads) in [
        (1300, 1800, 900, 2700),
        (1300, 6000, 970, 6000),
        (1600, 3000, 900, 2700),
        (2200, 12000, 900, 12000),
    ] {
        let cycle = large_reads + small_reads;
        let next = |nth: u64| match nth % cycle {
            place if place < large_reads => place % large,
            place => 10_000 + (place - large_reads) % small,
        };
        let [lru, ours] = [PolicyKind::Lru, PolicyKind::default()]
            .map(|policy| shadow_hits(policy, 60 * cycle, next));
        let what = format!(
            "{large_reads} reads in a loop of {large} pages, then {small_reads} in one of {small}: \
             {lru} % hits with LRU, {ours} % with the default policy"
        );
        println!("{what}");
        if lru.saturating_sub(ours) >= worst.0 {
            worst = (lru.saturating_sub(ours), what);
        }
    }
    let (loss, what) = worst;
    assert!(loss <= 6, "{what}");
}
