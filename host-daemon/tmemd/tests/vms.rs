// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of VMs that an operator adds and removes while the daemon runs, and that the daemon
//! restores after a restart.

use crate::common::{TIMEOUT, until};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tmem_control::{ErrorKind, Quota, VarlinkClient, VarlinkClientInterface, VmSpec};
use tmem_model::TestDaemon;
use tmemd::config::VMS_MAX;

const UUID: &str = "5ca1ab1e-0000-4000-8000-000000000001";
const OTHER: &str = "5ca1ab1e-0000-4000-8000-000000000002";
const GIVEN: &str = "5ca1ab1e-0000-4000-8000-0000000000ff";

struct RegistryTest {
    daemon: TestDaemon,
}

fn host() -> RegistryTest {
    let given = format!("given,uuid={GIVEN},limit=8MiB");
    RegistryTest {
        daemon: TestDaemon::start(&[&given]),
    }
}

impl RegistryTest {
    fn path(&self, name: &str) -> PathBuf {
        self.daemon.path(name)
    }

    fn stored(&self, name: &str) -> PathBuf {
        self.path("vms").join(format!("{name}.sock.json"))
    }

    fn restart(&mut self) {
        self.daemon.restart();
    }

    fn client(&self) -> VarlinkClient {
        self.daemon.client()
    }

    fn spec(&self, uuid: &str, name: &str) -> VmSpec {
        let socket = self.path(&format!("{name}.sock"));
        VmSpec {
            uuid: uuid.into(),
            name: name.into(),
            socket: socket.to_string_lossy().into(),
            owner: None,
            group: None,
            mode: None,
            memory_max_bytes: None,
            trust_domain: None,
            quota: tmem_control::quota(None, None, None),
        }
    }

    fn add(&self, spec: &VmSpec) -> bool {
        let reply = self.client().add_vm(spec.clone()).call();
        reply.expect("the daemon did not add the VM").added
    }

    /// Tries to add a VM that the daemon must refuse. Returns the VM's name and the reason that the
    /// daemon's error contains.
    fn refused(&self, spec: &VmSpec) -> (String, String) {
        let error = self.client().add_vm(spec.clone()).call();
        match error.expect_err("the daemon accepted an invalid VM").kind() {
            ErrorKind::BadVm(Some(bad)) => (bad.name.clone(), bad.reason.clone()),
            ErrorKind::BadQuota(Some(bad)) => (bad.name.clone(), format!("quota: {}", bad.reason)),
            other => {
                panic!("the daemon did not answer with the error BadVm or BadQuota: {other:?}")
            }
        }
    }

    fn remove(&self, uuid: &str, name: &str) -> bool {
        let socket = self.path(&format!("{name}.sock"));
        let mut client = self.client();
        let reply = client.remove_vm(uuid.into(), socket.to_string_lossy().into());
        { reply }
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .removed
    }

    fn names(&self) -> Vec<String> {
        let vms = self
            .client()
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms;
        vms.into_iter().map(|vm| vm.name).collect()
    }

    fn vm(&self, name: &str) -> tmem_control::Vm {
        let vms = self
            .client()
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms;
        vms.into_iter()
            .find(|vm| vm.name == name)
            .expect("the daemon does not list the VM")
    }

    fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.path(&format!("{name}.sock")))
            .expect("cannot connect to the socket");
        until("the VM is connected", || self.vm(name).connected);
        stream
    }
}

/// Returns true if the daemon has closed this connection or never accepted it.
fn ended(mut stream: UnixStream) -> bool {
    stream
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    match stream.read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_vm_is_added_and_removed() {
    let host = host();
    assert!(
        !host.path("vms").exists(),
        "the VM store exists before a VM was added"
    );
    let mut spec = host.spec(&UUID.to_uppercase(), "web");
    spec.quota.reserve_bytes = 8 << 20;
    spec.trust_domain = Some("team".into());
    assert!(host.add(&spec), "the daemon did not add the new VM");
    assert!(
        !host.add(&spec),
        "the second call did not report that the VM already exists"
    );
    assert_eq!(host.names(), ["given", "web"]);
    let vm = host.vm("web");
    assert_eq!(
        vm.uuid.as_deref(),
        Some(UUID),
        "the UUID is not in lower case"
    );
    assert_eq!(
        (vm.quota.clone(), vm.trust_domain),
        (spec.quota.clone(), spec.trust_domain.clone())
    );
    assert!(host.stored("web").exists());
    let connection = host.connect("web");
    assert!(
        !host.add(&spec),
        "the call did not report that the connected VM already exists"
    );
    assert!(host.vm("web").connected);

    assert!(!host.remove(UUID, "other") && !host.remove(OTHER, "web"));
    assert!(!host.remove(UUID, "/elsewhere/web"));
    assert!(
        host.stored("web").exists(),
        "a call with another VM's UUID or socket removed the VM"
    );
    assert!(host.remove(UUID, "web"));
    assert!(!host.path("web.sock").exists() && !host.stored("web").exists());
    assert!(ended(connection));
    assert_eq!(host.names(), ["given"]);
    assert!(
        !host.remove(UUID, "web"),
        "the second call did not report that the VM no longer exists"
    );
    assert!(!host.remove("nonsense", "/"));
    // The reserve of the removed VM is available to another VM. A test in registry.rs checks that
    // it is available at once.
    spec.quota.reserve_bytes = 60 << 20;
    assert!(host.add(&spec));
    host.connect("web");
}

#[test]
fn adding_a_vm_again_changes_its_settings_without_a_disconnect() {
    let host = host();
    let spec = host.spec(UUID, "web");
    host.add(&spec);
    let connection = host.connect("web");
    let quota = Quota {
        reserve_bytes: 1 << 20,
        limit_bytes: Some(2 << 20),
        weight: 3,
    };
    let changed = VmSpec {
        name: "shop".into(),
        quota: quota.clone(),
        mode: Some(0o666),
        ..spec.clone()
    };
    assert!(!host.add(&changed));
    let vm = host.vm("shop");
    assert!(
        vm.connected,
        "changing the name, quota and mode of the VM disconnected the VM"
    );
    assert_eq!(vm.quota, quota);
    let metadata = fs::metadata(host.path("web.sock")).expect("cannot read the file's attributes");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o666);

    // The trust domain of a connected VM cannot change, because the VM may share stored pages with
    // other VMs of its trust domain.
    let other_domain = VmSpec {
        trust_domain: Some("team".into()),
        ..changed.clone()
    };
    let (name, reason) = host.refused(&other_domain);
    assert_eq!(name, "shop");
    assert!(
        reason.contains("trust domain none") && reason.contains("connected"),
        "the reason does not name the trust domain and the connection: {reason}"
    );
    let other_socket = VmSpec {
        socket: host.path("b.sock").to_string_lossy().into(),
        ..changed.clone()
    };
    drop(connection);
    until("the VM is disconnected", || !host.vm("shop").connected);
    assert!(!host.add(&other_domain));
    assert_eq!(host.vm("shop").trust_domain.as_deref(), Some("team"));
    assert!(!host.add(&VmSpec {
        socket: other_socket.socket,
        ..other_domain
    }));
    assert!(!host.path("web.sock").exists() && host.path("b.sock").exists());
    UnixStream::connect(host.path("b.sock")).expect("cannot connect to the socket");
}

#[test]
fn the_maximum_memory_of_an_added_vm_changes_at_once_and_is_stored() {
    let mut host = host();
    let spec = |memory_max_bytes| VmSpec {
        memory_max_bytes,
        ..host.spec(UUID, "web")
    };
    let maximum = |host: &RegistryTest| {
        let stats = host.client().get_stats(Some("web".into())).call();
        let stats = stats.expect("the daemon answered a valid varlink call with an error");
        stats.vms[0].memory_max_bytes
    };
    let specs = [None, Some(8 << 30), Some(i64::MAX), Some(1 << 20)].map(spec);
    let bad = [0, -1].map(|bytes| spec(Some(bytes)));
    for (spec, expected) in specs.iter().zip([1 << 40, 8 << 30, 8 << 40, 1 << 20]) {
        host.add(spec);
        assert_eq!(maximum(&host), expected);
    }
    for spec in &bad {
        let (_, reason) = host.refused(spec);
        assert!(
            reason.contains("memory_max_bytes="),
            "the reason does not name memory_max_bytes: {reason}"
        );
    }
    host.restart();
    assert_eq!(
        maximum(&host),
        1 << 20,
        "the daemon did not store the maximum"
    );
}

#[test]
fn a_refused_change_of_a_vm_has_no_effect() {
    let host = host();
    let spec = host.spec(UUID, "web");
    host.add(&spec);
    host.add(&host.spec(OTHER, "db"));
    let before = host
        .client()
        .list_vms()
        .call()
        .expect("the daemon answered a valid varlink call with an error")
        .vms;
    fs::write(host.path("file"), "precious").expect("cannot write the file");
    let mut wrong = vec![];
    let mut change = |what: &'static str, change: &dyn Fn(&mut VmSpec)| {
        let mut spec = spec.clone();
        change(&mut spec);
        wrong.push((what, spec));
    };
    change("another VM has the name db", &|s| s.name = "db".into());
    change("another VM has the name given: it is the one with", &|s| {
        s.name = "given".into()
    });
    change("a b", &|s| s.name = "a b".into());
    change("uuid=123", &|s| s.uuid = "123".into());
    change("belongs to the VM db", &|s| {
        s.socket = host.spec(OTHER, "db").socket
    });
    change("--run-directory", &|s| {
        s.socket = "/tmp/elsewhere.sock".into()
    });
    change("--run-directory", &|s| {
        s.socket = format!("{}/../x", host.daemon.folder().display())
    });
    change("--run-directory", &|s| s.socket = "x".into());
    change("--run-directory", &|s| s.socket = String::new());
    change("not a socket", &|s| {
        s.socket = host.path("file").to_string_lossy().into()
    });
    change("another process is listening", &|s| {
        s.socket = host.path("control").to_string_lossy().into();
    });
    change("trust_domain=a b", &|s| s.trust_domain = Some("a b".into()));
    change("mode=777", &|s| s.mode = Some(0o777));
    change("owner=-1", &|s| s.owner = Some(-1));
    change("owner=4294967295", &|s| s.owner = Some((1 << 32) - 1));
    change("group=4294967296", &|s| s.group = Some(1 << 32));
    change("quota: reserve_bytes=-1", &|s| s.quota.reserve_bytes = -1);
    change("quota: limit=1 ", &|s| {
        (s.quota.reserve_bytes, s.quota.limit_bytes) = (2, Some(1));
    });
    change("quota: a reserve of 67108865 bytes", &|s| {
        s.quota.reserve_bytes = (64 << 20) + 1;
        s.owner = Some(1);
    });
    let owner = || {
        fs::metadata(host.path("web.sock"))
            .expect("cannot read the file's attributes")
            .uid()
    };
    let owner_before = owner();
    for (what, spec) in wrong {
        let (_, reason) = host.refused(&spec);
        assert_eq!(
            owner(),
            owner_before,
            "the change refused for {what:?} changed the socket's owner"
        );
        assert!(
            reason.contains(what),
            "the reason does not contain {what:?}: {reason:?}"
        );
        let after = host
            .client()
            .list_vms()
            .call()
            .expect("the daemon answered a valid varlink call with an error")
            .vms;
        assert_eq!(
            after, before,
            "the change refused for {what:?} changed the list of VMs"
        );
    }
    assert_eq!(
        fs::read(host.path("file")).expect("cannot read the file"),
        b"precious"
    );
    let mut given = spec.clone();
    given.owner = Some(1);
    assert!(!host.add(&given));
    assert_eq!(owner(), 1);
    assert!(
        !host.add(&spec),
        "a call without an owner did not report that the VM already exists"
    );
    assert_eq!(owner(), owner_before);
    for name in ["web", "db"] {
        UnixStream::connect(host.path(&format!("{name}.sock")))
            .expect("cannot connect to the socket");
    }
    // The daemon refuses a new VM, and leaves neither a socket nor a stored file of that VM.
    let mut new = host.spec("5ca1ab1e-0000-4000-8000-000000000003", "new");
    new.quota.reserve_bytes = 65 << 20;
    host.refused(&new);
    assert!(!host.path("new.sock").exists() && !host.stored("new").exists());
}

#[test]
fn configured_vms_cannot_be_removed() {
    let host = host();
    let mut spec = host.spec(GIVEN, "given");
    spec.name = "what-libvirt-calls-it".into();
    spec.quota.limit_bytes = Some(1 << 20);
    assert!(!host.add(&spec));
    assert_eq!(
        host.vm("given").quota,
        spec.quota,
        "the quota of a configured VM was not changed"
    );
    spec.trust_domain = Some("team".into());
    assert!(host.refused(&spec).1.contains("--vm"));
    assert!(!host.remove(GIVEN, "given"));
    assert_eq!(host.names(), ["given"]);
    assert!(!host.stored("given").exists());
}

#[test]
fn the_next_successful_call_for_a_vm_clears_its_reported_problem() {
    let host = host();
    let spec = host.spec(UUID, "web");
    host.add(&spec);
    let set = |uuid: &str, problem: Option<&str>| {
        let mut client = host.client();
        let name = if uuid == GIVEN { "given" } else { "web" };
        let socket = host.spec(uuid, name).socket;
        let mut reply = client.set_problem(uuid.into(), socket, problem.map(Into::into));
        let replied = reply.call();
        replied.map(drop)
    };
    let problem = || host.vm("web").problem;
    let changed = VmSpec {
        mode: Some(0o600),
        ..spec.clone()
    };
    let quota = || {
        let mut client = host.client();
        client.set_quota("web".into(), spec.quota.clone())
    };
    assert_eq!(problem(), None);
    let ways_to_fix: [&dyn Fn(); 4] = [
        &|| set(UUID, None).expect("the daemon refused to set or clear the VM's problem"),
        &|| assert!(!host.add(&spec)),
        &|| assert!(!host.add(&changed)),
        &|| assert!(quota().call().is_ok()),
    ];
    for fix in ways_to_fix {
        set(&UUID.to_uppercase(), Some("a unit XiB"))
            .expect("the daemon refused to set or clear the VM's problem");
        assert_eq!(problem().as_deref(), Some("a unit XiB"));
        fix();
        assert_eq!(problem(), None);
    }
    set(GIVEN, Some("x")).expect("the daemon refused the problem of a configured VM");
    let error = set(OTHER, Some("x")).expect_err("the daemon set a problem of an unknown VM");
    assert!(
        matches!(error.kind(), ErrorKind::NoSuchVm(_)),
        "the daemon did not answer with the error NoSuchVm: {error}"
    );
}

#[test]
fn the_read_only_socket_changes_nothing() {
    let host = host();
    host.add(&host.spec(UUID, "web"));
    let mut client = tmem_control::connect(&host.path("read-only"))
        .expect("cannot connect to the control socket");
    let vms = || {
        let vms = host.client().list_vms().call().expect("ListVms fails").vms;
        let part = |vm: tmem_control::Vm| (vm.name, vm.quota, vm.frozen);
        vms.into_iter().map(part).collect::<Vec<_>>()
    };
    let before = vms();
    let (spec, web) = (host.spec(OTHER, "db"), || "web".to_string());
    let quota = tmem_control::quota(Some(1 << 20), None, None);
    let calls = [
        ("AddVm", client.add_vm(spec).call().map(drop)),
        (
            "RemoveVm",
            client.remove_vm(UUID.into(), "x".into()).call().map(drop),
        ),
        ("SetQuota", client.set_quota(web(), quota).call().map(drop)),
        (
            "SetProblem",
            client
                .set_problem(UUID.into(), "x".into(), None)
                .call()
                .map(drop),
        ),
        ("FlushVm", client.flush_vm(web()).call().map(drop)),
        ("FreezeVm", client.freeze_vm(web()).call().map(drop)),
        ("ThawVm", client.thaw_vm(web()).call().map(drop)),
        (
            "SetPoolSize",
            client.set_pool_size(8 << 20).call().map(drop),
        ),
        (
            "ReleaseMemory",
            client.release_memory(1 << 20).call().map(drop),
        ),
    ];
    for (method, result) in calls {
        let error = result.expect_err("the read-only socket accepted a change");
        assert!(
            matches!(error.kind(), ErrorKind::ReadOnlySocket(Some(args)) if args.method == method),
            "the daemon did not answer {method} with the error ReadOnlySocket: {error}"
        );
    }
    assert_eq!(vms(), before);
    let answer = client.get_freeable().call();
    answer.expect("GetFreeable fails on the read-only socket");
    let answer = client.get_features().call();
    let features = answer
        .expect("GetFeatures fails on the read-only socket")
        .features;
    assert_eq!(
        features,
        [tmem_control::FEATURE_RETAIN, "VIRTIO_TMEM_F_LATENCIES"]
    );
}

#[test]
fn added_vms_are_restored_after_a_restart() {
    let mut host = host();
    let me = fs::metadata(host.daemon.folder())
        .expect("cannot read the file's attributes")
        .uid();
    let mut spec = host.spec(UUID, "web");
    spec.trust_domain = Some("team".into());
    (spec.mode, spec.owner) = (Some(0o600), Some(i64::from(me)));
    host.add(&spec);
    host.add(&host.spec(OTHER, "db"));
    host.remove(OTHER, "db");
    let quota = Quota {
        limit_bytes: Some(5 << 20),
        ..spec.quota.clone()
    };
    host.client()
        .set_quota("web".into(), quota.clone())
        .call()
        .expect("the daemon did not change the quota");
    host.restart();
    assert_eq!(host.names(), ["given", "web"]);
    let vm = host.vm("web");
    assert_eq!(
        (vm.quota, vm.trust_domain),
        (quota, spec.trust_domain.clone())
    );
    let metadata = fs::metadata(host.path("web.sock")).expect("cannot read the file's attributes");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    host.connect("web");
    assert!(host.remove(UUID, "web"));
    host.restart();
    assert_eq!(host.names(), ["given"]);
}

#[test]
fn a_smaller_pool_restores_a_vm_with_a_smaller_reserve() {
    let mut host = host();
    let reserving = |uuid, name: &str, mib: i64| {
        let mut spec = host.spec(uuid, name);
        spec.quota.reserve_bytes = mib << 20;
        spec
    };
    let (first, second) = (reserving(UUID, "db", 20), reserving(OTHER, "web", 30));
    let less = reserving(OTHER, "web", 11);
    host.add(&first);
    host.add(&second);
    host.daemon.config().pool_size_bytes = 32 << 20;
    host.restart();
    let reserve = |host: &RegistryTest, name: &str| host.vm(name).quota.reserve_bytes >> 20;
    assert_eq!((reserve(&host, "db"), reserve(&host, "web")), (20, 12));
    assert_eq!(host.vm("db").problem, None);
    let problem = host
        .vm("web")
        .problem
        .expect("the daemon does not report that the reserve was reduced");
    for part in ["31457280", "12582912", "the VM gets what is left"] {
        assert!(
            problem.contains(part),
            "the VM's problem does not contain {part:?}: {problem}"
        );
    }
    host.connect("web");
    // The VM's manager tells the daemon that the VM has no problem. The daemon still reports that
    // the VM's reserve is reduced.
    let mut client = host.client();
    let told = client
        .set_problem(OTHER.into(), second.socket.clone(), None)
        .call();
    told.expect("the daemon refused to set or clear the VM's problem");
    assert_eq!(host.vm("web").problem.as_ref(), Some(&problem));
    // Another request for the full reserve is refused, because that reserve still does not fit into
    // the pool. A request for a smaller reserve is granted.
    let (_, reason) = host.refused(&second);
    assert!(
        reason.contains("a reserve of 31457280 bytes"),
        "the reason does not name the reserve: {reason}"
    );
    assert_eq!(reserve(&host, "web"), 12);
    assert!(!host.add(&less));
    assert_eq!((reserve(&host, "web"), host.vm("web").problem), (11, None));

    // The daemon stores the reserve that was requested, and grants it as soon as it fits into the
    // pool.
    let mut host = self::host();
    host.add(&VmSpec {
        socket: host.path("db.sock").to_string_lossy().into(),
        ..first
    });
    host.add(&VmSpec {
        socket: host.path("web.sock").to_string_lossy().into(),
        ..second
    });
    for (pool_mib, left_mib) in [(32, 12), (22, 2), (20, 0), (64, 30), (32, 12)] {
        host.daemon.config().pool_size_bytes = pool_mib << 20;
        host.restart();
        assert_eq!(
            (reserve(&host, "db"), reserve(&host, "web")),
            (20, left_mib)
        );
        assert_eq!(host.vm("web").problem.is_some(), left_mib < 30);
    }
    let resize = |bytes| host.client().set_pool_size(bytes).call().map(drop);
    resize(64 << 20).expect("the daemon did not change the pool's size");
    assert_eq!((reserve(&host, "web"), host.vm("web").problem), (30, None));
    host.daemon.config().pool_size_bytes = 32 << 20;
    host.restart();
    assert_eq!(reserve(&host, "web"), 12);
    host.remove(UUID, "db");
    assert_eq!((reserve(&host, "web"), host.vm("web").problem), (30, None));
}

/// During a migration within one host, the daemon has two VMs for one libvirt domain, each with a
/// socket and pages of its own.
#[test]
fn source_and_target_of_a_migration_on_one_host_are_two_vms() {
    let mut host = host();
    let end = |host: &RegistryTest, socket: &str| {
        let mut spec = host.spec(UUID, "web");
        spec.socket = host.path(socket).to_string_lossy().into();
        spec.quota.reserve_bytes = 40 << 20;
        spec
    };
    let (source, target) = (end(&host, "web.sock"), end(&host, "b.sock"));
    assert!(host.add(&source));
    let first = host.connect("web");
    assert!(
        host.add(&target),
        "the daemon did not add the target of the migration as another VM"
    );
    assert_eq!(host.names(), ["given", "web", "web+incoming"]);
    let (_, reason) = host.refused(&target);
    assert!(
        reason.contains("a reserve of"),
        "the reason does not name the reserve, which does not fit twice: {reason}"
    );
    let arrives = |host: &RegistryTest| host.vm("web+incoming");
    assert_eq!(arrives(&host).uuid.as_deref(), Some(UUID));
    assert_eq!(
        arrives(&host).quota.reserve_bytes,
        24 << 20,
        "the target's reserve is not what the source leaves of the pool"
    );
    // The target of the migration is not connected yet. Another target with a new socket replaces
    // it.
    for (socket, old) in [("c", "b"), ("b", "c")] {
        let socket = format!("{socket}.sock");
        assert!(!host.add(&end(&host, &socket)));
        assert!(arrives(&host).socket.ends_with(&socket) && !host.stored(old).exists());
    }
    let second = UnixStream::connect(&target.socket).expect("cannot connect to the socket");
    until("the VM is connected", || arrives(&host).connected);
    let (_, reason) = host.refused(&end(&host, "c.sock"));
    assert!(
        reason.contains("two sockets already"),
        "the reason does not name the two sockets: {reason}"
    );
    assert!(
        host.vm("web").connected,
        "adding the target disconnected the source"
    );

    // The migration fails: libvirt removes the target, and the source stays connected.
    assert!(host.remove(UUID, "b") && ended(second));
    assert_eq!(host.names(), ["given", "web"]);
    assert!(host.vm("web").connected);

    // The migration succeeds, even if the daemon restarts before the source is removed.
    assert!(host.add(&target));
    host.restart();
    assert_eq!(host.names(), ["given", "web", "web+incoming"]);
    assert!(host.remove(UUID, "web"));
    assert_eq!(host.names(), ["given", "web"]);
    let vm = host.vm("web");
    assert_eq!(
        (&vm.socket, vm.quota.reserve_bytes),
        (&target.socket, 40 << 20)
    );
    assert_eq!(vm.problem, None);
    host.restart();
    assert_eq!(host.names(), ["given", "web"]);
    drop(first);
}

/// A file of the VM store may be unreadable, or its VM may conflict with another VM. The daemon
/// skips and keeps such a file, and restores all other VMs.
#[test]
fn an_invalid_stored_vm_is_skipped_and_kept() {
    let mut host = host();
    let third = "5ca1ab1e-0000-4000-8000-000000000003";
    host.add(&host.spec(UUID, "web"));
    host.add(&host.spec(OTHER, "db"));
    host.daemon.stop();
    let good = fs::read_to_string(host.stored("db")).expect("cannot read the file");
    fs::write(host.stored("db"), good.replace("\"db\"", "\"given\""))
        .expect("cannot write the file");
    fs::write(host.stored("third"), "{\"uuid\": ").expect("cannot write the file");
    let given = good.replace(OTHER, GIVEN).replace("db.sock", "other.sock");
    fs::write(host.stored("other"), given).expect("cannot write the file");
    host.restart();
    assert_eq!(host.names(), ["given", "web"]);
    host.connect("web");
    for name in ["db", "third", "other"] {
        assert!(
            host.stored(name).exists(),
            "the file of stored VM {name} was removed"
        );
    }
    // libvirt adds the VM again when the VM starts, which writes a valid file. RemoveVm removes a
    // stored file even if the daemon did not restore its VM.
    assert!(host.add(&host.spec(OTHER, "db")));
    assert!(!host.remove(third, "third"));
    assert!(!host.stored("third").exists());
    host.restart();
    assert_eq!(host.names(), ["db", "given", "web"]);
}

#[test]
fn the_number_of_vms_is_limited() {
    let host = host();
    let mut client = host.client();
    let spec = |number: usize| {
        host.spec(
            &format!("5ca1ab1e-0000-4000-8000-{number:012}"),
            &format!("vm{number}"),
        )
    };
    // The configuration contains one VM, so VMS_MAX - 1 further VMs can be added.
    for number in 1..VMS_MAX {
        client
            .add_vm(spec(number))
            .call()
            .expect("the daemon refused one of VMS_MAX VMs");
    }
    assert!(host.refused(&spec(VMS_MAX)).1.contains("1024 VMs already"));
    assert!(host.remove(&spec(7).uuid, "vm7"));
    host.add(&spec(VMS_MAX));
}

/// Several threads add and remove VMs at the same time. At the end, no file of a removed VM is
/// left.
#[test]
fn vms_added_and_removed_concurrently_leave_no_files() {
    let host = host();
    let number = |path: &Path| {
        fs::read_dir(path)
            .expect("cannot list the directory")
            .count()
    };
    let before = number(host.daemon.folder());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let host = &host;
            scope.spawn(move || {
                let uuid = format!("5ca1ab1e-0000-4000-8000-00000000000{thread}");
                let spec = host.spec(&uuid, &format!("vm{thread}"));
                for _ in 0..50 {
                    assert!(host.add(&spec));
                    let stream =
                        UnixStream::connect(&spec.socket).expect("cannot connect to the socket");
                    assert!(host.remove(&uuid, &spec.name));
                    assert!(ended(stream));
                }
            });
        }
    });
    assert_eq!(host.names(), ["given"]);
    assert_eq!(
        number(host.daemon.folder()),
        before + 1,
        "the run directory has more new entries than the VM store"
    );
    assert_eq!(number(&host.path("vms")), 0);
}
