// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A pool with a tenant, for tests of the public interface.

use tmem_pool::{Pool, PoolConfig, Quota, Tenant, TenantSpec};

/// Returns an empty pool of the largest size that it may have.
pub fn pool(size_bytes: u64) -> Pool {
    Pool::new(PoolConfig {
        size_bytes,
        size_max_bytes: 0,
        seed: 7,
        policy: Default::default(),
    })
    .unwrap()
}

/// Adds a tenant in a trust domain of its own, without limit, with pool 1.
pub fn tenant(pool: &Pool, name: &str) -> Tenant {
    let spec = TenantSpec {
        name: name.into(),
        trust_domain: None,
        quota: Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 1,
        },
    };
    let tenant = pool.add_tenant(spec).unwrap();
    tenant.create_pool(1).unwrap();
    tenant
}
