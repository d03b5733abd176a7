// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Snapshot of the statistics that all read-only clients share for a short time.
//!
//! Reading the statistics of a VM takes a lock that the VM's requests take, too. A read-only client
//! must not be able to take the locks of all VMs in a loop. It therefore receives statistics that
//! are up to [`AGE_MAX`] old. Clients of the full control socket are operators and receive current
//! statistics.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age of the statistics that read-only clients receive. For these clients, the daemon
/// takes the locks of the VMs at most ten times a second.
pub(crate) const AGE_MAX: Duration = Duration::from_millis(100);

/// The latest snapshot of the statistics with the time at which it was made; None before the first.
#[derive(Debug)]
pub(crate) struct Snapshot<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for Snapshot<T> {
    fn default() -> Snapshot<T> {
        Snapshot(Mutex::default())
    }
}

impl<T> Snapshot<T> {
    /// Returns the latest snapshot. If the snapshot is older than [`AGE_MAX`], calls `make` for a
    /// new one. Concurrent callers wait for the new snapshot.
    pub(crate) fn get(&self, now: Instant, make: impl FnOnce() -> T) -> Arc<T> {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, snapshot)) = &*latest
            && now.saturating_duration_since(*made) < AGE_MAX
        {
            return snapshot.clone();
        }
        let snapshot = Arc::new(make());
        *latest = Some((now, snapshot.clone()));
        snapshot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_ten_snapshots_per_second_are_made() {
        let (shared, start) = (Snapshot::default(), Instant::now());
        let mut made = 0;
        for call in 0..10_000 {
            let now = start + Duration::from_micros(call * 100);
            let seen = shared.get(now, || {
                made += 1;
                now
            });
            assert!(now - *seen < AGE_MAX);
        }
        assert_eq!(made, 10);
    }
}
