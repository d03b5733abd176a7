// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of interactions between the engine's threads. Each test runs in thousands of orders of the
//! threads' steps. The library shuttle (feature `shuttle`) runs one thread at a time. At each
//! access to a lock or atomic, a seed decides which thread continues.
//!
//! These tests do not try memory orders weaker than sequential consistency.

use super::rng::{Rng, for_each_seed};
use super::{
    OPEN, POOL, add, config, finalize_raw, get, get_retaining, noise, partly_noise, put_raw, refer,
    text,
};
use crate::blob::{Finalized, Prepared, RawCopy, Store};
use crate::codec::Denser;
use crate::config::DomainId;
use crate::heap::{Handle, Heap};
use crate::index::entry::Content;
use crate::state::Reason;
use crate::{Engine, Get, GetResult, PAGE_SIZE, Page, PageHash, Put, PutResult, Time};
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::thread::{self, yield_now};
use shuttle::{FailurePersistence, MaxSteps, Runner};
use std::collections::HashMap;
use std::sync::Arc;

/// Number of orders of the threads' steps that a test tries. All tests together take about a
/// minute.
const ORDERS: u64 = 1000;

/// Number of orders of the threads' steps that a test with readers tries. It is larger than ORDERS,
/// because a reader runs between compaction's two accesses to a blob's word in only one of two
/// thousand orders.
const READERS_ORDERS: u64 = 4000;

/// Size of a thread's stack in bytes. It is large because lz4 has its tables on the stack.
const STACK_BYTES: usize = 1 << 20;

/// Largest number of steps of an order, which is one execution of a test: the sequence in which its
/// threads take their steps. No correct execution needs nearly as many steps. A test in which
/// threads wait for each other forever fails when it reaches this number.
const STEPS_MAX: usize = 200_000;

/// Scheduler that lets a thread run for a random number of steps and then chooses the next thread.
/// A run is a sequence of steps of one thread, and its length is the number of these steps. In half
/// of all executions of a test, all runs are short and have about the same length. In the other
/// half, the lengths of runs vary from one step to two thousand, where all magnitudes are equally
/// likely. Then one thread may stop at one place while other threads do a lot of work.
struct Sticky {
    rng: Rng,
    /// Number of binary digits of the largest run length, if all runs of an execution have the same
    /// bound. With None, the scheduler chooses the number of digits again for each run.
    bits: Option<u64>,
    left: u64,
    begun: bool,
}

/// Exclusive upper bound of the number of binary digits of a run length. In executions with short
/// runs, the bound is SHORT_WHILE_BITS instead.
const WHILE_BITS: u64 = 12;
const SHORT_WHILE_BITS: u64 = 7;

impl Scheduler for Sticky {
    fn new_execution(&mut self) -> Option<Schedule> {
        (!std::mem::replace(&mut self.begun, true)).then(|| Schedule::new(0))
    }

    fn next_task(&mut self, able: &[&Task], now: Option<TaskId>, _: bool) -> Option<TaskId> {
        let now = now.filter(|now| able.iter().any(|task| task.id() == *now));
        if self.left > 0 && now.is_some() {
            self.left -= 1;
            return now;
        }
        let bits = self.bits;
        let most = 1 << bits.unwrap_or_else(|| self.rng.below(WHILE_BITS));
        self.left = self.rng.below(most);
        Some(able[self.rng.below(able.len() as u64) as usize].id())
    }

    fn next_u64(&mut self) -> u64 {
        self.rng.next()
    }
}

fn in_all_orders(name: &str, orders: u64, test: impl Fn() + Send + Sync + 'static) {
    let test = Arc::new(test);
    for_each_seed(name, orders, |seed| {
        let mut config = shuttle::Config::new();
        config.stack_size = STACK_BYTES;
        config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
        // Write no file for a failing execution, because the seed identifies it.
        config.failure_persistence = FailurePersistence::None;
        config.silence_warnings = true;
        let mut rng = Rng::new(seed);
        let short = rng.one_in(2);
        let scheduler = Sticky {
            bits: short.then(|| 1 + rng.below(SHORT_WHILE_BITS - 1)),
            rng,
            left: 0,
            begun: false,
        };
        let test = test.clone();
        Runner::new(scheduler, config).run(move || test());
    });
}

const HEAP_BYTES: u64 = 1 << 20;

/// Length in bytes of stored data for which a span (group of adjacent frames) has three slots.
const LEN: usize = 2700;

fn store(heap: &Heap<()>, id: u8) -> Handle {
    heap.store(&[id; LEN], HEAP_BYTES).unwrap()
}

/// Reads a handle's bytes several times through one reader, with possible thread switches in
/// between. Asserts that each byte is `id`.
fn assert_bytes(heap: &Heap<()>, handle: Handle, id: u8) {
    let reader = heap.reader(handle);
    for _ in 0..3 {
        assert!(reader.bytes().iter().all(|byte| *byte == id));
        yield_now();
    }
}

type Work = Box<dyn FnOnce(&Heap<()>) + Send>;

fn at_once(heap: &Arc<Heap<()>>, work: Vec<Work>) {
    let spawn = |work: Work| {
        let heap = heap.clone();
        thread::spawn(move || work(&heap))
    };
    let threads: Vec<_> = work.into_iter().map(spawn).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn reads_are_correct_during_compaction_and_frees() {
    in_all_orders(
        "reads_are_correct_during_compaction_and_frees",
        READERS_ORDERS,
        || {
            let heap = Arc::new(Heap::<()>::new(HEAP_BYTES).unwrap());
            let [gone, replaced, freed, read] = [1, 2, 3, 4].map(|id| store(&heap, id));
            heap.free(gone);
            assert!(
                heap.has_spare(),
                "the heap has no span that compaction could empty"
            );
            at_once(
                &heap,
                vec![
                    Box::new(move |heap| {
                        assert_bytes(heap, read, 4);
                        assert_bytes(heap, replaced, 2);
                    }),
                    Box::new(|heap| {
                        heap.compact(16);
                        heap.compact(16);
                    }),
                    Box::new(move |heap| heap.free(freed)),
                    Box::new(move |heap| {
                        heap.replace(replaced, &[2; LEN - 100], HEAP_BYTES);
                        assert_bytes(heap, replaced, 2);
                    }),
                ],
            );
            heap.check(2);
            for (handle, id) in [(replaced, 2), (read, 4)] {
                assert_bytes(&heap, handle, id);
                heap.free(handle);
            }
            heap.check(0);
        },
    );
}

/// Runs `write` beside a thread that frees blobs and compacts. At first the heap has two full spans
/// (groups of adjacent frames), with three blobs each. `write` takes a slot of a third span. After
/// the other thread has freed one blob of each full span, the third span is the emptiest, so that
/// compaction moves its bytes.
fn a_slot_is_written(name: &str, write: fn(&Heap<()>, Handle)) {
    in_all_orders(name, ORDERS, move || {
        let heap = Arc::new(Heap::<()>::new(HEAP_BYTES).unwrap());
        let all = [1, 2, 3, 4, 5, 6].map(|id| store(&heap, id));
        at_once(
            &heap,
            vec![
                Box::new(move |heap| write(heap, all[0])),
                Box::new(move |heap| {
                    heap.free(all[1]);
                    heap.free(all[4]);
                    heap.compact(16);
                }),
            ],
        );
        heap.check(4);
        for (nth, id) in [(0, 1), (2, 3), (3, 4), (5, 6)] {
            assert_bytes(&heap, all[nth], id);
            heap.free(all[nth]);
        }
        heap.check(0);
    });
}

#[test]
fn writing_a_heap_slot_is_correct_during_compaction() {
    a_slot_is_written(
        "writing_a_heap_slot_is_correct_during_compaction",
        |heap, _| {
            let handle = store(heap, 7);
            assert_bytes(heap, handle, 7);
            heap.free(handle);
        },
    );
}

#[test]
fn replacing_a_heap_slot_is_correct_during_compaction() {
    a_slot_is_written(
        "replacing_a_heap_slot_is_correct_during_compaction",
        |heap, handle| {
            heap.replace(handle, &[1; LEN], HEAP_BYTES);
            assert_bytes(heap, handle, 1);
        },
    );
}

/// Stores a page and finalizes (deduplicates and compresses) it.
fn finalize(store: &Store, page: &Page, domain: DomainId) -> Finalized {
    let mut reserved = [Handle(0)];
    assert_eq!(store.reserve_raw(&mut reserved, HEAP_BYTES), 1);
    let RawCopy { blob: raw, check } = store.put_raw(reserved[0], domain, page).unwrap();
    let mut buffer = [0; PAGE_SIZE];
    let finalized = match store.prepare(raw, check, HEAP_BYTES, &mut buffer).unwrap() {
        Prepared::Finalized(finalized) => finalized,
        Prepared::Encoded(encoded) => store.complete(encoded, &buffer),
    };
    store.release(raw);
    finalized
}

fn check_of(page: &Page) -> u32 {
    crate::hash::check_bits(PageHash::new(SEED).of(page))
}

const SEED: u64 = 11;

/// Tests that a page can be stored while its last copy is freed. One thread releases the last
/// reference to the page in trust domain 0, and another thread stores an equal page in this domain.
/// A third thread stores an equal page in domain 1, where it may get the memory that became free.
fn equal_pages(name: &str, page: Page) {
    in_all_orders(name, ORDERS, move || {
        let store = Arc::new(Store::new(HEAP_BYTES, PageHash::of, SEED).unwrap());
        let last = finalize(&store, &page, 0).content;
        let going = {
            let store = store.clone();
            thread::spawn(move || store.release_content(last))
        };
        let coming = [0, 1].map(|domain| {
            let store = store.clone();
            thread::spawn(move || {
                let content = finalize(&store, &page, domain).content;
                let mut out = [0; PAGE_SIZE];
                let read = store.read(&store.reader(content), check_of(&page), &mut out);
                assert_eq!(
                    read,
                    Ok(()),
                    "the page that was stored in trust domain {domain} cannot be read"
                );
                assert!(
                    out == page,
                    "the page that was stored in trust domain {domain} has wrong bytes"
                );
                content
            })
        });
        let moving = {
            let store = store.clone();
            thread::spawn(move || store.heap.compact(8))
        };
        going.join().unwrap();
        let [ours, theirs] = coming.map(|thread| thread.join().unwrap());
        moving.join().unwrap();
        assert_ne!(ours, theirs, "two trust domains share one blob");
        store.release_content(ours);
        store.release_content(theirs);
        store.check(&HashMap::new());
        store.heap.check(0);
    });
}

#[test]
fn a_page_can_be_stored_while_its_last_equal_page_is_freed() {
    equal_pages(
        "a_page_can_be_stored_while_its_last_equal_page_is_freed",
        partly_noise(1, 4),
    );
}

#[test]
fn a_raw_page_can_be_stored_while_its_last_equal_page_is_freed() {
    equal_pages(
        "a_raw_page_can_be_stored_while_its_last_equal_page_is_freed",
        noise(1),
    );
}

/// Tests two threads that visit one cold blob in the sweep at the same time, beside a thread that
/// reads it. The sum of bytes that zstd saves counts the blob once.
#[test]
fn a_blob_is_recompressed_once_by_two_threads() {
    in_all_orders("a_blob_is_recompressed_once_by_two_threads", ORDERS, || {
        let store = Arc::new(Store::new(HEAP_BYTES, PageHash::of, SEED).unwrap());
        let page = text(1);
        let content = finalize(&store, &page, 0).content;
        let Content::Blob(blob) = content else {
            panic!("the page does not compress");
        };
        let visit = move |store: &Store| {
            let mut pages = [[0; PAGE_SIZE]; 2];
            let mut denser = Denser::new().unwrap();
            store.recompress_if_cold(blob, HEAP_BYTES, &mut denser, &mut pages)
        };
        assert!(!visit(&store), "the first sweep recompressed the blob");
        let sweeping = [(); 2].map(|()| {
            let store = store.clone();
            thread::spawn(move || visit(&store))
        });
        let mut out = [0; PAGE_SIZE];
        let read = store.read(&store.reader(content), check_of(&page), &mut out);
        assert_eq!(read, Ok(()));
        let worked = sweeping.map(|thread| thread.join().unwrap());
        assert!(worked.contains(&true));
        store.check(&HashMap::from([(blob, (None, 1))]));
        store.release_content(content);
        store.check(&HashMap::new());
    });
}

/// Tests two workers that finalize equal pages at the same time. They must share one blob, whatever
/// the order of their steps.
fn equal_pages_of_two_workers(name: &str, page: Page) {
    in_all_orders(name, ORDERS, move || {
        let store = Arc::new(Store::new(HEAP_BYTES, PageHash::of, SEED).unwrap());
        let workers = [(); 2].map(|()| {
            let store = store.clone();
            thread::spawn(move || finalize(&store, &page, 0))
        });
        let finalized = workers.map(|thread| thread.join().unwrap());
        let contents = finalized.map(|page| page.content);
        assert_eq!(
            contents[0], contents[1],
            "equal pages of two workers are stored in two blobs"
        );
        assert!(finalized[0].shared != finalized[1].shared);
        store.release_all(&contents);
        store.check(&HashMap::new());
        store.heap.check(0);
    });
}

#[test]
fn equal_pages_of_two_workers_share_one_blob() {
    equal_pages_of_two_workers(
        "equal_pages_of_two_workers_share_one_blob",
        partly_noise(1, 4),
    );
}

#[test]
fn equal_raw_pages_of_two_workers_share_one_blob() {
    equal_pages_of_two_workers("equal_raw_pages_of_two_workers_share_one_blob", noise(1));
}

#[test]
fn a_get_completes_as_its_tenant_departs() {
    let page = partly_noise(1, 4);
    in_all_orders("a_get_completes_as_its_tenant_departs", ORDERS, move || {
        let engine = Engine::new(config(1 << 20)).unwrap();
        let tenant = add(&engine, "a", None, OPEN);
        let put = |index| Put {
            object: 1,
            index,
            cookie: 1,
            workingset: false,
            page: &page,
        };
        let mut results = [PutResult::Refused; 2];
        let puts = [put(1), put(2)];
        tenant.put(POOL, &puts, &mut results).unwrap();
        assert_eq!(results, [PutResult::Stored; 2]);
        let getting = {
            let tenant = tenant.clone();
            thread::spawn(move || {
                let (mut out, mut results) = ([[0; PAGE_SIZE]; 2], [GetResult::Miss; 2]);
                let spent = tenant.get(POOL, &Get::new(1, 1, &[1, 1]), &mut out, &mut results);
                assert_eq!(results, [GetResult::Hit { cookie: 1 }; 2]);
                assert!(out == [page; 2]);
                drop(spent.unwrap());
            })
        };
        let going = thread::spawn(move || drop(tenant));
        let working = {
            let engine = engine.clone();
            thread::spawn(move || engine.maintain(Time(0), 8))
        };
        getting.join().unwrap();
        going.join().unwrap();
        working.join().unwrap();
        while engine.maintain(Time(0), 64) {}
        let stats = engine.stats();
        assert_eq!(
            (stats.tenants, stats.removed_tenants, stats.blobs),
            (0, 0, 0)
        );
        engine.check_invariants();
    });
}

/// Tests gets of a page that is retained (left in the pool), followed by a reference (REF) to the
/// page. Meanwhile other threads evict the page, replace it by another put, and finalize it.
#[test]
fn a_retained_page_can_be_evicted_and_replaced_while_it_is_read() {
    let pages = [partly_noise(1, 4), partly_noise(2, 4)];
    let name = "a_retained_page_can_be_evicted_and_replaced_while_it_is_read";
    in_all_orders(name, ORDERS, move || {
        let engine = Engine::new(config(1 << 20)).unwrap();
        let tenant = add(&engine, "a", None, OPEN);
        assert_eq!(put_raw(&tenant, 1, 1, 1, &pages[0]), PutResult::Stored);
        let getting = {
            let tenant = tenant.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    if let Some((page, _)) = get_retaining(&tenant, 1, 1, 1) {
                        assert!(page == pages[0]);
                    }
                }
                refer(&tenant, 1, 1, 1);
            })
        };
        let evicting = {
            let (engine, tenant) = (engine.clone(), tenant.clone());
            thread::spawn(move || {
                engine.evict_from(tenant.shared(), 1, Reason::Pool);
                assert_eq!(put_raw(&tenant, 1, 1, 2, &pages[1]), PutResult::Stored);
            })
        };
        let working = {
            let engine = engine.clone();
            thread::spawn(move || engine.maintain(Time(0), 4))
        };
        getting.join().unwrap();
        evicting.join().unwrap();
        working.join().unwrap();
        engine.check_invariants();
        assert_eq!(get(&tenant, 1, 1, 2), Some(pages[1]));
        drop(tenant);
        while engine.maintain(Time(0), 64) {}
        let stats = engine.stats();
        assert_eq!((stats.blobs, stats.payload_bytes), (0, 0));
        engine.check_invariants();
    });
}

/// Tests a background worker that frees the last page of a destroyed pool. Meanwhile the tenant,
/// which has a page in another pool, departs. The worker must not treat the departed tenant as
/// empty. An engine with this fault would show it in few orders of the threads' steps only, so each
/// execution tries several tenants.
#[test]
fn a_departing_tenant_is_kept_until_its_pages_are_freed() {
    const OTHER: u32 = POOL + 1;
    const TENANTS: usize = 16;
    let pages = [partly_noise(1, 4), partly_noise(2, 4)];
    let name = "a_departing_tenant_is_kept_until_its_pages_are_freed";
    in_all_orders(name, ORDERS, move || {
        let engine = Engine::new(config(1 << 20)).unwrap();
        for _ in 0..TENANTS {
            let tenant = add(&engine, "a", None, OPEN);
            tenant.create_pool(OTHER).unwrap();
            for (id, page) in [POOL, OTHER].into_iter().zip(&pages) {
                let put = Put {
                    object: 1,
                    index: 1,
                    cookie: 1,
                    workingset: false,
                    page,
                };
                let mut results = [PutResult::Refused];
                tenant.put(id, &[put], &mut results).unwrap();
                assert_eq!(results, [PutResult::Stored]);
            }
            finalize_raw(&tenant);
            tenant.destroy_pool(OTHER).unwrap();
            let working = {
                let engine = engine.clone();
                thread::spawn(move || engine.maintain(Time(0), 8))
            };
            drop(tenant);
            working.join().unwrap();
            while engine.maintain(Time(0), 64) {}
            let stats = engine.stats();
            assert_eq!(
                (stats.tenants, stats.removed_tenants, stats.blobs),
                (0, 0, 0)
            );
        }
        engine.check_invariants();
    });
}

#[test]
fn a_put_to_a_destroyed_pool_stores_nothing_in_the_next_pool() {
    const OTHER: u32 = POOL + 1;
    let page = partly_noise(1, 4);
    in_all_orders(
        "a_put_to_a_destroyed_pool_stores_nothing_in_the_next_pool",
        ORDERS,
        move || {
            let engine = Engine::new(config(1 << 20)).unwrap();
            let tenant = add(&engine, "a", None, OPEN);
            let putting = {
                let tenant = tenant.clone();
                thread::spawn(move || {
                    let put = Put {
                        object: 1,
                        index: 1,
                        cookie: 1,
                        workingset: false,
                        page: &page,
                    };
                    let mut results = [PutResult::Refused];
                    // Ignore the result: the other thread may already have destroyed the pool.
                    let _ = tenant.put(POOL, &[put], &mut results);
                })
            };
            let changing = {
                let tenant = tenant.clone();
                thread::spawn(move || {
                    tenant.destroy_pool(POOL).unwrap();
                    // The new pool gets the index record that the destroyed pool had. A put to the
                    // destroyed pool must not store its page in the new pool.
                    tenant.create_pool(OTHER).unwrap();
                })
            };
            putting.join().unwrap();
            changing.join().unwrap();
            let (mut out, mut results) = ([[0; PAGE_SIZE]], [GetResult::Miss]);
            let spent = tenant.get(OTHER, &Get::new(1, 1, &[1]), &mut out, &mut results);
            drop(spent.unwrap());
            assert_eq!(results, [GetResult::Miss]);
            while engine.maintain(Time(0), 64) {}
            assert_eq!(engine.stats().blobs, 0);
            engine.check_invariants();
        },
    );
}
