// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test that the engine reports as much memory as it takes from the system, and that freed memory
//! contains no bytes of pages.
//!
//! This must be the only test of its process, because it reads all memory of the process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tmem_pool::{ADDRESS_SPACE_TIMES, Engine, PAGE_SIZE, Page, Tenant, Time};

/// Allocator that counts the bytes of live allocations.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes that each page of the test contains. They do not compress, so the test finds them
/// unchanged in stored pages.
const SECRET: [u8; 16] = *b"\x91o\x07TheGuest'sKey";

/// Returns the bytes that an allocator takes for a block. It takes the block and 8 bytes before it,
/// rounded up to a multiple of 16 bytes, but at least 32 bytes.
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
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Returns the start, the end and the resident bytes of each memory region of the engine. The
/// engine's regions are the mappings that are excluded from core dumps.
fn regions() -> Vec<(u64, u64, u64)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut regions, mut now) = (Vec::new(), (0, 0, 0));
    for line in smaps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((start, end)) = first.split_once('-') {
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            now = (address(start), address(end), 0);
        } else if first == "Rss:" {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap();
            now.2 = kib << 10;
        } else if first == "VmFlags:" && rest.split(' ').any(|flag| flag == "dd") {
            regions.push(now);
        }
    }
    regions
}

fn resident_bytes() -> u64 {
    regions().iter().map(|(_, _, resident)| resident).sum()
}

fn reserved_bytes() -> u64 {
    regions().iter().map(|(start, end, _)| end - start).sum()
}

/// Returns how often the bytes of SECRET occur in the engine's memory regions.
fn secrets() -> usize {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let memory = File::open("/proc/self/mem").unwrap();
    let (mut page, mut found) = ([0; PAGE_SIZE], 0);
    for (start, end, _) in regions() {
        let mut map = vec![0; ((end - start) / PAGE_SIZE as u64 * 8) as usize];
        pagemap
            .read_exact_at(&mut map, start / PAGE_SIZE as u64 * 8)
            .unwrap();
        for (nth, word) in map.as_chunks::<8>().0.iter().enumerate() {
            // Bit 63 of a word of /proc/self/pagemap means that the page is in memory
            // (Documentation/admin-guide/mm/pagemap.rst).
            if u64::from_le_bytes(*word) >> 63 == 1 {
                memory
                    .read_exact_at(&mut page, start + (nth * PAGE_SIZE) as u64)
                    .unwrap();
                found += page
                    .windows(SECRET.len())
                    .filter(|window| *window == SECRET)
                    .count();
            }
        }
    }
    found
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Returns a compressible page that contains SECRET. Pages with different `nth` differ.
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

fn fill(
    (engine, tenant): (&Engine, &Tenant),
    pages: u64,
    object: impl Fn(u64) -> u64,
    page: impl Fn(u64) -> Page,
) {
    for nth in 0..pages {
        if nth % 64 == 0 {
            while engine.maintain(Time(0), 64) {}
        }
        common::store(tenant, object(nth), nth, &page(nth));
    }
    while engine.maintain(Time(0), 64) {}
}

#[test]
fn held_memory_is_reported_and_freed_memory_is_zeroed() {
    const PAGES: u64 = 4_000;
    const POOL_BYTES: u64 = 256 << 20;
    let before = reserved_bytes();
    let engine = common::engine(POOL_BYTES);
    let reserved = reserved_bytes() - before;
    assert!(
        reserved <= ADDRESS_SPACE_TIMES * POOL_BYTES
            && reserved > (ADDRESS_SPACE_TIMES - 1) * POOL_BYTES,
        "the engine reserved {reserved} B of address space, not {ADDRESS_SPACE_TIMES} times the pool's size"
    );
    // Find the engine's memory regions: the heap with its spans and handles, the table of equal
    // pages, the memory of indexes, and scratch pages.
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let flags = smaps.lines().filter_map(|l| l.strip_prefix("VmFlags:"));
    let flags: Vec<Vec<&str>> = flags
        .map(|flags| flags.split_whitespace().collect())
        .collect();
    // The kernel's mapping for its clock is also excluded from core dumps, but is not a region of
    // the engine. The flag "io" identifies it.
    let ours = |flags: &&Vec<&str>| flags.contains(&"dd") && !flags.contains(&"io");
    let regions = flags.iter().filter(ours);
    let (locked, swapped): (Vec<_>, Vec<_>) = regions.partition(|flags| flags.contains(&"lo"));
    println!(
        "{} memory regions of the engine are locked, {} are not",
        locked.len(),
        swapped.len()
    );
    assert!(!locked.is_empty() || !swapped.is_empty());
    assert_eq!(
        engine.is_locked(),
        swapped.is_empty(),
        "is_locked() disagrees with the mappings' flags {flags:?}"
    );
    let small_file = |nth: u64| nth / 5;
    let one_page = |nth: u64| nth;
    let large_file = |_| 1;
    let same = |nth: u64| [nth as u8; PAGE_SIZE];
    type Fill<'a> = &'a dyn Fn(&Tenant);
    let shapes: [(&str, Fill<'_>); 6] = [
        ("one-page objects", &|tenant| {
            fill((&engine, tenant), PAGES, one_page, page)
        }),
        ("five-page objects", &|tenant| {
            fill((&engine, tenant), PAGES, small_file, page)
        }),
        ("one large object", &|tenant| {
            fill((&engine, tenant), PAGES, large_file, page)
        }),
        ("same-filled, one-page objects", &|tenant| {
            fill((&engine, tenant), PAGES, one_page, same)
        }),
        ("same-filled, one large object", &|tenant| {
            fill((&engine, tenant), PAGES, large_file, same)
        }),
        ("a large object with holes", &|tenant| {
            fill((&engine, tenant), PAGES, large_file, page);
            for index in (0..PAGES).filter(|index| index % 3 != 0) {
                tenant.flush(1, 1, index, Some(1)).unwrap();
            }
        }),
    ];
    let mut before_bytes = 0;
    for (what, fill) in shapes {
        let live_before = LIVE_BYTES.load(SeqCst);
        let tenant = common::tenant(&engine, "a");
        fill(&tenant);
        let live_bytes = (LIVE_BYTES.load(SeqCst) - live_before) as u64;
        let held_bytes = live_bytes + resident_bytes();
        let stats = engine.stats();
        let metadata_bytes = held_bytes - stats.frames_bytes;
        println!(
            "{what}: {} pages, {} B of payload in {} B of frames; metadata of each page: \
             {} B measured, {} B reported",
            stats.pages,
            stats.payload_bytes,
            stats.frames_bytes,
            metadata_bytes / stats.pages,
            stats.metadata_bytes / stats.pages
        );
        // The tolerance of 64 KiB allows for the unused rest of each table's last page and for the
        // allocator's overhead, which the statistics do not count.
        assert!(
            stats.held_bytes + (64 << 10) >= held_bytes,
            "{what}: the engine reports less than the {held_bytes} B that it holds: {stats:?}"
        );
        assert!(
            stats.metadata_bytes <= 2 * metadata_bytes,
            "{what}: the engine reports {} B of metadata but holds {metadata_bytes} B",
            stats.metadata_bytes
        );
        let charged_bytes = tenant.stats().charged_bytes;
        assert!(
            charged_bytes >= stats.payload_bytes + live_bytes,
            "{what}: the tenant is charged {charged_bytes} B, less than its pages take"
        );
        let found = secrets() as u64;
        println!("{found} secrets in {} blobs", stats.blobs);
        assert!(
            found >= stats.blobs * 9 / 10,
            "{what}: the test finds its marker SECRET only {found} times in {} blobs",
            stats.blobs
        );
        drop(tenant);
        while engine.maintain(Time(0), 64) {}
        let stats = engine.stats();
        assert_eq!(
            (stats.payload_bytes, stats.blobs),
            (0, 0),
            "{what}: blobs are left after the tenant departed"
        );
        assert_eq!(
            secrets(),
            0,
            "{what}: freed memory contains bytes of a guest's page"
        );
        let left_bytes = LIVE_BYTES.load(SeqCst).saturating_sub(live_before);
        assert!(
            left_bytes < 64 << 10,
            "{what}: {left_bytes} B from the allocator are left after the tenant departed"
        );
        before_bytes = stats.held_bytes.max(before_bytes);
    }
    // An empty engine must hold only its tables, which never shrink, and unused frames that are
    // kept for new pages.
    assert!(
        before_bytes < 20 << 20,
        "an empty engine holds {before_bytes} B, 20 MiB or more"
    );
}
