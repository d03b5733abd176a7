// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes, limits and estimates of the engine, each with its reason, and what a caller configures.
//!
//! The metadata estimates are upper bounds from the layouts that they name, so that what a tenant
//! is charged is never less than what it makes the host hold.

use std::mem::size_of;

/// Bytes of a page. The device knows no other size.
pub const PAGE_SIZE: usize = 4096;

/// One page of a guest.
pub type Page = [u8; PAGE_SIZE];

/// Pools of one tenant. The wire's VIRTIO_TMEM_POOLS_MAX: a guest has a pool per file system.
pub const POOLS_PER_TENANT_MAX: usize = 256;

/// Keys of one tenant, live and not yet freed. 2^26 pages are 256 GiB, more than the file cache of
/// any guest that shrinks; it bounds what same-filled pages, which have no payload, can make the
/// host hold.
pub const KEYS_PER_TENANT_MAX: u64 = 1 << 26;

/// Pages of a put that are compressed before the tenant's lock is taken once for all of them. Few,
/// so that what is prepared but not yet stored stays small; more than one, so that the lock is
/// cheap.
pub(crate) const PUT_GROUP_PAGES: usize = 8;

/// Pages that a put may evict, per page that it brings: a new page needs at most a page and its
/// metadata, which is what eight same-filled pages are charged, and half of what goes may be
/// shared.
pub(crate) const EVICTIONS_PER_PUT_PAGE: usize = 16;

/// Pages freed or evicted under one hold of a tenant's lock: about 10 µs.
pub(crate) const EVICT_STEP_PAGES: usize = 16;

/// Queue positions of pages that are gone already which one search for a victim may skip.
pub(crate) const STALE_SKIPS_MAX: usize = 256;

/// A dedup shard is meant for so many bytes of pool, so that growing its table stays below a
/// millisecond (at the usual 2:1 that is 32,768 blobs).
pub(crate) const POOL_BYTES_PER_DEDUP_SHARD: u64 = 64 << 20;

/// Dedup shards; beyond it (64 GiB of pool) a shard only gets longer.
pub(crate) const DEDUP_SHARDS_MAX: usize = 1024;

/// A key entry: index and entry (48 B) in a B-tree whose nodes may be 5/11 full, or in a short
/// vector that may be half full, with its share of the inner nodes.
pub(crate) const KEY_METADATA_BYTES: u64 = 144;

/// A position in the eviction queue: 32 B in a B-tree that may be 5/11 full.
pub(crate) const QUEUE_METADATA_BYTES: u64 = 80;

/// An object: id, gauges and the head of its pages (64 B) in a B-tree, and its allocation.
pub(crate) const OBJECT_METADATA_BYTES: u64 = 176;

/// A blob's record with its reference counts (64 B), and what the heap adds to two allocations.
pub(crate) const BLOB_METADATA_BYTES: u64 = 96;

/// A slot in the dedup table, the share of empty ones included.
pub(crate) const DEDUP_SLOT_BYTES: u64 = 80;

/// A pool of a tenant, with the first nodes of its trees.
pub(crate) const POOL_METADATA_BYTES: u64 = 1024;

/// A tenant, with its record, names and the first nodes of its trees.
pub(crate) const TENANT_METADATA_BYTES: u64 = 4096;

/// What each page is charged beside its compressed size: all that one page in an object of its own,
/// with a blob of its own, makes the host hold. Most pages cost half of it; charging less would let
/// a tenant of one-page objects hold more than its share of the pool.
pub const PAGE_METADATA_CHARGE_BYTES: u64 = KEY_METADATA_BYTES
    + QUEUE_METADATA_BYTES
    + OBJECT_METADATA_BYTES
    + BLOB_METADATA_BYTES
    + DEDUP_SLOT_BYTES;

/// Monotonic time in nanoseconds, passed in by the caller so that a simulator owns it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

/// What a pool is made with.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Memory the pool may hold, metadata included.
    pub size_bytes: u64,
    /// Seeds the content hash; random per process in production, fixed in tests.
    pub seed: u64,
}

/// How much of the pool a tenant is entitled to. Pages are charged their compressed size at first
/// compression plus [`PAGE_METADATA_CHARGE_BYTES`], shared or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Entitled to this before the rest is divided. What exceeds `limit_bytes` counts for nothing.
    pub reserve_bytes: u64,
    /// Never charged more than this. None: the pool's size is the only limit.
    pub limit_bytes: Option<u64>,
    /// Share of what no one has reserved, against the other tenants' weights. 0: none of it.
    pub weight: u32,
}

/// Who a tenant is and what it may use.
#[derive(Clone, Debug)]
pub struct TenantSpec {
    /// For messages and statistics only.
    pub name: String,
    /// Tenants of equal Some(domain) share equal pages; None is a domain of its own.
    pub trust_domain: Option<String>,
    /// Its part of the pool.
    pub quota: Quota,
}

const _: () = assert!(
    size_of::<usize>() == 8,
    "the engine's estimates are those of 64-bit hosts"
);
