// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of a VM whose memory the host has swapped out.
//!
//! An access to a page that is swapped out blocks the worker until the disk has read the page, for
//! 10 ms or more with a busy disk. A slice can have many such waits, and all VMs of the worker wait
//! with it. The workers for swapped VMs serve a VM with such slices, as long as they occur and
//! [`CALM_NS`] more. Measuring the waits of a slice takes a tenth of a short slice, so only slices
//! of VMs that had a long one are measured. Out of scope: how the waits are found
//! (`host/usage.rs`).

use crate::host::usage::Counts;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Duration of a slice in ns from which it may have waited for memory: ten times the limit of a
/// slice, and far below the time that a guest's driver waits for a page (20 ms).
const LONG_SLICE_NS: u64 = 2_000_000;

/// Time in ns for which a VM's slices are measured after a long one, and for which a VM counts as
/// swapped after a wait. A VM that pauses for longer delays other VMs again, by one slice on each
/// worker that has its queues, and by two after [`AFTER_WAIT_NS`].
const CALM_NS: u64 = 10_000_000_000;

/// Time in ns for which a VM's slices are measured after a wait.
const AFTER_WAIT_NS: u64 = 10 * CALM_NS;

/// State of a VM's memory. The times are of the daemon's clock in ns, and 0 before the first event.
#[derive(Debug, Default)]
pub struct Swapped {
    /// Time until which the waits of the VM's slices are measured.
    measured_until_ns: AtomicU64,
    /// Time until which the VM counts as swapped.
    swapped_until_ns: AtomicU64,
}

impl Swapped {
    /// Returns whether the VM counts as swapped. `now_ns` is called only for VMs that were swapped.
    pub fn is_swapped(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let until_ns = self.swapped_until_ns.load(Ordering::Relaxed);
        until_ns != 0 && now_ns() < until_ns
    }

    /// Begins a slice. Returns the counts of the calling thread if the slice has to be measured.
    pub fn begin_slice(&self, now_ns: u64) -> Option<Counts> {
        (now_ns < self.measured_until_ns.load(Ordering::Relaxed))
            .then(Counts::read)
            .flatten()
    }

    /// Ends a slice that began at `begun_ns` and took `took_ns`. `before` is the result of
    /// [`begin_slice`](Self::begin_slice). Returns true if the VM begins to count as swapped.
    pub fn end_slice(&self, begun_ns: u64, took_ns: u64, before: Option<&Counts>) -> bool {
        let waited = |before: &Counts| before.waited_for_memory(Duration::from_nanos(took_ns));
        took_ns > LONG_SLICE_NS && self.record_long(begun_ns + took_ns, before.is_some_and(waited))
    }

    fn record_long(&self, now_ns: u64, waited: bool) -> bool {
        let measured_ns = if waited { AFTER_WAIT_NS } else { CALM_NS };
        let measured_until_ns = now_ns + measured_ns;
        self.measured_until_ns
            .fetch_max(measured_until_ns, Ordering::Relaxed);
        let until_ns = now_ns + CALM_NS;
        waited && self.swapped_until_ns.fetch_max(until_ns, Ordering::Relaxed) <= now_ns
    }
}

#[cfg(test)]
impl Swapped {
    /// Makes the VM count as swapped until `until_ns`.
    pub fn set(&self, until_ns: u64) {
        self.swapped_until_ns.store(until_ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_counts_as_swapped_for_a_calm_time_after_a_wait() {
        let vm = Swapped::default();
        assert!(!vm.is_swapped(|| panic!("the clock was read for a VM that was never swapped")));
        assert!(vm.record_long(10, true), "the beginning was not reported");
        assert!(
            !vm.record_long(20, true),
            "the beginning was reported twice"
        );
        assert!(!vm.record_long(30, false));
        assert!(vm.is_swapped(|| 20 + CALM_NS - 1));
        assert!(!vm.is_swapped(|| 20 + CALM_NS));
        assert!(vm.begin_slice(20 + AFTER_WAIT_NS - 1).is_some());
        assert!(
            vm.record_long(20 + CALM_NS, true),
            "the next beginning was not reported"
        );
    }

    #[test]
    fn slices_are_measured_for_a_calm_time_after_a_long_one() {
        let vm = Swapped::default();
        assert!(vm.begin_slice(5).is_none());
        assert!(!vm.end_slice(5, LONG_SLICE_NS, None));
        assert!(vm.begin_slice(6).is_none(), "a short slice counted as long");
        assert!(!vm.end_slice(6, LONG_SLICE_NS + 1, None));
        let end_ns = 6 + LONG_SLICE_NS + 1 + CALM_NS;
        assert!(vm.begin_slice(end_ns - 1).is_some());
        assert!(vm.begin_slice(end_ns).is_none());
    }
}
