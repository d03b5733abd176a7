// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for the records of all indexes: chunks of 32 KiB in one region of address space. The
//! memory of a chunk goes back to the system as soon as no index uses the chunk.
//!
//! The chunks do not come from the process's allocator. The allocator could return memory to the
//! system only together with adjacent memory, and the guest's requests decide which data are
//! adjacent. The chunks are not mappings of their own either: Linux allows only 65,530 mappings for
//! a process.
//!
//! No thread makes a system call while it holds the lock of the free chunks.

use crate::fail;
use crate::heap::Region;
use crate::poison;
use crate::sync::Mutex;
use std::io;
use std::ptr::NonNull;

/// Size of a chunk of index memory in bytes. A chunk has room for 73 records of the largest
/// kind. System calls are rare because a chunk suffices for the index entries of about a
/// thousand pages.
pub(crate) const CHUNK_BYTES: usize = 32 << 10;

/// Number of chunks that even the smallest pool reserves: a few for each kind of index record.
const CHUNKS_MIN: usize = 32;

/// Name of the data that the lock of the free chunks guards, for log messages.
const CHUNKS: &str = "memory of the indexes";

/// All chunks of memory for the indexes of a pool, free and in use.
#[derive(Debug)]
pub(crate) struct Chunks {
    region: Region,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Numbers of the chunks that indexes gave back. These chunks have no memory.
    bare: Vec<u32>,
    /// Lowest chunk number that was never used.
    fresh: u32,
}

/// A chunk of index memory, named by its number. Only the owner of this value may use the chunk.
/// The memory of a chunk is zero when an index takes it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk(u32);

#[cfg(test)]
impl Chunks {
    /// Reserves address space for the chunks of a test's indexes.
    pub(crate) fn some() -> std::sync::Arc<Chunks> {
        let bytes_max = if cfg!(miri) { 4 << 20 } else { 256 << 20 };
        Chunks::reserve(bytes_max)
            .expect("cannot reserve address space for the indexes")
            .into()
    }

    /// Returns the number of chunks that indexes use.
    pub(crate) fn taken(&self) -> usize {
        let free = self
            .free
            .lock()
            .expect("another thread panicked while it held the lock of the free chunks");
        free.fresh as usize - free.bare.len()
    }
}

impl Chunks {
    /// Reserves address space for chunks of up to `bytes_max` bytes together.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub(crate) fn reserve(bytes_max: u64) -> io::Result<Chunks> {
        let chunks = (bytes_max as usize / CHUNK_BYTES).clamp(CHUNKS_MIN, u32::MAX as usize);
        Ok(Chunks {
            region: Region::reserve(chunks * CHUNK_BYTES)?,
            free: Mutex::default(),
        })
    }

    /// Returns whether the chunks' memory is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.region.is_locked()
    }

    /// Takes a free chunk. Returns None if all chunks are in use.
    pub(crate) fn take(&self) -> Option<Chunk> {
        if fail::memory() {
            return None;
        }
        let mut free = poison::guard_or_abort(self.free.lock(), CHUNKS);
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

    /// Returns the address of a chunk, which is valid until the chunk is given back.
    pub(crate) fn at(&self, chunk: &Chunk) -> NonNull<u8> {
        self.region.at(chunk.0 as usize * CHUNK_BYTES)
    }

    /// Gives the memory of a chunk back to the system. The caller no longer uses the address that
    /// [`at`](Self::at) returned.
    pub(crate) fn release(&self, chunk: Chunk) {
        let Chunk(nr) = chunk;
        // SAFETY: the caller was the only user of the chunk and no longer uses it. No other thread
        // can take the chunk yet.
        unsafe { self.region.release(nr as usize * CHUNK_BYTES, CHUNK_BYTES) };
        let mut free = poison::guard_or_abort(self.free.lock(), CHUNKS);
        // If there is no memory for this list entry, the chunk cannot be used again. Only its
        // address space is lost, because its memory is already released.
        if free.bare.try_reserve(1).is_ok() {
            free.bare.push(nr);
        }
    }
}
