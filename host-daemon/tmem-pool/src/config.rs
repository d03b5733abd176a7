// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and limits of the engine, each with its reason, and the configuration that a caller passes
//! to the engine.

/// Bytes of a page. The virtio-tmem device knows no other page size.
pub const PAGE_SIZE: usize = 4096;

/// Contents of one page of a guest.
pub type Page = [u8; PAGE_SIZE];

/// Largest number of pools of one tenant, which is VIRTIO_TMEM_POOLS_MAX of the protocol. A guest
/// has a pool for each file system.
pub const POOLS_PER_TENANT_MAX: usize = 256;

/// Largest number of keys of one tenant. Keys of dropped pages count until they are freed. 2^26
/// pages are 256 GiB, which is more than any guest is expected to reclaim from its file cache. The
/// limit bounds the host memory for keys of same-filled pages, which have no stored bytes.
pub const KEYS_PER_TENANT_MAX: u32 = 1 << 26;

/// Smallest number of raw pages that a tenant may have whatever its charge is. Raw pages are stored
/// uncompressed until a background worker finalizes them. The number suffices for four put requests
/// of the largest size, 64 pages.
pub(crate) const RAW_PAGES_MIN: u32 = 256;

/// Largest number of raw pages that a tenant may have whatever its charge is: 8 MiB of pages, which
/// one core compresses in about 10 ms.
pub(crate) const RAW_PAGES_MAX: u32 = 2048;

/// Divisor for the number of raw pages that a tenant may have whatever its charge is. The number is
/// the tenant's entitlement in pages, divided by this constant, but at least RAW_PAGES_MIN and at
/// most RAW_PAGES_MAX. So it depends on quotas only, not on the load of other tenants. Further raw
/// pages must fit into the rest of the tenant's entitlement or into free memory of the pool.
pub(crate) const RAW_DIVISOR: u64 = 16;

/// Largest number of entries that one step removes from a tenant's queue of raw pages because their
/// pages are gone or finalized. The step holds the tenant's lock, and looking up an entry takes up
/// to 100 ns.
pub(crate) const STALE_RAW_MAX: usize = 128;

/// Number of raw pages that a background worker finalizes (deduplicates and compresses) for one
/// tenant before it turns to the next tenant. The number is small because the next tenant waits,
/// and larger than 1 so that the pages share the cost of taking the tenant's lock.
pub(crate) const FINALIZE_PAGES: usize = 8;

/// Divisor for the margin of retained pages, which a get returned and left in the pool. An eviction
/// sets a bound: the tenant's charge at that time minus the margin, which is the charge divided by
/// this number. Gets retain pages only while the charge is at most the bound. Evicting a retained
/// page may cost the guest a read of its disk, because the guest sends no copy of such a page. The
/// margin makes room for the changes of the charge in a busy guest.
pub(crate) const RETAIN_MARGIN_DIVISOR: u64 = 16;

/// Shift for the growth of the bound up to which a tenant's charge allows retained pages, which a
/// get returned and left in the pool. Each page that a get does not retain because of the bound
/// raises the bound by the charge, shifted right by this number of bits, once the evicted pages are
/// paid for (`RETAIN_PAY_PAGES`). After 4,096 such pages, the bound has risen by a sixteenth of the
/// charge, which is the margin. The pool may then evict retained pages again.
pub(crate) const RETAIN_GROWTH_SHIFT: u32 = 16;

/// Divisor for the part of a tenant's charge by which it exceeds the bound when the bound of an old
/// eviction ends. The charge is then a quarter larger than at the last eviction, so the pool has room
/// that it did not have at that time. The next eviction sets a bound again. Without this rule, the
/// bound would reach a much larger charge after up to 65,536 pages.
pub(crate) const RETAIN_GROWN_DIVISOR: u64 = 4;

/// Number of pages that gets must not retain, for each page that the pool evicted, before the bound
/// of the charge may rise again. A retained page more can fill the pool, which then evicts a 64th of
/// its pages at a time. Each of them may cost the guest a read of its disk. With this number, tries
/// to retain more pages cost a read for one page in a thousand.
pub(crate) const RETAIN_PAY_PAGES: u64 = 1024;

/// Maximum number of pages that gets must not retain before the bound may rise again, for each page
/// that the tenant has. It pays for a 64th of them. A tenant whose pool was once made much smaller
/// retains more pages after it has read each of its pages this many times.
pub(crate) const RETAIN_PAY_ROUNDS: u64 = 16;

/// Number of pages that a put copies before it takes the tenant's lock. The put takes the lock once
/// for all these pages.
pub(crate) const PUT_GROUP_PAGES: usize = 64;

/// Largest number of steps that a put may take, for each of its pages, to free memory. A step
/// evicts a page, frees a page that was dropped earlier, or moves a blob. The number suffices to
/// keep a tenant within its limit, because a raw page is charged as much as 14 same-filled pages
/// (state.rs asserts that). It may not suffice to free memory of the pool, because evicting a
/// shared or same-filled page frees no stored bytes. The put is then refused.
pub(crate) const EVICTIONS_PER_PUT_PAGE: usize = 16;

/// Largest number of pages that a thread frees or evicts before it releases a tenant's lock: about
/// 10 µs of work.
pub(crate) const EVICT_STEP_PAGES: usize = 16;

/// Largest number of detached pages that one eviction frees. Detached pages were dropped earlier,
/// and their entries are still in the eviction queues. They do not count as evicted.
pub(crate) const STALE_SKIPS_MAX: usize = 256;

/// Divisor for the watermarks of background eviction. The high watermark is the pool's size divided
/// by this number, at most RECLAIM_BYTES_MAX, and the low watermark is half of the high one.
/// Background work begins to evict pages when less memory than the low watermark is free, and stops
/// when the high watermark is free. So a burst of puts finds free memory and does not have to evict
/// pages itself.
pub(crate) const RECLAIM_DIVISOR: u64 = 32;

/// Upper bound in bytes of the high watermark, the free memory up to which background work evicts
/// pages. It is the memory for the raw pages of 16 busy tenants.
pub(crate) const RECLAIM_BYTES_MAX: u64 = 16 * RAW_PAGES_MAX as u64 * PAGE_SIZE as u64;

/// Returns the high watermark of a pool of this size: the free memory in bytes up to which
/// background work evicts pages.
pub(crate) fn reclaim_high_bytes(size_bytes: u64) -> u64 {
    (size_bytes / RECLAIM_DIVISOR).min(RECLAIM_BYTES_MAX)
}

/// Bytes of the pool that are reserved for the growth of indexes between two checks of the pool's
/// size. They suffice for one chunk (32 KiB) for each kind of index record (leaves, runs of three
/// sizes, nodes and objects), one for the ghost table, and TABLES_ROOM_BYTES. The share of
/// INDEX_ROOM_DIVISOR is for rare growth: of the queue of raw pages, the estimator and the hash tables
/// of objects, and of the indexes of other tenants at the same time. A pool of less than 32 MiB can
/// therefore exceed its size by some tens of KiB until the next eviction.
pub(crate) const INDEX_ROOM_BYTES: u64 = ((7 * 32) << 10) + TABLES_ROOM_BYTES;

/// Bytes by which the tables of handles and spans may grow while a put reserves memory for a group
/// of pages. They suffice for 64 handles (16 B), 64 spans (12 B), and the numbers (4 B) of the
/// handles of all pages that the put may evict (64 * 16).
pub(crate) const TABLES_ROOM_BYTES: u64 = 8 << 10;

/// Divisor for memory that is reserved for the growth of indexes: the pool's size divided by this
/// number, in addition to INDEX_ROOM_BYTES.
pub(crate) const INDEX_ROOM_DIVISOR: u64 = 256;

/// Memory in bytes that a tenant without pages takes: its record, its names and the tables of its
/// objects.
pub(crate) const TENANT_METADATA_BYTES: u64 = 16 << 10;

/// Bytes that each page is charged for its metadata, in addition to its compressed size. They cover
/// the worst case, a page that is the only one left in its leaf and has a very small blob of its
/// own. Its index needs a run of one entry (28 B), a leaf (24 B) and two ghost entries (4 B). It
/// also needs a node (80 B) or an object with its place in the hash table (72 B). Its blob needs a
/// record (16 B), a slot in the table of equal pages (8 B) and a part of the record of a span (12
/// B). Once it is freed, its handle takes 4 B. The blob also lies in a slot of the heap. With its
/// part of the unused end of the span, the slot is at most 112 B longer than the blob (a test in
/// heap/class.rs). So the worst case is less than 290 B, and most pages cost a fifth of that.
/// Partly used chunks of records are not included. With a smaller charge, a tenant with such pages
/// could hold more than its share of the pool.
pub const PAGE_METADATA_CHARGE_BYTES: u64 = 320;

/// Address space that a pool reserves, as a multiple of the pool's largest size. The heap needs a
/// factor of 12: spans have 1 to 12 frames, all spans may have the same number of frames, and each
/// number has addresses of its own. Indexes take a factor of 1, and tables about an eighth (11.7 %)
/// in pools of a few MiB or more.
pub const ADDRESS_SPACE_TIMES: u64 = 14;

/// Eviction policies: rules that choose which page of a tenant is evicted next. The directory
/// `evict/` implements them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used: evicts the page that was used longest ago. A get takes its page out of
    /// the order. A put adds a page at the end of the order, and so does the reference (REF) of a
    /// retained page.
    Lru,
    /// Adaptive two-queue policy: a page that was put for the first time is evicted earlier than a
    /// page that the guest has used again.
    #[default]
    AdaptiveTwoQueue,
}

/// Duration in nanoseconds of a sweep, which is a pass over all stored pages that recompresses cold
/// ones: ten minutes. A page is cold when it has been stored for one to two sweeps. So a page that
/// the guest gets back earlier does not cost the slower decompression of zstd.
pub(crate) const SWEEP_NS: u64 = 600_000_000_000;

/// Largest number of handles that a thread visits in one step of the sweep. The sweep is a pass over
/// all handles of the heap, each of which may have a stored page.
pub(crate) const SWEEP_STEP: u32 = 256;

/// Number of handles that a thread of the sweep takes at a time. The thread takes them under a lock
/// that all threads of the sweep use, and holds it for less than 50 ns. The thread then visits the
/// handles, which takes 1 µs if no page is cold, and 200 to 400 µs if all pages are cold.
pub(crate) const SWEEP_HANDLES: u32 = 16;

/// Largest number of cold pages that a thread recompresses with zstd in one step of the sweep. That
/// takes less than a millisecond.
pub(crate) const SWEEP_PAGES: usize = 32;
const _: () = assert!(SWEEP_PAGES >= SWEEP_HANDLES as usize);

/// Largest number of threads that work on the sweep at the same time. Each needs 84 KiB of memory,
/// which does not count against the pool's size. From the measured rates of one and two threads, so
/// many recompress 1 TiB in less than half an hour (docs/benchmarks/engine.md). If the daemon has more
/// background threads, the others are free for new pages.
pub(crate) const SWEEP_THREADS_MAX: usize = 8;

/// Monotonic time in nanoseconds. The caller of the engine passes it in, so that a simulator can
/// use a clock of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

/// Number of a trust domain, inside which equal pages are stored once. Numbers are never reused.
pub(crate) type DomainId = u32;

/// Configuration of an engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Memory that the pool may hold in bytes, metadata included.
    pub size_bytes: u64,
    /// Largest size in bytes to which [`Engine::resize`](crate::Engine::resize) can set the pool.
    /// The engine reserves address space for this size.
    pub size_max_bytes: u64,
    /// Seed of all hashes: of page contents and of keys. It is random for each process in
    /// production, and fixed in tests.
    pub seed: u64,
    /// Eviction policy: the order in which the pages of a tenant are evicted.
    pub policy: PolicyKind,
}

impl EngineConfig {
    /// Returns a configuration with the default policy and a pool of `size_bytes` bytes, which
    /// cannot grow beyond that size.
    pub fn new(size_bytes: u64, seed: u64) -> EngineConfig {
        EngineConfig {
            size_bytes,
            size_max_bytes: size_bytes,
            seed,
            policy: PolicyKind::default(),
        }
    }
}

/// Settings that determine to which part of the pool a tenant is entitled. They apply to the
/// tenant's charge. Each page is charged its size at the first compression plus
/// [`PAGE_METADATA_CHARGE_BYTES`], whether other pages share its stored bytes or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes to which the tenant is entitled before the tenants share the remaining pool by weight.
    /// A part above `limit_bytes` is ignored.
    pub reserve_bytes: u64,
    /// Largest charge of the tenant in bytes. With None, the pool's size is the only limit.
    pub limit_bytes: Option<u64>,
    /// Share of the pool's unreserved part, relative to the weights of the other tenants. With 0
    /// the tenant gets no share.
    pub weight: u32,
}

/// Identity and quota of a tenant.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TenantSpec {
    /// Name of the tenant, used only in messages and statistics.
    pub name: String,
    /// Name of the tenant's trust domain. Equal pages of tenants with the same domain are stored
    /// once. With None, the tenant has a domain of its own.
    pub trust_domain: Option<String>,
    /// Reserve, limit and weight, which determine the tenant's part of the pool.
    pub quota: Quota,
}

impl TenantSpec {
    /// Returns the specification of a tenant in a trust domain of its own.
    pub fn new(name: impl Into<String>, quota: Quota) -> TenantSpec {
        TenantSpec {
            name: name.into(),
            trust_domain: None,
            quota,
        }
    }
}

const _: () = assert!(
    size_of::<usize>() == 8,
    "tmem-pool needs a 64-bit host: its estimates of memory assume 8-byte pointers"
);
