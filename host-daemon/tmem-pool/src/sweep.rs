// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sweep: a periodic pass over all blobs (stored contents) that recompresses cold ones with
//! zstd. When one sweep ends, the next one begins.

use crate::blob::Store;
use crate::codec::{self, Denser};
use crate::config::{Page, SWEEP_NS, SWEEP_PAGES, SWEEP_STEP, Time};
use crate::secret::SecretPages;
use std::io;

/// State of the sweep, which visits all blobs within a fixed time.
pub(crate) struct Sweep {
    begun: Time,
    /// Number of the handle of the heap that the sweep visits next.
    next: u32,
    denser: Denser,
    /// Two scratch pages of the sweep: a decompressed page and its new compressed form.
    buffer: SecretPages,
}

/// Result of a step of the sweep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visited {
    /// Number of handles visited.
    pub handles: usize,
    /// True if the sweep has visited all handles, so that the next step begins another sweep.
    pub has_ended: bool,
}

impl Sweep {
    /// Creates the state of a sweep that begins at time 0.
    ///
    /// # Errors
    /// The system has no memory for a zstd context or for the scratch pages.
    pub(crate) fn new() -> io::Result<Sweep> {
        Ok(Sweep {
            begun: Time(0),
            next: 1,
            denser: Denser::new()?,
            buffer: SecretPages::new(2)?,
        })
    }

    /// Returns how many of the heap's `handles` handles the sweep should have visited by now.
    fn due(&self, now: Time, handles: u32) -> u32 {
        let elapsed_ns = now.0.saturating_sub(self.begun.0);
        let due = u128::from(handles) * u128::from(elapsed_ns) / u128::from(SWEEP_NS);
        due.min(handles.into()) as u32
    }

    /// Returns whether handles of the heap are due that the sweep has not visited yet.
    pub(crate) fn is_late(&self, now: Time, handles: u32) -> bool {
        self.next < self.due(now, handles)
    }

    /// Continues the sweep up to the handle that is due by `now`. Visits at most SWEEP_STEP handles
    /// and recompresses at most SWEEP_PAGES pages. `frames_bytes_max` returns the bytes that the
    /// heap may take at the moment.
    pub(crate) fn step(
        &mut self,
        store: &Store,
        now: Time,
        frames_bytes_max: impl Fn() -> u64,
    ) -> Visited {
        let handles = store.heap.places();
        let due = self.due(now, handles);
        let Sweep {
            begun,
            next,
            denser,
            buffer,
        } = self;
        let (first, mut recompressed) = (*next, 0);
        let pages: &mut [Page; 2] = buffer
            .pages()
            .try_into()
            .expect("the buffer for recompressing cold pages does not have two pages");
        while *next < due && *next - first < SWEEP_STEP && recompressed < SWEEP_PAGES {
            let was_cold = store.recompress_if_cold(*next, frames_bytes_max(), denser, pages);
            recompressed += usize::from(was_cold);
            *next += 1;
        }
        if recompressed > 0 {
            buffer.wipe();
            denser.wipe();
            codec::wipe();
        }
        let visited = Visited {
            handles: (*next - first) as usize,
            has_ended: *next >= handles,
        };
        if visited.has_ended {
            (*begun, *next) = (now, 1);
        }
        visited
    }
}
