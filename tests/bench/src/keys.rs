// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times, pauses and memory of a pool with 10^5 to 10^8 keys. All pages are same-filled, so the pool
//! needs memory for keys only. Times are processor times of one thread. As a tenant can have 2^26
//! keys, 10^8 keys belong to two tenants.

use crate::measure::cpu_ns;
use crate::report::progress;
use crate::rig::{BATCH, Guest, NOW, RAW_PAGES, Rig, add_guest};
use tmem_pool::{KEYS_PER_TENANT_MAX, PAGE_SIZE};

/// Pages of an object.
const OBJECT_PAGES: u64 = 1 << 16;
/// Upper bound of the memory for a key, in bytes.
const KEY_BYTES: u64 = 96;
/// Number of pages of a step of background work.
const STEP: usize = 8;
/// Number of gets of single pages, at random places.
const GETS: u64 = 100_000;
/// Odd and no multiple of 5, so that multiplication permutes the numbers below a power of ten.
const SPREAD: u64 = 2_654_435_761;

/// Options of the benchmark of many keys.
#[derive(clap::Args)]
pub struct Args {
    /// Largest power of ten: a pool gets 10^5 keys, then 10 times as many, up to this power. 10^8
    /// keys take 4 GiB of memory.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(5..=8))]
    power: u32,
}

/// Processor times of calls in ns, each of which handles several pages.
#[derive(Default)]
struct Calls {
    sum_ns: f64,
    longest_ns: f64,
}

impl Calls {
    fn time<R>(&mut self, what: impl FnOnce() -> R) -> R {
        let since = cpu_ns();
        let result = what();
        let took_ns = cpu_ns() - since;
        self.sum_ns += took_ns;
        self.longest_ns = self.longest_ns.max(took_ns);
        result
    }

    /// Returns "time for each page in ns; longest call in µs".
    fn cell(&self, pages: u64) -> String {
        let each_ns = self.sum_ns / pages as f64;
        format!("{each_ns:.0}; {:.0}", self.longest_ns / 1e3)
    }
}

/// Runs the benchmark and prints a table.
///
/// # Errors
/// The system does not provide the address space for a pool.
pub fn run(args: &Args) -> Result<(), String> {
    println!("Time for each page in ns; longest call in µs (put: 64 pages, background: 8 pages).");
    println!("| keys | bytes for each key | put | background | get | drop an object | free |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for power in 5..=args.power {
        progress(&format!("10^{power} keys"));
        println!("{}", row(10u64.pow(power))?);
    }
    Ok(())
}

fn row(keys: u64) -> Result<String, String> {
    let rig = Rig::new(keys * KEY_BYTES + (256 << 20))?;
    let more = (1..keys.div_ceil(KEYS_PER_TENANT_MAX.into()))
        .map(|nth| add_guest(&rig.engine, &format!("bench-more-{nth}")))
        .collect::<Result<Vec<_>, _>>()?;
    let guests: Vec<&Guest> = more.iter().chain([&rig.tenant]).collect();
    let guest_of = |key: u64| guests[(key / OBJECT_PAGES) as usize % guests.len()];
    let page = [7; PAGE_SIZE];
    let [mut put, mut background, mut get, mut dropped, mut free] =
        std::array::from_fn(|_| Calls::default());
    let place = |key: u64| (key / OBJECT_PAGES, key % OBJECT_PAGES);
    for first in (0..keys).step_by(BATCH) {
        let end = keys.min(first + BATCH as u64);
        let pages = (first..end).map(|key| (place(key), &page));
        let stored = put.time(|| guest_of(first).put_keys(pages));
        assert_eq!(stored as u64, end - first, "the engine refused a page");
        if end == keys || end.is_multiple_of(RAW_PAGES as u64 / 2) {
            while background.time(|| rig.engine.maintain(NOW, STEP)) {}
        }
    }
    let stats = rig.engine.stats();
    assert_eq!(stats.pages, keys, "the pool has evicted pages");
    let mut out = [page];
    for nth in 0..GETS.min(keys / 2) {
        let key = nth * SPREAD % keys;
        let (object, index) = place(key);
        get.time(|| drop(guest_of(key).get(object, index as usize, &mut out)));
    }
    let before = rig.engine.stats().pages;
    dropped.time(|| guest_of(0).flush(0, 0, None));
    let pages = before - rig.engine.stats().pages;
    while free.time(|| rig.engine.maintain(NOW, STEP)) {}
    Ok(format!(
        "| {keys} | {:.1} | {} | {} | {} | {} | {} |",
        stats.metadata_bytes as f64 / keys as f64,
        put.cell(keys),
        background.cell(keys),
        get.cell(GETS.min(keys / 2)),
        dropped.cell(pages),
        free.cell(pages),
    ))
}
