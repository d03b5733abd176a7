// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Duel of two orders of eviction: decides by which one a tenant loses its pages.
//!
//! The duel compares the parts of put pages that became hits. For the order by hash, it counts the
//! hits of the sample, which always has this order. For the order by age, it counts the hits of the
//! other pages while they have it, and otherwise those of a simulation of LRU on the sample
//! (sample.rs).
//!
//! Counters lose a part of their values at each decision, so that old requests do not decide. A lead
//! must exceed a margin before the order changes.
//!
//! Changes of the order cost hits, so a load that changes again and again could lose more hits by the
//! changes than it gains from the order by hash. After a change back to the order by age, the next
//! change to the order by hash therefore waits. Each further wait is twice as long, unless the order
//! by hash has gained more hits than two changes cost.

use super::sample::{SAMPLED_MAX, SampleLru};

/// Order in which pages are evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// Pages are evicted by their ages, as in LRU.
    #[default]
    Age,
    /// Pages are evicted by the hashes of their keys.
    Hash,
}

/// Binary logarithm of the number of pages for each page of the sample, in a small tenant. The
/// sample is always in the order by hash, so it loses hits while that order is worse. A smaller
/// sample is less accurate.
const SAMPLE_SHIFT_MIN: u32 = 5;

/// Smallest number of pages of a tenant whose pages may have the order by hash. With fewer pages, the
/// sample is too small to compare the orders.
const HASH_PAGES_MIN: u32 = 512;

/// Lead of the order by hash, in hits for each put page, from which the other pages have it, too.
const LEAD_OF_HASH: f64 = 0.02;

/// Lead of the order by age, in hits for each put page, from which the other pages have it again.
const LEAD_OF_AGE: f64 = 0.01;

/// Number of put pages of the sample after which the duel decides, as a part of the pages that the
/// sample has. With 1, the duel followed changes of the load too slowly.
const DECIDE_FRACTION: f64 = 0.25;

/// Smallest number of put pages of the sample after which the duel decides.
const DECIDE_PUTS_MIN: f64 = 16.0;

/// Part of their values that counters keep at each decision. With a quarter of the sample put between
/// decisions, the counters represent about as many put pages as the sample has. With 0.6, chance
/// decided too often.
const KEPT_FRACTION: f64 = 0.7;

/// Part of the tenant's pages that must be put in the order by age before the duel leaves it.
/// Before that, the counters have too few hits of this order.
const AGE_PUTS_FRACTION: f64 = 0.5;

/// Largest number of decisions for which the duel stays in the order by age after a change to it.
/// The tenant puts 32 times as many pages as it has in this time. If a change in vain costs
/// [`CHANGES_COST`], such changes cost at most one hit in twenty.
const WAIT_MAX: u32 = 128;

/// Hits that two changes of the order cost, as a multiple of the tenant's pages: those of one pass
/// over the pages, and half as many until the duel has noticed that the load has changed.
const CHANGES_COST: f64 = 1.5;

/// Factor of the pages that the simulation of LRU has. LRU loses all hits of a loop that is only a
/// little larger than the pool, and the sample may have some pages more than its part of the loop.
/// A simulation with too many pages makes the duel try the order by age in vain, but a simulation
/// with too few pages would never show that LRU has hits.
const LRU_SLACK: f64 = 1.03;

/// Part of its share that the sample gets while the other pages have the order by age. Otherwise
/// the pool could be too small for the other pages of a loop that just fits.
const SAMPLE_PART_BESIDE_AGE: f64 = 0.8;

/// Number of puts after which the counters for the sample's share lose half of their values, as a
/// multiple of the number of pages. With 4, the simulation of LRU had the wrong size for several
/// rounds of a new loop.
const SHARE_PUTS: f64 = 2.0;

/// Lower bound of the number of pages from which SHARE_PUTS calculates the number of puts.
const SHARE_PAGES_MIN: u32 = 256;

#[derive(Debug, Default)]
pub(super) struct Duel {
    order: Order,
    lru: SampleLru,
    /// Put pages of the sample, and of the tenant, since the last decision.
    sample_puts_since: f64,
    puts_since: f64,
    /// Put pages and hits of the sample, and hits that LRU would have had.
    sample_puts: f64,
    sample_hits: f64,
    lru_hits: f64,
    /// Put pages and hits of the other pages since they have the order by age.
    age_puts: f64,
    age_hits: f64,
    /// Put pages of the sample and of the tenant, for the sample's share.
    share_puts: f64,
    share_of_puts: f64,
    /// Hits that the order by hash has gained since the last change to it.
    gained: f64,
    /// Number of decisions until the order may change to the order by hash.
    wait: u32,
    /// Number of decisions to wait after the next change to the order by age.
    next_wait: u32,
    /// Number of pages of the tenant at the last put.
    len: u32,
    /// True once the tenant has lost a page. Before that, both orders have the same hits.
    evicts: bool,
}

impl Duel {
    pub(super) fn order(&self) -> Order {
        self.order
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lru.bytes()
    }

    /// Returns the binary logarithm of the number of pages for each page of the sample. The sample
    /// of a large tenant has at most as many pages as the simulation of LRU.
    pub(super) fn sample_shift(&self) -> u32 {
        let sampled = self.len >> SAMPLE_SHIFT_MIN;
        SAMPLE_SHIFT_MIN
            + (sampled / (SAMPLED_MAX as u32 / 2))
                .checked_ilog2()
                .map_or(0, |log| log + 1)
    }

    /// Returns the sample's share of all put pages. A fixed share would be too small or too large
    /// if the guest has few pages, because their hashes select the sample.
    fn share(&self) -> f64 {
        const CERTAIN_PUTS: f64 = 4.0;
        let even = 1.0 / (1u32 << self.sample_shift()) as f64;
        let share = (self.share_puts + CERTAIN_PUTS) / (self.share_of_puts + CERTAIN_PUTS / even);
        share.clamp(even / 2.0, even * 2.0)
    }

    /// Returns the part of the tenant's pages that the sample may have.
    pub(super) fn sample_fraction_max(&self) -> f64 {
        match self.order {
            Order::Age => self.share() * SAMPLE_PART_BESIDE_AGE,
            Order::Hash => self.share(),
        }
    }

    /// Counts a put of a page. `len` is the number of the tenant's pages.
    pub(super) fn record_put(&mut self, hash: u64, sampled: bool, len: u32) {
        self.len = len;
        // The sample may become too small to decide again.
        if self.order == Order::Hash && len < HASH_PAGES_MIN / 2 {
            self.change(Order::Age);
        }
        self.puts_since += 1.0;
        self.share_of_puts += 1.0;
        self.share_puts += if sampled { 1.0 } else { 0.0 };
        if self.share_of_puts > SHARE_PUTS * len.max(SHARE_PAGES_MIN) as f64 {
            self.share_of_puts /= 2.0;
            self.share_puts /= 2.0;
        }
        if !sampled {
            self.age_puts += if self.order == Order::Age { 1.0 } else { 0.0 };
            return;
        }
        self.sample_puts += 1.0;
        if self.evicts {
            let lru_pages = (len as f64 * self.share() * LRU_SLACK) as usize + 1;
            self.lru.put(hash, lru_pages);
        }
        self.sample_puts_since += 1.0;
        if self.sample_puts_since
            >= (len as f64 * self.share() * DECIDE_FRACTION).max(DECIDE_PUTS_MIN)
        {
            self.decide();
            (self.sample_puts_since, self.puts_since) = (0.0, 0.0);
        }
    }

    /// Counts a get that returns a page of the sample.
    pub(super) fn record_sampled_hit(&mut self, hash: u64) {
        self.sample_hits += 1.0;
        self.lru_hits += if self.lru.take(hash) { 1.0 } else { 0.0 };
    }

    /// Counts a get that returns a page outside the sample.
    pub(super) fn record_other_hit(&mut self) {
        self.age_hits += if self.order == Order::Age { 1.0 } else { 0.0 };
    }

    /// Counts a get of a page of the sample that the tenant does not have.
    pub(super) fn record_sampled_miss(&mut self, hash: u64) {
        self.lru_hits += if self.lru.take(hash) { 1.0 } else { 0.0 };
    }

    /// Forgets a key of the sample whose page the guest will not request, because it has flushed it.
    pub(super) fn record_sampled_flush(&mut self, hash: u64) {
        self.lru.take(hash);
    }

    /// Counts an eviction. The duel begins with the first one, with empty counters.
    pub(super) fn record_eviction(&mut self) {
        if !self.evicts {
            *self = Duel {
                evicts: true,
                len: self.len,
                ..Duel::default()
            };
        }
    }

    fn decide(&mut self) {
        if !self.evicts {
            return;
        }
        self.wait = self.wait.saturating_sub(1);
        let by_hash = self.sample_hits / self.sample_puts;
        match self.order {
            Order::Age => {
                let by_age = self.age_hits / self.age_puts.max(1.0);
                let known = self.age_puts >= AGE_PUTS_FRACTION * self.len as f64;
                // With few samples, a small lead is chance.
                let lead = self.sample_puts.sqrt().recip().max(LEAD_OF_HASH);
                let large = self.len >= HASH_PAGES_MIN;
                if known && large && self.wait == 0 && by_hash > by_age + lead {
                    self.change(Order::Hash);
                }
            }
            Order::Hash => {
                let by_age = self.lru_hits / self.sample_puts;
                self.gained += (by_hash - by_age) * self.puts_since;
                if by_age > by_hash + LEAD_OF_AGE {
                    if self.gained > CHANGES_COST * self.len as f64 {
                        self.next_wait = 0;
                    }
                    self.wait = self.next_wait.max(1);
                    self.next_wait = (2 * self.wait).min(WAIT_MAX);
                    self.change(Order::Age);
                }
            }
        }
        for counter in [
            &mut self.sample_puts,
            &mut self.sample_hits,
            &mut self.lru_hits,
            &mut self.age_puts,
            &mut self.age_hits,
        ] {
            *counter *= KEPT_FRACTION;
        }
    }

    fn change(&mut self, order: Order) {
        self.order = order;
        (self.age_puts, self.age_hits, self.gained) = (0.0, 0.0, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Single precision has no more than 2^24 whole numbers.
    #[test]
    #[cfg_attr(miri, ignore = "takes more than ten minutes in miri")]
    fn counters_are_exact_in_a_large_tenant() {
        const PUTS: u32 = (1 << 24) + 100;
        let mut duel = Duel::default();
        duel.record_eviction();
        for _ in 0..PUTS {
            duel.record_put(1, false, 1 << 26);
            duel.record_other_hit();
        }
        assert_eq!(duel.share_of_puts, f64::from(PUTS));
        assert_eq!(duel.age_puts, f64::from(PUTS));
        assert_eq!(duel.age_hits, f64::from(PUTS));
    }

    #[test]
    fn flushed_pages_are_no_hits_of_lru() {
        let mut duel = Duel::default();
        duel.record_eviction();
        for hash in [1 << 32, 2 << 32] {
            duel.record_put(hash, true, 1 << 12);
        }
        duel.record_sampled_flush(1 << 32);
        for hash in [1 << 32, 2 << 32] {
            duel.record_sampled_miss(hash);
        }
        assert_eq!(duel.lru_hits, 1.0);
    }

    /// Lets the duel decide `decisions` times. The sample has all its pages, and the others have none.
    fn favour_hash(duel: &mut Duel, decisions: u32) {
        for nth in 0..decisions * (1 << 10) {
            duel.record_put(nth.into(), nth % 32 == 0, 1 << 12);
            if nth % 32 == 0 {
                duel.record_sampled_hit(u64::MAX);
            }
        }
    }

    /// Lets the duel decide `decisions` times. A simulation of LRU has all pages of the sample, which
    /// itself has none.
    fn favour_age(duel: &mut Duel, decisions: u32) {
        for nth in 0..u64::from(decisions * (1 << 10)) {
            duel.record_put(nth << 32, nth % 32 == 0, 1 << 12);
            if nth % 32 == 0 {
                duel.record_sampled_miss(nth << 32);
            }
        }
    }

    /// Returns the number of decisions until the order by hash is chosen again after a phase of it
    /// with `decisions` decisions.
    fn wait_after(duel: &mut Duel, decisions: u32) -> u32 {
        favour_hash(duel, decisions);
        assert_eq!(duel.order, Order::Hash);
        (0..20).for_each(|_| {
            if duel.order == Order::Hash {
                favour_age(duel, 1);
            }
        });
        assert_eq!(duel.order, Order::Age);
        let mut waited = 0;
        while duel.order == Order::Age && waited < 2 * WAIT_MAX {
            favour_hash(duel, 1);
            waited += 1;
        }
        waited
    }

    #[test]
    fn waits_get_longer_until_the_order_by_hash_has_gained_more_than_changes_cost() {
        let mut duel = Duel::default();
        duel.record_eviction();
        favour_hash(&mut duel, 10);
        let waits: Vec<u32> = (0..10).map(|_| wait_after(&mut duel, 0)).collect();
        assert!(waits.is_sorted(), "{waits:?}");
        assert!((WAIT_MAX..WAIT_MAX + 16).contains(&waits[9]), "{waits:?}");
        let after_gain = wait_after(&mut duel, 40);
        assert!(after_gain < 16, "{after_gain}");
    }
}
