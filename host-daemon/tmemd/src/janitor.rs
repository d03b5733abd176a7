// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The threads for what nobody should wait for: the pool's background work and unmapping memory.

use crate::memory::Memory;
use crate::outside::Outside;
use crate::usage::Stage;
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

/// Handle of the threads.
pub struct Janitor {
    /// Since a thread last looked, there may be work again.
    work: AtomicBool,
    stop: AtomicBool,
    /// Guards memory tables to unmap. Taken alone.
    garbage: Mutex<Vec<Arc<Memory>>>,
    /// Guards the threads' handles.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// What they take.
    pub stage: Stage,
}

impl Janitor {
    /// Starts so many threads.
    ///
    /// # Errors
    /// The system has none; those that were started have ended.
    pub fn start(
        pool: Arc<Pool>,
        outside: &Outside,
        threads: usize,
    ) -> std::io::Result<Arc<Janitor>> {
        let outside = outside.clone();
        Janitor::start_with(threads, move || {
            pool.maintain(Time(outside.now_ns()), MAINTAIN_PAGES)
        })
    }

    /// `maintain` does some work and tells whether more is left.
    fn start_with(
        threads: usize,
        maintain: impl Fn() -> bool + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Janitor>> {
        let maintain = Arc::new(maintain);
        let janitor = Arc::new(Janitor {
            work: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            garbage: Mutex::new(Vec::new()),
            threads: Mutex::new(Vec::new()),
            stage: Stage::default(),
        });
        for _ in 0..threads {
            let (own, maintain) = (janitor.clone(), maintain.clone());
            let thread = std::thread::Builder::new()
                .name("janitor".into())
                .spawn(move || own.run(&*maintain));
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

    fn run(&self, maintain: &dyn Fn() -> bool) {
        self.stage.join();
        while !self.stop.load(Ordering::SeqCst) {
            self.work.store(false, Ordering::SeqCst);
            self.unmap();
            let Ok(more) = catch_unwind(AssertUnwindSafe(maintain)) else {
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
        let garbage =
            std::mem::take(&mut *self.garbage.lock().unwrap_or_else(PoisonError::into_inner));
        drop(garbage);
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
        let janitor = Janitor::start_with(1, maintain).expect("a thread");
        let call = told.recv_timeout(Duration::from_secs(60));
        assert_eq!(call, Ok(1), "nobody works any more");
        janitor.stop();
    }
}
