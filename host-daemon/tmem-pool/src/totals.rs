// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sums that any thread may read without a lock.

use crate::sync::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A sum that threads change atomically. Relaxed memory order suffices, because each sum is correct
/// by itself and no code relies on the order of changes to two sums.
#[derive(Debug, Default)]
pub(crate) struct Sum(AtomicU64);

impl Sum {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "a sum would become negative: {before} - {n}");
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Changes one contribution to the sum from `before` to `now`.
    pub(crate) fn change(&self, before: u64, now: u64) {
        self.add(now);
        self.sub(before);
    }
}

/// Sums over all tenants, and counters of finished work. The number of blobs is not among them,
/// because the heap counts blobs.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Memory of all indexes and policies in bytes, detached parts included.
    pub index_bytes: Sum,
    /// Number of live tenants, and of departed tenants whose pages are not freed yet.
    pub tenants: Sum,
    /// Counter: blobs that compaction has moved.
    pub moved_blobs: Sum,
}
