// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adaptive two-queue policy for a cache from which a page is removed when it is used. It has the
//! queues of S3-FIFO (Yang et al., SOSP 2023) and adapts the share of each queue.
//!
//! A new page enters the small queue and is evicted early. The ghost table has the keys of pages
//! that left the pool a short time ago. If it has the key of a page that the guest puts, the page
//! enters the main queue. In this case, either the pool evicted the page too early, or the guest
//! got it and puts it again, which corresponds to a hit in the paper. A page that was active in the
//! guest enters the main queue as well. A stream of pages that are read once passes through the
//! small queue and does not affect the main queue.
//!
//! The paper gives the small queue a fixed share of the pages. With such a share, one trace in six
//! did worse than LRU, because useful pages passed through the small queue while old ones stayed in
//! the main queue. Here the policy compares the oldest pages of both queues and evicts the older
//! one. For this comparison, the age of a page in the small queue is multiplied by a weight. The
//! weight falls with each page that returns after the small queue evicted it, and rises with each
//! page that returns after the main queue evicted it. With weight 1 the policy is LRU.
//!
//! Ages do not help if a guest reads more pages in a loop than the pool can hold: the oldest page is
//! the one that the guest needs next, and no get is a hit. For such loads the policy has a second
//! order, by the hashes of the keys. It keeps the pages whose hash is below a bound, and evicts the
//! others. The bound adapts until the kept pages fill the pool. VMs that read the same blocks of the
//! same image keep the same part of the pages, because equal keys have equal hashes.
//!
//! Evicting a page frees no stored bytes while other VMs of the trust domain have an equal page. So
//! the bound of a page is multiplied by the number of pages that share its content, and the VMs keep
//! common pages rather than pages that only one VM has. Evictions for the tenant's own limit do not
//! use this number. So other tenants do not influence which pages a tenant loses that loses pages only
//! because of its limit, and pages of another trust domain influence no eviction.
//!
//! A duel (duel.rs) chooses the order. A sample of a 32nd of the pages, or less in large
//! tenants, always has the order by hash. The other pages have the order that promises more hits.

use super::duel::{Duel, Order};
use super::ghost::{Ghost, Past};
use super::queue::Queue;
use super::{Arrival, Leave, Policy, References};
use crate::index::{Chunks, Entries, Id, Index};
use siphasher::sip::SipHasher13;
use std::hash::Hasher;
use std::sync::Arc;

/// Initial weight, the factor by which the age of a page in the small queue is multiplied. On the
/// recorded traces, two other values caused more misses. With 4, pages that are read once caused
/// them; with 16, changes of the working set did.
const WEIGHT: f64 = 8.0;

/// Smallest weight, the factor by which the age of a page in the small queue is multiplied. With
/// this value, the policy is LRU.
const WEIGHT_MIN: f64 = 1.0;

/// Largest weight, the factor by which the age of a page in the small queue is multiplied. With a
/// larger value, the small queue would have less than a sixteenth of the pages, and would evict
/// them too early to be used again.
const WEIGHT_MAX: f64 = 16.0;

/// Speed at which the weight adapts to wrong evictions. An eviction is wrong if the guest puts the
/// page again soon. The weight changes by the factor e (2.72) after a number of wrong evictions in
/// one queue: the number of the tenant's pages, divided by this constant.
const STEP_DIVISOR: f64 = 16.0;

/// Lower bound of the number of pages by which STEP_DIVISOR is divided: a tenant with fewer pages
/// adapts as if it had this many. One wrong eviction therefore changes the weight (the factor for
/// ages in the small queue) by a quarter at most.
const STEP_PAGES_MIN: u32 = 64;

/// Resolution of the policy's clock, by which it measures the ages of pages: number of ticks that
/// pass while the tenant puts as many pages as it has. It is much larger than WEIGHT_MAX. Otherwise
/// a small queue with one page in WEIGHT_MAX would span about one tick, and its ages could not be
/// compared.
const TICKS: u32 = 256;

/// Part of the pages that the order by hash evicts next, as a divisor: pages that are read once, and
/// pages whose hash is above the bound. While they are fewer, the bound falls.
const PASSING_DIVISOR: u32 = 64;

/// Step by which an eviction changes the bound of the hashes, as a multiple of one page's part of
/// all hashes.
const BOUND_STEP: f64 = 0.2;

/// Lower bound of the number of pages from which BOUND_STEP calculates one page's part.
const BOUND_PAGES_MIN: u32 = 32;

/// Age in ticks from which the order by hash evicts a page that it keeps. The guest has not used the
/// page while it put eight times as many pages as the tenant has.
const KEPT_TICKS_MAX: f64 = 8.0 * TICKS as f64;

/// Largest number of kept pages that an eviction in the order by hash skips to find one that it does
/// not keep any more. With 2, four VMs with common pages had up to 6 points fewer hits. With 8, an
/// eviction took twice as long.
const SKIPS_MAX: usize = 4;

// Policy bits of an entry: the queue, whether the page is in the sample, and the tick of the policy's
// clock in which the page was put. Tick numbers repeat after 32 times as many puts as the tenant has
// pages. A page that stays in its queue for that long then counts as young again.
const MAIN: u16 = 1;
const SAMPLED: u16 = 2;
const TICK_SHIFT: u32 = 2;
const TICK_MASK: u16 = 0x7fff >> TICK_SHIFT;

/// Queues of the pages that have the same order of eviction.
#[derive(Debug, Default)]
struct Group {
    small: Queue,
    main: Queue,
    /// Bound of the hashes of kept pages, from 0 to 1, for the order by hash.
    bound: f64,
}

impl Group {
    fn len(&self) -> u32 {
        self.small.len() + self.main.len()
    }

    fn queue(&mut self, is_main: bool) -> &mut Queue {
        match is_main {
            true => &mut self.main,
            false => &mut self.small,
        }
    }
}

#[derive(Debug)]
pub(super) struct AdaptiveTwoQueue {
    /// Pages whose order the duel chooses.
    others: Group,
    /// Pages of the sample, which always have the order by hash.
    sample: Group,
    duel: Duel,
    ranks: Ranks,
    ghost: Ghost,
    weight: f64,
    tick: u16,
    /// Number of puts until the next tick of the policy's clock.
    left: u32,
}

/// Keyed hash for the order by hash and for the sample. A guest can find out the order of its keys by
/// this hash, because the pool keeps the pages of the lowest ones. So the hash is SipHash-1-3, a
/// pseudorandom function (Aumasson and Bernstein, 2012): its results tell nothing about its key, nor
/// about the seed of all other hashes, from which the key is derived.
#[derive(Clone, Copy, Debug)]
struct Ranks(SipHasher13);

/// Number of the lowest bits of a keyed hash that select the sample. The other bits are the rank.
const SAMPLE_BITS: u32 = 16;

impl Ranks {
    /// Creates a hash that is the same for equal seeds.
    fn new(seed: u64) -> Ranks {
        let part = |nr| Ranks(SipHasher13::new_with_keys(seed, 0)).hash(nr);
        Ranks(SipHasher13::new_with_keys(part(0), part(1)))
    }

    fn hash(self, key_hash: u64) -> u64 {
        let mut hasher = self.0;
        hasher.write_u64(key_hash);
        hasher.finish()
    }
}

/// Returns the rank of a keyed hash in the order by hash, from 0 to 1.
fn rank(hash: u64) -> f64 {
    (hash >> SAMPLE_BITS) as f64 / (1u64 << (u64::BITS - SAMPLE_BITS)) as f64
}

/// Returns whether a page is in a sample of one page in 2^`shift`, which is at most 2^16.
fn is_sampled(hash: u64, shift: u32) -> bool {
    let bits = hash & ((1 << SAMPLE_BITS) - 1);
    bits < (1 << SAMPLE_BITS) >> shift
}

impl AdaptiveTwoQueue {
    /// Creates a policy without pages, whose ghost table takes memory from `chunks`. Tenants with the
    /// same seed keep pages with the same keys.
    pub(super) fn new(seed: u64, chunks: Arc<Chunks>) -> AdaptiveTwoQueue {
        AdaptiveTwoQueue {
            others: Group::default(),
            sample: Group {
                bound: 0.5,
                ..Group::default()
            },
            duel: Duel::default(),
            ranks: Ranks::new(seed),
            ghost: Ghost::new(chunks),
            weight: WEIGHT,
            tick: 0,
            left: 0,
        }
    }

    fn len(&self) -> u32 {
        self.others.len() + self.sample.len()
    }

    fn group(&mut self, sampled: bool) -> &mut Group {
        match sampled {
            true => &mut self.sample,
            false => &mut self.others,
        }
    }

    fn order(&self, sampled: bool) -> Order {
        match sampled {
            true => Order::Hash,
            false => self.duel.order(),
        }
    }

    fn pass_time(&mut self) {
        if self.left == 0 {
            self.tick = (self.tick + 1) & TICK_MASK;
            self.left = self.len() / TICKS;
        } else {
            // The tenant may have become much smaller.
            self.left = (self.left - 1).min(self.len() / TICKS);
        }
    }

    fn learn(&mut self, past: Past) {
        let step = STEP_DIVISOR / self.len().max(STEP_PAGES_MIN) as f64;
        let weight = match past {
            Past::Got => return,
            Past::Small => self.weight * (1.0 - step),
            Past::Main => self.weight * (1.0 + step),
        };
        self.weight = weight.clamp(WEIGHT_MIN, WEIGHT_MAX);
    }

    /// Returns the age of an entry's page: the number of ticks of the policy's clock since its put,
    /// including the current tick.
    fn age(&self, entries: &Entries, id: Id) -> f64 {
        let put = entries[id].policy_bits() >> TICK_SHIFT;
        f64::from(self.tick.wrapping_sub(put) & TICK_MASK) + 1.0
    }

    /// Returns the older one of the oldest pages of both queues.
    fn victim_by_age(&self, entries: &Entries, sampled: bool) -> Option<Id> {
        let group = if sampled { &self.sample } else { &self.others };
        match (group.small.head(), group.main.head()) {
            (Some(small), Some(main)) => {
                let small_first = self.age(entries, small) * self.weight >= self.age(entries, main);
                Some(if small_first { small } else { main })
            }
            (small, main) => small.or(main),
        }
    }

    /// Returns whether the order by hash keeps a page. A page whose content n pages share takes an nth
    /// of the memory, so the bound is n times as high for it. Pages of the small queue are kept only
    /// if their contents are shared: the pool does not know whether the guest will use them again.
    fn is_kept(&self, index: &Index, id: Id, references: References<'_>) -> bool {
        // A detached page has no key any more.
        let Some(key) = index.key(id) else {
            return false;
        };
        let entry = &index.entries[id];
        let references = references(entry.content());
        let bits = entry.policy_bits();
        let bound = match bits & SAMPLED {
            0 => self.others.bound,
            _ => self.sample.bound,
        };
        (bits & MAIN != 0 || references > 1)
            && rank(self.ranks.hash(index.key_hash(key))) < bound * f64::from(references)
            && self.age(&index.entries, id) <= KEPT_TICKS_MAX
    }

    /// Returns a page that the order by hash does not keep, and adapts the bound of the hashes.
    fn victim_by_hash(
        &mut self,
        index: &mut Index,
        sampled: bool,
        references: References<'_>,
    ) -> Option<Id> {
        let group = self.group(sampled);
        let (passing, len) = (group.small.len(), group.len());
        let step = BOUND_STEP / len.max(BOUND_PAGES_MIN) as f64;
        let falls = passing.saturating_mul(PASSING_DIVISOR) <= len;
        group.bound = (group.bound + if falls { -step } else { step }).clamp(0.0, 1.0);
        // Without this look at the main queue, its pages would stay for ever if the small queue never
        // became short.
        let oldest = group.main.head();
        if let Some(id) = oldest.filter(|&id| self.age(&index.entries, id) > KEPT_TICKS_MAX) {
            return Some(id);
        }
        for _ in 0..SKIPS_MAX {
            let group = self.group(sampled);
            let queue = if falls { &group.main } else { &group.small };
            let Some(id) = queue.head() else {
                break;
            };
            if !self.is_kept(index, id, references) {
                return Some(id);
            }
            let entries = &mut index.entries;
            let group = self.group(sampled);
            group.queue(falls).remove(entries, id);
            group.main.push(entries, id);
            let bits = entries[id].policy_bits();
            entries[id].set_policy_bits(bits | MAIN);
        }
        let group = self.group(sampled);
        group.small.head().or(group.main.head())
    }
}

impl Policy for AdaptiveTwoQueue {
    fn insert(&mut self, entries: &mut Entries, id: Id, arrival: Arrival) {
        let Arrival {
            key_hash,
            workingset,
        } = arrival;
        self.pass_time();
        let past = self.ghost.take(key_hash);
        if let Some(past) = past {
            self.learn(past);
        }
        let hash = self.ranks.hash(key_hash);
        let sampled = is_sampled(hash, self.duel.sample_shift());
        let (before, len) = (self.duel.order(), self.len());
        self.duel.record_put(hash, sampled, len);
        if self.duel.order() != before {
            // The bound of the sample has adapted already.
            self.others.bound = self.sample.bound;
        }
        let order = self.order(sampled);
        // A page that the guest got was kept before. It may have a hash above the bound because its
        // content is shared, which is not known while the page is raw.
        let is_kept = past == Some(Past::Got) || rank(hash) < self.group(sampled).bound;
        let known = past.is_some() || workingset;
        let main = known && (order == Order::Age || is_kept);
        let mut bits = (self.tick & TICK_MASK) << TICK_SHIFT;
        bits |= if main { MAIN } else { 0 } | if sampled { SAMPLED } else { 0 };
        entries[id].set_policy_bits(bits);
        let queue = self.group(sampled).queue(main);
        match (main, order) {
            // The order by hash evicts the newest of these pages first. So some of them stay long
            // enough to be used again, even in a loop that is much larger than the pool.
            (false, Order::Hash) => queue.push_front(entries, id),
            _ => queue.push(entries, id),
        }
        self.ghost.fit(self.len());
    }

    fn remove(&mut self, entries: &mut Entries, id: Id, leave: Leave, key_hash: u64) {
        let bits = entries[id].policy_bits();
        let (main, sampled) = (bits & MAIN != 0, bits & SAMPLED != 0);
        self.group(sampled).queue(main).remove(entries, id);
        match leave {
            Leave::Got => {
                match sampled {
                    true => self.duel.record_sampled_hit(self.ranks.hash(key_hash)),
                    false => self.duel.record_other_hit(),
                }
                self.ghost.add(key_hash, Past::Got);
            }
            Leave::Evicted => {
                self.duel.record_eviction();
                let past = if main { Past::Main } else { Past::Small };
                self.ghost.add(key_hash, past);
            }
            Leave::Dropped => {}
        }
        self.ghost.fit(self.len());
    }

    fn record_miss(&mut self, key_hash: u64) {
        let hash = self.ranks.hash(key_hash);
        if is_sampled(hash, self.duel.sample_shift()) {
            self.duel.record_sampled_miss(hash);
        }
    }

    fn record_flush(&mut self, key_hash: u64) {
        let hash = self.ranks.hash(key_hash);
        if is_sampled(hash, self.duel.sample_shift()) {
            self.duel.record_sampled_flush(hash);
        }
    }

    fn prefetch(&self, key_hash: u64) {
        self.ghost.prefetch(key_hash);
    }

    fn victim(&mut self, index: &mut Index, references: References<'_>) -> Option<Id> {
        let (sample, others) = (self.sample.len(), self.others.len());
        let sampled = others == 0
            || sample as f64 > self.duel.sample_fraction_max() * (sample + others) as f64;
        match self.order(sampled) {
            Order::Age => self.victim_by_age(&index.entries, sampled),
            Order::Hash => self.victim_by_hash(index, sampled, references),
        }
    }

    fn hits_are_proportional(&self) -> bool {
        self.duel.order() == Order::Hash
    }

    fn bytes(&self) -> u64 {
        self.ghost.bytes() + self.duel.bytes()
    }

    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        for (queue, bits) in [
            (&self.others.small, 0),
            (&self.others.main, MAIN),
            (&self.sample.small, SAMPLED),
            (&self.sample.main, SAMPLED | MAIN),
        ] {
            queue.check(entries, &mut |id| {
                let found = entries[id].policy_bits() & (MAIN | SAMPLED);
                assert_eq!(
                    found, bits,
                    "entry {id} is in another eviction queue than its policy bits say"
                );
                page(id);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::unshared;
    use super::*;
    use crate::index::Sharing;
    use crate::index::entry::{Content, Entry};

    /// Puts a page at ticks next to those at which the number of a tick repeats.
    #[test]
    fn ages_are_right_when_tick_numbers_repeat() {
        let chunks = Chunks::some();
        let mut entries = Entries::new(16, &chunks);
        let mut policy = AdaptiveTwoQueue::new(1, chunks);
        for (nth, tick) in [0, 0x3fff, 0x4000, 0x7fff, 0x8000, 0xffff]
            .into_iter()
            .enumerate()
        {
            let id = entries.add_alone(nth as u64 + 1, Entry::default());
            (policy.tick, policy.left) = (tick, u32::MAX);
            let arrival = Arrival {
                key_hash: nth as u64,
                workingset: false,
            };
            policy.insert(&mut entries, id, arrival);
            for ticks in [0, 1, 1000] {
                policy.tick = tick.wrapping_add(ticks);
                assert_eq!(
                    policy.age(&entries, id),
                    f64::from(ticks) + 1.0,
                    "wrong age, {ticks} ticks after tick {tick}"
                );
            }
        }
    }

    /// A tenant with two pages that were put at tick 0: one that the order by hash keeps, and one in
    /// the small queue.
    struct Pair {
        policy: AdaptiveTwoQueue,
        index: Index,
        kept: Id,
        passing: Id,
    }

    impl Pair {
        fn new(kept_workingset: bool) -> Pair {
            let chunks = Chunks::some();
            let mut index = Index::new(1, 16, &chunks);
            index.create_pool(1, Sharing::Domain).unwrap();
            let pool = index.pool(1).unwrap();
            let mut policy = AdaptiveTwoQueue::new(1, chunks);
            let (shift, ranks) = (policy.duel.sample_shift(), policy.ranks);
            let mut keys = (0..).filter(|&key| !is_sampled(ranks.hash(key), shift));
            let mut put = |pattern, workingset| {
                let key_hash = keys.next().unwrap();
                let mut entry = Entry::default();
                entry.set_content(Content::Same(pattern), 0, false);
                let id = index.insert(pool, 1, key_hash, entry).unwrap();
                (policy.tick, policy.left) = (0, u32::MAX);
                let arrival = Arrival {
                    key_hash,
                    workingset,
                };
                policy.insert(&mut index.entries, id, arrival);
                id
            };
            let (kept, passing) = (put(KEPT, kept_workingset), put(PASSING, false));
            Pair {
                policy,
                index,
                kept,
                passing,
            }
        }
    }

    const KEPT: u32 = 1;
    const PASSING: u32 = 2;

    /// The small queue always has a page here, which would be evicted first otherwise.
    #[test]
    fn order_by_hash_evicts_a_kept_page_that_is_too_old() {
        let mut pair = Pair::new(true);
        for (ticks, victim) in [(0, pair.passing), (2047, pair.passing), (2048, pair.kept)] {
            pair.policy.tick = ticks;
            assert_eq!(
                pair.policy
                    .victim_by_hash(&mut pair.index, false, &unshared),
                Some(victim),
                "after {ticks} ticks"
            );
        }
    }

    /// A page of the small queue that is kept because its content is shared moves to the main queue,
    /// so each case needs pages of its own.
    #[test]
    fn order_by_hash_evicts_a_shared_page_that_is_too_old() {
        for (ticks, is_too_old) in [(0, false), (2047, false), (2048, true)] {
            let mut pair = Pair::new(false);
            pair.policy.tick = ticks;
            pair.policy.others.bound = 1.0;
            let references = |content| if content == Content::Same(KEPT) { 2 } else { 1 };
            let victim = if is_too_old { pair.kept } else { pair.passing };
            assert_eq!(
                pair.policy
                    .victim_by_hash(&mut pair.index, false, &references),
                Some(victim),
                "after {ticks} ticks"
            );
        }
    }
}
