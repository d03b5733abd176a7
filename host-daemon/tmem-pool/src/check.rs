// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of the engine's invariants, for tests and simulators. A check walks over all pages and
//! recounts all sums.

use crate::config::DomainId;
use crate::engine::Engine;
use crate::index::entry::{Content, Entry, Gauges};
use crate::tenant_shared::TenantShared;
use std::collections::{HashMap, HashSet};

/// Maps the number of each blob to its domain, if that is known, and to the number of index entries
/// that refer to it.
type Refs = HashMap<u32, (Option<DomainId>, u32)>;

impl Engine {
    /// Recounts all sums, references and queues of the engine, and asserts that the results equal
    /// the stored values.
    ///
    /// # Panics
    /// If a stored value is wrong. Another thread that calls the engine at the same time can also
    /// cause a panic.
    pub fn check_invariants(&self) {
        let membership = self.membership();
        let mut refs = Refs::new();
        let (mut entitled_bytes, mut index_bytes) = (0, 0);
        for member in &membership.members {
            index_bytes += check_tenant(self, &member.tenant, &mut refs);
            entitled_bytes += member.tenant.entitled_bytes.get();
        }
        assert!(
            entitled_bytes <= membership.size_bytes,
            "the tenants' entitlements add up to {entitled_bytes} B, more than the pool's size of {} B",
            membership.size_bytes
        );
        for departed in &membership.departed {
            index_bytes += check_tenant(self, departed, &mut refs);
            let gauges = departed.lock(&self.totals).index.gauges;
            assert_eq!(
                gauges,
                Gauges::default(),
                "the index of a departed tenant has pages that are not detached"
            );
        }
        let tenants = membership.members.len() + membership.departed.len();
        assert_eq!(
            self.totals.tenants.get(),
            tenants as u64,
            "the engine's count of tenants differs from the number of members and departed tenants"
        );
        assert_eq!(
            self.totals.index_bytes.get(),
            index_bytes,
            "the engine's sum of index memory differs from the sum over all tenants"
        );
        self.store.check(&refs);
    }
}

/// Checks the invariants of one tenant, and adds the references of its entries to `refs`. Returns
/// the memory of the tenant's index in bytes.
fn check_tenant(engine: &Engine, tenant: &TenantShared, refs: &mut Refs) -> u64 {
    let state = tenant.lock(&engine.totals);
    let mut ids = HashSet::new();
    state.index.check(|id, entry, sharing| {
        ids.insert(id);
        let domain = sharing.map(|sharing| tenant.domain(sharing));
        check_entry(entry, domain, refs);
    });
    let entries = &state.index.entries;
    let mut queued = |id, retained| {
        assert!(
            ids.remove(&id),
            "entry {id} is in a queue twice, or is not in the index"
        );
        assert_eq!(
            entries[id].is_retained(),
            retained,
            "entry {id} is in the wrong queue: retained entries belong into the queue of retained pages, \
             other entries into a queue of the policy"
        );
    };
    state.policy.check(entries, &mut |id| queued(id, false));
    state.retained.check(entries, &mut |id| queued(id, true));
    assert!(
        ids.is_empty(),
        "{} entries of the index are in no queue",
        ids.len()
    );
    let counters = state.counters;
    let came = counters.puts - counters.puts_refused;
    let went = counters.replaced_pages
        + counters.evictions
        + counters.flushed_pages
        + (counters.hits + counters.hash_mismatches - counters.retained_hits);
    assert_eq!(
        came - went,
        u64::from(state.index.gauges.pages),
        "the counters of stored and removed pages imply another number of pages than the index has"
    );
    assert_eq!(
        tenant.charged_bytes.get(),
        state.charged_bytes(),
        "the copy of the tenant's charge that is read without the lock differs from the charge"
    );
    assert_eq!(
        tenant.has_retained(),
        state.has_retained(),
        "the tenant's flag for retained pages contradicts the queue of retained pages"
    );
    assert_eq!(
        tenant.has_detached(),
        state.index.has_detached(),
        "the tenant's flag for detached pages contradicts the index"
    );
    state.bytes()
}

fn check_entry(entry: &Entry, domain: Option<DomainId>, refs: &mut Refs) {
    if let Content::Raw(blob) | Content::Blob(blob) = entry.content() {
        let found = refs.entry(blob).or_insert((domain, 0));
        assert!(
            found.0.is_none() || domain.is_none() || found.0 == domain,
            "blob {blob} is shared by two domains"
        );
        found.0 = found.0.or(domain);
        found.1 += 1;
    }
}
