// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clock and entropy source of the daemon.
//!
//! The type [`ClockAndEntropy`] provides both, so that a simulator can replace them and repeat a
//! run. Out of scope: waiting. Only threads wait, and a simulator has none.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Clock and entropy source that a simulator provides.
pub trait SimulatedClock: Send + Sync {
    /// Returns the nanoseconds since the daemon's start. The value never decreases.
    fn now_ns(&self) -> u64;
    /// Returns the number for a new generation of a VM's device. No guest can have seen the number
    /// before; it is never 0.
    fn generation(&self) -> u64;
}

/// Clock and entropy source of the daemon. All clones use the same source.
#[derive(Clone)]
pub enum ClockAndEntropy {
    /// The host's clock and entropy. The value is the time of the daemon's start.
    Host(Instant),
    /// The clock and entropy that a simulator provides.
    Simulated(Arc<dyn SimulatedClock>),
}

impl ClockAndEntropy {
    /// Creates a source that uses the host's clock and entropy. The clock starts at 0.
    pub fn host() -> ClockAndEntropy {
        ClockAndEntropy::Host(Instant::now())
    }

    /// Returns the nanoseconds since the daemon's start.
    pub fn now_ns(&self) -> u64 {
        match self {
            ClockAndEntropy::Host(start) => start.elapsed().as_nanos() as u64,
            ClockAndEntropy::Simulated(clock) => clock.now_ns(),
        }
    }

    /// Returns the time since the daemon's start.
    pub fn uptime(&self) -> Duration {
        Duration::from_nanos(self.now_ns())
    }

    /// Returns the number for a new generation of a VM's device. No guest can have seen the number
    /// before: it is random and never 0.
    ///
    /// # Errors
    /// The host has no entropy.
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
            let generation = clock
                .new_generation()
                .expect("the host has no random numbers");
            assert_ne!(generation, 0);
            assert!(
                seen.insert(generation),
                "the clock returned generation {generation:#x} twice"
            );
            (ones, zeros) = (ones | generation, zeros | !generation);
        }
        assert_eq!(
            (ones, zeros),
            (u64::MAX, u64::MAX),
            "a bit of the generation is never 0 or never 1"
        );
    }
}
