// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's memory: three regions in one file, two of which meet, one of which ends near 2^64; and
//! between them pages that are nobody's, which nothing may write.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;

const PAGE: u64 = 4096;

/// A region: guest address, the front end's address, place in the file, bytes.
struct Region {
    guest: u64,
    user: u64,
    offset: u64,
    bytes: u64,
}

/// What the first region begins at.
pub const BASE: u64 = 0x10000;
/// Pages of the first region: rings, tables, and room for the largest requests.
const PAGES: u64 = 80;
/// Where its last page ends and the second region begins.
pub const SEAM: u64 = BASE + PAGES * PAGE;
/// The region that ends near 2^64.
pub const TOP: u64 = 0xffff_ffff_ffff_0000;

/// Those that meet do not in the file, nor in the front end.
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

/// With a page before, between and after the regions.
const FILE_BYTES: u64 = (PAGES + 8) * PAGE;

/// Byte of the pages that are nobody's.
const NOBODYS: u8 = 0xa5;

/// Guest memory and what this side knows of it.
pub struct Ram {
    /// Shared with the daemon.
    pub file: Arc<File>,
    /// All of the file as it was when the daemon had last done something.
    pub image: Vec<u8>,
    /// Room for two copies more, since to make it anew takes longer than an input.
    spare: Vec<Vec<u8>>,
}

thread_local! {
    /// The memory of the input before.
    static LAST: RefCell<Option<Ram>> = const { RefCell::new(None) };
}

impl Ram {
    /// Zeroed memory.
    pub fn new() -> Ram {
        let mut ram = LAST.take().unwrap_or_else(Ram::create);
        let mut image = ram.copy();
        ram.read_into(&mut image);
        for region in &REGIONS {
            let all = region.offset as usize..(region.offset + region.bytes) as usize;
            for page in all.step_by(PAGE as usize) {
                let bytes = &mut image[page..page + PAGE as usize];
                // Whole pages at once: a fuzzer counts each comparison.
                if *bytes != [0; PAGE as usize] {
                    bytes.fill(0);
                    ram.file.write_all_at(bytes, page as u64).expect("as long");
                }
            }
        }
        ram.accept(image);
        ram
    }

    fn create() -> Ram {
        let fd = memfd_create("tmem-fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let fd = fd.expect("memory");
        ftruncate(&fd, FILE_BYTES).expect("memory");
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).expect("its own file");
        let image = vec![NOBODYS; FILE_BYTES as usize];
        let file = Arc::new(File::from(fd));
        file.write_all_at(&image, 0).expect("as long");
        let spare = vec![image.clone(), image.clone()];
        Ram { file, image, spare }
    }

    /// Keeps it for the next input.
    pub fn keep(self) {
        LAST.set(Some(self));
    }

    /// A copy of the image.
    pub fn copy(&mut self) -> Vec<u8> {
        let mut copy = self.spare.pop().expect("two are enough");
        copy.copy_from_slice(&self.image);
        copy
    }

    /// A copy is not needed any more.
    pub fn drop_copy(&mut self, copy: Vec<u8>) {
        self.spare.push(copy);
    }

    fn read_into(&self, image: &mut [u8]) {
        self.file.read_exact_at(image, 0).expect("as long");
    }

    /// The memory table.
    pub fn table(&self) -> (Vec<VhostUserMemoryRegion>, Vec<File>) {
        let spec = |r: &Region| VhostUserMemoryRegion::new(r.guest, r.bytes, r.user, r.offset);
        let file = |_| self.file.try_clone().expect("a descriptor");
        let specs = REGIONS.iter().map(spec).collect();
        (specs, REGIONS.iter().map(file).collect())
    }

    /// What the front end calls an address of the first region.
    pub fn user(address: u64) -> u64 {
        address - REGIONS[0].guest + REGIONS[0].user
    }

    /// Places in the file of so many bytes at a guest address; None: not all are memory.
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
            // Past the last byte of all there is no more memory.
            at = at.checked_add(now).or((left == 0).then_some(0))?;
        }
        Some(places)
    }

    /// Bytes at a guest address as they are in an image.
    pub fn read(image: &[u8], address: u64, bytes: u64) -> Option<Vec<u8>> {
        let places = Ram::places(address, bytes)?;
        let part = |(from, count): &(usize, usize)| &image[*from..from + count];
        Some(places.iter().map(part).collect::<Vec<_>>().concat())
    }

    /// Two bytes at a guest address that is memory.
    pub fn u16_of(image: &[u8], address: u64) -> u16 {
        let bytes = Ram::read(image, address, 2).expect("memory");
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// Writes as the guest; false: not all of it is memory, and nothing is written.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> bool {
        let Some(places) = Ram::places(address, bytes.len() as u64) else {
            return false;
        };
        let mut rest = bytes;
        for (from, count) in places {
            let (now, later) = rest.split_at(count);
            self.image[from..from + count].copy_from_slice(now);
            self.file.write_all_at(now, from as u64).expect("as long");
            rest = later;
        }
        true
    }

    /// What is in the file now, to be accepted or dropped.
    pub fn current(&mut self) -> Vec<u8> {
        let mut image = self.spare.pop().expect("two are enough");
        self.read_into(&mut image);
        image
    }

    /// Takes an image for what the memory is, whose pages that are nobody's are as they were.
    pub fn accept(&mut self, image: Vec<u8>) {
        let mut at = 0;
        for region in &REGIONS {
            nobodys(&image[at..region.offset as usize]);
            at = (region.offset + region.bytes) as usize;
        }
        nobodys(&image[at..]);
        let before = std::mem::replace(&mut self.image, image);
        self.spare.push(before);
    }
}

/// Pages between regions are as they were.
fn nobodys(bytes: &[u8]) {
    for page in bytes.chunks(PAGE as usize) {
        let same = *page == [NOBODYS; PAGE as usize];
        assert!(same, "memory was written that is not the guest's");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_found_over_a_seam_and_nowhere_else() {
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
            assert_eq!(Ram::places(address, bytes), None, "{address:#x} {bytes}");
        }
        assert_eq!(Ram::read(&ram.image, TOP, 3), Some(vec![0; 3]));
    }
}
