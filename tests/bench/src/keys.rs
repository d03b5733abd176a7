// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times, pauses and memory of a pool with very many keys, as all VMs of a large host have them
//! together. Fifteen of 16 pages are same-filled, and the others are equal to one of a few thousand
//! pages, so that the pool needs memory for the keys only.
//!
//! A key is a block of a disk, as the guest driver uses it: the object is a part of 1 GiB of the
//! disk, and a batch has 64 adjacent blocks. Batches come in an order that looks random, so that all
//! objects grow at the same time.

use crate::measure::{cpu_ns, quantile};
use crate::rig::{BATCH, Guest, NOW, RAW_PAGES, Rig, guest};
use serde_json::{Value, json};
use std::time::Instant;
use tmem_pool::{KEYS_PER_TENANT_MAX, PAGE_SIZE, Page};

/// Bytes of the pool for each key. They are more than the metadata of a key, so that the pool evicts
/// no page.
const KEY_BYTES: u64 = 80;

/// Number of blocks of an object: 1 GiB.
const OBJECT_BLOCKS: u64 = (1 << 30) / PAGE_SIZE as u64;

/// Number of different pages that are not same-filled. Each has fewer copies than a stored page may
/// have references.
const CONTENTS: u64 = 4096;

/// Prime number by which the number of a batch is multiplied, so that batches come in an order that
/// looks random.
const STRIDE: u64 = 2_654_435_761;

/// Largest number of batches that are got and put again after each part of the keys.
const GETS: u64 = 20_000;

/// Number of pages after which the benchmark does background work.
const MAINTAIN_EVERY: u64 = RAW_PAGES as u64 / 2;

/// Processor times of equal calls.
#[derive(Default)]
struct Calls(Vec<f64>);

impl Calls {
    fn time<R>(&mut self, call: impl FnOnce() -> R) -> R {
        let since = cpu_ns();
        let result = call();
        self.0.push((cpu_ns() - since) / 1e3);
        result
    }

    /// Returns the median, the quantile of 99.99 % and the maximum, in µs.
    fn figures_us(&mut self) -> [f64; 3] {
        [0.5, 0.9999, 1.0].map(|part| quantile(&mut self.0, part))
    }
}

/// Figures of a pool while it grew to a number of keys.
pub struct Row {
    keys: u64,
    /// Elapsed time, including background work.
    seconds: f64,
    /// Name of each operation, with its median, the quantile of 99.99 % and the longest call in µs.
    calls: Vec<(&'static str, [f64; 3])>,
    metadata_bytes_per_key: f64,
}

/// A tenant whose keys are the blocks of a disk.
struct Disk {
    guest: Guest,
    batches: u64,
}

impl Disk {
    /// Returns object and page number of the first page of the `nth` batch.
    fn place(&self, nth: u64) -> (u64, u64) {
        let block = nth * STRIDE % self.batches * BATCH as u64;
        (block / OBJECT_BLOCKS, block % OBJECT_BLOCKS)
    }

    fn put(&self, nth: u64, contents: &[Page], calls: &mut Calls) {
        let (object, first) = self.place(nth);
        let (blank, seed) = ([nth as u8; PAGE_SIZE], nth * BATCH as u64 / 16);
        let page = |index: u64| match nth % 16 {
            0 => &contents[((seed + index) % CONTENTS) as usize],
            _ => &blank,
        };
        let keys = (0..BATCH as u64).map(|index| ((object, first + index), page(index)));
        let stored = calls.time(|| self.guest.put_keys(keys));
        assert_eq!(stored, BATCH, "the engine refused a page");
    }
}

/// Returns a page that lz4 compresses, and that no other number gives.
fn content(nr: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut rng = fastrand::Rng::with_seed(nr);
    for word in page.chunks_mut(16) {
        word[..8].copy_from_slice(&rng.u64(..).to_le_bytes());
    }
    page
}

fn maintain(rig: &Rig, calls: &mut Calls) {
    while calls.time(|| rig.engine.maintain(NOW, BATCH)) {}
}

/// Fills a pool with `keys` keys, and measures after a hundredth of them, a tenth, and all.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn run(keys: u64, progress: impl Fn(&str)) -> Result<Vec<Row>, String> {
    let rig = Rig::new(keys * KEY_BYTES + (1 << 30))?;
    let tenants = keys.div_ceil(KEYS_PER_TENANT_MAX.into());
    let batches = keys / tenants / BATCH as u64;
    let disk = |nth| {
        let guest = guest(&rig.engine, &format!("disk-{nth}"))?;
        Ok::<_, String>(Disk { guest, batches })
    };
    let disks = (0..tenants).map(disk).collect::<Result<Vec<_>, _>>()?;
    let contents: Vec<Page> = (0..CONTENTS).map(content).collect();
    let (mut rows, mut next, since) = (Vec::new(), 0, Instant::now());
    for part in [100, 10, 1] {
        let (mut put, mut background, mut get) = Default::default();
        let end = batches / part;
        for nth in next..end {
            for disk in &disks {
                disk.put(nth, &contents, &mut put);
            }
            if (nth * BATCH as u64).is_multiple_of(MAINTAIN_EVERY) {
                progress(&format!("{} of {keys} keys", nth * tenants * BATCH as u64));
                maintain(&rig, &mut background);
            }
        }
        maintain(&rig, &mut background);
        let stats = rig.engine.stats();
        let seconds = since.elapsed().as_secs_f64();
        measure_gets(&rig, &disks, end, &contents, &mut get);
        let mut calls = vec![
            ("put of 64 pages", put.figures_us()),
            ("background work for 64 pages", background.figures_us()),
            ("get of 64 pages", get.figures_us()),
        ];
        if part == 1 {
            calls.extend(measure_departures(&rig, &disks));
        }
        rows.push(Row {
            keys: stats.pages,
            seconds,
            calls,
            metadata_bytes_per_key: stats.metadata_bytes as f64 / stats.pages as f64,
        });
        assert_eq!(stats.evictions, 0, "the pool evicted pages");
        next = end;
    }
    Ok(rows)
}

/// Gets some batches of the first `batches` batches of each disk, and puts them again.
fn measure_gets(rig: &Rig, disks: &[Disk], batches: u64, contents: &[Page], get: &mut Calls) {
    let mut out = vec![[0; PAGE_SIZE]; BATCH];
    for nth in (0..batches).step_by(batches.div_ceil(GETS).max(1) as usize) {
        for disk in disks {
            let (object, first) = disk.place(nth);
            get.time(|| drop(disk.guest.get(object, first as usize, &mut out)));
            disk.put(nth, contents, &mut Calls::default());
        }
        if nth % 8 == 0 {
            rig.maintain_all();
        }
    }
    rig.maintain_all();
}

/// Drops all pages of each disk, object by object, and frees them.
fn measure_departures(rig: &Rig, disks: &[Disk]) -> [(&'static str, [f64; 3]); 2] {
    let (mut flush, mut free) = (Calls::default(), Calls::default());
    for disk in disks {
        for object in 0..=disk.batches * BATCH as u64 / OBJECT_BLOCKS {
            flush.time(|| disk.guest.flush(object, 0, None));
        }
    }
    maintain(rig, &mut free);
    assert_eq!(rig.engine.stats().detached_pages, 0);
    [
        ("drop of an object of 262,144 pages", flush.figures_us()),
        ("background work that frees 64 pages", free.figures_us()),
    ]
}

pub fn print(rows: &[Row]) {
    for row in rows {
        println!(
            "\n{} keys after {:.0} s: {:.1} B of metadata for each key\n{:36} {:>9} {:>9} {:>9}",
            row.keys,
            row.seconds,
            row.metadata_bytes_per_key,
            "processor time in µs",
            "median",
            "99.99 %",
            "longest"
        );
        for (what, [median, rare, longest]) in &row.calls {
            println!("{what:36} {median:9.1} {rare:9.1} {longest:9.1}");
        }
    }
}

pub fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "keys": row.keys,
            "seconds": row.seconds,
            "metadata_bytes_per_key": row.metadata_bytes_per_key,
            "us_median_9999_longest": row.calls.iter().map(|(what, us)| json!([what, us])).collect::<Vec<_>>(),
        })
    };
    rows.iter().map(row).collect()
}
