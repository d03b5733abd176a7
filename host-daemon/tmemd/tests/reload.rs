// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The configuration file: checked, read again while VMs are served, and never half a daemon.

mod common;

use common::{TIMEOUT, until};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tmem_control::VarlinkClientInterface;

struct Running {
    child: Child,
    folder: tempfile::TempDir,
}

fn file(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("tmemd.toml");
    fs::write(&path, text).expect("written");
    path
}

/// What is the same in all of these files.
fn toml(folder: &Path, rest: &str) -> String {
    let at = folder.display();
    format!(
        "control = \"{at}/control\"\ncontrol_read_only = \"{at}/read-only\"\nhost_free_min = 0\n\
         memory_pressure = \"none\"\n{rest}"
    )
}

fn vm(folder: &Path, name: &str, rest: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nsocket = \"{}/{name}.sock\"\n{rest}",
        folder.display()
    )
}

impl Running {
    fn start(rest: impl Fn(&Path) -> String) -> Running {
        let folder = tempfile::tempdir().expect("a folder");
        let path = file(folder.path(), &toml(folder.path(), &rest(folder.path())));
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_tmemd"))
            .arg("--config")
            .arg(path)
            .stderr(Stdio::from(log))
            .spawn()
            .expect("runs");
        let running = Running { child, folder };
        until("it serves", || running.log().contains("serving"));
        running
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).expect("a log")
    }

    /// With another file; returns what it logs.
    fn reload(&self, rest: &str) -> String {
        file(self.path(), &toml(self.path(), rest));
        let before = self.log().len();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("sent");
        until("it has read it", || {
            let log = self.log();
            log[before..].contains("read again") || log[before..].contains("stays as it was")
        });
        self.log()[before..].to_string()
    }

    fn client(&self) -> tmem_control::VarlinkClient {
        tmem_control::connect(&self.path().join("control")).expect("connects")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_reload_changes_what_it_can_and_drops_no_vm() {
    let daemon =
        Running::start(|at| format!("pool_size = \"64MiB\"\n{}", vm(at, "a", "weight = 1\n")));
    let at = daemon.path().to_path_buf();
    let front_end = UnixStream::connect(at.join("a.sock")).expect("connects");
    front_end.set_read_timeout(Some(TIMEOUT)).expect("set");
    let stats = || daemon.client().stats(None).call().expect("answers");
    until("the VM is connected", || stats().vms[0].connected);

    let new = format!(
        "pool_size = \"128MiB\"\nlog = \"debug\"\n{}",
        vm(&at, "a", "weight = 7\n")
    );
    let said = daemon.reload(&new);
    assert!(
        said.contains("read again") && !said.contains("next start"),
        "{said}"
    );
    assert_eq!(stats().pool.size_bytes, 128 << 20);
    assert_eq!(
        daemon.client().list().call().expect("answers").vms[0]
            .quota
            .weight,
        7
    );
    assert_eq!(
        (stats().vms[0].connected, stats().vms[0].connections),
        (true, 1)
    );

    let rest = vm(&at, "a", "weight = 7\ntrust_domain = \"t\"\n") + &vm(&at, "b", "");
    let said = daemon.reload(&format!("pool_size = \"128MiB\"\nworkers = 9\n{rest}"));
    for part in [
        "next start",
        "workers",
        "trust domain of VM a",
        "VM b, which is new",
    ] {
        assert!(said.contains(part), "{said} lacks {part}");
    }
    let said = daemon.reload("pool_size = \"128MiB\"\n");
    assert!(said.contains("that there is no VM a"), "{said}");
    assert_eq!(stats().vms.len(), 1, "it stays until then");

    // What is wrong changes nothing.
    for (wrong, part) in [
        ("pool_size = \"1MiB\"\npolsize = 1\n", "pool_size is meant?"),
        ("pool_size = \"12XB\"\n", "XB"),
        ("pool_size = 4096\n", "too small"),
        ("", "no size"),
        ("pool_size = \"1000TiB\"\n", "more than the host"),
    ] {
        let said = daemon.reload(wrong);
        assert!(
            said.contains("stays as it was") && said.contains(part),
            "{said} lacks {part}"
        );
    }
    let reserve = vm(&at, "a", "reserve = \"1GiB\"\n");
    let said = daemon.reload(&format!("pool_size = \"128MiB\"\n{reserve}"));
    assert!(
        said.contains("\\\"a\\\"") || said.contains("\"a\""),
        "{said}"
    );
    assert_eq!(stats().pool.size_bytes, 128 << 20);
    assert_eq!(
        (stats().vms[0].connected, stats().vms[0].connections),
        (true, 1)
    );
    drop(front_end);
}

fn check(folder: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tmemd"));
    command
        .arg("--check-config")
        .arg("--config")
        .arg(folder.join("tmemd.toml"));
    command.args(more).output().expect("runs")
}

#[test]
fn a_file_is_checked_without_a_daemon() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let fails = |more: &[&str], part: &str| {
        let output = check(at, more);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains(part) && error.contains("tmemd"),
            "{error} lacks {part}"
        );
    };
    fails(&[], "tmemd.toml");
    file(at, &toml(at, "pool_size = \"64MiB\"\n"));
    let output = check(at, &[]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("tmemd.toml: good"));
    assert!(!at.join("control").exists(), "nothing was started");
    file(at, &toml(at, "pool_size = \"64MiB\"\nworkrs = 2\n"));
    fails(&[], "workers is meant?");
    // Options come first, and have to be good together with it.
    file(at, &toml(at, &vm(at, "a", "")));
    fails(&[], "pool_size");
    assert!(check(at, &["--pool-size", "64MiB"]).status.success());
    let same = format!("name=a,socket={}/b.sock", at.display());
    fails(&["--pool-size", "64MiB", "--vm", &same], "same name");
    assert!(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tmemd.toml")
            .exists()
    );
}
