// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simulated host: the real daemon and the real pool, without threads. The simulated world does
//! the work of the daemon's threads, one round of a worker or one step of background work at a
//! time.
//!
//! Dropping a host kills its daemon: the daemon drains nothing and notifies no front end.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tmem_model::HeadlessDaemon;
use tmem_pool::Quota;
use tmemd::parts::{
    ClockAndEntropy, ConnectionContext, Device, HungUp, Peer, Session, SimulatedClock, Vm,
    WorkerContext, Workers,
};

use crate::clock::Clock;
use crate::mutation::Mutation;

/// Trigger of a fault in the middle of a daemon's work. A daemon checks that the front end (VMM) is
/// connected each time before it uses guest memory. The fuse counts these checks, for one front end
/// or for all of them, and triggers the fault at a given count.
pub struct Fuse {
    left: AtomicU64,
    triggered: AtomicBool,
    drain: Mutex<Option<Drain>>,
}

/// Drain of a device that begins in the middle of a scheduling slice, after `checks` checks.
struct Drain {
    checks: u64,
    device: Weak<Mutex<Device>>,
    clock: Arc<Clock>,
}

/// Time in nanoseconds by which a drain makes the daemon's clock jump. It is longer than a drain
/// waits before it cuts off the remaining work.
const DRAIN_NS: u64 = 6_000_000;

impl Fuse {
    /// Creates a fuse that triggers no fault.
    pub fn new() -> Arc<Fuse> {
        Arc::new(Fuse {
            left: AtomicU64::new(u64::MAX),
            triggered: AtomicBool::new(false),
            drain: Mutex::new(None),
        })
    }

    /// Sets the number of connection checks after which the fuse triggers its fault.
    pub fn trigger_after(&self, checks: u64) {
        self.left.store(checks, SeqCst);
    }

    /// Triggers the fault of the fuse now.
    pub fn trigger(&self) {
        self.triggered.store(true, SeqCst);
    }

    /// Returns whether the fuse has triggered its fault.
    pub fn has_triggered(&self) -> bool {
        self.triggered.load(SeqCst)
    }

    /// Returns whether the drain that this fuse triggers has begun.
    pub fn is_draining(&self) -> bool {
        let drain = self
            .drain
            .lock()
            .expect("another thread panicked while it held this lock");
        drain.as_ref().is_some_and(|drain| drain.checks == 0)
    }

    /// Removes the drain from the fuse, because the drain is done or must not happen.
    pub fn end_drain(&self) {
        *self
            .drain
            .lock()
            .expect("another thread panicked while it held this lock") = None;
    }

    fn count_check(&self) {
        if let Some(drain) = &mut *self
            .drain
            .lock()
            .expect("another thread panicked while it held this lock")
            && drain.checks > 0
        {
            drain.checks -= 1;
            if let (0, Some(device)) = (drain.checks, drain.device.upgrade()) {
                device
                    .lock()
                    .expect("another thread panicked while it held this lock")
                    .begin_drain();
                drain.clock.linger(DRAIN_NS);
            }
        }
        let left = self.left.load(SeqCst);
        if left == 0 {
            self.trigger();
        } else if left != u64::MAX {
            self.left.store(left - 1, SeqCst);
        }
    }
}

/// Configuration of a simulated host and its daemon.
#[derive(Clone, Debug)]
pub struct SimulatedDaemonConfig {
    /// Seed of the pool's hash and of the random generations.
    pub seed: u64,
    /// Size of the pool in bytes.
    pub pool_bytes: u64,
    /// Number of workers (threads that answer guests) that the daemon would have.
    pub workers: usize,
    /// Longest time that a worker polls an empty virtqueue before it waits for a kick.
    pub poll_max: Duration,
    /// Trust domain of each VM; with None, the VM has a domain of its own.
    pub domains: Vec<Option<String>>,
    /// Rule that the host breaks on purpose, if any.
    pub mutation: Option<Mutation>,
}

/// The running daemon of a simulated host.
pub struct SimulatedDaemon {
    daemon: HeadlessDaemon,
    vms: Vec<Arc<Vm>>,
    shared: ConnectionContext,
    contexts: Vec<WorkerContext>,
    clock: Arc<Clock>,
    /// Fuse that kills the daemon at a given number of connection checks.
    pub death: Arc<Fuse>,
    /// Whether the daemon is stopped, as by the signal SIGSTOP.
    pub frozen: bool,
    mutation: Option<Mutation>,
}

/// Maximum number of pages that one step of background work handles.
const MAINTAIN_PAGES: usize = 16;

impl SimulatedDaemon {
    /// Starts the daemon of a host, with all its VMs.
    pub fn boot(config: &SimulatedDaemonConfig, now_ns: Arc<AtomicU64>) -> SimulatedDaemon {
        let counted = config.mutation == Some(Mutation::GenerationCounted);
        let clock = Arc::new(Clock::new(now_ns, config.seed, counted));
        let simulated = ClockAndEntropy::Simulated(clock.clone());
        let daemon = HeadlessDaemon::new(config.pool_bytes, config.seed, simulated);
        let mut vms: Vec<Arc<Vm>> = Vec::new();
        for (number, domain) in config.domains.iter().enumerate() {
            let name = format!("g{number}");
            let tenant = match vms.first() {
                Some(first) if config.mutation == Some(Mutation::TenantsMixed) => {
                    first.tenant.clone()
                }
                _ => daemon.tenant(&name, domain.as_deref(), 0),
            };
            vms.push(daemon.vm(&name, tenant, Arc::default()));
        }
        let workers = Workers::without_threads(config.workers, config.poll_max)
            .expect("cannot create the workers' descriptors");
        SimulatedDaemon {
            vms,
            shared: daemon.context(workers),
            daemon,
            contexts: (0..config.workers)
                .map(|_| WorkerContext::new().expect("cannot map the worker's buffers"))
                .collect(),
            clock,
            death: Fuse::new(),
            frozen: false,
            mutation: config.mutation,
        }
    }

    /// Returns the number of the daemon's workers.
    pub fn workers(&self) -> usize {
        self.contexts.len()
    }

    /// Runs one round of a worker: a scheduling slice for each VM that has work.
    pub fn round(&mut self, worker: usize) {
        if !self.frozen {
            let context = &mut self.contexts[worker];
            let (workers, background) = (&self.shared.workers, &self.shared.background);
            workers
                .round(worker, context, background)
                .expect("cannot poll for kicks");
        }
    }

    /// Does one step of the daemon's background work. Returns whether work is left.
    pub fn maintain(&mut self) -> bool {
        if self.frozen {
            return false;
        }
        self.shared.background.unmap();
        self.daemon.maintain(self.clock.now_ns(), MAINTAIN_PAGES)
    }

    /// Changes the size of the pool in bytes. tmemd makes its pool smaller when the host runs short
    /// of memory, and larger when the host has memory again.
    pub fn resize(&self, bytes: u64) {
        self.daemon.engine.resize(bytes);
    }

    /// Changes the quota of a VM (its reserve, limit and weight).
    pub fn set_quota(&self, guest: usize, quota: Quota) {
        // Ignore an error: the pool refuses a reserve that does not fit and keeps the old quota.
        let _ = self.vms[guest].tenant.set_quota(quota);
    }

    /// Freezes or thaws a VM's cache, as an operator does. While it is frozen, the daemon refuses
    /// puts.
    pub fn freeze_vm(&self, guest: usize, frozen: bool) {
        self.vms[guest].frozen.store(frozen, SeqCst);
    }

    /// Returns the daemon's record of a VM.
    pub fn vm(&self, guest: usize) -> &Arc<Vm> {
        &self.vms[guest]
    }

    /// Lets `fuse` begin a drain of this connection's queues after the daemon has checked `checks`
    /// more times that the front end is connected. The drain does not wait for the remaining work.
    pub fn drain_after(&self, checks: u64, session: &Session, fuse: &Fuse) {
        let drain = Drain {
            checks: checks + 1,
            device: Arc::downgrade(session.device()),
            clock: self.clock.clone(),
        };
        *fuse
            .drain
            .lock()
            .expect("another thread panicked while it held this lock") = Some(drain);
    }

    /// Connects a front end (VMM) to the daemon. Returns None if the daemon refuses the connection.
    /// The fuse `hang_up` makes the front end close the connection.
    pub fn connect(&self, guest: usize, hang_up: &Arc<Fuse>) -> Option<(Session, UnixStream)> {
        let (own, other) = UnixStream::pair().expect("cannot create a socket pair");
        let (death, hang_up) = (self.death.clone(), hang_up.clone());
        let deaf = self.mutation == Some(Mutation::HangUpIgnored);
        let check = move || {
            death.count_check();
            hang_up.count_check();
            if death.has_triggered() || (hang_up.has_triggered() && !deaf) {
                Err(HungUp)
            } else {
                Ok(())
            }
        };
        let peer = Peer::simulated(Box::new(check));
        let session = Session::begin(&self.vms[guest], &own, peer, &self.shared)?;
        Some((session, other))
    }
}
