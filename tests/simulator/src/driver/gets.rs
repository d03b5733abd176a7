// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gets of the model of the guest driver, as `guest-driver/core/fetch.c` makes them for a READ bio.
//! A get takes entries out of the index. Bounce pages (for the answer) belong to the device until it
//! answers. No task waits; a fetch ends at its deadline at the latest.

use std::collections::BTreeMap;

use tmem_model::requests::Page;
use tmem_model::{Answer, Key, Request};
use virtio_tmem as wire;

use super::{Block, DEADLINE_NS, DriverModel, LATE_ROW_MAX, Port, index_of};
use crate::mutation::Mutation;
use crate::transport::{BATCH, GETS, PendingRequest, Tag};

/// State of a buffer for a get request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Get {
    /// The driver may use the buffer for a new request.
    Free,
    /// The request is in flight. The fields are the number of its fetch and its first block.
    Sent(u64, Block),
    /// The request is in flight, but its fetch has ended. The field is its first block.
    Abandoned(Block),
    /// The request is a probe of the circuit breaker. The field is the time at which it was sent.
    Probe(u64),
    /// The request names the page of an earlier put, usually one that the device must not return.
    /// No fetch waits for the answer.
    Test,
}

/// A fetch: the gets for pages of one READ bio. It ends when all of them are answered, or at the
/// deadline.
#[derive(Clone, Debug)]
pub struct Fetch {
    waiting: usize,
    got: BTreeMap<Block, Box<Page>>,
    /// Time at which the fetch began, by the guest's clock, in nanoseconds.
    begun_ns: u64,
}

/// Result of a fetch. The disk reads the missing blocks.
pub struct Got {
    /// Number of the fetch, as [`DriverModel::fetch`] returned it.
    pub fetch: u64,
    /// Blocks that came from the device or from the driver's put ring.
    pub blocks: BTreeMap<Block, Box<Page>>,
    /// Time that the fetch took, in nanoseconds.
    pub waited_ns: u64,
}

impl DriverModel {
    /// Requests those blocks of a READ bio from the device that a get may request.
    /// [`finished`](Self::finished) returns them later. Returns the number of the fetch.
    pub fn fetch(&mut self, port: &mut Port<'_>, blocks: &[Block]) -> u64 {
        self.fetch_last += 1;
        let id = self.fetch_last;
        let mut fetch = Fetch {
            waiting: 0,
            got: BTreeMap::new(),
            begun_ns: port.now_ns,
        };
        if !self.tripped && self.online().is_some() && self.records.works() {
            let mut run: Vec<(Block, u64, bool)> = Vec::new();
            for &block in blocks {
                // A retained entry is of a block whose bytes the guest has got.
                let entry = self.index.get(&block).copied();
                let Some(entry) = entry.filter(|entry| !entry.retained) else {
                    continue;
                };
                let cookie = entry.cookie;
                let object = self.object(block);
                let queue = self.queue(object, index_of(block));
                let copy = self.in_ring(queue, cookie);
                let retain = self.may_retain(cookie);
                if let (true, Some(entry)) = (retain, self.index.get_mut(&block)) {
                    entry.retained = true;
                } else if !self.is(Mutation::EntryKeptAtGet) {
                    self.index.remove(&block);
                }
                if let Some(address) = copy {
                    let mut copy: Box<Page> = Box::new([0; wire::PAGE_SIZE]);
                    self.transport.ram().read(address, &mut *copy);
                    fetch.got.insert(block, copy);
                    continue;
                }
                let goes_on = run.last().is_some_and(|&(last, ..)| {
                    block == last + 1
                        && last >> wire::CHUNK_SHIFT == block >> wire::CHUNK_SHIFT
                        && run.len() < BATCH
                });
                if !goes_on && !run.is_empty() {
                    fetch.waiting += usize::from(self.request_run(port, id, &run));
                    run.clear();
                }
                run.push((block, cookie, retain));
            }
            if !run.is_empty() {
                fetch.waiting += usize::from(self.request_run(port, id, &run));
            }
        }
        self.fetches.insert(id, fetch);
        id
    }

    /// Requests adjacent blocks for a fetch. Each item of `run` is a block, its cookie, and whether
    /// the device may retain it. If the driver has no buffers for the request, erases the retained
    /// entries of these blocks and returns false.
    fn request_run(&mut self, port: &mut Port<'_>, id: u64, run: &[(Block, u64, bool)]) -> bool {
        let first = run[0].0;
        let cookies: Vec<u64> = run.iter().map(|(_, cookie, _)| *cookie).collect();
        let bits = run.iter().enumerate();
        let bits = bits.map(|(nth, (_, _, retain))| u64::from(*retain) << nth);
        let key = (self.pool, self.object(first), index_of(first));
        let get = Get::Sent(id, first);
        let sent = self.request(port, get, key, (cookies, bits.sum()), false);
        if !sent {
            for (block, cookie, _) in run.iter().filter(|(_, _, retain)| *retain) {
                self.erase_cookie(*block, *cookie);
            }
        }
        sent
    }

    /// Sends a get if a request buffer and enough bounce pages are free. Returns whether it was
    /// sent.
    fn request(
        &mut self,
        port: &mut Port<'_>,
        get: Get,
        (pool, object, index): (u32, u64, u64),
        (cookies, retain): (Vec<u64>, u64),
        probe: bool,
    ) -> bool {
        let free = (0..GETS).find(|nr| self.gets[*nr] == Get::Free);
        let queue = self.queue(object, index);
        let Some(nr) = free else { return false };
        let count = cookies.len();
        if self.bounce_free.len() < count || !self.transport.has_room(queue) {
            return false;
        }
        let bounce = self.bounce_free.split_off(self.bounce_free.len() - count);
        let request = Request::Get {
            pool,
            object,
            index,
            cookies,
            retain,
        };
        self.gets[nr] = get;
        let page = self.transport.layout.gets[nr];
        let pending = self.pending(port, Tag::Get(nr), request, (page, bounce), vec![]);
        self.send(port, queue, pending, probe);
        true
    }

    pub(super) fn get_answered(
        &mut self,
        port: &mut Port<'_>,
        nr: usize,
        pending: &PendingRequest,
        answer: &Answer,
    ) {
        self.stale(answer.status);
        let get = std::mem::replace(&mut self.gets[nr], Get::Free);
        let abandoned = matches!(get, Get::Abandoned(_));
        if !(self.is(Mutation::BounceReused) && abandoned) {
            self.bounce_free.extend(&pending.data);
        }
        if let Get::Sent(_, first) | Get::Abandoned(first) = get {
            port.oracle.taken(pending, answer);
            self.end_gets(port, first, pending, answer);
        }
        match get {
            Get::Sent(id, first) => {
                let Some(fetch) = self.fetches.get_mut(&id) else {
                    return;
                };
                fetch.waiting -= 1;
                let Request::Get { cookies, .. } = &*pending.request else {
                    return;
                };
                for (i, cookie) in cookies.iter().enumerate() {
                    let page = answer.pages.get(i);
                    let hit = page
                        .filter(|page| page.result == wire::P_HIT)
                        .filter(|page| page.cookie == *cookie);
                    let taken = if self.mutation == Some(Mutation::MissTaken) {
                        let mut copy: Box<Page> = Box::new([0; wire::PAGE_SIZE]);
                        self.transport.ram().read(pending.data[i], &mut *copy);
                        Some(copy)
                    } else {
                        hit.and_then(|page| page.page.clone())
                    };
                    if let Some(copy) = taken {
                        fetch.got.insert(first + i as u64, copy);
                    }
                }
            }
            Get::Probe(begun_ns) => {
                self.probing = false;
                if port.now_ns - begun_ns <= DEADLINE_NS / 4 {
                    (self.tripped, self.late_row) = (false, 0);
                }
            }
            Get::Abandoned(_) | Get::Test | Get::Free => {}
        }
    }

    /// Erases the index entries of blocks that the answer does not report as retained. An answer
    /// never adds an entry, because the block may have been written since the get.
    fn end_gets(
        &mut self,
        port: &Port<'_>,
        first: Block,
        pending: &PendingRequest,
        answer: &Answer,
    ) {
        let retain = pending.request.retain();
        for (i, (key, cookie)) in pending.request.pages().into_iter().enumerate() {
            let block = first + i as u64;
            let result = answer.pages.get(i);
            let hit = result.filter(|r| r.result == wire::P_HIT && r.cookie == cookie);
            let retained = hit.is_some_and(|r| r.flags & wire::GET_RETAINED != 0);
            if !retained && retain >> i & 1 != 0 {
                self.erase_cookie(block, cookie);
            } else if retained && self.is(Mutation::EntryAddedAtAnswer) {
                self.insert_again(port, block, (key, cookie));
            }
        }
    }

    /// Requests the page of an earlier put, usually one that the device must not return, to test
    /// the device. No fetch gets the answer.
    pub fn request_earlier_put(&mut self, port: &mut Port<'_>, key: Key, cookie: u64) {
        if self.generation != 0 {
            let key = (key.pool, key.object, key.index);
            // In about half of these gets, allow the device to retain the page. The driver will
            // send no REF for the page.
            let retain = u64::from(self.retain) & cookie & 1;
            self.request(port, Get::Test, key, (vec![cookie], retain), true);
        }
    }

    /// Probes whether a host that answered late is fast again, while the breaker is open. The probe
    /// requests object 1 with cookie 0, which no page has.
    pub(super) fn probe(&mut self, port: &mut Port<'_>) {
        if self.tripped && !self.probing && self.generation != 0 {
            let get = Get::Probe(port.now_ns);
            self.probing = self.request(port, get, (self.pool.max(1), 1, 0), (vec![0], 0), true);
        }
    }

    /// Returns the time of the guest's clock at which the next fetch gives up, if there is one.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        if self.is(Mutation::DeadlineMissing) {
            return None;
        }
        let fetches = self.fetches.values();
        fetches.map(|fetch| fetch.begun_ns + DEADLINE_NS).min()
    }

    /// Removes a fetch that is complete, or whose deadline has passed, and returns its result.
    pub fn finished(&mut self, now_ns: u64) -> Option<Got> {
        let late = |fetch: &Fetch| now_ns >= fetch.begun_ns + DEADLINE_NS;
        let patient = self.is(Mutation::DeadlineMissing);
        let done = |fetch: &Fetch| fetch.waiting == 0 || (late(fetch) && !patient);
        let id = *self.fetches.iter().find(|(_, fetch)| done(fetch))?.0;
        let fetch = self
            .fetches
            .remove(&id)
            .expect("the fetch is missing, although it was found just before");
        let late = fetch.waiting > 0;
        self.abandon(id);
        self.late_row = if late { self.late_row + 1 } else { 0 };
        self.tripped |= self.late_row >= LATE_ROW_MAX;
        Some(Got {
            fetch: id,
            blocks: fetch.got,
            waited_ns: now_ns - fetch.begun_ns,
        })
    }

    /// Returns the longest time in nanoseconds for which any fetch has been waiting at `now_ns`.
    pub fn longest_wait_ns(&self, now_ns: u64) -> u64 {
        let fetches = self.fetches.values();
        let waits = fetches.map(|fetch| now_ns - fetch.begun_ns);
        waits.max().unwrap_or(0)
    }

    fn abandon(&mut self, id: u64) {
        for nr in 0..GETS {
            let first = match self.gets[nr] {
                Get::Sent(fetch, first) if fetch == id => first,
                _ => continue,
            };
            self.gets[nr] = Get::Abandoned(first);
            let mine = |pending: &&PendingRequest| pending.tag == Tag::Get(nr);
            let pending = self.transport.pending.iter().flatten().find(mine);
            // Erase the retained entries of the requested blocks. Without an answer, the driver does
            // not know whether the device has retained them.
            let named = pending.map(|pending| pending.request.clone());
            if let Some(Request::Get { cookies, .. }) = named.as_deref()
                && !self.is(Mutation::RetainedKeptAtDeadline)
            {
                for (block, cookie) in (first..).zip(cookies) {
                    self.erase_cookie(block, *cookie);
                }
            }
            if self.is(Mutation::BounceReused) {
                let pending = self.transport.pending.iter().flatten().find(mine);
                let pages = pending.map(|pending| pending.data.clone());
                self.bounce_free.extend(pages.unwrap_or_default());
            }
        }
    }
}
