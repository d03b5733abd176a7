// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ghost table: fingerprints (short hashes) of the keys of pages that left the pool a short time
//! ago, each with the way in which its page was removed.
//!
//! The table is set-associative: a bucket is a queue of eight 14-bit fingerprints, and adding a
//! fingerprint drops the oldest one. About one unknown page in two thousand is mistaken for a known
//! one, which an eviction policy tolerates.
//!
//! The table grows and shrinks with the number of the tenant's pages, by linear hashing (Litwin,
//! VLDB 1980). One call splits or joins at most one bucket. So each call holds the tenant's lock
//! for a short time, and a change of size drops no more than a bucket's fingerprints. A fingerprint
//! does not contain the bit of the hash that selects the half of a split bucket. Therefore a split
//! copies the bucket to both halves. The copy of a fingerprint in the wrong half is never looked
//! up, and later fingerprints replace it.

use crate::heap;
use crate::index::{BUCKETS_MIN, Buckets, Chunks, parent};
use std::ptr;
use std::sync::Arc;

/// Number of fingerprints (short hashes of keys) in a bucket. They take a quarter of a cache line.
const WAYS: usize = 8;

/// Bucket of a ghost table: fingerprints (short hashes of keys), the oldest first. 0 means no
/// fingerprint.
type Bucket = [u16; WAYS];

/// Number of removed pages that the table can remember for each page that the tenant has. With 1,
/// 1.5 and 3, the hit ratio was lower (docs/traces.md).
const REMEMBERED_PER_PAGE: usize = 2;

/// Factor for shrinking: the table shrinks when it has more than this many times the buckets that
/// it needs. The factor keeps the table from growing and shrinking alternately.
const SHRINK_AT: usize = 2;

/// Way in which a page was removed from the pool. The ghost table stores the value in two bits
/// beside the fingerprint of the page's key. 0 in these bits means that there is no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// A get removed the page: the guest has it again.
    Got = 1,
    /// The page was evicted from the policy's small queue.
    Small = 2,
    /// The page was evicted from the policy's main queue.
    Main = 3,
}

const PAST: u16 = 3;

#[derive(Debug)]
pub(super) struct Ghost {
    buckets: Buckets<Bucket>,
}

/// Returns the number of buckets that the table needs for a tenant with this many pages.
fn wanted(pages: u32) -> usize {
    (pages as usize * REMEMBERED_PER_PAGE / WAYS).max(BUCKETS_MIN)
}

impl Ghost {
    /// Creates an empty ghost table. It remembers nothing before the first call of
    /// [`fit`](Self::fit).
    pub(super) fn new(chunks: Arc<Chunks>) -> Ghost {
        Ghost {
            buckets: Buckets::new(chunks),
        }
    }

    /// Fits the table's size to `pages`, the tenant's number of pages: splits or joins one bucket
    /// if the table is too small or too large. The policy calls this function after each page that
    /// it adds or removes. If an allocation fails, the table keeps its size.
    pub(super) fn fit(&mut self, pages: u32) {
        let (wanted, now) = (wanted(pages), self.buckets.len());
        if now < wanted {
            self.split();
        } else if now > wanted * SHRINK_AT {
            self.join();
        }
    }

    fn split(&mut self) {
        if self.buckets.len() == 0 {
            self.buckets.create_first_buckets();
            return;
        }
        let bucket = self.buckets[parent(self.buckets.len())];
        self.buckets.push(bucket);
    }

    /// Joins the last bucket with the bucket from which it was split. The joined bucket keeps the
    /// newest fingerprints of both.
    fn join(&mut self) {
        let Some(last) = self.buckets.pop() else {
            return;
        };
        let parent = parent(self.buckets.len());
        let other = self.buckets[parent];
        let mut joined: Bucket = [0; WAYS];
        let mut left = WAYS;
        for way in last.into_iter().zip(other).rev().flat_map(<[u16; 2]>::from) {
            if left > 0 && way != 0 && !joined.contains(&way) {
                left -= 1;
                joined[left] = way;
            }
        }
        self.buckets[parent] = joined;
    }

    /// Prefetches the bucket of a key with this hash into the cache.
    pub(super) fn prefetch(&self, key_hash: u64) {
        if let Some(nr) = self.buckets.bucket_of(key_hash) {
            heap::prefetch(ptr::from_ref(&self.buckets[nr]).cast());
        }
    }

    /// Returns the bucket and the fingerprint of a key with this hash. Returns None if the table
    /// has no memory yet.
    fn place(&mut self, key_hash: u64) -> Option<(&mut Bucket, u16)> {
        let nr = self.buckets.bucket_of(key_hash)?;
        let fingerprint = (key_hash >> 48) as u16 & !PAST;
        Some((&mut self.buckets[nr], fingerprint))
    }

    /// Remembers the key of a page that is removed from the pool, and the way in which the page is
    /// removed.
    pub(super) fn add(&mut self, key_hash: u64, past: Past) {
        if let Some((bucket, fingerprint)) = self.place(key_hash) {
            bucket.rotate_left(1);
            bucket[WAYS - 1] = fingerprint | past as u16;
        }
    }

    /// Removes a key from the table. Returns how the key's page was removed from the pool, or None
    /// if the table does not have the key.
    pub(super) fn take(&mut self, key_hash: u64) -> Option<Past> {
        let (bucket, fingerprint) = self.place(key_hash)?;
        let same = |&way: &u16| way & !PAST == fingerprint && way & PAST != 0;
        let at = bucket.iter().rposition(same)?;
        let past = match bucket[at] & PAST {
            1 => Past::Got,
            2 => Past::Small,
            _ => Past::Main,
        };
        bucket[..=at].rotate_right(1);
        bucket[0] = 0;
        Some(past)
    }

    /// Returns the memory of the table in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.buckets.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fail;
    use crate::tests::rng::Rng;

    const PASTS: [Past; 3] = [Past::Got, Past::Small, Past::Main];

    fn past(key: u64) -> Past {
        PASTS[key as usize % 3]
    }

    /// Returns a ghost table that has grown step by step to the size for a tenant with this many
    /// pages.
    fn table(pages: u32) -> Ghost {
        let mut ghost = Ghost::new(Chunks::some());
        (0..=pages).for_each(|pages| ghost.fit(pages));
        ghost
    }

    fn keys(seed: u64, count: usize) -> Vec<u64> {
        let mut rng = Rng::new(seed);
        (0..count).map(|_| rng.next()).collect()
    }

    /// Returns how many of the keys the ghost table has, and removes them from the table.
    fn known(ghost: &mut Ghost, keys: &[u64]) -> usize {
        let known = |&&key: &&u64| ghost.take(key) == Some(past(key));
        keys.iter().filter(known).count()
    }

    fn buckets(ghost: &Ghost) -> Vec<Bucket> {
        let buckets = (0..ghost.buckets.len()).map(|nr| ghost.buckets[nr]);
        buckets.collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn a_full_ghost_table_forgets_its_oldest_pages() {
        let mut ghost = Ghost::new(Chunks::some());
        ghost.add(1, Past::Got);
        assert_eq!(
            ghost.take(1),
            None,
            "take() found a key in a ghost table that has no memory yet"
        );
        ghost = table(2048);
        let (added, unknown) = (keys(3, 16_384), keys(4, 16_384));
        added.iter().for_each(|&key| ghost.add(key, past(key)));
        assert!(known(&mut ghost, &unknown) < 16);
        assert!(known(&mut ghost, &added[..8192]) < 600);
        let newest = &added[16_384 - 2048..];
        assert!(known(&mut ghost, newest) > 1950);
        assert_eq!(
            known(&mut ghost, newest),
            0,
            "the ghost table still has keys that take() removed"
        );
    }

    #[test]
    fn each_resize_step_of_the_ghost_table_changes_at_most_one_bucket() {
        // In Miri, the test would take hours with 4,000 pages.
        const PAGES: u32 = if cfg!(miri) { 600 } else { 4000 };
        let mut ghost = Ghost::new(Chunks::some());
        ghost.fit(0);
        let mut rng = Rng::new(5);
        let mut before = buckets(&ghost);
        for pages in (1..PAGES).chain((0..PAGES).rev()) {
            ghost.fit(pages);
            let mut after = buckets(&ghost);
            assert!(
                after.len().abs_diff(before.len()) <= 1,
                "the resize step for {pages} pages changed the number of buckets by more than \
                 one, from {} to {}",
                before.len(),
                after.len()
            );
            let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert!(
                changed <= 1,
                "the resize step for {pages} pages changed {changed} buckets, more than one"
            );
            // Add a fingerprint to a random bucket, so that all buckets fill, also those that the
            // table has just added.
            let (nr, key) = (rng.below(after.len() as u64) as usize, rng.next());
            let bucket = &mut ghost.buckets[nr];
            bucket.rotate_left(1);
            bucket[WAYS - 1] = key as u16 | 1;
            after[nr] = *bucket;
            before = after;
        }
        assert_eq!(before.len(), BUCKETS_MIN * SHRINK_AT);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn growing_the_ghost_table_keeps_all_keys() {
        let mut ghost = table(2048);
        let keys = keys(6, 1024);
        keys.iter().for_each(|&key| ghost.add(key, past(key)));
        for pages in 2048..60_000 {
            ghost.fit(pages);
            let key = keys[pages as usize % keys.len()];
            assert_eq!(
                ghost.take(key),
                Some(past(key)),
                "the ghost table lost a key when it grew for {pages} pages"
            );
            ghost.add(key, past(key));
        }
        assert_eq!(known(&mut ghost, &keys), keys.len());
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn shrinking_the_ghost_table_keeps_the_newest_keys() {
        let mut ghost = table(16_384);
        let keys = keys(7, 60_000);
        keys.iter().for_each(|&key| ghost.add(key, past(key)));
        let buckets = ghost.buckets.len();
        (4096..16_384).rev().for_each(|pages| ghost.fit(pages));
        assert_eq!(ghost.buckets.len(), buckets / 2);
        let known = known(&mut ghost, &keys[keys.len() - 4096..]);
        assert!(
            known > 3900,
            "the shrunk ghost table has only {known} of the newest 4,096 keys"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn shrinking_the_ghost_table_releases_its_memory() {
        let chunks = Chunks::some();
        let mut ghost = Ghost::new(Arc::clone(&chunks));
        assert_eq!(ghost.bytes(), 0);
        (0..40_000).for_each(|pages| ghost.fit(pages));
        // The table for 40,000 pages consists of fingerprints of two bytes each.
        let bytes = 40_000 * REMEMBERED_PER_PAGE as u64 * 2;
        assert!(
            ghost.bytes().abs_diff(bytes) < 8192,
            "the ghost table for 40,000 pages takes {} B, not about {bytes} B",
            ghost.bytes()
        );
        assert_eq!(chunks.taken(), 5);
        (0..40_000).rev().for_each(|pages| ghost.fit(pages));
        assert!(
            ghost.bytes() <= 1024 + (32 << 10),
            "the shrunk ghost table takes {} B, more than 33 KiB",
            ghost.bytes()
        );
        assert_eq!(chunks.taken(), 1);
        drop(ghost);
        assert_eq!(chunks.taken(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn a_ghost_table_that_cannot_grow_keeps_its_keys() {
        let mut ghost = table(2048);
        ghost.add(8, Past::Main);
        fail::one_in(1, 1);
        (2048..40_000).for_each(|pages| ghost.fit(pages));
        let without_memory = ghost.buckets.len();
        fail::one_in(0, 1);
        assert!(
            without_memory < wanted(40_000),
            "the ghost table grew to {without_memory} buckets although all allocations failed"
        );
        assert_eq!(ghost.take(8), Some(Past::Main));
        (0..10_000).for_each(|_| ghost.fit(40_000));
        assert_eq!(ghost.buckets.len(), wanted(40_000));
    }
}
