// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Costs of the work of a request, in nanoseconds.
//!
//! A caller that serves several VMs with one thread ends the turn of one VM after some work. A clock
//! cannot be asked at each page, and a simulator has a clock of its own, so each call reports what it did
//! by these figures. They were measured on one core of an AMD EPYC server and rounded up; a slower
//! host takes longer in proportion. Only their ratios matter to fairness.

use crate::config::EVICTIONS_PER_PUT_PAGE;
use crate::gain::SAMPLES_MAX;

/// Copying a page into the pool, hashing it and adding its key.
pub(crate) const PUT_NS: u64 = 1_300;

/// Refusing a page that is not copied.
pub(crate) const REFUSE_NS: u64 = 300;

/// Evicting one page, or replacing it.
pub(crate) const EVICT_NS: u64 = 500;

/// Looking for a page that is not held.
pub(crate) const MISS_NS: u64 = 300;

/// Filling a page with its pattern, and freeing its key.
pub(crate) const GET_SAME_NS: u64 = 1_000;

/// Decompressing a page with lz4, or copying it, and freeing it.
pub(crate) const GET_NS: u64 = 2_500;

/// Decompressing a page with zstd, and freeing it.
pub(crate) const GET_DENSE_NS: u64 = 6_000;

/// Dropping a page that has no stored bytes.
pub(crate) const DROP_SAME_NS: u64 = 300;

/// Dropping any other page.
pub(crate) const DROP_NS: u64 = 800;

/// Looking up the pool and the object of a range, under the lock.
pub(crate) const RANGE_NS: u64 = 300;

/// Passing one followed key (`gain.rs`).
pub(crate) const FOLLOWED_NS: u64 = 2;

/// Forgetting one followed key.
pub(crate) const FORGET_NS: u64 = 50;

/// Hashing one key of a small range, to forget it.
pub(crate) const KEY_NS: u64 = 40;

/// Largest cost of one page of a put: it replaces a page, and both the pool and the tenant's limit
/// want room.
pub const PUT_NS_MAX: u64 = PUT_NS + (1 + 2 * EVICTIONS_PER_PUT_PAGE as u64) * EVICT_NS;

/// Largest cost of one page of a get.
pub const GET_NS_MAX: u64 = GET_DENSE_NS + SAMPLES_MAX as u64 * FOLLOWED_NS;

/// With this much, [`flush_some`](crate::Tenant::flush_some) always makes progress: its largest step
/// forgets all followed keys.
pub const FLUSH_NS_MIN: u64 = RANGE_NS + SAMPLES_MAX as u64 * (FOLLOWED_NS + FORGET_NS);

/// Largest cost of ending a pool: its pages are freed later, its followed keys are forgotten at once.
pub const DESTROY_NS_MAX: u64 = FLUSH_NS_MIN;
