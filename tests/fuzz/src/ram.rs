// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's memory: three regions in one file. At their guest addresses, two regions are
//! adjacent, and one ends near 2^64. In the file, guard pages separate the regions. The guard pages
//! do not belong to the guest, and the daemon must not write them.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;

const PAGE: u64 = 4096;

/// Region of guest memory: guest address, address in the front end, offset in the file, and length
/// in bytes.
struct Region {
    guest: u64,
    user: u64,
    offset: u64,
    bytes: u64,
}

/// Guest address of the first region.
pub const BASE: u64 = 0x10000;
/// Number of pages in the first region, for rings, tables and the largest requests.
const PAGES: u64 = 80;
/// Guest address at which the first region ends and the second begins.
pub const SEAM: u64 = BASE + PAGES * PAGE;
/// Guest address of the region that ends near 2^64.
pub const TOP: u64 = 0xffff_ffff_ffff_0000;

/// Regions of guest memory. Regions that are adjacent in the guest's address space are not adjacent
/// in the file or in the front end's address space.
const REGIONS: [Region; 3] = [
    Region {
        guest: BASE,
        user: 0x7000_0000,
        offset: PAGE,
        bytes: PAGES * PAGE,
    },
    Region {
        guest: SEAM,
        user: 0x8000_0000,
        offset: (PAGES + 2) * PAGE,
        bytes: 2 * PAGE,
    },
    Region {
        guest: TOP,
        user: 0x9000_0000,
        offset: (PAGES + 5) * PAGE,
        bytes: 2 * PAGE,
    },
];

/// Length of the memory's file in bytes. It has guard pages before, between and after the regions.
const FILE_BYTES: u64 = (PAGES + 8) * PAGE;

/// Byte that fills the guard pages.
const GUARD_BYTE: u8 = 0xa5;

/// Guest memory in a file, and the contents that it is expected to have.
pub struct Ram {
    /// File of the memory, shared with the daemon.
    pub file: Arc<File>,
    /// Expected contents of the guest's memory: the contents after the daemon's last action,
    /// updated with the guest's later writes.
    pub image: Vec<u8>,
    /// Unused buffers for copies of the memory. They are kept because allocating them takes longer
    /// than the run of an input.
    spare: Vec<Vec<u8>>,
}

thread_local! {
    /// Guest memory of the last input, which the next input uses again.
    static LAST: RefCell<Option<Ram>> = const { RefCell::new(None) };
}

impl Ram {
    /// Returns guest memory that is zeroed, except for the guard pages in the file.
    pub fn new() -> Ram {
        let mut ram = LAST.take().unwrap_or_else(Ram::create);
        let mut image = ram.copy();
        ram.read_into(&mut image);
        for region in &REGIONS {
            let all = region.offset as usize..(region.offset + region.bytes) as usize;
            for page in all.step_by(PAGE as usize) {
                let bytes = &mut image[page..page + PAGE as usize];
                // Compare whole pages at once. A comparison of each byte would be slow, because a
                // program built for the fuzzer records each comparison that its own code makes.
                if *bytes != [0; PAGE as usize] {
                    bytes.fill(0);
                    ram.file
                        .write_all_at(bytes, page as u64)
                        .expect("the range is outside of the file of guest memory");
                }
            }
        }
        ram.accept(image);
        ram
    }

    fn create() -> Ram {
        let fd = memfd_create("tmem-fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let fd = fd.expect("cannot create a memfd");
        ftruncate(&fd, FILE_BYTES).expect("cannot set the length of the memfd");
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).expect("cannot seal the memfd");
        let image = vec![GUARD_BYTE; FILE_BYTES as usize];
        let file = Arc::new(File::from(fd));
        file.write_all_at(&image, 0)
            .expect("the range is outside of the file of guest memory");
        let spare = vec![image.clone(), image.clone()];
        Ram { file, image, spare }
    }

    /// Keeps this memory for the next input, which then creates no memfd.
    pub fn keep(self) {
        LAST.set(Some(self));
    }

    /// Returns a copy of the expected contents of the memory. The caller gives it back with
    /// [`Self::accept`] or [`Self::drop_copy`].
    pub fn copy(&mut self) -> Vec<u8> {
        let mut copy = self
            .spare
            .pop()
            .expect("both buffers for copies of the guest's memory are in use");
        copy.copy_from_slice(&self.image);
        copy
    }

    /// Takes back the buffer of a copy that the caller no longer needs.
    pub fn drop_copy(&mut self, copy: Vec<u8>) {
        self.spare.push(copy);
    }

    fn read_into(&self, image: &mut [u8]) {
        self.file
            .read_exact_at(image, 0)
            .expect("the range is outside of the file of guest memory");
    }

    /// Returns the memory table that the front end sends: the regions, and their files.
    pub fn table(&self) -> (Vec<VhostUserMemoryRegion>, Vec<File>) {
        let spec = |r: &Region| VhostUserMemoryRegion::new(r.guest, r.bytes, r.user, r.offset);
        let file = |_| {
            self.file
                .try_clone()
                .expect("cannot duplicate the descriptor")
        };
        let specs = REGIONS.iter().map(spec).collect();
        (specs, REGIONS.iter().map(file).collect())
    }

    /// Returns the front end's address for a guest address of the first region.
    pub fn user(address: u64) -> u64 {
        address - REGIONS[0].guest + REGIONS[0].user
    }

    /// Returns the parts of the file that contain `bytes` bytes at a guest address, each as offset
    /// and length. Returns None if not all of the bytes are guest memory.
    pub fn places(address: u64, bytes: u64) -> Option<Vec<(usize, usize)>> {
        let mut places = Vec::new();
        let (mut at, mut left) = (address, bytes);
        while left > 0 {
            let region = REGIONS
                .iter()
                .find(|r| at >= r.guest && at - r.guest < r.bytes)?;
            let now = left.min(region.bytes - (at - region.guest));
            places.push(((region.offset + (at - region.guest)) as usize, now as usize));
            left -= now;
            // Addresses end at 2^64 - 1. If the piece ends exactly there, the loop is done and `at`
            // is not used again. If bytes are left, they would be beyond that address, so return
            // None.
            at = at.checked_add(now).or((left == 0).then_some(0))?;
        }
        Some(places)
    }

    /// Returns `bytes` bytes at a guest address from a copy of the file. Returns None if not all of
    /// them are guest memory.
    pub fn read(image: &[u8], address: u64, bytes: u64) -> Option<Vec<u8>> {
        let places = Ram::places(address, bytes)?;
        let part = |(from, count): &(usize, usize)| &image[*from..from + count];
        Some(places.iter().map(part).collect::<Vec<_>>().concat())
    }

    /// Returns the 16-bit number at a guest address, which must be memory, from a copy of the file.
    pub fn u16_of(image: &[u8], address: u64) -> u16 {
        let bytes =
            Ram::read(image, address, 2).expect("the range is outside of the guest's memory");
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// Writes bytes to the guest's memory. Returns false and writes nothing if not all of the
    /// addresses are memory.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> bool {
        let Some(places) = Ram::places(address, bytes.len() as u64) else {
            return false;
        };
        let mut rest = bytes;
        for (from, count) in places {
            let (now, later) = rest.split_at(count);
            self.image[from..from + count].copy_from_slice(now);
            self.file
                .write_all_at(now, from as u64)
                .expect("the range is outside of the file of guest memory");
            rest = later;
        }
        true
    }

    /// Returns the present contents of the file. The caller passes them to [`Self::accept`] or
    /// [`Self::drop_copy`].
    pub fn current(&mut self) -> Vec<u8> {
        let mut image = self
            .spare
            .pop()
            .expect("both buffers for copies of the guest's memory are in use");
        self.read_into(&mut image);
        image
    }

    /// Asserts that a copy of the file has unchanged guard pages. Makes the copy the expected
    /// contents of the memory.
    pub fn accept(&mut self, image: Vec<u8>) {
        let mut at = 0;
        for region in &REGIONS {
            assert_guard_pages(&image[at..region.offset as usize]);
            at = (region.offset + region.bytes) as usize;
        }
        assert_guard_pages(&image[at..]);
        let before = std::mem::replace(&mut self.image, image);
        self.spare.push(before);
    }
}

/// Asserts that all these bytes of the file are unchanged guard pages.
fn assert_guard_pages(bytes: &[u8]) {
    for page in bytes.chunks(PAGE as usize) {
        let same = *page == [GUARD_BYTE; PAGE as usize];
        assert!(
            same,
            "the daemon wrote to a guard page next to guest memory"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_range_may_span_adjacent_regions_but_no_gap() {
        let ram = Ram::new();
        assert_eq!(Ram::places(SEAM - 1, 2).map(|p| p.len()), Some(2));
        for (address, bytes) in [
            (BASE - 1, 1),
            (BASE - 1, 2),
            (SEAM + 2 * PAGE - 1, 2),
            (TOP + 2 * PAGE, 1),
            (TOP, 2 * PAGE + 1),
            (u64::MAX, 1),
            (BASE, u64::from(u32::MAX)),
        ] {
            assert_eq!(
                Ram::places(address, bytes),
                None,
                "places() accepted {bytes} B at {address:#x}, which are outside of guest memory"
            );
        }
        assert_eq!(Ram::read(&ram.image, TOP, 3), Some(vec![0; 3]));
    }
}
