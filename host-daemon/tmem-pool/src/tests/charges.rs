// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that a tenant's charge covers the memory that its pages take.

use super::{OPEN, POOL, add, finalize_raw, maintain_all, new_engine, put_raw};
use crate::{PAGE_SIZE, PutResult, Tenant};

/// Stores 8,000 distinct pages that compress to about 40 B, with `fill`. Asserts that they are
/// charged at least as much memory as they take. `shape` names the case in messages.
fn charge_covers(shape: &str, fill: impl Fn(&Tenant, &dyn Fn(u64, u64))) {
    const SIZE: u64 = 64 << 20;
    let engine = new_engine(SIZE);
    let tenant = add(&engine, "a", None, OPEN);
    // Do not count the memory of an engine and a tenant without pages.
    let memory = || engine.store.heap.busy_bytes() + engine.stats().metadata_bytes;
    let before = memory();
    fill(&tenant, &|object, index| {
        let mut page = [0; PAGE_SIZE];
        page[8..16].copy_from_slice(&(object << 32 | index | 1 << 63).to_le_bytes());
        let result = put_raw(&tenant, object, index, 1, &page);
        assert_eq!(result, PutResult::Stored);
        if index.is_multiple_of(64) || object.is_multiple_of(64) {
            finalize_raw(&tenant);
        }
    });
    maintain_all(&engine);
    let stats = tenant.stats();
    let taken = memory() - before;
    println!(
        "{shape}: {} pages take {taken} B and are charged {} B",
        stats.pages, stats.charged_bytes
    );
    assert_eq!(stats.pages, 8_000);
    // Records come in chunks of 32 KiB, and a page has few bytes of some of these kinds of records.
    const CHUNKS_BYTES: u64 = 6 * (32 << 10);
    assert!(
        taken <= stats.charged_bytes + CHUNKS_BYTES,
        "{shape}: {} pages take {taken} B, but are charged only {} B",
        stats.pages,
        stats.charged_bytes
    );
}

#[test]
fn the_charge_covers_objects_of_one_page_that_compresses_to_almost_nothing() {
    charge_covers("one page in each object", |_, put| {
        (1..=8_000).for_each(|object| put(object, 0));
    });
}

#[test]
fn the_charge_covers_a_lone_page_of_a_leaf_that_compresses_to_almost_nothing() {
    charge_covers("one page left in each leaf", |tenant, put| {
        for leaf in 0..8_000 {
            // Put each bit of the number into four bits of its own. Then each node has two
            // children, so that each leaf needs a node, too.
            let spread = (0..13).map(|bit| (leaf >> bit & 1) << (4 * (bit + 1)));
            let index: u64 = spread.sum();
            put(1, index);
            put(1, index + 1);
            tenant
                .flush(POOL, 1, index + 1, Some(1))
                .expect("the tenant does not have the pool");
        }
    });
}
