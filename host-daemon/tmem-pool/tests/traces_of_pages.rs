// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test that finds copies of page bytes that the engine leaves in the memory of its process, for
//! example in buffers of zstd.
//!
//! This must be the only test of its process, because it reads all memory of the process.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use tmem_pool::{Engine, Get, GetResult, PAGE_SIZE, Put, PutResult, SecretPages, Tenant, Time};

/// Inverted bits of the needle. The needle is a sequence of bytes that each page of the test
/// contains. The test searches for it in the memory of the process. zstd stores the needle
/// unchanged (as literals), because no five of its bytes in a row occur anywhere else in the pages.
/// The bits are inverted here so that the test's own memory does not contain the needle.
const NEEDLE_INVERTED: [u8; 16] = [
    !b'k', !b'b', !b'e', !b'h', !b'c', !b'l', !b'a', !b'i', !b'g', !b'd', !b'l', !b'f', !b'k',
    !b'a', !b'j', !b'c',
];

/// Number of hours by which the test advances the engine's clock. After this time, every page is
/// cold and was recompressed with zstd.
const HOURS: u64 = 24;

/// Number of pages that the test puts. Each contains the needle, the bytes for which the test
/// searches.
const PAGES: usize = 8;

/// Fills a page with words in random order, and with the needle, for which the test searches. lz4
/// finds repeated words. zstd also makes use of the small number of different letters.
fn fill(page: &mut [u8; PAGE_SIZE], seed: u64) {
    let mut state = seed;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let words: [[u8; 7]; 200] =
        std::array::from_fn(|_| std::array::from_fn(|_| b'a' + random(12) as u8));
    for chunk in page.chunks_mut(8) {
        let word = &words[random(200) as usize];
        chunk[..7].copy_from_slice(word);
        chunk[7] = b' ';
    }
    for (byte, inverted) in page[2003..].iter_mut().zip(NEEDLE_INVERTED) {
        *byte = !inverted;
    }
}

/// Returns the addresses at which the needle occurs in all memory that the process can write to.
fn found() -> Vec<u64> {
    let memory = File::open("/proc/self/mem").expect("cannot open a file of /proc/self");
    let maps =
        std::fs::read_to_string("/proc/self/maps").expect("cannot open a file of /proc/self");
    let pagemap = File::open("/proc/self/pagemap").expect("cannot open a file of /proc/self");
    // Read two pages at a time, so that a needle across a page boundary is found. Leave the memory
    // of this window out of the search.
    let mut window = SecretPages::new(2).expect("cannot allocate two pages");
    let own = window.pages().as_ptr() as u64;
    let mut found = Vec::new();
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (start, end) = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'))
            .expect("a line of /proc/self/maps does not begin with an address range");
        let address = |text| {
            u64::from_str_radix(text, 16).expect("an address in /proc/self/maps is not hexadecimal")
        };
        let (start, end) = (address(start), address(end));
        let bytes = window.pages().as_flattened_mut();
        bytes.fill(0);
        for page in (start..end)
            .step_by(PAGE_SIZE)
            .filter(|page| !(own..own + 2 * PAGE_SIZE as u64).contains(page))
        {
            bytes.copy_within(PAGE_SIZE.., 0);
            let mut entry = [0; 8];
            let present = pagemap
                .read_exact_at(&mut entry, page / PAGE_SIZE as u64 * 8)
                .is_ok();
            // Bit 63 of a word of /proc/self/pagemap means that the page is in memory
            // (Documentation/admin-guide/mm/pagemap.rst).
            if !present
                || u64::from_le_bytes(entry) >> 63 == 0
                || memory.read_exact_at(&mut bytes[PAGE_SIZE..], page).is_err()
            {
                bytes[PAGE_SIZE..].fill(0);
                continue;
            }
            let from = PAGE_SIZE - NEEDLE_INVERTED.len() + 1;
            for at in from..2 * PAGE_SIZE - NEEDLE_INVERTED.len() + 1 {
                let here = &bytes[at..at + NEEDLE_INVERTED.len()];
                if here
                    .iter()
                    .zip(NEEDLE_INVERTED)
                    .all(|(byte, inverted)| *byte == !inverted)
                {
                    found.push(page + at as u64 - PAGE_SIZE as u64);
                }
            }
        }
    }
    found
}

/// Puts the pages, and leaves no copy in the test's own memory.
fn put_all(tenant: &Tenant, object: u64, pages: &mut SecretPages) {
    for index in 0..PAGES {
        let [page, _] = pages.pages() else {
            unreachable!("the buffer does not have two pages")
        };
        fill(page, index as u64);
        let put = Put {
            object,
            index: index as u64,
            cookie: 1,
            workingset: false,
            page,
        };
        let mut results = [PutResult::Refused];
        tenant
            .put(1, &[put], &mut results)
            .expect("the tenant has no pool 1");
        assert_eq!(results, [PutResult::Stored]);
    }
    pages.wipe();
}

fn maintain(engine: &Engine) {
    for hour in 0..HOURS {
        while engine.maintain(Time(hour * 3_600_000_000_000), 64) {}
    }
}

#[test]
fn zstd_leaves_no_copies_of_page_bytes_in_memory() {
    let engine = common::engine(64 << 20);
    let tenant = common::tenant(&engine, "a");
    let mut pages = SecretPages::new(2).expect("cannot allocate two pages");
    put_all(&tenant, 1, &mut pages);
    assert_eq!(
        found().len(),
        PAGES,
        "the test does not find all raw pages in memory"
    );
    maintain(&engine);
    assert_eq!(
        engine.stats().recompressed_blobs,
        PAGES as u64,
        "background work did not recompress all cold pages"
    );
    assert_eq!(
        found(),
        [],
        "compression left copies of page bytes in memory"
    );
    // Put equal pages, which the engine compares with the stored ones.
    put_all(&tenant, 2, &mut pages);
    while engine.maintain(Time(HOURS * 3_600_000_000_000), 64) {}
    assert_eq!(
        tenant.stats().shared_pages,
        PAGES as u64,
        "the engine did not share all equal pages"
    );
    assert_eq!(
        found(),
        [],
        "comparison left copies of page bytes in memory"
    );
    for index in 0..PAGES {
        let [_, out] = pages.pages() else {
            unreachable!("the buffer does not have two pages")
        };
        let mut results = [GetResult::Miss];
        let spent = tenant.get(
            1,
            &Get::new(1, index as u64, &[1]),
            std::slice::from_mut(out),
            &mut results,
        );
        drop(spent.expect("the tenant has no pool 1"));
        assert_eq!(results, [GetResult::Hit { cookie: 1 }]);
        let [page, out] = pages.pages() else {
            unreachable!("the buffer does not have two pages")
        };
        fill(page, index as u64);
        assert!(page == out);
    }
    pages.wipe();
    assert_eq!(
        found(),
        [],
        "decompression left copies of page bytes in memory"
    );
}
