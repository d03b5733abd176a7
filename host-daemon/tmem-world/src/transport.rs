// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's rings and buffers in guest memory: where each request lies, what is in flight.
//!
//! Every buffer has its own place that is used again and again, as the kernel module's are: what is
//! written there too late is written over something else. A clone is what a snapshot of the guest
//! keeps beside its memory. Never here: what is asked, and what an answer means.

use std::collections::VecDeque;
use std::sync::Arc;

use tmem_sim::memory::PAGE_BYTES;
use tmem_sim::model::Asked;
use tmem_sim::requests::{PAGE, Page, decode};
use tmem_sim::ring::RingLayout;
use tmem_sim::{Answer, Buffer, DriverRing, GuestRam, RamRegion, Request, RingError};
use virtio_tmem as wire;

/// Pages or ranges of a request at most: enough to be several, few enough to be quick.
pub const BATCH: usize = 8;
/// Batches of puts in flight on a queue.
pub const PUTS: usize = 2;
/// Pages that wait to be put.
pub const PLACES: usize = 20;
/// Gets in flight.
pub const GETS: usize = 5;
/// Bounce pages.
pub const BOUNCE: usize = 24;
/// Control requests in flight.
pub const CONTROLS: usize = 3;
/// Descriptors of a ring.
const RING: u16 = 64;

/// Within the page of a request: its answer, and its indirect table.
const ANSWER_AT: u64 = 2048;
const TABLE_AT: u64 = 3072;

/// Places in guest memory.
#[derive(Debug)]
pub struct Layout {
    /// Rings: control, then request queues.
    pub rings: Vec<RingLayout>,
    /// Put batches of each queue.
    pub puts: Vec<[u64; PUTS]>,
    /// The flush request of each queue.
    pub flush: Vec<u64>,
    /// Get requests.
    pub gets: Vec<u64>,
    /// Bounce pages.
    pub bounce: Vec<u64>,
    /// Pages that wait to be put.
    pub places: Vec<u64>,
    /// Control requests.
    pub controls: Vec<u64>,
}

/// RAM of a guest: with a hole, as a PC has below 4 GiB.
pub fn ram() -> Vec<RamRegion> {
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    vec![region(0, 256 << 10), region(1 << 20, 384 << 10)]
}

impl Layout {
    /// Takes what `queues` queues need.
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
        }
    }
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// A batch of puts of the queue.
    Put(usize),
    /// The flush of the queue.
    Flush,
    /// A get.
    Get(usize),
    /// A control request.
    Control(usize),
}

/// A request that the device has, or has answered without the driver having looked.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Whose.
    pub tag: Tag,
    /// What was asked; page data are left out.
    pub request: Arc<Request>,
    /// Under which generation.
    pub generation: u64,
    /// For the model of the device.
    pub asked: Asked,
    /// Page of the request.
    pub page: u64,
    /// Pages of data, in or out.
    pub data: Vec<u64>,
}

impl Flight {
    /// All its pages.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.page).chain(self.data.iter().copied())
    }

    /// The answer as it stands in memory.
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

/// Rings and what is in flight.
#[derive(Clone, Debug)]
pub struct Transport {
    ram: Arc<GuestRam>,
    /// Where everything is.
    pub layout: Arc<Layout>,
    /// The driver's side of each ring.
    pub rings: Vec<DriverRing>,
    /// In flight, by queue, the oldest first.
    pub flight: Vec<VecDeque<Flight>>,
    indirect: bool,
    token: u64,
}

impl Transport {
    /// Empty rings.
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

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Queues, the control queue included.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.flight.iter().map(VecDeque::len).sum()
    }

    /// Whether a request may be sent: each takes as many descriptors as it has pages, and two.
    pub fn has_room(&self, queue: usize) -> bool {
        self.rings[queue].free_descs() >= BATCH + 3
    }

    /// Writes a request and shows it to the device; true if that wants a kick.
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
            .expect("has_room was asked");
        self.flight[queue].push_back(flight);
        ring.publish()
    }

    /// The head and the length of the used element that answers the request at this place of the
    /// queue's flight; None: it is not answered.
    pub fn used(&self, queue: usize, place: usize) -> Option<(u32, u32)> {
        let ring = &self.rings[queue];
        let answered = ring.used_idx_in_memory().wrapping_sub(ring.used_idx());
        if place >= usize::from(answered) {
            return None;
        }
        let number = ring.used_idx().wrapping_add(place as u16);
        let mut element = [0; 8];
        self.ram.read(self.used_at(queue, number), &mut element);
        let word = |at: usize| u32::from_le_bytes(element[at..at + 4].try_into().expect("four"));
        Some((word(0), word(4)))
    }

    /// Where a used element lies.
    pub fn used_at(&self, queue: usize, number: u16) -> u64 {
        let layout = self.rings[queue].layout();
        layout.used + 4 + 8 * u64::from(number % layout.size)
    }

    /// Takes the next answer of a queue.
    pub fn take(&mut self, queue: usize) -> Result<Option<(Flight, Answer)>, RingError> {
        let Some(used) = self.rings[queue].pop_used()? else {
            return Ok(None);
        };
        let flight = self.flight[queue].pop_front().expect("as many as chains");
        let answer = flight.answer(&self.ram, used.len);
        Ok(Some((flight, answer)))
    }

    /// First words of all pages of the guest's memory.
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
