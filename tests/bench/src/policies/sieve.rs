// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SIEVE (Zhang et al., NSDI 2024), for a cache from which a hit removes the page.
//!
//! As published: one queue, to which new pages are added at the newest end, with a visited bit for
//! each page and a hand. A hit sets the page's visited bit and moves nothing. To evict, the hand
//! moves from older to newer pages and clears the visited bits that it finds set. It evicts the
//! first page whose bit is clear, and then points to the next newer page. From the newest page, or
//! at the beginning, it moves to the oldest.
//!
//! Mapping to puts and gets: a get is the hit. The put that follows it does not count as another
//! use. With [`Reput::KeepsPlace`], the key stays in the queue while the guest has the page. If the
//! hand finds its bit clear, the key leaves the queue, and the hand moves on, because this freed no
//! bytes. With [`Reput::NewPlace`], a get removes the key, and the put adds it at the newest end
//! with its visited bit set. A hint of the guest that a page was used again counts as a hit.
//!
//! The simulation forgets no key of a page that the guest has. An implementation would have to
//! limit the number of these keys.

use super::lists::Lists;
use super::pool::{Policy, Reput};
use super::requests::{Key, Put};

const QUEUE: usize = 0;

#[derive(Clone, Copy, Default)]
struct Page {
    visited: bool,
    /// Whether the pool has the page.
    present: bool,
}

/// SIEVE policy of one tenant.
pub struct Sieve {
    reput: Reput,
    lists: Lists<1>,
    pages: Vec<Page>,
    /// Number of pages that the pool has.
    present: usize,
    hand: Option<Key>,
}

impl Sieve {
    /// Creates a policy without pages, for this number of keys.
    pub fn new(keys: usize, reput: Reput) -> Sieve {
        Sieve {
            reput,
            lists: Lists::new(keys),
            pages: vec![Page::default(); keys],
            present: 0,
            hand: None,
        }
    }

    /// Removes a key from the queue. If the hand points to the key, it moves to the next newer key.
    fn remove(&mut self, key: Key) {
        if self.hand == Some(key) {
            self.hand = self.lists.newer(key);
        }
        self.lists.remove(key);
    }

    /// Notes that a page has left the pool.
    fn leave(&mut self, key: Key) {
        self.pages[key as usize].present = false;
        self.present -= 1;
    }
}

impl Policy for Sieve {
    fn put(&mut self, key: Key, put: Put) {
        let page = &mut self.pages[key as usize];
        page.present = true;
        page.visited |= put.used_again;
        self.present += 1;
        if self.lists.list_of(key).is_none() {
            self.lists.push(QUEUE, key);
        }
    }

    fn get(&mut self, key: Key) {
        self.leave(key);
        self.pages[key as usize].visited = true;
        if self.reput == Reput::NewPlace {
            self.remove(key);
        }
    }

    fn flush(&mut self, key: Key) {
        self.leave(key);
        self.remove(key);
        self.pages[key as usize].visited = false;
    }

    fn evict(&mut self) -> Option<Key> {
        while self.present > 0 {
            let oldest = || self.lists.oldest(QUEUE);
            let key = self.hand.or_else(oldest).expect("the queue has no key");
            self.hand = Some(key);
            let page = &mut self.pages[key as usize];
            if std::mem::take(&mut page.visited) {
                self.hand = self.lists.newer(key);
                continue;
            }
            let present = page.present;
            self.remove(key);
            if present {
                self.leave(key);
                return Some(key);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::tests::{PUT, hit};

    const KEEPS: Reput = Reput::KeepsPlace;

    /// Returns a policy in which the keys from 0 to `pages` - 1 were put, each with a charge of one
    /// byte.
    fn filled(pages: Key, reput: Reput) -> Sieve {
        let mut policy = Sieve::new(100, reput);
        (0..pages).for_each(|key| policy.put(key, PUT));
        policy
    }

    #[test]
    fn pages_without_hits_leave_in_their_order() {
        let mut policy = filled(4, KEEPS);
        let evicted: Vec<_> = (0..5).map(|_| policy.evict()).collect();
        assert_eq!(evicted, [Some(0), Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn the_hand_stays_where_it_evicted_and_clears_the_visited_bits_that_it_passes() {
        let mut policy = filled(5, KEEPS);
        hit(&mut policy, 0);
        hit(&mut policy, 2);
        // The hand passes page 0, whose visited bit is set, and evicts page 1.
        assert_eq!(policy.evict(), Some(1));
        assert_eq!(policy.hand, Some(2));
        assert!(!policy.pages[0].visited && policy.pages[2].visited);
        policy.put(5, PUT);
        // The hand goes on from page 2. CLOCK and FIFO-Reinsertion would add pages 0 and 2 again
        // behind page 5.
        let evicted: Vec<_> = (0..5).map(|_| policy.evict()).collect();
        assert_eq!(evicted, [Some(3), Some(4), Some(5), Some(0), Some(2)]);
    }

    #[test]
    fn a_sweep_over_visited_pages_ends_at_the_oldest() {
        let mut policy = filled(3, KEEPS);
        (0..3).for_each(|key| hit(&mut policy, key));
        assert_eq!(policy.evict(), Some(0));
        assert_eq!(policy.hand, Some(1));
    }

    #[test]
    fn the_hand_moves_on_when_its_page_is_flushed() {
        let mut policy = filled(4, KEEPS);
        assert_eq!(policy.evict(), Some(0));
        policy.flush(1);
        assert_eq!((policy.hand, policy.evict()), (Some(2), Some(2)));
    }

    #[test]
    fn a_flush_clears_the_visited_bit() {
        let mut policy = filled(1, KEEPS);
        hit(&mut policy, 0);
        policy.flush(0);
        policy.put(0, PUT);
        policy.put(1, PUT);
        assert_eq!(policy.evict(), Some(0));
    }

    #[test]
    fn a_get_keeps_the_place_of_the_page_or_gives_it_the_newest_one() {
        let order = |reput| {
            let mut policy = filled(3, reput);
            hit(&mut policy, 0);
            std::iter::from_fn(move || policy.evict()).collect::<Vec<_>>()
        };
        assert_eq!(order(Reput::KeepsPlace), [1, 2, 0]);
        let mut policy = filled(3, Reput::NewPlace);
        hit(&mut policy, 0);
        policy.put(3, PUT);
        assert!(policy.pages[0].visited);
        // Page 0 is between pages 2 and 3, so the hand evicts page 1 before it reaches page 0.
        assert_eq!((policy.evict(), policy.pages[0].visited), (Some(1), true));
        let order: Vec<_> = std::iter::from_fn(|| policy.evict()).collect();
        assert_eq!(order, [2, 3, 0]);
    }

    #[test]
    fn a_page_that_was_used_again_in_the_guest_is_visited() {
        let mut policy = filled(0, KEEPS);
        let used_again = true;
        policy.put(0, Put { used_again, ..PUT });
        policy.put(1, PUT);
        assert_eq!(policy.evict(), Some(1));
    }

    #[test]
    fn a_page_that_the_guest_has_is_not_evicted() {
        let mut policy = filled(2, KEEPS);
        policy.get(0);
        hit(&mut policy, 1);
        // The hand passes both pages. Then it finds the bit of page 0 clear and moves on to page 1.
        assert_eq!((policy.evict(), policy.evict()), (Some(1), None));
        assert_eq!(policy.lists.list_of(0), None);
    }
}
