// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of faults of the engine itself. A panic under a tenant's lock must affect only that
//! tenant. A panic under a lock that all tenants share must end the process.

use super::{OPEN, POOL, add, get, new_engine, noise, partly_noise, put};
use crate::{GetResult, NoPool, PAGE_SIZE, Put, PutResult, Quota, Tenant, Time};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

/// Panics while this thread holds the tenant's lock, as a bug in the middle of a request could.
fn panic_under_the_lock(tenant: &Tenant) {
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut state = tenant.shared().lock(&tenant.engine().totals);
        state.index.gauges.pages += 1;
        panic!("the test causes this panic under a lock on purpose");
    }));
    assert!(panicked.is_err());
}

#[test]
fn a_panic_under_a_tenant_lock_affects_only_that_tenant() {
    let engine = new_engine(1 << 20);
    let (broken, other) = (
        add(&engine, "a", Some("web"), OPEN),
        add(&engine, "b", Some("web"), OPEN),
    );
    let page = partly_noise(1, 4);
    for tenant in [&broken, &other] {
        assert_eq!(put(tenant, 1, 1, 1, &page), PutResult::Stored);
    }
    assert_eq!(put(&broken, 1, 2, 1, &noise(1)), PutResult::Stored);
    panic_under_the_lock(&broken);
    // Check that operations that involve all tenants still work.
    engine.resize(900 << 10);
    while engine.maintain(Time(0), 64) {}
    other
        .set_quota(Quota {
            reserve_bytes: 4096,
            ..OPEN
        })
        .unwrap();
    assert_eq!(engine.stats().pages, 1);
    assert_eq!(get(&other, 1, 1, 1), Some(page));
    // Puts of the other tenant must be stored, although the pages that the tenant `broken` lost
    // still occupy memory.
    for index in 0..400 {
        assert_eq!(put(&other, 2, index, 1, &noise(index)), PutResult::Stored);
    }

    // The tenant `broken`, under whose lock the panic happened, must be empty and usable.
    let (mut out, mut results) = ([[0; PAGE_SIZE]; 2], [GetResult::Miss; 2]);
    let answer = broken.get(POOL, 1, 1, &[1, 1], &mut out, &mut results);
    assert_eq!(answer.map(drop), Err(NoPool));
    assert_eq!((broken.stats().pages, broken.stats().charged_bytes), (0, 0));
    broken.create_pool(POOL).unwrap();
    assert_eq!(get(&broken, 1, 1, 1), None);
    assert_eq!(put(&broken, 1, 1, 2, &page), PutResult::Stored);
    assert_eq!(get(&broken, 1, 1, 2), Some(page));
    // Panic a second time under the lock of the tenant `broken`, and then remove this tenant.
    panic_under_the_lock(&broken);
    drop(broken);
    while engine.maintain(Time(0), 64) {}
    assert_eq!(
        (engine.stats().tenants, engine.stats().departed_tenants),
        (1, 0)
    );
}

#[test]
fn a_pool_handle_taken_before_a_tenant_panic_is_invalid() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let totals = &tenant.engine().totals;
    let found = tenant.shared().lock(totals).pool(POOL).unwrap();
    panic_under_the_lock(&tenant);
    // The new pool gets the index record that the old pool had. A reference to the old pool must
    // not be valid for the new one.
    tenant.create_pool(POOL + 1).unwrap();
    let state = tenant.shared().lock(totals);
    assert!(!state.index.is_live(found));
    assert!(state.index.is_live(state.pool(POOL + 1).unwrap()));
}

#[test]
fn a_put_while_a_panic_unwinds_the_thread_is_counted() {
    // A thread may use or drop a tenant's handle while a panic unwinds its stack. The sums that
    // other threads read must still be correct after that.
    let engine = new_engine(1 << 20);
    struct AtTheEnd(Tenant);
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            let mut results = [PutResult::Refused];
            let page = noise(1);
            let put = Put {
                object: 1,
                index: 1,
                cookie: 1,
                workingset: false,
                page: &page,
            };
            self.0.put(POOL, &[put], &mut results).unwrap();
        }
    }
    let tenant = add(&engine, "a", None, OPEN);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _end = AtTheEnd(tenant.clone());
        panic!("the test causes this panic outside of the engine on purpose");
    }));
    assert!(panicked.is_err());
    engine.check_invariants();
    assert_eq!(tenant.stats().pages, 1);
}

const SIGABRT: i32 = 6;

/// Panics under a lock that all tenants share, named by `which`, and then uses the engine. The
/// caller runs this function in a process of its own. The function returns only if the engine does
/// not abort that process, which is a fault.
fn panic_under_a_lock_of_all(which: &str) {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let engine = tenant.engine();
    let panicked = catch_unwind(AssertUnwindSafe(|| match which {
        "heap" => engine.store.heap.panic_under_a_lock(),
        "table" => {
            // Take all locks of the table of equal pages, because the put below needs one of them.
            let _pairs: Vec<_> = (0..crate::dedup::LOCKS)
                .map(|place| engine.store.dedup.lock(place))
                .collect();
            panic!("the test causes this panic under a lock on purpose");
        }
        _ => {
            let _membership = engine.membership_mut();
            panic!("the test causes this panic under a lock on purpose");
        }
    }));
    assert!(panicked.is_err());
    // Catch further panics and continue, as the daemon's threads do.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        put(&tenant, 1, 1, 1, &partly_noise(1, 4));
        engine.stats();
    }));
}

#[test]
fn a_panic_under_a_lock_shared_by_all_tenants_aborts_the_process() {
    const WHICH: &str = "TMEM_TEST_PANIC_UNDER";
    if let Ok(which) = std::env::var(WHICH) {
        panic_under_a_lock_of_all(&which);
        return;
    }
    for which in ["heap", "table", "membership"] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "tests::faults::a_panic_under_a_lock_shared_by_all_tenants_aborts_the_process",
            ])
            .env(WHICH, which)
            .output()
            .unwrap();
        assert_eq!(
            child.status.signal(),
            Some(SIGABRT),
            "a panic under the lock of the {which} did not abort the process: {child:?}"
        );
    }
}
