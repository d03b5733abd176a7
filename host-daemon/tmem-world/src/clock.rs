// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clock and entropy source of the simulated daemons.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tmemd::parts::SimulatedClock;

/// Clock and entropy source of one daemon. All clocks follow the time of one world.
pub struct Clock {
    now_ns: std::sync::Arc<AtomicU64>,
    /// Time in ns by which this clock is ahead of the world's time, because its daemon was slow
    /// while the world's time stood still.
    ahead_ns: AtomicU64,
    /// Last random number, or the last count if the clock counts generations.
    drawn: AtomicU64,
    counted: bool,
}

impl Clock {
    /// Creates the clock of a daemon that draws its random numbers from this seed.
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
    /// Lets time pass for this daemon alone.
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
