// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Retained pages in the model of the guest driver. When reclaim evicts an unchanged page that the
//! device may have retained, the driver makes its index entry "held": only the device may have the
//! page. It sends a REF (reference to the page) later, or never.
//!
//! Out of scope: the marking of entries as retained, which gets do.

use tmem_model::{Answer, Content, Key, RefPage, Request};
use virtio_tmem as wire;

use super::{Block, DriverModel, Port, index_of};
use crate::mutation::Mutation;
use crate::transport::{BATCH, PendingRequest, Tag};

/// Maximum number of REFs that wait to be sent on a queue. The driver drops further REFs.
const REFS_MAX: usize = 6;
/// Number of the latest REF results from which the driver computes the share of GONE. The
/// specification says 1,024. The model uses a smaller number, so that a run of the simulator has
/// that many results.
const RESULTS: usize = 64;
/// Reciprocal of the largest share of GONE results. Above this share, the driver puts evicted pages
/// (copies) instead of sending REFs.
const GONE_DIVISOR: usize = 16;
/// While the driver puts evicted pages instead of sending REFs, it lets the device retain one in
/// this many pages. The results of their REFs show whether fewer retained pages are GONE.
const SAMPLE: u64 = 4;

/// A page in a REF that waits to be sent or to be answered.
#[derive(Clone, Debug)]
pub struct Ref {
    block: Block,
    object: u64,
    pool: u32,
    cookie: u64,
    /// The driver's epoch when the reference was added.
    epoch: u32,
    /// Whether the driver has already sent a REF for the page and repeats it.
    again: bool,
}

impl DriverModel {
    /// Returns whether the driver's get allows the device to retain a page.
    pub(super) fn may_retain(&self, cookie: u64) -> bool {
        let gone = self.gone.iter().filter(|gone| **gone).count();
        let copies = gone > RESULTS / GONE_DIVISOR && !cookie.is_multiple_of(SAMPLE);
        self.retain && !copies
    }

    /// Returns the cookie of a page that reclaim evicts if the driver can send a REF for it: its
    /// entry is retained, and its contents are those of the entry.
    pub(super) fn check_retained(&mut self, block: Block, content: Content) -> Option<u64> {
        let entry = *self.index.get(&block).filter(|entry| entry.retained)?;
        if entry.content != content && !self.is(Mutation::RetainedUnchecked) {
            self.changed = Some(block);
            return None;
        }
        Some(entry.cookie)
    }

    /// Makes a retained index entry held (a get may request it), and remembers to send a REF.
    /// Returns whether the entry is held.
    pub(super) fn hold(&mut self, block: Block, cookie: u64) -> bool {
        match self.index.get_mut(&block) {
            Some(entry) if entry.retained && entry.cookie == cookie => entry.retained = false,
            _ => return false,
        }
        let object = self.object(block);
        let queue = self.queue(object, index_of(block));
        // If the put of the page is still in the put ring, send no REF. The put makes the device
        // hold the page, and a REF could overtake it.
        let unneeded = self.slots[queue].iter().any(|slot| slot.cookie == cookie);
        // Never send one in four REFs, because the specification lets a driver drop any REF.
        let lost = self.draw(cookie ^ self.fetch_last).is_multiple_of(4);
        if !unneeded && !lost && self.refs[queue].len() < REFS_MAX {
            self.refs[queue].push(Ref {
                block,
                object,
                pool: self.pool,
                cookie,
                epoch: self.epoch,
                again: false,
            });
        }
        true
    }

    /// Returns and clears the block that changed although its index entry was still retained.
    pub fn take_changed(&mut self) -> Option<Block> {
        self.changed.take()
    }

    /// Sends a batch of REFs (references to retained pages that the guest evicted).
    pub(super) fn feed_refs(&mut self, port: &mut Port<'_>, queue: usize) {
        if !self.referring[queue].is_empty() || !self.transport.has_room(queue) {
            return;
        }
        let (epoch, online) = (self.epoch, self.generation != 0);
        let stale = self.is(Mutation::StaleRefSent);
        self.refs[queue].retain(|r| online && (stale || r.epoch == epoch));
        let Some(pool) = self.refs[queue].first().map(|r| r.pool) else {
            return;
        };
        let same = |r: &Ref| r.pool == pool;
        let count = self.refs[queue].iter().take_while(|r| same(r)).count();
        let refs: Vec<Ref> = self.refs[queue].drain(..count.min(BATCH)).collect();
        for (nth, repeated) in refs.iter().enumerate() {
            if !repeated.again && self.draw(nth as u64).is_multiple_of(4) {
                let again = true;
                self.refs[queue].push(Ref {
                    again,
                    ..repeated.clone()
                });
            }
        }
        let pages = refs.iter().map(|r| RefPage {
            object: r.object,
            index: index_of(r.block),
            cookie: r.cookie,
        });
        let request = Request::Ref {
            pool,
            pages: pages.collect(),
        };
        let page = self.transport.layout.refs[queue];
        let pending = self.pending(port, Tag::Ref, request, (page, vec![]), vec![]);
        self.referring[queue] = refs;
        self.send(port, queue, pending, false);
    }

    pub(super) fn ref_answered(
        &mut self,
        port: &mut Port<'_>,
        queue: usize,
        pending: &PendingRequest,
        answer: &Answer,
    ) {
        self.stale(answer.status);
        port.oracle.taken(pending, answer);
        let refs = std::mem::take(&mut self.referring[queue]);
        for (nth, sent) in refs.iter().enumerate() {
            let result = answer.pages.get(nth).map(|page| page.result);
            let held = result == Some(wire::P_HELD);
            if answer.status == wire::S_OK {
                self.count_result(!held);
            }
            if !held && !self.is(Mutation::GoneIgnored) {
                self.erase_cookie(sent.block, sent.cookie);
            }
        }
    }

    fn count_result(&mut self, gone: bool) {
        self.gone.push_front(gone);
        self.gone.truncate(RESULTS);
    }

    /// Inserts the index entry that a block had before it was erased. Only a driver with a broken
    /// rule does this.
    pub(super) fn insert_again(
        &mut self,
        port: &Port<'_>,
        block: Block,
        (key, cookie): (Key, u64),
    ) {
        if let Some(content) = port.oracle.content(key, cookie) {
            let entry = super::Entry {
                cookie,
                content,
                retained: true,
            };
            self.index.entry(block).or_insert(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    /// The share of GONE results decides whether the driver sends REFs or puts copies.
    #[test]
    fn the_driver_puts_pages_again_while_many_refs_are_answered_gone() {
        let machine = Machine::new(2, (true, true, true), true, None);
        let mut driver = DriverModel::new(machine.transport(), 1, true, None);
        let count = |driver: &mut DriverModel, gone: bool, times: usize| {
            for _ in 0..times {
                driver.count_result(gone);
            }
            let retained = |cookie: &u64| driver.may_retain(*cookie);
            (1..=100).filter(retained).count()
        };
        let most = RESULTS / GONE_DIVISOR;
        assert_eq!(count(&mut driver, false, RESULTS), 100);
        assert_eq!(count(&mut driver, true, most), 100);
        assert_eq!(count(&mut driver, true, 1), 100 / SAMPLE as usize);
        assert_eq!(count(&mut driver, true, RESULTS), 100 / SAMPLE as usize);
        assert_eq!(
            count(&mut driver, false, RESULTS - most - 1),
            100 / SAMPLE as usize
        );
        assert_eq!(count(&mut driver, false, 1), 100);
    }
}
