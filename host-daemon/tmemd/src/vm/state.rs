// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a VM: its name, tenant, counters, and what its driver and manager report.
//!
//! A [`Vm`] exists until the VM is removed. The pages of its tenant exist as long as a connection.

use crate::config::settings::VmConfig;
use crate::events::bus::{EventKind, Events};
use crate::events::limit::EventLimit;
use crate::host::background::Discarded;
use crate::socket::listener::UnauthorizedPeer;
use crate::util::histogram::Histogram;
use crate::util::log_limit::LogLimit;
use crate::util::request_rate::RequestRate;
use crate::vm::recorder::Tap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tmem_pool::Tenant;
use virtio_tmem::{self as wire, Latencies, Report};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counters of a VM since the daemon's start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Number of accepted connections.
    pub connections: AtomicU64,
    /// Number of refused connections: one existed already, or the peer was not authorized.
    pub connections_refused: AtomicU64,
    /// Number of virtqueues that were stopped because of a fault of the guest or the VMM.
    pub queues_stopped: AtomicU64,
    /// Number of answered descriptor chains.
    pub requests: AtomicU64,
    /// Number of requests that were answered STALE, because they carried another generation than
    /// the current one.
    pub requests_stale: AtomicU64,
    /// Number of requests that were answered BAD or UNSUPPORTED because of their shape.
    pub requests_bad: AtomicU64,
    /// Number of pages that were answered with REFUSED, MISS or GONE because the time limit of a
    /// drain expired.
    pub drain_cut_pages: AtomicU64,
    /// Number of pages that were answered with REFUSED, MISS or GONE because the VM exceeded its
    /// rate.
    pub limited_pages: AtomicU64,
    /// Number of pages that were refused because the VM is frozen.
    pub refused_frozen: AtomicU64,
    /// Time in ns that workers spent on the VM's requests.
    pub slices_ns: AtomicU64,
    /// Latency of PUT requests.
    pub put_latency: Histogram,
    /// Latency of GET requests.
    pub get_latency: Histogram,
    /// Latency of FLUSH requests, from the first slice to the last.
    pub flush_latency: Histogram,
    /// Latency of REF requests.
    pub ref_latency: Histogram,
    /// Time that the VM's queues waited for a slice of their worker.
    pub wait_latency: Histogram,
}

/// State of a VM that the daemon serves.
pub struct Vm {
    /// Configuration of the VM when it was added. Name and quota may have changed since.
    pub config: VmConfig,
    /// Guards the VM's name. Leaf lock.
    name: Mutex<Arc<str>>,
    /// Tenant of the pool that holds the VM's pages.
    pub tenant: Tenant,
    /// Recorder of the VM's requests; None if no trace is recorded.
    pub tap: Option<Tap>,
    /// The VM's rate limit.
    pub rate: RequestRate,
    /// The VM's counters.
    pub counters: Counters,
    /// Whether a front end is connected.
    pub connected: AtomicBool,
    /// Whether the VM is frozen, so that its puts are refused.
    pub frozen: AtomicBool,
    /// Receives the VM's events.
    events: Arc<Events>,
    /// Bounds the events that the VM can cause.
    event_limit: EventLimit,
    /// Guards the last report of the driver. Leaf lock.
    report: Mutex<Option<Report>>,
    /// Guards the last latencies of the driver. Leaf lock.
    latencies: Mutex<Option<Latencies>>,
    /// Guards the problem that a manager reported. Leaf lock.
    problem: Mutex<Option<String>>,
    /// Guards the slot of the front end. Leaf lock.
    front_end: Mutex<FrontEndSlot>,
    log_limit: LogLimit,
    /// Counts memory tables of all connections of the VM that are not unmapped yet.
    pub discarded: Discarded,
}

/// Slot for the front end of a VM.
enum FrontEndSlot {
    Free,
    /// A front end is connected. Shutting the stream down ends its connection.
    Connected(UnixStream),
    /// The VM was removed; no front end can connect.
    Removed,
}

impl Vm {
    /// Creates a VM without a connection.
    pub fn new(config: VmConfig, tenant: Tenant, tap: Option<Tap>, events: Arc<Events>) -> Vm {
        Vm {
            name: Mutex::new(config.name.as_str().into()),
            config,
            tenant,
            tap,
            rate: RequestRate::default(),
            counters: Counters::default(),
            connected: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            events,
            event_limit: EventLimit::default(),
            report: Mutex::new(None),
            latencies: Mutex::new(None),
            problem: Mutex::new(None),
            front_end: Mutex::new(FrontEndSlot::Free),
            log_limit: LogLimit::of_vm(),
            discarded: Discarded::default(),
        }
    }

    /// Returns the VM's name, for messages.
    pub fn name(&self) -> Arc<str> {
        lock(&self.name).clone()
    }

    /// Changes the VM's name.
    pub fn rename(&self, name: &str) {
        *lock(&self.name) = name.into();
    }

    /// Sets or clears the problem that the VM's manager reports.
    pub fn set_problem(&self, problem: Option<String>) {
        *lock(&self.problem) = problem;
    }

    /// Returns the problem that the VM's manager reported last.
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// Marks the VM as removed: ends its connection and admits no other.
    pub fn remove(&self) {
        if let FrontEndSlot::Connected(stream) =
            std::mem::replace(&mut *lock(&self.front_end), FrontEndSlot::Removed)
        {
            // An error means that the connection has already ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends the VM's connection, if there is one. The front end may reconnect.
    pub fn hang_up(&self) {
        if let FrontEndSlot::Connected(stream) = &*lock(&self.front_end) {
            // An error means that the connection has already ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Drops all pages of the VM in constant time, and the driver's report. It is called when a
    /// connection or a generation begins or ends.
    pub fn clear(&self) {
        self.tenant.clear();
        if let Some(tap) = &self.tap {
            tap.clear();
        }
        self.clear_report();
    }

    /// Stores a report of the driver. Sends an event if its state changed.
    pub fn set_report(&self, report: Report) {
        let before = lock(&self.report).replace(report);
        if before.map(|report| report.state) != Some(report.state) {
            let state = driver_state(report.state.get());
            self.emit(
                EventKind::Driver,
                format_args!("the guest's driver says: {state}"),
            );
        }
    }

    /// Returns the last report of the driver on this connection.
    pub fn report(&self) -> Option<Report> {
        *lock(&self.report)
    }

    /// Stores the latencies that the driver reports for its readers.
    pub fn set_latencies(&self, latencies: Latencies) {
        *lock(&self.latencies) = Some(latencies);
    }

    /// Returns the last latencies of the driver on this connection; None for an older driver.
    pub fn latencies(&self) -> Option<Latencies> {
        *lock(&self.latencies)
    }

    /// Sends an event about the VM. Events that the VM can cause in a loop are sent at a bounded
    /// rate.
    pub fn emit(&self, kind: EventKind, text: std::fmt::Arguments<'_>) {
        match kind.sort() {
            None => self.emit_now(kind, text),
            Some(_) => {
                let emit = |kind, text: std::fmt::Arguments<'_>| self.emit_now(kind, text);
                self.event_limit.add(Instant::now(), kind, text, emit);
            }
        }
    }

    /// Sends events that waited, as far as the bound permits.
    pub fn catch_up(&self, now: Instant) {
        let emit = |kind, text: std::fmt::Arguments<'_>| self.emit_now(kind, text);
        self.event_limit.catch_up(now, emit);
    }

    fn emit_now(&self, kind: EventKind, text: std::fmt::Arguments<'_>) {
        self.events.emit(kind, Some(&self.name()), text);
    }

    /// Counts a refused connection and sends an event with the reason.
    pub fn refused(&self, why: std::fmt::Arguments<'_>) {
        self.counters
            .connections_refused
            .fetch_add(1, Ordering::Relaxed);
        self.emit(EventKind::ConnectionRefused, why);
    }

    /// Reports a peer that the VM's socket does not admit.
    pub fn refuse(&self, peer: &UnauthorizedPeer) {
        self.refused(format_args!("{peer}"));
        self.warn(format_args!(
            "a connection to {} is refused, {peer}; have the VM's QEMU run as that user, or name its user: \
             <seclabel model='dac'> of the domain, tmem-hook --owner, or owner of its [[vm]] or --vm",
            self.config.socket.display()
        ));
    }

    fn clear_report(&self) {
        *lock(&self.report) = None;
        *lock(&self.latencies) = None;
    }

    /// Logs a warning about the VM at a bounded rate, because a guest must not fill the host's
    /// disk.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line omits the number of left-out lines if it is 0.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(vm = %self.name(), left_out, "{message}");
        }
    }

    /// Logs why a virtqueue stopped, and sends an event.
    pub fn queue_stopped(&self, virtqueue: usize, reason: &str) {
        self.emit(
            EventKind::QueueStopped,
            format_args!("virtqueue {virtqueue}: {reason}"),
        );
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line omits the number of left-out lines if it is 0.
            let left_out = (left_out > 0).then_some(left_out);
            let vm = self.name();
            tracing::warn!(
                %vm, request = virtqueue, reason, left_out,
                "virtqueue {virtqueue} stopped until it is set up again: {reason}"
            );
        }
    }

    /// Logs an action of the VM or its VMM at a bounded rate, because they may repeat it in a loop.
    pub fn info(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line omits the number of left-out lines if it is 0.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::info!(vm = %self.name(), left_out, "{message}");
        }
    }
}

/// Returns the name of a state that the guest driver reports.
pub fn driver_state(state: u32) -> &'static str {
    match state {
        wire::R_OFF => "off",
        wire::R_ON => "on",
        wire::R_OFFLINE => "offline",
        wire::R_TRIPPED => "tripped",
        wire::R_POISONED => "poisoned",
        _ => "unknown",
    }
}

/// Slot that a connection occupies at its VM. Dropping the value frees the slot.
pub struct Connected(Arc<Vm>);

/// Reason why a connection gets no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// Another front end is connected.
    Taken,
    /// The VM was removed.
    Removed,
    /// The system has no descriptor left.
    NoHandle,
}

impl Connected {
    /// Occupies the VM's slot for a connection.
    ///
    /// # Errors
    /// The slot is taken, the VM was removed, or the system lacks a descriptor: see [`NoPlace`].
    pub fn claim(vm: &Arc<Vm>, stream: &UnixStream) -> Result<Connected, NoPlace> {
        let mut front_end = lock(&vm.front_end);
        match *front_end {
            FrontEndSlot::Free => {}
            FrontEndSlot::Connected(_) => return Err(NoPlace::Taken),
            FrontEndSlot::Removed => return Err(NoPlace::Removed),
        }
        *front_end = FrontEndSlot::Connected(stream.try_clone().map_err(|_| NoPlace::NoHandle)?);
        vm.connected.store(true, Ordering::Release);
        Ok(Connected(vm.clone()))
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut front_end = lock(&self.0.front_end);
        if let FrontEndSlot::Connected(_) = *front_end {
            *front_end = FrontEndSlot::Free;
        }
        self.0.connected.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::limit::{BURST, PERIOD};
    use tmem_pool::{Engine, EngineConfig, TenantSpec};
    use zerocopy::FromZeros;

    /// A guest that changes its state in a loop must not displace events of other VMs from a
    /// subscriber's queue.
    #[test]
    fn reports_in_a_loop_do_not_displace_events_of_other_vms() {
        let engine = Engine::new(EngineConfig::new(64 << 20, 1))
            .expect("cannot reserve the pool's address space");
        let events = Arc::new(Events::default());
        let vm = |name: &str| {
            let config: VmConfig = format!("name={name},socket=none")
                .parse()
                .expect("the VM's settings were refused");
            let spec = TenantSpec::new(name, config.quota);
            let tenant = engine
                .add_tenant(spec)
                .expect("the pool cannot add the tenant");
            Vm::new(config, tenant, None, events.clone())
        };
        let (loud, other) = (vm("loud"), vm("other"));
        let subscription = events
            .subscribe()
            .expect("cannot create the subscription's eventfd");
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
        // One or two periods of the limit may have passed during the test, so that more events than
        // the burst were sent.
        assert!(of("loud").count() < 2 * BURST as usize);
        loud.catch_up(Instant::now() + 2 * PERIOD);
        let taken = subscription.take();
        let last = taken
            .last()
            .expect("the last state of the driver was not reported");
        assert_eq!(
            (last.kind.as_str(), last.vm.as_deref()),
            ("driver", Some("loud"))
        );
        assert!(
            last.text.starts_with("the guest's driver says: off"),
            "the last event is not the driver's last state: {}",
            last.text
        );
    }
}
