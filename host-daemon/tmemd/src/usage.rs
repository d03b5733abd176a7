// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon itself takes of the host: processor time by stage, and memory, as the kernel counts them.
//! It costs nothing until somebody asks.

use rustix::thread::Pid;
use std::sync::{Mutex, PoisonError};

/// Threads of one stage, which they join at their start.
#[derive(Debug, Default)]
pub struct Stage(Mutex<Vec<Pid>>);

impl Stage {
    /// The calling thread is of it, until the daemon ends.
    pub fn join(&self) {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(rustix::thread::gettid());
    }

    /// Processor time of its threads, in ms.
    pub fn cpu_ms(&self) -> u64 {
        let threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |thread: &Pid| {
            let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
            cpu_ms(&std::fs::read_to_string(path).unwrap_or_default())
        };
        threads.iter().map(one).sum()
    }
}

/// Processor time of the whole process, in ms; 0 if the kernel does not say.
pub fn process_cpu_ms() -> u64 {
    cpu_ms(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default())
}

/// Memory of its own, without what it maps of guests.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Fields 14 and 15 of a stat file, user and system time in ticks; see proc_pid_stat(5).
fn cpu_ms(stat: &str) -> u64 {
    // The second field is a name in brackets, which may have blanks and brackets of its own.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = after_name.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let sum = ticks().unwrap_or(0) + ticks().unwrap_or(0);
    sum * 1000 / rustix::param::clock_ticks_per_second().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn names_do_not_matter() {
        let hz = rustix::param::clock_ticks_per_second();
        let stat = |name: &str| format!("7 ({name}) S 1 1 1 0 -1 0 1 2 3 4 {hz} {} 0 0", 2 * hz);
        assert_eq!(cpu_ms(&stat("worker-0")), 3000);
        assert_eq!(cpu_ms(&stat("a) b 1 2 (c")), 3000);
        assert_eq!(cpu_ms(""), 0);
    }

    #[test]
    fn a_thread_that_works_is_counted() {
        let stage = Stage::default();
        stage.join();
        let begun = Instant::now();
        while stage.cpu_ms() < 20 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is not");
        }
        assert!(process_cpu_ms() >= 20 && resident_bytes() > 0);
    }
}
