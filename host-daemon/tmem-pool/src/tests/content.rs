// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of page contents: which pages share their stored bytes and which do not, and how the
//! engine handles damaged bytes.

use super::rng::Rng;
use super::{
    OPEN, POOL, add, config, get, get_retaining, maintain_all, new_engine, noise, partly_noise,
    put, put_raw, text,
};
use crate::blob::{Contents, Finalized, Prepared, RawCopy, Store};
use crate::codec::{self, Corrupt, ENCODED_BYTES_MAX};
use crate::config::SWEEP_NS;
use crate::cost::{GET_NS_MAX, REF_NS};
use crate::hash::place_bits;
use crate::heap::Handle;
use crate::index::Key;
use crate::index::entry::Content;
use crate::tenant_shared::locked_times;
use crate::{
    Engine, GET_PAGES_MAX, Get, GetResult, PAGE_SIZE, Page, PageHash, Put, PutResult, Quota,
    Tenant, TenantSpec, Time,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const KEY: Key = Key {
    pool: POOL,
    object: 1,
    index: 1,
};

#[test]
fn equal_pages_of_a_trust_domain_are_stored_once() {
    let engine = new_engine(1 << 20);
    let a = add(&engine, "a", Some("web"), OPEN);
    let b = add(&engine, "b", Some("web"), OPEN);
    let page = partly_noise(1, 4);
    for tenant in [&a, &b] {
        for index in 0..3 {
            assert_eq!(put(tenant, 1, index, 1, &page), PutResult::Stored);
        }
    }
    let stats = engine.stats();
    assert_eq!((stats.pages, stats.blobs, stats.shared_pages), (6, 1, 5));
    assert_eq!((a.stats().shared_pages, b.stats().shared_pages), (2, 3));
    assert_eq!(
        a.stats().charged_bytes,
        b.stats().charged_bytes,
        "tenants with equal pages are charged differently"
    );
    engine.check_invariants();
    // Remove tenant a, which put the page first. The pages of tenant b must stay.
    drop(a);
    maintain_all(&engine);
    for index in 0..3 {
        assert_eq!(get(&b, 1, index, 1), Some(page));
    }
    assert_eq!(engine.stats().payload_bytes, 0);
}

#[test]
fn pages_of_private_pools_are_stored_apart_from_those_of_other_tenants_and_pools() {
    const PRIVATE: u32 = POOL + 1;
    let engine = new_engine(1 << 20);
    let page = partly_noise(1, 4);
    let tenants = ["a", "b"].map(|name| add(&engine, name, Some("web"), OPEN));
    for tenant in &tenants {
        tenant.create_private_pool(PRIVATE).unwrap();
        for (pool, index) in [(POOL, 0), (PRIVATE, 0), (PRIVATE, 1)] {
            let put = Put {
                object: 1,
                index,
                cookie: 1,
                workingset: false,
                page: &page,
            };
            let mut results = [PutResult::Refused];
            tenant.put(pool, &[put], &mut results).unwrap();
            assert_eq!(results, [PutResult::Stored]);
        }
    }
    maintain_all(&engine);
    engine.check_invariants();
    // One copy for both pools that are not private, and one for the private pool of each tenant.
    let stats = engine.stats();
    assert_eq!((stats.pages, stats.blobs), (6, 3));
}

/// A page is removed while it is raw, and the next page gets its entry and its blob. The queue of raw
/// pages then names the new page twice. A second finalization would find the page equal to itself.
#[test]
fn a_page_that_the_raw_queue_names_twice_is_finalized_once() {
    let engine = new_engine(1 << 20);
    let a = add(&engine, "a", None, OPEN);
    let raw = || {
        let state = a.shared().lock(&engine.totals);
        let id = state.peek(KEY).unwrap();
        (id, state.index.entries[id].content())
    };
    let page = partly_noise(1, 4);
    put_raw(&a, 1, 1, 1, &page);
    let first = raw();
    assert_eq!(get(&a, 1, 1, 1), Some(page));
    put_raw(&a, 1, 1, 2, &page);
    assert_eq!(
        raw(),
        first,
        "the test is too weak: the page is in another place"
    );
    assert_eq!(engine.finalize(a.shared()), Some(1));
    assert_eq!(engine.finalize(a.shared()), Some(0));
    let stats = engine.stats();
    assert_eq!((stats.pages, stats.blobs, stats.shared_pages), (1, 1, 0));
    engine.check_invariants();
    assert_eq!(get(&a, 1, 1, 2), Some(page));
}

/// Finalizes equal pages in one step. The step stores a compressed page only after it has looked up
/// the next page. If the next page is equal, it must share the first page's stored bytes
/// nevertheless.
#[test]
fn equal_pages_finalized_in_one_step_are_stored_once() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let pages = [partly_noise(1, 4), partly_noise(2, 4), [7; PAGE_SIZE]];
    // Some neighbours in this order are equal, some differ, and some equal pages have a page of
    // another form between them.
    let order = [0, 0, 1, 0, 1, 1, 2, 1];
    for (index, &nr) in order.iter().enumerate() {
        put_raw(&tenant, 1, index as u64, 1, &pages[nr]);
    }
    assert_eq!(engine.finalize(tenant.shared()), Some(order.len()));
    let stats = engine.stats();
    assert_eq!(
        (stats.blobs, stats.shared_pages, stats.same_filled_pages),
        (2, 5, 1)
    );
    engine.check_invariants();
    for (index, &nr) in order.iter().enumerate() {
        assert_eq!(get(&tenant, 1, index as u64, 1), Some(pages[nr]));
    }
}

#[test]
fn pages_of_different_trust_domains_are_not_shared() {
    let engine = new_engine(1 << 20);
    let domains = [Some("web"), Some("db"), None, None];
    let tenants = domains.map(|domain| add(&engine, "vm", domain, OPEN));
    let page = partly_noise(1, 4);
    for tenant in &tenants {
        put(tenant, 1, 1, 1, &page);
        assert_eq!(tenant.stats().shared_pages, 0);
    }
    assert_eq!((engine.stats().blobs, engine.stats().shared_pages), (4, 0));
    engine.check_invariants();
    // After all tenants of a trust domain have departed, the name of the domain stands for a new
    // domain. A tenant without a domain name never shares a domain.
    drop(tenants);
    let again = add(&engine, "vm", Some("web"), OPEN);
    put(&again, 1, 1, 1, &page);
    assert_eq!(
        again.stats().shared_pages,
        0,
        "a tenant shares pages of a trust domain that no longer exists"
    );
    maintain_all(&engine);
}

#[test]
fn deduplication_is_unaffected_by_copies_in_other_trust_domains() {
    let engine = new_engine(4 << 20);
    let tenants: Vec<Tenant> = (0..100).map(|_| add(&engine, "vm", None, OPEN)).collect();
    let page = partly_noise(1, 4);
    for index in 0..2 {
        for tenant in &tenants {
            put(tenant, 1, index, 1, &page);
        }
    }
    let shared = tenants.iter().map(|tenant| tenant.stats().shared_pages);
    assert_eq!(shared.sum::<u64>(), 100);
    engine.check_invariants();
    let mut places: Vec<u32> = (0..100).map(|domain| place_bits(1, domain)).collect();
    places.sort_unstable_by_key(|place| place % 4096);
    places.dedup_by_key(|place| *place % 4096);
    assert!(
        places.len() > 90,
        "equal pages of 100 domains are in only {} of 4,096 buckets",
        places.len()
    );
}

#[test]
fn different_pages_with_equal_hashes_are_not_merged() {
    // Use pages that compress and a page that does not. Each page has a twin that differs in the
    // last byte only, where an incomplete comparison would miss the difference.
    let mut pages = vec![noise(1), partly_noise(2, 3), partly_noise(3, 6)];
    for at in 0..pages.len() {
        let mut twin = pages[at];
        twin[PAGE_SIZE - 1] ^= 0x80;
        pages.push(twin);
    }
    let engine = Engine::with(config(1 << 20), |_, _| 42, u32::MAX).unwrap();
    let a = add(&engine, "a", Some("web"), OPEN);
    let b = add(&engine, "b", Some("web"), OPEN);
    for (index, page) in pages.iter().enumerate() {
        put(&a, 1, index as u64, 1, page);
        put(&b, 1, index as u64, 1, page);
    }
    // All pages have one hash, and the table of equal pages lists only the first page with a hash.
    // So tenant b shares only that page.
    assert_eq!(engine.stats().shared_pages, 1);
    engine.check_invariants();
    for (index, page) in pages.iter().enumerate() {
        assert!(
            get(&a, 1, index as u64, 1) == Some(*page),
            "tenant a does not get the bytes of page {index}"
        );
        assert!(
            get(&b, 1, index as u64, 1) == Some(*page),
            "tenant b does not get the bytes of page {index}"
        );
    }
    assert_eq!(engine.stats().blobs, 0);
}

#[test]
fn freeing_a_page_with_a_colliding_hash_keeps_the_other_page_shareable() {
    let engine = Engine::with(config(1 << 20), |_, _| 42, u32::MAX).unwrap();
    let tenant = add(&engine, "a", None, OPEN);
    let (listed, other) = (noise(1), noise(2));
    put(&tenant, 1, 1, 1, &listed);
    put(&tenant, 1, 2, 1, &other);
    assert_eq!(get(&tenant, 1, 2, 1), Some(other));
    put(&tenant, 1, 3, 1, &listed);
    assert_eq!(
        tenant.stats().shared_pages,
        1,
        "an equal page was not found after a page with the same hash was freed"
    );
    engine.check_invariants();
}

#[test]
fn freeing_a_page_removes_it_from_the_dedup_table() {
    let engine = new_engine(1 << 20);
    let a = add(&engine, "a", None, OPEN);
    let page = noise(1);
    for _ in 0..3 {
        put(&a, 1, 1, 1, &page);
        put(&a, 1, 2, 1, &page);
        assert_eq!(a.stats().shared_pages, 1);
        assert_eq!(get(&a, 1, 1, 1), Some(page));
        assert_eq!(get(&a, 1, 2, 1), Some(page));
        engine.check_invariants();
    }
}

const STORE_BYTES: u64 = 4 << 20;

/// Stores a page raw (uncompressed), and returns the number of its blob and its check bits.
fn store_raw(store: &Store, page: &Page) -> RawCopy {
    let mut reserved = [Handle(0)];
    assert_eq!(store.reserve_raw(&mut reserved, STORE_BYTES), 1);
    store
        .put_raw(reserved[0], 0, page)
        .expect("a page in memory could not be copied")
}

fn prepare(store: &Store, RawCopy { blob: raw, check }: RawCopy, buffer: &mut Page) -> Prepared {
    store
        .prepare(raw, check, STORE_BYTES, buffer)
        .expect("the store has no memory for the compressed page")
}

fn complete(store: &Store, prepared: Prepared, buffer: &Page) -> Finalized {
    match prepared {
        Prepared::Finalized(finalized) => finalized,
        Prepared::Encoded(encoded) => store.complete(encoded, buffer),
    }
}

/// Finalizes two equal pages as two workers do: both look for an equal page before the other one
/// stores its page.
#[test]
fn equal_pages_prepared_by_two_workers_at_once_are_stored_once() {
    let store = Store::new(STORE_BYTES, PageHash::of, 1).unwrap();
    let mut buffers = [[0; PAGE_SIZE]; 2];
    let raw = [0, 1].map(|_| store_raw(&store, &partly_noise(1, 4)));
    let prepared = [0, 1].map(|nth| prepare(&store, raw[nth], &mut buffers[nth]));
    let finalized = [0, 1].map(|nth| complete(&store, prepared[nth], &buffers[nth]));
    assert_eq!(finalized[0].content, finalized[1].content);
    assert_eq!(finalized.map(|page| page.shared), [false, true]);
    assert_eq!(finalized[0].stored_bytes, finalized[1].stored_bytes);
    raw.into_iter().for_each(|raw| store.release(raw.blob));
    let Content::Blob(blob) = finalized[0].content else {
        panic!("the finalized page has no blob");
    };
    store.check(&[(blob, (None, 2))].into());
    store.release_all(&finalized.map(|page| page.content));
    store.check(&[].into());
    store.heap.check(0);
}

#[test]
fn release_all_drops_each_reference_to_a_blob_once() {
    let store = Store::new(STORE_BYTES, PageHash::of, 1).unwrap();
    let mut contents = vec![Content::Same(3)];
    let mut refs = std::collections::HashMap::new();
    let mut buffer = [0; PAGE_SIZE];
    // Store more raw pages than `release_all` frees in one group, and compressed pages between
    // them. Every third content occurs three times.
    for nth in 0..100 {
        let raw = store_raw(&store, &partly_noise(nth, 1 + nth as usize % 8));
        let content = match nth % 4 {
            0 => {
                let prepared = prepare(&store, raw, &mut buffer);
                let content = complete(&store, prepared, &buffer).content;
                store.release(raw.blob);
                content
            }
            _ => Content::Raw(raw.blob),
        };
        contents.push(content);
        if nth % 3 == 0 {
            assert!(store.share(content) && store.share(content));
            contents.extend([content; 2]);
        }
    }
    for &content in &contents {
        if let Content::Raw(blob) | Content::Blob(blob) = content {
            refs.entry(blob).or_insert((None, 0)).1 += 1;
        }
    }
    store.check(&refs);
    let mut rng = Rng::new(5);
    for at in (1..contents.len()).rev() {
        contents.swap(at, rng.below(at as u64 + 1) as usize);
    }
    // Release half of the references first, so that some contents keep a reference.
    let (first, second) = contents.split_at(contents.len() / 2);
    for part in [first, second] {
        store.release_all(part);
        for &content in part {
            if let Content::Raw(blob) | Content::Blob(blob) = content {
                let left = refs.get_mut(&blob).expect("a blob was released too often");
                left.1 -= 1;
                if left.1 == 0 {
                    refs.remove(&blob);
                }
            }
        }
        store.check(&refs);
        store.heap.check(refs.len());
    }
    assert!(refs.is_empty());
}

fn damage(tenant: &Tenant, index: u64, at: usize) {
    let engine = tenant.engine();
    let mut state = tenant.shared().lock(&engine.totals);
    let key = Key {
        pool: POOL,
        object: 1,
        index,
    };
    let id = state.peek(key).unwrap();
    match state.index.entries[id].content() {
        Content::Same(pattern) => state.index.change(id, |entry| {
            entry.set_content(Content::Same(pattern ^ 1), 0, false)
        }),
        content => engine.store.damage(content, at),
    }
}

/// Subscriber of the crate `tracing` that only counts events and asserts that they are errors.
struct CountEvents(Arc<AtomicUsize>);

impl tracing::Subscriber for CountEvents {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        assert_eq!(*event.metadata().level(), tracing::Level::ERROR);
        self.0.fetch_add(1, Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn damaged_pages_are_answered_as_misses_and_logged_once() {
    let events = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(CountEvents(Arc::clone(&events)), || {
        let engine = new_engine(1 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        let pages = [noise(1), partly_noise(2, 4), [3; PAGE_SIZE], noise(4)];
        for (index, page) in pages.iter().enumerate() {
            put(&tenant, 1, index as u64, 1, page);
        }
        // Damage one byte of each of the first three pages. lz4 copies the byte unchanged, so that
        // the compressed page still decodes.
        for index in 0..3 {
            damage(&tenant, index, 1000);
        }
        let mut out = [[0; PAGE_SIZE]; 4];
        let mut results = [GetResult::Hit { cookie: 1 }; 4];
        tenant
            .get(POOL, &Get::new(1, 0, &[1; 4]), &mut out, &mut results)
            .unwrap();
        assert_eq!(results[..3], [GetResult::Miss; 3]);
        assert_eq!(results[3], GetResult::Hit { cookie: 1 });
        assert_eq!(out[3], pages[3]);
        assert_eq!(
            (tenant.stats().hash_mismatches, tenant.stats().hits),
            (3, 1)
        );
        assert_eq!(engine.stats().hash_mismatches, 3);
        // A get has removed the damaged page, so another get does not find it.
        assert_eq!(get(&tenant, 1, 0, 1), None);
        assert_eq!(tenant.stats().pages, 0);
        engine.check_invariants();
    });
    assert_eq!(events.load(Relaxed), 1);
}

#[test]
fn a_damaged_retained_page_is_dropped_and_answered_as_a_miss() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let page = noise(1);
    put(&tenant, 1, 0, 1, &page);
    assert_eq!(get_retaining(&tenant, 1, 0, 1), Some((page, true)));
    damage(&tenant, 0, 1000);
    assert_eq!(get_retaining(&tenant, 1, 0, 1), None);
    let stats = tenant.stats();
    assert_eq!((stats.hash_mismatches, stats.pages), (1, 0));
    maintain_all(&engine);
    assert_eq!(engine.stats().blobs, 0);
}

#[test]
fn a_get_does_not_wrap_past_the_last_page_number() {
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let page = noise(1);
    for asked in [4, GET_PAGES_MAX] {
        assert_eq!(put(&tenant, 1, u64::MAX, 1, &page), PutResult::Stored);
        let mut out = vec![[0; PAGE_SIZE]; asked];
        let mut results = vec![GetResult::Miss; asked];
        let cookies = vec![1; asked];
        let first = u64::MAX - 1;
        let spent = tenant.get(POOL, &Get::new(1, first, &cookies), &mut out, &mut results);
        drop(spent.unwrap());
        let hits: Vec<usize> = (0..asked)
            .filter(|&nth| results[nth] == GetResult::Hit { cookie: 1 })
            .collect();
        assert_eq!((hits, out[1]), (vec![1], page));
    }
}

/// Kind of a page in the window, which is the 64 consecutive pages that one get of these tests
/// requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Missing,
    OtherCookie,
    SameFilled,
    Compressed,
    Incompressible,
    Dense,
    Shared,
    Nursery,
}

const KINDS: [Kind; 8] = [
    Kind::Missing,
    Kind::OtherCookie,
    Kind::SameFilled,
    Kind::Compressed,
    Kind::Incompressible,
    Kind::Dense,
    Kind::Shared,
    Kind::Nursery,
];

impl Kind {
    fn of(index: usize) -> Kind {
        KINDS[index % KINDS.len()]
    }

    /// Returns whether a get returns pages of this kind. Otherwise it misses.
    fn hits(self) -> bool {
        !matches!(self, Kind::Missing | Kind::OtherCookie)
    }

    fn page(self, index: usize) -> Page {
        match self {
            Kind::SameFilled => [index as u8; PAGE_SIZE],
            Kind::Incompressible | Kind::Nursery => noise(index as u64),
            Kind::Shared => partly_noise(1000, 2),
            Kind::Dense => letters(index as u64),
            Kind::Missing | Kind::OtherCookie | Kind::Compressed => partly_noise(index as u64, 2),
        }
    }
}

/// Returns a page that zstd compresses better than lz4.
fn letters(seed: u64) -> Page {
    let mut page = noise(seed);
    for byte in &mut page {
        *byte = b"etaoinsh"[usize::from(*byte % 8)];
    }
    page
}

/// Puts the window: 64 consecutive pages, eight positions for each kind of page. The gets of these
/// tests request them with the cookies 1, 2 and so on.
fn put_window(engine: &Engine, tenant: &Tenant) {
    let indices_of = |kinds: &'static [Kind]| {
        (0..GET_PAGES_MAX).filter(move |&index| kinds.contains(&Kind::of(index)))
    };
    let cookie = |index: usize| match Kind::of(index) {
        Kind::OtherCookie => 1000,
        _ => index as u64 + 1,
    };
    for index in indices_of(&[Kind::Dense]) {
        let page = Kind::Dense.page(index);
        put(tenant, 1, index as u64, cookie(index), &page);
    }
    for sweeps in 1..=4 {
        while engine.maintain(Time(sweeps * SWEEP_NS * 2), 64) {}
    }
    let dense = indices_of(&[Kind::Dense]).count() as u64;
    assert_eq!(engine.stats().recompressed_blobs, dense);
    let final_kinds = &[
        Kind::OtherCookie,
        Kind::SameFilled,
        Kind::Compressed,
        Kind::Incompressible,
        Kind::Shared,
    ];
    for index in indices_of(final_kinds) {
        let page = Kind::of(index).page(index);
        put(tenant, 1, index as u64, cookie(index), &page);
    }
    for index in indices_of(&[Kind::Nursery]) {
        let page = Kind::Nursery.page(index);
        put_raw(tenant, 1, index as u64, cookie(index), &page);
    }
    let stats = tenant.stats();
    assert_eq!(
        (
            stats.same_filled_pages,
            stats.shared_pages,
            stats.nursery_pages
        ),
        (8, 7, 8),
        "the 64 pages of the test do not include each kind of page"
    );
}

fn check_window(results: &[GetResult], out: &[Page]) {
    for (index, (result, out)) in results.iter().zip(out).enumerate() {
        let kind = Kind::of(index);
        let cookie = index as u64 + 1;
        let expected = match kind.hits() {
            true => GetResult::Hit { cookie },
            false => GetResult::Miss,
        };
        assert_eq!(
            *result, expected,
            "the get returned a wrong result for page {index} ({kind:?})"
        );
        assert!(
            !kind.hits() || *out == kind.page(index),
            "the get returned wrong bytes for page {index} ({kind:?})"
        );
    }
}

#[test]
fn a_get_of_64_pages_takes_the_tenant_lock_once() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    put_window(&engine, &tenant);
    let cookies: Vec<u64> = (1..=GET_PAGES_MAX as u64).collect();
    let mut out = vec![[0; PAGE_SIZE]; GET_PAGES_MAX];
    let mut results = vec![GetResult::Miss; GET_PAGES_MAX];
    let before = locked_times();
    let spent = tenant
        .get(POOL, &Get::new(1, 0, &cookies), &mut out, &mut results)
        .unwrap();
    assert_eq!(spent.pages(), GET_PAGES_MAX);
    drop(spent);
    assert_eq!(locked_times() - before, 1);
    check_window(&results, &out);
    let stats = tenant.stats();
    assert_eq!(
        (stats.gets, stats.hits, stats.cookie_mismatches, stats.pages),
        (64, 48, 8, 8)
    );
    maintain_all(&engine);
}

#[test]
fn a_get_stops_at_its_time_budget_and_can_be_continued() {
    for budget_ns in [GET_NS_MAX, 3 * GET_NS_MAX, 100_000] {
        let engine = new_engine(4 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        put_window(&engine, &tenant);
        let cookies: Vec<u64> = (1..=GET_PAGES_MAX as u64).collect();
        let mut out = vec![[0; PAGE_SIZE]; GET_PAGES_MAX];
        let mut results = vec![GetResult::Miss; GET_PAGES_MAX];
        let (mut done, mut calls) = (0, 0);
        while done < GET_PAGES_MAX {
            let (out, results) = (&mut out[done..], &mut results[done..]);
            let get = Get {
                budget_ns,
                ..Get::new(1, done as u64, &cookies[done..])
            };
            let spent = tenant.get(POOL, &get, out, results).unwrap();
            let (pages, cost_ns) = (spent.pages(), spent.cost_ns());
            assert!(
                pages > 0,
                "a get with a budget of {budget_ns} ns handled no page"
            );
            assert!(
                cost_ns <= budget_ns,
                "a get with a budget of {budget_ns} ns cost {cost_ns} ns"
            );
            done += pages;
            drop(spent);
            let left = (done..GET_PAGES_MAX).filter(|&index| Kind::of(index) != Kind::Missing);
            let stays = (0..done).filter(|&index| Kind::of(index) == Kind::OtherCookie);
            assert_eq!(
                tenant.stats().pages as usize,
                left.count() + stays.count(),
                "a get with a budget of {budget_ns} ns removed pages that it did not return"
            );
            assert!(
                results[pages..]
                    .iter()
                    .all(|result| *result == GetResult::Miss)
            );
            calls += 1;
        }
        assert!(
            calls > 1,
            "one get with a budget of {budget_ns} ns returned all pages, so the budget was not tested"
        );
        check_window(&results, &out);
        maintain_all(&engine);
    }
}

#[test]
fn a_get_of_retained_pages_stays_within_its_time_budget() {
    let cookies: Vec<u64> = (1..=GET_PAGES_MAX as u64).collect();
    for budget_ns in [GET_NS_MAX, 100_000] {
        let engine = new_engine(4 << 20);
        let tenant = add(&engine, "a", None, OPEN);
        put_window(&engine, &tenant);
        // Gets all pages of the window, and allows the pool to retain (keep) all of them. Returns
        // the total cost in nanoseconds and the number of calls that were necessary.
        let get_all = |budget_ns| {
            let mut out = vec![[0; PAGE_SIZE]; GET_PAGES_MAX];
            let mut results = vec![GetResult::Miss; GET_PAGES_MAX];
            let (mut done, mut total_ns, mut calls) = (0, 0, 0);
            while done < GET_PAGES_MAX {
                let (out, results) = (&mut out[done..], &mut results[done..]);
                let get = Get {
                    retain: u64::MAX,
                    budget_ns,
                    ..Get::new(1, done as u64, &cookies[done..])
                };
                let before = locked_times();
                let spent = tenant.get(POOL, &get, out, results).unwrap();
                assert_eq!(locked_times() - before, 1);
                let cost_ns = spent.cost_ns();
                assert!(
                    cost_ns <= budget_ns,
                    "a get with a budget of {budget_ns} ns cost {cost_ns} ns"
                );
                assert!(
                    spent.pages() > 0,
                    "a get with a budget of {budget_ns} ns handled no page"
                );
                done += spent.pages();
                total_ns += cost_ns;
                calls += 1;
            }
            let hits: Vec<GetResult> = results
                .iter()
                .map(|result| match *result {
                    GetResult::Hit { .. } => panic!("a get removed a page instead of retaining it"),
                    GetResult::Retained { cookie } => GetResult::Hit { cookie },
                    GetResult::Miss => GetResult::Miss,
                })
                .collect();
            check_window(&hits, &out);
            assert_eq!(tenant.stats().retained_pages, 48);
            (total_ns, calls)
        };
        let (held_ns, _) = get_all(u64::MAX);
        let (retained_ns, calls) = get_all(budget_ns);
        assert!(
            calls > 1,
            "one get with a budget of {budget_ns} ns returned all pages, so the budget was not tested"
        );
        // A get of a retained page costs REF_NS more. The comparison has a tolerance of 1,000 ns,
        // because the walks of the estimator cost less than that in these gets.
        assert!(
            retained_ns + 1000 >= held_ns + 48 * REF_NS,
            "a get of retained pages cost {retained_ns} ns, too little beside {held_ns} ns for \
             held pages"
        );
        maintain_all(&engine);
    }
}

#[test]
fn compressed_and_raw_pages_decode_unchanged() {
    let mut buffer = [0; PAGE_SIZE];
    let mut out = [0; PAGE_SIZE];
    let mut raw = 0;
    for seed in 0..200 {
        let page = partly_noise(seed, (seed % 9) as usize);
        let Some(stored) = codec::encode(&page, &mut buffer) else {
            raw += 1;
            continue;
        };
        assert!(stored.len() <= ENCODED_BYTES_MAX);
        out.fill(0);
        assert_eq!(codec::decode(stored, &mut out), Ok(()));
        assert!(out == page);
    }
    assert!(
        (1..200).contains(&raw),
        "{raw} of 200 pages are stored raw, not 1 to 199"
    );
    let page = noise(1);
    assert_eq!(codec::decode(&page, &mut out), Ok(()));
    assert!(out == page);
}

#[test]
fn decoding_damaged_bytes_fails() {
    let mut buffer = [0; PAGE_SIZE];
    let stored = codec::encode(&partly_noise(1, 4), &mut buffer)
        .unwrap()
        .to_vec();
    let mut out = [0; PAGE_SIZE];
    for len in 0..stored.len() {
        let cut = codec::decode(&stored[..len], &mut out);
        assert_eq!(
            cut,
            Err(Corrupt),
            "decode() accepted a stored page that was cut to {len} B"
        );
    }
    let mut other = stored;
    other[0] = 0;
    assert_eq!(
        codec::decode(&other, &mut out),
        Err(Corrupt),
        "decode() accepted stored bytes of an unknown form"
    );
    for len in [PAGE_SIZE - 1, PAGE_SIZE + 1] {
        assert_eq!(codec::decode(&vec![0; len], &mut out), Err(Corrupt));
    }
}

#[test]
fn same_filled_pages_are_recognized_and_restored() {
    let mut page: Page = [0; PAGE_SIZE];
    page.as_chunks_mut::<4>().0.fill(*b"four");
    let pattern = u32::from_ne_bytes(*b"four");
    assert_eq!(codec::same_filled(&page), Some(pattern));
    let mut out = [0; PAGE_SIZE];
    codec::fill(pattern, &mut out);
    assert_eq!(out, page);
    for at in [0, 4, 7, 8, PAGE_SIZE / 2, PAGE_SIZE - 9, PAGE_SIZE - 1] {
        let mut other = page;
        other[at] ^= 1;
        assert_eq!(
            codec::same_filled(&other),
            None,
            "a page whose byte {at} differs was recognized as same-filled"
        );
    }
    let mut eight = page;
    eight.as_chunks_mut::<8>().0.fill(*b"8 bytes.");
    assert_eq!(codec::same_filled(&eight), None);
    let engine = new_engine(1 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    put(&tenant, 1, 1, 1, &page);
    assert_eq!(
        (
            engine.stats().payload_bytes,
            engine.stats().same_filled_pages
        ),
        (0, 1)
    );
    assert_eq!(
        tenant.stats().charged_bytes,
        crate::PAGE_METADATA_CHARGE_BYTES
    );
    assert_eq!(get(&tenant, 1, 1, 1), Some(page));
}

#[test]
fn cold_pages_are_recompressed_smaller() {
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    let pages: Vec<Page> = (0..100).map(text).collect();
    for (index, page) in pages.iter().enumerate() {
        put(&tenant, 1, index as u64, 1, page);
    }
    put(&tenant, 1, 100, 1, &noise(1));
    let at = |now| {
        while engine.maintain(Time(now), 64) {}
        engine.check_invariants();
        engine.stats().payload_bytes
    };
    let (before, charged) = (at(0), tenant.stats().charged_bytes);
    assert_eq!(at(SWEEP_NS / 2), before);
    assert_eq!(
        at(SWEEP_NS),
        before,
        "pages were recompressed in the first sweep"
    );
    let half = at(SWEEP_NS * 3 / 2);
    let dense = at(SWEEP_NS * 2);
    assert!(
        dense < half && half < before,
        "the payload did not shrink in both halves of the second sweep: {before} B before, {half} \
         B after one half, {dense} B after both"
    );
    assert!(
        dense - PAGE_SIZE as u64 <= (before - PAGE_SIZE as u64) * 9 / 10,
        "recompression saves less than 10 %: {before} B became {dense} B"
    );
    assert_eq!(
        at(SWEEP_NS * 9),
        dense,
        "later sweeps recompressed pages again"
    );
    // The statistics report the bytes saved by recompression separately from those saved by
    // sharing.
    let stats_cold = engine.stats();
    assert_eq!(
        stats_cold.payload_bytes + stats_cold.zstd_saved_bytes,
        before
    );
    assert_eq!(
        stats_cold.zstd_saved_bytes,
        stats_cold.recompressed_saved_bytes
    );
    // The charge of a page is its first compressed size. Recompression does not change the charge,
    // not even that of an equal page that is put afterwards.
    assert_eq!(tenant.stats().charged_bytes, charged);
    for (index, page) in pages.iter().enumerate() {
        put(&tenant, 2, index as u64, 1, page);
    }
    let stats = tenant.stats();
    assert_eq!(stats.shared_pages, 100);
    let noise_charge = PAGE_SIZE as u64 + crate::PAGE_METADATA_CHARGE_BYTES;
    assert_eq!(stats.charged_bytes, 2 * charged - noise_charge);
    for (index, page) in pages.iter().enumerate() {
        assert!(
            get(&tenant, 1, index as u64, 1) == Some(*page),
            "the recompressed page {index} was not returned unchanged"
        );
    }
    engine.check_invariants();
    assert_eq!(engine.stats().zstd_saved_bytes, stats_cold.zstd_saved_bytes);
    tenant.clear();
    while engine.maintain(Time(SWEEP_NS * 9), 64) {}
    let stats = engine.stats();
    assert_eq!((stats.blobs, stats.zstd_saved_bytes), (0, 0));
    assert_eq!(
        stats.recompressed_saved_bytes,
        stats_cold.recompressed_saved_bytes
    );
    engine.check_invariants();
}

/// Stores pages that all have one hash, so that the table of equal pages lists only one of them.
/// The sweep must recompress the others nevertheless.
#[test]
fn cold_pages_missing_from_the_dedup_table_are_recompressed() {
    let engine = Engine::with(config(4 << 20), |_, _| 42, u32::MAX).unwrap();
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..10 {
        put(&tenant, 1, index, 1, &text(index));
    }
    for half in 1..=4 {
        while engine.maintain(Time(SWEEP_NS * half / 2), 64) {}
    }
    assert_eq!(engine.stats().recompressed_blobs, 10);
    for index in 0..10 {
        assert!(get(&tenant, 1, index, 1) == Some(text(index)));
    }
    engine.check_invariants();
}

/// Puts pages all the time, so that background work always has other work than the sweep. The sweep
/// must recompress cold pages nevertheless.
#[test]
fn cold_pages_are_recompressed_under_constant_load() {
    const STEPS: u64 = 600;
    let engine = new_engine(4 << 20);
    let tenant = add(&engine, "a", None, OPEN);
    for index in 0..100 {
        put(&tenant, 1, index, 1, &text(index));
    }
    for step in 0..STEPS {
        for index in 0..16 {
            let page = [step as u8; PAGE_SIZE];
            assert_eq!(put_raw(&tenant, 2, index, 1, &page), PutResult::Stored);
        }
        // The budget of 8 pages suffices for only half of the 16 new pages.
        assert!(engine.maintain(Time(3 * SWEEP_NS / STEPS * step), 8));
        assert!(tenant.stats().nursery_pages > 0);
    }
    assert!(
        engine.stats().recompressed_blobs > 50,
        "the sweep recompressed only {} of 100 cold pages in the time of three sweeps",
        engine.stats().recompressed_blobs
    );
    engine.check_invariants();
}

#[test]
fn admission_error_names_the_vm_its_reserve_and_the_available_bytes() {
    let engine = new_engine(1000);
    let quota = Quota {
        reserve_bytes: 1001,
        ..OPEN
    };
    let spec = TenantSpec {
        name: "db-1".into(),
        trust_domain: None,
        quota,
    };
    let error = engine.add_tenant(spec).unwrap_err();
    let text = error.to_string();
    assert!(
        ["db-1", "1001", "1000"]
            .iter()
            .all(|part| text.contains(part)),
        "the error does not contain the tenant's name and both sizes: {text}"
    );
}
