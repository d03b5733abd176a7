// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Optimum: the hits of a policy that knows all later requests (MIN, Belady, 1966).
//!
//! A page is worth its memory from its put to the get that returns it. The policy drops a page at
//! once if no get returns it. A full pool evicts the page whose get is farthest away. If all pages
//! have the same charge, no policy has more hits. With different charges the result is close to the
//! optimum, because a large page whose get is a little nearer than those of two small pages could
//! be evicted instead.

use std::collections::{BTreeMap, BTreeSet};
use tmem_pool::PAGE_METADATA_CHARGE_BYTES;
use tmem_trace::format::{Event, ObjectKey, Op};

/// Puts and gets of a trace without retention, in which each put has the number of the get that
/// returns its page.
pub struct Optimum {
    /// Steps in the order of the events: each put whose page a later get returns, and each get
    /// that returns such a page.
    steps: Vec<Step>,
}

enum Step {
    /// A page with this charge in bytes is put. The get with this number returns it.
    Put(u64, usize),
    /// The get with this number. It is a hit if the pool still has the page.
    Get(usize),
}

impl Optimum {
    /// Finds the get that returns each put page.
    pub fn new(events: &[Event]) -> Optimum {
        let mut puts = BTreeMap::new();
        let mut ends = BTreeMap::new();
        for (nr, event) in events.iter().enumerate() {
            let at = |object, page| (event.tenant, object, page);
            let object = |pool, object| ObjectKey { pool, object };
            let (first, last) = match event.op {
                Op::Put {
                    object, page, size, ..
                } => {
                    let bytes = size.bytes() as u64 + PAGE_METADATA_CHARGE_BYTES;
                    puts.insert(at(object, page), (nr, bytes));
                    continue;
                }
                Op::Get { object, page, .. } => {
                    if let Some((put, bytes)) = puts.remove(&at(object, page)) {
                        ends.insert(put, Step::Put(bytes, nr));
                        ends.insert(nr, Step::Get(nr));
                    }
                    continue;
                }
                Op::GetRetaining { .. } | Op::Ref { .. } => {
                    unreachable!("the trace still has requests of retained pages")
                }
                Op::Flush {
                    nr_pages: Some(0), ..
                } => continue,
                Op::Flush {
                    object,
                    page,
                    nr_pages,
                } => {
                    let last = nr_pages.map_or(u64::MAX, |pages| page.saturating_add(pages - 1));
                    (at(object, page), at(object, last))
                }
                Op::FlushObject(object) => (at(object, 0), at(object, u64::MAX)),
                Op::DestroyPool(pool) => {
                    (at(object(pool, 0), 0), at(object(pool, u64::MAX), u64::MAX))
                }
                Op::Clear => (
                    at(object(0, 0), 0),
                    at(object(u16::MAX, u64::MAX), u64::MAX),
                ),
            };
            let flushed: Vec<_> = puts.range(first..=last).map(|(page, _)| *page).collect();
            flushed.iter().for_each(|page| _ = puts.remove(page));
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
                    held_bytes += bytes;
                    while held_bytes > size_bytes {
                        let (_, bytes) = pages.pop_last().expect("a pool has bytes but no page");
                        held_bytes -= bytes;
                    }
                    peak_bytes = peak_bytes.max(held_bytes);
                }
                Step::Get(nr) => {
                    if pages.first().is_some_and(|(end, _)| *end == nr) {
                        let (_, bytes) = pages.pop_first().expect("the first page is gone");
                        held_bytes -= bytes;
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
    use super::*;
    use tmem_trace::format::SizeClass;

    const OBJECT: ObjectKey = ObjectKey { pool: 1, object: 1 };
    const SIZE: usize = 1024;
    /// Charge in bytes of each page.
    const PAGE: u64 = SIZE as u64 + PAGE_METADATA_CHARGE_BYTES;

    fn put(page: u64) -> Op {
        Op::Put {
            object: OBJECT,
            page,
            workingset: false,
            size: SizeClass::from_bytes(SIZE),
        }
    }

    fn get(page: u64) -> Op {
        Op::Get {
            object: OBJECT,
            page,
            hit: false,
        }
    }

    fn optimum(ops: &[Op]) -> Optimum {
        let event = |op: &Op| Event {
            time_us: 0,
            tenant: 7,
            op: *op,
        };
        Optimum::new(&ops.iter().map(event).collect::<Vec<_>>())
    }

    #[test]
    fn the_page_whose_get_is_farthest_away_is_evicted() {
        let first = optimum(&[put(0), put(1), put(2), get(1), get(2), get(0)]);
        assert_eq!(first.need(), (3 * PAGE, 3));
        assert_eq!(first.hits(2 * PAGE), (2, 2 * PAGE));
        assert_eq!(first.hits(PAGE), (1, PAGE));
        let second = optimum(&[put(0), put(1), get(1), put(2), get(2), get(0)]);
        assert_eq!(second.hits(PAGE), (2, PAGE));
    }

    #[test]
    fn pages_that_no_get_returns_take_no_memory() {
        let flush = |page, nr_pages| Op::Flush {
            object: OBJECT,
            page,
            nr_pages,
        };
        let ops = [
            put(0),
            put(1),
            put(2),
            put(3),
            flush(1, Some(1)),
            flush(2, Some(0)),
            put(2),
            get(1),
            get(2),
            get(2),
        ];
        assert_eq!(optimum(&ops).need(), (PAGE, 1));
        let other = ObjectKey { pool: 2, object: 1 };
        for (op, hits) in [
            (flush(2, None), 2),
            (flush(1, Some(2)), 2),
            (Op::FlushObject(OBJECT), 0),
            (Op::FlushObject(other), 4),
            (Op::DestroyPool(1), 0),
            (Op::DestroyPool(2), 4),
            (Op::Clear, 0),
        ] {
            let puts = (0..4).map(put);
            let ops: Vec<Op> = puts.chain([op]).chain((0..4).map(get)).collect();
            assert_eq!(optimum(&ops).need().1, hits, "{op:?}");
        }
    }
}
