// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage engine: pages, keys, tenants and time, and nothing of virtio.
//!
//! (API skeleton: signatures that the daemon, the simulator and the benchmarks build on.)
#![allow(missing_docs, unused_variables)]

use std::sync::Arc;

pub const PAGE_SIZE: usize = 4096;
pub type Page = [u8; PAGE_SIZE];

/// Monotonic time in nanoseconds, passed in by the caller so that a simulator owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Memory the pool may hold, metadata included.
    pub size_bytes: u64,
    /// Seeds the content hash; random per process in production, fixed in tests.
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub reserve_bytes: u64,
    /// None: the pool's size is the only limit.
    pub limit_bytes: Option<u64>,
    pub weight: u32,
}

#[derive(Clone, Debug)]
pub struct TenantSpec {
    /// For messages and statistics only.
    pub name: String,
    /// Tenants of equal Some(domain) share equal pages; None is a domain of its own.
    pub trust_domain: Option<String>,
    pub quota: Quota,
}

pub struct Pool(Arc<()>);
/// One tenant. Dropping it drops its pages (freed behind).
pub struct Tenant(Arc<()>);

pub struct Put<'a> { pub object: u64, pub index: u64, pub cookie: u64, pub workingset: bool, pub page: &'a Page }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutResult { Stored, Refused }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetResult { Hit { cookie: u64 }, Miss }
/// No such live pool of this tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPool;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateError { Exists, Limit }

impl Pool {
    pub fn new(config: PoolConfig) -> Pool { todo!() }
    /// Refused (typed error, names tenant and values) if the reserves would exceed the pool.
    pub fn add_tenant(&self, spec: TenantSpec) -> Result<Tenant, AdmissionError> { todo!() }
    /// Changes the size; evicts down to it in bounded steps of `maintain`.
    pub fn resize(&self, size_bytes: u64) { todo!() }
    /// Background work (freeing, eviction down to size and limits): at most about `budget` pages; true if more is left.
    pub fn maintain(&self, now: Time, budget: usize) -> bool { todo!() }
    pub fn stats(&self) -> PoolStats { todo!() }
}

impl Tenant {
    /// id is range-checked by the caller's protocol; here any u32 but 0.
    pub fn create_pool(&self, id: u32) -> Result<(), CreateError> { todo!() }
    pub fn destroy_pool(&self, id: u32) -> Result<(), NoPool> { todo!() }
    /// results.len() == pages.len(). A refused page leaves nothing under its key.
    pub fn put(&self, now: Time, pool: u32, pages: &[Put<'_>], results: &mut [PutResult]) -> Result<(), NoPool> { todo!() }
    /// Pages index.. of one object. out.len() == results.len() == cookies.len(). A hit removes the page; out of a miss is unspecified.
    pub fn get(&self, now: Time, pool: u32, object: u64, index: u64, cookies: &[u64], out: &mut [Page], results: &mut [GetResult]) -> Result<(), NoPool> { todo!() }
    /// nr_pages None: to the end of the object.
    pub fn flush(&self, pool: u32, object: u64, index: u64, nr_pages: Option<u64>) -> Result<(), NoPool> { todo!() }
    /// Empties the tenant, O(1) for the caller: pools, objects, pages. Quota and trust domain stay.
    pub fn clear(&self) { todo!() }
    pub fn set_quota(&self, quota: Quota) -> Result<(), AdmissionError> { todo!() }
    pub fn stats(&self) -> TenantStats { todo!() }
}

#[derive(Clone, Debug)]
pub struct AdmissionError { pub tenant: String, pub reserve_bytes: u64, pub available_bytes: u64 }

/// Plain counters and gauges; every field documented with unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    pub pages: u64, pub charged_bytes: u64, pub entitled_bytes: u64, pub original_bytes: u64, pub compressed_bytes: u64,
    pub same_filled_pages: u64, pub shared_pages: u64, pub puts: u64, pub puts_refused: u64, pub gets: u64, pub hits: u64,
    pub evictions: u64, pub flushed_pages: u64, pub hash_mismatches: u64,
}
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    pub size_bytes: u64, pub held_bytes: u64, pub payload_bytes: u64, pub metadata_bytes: u64, pub tenants: u64, pub pages: u64,
    pub original_bytes: u64, pub same_filled_pages: u64, pub shared_pages: u64, pub blobs: u64, pub evictions: u64,
}
