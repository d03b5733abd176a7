// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Free handles. A size class keeps a few free handles for the blobs that it stores next. All other
//! free handles are spare: they belong to no class, and each class can take them. Otherwise a guest
//! could take all handles from other guests, by filling the pool with pages of one compressed
//! length after the other.
//!
//! The numbers of free handles lie in arrays, not in a list through the records of the handles. So
//! a class can prefetch the records of the handles that it uses next.
//!
//! Locks: the lock of a class guards its [`FreeHandles`]. The lock of spare handles is a leaf.

use super::HEAP;
use super::region::{Table, Zeroed};
use crate::fail;
use crate::poison;
use crate::sync::{AtomicU32, Mutex};
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// Number of free handles that a size class takes from the spare handles at a time, or gives to
/// them. A class keeps fewer than twice this number.
pub(super) const HANDLES_STEP: usize = 8;

/// Free handles of a size class.
#[derive(Debug)]
pub(super) struct FreeHandles {
    handles: [u32; 2 * HANDLES_STEP],
    /// Number of free handles: the first elements of `handles`. It is less than 2 * HANDLES_STEP.
    nr: usize,
}

impl FreeHandles {
    pub(super) fn new() -> FreeHandles {
        FreeHandles {
            handles: [0; 2 * HANDLES_STEP],
            nr: 0,
        }
    }

    /// Returns the free handles. The class uses the last one next.
    pub(super) fn all(&self) -> &[u32] {
        &self.handles[..self.nr]
    }

    /// Takes the handle that was given last. Returns None if there is none.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.nr = self.nr.checked_sub(1)?;
        Some(self.handles[self.nr])
    }

    /// Gives a handle back. If the class then has too many, moves those that were given first to
    /// the spare handles.
    pub(super) fn release(&mut self, handle: u32, spare: &SpareHandles) {
        self.handles[self.nr] = handle;
        self.nr += 1;
        if self.nr == self.handles.len() {
            let (first, last) = self.handles.split_at_mut(HANDLES_STEP);
            spare.release(first);
            first.copy_from_slice(last);
            self.nr = HANDLES_STEP;
        }
    }

    /// Takes HANDLES_STEP spare handles. The class has no free handle. Returns false if there are
    /// no spare handles.
    pub(super) fn refill(&mut self, spare: &SpareHandles) -> bool {
        debug_assert_eq!(self.nr, 0);
        if !spare.take(&mut self.handles[..HANDLES_STEP]) {
            return false;
        }
        self.nr = HANDLES_STEP;
        true
    }
}

/// Number of a spare handle.
#[derive(Debug)]
struct Number(Cell<u32>);

// SAFETY: all bits zero is a valid number.
unsafe impl Zeroed for Number {}
// SAFETY: the number is accessed only under the lock of spare handles.
unsafe impl Sync for Number {}

/// Handles that no size class has.
#[derive(Debug)]
pub(super) struct SpareHandles {
    /// Stack of the handles that were used and are spare. Its memory never shrinks.
    stack: Table<Number>,
    /// Number of handles in the stack. The lock also guards the stack and changes of `fresh`.
    nr: CachePadded<Mutex<u32>>,
    /// Largest number of handles that the stack has had.
    nr_max: AtomicU32,
    /// Lowest handle that was never used. Handles from this one on are spare, too.
    fresh: AtomicU32,
    /// One more than the largest handle.
    end: u32,
}

impl SpareHandles {
    /// Creates the handles from 1 to `end` - 1, all spare.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(super) fn new(end: u32) -> io::Result<SpareHandles> {
        Ok(SpareHandles {
            stack: Table::reserve(end as usize)?,
            nr: CachePadded::default(),
            nr_max: AtomicU32::new(0),
            fresh: AtomicU32::new(1),
            end,
        })
    }

    /// Returns the lowest handle that was never used.
    pub(super) fn fresh(&self) -> u32 {
        self.fresh.load(Relaxed)
    }

    /// Returns the memory of the stack in bytes.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.nr_max.load(Relaxed)) * size_of::<Number>() as u64
    }

    /// Returns whether the memory of the stack is locked in RAM, so that it is never swapped.
    pub(super) fn is_locked(&self) -> bool {
        self.stack.is_locked()
    }

    /// Sets all elements of `handles` to spare handles. Prefers those that were used. Returns false
    /// if there are too few.
    fn take(&self, handles: &mut [u32]) -> bool {
        if fail::memory() {
            return false;
        }
        let step = handles.len() as u32;
        let mut nr = poison::guard_or_abort(self.nr.lock(), HEAP);
        if let Some(left) = nr.checked_sub(step) {
            for (handle, at) in handles.iter_mut().zip(left..) {
                *handle = self.stack.get(at).0.get();
            }
            *nr = left;
            return true;
        }
        let first = self.fresh.load(Relaxed);
        if self.end - first < step {
            return false;
        }
        self.fresh.store(first + step, Relaxed);
        drop(nr);
        // A class uses the last handle of its array first.
        for (handle, at) in handles.iter_mut().rev().zip(first..) {
            *handle = at;
        }
        true
    }

    fn release(&self, handles: &[u32]) {
        let mut nr = poison::guard_or_abort(self.nr.lock(), HEAP);
        for (&handle, at) in handles.iter().zip(*nr..) {
            self.stack.get(at).0.set(handle);
        }
        *nr += handles.len() as u32;
        if *nr > self.nr_max.load(Relaxed) {
            self.nr_max.store(*nr, Relaxed);
        }
    }

    /// Returns the handles that were used and are spare.
    #[cfg(test)]
    pub(super) fn all(&self) -> Vec<u32> {
        let nr = poison::guard_or_abort(self.nr.lock(), HEAP);
        (0..*nr).map(|at| self.stack.get(at).0.get()).collect()
    }
}
