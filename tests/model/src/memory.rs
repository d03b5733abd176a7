// SPDX-License-Identifier: Apache-2.0 OR MIT
//! RAM of the fake guest. It is shared memory in sealed memfds, as with QEMU's
//! `memory-backend-memfd`.
//!
//! There are gaps between the regions in guest-physical space, so that addresses without memory
//! exist. All accesses are volatile, because a daemon may read and write the same pages at any
//! time. For this reason, no function returns a Rust reference to guest memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open,
};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Bytes of a guest page.
pub const PAGE_BYTES: u64 = virtio_tmem::PAGE_SIZE as u64;

/// One contiguous piece of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamRegion {
    /// First guest-physical address of the region, page-aligned.
    pub start: u64,
    /// Length of the region in bytes, a multiple of the page size.
    pub size_bytes: u64,
}

fn memfd(bytes: u64, sealed: bool, flags: MemfdFlags) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
    let fd = memfd_create("tmem-model-ram", flags)?;
    ftruncate(&fd, bytes)?;
    if sealed {
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    }
    Ok(fd.into())
}

/// The guest's memory with a bump allocator of its pages.
#[derive(Debug)]
pub struct GuestRam {
    map: GuestMemoryMmap,
    regions: Vec<RamRegion>,
    /// Next free address of the allocator, with the number of the region that contains it. A thread
    /// that holds this lock takes no other lock.
    next: Mutex<(usize, u64)>,
    /// Numbers of the pages that the guest itself has written, or None while no VMM tracks them for
    /// a migration. A thread that holds this lock takes no other lock.
    written: Mutex<Option<BTreeSet<u64>>>,
}

impl GuestRam {
    /// Maps new zeroed memory. If `sealed` is true, adds F_SEAL_SHRINK and F_SEAL_GROW, as QEMU
    /// does.
    ///
    /// # Errors
    /// When the kernel refuses a memfd, a seal or a mapping.
    pub fn new(regions: &[RamRegion], sealed: bool) -> io::Result<Arc<Self>> {
        Self::with(regions, sealed, MemfdFlags::empty())
    }

    /// Maps new sealed memory of huge pages.
    ///
    /// # Errors
    /// When the kernel does not have enough free huge pages.
    pub fn huge(regions: &[RamRegion]) -> io::Result<Arc<Self>> {
        Self::with(regions, true, MemfdFlags::HUGETLB)
    }

    /// Maps memory of files in `directory`, which have no name and which only their owner may write.
    ///
    /// # Errors
    /// When the kernel refuses a file or a mapping.
    pub fn in_directory(regions: &[RamRegion], directory: &Path) -> io::Result<Arc<Self>> {
        Self::of(regions, |region| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let fd = open(directory, flags, Mode::RUSR | Mode::WUSR)?;
            ftruncate(&fd, region.size_bytes)?;
            Ok(fd.into())
        })
    }

    /// Maps sealed memory in which all regions map the same bytes of one file.
    ///
    /// # Errors
    /// When the kernel refuses a memfd, a seal or a mapping.
    ///
    /// # Panics
    /// When the regions are not equally large.
    pub fn in_one_file(regions: &[RamRegion]) -> io::Result<Arc<Self>> {
        let bytes = regions.first().map_or(0, |region| region.size_bytes);
        assert!(regions.iter().all(|region| region.size_bytes == bytes));
        let file = memfd(bytes, true, MemfdFlags::empty())?;
        Self::of(regions, |_| file.try_clone())
    }

    fn with(regions: &[RamRegion], sealed: bool, flags: MemfdFlags) -> io::Result<Arc<Self>> {
        Self::of(regions, |region| memfd(region.size_bytes, sealed, flags))
    }

    fn of(
        regions: &[RamRegion],
        file: impl Fn(&RamRegion) -> io::Result<File>,
    ) -> io::Result<Arc<Self>> {
        let mut ranges = Vec::with_capacity(regions.len());
        for region in regions {
            ranges.push((
                GuestAddress(region.start),
                region.size_bytes as usize,
                Some(FileOffset::new(file(region)?, 0)),
            ));
        }
        let map = GuestMemoryMmap::from_ranges_with_files(ranges).map_err(io::Error::other)?;
        let first = regions.first().map_or(0, |r| r.start);
        Ok(Arc::new(Self {
            map,
            regions: regions.to_vec(),
            next: Mutex::new((0, first)),
            written: Mutex::new(None),
        }))
    }

    /// Returns the guest's memory as rust-vmm's type, for a device in the same process.
    #[must_use]
    pub fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }

    /// Allocates `pages` contiguous pages and returns their guest address. The pages are never
    /// freed.
    ///
    /// # Panics
    /// When the guest has fewer free pages. The test that creates the guest chooses the size of its
    /// memory.
    #[must_use]
    pub fn alloc(&self, pages: u64) -> u64 {
        let size_bytes = pages * PAGE_BYTES;
        let mut next = self.next.lock().unwrap();
        loop {
            let region = self.regions.get(next.0).unwrap_or_else(|| {
                panic!(
                    "the guest's RAM has no {pages} free pages left: create the guest with more RAM"
                )
            });
            if next.1 + size_bytes <= region.start + region.size_bytes {
                let addr = next.1;
                next.1 += size_bytes;
                return addr;
            }
            next.0 += 1;
            next.1 = self.regions.get(next.0).map_or(0, |r| r.start);
        }
    }

    /// Copies from guest memory at `addr` to `buf`. Panics if not all bytes are in RAM.
    pub fn read(&self, addr: u64, buf: &mut [u8]) {
        self.map.read_slice(buf, GuestAddress(addr)).unwrap();
    }

    /// Copies `buf` to guest memory at `addr`. Panics if not all bytes are in RAM.
    pub fn write(&self, addr: u64, buf: &[u8]) {
        self.note_written(addr, buf.len() as u64);
        self.map.write_slice(buf, GuestAddress(addr)).unwrap();
    }

    /// Loads a ring index or flag atomically from guest memory, where it is little-endian.
    #[must_use]
    pub fn load_u16(&self, addr: u64, order: Ordering) -> u16 {
        u16::from_le(self.map.load(GuestAddress(addr), order).unwrap())
    }

    /// Stores a ring index or flag atomically in guest memory, where it is little-endian.
    pub fn store_u16(&self, addr: u64, value: u16, order: Ordering) {
        self.note_written(addr, 2);
        self.map
            .store(value.to_le(), GuestAddress(addr), order)
            .unwrap();
    }

    /// Returns the address in this process for a guest-physical address. vhost-user messages give
    /// the addresses of rings in this form.
    #[must_use]
    pub fn host_addr(&self, addr: u64) -> u64 {
        self.map.get_host_address(GuestAddress(addr)).unwrap() as u64
    }

    /// Returns the regions as SET_MEM_TABLE needs them. This object still owns the file descriptors
    /// and closes them.
    #[must_use]
    pub fn vhost_regions(&self) -> Vec<VhostUserMemoryRegionInfo> {
        self.map
            .iter()
            .map(|r| VhostUserMemoryRegionInfo::from_guest_region(r).unwrap())
            .collect()
    }

    /// Returns each region with its address in this process and a descriptor of its file, for a
    /// back end that maps the regions.
    ///
    /// # Errors
    /// When the process has no free file descriptor.
    pub fn shared_regions(&self) -> io::Result<Vec<(RamRegion, u64, File)>> {
        let mut out = Vec::new();
        for (region, mapped) in self.regions.iter().zip(self.map.iter()) {
            let file = mapped
                .file_offset()
                .expect("a region of the guest's memory is not backed by a file")
                .file();
            out.push((*region, self.host_addr(region.start), file.try_clone()?));
        }
        Ok(out)
    }

    fn note_written(&self, addr: u64, bytes: u64) {
        if let Some(written) = &mut *self.written.lock().unwrap() {
            written.extend(addr / PAGE_BYTES..=(addr + bytes.max(1) - 1) / PAGE_BYTES);
        }
    }

    /// Starts or stops recording the pages that the guest writes. Returns the page numbers recorded
    /// since the last call.
    pub fn track_written(&self, on: bool) -> BTreeSet<u64> {
        let fresh = on.then(BTreeSet::new);
        std::mem::replace(&mut *self.written.lock().unwrap(), fresh).unwrap_or_default()
    }

    /// Overwrites all guest memory with the contents of a snapshot.
    pub fn restore(&self, snapshot: &[Vec<u8>]) {
        for (region, old) in self.regions.iter().zip(snapshot) {
            self.write(region.start, old);
        }
    }

    /// Overwrites the guest page number `page` with its contents in a snapshot.
    pub fn restore_page(&self, snapshot: &[Vec<u8>], page: u64) {
        let addr = page * PAGE_BYTES;
        let inside = |r: &RamRegion| addr >= r.start && addr < r.start + r.size_bytes;
        if let Some(at) = self.regions.iter().position(inside) {
            let offset = (addr - self.regions[at].start) as usize;
            self.write(addr, &snapshot[at][offset..offset + PAGE_BYTES as usize]);
        }
    }

    /// Returns the end of the highest region: one past the highest guest-physical address.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.regions
            .iter()
            .map(|r| r.start + r.size_bytes)
            .max()
            .unwrap_or(0)
    }

    /// Returns a copy of all guest memory, to compare or restore it later.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        self.regions
            .iter()
            .map(|r| {
                let mut copy = vec![0; r.size_bytes as usize];
                self.read(r.start, &mut copy);
                copy
            })
            .collect()
    }

    /// Returns the numbers (address / 4096) of the guest pages that differ from the snapshot
    /// `before`, in ascending order.
    #[must_use]
    pub fn changed_pages(&self, before: &[Vec<u8>]) -> Vec<u64> {
        let mut changed = Vec::new();
        let mut page = [0u8; PAGE_BYTES as usize];
        for (region, old) in self.regions.iter().zip(before) {
            for (i, old_page) in old.chunks(PAGE_BYTES as usize).enumerate() {
                let addr = region.start + i as u64 * PAGE_BYTES;
                self.read(addr, &mut page);
                if page != old_page {
                    changed.push(addr / PAGE_BYTES);
                }
            }
        }
        changed
    }
}

/// A dirty log as migration uses it: one bit per guest page, in shared memory of its own.
#[derive(Debug)]
pub struct DirtyLog {
    map: GuestMemoryMmap,
    size_bytes: u64,
}

impl DirtyLog {
    /// Creates a dirty log without marks that covers all of `ram`.
    ///
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn new(ram: &GuestRam) -> io::Result<Self> {
        let bits = ram.end().div_ceil(PAGE_BYTES);
        Self::sized(bits.div_ceil(8).next_multiple_of(PAGE_BYTES))
    }

    /// Creates a dirty log of `size_bytes` bytes without marks. The size must be whole pages.
    ///
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn sized(size_bytes: u64) -> io::Result<Self> {
        let region = RamRegion {
            start: 0,
            size_bytes,
        };
        let ram = GuestRam::new(&[region], true)?;
        Ok(Self {
            map: ram.map.clone(),
            size_bytes,
        })
    }

    /// Returns a descriptor of the log's file, as SET_LOG_BASE passes it.
    ///
    /// # Errors
    /// When the process has no free file descriptor.
    pub fn file(&self) -> io::Result<File> {
        let region = self.map.iter().next().expect("the dirty log has no region");
        region
            .file_offset()
            .expect("the dirty log is not backed by a file")
            .file()
            .try_clone()
    }

    /// Returns the size of the log's bitmap in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the description of the log that SET_LOG_BASE passes: size, offset and file.
    #[must_use]
    pub fn region(&self) -> vhost::VhostUserDirtyLogRegion {
        let info =
            VhostUserMemoryRegionInfo::from_guest_region(self.map.iter().next().unwrap()).unwrap();
        vhost::VhostUserDirtyLogRegion {
            mmap_size: self.size_bytes,
            mmap_offset: 0,
            mmap_handle: info.mmap_handle,
        }
    }

    /// Returns whether the log marks the page with this number as dirty.
    #[must_use]
    pub fn is_dirty(&self, page: u64) -> bool {
        let mut byte = [0u8];
        self.map
            .read_slice(&mut byte, GuestAddress(page / 8))
            .unwrap();
        byte[0] & (1 << (page % 8)) != 0
    }

    /// Returns the number of pages that the log marks as dirty.
    #[must_use]
    pub fn dirty_pages(&self) -> u64 {
        let mut bytes = vec![0; self.size_bytes as usize];
        self.map.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes.iter().map(|b| u64::from(b.count_ones())).sum()
    }
}
