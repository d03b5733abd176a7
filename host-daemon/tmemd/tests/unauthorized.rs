// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that a socket's file admits but its configured permissions do not is refused.
//!
//! The test needs root, which can become another user.

mod common;

use common::{Daemon, TIMEOUT, until};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control::accounts;
use tmem_control::{VarlinkClientInterface, VmSpec};
use tmem_sim::{Missing, skipped};

const QEMU: u32 = 64055;
const READERS: u32 = 64056;
const OTHER: u32 = 64057;
/// A user and a group that hosts have.
const NAMED: &str = "daemon";

/// In a thread of its own: the other threads stay root's.
fn as_user<R: Send>(user: u32, groups: &[u32], what: impl FnOnce() -> R + Send) -> R {
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            set_thread_groups(&groups).expect("root may");
            set_thread_res_gid(gid, gid, gid).expect("root may");
            set_thread_res_uid(uid, uid, uid).expect("root may");
            what()
        });
        thread.join().expect("the thread does not panic")
    })
}

/// Sends a message that is answered while the connection lasts.
fn is_served(socket: &Path, message: &[u8]) -> bool {
    let mut stream = UnixStream::connect(socket).expect("its file lets everybody in");
    stream.set_read_timeout(Some(TIMEOUT)).expect("set");
    // The connection may have ended already.
    let sent = stream.write_all(message);
    let answer = stream.read(&mut [0; 12]);
    let waits = matches!(&answer, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!waits, "neither served nor refused");
    sent.is_ok() && answer.is_ok_and(|read| read > 0)
}

/// Connects as that user and checks for an answer of such a socket.
fn served(user: u32, groups: &[u32], socket: &Path) -> bool {
    let message = match socket.extension() {
        // GET_FEATURES, version 1, no payload.
        Some(_) => [1u32, 1, 0].map(u32::to_ne_bytes).concat(),
        None => b"{\"method\":\"io.virtiotmem.Control.ListVms\"}\0".to_vec(),
    };
    as_user(user, groups, || is_served(socket, &message))
}

fn log(daemon: &Daemon) -> String {
    fs::read_to_string(daemon.path("log")).expect("its log")
}

/// A mistake that an operator may make.
fn let_everybody_in(socket: &Path) {
    fs::set_permissions(socket, Permissions::from_mode(0o666)).expect("set");
}

#[test]
fn unauthorized_peers_are_refused() {
    if !geteuid().is_root() {
        return skipped(Missing::Root, "only root can connect as other users");
    }
    let read_only = |folder: &Path| {
        let path = folder.join("read-only").display().to_string();
        vec!["--control-read-only".into(), path]
    };
    let daemon = Daemon::with_arguments(&[("given", None)], "64MiB", read_only);
    fs::set_permissions(daemon.path(""), Permissions::from_mode(0o755)).expect("set");
    let mut client = tmem_control::connect(&daemon.path("control")).expect("connects");
    let socket = daemon.socket("added");
    let spec = VmSpec {
        uuid: "5ca1ab1e-0000-4000-8000-000000000001".into(),
        name: "added".into(),
        socket: socket.display().to_string(),
        owner: Some(QEMU.into()),
        group: None,
        mode: None,
        trust_domain: None,
        quota: tmem_control::quota(None, None, None),
    };
    client.add_vm(spec).call().expect("added");

    let (given, control) = (daemon.socket("given"), daemon.path("control"));
    let read_only = daemon.path("read-only");
    for socket in [&socket, &given, &control, &read_only] {
        let_everybody_in(socket);
    }
    // The previous connection may not be over yet, so accepted ones are tested with one VM each.
    assert!(served(QEMU, &[], &socket), "whom it was given to");
    assert!(
        !served(OTHER, &[READERS], &socket),
        "an unauthorized peer at a VM's socket"
    );
    assert!(
        !served(QEMU, &[], &given),
        "the socket was given to another user"
    );
    for socket in [&control, &read_only] {
        assert!(
            !served(OTHER, &[READERS], socket),
            "an unauthorized peer at {}",
            socket.display()
        );
        chown(socket, None, Some(READERS)).expect("given");
        assert!(
            served(OTHER, &[READERS], socket),
            "a member of the socket's group was not served at {}",
            socket.display()
        );
        assert!(served(0, &[], socket), "root, at {}", socket.display());
    }

    let log = log(&daemon);
    let line = |what: &str| log.lines().find(|line| line.contains(what));
    let of_vm = line(&format!(
        "a connection to {} is refused, process ",
        socket.display()
    ));
    let of_vm = of_vm.unwrap_or_else(|| panic!("no word of it: {log}"));
    for part in [
        "vm=added",
        &format!("of user {OTHER}"),
        &format!("is for user {QEMU}"),
        "--owner",
    ] {
        assert!(of_vm.contains(part), "{part}: {of_vm}");
    }
    let of_control = line("a client is refused, process ").expect("said");
    assert!(
        of_control.contains(&format!("of user {OTHER}")),
        "{of_control}"
    );
    let stats = client
        .get_stats(Some("added".into()))
        .call()
        .expect("answers");
    assert_eq!(stats.vms[0].connections_refused, 1);
}

/// Each socket belongs to the configured users at each start, without a chgrp.
#[test]
fn sockets_belong_to_the_configured_users() {
    if !geteuid().is_root() {
        return skipped(
            Missing::Root,
            "only root can give sockets away and connect as other users",
        );
    }
    let named = |file: &str| {
        let rows = fs::read_to_string(file).expect("readable");
        accounts::number(&rows, NAMED).unwrap_or_else(|| panic!("{file} has no {NAMED}"))
    };
    let (user, admins) = (named("/etc/passwd"), named("/etc/group"));
    let mut daemon = Daemon::with_arguments(&[("given", None)], "64MiB", |folder| {
        let at = |name: &str| folder.join(name).display().to_string();
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
    fs::set_permissions(daemon.path(""), Permissions::from_mode(0o755)).expect("set");
    let (control, read_only) = (daemon.path("control"), daemon.path("read-only"));
    let (own, given) = (daemon.socket("own"), daemon.socket("given"));
    // The second time the sockets replace ones that belong to other users.
    for _ in 0..2 {
        until("the last one listens", || UnixStream::connect(&own).is_ok());
        for (path, owner, group) in [
            (&control, 0, admins),
            (&read_only, 0, READERS),
            (&own, user, 0),
            (&given, 0, 0),
        ] {
            let file = fs::metadata(path).expect("there");
            let is = (file.uid(), file.gid(), file.mode() & 0o777);
            assert_eq!(is, (owner, group, 0o660), "{}", path.display());
        }
        daemon.kill();
        daemon.spawn();
    }
    until("the last one listens", || UnixStream::connect(&own).is_ok());
    assert!(served(OTHER, &[READERS], &read_only), "who may look");
    assert!(served(OTHER, &[admins], &control), "who may change things");
    for (groups, socket) in [([READERS], &control), ([admins], &read_only)] {
        let error = as_user(OTHER, &groups, || UnixStream::connect(socket));
        let error = error.expect_err("by the file's mode");
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        let_everybody_in(socket);
        assert!(!served(OTHER, &groups, socket), "{}", socket.display());
    }
    let_everybody_in(&own);
    assert!(
        !served(QEMU, &[], &own),
        "the user of another VM's QEMU was served"
    );
    assert!(served(user, &[], &own), "its QEMU");
}
