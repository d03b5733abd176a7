// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a front end shares, mapped into the daemon: watched for loss, unmapped bit by bit.
//!
//! To unmap 64 GiB that were touched takes the kernel seconds, with the lock held that all threads
//! need to map anything, and before Linux 6.4 to touch a page for the first time. So pages are given
//! back in small pieces before, each of which holds it for less than a millisecond, and what is then
//! unmapped holds none. Never here: whether a file is fit to be mapped; see `memory.rs`.

use crate::memory::sigbus::{Lost, Watch, page_bytes};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of pages given back at once: 0.3 ms for 4 KiB pages on the machine of docs/benchmarks, and
/// so much that the largest mapping, 8 TiB that hold nothing, is gone in two seconds.
const GIVE_BACK_BYTES: usize = 4 << 20;

/// Bytes unmapped at once, which hold no page any more: 0.1 ms, for the tables that held them.
const UNMAP_BYTES: usize = 1 << 30;

/// Bytes of a file, mapped readable, writable and shared.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
    page_bytes: usize,
    /// None while it is being unmapped: the place may be another's at once.
    watch: Option<Watch>,
}

// SAFETY: the value owns the mapping, and never accesses it; what others may do with its address is
// theirs to say.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a part of a file that [`crate::memory::table::check_file`] has found good; `lost` is told when
    /// a page of it has gone.
    ///
    /// # Errors
    /// The system does not map or watch it.
    pub fn new(file: &File, offset: u64, bytes: usize, lost: &Arc<Lost>) -> io::Result<Mapping> {
        let file_page_bytes = page_bytes(file)?;
        // Not NORESERVE, which for huge pages means that touching one may end the daemon when there is
        // none left; for others it makes no difference.
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let anywhere = std::ptr::null_mut();
        // SAFETY: a fresh shared mapping at an address of the kernel's choice touches nothing that
        // exists.
        let start = unsafe { rustix::mm::mmap(anywhere, bytes, prot, flags, file, offset) }?;
        // Whatever fails from here on unmaps it.
        let mut mapping = Mapping {
            start: start.cast(),
            bytes,
            page_bytes: file_page_bytes as usize,
            watch: None,
        };
        // A core dump of the daemon must not hold guests' memory.
        // SAFETY: the range is the mapping's own, and the advice changes none of its bytes.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontDump) }?;
        let watch = Watch::new(mapping.start, bytes, file_page_bytes, lost)?;
        mapping.watch = Some(watch);
        Ok(mapping)
    }

    /// Its first byte, for as long as this lives.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its length.
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
            // SAFETY: a part of the mapping that this value owns and nobody uses any more; what was
            // unmapped before is not touched again. The file keeps its pages. Errors: the kernel does
            // not give back huge pages one by one before 5.18, they are few; a part that is not
            // unmapped, which the kernel has no reason for, stays the daemon's.
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

/// What is done to a mapping, one after the other.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    GiveBack(Range<usize>),
    Unmap(Range<usize>),
}

/// How a mapping of so many bytes, whole pages of such a size, is unmapped.
fn steps(bytes: usize, page_bytes: usize) -> impl Iterator<Item = Step> {
    // A part of a huge page can be neither.
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

    /// Of the only file of that name, or of one page that begins there: others map where it was at any time.
    fn is_mapped(name: &str, page: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let own = format!("{page:x}-{:x} ", page + PAGE);
        maps.lines()
            .any(|line| line.contains(name) || line.starts_with(&own))
    }

    #[test]
    fn all_of_it_is_unmapped_and_the_file_keeps_its_bytes() {
        // Two steps of unmapping and a rest of one page.
        let bytes = 2 * UNMAP_BYTES + PAGE;
        let file = memfd_create("all-of-it", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, bytes as u64).expect("its length");
        let file = File::from(file);
        let lost = Arc::<Lost>::default();
        let map = || Mapping::new(&file, 0, bytes, &lost).expect("mapped");
        let touched = [0, GIVE_BACK_BYTES, UNMAP_BYTES - 1, UNMAP_BYTES, bytes - 1];
        let mapping = map();
        let at = |mapping: &Mapping, byte| mapping.start().wrapping_add(byte);
        for byte in touched {
            // SAFETY: inside of the mapping, which is only accessed so.
            unsafe { at(&mapping, byte).write_volatile(7) };
        }
        // One has gone, and the daemon's own is in its place.
        take_away(at(&mapping, 2 * GIVE_BACK_BYTES), PAGE);
        // SAFETY: as above.
        let gone = unsafe { at(&mapping, 2 * GIVE_BACK_BYTES).read_volatile() };
        assert!(gone == 0 && lost.is_lost());
        let gone = at(&mapping, 2 * GIVE_BACK_BYTES).addr();
        let none = "/memfd:none";
        assert!(is_mapped("/memfd:all-of-it", 0) && is_mapped(none, gone));
        drop(mapping);
        assert!(!is_mapped("/memfd:all-of-it", gone), "a part is left");
        let mapping = map();
        for byte in touched {
            // SAFETY: as above.
            assert_eq!(unsafe { at(&mapping, byte).read_volatile() }, 7);
        }
    }

    /// In pieces, no page twice, and none unmapped that was not given back.
    #[test]
    fn pages_are_given_back_before_they_are_unmapped() {
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
                            assert_eq!(range.end, given_back, "not given back before");
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
