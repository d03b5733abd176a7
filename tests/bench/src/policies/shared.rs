// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Four VMs of one trust domain that have most of their pages in common, with the real engine.
//!
//! The replay of traces knows no contents, so it cannot show what eviction does to shared pages: a
//! page that several VMs have in the pool takes memory once, and evicting it from one VM frees
//! almost nothing. Here the pages have contents, and the engine deduplicates and compresses them.

use crate::report::progress;
use clap::ValueEnum;
use std::collections::VecDeque;
use std::sync::Arc;
use tmem_pool::{
    Engine, EngineConfig, Get, GetResult, PAGE_SIZE, Page, PolicyKind, Put, PutResult, Quota,
    Tenant, TenantSpec, Time,
};

const VMS: u64 = 4;

/// Number of pages that each VM reads.
const PAGES: u64 = 4_096;

/// Number of pages of a file. Each VM reads the files in an order of its own.
const FILE_PAGES: u64 = 16;

/// Percentage of the files that are equal in all VMs.
const COMMON_PERCENT: u64 = 90;

/// Number of pages for which the page cache of a VM has room.
const CACHE_PAGES: usize = PAGES as usize / 8;

/// Number of times that each VM reads as many pages as it has.
const ROUNDS: u64 = 10;

/// Number of rounds before gets and hits are counted.
const WARM_ROUNDS: u64 = 4;

/// Size of a pool that holds the pages of all VMs uncompressed.
const LARGE_BYTES: u64 = 2 * VMS * PAGES * PAGE_SIZE as u64;

/// Policies that the engine has, in the order of the results.
pub const POLICIES: [PolicyKind; 2] = [PolicyKind::Lru, PolicyKind::AdaptiveTwoQueue];

/// Load of four VMs: the order in which they read their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SharedLoad {
    /// Each VM reads all its files again and again.
    FourLoops,
    /// Each VM reads one half of its files again and again, and then the other half.
    FourHalves,
}

impl SharedLoad {
    /// All loads, in the order of the report.
    pub const ALL: [SharedLoad; 2] = [SharedLoad::FourLoops, SharedLoad::FourHalves];

    /// Returns the name of the load, as the command line has it.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("a load has no name");
        value.get_name().into()
    }

    /// Returns the place of the `nth` page that a VM reads, in the VM's order of pages.
    fn place(self, nth: u64) -> u64 {
        match self {
            SharedLoad::FourLoops => nth % PAGES,
            SharedLoad::FourHalves => {
                let half = PAGES / 2;
                nth % half + nth / (PAGES * ROUNDS / 2) * half
            }
        }
    }
}

/// A VM with an LRU page cache. No page is read again while it is in the page cache.
struct Vm {
    tenant: Tenant,
    number: u64,
    /// Files in the order in which the VM reads them.
    files: Vec<u64>,
    cached: VecDeque<u64>,
}

impl Vm {
    fn new(engine: &Arc<Engine>, number: u64, seed: u64) -> Result<Vm, String> {
        let quota = Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 100,
        };
        let mut spec = TenantSpec::new(format!("vm{number}"), quota);
        spec.trust_domain = Some("bench".into());
        let tenant = engine.add_tenant(spec).map_err(|error| error.to_string())?;
        tenant.create_pool(0).map_err(|error| error.to_string())?;
        let mut files: Vec<u64> = (0..PAGES / FILE_PAGES).collect();
        fastrand::Rng::with_seed(seed * VMS + number).shuffle(&mut files);
        Ok(Vm {
            tenant,
            number,
            files,
            cached: VecDeque::new(),
        })
    }

    /// Returns the content of a page, which compresses to about a quarter.
    fn content(&self, page: u64) -> Page {
        // 37 and 100 have no common factor, so the common files are spread evenly.
        let is_common = page / FILE_PAGES * 37 % 100 < COMMON_PERCENT;
        let owner = if is_common { 0 } else { 1 + self.number };
        let mut rng = fastrand::Rng::with_seed(owner * PAGES + page);
        let mut content = [page as u8; PAGE_SIZE];
        rng.fill(&mut content[..PAGE_SIZE / 4]);
        content
    }

    /// Reads a page. Returns whether the pool had it.
    fn read(&mut self, place: u64) -> bool {
        let page = self.files[(place / FILE_PAGES) as usize] * FILE_PAGES + place % FILE_PAGES;
        let (mut out, mut results) = ([[0; PAGE_SIZE]], [GetResult::Miss]);
        let get = Get::new(page / FILE_PAGES, page % FILE_PAGES, &[1]);
        self.tenant
            .get(0, &get, &mut out, &mut results)
            .expect("the tenant does not have the pool");
        self.cached.push_back(page);
        if self.cached.len() > CACHE_PAGES
            && let Some(evicted) = self.cached.pop_front()
        {
            let put = Put {
                object: evicted / FILE_PAGES,
                index: evicted % FILE_PAGES,
                cookie: 1,
                workingset: false,
                page: &self.content(evicted),
            };
            // The pool may refuse the page if it is full.
            self.tenant
                .put(0, &[put], &mut [PutResult::Refused])
                .expect("the tenant does not have the pool");
        }
        results[0] != GetResult::Miss
    }
}

/// Runs the load in a pool of this size. Returns the hit ratio and the memory that the pool holds at
/// the end.
fn run(
    load: SharedLoad,
    policy: PolicyKind,
    size_bytes: u64,
    seed: u64,
) -> Result<(f64, u64), String> {
    let mut config = EngineConfig::new(size_bytes, seed);
    config.policy = policy;
    let engine = Engine::new(config)
        .map_err(|error| format!("cannot reserve address space for a pool: {error}"))?;
    let vms = (0..VMS).map(|number| Vm::new(&engine, number, seed));
    let mut vms = vms.collect::<Result<Vec<_>, _>>()?;
    let mut hits = 0;
    for nth in 0..ROUNDS * PAGES {
        for vm in &mut vms {
            let hit = vm.read(load.place(nth));
            hits += u64::from(hit && nth >= WARM_ROUNDS * PAGES);
        }
        if nth % FILE_PAGES == 0 {
            while engine.maintain(Time(0), 64) {}
        }
    }
    let gets = (ROUNDS - WARM_ROUNDS) * PAGES * VMS;
    Ok((hits as f64 / gets as f64, engine.held_bytes()))
}

/// Results of a load: for each pool size in percent, the hit ratio with each of [`POLICIES`].
pub struct SharedRow {
    pub load: SharedLoad,
    pub sizes: Vec<(u64, [f64; POLICIES.len()])>,
}

/// Compares the engine's policies on a load. The sizes are percentages of the memory that the pool
/// holds if it never evicts.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn row(load: SharedLoad, percent: &[u64], seeds: u64) -> Result<SharedRow, String> {
    let mut sizes: Vec<_> = percent.iter().map(|&percent| (percent, [0.0; 2])).collect();
    for seed in 1..=seeds {
        progress(&format!("{}: seed {seed} of {seeds}", load.name()));
        let (_, held_bytes) = run(load, POLICIES[0], LARGE_BYTES, seed)?;
        for (percent, ratios) in &mut sizes {
            for (ratio, policy) in ratios.iter_mut().zip(POLICIES) {
                *ratio += run(load, policy, held_bytes * *percent / 100, seed)?.0 / seeds as f64;
            }
        }
    }
    Ok(SharedRow { load, sizes })
}
