// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM as the daemon knows it: its name, its tenant, its counters, what its manager says.
//!
//! It lives until it is removed; its storage lives as long as a connection.

use crate::bell;
use crate::config::VmConfig;
use crate::event_limit::EventLimit;
use crate::events::{Events, Kind};
use crate::janitor::Discarded;
use crate::latency::Histogram;
use crate::log_limit::LogLimit;
use crate::rate::Rate;
use crate::recorder::Tap;
use crate::sockets::Stranger;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tmem_pool::Tenant;
use virtio_tmem::{Latencies, Report};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counters of a VM, from the daemon's start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections taken.
    pub connections: AtomicU64,
    /// Connections closed at once: there was one already, or the socket is not for them.
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
    /// Pages refused or missed because the VM asked for more than its rate.
    pub limited_pages: AtomicU64,
    /// Pages refused since the VM is frozen.
    pub refused_frozen: AtomicU64,
    /// Time that workers were at its requests.
    pub turns_ns: AtomicU64,
    /// Times of PUT requests.
    pub put_latency: Histogram,
    /// Times of GET requests.
    pub get_latency: Histogram,
    /// Times of FLUSH requests; of one that takes several turns, of the last.
    pub flush_latency: Histogram,
    /// Times that its queues waited for a turn of their worker.
    pub wait_latency: Histogram,
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
    /// How much it may ask for.
    pub rate: Rate,
    /// What happened.
    pub counters: Counters,
    /// There is a connection.
    pub connected: AtomicBool,
    /// It puts no more pages.
    pub frozen: AtomicBool,
    /// Who is told what happens.
    events: Arc<Events>,
    /// How much of it, of what the VM can cause.
    event_limit: EventLimit,
    /// Guards the last report of the driver; never held together with another lock.
    report: Mutex<Option<Report>>,
    /// Guards the last latencies of the driver; never held together with another lock.
    latencies: Mutex<Option<Latencies>>,
    /// Guards what a manager says is wrong with it; under it no other lock is taken.
    problem: Mutex<Option<String>>,
    /// Guards who is at the socket; under it no other lock is taken.
    line: Mutex<Line>,
    log_limit: LogLimit,
    /// Memory tables of its connections, also of those before, that are not unmapped yet.
    pub discarded: Discarded,
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
            rate: Rate::default(),
            counters: Counters::default(),
            connected: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            events,
            event_limit: EventLimit::default(),
            report: Mutex::new(None),
            latencies: Mutex::new(None),
            problem: Mutex::new(None),
            line: Mutex::new(Line::Nobody),
            log_limit: LogLimit::of_vm(),
            discarded: Discarded::default(),
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

    /// Ends its connection, if there is one; it may have another.
    pub fn hang_up(&self) {
        if let Line::FrontEnd(stream) = &*lock(&self.line) {
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

    /// Keeps how long the driver's readers waited, by its own account.
    pub fn set_latencies(&self, latencies: Latencies) {
        *lock(&self.latencies) = Some(latencies);
    }

    /// What the driver said of them last, on this connection; older ones never do.
    pub fn latencies(&self) -> Option<Latencies> {
        *lock(&self.latencies)
    }

    /// Tells those who listen what happens to it; what it can cause in a loop, at a bounded rate.
    pub fn tell(&self, kind: Kind, text: std::fmt::Arguments<'_>) {
        match kind.sort() {
            None => self.tell_now(kind, text),
            Some(_) => {
                let tell = |kind, text: std::fmt::Arguments<'_>| self.tell_now(kind, text);
                self.event_limit.add(Instant::now(), kind, text, tell);
            }
        }
    }

    /// Tells what was left out until now and says how it is, if there is room.
    pub fn catch_up(&self, now: Instant) {
        let tell = |kind, text: std::fmt::Arguments<'_>| self.tell_now(kind, text);
        self.event_limit.catch_up(now, tell);
    }

    fn tell_now(&self, kind: Kind, text: std::fmt::Arguments<'_>) {
        self.events.tell(kind, Some(&self.name()), text);
    }

    /// Counts a connection that is closed at once, and tells why.
    pub fn refused(&self, why: std::fmt::Arguments<'_>) {
        self.counters
            .connections_refused
            .fetch_add(1, Ordering::Relaxed);
        self.tell(Kind::ConnectionRefused, why);
    }

    /// Its socket is not for whoever connected.
    pub fn refuse(&self, stranger: &Stranger) {
        self.refused(format_args!("{stranger}"));
        self.warn(format_args!(
            "a connection to {} is refused, {stranger}; have the VM's QEMU run as that user, or name its user: \
             <seclabel model='dac'> of the domain, tmem-hook --owner, or owner of its [[vm]] or --vm",
            self.config.socket.display()
        ));
    }

    fn clear_report(&self) {
        *lock(&self.report) = None;
        *lock(&self.latencies) = None;
    }

    /// Notifies the guest or its front end through an eventfd, without waiting. Counts and logs an interrupt that
    /// the kernel does not deliver. The guest goes on at the deadline of its driver.
    pub fn interrupt(&self, fd: &OwnedFd) {
        if let Err(error) = bell::ring(fd) {
            self.warn(format_args!(
                "an interrupt is lost: {error}; the guest goes on when its driver's deadline has passed"
            ));
        }
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
    use crate::event_limit::{BURST, PERIOD};
    use tmem_pool::{Pool, PoolConfig, TenantSpec};
    use virtio_tmem as wire;
    use zerocopy::FromZeros;

    /// It would push what happens to others out of the queue of who listens.
    #[test]
    fn a_guest_that_reports_in_a_loop_drowns_nobody() {
        let pool = Pool::new(PoolConfig {
            size_bytes: 64 << 20,
            size_max_bytes: 0,
            seed: 1,
            policy: Default::default(),
        })
        .expect("address space");
        let events = Arc::new(Events::default());
        let vm = |name: &str| {
            let config: VmConfig = format!("name={name},socket=none").parse().expect("good");
            let spec = TenantSpec {
                name: name.into(),
                trust_domain: None,
                quota: config.quota,
            };
            let tenant = pool.add_tenant(spec).expect("fits");
            Vm::new(config, tenant, None, events.clone())
        };
        let (loud, other) = (vm("loud"), vm("other"));
        let subscription = events.subscribe().expect("a descriptor");
        for nth in 0..5000 {
            let mut report = Report::new_zeroed();
            report.state = [wire::R_ON, wire::R_OFF][nth % 2].into();
            loud.set_report(report);
            if nth == 2500 {
                other.queue_stopped(1, "as it happens");
            }
        }
        let taken = subscription.take();
        assert_eq!(taken[0].lost, 0);
        let of = |name| {
            taken
                .iter()
                .filter(move |event| event.vm.as_deref() == Some(name))
        };
        assert_eq!(of("other").count(), 1);
        // One or another period may have passed.
        assert!(of("loud").count() < 2 * BURST as usize);
        loud.catch_up(Instant::now() + 2 * PERIOD);
        let taken = subscription.take();
        let last = taken.last().expect("the last was left out");
        assert_eq!(
            (last.kind.as_str(), last.vm.as_deref()),
            ("driver", Some("loud"))
        );
        assert!(
            last.text.starts_with("the guest's driver says: off"),
            "{}",
            last.text
        );
    }
}
