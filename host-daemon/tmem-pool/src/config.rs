// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and limits of the engine, each with its reason, and the configuration that a caller
//! passes.

/// Bytes of a page. The device knows no other size.
pub const PAGE_SIZE: usize = 4096;

/// One page of a guest.
pub type Page = [u8; PAGE_SIZE];

/// Largest number of pools of one tenant: VIRTIO_TMEM_POOLS_MAX of the protocol. A guest has a pool
/// for each file system.
pub const POOLS_PER_TENANT_MAX: usize = 256;

/// Largest number of keys of one tenant, counting live keys and detached keys that are not freed
/// yet. 2^26 pages are 256 GiB, which is more than any guest is expected to reclaim from its file
/// cache. The limit bounds the host memory that same-filled pages, which have no payload, can take.
pub const KEYS_PER_TENANT_MAX: u32 = 1 << 26;

/// Smallest limit of a tenant's raw pages, which are stored uncompressed until a background worker
/// finalizes them. It is four full batches, as many as a guest has in flight.
pub(crate) const RAW_PAGES_MIN: u32 = 256;

/// Largest limit of a tenant's raw pages: 8 MiB, which one core compresses in some 10 ms.
pub(crate) const RAW_PAGES_MAX: u32 = 2048;

/// Divisor that gives the limit of a tenant's raw pages: the entitlement in pages divided by this,
/// but at least RAW_PAGES_MIN and at most RAW_PAGES_MAX. So the limit depends on quotas only, not
/// on the load of other tenants.
pub(crate) const RAW_PART: u64 = 16;

/// Number of raw pages that a background worker finalizes for one tenant before it turns to the
/// next. The number is small because the next tenant waits, and larger than 1 so that the pages
/// share the cost of taking the lock.
pub(crate) const FINALIZE_PAGES: usize = 8;

/// Divisor for the margin of retained pages: after an eviction, a tenant retains pages only while
/// its charge is below the charge at that eviction by at least one part in this many. The eviction
/// of a retained page may cost the guest a read of its disk, because the guest sends no copy of
/// such a page. The margin covers the changes of the charge in a busy guest.
pub(crate) const RETAIN_MARGIN_PART: u64 = 16;

/// Speed at which a tenant retains more pages again. Each page that a get does not retain for lack
/// of room raises the bound by the charge, shifted right by this number of bits. The margin is used
/// up after 4,096 such pages. The guest then loses one page or a few, and the bound falls again. In
/// a model of a guest that reads in a loop, this caused 8 more disk reads in 30,000.
pub(crate) const RETAIN_GROWTH_SHIFT: u32 = 16;

/// Number of pages that a put copies before it takes the tenant's lock once for all of them.
pub(crate) const PUT_GROUP_PAGES: usize = 64;

/// Largest number of steps that a put may take, for each of its pages, to free memory. A step
/// evicts a page, frees a detached page or moves a blob. The number suffices to keep a tenant
/// within its limit, because a raw page is charged as much as 14 same-filled pages (state.rs
/// asserts that). It may not suffice to free memory of the pool, because evicting a shared or
/// same-filled page frees no stored bytes. The put is then refused.
pub(crate) const EVICTIONS_PER_PUT_PAGE: usize = 16;

/// Number of pages that a thread frees or evicts before it releases a tenant's lock: about 10 µs of
/// work.
pub(crate) const EVICT_STEP_PAGES: usize = 16;

/// Largest number of detached pages that one eviction frees on its way through the queues. Detached
/// pages do not count as evicted.
pub(crate) const STALE_SKIPS_MAX: usize = 256;

/// Bytes of the pool that are kept free so that indexes can grow between two checks of the pool's
/// size. They suffice for a chunk of each kind of record and a chunk of the ghost table.
pub(crate) const INDEX_ROOM_BYTES: u64 = 128 << 10;

/// Divisor: the pool's size divided by this number is kept free in addition to INDEX_ROOM_BYTES.
pub(crate) const INDEX_ROOM_PART: u64 = 256;

/// Memory in bytes that each tenant takes without any page: its record, its names and the tables of
/// its objects.
pub(crate) const TENANT_METADATA_BYTES: u64 = 16 << 10;

/// Metadata charge of each page in bytes, beside its compressed size. It covers the worst case, a
/// page that is alone in its object and has a blob of its own. The host then holds an entry (32 B),
/// two nodes (160 B), an object and its place in the map (72 B), a blob record and its place (40
/// B), and a few bytes more. Most pages cost a quarter of that. With a smaller charge, a tenant
/// with one-page objects could hold more than its share of the pool.
pub const PAGE_METADATA_CHARGE_BYTES: u64 = 320;

/// Address space that a pool reserves, as a multiple of the pool's largest size. Each frame (4 KiB)
/// could be in a span of its own, and a span has addresses for 12 frames: that is a factor of 12.
/// Indexes take a factor of 1, and tables a ninth in pools of a few MiB or more.
pub const ADDRESS_SPACE_TIMES: u64 = 14;

/// Eviction policies; `evict/` implements them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyKind {
    /// First in, first out: evicts the page that was put longest ago.
    Fifo,
    /// Least recently used: evicts the page that was used longest ago. Because a get removes a
    /// page, this is the order of [`PolicyKind::Fifo`].
    Lru,
    /// Adaptive two-queue policy: a page that was put for the first time is evicted earlier than a
    /// page that the guest has used again.
    #[default]
    AdaptiveTwoQueue,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [PolicyKind; 3] = [
        PolicyKind::Fifo,
        PolicyKind::Lru,
        PolicyKind::AdaptiveTwoQueue,
    ];

    /// Returns the policy's name, as tables and files show it.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Lru => "lru",
            PolicyKind::AdaptiveTwoQueue => "adaptive-two-queue",
        }
    }
}

/// Duration in nanoseconds of a sweep, a pass over all blobs that recompresses cold ones: ten
/// minutes. A blob is cold after one to two sweeps. A page that the guest gets back earlier does
/// not pay for the slower decompression of zstd.
pub(crate) const SWEEP_NS: u64 = 600_000_000_000;

/// Number of the heap's places (one for each blob) that one step of the sweep visits.
pub(crate) const SWEEP_STEP: u32 = 256;

/// Largest number of pages that one step of the sweep recompresses, which takes less than a
/// millisecond.
pub(crate) const SWEEP_PAGES: usize = 32;

/// Monotonic time in nanoseconds. The caller passes it in, so that a simulator can use a clock of
/// its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

/// Configuration of an engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Memory that the pool may hold in bytes, metadata included.
    pub size_bytes: u64,
    /// Largest size for [`Engine::resize`](crate::Engine::resize), in bytes: the engine reserves
    /// address space for it.
    pub size_max_bytes: u64,
    /// Seed of the content hash; random per process in production, fixed in tests.
    pub seed: u64,
    /// Order in which the pages of a tenant are evicted.
    pub policy: PolicyKind,
}

impl EngineConfig {
    /// Returns the configuration of a pool of this size in bytes, which is also its largest size,
    /// with the default policy.
    pub fn new(size_bytes: u64, seed: u64) -> EngineConfig {
        EngineConfig {
            size_bytes,
            size_max_bytes: size_bytes,
            seed,
            policy: PolicyKind::default(),
        }
    }
}

/// Settings that determine to which part of the pool a tenant is entitled. A page is charged its
/// size at the first compression plus [`PAGE_METADATA_CHARGE_BYTES`], whether it is shared or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes to which the tenant is entitled before the unreserved part of the pool is divided by
    /// weight. A part above `limit_bytes` is ignored.
    pub reserve_bytes: u64,
    /// Largest charge of the tenant in bytes. With None, the pool's size is the only limit.
    pub limit_bytes: Option<u64>,
    /// Share of the unreserved part of the pool, relative to the other tenants' weights. With 0 the
    /// tenant gets no share.
    pub weight: u32,
}

/// Identity and quota of a tenant.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TenantSpec {
    /// Name, used only in messages and statistics.
    pub name: String,
    /// Name of the trust domain. Tenants with the same name share equal pages. With None, the
    /// tenant is alone in its domain.
    pub trust_domain: Option<String>,
    /// The tenant's part of the pool.
    pub quota: Quota,
}

impl TenantSpec {
    /// Returns a tenant in a trust domain of its own.
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
