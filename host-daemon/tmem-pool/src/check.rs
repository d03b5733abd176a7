// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine's invariants, recounted from scratch. For tests and simulators: it walks everything.

use crate::blob::{Blob, DomainId};
use crate::entry::{Content, Entry, Gauges};
use crate::evict::{Key, Policy};
use crate::index::Index;
use crate::pool::Pool;
use crate::tenant;
use std::collections::HashMap;
use std::sync::Arc;

/// What is found on the way.
#[derive(Default)]
struct Found {
    keys: u64,
    objects: u64,
    pools: u64,
    /// By address: the blob, its domain and how many entries refer to it.
    blobs: HashMap<*const Blob, (Arc<Blob>, DomainId, usize)>,
}

impl Pool {
    /// Recounts all sums, references and queues and compares them with what is kept.
    ///
    /// # Panics
    /// If one is wrong, or if another thread is in a call meanwhile.
    pub fn check_invariants(&self) {
        let inner = self.inner();
        let registry = inner.read();
        let mut found = Found::default();
        let mut entitled_bytes = 0;
        for member in &registry.members {
            found.tenant(&member.tenant);
            entitled_bytes += member.tenant.entitled_bytes.get();
        }
        assert!(
            entitled_bytes <= registry.size_bytes,
            "entitlements exceed the pool"
        );
        for departed in &registry.departed {
            assert_eq!(
                departed.lock().index.gauges,
                Gauges::default(),
                "a departed tenant's index"
            );
            found.tenant(departed);
        }
        let account = &inner.store.account;
        let tenants = registry.members.len() + registry.departed.len();
        assert_eq!(account.tenants.get(), tenants as u64, "tenants");
        assert_eq!(account.keys.get(), found.keys, "keys");
        assert_eq!(account.objects.get(), found.objects, "objects");
        assert_eq!(account.pools.get(), found.pools, "pools");
        assert_eq!(account.blobs.get(), found.blobs.len() as u64, "blobs");
        let mut payload_bytes = 0;
        for (blob, domain, references) in found.blobs.values() {
            payload_bytes += blob.stored_bytes();
            assert_eq!(blob.domain(), *domain, "a blob of another trust domain");
            assert_eq!(
                Arc::strong_count(blob),
                references + 1,
                "references to a blob"
            );
        }
        assert_eq!(account.payload_bytes.get(), payload_bytes, "payload");
        let live = found.blobs.keys().copied().collect();
        inner.store.check_listed(&live);
    }
}

impl Found {
    fn tenant(&mut self, tenant: &tenant::Inner) {
        let state = tenant.lock();
        let gauges = self.index(&state.index, tenant.domain(), Some(&*state.policy));
        let (live, queued) = (gauges.pages as usize, state.policy.len());
        let detached = state.detached.pages as usize;
        assert!(
            live <= queued && queued <= live + detached,
            "queue {queued}, live {live}"
        );
        let counters = state.counters;
        let came = counters.puts - counters.puts_refused;
        let went = counters.replaced_pages
            + counters.evictions
            + counters.flushed_pages
            + counters.hits
            + counters.hash_mismatches;
        assert_eq!(
            came - went,
            u64::from(gauges.pages),
            "pages that came and did not go"
        );
        let mut detached = Gauges::default();
        for dead in &state.dead {
            detached.add(self.index(&dead.index, tenant.domain(), None));
        }
        assert_eq!(state.detached, detached, "detached pages");
        assert_eq!(
            tenant.charged_bytes.get(),
            state.charged_bytes(),
            "mirrored charge"
        );
        assert_eq!(tenant.has_dead(), !state.dead.is_empty(), "mirrored dead");
    }

    /// Recounts the gauges at every level; in a live index, each page has its place in the queue.
    fn index(&mut self, index: &Index, domain: DomainId, queue: Option<&dyn Policy>) -> Gauges {
        let mut all = Gauges::default();
        self.pools += index.pools.len() as u64;
        for (&pool_id, pool) in &index.pools {
            let mut in_pool = Gauges::default();
            for (&object_id, object) in &pool.objects {
                let mut in_object = Gauges::default();
                for (index, entry) in object.pages.iter() {
                    in_object.add(entry.gauges());
                    self.entry(entry, domain);
                    let key = Key {
                        pool: pool_id,
                        object: object_id,
                        index,
                    };
                    let queued = queue.map(|queue| queue.key(entry.token));
                    assert!(
                        queued.is_none_or(|at| at == Some(key)),
                        "queue place of {key:?}"
                    );
                }
                assert!(
                    in_object.pages > 0,
                    "object {object_id} stayed behind empty"
                );
                assert_eq!(in_object, object.gauges, "gauges of object {object_id}");
                in_pool.add(in_object);
                self.objects += 1;
            }
            assert_eq!(in_pool, pool.gauges, "gauges of pool {pool_id}");
            all.add(in_pool);
        }
        assert_eq!(all, index.gauges, "gauges of an index");
        all
    }

    fn entry(&mut self, entry: &Entry, domain: DomainId) {
        self.keys += 1;
        if let Content::Blob(blob) = entry.content() {
            let at = Arc::as_ptr(blob);
            let found = self
                .blobs
                .entry(at)
                .or_insert_with(|| (Arc::clone(blob), domain, 0));
            assert_eq!(found.1, domain, "a blob shared by two trust domains");
            found.2 += 1;
        }
    }
}
