// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Membership of the pool: the list of tenants with their quotas and trust domains, and the
//! departed tenants whose pages are not freed yet.
//!
//! The membership admits tenants and sets their entitlements. It never accesses pages.

use crate::blob::DomainId;
use crate::config::{Quota, TenantSpec};
use crate::error::AdmissionError;
use crate::quota::entitlements;
use crate::stats::Counters;
use crate::tenant::TenantShared;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Member {
    pub tenant: Arc<TenantShared>,
    pub quota: Quota,
    /// Name of the trust domain, if it has one. Each member stores the name, so that it can be
    /// removed from `domains` together with the domain's last member.
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
    /// Full size of the pool in bytes, into which all reserves have to fit. The present size may be
    /// smaller while the host needs memory for something else. No tenant is refused because of the
    /// smaller size.
    full_bytes: u64,
    pub members: Vec<Member>,
    /// Tenants that were removed and whose pages are not all freed yet.
    pub departed: Vec<Arc<TenantShared>>,
    /// Sums of the counters of all tenants that were removed.
    pub gone: Counters,
    domains: HashMap<String, Domain>,
    next_domain: DomainId,
}

impl Membership {
    pub(crate) fn new(size_bytes: u64) -> Membership {
        Membership {
            size_bytes,
            full_bytes: size_bytes,
            members: Vec::new(),
            departed: Vec::new(),
            gone: Counters::default(),
            domains: HashMap::new(),
            next_domain: 0,
        }
    }

    /// Adds a tenant. `make` creates the tenant with the number of its trust domain.
    ///
    /// # Errors
    /// The reserve does not fit beside those of the other tenants.
    pub(crate) fn add(
        &mut self,
        spec: TenantSpec,
        make: impl FnOnce(&TenantSpec, DomainId) -> TenantShared,
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

    /// Removes a tenant whose pages are all detached. Returns true if they are also freed, so that
    /// nothing is left of the tenant.
    pub(crate) fn depart(&mut self, tenant: &Arc<TenantShared>) -> bool {
        let at = self
            .members
            .iter()
            .position(|member| Arc::ptr_eq(&member.tenant, tenant));
        let member = self
            .members
            .swap_remove(at.expect("a tenant that departs is not a member"));
        if let Some(name) = member.domain_name {
            let domain = self
                .domains
                .get_mut(&name)
                .expect("the name of a member's trust domain is not in the table of domains");
            domain.members -= 1;
            if domain.members == 0 {
                self.domains.remove(&name);
            }
        }
        self.entitle();
        self.gone.add(member.tenant.counters());
        // If a thread that needed memory has already freed all pages, do not add the tenant to
        // `departed`, because no thread would remove it from there.
        let freed = !member.tenant.has_dead();
        if !freed {
            self.departed.push(member.tenant);
        }
        freed
    }

    pub(crate) fn set_quota(
        &mut self,
        tenant: &Arc<TenantShared>,
        quota: Quota,
    ) -> Result<(), AdmissionError> {
        self.configure(None, &[(tenant, quota)])
    }

    /// Changes the full size, if one is given, and quotas, all together or not at all. A new full
    /// size must hold all reserves. If no full size is given, a tenant whose reserve does not grow
    /// is not refused, because an earlier change of the full size may have left the reserves too
    /// large.
    ///
    /// # Errors
    /// A reserve does not fit; then nothing changes.
    pub(crate) fn configure(
        &mut self,
        full_bytes: Option<u64>,
        quotas: &[(&Arc<TenantShared>, Quota)],
    ) -> Result<(), AdmissionError> {
        let whole_bytes = full_bytes.unwrap_or(self.full_bytes);
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
        // Tenants whose reserve grows come last, so that the error names one of them.
        reserves.sort_by_key(|&(grows, ..)| grows);
        let mut reserved_bytes: u64 = 0;
        for (grows, member, reserve_bytes) in reserves {
            let available_bytes = whole_bytes.saturating_sub(reserved_bytes);
            if reserve_bytes > available_bytes && (grows || full_bytes.is_some()) {
                return Err(AdmissionError {
                    tenant: member.tenant.name().into(),
                    reserve_bytes,
                    available_bytes,
                });
            }
            reserved_bytes = reserved_bytes.saturating_add(reserve_bytes);
        }
        self.full_bytes = whole_bytes;
        for &(tenant, quota) in quotas {
            let mut members = self.members.iter_mut();
            let member = members.find(|member| Arc::ptr_eq(&member.tenant, tenant));
            member
                .expect("a tenant with a handle is not a member")
                .quota = quota;
            tenant.set_limit(quota.limit_bytes);
        }
        self.entitle();
        Ok(())
    }

    pub(crate) fn quota(&self, tenant: &Arc<TenantShared>) -> Quota {
        let member = self
            .members
            .iter()
            .find(|member| Arc::ptr_eq(&member.tenant, tenant));
        member
            .expect("a tenant with a handle is not a member")
            .quota
    }

    pub(crate) fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.entitle();
    }

    pub(crate) fn set_full(&mut self, full_bytes: u64) {
        self.full_bytes = full_bytes;
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        let reserves = self
            .members
            .iter()
            .map(|member| member.quota.usable_reserve_bytes());
        reserves.fold(0, u64::saturating_add)
    }

    /// Checks that the reserve of a new tenant fits.
    ///
    /// # Errors
    /// The reserve does not fit beside those of the other tenants.
    fn admit(&self, name: &str, quota: Quota) -> Result<(), AdmissionError> {
        let available_bytes = self.full_bytes.saturating_sub(self.reserved_bytes());
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
