// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a scrape each second costs the daemon: at most 1 % of one processor.
//!
//! Counted is processor time of the daemon alone. How many requests fewer it serves beside a scraper depends on
//! how many processors the exporter and Prometheus share with it: with one of them, the most of what a scrape
//! takes is the exporter's. Nothing is ever waited for: a thread of its own answers.
//! Not among the tests that always run, since it takes what is compiled with --release: `make check-ops`.

mod common;

use common::{Exporter, Host};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// VMs that are told of: half of the most that a daemon is made for.
const VMS: usize = 128;
const SCRAPES: u32 = 25;
const ROUNDS: usize = 9;
const COST_MAX: f64 = 0.01;

/// Processor time of this process, in which the daemon is, less that of this thread.
fn used() -> Duration {
    let read = |clock| Duration::try_from(clock_gettime(clock)).expect("not negative");
    read(ClockId::ProcessCPUTime) - read(ClockId::ThreadCPUTime)
}

#[test]
#[ignore = "measures what is compiled with --release: make check-ops"]
fn a_scrape_each_second_costs_no_more_than_a_hundredth() {
    let mut host = Host::with_more(VMS - 2);
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
    // What others do to the caches and the clock only adds.
    let least = costs[0];
    assert!(least > 0.0, "it answered without any work");
    assert!(least <= COST_MAX, "{:.2} %: {costs:?}", least * 100.0);
}
