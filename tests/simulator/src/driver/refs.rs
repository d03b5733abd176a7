// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Retained pages in the model of the guest driver. When reclaim evicts an unchanged page that the
//! device may have retained, the driver makes its index entry "held": only the device may have the
//! page. It sends a REF (reference to the page) later, or never.
//!
//! Out of scope: the marking of entries as retained, which gets do.

use tmem_model::{Answer, Content, Key, RefPage, Request};
use virtio_tmem as wire;

use super::{DriverModel, FilePage, Port};
use crate::kernel::index_of_end;
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
const GONE_PART: usize = 16;
/// While the driver puts evicted pages instead of sending REFs, it lets the device retain one in
/// this many pages. The results of their REFs show whether fewer retained pages are GONE.
const SAMPLE: u64 = 4;

/// A page in a REF that waits to be sent or to be answered.
#[derive(Clone, Debug)]
pub struct Ref {
    page: FilePage,
    object: u64,
    pool: u32,
    cookie: u64,
    epoch: u32,
    /// Whether the driver has already sent a REF for the page and repeats it.
    again: bool,
}

impl DriverModel {
    /// Returns whether the driver's get allows the device to retain a page.
    pub(super) fn may_retain(&self, page: u64, cookie: u64) -> bool {
        let end = page == index_of_end() && !self.is(Mutation::EndRetained);
        let gone = self.gone.iter().filter(|gone| **gone).count();
        let copies = gone > RESULTS / GONE_PART && !cookie.is_multiple_of(SAMPLE);
        self.retain && !end && !copies
    }

    /// Returns the cookie of a page that reclaim evicts if the driver can send a REF for it. The
    /// entry must be retained, the page unchanged, and the file not marked.
    pub fn check_retained(&mut self, page: FilePage, content: Content) -> Option<u64> {
        let entry = *self.index.get(&page).filter(|entry| entry.retained)?;
        if self.refuses_retained(page.0) {
            return None;
        }
        if entry.content != content && !self.is(Mutation::RetainedUnchecked) {
            self.changed = Some(page);
            return None;
        }
        Some(entry.cookie)
    }

    /// Returns whether the driver must not make retained entries of the file held, for example
    /// because the file is marked.
    fn refuses_retained(&self, inode: u32) -> bool {
        let marked = self.refuses(inode) && !self.is(Mutation::MarkIgnoredByRetained);
        self.online().is_none() || marked
    }

    /// Makes a retained index entry held (only the device may have the page), and remembers to send
    /// a REF. Does neither if the entry was erased or the file was marked meanwhile. Returns
    /// whether the entry is held.
    pub fn hold(&mut self, page: FilePage, cookie: u64) -> bool {
        let unbound = self.is(Mutation::HeldAfterErase);
        let refused = self.refuses_retained(page.0);
        match self.index.get_mut(&page) {
            Some(entry) if entry.retained && entry.cookie == cookie && !refused => {
                entry.retained = false;
            }
            _ if unbound => self.insert_erased(page, cookie),
            _ => return false,
        }
        let object = self.object(page.0);
        let queue = self.queue(object, page.1);
        // If the put of the page is still in the put ring, send no REF. The put makes the device
        // hold the page, and a REF could overtake it.
        let unneeded = self.slots[queue].iter().any(|slot| slot.cookie == cookie);
        // Never send one in four REFs, because the specification lets a driver drop any REF.
        let lost = self.draw(cookie ^ self.reader_last).is_multiple_of(4);
        if !unneeded && !lost && self.refs[queue].len() < REFS_MAX {
            self.refs[queue].push(Ref {
                page,
                object,
                pool: self.pool,
                cookie,
                epoch: self.epoch,
                again: false,
            });
        }
        true
    }

    /// Returns and clears the page that changed although its index entry was still retained.
    pub fn take_changed(&mut self) -> Option<FilePage> {
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
            index: r.page.1,
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
                self.erase_cookie(sent.page, sent.cookie);
            }
        }
    }

    fn count_result(&mut self, gone: bool) {
        self.gone.push_front(gone);
        self.gone.truncate(RESULTS);
    }

    /// Inserts the index entry that a page had before it was erased. Only a driver with a broken
    /// rule does this.
    pub(super) fn insert_again(
        &mut self,
        port: &Port<'_>,
        page: FilePage,
        (key, cookie): (Key, u64),
    ) {
        if let Some(content) = port.oracle.content(key, cookie) {
            let entry = super::Entry {
                cookie,
                content,
                retained: true,
            };
            self.index.entry(page).or_insert(entry);
        }
    }

    fn insert_erased(&mut self, page: FilePage, cookie: u64) {
        let entry = super::Entry {
            cookie,
            // Use any content, because the driver compares only the contents of retained entries.
            content: Content::SameFilled(0),
            retained: false,
        };
        self.index.insert(page, entry);
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
            let retained = |cookie: &u64| driver.may_retain(0, *cookie);
            (1..=100).filter(retained).count()
        };
        let most = RESULTS / GONE_PART;
        assert_eq!(count(&mut driver, false, RESULTS), 100);
        assert_eq!(count(&mut driver, true, most), 100);
        assert_eq!(count(&mut driver, true, 1), 100 / SAMPLE as usize);
        assert_eq!(count(&mut driver, true, RESULTS), 100 / SAMPLE as usize);
        assert_eq!(
            count(&mut driver, false, RESULTS - most - 1),
            100 / SAMPLE as usize
        );
        assert_eq!(count(&mut driver, false, 1), 100);
        assert!(!driver.may_retain(index_of_end(), 4));
    }
}
