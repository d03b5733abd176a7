// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of a ghost table, which remembers pages that left the pool a short time ago. The memory
//! consists of buckets that never move. Buckets are added and removed at the end.
//!
//! The first buckets come from the process's allocator, because there are many tenants with few
//! pages. All other buckets are in chunks of the pool's index memory (index/chunks.rs). A released
//! chunk goes back to the system immediately. So no call copies buckets, and no call allocates more
//! memory than a chunk.

use crate::config::KEYS_PER_TENANT_MAX;
use crate::fail;
use crate::heap::FRAME_BYTES;
use crate::index::{CHUNK_BYTES, Chunk, Chunks};
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Number of fingerprints (short hashes of keys) in a bucket. They take a quarter of a cache line.
pub(super) const WAYS: usize = 8;

/// Smallest number of buckets of a ghost table, used for tenants with few pages: 1 KiB of memory.
pub(super) const BUCKETS_MIN: usize = 64;

/// Number of buckets in a chunk of index memory.
const CHUNK_BUCKETS: usize = CHUNK_BYTES / size_of::<Bucket>();

/// Bucket of a ghost table: fingerprints (short hashes of keys), the oldest first. 0 means no
/// fingerprint.
pub(super) type Bucket = [u16; WAYS];

// The list of chunks is copied when it grows, so it must be short. The ghost table of the largest
// tenant has two fingerprints for each page, and its list of chunks is no longer than a chunk.
const _: () = assert!(
    KEYS_PER_TENANT_MAX as usize * 2 / WAYS / CHUNK_BUCKETS * size_of::<Chunk>() <= CHUNK_BYTES
);

#[derive(Debug)]
pub(super) struct Buckets {
    /// The first `BUCKETS_MIN` buckets, or an empty list if the table has no buckets.
    first: Vec<Bucket>,
    /// Chunks of index memory with all buckets after the first `BUCKETS_MIN`.
    chunks: Vec<Chunk>,
    source: Arc<Chunks>,
    len: usize,
    /// Largest number of buckets that the table has had since it last released a chunk. Buckets
    /// below this number may occupy memory, even if they were removed.
    touched: usize,
}

impl Buckets {
    /// Returns a table without buckets.
    pub(super) fn new(source: Arc<Chunks>) -> Buckets {
        Buckets {
            first: Vec::new(),
            chunks: Vec::new(),
            source,
            len: 0,
            touched: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Creates the first `BUCKETS_MIN` buckets of a table without buckets, all empty. If the
    /// allocation fails, the table stays without buckets.
    pub(super) fn begin(&mut self) {
        if !fail::memory() && self.first.try_reserve_exact(BUCKETS_MIN).is_ok() {
            self.first.resize(BUCKETS_MIN, [0; WAYS]);
            self.len = BUCKETS_MIN;
            self.touched = BUCKETS_MIN;
        }
    }

    /// Adds a bucket at the end. Does nothing if the allocation fails.
    pub(super) fn push(&mut self, bucket: Bucket) {
        let full = BUCKETS_MIN + self.chunks.len() * CHUNK_BUCKETS;
        if self.len == full {
            let Ok(()) = self.chunks.try_reserve(1) else {
                return;
            };
            let Some(chunk) = self.source.take() else {
                return;
            };
            self.chunks.push(chunk);
        }
        self.len += 1;
        self.touched = self.touched.max(self.len);
        let last = self.len - 1;
        self[last] = bucket;
    }

    /// Removes and returns the last bucket. Returns None if only the first `BUCKETS_MIN` buckets
    /// are left.
    pub(super) fn pop(&mut self) -> Option<Bucket> {
        if self.len <= BUCKETS_MIN {
            return None;
        }
        let bucket = self[self.len - 1];
        self.len -= 1;
        if (self.len - BUCKETS_MIN).is_multiple_of(CHUNK_BUCKETS)
            && let Some(chunk) = self.chunks.pop()
        {
            self.source.release(chunk);
            self.touched = self.len;
        }
        Some(bucket)
    }

    /// Returns the memory that the buckets take, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let in_chunks = (self.touched - self.first.len()) * size_of::<Bucket>();
        let first = self.first.capacity() * size_of::<Bucket>();
        (first + in_chunks.next_multiple_of(FRAME_BYTES)) as u64
    }

    /// Returns the address of a bucket that is in a chunk, not among the first `BUCKETS_MIN`.
    fn at(&self, nr: usize) -> NonNull<Bucket> {
        assert!(
            nr < self.len,
            "bucket {nr} does not exist: the ghost table has {} buckets",
            self.len
        );
        let nr = nr - BUCKETS_MIN;
        let chunk = self.source.at(&self.chunks[nr / CHUNK_BUCKETS]).cast();
        // SAFETY: the offset is below CHUNK_BUCKETS, and a chunk has room for that many buckets.
        unsafe { chunk.add(nr % CHUNK_BUCKETS) }
    }
}

impl Index<usize> for Buckets {
    type Output = Bucket;

    fn index(&self, nr: usize) -> &Bucket {
        match self.first.get(nr) {
            Some(bucket) => bucket,
            // SAFETY: the chunk belongs to this table until the table releases it, and is aligned
            // to a frame. Its memory is zero, which is a valid bucket, or was written as a bucket.
            // No code changes the bucket while the table is borrowed.
            None => unsafe { self.at(nr).as_ref() },
        }
    }
}

impl IndexMut<usize> for Buckets {
    fn index_mut(&mut self, nr: usize) -> &mut Bucket {
        if nr < self.first.len() {
            return &mut self.first[nr];
        }
        // SAFETY: the chunk belongs to this table until the table releases it, is aligned to a
        // frame and contains valid buckets (all zero is a valid bucket). The table is borrowed
        // exclusively.
        unsafe { self.at(nr).as_mut() }
    }
}

impl Drop for Buckets {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            self.source.release(chunk);
        }
    }
}
