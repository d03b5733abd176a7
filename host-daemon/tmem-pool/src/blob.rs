// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stored page contents, one copy of equal pages of a trust domain.
//!
//! A blob is immutable and lives as long as an entry refers to it. The dedup table only knows where
//! an equal page may be: it holds no reference of its own, and whoever finds a blob through it
//! compares every byte before sharing it. It must never join pages of two domains, nor pages that
//! only hash alike.
//!
//! Locks: a shard's lock guards that part of the table. It is the innermost lock of the engine,
//! held for one look-up; no blob may be dropped under it, since the last drop takes it.

use crate::account::Account;
use crate::codec::{self, COMPRESSED_BYTES_MAX, Corrupt};
use crate::config::{DEDUP_SHARDS_MAX, PAGE_SIZE, POOL_BYTES_PER_DEDUP_SHARD, Page};
use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use zeroize::optimization_barrier;

/// A trust domain; never reused.
pub(crate) type DomainId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DedupKey {
    domain: DomainId,
    // Two halves instead of u128, whose alignment would cost a slot 8 bytes.
    hash: [u64; 2],
}

/// The stored form of one page's contents.
#[derive(Debug)]
pub(crate) struct Blob {
    data: Box<[u8]>,
    key: DedupKey,
    store: Arc<Store>,
}

impl Blob {
    /// Stored bytes, which is what the page is charged.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.data.len() as u64
    }

    pub(crate) fn read(&self, out: &mut Page) -> Result<(), Corrupt> {
        codec::decompress(&self.data, out)
    }

    pub(crate) fn domain(&self) -> DomainId {
        self.key.domain
    }

    fn equals(&self, page: &Page) -> bool {
        if self.data.len() == PAGE_SIZE {
            return *self.data == page[..];
        }
        let mut mine = [0; PAGE_SIZE];
        self.read(&mut mine).is_ok() && mine == *page
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        self.store.unlist(self);
        self.store.account.payload_bytes.sub(self.stored_bytes());
        self.store.account.blobs.sub(1);
        // Always, not only when a VM has left: what an eviction frees today must not lie in the
        // heap when its VM leaves tomorrow. It is in the cache, so this costs little.
        self.data.fill(0);
        optimization_barrier(&*self.data);
    }
}

const POISONED: &str = "a panic under a dedup shard's lock left it unknown";

type Shard = HashMap<DedupKey, Weak<Blob>>;

/// All blobs' accounting and the table that finds equal ones.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) account: Account,
    shards: Box<[Mutex<Shard>]>,
}

impl Store {
    /// `size_bytes` is the pool's, to choose the number of shards.
    pub(crate) fn new(size_bytes: u64) -> Store {
        let wanted = size_bytes.div_ceil(POOL_BYTES_PER_DEDUP_SHARD);
        let shards = wanted.clamp(1, DEDUP_SHARDS_MAX as u64).next_power_of_two();
        Store {
            account: Account::default(),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
        }
    }

    /// Finds an equal page's blob in the domain or makes one. True: it was found.
    pub(crate) fn intern(
        self: &Arc<Store>,
        domain: DomainId,
        hash: u128,
        page: &Page,
    ) -> (Arc<Blob>, bool) {
        let key = DedupKey {
            domain,
            hash: [hash as u64, (hash >> 64) as u64],
        };
        let candidate = self.shard(&key).get(&key).and_then(Weak::upgrade);
        if let Some(blob) = candidate.filter(|blob| blob.equals(page)) {
            return (blob, true);
        }
        let mut buffer = [0; COMPRESSED_BYTES_MAX];
        let data: Box<[u8]> = codec::compress(page, &mut buffer).into();
        self.account.payload_bytes.add(data.len() as u64);
        self.account.blobs.add(1);
        let blob = Arc::new(Blob {
            data,
            key,
            store: Arc::clone(self),
        });
        self.list(&blob);
        (blob, false)
    }

    fn shard(&self, key: &DedupKey) -> MutexGuard<'_, Shard> {
        // The low half picks the slot within the shard, and a power of two of shards.
        let shard = key.hash[1] as usize & (self.shards.len() - 1);
        self.shards[shard].lock().expect(POISONED)
    }

    /// Makes a new blob findable. One place for each hash, so that probing is bounded: a page that
    /// collides with a live one is stored and not shared.
    fn list(&self, blob: &Arc<Blob>) {
        match self.shard(&blob.key).entry(blob.key) {
            Slot::Vacant(slot) => {
                slot.insert(Arc::downgrade(blob));
            }
            Slot::Occupied(mut slot) if slot.get().strong_count() == 0 => {
                slot.insert(Arc::downgrade(blob));
            }
            Slot::Occupied(_) => {}
        }
    }

    fn unlist(&self, blob: &Blob) {
        let mut shard = self.shard(&blob.key);
        if let Slot::Occupied(slot) = shard.entry(blob.key)
            && std::ptr::eq(slot.get().as_ptr(), blob)
        {
            slot.remove();
            // Give memory back after a shrink; a quarter, so that growing again is not next.
            if shard.capacity() > 64 && shard.len() < shard.capacity() / 4 {
                let len = shard.len();
                shard.shrink_to(len * 2);
            }
        }
    }

    /// What the table lists is among the live blobs and in its place.
    pub(crate) fn check_listed(&self, live: &HashSet<*const Blob>) {
        for shard in &self.shards {
            for (key, blob) in &*shard.lock().expect(POISONED) {
                assert!(
                    live.contains(&blob.as_ptr()),
                    "the dedup table lists a freed blob"
                );
                // Not the last reference, an entry has one: nothing is dropped under the lock.
                let blob = blob.upgrade().expect("no call is in progress");
                assert_eq!(blob.key, *key, "place in the dedup table");
            }
        }
    }
}

#[cfg(test)]
impl Blob {
    /// A damaged copy, as a bad memory cell would leave it.
    pub(crate) fn damaged(&self, at: usize) -> Blob {
        let mut data = self.data.clone();
        let at = at % data.len();
        data[at] ^= 0x10;
        self.store.account.payload_bytes.add(data.len() as u64);
        self.store.account.blobs.add(1);
        Blob {
            data,
            key: self.key,
            store: Arc::clone(&self.store),
        }
    }
}
