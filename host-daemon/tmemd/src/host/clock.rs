// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon takes from outside that is neither a guest's nor its VMM's: time and chance.
//!
//! One handle for all of it, so that a simulator can give both and a run of it can be repeated.
//! Never here: waiting. Who waits has a thread of its own, of which a simulator has none.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time and chance as a simulator gives them.
pub trait SimulatedClock: Send + Sync {
    /// Nanoseconds since the daemon's start; never less than before.
    fn now_ns(&self) -> u64;
    /// A number that no guest can have seen before, never 0.
    fn generation(&self) -> u64;
}

/// Where time and chance come from. Clones are handles to the same.
#[derive(Clone)]
pub enum ClockAndEntropy {
    /// The host, since the daemon's start.
    Host(Instant),
    /// A simulator.
    Simulated(Arc<dyn SimulatedClock>),
}

impl ClockAndEntropy {
    /// The host's; the clock starts now.
    pub fn host() -> ClockAndEntropy {
        ClockAndEntropy::Host(Instant::now())
    }

    /// Nanoseconds since the daemon's start.
    pub fn now_ns(&self) -> u64 {
        match self {
            ClockAndEntropy::Host(start) => start.elapsed().as_nanos() as u64,
            ClockAndEntropy::Simulated(clock) => clock.now_ns(),
        }
    }

    /// Time since the daemon's start.
    pub fn uptime(&self) -> Duration {
        Duration::from_nanos(self.now_ns())
    }

    /// A number that no guest can have seen before: random and never 0.
    pub fn new_generation(&self) -> std::io::Result<u64> {
        if let ClockAndEntropy::Simulated(clock) = self {
            return Ok(clock.generation());
        }
        loop {
            let number = getrandom::u64().map_err(std::io::Error::other)?;
            if number != 0 {
                return Ok(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_random_and_never_0() {
        let clock = ClockAndEntropy::host();
        let mut seen = std::collections::HashSet::new();
        let (mut ones, mut zeros) = (0, 0);
        for _ in 0..1000 {
            let generation = clock.new_generation().expect("random");
            assert_ne!(generation, 0);
            assert!(seen.insert(generation), "{generation:#x} came twice");
            (ones, zeros) = (ones | generation, zeros | !generation);
        }
        assert_eq!((ones, zeros), (u64::MAX, u64::MAX), "each bit is drawn");
    }
}
