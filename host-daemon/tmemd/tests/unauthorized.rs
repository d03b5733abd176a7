// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that the daemon refuses a peer that the mode of a socket's file admits, but the configured
//! permissions do not.
//!
//! The tests need root, because only root can connect as another user.

use crate::common::{Daemon, TIMEOUT, until};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control::accounts::Kind;
use tmem_control::{VarlinkClientInterface, VmSpec};
use tmem_model::{Missing, skipped};

const QEMU: u32 = 64055;
const READERS: u32 = 64056;
const OTHER: u32 = 64057;
/// Name of a user account and of a group that exist on every host.
const NAMED: &str = "daemon";

/// Runs `what` in a thread with the given user and groups. All other threads of the process still
/// run as root.
fn as_user<R: Send>(user: u32, groups: &[u32], what: impl FnOnce() -> R + Send) -> R {
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            set_thread_groups(&groups).expect("cannot change the thread's credentials as root");
            set_thread_res_gid(gid, gid, gid)
                .expect("cannot change the thread's credentials as root");
            set_thread_res_uid(uid, uid, uid)
                .expect("cannot change the thread's credentials as root");
            what()
        });
        thread.join().expect("the thread panicked")
    })
}

/// Connects to a socket and sends a message. Returns true if the daemon answers the message.
fn is_served(socket: &Path, message: &[u8]) -> bool {
    let mut stream =
        UnixStream::connect(socket).expect("the mode of the socket does not let the user connect");
    stream
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    // Sending fails if the daemon has already closed the connection, because the peer is not
    // authorized.
    let sent = stream.write_all(message);
    let answer = stream.read(&mut [0; 12]);
    let waits = matches!(&answer, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
    assert!(
        !waits,
        "the daemon neither answered the client nor closed its connection"
    );
    sent.is_ok() && answer.is_ok_and(|read| read > 0)
}

/// Connects to a socket with the given user and groups, and sends a request. Returns true if the
/// daemon answers the request.
fn served(user: u32, groups: &[u32], socket: &Path) -> bool {
    let message = match socket.extension() {
        // The message is GET_FEATURES of the vhost-user protocol, version 1, without a payload.
        Some(_) => [1u32, 1, 0].map(u32::to_ne_bytes).concat(),
        None => b"{\"method\":\"io.virtiotmem.Control.ListVms\"}\0".to_vec(),
    };
    as_user(user, groups, || is_served(socket, &message))
}

fn log(daemon: &Daemon) -> String {
    fs::read_to_string(daemon.path("log")).expect("cannot read the log")
}

/// Sets a file mode with which every user can connect to the socket, as an operator may do by
/// mistake.
fn let_everybody_in(socket: &Path) {
    fs::set_permissions(socket, Permissions::from_mode(0o666))
        .expect("cannot change the file's mode");
}

#[test]
fn unauthorized_peers_are_refused() {
    if !geteuid().is_root() {
        return skipped(Missing::Root, "only root can connect as other users");
    }
    let read_only = |directory: &Path| {
        let path = directory.join("read-only").display().to_string();
        vec!["--control-read-only".into(), path]
    };
    let daemon = Daemon::with_arguments(&[("given", None)], "64MiB", read_only);
    fs::set_permissions(daemon.path(""), Permissions::from_mode(0o755))
        .expect("cannot change the file's mode");
    let mut client = tmem_control::connect(&daemon.path("control"))
        .expect("cannot connect to the control socket");
    let socket = daemon.socket("added");
    let spec = VmSpec {
        uuid: "5ca1ab1e-0000-4000-8000-000000000001".into(),
        name: "added".into(),
        socket: socket.display().to_string(),
        owner: Some(QEMU.into()),
        group: None,
        mode: None,
        memory_max_bytes: None,
        trust_domain: None,
        quota: tmem_control::quota(None, None, None),
    };
    client
        .add_vm(spec)
        .call()
        .expect("the daemon did not add the VM");

    let (given, control) = (daemon.socket("given"), daemon.path("control"));
    let read_only = daemon.path("read-only");
    for socket in [&socket, &given, &control, &read_only] {
        let_everybody_in(socket);
    }
    // The test connects to a VM's socket at most once as an authorized peer. The daemon refuses a
    // second connection as long as it has not noticed the end of the first one.
    assert!(
        served(QEMU, &[], &socket),
        "the VM's socket refused its owner"
    );
    assert!(
        !served(OTHER, &[READERS], &socket),
        "the VM's socket served an unauthorized peer"
    );
    assert!(
        !served(QEMU, &[], &given),
        "the socket served the user of another VM"
    );
    for socket in [&control, &read_only] {
        assert!(
            !served(OTHER, &[READERS], socket),
            "{} served an unauthorized peer",
            socket.display()
        );
        chown(socket, None, Some(READERS)).expect("cannot change the file's owner");
        assert!(
            served(OTHER, &[READERS], socket),
            "{} refused a member of its group",
            socket.display()
        );
        assert!(served(0, &[], socket), "{} refused root", socket.display());
    }

    let log = log(&daemon);
    let line = |what: &str| log.lines().find(|line| line.contains(what));
    let of_vm = line(&format!(
        "a connection to {} is refused: process ",
        socket.display()
    ));
    let of_vm = of_vm.unwrap_or_else(|| {
        panic!("the log does not report the refused connection of the VM: {log}")
    });
    for part in [
        "vm=added",
        &format!("of user {OTHER}"),
        &format!("owner is user {QEMU}"),
        "--owner",
    ] {
        assert!(
            of_vm.contains(part),
            "the log line does not contain {part:?}: {of_vm}"
        );
    }
    let of_control =
        line("a client is refused: process ").expect("the log does not report the refused client");
    assert!(
        of_control.contains(&format!("of user {OTHER}")),
        "the log line does not name user {OTHER}: {of_control}"
    );
    let stats = client
        .get_stats(Some("added".into()))
        .call()
        .expect("the daemon answered a valid varlink call with an error");
    assert_eq!(stats.vms[0].connections_refused, 1);
}

/// At each start, the daemon itself gives its sockets to the configured users and groups. So no
/// administrator has to run chown or chgrp.
#[test]
fn sockets_belong_to_the_configured_users() {
    if !geteuid().is_root() {
        return skipped(
            Missing::Root,
            "only root can give sockets away and connect as other users",
        );
    }
    let named = |kind: Kind| {
        let number = kind
            .number(NAMED)
            .expect("the look-up of an account failed");
        number.unwrap_or_else(|| panic!("the host has no {} {NAMED}", kind.name()))
    };
    let (user, admins) = (named(Kind::User), named(Kind::Group));
    let mut daemon = Daemon::with_arguments(&[("given", None)], "64MiB", |directory| {
        let at = |name: &str| directory.join(name).display().to_string();
        let vm = format!("name=own,owner={NAMED},socket={}", at("own.sock"));
        let group = READERS.to_string();
        [
            ["--control-group", NAMED],
            ["--control-read-only", &at("read-only")],
            ["--control-read-only-group", &group],
            ["--vm", &vm],
        ]
        .map(|pair| pair.map(String::from))
        .concat()
    });
    fs::set_permissions(daemon.path(""), Permissions::from_mode(0o755))
        .expect("cannot change the file's mode");
    let (control, read_only) = (daemon.path("control"), daemon.path("read-only"));
    let (own, given) = (daemon.socket("own"), daemon.socket("given"));
    // In the second round, the daemon replaces the socket files of its first start, which belong to
    // other users.
    for _ in 0..2 {
        until("tmemd serves the last VM's socket", || {
            UnixStream::connect(&own).is_ok()
        });
        for (path, owner, group) in [
            (&control, 0, admins),
            (&read_only, 0, READERS),
            (&own, user, 0),
            (&given, 0, 0),
        ] {
            let file = fs::metadata(path).expect("cannot read the file's attributes");
            let is = (file.uid(), file.gid(), file.mode() & 0o777);
            assert_eq!(
                is,
                (owner, group, 0o660),
                "{} has the wrong owner, group or mode",
                path.display()
            );
        }
        daemon.kill();
        daemon.spawn();
    }
    until("tmemd serves the last VM's socket", || {
        UnixStream::connect(&own).is_ok()
    });
    assert!(
        served(OTHER, &[READERS], &read_only),
        "the read-only socket refused a member of its group"
    );
    assert!(
        served(OTHER, &[admins], &control),
        "the control socket refused a member of its group"
    );
    for (groups, socket) in [([READERS], &control), ([admins], &read_only)] {
        let error = as_user(OTHER, &groups, || UnixStream::connect(socket));
        let error = error.expect_err("the kernel let a user connect whom the file's mode excludes");
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        let_everybody_in(socket);
        assert!(
            !served(OTHER, &groups, socket),
            "{} served a user who is not in its group",
            socket.display()
        );
    }
    let_everybody_in(&own);
    assert!(
        !served(QEMU, &[], &own),
        "the socket served the user of another VM's QEMU"
    );
    assert!(
        served(user, &[], &own),
        "the socket refused the user of its VM's QEMU"
    );
}
