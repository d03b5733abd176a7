// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats the output of `tmemctl list`, `stats` and `quota` as text.

use crate::exit::Failure;
use crate::table::{Align, Column, Sizes, TableArguments, choose, column, percent, ratio, row};
use tmem_control as api;
use tmem_control::statistics::{Kind, Scope, Statistic};
use tmem_libvirt::domain::{Cache, write_size};

fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.into()
}

fn or_dash(value: Option<&str>) -> String {
    value.unwrap_or("-").into()
}

/// Formats a size that may be unknown.
pub fn size_or_dash(bytes: Option<i64>, sizes: Sizes) -> String {
    bytes.map_or("-".into(), |bytes| sizes.text(bytes))
}

/// Formats a percentage without a blank before the percent sign, so that programs can split a row
/// of a table into words.
pub fn percent_word(part: i64, whole: i64) -> String {
    percent(part, whole).replace(' ', "")
}

/// Columns of the table that `tmemctl list` prints.
const LIST: [Column<api::Vm>; 14] = [
    column("NAME", Align::Left, |vm, _| vm.name.clone()),
    column("CONNECTED", Align::Left, |vm, _| yes_no(vm.connected)),
    column("FROZEN", Align::Left, |vm, _| yes_no(vm.frozen)),
    column("TRUST-DOMAIN", Align::Left, |vm, _| {
        or_dash(vm.trust_domain.as_deref())
    }),
    column("RESERVE", Align::Right, |vm, sizes| {
        sizes.text(vm.quota.reserve_bytes)
    }),
    column("LIMIT", Align::Right, |vm, sizes| {
        let limit = vm.quota.limit_bytes;
        limit.map_or("-".into(), |limit| sizes.text(limit))
    }),
    column("WEIGHT", Align::Right, |vm, _| vm.quota.weight.to_string()),
    column("MEMORY", Align::Right, |vm, sizes| {
        size_or_dash(vm.memory_bytes, sizes)
    }),
    column("RESIDENT", Align::Right, |vm, sizes| {
        size_or_dash(vm.memory_resident_bytes, sizes)
    }),
    column("PAGES", Align::Right, |vm, _| {
        vm.pages.map_or("-".into(), |pages| pages.to_string())
    }),
    column("CHARGED", Align::Right, |vm, sizes| {
        size_or_dash(vm.charged_bytes, sizes)
    }),
    column("UUID", Align::Left, |vm, _| or_dash(vm.uuid.as_deref())),
    column("SOCKET", Align::Left, |vm, _| vm.socket.clone()),
    // The problem of a VM is a sentence, so the table has no column for it by default. `list`
    // prints it on a line below the table, unless the user selects columns or switches the headings
    // off.
    Column {
        name: "PROBLEM",
        align: Align::Left,
        usual: false,
        cell: |vm, _| or_dash(vm.problem.as_deref()).replace(char::is_control, " "),
    },
];

/// Columns of the table that `tmemctl stats` prints.
const STATS: [Column<api::VmStats>; 13] = [
    column("NAME", Align::Left, |vm, _| vm.name.clone()),
    column("CONNECTED", Align::Left, |vm, _| yes_no(vm.connected)),
    column("PAGES", Align::Right, |vm, _| vm.pages.to_string()),
    column("ORIGINAL", Align::Right, |vm, sizes| {
        sizes.text(vm.original_bytes)
    }),
    column("CHARGED", Align::Right, |vm, sizes| {
        sizes.text(vm.charged_bytes)
    }),
    column("ENTITLED", Align::Right, |vm, sizes| {
        sizes.text(vm.entitled_bytes)
    }),
    column("PUTS", Align::Right, |vm, _| vm.puts.to_string()),
    column("REFUSED", Align::Right, |vm, _| vm.puts_refused.to_string()),
    column("GETS", Align::Right, |vm, _| vm.gets.to_string()),
    column("HITS", Align::Right, |vm, _| vm.hits.to_string()),
    column("HIT-RATE", Align::Right, |vm, _| {
        percent_word(vm.hits, vm.gets)
    }),
    column("EVICTED", Align::Right, |vm, _| vm.evictions.to_string()),
    column("DRIVER", Align::Left, |vm, _| {
        or_dash(vm.driver.as_ref().map(|driver| driver.state.as_str()))
    }),
];

/// Formats the daemon's VMs as a table. Below it is a line for each VM that has a problem, unless
/// the user selects columns or switches the headings off.
pub fn list_text(vms: &[api::Vm], arguments: &TableArguments) -> Result<String, Failure> {
    let mut text = choose(&LIST, vms, arguments)?;
    if arguments.is_chosen() {
        return Ok(text);
    }
    for vm in vms {
        if let Some(problem) = &vm.problem {
            let problem = problem.replace(char::is_control, " ");
            text += &format!(
                "\n{}: the requested settings are not in effect: {problem}\n",
                vm.name
            );
        }
    }
    Ok(text)
}

/// Formats the statistics of VMs as a table with a row for each VM.
pub fn stats_table(vms: &[api::VmStats], arguments: &TableArguments) -> Result<String, Failure> {
    choose(&STATS, vms, arguments)
}

/// Formats the statistics: two lines for the daemon, three lines for the pool, one for the memory
/// of the VMs, and a row for each VM.
pub fn overview_text(
    reply: &api::GetStats_Reply,
    vms: &[api::VmStats],
    arguments: &TableArguments,
) -> Result<String, Failure> {
    let (daemon, pool) = (&reply.daemon, &reply.pool);
    let size = |bytes| arguments.sizes().text(bytes);
    let shrunk = if pool.size_bytes < pool.configured_bytes {
        format!(
            "; smaller than the configured {} because the host is short of memory",
            size(pool.configured_bytes)
        )
    } else {
        String::new()
    };
    Ok(format!(
        "daemon  {} pid {}, up {} s, {} workers, {} of {} VMs connected\n\
         \x20       {} of processor time for requests, {} in the background: {} new pages, {} cold pages, {} reclaim\n\
         pool    {} of {} held ({}): {} of pages, {} of metadata{}\n\
         \x20       {} pages of {}, {} per byte held; {} same-filled, {} shared, {} evicted\n\
         \x20       {} of host RAM saved\n\
         memory  {} of the VMs' {} resident, {} saved after the pool's {}\n\n{}",
        daemon.version,
        daemon.pid,
        daemon.uptime_seconds,
        daemon.workers,
        daemon.vms_connected,
        daemon.vms,
        seconds_text(daemon.cpu_requests_ms),
        seconds_text(daemon.cpu_background_ms),
        seconds_text(daemon.cpu_finalize_ms),
        seconds_text(daemon.cpu_recompress_ms),
        seconds_text(daemon.cpu_reclaim_ms),
        size(pool.held_bytes),
        size(pool.size_bytes),
        percent(pool.held_bytes, pool.size_bytes),
        size(pool.payload_bytes),
        size(pool.metadata_bytes),
        shrunk,
        pool.pages,
        size(pool.original_bytes),
        ratio(pool.original_bytes, pool.held_bytes),
        pool.same_filled_pages,
        pool.shared_pages,
        pool.evictions,
        size(pool.saved_bytes),
        size(daemon.memory_resident_bytes),
        size(daemon.memory_bytes),
        size(daemon.memory_saved_bytes),
        size(pool.held_bytes),
        stats_table(vms, arguments)?
    ))
}

fn seconds_text(ms: i64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

/// Formats the value of one statistic, whose name and unit are in `row`.
fn statistic_text(row: &Statistic, value: &serde_json::Value, sizes: Sizes) -> String {
    use serde_json::Value;
    match value {
        Value::Bool(value) => yes_no(*value),
        Value::Number(number) if row.unit == "bytes" => sizes.text(number.as_i64().unwrap_or(0)),
        Value::Number(number) if row.field == "hooks" => {
            format!("{:#x}", number.as_i64().unwrap_or(0))
        }
        // The value of a statistic is null if the VM has no limit, UUID or trust domain, or if the
        // guest's driver has not reported it.
        Value::Null => "-".into(),
        Value::String(text) => text.replace(char::is_control, " "),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(Value::to_string).collect();
            let (_, label) = row.metric();
            let of = label.map_or(String::new(), |(key, values)| {
                format!(" ({}: {})", key.replace('_', " "), values.join(", "))
            });
            values.join(", ") + &of
        }
        value => value.to_string(),
    }
}

/// Formats a histogram of latencies: number of requests, mean time, and the bucket bound that 99 %
/// of the requests do not exceed.
pub fn latency_text(histogram: &api::Histogram) -> String {
    let count: i64 = histogram.buckets.iter().sum();
    if count == 0 {
        return "-".into();
    }
    let mean_us = histogram.sum_ns as f64 / count as f64 / 1000.0;
    let mut seen = 0;
    let most = histogram.buckets.iter().position(|bucket| {
        seen += bucket;
        seen * 100 >= count * 99
    });
    let last = histogram.buckets.len() - 1;
    let below = match most {
        Some(bucket) if bucket < last => format!("99 % below {} µs", 1u64 << bucket),
        _ => format!("fewer than 99 % below {} µs", 1u64 << (last - 1)),
    };
    format!("{count} requests, mean {mean_us:.1} µs, {below}")
}

/// Formats all figures of one VM, each on a line.
pub fn vm_text(vm: &api::VmStats, sizes: Sizes) -> String {
    let name = |row: &Statistic| row.field.trim_end_matches("_bytes").replace('_', " ");
    let mut rows: Vec<(String, String)> = Vec::new();
    let figures = serde_json::to_value(vm).unwrap_or_default();
    for row in Statistic::in_scope(Scope::Vm).filter(|row| row.field != "driver") {
        let text = match row.field {
            "hits" => format!("{} ({})", vm.hits, percent(vm.hits, vm.gets)),
            "put_latency" => latency_text(&vm.put_latency),
            "get_latency" => latency_text(&vm.get_latency),
            "flush_latency" => latency_text(&vm.flush_latency),
            "ref_latency" => latency_text(&vm.ref_latency),
            "wait_latency" => latency_text(&vm.wait_latency).replace("requests", "slices"),
            field => statistic_text(row, &figures[field], sizes),
        };
        debug_assert!(row.kind != Kind::Histogram || row.field.ends_with("_latency"));
        rows.push((name(row), text));
    }
    if let Some(driver) = &vm.driver {
        for row in Statistic::in_scope(Scope::Driver) {
            let text = match row.field {
                "get_latency" => driver.get_latency.as_ref().map_or("-".into(), latency_text),
                field => statistic_text(row, &figures["driver"][field], sizes),
            };
            rows.push((format!("driver {}", name(row)), text));
        }
    }
    let width = rows.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    rows.iter()
        .map(|(key, value)| format!("{key:<width$}  {value}\n"))
        .collect()
}

/// Adds the fields of a quota to a JSON object.
pub fn quota_json(json: &mut serde_json::Value, cache: &Cache) {
    json["limit_bytes"] = cache.limit.into();
    json["reserve_bytes"] = cache.reserve.unwrap_or(0).into();
    json["weight"] = cache.weight.unwrap_or(api::WEIGHT_DEFAULT).into();
    json["trust_domain"] = cache.trust_domain.clone().into();
}

/// Formats a quota as text, with sizes in bytes or in the largest unit that needs no fraction.
pub fn quota_text(cache: &Cache, in_bytes: bool) -> String {
    let size = |bytes: u64| {
        if in_bytes {
            return bytes.to_string();
        }
        let (number, unit) = write_size(bytes);
        format!("{number} {unit}")
    };
    let rows = [
        ("limit", cache.limit.map_or("unlimited".into(), size)),
        ("reserve", size(cache.reserve.unwrap_or(0))),
        (
            "weight",
            cache.weight.unwrap_or(api::WEIGHT_DEFAULT).to_string(),
        ),
        (
            "trust_domain",
            cache.trust_domain.clone().unwrap_or_else(|| "-".into()),
        ),
    ];
    rows.iter().map(|(key, value)| row(key, value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_shows_the_99th_percentile() {
        let mut histogram = api::Histogram {
            sum_ns: 0,
            buckets: vec![0; 16],
        };
        assert_eq!(latency_text(&histogram), "-");
        histogram.buckets[3] = 99;
        histogram.buckets[9] = 1;
        histogram.sum_ns = 700_000;
        let text = "100 requests, mean 7.0 µs, 99 % below 8 µs";
        assert_eq!(latency_text(&histogram), text);
        histogram.buckets[15] = 10;
        assert!(latency_text(&histogram).ends_with("fewer than 99 % below 16384 µs"));
    }
}
