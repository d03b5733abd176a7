// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The threads for what nobody should wait for: the pool's background work and unmapping memory.

use crate::memory::Memory;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tmem_pool::{Pool, Time};

/// Pages of background work between two looks at whether the daemon stops.
const MAINTAIN_PAGES: usize = 1024;

/// Without a sign of work it looks this often, since the pool's work may depend on time.
const PERIOD: Duration = Duration::from_millis(500);

/// Under load it looks no more often than this once nothing is left to do. A VM has some hundred
/// pages that wait for it at least, more than it puts in this time.
const PERIOD_MIN: Duration = Duration::from_millis(1);

/// Handle of the threads.
pub struct Janitor {
    /// Since a thread last looked, there may be work again.
    work: AtomicBool,
    stop: AtomicBool,
    /// Guards memory tables to unmap. Taken alone.
    garbage: Mutex<Vec<Arc<Memory>>>,
    /// Guards the threads' handles.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Janitor {
    /// Starts so many threads.
    ///
    /// # Errors
    /// The system has none; those that were started have ended.
    pub fn start(pool: Arc<Pool>, epoch: Instant, threads: usize) -> std::io::Result<Arc<Janitor>> {
        let janitor = Arc::new(Janitor {
            work: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            garbage: Mutex::new(Vec::new()),
            threads: Mutex::new(Vec::new()),
        });
        for _ in 0..threads {
            let (own, pool) = (janitor.clone(), pool.clone());
            let thread = std::thread::Builder::new()
                .name("janitor".into())
                .spawn(move || own.run(&pool, epoch));
            match thread {
                Ok(thread) => janitor.handles().push(thread),
                Err(error) => {
                    janitor.stop();
                    return Err(error);
                }
            }
        }
        Ok(janitor)
    }

    fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, pool: &Pool, epoch: Instant) {
        while !self.stop.load(Ordering::SeqCst) {
            self.work.store(false, Ordering::SeqCst);
            let garbage =
                std::mem::take(&mut *self.garbage.lock().unwrap_or_else(PoisonError::into_inner));
            drop(garbage);
            let now = Time(epoch.elapsed().as_nanos() as u64);
            if !pool.maintain(now, MAINTAIN_PAGES) {
                std::thread::sleep(PERIOD_MIN);
                if !self.work.load(Ordering::SeqCst) {
                    std::thread::park_timeout(PERIOD);
                }
            }
        }
    }

    /// To be called after anything that may leave background work; cheap.
    pub fn work_may_be_there(&self) {
        // Wakes only on the first call since a thread last looked.
        if !self.work.swap(true, Ordering::SeqCst) {
            for thread in &*self.handles() {
                thread.thread().unpark();
            }
        }
    }

    /// Unmaps a memory table some time soon, if nobody else has it.
    pub fn discard(&self, memory: Arc<Memory>) {
        self.garbage
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(memory);
        self.work_may_be_there();
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let threads = std::mem::take(&mut *self.handles());
        for thread in threads {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a janitor panicked");
            }
        }
    }
}
