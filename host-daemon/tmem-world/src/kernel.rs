// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files of a guest: page cache, disk, and the last written contents.
//!
//! Where the kernel module has hooks, this model calls the model of the driver: when a page is made
//! dirty, truncated, written past the page cache or evicted. The result of each read is compared
//! with the last written contents, byte by byte. A snapshot of the guest's memory restores page
//! cache and driver, and a snapshot of the disk restores the disk.

use std::collections::{BTreeMap, BTreeSet};

use tmem_sim::Content;

use crate::content::{self, Version};
use crate::driver::{DEADLINE_NS, Driver, FilePage, Port};
use crate::mutation::Mutation;

/// Number of files of a guest.
pub const FILES: u32 = 3;
/// Number of pages of a file.
pub const PAGES: u64 = 18;
/// Number of adjacent pages in a group. Each group is in a chunk of its own.
const GROUP: u64 = 6;

/// Page that contains the end of each file. A file that is truncated gets its old length back at
/// once, so this page is always the same one.
const END: u64 = PAGES - 1;

/// Returns the index of the page that contains the end of a file.
pub fn index_of_end() -> u64 {
    index_of(END)
}

/// Returns the index of a file's page: groups of adjacent pages, each in its own chunk.
pub fn index_of(page: u64) -> u64 {
    page % GROUP + ((page / GROUP) << virtio_tmem::CHUNK_SHIFT)
}

/// Versions of pages; a page without an entry is zero.
pub type Pages = BTreeMap<FilePage, Version>;

#[derive(Clone, Debug)]
struct Cached {
    version: Version,
    dirty: bool,
    used_again: bool,
    /// Whether the page is clean and older than the disk, because it was read concurrently with a
    /// direct write that failed.
    old: bool,
    /// Whether the page contains the end of the file, and its bytes behind the end are not zero,
    /// because a store through a mapping changed them. When the page is read again, they are zero.
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

/// State in the guest's memory.
#[derive(Clone)]
pub struct Kernel {
    guest: usize,
    mutation: Option<Mutation>,
    /// The model of the driver.
    pub driver: Driver,
    cache: BTreeMap<FilePage, Cached>,
    /// Files that are open for direct writes.
    writers: BTreeSet<u32>,
    /// Reads in progress, by number. Each has the inode of the file, and the pages that were not in
    /// the page cache.
    reads: BTreeMap<u64, (u32, Vec<u64>)>,
}

/// State outside of the guest's memory: the disk, and the contents that a reader must see.
#[derive(Clone, Default)]
pub struct Storage {
    /// Versions on the disk.
    pub disk: Pages,
    /// Versions last written.
    pub truth: Pages,
}

impl Storage {
    fn of(pages: &Pages, page: FilePage) -> Version {
        pages.get(&page).copied().unwrap_or(0)
    }
}

impl Kernel {
    /// Fills the page cache with files that were written long ago: version 1 and so on. Returns the
    /// last version.
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

    /// Creates a kernel that has just booted.
    pub fn new(guest: usize, driver: Driver, mutation: Option<Mutation>) -> Kernel {
        Kernel {
            guest,
            mutation,
            driver,
            cache: BTreeMap::new(),
            writers: BTreeSet::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Returns whether a read of the file is in progress, during which the file does not change.
    fn is_read(&self, inode: u32) -> bool {
        self.reads.values().any(|(file, _)| *file == inode)
    }

    /// Returns the bytes of a cached page.
    fn content(&self, page: FilePage, cached: &Cached) -> Content {
        match cached.behind_end && page.1 == index_of_end() {
            true => content::with_bytes_behind_end(self.guest, cached.version),
            false => content::of(self.guest, cached.version),
        }
    }

    /// Begins to reclaim a page while another task changes the file. If the page has a retained
    /// entry and is unchanged, returns the cookie with which
    /// [`end_eviction`](Self::end_eviction) makes the entry held.
    fn begin_eviction(&mut self, page: FilePage) -> Option<(FilePage, u64)> {
        let cached = self.cache.get(&page).filter(|cached| !cached.dirty)?;
        let content = self.content(page, cached);
        let cookie = self.driver.check_retained(page, content)?;
        Some((page, cookie))
    }

    /// Continues evictions after another task has changed the file.
    fn end_eviction(&mut self, evicted: impl IntoIterator<Item = (FilePage, u64)>) {
        for (page, cookie) in evicted {
            self.driver.hold(page, cookie);
        }
    }

    /// Reads some pages.
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
                let what = format!("{inode}:{page:#x}: version {is} cached, {must} was written");
                port.oracle.fail("bytes", what);
            }
        }
        if !missing.is_empty() {
            let id = self.driver.get(port, inode, &missing);
            self.reads.insert(id, (inode, missing));
        }
        self.finish(port, storage);
    }

    /// Ends the reads that are complete or whose deadline has passed.
    pub fn finish(&mut self, port: &mut Port<'_>, storage: &Storage) {
        while let Some(mut got) = self.driver.finished(port.now_ns) {
            if got.waited_ns > DEADLINE_NS {
                let what = format!("a reader waited {} ns", got.waited_ns);
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
                        let what = format!("{page:x?} came back and is still in the index");
                        port.oracle.fail("exclusive", what);
                    }
                    let must = content::of(self.guest, version).page();
                    // Bytes behind the end of the file do not belong to the file.
                    let same = bytes == must
                        || page.1 == index_of_end()
                            && bytes == content::with_bytes_behind_end(self.guest, version).page();
                    if !same {
                        let at = bytes.iter().zip(&*must).position(|(is, must)| is != must);
                        let what = format!("{page:x?}: wrong bytes, first at {at:?}");
                        port.oracle.fail("bytes", what);
                    }
                } else if Storage::of(&storage.disk, page) != version {
                    let what = format!("{page:x?}: the disk has another version than {version}");
                    port.oracle.fail("world", what);
                }
                self.cache.insert(page, Cached::new(version, false));
            }
        }
    }

    /// Overwrites a page in the page cache.
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

    /// Writes dirty pages to the disk.
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

    /// Reclaims clean pages, and puts each of them.
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

    /// Clears the mark of a file if the file has no writer and none of its pages is cached.
    fn clear_mark(&mut self, inode: u32) {
        let mut cached = self.cache.range((inode, 0)..=(inode, u64::MAX));
        if cached.next().is_none() && !self.writers.contains(&inode) {
            self.driver.unbypass(inode);
        }
    }

    /// Truncates a file.
    pub fn truncate(&mut self, storage: &mut Storage, inode: u32, from: u64) {
        if self.is_read(inode) {
            return;
        }
        let from = index_of(from);
        let gone = |page: &FilePage| page.0 == inode && page.1 >= from;
        let pages: Vec<FilePage> = self.cache.keys().copied().filter(gone).collect();
        // Reclaim evicts truncated pages on another processor.
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

    /// Deletes a file. A new file gets its inode number at once.
    pub fn delete(&mut self, storage: &mut Storage, inode: u32) {
        if !self.is_read(inode) {
            self.truncate(storage, inode, 0);
            self.writers.remove(&inode);
            self.driver.forget_inode(inode);
        }
    }

    /// Writes a page past the page cache.
    pub fn write_direct(&mut self, storage: &mut Storage, inode: u32, page: u64, version: Version) {
        if self.is_read(inode) {
            return;
        }
        let page = index_of(page);
        self.writers.insert(inode);
        // Reclaim evicts the page on another processor.
        let evicted = self.begin_eviction((inode, page));
        self.driver.bypass(inode);
        self.end_eviction(evicted);
        self.cache.remove(&(inode, page));
        storage.disk.insert((inode, page), version);
        storage.truth.insert((inode, page), version);
    }

    /// Does a direct write as [`write_direct`](Self::write_direct), which fails after a concurrent
    /// reader has cached the same page. The disk has the new page; the page cache has the old one,
    /// and it is clean.
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

    /// Closes the file, so that it has no writer any more.
    pub fn close(&mut self, inode: u32) {
        self.writers.remove(&inode);
    }

    /// Unmounts the file system and mounts it again. If `known` is true, the hooks are notified of
    /// the new mount at once.
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

    /// Registers the file system with the hooks.
    pub fn register(&mut self) {
        let cached = self.cache.keys().map(|(inode, _)| *inode);
        let suspects: BTreeSet<u32> = cached.chain(self.writers.iter().copied()).collect();
        self.driver.register(suspects);
    }
}
