// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sums that every thread reads without a lock.

use crate::sync::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A sum. Relaxed: each sum is right by itself, and nothing is inferred from the order of two.
#[derive(Debug, Default)]
pub(crate) struct Sum(AtomicU64);

impl Sum {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "a sum went below zero: {before} - {n}");
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Brings a part of it, which was `before`, to `now`.
    pub(crate) fn change(&self, before: u64, now: u64) {
        self.add(now);
        self.sub(before);
    }
}

/// What tenants hold beside blobs, and what was done.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Memory of all indexes and policies, detached parts included.
    pub index_bytes: Sum,
    /// Live ones and those that left and are not freed yet.
    pub tenants: Sum,
    /// Stored copies that compaction has moved, ever.
    pub moved_blobs: Sum,
}
