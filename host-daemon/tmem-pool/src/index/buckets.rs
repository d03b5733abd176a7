// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buckets of a hash table that grows and shrinks by one bucket at a time (linear hashing, Litwin,
//! VLDB 1980). The buckets never move, and are added and removed at the end.
//!
//! A table of N buckets, where N is between 2^k and 2^(k+1), uses k bits of a hash, and one more bit
//! in buckets that were already split and in the new halves. So the table's owner never has to move
//! more than the contents of one bucket at a time.
//!
//! The first buckets come from the process's allocator, because there are many tenants with few
//! pages. All other buckets are in chunks of the pool's index memory (chunks.rs). A released chunk
//! goes back to the system immediately. So no call copies buckets, and no call allocates more
//! memory than a chunk.

use super::chunks::{CHUNK_BYTES, Chunk, Chunks};
use crate::config::KEYS_PER_TENANT_MAX;
use crate::fail;
use crate::heap::{FRAME_BYTES, Zeroed};
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Smallest number of buckets of a table, used for tenants with few pages.
pub(crate) const BUCKETS_MIN: usize = 64;

/// Largest size of a bucket for each page of the largest tenant, in bytes. The list of chunks is
/// copied when it grows, so it must be short. With this size, it is no longer than two chunks.
const BYTES_PER_PAGE_MAX: usize = 8;
const _: () = assert!(
    KEYS_PER_TENANT_MAX as usize * BYTES_PER_PAGE_MAX / CHUNK_BYTES * size_of::<Chunk>()
        <= 2 * CHUNK_BYTES
);

/// Returns the number of the bucket from which bucket `nr` was split. Bucket `nr` must not be the
/// first.
pub(crate) fn parent(nr: usize) -> usize {
    nr - (1 << nr.ilog2())
}

#[derive(Debug)]
pub(crate) struct Buckets<T> {
    /// The first `BUCKETS_MIN` buckets, or an empty list if the table has no buckets.
    first: Vec<T>,
    /// Chunks of index memory with all buckets after the first `BUCKETS_MIN`.
    chunks: Vec<Chunk>,
    source: Arc<Chunks>,
    len: usize,
    /// Largest number of buckets that the table has had since it last released a chunk. Buckets
    /// below this number may occupy memory, even if they were removed.
    touched: usize,
}

impl<T: Copy + Default + Zeroed> Buckets<T> {
    /// Number of buckets in a chunk of index memory.
    const IN_CHUNK: usize = CHUNK_BYTES / size_of::<T>();

    /// Returns a table without buckets.
    pub(crate) fn new(source: Arc<Chunks>) -> Buckets<T> {
        Buckets {
            first: Vec::new(),
            chunks: Vec::new(),
            source,
            len: 0,
            touched: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of the bucket of a hash. Returns None if the table has no buckets.
    pub(crate) fn bucket_of(&self, hash: u64) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let mask = self.len.next_power_of_two() - 1;
        let nr = hash as usize & mask;
        // If the bucket `nr` is not split off yet, the hash belongs to the bucket that will be split
        // to make it.
        Some(if nr < self.len { nr } else { nr & mask >> 1 })
    }

    /// Creates the first `BUCKETS_MIN` buckets of a table without buckets, all empty. If the
    /// allocation fails, the table stays without buckets.
    pub(crate) fn create_first_buckets(&mut self) {
        if !fail::memory() && self.first.try_reserve_exact(BUCKETS_MIN).is_ok() {
            self.first.resize(BUCKETS_MIN, T::default());
            self.len = BUCKETS_MIN;
            self.touched = BUCKETS_MIN;
        }
    }

    /// Adds a bucket at the end. Does nothing if the allocation fails.
    pub(crate) fn push(&mut self, bucket: T) {
        let full = BUCKETS_MIN + self.chunks.len() * Self::IN_CHUNK;
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
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.len <= BUCKETS_MIN {
            return None;
        }
        let bucket = self[self.len - 1];
        self.len -= 1;
        if (self.len - BUCKETS_MIN).is_multiple_of(Self::IN_CHUNK)
            && let Some(chunk) = self.chunks.pop()
        {
            self.source.release(chunk);
            self.touched = self.len;
        }
        Some(bucket)
    }

    /// Returns the memory that the buckets take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let in_chunks = (self.touched - self.first.len()) * size_of::<T>();
        let first = self.first.capacity() * size_of::<T>();
        (first + in_chunks.next_multiple_of(FRAME_BYTES)) as u64
    }

    /// Returns the address of a bucket that is in a chunk, not among the first `BUCKETS_MIN`.
    fn at(&self, nr: usize) -> NonNull<T> {
        assert!(
            nr < self.len,
            "bucket {nr} does not exist: the table has {} buckets",
            self.len
        );
        let nr = nr - BUCKETS_MIN;
        let chunk = self.source.at(&self.chunks[nr / Self::IN_CHUNK]).cast();
        // SAFETY: the offset is below IN_CHUNK, and a chunk has room for that many buckets.
        unsafe { chunk.add(nr % Self::IN_CHUNK) }
    }
}

impl<T: Copy + Default + Zeroed> Index<usize> for Buckets<T> {
    type Output = T;

    fn index(&self, nr: usize) -> &T {
        match self.first.get(nr) {
            Some(bucket) => bucket,
            // SAFETY: the chunk belongs to this table until the table releases it, and is aligned
            // to a frame. Its memory is zero, which is a valid bucket, or was written as a bucket.
            // No code changes the bucket while the table is borrowed.
            None => unsafe { self.at(nr).as_ref() },
        }
    }
}

impl<T: Copy + Default + Zeroed> IndexMut<usize> for Buckets<T> {
    fn index_mut(&mut self, nr: usize) -> &mut T {
        if nr < self.first.len() {
            return &mut self.first[nr];
        }
        // SAFETY: the chunk belongs to this table until the table releases it, is aligned to a
        // frame and contains valid buckets (all zero is a valid bucket). The table is borrowed
        // exclusively.
        unsafe { self.at(nr).as_mut() }
    }
}

impl<T> Buckets<T> {
    /// Removes all buckets and releases their memory.
    pub(crate) fn clear(&mut self) {
        for chunk in self.chunks.drain(..) {
            self.source.release(chunk);
        }
        (self.first, self.chunks) = (Vec::new(), Vec::new());
        (self.len, self.touched) = (0, 0);
    }
}

impl<T> Drop for Buckets<T> {
    fn drop(&mut self) {
        self.clear();
    }
}
