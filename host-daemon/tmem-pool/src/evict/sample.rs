// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Simulation of LRU on a sample of a tenant's pages: which gets would be hits if the pool kept the
//! pages that were put last.
//!
//! The simulation has only the upper halves of the hashes of keys, because the lower bits select the
//! sample. Its size is bounded, whatever the tenant's size is.

/// Largest number of sampled pages. The simulation takes at most 200 KiB.
pub(super) const SAMPLED_MAX: usize = 8192;

/// Number of hash chains, whose length is at most two on average.
const CHAINS: usize = 4096;

/// Number of a node. 0 means none in a chain, and the ends of the list in the order of puts.
type Nr = u16;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    key: u32,
    /// Neighbours in the order of puts. The node with the number 0 is before the oldest and after
    /// the newest.
    older: Nr,
    newer: Nr,
    /// Next node in the same chain, or in the list of free nodes.
    next: Nr,
}

/// Sampled keys that LRU would have, in the order of their puts.
#[derive(Debug, Default)]
pub(super) struct SampleLru {
    nodes: Vec<Node>,
    /// First node of each chain. Empty until the first key is added.
    chains: Vec<Nr>,
    free: Nr,
    len: usize,
}

fn key(hash: u64) -> u32 {
    (hash >> 32) as u32
}

impl SampleLru {
    /// Returns the memory of the simulation in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let nodes = self.nodes.capacity() * size_of::<Node>();
        (nodes + self.chains.capacity() * size_of::<Nr>()) as u64
    }

    /// Adds the key of a page that is put, as the newest one. Removes the oldest keys while there
    /// are more than `pages_max`, which is at most [`SAMPLED_MAX`].
    pub(super) fn put(&mut self, hash: u64, pages_max: usize) {
        if self.chains.is_empty() {
            self.chains = vec![0; CHAINS];
            self.nodes.push(Node::default());
        }
        self.take(hash);
        // Remove at most two keys, so that the call takes bounded time.
        for _ in 0..2 {
            if self.len >= pages_max.clamp(1, SAMPLED_MAX) {
                self.remove(self.nodes[0].newer);
            }
        }
        let nr = match self.free {
            0 => {
                self.nodes.push(Node::default());
                (self.nodes.len() - 1) as Nr
            }
            free => {
                self.free = self.nodes[free as usize].next;
                free
            }
        };
        let key = key(hash);
        let chain = &mut self.chains[key as usize % CHAINS];
        let next = std::mem::replace(chain, nr);
        let newest = self.nodes[0].older;
        self.nodes[nr as usize] = Node {
            key,
            older: newest,
            newer: 0,
            next,
        };
        self.nodes[newest as usize].newer = nr;
        self.nodes[0].older = nr;
        self.len += 1;
    }

    /// Removes the key of a page that the guest gets. Returns whether LRU would have had the page.
    pub(super) fn take(&mut self, hash: u64) -> bool {
        if self.len == 0 {
            return false;
        }
        let key = key(hash);
        let mut nr = self.chains[key as usize % CHAINS];
        while nr != 0 && self.nodes[nr as usize].key != key {
            nr = self.nodes[nr as usize].next;
        }
        if nr != 0 {
            self.remove(nr);
        }
        nr != 0
    }

    fn remove(&mut self, nr: Nr) {
        let Node {
            key,
            older,
            newer,
            next,
        } = self.nodes[nr as usize];
        self.nodes[older as usize].newer = newer;
        self.nodes[newer as usize].older = older;
        let first = &mut self.chains[key as usize % CHAINS];
        if *first == nr {
            *first = next;
        } else {
            let mut before = *first;
            while self.nodes[before as usize].next != nr {
                before = self.nodes[before as usize].next;
            }
            self.nodes[before as usize].next = next;
        }
        self.nodes[nr as usize].next = self.free;
        self.free = nr;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::VecDeque;

    #[test]
    fn the_sample_has_the_pages_that_were_put_last() {
        for_each_seed("sample_lru", 5, |seed| {
            let mut rng = Rng::new(seed);
            let (mut sample, mut model) = (SampleLru::default(), VecDeque::new());
            for _ in 0..20_000 {
                let key = rng.below(300) << 32;
                let known = model.iter().position(|&other| other == key);
                known.map(|at| model.remove(at));
                if rng.one_in(2) {
                    model.push_back(key);
                    if model.len() > 100 {
                        model.pop_front();
                    }
                    sample.put(key, 100);
                } else {
                    assert_eq!(sample.take(key), known.is_some());
                }
                assert_eq!(sample.len, model.len());
            }
        });
    }

    #[test]
    fn the_memory_of_the_sample_is_bounded() {
        let mut sample = SampleLru::default();
        assert_eq!(sample.bytes(), 0);
        let mut rng = Rng::new(1);
        (0..100_000).for_each(|_| sample.put(rng.next(), usize::MAX));
        assert_eq!(sample.len, SAMPLED_MAX);
        assert!(sample.bytes() < 256 << 10, "{} B", sample.bytes());
        // The sample shrinks by one key at each put.
        (0..SAMPLED_MAX).for_each(|_| sample.put(rng.next(), 1));
        assert_eq!(sample.len, 1);
    }
}
