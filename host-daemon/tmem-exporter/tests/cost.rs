// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures the cost of one scrape per second for the daemon: at most 1 % of one processor.
//!
//! The measure is the processor time of the daemon alone. How much a scraper slows down the
//! daemon's guests depends on how many processors the daemon shares with the exporter and
//! Prometheus; on one shared processor, most of the time of a scrape is the exporter's. Requests of
//! guests never wait for a scrape, because another thread answers it.
//!
//! This test needs a build with --release, so only `make check-ops` runs it.

mod common;

use common::{Exporter, ServedDaemon};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Number of VMs whose statistics each scrape contains.
const VMS: usize = 128;
const SCRAPES: u32 = 25;
const ROUNDS: usize = 9;
const COST_MAX: f64 = 0.01;

/// Returns the processor time of this process, which contains the daemon, without that of this
/// thread.
fn used() -> Duration {
    let read = |clock| Duration::try_from(clock_gettime(clock)).expect("the number is negative");
    read(ClockId::ProcessCPUTime) - read(ClockId::ThreadCPUTime)
}

#[test]
#[ignore = "measures what is compiled with --release: make check-ops"]
fn a_scrape_each_second_costs_at_most_1_percent_cpu() {
    let mut host = ServedDaemon::with_more(VMS - 2);
    let exporter = Exporter::start(&host, &[]);
    host.work(2000);
    let mut costs: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = used();
            for _ in 0..SCRAPES {
                assert!(exporter.metrics("").contains("tmem_up 1"));
            }
            (used() - begin).as_secs_f64() / f64::from(SCRAPES)
        })
        .collect();
    costs.sort_by(f64::total_cmp);
    println!(
        "{VMS} VMs: a scrape each second takes {:.3} % of a processor of the daemon",
        costs[ROUNDS / 2] * 100.0
    );
    // The smallest of the measured costs counts, because disturbances of the caches and the clock
    // only add to a cost.
    let least = costs[0];
    assert!(least > 0.0, "the scrapes used no processor time");
    assert!(
        least <= COST_MAX,
        "the scrapes used {:.2} % of a processor, more than the limit: {costs:?}",
        least * 100.0
    );
}
