// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's rings and buffers in guest memory: addresses of requests, and requests in flight.
//!
//! Every buffer has a fixed place that is used again and again, as in the kernel module: a late
//! write to a buffer overwrites other data. A snapshot of the guest keeps a clone of the transport
//! beside its memory. Out of scope: the choice of requests, and the meaning of answers.

use std::collections::VecDeque;
use std::sync::Arc;

use tmem_sim::memory::PAGE_BYTES;
use tmem_sim::model::Asked;
use tmem_sim::requests::{PAGE, Page, decode};
use tmem_sim::ring::RingLayout;
use tmem_sim::{Answer, Buffer, DriverRing, GuestRam, RamRegion, Request, RingError};
use virtio_tmem as wire;

/// Maximum number of pages or ranges of a request. Batches are large enough to be realistic, and
/// small enough for fast runs.
pub const BATCH: usize = 8;
/// Number of put batches in flight on a queue.
pub const PUTS: usize = 2;
/// Number of slots of the put ring, in which pages wait to be sent.
pub const PLACES: usize = 20;
/// Number of gets in flight.
pub const GETS: usize = 5;
/// Number of bounce pages.
pub const BOUNCE: usize = 24;
/// Number of control requests in flight.
pub const CONTROLS: usize = 3;
/// Number of descriptors of a ring.
const RING: u16 = 64;

/// Offsets within the page of a request: its answer, and its indirect table.
pub const ANSWER_AT: u64 = 2048;
const TABLE_AT: u64 = 3072;

/// Addresses of rings and buffers in guest memory.
#[derive(Debug)]
pub struct Layout {
    /// Layout of the rings: the control queue, then the request queues.
    pub rings: Vec<RingLayout>,
    /// Addresses of the put batches of each queue.
    pub puts: Vec<[u64; PUTS]>,
    /// Address of the flush request of each queue.
    pub flush: Vec<u64>,
    /// Address of the REF request of each queue.
    pub refs: Vec<u64>,
    /// Addresses of the get requests.
    pub gets: Vec<u64>,
    /// Addresses of the bounce pages.
    pub bounce: Vec<u64>,
    /// Addresses of the pages that wait to be put.
    pub places: Vec<u64>,
    /// Addresses of the control requests.
    pub controls: Vec<u64>,
}

/// Returns the regions of a guest's RAM, with a hole, as a PC has below 4 GiB.
pub fn ram() -> Vec<RamRegion> {
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    vec![region(0, 256 << 10), region(1 << 20, 384 << 10)]
}

impl Layout {
    /// Allocates the pages for `queues` queues.
    pub fn new(ram: &GuestRam, queues: usize) -> Layout {
        let page = || ram.alloc(1);
        let pages = |count: usize| (0..count).map(|_| page()).collect::<Vec<u64>>();
        Layout {
            rings: (0..queues).map(|_| RingLayout::alloc(ram, RING)).collect(),
            puts: (0..queues).map(|_| [page(), page()]).collect(),
            flush: pages(queues),
            gets: pages(GETS),
            bounce: pages(BOUNCE),
            places: pages(PLACES),
            controls: pages(CONTROLS),
            refs: pages(queues),
        }
    }
}

/// Kind and number of a request's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// The put batch with this number of the queue.
    Put(usize),
    /// The flush request of the queue.
    Flush,
    /// The REF request of the queue.
    Ref,
    /// The get request with this number.
    Get(usize),
    /// The control request with this number.
    Control(usize),
}

/// A request that the device owns, or that it has answered and the driver has not taken yet.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Buffer of the request.
    pub tag: Tag,
    /// The request, without page data.
    pub request: Arc<Request>,
    /// Generation of the request.
    pub generation: u64,
    /// Data from which the model of the device judges the answer.
    pub asked: Asked,
    /// Address of the page of the request.
    pub page: u64,
    /// Addresses of the pages with data, which the device reads or writes.
    pub data: Vec<u64>,
}

impl Flight {
    /// Returns the addresses of all pages of the request.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.page).chain(self.data.iter().copied())
    }

    /// Returns the answer that is in guest memory.
    pub fn answer(&self, ram: &GuestRam, used_bytes: u32) -> Answer {
        let mut meta = vec![wire::S_UNANSWERED; self.request.encode(0).answer_meta_bytes];
        ram.read(self.page + ANSWER_AT, &mut meta);
        decode(&self.request, used_bytes, &meta, |i| {
            let mut page: Box<Page> = Box::new([0; PAGE]);
            ram.read(self.data[i], &mut *page);
            page
        })
    }
}

/// Rings and requests in flight.
#[derive(Clone, Debug)]
pub struct Transport {
    ram: Arc<GuestRam>,
    /// Addresses of rings and buffers.
    pub layout: Arc<Layout>,
    /// The driver's side of each ring.
    pub rings: Vec<DriverRing>,
    /// Requests in flight, by queue, the oldest first.
    pub flight: Vec<VecDeque<Flight>>,
    indirect: bool,
    token: u64,
}

impl Transport {
    /// Creates empty rings.
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
            flight: layout.rings.iter().map(|_| VecDeque::new()).collect(),
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

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.flight.iter().map(VecDeque::len).sum()
    }

    /// Returns whether a request may be sent: it takes a descriptor for each of its pages, and at
    /// most three more.
    pub fn has_room(&self, queue: usize) -> bool {
        self.rings[queue].free_descs() >= BATCH + 3
    }

    /// Writes a request and publishes it to the device. Returns true if the device wants a kick.
    pub fn send(&mut self, queue: usize, flight: Flight) -> bool {
        let encoded = flight.request.encode(flight.generation);
        let ram = &self.ram;
        ram.write(flight.page, &encoded.meta);
        let unanswered = vec![wire::S_UNANSWERED; encoded.answer_meta_bytes];
        ram.write(flight.page + ANSWER_AT, &unanswered);
        let buffer = |addr: u64, len: usize, writable| Buffer {
            addr,
            len: len as u32,
            writable,
        };
        let is_get = matches!(&*flight.request, Request::Get { .. });
        let data = flight.data.iter().map(|&addr| buffer(addr, PAGE, is_get));
        let answer = buffer(flight.page + ANSWER_AT, encoded.answer_meta_bytes, true);
        let mut buffers = vec![buffer(flight.page, encoded.meta.len(), false)];
        if is_get {
            buffers.push(answer);
            buffers.extend(data);
        } else {
            buffers.extend(data);
            buffers.push(answer);
        }
        let table = self.indirect.then_some(flight.page + TABLE_AT);
        self.token += 1;
        let ring = &mut self.rings[queue];
        ring.add(&buffers, table, self.token)
            .expect("there is no room, although the caller checked has_room");
        self.flight[queue].push_back(flight);
        ring.publish()
    }

    /// Returns the head and the length of the used element that answers the request number `place`
    /// of the queue's requests in flight. Returns None if the request is not answered.
    pub fn used(&self, queue: usize, place: usize) -> Option<(u32, u32)> {
        let ring = &self.rings[queue];
        let answered = ring.used_idx_in_memory().wrapping_sub(ring.used_idx());
        if place >= usize::from(answered) {
            return None;
        }
        let number = ring.used_idx().wrapping_add(place as u16);
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

    /// Returns the address of a used element.
    pub fn used_at(&self, queue: usize, number: u16) -> u64 {
        let layout = self.rings[queue].layout();
        layout.used + 4 + 8 * u64::from(number % layout.size)
    }

    /// Takes the next answer of a queue.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    pub fn take(&mut self, queue: usize) -> Result<Option<(Flight, Answer)>, RingError> {
        let Some(used) = self.rings[queue].pop_used()? else {
            return Ok(None);
        };
        let flight = self.flight[queue]
            .pop_front()
            .expect("a chain in flight has no entry");
        let answer = flight.answer(&self.ram, used.len);
        Ok(Some((flight, answer)))
    }

    /// Returns the first words of all pages of the guest's memory, with their addresses.
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
