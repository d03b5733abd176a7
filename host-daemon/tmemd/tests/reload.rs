// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the configuration file: its check, and its reload while the daemon serves VMs. The
//! daemon applies a reload completely or not at all.

use crate::common::{TIMEOUT, until};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tmem_control::VarlinkClientInterface;
use tmem_model::{Missing, skipped};

struct Running {
    child: Child,
    directory: tempfile::TempDir,
}

fn file(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("tmemd.toml");
    fs::write(&path, text).expect("cannot write the file");
    path
}

/// Returns the text of a configuration file: the settings that all tests in this file use, followed
/// by `rest`.
fn toml(directory: &Path, rest: &str) -> String {
    let at = directory.display();
    format!(
        "control = \"{at}/control\"\ncontrol_read_only = \"{at}/read-only\"\nhost_free_min = 0\n\
         memory_pressure = \"none\"\n{rest}"
    )
}

fn vm(directory: &Path, name: &str, rest: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nsocket = \"{}/{name}.sock\"\n{rest}",
        directory.display()
    )
}

impl Running {
    fn start(rest: impl Fn(&Path) -> String) -> Running {
        Running::start_with(&[], rest)
    }

    fn start_with(options: &[&str], rest: impl Fn(&Path) -> String) -> Running {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = file(
            directory.path(),
            &toml(directory.path(), &rest(directory.path())),
        );
        let log = fs::File::create(directory.path().join("log")).expect("cannot create the file");
        let child = Command::new(env!("CARGO_BIN_EXE_tmemd"))
            .arg("--config")
            .arg(path)
            .args(options)
            .stderr(Stdio::from(log))
            .spawn()
            .expect("cannot run the program");
        let running = Running { child, directory };
        until("tmemd serves", || running.log().contains("serving"));
        running
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).expect("cannot read the log")
    }

    /// Writes a new configuration file and makes tmemd reload it. Returns the lines that tmemd logs
    /// meanwhile.
    fn reload(&self, rest: &str) -> String {
        file(self.path(), &toml(self.path(), rest));
        let before = self.log().len();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP)
            .expect("cannot send the signal");
        until("tmemd has read the file", || {
            let log = self.log();
            log[before..].contains("was reloaded")
                || log[before..].contains("configuration is unchanged")
        });
        self.log()[before..].to_string()
    }

    fn client(&self) -> tmem_control::VarlinkClient {
        tmem_control::connect(&self.path().join("control"))
            .expect("cannot connect to the control socket")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Killing fails if the daemon has already ended, so the error is ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_reload_applies_reloadable_settings_and_keeps_all_vms() {
    let daemon =
        Running::start(|at| format!("pool_size = \"64MiB\"\n{}", vm(at, "a", "weight = 1\n")));
    let at = daemon.path().to_path_buf();
    let front_end = UnixStream::connect(at.join("a.sock")).expect("cannot connect to the socket");
    front_end
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    let stats = || {
        daemon
            .client()
            .get_stats(None)
            .call()
            .expect("the daemon answered a valid varlink call with an error")
    };
    until("the VM is connected", || stats().vms[0].connected);

    let new = format!(
        "pool_size = \"128MiB\"\nlog = \"debug\"\n{}",
        vm(&at, "a", "weight = 7\n")
    );
    let said = daemon.reload(&new);
    assert!(
        said.contains("was reloaded") && !said.contains("next start"),
        "the log does not report a complete reload: {said}"
    );
    assert_eq!(stats().pool.size_bytes, 128 << 20);
    assert_eq!(
        daemon
            .client()
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms[0]
            .quota
            .weight,
        7
    );
    assert_eq!(
        (stats().vms[0].connected, stats().vms[0].connections),
        (true, 1)
    );

    let rest = vm(&at, "a", "weight = 7\ntrust_domain = \"t\"\n") + &vm(&at, "b", "");
    let said = daemon.reload(&format!(
        "pool_size = \"128MiB\"\nworkers = 9\nbackground_threads = 9\n{rest}"
    ));
    for part in [
        "next start",
        "workers",
        "background_threads",
        "trust domain of VM a",
    ] {
        assert!(
            said.contains(part),
            "the log does not contain {part:?}: {said}"
        );
    }
    let said = daemon.reload("pool_size = \"128MiB\"\n");
    assert!(
        said.contains("removed VM a"),
        "the log does not name the removed VM: {said}"
    );
    assert_eq!(
        stats().vms.len(),
        2,
        "a VM was removed before the next start"
    );

    // A reload of an invalid configuration file changes nothing.
    for (wrong, part) in [
        (
            "pool_size = \"1MiB\"\npolsize = 1\n",
            "line 6: polsize = 1: ",
        ),
        ("pool_size = \"12XB\"\n", "XB"),
        ("pool_size = 4096\n", "too small"),
        ("", "no size"),
        ("pool_size = \"4TiB\"\n", "exceeds the host"),
        ("pool_size = \"5TiB\"\n", "too large"),
    ] {
        let said = daemon.reload(wrong);
        assert!(
            said.contains("configuration is unchanged") && said.contains(part),
            "the log does not report an unchanged configuration and {part:?}: {said}"
        );
    }
    let reserve = vm(&at, "a", "reserve = \"1GiB\"\n");
    let said = daemon.reload(&format!("pool_size = \"128MiB\"\n{reserve}"));
    assert!(
        said.contains("\\\"a\\\"") || said.contains("\"a\""),
        "the log does not name VM a: {said}"
    );
    assert_eq!(stats().pool.size_bytes, 128 << 20);
    assert_eq!(
        (stats().vms[0].connected, stats().vms[0].connections),
        (true, 1)
    );
    drop(front_end);
}

/// tmemd starts the configured number of background threads. The option takes precedence over the
/// file, and the file over the default. An operator increases the number if the daemon refuses puts
/// because too many pages wait to be compressed.
#[test]
fn the_configured_number_of_background_threads_starts() {
    let background_threads = |daemon: &Running| {
        let tasks = format!("/proc/{}/task", daemon.child.id());
        let names = fs::read_dir(tasks)
            .expect("cannot list the directory")
            .map(|task| {
                let comm = task
                    .expect("cannot read a directory entry")
                    .path()
                    .join("comm");
                // A thread that ended after it was listed has no name any more.
                fs::read_to_string(comm).unwrap_or_default()
            });
        names.filter(|name| name.trim() == "background").count()
    };
    let text = "pool_size = \"64MiB\"\nbackground_threads = 3\n";
    let of_file = Running::start(|_| text.into());
    // A thread gets its name only when it first runs, so the test waits for the names.
    until("tmemd has three background threads", || {
        background_threads(&of_file) == 3
    });
    let of_option = Running::start_with(&["--background-threads", "5"], |_| text.into());
    until("tmemd has five background threads", || {
        background_threads(&of_option) == 5
    });
    let said = of_file.reload("pool_size = \"64MiB\"\nbackground_threads = 4\n");
    assert!(
        said.contains("next start: background_threads"),
        "the log does not name background_threads: {said}"
    );
    assert_eq!(background_threads(&of_file), 3);
    for (threads, good) in [("0", false), ("1", true), ("64", true), ("65", false)] {
        let checked = check(of_file.path(), &["--background-threads", threads]);
        assert_eq!(
            checked.status.success(),
            good,
            "--background-threads {threads}: the check must succeed exactly from 1 to 64"
        );
        let error = String::from_utf8_lossy(&checked.stderr);
        assert!(
            good || error.contains("1 to 64"),
            "the error does not name the range 1 to 64: {error}"
        );
    }
}

/// All reserves must fit into the pool size of the last configuration file that tmemd read, because
/// the next start uses that size.
#[test]
fn reserves_must_fit_into_a_reloaded_pool_size() {
    let running = Running::start(|at| format!("pool_size = \"128MiB\"\n{}", vm(at, "greedy", "")));
    let at = running.path();
    let read = |size: &str, reserve: &str| {
        let reserve = format!("reserve = \"{reserve}\"\n");
        running.reload(&format!(
            "pool_size = \"{size}\"\n{}",
            vm(at, "greedy", &reserve)
        ))
    };
    let said = read("64MiB", "100MiB");
    for part in [
        "configuration is unchanged",
        "greedy",
        "104857600",
        "67108864",
    ] {
        assert!(
            said.contains(part),
            "the log does not contain {part:?}: {said}"
        );
    }
    let said = read("256MiB", "200MiB");
    assert!(
        said.contains("was reloaded"),
        "the log reports no reload: {said}"
    );
    // A reserve that a control client sets must fit into the configured pool size, too. If a
    // control client has changed the pool size, the reserve must also fit into the changed size.
    let set = |mib: u64| {
        let quota = tmem_control::quota(Some(mib << 20), None, None);
        running.client().set_quota("greedy".into(), quota).call()
    };
    running
        .client()
        .set_pool_size(100 << 20)
        .call()
        .expect("the daemon did not change the pool's size");
    set(201).expect_err("a reserve was accepted that exceeds the configured pool");
    set(90).expect("a reserve of 90 MiB, which fits into the pool, was refused");
    set(101).expect_err("a reserve was accepted that exceeds the pool");
}

/// The reserves must fit into the pool. So a reload applies the pool size and all reserves together
/// or none of them. The order of the VMs in the file does not matter.
#[test]
fn a_reload_is_applied_completely_or_not_at_all() {
    let reserves = |at: &Path, a: &str, b: &str| {
        let reserve = |mib: &str| format!("reserve = \"{mib}\"\n");
        vm(at, "a", &reserve(a)) + &vm(at, "b", &reserve(b))
    };
    let small = |rest: String| format!("pool_size = \"64MiB\"\n{rest}");
    let running = Running::start(|at| small(reserves(at, "40MiB", "20MiB")));
    let at = running.path();
    let held = || {
        let vms = running
            .client()
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms;
        let reserve = |name: &str| {
            let vm = vms
                .iter()
                .find(|vm| vm.name == name)
                .expect("the daemon does not list the VM");
            vm.quota.reserve_bytes >> 20
        };
        let size = running
            .client()
            .get_stats(None)
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .pool;
        (size.configured_bytes >> 20, reserve("a"), reserve("b"))
    };
    let good = |text: String, now: (i64, i64, i64)| {
        let said = running.reload(&text);
        assert!(
            said.contains("was reloaded"),
            "the log reports no reload: {said}"
        );
        assert_eq!(held(), now);
    };
    for (a, b) in [(20, 40), (40, 20)] {
        let text = reserves(at, &format!("{a}MiB"), &format!("{b}MiB"));
        good(small(text), (64, a, b));
    }

    // A control client increases the reserve of VM b to 24 MiB, while the file's reserve is 20 MiB.
    let quota = tmem_control::quota(Some(24 << 20), None, None);
    let set = running.client().set_quota("b".into(), quota).call();
    set.expect("a reserve that fits into the pool was refused");
    let config = tmem_model::DriverConfig::default();
    let mut guest = tmem_model::Driver::new(crate::common::guest("a"), config)
        .expect("cannot create the simulated guest");
    guest
        .connect(&at.join("a.sock"))
        .expect("cannot connect to the VM's socket");
    for (size, a, part) in [
        // In each case, a reserve does not fit: it is larger than the pool, or too large beside the
        // present reserve of VM b.
        ("128MiB", "1GiB", "VM \"a\": a reserve of 1073741824 bytes"),
        ("128MiB", "105MiB", "VM \"a\": a reserve of 110100480 bytes"),
        ("60MiB", "39MiB", "VM \"b\": a reserve of 25165824 bytes"),
    ] {
        let rest = reserves(at, a, "20MiB");
        let rate = "vm_pages_per_second = 1\n";
        let said = running.reload(&format!("pool_size = \"{size}\"\n{rate}{rest}"));
        // The log may contain the VM's name with escaped quotes, so the test removes backslashes.
        let said = said.replace('\\', "");
        assert!(
            said.contains("configuration is unchanged") && said.contains(part),
            "the log does not report an unchanged configuration and {part:?}: {said}"
        );
        assert_eq!(held(), (64, 40, 24));
        crate::common::work(&mut guest, 300);
        let stats = running.client().get_stats(Some("a".into())).call();
        assert_eq!(
            stats
                .expect("the daemon answered a valid varlink call with an error")
                .vms[0]
                .limited_pages,
            0
        );
    }
    // One reload makes the pool smaller, and the next one makes it larger. The reserves change,
    // too.
    good(
        format!("pool_size = \"40MiB\"\n{}", reserves(at, "10MiB", "30MiB")),
        (40, 10, 30),
    );
    good(
        format!(
            "pool_size = \"256MiB\"\n{}",
            reserves(at, "200MiB", "50MiB")
        ),
        (256, 200, 50),
    );
}

/// A reload adds the VMs that are new in the file, with their quotas and the owners of their
/// sockets. A VM that cannot be added is named with the reason, and does not prevent the rest.
#[test]
fn a_reload_adds_new_vms() {
    let pool = |rest: String| format!("pool_size = \"64MiB\"\n{rest}");
    let running = Running::start(|at| pool(vm(at, "a", "")));
    let at = running.path();
    let names = || -> Vec<String> {
        let vms = running.client().list_vms().call();
        let vms = vms.expect("the daemon answered a valid varlink call with an error");
        vms.vms.into_iter().map(|vm| vm.name).collect()
    };
    let reserve = |name: &str| {
        let vms = running.client().list_vms().call();
        let vms = vms.expect("the daemon answered a valid varlink call with an error");
        let vm = vms.vms.iter().find(|vm| vm.name == name);
        vm.expect("the daemon does not list the VM")
            .quota
            .reserve_bytes
    };
    let user = rustix::process::geteuid().as_raw();
    let b = vm(
        at,
        "b",
        &format!("owner = \"{user}\"\nreserve = \"24MiB\"\n"),
    );
    let said = running.reload(&pool(vm(at, "a", "") + &b));
    assert!(
        said.contains("was reloaded") && !said.contains("next start"),
        "the log does not report a complete reload: {said}"
    );
    assert_eq!(
        (names(), reserve("b")),
        (vec!["a".into(), "b".into()], 24 << 20)
    );
    let config = tmem_model::DriverConfig::default();
    let mut guest = tmem_model::Driver::new(crate::common::guest("b"), config)
        .expect("cannot create the simulated guest");
    guest
        .connect(&at.join("b.sock"))
        .expect("cannot connect to the socket of the new VM");
    crate::common::work(&mut guest, 300);

    // The file's reserves fit into the pool, but VM a has got a larger one. Nothing changes, and the
    // new VM has no socket.
    let quota = tmem_control::quota(Some(24 << 20), None, None);
    let set = running.client().set_quota("a".into(), quota).call();
    set.expect("a reserve that fits into the pool was refused");
    let c = vm(at, "c", "reserve = \"24MiB\"\n");
    let said = running.reload(&pool(vm(at, "a", "weight = 9\n") + &b + &c));
    assert!(
        said.contains("was reloaded") && reserve("c") == 24 << 20,
        "a reload that lowers a reserve and adds another one was refused: {said}"
    );
    let set = |mib: u64| {
        let quota = tmem_control::quota(Some(mib << 20), None, None);
        running.client().set_quota("a".into(), quota).call()
    };
    set(12).expect("a reserve that fits into the pool was refused");
    let d = vm(at, "d", "reserve = \"8MiB\"\n");
    let of_a = vm(at, "a", "weight = 9\n");
    let said = running.reload(&pool(format!("{of_a}{b}{c}{d}")));
    assert!(
        said.contains("configuration is unchanged") && said.contains("8388608"),
        "the log does not report an unchanged configuration and the reserve: {said}"
    );
    assert_eq!(names(), ["a", "b", "c"]);
    assert!(
        !at.join("d.sock").exists(),
        "the socket of the refused VM remains"
    );
    set(0).expect("a reserve of 0 was refused");

    // These VMs cannot be added now: the first two for their own reasons, the third for another VM.
    let spec = tmem_control::VmSpec {
        name: "added".into(),
        uuid: "01234567-89ab-cdef-0123-456789abcdef".into(),
        socket: at.join("added.sock").display().to_string(),
        owner: None,
        group: None,
        mode: None,
        memory_max_bytes: None,
        trust_domain: None,
        quota: tmem_control::quota(None, None, None),
    };
    let added = running.client().add_vm(spec).call();
    added.expect("the daemon did not add the VM");
    let socket = at.join("none/e.sock");
    let e = format!("[[vm]]\nname = \"e\"\nsocket = \"{}\"\n", socket.display());
    let f = vm(at, "f", "owner = \"no-such-user\"\n");
    let g = vm(at, "g", "uuid = \"01234567-89ab-cdef-0123-456789abcdef\"\n");
    let said = running.reload(&pool(format!("{of_a}{b}{c}{d}{e}{f}{g}")));
    for part in [
        "apply at the next start",
        "new VM e (socket",
        "new VM f (the user no-such-user",
        "new VM g (the VM added has the same UUID)",
    ] {
        assert!(
            said.contains(part),
            "the log does not contain {part:?}: {said}"
        );
    }
    assert_eq!(names(), ["a", "added", "b", "c", "d"]);
    // The next reload adds a VM whose obstacle is gone.
    fs::create_dir(at.join("none")).expect("cannot create the directory");
    let said = running.reload(&pool(format!("{of_a}{b}{c}{d}{e}")));
    assert!(
        !said.contains("next start"),
        "the log names changes that wait: {said}"
    );
    assert_eq!(names(), ["a", "added", "b", "c", "d", "e"]);
    crate::common::work(&mut guest, 300);
}

/// A reload compares the names of users and groups, because the sandboxed daemon cannot look up
/// their numbers.
#[test]
fn users_and_groups_are_looked_up_only_at_the_start() {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let text = |at: &Path, group: &str, user: &str| {
        format!(
            "pool_size = \"64MiB\"\ncontrol_group = \"{group}\"\ncontrol_read_only_group = \
             \"{group}\"\n{}",
            vm(at, "a", &format!("owner = \"{user}\"\n"))
        )
    };
    let own = |at: &Path| text(at, &group.as_raw().to_string(), &user.as_raw().to_string());
    let daemon = Running::start(own);
    let at = daemon.path();
    let said = daemon.reload(&own(at));
    assert!(
        said.contains("was reloaded") && !said.contains("next start"),
        "the log does not report a complete reload: {said}"
    );
    let said = daemon.reload(&text(at, "no-such-group", "no-such-user"));
    for part in [
        "was reloaded",
        "next start",
        "control_group",
        "control_read_only_group",
        "owner, UUID or trust domain of VM a",
    ] {
        assert!(
            said.contains(part),
            "the log does not contain {part:?}: {said}"
        );
    }
    // At the next start, tmemd reports the unknown names and ends. So it never runs with sockets
    // whose owner is wrong.
    let next = Command::new(env!("CARGO_BIN_EXE_tmemd"))
        .arg("--config")
        .arg(at.join("tmemd.toml"))
        .output()
        .expect("cannot run the program");
    let said = String::from_utf8_lossy(&next.stderr).replace('\\', "");
    assert_eq!(
        next.status.code(),
        Some(1),
        "tmemd did not end with code 1: {said}"
    );
    for part in [
        "control_group",
        "no-such-group",
        "getent group no-such-group",
        "create the account",
    ] {
        assert!(
            said.contains(part),
            "the error does not contain {part:?}: {said}"
        );
    }
}

fn check(directory: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tmemd"));
    command
        .arg("--check-config")
        .arg("--config")
        .arg(directory.join("tmemd.toml"));
    command.args(more).output().expect("cannot run the program")
}

#[test]
fn the_option_check_config_checks_a_file_and_starts_no_daemon() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let at = directory.path();
    let fails = |more: &[&str], part: &str| {
        let output = check(at, more);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            output.status.code(),
            Some(78),
            "tmemd did not end with the status of a configuration error: {error}"
        );
        assert!(
            error.contains(part) && error.contains("tmemd"),
            "the error does not name tmemd and {part:?}: {error}"
        );
    };
    fails(&[], "tmemd.toml");
    file(at, &toml(at, "pool_size = \"64MiB\"\n"));
    let output = check(at, &[]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("tmemd.toml: good"));
    assert!(
        !at.join("control").exists(),
        "tmemd created its socket although it only checked the configuration"
    );
    file(at, &toml(at, "pool_size = \"64MiB\"\nworkrs = 2\n"));
    fails(&[], "tmemd.toml: line 6: workrs = 2: unknown field");
    // Options take precedence over the file. tmemd checks the file and the options together.
    file(at, &toml(at, &vm(at, "a", "")));
    fails(&[], "pool_size");
    assert!(check(at, &["--pool-size", "64MiB"]).status.success());
    let same = format!("name=a,socket={}/b.sock", at.display());
    fails(&["--pool-size", "64MiB", "--vm", &same], "same name");
    file(at, &toml(at, &vm(at, "a", "owner = \"no-such-user\"\n")));
    fails(
        &["--pool-size", "64MiB"],
        "VM \"a\": owner=no-such-user: the account is neither a user of this host",
    );
    for (option, value) in [
        ("--control-group", "no-such"),
        ("--control-read-only-group", "4294967295"),
    ] {
        file(at, &toml(at, ""));
        fails(&["--pool-size", "64MiB", option, value], value);
        assert!(
            check(at, &["--pool-size", "64MiB", option, "0"])
                .status
                .success()
        );
    }
    assert!(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tmemd.toml")
            .exists()
    );
}

/// The exit status tells systemd whether another start can succeed. After a failure that another
/// start may cure, a daemon that systemd started waits before it ends, unless a signal stops it.
#[test]
fn a_failed_start_ends_with_the_status_of_its_cause() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let at = directory.path();
    let start = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmemd"));
        command.arg("--config").arg(at.join("tmemd.toml"));
        command.args(options).env_remove("NOTIFY_SOCKET");
        command.stderr(Stdio::null());
        command
    };
    let status = |options: &[&str]| {
        let status = start(options).status().expect("cannot run the program");
        status.code().expect("a signal ended the program")
    };
    file(at, &toml(at, "pool_size = \"64MiB\"\nworkrs = 2\n"));
    assert_eq!(status(&[]), 78, "a misspelt key");
    file(at, &toml(at, ""));
    assert_eq!(status(&[]), 78, "a pool without a size");
    file(at, &toml(at, "pool_size = \"64MiB\"\n"));
    let vm = format!("name=a,socket={}/a.sock,reserve=65MiB", at.display());
    assert_eq!(status(&["--vm", &vm]), 78, "a reserve larger than the pool");
    assert_eq!(status(&["--no-such-option"]), 2, "an unknown option");
    // Another process listens on the path of the control socket.
    let taken = at.join("taken");
    let _other = UnixListener::bind(&taken).expect("cannot bind the socket");
    let control = ["--control", taken.to_str().expect("the path is not UTF-8")];
    assert_eq!(status(&control), 1, "a socket that is in use");
    let mut service = start(&control);
    service.env("NOTIFY_SOCKET", at.join("no-such-socket"));
    let began = Instant::now();
    let mut child = service.spawn().expect("cannot run the program");
    let ended = child.wait().expect("cannot wait for the process");
    assert_eq!(ended.code(), Some(1));
    assert!(
        began.elapsed() >= Duration::from_secs(5),
        "the daemon ended after {:?}, so that systemd would start it many times a minute",
        began.elapsed()
    );
    let mut child = service
        .stderr(Stdio::piped())
        .spawn()
        .expect("cannot run the program");
    let log = BufReader::new(child.stderr.take().expect("stderr is not a pipe"));
    let failed = |line: std::io::Result<String>| line.is_ok_and(|line| line.contains("listening"));
    assert!(log.lines().any(failed), "the log has no reason");
    let began = Instant::now();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)
        .expect("cannot send the signal");
    child.wait().expect("cannot wait for the process");
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "SIGTERM did not end the pause after a failed start"
    );
}

/// If a VM exceeds the configured rate, the daemon refuses its puts and answers its gets with
/// misses at once. A reload can change the rate while guests send requests.
#[test]
fn a_reload_changes_the_rate_limit() {
    let limited = "pool_size = \"64MiB\"\nvm_pages_per_second = 100\n";
    let running = Running::start(|directory| {
        format!(
            "{limited}{}{}",
            vm(directory, "web", ""),
            vm(directory, "db", "")
        )
    });
    let mut guests: Vec<tmem_model::Driver> = Vec::new();
    for (number, name) in ["web", "db"].into_iter().enumerate() {
        let guest = crate::common::guest(name);
        let config = tmem_model::DriverConfig {
            seed: number as u64,
            ..Default::default()
        };
        let mut driver =
            tmem_model::Driver::new(guest, config).expect("cannot create the simulated guest");
        let socket = running.path().join(format!("{name}.sock"));
        driver
            .connect(&socket)
            .expect("cannot connect to the VM's socket");
        guests.push(driver);
    }
    let figures = |name: &str| {
        let stats = running.client().get_stats(Some(name.into())).call();
        let vm = stats
            .expect("the daemon answered a valid varlink call with an error")
            .vms
            .remove(0);
        (vm.limited_pages, vm.requests)
    };
    // The guest sends requests as fast as it can. The daemon answers each request at once, refuses
    // most puts, and answers most gets with misses.
    crate::common::work(&mut guests[0], 300);
    let (pages, requests) = figures("web");
    assert!(
        pages > 500 && requests >= 300,
        "{pages} pages of {requests} requests were limited, expected more than 500 of at least 300"
    );
    // The daemon limits the rate of each VM separately, so VM db is not affected.
    for index in 0..4 {
        assert!(guests[1].put(1, index, index + 1) && guests[1].get(1, index, index + 1));
        guests[1]
            .settle()
            .expect("the device did not answer each request correctly");
    }
    assert_eq!((figures("db").0, guests[1].model.counts().hits), (0, 4));
    let rest = format!(
        "pool_size = \"64MiB\"\n{}{}",
        vm(running.path(), "web", ""),
        vm(running.path(), "db", "")
    );
    let log = running.reload(&rest);
    assert!(
        !log.contains("next start"),
        "the log says that the removed rate applies only at the next start: {log}"
    );
    let before = figures("web").0;
    crate::common::work(&mut guests[0], 300);
    assert_eq!(
        figures("web").0,
        before,
        "pages were limited although the rate was removed"
    );
    guests[0]
        .get_all()
        .expect("the device did not answer each request correctly");
}

/// Runs in a mount namespace of its own: adds an account to systemd's user records, and runs the
/// daemon. The record is in no file that the daemon itself could read.
const WITH_DIRECTORY: &str = "mount --bind \"$1\" /etc/nsswitch.conf && shift && mount -t tmpfs none /run && mkdir /run/userdb && \
     printf '{\"userName\":\"tmemdir\",\"uid\":61234,\"gid\":61235,\"disposition\":\"regular\"}' \
     >/run/userdb/tmemdir.user && \
     printf '{\"groupName\":\"tmemdir\",\"gid\":61235}' >/run/userdb/tmemdir.group && \
     exec \"$@\"";

/// systemd's user records stand for a directory service: the C library gets them from a module that
/// /etc/nsswitch.conf names. The daemon looks them up before it enters its sandbox.
#[test]
fn accounts_of_a_directory_service_are_found_before_the_sandbox() {
    if !rustix::process::geteuid().is_root() {
        return skipped(Missing::Root, "mounting a file system over /run needs root");
    }
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let at = directory.path();
    fs::write(
        at.join("nsswitch.conf"),
        "passwd: files systemd\ngroup: files systemd\n",
    )
    .expect("cannot write the file");
    let account = "control_group = \"tmemdir\"\npool_size = \"64MiB\"\n";
    let owned = vm(at, "a", "owner = \"tmemdir\"\n");
    file(at, &toml(at, &format!("{account}{owned}")));
    let command = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        let script = ["--mount", "sh", "-c", WITH_DIRECTORY, "sh"];
        command.args(script).arg(at.join("nsswitch.conf"));
        command.arg(env!("CARGO_BIN_EXE_tmemd"));
        command.arg("--config").arg(at.join("tmemd.toml"));
        command.args(arguments);
        command
    };
    let checked = command(&["--check-config"])
        .output()
        .expect("cannot run the program");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "the accounts are unknown: {said}");
    let mut daemon = command(&[]).spawn().expect("cannot run the program");
    let id = |name: &str| fs::metadata(at.join(name)).map(|file| (file.uid(), file.gid()));
    until("the daemon has its sockets", || {
        id("a.sock").is_ok_and(|(uid, _)| uid == 61234) && id("control").is_ok()
    });
    assert_eq!(id("control").map(|(_, gid)| gid).ok(), Some(61235));
    daemon.kill().expect("cannot end the daemon");
    daemon.wait().expect("cannot wait for the daemon");
}
