// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Driver side of a split virtqueue, with indirect tables and EVENT_IDX.
//!
//! The ring checks that the device follows the rules: used elements come in the order of the avail
//! ring, each for a chain that is in flight. For the fault tests the ring can also publish data
//! that no correct driver publishes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

use crate::memory::{GuestRam, PAGE_BYTES};

/// Descriptor flag VIRTQ_DESC_F_NEXT: another descriptor of the chain follows.
pub const F_NEXT: u16 = VRING_DESC_F_NEXT as u16;
/// Descriptor flag VIRTQ_DESC_F_WRITE: the device writes the buffer.
pub const F_WRITE: u16 = VRING_DESC_F_WRITE as u16;
/// Descriptor flag VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub const F_INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
/// Size of a descriptor in bytes.
pub const DESC_BYTES: u64 = 16;

/// A descriptor of a virtqueue, as the virtio specification defines it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest-physical address of the buffer.
    pub addr: u64,
    /// Length of the buffer in bytes.
    pub len: u32,
    /// Flags of the descriptor: F_NEXT, F_WRITE, F_INDIRECT.
    pub flags: u16,
    /// Number of the next descriptor of the chain, valid only with F_NEXT.
    pub next: u16,
}

impl Desc {
    /// Returns the descriptor as bytes, as it is in guest memory.
    #[must_use]
    pub fn to_bytes(self) -> [u8; DESC_BYTES as usize] {
        let mut out = [0; DESC_BYTES as usize];
        out[0..8].copy_from_slice(&self.addr.to_le_bytes());
        out[8..12].copy_from_slice(&self.len.to_le_bytes());
        out[12..14].copy_from_slice(&self.flags.to_le_bytes());
        out[14..16].copy_from_slice(&self.next.to_le_bytes());
        out
    }
}

/// A buffer of a well-formed descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Guest-physical address of the buffer.
    pub addr: u64,
    /// Length of the buffer in bytes, not 0.
    pub len: u32,
    /// Whether the device writes the buffer.
    pub writable: bool,
}

/// Guest-physical addresses of the three parts of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Number of descriptors of the virtqueue, a power of two.
    pub size: u16,
    /// Address of the descriptor table.
    pub desc: u64,
    /// Address of the avail ring.
    pub avail: u64,
    /// Address of the used ring.
    pub used: u64,
}

impl RingLayout {
    /// Allocates the three parts of a virtqueue in separate pages, so that the dirty log
    /// distinguishes the parts.
    #[must_use]
    pub fn alloc(ram: &GuestRam, size: u16) -> Self {
        let pages = |bytes: u64| bytes.div_ceil(PAGE_BYTES);
        let n = u64::from(size);
        Self {
            size,
            desc: ram.alloc(pages(n * DESC_BYTES)),
            avail: ram.alloc(pages(6 + 2 * n)),
            used: ram.alloc(pages(6 + 8 * n)),
        }
    }

    fn used_event(&self) -> u64 {
        self.avail + 4 + 2 * u64::from(self.size)
    }

    fn avail_event(&self) -> u64 {
        self.used + 4 + 8 * u64::from(self.size)
    }
}

/// Error: the device broke the rules of the virtqueue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A used element names a chain that is not the oldest one in flight.
    #[error("the device used the chain {got}, but the oldest chain in flight is {expected}")]
    OutOfOrder {
        /// Head descriptor of the oldest chain in flight.
        expected: u16,
        /// Head descriptor that the used element names.
        got: u32,
    },
    /// The device has published more used elements than chains are in flight.
    #[error(
        "the device published more used elements than the {in_flight} chains in flight: its used \
         index is {used_idx}"
    )]
    Unasked {
        /// Index of the used ring in guest memory.
        used_idx: u16,
        /// Number of chains in flight.
        in_flight: usize,
    },
}

/// Error: the virtqueue has too few free descriptors for the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFull;

/// A chain that the device has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Token with which the chain was added.
    pub token: u64,
    /// Number of bytes that the device wrote, as the used element says.
    pub len: u32,
}

#[derive(Clone, Debug)]
struct Chain {
    head: u16,
    descs: Vec<u16>,
    token: u64,
}

/// Driver's side of one virtqueue. It can be cloned, so that a snapshot of a guest can include it.
#[derive(Clone, Debug)]
pub struct DriverRing {
    ram: Arc<GuestRam>,
    layout: RingLayout,
    event_idx: bool,
    /// Index of the avail ring after the last added chain. The index in guest memory is smaller
    /// until the chains are published.
    avail_idx: u16,
    /// Index of the avail ring when the driver last decided whether to kick the device.
    kicked_idx: u16,
    used_idx: u16,
    free: Vec<u16>,
    in_flight: VecDeque<Chain>,
}

impl DriverRing {
    /// Creates an empty virtqueue at the addresses `layout`, which are zeroed memory.
    #[must_use]
    pub fn new(ram: Arc<GuestRam>, layout: RingLayout) -> Self {
        assert!(layout.size.is_power_of_two());
        let mut ring = Self {
            ram,
            layout,
            event_idx: false,
            avail_idx: 0,
            kicked_idx: 0,
            used_idx: 0,
            free: Vec::new(),
            in_flight: VecDeque::new(),
        };
        ring.reset();
        ring
    }

    /// Returns the addresses of the virtqueue's three parts.
    #[must_use]
    pub fn layout(&self) -> RingLayout {
        self.layout
    }

    /// Resets the avail and used indices to 0 and forgets all chains in flight, as after a device
    /// reset.
    pub fn reset(&mut self) {
        let n = usize::from(self.layout.size);
        self.ram.write(self.layout.avail, &vec![0; 6 + 2 * n]);
        self.ram.write(self.layout.used, &vec![0; 6 + 8 * n]);
        self.avail_idx = 0;
        self.kicked_idx = 0;
        self.used_idx = 0;
        self.free = (0..self.layout.size).rev().collect();
        self.in_flight.clear();
    }

    /// Sets whether the feature VIRTIO_F_EVENT_IDX was negotiated.
    pub fn set_event_idx(&mut self, on: bool) {
        self.event_idx = on;
    }

    /// Returns the number of answers that the driver has taken, as a 16-bit index of the used ring.
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        self.used_idx
    }

    /// Returns the number of chains that the device has not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the number of free descriptors.
    #[must_use]
    pub fn free_descs(&self) -> usize {
        self.free.len()
    }

    /// Returns the used index in guest memory. After a lost back end, QEMU lets the next one
    /// continue from this index.
    #[must_use]
    pub fn used_idx_in_memory(&self) -> u16 {
        self.ram.load_u16(self.layout.used + 2, Ordering::Acquire)
    }

    /// Returns the avail index in guest memory, up to which chains are published.
    #[must_use]
    pub fn avail_idx_in_memory(&self) -> u16 {
        self.ram.load_u16(self.layout.avail + 2, Ordering::Acquire)
    }

    /// Writes a chain into free descriptors without publishing it. If `indirect` is an address, the
    /// chain goes into an indirect table there and takes one descriptor of the virtqueue.
    ///
    /// # Errors
    /// [`RingFull`]. Nothing is written then.
    pub fn add(
        &mut self,
        buffers: &[Buffer],
        indirect: Option<u64>,
        token: u64,
    ) -> Result<(), RingFull> {
        assert!(!buffers.is_empty());
        let wanted = if indirect.is_some() { 1 } else { buffers.len() };
        if self.free.len() < wanted {
            return Err(RingFull);
        }
        let descs: Vec<u16> = (0..wanted).map(|_| self.free.pop().unwrap()).collect();
        let flags = |b: &Buffer, last: bool| {
            (if b.writable { F_WRITE } else { 0 }) | (if last { 0 } else { F_NEXT })
        };
        let last = buffers.len() - 1;
        if let Some(table) = indirect {
            for (i, b) in buffers.iter().enumerate() {
                let desc = Desc {
                    addr: b.addr,
                    len: b.len,
                    flags: flags(b, i == last),
                    next: if i == last { 0 } else { i as u16 + 1 },
                };
                self.ram
                    .write(table + i as u64 * DESC_BYTES, &desc.to_bytes());
            }
            let desc = Desc {
                addr: table,
                len: (buffers.len() as u64 * DESC_BYTES) as u32,
                flags: F_INDIRECT,
                next: 0,
            };
            self.write_desc(descs[0], desc);
        } else {
            for (i, b) in buffers.iter().enumerate() {
                let desc = Desc {
                    addr: b.addr,
                    len: b.len,
                    flags: flags(b, i == last),
                    next: if i == last { 0 } else { descs[i + 1] },
                };
                self.write_desc(descs[i], desc);
            }
        }
        self.push(descs[0], descs, token);
        Ok(())
    }

    /// Adds the head of a chain to the avail ring without publishing it. The caller has written the
    /// descriptors, which may be invalid. The descriptors in `descs` become free when the chain is
    /// answered.
    pub fn add_raw(&mut self, head: u16, descs: Vec<u16>, token: u64) {
        self.push(head, descs, token);
    }

    /// Takes a free descriptor for a chain that the caller builds. Returns None if no descriptor is
    /// free.
    #[must_use]
    pub fn take_desc(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Writes descriptor number `slot` of the virtqueue's descriptor table.
    pub fn write_desc(&self, slot: u16, desc: Desc) {
        let addr = self.layout.desc + u64::from(slot % self.layout.size) * DESC_BYTES;
        self.ram.write(addr, &desc.to_bytes());
    }

    fn push(&mut self, head: u16, descs: Vec<u16>, token: u64) {
        let entry = u64::from(self.avail_idx % self.layout.size);
        let addr = self.layout.avail + 4 + 2 * entry;
        self.ram.store_u16(addr, head, Ordering::Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.in_flight.push_back(Chain { head, descs, token });
    }

    /// Publishes all added chains to the device. Returns true if the device wants a kick.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let addr = self.layout.avail + 2;
        self.ram.store_u16(addr, self.avail_idx, Ordering::Release);
        // Make the new avail index visible before reading whether the device wants a kick, because
        // the device may be about to sleep.
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.kicked_idx, self.avail_idx);
        if self.event_idx {
            let event = self
                .ram
                .load_u16(self.layout.avail_event(), Ordering::Relaxed);
            passed_event(event, self.avail_idx, old)
        } else {
            let flags = self.ram.load_u16(self.layout.used, Ordering::Relaxed);
            u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
        }
    }

    /// Publishes a wrong avail index, which is `ahead` higher than the number of added chains.
    pub fn publish_lie(&mut self, ahead: u16) {
        let idx = self.avail_idx.wrapping_add(ahead);
        self.ram
            .store_u16(self.layout.avail + 2, idx, Ordering::Release);
    }

    /// Takes the next answer from the used ring. Returns None if the device has published none.
    ///
    /// # Errors
    /// When the device answered out of order, or answered a chain that is not in flight.
    pub fn pop_used(&mut self) -> Result<Option<Used>, RingError> {
        let used_idx = self.used_idx_in_memory();
        let ahead = used_idx.wrapping_sub(self.used_idx);
        if ahead == 0 {
            return Ok(None);
        }
        let in_flight = self.in_flight.len();
        if usize::from(ahead) > in_flight {
            return Err(RingError::Unasked {
                used_idx,
                in_flight,
            });
        }
        let entry = u64::from(self.used_idx % self.layout.size);
        let mut element = [0u8; 8];
        self.ram
            .read(self.layout.used + 4 + 8 * entry, &mut element);
        let [id, len] = [&element[..4], &element[4..]]
            .map(|b| u32::from_le_bytes(b.try_into().expect("the slice does not have four bytes")));
        let expected = self.in_flight[0].head;
        if id != u32::from(expected) {
            return Err(RingError::OutOfOrder { expected, got: id });
        }
        let chain = self.in_flight.pop_front().expect("no chain is in flight");
        self.free.extend(chain.descs);
        self.used_idx = self.used_idx.wrapping_add(1);
        if self.event_idx {
            let addr = self.layout.used_event();
            self.ram.store_u16(addr, self.used_idx, Ordering::Release);
            // Make the event index visible before the caller polls the used ring once more and then
            // sleeps.
            fence(Ordering::SeqCst);
        }
        Ok(Some(Used {
            token: chain.token,
            len,
        }))
    }
}

/// Returns whether moving an index from `old` to `new` passes `event` (virtio 1.3, 2.7.7.2).
fn passed_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
