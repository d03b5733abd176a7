// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage engine of virtio-tmem: pages, keys, tenants and time, and nothing of virtio.
//!
//! An [`Engine`] of bounded memory holds compressed copies of pages. Each [`Tenant`], one for a VM,
//! has pools of objects of pages, sees nothing of the others, and is entitled to a part of the
//! memory. Equal pages of one trust domain are stored once. The engine may drop any page at any
//! time. It never returns a page with other bytes than were last put with its cookie.
//!
//! A put copies the page and is answered. Background work runs in [`Engine::maintain`] on the threads
//! that call it. It finds equal pages, compresses new pages, and recompresses cold ones.
//!
//! The engine has no threads, clocks or sources of randomness: the caller passes in the time, and
//! randomness comes from the seed. All handles may be used from any thread at once.
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | sizes and limits with their reasons |
//! | `cost.rs` | cost of the work of a request |
//! | `engine.rs`, `membership.rs` | all tenants; choice of victims, background work, admission |
//! | `tenant.rs`, `state.rs` | one tenant: work outside its lock, work under it |
//! | `index/`, `entry.rs` | keys and the record of each |
//! | `blob.rs`, `dedup.rs` | stored contents, each equal page once |
//! | `heap/` | memory for stored bytes, which compacts and is given back |
//! | `codec.rs`, `hash.rs`, `hash/` | forms of a page |
//! | `evict/` | order of eviction, one file for each policy |
//! | `shadow.rs` | tenant without page contents, for the replay of traces |
//! | `check.rs`, `tests/` | invariants; a model that knows the allowed answers |
//! | `quota.rs`, `totals.rs`, `stats.rs` | entitlement, sums of what is held, statistics |
//! | `fail.rs` | injected allocation failures for tests |
//! | `secret.rs` | memory for guests' bytes outside of the heap |
//! | `poison.rs` | poison policy: panics under a lock that all tenants share |
//! | `sync.rs` | locks and atomics, which tests can schedule |
//!
//! Lock order: membership, then at most one tenant, then one of the dedup table, then those of the
//! heap: a class's, free spans.

mod blob;
mod check;
mod codec;
mod config;
mod cost;
mod dedup;
mod engine;
mod entry;
mod error;
mod evict;
mod fail;
mod hash;
mod heap;
mod index;
mod membership;
mod poison;
mod quota;
mod secret;
mod shadow;
mod state;
mod stats;
mod sync;
mod tenant;
#[cfg(test)]
mod tests;
mod totals;

pub use codec::stored_bytes;
pub use config::{
    ADDRESS_SPACE_TIMES, EngineConfig, KEYS_PER_TENANT_MAX, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE,
    POOLS_PER_TENANT_MAX, Page, PolicyKind, Quota, TenantSpec, Time,
};
pub use cost::{DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, PUT_NS_MAX};
pub use engine::{Engine, Work};
pub use error::{AdmissionError, CreateError, NoPool};
pub use hash::PageHash;
pub use secret::SecretPages;
pub use shadow::{ShadowMemory, ShadowTenant};
pub use stats::{EngineStats, TenantStats};
pub use tenant::{GetResult, Put, PutResult, Spent, Tenant};
