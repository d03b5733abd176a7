// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Watchdog thread, which reports to the service manager (systemd) that the daemon is alive.
//!
//! The service manager restarts the daemon if it sends no message for the watchdog period
//! (WatchdogSec=, WATCHDOG_USEC). This covers the case that all threads are stopped or get no
//! processor time. If a single thread hangs, the daemon reports that to the service manager at
//! once. A restart costs guests their cache and no data, and QEMU reconnects by itself, so a false
//! alarm costs time only. Out of scope: detecting a hung thread, see `heartbeat.rs`.

use crate::host::heartbeat::{Heartbeats, MISSED_CHECKS_MAX};
pub use sd_notify::NotifyState;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Watchdog period if no service manager sets one. A thread that hangs is then only logged.
const PERIOD_DEFAULT: Duration = Duration::from_secs(10);

/// Number of heartbeat checks in one watchdog period (`WatchdogSec=`). A hung thread that is not a
/// partner of a worker is reported after [`MISSED_CHECKS_MAX`] + 1 checks, which is before the
/// service manager's time-out.
const CHECKS_PER_PERIOD: u32 = 8;
const _: () = assert!(MISSED_CHECKS_MAX + 1 < CHECKS_PER_PERIOD);

/// Longest time for which a message waits until the service manager's queue has room. A service
/// manager that hangs must not keep the daemon from stopping. The crate sd-notify has no limit.
const SEND_MAX: Duration = Duration::from_secs(5);

/// The thread that checks the heartbeats. Dropping the value ends the thread.
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the watchdog thread. The service manager sets its period; without a service manager,
    /// the period is 10 s.
    ///
    /// # Errors
    /// The system cannot create the thread.
    pub fn start(heartbeats: Arc<Heartbeats>) -> io::Result<Watchdog> {
        let period = sd_notify::watchdog_enabled().unwrap_or(PERIOD_DEFAULT);
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || {
                let mut hung = Vec::new();
                let wait = || stopped.recv_timeout(period / CHECKS_PER_PERIOD);
                while wait() == Err(RecvTimeoutError::Timeout) {
                    check(&heartbeats, &mut hung);
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
            tracing::error!("a bug: the watchdog thread panicked");
        }
    }
}

/// Checks all heartbeats once. `hung` contains the names of the threads that earlier checks
/// reported as hung.
fn check(heartbeats: &Heartbeats, hung: &mut Vec<String>) {
    let found = heartbeats.check();
    if found.is_empty() {
        notify(NotifyState::Watchdog);
    } else {
        if found != *hung {
            tracing::error!(
                "threads of the daemon hang: {}. The cause is a bug, or a front end that blocks \
                 them. The service manager should restart the daemon",
                found.join(", ")
            );
        }
        notify(NotifyState::WatchdogTrigger);
    }
    *hung = found;
}

/// Returns true if a service manager started the daemon and waits for its messages.
pub fn has_service_manager() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Sends a state of the daemon to the service manager, if there is one. A failure is logged and has
/// no effect on guests.
pub fn notify(state: NotifyState<'_>) {
    if let Err(error) = send(&state) {
        // systemd waits for READY=1, which is sent once only.
        if matches!(state, NotifyState::Ready) {
            tracing::warn!("the service manager was not told that the daemon is ready: {error}");
        } else {
            tracing::debug!("the service manager cannot be notified: {error}");
        }
    }
}

fn send(state: &NotifyState<'_>) -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(SEND_MAX))?;
    match path.as_bytes() {
        [b'@', name @ ..] => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        _ => socket.connect(&path)?,
    }
    let message = state.to_string();
    loop {
        match socket.send(message.as_bytes()) {
            // A signal, such as that for a reload, must not lose the message.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            sent => return sent.map(drop),
        }
    }
}
