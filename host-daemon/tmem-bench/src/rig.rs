// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An engine with tenants. The benchmarks use it as the daemon does: puts and gets come in batches,
//! and background work is done later.

use std::sync::Arc;
use tmem_pool::{
    Engine, EngineConfig, GetResult, Page, Put, PutResult, Quota, Spent, Tenant, TenantSpec, Time,
};

/// Largest number of pages of a request.
pub const BATCH: usize = 64;

/// Largest number of raw pages of a tenant in the pools that are measured.
pub const RAW_PAGES: usize = 2048;

const POOL: u32 = 1;

/// Time of the engine's clock at which no page is cold.
pub const NOW: Time = Time(0);

/// Time in nanoseconds in which the sweep passes all pages twice.
pub const LATER_NS: u64 = 3_600_000_000_000;

/// A pool with one tenant.
pub struct Rig {
    pub engine: Arc<Engine>,
    pub tenant: Guest,
}

/// One tenant of the pool.
pub struct Guest(Tenant);

impl Rig {
    /// Creates a pool with one tenant.
    ///
    /// # Errors
    /// The system does not provide the address space for the pool.
    pub fn new(size_bytes: u64) -> Result<Rig, String> {
        let engine = Engine::new(EngineConfig::new(size_bytes, 42))
            .map_err(|error| format!("cannot reserve address space for a pool: {error}"))?;
        let tenant = guest(&engine, "bench-1")?;
        Ok(Rig { engine, tenant })
    }

    /// Does background work until no page is raw and nothing is left to free.
    pub fn maintain_all(&self) {
        self.until(NOW);
    }

    /// Does all background work that is due at `now`.
    pub fn until(&self, now: Time) {
        while self.engine.maintain(now, 4096) {}
    }
}

/// Adds a tenant of the common trust domain.
///
/// # Errors
/// The engine does not admit the tenant.
pub fn guest(engine: &Arc<Engine>, name: &str) -> Result<Guest, String> {
    let quota = Quota {
        reserve_bytes: 0,
        limit_bytes: None,
        weight: 100,
    };
    let mut spec = TenantSpec::new(name, quota);
    spec.trust_domain = Some("bench".into());
    let tenant = engine.add_tenant(spec).map_err(|error| error.to_string())?;
    tenant
        .create_pool(POOL)
        .map_err(|error| error.to_string())?;
    Ok(Guest(tenant))
}

impl Guest {
    /// Puts up to one batch of pages. The first page gets the page number `first` in the object.
    ///
    /// # Panics
    /// If a page is refused.
    pub fn put<'a>(&self, object: u64, first: usize, pages: impl Iterator<Item = &'a Page>) {
        let put = |(page, index): (&'a Page, usize)| Put {
            object,
            index: index as u64,
            cookie: index as u64 + 1,
            workingset: false,
            page,
        };
        let mut puts = Vec::with_capacity(BATCH);
        puts.extend(pages.zip(first..).map(put));
        let mut results = [PutResult::Refused; BATCH];
        let results = &mut results[..puts.len()];
        self.0
            .put(POOL, &puts, results)
            .expect("the tenant does not have the pool");
        let stored = |result: &PutResult| *result == PutResult::Stored;
        assert!(
            results.iter().all(stored),
            "a put of object {object} from page {first} on refused a page"
        );
    }

    /// Gets up to one batch of pages, from page `first` of the object on.
    ///
    /// # Panics
    /// If a page is missed.
    pub fn get(&self, object: u64, first: usize, out: &mut [Page]) -> Spent<'_> {
        let cookies: [u64; BATCH] = std::array::from_fn(|nth| (first + nth) as u64 + 1);
        let mut results = [GetResult::Miss; BATCH];
        let results = &mut results[..out.len()];
        let spent = self.0.get(
            POOL,
            object,
            first as u64,
            &cookies[..out.len()],
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

    /// Drops `pages` pages of an object from the page `first` on, or all pages from there on if
    /// `pages` is None.
    pub fn flush(&self, object: u64, first: usize, pages: Option<u64>) {
        self.0
            .flush(POOL, object, first as u64, pages)
            .expect("the tenant does not have the pool");
    }
}
