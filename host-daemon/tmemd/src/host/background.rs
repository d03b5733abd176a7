// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Background worker threads. They do the pool's background work (compressing, deduplicating and
//! evicting pages) and unmap memory.
//!
//! A separate thread unmaps memory, because unmapping a VM's memory can take seconds and must not
//! delay the pool's work. As a single call can take that long, this thread has no heartbeat.

use crate::host::clock::ClockAndEntropy;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::host::sandbox::{self, ThreadKind};
use crate::host::usage::{BackgroundTime, Stage};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tmem_pool::{Engine, Time};

/// Number of pages that background work processes between two checks whether the daemon stops.
const MAINTAIN_PAGES: usize = 1024;

/// Longest pause between two runs of background work. Some of the pool's work depends on time, so
/// the threads must also run when no other thread wakes them.
const PERIOD: Duration = Duration::from_millis(500);

/// Shortest pause of a background thread after a run that left no work. No put is refused because
/// of this pause: a VM may have several hundred raw pages in the pool, and needs longer than the
/// pause to put them.
const PERIOD_MIN: Duration = Duration::from_millis(1);

/// Maximum number of memory tables of a VM that wait to be unmapped. If a front end changes its
/// table faster, its own connection thread unmaps further tables, which slows the front end down.
/// The tables' mappings count against limits that all VMs share.
pub const DISCARDED_MAX: usize = 4;

/// Counts the memory tables of a VM that wait to be unmapped or are being unmapped. Each of these
/// tables holds a clone of the `Arc`, so the reference count gives their number.
#[derive(Debug, Default)]
pub struct Discarded(Arc<()>);

/// A memory table that waits to be unmapped. Until then it counts against `DISCARDED_MAX`.
struct DiscardedMemory {
    _memory: Arc<dyn Any + Send + Sync>,
    /// Clone of the VM's [`Discarded`] reference, which counts this table. Rust drops fields in the
    /// order of their declaration, so the table is unmapped before it stops being counted.
    _counted: Arc<()>,
}

/// The background worker threads of the daemon.
pub struct BackgroundWorkers {
    /// Set when there may be background work that no background thread has seen yet.
    work: AtomicBool,
    stop: AtomicBool,
    /// Guards the list of memory tables that wait to be unmapped. Leaf lock.
    discarded: Mutex<Vec<DiscardedMemory>>,
    /// Guards the handles of the threads that do the pool's background work.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Guards the handle of the thread that unmaps memory. Leaf lock.
    unmapper: Mutex<Option<JoinHandle<()>>>,
    /// Processor time of all background threads.
    pub stage: Stage,
    /// Processor time of the pool's background work, by kind of work.
    pub cpu_time: Arc<BackgroundTime>,
}

impl BackgroundWorkers {
    /// Starts `threads` threads for the pool's background work and one thread that unmaps memory.
    /// If `threads` is 0, no thread is started, and the caller of this function does all background
    /// work.
    ///
    /// # Errors
    /// The system cannot start a thread. The threads that were already started have ended.
    pub fn start(
        engine: Arc<Engine>,
        clock: &ClockAndEntropy,
        threads: usize,
        heartbeats: &Heartbeats,
    ) -> std::io::Result<Arc<BackgroundWorkers>> {
        let clock = clock.clone();
        let cpu_time: Arc<BackgroundTime> = Arc::default();
        BackgroundWorkers::start_with(threads, heartbeats, cpu_time.clone(), move || {
            let mut timed = cpu_time.begin();
            let now = Time(clock.now_ns());
            engine.maintain_reporting(now, MAINTAIN_PAGES, &mut |work| timed.switch_to(work))
        })
    }

    /// Starts `threads` threads that call `maintain` in a loop. `maintain` does some work and
    /// returns true if more is left.
    fn start_with(
        threads: usize,
        heartbeats: &Heartbeats,
        cpu_time: Arc<BackgroundTime>,
        maintain: impl Fn() -> bool + Send + Sync + 'static,
    ) -> std::io::Result<Arc<BackgroundWorkers>> {
        let maintain = Arc::new(maintain);
        let background = Arc::new(BackgroundWorkers {
            work: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            discarded: Mutex::new(Vec::new()),
            threads: Mutex::new(Vec::new()),
            unmapper: Mutex::new(None),
            stage: Stage::default(),
            cpu_time,
        });
        if threads > 0 {
            let own = background.clone();
            let thread = std::thread::Builder::new()
                .name("unmapper".into())
                .spawn(move || own.run_unmapper())?;
            *background.unmapper() = Some(thread);
        }
        for _ in 0..threads {
            let (own, maintain) = (background.clone(), maintain.clone());
            let heartbeat = heartbeats.register("background");
            let thread = std::thread::Builder::new()
                .name("background".into())
                .spawn(move || own.run(&*maintain, &heartbeat));
            match thread {
                Ok(thread) => background.handles().push(thread),
                Err(error) => {
                    background.stop();
                    return Err(error);
                }
            }
        }
        Ok(background)
    }

    fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unmapper(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.unmapper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_unmapper(&self) {
        sandbox::narrow(ThreadKind::Data);
        self.stage.join();
        while !self.stop.load(Ordering::SeqCst) {
            self.unmap();
            // park() returns at once if another thread has queued memory since unmap() returned.
            std::thread::park();
        }
    }

    fn run(&self, maintain: &dyn Fn() -> bool, heartbeat: &Heartbeat) {
        sandbox::narrow(ThreadKind::Data);
        self.stage.join();
        while !self.stop.load(Ordering::SeqCst) {
            self.begin();
            heartbeat.work();
            let done = catch_unwind(AssertUnwindSafe(maintain));
            heartbeat.rest();
            let Ok(more) = done else {
                // The thread continues after a panic, because without background work the VMs soon
                // have no space left for puts. The pause keeps a repeated panic from filling the
                // log.
                tracing::error!(
                    "a bug in the engine: background work panicked; the worker continues"
                );
                std::thread::park_timeout(PERIOD);
                continue;
            };
            if !more {
                std::thread::sleep(PERIOD_MIN);
                if !self.work.load(Ordering::SeqCst) {
                    std::thread::park_timeout(PERIOD);
                }
            }
        }
    }

    /// Clears the flag that there is work, before the calling thread looks for work.
    fn begin(&self) {
        self.work.store(false, Ordering::SeqCst);
        // A thread that has read the flag before this write has made its work visible before
        // (`wake`). This fence makes the calling thread see that work.
        fence(Ordering::SeqCst);
    }

    /// Unmaps all memory tables that were discarded until now.
    pub fn unmap(&self) {
        let discarded = std::mem::take(
            &mut *self
                .discarded
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        drop(discarded);
    }

    /// Wakes the background threads. The call is cheap, so the daemon makes it after each action
    /// that may cause background work.
    pub fn wake(&self) {
        // If the flag is set already, another call has woken the threads and they have not looked
        // for work since. They need no second wake-up. All workers call this function after each
        // slice, so read the flag first: a write takes the flag's cache line away from the other
        // processors. The fence makes the caller's work visible before the read. `begin` has the
        // other fence.
        fence(Ordering::SeqCst);
        let is_set = self.work.load(Ordering::Relaxed);
        if !is_set && !self.work.swap(true, Ordering::SeqCst) {
            for thread in &*self.handles() {
                thread.thread().unpark();
            }
        }
    }

    /// Queues a memory table, which is unmapped when no thread uses it any more. If
    /// [`DISCARDED_MAX`] tables of the VM are waiting already, the calling thread unmaps the table
    /// itself.
    pub fn discard(&self, memory: Arc<dyn Any + Send + Sync>, of_vm: &Discarded) {
        let counted = of_vm.0.clone();
        // The reference count includes two references that are not waiting tables: the VM's own
        // reference, and `counted`.
        if Arc::strong_count(&of_vm.0) - 2 >= DISCARDED_MAX {
            return;
        }
        let discarded = DiscardedMemory {
            _memory: memory,
            _counted: counted,
        };
        self.discarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(discarded);
        if let Some(unmapper) = &*self.unmapper() {
            unmapper.thread().unpark();
        }
    }

    /// Tells the background threads to end, and waits until they have ended.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let threads = std::mem::take(&mut *self.handles());
        let unmapper = self.unmapper().take();
        for thread in threads.into_iter().chain(unmapper) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a bug: a background worker panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    #[test]
    fn a_panic_does_not_end_a_background_worker() {
        let (sender, receiver) = mpsc::channel();
        let sender = Mutex::new(sender);
        let calls = AtomicUsize::new(0);
        let maintain = move || {
            let call = calls.fetch_add(1, Ordering::SeqCst);
            assert!(call > 0, "a simulated bug in the first call");
            let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
            // If sending fails, the test has ended and no longer receives.
            let _ = sender.send(call);
            false
        };
        let background =
            BackgroundWorkers::start_with(1, &Heartbeats::default(), Arc::default(), maintain)
                .expect("cannot start the thread");
        let call = receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(call, Ok(1), "the worker did not continue after the panic");
        background.stop();
    }

    /// While one thread adds work and finds the flag set, a background thread may clear the flag and
    /// look for work. Then either this thread finds the work, or the flag is set again. On x86, only the
    /// fence of `wake` is tested: the flag is cleared by an instruction that is a full fence.
    #[test]
    fn work_that_is_added_while_the_flag_is_cleared_is_found() {
        const ROUNDS: usize = 20_000;
        let maintain = || false;
        let background =
            BackgroundWorkers::start_with(0, &Heartbeats::default(), Arc::default(), maintain)
                .expect("cannot make workers without threads");
        let work = AtomicUsize::new(0);
        let rounds = [AtomicUsize::new(0), AtomicUsize::new(0)];
        // An assertion in the scope would leave the other thread waiting for ever.
        let lost_round = AtomicUsize::new(0);
        // Lets both threads begin a round at the same time.
        let meet = |own: usize, round| {
            rounds[own].store(round, Ordering::SeqCst);
            while rounds[1 - own].load(Ordering::SeqCst) < round {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for round in 1..=ROUNDS {
                    meet(0, 2 * round);
                    work.store(round, Ordering::Relaxed);
                    background.wake();
                    meet(0, 2 * round + 1);
                }
            });
            for round in 1..=ROUNDS {
                background.work.store(true, Ordering::SeqCst);
                meet(1, 2 * round);
                background.begin();
                let found = work.load(Ordering::Relaxed) == round;
                meet(1, 2 * round + 1);
                if !found && !background.work.load(Ordering::SeqCst) {
                    lost_round.store(round, Ordering::Relaxed);
                }
            }
        });
        let lost_round = lost_round.into_inner();
        assert_eq!(lost_round, 0, "no thread looks for the work of this round");
    }

    /// Memory is unmapped even if a thread of the pool's background work never returns, because a
    /// separate thread unmaps memory. That thread has no heartbeat, so the watchdog ignores the
    /// time that unmapping takes.
    #[test]
    fn memory_is_unmapped_while_pool_maintenance_never_returns() {
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let maintain = move || {
            let gone = gone.lock().unwrap_or_else(PoisonError::into_inner);
            gone.recv().is_ok()
        };
        let background =
            BackgroundWorkers::start_with(1, &Heartbeats::default(), Arc::default(), maintain)
                .expect("cannot start the thread");
        let of_vm = Discarded::default();
        for _ in 0..3 {
            let memory = Arc::new([0u8; 16]);
            let held = Arc::downgrade(&memory);
            background.discard(memory, &of_vm);
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while held.strong_count() > 0 || Arc::strong_count(&of_vm.0) > 1 {
                assert!(
                    std::time::Instant::now() < deadline,
                    "the memory was not unmapped within 60 s"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        drop(go);
        background.stop();
    }
}
