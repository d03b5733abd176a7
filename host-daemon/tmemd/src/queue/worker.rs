// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data workers: a fixed number of threads, each an event loop over the kicks of its vrings.
//! A vring belongs to one worker as long as its connection lives.
//!
//! Vrings with work stand in a run queue and get turns of bounded work, VM by VM, so that none
//! starves another. A worker never blocks but to wait for kicks: it only tries a vring's lock.

use crate::config::settings::{EventLoop, Waiting};
use crate::host::background::BackgroundWorkers;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::host::sandbox::{self, ThreadKind};
use crate::host::usage::Stage;
use crate::queue::event_loop;
use crate::queue::notifier;
use crate::queue::poller::Poller;
use crate::queue::run_queue::RunQueue;
use crate::queue::vring::{Scratch, SliceEnd, Vring};
use crate::util::event_fd::consume;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A kick and whose it is.
type Registration = (Arc<OwnedFd>, Arc<Vring>);

/// One worker, as others see it.
struct Worker {
    poller: Box<dyn Poller>,
    /// Guards the kicks by token. Taken alone.
    registry: Mutex<HashMap<u64, Registration>>,
    /// Guards vrings to look at without a kick. Taken alone.
    inbox: Mutex<Vec<Arc<Vring>>>,
    stop: AtomicBool,
    /// See [`Waiting::poll_max`].
    poll_max_ns: u64,
}

/// All workers.
pub struct Workers {
    workers: Vec<Arc<Worker>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next_token: AtomicU64,
    next_worker: AtomicUsize,
    stage: Arc<Stage>,
    heartbeats: Arc<Heartbeats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(
        count: usize,
        waiting: Waiting,
        background: &Arc<BackgroundWorkers>,
        heartbeats: &Arc<Heartbeats>,
    ) -> io::Result<Workers> {
        let mut workers = Workers::new(count, waiting)?;
        workers.heartbeats = heartbeats.clone();
        for (number, worker) in workers.workers.iter().enumerate() {
            let (own, background) = (worker.clone(), background.clone());
            let name = format!("worker-{number}");
            let (context, heartbeat) = (WorkerContext::new()?, heartbeats.register(&name));
            let stage = workers.stage.clone();
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                sandbox::narrow(ThreadKind::Data);
                stage.join();
                own.run(&background, context, heartbeat);
            })?;
            lock(&workers.threads).push(thread);
        }
        Ok(workers)
    }

    /// `count` workers that do nothing but in [`round`](Self::round).
    pub fn without_threads(count: usize, poll_max: Duration) -> io::Result<Workers> {
        // Who has many of them at once, and drives them from any thread, is not to depend on the kernel.
        let event_loop = EventLoop::Epoll;
        let waiting = Waiting {
            event_loop,
            poll_max,
        };
        Workers::new(count, waiting)
    }

    fn new(count: usize, waiting: Waiting) -> io::Result<Workers> {
        notifier::prepare()?;
        let worker = |poller| {
            Arc::new(Worker {
                poller,
                registry: Mutex::new(HashMap::new()),
                inbox: Mutex::new(Vec::new()),
                stop: AtomicBool::new(false),
                poll_max_ns: waiting.poll_max.as_nanos() as u64,
            })
        };
        let pollers = event_loop::create(waiting.event_loop, count)?;
        Ok(Workers {
            workers: pollers.into_iter().map(worker).collect(),
            threads: Mutex::new(Vec::new()),
            next_token: AtomicU64::new(0),
            next_worker: AtomicUsize::new(0),
            stage: Arc::default(),
            heartbeats: Arc::default(),
        })
    }

    /// What a worker does each time that it looks around; only where it has no thread.
    pub fn round(
        &self,
        worker: usize,
        context: &mut WorkerContext,
        background: &BackgroundWorkers,
    ) -> io::Result<()> {
        self.workers[worker].round(context, background, None)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// What they take.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// What tells that its threads go on; those of connections, too.
    pub fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    /// The worker that the first vring of a connection should belong to; the others follow.
    pub fn assign(&self) -> usize {
        self.next_worker.fetch_add(1, Ordering::Relaxed) % self.workers.len()
    }

    /// Watches a kick; the token ends it.
    pub fn register(&self, vring: &Arc<Vring>, kick: Arc<OwnedFd>) -> io::Result<u64> {
        let worker = &self.workers[vring.worker];
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        lock(&worker.registry).insert(token, (kick.clone(), vring.clone()));
        if let Err(error) = worker.poller.add(&kick, token) {
            lock(&worker.registry).remove(&token);
            return Err(error);
        }
        Ok(token)
    }

    /// Ends watching a kick.
    pub fn unregister(&self, vring: &Vring, token: u64) {
        let worker = &self.workers[vring.worker];
        let registration = lock(&worker.registry).remove(&token);
        if let Some((kick, _)) = registration
            && let Err(error) = worker.poller.remove(&kick, token)
        {
            let (vm, virtqueue) = (vring.vm_name(), vring.index);
            tracing::error!(%vm, "a kick of virtqueue {virtqueue} cannot be unwatched: {error}");
        }
    }

    /// Lets the worker look at a vring, kick or none.
    pub fn schedule(&self, vring: &Arc<Vring>) {
        let worker = &self.workers[vring.worker];
        lock(&worker.inbox).push(vring.clone());
        worker.poller.wake();
    }

    /// Ends the workers after the turns that they are at.
    pub fn stop(&self) {
        for worker in &self.workers {
            worker.stop.store(true, Ordering::SeqCst);
            worker.poller.wake();
        }
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker panicked outside of a turn");
            }
        }
    }
}

/// Vrings that a worker looks at, at most: each look waits for the guest's memory. Others are asked for a
/// kick as soon as they are dry.
const POLLED_MAX: usize = 16;

/// What a worker has to itself.
pub struct WorkerContext {
    scratch: Scratch,
    ready: Vec<u64>,
    run_queue: RunQueue<Arc<Vring>>,
    /// Dry, and not asked for a kick until then.
    polled: Vec<(Arc<Vring>, u64)>,
}

impl WorkerContext {
    /// Nothing to do yet.
    ///
    /// # Errors
    /// The system has not the address space.
    pub fn new() -> io::Result<WorkerContext> {
        Ok(WorkerContext {
            scratch: Scratch::new()?,
            ready: Vec::new(),
            run_queue: RunQueue::new(),
            polled: Vec::with_capacity(POLLED_MAX),
        })
    }
}

impl Worker {
    fn run(
        &self,
        background: &BackgroundWorkers,
        mut context: WorkerContext,
        heartbeat: Heartbeat,
    ) {
        while !self.stop.load(Ordering::SeqCst) {
            if let Err(error) = self.round(&mut context, background, Some(&heartbeat)) {
                // Cannot happen while its descriptors are open; serving without it is impossible.
                tracing::error!("a worker cannot wait for kicks and ends: {error}");
                heartbeat.lose();
                return;
            }
        }
    }

    /// Looks who has work, and gives each VM a turn. A thread, which has a heart, waits for work if
    /// there is none.
    fn round(
        &self,
        context: &mut WorkerContext,
        background: &BackgroundWorkers,
        heartbeat: Option<&Heartbeat>,
    ) -> io::Result<()> {
        let WorkerContext {
            scratch,
            ready,
            run_queue,
            polled,
        } = context;
        let idle = run_queue.is_empty() && polled.is_empty();
        let wait = heartbeat.filter(|_| idle);
        wait.inspect(|heartbeat| heartbeat.rest());
        self.poller.wait(ready, wait.is_some())?;
        heartbeat.inspect(|heartbeat| heartbeat.work());
        let mut enqueue = |vring: Arc<Vring>| {
            if vring.enqueue() {
                run_queue.push(vring.owner(), vring);
            }
        };
        {
            let registry = lock(&self.registry);
            for token in ready {
                if let Some((kick, vring)) = registry.get(token) {
                    consume(kick);
                    enqueue(vring.clone());
                }
            }
        }
        lock(&self.inbox).drain(..).for_each(&mut enqueue);
        polled.retain(|(vring, until_ns)| {
            let ended = vring.poll_has_ended(*until_ns);
            if ended {
                enqueue(vring.clone());
            }
            !ended
        });
        if run_queue.is_empty() {
            std::hint::spin_loop();
        }
        // Then look who else has come.
        for _ in 0..run_queue.owners() {
            let Some(vring) = run_queue.pop() else {
                break;
            };
            heartbeat.inspect(|heartbeat| heartbeat.work());
            let begun_ns = vring.dequeue();
            // A kick, or a control thread, may have been quicker than the look.
            polled.retain(|(other, _)| !Arc::ptr_eq(other, &vring));
            let poll_max_ns = match polled.len() {
                POLLED_MAX.. => 0,
                _ => self.poll_max_ns,
            };
            let end = AssertUnwindSafe(|| vring.run_slice(scratch, poll_max_ns));
            let end = std::panic::catch_unwind(end);
            vring.charge_time(begun_ns);
            match end {
                Ok(SliceEnd::Idle) => {}
                Ok(SliceEnd::Poll { until_ns }) => polled.push((vring, until_ns)),
                Ok(SliceEnd::More) => {
                    if vring.enqueue() {
                        run_queue.push(vring.owner(), vring);
                    }
                }
                Err(_) => vring.stop_after_panic(),
            }
            background.wake();
        }
        Ok(())
    }
}
