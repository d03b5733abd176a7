// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts and flushes of the model of the guest driver. A put copies the page into a slot of the put
//! ring and adds it to the index. The feeder thread sends it later.
//!
//! A put never waits. If a put is dropped or refused, the index has no entry for its page.

use tmem_model::{Answer, Content, Key, PutPage, Range as Ranged, Request};
use virtio_tmem as wire;

use super::{Block, DriverModel, Entry, OBJECT_BITS, Port, index_of};
use crate::mutation::Mutation;
use crate::transport::{BATCH, PUTS, Tag};

/// Maximum number of ranges that a queue remembers to flush. The driver drops further ranges.
const RANGES_MAX: usize = 4;

/// A page in the put ring, which waits to be sent to the device or to be answered.
#[derive(Clone, Debug)]
pub struct Slot {
    block: Block,
    object: u64,
    pool: u32,
    pub(super) cookie: u64,
    /// The driver's epoch at the time of the put.
    epoch: u32,
    workingset: bool,
    /// Address of the page's copy in the put ring.
    pub(super) address: u64,
    content: Content,
}

/// Batch of puts that is in flight. Until the device answers, it owns the slots of the batch.
#[derive(Clone, Debug)]
pub struct PutBatch {
    pub(super) slots: Vec<Slot>,
}

/// Range of erased blocks that waits to be sent in a FLUSH.
#[derive(Clone, Debug)]
pub struct Range {
    object: u64,
    pool: u32,
    /// The driver's epoch when the range was added.
    epoch: u32,
    index: u64,
    nr_pages: u64,
}

impl DriverModel {
    /// Puts a clean page that the guest evicts from its page cache, if its contents are those of the
    /// last transfer of the block that its hint names. Erases the index entry of that block if the
    /// put is not possible.
    pub fn put(&mut self, hint: Option<Block>, content: Content, workingset: bool) {
        let Some(block) = hint else { return };
        if self.online().is_none() || !self.records.known || !self.records.compare(block, content) {
            return;
        }
        if !self.take_put(block, content, workingset) && !self.is(Mutation::EntryKeptAtDrop) {
            self.index.remove(&block);
            self.remember_flush(block);
        }
    }

    fn take_put(&mut self, block: Block, content: Content, workingset: bool) -> bool {
        if let Some(cookie) = self.check_retained(block, content) {
            return self.hold(block, cookie);
        }
        // Do not put a retained page that changed without a write. In this case, the kernel module
        // switches the cache of the mount off.
        if self.changed.is_some() {
            return false;
        }
        let Some(address) = self.put_slots_free.pop() else {
            return false;
        };
        self.transport.ram().write(address, &*content.page());
        if !self.is(Mutation::CookieRepeated) || self.cookie_last.is_multiple_of(8) {
            self.cookie_last += 1;
        }
        let cookie = self.cookie_last;
        let object = self.object(block);
        let entry = Entry {
            cookie,
            content,
            retained: false,
        };
        self.index.insert(block, entry);
        let queue = self.queue(object, index_of(block));
        self.slots[queue].push(Slot {
            block,
            object,
            pool: self.pool,
            cookie,
            epoch: self.epoch,
            workingset,
            address,
            content,
        });
        true
    }

    /// Returns the address of the copy of a page in the put ring, if the page was not sent yet or
    /// the device has not answered its put yet.
    pub(super) fn in_ring(&self, queue: usize, cookie: u64) -> Option<u64> {
        let sent = self.batches[queue].iter().flatten().flat_map(|b| &b.slots);
        let mut slots = self.slots[queue].iter().chain(sent);
        slots.find(|s| s.cookie == cookie).map(|s| s.address)
    }

    /// Remembers to flush a block. If no block of its object behind it has an entry, the flush goes
    /// to the end of the object.
    pub(super) fn remember_flush(&mut self, block: Block) {
        let Some(&object) = self.objects.get(&(block >> OBJECT_BITS)) else {
            return;
        };
        let index = index_of(block);
        let queue = self.queue(object, index);
        // Forget half of the ranges and never flush them, because the specification lets a driver
        // drop any range.
        let draw = self.draw(object << 8 ^ block);
        if draw.is_multiple_of(2) || self.ranges[queue].len() >= RANGES_MAX || self.pool == 0 {
            return;
        }
        let end = ((block >> OBJECT_BITS) + 1) << OBJECT_BITS;
        let last = self.index.range(block..end).next().is_none();
        self.ranges[queue].push(Range {
            object,
            pool: self.pool,
            epoch: self.epoch,
            index,
            nr_pages: if last { wire::TO_END } else { 1 },
        });
    }

    /// Does the work of the driver's feeder thread for a queue, except for taking answers.
    pub fn feed(&mut self, port: &mut Port<'_>, queue: usize) {
        self.feed_flushes(port, queue);
        // Send references (REF) before the puts, after them, or not at all. A put may overtake a
        // REF of the same page, as the driver need not send a REF in time.
        let draw = self.draw(port.now_ns ^ queue as u64);
        if draw.is_multiple_of(4) {
            self.feed_refs(port, queue);
        }
        while self.feed_puts(port, queue) {}
        if draw % 4 == 1 {
            self.feed_refs(port, queue);
        }
    }

    fn feed_flushes(&mut self, port: &mut Port<'_>, queue: usize) {
        if self.flushing[queue] || !self.transport.has_room(queue) {
            return;
        }
        let (epoch, online) = (self.epoch, self.generation != 0);
        self.ranges[queue].retain(|range| online && range.epoch == epoch);
        let Some(pool) = self.ranges[queue].first().map(|range| range.pool) else {
            return;
        };
        let same = |range: &Range| range.pool == pool;
        let count = self.ranges[queue].iter().take_while(|r| same(r)).count();
        let ranges = self.ranges[queue].drain(..count.min(BATCH));
        let ranges = ranges.map(|range| Ranged {
            object: range.object,
            index: range.index,
            nr_pages: range.nr_pages,
        });
        let request = Request::Flush {
            pool,
            ranges: ranges.collect(),
        };
        self.flushing[queue] = true;
        let page = self.transport.layout.flush[queue];
        let pending = self.pending(port, Tag::Flush, request, (page, vec![]), vec![]);
        self.send(port, queue, pending, false);
    }

    /// Sends one batch of puts. Returns whether there may be more puts to send.
    fn feed_puts(&mut self, port: &mut Port<'_>, queue: usize) -> bool {
        let free = (0..PUTS).find(|nr| self.batches[queue][*nr].is_none());
        let (Some(nr), true) = (free, self.transport.has_room(queue)) else {
            return false;
        };
        let epoch = self.epoch;
        while let Some(slot) = self.slots[queue].first()
            && (slot.epoch != epoch || self.generation == 0)
        {
            let slot = self.slots[queue].remove(0);
            self.erase(&slot);
            self.put_slots_free.push(slot.address);
        }
        let Some(pool) = self.slots[queue].first().map(|slot| slot.pool) else {
            return false;
        };
        let same = |slot: &Slot| slot.pool == pool && slot.epoch == epoch;
        let count = self.slots[queue].iter().take_while(|s| same(s)).count();
        let slots: Vec<Slot> = self.slots[queue].drain(..count.min(BATCH)).collect();
        let pages = slots.iter().map(|slot| PutPage {
            object: slot.object,
            index: index_of(slot.block),
            cookie: slot.cookie,
            flags: u32::from(slot.workingset) * wire::PUT_WORKINGSET,
            // Leave the page data out, because it is already in the slots of the put ring.
            page: Box::new([0; wire::PAGE_SIZE]),
        });
        let request = Request::Put {
            pool,
            pages: pages.collect(),
        };
        let places = slots.iter().map(|slot| slot.address).collect();
        let contents = slots.iter().map(|slot| slot.content).collect();
        let page = self.transport.layout.puts[queue][nr];
        let pending = self.pending(port, Tag::Put(nr), request, (page, places), contents);
        // A driver with a broken rule may send the batch to another queue. `batches` still lists it
        // under `queue`.
        let to = if self.is(Mutation::QueueAny) {
            1 + (self.cookie_last as usize / 3) % (self.transport.queues() - 1)
        } else {
            queue
        };
        self.send(port, to, pending, false);
        if port.oracle.is_current(self.generation) {
            for slot in &slots {
                let key = Key {
                    pool,
                    object: slot.object,
                    index: index_of(slot.block),
                };
                port.oracle.putting(key, slot.cookie, slot.content);
            }
        }
        self.batches[queue][nr] = Some(PutBatch { slots });
        true
    }

    fn erase(&mut self, slot: &Slot) {
        if !self.is(Mutation::EntryKeptAtDrop) {
            self.erase_cookie(slot.block, slot.cookie);
        }
    }

    pub(super) fn put_answered(&mut self, queue: usize, batch: usize, answer: &Answer) {
        self.stale(answer.status);
        // Find the batch in the list of the queue that it belongs to. A driver with a broken rule
        // may have sent it to another queue.
        let owner = (0..self.batches.len())
            .map(|i| (queue + i) % self.batches.len())
            .find(|q| self.batches[*q][batch].is_some());
        let Some(PutBatch { slots }) = owner.and_then(|q| self.batches[q][batch].take()) else {
            return;
        };
        for (i, slot) in slots.iter().enumerate() {
            let result = answer.pages.get(i).map(|page| page.result);
            if result != Some(wire::P_STORED) {
                self.erase(slot);
            }
            self.put_slots_free.push(slot.address);
        }
    }
}
