// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generated loads: the reads of a guest, and the requests that its page cache leaves over for the
//! pool.
//!
//! The pool sees only the reads that miss in the guest's page cache, as gets, and the pages that
//! the page cache evicts, as puts. The page cache is an LRU list. A page that the guest used again
//! after it had read the page is put with that hint, as the driver does. The model has no admission
//! filter.

use clap::ValueEnum;
use std::collections::{BTreeMap, HashMap};
use tmem_trace::format::{Event, ObjectKey, Op, SizeClass};

/// Number of pages of an object. A load numbers its pages continuously through all objects.
const OBJECT_PAGES: u64 = 64;

/// Stored size in bytes of each page of a generated load. With equal sizes, the optimum is exact.
const STORED_BYTES: usize = 1024;

/// Number of reads of a load.
const READS: u64 = 160_000;

/// Number of pages for which the guest's page cache has room.
const CACHE_PAGES: usize = 2_000;

/// A generated load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// Reads of single pages, chosen from 20,000 by Zipf's law. Within 100,000 reads, all popular
    /// pages change.
    ZipfDrift,
    /// Reads of a file of 8,000 pages, from beginning to end, 20 times.
    Loop,
    /// Reads of single pages, chosen from 15,000 by Zipf's law. After each 12,000 of these reads, a
    /// scan reads 8,000 other pages once.
    ScanMix,
    /// A boot: two of three reads read the next page of a large image, which is read once. The
    /// others read one of 4,000 pages at random.
    Boot,
    /// Reads of random pages of 8,000, while the guest's page cache shrinks from 8,000 pages to
    /// 800.
    Shrink,
}

impl Load {
    /// All generated loads, in the order of the report.
    pub const ALL: [Load; 5] = [
        Load::ZipfDrift,
        Load::Loop,
        Load::ScanMix,
        Load::Boot,
        Load::Shrink,
    ];

    /// Returns the name of the load, as the command line has it.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("a load has no name");
        value.get_name().into()
    }

    /// Returns the requests of a guest with this load. The seed determines the random reads.
    pub fn events(self, seed: u64) -> Vec<Event> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let fixed = |_| CACHE_PAGES;
        let size = |_| STORED_BYTES;
        match self {
            Load::ZipfDrift => {
                const PAGES: u64 = 20_000;
                // The ranks of all pages rise, so that popular pages cool down. The coldest page
                // becomes the most popular one.
                guest(READS, fixed, size, |nr| {
                    scatter(zipf(&mut rng, PAGES) + PAGES * READS - nr / 5, PAGES)
                })
            }
            Load::Loop => guest(READS, fixed, size, |nr| nr % 8_000),
            Load::ScanMix => {
                const PAGES: u64 = 15_000;
                guest(READS, fixed, size, |nr| match nr % 20_000 {
                    0..12_000 => scatter(zipf(&mut rng, PAGES), PAGES),
                    _ => PAGES + nr,
                })
            }
            Load::Boot => guest(READS, fixed, size, |nr| match nr % 3 {
                0 => rng.u64(..4_000),
                _ => 4_000 + nr,
            }),
            Load::Shrink => {
                let cache = |nr| (8_000 - 7_200 * nr / READS) as usize;
                guest(READS, cache, size, |_| rng.u64(..8_000))
            }
        }
    }
}

/// Returns a random rank below `pages` by Zipf's law: the probability of rank n is in proportion to
/// 1/(n + 1).
fn zipf(rng: &mut fastrand::Rng, pages: u64) -> u64 {
    ((pages as f64).powf(rng.f64()) - 1.0) as u64
}

/// Returns the page with this rank. Pages of neighbouring ranks are in different objects.
fn scatter(rank: u64, pages: u64) -> u64 {
    (rank % pages) * 7919 % pages
}

/// Returns the requests of a simulated guest. `cache_pages` returns the size of its page cache, in
/// pages, at a read. While the page cache is larger, the guest evicts the least recently used page
/// and puts it. The guest gets each page that it reads and that is not in its page cache. `next`
/// returns the number of the page that the guest reads next, and `stored_bytes` the stored size of
/// a page.
pub fn guest(
    reads: u64,
    cache_pages: impl Fn(u64) -> usize,
    stored_bytes: impl Fn(u64) -> usize,
    mut next: impl FnMut(u64) -> u64,
) -> Vec<Event> {
    let (mut events, mut used, mut order) = (Vec::new(), HashMap::new(), BTreeMap::new());
    for time_us in 0..reads {
        let page = next(time_us);
        let place = |page: u64| {
            let object = ObjectKey {
                pool: 0,
                object: page / OBJECT_PAGES,
            };
            (object, page % OBJECT_PAGES)
        };
        let mut event = |op| {
            events.push(Event {
                time_us,
                tenant: 0,
                op,
            });
        };
        let before: Option<(u64, bool)> = used.insert(page, (time_us, false));
        match before {
            Some((before, _)) => {
                order.remove(&before);
                used.insert(page, (time_us, true));
            }
            None => {
                let (object, page) = place(page);
                event(Op::Get {
                    object,
                    page,
                    hit: false,
                });
            }
        }
        order.insert(time_us, page);
        while used.len() > cache_pages(time_us) {
            let (_, oldest) = order
                .pop_first()
                .expect("the page cache has no oldest page, although it has too many pages");
            let (_, workingset) = used
                .remove(&oldest)
                .expect("the page cache has no page, although it is in the order of use");
            let (object, page) = place(oldest);
            event(Op::Put {
                object,
                page,
                workingset,
                size: SizeClass::from_bytes(stored_bytes(oldest)),
            });
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_hides_hits_and_puts_what_it_evicts() {
        // Page 1 is used again, so page 2 is the oldest when the page cache has no room for page 3.
        // The page cache shrinks to one page at the last read.
        let reads = [1, 2, 1, 3, 3];
        let cache = |nr| if nr < 4 { 2 } else { 1 };
        let events = guest(5, cache, |_| 300, |nr| reads[nr as usize]);
        let ops: Vec<_> = events
            .iter()
            .map(|event| match event.op {
                Op::Get { page, .. } => ("get", page),
                Op::Put {
                    page,
                    size,
                    workingset,
                    ..
                } => {
                    assert_eq!(size, SizeClass::from_bytes(300));
                    (if workingset { "put again" } else { "put" }, page)
                }
                _ => panic!("the guest sent {event:?}"),
            })
            .collect();
        let wanted = [
            ("get", 1),
            ("get", 2),
            ("get", 3),
            ("put", 2),
            ("put again", 1),
        ];
        assert_eq!(ops, wanted);
    }

    #[test]
    fn a_seed_replays_the_same_load() {
        for load in Load::ALL {
            assert!(load.events(1) == load.events(1), "{}", load.name());
            let seeded = load != Load::Loop;
            assert_eq!(load.events(1) != load.events(2), seeded, "{}", load.name());
        }
    }
}
