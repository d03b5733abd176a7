// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Model of the guest driver: index, cookies, generation, put ring, gets with a deadline, breaker,
//! control requests, among them those for the generation. The order in which the model erases
//! entries, changes the generation and sends requests is that of `guest-driver/core/`. Its periods
//! are simpler.
//!
//! The index decides: the driver never requests a block that is not in the index, and erasing an
//! entry cannot fail. All state of the driver is in the guest's memory, so a rollback of the guest
//! to a snapshot also restores the driver. Out of scope: files, bios, and their contents.

mod control;
mod gets;
mod puts;
mod records;
mod refs;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tmem_model::driver::queue_of;
use tmem_model::{Content, Request};
use virtio_tmem as wire;

use self::gets::{Fetch, Get};
use self::puts::{PutBatch, Range, Slot};
use self::records::Records;
use self::refs::Ref;
use crate::mutation::Mutation;
use crate::oracle::Oracle;
use crate::transport::{
    BOUNCE, CONTROLS, GETS, PUT_SLOTS, PUTS, PendingRequest, QUERIES, Tag, Transport,
};

/// Longest time in nanoseconds that a fetch (the gets for a READ bio) waits for the device.
pub const DEADLINE_NS: u64 = 20_000_000;
/// Interval in nanoseconds at which the driver sends a report.
const REPORT_NS: u64 = 1_000_000_000;
/// Number of late fetches in a row after which the driver's breaker stops gets.
const LATE_ROW_MAX: u32 = 3;
/// Time in nanoseconds after which the driver gives up a control request that is not answered.
const CONTROL_NS: u64 = 1_000_000_000;

/// Minimum time in nanoseconds between two GENERATION requests, after which an answer is late.
const QUERY_NS: u64 = 1_000_000_000;

/// Number of a block of the disk, of the size of a page.
pub type Block = u64;
/// Number of blocks of an object, as a power of two. The kernel module uses 2^18.
const OBJECT_BITS: u32 = 10;

/// Returns the page index of a block in its object.
fn index_of(block: Block) -> u64 {
    block & ((1 << OBJECT_BITS) - 1)
}

/// Entry of the driver's index: a block that the device may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    cookie: u64,
    /// Contents of the block. The kernel module stores a checksum here instead.
    content: Content,
    /// Whether the guest has got the block and the device may have retained it. Otherwise the entry
    /// is "held": a get may request it.
    retained: bool,
}

/// Parts of the machine that the model of the driver uses during a call.
pub struct Port<'a> {
    /// Time of the guest's clock in nanoseconds.
    pub now_ns: u64,
    /// Generation in the device's configuration, as the driver reads it.
    pub generation: u64,
    /// Oracle that checks the requests of this guest's driver.
    pub oracle: &'a mut Oracle,
    /// Kick descriptors of the queues, through which the driver notifies the device.
    pub kicks: &'a [OwnedFd],
}

/// Model of the driver in a simulated guest.
#[derive(Clone)]
pub struct DriverModel {
    mutation: Option<Mutation>,
    /// The driver's virtqueues and buffers in guest memory.
    pub transport: Transport,
    generation: u64,
    /// Generation that the device gave last, in its configuration or in an answer; 0 for none.
    device_generation: u64,
    /// Whether the driver learned `device_generation` from an answer.
    learned_from_answer: bool,
    /// Whether the driver must read the configuration: after a reset of the device, and after a
    /// notification.
    config: bool,
    /// GENERATION requests that the device owns.
    queries: [bool; QUERIES],
    /// Number of GENERATION requests that were sent since the last answer.
    queries_unanswered: usize,
    /// Time at which the last GENERATION request was sent, in nanoseconds.
    queried_at_ns: Option<u64>,
    /// Whether a STALE answer or a missing answer shows that the generation may be over.
    query_wanted: bool,
    /// Whether a GENERATION request was not answered in time.
    silent: bool,
    /// Number that grows whenever the driver erases all index entries. The driver sends no puts,
    /// flushes and references of an earlier epoch.
    epoch: u32,
    resync: bool,
    /// Id of the driver's pool at the device; 0 while the driver has no pool.
    pool: u32,
    pool_last: u32,
    /// Ids of pools that the driver no longer uses and must still destroy at the device.
    dead_pools: Vec<u32>,
    controls: [control::Control; CONTROLS],
    report_at_ns: u64,
    cookie_last: u64,
    /// Ids of objects, by the upper bits of their blocks.
    objects: BTreeMap<u64, u64>,
    object_last: u64,
    index: BTreeMap<Block, Entry>,
    /// Records of the disk, which the driver makes from the transfers that it sees.
    pub records: Records,
    /// Whether the driver uses retained pages, because `VIRTIO_TMEM_F_RETAIN` is negotiated.
    retain: bool,
    /// References (REF) to retained pages that wait to be sent, for each queue.
    refs: Vec<Vec<Ref>>,
    /// References (REF) that the driver has sent and the device has not answered, for each queue.
    referring: Vec<Vec<Ref>>,
    /// Latest results of references (REF), newest first. True means GONE.
    gone: VecDeque<bool>,
    /// Block whose contents had changed when a page of it was evicted, although its index entry was
    /// still retained. Each write must erase the entry, so this is a failure.
    changed: Option<Block>,
    put_slots_free: Vec<u64>,
    slots: Vec<Vec<Slot>>,
    batches: Vec<[Option<PutBatch>; PUTS]>,
    ranges: Vec<Vec<Range>>,
    flushing: Vec<bool>,
    gets: [Get; GETS],
    bounce_free: Vec<u64>,
    fetches: BTreeMap<u64, Fetch>,
    fetch_last: u64,
    late_row: u32,
    tripped: bool,
    probing: bool,
}

impl DriverModel {
    /// Creates the state of a driver that the guest has just loaded. The driver's first cookie is
    /// `cookie` + 1.
    pub fn new(
        transport: Transport,
        cookie: u64,
        retain: bool,
        mutation: Option<Mutation>,
    ) -> DriverModel {
        let queues = transport.queues();
        assert_eq!(transport.layout.put_slots.len(), PUT_SLOTS);
        assert_eq!(transport.layout.bounce.len(), BOUNCE);
        DriverModel {
            mutation,
            generation: 0,
            device_generation: 0,
            learned_from_answer: false,
            config: true,
            queries: [false; QUERIES],
            queries_unanswered: 0,
            queried_at_ns: None,
            query_wanted: false,
            silent: false,
            epoch: 0,
            resync: true,
            pool: 0,
            pool_last: 0,
            dead_pools: Vec::new(),
            controls: [control::Control::Free; CONTROLS],
            report_at_ns: REPORT_NS,
            cookie_last: cookie,
            objects: BTreeMap::new(),
            object_last: 1,
            index: BTreeMap::new(),
            records: Records::new(mutation),
            retain: retain || mutation == Some(Mutation::RetainUnnegotiated),
            refs: vec![Vec::new(); queues],
            referring: vec![Vec::new(); queues],
            gone: VecDeque::new(),
            changed: None,
            put_slots_free: transport.layout.put_slots.clone(),
            slots: vec![Vec::new(); queues],
            batches: (0..queues).map(|_| [const { None }; PUTS]).collect(),
            ranges: vec![Vec::new(); queues],
            flushing: vec![false; queues],
            gets: [Get::Free; GETS],
            bounce_free: transport.layout.bounce.clone(),
            transport,
            fetches: BTreeMap::new(),
            fetch_last: 0,
            late_row: 0,
            tripped: false,
            probing: false,
        }
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Returns the generation that the driver uses, or None while it has no generation or no pool.
    pub fn online(&self) -> Option<u64> {
        (self.generation != 0 && self.pool != 0).then_some(self.generation)
    }

    /// Returns the number of entries in the driver's index.
    pub fn held(&self) -> usize {
        self.index.len()
    }

    /// Returns whether a request is in flight, a put waits to be sent, or a fetch waits.
    pub fn busy(&self) -> bool {
        self.transport.in_flight() > 0
            || self.slots.iter().any(|slots| !slots.is_empty())
            || !self.fetches.is_empty()
    }

    /// Returns whether a get may request the block.
    pub fn holds(&self, block: Block) -> bool {
        self.index.get(&block).is_some_and(|entry| !entry.retained)
    }

    /// Erases the index entry of a block if the entry has this cookie.
    fn erase_cookie(&mut self, block: Block, cookie: u64) {
        if self.index.get(&block).is_some_and(|e| e.cookie == cookie) {
            self.index.remove(&block);
        }
    }

    /// Returns a pseudo-random number for choices that the specification leaves to the driver. The
    /// number depends only on the state of the driver and on `salt`.
    fn draw(&self, salt: u64) -> u64 {
        (self.cookie_last ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
    }

    fn queue(&self, object: u64, index: u64) -> usize {
        queue_of(self.transport.queues(), object, index)
    }

    fn object(&mut self, block: Block) -> u64 {
        let next = self.object_last + 1;
        let object = *self.objects.entry(block >> OBJECT_BITS).or_insert(next);
        self.object_last = self.object_last.max(object);
        object
    }

    fn send(&mut self, port: &mut Port<'_>, queue: usize, pending: PendingRequest, probe: bool) {
        port.oracle.sent(queue, &pending, &self.transport, probe);
        let wanted = pending.clone();
        if self.transport.send(queue, pending) {
            kick(&port.kicks[queue]);
        }
        self.name_held_cookies(port, &wanted);
    }

    /// Simulates a device that does not compare the cookies of gets, or of REFs: replaces the
    /// cookies in the driver's request by the cookies that the device has.
    fn name_held_cookies(&self, port: &Port<'_>, pending: &PendingRequest) {
        // Offset of the first cookie, after `req` and the fields before it, and distance of the
        // cookies: SPEC.md, "GET" and "Retained pages".
        let (first, step) = match (self.mutation, &*pending.request) {
            (Some(Mutation::CookieUnchecked), Request::Get { .. }) => (24 + 16, 8),
            (Some(Mutation::RefCookieUnchecked), Request::Ref { .. }) => (24 + 16, 24),
            _ => return,
        };
        for ((key, _), nth) in pending.request.pages().into_iter().zip(0..) {
            if let Some(cookie) = port.oracle.model.cookie(key) {
                let at = pending.page + first + step * nth;
                self.transport.ram().write(at, &cookie.to_le_bytes());
            }
        }
    }

    fn pending(
        &self,
        port: &mut Port<'_>,
        tag: Tag,
        request: Request,
        (page, data): (u64, Vec<u64>),
        contents: Vec<Content>,
    ) -> PendingRequest {
        PendingRequest {
            tag,
            request: Arc::new(request),
            generation: self.generation,
            record: port.oracle.model.record_request(contents),
            page,
            data,
        }
    }

    /// Takes the answers that have arrived on a queue, and handles them.
    pub fn collect(&mut self, port: &mut Port<'_>, queue: usize) {
        loop {
            match self.transport.take(queue) {
                Ok(None) => return,
                Ok(Some((pending, answer))) => match pending.tag {
                    Tag::Put(batch) => self.put_answered(queue, batch, &answer),
                    Tag::Flush => self.flushing[queue] = false,
                    Tag::Ref => self.ref_answered(port, queue, &pending, &answer),
                    Tag::Get(get) => self.get_answered(port, get, &pending, &answer),
                    Tag::Control(nr) => self.control_answered(nr, &pending, answer.status),
                    Tag::Query(nr) => self.query_answered(nr, answer.generation),
                },
                Err(error) => {
                    port.oracle.fail("order", format!("queue {queue}: {error}"));
                    return;
                }
            }
        }
    }

    fn stale(&mut self, status: u8) {
        self.query_wanted |= status == wire::S_STALE;
    }

    /// Erases the index entries of blocks that a write touches, before the disk sees it. The driver
    /// sends a flush of the blocks later, or never.
    pub fn forget_blocks(&mut self, blocks: &[Block]) {
        if !self.records.known || self.is(Mutation::EntryKeptAtWrite) {
            return;
        }
        for &block in blocks {
            let keeps =
                self.is(Mutation::RetainedKeptAtWrite) || self.is(Mutation::RetainedUnchecked);
            let entry = self.index.get(&block);
            if entry.is_some_and(|entry| !(entry.retained && keeps)) {
                self.index.remove(&block);
                self.remember_flush(block);
            }
        }
    }

    /// Ends the interval in which all writes are seen, and erases everything that is known of the
    /// disk.
    pub fn end_interval(&mut self, failed: bool) {
        self.records.end_interval(failed);
        self.erase_all();
    }

    fn erase_all(&mut self) {
        self.records.erase_all();
        self.forget_all();
    }

    /// Erases all index entries, also before a hibernation.
    pub fn forget_all(&mut self) {
        let blocks: Vec<Block> = self.index.keys().copied().collect();
        self.index.clear();
        blocks.into_iter().for_each(|b| self.remember_flush(b));
    }

    /// Ends the interval until the unmount, because a write has failed that the disk may execute
    /// later.
    pub fn write_failed(&mut self) {
        if !self.is(Mutation::FailureForgotten) {
            self.end_interval(true);
        }
    }

    /// Returns whether the driver records writes that have failed, which breaks a rule.
    pub fn records_failures(&self) -> bool {
        self.is(Mutation::FailureRecorded)
    }

    /// Begins an interval. `drained` is whether no transfer is in flight that began before.
    pub fn begin_interval(&mut self, drained: bool) {
        self.records.begin_interval();
        if (drained || self.is(Mutation::UndrainedStart)) && self.records.drained() {
            self.erase_all();
        }
    }

    /// Erases the records, because the disk was written while the guest hibernated.
    pub fn resume(&mut self) {
        if !self.is(Mutation::RecordKeptOverResume) {
            self.records.erase_all();
        }
    }
}

/// Adds 1 to an eventfd, as a kick of a queue does.
pub fn kick(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).expect("cannot write to the eventfd");
}
