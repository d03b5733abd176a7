// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Leaves of the page trees, and the index entries in them.
//!
//! A leaf has the entries of the pages of an object with 16 neighbouring numbers. It names a run, a
//! piece of memory with room for 1, 4 or 16 entries, and has a bitmap of the pages that have an
//! entry. A page's place in the run follows from its number and the bitmap. So an entry does not
//! store its page number, and a leaf does not store numbers of entries. Runs of further sizes would
//! save memory in leaves that are half full, but then a leaf that fills would move its entries more
//! often.
//!
//! The number of an entry consists of the number of its leaf and of four bits of the page number.
//! It stays the same when the entry moves within its run, or to a larger or smaller run.

use super::arena::{Arena, ArenaRecord, Full, Id};
use super::chunks::Chunks;
use super::entry::Entry;
use crate::config::KEYS_PER_TENANT_MAX;
use crate::heap::{Zeroed, prefetch};
use std::ops::{Index, IndexMut};
use std::ptr;
use std::sync::Arc;

/// Number of bits of the page number that distinguish the entries of a leaf.
pub(super) const LEAF_BITS: u32 = 4;
/// Largest number of entries of a leaf.
pub(super) const LEAF_PAGES: usize = 1 << LEAF_BITS;

/// Largest number of a leaf. The number of an entry has 32 bits, and contains the number of its
/// leaf.
pub(super) const LEAVES_MAX: u32 = u32::MAX >> LEAF_BITS;
// Each page may be alone in its leaf.
const _: () = assert!(KEYS_PER_TENANT_MAX <= LEAVES_MAX);

/// A leaf of a tree. `first`, `parent` and `object` belong to the tree.
#[derive(Clone, Debug, Default)]
struct Leaf {
    /// Number of the first page that can be in the leaf, a multiple of [`LEAF_PAGES`].
    first: u64,
    /// Node above the leaf, or 0 if the leaf is the root of its tree. In a free record, the next
    /// free record.
    parent: Id,
    /// Object to whose tree the leaf belongs.
    object: Id,
    /// Number of the leaf's run among the runs of its size.
    run: Id,
    /// Bitmap: bit n is 1 if the leaf has an entry for page `first` + n.
    present: u16,
    size: Size,
}

/// Size of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
enum Size {
    #[default]
    One = 0,
    Four = 1,
    Sixteen = 2,
}

impl Size {
    /// Returns the number of entries for which the run has room.
    fn room(self) -> usize {
        match self {
            Size::One => 1,
            Size::Four => 4,
            Size::Sixteen => 16,
        }
    }
}

// A leaf must be small: PAGE_METADATA_CHARGE_BYTES covers one for each page.
const _: () = assert!(size_of::<Leaf>() == 24 && LEAF_PAGES == u16::BITS as usize);

// SAFETY: all bits zero is a valid value of the integers of a leaf, and of its size, which is then
// `Size::One`.
unsafe impl Zeroed for Leaf {}

impl ArenaRecord for Leaf {
    fn next_free(&self) -> Id {
        self.parent
    }

    fn set_free(&mut self, next: Id) {
        // A free record has no entries, so that `get` does not find an entry that was removed.
        *self = Leaf {
            parent: next,
            ..Leaf::default()
        };
    }
}

impl Leaf {
    fn nr_entries(&self) -> usize {
        self.present.count_ones() as usize
    }

    /// Returns whether the range of pages of the leaf contains the page `index`.
    fn covers(&self, index: u64) -> bool {
        self.first == index & !(LEAF_PAGES as u64 - 1)
    }

    fn has(&self, child: usize) -> bool {
        self.present >> child & 1 != 0
    }

    /// Returns the place in the leaf's run of the entry of page `first` + `child`.
    fn place(&self, child: usize) -> usize {
        match self.size {
            Size::One => 0,
            // The entries are in the order of their pages.
            Size::Four => {
                let before = (1u16 << child) - 1;
                (self.present & before).count_ones() as usize
            }
            Size::Sixteen => child,
        }
    }

    /// Returns n for each page `first` + n that has an entry.
    fn children(&self) -> impl Iterator<Item = usize> + use<> {
        let present = self.present;
        (0..LEAF_PAGES).filter(move |child| present >> child & 1 != 0)
    }
}

/// A run: memory for up to N entries of a leaf.
#[derive(Clone, Debug)]
struct Run<const N: usize>([Entry; N]);

impl<const N: usize> Default for Run<N> {
    fn default() -> Run<N> {
        Run(std::array::from_fn(|_| Entry::default()))
    }
}

// SAFETY: a run consists of entries, for which all bits zero is a valid value.
unsafe impl<const N: usize> Zeroed for Run<N> {}

impl<const N: usize> ArenaRecord for Run<N> {
    fn next_free(&self) -> Id {
        self.0[0].next
    }

    fn set_free(&mut self, next: Id) {
        self.0[0].next = next;
    }
}

/// The runs of a tenant, in an arena for each size.
#[derive(Debug)]
struct Runs {
    ones: Arena<Run<1>>,
    fours: Arena<Run<4>>,
    sixteens: Arena<Run<16>>,
}

impl Runs {
    fn new(runs_max: u32, chunks: &Arc<Chunks>) -> Runs {
        Runs {
            ones: Arena::new(runs_max, Arc::clone(chunks)),
            fours: Arena::new(runs_max, Arc::clone(chunks)),
            sixteens: Arena::new(runs_max, Arc::clone(chunks)),
        }
    }

    fn bytes(&self) -> u64 {
        self.ones.bytes() + self.fours.bytes() + self.sixteens.bytes()
    }

    fn get(&self, size: Size, run: Id) -> &[Entry] {
        match size {
            Size::One => &self.ones[run].0,
            Size::Four => &self.fours[run].0,
            Size::Sixteen => &self.sixteens[run].0,
        }
    }

    fn get_mut(&mut self, size: Size, run: Id) -> &mut [Entry] {
        match size {
            Size::One => &mut self.ones[run].0,
            Size::Four => &mut self.fours[run].0,
            Size::Sixteen => &mut self.sixteens[run].0,
        }
    }

    fn insert(&mut self, size: Size) -> Result<Id, Full> {
        match size {
            Size::One => self.ones.insert(Run::default()),
            Size::Four => self.fours.insert(Run::default()),
            Size::Sixteen => self.sixteens.insert(Run::default()),
        }
    }

    /// Frees a run. Keeps the small blocks of memory, so that a get, which removes entries and so
    /// needs smaller runs, seldom has to allocate memory.
    fn remove(&mut self, size: Size, run: Id) {
        match size {
            Size::One => drop(self.ones.take(run)),
            Size::Four => drop(self.fours.take(run)),
            Size::Sixteen => drop(self.sixteens.take(run)),
        }
    }

    /// Returns the number of runs of all sizes.
    fn len(&self) -> u32 {
        self.ones.len() + self.fours.len() + self.sixteens.len()
    }

    /// Releases all memory. The caller has released all runs.
    fn clear(&mut self) {
        debug_assert_eq!(
            self.len(),
            0,
            "the last entry is removed, and runs are left"
        );
        self.ones.clear();
        self.fours.clear();
        self.sixteens.clear();
    }

    /// Moves the entries of a leaf to a run of another size, which has room for them.
    ///
    /// # Errors
    /// There is no memory. Then nothing changes.
    fn resize(&mut self, leaf: &mut Leaf, size: Size) -> Result<(), Full> {
        let run = self.insert(size)?;
        let old = leaf.clone();
        (leaf.size, leaf.run) = (size, run);
        for child in old.children() {
            let entry = self.get(old.size, old.run)[old.place(child)].clone();
            self.get_mut(size, run)[leaf.place(child)] = entry;
        }
        self.remove(old.size, old.run);
        Ok(())
    }
}

/// All index entries of a tenant, one for each page, in the leaves of its trees.
#[derive(Debug)]
pub(crate) struct Entries {
    leaves: Arena<Leaf>,
    runs: Runs,
    used: u32,
    used_max: u32,
}

fn id_of(leaf: Id, child: usize) -> Id {
    leaf << LEAF_BITS | child as u32
}

pub(super) fn leaf_of(id: Id) -> Id {
    id >> LEAF_BITS
}

fn child_of(index: u64) -> usize {
    index as usize % LEAF_PAGES
}

/// Returns the leaf of an entry, and n if the entry is that of page `first` + n. Panics if there is
/// no such entry.
fn place_of(leaves: &Arena<Leaf>, id: Id) -> (&Leaf, usize) {
    let leaf = &leaves[leaf_of(id)];
    let child = child_of(id.into());
    assert!(leaf.has(child), "entry {id} does not exist");
    (leaf, child)
}

impl Entries {
    /// Creates a set of up to `used_max` entries.
    pub(crate) fn new(used_max: u32, chunks: &Arc<Chunks>) -> Entries {
        let leaves_max = used_max.min(LEAVES_MAX);
        Entries {
            leaves: Arena::new(leaves_max, Arc::clone(chunks)),
            runs: Runs::new(leaves_max, chunks),
            used: 0,
            used_max,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.used
    }

    pub(crate) fn nr_leaves(&self) -> u32 {
        self.leaves.len()
    }

    /// Returns the memory of leaves and entries in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.leaves.bytes() + self.runs.bytes()
    }

    /// Returns an entry, or None if there is no entry with this number.
    pub(crate) fn get(&self, id: Id) -> Option<&Entry> {
        let leaf = self.leaves.get(leaf_of(id))?;
        let child = child_of(id.into());
        let run = leaf.has(child).then(|| self.run(leaf))?;
        Some(&run[leaf.place(child)])
    }

    /// Prefetches the entry with this number into the cache, if there is one. Reads its leaf.
    pub(crate) fn prefetch(&self, id: Id) {
        if id != 0
            && let Some(entry) = self.get(id)
        {
            prefetch(ptr::from_ref(entry).cast());
        }
    }

    /// Returns whether two entries are in one leaf.
    pub(crate) fn same_leaf(one: Id, other: Id) -> bool {
        leaf_of(one) == leaf_of(other)
    }

    /// Returns the object and the page number of an entry.
    pub(crate) fn place(&self, id: Id) -> (Id, u64) {
        let (leaf, child) = place_of(&self.leaves, id);
        (leaf.object, leaf.first + child as u64)
    }

    fn run(&self, leaf: &Leaf) -> &[Entry] {
        self.runs.get(leaf.size, leaf.run)
    }

    // ---- for the trees ------------------------------------------------------------------------

    /// Returns whether the range of pages of a leaf contains the page `index`.
    pub(super) fn covers(&self, leaf: Id, index: u64) -> bool {
        self.leaves[leaf].covers(index)
    }

    /// Returns whether `leaf` is the leaf of the tree of `object` whose range contains the page
    /// `index`. `leaf` may be any number, also that of a leaf that was removed.
    pub(super) fn is_leaf_of(&self, leaf: Id, object: Id, index: u64) -> bool {
        // A free record has the object 0, which no live object has.
        let is_leaf = |leaf: &Leaf| leaf.object == object && leaf.covers(index);
        leaf != 0 && self.leaves.get(leaf).is_some_and(is_leaf)
    }

    /// Returns the number of the first page that can be in a leaf.
    pub(super) fn first(&self, leaf: Id) -> u64 {
        self.leaves[leaf].first
    }

    pub(super) fn set_parent(&mut self, leaf: Id, parent: Id) {
        self.leaves[leaf].parent = parent;
    }

    /// Returns the entry of a page in the range of a leaf, or 0 if the page has no entry.
    pub(super) fn find(&self, leaf: Id, index: u64) -> Id {
        let child = child_of(index);
        match self.leaves[leaf].has(child) {
            true => id_of(leaf, child),
            false => 0,
        }
    }

    /// Looks up the entries of consecutive pages in the range of a leaf, beginning with page
    /// `index`, one for each element of `found`. Sets the elements of pages without an entry to 0.
    pub(super) fn find_consecutive(&self, leaf: Id, index: u64, found: &mut [Id]) {
        let (first, record) = (child_of(index), &self.leaves[leaf]);
        for (child, id) in (first..).zip(found) {
            *id = match record.has(child) {
                true => id_of(leaf, child),
                false => 0,
            };
        }
    }

    /// Returns the first page of a leaf at or after `index`: its number and its entry. Returns None
    /// if there is no such page.
    pub(super) fn next_in(&self, leaf: Id, index: u64) -> Option<(u64, Id)> {
        let Leaf { first, present, .. } = self.leaves[leaf];
        let from = index.saturating_sub(first);
        if from >= LEAF_PAGES as u64 {
            return None;
        }
        let child = (present >> from << from).trailing_zeros() as usize;
        (child < LEAF_PAGES).then(|| (first + child as u64, id_of(leaf, child)))
    }

    /// Adds a leaf with one entry, of page `index`. Returns the numbers of the leaf and the entry.
    ///
    /// # Errors
    /// There is no memory, or the tenant has its largest number of keys. Then nothing changes.
    pub(super) fn add_leaf(
        &mut self,
        index: u64,
        parent: Id,
        object: Id,
        entry: Entry,
    ) -> Result<(Id, Id), Full> {
        if self.used == self.used_max {
            return Err(Full);
        }
        let child = child_of(index);
        let leaf = self.leaves.insert(Leaf {
            first: index - child as u64,
            parent,
            object,
            present: 1 << child,
            ..Leaf::default()
        })?;
        let Ok(run) = self.runs.insert(Size::One) else {
            self.leaves.remove(leaf);
            return Err(Full);
        };
        self.leaves[leaf].run = run;
        self.runs.get_mut(Size::One, run)[0] = entry;
        self.used += 1;
        Ok((leaf, id_of(leaf, child)))
    }

    /// Adds an entry of a page that has none yet to the leaf whose range contains the page. Returns
    /// the number of the entry.
    ///
    /// # Errors
    /// There is no memory, or the tenant has its largest number of keys. Then nothing changes.
    pub(super) fn add(&mut self, leaf: Id, index: u64, entry: Entry) -> Result<Id, Full> {
        if self.used == self.used_max {
            return Err(Full);
        }
        let (child, id) = (child_of(index), leaf);
        let leaf = &mut self.leaves[id];
        debug_assert!(!leaf.has(child), "page {index} already has an entry");
        if leaf.size != Size::Sixteen && leaf.nr_entries() == leaf.size.room() {
            let larger = match leaf.size {
                Size::One => Size::Four,
                _ => Size::Sixteen,
            };
            self.runs.resize(leaf, larger)?;
        }
        leaf.present |= 1 << child;
        let place = leaf.place(child);
        let run = self.runs.get_mut(leaf.size, leaf.run);
        if leaf.size == Size::Four {
            run[place..].rotate_right(1);
        }
        run[place] = entry;
        self.used += 1;
        Ok(id_of(id, child))
    }

    /// Removes an entry and returns it. Removes its leaf, too, if that was its last entry. Then
    /// also returns the leaf's first page number and its parent.
    pub(super) fn remove(&mut self, id: Id) -> (Entry, Option<(u64, Id)>) {
        let (leaf_id, child) = (leaf_of(id), child_of(id.into()));
        let leaf = &mut self.leaves[leaf_id];
        assert!(leaf.has(child), "entry {id} does not exist");
        let place = leaf.place(child);
        let run = self.runs.get_mut(leaf.size, leaf.run);
        let entry = run[place].clone();
        if leaf.size == Size::Four {
            run[place..].rotate_left(1);
        }
        leaf.present &= !(1 << child);
        self.used -= 1;
        if leaf.present == 0 {
            let leaf = self.leaves.remove(leaf_id);
            self.runs.remove(leaf.size, leaf.run);
            if self.used == 0 {
                self.runs.clear();
            }
            return (entry, Some((leaf.first, leaf.parent)));
        }
        // Use a run for four entries if it has room for one more entry. Otherwise a page that comes
        // and goes would move the other entries each time. A single entry has a run of its own,
        // because moving one entry is cheap. If there is no memory, the run stays.
        let smaller = match (leaf.size, leaf.nr_entries()) {
            (Size::Sixteen, nr) if nr < Size::Four.room() => Some(Size::Four),
            (Size::Four, 1) => Some(Size::One),
            _ => None,
        };
        if let Some(smaller) = smaller {
            let _ = self.runs.resize(leaf, smaller);
        }
        (entry, None)
    }

    /// Asserts that there are as many runs as leaves. Two leaves that name one run, or a run that
    /// no leaf names, change the counts or the entries that [`check_leaf`](Self::check_leaf)
    /// visits.
    pub(super) fn check(&self) {
        assert_eq!(
            self.runs.len(),
            self.leaves.len(),
            "the number of runs differs from the number of leaves"
        );
    }

    /// Calls `page` with each page of a leaf and its entry, and asserts that the leaf is
    /// consistent.
    pub(super) fn check_leaf(
        &self,
        leaf: Id,
        parent: Id,
        object: Id,
        page: &mut impl FnMut(u64, Id),
    ) {
        let record = &self.leaves[leaf];
        assert_eq!(
            (record.parent, record.object),
            (parent, object),
            "leaf {leaf} in the tree of object {object} names the wrong parent or object"
        );
        let (nr, room) = (record.nr_entries(), record.size.room());
        assert!(
            (1..=room).contains(&nr) && nr as u32 <= self.used,
            "leaf {leaf} has {nr} entries in a run for {room}"
        );
        for child in record.children() {
            page(record.first + child as u64, id_of(leaf, child));
        }
    }
}

#[cfg(test)]
impl Entries {
    /// Adds an entry in a leaf of its own, which belongs to no tree. Returns the entry's number.
    pub(crate) fn add_alone(&mut self, index: u64, entry: Entry) -> Id {
        let added = self.add_leaf(index * LEAF_PAGES as u64, 0, 0, entry);
        added.expect("cannot allocate an entry").1
    }
}

impl Index<Id> for Entries {
    type Output = Entry;
    fn index(&self, id: Id) -> &Entry {
        let (leaf, child) = place_of(&self.leaves, id);
        &self.run(leaf)[leaf.place(child)]
    }
}

impl IndexMut<Id> for Entries {
    fn index_mut(&mut self, id: Id) -> &mut Entry {
        let (leaf, child) = place_of(&self.leaves, id);
        &mut self.runs.get_mut(leaf.size, leaf.run)[leaf.place(child)]
    }
}
