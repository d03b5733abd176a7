// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Table of equal pages: a hash table of blobs (stored page contents) that grows one bucket at a
//! time.
//!
//! The table uses linear hashing (Litwin, VLDB 1980). It has N buckets, where N is between 2^k and
//! 2^(k+1). Buckets that were already split, and the new halves, use one more bit of the hash than
//! the other buckets. So the table follows the number of blobs in small steps, and no thread waits
//! while all entries are moved to a larger table. The table shrinks in the same way. Each bucket is
//! a linked list through the blobs' records, which this file calls a chain.
//!
//! Locks: all buckets share LOCKS locks. A bucket has the same lock as the bucket that it is split
//! into or joined with. The lock `grow` serializes changes of N, and is taken before the lock of a
//! bucket.

use crate::heap::{Table, Zeroed};
use crate::poison;
use crate::sync::{AtomicU32, Mutex, MutexGuard};
use crossbeam_utils::CachePadded;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// Number of locks that all buckets share. It is a power of two, and also the smallest number of
/// buckets.
const LOCKS: u32 = 1024;

/// Load factor, as (blobs, buckets): the next bucket is split if the table has more than 4 blobs
/// for 3 buckets. Each bucket takes 4 B. With fewer buckets a put would probe more blobs.
const LOAD: (u64, u64) = (4, 3);

/// Largest number of blobs of a chain that a look-up probes. Only blobs with equal hashes make
/// longer chains, and no guest can choose pages with equal hashes without knowing the seed.
const PROBES_MAX: usize = 32;

/// Upper bound of the number of threads that have added a blob to a chain and have not counted the
/// blob yet. No process has nearly as many threads.
const UNCOUNTED_MAX: u64 = 4096;

/// Name of the table, for log messages.
const TABLE: &str = "the table of equal pages";

/// Access to the hash and the link that a blob's record stores for the table of equal pages.
pub(crate) trait Links {
    /// Returns the hash of a blob. The table uses only the lower 32 bits.
    fn hash(&self, blob: u32) -> u64;
    /// Returns the blob after `blob` in its chain, or 0 at the end of the chain. The caller holds
    /// the lock of the chain's bucket.
    fn next(&self, blob: u32) -> u32;
    /// Sets the blob that follows `blob` in its chain, where 0 means the end of the chain. The
    /// caller holds the lock of the chain's bucket.
    fn set_next(&self, blob: u32, next: u32);
}

/// Bucket of the table: the number of the first blob of its chain, or 0.
#[derive(Debug)]
pub(crate) struct Bucket(AtomicU32);

// SAFETY: zero is a valid value and means an empty chain.
unsafe impl Zeroed for Bucket {}

#[derive(Debug)]
pub(crate) struct Dedup {
    buckets: Table<Bucket>,
    /// Number of buckets, N. A thread changes it while it holds `grow` and the lock of the bucket
    /// that it splits or joins. So the bucket of a hash does not change while a thread holds that
    /// bucket's lock.
    nr_buckets: AtomicU32,
    nr_blobs: CachePadded<AtomicU32>,
    locks: Box<[Mutex<()>]>,
    grow: CachePadded<Mutex<()>>,
}

/// A bucket and its chain of blobs, locked for the lifetime of this value.
pub(crate) struct Chain<'a> {
    bucket: &'a Bucket,
    _lock: MutexGuard<'a, ()>,
}

impl Dedup {
    /// Creates a table for up to `blobs_max` blobs.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(crate) fn new(blobs_max: usize) -> io::Result<Dedup> {
        Ok(Dedup {
            buckets: Table::reserve(blobs_max.max(LOCKS as usize))?,
            nr_buckets: AtomicU32::new(LOCKS),
            nr_blobs: CachePadded::default(),
            locks: (0..LOCKS).map(|_| Mutex::default()).collect(),
            grow: CachePadded::default(),
        })
    }

    /// Returns whether the table's memory is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.buckets.is_locked()
    }

    /// Returns the memory of the buckets in use, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.nr_buckets.load(Relaxed)) * size_of::<Bucket>() as u64
    }

    /// Returns the number of the bucket to which a hash belongs.
    fn bucket_of(&self, hash: u64) -> u32 {
        let nr = self.nr_buckets.load(Relaxed);
        let bucket = hash as u32 & (nr.next_power_of_two() - 1);
        if bucket < nr {
            bucket
        } else {
            // The bucket for the hash with one more bit does not exist yet. The blob is in the
            // bucket that will be split to make it.
            bucket & (nr.next_power_of_two() / 2 - 1)
        }
    }

    fn lock_of(&self, hash: u64) -> MutexGuard<'_, ()> {
        // A hash belongs to different buckets as the table grows, and all of these share one lock.
        poison::guard_or_abort(self.locks[(hash as u32 % LOCKS) as usize].lock(), TABLE)
    }

    /// Locks and returns the chain that contains all blobs with this hash that the table lists.
    pub(crate) fn lock(&self, hash: u64) -> Chain<'_> {
        let lock = self.lock_of(hash);
        Chain {
            bucket: self.buckets.get(self.bucket_of(hash)),
            _lock: lock,
        }
    }

    /// Prefetches the bucket of a hash into the cache.
    pub(crate) fn prefetch(&self, hash: u64) {
        self.buckets.prefetch(self.bucket_of(hash));
    }

    /// Returns the first blob of a hash's chain, or 0. The value is only a hint, because it is read
    /// without the lock.
    pub(crate) fn first(&self, hash: u64) -> u32 {
        self.buckets.get(self.bucket_of(hash)).0.load(Relaxed)
    }

    /// Adds a blob that the table does not list yet to the chain of its hash, and releases the
    /// chain's lock.
    pub(crate) fn add(&self, links: &impl Links, chain: Chain<'_>, blob: u32) {
        links.set_next(blob, chain.bucket.0.load(Relaxed));
        chain.bucket.0.store(blob, Relaxed);
        drop(chain);
        self.nr_blobs.fetch_add(1, Relaxed);
        self.fit(links);
    }

    /// Removes a listed blob from the table.
    pub(crate) fn remove(&self, links: &impl Links, blob: u32) {
        let chain = self.lock(links.hash(blob));
        let next = links.next(blob);
        let mut at = chain.bucket.0.load(Relaxed);
        if at == blob {
            chain.bucket.0.store(next, Relaxed);
        } else {
            let mut left = self.chain_max();
            while links.next(at) != blob {
                at = links.next(at);
                if at == 0 || left == 0 {
                    poison::abort_inconsistent(TABLE);
                }
                left -= 1;
            }
            links.set_next(at, next);
        }
        drop(chain);
        self.nr_blobs.fetch_sub(1, Relaxed);
        self.fit(links);
    }

    /// Returns an upper bound of the number of blobs in a chain. A walk that passes more blobs is
    /// in a loop.
    fn chain_max(&self) -> u64 {
        u64::from(self.nr_blobs.load(Relaxed)) + UNCOUNTED_MAX
    }

    /// Splits or joins buckets if the load factor requires it, unless another thread is doing so.
    fn fit(&self, links: &impl Links) {
        let (nr, blobs) = (self.nr_buckets.load(Relaxed), self.nr_blobs.load(Relaxed));
        // Number of buckets that the table should have for this number of blobs.
        let wanted = u64::from(blobs) * LOAD.1 / LOAD.0;
        if wanted > nr.into() && (nr as usize) < self.buckets.capacity() {
            if let Ok(_grow) = self.grow.try_lock() {
                self.split(links);
            }
        } else if nr > LOCKS
            && wanted < (nr / 2).into()
            && let Ok(_grow) = self.grow.try_lock()
        {
            // Join two pairs of buckets for each removed blob, so that the table shrinks at least
            // as fast as the number of blobs.
            self.join(links);
            self.join(links);
        }
    }

    fn split(&self, links: &impl Links) {
        let new = self.nr_buckets.load(Relaxed);
        let half = (new + 1).next_power_of_two() / 2;
        let old = new - half;
        let _lock = self.lock_of(old.into());
        let mut chains = [0; 2];
        let mut left = self.chain_max();
        let mut blob = self.buckets.get(old).0.load(Relaxed);
        while blob != 0 {
            let next = links.next(blob);
            let chain = &mut chains[usize::from(links.hash(blob) as u32 & half != 0)];
            links.set_next(blob, *chain);
            *chain = blob;
            blob = next;
            if left == 0 {
                poison::abort_inconsistent(TABLE);
            }
            left -= 1;
        }
        for (bucket, chain) in [old, new].into_iter().zip(chains) {
            self.buckets.get(bucket).0.store(chain, Relaxed);
        }
        self.nr_buckets.store(new + 1, Relaxed);
    }

    fn join(&self, links: &impl Links) {
        let new = self.nr_buckets.load(Relaxed) - 1;
        if new < LOCKS {
            return;
        }
        let half = (new + 1).next_power_of_two() / 2;
        let old = self.buckets.get(new - half);
        let _lock = self.lock_of(new.into());
        let gone = self.buckets.get(new);
        let mut blob = gone.0.load(Relaxed);
        gone.0.store(0, Relaxed);
        let mut left = self.chain_max();
        while blob != 0 {
            let next = links.next(blob);
            links.set_next(blob, old.0.load(Relaxed));
            old.0.store(blob, Relaxed);
            blob = next;
            if left == 0 {
                poison::abort_inconsistent(TABLE);
            }
            left -= 1;
        }
        self.nr_buckets.store(new, Relaxed);
    }

    /// Calls `listed` with each blob of the table, and asserts that the blob is in the bucket of
    /// its hash.
    pub(crate) fn check(&self, links: &impl Links, mut listed: impl FnMut(u32)) {
        let mut blobs = 0;
        for bucket in 0..self.nr_buckets.load(Relaxed) {
            let mut blob = self.buckets.get(bucket).0.load(Relaxed);
            while blob != 0 {
                assert_eq!(
                    self.bucket_of(links.hash(blob)),
                    bucket,
                    "blob {blob} is in a bucket that is not that of its hash"
                );
                listed(blob);
                blobs += 1;
                blob = links.next(blob);
            }
        }
        assert_eq!(
            blobs,
            self.nr_blobs.load(Relaxed),
            "the blob count of the table of equal pages differs from the number of blobs in its chains"
        );
    }
}

impl Chain<'_> {
    /// Returns the first blob of the chain for which `wanted` is true. Probes a bounded number of
    /// blobs.
    pub(crate) fn find(&self, links: &impl Links, wanted: impl Fn(u32) -> bool) -> Option<u32> {
        let mut blob = self.bucket.0.load(Relaxed);
        for _ in 0..PROBES_MAX {
            if blob == 0 || wanted(blob) {
                break;
            }
            blob = links.next(blob);
        }
        (blob != 0 && wanted(blob)).then_some(blob)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::BTreeSet;

    struct Blobs(Vec<(AtomicU32, u64)>);

    impl Links for Blobs {
        fn hash(&self, blob: u32) -> u64 {
            self.0[blob as usize].1
        }

        fn next(&self, blob: u32) -> u32 {
            assert!(
                blob != 0,
                "blob number 0 is in use, although 0 means that there is no blob"
            );
            self.0[blob as usize].0.load(Relaxed)
        }

        fn set_next(&self, blob: u32, next: u32) {
            self.0[blob as usize].0.store(next, Relaxed);
        }
    }

    /// Returns a table of nine blobs with equal hashes, which form one chain.
    fn one_chain() -> (Dedup, Blobs) {
        let blobs = Blobs((0..10).map(|_| (AtomicU32::new(0), 5)).collect());
        let table = Dedup::new(5_000).expect("cannot reserve address space for the hash table");
        (1..10).for_each(|blob| table.add(&blobs, table.lock(5), blob));
        (table, blobs)
    }

    #[test]
    #[ignore = "ends its process: see damaged_hash_chains_of_the_dedup_table_abort_the_process"]
    fn removing_an_unlisted_blob_from_the_dedup_table_aborts() {
        let (table, blobs) = one_chain();
        blobs.set_next(5, 0);
        table.remove(&blobs, 1);
    }

    #[test]
    #[ignore = "ends its process: see damaged_hash_chains_of_the_dedup_table_abort_the_process"]
    fn removing_a_blob_from_a_circular_hash_chain_aborts() {
        let (table, blobs) = one_chain();
        blobs.set_next(5, 9);
        table.remove(&blobs, 1);
    }

    #[test]
    #[ignore = "ends its process: see damaged_hash_chains_of_the_dedup_table_abort_the_process"]
    fn splitting_a_circular_hash_chain_aborts() {
        let (table, blobs) = one_chain();
        // Use `Circle`, whose links cannot be changed. A split reverses each link that it passes,
        // so it would turn an ordinary circular chain into one that ends.
        let circle = Circle(blobs);
        let chain = table.lock(5);
        chain.bucket.0.store(1, Relaxed);
        drop(chain);
        (0..=5).for_each(|_| table.split(&circle));
    }

    #[test]
    #[ignore = "ends its process: see damaged_hash_chains_of_the_dedup_table_abort_the_process"]
    fn joining_circular_hash_chains_aborts() {
        let (table, blobs) = one_chain();
        table.split(&blobs);
        table.buckets.get(LOCKS).0.store(1, Relaxed);
        table.join(&Circle(blobs));
    }

    /// Blobs in a damaged chain, on which a walk never ends: each blob is its own successor, and
    /// `set_next` has no effect.
    struct Circle(Blobs);

    impl Links for Circle {
        fn hash(&self, blob: u32) -> u64 {
            self.0.hash(blob)
        }

        fn next(&self, blob: u32) -> u32 {
            blob
        }

        fn set_next(&self, _blob: u32, _next: u32) {}
    }

    #[test]
    #[cfg(not(miri))]
    fn damaged_hash_chains_of_the_dedup_table_abort_the_process() {
        for name in [
            "removing_an_unlisted_blob_from_the_dedup_table_aborts",
            "removing_a_blob_from_a_circular_hash_chain_aborts",
            "splitting_a_circular_hash_chain_aborts",
            "joining_circular_hash_chains_aborts",
        ] {
            crate::tests::aborts(&format!("dedup::tests::{name}"));
        }
    }

    #[test]
    fn dedup_table_lists_the_same_blobs_as_a_set_model() {
        const BLOBS: u32 = 20_000;
        for_each_seed(
            "dedup_table_lists_the_same_blobs_as_a_set_model",
            4,
            |seed| {
                let mut rng = Rng::new(seed);
                let hash = |i: u32, rng: &mut Rng| {
                    if i.is_multiple_of(100) {
                        u64::from(i % 700)
                    } else {
                        rng.next()
                    }
                };
                let blobs = (0..BLOBS).map(|i| (AtomicU32::new(0), hash(i, &mut rng)));
                let blobs = Blobs(blobs.collect());
                let table = Dedup::new(BLOBS as usize)
                    .expect("cannot reserve address space for the hash table");
                let mut listed = BTreeSet::new();
                for step in 0..60_000 {
                    let blob = 1 + rng.below(u64::from(BLOBS) - 1) as u32;
                    let found = table
                        .lock(blobs.hash(blob))
                        .find(&blobs, |other| other == blob);
                    // Every hundredth blob has a hash that other blobs have, too. Their chains are so
                    // long that a look-up does not find all blobs.
                    if !blob.is_multiple_of(100) {
                        assert_eq!(found.is_some(), listed.contains(&blob));
                    }
                    // The first steps mostly add blobs, until the table lists nearly all of them. The
                    // later steps mostly remove blobs.
                    let add = rng.below(60_000) > step;
                    if add && listed.insert(blob) {
                        table.add(&blobs, table.lock(blobs.hash(blob)), blob);
                    } else if !add && listed.remove(&blob) {
                        table.remove(&blobs, blob);
                    }
                    if step % 4000 == 0 {
                        let mut found = BTreeSet::new();
                        table.check(&blobs, |blob| assert!(found.insert(blob)));
                        assert_eq!(found, listed);
                    }
                }
                for blob in listed {
                    table.remove(&blobs, blob);
                }
                table.check(&blobs, |_| {
                    panic!("the table of equal pages lists a blob after all blobs were removed")
                });
                assert_eq!(table.bytes(), u64::from(LOCKS) * 4);
            },
        );
    }
}
