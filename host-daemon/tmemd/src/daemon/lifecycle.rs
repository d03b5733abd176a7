// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon as a value: start it with a configuration, stop it.
//!
//! Order of start: pool, tenants, workers, control sockets, and last the VMs' sockets, when it can
//! serve: a VMM that finds a socket finds a daemon that answers. Order of stop: no new
//! connections, then the connections, then the workers.

use crate::config::account::Account;
use crate::config::meminfo::host_memory_bytes;
use crate::config::settings::{Config, ConfigError, VmConfig, reserve_text};
use crate::control::sources::Sources;
use crate::control::varlink::{self, Service};
use crate::events::bus::Events;
use crate::host::background::BackgroundWorkers;
use crate::host::clock::ClockAndEntropy;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::host::pressure::{PoolSize, PressureWatcher};
use crate::host::sandbox::{self, ThreadKind};
use crate::queue::worker::Workers;
use crate::socket::listener::{Access, Listener, UnauthorizedPeer};
use crate::util::event_fd::{consume, signal};
use crate::util::log_limit::LogLimit;
use crate::vhost::connection::{self, ConnectionContext};
use crate::vm::recorder::Recorder;
use crate::vm::registry::Registry;
use crate::vm::state::Vm;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};
use tmem_pool::{Pool, PoolConfig};

/// Pause after a connection could not be accepted for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Stack of a connection's thread: it does little, and there may be a thousand.
const CONNECTION_STACK_BYTES: usize = 512 << 10;

/// Why a daemon did not start.
#[derive(Debug)]
pub enum StartError {
    /// The configuration is wrong.
    Config(ConfigError),
    /// A VM's reserve does not fit.
    Admission(tmem_pool::AdmissionError),
    /// Something of the system failed; the text says which.
    System(io::Error),
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartError::Config(error) => error.fmt(f),
            StartError::Admission(error) => error.fmt(f),
            StartError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        StartError::System(error)
    }
}

/// What a listening socket is for.
#[derive(Clone)]
enum Purpose {
    Vm(Arc<Vm>),
    /// With the number of its clients, so that those of the read-only socket cannot take the places
    /// of the other's.
    Control(Arc<Service>, Arc<Mutex<usize>>),
}

impl Purpose {
    /// Whoever connected is not whom the socket is for.
    fn refuse(&self, peer: &UnauthorizedPeer) {
        match self {
            Purpose::Vm(vm) => vm.refuse(peer),
            Purpose::Control(service, _) => {
                service.warn(format_args!("a client is refused, {peer}"))
            }
        }
    }
}

/// A connection's socket, to end it, and its thread.
type Connection = (UnixStream, JoinHandle<()>);

/// A running daemon; dropping it stops it.
pub struct Daemon {
    acceptor: Option<JoinHandle<Vec<Connection>>>,
    stop: Arc<OwnedFd>,
    workers: Arc<Workers>,
    background: Arc<BackgroundWorkers>,
    recorder: Option<Arc<Recorder>>,
    pressure_watcher: Option<PressureWatcher>,
    control: Option<Arc<Sources>>,
    heartbeats: Arc<Heartbeats>,
    /// Guards what it was started with, or has read since. The registry is locked under it.
    config: Mutex<Config>,
}

impl Daemon {
    /// Starts a daemon. When this returns, all its sockets are there and it serves.
    pub fn start(mut config: Config) -> Result<Daemon, StartError> {
        config.check().map_err(StartError::Config)?;
        config.find_accounts().map_err(StartError::Config)?;
        raise_descriptor_limit();
        let clock = ClockAndEntropy::host();
        let seed = getrandom::u64().map_err(io::Error::other)?;
        let pool = Pool::new(PoolConfig {
            size_bytes: config.pool_size_bytes,
            // No more than the host has can be given to it.
            size_max_bytes: host_memory_bytes(),
            seed,
            policy: Default::default(),
        })?;
        if !pool.is_locked() {
            tracing::warn!(
                "pages of guests can be swapped: the system does not let this process lock memory; set \
                 its limit (LimitMEMLOCK=, RLIMIT_MEMLOCK) to infinity, since address space counts"
            );
        }
        let pool = Arc::new(pool);
        let recorder = match &config.trace {
            Some(trace) => Some(Arc::new(Recorder::create(&trace.path, trace.bytes_max)?)),
            None => None,
        };
        warn_of_writable_folder(&config.run_folder);
        let events: Arc<Events> = Arc::default();
        let registry = Registry::new(
            pool.clone(),
            recorder.clone(),
            events.clone(),
            &config.run_folder,
        )?;
        registry.set_pages_per_second(config.vm_pages_per_second);
        let registry = Arc::new(registry);
        for vm in &config.vms {
            registry.give(vm).map_err(StartError::Admission)?;
        }
        let heartbeats: Arc<Heartbeats> = Arc::default();
        let background =
            BackgroundWorkers::start(pool.clone(), &clock, config.background_threads, &heartbeats)?;
        let workers = match Workers::start(config.workers, config.waiting, &background, &heartbeats)
        {
            Ok(workers) => Arc::new(workers),
            Err(error) => {
                background.stop();
                return Err(error.into());
            }
        };
        // Workers have their rings. The caller's thread, and what it begins from here on, make no others.
        sandbox::narrow(ThreadKind::Serving);
        // From here on dropping the daemon cleans up, whatever fails.
        let stop = Arc::new(
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
        );
        let mut daemon = Daemon {
            acceptor: None,
            stop: stop.clone(),
            workers: workers.clone(),
            background: background.clone(),
            recorder,
            pressure_watcher: None,
            control: None,
            heartbeats: heartbeats.clone(),
            config: Mutex::new(config.clone()),
        };
        let pressure = config.pressure.as_ref();
        let size = Arc::new(PoolSize::new(
            pressure,
            config.pool_size_bytes,
            pool.clone(),
            background.clone(),
            events.clone(),
        ));
        if let Some(pressure) = pressure {
            daemon.pressure_watcher = Some(PressureWatcher::start(
                pressure.clone(),
                size.clone(),
                &heartbeats,
            )?);
        }
        let control = Arc::new(Sources {
            pool,
            registry: registry.clone(),
            workers: workers.clone(),
            background: background.clone(),
            size,
            events,
            clock: clock.clone(),
            snapshot: Default::default(),
        });
        let mut listeners = Vec::new();
        let service = |read_only| Arc::new(Service::new(control.clone(), read_only));
        let given_to = |group: &Option<Account>| Access {
            group: group.as_ref().and_then(Account::number),
            ..Access::default()
        };
        listeners.push((
            Arc::new(Listener::bind(
                &config.control,
                given_to(&config.control_group),
            )?),
            Purpose::Control(service(false), Arc::default()),
        ));
        if let Some(path) = &config.control_read_only {
            let purpose = Purpose::Control(service(true), Arc::default());
            let access = given_to(&config.control_read_only_group);
            listeners.push((Arc::new(Listener::bind(path, access)?), purpose));
        }
        daemon.control = Some(control);
        registry.listen()?;
        registry.restore();
        let shared = ConnectionContext {
            workers,
            background,
            clock,
        };
        let heartbeat = heartbeats.register("acceptor");
        let ended = Arc::new(EndedThreads::new()?);
        daemon.acceptor = Some(std::thread::Builder::new().name("acceptor".into()).spawn(
            move || accept_all(&listeners, &registry, &shared, &ended, &stop, &heartbeat),
        )?);
        Ok(daemon)
    }

    /// Takes over what of a configuration can change while it runs: the pool's size, the memory to leave
    /// available, quotas of its VMs. No VM notices. Returns what holds from the next start on only.
    ///
    /// # Errors
    /// The configuration is wrong, and changes nothing.
    pub fn reload(&self, new: Config) -> Result<Vec<String>, ConfigError> {
        new.check()?;
        let Some(control) = &self.control else {
            return Ok(Vec::new());
        };
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        let size_max_bytes = control.pool.size_max_bytes();
        if new.pool_size_bytes > size_max_bytes {
            let bytes = new.pool_size_bytes;
            return Err(ConfigError(format!(
                "a pool of {bytes} bytes is more than the host had at the start: {size_max_bytes}"
            )));
        }
        // The last that can fail: size and quotas, which hang on each other, hold together or not at all.
        let size_bytes = new.pool_size_bytes;
        let full_bytes = (size_bytes != config.pool_size_bytes).then_some(size_bytes);
        let differs = |vm: &&VmConfig| {
            let mut known = config.vms.iter();
            known.any(|old| old.name == vm.name && old.quota != vm.quota)
        };
        let others = new.vms.iter().filter(differs);
        let quotas: Vec<_> = others.map(|vm| (vm.name.as_str(), vm.quota)).collect();
        let set = control
            .registry
            .configure(&control.size, full_bytes, &quotas);
        set.map_err(|error| {
            let what = reserve_text(error.reserve_bytes, error.available_bytes);
            ConfigError(format!("VM {:?}: {what}", error.tenant))
        })?;
        config.pool_size_bytes = size_bytes;
        control
            .registry
            .set_pages_per_second(new.vm_pages_per_second);
        config.vm_pages_per_second = new.vm_pages_per_second;
        let mut later = Vec::new();
        for vm in &new.vms {
            match config.vms.iter_mut().find(|old| old.name == vm.name) {
                Some(old) => {
                    old.quota = vm.quota;
                    if old != vm {
                        later.push(format!(
                            "socket, owner, UUID and trust domain of VM {}",
                            vm.name
                        ));
                    }
                }
                None => later.push(format!("VM {}, which is new", vm.name)),
            }
        }
        let gone = config
            .vms
            .iter()
            .filter(|old| new.vms.iter().all(|vm| vm.name != old.name));
        later.extend(gone.map(|old| format!("that there is no VM {}", old.name)));
        let stalls = |config: &Config| config.pressure.as_ref().and_then(|p| p.stalls.clone());
        let free_min_bytes = |config: &Config| {
            let pressure = config.pressure.as_ref();
            pressure.map_or(0, |pressure| pressure.host_free_min_bytes)
        };
        // Who does not look at the host does not begin to.
        match config.pressure.is_some() {
            true => control.size.set_free_min(free_min_bytes(&new)),
            false if new.pressure.is_some() => later.push("host_free_min".into()),
            false => {}
        }
        for (name, differs) in [
            ("memory_pressure", stalls(&config) != stalls(&new)),
            ("workers", config.workers != new.workers),
            (
                "background_threads",
                config.background_threads != new.background_threads,
            ),
            ("event_loop or poll_max_us", config.waiting != new.waiting),
            ("control", config.control != new.control),
            ("control_group", config.control_group != new.control_group),
            (
                "control_read_only",
                config.control_read_only != new.control_read_only,
            ),
            (
                "control_read_only_group",
                config.control_read_only_group != new.control_read_only_group,
            ),
            ("run_folder", config.run_folder != new.run_folder),
        ] {
            if differs {
                later.push(name.into());
            }
        }
        let text = format_args!("the configuration was read again");
        control
            .events
            .tell(crate::events::bus::EventKind::Reloaded, None, text);
        Ok(later)
    }

    /// What tells whether its threads go on.
    pub fn heartbeats(&self) -> &Arc<Heartbeats> {
        &self.heartbeats
    }

    /// Stops it: drains, empties the pool of every VM, removes the sockets.
    pub fn stop(self) {}

    fn end(&mut self) {
        signal(&self.stop);
        let connections = match self.acceptor.take().map(JoinHandle::join) {
            Some(Ok(connections)) => connections,
            Some(Err(_)) => {
                tracing::error!("the acceptor panicked");
                Vec::new()
            }
            None => Vec::new(),
        };
        for (stream, _) in &connections {
            // An error means that it has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for (_, thread) in connections {
            if thread.join().is_err() {
                tracing::error!("a connection's thread panicked");
            }
        }
        if let Some(pressure_watcher) = &self.pressure_watcher {
            pressure_watcher.stop();
        }
        self.workers.stop();
        self.background.stop();
        if let Some(recorder) = &self.recorder {
            recorder.finish();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// A VMM gives its memory to whoever listens on its socket.
fn warn_of_writable_folder(run_folder: &Path) {
    // That it is not there will be told by whoever needs it.
    let Ok(metadata) = std::fs::metadata(run_folder) else {
        return;
    };
    if metadata.permissions().mode() & 0o002 != 0 {
        tracing::warn!(
            "everybody can write to {}: whoever makes a VM's socket there first is given that VM's \
             memory; take the permission away, or choose another --run-folder",
            run_folder.display()
        );
    }
}

/// What VMs may need, docs/operating.md has.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit of open files cannot be raised: {error}");
    }
}

/// Which connections' threads have come to their end, so that nothing of them is kept until the next
/// one comes.
struct EndedThreads {
    told: OwnedFd,
    /// Guards those not yet joined. Taken alone.
    threads: Mutex<Vec<ThreadId>>,
}

impl EndedThreads {
    fn new() -> io::Result<EndedThreads> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EndedThreads {
            told: rustix::event::eventfd(0, flags)?,
            threads: Mutex::default(),
        })
    }

    /// Joins their threads, which have nothing left to do.
    fn join(&self, connections: &mut Vec<Connection>) {
        consume(&self.told);
        let ended = std::mem::take(&mut *self.lock());
        for id in ended {
            let is_it = |(_, thread): &Connection| thread.thread().id() == id;
            if let Some(at) = connections.iter().position(is_it)
                && connections.swap_remove(at).1.join().is_err()
            {
                tracing::error!("a connection's thread panicked");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ThreadId>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the end of the thread that drops it.
struct EndGuard(Arc<EndedThreads>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lock().push(std::thread::current().id());
        signal(&self.0.told);
    }
}

/// Accepts until told to stop; then removes the sockets and returns the connections there are.
fn accept_all(
    own: &[(Arc<Listener>, Purpose)],
    registry: &Registry,
    shared: &ConnectionContext,
    ended: &Arc<EndedThreads>,
    stop: &OwnedFd,
    heartbeat: &Heartbeat,
) -> Vec<Connection> {
    let mut connections: Vec<Connection> = Vec::new();
    // It goes on trying.
    let failures = LogLimit::default();
    let failed = |what, error: io::Error| {
        if let Some(left_out) = failures.admit(Instant::now()) {
            // Said only if there are some.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::error!(left_out, "{what}: {error}");
        }
    };
    loop {
        heartbeat.work();
        // Before it is asked: what changes afterwards is told again.
        consume(registry.changed());
        let vms = registry.listeners();
        let vms = vms.into_iter().map(|(l, vm)| (l, Purpose::Vm(vm)));
        let listeners: Vec<(Arc<Listener>, Purpose)> = own.iter().cloned().chain(vms).collect();
        let mut fds: Vec<PollFd<'_>> = listeners
            .iter()
            .map(|(l, _)| PollFd::new(&l.socket, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(registry.changed(), PollFlags::IN));
        fds.push(PollFd::new(&ended.told, PollFlags::IN));
        fds.push(PollFd::new(stop, PollFlags::IN));
        heartbeat.rest();
        let polled = rustix::event::poll(&mut fds, None);
        heartbeat.work();
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                failed("cannot wait for connections", error.into());
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.last() == Some(&true) {
            consume(stop);
            listeners.iter().for_each(|(listener, _)| listener.close());
            return connections;
        }
        ended.join(&mut connections);
        for ((listener, purpose), _) in listeners.iter().zip(ready).filter(|(_, ready)| *ready) {
            let accepted = listener.accept().and_then(|accepted| match accepted {
                Ok(stream) => spawn(stream, purpose, shared, EndGuard(ended.clone())).map(Some),
                Err(peer) => {
                    purpose.refuse(&peer);
                    Ok(None)
                }
            });
            match accepted {
                Ok(connection) => connections.extend(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    failed("a connection cannot be accepted", error);
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }
}

/// A client's place at a control socket, for as long as this lives.
struct ClientSlot(Arc<Mutex<usize>>);

impl ClientSlot {
    /// None: all are taken.
    fn claim(clients: &Arc<Mutex<usize>>) -> Option<ClientSlot> {
        let mut count = clients.lock().unwrap_or_else(PoisonError::into_inner);
        if *count >= varlink::CLIENTS_MAX {
            return None;
        }
        *count += 1;
        Some(ClientSlot(clients.clone()))
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

fn spawn(
    stream: UnixStream,
    purpose: &Purpose,
    shared: &ConnectionContext,
    ends: EndGuard,
) -> io::Result<Connection> {
    let handle = stream.try_clone()?;
    let builder = std::thread::Builder::new().stack_size(CONNECTION_STACK_BYTES);
    let thread = match purpose {
        Purpose::Vm(vm) => {
            let (vm, shared) = (vm.clone(), shared.clone());
            let builder = builder.name(format!("vm-{}", vm.name()));
            builder.spawn(move || {
                let _ends = ends;
                sandbox::narrow(ThreadKind::Connection);
                // The acceptor has another handle of the socket: the peer must see the end now.
                let end = stream.try_clone();
                connection::serve(&vm, stream, &shared);
                if let Ok(end) = end {
                    let _ = end.shutdown(Shutdown::Both);
                }
            })?
        }
        Purpose::Control(service, clients) => {
            let (service, clients) = (service.clone(), clients.clone());
            builder.name("control".into()).spawn(move || {
                let _ends = ends;
                if let Some(_place) = ClientSlot::claim(&clients) {
                    let serve = AssertUnwindSafe(|| varlink::serve(&service, &stream));
                    if catch_unwind(serve).is_err() {
                        tracing::error!("a bug: the thread of a control client panicked");
                    }
                } else {
                    service.warn(format_args!(
                        "a client is refused: there are {} already",
                        varlink::CLIENTS_MAX
                    ));
                }
                let _ = stream.shutdown(Shutdown::Both);
            })?
        }
    };
    Ok((handle, thread))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_panics_gives_its_place_back() {
        let clients = Arc::default();
        for _ in 0..varlink::CLIENTS_MAX + 1 {
            let client = AssertUnwindSafe(|| {
                let _place = ClientSlot::claim(&clients).expect("a place");
                panic!("as a bug might");
            });
            let panic = catch_unwind(client).expect_err("panicked");
            assert!(panic.is::<&str>(), "there was no place");
        }
        let places: Vec<_> = (0..varlink::CLIENTS_MAX)
            .map(|_| ClientSlot::claim(&clients).expect("a place"))
            .collect();
        assert!(ClientSlot::claim(&clients).is_none());
        drop(places);
        assert!(ClientSlot::claim(&clients).is_some());
    }
}
