// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command against a daemon: what it prints, and how it ends when there is none.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tmemd::{Config, Daemon};

struct Host {
    directory: tempfile::TempDir,
    daemon: Daemon,
}

fn host() -> Host {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name: &str| directory.path().join(name);
    let vm = |text: &str| {
        let socket = path(text.split(',').next().expect("a name"));
        let text = format!("socket={}.sock,name={text}", socket.display());
        text.parse().expect("good")
    };
    let config = Config {
        pool_size_bytes: 64 << 20,
        workers: 1,
        control: path("control"),
        control_read_only: Some(path("read-only")),
        run_folder: directory.path().into(),
        vms: vec![
            vm("web"),
            vm("db,trust-domain=team,reserve=1MiB,limit=8MiB,weight=7"),
        ],
        pressure: None,
        trace: None,
    };
    let daemon = Daemon::start(config).expect("starts");
    Host { directory, daemon }
}

impl Host {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

fn tmemctl(socket: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tmemctl"))
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .output()
        .expect("runs")
}

fn printed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && error.is_empty(),
        "{}: {error}",
        output.status
    );
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// The words of a line that begins with a word.
fn words<'a>(text: &'a str, first: &str) -> Vec<&'a str> {
    let line = text
        .lines()
        .find(|line| line.split_whitespace().next() == Some(first));
    line.unwrap_or_else(|| panic!("no line {first} in {text}"))
        .split_whitespace()
        .collect()
}

#[test]
fn list_is_a_table_in_the_order_of_names() {
    let host = host();
    for socket in ["control", "read-only"] {
        let text = printed(&tmemctl(&host.path(socket), &["list"]));
        let db = words(&text, "db");
        assert_eq!(
            db[..9],
            ["db", "no", "team", "1.00", "MiB", "8.00", "MiB", "7", "-"]
        );
        assert!(db[9].ends_with("/db.sock"), "{text}");
        assert_eq!(words(&text, "web")[..6], ["web", "no", "-", "0", "B", "-"]);
        let names: Vec<_> = text
            .lines()
            .filter_map(|l| l.split_whitespace().next())
            .collect();
        assert_eq!(names, ["NAME", "db", "web"]);
    }
}

#[test]
fn stats_of_all_and_of_one() {
    let host = host();
    let control = host.path("control");
    let text = printed(&tmemctl(&control, &["stats"]));
    assert!(text.contains("1 workers, 0 of 2 VMs connected"), "{text}");
    assert!(
        words(&text, "pool").join(" ").contains("of 64.0 MiB held"),
        "{text}"
    );
    assert_eq!(words(&text, "web")[..2], ["web", "no"]);
    let text = printed(&tmemctl(&control, &["stats", "db"]));
    // 1 MiB and 7 parts of 107 of the 63 MiB that nobody has reserved.
    assert_eq!(words(&text, "entitled"), ["entitled", "5.12", "MiB"]);
    assert_eq!(words(&text, "hits"), ["hits", "0", "(-)"]);
}

#[test]
fn json_is_what_the_daemon_says() {
    let host = host();
    let text = printed(&tmemctl(
        &host.path("read-only"),
        &["--json", "stats", "db"],
    ));
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["pool"]["size_bytes"], 64 << 20);
    assert_eq!(value["vms"][0]["name"], "db");
    assert_eq!(value["vms"].as_array().map(Vec::len), Some(1));
    let text = printed(&tmemctl(&host.path("read-only"), &["list", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["vms"][0]["quota"]["weight"], 7);
}

fn fails(output: &Output, code: i32, parts: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(error.contains(part), "{error} lacks {part}");
    }
}

#[test]
fn errors_name_the_socket_and_what_to_do() {
    let host = host();
    let control = host.path("control");
    fails(
        &tmemctl(&control, &["stats", "nobody"]),
        1,
        &["\"nobody\"", "tmemctl list"],
    );
    fails(&tmemctl(&control, &["dance"]), 2, &["dance"]);

    host.daemon.stop();
    let path = control.display().to_string();
    fails(
        &tmemctl(&control, &["list"]),
        3,
        &[&path, "start tmemd", "--socket"],
    );
    // As a daemon leaves it that was killed.
    drop(UnixListener::bind(&control).expect("binds"));
    fails(&tmemctl(&control, &["list"]), 3, &[&path, "was killed"]);
}

#[test]
fn a_daemon_that_hangs_is_not_waited_for() {
    let directory = tempfile::tempdir().expect("directory");
    let control = directory.path().join("control");
    let _nobody_accepts = UnixListener::bind(&control).expect("binds");
    let path = control.display().to_string();
    fails(
        &tmemctl(&control, &["list", "--timeout", "1"]),
        3,
        &[&path, "did not answer", "--timeout"],
    );
    fails(&tmemctl(&control, &["list", "--timeout", "0"]), 2, &["0"]);
}
