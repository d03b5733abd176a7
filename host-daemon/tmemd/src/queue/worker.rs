// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data workers: a fixed number of threads, each with an event loop for the kicks of its
//! vrings. A vring belongs to one worker as long as its connection lives.
//!
//! A worker's run queue contains the vrings with work. They get slices of bounded work, VM by VM,
//! so that no VM starves another. A worker blocks only to wait for kicks; it waits for a vring's
//! lock only after a panic in a slice.
//!
//! The host may have swapped out the memory of a guest. Each access then blocks the worker until the
//! page is read, and no time limit of a slice can end that wait. Each worker therefore has a partner,
//! which serves the worker's vrings of such VMs (`vm/swapped.rs`): the worker watches their kicks,
//! and passes the vrings on.

use crate::config::settings::{EventLoop, Waiting};
use crate::host::background::BackgroundWorkers;
use crate::host::heartbeat::{Heartbeat, Heartbeats, MISSED_CHECKS_MAX};
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

/// Eventfd through which a driver kicks a vring, and the vring.
type Registration = (Arc<OwnedFd>, Arc<Vring>);

/// Vrings that other threads give to a worker.
#[derive(Default)]
struct Inbox {
    scheduled: Vec<Arc<Vring>>,
    /// Vrings that the partner has passed on. They are marked as queued.
    passed: Vec<Arc<Vring>>,
}

/// The part of a worker's data that other threads use, too.
struct Worker {
    /// Position of the worker in the list of all workers.
    number: usize,
    /// Number of workers to which vrings belong, if they have partners. Worker n has the partner
    /// with the number `partners` + n.
    partners: Option<usize>,
    poller: Box<dyn Poller>,
    /// Guards the watched kicks with their vrings, by token. Leaf lock.
    registry: Mutex<HashMap<u64, Registration>>,
    /// Guards the vrings that the worker must process even without a kick. Leaf lock.
    inbox: Mutex<Inbox>,
    stop: AtomicBool,
    /// Longest time in ns for which the worker polls an empty vring, see [`Waiting::poll_max`].
    poll_max_ns: u64,
}

/// All data workers of the daemon.
pub struct Workers {
    /// The workers to which vrings belong, and then their partners, if they have some.
    workers: Arc<[Worker]>,
    /// Number of workers to which vrings belong.
    count: usize,
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
    /// Starts `count` data workers and their partners, each with its own thread.
    ///
    /// # Errors
    /// The system cannot create the thread, a descriptor or the wanted event loop.
    pub fn start(
        count: usize,
        waiting: Waiting,
        background: &Arc<BackgroundWorkers>,
        heartbeats: &Arc<Heartbeats>,
    ) -> io::Result<Workers> {
        let mut workers = Workers::new(count, true, waiting)?;
        workers.heartbeats = heartbeats.clone();
        for number in 0..workers.workers.len() {
            let (all, background) = (workers.workers.clone(), background.clone());
            let (name, heartbeat) = match number.checked_sub(count) {
                None => {
                    let name = format!("worker-{number}");
                    let heartbeat = heartbeats.register(&name);
                    (name, heartbeat)
                }
                Some(number) => {
                    let name = format!("swapped-{number}");
                    let heartbeat = heartbeats.register_patient(&name, SWAPPED_CHECKS_MAX);
                    (name, heartbeat)
                }
            };
            let context = WorkerContext::new()?;
            let stage = workers.stage.clone();
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                sandbox::narrow(ThreadKind::Data);
                stage.join();
                all[number].run(&all, &background, context, heartbeat);
            })?;
            lock(&workers.threads).push(thread);
        }
        Ok(workers)
    }

    /// Creates `count` workers without threads and partners, for simulators. They work only when
    /// [`round`](Self::round) is called.
    ///
    /// # Errors
    /// The system lacks a descriptor.
    pub fn without_threads(count: usize, poll_max: Duration) -> io::Result<Workers> {
        // Workers without threads use epoll. A simulator calls them from any thread, but an
        // io_uring accepts operations from one thread only.
        let event_loop = EventLoop::Epoll;
        let waiting = Waiting {
            event_loop,
            poll_max,
        };
        Workers::new(count, false, waiting)
    }

    /// Creates `count` workers without threads, and as many partners if `partners` is true.
    ///
    /// # Errors
    /// The system lacks a descriptor.
    pub(crate) fn new(count: usize, partners: bool, waiting: Waiting) -> io::Result<Workers> {
        notifier::prepare()?;
        let partners = partners.then_some(count);
        let worker = |(number, poller)| Worker {
            number,
            partners,
            poller,
            registry: Mutex::new(HashMap::new()),
            inbox: Mutex::default(),
            stop: AtomicBool::new(false),
            poll_max_ns: waiting.poll_max.as_nanos() as u64,
        };
        let pollers = event_loop::create(waiting.event_loop, count + partners.unwrap_or(0))?;
        Ok(Workers {
            workers: pollers.into_iter().enumerate().map(worker).collect(),
            count,
            threads: Mutex::new(Vec::new()),
            next_token: AtomicU64::new(0),
            next_worker: AtomicUsize::new(0),
            stage: Arc::default(),
            heartbeats: Arc::default(),
        })
    }

    /// Runs one round of work of a worker that has no thread.
    ///
    /// # Errors
    /// The system cannot wait for kicks.
    pub fn round(
        &self,
        worker: usize,
        context: &mut WorkerContext,
        background: &BackgroundWorkers,
    ) -> io::Result<()> {
        self.workers[worker].round(&self.workers, context, background, None)
    }

    /// Returns the number of workers to which vrings belong.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the processor time that the workers have used.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Returns the heartbeats of the daemon's threads. Workers and connections register theirs
    /// there.
    pub fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    /// Returns the number of the worker for the first vring of a connection. Successive connections
    /// begin at successive workers. The connection's other vrings belong to the workers after this
    /// one.
    pub fn assign(&self) -> usize {
        self.next_worker.fetch_add(1, Ordering::Relaxed) % self.count
    }

    /// Makes the vring's worker watch the vring's kick. Returns a token, with which the caller can
    /// stop watching the kick.
    ///
    /// # Errors
    /// The kernel cannot watch the eventfd of the kick.
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

    /// Makes the vring's worker stop watching the vring's kick.
    pub fn unregister(&self, vring: &Vring, token: u64) {
        let worker = &self.workers[vring.worker];
        let registration = lock(&worker.registry).remove(&token);
        if let Some((kick, _)) = registration
            && let Err(error) = worker.poller.remove(&kick, token)
        {
            let (vm, virtqueue) = (vring.vm_name(), vring.index);
            tracing::error!(%vm, "cannot stop watching the kick of virtqueue {virtqueue}: {error}");
        }
    }

    /// Makes the vring's worker process the vring without a kick.
    pub fn schedule(&self, vring: &Arc<Vring>) {
        let worker = &self.workers[vring.worker];
        lock(&worker.inbox).scheduled.push(vring.clone());
        worker.poller.wake();
    }

    /// Tells the worker threads to end, and waits until they have ended. A thread first finishes
    /// its current round, in which each VM with work gets one slice.
    pub fn stop(&self) {
        for worker in &*self.workers {
            worker.stop.store(true, Ordering::SeqCst);
            worker.poller.wake();
        }
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a bug: a worker panicked outside of a scheduling slice");
            }
        }
    }
}

/// Number of checks by the watchdog after which a partner counts as hung: six periods, by default
/// 60 s, which is longer than a busy disk needs for the pages of a slice. A drain that waits for the
/// partner makes the control thread count as hung earlier, because the guest may use the memory for
/// something else meanwhile.
const SWAPPED_CHECKS_MAX: u32 = 12 * MISSED_CHECKS_MAX;

/// Maximum number of empty vrings that a worker polls at a time. It is limited because each poll
/// reads guest memory. Further vrings request a kick as soon as they are empty.
const POLLED_MAX: usize = 16;

/// Data of a worker that only the worker's own thread uses.
pub struct WorkerContext {
    scratch: Scratch,
    ready: Vec<u64>,
    run_queue: RunQueue<Arc<Vring>>,
    /// Empty vrings that have requested no kick, each with the time in ns at which the worker stops
    /// polling it.
    polled: Vec<(Arc<Vring>, u64)>,
}

impl WorkerContext {
    /// Allocates the buffers and lists of a worker.
    ///
    /// # Errors
    /// The system lacks address space.
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
    /// Returns whether the worker serves vrings that belong to its partner.
    fn is_for_swapped(&self) -> bool {
        self.partners
            .is_some_and(|partners| self.number >= partners)
    }

    /// Returns the number of the worker that serves the vring now.
    fn serving(&self, vring: &Vring) -> usize {
        match self.partners {
            Some(partners) if vring.is_swapped() => partners + vring.worker,
            _ => vring.worker,
        }
    }

    /// Returns the number of the other worker that serves the vring at times.
    fn partner_of(&self, vring: &Vring) -> Option<usize> {
        let partners = self.partners?;
        Some(match self.number == vring.worker {
            true => partners + vring.worker,
            false => vring.worker,
        })
    }

    /// Takes over a vring that is marked as queued. The worker processes it soon, or passes it back.
    fn take(&self, vring: Arc<Vring>) {
        lock(&self.inbox).passed.push(vring);
        self.poller.wake();
    }

    fn run(
        &self,
        all: &[Worker],
        background: &BackgroundWorkers,
        mut context: WorkerContext,
        heartbeat: Heartbeat,
    ) {
        while !self.stop.load(Ordering::SeqCst) {
            if let Err(error) = self.round(all, &mut context, background, Some(&heartbeat)) {
                // Waiting fails only if a descriptor was closed, which is a bug of the daemon. A
                // worker that cannot wait for kicks cannot serve VMs.
                tracing::error!("a worker cannot wait for kicks and ends: {error}");
                heartbeat.lose();
                return;
            }
        }
    }

    /// Collects the vrings that have work, and gives one slice to each VM. Passes vrings on that the
    /// partner serves now; `all` are all workers. If no vring has work and the worker polls none,
    /// waits for a kick. `heartbeat` is None for a worker without a thread, which never waits.
    fn round(
        &self,
        all: &[Worker],
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
        let is_for_swapped = self.is_for_swapped();
        let idle = run_queue.is_empty() && polled.is_empty();
        let wait = heartbeat.filter(|_| idle);
        wait.inspect(|heartbeat| heartbeat.rest());
        self.poller.wait(ready, wait.is_some())?;
        heartbeat.inspect(|heartbeat| heartbeat.work());
        let inbox = std::mem::take(&mut *lock(&self.inbox));
        for vring in inbox.passed {
            run_queue.push(vring.owner(), vring);
        }
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
        inbox.scheduled.into_iter().for_each(&mut enqueue);
        polled.retain(|(vring, until_ns)| {
            // A poll reads guest memory, which must not block this worker either.
            let leaves = self.serving(vring) != self.number;
            let ended = leaves || vring.poll_has_ended(*until_ns);
            if ended {
                enqueue(vring.clone());
            }
            !ended
        });
        if run_queue.is_empty() {
            std::hint::spin_loop();
        }
        // Each VM with work gets one slice. After that, the next round collects kicks again.
        for _ in 0..run_queue.owners() {
            let Some(vring) = run_queue.pop() else {
                break;
            };
            // The worker may still poll this vring, because a kick or the control thread can queue
            // the vring before its polling time ends.
            polled.retain(|(other, _)| !Arc::ptr_eq(other, &vring));
            let serving = self.serving(&vring);
            if serving != self.number {
                all[serving].take(vring);
                continue;
            }
            heartbeat.inspect(|heartbeat| heartbeat.work());
            let begun_ns = vring.dequeue();
            let before = self.partners.and_then(|_| vring.begin_slice(begun_ns));
            let poll_max_ns = match polled.len() {
                POLLED_MAX.. => 0,
                // A poll could wait for memory outside of a slice.
                _ if is_for_swapped => 0,
                _ => self.poll_max_ns,
            };
            let end = AssertUnwindSafe(|| vring.run_slice(scratch, poll_max_ns));
            let end = std::panic::catch_unwind(end);
            vring.end_slice(begun_ns, before.as_ref());
            match end {
                Ok(SliceEnd::Idle) => {}
                Ok(SliceEnd::Poll { until_ns }) => polled.push((vring, until_ns)),
                Ok(SliceEnd::More) => {
                    if vring.enqueue() {
                        run_queue.push(vring.owner(), vring);
                    }
                }
                Ok(SliceEnd::Locked) => {
                    let partner = self.partner_of(&vring);
                    if let Some(partner) = partner
                        && vring.enqueue()
                    {
                        all[partner].take(vring);
                    }
                }
                Err(_) => vring.stop_after_panic(),
            }
            background.wake();
        }
        Ok(())
    }
}
