// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest memory: regions that the VMM shares, checked and mapped.
//!
//! A table never changes; adding or removing a region makes a new one, so that whoever locks a
//! vring sees one table whole. A region whose file could be truncated is refused: touching it
//! afterwards would kill the daemon, and with it the cache of every VM.

use crate::dirty::{DirtyLog, RegionLog};
use rustix::fs::SealFlags;
use std::fs::File;
use std::sync::Arc;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// The guest's physical memory with its dirty log.
pub type GuestMemory = GuestMemoryMmap<RegionLog>;

/// Regions of a VM at most. 256 VMs with as many stay below the kernel's limit of 65,530 mappings
/// of a process; a VM has 8 in vhost's older interface.
pub const REGIONS_MAX: usize = 64;

/// A region as the VMM describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address.
    pub guest_address: u64,
    /// Address in the VMM, by which it names rings.
    pub user_address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Of the region in its file, in bytes.
    pub file_offset: u64,
}

/// Why a region is not taken; the text says what to do.
#[derive(Debug)]
pub struct MemoryError(String);

impl std::fmt::Display for MemoryError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MemoryError {}

/// A memory table.
pub struct Memory {
    /// For access by guest physical address.
    pub guest: GuestMemory,
    regions: Vec<RegionSpec>,
}

impl Memory {
    /// A table of no regions.
    pub fn empty() -> Memory {
        Memory {
            guest: GuestMemory::new(),
            regions: Vec::new(),
        }
    }

    /// This table and one region more.
    pub fn with_region(
        &self,
        spec: RegionSpec,
        file: File,
        log: &Arc<DirtyLog>,
    ) -> Result<Memory, MemoryError> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError(format!(
                "more than {REGIONS_MAX} memory regions"
            )));
        }
        let at = spec.guest_address;
        check_file(&file, spec.file_offset, spec.bytes)
            .map_err(|e| MemoryError(format!("the memory region at guest address {at:#x} {e}")))?;
        let odd =
            |what: String| MemoryError(format!("memory region at guest address {at:#x}: {what}"));
        let bytes = usize::try_from(spec.bytes).map_err(|e| odd(e.to_string()))?;
        if spec.user_address.checked_add(spec.bytes).is_none() {
            return Err(odd("its address in the VMM overflows".into()));
        }
        let overlaps = |other: &RegionSpec| {
            spec.user_address < other.user_address + other.bytes
                && other.user_address < spec.user_address + spec.bytes
        };
        if self.regions.iter().any(overlaps) {
            return Err(odd("it overlaps another in the VMM's addresses".into()));
        }
        let region_log = RegionLog {
            log: log.clone(),
            base: at,
        };
        let mapping = MmapRegionBuilder::new_with_bitmap(bytes, region_log)
            .with_file_offset(FileOffset::new(file, spec.file_offset))
            .with_mmap_prot(PROT_READ_WRITE)
            .with_mmap_flags(MAP_SHARED_NORESERVE)
            .build()
            .map_err(|e| odd(format!("cannot be mapped readable and writable: {e}")))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(at))
            .ok_or_else(|| odd("its guest address overflows".into()))?;
        let guest = self
            .guest
            .insert_region(Arc::new(region))
            .map_err(|e| odd(e.to_string()))?;
        let mut regions = self.regions.clone();
        regions.push(spec);
        Ok(Memory { guest, regions })
    }

    /// This table without a region, found by its guest address, VMM address and length.
    pub fn without_region(&self, spec: RegionSpec) -> Result<Memory, MemoryError> {
        let same = |other: &RegionSpec| {
            other.guest_address == spec.guest_address
                && other.user_address == spec.user_address
                && other.bytes == spec.bytes
        };
        let unknown = || {
            MemoryError(format!(
                "there is no memory region of {} bytes at guest address {:#x} to remove",
                spec.bytes, spec.guest_address
            ))
        };
        let position = self.regions.iter().position(same).ok_or_else(unknown)?;
        let (guest, _) = self
            .guest
            .remove_region(GuestAddress(spec.guest_address), spec.bytes)
            .map_err(|_| unknown())?;
        let mut regions = self.regions.clone();
        regions.remove(position);
        Ok(Memory { guest, regions })
    }

    /// The guest address of `bytes` at an address of the VMM, if they lie in one region.
    pub fn guest_address(&self, user_address: u64, bytes: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user_address.checked_sub(region.user_address)?;
            let inside = offset.checked_add(bytes)? <= region.bytes;
            inside.then(|| region.guest_address + offset)
        })
    }
}

const PROT_READ_WRITE: i32 =
    (rustix::mm::ProtFlags::READ.bits() | rustix::mm::ProtFlags::WRITE.bits()) as i32;
const MAP_SHARED_NORESERVE: i32 =
    (rustix::mm::MapFlags::SHARED.bits() | rustix::mm::MapFlags::NORESERVE.bits()) as i32;

/// Checks that a mapping of the bytes can never lose its file: the file is sealed against
/// shrinking and is long enough.
pub fn check_file(file: &File, offset: u64, bytes: u64) -> Result<(), MemoryError> {
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK) {
        return Err(MemoryError(
            "is in a file that another process could truncate (no F_SEAL_SHRINK), which would \
             end the daemon: give the VM memory of memory-backend-memfd,share=on (libvirt: \
             <memoryBacking><source type='memfd'/><access mode='shared'/>)"
                .into(),
        ));
    }
    let end = offset.checked_add(bytes);
    let length = rustix::fs::fstat(file)
        .map(|stat| stat.st_size as u64)
        .unwrap_or(0);
    if bytes == 0 || end.is_none_or(|end| end > length) {
        return Err(MemoryError(format!(
            "has {bytes} bytes at offset {offset} of a file of {length}: it must lie in it"
        )));
    }
    Ok(())
}
