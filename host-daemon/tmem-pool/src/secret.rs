// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory outside of the store for guests' bytes, such as scratch pages. Like the memory of the
//! store, it is never in a core dump and, where the process may lock memory, never swapped.

use crate::config::{PAGE_SIZE, Page};
use crate::heap::Region;
use crate::poison;
use crate::sync::Mutex;
use std::io;
use std::ops::Range;
use std::slice;

/// Pages of memory for secret bytes, which no other code can access. They are zero at first.
#[derive(Debug)]
pub struct SecretPages {
    region: Region,
    pages: usize,
}

impl SecretPages {
    /// Allocates this number of pages, at least one.
    ///
    /// # Errors
    /// The system does not provide the address space.
    pub fn new(pages: usize) -> io::Result<SecretPages> {
        let region = Region::reserve(pages * PAGE_SIZE)?;
        Ok(SecretPages { region, pages })
    }

    /// Returns whether the pages are locked in RAM, so that they are never swapped.
    pub fn is_locked(&self) -> bool {
        self.region.is_locked()
    }

    /// Returns the memory as a slice of pages.
    pub fn pages(&mut self) -> &mut [Page] {
        // SAFETY: the region has `self.pages` pages, and bytes need no alignment. No other code has
        // the address of these pages, and `self` is borrowed for as long as the slice lives. Every
        // byte value is valid.
        unsafe { slice::from_raw_parts_mut(self.region.at(0).cast().as_ptr(), self.pages) }
    }

    /// Overwrites all pages with zeroes.
    pub fn wipe(&mut self) {
        self.wipe_some(0..self.pages);
    }

    /// Overwrites the pages of a range with zeroes.
    pub fn wipe_some(&mut self, range: Range<usize>) {
        let pages = &mut self.pages()[range];
        pages.as_flattened_mut().fill(0);
        zeroize::optimization_barrier(&*pages);
    }
}

/// Name of the data that the lock of the scratch pages guards, for log messages.
const SCRATCH: &str = "the scratch pages";

/// Scratch pages that no thread is using, in pairs, all of them zeroed. The lock is a leaf lock: its
/// holder takes no other lock.
#[derive(Debug, Default)]
pub(crate) struct ScratchPages(Mutex<Vec<SecretPages>>);

impl ScratchPages {
    /// Takes two scratch pages. Returns None if the system has no memory.
    pub(crate) fn take(&self) -> Option<SecretPages> {
        let kept = poison::guard_or_abort(self.0.lock(), SCRATCH).pop();
        kept.or_else(|| SecretPages::new(2).ok())
    }

    /// Takes scratch pages back. Wipes them first, because they may contain bytes of a tenant, which
    /// must not stay in memory after the tenant departs.
    pub(crate) fn put_back(&self, mut pages: SecretPages) {
        pages.wipe();
        poison::guard_or_abort(self.0.lock(), SCRATCH).push(pages);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn secret_pages_are_locked_and_not_in_core_dumps() {
        let mut secret = SecretPages::new(3).unwrap();
        secret.pages()[1][7] = 1;
        let at = secret.pages().as_ptr() as u64;
        let flags = flags_of(at);
        assert!(
            flags.iter().any(|flag| flag == "dd"),
            "the mapping would be in a core dump: its flags are {flags:?}, without \"dd\""
        );
        let locked = flags.iter().any(|flag| flag == "lo");
        assert_eq!(
            secret.is_locked(),
            locked,
            "is_locked() disagrees with the mapping's flags {flags:?}"
        );
        secret.wipe();
        assert_eq!(secret.pages().as_flattened(), [0; 3 * PAGE_SIZE]);
    }

    /// Returns the flags (VmFlags in /proc/self/smaps) of the mapping that contains an address.
    fn flags_of(at: u64) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            let address = |text| u64::from_str_radix(text, 16).ok();
            let first = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            if let Some((start, end)) = first
                && let (Some(start), Some(end)) = (address(start), address(end))
            {
                inside = (start..end).contains(&at);
            } else if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
                return flags.split_whitespace().map(String::from).collect();
            }
        }
        panic!("no mapping in /proc/self/smaps contains the address {at:#x}");
    }
}
