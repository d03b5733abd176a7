// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the memory that VMs can still use with the memory that the host has for them.
//!
//! A VM takes memory that it has never used, or has returned (free page reporting), by using it. No
//! request precedes this, and all VMs may do so at once. Limit: only VMs that are connected to the
//! daemon count.

use crate::{DaemonStats, PoolStats};

/// Memory that VMs can still use, and memory of the host for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overcommit {
    /// Bytes that the VMs have returned or never used.
    pub unused_bytes: i64,
    /// Bytes that the host can give to VMs: available memory, the pool without reserves, and free
    /// swap.
    pub host_bytes: i64,
}

impl Overcommit {
    /// Returns the values for the daemon's statistics; None if the daemon does not watch the host's
    /// memory.
    pub fn new(daemon: &DaemonStats, pool: &PoolStats) -> Option<Overcommit> {
        let pool_bytes = (pool.held_bytes - pool.reserved_bytes).max(0);
        (pool.host_available_bytes > 0).then(|| Overcommit {
            unused_bytes: daemon.memory_bytes - daemon.memory_resident_bytes,
            host_bytes: pool.host_available_bytes + pool_bytes + pool.host_swap_free_bytes,
        })
    }

    /// Returns the bytes that the host lacks if all VMs, and another process that uses `more_bytes`,
    /// use their memory at once. Returns 0 if it lacks nothing.
    pub fn missing_bytes(self, more_bytes: i64) -> i64 {
        let used_bytes = self.unused_bytes.saturating_add(more_bytes);
        used_bytes.saturating_sub(self.host_bytes).max(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_available_memory_swap_and_the_pool_without_reserves() {
        let daemon = DaemonStats {
            memory_bytes: 1000,
            memory_resident_bytes: 400,
            ..DaemonStats::default()
        };
        let mut pool = PoolStats {
            host_available_bytes: 100,
            held_bytes: 300,
            reserved_bytes: 50,
            host_swap_free_bytes: 7,
            ..PoolStats::default()
        };
        let found = Overcommit::new(&daemon, &pool).expect("the host's memory is known");
        assert_eq!((found.unused_bytes, found.host_bytes), (600, 357));
        assert_eq!(found.missing_bytes(0), 243);
        assert_eq!(found.missing_bytes(1), 244);
        assert_eq!(found.missing_bytes(i64::MAX), i64::MAX - 357);
        // The reserves may exceed the pool, which grows into them only when VMs put pages.
        pool.reserved_bytes = 301;
        pool.host_available_bytes = 600;
        let found = Overcommit::new(&daemon, &pool).expect("the host's memory is known");
        assert_eq!((found.host_bytes, found.missing_bytes(7)), (607, 0));
        assert_eq!(found.missing_bytes(8), 1);
        pool.host_available_bytes = 0;
        assert_eq!(Overcommit::new(&daemon, &pool), None);
    }
}
