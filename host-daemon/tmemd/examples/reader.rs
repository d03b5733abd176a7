// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Acts as a VM that gets single pages from its pool: `reader SOCKET`. Puts pages, gets one page
//! each millisecond, and puts it again. Prints once a second how long the gets took, in µs.
//!
//! Tests run the program beside VMs that take memory from the host. It ends when the daemon does.

use std::path::Path;
use std::time::{Duration, Instant};
use tmem_model::{Driver, DriverConfig, GuestConfig};

/// Number of pages, of one object, that the program puts and gets.
const PAGES: u64 = 1024;

/// Number of pages in the first PUT requests.
const BATCH: u64 = 32;

/// Time between two gets.
const PAUSE: Duration = Duration::from_millis(1);

/// Time between two lines of output.
const PERIOD: Duration = Duration::from_secs(1);

const OBJECT: u64 = 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket] = &arguments[..] else {
        return Err("usage: reader SOCKET".into());
    };
    let mut driver = Driver::new(GuestConfig::default(), DriverConfig::default())?;
    driver.connect(Path::new(socket))?;
    driver.settle()?;
    for start in (0..PAGES).step_by(BATCH as usize) {
        driver.put(OBJECT, start, start + BATCH);
        driver.settle()?;
    }
    let mut times_us = Vec::new();
    let mut printed = Instant::now();
    for page in (0..PAGES).cycle() {
        let begun = Instant::now();
        driver.get(OBJECT, page, page + 1);
        driver.settle()?;
        times_us.push(begun.elapsed().as_micros());
        driver.put(OBJECT, page, page + 1);
        driver.settle()?;
        if printed.elapsed() >= PERIOD {
            times_us.sort_unstable();
            let at = |percent: usize| times_us[(times_us.len() - 1) * percent / 100];
            println!(
                "{} gets, p50 {}, p99 {}, max {}",
                times_us.len(),
                at(50),
                at(99),
                at(100)
            );
            times_us.clear();
            printed = Instant::now();
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
