// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who connects to a socket that is not for him, because its file lets him, is refused.
//!
//! Wants root, who alone can be another user.

mod common;

use common::{Daemon, TIMEOUT};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control::{VarlinkClientInterface, VmSpec};

const QEMU: u32 = 64055;
const READERS: u32 = 64056;
const OTHER: u32 = 64057;

/// In a thread of its own: the others stay root's.
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
        thread.join().expect("it lives")
    })
}

/// A message that is answered while the connection lasts.
fn is_served(socket: &Path, message: &[u8]) -> bool {
    let mut stream = UnixStream::connect(socket).expect("its file lets everybody in");
    stream.set_read_timeout(Some(TIMEOUT)).expect("set");
    // It may have ended already.
    let sent = stream.write_all(message);
    let answer = stream.read(&mut [0; 12]);
    let waits = matches!(&answer, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!waits, "neither served nor refused");
    sent.is_ok() && answer.is_ok_and(|read| read > 0)
}

fn log(daemon: &Daemon) -> String {
    fs::read_to_string(daemon.path("log")).expect("its log")
}

/// As an operator might in a hurry.
fn let_everybody_in(socket: &Path) {
    fs::set_permissions(socket, Permissions::from_mode(0o666)).expect("set");
}

#[test]
fn who_a_socket_is_not_for_is_refused() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can connect as other users");
        return;
    }
    let read_only = |folder: &Path| {
        let path = folder.join("read-only").display().to_string();
        vec!["--control-ro".into(), path]
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

    // GET_FEATURES, version 1, no payload.
    let features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    let list = b"{\"method\":\"io.virtiotmem.Control.List\"}\0";
    let message = |socket: &Path| match socket.extension() {
        Some(_) => features.clone(),
        None => list.to_vec(),
    };
    let served = |user, groups: &[u32], socket: &Path| {
        as_user(user, groups, || is_served(socket, &message(socket)))
    };
    let (given, control) = (daemon.socket("given"), daemon.path("control"));
    let read_only = daemon.path("read-only");
    for socket in [&socket, &given, &control, &read_only] {
        let_everybody_in(socket);
    }
    // The connection before may not be over yet, so those that are taken are tried one VM each.
    assert!(served(QEMU, &[], &socket), "whom it was given to");
    assert!(
        !served(OTHER, &[READERS], &socket),
        "a stranger, at a VM's socket"
    );
    assert!(!served(QEMU, &[], &given), "it was given to nobody");
    for socket in [&control, &read_only] {
        assert!(
            !served(OTHER, &[READERS], socket),
            "a stranger, at {}",
            socket.display()
        );
        chown(socket, None, Some(READERS)).expect("given");
        assert!(
            served(OTHER, &[READERS], socket),
            "of the group, at {}",
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
    let stats = client.stats(Some("added".into())).call().expect("answers");
    assert_eq!(stats.vms[0].connections_refused, 1);
}
