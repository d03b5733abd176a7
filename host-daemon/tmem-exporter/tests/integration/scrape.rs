// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the exporter with a daemon: its answers, its access check, and its limits for clients.

use crate::common::{Exporter, ServedDaemon, TIMEOUT, http};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use tmem_control::statistics::{Export, Kind, Statistic};

/// Returns the lines of `text` that are samples of the metric `name`.
fn samples<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let of_name = |line: &&str| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with([' ', '{']))
    };
    text.lines().filter(of_name).collect()
}

#[test]
fn every_exported_statistic_has_a_metric() {
    let mut host = ServedDaemon::new();
    host.work(200);
    let exporter = Exporter::start(&host, &[]);
    let text = exporter.metrics("");
    for row in Statistic::all().filter(|row| row.export != Export::No) {
        let suffix = match row.kind {
            Kind::Counter => "_total",
            Kind::Histogram => "_bucket",
            Kind::Gauge | Kind::Text => "",
        };
        let name = format!("{}{suffix}", row.metric().0);
        // Metrics of the guest's driver may be missing, because the simulated driver sends no
        // report, or an empty one.
        if !name.starts_with("tmem_vm_driver_") {
            assert!(
                !samples(&text, &name).is_empty(),
                "metric {name} is missing in\n{text}"
            );
        }
    }
    assert_eq!(samples(&text, "tmem_up"), ["tmem_up 1.0"]);
    let state = samples(&text, "tmem_vm_driver_state");
    assert_eq!(
        state.len(),
        2 * 7,
        "the driver's state does not have 7 samples for each of 2 VMs: {state:?}"
    );
}

/// The metrics show the same numbers as the figures that the daemon returns on its control socket.
#[test]
fn metrics_equal_the_statistics_of_the_daemon() {
    let mut host = ServedDaemon::new();
    host.work(300);
    let exporter = Exporter::start(&host, &[]);
    let stats = host.stats("a");
    let text = exporter.metrics("");
    let value = |name: &str| {
        let line = samples(&text, name)
            .into_iter()
            .find(|line| line.contains("vm=\"a\""));
        let line = line.unwrap_or_else(|| panic!("metric {name} is missing"));
        line.rsplit(' ')
            .next()
            .and_then(|value| value.parse::<f64>().ok())
            .expect("the sample is not a number")
    };
    assert!(stats.hits > 0 && stats.puts > 0);
    assert_eq!(value("tmem_vm_hit_pages_total"), stats.hits as f64);
    assert_eq!(value("tmem_vm_get_pages_total"), stats.gets as f64);
    assert_eq!(value("tmem_vm_put_pages_total"), stats.puts as f64);
    // The sum over all series of a metric counts each page once.
    let sum = |name: &str| -> f64 {
        let of_vm = samples(&text, name);
        let of_vm = of_vm.iter().filter(|line| line.contains("vm=\"a\""));
        of_vm
            .map(|line| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()))
            .map(|number| number.expect("the sample is not a number"))
            .sum()
    };
    assert_eq!(sum("tmem_vm_pages"), stats.pages as f64);
    assert_eq!(
        sum("tmem_vm_gain_hit_pages_total"),
        stats.gain_hits[2] as f64
    );
    assert_eq!(
        sum("tmem_vm_loss_hit_pages_total"),
        stats.loss_hits_seen as f64
    );
    assert_eq!(
        value("tmem_vm_disk_read_avoided_bytes_total"),
        stats.hits as f64 * 4096.0
    );
    let count = |request: &str| {
        let name = "tmem_vm_request_duration_seconds_count";
        let all = samples(&text, name);
        let line = all
            .iter()
            .find(|line| line.contains(request) && line.contains("vm=\"a\""));
        line.expect("the metric has no sample")
            .rsplit(' ')
            .next()
            .and_then(|n| n.parse::<i64>().ok())
    };
    let gets: i64 = stats.get_latency.buckets.iter().sum();
    assert_eq!(count("request=\"get\""), Some(gets));
}

/// A metric by which a guest could observe another guest's pages is rounded to steps, or missing.
#[test]
fn shared_page_metrics_are_rounded_to_steps() {
    let mut host = ServedDaemon::new();
    host.work(50);
    let exporter = Exporter::start(&host, &[]);
    let text = exporter.metrics("");
    assert!(!text.contains("tmem_vm_shared") && !text.contains("tmem_vm_finalized_shared"));
    let in_steps = |row: &&Statistic| matches!(row.export, Export::Steps | Export::RestInSteps);
    for row in Statistic::all().filter(in_steps) {
        let step = if row.unit == "bytes" { 1 << 20 } else { 256 };
        let (name, label) = row.metric();
        let label = label.map_or(String::new(), |(key, of)| format!("{key}=\"{}\"", of[0]));
        let lines = samples(&text, name);
        for line in lines.iter().filter(|line| line.contains(&label)) {
            let value: f64 = line
                .rsplit(' ')
                .next()
                .and_then(|v| v.parse().ok())
                .expect("the sample is not a number");
            assert_eq!(
                value as i64 % step,
                0,
                "the sample is not a multiple of {step}: {line}"
            );
        }
    }
}

/// The metric tmem_vm_info has the UUID of a VM's libvirt domain. A query can use it to join
/// libvirt's metrics with those of tmem-exporter.
#[test]
fn info_metrics_describe_vms_and_versions() {
    let host = ServedDaemon::new();
    let exporter = Exporter::start(&host, &[]);
    let text = exporter.metrics("");
    let info = "tmem_vm_info{vm=\"a\",uuid=\"01234567-89ab-cdef-0123-456789abcdef\",trust_domain=\"\"} 1.0";
    assert_eq!(samples(&text, "tmem_vm_info")[0], info);
    for (name, value) in [
        ("tmem_vm_limit_bytes", "67108864.0"),
        ("tmem_vm_reserve_bytes", "0.0"),
        ("tmem_vm_weight", "100.0"),
    ] {
        let is = format!("{name}{{vm=\"a\"}} {value}");
        assert_eq!(samples(&text, name)[0], is);
    }
    // VM `b` has no limit, so the metric tmem_vm_limit_bytes has a sample for VM `a` only.
    assert_eq!(samples(&text, "tmem_vm_limit_bytes").len(), 1);
    let version = env!("CARGO_PKG_VERSION");
    for program in ["daemon", "exporter"] {
        let name = format!("tmem_{program}_build_info");
        let is = format!("{name}{{version=\"{version}\"}} 1.0");
        assert_eq!(samples(&text, &name), [is]);
    }
    let start = samples(&text, "tmem_daemon_start_time_seconds")[0];
    let start: f64 = start
        .rsplit(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .expect("the sample is not a number");
    let now = std::time::UNIX_EPOCH
        .elapsed()
        .expect("the host's clock is before 1970")
        .as_secs_f64();
    assert!(
        start > now - 3600.0 && start <= now,
        "the start time {start} is not within an hour before {now}"
    );
}

#[test]
fn openmetrics_and_classic_text_formats_are_served() {
    let host = ServedDaemon::new();
    let exporter = Exporter::start(&host, &[]);
    let (head, body) = exporter.get(
        "/metrics",
        "Accept: application/openmetrics-text;version=1.0.0\r\n",
    );
    assert!(
        head.contains("Content-Type: application/openmetrics-text"),
        "the response is not OpenMetrics: {head}"
    );
    assert!(body.ends_with("# EOF\n") && body.contains("# TYPE tmem_vm_hit_pages counter"));
    let (head, body) = exporter.get("/metrics", "Accept: text/plain\r\n");
    assert!(
        head.contains("text/plain; version=0.0.4"),
        "the response is not the classic text format: {head}"
    );
    assert!(!body.contains("# EOF") && body.contains("# TYPE tmem_vm_hit_pages_total counter"));
    assert!(exporter.get("/", "").1.contains("/metrics"));
    assert!(exporter.get("/other", "").0.starts_with("HTTP/1.1 404 "));
    assert!(
        http(exporter.address(), "POST /metrics HTTP/1.1\r\n\r\n")
            .0
            .contains(" 405 ")
    );
}

#[test]
fn a_request_without_the_token_is_refused() {
    let host = ServedDaemon::new();
    let file = host.path("token");
    std::fs::write(&file, "0123456789abcdef\n").expect("cannot write the file");
    let exporter = Exporter::start(
        &host,
        &[
            "--token-file",
            file.to_str().expect("the path is not UTF-8"),
        ],
    );
    for header in [
        "",
        "Authorization: Bearer 0123456789abcdee\r\n",
        "Authorization: Bearer 0123456789abcdef0\r\n",
        "Authorization: Basic 0123456789abcdef\r\n",
        "Authorization: 0123456789abcdef\r\n",
    ] {
        for path in ["/metrics", "/", "/other"] {
            let (head, body) = exporter.get(path, header);
            assert!(head.starts_with("HTTP/1.1 401 ") && head.contains("WWW-Authenticate: Bearer"));
            assert!(
                !body.contains("tmem_"),
                "the response without the token has metrics: {body}"
            );
        }
    }
    assert!(
        exporter
            .metrics("Authorization: Bearer 0123456789abcdef\r\n")
            .contains("tmem_up")
    );
}

#[test]
fn a_public_listen_address_requires_a_token() {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmem-exporter"));
        let output = command
            .args(arguments)
            .output()
            .expect("cannot run the program");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("the output is not UTF-8")
    };
    let error = run(&["--web.listen-address", "0.0.0.0:0"]);
    assert!(
        error.contains("0.0.0.0:0") && error.contains("--token-file"),
        "the error does not name the address and --token-file: {error}"
    );
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let file = directory.path().join("token");
    std::fs::write(&file, "short").expect("cannot write the file");
    let error = run(&[
        "--token-file",
        file.to_str().expect("the path is not UTF-8"),
    ]);
    assert!(
        error.contains("16 or more") && error.contains("openssl"),
        "the error does not give the token's length and how to create one: {error}"
    );
    let error = run(&["--token-file", "no-such-token"]);
    assert!(
        error.contains("no-such-token"),
        "the error does not name the missing file: {error}"
    );
}

#[test]
fn a_stopped_or_hung_daemon_sets_tmem_up_to_0() {
    let mut host = ServedDaemon::new();
    let exporter = Exporter::start(&host, &[]);
    assert!(exporter.metrics("").contains("tmem_up 1.0"));
    host.stop();
    assert!(exporter.metrics("").contains("tmem_up 0.0"));
    // Connections to this socket succeed, but no process answers, as with a daemon that hangs.
    let _hangs = std::os::unix::net::UnixListener::bind(host.path("read-only"))
        .expect("cannot bind the socket");
    let text = exporter.metrics("");
    assert!(
        text.contains("tmem_up 0.0") && !text.contains("tmem_vm_hit_pages"),
        "the metrics do not report that the daemon is down: {text}"
    );
}

#[test]
fn misbehaving_clients_do_not_block_other_clients() {
    let host = ServedDaemon::new();
    let exporter = Exporter::start(&host, &[]);
    for request in [
        "nonsense\r\n\r\n".to_string(),
        "\0\0\0\0".into(),
        format!(
            "GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n",
            "x".repeat(1 << 20)
        ),
        format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(1000)),
        format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000)),
    ] {
        let (head, _) = http(exporter.address(), &request);
        assert!(
            head.is_empty() || head.starts_with("HTTP/1.1 4"),
            "the invalid request got an answer other than 4xx: {head}"
        );
        assert!(
            exporter.metrics("").contains("tmem_up 1.0"),
            "the exporter does not serve scrapes after invalid requests"
        );
    }
    // Each of these clients sends only the beginning of a request. There are more of them than the
    // exporter serves or lets wait. Others are served nevertheless, and at once.
    let slow = |clients: usize| -> Vec<TcpStream> {
        let connect = |_| {
            let mut stream =
                TcpStream::connect(exporter.address()).expect("cannot connect to the TCP port");
            // The exporter may have disconnected the client already.
            let _ = stream.write_all(b"GET /met");
            stream
        };
        (0..clients).map(connect).collect()
    };
    let mut all = Vec::new();
    for clients in [8, 64, 8, 64] {
        all.extend(slow(clients));
        assert!(
            exporter.metrics("").contains("tmem_up 1.0"),
            "the exporter does not serve clients beside {} slow clients",
            all.len()
        );
    }
    let slow = all;
    for mut stream in slow {
        stream
            .set_read_timeout(Some(TIMEOUT))
            .expect("cannot set the socket's time-out");
        let mut answer = String::new();
        // The exporter has disconnected many of the clients, so errors are ignored.
        let _ = stream.read_to_string(&mut answer);
        assert!(
            answer.is_empty() || answer.contains(" 408 "),
            "the slow client got an answer other than 408: {answer}"
        );
    }
}

#[test]
fn metrics_of_vms_beyond_vms_max_are_left_out() {
    let host = ServedDaemon::new();
    let exporter = Exporter::start(&host, &["--vms-max", "1"]);
    let text = exporter.metrics("");
    assert!(text.contains("vm=\"a\"") && !text.contains("vm=\"b\""));
    assert!(
        text.contains("tmem_exporter_vms_left_out 1.0"),
        "the metrics do not count the VM that was left out: {text}"
    );
}

/// Returns the series of the VM `a` in a scrape: the name and labels of each sample, and its value.
fn series_of_a(text: &str) -> Vec<(&str, f64)> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let of_a = samples.filter(|line| line.contains("vm=\"a\""));
    of_a.map(|line| line.rsplit_once(' ').expect("a sample has no value"))
        .map(|(name, value)| (name, value.parse().expect("the sample is not a number")))
        .collect()
}

/// Hosts whose VMs live for minutes need few series for each VM. Every total remains.
#[test]
fn the_option_vm_totals_only_leaves_out_histograms_and_reasons() {
    let mut host = ServedDaemon::new();
    // The guest sends the report of its driver, and the driver's latencies, at random times.
    let complete = |host: &ServedDaemon| {
        let report = host.stats("a").driver;
        report.is_some_and(|report| report.get_latency.is_some())
    };
    while !complete(&host) {
        host.work(100);
    }
    let full = Exporter::start(&host, &[]).metrics("");
    let text = Exporter::start(&host, &["--vm-totals-only"]).metrics("");
    let (all, few) = (series_of_a(&full), series_of_a(&text));
    let documented = format!(
        "A VM has {} series, and {} with `--vm-totals-only`",
        all.len(),
        few.len()
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let mut document = std::fs::read_to_string(path).expect("cannot read docs/metrics.md");
    let from = document
        .find("A VM has ")
        .expect("the page does not name the number of series");
    let end = "`--vm-totals-only`";
    let to = from + document[from..].find(end).expect("the sentence has no end") + end.len();
    if std::env::var_os("TMEM_WRITE_DOCS").is_some() {
        document.replace_range(from..to, &documented);
        std::fs::write(path, &document).expect("cannot write docs/metrics.md");
    } else {
        assert_eq!(
            &document[from..to],
            documented,
            "docs/metrics.md is outdated: run this test with TMEM_WRITE_DOCS=1"
        );
    }
    let base = |name: &str| {
        name.split_once('{')
            .expect("a series has no label")
            .0
            .to_string()
    };
    for (name, value) in &few {
        let labels: Vec<&str> = ["vm=", "uuid=", "trust_domain=", "state="]
            .into_iter()
            .filter(|label| name.contains(label))
            .collect();
        assert_eq!(
            name.matches("=\"").count(),
            labels.len(),
            "{name} has a further label"
        );
        // Other figures may change between the two scrapes, because the daemon works in the
        // background.
        let of_all = all.iter().filter(|(other, _)| base(other) == base(name));
        if of_all.clone().count() > 1 {
            let total: f64 = of_all.map(|(_, value)| value).sum();
            assert_eq!(*value, total, "{name} is not the total of its series");
        }
    }
    let state = samples(&text, "tmem_vm_driver_state");
    let state: Vec<_> = state
        .iter()
        .filter(|line| line.contains("vm=\"a\""))
        .collect();
    assert!(state.len() == 1 && state[0].ends_with(" 1.0"), "{state:?}");
    // Only histograms are missing.
    let names = |series: &[(&str, f64)]| -> std::collections::BTreeSet<String> {
        series.iter().map(|(name, _)| base(name)).collect()
    };
    let missing: Vec<String> = names(&all).difference(&names(&few)).cloned().collect();
    assert!(
        missing.len() == 9 && missing.iter().all(|name| name.contains("_seconds_")),
        "these metrics are missing: {missing:?}"
    );
    // The pool and the daemon keep all their series.
    let others = |text: &str| {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.filter(|line| !line.contains("vm=")).count()
    };
    assert_eq!(others(&full), others(&text));
}
