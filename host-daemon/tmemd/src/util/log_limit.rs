// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limits for the log lines that VMs and clients can cause: one for each VM, one for each
//! control socket, and one for all VMs together.
//!
//! Neither one guest nor many guests of one customer may fill the host's disk. Each line that is
//! logged contains the number of lines that were left out before it. Out of scope: the text of the
//! lines.

use crate::util::rate_limit::{RateLimit, since_start_ns};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of log lines that a VM or a control socket may cause at once.
const BURST: u32 = 10;
/// Time after which a VM or a control socket that used up its burst may cause one more log line.
const PERIOD: Duration = Duration::from_secs(5);

/// Number of log lines that all VMs together may cause at once. If 1,024 VMs, the maximum,
/// reconnect at once, half of them can log a failure.
const BURST_ALL: u32 = 512;
/// Time after which all VMs together may cause one more log line: 86,400 lines a day, about 20 MB.
const PERIOD_ALL: Duration = Duration::from_secs(1);

/// Rate limit for the log lines of all VMs together. It is static, because the process has only one
/// log.
static ALL: RateLimit = RateLimit::new();

/// Rate limit for the log lines of one VM or of one control socket.
#[derive(Debug)]
pub(crate) struct LogLimit {
    own: RateLimit,
    /// Rate limit for all VMs together, which each line of a VM must also meet. None for a control
    /// socket.
    all: Option<&'static RateLimit>,
    /// Guards the number of log lines that were left out since the last logged line. Leaf lock.
    left_out: Mutex<u64>,
}

impl Default for LogLimit {
    /// Creates the rate limit for a control socket.
    fn default() -> LogLimit {
        LogLimit::const_default()
    }
}

impl LogLimit {
    /// Creates the rate limit for a control socket in a constant expression, for use in a static
    /// variable.
    pub(crate) const fn const_default() -> LogLimit {
        LogLimit {
            own: RateLimit::new(),
            all: None,
            left_out: Mutex::new(0),
        }
    }

    /// Creates the rate limit for a VM. Its lines also count against the limit for all VMs
    /// together.
    pub(crate) fn for_vm() -> LogLimit {
        LogLimit::within(&ALL)
    }

    fn within(all: &'static RateLimit) -> LogLimit {
        LogLimit {
            all: Some(all),
            ..LogLimit::default()
        }
    }

    /// Decides whether a line may be logged now. If so, returns the number of lines that were left
    /// out before it; if not, counts the line as left out and returns None.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let now_ns = since_start_ns(now);
        let own = self.own.take(now_ns, BURST, PERIOD);
        let all = |all: &RateLimit| all.take(now_ns, BURST_ALL, PERIOD_ALL);
        if own && self.all.is_none_or(all) {
            return Some(std::mem::take(&mut *left_out));
        }
        if own {
            self.own.refund(PERIOD);
        }
        *left_out += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_above_the_limit_are_left_out_and_counted() {
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
        // A line that is within the limit of its VM, but beyond the limit of all VMs, does not
        // count against the limit of its VM. The count of left-out lines contains such lines, too.
        let later = start + 1000 * PERIOD_ALL;
        assert_eq!(round(later), (100, u64::from(100 * BURST - BURST_ALL)));
    }
}
