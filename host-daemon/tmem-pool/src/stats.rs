// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics of the engine. Gauges are current values, and counters only grow.

use crate::config::Quota;

/// Statistics of one tenant. Gauges count only pages that the tenant can still get, except for
/// `detached_pages`, which counts its other pages that still occupy memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantStats {
    /// Gauge, pages: pages that the tenant holds and can still get.
    pub pages: u64,
    /// Gauge, bytes: the charge, which is compared with the quota. It is the sum of each page's
    /// compressed size and metadata charge, whether the page is shared or not.
    pub charged_bytes: u64,
    /// Gauge, bytes: entitlement of the tenant in the pool at its present size.
    pub entitled_bytes: u64,
    /// Gauge, bytes: uncompressed size of the held pages, 4,096 B each.
    pub original_bytes: u64,
    /// Gauge, bytes: stored size of the tenant's pages, each counted in full even if it is shared;
    /// same-filled pages count 0.
    pub compressed_bytes: u64,
    /// Gauge, pages: held pages that repeat one 4-byte value, of which only the value is stored.
    pub same_filled_pages: u64,
    /// Gauge, pages: held pages that are stored uncompressed and wait for their final form.
    pub raw_pages: u64,
    /// Gauge, pages: held pages that were equal to an already stored page when they were finalized.
    /// The other page may have been removed in the meantime.
    pub shared_pages: u64,
    /// Gauge, pages: the part of `pages` that a get returned and left in the pool, and that the
    /// guest has not referred to since.
    pub retained_pages: u64,
    /// Counter, pages: pages in put requests, whether they were stored or refused.
    pub puts: u64,
    /// Counter, pages: pages in put requests that were refused, for any reason.
    pub puts_refused: u64,
    /// Counter, pages: pages that get requests named.
    pub gets: u64,
    /// Counter, pages: pages that gets returned.
    pub hits: u64,
    /// Counter, pages: the part of `hits` that left the page in the pool.
    pub retains: u64,
    /// Counter, pages: references (REF), which the guest sends instead of a copy when it evicts a
    /// retained page.
    pub refs: u64,
    /// Counter, pages: the part of `refs` for which the pool still had the page.
    pub refs_held: u64,
    /// Counter, pages: pages that were evicted, for any reason.
    pub evictions: u64,
    /// Counter, pages: pages that were dropped by a flush, by the end of their pool or by a clear
    /// of the tenant.
    pub flushed_pages: u64,
    /// Counter, pages: pages that a get did not return because their bytes did not match their
    /// hash. It must be 0.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that happened because the tenant reached its own
    /// limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was shrunk below what
    /// it held.
    pub evictions_shrink: u64,
    /// Counter, pages: the part of `evictions` that removed retained pages.
    pub evictions_retained: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because too many pages waited
    /// for their final form.
    pub refused_nursery: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because the pool had no room and
    /// could not free any in time.
    pub refused_pool: u64,
    /// Counter, pages: the part of `puts_refused` that did not fit under the tenant's own limit.
    pub refused_limit: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because there was no memory for
    /// the key, or the tenant had the largest allowed number of keys.
    pub refused_keys: u64,
    /// Counter, pages: pages that were finalized as a pattern of four repeated bytes.
    pub finalized_same_filled: u64,
    /// Counter, pages: pages that were finalized as a reference to an equal page of the trust
    /// domain.
    pub finalized_shared: u64,
    /// Counter, pages: pages that were finalized in compressed form.
    pub finalized_compressed: u64,
    /// Counter, pages: pages that were finalized uncompressed, because they do not compress.
    pub finalized_raw: u64,
    /// Counter, pages: stored pages that replaced a page under the same key.
    pub replaced_pages: u64,
    /// Counter, pages: requested pages that were held under another cookie than the requested one.
    pub cookie_mismatches: u64,
    /// Counter, pages, approximate: misses that would have been hits with more memory, one counter
    /// for each percentage of [`GAIN_PERCENT`](tmem_trace::estimate::GAIN_PERCENT).
    pub gain_hits: [u64; 3],
    /// Counter, pages, approximate: hits that would have been misses with less memory than the
    /// tenant used, one counter for each percentage of
    /// [`LOSS_PERCENT`](tmem_trace::estimate::LOSS_PERCENT).
    pub loss_hits: [u64; 3],
    /// Counter, pages, approximate: hits from which `loss_hits` is estimated.
    pub loss_hits_seen: u64,
    /// Counter, keys: followed keys that requests walked over for the estimates `gain_hits` and
    /// `loss_hits`. It measures work, for callers that bound their work.
    pub gain_steps: u64,
    /// Gauge, pages: largest number of raw pages that the tenant may have.
    pub raw_pages_max: u64,
    /// Gauge, pages: dropped pages whose memory is not freed yet. They still occupy memory of the
    /// pool.
    pub detached_pages: u64,
    /// Gauge, pools: live pools of the tenant.
    pub pools: u64,
    /// Gauge, bytes: reserve of the quota.
    pub reserve_bytes: u64,
    /// Gauge, bytes: limit of the quota. With None, the tenant has no limit of its own.
    pub limit_bytes: Option<u64>,
    /// Gauge, without unit: weight of the quota.
    pub weight: u32,
}

/// Statistics of an engine and of its pool, the memory for all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Gauge, bytes: memory that the pool may hold, metadata included.
    pub size_bytes: u64,
    /// Gauge, bytes: memory that the pool holds, detached pages included: `frames_bytes +
    /// metadata_bytes`.
    pub held_bytes: u64,
    /// Gauge, bytes: memory for stored contents, including its unused parts.
    pub frames_bytes: u64,
    /// Gauge, bytes: exact size of the stored contents, each copy counted once.
    pub payload_bytes: u64,
    /// Gauge, bytes: upper estimate of the memory for everything except stored contents.
    pub metadata_bytes: u64,
    /// Gauge, bytes: the part of `metadata_bytes` that never shrinks: tables of stored copies.
    pub tables_bytes: u64,
    /// Gauge, tenants: live tenants.
    pub tenants: u64,
    /// Gauge, pages: keys held by live tenants.
    pub pages: u64,
    /// Gauge, bytes: uncompressed size of the held pages, 4,096 B each.
    pub original_bytes: u64,
    /// Gauge, pages: held pages that repeat one 4-byte value, of which only the value is stored.
    pub same_filled_pages: u64,
    /// Gauge, pages: held pages that are stored uncompressed and wait for their final form.
    pub raw_pages: u64,
    /// Gauge, pages: the part of `pages` that a get returned and left in the pool, and that no guest
    /// has referred to since.
    pub retained_pages: u64,
    /// Gauge, pages: keys, including detached ones, that need no blob of their own because another
    /// key has an equal page.
    pub shared_pages: u64,
    /// Gauge, blobs: stored copies.
    pub blobs: u64,
    /// Counter, pages: evicted pages of all tenants. This counter and all following counters
    /// include departed tenants.
    pub evictions: u64,
    /// Gauge, bytes: sum of the charges of all tenants.
    pub charged_bytes: u64,
    /// Gauge, bytes: sum of all reserves, each at most as large as the tenant's limit.
    pub reserved_bytes: u64,
    /// Gauge, bytes: stored size of all pages, each counted in full even if it is shared.
    pub compressed_bytes: u64,
    /// Gauge, pages: dropped pages whose memory is not freed yet, including those of departed
    /// tenants.
    pub detached_pages: u64,
    /// Gauge, tenants: tenants that were removed and whose pages are not all freed yet.
    pub departed_tenants: u64,
    /// Counter, pages: pages in put requests, whether they were stored or refused.
    pub puts: u64,
    /// Counter, pages: pages in put requests that were refused, for any reason.
    pub puts_refused: u64,
    /// Counter, pages: pages that get requests named.
    pub gets: u64,
    /// Counter, pages: pages that gets returned.
    pub hits: u64,
    /// Counter, pages: the part of `hits` that left the page in the pool.
    pub retains: u64,
    /// Counter, pages: references (REF), which a guest sends instead of a copy when it evicts a
    /// retained page.
    pub refs: u64,
    /// Counter, pages: the part of `refs` for which the pool still had the page.
    pub refs_held: u64,
    /// Counter, pages: pages that were dropped by a flush, by the end of their pool or by a clear
    /// of the tenant.
    pub flushed_pages: u64,
    /// Counter, pages: pages that a get did not return because their bytes did not match their
    /// hash. It must be 0.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that removed retained pages.
    pub evictions_retained: u64,
    /// Counter, pages: the part of `evictions` that happened because a tenant reached its own
    /// limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was shrunk below what
    /// it held.
    pub evictions_shrink: u64,
    /// Counter, blobs: stored copies that compaction moved, so that unused memory between them
    /// could be returned to the system.
    pub moved_blobs: u64,
    /// Counter, blobs: stored copies that were compressed again because they were cold.
    pub denser_blobs: u64,
    /// Counter, bytes: bytes that were saved by compressing cold stored copies again.
    pub denser_saved_bytes: u64,
    /// Gauge, bytes: number of bytes by which all present stored copies together are smaller than
    /// when they were first compressed.
    pub dense_gain_bytes: u64,
}

/// A tenant's counters, as kept under its lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub puts: u64,
    pub puts_refused: u64,
    pub gets: u64,
    pub hits: u64,
    pub retains: u64,
    pub refs: u64,
    pub refs_held: u64,
    pub evictions: u64,
    pub evictions_limit: u64,
    pub evictions_retained: u64,
    pub flushed_pages: u64,
    pub replaced_pages: u64,
    pub cookie_mismatches: u64,
    pub hash_mismatches: u64,
    pub evictions_shrink: u64,
    pub refused_nursery: u64,
    pub refused_pool: u64,
    pub refused_limit: u64,
    pub refused_keys: u64,
    pub finalized_same_filled: u64,
    pub finalized_shared: u64,
    pub finalized_compressed: u64,
    pub finalized_raw: u64,
}

impl TenantStats {
    pub(crate) fn set_quota(&mut self, quota: Quota) {
        self.reserve_bytes = quota.reserve_bytes;
        self.limit_bytes = quota.limit_bytes;
        self.weight = quota.weight;
    }
}

impl EngineStats {
    pub(crate) fn add_counters(&mut self, counters: Counters) {
        self.puts += counters.puts;
        self.puts_refused += counters.puts_refused;
        self.gets += counters.gets;
        self.hits += counters.hits;
        self.retains += counters.retains;
        self.refs += counters.refs;
        self.refs_held += counters.refs_held;
        self.evictions_retained += counters.evictions_retained;
        self.evictions += counters.evictions;
        self.flushed_pages += counters.flushed_pages;
        self.hash_mismatches += counters.hash_mismatches;
        self.evictions_limit += counters.evictions_limit;
        self.evictions_shrink += counters.evictions_shrink;
    }
}

impl Counters {
    /// Adds the counters of a departed tenant to the pool's sums.
    pub(crate) fn add(&mut self, other: Counters) {
        self.puts += other.puts;
        self.puts_refused += other.puts_refused;
        self.gets += other.gets;
        self.hits += other.hits;
        self.retains += other.retains;
        self.refs += other.refs;
        self.refs_held += other.refs_held;
        self.evictions += other.evictions;
        self.evictions_limit += other.evictions_limit;
        self.evictions_retained += other.evictions_retained;
        self.flushed_pages += other.flushed_pages;
        self.replaced_pages += other.replaced_pages;
        self.cookie_mismatches += other.cookie_mismatches;
        self.hash_mismatches += other.hash_mismatches;
        self.evictions_shrink += other.evictions_shrink;
        self.refused_nursery += other.refused_nursery;
        self.refused_pool += other.refused_pool;
        self.refused_limit += other.refused_limit;
        self.refused_keys += other.refused_keys;
        self.finalized_same_filled += other.finalized_same_filled;
        self.finalized_shared += other.finalized_shared;
        self.finalized_compressed += other.finalized_compressed;
        self.finalized_raw += other.finalized_raw;
    }
}
