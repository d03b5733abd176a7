// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the daemon's VMs correspond to libvirt's domains. Each pass compares the daemon's VMs with
//! the domains and sends the differences to the daemon. It therefore does not matter whether the
//! daemon or libvirt was unreachable, or for how long.
//!
//! Out of scope: calls to libvirt. The caller passes functions that return a domain's request and
//! state.

use crate::libvirt::State;
use crate::request::Request;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tmem_control as api;
use tmem_control::{VarlinkClientInterface, VmSpec};
use tmem_libvirt::CallError;

/// Time after which the bridge removes a VM from the daemon if the VM has no connection and its
/// domain does not run. Such a VM remains if the hook could not reach the daemon when the VM ended.
/// The time is longer than the start of a VM takes.
const REMOVAL_DELAY: Duration = Duration::from_secs(60);

/// The bridge's view of the daemon, and what libvirt's domains request of it.
pub struct Reconciler {
    socket: PathBuf,
    /// Request of each running domain that has the device, by the domain's UUID.
    requests: HashMap<String, Request>,
    /// Description of each VM that the daemon most recently accepted from the bridge, by the UUID
    /// of the VM's domain.
    accepted: HashMap<String, VmSpec>,
    /// The problem that the bridge logged last for each domain, by the domain's UUID. The bridge
    /// logs a problem only if it differs from this one.
    logged_problems: HashMap<String, String>,
    /// Time at which the bridge first found that a VM's domain does not run, by the VM's socket.
    stopped_since: HashMap<String, Instant>,
    /// Each VM in the daemon whose domain this process has seen running. Such a VM belongs to
    /// libvirt, even if libvirt no longer knows its domain. The set is no larger than the daemon's
    /// list of VMs.
    ran: HashSet<VmKey>,
    /// True if the last pass could not reach the daemon.
    unreachable: bool,
}

/// UUID and socket of a VM in the daemon. During a migration on one host, two VMs have one UUID.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct VmKey {
    uuid: String,
    socket: String,
}

/// Reason why a pass of [`Reconciler::reconcile`] failed, with the service that failed.
enum PassError {
    Daemon(String),
    Libvirt(String),
}

impl Reconciler {
    /// Creates the bridge's view of the daemon with the control socket `socket`. The daemon need
    /// not run.
    pub fn new(socket: &Path) -> Reconciler {
        Reconciler {
            socket: socket.into(),
            requests: HashMap::new(),
            accepted: HashMap::new(),
            logged_problems: HashMap::new(),
            stopped_since: HashMap::new(),
            ran: HashSet::new(),
            unreachable: false,
        }
    }

    /// Sets what a domain requests of the daemon. None means that the domain does not run or has no
    /// virtio-tmem device.
    pub fn set_request(&mut self, uuid: &str, request: Option<Request>) {
        match request {
            Some(request) => {
                self.requests.insert(uuid.into(), request);
            }
            None => {
                self.requests.remove(uuid);
                self.accepted.remove(uuid);
                self.logged_problems.remove(uuid);
            }
        }
    }

    /// Forgets the requests of all domains that are not in `running`, the UUIDs of the running
    /// domains.
    pub fn forget_others(&mut self, running: &[String]) {
        self.requests.retain(|uuid, _| running.contains(uuid));
        self.accepted.retain(|uuid, _| running.contains(uuid));
        self.logged_problems
            .retain(|uuid, _| running.contains(uuid));
    }

    /// Sends the daemon all differences between its VMs and the domains' requests. `read` asks
    /// libvirt for a domain's request, and `state` for its state. An unreachable daemon is not an
    /// error, because a later pass tries again.
    ///
    /// # Errors
    /// Returns the errors of `read` and `state`.
    pub fn reconcile(
        &mut self,
        now: Instant,
        read: &dyn Fn(&str) -> Result<Option<Request>, String>,
        state: &dyn Fn(&str) -> Result<State, String>,
    ) -> Result<(), String> {
        match self.try_reconcile(now, read, state) {
            Ok(()) => {
                if std::mem::take(&mut self.unreachable) {
                    tracing::info!("the daemon answers again");
                }
                Ok(())
            }
            Err(PassError::Daemon(why)) => {
                if !std::mem::replace(&mut self.unreachable, true) {
                    tracing::warn!("{why}; retrying");
                }
                Ok(())
            }
            Err(PassError::Libvirt(why)) => Err(why),
        }
    }

    fn daemon_error(&self, error: &api::Error) -> PassError {
        PassError::Daemon(CallError::new(&self.socket, error).to_string())
    }

    fn try_reconcile(
        &mut self,
        now: Instant,
        read: &dyn Fn(&str) -> Result<Option<Request>, String>,
        state: &dyn Fn(&str) -> Result<State, String>,
    ) -> Result<(), PassError> {
        let client = api::connect(&self.socket);
        let mut client = client.map_err(|e| {
            PassError::Daemon(CallError::no_answer(&self.socket, &e.to_string()).to_string())
        })?;
        let listed = client
            .list_vms()
            .call()
            .map_err(|e| self.daemon_error(&e))?
            .vms;
        self.update_ran(&listed);
        let mut uuids: Vec<String> = self.requests.keys().cloned().collect();
        uuids.sort();
        for uuid in uuids {
            // The sockets are compared, too, because two VMs have the same UUID during a migration
            // on one host.
            let socket = self.socket(&uuid).map(str::to_string);
            let is_vm = |vm: &&api::Vm| {
                vm.uuid.as_ref() == Some(&uuid)
                    && socket.as_ref().is_none_or(|socket| *socket == vm.socket)
            };
            let vm = listed.iter().find(is_vm);
            if vm.is_none() && self.socket(&uuid).is_none() {
                continue;
            }
            if vm.is_none() {
                // The daemon does not have the VM. Either it lost the VM, or the domain has just
                // stopped and the hook removed the VM. Ask libvirt whether the domain still runs.
                let request = read(&uuid).map_err(PassError::Libvirt)?;
                self.set_request(&uuid, request);
            }
            self.reconcile_vm(&mut client, &uuid, vm, read)?;
        }
        self.remove_stopped(&mut client, now, &listed, state)
    }

    /// Returns the path of the socket that the domain's device uses; None without a valid request.
    fn socket(&self, uuid: &str) -> Option<&str> {
        match self.requests.get(uuid)? {
            Request::Settings(spec) | Request::KeepQuota(spec) => Some(&spec.socket),
            Request::Invalid(_) => None,
        }
    }

    /// Adds to `ran` those VMs of the daemon whose domains run. Removes from `ran` the VMs that the
    /// daemon no longer has.
    fn update_ran(&mut self, listed: &[api::Vm]) {
        let ran = listed.iter().filter_map(|vm| {
            let key = VmKey {
                uuid: vm.uuid.clone()?,
                socket: vm.socket.clone(),
            };
            let runs = self.socket(&key.uuid) == Some(&*key.socket);
            (runs || self.ran.contains(&key)).then_some(key)
        });
        self.ran = ran.collect();
    }

    /// Adds one VM to the daemon, or changes it, so that it corresponds to its domain's request.
    /// `listed` is the VM in the daemon's list.
    fn reconcile_vm(
        &mut self,
        client: &mut api::VarlinkClient,
        uuid: &str,
        listed: Option<&api::Vm>,
        read: &dyn Fn(&str) -> Result<Option<Request>, String>,
    ) -> Result<(), PassError> {
        let problem = match self.spec_to_send(uuid, listed) {
            Ok(None) => None,
            Ok(Some(spec)) => self.add_vm(client, uuid, spec, read)?,
            Err(what) => Some(what),
        };
        self.log_problem(uuid, listed, problem.as_deref());
        if let Some(vm) = listed
            && vm.problem != problem
        {
            let socket = vm.socket.clone();
            match client.set_problem(uuid.into(), socket, problem).call() {
                Ok(_) => {}
                // The VM was removed after the daemon listed it, so its problem need not be stored.
                Err(error) if matches!(error.kind(), api::ErrorKind::NoSuchVm(_)) => {}
                Err(error) => return Err(self.daemon_error(&error)),
            }
        }
        Ok(())
    }

    /// Returns the description of the VM that the daemon needs; None if the daemon has it already.
    ///
    /// # Errors
    /// The domain's request is invalid.
    fn spec_to_send(&self, uuid: &str, listed: Option<&api::Vm>) -> Result<Option<VmSpec>, String> {
        match (self.requests.get(uuid), listed) {
            (None, _) | (Some(Request::KeepQuota(_)), Some(_)) => Ok(None),
            (Some(Request::KeepQuota(spec)), None) => Ok(Some(spec.clone())),
            (Some(Request::Invalid(what)), _) => Err(what.clone()),
            (Some(Request::Settings(spec)), listed) => {
                let same = listed.is_some_and(|vm| {
                    vm.quota == spec.quota && self.accepted.get(uuid) == Some(spec)
                });
                Ok((!same).then(|| spec.clone()))
            }
        }
    }

    /// Adds a VM to the daemon, or changes it. Returns the reason if the daemon refuses the VM.
    fn add_vm(
        &mut self,
        client: &mut api::VarlinkClient,
        uuid: &str,
        spec: VmSpec,
        read: &dyn Fn(&str) -> Result<Option<Request>, String>,
    ) -> Result<Option<String>, PassError> {
        let added = match client.add_vm(spec.clone()).call() {
            Ok(reply) => reply.added,
            Err(error) => {
                return match CallError::new(&self.socket, &error) {
                    CallError::Refused(what) => Ok(Some(what)),
                    CallError::Failed(what) => Err(PassError::Daemon(what)),
                };
            }
        };
        self.ran.insert(VmKey {
            uuid: uuid.into(),
            socket: spec.socket.clone(),
        });
        // The domain may have stopped after `read` returned its request. In that case, the hook
        // removed the VM, and the call of add_vm has added it again.
        if added && read(uuid).map_err(PassError::Libvirt)?.is_none() {
            let removed = client.remove_vm(uuid.into(), spec.socket).call();
            removed.map_err(|e| self.daemon_error(&e))?;
            self.set_request(uuid, None);
            return Ok(None);
        }
        if self.accepted.get(uuid) != Some(&spec) {
            let (vm, quota) = (&*spec.name, &spec.quota);
            tracing::info!(vm, ?quota, "domain {vm}: quota sent to the daemon");
            self.accepted.insert(uuid.into(), spec);
        }
        Ok(None)
    }

    /// Logs a problem of a domain, unless it is the one that the bridge logged last.
    fn log_problem(&mut self, uuid: &str, listed: Option<&api::Vm>, problem: Option<&str>) {
        let Some(reason) = problem else {
            self.logged_problems.remove(uuid);
            return;
        };
        if self
            .logged_problems
            .get(uuid)
            .is_some_and(|last| last == reason)
        {
            return;
        }
        let (name, vm) = (
            listed.map_or(uuid, |vm| &vm.name),
            listed.map(|vm| &*vm.name),
        );
        tracing::warn!(
            vm,
            uuid,
            reason,
            "domain {name}: {reason}; its cache settings are unchanged"
        );
        self.logged_problems.insert(uuid.into(), reason.into());
    }

    /// Removes VMs from the daemon that have had no connection and no running domain for
    /// [`REMOVAL_DELAY`].
    fn remove_stopped(
        &mut self,
        client: &mut api::VarlinkClient,
        now: Instant,
        listed: &[api::Vm],
        state: &dyn Fn(&str) -> Result<State, String>,
    ) -> Result<(), PassError> {
        let lost = |vm: &api::Vm| {
            let uuid = vm.uuid.as_ref().filter(|_| !vm.connected)?;
            (!self.requests.contains_key(uuid)).then(|| VmKey {
                uuid: uuid.clone(),
                socket: vm.socket.clone(),
            })
        };
        let lost: Vec<VmKey> = listed.iter().filter_map(lost).collect();
        let is_lost = |socket: &str| lost.iter().any(|key| key.socket == socket);
        self.stopped_since.retain(|socket, _| is_lost(socket));
        for key in lost {
            let VmKey { uuid, socket } = &key;
            let since = *self.stopped_since.entry(socket.clone()).or_insert(now);
            if now.saturating_duration_since(since) < REMOVAL_DELAY {
                continue;
            }
            match state(uuid).map_err(PassError::Libvirt)? {
                State::Stopped => {}
                // libvirt does not know the VM. If this process has never seen its domain running,
                // the VM may belong to a manager other than libvirt.
                State::Unknown if self.ran.contains(&key) => {}
                State::Runs | State::Unknown => continue,
            }
            let removed = client.remove_vm(uuid.clone(), socket.clone()).call();
            if removed.map_err(|e| self.daemon_error(&e))?.removed {
                tracing::info!(uuid, "VM {uuid}: removed because its domain does not run");
            }
            // Begin the delay again. The daemon does not remove a VM that its configuration names,
            // so the bridge tries again only after [`REMOVAL_DELAY`].
            self.stopped_since.insert(socket.clone(), now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::unix::net::UnixStream;
    use tmem_model::TestDaemon;

    const UUID: &str = "5ca1ab1e-0000-4000-8000-000000000001";

    struct BridgeTest {
        tmemd: TestDaemon,
        bridge: Reconciler,
        /// Request of the only domain of the simulated libvirt. None means that the domain does not
        /// run.
        running: RefCell<Option<Request>>,
        /// State that the simulated libvirt reports for its domain while the domain does not run.
        otherwise: State,
        now: Instant,
    }

    impl BridgeTest {
        fn new() -> BridgeTest {
            let tmemd = TestDaemon::start(&[]);
            let bridge = Reconciler::new(&tmemd.path("control"));
            BridgeTest {
                tmemd,
                bridge,
                running: RefCell::new(None),
                otherwise: State::Stopped,
                now: Instant::now(),
            }
        }

        fn spec(&self, limit: i64) -> VmSpec {
            let socket = self.tmemd.path("a.sock");
            VmSpec {
                uuid: UUID.into(),
                name: "web".into(),
                socket: socket.to_string_lossy().into(),
                owner: None,
                group: None,
                mode: None,
                memory_max_bytes: None,
                trust_domain: None,
                quota: api::quota(None, Some(limit as u64), None),
            }
        }

        /// Changes the request of the simulated libvirt's domain, and reports the change to the
        /// bridge.
        fn set_request(&mut self, request: Option<Request>) {
            *self.running.borrow_mut() = request.clone();
            self.bridge.set_request(UUID, request);
            self.reconcile();
        }

        fn reconcile(&mut self) {
            let (running, otherwise) = (&self.running, self.otherwise);
            let done = self
                .bridge
                .reconcile(self.now, &|_| Ok(running.borrow().clone()), &|_| {
                    Ok(running.borrow().as_ref().map_or(otherwise, |_| State::Runs))
                });
            assert_eq!(done, Ok(()));
        }

        /// Connects to the VM's socket as QEMU does.
        fn connect(&self) -> UnixStream {
            let qemu =
                UnixStream::connect(self.spec(0).socket).expect("cannot connect to the socket");
            let deadline = Instant::now() + Duration::from_secs(30);
            while !self.vms()[0].connected {
                assert!(
                    Instant::now() < deadline,
                    "timeout while waiting for the expected state of the VMs"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            qemu
        }

        fn client(&self) -> api::VarlinkClient {
            self.tmemd.client()
        }

        fn vms(&self) -> Vec<api::Vm> {
            self.client()
                .list_vms()
                .call()
                .expect("the daemon answered the varlink call with an error")
                .vms
        }
    }

    #[test]
    fn the_bridge_applies_domain_metadata_to_the_daemon() {
        let mut host = BridgeTest::new();
        host.set_request(Some(Request::Settings(host.spec(5))));
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(5));
        host.set_request(Some(Request::Settings(host.spec(6))));
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(6));
        let renamed = VmSpec {
            name: "shop".into(),
            ..host.spec(6)
        };
        host.set_request(Some(Request::Settings(renamed.clone())));
        assert_eq!(host.vms()[0].name, "shop");
        // A client of the daemon changes the VM's quota. The bridge then restores the quota of the
        // domain's metadata.
        let quota = host.spec(9).quota;
        host.client()
            .set_quota("shop".into(), quota)
            .call()
            .expect("the daemon did not change the quota");
        host.reconcile();
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(6));
        // KeepQuota means that the domain's metadata has no quota, so the bridge keeps the daemon's
        // quota.
        host.set_request(Some(Request::KeepQuota(host.spec(1))));
        assert_eq!(
            (host.vms()[0].quota.limit_bytes, &*host.vms()[0].name),
            (Some(6), "shop")
        );
    }

    #[test]
    fn invalid_metadata_is_reported_and_changes_nothing() {
        let mut host = BridgeTest::new();
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.set_request(Some(Request::Invalid("unit XiB".into())));
        let vm = host.vms().remove(0);
        assert_eq!(
            (vm.quota.limit_bytes, vm.problem.as_deref()),
            (Some(5), Some("unit XiB"))
        );
        let mut large = host.spec(1 << 40);
        large.quota.reserve_bytes = 1 << 40;
        host.set_request(Some(Request::Settings(large)));
        let vm = host.vms().remove(0);
        assert_eq!(
            vm.quota.limit_bytes,
            Some(5),
            "a quota that the daemon refuses changed the limit"
        );
        assert!(
            vm.problem
                .is_some_and(|what| what.contains("1099511627776"))
        );
        host.set_request(Some(Request::Settings(host.spec(5))));
        assert_eq!(host.vms()[0].problem, None);
        // The VM is removed from the daemon. The bridge must then accept that the daemon has no VM
        // whose problem it could store.
        host.client()
            .remove_vm(UUID.into(), host.spec(5).socket)
            .call()
            .expect("the daemon did not remove the VM");
        host.set_request(Some(Request::Invalid("unit XiB".into())));
        assert!(host.vms().is_empty());
    }

    #[test]
    fn a_restarted_daemon_gets_changes_made_while_it_was_down() {
        let mut host = BridgeTest::new();
        host.tmemd.stop();
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.tmemd.restart();
        host.reconcile();
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(5));
        host.tmemd.stop();
        host.set_request(Some(Request::Settings(host.spec(6))));
        host.tmemd.restart();
        assert_eq!(
            host.vms()[0].quota.limit_bytes,
            Some(5),
            "the restarted daemon does not use the stored quota"
        );
        host.reconcile();
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(6));
    }

    /// During a migration within one host, the daemon has two VMs with one UUID. A bridge changes
    /// only the VM at the socket that the domain of its own libvirt uses.
    #[test]
    fn a_bridge_changes_only_its_own_end_of_a_migration() {
        let mut host = BridgeTest::new();
        host.set_request(Some(Request::Settings(host.spec(5))));
        let socket = host.spec(5).socket;
        let _qemu = host.connect();
        let mut other = host.spec(7);
        other.socket = socket.replace("a.sock", "b.sock");
        host.client()
            .add_vm(other.clone())
            .call()
            .expect("the daemon did not add the VM");
        let limits = |host: &BridgeTest| -> Vec<_> {
            let vms = host.vms().into_iter();
            vms.map(|vm| (vm.name, vm.quota.limit_bytes)).collect()
        };
        let incoming = ("web+incoming".to_string(), Some(7));
        host.set_request(Some(Request::Settings(host.spec(6))));
        assert_eq!(limits(&host), [("web".into(), Some(6)), incoming.clone()]);
        host.set_request(Some(Request::Invalid("unit XiB".into())));
        host.set_request(Some(Request::Settings(host.spec(8))));
        assert_eq!(limits(&host), [("web".into(), Some(8)), incoming]);
        host.client()
            .remove_vm(UUID.into(), socket)
            .call()
            .expect("the daemon did not remove the VM");
        assert_eq!(limits(&host), [("web".into(), Some(7))]);
    }

    /// The hook removes a stopped VM from the daemon before libvirt reports the stop. The bridge
    /// must not add the VM again.
    #[test]
    fn a_stopped_vm_is_not_added_again() {
        let mut host = BridgeTest::new();
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.client()
            .remove_vm(UUID.into(), host.spec(5).socket)
            .call()
            .expect("the daemon did not remove the VM");
        *host.running.borrow_mut() = None;
        host.reconcile();
        assert!(host.vms().is_empty());
    }

    /// The VM stops after the bridge has read its request from libvirt, and before the bridge asks
    /// the daemon to add the VM.
    #[test]
    fn a_vm_that_stops_while_it_is_added_is_removed_at_once() {
        let mut host = BridgeTest::new();
        let spec = host.spec(5);
        for request in [Request::Settings(spec.clone()), Request::KeepQuota(spec)] {
            host.bridge.set_request(UUID, Some(request.clone()));
            let read = RefCell::new(Some(request));
            let state: &dyn Fn(&str) -> _ = &|_| Ok(State::Unknown);
            let done = host.bridge.reconcile(host.now, &|_| Ok(read.take()), state);
            assert_eq!((done, host.vms().len()), (Ok(()), 0));
            assert!(host.bridge.requests.is_empty());
        }
        // If the hook has added the VM, the VM may be about to start although libvirt does not
        // report it as running yet. The bridge must then not remove it.
        host.client()
            .add_vm(host.spec(6))
            .call()
            .expect("the daemon did not add the VM");
        let request = Request::Settings(host.spec(5));
        host.bridge.set_request(UUID, Some(request));
        host.reconcile();
        assert_eq!(host.vms()[0].quota.limit_bytes, Some(5));
    }

    /// The VM stops after the bridge has read its request from libvirt, and before the bridge adds
    /// it to the daemon. Then libvirt stops, too, so the bridge cannot learn in this pass that the
    /// VM has stopped.
    #[test]
    fn a_vm_that_stops_during_reconcile_is_removed_later() {
        let mut host = BridgeTest::new();
        let request = Some(Request::Settings(host.spec(5)));
        host.bridge.set_request(UUID, request.clone());
        let read = RefCell::new(request);
        let once = |_: &str| read.take().map(Some).ok_or("away".to_string());
        let state: &dyn Fn(&str) -> _ = &|_| Ok(State::Unknown);
        let done = host.bridge.reconcile(host.now, &once, state);
        assert_eq!((done, host.vms().len()), (Err("away".into()), 1));
        host.bridge.forget_others(&[]);
        for _ in 0..2 {
            let done = host.bridge.reconcile(host.now, &|_| Ok(None), state);
            assert_eq!(done, Ok(()));
            host.now += REMOVAL_DELAY;
        }
        assert!(host.vms().is_empty());
    }

    #[test]
    fn a_vm_without_a_running_domain_is_removed_after_a_delay() {
        let mut host = BridgeTest::new();
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.set_request(None);
        host.now += REMOVAL_DELAY / 2;
        host.reconcile();
        assert_eq!(
            host.vms().len(),
            1,
            "the bridge removed a VM whose domain may be starting"
        );
        // After each start and stop of the VM, the delay before its removal begins again.
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.set_request(None);
        host.now += REMOVAL_DELAY / 2;
        host.reconcile();
        assert_eq!(host.vms().len(), 1);
        host.now += REMOVAL_DELAY;
        *host.running.borrow_mut() = Some(Request::Settings(host.spec(5)));
        host.reconcile();
        assert_eq!(
            host.vms().len(),
            1,
            "the bridge removed a VM whose running domain was not reported yet"
        );
        *host.running.borrow_mut() = None;
        host.reconcile();
        assert!(host.vms().is_empty());
    }

    /// A transient domain stops, or a domain migrates to another host, while the daemon does not
    /// run. The hook then cannot tell the daemon to remove the VM, and libvirt no longer knows the
    /// domain.
    #[test]
    fn a_vm_that_ran_is_removed_when_libvirt_no_longer_knows_its_domain() {
        let mut host = BridgeTest::new();
        host.otherwise = State::Unknown;
        let are_left = |host: &mut BridgeTest| {
            host.reconcile();
            host.now += REMOVAL_DELAY;
            host.reconcile();
            host.vms().len()
        };
        host.set_request(Some(Request::Settings(host.spec(5))));
        host.reconcile();
        host.tmemd.stop();
        host.set_request(None);
        host.tmemd.restart();
        assert_eq!(
            host.vms().len(),
            1,
            "the restarted daemon did not restore the stored VM"
        );
        assert_eq!(are_left(&mut host), 0);
        host.reconcile();
        assert!(host.bridge.ran.is_empty());
        // The bridge has never seen the domain of this VM running, so the VM may belong to a
        // manager other than libvirt.
        host.client()
            .add_vm(host.spec(5))
            .call()
            .expect("the daemon did not add the VM");
        assert_eq!(are_left(&mut host), 1);
        // The domain migrates to another libvirt on this host, which gives it another socket. The
        // bridge has never seen the domain running with the new socket, so it does not remove the
        // VM of that socket.
        host.set_request(Some(Request::Settings(host.spec(5))));
        let _qemu = host.connect();
        let mut other = host.spec(5);
        other.socket = other.socket.replace("a.sock", "b.sock");
        host.client()
            .add_vm(other)
            .call()
            .expect("the daemon did not add the VM");
        host.reconcile();
        host.client()
            .remove_vm(UUID.into(), host.spec(5).socket)
            .call()
            .expect("the daemon did not remove the VM");
        host.set_request(None);
        assert_eq!(are_left(&mut host), 1);
    }
}
