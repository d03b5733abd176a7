// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mapping of memory that a VM's front end shares. The daemon survives the loss of a page of the
//! mapping, and unmaps it in steps.
//!
//! Unmapping 64 GiB of touched memory takes the kernel seconds, during which it holds the process's
//! mmap lock. All threads need that lock to map memory and, before Linux 6.4, to fault in a page.
//! Drop therefore first releases the pages in small steps, each of which holds the lock for less
//! than a millisecond. It then unmaps address ranges that contain no pages. Out of scope: whether a
//! file may be mapped, see `table.rs`.

use crate::memory::sigbus::{Lost, Watch, page_bytes};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Number of bytes whose pages one step of unmapping releases. A step takes 0.3 ms for 4 KiB pages
/// on the machine of docs/benchmarks. With steps of this size, unmapping the largest possible
/// mapping, 8 TiB without pages, takes two seconds.
const GIVE_BACK_BYTES: usize = 4 << 20;

/// Number of bytes of address space, without pages, that one step unmaps. A step takes 0.1 ms,
/// because of the page tables.
const UNMAP_BYTES: usize = 1 << 30;

/// Shared, readable and writable mapping of a part of a file.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
    page_bytes: usize,
    /// Registration of the mapping with the SIGBUS handler. None during unmapping, because the
    /// kernel may reuse the address range at once.
    watch: Option<Watch>,
}

// SAFETY: the value owns the mapping and never accesses its memory. Code that gets the mapping's
// address is responsible for its own accesses.
unsafe impl Send for Mapping {}
// SAFETY: the value owns the mapping and never accesses its memory, so methods that take `&self`
// cannot race.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a part of a file that [`crate::memory::table::check_file`] accepted. The SIGBUS handler
    /// sets `lost` when a page of the mapping is lost.
    ///
    /// # Errors
    /// The system cannot map the file, or the mapping cannot be registered with the SIGBUS handler.
    pub fn new(file: &File, offset: u64, bytes: usize, lost: &Arc<Lost>) -> io::Result<Mapping> {
        let file_page_bytes = page_bytes(file)?;
        // MAP_NORESERVE must not be set: if no huge page were free, an access to a huge page of the
        // mapping could then end the daemon. For files of other pages the flag makes no difference.
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let anywhere = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address of the new mapping, so it overlaps no other
        // mapping.
        let start = unsafe { rustix::mm::mmap(anywhere, bytes, prot, flags, file, offset) }?;
        // From here on, dropping `mapping` unmaps the range if a later step fails.
        let mut mapping = Mapping {
            start: start.cast(),
            bytes,
            page_bytes: file_page_bytes as usize,
            watch: None,
        };
        // Core dumps of the daemon must not contain guest memory. SAFETY: the range belongs to the
        // mapping, and the advice changes none of its bytes.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontDump) }?;
        let watch = Watch::new(mapping.start, bytes, file_page_bytes, lost)?;
        mapping.watch = Some(watch);
        Ok(mapping)
    }

    /// Returns the address of the mapping's first byte. It is valid as long as the value lives.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the length of the mapping in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.watch.take());
        for step in steps(self.bytes, self.page_bytes) {
            let (Step::GiveBack(range) | Step::Unmap(range)) = &step;
            let at = self.start.wrapping_add(range.start).cast();
            // SAFETY: the range belongs to this mapping, which nothing uses any more, and ranges
            // that were unmapped are not accessed again. Releasing a page does not change the file.
            // Errors are ignored: Linux before 5.18 cannot release single huge pages, of which
            // there are few, and a range that the kernel cannot unmap stays mapped.
            let _ = unsafe {
                match step {
                    Step::GiveBack(_) => {
                        rustix::mm::madvise(at, range.len(), Advice::LinuxDontNeed)
                    }
                    Step::Unmap(_) => rustix::mm::munmap(at, range.len()),
                }
            };
        }
    }
}

/// One step of unmapping a mapping: releases pages, or unmaps a part of the address range.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    GiveBack(Range<usize>),
    Unmap(Range<usize>),
}

/// Returns the steps that unmap a mapping of `bytes` bytes whose pages have `page_bytes` bytes.
fn steps(bytes: usize, page_bytes: usize) -> impl Iterator<Item = Step> {
    // The kernel can neither release nor unmap a part of a huge page. Each step therefore covers a
    // multiple of the page size.
    let step = move |most: usize| most.next_multiple_of(page_bytes.max(1));
    let pieces = move |range: Range<usize>, most: usize| {
        let end = range.end;
        range
            .step_by(most)
            .map(move |from| from..end.min(from.saturating_add(most)))
    };
    pieces(0..bytes, step(UNMAP_BYTES)).flat_map(move |range| {
        let given_back = pieces(range.clone(), step(GIVE_BACK_BYTES)).map(Step::GiveBack);
        given_back.chain(std::iter::once(Step::Unmap(range)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::sigbus::take_away;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    const PAGE: usize = 4096;

    /// Returns true if a file with the given name is mapped, or if a mapping consists of exactly
    /// the page at address `page`. Other mappings at that address do not count, because other
    /// threads may map memory there after the page was unmapped.
    fn is_mapped(name: &str, page: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("cannot read /proc/self/maps");
        let own = format!("{page:x}-{:x} ", page + PAGE);
        maps.lines()
            .any(|line| line.contains(name) || line.starts_with(&own))
    }

    #[test]
    fn dropping_a_mapping_unmaps_it_and_keeps_the_content_of_its_file() {
        // The mapping has the length of two full steps of unmapping and one page.
        let bytes = 2 * UNMAP_BYTES + PAGE;
        let file = memfd_create("all-of-it", MemfdFlags::CLOEXEC).expect("cannot create a memfd");
        ftruncate(&file, bytes as u64).expect("cannot set the length of the memfd");
        let file = File::from(file);
        let lost = Arc::<Lost>::default();
        let map = || Mapping::new(&file, 0, bytes, &lost).expect("cannot map the file");
        let touched = [0, GIVE_BACK_BYTES, UNMAP_BYTES - 1, UNMAP_BYTES, bytes - 1];
        let mapping = map();
        let at = |mapping: &Mapping, byte| mapping.start().wrapping_add(byte);
        for byte in touched {
            // SAFETY: the address is inside the mapping, which is only accessed by volatile
            // operations.
            unsafe { at(&mapping, byte).write_volatile(7) };
        }
        // The test takes one page away; the SIGBUS handler replaces it with a page of the daemon.
        take_away(at(&mapping, 2 * GIVE_BACK_BYTES), PAGE);
        // SAFETY: the address is inside the mapping, which is only accessed by volatile operations.
        let gone = unsafe { at(&mapping, 2 * GIVE_BACK_BYTES).read_volatile() };
        assert!(gone == 0 && lost.is_lost());
        let gone = at(&mapping, 2 * GIVE_BACK_BYTES).addr();
        let none = "/memfd:none";
        assert!(is_mapped("/memfd:all-of-it", 0) && is_mapped(none, gone));
        drop(mapping);
        assert!(
            !is_mapped("/memfd:all-of-it", gone),
            "a part of the dropped mapping is still mapped"
        );
        let mapping = map();
        for byte in touched {
            // SAFETY: the address is inside the mapping, which is only accessed by volatile
            // operations.
            assert_eq!(unsafe { at(&mapping, byte).read_volatile() }, 7);
        }
    }

    /// Unmapping releases each page once, and unmaps it once after that.
    #[test]
    fn unmapping_releases_each_page_before_the_page_is_unmapped() {
        const GIB: usize = 1 << 30;
        for page_bytes in [PAGE, 2 << 20, GIB, 16 * GIB] {
            for pages in [1, 2, 3, 1025, 100_000] {
                let bytes = page_bytes * pages;
                if bytes > 1 << 40 {
                    continue;
                }
                let (mut given_back, mut unmapped) = (0, 0);
                for step in steps(bytes, page_bytes) {
                    let (range, at, most) = match step {
                        Step::GiveBack(range) => (range, &mut given_back, GIVE_BACK_BYTES),
                        Step::Unmap(range) => {
                            assert_eq!(
                                range.end, given_back,
                                "a range was unmapped before its pages were released"
                            );
                            (range, &mut unmapped, UNMAP_BYTES)
                        }
                    };
                    assert_eq!(range.start, *at);
                    assert!(range.len() <= most.max(page_bytes) && !range.is_empty());
                    assert!(range.end.is_multiple_of(page_bytes));
                    *at = range.end;
                }
                assert_eq!((given_back, unmapped), (bytes, bytes));
            }
        }
    }
}
