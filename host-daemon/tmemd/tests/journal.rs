// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test of the daemon's log with a real systemd-journald, in a namespace where `/run` is empty.
//!
//! The test does not run by default, because it needs systemd and user namespaces. `make shard NAME=ops`
//! runs it.

use crate::common::until;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tmem_model::fault::{self, Expect, Target};
use tmem_model::{Driver, DriverConfig};

/// Shell script that starts systemd-journald and the daemon, and tells the daemon that its stderr
/// is the journal. The script reads queries from stdin and prints the journal's matching entries.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs none /run
mkdir -p /run/systemd/journal /run/log/journal
/usr/lib/systemd/systemd-journald 2>/dev/null &
journald=$!
while ! [ -S /run/systemd/journal/socket ]; do sleep 0.05; done
exec 2>"$2/stderr"
export JOURNAL_STREAM="$(stat -Lc %d:%i "$2/stderr")"
"$1" --pool-size 64MiB --control "$2/control" --vm "socket=$2/web1.sock,name=web1" &
daemon=$!
while read -r query; do
	journalctl -q -D /run/log/journal -o json "$query" || true
	echo
done
kill $daemon $journald
wait
"#;

struct JournalTest {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl JournalTest {
    fn start(directory: &Path) -> JournalTest {
        let mut child = Command::new("unshare")
            .args(["-Urm", "sh", "-c", SCRIPT, "sh"])
            .args([Path::new(env!("CARGO_BIN_EXE_tmemd")), directory])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cannot run unshare");
        let ask = child.stdin.take();
        let answers = BufReader::new(
            child
                .stdout
                .take()
                .expect("the output of the process is not a pipe"),
        );
        JournalTest {
            child,
            ask,
            answers,
        }
    }

    /// Returns the entries of the journal that match `query`, one per line.
    fn entries(&mut self, query: &str) -> Vec<String> {
        let ask = self
            .ask
            .as_mut()
            .expect("the script's input is already closed");
        writeln!(ask, "{query}").expect("the script does not read its input");
        let lines = self.answers.by_ref().lines();
        lines
            .map(|line| line.expect("the script's output is not text"))
            .take_while(|line| !line.is_empty())
            .collect()
    }
}

impl Drop for JournalTest {
    fn drop(&mut self) {
        // When the script's stdin is closed, the script ends the journal and the daemon, and then
        // itself.
        drop(self.ask.take());
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "wants systemd-journald and user namespaces: make shard NAME=ops"]
fn log_messages_have_fields_in_the_journal() {
    let directory = tempfile::tempdir().unwrap();
    let mut host = JournalTest::start(directory.path());
    let mut driver = Driver::new(crate::common::guest("web1"), DriverConfig::default()).unwrap();
    let socket = directory.path().join("web1.sock");
    until("tmemd accepts the VM's connection", || {
        driver.guest.connect(&socket).is_ok()
    });
    driver.guest.start().unwrap();
    driver.new_generation().unwrap();
    driver.settle().unwrap();
    driver.create_pool().unwrap();
    // The test sends the first malformed request of the list that makes the daemon stop the queue.
    let stops = |fault: &fault::Fault| matches!(fault.expect, Expect::Stopped);
    let fault = fault::all()
        .into_iter()
        .find(stops)
        .expect("the list of faults has none that stops a queue");
    let target = Target {
        queue: 1,
        pool: driver.pool(),
        object: 1,
        index: 0,
        cookie: 1,
    };
    let queue = fault.send(&mut driver.guest, target);
    let (vm, request) = ("TMEM_VM=web1", format!("\"TMEM_REQUEST\":\"{queue}\""));
    let mut entry = String::new();
    until("the journal has the reason why the queue stopped", || {
        let mut entries = host.entries(vm).into_iter();
        let found = entries.find(|line| line.contains(&request));
        entry = found.unwrap_or_default();
        !entry.is_empty()
    });
    for field in [
        "\"TMEM_REASON\":\"",
        "\"PRIORITY\":\"4\"",
        "stopped until it is set up again",
        "\"TMEM_VM\":\"web1\"",
    ] {
        assert!(
            entry.contains(field),
            "the journal's entry does not contain {field}: {entry}"
        );
    }
    assert!(host.entries("TMEM_VM=web2").is_empty());
    // The daemon writes its log lines only to the journal. They must not be on stderr, too.
    let lines = std::fs::read_to_string(directory.path().join("stderr")).unwrap();
    assert!(
        !lines.contains("virtqueue"),
        "stderr repeats messages that the journal received: {lines}"
    );
}
