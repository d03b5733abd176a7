// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Longest put while the tables of a tenant grow. The tenant gets millions of objects of one page,
//! as a guest with many small files would have them. All pages are same-filled, so the pool needs
//! memory for the tables only.

use crate::measure::cpu_ns;
use crate::rig::{RAW_PAGES, Rig};
use tmem_pool::PAGE_SIZE;

/// Number of pages in a put.
const BATCH: u64 = 16;

/// Bytes of metadata for each object, rounded up.
const METADATA_BYTES: u64 = 512;

/// Number of times that each put is measured, each time in another pool with the same requests. The
/// shortest time counts, because the system interrupts one put in a few thousand.
const REPEATS: usize = 3;

/// Puts `objects` objects of one page. Returns the longest processor time of a put of 16 objects, in
/// µs.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn longest_put_us(objects: u64) -> Result<f64, String> {
    let page = [7; PAGE_SIZE];
    let mut times_ns = vec![f64::MAX; (objects / BATCH) as usize];
    for _ in 0..REPEATS {
        let rig = Rig::new(objects * METADATA_BYTES + (64 << 20))?;
        for (first, shortest_ns) in (0..).step_by(BATCH as usize).zip(&mut times_ns) {
            let keys = (first..first + BATCH).map(|object| ((object, 0), &page));
            let since = cpu_ns();
            let stored = rig.tenant.put_keys(keys);
            *shortest_ns = shortest_ns.min(cpu_ns() - since);
            assert_eq!(stored as u64, BATCH, "the engine refused a page");
            if (first + BATCH).is_multiple_of(RAW_PAGES as u64 / 2) {
                rig.maintain_all();
            }
        }
    }
    Ok(times_ns.into_iter().fold(0.0, f64::max) / 1e3)
}
