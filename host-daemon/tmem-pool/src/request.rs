// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Types of the requests of a tenant, and of their results: puts, gets and references (REF).

use crate::config::Page;
use crate::heap::prefetch_lines;
use std::fmt;

/// Largest number of pages of one get: a full batch of the device. A get takes the tenant's lock
/// once for all its pages. With this number it holds the lock for about 10 µs.
pub const GET_PAGES_MAX: usize = 64;

/// Source of the contents of a page to put. A [`Page`] in memory that does not change is a source.
/// A source that reads memory of another process implements this trait, so that a put copies the
/// page only once.
pub trait PageSource {
    /// Copies the contents to `frame`, and returns true. Returns false if the contents cannot be
    /// read. The put then refuses the page and wipes the frame.
    ///
    /// A put calls this function at most once for each page, and holds no lock during the call, so
    /// that the function may wait. It does not call the function for a page for which it has no
    /// memory. It uses only the bytes in `frame`, so the memory that the function reads may change
    /// at any time.
    fn copy_to(&self, frame: &mut Page) -> bool;

    /// Prefetches the beginning of the contents into the processor's cache.
    fn prefetch(&self) {}
}

impl PageSource for Page {
    fn copy_to(&self, frame: &mut Page) -> bool {
        frame.copy_from_slice(self);
        true
    }

    fn prefetch(&self) {
        prefetch_lines(self.as_ptr());
    }
}

/// A page to put. The fields `object` and `index` are the page's key within the pool.
#[derive(Clone, Copy)]
pub struct Put<'a> {
    /// Number of the object, a part of a disk.
    pub object: u64,
    /// Number of the page within the object.
    pub index: u64,
    /// Cookie: a number that the guest chooses for this version of the page. A get must name it.
    pub cookie: u64,
    /// Hint of the guest: true if the page was active in the guest's page cache.
    pub workingset: bool,
    /// Contents of the page, or a source that copies them.
    pub page: &'a dyn PageSource,
}

impl fmt::Debug for Put<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Put")
            .field("object", &self.object)
            .field("index", &self.index)
            .field("cookie", &self.cookie)
            .field("workingset", &self.workingset)
            .finish_non_exhaustive()
    }
}

/// Result for one page of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutResult {
    /// The page is stored, and stays until it is removed or evicted.
    Stored,
    /// The page is not stored, and an older page under its key, if there was one, was dropped.
    Refused,
}

/// A get of consecutive pages of one object, one for each cookie.
#[derive(Clone, Copy, Debug)]
pub struct Get<'a> {
    /// Number of the object, a part of a disk.
    pub object: u64,
    /// Number of the first page within the object.
    pub index: u64,
    /// Cookies with which the pages were put, at most [`GET_PAGES_MAX`].
    pub cookies: &'a [u64],
    /// Bit mask: if bit n is 1, the engine may retain page n, that is, leave it in the pool although
    /// it returns the page. The engine decides this for each page.
    pub retain: u64,
    /// Largest cost of the get in nanoseconds. The get ends before a page that could exceed it.
    pub budget_ns: u64,
}

impl<'a> Get<'a> {
    /// Returns a get without a budget that retains no page.
    pub fn new(object: u64, index: u64, cookies: &'a [u64]) -> Get<'a> {
        Get {
            object,
            index,
            cookies,
            retain: 0,
            budget_ns: u64::MAX,
        }
    }
}

/// Result for one page of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetResult {
    /// The page was returned and is no longer in the pool.
    Hit {
        /// Cookie with which the page was put. It equals the cookie in the get.
        cookie: u64,
    },
    /// The page was returned and is retained: it stays in the pool, and is evicted before pages of
    /// the tenant that are not retained.
    Retained {
        /// Cookie with which the page was put. It equals the cookie in the get.
        cookie: u64,
    },
    /// The pool has no page with this key and cookie.
    Miss,
}

/// One page of a reference request (REF), by which the guest reports that it has evicted retained
/// pages unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ref {
    /// Number of the object, a part of a disk.
    pub object: u64,
    /// Number of the page within the object.
    pub index: u64,
    /// Cookie with which the page was put.
    pub cookie: u64,
}

/// Result of a flush in steps ([`Tenant::flush_some`](crate::Tenant::flush_some)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// True if all pages are dropped, and false if the budget did not suffice.
    pub is_complete: bool,
    /// Cost of the call in nanoseconds.
    pub cost_ns: u64,
}

impl Default for Flushed {
    /// Returns the result of a flush that has nothing to drop.
    fn default() -> Flushed {
        Flushed {
            is_complete: true,
            cost_ns: 0,
        }
    }
}
