// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The scheduling slice: the work of a worker on one vring before the next VM gets its slice.
//!
//! Two bounds limit the work of a slice. The first is a budget of costs: each step is charged its
//! cost by the engine's figures (`tmem-pool/src/cost.rs`), which are the same in each run and which
//! no clock can falsify. The second is the daemon's clock. It covers costs that the figures do not
//! contain: a slow host, or pages of the guest that must be faulted in. A step begins only if its
//! largest cost still fits. The first step of a slice always begins, so each slice makes progress
//! on a host of any speed.
//!
//! Out of scope: the rest of a request that the end of a slice interrupts (`execute.rs`), and the
//! order of slices (`run_queue.rs`).

use crate::host::clock::ClockAndEntropy;
use std::cell::Cell;
use tmem_pool::{DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, PUT_NS_MAX, REF_NS_MAX};

/// Length of a slice in ns. It suffices for a batch of 64 pages in lz4 form, or for about half a
/// batch in zstd form. If a worker has 16 busy VMs, a request waits for about 3 ms.
pub const SLICE_NS: u64 = 200_000;

/// Cost in ns of taking a descriptor chain from the ring and answering it, including a system call
/// for the interrupt.
pub const CHAIN_NS: u64 = 3_000;

/// Cost in ns of following one descriptor of a chain. A request needs two or three descriptors, but
/// a guest may split it into as many as a queue has.
pub const DESCRIPTOR_NS: u64 = 50;

/// Expected cost in ns of each page of a request that is not read yet. If a chain is expected to
/// exceed the rest of a slice, the chain is left to the next slice. Therefore few chains are
/// interrupted, and the heads of few requests are read twice.
pub const PAGE_EXPECTED_NS: u64 = 2_000;

/// Largest cost in ns that the first step of a slice may have, even if the slice is already over. A
/// step that cannot be divided never costs more. A FLUSH reads the clock after each step of this
/// cost.
pub const STEP_NS: u64 = 60_000;

const _: () = {
    assert!(FLUSH_NS_MIN <= STEP_NS && DESTROY_NS_MAX <= STEP_NS);
    assert!(GET_NS_MAX <= STEP_NS && PUT_NS_MAX <= STEP_NS && REF_NS_MAX <= STEP_NS);
    assert!(2 * STEP_NS <= SLICE_NS);
};

/// Scheduling slice that has begun: the budget of costs that is left, and the time at which the
/// slice ends.
pub struct Slice<'a> {
    clock: &'a ClockAndEntropy,
    ends_at_ns: u64,
    left_ns: Cell<u64>,
    has_worked: Cell<bool>,
}

impl Slice<'_> {
    /// Begins a slice at the current time.
    pub fn begin(clock: &ClockAndEntropy) -> Slice<'_> {
        Slice {
            clock,
            ends_at_ns: clock.now_ns() + SLICE_NS,
            left_ns: Cell::new(SLICE_NS),
            has_worked: Cell::new(false),
        }
    }

    /// Subtracts the cost of finished work from the rest of the slice.
    pub fn charge(&self, cost_ns: u64) {
        self.left_ns.set(self.left_ns.get().saturating_sub(cost_ns));
    }

    /// Returns true if work that costs `cost_ns` still fits into the rest of the slice.
    pub fn fits(&self, cost_ns: u64) -> bool {
        let left_ns = self.left_ns.get();
        left_ns >= cost_ns && self.clock.now_ns() + cost_ns <= self.ends_at_ns
    }

    /// Begins a step of work that costs at least `least_ns`. Returns the largest cost in ns that
    /// the step may have; None if too little of the slice is left.
    pub fn begin_step(&self, least_ns: u64) -> Option<u64> {
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

    /// Begins a step that processes pages, each of which costs up to `page_ns_max`. Returns the
    /// number of pages that the step may process, at most `pages_max`; None if the slice is over.
    pub fn begin_pages(&self, page_ns_max: u64, pages_max: usize) -> Option<usize> {
        let step_ns = self.begin_step(page_ns_max)?;
        Some(((step_ns / page_ns_max) as usize).min(pages_max))
    }
}
