// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `stats --watch`: prints a line of rates after each interval, in the style of vmstat.

use crate::client::stats;
use crate::event::utc;
use crate::exit::{Code, Failure};
use crate::output::print;
use crate::reach::{Reach, within_timeout};
use crate::table::{TableArguments, percent};
use clap::Args;
use std::time::{Duration, Instant, SystemTime};
use tmem_control as api;

/// Number of lines after which `stats --watch` prints the heading again, so that each screen has
/// one.
const LINES_PER_HEADING: u64 = 20;

/// Options of `--watch`: interval and number of lines.
#[derive(Args, Clone)]
pub struct WatchArguments {
    /// Print rates every SECONDS seconds, of one VM or of the pool
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
    /// End after N lines
    #[arg(long, value_name = "N", requires = "watch")]
    count: Option<u64>,
}

impl WatchArguments {
    /// Returns true if `--watch` was given.
    pub fn is_asked(&self) -> bool {
        self.watch.is_some()
    }
}

/// Figures of the pool or of one VM at one time. Rates are computed from the counters; the other
/// fields are current values.
#[derive(Clone, Copy)]
struct Sample {
    puts: i64,
    refused: i64,
    gets: i64,
    hits: i64,
    evictions: i64,
    pages: i64,
    /// Bytes of memory that the pool takes or, for a single VM, bytes that the VM is charged.
    used_bytes: i64,
    saved_bytes: i64,
}

impl Sample {
    fn new(reply: &api::GetStats_Reply, is_vm: bool) -> Sample {
        match (&reply.vms[..], &reply.pool) {
            ([vm], _) if is_vm => Sample {
                puts: vm.puts,
                refused: vm.puts_refused,
                gets: vm.gets,
                hits: vm.hits,
                evictions: vm.evictions,
                pages: vm.pages,
                used_bytes: vm.charged_bytes,
                saved_bytes: vm.saved_bytes,
            },
            (_, pool) => Sample {
                puts: pool.puts,
                refused: pool.puts_refused,
                gets: pool.gets,
                hits: pool.hits,
                evictions: pool.evictions,
                pages: pool.pages,
                used_bytes: pool.held_bytes,
                saved_bytes: pool.saved_bytes,
            },
        }
    }

    /// Returns a sample whose counters have the growth since the earlier sample `before`.
    fn since(&self, before: &Sample) -> Sample {
        // A counter is smaller than before if the daemon was restarted. The counter's growth is
        // then its value, which it has counted since the restart.
        let grown = |now: i64, then: i64| if now < then { now } else { now - then };
        Sample {
            puts: grown(self.puts, before.puts),
            refused: grown(self.refused, before.refused),
            gets: grown(self.gets, before.gets),
            hits: grown(self.hits, before.hits),
            evictions: grown(self.evictions, before.evictions),
            ..*self
        }
    }
}

/// Prints a line of rates after each interval, until `--count` lines are printed or a signal ends
/// tmemctl.
pub fn run(
    reach: &Reach,
    vm: Option<&str>,
    arguments: &WatchArguments,
    table: &TableArguments,
) -> Result<(), Failure> {
    if table.has_columns() {
        let what = "--output: the columns of --watch are fixed; use --json";
        return Err(Failure(what.into(), Code::Usage));
    }
    let period = Duration::from_secs(arguments.watch.unwrap_or(1));
    let poll = || {
        let vm = vm.map(String::from);
        within_timeout(&reach.daemon(), reach, move |reach| stats(reach, vm))
            .map(|reply| (Instant::now(), reply))
    };
    let (mut at, reply) = poll()?;
    let mut before = Sample::new(&reply, vm.is_some());
    let mut printed = 0;
    while arguments.count.is_none_or(|count| printed < count) {
        std::thread::sleep(period);
        let (now, reply) = poll()?;
        let sample = Sample::new(&reply, vm.is_some());
        let grown = sample.since(&before);
        let seconds = (now - at).as_secs_f64();
        let rate = |count: i64| (count as f64 / seconds).round() as i64;
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time = utc(time.map_or(0, |time| time.as_millis() as i64));
        if reach.json {
            let json = serde_json::json!({
                "time": time,
                "seconds": seconds,
                "vm": vm,
                "puts": grown.puts,
                "puts_refused": grown.refused,
                "gets": grown.gets,
                "hits": grown.hits,
                "evictions": grown.evictions,
                "pages": grown.pages,
                "used_bytes": grown.used_bytes,
                "saved_bytes": grown.saved_bytes,
            });
            print(&format!("{json}\n"))?;
        } else {
            if table.has_headings() && printed % LINES_PER_HEADING == 0 {
                print(&format!(
                    "{:>8} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
                    "TIME",
                    "GETS/S",
                    "HITS/S",
                    "HITS",
                    "PUTS/S",
                    "REFUSED/S",
                    "EVICTED/S",
                    "PAGES",
                    "USED",
                    "SAVED"
                ))?;
            }
            print(&format!(
                "{:>8} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
                &time[11..19],
                rate(grown.gets),
                rate(grown.hits),
                percent(grown.hits, grown.gets),
                rate(grown.puts),
                rate(grown.refused),
                rate(grown.evictions),
                grown.pages,
                table.sizes().text(grown.used_bytes),
                table.sizes().text(grown.saved_bytes)
            ))?;
        }
        (at, before) = (now, sample);
        printed += 1;
    }
    Ok(())
}
