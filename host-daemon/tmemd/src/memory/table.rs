// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory table: the regions of guest memory that the VMM shares. The daemon checks and maps each
//! region.
//!
//! A table never changes. Adding or removing a region creates a new table, so a thread that has
//! locked a vring sees a consistent table. A region whose file another user could truncate is refused
//! ([`crate::memory::backing`]). If a page of a mapped region is lost nevertheless, the connection
//! ends ([`crate::memory::sigbus`]).

use crate::memory::backing;
use crate::memory::budget::{MemoryAccount, MemoryCharge, REGIONS_MAX};
use crate::memory::dirty_log::{DirtyLog, RegionLog};
use crate::memory::files::{self, FileId};
use crate::memory::mapping::Mapping;
use crate::memory::sigbus::{Lost, page_bytes};
use std::fs::File;
use std::sync::Arc;
use virtio_tmem as wire;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// The guest's physical memory, together with its dirty log.
pub type GuestMemory = GuestMemoryMmap<RegionLog>;

/// Memory region as the VMM describes it in a vhost-user message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address of the region.
    pub guest_address: u64,
    /// Address of the region in the VMM's address space. The VMM gives ring addresses in that
    /// address space, too.
    pub user_address: u64,
    /// Length of the region in bytes.
    pub bytes: u64,
    /// Offset of the region in its file, in bytes.
    pub file_offset: u64,
}

/// Reason why the daemon refuses a memory region. The text says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(String);

/// Memory region of a memory table.
#[derive(Clone)]
struct Region {
    spec: RegionSpec,
    /// Identity of the file that contains the region.
    file: Option<FileId>,
    /// The mapping of the region. All tables with this region share it, and dropping the last of
    /// these tables unmaps it.
    _mapping: Arc<ChargedMapping>,
}

/// Mapping of a region and its charge. Rust drops fields in the order of their declaration, so the
/// charge ends after the memory is unmapped.
struct ChargedMapping {
    _mapping: Mapping,
    _charge: MemoryCharge,
}

/// Memory table of a VM. It never changes.
pub struct Memory {
    regions: Vec<Region>,
    /// Access to the guest's memory by guest physical address. The value contains pointers into the
    /// mappings of `regions`, so it must be borrowed and never cloned.
    pub guest: GuestMemory,
    /// Flag that the SIGBUS handler sets when a page of the guest's memory is lost: an access to
    /// the page raised SIGBUS.
    pub lost: Arc<Lost>,
    /// Account of the VM, to which the table's mappings are charged.
    account: Arc<MemoryAccount>,
    /// User of the VMM, whose files may back regions without a seal; None to accept sealed files
    /// only.
    vmm_user: Option<u32>,
}

impl Memory {
    /// Creates a table without regions. If a page of a region that is added later is lost, the
    /// SIGBUS handler sets `lost`. Regions are charged to `account`.
    pub fn empty(lost: &Arc<Lost>, account: &Arc<MemoryAccount>) -> Memory {
        Memory {
            regions: Vec::new(),
            guest: GuestMemory::new(),
            lost: lost.clone(),
            account: account.clone(),
            vmm_user: None,
        }
    }

    /// Returns this table for a VMM that runs as the given user.
    pub fn with_vmm_user(self, vmm_user: Option<u32>) -> Memory {
        Memory { vmm_user, ..self }
    }

    /// Returns a copy of this table with one more region.
    ///
    /// # Errors
    /// The region is invalid or cannot be mapped, the table already has the maximum number of
    /// regions, or the VM's maximum or the budget of all VMs is exceeded.
    pub fn with_region(
        &self,
        spec: RegionSpec,
        file: File,
        log: &Arc<DirtyLog>,
    ) -> Result<Memory, MemoryError> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError(format!(
                "more than {REGIONS_MAX} memory regions: give the VM fewer memory slots (DIMMs, \
                 virtio-mem with dynamic-memslots)"
            )));
        }
        let at = spec.guest_address;
        check_region(&file, spec.file_offset, spec.bytes, self.vmm_user)
            .map_err(|e| MemoryError(format!("the memory region at guest address {at:#x} {e}")))?;
        let odd =
            |what: String| MemoryError(format!("memory region at guest address {at:#x}: {what}"));
        let charge = self.account.charge(self.bytes(), spec.bytes);
        let charge = charge.map_err(|error| odd(error.to_string()))?;
        let bytes = usize::try_from(spec.bytes).map_err(|e| odd(e.to_string()))?;
        if spec.user_address.checked_add(spec.bytes).is_none() {
            return Err(odd("its address in the VMM overflows".into()));
        }
        // Regions may overlap in VMM addresses, because a VMM may map the same memory at two guest
        // addresses. Guest addresses must not overlap.
        let region_log = RegionLog {
            log: log.clone(),
            base: at,
        };
        let mapping = Mapping::new(&file, spec.file_offset, bytes, &self.lost)
            .map_err(|e| odd(format!("cannot be mapped readable and writable: {e}")))?;
        // The region does not keep the file open: a VM with many regions would otherwise use up the
        // daemon's descriptors. The mapping keeps the memory. The account keeps a few files open.
        let builder = MmapRegionBuilder::new_with_bitmap(bytes, region_log)
            .with_mmap_prot(PROT_READ_WRITE)
            .with_mmap_flags(MAP_SHARED);
        // SAFETY: the mapping is `bytes` long, and the table keeps the mapping as long as the
        // region.
        let builder = unsafe { builder.with_raw_mmap_pointer(mapping.start()) };
        let region = builder.build().map_err(|e| odd(e.to_string()))?;
        let region = GuestRegionMmap::new(region, GuestAddress(at))
            .ok_or_else(|| odd("its guest address overflows".into()))?;
        let guest = self
            .guest
            .insert_region(Arc::new(region))
            .map_err(|e| odd(e.to_string()))?;
        let mut regions = self.regions.clone();
        let id = files::id(&file);
        self.account.files.add(id, file);
        regions.push(Region {
            spec,
            file: id,
            _mapping: Arc::new(ChargedMapping {
                _mapping: mapping,
                _charge: charge,
            }),
        });
        Ok(self.changed(regions, guest))
    }

    /// Returns a copy of this table without the region that has the given guest address, VMM
    /// address and length.
    ///
    /// # Errors
    /// The table has no such region.
    pub fn without_region(&self, spec: RegionSpec) -> Result<Memory, MemoryError> {
        let same = |Region { spec: other, .. }: &Region| {
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
        Ok(self.changed(regions, guest))
    }

    fn changed(&self, regions: Vec<Region>, guest: GuestMemory) -> Memory {
        Memory {
            regions,
            guest,
            lost: self.lost.clone(),
            account: self.account.clone(),
            vmm_user: self.vmm_user,
        }
    }

    /// Makes this table the VM's current table in the VM's account. Closes the files of the VM's
    /// memory that this table does not contain.
    pub fn become_current(&self) {
        self.account.set_table_bytes(self.bytes());
        self.account
            .files
            .keep(self.regions.iter().map(|region| region.file));
    }

    /// Returns the size of all regions in bytes.
    pub fn bytes(&self) -> u64 {
        // The sum cannot overflow: it is at most the VM's maximum at the time of the last charge.
        self.regions.iter().map(|region| region.spec.bytes).sum()
    }

    /// Converts an address in the VMM's address space to a guest address. Returns None if the
    /// `bytes` bytes from that address on are not inside one region.
    pub fn guest_address(&self, user_address: u64, bytes: u64) -> Option<u64> {
        self.regions.iter().find_map(|Region { spec: region, .. }| {
            let offset = user_address.checked_sub(region.user_address)?;
            let inside = offset.checked_add(bytes)? <= region.bytes;
            inside.then(|| region.guest_address + offset)
        })
    }
}

const PROT_READ_WRITE: i32 =
    (rustix::mm::ProtFlags::READ.bits() | rustix::mm::ProtFlags::WRITE.bits()) as i32;
const MAP_SHARED: i32 = rustix::mm::MapFlags::SHARED.bits() as i32;

/// Checks that a part of a file can be mapped and cannot be truncated. The file must be sealed
/// against shrinking and long enough.
///
/// # Errors
/// The file does not meet these conditions. The error text says what to do.
pub fn check_file(file: &File, offset: u64, bytes: u64) -> Result<(), MemoryError> {
    check_region(file, offset, bytes, None)
}

/// Checks that a part of a file can be mapped, and that no other user than `vmm_user` can truncate
/// the file ([`backing::check`]).
///
/// # Errors
/// The file does not meet these conditions. The error text says what to do.
fn check_region(
    file: &File,
    offset: u64,
    bytes: u64,
    vmm_user: Option<u32>,
) -> Result<(), MemoryError> {
    backing::check(file, vmm_user).map_err(MemoryError)?;
    let end = offset.checked_add(bytes);
    let length = rustix::fs::fstat(file)
        .map(|stat| stat.st_size as u64)
        .unwrap_or(0);
    if bytes == 0 || end.is_none_or(|end| end > length) {
        return Err(MemoryError(format!(
            "has {bytes} bytes at offset {offset}, but its file has only {length} bytes: it must \
             be inside the file"
        )));
    }
    let page_bytes = page_bytes(file).map_err(|error| MemoryError(error.to_string()))?;
    // The kernel can map a part of a huge page, but can neither unmap nor replace only a part.
    let whole = |number: u64| number.is_multiple_of(page_bytes);
    if page_bytes > wire::PAGE_SIZE as u64 && !(whole(bytes) && whole(offset)) {
        return Err(MemoryError(format!(
            "has {bytes} bytes at offset {offset} of a file with pages of {page_bytes}: the region \
             must consist of whole pages"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::budget::{MemoryBudget, VM_MEMORY_BYTES_MAX};
    use crate::memory::dirty_log::LogMap;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::unix::fs::FileExt;
    use vm_memory::Bytes;

    const MIB: u64 = 1 << 20;

    fn memfd(bytes: u64, seals: SealFlags) -> File {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .expect("cannot create a memfd");
        ftruncate(&file, bytes).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, seals).expect("cannot seal the memfd");
        file.into()
    }

    fn spec(guest_address: u64, user_address: u64, bytes: u64) -> RegionSpec {
        RegionSpec {
            guest_address,
            user_address,
            bytes,
            file_offset: 0,
        }
    }

    fn add(memory: &Memory, spec: RegionSpec, file: File) -> Result<Memory, String> {
        memory
            .with_region(spec, file, &Arc::default())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn only_sealed_files_are_mapped() {
        let empty = Memory::empty(&Arc::default(), &Arc::default());
        let region = spec(0, 0, MIB);
        add(&empty, region, memfd(MIB, SealFlags::SHRINK))
            .expect("a file that cannot shrink was refused");
        add(
            &empty,
            region,
            memfd(MIB, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL),
        )
        .expect("a file with the seals that QEMU sets was refused");
        for file in [memfd(MIB, SealFlags::empty()), memfd(MIB, SealFlags::GROW)] {
            let error = add(&empty, region, file)
                .err()
                .expect("a file that can shrink was accepted");
            for part in ["0x0", "F_SEAL_SHRINK", "memory-backend-memfd,share=on"] {
                assert!(
                    error.contains(part),
                    "the error does not contain {part:?}: {error}"
                );
            }
        }
    }

    #[test]
    fn a_file_that_does_not_contain_the_region_is_refused() {
        let file = || memfd(MIB, SealFlags::SHRINK);
        let empty = Memory::empty(&Arc::default(), &Arc::default());
        let with = |offset, bytes| {
            add(
                &empty,
                RegionSpec {
                    file_offset: offset,
                    ..spec(0, 0, bytes)
                },
                file(),
            )
        };
        with(4096, MIB - 4096)
            .map(drop)
            .expect("a region inside its file was refused");
        for (offset, bytes) in [(4096, MIB), (0, MIB + 4096), (u64::MAX, MIB), (0, u64::MAX)] {
            let error = with(offset, bytes)
                .err()
                .expect("a region beyond the end of its file was accepted");
            assert!(
                error.contains(&bytes.to_string()),
                "the error does not give the size {bytes}: {error}"
            );
        }
    }

    #[test]
    fn a_file_that_is_sealed_against_writes_is_refused() {
        let seals = SealFlags::SHRINK | SealFlags::FUTURE_WRITE;
        let error = add(
            &Memory::empty(&Arc::default(), &Arc::default()),
            spec(0, 0, MIB),
            memfd(MIB, seals),
        )
        .err()
        .expect("a file sealed against writes was accepted");
        assert!(
            error.contains("writable"),
            "the error does not say that the file must be writable: {error}"
        );
    }

    /// A file on hugetlbfs can be longer than all huge pages that the host has. mmap(2) of such a
    /// file must fail, because an access to a page that the host does not have would raise SIGBUS.
    #[test]
    fn a_file_with_more_huge_pages_than_the_host_is_refused() {
        let more_than_any_host_has = 1 << 42;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let file = memfd_create("test", flags).expect("cannot create a memfd");
        ftruncate(&file, more_than_any_host_has).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let region = spec(0, 0, more_than_any_host_has);
        let account = Arc::new(MemoryAccount::new(&Arc::default(), VM_MEMORY_BYTES_MAX));
        let error = add(
            &Memory::empty(&Arc::default(), &account),
            region,
            file.into(),
        );
        let error = error
            .err()
            .expect("a region was mapped that needs more huge pages than the host has");
        assert!(
            error.contains("cannot be mapped"),
            "the error does not say that the file cannot be mapped: {error}"
        );
    }

    /// A region must not end inside a huge page, because the daemon can neither unmap a part of a
    /// huge page nor replace it after a loss.
    #[test]
    fn a_region_with_a_part_of_a_huge_page_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let file = memfd_create("test", flags).expect("cannot create a memfd");
        let page_bytes = page_bytes(
            &file
                .try_clone()
                .expect("cannot duplicate the descriptor")
                .into(),
        )
        .expect("the memfd has no page size");
        ftruncate(&file, 4 * page_bytes).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        for (offset, bytes) in [(0, page_bytes / 2), (page_bytes / 2, page_bytes)] {
            let region = RegionSpec {
                file_offset: offset,
                ..spec(0, 0, bytes)
            };
            let same = file
                .try_clone()
                .expect("cannot duplicate the descriptor")
                .into();
            let error = add(
                &Memory::empty(&Arc::default(), &Arc::default()),
                region,
                same,
            );
            let error = error
                .err()
                .expect("a region was accepted that ends inside a huge page");
            assert!(
                error.contains("whole pages"),
                "the error does not say that a region consists of whole pages: {error}"
            );
        }
    }

    #[test]
    fn regions_cannot_overlap_and_are_found_by_guest_and_user_address() {
        let file = || memfd(MIB, SealFlags::SHRINK);
        let memory = add(
            &Memory::empty(&Arc::default(), &Arc::default()),
            spec(0, 0x7000_0000, MIB),
            file(),
        )
        .expect("the first region was refused");
        let memory = add(&memory, spec(4 * MIB, 0x8000_0000, MIB), file())
            .expect("the second region was refused");
        add(&memory, spec(MIB / 2, 0x9000_0000, MIB), file())
            .err()
            .expect("a region with guest addresses of another region was accepted");
        add(&memory, spec(8 * MIB, 0x8000_1000, MIB), file())
            .expect("a region with user addresses of another region was accepted");
        add(&memory, spec(8 * MIB, u64::MAX - 4096, MIB), file())
            .err()
            .expect("a region whose end exceeds 64 bits was accepted");
        add(&memory, spec(u64::MAX - 4095, 0x9000_0000, MIB), file())
            .err()
            .expect("a region whose end exceeds 64 bits was accepted");
        for (file_offset, bytes) in [(u64::MAX - 4095, 8192), (8192, u64::MAX - 4095)] {
            let region = RegionSpec {
                file_offset,
                ..spec(1 << 40, 0x9000_0000, bytes)
            };
            add(&memory, region, file())
                .err()
                .expect("a region whose end in its file exceeds 64 bits was accepted");
        }

        assert_eq!(memory.guest_address(0x8000_0010, 16), Some(4 * MIB + 16));
        assert_eq!(memory.guest_address(0x8000_0000, MIB), Some(4 * MIB));
        assert_eq!(memory.guest_address(0x8000_0000, MIB + 1), None);
        assert_eq!(memory.guest_address(0x7fff_ffff, 2), None);
        assert_eq!(memory.guest_address(0x8000_0000, u64::MAX), None);

        memory
            .without_region(spec(4 * MIB, 0x8000_0000, 4096))
            .err()
            .expect("a region with another length was removed");
        memory
            .without_region(spec(4 * MIB, 0x7000_0000, MIB))
            .err()
            .expect("a region with another address was removed");
        let memory = memory
            .without_region(spec(4 * MIB, 0x8000_0000, MIB))
            .expect("the region is not in the table");
        assert_eq!(memory.guest_address(0x8000_0000, 1), None);
        assert_eq!(memory.guest_address(0x7000_0000, 1), Some(0));
    }

    #[test]
    fn the_number_of_memory_regions_is_limited() {
        let mut memory = Memory::empty(&Arc::default(), &Arc::default());
        let region = |number: u64| spec(number * MIB, number * MIB, 4096);
        let file = || memfd(4096, SealFlags::SHRINK);
        for number in 0..REGIONS_MAX as u64 {
            memory = add(&memory, region(number), file())
                .expect("the table refused one of REGIONS_MAX regions");
        }
        let error = add(&memory, region(REGIONS_MAX as u64), file())
            .err()
            .expect("the table accepted more than REGIONS_MAX regions");
        assert!(
            error.contains(&REGIONS_MAX.to_string()),
            "the error does not give the limit of {REGIONS_MAX} regions: {error}"
        );
    }

    /// All regions of a VM together must not exceed its maximum, because a sparse file may have any
    /// length.
    #[test]
    fn the_total_size_of_memory_regions_is_limited() {
        let account = Arc::new(MemoryAccount::new(&Arc::default(), VM_MEMORY_BYTES_MAX));
        let half = VM_MEMORY_BYTES_MAX / 2;
        let file = |bytes| memfd(bytes, SealFlags::SHRINK);
        let memory = add(
            &Memory::empty(&Arc::default(), &account),
            spec(0, 0, half),
            file(half),
        )
        .expect("the first half of VM_MEMORY_BYTES_MAX was refused");
        let memory = add(&memory, spec(half, half, half), file(half))
            .expect("the second half of VM_MEMORY_BYTES_MAX was refused");
        let region = spec(2 * half, 2 * half, 4096);
        let error = add(&memory, region, file(4096))
            .err()
            .expect("the table accepted more than VM_MEMORY_BYTES_MAX");
        assert!(
            error.contains(&VM_MEMORY_BYTES_MAX.to_string()),
            "the error does not give the limit of {VM_MEMORY_BYTES_MAX} bytes: {error}"
        );
        assert_eq!(account.mapped_bytes(), VM_MEMORY_BYTES_MAX);
        let smaller = memory
            .without_region(spec(half, half, half))
            .expect("the region is not in the table");
        drop(memory);
        assert_eq!((smaller.bytes(), account.mapped_bytes()), (half, half));
    }

    /// Does random operations of two VMs that share the budget: regions are added, removed, or
    /// refused for different reasons, and some tables are kept after another table has replaced
    /// them. The charge must always equal the size of the existing mappings.
    #[test]
    fn each_mapping_is_charged_until_it_is_unmapped() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let budget = Arc::<MemoryBudget>::default();
        let account = || Arc::new(MemoryAccount::new(&budget, 3 * MIB));
        let accounts = [account(), account()];
        let empty = |vm: usize| Arc::new(Memory::empty(&Arc::default(), &accounts[vm]));
        let file = memfd(MIB, SealFlags::SHRINK);
        // Tables of each VM that exist; the last one is the current table.
        let mut tables = [vec![empty(0)], vec![empty(1)]];
        let mut refused = 0;
        for _ in 0..2000 {
            let vm = rng.usize(..2);
            let current = tables[vm]
                .last()
                .expect("the VM has no memory table")
                .clone();
            // Some regions are refused, because they end beyond the end of their file, overlap
            // another region, or exceed the VM's maximum.
            let region = spec(rng.u64(..12) * MIB / 2, 0, MIB / 2 * rng.u64(1..=2));
            let changed = match rng.usize(..4) {
                0 => Ok(Memory::empty(&Arc::default(), &accounts[vm])),
                1 => current.without_region(region),
                _ => {
                    let offset = rng.u64(..2) * MIB / 2;
                    let region = RegionSpec {
                        file_offset: offset,
                        ..region
                    };
                    let file = file.try_clone().expect("cannot duplicate the descriptor");
                    current.with_region(region, file, &Arc::default())
                }
            };
            match changed {
                Ok(table) => tables[vm].push(Arc::new(table)),
                Err(_) => refused += 1,
            }
            drop(current);
            while tables[vm].len() > rng.usize(1..4) {
                let at = rng.usize(..tables[vm].len() - 1);
                tables[vm].remove(at);
            }
            let mapped = |vm: usize| {
                let regions = tables[vm].iter().flat_map(|table| &table.regions);
                let all = regions.map(|region| (Arc::as_ptr(&region._mapping), region.spec.bytes));
                let all: std::collections::BTreeMap<_, u64> = all.collect();
                all.values().sum::<u64>()
            };
            for (vm, account) in accounts.iter().enumerate() {
                assert_eq!(
                    account.mapped_bytes(),
                    mapped(vm),
                    "seed {seed}: VM {vm} is not charged exactly for its mapped regions"
                );
            }
            assert_eq!(
                budget.mapped_bytes(),
                mapped(0) + mapped(1),
                "seed {seed}: the budget is not charged exactly for all mapped regions"
            );
        }
        assert!(
            refused > 100,
            "seed {seed}: {refused} changes were refused, expected more than 100"
        );
        drop(tables);
        assert_eq!(
            budget.mapped_bytes(),
            0,
            "seed {seed}: the budget is still charged after all tables were dropped"
        );
    }

    /// Returns the numbers of the pages that are marked in a dirty log.
    fn dirty_pages(file: &File) -> Vec<u64> {
        let mut bytes = [0u8; 64];
        file.read_exact_at(&mut bytes, 0)
            .expect("cannot read the log");
        (0..512)
            .filter(|page| bytes[page / 8] & (1 << (page % 8)) != 0)
            .map(|p| p as u64)
            .collect()
    }

    #[test]
    fn every_page_written_by_the_device_is_in_the_dirty_log() {
        let log = Arc::new(DirtyLog::default());
        let log_file = memfd(64, SealFlags::SHRINK);
        let memory = Memory::empty(&Arc::default(), &Arc::default())
            .with_region(spec(MIB, 0, MIB), memfd(MIB, SealFlags::SHRINK), &log)
            .expect("cannot add the region to the table");
        let guest = &memory.guest;
        let write = |page: u64| {
            guest
                .write_slice(&[1], GuestAddress(page * 4096))
                .expect("the address is outside of the guest's memory")
        };

        log.set_map(LogMap::new(&log_file, 0, 64, &Arc::default()).expect("cannot map the log"));
        write(256);
        assert!(
            dirty_pages(&log_file).is_empty(),
            "a page was logged while logging was off"
        );
        log.set_enabled(true);
        // The test writes guest memory in three ways: 8 bytes across a page boundary, a whole page,
        // and an atomic store.
        guest
            .write_slice(&[1; 8], GuestAddress(257 * 4096 - 4))
            .expect("the address is outside of the guest's memory");
        guest
            .write_slice(&[1; 4096], GuestAddress(300 * 4096))
            .expect("the address is outside of the guest's memory");
        guest
            .store(
                1u16,
                GuestAddress(511 * 4096 + 4094),
                std::sync::atomic::Ordering::Release,
            )
            .expect("the address is outside of the guest's memory");
        assert_eq!(dirty_pages(&log_file), [256, 257, 300, 511]);
        guest
            .read_slice(&mut [0; 8], GuestAddress(400 * 4096))
            .expect("the address is outside of the guest's memory");
        assert_eq!(
            dirty_pages(&log_file),
            [256, 257, 300, 511],
            "reading memory changed the log"
        );

        // A new table with other regions uses the dirty log of the table that it replaces.
        let memory = memory
            .without_region(spec(MIB, 0, MIB))
            .expect("the region is not in the table");
        let memory = memory
            .with_region(spec(0, 0, MIB), memfd(MIB, SealFlags::SHRINK), &log)
            .expect("cannot add the region to the table");
        memory
            .guest
            .write_slice(&[1], GuestAddress(0))
            .expect("the address is outside of the guest's memory");
        assert_eq!(dirty_pages(&log_file), [0, 256, 257, 300, 511]);
        assert_eq!(log.missed_pages(), 0);

        // Written pages beyond the end of the dirty log are counted as missed.
        let memory = memory
            .with_region(
                spec(2 * MIB, 2 * MIB, MIB),
                memfd(MIB, SealFlags::SHRINK),
                &log,
            )
            .expect("cannot add the region to the table");
        memory
            .guest
            .write_slice(&[1; 8192], GuestAddress(2 * MIB))
            .expect("the address is outside of the guest's memory");
        assert_eq!(log.missed_pages(), 2);

        log.set_enabled(false);
        memory
            .guest
            .write_slice(&[1], GuestAddress(8192))
            .expect("the address is outside of the guest's memory");
        assert_eq!(
            dirty_pages(&log_file),
            [0, 256, 257, 300, 511],
            "a page was logged after logging was switched off"
        );
    }
}
