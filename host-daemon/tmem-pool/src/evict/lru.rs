// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Least recently used: evicts the page that was used longest ago.
//!
//! It is FIFO. A hit removes its page, and the put that brings the page or another content back makes
//! a new entry at the end of the queue. So the order of puts is the order of last use.

pub(super) type Lru = super::fifo::Fifo;

#[cfg(test)]
mod tests {
    use crate::PolicyKind;
    use crate::replay::Replay;
    use crate::tests::rng::{Rng, for_each_seed};
    use crate::trace::{Event, ObjectKey, Op, SizeClass};
    use std::collections::BTreeMap;

    /// A model without queues: it has the time of each page's last use, and a get removes its page.
    #[test]
    fn it_evicts_what_was_used_longest_ago() {
        const ROOM: usize = 50;
        let size = SizeClass::of_bytes(1024);
        let page_bytes = size.bytes() as u64 + crate::PAGE_METADATA_CHARGE_BYTES;
        for_each_seed("lru", 5, |seed| {
            let mut rng = Rng::new(seed);
            let mut replay = Replay::new(PolicyKind::Lru, ROOM as u64 * page_bytes, seed).unwrap();
            let (mut used, mut hits) = (BTreeMap::new(), 0);
            for time_us in 0..20_000 {
                let (object, page) = (ObjectKey::default(), rng.below(120));
                let op = if rng.one_in(2) {
                    used.insert(page, time_us);
                    if used.len() > ROOM {
                        let oldest = *used.iter().min_by_key(|(_, time)| **time).unwrap().0;
                        used.remove(&oldest);
                    }
                    let workingset = rng.one_in(2);
                    Op::Put {
                        object,
                        page,
                        workingset,
                        size,
                    }
                } else {
                    hits += u64::from(used.remove(&page).is_some());
                    let hit = false;
                    Op::Get { object, page, hit }
                };
                let tenant = 0;
                assert!(replay.apply(&Event {
                    time_us,
                    tenant,
                    op
                }));
                assert_eq!(replay.outcome().hits, hits);
            }
            assert!(replay.outcome().evictions > 1000 && hits > 1000);
        });
    }
}
