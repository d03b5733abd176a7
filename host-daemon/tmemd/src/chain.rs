// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One descriptor chain: walked strictly, read once, written at offsets.
//!
//! virtio-queue's iterator ends a malformed chain as if it were complete; here each chain that it
//! ended early is found out and is an error, as is one that points outside of guest memory. Guest
//! addresses live only as long as the vring is locked.

use crate::memory::GuestMemory;
use virtio_queue::DescriptorChain;
use virtio_tmem::{QUEUE_SIZE_MAX, READABLE_BYTES_MAX};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions};

/// Why a chain cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainError {
    /// A descriptor is missing: bad index, loop, nested or unreadable indirect table, or more than
    /// 4 GiB.
    Broken,
    /// More descriptors than a queue may have.
    TooLong,
    /// A buffer outside of the guest's memory.
    Outside {
        /// Guest physical address.
        address: u64,
        /// Bytes.
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

#[derive(Clone, Copy)]
struct Buffer {
    address: GuestAddress,
    length: u32,
}

/// The buffers of one chain; kept by a worker and filled anew for each.
#[derive(Default)]
pub struct Chain {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_bytes: u64,
    writable_bytes: u64,
    readable_after_writable: bool,
}

impl Chain {
    /// Room for the longest chain, so that none allocates.
    pub fn new() -> Self {
        Chain {
            readable: Vec::with_capacity(usize::from(QUEUE_SIZE_MAX)),
            writable: Vec::with_capacity(usize::from(QUEUE_SIZE_MAX)),
            ..Chain::default()
        }
    }

    /// Walks a chain to its end.
    pub fn fill(
        &mut self,
        memory: &GuestMemory,
        descriptors: DescriptorChain<&GuestMemory>,
    ) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
        self.readable_after_writable = false;
        let mut more = true;
        for (number, descriptor) in descriptors.enumerate() {
            if number >= usize::from(QUEUE_SIZE_MAX) {
                return Err(ChainError::TooLong);
            }
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
        // The iterator ends at the last descriptor or at one that it cannot read.
        if more {
            Err(ChainError::Broken)
        } else {
            Ok(())
        }
    }

    /// Bytes of the writable part.
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// A readable descriptor follows a writable one, which no request has.
    pub fn is_out_of_order(&self) -> bool {
        self.readable_after_writable
    }

    /// Copies the readable part out of guest memory, each byte once: at most one byte more than
    /// any request has, which is enough to tell that it is none. `into` holds that many.
    pub fn read<'a>(
        &self,
        memory: &GuestMemory,
        into: &'a mut [u8],
    ) -> Result<&'a [u8], vm_memory::GuestMemoryError> {
        let mut filled = 0;
        for buffer in &self.readable {
            let wanted = (buffer.length as usize).min(into.len() - filled);
            memory.read_slice(&mut into[filled..filled + wanted], buffer.address)?;
            filled += wanted;
        }
        Ok(&into[..filled])
    }

    /// Copies bytes to an offset of the writable part; false if they do not fit.
    pub fn write(
        &self,
        memory: &GuestMemory,
        offset: u64,
        bytes: &[u8],
    ) -> Result<bool, vm_memory::GuestMemoryError> {
        if offset + bytes.len() as u64 > self.writable_bytes {
            return Ok(false);
        }
        let (mut skip, mut rest) = (offset, bytes);
        for buffer in &self.writable {
            let length = u64::from(buffer.length);
            if skip >= length {
                skip -= length;
                continue;
            }
            let now = ((length - skip) as usize).min(rest.len());
            let Some(address) = buffer.address.checked_add(skip) else {
                return Ok(false);
            };
            memory.write_slice(&rest[..now], address)?;
            (skip, rest) = (0, &rest[now..]);
            if rest.is_empty() {
                break;
            }
        }
        Ok(true)
    }
}

/// Size of the buffer for [`Chain::read`].
pub const READ_BUFFER_BYTES: usize = READABLE_BYTES_MAX + 1;
