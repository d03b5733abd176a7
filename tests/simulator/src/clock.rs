// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clock and entropy source of the simulated daemons, which tmemd uses instead of the host's.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tmemd::parts::SimulatedClock;

/// Clock and entropy source of one simulated daemon. All clocks follow the time of the simulated
/// world.
pub struct Clock {
    now_ns: std::sync::Arc<AtomicU64>,
    /// Time in ns by which this clock is ahead of the world's time, because its daemon was slow
    /// while the world's time stood still.
    ahead_ns: AtomicU64,
    /// State of the random number generator, or the last generation if `counted` is true.
    drawn: AtomicU64,
    counted: bool,
}

impl Clock {
    /// Creates the clock and entropy source of a daemon. It draws random numbers from `seed`.
    pub fn new(now_ns: std::sync::Arc<AtomicU64>, seed: u64, counted: bool) -> Clock {
        let drawn = AtomicU64::new(if counted { 0 } else { seed });
        Clock {
            now_ns,
            ahead_ns: AtomicU64::new(0),
            drawn,
            counted,
        }
    }
}

impl Clock {
    /// Advances the clock of this daemon only, by `ns` nanoseconds.
    pub fn linger(&self, ns: u64) {
        self.ahead_ns.fetch_add(ns, Relaxed);
    }
}

impl SimulatedClock for Clock {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Relaxed) + self.ahead_ns.load(Relaxed)
    }

    fn generation(&self) -> u64 {
        if self.counted {
            return self.drawn.fetch_add(1, Relaxed) + 1;
        }
        let mut rng = fastrand::Rng::with_seed(self.drawn.load(Relaxed));
        self.drawn.store(rng.u64(..), Relaxed);
        rng.u64(1..)
    }
}
