// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test that a pool that is shrunk returns memory to the system. The number of steps of background
//! work for this must be in proportion to the number of evicted pages.

mod common;

use std::fs;
use tmem_pool::{Engine, PAGE_SIZE, Page, Put, PutResult, Tenant, Time};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 24_000;
/// Budget of one call of maintain(), in pages. It is smaller than the budget that the daemon's
/// background workers use.
const BUDGET: usize = 64;

/// Returns a page that compresses to a random length of 100 B or more, or does not compress.
fn page(nth: u64) -> Page {
    let mut page = [nth as u8; PAGE_SIZE];
    let mut x = nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let noise = 100 + (x >> 33) as usize % PAGE_SIZE;
    for byte in page.iter_mut().take(noise) {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        *byte = (x >> 56) as u8;
    }
    page
}

fn fill(engine: &Engine, tenant: &Tenant) {
    for nth in 0..PAGES {
        let page = page(nth);
        let put = Put {
            object: nth % 100,
            index: nth,
            cookie: 1,
            workingset: nth % 3 == 0,
            page: &page,
        };
        let mut results = [PutResult::Refused];
        tenant.put(1, &[put], &mut results).unwrap();
        assert_eq!(results, [PutResult::Stored]);
        if nth % 64 == 0 {
            while engine.maintain(Time(0), BUDGET) {}
        }
    }
    while engine.maintain(Time(0), BUDGET) {}
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * PAGE_SIZE as u64
}

#[test]
fn shrinking_returns_memory_to_the_host_in_bounded_work() {
    let engine = common::engine(96 * MIB);
    let tenant = common::tenant(&engine, "a");
    fill(&engine, &tenant);
    for part in [3, 5, 10, 40] {
        let before = engine.stats();
        let resident_before = resident_bytes();
        let size_bytes = before.held_bytes / part * (part - 1);
        engine.resize(size_bytes);
        let mut calls = 0;
        while engine.stats().held_bytes > size_bytes {
            calls += 1;
            engine.maintain(Time(0), BUDGET);
            assert!(
                calls < 10_000,
                "the pool still holds more than {size_bytes} B after {calls} calls of maintain()"
            );
        }
        let after = engine.stats();
        let evicted = after.evictions - before.evictions;
        let resident_gone = resident_before.saturating_sub(resident_bytes());
        let gone = before.held_bytes - after.held_bytes;
        let steps = calls * BUDGET as u64;
        println!(
            "1/{part}: {gone} B less held, {resident_gone} B less resident; {evicted} pages evicted of {}, \
             {steps} steps",
            before.pages
        );
        // The share of the pages that was evicted must be about the share by which the pool was
        // shrunk.
        assert!(
            evicted <= before.pages * 3 / 2 / part + 512,
            "{evicted} of {} pages were evicted to shrink the pool by 1/{part}",
            before.pages
        );
        // Evicting a page takes one step. Moving a stored page, so that memory can be released,
        // takes another step.
        assert!(
            steps <= 3 * evicted + 1024,
            "evicting {evicted} pages took {steps} steps, more than three for each page"
        );
        assert!(
            resident_gone + 2 * MIB >= gone,
            "the pool holds {gone} B less, but the process's resident memory fell by only \
             {resident_gone} B"
        );
    }
}
