// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whose turn it is: VMs take turns, and within a VM its vrings do.
//!
//! So a guest that has many queues, and keeps them all full, gets no more of a worker than one that
//! has one, and a newcomer waits for one turn of each VM that has work. Never here: what a turn is.

use std::collections::VecDeque;

/// Things to do, each of an owner.
pub struct RunQueue<T> {
    /// By owner, in the order of their next turns; none is empty. There are as many as VMs have
    /// work for this worker at once, few enough to be searched.
    owners: VecDeque<(usize, VecDeque<T>)>,
}

impl<T> RunQueue<T> {
    /// Nothing to do.
    pub fn new() -> Self {
        RunQueue {
            owners: VecDeque::new(),
        }
    }

    /// Nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Owners that have something to do: as many turns are a round.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Puts a thing behind the others of its owner, and a new owner behind the other owners.
    pub fn push(&mut self, owner: usize, thing: T) {
        match self.owners.iter_mut().find(|(other, _)| *other == owner) {
            Some((_, things)) => things.push_back(thing),
            None => self.owners.push_back((owner, VecDeque::from([thing]))),
        }
    }

    /// Takes what is next; its owner goes behind the others.
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
    fn owners_take_turns_and_so_do_their_things() {
        let mut queue = RunQueue::new();
        assert!(queue.is_empty());
        for thing in 10..14 {
            queue.push(1, thing);
        }
        queue.push(2, 20);
        assert_eq!(queue.owners(), 2);
        assert_eq!((queue.pop(), queue.pop()), (Some(10), Some(20)));
        // Again at once, as who has more to do.
        queue.push(1, 10);
        queue.push(2, 20);
        queue.push(3, 30);
        let rest: Vec<i32> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest, [11, 20, 30, 12, 13, 10]);
        assert!(queue.is_empty() && queue.pop().is_none());
    }
}
