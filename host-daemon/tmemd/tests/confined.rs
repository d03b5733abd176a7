// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the real daemon in its sandbox. It is started as its systemd unit starts it, with an
//! unprivileged user and two capabilities, or as root starts it from a shell.

use crate::common::until;
use rustix::process::geteuid;
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use tempfile::TempDir;
use tmem_control::{Quota, VarlinkClient, VarlinkClientInterface, VmSpec};
use tmem_model::fault::{self, Expect, Target};
use tmem_model::{Driver, DriverConfig, Missing, skipped};

/// User id of nobody. The daemon runs as this user, who owns no files on the host.
const USER: u32 = 65534;
/// User id of the user that runs QEMU for libvirt on Debian.
const QEMU: u32 = 64055;
/// Id of a group that may use the control socket. `USER`, the user of the daemon in these tests, is
/// not a member of the group.
const ADMINS: u32 = 64058;
/// The capabilities that the systemd unit grants the daemon: CAP_CHOWN and CAP_FOWNER.
const CAPABILITIES: u64 = 1 << 0 | 1 << 3;
/// The capability CAP_IPC_LOCK, as a bit. Root has it on a host, but not in a container.
const IPC_LOCK: u64 = 1 << 14;

/// Number of seccomp filters that every thread of the daemon has. Each kind of thread has more.
const FILTERS: u32 = 3;

struct Running(Child);

/// Restricts the user, groups and capabilities of a command, as the systemd unit does.
fn confine(command: &mut Command) {
    let capabilities = "-all,+chown,+fowner";
    command
        .args([format!("--reuid={USER}"), format!("--regid={USER}")])
        .arg("--clear-groups")
        .arg(format!("--inh-caps={capabilities}"))
        .arg(format!("--ambient-caps={capabilities}"))
        .arg(format!("--bounding-set={capabilities}"));
}

/// Starts the daemon with the user and the capabilities of its systemd unit.
fn start(directory: &Path, control: &str) -> Running {
    let mut command = Command::new("setpriv");
    confine(&mut command);
    start_by(command, directory, control)
}

fn start_by(mut command: Command, directory: &Path, control: &str) -> Running {
    let child = command
        .arg(directory.join("tmemd"))
        .args(["--pool-size", "64MiB", "--config", "/dev/null", "--control"])
        .arg(directory.join("run").join(control))
        .args(["--control-group", &ADMINS.to_string()])
        .arg("--trace")
        .arg(directory.join("traces").join(control))
        .spawn();
    let daemon = Running(child.expect("cannot start tmemd"));
    until("tmemd serves", || {
        UnixStream::connect(directory.join("run").join(control)).is_ok()
    });
    daemon
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn status(pid: u32) -> HashMap<String, String> {
    status_of(&pid.to_string())
}

fn status_of(task: &str) -> HashMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{task}/status"))
        .expect("cannot read the process's status");
    let lines = text.lines().filter_map(|line| line.split_once(":\t"));
    lines
        .map(|(key, value)| (key.into(), value.into()))
        .collect()
}

/// Returns the number of seccomp filters that each kind of thread has, by the name of the kind.
fn filters(pid: u32) -> HashMap<String, u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("cannot list the directory");
    let of_task = |task: PathBuf| {
        // The thread of a connection may end after it was listed and before its files are read.
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let text = fs::read_to_string(task.join("status")).ok()?;
        let mut lines = text.lines();
        let filters = lines.find_map(|line| line.strip_prefix("Seccomp_filters:\t"));
        let filters = filters
            .expect("the kernel is older than 5.15 and does not report Seccomp_filters")
            .parse()
            .expect("Seccomp_filters in the status of a thread is not a number");
        Some((name.trim().split('-').next()?.to_owned(), filters))
    };
    tasks
        .filter_map(|task| of_task(task.expect("cannot read a directory entry").path()))
        .collect()
}

fn client(control: &Path) -> VarlinkClient {
    tmem_control::connect(control).expect("cannot connect to the control socket")
}

/// Copies the daemon's program into a temporary directory, and creates the directories for its
/// sockets and traces there. They belong to `user`.
fn directories(user: u32) -> TempDir {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let at = |name: &str| directory.path().join(name);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755))
        .expect("cannot change the file's mode");
    // cp(1) copies the program. If the test wrote the copy itself, a process that another test
    // starts meanwhile could inherit the file descriptor. The kernel does not execute a file that
    // is open for writing.
    let mut copy = Command::new("cp");
    let copied = copy
        .arg(env!("CARGO_BIN_EXE_tmemd"))
        .arg(at("tmemd"))
        .status();
    assert!(copied.expect("cannot run cp").success());
    for name in ["run", "traces"] {
        fs::create_dir(at(name)).expect("cannot create the directory");
        chown(at(name), Some(user), Some(user)).expect("cannot change the file's owner");
    }
    directory
}

fn web1(socket: &Path) -> VmSpec {
    VmSpec {
        uuid: "5ca1ab1e-0000-4000-8000-000000000001".into(),
        name: "web1".into(),
        socket: socket.display().to_string(),
        owner: Some(QEMU.into()),
        group: Some(QEMU.into()),
        mode: Some(0o600),
        memory_max_bytes: None,
        trust_domain: None,
        quota: Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 100,
        },
    }
}

#[test]
fn the_daemon_serves_a_qemu_of_another_user() {
    if !geteuid().is_root() {
        return skipped(
            Missing::Root,
            "only root can start processes of other users",
        );
    }
    let directory = directories(USER);
    let at = |name: &str| directory.path().join(name);
    let daemon = start(directory.path(), "control");
    let socket = at("run/web1.sock");
    let control = fs::metadata(at("run/control")).expect("cannot read the file's attributes");
    assert_eq!((control.uid(), control.gid()), (USER, ADMINS));
    let mut full = client(&at("run/control"));
    let mut added = full.add_vm(web1(&socket));
    assert!(added.call().expect("the daemon did not add the VM").added);
    let mut vm = None;
    until("the VM's socket exists", || {
        vm = UnixStream::connect(&socket).ok();
        vm.is_some()
    });
    let metadata = fs::metadata(&socket).expect("cannot read the file's attributes");
    assert_eq!((metadata.uid(), metadata.gid()), (QEMU, QEMU));
    assert_eq!(metadata.mode() & 0o777, 0o600);

    assert!(
        at("traces/control").exists(),
        "the trace was not created in its directory"
    );

    let status = status(daemon.0.id());
    let number = |key: &str, radix| {
        u64::from_str_radix(status[key].trim(), radix)
            .unwrap_or_else(|error| panic!("{key} of the process is not a number: {error}"))
    };
    assert_eq!(number("NoNewPrivs", 10), 1);
    // The value 2 of the field Seccomp means that seccomp filters apply, see proc_pid_status(5).
    assert_eq!(number("Seccomp", 10), 2);
    assert_eq!(number("CapEff", 16), CAPABILITIES);
    assert_eq!(number("CapBnd", 16), CAPABILITIES);
    // The daemon's files in /proc belong to root. Other processes of the daemon's user therefore
    // cannot inspect the daemon.
    let own = fs::metadata(format!("/proc/{}/mem", daemon.0.id()))
        .expect("tmemd was not started or has already ended");
    assert_eq!(
        own.uid(),
        0,
        "the files of tmemd in /proc do not belong to root, so its user can trace it"
    );
    // Each thread of a connection (named `vm`) has two filters in addition to the common ones. Each
    // thread of another kind has one.
    until("each kind of thread has its filters", || {
        let filters = filters(daemon.0.id());
        let has = |kind, more| filters.get(kind) == Some(&(FILTERS + more));
        let narrow = ["worker", "background", "unmapper", "trace"];
        let later = ["tmemd", "acceptor", "watchdog", "pressure", "control"];
        narrow.into_iter().all(|kind| has(kind, 1))
            && later.into_iter().all(|kind| has(kind, 1))
            && has("vm", 2)
    });
    drop(vm);

    // A daemon that is killed leaves the socket of its VM behind, which belongs to another user.
    // The next daemon replaces that socket.
    drop(daemon);
    fs::remove_file(at("traces/control")).expect("cannot remove the file");
    let _next = start(directory.path(), "control");
    let told = || {
        let metadata = fs::metadata(&socket).expect("cannot read the file's attributes");
        (metadata.ino(), metadata.uid())
    };
    until("tmemd serves the VM's socket again", || {
        UnixStream::connect(&socket).is_ok()
    });
    let is = told();
    assert_eq!(is.1, QEMU);
    // A second daemon does not replace the socket of a daemon that still runs.
    let _other = start(directory.path(), "other");
    // The second daemon tries to bind the VM's socket before it answers a call. So the attempt to
    // bind is over when it answers the following call.
    let vms = client(&at("run/other"))
        .list_vms()
        .call()
        .expect("the daemon answered a valid varlink call with an error")
        .vms;
    assert!(vms.is_empty());
    assert_eq!(told(), is);
}

/// If root starts the daemon, each of its threads drops all capabilities that it does not need.
#[test]
fn as_root_the_daemon_keeps_only_needed_capabilities() {
    if !geteuid().is_root() {
        return skipped(Missing::Root, "only root can start the daemon as root");
    }
    let directory = directories(0);
    let at = |name: &str| directory.path().join(name);
    let run = |control| {
        // The limit on locked memory is too low for the pool. With CAP_IPC_LOCK, root may lock more
        // memory than the limit.
        let mut command = Command::new("prlimit");
        command.arg("--memlock=65536:65536");
        start_by(command, directory.path(), control)
    };
    let daemon = run("control");
    let socket = at("run/web1.sock");
    let mut full = client(&at("run/control"));
    let added = full.add_vm(web1(&socket)).call();
    assert!(added.expect("the daemon did not add the VM").added);
    assert_eq!(
        fs::metadata(&socket)
            .expect("cannot read the file's attributes")
            .uid(),
        QEMU
    );
    // The test connects to the VM's socket, so that the daemon has a thread for a connection.
    let _vm = UnixStream::connect(&socket).expect("root cannot connect to a socket");

    let pid = daemon.0.id();
    let may_lock = status(std::process::id())["CapPrm"].clone();
    let may_lock = u64::from_str_radix(&may_lock, 16)
        .expect("the text is not a hexadecimal number")
        & IPC_LOCK;
    let keeps = CAPABILITIES | may_lock;
    until("the connection's thread exists", || {
        filters(pid).contains_key("vm")
    });
    for task in fs::read_dir(format!("/proc/{pid}/task")).expect("cannot list the directory") {
        let id = task
            .expect("cannot read a directory entry")
            .file_name()
            .into_string()
            .expect("a thread's id is not a number");
        let status = status_of(&format!("{pid}/task/{id}"));
        let name = &status["Name"];
        let set = |key: &str| {
            u64::from_str_radix(&status[key], 16).expect("the text is not a hexadecimal number")
        };
        for key in ["CapEff", "CapPrm", "CapBnd"] {
            assert_eq!(
                set(key),
                keeps,
                "thread {name} does not have exactly the expected capabilities in {key}"
            );
        }
        assert_eq!(
            set("CapInh") | set("CapAmb"),
            0,
            "thread {name} has inheritable or ambient capabilities"
        );
    }
    if may_lock != 0 {
        let locked = status(pid)["VmLck"].clone();
        assert_ne!(
            locked.trim(),
            "0 kB",
            "tmemd locked no memory, so pages of guests can be swapped"
        );
    }
    let told = full
        .get_stats(None)
        .call()
        .expect("the daemon answered a valid varlink call with an error")
        .daemon;
    assert_eq!(
        told.memory_locked,
        may_lock != 0,
        "memory_locked must be true exactly if tmemd has CAP_IPC_LOCK"
    );
    // The next daemon replaces the sockets that the first daemon gave to other users.
    drop(daemon);
    fs::remove_file(at("traces/control")).expect("cannot remove the file");
    let _next = run("control");
    until("tmemd serves the VM's socket again", || {
        UnixStream::connect(&socket).is_ok()
    });
}

/// If the kernel does not let the daemon lock its memory, the daemon reports that in its
/// statistics. `tmemctl doctor` reads the report.
#[test]
fn unlocked_memory_is_reported_in_statistics() {
    if !geteuid().is_root() {
        return skipped(
            Missing::Root,
            "only root can start processes of other users",
        );
    }
    let directory = directories(USER);
    let mut command = Command::new("prlimit");
    command.args(["--memlock=65536:65536", "setpriv"]);
    confine(&mut command);
    let _daemon = start_by(command, directory.path(), "control");
    let stats = client(&directory.path().join("run/control"))
        .get_stats(None)
        .call();
    assert!(
        !stats
            .expect("the daemon answered a valid varlink call with an error")
            .daemon
            .memory_locked
    );
}

/// Shell script that starts the daemon. In the daemon's mount namespace, the directory `$2`
/// replaces the journal's directory. The variable JOURNAL_STREAM tells the daemon that its stderr
/// is the journal.
const BESIDE_A_JOURNAL: &str = r#"
set -e
mount -t tmpfs none /run
mkdir -p /run/systemd/journal
mount --bind "$2" /run/systemd/journal
exec 2>"$2/stderr"
export JOURNAL_STREAM="$(stat -Lc %d:%i "$2/stderr")"
exec "$1" --pool-size 64MiB --config /dev/null --control "$2/control" --vm "socket=$2/web1.sock,name=web1"
"#;

/// The seccomp filters let each kind of thread send log lines to the journal, as datagrams. They
/// let no thread call sendmsg(2), which could pass file descriptors.
#[test]
fn threads_of_all_kinds_log_to_the_journal() {
    let mounts = Command::new("unshare")
        .args(["-Urm", "mount", "-t", "tmpfs", "none", "/run"])
        .status();
    if !mounts.is_ok_and(|status| status.success()) {
        return skipped(
            Missing::Root,
            "this test replaces the journal's directory, which needs user namespaces",
        );
    }
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let journal =
        UnixDatagram::bind(directory.path().join("socket")).expect("cannot bind the socket");
    journal
        .set_nonblocking(true)
        .expect("cannot make the socket nonblocking");
    let child = Command::new("unshare")
        .args(["-Urm", "sh", "-c", BESIDE_A_JOURNAL, "sh"])
        .args([Path::new(env!("CARGO_BIN_EXE_tmemd")), directory.path()])
        .spawn();
    let _daemon = Running(child.expect("cannot start tmemd"));
    let mut lines = Vec::new();
    let mut told = |what: &str, parts: &[&str]| {
        until(what, || {
            let mut line = [0; 4096];
            while let Ok(bytes) = journal.recv(&mut line) {
                lines.push(String::from_utf8_lossy(&line[..bytes]).into_owned());
            }
            let has_all = |line: &String| parts.iter().all(|part| line.contains(part));
            lines.iter().any(has_all)
        });
    };
    let mut driver = Driver::new(crate::common::guest("web1"), DriverConfig::default())
        .expect("cannot create the simulated guest");
    let socket = directory.path().join("web1.sock");
    until("tmemd accepts the VM's connection", || {
        driver.guest.connect(&socket).is_ok()
    });
    driver.start().expect("cannot start the simulated guest");
    told(
        "the journal has a line of a connection thread",
        &["connected", "TMEM_VM", "web1"],
    );
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
    fault.send(&mut driver.guest, target);
    told(
        "the journal has a line of a worker",
        &["stopped until", "TMEM_VM", "web1"],
    );
    let mut control = client(&directory.path().join("control"));
    control
        .flush_vm("web1".into())
        .call()
        .expect("the daemon did not flush the VM");
    told(
        "the journal has a line of a control client's thread",
        &["flushed", "TMEM_PAGES"],
    );
    let lines = fs::read_to_string(directory.path().join("stderr")).expect("cannot read the file");
    assert!(
        !lines.contains("flushed"),
        "stderr repeats messages that the journal received: {lines}"
    );
}
