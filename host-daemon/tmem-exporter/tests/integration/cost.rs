// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures what scrapes cost the daemon: one scrape per second may take at most 1 % of a
//! processor.
//!
//! The measured time is the processor time of the daemon alone. A scrape slows the daemon's guests
//! down more if the daemon shares its processors with the exporter and Prometheus. On one shared
//! processor, the exporter uses most of the time of a scrape. Requests of guests never wait for a
//! scrape, because another thread answers the scrape.
//!
//! This test needs a build with --release, so only `make shard NAME=ops` runs it.

use crate::common::{Exporter, ServedDaemon};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Number of VMs whose statistics each scrape contains.
const VMS: usize = 128;
const SCRAPES: u32 = 25;
const ROUNDS: usize = 9;
const COST_MAX: f64 = 0.01;

/// Returns the processor time that all other threads of this process have used. The daemon runs in
/// these threads.
fn used() -> Duration {
    let read = |clock| Duration::try_from(clock_gettime(clock)).expect("the number is negative");
    read(ClockId::ProcessCPUTime) - read(ClockId::ThreadCPUTime)
}

#[test]
#[ignore = "measures what is compiled with --release: make shard NAME=ops"]
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
        "{VMS} VMs: with a scrape each second, the daemon spends {:.3} % of a processor on scrapes",
        costs[ROUNDS / 2] * 100.0
    );
    // The smallest measured cost is compared with the limit, because disturbances, for example of
    // the caches, only add to a cost.
    let least = costs[0];
    assert!(least > 0.0, "the scrapes used no processor time");
    assert!(
        least <= COST_MAX,
        "the scrapes used {:.2} % of a processor, more than the limit: {costs:?}",
        least * 100.0
    );
}
