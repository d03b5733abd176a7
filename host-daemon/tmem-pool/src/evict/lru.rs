// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Least-recently-used eviction policy: evicts the page that was used longest ago.
//!
//! A get that returns a page removes it from the queue. When the guest puts the page again, changed
//! or not, the policy adds the page at the end of the queue. A reference (REF) of a retained page
//! adds the page at the end, too. Both follow an eviction by the guest, so the queue is in order of
//! last use.

use super::queue::Queue;
use super::{Arrival, Leave, Policy, References};
use crate::index::{Entries, Id, Index};

#[derive(Debug, Default)]
pub(super) struct Lru(Queue);

impl Policy for Lru {
    fn insert(&mut self, entries: &mut Entries, id: Id, _arrival: Arrival) {
        self.0.push(entries, id);
    }

    fn remove(&mut self, entries: &mut Entries, id: Id, _leave: Leave, _key_hash: u64) {
        self.0.remove(entries, id);
    }

    fn victim(&mut self, _: &mut Index, _: References<'_>) -> Option<Id> {
        self.0.head()
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id)) {
        self.0.check(entries, page);
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::rng::{Rng, for_each_seed};
    use crate::{PAGE_METADATA_CHARGE_BYTES, PolicyKind, ShadowMemory, ShadowTenant};
    use std::collections::BTreeMap;

    /// Compares the LRU policy with a model that has no queues. The model records the time of each
    /// page's last use and, like the policy, removes a page at a get.
    #[test]
    fn lru_evicts_the_least_recently_used_page() {
        const ROOM: usize = 50;
        const STORED_BYTES: usize = 1024;
        let size_bytes = ROOM as u64 * (STORED_BYTES as u64 + PAGE_METADATA_CHARGE_BYTES);
        for_each_seed("lru", 5, |seed| {
            let mut rng = Rng::new(seed);
            let memory = ShadowMemory::reserve(1 << 30).unwrap();
            let mut tenant = ShadowTenant::new(PolicyKind::Lru, seed, &memory);
            assert!(tenant.ensure_pool(1));
            let (mut used, mut hits) = (BTreeMap::new(), 0);
            for now in 0..20_000 {
                let page = rng.below(120);
                if rng.one_in(2) {
                    used.insert(page, now);
                    if used.len() > ROOM {
                        let oldest = *used.iter().min_by_key(|(_, time)| **time).unwrap().0;
                        used.remove(&oldest);
                    }
                    assert!(tenant.put(1, (0, page), rng.one_in(2), STORED_BYTES));
                    while tenant.charged_bytes() > size_bytes {
                        tenant.evict();
                    }
                } else {
                    hits += u64::from(used.remove(&page).is_some());
                    tenant.get(1, (0, page));
                }
                assert_eq!(tenant.stats().hits, hits);
            }
            assert!(tenant.stats().evictions > 1000 && hits > 1000);
        });
    }
}
