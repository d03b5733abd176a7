// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes memory of the host at a constant rate, or as fast as possible if the rate is 0:
//! `take MIB MIB_PER_SECOND`. Then prints the rate and keeps the memory for 2 s.
//!
//! Tests use the program as the process that needs memory while a pool holds it. It is killed
//! if the host runs out of memory and the kernel prefers it to the daemon.

use std::hint::black_box;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Bytes of a page of memory. One written byte makes the kernel provide the page.
const PAGE: usize = 4096;

/// Time for which the memory is kept. The pool then has time to release memory late.
const KEEP: Duration = Duration::from_secs(2);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, mib, rate] = &arguments[..] else {
        return Err("usage: take MIB MIB_PER_SECOND".into());
    };
    let (mib, rate) = (mib.parse::<usize>()?, rate.parse::<u32>()?);
    let mut memory: Vec<u8> = Vec::with_capacity(mib * MIB);
    let begun = Instant::now();
    for (piece, taken) in memory.spare_capacity_mut().chunks_mut(MIB).zip(1..) {
        for page in piece.chunks_mut(PAGE) {
            page[0].write(1);
        }
        black_box(piece);
        if rate > 0 {
            let due = begun + Duration::from_secs(1) * taken / rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{mib} MiB in {seconds:.3} s: {:.0} MiB/s",
        mib as f64 / seconds
    );
    std::thread::sleep(KEEP);
    Ok(())
}
