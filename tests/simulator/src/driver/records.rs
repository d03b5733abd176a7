// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records of the model of the guest driver: which contents the last transfer of a disk block
//! carried, and the interval in which the driver sees all transfers. The functions have the names
//! and the order of steps of `guest-driver/hooks/records.c` and `areas.c`.
//!
//! Out of scope: records that are displaced, and sequence numbers that wrap.

use std::collections::BTreeMap;

use tmem_model::Content;

use super::Block;
use crate::mutation::Mutation;

/// Record of a block. Without contents, a transfer is in flight or the block was erased.
#[derive(Clone, Copy, Debug)]
struct Record {
    seq: u32,
    content: Option<Content>,
    /// Whether the contents are those of a write, which a later change of the page voids.
    written: bool,
}

/// Records of all blocks, and the state of the disk's area.
#[derive(Clone, Debug)]
pub struct Records {
    mutation: Option<Mutation>,
    blocks: BTreeMap<Block, Record>,
    /// Writes in flight, by block.
    writes: BTreeMap<Block, u32>,
    seq: u32,
    /// Whether the driver knows the mounted file system.
    pub known: bool,
    /// Number of the interval in which the driver sees all transfers of the disk, or 0 outside of
    /// one.
    epoch: u32,
    /// The last epoch that began. No epoch is used again.
    epoch_last: u32,
    /// Epoch from whose drain on blocks may be got.
    served: u32,
    failed: bool,
}

impl Records {
    /// Creates the records of a disk that the driver has seen from the start.
    pub fn new(mutation: Option<Mutation>) -> Records {
        Records {
            mutation,
            blocks: BTreeMap::new(),
            writes: BTreeMap::new(),
            seq: 0,
            known: true,
            epoch: 1,
            epoch_last: 1,
            served: 1,
            failed: false,
        }
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn next_seq(&mut self) -> u32 {
        self.seq += 1;
        self.seq
    }

    fn find_or_add(&mut self, block: Block) -> &mut Record {
        let seq = self.seq + 1;
        self.seq += u32::from(!self.blocks.contains_key(&block));
        self.blocks.entry(block).or_insert(Record {
            seq,
            content: None,
            written: false,
        })
    }

    fn erase(&mut self, block: Block) {
        let seq = self.next_seq();
        if let Some(record) = self.blocks.get_mut(&block)
            && self.mutation != Some(Mutation::RecordKeptAtWrite)
        {
            (record.seq, record.content) = (seq, None);
        }
    }

    /// Returns the number of the interval in which all transfers are seen, or 0 outside of one.
    pub fn epoch(&self) -> u32 {
        if self.known { self.epoch } else { 0 }
    }

    /// Returns whether blocks of the disk may be got.
    pub fn works(&self) -> bool {
        self.epoch() != 0 && self.served == self.epoch
    }

    /// Begins a read of a block. Returns a number for [`fill`](Self::fill).
    pub fn read(&mut self, block: Block) -> u32 {
        self.find_or_add(block).seq
    }

    /// Records the contents that a read of a block has returned. Returns false if it must not.
    pub fn fill(&mut self, block: Block, seq: u32, content: Content) -> bool {
        self.record(block, seq, content, Mutation::ReadRecordedOverWrite)
    }

    /// Records the contents of a block if its number has not changed, or if the driver breaks the
    /// rule `unchecked`.
    fn record(&mut self, block: Block, seq: u32, content: Content, unchecked: Mutation) -> bool {
        let unchecked = self.is(unchecked);
        let record = self.blocks.get_mut(&block);
        let Some(record) = record.filter(|record| record.seq == seq || unchecked) else {
            return false;
        };
        (record.content, record.written) = (Some(content), false);
        true
    }

    /// Begins a write of a block, and erases its record. Returns a number for
    /// [`flush`](Self::flush).
    pub fn write(&mut self, block: Block) -> u32 {
        *self.writes.entry(block).or_default() += 1;
        self.find_or_add(block);
        self.erase(block);
        self.blocks[&block].seq
    }

    /// Ends a write of a block, and erases its record.
    pub fn end_write(&mut self, block: Block) {
        if let Some(writes) = self.writes.get_mut(&block) {
            *writes = writes.saturating_sub(1);
        }
        self.erase(block);
    }

    /// Ends a write of a page that was under writeback, and records its contents if no other write
    /// overlapped and the page is not dirty again.
    pub fn flush(&mut self, block: Block, seq: u32, content: Content, dirty: bool) {
        let alone = self.blocks.get(&block).is_some_and(|r| r.seq == seq);
        self.end_write(block);
        if let Some(record) = self.blocks.get_mut(&block)
            && alone
            && !dirty
        {
            (record.content, record.written) = (Some(content), true);
        }
    }

    /// Begins a get of a block. Returns a number for [`got`](Self::got), or None if a write may be
    /// in flight.
    pub fn get(&mut self, block: Block) -> Option<u32> {
        if self.is_written(block) {
            return None;
        }
        Some(self.find_or_add(block).seq)
    }

    /// Records the contents that a get of a block has returned. Returns false if a write may have
    /// begun since, so that the contents must not be used.
    pub fn got(&mut self, block: Block, seq: u32, content: Content) -> bool {
        self.record(block, seq, content, Mutation::GetDuringWrite)
    }

    fn is_written(&self, block: Block) -> bool {
        self.writes.get(&block).is_some_and(|writes| *writes > 0)
    }

    /// Compares an evicted page with the record of a block. Deletes the record of equal contents,
    /// because the page leaves the page cache. Returns whether the page may be put.
    pub fn compare(&mut self, block: Block, content: Content) -> bool {
        if self.is(Mutation::HintTrusted) {
            return true;
        }
        let record = self.blocks.get(&block);
        let equal = record.is_some_and(|record| record.content == Some(content));
        let may_put = equal && (!self.is_written(block) || self.is(Mutation::PutDuringWrite));
        if may_put {
            self.blocks.remove(&block);
        }
        may_put
    }

    /// Voids the record of the last write of a page that becomes dirty.
    pub fn dirty(&mut self, block: Block) {
        if self.blocks.get(&block).is_some_and(|record| record.written) {
            self.erase(block);
        }
    }

    /// Erases all records, so that no transfer in flight records anything.
    pub fn erase_all(&mut self) {
        let blocks: Vec<Block> = self.blocks.keys().copied().collect();
        blocks.into_iter().for_each(|block| self.erase(block));
    }

    /// Ends the interval, because a write was not seen, or has failed.
    pub fn end_interval(&mut self, failed: bool) {
        self.failed |= failed;
        self.epoch = 0;
    }

    /// Begins an interval, if no write has failed. Blocks may be got from
    /// [`drained`](Self::drained) on.
    pub fn begin_interval(&mut self) {
        if self.known && self.epoch == 0 && !self.failed {
            self.epoch_last += 1;
            self.epoch = self.epoch_last;
        }
    }

    /// Allows gets, because all transfers have ended that began before the interval. Returns
    /// whether the caller has to erase all records and entries.
    pub fn drained(&mut self) -> bool {
        let first = self.epoch() != 0 && self.served != self.epoch;
        self.served = self.epoch;
        first
    }

    /// Begins with a new mount, whose disk has no transfer in flight.
    pub fn remount(&mut self, known: bool) {
        self.erase_all();
        self.writes.clear();
        (self.known, self.failed, self.epoch) = (known, false, 0);
        self.begin_interval();
        self.served = self.epoch;
    }
}
