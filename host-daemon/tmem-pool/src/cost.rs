// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Costs of the parts of a request's work, in nanoseconds.
//!
//! A caller that serves several VMs with one thread ends the scheduling slice of one VM after some
//! work. Reading a clock for each page is too expensive, and a simulator has a clock of its own. So
//! each call reports the work that it did by these figures. They were measured on one core of an
//! AMD EPYC server and rounded up; a slower host takes longer in proportion. Only their ratios
//! matter to fairness.

use crate::config::EVICTIONS_PER_PUT_PAGE;
use tmem_trace::estimate::{Estimator, SAMPLES_MAX};

/// Cost of copying a page into the pool, hashing it and adding its key.
pub(crate) const PUT_NS: u64 = 1_300;

/// Cost of refusing a page without copying it.
pub(crate) const REFUSE_NS: u64 = 300;

/// Cost of evicting one page, or of replacing it by a newer one.
pub(crate) const EVICT_NS: u64 = 500;

/// Cost of a look-up that finds no page.
pub(crate) const MISS_NS: u64 = 300;

/// Cost of filling a page with its pattern, and freeing its key.
pub(crate) const GET_SAME_NS: u64 = 1_000;

/// Cost of decompressing a page with lz4, or of copying a raw page, and of freeing it.
pub(crate) const GET_NS: u64 = 2_500;

/// Cost of looking up one page of a reference request (REF), and of moving its key to another
/// queue.
pub(crate) const REF_NS: u64 = 300;

/// Cost of decompressing a page with zstd, and freeing it.
pub(crate) const GET_DENSE_NS: u64 = 6_000;

/// Cost of dropping a page that has no stored bytes.
pub(crate) const DROP_SAME_NS: u64 = 300;

/// Cost of dropping a page that has stored bytes.
pub(crate) const DROP_NS: u64 = 800;

/// Cost of looking up the pool and the object of a range under the tenant's lock.
pub(crate) const RANGE_NS: u64 = 300;

/// Cost of visiting one key in a walk over the keys that the [`Estimator`] follows.
pub(crate) const FOLLOWED_NS: u64 = 2;

/// Cost of removing one key from the keys that the [`Estimator`] follows.
pub(crate) const FORGET_NS: u64 = 50;

/// Cost of hashing one key of a small flushed range, in order to remove the key from the estimator.
pub(crate) const KEY_NS: u64 = 40;

/// Returns the cost of visiting and removing followed keys in all calls of an estimator so far. The
/// constant cost of each call is not included.
pub(crate) fn estimator_ns<K: Copy>(estimator: &Estimator<K>) -> u64 {
    estimator.passed() * FOLLOWED_NS + estimator.forgotten() * FORGET_NS
}

/// Returns the largest cost of a walk over all keys that the estimator follows, if the walk removes
/// each of them.
pub(crate) fn forget_all_ns_max<K: Copy>(estimator: &Estimator<K>) -> u64 {
    estimator.followed() * (FOLLOWED_NS + FORGET_NS)
}

/// Largest cost of one page of a put: the page replaces another one, and evictions are needed for
/// both the pool and the tenant's limit.
pub const PUT_NS_MAX: u64 = PUT_NS + (1 + 2 * EVICTIONS_PER_PUT_PAGE as u64) * EVICT_NS;

/// Largest cost of one call of the estimator in a get or a reference: a walk over all followed keys.
pub(crate) const ESTIMATE_NS_MAX: u64 = SAMPLES_MAX as u64 * FOLLOWED_NS;

/// Largest cost of one page of a reference request (REF). Dropping the page costs more than moving
/// its key to another queue.
pub const REF_NS_MAX: u64 = REF_NS + DROP_NS + ESTIMATE_NS_MAX;

/// Largest cost of one page of a get: a page in zstd form that was retained. For such a page, the
/// engine first does the work of the reference request (REF) that the guest should have sent
/// before.
pub const GET_NS_MAX: u64 = GET_DENSE_NS + REF_NS + 2 * ESTIMATE_NS_MAX;

/// Smallest budget with which [`flush_some`](crate::Tenant::flush_some) always makes progress. The
/// largest step of a flush removes all keys that the estimator follows.
pub const FLUSH_NS_MIN: u64 = RANGE_NS + SAMPLES_MAX as u64 * (FOLLOWED_NS + FORGET_NS);

/// Largest cost of destroying a pool: the estimator stops following the pool's keys at once, and
/// the pool's pages are freed later.
pub const DESTROY_NS_MAX: u64 = FLUSH_NS_MIN;
