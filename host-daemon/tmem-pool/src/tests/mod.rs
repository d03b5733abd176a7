// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the engine's internals. The tests in the crate's directory `tests/` use the public
//! interface only.

mod charges;
mod chores;
mod content;
mod deferred_freeing;
mod eviction;
mod faults;
#[cfg(feature = "shuttle")]
mod interleavings;
mod limits;
mod model;
mod quotas;
mod retained;
pub(crate) mod rng;
mod threads;

use crate::{
    Engine, EngineConfig, Get, GetResult, PAGE_SIZE, Page, Put, PutResult, Quota, Ref, Tenant,
    TenantSpec, Time,
};
use rng::Rng;
use std::sync::Arc;

/// Runs the ignored test `name` in a process of its own. Asserts that this process ends by abort().
#[cfg(not(miri))]
pub(crate) fn aborts(name: &str) {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};
    /// Number of the signal SIGABRT.
    const ABORTED: i32 = 6;
    let own = std::env::current_exe().expect("cannot find the path of the test program");
    let mut child = Command::new(own)
        .args(["--ignored", "--exact", name])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("cannot start the test program");
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().expect("cannot wait for the test process") {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().expect("cannot kill the test process");
            child.wait().expect("cannot wait for the test process");
            panic!("{name} did not end within 60 s");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(
        status.signal(),
        Some(ABORTED),
        "{name} did not end with SIGABRT: {status}"
    );
}

/// Quota without reserve and limit, and with weight 1.
pub(crate) const OPEN: Quota = Quota {
    reserve_bytes: 0,
    limit_bytes: None,
    weight: 1,
};

/// Number of the pool that most tests use.
const POOL: u32 = 1;

fn config(size_bytes: u64) -> EngineConfig {
    EngineConfig {
        size_bytes,
        size_max_bytes: 64 << 20,
        seed: 11,
        policy: Default::default(),
    }
}

pub(crate) fn new_engine(size_bytes: u64) -> Arc<Engine> {
    Engine::new(config(size_bytes)).unwrap()
}

/// Finalizes (deduplicates and compresses) all raw pages of a tenant.
fn finalize_raw(tenant: &Tenant) {
    while tenant
        .engine()
        .finalize(tenant.shared())
        .is_some_and(|pages| pages > 0)
    {}
}

pub(crate) fn add(engine: &Arc<Engine>, name: &str, domain: Option<&str>, quota: Quota) -> Tenant {
    let trust_domain = domain.map(String::from);
    let tenant = engine
        .add_tenant(TenantSpec {
            name: name.into(),
            trust_domain,
            quota,
        })
        .unwrap();
    tenant.create_pool(POOL).unwrap();
    tenant
}

/// Puts a page and leaves it raw (uncompressed).
fn put_raw(tenant: &Tenant, object: u64, index: u64, cookie: u64, page: &Page) -> PutResult {
    let mut results = [PutResult::Stored];
    let put = Put {
        object,
        index,
        cookie,
        workingset: false,
        page,
    };
    tenant.put(POOL, &[put], &mut results).unwrap();
    results[0]
}

/// Puts a page and finalizes (deduplicates and compresses) it.
pub(crate) fn put(tenant: &Tenant, object: u64, index: u64, cookie: u64, page: &Page) -> PutResult {
    let result = put_raw(tenant, object, index, cookie, page);
    finalize_raw(tenant);
    result
}

/// Puts `pages` incompressible pages with cookie 1, each in a put of its own. Returns how many of
/// them are stored.
fn fill(tenant: &Tenant, object: u64, pages: u64) -> u64 {
    let stored = |&index: &u64| {
        put(tenant, object, index, 1, &noise(object << 32 | index)) == PutResult::Stored
    };
    (0..pages).filter(stored).count() as u64
}

pub(crate) fn get(tenant: &Tenant, object: u64, index: u64, cookie: u64) -> Option<Page> {
    let (mut out, mut results) = ([[0xa5; PAGE_SIZE]], [GetResult::Miss]);
    tenant
        .get(
            POOL,
            &Get::new(object, index, &[cookie]),
            &mut out,
            &mut results,
        )
        .unwrap();
    (results[0] == GetResult::Hit { cookie }).then_some(out[0])
}

/// Gets a page and allows the pool to retain it. Returns the page, and whether it was retained.
fn get_retaining(tenant: &Tenant, object: u64, index: u64, cookie: u64) -> Option<(Page, bool)> {
    let (mut out, mut results) = ([[0xa5; PAGE_SIZE]], [GetResult::Miss]);
    let cookies = [cookie];
    let get = Get {
        retain: 1,
        ..Get::new(object, index, &cookies)
    };
    tenant.get(POOL, &get, &mut out, &mut results).unwrap();
    match results[0] {
        GetResult::Miss => None,
        GetResult::Hit { cookie: found } | GetResult::Retained { cookie: found } => {
            assert_eq!(found, cookie);
            Some((out[0], results[0] == GetResult::Retained { cookie }))
        }
    }
}

/// Sends a reference (REF) to a page, by which a guest reports that it has evicted the page
/// unchanged. Returns whether the pool has the page.
fn refer(tenant: &Tenant, object: u64, index: u64, cookie: u64) -> bool {
    let page = Ref {
        object,
        index,
        cookie,
    };
    let mut held = [false];
    tenant.refer(POOL, &[page], &mut held).unwrap();
    held[0]
}

fn maintain_all(engine: &Engine) {
    while engine.maintain(Time(0), 64) {}
    engine.check_invariants();
}

/// Returns a page of random bytes, which does not compress.
pub(crate) fn noise(seed: u64) -> Page {
    let mut rng = Rng::new(seed);
    let mut page = [0; PAGE_SIZE];
    page.as_chunks_mut::<8>()
        .0
        .iter_mut()
        .for_each(|word| *word = rng.next().to_le_bytes());
    page
}

/// Returns a page that compresses to about `eighths` eighths of its size.
fn partly_noise(seed: u64, eighths: usize) -> Page {
    let mut page = noise(seed);
    page[PAGE_SIZE / 8 * eighths..].fill(seed as u8);
    page
}

/// Returns a page of words in random order. lz4 finds repeated words. zstd also makes use of the
/// small number of different letters, so it compresses the page better.
pub(crate) fn text(seed: u64) -> Page {
    let mut rng = Rng::new(seed);
    let words: Vec<Vec<u8>> = (0..400)
        .map(|_| {
            (0..3 + rng.below(6))
                .map(|_| b'a' + rng.below(12) as u8)
                .collect()
        })
        .collect();
    let mut page = [b' '; PAGE_SIZE];
    let mut at = 0;
    while at < PAGE_SIZE {
        let word = &words[rng.below(400) as usize];
        let len = word.len().min(PAGE_SIZE - at);
        page[at..at + len].copy_from_slice(&word[..len]);
        at += len + 1;
    }
    page
}
