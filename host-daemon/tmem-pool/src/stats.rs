// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine says of itself: gauges are as of now, counters only grow.

use crate::config::Quota;

/// One tenant. Gauges count what the tenant can still get; `detached_pages` says what else it
/// occupies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    /// Gauge, pages: keys held.
    pub pages: u64,
    /// Gauge, bytes: what its quota is compared with: compressed size and metadata charge of each
    /// page, shared or not.
    pub charged_bytes: u64,
    /// Gauge, bytes: its entitlement in the pool as it is now.
    pub entitled_bytes: u64,
    /// Gauge, bytes: pages at 4,096 B.
    pub original_bytes: u64,
    /// Gauge, bytes: stored size of its pages, each counted in full even if shared; same-filled are
    /// 0.
    pub compressed_bytes: u64,
    /// Gauge, pages: kept as a pattern.
    pub same_filled_pages: u64,
    /// Gauge, pages: as they came, waiting for their final form.
    pub raw_pages: u64,
    /// Gauge, pages: found equal to one that was there when they were put. The other may have gone.
    pub shared_pages: u64,
    /// Counter, pages: put, stored or not.
    pub puts: u64,
    /// Counter, pages: put and refused.
    pub puts_refused: u64,
    /// Counter, pages: asked for.
    pub gets: u64,
    /// Counter, pages: returned.
    pub hits: u64,
    /// Counter, pages: evicted, for whatever reason.
    pub evictions: u64,
    /// Counter, pages: dropped by a flush, a pool's end or a clear.
    pub flushed_pages: u64,
    /// Counter, pages: not returned since the bytes failed their check. Must be 0.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that made room under the tenant's own limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` since the pool was made smaller than what it held.
    pub evictions_shrink: u64,
    /// Counter, pages: the part of `puts_refused` for which too many pages waited for their final form.
    pub refused_nursery: u64,
    /// Counter, pages: the part of `puts_refused` for which the pool had no room, nor made any in time.
    pub refused_pool: u64,
    /// Counter, pages: the part of `puts_refused` that did not fit under the tenant's own limit.
    pub refused_limit: u64,
    /// Counter, pages: the part of `puts_refused` for which there was no memory for the key, or the
    /// tenant had as many as it may.
    pub refused_keys: u64,
    /// Counter, pages: found to repeat four bytes, as their final form.
    pub settled_same_filled: u64,
    /// Counter, pages: found equal to one of the trust domain.
    pub settled_shared: u64,
    /// Counter, pages: compressed.
    pub settled_compressed: u64,
    /// Counter, pages: kept as they are, since they do not compress.
    pub settled_raw: u64,
    /// Counter, pages: put over a page that was held under the same key.
    pub replaced_pages: u64,
    /// Counter, pages: held under another cookie than the one asked for.
    pub cookie_mismatches: u64,
    /// Counter, pages, about: misses that would have been hits with so much more room, in the order
    /// of [`GAIN_PERCENT`](crate::GAIN_PERCENT).
    pub gain_hits: [u64; 3],
    /// Counter, pages, about: hits that would have been misses with so much less room than it used, in
    /// the order of [`LOSS_PERCENT`](crate::LOSS_PERCENT).
    pub loss_hits: [u64; 3],
    /// Counter, pages, about: hits that `loss_hits` was told from.
    pub loss_hits_seen: u64,
    /// Followed keys that requests passed, one by one, for the figures above: work, for those who bound it.
    pub gain_steps: u64,
    /// Gauge, pages: how many raw pages it may have.
    pub raw_pages_max: u64,
    /// Gauge, pages: dropped and not yet freed. They still occupy the pool.
    pub detached_pages: u64,
    /// Gauge: live pools.
    pub pools: u64,
    /// Gauge, bytes: quota.
    pub reserve_bytes: u64,
    /// Gauge, bytes: quota. None: no limit of its own.
    pub limit_bytes: Option<u64>,
    /// Gauge: quota.
    pub weight: u32,
}

/// The whole pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Gauge, bytes: what it may hold, metadata included.
    pub size_bytes: u64,
    /// Gauge, bytes: what it holds, detached pages included: `frames_bytes + metadata_bytes`.
    pub held_bytes: u64,
    /// Gauge, bytes: memory for stored contents, used or not.
    pub frames_bytes: u64,
    /// Gauge, bytes: stored contents, each copy once. Exact.
    pub payload_bytes: u64,
    /// Gauge, bytes: estimate of everything else, from above.
    pub metadata_bytes: u64,
    /// Gauge, bytes: the part of it that stays as large as it ever was: tables of stored copies.
    pub tables_bytes: u64,
    /// Gauge: live tenants.
    pub tenants: u64,
    /// Gauge, pages: keys held by live tenants.
    pub pages: u64,
    /// Gauge, bytes: pages at 4,096 B.
    pub original_bytes: u64,
    /// Gauge, pages: kept as a pattern.
    pub same_filled_pages: u64,
    /// Gauge, pages: as they came, waiting for their final form.
    pub raw_pages: u64,
    /// Gauge, pages: keys, detached ones included, that need no blob of their own since others have
    /// the same.
    pub shared_pages: u64,
    /// Gauge: stored copies.
    pub blobs: u64,
    /// Counter, pages: evicted, of all tenants, departed ones included. So are the counters below.
    pub evictions: u64,
    /// Gauge, bytes: what all tenants are charged.
    pub charged_bytes: u64,
    /// Gauge, bytes: sum of all reserves, as far as limits leave them usable.
    pub reserved_bytes: u64,
    /// Gauge, bytes: stored size of all pages, each counted in full even if shared.
    pub compressed_bytes: u64,
    /// Gauge, pages: dropped and not yet freed, departed tenants' included.
    pub detached_pages: u64,
    /// Gauge: tenants that left and whose pages are not all freed yet.
    pub departed_tenants: u64,
    /// Counter, pages: put, stored or not.
    pub puts: u64,
    /// Counter, pages: put and refused.
    pub puts_refused: u64,
    /// Counter, pages: asked for.
    pub gets: u64,
    /// Counter, pages: returned.
    pub hits: u64,
    /// Counter, pages: dropped by a flush, a pool's end or a clear.
    pub flushed_pages: u64,
    /// Counter, pages: not returned since the bytes failed their check. Must be 0.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that made room under a tenant's own limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` since the pool was made smaller than what it held.
    pub evictions_shrink: u64,
    /// Counter: stored copies that were moved so that memory between them could be given back.
    pub moved_blobs: u64,
    /// Counter: stored copies that were compressed anew, since they were cold.
    pub denser_blobs: u64,
    /// Counter, bytes: by how much these became smaller.
    pub denser_saved_bytes: u64,
    /// Gauge, bytes: by how much stored copies are smaller than when they were first compressed.
    pub dense_gain_bytes: u64,
}

/// A tenant's counters, as kept under its lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub puts: u64,
    pub puts_refused: u64,
    pub gets: u64,
    pub hits: u64,
    pub evictions: u64,
    pub evictions_limit: u64,
    pub flushed_pages: u64,
    pub replaced_pages: u64,
    pub cookie_mismatches: u64,
    pub hash_mismatches: u64,
    pub evictions_shrink: u64,
    pub refused_nursery: u64,
    pub refused_pool: u64,
    pub refused_limit: u64,
    pub refused_keys: u64,
    pub settled_same_filled: u64,
    pub settled_shared: u64,
    pub settled_compressed: u64,
    pub settled_raw: u64,
}

impl TenantStats {
    pub(crate) fn set_quota(&mut self, quota: Quota) {
        self.reserve_bytes = quota.reserve_bytes;
        self.limit_bytes = quota.limit_bytes;
        self.weight = quota.weight;
    }
}

impl PoolStats {
    pub(crate) fn add_counters(&mut self, counters: Counters) {
        self.puts += counters.puts;
        self.puts_refused += counters.puts_refused;
        self.gets += counters.gets;
        self.hits += counters.hits;
        self.evictions += counters.evictions;
        self.flushed_pages += counters.flushed_pages;
        self.hash_mismatches += counters.hash_mismatches;
        self.evictions_limit += counters.evictions_limit;
        self.evictions_shrink += counters.evictions_shrink;
    }
}

impl Counters {
    /// Keeps a departed tenant's in the pool's sums.
    pub(crate) fn add(&mut self, other: Counters) {
        self.puts += other.puts;
        self.puts_refused += other.puts_refused;
        self.gets += other.gets;
        self.hits += other.hits;
        self.evictions += other.evictions;
        self.evictions_limit += other.evictions_limit;
        self.flushed_pages += other.flushed_pages;
        self.replaced_pages += other.replaced_pages;
        self.cookie_mismatches += other.cookie_mismatches;
        self.hash_mismatches += other.hash_mismatches;
        self.evictions_shrink += other.evictions_shrink;
        self.refused_nursery += other.refused_nursery;
        self.refused_pool += other.refused_pool;
        self.refused_limit += other.refused_limit;
        self.refused_keys += other.refused_keys;
        self.settled_same_filled += other.settled_same_filled;
        self.settled_shared += other.settled_shared;
        self.settled_compressed += other.settled_compressed;
        self.settled_raw += other.settled_raw;
    }
}
