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

use super::ghost::{Ghost, Past};
use super::queue::Queue;
use super::{Arrival, Leave, Policy};
use crate::index::{Chunks, Entries, Id};
use std::sync::Arc;

/// Initial weight, the factor by which the age of a page in the small queue is multiplied. On the
/// recorded traces, two other values caused more misses. With 4, pages that are read once caused
/// them; with 16, changes of the working set did.
const WEIGHT: f32 = 8.0;

/// Smallest weight, the factor by which the age of a page in the small queue is multiplied. With
/// this value, the policy is LRU.
const WEIGHT_MIN: f32 = 1.0;

/// Largest weight, the factor by which the age of a page in the small queue is multiplied. With a
/// larger value, the small queue would have less than a sixteenth of the pages, and would evict
/// them too early to be used again.
const WEIGHT_MAX: f32 = 16.0;

/// Speed at which the weight adapts to wrong evictions. An eviction is wrong if the guest puts the
/// page again soon. The weight changes by the factor e (2.72) after a number of wrong evictions in
/// one queue: the number of the tenant's pages, divided by this constant.
const STEP_PART: f32 = 16.0;

/// Lower bound of the number of pages by which STEP_PART is divided: a tenant with fewer pages
/// adapts as if it had this many. One wrong eviction therefore changes the weight (the factor for
/// ages in the small queue) by a quarter at most.
const STEP_PAGES_MIN: u32 = 64;

/// Resolution of the policy's clock, by which it measures the ages of pages: number of ticks that
/// pass while the tenant puts as many pages as it has. It is much larger than WEIGHT_MAX. Otherwise
/// a small queue with one page in WEIGHT_MAX would span about one tick, and its ages could not be
/// compared.
const TICKS: u32 = 256;

// Policy bits of an entry. The lowest bit is 1 for the main queue, and the other 14 bits are the tick
// of the policy's clock in which the page was put. Tick numbers repeat after 64 times as many puts
// as the tenant has pages. A page that stays in its queue for that long then counts as young again.
const MAIN: u16 = 1;
const TICK_SHIFT: u32 = 1;
const TICK_MASK: u16 = 0x3fff;

#[derive(Debug)]
pub(super) struct AdaptiveTwoQueue {
    small: Queue,
    main: Queue,
    ghost: Ghost,
    weight: f32,
    tick: u16,
    /// Number of puts until the next tick of the policy's clock.
    left: u32,
}

impl AdaptiveTwoQueue {
    /// Creates a policy without pages, whose ghost table takes memory from `chunks`.
    pub(super) fn new(chunks: Arc<Chunks>) -> AdaptiveTwoQueue {
        AdaptiveTwoQueue {
            small: Queue::default(),
            main: Queue::default(),
            ghost: Ghost::new(chunks),
            weight: WEIGHT,
            tick: 0,
            left: 0,
        }
    }

    fn len(&self) -> u32 {
        self.small.len() + self.main.len()
    }

    fn pass_time(&mut self) {
        if self.left == 0 {
            self.tick = self.tick.wrapping_add(1);
            self.left = self.len() / TICKS;
        } else {
            self.left -= 1;
        }
    }

    fn learn(&mut self, past: Past) {
        let step = STEP_PART / self.len().max(STEP_PAGES_MIN) as f32;
        let weight = match past {
            Past::Got => return,
            Past::Small => self.weight * (1.0 - step),
            Past::Main => self.weight * (1.0 + step),
        };
        self.weight = weight.clamp(WEIGHT_MIN, WEIGHT_MAX);
    }

    /// Returns the age of an entry's page: the number of ticks of the policy's clock since its put,
    /// including the current tick.
    fn age(&self, entries: &Entries, id: Id) -> f32 {
        let put = entries[id].policy_bits() >> TICK_SHIFT;
        f32::from(self.tick.wrapping_sub(put) & TICK_MASK) + 1.0
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
        let put = (self.tick & TICK_MASK) << TICK_SHIFT;
        if past.is_some() || workingset {
            entries[id].set_policy_bits(put | MAIN);
            self.main.push(entries, id);
        } else {
            entries[id].set_policy_bits(put);
            self.small.push(entries, id);
        }
        self.ghost.fit(self.len());
    }

    fn remove(&mut self, entries: &mut Entries, id: Id, leave: Leave, key_hash: u64) {
        let main = entries[id].policy_bits() & MAIN != 0;
        if main {
            self.main.remove(entries, id);
        } else {
            self.small.remove(entries, id);
        }
        match leave {
            Leave::Got => self.ghost.add(key_hash, Past::Got),
            Leave::Evicted if main => self.ghost.add(key_hash, Past::Main),
            Leave::Evicted => self.ghost.add(key_hash, Past::Small),
            Leave::Dropped => {}
        }
        self.ghost.fit(self.len());
    }

    fn prefetch(&self, key_hash: u64) {
        self.ghost.prefetch(key_hash);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<Id> {
        match (self.small.head(), self.main.head()) {
            (Some(small), Some(main)) => {
                let small_first = self.age(entries, small) * self.weight >= self.age(entries, main);
                Some(if small_first { small } else { main })
            }
            (small, main) => small.or(main),
        }
    }

    fn bytes(&self) -> u64 {
        self.ghost.bytes()
    }

    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        for (queue, bits) in [(&self.small, 0), (&self.main, MAIN)] {
            queue.check(entries, &mut |id| {
                let main = entries[id].policy_bits() & MAIN;
                assert_eq!(
                    main, bits,
                    "entry {id} is in another eviction queue than its policy bits say"
                );
                page(id);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::entry::Entry;

    /// Puts a page at ticks next to those at which the number of a tick repeats.
    #[test]
    fn ages_are_right_when_tick_numbers_repeat() {
        let chunks = Chunks::some();
        let mut entries = Entries::new(16, &chunks);
        let mut policy = AdaptiveTwoQueue::new(chunks);
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
                    f32::from(ticks) + 1.0,
                    "wrong age, {ticks} ticks after tick {tick}"
                );
            }
        }
    }
}
