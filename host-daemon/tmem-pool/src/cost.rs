// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Costs of the parts of a request's work, in nanoseconds.
//!
//! A thread that serves several VMs ends the scheduling slice of a VM after some work. Reading a
//! clock for each page would be too expensive, and a simulator has a clock of its own. So each call
//! of the engine reports its cost, which is computed from the constants of this file. The constants
//! were measured on one core of an AMD EPYC server and rounded up. A slower host takes longer in
//! proportion. Only the ratios of the constants matter to fairness.

use crate::config::EVICTIONS_PER_PUT_PAGE;
use tmem_trace::estimate::{Estimator, SAMPLES_MAX};

/// Cost of copying a page into the pool, hashing it and adding its key.
pub(crate) const PUT_NS: u64 = 1_300;

/// Cost of refusing a page of a put without copying it.
pub(crate) const REFUSE_NS: u64 = 300;

/// Cost of evicting one page, or of dropping a page because a put replaces it. An eviction in the order
/// by hash takes twice as long, but a tenant that has this order evicts fewer pages.
pub(crate) const EVICT_NS: u64 = 500;

/// Cost of looking up a page of a get if the look-up finds no page.
pub(crate) const MISS_NS: u64 = 300;

/// Cost of a get of a same-filled page: filling the page with its pattern and freeing its key.
pub(crate) const GET_SAME_NS: u64 = 1_000;

/// Cost of a get of an lz4 or raw page: decompressing or copying the page and freeing its stored
/// bytes.
pub(crate) const GET_NS: u64 = 2_500;

/// Cost of looking up one page of a reference request (REF), and of moving its entry from the queue
/// of retained pages to a queue of the eviction policy.
pub(crate) const REF_NS: u64 = 300;

/// Cost of a get of a zstd page: decompressing the page and freeing its stored bytes.
pub(crate) const GET_DENSE_NS: u64 = 6_000;

/// Cost of dropping a same-filled page, which has no stored bytes.
pub(crate) const DROP_SAME_NS: u64 = 300;

/// Cost of dropping a page that has stored bytes.
pub(crate) const DROP_NS: u64 = 800;

/// Cost of looking up the pool and the object of a flushed range under the tenant's lock.
pub(crate) const RANGE_NS: u64 = 300;

/// Cost of visiting one key in a walk over the sampled keys of the [`Estimator`].
pub(crate) const FOLLOWED_NS: u64 = 2;

/// Cost of removing one key from the sampled keys of the [`Estimator`].
pub(crate) const DROP_ESTIMATE_NS: u64 = 50;

/// Cost of hashing one key of a flushed range of up to 64 pages. The hashes are needed to remove the
/// key from the [`Estimator`] and from the simulation of the eviction policy.
pub(crate) const KEY_NS: u64 = 50;

/// Returns the cost in nanoseconds of visiting and removing sampled keys in all calls of
/// the estimator so far. The constant cost of each call is not included.
pub(crate) fn estimator_ns<K: Copy>(estimator: &Estimator<K>) -> u64 {
    estimator.nr_passed() * FOLLOWED_NS + estimator.nr_forgotten() * DROP_ESTIMATE_NS
}

/// Returns the largest cost in nanoseconds of a walk over all keys that the estimator follows
/// (samples). It includes the cost of removing each of them.
pub(crate) fn drop_all_estimates_ns_max<K: Copy>(estimator: &Estimator<K>) -> u64 {
    estimator.nr_sampled() * (FOLLOWED_NS + DROP_ESTIMATE_NS)
}

/// Largest cost of one page of a put. In the worst case, the page replaces another page, and
/// evictions are needed for both the pool and the tenant's limit.
pub const PUT_NS_MAX: u64 = PUT_NS + (1 + 2 * EVICTIONS_PER_PUT_PAGE as u64) * EVICT_NS;

/// Largest cost of one call of the estimator in a get or in a reference request (REF). In the worst
/// case, the call walks over all sampled keys.
pub(crate) const ESTIMATE_NS_MAX: u64 = SAMPLES_MAX as u64 * FOLLOWED_NS;

/// Largest cost of one page of a reference request (REF). It allows for a caller that drops the
/// page instead of keeping it, which costs more.
pub const REF_NS_MAX: u64 = REF_NS + DROP_NS + ESTIMATE_NS_MAX;

/// Largest cost of one page of a get. In the worst case, the page is stored in zstd form and is
/// retained (an earlier get returned it and left it in the pool). For a retained page, the get
/// first does the work of the reference request (REF) that the guest should have sent before.
pub const GET_NS_MAX: u64 = GET_DENSE_NS + REF_NS + 2 * ESTIMATE_NS_MAX;

/// Smallest budget in nanoseconds with which [`flush_some`](crate::Tenant::flush_some) always makes
/// progress. The largest step of a flush removes all keys that the estimator follows (samples).
pub const FLUSH_NS_MIN: u64 = RANGE_NS + SAMPLES_MAX as u64 * (FOLLOWED_NS + DROP_ESTIMATE_NS);

/// Largest cost of destroying a pool. The estimator stops following the pool's keys at once, and
/// background work frees the pool's pages later.
pub const DESTROY_NS_MAX: u64 = FLUSH_NS_MIN;
