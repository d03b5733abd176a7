// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The scheduling slice: what a worker does for one vring before the next VM has its turn.
//!
//! Its work is bounded twice. Each step is charged what it costs by the engine's figures
//! (`tmem-pool/src/cost.rs`), which are the same in each run and which no clock can falsify. The
//! daemon's clock bounds it a second time, for what no figure knows: a host that is slower, or pages of the
//! guest that have to be faulted in. A step begins only if its largest cost still fits. The first step of a
//! slice always begins, so that each slice makes progress on a host of any speed.
//!
//! Out of scope: what is left of an interrupted request (`execute.rs`), whose slice is next
//! (`run_queue.rs`).

use crate::host::clock::ClockAndEntropy;
use std::cell::Cell;
use tmem_pool::{DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, PUT_NS_MAX};

/// Length of a slice. One batch of 64 pages that were compressed with lz4 fits; of pages in zstd's form,
/// it is about half a batch. With 16 busy VMs on a worker, a request waits for 3 ms.
pub const SLICE_NS: u64 = 200_000;

/// Taking a chain off the ring and answering it, which may take a system call for the interrupt.
pub const CHAIN_NS: u64 = 3_000;

/// Following one descriptor: a request needs two or three, but a guest may cut it into as many as a queue has.
pub const DESCRIPTOR_NS: u64 = 50;

/// Copying a page out of guest memory.
pub const READ_PAGE_NS: u64 = 400;

/// What a page of a request is expected to cost before it is known. A chain that does not fit into the
/// rest of a slice by this is left to the next, so that few are interrupted and read twice.
pub const PAGE_EXPECTED_NS: u64 = 2_000;

/// What the first step of a slice may cost, however late it is: enough for each that cannot be divided.
/// A FLUSH looks at the clock each time that it has spent as much.
pub const STEP_NS: u64 = 60_000;

const _: () = {
    assert!(FLUSH_NS_MIN <= STEP_NS && DESTROY_NS_MAX <= STEP_NS);
    assert!(GET_NS_MAX <= STEP_NS && PUT_NS_MAX <= STEP_NS);
    assert!(2 * STEP_NS <= SLICE_NS);
};

/// The slice that is running.
pub struct Slice<'a> {
    clock: &'a ClockAndEntropy,
    ends_at_ns: u64,
    left_ns: Cell<u64>,
    has_worked: Cell<bool>,
}

impl Slice<'_> {
    /// Begins now.
    pub fn begin(clock: &ClockAndEntropy) -> Slice<'_> {
        Slice {
            clock,
            ends_at_ns: clock.now_ns() + SLICE_NS,
            left_ns: Cell::new(SLICE_NS),
            has_worked: Cell::new(false),
        }
    }

    /// Counts work that was done.
    pub fn charge(&self, cost_ns: u64) {
        self.left_ns.set(self.left_ns.get().saturating_sub(cost_ns));
    }

    /// Whether work of that cost fits.
    pub fn fits(&self, cost_ns: u64) -> bool {
        let left_ns = self.left_ns.get();
        left_ns >= cost_ns && self.clock.now_ns() + cost_ns <= self.ends_at_ns
    }

    /// Allows a step that costs `least_ns` or more. Returns what it may cost; None: the slice is over.
    pub fn step(&self, least_ns: u64) -> Option<u64> {
        let left_ns = self.left_ns.get();
        let time_left_ns = self.ends_at_ns.saturating_sub(self.clock.now_ns());
        let step_ns = left_ns.min(time_left_ns);
        let first = !self.has_worked.replace(true);
        match first {
            _ if step_ns >= least_ns => Some(step_ns),
            true => Some(STEP_NS),
            false => None,
        }
    }

    /// Allows a step of some pages, which cost up to `page_ns_max` each. Returns how many, at most
    /// `pages_max`; None: the slice is over.
    pub fn step_pages(&self, page_ns_max: u64, pages_max: usize) -> Option<usize> {
        let step_ns = self.step(page_ns_max)?;
        Some(((step_ns / page_ns_max) as usize).min(pages_max))
    }
}
