// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The dirty log of a live migration. The daemon marks every guest page that it writes in the log.
//!
//! Each connection has one log. All memory regions of the connection refer to this log, each with
//! its own base address. The log therefore survives a change of the memory table, and disabling it
//! affects every region. The daemon writes guest memory only through vm-memory, which marks a page
//! after the write.

use crate::memory::mapping::Mapping;
use crate::memory::sigbus::Lost;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

/// Size in bytes of a page that one bit of the log stands for: VHOST_LOG_PAGE of the vhost-user
/// specification.
const LOG_PAGE_BYTES: u64 = 4096;

/// Maximum size of a dirty log in bytes. A log of this size covers 64 TiB of guest memory.
const LOG_BYTES_MAX: u64 = 1 << 31;

/// Dirty log of one connection.
#[derive(Debug, Default)]
pub struct DirtyLog {
    /// Whether logging is enabled: the VMM has set VHOST_F_LOG_ALL.
    enabled: AtomicBool,
    /// The mapping of the log; None before the VMM sends one. A thread that marks a page holds the
    /// lock for reading, so that no other thread replaces the mapping meanwhile.
    map: RwLock<Option<LogMap>>,
    /// Number of written pages that could not be marked. They are beyond the end of the log, or
    /// were written while logging was enabled and no log was mapped.
    missed: AtomicU64,
}

impl DirtyLog {
    /// Enables or disables logging, as the VMM requests with VHOST_F_LOG_ALL.
    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::SeqCst);
        if !enabled {
            *self.map.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// Replaces the memory of the log, as the VMM requests with SET_LOG_BASE.
    pub fn set_map(&self, map: LogMap) {
        *self.map.write().unwrap_or_else(PoisonError::into_inner) = Some(map);
    }

    /// Returns the number of written pages that could not be marked in the log.
    pub fn missed_pages(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    fn mark(&self, address: u64, length: usize) {
        if !self.enabled.load(Ordering::SeqCst) || length == 0 {
            return;
        }
        let first = address / LOG_PAGE_BYTES;
        let last = address.saturating_add(length as u64 - 1) / LOG_PAGE_BYTES;
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        for page in first..=last {
            let byte = map.as_ref().and_then(|map| map.byte(page / 8));
            match byte {
                Some(byte) => {
                    byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
                }
                None => {
                    self.missed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn is_marked(&self, address: u64) -> bool {
        let page = address / LOG_PAGE_BYTES;
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let byte = map.as_ref().and_then(|map| map.byte(page / 8));
        byte.is_some_and(|byte| byte.load(Ordering::SeqCst) & (1 << (page % 8)) != 0)
    }
}

/// Memory of the dirty log, which the VMM shares with the daemon. The daemon accesses it only by
/// atomic operations.
#[derive(Debug)]
pub struct LogMap(Mapping);

impl LogMap {
    /// Maps `length` bytes of a file that [`crate::memory::table::check_file`] accepted. The SIGBUS
    /// handler sets `lost` when a page of the mapping is lost.
    ///
    /// # Errors
    /// The length is out of range, or the system cannot map the file.
    pub fn new(file: &File, offset: u64, length: u64, lost: &Arc<Lost>) -> std::io::Result<LogMap> {
        if length == 0 || length > LOG_BYTES_MAX {
            return Err(std::io::Error::other(format!(
                "a dirty log of {length} bytes: it must have 1 to {LOG_BYTES_MAX}"
            )));
        }
        Ok(LogMap(Mapping::new(file, offset, length as usize, lost)?))
    }

    fn byte(&self, number: u64) -> Option<&AtomicU8> {
        if number >= self.0.bytes() as u64 {
            return None;
        }
        // SAFETY: the byte is inside the mapping, which lives as long as self. Other processes also
        // change the log only by atomic operations, and AtomicU8 needs no alignment.
        Some(unsafe { &*self.0.start().add(number as usize).cast::<AtomicU8>() })
    }
}

/// The part of the dirty log that belongs to one memory region.
#[derive(Debug)]
pub struct RegionLog {
    /// The dirty log of the connection. All memory regions of the connection use it.
    pub log: Arc<DirtyLog>,
    /// Guest physical address of the region.
    pub base: u64,
}

/// The part of the dirty log that belongs to a slice of a memory region.
#[derive(Clone, Copy, Debug)]
pub struct SliceLog<'a> {
    log: &'a DirtyLog,
    base: u64,
}

impl<'a> WithBitmapSlice<'a> for RegionLog {
    type S = SliceLog<'a>;
}

impl Bitmap for RegionLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.log.mark(self.base + offset as u64, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_marked(self.base + offset as u64)
    }

    fn slice_at(&self, offset: usize) -> SliceLog<'_> {
        SliceLog {
            log: &self.log,
            base: self.base + offset as u64,
        }
    }
}

impl<'a> WithBitmapSlice<'_> for SliceLog<'a> {
    type S = SliceLog<'a>;
}

impl BitmapSlice for SliceLog<'_> {}

impl<'a> Bitmap for SliceLog<'a> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.log.mark(self.base + offset as u64, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_marked(self.base + offset as u64)
    }

    fn slice_at(&self, offset: usize) -> SliceLog<'a> {
        SliceLog {
            log: self.log,
            base: self.base + offset as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn a_lost_page_of_the_dirty_log_is_reported() {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).expect("cannot create a memfd");
        ftruncate(&file, 8192).expect("cannot set the length of the memfd");
        let lost = Arc::default();
        let map = LogMap::new(&file.into(), 0, 8192, &lost).expect("cannot map the log");
        crate::memory::sigbus::take_away(map.0.start(), 4096);
        let log = DirtyLog::default();
        log.set_enabled(true);
        log.set_map(map);
        log.mark(8 * LOG_PAGE_BYTES * 4096, 1);
        assert!(
            !lost.is_lost(),
            "marking a page whose part of the log still exists was reported as a loss"
        );
        log.mark(0, 1);
        assert!(lost.is_lost());
    }
}
