// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's files: page cache, disk, and what was written last.
//!
//! The hooks of the kernel module are calls of the driver here: a page that is made dirty, truncated,
//! written past the cache or evicted. What a read returns is compared with what was written last,
//! byte by byte. Page cache and driver go back in time with the guest's memory, the disk with the
//! disk.

use std::collections::BTreeMap;

use crate::content::{self, Version};
use crate::driver::{DEADLINE_NS, Driver, FilePage, Port};
use crate::mutation::Mutation;

/// Files of a guest.
pub const FILES: u32 = 3;
/// Pages of a file.
pub const PAGES: u64 = 18;
/// Neighbours among them; each group lies in a chunk of its own.
const GROUP: u64 = 6;

/// Where a file's page lies: groups of neighbours, each in its own chunk.
pub fn index_of(page: u64) -> u64 {
    page % GROUP + ((page / GROUP) << virtio_tmem::CHUNK_SHIFT)
}

/// Versions of pages; one that is not there is zero.
pub type Pages = BTreeMap<FilePage, Version>;

#[derive(Clone, Debug)]
struct Cached {
    version: Version,
    dirty: bool,
    used_again: bool,
}

/// What is in the guest's memory.
#[derive(Clone)]
pub struct Kernel {
    guest: usize,
    mutation: Option<Mutation>,
    /// The driver.
    pub driver: Driver,
    cache: BTreeMap<FilePage, Cached>,
    /// Reads that miss the cache: file, and pages that have to come.
    reads: BTreeMap<u64, (u32, Vec<u64>)>,
}

/// What is not: the disk, and what a reader must see.
#[derive(Clone, Default)]
pub struct Storage {
    /// Written back.
    pub disk: Pages,
    /// Written.
    pub truth: Pages,
}

impl Storage {
    fn of(pages: &Pages, page: FilePage) -> Version {
        pages.get(&page).copied().unwrap_or(0)
    }
}

impl Kernel {
    /// Files that were written long ago, and are all in the page cache: version 1 and so on.
    pub fn fill(&mut self, storage: &mut Storage) -> Version {
        let mut version = 0;
        for inode in 0..FILES {
            for page in 0..PAGES {
                version += 1;
                let page = (inode, index_of(page));
                storage.disk.insert(page, version);
                storage.truth.insert(page, version);
                let cached = Cached {
                    version,
                    dirty: false,
                    used_again: false,
                };
                self.cache.insert(page, cached);
            }
        }
        version
    }

    /// A kernel that has just booted.
    pub fn new(guest: usize, driver: Driver, mutation: Option<Mutation>) -> Kernel {
        Kernel {
            guest,
            mutation,
            driver,
            cache: BTreeMap::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Somebody reads the file: it cannot be changed meanwhile.
    fn is_read(&self, inode: u32) -> bool {
        self.reads.values().any(|(file, _)| *file == inode)
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
        let mut missing = Vec::new();
        for page in first..(first + count).min(PAGES) {
            let page = index_of(page);
            let Some(cached) = self.cache.get_mut(&(inode, page)) else {
                missing.push(page);
                continue;
            };
            cached.used_again = true;
            let (is, must) = (cached.version, Storage::of(&storage.truth, (inode, page)));
            if is != must {
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

    /// Ends the reads that are done or late.
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
                    if bytes != must {
                        let at = bytes.iter().zip(&*must).position(|(is, must)| is != must);
                        let what = format!("{page:x?}: wrong bytes, first at {at:?}");
                        port.oracle.fail("bytes", what);
                    }
                } else if Storage::of(&storage.disk, page) != version {
                    let what = format!("{page:x?}: the disk has another version than {version}");
                    port.oracle.fail("world", what);
                }
                let cached = Cached {
                    version,
                    dirty: false,
                    used_again: false,
                };
                self.cache.insert(page, cached);
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
            version,
            dirty: true,
            used_again: false,
        };
        self.cache.insert((inode, page), cached);
        self.driver.invalidate(inode, page, page);
    }

    /// Writes what is dirty to the disk.
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

    /// Reclaims clean pages: each is put.
    pub fn evict(&mut self, inode: u32, first: u64, count: u64) {
        for page in first..(first + count).min(PAGES) {
            let page = index_of(page);
            let cached = self.cache.get(&(inode, page));
            let Some(cached) = cached.filter(|cached| !cached.dirty).cloned() else {
                continue;
            };
            self.cache.remove(&(inode, page));
            let content = content::of(self.guest, cached.version);
            self.driver.put(inode, page, content, cached.used_again);
        }
    }

    /// Cuts a file off.
    pub fn truncate(&mut self, storage: &mut Storage, inode: u32, from: u64) {
        if self.is_read(inode) {
            return;
        }
        let from = index_of(from);
        let gone = |page: &FilePage| page.0 == inode && page.1 >= from;
        self.cache.retain(|page, _| !gone(page));
        storage.disk.retain(|page, _| !gone(page));
        storage.truth.retain(|page, _| !gone(page));
        if self.mutation != Some(Mutation::EntryKeptAtTruncate) {
            self.driver.invalidate(inode, from, u64::MAX);
        }
    }

    /// Deletes a file; its number is used again at once.
    pub fn delete(&mut self, storage: &mut Storage, inode: u32) {
        if !self.is_read(inode) {
            self.truncate(storage, inode, 0);
            self.driver.forget_inode(inode);
        }
    }

    /// Writes a page past the page cache.
    pub fn write_direct(&mut self, storage: &mut Storage, inode: u32, page: u64, version: Version) {
        if self.is_read(inode) {
            return;
        }
        let page = index_of(page);
        self.driver.bypass(inode);
        self.cache.remove(&(inode, page));
        storage.disk.insert((inode, page), version);
        storage.truth.insert((inode, page), version);
    }

    /// Unmounts and mounts.
    pub fn remount(&mut self, storage: &mut Storage) {
        if self.reads.is_empty() {
            (0..FILES).for_each(|inode| self.write_back(storage, inode));
            self.cache.clear();
            self.driver.remount();
        }
    }
}
