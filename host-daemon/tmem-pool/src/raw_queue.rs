// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queue of a tenant's raw pages, which wait to be finalized (deduplicated and compressed).
//!
//! The queue consists of blocks of fixed size, so that it never copies its entries when it grows,
//! and releases memory as soon as it shrinks. A queue in one piece would copy up to a million
//! entries under the tenant's lock.

use crate::index::Id;
use std::collections::VecDeque;

/// Entry of the queue of raw pages: a page that was put, and the blob in which it was stored raw
/// (uncompressed). The page may have been removed or finalized since.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawPage {
    pub id: Id,
    pub blob: u32,
}

/// Number of entries in a block of the queue, which takes 2 KiB.
const BLOCK_PAGES: usize = 256;

type Block = Box<[RawPage; BLOCK_PAGES]>;

/// Queue of raw pages, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct RawQueue {
    blocks: VecDeque<Block>,
    /// Position of the oldest entry in the first block.
    begin: usize,
    len: usize,
}

fn new_block() -> Block {
    Box::new([RawPage::default(); BLOCK_PAGES])
}

impl RawQueue {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the memory of the queue in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.len() * size_of::<[RawPage; BLOCK_PAGES]>()
            + self.blocks.capacity() * size_of::<Block>()
    }

    /// Returns the oldest entries in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RawPage> {
        (self.begin..self.begin + self.len)
            .map(|at| self.blocks[at / BLOCK_PAGES][at % BLOCK_PAGES])
    }

    pub(crate) fn push_back(&mut self, page: RawPage) {
        let at = self.begin + self.len;
        if at == self.blocks.len() * BLOCK_PAGES {
            self.blocks.push_back(new_block());
        }
        self.blocks[at / BLOCK_PAGES][at % BLOCK_PAGES] = page;
        self.len += 1;
    }

    pub(crate) fn push_front(&mut self, page: RawPage) {
        if self.begin == 0 {
            self.blocks.push_front(new_block());
            self.begin = BLOCK_PAGES;
        }
        self.begin -= 1;
        self.blocks[0][self.begin] = page;
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<RawPage> {
        if self.len == 0 {
            return None;
        }
        let page = self.blocks[0][self.begin];
        self.begin += 1;
        self.len -= 1;
        if self.len == 0 {
            // Keep one block, so that a queue that fills and empties again and again does not
            // allocate each time.
            self.blocks.truncate(1);
            self.blocks.shrink_to(1);
            self.begin = 0;
        } else if self.begin == BLOCK_PAGES {
            self.blocks.pop_front();
            self.begin = 0;
        }
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};

    fn page(number: u32) -> RawPage {
        RawPage {
            id: number,
            blob: !number,
        }
    }

    #[test]
    fn the_queue_of_raw_pages_has_the_order_of_a_model() {
        for_each_seed("raw_queue", 5, |seed| {
            let mut rng = Rng::new(seed);
            let (mut queue, mut model) = (RawQueue::default(), VecDeque::new());
            for number in 0..20_000 {
                // Fill the queue with several blocks, and empty it, in turns.
                let fills = number / 2_000 % 2 == 0;
                match rng.below(8) {
                    0 => {
                        queue.push_front(page(number));
                        model.push_front(number);
                    }
                    1..6 if fills => {
                        queue.push_back(page(number));
                        model.push_back(number);
                    }
                    _ => {
                        let popped = queue.pop_front().map(|page| page.id);
                        assert_eq!(popped, model.pop_front());
                    }
                }
                assert_eq!(
                    (queue.len(), queue.is_empty()),
                    (model.len(), model.is_empty())
                );
                let first = queue.iter().take(3).map(|page| page.id);
                assert!(first.eq(model.iter().copied().take(3)));
            }
        });
    }

    #[test]
    fn an_emptied_queue_of_raw_pages_keeps_one_block() {
        let mut queue = RawQueue::default();
        (0..100_000).for_each(|number| queue.push_back(page(number)));
        assert!(queue.bytes() >= 800_000);
        while queue.pop_front().is_some() {}
        assert!(
            queue.bytes() <= 2048 + 64,
            "an empty queue of raw pages takes {} B",
            queue.bytes()
        );
    }
}
