// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a page takes in the pool. The benchmark counts this memory and measures no time.

use crate::bare;
use crate::rig::{BATCH, LATER_NS, RAW_PAGES, Rig};
use tmem_pool::{EngineStats, PAGE_SIZE, Page, Time};

/// Number of blobs (stored pages) in the pool at any time while [`churn`] replaces pages.
const CHURN_BLOBS: usize = 65_536;

/// Time in nanoseconds in which the engine's sweep passes all pages once. At the end of the first
/// sweep, the engine returns idle memory to the system and has recompressed no page yet.
const SWEEP_NS: u64 = 600_000_000_000;

/// Memory of a pool that contains all test pages. `vs_lz4_warm` is its ratio to the bytes that bare
/// lz4 needs before the engine recompresses cold pages, and `vs_lz4` the ratio after that.
pub struct Held {
    pub vs_lz4_warm: f64,
    pub vs_lz4: f64,
    pub metadata_bytes_per_page: f64,
}

fn lz4_bytes(pages: &[Box<Page>]) -> usize {
    pages.iter().map(|page| bare::lz4_bytes(page)).sum()
}

/// Returns the size of all pages after lz4, as a fraction of their uncompressed size.
pub fn lz4_fraction(pages: &[Box<Page>]) -> f64 {
    lz4_bytes(pages) as f64 / (pages.len() * PAGE_SIZE) as f64
}

fn fill<'a>(rig: &Rig, object: u64, pages: impl Iterator<Item = &'a Page>) {
    let mut pages = pages.peekable();
    let mut first = 0;
    while pages.peek().is_some() {
        rig.tenant.put(object, first, pages.by_ref().take(BATCH));
        first += BATCH;
        if first.is_multiple_of(RAW_PAGES) {
            rig.maintain_all();
        }
    }
    rig.maintain_all();
}

fn cool(rig: &Rig) {
    for hours in 1..4 {
        rig.maintain_at(Time(hours * LATER_NS));
    }
}

/// Measures the memory of a pool that contains all test pages.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn measure_held(pages: &[Box<Page>]) -> Result<Held, String> {
    let rig = Rig::new(2 * (pages.len() * PAGE_SIZE) as u64 + (64 << 20))?;
    fill(&rig, 1, pages.iter().map(|page| &**page));
    let lz4 = lz4_bytes(pages);
    // Let the engine's first sweep end, which returns idle memory to the system. The engine
    // recompresses no page before the second sweep.
    rig.maintain_at(Time(SWEEP_NS));
    let warm = rig.engine.stats();
    cool(&rig);
    let cold = rig.engine.stats();
    Ok(Held {
        vs_lz4_warm: warm.held_bytes as f64 / lz4 as f64,
        vs_lz4: cold.held_bytes as f64 / lz4 as f64,
        metadata_bytes_per_page: cold.metadata_bytes as f64 / cold.pages as f64,
    })
}

/// Measures how full the memory for stored pages is: the stored bytes divided by the pool's memory
/// without metadata. Returns the fraction after each page was replaced `turnovers` times on
/// average, and the fraction after half of all pages are dropped.
///
/// # Errors
/// The system does not provide the address space for the pool.
pub fn churn(
    pages: &[Box<Page>],
    seed: u64,
    turnovers: usize,
    progress: impl Fn(&str),
) -> Result<(f64, f64), String> {
    let rig = Rig::new(4 * (CHURN_BLOBS * PAGE_SIZE) as u64)?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut buffer = vec![[0; PAGE_SIZE]; BATCH];
    let mut stamp = 0u64;
    for turnover in 0..=turnovers {
        progress(&format!(
            "replacing the pool's pages: pass {turnover} of {turnovers}"
        ));
        for nth in 0..CHURN_BLOBS / BATCH {
            for page in &mut buffer {
                *page = *pages[rng.usize(..pages.len())];
                // Write a number into the page, so that no two pages are equal.
                stamp += 1;
                page[..8].copy_from_slice(&stamp.to_le_bytes());
            }
            for (at, page) in buffer.iter().enumerate() {
                let index = if turnover == 0 {
                    nth * BATCH + at
                } else {
                    rng.usize(..CHURN_BLOBS)
                };
                rig.tenant.put(1, index, std::iter::once(page));
            }
            if nth.is_multiple_of(RAW_PAGES / BATCH / 2) {
                rig.maintain_all();
            }
        }
        rig.maintain_all();
    }
    let efficiency = |stats: EngineStats| stats.payload_bytes as f64 / stats.frames_bytes as f64;
    // Let a sweep of the engine end, because its end returns idle memory to the system.
    rig.maintain_at(Time(SWEEP_NS));
    let churned = rig.engine.stats();
    assert!(
        churned.blobs >= CHURN_BLOBS as u64,
        "the pool has fewer than {CHURN_BLOBS} blobs: {churned:?}"
    );
    let mut indexes: Vec<usize> = (0..CHURN_BLOBS).collect();
    rng.shuffle(&mut indexes);
    for &index in &indexes[..CHURN_BLOBS / 2] {
        rig.tenant.flush(1, index, Some(1));
    }
    rig.maintain_at(Time(2 * SWEEP_NS));
    Ok((efficiency(churned), efficiency(rig.engine.stats())))
}
