// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a scrape each second costs a loaded daemon: at most 1 % of its requests.
//!
//! One scrape a second would be lost in the noise of any machine, so there are a hundred, and a hundredth
//! of what they cost counts. Turns with and without follow each other, so that whatever else the machine
//! does meets both. Not among the tests that always run, since it takes its time: `make check-ops` runs it.

mod common;

use common::{Exporter, Host};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// VMs that are told of: half of the most that a daemon is made for.
const VMS: usize = 128;
const TURN: Duration = Duration::from_millis(500);
const TURNS: usize = 30;
const SCRAPES_A_SECOND: u32 = 100;
const COST_MAX: f64 = 0.01;

/// Random requests, each judged, for one turn: how many a second.
fn rate(host: &mut Host) -> f64 {
    let begin = Instant::now();
    let mut steps = 0;
    while begin.elapsed() < TURN {
        host.work(20);
        steps += 20;
    }
    f64::from(steps) / begin.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "takes half a minute and measures what is compiled with --release: make check-ops"]
fn a_scrape_each_second_costs_no_more_than_a_hundredth() {
    let mut host = Host::with_more(VMS - 2);
    let exporter = Exporter::start(&host, &[]);
    host.work(2000);
    let (scrape, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut costs = Vec::new();
    let scrapes = std::thread::scope(|scope| {
        let (scrape, stop, exporter) = (&scrape, &stop, &exporter);
        let scraper = scope.spawn(move || {
            let mut done = 0u32;
            while !stop.load(Ordering::SeqCst) {
                if scrape.load(Ordering::SeqCst) {
                    assert!(exporter.metrics("").contains("tmem_up 1"));
                    done += 1;
                }
                std::thread::sleep(Duration::from_secs(1) / SCRAPES_A_SECOND);
            }
            done
        });
        for turn in 0..TURNS {
            // Who is first changes.
            let mut rates = [0.0; 2];
            for with in [turn % 2, 1 - turn % 2] {
                scrape.store(with == 1, Ordering::SeqCst);
                rates[with] = rate(&mut host);
            }
            costs.push(1.0 - rates[1] / rates[0]);
        }
        stop.store(true, Ordering::SeqCst);
        scraper.join().expect("each scrape is answered")
    });
    // A scrape takes its time as well, so that there were fewer.
    let scrapes_a_second = f64::from(scrapes) / (TURNS as f64 * TURN.as_secs_f64());
    let cost = median(costs) / scrapes_a_second;
    println!(
        "{VMS} VMs: {scrapes_a_second:.0} scrapes a second, of which one costs {:.3} % of requests",
        cost * 100.0
    );
    assert!(
        scrapes_a_second > 5.0,
        "{scrapes_a_second} a second tell little"
    );
    assert!(cost <= COST_MAX, "{:.2} %", cost * 100.0);
}
