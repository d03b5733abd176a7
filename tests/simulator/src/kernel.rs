// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Model of a guest's files: page cache, disk, and the last written contents.
//!
//! Where the kernel module has hooks, this model calls the model of the driver: when a page is
//! overwritten, truncated, written past the page cache or evicted. The model compares the result of
//! each read with the last written contents, byte by byte. A snapshot of the guest's memory
//! restores page cache and driver, and a snapshot of the disk restores the disk.

use std::collections::{BTreeMap, BTreeSet};

use tmem_model::Content;

use crate::content::{self, Version};
use crate::driver::{DEADLINE_NS, DriverModel, FilePage, Port};
use crate::mutation::Mutation;

/// Number of files of a guest.
pub const FILES: u32 = 3;
/// Number of pages of each file.
pub const PAGES: u64 = 18;
/// Number of adjacent pages in a group. Each group of a file is in a chunk (256 pages) of its own.
const GROUP: u64 = 6;

/// Number of the page that contains the end of each file. The model restores the length of a
/// truncated file at once, so this page is always the same one.
const END: u64 = PAGES - 1;

/// Returns the page index of the page that contains the end of a file.
pub fn index_of_end() -> u64 {
    index_of(END)
}

/// Converts the number of a file's page, 0 to [`PAGES`] - 1, to its page index in the file. Groups
/// of adjacent pages get page indexes in different chunks.
pub fn index_of(page: u64) -> u64 {
    page % GROUP + ((page / GROUP) << virtio_tmem::CHUNK_SHIFT)
}

/// Version (number of the last write) of each page. A page without an entry is zero.
pub type Pages = BTreeMap<FilePage, Version>;

#[derive(Clone, Debug)]
struct Cached {
    version: Version,
    dirty: bool,
    used_again: bool,
    /// Whether the cached page is clean but older than the page on the disk. A reader has cached it
    /// during a direct write that failed.
    old: bool,
    /// Whether the page's bytes behind the end of the file are not zero, because a store through a
    /// mapping changed them. This matters only for the page with the end of the file. When the page
    /// is read from the disk again, these bytes are zero.
    behind_end: bool,
}

impl Cached {
    fn new(version: Version, dirty: bool) -> Cached {
        Cached {
            version,
            dirty,
            used_again: false,
            old: false,
            behind_end: false,
        }
    }
}

/// State in the guest's memory: page cache, driver, open files and reads.
#[derive(Clone)]
pub struct Kernel {
    guest: usize,
    mutation: Option<Mutation>,
    /// The model of the guest driver.
    pub driver: DriverModel,
    cache: BTreeMap<FilePage, Cached>,
    /// Inodes of the files that are open for direct writes.
    writers: BTreeSet<u32>,
    /// Reads in progress, by their numbers. Each has the inode of the file, and the pages that were
    /// not in the page cache.
    reads: BTreeMap<u64, (u32, Vec<u64>)>,
}

/// State outside of the guest's memory: the disk, and the contents that a reader must see.
#[derive(Clone, Default)]
pub struct Storage {
    /// Versions of the pages on the disk.
    pub disk: Pages,
    /// Versions that were last written to the pages, which a reader must see.
    pub truth: Pages,
}

impl Storage {
    fn of(pages: &Pages, page: FilePage) -> Version {
        pages.get(&page).copied().unwrap_or(0)
    }
}

impl Kernel {
    /// Fills the disk and the page cache with files. Each page gets a version of its own, from 1
    /// on. Returns the last version.
    pub fn fill(&mut self, storage: &mut Storage) -> Version {
        let mut version = 0;
        for inode in 0..FILES {
            for page in 0..PAGES {
                version += 1;
                let page = (inode, index_of(page));
                storage.disk.insert(page, version);
                storage.truth.insert(page, version);
                self.cache.insert(page, Cached::new(version, false));
            }
        }
        version
    }

    /// Creates a kernel that has just booted, with an empty page cache.
    pub fn new(guest: usize, driver: DriverModel, mutation: Option<Mutation>) -> Kernel {
        Kernel {
            guest,
            mutation,
            driver,
            cache: BTreeMap::new(),
            writers: BTreeSet::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Returns whether a read of the file is in progress. The model does not change a file during a
    /// read.
    fn is_read(&self, inode: u32) -> bool {
        self.reads.values().any(|(file, _)| *file == inode)
    }

    /// Returns the contents of a cached page.
    fn content(&self, page: FilePage, cached: &Cached) -> Content {
        match cached.behind_end && page.1 == index_of_end() {
            true => content::with_bytes_behind_end(self.guest, cached.version),
            false => content::of(self.guest, cached.version),
        }
    }

    /// Begins to reclaim a page while another task changes the file. If the page's index entry is
    /// retained and the page is unchanged, returns its cookie. [`end_eviction`](Self::end_eviction)
    /// then makes the entry held (only the device may have the page).
    fn begin_eviction(&mut self, page: FilePage) -> Option<(FilePage, u64)> {
        let cached = self.cache.get(&page).filter(|cached| !cached.dirty)?;
        let content = self.content(page, cached);
        let cookie = self.driver.check_retained(page, content)?;
        Some((page, cookie))
    }

    /// Ends the evictions that [`begin_eviction`](Self::begin_eviction) began, after another task
    /// has changed the file.
    fn end_eviction(&mut self, evicted: impl IntoIterator<Item = (FilePage, u64)>) {
        for (page, cookie) in evicted {
            self.driver.hold(page, cookie);
        }
    }

    /// Reads `count` pages of a file. Checks cached pages, and requests other pages from the
    /// driver.
    pub fn read(
        &mut self,
        port: &mut Port<'_>,
        storage: &Storage,
        inode: u32,
        (first, count): (u64, u64),
    ) {
        if self.is_read(inode) {
            return;
        }
        self.clear_mark(inode);
        let mut missing = Vec::new();
        for page in first..(first + count).min(PAGES) {
            let page = index_of(page);
            let Some(cached) = self.cache.get_mut(&(inode, page)) else {
                missing.push(page);
                continue;
            };
            cached.used_again = true;
            let (is, must) = (cached.version, Storage::of(&storage.truth, (inode, page)));
            if is != must && !cached.old {
                let what = format!(
                    "inode {inode}, page {page:#x}: the page cache has version {is}, but version \
                     {must} was written last"
                );
                port.oracle.fail("bytes", what);
            }
        }
        if !missing.is_empty() {
            let id = self.driver.get(port, inode, &missing);
            self.reads.insert(id, (inode, missing));
        }
        self.finish(port, storage);
    }

    /// Ends the reads that are complete or whose deadline has passed. Checks the bytes that they
    /// got.
    pub fn finish(&mut self, port: &mut Port<'_>, storage: &Storage) {
        while let Some(mut got) = self.driver.finished(port.now_ns) {
            if got.waited_ns > DEADLINE_NS {
                let what = format!(
                    "a reader waited {} ns, longer than its deadline",
                    got.waited_ns
                );
                port.oracle.fail("deadline", what);
            }
            let Some((inode, pages)) = self.reads.remove(&got.reader) else {
                continue;
            };
            for page in pages {
                let page = (inode, page);
                let version = Storage::of(&storage.truth, page);
                if let Some(bytes) = got.pages.remove(&page) {
                    if self.driver.holds(page) {
                        let what = format!(
                            "page {page:x?} was returned to the guest, but is still in the \
                             driver's index"
                        );
                        port.oracle.fail("exclusive", what);
                    }
                    let must = content::of(self.guest, version).page();
                    // Accept different bytes behind the end of the file, because they do not belong
                    // to the file.
                    let same = bytes == must
                        || page.1 == index_of_end()
                            && bytes == content::with_bytes_behind_end(self.guest, version).page();
                    if !same {
                        let at = bytes.iter().zip(&*must).position(|(is, must)| is != must);
                        let what = format!(
                            "the reader of page {page:x?} got wrong bytes, first at offset {at:?}"
                        );
                        port.oracle.fail("bytes", what);
                    }
                } else if Storage::of(&storage.disk, page) != version {
                    let what = format!(
                        "the host did not return page {page:x?}, and the disk does not have its \
                         newest version {version}"
                    );
                    port.oracle.fail("world", what);
                }
                self.cache.insert(page, Cached::new(version, false));
            }
        }
    }

    /// Overwrites a page in the page cache, which makes the page dirty.
    pub fn write(&mut self, storage: &mut Storage, inode: u32, page: u64, version: Version) {
        if self.is_read(inode) {
            return;
        }
        let page = index_of(page);
        storage.truth.insert((inode, page), version);
        let cached = Cached {
            behind_end: true,
            ..Cached::new(version, true)
        };
        self.cache.insert((inode, page), cached);
        self.driver.written(inode, page);
    }

    /// Writes the dirty pages of a file to the disk.
    pub fn write_back(&mut self, storage: &mut Storage, inode: u32) {
        let pages = self
            .cache
            .range_mut((inode, 0)..=(inode, u64::MAX))
            .filter(|(_, cached)| cached.dirty);
        for (page, cached) in pages {
            cached.dirty = false;
            storage.disk.insert(*page, cached.version);
        }
    }

    /// Evicts clean pages of a file from the page cache, and passes each to the driver.
    pub fn evict(&mut self, inode: u32, first: u64, count: u64) {
        for page in first..(first + count).min(PAGES) {
            let page = index_of(page);
            let cached = self.cache.get(&(inode, page));
            let Some(cached) = cached.filter(|cached| !cached.dirty).cloned() else {
                continue;
            };
            if self.mutation == Some(Mutation::MarkClearedAtPut) && !self.writers.contains(&inode) {
                self.driver.unbypass(inode);
            }
            self.cache.remove(&(inode, page));
            let content = self.content((inode, page), &cached);
            self.driver.put(inode, page, content, cached.used_again);
            self.clear_mark(inode);
        }
    }

    /// Clears the driver's mark of a file if the file has no direct writer and no cached page.
    fn clear_mark(&mut self, inode: u32) {
        let mut cached = self.cache.range((inode, 0)..=(inode, u64::MAX));
        if cached.next().is_none() && !self.writers.contains(&inode) {
            self.driver.unbypass(inode);
        }
    }

    /// Truncates a file: its pages from number `from` on become zero.
    pub fn truncate(&mut self, storage: &mut Storage, inode: u32, from: u64) {
        if self.is_read(inode) {
            return;
        }
        let from = index_of(from);
        let gone = |page: &FilePage| page.0 == inode && page.1 >= from;
        let pages: Vec<FilePage> = self.cache.keys().copied().filter(gone).collect();
        // Begin the eviction of the truncated pages before the change, as reclaim on another
        // processor may do. The eviction ends after the change.
        let evicted: Vec<_> = pages
            .into_iter()
            .filter_map(|page| self.begin_eviction(page))
            .collect();
        self.cache.retain(|page, _| !gone(page));
        storage.disk.retain(|page, _| !gone(page));
        storage.truth.retain(|page, _| !gone(page));
        if self.mutation != Some(Mutation::EntryKeptAtTruncate) {
            self.driver.truncated(inode, from);
        }
        self.end_eviction(evicted);
        self.clear_mark(inode);
    }

    /// Deletes a file. A new file gets the inode number of the deleted one at once.
    pub fn delete(&mut self, storage: &mut Storage, inode: u32) {
        if !self.is_read(inode) {
            self.truncate(storage, inode, 0);
            self.writers.remove(&inode);
            self.driver.forget_inode(inode);
        }
    }

    /// Writes a page directly to the disk, past the page cache.
    pub fn write_direct(&mut self, storage: &mut Storage, inode: u32, page: u64, version: Version) {
        if self.is_read(inode) {
            return;
        }
        let page = index_of(page);
        self.writers.insert(inode);
        // Begin the eviction of the page before the change, as reclaim on another processor may do.
        // The eviction ends after the change.
        let evicted = self.begin_eviction((inode, page));
        self.driver.bypass(inode);
        self.end_eviction(evicted);
        self.cache.remove(&(inode, page));
        storage.disk.insert((inode, page), version);
        storage.truth.insert((inode, page), version);
    }

    /// Does a direct write, as [`write_direct`](Self::write_direct), that fails after a concurrent
    /// reader has cached the same page. Then the disk has the new page. The page cache has the old
    /// page, which counts as clean.
    pub fn fail_direct(&mut self, storage: &mut Storage, inode: u32, page: u64, version: Version) {
        if self.is_read(inode) {
            return;
        }
        self.write_back(storage, inode);
        let before = Storage::of(&storage.disk, (inode, index_of(page)));
        self.write_direct(storage, inode, page, version);
        let old = Cached {
            old: true,
            ..Cached::new(before, false)
        };
        self.cache.insert((inode, index_of(page)), old);
    }

    /// Closes a file, so that it has no direct writer any more.
    pub fn close(&mut self, inode: u32) {
        self.writers.remove(&inode);
    }

    /// Unmounts the file system and mounts it again. If `known` is true, registers the new mount
    /// with the driver's hooks at once.
    pub fn remount(&mut self, storage: &mut Storage, known: bool) {
        if self.reads.is_empty() {
            (0..FILES).for_each(|inode| self.write_back(storage, inode));
            self.cache.clear();
            self.writers.clear();
            self.driver.remount();
            match known {
                true => self.driver.register([]),
                false => self.driver.hide(),
            }
        }
    }

    /// Registers the file system with the driver's hooks, after a mount that they did not see.
    pub fn register(&mut self) {
        let cached = self.cache.keys().map(|(inode, _)| *inode);
        let suspects: BTreeSet<u32> = cached.chain(self.writers.iter().copied()).collect();
        self.driver.register(suspects);
    }
}
