// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S3-FIFO (Yang et al., SOSP 2023), for a cache from which a hit removes the page.
//!
//! As published: a new page enters the small queue. A hit adds 1 to the page's frequency, which is
//! at most 3. While the small queue has at least a tenth of the bytes, the policy evicts from it:
//! its oldest page moves to the main queue if its frequency is above 1, with frequency 0, or else
//! leaves the cache, and its key enters the ghost queue. Otherwise the policy evicts from the main
//! queue: its oldest page is added again with a frequency lower by 1, if the frequency is above 0,
//! or else leaves the cache. A page whose key is in the ghost queue enters the main queue. The keys
//! in the ghost queue stand for nine tenths of the bytes, the share of the main queue.
//!
//! Mapping to puts and gets: a get is the hit. The put that follows it does not count as another
//! use. With [`Reput::KeepsPlace`], the key stays in its queue while the guest has the page. It
//! costs no bytes, and moves and leaves as the page would. With [`Reput::NewPlace`], a get removes
//! the key, and the put adds it to the main queue with the frequency that it had, because the put
//! finds the key as in a ghost queue. A new page enters the main queue at once if the guest reports
//! that the page was used again after it was read. The publication knows no such hint; with
//! `--no-hints`, no policy gets it.
//!
//! The simulation gives S3-FIFO two advantages over an implementation: it remembers keys, not
//! fingerprints, and it forgets no key of a page that the guest has.

use super::lists::Lists;
use super::pool::{Policy, Reput};
use super::requests::{Key, Put};

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

/// Reciprocal of the small queue's share of the bytes: the small queue has a tenth.
const PARTS: u64 = 10;

/// Largest frequency of a page. The frequency has two bits, as published.
const FREQUENCY_MAX: u8 = 3;

/// Smallest frequency with which a page moves from the small queue to the main queue: the page was
/// used more than once after it was added.
const FREQUENCY_MOVE: u8 = 2;

#[derive(Clone, Copy, Default)]
struct Page {
    /// Charge of the page in bytes, as of its last put.
    bytes: u32,
    frequency: u8,
    /// Whether the pool has the page.
    present: bool,
    /// With [`Reput::NewPlace`]: a get returned the page, and the guest has not put it since.
    returned: bool,
}

/// S3-FIFO policy of one tenant.
pub struct S3Fifo {
    reput: Reput,
    lists: Lists<3>,
    pages: Vec<Page>,
    /// Bytes of each queue: of the present pages in the small and the main queue, and of the pages
    /// whose keys are in the ghost queue.
    bytes: [u64; 3],
}

impl S3Fifo {
    /// Creates a policy without pages, for this number of keys.
    pub fn new(keys: usize, reput: Reput) -> S3Fifo {
        S3Fifo {
            reput,
            lists: Lists::new(keys),
            pages: vec![Page::default(); keys],
            bytes: [0; 3],
        }
    }

    /// Returns the bytes by which a key increases the size of a queue: the page's charge, or 0 if
    /// the guest has the page and the queue is not the ghost queue.
    fn cost(&self, list: usize, key: Key) -> u64 {
        let page = self.pages[key as usize];
        match page.present || list == GHOST {
            true => page.bytes.into(),
            false => 0,
        }
    }

    fn add(&mut self, list: usize, key: Key) {
        self.bytes[list] += self.cost(list, key);
        self.lists.push(list, key);
    }

    /// Removes a key from the queue that has it.
    fn remove(&mut self, key: Key) {
        let list = self.lists.list_of(key).expect("the key is in no queue");
        self.bytes[list] -= self.cost(list, key);
        self.lists.remove(key);
    }

    /// Adds a key to the ghost queue, which then forgets its oldest keys if it has too many for a
    /// cache of this size.
    fn remember(&mut self, key: Key, cache_bytes: u64) {
        self.add(GHOST, key);
        while self.bytes[GHOST] * PARTS > cache_bytes * (PARTS - 1) {
            let oldest = self.lists.oldest(GHOST);
            self.remove(oldest.expect("the ghost queue has bytes but no key"));
        }
    }
}

impl Policy for S3Fifo {
    fn put(&mut self, key: Key, put: Put) {
        let place = self.lists.list_of(key);
        if place == Some(GHOST) {
            self.remove(key);
        }
        let page = &mut self.pages[key as usize];
        let returned = std::mem::take(&mut page.returned);
        page.bytes = put.bytes;
        page.present = true;
        match place {
            Some(list @ (SMALL | MAIN)) => self.bytes[list] += u64::from(put.bytes),
            None if returned => self.add(MAIN, key),
            _ => {
                page.frequency = 0;
                let main = place == Some(GHOST) || put.used_again;
                self.add(if main { MAIN } else { SMALL }, key);
            }
        }
    }

    fn get(&mut self, key: Key) {
        match self.reput {
            Reput::KeepsPlace => {
                let list = self.lists.list_of(key).expect("the page is in no queue");
                self.bytes[list] -= self.cost(list, key);
            }
            Reput::NewPlace => self.remove(key),
        }
        let page = &mut self.pages[key as usize];
        page.frequency = (page.frequency + 1).min(FREQUENCY_MAX);
        page.present = false;
        page.returned = self.reput == Reput::NewPlace;
    }

    fn flush(&mut self, key: Key) {
        self.remove(key);
        self.pages[key as usize].present = false;
    }

    fn evict(&mut self) -> Option<Key> {
        loop {
            let cache_bytes = self.bytes[SMALL] + self.bytes[MAIN];
            if cache_bytes == 0 {
                return None;
            }
            let small = self.bytes[SMALL] * PARTS >= cache_bytes;
            let oldest = self.lists.oldest(if small { SMALL } else { MAIN });
            let key = oldest.expect("a queue has bytes but no key");
            self.remove(key);
            let page = &mut self.pages[key as usize];
            if small && page.frequency >= FREQUENCY_MOVE {
                page.frequency = 0;
                self.add(MAIN, key);
            } else if !small && page.frequency > 0 {
                page.frequency -= 1;
                self.add(MAIN, key);
            } else {
                let present = std::mem::take(&mut page.present);
                if small {
                    self.remember(key, cache_bytes);
                }
                if present {
                    return Some(key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::tests::{PUT, hit};

    const KEEPS: Reput = Reput::KeepsPlace;

    /// Returns a policy in which the keys from 0 to `pages` - 1 were put, each with a charge of one
    /// byte.
    fn filled(pages: Key, reput: Reput) -> S3Fifo {
        let mut policy = S3Fifo::new(100, reput);
        (0..pages).for_each(|key| policy.put(key, PUT));
        policy
    }

    fn list(policy: &S3Fifo, key: Key) -> Option<usize> {
        policy.lists.list_of(key)
    }

    #[test]
    fn pages_without_hits_leave_the_small_queue_in_their_order() {
        let mut policy = filled(10, KEEPS);
        let evicted: Vec<_> = (0..10).map(|_| policy.evict()).collect();
        assert_eq!(evicted, (0..10).map(Some).collect::<Vec<_>>());
        assert_eq!(policy.evict(), None);
    }

    #[test]
    fn a_page_moves_to_the_main_queue_after_two_hits_and_not_after_one() {
        let mut policy = filled(10, KEEPS);
        hit(&mut policy, 0);
        hit(&mut policy, 1);
        hit(&mut policy, 1);
        assert_eq!(policy.evict(), Some(0), "one hit kept the page");
        assert_eq!(policy.evict(), Some(2), "two hits did not keep the page");
        assert_eq!(
            (list(&policy, 0), list(&policy, 1)),
            (Some(GHOST), Some(MAIN))
        );
        assert_eq!(
            policy.pages[1].frequency, 0,
            "the move to the main queue left the page's frequency"
        );
    }

    #[test]
    fn a_page_whose_key_is_in_the_ghost_queue_enters_the_main_queue() {
        let mut policy = filled(10, KEEPS);
        assert_eq!(policy.evict(), Some(0));
        policy.put(0, PUT);
        policy.put(50, PUT);
        assert_eq!(
            (list(&policy, 0), list(&policy, 50)),
            (Some(MAIN), Some(SMALL))
        );
        // Page 0 is in the main queue, so it is evicted after all ten pages of the small queue.
        let before = std::iter::from_fn(|| policy.evict()).position(|key| key == 0);
        assert_eq!(before, Some(10));
    }

    #[test]
    fn the_ghost_queue_forgets_its_oldest_key_beyond_nine_tenths_of_the_bytes() {
        let mut policy = filled(10, KEEPS);
        for key in 10..20 {
            policy.evict();
            policy.put(key, PUT);
        }
        let known: Vec<_> = (0..10).map(|key| list(&policy, key)).collect();
        assert_eq!(known[0], None);
        assert!(known[1..].iter().all(|list| *list == Some(GHOST)));
    }

    #[test]
    fn the_main_queue_is_evicted_only_while_the_small_queue_has_less_than_a_tenth() {
        let mut policy = filled(10, KEEPS);
        for key in 0..9 {
            assert_eq!(policy.evict(), Some(key));
            policy.put(key, PUT);
        }
        // Nine pages are in the main queue, and page 9 is in the small queue, which therefore has a
        // tenth of the bytes.
        assert_eq!(policy.evict(), Some(9));
        policy.put(20, PUT);
        assert_eq!(policy.evict(), Some(20));
        policy.put(9, PUT);
        assert_eq!(policy.evict(), Some(0), "the small queue has no page");
        assert_eq!(
            list(&policy, 0),
            None,
            "the ghost queue has a key of the main queue"
        );
    }

    #[test]
    fn the_main_queue_adds_a_page_again_as_often_as_its_frequency_says() {
        let mut policy = filled(2, KEEPS);
        for key in [0, 0, 1, 1] {
            hit(&mut policy, key);
        }
        policy.put(2, PUT);
        assert_eq!(policy.evict(), Some(2));
        for _ in 0..5 {
            hit(&mut policy, 0);
        }
        hit(&mut policy, 1);
        assert_eq!(policy.pages[0].frequency, FREQUENCY_MAX);
        assert_eq!((policy.evict(), policy.evict()), (Some(1), Some(0)));
    }

    #[test]
    fn a_get_keeps_the_place_of_the_page_or_gives_it_a_new_one_in_the_main_queue() {
        let mut policy = filled(3, KEEPS);
        hit(&mut policy, 0);
        assert_eq!((list(&policy, 0), policy.evict()), (Some(SMALL), Some(0)));
        let mut policy = filled(3, Reput::NewPlace);
        hit(&mut policy, 0);
        assert_eq!((list(&policy, 0), policy.evict()), (Some(MAIN), Some(1)));
        assert_eq!(policy.pages[0].frequency, 1);
    }

    #[test]
    fn a_page_that_was_used_again_in_the_guest_enters_the_main_queue() {
        let mut policy = filled(3, KEEPS);
        let used_again = true;
        policy.put(5, Put { used_again, ..PUT });
        assert_eq!(list(&policy, 5), Some(MAIN));
    }

    #[test]
    fn a_page_that_the_guest_has_costs_nothing_and_is_not_evicted() {
        let mut policy = filled(10, KEEPS);
        policy.get(0);
        assert_eq!(policy.bytes, [9, 0, 0]);
        assert_eq!((policy.evict(), list(&policy, 0)), (Some(1), Some(GHOST)));
    }

    #[test]
    fn a_flush_forgets_the_page() {
        let mut policy = filled(3, KEEPS);
        hit(&mut policy, 0);
        policy.flush(0);
        assert_eq!((list(&policy, 0), policy.evict()), (None, Some(1)));
        policy.put(0, PUT);
        assert_eq!(policy.pages[0].frequency, 0);
    }
}
