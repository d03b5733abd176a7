// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Resources that the daemon uses, as the kernel counts them: memory, and processor time by kind of
//! thread.
//!
//! Counting costs almost nothing until the values are read. The kernel knows neither the kind of
//! background work nor the VM that a worker serves. Therefore background threads count their time
//! by kind of work with the types of this file, and workers count their time by VM in
//! `queue/vring.rs`.

use rustix::thread::Pid;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tmem_pool::Work;

/// The threads that do one stage of the daemon's work, such as the data workers. Each thread adds
/// itself with [`join`](Self::join) when it starts.
#[derive(Debug, Default)]
pub struct Stage(Mutex<Vec<Pid>>);

impl Stage {
    /// Adds the calling thread to this stage, for the rest of the daemon's life.
    pub fn join(&self) {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(rustix::thread::gettid());
    }

    /// Returns the sum of the processor times of all threads of this stage, in ms.
    pub fn cpu_ms(&self) -> u64 {
        let threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |thread: &Pid| {
            let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
            cpu_ms(&std::fs::read_to_string(path).unwrap_or_default())
        };
        threads.iter().map(one).sum()
    }
}

/// Processor time of background work, in ns, by kind of work.
#[derive(Debug, Default)]
pub struct BackgroundTime([AtomicU64; Work::ALL.len()]);

impl BackgroundTime {
    /// Begins to measure the processor time of the calling thread's background work.
    pub fn begin(&self) -> TimedWork<'_> {
        TimedWork {
            sums: self,
            begun_cpu_ns: clock_ns(ClockId::ThreadCPUTime),
            at: Work::Finalize,
            since_ns: clock_ns(ClockId::Monotonic),
            passed_ns: [0; Work::ALL.len()],
        }
    }

    /// Returns the processor time of finished background work of the given kind, in ms.
    pub fn cpu_ms(&self, work: Work) -> u64 {
        self.0[work as usize].load(Relaxed) / 1_000_000
    }
}

/// Measures the background work of a thread. Dropping the value adds the measured time to the sums
/// of [`BackgroundTime`].
///
/// The kind of work changes after about 30 pages, that is, every 100 µs. Reading the thread's CPU
/// clock needs a system call of half a microsecond, so that clock is read only when the measured
/// work begins and ends. The difference of both readings is divided among the kinds of work, in
/// proportion to the time that each kind took by the monotonic clock. Reading that clock needs no
/// system call. The sum over all kinds therefore equals the kernel's count, even if the thread
/// waited for a processor. The kind to which such a wait is added is random.
#[derive(Debug)]
pub struct TimedWork<'a> {
    sums: &'a BackgroundTime,
    begun_cpu_ns: u64,
    at: Work,
    since_ns: u64,
    passed_ns: [u64; Work::ALL.len()],
}

impl TimedWork<'_> {
    /// Records that the thread begins to do the given kind of background work.
    pub fn switch_to(&mut self, work: Work) {
        if work != self.at {
            let now_ns = clock_ns(ClockId::Monotonic);
            self.passed_ns[self.at as usize] += now_ns - self.since_ns;
            (self.at, self.since_ns) = (work, now_ns);
        }
    }
}

impl Drop for TimedWork<'_> {
    fn drop(&mut self) {
        // The monotonic clock does not run backwards. If it did nevertheless, the saturating
        // subtraction would avoid a panic.
        let last_ns = clock_ns(ClockId::Monotonic).saturating_sub(self.since_ns);
        self.passed_ns[self.at as usize] += last_ns;
        let cpu_ns = clock_ns(ClockId::ThreadCPUTime).saturating_sub(self.begun_cpu_ns);
        let parts = divide(cpu_ns, self.passed_ns);
        for (sum, part) in self.sums.0.iter().zip(parts) {
            sum.fetch_add(part, Relaxed);
        }
    }
}

/// Divides `sum` in proportion to `weights`. The sum of the parts never exceeds `sum`.
fn divide<const N: usize>(sum: u64, weights: [u64; N]) -> [u64; N] {
    let all: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let part = |weight| u128::from(sum) * u128::from(weight) / all.max(1);
    weights.map(|weight| part(weight) as u64)
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the processor time of the whole process in ms; 0 if the kernel does not report it.
pub fn process_cpu_ms() -> u64 {
    cpu_ms(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default())
}

/// Returns the resident memory of the daemon in bytes, without shared guest memory.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Returns the user time and the system time in a stat file of the kernel, added, in ms. They are
/// fields 14 and 15; see proc_pid_stat(5).
fn cpu_ms(stat: &str) -> u64 {
    // The second field of the file is a name in parentheses, which may contain blanks and
    // parentheses.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = after_name.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let sum = ticks().unwrap_or(0) + ticks().unwrap_or(0);
    sum * 1000 / rustix::param::clock_ticks_per_second().max(1)
}

/// Faults, context switches and processor time of the calling thread until a moment.
///
/// The kernel counts a wait for the swap device as a major page fault. Other waits for memory, for
/// example for a userfaultfd or for a front end that punches a hole, are only counted as voluntary
/// context switches, as waits for locks are. Reading the counts takes two system calls.
#[derive(Debug)]
pub struct Counts {
    major_faults: libc::c_long,
    voluntary_switches: libc::c_long,
    involuntary_switches: libc::c_long,
    cpu: Duration,
}

/// Time without a processor from which a slice with a major fault has waited for memory. Shorter
/// waits delay other VMs less than slices do.
const FAULT_MIN: Duration = Duration::from_millis(2);

/// Time without a processor from which a slice without a major fault has waited for memory: the time
/// that a guest's driver waits for a page. Locks and the scheduler delay slices by less.
const WAIT_MIN: Duration = Duration::from_millis(20);

impl Counts {
    /// Reads the counts, or returns None if the kernel does not give them.
    pub fn read() -> Option<Counts> {
        // SAFETY: an all-zero rusage is valid, because the structure consists of integers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one rusage, and `usage` is one.
        if unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) } != 0 {
            return None;
        }
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Some(Counts {
            major_faults: usage.ru_majflt,
            voluntary_switches: usage.ru_nvcsw,
            involuntary_switches: usage.ru_nivcsw,
            cpu: Duration::try_from(cpu).ok()?,
        })
    }

    /// Returns whether the thread has waited for memory in the time `took` since these counts. Waits
    /// that are no major faults count only if others took the processor less often.
    pub fn waited_for_memory(&self, took: Duration) -> bool {
        Counts::read().is_some_and(|now| self.is_wait(&now, took))
    }

    fn is_wait(&self, now: &Counts, took: Duration) -> bool {
        let off = took.saturating_sub(now.cpu.saturating_sub(self.cpu));
        let waits = now.voluntary_switches - self.voluntary_switches;
        let waited = waits > now.involuntary_switches - self.involuntary_switches;
        match now.major_faults > self.major_faults {
            true => off >= FAULT_MIN,
            false => off >= WAIT_MIN && waited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn long_waits_and_major_faults_count_as_waits_for_memory() {
        let counts = |major_faults, voluntary_switches, involuntary_switches, cpu_ms| Counts {
            major_faults,
            voluntary_switches,
            involuntary_switches,
            cpu: Duration::from_millis(cpu_ms),
        };
        let before = counts(5, 5, 5, 100);
        let waited = |now: Counts, ms| before.is_wait(&now, Duration::from_millis(ms));
        assert!(waited(counts(6, 6, 9, 101), 4), "a major fault");
        assert!(
            !waited(counts(6, 6, 5, 103), 4),
            "a fault that took no time"
        );
        assert!(waited(counts(5, 6, 5, 101), 22), "a long wait");
        assert!(!waited(counts(5, 6, 5, 101), 18), "a short wait");
        assert!(
            !waited(counts(5, 6, 6, 101), 22),
            "others used the processor"
        );
        assert!(!waited(counts(5, 5, 5, 101), 22), "no wait");
    }

    #[test]
    fn cpu_time_is_parsed_from_stat_for_any_thread_name() {
        let hz = rustix::param::clock_ticks_per_second();
        let stat = |name: &str| format!("7 ({name}) S 1 1 1 0 -1 0 1 2 3 4 {hz} {} 0 0", 2 * hz);
        assert_eq!(cpu_ms(&stat("worker-0")), 3000);
        assert_eq!(cpu_ms(&stat("a) b 1 2 (c")), 3000);
        assert_eq!(cpu_ms(""), 0);
    }

    #[test]
    fn divided_cpu_time_never_exceeds_the_measured_total() {
        assert_eq!(divide(100, [1, 2, 1]), [25, 50, 25]);
        assert_eq!(divide(100, [1, 1, 1]), [33, 33, 33]);
        assert_eq!(divide(7, [0, 0, 0]), [0, 0, 0]);
        assert_eq!(divide(7, [0, 9, 0]), [0, 7, 0]);
        assert_eq!(divide(u64::MAX, [u64::MAX, u64::MAX]), [u64::MAX / 2; 2]);
    }

    fn burn(ms: u64) {
        let begun_ns = clock_ns(ClockId::ThreadCPUTime);
        while clock_ns(ClockId::ThreadCPUTime) < begun_ns + ms * 1_000_000 {}
    }

    /// The test reads the expected times from the CPU clock of the thread that does the work,
    /// because other processes may delay the thread arbitrarily.
    #[test]
    fn cpu_time_is_counted_by_kind_of_work_and_excludes_waiting() {
        let background = BackgroundTime::default();
        let sums = || Work::ALL.map(|work| background.0[work as usize].load(Relaxed));
        let begun_ns = clock_ns(ClockId::ThreadCPUTime);
        let mut work_time = background.begin();
        work_time.switch_to(Work::Recompress);
        burn(20);
        // This call changes nothing, because the value already measures this kind of work.
        work_time.switch_to(Work::Recompress);
        burn(20);
        assert_eq!(sums(), [0; 3], "CPU time was counted before the work ended");
        drop(work_time);
        let [_, recompress, room] = sums();
        assert!(
            recompress > 0 && room == 0,
            "times by kind are {:?}, but only recompression used time",
            sums()
        );

        // The processor time of work that ends with a panic is counted, too.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut work_time = background.begin();
            work_time.switch_to(Work::Reclaim);
            burn(20);
            panic!("a simulated bug");
        }));
        assert!(panicked.is_err());
        assert!(
            sums()[Work::Reclaim as usize] > 0 && sums()[Work::Recompress as usize] == recompress
        );

        // While a thread waits, no processor time is counted for it.
        let work_time = background.begin();
        std::thread::sleep(Duration::from_millis(50));
        drop(work_time);
        let cpu_ns = clock_ns(ClockId::ThreadCPUTime) - begun_ns;
        let sum_ns: u64 = sums().into_iter().sum();
        assert!(
            sum_ns <= cpu_ns,
            "all kinds of work together have {sum_ns} ns of CPU time, the thread has only {cpu_ns} \
             ns"
        );
        // Dividing the time of a piece of work among the kinds of work loses less than a nanosecond
        // for each kind.
        assert!(
            sum_ns >= 60_000_000 - 9,
            "all kinds of work together have {sum_ns} ns of CPU time, less than the 60 ms of work"
        );
    }

    #[test]
    fn cpu_time_of_a_running_thread_is_counted() {
        let stage = Stage::default();
        stage.join();
        let begun = Instant::now();
        while stage.cpu_ms() < 20 {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "the running thread has less than 20 ms of CPU time after 60 s"
            );
        }
        assert!(process_cpu_ms() >= 20 && resident_bytes() > 0);
    }
}
