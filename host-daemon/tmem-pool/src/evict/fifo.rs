// SPDX-License-Identifier: Apache-2.0 OR MIT
//! First-in, first-out eviction policy: evicts the page that was put longest ago.

use super::queue::Queue;
use super::{Arrival, Leave, Policy, References};
use crate::index::{Entries, Id, Index};

#[derive(Debug, Default)]
pub(super) struct Fifo(Queue);

impl Policy for Fifo {
    fn insert(&mut self, entries: &mut Entries, id: Id, _arrival: Arrival) {
        self.0.push(entries, id);
    }

    fn remove(&mut self, entries: &mut Entries, id: Id, _leave: Leave, _key_hash: u64) {
        self.0.remove(entries, id);
    }

    fn victim(&mut self, _: &mut Index, _: References<'_>) -> Option<Id> {
        self.0.head()
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        self.0.check(entries, page);
    }
}
