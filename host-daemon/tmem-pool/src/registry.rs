// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is in the pool: tenants with their quotas, trust domains, and those that left and are not
//! freed yet.
//!
//! It decides admission and sets entitlements; it never touches pages.

use crate::blob::DomainId;
use crate::config::{Quota, TenantSpec};
use crate::error::AdmissionError;
use crate::quota::entitlements;
use crate::stats::Counters;
use crate::tenant::Inner;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Member {
    pub tenant: Arc<Inner>,
    pub quota: Quota,
    /// Kept to give the domain's name back.
    domain_name: Option<String>,
}

#[derive(Debug)]
struct Domain {
    id: DomainId,
    members: usize,
}

#[derive(Debug)]
pub(crate) struct Registry {
    pub size_bytes: u64,
    /// What reserves have to fit into. A pool that was made smaller gives way for a while; who comes
    /// or changes meanwhile is not refused for that.
    made_bytes: u64,
    pub members: Vec<Member>,
    /// Left, with pages not yet freed.
    pub departed: Vec<Arc<Inner>>,
    /// Counters of all that left.
    pub gone: Counters,
    domains: HashMap<String, Domain>,
    next_domain: DomainId,
}

impl Registry {
    pub(crate) fn new(size_bytes: u64) -> Registry {
        Registry {
            size_bytes,
            made_bytes: size_bytes,
            members: Vec::new(),
            departed: Vec::new(),
            gone: Counters::default(),
            domains: HashMap::new(),
            next_domain: 0,
        }
    }

    /// `make` builds the tenant for the domain that it is given.
    pub(crate) fn add(
        &mut self,
        spec: TenantSpec,
        make: impl FnOnce(&TenantSpec, DomainId) -> Inner,
    ) -> Result<Arc<Inner>, AdmissionError> {
        self.admit(&spec.name, spec.quota, None)?;
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
        self.next_domain += u32::from(id == fresh);
        let tenant = Arc::new(make(&spec, id));
        let member = Member {
            tenant: Arc::clone(&tenant),
            quota: spec.quota,
            domain_name: spec.trust_domain,
        };
        self.members.push(member);
        self.entitle();
        Ok(tenant)
    }

    /// Its pages must be detached already. True: they are freed as well, and nothing is left of it.
    pub(crate) fn depart(&mut self, tenant: &Arc<Inner>) -> bool {
        let at = self
            .members
            .iter()
            .position(|member| Arc::ptr_eq(&member.tenant, tenant));
        let member = self.members.swap_remove(at.expect("a tenant departs once"));
        if let Some(name) = member.domain_name {
            let domain = self
                .domains
                .get_mut(&name)
                .expect("a member's domain is known");
            domain.members -= 1;
            if domain.members == 0 {
                self.domains.remove(&name);
            }
        }
        self.entitle();
        self.gone.add(member.tenant.counters());
        // Someone short of room may have freed everything already, and will not look again.
        let freed = !member.tenant.has_dead();
        if !freed {
            self.departed.push(member.tenant);
        }
        freed
    }

    pub(crate) fn set_quota(
        &mut self,
        tenant: &Arc<Inner>,
        quota: Quota,
    ) -> Result<(), AdmissionError> {
        self.admit(tenant.name(), quota, Some(tenant))?;
        let member = self
            .members
            .iter_mut()
            .find(|member| Arc::ptr_eq(&member.tenant, tenant));
        member.expect("a tenant with a handle is a member").quota = quota;
        tenant.set_limit(quota.limit_bytes);
        self.entitle();
        Ok(())
    }

    pub(crate) fn quota(&self, tenant: &Arc<Inner>) -> Quota {
        let member = self
            .members
            .iter()
            .find(|member| Arc::ptr_eq(&member.tenant, tenant));
        member.expect("a tenant with a handle is a member").quota
    }

    pub(crate) fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.entitle();
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        let reserves = self
            .members
            .iter()
            .map(|member| member.quota.usable_reserve_bytes());
        reserves.fold(0, u64::saturating_add)
    }

    fn admit(
        &self,
        name: &str,
        quota: Quota,
        instead_of: Option<&Arc<Inner>>,
    ) -> Result<(), AdmissionError> {
        let others = self
            .members
            .iter()
            .filter(|member| instead_of.is_none_or(|tenant| !Arc::ptr_eq(&member.tenant, tenant)));
        let reserved = others
            .map(|member| member.quota.usable_reserve_bytes())
            .fold(0, u64::saturating_add);
        let whole_bytes = self.made_bytes.max(self.size_bytes);
        let available_bytes = whole_bytes.saturating_sub(reserved);
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
