// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data that `tmemctl top` shows: rates between two polls of the daemon, and the user's choice
//! of order and filter.

use std::collections::{HashMap, VecDeque};
use std::str::FromStr;
use std::time::Instant;
use tmem_control::{DaemonStats, GetStats_Reply, Histogram, PoolStats, VmStats};

/// Number of polls whose values a history keeps. It is the largest width of a sparkline (bar
/// chart).
pub const HISTORY: usize = 60;

/// Figure by which `top` sorts the rows of VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Sorts by the name of the VM.
    Name,
    /// Sorts by hits in pages per second.
    Hits,
    /// Sorts by the share of gets that hit.
    Rate,
    /// Sorts by puts in pages per second.
    Put,
    /// Sorts by gets in pages per second.
    Get,
    /// Sorts by the bytes that the VM is charged.
    Used,
    /// Sorts by the number of the VM's pages in the pool.
    Pages,
}

impl Sort {
    /// All sort keys, in the order in which the help lists them.
    pub const ALL: [Sort; 7] = [
        Sort::Name,
        Sort::Hits,
        Sort::Rate,
        Sort::Put,
        Sort::Get,
        Sort::Used,
        Sort::Pages,
    ];

    /// Returns the name that selects the sort key on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Hits => "hits",
            Sort::Rate => "rate",
            Sort::Put => "put",
            Sort::Get => "get",
            Sort::Used => "used",
            Sort::Pages => "pages",
        }
    }

    /// Returns the key on the keyboard that selects this sort key.
    pub fn key(self) -> char {
        match self {
            Sort::Name => 'n',
            Sort::Hits => 'd',
            Sort::Rate => 'm',
            Sort::Put => 'p',
            Sort::Get => 'g',
            Sort::Used => 'u',
            Sort::Pages => 's',
        }
    }
}

impl FromStr for Sort {
    type Err = String;

    fn from_str(text: &str) -> Result<Sort, String> {
        let found = Sort::ALL.into_iter().find(|sort| sort.name() == text);
        found.ok_or_else(|| {
            let names: Vec<&str> = Sort::ALL.iter().map(|sort| sort.name()).collect();
            format!("there is {}", names.join(", "))
        })
    }
}

/// Row of the table for one VM, with the VM's figures at the last poll of the daemon.
#[derive(Clone, Debug)]
pub struct Row {
    /// Statistics of the VM at the last poll.
    pub vm: VmStats,
    /// Gets of the VM between the last two polls, in pages per second.
    pub gets: f64,
    /// Hits of the VM between the last two polls, in pages per second. Each hit avoids a disk read.
    pub hits: f64,
    /// Puts of the VM between the last two polls, in pages per second.
    pub puts: f64,
    /// Share of hits in the VM's gets between the last two polls; None if there were no gets.
    pub hit_part: Option<f64>,
    /// Mean time of a GET request between the last two polls, in µs; None if there were no such
    /// requests.
    pub get_us: Option<f64>,
    /// Mean time of a PUT request between the last two polls, in µs; None if there were no such
    /// requests.
    pub put_us: Option<f64>,
    /// Gets of the VM, in pages per second, before each of the latest polls, oldest first.
    pub history: VecDeque<u64>,
}

/// State of `tmemctl top`: the displayed data and the user's choices.
pub struct Model {
    /// Sort key of the rows.
    pub sort: Sort,
    /// Whether the rows are sorted in reverse order.
    pub reverse: bool,
    /// Text that a VM's name must contain for its row to be shown.
    pub filter: String,
    /// True while the user types the filter.
    pub typing: bool,
    /// True while the help is shown.
    pub help: bool,
    /// True while polling is paused.
    pub paused: bool,
    /// Position of the selected row among the shown rows.
    pub selected: usize,
    /// Reason why the last poll of the daemon failed; None if the poll succeeded.
    pub problem: Option<String>,
    /// Figures of the daemon at the last poll.
    pub daemon: Option<DaemonStats>,
    /// Figures of the pool at the last poll.
    pub pool: Option<PoolStats>,
    /// Hits of all VMs, in pages per second, before each of the latest polls, oldest first.
    pub history: VecDeque<u64>,
    rows: Vec<Row>,
    at: Option<Instant>,
}

fn push_history(history: &mut VecDeque<u64>, value: f64) {
    if history.len() == HISTORY {
        history.pop_front();
    }
    history.push_back(value.max(0.0).round() as u64);
}

/// Returns the mean time in µs of the requests that were counted since the earlier histogram
/// `before`. Without `before`, all requests in `now` count. Returns None if there were no requests.
pub fn mean_us(now: &Histogram, before: Option<&Histogram>) -> Option<f64> {
    let count = |histogram: &Histogram| histogram.buckets.iter().sum::<i64>();
    let before = before.map_or((0, 0), |before| (count(before), before.sum_ns));
    let (count, sum_ns) = (count(now) - before.0, now.sum_ns - before.1);
    (count > 0 && sum_ns >= 0).then(|| sum_ns as f64 / count as f64 / 1000.0)
}

impl Model {
    /// Creates a model without any figures.
    pub fn new(sort: Sort, filter: String) -> Model {
        Model {
            sort,
            reverse: false,
            filter,
            typing: false,
            help: false,
            paused: false,
            selected: 0,
            problem: None,
            daemon: None,
            pool: None,
            history: VecDeque::new(),
            rows: Vec::new(),
            at: None,
        }
    }

    /// Stores the figures of a poll of the daemon, and computes the rates since the poll before it.
    pub fn update(&mut self, reply: GetStats_Reply, now: Instant) {
        let seconds = self.at.map(|at| (now - at).as_secs_f64().max(1e-3));
        let before = std::mem::take(&mut self.rows);
        let mut before: HashMap<String, Row> = before
            .into_iter()
            .map(|row| (row.vm.name.clone(), row))
            .collect();
        let mut all_hits = 0.0;
        self.rows = reply
            .vms
            .into_iter()
            .map(|vm| {
                // A restarted daemon counts from 0. The figures of the earlier poll are then not
                // used.
                let old = before
                    .remove(&vm.name)
                    .filter(|old| old.vm.gets <= vm.gets && old.vm.puts <= vm.puts);
                let was = old.as_ref().map(|old| &old.vm);
                let rate = |now: i64, then: Option<i64>| match (seconds, then) {
                    (Some(seconds), Some(then)) => (now - then).max(0) as f64 / seconds,
                    _ => 0.0,
                };
                let gets = rate(vm.gets, was.map(|was| was.gets));
                let hits = rate(vm.hits, was.map(|was| was.hits));
                let mut row = Row {
                    gets,
                    hits,
                    puts: rate(vm.puts, was.map(|was| was.puts)),
                    hit_part: (gets > 0.0).then(|| hits / gets),
                    get_us: mean_us(&vm.get_latency, was.map(|was| &was.get_latency)),
                    put_us: mean_us(&vm.put_latency, was.map(|was| &was.put_latency)),
                    history: old.map(|old| old.history).unwrap_or_default(),
                    vm,
                };
                all_hits += hits;
                if seconds.is_some() {
                    push_history(&mut row.history, gets);
                }
                row
            })
            .collect();
        if seconds.is_some() {
            push_history(&mut self.history, all_hits);
        }
        (self.daemon, self.pool) = (Some(reply.daemon), Some(reply.pool));
        (self.at, self.problem) = (Some(now), None);
        self.stay_inside();
    }

    /// Returns the rows whose names contain the filter. They are sorted by the sort key, numbers
    /// with the largest first and names alphabetically. If the user chose it, the order is
    /// reversed.
    pub fn rows(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self
            .rows
            .iter()
            .filter(|row| row.vm.name.contains(&self.filter))
            .collect();
        let value = |row: &Row| match self.sort {
            Sort::Name => 0.0,
            Sort::Hits => row.hits,
            Sort::Rate => row.hit_part.unwrap_or(-1.0),
            Sort::Put => row.puts,
            Sort::Get => row.gets,
            Sort::Used => row.vm.charged_bytes as f64,
            Sort::Pages => row.vm.pages as f64,
        };
        rows.sort_by(|a, b| {
            value(b)
                .total_cmp(&value(a))
                .then_with(|| a.vm.name.cmp(&b.vm.name))
        });
        if self.reverse {
            rows.reverse();
        }
        rows
    }

    /// Moves the selection to the last row if the selected row no longer exists.
    pub fn stay_inside(&mut self) {
        self.selected = self.selected.min(self.rows().len().saturating_sub(1));
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::time::Duration;
    use tmem_control::DriverReport;
    use tmem_control::statistics::{Kind, Scope, Statistic};

    fn figures(scope: Scope) -> serde_json::Value {
        let one = |row: &Statistic| {
            let value = match (row.kind, row.field) {
                (Kind::Histogram, _) => {
                    serde_json::json!({ "sum_ns": 0, "buckets": vec![0; 16] })
                }
                (_, "name" | "version" | "state" | "kernel" | "file_systems") => "".into(),
                (_, "connected" | "frozen" | "memory_locked") => false.into(),
                (_, "gain_hits" | "loss_hits") => serde_json::json!([0, 0, 0]),
                (_, "driver" | "uuid" | "trust_domain" | "limit_bytes") => serde_json::Value::Null,
                _ => 0.into(),
            };
            (row.field.to_string(), value)
        };
        let all: serde_json::Map<_, _> = Statistic::in_scope(scope).map(one).collect();
        all.into()
    }

    /// Returns the statistics of a connected VM with the given counters.
    pub fn vm(name: &str, gets: i64, hits: i64, puts: i64) -> VmStats {
        let mut vm: VmStats =
            serde_json::from_value(figures(Scope::Vm)).expect("the statistics lack a field");
        (vm.name, vm.gets, vm.hits, vm.puts) = (name.into(), gets, hits, puts);
        vm.connected = true;
        vm
    }

    /// Returns a guest driver's report with the given state.
    pub fn driver(state: &str) -> DriverReport {
        let figures = serde_json::from_value(figures(Scope::Driver));
        let mut driver: DriverReport = figures.expect("the JSON lacks a field of the report");
        driver.state = state.into();
        driver
    }

    /// Returns a daemon's reply to GetStats with the given VMs.
    pub fn reply(vms: Vec<VmStats>) -> GetStats_Reply {
        GetStats_Reply {
            daemon: serde_json::from_value(figures(Scope::Daemon))
                .expect("the statistics lack a field"),
            pool: serde_json::from_value(figures(Scope::Pool))
                .expect("the statistics lack a field"),
            vms,
        }
    }

    fn names(model: &Model) -> Vec<&str> {
        model
            .rows()
            .iter()
            .map(|row| row.vm.name.as_str())
            .collect()
    }

    #[test]
    fn rates_cover_the_interval_between_two_polls() {
        let mut model = Model::new(Sort::Get, String::new());
        let start = Instant::now();
        model.update(reply(vec![vm("a", 100, 50, 10)]), start);
        assert_eq!(
            model.rows()[0].gets,
            0.0,
            "a single poll of the statistics gave a rate"
        );
        let mut next = vm("a", 300, 200, 30);
        next.get_latency.buckets[3] = 4;
        next.get_latency.sum_ns = 20_000;
        model.update(reply(vec![next.clone()]), start + Duration::from_secs(2));
        let rows = model.rows();
        let row = rows[0];
        assert_eq!((row.gets, row.hits, row.puts), (100.0, 75.0, 10.0));
        assert_eq!(
            (row.hit_part, row.get_us, row.put_us),
            (Some(0.75), Some(5.0), None)
        );
        assert_eq!((row.history.len(), model.history.back()), (1, Some(&75)));
        // The counters are smaller than at the last poll, as they are after a restart of the
        // daemon.
        model.update(
            reply(vec![vm("a", 5, 5, 5)]),
            start + Duration::from_secs(3),
        );
        assert_eq!(model.rows()[0].gets, 0.0);
        for nth in 4..200 {
            model.update(reply(vec![next.clone()]), start + Duration::from_secs(nth));
        }
        assert_eq!(
            model.history.len(),
            HISTORY,
            "the history is longer than its limit"
        );
    }

    #[test]
    fn rows_are_ordered_and_filtered() {
        let mut model = Model::new(Sort::Name, String::new());
        let start = Instant::now();
        let at = |gets: i64, puts: i64| {
            reply(vec![
                vm("b", gets, 0, 9 * puts),
                vm("a", 2 * gets, 0, puts),
                vm("web", 3 * gets, 3 * gets, 0),
            ])
        };
        model.update(at(0, 0), start);
        model.update(at(10, 10), start + Duration::from_secs(1));
        assert_eq!(names(&model), ["a", "b", "web"]);
        model.sort = Sort::Get;
        assert_eq!(names(&model), ["web", "a", "b"]);
        model.sort = Sort::Put;
        assert_eq!(names(&model), ["b", "a", "web"]);
        model.reverse = true;
        assert_eq!(names(&model), ["web", "a", "b"]);
        (model.selected, model.filter) = (2, "e".into());
        model.stay_inside();
        assert_eq!((names(&model), model.selected), (vec!["web"], 0));
        assert!(
            "size"
                .parse::<Sort>()
                .is_err_and(|error| error.contains("used"))
        );
    }
}
