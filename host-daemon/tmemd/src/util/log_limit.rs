// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much of the log others can cause: each VM and each control socket so many lines, and all VMs together.
//!
//! A guest must not fill the host's disk, and many that belong to one customer must not either. What is left out is
//! counted, and told by the next line. Never here: what is logged.

use crate::util::token_bucket::Bucket;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines at once, and after them one for each period. Of one VM, or of one of the daemon's sockets.
const BURST: u32 = 10;
/// See [`BURST`].
const PERIOD: Duration = Duration::from_secs(5);

/// Of all VMs together: as many as there may be can come back at once, and half as many go wrong.
const BURST_ALL: u32 = 512;
/// See [`BURST_ALL`]: 86,400 lines a day, some 20 MB.
const PERIOD_ALL: Duration = Duration::from_secs(1);

/// All VMs of this process, which has one log.
static ALL: Bucket = Bucket::new(BURST_ALL, PERIOD_ALL);

/// The lines of one VM, or of one of the daemon's sockets.
#[derive(Debug)]
pub(crate) struct LogLimit {
    own: Bucket,
    /// It shares these, too.
    all: Option<&'static Bucket>,
    /// Guards how many were left out since the last. The buckets are locked under it.
    left_out: Mutex<u64>,
}

impl Default for LogLimit {
    /// For one of the daemon's sockets.
    fn default() -> LogLimit {
        LogLimit::const_default()
    }
}

impl LogLimit {
    /// For a static: one of the daemon's own causes.
    pub(crate) const fn const_default() -> LogLimit {
        LogLimit {
            own: Bucket::new(BURST, PERIOD),
            all: None,
            left_out: Mutex::new(0),
        }
    }

    /// For a VM.
    pub(crate) fn of_vm() -> LogLimit {
        LogLimit::within(&ALL)
    }

    fn within(all: &'static Bucket) -> LogLimit {
        LogLimit {
            all: Some(all),
            ..LogLimit::default()
        }
    }

    /// None: leave it out. Some: write it, and this many were left out before it.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.own.take(now);
        if own && self.all.is_none_or(|all| all.take(now)) {
            return Some(std::mem::take(&mut *left_out));
        }
        if own {
            self.own.give_back();
        }
        *left_out += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_is_limited_and_says_what_it_left_out() {
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
    fn all_vms_together_are_limited_too() {
        static FEW: Bucket = Bucket::new(BURST_ALL, PERIOD_ALL);
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
        // Their own lines they have still, and nothing is lost of the count.
        let later = start + 1000 * PERIOD_ALL;
        assert_eq!(round(later), (100, u64::from(100 * BURST - BURST_ALL)));
    }
}
