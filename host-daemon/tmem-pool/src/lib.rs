// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compressed, deduplicated page cache for many tenants: the storage engine of virtio-tmem.
//!
//! An [`Engine`] keeps copies of 4 KiB pages in a bounded amount of memory, which is called the
//! pool. Each [`Tenant`] stands for one VM. A tenant has pools of its own, each for one file
//! system or swap area. The key of a page consists of the number of such a pool, the number of
//! an object in that pool (a part of a disk), and the number of the page in the object. No tenant
//! can read pages of another tenant. Each tenant's [`Quota`] entitles it to a part of the memory.
//! Equal pages of one trust domain are stored once.
//!
//! The engine may drop any page at any time. But it never returns wrong bytes: a get returns those
//! that were last put under its key with its cookie, or none.
//!
//! # Example
//!
//! ```
//! use tmem_pool::{Engine, EngineConfig, Get, GetResult, Put, PutResult, Quota, TenantSpec, Time};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // 16 MiB for all tenants. The seed should be random; it keys the hashes.
//! let engine = Engine::new(EngineConfig::new(16 << 20, 0x5eed))?;
//! let quota = Quota { reserve_bytes: 1 << 20, limit_bytes: None, weight: 100 };
//! let tenant = engine.add_tenant(TenantSpec::new("web1", quota))?;
//! tenant.create_pool(1)?;
//!
//! // A put copies the page.
//! let page = [7; tmem_pool::PAGE_SIZE];
//! let put = Put { object: 42, index: 0, cookie: 1001, workingset: false, page: &page };
//! let mut stored = [PutResult::Refused];
//! tenant.put(1, &[put], &mut stored)?;
//! assert_eq!(stored, [PutResult::Stored]);
//!
//! // Background work on the threads of the caller: deduplicate, compress, evict, compact.
//! while engine.maintain(Time(0), 64) {}
//! assert_eq!(tenant.stats().same_filled_pages, 1);
//!
//! // A get names the cookie that it wants. A hit removes the page.
//! let (mut out, mut found) = ([[0; tmem_pool::PAGE_SIZE]], [GetResult::Miss]);
//! let spent = tenant.get(1, &Get::new(42, 0, &[1001]), &mut out, &mut found)?;
//! assert_eq!(found, [GetResult::Hit { cookie: 1001 }]);
//! assert_eq!(out[0], page);
//! // Dropping `spent` frees the stored bytes. A caller answers its guest before it drops `spent`.
//! drop(spent);
//! assert_eq!(tenant.stats().pages, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Threads, time and memory
//!
//! Any thread may call any method at any time. The engine starts no threads and reads no clock: the
//! caller passes in the [`Time`], and randomness comes from the seed. So a simulator can run the
//! engine.
//!
//! - [`Tenant::put`] copies a page and returns. A put is refused, and never waits, if too many
//!   pages of the tenant wait for background work or if memory cannot be freed in bounded steps. A
//!   [`PageSource`] copies a page straight from the memory of another process to the pool.
//! - [`Engine::maintain`] does background work in steps. It finds equal pages, compresses new pages
//!   with lz4 and cold ones with zstd, evicts, compacts, and returns memory to the system. A caller
//!   must call it again and again, or its puts are refused after some time.
//! - A get may leave pages in the pool, although the guest has them, too ([`Get::retain`]). The
//!   engine evicts such *retained* pages of a tenant before its other pages. When the guest has
//!   evicted such a page unchanged, [`Tenant::refer`] ends the retention without a copy.
//! - [`Engine::resize`] changes, at run time, the memory that the pool may hold.
//! - [`Tenant::put`], [`Tenant::get`] and [`Tenant::flush_some`] report their cost in nanoseconds,
//!   so that a caller can divide its time between tenants without reading a clock for each page.
//!
//! Later versions may add fields to the structures for configurations and statistics, so callers
//! create these structures with functions. The enumerations of results of puts and gets are
//! exhaustive, so that the compiler rejects a caller that does not handle a new result.
//!
//! # Files
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | sizes and limits with their reasons |
//! | `cost.rs` | cost of the work of a request |
//! | `engine.rs`, `membership.rs` | all tenants, and the size of the pool; admission |
//! | `reclaim.rs` | freeing memory, and the choice of the tenant that loses pages |
//! | `background.rs`, `sweep.rs` | background work; recompression of cold pages |
//! | `tenant/` | handle to a tenant: the work of its requests outside of its lock |
//! | `tenant_shared.rs`, `state.rs` | one tenant: its lock, and the work under it |
//! | `raw_queue.rs` | pages of a tenant that wait to be deduplicated and compressed |
//! | `request.rs` | requests of a tenant and their results |
//! | `index/` | keys, and the entry of each page |
//! | `blob.rs`, `dedup.rs` | stored contents; equal pages are stored once |
//! | `heap/` | memory for stored bytes; compaction; memory that goes back to the system |
//! | `codec.rs`, `hash.rs` | forms of a page, and its hash |
//! | `evict/` | order of eviction, one file for each policy |
//! | `shadow.rs` | tenant without page contents, for the replay of traces |
//! | `check.rs`, `tests/` | invariants; a model that knows the allowed answers |
//! | `quota.rs`, `totals.rs`, `stats.rs` | entitlements, sums over all tenants, statistics |
//! | `fail.rs` | injected allocation failures for tests |
//! | `secret.rs` | memory for guests' bytes outside of the heap |
//! | `poison.rs` | poison policy: panics under a lock that all tenants share |
//! | `sync.rs` | locks and atomics, which tests can schedule |
//!
//! # Locks
//!
//! A thread takes locks in this order:
//!
//! 1. the membership lock,
//! 2. the lock of at most one tenant,
//! 3. one lock of the table of equal pages,
//! 4. the lock of one size class of the heap,
//! 5. the heap's lock of free spans or of spare handles.
//!
//! The lock of the index memory's chunks, the lock of the scratch pages and the locks of the sweep
//! are leaf locks: a thread that holds one of them takes no other lock.

mod background;
mod blob;
mod check;
mod codec;
mod config;
mod cost;
mod dedup;
mod engine;
mod error;
mod evict;
mod fail;
mod hash;
mod heap;
mod index;
mod membership;
mod poison;
mod quota;
mod raw_queue;
mod reclaim;
mod request;
mod secret;
mod shadow;
mod state;
mod stats;
mod sweep;
mod sync;
mod tenant;
mod tenant_shared;
#[cfg(test)]
mod tests;
mod totals;

pub use background::Work;
pub use codec::stored_bytes;
pub use config::{
    ADDRESS_SPACE_TIMES, EngineConfig, KEYS_PER_TENANT_MAX, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE,
    POOLS_PER_TENANT_MAX, Page, PolicyKind, Quota, TenantSpec, Time,
};
pub use cost::{DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, PUT_NS_MAX, REF_NS_MAX};
pub use engine::Engine;
pub use error::{AdmissionError, CreateError, NoPool};
pub use hash::PageHash;
pub use request::{Flushed, GET_PAGES_MAX, Get, GetResult, PageSource, Put, PutResult, Ref};
pub use secret::SecretPages;
pub use shadow::{ShadowMemory, ShadowTenant};
pub use stats::{EngineStats, TenantStats};
pub use tenant::{Spent, Tenant};
