// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gives the pool's memory back when the host runs short of it.
//!
//! A thread looks at the memory that the host has available and at how long tasks waited for some
//! (PSI), at least once a second and at once when the kernel tells of such waits. What is missing
//! comes out of the pool in steps; when the host has been well for a while the pool's size grows
//! back, slowly, as a pool that grew as fast as it shrank would swing. Everything in a pool is a copy:
//! giving it up costs time, never data.

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
use tmem_pool::{AdmissionError, Pool, Quota, Tenant};

/// Between two looks without a sign from the kernel. A guest's host fills some GiB in this time,
/// which is what `host_free_min_bytes` is for.
const PERIOD: Duration = Duration::from_secs(1);

/// Not more often than this after a sign: freeing a step takes some of it, and what the host has
/// available follows only then.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Waits that count as a shortage: a tenth of the time somebody waited for memory.
const STALL_PART: u32 = 10;

/// Over so long; a multiple of two seconds needs no privilege (Documentation/accounting/psi.rst).
const STALL_WINDOW: Duration = Duration::from_secs(2);

/// One step takes at most so much of what the pool holds, when memory is missing: a reading that is
/// out of date, as after a burst, must not empty the pool, and eight steps leave a third.
const SHRINK_PART: u64 = 8;

/// And so much when somebody waits though enough is available: that may be for a limit of their own,
/// which the pool cannot help.
const STALL_SHRINK_PART: u64 = 16;

/// But at least this, so that the end comes in bounded time.
const SHRINK_BYTES_MIN: u64 = 4 << 20;

/// It grows only while a quarter more is available than has to be, or what it gains is missing at
/// once.
const MARGIN_PART: u64 = 4;

/// And when nothing was short for so long: longer than the window of waits, than a sweep of the
/// kernel through its lists, and than most bursts.
const CALM: Duration = Duration::from_secs(15);

/// A step of growth is so much of the configured size: back from nothing within two minutes.
const GROW_PART: u64 = 64;

/// Growth steps are as far from each other.
const GROW_PERIOD: Duration = Duration::from_secs(2);

/// Somebody who asked for room waits so long at most: memory comes back at some GiB a second, and a
/// VM's start is not to hang on it.
pub const ROOM_WAIT: Duration = Duration::from_secs(1);

/// Between two looks at whether there is room.
const ROOM_POLL: Duration = Duration::from_millis(5);

/// What the host says.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// Memory that the host could give without reclaim hurting anyone; None: it does not say.
    available_bytes: Option<u64>,
    /// Somebody waits for memory.
    stalled: bool,
}

/// Decides the pool's size. No clock, no files: these are told.
#[derive(Debug)]
struct Governor {
    free_min_bytes: u64,
    /// As configured.
    full_bytes: u64,
    size_bytes: u64,
    /// Nothing is short since.
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

    /// Another configured size. Returns the size that the pool should have now.
    fn set_full(&mut self, full_bytes: u64) -> u64 {
        // One that gave way to the host grows as before, and does not jump.
        let is_full = self.size_bytes == self.full_bytes;
        self.full_bytes = full_bytes;
        if is_full || self.size_bytes > full_bytes {
            self.size_bytes = full_bytes;
        }
        self.size_bytes
    }

    /// The size that the pool should have from now on, if it is another one. `held_bytes`: what it
    /// holds.
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
            // What it has not taken yet is no help to the host, but must not be taken now either.
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

    /// The size that leaves `room_bytes` to somebody who is about to take them, if it is another one.
    /// Of `available_bytes` it is known that they are not out of date, so all goes in one step.
    fn make_room(&mut self, room_bytes: u64, available_bytes: u64, held_bytes: u64) -> Option<u64> {
        // Nor does it grow before they can be taken.
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

/// How long any task has waited, in µs, of a file of PSI.
fn stall_us(pressure: &str) -> Option<u64> {
    let some = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some "))?;
    let total = some
        .split(' ')
        .find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok()
}

/// Has the kernel tell when somebody waits. None: it does not, and looking has to do.
fn trigger(path: &Path) -> Option<File> {
    let mut file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    let window_us = STALL_WINDOW.as_micros();
    let text = format!("some {} {window_us}\0", window_us / u128::from(STALL_PART));
    match file.write_all(text.as_bytes()) {
        Ok(()) => Some(file),
        Err(error) => {
            tracing::info!("{}: no trigger: {error}; looking instead", path.display());
            None
        }
    }
}

/// Waits of the last while, from the total that a file tells.
#[derive(Debug, Default)]
struct Stalls {
    /// The total and when it was that, at the window's begin.
    begin: Option<(u64, Instant)>,
}

impl Stalls {
    /// Somebody waited for a tenth of the window or more, up to now.
    fn look(&mut self, total_us: Option<u64>, now: Instant) -> bool {
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

/// The pool's size: what operators want, as far as the host lets them. Everybody who changes it does so
/// here.
pub struct PoolSize {
    /// Guards the decision until the pool has it. The pool's registry is locked under it, and it under the
    /// list of VMs.
    governor: Mutex<Governor>,
    pool: Arc<Pool>,
    background: Arc<BackgroundWorkers>,
    events: Arc<Events>,
    /// Where the host says what it has; None: the pool never gives way to it.
    meminfo: Option<PathBuf>,
    /// Steps that made it smaller.
    pub shrinks: AtomicU64,
    /// Steps that made it larger again.
    pub grows: AtomicU64,
}

impl PoolSize {
    /// Of a pool that has its configured size.
    pub fn new(
        pressure: Option<&PressureConfig>,
        full_bytes: u64,
        pool: Arc<Pool>,
        background: Arc<BackgroundWorkers>,
        events: Arc<Events>,
    ) -> PoolSize {
        let free_min_bytes = pressure.map_or(0, |pressure| pressure.host_free_min_bytes);
        PoolSize {
            governor: Mutex::new(Governor::new(free_min_bytes, full_bytes)),
            pool,
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

    /// As configured.
    pub fn full_bytes(&self) -> u64 {
        self.lock().full_bytes
    }

    /// Another configured size.
    pub fn set_full(&self, full_bytes: u64) {
        let governor = self.lock();
        self.pool.set_full(full_bytes);
        self.follow_full(governor, full_bytes);
    }

    /// Another configured size, if one is given, and other quotas, all at once.
    ///
    /// # Errors
    /// A reserve does not fit; then nothing changes.
    pub fn configure(
        &self,
        full_bytes: Option<u64>,
        quotas: &[(&Tenant, Quota)],
    ) -> Result<(), AdmissionError> {
        let governor = self.lock();
        self.pool.configure(full_bytes, quotas)?;
        if let Some(full_bytes) = full_bytes {
            self.follow_full(governor, full_bytes);
        }
        Ok(())
    }

    /// The pool admits by that size already.
    fn follow_full(&self, mut governor: MutexGuard<'_, Governor>, full_bytes: u64) {
        let size_bytes = governor.set_full(full_bytes);
        self.pool.resize(size_bytes);
        drop(governor);
        self.background.wake();
        let text = format_args!("the pool's size is to be {full_bytes} bytes");
        self.events.tell(EventKind::Resized, None, text);
    }

    /// So much of the host's memory should be available from now on.
    pub fn set_free_min(&self, free_min_bytes: u64) {
        self.lock().free_min_bytes = free_min_bytes;
    }

    /// Follows what the host says.
    fn follow(&self, now: Instant, readings: Readings) {
        let mut governor = self.lock();
        let before_bytes = governor.size_bytes;
        if governor
            .step(now, readings, self.pool.held_bytes())
            .is_some()
        {
            let why = format_args!("the host is or was short of memory ({readings:?})");
            self.resized(governor, before_bytes, why);
        }
    }

    /// Gives way to somebody who is about to take so much, and waits for it within [`ROOM_WAIT`].
    /// True: the host has it, or does not say what it has, or the pool never gives way.
    pub fn make_room(&self, room_bytes: u64) -> bool {
        let deadline = Instant::now() + ROOM_WAIT;
        let mut governor = self.lock();
        let Some(available_bytes) = self.available_bytes() else {
            return true;
        };
        let before_bytes = governor.size_bytes;
        let wanted_bytes = room_bytes.saturating_add(governor.free_min_bytes);
        let held_bytes = self.pool.held_bytes();
        let made = governor.make_room(room_bytes, available_bytes, held_bytes);
        let size_bytes = governor.size_bytes;
        if made.is_some() {
            let why = format_args!("{room_bytes} bytes of the host's memory are asked for");
            self.resized(governor, before_bytes, why);
        } else {
            drop(governor);
        }
        while self.pool.held_bytes() > size_bytes && Instant::now() < deadline {
            std::thread::sleep(ROOM_POLL);
        }
        self.available_bytes()
            .is_none_or(|available| available >= wanted_bytes)
    }

    fn available_bytes(&self) -> Option<u64> {
        let meminfo = std::fs::read_to_string(self.meminfo.as_deref()?).unwrap_or_default();
        meminfo_bytes(&meminfo, "MemAvailable")
    }

    /// Has the pool do what was decided.
    fn resized(
        &self,
        governor: MutexGuard<'_, Governor>,
        before_bytes: u64,
        why: std::fmt::Arguments<'_>,
    ) {
        let (size_bytes, full_bytes) = (governor.size_bytes, governor.full_bytes);
        self.pool.resize(size_bytes);
        drop(governor);
        self.background.wake();
        let counter = match size_bytes < before_bytes {
            true => &self.shrinks,
            false => &self.grows,
        };
        counter.fetch_add(1, Relaxed);
        // The first step and the last are news, those between are not.
        if before_bytes == full_bytes {
            let text = format_args!("the pool shrinks from {before_bytes} bytes: {why}");
            self.events.tell(EventKind::HostShort, None, text);
            tracing::warn!(size_bytes, "the pool shrinks: {why}");
        } else if size_bytes == full_bytes {
            let text = format_args!("the pool has its {full_bytes} bytes again");
            self.events.tell(EventKind::HostWell, None, text);
            tracing::info!(size_bytes, "the pool has its size again");
        } else {
            tracing::debug!(size_bytes, "the pool's size changes: {why}");
        }
    }
}

/// The thread that watches.
pub struct PressureWatcher {
    stop: Arc<OwnedFd>,
    /// Guards the thread's handle. Taken alone.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl PressureWatcher {
    /// Starts it.
    ///
    /// # Errors
    /// The system has no thread or descriptor.
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

    /// Ends it.
    pub fn stop(&self) {
        signal(&self.stop);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that watches the host's memory panicked");
        }
    }
}

/// Waits for a sign of the kernel or for the time. False: it is to stop.
fn wait(trigger: Option<&File>, stop: &OwnedFd, time: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    if let Some(trigger) = trigger {
        fds.push(PollFd::new(trigger, PollFlags::PRI));
    }
    // An error is a sign as good as any; the stop is looked at first.
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
            stalled: stalls.look(total_us, now),
        };
        size.follow(now, readings);
        heartbeat.rest();
        // A trigger that has fired is quiet for a window; shortage goes on all the same.
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

    /// A host with a pool that takes all it may, and frees at once.
    struct TestHost {
        governor: Governor,
        now: Instant,
        /// Available without the pool.
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
    fn room_is_made_at_once_and_kept_for_a_while() {
        let mut host = TestHost::new(12 * GIB);
        // 4 GiB are available, of which one is to stay.
        assert_eq!(host.governor.make_room(3 * GIB, 4 * GIB, FULL), None);
        let made = host.governor.make_room(5 * GIB, 4 * GIB, FULL);
        assert_eq!(made, Some(6 * GIB), "what is missing, in one step");
        host.size = 6 * GIB;
        assert_eq!(host.governor.make_room(5 * GIB, 6 * GIB, 6 * GIB), None);
        let since = host.now;
        while host.step(false) == 6 * GIB {
            assert!(host.now - since < 2 * CALM, "it grows back");
        }
        assert!(host.now - since >= CALM);
        // More than there is.
        let made = host.governor.make_room(1 << 60, 0, 6 * GIB);
        assert_eq!(made, Some(POOL_BYTES_MIN));
        // It does not hold what it may, which is no help to the host.
        let mut host = TestHost::new(12 * GIB);
        let made = host.governor.make_room(5 * GIB, 4 * GIB, 3 * GIB);
        assert_eq!(made, Some(GIB));
    }

    #[test]
    fn it_leaves_the_host_what_it_needs_and_no_more() {
        let mut host = TestHost::new(12 * GIB);
        assert_eq!(host.step(false), FULL, "enough is free");
        host.others = 6 * GIB;
        let steps = (1..100).find(|_| {
            host.step(false);
            host.available() >= FREE_MIN
        });
        assert!(steps.unwrap() < 10, "{steps:?}");
        assert_eq!(host.size, 5 * GIB, "what is missing, to the byte");
        // It stays there: what is available is not a quarter more than has to be.
        for _ in 0..100 {
            assert_eq!(host.step(false), 5 * GIB);
        }
    }

    #[test]
    fn it_grows_back_late_and_slowly() {
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
        // Somebody waits once: it begins anew, and smaller.
        assert!(host.step(true) < small);
        let small = host.size;
        for _ in 0..calm_steps {
            assert_eq!(host.step(false), small);
        }
        let mut steps = 0;
        while host.size < FULL {
            host.step(false);
            steps += 1;
            assert!(steps < 200, "it has its size again some time");
        }
        assert!(steps > 60, "{steps} steps are no slow growth");
    }

    #[test]
    fn it_does_not_swing() {
        // Room for a pool of 4 GiB and what has to be free.
        let mut host = TestHost::new(5 * GIB);
        let mut changes = 0;
        for nth in 0..2000 {
            let before = host.size;
            let changed = host.step(false) != before;
            changes += usize::from(nth > 200 && changed);
        }
        assert!(changes < 5, "{changes} changes when nothing else does");
    }

    #[test]
    fn waits_shrink_it_down_to_the_least() {
        let mut host = TestHost::new(100 * GIB);
        let mut steps = 0;
        while host.size > POOL_BYTES_MIN {
            host.step(true);
            steps += 1;
            assert!(steps < 200, "{} B after {steps} steps", host.size);
        }
        for _ in 0..10 {
            assert_eq!(host.step(true), POOL_BYTES_MIN);
        }
    }

    #[test]
    fn room_that_was_not_taken_goes_first() {
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
    fn another_size_waits_for_the_host() {
        let mut host = TestHost::new(100 * GIB);
        assert_eq!(host.governor.set_full(2 * FULL), 2 * FULL);
        assert_eq!(host.governor.set_full(FULL), FULL);
        host.step(true);
        let small = host.size;
        assert_eq!(host.governor.set_full(2 * FULL), small, "the host is short");
        assert_eq!(host.governor.set_full(GIB), GIB, "smaller is possible");
        host.size = GIB;
        assert_eq!(host.governor.set_full(2 * GIB), 2 * GIB, "it was full");
    }

    #[test]
    fn stalls_of_the_window_count() {
        let mut stalls = Stalls::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert!(
            !stalls.look(Some(1_000_000), at(0)),
            "what was before is not known"
        );
        assert!(!stalls.look(Some(1_100_000), at(1000)));
        assert!(
            stalls.look(Some(1_200_000), at(1500)),
            "a tenth of the window"
        );
        assert!(!stalls.look(Some(1_300_000), at(2500)), "counted anew");
        assert!(!stalls.look(Some(1_310_000), at(3600)), "the window ends");
        assert!(!stalls.look(Some(1_490_000), at(4500)));
        assert!(!stalls.look(None, at(5000)));
        assert!(!stalls.look(Some(5), at(5100)), "another file");
    }

    #[test]
    fn the_total_stall_time_is_read() {
        let pressure = "some avg10=1.53 avg60=0.87 avg300=0.26 total=42424242\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(stall_us(pressure), Some(42_424_242));
        assert_eq!(stall_us("full avg10=0.00 total=7\n"), None);
        assert_eq!(stall_us(""), None);
    }
}
