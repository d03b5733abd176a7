// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long a vring that has run dry is looked at before its driver is asked for kicks again.
//!
//! A kick and the wake-up that follows take longer than most requests, so a driver that sends the
//! next one soon is better met by looking. Whether it does is not known but by what it did before:
//! if the pause before its last request was one that looking could have bridged, it is looked for
//! up to the bound, and otherwise not at all. So a driver that is quiet, or slower than that, costs
//! no time after the first time, and no pause costs more than the bound. Never here: whose vring.

/// The pauses of one vring.
#[derive(Debug, Default)]
pub struct Polling {
    /// Since when it is dry; None while it has work.
    dry_since_ns: Option<u64>,
    /// The last pause was short.
    worth_it: bool,
}

impl Polling {
    /// It is dry. Some: look again until then; None: ask for a kick.
    pub fn dry(&mut self, now_ns: u64, max_ns: u64) -> Option<u64> {
        let since_ns = *self.dry_since_ns.get_or_insert(now_ns);
        let until_ns = since_ns.saturating_add(max_ns);
        (self.worth_it && now_ns < until_ns).then_some(until_ns)
    }

    /// It has work.
    pub fn work(&mut self, now_ns: u64, max_ns: u64) {
        if let Some(since_ns) = self.dry_since_ns.take() {
            self.worth_it = now_ns.saturating_sub(since_ns) < max_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50;

    #[test]
    fn looks_if_the_last_pause_was_short() {
        let mut polling = Polling::default();
        assert_eq!(polling.dry(1000, MAX), None, "nothing is known");
        polling.work(1000 + MAX - 1, MAX);
        assert_eq!(polling.dry(2000, MAX), Some(2000 + MAX));
        assert_eq!(
            polling.dry(2000 + MAX - 1, MAX),
            Some(2000 + MAX),
            "from its beginning"
        );
        assert_eq!(polling.dry(2000 + MAX, MAX), None, "the bound");
        assert_eq!(polling.dry(9000, MAX), None);
        polling.work(9000, MAX);
        assert_eq!(polling.dry(9000, MAX), None, "the last pause was long");
        polling.work(9000, MAX);
        assert_eq!(polling.dry(9010, MAX), Some(9010 + MAX));
        // More work without a pause says nothing.
        polling.work(9020, MAX);
        polling.work(9900, MAX);
        assert_eq!(polling.dry(9900, MAX), Some(9900 + MAX));
    }

    #[test]
    fn a_bound_of_0_is_never() {
        let mut polling = Polling::default();
        for now in 0..9 {
            assert_eq!(polling.dry(now, 0), None);
            polling.work(now, 0);
        }
    }
}
