// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics that all read-only clients share for a short time.
//!
//! Reading the statistics of a VM takes the lock that its requests take. A read-only client must
//! not be able to take the locks of all VMs in a loop, so it receives statistics that are up to
//! [`AGE_MAX`] old. Clients of the full socket are operators and receive current ones.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age of the statistics for read-only clients. For these clients, the locks of the VMs are
/// taken at most ten times a second.
pub(crate) const AGE_MAX: Duration = Duration::from_millis(100);

/// The latest snapshot of the statistics and the time at which it was made.
#[derive(Debug)]
pub(crate) struct Snapshot<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for Snapshot<T> {
    fn default() -> Snapshot<T> {
        Snapshot(Mutex::default())
    }
}

impl<T> Snapshot<T> {
    /// Returns the latest snapshot, or makes a new one if it is too old. Concurrent callers wait
    /// for the new one.
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
