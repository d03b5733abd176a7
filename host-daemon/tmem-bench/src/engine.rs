// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine beside copying, hashing and lz4 alone.
//!
//! Each round takes the next part of the corpus, which has left the caches since it was last used,
//! and does everything to it by turns.

use crate::measure::Samples;
use crate::{EngineArgs, corpus};
use std::hint::black_box;
use std::io::{IsTerminal, Write};
use tmem_pool::{
    GetResult, PAGE_SIZE, Page, Pool, PoolConfig, Put, PutResult, Quota, Spent, Tenant, TenantSpec,
    Time,
};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Pages of a request.
const BATCH: usize = 64;

/// Pages of a round: as many as a tenant may have raw.
const ROUND: usize = 2048;

/// The engine's: lz4's default.
const ACCELERATION: i32 = 1;
/// And what it keeps raw.
const ENCODED_BYTES_MAX: usize = 3840;

const POOL: u32 = 1;
const NOW: Time = Time(0);
const HOUR_NS: u64 = 3_600_000_000_000;

fn compress<'a>(page: &Page, out: &'a mut Page) -> Option<&'a [u8]> {
    // SAFETY: both pointers are valid for the lengths passed with them.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            page.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            PAGE_SIZE as i32,
            ENCODED_BYTES_MAX as i32 - 1,
            ACCELERATION,
        )
    };
    (len > 0).then(|| &out[..len as usize])
}

fn decompress(stored: &[u8], out: &mut Page) {
    // SAFETY: both pointers are valid for the lengths passed with them.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(
            stored.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            stored.len() as i32,
            PAGE_SIZE as i32,
        )
    };
    assert_eq!(len, PAGE_SIZE as i32);
}

/// A page of the corpus that lz4 takes, alone and in the engine.
struct Sized {
    page: Box<Page>,
    lz4: Vec<u8>,
}

fn same_filled(page: &Page) -> bool {
    page.iter().all(|byte| *byte == page[0])
}

struct Engine {
    pool: Pool,
    tenant: Tenant,
}

impl Engine {
    fn new(size_bytes: u64) -> Result<Engine, String> {
        let pool = Pool::new(PoolConfig {
            size_bytes,
            size_max_bytes: size_bytes,
            seed: 42,
            policy: Default::default(),
        })
        .map_err(|error| format!("address space for a pool: {error}"))?;
        let quota = Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 100,
        };
        let spec = TenantSpec {
            name: "bench".into(),
            trust_domain: None,
            quota,
        };
        let tenant = pool.add_tenant(spec).map_err(|error| error.to_string())?;
        tenant
            .create_pool(POOL)
            .map_err(|error| error.to_string())?;
        Ok(Engine { pool, tenant })
    }

    /// Puts pages in batches, the first under index `first` of the object.
    fn put(&self, object: u64, first: usize, pages: &[&Page]) {
        let mut results = [PutResult::Refused; BATCH];
        for (nth, batch) in pages.chunks(BATCH).enumerate() {
            let mut puts = Vec::with_capacity(BATCH);
            puts.extend(
                batch
                    .iter()
                    .zip(first + nth * BATCH..)
                    .map(|(page, index)| Put {
                        object,
                        index: index as u64,
                        cookie: index as u64 + 1,
                        workingset: false,
                        page,
                    }),
            );
            let results = &mut results[..batch.len()];
            self.tenant
                .put(NOW, POOL, &puts, results)
                .expect("the pool is live");
            assert!(
                results.iter().all(|result| *result == PutResult::Stored),
                "refused"
            );
        }
    }

    /// Until nothing is raw.
    fn settle(&self) {
        while self.pool.maintain(NOW, 4096) {}
    }

    /// Gets one batch.
    fn get(&self, object: u64, first: usize, out: &mut [Page]) -> Spent<'_> {
        let mut cookies = [0; BATCH];
        for (cookie, index) in cookies.iter_mut().zip(first..) {
            *cookie = index as u64 + 1;
        }
        let cookies = &cookies[..out.len()];
        let mut results = [GetResult::Miss; BATCH];
        let results = &mut results[..out.len()];
        let spent = self
            .tenant
            .get(NOW, POOL, object, first as u64, cookies, out, results)
            .expect("the pool is live");
        assert!(
            results.iter().all(|result| *result != GetResult::Miss),
            "a miss"
        );
        spent
    }
}

#[derive(Default)]
struct Times {
    copy: Samples,
    copy_hash: Samples,
    hash_compress: Samples,
    decompress: Samples,
    put_ack: Samples,
    put_full: Samples,
    get: Samples,
    get_full: Samples,
    get_raw: Samples,
}

#[derive(serde::Serialize)]
struct Ratios {
    put_ack_ratio: f64,
    put_full_ratio: f64,
    get_ratio: f64,
    get_freed_ratio: f64,
    get_nursery_ratio: f64,
    metadata_bytes_per_page: f64,
    bytes_vs_lz4: f64,
    bytes_vs_lz4_before_recompression: f64,
}

/// Pages of a corpus that lz4 shrinks, of which none is there twice.
fn sized(pages: &[Page]) -> Vec<Sized> {
    let mut seen = std::collections::HashSet::new();
    let mut buffer = [0; PAGE_SIZE];
    let fresh = pages.iter().filter(|page| !same_filled(page));
    let fresh = fresh.filter(|page| seen.insert(xxh3_128_with_seed(&page[..], 1)));
    fresh
        .filter_map(|page| {
            let lz4 = compress(page, &mut buffer)?.to_vec();
            let page = Box::new(*page);
            Some(Sized { page, lz4 })
        })
        .collect()
}

fn progress(text: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
        std::io::stderr().flush().ok();
    }
}

/// Runs the benchmark and prints it.
///
/// # Errors
/// There are too few pages, or no memory for a pool.
pub fn run(args: &EngineArgs) -> Result<(), String> {
    progress("reading files");
    let all = corpus::load(args.corpus.as_deref(), args.pages, args.seed)?;
    let pages = sized(&all);
    let parts = pages.len() / ROUND;
    if parts < 4 {
        return Err(format!("{} pages that differ are too few", pages.len()));
    }
    let mut times = Times::default();
    let engine = Engine::new(4 * (args.pages * PAGE_SIZE) as u64)?;
    // What a loaded pool has: all other pages, in an object of their own.
    for (nth, part) in pages.chunks_exact(ROUND).enumerate() {
        let part: Vec<&Page> = part.iter().map(|sized| &*sized.page).collect();
        engine.put(1, nth * ROUND, &part);
        engine.settle();
    }
    let mut copies = vec![[0; PAGE_SIZE]; ROUND];
    let mut out = vec![[0; PAGE_SIZE]; BATCH];
    let mut rng = fastrand::Rng::with_seed(args.seed);
    for round in 0..args.rounds {
        progress(&format!("round {} of {}", round + 1, args.rounds));
        // Parts far from each other, so that each has left the caches.
        let part = |nth: usize| {
            let at = (round * 5 + nth * (parts / 5)) % parts;
            &pages[at * ROUND..(at + 1) * ROUND]
        };
        bare(&mut times, part(0), part(1), &mut copies, &mut out[0]);
        // Pages that have been there for long, in batches of a random reader.
        let mut batches: Vec<usize> = (0..parts * ROUND / BATCH).collect();
        rng.shuffle(&mut batches);
        let mut batches = batches.chunks_exact(ROUND / BATCH);
        let mut next = || batches.next().expect("there are many parts");
        let alone = next();
        times.decompress.time(ROUND, || {
            for &batch in alone {
                for (sized, out) in pages[batch * BATCH..].iter().zip(&mut out) {
                    decompress(&sized.lz4, out);
                }
            }
        });
        let batches = next();
        let (mut ns, mut free_ns) = (0.0, 0.0);
        for &batch in batches {
            let mut one = Samples::default();
            let spent = one.time(1, || engine.get(1, batch * BATCH, &mut out));
            ns += one.last();
            one.time(1, || drop(spent));
            free_ns += one.last();
            for (page, sized) in out.iter().zip(&pages[batch * BATCH..]) {
                assert!(*page == *sized.page, "wrong bytes");
            }
        }
        times.get.push(ns / ROUND as f64);
        times.get_full.push((ns + free_ns) / ROUND as f64);
        for &batch in batches {
            let part: Vec<&Page> = pages[batch * BATCH..(batch + 1) * BATCH]
                .iter()
                .map(|sized| &*sized.page)
                .collect();
            engine.put(1, batch * BATCH, &part);
        }
        engine.settle();
        fresh(&mut times, part(3), part(4), &mut out)?;
    }
    progress("");
    // Two passes of the sweep: all are cold then.
    progress("recompressing cold pages");
    let lz4_stats = engine.pool.stats();
    for hours in 0..3 {
        while engine.pool.maintain(Time(hours * HOUR_NS), 4096) {}
    }
    let stats = engine.pool.stats();
    let lz4_bytes: usize = pages[..parts * ROUND]
        .iter()
        .map(|sized| sized.lz4.len())
        .sum();
    let ratios = Ratios {
        put_ack_ratio: times.put_ack.ratio_to(&times.copy_hash),
        put_full_ratio: times.hash_compress.ratio_to(&times.put_full),
        get_ratio: times.decompress.ratio_to(&times.get),
        get_freed_ratio: times.decompress.ratio_to(&times.get_full),
        get_nursery_ratio: times.get_raw.ratio_to(&times.copy),
        metadata_bytes_per_page: stats.metadata_bytes as f64 / stats.pages as f64,
        bytes_vs_lz4: stats.held_bytes as f64 / lz4_bytes as f64,
        bytes_vs_lz4_before_recompression: lz4_stats.held_bytes as f64 / lz4_bytes as f64,
    };
    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&ratios).expect("numbers")
        );
        return Ok(());
    }
    println!(
        "{} pages, {} of them different, not same-filled, and shrinking",
        all.len(),
        pages.len()
    );
    for (what, samples) in [
        ("cold copy", &times.copy),
        ("cold copy and xxh3", &times.copy_hash),
        ("xxh3 and LZ4_compress_fast", &times.hash_compress),
        ("LZ4_decompress_safe, cold", &times.decompress),
        ("put, acknowledged", &times.put_ack),
        ("put, until it is in its blob", &times.put_full),
        ("get of an lz4 page", &times.get),
        ("get of an lz4 page, and freed", &times.get_full),
        ("get of a raw page", &times.get_raw),
    ] {
        println!("{what:30} {:8.0} ns/page", samples.median());
    }
    println!(
        "{}",
        serde_json::to_string_pretty(&ratios).expect("numbers")
    );
    Ok(())
}

/// What cannot be done without.
fn bare(times: &mut Times, a: &[Sized], b: &[Sized], copies: &mut [Page], out: &mut Page) {
    times.copy_hash.time(ROUND, || {
        for (sized, copy) in a.iter().zip(&mut *copies) {
            copy.copy_from_slice(&*sized.page);
            black_box(xxh3_128_with_seed(&copy[..], 42));
        }
    });
    times.hash_compress.time(ROUND, || {
        for sized in b {
            black_box(xxh3_128_with_seed(&sized.page[..], 42));
            black_box(compress(&sized.page, out).map(<[u8]>::len));
        }
    });
    times.copy.time(ROUND, || {
        for (sized, copy) in b.iter().zip(&mut *copies) {
            copy.copy_from_slice(&*sized.page);
        }
    });
}

/// Puts into a pool that has none of these pages, and gets before they are compressed.
fn fresh(times: &mut Times, a: &[Sized], b: &[Sized], out: &mut [Page]) -> Result<(), String> {
    let engine = Engine::new(256 << 20)?;
    let a: Vec<&Page> = a.iter().map(|sized| &*sized.page).collect();
    let b: Vec<&Page> = b.iter().map(|sized| &*sized.page).collect();
    // The first fault of each frame is not what is measured.
    engine.put(9, 0, &b);
    engine
        .tenant
        .flush(POOL, 9, 0, None)
        .expect("the pool is live");
    engine.settle();
    times.put_ack.time(ROUND, || engine.put(1, 0, &a));
    let mut settle = Samples::default();
    settle.time(ROUND, || engine.settle());
    times.put_full.push(times.put_ack.last() + settle.last());
    engine.put(2, 0, &b);
    times.get_raw.time(ROUND, || {
        for first in (0..ROUND).step_by(BATCH) {
            drop(engine.get(2, first, out));
        }
    });
    Ok(())
}
