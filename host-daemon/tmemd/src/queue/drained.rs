// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guard of drained vrings: while it lives, no worker uses them, and the control thread may change
//! them.
//!
//! The guard exists because the order of the steps matters. The workers are asked to leave all
//! vrings before the control thread waits for the first one, so that the waits overlap. When the
//! guard is dropped, it releases the locks before it ends the drains, and schedules the vrings
//! last, because a worker ignores kicks during a drain.

use crate::host::heartbeat::Heartbeat;
use crate::queue::vring::{Vring, VringState};
use crate::queue::worker::Workers;
use std::sync::{Arc, MutexGuard};

/// Vrings that no worker uses, with access to their states. Dropping the guard lets the workers use
/// the vrings again.
pub struct DrainedVrings<'a> {
    workers: &'a Workers,
    /// Heartbeat of the control thread. The thread counts as working while the guard lives, also
    /// while it waits for workers.
    heartbeat: &'a Heartbeat,
    vrings: &'a [Arc<Vring>],
    /// Guards of the vrings' locks, in the order of the vrings.
    states: Vec<MutexGuard<'a, VringState>>,
    /// True if the thread was already unwinding after a panic when it drained the vrings.
    was_unwinding: bool,
}

/// Begins a drain of vrings without waiting for it. Each worker leaves its vring at the end of the
/// current descriptor chain.
pub fn begin_drain(vrings: &[Arc<Vring>]) {
    vrings.iter().for_each(|vring| vring.begin_drain());
}

impl<'a> DrainedVrings<'a> {
    /// Drains the vrings, and waits until no worker uses them.
    pub fn wait(
        vrings: &'a [Arc<Vring>],
        workers: &'a Workers,
        heartbeat: &'a Heartbeat,
    ) -> DrainedVrings<'a> {
        heartbeat.work();
        begin_drain(vrings);
        DrainedVrings {
            workers,
            heartbeat,
            vrings,
            states: vrings.iter().map(|vring| vring.lock()).collect(),
            was_unwinding: std::thread::panicking(),
        }
    }

    /// Returns the states of the vrings, in the order of the vrings.
    pub fn states(&mut self) -> impl Iterator<Item = &mut VringState> {
        self.states.iter_mut().map(|state| &mut **state)
    }

    /// Returns the vrings with their states.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'a Arc<Vring>, &mut VringState)> {
        let states = self.states.iter_mut().map(|state| &mut **state);
        self.vrings.iter().zip(states)
    }

    /// Returns the state of the vring at this place in the list of vrings.
    ///
    /// # Panics
    /// If there is no such vring.
    pub fn state(&mut self, at: usize) -> &mut VringState {
        &mut self.states[at]
    }
}

impl Drop for DrainedVrings<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_unwinding {
            // A panic has left the states of the vrings unknown, so no worker may use the vrings.
            return;
        }
        let running: Vec<bool> = self.states.iter().map(|state| state.is_running()).collect();
        self.states.clear();
        for (vring, running) in self.vrings.iter().zip(running) {
            vring.end_drain();
            if running {
                self.workers.schedule(vring);
            }
        }
        self.heartbeat.rest();
    }
}
