// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of the time per page of bare library calls, zram and the engine, measured alternately.
//!
//! The pool always has all pages of the corpus, except while a round replaces some of them. Each
//! round gets random batches, puts them again and finalizes them. Each page exists twice in memory,
//! once for the engine and once for the baselines. Otherwise the engine could find a page in the
//! processor's caches because a baseline has read it, or vice versa.

use crate::bare;
use crate::measure::{Samples, cpu_ns};
use crate::rig::{BATCH, LATER_NS, RAW_PAGES, Rig};
use crate::zram::Zram;
use std::hint::black_box;
use tmem_pool::{PAGE_SIZE, Page, PageHash, Time};

/// Number of batches that a round puts. Together these batches have half as many pages as a tenant
/// may have raw pages, so that the engine refuses no page.
const BATCHES: usize = RAW_PAGES / BATCH / 2;
const PAGES: usize = BATCHES * BATCH;

/// Smallest number of pages in the corpus. A round uses three random parts of the corpus, and most
/// of the corpus must be out of the processor's caches.
pub const PAGES_MIN: usize = 8 * PAGES;

/// Reciprocal of the share of batches that zram gets in a round. The share is small, because the
/// benchmark compares only medians with zram.
const ZRAM_DIVISOR: usize = 4;

/// A test page that lz4 compresses: two copies of it, its compressed form and its hash.
pub struct Sized {
    pub page: Box<Page>,
    twin: Box<Page>,
    lz4: Box<[u8]>,
    hash: u128,
}

/// Times of all operations in nanoseconds per page.
#[derive(Default)]
pub struct Times {
    pub copy: Samples,
    pub copy_hash: Samples,
    pub hash_compress: Samples,
    pub decompress: Samples,
    pub put_ack: Samples,
    pub put_full: Samples,
    pub get: Samples,
    pub free: Samples,
    pub get_freed: Samples,
    pub get_raw: Samples,
    pub zram_write: Samples,
    pub zram_read: Samples,
    pub put_growing: Samples,
    pub recompress: Samples,
}

/// Returns the pages of a corpus that lz4 shrinks, as a whole number of batches.
pub fn compressible_pages(pages: &[Box<Page>], hash: &PageHash) -> Vec<Sized> {
    let mut buffer = [0; PAGE_SIZE];
    let sized = pages.iter().filter_map(|page| {
        let lz4 = bare::compress(page, &mut buffer)?.into();
        Some(Sized {
            twin: page.clone(),
            hash: hash.of(page),
            page: page.clone(),
            lz4,
        })
    });
    let mut sized: Vec<Sized> = sized.collect();
    sized.truncate(sized.len() / BATCH * BATCH);
    sized
}

/// Returns batch number `nr` of the corpus.
fn batch(pages: &[Sized], nr: usize) -> &[Sized] {
    &pages[nr * BATCH..(nr + 1) * BATCH]
}

/// Creates a pool, puts all pages, and measures these puts. The pool grows during them.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn fill(times: &mut Times, pages: &[Sized]) -> Result<Rig, String> {
    let rig = Rig::new(2 * (pages.len() * PAGE_SIZE) as u64 + (64 << 20))?;
    for (nth, part) in pages.chunks(PAGES).enumerate() {
        times.put_growing.time(part.len(), || {
            for (at, batch) in part.chunks(BATCH).enumerate() {
                let pages = batch.iter().map(|sized| &*sized.page);
                rig.tenant.put(1, nth * PAGES + at * BATCH, pages);
            }
            rig.maintain_all();
        });
    }
    Ok(rig)
}

/// Runs all rounds of the measurement.
///
/// # Errors
/// The zram device fails.
pub fn run(
    rounds: usize,
    seed: u64,
    rig: &Rig,
    pages: &[Sized],
    mut zram: Option<&mut Zram>,
    times: &mut Times,
    progress: impl Fn(&str),
) -> Result<(), String> {
    let hash = PageHash::new(42);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut order: Vec<usize> = (0..pages.len() / BATCH).collect();
    // Let all gets of a round return their pages into these buffers. Like a guest, the benchmark
    // reads into pages that it has just used.
    let mut copies = vec![[0; PAGE_SIZE]; PAGES];
    if let Some(zram) = &mut zram {
        progress("filling zram");
        for (at, sized) in pages.iter().enumerate() {
            zram.write(at, &sized.twin)?;
        }
    }
    for round in 0..rounds {
        progress(&format!("round {} of {rounds}", round + 1));
        rng.shuffle(&mut order);
        let mut parts = order.chunks_exact(BATCHES);
        let [ours, raw, compressed] = std::array::from_fn(|_| {
            parts
                .next()
                .expect("the corpus has too few pages for a round")
        });
        // Change the order in each round, because the first operation of a round finds the caches
        // that the last round filled.
        if round % 2 == 0 {
            measure_bare(times, &hash, pages, ours, compressed, &mut copies);
            measure_engine(times, rig, &hash, pages, ours, raw, &mut copies);
        } else {
            measure_engine(times, rig, &hash, pages, ours, raw, &mut copies);
            measure_bare(times, &hash, pages, ours, compressed, &mut copies);
        }
        if let Some(zram) = &mut zram {
            let some = &ours[..BATCHES / ZRAM_DIVISOR];
            measure_zram(times, zram, pages, some)?;
        }
    }
    Ok(())
}

/// Measures the library calls that the engine cannot avoid, without the engine. Each operation
/// makes its own pass over its pages. The compression reads other pages (`compressed`) than the
/// copies (`batches`): the pages of a pass fit into the L3 cache, so the compression would find
/// pages there that a copy has read. The engine's puts read each page only once.
fn measure_bare(
    times: &mut Times,
    hash: &PageHash,
    pages: &[Sized],
    batches: &[usize],
    compressed: &[usize],
    copies: &mut [Page],
) {
    let all = || batches.iter().flat_map(|&nr| batch(pages, nr));
    let mut out = [0; PAGE_SIZE];
    times.copy_hash.time(PAGES, || {
        for (sized, copy) in all().zip(&mut *copies) {
            copy.copy_from_slice(&*sized.twin);
            black_box(hash.of(copy));
        }
    });
    times.decompress.time(PAGES, || {
        for (sized, copy) in all().zip(&mut *copies) {
            bare::decompress(&sized.lz4, copy);
        }
    });
    times.hash_compress.time(PAGES, || {
        for sized in compressed.iter().flat_map(|&nr| batch(pages, nr)) {
            black_box(hash.of(&sized.twin));
            black_box(bare::compress(&sized.twin, &mut out).map(<[u8]>::len));
        }
    });
    times.copy.time(PAGES, || {
        for (sized, copy) in all().zip(&mut *copies) {
            copy.copy_from_slice(&*sized.twin);
        }
    });
}

/// Gets, puts and finalizes the pages of `batches`. Then puts the pages of the batches `raw` and
/// gets them while they are still raw (uncompressed).
fn measure_engine(
    times: &mut Times,
    rig: &Rig,
    hash: &PageHash,
    pages: &[Sized],
    batches: &[usize],
    raw: &[usize],
    copies: &mut [Page],
) {
    let (mut get_ns, mut free_ns) = (0.0, 0.0);
    for (&nr, out) in batches.iter().zip(copies.chunks_exact_mut(BATCH)) {
        let since = cpu_ns();
        let spent = rig.tenant.get(1, nr * BATCH, out);
        let got = cpu_ns();
        drop(spent);
        get_ns += got - since;
        free_ns += cpu_ns() - got;
        // Compare hashes, so that the original pages stay out of the caches.
        let right = batch(pages, nr).iter().zip(&*out);
        for (sized, out) in right {
            assert!(
                hash.of(out) == sized.hash,
                "a get returned wrong bytes for a page"
            );
        }
    }
    times.get.push(get_ns / PAGES as f64);
    times.free.push(free_ns / PAGES as f64);
    times.get_freed.push((get_ns + free_ns) / PAGES as f64);
    times.put_ack.time(PAGES, || {
        for &nr in batches {
            let pages = batch(pages, nr).iter().map(|sized| &*sized.page);
            rig.tenant.put(1, nr * BATCH, pages);
        }
    });
    let mut background = Samples::default();
    background.time(PAGES, || rig.maintain_all());
    times
        .put_full
        .push(times.put_ack.last() + background.last());
    for (at, &nr) in raw.iter().enumerate() {
        let pages = batch(pages, nr).iter().map(|sized| &*sized.page);
        rig.tenant.put(2, at * BATCH, pages);
    }
    let mut spent = Vec::with_capacity(raw.len());
    times.get_raw.time(PAGES, || {
        for (at, out) in copies.chunks_exact_mut(BATCH).enumerate() {
            spent.push(rig.tenant.get(2, at * BATCH, out));
        }
    });
    drop(spent);
    rig.maintain_all();
}

/// Measures reads and writes of these batches with zram, page by page, since zram has no batches.
fn measure_zram(
    times: &mut Times,
    zram: &mut Zram,
    pages: &[Sized],
    batches: &[usize],
) -> Result<(), String> {
    for &nr in batches {
        let mut result = Ok(());
        times.zram_read.time(BATCH, || {
            for at in nr * BATCH..(nr + 1) * BATCH {
                result = result.clone().and(zram.read(at));
            }
        });
        times.zram_write.time(BATCH, || {
            for (at, sized) in (nr * BATCH..).zip(batch(pages, nr)) {
                result = result.clone().and(zram.write(at, &sized.twin));
            }
        });
        result?;
    }
    Ok(())
}

/// Lets all pages become cold. Then measures the time that the engine's sweeps take to recompress
/// them, per page in the pool.
pub fn recompress(times: &mut Times, rig: &Rig, pages: usize) {
    rig.maintain_at(Time(LATER_NS));
    times.recompress.time(pages, || {
        for hours in 2..4 {
            rig.maintain_at(Time(hours * LATER_NS));
        }
    });
}
