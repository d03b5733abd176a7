// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of how much faster the engine finalizes pages (deduplicates and compresses them) with
//! a second thread. The result is relative to the gain that bare lz4 has from a second thread.

use crate::bare;
use crate::measure::{Ratio, Samples, cpu_ns};
use crate::rig::{BATCH, NOW, RAW_PAGES, Rig, guest};
use crate::times::Sized;
use std::hint::black_box;
use std::time::Instant;
use tmem_pool::PAGE_SIZE;

/// Number of tenants whose raw pages the threads finalize.
const TENANTS: usize = 8;

/// Largest number of rounds. Each round takes a fifth of a second.
const ROUNDS_MAX: usize = 21;

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

/// Returns the engine's gain from a second thread, relative to that of bare lz4.
///
/// # Errors
/// The system does not provide the address space for the pool, or this process may use only one
/// processor.
pub fn scaling(pages: &[Sized], rounds: usize, progress: impl Fn(&str)) -> Result<Scaling, String> {
    let rounds = rounds.min(ROUNDS_MAX);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return Err("this process may use only one processor".into());
    }
    let rig = Rig::new(4 << 30)?;
    let guests = (0..TENANTS).map(|nth| guest(&rig.engine, &format!("bench-{nth}")));
    let guests: Vec<_> = guests.collect::<Result<_, _>>()?;
    let (mut engine, mut lz4) = (Gains::default(), Gains::default());
    let part = (pages.len() / TENANTS).min(RAW_PAGES) / BATCH * BATCH;
    let pages = &pages[..part * TENANTS];
    for round in 0..rounds {
        progress(&format!("threads, round {} of {rounds}", round + 1));
        // Measure one thread first in one round and two threads first in the next, so that other
        // load that changes slowly does not always favour the same case.
        let threads = if round % 2 == 0 { [1, 2] } else { [2, 1] };
        lz4.round(threads, |threads| {
            seconds(threads, |thread| {
                let mut out = [0; PAGE_SIZE];
                for sized in pages.iter().skip(thread).step_by(threads) {
                    black_box(bare::compress(&sized.page, &mut out).map(<[u8]>::len));
                }
            })
        });
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
