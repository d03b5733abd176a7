// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a VM: its name, tenant and counters, and what its driver and its manager report.
//!
//! A [`Vm`] exists until the VM is removed. The VM's pages are in the pool only while a front end
//! (VMM) is connected.

use crate::config::settings::VmConfig;
use crate::events::bus::{EventKind, Events};
use crate::events::limit::EventLimit;
use crate::host::background::Discarded;
use crate::memory::budget::MemoryAccount;
use crate::socket::listener::UnauthorizedPeer;
use crate::util::histogram::Histogram;
use crate::util::log_limit::LogLimit;
use crate::util::request_rate::RequestRate;
use crate::vm::recorder::Tap;
use crate::vm::swapped::Swapped;
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

/// Declares the counters of a VM, which are rows of the table of statistics.
macro_rules! declare {
    (
        {}
        pool_gauges $pool_gauges:tt
        pool $pool:tt
        pool_counters $pool_counters:tt
        vm $vm:tt
        tenant_gauges $tenant_gauges:tt
        tenant_counters_with_sums $tenant_counters_with_sums:tt
        tenant_counters $tenant_counters:tt
        vm_counters { $($(#[$counter_doc:meta])* $counter:ident $counter_row:tt;)* }
        vm_latencies { $($(#[$latency_doc:meta])* $latency:ident $latency_row:tt;)* }
        $($other:ident $other_rows:tt)*
    ) => {
        /// Counters of a VM since the daemon's start.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$counter_doc])* pub $counter: AtomicU64,)*
            $($(#[$latency_doc])* pub $latency: Histogram,)*
            /// Time in ns that workers spent on the VM's requests.
            pub slices_ns: AtomicU64,
        }
    };
}

tmem_trace::statistics!(declare);

/// State of a VM that the daemon serves.
pub struct Vm {
    /// Configuration of the VM when it was added. Its name and quota may have changed since.
    pub config: VmConfig,
    /// Guards the VM's name. Leaf lock.
    name: Mutex<Arc<str>>,
    /// Tenant of the VM: its record in the pool, with its pages and its quota.
    pub tenant: Tenant,
    /// Recorder of the VM's requests; None if no trace is recorded.
    pub tap: Option<Tap>,
    /// Rate limit of the VM in pages per second.
    pub rate: RequestRate,
    /// Counters of the VM, for the statistics.
    pub counters: Counters,
    /// Whether a front end (VMM) is connected to the VM's socket.
    pub connected: AtomicBool,
    /// Whether the VM is frozen. Puts of a frozen VM are refused.
    pub frozen: AtomicBool,
    /// Whether the host has swapped out the VM's memory.
    pub swapped: Swapped,
    /// Subscribers that receive the VM's events.
    events: Arc<Events>,
    /// Limits the rate of the events that the VM can cause.
    event_limit: EventLimit,
    /// Guards the last report that the guest's driver sent. Leaf lock.
    report: Mutex<Option<Report>>,
    /// Guards the last latencies that the guest's driver sent. Leaf lock.
    latencies: Mutex<Option<Latencies>>,
    /// Guards the problem that the VM's manager reported. Leaf lock.
    problem: Mutex<Option<String>>,
    /// Guards the slot for the VM's front end. Leaf lock.
    front_end: Mutex<FrontEndSlot>,
    log_limit: LogLimit,
    /// Mapped guest memory of all connections of the VM, and its maximum. The registry gives all
    /// VMs one budget.
    pub memory: Arc<MemoryAccount>,
    /// Counts the memory tables that wait to be unmapped, of all connections of the VM.
    pub discarded: Discarded,
}

/// Slot for the front end of a VM. Only one front end can be connected at a time.
enum FrontEndSlot {
    Free,
    /// A front end is connected. Shutting this stream down ends the connection.
    Connected(UnixStream),
    /// The VM was removed, so no front end may connect.
    Removed,
}

impl Vm {
    /// Creates a VM to which no front end is connected.
    pub fn new(config: VmConfig, tenant: Tenant, tap: Option<Tap>, events: Arc<Events>) -> Vm {
        Vm {
            memory: Arc::new(MemoryAccount::new(&Arc::default(), config.memory_max_bytes)),
            name: Mutex::new(config.name.as_str().into()),
            config,
            tenant,
            tap,
            rate: RequestRate::default(),
            counters: Counters::default(),
            connected: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            swapped: Swapped::default(),
            events,
            event_limit: EventLimit::default(),
            report: Mutex::new(None),
            latencies: Mutex::new(None),
            problem: Mutex::new(None),
            front_end: Mutex::new(FrontEndSlot::Free),
            log_limit: LogLimit::for_vm(),
            discarded: Discarded::default(),
        }
    }

    /// Returns the VM's current name, for messages.
    pub fn name(&self) -> Arc<str> {
        lock(&self.name).clone()
    }

    /// Changes the VM's name, for example when a migration within this host ends.
    pub fn rename(&self, name: &str) {
        *lock(&self.name) = name.into();
    }

    /// Sets the problem that the VM's manager reports, or clears it.
    pub fn set_problem(&self, problem: Option<String>) {
        *lock(&self.problem) = problem;
    }

    /// Returns the problem that the VM's manager reported last; None if there is none.
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// Marks the VM as removed and ends its connection. From then on, no front end can connect.
    pub fn remove(&self) {
        if let FrontEndSlot::Connected(stream) =
            std::mem::replace(&mut *lock(&self.front_end), FrontEndSlot::Removed)
        {
            // If the shutdown fails, the connection has already ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends the VM's connection, if there is one. The front end may reconnect.
    pub fn hang_up(&self) {
        if let FrontEndSlot::Connected(stream) = &*lock(&self.front_end) {
            // If the shutdown fails, the connection has already ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Drops the driver's report and, in constant time, all pages of the VM. The connection's
    /// control thread calls this function when a connection begins or ends, or a reset begins
    /// another generation of the device.
    pub fn clear(&self) {
        self.tenant.clear();
        if let Some(tap) = &self.tap {
            tap.clear();
        }
        self.clear_report();
    }

    /// Stores a report of the guest's driver. Sends an event if the driver's state has changed.
    pub fn set_report(&self, report: Report) {
        let before = lock(&self.report).replace(report);
        if before.map(|report| report.state) != Some(report.state) {
            let state = driver_state(report.state.get());
            self.emit(
                EventKind::Driver,
                format_args!("the guest's driver reports the state {state}"),
            );
        }
    }

    /// Returns the last report that the driver has sent on this connection; None before the first.
    pub fn report(&self) -> Option<Report> {
        *lock(&self.report)
    }

    /// Stores the latencies that the driver reports. Readers in the guest observed them.
    pub fn set_latencies(&self, latencies: Latencies) {
        *lock(&self.latencies) = Some(latencies);
    }

    /// Returns the last latencies that the driver has sent on this connection; None before the
    /// first. Older drivers send none.
    pub fn latencies(&self) -> Option<Latencies> {
        *lock(&self.latencies)
    }

    /// Sends an event about the VM. The rate of events that the VM can cause in a loop is limited.
    pub fn emit(&self, kind: EventKind, text: std::fmt::Arguments<'_>) {
        match kind.sort() {
            None => self.emit_now(kind, text),
            Some(_) => {
                let emit = |kind, text: std::fmt::Arguments<'_>| self.emit_now(kind, text);
                self.event_limit.add(Instant::now(), kind, text, emit);
            }
        }
    }

    /// Sends events of the VM that the rate limit has delayed, as far as the limit permits now.
    pub fn catch_up(&self, now: Instant) {
        let emit = |kind, text: std::fmt::Arguments<'_>| self.emit_now(kind, text);
        self.event_limit.catch_up(now, emit);
    }

    fn emit_now(&self, kind: EventKind, text: std::fmt::Arguments<'_>) {
        self.events.emit(kind, Some(&self.name()), text);
    }

    /// Counts a refused connection and sends an event with the reason.
    pub fn count_refusal(&self, why: std::fmt::Arguments<'_>) {
        self.counters
            .connections_refused
            .fetch_add(1, Ordering::Relaxed);
        self.emit(EventKind::ConnectionRefused, why);
    }

    /// Counts and logs a connection of a peer without permission to the VM's socket, and sends an
    /// event.
    pub fn report_unauthorized(&self, peer: &UnauthorizedPeer) {
        self.count_refusal(format_args!("{peer}"));
        self.warn(format_args!(
            "a connection to {} is refused: {peer}. Run the VM's QEMU as the owner, or name its \
             user: <seclabel model='dac'> of the domain, tmem-hook --owner, or owner of its [[vm]] \
             or --vm",
            self.config.socket.display()
        ));
    }

    fn clear_report(&self) {
        *lock(&self.report) = None;
        *lock(&self.latencies) = None;
    }

    /// Logs a warning about the VM. The rate is limited, because a guest must not fill the host's
    /// disk.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line contains the number of left-out lines only if lines were left out.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(vm = %self.name(), left_out, "{message}");
        }
    }

    /// Logs why one of the VM's virtqueues stopped, and sends an event.
    pub fn queue_stopped(&self, virtqueue: usize, reason: &str) {
        self.emit(
            EventKind::QueueStopped,
            format_args!("virtqueue {virtqueue}: {reason}"),
        );
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line contains the number of left-out lines only if lines were left out.
            let left_out = (left_out > 0).then_some(left_out);
            let vm = self.name();
            tracing::warn!(
                %vm, request = virtqueue, reason, left_out,
                "virtqueue {virtqueue} stopped until it is set up again: {reason}"
            );
        }
    }

    /// Logs an action of the VM or its VMM. The rate is limited, because the action may be repeated
    /// in a loop.
    pub fn info(&self, message: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.log_limit.admit(Instant::now()) {
            // The log line contains the number of left-out lines only if lines were left out.
            let left_out = (left_out > 0).then_some(left_out);
            tracing::info!(vm = %self.name(), left_out, "{message}");
        }
    }
}

/// Returns the name of the state whose number the guest's driver has reported.
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

/// Guard of a connection that occupies the VM's slot for a front end. Dropping the value frees the
/// slot.
pub struct Connected(Arc<Vm>);

/// Reason why a connection cannot occupy the VM's slot for a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// Another front end is connected to the VM.
    Taken,
    /// The VM was removed, so no front end may connect.
    Removed,
    /// The system has no file descriptor left for a handle of the connection.
    NoHandle,
}

impl Connected {
    /// Occupies the VM's slot for a front end with a connection.
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
    fn frequent_driver_reports_do_not_displace_events_of_other_vms() {
        let engine = Engine::new(EngineConfig::new(64 << 20, 1))
            .expect("cannot reserve the pool's address space");
        let events = Arc::new(Events::default());
        let vm = |name: &str| {
            let config: VmConfig = format!("name={name},socket=none")
                .parse()
                .expect("valid settings of a VM were refused");
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
        // More events than one burst may have been sent, because one or two periods of the rate
        // limit may have passed during the test.
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
            last.text
                .starts_with("the guest's driver reports the state off"),
            "the last event is not the driver's last state: {}",
            last.text
        );
    }
}
