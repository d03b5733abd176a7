// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Table of equal pages: a hash table of blobs (stored page contents) that grows one bucket at a
//! time.
//!
//! A bucket is one cache line with [`SLOTS`] slots. A slot has the number of a blob and 16 bits of
//! the blob's tag. The blob's record has the other 32 bits, which are called the place. So a
//! look-up reads a record only if it has probably found the blob. The place selects two buckets,
//! and a new blob enters the emptier one. If both are full, up to [`MOVES`] blobs move to their
//! other bucket (cuckoo hashing, Pagh and Rodler, 2004). If that frees no slot, the new blob is not
//! listed, and no other page can share it.
//!
//! The table uses linear hashing (Litwin, VLDB 1980). It has N buckets, where N is between 2^k and
//! 2^(k+1). Buckets that were already split, and the new halves, use one more bit of the hash than
//! the other buckets. So the table follows the number of blobs in small steps, and no thread waits
//! while all entries are moved to a larger table. The table shrinks in the same way. Because of the
//! two choices, buckets that are not split yet are hardly fuller than the other buckets.
//!
//! Locks: all buckets share LOCKS locks. Both buckets of a place, and the buckets that they are
//! split into or joined with, have the same lock. The lock `grow` serializes changes of N, and is
//! taken before the lock of a bucket.

use crate::heap::{Table, Zeroed};
use crate::poison;
use crate::sync::{AtomicU32, Mutex, MutexGuard};
use crossbeam_utils::CachePadded;
use std::io;
use std::ptr;
// The slots use atomics of the standard library. The locks guard the slots, so shuttle (the library
// that tests the order of threads) need not switch threads at each access to a slot.
use std::sync::atomic::{self, AtomicU16, Ordering::Relaxed};

/// Number of locks that all buckets share. It is a power of two.
pub(crate) const LOCKS: u32 = 64;

/// Smallest number of buckets. With fewer than four buckets for each lock, the two buckets of a
/// place would often be the same one, so that more blobs would find no free slot.
const BUCKETS_MIN: u32 = 4 * LOCKS;

/// Number of blobs that a bucket can list.
const SLOTS: usize = 10;

/// Load factor, as (blobs, buckets): in addition to BUCKETS_MIN buckets, the table has 2 buckets for
/// each 17 blobs. So up to 85 % of the slots are used.
const LOAD: (u64, u64) = (17, 2);

/// Largest number of blobs that move to their other bucket so that a new blob finds a slot. With
/// one move instead of two, up to 5 in 1,000 blobs found no slot.
const MOVES: usize = 2;

/// Name of the table, for log messages.
const TABLE: &str = "the table of equal pages";

/// Access to the records of blobs. The table calls these functions only for blobs that it lists, or
/// that its caller adds.
pub(crate) trait Records {
    /// Returns the place of a blob, which selects its two buckets.
    fn place(&self, blob: u32) -> u32;
    /// Prefetches the record of a blob into the cache.
    fn prefetch(&self, blob: u32);
    /// Notes that the table does not list a blob any more, because both of its buckets are full.
    /// The caller holds the lock of these buckets.
    fn set_unlisted(&self, blob: u32);
}

/// Blob in a slot of a bucket, with the part of its tag that the slot stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Listed {
    blob: u32,
    tag: u16,
}

/// Bucket of the table: slots with blobs and their tags. The blob 0 means that the slot is free.
/// The bucket's lock guards all accesses.
#[derive(Debug)]
#[repr(align(64))]
struct Bucket {
    blobs: [atomic::AtomicU32; SLOTS],
    tags: [AtomicU16; SLOTS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

// SAFETY: zero is a valid value of atomic numbers.
unsafe impl Zeroed for Bucket {}

impl Bucket {
    fn get(&self, slot: usize) -> Listed {
        Listed {
            blob: self.blobs[slot].load(Relaxed),
            tag: self.tags[slot].load(Relaxed),
        }
    }

    fn set(&self, slot: usize, Listed { blob, tag }: Listed) {
        self.blobs[slot].store(blob, Relaxed);
        self.tags[slot].store(tag, Relaxed);
    }

    /// Returns the slot of a blob, or a free slot if `blob` is 0.
    fn slot_of(&self, blob: u32) -> Option<usize> {
        self.blobs
            .iter()
            .position(|slot| slot.load(Relaxed) == blob)
    }

    fn used(&self) -> usize {
        let used = |slot: &&atomic::AtomicU32| slot.load(Relaxed) != 0;
        self.blobs.iter().filter(used).count()
    }

    /// Lists a blob in a free slot. Returns false if there is none.
    fn push(&self, listed: Listed) -> bool {
        let free = self.slot_of(0);
        if let Some(slot) = free {
            self.set(slot, listed);
        }
        free.is_some()
    }
}

#[derive(Debug)]
pub(crate) struct Dedup {
    buckets: Table<Bucket>,
    /// Number of buckets, N. A thread changes it while it holds `grow` and the lock of the bucket
    /// that it splits or joins. So the buckets of a place do not change while a thread holds their
    /// lock.
    nr_buckets: AtomicU32,
    /// Largest N so far. The memory of joined buckets is kept. Written with `grow` held.
    nr_buckets_max: AtomicU32,
    nr_blobs: CachePadded<AtomicU32>,
    locks: Box<[CachePadded<Mutex<()>>]>,
    grow: CachePadded<Mutex<()>>,
}

/// The two buckets of a place, locked for the lifetime of this value.
pub(crate) struct Pair<'a> {
    buckets: [&'a Bucket; 2],
    _lock: MutexGuard<'a, ()>,
}

/// Returns the two hashes of a place, each of which selects a bucket. They agree in the bits that
/// select a lock.
fn hashes(place: u32) -> [u32; 2] {
    let mixed = (place ^ place >> 15).wrapping_mul(0x2c1b_3c6d);
    let mixed = (mixed ^ mixed >> 13).wrapping_mul(0x297a_2d39);
    let other = (mixed ^ mixed >> 16) & !(LOCKS - 1);
    [place, other | place & (LOCKS - 1)]
}

/// Returns the number of buckets that the table should have for this number of blobs.
fn wanted(blobs: u64) -> u64 {
    u64::from(BUCKETS_MIN) + blobs * LOAD.1 / LOAD.0
}

impl Dedup {
    /// Creates a table for up to `blobs_max` blobs.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(crate) fn new(blobs_max: usize) -> io::Result<Dedup> {
        Ok(Dedup {
            buckets: Table::reserve(wanted(blobs_max as u64) as usize)?,
            nr_buckets: AtomicU32::new(BUCKETS_MIN),
            nr_buckets_max: AtomicU32::new(BUCKETS_MIN),
            nr_blobs: CachePadded::default(),
            locks: (0..LOCKS).map(|_| CachePadded::default()).collect(),
            grow: CachePadded::default(),
        })
    }

    /// Returns whether the table's memory is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.buckets.is_locked()
    }

    /// Returns the memory of the table in bytes. It never shrinks.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.nr_buckets_max.load(Relaxed)) * size_of::<Bucket>() as u64
    }

    /// Returns the numbers of the two buckets of a place. They may be the same bucket.
    fn numbers(&self, place: u32) -> [u32; 2] {
        let nr = self.nr_buckets.load(Relaxed);
        let mask = nr.next_power_of_two() - 1;
        hashes(place).map(|hash| match hash & mask {
            bucket if bucket < nr => bucket,
            // The bucket for the hash with one more bit does not exist yet. The blob is in the
            // bucket that will be split to make it.
            _ => hash & mask >> 1,
        })
    }

    fn buckets_of(&self, place: u32) -> [&Bucket; 2] {
        self.numbers(place).map(|nr| self.buckets.get(nr))
    }

    fn lock_of(&self, bucket: u32) -> MutexGuard<'_, ()> {
        poison::guard_or_abort(self.locks[(bucket % LOCKS) as usize].lock(), TABLE)
    }

    /// Locks and returns the two buckets that list blobs with this place.
    pub(crate) fn lock(&self, place: u32) -> Pair<'_> {
        let lock = self.lock_of(place);
        Pair {
            buckets: self.buckets_of(place),
            _lock: lock,
        }
    }

    /// Prefetches the two buckets of a place into the cache.
    pub(crate) fn prefetch(&self, place: u32) {
        for nr in self.numbers(place) {
            self.buckets.prefetch(nr);
        }
    }

    /// Lists a blob in one of its two buckets, and releases the buckets' lock, which the caller has
    /// taken. The table must not list the blob yet. `tag` is the part of the blob's tag that is not
    /// in its record. If both buckets are full, calls [`Records::set_unlisted`] instead.
    pub(crate) fn add(&self, records: &impl Records, pair: Pair<'_>, blob: u32, tag: u16) {
        let listed = self.insert(records, pair.buckets, Listed { blob, tag });
        if !listed {
            records.set_unlisted(blob);
        }
        drop(pair);
        if listed {
            self.nr_blobs.fetch_add(1, Relaxed);
        }
        self.fit(records);
    }

    /// Lists a blob in the emptier of its two buckets. If both are full, moves other blobs first.
    /// Returns false if that frees no slot. The caller holds the lock of the buckets.
    fn insert(&self, records: &impl Records, buckets: [&Bucket; 2], listed: Listed) -> bool {
        let [a, b] = buckets;
        let emptier = if a.used() <= b.used() { a } else { b };
        if emptier.push(listed) {
            return true;
        }
        for moves in 1..=MOVES {
            for bucket in buckets {
                if let Some(slot) = self.free_slot(records, bucket, moves) {
                    bucket.set(slot, listed);
                    return true;
                }
            }
        }
        false
    }

    /// Copies a blob of a full bucket to the blob's other bucket. If that bucket is full as well,
    /// first frees a slot of it in the same way, with at most `moves` copied blobs in total.
    /// Returns the slot of the copied blob, which the caller overwrites. Returns None, and changes
    /// nothing, if no blob can move. The caller holds the lock of the bucket.
    #[inline(never)]
    fn free_slot(&self, records: &impl Records, bucket: &Bucket, moves: usize) -> Option<usize> {
        (0..SLOTS).find(|&slot| {
            let listed = bucket.get(slot);
            self.buckets_of(records.place(listed.blob))
                .into_iter()
                .filter(|other| !ptr::eq(*other, bucket))
                .any(|other| match moves {
                    1 => other.push(listed),
                    _ => {
                        let slot = self.free_slot(records, other, moves - 1);
                        slot.inspect(|&slot| other.set(slot, listed)).is_some()
                    }
                })
        })
    }

    /// Removes a listed blob from the table, and releases the lock of the blob's buckets, which the
    /// caller has taken.
    pub(crate) fn remove(&self, records: &impl Records, pair: Pair<'_>, blob: u32) {
        let found = pair
            .buckets
            .into_iter()
            .find_map(|bucket| Some((bucket, bucket.slot_of(blob)?)));
        let Some((bucket, slot)) = found else {
            poison::abort_inconsistent(TABLE);
        };
        bucket.set(slot, Listed::default());
        drop(pair);
        self.nr_blobs.fetch_sub(1, Relaxed);
        self.fit(records);
    }

    /// Splits or joins buckets if the load factor requires it, unless another thread is doing so.
    fn fit(&self, records: &impl Records) {
        let (nr, blobs) = (self.nr_buckets.load(Relaxed), self.nr_blobs.load(Relaxed));
        let wanted = wanted(blobs.into());
        if wanted > nr.into() && (nr as usize) < self.buckets.capacity() {
            if let Ok(_grow) = self.grow.try_lock() {
                self.split(records);
            }
        } else if wanted < (nr / 2).into()
            && let Ok(_grow) = self.grow.try_lock()
        {
            self.join(records);
        }
    }

    /// Returns the blobs of a bucket, and prefetches their records.
    fn blobs_of(records: &impl Records, bucket: &Bucket) -> [Listed; SLOTS] {
        let listed = std::array::from_fn(|slot| bucket.get(slot));
        for Listed { blob, .. } in listed {
            if blob != 0 {
                records.prefetch(blob);
            }
        }
        listed
    }

    // Not inlined: most blobs are added and removed without a split or a join, and freeing a raw
    // page needs neither.
    #[inline(never)]
    fn split(&self, records: &impl Records) {
        let nr = self.nr_buckets.load(Relaxed);
        let old_nr = nr - (nr + 1).next_power_of_two() / 2;
        let _lock = self.lock_of(old_nr);
        self.nr_buckets.store(nr + 1, Relaxed);
        let max = self.nr_buckets_max.load(Relaxed).max(nr + 1);
        self.nr_buckets_max.store(max, Relaxed);
        let [old, new] = [old_nr, nr].map(|nr| self.buckets.get(nr));
        for (slot, listed) in Self::blobs_of(records, old).into_iter().enumerate() {
            if listed.blob != 0 && !self.numbers(records.place(listed.blob)).contains(&old_nr) {
                old.set(slot, Listed::default());
                if !new.push(listed) {
                    poison::abort_inconsistent(TABLE);
                }
            }
        }
    }

    #[inline(never)]
    fn join(&self, records: &impl Records) {
        let nr = self.nr_buckets.load(Relaxed) - 1;
        if nr < BUCKETS_MIN {
            return;
        }
        let _lock = self.lock_of(nr);
        let gone = self.buckets.get(nr);
        let moved = Self::blobs_of(records, gone);
        (0..SLOTS).for_each(|slot| gone.set(slot, Listed::default()));
        self.nr_buckets.store(nr, Relaxed);
        for listed in moved.into_iter().filter(|listed| listed.blob != 0) {
            let buckets = self.buckets_of(records.place(listed.blob));
            if !self.insert(records, buckets, listed) {
                records.set_unlisted(listed.blob);
                self.nr_blobs.fetch_sub(1, Relaxed);
            }
        }
    }

    /// Calls `listed` with each blob of the table, and asserts that the blob is in a bucket of its
    /// place.
    pub(crate) fn check(&self, records: &impl Records, mut listed: impl FnMut(u32)) {
        let mut blobs = 0;
        for nr in 0..self.nr_buckets.load(Relaxed) {
            let bucket = self.buckets.get(nr);
            let used = (0..SLOTS).map(|slot| bucket.get(slot).blob);
            for blob in used.filter(|&blob| blob != 0) {
                assert!(
                    self.numbers(records.place(blob)).contains(&nr),
                    "blob {blob} is in a bucket that is not one of its place"
                );
                listed(blob);
                blobs += 1;
            }
        }
        assert_eq!(
            blobs,
            self.nr_blobs.load(Relaxed),
            "the blob count of the table of equal pages differs from the number of blobs in its buckets"
        );
    }
}

impl Pair<'_> {
    /// Returns a blob that one of the two buckets lists with this tag, and for which `wanted`
    /// returns true; None if there is no such blob.
    pub(crate) fn find(&self, tag: u16, wanted: impl Fn(u32) -> bool) -> Option<u32> {
        self.buckets.into_iter().find_map(|bucket| {
            let mut listed = (0..SLOTS).map(|slot| bucket.get(slot));
            let found = listed.find(|l| l.tag == tag && l.blob != 0 && wanted(l.blob));
            Some(found?.blob)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    /// Records of blobs: the place of each, and the set of blobs that the table does not list for
    /// lack of a slot.
    struct Blobs {
        places: Vec<u32>,
        unlisted: RefCell<BTreeSet<u32>>,
    }

    impl Blobs {
        fn new(places: Vec<u32>) -> Blobs {
            let unlisted = RefCell::default();
            Blobs { places, unlisted }
        }

        fn random(blobs: u32, rng: &mut Rng) -> Blobs {
            Blobs::new((0..blobs).map(|_| rng.next() as u32).collect())
        }
    }

    impl Records for Blobs {
        fn place(&self, blob: u32) -> u32 {
            assert!(
                blob != 0,
                "blob number 0 is in use, although 0 means that there is no blob"
            );
            self.places[blob as usize]
        }

        fn prefetch(&self, _blob: u32) {}

        fn set_unlisted(&self, blob: u32) {
            self.unlisted.borrow_mut().insert(blob);
        }
    }

    fn table(blobs_max: usize) -> Dedup {
        Dedup::new(blobs_max).expect("cannot reserve address space for the hash table")
    }

    fn add(table: &Dedup, blobs: &Blobs, blob: u32) {
        table.add(blobs, table.lock(blobs.place(blob)), blob, blob as u16);
    }

    fn remove(table: &Dedup, blobs: &Blobs, blob: u32) {
        table.remove(blobs, table.lock(blobs.place(blob)), blob);
    }

    fn listed(table: &Dedup, blobs: &Blobs) -> BTreeSet<u32> {
        let mut listed = BTreeSet::new();
        table.check(blobs, |blob| assert!(listed.insert(blob)));
        listed
    }

    #[test]
    #[ignore = "ends its process: see a_damaged_dedup_table_aborts_the_process"]
    fn removing_an_unlisted_blob_from_the_dedup_table_aborts() {
        let blobs = Blobs::new(vec![5; 3]);
        let table = table(100);
        add(&table, &blobs, 1);
        remove(&table, &blobs, 2);
    }

    #[test]
    #[ignore = "ends its process: see a_damaged_dedup_table_aborts_the_process"]
    fn splitting_an_overfull_bucket_aborts() {
        // Find a place whose two buckets, after the first split, are both bucket number
        // BUCKETS_MIN, which the split creates. So the split moves all blobs of this place there.
        // But the test has already filled that bucket, which happens only if memory is damaged.
        let place = (BUCKETS_MIN..)
            .step_by(2 * BUCKETS_MIN as usize)
            .find(|&place| hashes(place).map(|hash| hash % (2 * BUCKETS_MIN)) == [BUCKETS_MIN; 2])
            .expect("there is no such place");
        let blobs = Blobs::new(vec![place; 2 * SLOTS + 1]);
        let table = table(10_000);
        for bucket in [0, BUCKETS_MIN] {
            for nth in 1..=SLOTS as u32 {
                let blob = if bucket == 0 { nth } else { nth + SLOTS as u32 };
                table.buckets.get(bucket).push(Listed { blob, tag: 0 });
            }
        }
        table.split(&blobs);
    }

    #[test]
    #[cfg(not(miri))]
    fn a_damaged_dedup_table_aborts_the_process() {
        for name in [
            "removing_an_unlisted_blob_from_the_dedup_table_aborts",
            "splitting_an_overfull_bucket_aborts",
        ] {
            crate::tests::aborts(&format!("dedup::tests::{name}"));
        }
    }

    #[test]
    fn a_lookup_finds_only_a_blob_with_the_tag_and_the_place() {
        let blobs = Blobs::new(vec![7, 7, 7, 7 + LOCKS]);
        let table = table(100);
        (1..4).for_each(|blob| add(&table, &blobs, blob));
        let find = |place, tag| {
            let same = |blob| blobs.place(blob) == place;
            table.lock(place).find(tag, same)
        };
        assert_eq!([find(7, 1), find(7, 2)], [Some(1), Some(2)]);
        assert_eq!(find(7, 3), None, "a blob with another place was found");
        assert_eq!(find(7 + LOCKS, 3), Some(3));
        assert_eq!(find(7, 0), None, "a free slot was found as a blob");
    }

    #[test]
    fn blobs_that_find_their_buckets_full_stay_unlisted() {
        const BLOBS: u32 = 50;
        let blobs = Blobs::new(vec![5; 1 + BLOBS as usize]);
        let table = table(100);
        (1..=BLOBS).for_each(|blob| add(&table, &blobs, blob));
        let listed = listed(&table, &blobs);
        let [one, other] = table.numbers(5);
        let slots = if one == other { SLOTS } else { 2 * SLOTS };
        assert_eq!(listed.len(), slots);
        assert_eq!(blobs.unlisted.borrow().len(), BLOBS as usize - slots);
        assert!(listed.is_disjoint(&blobs.unlisted.borrow()));
    }

    /// Fills a table and then replaces all blobs, as in a full pool. The buckets of a lock are
    /// independent of those of other locks, and a table of 10^9 blobs only has more buckets for
    /// each lock. So the part of blobs that find no slot does not grow with the table. While the
    /// table grows to its full size, the share of its buckets that are already split rises from
    /// none to all several times.
    #[test]
    #[cfg_attr(miri, ignore = "adds half a million blobs")]
    fn few_blobs_find_both_buckets_full() {
        const BLOBS: u32 = 250_000;
        let mut rng = Rng::new(1);
        let blobs = Blobs::random(BLOBS, &mut rng);
        let table = table(BLOBS as usize);
        (1..BLOBS).for_each(|blob| add(&table, &blobs, blob));
        for _ in 0..BLOBS {
            let blob = 1 + rng.below(u64::from(BLOBS) - 1) as u32;
            if !blobs.unlisted.borrow().contains(&blob) {
                remove(&table, &blobs, blob);
                add(&table, &blobs, blob);
            }
        }
        let unlisted = blobs.unlisted.borrow().len();
        let slots = table.bytes() / size_of::<Bucket>() as u64 * SLOTS as u64;
        println!("{unlisted} of {BLOBS} blobs are not listed, in {slots} slots");
        assert!(
            u64::from(BLOBS) * 100 > slots * 83,
            "the table is too empty for this test"
        );
        assert!(
            unlisted * 10_000 < BLOBS as usize,
            "{unlisted} of {BLOBS} blobs are not listed"
        );
    }

    #[test]
    fn dedup_table_lists_the_same_blobs_as_a_set_model() {
        const BLOBS: u32 = 20_000;
        let name = "dedup_table_lists_the_same_blobs_as_a_set_model";
        for_each_seed(name, 4, |seed| {
            let mut rng = Rng::new(seed);
            let mut blobs = Blobs::random(BLOBS, &mut rng);
            // Every hundredth blob has a place that many other blobs have, too, so that some of
            // them find their buckets full.
            (0..BLOBS)
                .step_by(100)
                .for_each(|i| blobs.places[i as usize] = i % 500);
            let table = table(BLOBS as usize);
            let mut wanted = BTreeSet::new();
            for step in 0..60_000 {
                let blob = 1 + rng.below(u64::from(BLOBS) - 1) as u32;
                let found = table
                    .lock(blobs.place(blob))
                    .find(blob as u16, |other| other == blob);
                assert_eq!(found.is_some(), wanted.contains(&blob));
                // The first steps mostly add blobs, until the table lists nearly all of them. The
                // later steps mostly remove blobs.
                let adds = rng.below(60_000) > step;
                if adds && wanted.insert(blob) {
                    add(&table, &blobs, blob);
                } else if !adds && wanted.remove(&blob) {
                    remove(&table, &blobs, blob);
                }
                for unlisted in std::mem::take(&mut *blobs.unlisted.borrow_mut()) {
                    assert!(wanted.remove(&unlisted));
                }
                if step % 4000 == 0 {
                    assert_eq!(listed(&table, &blobs), wanted);
                }
            }
            for blob in wanted {
                remove(&table, &blobs, blob);
            }
            assert_eq!(listed(&table, &blobs), BTreeSet::new());
            // The buckets were joined, and their memory is still counted.
            let nr_buckets = table.nr_buckets.load(Relaxed);
            assert!(nr_buckets <= 2 * BUCKETS_MIN + 1);
            assert!(table.bytes() > u64::from(nr_buckets) * 64);
        });
    }
}
