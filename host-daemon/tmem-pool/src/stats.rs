// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics of the engine. A gauge is a current value. A counter only grows.

use crate::config::Quota;

/// Statistics of one tenant. Gauges count only pages that the tenant can still get, except for
/// `detached_pages`, which counts dropped pages that still occupy memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantStats {
    /// Gauge, pages: pages that the tenant holds and can still get.
    pub pages: u64,
    /// Gauge, bytes: the tenant's charge, which is compared with the limit. It is the sum over all
    /// pages of the compressed size and the metadata charge, whether a page is shared or not.
    pub charged_bytes: u64,
    /// Gauge, bytes: entitlement, the bytes of the pool at its present size that the tenant can
    /// count on.
    pub entitled_bytes: u64,
    /// Gauge, bytes: uncompressed size of the tenant's pages, 4,096 B each.
    pub original_bytes: u64,
    /// Gauge, bytes: stored size of the tenant's pages. A page counts in full even if other pages
    /// share its stored bytes. A same-filled page counts 0.
    pub compressed_bytes: u64,
    /// Gauge, pages: the tenant's same-filled pages. Such a page repeats one 4-byte value, and only
    /// the value is stored.
    pub same_filled_pages: u64,
    /// Gauge, pages: the tenant's pages in the nursery: stored uncompressed, and not finalized
    /// (deduplicated and compressed) yet.
    pub nursery_pages: u64,
    /// Gauge, pages: the tenant's pages that were equal to an already stored page when they were
    /// finalized. That page may have been removed in the meantime.
    pub shared_pages: u64,
    /// Gauge, pages: retained pages, a part of `pages`. A get returned such a page and left it in
    /// the pool, and the guest has not sent a reference (REF) to it since.
    pub retained_pages: u64,
    /// Counter, pages: pages in put requests, whether they were stored or refused.
    pub puts: u64,
    /// Counter, pages: pages in put requests that were refused, for any reason. It includes pages
    /// that a [`PageSource`](crate::PageSource) could not copy, which have no counter of their own.
    pub puts_refused: u64,
    /// Counter, pages: pages that were requested by get requests.
    pub gets: u64,
    /// Counter, pages: pages that were returned by get requests.
    pub hits: u64,
    /// Counter, pages: the part of `hits` whose page stayed in the pool as a retained page.
    pub retained_hits: u64,
    /// Counter, pages: pages of reference requests (REF). The guest sends a reference instead of a
    /// copy when it evicts a retained page unchanged.
    pub refs: u64,
    /// Counter, pages: the part of `refs` whose page the pool no longer had.
    pub refs_gone: u64,
    /// Counter, pages: pages that were evicted, for any reason. Pages that an operator drops do not
    /// count.
    pub evictions: u64,
    /// Counter, pages: pages dropped by a flush, at the end of their pool, by a clear of the tenant,
    /// by an operator, or because the caller could not keep the page of a reference (`drop_refs`).
    pub flushed_pages: u64,
    /// Counter, pages: pages that a get did not return because their bytes did not match their
    /// hash. Any value above 0 means faulty memory or a bug.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that happened because the tenant reached its own
    /// limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was full or nearly full.
    pub evictions_pool: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was shrunk and
    /// exceeded its new size.
    pub evictions_shrink: u64,
    /// Counter, pages: the part of `evictions` that removed retained pages, which a get had
    /// returned and left in the pool.
    pub evictions_retained: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because too many pages of the
    /// tenant waited to be finalized (deduplicated and compressed).
    pub refused_nursery: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because the pool was full and
    /// could not free memory in a bounded number of steps.
    pub refused_pool: u64,
    /// Counter, pages: the part of `puts_refused` that did not fit under the tenant's own limit.
    pub refused_limit: u64,
    /// Counter, pages: the part of `puts_refused` that was refused because the system had no memory
    /// for the key, or because the tenant had its largest number of keys.
    pub refused_keys: u64,
    /// Counter, pages: new pages that were finalized as a pattern, because they repeat four bytes.
    pub finalized_same_filled: u64,
    /// Counter, pages: new pages that were finalized by sharing the stored bytes of an equal page
    /// of the trust domain.
    pub finalized_shared: u64,
    /// Counter, pages: new pages that were finalized by compressing them.
    pub finalized_compressed: u64,
    /// Counter, pages: new pages that stay stored uncompressed, because they do not compress.
    pub finalized_raw: u64,
    /// Counter, pages: older pages that were dropped because a put had a newer page with the same
    /// key.
    pub replaced_pages: u64,
    /// Counter, pages: pages of get requests for which the pool had a page with another cookie.
    pub cookie_mismatches: u64,
    /// Counter, pages, approximate: misses that would have been hits with more memory than the
    /// tenant used, one counter for each percentage of
    /// [`GAIN_PERCENT`](tmem_trace::estimate::GAIN_PERCENT).
    pub gain_hits: [u64; 3],
    /// Counter, pages, approximate: hits that would have been misses with less memory than the
    /// tenant used, one counter for each percentage of
    /// [`LOSS_PERCENT`](tmem_trace::estimate::LOSS_PERCENT).
    pub loss_hits: [u64; 3],
    /// Counter, pages, approximate: estimated number of all hits, extrapolated from the hits that
    /// the estimator examined for `loss_hits`. A value of `loss_hits` divided by this number is the
    /// share of hits that would be lost with less memory.
    pub loss_hits_seen: u64,
    /// Counter, keys: number of times that a request visited a sampled key for the
    /// estimates `gain_hits` and `loss_hits`. It measures work, for callers that bound their work.
    pub gain_steps: u64,
    /// Gauge, pages: largest number of pages that the tenant may have in the nursery. Further puts
    /// are refused.
    pub nursery_pages_max: u64,
    /// Gauge, pages: detached pages. They were dropped with their object or pool, and their memory
    /// is not freed yet.
    pub detached_pages: u64,
    /// Gauge, pools: live pools of the tenant.
    pub pools: u64,
    /// Gauge, bytes: reserve of the tenant's quota.
    pub reserve_bytes: u64,
    /// Gauge, bytes: limit of the tenant's quota. With None, the tenant has no limit of its own.
    pub limit_bytes: Option<u64>,
    /// Gauge, without unit: weight of the tenant's quota.
    pub weight: u32,
}

/// Statistics of an engine and of its pool, the memory for all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Gauge, bytes: memory that the pool may hold, metadata included.
    pub size_bytes: u64,
    /// Gauge, bytes: memory that the pool holds, including dropped pages that are not freed yet. It
    /// is the sum of `frames_bytes` and `metadata_bytes`.
    pub held_bytes: u64,
    /// Gauge, bytes: memory for stored pages, including its unused parts.
    pub frames_bytes: u64,
    /// Gauge, bytes: exact size of the stored pages, where bytes that several pages share count
    /// once.
    pub payload_bytes: u64,
    /// Gauge, bytes: upper estimate of the memory for everything except stored pages.
    pub metadata_bytes: u64,
    /// Gauge, bytes: the part of `metadata_bytes` that never shrinks. It consists of the heap's
    /// records of stored copies and of spans (groups of memory frames), and of the numbers of free
    /// records.
    pub tables_bytes: u64,
    /// Gauge, tenants: tenants that were added and not removed.
    pub tenants: u64,
    /// Gauge, pages: pages of all live tenants. Equal pages count separately.
    pub pages: u64,
    /// Gauge, bytes: uncompressed size of all tenants' pages, 4,096 B each.
    pub original_bytes: u64,
    /// Gauge, pages: same-filled pages. Such a page repeats one 4-byte value, and only the value is
    /// stored.
    pub same_filled_pages: u64,
    /// Gauge, pages: pages in the nursery: stored uncompressed, and not finalized (deduplicated and
    /// compressed) yet.
    pub nursery_pages: u64,
    /// Gauge, pages: retained pages, a part of `pages`. A get returned such a page and left it in
    /// the pool, and the guest has not sent a reference (REF) to it since.
    pub retained_pages: u64,
    /// Gauge, pages: pages that need no stored copy of their own, because they share that of an
    /// equal page. It includes dropped pages that are not freed yet.
    pub shared_pages: u64,
    /// Gauge, blobs: stored copies. Several equal pages may share one copy.
    pub blobs: u64,
    /// Counter, pages: evicted pages of all tenants. This counter and all following counters
    /// include departed tenants.
    pub evictions: u64,
    /// Gauge, bytes: sum of the charges of all tenants.
    pub charged_bytes: u64,
    /// Gauge, bytes: sum of all reserves, each at most as large as the tenant's limit.
    pub reserved_bytes: u64,
    /// Gauge, bytes: stored size of all tenants' pages. A page counts in full even if other pages
    /// share its stored bytes.
    pub compressed_bytes: u64,
    /// Gauge, pages: dropped pages whose memory is not freed yet, including pages of removed
    /// tenants.
    pub detached_pages: u64,
    /// Gauge, tenants: tenants that were removed and whose pages are not all freed yet.
    pub removed_tenants: u64,
    /// Counter, pages: pages in put requests, whether they were stored or refused.
    pub puts: u64,
    /// Counter, pages: pages in put requests that were refused, for any reason.
    pub puts_refused: u64,
    /// Counter, pages: pages that were requested by get requests.
    pub gets: u64,
    /// Counter, pages: pages that were returned by get requests.
    pub hits: u64,
    /// Counter, pages: the part of `hits` whose page stayed in the pool as a retained page.
    pub retained_hits: u64,
    /// Counter, pages: pages of reference requests (REF). A guest sends a reference instead of a
    /// copy when it evicts a retained page unchanged.
    pub refs: u64,
    /// Counter, pages: the part of `refs` whose page the pool no longer had.
    pub refs_gone: u64,
    /// Counter, pages: pages dropped by a flush, at the end of their pool, by a clear of the tenant,
    /// by an operator, or because the caller could not keep the page of a reference (`drop_refs`).
    pub flushed_pages: u64,
    /// Counter, pages: pages that a get did not return because their bytes did not match their
    /// hash. Any value above 0 means faulty memory or a bug.
    pub hash_mismatches: u64,
    /// Counter, pages: the part of `evictions` that removed retained pages, which a get had
    /// returned and left in the pool.
    pub evictions_retained: u64,
    /// Counter, pages: the part of `evictions` that happened because a tenant reached its own
    /// limit.
    pub evictions_limit: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was full or nearly full.
    pub evictions_pool: u64,
    /// Counter, pages: the part of `evictions` that happened because the pool was shrunk and
    /// exceeded its new size.
    pub evictions_shrink: u64,
    /// Counter, blobs: stored copies that compaction moved, so that unused memory between them
    /// could go back to the system.
    pub moved_blobs: u64,
    /// Counter, blobs: stored copies that were compressed again with zstd because they were cold.
    pub recompressed_blobs: u64,
    /// Counter, bytes: bytes that were saved by compressing cold stored copies again with zstd.
    pub recompressed_saved_bytes: u64,
    /// Gauge, bytes: difference between the first compressed size and the present size, summed over
    /// all present stored copies.
    pub zstd_saved_bytes: u64,
}

/// Counters of one tenant, which the tenant's lock guards.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub puts: u64,
    pub puts_refused: u64,
    pub gets: u64,
    pub hits: u64,
    pub retained_hits: u64,
    pub refs: u64,
    pub refs_gone: u64,
    pub evictions: u64,
    pub evictions_limit: u64,
    pub evictions_pool: u64,
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
        self.retained_hits += counters.retained_hits;
        self.refs += counters.refs;
        self.refs_gone += counters.refs_gone;
        self.evictions_retained += counters.evictions_retained;
        self.evictions += counters.evictions;
        self.flushed_pages += counters.flushed_pages;
        self.hash_mismatches += counters.hash_mismatches;
        self.evictions_limit += counters.evictions_limit;
        self.evictions_pool += counters.evictions_pool;
        self.evictions_shrink += counters.evictions_shrink;
    }
}

impl Counters {
    /// Adds the counters of a removed tenant to these sums, which include all removed tenants.
    pub(crate) fn add(&mut self, other: Counters) {
        self.puts += other.puts;
        self.puts_refused += other.puts_refused;
        self.gets += other.gets;
        self.hits += other.hits;
        self.retained_hits += other.retained_hits;
        self.refs += other.refs;
        self.refs_gone += other.refs_gone;
        self.evictions += other.evictions;
        self.evictions_limit += other.evictions_limit;
        self.evictions_pool += other.evictions_pool;
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
