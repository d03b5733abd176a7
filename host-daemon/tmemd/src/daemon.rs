// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon as a value: start it with a configuration, stop it.
//!
//! Order of start: pool, tenants, workers, control sockets, and last the VMs' sockets, when it can
//! serve: a VMM that finds a socket finds a daemon that answers. Order of stop: no new
//! connections, then the connections, then the workers.

use crate::config::{Config, ConfigError};
use crate::connection::{self, Shared};
use crate::control::{self, Control, Service};
use crate::events::Events;
use crate::janitor::Janitor;
use crate::outside::Outside;
use crate::poller::{consume, signal};
use crate::pressure::{Size, Watcher, host_memory_bytes};
use crate::recorder::Recorder;
use crate::registry::Registry;
use crate::sockets::{Access, Listener};
use crate::vm::Vm;
use crate::worker::Workers;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tmem_pool::{Pool, PoolConfig};

/// Pause after a connection could not be accepted for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Stack of a connection's thread: it does little, and there may be a thousand.
const CONNECTION_STACK_BYTES: usize = 512 << 10;

/// Threads for background work, at most: compression by so many is faster than guests put.
const JANITORS_MAX: usize = 8;

/// A quarter of the processors: what is left over is the guests'.
fn janitors() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    processors.div_ceil(4).min(JANITORS_MAX)
}

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

/// A connection's socket, to end it, and its thread.
type Connection = (UnixStream, JoinHandle<()>);

/// A running daemon; dropping it stops it.
pub struct Daemon {
    acceptor: Option<JoinHandle<Vec<Connection>>>,
    stop: Arc<OwnedFd>,
    workers: Arc<Workers>,
    janitor: Arc<Janitor>,
    recorder: Option<Arc<Recorder>>,
    watcher: Option<Watcher>,
    control: Option<Arc<Control>>,
    /// Guards what it was started with, or has read since. The registry is locked under it.
    config: Mutex<Config>,
}

impl Daemon {
    /// Starts a daemon. When this returns, all its sockets are there and it serves.
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        config.check().map_err(StartError::Config)?;
        raise_descriptor_limit();
        let outside = Outside::host();
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
        warn_of_others(&config.run_folder);
        let events: Arc<Events> = Arc::default();
        let registry = Registry::new(
            pool.clone(),
            recorder.clone(),
            events.clone(),
            &config.run_folder,
        )?;
        let registry = Arc::new(registry);
        for vm in &config.vms {
            registry.give(vm).map_err(StartError::Admission)?;
        }
        let janitor = Janitor::start(pool.clone(), &outside, janitors())?;
        let workers = match Workers::start(config.workers, &janitor) {
            Ok(workers) => Arc::new(workers),
            Err(error) => {
                janitor.stop();
                return Err(error.into());
            }
        };
        // From here on dropping the daemon cleans up, whatever fails.
        let stop = Arc::new(
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
        );
        let mut daemon = Daemon {
            acceptor: None,
            stop: stop.clone(),
            workers: workers.clone(),
            janitor: janitor.clone(),
            recorder,
            watcher: None,
            control: None,
            config: Mutex::new(config.clone()),
        };
        let pressure = config.pressure.as_ref();
        let size = Arc::new(Size::new(
            pressure,
            config.pool_size_bytes,
            pool.clone(),
            janitor.clone(),
            events.clone(),
        ));
        if let Some(pressure) = pressure {
            daemon.watcher = Some(Watcher::start(pressure.clone(), size.clone())?);
        }
        let control = Arc::new(Control {
            pool,
            registry: registry.clone(),
            workers: workers.clone(),
            janitor: janitor.clone(),
            size,
            events,
            outside: outside.clone(),
        });
        let mut listeners = Vec::new();
        let service = |read_only| Arc::new(Service::new(control.clone(), read_only));
        listeners.push((
            Arc::new(Listener::bind(&config.control, Access::default())?),
            Purpose::Control(service(false), Arc::default()),
        ));
        if let Some(path) = &config.control_read_only {
            let purpose = Purpose::Control(service(true), Arc::default());
            listeners.push((Arc::new(Listener::bind(path, Access::default())?), purpose));
        }
        daemon.control = Some(control);
        registry.listen()?;
        registry.restore();
        let shared = Shared {
            workers,
            janitor,
            outside,
        };
        daemon.acceptor = Some(
            std::thread::Builder::new()
                .name("acceptor".into())
                .spawn(move || accept_all(&listeners, &registry, &shared, &stop))?,
        );
        Ok(daemon)
    }

    /// Takes over what of a configuration can change while it runs: the pool's size, the memory to leave
    /// available, quotas of its VMs. No VM notices. Returns what holds from the next start on only.
    ///
    /// # Errors
    /// The configuration is wrong; what is named then, and what came before it in this order, may hold
    /// already.
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
        let mut later = Vec::new();
        // Larger before reserves grow, which have to fit.
        if new.pool_size_bytes != config.pool_size_bytes {
            control.size.set_full(new.pool_size_bytes);
            config.pool_size_bytes = new.pool_size_bytes;
        }
        for vm in &new.vms {
            let old = config.vms.iter_mut().find(|old| old.name == vm.name);
            match old {
                Some(old) => {
                    if old.quota != vm.quota {
                        let quota = crate::statistics::quota(&vm.quota);
                        if let Some(Err(why)) = control.registry.set_quota(&vm.name, &quota) {
                            return Err(ConfigError(format!("VM {:?}: {why}", vm.name)));
                        }
                        old.quota = vm.quota;
                    }
                    if old != vm {
                        later.push(format!("socket, UUID and trust domain of VM {}", vm.name));
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
            ("control", config.control != new.control),
            (
                "control_read_only",
                config.control_read_only != new.control_read_only,
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
            .tell(crate::events::Kind::Reloaded, None, text);
        Ok(later)
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
        if let Some(watcher) = &self.watcher {
            watcher.stop();
        }
        self.workers.stop();
        self.janitor.stop();
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
fn warn_of_others(run_folder: &Path) {
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

/// Each VM may need 17 queues of 3 descriptors, 64 regions and a socket.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit of open files cannot be raised: {error}");
    }
}

/// Accepts until told to stop; then removes the sockets and returns the connections there are.
fn accept_all(
    own: &[(Arc<Listener>, Purpose)],
    registry: &Registry,
    shared: &Shared,
    stop: &OwnedFd,
) -> Vec<Connection> {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
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
        fds.push(PollFd::new(stop, PollFlags::IN));
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!("cannot wait for connections: {error}");
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
        connections.retain(|(_, thread)| !thread.is_finished());
        for ((listener, purpose), _) in listeners.iter().zip(ready).filter(|(_, ready)| *ready) {
            let accepted = listener.socket.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(false)?;
                spawn(stream, purpose, shared)
            });
            match accepted {
                Ok(connection) => connections.push(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!("a connection cannot be accepted: {error}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }
}

/// A client's place at a control socket, for as long as this lives.
struct Place(Arc<Mutex<usize>>);

impl Place {
    /// None: all are taken.
    fn claim(clients: &Arc<Mutex<usize>>) -> Option<Place> {
        let mut count = clients.lock().unwrap_or_else(PoisonError::into_inner);
        if *count >= control::CLIENTS_MAX {
            return None;
        }
        *count += 1;
        Some(Place(clients.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

fn spawn(stream: UnixStream, purpose: &Purpose, shared: &Shared) -> io::Result<Connection> {
    let handle = stream.try_clone()?;
    let builder = std::thread::Builder::new().stack_size(CONNECTION_STACK_BYTES);
    let thread = match purpose {
        Purpose::Vm(vm) => {
            let (vm, shared) = (vm.clone(), shared.clone());
            let builder = builder.name(format!("vm-{}", vm.name()));
            builder.spawn(move || {
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
                if let Some(_place) = Place::claim(&clients) {
                    let serve = AssertUnwindSafe(|| control::serve(&service, &stream));
                    if catch_unwind(serve).is_err() {
                        tracing::error!("a bug: the thread of a control client panicked");
                    }
                } else {
                    service.warn(format_args!(
                        "a client is refused: there are {} already",
                        control::CLIENTS_MAX
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
        for _ in 0..control::CLIENTS_MAX + 1 {
            let client = AssertUnwindSafe(|| {
                let _place = Place::claim(&clients).expect("a place");
                panic!("as a bug might");
            });
            let panic = catch_unwind(client).expect_err("panicked");
            assert!(panic.is::<&str>(), "there was no place");
        }
        let places: Vec<_> = (0..control::CLIENTS_MAX)
            .map(|_| Place::claim(&clients).expect("a place"))
            .collect();
        assert!(Place::claim(&clients).is_none());
        drop(places);
        assert!(Place::claim(&clients).is_some());
    }
}
