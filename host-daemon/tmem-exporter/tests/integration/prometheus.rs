// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests with a real Prometheus: promtool checks the metrics and alert rules, and each query of the
//! dashboard and the rules must have a result. Debian's package `prometheus` has both programs.
//! `make shard NAME=ops` runs these tests.

use crate::common::{Certificate, Exporter, ServedDaemon, TIMEOUT, http};
use serde_json::Value;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn promtool(arguments: &[&str], input: &str) -> (bool, String) {
    let mut command = Command::new("promtool");
    command
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .expect("cannot run promtool (Debian package prometheus)");
    let mut stdin = child.stdin.take().expect("the child process has no pipe");
    // Writing fails if promtool ends without reading its input.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child
        .wait_with_output()
        .expect("cannot wait for the process");
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8(text).expect("the output is not UTF-8"),
    )
}

#[test]
#[ignore = "needs Debian's package prometheus: make shard NAME=ops"]
fn promtool_accepts_the_metrics_and_the_alert_rules() {
    let mut host = ServedDaemon::new();
    host.work(200);
    let exporter = Exporter::start(&host, &[]);
    let (good, output) = promtool(&["check", "metrics"], &exporter.metrics(""));
    assert!(
        good && output.is_empty(),
        "promtool found faults in the metrics: {output}"
    );
    for arguments in [
        &["check", "rules", "alerts.yml"][..],
        &["test", "rules", "alerts_test.yml"],
    ] {
        let (good, output) = promtool(arguments, "");
        assert!(good, "promtool found faults in the rules: {output}");
    }
}

/// Each alert has a test of its rule, and its link leads to a section of the runbook.
#[test]
fn each_alert_has_a_test_and_a_runbook() {
    let of = |text: &str, key: &str| -> Vec<String> {
        let names = text.split(key).skip(1);
        names
            .filter_map(|rest| Some(rest.split([',', '\n', '}']).next()?.trim().to_string()))
            .collect()
    };
    let alerts = of(include_str!("../../alerts.yml"), "- alert:");
    let tested = of(include_str!("../../alerts_test.yml"), "alertname:");
    let sections = of(include_str!("../../../../docs/alerts.md"), "\n## ");
    let links = of(include_str!("../../alerts.yml"), "runbook_url:");
    assert_eq!(sections, alerts);
    for alert in &alerts {
        assert!(
            tested.contains(alert),
            "the rule tests do not test alert {alert}"
        );
        let link = format!("\"docs/alerts.md#{}\"", alert.to_lowercase());
        assert!(
            links.contains(&link),
            "no alert has the runbook link {link}"
        );
    }
    assert_eq!(links.len(), alerts.len());
}

struct Server {
    child: Child,
    address: String,
    _directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Killing fails if Prometheus has already ended, so the error is ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts Prometheus with the alert rules. It scrapes the exporter each second over TLS,
    /// configured as docs/metrics.md describes.
    fn start(exporter: &Exporter, token: &Path, certificate: &Path) -> Server {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let config = directory.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{}/alerts.yml]\n\
             scrape_configs:\n- job_name: tmem\n  authorization: {{credentials_file: {}}}\n  \
             scheme: https\n  tls_config: {{ca_file: {}}}\n  \
             static_configs: [{{targets: ['{}']}}]\n",
            env!("CARGO_MANIFEST_DIR"),
            token.display(),
            certificate.display(),
            exporter.address()
        );
        std::fs::write(&config, text).expect("cannot write the file");
        let (good, output) = promtool(
            &[
                "check",
                "config",
                config.to_str().expect("the path is not UTF-8"),
            ],
            "",
        );
        assert!(good, "promtool found faults in the configuration: {output}");
        // Let the system choose a free port, and release it for Prometheus. If another process
        // takes the port before Prometheus does, the test fails; it cannot pass by mistake.
        let port = TcpListener::bind("127.0.0.1:0").expect("cannot bind a TCP port");
        let address = port
            .local_addr()
            .expect("the TCP socket has no local address")
            .to_string();
        drop(port);
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .args(["--log.level=warn"])
            .spawn()
            .expect("cannot run prometheus (Debian package prometheus)");
        Server {
            child,
            address,
            _directory: directory,
        }
    }

    fn api(&self, path: &str) -> Value {
        let request = format!("GET {path} HTTP/1.0\r\nHost: x\r\n\r\n");
        let (_, body) = http(&self.address, &request);
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// Returns Prometheus' current answer to a query.
    fn query(&self, query: &str) -> Value {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        self.api(&format!("/api/v1/query?query={encoded}"))
    }

    fn until(&self, what: &str, check: impl Fn() -> bool) {
        let begun = Instant::now();
        while !check() {
            assert!(
                begun.elapsed() < 2 * TIMEOUT,
                "timeout while waiting until: {what}"
            );
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// Replaces the dashboard's variables in a query, as Grafana does.
fn filled(query: &str) -> String {
    let query = query.replace("$__rate_interval", "1m");
    query.replace("$instance", ".*").replace("$vm", ".*")
}

#[test]
#[ignore = "needs Debian's package prometheus: make shard NAME=ops"]
fn every_query_of_the_dashboard_and_the_rules_has_a_result() {
    let mut host = ServedDaemon::new();
    let token = host.path("token");
    std::fs::write(&token, "0123456789abcdef0123456789abcdef\n").expect("cannot write the file");
    let tls = Certificate::new(host.path("tls"));
    let config = tls.web_config("");
    let options = [
        "--token-file",
        token.to_str().expect("the path is not UTF-8"),
        "--web.config.file",
        config.to_str().expect("the path is not UTF-8"),
    ];
    let exporter = Exporter::start(&host, &options);
    let server = Server::start(&exporter, &token, &tls.certificate());
    server.until("Prometheus has scraped the exporter", || {
        server.query("tmem_up == 1")["data"]["result"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    });
    let targets = server.api("/api/v1/targets");
    assert_eq!(
        targets["data"]["activeTargets"][0]["health"], "up",
        "Prometheus could not scrape the exporter: {targets}"
    );
    // Prometheus computes rates from several scrapes, between which the guest must send requests.
    for _ in 0..5 {
        host.work(100);
        std::thread::sleep(Duration::from_millis(1100));
    }
    let dashboard: Value = serde_json::from_str(include_str!("../../grafana.json"))
        .expect("the dashboard is not JSON");
    let panels = dashboard["panels"]
        .as_array()
        .expect("the dashboard has no panels");
    assert!(panels.len() >= 15);
    for panel in panels {
        for target in panel["targets"].as_array().expect("a panel has no queries") {
            let query = filled(target["expr"].as_str().expect("a query is not text"));
            server.until(
                &format!("panel {}: {query} has a result", panel["title"]),
                || {
                    let answer = server.query(&query);
                    assert_eq!(
                        answer["status"], "success",
                        "query {query} failed: {answer}"
                    );
                    answer["data"]["result"]
                        .as_array()
                        .is_some_and(|all| !all.is_empty())
                },
            );
        }
    }
    let rules = server.api("/api/v1/rules");
    let rules = rules["data"]["groups"][0]["rules"]
        .as_array()
        .expect("Prometheus returned no rules")
        .clone();
    assert_eq!(
        rules.len(),
        include_str!("../../alerts.yml").matches("- alert:").count()
    );
    for rule in &rules {
        assert_eq!(
            rule["health"], "ok",
            "Prometheus could not evaluate the rule: {rule}"
        );
        let answer = server.query(rule["query"].as_str().expect("a rule has no query"));
        assert_eq!(
            answer["status"], "success",
            "the rule's query failed: {answer}"
        );
    }
    // Prometheus gets the daemon's number of hits with its next scrape.
    let hits = host.stats("a").hits as f64;
    server.until("Prometheus has the daemon's number of hits", || {
        let answer = server.query("tmem_vm_hit_pages_total{vm=\"a\"}");
        let value = answer["data"]["result"][0]["value"][1]
            .as_str()
            .map(str::parse::<f64>);
        value == Some(Ok(hits))
    });
    host.stop();
    server.until("the alert for a daemon that is down fires", || {
        let answer = server.query("ALERTS{alertname=\"TmemDaemonDown\"}");
        answer["data"]["result"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    });
}
