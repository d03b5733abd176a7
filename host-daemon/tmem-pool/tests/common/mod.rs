// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Helpers for tests of the public interface, which create an engine and a tenant.

use std::sync::Arc;
use tmem_pool::{Engine, EngineConfig, Page, Put, PutResult, Quota, Tenant, TenantSpec};

/// Creates an engine with an empty pool of this size in bytes.
pub fn engine(size_bytes: u64) -> Arc<Engine> {
    Engine::new(EngineConfig::new(size_bytes, 7)).unwrap()
}

/// Adds a tenant without a limit, in a trust domain of its own, and creates its pool 1.
pub fn tenant(engine: &Arc<Engine>, name: &str) -> Tenant {
    let quota = Quota {
        reserve_bytes: 0,
        limit_bytes: None,
        weight: 1,
    };
    let tenant = engine.add_tenant(TenantSpec::new(name, quota)).unwrap();
    tenant.create_pool(1).unwrap();
    tenant
}

/// Puts a page with cookie 1 into the tenant's pool 1, and asserts that it is stored.
#[allow(dead_code, reason = "some tests put pages in another way")]
pub fn store(tenant: &Tenant, object: u64, index: u64, page: &Page) {
    let put = Put {
        object,
        index,
        cookie: 1,
        workingset: false,
        page,
    };
    let mut results = [PutResult::Refused];
    tenant.put(1, &[put], &mut results).unwrap();
    assert_eq!(results, [PutResult::Stored]);
}
