// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data workers: a fixed number of threads, each an event loop over the kicks of its vrings.
//!
//! Vrings with work stand in a run queue and get turns of bounded work, VM by VM, so that none
//! starves another. A worker never blocks but to wait for kicks: it only tries a vring's lock.

use crate::janitor::Janitor;
use crate::poller::{Epoll, Poller, consume};
use crate::run_queue::RunQueue;
use crate::usage::Stage;
use crate::vring::{Scratch, Turn, Vring};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

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
}

/// All workers.
pub struct Workers {
    workers: Vec<Arc<Worker>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next_token: AtomicU64,
    next_worker: AtomicUsize,
    stage: Arc<Stage>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(count: usize, janitor: &Arc<Janitor>) -> io::Result<Workers> {
        let workers = Workers::without_threads(count)?;
        for (number, worker) in workers.workers.iter().enumerate() {
            let (own, janitor) = (worker.clone(), janitor.clone());
            let hands = Hands::new()?;
            let stage = workers.stage.clone();
            let thread = std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || {
                    stage.join();
                    own.run(&janitor, hands);
                })?;
            lock(&workers.threads).push(thread);
        }
        Ok(workers)
    }

    /// `count` workers that do nothing but in [`round`](Self::round).
    pub fn without_threads(count: usize) -> io::Result<Workers> {
        let worker = |_| {
            Ok(Arc::new(Worker {
                poller: Box::new(Epoll::new()?),
                registry: Mutex::new(HashMap::new()),
                inbox: Mutex::new(Vec::new()),
                stop: AtomicBool::new(false),
            }))
        };
        Ok(Workers {
            workers: (0..count).map(worker).collect::<io::Result<_>>()?,
            threads: Mutex::new(Vec::new()),
            next_token: AtomicU64::new(0),
            next_worker: AtomicUsize::new(0),
            stage: Arc::default(),
        })
    }

    /// What a worker does each time that it looks around; only where it has no thread.
    pub fn round(&self, worker: usize, hands: &mut Hands, janitor: &Janitor) -> io::Result<()> {
        self.workers[worker].round(hands, janitor, false)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// What they take.
    pub fn stage(&self) -> &Stage {
        &self.stage
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
        if let Err(error) = worker.poller.add(kick.as_fd(), token) {
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
            && let Err(error) = worker.poller.remove(kick.as_fd())
        {
            tracing::error!(
                "a kick of virtqueue {} cannot be unwatched: {error}",
                vring.index
            );
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

/// What a worker has to itself.
pub struct Hands {
    scratch: Scratch,
    ready: Vec<u64>,
    run_queue: RunQueue<Arc<Vring>>,
}

impl Hands {
    /// Nothing to do yet.
    ///
    /// # Errors
    /// The system has not the address space.
    pub fn new() -> io::Result<Hands> {
        Ok(Hands {
            scratch: Scratch::new()?,
            ready: Vec::new(),
            run_queue: RunQueue::new(),
        })
    }
}

impl Worker {
    fn run(&self, janitor: &Janitor, mut hands: Hands) {
        while !self.stop.load(Ordering::SeqCst) {
            if let Err(error) = self.round(&mut hands, janitor, true) {
                // Cannot happen while its descriptors are open; serving without it is impossible.
                tracing::error!("a worker cannot wait for kicks and ends: {error}");
                return;
            }
        }
    }

    /// Looks who has work, waits for some if it may and nobody has, and gives each VM a turn.
    fn round(&self, hands: &mut Hands, janitor: &Janitor, wait: bool) -> io::Result<()> {
        let Hands {
            scratch,
            ready,
            run_queue,
        } = hands;
        self.poller.wait(ready, wait && run_queue.is_empty())?;
        let mut enqueue = |vring: Arc<Vring>| {
            if !vring.queued.swap(true, Ordering::SeqCst) {
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
        // Then look who else has come.
        for _ in 0..run_queue.owners() {
            let Some(vring) = run_queue.pop() else {
                break;
            };
            // Cleared before the turn, so that a kick during it is not lost.
            vring.queued.store(false, Ordering::SeqCst);
            let turn = std::panic::catch_unwind(AssertUnwindSafe(|| vring.turn(scratch)));
            match turn {
                Ok(Turn::Idle) => {}
                Ok(Turn::More) => {
                    if !vring.queued.swap(true, Ordering::SeqCst) {
                        run_queue.push(vring.owner(), vring);
                    }
                }
                Err(_) => vring.stop_after_panic(),
            }
            janitor.work_may_be_there();
        }
        Ok(())
    }
}
