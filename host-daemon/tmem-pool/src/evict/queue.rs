// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A queue that runs through the entries: constant time at both ends and in the middle.

use crate::index::{Entries, Id};

/// First in at `head`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    head: Id,
    tail: Id,
    len: u32,
}

impl Queue {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn head(&self) -> Option<Id> {
        (self.head != 0).then_some(self.head)
    }

    pub(super) fn push(&mut self, entries: &mut Entries, id: Id) {
        let tail = std::mem::replace(&mut self.tail, id);
        entries[id].prev = tail;
        entries[id].next = 0;
        if tail == 0 {
            self.head = id;
        } else {
            entries[tail].next = id;
        }
        self.len += 1;
    }

    pub(super) fn remove(&mut self, entries: &mut Entries, id: Id) {
        let (prev, next) = (entries[id].prev, entries[id].next);
        if prev == 0 {
            debug_assert_eq!(self.head, id);
            self.head = next;
        } else {
            entries[prev].next = next;
        }
        if next == 0 {
            debug_assert_eq!(self.tail, id);
            self.tail = prev;
        } else {
            entries[next].prev = prev;
        }
        self.len -= 1;
    }

    pub(super) fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        let (mut prev, mut id, mut len) = (0, self.head, 0);
        while id != 0 {
            assert_eq!(entries[id].prev, prev, "links of a queue");
            page(id);
            len += 1;
            (prev, id) = (id, entries[id].next);
        }
        assert_eq!((prev, len), (self.tail, self.len), "end of a queue");
    }
}
