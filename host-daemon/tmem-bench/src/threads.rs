// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much more two threads do than one: giving pages their final form, beside bare lz4.

use crate::bare;
use crate::measure::{Ratio, Samples};
use crate::rig::{BATCH, NOW, RAW_PAGES, Rig, guest};
use crate::times::Sized;
use std::hint::black_box;
use std::time::Instant;
use tmem_pool::PAGE_SIZE;

/// Tenants that have raw pages.
const TENANTS: usize = 8;

/// Repetitions at most: each takes a fifth of a second.
const ROUNDS_MAX: usize = 21;

/// Time that so many threads take together.
fn seconds(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let since = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
    since.elapsed().as_secs_f64()
}

/// The engine's gain from a second thread by that of bare lz4.
///
/// # Errors
/// There is no address space, or only one processor.
pub fn scaling(pages: &[Sized], rounds: usize, progress: impl Fn(&str)) -> Result<Ratio, String> {
    let rounds = rounds.min(ROUNDS_MAX);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return Err("there is one processor only".into());
    }
    let rig = Rig::new(4 << 30)?;
    let guests = (0..TENANTS).map(|nth| guest(&rig.pool, &format!("bench-{nth}")));
    let guests: Vec<_> = guests.collect::<Result<_, _>>()?;
    let (mut engine_gains, mut lz4_gains) = (Samples::default(), Samples::default());
    let part = (pages.len() / TENANTS).min(RAW_PAGES) / BATCH * BATCH;
    let pages = &pages[..part * TENANTS];
    for round in 0..rounds {
        progress(&format!("threads, round {} of {rounds}", round + 1));
        // By turns, since whoever shares the machine comes and goes.
        let threads = if round % 2 == 0 { [1, 2] } else { [2, 1] };
        let gain = |seconds: [f64; 2]| match threads {
            [1, 2] => seconds[0] / seconds[1],
            _ => seconds[1] / seconds[0],
        };
        lz4_gains.push(gain(threads.map(|threads| {
            seconds(threads, |thread| {
                let mut out = [0; PAGE_SIZE];
                for sized in pages.iter().skip(thread).step_by(threads) {
                    black_box(bare::compress(&sized.page, &mut out).map(<[u8]>::len));
                }
            })
        })));
        engine_gains.push(gain(threads.map(|threads| {
            for (guest, pages) in guests.iter().zip(pages.chunks(part)) {
                for (nth, batch) in pages.chunks(BATCH).enumerate() {
                    guest.put(1, nth * BATCH, batch.iter().map(|sized| &*sized.page));
                }
            }
            let seconds = seconds(threads, |_| while rig.pool.maintain(NOW, 256) {});
            for guest in &guests {
                guest.flush(1, 0, None);
            }
            rig.settle();
            seconds
        })));
    }
    Ok(engine_gains.ratio_to(&lz4_gains))
}
