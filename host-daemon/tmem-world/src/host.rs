// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A host: the real daemon and the real pool, without threads. What its threads would do is done
//! when the world says so, a round of a worker or a step of a background worker at a time.
//!
//! A host that is dropped is a daemon that was killed: nothing is drained, nobody is told.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tmem_pool::{Pool, PoolConfig, Quota, TenantSpec, Time};
use tmemd::VmConfig;
use tmemd::parts::{
    BackgroundWorkers, ClockAndEntropy, ConnectionContext, Device, HungUp, Peer, Session,
    SimulatedClock, Vm, WorkerContext, Workers,
};

use crate::clock::Clock;
use crate::mutation::Mutation;

/// Looks at a front end, or at all of them, until something ends between two of them.
pub struct Fuse {
    left: AtomicU64,
    burnt: AtomicBool,
    drain: Mutex<Option<Drain>>,
}

/// A drain that begins in the middle of a turn.
struct Drain {
    looks: u64,
    device: Weak<Mutex<Device>>,
    clock: Arc<Clock>,
}

/// Longer than what a drain waits before it cuts off.
const DRAIN_NS: u64 = 6_000_000;

impl Fuse {
    /// That never burns.
    pub fn new() -> Arc<Fuse> {
        Arc::new(Fuse {
            left: AtomicU64::new(u64::MAX),
            burnt: AtomicBool::new(false),
            drain: Mutex::new(None),
        })
    }

    /// Burns after so many looks.
    pub fn light(&self, looks: u64) {
        self.left.store(looks, SeqCst);
    }

    /// Burns now.
    pub fn burn(&self) {
        self.burnt.store(true, SeqCst);
    }

    /// It has burnt.
    pub fn is_burnt(&self) -> bool {
        self.burnt.load(SeqCst)
    }

    /// It has been lit for a drain that has begun.
    pub fn is_draining(&self) -> bool {
        let drain = self.drain.lock().expect("no panic");
        drain.as_ref().is_some_and(|drain| drain.looks == 0)
    }

    /// The drain is done, or is not to be.
    pub fn end_drain(&self) {
        *self.drain.lock().expect("no panic") = None;
    }

    fn look(&self) {
        if let Some(drain) = &mut *self.drain.lock().expect("no panic")
            && drain.looks > 0
        {
            drain.looks -= 1;
            if let (0, Some(device)) = (drain.looks, drain.device.upgrade()) {
                device.lock().expect("no panic").begin_drain();
                drain.clock.linger(DRAIN_NS);
            }
        }
        let left = self.left.load(SeqCst);
        if left == 0 {
            self.burn();
        } else if left != u64::MAX {
            self.left.store(left - 1, SeqCst);
        }
    }
}

/// What a host is made with.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Of the pool's hash and the generations.
    pub seed: u64,
    /// Memory of the pool.
    pub pool_bytes: u64,
    /// Workers.
    pub workers: usize,
    /// How long a worker looks at a virtqueue that has run dry.
    pub poll_max: Duration,
    /// Trust domain of each VM.
    pub domains: Vec<Option<String>>,
    /// What is broken.
    pub mutation: Option<Mutation>,
}

/// A daemon that runs.
pub struct Host {
    pool: Arc<Pool>,
    vms: Vec<Arc<Vm>>,
    shared: ConnectionContext,
    contexts: Vec<WorkerContext>,
    clock: Arc<Clock>,
    /// The whole daemon dies when it burns.
    pub death: Arc<Fuse>,
    /// SIGSTOP.
    pub frozen: bool,
    mutation: Option<Mutation>,
}

/// Pages of background work at a time.
const MAINTAIN_PAGES: usize = 16;

impl Host {
    /// A daemon starts.
    pub fn boot(config: &HostConfig, now_ns: Arc<AtomicU64>) -> Host {
        let counted = config.mutation == Some(Mutation::GenerationCounted);
        let clock = Arc::new(Clock::new(now_ns, config.seed, counted));
        let pool = Pool::new(PoolConfig {
            size_bytes: config.pool_bytes,
            size_max_bytes: 0,
            seed: config.seed,
            policy: Default::default(),
        });
        let pool = Arc::new(pool.expect("address space"));
        let mut vms: Vec<Arc<Vm>> = Vec::new();
        for (number, domain) in config.domains.iter().enumerate() {
            let text = format!("name=g{number},socket=none");
            let mut vm: VmConfig = text.parse().expect("a good name");
            vm.trust_domain = domain.clone();
            let tenant = match vms.first() {
                Some(first) if config.mutation == Some(Mutation::TenantsMixed) => {
                    first.tenant.clone()
                }
                _ => {
                    let spec = TenantSpec {
                        name: vm.name.clone(),
                        trust_domain: domain.clone(),
                        quota: vm.quota,
                    };
                    pool.add_tenant(spec).expect("nothing is reserved")
                }
            };
            vms.push(Arc::new(Vm::new(vm, tenant, None, Arc::default())));
        }
        let simulated = ClockAndEntropy::Simulated(clock.clone());
        let background = BackgroundWorkers::start(pool.clone(), &simulated, 0, &Default::default())
            .expect("no thread is started");
        let workers =
            Workers::without_threads(config.workers, config.poll_max).expect("descriptors");
        Host {
            pool,
            vms,
            shared: ConnectionContext {
                workers: Arc::new(workers),
                background,
                clock: simulated,
            },
            contexts: (0..config.workers)
                .map(|_| WorkerContext::new().expect("memory"))
                .collect(),
            clock,
            death: Fuse::new(),
            frozen: false,
            mutation: config.mutation,
        }
    }

    /// Workers.
    pub fn workers(&self) -> usize {
        self.contexts.len()
    }

    /// One round of a worker: a turn for each VM that has work.
    pub fn round(&mut self, worker: usize) {
        if !self.frozen {
            let context = &mut self.contexts[worker];
            let (workers, background) = (&self.shared.workers, &self.shared.background);
            workers.round(worker, context, background).expect("epoll");
        }
    }

    /// Some background work; true if more is left.
    pub fn maintain(&mut self) -> bool {
        if self.frozen {
            return false;
        }
        self.shared.background.unmap();
        self.pool
            .maintain(Time(self.clock.now_ns()), MAINTAIN_PAGES)
    }

    /// The host is short of memory, or no longer.
    pub fn resize(&self, bytes: u64) {
        self.pool.resize(bytes);
    }

    /// Another quota.
    pub fn set_quota(&self, guest: usize, quota: Quota) {
        // A reserve that does not fit is refused, and all is as before.
        let _ = self.vms[guest].tenant.set_quota(quota);
    }

    /// A manager freezes a VM's cache, or no longer: nothing is stored.
    pub fn freeze_vm(&self, guest: usize, frozen: bool) {
        self.vms[guest].frozen.store(frozen, SeqCst);
    }

    /// A VM's part of the daemon.
    pub fn vm(&self, guest: usize) -> &Arc<Vm> {
        &self.vms[guest]
    }

    /// A drain of this connection begins after so many looks, and cuts off what it finds.
    pub fn drain_after(&self, looks: u64, session: &Session, fuse: &Fuse) {
        let drain = Drain {
            looks: looks + 1,
            device: Arc::downgrade(session.device()),
            clock: self.clock.clone(),
        };
        *fuse.drain.lock().expect("no panic") = Some(drain);
    }

    /// A front end connects; None: it is refused. The second fuse is that of the front end.
    pub fn connect(&self, guest: usize, hang_up: &Arc<Fuse>) -> Option<(Session, UnixStream)> {
        let (own, other) = UnixStream::pair().expect("descriptors");
        let (death, hang_up) = (self.death.clone(), hang_up.clone());
        let deaf = self.mutation == Some(Mutation::HangUpIgnored);
        let look = move || {
            death.look();
            hang_up.look();
            if death.is_burnt() || (hang_up.is_burnt() && !deaf) {
                Err(HungUp)
            } else {
                Ok(())
            }
        };
        let peer = Peer::simulated(Box::new(look));
        let session = Session::begin(&self.vms[guest], &own, peer, &self.shared)?;
        Some((session, other))
    }
}
