// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmemctl with a daemon, and of its error messages when no daemon runs.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use tmem_model::TestDaemon;

fn host() -> TestDaemon {
    TestDaemon::start(&[
        "web",
        "db,trust_domain=team,reserve=1MiB,limit=8MiB,weight=7",
    ])
}

fn tmemctl(socket: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tmemctl"))
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .output()
        .expect("cannot run the program")
}

fn printed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && error.is_empty(),
        "tmemctl ended with {} or printed an error: {error}",
        output.status
    );
    String::from_utf8(output.stdout.clone()).expect("the output is not UTF-8")
}

/// Returns the words of that line of `text` whose first word is `first`.
fn words<'a>(text: &'a str, first: &str) -> Vec<&'a str> {
    let line = text
        .lines()
        .find(|line| line.split_whitespace().next() == Some(first));
    line.unwrap_or_else(|| panic!("no line starts with {first}: {text}"))
        .split_whitespace()
        .collect()
}

#[test]
fn list_prints_a_table_sorted_by_name() {
    let host = host();
    for socket in ["control", "read-only"] {
        let text = printed(&tmemctl(&host.path(socket), &["list"]));
        let db = words(&text, "db");
        assert_eq!(
            db[..16],
            [
                "db", "no", "no", "team", "1.00", "MiB", "8.00", "MiB", "7", "0", "B", "-", "0",
                "0", "B", "-"
            ]
        );
        assert!(
            db[16].ends_with("/db.sock"),
            "the row of VM db does not end with its socket: {text}"
        );
        assert_eq!(
            words(&text, "web")[..7],
            ["web", "no", "no", "-", "0", "B", "-"]
        );
        let names: Vec<_> = text
            .lines()
            .filter_map(|l| l.split_whitespace().next())
            .collect();
        assert_eq!(names, ["NAME", "db", "web"]);
    }
}

#[test]
fn stats_prints_all_vms_or_the_named_one() {
    let host = host();
    let control = host.path("control");
    let text = printed(&tmemctl(&control, &["stats"]));
    assert!(
        text.contains("2 workers, 0 of 2 VMs connected"),
        "the status has the wrong number of workers or VMs: {text}"
    );
    assert!(
        text.contains("memory  0 B of the VMs' 0 B resident, "),
        "the status does not show the memory of VMs, none of which is connected: {text}"
    );
    let requests = "s of processor time for requests, ";
    let (_, background) = text
        .split_once(requests)
        .expect("the output does not give the CPU time of requests");
    for part in [
        "in the background: ",
        "new pages, ",
        "cold pages, ",
        "reclaim\n",
    ] {
        assert!(
            background.contains(part),
            "the line of background work does not contain {part:?}: {text}"
        );
    }
    assert!(
        words(&text, "pool").join(" ").contains("of 64.0 MiB held"),
        "the pool's line has the wrong size: {text}"
    );
    assert_eq!(words(&text, "web")[..2], ["web", "no"]);
    let text = printed(&tmemctl(&control, &["stats", "db"]));
    // VM db is entitled to its reserve of 1 MiB, and to 7/107 of the 63 MiB that no VM has
    // reserved.
    assert_eq!(words(&text, "entitled"), ["entitled", "5.12", "MiB"]);
    assert_eq!(words(&text, "hits"), ["hits", "0", "(-)"]);
}

#[test]
fn json_output_contains_the_answer_of_the_daemon() {
    let host = host();
    let text = printed(&tmemctl(
        &host.path("read-only"),
        &["--json", "stats", "db"],
    ));
    let value: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(value["pool"]["size_bytes"], 64 << 20);
    assert_eq!(value["vms"][0]["name"], "db");
    assert_eq!(value["vms"].as_array().map(Vec::len), Some(1));
    let text = printed(&tmemctl(&host.path("read-only"), &["list", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(value["vms"][0]["quota"]["weight"], 7);
}

fn fails(output: &Output, code: i32, parts: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(code),
        "tmemctl ended with the wrong code: {error}"
    );
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(
            error.contains(part),
            "the error does not contain {part:?}: {error}"
        );
    }
}

#[test]
fn errors_name_the_socket_and_the_remedy() {
    let mut host = host();
    let control = host.path("control");
    fails(
        &tmemctl(&control, &["stats", "nobody"]),
        5,
        &["\"nobody\"", "tmemctl list"],
    );
    fails(&tmemctl(&control, &["dance"]), 2, &["dance"]);

    host.stop();
    let path = control.display().to_string();
    fails(
        &tmemctl(&control, &["list"]),
        3,
        &[&path, "start tmemd", "--socket"],
    );
    // A listener that is dropped leaves its socket file behind, as a killed daemon does.
    drop(UnixListener::bind(&control).expect("cannot bind the socket"));
    fails(&tmemctl(&control, &["list"]), 3, &[&path, "was killed"]);
}

#[test]
fn a_hung_daemon_is_reported_after_the_timeout() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let control = directory.path().join("control");
    let _nobody_accepts = UnixListener::bind(&control).expect("cannot bind the socket");
    let path = control.display().to_string();
    fails(
        &tmemctl(&control, &["list", "--timeout", "1"]),
        4,
        &[&path, "did not answer", "--timeout"],
    );
    fails(&tmemctl(&control, &["list", "--timeout", "0"]), 2, &["0"]);
}

#[cfg(feature = "libvirt")]
#[test]
fn a_hung_libvirt_is_reported_after_the_timeout() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let control = directory.path().join("control");
    let socket = directory.path().join("libvirt");
    let _nobody_accepts = UnixListener::bind(&socket).expect("cannot bind the socket");
    let uri = format!("qemu+unix:///system?socket={}", socket.display());
    let at = format!("libvirt at {uri}");
    for command in ["attach", "detach", "quota"] {
        let arguments = [command, "web", "--connect", &uri, "--timeout", "1"];
        fails(
            &tmemctl(&control, &arguments),
            4,
            &[&at, "did not answer within 1 s", "--timeout"],
        );
    }
    let root = directory.path().join("root");
    std::fs::create_dir_all(root.join("etc/libvirt")).expect("cannot create the directory");
    let root = root.to_str().expect("the path is not UTF-8");
    let arguments = [
        "doctor",
        "--root",
        root,
        "--connect",
        &uri,
        "--timeout",
        "1",
    ];
    let found = tmemctl(&control, &arguments);
    let found = String::from_utf8_lossy(&found.stdout);
    assert!(
        found.contains(&format!("{at} did not answer within 1 s")),
        "the finding does not name the time-out: {found}"
    );
}

/// The time limit `--timeout` does not apply to `trace`, which reads a file and calls no service.
#[test]
fn the_timeout_does_not_apply_to_reading_a_trace() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let trace = directory.path().join("trace");
    let made = Command::new("mkfifo")
        .arg(&trace)
        .status()
        .expect("cannot run the program");
    assert!(made.success());
    let writer = std::thread::spawn({
        let trace = trace.clone();
        move || {
            let mut trace = File::options()
                .write(true)
                .open(trace)
                .expect("cannot open the named pipe");
            std::thread::sleep(Duration::from_millis(1500));
            // Writing fails if tmemctl no longer reads the pipe; the test then fails elsewhere.
            let _ = trace.write_all(b"no trace");
        }
    });
    let trace = trace.to_str().expect("the path is not UTF-8");
    let read = tmemctl(Path::new("/"), &["trace", trace, "--timeout", "1"]);
    fails(&read, 1, &["is not a trace"]);
    writer.join().expect("the writing thread panicked");
}

#[test]
fn a_failed_write_of_an_error_keeps_the_exit_code() {
    let full = File::options().write(true).open("/dev/full");
    let status = Command::new(env!("CARGO_BIN_EXE_tmemctl"))
        .args(["--socket", "/nowhere", "list"])
        .stderr(full.expect("cannot open /dev/full"))
        .status();
    assert_eq!(status.expect("cannot run tmemctl").code(), Some(3));
}

/// tmemctl must end without running exit handlers, which would free memory that one of its threads
/// may still use.
#[test]
fn tmemctl_exits_without_running_destructors() {
    let host = host();
    let control = host.path("control");
    for arguments in [&["list"][..], &["stats", "nobody"], &["doctor"]] {
        let run = Command::new(env!("CARGO_BIN_EXE_tmemctl"))
            .arg("--socket")
            .arg(&control)
            .args(arguments)
            .env("LD_DEBUG", "files")
            .output()
            .expect("cannot run the program");
        let linker = String::from_utf8_lossy(&run.stderr);
        assert!(
            linker.contains("calling init: "),
            "the dynamic linker reports no constructors: {linker}"
        );
        assert!(
            !linker.contains("calling fini: "),
            "tmemctl ran destructors at its exit: {linker}"
        );
    }
}

#[test]
fn vms_are_flushed_frozen_and_thawed() {
    let host = host();
    let control = host.path("control");
    let done = |arguments: &[&str]| printed(&tmemctl(&control, arguments));
    assert_eq!(
        done(&["flush", "db", "web"]),
        "db: 0 pages dropped\nweb: 0 pages dropped\n"
    );
    assert_eq!(done(&["freeze", "web"]), "web: frozen\n");
    assert_eq!(
        done(&["freeze", "--all"]),
        "db: frozen\nweb: frozen already\n"
    );
    assert_eq!(words(&done(&["list"]), "web")[2], "yes");
    let some = tmemctl(&control, &["freeze", "nobody", "web", "noone"]);
    assert_eq!(
        (some.status.code(), &*some.stdout, &*some.stderr),
        (
            Some(5),
            &b"web: frozen already\n"[..],
            &b"tmemctl: the daemon has no VM \"nobody\": see tmemctl list\n"[..],
        )
    );
    let json: serde_json::Value =
        serde_json::from_str(&done(&["thaw", "db", "--json"])).expect("the output is not JSON");
    let thawed = serde_json::json!({ "vms": [{ "name": "db", "frozen": false, "changed": true }] });
    assert_eq!(json, thawed);
    let json: serde_json::Value =
        serde_json::from_str(&done(&["flush", "--all", "--json"])).expect("the output is not JSON");
    assert_eq!(
        json["vms"][1],
        serde_json::json!({ "name": "web", "pages": 0 })
    );
    for command in ["flush", "freeze", "thaw"] {
        fails(
            &tmemctl(&control, &[command, "nobody"]),
            5,
            &["\"nobody\"", "tmemctl list"],
        );
        fails(&tmemctl(&control, &[command]), 2, &["<VMS>"]);
        fails(
            &tmemctl(&host.path("read-only"), &[command, "db"]),
            7,
            &["is read-only", "--socket"],
        );
    }
}

#[test]
fn the_pool_is_printed_and_resized() {
    let host = host();
    let control = host.path("control");
    let text = printed(&tmemctl(&control, &["pool", "--size", "32MiB"]));
    let expected =
        "The pool has a size of 32.0 MiB until the daemon ends.\nconfigured     : 32.0 MiB\n";
    assert!(
        text.starts_with(expected),
        "the output has the wrong text: {text}"
    );
    let text = printed(&tmemctl(&control, &["pool", "--size", "1MiB", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(json["configured_bytes"], 1 << 20);
    let text = printed(&tmemctl(&control, &["stats"]));
    assert!(
        text.contains("of 1.00 MiB held"),
        "the output has the wrong size: {text}"
    );
    fails(
        &tmemctl(&control, &["pool", "--size", "1KiB"]),
        6,
        &["1024 bytes", "1048576"],
    );
    fails(
        &tmemctl(&control, &["pool", "--size", "lots"]),
        2,
        &["lots", "512MiB"],
    );
    let read_only = host.path("read-only");
    let resize = ["pool", "--size", "2MiB"];
    fails(&tmemctl(&read_only, &resize), 7, &["is read-only"]);
    let text = printed(&tmemctl(&read_only, &["pool", "--bytes"]));
    assert_eq!(
        text.lines().count(),
        7,
        "the output does not have 7 lines: {text}"
    );
    assert!(
        text.contains("configured     : 1048576\n"),
        "the output does not give the size in bytes: {text}"
    );
    let text = printed(&tmemctl(&control, &["pool", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(json.as_object().map(serde_json::Map::len), Some(7));
    assert!(json["held_bytes"].as_i64() >= json["freeable_bytes"].as_i64());
}

/// `list` and `stats` have zramctl's options for tables: --output, --noheadings and --bytes.
#[test]
fn tables_have_the_chosen_columns() {
    let host = host();
    let read_only = host.path("read-only");
    let print = |arguments: &[&str]| printed(&tmemctl(&read_only, arguments));
    let text = print(&["list", "-bn", "-o", "name,limit,trust-domain"]);
    assert_eq!(text, "db   8388608  team\nweb        -  -\n");
    let text = print(&["list", "--output", "NAME,PROBLEM"]);
    assert_eq!(text, "NAME  PROBLEM\ndb    -\nweb   -\n");
    let text = print(&["stats", "--noheadings", "--bytes"]);
    assert_eq!(words(&text, "db")[..5], ["db", "no", "0", "0", "0"]);
    assert_eq!(
        text.lines().count(),
        2,
        "the output does not consist of two rows: {text}"
    );
    assert_eq!(print(&["stats", "db", "-n", "-o", "HITS"]), "0\n");
    assert_eq!(
        words(&print(&["stats", "db", "-b"]), "limit"),
        ["limit", "8388608"]
    );
    let text = print(&["advise", "-n", "-o", "NAME,CONFIDENCE"]);
    assert_eq!(text, "db   none\nweb  none\n");
    for command in ["list", "stats", "advise"] {
        let all = [command, "--output", "NAME,COLOUR"];
        fails(&tmemctl(&read_only, &all), 2, &["\"COLOUR\"", "NAME, "]);
    }
    let watch = ["stats", "--watch", "--output", "NAME"];
    fails(&tmemctl(&read_only, &watch), 2, &["--watch"]);
}

#[test]
fn errors_are_json_if_the_output_is_json() {
    let host = host();
    let control = host.path("control");
    for (arguments, code, name, part) in [
        (&["stats", "nobody", "--json"][..], 5, "not_found", "nobody"),
        (
            &["--json", "pool", "--size", "1KiB"],
            6,
            "refused",
            "1048576",
        ),
        (&["--json", "dance"], 2, "usage", "dance"),
        (&["list", "--json", "--output", "X"], 2, "usage", "\"X\""),
    ] {
        let output = tmemctl(&control, arguments);
        fails(&output, code, &[]);
        let text = String::from_utf8(output.stderr).expect("the output is not UTF-8");
        assert_eq!(
            text.lines().count(),
            1,
            "the JSON error has more than one line: {text}"
        );
        let error: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
        assert_eq!(
            (&error["error"], &error["exit_code"]),
            (&name.into(), &code.into())
        );
        let message = error["message"]
            .as_str()
            .expect("the JSON error has no message");
        assert!(
            message.contains(part) && !message.starts_with("error"),
            "the JSON error does not have the expected message: {message}"
        );
    }
    let help = printed(&tmemctl(&control, &["--help", "--json"]));
    assert!(
        help.contains("Exit codes:"),
        "the help does not list the exit codes: {help}"
    );
}

/// A process of `tmemctl event` that prints the daemon's events.
struct Printing(std::process::Child);

impl Printing {
    fn start(socket: &Path, arguments: &[&str]) -> Printing {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmemctl"));
        command.arg("--socket").arg(socket).args(arguments);
        command.stdout(std::process::Stdio::piped());
        Printing(command.spawn().expect("cannot run the program"))
    }
}

impl Drop for Printing {
    fn drop(&mut self) {
        // Killing fails if the process has already ended, so the error is ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn events_are_printed_as_they_arrive() {
    use std::io::{BufRead, BufReader};
    let mut host = host();
    let control = host.path("control");
    let begin = |arguments: &[&str]| {
        let mut printing = Printing::start(&host.path("read-only"), arguments);
        let lines = BufReader::new(
            printing
                .0
                .stdout
                .take()
                .expect("the child process has no pipe"),
        )
        .lines();
        (printing, lines)
    };
    let (mut all, lines) = begin(&["event", "--loop", "--json"]);
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread passes the printed lines on to the test. Sending fails when the test has ended.
    std::thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .for_each(|line| sender.send(line).unwrap_or(()))
    });
    let (_begun, mut begun) = begin(&["event", "--loop", "--kind", "subscribed", "--timestamp"]);
    let line = begun
        .next()
        .expect("tmemctl printed no line")
        .expect("the line is not UTF-8");
    assert!(
        line.contains("Z: event 'subscribed': "),
        "the first line is not the event \"subscribed\": {line}"
    );
    let (mut one, mut first) = begin(&["event", "--vm", "web"]);
    // The VMs are frozen and thawed repeatedly until both processes have printed an event. A
    // process gets only events that happen after its subscription.
    let mut json = None;
    while json.is_none()
        || one
            .0
            .try_wait()
            .expect("cannot query the process")
            .is_none()
    {
        printed(&tmemctl(&control, &["freeze", "--all"]));
        printed(&tmemctl(&control, &["thaw", "--all"]));
        json = json.or_else(|| receiver.try_recv().ok());
    }
    let json = json.expect("tmemctl printed no event");
    let event: serde_json::Value = serde_json::from_str(&json).expect("the output is not JSON");
    assert!(
        ["frozen", "thawed"]
            .iter()
            .any(|kind| event["kind"] == *kind),
        "the wrong event was printed: {event}"
    );
    let line = first
        .next()
        .expect("tmemctl printed no line")
        .expect("the line is not UTF-8");
    assert!(
        line.starts_with("event 'frozen' for VM web: ")
            || line.starts_with("event 'thawed' for VM web: "),
        "the wrong event was printed: {line}"
    );
    assert!(
        first.next().is_none(),
        "tmemctl printed a second event without --loop"
    );
    host.stop();
    assert_eq!(
        one.0.wait().expect("cannot wait for the process").code(),
        Some(0)
    );
    assert_eq!(
        all.0.wait().expect("cannot wait for the process").code(),
        Some(3),
        "tmemctl did not end with code 3 after the daemon ended"
    );
}

#[test]
fn rates_are_printed_each_interval() {
    let host = host();
    let control = host.path("control");
    let watch = |more: &[&str]| {
        let all = [&["stats", "--watch=1", "--count", "1"], more].concat();
        printed(&tmemctl(&control, &all))
    };
    let text = watch(&[]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "the output does not have 2 lines: {text}");
    assert_eq!(lines[0].split_whitespace().count(), 10);
    let json: serde_json::Value =
        serde_json::from_str(&watch(&["--json", "web"])).expect("the output is not JSON");
    assert_eq!((&json["vm"], &json["puts"]), (&"web".into(), &0.into()));
    fails(&tmemctl(&control, &["stats", "--watch=0"]), 2, &["0"]);
    fails(
        &tmemctl(&control, &["stats", "--watch", "nobody"]),
        5,
        &["nobody"],
    );
}

#[test]
fn versions_are_printed_with_and_without_a_daemon() {
    let mut host = host();
    let control = host.path("control");
    let own = env!("CARGO_PKG_VERSION");
    let text = printed(&tmemctl(&control, &["version"]));
    assert_eq!(text, format!("tmemctl {own}\ntmemd   {own}\n"));
    host.stop();
    let text = printed(&tmemctl(&control, &["version"]));
    assert!(
        text.contains("tmemd   - (there is no control socket"),
        "version does not report the missing control socket: {text}"
    );
    let text = printed(&tmemctl(&control, &["version", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(json, serde_json::json!({ "tmemctl": own, "tmemd": null }));
}

#[test]
fn advise_reports_no_confidence_for_few_gets() {
    let host = host();
    let read_only = host.path("read-only");
    let text = printed(&tmemctl(&read_only, &["advise"]));
    assert!(
        text.contains("too few gets for advice"),
        "advise does not say that gets are too few: {text}"
    );
    let text = printed(&tmemctl(
        &read_only,
        &["advise", "web", "--over", "1", "--json"],
    ));
    let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(
        (
            json["vms"].as_array().map(Vec::len),
            &json["vms"][0]["name"]
        ),
        (Some(1), &"web".into())
    );
    assert_eq!(json["vms"][0]["confidence"], "none");
    fails(&tmemctl(&read_only, &["advise", "nobody"]), 5, &["nobody"]);
}

#[test]
fn trace_prints_a_summary_of_a_recorded_trace() {
    use tmem_trace::format::{Event, ObjectKey, Op, SizeClass, Writer};
    let host = host();
    let file = host.path("a.trace");
    let object = ObjectKey { pool: 1, object: 2 };
    let put = Op::Put {
        object,
        page: 1,
        workingset: false,
        size: SizeClass::from_bytes(0),
    };
    let (mut writer, mut bytes) = (Writer::default(), Vec::new());
    for (time_us, op) in [
        (0, put),
        (
            500_000,
            Op::Get {
                object,
                page: 1,
                hit: true,
            },
        ),
        (1_500_000, Op::Clear),
    ] {
        writer.write(
            &Event {
                time_us,
                tenant: 3,
                op,
            },
            &mut bytes,
        );
    }
    std::fs::write(&file, &bytes).expect("cannot write the file");
    let path = file.to_str().expect("the path is not UTF-8");
    let text = printed(&tmemctl(&host.path("control"), &["trace", path]));
    assert!(
        text.starts_with("3 events in 1.5 s\n"),
        "trace reports the wrong number of events or the wrong time: {text}"
    );
    assert_eq!(words(&text, "3")[..2], ["3", "events"]);
    let text = printed(&tmemctl(&host.path("control"), &["trace", path, "--json"]));
    let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    assert_eq!(
        (&json["vms"][0]["vm"], &json["vms"][0]["hits"]),
        (&3.into(), &1.into())
    );
    std::fs::write(&file, &bytes[..bytes.len() - 1]).expect("cannot write the file");
    let text = printed(&tmemctl(&host.path("control"), &["trace", path]));
    assert!(
        text.contains("the end of the trace is missing"),
        "trace does not report the missing end: {text}"
    );
    std::fs::write(&file, [0x28, 0xb5, 0x2f, 0xfd, 0]).expect("cannot write the file");
    fails(
        &tmemctl(&host.path("control"), &["trace", path]),
        1,
        &[path, "zstd -d"],
    );
    std::fs::write(&file, "no").expect("cannot write the file");
    fails(
        &tmemctl(&host.path("control"), &["trace", path]),
        1,
        &[path],
    );
}

/// Each command of tmemctl has help text, and a row in the table of docs/tmemctl.md.
#[test]
fn every_command_has_help() {
    let nowhere = Path::new("/nowhere");
    let help = printed(&tmemctl(nowhere, &["help"]));
    let (_, commands) = help
        .split_once("Commands:\n")
        .expect("the help has no list of commands");
    let names: Vec<&str> = commands
        .lines()
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(
        names.len() > 10,
        "the help lists only these commands: {names:?}"
    );
    let document = include_str!("../../../../docs/tmemctl.md");
    for name in names.into_iter().filter(|name| *name != "help") {
        assert!(printed(&tmemctl(nowhere, &[name, "--help"])).contains("Usage:"));
        assert!(
            document.contains(&format!("| `{name}")),
            "docs/tmemctl.md has no row for command {name}"
        );
    }
}

#[test]
fn doctor_prints_faults_with_their_remedies() {
    let mut host = host();
    let control = host.path("control");
    // A temporary directory takes the place of the root directory of a host that has no libvirt,
    // KVM or PSI.
    let root = host.path("root");
    std::fs::create_dir(&root).expect("cannot create the directory");
    let root = root.to_str().expect("the path is not UTF-8").to_string();
    let text = printed(&tmemctl(&control, &["doctor", "--root", &root, "--all"]));
    for part in [
        "warning  host: there is no KVM",
        "-> modprobe",
        "good     daemon: tmemd",
        "warning  web: the VM's QEMU is not connected",
        "0 faults, ",
    ] {
        assert!(
            text.contains(part),
            "the output does not contain {part:?}: {text}"
        );
    }
    printed(&tmemctl(&control, &["freeze", "web"]));
    std::fs::remove_file(host.path("db.sock")).expect("cannot remove the file");
    let output = tmemctl(&control, &["doctor", "--root", &root, "--json"]);
    assert_eq!(
        output.status.code(),
        Some(8),
        "doctor did not end with code 8 although it found a fault"
    );
    let json: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("the output is not JSON");
    assert_eq!(
        (&json["faults"], &json["findings"][0]["check"]),
        (&1.into(), &"vm-socket".into())
    );
    assert_eq!(json["findings"][0]["about"], "db");
    let has_remedy = |part: &str| {
        let all = json["findings"]
            .as_array()
            .expect("the JSON has no findings");
        all.iter().any(|finding| {
            finding["remedy"]
                .as_str()
                .is_some_and(|remedy| remedy.contains(part))
        })
    };
    assert!(
        has_remedy("systemctl restart tmemd") && has_remedy("tmemctl thaw web"),
        "the remedies are missing: {json}"
    );
    host.stop();
    let output = tmemctl(&control, &["doctor", "--root", &root]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(8));
    assert!(
        text.starts_with("FAULT    daemon: there is no control socket")
            && text.contains("-> tmemd --check-config && systemctl start tmemd"),
        "doctor does not report the missing control socket and the remedy: {text}"
    );
}

/// Options with which `tmemctl quota` does not use the libvirt of the machine that runs the test.
/// The first URI selects the test driver in libvirt's library, whose only domain is called test.
/// The second URI names a socket that does not exist.
#[cfg(feature = "libvirt")]
const LIBVIRTS: [&[&str]; 2] = [
    &["--connect", "test:///default"],
    &["--connect", "qemu+unix:///system?socket=/nowhere"],
];
#[cfg(not(feature = "libvirt"))]
const LIBVIRTS: [&[&str]; 1] = [&[]];

fn run_quota(host: &TestDaemon, libvirt: &[&str], arguments: &[&str]) -> Output {
    let all = [&["quota"][..], arguments, libvirt].concat();
    tmemctl(&host.path("control"), &all)
}

/// Returns the JSON object of a VM in the output of `tmemctl list`.
fn listed(host: &TestDaemon, name: &str) -> serde_json::Value {
    let text = printed(&tmemctl(&host.path("control"), &["list", "--json"]));
    let list: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
    let vms = list["vms"].as_array().expect("the JSON has no list of VMs");
    let vm = vms.iter().find(|vm| vm["name"] == name);
    vm.expect("the VM is not listed").clone()
}

#[test]
fn quota_of_a_vm_outside_libvirt_is_set_in_the_daemon() {
    for libvirt in LIBVIRTS {
        let host = host();
        let done = |arguments: &[&str]| printed(&run_quota(&host, libvirt, arguments));
        assert_eq!(
            done(&["db"]),
            "limit          : 8192 KiB\nreserve        : 1024 KiB\nweight         : 7\n\
             trust_domain   : team\n"
        );
        let text = done(&["db", "--limit", "4MiB", "--reserve", "2MiB", "--live"]);
        assert!(
            text.contains("VM db")
                && text.contains("until the daemon ends")
                && text.contains("[[vm]]"),
            "the output does not name the VM and how to make the quota permanent: {text}"
        );
        let quota =
            serde_json::json!({ "reserve_bytes": 2 << 20, "limit_bytes": 4 << 20, "weight": 7 });
        assert_eq!(
            listed(&host, "db")["quota"],
            quota,
            "the command changed a value of the quota that was not given"
        );
        // tmemctl refuses each of these values, which are invalid or do not fit the others. Its
        // message contains the VM's name and the value, and the quota stays unchanged.
        for (wrong, parts) in [
            (
                &["--limit", "1MiB"][..],
                &["VM db", "1024 KiB", "2048 KiB"][..],
            ),
            (
                &["--limit", "none", "--reserve", "1TiB"],
                &["VM db", "1099511627776"],
            ),
            (
                &["--weight", "9", "--config"],
                &["VM db", "--config", "[[vm]]"],
            ),
        ] {
            fails(
                &run_quota(&host, libvirt, &[&["db"], wrong].concat()),
                6,
                parts,
            );
        }
        for wrong in [
            ["--limit", "lots"],
            ["--reserve", "1"],
            ["--weight", "10001"],
        ] {
            fails(
                &run_quota(&host, libvirt, &[&["db"], &wrong[..]].concat()),
                2,
                &wrong,
            );
        }
        assert_eq!(listed(&host, "db")["quota"], quota);
        let text = done(&["db", "--limit", "none", "--weight", "9", "--json"]);
        let json: serde_json::Value = serde_json::from_str(&text).expect("the output is not JSON");
        assert_eq!(
            (&json["vm"], json["domain"].is_null()),
            (&"db".into(), true)
        );
        let json: serde_json::Value =
            serde_json::from_str(&done(&["db", "--json"])).expect("the output is not JSON");
        let told = serde_json::json!({
            "vm": "db", "limit_bytes": null, "reserve_bytes": 2 << 20, "weight": 9, "trust_domain": "team",
        });
        assert_eq!(json, told);
        let nobody = run_quota(&host, libvirt, &["nobody", "--limit", "1MiB"]);
        let away = libvirt.concat().contains("nowhere");
        fails(
            &nobody,
            if away { 3 } else { 5 },
            &["the daemon has no VM", "tmemctl list"],
        );
        let read_only = [&["quota", "db", "--weight", "1"][..], libvirt].concat();
        fails(
            &tmemctl(&host.path("read-only"), &read_only),
            7,
            &["is read-only", "--socket"],
        );
    }
}

/// A VM that was added over the control socket has a UUID, by which `tmemctl quota` looks for a
/// libvirt domain. If libvirt has that domain or does not answer, the quota in the daemon stays
/// unchanged.
#[test]
fn quota_of_a_libvirt_vm_is_not_set_in_the_daemon_alone() {
    use tmem_control::{VarlinkClientInterface, VmSpec};
    let host = host();
    let mut client =
        tmem_control::connect(&host.path("control")).expect("cannot connect to the control socket");
    for (name, uuid) in [
        // libvirt's test driver has a domain with the first VM's UUID, but under the name test. It
        // has no domain with the second VM's UUID.
        ("test-6695eb01", "6695eb01-f6a4-8304-79aa-97f2502e193f"),
        ("other", "00000000-0000-4000-8000-000000000001"),
    ] {
        let spec = VmSpec {
            uuid: uuid.into(),
            name: name.into(),
            socket: host.path(&format!("{name}.sock")).display().to_string(),
            owner: None,
            group: None,
            mode: None,
            memory_max_bytes: None,
            trust_domain: None,
            quota: tmem_control::quota(None, None, None),
        };
        assert!(
            client
                .add_vm(spec)
                .call()
                .expect("the daemon did not add the VM")
                .added
        );
    }
    let set = ["other", "--weight", "3"];
    let text = printed(&run_quota(&host, LIBVIRTS[0], &set));
    assert!(
        text.contains("until the VM is removed"),
        "the output does not tell how long the quota holds: {text}"
    );
    assert_eq!(listed(&host, "other")["quota"]["weight"], 3);
    #[cfg(feature = "libvirt")]
    {
        fails(
            &run_quota(&host, LIBVIRTS[1], &["other", "--weight", "4"]),
            3,
            &["cannot connect to libvirt", "/nowhere"],
        );
        assert_eq!(listed(&host, "other")["quota"]["weight"], 3);
        for domain in ["test", "test-6695eb01"] {
            fails(
                &run_quota(&host, LIBVIRTS[0], &[domain, "--weight", "4"]),
                6,
                &[domain, "has no <cache> metadata", "tmemctl attach"],
            );
        }
        assert_eq!(listed(&host, "test-6695eb01")["quota"]["weight"], 100);
    }
}
