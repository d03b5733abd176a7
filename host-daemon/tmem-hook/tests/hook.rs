// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The hook against a daemon: the pool gives way to a VM that starts, and no start hangs on it; a VM
//! that arrives where it is gets another socket.
//!
//! What the host has available is a file here, which stays as it is written.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tmem_control::VarlinkClientInterface;
use tmemd::{Config, Daemon, PressureConfig};

const UUID: &str = "5ca1ab1e-0000-4000-8000-000000000001";
const POOL_BYTES: u64 = 64 << 20;
const FREE_MIN_BYTES: u64 = 256 << 20;
/// Nothing but what has to stay free and 512 MiB.
const AVAILABLE_BYTES: u64 = FREE_MIN_BYTES + (512 << 20);

struct Host {
    folder: tempfile::TempDir,
    _daemon: Daemon,
}

fn host() -> Host {
    let folder = tempfile::tempdir().expect("folder");
    let path = |name: &str| folder.path().join(name);
    let meminfo = format!("MemAvailable:   {} kB\n", AVAILABLE_BYTES >> 10);
    fs::write(path("meminfo"), meminfo).expect("written");
    let daemon = Daemon::start(Config {
        pool_size_bytes: POOL_BYTES,
        workers: 1,
        control: path("control"),
        control_read_only: None,
        run_folder: folder.path().into(),
        vms: vec![],
        pressure: Some(PressureConfig {
            host_free_min_bytes: FREE_MIN_BYTES,
            meminfo: path("meminfo"),
            stalls: None,
        }),
        trace: None,
    });
    Host {
        folder,
        _daemon: daemon.expect("starts"),
    }
}

impl Host {
    fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    fn vms(&self) -> Vec<tmem_control::Vm> {
        let mut client = tmem_control::connect(&self.control()).expect("connects");
        client.list().call().expect("answers").vms
    }

    fn pool_bytes(&self) -> u64 {
        let mut client = tmem_control::connect(&self.control()).expect("connects");
        let stats = client.stats(None).call().expect("answers");
        stats.pool.size_bytes as u64
    }
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !check() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A domain that takes so much; `device`: the arguments that give it one.
fn xml(memory_mib: u64, device: &str) -> String {
    format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
         <name>web</name><uuid>{UUID}</uuid><memory unit='MiB'>{memory_mib}</memory>\
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
         {device}</domain>"
    )
}

fn hook(control: &Path, operation: &str, xml: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tmem-hook"))
        .args(["--owner", "none", "--socket"])
        .arg(control)
        .args(["web", operation, "begin", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(xml.as_bytes()).expect("read");
    drop(stdin);
    child.wait_with_output().expect("ends")
}

#[test]
fn the_pool_gives_way_to_a_vm_that_starts() {
    let host = host();
    let start = |operation: &str, mib: u64| {
        let output = hook(&host.control(), operation, &xml(mib, ""));
        assert!(output.status.success() && output.stdout.is_empty());
        host.pool_bytes()
    };
    assert_eq!(start("prepare", 512), POOL_BYTES, "there is room");
    for operation in ["start", "started", "reconnect", "release", "stopped"] {
        assert_eq!(start(operation, 1024), POOL_BYTES, "{operation}");
    }
    // All that it holds is no match for that.
    assert_eq!(start("prepare", 1024), 1 << 20, "the least that a pool is");
}

/// The arguments that give a domain the device, at that socket.
fn device(socket: &Path) -> String {
    format!(
        "<qemu:commandline><qemu:arg value='-chardev'/>\
         <qemu:arg value='socket,id=virtio-tmem,path={}'/><qemu:arg value='-device'/>\
         <qemu:arg value='vhost-user-tmem-pci,chardev=virtio-tmem'/></qemu:commandline>",
        socket.display()
    )
}

#[test]
fn a_vm_that_arrives_where_it_is_has_another_socket() {
    let host = host();
    let socket = |name: &str| host.folder.path().join(name);
    let at = |socket: &Path| xml(1, &device(socket));
    let run = |operation: &str, xml: &str| {
        let output = hook(&host.control(), operation, xml);
        assert!(output.status.success() && output.stderr.is_empty());
        String::from_utf8(output.stdout).expect("text")
    };
    let (a, b) = (
        socket(&format!("{UUID}.sock")),
        socket(&format!("{UUID}-b.sock")),
    );
    assert_eq!(run("migrate", &at(&a)), "", "the daemon does not have it");
    run("prepare", &at(&a));
    let _qemu = UnixStream::connect(&a).expect("listens");
    assert_eq!(run("migrate", &at(&a)), at(&b), "nothing else is changed");
    assert_eq!(run("migrate", &xml(1, "")), "", "without the device");
    until("QEMU is connected", || host.vms()[0].connected);
    run("prepare", &at(&b));
    let names = || host.vms().into_iter().map(|vm| vm.name).collect::<Vec<_>>();
    assert_eq!(names(), ["web", "web+incoming"]);
    run("release", &at(&a));
    assert_eq!(names(), ["web"]);
    assert!(!a.exists() && b.exists());
    assert_eq!(run("migrate", &at(&b)), at(&a), "and back");
    // Nobody can tell: it arrives as it is.
    let output = hook(&socket("nobody"), "migrate", &at(&b));
    assert!(output.status.success() && output.stdout.is_empty());
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("if it comes from this host"), "{words}");
}

#[test]
fn a_vm_with_the_device_is_served_and_has_room() {
    let host = host();
    let socket = host.folder.path().join("a.sock");
    let output = hook(&host.control(), "prepare", &xml(1024, &device(&socket)));
    assert!(output.status.success() && output.stderr.is_empty());
    assert!(socket.exists());
    assert_eq!(host.pool_bytes(), 1 << 20);
}

#[test]
fn a_daemon_that_hangs_holds_up_a_start_for_a_while_only() {
    let folder = tempfile::tempdir().expect("folder");
    let control = folder.path().join("control");
    let begun = Instant::now();
    let output = hook(&control, "prepare", &xml(1024, ""));
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "there is none"
    );
    let _nobody_accepts = UnixListener::bind(&control).expect("binds");
    let output = hook(&control, "prepare", &xml(1024, ""));
    assert!(output.status.success());
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}
