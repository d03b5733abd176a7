// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Optimum: the hits of a policy that knows all later requests (MIN, Belady, 1966).
//!
//! A page is worth its memory from its put to the get that returns it. The policy drops a page at
//! once if no get returns it. A full pool evicts the page whose get is farthest away. If all pages
//! have the same charge, no policy has more hits. With different charges the result is close to the
//! optimum, because a large page whose get is a little nearer than those of two small pages could
//! be evicted instead.

use super::requests::{Kind, Requests};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Puts and gets of a trace, in which each put has the number of the get that returns its page.
pub struct Optimum {
    /// Steps in the order of the requests: each put whose page a later get returns, and each get
    /// that returns such a page.
    steps: Vec<Step>,
}

enum Step {
    /// A page with this charge in bytes is put. The get with this number returns it.
    Put(u32, usize),
    /// The get with this number. It is a hit if the pool still has the page.
    Get(usize),
}

impl Optimum {
    /// Finds the get that returns each put page.
    pub fn new(requests: &Requests) -> Optimum {
        let mut puts = HashMap::new();
        let mut ends = BTreeMap::new();
        for (nr, request) in requests.list.iter().enumerate() {
            let page = (request.tenant, request.key);
            match request.kind {
                Kind::Put(bytes) => _ = puts.insert(page, (nr, bytes)),
                Kind::Flush => _ = puts.remove(&page),
                Kind::Get => {
                    if let Some((put, bytes)) = puts.remove(&page) {
                        ends.insert(put, Step::Put(bytes, nr));
                        ends.insert(nr, Step::Get(nr));
                    }
                }
            }
        }
        Optimum {
            steps: ends.into_values().collect(),
        }
    }

    /// Returns the number of hits in a pool of this size in bytes, and the largest number of bytes
    /// that the pool held.
    pub fn hits(&self, size_bytes: u64) -> (u64, u64) {
        let (mut pages, mut held_bytes) = (BTreeSet::new(), 0);
        let (mut hits, mut peak_bytes) = (0, 0);
        for step in &self.steps {
            match *step {
                Step::Put(bytes, end) => {
                    pages.insert((end, bytes));
                    held_bytes += u64::from(bytes);
                    while held_bytes > size_bytes {
                        let (_, bytes) = pages.pop_last().expect("a pool has bytes but no page");
                        held_bytes -= u64::from(bytes);
                    }
                    peak_bytes = peak_bytes.max(held_bytes);
                }
                Step::Get(nr) => {
                    if pages.first().is_some_and(|(end, _)| *end == nr) {
                        let (_, bytes) = pages.pop_first().expect("the first page is gone");
                        held_bytes -= u64::from(bytes);
                        hits += 1;
                    }
                }
            }
        }
        (hits, peak_bytes)
    }

    /// Returns the size in bytes of the smallest pool in which the optimum evicts no page that a
    /// get returns, and the number of hits in that pool. No pool has more hits.
    pub fn need(&self) -> (u64, u64) {
        let (hits, peak_bytes) = self.hits(u64::MAX);
        (peak_bytes, hits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::requests::Request;
    use super::*;

    const PUT: Kind = Kind::Put(10);

    fn optimum(list: &[(u32, Kind)]) -> Optimum {
        let request = |&(key, kind): &(u32, Kind)| Request {
            tenant: 0,
            key,
            kind,
        };
        Optimum::new(&Requests {
            list: list.iter().map(request).collect(),
        })
    }

    #[test]
    fn the_page_whose_get_is_farthest_away_is_evicted() {
        let list = [
            (0, PUT),
            (1, PUT),
            (2, PUT),
            (1, Kind::Get),
            (2, Kind::Get),
            (0, Kind::Get),
        ];
        let optimum = optimum(&list);
        assert_eq!(optimum.need(), (30, 3));
        assert_eq!(optimum.hits(20), (2, 20));
        assert_eq!(optimum.hits(10), (1, 10));
        let list = [
            (0, PUT),
            (1, PUT),
            (1, Kind::Get),
            (2, PUT),
            (2, Kind::Get),
            (0, Kind::Get),
        ];
        assert_eq!(self::optimum(&list).hits(10), (2, 10));
    }

    #[test]
    fn pages_that_no_get_returns_take_no_memory() {
        let list = [
            (0, PUT),
            (1, PUT),
            (2, PUT),
            (3, PUT),
            (1, Kind::Flush),
            (2, PUT),
            (1, Kind::Get),
            (2, Kind::Get),
            (2, Kind::Get),
        ];
        assert_eq!(optimum(&list).need(), (10, 1));
    }
}
