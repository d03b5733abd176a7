// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of how much faster background work is with a second thread. Finalizing pages
//! (deduplicating and compressing them) is compared with bare lz4, which gains from a second thread,
//! too. The sweep, which recompresses cold pages, is measured in elapsed time.

use crate::bare;
use crate::measure::{Ratio, Samples, cpu_ns};
use crate::rig::{BATCH, LATER_NS, NOW, RAW_PAGES, Rig, add_guest};
use crate::times::{self, Sized, Times};
use std::hint::black_box;
use std::time::Instant;
use tmem_pool::{PAGE_SIZE, Time};

/// Number of tenants whose raw pages the threads finalize.
const TENANTS: usize = 8;

/// Largest number of rounds. Each round takes a fifth of a second.
const ROUNDS_MAX: usize = 21;

/// Largest number of rounds that measure the sweep. Each round fills two pools.
const SWEEP_ROUNDS_MAX: usize = 5;

/// Bytes of a pool for which the time of a sweep is computed.
const TIB: f64 = (1u64 << 40) as f64;

/// The engine's speed-up by a second thread, divided by the speed-up of bare lz4.
pub struct Scaling {
    /// The engine's gain in elapsed time from a second thread, divided by lz4's gain. Other load on
    /// the machine affects the engine and lz4 alike.
    pub time: Ratio,
    /// The engine's gain in processor time from a second thread, divided by lz4's gain. It leaves
    /// out the time that threads wait for each other.
    pub work: Ratio,
}

/// Runs `work` in `threads` threads at the same time. Returns the elapsed time and the sum of the
/// threads' processor times, in seconds.
fn seconds(threads: usize, work: impl Fn(usize) + Sync) -> [f64; 2] {
    let since = Instant::now();
    let spent_ns: f64 = std::thread::scope(|scope| {
        let run = |thread| {
            let work = &work;
            scope.spawn(move || {
                let since = cpu_ns();
                work(thread);
                cpu_ns() - since
            })
        };
        let running: Vec<_> = (0..threads).map(run).collect();
        let spent = running.into_iter().map(|thread| thread.join());
        spent
            .map(|ns| ns.expect("a measured thread panicked"))
            .sum()
    });
    [since.elapsed().as_secs_f64(), spent_ns / 1e9]
}

/// Gains from a second thread, in elapsed time and in processor time, one value for each round.
#[derive(Default)]
struct Gains([Samples; 2]);

impl Gains {
    /// Adds the gains of one round. `measure` returns the elapsed time and the processor time that
    /// the work takes with a given number of threads.
    fn round(&mut self, threads: [usize; 2], measure: impl FnMut(usize) -> [f64; 2]) {
        let [first, second] = threads.map(measure);
        for (nth, samples) in self.0.iter_mut().enumerate() {
            let ratio = first[nth] / second[nth];
            samples.push(if threads == [1, 2] {
                ratio
            } else {
                1.0 / ratio
            });
        }
    }
}

/// Time that a sweep takes in a pool of 1 TiB whose pages are all cold, computed from the time for
/// each byte of a small pool.
pub struct Sweep {
    /// Minutes of processor time.
    pub minutes: Ratio,
    /// The sweep's gain in elapsed time from a second thread, divided by lz4's gain.
    pub scaling: Ratio,
    /// Minutes with eight threads. They are computed as if each doubling of the number of threads
    /// had the same gain as the first one.
    pub minutes_of_8: Ratio,
}

/// Checks that two threads can run at the same time.
fn check_processors() -> Result<(), String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match processors {
        0 | 1 => Err("this process may use only one processor".into()),
        _ => Ok(()),
    }
}

/// Compresses the pages with bare lz4.
fn lz4_seconds(pages: &[Sized], threads: usize) -> [f64; 2] {
    seconds(threads, |thread| {
        let mut out = [0; PAGE_SIZE];
        for sized in pages.iter().skip(thread).step_by(threads) {
            black_box(bare::compress(&sized.page, &mut out).map(<[u8]>::len));
        }
    })
}

/// Measures the sweep over a pool with these pages, with one and with two threads.
///
/// # Errors
/// The system does not provide the address space for the pool, or this process may use only one
/// processor.
pub fn sweep(pages: &[Sized], rounds: usize, progress: impl Fn(&str)) -> Result<Sweep, String> {
    check_processors()?;
    let rounds = rounds.min(SWEEP_ROUNDS_MAX);
    let (mut engine, mut lz4) = (Gains::default(), Gains::default());
    let mut minutes = Samples::default();
    for round in 0..rounds {
        progress(&format!("sweep, round {} of {rounds}", round + 1));
        let threads = if round % 2 == 0 { [1, 2] } else { [2, 1] };
        let mut pools = Vec::new();
        for _ in threads {
            let rig = times::fill(&mut Times::default(), pages)?;
            // The first sweep marks all pages, and the next one recompresses them.
            rig.maintain_at(Time(LATER_NS));
            pools.push(rig);
        }
        lz4.round(threads, |threads| lz4_seconds(pages, threads));
        engine.round(threads, |threads| {
            let engine = &pools[threads - 1].engine;
            let pools_per_tib = TIB / engine.stats().held_bytes as f64;
            let now = Time(2 * LATER_NS);
            let seconds = seconds(threads, |_| while engine.maintain(now, 256) {});
            if threads == 1 {
                minutes.push(seconds[1] / 60.0 * pools_per_tib);
            }
            seconds
        });
    }
    let scaling = engine.0[0].ratio_to(&lz4.0[0]);
    let minutes = minutes.median_with_interval();
    // A gain larger than that of lz4 is an error of measurement.
    let of_8 = |minutes: f64, scaling: f64| minutes / 8.0 / scaling.min(1.0).powi(3);
    Ok(Sweep {
        minutes,
        scaling,
        minutes_of_8: Ratio {
            value: of_8(minutes.value, scaling.value),
            low: of_8(minutes.low, scaling.high),
            high: of_8(minutes.high, scaling.low),
        },
    })
}

/// Returns the engine's gain from a second thread, relative to that of bare lz4.
///
/// # Errors
/// The system does not provide the address space for the pool, or this process may use only one
/// processor.
pub fn scaling(pages: &[Sized], rounds: usize, progress: impl Fn(&str)) -> Result<Scaling, String> {
    check_processors()?;
    let rounds = rounds.min(ROUNDS_MAX);
    let rig = Rig::new(4 << 30)?;
    let guests = (0..TENANTS).map(|nth| add_guest(&rig.engine, &format!("bench-{nth}")));
    let guests: Vec<_> = guests.collect::<Result<_, _>>()?;
    let (mut engine, mut lz4) = (Gains::default(), Gains::default());
    let part = (pages.len() / TENANTS).min(RAW_PAGES) / BATCH * BATCH;
    let pages = &pages[..part * TENANTS];
    for round in 0..rounds {
        progress(&format!("threads, round {} of {rounds}", round + 1));
        // Measure one thread first in one round and two threads first in the next, so that other
        // load that changes slowly does not always favour the same case.
        let threads = if round % 2 == 0 { [1, 2] } else { [2, 1] };
        lz4.round(threads, |threads| lz4_seconds(pages, threads));
        engine.round(threads, |threads| {
            for (guest, pages) in guests.iter().zip(pages.chunks(part)) {
                for (nth, batch) in pages.chunks(BATCH).enumerate() {
                    guest.put(1, nth * BATCH, batch.iter().map(|sized| &*sized.page));
                }
            }
            let seconds = seconds(threads, |_| while rig.engine.maintain(NOW, 256) {});
            for guest in &guests {
                guest.flush(1, 0, None);
            }
            rig.maintain_all();
            seconds
        });
    }
    let [time, work] = [0, 1].map(|nth| engine.0[nth].ratio_to(&lz4.0[nth]));
    Ok(Scaling { time, work })
}
