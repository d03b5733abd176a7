// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Start and stop of the daemon.
//!
//! Order of the start: pool, tenants, background workers, data workers, control sockets, and last
//! the VMs' sockets. A VMM that finds a socket therefore finds a daemon that answers. Order of the
//! stop: no new connections, then the existing connections, then the workers.

use crate::config::account::Account;
use crate::config::meminfo::host_memory_bytes;
use crate::config::settings::{Config, ConfigError};
use crate::control::sources::Sources;
use crate::control::varlink::Service;
use crate::daemon::accept::{self, Acceptor, Connection, EndedThreads, Purpose};
use crate::events::bus::Events;
use crate::host::background::BackgroundWorkers;
use crate::host::clock::ClockAndEntropy;
use crate::host::heartbeat::Heartbeats;
use crate::host::pressure::{PoolSize, PressureWatcher};
use crate::host::sandbox::{self, ThreadKind};
use crate::memory::budget::pool_bytes_max;
use crate::queue::worker::Workers;
use crate::socket::listener::{Access, Listener};
use crate::util::event_fd::signal;
use crate::vhost::connection::ConnectionContext;
use crate::vm::recorder::Recorder;
use crate::vm::registry::Registry;
use rustix::event::EventfdFlags;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::SystemTime;
use tmem_pool::{Engine, EngineConfig};

/// Reason why a daemon did not start.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum StartError {
    /// The configuration is invalid.
    Config(#[from] ConfigError),
    /// The sum of the VMs' reserves does not fit into the pool.
    Admission(#[from] tmem_pool::AdmissionError),
    /// A system call or another operation of the system failed. The error text names the operation.
    System(#[from] io::Error),
}

/// A running daemon. Dropping the value stops the daemon.
pub struct Daemon {
    acceptor: Option<JoinHandle<Vec<Connection>>>,
    stop: Arc<OwnedFd>,
    workers: Arc<Workers>,
    background: Arc<BackgroundWorkers>,
    recorder: Option<Arc<Recorder>>,
    pressure_watcher: Option<PressureWatcher>,
    pub(super) control: Option<Arc<Sources>>,
    heartbeats: Arc<Heartbeats>,
    /// Guards the configuration that is in effect. A thread that holds this lock may take the
    /// registry's lock.
    pub(super) config: Mutex<Config>,
}

impl Daemon {
    /// Starts a daemon. When the function returns, all sockets exist and the daemon serves them.
    ///
    /// # Errors
    /// The configuration is invalid, a VM's reserve does not fit into the pool, or the system lacks
    /// a resource.
    pub fn start(mut config: Config) -> Result<Daemon, StartError> {
        config.check()?;
        config.find_accounts()?;
        raise_descriptor_limit();
        let clock = ClockAndEntropy::host();
        let engine = create_engine(&config)?;
        let recorder = match &config.trace {
            Some(trace) => Some(Arc::new(Recorder::create(&trace.path, trace.bytes_max)?)),
            None => None,
        };
        warn_of_writable_directory(&config.run_directory);
        let events: Arc<Events> = Arc::default();
        let registry = create_registry(&config, &engine, &recorder, &events)?;
        let heartbeats: Arc<Heartbeats> = Arc::default();
        let (background, workers) = start_workers(&config, &engine, &clock, &heartbeats)?;
        // The workers have created their io_uring contexts. From here on, the calling thread and
        // all threads that it starts cannot create further io_uring contexts.
        sandbox::narrow(ThreadKind::Serving);
        let size = Arc::new(PoolSize::new(
            config.pressure.as_ref(),
            config.pool_size_bytes,
            engine.clone(),
            background.clone(),
            events.clone(),
        ));
        let control = Arc::new(Sources {
            engine,
            registry,
            workers,
            background,
            size,
            events,
            start_time_seconds: unix_time_seconds(),
            cpu_other_ms: AtomicI64::new(0),
            clock,
            snapshot: Default::default(),
        });
        Daemon::serve(config, control, recorder, heartbeats)
    }

    /// Starts the thread that watches the host's memory, binds the sockets, restores the VMs of the
    /// VM store, and starts the acceptor thread. The workers are running already.
    fn serve(
        config: Config,
        control: Arc<Sources>,
        recorder: Option<Arc<Recorder>>,
        heartbeats: Arc<Heartbeats>,
    ) -> Result<Daemon, StartError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = rustix::event::eventfd(0, flags).map_err(io::Error::from)?;
        // The daemon value exists before the last steps of the start. If one of these steps fails,
        // dropping the value ends all threads that were started.
        let mut daemon = Daemon {
            acceptor: None,
            stop: Arc::new(stop),
            workers: control.workers.clone(),
            background: control.background.clone(),
            recorder,
            pressure_watcher: None,
            control: None,
            heartbeats,
            config: Mutex::new(config.clone()),
        };
        if let Some(pressure) = &config.pressure {
            let size = control.size.clone();
            let watcher = PressureWatcher::start(pressure.clone(), size, &daemon.heartbeats)?;
            daemon.pressure_watcher = Some(watcher);
        }
        let listeners = bind_control(&config, &control)?;
        daemon.control = Some(control.clone());
        control.registry.listen()?;
        control.registry.restore();
        let acceptor = Acceptor {
            control: listeners,
            registry: control.registry.clone(),
            shared: ConnectionContext {
                workers: control.workers.clone(),
                background: control.background.clone(),
                clock: control.clock.clone(),
            },
            ended: Arc::new(EndedThreads::new()?),
            stop: daemon.stop.clone(),
            heartbeat: daemon.heartbeats.register("acceptor"),
        };
        let builder = std::thread::Builder::new().name("acceptor".into());
        daemon.acceptor = Some(builder.spawn(move || acceptor.accept_all())?);
        Ok(daemon)
    }

    /// Returns the heartbeats with which the daemon's threads show the watchdog that they make
    /// progress.
    pub fn heartbeats(&self) -> &Arc<Heartbeats> {
        &self.heartbeats
    }

    /// Stops the daemon: answers the requests that workers have taken, empties the pool of every VM
    /// and removes the sockets.
    pub fn stop(self) {}

    fn end(&mut self) {
        signal(&self.stop);
        let connections = match self.acceptor.take().map(JoinHandle::join) {
            Some(Ok(connections)) => connections,
            Some(Err(_)) => {
                tracing::error!("a bug: the thread that accepts connections panicked");
                Vec::new()
            }
            None => Vec::new(),
        };
        for (stream, _) in &connections {
            // If the shutdown fails, the front end or client has already closed the connection.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for (_, thread) in connections {
            accept::join(thread);
        }
        if let Some(watcher) = &self.pressure_watcher {
            watcher.stop();
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

/// Creates the pool. Logs a warning if the system does not let the process lock its memory.
///
/// # Errors
/// The system lacks address space or entropy.
fn create_engine(config: &Config) -> io::Result<Arc<Engine>> {
    let seed = getrandom::u64().map_err(io::Error::other)?;
    let mut engine_config = EngineConfig::new(config.pool_size_bytes, seed);
    // The pool's address space suffices for a pool as large as the host's memory, so that a reload
    // can enlarge the pool up to this size. On hosts with more memory than POOL_BYTES_MAX, a pool
    // of that size would leave no address space to VMs.
    engine_config.size_max_bytes = pool_bytes_max(host_memory_bytes());
    let engine = Engine::new(engine_config)?;
    if !engine.is_locked() {
        tracing::warn!(
            "pages of guests can be swapped: this process may not lock memory. Set its limit \
             (LimitMEMLOCK=, RLIMIT_MEMLOCK) to infinity, because the limit counts address space"
        );
    }
    Ok(engine)
}

/// Creates the registry with the VMs of the configuration. The VMs' sockets are bound later in the
/// start.
///
/// # Errors
/// A reserve does not fit into the pool, or the system has no descriptor left.
fn create_registry(
    config: &Config,
    engine: &Arc<Engine>,
    recorder: &Option<Arc<Recorder>>,
    events: &Arc<Events>,
) -> Result<Arc<Registry>, StartError> {
    let (engine, recorder, events) = (engine.clone(), recorder.clone(), events.clone());
    let registry = Registry::new(engine, recorder, events, &config.run_directory)?;
    registry.set_pages_per_second(config.vm_pages_per_second);
    for vm in &config.vms {
        registry.add_configured(vm)?;
    }
    Ok(Arc::new(registry))
}

/// Starts the background workers and the data workers.
///
/// # Errors
/// The system cannot create a thread, a descriptor or an io_uring. After an error, no worker is
/// left running.
fn start_workers(
    config: &Config,
    engine: &Arc<Engine>,
    clock: &ClockAndEntropy,
    heartbeats: &Arc<Heartbeats>,
) -> io::Result<(Arc<BackgroundWorkers>, Arc<Workers>)> {
    let threads = config.background_threads;
    let background = BackgroundWorkers::start(engine.clone(), clock, threads, heartbeats)?;
    match Workers::start(config.workers, config.waiting, &background, heartbeats) {
        Ok(workers) => Ok((background, Arc::new(workers))),
        Err(error) => {
            background.stop();
            Err(error)
        }
    }
}

/// Binds the sockets of the control interface.
///
/// # Errors
/// A socket cannot be bound.
fn bind_control(
    config: &Config,
    control: &Arc<Sources>,
) -> io::Result<Vec<(Arc<Listener>, Purpose)>> {
    let bind = |path: &Path, group: &Option<Account>, read_only: bool| {
        let access = Access {
            group: group.as_ref().and_then(Account::number),
            ..Access::default()
        };
        let service = Arc::new(Service::new(control.clone(), read_only));
        let listener = Arc::new(Listener::bind(path, access)?);
        Ok::<_, io::Error>((listener, Purpose::Control(service, Arc::default())))
    };
    let mut listeners = vec![bind(&config.control, &config.control_group, false)?];
    if let Some(path) = &config.control_read_only {
        listeners.push(bind(path, &config.control_read_only_group, true)?);
    }
    Ok(listeners)
}

/// Returns the host's time in seconds since 1970; 0 if the host's clock is set to an earlier time.
fn unix_time_seconds() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

/// Logs a warning if any user can create files in the run directory. A VMM shares its guest's
/// memory with the process that listens on the VM's socket. Another user could create that socket
/// before the daemon does.
fn warn_of_writable_directory(run_directory: &Path) {
    // If the run directory is missing, the daemon reports it later, when it binds a socket there.
    let Ok(metadata) = std::fs::metadata(run_directory) else {
        return;
    };
    if metadata.permissions().mode() & 0o002 != 0 {
        tracing::warn!(
            "everybody can write to {}: the first process to create a VM's socket there gets that VM's \
             memory; remove the permission, or choose another --run-directory",
            run_directory.display()
        );
    }
}

/// Raises the soft limit of open files to the hard limit. docs/operating.md says how many
/// descriptors VMs need.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit of open files cannot be raised: {error}");
    }
}
