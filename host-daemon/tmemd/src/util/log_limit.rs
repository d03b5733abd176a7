// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bound on the log lines that VMs and clients can cause: for each VM, for each control socket, and
//! for all VMs together.
//!
//! Neither a guest nor many guests of one customer may fill the host's disk. The next line that is
//! logged contains the number of lines that were left out before it. Out of scope: the content of
//! the lines.

use crate::util::rate_limit::{RateLimit, since_start_ns};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of lines that a VM or a socket may log at once.
const BURST: u32 = 10;
/// Time after which a VM or a socket that used up its burst may log one more line.
const PERIOD: Duration = Duration::from_secs(5);

/// Number of lines that all VMs together may log at once. The maximum number of VMs can reconnect
/// at once, and half of them can fail.
const BURST_ALL: u32 = 512;
/// Time after which all VMs together may log one more line: 86,400 lines a day, some 20 MB.
const PERIOD_ALL: Duration = Duration::from_secs(1);

/// Bound on the lines of all VMs. It belongs to the process, because the process has one log.
static ALL: RateLimit = RateLimit::new();

/// Bound on the log lines of one VM or of one socket.
#[derive(Debug)]
pub(crate) struct LogLimit {
    own: RateLimit,
    /// Bound on the lines of all VMs, which also applies to a VM; None for a socket.
    all: Option<&'static RateLimit>,
    /// Guards the number of lines that were left out since the last line. Leaf lock.
    left_out: Mutex<u64>,
}

impl Default for LogLimit {
    /// Creates the limit of a socket.
    fn default() -> LogLimit {
        LogLimit::const_default()
    }
}

impl LogLimit {
    /// Creates a limit for a static variable.
    pub(crate) const fn const_default() -> LogLimit {
        LogLimit {
            own: RateLimit::new(),
            all: None,
            left_out: Mutex::new(0),
        }
    }

    /// Creates the limit of a VM, which also counts against the limit of all VMs.
    pub(crate) fn of_vm() -> LogLimit {
        LogLimit::within(&ALL)
    }

    fn within(all: &'static RateLimit) -> LogLimit {
        LogLimit {
            all: Some(all),
            ..LogLimit::default()
        }
    }

    /// Admits a line. Returns the number of lines that were left out before it, or None if this
    /// line must be left out, too.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let now_ns = since_start_ns(now);
        let own = self.own.take(now_ns, BURST, PERIOD);
        let all = |all: &RateLimit| all.take(now_ns, BURST_ALL, PERIOD_ALL);
        if own && self.all.is_none_or(all) {
            return Some(std::mem::take(&mut *left_out));
        }
        if own {
            self.own.give_back(PERIOD);
        }
        *left_out += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_limited_and_counts_left_out_lines() {
        let limit = LogLimit::default();
        let start = Instant::now();
        for _ in 0..BURST {
            assert_eq!(limit.admit(start), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(limit.admit(start), None);
        }
        assert_eq!(limit.admit(start + PERIOD), Some(1000));
        assert_eq!(limit.admit(start + PERIOD), None);
    }

    #[test]
    fn the_log_lines_of_all_vms_share_one_limit() {
        static FEW: RateLimit = RateLimit::new();
        let vms: Vec<LogLimit> = (0..100).map(|_| LogLimit::within(&FEW)).collect();
        let start = Instant::now();
        let round = |now| {
            let lines = vms.iter().filter_map(|vm| vm.admit(now));
            lines.fold((0, 0), |(lines, left_out), more| {
                (lines + 1, left_out + more)
            })
        };
        let lines: u32 = (0..BURST).map(|_| round(start).0).sum();
        assert_eq!(lines, BURST_ALL);
        // A line that only the bound on all VMs rejects does not count against the bound of its VM.
        // Each line that was left out is counted.
        let later = start + 1000 * PERIOD_ALL;
        assert_eq!(round(later), (100, u64::from(100 * BURST - BURST_ALL)));
    }
}
