// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread for what nobody should wait for: the pool's background work and unmapping memory.

use crate::memory::Memory;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tmem_pool::{Pool, Time};

/// Pages of background work between two looks at whether the daemon stops.
const MAINTAIN_PAGES: usize = 1024;

/// Without a sign of work it looks this often, since the pool's work may depend on time.
const PERIOD: Duration = Duration::from_millis(500);

/// Under load it looks no more often than this once nothing is left to do.
const PERIOD_MIN: Duration = Duration::from_millis(10);

/// Handle of the thread.
pub struct Janitor {
    work: AtomicBool,
    stop: AtomicBool,
    /// Guards memory tables to unmap. Taken alone.
    garbage: Mutex<Vec<Arc<Memory>>>,
    /// Guards the thread's handle.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Janitor {
    /// Starts the thread.
    pub fn start(pool: Arc<Pool>, epoch: Instant) -> std::io::Result<Arc<Janitor>> {
        let janitor = Arc::new(Janitor {
            work: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            garbage: Mutex::new(Vec::new()),
            thread: Mutex::new(None),
        });
        let own = janitor.clone();
        let thread = std::thread::Builder::new()
            .name("janitor".into())
            .spawn(move || {
                while !own.stop.load(Ordering::SeqCst) {
                    own.work.store(false, Ordering::SeqCst);
                    let garbage = std::mem::take(
                        &mut *own.garbage.lock().unwrap_or_else(PoisonError::into_inner),
                    );
                    drop(garbage);
                    let now = Time(epoch.elapsed().as_nanos() as u64);
                    if !pool.maintain(now, MAINTAIN_PAGES) {
                        std::thread::sleep(PERIOD_MIN);
                        if !own.work.load(Ordering::SeqCst) {
                            std::thread::park_timeout(PERIOD);
                        }
                    }
                }
            })?;
        *janitor
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(janitor)
    }

    /// To be called after anything that may leave background work; cheap.
    pub fn work_may_be_there(&self) {
        // Wakes only on the first call since the thread last looked.
        if !self.work.swap(true, Ordering::SeqCst)
            && let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner)
        {
            thread.thread().unpark();
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

    /// Ends the thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the janitor panicked");
            }
        }
    }
}
