// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the adjustment of the pool to the host's memory, most of them with simulated hosts whose
//! other programs take and free memory at given rates.

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
    /// Memory in bytes that the daemon's control group has left below its limits.
    group: Option<u64>,
    /// Sum of the reserves of all VMs in bytes.
    reserved: u64,
    size: u64,
}

impl TestHost {
    fn new(others: u64) -> TestHost {
        TestHost {
            governor: Governor::new(FREE_MIN, FULL),
            now: Instant::now(),
            others,
            group: None,
            reserved: 0,
            size: FULL,
        }
    }

    fn available(&self) -> u64 {
        self.others.saturating_sub(self.size)
    }

    fn step(&mut self, stalled: bool) -> u64 {
        self.now += PERIOD;
        let readings = Readings {
            available: Available {
                host_bytes: Some(self.available()),
                group_bytes: self.group,
                ..Available::default()
            },
            stalled,
        };
        let (now, size, reserved) = (self.now, self.size, self.reserved);
        if let Some(change) = self.governor.step(now, readings, size, || reserved) {
            let size = change.size_bytes;
            assert!(
                size.abs_diff(self.size) <= (self.size / SHRINK_DIVISOR).max(FULL / GROW_DIVISOR)
            );
            self.size = size;
        }
        self.size
    }

    /// Makes steps during which tasks wait for memory, until the pool keeps its size.
    fn stall(&mut self) -> u64 {
        let mut steps = 0;
        while self.size != self.step(true) {
            steps += 1;
            assert!(steps < 200, "the pool still shrinks after {steps} steps");
        }
        self.size
    }
}

/// Simulated host on which other processes take memory at a constant rate.
struct BurstHost {
    governor: Governor,
    now: Instant,
    available: u64,
    /// Memory in bytes that the pool holds. It follows the pool's size with a delay.
    held: u64,
    /// Bytes that the pool releases in a second.
    release_rate: u64,
    /// Bytes of released memory that the kernel will keep in lists of each processor and will not
    /// count as available.
    hidden: u64,
    /// Smallest amount of memory in bytes that was available so far.
    least: u64,
    until_reading: Duration,
}

impl BurstHost {
    const TICK: Duration = Duration::from_millis(10);

    fn new(available: u64, release_rate: u64) -> BurstHost {
        BurstHost {
            governor: Governor::new(FREE_MIN, FULL),
            now: Instant::now(),
            available,
            held: FULL,
            release_rate,
            hidden: 0,
            least: available,
            until_reading: Duration::ZERO,
        }
    }

    /// Lets time pass while other processes take `rate` bytes in a second.
    fn pass(&mut self, time: Duration, rate: u64) {
        let part = |rate: u64| rate * BurstHost::TICK.as_millis() as u64 / 1000;
        let end = self.now + time;
        while self.now < end {
            if self.until_reading.is_zero() {
                let available = Available {
                    host_bytes: Some(self.available),
                    ..Available::default()
                };
                let readings = Readings {
                    available,
                    stalled: false,
                };
                self.governor.step(self.now, readings, self.held, || 0);
                self.until_reading = self.governor.period(available);
            }
            let over = self.held.saturating_sub(self.governor.size_bytes);
            let released = over.min(part(self.release_rate));
            self.held -= released;
            let hidden = released.min(self.hidden);
            self.hidden -= hidden;
            self.available = (self.available + released - hidden).saturating_sub(part(rate));
            self.least = self.least.min(self.available);
            self.now += BurstHost::TICK;
            self.until_reading -= BurstHost::TICK;
        }
    }
}

/// Other processes take as much memory as the pool has. At first, the host has more memory
/// available than the pool keeps available, or exactly that much.
#[test]
fn the_host_is_not_out_of_memory_in_a_burst_that_the_pool_can_follow() {
    for rate in [GIB, 3 * GIB, 6 * GIB] {
        for available in [
            FREE_MIN,
            2 * FREE_MIN,
            5 * FREE_MIN,
            10 * FREE_MIN,
            30 * GIB,
        ] {
            let mut host = BurstHost::new(available, rate + rate / 4);
            host.pass(Duration::from_secs(10), 0);
            assert_eq!(host.held, FULL, "the pool shrank without a burst");
            let taken = available - FREE_MIN + FULL - POOL_BYTES_MIN;
            host.pass(Duration::from_millis(taken / (rate / 1000)), rate);
            assert!(
                host.least > FREE_MIN / 16,
                "with {available} bytes at first, a burst of {rate} bytes/s left only {} bytes",
                host.least
            );
        }
    }
}

#[test]
fn a_burst_that_ends_costs_the_pool_little_more_than_the_burst_took() {
    let hidden = 200 << 20;
    for rate in [GIB, 3 * GIB, 5 * GIB] {
        for (periods, hidden) in [(1, 0), (2, 0), (5, 0), (12, 0), (3, hidden), (12, hidden)] {
            let mut host = BurstHost::new(FREE_MIN, 2 * rate);
            host.hidden = hidden;
            host.pass(Duration::from_secs(10), 0);
            let time = PERIOD_MIN * periods;
            host.pass(time, rate);
            host.pass(CALM / 2, 0);
            let period_bytes = rate / 1000 * PERIOD_MIN.as_millis() as u64;
            let taken = period_bytes * u64::from(periods);
            let lost = FULL - host.held;
            assert!(
                (taken..=taken + 2 * period_bytes + 2 * hidden).contains(&lost),
                "a burst of {taken} bytes at {rate} bytes/s cost the pool {lost} bytes"
            );
        }
    }
}

/// Each reading shows less memory than before, and the pool has not yet released what it was
/// told to release. The pool must not release that memory twice.
#[test]
fn memory_that_the_pool_still_has_to_release_counts_as_available() {
    let mut host = BurstHost::new(FREE_MIN / 2, 0);
    host.pass(Duration::from_secs(5), 0);
    assert_eq!(host.governor.size_bytes, FULL - FREE_MIN / 2);
}

/// Without a burst, a reading that stays low although the pool releases memory may be out of
/// date.
#[test]
fn only_a_burst_lifts_the_limit_of_a_step() {
    let step = |available: [u64; 3]| {
        let mut governor = Governor::new(FREE_MIN, FULL);
        let mut now = Instant::now();
        for available in available {
            now += PERIOD_MIN;
            let readings = Readings {
                available: Available {
                    host_bytes: Some(available),
                    ..Available::default()
                },
                stalled: false,
            };
            governor.step(now, readings, GIB, || 0);
        }
        GIB - governor.size_bytes.min(GIB)
    };
    // One drop, and memory that was missing already at the first reading.
    assert_eq!(step([5 * GIB, 5 * GIB, 0]), GIB / SHRINK_DIVISOR);
    // A burst of 600 MiB in each period: what is missing now and will be missing at the next
    // reading.
    let per_period = 600 << 20;
    assert_eq!(
        step([GIB + 2 * per_period, GIB + per_period, GIB]),
        per_period
    );
    assert_eq!(
        step([GIB + per_period, GIB, GIB - (100 << 20)]),
        2 * (100 << 20)
    );
}

#[test]
fn the_pool_shrinks_at_once_for_requested_memory_and_grows_after_the_quiet_period() {
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
    let free_min = 3 * GIB;
    host.governor.free_min_bytes = free_min;
    host.others = FULL;
    let steps = (1..100).find(|_| {
        host.step(false);
        host.available() >= free_min
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
    // If tasks wait for memory once while little is available, the quiet period begins again and
    // the pool shrinks.
    host.others = small + 2 * FREE_MIN;
    assert!(host.step(true) < small);
    host.others = 20 * GIB;
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
            "the pool did not regain its configured size within 200 steps"
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

/// On a host with 24 GiB available, tasks of one control group waited for memory during 15 % of
/// the time because of the limit of that group. The pool must keep its size.
#[test]
fn memory_stalls_do_not_shrink_the_pool_while_the_host_has_enough_memory() {
    let mut host = TestHost::new(24 * GIB + FULL);
    for _ in 0..300 {
        assert_eq!(host.step(true), FULL);
    }
    // The pool had shrunk before, and grows although tasks wait.
    host.others = FULL;
    host.step(false);
    let small = host.size;
    host.others = 24 * GIB + FULL;
    for _ in 0..20 {
        host.step(true);
    }
    assert!(
        host.size > small,
        "the pool does not grow while tasks of another group wait for memory"
    );
}

#[test]
fn memory_stalls_shrink_the_pool_only_until_enough_memory_is_available() {
    let enough = STALL_FREE_FACTOR * FREE_MIN;
    let mut host = TestHost::new(FULL + 2 * FREE_MIN);
    let size = host.stall();
    assert!(
        host.available() >= enough && host.available() < enough + FULL / STALL_SHRINK_DIVISOR,
        "the pool released memory until {} bytes are available, expected {enough}",
        host.available()
    );
    assert!(size > FULL / 2);
}

/// ZFS does not release its ARC while tasks wait, for example because the ARC is pinned.
#[test]
fn memory_stalls_count_although_the_arc_is_large() {
    let shrinks = |arc_bytes| {
        let mut governor = Governor::new(FREE_MIN, FULL);
        let readings = Readings {
            available: Available {
                host_bytes: Some(60 * GIB),
                arc_bytes,
                ..Available::default()
            },
            stalled: true,
        };
        let change = governor.step(Instant::now(), readings, FULL, || 0);
        change.is_some_and(|change| change.reason == Reason::Stalls)
    };
    assert!(!shrinks(0));
    assert!(!shrinks(60 * GIB - STALL_FREE_FACTOR * FREE_MIN));
    assert!(shrinks(60 * GIB - STALL_FREE_FACTOR * FREE_MIN + 1));
}

#[test]
fn memory_stalls_never_take_the_reserves() {
    let stalled = |group, available, reserved| {
        let mut host = TestHost::new(0);
        host.group = group;
        host.reserved = reserved;
        let mut steps = 0;
        loop {
            // The available memory stays the same, whatever the pool releases.
            host.others = available + host.size;
            let before = host.size;
            if host.step(true) == before {
                return before;
            }
            steps += 1;
            assert!(steps < 200, "the pool still shrinks after {steps} steps");
        }
    };
    // Other processes take what the pool releases, so the host needs more than the minimum not
    // to be short of memory.
    let short = 2 * FREE_MIN;
    assert_eq!(stalled(None, short, 3 * GIB), 3 * GIB);
    assert_eq!(stalled(None, short, 0), POOL_BYTES_MIN);
    // An operator may have reserved more than the pool has now.
    assert_eq!(stalled(None, short, 2 * FULL), FULL);
    // The daemon's control group is at its limit, so a smaller pool helps its tasks.
    assert_eq!(stalled(Some(0), 24 * GIB, 3 * GIB), 3 * GIB);
    assert_eq!(stalled(Some(24 * GIB), 24 * GIB, 0), FULL);
    // If the host has less than the minimum, its need comes before the reserves.
    assert!(stalled(None, FREE_MIN / 2, 3 * GIB) < 3 * GIB);
}

#[test]
fn without_a_minimum_memory_stalls_count_while_nearly_no_memory_is_left() {
    let size = |host_bytes| {
        let mut governor = Governor::new(0, FULL);
        let readings = Readings {
            available: Available {
                host_bytes,
                ..Available::default()
            },
            stalled: true,
        };
        governor.step(Instant::now(), readings, FULL, || 0);
        governor.size_bytes
    };
    assert!(size(Some(128 << 20)) < FULL);
    assert_eq!(size(Some(GIB)), FULL);
    assert!(
        size(None) < FULL,
        "stalls did not count on a host that does not report its available memory"
    );
}

#[test]
fn both_reasons_of_a_smaller_pool_are_reported_apart() {
    let reason = |available: u64, stalled| {
        let mut governor = Governor::new(FREE_MIN, FULL);
        let readings = Readings {
            available: Available {
                host_bytes: Some(available),
                group_bytes: Some(7),
                arc_bytes: 5,
                swap_free_bytes: 0,
            },
            stalled,
        };
        let change = governor.step(Instant::now(), readings, FULL, || 0);
        let reason = change.expect("the pool does not shrink").reason;
        (reason, why(reason, &governor, readings))
    };
    let (short, text) = reason(FREE_MIN - 1, true);
    assert_eq!(short, Reason::HostShort);
    assert!(
        text.contains("1073741823 bytes") && text.contains("host_free_min"),
        "the message lacks a value: {text}"
    );
    let (stalls, text) = reason(FREE_MIN, true);
    assert_eq!(stalls, Reason::Stalls);
    for part in [
        "PSI",
        "1073741824 bytes",
        "4294967296 bytes",
        "7 bytes more",
    ] {
        assert!(text.contains(part), "the message lacks {part:?}: {text}");
    }
}

#[test]
fn shrinking_subtracts_from_held_memory_and_not_from_the_pool_size() {
    let mut governor = Governor::new(FREE_MIN, FULL);
    let readings = |host_bytes| Readings {
        available: Available {
            host_bytes,
            ..Available::default()
        },
        stalled: false,
    };
    let short = readings(Some(FREE_MIN - (1 << 20)));
    let change = governor.step(Instant::now(), short, GIB, || GIB).unwrap();
    assert_eq!(change.size_bytes, GIB - (1 << 20));
    let unknown = readings(None);
    assert_eq!(governor.step(Instant::now(), unknown, GIB, || 0), None);
}

#[test]
fn a_larger_pool_size_applies_only_if_the_host_has_memory() {
    let mut host = TestHost::new(100 * GIB);
    assert_eq!(host.governor.set_configured_size(2 * FULL), 2 * FULL);
    assert_eq!(host.governor.set_configured_size(FULL), FULL);
    host.others = FULL;
    host.step(false);
    let small = host.size;
    assert_eq!(
        host.governor.set_configured_size(2 * FULL),
        small,
        "the pool grew although the host is short of memory"
    );
    assert_eq!(
        host.governor.set_configured_size(GIB),
        GIB,
        "a smaller pool size was refused while the host is short of memory"
    );
    host.size = GIB;
    assert_eq!(
        host.governor.set_configured_size(2 * GIB),
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
        !stalls.record(Some(1_000_000), at(0)),
        "stalls before the first reading were counted"
    );
    assert!(!stalls.record(Some(1_100_000), at(1000)));
    assert!(
        stalls.record(Some(1_200_000), at(1500)),
        "stalls for a tenth of the window were not reported"
    );
    assert!(
        !stalls.record(Some(1_300_000), at(2500)),
        "stalls were not counted from 0 again after the report"
    );
    assert!(
        !stalls.record(Some(1_310_000), at(3600)),
        "stalls of the ended window were counted"
    );
    assert!(!stalls.record(Some(1_490_000), at(4500)));
    assert!(!stalls.record(None, at(5000)));
    assert!(
        !stalls.record(Some(5), at(5100)),
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

#[test]
fn a_reading_that_fails_leaves_the_last_known_memory() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = PressureConfig {
        meminfo: directory.path().join("meminfo"),
        ..PressureConfig::default()
    };
    let mut last = LastAvailable::default();
    let mut host_bytes = || last.record(Available::read(&config)).host_bytes;
    assert_eq!(host_bytes(), None);
    let text = "MemAvailable: 8 kB\nSwapFree: 4 kB\n";
    std::fs::write(&config.meminfo, text).expect("cannot write the file");
    assert_eq!(host_bytes(), Some(8 << 10));
    std::fs::remove_file(&config.meminfo).expect("cannot remove the file");
    assert_eq!(host_bytes(), Some(8 << 10));
    assert_eq!(last.available.swap_free_bytes, 4 << 10);
}
