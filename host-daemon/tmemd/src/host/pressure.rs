// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shrinks the pool when the host is short of memory, and lets it grow again later.
//!
//! A thread reads the available memory of the host and how long tasks waited for memory (PSI). It
//! does so at least once a second, ten times a second while a burst could use up the available memory
//! within a second, and at once when the kernel reports such waits. The pool shrinks in steps by the
//! amount that is missing, and by the amount that a burst will take until the next reading. Waits count only while little memory is left on the host
//! or in the daemon's control group: tasks of a control group also wait because of that group's own
//! limit, and a smaller pool does not help them. After a quiet period the pool grows back slowly: if it
//! grew as fast as it shrank, its size would oscillate. A pool contains only copies of pages, so
//! shrinking it costs time and never data.

use crate::config::settings::{POOL_BYTES_MIN, PressureConfig};
use crate::events::bus::{EventKind, Events};
use crate::host::available::Available;
use crate::host::background::BackgroundWorkers;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::util::event_fd::signal;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tmem_pool::{AdmissionError, Engine, Quota, Tenant};

/// Time between two readings of the host's memory while it has plenty, see [`BURST_BYTES`], and the
/// kernel reports no waits for memory.
const PERIOD: Duration = Duration::from_secs(1);

/// Time between two readings of the host's memory while little is available, and shortest time
/// between two readings. `host_free_min` must suffice for what other processes take in this time. At
/// its usual value of 1 GiB, it suffices for 10 GiB/s.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Memory in bytes that other processes may take within [`PERIOD`]. A processor takes 1 to 3 GiB/s
/// if it touches new memory, and a VM with huge pages or several processors takes more. While the
/// host has less than this in addition to `host_free_min`, the memory is read each [`PERIOD_MIN`].
const BURST_BYTES: u64 = 8 << 30;

/// Divisor of [`STALL_WINDOW`]. The host counts as short of memory if some task waited for memory
/// during a tenth of the window.
const STALL_DIVISOR: u32 = 10;

/// Time window in which waits for memory are summed. A PSI window that is a multiple of two seconds
/// needs no privilege (Documentation/accounting/psi.rst).
const STALL_WINDOW: Duration = Duration::from_secs(2);

/// Divisor of the memory that the pool holds: one step frees at most an eighth of that memory when
/// host memory is missing. The limit keeps a reading that is out of date, for example after a
/// burst, from emptying the pool. After eight steps, a third of the memory is left. During a burst,
/// a step may free more: [`BURST_STEPS`] times the amount that the burst takes.
const SHRINK_DIVISOR: u64 = 8;

/// Number of periods of a burst whose memory one step may free: the period that has just ended, and
/// the next one.
const BURST_STEPS: u64 = 2;

/// Divisor of the memory that the pool holds: one step frees a 16th of that memory when tasks wait
/// although `host_free_min` is available. These tasks may wait because of a limit of their own,
/// which a smaller pool does not change.
const STALL_SHRINK_DIVISOR: u64 = 16;

/// Multiple of `host_free_min`: waits for memory count only while less than this is left. By
/// default, `host_free_min` is at most a 32nd of the host's memory, so on a host with 2 GiB or more
/// waits count only while less than an eighth of its memory is left. On a host with more memory
/// left, tasks wait for other reasons, such as the limit of a control group.
const STALL_FREE_FACTOR: u64 = 4;

/// Smallest value that [`STALL_FREE_FACTOR`] multiplies, in bytes. A host without `host_free_min`
/// thus still gets memory back when tasks wait and nearly no memory is left.
const STALL_FREE_BYTES_MIN: u64 = 64 << 20;

/// Smallest amount in bytes by which one step shrinks the pool, so that shrinking ends in bounded
/// time.
const SHRINK_BYTES_MIN: u64 = 4 << 20;

/// Divisor of `host_free_min`: the pool grows only while the host has a quarter more than this
/// minimum available. Otherwise the host would be short of memory again after the growth.
const MARGIN_DIVISOR: u64 = 4;

/// Time without a shortage of memory after which the pool may grow. It is longer than the window in
/// which waits are summed. It is also longer than a sweep of the kernel through its page lists, and
/// than most bursts of memory use.
const CALM: Duration = Duration::from_secs(15);

/// Divisor of the pool's configured size: one step grows the pool by a 64th of that size. The pool
/// therefore grows from nothing to its configured size in about two minutes.
const GROW_DIVISOR: u64 = 64;

/// Time between two steps in which the pool grows.
const GROW_PERIOD: Duration = Duration::from_secs(2);

/// Number of readings in [`GROW_PERIOD`] while little memory is available.
const GROW_READINGS: u64 = (GROW_PERIOD.as_millis() / PERIOD_MIN.as_millis()) as u64;

/// Longest time that [`PoolSize::make_room`] waits for memory that its caller requested. The pool
/// frees several GiB in this time, and the wait must not delay the start of a VM much.
pub const ROOM_WAIT: Duration = Duration::from_secs(1);

/// Time between two checks whether the pool has freed the requested memory.
const ROOM_POLL: Duration = Duration::from_millis(5);

/// Readings of the host's memory, on which the size of the pool depends.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// Memory that is left on the host and in the daemon's control group.
    available: Available,
    /// Whether tasks of the host wait long for memory, see [`STALL_DIVISOR`].
    stalled: bool,
}

/// Reason for which the pool changes its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The host has less memory available than `host_free_min`.
    HostShort,
    /// Tasks wait for memory, and little memory is left.
    Stalls,
    /// The host was not short of memory for some time.
    Calm,
}

/// Recognizes a burst: other processes that take memory at two readings in a row. A single drop is
/// no burst, so an allocation that has ended does not make the pool smaller than necessary.
///
/// The kernel keeps some of the memory that the pool releases in lists of each processor, and does
/// not count it as available. This memory looks as if another process had taken it, so it may cost
/// the pool twice its size.
#[derive(Debug, Default)]
struct Burst {
    /// Time of the last reading, and the bytes that the host had available or that the pool held. The
    /// sum does not change while the pool releases memory.
    last: Option<(Instant, u64)>,
    /// Bytes by which the sum fell before the last reading, for each [`PERIOD_MIN`].
    drop_bytes: u64,
}

impl Burst {
    /// Takes a reading: `left_bytes` are available on the host or held by the pool. Returns the bytes
    /// that other processes will take in the next [`PERIOD_MIN`] if the burst continues.
    fn read(&mut self, now: Instant, left_bytes: u64) -> u64 {
        let before = std::mem::replace(&mut self.drop_bytes, 0);
        if let Some((at, bytes)) = self.last.replace((now, left_bytes)) {
            let periods = (now - at).div_duration_f64(PERIOD_MIN).max(1.0);
            self.drop_bytes = (bytes.saturating_sub(left_bytes) as f64 / periods) as u64;
        }
        self.drop_bytes.min(before)
    }
}

/// Change of the pool's size that the governor has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Change {
    size_bytes: u64,
    reason: Reason,
}

/// Decides the size of the pool. The caller passes the time and the readings of the host, so that
/// tests can simulate them.
#[derive(Debug)]
struct Governor {
    free_min_bytes: u64,
    /// The configured size of the pool in bytes.
    configured_bytes: u64,
    size_bytes: u64,
    /// Time at which the current period without a shortage of memory began; None while the host is
    /// short of memory.
    calm_since: Option<Instant>,
    grown: Option<Instant>,
    burst: Burst,
    /// Memory in bytes that other processes will probably take before the next reading.
    burst_bytes: u64,
}

impl Governor {
    fn new(free_min_bytes: u64, configured_bytes: u64) -> Governor {
        Governor {
            free_min_bytes,
            configured_bytes,
            size_bytes: configured_bytes,
            calm_since: None,
            grown: None,
            burst: Burst::default(),
            burst_bytes: 0,
        }
    }

    /// Returns the time until the host's memory should be read again.
    fn period(&self, available: Available) -> Duration {
        let plenty_bytes = self.free_min_bytes.saturating_add(BURST_BYTES);
        match available.host_bytes {
            Some(bytes) if bytes < plenty_bytes => PERIOD_MIN,
            _ => PERIOD,
        }
    }

    /// Sets another configured size of the pool in bytes. Returns the size in bytes that the pool
    /// should have now.
    fn set_configured_size(&mut self, configured_bytes: u64) -> u64 {
        // If a shortage on the host has made the pool smaller, the pool grows to the new size in
        // steps. A pool that has its configured size takes the new size at once.
        let has_configured_size = self.size_bytes == self.configured_bytes;
        self.configured_bytes = configured_bytes;
        if has_configured_size || self.size_bytes > configured_bytes {
            self.size_bytes = configured_bytes;
        }
        self.size_bytes
    }

    /// Returns the memory in bytes below which waits for memory count.
    fn stall_free_bytes(&self) -> u64 {
        let free_min_bytes = self.free_min_bytes.max(STALL_FREE_BYTES_MIN);
        free_min_bytes.saturating_mul(STALL_FREE_FACTOR)
    }

    /// Returns true if tasks wait for memory and a smaller pool can help them. If the host does not
    /// report its available memory, waits are the only sign of a shortage and always count.
    fn is_stalled(&self, readings: Readings) -> bool {
        let Available {
            host_bytes,
            arc_bytes,
            group_bytes,
            ..
        } = readings.available;
        // ZFS may not be able to release its ARC as fast as tasks need memory, or not completely.
        // Tasks that wait then need the pool's memory, however large the ARC is.
        let free_bytes = host_bytes.unwrap_or(0).saturating_sub(arc_bytes);
        let left_bytes = free_bytes.min(group_bytes.unwrap_or(u64::MAX));
        readings.stalled && left_bytes < self.stall_free_bytes()
    }

    /// Decides about one step. Returns None if the pool's size should not change. `held_bytes` is
    /// the memory that the pool holds now, and `reserved_bytes` returns the sum of all reserves.
    ///
    /// Waits for memory alone never make the pool smaller than that sum: an operator has promised
    /// these bytes, and the host has at least `host_free_min` available.
    fn step(
        &mut self,
        now: Instant,
        readings: Readings,
        held_bytes: u64,
        reserved_bytes: impl FnOnce() -> u64,
    ) -> Option<Change> {
        let available_bytes = readings.available.host_bytes.unwrap_or(u64::MAX);
        self.burst_bytes = readings.available.host_bytes.map_or(0, |bytes| {
            self.burst.read(now, bytes.saturating_add(held_bytes))
        });
        // Memory that the pool holds above its size is being released, and counts as available
        // already. Otherwise the pool would release it twice.
        let released_bytes = held_bytes.saturating_sub(self.size_bytes);
        let wanted_bytes = self.free_min_bytes.saturating_add(self.burst_bytes);
        let missing_bytes =
            wanted_bytes.saturating_sub(available_bytes.saturating_add(released_bytes));
        let (size_bytes, reason) = if missing_bytes > 0 {
            let part_bytes = (held_bytes.min(self.size_bytes) / SHRINK_DIVISOR)
                .max(self.burst_bytes.saturating_mul(BURST_STEPS));
            let size_bytes = self.shrunk(held_bytes, missing_bytes, part_bytes, 0);
            (size_bytes, Reason::HostShort)
        } else if self.is_stalled(readings) {
            let part_bytes = held_bytes.min(self.size_bytes) / STALL_SHRINK_DIVISOR;
            let size_bytes = self.shrunk(held_bytes, u64::MAX, part_bytes, reserved_bytes());
            (size_bytes, Reason::Stalls)
        } else {
            (self.grown_size(now, available_bytes), Reason::Calm)
        };
        (size_bytes != self.size_bytes).then(|| {
            self.size_bytes = size_bytes;
            Change { size_bytes, reason }
        })
    }

    /// Returns the pool's size in bytes after a step that frees `wanted_bytes`, but at most the larger
    /// of `part_bytes` and [`SHRINK_BYTES_MIN`]. The size does not fall below `least_bytes`.
    fn shrunk(
        &mut self,
        held_bytes: u64,
        wanted_bytes: u64,
        part_bytes: u64,
        least_bytes: u64,
    ) -> u64 {
        self.calm_since = None;
        // The step is subtracted from the memory that the pool holds, not from the pool's size.
        // Memory that the pool does not hold cannot help the host. The new size also keeps the pool
        // from taking more memory now.
        let held_bytes = held_bytes.min(self.size_bytes);
        let step_bytes = wanted_bytes.min(part_bytes.max(SHRINK_BYTES_MIN));
        held_bytes
            .saturating_sub(step_bytes)
            .max(POOL_BYTES_MIN)
            .max(least_bytes)
            .min(self.size_bytes)
    }

    /// Returns the pool's new size in bytes if the pool must shrink to leave `room_bytes` to
    /// another process; otherwise None. The pool shrinks by all missing bytes in one step, because
    /// `available_bytes` is up to date.
    fn make_room(&mut self, room_bytes: u64, available_bytes: u64, held_bytes: u64) -> Option<u64> {
        // The quiet period is restarted. The pool therefore does not grow again before the other
        // process has taken the memory.
        self.calm_since = None;
        let wanted_bytes = self.free_min_bytes.saturating_add(room_bytes);
        let missing_bytes = wanted_bytes.saturating_sub(available_bytes);
        if missing_bytes == 0 {
            return None;
        }
        let held_bytes = held_bytes.min(self.size_bytes);
        let size_bytes = held_bytes.saturating_sub(missing_bytes).max(POOL_BYTES_MIN);
        (size_bytes < self.size_bytes).then(|| {
            self.size_bytes = size_bytes;
            size_bytes
        })
    }

    /// Returns the pool's size in bytes after a step of growth, or the present size if the host was
    /// not calm for long enough.
    fn grown_size(&mut self, now: Instant, available_bytes: u64) -> u64 {
        let calm_since = *self.calm_since.get_or_insert(now);
        // The pool does not grow into memory that a burst will take before the pool grows again.
        let burst_bytes = self.burst_bytes.saturating_mul(GROW_READINGS);
        let wanted_bytes = (self.free_min_bytes + self.free_min_bytes / MARGIN_DIVISOR)
            .saturating_add(burst_bytes);
        let spare_bytes = available_bytes.saturating_sub(wanted_bytes);
        let too_soon = self.grown.is_some_and(|grown| now - grown < GROW_PERIOD);
        if now - calm_since < CALM || too_soon || self.size_bytes == self.configured_bytes {
            return self.size_bytes;
        }
        self.grown = Some(now);
        let step_bytes = (self.configured_bytes / GROW_DIVISOR).max(SHRINK_BYTES_MIN);
        (self.size_bytes + step_bytes.min(spare_bytes)).min(self.configured_bytes)
    }
}

/// Returns the total time in µs for which some task waited for memory. `pressure` is the text of a
/// PSI file. Returns None if the text does not contain the total.
fn stall_us(pressure: &str) -> Option<u64> {
    let some = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some "))?;
    let total = some
        .split(' ')
        .find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok()
}

/// Registers a PSI trigger, through which the kernel reports waits for memory. Returns None if the
/// PSI file cannot be opened for writing or the kernel refuses the trigger; the caller then only
/// reads the host's memory periodically.
fn trigger(path: &Path) -> Option<File> {
    let mut file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    let window_us = STALL_WINDOW.as_micros();
    let text = format!(
        "some {} {window_us}\0",
        window_us / u128::from(STALL_DIVISOR)
    );
    match file.write_all(text.as_bytes()) {
        Ok(()) => Some(file),
        Err(error) => {
            tracing::info!(
                "{}: the kernel refuses a memory pressure trigger: {error}; polling instead",
                path.display()
            );
            None
        }
    }
}

/// Compares how long tasks waited for memory with a limit, from the totals of a PSI file.
#[derive(Debug, Default)]
struct Stalls {
    /// Total in µs that the PSI file had when the window began, and the time at which the window
    /// began.
    begin: Option<(u64, Instant)>,
}

impl Stalls {
    /// Records the total of the PSI file. Returns true if some task waited for memory during a tenth
    /// of the window or more.
    fn record(&mut self, total_us: Option<u64>, now: Instant) -> bool {
        let Some(total_us) = total_us else {
            return false;
        };
        let (begin_us, begin) = *self.begin.get_or_insert((total_us, now));
        let stalled_us = u128::from(total_us.saturating_sub(begin_us));
        let stalled = stalled_us >= STALL_WINDOW.as_micros() / u128::from(STALL_DIVISOR);
        if stalled || now - begin >= STALL_WINDOW {
            self.begin = Some((total_us, now));
        }
        stalled
    }
}

/// Size of the pool: the configured size, or less if the host needs memory. All changes of the size
/// are made through this type.
pub struct PoolSize {
    /// Guards the decided size. A thread holds the lock until the pool has that size. A thread that
    /// holds the lock of the VM registry may take this lock. A thread that holds this lock may take
    /// the pool's membership lock.
    governor: Mutex<Governor>,
    engine: Arc<Engine>,
    background: Arc<BackgroundWorkers>,
    events: Arc<Events>,
    /// Files that report the host's memory; None if the pool never shrinks for the host.
    pressure: Option<PressureConfig>,
    /// Number of steps so far that made the pool smaller because memory was missing, for the host or
    /// for a VM that started.
    pub shrinks_memory: AtomicU64,
    /// Number of steps so far that made the pool smaller because tasks waited for memory, although
    /// the host had `host_free_min` available.
    pub shrinks_stalls: AtomicU64,
    /// Memory in bytes that the host had available at the last reading; 0 if it is unknown or is not
    /// watched.
    pub available_bytes: AtomicU64,
    /// The part of `available_bytes` that ZFS's ARC can release.
    pub arc_bytes: AtomicU64,
    /// Free swap of the host in bytes at the last reading.
    pub swap_free_bytes: AtomicU64,
    /// Number of steps so far that made the pool larger again.
    pub grows: AtomicU64,
}

impl PoolSize {
    /// Creates the value for a pool that has its configured size.
    pub fn new(
        pressure: Option<&PressureConfig>,
        configured_bytes: u64,
        engine: Arc<Engine>,
        background: Arc<BackgroundWorkers>,
        events: Arc<Events>,
    ) -> PoolSize {
        let free_min_bytes = pressure.map_or(0, |pressure| pressure.host_free_min_bytes);
        PoolSize {
            governor: Mutex::new(Governor::new(free_min_bytes, configured_bytes)),
            engine,
            background,
            events,
            pressure: pressure.cloned(),
            shrinks_memory: AtomicU64::new(0),
            shrinks_stalls: AtomicU64::new(0),
            available_bytes: AtomicU64::new(0),
            arc_bytes: AtomicU64::new(0),
            swap_free_bytes: AtomicU64::new(0),
            grows: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Governor> {
        self.governor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the configured size of the pool in bytes.
    pub fn configured_bytes(&self) -> u64 {
        self.lock().configured_bytes
    }

    /// Sets another configured size of the pool in bytes.
    pub fn set_configured_size(&self, configured_bytes: u64) {
        let governor = self.lock();
        self.engine.set_configured_size(configured_bytes);
        self.follow_configured_size(governor, configured_bytes);
    }

    /// Sets the pool's configured size, if one is given, together with the given quotas of tenants,
    /// in one step.
    ///
    /// # Errors
    /// A reserve does not fit into the pool. In this case, nothing changes.
    pub fn configure(
        &self,
        configured_bytes: Option<u64>,
        quotas: &[(&Tenant, Quota)],
    ) -> Result<(), AdmissionError> {
        let governor = self.lock();
        self.engine.configure(configured_bytes, quotas)?;
        if let Some(configured_bytes) = configured_bytes {
            self.follow_configured_size(governor, configured_bytes);
        }
        Ok(())
    }

    /// Gives the pool a new configured size. The engine has already checked that all reserves fit
    /// into it.
    fn follow_configured_size(
        &self,
        mut governor: MutexGuard<'_, Governor>,
        configured_bytes: u64,
    ) {
        let size_bytes = governor.set_configured_size(configured_bytes);
        self.engine.resize(size_bytes);
        drop(governor);
        self.background.wake();
        let text = format_args!("the configured size of the pool is now {configured_bytes} bytes");
        self.events.emit(EventKind::Resized, None, text);
    }

    /// Sets the memory in bytes that the pool leaves available on the host.
    pub fn set_free_min(&self, free_min_bytes: u64) {
        self.lock().free_min_bytes = free_min_bytes;
    }

    /// Resizes the pool if the new readings of the host require it. Returns the time until the host's
    /// memory should be read again.
    fn follow(&self, now: Instant, readings: Readings) -> Duration {
        let mut governor = self.lock();
        let period = governor.period(readings.available);
        let before_bytes = governor.size_bytes;
        let Available {
            host_bytes,
            arc_bytes,
            swap_free_bytes,
            ..
        } = readings.available;
        self.available_bytes.store(host_bytes.unwrap_or(0), Relaxed);
        self.arc_bytes.store(arc_bytes, Relaxed);
        self.swap_free_bytes.store(swap_free_bytes, Relaxed);
        let reserved_bytes = || self.engine.reserved_bytes();
        let step = governor.step(now, readings, self.engine.held_bytes(), reserved_bytes);
        let Some(change) = step else {
            return period;
        };
        let counter = match change.reason {
            Reason::HostShort => &self.shrinks_memory,
            Reason::Stalls => &self.shrinks_stalls,
            Reason::Calm => &self.grows,
        };
        counter.fetch_add(1, Relaxed);
        let why = why(change.reason, &governor, readings);
        self.resized(governor, before_bytes, format_args!("{why}"));
        period
    }

    /// Shrinks the pool to free memory for another process. Waits for at most [`ROOM_WAIT`] until
    /// the pool has freed the memory. Returns true if the host now has the memory available in
    /// addition to `host_free_min`, if it does not report its available memory, or if the pool
    /// never shrinks for the host.
    pub fn make_room(&self, room_bytes: u64) -> bool {
        let deadline = Instant::now() + ROOM_WAIT;
        let mut governor = self.lock();
        let Some(available_bytes) = self.available_bytes() else {
            return true;
        };
        let before_bytes = governor.size_bytes;
        let wanted_bytes = room_bytes.saturating_add(governor.free_min_bytes);
        let held_bytes = self.engine.held_bytes();
        let made = governor.make_room(room_bytes, available_bytes, held_bytes);
        let size_bytes = governor.size_bytes;
        if made.is_some() {
            self.shrinks_memory.fetch_add(1, Relaxed);
            let why = format_args!("{room_bytes} bytes of host memory were requested");
            self.resized(governor, before_bytes, why);
        } else {
            drop(governor);
        }
        while self.engine.held_bytes() > size_bytes && Instant::now() < deadline {
            std::thread::sleep(ROOM_POLL);
        }
        self.available_bytes()
            .is_none_or(|available| available >= wanted_bytes)
    }

    /// Returns the memory in bytes that the host has available; the last known value if it cannot be
    /// read now; None if it is unknown or is not watched.
    fn available_bytes(&self) -> Option<u64> {
        let last_bytes = self.available_bytes.load(Relaxed);
        match Available::read(self.pressure.as_ref()?) {
            Ok(available) => available.host_bytes,
            Err(_) => (last_bytes > 0).then_some(last_bytes),
        }
    }

    /// Resizes the pool to the size that the governor has decided. Logs the change.
    fn resized(
        &self,
        governor: MutexGuard<'_, Governor>,
        before_bytes: u64,
        why: std::fmt::Arguments<'_>,
    ) {
        let (size_bytes, configured_bytes) = (governor.size_bytes, governor.configured_bytes);
        self.engine.resize(size_bytes);
        drop(governor);
        self.background.wake();
        // Events are sent only for the first step in which the pool shrinks, and for the last step
        // in which it grows.
        if before_bytes == configured_bytes {
            let text = format_args!("the pool shrinks from {before_bytes} bytes: {why}");
            self.events.emit(EventKind::HostShort, None, text);
            tracing::warn!(size_bytes, "the pool shrinks: {why}");
        } else if size_bytes == configured_bytes {
            let text =
                format_args!("the pool has its configured size of {configured_bytes} bytes again");
            self.events.emit(EventKind::HostWell, None, text);
            tracing::info!(size_bytes, "the pool is back at its configured size");
        } else {
            tracing::debug!(size_bytes, "the pool's size changes: {why}");
        }
    }
}

/// Returns the reason for a change of the pool's size in words, with the values on which it depends.
fn why(reason: Reason, governor: &Governor, readings: Readings) -> String {
    let bytes =
        |bytes: Option<u64>| bytes.map_or("unknown".into(), |bytes| format!("{bytes} bytes"));
    let available = match readings.available.arc_bytes {
        0 => bytes(readings.available.host_bytes),
        arc_bytes => format!(
            "{} (of these, ZFS's ARC can release {arc_bytes} bytes)",
            bytes(readings.available.host_bytes)
        ),
    };
    let free_min_bytes = governor.free_min_bytes;
    match reason {
        Reason::HostShort => {
            let burst = match governor.burst_bytes {
                0 => String::new(),
                bytes => format!(
                    ", and the {bytes} bytes that other processes take in {} ms",
                    PERIOD_MIN.as_millis()
                ),
            };
            format!(
                "the host has {available} of memory available, less than host_free_min, \
                 {free_min_bytes} bytes{burst}"
            )
        }
        Reason::Stalls => {
            let group = readings.available.group_bytes.map(|bytes| {
                format!(", and the daemon's control group may use {bytes} bytes more")
            });
            format!(
                "tasks wait for memory (PSI), and less than {} bytes are left: the host has \
                 {available} of memory available{}",
                governor.stall_free_bytes(),
                group.unwrap_or_default()
            )
        }
        Reason::Calm => format!("the host has {available} of memory available again"),
    }
}

/// The thread that watches the host's memory and resizes the pool.
pub struct PressureWatcher {
    stop: Arc<OwnedFd>,
    /// Guards the handle of the watcher thread. Leaf lock.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl PressureWatcher {
    /// Starts the thread that watches the host's memory.
    ///
    /// # Errors
    /// The system cannot create the thread or a descriptor.
    pub fn start(
        config: PressureConfig,
        size: Arc<PoolSize>,
        heartbeats: &Heartbeats,
    ) -> io::Result<PressureWatcher> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(rustix::event::eventfd(0, flags)?);
        let own_stop = stop.clone();
        let heartbeat = heartbeats.register("pressure");
        let thread = std::thread::Builder::new()
            .name("pressure".into())
            .spawn(move || watch(&config, &size, &own_stop, &heartbeat))?;
        Ok(PressureWatcher {
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the thread that watches the host's memory.
    pub fn stop(&self) {
        signal(&self.stop);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a bug: the thread that watches the host's memory panicked");
        }
    }
}

/// The last known memory of the host. A reading that fails leaves it unchanged: unknown memory would
/// make the pool keep its size while the host is short.
#[derive(Debug, Default)]
struct LastAvailable {
    available: Available,
    failed: bool,
}

impl LastAvailable {
    /// Takes a reading. Returns the last one that succeeded. Logs the first of several failures.
    fn record(&mut self, reading: io::Result<Available>) -> Available {
        match reading {
            Ok(available) => {
                *self = LastAvailable {
                    available,
                    failed: false,
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    tracing::warn!(%error, "the host's memory cannot be read: the last known values count");
                }
            }
        }
        self.available
    }
}

/// Waits until the kernel reports that tasks wait for memory, at most for `time`. Returns false if
/// the thread must stop.
fn wait(trigger: Option<&File>, stop: &OwnedFd, time: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    if let Some(trigger) = trigger {
        fds.push(PollFd::new(trigger, PollFlags::PRI));
    }
    // If poll(2) fails, the caller acts as after a report of the kernel: it checks `stop` and then
    // reads the host's memory.
    let _ = rustix::event::poll(&mut fds, Some(&timeout));
    fds[0].revents().is_empty()
}

fn watch(config: &PressureConfig, size: &PoolSize, stop: &OwnedFd, heartbeat: &Heartbeat) {
    let trigger = config.stalls.as_deref().and_then(trigger);
    let mut stalls = Stalls::default();
    let mut available = LastAvailable::default();
    loop {
        heartbeat.work();
        let pressure = config.stalls.as_deref().map(std::fs::read_to_string);
        let total_us = pressure.and_then(|text| stall_us(&text.ok()?));
        let now = Instant::now();
        let readings = Readings {
            available: available.record(Available::read(config)),
            stalled: stalls.record(total_us, now),
        };
        let period = size.follow(now, readings);
        heartbeat.rest();
        // A PSI trigger that has fired does not fire again within its window, even if the shortage
        // continues. The thread therefore also reads the host's memory after `period` without a
        // report.
        let begun = Instant::now();
        if !wait(trigger.as_ref(), stop, period) {
            return;
        }
        let rest = PERIOD_MIN.saturating_sub(begun.elapsed());
        if !rest.is_zero() && !wait(None, stop, rest) {
            return;
        }
    }
}

#[cfg(test)]
#[path = "pressure_test.rs"]
mod tests;
