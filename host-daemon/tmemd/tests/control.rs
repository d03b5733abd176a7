// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the daemon without guests: the control interface, the files of its sockets, and an
//! orderly stop.

use crate::common::{TIMEOUT, until};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use tmem_control::{Quota, VarlinkClientInterface};
use tmemd::{Config, Daemon, PressureConfig, StartError};

fn config(directory: &Path) -> Config {
    let vms = [
        "web,uuid=01234567-89ab-cdef-0123-456789abcdef",
        "db,trust_domain=team,reserve=4MiB,limit=16MiB,weight=7",
    ];
    Config::for_test(directory, &vms)
}

fn sockets(config: &Config) -> Vec<PathBuf> {
    let mut sockets = vec![config.control.clone()];
    sockets.extend(config.control_read_only.clone());
    sockets.extend(config.vms.iter().map(|vm| vm.socket.clone()));
    sockets
}

#[test]
fn list_and_stats_calls_are_answered_on_both_control_sockets() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    for socket in &sockets(&config)[..2] {
        let mut client =
            tmem_control::connect(socket).expect("cannot connect to the control socket");
        let vms = client
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms;
        let names: Vec<_> = vms.iter().map(|vm| vm.name.as_str()).collect();
        assert_eq!(names, ["db", "web"]);
        assert_eq!(vms[0].trust_domain.as_deref(), Some("team"));
        let quota = Quota {
            reserve_bytes: 4 << 20,
            limit_bytes: Some(16 << 20),
            weight: 7,
        };
        assert_eq!(vms[0].quota, quota);
        assert_eq!(
            vms[1].uuid.as_deref(),
            Some("01234567-89ab-cdef-0123-456789abcdef")
        );

        let stats = client
            .get_stats(None)
            .call()
            .expect("the daemon answered a valid varlink call with an error");
        assert_eq!(stats.pool.size_bytes, 64 << 20);
        assert_eq!((stats.daemon.vms, stats.daemon.vms_connected), (2, 0));
        assert_eq!(stats.daemon.workers, 2);
        assert_eq!(stats.vms.len(), 2);
        let stats = client
            .get_stats(Some("web".into()))
            .call()
            .expect("the daemon answered a valid varlink call with an error");
        assert_eq!(stats.vms.len(), 1);
        assert_eq!(stats.vms[0].name, "web");
        let error = client
            .get_stats(Some("nobody".into()))
            .call()
            .expect_err("the daemon returned statistics of an unknown VM");
        assert!(
            matches!(error.kind(), tmem_control::ErrorKind::NoSuchVm(Some(args))
            if args.name == "nobody")
        );
    }
}

#[test]
fn vm_connections_and_refusals_are_counted() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut client =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    let mut web = || {
        client
            .get_stats(Some("web".into()))
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms
            .remove(0)
    };
    let vm = UnixStream::connect(&config.vms[0].socket).expect("cannot connect to the socket");
    until("the VM is connected", || web().connected);
    let mut second =
        UnixStream::connect(&config.vms[0].socket).expect("cannot connect to the socket");
    assert_eq!(
        second
            .read(&mut [0])
            .expect("the daemon did not close the second connection"),
        0,
        "the daemon sent bytes on the second connection"
    );
    assert_eq!((web().connections, web().connections_refused), (1, 1));
    assert!(web().connected, "the connected VM was disconnected");
    drop(vm);
    until("the VM is disconnected", || !web().connected);
}

/// A front end that sends half a message delays neither other connections nor the stop of the
/// daemon.
#[test]
fn an_incomplete_message_blocks_only_its_connection() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    // The message is GET_FEATURES of the vhost-user protocol, version 1, without a payload.
    let message = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    let half = UnixStream::connect(&config.vms[0].socket).expect("cannot connect to the socket");
    (&half)
        .write_all(&message[..7])
        .expect("cannot send the bytes");
    let mut other =
        UnixStream::connect(&config.vms[1].socket).expect("cannot connect to the socket");
    other
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    for _ in 0..100 {
        other.write_all(&message).expect("cannot send the bytes");
        other
            .read_exact(&mut [0; 12 + 8])
            .expect("the daemon did not answer");
    }
    (&half)
        .write_all(&message[7..])
        .expect("cannot send the bytes");
    half.set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    (&half)
        .read_exact(&mut [0; 12 + 8])
        .expect("the daemon did not answer the completed message");
    (&half)
        .write_all(&message[..3])
        .expect("cannot send the bytes");
    daemon.stop();
}

#[test]
fn quotas_change_unless_they_are_invalid() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut full =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    let good = Quota {
        reserve_bytes: 1 << 20,
        limit_bytes: None,
        weight: 5,
    };
    let quota_of = |client: &mut tmem_control::VarlinkClient, number: usize| {
        client
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms[number]
            .quota
            .clone()
    };
    assert_eq!(quota_of(&mut full, 1).weight, 100);
    full.set_quota("web".into(), good.clone())
        .call()
        .expect("the daemon did not change the quota");
    assert_eq!(quota_of(&mut full, 1), good);
    for bad in [
        Quota {
            weight: -1,
            ..good.clone()
        },
        Quota {
            weight: 1 << 40,
            ..good.clone()
        },
        Quota {
            reserve_bytes: -1,
            ..good.clone()
        },
        Quota {
            limit_bytes: Some(1),
            ..good.clone()
        },
        // A reserve of 64 MiB does not fit into the pool of 64 MiB, of which another VM has
        // reserved 4 MiB.
        Quota {
            reserve_bytes: 64 << 20,
            ..good.clone()
        },
    ] {
        let error = full
            .set_quota("web".into(), bad)
            .call()
            .expect_err("the daemon accepted an invalid quota");
        assert!(
            matches!(error.kind(), tmem_control::ErrorKind::BadQuota(Some(args))
            if args.name == "web" && !args.reason.is_empty()),
            "the daemon did not answer with the error BadQuota: {error}"
        );
    }
    assert_eq!(quota_of(&mut full, 1), good);
}

/// A client of the control socket that sends too much, invalid bytes or half a message affects no
/// other client.
#[test]
fn misbehaving_clients_are_disconnected() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let half = UnixStream::connect(&config.control).expect("cannot connect to the socket");
    (&half)
        .write_all(b"{\"method\":")
        .expect("cannot send the bytes");
    let mut client =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    for message in [
        vec![b'x'; 1 << 20],
        b"nonsense\0".to_vec(),
        b"{}\0".to_vec(),
        b"\0".to_vec(),
        // This JSON message has as many nested arrays as fit into its maximum length. A recursive
        // parser would overflow its stack.
        [&[b'['; 60 << 10][..], b"\0"].concat(),
        [
            &br#"{"method":"io.virtiotmem.Control.ListVms","parameters":"#[..],
            &[b'['; 60 << 10],
            b"\0",
        ]
        .concat(),
    ] {
        let mut stream =
            UnixStream::connect(&config.control).expect("cannot connect to the socket");
        stream
            .set_read_timeout(Some(TIMEOUT))
            .expect("cannot set the socket's time-out");
        // Sending fails if the daemon closes the connection before it has received the whole
        // message.
        let _ = stream.write_all(&message);
        let end = stream.read_to_end(&mut Vec::new());
        let waits = end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!waits, "the daemon did not close the connection");
        client
            .list_vms()
            .call()
            .expect("the daemon does not serve other clients");
    }
    // The client sends a complete message together with the first bytes of a second message, and
    // then the rest of the second message. The daemon answers both messages.
    let mut stream = UnixStream::connect(&config.control).expect("cannot connect to the socket");
    stream
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    let call = b"{\"method\":\"io.virtiotmem.Control.ListVms\"}\0";
    stream
        .write_all(&[call, &call[..9]].concat())
        .expect("cannot send the bytes");
    stream.write_all(&call[9..]).expect("cannot send the bytes");
    let mut answers = Vec::new();
    while answers.iter().filter(|byte| **byte == 0).count() < 2 {
        let mut part = [0; 4096];
        let read = stream.read(&mut part).expect("the daemon did not answer");
        assert!(
            read > 0,
            "the daemon closed the connection instead of an answer"
        );
        answers.extend_from_slice(&part[..read]);
    }
}

#[test]
fn the_number_of_control_clients_is_limited() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let clients: Vec<_> = (0..16)
        .map(|_| UnixStream::connect(&config.control).expect("cannot connect to the socket"))
        .collect();
    let served = |mut stream: &UnixStream| {
        let call = b"{\"method\":\"io.virtiotmem.Control.ListVms\"}\0";
        stream
            .set_read_timeout(Some(TIMEOUT))
            .expect("cannot set the socket's time-out");
        stream.write_all(call).is_ok() && stream.read(&mut [0]).is_ok_and(|read| read > 0)
    };
    assert!(clients.iter().all(served));
    let refused = UnixStream::connect(&config.control).expect("cannot connect to the socket");
    assert!(!served(&refused));
    // Each control socket has its own limit of clients. So clients of one socket cannot keep
    // clients of the other socket out.
    let other = config
        .control_read_only
        .as_ref()
        .expect("the configuration names no read-only socket");
    assert!(served(
        &UnixStream::connect(other).expect("cannot connect to the socket")
    ));
    drop(clients);
    until("the daemon serves another client", || {
        served(&UnixStream::connect(&config.control).expect("cannot connect to the socket"))
    });
}

#[test]
fn sockets_have_mode_0660_and_are_removed_when_the_daemon_stops() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    for socket in sockets(&config) {
        let mode = fs::metadata(&socket)
            .expect("cannot read the file's attributes")
            .permissions()
            .mode();
        assert_eq!(
            mode & 0o777,
            0o660,
            "the mode of socket {} is not 0660",
            socket.display()
        );
    }
    // A connected control client and a connected VMM do not delay the stop of the daemon.
    let control = UnixStream::connect(&config.control).expect("cannot connect to the socket");
    let vm = UnixStream::connect(&config.vms[0].socket).expect("cannot connect to the socket");
    daemon.stop();
    for mut stream in [control, vm] {
        // A connection that the daemon has not accepted yet may be reset. The resulting error means
        // that the connection has ended, like a read of 0 bytes.
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    }
    for socket in sockets(&config) {
        assert!(
            !socket.exists(),
            "socket {} still exists after the daemon has stopped",
            socket.display()
        );
    }
}

#[test]
fn sockets_of_ended_daemons_are_replaced_and_sockets_in_use_are_not() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    for socket in sockets(&config) {
        drop(UnixListener::bind(socket).expect("cannot bind the socket"));
    }
    let daemon = Daemon::start(config.clone())
        .expect("a daemon did not replace the sockets of an ended one");
    for (number, socket) in sockets(&config).iter().enumerate() {
        let other = tempfile::tempdir().expect("cannot create a temporary directory");
        let mut second = self::config(other.path());
        match number {
            0 => second.control = socket.clone(),
            1 => second.control_read_only = Some(socket.clone()),
            _ => second.vms[number - 2].socket = socket.clone(),
        }
        let error = Daemon::start(second)
            .err()
            .expect("a second daemon started on the sockets of a running one")
            .to_string();
        assert!(
            error.contains(&socket.display().to_string()),
            "the error does not name the socket: {error}"
        );
        assert!(
            socket.exists(),
            "the second daemon removed {}",
            socket.display()
        );
    }
    let mut client =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    client
        .list_vms()
        .call()
        .expect("the first daemon does not serve any more");
    drop(daemon);

    fs::write(&config.control, "precious").expect("cannot write the file");
    let error = Daemon::start(config.clone())
        .err()
        .expect("a daemon started although a file is in place of its socket")
        .to_string();
    assert!(
        error.contains("not a socket"),
        "the error does not say \"not a socket\": {error}"
    );
    assert_eq!(
        fs::read(&config.control).expect("cannot read the file"),
        b"precious"
    );
}

#[test]
fn a_socket_of_another_daemon_is_not_removed() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    // A socket of another daemon takes the place of the daemon's control socket. It is created
    // while the daemon's file exists, so that the file system gives it another inode.
    let other = directory.path().join("other");
    let _other = UnixListener::bind(&other).expect("cannot bind the socket");
    fs::rename(&other, &config.control).expect("cannot rename the file");
    daemon.stop();
    assert!(config.control.exists());
}

#[test]
fn reserves_that_exceed_the_pool_are_refused_at_the_start() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let mut config = config(directory.path());
    config.vms[0].quota.reserve_bytes = 64 << 20;
    let error = Daemon::start(config.clone())
        .err()
        .expect("a configuration was accepted whose reserves exceed the pool");
    assert!(
        matches!(error, StartError::Config(_)),
        "the daemon did not refuse the configuration: {error}"
    );
    assert!(
        error.to_string().contains("VM \"db\""),
        "the error does not name the VM: {error}"
    );
    assert!(sockets(&config).iter().all(|socket| !socket.exists()));
}

/// A daemon process that is killed when the test ends, even if the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Killing fails if the daemon has already ended, so the error is ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn tmemd(directory: &Path) -> Running {
    let config = config(directory);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tmemd"));
    command
        .args(["--pool-size", "64MiB"])
        .args(crate::common::HOST_IS_NO_MATTER)
        .arg("--control")
        .arg(&config.control);
    for vm in &config.vms {
        let vm = format!("socket={},name={}", vm.socket.display(), vm.name);
        command.args(["--vm", &vm]);
    }
    Running(
        command
            .stderr(Stdio::piped())
            .spawn()
            .expect("cannot run the program"),
    )
}

#[test]
fn sigterm_and_sigint_end_the_daemon_cleanly() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let config = config(directory.path());
        let Running(child) = &mut tmemd(directory.path());
        until("tmemd serves", || {
            UnixStream::connect(&config.vms[1].socket).is_ok()
        });
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, signal).expect("cannot send the signal");
        assert_eq!(
            child.wait().expect("cannot wait for the process").code(),
            Some(0)
        );
        let mut log = String::new();
        child
            .stderr
            .take()
            .expect("the output of the process is not a pipe")
            .read_to_string(&mut log)
            .expect("the text is not UTF-8");
        assert!(
            log.contains("serving") && log.contains("stopped"),
            "the log does not report start and end: {log}"
        );
        assert_eq!(
            fs::read_dir(directory.path())
                .expect("cannot list the directory")
                .count(),
            0,
            "the daemon left a socket"
        );
    }
}

fn log_of(mut daemon: Running) -> String {
    let Running(child) = &mut daemon;
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)
        .expect("cannot send the signal");
    child.wait().expect("cannot wait for the process");
    let mut log = String::new();
    let mut stderr = child
        .stderr
        .take()
        .expect("the output of the process is not a pipe");
    stderr
        .read_to_string(&mut log)
        .expect("the text is not UTF-8");
    log
}

/// A user who may connect to a socket must not be able to fill the host's disk with log lines.
#[test]
fn log_lines_of_clients_are_rate_limited() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    let daemon = tmemd(directory.path());
    let connect = || UnixStream::connect(&config.control);
    until("tmemd serves", || connect().is_ok());
    let begun = Instant::now();
    let too_much = vec![b'x'; (64 << 10) + 1];
    for _ in 0..50 {
        let mut stream = connect().expect("cannot connect to the VM's socket");
        // Sending fails if the daemon closes the connection before it has received the whole
        // message.
        let _ = stream.write_all(&too_much);
        let _ = stream.read(&mut [0]);
    }
    let mut served = Vec::new();
    for _ in 0..100 {
        let mut stream = connect().expect("cannot connect to the VM's socket");
        stream
            .set_read_timeout(Some(TIMEOUT))
            .expect("cannot set the socket's time-out");
        let _ = stream.write_all(b"{\"method\":\"io.virtiotmem.Control.ListVms\"}\0");
        if stream.read(&mut [0]).is_ok_and(|read| read > 0) {
            served.push(stream);
        }
    }
    assert_eq!(served.len(), 16, "not exactly 16 clients were served");
    let log = log_of(daemon);
    let lines = log.matches("control socket: a client").count();
    // The daemon logs a burst of ten lines, and then one line every five seconds. The bound is a
    // little higher.
    let bound = 11 + 2 * begun.elapsed().as_secs() as usize / 5;
    assert!(
        (1..=bound).contains(&lines),
        "{lines} lines were logged, not 1 to {bound}: {log}"
    );
}

/// The limit of 64 KiB in docs/control.md applies to messages of clients. Answers of the daemon may
/// be longer.
#[test]
fn an_answer_may_be_longer_than_the_limit_for_calls() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let mut config = config(directory.path());
    config.vms = (0..64)
        .map(|nr| {
            let socket = directory.path().join(format!("{nr}.sock"));
            let text = format!("socket={},name=vm-{nr}", socket.display());
            text.parse().expect("valid settings of a VM were refused")
        })
        .collect();
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut stream = UnixStream::connect(&config.control).expect("cannot connect to the socket");
    stream
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    let call = b"{\"method\":\"io.virtiotmem.Control.GetStats\",\"parameters\":{}}\0";
    stream.write_all(call).expect("cannot send the bytes");
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    while answer.last() != Some(&0) {
        let read = stream.read(&mut part).expect("the daemon did not answer");
        assert!(
            read > 0,
            "the daemon closed the connection after {} bytes of its answer",
            answer.len()
        );
        answer.extend_from_slice(&part[..read]);
    }
    assert!(
        answer.len() > 64 << 10,
        "the answer has only {} bytes, which fit into the socket's buffer",
        answer.len()
    );
    let answer: serde_json::Value =
        serde_json::from_slice(&answer[..answer.len() - 1]).expect("the text is not JSON");
    let vms = answer["parameters"]["vms"].as_array().map(Vec::len);
    assert_eq!(vms, Some(64));
}

/// The daemon warns if other users can create sockets in its run directory. Such a user could
/// replace a VM's socket, and the VMM would share its guest's memory with that user's process.
#[test]
fn a_world_writable_directory_is_logged() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = config(directory.path());
    for (mode, named) in [(0o770, false), (0o777, true)] {
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode))
            .expect("cannot change the file's mode");
        let daemon = tmemd(directory.path());
        until("tmemd serves", || {
            UnixStream::connect(&config.control).is_ok()
        });
        let log = log_of(daemon);
        let warning = format!("everybody can write to {}", directory.path().display());
        assert_eq!(
            log.contains(&warning),
            named,
            "mode {mode:o}: the log must warn exactly if everybody can write: {log}"
        );
    }
}

#[test]
fn errors_name_the_invalid_command_line_argument() {
    for (arguments, part) in [
        (&["--pool-size", "12XB"][..], "XB"),
        (
            &["--pool-size", "64MiB", "--vm", "name=a"][..],
            "missing field `socket`",
        ),
        (
            &["--pool-size", "64MiB", "--control", "/missing/at/all"][..],
            "/missing/at/all: there is no directory /missing/at: create it",
        ),
        (&["--pool-size", "64MiB", "--workers", "0"][..], "0 workers"),
        (&[][..], "--pool-size"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_tmemd"))
            .args(arguments)
            .output()
            .expect("cannot run the program");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(part),
            "{arguments:?}: tmemd started, or its error does not contain {part:?}: {error}"
        );
    }
}

/// A test cannot make the host short of memory. So the daemon reads files in the test's directory
/// in place of /proc/meminfo and the PSI file.
#[test]
fn the_pool_shrinks_when_the_host_needs_memory_and_grows_back() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let path = |name: &str| directory.path().join(name);
    // The test replaces the files by renaming others, so that the daemon never reads half a file.
    let host = |available: u64, stall_us: u64| {
        let meminfo = format!(
            "MemAvailable:   {} kB\nSwapTotal:  131072 kB\nSwapFree:    98304 kB\n",
            available >> 10
        );
        let pressure = format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={stall_us}\n");
        for (name, text) in [("meminfo", meminfo), ("pressure", pressure)] {
            fs::write(path("new"), text).expect("cannot write the file");
            fs::rename(path("new"), path(name)).expect("cannot rename the file");
        }
    };
    host(1 << 30, 0);
    let config = Config {
        pressure: Some(PressureConfig {
            host_free_min_bytes: 256 << 20,
            meminfo: path("meminfo"),
            arcstats: path("arcstats"),
            stalls: Some(path("pressure")),
            group: None,
        }),
        ..config(directory.path())
    };
    let _daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut client =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    let mut pool = || {
        client
            .get_stats(None)
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .pool
    };
    assert_eq!((pool().size_bytes, pool().host_shrinks), (64 << 20, 0));

    host((256 << 20) - (1 << 20), 0);
    until("the pool shrinks", || pool().size_bytes < 64 << 20);
    until("the pool has its minimum size", || {
        pool().size_bytes == 1 << 20
    });
    assert!(pool().host_shrinks >= 1);
    assert_eq!((pool().configured_bytes, pool().host_grows), (64 << 20, 0));

    host(1 << 30, 0);
    until("the pool begins to grow", || pool().host_grows > 0);
    let size_bytes = pool().size_bytes;
    assert_eq!(pool().host_shrinks_stalls, 0);
    // From here on, the PSI file reports that tasks wait for memory during 15 % of the time.
    let begun = Instant::now();
    let stalled = |available| host(available, begun.elapsed().as_micros() as u64 * 15 / 100);
    until("the pool shrinks because tasks wait for memory", || {
        stalled(512 << 20);
        pool().size_bytes < size_bytes
    });
    let shrunk = pool();
    assert_eq!(shrunk.host_available_bytes, 512 << 20);
    assert_eq!(shrunk.host_swap_free_bytes, 96 << 20);
    assert!(shrunk.host_shrinks_stalls > 0);
    assert!(shrunk.host_shrinks > shrunk.host_shrinks_stalls);
    // Tasks of one control group wait because of its limit, and the host has 24 GiB available.
    until("the pool grows although tasks wait for memory", || {
        stalled(24 << 30);
        pool().host_grows > shrunk.host_grows
    });
    // ZFS's ARC has nearly all memory. The pool need not shrink, because ZFS can release it.
    fs::write(path("arcstats"), "size 4 25233982464\nc_min 4 1048576\n")
        .expect("cannot write the file");
    let shrinks = pool().host_shrinks;
    host(128 << 20, 0);
    until("the daemon reads the size of the ARC", || {
        pool().host_arc_bytes == 25_232_933_888
    });
    assert_eq!(pool().host_available_bytes, 25_232_933_888 + (128 << 20));
    assert_eq!(pool().host_shrinks, shrinks);
}
