// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S3-FIFO (Yang et al., SOSP 2023), for pages that leave when they are used.
//!
//! A new page enters a small queue and goes early; one that has been here not long ago, as the
//! ghost tells, enters the main queue. There it was evicted too early, or the guest got it and puts
//! it again: the second is what a hit counter would have told. So does one that the guest had
//! active. A stream read once passes through the small queue and leaves the main one alone.
//!
//! Unlike there the small queue has no fixed part of the pages, with which one trace in six did worse
//! than LRU: pages of use came and went, and those of yesterday kept the main queue. Here the older
//! of the two heads goes, and the age of a page in the small queue counts more. How much more, the
//! ghost tells: each page that comes back after the small queue gave it up speaks for less, each
//! that the main queue gave up for more. At 1 this is LRU.

use super::ghost::{Ghost, Past};
use super::queue::Queue;
use super::{Arrival, Leave, Policy};
use crate::index::{Chunks, Entries, Id};
use std::sync::Arc;

/// How many times its age a page in the small queue counts for, at first: with 4 what is read once
/// costs more, with 16 changes do (on the recorded traces).
const WEIGHT: f32 = 8.0;

/// At least: LRU.
const WEIGHT_MIN: f32 = 1.0;

/// At most. A small queue of less than a sixteenth has no time to be of use.
const WEIGHT_MAX: f32 = 16.0;

/// The weight changes by a factor of e when so large a part of the pages, one in sixteen, came back
/// wrongly given up.
const STEP_PART: f32 = 16.0;

/// Of few pages each changes it by a quarter at most.
const STEP_PAGES_MIN: u32 = 64;

/// Ages are told in parts of the time in which all pages are put once: finer than the weight is.
const TICKS: u32 = 256;

// Policy bits of an entry: the queue, and the tick in which it was put. Ticks repeat after 128 such
// times, when a page that is still there is taken for young, and has another while.
const MAIN: u16 = 1;
const TICK_SHIFT: u32 = 1;

#[derive(Debug)]
pub(super) struct S3Fifo {
    small: Queue,
    main: Queue,
    ghost: Ghost,
    weight: f32,
    tick: u16,
    /// Puts until the next one.
    left: u32,
}

impl S3Fifo {
    /// A policy without pages, whose ghost table takes memory from `chunks`.
    pub(super) fn new(chunks: Arc<Chunks>) -> S3Fifo {
        S3Fifo {
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

    /// Ticks since it was put, this one included.
    fn age(&self, entries: &Entries, id: Id) -> f32 {
        let ticks = (self.tick << TICK_SHIFT).wrapping_sub(entries[id].policy_bits() & !MAIN);
        f32::from(ticks >> TICK_SHIFT) + 1.0
    }
}

impl Policy for S3Fifo {
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
        let put = self.tick << TICK_SHIFT;
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
                assert_eq!(main, bits, "queue of an entry");
                page(id);
            });
        }
    }
}
