// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the pool holds, as sums that every thread reads without a lock.
//!
//! Each thing is added where it is made and subtracted where it is freed, by the same file, so
//! detached but not yet freed memory still counts. Payload is exact; metadata is number times the
//! estimate in `config.rs`.

use crate::config::{
    BLOB_METADATA_BYTES, DEDUP_SLOT_BYTES, KEY_METADATA_BYTES, OBJECT_METADATA_BYTES,
    POOL_METADATA_BYTES, QUEUE_METADATA_BYTES, TENANT_METADATA_BYTES,
};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
}

/// Everything that a pool holds, of all tenants.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Bytes of stored page contents.
    pub payload_bytes: Sum,
    pub blobs: Sum,
    pub keys: Sum,
    pub objects: Sum,
    pub pools: Sum,
    pub tenants: Sum,
}

impl Account {
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.blobs.get() * (BLOB_METADATA_BYTES + DEDUP_SLOT_BYTES)
            + self.keys.get() * (KEY_METADATA_BYTES + QUEUE_METADATA_BYTES)
            + self.objects.get() * OBJECT_METADATA_BYTES
            + self.pools.get() * POOL_METADATA_BYTES
            + self.tenants.get() * TENANT_METADATA_BYTES
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.payload_bytes.get() + self.metadata_bytes()
    }
}
