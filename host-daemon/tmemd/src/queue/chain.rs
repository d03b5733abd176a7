// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptor chain of a request. All descriptors are validated first. The readable part is then
//! read and the answer is written to the writable part, both at offsets.
//!
//! virtio-queue's iterator ends a malformed chain as if the chain were complete. This module
//! detects a malformed chain, or a buffer outside guest memory, and reports an error. Guest
//! addresses are used only while the vring is locked.

use crate::memory::peer::{HungUp, Peer};
use crate::memory::table::{GuestMemory, Memory};
use std::cell::Cell;
use std::ops::Range;
use virtio_queue::DescriptorChain;
use virtio_tmem::{PAGE_SIZE, QUEUE_SIZE_MAX};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, GuestMemoryError, Permissions};

/// Number of bytes of an answer that are written between two checks that the front end (VMM) is
/// still connected. Copying that many bytes takes some µs.
const SLICE_BYTES: usize = 16 * PAGE_SIZE;

/// Reason why a descriptor chain is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainError {
    /// The chain cannot be followed: it has a bad index, a loop, a nested or unreadable indirect
    /// table, or more than 4 GiB.
    Broken,
    /// The chain has more descriptors than the maximum size of a queue.
    TooLong,
    /// A buffer is partly or completely outside the guest's memory.
    Outside {
        /// Guest physical address of the buffer.
        address: u64,
        /// Length of the buffer in bytes.
        length: u32,
    },
}

impl std::fmt::Display for ChainError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ChainError::Broken => write!(f, "a descriptor chain cannot be followed"),
            ChainError::TooLong => {
                write!(
                    f,
                    "a descriptor chain has more than {QUEUE_SIZE_MAX} descriptors"
                )
            }
            ChainError::Outside { address, length } => write!(
                f,
                "a descriptor names {length} bytes at guest address {address:#x}, which is not \
                 all in the memory that the VMM shares"
            ),
        }
    }
}

/// Reason why the contents of a request's pages were not read completely from guest memory, or its
/// answer was not written completely.
#[derive(Debug)]
pub enum AccessError {
    /// The front end (VMM) hung up, so guest memory may contain other data by now.
    HungUp,
    /// A page of guest memory was lost. Data that the daemon read may be zeros from the page that
    /// replaced the lost page.
    Lost,
    /// The chain's buffers in guest memory cannot be accessed.
    Memory(GuestMemoryError),
}

impl From<HungUp> for AccessError {
    fn from(_: HungUp) -> Self {
        AccessError::HungUp
    }
}

impl From<GuestMemoryError> for AccessError {
    fn from(error: GuestMemoryError) -> Self {
        AccessError::Memory(error)
    }
}

#[derive(Clone, Copy)]
struct Buffer {
    address: GuestAddress,
    length: u32,
}

/// Buffers of one descriptor chain. A worker allocates the value once and fills it with each chain
/// that it processes.
#[derive(Default)]
pub struct Chain {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_bytes: u64,
    writable_bytes: u64,
    descriptors: u32,
    readable_after_writable: bool,
    read_last: Cell<Position>,
    written_last: Cell<Position>,
}

/// Buffer of one part of a chain that was accessed last. Each part is read or written from front to
/// back in up to a hundred pieces. Without this value, the search for the buffer of each piece
/// would begin at the first of up to a thousand buffers.
#[derive(Clone, Copy, Default)]
struct Position {
    /// Index of the buffer among the buffers of its part.
    buffer: usize,
    /// Offset in the part at which the buffer begins, in bytes.
    begins: u64,
}

impl Chain {
    /// Creates an empty value with space for the longest chain, so that reading a chain allocates
    /// nothing.
    pub fn new() -> Self {
        Chain {
            readable: Vec::with_capacity(usize::from(QUEUE_SIZE_MAX)),
            writable: Vec::with_capacity(usize::from(QUEUE_SIZE_MAX)),
            ..Chain::default()
        }
    }

    /// Reads the descriptors of a chain and validates them. Replaces the previous content of the
    /// value.
    ///
    /// # Errors
    /// The chain is malformed, see [`ChainError`].
    pub fn fill(
        &mut self,
        memory: &GuestMemory,
        descriptors: DescriptorChain<&GuestMemory>,
    ) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
        self.descriptors = 0;
        self.read_last.set(Position::default());
        self.written_last.set(Position::default());
        self.readable_after_writable = false;
        let mut more = true;
        for (number, descriptor) in descriptors.enumerate() {
            if number >= usize::from(QUEUE_SIZE_MAX) {
                return Err(ChainError::TooLong);
            }
            self.descriptors += 1;
            more = descriptor.has_next();
            let (address, length) = (descriptor.addr(), descriptor.len());
            if length == 0 {
                continue;
            }
            let (list, bytes, access) = if descriptor.is_write_only() {
                (
                    &mut self.writable,
                    &mut self.writable_bytes,
                    Permissions::Write,
                )
            } else {
                self.readable_after_writable |= !self.writable.is_empty();
                (
                    &mut self.readable,
                    &mut self.readable_bytes,
                    Permissions::Read,
                )
            };
            if !memory.check_range(address, length as usize, access) {
                return Err(ChainError::Outside {
                    address: address.raw_value(),
                    length,
                });
            }
            list.push(Buffer { address, length });
            *bytes += u64::from(length);
        }
        // The iterator ends at the last descriptor of the chain, or at a descriptor that it cannot
        // read. If the last descriptor that the iterator returned names a next descriptor, the
        // chain is malformed.
        if more {
            Err(ChainError::Broken)
        } else {
            Ok(())
        }
    }

    /// Returns the number of descriptors in the chain, including those of length 0.
    pub fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Returns the number of pages that fit into the readable or the writable part, whichever is
    /// larger.
    pub fn pages(&self) -> u64 {
        self.readable_bytes.max(self.writable_bytes) / PAGE_SIZE as u64
    }

    /// Returns the length of the chain's readable part in bytes.
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Returns the length of the chain's writable part in bytes.
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Returns true if a readable descriptor follows a writable one, which no valid request has.
    pub fn is_out_of_order(&self) -> bool {
        self.readable_after_writable
    }

    /// Copies the bytes from an offset of the chain's readable part on out of guest memory, until
    /// `into` is full. Returns false if the readable part ends before that.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn read(
        &self,
        memory: &GuestMemory,
        offset: u64,
        into: &mut [u8],
    ) -> Result<bool, GuestMemoryError> {
        let length = into.len();
        let read = |address, piece| memory.read_slice(&mut into[piece], address);
        pieces(&self.readable, &self.read_last, offset, length, read)
    }

    /// Copies bytes to an offset of the chain's writable part. First checks that the front end is
    /// connected. Returns false if the bytes do not fit into the writable part.
    ///
    /// Stops after a buffer in which a page of guest memory was lost, because each lost page is
    /// replaced by a mapping, and the process has a limited number of these.
    ///
    /// # Errors
    /// The front end hung up, a page was lost, or guest memory cannot be accessed.
    pub fn write(
        &self,
        memory: &Memory,
        peer: &Peer,
        offset: u64,
        bytes: &[u8],
    ) -> Result<bool, AccessError> {
        if offset + bytes.len() as u64 > self.writable_bytes {
            return Ok(false);
        }
        for (number, slice) in bytes.chunks(SLICE_BYTES).enumerate() {
            peer.check()?;
            let offset = offset + (number * SLICE_BYTES) as u64;
            if !self.write_slice(memory, offset, slice)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write_slice(&self, memory: &Memory, offset: u64, bytes: &[u8]) -> Result<bool, AccessError> {
        let write = |address, piece: Range<usize>| {
            memory.guest.write_slice(&bytes[piece], address)?;
            // A loss in this thread's own write is visible to it without a fence.
            match memory.lost.is_read_lost() {
                true => Err(AccessError::Lost),
                false => Ok(()),
            }
        };
        pieces(
            &self.writable,
            &self.written_last,
            offset,
            bytes.len(),
            write,
        )
    }
}

/// Calls `access` for each piece of guest memory that contains some of the `bytes` bytes from an
/// offset of the buffers on. The arguments of `access` are the piece's address, and the range of
/// the bytes that the piece contains. Returns false if the buffers end before that many bytes.
fn pieces<E>(
    buffers: &[Buffer],
    last: &Cell<Position>,
    offset: u64,
    bytes: usize,
    mut access: impl FnMut(GuestAddress, Range<usize>) -> Result<(), E>,
) -> Result<bool, E> {
    let mut at = match last.get() {
        last if last.begins <= offset => last,
        _ => Position::default(),
    };
    let (mut skip, mut done) = (offset - at.begins, 0);
    for buffer in buffers.iter().skip(at.buffer) {
        if done == bytes {
            break;
        }
        let length = u64::from(buffer.length);
        if skip < length {
            last.set(at);
            let now = ((length - skip) as usize).min(bytes - done);
            let Some(address) = buffer.address.checked_add(skip) else {
                return Ok(false);
            };
            access(address, done..done + now)?;
            done += now;
        }
        skip = skip.saturating_sub(length);
        at.buffer += 1;
        at.begins += length;
    }
    Ok(done == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::table::RegionSpec;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::unix::net::UnixStream;
    use virtio_queue::{Queue, QueueOwnedT, QueueT};
    use vm_memory::GuestMemoryBackend as _;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const MEMORY_BYTES: u64 = 1 << 20;
    const SIZE: u16 = 16;
    /// Guest addresses of the descriptor table, the available ring, the used ring and an indirect
    /// table in these tests.
    const TABLE: u64 = 0;
    const AVAIL: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const INDIRECT_TABLE: u64 = 0x3000;
    const DATA: u64 = 0x10000;

    fn memory() -> Memory {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
        ftruncate(&file, MEMORY_BYTES).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let spec = RegionSpec {
            guest_address: 0,
            user_address: 0,
            bytes: MEMORY_BYTES,
            file_offset: 0,
        };
        Memory::empty(&Default::default(), &Default::default())
            .with_region(spec, file.into(), &Default::default())
            .expect("cannot add the region to the table")
    }

    type Descriptor = (u64, u32, u16, u16);

    fn put_table(memory: &GuestMemory, at: u64, descriptors: &[Descriptor]) {
        for (number, (address, length, flags, next)) in descriptors.iter().enumerate() {
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            memory
                .write_slice(&bytes, GuestAddress(at + 16 * number as u64))
                .expect("the address is outside of the guest's memory");
        }
    }

    /// Fills a `Chain` from the descriptors of `table`, beginning at the first descriptor.
    fn fill(
        memory: &GuestMemory,
        table: &[Descriptor],
        indirect: &[Descriptor],
    ) -> Result<Chain, ChainError> {
        put_table(memory, TABLE, table);
        put_table(memory, INDIRECT_TABLE, indirect);
        memory
            .write_slice(&[0, 0, 1, 0, 0, 0], GuestAddress(AVAIL))
            .expect("the address is outside of the guest's memory");
        let mut queue =
            Queue::new(SIZE).expect("the queue size was refused, although it is a power of two");
        queue.set_avail_ring_address(Some(AVAIL as u32), None);
        queue.set_used_ring_address(Some(USED as u32), None);
        queue.set_ready(true);
        let descriptors = queue
            .iter(memory)
            .expect("the rings are outside of the guest's memory")
            .next()
            .expect("the available ring has no chain");
        let mut chain = Chain::new();
        chain.fill(memory, descriptors).map(|()| chain)
    }

    /// Each lost page that is written is replaced, which takes mappings of the process away from
    /// other VMs.
    #[test]
    fn a_write_stops_after_the_first_buffer_with_a_lost_page() {
        let regions = memory();
        let page = |number: u64| DATA + number * PAGE_SIZE as u64;
        let table = [
            (page(0), 8, NEXT | WRITE, 1),
            (page(2), 8, NEXT | WRITE, 2),
            (page(4), 8, WRITE, 0),
        ];
        let chain = fill(&regions.guest, &table, &[]).expect("a valid chain was refused");
        let start = regions
            .guest
            .get_host_address(GuestAddress(page(0)))
            .expect("the address is outside of the guest's memory");
        crate::memory::sigbus::take_away(start, 5 * PAGE_SIZE);
        let (own, _front_end) = UnixStream::pair().expect("cannot create a socket pair");
        let written = chain.write(&regions, &Peer::new(own), 0, &[1; 24]);
        assert!(matches!(written, Err(AccessError::Lost)));
        // The file of `take_away` is mapped at the pages that were not replaced.
        let lost = start.addr()..start.addr() + 5 * PAGE_SIZE;
        let maps = std::fs::read_to_string("/proc/self/maps").expect("cannot read /proc/self/maps");
        let begins = |line: &str| {
            let begin = line.split('-').next().expect("split returns an item");
            usize::from_str_radix(begin, 16).expect("no address")
        };
        let left = maps.lines().filter(|line| lost.contains(&begins(line)));
        assert_eq!(
            left.filter(|line| line.contains("gone")).count(),
            1,
            "{maps}"
        );
    }

    #[test]
    fn chain_reads_and_writes_cover_descriptors_of_any_length() {
        let regions = memory();
        let memory = &regions.guest;
        let bytes: Vec<u8> = (0..100).collect();
        memory
            .write_slice(&bytes, GuestAddress(DATA))
            .expect("the address is outside of the guest's memory");
        let table = [
            (DATA, 3, NEXT, 1),
            (DATA + 3, 0, NEXT, 2),
            (DATA + 3, 97, NEXT, 3),
            (DATA + 0x100, 1, NEXT | WRITE, 4),
            (DATA + 0x200, 5, NEXT | WRITE, 5),
            (DATA + 0x300, 4, WRITE, 0),
        ];
        for indirect in [false, true] {
            let chain = if indirect {
                fill(memory, &[(INDIRECT_TABLE, 96, INDIRECT, 0)], &table)
            } else {
                fill(memory, &table, &[])
            };
            let chain = chain.expect("a valid descriptor chain was refused");
            assert!(!chain.is_out_of_order());
            assert_eq!(chain.writable_bytes(), 10);
            let read = |offset: u64, length: usize| {
                let mut buffer = vec![0xff; length];
                let fits = chain.read(memory, offset, &mut buffer);
                fits.expect("the address is outside of the guest's memory")
                    .then_some(buffer)
            };
            for (offset, length) in [(0, 100), (2, 2), (50, 50), (0, 4), (3, 97), (100, 0)] {
                let expected = &bytes[offset..offset + length];
                let read = read(offset as u64, length);
                assert_eq!(read.as_deref(), Some(expected), "at {offset}");
            }
            for (offset, length) in [(0, 101), (99, 2), (100, 1), (u64::MAX, 1)] {
                assert_eq!(
                    read(offset, length),
                    None,
                    "bytes beyond the readable part were read"
                );
            }

            memory
                .write_slice(&[0; 0x300], GuestAddress(DATA + 0x100))
                .expect("the address is outside of the guest's memory");
            let (own, _front_end) = UnixStream::pair().expect("cannot create a socket pair");
            let peer = Peer::new(own);
            assert_eq!(chain.write(&regions, &peer, 0, &[1, 2, 3]).ok(), Some(true));
            assert_eq!(
                chain.write(&regions, &peer, 4, &[5, 6, 7, 8, 9, 10]).ok(),
                Some(true)
            );
            assert_eq!(
                chain.write(&regions, &peer, 9, &[1, 1]).ok(),
                Some(false),
                "more bytes were written than the chain holds"
            );
            let mut seen = [[0; 6]; 3];
            for (number, seen) in seen.iter_mut().enumerate() {
                let at = DATA + 0x100 * (number as u64 + 1);
                memory
                    .read_slice(seen, GuestAddress(at))
                    .expect("the address is outside of the guest's memory");
            }
            assert_eq!(
                seen,
                [[1, 0, 0, 0, 0, 0], [2, 3, 0, 5, 6, 0], [7, 8, 9, 10, 0, 0]]
            );
        }
    }

    #[test]
    fn chains_of_4_gib_and_chains_with_too_many_descriptors_are_refused() {
        let memory = memory();
        let large = u32::MAX;
        let error = fill(&memory.guest, &[(DATA, 0, NEXT, 1), (0, large, 0, 0)], &[]).err();
        assert_eq!(
            error,
            Some(ChainError::Outside {
                address: 0,
                length: large
            })
        );

        let count = QUEUE_SIZE_MAX + 1;
        let table: Vec<Descriptor> = (1..=count)
            .map(|next| (DATA, 1, if next < count { NEXT } else { 0 }, next))
            .collect();
        let whole = [(INDIRECT_TABLE, u32::from(count) * 16, INDIRECT, 0)];
        assert_eq!(
            fill(&memory.guest, &whole, &table).err(),
            Some(ChainError::TooLong)
        );
    }

    #[test]
    fn errors_name_address_and_length_of_buffers_outside_of_guest_memory() {
        let memory = memory();
        for (address, length) in [
            (MEMORY_BYTES, 1),
            (MEMORY_BYTES - 1, 2),
            (u64::MAX, 1),
            (u64::MAX - 1, 16),
            (1 << 40, 4096),
        ] {
            for flags in [0, WRITE] {
                let error = fill(&memory.guest, &[(address, length, flags, 0)], &[]).err();
                assert_eq!(error, Some(ChainError::Outside { address, length }));
            }
        }
        let error = ChainError::Outside {
            address: 0x1000,
            length: 7,
        }
        .to_string();
        assert!(
            error.contains("0x1000") && error.contains('7'),
            "the error does not give address and length: {error}"
        );
    }
}
