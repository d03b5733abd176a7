// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and limits of the engine, each with its reason, and what a caller configures.

/// Bytes of a page. The device knows no other size.
pub const PAGE_SIZE: usize = 4096;

/// One page of a guest.
pub type Page = [u8; PAGE_SIZE];

/// Pools of one tenant. The wire's VIRTIO_TMEM_POOLS_MAX: a guest has a pool per file system.
pub const POOLS_PER_TENANT_MAX: usize = 256;

/// Keys of one tenant, live and not yet freed. 2^26 pages are 256 GiB, more than the file cache of
/// any guest that shrinks; it bounds what same-filled pages, which have no payload, can make the
/// host hold.
pub const KEYS_PER_TENANT_MAX: u32 = 1 << 26;

/// Raw pages that a tenant may have, at least: four full batches, as many as a guest has in flight.
pub(crate) const RAW_PAGES_MIN: u32 = 256;

/// And at most: 8 MiB, which one core compresses in some 10 ms.
pub(crate) const RAW_PAGES_MAX: u32 = 2048;

/// In between, so much of its entitlement. It depends on quotas only, not on what others do.
pub(crate) const RAW_PART: u64 = 16;

/// Raw pages that a worker takes from a tenant at a time: few, since the tenant that is next waits
/// for them; more than one, so that the lock is cheap.
pub(crate) const SETTLE_PAGES: usize = 8;

/// Pages that are copied before the tenant's lock is taken once for all of them.
pub(crate) const PUT_GROUP_PAGES: usize = 64;

/// Pages that a put may evict, per page that it brings: a new page needs at most a page and its
/// metadata, which is what eight same-filled pages are charged, and half of what goes may be
/// shared.
pub(crate) const EVICTIONS_PER_PUT_PAGE: usize = 16;

/// Pages freed or evicted under one hold of a tenant's lock: about 10 µs.
pub(crate) const EVICT_STEP_PAGES: usize = 16;

/// Queue positions of pages that are gone already which one search for a victim may skip.
pub(crate) const STALE_SKIPS_MAX: usize = 256;

/// Kept free for what indexes take between two looks at the size: a chunk of each kind of record,
/// and of the ghost table.
pub(crate) const INDEX_ROOM_BYTES: u64 = 128 << 10;

/// And so much of the size.
pub(crate) const INDEX_ROOM_PART: u64 = 256;

/// A tenant, with its record, names and the tables of its objects.
pub(crate) const TENANT_METADATA_BYTES: u64 = 16 << 10;

/// What each page is charged beside its compressed size: all that one page in an object of its own,
/// with a blob of its own, makes the host hold: entry (32 B), two nodes (160), object and its place
/// (64), blob with its place (40), and a little. Most pages cost a quarter of it; charging less
/// would let a tenant of one-page objects hold more than its share of the pool.
pub const PAGE_METADATA_CHARGE_BYTES: u64 = 320;

/// Address space that a pool reserves, in times of its largest size: 12 for the longest span that each
/// frame could be of, one for indexes, and a ninth for tables (of a pool of a few MiB or more).
pub const ADDRESS_SPACE_TIMES: u64 = 14;

/// The orders of eviction that there are; see `evict/`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// The page put longest ago.
    Fifo,
    /// The page used longest ago, which with pages that leave when they are used is the same.
    Lru,
    /// What was put for the first time goes early.
    #[default]
    S3Fifo,
}

impl PolicyKind {
    /// All there are.
    pub const ALL: [PolicyKind; 3] = [PolicyKind::Fifo, PolicyKind::Lru, PolicyKind::S3Fifo];

    /// For tables and files.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3fifo",
        }
    }
}

/// A blob is cold when it has been there for one to two of these. Ten minutes: what a guest takes
/// back sooner is spared the slower decompression.
pub(crate) const SWEEP_NS: u64 = 600_000_000_000;

/// Places of the heap that one step of the sweep looks at.
pub(crate) const SWEEP_STEP: u32 = 256;

/// Pages that it makes denser at most: less than a millisecond.
pub(crate) const SWEEP_PAGES: usize = 32;

/// Monotonic time in nanoseconds, passed in by the caller so that a simulator owns it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

/// What a pool is made with.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Memory the pool may hold, metadata included.
    pub size_bytes: u64,
    /// No resize goes beyond it: address space is reserved for as much.
    pub size_max_bytes: u64,
    /// Seeds the content hash; random per process in production, fixed in tests.
    pub seed: u64,
    /// Which page of a tenant goes first.
    pub policy: PolicyKind,
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
