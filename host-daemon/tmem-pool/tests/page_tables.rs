// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test that the kernel's page tables for the pool's memory stay small. The engine does not count
//! this memory, because no kernel interface reports it for a part of a process.
//!
//! This must be the only test of its process, because it reads the page tables of the process.

mod common;

use tmem_pool::{PAGE_SIZE, Page, Time};

/// Returns the memory of the process's page tables in bytes.
fn page_table_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib << 10
}

/// Returns a page that does not compress.
fn noise(seed: u64) -> Page {
    let mut x = seed + 1;
    std::array::from_fn(|_| {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    })
}

#[test]
fn page_tables_take_few_bytes_for_each_page() {
    const PAGES: u64 = 16_384;
    // A page has a frame of 4,096 B, whose entry in the page table takes 8 B. The pool's records
    // take about 60 B for each page, so their entries take less than 1 B. 200 KiB are for partly
    // used page tables: those of the spans of each length, and of each table.
    const BYTES_MAX: u64 = PAGES * 9 + (200 << 10);
    let engine = common::engine(256 << 20);
    let tenant = common::tenant(&engine, "a");
    let before = page_table_bytes();
    for nth in 0..PAGES {
        common::store(&tenant, 1, nth, &noise(nth));
        if nth % 64 == 63 {
            while engine.maintain(Time(0), 64) {}
        }
    }
    let stats = engine.stats();
    assert_eq!(stats.payload_bytes, PAGES * PAGE_SIZE as u64);
    let bytes = page_table_bytes() - before;
    println!("page tables take {bytes} B for {PAGES} pages that do not compress");
    assert!(
        bytes <= BYTES_MAX,
        "page tables take {bytes} B for {PAGES} pages, more than {BYTES_MAX} B"
    );
}
