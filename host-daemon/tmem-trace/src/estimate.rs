// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Estimates of the value of memory for a tenant. With more memory, how many of its misses would
//! have been hits? With less memory, how many of its hits would have been misses?
//!
//! The estimator uses spatial sampling as in SHARDS (Waldspurger et al., FAST 2015). It samples the
//! keys whose hash has a given number of zero bits. This number of bits grows, so that the
//! estimator has at most `SAMPLES_MAX` sampled keys. The estimator keeps the sampled keys in the
//! order of their puts until the guest gets or flushes them, even if their pages were evicted. When
//! the guest asks for a sampled key, the estimator counts the keys put after it. This number is the
//! size that a first-in, first-out cache would have needed for a hit.
//!
//! For most operations, the estimator only checks a hash. It counts the sampled keys that its calls
//! walk over or remove, so that a caller can bound its work.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

/// Largest number of sampled keys of an estimator. Each key takes 100 B.
pub const SAMPLES_MAX: usize = 1024;

/// Amounts of additional memory for which the estimator estimates the additional hits, in percent.
pub const GAIN_PERCENT: [u64; 3] = [25, 50, 100];

/// Amounts by which memory is reduced, in percent, for which the estimator estimates the additional
/// misses.
pub const LOSS_PERCENT: [u64; 3] = [25, 50, 75];

/// Overestimate of the gain from more memory that 95 of 100 estimates do not exceed, in percent of
/// all gets. tmem-bench's replay_test.rs checks this bound and the other bounds of this file. It
/// uses several seeds, and recorded and generated traces.
pub const GAIN_OVER_USUAL: f64 = 9.0;
/// Largest overestimate of the gain from more memory, in percent of all gets. The estimator assumes
/// that the policy keeps its present order of eviction. With more memory, the default policy may
/// choose the other order.
pub const GAIN_OVER_MAX: f64 = 33.0;
/// Largest underestimate of the gain from more memory, in percent of all gets. The estimate is too
/// low where few pages are used often. The test of this bound leaves out the pool size at which a
/// loop over all pages just begins to fit.
pub const GAIN_UNDER_MAX: f64 = 36.0;
/// Underestimate of the loss with less memory that 95 of 100 estimates do not exceed, in percent of
/// all gets. Overestimates of the loss have no bound: while the pool fills, the estimator compares a
/// hit with the few pages that the tenant has in the pool at that time.
pub const LOSS_UNDER_USUAL: f64 = 5.0;
/// Largest underestimate of the loss with less memory, in percent of all gets.
pub const LOSS_UNDER_MAX: f64 = 28.0;
/// Smallest number of gets on which an estimate may be based. With fewer gets, or fewer than the tenant
/// has pages, measured errors of estimates exceeded the bounds of this file.
pub const ESTIMATE_GETS_MIN: u64 = 1_000;
/// Smallest number of gets, per page that the tenant has in the pool, with which the bounds
/// GAIN_OVER_USUAL and LOSS_UNDER_USUAL hold even if the estimator samples only one key in many.
pub const ESTIMATE_GETS_PER_PAGE: u64 = 10;

/// Limit for lost hits, in percent of all hits. A part of a tenant's memory counts as not needed if
/// the tenant would lose at most this share of its hits without that part.
pub const LOSS_BEARABLE: f64 = 1.0;
/// Largest measured cost of giving up memory that the estimates count as not needed: lost hits in
/// percent of all gets.
pub const GIVE_UP_COST_MAX: f64 = 2.0;

/// Interval between the hits that the estimator examines, counted in hits of sampled keys. The
/// estimator does not examine all hits, because most gets are hits, and each examination walks over
/// up to `SAMPLES_MAX` other keys.
const HITS_PER_SAMPLE: u64 = 8;

/// Largest number of keys, for each page that fits into the tenant's memory, whose puts the
/// estimator remembers. Twice the memory (the largest of [`GAIN_PERCENT`]) suffices for pages that
/// are evicted in the order of their puts. A policy that keeps a fixed part of the pages has hits in
/// larger loops as well.
const REMEMBERED_PER_PAGE: u64 = 4;

/// Largest number of hits of sampled keys that wait for misses of sampled keys, to be counted as
/// gained with more memory. It spans some changes between runs of hits and runs of misses.
const CREDIT_MAX: u64 = 512;

/// Position, in a key's hash, of the lowest of the bits that decide whether the estimator samples
/// the key. The ghost table (recently evicted keys) of the eviction policy uses other bits.
const HASH_SHIFT: u32 = 16;

/// Estimated numbers of a tenant's gets, counted in pages, that would have had another result with
/// more or less memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimates {
    /// Misses that would have been hits with more memory, for each percentage of [`GAIN_PERCENT`].
    pub gain_hits: [u64; GAIN_PERCENT.len()],
    /// Hits that would have been misses with less memory, for each percentage of [`LOSS_PERCENT`].
    pub loss_hits: [u64; LOSS_PERCENT.len()],
    /// Estimated number of all hits, extrapolated from the hits that the estimator examined. A
    /// value of `loss_hits` divided by this number is the share of hits that would be lost.
    pub loss_hits_seen: u64,
}

/// Estimator for one tenant, whose pages have keys of the type `K`.
#[derive(Debug)]
pub struct Estimator<K> {
    /// Sampling rate: the estimator samples one key in 2^shift.
    shift: u32,
    next_put: u64,
    /// Number of hits of sampled keys so far. The estimator examines every [`HITS_PER_SAMPLE`]th
    /// of them.
    turn: u64,
    /// Sampled keys, each with its hash, by the sequence number of its latest put.
    puts: BTreeMap<u64, (K, u64)>,
    /// Sequence number of the latest put of each sampled key, by the key's hash. The map's own hash
    /// function has no random key, so that equal requests always make the map take equal memory.
    by_hash: HashMap<u64, u64, BuildHasherDefault<DefaultHasher>>,
    estimates: Estimates,
    /// Hits that a tenant, whose policy keeps a fixed part of the pages, would gain with more memory,
    /// and for which it has not had a miss yet, for each percentage of [`GAIN_PERCENT`].
    credit: [u64; GAIN_PERCENT.len()],
    passed: u64,
    forgotten: u64,
}

impl<K> Default for Estimator<K> {
    fn default() -> Estimator<K> {
        Estimator {
            shift: 0,
            next_put: 0,
            turn: 0,
            puts: BTreeMap::new(),
            by_hash: HashMap::default(),
            estimates: Estimates::default(),
            credit: [0; GAIN_PERCENT.len()],
            passed: 0,
            forgotten: 0,
        }
    }
}

impl<K: Copy> Estimator<K> {
    fn is_sampled(&self, key_hash: u64) -> bool {
        key_hash >> HASH_SHIFT & ((1 << self.shift) - 1) == 0
    }

    /// Returns the estimates for all gets so far.
    pub fn estimates(&self) -> Estimates {
        self.estimates
    }

    /// Returns the number of sampled keys: at most [`SAMPLES_MAX`].
    pub fn nr_sampled(&self) -> u64 {
        self.puts.len() as u64
    }

    /// Returns the number of sampled keys that all calls so far have walked over, a measure of the
    /// estimator's work.
    pub fn nr_passed(&self) -> u64 {
        self.passed
    }

    /// Returns the number of sampled keys that all calls so far have removed, a measure of the
    /// estimator's work.
    pub fn nr_forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Returns the memory that the estimator uses, in bytes.
    pub fn bytes(&self) -> u64 {
        const {
            assert!(
                size_of::<K>() <= 24,
                "a key has more than 24 B, for which bytes() counts too little memory"
            )
        };
        (self.by_hash.capacity() * 24 + self.puts.len() * 80) as u64
    }

    /// Records the put of a page, whether the pool stored the page or refused it. `room_pages` is
    /// the number of pages that fit into the tenant's memory.
    pub fn put(&mut self, key: K, key_hash: u64, room_pages: u64) {
        if !self.is_sampled(key_hash) {
            return;
        }
        let put = self.next_put;
        self.next_put += 1;
        if let Some(before) = self.by_hash.insert(key_hash, put) {
            self.puts.remove(&before);
        }
        self.puts.insert(put, (key, key_hash));
        // Remove sampled keys of pages that were put long ago.
        let remembered = room_pages.saturating_mul(REMEMBERED_PER_PAGE);
        while (self.puts.len() as u64) << self.shift > remembered
            && let Some((_, (_, hash))) = self.puts.pop_first()
        {
            self.by_hash.remove(&hash);
            self.forgotten += 1;
        }
        while self.puts.len() > SAMPLES_MAX {
            self.shift += 1;
            self.passed += self.puts.len() as u64;
            let (puts, by_hash) = (std::mem::take(&mut self.puts), &mut self.by_hash);
            let mask = (1u64 << self.shift) - 1;
            self.puts = puts
                .into_iter()
                .filter(|(_, (_, hash))| {
                    let stays = hash >> HASH_SHIFT & mask == 0;
                    if !stays {
                        by_hash.remove(hash);
                    }
                    stays
                })
                .collect();
        }
    }

    /// Records a get. `room_pages` is the number of pages that fit into the tenant's memory.
    /// `used_pages` is the number of pages that the tenant had before the get. `is_proportional` is
    /// true if the eviction policy keeps a fixed part of the pages now, so that the number of hits
    /// is in proportion to the memory. Otherwise the oldest pages are evicted first.
    pub fn get(
        &mut self,
        key_hash: u64,
        hit: bool,
        room_pages: u64,
        used_pages: u64,
        is_proportional: bool,
    ) {
        if !self.is_sampled(key_hash) {
            return;
        }
        let put = self.by_hash.remove(&key_hash);
        if let Some(put) = put {
            self.puts.remove(&put);
        }
        let Some(put) = put else {
            return;
        };
        if is_proportional {
            self.get_in_proportion(hit);
            return;
        }
        if hit {
            self.hit(put, used_pages);
            return;
        }
        // Count only misses of pages that do not fit into the present memory. A page that fits was
        // missed for another reason, such as a refused put, so more memory would not have helped.
        let after = self.put_after(put);
        for (hits, percent) in self.estimates.gain_hits.iter_mut().zip(GAIN_PERCENT) {
            if (room_pages..room_pages.saturating_mul(100 + percent) / 100).contains(&after) {
                *hits += 1 << self.shift;
            }
        }
    }

    /// Estimates the effect of more and less memory on a get of a page that was put, for a tenant
    /// whose hits are in proportion to its memory. More memory turns no more misses into hits than
    /// there are.
    fn get_in_proportion(&mut self, hit: bool) {
        if !hit {
            let weight = 1 << self.shift;
            for (hits, credit) in self.estimates.gain_hits.iter_mut().zip(&mut self.credit) {
                if *credit >= weight {
                    *credit -= weight;
                    *hits += weight;
                }
            }
            return;
        }
        self.turn = self.turn.wrapping_add(1);
        if !self.turn.is_multiple_of(HITS_PER_SAMPLE) {
            return;
        }
        // The weight is a multiple of 8, so the divisions have no remainder.
        let weight = HITS_PER_SAMPLE << self.shift;
        self.estimates.loss_hits_seen += weight;
        for (losses, percent) in self.estimates.loss_hits.iter_mut().zip(LOSS_PERCENT) {
            *losses += weight * percent / 100;
        }
        for (credit, percent) in self.credit.iter_mut().zip(GAIN_PERCENT) {
            *credit = (*credit + weight * percent / 100).min(CREDIT_MAX << self.shift);
        }
    }

    /// Estimates the number of pages that were put since the put with the sequence number `put`. It
    /// is the number of sampled keys among these puts, divided by the sampling rate.
    fn put_after(&mut self, put: u64) -> u64 {
        let sampled = self.puts.range(put..).count() as u64;
        self.passed += sampled;
        sampled << self.shift
    }

    fn hit(&mut self, put: u64, used_pages: u64) {
        self.turn = self.turn.wrapping_add(1);
        if !self.turn.is_multiple_of(HITS_PER_SAMPLE) {
            return;
        }
        let after = self.put_after(put);
        let weight = HITS_PER_SAMPLE << self.shift;
        self.estimates.loss_hits_seen += weight;
        for (losses, percent) in self.estimates.loss_hits.iter_mut().zip(LOSS_PERCENT) {
            if after >= used_pages.saturating_mul(100 - percent) / 100 {
                *losses += weight;
            }
        }
    }

    /// Removes the key of a page that the guest dropped from the sampled keys.
    pub fn drop_page(&mut self, key_hash: u64) {
        if self.is_sampled(key_hash)
            && let Some(put) = self.by_hash.remove(&key_hash)
        {
            self.puts.remove(&put);
            self.forgotten += 1;
        }
    }

    /// Removes all sampled keys for which `gone` returns true, for example the keys of a flushed
    /// range. Takes one step for each sampled key.
    pub fn drop_where(&mut self, gone: impl Fn(K) -> bool) {
        let sampled = self.puts.len();
        self.passed += sampled as u64;
        let by_hash = &mut self.by_hash;
        self.puts.retain(|_, (key, hash)| {
            let gone = gone(*key);
            if gone {
                by_hash.remove(hash);
            }
            !gone
        });
        self.forgotten += (sampled - self.puts.len()) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Rng, for_each_seed};
    use std::collections::{BTreeMap, HashMap};

    /// A first-in, first-out cache for `room` pages, which counts hits. A hit removes the page.
    #[derive(Default)]
    struct Cache {
        room: usize,
        puts: BTreeMap<u64, u64>,
        by_key: HashMap<u64, u64>,
        hits: u64,
    }

    impl Cache {
        fn get(&mut self, key: u64) -> bool {
            let put = self.by_key.remove(&key);
            put.map(|put| self.puts.remove(&put));
            self.hits += u64::from(put.is_some());
            put.is_some()
        }

        fn put(&mut self, key: u64, now: u64) {
            self.by_key.insert(key, now);
            self.puts.insert(now, key);
            if self.puts.len() > self.room {
                let (_, oldest) = self
                    .puts
                    .pop_first()
                    .expect("the cache has no oldest page, although it has too many pages");
                self.by_key.remove(&oldest);
            }
        }
    }

    /// Simulates the gets of a guest whose tenant has memory for `room` pages. Returns the
    /// estimator, and caches of seven sizes: for `room` pages, with 25, 50 and 100 % more, and with
    /// 25, 50 and 75 % less.
    fn run(room: usize, gets: u64, seed: u64) -> (Estimator<u64>, [Cache; 7]) {
        let mut rng = Rng::new(seed);
        let rooms = [100, 125, 150, 200, 75, 50, 25].map(|percent| room * percent / 100);
        let mut caches = rooms.map(|room| Cache {
            room,
            ..Cache::default()
        });
        let mut estimator = Estimator::default();
        let room = room as u64;
        for now in 0..gets {
            // Model a guest that reads some pages again much sooner than others.
            let span = [room / 2, room * 3, room * 10][rng.below(3) as usize];
            let nr = rng.below(span);
            let hash = Rng::new(seed << 32 ^ nr).next();
            // Let the guest read the page and evict it again, so that it gets and then puts the
            // page.
            let hits = caches.each_mut().map(|cache| cache.get(nr));
            estimator.get(hash, hits[0], room, room, false);
            for cache in &mut caches {
                cache.put(nr, now);
            }
            estimator.put(nr, hash, room);
            assert!(
                estimator.puts.len() <= SAMPLES_MAX
                    && estimator.by_hash.len() == estimator.puts.len()
            );
        }
        (estimator, caches)
    }

    #[test]
    fn hit_estimates_match_simulations_of_larger_and_smaller_caches() {
        for_each_seed("gain", 2, |seed| {
            let (estimator, caches) = run(2000, 150_000, seed);
            assert!(
                estimator.estimates.loss_hits_seen.abs_diff(caches[0].hits)
                    < caches[0].hits * 15 / 100
            );
            for (i, estimate) in estimator.estimates.loss_hits.into_iter().enumerate() {
                let less = caches[0].hits - caches[4 + i].hits;
                let error = estimate.abs_diff(less) as f64 / less as f64;
                let percent = LOSS_PERCENT[i];
                println!("{percent} % less memory: {less} fewer hits, {estimate} estimated");
                assert!(
                    error < 0.2,
                    "with {percent} % less memory, {less} hits are lost, but the estimate is {estimate}"
                );
            }
            for (i, estimate) in estimator.estimates.gain_hits.into_iter().enumerate() {
                let more = caches[i + 1].hits - caches[0].hits;
                let error = estimate.abs_diff(more) as f64 / more as f64;
                println!(
                    "{} % more memory: {more} more hits, {estimate} estimated",
                    GAIN_PERCENT[i]
                );
                assert!(
                    error < 0.15,
                    "with {} % more memory, there are {more} more hits, but the estimate is {estimate}",
                    GAIN_PERCENT[i]
                );
            }
        });
    }

    /// Compares estimates with simulated caches. The caches are so large that the estimator samples
    /// at most one key in 32, as it does for VMs of real hosts.
    #[test]
    fn hit_estimates_are_within_usual_bounds_after_enough_gets() {
        for_each_seed("gain of many", 2, |seed| {
            let room = 20_000;
            let gets = ESTIMATE_GETS_PER_PAGE * room as u64;
            let (estimator, caches) = run(room, gets, seed);
            assert!(
                estimator.shift >= 5,
                "the test is too weak: the estimator samples one key in 2^{}, more than one in 32",
                estimator.shift
            );
            let of_gets = |hits: f64| 100.0 * hits / gets as f64;
            let hits = caches[0].hits as f64;
            for i in 0..3 {
                let part = estimator.estimates.loss_hits[i] as f64
                    / estimator.estimates.loss_hits_seen as f64;
                let (estimate, less) = (hits * part, hits - caches[4 + i].hits as f64);
                println!(
                    "hits lost with less memory, in % of gets: {:.1} measured, {:.1} estimated",
                    of_gets(less),
                    of_gets(estimate)
                );
                assert!(of_gets((estimate - less).abs()) < LOSS_UNDER_USUAL);
                let (estimate, more) = (
                    estimator.estimates.gain_hits[i] as f64,
                    caches[1 + i].hits as f64 - hits,
                );
                println!(
                    "hits gained with more memory, in % of gets: {:.1} measured, {:.1} estimated",
                    of_gets(more),
                    of_gets(estimate)
                );
                assert!(of_gets((estimate - more).abs()) < GAIN_OVER_USUAL);
            }
        });
    }

    #[test]
    fn keys_of_dropped_pages_are_removed_from_the_hit_estimator() {
        let mut estimator = Estimator::default();
        (0..10u64).for_each(|key| estimator.put(key, key << HASH_SHIFT, 100));
        estimator.drop_page(3 << HASH_SHIFT);
        estimator.drop_where(|key| key >= 5);
        assert_eq!(estimator.puts.len(), 4);
        for key in 0..10 {
            estimator.get(key << HASH_SHIFT, false, 0, 0, false);
        }
        // The gets have removed the keys that were not dropped before. These gets add nothing to
        // the estimated gain, because `room_pages` is 0.
        assert_eq!(
            (estimator.estimates.gain_hits, estimator.puts.len()),
            ([0; 3], 0)
        );
    }
}
