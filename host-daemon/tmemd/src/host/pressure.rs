// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shrinks the pool when the host is short of memory, and lets it grow again later.
//!
//! A thread reads the available memory of the host and how long tasks waited for memory (PSI). It
//! does so at least once a second, and at once when the kernel reports such waits. The pool shrinks
//! in steps by the amount that is missing. After a quiet period the pool grows back slowly: if it
//! grew as fast as it shrank, its size would oscillate. A pool contains only copies of pages, so
//! shrinking it costs time and never data.

use crate::config::meminfo::meminfo_bytes;
use crate::config::settings::{POOL_BYTES_MIN, PressureConfig};
use crate::events::bus::{EventKind, Events};
use crate::host::background::BackgroundWorkers;
use crate::host::heartbeat::{Heartbeat, Heartbeats};
use crate::util::event_fd::signal;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tmem_pool::{AdmissionError, Engine, Quota, Tenant};

/// Time between two readings of the host's memory if the kernel reports no waits for memory. Guests
/// of a host may use several GiB in this time, so `host_free_min_bytes` must suffice for it.
const PERIOD: Duration = Duration::from_secs(1);

/// Shortest time between two readings of the host's memory after the kernel has reported waits.
/// Freeing memory takes a part of this time, and the host's available memory changes only
/// afterwards.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Divisor of [`STALL_WINDOW`]. The host counts as short of memory if some task waited for memory
/// during a tenth of the window.
const STALL_PART: u32 = 10;

/// Time window in which waits for memory are summed. A PSI window that is a multiple of two seconds
/// needs no privilege (Documentation/accounting/psi.rst).
const STALL_WINDOW: Duration = Duration::from_secs(2);

/// Divisor of the memory that the pool holds: one step frees at most an eighth of that memory when
/// host memory is missing. The limit keeps a reading that is out of date, for example after a
/// burst, from emptying the pool. After eight steps, a third of the memory is left.
const SHRINK_PART: u64 = 8;

/// Divisor of the memory that the pool holds: one step frees a 16th of that memory when tasks wait
/// although enough host memory is available. These tasks may wait because of a limit of their own,
/// which a smaller pool does not change.
const STALL_SHRINK_PART: u64 = 16;

/// Smallest amount in bytes by which one step shrinks the pool, so that shrinking ends in bounded
/// time.
const SHRINK_BYTES_MIN: u64 = 4 << 20;

/// Divisor of `host_free_min`: the pool grows only while the host has a quarter more than this
/// minimum available. Otherwise the host would be short of memory again after the growth.
const MARGIN_PART: u64 = 4;

/// Time without a shortage of memory after which the pool may grow. It is longer than the window in
/// which waits are summed. It is also longer than a sweep of the kernel through its page lists, and
/// than most bursts of memory use.
const CALM: Duration = Duration::from_secs(15);

/// Divisor of the pool's configured size: one step grows the pool by a 64th of that size. The pool
/// therefore grows from nothing to its full size in about two minutes.
const GROW_PART: u64 = 64;

/// Time between two steps in which the pool grows.
const GROW_PERIOD: Duration = Duration::from_secs(2);

/// Longest time that [`PoolSize::make_room`] waits for memory that its caller requested. The pool
/// frees several GiB in this time, and the wait must not delay the start of a VM much.
pub const ROOM_WAIT: Duration = Duration::from_secs(1);

/// Time between two checks whether the pool has freed the requested memory.
const ROOM_POLL: Duration = Duration::from_millis(5);

/// Readings of the host's memory, on which the size of the pool depends.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// Memory that the host can allocate without harmful reclaim, in bytes; None if the host does
    /// not report it.
    available_bytes: Option<u64>,
    /// Whether tasks of the host wait long for memory, see [`STALL_PART`].
    stalled: bool,
}

/// Decides the size of the pool. The caller passes the time and the readings of the host, so that
/// tests can simulate them.
#[derive(Debug)]
struct Governor {
    free_min_bytes: u64,
    /// The configured size of the pool in bytes.
    full_bytes: u64,
    size_bytes: u64,
    /// Time at which the current period without a shortage of memory began; None while the host is
    /// short of memory.
    calm_since: Option<Instant>,
    grown: Option<Instant>,
}

impl Governor {
    fn new(free_min_bytes: u64, full_bytes: u64) -> Governor {
        Governor {
            free_min_bytes,
            full_bytes,
            size_bytes: full_bytes,
            calm_since: None,
            grown: None,
        }
    }

    /// Sets another configured size of the pool in bytes. Returns the size in bytes that the pool
    /// should have now.
    fn set_full(&mut self, full_bytes: u64) -> u64 {
        // If a shortage on the host has made the pool smaller, the pool grows to the new size in
        // steps. A pool that has its configured size takes the new size at once.
        let is_full = self.size_bytes == self.full_bytes;
        self.full_bytes = full_bytes;
        if is_full || self.size_bytes > full_bytes {
            self.size_bytes = full_bytes;
        }
        self.size_bytes
    }

    /// Decides about one step. Returns the pool's new size in bytes; None if the size should not
    /// change. `held_bytes` is the memory that the pool holds now.
    fn step(&mut self, now: Instant, readings: Readings, held_bytes: u64) -> Option<u64> {
        let available_bytes = readings.available_bytes.unwrap_or(u64::MAX);
        let missing_bytes = self.free_min_bytes.saturating_sub(available_bytes);
        let size_bytes = if missing_bytes > 0 || readings.stalled {
            self.calm_since = None;
            let (wanted, part) = if missing_bytes > 0 {
                (missing_bytes, SHRINK_PART)
            } else {
                (u64::MAX, STALL_SHRINK_PART)
            };
            // The step is subtracted from the memory that the pool holds, not from the pool's size.
            // Memory that the pool does not hold cannot help the host. The new size also keeps the
            // pool from taking more memory now.
            let held_bytes = held_bytes.min(self.size_bytes);
            let step_bytes = wanted.min((held_bytes / part).max(SHRINK_BYTES_MIN));
            held_bytes
                .saturating_sub(step_bytes)
                .max(POOL_BYTES_MIN)
                .min(self.size_bytes)
        } else {
            self.grow(now, available_bytes)
        };
        (size_bytes != self.size_bytes).then(|| {
            self.size_bytes = size_bytes;
            size_bytes
        })
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

    fn grow(&mut self, now: Instant, available_bytes: u64) -> u64 {
        let calm_since = *self.calm_since.get_or_insert(now);
        let wanted_bytes = self.free_min_bytes + self.free_min_bytes / MARGIN_PART;
        let spare_bytes = available_bytes.saturating_sub(wanted_bytes);
        let too_soon = self.grown.is_some_and(|grown| now - grown < GROW_PERIOD);
        if now - calm_since < CALM || too_soon || self.size_bytes == self.full_bytes {
            return self.size_bytes;
        }
        self.grown = Some(now);
        let step_bytes = (self.full_bytes / GROW_PART).max(SHRINK_BYTES_MIN);
        (self.size_bytes + step_bytes.min(spare_bytes)).min(self.full_bytes)
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
    let text = format!("some {} {window_us}\0", window_us / u128::from(STALL_PART));
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
    /// Returns true if some task waited for memory during a tenth of the window or more.
    fn has_stalled(&mut self, total_us: Option<u64>, now: Instant) -> bool {
        let Some(total_us) = total_us else {
            return false;
        };
        let (begin_us, begin) = *self.begin.get_or_insert((total_us, now));
        let stalled_us = u128::from(total_us.saturating_sub(begin_us));
        let stalled = stalled_us >= STALL_WINDOW.as_micros() / u128::from(STALL_PART);
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
    /// Path of the file that reports the host's memory; None if the pool never shrinks for the
    /// host.
    meminfo: Option<PathBuf>,
    /// Number of steps so far that made the pool smaller.
    pub shrinks: AtomicU64,
    /// Number of steps so far that made the pool larger again.
    pub grows: AtomicU64,
}

impl PoolSize {
    /// Creates the value for a pool that has its configured size.
    pub fn new(
        pressure: Option<&PressureConfig>,
        full_bytes: u64,
        engine: Arc<Engine>,
        background: Arc<BackgroundWorkers>,
        events: Arc<Events>,
    ) -> PoolSize {
        let free_min_bytes = pressure.map_or(0, |pressure| pressure.host_free_min_bytes);
        PoolSize {
            governor: Mutex::new(Governor::new(free_min_bytes, full_bytes)),
            engine,
            background,
            events,
            meminfo: pressure.map(|pressure| pressure.meminfo.clone()),
            shrinks: AtomicU64::new(0),
            grows: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Governor> {
        self.governor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the configured size of the pool in bytes.
    pub fn full_bytes(&self) -> u64 {
        self.lock().full_bytes
    }

    /// Sets another configured size of the pool in bytes.
    pub fn set_full(&self, full_bytes: u64) {
        let governor = self.lock();
        self.engine.set_full(full_bytes);
        self.follow_full(governor, full_bytes);
    }

    /// Sets the pool's configured size, if one is given, together with the given quotas of tenants,
    /// in one step.
    ///
    /// # Errors
    /// A reserve does not fit into the pool. In this case, nothing changes.
    pub fn configure(
        &self,
        full_bytes: Option<u64>,
        quotas: &[(&Tenant, Quota)],
    ) -> Result<(), AdmissionError> {
        let governor = self.lock();
        self.engine.configure(full_bytes, quotas)?;
        if let Some(full_bytes) = full_bytes {
            self.follow_full(governor, full_bytes);
        }
        Ok(())
    }

    /// Gives the pool a new configured size. The engine has already checked that all reserves fit
    /// into it.
    fn follow_full(&self, mut governor: MutexGuard<'_, Governor>, full_bytes: u64) {
        let size_bytes = governor.set_full(full_bytes);
        self.engine.resize(size_bytes);
        drop(governor);
        self.background.wake();
        let text = format_args!("the configured size of the pool is now {full_bytes} bytes");
        self.events.emit(EventKind::Resized, None, text);
    }

    /// Sets the memory in bytes that the pool leaves available on the host.
    pub fn set_free_min(&self, free_min_bytes: u64) {
        self.lock().free_min_bytes = free_min_bytes;
    }

    /// Resizes the pool if the new readings of the host require it.
    fn follow(&self, now: Instant, readings: Readings) {
        let mut governor = self.lock();
        let before_bytes = governor.size_bytes;
        if governor
            .step(now, readings, self.engine.held_bytes())
            .is_some()
        {
            let why = format_args!("the host is or was short of memory ({readings:?})");
            self.resized(governor, before_bytes, why);
        }
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

    fn available_bytes(&self) -> Option<u64> {
        let meminfo = std::fs::read_to_string(self.meminfo.as_deref()?).unwrap_or_default();
        meminfo_bytes(&meminfo, "MemAvailable")
    }

    /// Resizes the pool to the size that the governor has decided. Logs and counts the change.
    fn resized(
        &self,
        governor: MutexGuard<'_, Governor>,
        before_bytes: u64,
        why: std::fmt::Arguments<'_>,
    ) {
        let (size_bytes, full_bytes) = (governor.size_bytes, governor.full_bytes);
        self.engine.resize(size_bytes);
        drop(governor);
        self.background.wake();
        let counter = match size_bytes < before_bytes {
            true => &self.shrinks,
            false => &self.grows,
        };
        counter.fetch_add(1, Relaxed);
        // Events are sent only for the first step in which the pool shrinks, and for the last step
        // in which it grows.
        if before_bytes == full_bytes {
            let text = format_args!("the pool shrinks from {before_bytes} bytes: {why}");
            self.events.emit(EventKind::HostShort, None, text);
            tracing::warn!(size_bytes, "the pool shrinks: {why}");
        } else if size_bytes == full_bytes {
            let text = format_args!("the pool has its configured size of {full_bytes} bytes again");
            self.events.emit(EventKind::HostWell, None, text);
            tracing::info!(size_bytes, "the pool is back at its configured size");
        } else {
            tracing::debug!(size_bytes, "the pool's size changes: {why}");
        }
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
    loop {
        heartbeat.work();
        let meminfo = std::fs::read_to_string(&config.meminfo).unwrap_or_default();
        let pressure = config.stalls.as_deref().map(std::fs::read_to_string);
        let total_us = pressure.and_then(|text| stall_us(&text.ok()?));
        let now = Instant::now();
        let readings = Readings {
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
            stalled: stalls.has_stalled(total_us, now),
        };
        size.follow(now, readings);
        heartbeat.rest();
        // A PSI trigger that has fired does not fire again within its window, even if the shortage
        // continues. The thread therefore also reads the host's memory after [`PERIOD`] without a
        // report.
        let begun = Instant::now();
        if !wait(trigger.as_ref(), stop, PERIOD) {
            return;
        }
        let rest = PERIOD_MIN.saturating_sub(begun.elapsed());
        if !rest.is_zero() && !wait(None, stop, rest) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const FULL: u64 = 8 * GIB;
    const FREE_MIN: u64 = GIB;

    /// Simulated host. Its pool uses all memory that it may use, and releases memory at once.
    struct TestHost {
        governor: Governor,
        now: Instant,
        /// Memory in bytes that would be available on the host if the pool used none.
        others: u64,
        size: u64,
    }

    impl TestHost {
        fn new(others: u64) -> TestHost {
            TestHost {
                governor: Governor::new(FREE_MIN, FULL),
                now: Instant::now(),
                others,
                size: FULL,
            }
        }

        fn available(&self) -> u64 {
            self.others.saturating_sub(self.size)
        }

        fn step(&mut self, stalled: bool) -> u64 {
            self.now += PERIOD;
            let readings = Readings {
                available_bytes: Some(self.available()),
                stalled,
            };
            if let Some(size) = self.governor.step(self.now, readings, self.size) {
                assert!(
                    size.abs_diff(self.size) <= (self.size / SHRINK_PART).max(FULL / GROW_PART)
                );
                self.size = size;
            }
            self.size
        }
    }

    #[test]
    fn requested_host_memory_is_released_at_once_and_stays_free() {
        let mut host = TestHost::new(12 * GIB);
        // The host has 4 GiB of available memory, of which 1 GiB must stay available.
        assert_eq!(host.governor.make_room(3 * GIB, 4 * GIB, FULL), None);
        let made = host.governor.make_room(5 * GIB, 4 * GIB, FULL);
        assert_eq!(
            made,
            Some(6 * GIB),
            "the pool did not shrink in one step by the missing 2 GiB"
        );
        host.size = 6 * GIB;
        assert_eq!(host.governor.make_room(5 * GIB, 6 * GIB, 6 * GIB), None);
        let since = host.now;
        while host.step(false) == 6 * GIB {
            assert!(
                host.now - since < 2 * CALM,
                "the pool did not grow back within twice the quiet period"
            );
        }
        assert!(host.now - since >= CALM);
        // Here, more memory is requested than the host has, so the pool shrinks to its minimum.
        let made = host.governor.make_room(1 << 60, 0, 6 * GIB);
        assert_eq!(made, Some(POOL_BYTES_MIN));
        // The pool may use 8 GiB, but uses only 3 GiB. To free the missing 2 GiB, its size must
        // become 1 GiB.
        let mut host = TestHost::new(12 * GIB);
        let made = host.governor.make_room(5 * GIB, 4 * GIB, 3 * GIB);
        assert_eq!(made, Some(GIB));
    }

    #[test]
    fn the_pool_shrinks_by_exactly_the_missing_host_memory() {
        let mut host = TestHost::new(12 * GIB);
        assert_eq!(
            host.step(false),
            FULL,
            "the pool shrank although enough memory is available"
        );
        host.others = 6 * GIB;
        let steps = (1..100).find(|_| {
            host.step(false);
            host.available() >= FREE_MIN
        });
        assert!(
            steps.unwrap() < 10,
            "the missing memory was available only after {steps:?} steps, expected fewer than 10"
        );
        assert_eq!(
            host.size,
            5 * GIB,
            "the pool did not shrink by exactly the missing memory"
        );
        // The pool does not grow, because the host has less than a quarter more than the minimum
        // available.
        for _ in 0..100 {
            assert_eq!(host.step(false), 5 * GIB);
        }
    }

    #[test]
    fn the_pool_grows_back_slowly_after_a_quiet_period() {
        let mut host = TestHost::new(4 * GIB);
        while host.available() < FREE_MIN {
            host.step(false);
        }
        let small = host.size;
        host.others = 20 * GIB;
        let calm_steps = (CALM.as_secs() / PERIOD.as_secs()) as usize;
        for _ in 0..calm_steps {
            assert_eq!(host.step(false), small);
        }
        // If tasks wait for memory once, the quiet period begins again and the pool shrinks.
        assert!(host.step(true) < small);
        let small = host.size;
        for _ in 0..calm_steps {
            assert_eq!(host.step(false), small);
        }
        let mut steps = 0;
        while host.size < FULL {
            host.step(false);
            steps += 1;
            assert!(
                steps < 200,
                "the pool did not regain its full size within 200 steps"
            );
        }
        assert!(
            steps > 60,
            "the pool grew back in {steps} steps, expected more than 60"
        );
    }

    #[test]
    fn the_pool_size_does_not_oscillate_under_constant_load() {
        // The host has 5 GiB, which suffices for a pool of 4 GiB and the minimum of 1 GiB.
        let mut host = TestHost::new(5 * GIB);
        let mut changes = 0;
        for nth in 0..2000 {
            let before = host.size;
            let changed = host.step(false) != before;
            changes += usize::from(nth > 200 && changed);
        }
        assert!(
            changes < 5,
            "the pool size changed {changes} times under a constant load, expected at most 4"
        );
    }

    #[test]
    fn memory_stalls_shrink_the_pool_to_its_minimum() {
        let mut host = TestHost::new(100 * GIB);
        let mut steps = 0;
        while host.size > POOL_BYTES_MIN {
            host.step(true);
            steps += 1;
            assert!(
                steps < 200,
                "the pool did not shrink to its minimum: it has {} bytes after {steps} steps",
                host.size
            );
        }
        for _ in 0..10 {
            assert_eq!(host.step(true), POOL_BYTES_MIN);
        }
    }

    #[test]
    fn shrinking_takes_unused_pool_memory_first() {
        let mut governor = Governor::new(FREE_MIN, FULL);
        let readings = Readings {
            available_bytes: Some(FREE_MIN - (1 << 20)),
            stalled: false,
        };
        let size = governor.step(Instant::now(), readings, GIB).unwrap();
        assert_eq!(size, GIB - (1 << 20));
        let unknown = Readings {
            available_bytes: None,
            stalled: false,
        };
        assert_eq!(governor.step(Instant::now(), unknown, GIB), None);
    }

    #[test]
    fn a_larger_pool_size_applies_only_if_the_host_has_memory() {
        let mut host = TestHost::new(100 * GIB);
        assert_eq!(host.governor.set_full(2 * FULL), 2 * FULL);
        assert_eq!(host.governor.set_full(FULL), FULL);
        host.step(true);
        let small = host.size;
        assert_eq!(
            host.governor.set_full(2 * FULL),
            small,
            "the pool grew although the host is short of memory"
        );
        assert_eq!(
            host.governor.set_full(GIB),
            GIB,
            "a smaller pool size was refused while the host is short of memory"
        );
        host.size = GIB;
        assert_eq!(
            host.governor.set_full(2 * GIB),
            2 * GIB,
            "the pool had its configured size of 1 GiB and did not grow to 2 GiB at once"
        );
    }

    #[test]
    fn memory_stalls_are_summed_over_the_window() {
        let mut stalls = Stalls::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert!(
            !stalls.has_stalled(Some(1_000_000), at(0)),
            "stalls before the first reading were counted"
        );
        assert!(!stalls.has_stalled(Some(1_100_000), at(1000)));
        assert!(
            stalls.has_stalled(Some(1_200_000), at(1500)),
            "stalls for a tenth of the window were not reported"
        );
        assert!(
            !stalls.has_stalled(Some(1_300_000), at(2500)),
            "stalls were not counted from 0 again after the report"
        );
        assert!(
            !stalls.has_stalled(Some(1_310_000), at(3600)),
            "stalls of the ended window were counted"
        );
        assert!(!stalls.has_stalled(Some(1_490_000), at(4500)));
        assert!(!stalls.has_stalled(None, at(5000)));
        assert!(
            !stalls.has_stalled(Some(5), at(5100)),
            "a counter that restarted from a smaller value was taken for a stall"
        );
    }

    #[test]
    fn the_total_stall_time_is_parsed_from_psi() {
        let pressure = "some avg10=1.53 avg60=0.87 avg300=0.26 total=42424242\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(stall_us(pressure), Some(42_424_242));
        assert_eq!(stall_us("full avg10=0.00 total=7\n"), None);
        assert_eq!(stall_us(""), None);
    }
}
