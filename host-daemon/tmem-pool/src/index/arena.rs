// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records of one kind, named by 32-bit numbers, in blocks that never move: it grows without ever
//! copying what it has, and a new block that the system does not give is an error, not an abort.
//!
//! Number 0 is none. Memory goes back when the last record does, all of it at once.

use crate::fail;
use crate::heap::prefetch;
use std::ops::{Index, IndexMut};
use std::ptr;

/// Names a record of an arena; 0 names none.
pub(crate) type Id = u32;

/// Records of a large block: a new one takes some microseconds. The first blocks are smaller, each
/// twice as large as the one before, so that an arena of few records takes little.
const BLOCK: usize = 512;
const FIRST_BLOCK: usize = 16;
const SMALL_BLOCKS: usize = (BLOCK / FIRST_BLOCK).ilog2() as usize;

/// Block of a record, and place in it.
fn locate(id: Id) -> (usize, usize) {
    let at = id as usize + FIRST_BLOCK;
    if at < BLOCK {
        let log = at.ilog2();
        ((log - FIRST_BLOCK.ilog2()) as usize, at - (1 << log))
    } else {
        (SMALL_BLOCKS + at / BLOCK - 1, at % BLOCK)
    }
}

fn block_len(block: usize) -> usize {
    if block < SMALL_BLOCKS {
        FIRST_BLOCK << block
    } else {
        BLOCK
    }
}

/// A record whose value says nothing while it is free, but for a link.
pub(crate) trait Record: Clone + Default {
    /// The link.
    fn next_free(&self) -> Id;
    /// Makes it a free record with this link.
    fn set_free(&mut self, next: Id);
}

/// See the file's comment.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    blocks: Vec<Box<[T]>>,
    free: Id,
    /// From here on never used.
    fresh: Id,
    used: u32,
    used_max: u32,
}

/// There is no memory, or as many records as there may be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl<T: Record> Arena<T> {
    /// For up to `used_max` records.
    pub(crate) fn new(used_max: u32) -> Arena<T> {
        Arena {
            blocks: Vec::new(),
            free: 0,
            fresh: 1,
            used: 0,
            used_max: used_max.min(Id::MAX - 1),
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.used
    }

    /// Memory held, used or not.
    pub(crate) fn bytes(&self) -> u64 {
        let records: usize = match self.blocks.len().checked_sub(SMALL_BLOCKS) {
            Some(large) => BLOCK - FIRST_BLOCK + large * BLOCK,
            None => (FIRST_BLOCK << self.blocks.len()) - FIRST_BLOCK,
        };
        (records * size_of::<T>()) as u64
    }

    /// A record for this value.
    pub(crate) fn insert(&mut self, value: T) -> Result<Id, Full> {
        if self.used == self.used_max || fail::memory() {
            return Err(Full);
        }
        let id = self.free;
        if id != 0 {
            self.free = self[id].next_free();
            self[id] = value;
            self.used += 1;
            return Ok(id);
        }
        let id = self.fresh;
        if locate(id).0 == self.blocks.len() {
            let mut block = Vec::new();
            let len = block_len(self.blocks.len());
            block.try_reserve_exact(len).map_err(|_| Full)?;
            self.blocks.try_reserve(1).map_err(|_| Full)?;
            block.resize(len, T::default());
            self.blocks.push(block.into_boxed_slice());
        }
        self.fresh += 1;
        self.used += 1;
        self[id] = value;
        Ok(id)
    }

    /// A record that may be free, or was and went with its block: a free one's value says nothing.
    pub(crate) fn get(&self, id: Id) -> Option<&T> {
        (id < self.fresh).then(|| &self[id])
    }

    /// Brings a record into the cache, if there is one of that number.
    pub(crate) fn prefetch(&self, id: Id) {
        if id != 0 && id < self.fresh {
            prefetch(ptr::from_ref(&self[id]).cast());
        }
    }

    /// Takes the value of a used record out and frees the record.
    pub(crate) fn remove(&mut self, id: Id) -> T {
        let value = self[id].clone();
        let next = self.free;
        self[id].set_free(next);
        self.free = id;
        self.used -= 1;
        if self.used == 0 {
            self.blocks = Vec::new();
            self.free = 0;
            self.fresh = 1;
        }
        value
    }
}

impl<T> Index<Id> for Arena<T> {
    type Output = T;
    fn index(&self, id: Id) -> &T {
        debug_assert!(id != 0);
        let (block, at) = locate(id);
        &self.blocks[block][at]
    }
}

impl<T> IndexMut<Id> for Arena<T> {
    fn index_mut(&mut self, id: Id) -> &mut T {
        debug_assert!(id != 0);
        let (block, at) = locate(id);
        &mut self.blocks[block][at]
    }
}
