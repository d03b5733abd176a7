// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage engine of virtio-tmem: pages, keys, tenants and time, and nothing of virtio.
//!
//! A [`Pool`] of bounded memory holds compressed copies of pages. Each [`Tenant`], one for a VM,
//! has pools of objects of pages, sees nothing of the others, and is entitled to a part of the
//! memory. Equal pages of one trust domain are kept once. Any page may be gone at any time; none
//! may ever come back with other bytes than were last put with its cookie.
//!
//! A put copies the page and is answered. Background work, which runs in [`Pool::maintain`] on
//! whatever threads call it, then finds equal pages, compresses, and makes cold pages denser.
//!
//! There are no threads, clocks or sources of randomness inside: time is passed in, randomness
//! comes from the seed. All handles may be used from any thread at once.
//!
//! | file | its idea |
//! | --- | --- |
//! | `config.rs` | sizes and limits with their reasons |
//! | `cost.rs` | what the work of a request costs |
//! | `pool.rs`, `registry.rs` | all tenants, whose pages go when it is full; background work; admission |
//! | `tenant.rs`, `state.rs` | one tenant: what runs outside its lock, what under it |
//! | `index/`, `entry.rs` | keys and what is kept for each |
//! | `blob.rs`, `dedup.rs` | stored contents, each equal page once |
//! | `heap/` | memory for stored bytes, which compacts and is given back |
//! | `codec.rs`, `hash.rs`, `hash/` | forms of a page |
//! | `evict/` | order of eviction, one file for each policy |
//! | `gain.rs` | what more memory would bring a tenant |
//! | `trace.rs`, `replay.rs` | what guests asked, to be kept; the same through another policy or size |
//! | `check.rs`, `tests/` | invariants; a model that knows what each get may answer |
//! | `apart.rs` | what threads change, apart from what they read |
//! | `quota.rs`, `account.rs`, `stats.rs` | entitlement, what is held, what is told |
//! | `fail.rs` | where tests let memory run out |
//! | `secret.rs` | memory for guests' bytes outside of the heap |
//! | `whole.rs` | what a panic under a lock that all share means |
//! | `sync.rs` | locks and atomics, which tests may take turns at |
//!
//! Lock order: registry, then at most one tenant, then one of the dedup table, then those of the
//! heap: a class's, free spans.

mod account;
mod apart;
mod blob;
mod check;
mod codec;
mod config;
mod cost;
mod dedup;
mod entry;
mod error;
mod evict;
mod fail;
mod gain;
mod hash;
mod heap;
mod index;
mod pool;
mod quota;
mod registry;
pub mod replay;
mod secret;
mod state;
mod stats;
mod sync;
mod tenant;
#[cfg(test)]
mod tests;
pub mod trace;
mod whole;

pub use config::{
    ADDRESS_SPACE_TIMES, KEYS_PER_TENANT_MAX, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE,
    POOLS_PER_TENANT_MAX, Page, PolicyKind, PoolConfig, Quota, TenantSpec, Time,
};
pub use cost::{DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, PUT_NS_MAX};
pub use error::{AdmissionError, CreateError, NoPool};
pub use gain::{
    GAIN_OVER_MAX, GAIN_OVER_USUAL, GAIN_PERCENT, GAIN_UNDER_MAX, GIVE_UP_COST_MAX, LOSS_BEARABLE,
    LOSS_PERCENT, LOSS_UNDER_MAX, LOSS_UNDER_USUAL, TELLING_GETS_MIN, TELLING_GETS_PER_PAGE,
};
pub use hash::PageHash;
pub use pool::{Pool, Work};
pub use secret::SecretPages;
pub use stats::{PoolStats, TenantStats};
pub use tenant::{GetResult, Put, PutResult, Spent, Tenant};
