// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tells the service manager that the daemon lives, for as long as it does.
//!
//! The manager ends and restarts a daemon of which it hears nothing for its period (WatchdogSec=,
//! WATCHDOG_USEC); that covers one that is stopped or starved as a whole. Of a single thread that
//! hangs, the manager is told at once. Guests lose their cache by it and no byte, and QEMU finds the
//! new daemon by itself, so a wrong alarm costs time only. Never here: which threads, see `heartbeats.rs`.

use crate::host::heartbeat::{Heartbeats, MISSED_CHECKS_MAX};
pub use sd_notify::NotifyState;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Without a service manager that asks for another one: a hung thread is logged, then.
const PERIOD_DEFAULT: Duration = Duration::from_secs(10);

/// Looks in a period. A thread that hangs is told of after [`MISSED_CHECKS_MAX`] and one more of them, which
/// is sooner than the manager would miss a word.
const CHECKS_PER_PERIOD: u32 = 8;
const _: () = assert!(MISSED_CHECKS_MAX + 1 < CHECKS_PER_PERIOD);

/// The thread that looks; dropping this ends it.
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to look, in the period that the service manager asks for.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn start(heartbeats: Arc<Heartbeats>) -> io::Result<Watchdog> {
        let period = sd_notify::watchdog_enabled().unwrap_or(PERIOD_DEFAULT);
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || {
                let mut hung = Vec::new();
                let wait = || stopped.recv_timeout(period / CHECKS_PER_PERIOD);
                while wait() == Err(RecvTimeoutError::Timeout) {
                    look(&heartbeats, &mut hung);
                }
            })?;
        Ok(Watchdog {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the watchdog panicked");
        }
    }
}

/// `hung` is what was told of already.
fn look(heartbeats: &Heartbeats, hung: &mut Vec<String>) {
    let found = heartbeats.look();
    if found.is_empty() {
        tell(NotifyState::Watchdog);
    } else {
        if found != *hung {
            tracing::error!(
                "a bug, or a front end that blocks it: the daemon hangs at {}; it is to be ended and \
                 started anew",
                found.join(", ")
            );
        }
        tell(NotifyState::WatchdogTrigger);
    }
    *hung = found;
}

/// Tells the service manager, if there is one. It is none of the guests' business if it does not
/// listen.
pub fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!("the service manager cannot be told: {error}");
    }
}
