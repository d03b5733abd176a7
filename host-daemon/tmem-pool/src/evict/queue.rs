// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queue whose links are stored in the index entries: entries are added and removed in constant
//! time at both ends and in the middle.

use crate::index::entry::Entry;
use crate::index::{Entries, Id};

/// Queue of index entries. The oldest is at `head`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queue {
    head: Id,
    tail: Id,
    len: u32,
}

impl Queue {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn head(&self) -> Option<Id> {
        (self.head != 0).then_some(self.head)
    }

    pub(crate) fn push(&mut self, entries: &mut Entries, id: Id) {
        let tail = std::mem::replace(&mut self.tail, id);
        let entry = &mut entries[id];
        (entry.prev, entry.next) = (tail, 0);
        if tail == 0 {
            self.head = id;
        } else {
            entries[tail].next = id;
        }
        self.len += 1;
    }

    /// Adds an entry at the head, so that it is the oldest.
    pub(crate) fn push_front(&mut self, entries: &mut Entries, id: Id) {
        let head = std::mem::replace(&mut self.head, id);
        let entry = &mut entries[id];
        (entry.prev, entry.next) = (0, head);
        if head == 0 {
            self.tail = id;
        } else {
            entries[head].prev = id;
        }
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, entries: &mut Entries, id: Id) {
        let Entry { prev, next, .. } = entries[id];
        let before = match prev {
            0 => &mut self.head,
            _ => &mut entries[prev].next,
        };
        let before = std::mem::replace(before, next);
        let after = match next {
            0 => &mut self.tail,
            _ => &mut entries[next].prev,
        };
        let after = std::mem::replace(after, prev);
        // A damaged queue could name a removed page, or name one page again and again. After the
        // panic of this assertion, the engine empties the tenant.
        assert!(
            before == id && after == id,
            "the neighbours of entry {id} in a queue do not link back to it"
        );
        self.len -= 1;
    }

    pub(crate) fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        let (mut prev, mut id, mut len) = (0, self.head, 0);
        while id != 0 {
            assert_eq!(
                entries[id].prev, prev,
                "entry {id} of a queue does not link back to the entry before it"
            );
            page(id);
            len += 1;
            (prev, id) = (id, entries[id].next);
        }
        assert_eq!(
            (prev, len),
            (self.tail, self.len),
            "a queue's tail or length differs from a walk through the queue"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Chunks;

    /// Makes a queue of three entries, changes its links with `damage`, and removes the second
    /// entry.
    fn remove_after(damage: fn(&mut Entries, [Id; 3])) {
        let mut entries = Entries::new(16, &Chunks::some());
        let mut queue = Queue::default();
        let ids = [1, 2, 3].map(|page| {
            let id = entries.add_alone(page, Entry::default());
            queue.push(&mut entries, id);
            id
        });
        damage(&mut entries, ids);
        queue.remove(&mut entries, ids[1]);
    }

    #[test]
    #[should_panic(expected = "in a queue do not link back to it")]
    fn removing_a_queue_entry_panics_if_a_neighbour_does_not_link_to_it() {
        remove_after(|entries, [first, _, last]| entries[first].next = last);
    }

    #[test]
    #[should_panic(expected = "in a queue do not link back to it")]
    fn removing_a_queue_entry_panics_if_the_entry_links_to_itself() {
        remove_after(|entries, [_, second, _]| entries[second].next = second);
    }
}
