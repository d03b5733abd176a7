// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmem-hook with a daemon. The pool shrinks if a VM starts that needs the memory. No
//! start waits for the daemon without bound. A VM that migrates on its own host gets another
//! socket.
//!
//! A file that each test writes takes the place of the host's /proc/meminfo.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tmem_control::VarlinkClientInterface;
use tmem_model::{FakeGuest, GuestConfig, TestDaemon};
use tmemd::PressureConfig;

const UUID: &str = "5ca1ab1e-0000-4000-8000-000000000001";
const POOL_BYTES: u64 = 64 << 20;
const FREE_MIN_BYTES: u64 = 256 << 20;
/// Available memory of the host in these tests: 512 MiB more than the memory that must stay free.
const AVAILABLE_BYTES: u64 = FREE_MIN_BYTES + (512 << 20);

/// Free swap of the host in these tests.
const SWAP_BYTES: u64 = 128 << 20;

/// Largest number of clients that the control socket accepts at a time.
const PLACES: usize = 16;

struct HookTest {
    daemon: TestDaemon,
}

fn host() -> HookTest {
    host_with(&[])
}

fn host_with(vms: &[&str]) -> HookTest {
    let daemon = TestDaemon::start_with(vms, |config| {
        let meminfo = config.run_directory.join("meminfo");
        let text = format!(
            "MemAvailable:   {} kB\nSwapFree:   {} kB\n",
            AVAILABLE_BYTES >> 10,
            SWAP_BYTES >> 10
        );
        fs::write(&meminfo, text).expect("cannot write the file");
        config.pool_size_bytes = POOL_BYTES;
        config.pressure = Some(PressureConfig {
            host_free_min_bytes: FREE_MIN_BYTES,
            meminfo,
            ..PressureConfig::default()
        });
    });
    HookTest { daemon }
}

impl HookTest {
    fn control(&self) -> PathBuf {
        self.daemon.path("control")
    }

    fn vms(&self) -> Vec<tmem_control::Vm> {
        let mut client =
            tmem_control::connect(&self.control()).expect("cannot connect to the control socket");
        client
            .list_vms()
            .call()
            .expect("the daemon answered the varlink call with an error")
            .vms
    }

    fn stats(&self) -> tmem_control::GetStats_Reply {
        let mut client =
            tmem_control::connect(&self.control()).expect("cannot connect to the control socket");
        client
            .get_stats(None)
            .call()
            .expect("the daemon answered the varlink call with an error")
    }

    fn pool(&self) -> tmem_control::PoolStats {
        self.stats().pool
    }

    fn pool_bytes(&self) -> u64 {
        self.pool().size_bytes as u64
    }
}

/// Connects clients until the control socket has its maximum number of connections. The loop tries
/// again on a failure, because connections of earlier clients may still be open for a moment.
fn clients(host: &HookTest) -> Vec<tmem_control::VarlinkClient> {
    let mut clients = Vec::new();
    until("all clients of the control socket are connected", || {
        let mut client =
            tmem_control::connect(&host.control()).expect("cannot connect to the control socket");
        // A client that gets an answer occupies one of the control socket's connections.
        if client.list_vms().call().is_ok() {
            clients.push(client);
        }
        clients.len() == PLACES
    });
    clients
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !check() {
        assert!(
            Instant::now() < deadline,
            "timeout while waiting until: {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the XML of a domain with `memory_mib` MiB of memory. `device` is the XML that gives the
/// domain the virtio-tmem device, or is empty.
fn xml(memory_mib: u64, device: &str) -> String {
    format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
         <name>web</name><uuid>{UUID}</uuid><memory unit='MiB'>{memory_mib}</memory>\
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
         {device}</domain>"
    )
}

fn hook(control: &Path, operation: &str, xml: &str) -> Output {
    hook_with(Stdio::piped(), control, operation, xml)
}

fn hook_with(stderr: Stdio, control: &Path, operation: &str, xml: &str) -> Output {
    hook_with_options(&[], stderr, control, operation, xml)
}

fn hook_with_options(
    options: &[&str],
    stderr: Stdio,
    control: &Path,
    operation: &str,
    xml: &str,
) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tmem-hook"))
        .args(["--owner", "none"])
        .args(options)
        .arg("--socket")
        .arg(control)
        .arg("--late-file")
        .arg(control.with_extension("late"))
        .args(["web", operation, "begin", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .expect("cannot run the program");
    let mut stdin = child.stdin.take().expect("the child process has no pipe");
    stdin
        .write_all(xml.as_bytes())
        .expect("cannot write to the hook's stdin");
    drop(stdin);
    child
        .wait_with_output()
        .expect("cannot wait for the process")
}

#[test]
fn the_pool_shrinks_for_a_starting_vm() {
    let host = host();
    let start = |operation: &str, mib: u64| {
        let output = hook(&host.control(), operation, &xml(mib, ""));
        assert!(output.status.success() && output.stdout.is_empty());
        host.pool_bytes()
    };
    assert_eq!(
        start("prepare", 512),
        POOL_BYTES,
        "the pool shrank although the host has enough memory"
    );
    for operation in ["start", "started", "reconnect", "release", "stopped"] {
        assert_eq!(
            start(operation, 1024),
            POOL_BYTES,
            "operation {operation} changed the pool's size"
        );
    }
    // For a VM of 1,024 MiB, the host lacks 512 MiB. That is more than the pool has, so the pool
    // shrinks to its minimum.
    assert_eq!(
        start("prepare", 1024),
        1 << 20,
        "the pool did not shrink to its minimum"
    );
}

/// With `--overcommit no`, a VM starts only if the host could give all VMs their memory at once. The
/// pool does not shrink for a VM that does not start.
#[test]
fn a_vm_for_which_the_host_lacks_memory_starts_only_with_overcommit() {
    let host = host_with(&["a"]);
    until("the daemon has read the host's memory", || {
        host.pool().host_swap_free_bytes as u64 == SWAP_BYTES
    });
    let start = |overcommit: &str, operation: &str, mib: u64| {
        let options = ["--overcommit", overcommit];
        let xml = xml(mib, "");
        hook_with_options(&options, Stdio::piped(), &host.control(), operation, &xml)
    };
    let pool = host.pool();
    let pool_mib = ((pool.held_bytes - pool.reserved_bytes).max(0) >> 20) as u64;
    let most_mib = ((AVAILABLE_BYTES + SWAP_BYTES) >> 20) + pool_mib;
    let output = start("no", "prepare", most_mib + 9);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(
        words.contains("the host lacks 9 MiB if all VMs use their memory at once"),
        "{words}"
    );
    assert!(
        words.contains("domain web cannot have its memory"),
        "{words}"
    );
    assert!(words.contains("libvirt does not start it"), "{words}");
    assert_eq!(host.pool().size_bytes as u64, POOL_BYTES);
    // libvirt would kill a running VM if the hook failed.
    for operation in ["reconnect", "release"] {
        assert!(start("no", operation, most_mib + 9).status.success());
    }
    assert!(start("yes", "prepare", most_mib + 9).status.success());
    assert!(start("no", "prepare", most_mib).status.success());

    // Memory that another VM has not used yet counts, too.
    let mut guest = FakeGuest::new(GuestConfig::default()).expect("cannot make the guest's memory");
    guest
        .connect(&host.daemon.path("a.sock"))
        .expect("the daemon refuses the guest");
    guest
        .start()
        .expect("the daemon refuses the guest's memory");
    let unused = || {
        let daemon = host.stats().daemon;
        daemon.memory_bytes - daemon.memory_resident_bytes
    };
    until("the other VM has unused memory", || unused() > 2 << 20);
    let output = start("no", "prepare", most_mib);
    assert!(!output.status.success());
}

/// Returns the XML of the QEMU arguments that give a domain the virtio-tmem device at `socket`.
fn device(socket: &Path) -> String {
    format!(
        "<qemu:commandline><qemu:arg value='-chardev'/>\
         <qemu:arg value='socket,id=virtio-tmem,path={}'/><qemu:arg value='-device'/>\
         <qemu:arg value='vhost-user-tmem-pci,chardev=virtio-tmem'/></qemu:commandline>",
        socket.display()
    )
}

#[test]
fn migration_within_a_host_uses_a_second_socket() {
    let host = host();
    let socket = |name: &str| host.daemon.folder().join(name);
    let at = |socket: &Path| xml(1, &device(socket));
    let run = |operation: &str, xml: &str| {
        let output = hook(&host.control(), operation, xml);
        assert!(output.status.success() && output.stderr.is_empty());
        String::from_utf8(output.stdout).expect("the output is not UTF-8")
    };
    let (a, b) = (
        socket(&format!("{UUID}.sock")),
        socket(&format!("{UUID}-b.sock")),
    );
    assert_eq!(
        run("migrate", &at(&a)),
        "",
        "the hook changed the domain although the daemon does not have the socket"
    );
    run("prepare", &at(&a));
    let _qemu = UnixStream::connect(&a).expect("cannot connect to the socket");
    assert_eq!(
        run("migrate", &at(&a)),
        at(&b),
        "the hook did not change the socket alone"
    );
    assert_eq!(
        run("migrate", &xml(1, "")),
        "",
        "the hook changed a domain without the device"
    );
    until("QEMU is connected", || host.vms()[0].connected);
    run("prepare", &at(&b));
    let names = || host.vms().into_iter().map(|vm| vm.name).collect::<Vec<_>>();
    assert_eq!(names(), ["web", "web+incoming"]);
    run("release", &at(&a));
    assert_eq!(names(), ["web"]);
    assert!(!a.exists() && b.exists());
    assert_eq!(
        run("migrate", &at(&b)),
        at(&a),
        "the hook did not change the socket back"
    );
    // Without a daemon, the hook cannot know whether the VM migrates within the host. It then
    // leaves the VM's XML unchanged.
    let output = hook(&socket("nobody"), "migrate", &at(&b));
    assert!(output.status.success() && output.stdout.is_empty());
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        words.contains("if it is migrated within this host"),
        "the message does not name migration within the host: {words}"
    );
}

#[test]
fn a_starting_vm_with_the_device_gets_a_socket_and_host_memory() {
    let host = host();
    let socket = host.daemon.folder().join("a.sock");
    let output = hook(&host.control(), "prepare", &xml(1024, &device(&socket)));
    assert!(output.status.success() && output.stderr.is_empty());
    assert!(socket.exists());
    assert_eq!(host.pool_bytes(), 1 << 20);
}

/// Acts as the daemon: accepts a connection of the hook for each of `answers`, reads one call from
/// it, and replies with the answer. The returned receiver gets each call before its answer is sent.
fn answering(control: &Path, answers: Vec<&'static str>) -> mpsc::Receiver<String> {
    let listener = UnixListener::bind(control).expect("cannot bind the socket");
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for answer in answers {
            let (stream, _) = listener.accept().expect("cannot accept a connection");
            let mut call = Vec::new();
            BufReader::new(&stream)
                .read_until(0, &mut call)
                .expect("cannot read the call");
            // Sending fails if the test has failed, because the receiver no longer exists then.
            let _ = sender.send(String::from_utf8_lossy(&call).into_owned());
            (&stream)
                .write_all(format!("{answer}\0").as_bytes())
                .expect("cannot write the answer");
        }
    });
    receiver
}

/// If a device has retain=on, QEMU refuses a daemon that does not know retained pages, and the VM
/// has no cache. The hook reports this before the start.
#[test]
fn retain_on_is_reported_if_the_daemon_does_not_know_retained_pages() {
    let added = r#"{"parameters":{"added":true}}"#;
    let old =
        r#"{"error":"org.varlink.service.MethodNotFound","parameters":{"method":"GetFeatures"}}"#;
    let without = r#"{"parameters":{"features":[]}}"#;
    let with = r#"{"parameters":{"features":["VIRTIO_TMEM_F_RETAIN"]}}"#;
    let required =
        "<metadata><c:cache xmlns:c='urn:virtio-tmem:cache:1' required='yes'/></metadata>";
    for (answer, is_problem) in [(old, true), (without, true), (with, false)] {
        for metadata in ["", required] {
            let directory = tempfile::tempdir().expect("cannot create a temporary directory");
            let control = directory.path().join("control");
            let device = device(&directory.path().join("a.sock"));
            let device = device.replace("vhost-user-tmem-pci,", "vhost-user-tmem-pci,retain=on,");
            let xml = xml(0, &(device + metadata));
            // If the domain has no quota in its metadata, the hook first asks for the list of the
            // daemon's VMs.
            let mut answers = vec![added, answer];
            if metadata.is_empty() {
                answers.insert(0, r#"{"parameters":{"vms":[]}}"#);
            }
            let received = answering(&control, answers);
            let output = hook(&control, "prepare", &xml);
            let calls: String = received.try_iter().collect();
            assert!(
                calls.contains("AddVm") && calls.contains("GetFeatures"),
                "the hook did not call AddVm and GetFeatures: {calls}"
            );
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            let starts = !is_problem || metadata.is_empty();
            assert_eq!(
                output.status.success(),
                starts,
                "the hook ended with the wrong status: {words}"
            );
            assert_eq!(
                words.contains("tmemctl attach web --retain off"),
                is_problem,
                "the advice to run attach --retain off is missing or superfluous: {words}"
            );
        }
    }
}

/// If the hook cannot write its message, it must not fail for that reason. libvirt kills a running
/// VM whose hook fails at `reconnect`.
#[test]
fn a_failed_write_of_a_message_does_not_fail_the_hook() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let (control, socket) = (
        directory.path().join("control"),
        directory.path().join("a.sock"),
    );
    let xml = xml(1, &device(&socket));
    let (reader, closed) = std::io::pipe().expect("cannot create a pipe");
    drop(reader);
    let full = || fs::File::create("/dev/full").expect("cannot create the file");
    for operation in ["reconnect", "prepare", "release"] {
        let message = hook(&control, operation, &xml).stderr;
        assert!(
            !message.is_empty(),
            "the hook printed no message at {operation}, although no daemon exists"
        );
        let closed = closed.try_clone().expect("cannot duplicate the descriptor");
        for stderr in [Stdio::from(full()), Stdio::from(closed)] {
            let output = hook_with(stderr, &control, operation, &xml);
            assert_eq!(
                output.status.code(),
                Some(0),
                "the hook failed at {operation} because it could not print a message"
            );
        }
    }
}

/// Listens on the socket `path`, and forwards each client to the daemon at `control`. The returned
/// receiver gets a message for each client that the daemon disconnects without an answer.
fn door(path: &Path, control: PathBuf) -> mpsc::Receiver<()> {
    let listener = UnixListener::bind(path).expect("cannot bind the socket");
    let (sender, shut_out) = mpsc::channel();
    let pass = move |client: UnixStream, sender: mpsc::Sender<()>| {
        let daemon = UnixStream::connect(&control)?;
        let (asks, asked) = (client.try_clone()?, daemon.try_clone()?);
        std::thread::spawn(move || {
            let _ = io::copy(&mut &asks, &mut &asked);
            let _ = asked.shutdown(Shutdown::Write);
        });
        std::thread::spawn(move || {
            if !io::copy(&mut &daemon, &mut &client).is_ok_and(|bytes| bytes > 0) {
                // Sending fails only when the test has ended.
                let _ = sender.send(());
            }
            let _ = client.shutdown(Shutdown::Both);
        });
        io::Result::Ok(())
    };
    std::thread::spawn(move || {
        for client in listener.incoming() {
            pass(client.expect("cannot accept the client"), sender.clone())
                .expect("cannot connect to the daemon");
        }
    });
    shut_out
}

/// While the daemon has its maximum number of clients, the hook repeats its request until it gets
/// an answer. Many VMs that start together can cause that many clients.
#[test]
fn the_hook_retries_while_the_daemon_has_too_many_clients() {
    let run = |host: &HookTest, operation: &str, device: &str| {
        let front = host.daemon.folder().join("door");
        let shut_out = door(&front, host.control());
        let clients = clients(host);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let time = Duration::from_secs(30);
                shut_out
                    .recv_timeout(time)
                    .expect("the daemon refused no client");
                drop(clients);
            });
            let output = hook(&front, operation, &xml(1024, device));
            fs::remove_file(&front).expect("cannot remove the file");
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!((output.status.code(), &*words), (Some(0), ""));
        });
    };
    let host = host();
    // For a VM without the device, the hook only asks the daemon to shrink the pool.
    run(&host, "prepare", "");
    until("the pool shrinks", || {
        let client = tmem_control::connect(&host.control());
        let stats = client
            .expect("cannot connect to the control socket")
            .get_stats(None)
            .call();
        stats.is_ok_and(|stats| stats.pool.size_bytes == 1 << 20)
    });
    let socket = host.daemon.folder().join("a.sock");
    run(&host, "prepare", &device(&socket));
    assert!(socket.exists());
    run(&host, "release", &device(&socket));
    assert!(!socket.exists());
}

#[test]
fn a_daemon_with_too_many_clients_delays_a_start_only_until_the_timeout() {
    let host = host();
    let xml = xml(1024, &device(&host.daemon.folder().join("a.sock")));
    let _clients = clients(&host);
    for operation in ["migrate", "prepare", "release"] {
        let begun = Instant::now();
        let output = hook(&host.control(), operation, &xml);
        let time = begun.elapsed();
        assert!(output.status.success() && time < Duration::from_secs(20));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            words.contains("too many clients"),
            "{operation}: the message does not name the daemon's too many clients: {words}"
        );
        // The daemon answers, so the next VM waits for it, too.
        let late = host.control().with_extension("late");
        assert!(!late.exists(), "{operation}: the daemon counts as late");
    }
    // It also does so if it was late a short time ago.
    let control = host.control();
    write_late_record(&control);
    let output = hook(&control, "prepare", &xml);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("too many clients"), "{words}");
    assert!(!control.with_extension("late").exists());
}

/// Writes the hook's record that the daemon did not answer a moment ago.
fn write_late_record(control: &Path) {
    let uptime = fs::read_to_string("/proc/uptime").expect("cannot read the uptime");
    let seconds: f64 = uptime
        .split(' ')
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .expect("the uptime is no number");
    let path = control.with_extension("late");
    let record = format!("{} {}", (seconds * 1000.0) as u64, control.display());
    fs::write(&path, record).expect("cannot write the record");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("cannot change the mode");
}

#[test]
fn a_hung_daemon_delays_a_start_only_until_the_timeout() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let control = directory.path().join("control");
    let begun = Instant::now();
    let output = hook(&control, "prepare", &xml(1024, ""));
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "the hook failed or printed a message although no daemon exists"
    );
    let _nobody_accepts = UnixListener::bind(&control).expect("cannot bind the socket");
    let output = hook(&control, "prepare", &xml(1024, ""));
    assert!(output.status.success());
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "the hook took {:?}, 20 s or more",
        begun.elapsed()
    );
}

/// Number of hooks that run one after the other in the following test, as when libvirtd starts VMs
/// at the host's boot. If each waited for the daemon, they would take 20 s.
const HOOKS: u32 = 10;

#[test]
fn only_one_of_many_starts_waits_for_a_hung_daemon() {
    let host = host();
    // The socket `hung` stands for the daemon, which does not answer at first.
    let control = host.daemon.path("hung");
    let socket = host.daemon.path("own.sock");
    let nobody_accepts = UnixListener::bind(&control).expect("cannot bind the socket");
    let web = xml(1, &device(&socket));
    let timed = |operation: &str, xml: &str| {
        let begun = Instant::now();
        let output = hook(&control, operation, xml);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        (begun.elapsed(), output.status.success(), words)
    };
    let (took, started, words) = timed("prepare", &web);
    assert!(took >= Duration::from_secs(2) && started);
    assert!(words.contains("did not answer within 2 s"), "{words}");

    let begun = Instant::now();
    let mut hooks = 0;
    for operation in ["prepare", "release", "reconnect", "migrate"] {
        // A VM without the device does not wait for memory either.
        for xml in [&web, &xml(1, "")] {
            let (_, started, words) = timed(operation, xml);
            assert!(started, "the hook failed: {words}");
            let told = words.contains("did not answer another VM some seconds ago");
            assert_eq!(told, xml.contains("virtio-tmem"), "{operation}: {words}");
            hooks += 1;
        }
    }
    while hooks < HOOKS {
        timed("prepare", &web);
        hooks += 1;
    }
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{HOOKS} hooks took {:?}, although the daemon had not answered before",
        begun.elapsed()
    );

    // A VM that requires its cache cannot start without the daemon, so it waits.
    let metadata = "<metadata><cache xmlns='urn:virtio-tmem:cache:1' required='yes'/></metadata>";
    let (took, started, words) = timed("prepare", &xml(1, &(device(&socket) + metadata)));
    assert!(took >= Duration::from_secs(2) && !started, "{words}");

    // The daemon answers again: the next VM gets its cache, although the record is recent.
    drop(nobody_accepts);
    fs::remove_file(&control).expect("cannot remove the file");
    std::os::unix::fs::symlink(host.control(), &control).expect("cannot create the link");
    let (_, started, words) = timed("prepare", &web);
    assert!(started && words.is_empty(), "{words}");
    assert_eq!(host.vms().len(), 1);
    assert!(!control.with_extension("late").exists());
}
