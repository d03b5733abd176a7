// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Region: address space that is reserved once and never moves. The kernel provides zeroed memory
//! for a page of the region when the page is first touched, and takes the memory back when the page
//! is released. The memory is never dumped and, where the process may lock memory, never swapped.

use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A reserved range of addresses, whose memory can be returned to the system page by page.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    locked: bool,
}

// SAFETY: a Region owns its addresses. Its users decide which thread may touch which bytes.
unsafe impl Send for Region {}
// SAFETY: the methods only compute addresses and call the kernel, so several threads may call them
// at the same time.
unsafe impl Sync for Region {}

impl Region {
    /// Returns the length of the region in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the region's memory is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.locked
    }

    /// Returns the address at `offset`, which must lie within the region.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(
            offset < self.len,
            "offset {offset} is outside of a region of {} B",
            self.len
        );
        // SAFETY: the address is within the region, which is one mapping.
        unsafe { self.base.add(offset) }
    }
}

#[cfg(not(miri))]
mod system {
    use super::{NonNull, Region, io};
    use rustix::mm::{
        Advice, MapFlags, MlockFlags, ProtFlags, madvise, mlock_with, mmap_anonymous,
    };
    use std::ptr::null_mut;

    impl Region {
        /// Reserves at least `len` bytes.
        ///
        /// # Errors
        /// The system does not provide the address space: overcommit or RLIMIT_AS forbids it.
        pub(crate) fn reserve(len: usize) -> io::Result<Region> {
            let len = len.max(1).next_multiple_of(super::FRAME_BYTES);
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: the kernel chooses the address of the new anonymous mapping, so it overlaps
            // no memory in use.
            let (base, locked) = unsafe {
                let base =
                    mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
                // Forbid huge pages: a huge page would allocate memory for addresses that were
                // never touched.
                madvise(base, len, Advice::LinuxNoHugepage).ok();
                madvise(base, len, Advice::LinuxDontDump)?;
                // Lock each page when it is touched. If the process's limit of locked memory
                // (RLIMIT_MEMLOCK) does not allow that, the memory stays unlocked.
                (base, mlock_with(base, len, MlockFlags::ONFAULT).is_ok())
            };
            let base =
                NonNull::new(base.cast()).expect("the kernel returned address 0 for a mapping");
            Ok(Region { base, len, locked })
        }

        /// Gives the memory of whole frames back to the system. The frames read as zero when they
        /// are touched again.
        ///
        /// # Safety
        /// No other code accesses the frames during the call, and no code relies on their contents
        /// afterwards.
        pub(crate) unsafe fn release(&self, offset: usize, len: usize) {
            assert!(offset + len <= self.len);
            let at = self.at(offset).as_ptr().cast();
            // SAFETY: the range is within the mapping, and the caller guarantees that it is unused.
            unsafe {
                if madvise(at, len, Advice::LinuxDontneedLocked).is_err() {
                    // Before Linux 5.18, madvise refuses to release locked memory. On such a
                    // kernel, unlock the range first.
                    rustix::mm::munlock(at, len).ok();
                    if madvise(at, len, Advice::LinuxDontNeed).is_err() {
                        std::ptr::write_bytes(at.cast::<u8>(), 0, len);
                    }
                    mlock_with(at, len, MlockFlags::ONFAULT).ok();
                }
            }
        }
    }

    impl Drop for Region {
        fn drop(&mut self) {
            // SAFETY: this is the whole mapping, and no code uses it any more.
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) }
                .expect("cannot unmap a region of the heap");
        }
    }
}

/// Implementation of [`Region`] for Miri, which does not support mmap: the memory comes from the
/// allocator.
#[cfg(miri)]
mod system {
    use super::{NonNull, Region, io};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, super::FRAME_BYTES)
            .expect("the region's size is invalid for an allocation")
    }

    impl Region {
        pub(crate) fn reserve(len: usize) -> io::Result<Region> {
            let len = len.max(1).next_multiple_of(super::FRAME_BYTES);
            // SAFETY: the size is not 0.
            let base = unsafe { alloc_zeroed(layout(len)) };
            let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
            let locked = false;
            Ok(Region { base, len, locked })
        }

        pub(crate) unsafe fn release(&self, offset: usize, len: usize) {
            assert!(offset + len <= self.len);
            // SAFETY: the range is within the region, and the caller guarantees that it is unused.
            unsafe { self.at(offset).write_bytes(0, len) };
        }
    }

    impl Drop for Region {
        fn drop(&mut self) {
            // SAFETY: the memory was allocated with this layout.
            unsafe { dealloc(self.base.as_ptr(), layout(self.len)) };
        }
    }
}

/// Prefetches the cache line at an address. The prefetch is only a hint to the processor, so any
/// address is allowed.
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch does not access memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// Number of cache lines that [`prefetch_lines`] prefetches. The processor's own prefetcher needs a
/// few lines to begin, and then fetches the others.
const PREFETCH_LINES: usize = 4;

/// Prefetches the first cache lines of a page or of its compressed form.
pub(crate) fn prefetch_lines(at: *const u8) {
    for line in 0..PREFETCH_LINES {
        prefetch(at.wrapping_add(line * LINE_BYTES));
    }
}

/// Bytes of a frame, the unit in which the process takes memory from the system and gives it back.
pub(crate) const FRAME_BYTES: usize = 4096;

/// A type for which all bits zero are a valid value.
///
/// # Safety
/// All bits zero are a valid value of the type, and the type needs no drop.
pub(crate) unsafe trait Zeroed {}

// SAFETY: the unit type has no bits.
unsafe impl Zeroed for () {}
// SAFETY: zero is a valid number.
unsafe impl Zeroed for u32 {}
// SAFETY: zero is a valid number.
unsafe impl<const N: usize> Zeroed for [u16; N] {}

/// A table of records in reserved address space. The table never moves, and it takes memory only up
/// to the highest record that was used.
#[derive(Debug)]
pub(crate) struct Table<T> {
    region: Region,
    records: PhantomData<T>,
}

// SAFETY: a table hands out shared references only.
unsafe impl<T: Sync> Sync for Table<T> {}
// SAFETY: a table owns its records.
unsafe impl<T: Send> Send for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// Reserves a table of `capacity` records, all zero.
    ///
    /// # Errors
    /// Errors of [`Region::reserve`].
    pub(crate) fn reserve(capacity: usize) -> io::Result<Table<T>> {
        const {
            assert!(align_of::<T>() <= FRAME_BYTES);
        }
        Ok(Table {
            region: Region::reserve(capacity * size_of::<T>())?,
            records: PhantomData,
        })
    }

    /// Returns whether the table's memory is locked in RAM, so that it is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.region.is_locked()
    }

    /// Returns the largest number of records of the table.
    pub(crate) fn capacity(&self) -> usize {
        self.region.len() / size_of::<T>()
    }

    /// Returns the record with number `i`. Panics if the table has no such record.
    pub(crate) fn get(&self, i: u32) -> &T {
        let i = i as usize;
        assert!(
            i < self.capacity(),
            "record {i} does not exist: the table has {} records",
            self.capacity()
        );
        // SAFETY: the record is within the region and aligned, since the region is. It is zero or a
        // T written through a shared reference. The region lives as long as self.
        unsafe { self.region.at(i * size_of::<T>()).cast().as_ref() }
    }

    /// Prefetches the record with number `i` into the processor's cache.
    pub(crate) fn prefetch(&self, i: u32) {
        prefetch(self.region.at(i as usize * size_of::<T>()).as_ptr());
    }
}
