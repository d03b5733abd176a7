// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Registry of the VMs that the daemon serves. VMs of the configuration stay as long as the daemon
//! runs; other VMs are added and removed meanwhile.
//!
//! The registry owns the sockets and the tenants (pages in the pool) of the VMs. It stores added
//! VMs so that they return after a restart of the daemon. A call that returns an error has changed
//! nothing. Out of scope: messages of a connection, and contents of pages.

use crate::config::account::Account;
use crate::config::settings::{
    NAME_BYTES_MAX, VMS_MAX, VmConfig, parse_name, parse_uuid, reserve_text,
};
use crate::events::bus::{EventKind, Events};
use crate::host::pressure::PoolSize;
use crate::memory::budget::{
    MemoryAccount, MemoryBudget, VM_MEMORY_BYTES_DEFAULT, VM_MEMORY_BYTES_MAX,
};
use crate::socket::listener::{Access, Listener};
use crate::util::event_fd::signal;
use crate::util::request_rate::RequestRate;
use crate::vm::quota;
use crate::vm::recorder::{Recorder, Tap};
use crate::vm::state::Vm;
use crate::vm::store::{StoredVm, VmStore};
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tmem_control::VmSpec;
use tmem_pool::{AdmissionError, Engine, Quota, TenantSpec};

/// Permission bits that the mode of a VM's socket may contain. connect(2) checks only the write
/// permission. A mode with other bits is refused as a mistake.
const MODE_BITS: i64 = 0o666;

/// Suffix of a VM's name during a migration within this host. The target VM has the suffix as long
/// as the source VM exists.
const INCOMING: &str = "+incoming";

/// Quota that a VM gets when it is removed. With this quota, the VM's reserve is free at once, even
/// before its pages are freed.
const NOTHING: Quota = Quota {
    reserve_bytes: 0,
    limit_bytes: Some(0),
    weight: 0,
};

/// Reason why a request to add a VM or change its quota is refused, as a sentence without the VM's
/// name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The requested quota is invalid, or its reserve does not fit into the pool.
    Quota(String),
    /// A value of the request other than the quota is invalid or conflicts with another VM.
    Vm(String),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Refused::Quota(reason) | Refused::Vm(reason)) = self;
        f.write_str(reason)
    }
}

struct Member {
    vm: Arc<Vm>,
    /// Listening socket of the VM; None before the daemon begins to listen on it.
    listener: Option<Arc<Listener>>,
    /// Request with which the VM was added, including later changes; the VM store has a copy. None
    /// for a VM of the configuration.
    added: Option<VmSpec>,
    /// Text for operators if the daemon has reduced the VM's reserve, at a restart or because the
    /// VM is the target of a migration; otherwise None.
    reduced_reserve: Option<String>,
}

/// List of the registry's VMs, which the registry's lock guards.
#[derive(Default)]
struct Members {
    /// VMs in the order in which they were added.
    list: Vec<Member>,
    /// Number of VMs that were ever added.
    added_count: u32,
}

/// A valid request to add a VM.
struct ParsedSpec {
    config: VmConfig,
    /// Permissions of the VM's socket.
    access: Access,
    /// The request itself, with the UUID in its canonical form.
    spec: VmSpec,
}

/// Registry of the VMs that the daemon serves.
pub struct Registry {
    engine: Arc<Engine>,
    recorder: Option<Arc<Recorder>>,
    events: Arc<Events>,
    /// Rate limit of each VM in pages per second. The [`RequestRate`] values of all VMs share this
    /// number.
    pages_per_second: Arc<AtomicU64>,
    /// Budget of mapped guest memory, which all VMs share.
    memory_budget: Arc<MemoryBudget>,
    run_directory: PathBuf,
    store: VmStore,
    members: Mutex<Members>,
    /// Eventfd that is signalled after the set of listening sockets has changed.
    changed: OwnedFd,
}

impl Member {
    fn is(&self, uuid: Option<&String>, socket: &Path) -> bool {
        self.vm.config.uuid.as_ref() == uuid && self.vm.config.socket == socket
    }
}

/// Returns the name that the target VM of a migration within this host gets. `name` is the name of
/// the source VM.
fn incoming_name(name: &str) -> String {
    // Names are ASCII, so cutting a name at any byte leaves valid text.
    let room = NAME_BYTES_MAX - INCOMING.len();
    format!("{}{INCOMING}", &name[..name.len().min(room)])
}

/// Converts the pool's error about a reserve that does not fit into a refusal of the request.
fn reserve_refused(error: &AdmissionError) -> Refused {
    Refused::Quota(reserve_text(error.reserve_bytes, error.available_bytes))
}

fn too_many() -> Refused {
    Refused::Vm(format!(
        "there are {VMS_MAX} VMs already, and no more are served"
    ))
}

impl Registry {
    /// Creates a registry without VMs.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new(
        engine: Arc<Engine>,
        recorder: Option<Arc<Recorder>>,
        events: Arc<Events>,
        run_directory: &Path,
    ) -> io::Result<Registry> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Registry {
            engine,
            recorder,
            events,
            pages_per_second: Arc::default(),
            memory_budget: Arc::new(MemoryBudget::for_host()),
            run_directory: run_directory.into(),
            store: VmStore::new(run_directory),
            members: Mutex::default(),
            changed: rustix::event::eventfd(0, flags)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the pages per second that each VM may put, get and flush; 0 for no limit.
    pub fn set_pages_per_second(&self, pages: u64) {
        self.pages_per_second.store(pages, Ordering::Relaxed);
    }

    /// Returns the budget of mapped guest memory, which all VMs share.
    pub fn memory_budget(&self) -> &MemoryBudget {
        &self.memory_budget
    }

    /// Returns an eventfd that is signalled after the result of [`listeners`](Self::listeners) has
    /// changed.
    pub fn changed(&self) -> &OwnedFd {
        &self.changed
    }

    /// Returns all VMs, sorted by name.
    pub fn vms(&self) -> Vec<Arc<Vm>> {
        let mut vms: Vec<Arc<Vm>> = self.lock().list.iter().map(|m| m.vm.clone()).collect();
        vms.sort_by_key(|vm| vm.name());
        vms
    }

    /// Returns the listening sockets of all VMs, each with its VM.
    pub fn listeners(&self) -> Vec<(Arc<Listener>, Arc<Vm>)> {
        let members = self.lock();
        let listening = |m: &Member| Some((m.listener.clone()?, m.vm.clone()));
        members.list.iter().filter_map(listening).collect()
    }

    /// Adds a VM of the configuration. [`listen`](Self::listen) binds its socket later.
    ///
    /// # Errors
    /// The VM's reserve does not fit into the pool.
    pub fn add_configured(&self, config: &VmConfig) -> Result<(), AdmissionError> {
        let mut members = self.lock();
        let vm = self.create_vm(&mut members, config, config.quota)?;
        members.list.push(Member {
            vm,
            listener: None,
            added: None,
            reduced_reserve: None,
        });
        Ok(())
    }

    /// Creates a VM and its tenant, which gets the given quota. The caller adds the VM to the list.
    fn create_vm(
        &self,
        members: &mut Members,
        config: &VmConfig,
        quota: Quota,
    ) -> Result<Arc<Vm>, AdmissionError> {
        let mut spec = TenantSpec::new(&config.name, quota);
        spec.trust_domain = config.trust_domain.clone();
        let tenant = self.engine.add_tenant(spec)?;
        let tap = self
            .recorder
            .clone()
            .map(|recorder| Tap::new(recorder, members.added_count));
        members.added_count += 1;
        let events = self.events.clone();
        let mut vm = Vm::new(config.clone(), tenant, tap, events);
        vm.rate = RequestRate::new(&self.pages_per_second);
        vm.memory = Arc::new(MemoryAccount::new(
            &self.memory_budget,
            config.memory_max_bytes,
        ));
        Ok(Arc::new(vm))
    }

    /// Binds the sockets of the configured VMs. The daemon calls this function when it is ready to
    /// serve the VMs.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub fn listen(&self) -> io::Result<()> {
        for member in &mut self.lock().list {
            let vm = &member.vm;
            let listener = bind_configured(&vm.config)
                .map_err(|e| io::Error::other(format!("VM {}: {e}", vm.name())))?;
            member.listener = Some(Arc::new(listener));
        }
        Ok(())
    }

    /// Restores the VMs of the VM store, in the order of their sockets. A reserve that no longer
    /// fits into the pool is reduced to the unreserved part of the pool. A VM that cannot be
    /// restored is logged and left out. The stored files stay as they are, so a file system that is
    /// full does not prevent the restoration.
    pub fn restore(&self) {
        let store = self.store.read().unwrap_or_else(|error| {
            tracing::error!("the stored VMs cannot be restored: {error}");
            Vec::new()
        });
        let mut members = self.lock();
        for StoredVm { path, vm } in store {
            // If the stored file cannot be read, the VM's name is not known.
            let name = vm.as_ref().ok().map(|spec| spec.name.clone());
            let name = name.as_deref();
            let added = vm.map_err(Refused::Vm).and_then(|spec| {
                let request = self.parse_spec(spec)?;
                let uuid = &request.config.uuid;
                let is_configured = |m: &Member| m.added.is_none() && m.vm.config.uuid == *uuid;
                if members.list.iter().any(is_configured) {
                    let what = "the VM is also configured with --vm or [[vm]]";
                    return Err(Refused::Vm(what.into()));
                }
                let member = self.create_member(&mut members, request, true)?;
                let reduced_reserve = member.reduced_reserve.clone();
                self.push(&mut members, member);
                Ok(reduced_reserve)
            });
            match added {
                Ok(None) => tracing::info!(vm = name, "VM restored from {}", path.display()),
                Ok(Some(reason)) => tracing::warn!(
                    vm = name,
                    reason,
                    "VM restored from {}, but {reason}",
                    path.display()
                ),
                Err(why) => tracing::error!(
                    vm = name,
                    reason = %why,
                    "the VM stored in {} was not restored: {why}. Fix the cause and restart the VM, or \
                     remove the file",
                    path.display()
                ),
            }
        }
    }

    /// Parses a request to add a VM. Checks those values that do not depend on other VMs.
    fn parse_spec(&self, mut spec: VmSpec) -> Result<ParsedSpec, Refused> {
        let fault =
            |key: &str, value: &str, what: String| Refused::Vm(format!("{key}={value}: {what}"));
        let id = |key: &str, id: Option<i64>| {
            let number = id.map(u32::try_from).transpose();
            // u32::MAX is not a valid id of a user or group, because chown(2) takes it as "do not
            // change".
            let number = number.ok().filter(|number| *number != Some(u32::MAX));
            number.ok_or_else(|| {
                let value = id.unwrap_or_default().to_string();
                fault(key, &value, "is not the number of a user or group".into())
            })
        };
        let mode = spec.mode.unwrap_or(i64::from(Access::default().mode));
        if mode & !MODE_BITS != 0 {
            let what = format!("has bits outside of {MODE_BITS:o}");
            return Err(fault("mode", &format!("{mode:o}"), what));
        }
        let access = Access {
            owner: id("owner", spec.owner)?,
            group: id("group", spec.group)?,
            mode: mode as u32,
        };
        let socket = PathBuf::from(&spec.socket);
        if !self.is_in_run_directory(&socket) {
            let what = format!(
                "sockets of VMs must be in {}: give the VM's device a socket there, or start the daemon with another \
                 --run-directory",
                self.run_directory.display()
            );
            return Err(fault("socket", &spec.socket, what));
        }
        let domain = spec.trust_domain.as_deref().map(parse_name).transpose();
        let domain = domain.map_err(|what| {
            let value = spec.trust_domain.as_deref().unwrap_or_default();
            fault("trust_domain", value, what)
        });
        let memory_max_bytes = match spec.memory_max_bytes {
            None => VM_MEMORY_BYTES_DEFAULT,
            Some(bytes @ 1..) => bytes.unsigned_abs().min(VM_MEMORY_BYTES_MAX),
            Some(bytes) => {
                let what = "must be above 0".into();
                return Err(fault("memory_max_bytes", &bytes.to_string(), what));
            }
        };
        let name = parse_name(&spec.name).map_err(|what| fault("name", &spec.name, what))?;
        spec.uuid = parse_uuid(&spec.uuid).map_err(|what| fault("uuid", &spec.uuid, what))?;
        let config = VmConfig {
            name,
            uuid: Some(spec.uuid.clone()),
            trust_domain: domain?,
            quota: quota::from_api(&spec.quota).map_err(Refused::Quota)?,
            socket,
            // The owner is part of the returned `access` instead.
            owner: None,
            memory_max_bytes,
        };
        Ok(ParsedSpec {
            config,
            access,
            spec,
        })
    }

    /// Inserts a new VM, or the target VM of a migration within this host, and stores it.
    /// `any_reserve` is that of [`create_member`](Self::create_member).
    fn insert(
        &self,
        members: &mut Members,
        request: ParsedSpec,
        any_reserve: bool,
    ) -> Result<(), Refused> {
        let spec = request.spec.clone();
        let member = self.create_member(members, request, any_reserve)?;
        self.store.write(&spec).map_err(|e| {
            Refused::Vm(format!(
                "the VM cannot be stored for the next start of the daemon: {e}"
            ))
        })?;
        self.push(members, member);
        Ok(())
    }

    /// Adds a VM, whose socket is bound, to the list.
    fn push(&self, members: &mut Members, member: Member) {
        members.list.push(member);
        signal(&self.changed);
    }

    /// Checks that another VM can be served, and that no VM has its name or its socket.
    fn check_new(members: &Members, config: &VmConfig) -> Result<(), Refused> {
        if members.list.len() >= VMS_MAX {
            return Err(too_many());
        }
        for other in &members.list {
            let name = other.vm.name();
            if *name == *config.name {
                return Err(Refused::Vm(format!(
                    "another VM has the name {name}: it is {}",
                    identity(&other.vm)
                )));
            }
            if other.vm.config.socket == config.socket {
                return Err(Refused::Vm(format!(
                    "socket={} belongs to the VM {name}",
                    config.socket.display()
                )));
            }
        }
        Ok(())
    }

    /// Creates the entry of a new VM, or of the target VM of a migration within this host, and binds
    /// its socket. The caller adds the entry to the list. If the VM's reserve does not fit into the
    /// pool, the call fails or, with `any_reserve`, reduces the reserve to the unreserved part of
    /// the pool.
    fn create_member(
        &self,
        members: &mut Members,
        request: ParsedSpec,
        any_reserve: bool,
    ) -> Result<Member, Refused> {
        let mut config = request.config;
        let is_source =
            |m: &Member| *m.vm.name() == *config.name && m.vm.config.uuid == config.uuid;
        if members.list.iter().any(is_source) {
            config.name = incoming_name(&config.name);
        }
        Registry::check_new(members, &config)?;
        let mut reduced_reserve = None;
        let vm = match self.create_vm(members, &config, config.quota) {
            Err(error) if any_reserve => {
                config.quota.reserve_bytes = error.available_bytes;
                let why = reserve_refused(&error);
                reduced_reserve = Some(format!("{why}; the VM gets what is left"));
                self.create_vm(members, &config, config.quota)
            }
            created => created,
        };
        let vm = vm.map_err(|e| reserve_refused(&e))?;
        vm.set_problem(reduced_reserve.clone());
        let listener = Listener::bind(&config.socket, request.access)
            .map_err(|e| Refused::Vm(e.to_string()))?;
        Ok(Member {
            vm,
            listener: Some(Arc::new(listener)),
            added: Some(request.spec),
            reduced_reserve,
        })
    }

    /// Creates the entry of a new VM of the configuration, without its reserve, and binds its
    /// socket. The caller sets the reserve and adds the entry to the list.
    fn create_configured(
        &self,
        members: &mut Members,
        config: &VmConfig,
    ) -> Result<Member, Refused> {
        let has_uuid = |m: &&Member| config.uuid.is_some() && m.vm.config.uuid == config.uuid;
        if let Some(other) = members.list.iter().find(has_uuid) {
            let name = other.vm.name();
            return Err(Refused::Vm(format!("the VM {name} has the same UUID")));
        }
        Registry::check_new(members, config)?;
        let quota = Quota {
            reserve_bytes: 0,
            ..config.quota
        };
        let vm = self.create_vm(members, config, quota);
        let vm = vm.map_err(|e| reserve_refused(&e))?;
        let listener = bind_configured(config).map_err(|e| Refused::Vm(e.to_string()))?;
        Ok(Member {
            vm,
            listener: Some(Arc::new(listener)),
            added: None,
            reduced_reserve: None,
        })
    }

    /// Grants requests of VMs that could not be granted before: a name that another VM had, or a
    /// reserve that did not fit into the pool.
    fn grant_pending(&self, members: &mut [Member]) {
        for at in 0..members.len() {
            let wanted = members[at].added.as_ref().map(|added| added.name.clone());
            let has_name = |m: &Member| Some(&*m.vm.name()) == wanted.as_deref();
            if let Some(name) = &wanted
                && !members.iter().any(has_name)
            {
                let vm = &members[at].vm;
                tracing::info!(vm = name, "VM {} is renamed to {name}", vm.name());
                vm.rename(name);
            }
            let member = &mut members[at];
            let (Some(reduced), Some(added)) = (&member.reduced_reserve, &member.added) else {
                continue;
            };
            let set = quota::from_api(&added.quota).map(|quota| member.vm.tenant.set_quota(quota));
            if let Ok(Ok(())) = set {
                let name = member.vm.name();
                tracing::info!(vm = %name, "VM {name}: the requested reserve fits now and is granted");
                if member.vm.problem().as_ref() == Some(reduced) {
                    member.vm.set_problem(None);
                }
                member.reduced_reserve = None;
            }
        }
    }

    /// Grants requested reserves that did not fit into the pool before. The caller has enlarged the
    /// pool.
    pub fn grant_reserves(&self) {
        self.grant_pending(&mut self.lock().list);
    }

    /// Adds a VM, or changes the VM that has the same UUID. If that VM is connected at another
    /// socket, adds the target VM of a migration within this host. Returns true if a VM was added.
    ///
    /// # Errors
    /// The request is invalid or conflicts with another VM.
    pub fn add(&self, spec: VmSpec) -> Result<bool, Refused> {
        let request = self.parse_spec(spec)?;
        let mut members = self.lock();
        let added = self.add_or_change(&mut members, request)?;
        self.grant_pending(&mut members.list);
        Ok(added)
    }

    fn add_or_change(&self, members: &mut Members, request: ParsedSpec) -> Result<bool, Refused> {
        let config = &request.config;
        let has_uuid = |m: &Member| m.vm.config.uuid == config.uuid;
        let has_uuid_and_socket = |m: &Member| m.is(config.uuid.as_ref(), &config.socket);
        let is_free = |m: &Member| m.added.is_none() || !m.vm.connected.load(Ordering::Acquire);
        let all = &members.list;
        let entries = all.iter().filter(|m| has_uuid(m)).count();
        let position = all.iter().position(has_uuid_and_socket);
        let position = position.or_else(|| all.iter().position(|m| has_uuid(m) && is_free(m)));
        let Some(at) = position else {
            // If the VM has an entry with another socket, it is being migrated within this host.
            // That entry is the source of the migration.
            if entries > 1 {
                let what =
                    "the VM is connected at two sockets already, as in a migration on this host";
                return Err(Refused::Vm(what.into()));
            }
            let config = config.clone();
            self.insert(members, request, entries == 1)?;
            let socket = config.socket.display();
            tracing::info!(vm = config.name, uuid = config.uuid, %socket, "VM added");
            let (kind, vm) = (EventKind::Added, Some(config.name.as_str()));
            self.events.emit(kind, vm, format_args!("at {socket}"));
            return Ok(true);
        };
        let present = &members.list[at].vm.config;
        if present.socket != config.socket || present.trust_domain != config.trust_domain {
            self.replace(members, at, request, entries > 1)?;
        } else {
            self.change(members, at, request)?;
        }
        Ok(false)
    }

    /// Replaces a VM that is not connected by a VM with another socket or trust domain. If the
    /// request is refused, inserts the previous VM again. `any_reserve` is that of
    /// [`insert`](Self::insert).
    fn replace(
        &self,
        members: &mut Members,
        at: usize,
        request: ParsedSpec,
        any_reserve: bool,
    ) -> Result<(), Refused> {
        let member = &members.list[at];
        let (vm, present, config) = (member.vm.clone(), &member.vm.config, &request.config);
        let name = |domain: &Option<String>| domain.clone().unwrap_or_else(|| "none".into());
        let differs = format!(
            "the VM is served at {} in trust domain {}, not at {} in trust domain {}",
            present.socket.display(),
            name(&present.trust_domain),
            config.socket.display(),
            name(&config.trust_domain)
        );
        let Some(old) = member.added.clone() else {
            let what = "as the daemon's --vm or [[vm]] says: change that setting, or the request";
            return Err(Refused::Vm(format!("{differs}, {what}")));
        };
        if vm.connected.load(Ordering::Acquire) {
            let what = "the VM is connected: restart it to apply the change";
            return Err(Refused::Vm(format!("{differs}, and {what}")));
        }
        let old = self.parse_spec(old)?;
        let (old_socket, socket) = (old.config.socket.clone(), config.socket.clone());
        self.remove_at(members, at);
        if let Err(why) = self.insert(members, request, any_reserve) {
            // The stored file of the previous VM is still there.
            match self.create_member(members, old, true) {
                Ok(member) => self.push(members, member),
                Err(error) => tracing::error!(
                    vm = %vm.name(),
                    reason = %error,
                    "the VM is no longer served: {error}"
                ),
            }
            return Err(why);
        }
        if old_socket != socket {
            self.remove_stored(&old_socket);
        }
        Ok(())
    }

    /// Changes the name, the quota, the memory limit or the socket's permissions of a VM.
    fn change(&self, members: &mut Members, at: usize, request: ParsedSpec) -> Result<(), Refused> {
        let (member, config) = (&members.list[at], &request.config);
        let vm = member.vm.clone();
        let Some(old) = member.added.clone() else {
            let set = vm.tenant.set_quota(config.quota);
            set.map_err(|e| reserve_refused(&e))?;
            vm.set_problem(None);
            return Ok(());
        };
        if old == request.spec && member.reduced_reserve.is_none() {
            vm.set_problem(None);
            return Ok(());
        }
        // Another VM must not have the requested name. A VM with this UUID may have it: the source
        // VM of a migration within this host keeps the name until the migration ends.
        let has_name = |m: &Member| m.vm.config.uuid != config.uuid && *m.vm.name() == *config.name;
        if let Some(other) = members.list.iter().find(|m| has_name(m)) {
            return Err(Refused::Vm(format!(
                "another VM has the name {}: it is {}",
                config.name,
                identity(&other.vm)
            )));
        }
        let old_access = self.parse_spec(old)?.access;
        let set_access = |access| {
            let listener = member.listener.as_ref();
            listener.map_or(Ok(()), |listener| listener.set_access(access))
        };
        set_access(request.access).map_err(|error| Refused::Vm(error.to_string()))?;
        // The socket's permissions are set before the quota. In the other order, a failure to set
        // the permissions would require restoring the old quota, whose reserve may no longer fit
        // into the pool.
        if let Err(error) = vm.tenant.set_quota(config.quota) {
            // The change of the permissions is undone: the socket gets its previous owner again.
            let _ = set_access(old_access);
            return Err(reserve_refused(&error));
        }
        vm.memory.set_max_bytes(config.memory_max_bytes);
        vm.set_problem(None);
        members.list[at].reduced_reserve = None;
        self.store_change(&mut members.list[at], request.spec);
        Ok(())
    }

    /// Writes a change of a VM to the VM store. The change is already in effect.
    fn store_change(&self, member: &mut Member, spec: VmSpec) {
        if let Err(error) = self.store.write(&spec) {
            tracing::error!(
                vm = %member.vm.name(),
                reason = %error,
                "a change of the VM is not stored and ends with the daemon: {error}"
            );
        }
        member.added = Some(spec);
    }

    /// Changes the quota of the VM with the given name. Returns None if no VM has that name.
    pub fn set_quota(
        &self,
        name: &str,
        quota: &tmem_control::Quota,
    ) -> Option<Result<(), Refused>> {
        let mut members = self.lock();
        let mut all = members.list.iter_mut();
        let member = all.find(|m| &*m.vm.name() == name)?;
        let set = quota::from_api(quota)
            .map_err(Refused::Quota)
            .and_then(|quota| {
                let set = member.vm.tenant.set_quota(quota);
                set.map_err(|e| reserve_refused(&e))
            });
        if set.is_ok() {
            self.finish_quota_change(member, quota);
            self.grant_pending(&mut members.list);
        }
        Some(set)
    }

    /// Finishes a change of a VM's quota: clears the VM's problem, sends an event, and stores the
    /// quota.
    fn finish_quota_change(&self, member: &mut Member, quota: &tmem_control::Quota) {
        member.vm.set_problem(None);
        member.reduced_reserve = None;
        let vm = &member.vm;
        vm.emit(EventKind::Quota, format_args!("{}", quota::describe(quota)));
        if let Some(added) = &member.added {
            let quota = quota.clone();
            let spec = VmSpec {
                quota,
                ..added.clone()
            };
            self.store_change(member, spec);
        }
    }

    /// Sets the configured size of the pool, if one is given, together with the quotas of the named
    /// VMs, and adds new VMs of the configuration, in one step. Returns those new VMs that cannot
    /// be added now, by name, each with the reason.
    ///
    /// # Errors
    /// A reserve does not fit into the pool. In this case, nothing changes.
    pub fn configure(
        &self,
        size: &PoolSize,
        configured_bytes: Option<u64>,
        quotas: &[(&str, Quota)],
        new_vms: &[VmConfig],
    ) -> Result<Vec<(String, Refused)>, AdmissionError> {
        let mut members = self.lock();
        let (mut created, mut refused) = (Vec::new(), Vec::new());
        for config in new_vms {
            if members.list.len() + created.len() >= VMS_MAX {
                refused.push((config.name.clone(), too_many()));
                continue;
            }
            match self.create_configured(&mut members, config) {
                Ok(member) => created.push((member, config.quota)),
                Err(reason) => refused.push((config.name.clone(), reason)),
            }
        }
        let new_quota = |m: &Member| {
            let name = m.vm.name();
            quotas.iter().find(|(vm, _)| *vm == &*name).map(|q| q.1)
        };
        let present = members.list.iter();
        let present = present.filter_map(|m| Some((&m.vm.tenant, new_quota(m)?)));
        let new = created.iter().map(|(m, quota)| (&m.vm.tenant, *quota));
        let tenant_quotas: Vec<_> = present.chain(new).collect();
        // If a reserve does not fit, the new VMs are dropped, and with them their sockets.
        size.configure(configured_bytes, &tenant_quotas)?;
        for member in &mut members.list {
            if let Some(quota) = new_quota(member) {
                self.finish_quota_change(member, &quota::to_api(&quota));
            }
        }
        for (member, _) in created {
            let (name, socket) = (
                member.vm.name(),
                member.vm.config.socket.display().to_string(),
            );
            tracing::info!(vm = %name, socket, "VM added");
            let text = format_args!("at {socket}");
            self.events.emit(EventKind::Added, Some(&*name), text);
            self.push(&mut members, member);
        }
        self.grant_pending(&mut members.list);
        Ok(refused)
    }

    /// Sets the problem that a VM's manager reports, and sends an event; None means that the
    /// problem is solved. As long as the daemon has reduced the VM's reserve, that problem is set
    /// instead of None. Returns false if no VM has the given UUID and socket.
    pub fn set_problem(&self, uuid: &str, socket: &Path, problem: Option<String>) -> bool {
        let members = self.lock();
        let uuid = uuid.to_ascii_lowercase();
        let Some(member) = members.list.iter().find(|m| m.is(Some(&uuid), socket)) else {
            return false;
        };
        let what = problem.as_deref().unwrap_or("the problem is solved");
        member.vm.emit(EventKind::Problem, format_args!("{what}"));
        member
            .vm
            .set_problem(problem.or_else(|| member.reduced_reserve.clone()));
        true
    }

    /// Removes a VM that was added while the daemon ran, and its stored file. Returns false if no
    /// such VM exists.
    pub fn remove(&self, uuid: &str, socket: &Path) -> bool {
        let mut members = self.lock();
        let uuid = uuid.to_ascii_lowercase();
        let is_removable = |m: &Member| m.added.is_some() && m.is(Some(&uuid), socket);
        let position = members.list.iter().position(is_removable);
        let has_socket = |m: &Member| m.vm.config.socket == socket;
        // The VM's manager has removed the VM. So remove the stored file, too, even if the daemon
        // could not restore a VM from it.
        let is_left_over = self.is_in_run_directory(socket) && !members.list.iter().any(has_socket);
        if position.is_some() || is_left_over {
            self.remove_stored(socket);
        }
        if let Some(at) = position {
            let vm = self.remove_at(&mut members, at);
            tracing::info!(vm = &*vm.name(), uuid, socket = %socket.display(), "VM removed");
            vm.emit(EventKind::Removed, format_args!("removed"));
            self.grant_pending(&mut members.list);
        }
        position.is_some()
    }

    /// Returns true if the path of the socket is directly in the run directory.
    fn is_in_run_directory(&self, socket: &Path) -> bool {
        let name = socket.file_name();
        name.is_some_and(|name| self.run_directory.join(name) == socket)
    }

    /// Removes the stored file of the VM with this socket.
    fn remove_stored(&self, socket: &Path) {
        if let Err(error) = self.store.remove(socket) {
            let socket = socket.display();
            tracing::error!(
                %socket,
                reason = %error,
                "the stored VM at {socket} cannot be removed and is restored at the next start of \
                 the daemon: {error}"
            );
        }
    }

    /// Removes a VM from the registry, ends its connection, and returns the VM. The VM's stored file
    /// stays.
    fn remove_at(&self, members: &mut Members, at: usize) -> Arc<Vm> {
        let Member { vm, listener, .. } = members.list.remove(at);
        if let Some(listener) = listener {
            listener.close();
        }
        vm.remove();
        vm.clear();
        if let Err(error) = vm.tenant.set_quota(NOTHING) {
            tracing::error!(
                vm = %vm.name(),
                reason = %error,
                "a bug: the reserve of the removed VM cannot be released: {error}"
            );
        }
        signal(&self.changed);
        vm
    }
}

/// Binds the socket of a VM of the configuration.
///
/// # Errors
/// The socket cannot be bound; the text says what to do.
fn bind_configured(config: &VmConfig) -> io::Result<Listener> {
    let access = Access {
        owner: config.owner.as_ref().and_then(Account::number),
        ..Access::default()
    };
    Listener::bind(&config.socket, access)
}

/// Describes a VM by its UUID, or as a VM of the configuration, for messages that also contain its
/// name.
fn identity(vm: &Vm) -> String {
    match &vm.config.uuid {
        Some(uuid) => format!("the one with the UUID {uuid}"),
        None => "a VM from --vm or [[vm]]".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_pool::EngineConfig;

    const POOL_BYTES: i64 = 16 << 20;

    fn registry(directory: &Path) -> Registry {
        let engine = Engine::new(EngineConfig::new(POOL_BYTES as u64, 1))
            .expect("cannot reserve the pool's address space");
        let events = Arc::default();
        Registry::new(engine, None, events, directory).expect("cannot create the registry")
    }

    fn spec(directory: &Path, nth: u32) -> VmSpec {
        VmSpec {
            name: format!("vm-{nth}"),
            uuid: format!("00000000-0000-0000-0000-{nth:012}"),
            socket: directory.join(nth.to_string()).display().to_string(),
            quota: tmem_control::Quota {
                reserve_bytes: POOL_BYTES,
                limit_bytes: None,
                weight: 1,
            },
            trust_domain: None,
            owner: None,
            group: None,
            mode: None,
            memory_max_bytes: None,
        }
    }

    /// A file system that is full while the daemon restarts must not cost VMs their cache.
    #[test]
    fn stored_vms_are_restored_although_the_store_cannot_be_written() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let spec = |nth| spec(directory.path(), nth);
        let first = registry(directory.path());
        assert_eq!(first.add(spec(1)), Ok(true));
        drop(first);
        // A directory has the name of the file that a write of the stored VM creates first.
        // Therefore each write fails, as on a file system that is full.
        let blocked = directory.path().join("vms/1.new");
        std::fs::create_dir(blocked).expect("cannot create the directory");
        let second = registry(directory.path());
        second.restore();
        let vms = second.vms();
        assert_eq!(vms.len(), 1, "the stored VM is not served");
        assert_eq!(*vms[0].name(), *"vm-1");
        assert!(
            second.store.write(&spec(1)).is_err(),
            "the test does not make writes fail"
        );
    }

    #[test]
    fn the_reserve_of_a_removed_vm_is_available_at_once() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let registry = registry(directory.path());
        let spec = |nth| spec(directory.path(), nth);
        assert_eq!(registry.add(spec(1)), Ok(true));
        // This test keeps a reference to the VM after its removal, as the thread of a connection
        // may do.
        let held = registry.vms();
        registry
            .add(spec(2))
            .expect_err("a VM was added although the pool's whole memory is reserved");
        assert!(registry.remove(&spec(1).uuid, Path::new(&spec(1).socket)));
        assert_eq!(registry.add(spec(2)), Ok(true));
        drop(held);
    }
}
