// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Address space that is reserved once and never moves. Memory comes when it is touched, is zero
//! then, and goes when it is released. It is never dumped and, where the process may lock memory,
//! never swapped.

use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A reserved range of addresses.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    locked: bool,
}

// SAFETY: a Region owns its addresses; who may touch which bytes is up to its users.
unsafe impl Send for Region {}
// SAFETY: as above; the methods only compute addresses and call the kernel.
unsafe impl Sync for Region {}

impl Region {
    /// Bytes that can be used.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// It is never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.locked
    }

    /// The address at `offset`, which lies within.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.len, "offset {offset} of {}", self.len);
        // SAFETY: within the region, which is one mapping.
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
        /// The system has not as much address space: overcommit or RLIMIT_AS forbids it.
        pub(crate) fn reserve(len: usize) -> io::Result<Region> {
            let len = len.max(1).next_multiple_of(super::FRAME_BYTES);
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: a new anonymous mapping at an address that the kernel chooses.
            let (base, locked) = unsafe {
                let base =
                    mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
                // A huge page would bring memory that nobody asked for.
                madvise(base, len, Advice::LinuxNoHugepage).ok();
                madvise(base, len, Advice::LinuxDontDump)?;
                // Locked as it comes. Whether the limit suffices, the caller's set-up decides.
                (base, mlock_with(base, len, MlockFlags::ONFAULT).is_ok())
            };
            let base = NonNull::new(base.cast()).expect("the kernel never maps address 0");
            Ok(Region { base, len, locked })
        }

        /// Gives whole frames back to the system. They read as zero when they are touched again.
        ///
        /// # Safety
        /// Nothing else accesses them meanwhile, and nobody relies on what they hold.
        pub(crate) unsafe fn release(&self, offset: usize, len: usize) {
            assert!(offset + len <= self.len);
            let at = self.at(offset).as_ptr().cast();
            // SAFETY: within the mapping, and unused as the caller says.
            unsafe {
                if madvise(at, len, Advice::LinuxDontneedLocked).is_err() {
                    // Before Linux 5.18 not for locked memory: the range stays unlocked then.
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
            // SAFETY: the whole mapping, which nobody uses any more.
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) }
                .expect("a mapping of our own can be removed");
        }
    }
}

/// Miri knows no mmap: the same with the allocator.
#[cfg(miri)]
mod system {
    use super::{NonNull, Region, io};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, super::FRAME_BYTES).expect("a size that fits")
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
            // SAFETY: within the region, and unused as the caller says.
            unsafe { self.at(offset).write_bytes(0, len) };
        }
    }

    impl Drop for Region {
        fn drop(&mut self) {
            // SAFETY: allocated with the same layout.
            unsafe { dealloc(self.base.as_ptr(), layout(self.len)) };
        }
    }
}

/// Only a hint: any address will do.
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: it accesses nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// Cache lines of a page that are fetched ahead: the processor's own prefetching needs a few to begin,
/// and finds the rest.
const PREFETCH_LINES: usize = 4;

/// The beginning of a page or of what it was compressed to.
pub(crate) fn prefetch_lines(at: *const u8) {
    for line in 0..PREFETCH_LINES {
        prefetch(at.wrapping_add(line * 64));
    }
}

/// What memory comes and goes in.
pub(crate) const FRAME_BYTES: usize = 4096;

/// A type for which all bits zero are a value.
///
/// # Safety
/// They are, and it needs no drop.
pub(crate) unsafe trait Zeroed {}

// SAFETY: nothing is a value.
unsafe impl Zeroed for () {}

/// A table of records that never moves and costs memory only up to the highest that was used.
#[derive(Debug)]
pub(crate) struct Table<T> {
    region: Region,
    records: PhantomData<T>,
}

// SAFETY: it hands out shared references only.
unsafe impl<T: Sync> Sync for Table<T> {}
// SAFETY: it owns its records.
unsafe impl<T: Send> Send for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// Room for `capacity` records, all zero.
    ///
    /// # Errors
    /// As [`Region::reserve`].
    pub(crate) fn reserve(capacity: usize) -> io::Result<Table<T>> {
        const {
            assert!(align_of::<T>() <= FRAME_BYTES);
        }
        Ok(Table {
            region: Region::reserve(capacity * size_of::<T>())?,
            records: PhantomData,
        })
    }

    /// They are never swapped.
    pub(crate) fn is_locked(&self) -> bool {
        self.region.is_locked()
    }

    /// Records that there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.region.len() / size_of::<T>()
    }

    /// One of them.
    pub(crate) fn get(&self, i: u32) -> &T {
        let i = i as usize;
        assert!(i < self.capacity(), "record {i} of {}", self.capacity());
        // SAFETY: within the region, aligned since the region is, and zero or a T written through
        // a shared reference; the region lives as long as self.
        unsafe { self.region.at(i * size_of::<T>()).cast().as_ref() }
    }

    /// Brings one of them into the cache.
    pub(crate) fn prefetch(&self, i: u32) {
        prefetch(self.region.at(i as usize * size_of::<T>()).as_ptr());
    }
}
