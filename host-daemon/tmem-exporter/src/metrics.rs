// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Converts the daemon's figures to metrics, as the table in tmem-trace's statistics.rs says.
//!
//! Figures that depend on pages that VMs have in common are rounded to large steps. A reader of
//! metrics who can also put pages must not learn from them which pages other VMs have. Out of
//! scope: a label whose values a guest chooses.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use tmem_control::GetStats_Reply;
use tmem_control::statistics::{Export, Kind, Scope, Statistic};

/// Divisor for the step to which figures are rounded. The step is the size of the pool divided by
/// this number, but at least [`STEP_BYTES_MIN`].
const STEP_DIVISOR: i64 = 64;
/// Smallest rounding step in bytes: the size of 256 pages, which no guest puts by chance.
const STEP_BYTES_MIN: i64 = 1 << 20;

const PAGE_BYTES: i64 = 4096;

/// States of a guest's driver. "none" means that the driver has not reported its state.
const DRIVER_STATES: [&str; 7] = [
    "none", "off", "on", "offline", "tripped", "poisoned", "unknown",
];

type Labels = Vec<(String, String)>;
type NoExemplar = Option<&'static Exemplar<Labels, u64>>;

enum Sample {
    Gauge(f64),
    Counter(f64),
    /// A histogram: the sum of all durations in seconds, and the number of durations in each
    /// bucket, with the bucket's upper bound in seconds.
    Histogram(f64, Vec<(f64, u64)>),
}

impl Sample {
    /// Adds the value of another sample of the same metric. Histograms are not added.
    fn add(&mut self, other: &Sample) {
        match (self, other) {
            (Sample::Gauge(sum), Sample::Gauge(value))
            | (Sample::Counter(sum), Sample::Counter(value)) => *sum += value,
            _ => {}
        }
    }
}

struct Family {
    help: String,
    /// The base unit with which the metric's name ends, or an empty string.
    unit: &'static str,
    kind: Kind,
    samples: Vec<(Labels, Sample)>,
}

/// Limits of the number of series.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Maximum number of VMs with metrics.
    pub vms_max: usize,
    /// Whether VMs have no histograms, and one series in place of those that differ in a label.
    pub vm_totals_only: bool,
}

/// The metrics that one answer of the exporter contains, by their names.
pub struct Scrape {
    families: BTreeMap<&'static str, Family>,
    limits: Limits,
}

fn rounded(value: i64, step: i64) -> i64 {
    value.div_euclid(step) * step
}

/// Returns the number that the metric of a figure shows. `step` is the rounding step in bytes.
fn number(row: &Statistic, figures: &Value, step: i64) -> i64 {
    let value = match &figures[row.field] {
        Value::Bool(value) => i64::from(*value),
        // Each value of a list includes the value before it, so the last value is the total.
        Value::Array(values) => values.last().and_then(Value::as_i64).unwrap_or(0),
        value => value.as_i64().unwrap_or(0),
    };
    let step_of_unit = match row.unit {
        "bytes" => step,
        _ => step / PAGE_BYTES,
    };
    let value = match row.export {
        Export::Steps | Export::RestInSteps => rounded(value, step_of_unit),
        _ => value,
    };
    if !matches!(row.export, Export::Rest | Export::RestInSteps) {
        return value;
    }
    let of_metric =
        |other: &&Statistic| other.field != row.field && other.metric().0 == row.metric().0;
    let others = Statistic::in_scope(row.scope).filter(of_metric);
    value
        - others
            .map(|other| number(other, figures, step))
            .sum::<i64>()
}

/// Converts the bucket counts of the daemon's histograms. The upper bounds are 1, 2, 4, … µs in
/// the daemon's figures, and in seconds in the result.
fn buckets(counts: &[Value]) -> Vec<(f64, u64)> {
    let bound = |nth: usize| match nth + 1 == counts.len() {
        // The daemon's last bucket has no upper bound. The encoder writes the largest number as
        // +Inf.
        true => f64::MAX,
        false => (1u64 << nth) as f64 / 1e6,
    };
    let counts = counts.iter().map(|count| count.as_u64().unwrap_or(0));
    counts
        .enumerate()
        .map(|(nth, count)| (bound(nth), count))
        .collect()
}

impl Scrape {
    /// Converts the daemon's reply to metrics. `reply` is None if the daemon did not answer.
    pub fn new(reply: Option<&GetStats_Reply>, took: Duration, limits: Limits) -> Scrape {
        let vms_max = limits.vms_max;
        let mut scrape = Scrape {
            families: BTreeMap::new(),
            limits,
        };
        let up = f64::from(u8::from(reply.is_some()));
        let help = "1 if the daemon answered, otherwise 0";
        scrape.gauge("tmem_up", help, "", up);
        let help = "duration of the request to the daemon";
        scrape.gauge(
            "tmem_scrape_duration_seconds",
            help,
            "seconds",
            took.as_secs_f64(),
        );
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        scrape.info(
            "tmem_exporter_build_info",
            "version of the exporter",
            version,
        );
        let Some(reply) = reply else { return scrape };
        let left_out = reply.vms.len().saturating_sub(vms_max);
        let help = "number of VMs above --vms-max, whose metrics are left out";
        scrape.gauge("tmem_exporter_vms_left_out", help, "", left_out as f64);
        let version = vec![("version", reply.daemon.version.as_str())];
        scrape.info("tmem_daemon_build_info", "version of the daemon", version);
        for vm in reply.vms.iter().take(vms_max) {
            let labels = vec![
                ("vm", vm.name.as_str()),
                ("uuid", vm.uuid.as_deref().unwrap_or_default()),
                (
                    "trust_domain",
                    vm.trust_domain.as_deref().unwrap_or_default(),
                ),
            ];
            let help =
                "UUID of the libvirt domain and trust domain of the VM; empty if it has none";
            scrape.info("tmem_vm_info", help, labels);
        }
        let step_bytes = (reply.pool.size_bytes / STEP_DIVISOR).max(STEP_BYTES_MIN);
        let figures = |figures: serde_json::Result<Value>| figures.unwrap_or_default();
        let daemon = figures(serde_json::to_value(&reply.daemon));
        scrape.add(Scope::Daemon, &daemon, &[], step_bytes);
        let pool = figures(serde_json::to_value(&reply.pool));
        scrape.add(Scope::Pool, &pool, &[], step_bytes);
        for vm in reply.vms.iter().take(vms_max) {
            let labels = [("vm".to_string(), vm.name.clone())];
            let figures = figures(serde_json::to_value(vm));
            scrape.add(Scope::Vm, &figures, &labels, step_bytes);
            scrape.add(Scope::Driver, &figures["driver"], &labels, step_bytes);
        }
        scrape
    }

    /// Adds a gauge that describes the exporter itself, not the daemon.
    fn gauge(&mut self, name: &'static str, help: &str, unit: &'static str, value: f64) {
        let family = Family {
            help: help.into(),
            unit,
            kind: Kind::Gauge,
            samples: vec![(Labels::new(), Sample::Gauge(value))],
        };
        self.families.insert(name, family);
    }

    /// Adds a series to an info metric. Its value is always 1; the labels contain the information.
    fn info(&mut self, name: &'static str, help: &str, labels: Vec<(&str, &str)>) {
        let family = self.families.entry(name).or_insert_with(|| Family {
            help: help.into(),
            unit: "",
            kind: Kind::Gauge,
            samples: Vec::new(),
        });
        let labels = labels
            .into_iter()
            .map(|(key, value)| (key.into(), value.into()));
        family.samples.push((labels.collect(), Sample::Gauge(1.0)));
    }

    fn add(&mut self, scope: Scope, figures: &Value, labels: &[(String, String)], step: i64) {
        let totals_only = self.limits.vm_totals_only && matches!(scope, Scope::Vm | Scope::Driver);
        for row in Statistic::in_scope(scope).filter(|row| row.export != Export::No) {
            if totals_only && row.kind == Kind::Histogram {
                continue;
            }
            let value = &figures[row.field];
            let (name, label) = row.metric();
            let family = self
                .families
                .entry(name)
                .or_insert_with(|| family(name, row, totals_only));
            let mut push = |extra: Option<(&str, &str)>, sample: Sample| {
                // No series of a metric counts what another one counts, so their sum is the total.
                // The state of the driver keeps its label, because a sum of states means nothing.
                let extra = extra.filter(|_| !totals_only || row.kind == Kind::Text);
                let extra = extra.map(|(key, value)| (key.into(), value.into()));
                let labels: Labels = labels.iter().cloned().chain(extra).collect();
                let same = |(other, _): &&mut (Labels, Sample)| totals_only && *other == labels;
                match family.samples.last_mut().filter(same) {
                    Some((_, total)) => total.add(&sample),
                    None => family.samples.push((labels, sample)),
                }
            };
            if row.field == "state" {
                let is = value.as_str().unwrap_or("none");
                for state in DRIVER_STATES {
                    if totals_only && is != state {
                        continue;
                    }
                    let value = f64::from(u8::from(is == state));
                    push(Some(("state", state)), Sample::Gauge(value));
                }
                continue;
            }
            let one = |number: i64| {
                let number = match row.unit {
                    "ms" => number as f64 / 1e3,
                    _ => number as f64,
                };
                match row.kind {
                    Kind::Counter => Sample::Counter(number),
                    _ => Sample::Gauge(number),
                }
            };
            match (value, &label) {
                // A null value means that the driver has not reported this figure, or that the VM
                // has no limit. The metric then gets no sample.
                (Value::Null, _) => {}
                (Value::Array(values), Some((key, of))) => {
                    let mut before = 0;
                    for (value, of) in values.iter().zip(of) {
                        let value = value.as_i64().unwrap_or(0);
                        push(Some((key, of)), one(value - before));
                        before = value;
                    }
                }
                (Value::Object(histogram), label) => {
                    let sum = histogram["sum_ns"].as_i64().unwrap_or(0) as f64 / 1e9;
                    let counts = histogram["buckets"]
                        .as_array()
                        .map_or(&[][..], Vec::as_slice);
                    let label = label.as_ref().map(|(key, of)| (*key, of[0]));
                    push(label, Sample::Histogram(sum, buckets(counts)));
                }
                (_, label) => {
                    let label = label.as_ref().map(|(key, of)| (*key, of[0]));
                    push(label, one(number(row, figures, step)));
                }
            }
        }
    }

    /// Returns the metrics in OpenMetrics' text format.
    pub fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Creates a metric family without samples. If several figures form one metric, they get a common
/// help text. `total` says that the family has their total only.
fn family(name: &str, row: &Statistic, total: bool) -> Family {
    let figures = Statistic::all().filter(|other| other.metric().0 == name);
    let help = match (row.metric().1, figures.count()) {
        (Some((key, _)), 2..) if total => {
            format!("total of the figures that docs/statistics.md lists by {key}")
        }
        (Some((key, _)), 2..) => {
            format!("figures by {key}; docs/statistics.md explains each value of the label {key}")
        }
        _ => row.meaning.into(),
    };
    let unit = match name {
        name if name.ends_with("_bytes") => "bytes",
        name if name.ends_with("_seconds") => "seconds",
        _ => "",
    };
    // A figure whose value is the name of a state, such as "on", becomes one gauge for each state.
    let kind = if row.kind == Kind::Text {
        Kind::Gauge
    } else {
        row.kind
    };
    Family {
        help,
        unit,
        kind,
        samples: Vec::new(),
    }
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

fn encode(encoder: &mut MetricEncoder<'_>, sample: &Sample) -> fmt::Result {
    match sample {
        Sample::Gauge(value) => encoder.encode_gauge(value),
        Sample::Counter(value) => encoder.encode_counter(value, NoExemplar::None),
        Sample::Histogram(sum, buckets) => {
            let count = buckets.iter().map(|(_, count)| count).sum();
            encoder.encode_histogram::<Labels>(*sum, count, buckets, None)
        }
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, family) in &self.families {
            let unit = match family.unit {
                "bytes" => Some(Unit::Bytes),
                "seconds" => Some(Unit::Seconds),
                _ => None,
            };
            // The encoder appends the unit to the metric's name, so pass the name to it without the
            // unit.
            let suffix = unit
                .as_ref()
                .map_or(String::new(), |unit| format!("_{}", unit.as_str()));
            let name = name.strip_suffix(&suffix).unwrap_or(name);
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Histogram => MetricType::Histogram,
                Kind::Gauge | Kind::Text => MetricType::Gauge,
            };
            let mut metric = encoder.encode_descriptor(name, &family.help, unit.as_ref(), kind)?;
            for (labels, sample) in &family.samples {
                if labels.is_empty() {
                    encode(&mut metric, sample)?;
                } else {
                    encode(&mut metric.encode_family(labels)?, sample)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_values_are_rounded_down_to_multiples_of_a_step() {
        let step = STEP_BYTES_MIN;
        assert_eq!(rounded(0, step), 0);
        assert_eq!(rounded(step - 1, step), 0);
        assert_eq!(rounded(step + PAGE_BYTES, step), step);
        assert_eq!(
            rounded(-1, step),
            -step,
            "a negative value was not rounded down to a step"
        );
    }

    #[test]
    fn an_unreachable_daemon_sets_tmem_up_to_0() {
        let limits = Limits {
            vms_max: 8,
            vm_totals_only: false,
        };
        let text = Scrape::new(None, Duration::from_millis(5), limits)
            .text()
            .expect("the metrics are not valid text");
        assert!(
            text.contains("tmem_up 0.0\n"),
            "the metrics do not contain tmem_up 0.0: {text}"
        );
        assert!(
            text.contains("tmem_scrape_duration_seconds 0.005\n"),
            "the metrics have the wrong scrape duration: {text}"
        );
        assert!(
            text.ends_with("# EOF\n"),
            "the metrics do not end with # EOF: {text}"
        );
    }

    #[test]
    fn histogram_bounds_double_from_one_microsecond() {
        let counts: Vec<Value> = (0..4).map(Value::from).collect();
        assert_eq!(
            buckets(&counts),
            [(1e-6, 0), (2e-6, 1), (4e-6, 2), (f64::MAX, 3)]
        );
    }

    /// Some figures are exact totals, and other figures, which are parts of them, are rounded. The
    /// difference must not reveal more about a part than its rounded value does.
    #[test]
    fn metrics_do_not_reveal_the_exact_number_of_shared_pages() {
        let figures = |shared: i64| {
            serde_json::json!({
                "pages": 1000, "nursery_pages": 100, "same_filled_pages": 10, "shared_pages": shared,
                "held_bytes": 10 << 20, "payload_bytes": (3 << 20) + 5, "metadata_bytes": 1 << 20,
            })
        };
        let value = |field: &str, figures: &Value| {
            let row = Statistic::in_scope(Scope::Pool).find(|row| row.field == field);
            number(
                row.expect("a row of figures has no number"),
                figures,
                STEP_BYTES_MIN,
            )
        };
        assert_eq!(value("pages", &figures(256)), 1000 - 100 - 10 - 256);
        for shared in 257..512 {
            let [now, before] = [shared, 256].map(figures);
            assert_eq!(value("pages", &now), value("pages", &before));
        }
        assert_eq!(value("held_bytes", &figures(0)), 6 << 20);
    }
}
