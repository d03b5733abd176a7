// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of faults of the engine itself. A panic under a tenant's lock must affect only that
//! tenant. A panic under a lock that all tenants share must end the process. A page source that
//! fails or panics must leave no bytes and no reserved memory behind.

use super::{OPEN, POOL, add, get, maintain_all, new_engine, noise, partly_noise, put};
use crate::{
    Engine, Get, GetResult, NoPool, PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, Page, PageSource, Put,
    PutResult, Quota, Tenant, Time,
};
use std::cell::Cell;
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
    let answer = broken.get(POOL, &Get::new(1, 1, &[1, 1]), &mut out, &mut results);
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
        (engine.stats().tenants, engine.stats().removed_tenants),
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

/// End of a call of a [`TestSource`], which has copied half of a page.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Complete,
    Fail,
    Panic,
}

/// Page source that counts its calls.
struct TestSource {
    page: Page,
    then: Then,
    calls: Cell<u32>,
}

impl TestSource {
    fn new(seed: u64, then: Then) -> TestSource {
        TestSource {
            page: noise(seed),
            then,
            calls: Cell::new(0),
        }
    }
}

impl PageSource for TestSource {
    fn copy_to(&self, frame: &mut Page) -> bool {
        self.calls.set(self.calls.get() + 1);
        let (copied, rest) = frame.split_at_mut(PAGE_SIZE / 2);
        copied.copy_from_slice(&self.page[..PAGE_SIZE / 2]);
        match self.then {
            Then::Complete => rest.copy_from_slice(&self.page[PAGE_SIZE / 2..]),
            Then::Fail => {}
            Then::Panic => panic!("the test causes this panic in a page source on purpose"),
        }
        self.then != Then::Fail
    }
}

/// Puts the pages of the sources under the keys from index 0 on of object 1, with cookie 2.
fn put_sources(tenant: &Tenant, sources: &[TestSource]) -> Vec<PutResult> {
    let puts: Vec<Put<'_>> = sources
        .iter()
        .enumerate()
        .map(|(index, page)| Put {
            object: 1,
            index: index as u64,
            cookie: 2,
            workingset: false,
            page,
        })
        .collect();
    let mut results = vec![PutResult::Refused; puts.len()];
    tenant.put(POOL, &puts, &mut results).unwrap();
    results
}

/// Asserts that the heap has no other blobs than those of `tenant`, and that free frames are zero.
fn check_heap(engine: &Engine, tenant: &Tenant) {
    engine.check_invariants();
    engine.store.heap.check(tenant.stats().pages as usize);
}

#[test]
fn a_page_whose_source_fails_is_refused_and_leaves_nothing_under_its_key() {
    use PutResult::{Refused, Stored};
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..4 {
        assert_eq!(put(&tenant, 1, index, 1, &noise(index)), Stored);
    }
    let sources = [Then::Complete, Then::Complete, Then::Fail, Then::Complete];
    let sources: Vec<_> = (10..)
        .zip(sources)
        .map(|(seed, then)| TestSource::new(seed, then))
        .collect();
    assert_eq!(
        put_sources(&tenant, &sources),
        [Stored, Stored, Refused, Stored]
    );
    assert!(sources.iter().all(|source| source.calls.get() == 1));
    let cookies: Vec<_> = (0..4).map(|index| tenant.peek((POOL, 1, index))).collect();
    assert_eq!(cookies, [Some(2), Some(2), None, Some(2)]);
    let stats = tenant.stats();
    assert_eq!((stats.puts, stats.puts_refused, stats.pages), (8, 1, 3));
    check_heap(&engine, &tenant);
    maintain_all(&engine);
    for index in [0, 1, 3] {
        assert_eq!(get(&tenant, 1, index, 2), Some(noise(10 + index)));
    }
    check_heap(&engine, &tenant);
}

#[test]
fn a_panic_of_a_page_source_frees_all_memory_that_the_put_reserved() {
    let engine = new_engine(1 << 20);
    let (tenant, other) = (add(&engine, "a", None, OPEN), add(&engine, "b", None, OPEN));
    assert_eq!(put(&tenant, 1, 1, 1, &noise(1)), PutResult::Stored);
    // The source of the second page panics. The third page has memory and is never copied.
    let sources = [Then::Complete, Then::Panic, Then::Complete];
    let sources = sources.map(|then| TestSource::new(5, then));
    let panicked = catch_unwind(AssertUnwindSafe(|| put_sources(&tenant, &sources)));
    assert!(panicked.is_err());
    assert_eq!(sources.map(|source| source.calls.get()), [1, 1, 0]);
    check_heap(&engine, &tenant);
    assert_eq!(tenant.peek((POOL, 1, 0)), None);
    assert_eq!(get(&tenant, 1, 1, 1), Some(noise(1)));
    // Both tenants must still be usable.
    for tenant in [&tenant, &other] {
        assert_eq!(put(tenant, 1, 1, 3, &noise(3)), PutResult::Stored);
        assert_eq!(get(tenant, 1, 1, 3), Some(noise(3)));
    }
    check_heap(&engine, &tenant);
}

#[test]
fn a_page_is_not_copied_if_too_many_pages_are_raw() {
    use PutResult::{Refused, Stored};
    let engine = new_engine(1 << 20);
    let quota = Quota {
        limit_bytes: Some(2 * (PAGE_METADATA_CHARGE_BYTES + PAGE_SIZE as u64)),
        ..OPEN
    };
    let tenant = add(&engine, "a", None, quota);
    tenant.shared().lock(&tenant.engine().totals).raw_min = 2;
    let sources = [10, 11, 12].map(|seed| TestSource::new(seed, Then::Complete));
    assert_eq!(put_sources(&tenant, &sources), [Stored, Stored, Refused]);
    assert_eq!(sources.map(|source| source.calls.get()), [1, 1, 0]);
    check_heap(&engine, &tenant);
}

#[test]
fn a_page_is_not_copied_if_the_pool_has_no_memory_for_it() {
    use PutResult::Refused;
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    assert_eq!(put(&tenant, 1, 0, 1, &noise(1)), PutResult::Stored);
    // With this size the pool has no memory for pages, and an eviction frees too little.
    engine.resize(1);
    let sources = [10, 11].map(|seed| TestSource::new(seed, Then::Complete));
    assert_eq!(put_sources(&tenant, &sources), [Refused, Refused]);
    assert_eq!(sources.map(|source| source.calls.get()), [0, 0]);
    assert_eq!(tenant.stats().refused_pool, 2);
    assert_eq!(tenant.peek((POOL, 1, 0)), None);
    check_heap(&engine, &tenant);
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
