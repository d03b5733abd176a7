// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replay of a trace in a pool of shadow tenants. They use the engine's own index, policy and
//! quotas, and record the sizes of pages but not their contents.
//!
//! All tenants have the same weight and no reserve, so the pool evicts first from the tenant with
//! the largest charge. The charge of a page is, as in quotas, its stored bytes and
//! [`PAGE_METADATA_CHARGE_BYTES`](tmem_pool::PAGE_METADATA_CHARGE_BYTES).

use std::collections::BTreeMap;
use std::io;
use tmem_pool::{GetResult, PolicyKind, ShadowMemory, ShadowTenant};
use tmem_trace::format::{Event, ObjectKey, Op};

/// Results of a replay, for all tenants together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Number of pages that the guests requested.
    pub gets: u64,
    /// Number of requested pages that the replay returned.
    pub hits: u64,
    /// Number of pages that were put. This includes references (REF) of the trace that the replay
    /// turned into puts.
    pub puts: u64,
    /// Number of references (REF) to pages that were in the pool.
    pub refs_held: u64,
    /// Number of references (REF) to pages that were not in the pool.
    pub refs_gone: u64,
    /// Number of pages that the replay evicted.
    pub evictions: u64,
    /// Misses that would have been hits with more memory, by the engine's estimates during the
    /// replay, one counter for each percentage of
    /// [`GAIN_PERCENT`](tmem_trace::estimate::GAIN_PERCENT).
    pub gain_hits: [u64; 3],
    /// Hits that would have been misses with less memory than was used, by the engine's estimates
    /// during the replay, one counter for each percentage of
    /// [`LOSS_PERCENT`](tmem_trace::estimate::LOSS_PERCENT).
    pub loss_hits: [u64; 3],
    /// Estimated number of all hits, extrapolated from the hits that the estimator examined. A
    /// value of `loss_hits` divided by this number is the share of hits that would be lost.
    pub loss_hits_seen: u64,
    /// Largest charge of all tenants together at any time, in bytes.
    pub peak_bytes: u64,
}

/// Bytes of address space for the indexes of all tenants. This is ten times the memory for the keys
/// of the largest trace that a daemon records by default.
const INDEX_BYTES_MAX: u64 = 32 << 30;

/// Pages that the replay returned to the guest and did not retain, although the guest allowed it,
/// with their stored sizes in bytes. In the recording, the pool may have retained them.
type Removed = BTreeMap<(ObjectKey, u64), usize>;

/// Replays one request. Creates a pool when a request first names it, because a trace may begin
/// after the guest has created its pools. Returns false if there are too many keys or pools, or if
/// there is no memory.
///
/// If a pool answers that a page is not retained, the guest later puts the page instead of sending
/// a reference (REF). So if the replay did not retain a page, it replays the recorded reference to
/// the page as a put.
fn apply(tenant: &mut ShadowTenant, removed: &mut Removed, op: Op) -> bool {
    match op {
        Op::Put {
            object,
            page,
            workingset,
            size,
        } => {
            let pool = object.pool.into();
            let key = (object.object, page);
            removed.remove(&(object, page));
            return tenant.ensure_pool(pool) && tenant.put(pool, key, workingset, size.bytes());
        }
        Op::Get { object, page, .. } => {
            let pool = object.pool.into();
            if !tenant.ensure_pool(pool) {
                return false;
            }
            tenant.get(pool, (object.object, page));
        }
        Op::GetRetaining { object, page, .. } => {
            let pool = object.pool.into();
            if !tenant.ensure_pool(pool) {
                return false;
            }
            let key = (object.object, page);
            let stored_bytes = tenant.stored_bytes(pool, key);
            if let GetResult::Hit { .. } = tenant.get_retaining(pool, key, true) {
                removed.extend(stored_bytes.map(|bytes| ((object, page), bytes)));
            }
        }
        Op::Ref { object, page, .. } => {
            let pool = object.pool.into();
            if !tenant.ensure_pool(pool) {
                return false;
            }
            let key = (object.object, page);
            match removed.remove(&(object, page)) {
                Some(stored_bytes) => return tenant.put(pool, key, false, stored_bytes),
                None => tenant.refer(pool, key),
            };
        }
        Op::Flush {
            object,
            page,
            nr_pages,
        } => tenant.flush(object.pool.into(), object.object, page, nr_pages),
        Op::FlushObject(object) => tenant.flush(object.pool.into(), object.object, 0, None),
        Op::DestroyPool(pool) => tenant.destroy_pool(pool.into()),
        Op::Clear => {
            tenant.clear();
            removed.clear();
        }
    }
    true
}

/// A pool that replays traces. It has the keys and sizes of pages, but not their contents.
pub struct Replay {
    policy: PolicyKind,
    size_bytes: u64,
    seed: u64,
    memory: ShadowMemory,
    tenants: BTreeMap<u32, (ShadowTenant, Removed)>,
    charged_bytes: u64,
    peak_bytes: u64,
}

impl Replay {
    /// Creates an empty pool of this size in bytes. The seed determines the hashes of keys, which
    /// the index and the policy use.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub fn new(policy: PolicyKind, size_bytes: u64, seed: u64) -> io::Result<Replay> {
        Ok(Replay {
            policy,
            size_bytes,
            seed,
            memory: ShadowMemory::reserve(INDEX_BYTES_MAX)?,
            tenants: BTreeMap::new(),
            charged_bytes: 0,
            peak_bytes: 0,
        })
    }

    /// Replays one request of a trace. Ignores the recorded answer to the request. Returns false,
    /// and does nothing, if there are more keys or pools than a tenant may have, or if there is no
    /// memory.
    pub fn apply(&mut self, event: &Event) -> bool {
        let make = || {
            let tenant = ShadowTenant::new(self.policy, self.seed, &self.memory);
            (tenant, Removed::new())
        };
        let (tenant, removed) = self.tenants.entry(event.tenant).or_insert_with(make);
        let before = tenant.charged_bytes();
        let done = apply(tenant, removed, event.op);
        self.charged_bytes = self.charged_bytes + tenant.charged_bytes() - before;
        while self.charged_bytes > self.size_bytes {
            let tenants = self.tenants.values_mut().map(|(tenant, _)| tenant);
            let Some(victim) = tenants.max_by_key(|tenant| tenant.charged_bytes()) else {
                break;
            };
            let before = victim.charged_bytes();
            victim.evict();
            self.charged_bytes -= before - victim.charged_bytes();
        }
        self.peak_bytes = self.peak_bytes.max(self.charged_bytes);
        done
    }

    /// Returns the results of all tenants together, up to the last replayed request.
    pub fn outcome(&self) -> Outcome {
        let mut sum = Outcome {
            peak_bytes: self.peak_bytes,
            ..Outcome::default()
        };
        for stats in self.tenants.values().map(|(tenant, _)| tenant.stats()) {
            sum.gets += stats.gets;
            sum.hits += stats.hits;
            sum.puts += stats.puts;
            sum.refs_held += stats.refs - stats.refs_gone;
            sum.refs_gone += stats.refs_gone;
            sum.evictions += stats.evictions;
            for (sum, hits) in sum.gain_hits.iter_mut().zip(stats.gain_hits) {
                *sum += hits;
            }
            for (sum, hits) in sum.loss_hits.iter_mut().zip(stats.loss_hits) {
                *sum += hits;
            }
            sum.loss_hits_seen += stats.loss_hits_seen;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_trace::format::{ObjectKey, SizeClass};

    fn put(page: u64) -> Op {
        Op::Put {
            object: ObjectKey::default(),
            page,
            workingset: false,
            size: SizeClass::from_bytes(1024),
        }
    }

    fn get(page: u64) -> Op {
        Op::Get {
            object: ObjectKey::default(),
            page,
            hit: false,
        }
    }

    /// Replays these requests in an LRU pool. Returns hits, evictions and charged bytes.
    fn run(size_bytes: u64, ops: &[(u32, Op)]) -> (u64, u64, u64) {
        let mut replay = Replay::new(PolicyKind::Lru, size_bytes, 1).unwrap();
        for &(tenant, op) in ops {
            let event = Event {
                time_us: 0,
                tenant,
                op,
            };
            assert!(replay.apply(&event));
        }
        let outcome = replay.outcome();
        (outcome.hits, outcome.evictions, replay.charged_bytes)
    }

    const PAGE: u64 = 1024 + tmem_pool::PAGE_METADATA_CHARGE_BYTES;

    #[test]
    fn a_replayed_hit_removes_the_page() {
        let ops = [put(1), get(1), get(1), get(2)].map(|op| (0, op));
        assert_eq!(run(u64::MAX, &ops), (1, 0, 0));
    }

    #[test]
    fn refs_are_replayed_as_refs_or_as_puts() {
        let object = ObjectKey::default();
        let get = |page| Op::GetRetaining {
            object,
            page,
            hit: false,
        };
        let refer = |page| Op::Ref {
            object,
            page,
            held: false,
        };
        let ops = [put(1), get(1), get(1), refer(1), get(1), refer(2), get(2)];
        let ops = ops.map(|op| (0, op));
        assert_eq!(run(u64::MAX, &ops), (3, 0, PAGE));
        // The put of page 2 evicts the retained page 1, so the reference (REF) to page 1 finds no
        // page.
        let ops = [put(1), get(1), put(2), refer(1), super::tests::get(1)].map(|op| (0, op));
        assert_eq!(run(PAGE, &ops), (1, 1, PAGE));
        // The put of page 2 has evicted page 1. After an eviction, gets retain no page until the
        // tenant's charge is lower, so the get of page 2 removes it. The guest puts page 2 again
        // later.
        let ops = [put(1), put(2), get(2), refer(2), get(2)].map(|op| (0, op));
        assert_eq!(run(PAGE, &ops), (2, 1, 0));
    }

    #[test]
    fn a_full_pool_evicts_from_the_tenant_with_the_largest_charge() {
        let ops = [
            (0, put(1)),
            (0, put(2)),
            (1, put(1)),
            (1, get(1)),
            (0, get(1)),
            (0, get(2)),
        ];
        assert_eq!(run(2 * PAGE, &ops), (2, 1, 0));
        assert_eq!(run(2 * PAGE, &ops[..3]), (0, 1, 2 * PAGE));
    }

    #[test]
    fn a_replayed_flush_removes_only_the_pages_in_its_range() {
        let object = ObjectKey::default();
        let flush = |page, nr_pages| Op::Flush {
            object,
            page,
            nr_pages,
        };
        for (op, left) in [
            (flush(3, Some(2)), 98),
            (flush(3, None), 3),
            (flush(3, Some(0)), 100),
            (flush(99, Some(u64::MAX)), 99),
            (Op::FlushObject(object), 0),
            (Op::FlushObject(ObjectKey { pool: 0, object: 1 }), 100),
            (Op::DestroyPool(0), 0),
            (Op::DestroyPool(1), 100),
            (Op::Clear, 0),
        ] {
            let mut ops: Vec<_> = (0..100).map(|page| (0, put(page))).collect();
            ops.push((0, op));
            assert_eq!(
                run(u64::MAX, &ops).2,
                left * PAGE,
                "the replayed pool has a wrong charge after {op:?}"
            );
            ops.extend((0..100).map(|page| (0, get(page))));
            assert_eq!(
                run(u64::MAX, &ops).0,
                left,
                "the replayed pool counts a wrong number of hits after {op:?}"
            );
        }
    }
}
