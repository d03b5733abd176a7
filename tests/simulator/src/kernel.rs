// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Model of a guest's file system: page cache, mapping of file pages to blocks of the disk, and bios
//! in flight.
//!
//! Where the kernel module has hooks, this model calls the model of the driver: when a bio begins
//! and ends, and when a page is made dirty or evicted. The disk executes and ends bios in any order.
//! The check of this model does not know files: each READ bio must return contents that its block
//! had on the disk between the submission and the end of the bio. A snapshot of the guest's memory
//! restores page cache, bios and driver, and a snapshot of the disk restores the disk.

use std::collections::BTreeMap;

use tmem_model::Content;

use crate::content::{self, Version};
use crate::driver::{Block, DEADLINE_NS, DriverModel, Port};

/// Number of files of a guest.
pub const FILES: u32 = 3;
/// Number of pages of each file.
pub const PAGES: u64 = 18;
/// Number of adjacent blocks in a group. Each group is in a chunk (256 blocks) of its own.
const GROUP: u64 = 6;
/// Number of blocks of the disk.
const BLOCKS: u64 = FILES as u64 * PAGES + 2 * GROUP;
/// Number of blocks of a file that a hibernation image covers, as if the file were a swap file.
const IMAGE: u64 = 4;

/// Inode number of a file, and number of a page in the file.
pub type FilePage = (u32, u64);

/// Converts the number of a block, 0 to [`BLOCKS`] - 1, to the block.
fn block_of(number: u64) -> Block {
    number % GROUP + ((number / GROUP) << virtio_tmem::CHUNK_SHIFT)
}

/// State outside of the guest's memory: the disk.
#[derive(Clone, Default)]
pub struct Storage {
    /// Version (number of the write) of each block. A block without an entry is zero.
    disk: BTreeMap<Block, Version>,
    /// Blocks of file pages. A page without an entry is a hole.
    map: BTreeMap<FilePage, Block>,
    /// Writes that the disk has reported as failed, and executes later nevertheless.
    late: Vec<(Block, Version)>,
    /// How the next write fails, if it does.
    pub broken: Option<Outcome>,
}

/// How the disk ends a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The disk has executed the bio.
    Good,
    /// The disk has refused the bio with an error that shows that it does not execute it.
    Refused,
    /// The disk has reported an error, as after a time-out, and executes the bio later.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Read,
    /// Writes the page, which is under writeback.
    WriteBack,
    /// Writes other memory.
    Direct,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The driver gets blocks from the host. The field is the number of the fetch.
    Fetch(u64),
    Submitted,
    /// The disk has executed the bio, or has failed to.
    Executed(Outcome),
}

/// A page of a bio.
#[derive(Clone, Debug)]
struct Part {
    page: FilePage,
    block: Block,
    /// Number from the driver's records, if the driver may record the block.
    seq: Option<u32>,
    /// Version that was read, or that a write had at its submission.
    version: Version,
    /// Versions that the block has had on the disk since the submission of a read.
    seen: Vec<Version>,
}

impl Part {
    fn new(page: FilePage, block: Block, version: Version) -> Part {
        Part {
            page,
            block,
            seq: None,
            version,
            seen: Vec::new(),
        }
    }
}

#[derive(Clone, Debug)]
struct Bio {
    op: Op,
    parts: Vec<Part>,
    phase: Phase,
    /// Epoch of the driver's records at the submission of the bio, 0 outside of an interval; None
    /// if the driver does not track the bio.
    epoch: Option<u32>,
    /// Whether a page was cached when a direct write began, so that its end removes it again.
    removes: bool,
}

#[derive(Clone, Debug, Default)]
struct Cached {
    version: Version,
    dirty: bool,
    used_again: bool,
    /// Whether a read or the writeback of the page is in flight.
    busy: bool,
    /// Block of the last transfer, as the driver believes.
    hint: Option<Block>,
}

/// State in the guest's memory: page cache, driver, and bios.
#[derive(Clone)]
pub struct Kernel {
    guest: usize,
    /// The model of the guest driver.
    pub driver: DriverModel,
    cache: BTreeMap<FilePage, Cached>,
    /// Pages that reclaim has removed from the page cache and not freed yet: hint, contents, and
    /// whether the page was used again.
    removed: Vec<(Option<Block>, Content, bool)>,
    bios: Vec<Bio>,
}

impl Kernel {
    /// Creates a kernel that has just booted, with an empty page cache.
    pub fn new(guest: usize, driver: DriverModel) -> Kernel {
        Kernel {
            guest,
            driver,
            cache: BTreeMap::new(),
            removed: Vec::new(),
            bios: Vec::new(),
        }
    }

    /// Fills the disk with files. Each block gets a version of its own, from 1 on. Returns the last
    /// version.
    pub fn fill(storage: &mut Storage) -> Version {
        let mut number = 0;
        for inode in 0..FILES {
            for page in 0..PAGES {
                let block = block_of(number);
                number += 1;
                storage.map.insert((inode, page), block);
                storage.disk.insert(block, number as Version);
            }
        }
        number as Version
    }

    fn content(&self, version: Version) -> Content {
        content::of(self.guest, version)
    }

    /// Returns whether a bio is in flight.
    pub fn busy(&self) -> bool {
        !self.bios.is_empty()
    }

    /// Returns whether a bio of a page is in flight.
    fn in_flight(&self, page: FilePage) -> bool {
        let mut parts = self.bios.iter().flat_map(|bio| &bio.parts);
        parts.any(|part| part.page == page)
    }

    fn is_read(&self, page: FilePage) -> bool {
        let reads = self.bios.iter().filter(|bio| bio.op == Op::Read);
        reads
            .flat_map(|bio| &bio.parts)
            .any(|part| part.page == page)
    }

    /// Returns whether a cached page is clean, and no transfer of it is in flight.
    fn is_idle(&self, page: FilePage) -> bool {
        let cached = self.cache.get(&page);
        cached.is_none_or(|cached| !cached.dirty && !cached.busy)
    }

    // ---- reads --------------------------------------------------------------------------------

    /// Reads `count` pages of a file. Submits READ bios for pages that are not cached.
    pub fn read(
        &mut self,
        port: &mut Port<'_>,
        storage: &mut Storage,
        inode: u32,
        (first, count): (u64, u64),
    ) {
        let mut run: Vec<Part> = Vec::new();
        for number in first..(first + count).min(PAGES) {
            let page = (inode, number);
            if let Some(cached) = self.cache.get_mut(&page) {
                cached.used_again = true;
                continue;
            }
            let block = storage.map.get(&page).copied();
            let busy = block.is_some();
            let cached = Cached {
                busy,
                ..Cached::default()
            };
            self.cache.insert(page, cached);
            let Some(block) = block else { continue };
            if run.last().is_some_and(|last| last.block + 1 != block) {
                self.submit_read(port, std::mem::take(&mut run));
            }
            let version = storage.disk.get(&block).copied().unwrap_or(0);
            let mut part = Part::new(page, block, 0);
            part.seen.push(version);
            run.push(part);
        }
        if !run.is_empty() {
            self.submit_read(port, run);
        }
        self.finish(port);
    }

    /// Submits a READ bio of adjacent blocks: lets the driver get its first or its last blocks, or
    /// leaves it to the disk.
    fn submit_read(&mut self, port: &mut Port<'_>, mut parts: Vec<Part>) {
        let held = |part: &&mut Part| self.driver.holds(part.block);
        let first = parts.iter_mut().take_while(held).count();
        let last = parts.iter_mut().rev().take_while(held).count();
        let (from, to) = match last > first {
            true => (parts.len() - last, parts.len()),
            false => (0, first),
        };
        let mut wanted = Vec::new();
        for part in &mut parts[from..to] {
            part.seq = self.driver.records.get(part.block);
            wanted.extend(part.seq.map(|_| part.block));
        }
        let mut bio = Bio {
            op: Op::Read,
            parts,
            phase: Phase::Submitted,
            epoch: None,
            removes: false,
        };
        if wanted.is_empty() {
            self.submit_to_disk(bio);
        } else {
            bio.phase = Phase::Fetch(self.driver.fetch(port, &wanted));
            self.bios.push(bio);
        }
    }

    fn submit_to_disk(&mut self, mut bio: Bio) {
        let records = &mut self.driver.records;
        bio.phase = Phase::Submitted;
        bio.epoch = (records.epoch() != 0).then_some(records.epoch());
        for part in &mut bio.parts {
            part.seq = bio.epoch.map(|_| records.read(part.block));
        }
        self.bios.push(bio);
    }

    /// Ends the fetches that are complete or whose deadline has passed. Checks the contents that
    /// they got, and leaves the other blocks of their bios to the disk.
    pub fn finish(&mut self, port: &mut Port<'_>) {
        while let Some(mut got) = self.driver.finished(port.now_ns) {
            if got.waited_ns > DEADLINE_NS {
                let what = format!(
                    "a fetch took {} ns, longer than its deadline",
                    got.waited_ns
                );
                port.oracle.fail("deadline", what);
            }
            let fetch = Phase::Fetch(got.fetch);
            let Some(at) = self.bios.iter().position(|bio| bio.phase == fetch) else {
                continue;
            };
            let mut bio = self.bios.remove(at);
            for mut part in std::mem::take(&mut bio.parts) {
                match got.blocks.remove(&part.block) {
                    Some(bytes) if self.take(port, &mut part, &bytes[..]) => {}
                    _ => bio.parts.push(part),
                }
            }
            if !bio.parts.is_empty() {
                self.submit_to_disk(bio);
            }
        }
    }

    /// Fills a page with the bytes that a get has returned, and checks them. Returns false if a
    /// write has overtaken the get, so that the disk has to read the block.
    fn take(&mut self, port: &mut Port<'_>, part: &mut Part, bytes: &[u8]) -> bool {
        let (page, block) = (part.page, part.block);
        let mut seen = part.seen.iter().copied();
        let found = seen.find(|version| bytes == &self.content(*version).page()[..]);
        let version = found.unwrap_or(0);
        let seq = part.seq.unwrap_or(0);
        if !self.driver.records.got(block, seq, self.content(version)) {
            return false;
        }
        if self.driver.holds(block) {
            let what = format!(
                "block {block:#x} was returned to the guest, but a get may request it again"
            );
            port.oracle.fail("exclusive", what);
        }
        if found.is_none() {
            let what = format!(
                "the reader of page {page:?} got bytes that its block {block:#x} did not have on \
                 the disk during the read: the block had the versions {:?}",
                part.seen
            );
            port.oracle.fail("bytes", what);
        }
        self.fill_page(page, version, true, block);
        true
    }

    fn fill_page(&mut self, page: FilePage, version: Version, recorded: bool, block: Block) {
        if let Some(cached) = self.cache.get_mut(&page) {
            (cached.version, cached.busy) = (version, false);
            if recorded {
                cached.hint = Some(block);
            }
        }
    }

    // ---- writes -------------------------------------------------------------------------------

    /// Overwrites a page in the page cache, which makes the page dirty.
    pub fn write(&mut self, page: FilePage, version: Version) {
        if self.is_read(page) {
            return;
        }
        let cached = self.cache.entry(page).or_default();
        (cached.version, cached.dirty) = (version, true);
        if let Some(block) = cached.hint {
            self.driver.records.dirty(block);
        }
    }

    /// Changes the bytes of a clean page without making it dirty, as an operation does that fails
    /// after it has zeroed a part of the page.
    pub fn zero(&mut self, page: FilePage, version: Version) {
        if self.is_idle(page)
            && let Some(cached) = self.cache.get_mut(&page)
        {
            cached.version = version;
        }
    }

    /// Returns the block of a page, or a free one if the page is a hole.
    fn allocate(&self, storage: &mut Storage, page: FilePage) -> Option<Block> {
        let parts = self.bios.iter().flat_map(|bio| &bio.parts);
        let used: Vec<Block> = parts.map(|part| part.block).collect();
        let mut blocks = (0..BLOCKS).map(block_of);
        let free = |b: &Block| !used.contains(b) && !storage.map.values().any(|m| m == b);
        let block = storage
            .map
            .get(&page)
            .copied()
            .or_else(|| blocks.find(free));
        storage.map.extend(block.map(|block| (page, block)));
        block
    }

    /// Begins to write the dirty pages of a file to the disk.
    pub fn write_back(&mut self, storage: &mut Storage, inode: u32) {
        let known = self.driver.records.known;
        let pages = self.cache.range((inode, 0)..=(inode, u64::MAX));
        let dirty =
            pages.filter(|(page, cached)| cached.dirty && !cached.busy && !self.in_flight(**page));
        let dirty: Vec<FilePage> = dirty.map(|(page, _)| *page).collect();
        let mut run: Vec<Part> = Vec::new();
        for page in dirty {
            let Some(block) = self.allocate(storage, page) else {
                continue;
            };
            let Some(cached) = self.cache.get_mut(&page) else {
                continue;
            };
            (cached.dirty, cached.busy) = (false, true);
            if known {
                cached.hint = Some(block);
            }
            let part = Part::new(page, block, cached.version);
            if run.last().is_some_and(|last| last.block + 1 != block) {
                self.submit_write(Op::WriteBack, std::mem::take(&mut run), known, false);
            }
            run.push(part);
        }
        if !run.is_empty() {
            self.submit_write(Op::WriteBack, run, known, false);
        }
    }

    /// Begins to write a page directly, past the page cache. If the page is being read, this is a
    /// write that does not wait for readers of the file, such as one to the disk itself. `unseen` is
    /// whether the write does not come through the function that the driver replaces.
    pub fn write_direct(
        &mut self,
        storage: &mut Storage,
        page: FilePage,
        version: Version,
        unseen: bool,
    ) {
        let read = self.is_read(page);
        if !read && (!self.is_idle(page) || self.in_flight(page)) {
            return;
        }
        let removes = !read && self.cache.remove(&page).is_some();
        let Some(block) = self.allocate(storage, page) else {
            return;
        };
        let part = Part::new(page, block, version);
        if unseen {
            self.driver.end_interval(false);
        }
        let seen = !unseen && self.driver.records.known;
        self.submit_write(Op::Direct, vec![part], seen, removes);
    }

    /// Begins a write. `seen` is whether the driver tracks it.
    fn submit_write(&mut self, op: Op, mut parts: Vec<Part>, seen: bool, removes: bool) {
        let records = &mut self.driver.records;
        let epoch = seen.then_some(records.epoch());
        if seen {
            for part in &mut parts {
                let seq = records.write(part.block);
                part.seq = (op == Op::WriteBack).then_some(seq);
            }
            let blocks: Vec<Block> = parts.iter().map(|part| part.block).collect();
            self.driver.forget_blocks(&blocks);
        }
        self.bios.push(Bio {
            op,
            parts,
            phase: Phase::Submitted,
            epoch,
            removes,
        });
    }

    // ---- the disk -----------------------------------------------------------------------------

    /// Writes a block of the disk.
    fn store(&mut self, storage: &mut Storage, block: Block, version: Version) {
        storage.disk.insert(block, version);
        let parts = self.bios.iter_mut().flat_map(|bio| &mut bio.parts);
        for part in parts.filter(|part| part.block == block) {
            part.seen.push(version);
        }
    }

    fn execute(&mut self, storage: &mut Storage, at: usize) {
        let bio = &self.bios[at];
        let op = bio.op;
        // Leave out failures of writes that the driver does not track: it cannot know of them.
        let fails = op != Op::Read && bio.epoch.is_some();
        let broken = storage.broken.take_if(|_| fails);
        let outcome = broken.unwrap_or(Outcome::Good);
        for nth in 0..bio.parts.len() {
            let Part { page, block, .. } = self.bios[at].parts[nth];
            let version = match (op, self.cache.get(&page)) {
                // The page may have changed since the submission.
                (Op::WriteBack, Some(cached)) => cached.version,
                _ => self.bios[at].parts[nth].version,
            };
            match (op, outcome) {
                (Op::Read, _) => {
                    let version = storage.disk.get(&block).copied().unwrap_or(0);
                    self.bios[at].parts[nth].version = version;
                }
                (_, Outcome::Good) => self.store(storage, block, version),
                (_, Outcome::Late) => storage.late.push((block, version)),
                (_, Outcome::Refused) => {}
            }
        }
        self.bios[at].phase = Phase::Executed(outcome);
    }

    fn end(&mut self, at: usize, outcome: Outcome) {
        let bio = self.bios.remove(at);
        let good = outcome == Outcome::Good || self.driver.records_failures();
        let good = good
            && bio
                .epoch
                .is_some_and(|e| e != 0 && e == self.driver.records.epoch());
        if bio.op != Op::Read && bio.epoch.is_some() && outcome == Outcome::Late {
            self.driver.write_failed();
        }
        for part in bio.parts {
            let (page, block) = (part.page, part.block);
            let content = self.content(part.version);
            let records = &mut self.driver.records;
            match (bio.op, part.seq) {
                (Op::Read, seq) => {
                    let recorded = seq.is_some_and(|seq| good && records.fill(block, seq, content));
                    self.fill_page(page, part.version, recorded, block);
                    continue;
                }
                (_, Some(seq)) if good => {
                    let dirty = self.cache.get(&page).is_some_and(|cached| cached.dirty);
                    records.flush(block, seq, content, dirty);
                }
                _ if bio.epoch.is_some() => records.end_write(block),
                _ => {}
            }
            if bio.op == Op::WriteBack {
                if let Some(cached) = self.cache.get_mut(&page) {
                    cached.busy = false;
                }
            } else if bio.removes && outcome == Outcome::Good && self.is_idle(page) {
                self.cache.remove(&page);
            }
        }
    }

    /// Does one step of the disk: executes or ends one of the bios, or executes a late write. `draw`
    /// selects it. Returns false if the disk has nothing to do.
    pub fn disk(&mut self, storage: &mut Storage, draw: u64) -> bool {
        let ready = |bio: &Bio| !matches!(bio.phase, Phase::Fetch(_));
        let ready: Vec<usize> = (0..self.bios.len())
            .filter(|at| ready(&self.bios[*at]))
            .collect();
        let choices = ready.len() + storage.late.len();
        // A late write seldom comes soon.
        if choices == 0 || (ready.is_empty() && !draw.is_multiple_of(8)) {
            return false;
        }
        let nth = (draw >> 3) as usize % choices;
        match ready.get(nth) {
            Some(&at) => match self.bios[at].phase {
                Phase::Executed(outcome) => self.end(at, outcome),
                _ => self.execute(storage, at),
            },
            None => {
                let (block, version) = storage.late.remove(nth - ready.len());
                self.store(storage, block, version);
            }
        }
        true
    }

    /// Lets the disk execute all bios, as before a snapshot. Their ends come later.
    pub fn drain(&mut self, storage: &mut Storage) {
        for at in 0..self.bios.len() {
            if self.bios[at].phase == Phase::Submitted {
                self.execute(storage, at);
            }
        }
        for (block, version) in std::mem::take(&mut storage.late) {
            self.store(storage, block, version);
        }
    }

    // ---- changes of files ---------------------------------------------------------------------

    /// Removes clean pages of a file from the page cache.
    pub fn evict(&mut self, inode: u32, first: u64, count: u64) {
        for number in first..(first + count).min(PAGES) {
            let page = (inode, number);
            if self.is_idle(page)
                && let Some(cached) = self.cache.remove(&page)
            {
                let content = self.content(cached.version);
                self.removed.push((cached.hint, content, cached.used_again));
            }
        }
    }

    /// Frees the pages that were removed from the page cache, and passes each to the driver.
    pub fn free(&mut self) {
        for (hint, content, used_again) in std::mem::take(&mut self.removed) {
            self.driver.put(hint, content, used_again);
        }
    }

    /// Truncates a file: frees its blocks from page `from` on, unless a transfer is in flight.
    pub fn truncate(&mut self, storage: &mut Storage, inode: u32, from: u64) {
        let busy = (from..PAGES).any(|number| self.in_flight((inode, number)));
        if !busy {
            let gone = |page: &FilePage| page.0 == inode && page.1 >= from;
            self.cache.retain(|page, _| !gone(page));
            storage.map.retain(|page, _| !gone(page));
        }
    }

    /// Exchanges the blocks of a page of two files, and leaves the cached pages as they are.
    pub fn exchange(&mut self, storage: &mut Storage, inode: u32, number: u64) {
        let pages = [(inode, number), ((inode + 1) % FILES, number)];
        if pages
            .iter()
            .all(|p| self.is_idle(*p) && !self.in_flight(*p))
        {
            let blocks = pages.map(|page| storage.map.remove(&page));
            for (page, block) in pages.into_iter().zip([blocks[1], blocks[0]]) {
                storage.map.extend(block.map(|block| (page, block)));
            }
        }
    }

    /// Unmounts the file system and mounts it again, unless a fetch is in flight. `known` is whether
    /// the driver learns of the new mount at once.
    pub fn remount(&mut self, storage: &mut Storage, known: bool) {
        (0..FILES).for_each(|inode| self.write_back(storage, inode));
        while self.disk(storage, 0) {}
        if self.bios.is_empty() {
            self.cache.clear();
            self.driver.remount(known);
        }
    }

    /// Tells the driver of the mount, if it does not know it. The driver begins an interval, and
    /// uses the disk when it is drained of writes that the driver did not see.
    pub fn register(&mut self) {
        self.driver.records.known = true;
        self.begin_interval();
    }

    /// Begins an interval after a write that the driver did not see.
    pub fn begin_interval(&mut self) {
        let unseen = |bio: &Bio| bio.op != Op::Read && bio.epoch.is_none();
        let drained = !self.bios.iter().any(unseen);
        if self.driver.records.known {
            self.driver.begin_interval(drained);
        }
    }

    /// Writes a hibernation image to the disk, to the first blocks of a file, while the memory of
    /// the guest is already saved. Returns the last new version; `version` is the last one before.
    pub fn write_image(storage: &mut Storage, version: Version) -> Version {
        for (number, version) in (0..IMAGE).zip(version + 1..) {
            if let Some(&block) = storage.map.get(&(0, number)) {
                storage.disk.insert(block, version);
            }
        }
        version + IMAGE as Version
    }
}
