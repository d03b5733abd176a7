// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine says it holds against what the heap gives it, and what it leaves behind in freed
//! memory.
//!
//! One test in a process of its own, since the allocator counts for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use tmem_pool::{
    PAGE_SIZE, Page, Pool, PoolConfig, Put, PutResult, Quota, Tenant, TenantSpec, Time,
};

/// Counts live bytes, and freed blocks that still hold the secret.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static SECRETS_FREED: AtomicUsize = AtomicUsize::new(0);
static LOOKING: AtomicBool = AtomicBool::new(false);

/// In each page of the test; incompressible, so that it is found in the stored form, too.
const SECRET: [u8; 16] = *b"\x91o\x07TheGuest'sKey";

/// What a heap takes for a block: a word before it, in units of 16 bytes.
fn heap_bytes(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call is passed to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(heap_bytes(layout), SeqCst);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(heap_bytes(layout), SeqCst);
        if LOOKING.load(SeqCst) && layout.align() == 1 {
            // SAFETY: the block is the caller's until this call ends. Blocks of bytes, which these
            // are, were initialised by whoever made them.
            let bytes = unsafe { std::slice::from_raw_parts(block, layout.size()) };
            let found = bytes.windows(SECRET.len()).any(|window| window == SECRET);
            SECRETS_FREED.fetch_add(usize::from(found), SeqCst);
        }
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// A compressible page, different for each `nth`, with the secret in it.
fn page(nth: u64) -> Page {
    let mut page = [nth as u8; PAGE_SIZE];
    page[100..116].copy_from_slice(&SECRET);
    let mut x = nth + 1;
    for byte in &mut page[200..1200] {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        *byte = (x >> 56) as u8;
    }
    page
}

fn fill(tenant: &Tenant, pages: u64, object: impl Fn(u64) -> u64, page: impl Fn(u64) -> Page) {
    for nth in 0..pages {
        let page = page(nth);
        let put = Put {
            object: object(nth),
            index: nth,
            cookie: 1,
            workingset: false,
            page: &page,
        };
        let mut results = [PutResult::Refused];
        tenant.put(Time(0), 1, &[put], &mut results).unwrap();
        assert_eq!(results, [PutResult::Stored]);
    }
}

#[test]
fn what_is_held_is_told_and_what_is_freed_is_zeroed() {
    const PAGES: u64 = 4_000;
    let pool = Pool::new(PoolConfig {
        size_bytes: 256 << 20,
        seed: 3,
    });
    let add = || {
        let quota = Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 1,
        };
        let spec = TenantSpec {
            name: "a".into(),
            trust_domain: None,
            quota,
        };
        let tenant = pool.add_tenant(spec).unwrap();
        tenant.create_pool(1).unwrap();
        tenant
    };
    let small_file = |nth: u64| nth / 5;
    let one_page = |nth: u64| nth;
    let large_file = |_| 1;
    let same = |nth: u64| [nth as u8; PAGE_SIZE];
    type Fill<'a> = &'a dyn Fn(&Tenant);
    let shapes: [(&str, Fill<'_>); 6] = [
        ("one-page objects", &|tenant| {
            fill(tenant, PAGES, one_page, page)
        }),
        ("five-page objects", &|tenant| {
            fill(tenant, PAGES, small_file, page)
        }),
        ("one large object", &|tenant| {
            fill(tenant, PAGES, large_file, page)
        }),
        ("same-filled, one-page objects", &|tenant| {
            fill(tenant, PAGES, one_page, same)
        }),
        ("same-filled, one large object", &|tenant| {
            fill(tenant, PAGES, large_file, same)
        }),
        ("a large object with holes", &|tenant| {
            fill(tenant, PAGES, large_file, page);
            for index in (0..PAGES).filter(|index| index % 3 != 0) {
                tenant.flush(1, 1, index, Some(1)).unwrap();
            }
        }),
    ];
    LOOKING.store(true, SeqCst);
    for (what, fill) in shapes {
        let before = LIVE_BYTES.load(SeqCst);
        let tenant = add();
        fill(&tenant);
        let heap_bytes = (LIVE_BYTES.load(SeqCst) - before) as u64;
        let stats = pool.stats();
        println!(
            "{what}: {} pages, held {} B, heap {heap_bytes} B, metadata a page {} B",
            stats.pages,
            stats.held_bytes,
            (heap_bytes - stats.payload_bytes) / stats.pages
        );
        assert!(
            stats.held_bytes >= heap_bytes,
            "{what}: the heap holds {heap_bytes} B: {stats:?}"
        );
        let metadata_bytes = heap_bytes - stats.payload_bytes;
        assert!(
            stats.metadata_bytes <= 4 * metadata_bytes,
            "{what}: far too much is told"
        );
        let charged_bytes = tenant.stats().charged_bytes;
        assert!(
            charged_bytes >= heap_bytes,
            "{what}: charged {charged_bytes} B only"
        );
        drop(tenant);
        while pool.maintain(Time(0), 64) {}
        assert_eq!(pool.stats().held_bytes, 0, "{what}");
        let left_bytes = LIVE_BYTES.load(SeqCst).saturating_sub(before);
        assert!(
            left_bytes < 64 << 10,
            "{what}: {left_bytes} B of heap stay behind"
        );
    }
    assert_eq!(
        SECRETS_FREED.load(SeqCst),
        0,
        "blocks were freed with a guest's bytes in them"
    );
    // The secret is found if it is there: a block of the same kind that nobody zeroed.
    drop(std::hint::black_box(Box::<[u8]>::from(&page(1)[..])));
    assert_eq!(SECRETS_FREED.load(SeqCst), 1);
}
