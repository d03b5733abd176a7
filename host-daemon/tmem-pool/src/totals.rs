// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sums that any thread may read without a lock.

use crate::sync::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A sum that threads change atomically. Relaxed memory order suffices: each sum is correct by
/// itself, and no code relies on the order in which two sums change.
#[derive(Debug, Default)]
pub(crate) struct Sum(AtomicU64);

impl Sum {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(
            before >= n,
            "subtracting {n} would make a counter with the value {before} negative"
        );
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Changes one part of the sum, such as that of one tenant, from `before` to `now`.
    pub(crate) fn change(&self, before: u64, now: u64) {
        self.add(now);
        self.sub(before);
    }
}

/// Sums over all tenants. The number of blobs (stored contents) is
/// not among them, because the heap counts it.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Memory of all tenants' indexes and eviction policies in bytes, including dropped pages that
    /// are not freed yet.
    pub index_bytes: Sum,
    /// Number of tenants, departed or not, that have detached pages (dropped, and not freed yet).
    pub tenants_with_detached: Sum,
    /// Number of live tenants and of removed tenants whose pages are not all freed yet.
    pub tenants: Sum,
}
