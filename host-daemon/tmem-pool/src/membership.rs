// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Membership of the pool: the list of tenants with their quotas and trust domains, and the list of
//! removed tenants whose pages are not freed yet.
//!
//! The membership decides whether a tenant is admitted, and computes the entitlements of all
//! tenants. It never accesses pages.

use crate::config::{DomainId, Quota, TenantSpec};
use crate::error::AdmissionError;
use crate::quota::entitlements;
use crate::stats::Counters;
use crate::tenant_shared::TenantShared;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Member {
    pub tenant: Arc<TenantShared>,
    pub quota: Quota,
    /// Name of the tenant's trust domain, or None for a tenant with a domain of its own. When the
    /// last member of a domain departs, the name is removed from `Membership::domains`.
    domain_name: Option<String>,
}

#[derive(Debug)]
struct Domain {
    id: DomainId,
    members: usize,
}

#[derive(Debug)]
pub(crate) struct Membership {
    pub size_bytes: u64,
    /// Configured size of the pool in bytes, into which all reserves have to fit. The present size
    /// may be smaller while the host needs memory for something else. No tenant is refused because
    /// of that smaller size.
    configured_bytes: u64,
    pub members: Vec<Member>,
    /// Tenants that were removed and whose pages are not all freed yet.
    pub departed: Vec<Arc<TenantShared>>,
    /// Sums of the counters of all tenants that were removed.
    pub departed_counters: Counters,
    domains: HashMap<String, Domain>,
    next_domain: DomainId,
}

impl Membership {
    pub(crate) fn new(size_bytes: u64) -> Membership {
        Membership {
            size_bytes,
            configured_bytes: size_bytes,
            members: Vec::new(),
            departed: Vec::new(),
            departed_counters: Counters::default(),
            domains: HashMap::new(),
            next_domain: 0,
        }
    }

    /// Adds a tenant. `make` creates its record from the specification, and from the numbers of its
    /// trust domain and of the domain of its private pools, which no other tenant has.
    ///
    /// # Errors
    /// The tenant's reserve does not fit beside the reserves of the other tenants.
    pub(crate) fn add(
        &mut self,
        spec: TenantSpec,
        make: impl FnOnce(&TenantSpec, (DomainId, DomainId)) -> TenantShared,
    ) -> Result<Arc<TenantShared>, AdmissionError> {
        self.admit(&spec.name, spec.quota)?;
        let fresh = self.next_domain;
        let id = match &spec.trust_domain {
            None => fresh,
            Some(name) => {
                let new = Domain {
                    id: fresh,
                    members: 0,
                };
                let domain = self.domains.entry(name.clone()).or_insert(new);
                domain.members += 1;
                domain.id
            }
        };
        let private = fresh + u32::from(id == fresh);
        self.next_domain = private + 1;
        let tenant = Arc::new(make(&spec, (id, private)));
        let member = Member {
            tenant: Arc::clone(&tenant),
            quota: spec.quota,
            domain_name: spec.trust_domain,
        };
        self.members.push(member);
        self.entitle();
        Ok(tenant)
    }

    /// Removes a tenant from the members. The caller has dropped the tenant's pages, but some may
    /// still occupy memory. Returns true if none does, so that nothing is left of the tenant.
    pub(crate) fn remove(&mut self, tenant: &Arc<TenantShared>) -> bool {
        let at = self
            .members
            .iter()
            .position(|member| Arc::ptr_eq(&member.tenant, tenant));
        let member = self
            .members
            .swap_remove(at.expect("the pool does not list the tenant that departs"));
        if let Some(name) = member.domain_name {
            let domain = self
                .domains
                .get_mut(&name)
                .expect("the table of trust domains lacks the domain of a tenant");
            domain.members -= 1;
            if domain.members == 0 {
                self.domains.remove(&name);
            }
        }
        self.entitle();
        self.departed_counters.add(member.tenant.counters());
        // If all pages are already freed, do not add the tenant to `departed`, because no thread
        // would remove it from there.
        let freed = !member.tenant.has_detached();
        if !freed {
            self.departed.push(member.tenant);
        }
        freed
    }

    /// Changes quotas, and the configured size of the pool if `configured_bytes` has a value, all
    /// together or not at all. If `configured_bytes` has a value, all reserves must fit into it. If
    /// not, the call refuses only reserves that grow: an earlier change of the configured size may
    /// have left existing reserves that do not fit.
    ///
    /// # Errors
    /// A reserve does not fit into the configured size; then nothing changes.
    pub(crate) fn configure(
        &mut self,
        configured_bytes: Option<u64>,
        quotas: &[(&Arc<TenantShared>, Quota)],
    ) -> Result<(), AdmissionError> {
        let whole_bytes = configured_bytes.unwrap_or(self.configured_bytes);
        let quota_of = |member: &Member| {
            let other = quotas
                .iter()
                .find(|(tenant, _)| Arc::ptr_eq(tenant, &member.tenant));
            other.map_or(member.quota, |&(_, quota)| quota)
        };
        let planned = |member| {
            let quota: Quota = quota_of(member);
            let bytes = quota.usable_reserve_bytes();
            (bytes > member.quota.usable_reserve_bytes(), member, bytes)
        };
        let mut reserves: Vec<(bool, &Member, u64)> = self.members.iter().map(planned).collect();
        // Put tenants whose reserve grows last, so that the error names one of them if possible.
        reserves.sort_by_key(|&(grows, ..)| grows);
        let mut reserved_bytes: u64 = 0;
        for (grows, member, reserve_bytes) in reserves {
            let available_bytes = whole_bytes.saturating_sub(reserved_bytes);
            if reserve_bytes > available_bytes && (grows || configured_bytes.is_some()) {
                return Err(AdmissionError {
                    tenant: member.tenant.name().into(),
                    reserve_bytes,
                    available_bytes,
                });
            }
            reserved_bytes = reserved_bytes.saturating_add(reserve_bytes);
        }
        self.configured_bytes = whole_bytes;
        for &(tenant, quota) in quotas {
            let mut members = self.members.iter_mut();
            let member = members.find(|member| Arc::ptr_eq(&member.tenant, tenant));
            member
                .expect("the pool does not list a tenant that still has a handle")
                .quota = quota;
            tenant.set_limit(quota.limit_bytes);
        }
        self.entitle();
        Ok(())
    }

    /// Returns all tenants, the departed ones first.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = &Arc<TenantShared>> {
        let members = self.members.iter().map(|member| &member.tenant);
        self.departed.iter().chain(members)
    }

    pub(crate) fn quota(&self, tenant: &Arc<TenantShared>) -> Quota {
        let member = self
            .members
            .iter()
            .find(|member| Arc::ptr_eq(&member.tenant, tenant));
        member
            .expect("the pool does not list a tenant that still has a handle")
            .quota
    }

    pub(crate) fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.entitle();
    }

    pub(crate) fn set_configured_size(&mut self, configured_bytes: u64) {
        self.configured_bytes = configured_bytes;
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        let reserves = self
            .members
            .iter()
            .map(|member| member.quota.usable_reserve_bytes());
        reserves.fold(0, u64::saturating_add)
    }

    /// Checks that the reserve of a new tenant fits into the pool's configured size.
    ///
    /// # Errors
    /// The reserve does not fit beside the reserves of the other tenants.
    fn admit(&self, name: &str, quota: Quota) -> Result<(), AdmissionError> {
        let available_bytes = self.configured_bytes.saturating_sub(self.reserved_bytes());
        let reserve_bytes = quota.usable_reserve_bytes();
        if reserve_bytes > available_bytes {
            return Err(AdmissionError {
                tenant: name.into(),
                reserve_bytes,
                available_bytes,
            });
        }
        Ok(())
    }

    fn entitle(&self) {
        let quotas: Vec<Quota> = self.members.iter().map(|member| member.quota).collect();
        for (member, bytes) in self
            .members
            .iter()
            .zip(entitlements(self.size_bytes, &quotas))
        {
            member.tenant.entitle(bytes);
        }
    }
}
