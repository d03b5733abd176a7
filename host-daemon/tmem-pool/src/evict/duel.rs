// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Duel of two orders of eviction: decides by which one a tenant loses its pages.
//!
//! The duel compares the parts of put pages that became hits. For the order by hash, it counts the
//! hits of the sample, which always has this order. For the order by age, it counts the hits of the
//! other pages while they have it, and otherwise those of a simulation of LRU on the sample
//! (sample.rs).
//!
//! Counters lose a part of their values at each decision, so that old requests do not decide. A lead
//! must exceed a margin before the order changes. After a change to the order by age, the next
//! change waits, and each further wait is twice as long: changes of the order cost hits.

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
const LEAD_OF_HASH: f32 = 0.02;

/// Lead of the order by age, in hits for each put page, from which the other pages have it again.
const LEAD_OF_AGE: f32 = 0.01;

/// Number of put pages of the sample after which the duel decides, as a part of the pages that the
/// sample has. With 1, the duel followed changes of the load too slowly.
const DECIDE_PART: f32 = 0.25;

/// Smallest number of put pages of the sample after which the duel decides.
const DECIDE_PUTS_MIN: f32 = 16.0;

/// Part of their values that counters keep at each decision. With a quarter of the sample put between
/// decisions, the counters represent about as many put pages as the sample has. With 0.6, chance
/// decided too often.
const KEPT_PART: f32 = 0.7;

/// Part of the tenant's pages that must be put in the order by age before the duel leaves it.
/// Before that, the counters have too few hits of this order.
const AGE_PUTS_PART: f32 = 0.5;

/// Largest number of decisions for which the duel stays in the order by age after a change to it.
const WAIT_MAX: u32 = 16;

/// Factor of the pages that the simulation of LRU has. LRU loses all hits of a loop that is only a
/// little larger than the pool, and the sample may have some pages more than its part of the loop.
/// A simulation with too many pages makes the duel try the order by age in vain, but a simulation
/// with too few pages would never show that LRU has hits.
const LRU_SLACK: f32 = 1.03;

/// Part of its share that the sample gets while the other pages have the order by age. Otherwise
/// the pool could be too small for the other pages of a loop that just fits.
const SAMPLE_PART_BESIDE_AGE: f32 = 0.8;

/// Number of puts after which the counters for the sample's share lose half of their values, as a
/// multiple of the number of pages.
const SHARE_PUTS: f32 = 4.0;

/// Lower bound of the number of pages from which SHARE_PUTS calculates the number of puts.
const SHARE_PAGES_MIN: u32 = 256;

#[derive(Debug, Default)]
pub(super) struct Duel {
    order: Order,
    lru: SampleLru,
    /// Put pages of the sample since the last decision.
    puts_since: f32,
    /// Put pages and hits of the sample, and hits that LRU would have had.
    sample_puts: f32,
    sample_hits: f32,
    lru_hits: f32,
    /// Put pages and hits of the other pages since they have the order by age.
    age_puts: f32,
    age_hits: f32,
    /// Put pages of the sample and of the tenant, for the sample's share.
    share_puts: f32,
    share_of_puts: f32,
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
    fn share(&self) -> f32 {
        const CERTAIN_PUTS: f32 = 4.0;
        let even = 1.0 / (1u32 << self.sample_shift()) as f32;
        let share = (self.share_puts + CERTAIN_PUTS) / (self.share_of_puts + CERTAIN_PUTS / even);
        share.clamp(even / 2.0, even * 2.0)
    }

    /// Returns the part of the tenant's pages that the sample may have.
    pub(super) fn sample_part(&self) -> f32 {
        match self.order {
            Order::Age => self.share() * SAMPLE_PART_BESIDE_AGE,
            Order::Hash => self.share(),
        }
    }

    /// Counts a put of a page. `len` is the number of the tenant's pages.
    pub(super) fn put(&mut self, key_hash: u64, sampled: bool, len: u32) {
        self.len = len;
        self.share_of_puts += 1.0;
        self.share_puts += if sampled { 1.0 } else { 0.0 };
        if self.share_of_puts > SHARE_PUTS * len.max(SHARE_PAGES_MIN) as f32 {
            self.share_of_puts /= 2.0;
            self.share_puts /= 2.0;
        }
        if !sampled {
            self.age_puts += if self.order == Order::Age { 1.0 } else { 0.0 };
            return;
        }
        self.sample_puts += 1.0;
        if self.evicts {
            let lru_pages = (len as f32 * self.share() * LRU_SLACK) as usize + 1;
            self.lru.put(key_hash, lru_pages);
        }
        self.puts_since += 1.0;
        if self.puts_since >= (len as f32 * self.share() * DECIDE_PART).max(DECIDE_PUTS_MIN) {
            self.puts_since = 0.0;
            self.decide();
        }
    }

    /// Counts a get that returns a page.
    pub(super) fn got(&mut self, key_hash: u64, sampled: bool) {
        match sampled {
            true => self.sample_hits += 1.0,
            false if self.order == Order::Age => self.age_hits += 1.0,
            false => {}
        }
        self.missed(key_hash);
    }

    /// Counts a get of a page that the sample may have.
    pub(super) fn missed(&mut self, key_hash: u64) {
        self.lru_hits += if self.lru.take(key_hash) { 1.0 } else { 0.0 };
    }

    /// Counts an eviction. The duel begins with the first one, with empty counters.
    pub(super) fn evicted(&mut self) {
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
                let known = self.age_puts >= AGE_PUTS_PART * self.len as f32;
                // With few samples, a small lead is chance.
                let lead = self.sample_puts.sqrt().recip().max(LEAD_OF_HASH);
                let large = self.len >= HASH_PAGES_MIN;
                if known && large && self.wait == 0 && by_hash > by_age + lead {
                    self.change(Order::Hash);
                }
            }
            Order::Hash => {
                let by_age = self.lru_hits / self.sample_puts;
                if by_age > by_hash + LEAD_OF_AGE {
                    self.wait = self.next_wait.max(1);
                    self.next_wait = (2 * self.wait).min(WAIT_MAX);
                    self.change(Order::Age);
                } else if by_hash > by_age + 2.0 * LEAD_OF_HASH {
                    self.next_wait = 1;
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
            *counter *= KEPT_PART;
        }
    }

    fn change(&mut self, order: Order) {
        self.order = order;
        (self.age_puts, self.age_hits) = (0.0, 0.0);
    }
}
