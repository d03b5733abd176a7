// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for the records of all indexes: chunks of one region, which go back to the system as soon as
//! nobody has them.
//!
//! From the allocator of the process they would go back only if what lies beside them did as well, and
//! a guest chooses what does. As mappings of their own they could be too many: a process has 65,530.
//!
//! Never: a call of the system with the lock held.

use crate::fail;
use crate::heap::Region;
use crate::sync::Mutex;
use crate::whole::whole;
use std::io;
use std::ptr::NonNull;

/// Bytes of a chunk: some hundred records of the largest kind, and at two thousand pages a chunk few
/// calls of the system.
pub(crate) const CHUNK_BYTES: usize = 32 << 10;

/// Of the smallest pool: a few of each kind.
const CHUNKS_MIN: usize = 32;

/// Of its lock, for the log.
const CHUNKS: &str = "memory of the indexes";

/// See the file's comment.
#[derive(Debug)]
pub(crate) struct Chunks {
    region: Region,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Given back: without memory.
    bare: Vec<u32>,
    /// From here on never used.
    fresh: u32,
}

/// A chunk, which is its holder's alone. It is zero at first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk(u32);

#[cfg(test)]
impl Chunks {
    /// For a test's indexes.
    pub(crate) fn some() -> std::sync::Arc<Chunks> {
        let bytes_max = if cfg!(miri) { 4 << 20 } else { 256 << 20 };
        Chunks::reserve(bytes_max).expect("address space").into()
    }

    /// Chunks that somebody has.
    pub(crate) fn taken(&self) -> usize {
        let free = self.free.lock().expect("whole");
        free.fresh as usize - free.bare.len()
    }
}

impl Chunks {
    /// For indexes of up to so many bytes together.
    ///
    /// # Errors
    /// The system has not the address space.
    pub(crate) fn reserve(bytes_max: u64) -> io::Result<Chunks> {
        let chunks = (bytes_max as usize / CHUNK_BYTES).clamp(CHUNKS_MIN, u32::MAX as usize);
        Ok(Chunks {
            region: Region::reserve(chunks * CHUNK_BYTES)?,
            free: Mutex::default(),
        })
    }

    /// They are never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.region.is_locked()
    }

    /// None: all are in use.
    pub(crate) fn take(&self) -> Option<Chunk> {
        if fail::memory() {
            return None;
        }
        let mut free = whole(self.free.lock(), CHUNKS);
        if let Some(nr) = free.bare.pop() {
            return Some(Chunk(nr));
        }
        let nr = free.fresh;
        if (nr as usize + 1) * CHUNK_BYTES > self.region.len() {
            return None;
        }
        free.fresh += 1;
        Some(Chunk(nr))
    }

    /// Where a chunk is, for as long as it is not given back.
    pub(crate) fn at(&self, chunk: &Chunk) -> NonNull<u8> {
        self.region.at(chunk.0 as usize * CHUNK_BYTES)
    }

    /// Its memory goes back to the system. Nobody uses what [`at`](Self::at) gave any more.
    pub(crate) fn give(&self, chunk: Chunk) {
        let Chunk(nr) = chunk;
        // SAFETY: its holder, who had it alone, has no use for it, and nobody else has it yet.
        unsafe { self.region.release(nr as usize * CHUNK_BYTES, CHUNK_BYTES) };
        let mut free = whole(self.free.lock(), CHUNKS);
        // Without memory for the note only its address is lost.
        if free.bare.try_reserve(1).is_ok() {
            free.bare.push(nr);
        }
    }
}
