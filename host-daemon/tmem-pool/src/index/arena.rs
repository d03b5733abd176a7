// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arena: memory for records of one kind, which are named by 32-bit numbers. The records lie in
//! blocks that never move, so the arena grows without copying records. If the system has no memory
//! for a new block, the caller gets an error, and the process does not abort.
//!
//! The first blocks are small and come from the process's allocator, because there are many arenas
//! of few records. All other blocks are chunks of the pool's index memory (chunks.rs). A chunk
//! without used records goes back to the system. The arena keeps one such chunk, so that chunks are
//! not released and taken again all the time. New records go to the block that stopped being full
//! most recently, so that nearly empty blocks can become empty. When the last record is removed,
//! all memory is released, unless the caller keeps it (`take`).
//!
//! Number 0 means no record.

use super::chunks::{CHUNK_BYTES, Chunk, Chunks};
use crate::fail;
use crate::heap::Zeroed;
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Number of a record in an arena; 0 means no record.
pub(crate) type Id = u32;

/// Size in bytes that blocks from the process's allocator do not reach. The first blocks are much
/// smaller. A block of this size or more is a chunk of index memory.
const SMALL_BYTES: usize = 16 << 10;
/// Size in bytes that the first block of an arena does not exceed, unless it has only one record.
const FIRST_BYTES: usize = 512;

/// Block number that means no block, and ends a list of blocks.
const NONE: u32 = u32::MAX;

/// A record of an arena. The value of a free record has no meaning, except for the link to the next
/// free record.
pub(crate) trait ArenaRecord: Clone + Default + Zeroed {
    /// Returns the number of the next free record, if this record is free.
    fn next_free(&self) -> Id;
    /// Turns the record into a free record that is linked to the free record `next`.
    fn set_free(&mut self, next: Id);
}

/// Source of a block's memory: none, the process's allocator, or a chunk of index memory.
#[derive(Debug)]
enum Memory {
    /// The block has no memory (it is bare), and all its records are free.
    Bare,
    /// The memory comes from the process's allocator.
    Small,
    Chunk(Chunk),
}

#[derive(Debug)]
struct Block<T> {
    /// Records of the block. The slice is empty while the block has no memory.
    records: NonNull<[T]>,
    memory: Memory,
    used: u32,
    /// Place in the block of the first free record below `fresh`, plus 1. 0 means that there is
    /// none.
    free: u32,
    /// Lowest place in the block that was never used.
    fresh: u32,
    /// Previous and next block of a list. The list is that of open blocks (which have memory and
    /// are not full) or that of bare blocks (which have no memory).
    prev: u32,
    next: u32,
}

/// An arena of records.
#[derive(Debug)]
pub(crate) struct Arena<T: ArenaRecord> {
    blocks: Vec<Block<T>>,
    chunks: Arc<Chunks>,
    /// First open block. An open block has memory and is not full.
    open: u32,
    /// First bare block. A bare block has no memory.
    bare: u32,
    /// Number of chunks that have memory but no used records.
    idle: u32,
    bytes: u64,
    used: u32,
    used_max: u32,
}

// SAFETY: an arena owns its records, and no other object accesses their memory.
unsafe impl<T: ArenaRecord + Send> Send for Arena<T> {}
// SAFETY: through a shared reference, records are only read.
unsafe impl<T: ArenaRecord + Sync> Sync for Arena<T> {}

/// Error: there is no memory for a record, or the arena already has its largest number of records.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl<T: ArenaRecord> Block<T> {
    fn records(&self) -> &[T] {
        // SAFETY: only this block uses the memory, and every record of the slice is valid. A chunk
        // is zero at first, which is a valid value of a record. A block without memory has an empty
        // slice.
        unsafe { self.records.as_ref() }
    }

    fn records_mut(&mut self) -> &mut [T] {
        // SAFETY: only this block uses the memory, and every record of the slice is valid. The
        // block is borrowed exclusively.
        unsafe { self.records.as_mut() }
    }

    fn is_full(&self) -> bool {
        self.used as usize == self.records.len()
    }
}

impl<T: ArenaRecord> Arena<T> {
    /// Number of records that fit into a chunk.
    const LARGE: usize = CHUNK_BYTES / size_of::<T>();
    /// Number of records of the first block, a power of two. Each further block of the process's
    /// allocator has twice as many records as the block before.
    const FIRST: usize = 1 << ((FIRST_BYTES / size_of::<T>()) | 1).ilog2();
    /// Number of records that blocks of the process's allocator do not reach, a power of two.
    const SMALL: usize = 1 << (SMALL_BYTES / size_of::<T>()).ilog2();
    const SMALL_BLOCKS: usize = (Self::SMALL / Self::FIRST).ilog2() as usize;
    const SMALL_RECORDS: usize = Self::SMALL - Self::FIRST;

    /// Creates an arena of up to `used_max` records.
    pub(crate) fn new(used_max: u32, chunks: Arc<Chunks>) -> Arena<T> {
        const {
            assert!(Self::SMALL > Self::FIRST && align_of::<T>() <= CHUNK_BYTES);
        }
        Arena {
            blocks: Vec::new(),
            chunks,
            open: NONE,
            bare: NONE,
            idle: 0,
            bytes: 0,
            used: 0,
            used_max: used_max.min(Id::MAX - 1),
        }
    }

    /// Returns the number of a record's block, and the record's place in that block.
    fn locate(id: Id) -> (usize, usize) {
        let at = id as usize + Self::FIRST - 1;
        match at.checked_sub(Self::SMALL) {
            None => {
                let log = at.ilog2();
                ((log - Self::FIRST.ilog2()) as usize, at - (1 << log))
            }
            Some(at) => (Self::SMALL_BLOCKS + at / Self::LARGE, at % Self::LARGE),
        }
    }

    /// Returns the number of the record at a place of a block.
    fn id(block: usize, at: usize) -> Id {
        let first = match block.checked_sub(Self::SMALL_BLOCKS) {
            None => (Self::FIRST << block) - Self::FIRST,
            Some(large) => Self::SMALL_RECORDS + large * Self::LARGE,
        };
        (first + at) as Id + 1
    }

    pub(crate) fn len(&self) -> u32 {
        self.used
    }

    /// Returns the memory of the arena's blocks in bytes, whether their records are used or free.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Inserts a record with this value, and returns the number of the record.
    ///
    /// # Errors
    /// There is no memory, or the arena already has its largest number of records.
    pub(crate) fn insert(&mut self, value: T) -> Result<Id, Full> {
        if self.used == self.used_max || fail::memory() {
            return Err(Full);
        }
        if self.open == NONE {
            self.open_another()?;
        }
        let nr = self.open as usize;
        let block = &mut self.blocks[nr];
        self.idle -= u32::from(block.used == 0 && nr >= Self::SMALL_BLOCKS);
        let at = match block.free {
            0 => {
                block.fresh += 1;
                block.fresh as usize - 1
            }
            free => {
                let at = free as usize - 1;
                block.free = block.records()[at].next_free();
                at
            }
        };
        block.records_mut()[at] = value;
        block.used += 1;
        self.used += 1;
        if block.is_full() {
            self.unlist(nr);
        }
        Ok(Self::id(nr, at))
    }

    /// Returns a record, or None if the record's block has no memory. If the record is free, its
    /// value has no meaning.
    pub(crate) fn get(&self, id: Id) -> Option<&T> {
        debug_assert!(id != 0);
        let (block, at) = Self::locate(id);
        let block = self.blocks.get(block)?;
        block.records().get(at)
    }

    /// Frees a used record and returns its value. Releases all memory with the last record.
    pub(crate) fn remove(&mut self, id: Id) -> T {
        let value = self.take(id);
        if self.used == 0 {
            self.clear();
        }
        value
    }

    /// Frees a used record and returns its value. Keeps the small blocks and one chunk, even if no
    /// record is left.
    pub(crate) fn take(&mut self, id: Id) -> T {
        let (nr, at) = Self::locate(id);
        let block = &mut self.blocks[nr];
        let was_full = block.is_full();
        let free = block.free;
        let record = &mut block.records_mut()[at];
        let value = record.clone();
        record.set_free(free);
        block.free = at as u32 + 1;
        block.used -= 1;
        let emptied = block.used == 0 && nr >= Self::SMALL_BLOCKS;
        self.used -= 1;
        if was_full {
            self.list(nr);
        }
        if emptied {
            self.idle += 1;
            if self.idle > 1 {
                self.idle -= 1;
                self.unlist(nr);
                self.lay_bare(nr);
            }
        }
        value
    }

    // ---- blocks -------------------------------------------------------------------------------

    /// Adds a block at the head of the list of open blocks. If the block was full until one of its
    /// records was freed, the next insert uses that record, which is still in the processor's
    /// cache.
    fn list(&mut self, nr: usize) {
        let next = std::mem::replace(&mut self.open, nr as u32);
        if next != NONE {
            self.blocks[next as usize].prev = nr as u32;
        }
        let block = &mut self.blocks[nr];
        (block.prev, block.next) = (NONE, next);
    }

    fn unlist(&mut self, nr: usize) {
        let Block { prev, next, .. } = self.blocks[nr];
        match prev {
            NONE => self.open = next,
            _ => self.blocks[prev as usize].next = next,
        }
        if next != NONE {
            self.blocks[next as usize].prev = prev;
        }
    }

    /// Gives memory to a bare block (one without memory) or, if there is none, to a new block. The
    /// block then is the first open block.
    ///
    /// # Errors
    /// There is no memory.
    fn open_another(&mut self) -> Result<(), Full> {
        if self.bare == NONE {
            self.blocks.try_reserve(1).map_err(|_| Full)?;
        }
        let nr = match self.bare {
            NONE => self.blocks.len(),
            nr => nr as usize,
        };
        let (records, memory) = if nr < Self::SMALL_BLOCKS {
            let (len, mut records) = (Self::FIRST << nr, Vec::new());
            records.try_reserve_exact(len).map_err(|_| Full)?;
            records.resize(len, T::default());
            let records = NonNull::from(Box::leak(records.into_boxed_slice()));
            (records, Memory::Small)
        } else {
            let chunk = self.chunks.take().ok_or(Full)?;
            let at = self.chunks.at(&chunk).cast();
            let records = NonNull::slice_from_raw_parts(at, Self::LARGE);
            self.idle += 1;
            (records, Memory::Chunk(chunk))
        };
        let block = Block {
            records,
            memory,
            used: 0,
            free: 0,
            fresh: 0,
            prev: NONE,
            next: NONE,
        };
        self.bytes += Self::memory_bytes(&block);
        if nr == self.blocks.len() {
            self.blocks.push(block);
        } else {
            self.bare = self.blocks[nr].next;
            self.blocks[nr] = block;
        }
        self.list(nr);
        Ok(())
    }

    fn memory_bytes(block: &Block<T>) -> u64 {
        match block.memory {
            Memory::Bare => 0,
            Memory::Small => (block.records.len() * size_of::<T>()) as u64,
            Memory::Chunk(_) => CHUNK_BYTES as u64,
        }
    }

    /// Releases the memory of a block that is in no list, and adds the block to the list of bare
    /// blocks.
    fn lay_bare(&mut self, nr: usize) {
        let block = &mut self.blocks[nr];
        self.bytes -= Self::memory_bytes(block);
        let records = std::mem::replace(
            &mut block.records,
            NonNull::slice_from_raw_parts(NonNull::dangling(), 0),
        );
        match std::mem::replace(&mut block.memory, Memory::Bare) {
            Memory::Bare => {}
            // SAFETY: the records were leaked from a box when the block got them, and no code
            // refers to them any more.
            Memory::Small => drop(unsafe { Box::from_raw(records.as_ptr()) }),
            Memory::Chunk(chunk) => self.chunks.release(chunk),
        }
        block.next = std::mem::replace(&mut self.bare, nr as u32);
    }

    /// Releases the memory of all blocks. The caller has released all records.
    pub(crate) fn clear(&mut self) {
        for nr in 0..self.blocks.len() {
            self.lay_bare(nr);
        }
        self.blocks = Vec::new();
        (self.open, self.bare, self.idle) = (NONE, NONE, 0);
    }
}

impl<T: ArenaRecord> Drop for Arena<T> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<T: ArenaRecord> Index<Id> for Arena<T> {
    type Output = T;
    fn index(&self, id: Id) -> &T {
        debug_assert!(id != 0);
        let (block, at) = Self::locate(id);
        &self.blocks[block].records()[at]
    }
}

impl<T: ArenaRecord> IndexMut<Id> for Arena<T> {
    fn index_mut(&mut self, id: Id) -> &mut T {
        debug_assert!(id != 0);
        let (block, at) = Self::locate(id);
        &mut self.blocks[block].records_mut()[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::BTreeMap;

    /// Record for the tests.
    #[derive(Clone, Debug, Default)]
    struct Item {
        value: u64,
        next: Id,
        _rest: [u32; 5],
    }

    // SAFETY: all fields are integers, for which all bits zero is a valid value.
    unsafe impl Zeroed for Item {}

    impl ArenaRecord for Item {
        fn next_free(&self) -> Id {
            self.next
        }

        fn set_free(&mut self, next: Id) {
            *self = Item {
                next,
                ..Item::default()
            };
        }
    }

    type Items = Arena<Item>;

    fn item(value: u64) -> Item {
        Item {
            value,
            ..Item::default()
        }
    }

    /// Adds this number of records. Returns the numbers of the records in the order of insertion.
    fn fill(arena: &mut Items, records: u64) -> Vec<Id> {
        let add = |value| arena.insert(item(value)).unwrap();
        (0..records).map(add).collect()
    }

    #[test]
    fn record_ids_convert_to_arena_positions_and_back() {
        for id in 1..if cfg!(miri) { 2000 } else { 10_000 } {
            let (block, at) = Items::locate(id);
            assert_eq!(Items::id(block, at), id);
        }
        let (block, at) = Items::locate(Items::SMALL_RECORDS as Id);
        assert_eq!((block, at), (Items::SMALL_BLOCKS - 1, Items::SMALL / 2 - 1));
        assert_eq!(
            Items::locate(Items::SMALL_RECORDS as Id + 1),
            (Items::SMALL_BLOCKS, 0)
        );
    }

    #[test]
    fn index_arena_matches_a_map_model() {
        let (seeds, turns, most) = if cfg!(miri) {
            (1, 3, 2500)
        } else {
            (20, 12, 9000)
        };
        for_each_seed("index_arena_matches_a_map_model", seeds, |seed| {
            let mut rng = Rng::new(seed);
            let chunks = Chunks::some();
            let mut arena = Items::new(1 << 20, Arc::clone(&chunks));
            let mut model = BTreeMap::new();
            // Fill and empty the arena alternately, each time to another number of records.
            for turn in 0..turns {
                let target = if turn % 2 == 0 {
                    rng.below(most)
                } else {
                    rng.below(600)
                };
                while model.len() as u64 != target {
                    if (model.len() as u64) < target {
                        let value = rng.next();
                        let id = arena.insert(item(value)).unwrap();
                        assert!(id != 0 && model.insert(id, value).is_none());
                        continue;
                    }
                    let from = rng.below(12_000) as Id;
                    let next = model.range(from..).next().or(model.iter().next());
                    let (&id, &value) = next.unwrap();
                    model.remove(&id);
                    // In half of the turns, keep the memory with the last record.
                    let removed = match turn % 4 < 2 {
                        true => arena.remove(id),
                        false => arena.take(id),
                    };
                    assert_eq!(removed.value, value);
                }
                for (&id, &value) in &model {
                    assert_eq!(arena[id].value, value);
                    assert_eq!(arena.get(id).map(|item| item.value), Some(value));
                }
                assert_eq!(arena.len() as usize, model.len());
                let blocks = arena.blocks.iter();
                let held: u64 = blocks.map(Items::memory_bytes).sum();
                assert_eq!(arena.bytes(), held);
                let with = |nr: usize| matches!(arena.blocks[nr].memory, Memory::Chunk(_));
                let taken: Vec<usize> = (0..arena.blocks.len()).filter(|&nr| with(nr)).collect();
                assert_eq!(chunks.taken(), taken.len());
                let idle = taken
                    .iter()
                    .filter(|&&nr| arena.blocks[nr].used == 0)
                    .count();
                assert_eq!(arena.idle as usize, idle);
                assert!(
                    idle <= 1,
                    "the arena keeps {idle} chunks without a used record, more than one"
                );
            }
            while let Some((id, _)) = model.pop_first() {
                arena.remove(id);
            }
            assert_eq!((arena.bytes(), chunks.taken()), (0, 0));
        });
    }

    #[test]
    fn emptied_arena_chunks_are_released_and_zeroed_for_reuse() {
        let chunks = Chunks::some();
        let mut arena = Items::new(1 << 20, Arc::clone(&chunks));
        let ids = fill(&mut arena, 20 * Items::LARGE as u64);
        let full_bytes = arena.bytes();
        // Remove the oldest three quarters of the records, as evictions would.
        let (old, young) = ids.split_at(ids.len() * 3 / 4);
        for &id in old {
            arena.remove(id);
        }
        // The limit is the size of the chunks with young records, and three more. One chunk may
        // contain both old and young records, and the arena keeps one chunk without used records.
        let left_bytes = full_bytes / 4 + 3 * CHUNK_BYTES as u64;
        assert!(
            arena.bytes() <= left_bytes,
            "the arena still has {} of {full_bytes} B after three quarters of its records were removed",
            arena.bytes()
        );
        assert!(
            arena.get(old[Items::SMALL + 2 * Items::LARGE]).is_none(),
            "a record of a released chunk is still found"
        );
        assert_eq!(arena[young[0]].value, old.len() as u64);
        fill(&mut arena, old.len() as u64);
        assert_eq!(arena.bytes(), full_bytes);
        let never_used = chunks.take().unwrap();
        chunks.release(never_used);
        drop(arena);
        assert_eq!(chunks.taken(), 0);
        let again = chunks.take().unwrap();
        // SAFETY: the chunk belongs to this test.
        let bytes = unsafe { std::slice::from_raw_parts(chunks.at(&again).as_ptr(), CHUNK_BYTES) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn inserting_a_record_fails_if_the_arena_has_no_free_chunk() {
        let chunks = Arc::new(Chunks::reserve(0).unwrap());
        let mut arena = Items::new(1 << 20, Arc::clone(&chunks));
        let ids: Vec<Id> = std::iter::from_fn(|| arena.insert(item(1)).ok()).collect();
        assert_eq!(arena.insert(item(1)), Err(Full));
        assert!(ids.len() > Items::SMALL_RECORDS + Items::LARGE);
        arena.remove(ids[700]);
        assert_eq!(arena.insert(item(1)), Ok(ids[700]));
    }
}
