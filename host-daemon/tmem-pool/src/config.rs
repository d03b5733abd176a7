// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and limits of the engine, each with its reason, and the configuration that a caller
//! passes.

/// Bytes of a page. The device knows no other size.
pub const PAGE_SIZE: usize = 4096;

/// One page of a guest.
pub type Page = [u8; PAGE_SIZE];

/// Most pools of one tenant, as VIRTIO_TMEM_POOLS_MAX on the wire. A guest has a pool for each file
/// system.
pub const POOLS_PER_TENANT_MAX: usize = 256;

/// Most keys of one tenant, counting live ones and those not freed yet. 2^26 pages are 256 GiB,
/// more than the file cache of any guest that shrinks. The limit bounds the host memory that
/// same-filled pages, which have no payload, can take.
pub const KEYS_PER_TENANT_MAX: u32 = 1 << 26;

/// Smallest limit of a tenant's raw pages: four full batches, as many as a guest has in flight.
pub(crate) const RAW_PAGES_MIN: u32 = 256;

/// Largest limit of a tenant's raw pages: 8 MiB, which one core compresses in some 10 ms.
pub(crate) const RAW_PAGES_MAX: u32 = 2048;

/// Between these two, the limit of raw pages is the tenant's entitlement divided by this. It
/// depends on quotas only, not on the load of other tenants.
pub(crate) const RAW_PART: u64 = 16;

/// Raw pages that a background worker takes from a tenant at a time. They are few, because the next
/// tenant waits for them, and more than one, so that the cost of the lock is shared.
pub(crate) const FINALIZE_PAGES: usize = 8;

/// Pages that a put copies before it takes the tenant's lock once for all of them.
pub(crate) const PUT_GROUP_PAGES: usize = 64;

/// Steps to free memory that a put may take for each page that it brings: each evicts a page, frees
/// a detached page or moves a blob. For a tenant within its limit this is enough, because a raw
/// page is charged as much as 14 same-filled pages (state.rs asserts that). For the memory of the
/// pool it may be too few: a victim that is shared or same-filled frees no stored bytes. The put is
/// then refused.
pub(crate) const EVICTIONS_PER_PUT_PAGE: usize = 16;

/// Pages freed or evicted under one hold of a tenant's lock: about 10 µs.
pub(crate) const EVICT_STEP_PAGES: usize = 16;

/// Most stale queue positions (of pages that are already gone) that one search for a victim may
/// skip.
pub(crate) const STALE_SKIPS_MAX: usize = 256;

/// Bytes kept free for the growth of indexes between two checks of the pool's size: a chunk of each
/// kind of record, and of the ghost table.
pub(crate) const INDEX_ROOM_BYTES: u64 = 128 << 10;

/// One part in this many of the pool's size is kept free in addition.
pub(crate) const INDEX_ROOM_PART: u64 = 256;

/// Metadata of a tenant in bytes: its record, names and the tables of its objects.
pub(crate) const TENANT_METADATA_BYTES: u64 = 16 << 10;

/// Metadata charge of each page in bytes, beside its compressed size. It is all that one page in an
/// object of its own, with a blob of its own, makes the host hold: entry (32 B), two nodes (160),
/// object and its place (64), blob with its place (40), and a little. Most pages cost a quarter of
/// it. With a smaller charge, a tenant of one-page objects could hold more than its share of the
/// pool.
pub const PAGE_METADATA_CHARGE_BYTES: u64 = 320;

/// Address space that a pool reserves, as a multiple of its largest size: 12 for the longest span
/// that each frame could be of, one for indexes, and a ninth for tables (of a pool of a few MiB or
/// more).
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
    /// Adaptive two-queue policy: evicts pages that were put for the first time early.
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

    /// Returns the name for tables and files.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Lru => "lru",
            PolicyKind::AdaptiveTwoQueue => "adaptive-two-queue",
        }
    }
}

/// Duration of a sweep in nanoseconds. A blob is cold after one to two sweeps. Ten minutes: pages
/// that the guest takes back sooner are spared the slower decompression.
pub(crate) const SWEEP_NS: u64 = 600_000_000_000;

/// Places of the heap that one step of the sweep visits.
pub(crate) const SWEEP_STEP: u32 = 256;

/// Most pages that one step of the sweep recompresses: less than a millisecond.
pub(crate) const SWEEP_PAGES: usize = 32;

/// Monotonic time in nanoseconds, passed in by the caller so that a simulator owns it.
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

/// Part of the pool to which a tenant is entitled. Pages are charged their compressed size at first
/// compression plus [`PAGE_METADATA_CHARGE_BYTES`], shared or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes to which the tenant is entitled before the rest is divided. A part above `limit_bytes`
    /// is ignored.
    pub reserve_bytes: u64,
    /// Largest charge of the tenant in bytes. None: the pool's size is the only limit.
    pub limit_bytes: Option<u64>,
    /// Share of the unreserved part of the pool, relative to the other tenants' weights. 0: no
    /// share.
    pub weight: u32,
}

/// Identity and quota of a tenant.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TenantSpec {
    /// Name for messages and statistics only.
    pub name: String,
    /// Tenants with the same Some(domain) share equal pages. None is a domain of its own.
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
    "the engine's estimates are those of 64-bit hosts"
);
