// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replay of a trace through the engine's own index, policy and quotas, with sizes in place of
//! contents.
//!
//! All tenants have the same weight and no reserve, so the tenant with the largest charge gives up
//! pages first. Pages are charged as quotas count them: stored bytes and
//! [`PAGE_METADATA_CHARGE_BYTES`](crate::PAGE_METADATA_CHARGE_BYTES). The nursery is left out: a
//! page has its final size at once.

use crate::blob::Settled;
use crate::config::{KEYS_PER_TENANT_MAX, PolicyKind};
use crate::entry::Content;
use crate::index::{Chunks, PoolRef};
use crate::state::{Freed, NewPage, Range, Reason, State};
use crate::trace::{Event, Op};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Results of a replay, for a whole trace or for one tenant in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Number of requested pages.
    pub gets: u64,
    /// Number of returned pages.
    pub hits: u64,
    /// Number of pages that were put.
    pub puts: u64,
    /// Number of evicted pages.
    pub evictions: u64,
    /// Misses that would have been hits with more memory, as the engine estimates while it runs, in
    /// the order of [`GAIN_PERCENT`](crate::GAIN_PERCENT).
    pub gain_hits: [u64; 3],
    /// Hits that would have been misses with less memory than was used, as the engine estimates
    /// while it runs, in the order of [`LOSS_PERCENT`](crate::LOSS_PERCENT).
    pub loss_hits: [u64; 3],
    /// Hits from which `loss_hits` is estimated.
    pub loss_hits_seen: u64,
    /// Largest charge at any time, in bytes.
    pub peak_bytes: u64,
}

impl Outcome {
    /// Returns the share of the requested pages that were returned, 0 to 1.
    pub fn hit_ratio(&self) -> f64 {
        self.hits as f64 / self.gets.max(1) as f64
    }
}

/// Address space for indexes: ten times the memory for the keys of the largest trace that a daemon
/// records on its own.
const INDEX_BYTES_MAX: u64 = 32 << 30;

struct Tenant {
    state: State,
    hits: u64,
}

impl Tenant {
    fn new(policy: PolicyKind, seed: u64, chunks: &Arc<Chunks>) -> Tenant {
        let mut state = State::new(seed, KEYS_PER_TENANT_MAX, u64::MAX, policy, chunks);
        state.raw_max = u32::MAX;
        Tenant { state, hits: 0 }
    }

    /// Returns the pool, which is created when a request first names it: a trace may begin in the
    /// middle. None: there are too many pools, or there is no memory.
    fn pool(&mut self, nr: u16) -> Option<PoolRef> {
        if self.state.pool(nr.into()).is_err() {
            self.state.create_pool(nr.into()).ok()?;
        }
        self.state.pool(nr.into()).ok()
    }

    /// Replays one request. False: there are too many keys or pools, or there is no memory.
    fn apply(&mut self, op: Op) -> bool {
        let mut freed = Freed::new();
        match op {
            Op::Put {
                object,
                page,
                workingset,
                size,
            } => {
                let Some(pool) = self.pool(object.pool) else {
                    return false;
                };
                let new = NewPage {
                    object: object.object,
                    index: page,
                    cookie: 0,
                    workingset,
                    blob: 0,
                    check: 0,
                };
                if !self.state.put(pool, new, true, &mut freed) {
                    return false;
                }
                let raw = self.state.next_raw().expect("it is raw");
                let settled = Settled {
                    content: Content::Same(0),
                    stored_bytes: size.bytes(),
                    shared: false,
                };
                self.state.settle(raw, settled, &mut freed);
            }
            Op::Get { object, page, .. } => {
                let Some(pool) = self.pool(object.pool) else {
                    return false;
                };
                let (mut taken, mut ids) = ([None], [0]);
                let state = &mut self.state;
                state.take(pool, object.object, page, &[0], &mut taken, &mut ids);
                self.hits += u64::from(taken[0].is_some());
            }
            Op::Flush {
                object,
                page,
                nr_pages,
            } => {
                let last = match nr_pages {
                    None => u64::MAX,
                    Some(0) => return true,
                    Some(nr_pages) => page.saturating_add(nr_pages - 1),
                };
                self.flush(object.pool, object.object, page, last);
            }
            Op::FlushObject(object) => self.flush(object.pool, object.object, 0, u64::MAX),
            // A pool that was not named before has no pages.
            Op::DestroyPool(pool) => {
                let _ = self.state.destroy_pool(pool.into());
            }
            Op::Clear => self.state.clear(),
        }
        while self.state.index.has_detached() {
            self.state.reap(usize::MAX, &mut freed);
        }
        true
    }

    fn flush(&mut self, pool: u16, object: u64, index: u64, last: u64) {
        if let Ok(pool) = self.state.pool(pool.into()) {
            let range = Range {
                object,
                index,
                last,
            };
            let mut freed = Freed::new();
            while self.state.flush(pool, range, usize::MAX, &mut freed) {}
            self.state.forget(pool, range);
        }
    }
}

/// A pool that has keys and sizes, and no contents.
pub struct Replay {
    policy: PolicyKind,
    size_bytes: u64,
    seed: u64,
    chunks: Arc<Chunks>,
    tenants: BTreeMap<u32, Tenant>,
    charged_bytes: u64,
    peak_bytes: u64,
}

impl Replay {
    /// Creates an empty replay of this size in bytes. The seed is for the index, whose hashes the
    /// policy uses.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub fn new(policy: PolicyKind, size_bytes: u64, seed: u64) -> io::Result<Replay> {
        let chunks = Chunks::reserve(INDEX_BYTES_MAX)?;
        Ok(Replay {
            policy,
            size_bytes,
            seed,
            chunks: Arc::new(chunks),
            tenants: BTreeMap::new(),
            charged_bytes: 0,
            peak_bytes: 0,
        })
    }

    /// Replays a request, whatever its answer was at the time. False: there are more keys or pools
    /// than a tenant may have, or there is no memory; then nothing was done.
    pub fn apply(&mut self, event: &Event) -> bool {
        let make = || Tenant::new(self.policy, self.seed, &self.chunks);
        let tenant = self.tenants.entry(event.tenant).or_insert_with(make);
        let before = tenant.state.charged_bytes();
        let done = tenant.apply(event.op);
        self.charged_bytes = self.charged_bytes + tenant.state.charged_bytes() - before;
        while self.charged_bytes > self.size_bytes {
            let tenants = self.tenants.values_mut();
            let Some(victim) = tenants.max_by_key(|tenant| tenant.state.charged_bytes()) else {
                break;
            };
            let before = victim.state.charged_bytes();
            victim.state.evict(1, Reason::Pool, &mut Freed::new());
            self.charged_bytes -= before - victim.state.charged_bytes();
        }
        self.peak_bytes = self.peak_bytes.max(self.charged_bytes);
        done
    }

    /// Returns the results of all tenants together, as of now.
    pub fn outcome(&self) -> Outcome {
        let mut sum = Outcome {
            peak_bytes: self.peak_bytes,
            ..Outcome::default()
        };
        for Tenant { state, hits } in self.tenants.values() {
            sum.gets += state.counters.gets;
            sum.hits += hits;
            sum.puts += state.counters.puts;
            sum.evictions += state.counters.evictions;
            for (sum, hits) in sum.gain_hits.iter_mut().zip(state.gain.hits) {
                *sum += hits;
            }
            for (sum, hits) in sum.loss_hits.iter_mut().zip(state.gain.losses) {
                *sum += hits;
            }
            sum.loss_hits_seen += state.gain.hits_seen;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{ObjectKey, SizeClass};

    fn put(page: u64) -> Op {
        Op::Put {
            object: ObjectKey::default(),
            page,
            workingset: false,
            size: SizeClass::of_bytes(1024),
        }
    }

    fn get(page: u64) -> Op {
        Op::Get {
            object: ObjectKey::default(),
            page,
            hit: false,
        }
    }

    /// Returns hits, evictions and charged bytes after these requests.
    fn run(size_bytes: u64, ops: &[(u32, Op)]) -> (u64, u64, u64) {
        let mut replay = Replay::new(PolicyKind::Fifo, size_bytes, 1).unwrap();
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

    const PAGE: u64 = 1024 + crate::PAGE_METADATA_CHARGE_BYTES;

    #[test]
    fn a_page_is_got_once() {
        let ops = [put(1), get(1), get(1), get(2)].map(|op| (0, op));
        assert_eq!(run(u64::MAX, &ops), (1, 0, 0));
    }

    #[test]
    fn the_size_holds_and_who_has_most_gives() {
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
    fn what_is_flushed_is_gone() {
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
            assert_eq!(run(u64::MAX, &ops).2, left * PAGE, "{op:?}");
            ops.extend((0..100).map(|page| (0, get(page))));
            assert_eq!(run(u64::MAX, &ops).0, left, "{op:?}");
        }
    }
}
