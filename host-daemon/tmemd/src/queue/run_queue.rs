// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scheduling order of a worker: the VMs are served in turn, and so are the vrings of each VM.
//!
//! A guest that keeps many queues full gets no more of a worker's time than a guest with one queue.
//! A VM that gets work waits for at most one slice of each other VM that has work. Out of scope:
//! the length of a slice, see `slice.rs`.

use std::collections::VecDeque;

/// Queue of items that have owners, such as vrings of VMs. The owners are served in turn.
pub struct RunQueue<T> {
    /// Owners in the order in which `pop` serves them, each with its items. The list of items is
    /// never empty. A linear search for an owner is fast enough, because only VMs that have work
    /// for this worker are owners.
    owners: VecDeque<(usize, VecDeque<T>)>,
}

impl<T> RunQueue<T> {
    /// Creates a run queue without items.
    pub fn new() -> Self {
        RunQueue {
            owners: VecDeque::new(),
        }
    }

    /// Returns true if no owner has an item in the queue.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the number of owners that have items. That many calls of `pop` return one item of
    /// each owner.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Appends an item to the list of its owner. An owner without items in the queue is placed
    /// after all other owners.
    pub fn push(&mut self, owner: usize, thing: T) {
        match self.owners.iter_mut().find(|(other, _)| *other == owner) {
            Some((_, things)) => things.push_back(thing),
            None => self.owners.push_back((owner, VecDeque::from([thing]))),
        }
    }

    /// Takes the next item of the first owner. If that owner has further items, it becomes the last
    /// owner. Returns None if no owner has an item.
    pub fn pop(&mut self) -> Option<T> {
        let (owner, mut things) = self.owners.pop_front()?;
        let thing = things.pop_front();
        if !things.is_empty() {
            self.owners.push_back((owner, things));
        }
        thing
    }
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_queue_serves_owners_round_robin() {
        let mut queue = RunQueue::new();
        assert!(queue.is_empty());
        for thing in 10..14 {
            queue.push(1, thing);
        }
        queue.push(2, 20);
        assert_eq!(queue.owners(), 2);
        assert_eq!((queue.pop(), queue.pop()), (Some(10), Some(20)));
        // The loop pushes each item again directly after taking it, like a vring that has more work
        // after its slice.
        queue.push(1, 10);
        queue.push(2, 20);
        queue.push(3, 30);
        let rest: Vec<i32> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest, [11, 20, 30, 12, 13, 10]);
        assert!(queue.is_empty() && queue.pop().is_none());
    }
}
