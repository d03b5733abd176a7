// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The threads for what nobody should wait for: the pool's background work, and unmapping memory.
//!
//! Who unmaps has a thread of its own, since that takes as long as VMs have memory: seconds, in which
//! the pool's work goes on. For the same reason it has no heart that somebody watches.

use crate::host::clock::ClockAndEntropy;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::host::sandbox::{self, ThreadKind};
use crate::host::usage::{BackgroundTime, Stage};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tmem_pool::{Pool, Time};

/// Pages of background work between two looks at whether the daemon stops.
const MAINTAIN_PAGES: usize = 1024;

/// Without a sign of work it looks this often, since the pool's work may depend on time.
const PERIOD: Duration = Duration::from_millis(500);

/// Under load it looks no more often than this once nothing is left to do. A VM has some hundred
/// pages that wait for it at least, more than it puts in this time.
const PERIOD_MIN: Duration = Duration::from_millis(1);

/// Memory tables of a VM that wait to be unmapped. A front end that changes its table faster unmaps the
/// others itself: they count against limits that all VMs share.
pub const DISCARDED_MAX: usize = 4;

/// How many memory tables of a VM wait to be unmapped, or are just being: each has a clone.
#[derive(Debug, Default)]
pub struct Discarded(Arc<()>);

/// A memory table that waits to be unmapped, and is counted until then.
struct DiscardedMemory {
    _memory: Arc<dyn Any + Send + Sync>,
    /// After the memory, so that it is dropped after it.
    _counted: Arc<()>,
}

/// Handle of the threads.
pub struct BackgroundWorkers {
    /// Since a thread last looked, there may be work again.
    work: AtomicBool,
    stop: AtomicBool,
    /// Guards memory tables to unmap. Taken alone.
    discarded: Mutex<Vec<DiscardedMemory>>,
    /// Guards the handles of the threads that do the pool's work.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Guards the handle of the one that unmaps. Taken alone.
    unmapper: Mutex<Option<JoinHandle<()>>>,
    /// What they take.
    pub stage: Stage,
    /// And what for, of those that do the pool's work.
    pub cpu_time: Arc<BackgroundTime>,
}

impl BackgroundWorkers {
    /// Starts so many threads, and one more that unmaps; 0: the caller is all of them.
    ///
    /// # Errors
    /// The system has none; those that were started have ended.
    pub fn start(
        pool: Arc<Pool>,
        clock: &ClockAndEntropy,
        threads: usize,
        heartbeats: &Heartbeats,
    ) -> std::io::Result<Arc<BackgroundWorkers>> {
        let clock = clock.clone();
        let cpu_time: Arc<BackgroundTime> = Arc::default();
        BackgroundWorkers::start_with(threads, heartbeats, cpu_time.clone(), move || {
            let mut timed = cpu_time.begin();
            let now = Time(clock.now_ns());
            pool.maintain_telling(now, MAINTAIN_PAGES, &mut |work| timed.switch_to(work))
        })
    }

    /// `maintain` does some work and tells whether more is left.
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
            // At once if there is more.
            std::thread::park();
        }
    }

    fn run(&self, maintain: &dyn Fn() -> bool, heartbeat: &Heartbeat) {
        sandbox::narrow(ThreadKind::Data);
        self.stage.join();
        while !self.stop.load(Ordering::SeqCst) {
            self.work.store(false, Ordering::SeqCst);
            heartbeat.work();
            let done = catch_unwind(AssertUnwindSafe(maintain));
            heartbeat.rest();
            let Ok(more) = done else {
                // Without this work no VM has room soon. A panic that comes again and again must not
                // fill the log.
                tracing::error!("a bug in the engine: background work panicked; it goes on");
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

    /// Unmaps what was discarded until now.
    pub fn unmap(&self) {
        let discarded = std::mem::take(
            &mut *self
                .discarded
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        drop(discarded);
    }

    /// To be called after anything that may leave background work; cheap.
    pub fn wake(&self) {
        // Wakes only on the first call since a thread last looked.
        if !self.work.swap(true, Ordering::SeqCst) {
            for thread in &*self.handles() {
                thread.thread().unpark();
            }
        }
    }

    /// Unmaps a memory table some time soon, if nobody else has it; at once, if of its VM too many
    /// wait already.
    pub fn discard(&self, memory: Arc<dyn Any + Send + Sync>, of_vm: &Discarded) {
        let counted = of_vm.0.clone();
        // One is the VM's own, and one this.
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

    /// Ends the threads.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let threads = std::mem::take(&mut *self.handles());
        let unmapper = self.unmapper().take();
        for thread in threads.into_iter().chain(unmapper) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a background worker panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_panic_does_not_end_it() {
        let (tell, told) = mpsc::channel();
        let tell = Mutex::new(tell);
        let calls = std::sync::atomic::AtomicUsize::new(0);
        let maintain = move || {
            let call = calls.fetch_add(1, Ordering::SeqCst);
            assert!(call > 0, "the first call panics");
            let tell = tell.lock().unwrap_or_else(PoisonError::into_inner);
            // An error: the test has seen enough.
            let _ = tell.send(call);
            false
        };
        let background =
            BackgroundWorkers::start_with(1, &Heartbeats::default(), Arc::default(), maintain)
                .expect("a thread");
        let call = told.recv_timeout(Duration::from_secs(60));
        assert_eq!(call, Ok(1), "nobody works any more");
        background.stop();
    }

    /// And how long that takes is nobody's business: the watchdog looks at no heart of it.
    #[test]
    fn memory_is_unmapped_while_the_pool_works_without_an_end() {
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let maintain = move || {
            let gone = gone.lock().unwrap_or_else(PoisonError::into_inner);
            gone.recv().is_ok()
        };
        let background =
            BackgroundWorkers::start_with(1, &Heartbeats::default(), Arc::default(), maintain)
                .expect("a thread");
        let of_vm = Discarded::default();
        for _ in 0..3 {
            let memory = Arc::new([0u8; 16]);
            let held = Arc::downgrade(&memory);
            background.discard(memory, &of_vm);
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while held.strong_count() > 0 || Arc::strong_count(&of_vm.0) > 1 {
                assert!(std::time::Instant::now() < deadline, "it waits");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        drop(go);
        background.stop();
    }
}
