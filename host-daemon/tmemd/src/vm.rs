// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM as the daemon knows it: its name, its tenant, its counters, what its manager says.
//!
//! It lives until it is removed; its storage lives as long as a connection.

use crate::config::VmConfig;
use crate::events::{Events, Kind};
use crate::latency::Histogram;
use crate::recorder::Tap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tmem_pool::Tenant;
use virtio_tmem::Report;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counters of a VM, from the daemon's start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections taken.
    pub connections: AtomicU64,
    /// Connections closed at once, since there was one already.
    pub connections_refused: AtomicU64,
    /// Virtqueues stopped for a fault of the guest or of the VMM.
    pub queues_stopped: AtomicU64,
    /// Descriptor chains answered.
    pub requests: AtomicU64,
    /// Of these, with another generation.
    pub requests_stale: AtomicU64,
    /// Of these, answered BAD or UNSUPPORTED for their shape.
    pub requests_bad: AtomicU64,
    /// Pages refused or missed because a drain's time was up.
    pub drain_cut_pages: AtomicU64,
    /// Pages refused since the VM is frozen.
    pub refused_frozen: AtomicU64,
    /// Times of PUT requests.
    pub put_latency: Histogram,
    /// Times of GET requests.
    pub get_latency: Histogram,
    /// Times of FLUSH requests; of one that takes several turns, of the last.
    pub flush_latency: Histogram,
}

/// A VM that has a socket.
pub struct Vm {
    /// As configured, but for the name and the quota, which may change.
    pub config: VmConfig,
    /// Guards its name; under it no other lock is taken.
    name: Mutex<Arc<str>>,
    /// Its storage.
    pub tenant: Tenant,
    /// Where what it asks is recorded.
    pub tap: Option<Tap>,
    /// What happened.
    pub counters: Counters,
    /// There is a connection.
    pub connected: AtomicBool,
    /// It puts no more pages.
    pub frozen: AtomicBool,
    /// Who is told what happens.
    events: Arc<Events>,
    /// Guards the last report of the driver; never held together with another lock.
    report: Mutex<Option<Report>>,
    /// Guards what a manager says is wrong with it; under it no other lock is taken.
    problem: Mutex<Option<String>>,
    /// Guards who is at the socket; under it no other lock is taken.
    line: Mutex<Line>,
    log_limit: LogLimit,
}

/// Who is at a VM's socket.
enum Line {
    Nobody,
    /// A front end; this ends its connection.
    FrontEnd(UnixStream),
    /// The VM was removed: nobody any more.
    Cut,
}

impl Vm {
    /// A VM without a connection.
    pub fn new(config: VmConfig, tenant: Tenant, tap: Option<Tap>, events: Arc<Events>) -> Vm {
        Vm {
            name: Mutex::new(config.name.as_str().into()),
            config,
            tenant,
            tap,
            counters: Counters::default(),
            connected: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            events,
            report: Mutex::new(None),
            problem: Mutex::new(None),
            line: Mutex::new(Line::Nobody),
            log_limit: LogLimit::default(),
        }
    }

    /// Its name, for messages.
    pub fn name(&self) -> Arc<str> {
        lock(&self.name).clone()
    }

    /// From now on it is called so.
    pub fn rename(&self, name: &str) {
        *lock(&self.name) = name.into();
    }

    /// What its manager says is wrong with it, kept until it is no longer.
    pub fn set_problem(&self, problem: Option<String>) {
        *lock(&self.problem) = problem;
    }

    /// What its manager said last.
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// Ends its connection, if there is one, and has no other: it was removed.
    pub fn cut(&self) {
        if let Line::FrontEnd(stream) = std::mem::replace(&mut *lock(&self.line), Line::Cut) {
            // An error means that it has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Forgets all its pages, in constant time, and what its driver reported: a connection or a
    /// generation begins or ends.
    pub fn clear(&self) {
        self.tenant.clear();
        if let Some(tap) = &self.tap {
            tap.clear();
        }
        self.clear_report();
    }

    /// Keeps what the driver reports.
    pub fn set_report(&self, report: Report) {
        let before = lock(&self.report).replace(report);
        if before.map(|report| report.state) != Some(report.state) {
            let state = crate::statistics::driver_state(report.state.get());
            self.tell(
                Kind::Driver,
                format_args!("the guest's driver says: {state}"),
            );
        }
    }

    /// What the driver reported last, on this connection.
    pub fn report(&self) -> Option<Report> {
        *lock(&self.report)
    }

    /// Tells those who listen what happens to it.
    pub fn tell(&self, kind: Kind, text: std::fmt::Arguments<'_>) {
        self.events.tell(kind, Some(&self.name()), text);
    }

    fn clear_report(&self) {
        *lock(&self.report) = None;
    }

    /// Logs a warning about this VM, at a bounded rate: a guest must not fill the host's disk.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // Said only if there are some.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(vm = %self.name(), left_out, "{message}");
        }
    }

    /// Logs why a virtqueue does no more, and tells it.
    pub fn queue_stopped(&self, virtqueue: usize, reason: &str) {
        self.tell(
            Kind::QueueStopped,
            format_args!("virtqueue {virtqueue}: {reason}"),
        );
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // Said only if there are some.
            let left_out = (left_out > 0).then_some(left_out);
            let vm = self.name();
            tracing::warn!(
                %vm, request = virtqueue, reason, left_out,
                "virtqueue {virtqueue} stopped until it is set up anew: {reason}"
            );
        }
    }

    /// Logs what a VM or its VMM did, at the same rate: it may do so in a loop.
    pub fn info(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // Said only if there are some.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::info!(vm = %self.name(), left_out, "{message}");
        }
    }
}

/// Messages of a VM, or of a control socket, that are written at once; after them one per [`LOG_PERIOD`].
const LOG_BURST: u32 = 10;
/// See [`LOG_BURST`].
const LOG_PERIOD: Duration = Duration::from_secs(5);

/// A token bucket for messages.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// Guards (messages spent of the burst, when the last was earned back, messages left out).
    state: Mutex<(u32, Option<Instant>, u64)>,
}

impl LogLimit {
    /// None: leave it out. Some: write it, and this many were left out before it.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (spent, earned, left_out) = &mut *state;
        let since = earned.get_or_insert(now);
        let back = (now.saturating_duration_since(*since).as_secs() / LOG_PERIOD.as_secs()) as u32;
        if back > 0 {
            *spent = spent.saturating_sub(back);
            *since = now;
        }
        if *spent >= LOG_BURST {
            *left_out += 1;
            return None;
        }
        *spent += 1;
        Some(std::mem::take(left_out))
    }
}

/// A connection's place at its VM, for as long as this lives.
pub struct Connected(Arc<Vm>);

/// Why a connection has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// There is a connection already.
    Taken,
    /// The VM was removed.
    Removed,
    /// The system has no second handle of the socket.
    NoHandle,
}

impl Connected {
    /// Takes the place.
    pub fn claim(vm: &Arc<Vm>, stream: &UnixStream) -> Result<Connected, NoPlace> {
        let mut line = lock(&vm.line);
        match *line {
            Line::Nobody => {}
            Line::FrontEnd(_) => return Err(NoPlace::Taken),
            Line::Cut => return Err(NoPlace::Removed),
        }
        *line = Line::FrontEnd(stream.try_clone().map_err(|_| NoPlace::NoHandle)?);
        vm.connected.store(true, Ordering::Release);
        Ok(Connected(vm.clone()))
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut line = lock(&self.0.line);
        if let Line::FrontEnd(_) = *line {
            *line = Line::Nobody;
        }
        self.0.connected.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_is_limited_and_says_what_it_left_out() {
        let limit = LogLimit::default();
        let start = Instant::now();
        for _ in 0..LOG_BURST {
            assert_eq!(limit.admit(start), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(limit.admit(start), None);
        }
        assert_eq!(limit.admit(start + LOG_PERIOD), Some(1000));
        assert_eq!(limit.admit(start + LOG_PERIOD), None);
    }
}
