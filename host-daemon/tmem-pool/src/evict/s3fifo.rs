// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S3-FIFO (Yang et al., SOSP 2023), for pages that leave when they are used.
//!
//! A new page enters a small queue and goes early; one that has been here not long ago, as the
//! ghost tells, enters the main queue. There it was evicted too early, or the guest got it and puts
//! it again: the second is what a hit counter would have told. So does one that the guest had
//! active. A stream read once passes through the small queue and leaves the main one alone.

use super::ghost::Ghost;
use super::queue::Queue;
use super::{Arrival, Leave, Policy};
use crate::index::{Entries, Id};

/// The small queue gives its first as soon as it has more than a tenth of the pages.
const SMALL_PART: u32 = 10;

/// Policy bit of an entry: it is in the main queue.
const MAIN: u8 = 1;

#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    small: Queue,
    main: Queue,
    ghost: Ghost,
}

impl S3Fifo {
    fn len(&self) -> u32 {
        self.small.len() + self.main.len()
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, entries: &mut Entries, id: Id, arrival: Arrival) {
        let Arrival {
            key_hash,
            workingset,
        } = arrival;
        let known = self.ghost.take(key_hash);
        if known || workingset {
            entries[id].set_policy_bits(MAIN);
            self.main.push(entries, id);
        } else {
            entries[id].set_policy_bits(0);
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
        // What the main queue gives up has had its time.
        if leave == Leave::Got || leave == Leave::Evicted && !main {
            self.ghost.add(key_hash);
        }
    }

    fn victim(&mut self, _entries: &mut Entries) -> Option<Id> {
        if self.small.len() > self.len() / SMALL_PART {
            self.small.head()
        } else {
            self.main.head().or(self.small.head())
        }
    }

    fn bytes(&self) -> u64 {
        self.ghost.bytes()
    }

    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        for (queue, bits) in [(&self.small, 0), (&self.main, MAIN)] {
            queue.check(entries, &mut |id| {
                assert_eq!(entries[id].policy_bits(), bits, "queue of an entry");
                page(id);
            });
        }
    }
}
