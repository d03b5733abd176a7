// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An engine with tenants. The benchmarks call it as the daemon does: they put and get pages in
//! batches, and do background work later.

use std::sync::Arc;
use tmem_pool::{
    Engine, EngineConfig, Get, GetResult, Page, Put, PutResult, Quota, Spent, Tenant, TenantSpec,
    Time,
};

/// Largest number of pages in a batch, as in a request of a guest.
pub const BATCH: usize = 64;

/// Largest number of raw pages of a tenant in the benchmarked pools.
pub const RAW_PAGES: usize = 2048;

const POOL: u32 = 1;

/// Time of the engine's clock at which the benchmarks put pages. No page is cold then.
pub const NOW: Time = Time(0);

/// Time in nanoseconds in which the engine's sweep passes all pages twice, so that all pages become
/// cold.
pub const LATER_NS: u64 = 3_600_000_000_000;

/// A pool with one tenant.
pub struct Rig {
    pub engine: Arc<Engine>,
    pub tenant: Guest,
}

/// One tenant of the pool, through which a benchmark puts and gets pages.
pub struct Guest(Tenant);

impl Rig {
    /// Creates a pool with one tenant.
    ///
    /// # Errors
    /// The system does not provide the address space for the pool.
    pub fn new(size_bytes: u64) -> Result<Rig, String> {
        let engine = Engine::new(EngineConfig::new(size_bytes, 42))
            .map_err(|error| format!("cannot reserve address space for a pool: {error}"))?;
        let tenant = add_guest(&engine, "bench-1")?;
        Ok(Rig { engine, tenant })
    }

    /// Does background work until no page is raw and nothing is left to free.
    pub fn maintain_all(&self) {
        self.maintain_at(NOW);
    }

    /// Does background work in calls of at most `budget` pages until the nursery has at most
    /// `nursery_pages` pages.
    pub fn maintain_until(&self, nursery_pages: usize, budget: usize) {
        while self.engine.stats().nursery_pages > nursery_pages as u64 {
            self.engine.maintain(NOW, budget);
        }
    }

    /// Does all background work that is due at the time `now` of the engine's clock.
    pub fn maintain_at(&self, now: Time) {
        while self.engine.maintain(now, 4096) {}
    }
}

/// Adds a tenant to the trust domain that the benchmark's tenants share by default.
///
/// # Errors
/// The engine does not admit the tenant.
pub fn add_guest(engine: &Arc<Engine>, name: &str) -> Result<Guest, String> {
    add_guest_to(engine, name, Some("bench".into()))
}

/// Adds a tenant to the trust domain `domain`. With None, the tenant gets a domain of its own.
///
/// # Errors
/// The engine does not admit the tenant.
pub fn add_guest_to(
    engine: &Arc<Engine>,
    name: &str,
    domain: Option<String>,
) -> Result<Guest, String> {
    let quota = Quota {
        reserve_bytes: 0,
        limit_bytes: None,
        weight: 100,
    };
    let mut spec = TenantSpec::new(name, quota);
    spec.trust_domain = domain;
    let tenant = engine.add_tenant(spec).map_err(|error| error.to_string())?;
    tenant
        .create_pool(POOL)
        .map_err(|error| error.to_string())?;
    Ok(Guest(tenant))
}

impl Guest {
    /// Puts up to one batch of pages under consecutive page numbers of the object, from `first` on.
    ///
    /// # Panics
    /// If the engine refuses a page.
    pub fn put<'a>(&self, object: u64, first: usize, pages: impl Iterator<Item = &'a Page>) {
        let keys = (first..).map(|index| (object, index as u64));
        let mut nr = 0;
        let stored = self.put_keys(keys.zip(pages.inspect(|_| nr += 1)));
        assert!(
            stored == nr,
            "a put of object {object} from page {first} on stored {stored} of {nr} pages"
        );
    }

    /// Puts up to one batch of pages, each under its key (object, page number). Returns the number
    /// of pages that the engine stored; it refused the others.
    pub fn put_keys<'a>(&self, pages: impl Iterator<Item = ((u64, u64), &'a Page)>) -> usize {
        let put = |((object, index), page): ((u64, u64), &'a Page)| Put {
            object,
            index,
            cookie: index + 1,
            workingset: false,
            page,
        };
        let mut puts = Vec::with_capacity(BATCH);
        puts.extend(pages.map(put));
        let mut results = [PutResult::Refused; BATCH];
        let results = &mut results[..puts.len()];
        self.0
            .put(POOL, &puts, results)
            .expect("the tenant does not have the pool");
        let stored = results
            .iter()
            .filter(|&&result| result == PutResult::Stored);
        stored.count()
    }

    /// Gets up to one batch of consecutive pages of the object, from page number `first` on.
    ///
    /// # Panics
    /// If the pool does not have a page.
    pub fn get(&self, object: u64, first: usize, out: &mut [Page]) -> Spent<'_> {
        let cookies: [u64; BATCH] = std::array::from_fn(|nth| (first + nth) as u64 + 1);
        let mut results = [GetResult::Miss; BATCH];
        let results = &mut results[..out.len()];
        let spent = self.0.get(
            POOL,
            &Get::new(object, first as u64, &cookies[..out.len()]),
            out,
            results,
        );
        let missed = |result: &GetResult| *result == GetResult::Miss;
        assert!(
            !results.iter().any(missed),
            "a get of object {object} from page {first} on missed a page"
        );
        spent.expect("the tenant does not have the pool")
    }

    /// Drops `pages` pages of an object from page number `first` on. With None, drops all pages
    /// from `first` to the end of the object.
    pub fn flush(&self, object: u64, first: usize, pages: Option<u64>) {
        self.0
            .flush(POOL, object, first as u64, pages)
            .expect("the tenant does not have the pool");
    }
}
