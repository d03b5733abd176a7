// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's virtqueues and buffers in guest memory: addresses of requests, and requests in
//! flight.
//!
//! Every buffer has a fixed address and is used again and again, as in the kernel module. So a late
//! write to a buffer overwrites the data of another request. A snapshot of the guest contains a
//! clone of this state and the guest's memory. Out of scope: the choice of requests, and the
//! meaning of answers.

use std::collections::VecDeque;
use std::sync::Arc;

use tmem_model::memory::PAGE_BYTES;
use tmem_model::requests::{PAGE, Page, decode};
use tmem_model::ring::RingLayout;
use tmem_model::{
    Answer, Buffer, DriverRing, GuestRam, RamRegion, Request, RingError, SentRequest,
};
use virtio_tmem as wire;

/// Maximum number of pages or ranges in a request. Batches of this size are large enough to be
/// realistic, and small enough for fast runs.
pub const BATCH: usize = 8;
/// Maximum number of put batches in flight on a queue.
pub const PUTS: usize = 2;
/// Number of slots of the put ring, in which pages wait to be sent.
pub const PUT_SLOTS: usize = 20;
/// Maximum number of gets in flight.
pub const GETS: usize = 5;
/// Number of bounce pages, into which the device writes the answers to gets.
pub const BOUNCE: usize = 24;
/// Maximum number of control requests in flight.
pub const CONTROLS: usize = 3;
/// Maximum number of GENERATION requests in flight.
pub const QUERIES: usize = 4;
/// Number of descriptors of a virtqueue.
const RING: u16 = 64;

/// Offset of the answer within the page of a request. `TABLE_AT` is the offset of the request's
/// indirect descriptor table.
pub const ANSWER_AT: u64 = 2048;
const TABLE_AT: u64 = 3072;

/// Addresses of virtqueues and buffers in guest memory.
#[derive(Debug)]
pub struct Layout {
    /// Addresses of the virtqueues: the control queue first, then the request queues.
    pub rings: Vec<RingLayout>,
    /// Addresses of the put requests of each queue.
    pub puts: Vec<[u64; PUTS]>,
    /// Address of the flush request of each queue.
    pub flush: Vec<u64>,
    /// Address of the REF request of each queue.
    pub refs: Vec<u64>,
    /// Addresses of the get requests.
    pub gets: Vec<u64>,
    /// Addresses of the bounce pages, into which the device writes the answers to gets.
    pub bounce: Vec<u64>,
    /// Addresses of the put ring's pages, which contain copies of evicted pages.
    pub put_slots: Vec<u64>,
    /// Addresses of the control requests.
    pub controls: Vec<u64>,
    /// Addresses of the GENERATION requests.
    pub queries: Vec<u64>,
}

/// Returns the regions of a guest's RAM, with a hole between them, as a PC has below 4 GiB.
pub fn ram() -> Vec<RamRegion> {
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    vec![region(0, 256 << 10), region(1 << 20, 384 << 10)]
}

impl Layout {
    /// Allocates the memory for the virtqueues and buffers of `queues` queues.
    pub fn new(ram: &GuestRam, queues: usize) -> Layout {
        let page = || ram.alloc(1);
        let pages = |count: usize| (0..count).map(|_| page()).collect::<Vec<u64>>();
        Layout {
            rings: (0..queues).map(|_| RingLayout::alloc(ram, RING)).collect(),
            puts: (0..queues).map(|_| [page(), page()]).collect(),
            flush: pages(queues),
            gets: pages(GETS),
            bounce: pages(BOUNCE),
            put_slots: pages(PUT_SLOTS),
            controls: pages(CONTROLS),
            queries: pages(QUERIES),
            refs: pages(queues),
        }
    }
}

/// Buffer that a request uses: its kind and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// The put request with this number, of [`PUTS`] for each queue.
    Put(usize),
    /// Buffer of a queue's flush request. A queue has one.
    Flush,
    /// Buffer of a queue's REF request. A queue has one.
    Ref,
    /// The get request with this number, of [`GETS`] for all queues.
    Get(usize),
    /// The control request with this number, of [`CONTROLS`].
    Control(usize),
    /// The GENERATION request with this number, of [`QUERIES`].
    Query(usize),
}

/// A request in flight: the device owns it, or has answered it and the driver has not taken the
/// answer.
#[derive(Clone, Debug)]
pub struct PendingRequest {
    /// Buffer that the request uses.
    pub tag: Tag,
    /// Contents of the request, without page data.
    pub request: Arc<Request>,
    /// Generation that the request carries.
    pub generation: u64,
    /// Record that [`tmem_model::Model`] needs to judge the answer.
    pub record: SentRequest,
    /// Address of the page with the request's metadata and answer.
    pub page: u64,
    /// Addresses of the pages of data that the device reads (put) or writes (get).
    pub data: Vec<u64>,
}

impl PendingRequest {
    /// Returns the addresses of all guest pages that the request uses.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.page).chain(self.data.iter().copied())
    }

    /// Returns the answer to this request, as it is in guest memory.
    pub fn answer(&self, ram: &GuestRam, used_bytes: u32) -> Answer {
        let mut meta = vec![wire::S_UNANSWERED; self.request.answer_sizes().0];
        ram.read(self.page + ANSWER_AT, &mut meta);
        decode(&self.request, used_bytes, &meta, |i| {
            let mut page: Box<Page> = Box::new([0; PAGE]);
            ram.read(self.data[i], &mut *page);
            page
        })
    }
}

/// The driver's virtqueues with the requests in flight.
#[derive(Clone, Debug)]
pub struct Transport {
    ram: Arc<GuestRam>,
    /// Addresses of the virtqueues and buffers.
    pub layout: Arc<Layout>,
    /// Driver's side of each virtqueue.
    pub rings: Vec<DriverRing>,
    /// Requests in flight, by queue, the oldest first.
    pub pending: Vec<VecDeque<PendingRequest>>,
    indirect: bool,
    token: u64,
}

impl Transport {
    /// Creates virtqueues without requests.
    pub fn new(
        ram: &Arc<GuestRam>,
        layout: &Arc<Layout>,
        event_idx: bool,
        indirect: bool,
    ) -> Transport {
        let ring = |l: &RingLayout| {
            let mut ring = DriverRing::new(ram.clone(), *l);
            ring.set_event_idx(event_idx);
            ring
        };
        Transport {
            ram: ram.clone(),
            layout: layout.clone(),
            rings: layout.rings.iter().map(ring).collect(),
            pending: layout.rings.iter().map(|_| VecDeque::new()).collect(),
            indirect,
            token: 0,
        }
    }

    /// Returns the guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Returns the number of queues, the control queue included.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Returns the number of requests in flight on all queues.
    pub fn in_flight(&self) -> usize {
        self.pending.iter().map(VecDeque::len).sum()
    }

    /// Returns whether a queue has enough free descriptors for any request. A request takes a
    /// descriptor for each of its pages, and at most three more.
    pub fn has_room(&self, queue: usize) -> bool {
        self.rings[queue].free_descs() >= BATCH + 3
    }

    /// Writes a request to guest memory and publishes it to the device. Returns whether the device
    /// wants a kick.
    pub fn send(&mut self, queue: usize, pending: PendingRequest) -> bool {
        let encoded = pending.request.encode(pending.generation);
        let ram = &self.ram;
        ram.write(pending.page, &encoded.meta);
        let unanswered = vec![wire::S_UNANSWERED; encoded.answer_meta_bytes];
        ram.write(pending.page + ANSWER_AT, &unanswered);
        let buffer = |addr: u64, len: usize, writable| Buffer {
            addr,
            len: len as u32,
            writable,
        };
        let is_get = matches!(&*pending.request, Request::Get { .. });
        let data = pending.data.iter().map(|&addr| buffer(addr, PAGE, is_get));
        let answer = buffer(pending.page + ANSWER_AT, encoded.answer_meta_bytes, true);
        let mut buffers = vec![buffer(pending.page, encoded.meta.len(), false)];
        if is_get {
            buffers.push(answer);
            buffers.extend(data);
        } else {
            buffers.extend(data);
            buffers.push(answer);
        }
        let table = self.indirect.then_some(pending.page + TABLE_AT);
        self.token += 1;
        let ring = &mut self.rings[queue];
        ring.add(&buffers, table, self.token)
            .expect("the virtqueue has no space, although the caller checked has_room");
        self.pending[queue].push_back(pending);
        ring.publish()
    }

    /// Returns the used element for a request in flight: the number of the chain's first
    /// descriptor, and the number of bytes that the device wrote. `position` is the position of the
    /// request among those in flight on the queue. Returns None if the request is not answered.
    pub fn used(&self, queue: usize, position: usize) -> Option<(u32, u32)> {
        let ring = &self.rings[queue];
        let answered = ring.used_idx_in_memory().wrapping_sub(ring.used_idx());
        if position >= usize::from(answered) {
            return None;
        }
        let number = ring.used_idx().wrapping_add(position as u16);
        let mut element = [0; 8];
        self.ram.read(self.used_at(queue, number), &mut element);
        let word = |at: usize| {
            u32::from_le_bytes(
                element[at..at + 4]
                    .try_into()
                    .expect("the slice does not have 4 bytes"),
            )
        };
        Some((word(0), word(4)))
    }

    /// Returns the address of an element of a queue's used ring.
    pub fn used_at(&self, queue: usize, number: u16) -> u64 {
        let layout = self.rings[queue].layout();
        layout.used + 4 + 8 * u64::from(number % layout.size)
    }

    /// Takes the next answer of a queue, with its request. Returns None if no answer has arrived.
    ///
    /// # Errors
    /// The device broke the rules of the virtqueue.
    pub fn take(&mut self, queue: usize) -> Result<Option<(PendingRequest, Answer)>, RingError> {
        let Some(used) = self.rings[queue].pop_used()? else {
            return Ok(None);
        };
        let pending = self.pending[queue]
            .pop_front()
            .expect("the list of requests in flight lacks an answered request");
        let answer = pending.answer(&self.ram, used.len);
        Ok(Some((pending, answer)))
    }

    /// Returns the address and the first word of each page of the guest's memory.
    pub fn first_words(&self) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        for region in ram() {
            for page in 0..region.size_bytes / PAGE_BYTES {
                let addr = region.start + page * PAGE_BYTES;
                let mut word = [0; 8];
                self.ram.read(addr, &mut word);
                out.push((addr, u64::from_le_bytes(word)));
            }
        }
        out
    }
}
