// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Trees of the pages of objects: radix trees over page numbers.
//!
//! A node has up to 16 children, one for each value of four bits of the page number. Below the
//! nodes are leaves (leaves.rs), each with the entries of up to 16 neighbouring pages. A node with
//! only one child is left out (as in a Patricia tree, Morrison 1968). So pages that are far apart
//! cost at most one leaf and one node each, whatever numbers a guest chooses. A look-up passes at
//! most 12 nodes if page numbers have 51 bits, as in the protocol. Walking a range takes time in
//! proportion to the number of pages in it.

use super::arena::{Arena, ArenaRecord, Full, Id};
use super::entry::Entry;
use super::leaves::{Entries, LEAF_BITS, LEAF_PAGES, LEAVES_MAX};
use crate::config::KEYS_PER_TENANT_MAX;
use crate::heap::Zeroed;

/// Number of bits of the page number that a node uses to distinguish its children.
const NODE_BITS: u32 = 4;
const FANOUT: usize = 1 << NODE_BITS;

/// Reference to a part of a tree: to a node, to a leaf, or to nothing. It is the root of an
/// object's tree or a child of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Child(u32);

/// Part of a tree to which a [`Child`] refers, with the number of its record.
enum Part {
    Empty,
    Leaf(Id),
    Node(Id),
}

impl Child {
    /// The empty tree.
    pub(crate) const EMPTY: Child = Child(0);
    /// Bit that is set in the reference to a leaf. The other bits are the number of the record.
    const LEAF: u32 = 1 << 31;

    fn leaf(id: Id) -> Child {
        Child(Child::LEAF | id)
    }

    fn node(id: Id) -> Child {
        debug_assert!(id & Child::LEAF == 0);
        Child(id)
    }

    fn part(self) -> Part {
        match self.0 {
            0 => Part::Empty,
            id if id & Child::LEAF != 0 => Part::Leaf(id & !Child::LEAF),
            id => Part::Node(id),
        }
    }
}

/// A node of a tree. The root of a tree has the `parent` 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Node {
    /// Number of the first page that can be below the node, and the node's level. The lowest four
    /// bits of that page number are 0, so the field stores the level in them.
    first_level: u64,
    parent: Id,
    /// Object to whose tree the node belongs.
    object: Id,
    children: [Child; FANOUT],
}

const _: () = assert!(size_of::<Node>() == 80);
const LEVEL: u64 = FANOUT as u64 - 1;
/// Bound of the level of a tree's root: a number that is larger than the level of any node.
const LEVEL_END: u32 = u32::MAX;
const _: () = assert!((u64::BITS - LEAF_BITS) / NODE_BITS <= LEVEL as u32);
// The numbers of leaves and nodes leave the bit free that tells them apart.
const _: () = assert!(KEYS_PER_TENANT_MAX < Child::LEAF && LEAVES_MAX < Child::LEAF);
// The nodes of level 1 have leaves as children.
const _: () = assert!(LEAF_BITS == NODE_BITS && LEAF_PAGES == FANOUT);

// SAFETY: all fields of a node are integers, for which all bits zero is a valid value.
unsafe impl Zeroed for Node {}

impl ArenaRecord for Node {
    fn next_free(&self) -> Id {
        self.parent
    }

    fn set_free(&mut self, next: Id) {
        self.parent = next;
    }
}

/// All nodes of a tenant's trees. The functions that take `entries` need the tenant's leaves.
pub(crate) type Nodes = Arena<Node>;

impl Node {
    /// Creates a node of this level, without children, whose range of pages contains the page
    /// `index`.
    fn new(level: u32, index: u64, parent: Id, object: Id) -> Node {
        let mut node = Node {
            first_level: u64::from(level),
            parent,
            object,
            ..Node::default()
        };
        let below = 1u64
            .checked_shl(node.shift())
            .map_or(u64::MAX, |size| size - 1);
        node.first_level |= index & !below;
        node
    }

    fn first(&self) -> u64 {
        self.first_level & !LEVEL
    }

    /// Returns the level of the node, which is at least 1. A node of level n distinguishes its
    /// children by four bits of the page number, from bit 4n on.
    fn level(&self) -> u32 {
        (self.first_level & LEVEL) as u32
    }

    /// Returns the node's level, and asserts that it is below `above`, the level of the node's
    /// parent. So a walk down a damaged tree ends.
    fn below(&self, above: u32) -> u32 {
        let level = self.level();
        assert!(
            level < above,
            "a node of level {level} is the child of a node of level {above}"
        );
        level
    }

    fn nr_children(&self) -> usize {
        let used = |child: &&Child| **child != Child::EMPTY;
        self.children.iter().filter(used).count()
    }

    /// Returns the number of lower bits in which the page numbers below the node may differ.
    fn shift(&self) -> u32 {
        (self.level() + 1) * NODE_BITS
    }

    fn covers(&self, index: u64) -> bool {
        (index ^ self.first())
            .checked_shr(self.shift())
            .unwrap_or(0)
            == 0
    }

    fn child_of(&self, index: u64) -> usize {
        (index >> (self.level() * NODE_BITS)) as usize % FANOUT
    }

    fn last(&self) -> u64 {
        self.first()
            | 1u64
                .checked_shl(self.shift())
                .map_or(u64::MAX, |size| size - 1)
    }
}

impl Nodes {
    /// Returns the leaf whose range contains the page `index`, or None if the tree has no such
    /// leaf.
    pub(crate) fn leaf(&self, entries: &Entries, root: Child, index: u64) -> Option<Id> {
        let mut at = root;
        let mut above = LEVEL_END;
        loop {
            match at.part() {
                Part::Empty => return None,
                Part::Leaf(leaf) => return entries.covers(leaf, index).then_some(leaf),
                Part::Node(id) => {
                    let node = &self[id];
                    if !node.covers(index) {
                        return None;
                    }
                    above = node.below(above);
                    at = node.children[node.child_of(index)];
                }
            }
        }
    }

    /// Looks up the entries of consecutive pages, beginning with page `index`, one for each element
    /// of `found`. Sets the elements of pages without an entry to 0. The number of the last page
    /// must not exceed u64::MAX.
    pub(crate) fn find_consecutive(
        &self,
        entries: &Entries,
        root: Child,
        index: u64,
        found: &mut [Id],
    ) {
        let mut done = 0;
        while done < found.len() {
            let index = index + done as u64;
            let in_leaf = LEAF_PAGES - index as usize % LEAF_PAGES;
            let nr = in_leaf.min(found.len() - done);
            let part = &mut found[done..done + nr];
            match self.leaf(entries, root, index) {
                Some(leaf) => entries.find_consecutive(leaf, index, part),
                None => part.fill(0),
            }
            done += nr;
        }
    }

    /// Returns the tree's first page at or after `index`: its number and its entry. Returns None if
    /// there is no such page.
    pub(crate) fn next(&self, entries: &Entries, root: Child, index: u64) -> Option<(u64, Id)> {
        self.next_below(entries, root, index, LEVEL_END)
    }

    /// Returns the first page at or after `index` in the part `at` of a tree: its number and its
    /// entry. Returns None if there is no such page. Panics if `at` is a node whose level is not
    /// below `above`.
    fn next_below(
        &self,
        entries: &Entries,
        at: Child,
        index: u64,
        above: u32,
    ) -> Option<(u64, Id)> {
        let id = match at.part() {
            Part::Empty => return None,
            Part::Leaf(leaf) => return entries.next_in(leaf, index),
            Part::Node(id) => id,
        };
        let node = &self[id];
        if index > node.last() {
            return None;
        }
        let index = index.max(node.first());
        let level = node.below(above);
        let mut children = node.children[node.child_of(index)..].iter();
        children.find_map(|&child| self.next_below(entries, child, index, level))
    }

    /// Adds the entry of a page that has none yet to the tree of `object`, and returns the number
    /// of the entry.
    ///
    /// # Errors
    /// There is no memory, or the tenant has its largest number of keys. Then nothing changes.
    pub(crate) fn add_page(
        &mut self,
        entries: &mut Entries,
        root: &mut Child,
        object: Id,
        index: u64,
        entry: Entry,
    ) -> Result<Id, Full> {
        let (mut parent, mut at) = (0, *root);
        let mut above = LEVEL_END;
        loop {
            match at.part() {
                Part::Empty => break,
                Part::Leaf(leaf) if entries.covers(leaf, index) => {
                    return entries.add(leaf, index, entry);
                }
                Part::Leaf(_) => break,
                Part::Node(id) => {
                    let node = &self[id];
                    if !node.covers(index) {
                        break;
                    }
                    above = node.below(above);
                    (parent, at) = (id, node.children[node.child_of(index)]);
                }
            }
        }
        let (leaf, id) = entries.add_leaf(index, parent, object, entry)?;
        let mut top = Child::leaf(leaf);
        if at != Child::EMPTY {
            // The tree already has a node or a leaf where the new leaf belongs. Create a node that
            // becomes the parent of both.
            top = match self.join(entries, parent, object, [at, top]) {
                Ok(top) => top,
                Err(full) => {
                    entries.remove(id);
                    return Err(full);
                }
            };
        }
        self.replace(root, parent, index, top);
        Ok(id)
    }

    /// Creates a node below `parent` whose children are `parts`, two nodes or leaves.
    ///
    /// # Errors
    /// There is no memory for the node.
    fn join(
        &mut self,
        entries: &mut Entries,
        parent: Id,
        object: Id,
        parts: [Child; 2],
    ) -> Result<Child, Full> {
        let firsts = parts.map(|part| self.first_below(entries, part));
        let differ = u64::BITS - 1 - (firsts[0] ^ firsts[1]).leading_zeros();
        let mut node = Node::new(differ / NODE_BITS, firsts[0], parent, object);
        for (first, part) in firsts.into_iter().zip(parts) {
            let child = node.child_of(first);
            node.children[child] = part;
        }
        let id = self.insert(node)?;
        for part in parts {
            self.set_parent(entries, part, id);
        }
        Ok(Child::node(id))
    }

    /// Returns the number of the first page that can be in a part of a tree.
    fn first_below(&self, entries: &Entries, part: Child) -> u64 {
        match part.part() {
            Part::Empty => unreachable!("an empty part of a tree has no first page"),
            Part::Leaf(leaf) => entries.first(leaf),
            Part::Node(id) => self[id].first(),
        }
    }

    fn set_parent(&mut self, entries: &mut Entries, part: Child, parent: Id) {
        match part.part() {
            Part::Empty => {}
            Part::Leaf(leaf) => entries.set_parent(leaf, parent),
            Part::Node(id) => self[id].parent = parent,
        }
    }

    /// Makes `part` the child of `parent` for the page `index`. If `parent` is 0, makes it the
    /// tree's root.
    fn replace(&mut self, root: &mut Child, parent: Id, index: u64, part: Child) {
        if parent == 0 {
            *root = part;
        } else {
            let parent = &mut self[parent];
            let child = parent.child_of(index);
            parent.children[child] = part;
        }
    }

    /// Removes an entry from its tree, and returns it. Also removes the entry's leaf, and the node
    /// above the leaf, if they are no longer needed.
    pub(crate) fn remove_page(&mut self, entries: &mut Entries, root: &mut Child, id: Id) -> Entry {
        let (entry, emptied) = entries.remove(id);
        let Some((first, parent)) = emptied else {
            return entry;
        };
        self.replace(root, parent, first, Child::EMPTY);
        if parent == 0 || self[parent].nr_children() > 1 {
            return entry;
        }
        let mut children = self[parent].children.into_iter();
        let left = children.find(|&child| child != Child::EMPTY);
        let left = left.expect("a node has fewer than two children");
        let removed = self.remove(parent);
        self.set_parent(entries, left, removed.parent);
        self.replace(root, removed.parent, removed.first(), left);
        entry
    }

    /// Walks the whole tree of an object, calls `page` with each page and its entry, and asserts
    /// that the tree is consistent. Returns the numbers of nodes and leaves.
    pub(crate) fn check(
        &self,
        entries: &Entries,
        root: Child,
        object: Id,
        page: &mut impl FnMut(u64, Id),
    ) -> (u32, u32) {
        self.check_part(entries, root, (0, LEVEL_END), object, page)
    }

    fn check_part(
        &self,
        entries: &Entries,
        at: Child,
        (parent, above): (Id, u32),
        object: Id,
        page: &mut impl FnMut(u64, Id),
    ) -> (u32, u32) {
        let id = match at.part() {
            Part::Empty => return (0, 0),
            Part::Leaf(leaf) => {
                entries.check_leaf(leaf, parent, object, page);
                return (0, 1);
            }
            Part::Node(id) => id,
        };
        let node = &self[id];
        assert_eq!(
            (node.parent, node.object),
            (parent, object),
            "node {id} in the tree of object {object} names the wrong parent or object"
        );
        let level = node.below(above);
        assert!(
            node.nr_children() >= 2,
            "node {id} has {} children, fewer than two",
            node.nr_children()
        );
        let (mut nodes, mut leaves) = (1, 0);
        for (child, &part) in node.children.iter().enumerate() {
            if part == Child::EMPTY {
                continue;
            }
            let first = self.first_below(entries, part);
            assert!(node.covers(first) && node.child_of(first) == child);
            let below = self.check_part(entries, part, (id, level), object, page);
            nodes += below.0;
            leaves += below.1;
        }
        (nodes, leaves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Chunks;
    use crate::index::entry::Content;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    const OBJECT: Id = 7;

    /// A tree with the memory that it takes its records from.
    struct Tree {
        nodes: Nodes,
        entries: Entries,
        root: Child,
    }

    impl Tree {
        fn new(nodes_max: u32) -> Tree {
            let chunks = Chunks::some();
            Tree {
                nodes: Nodes::new(nodes_max, Arc::clone(&chunks)),
                entries: Entries::new(1 << 20, &chunks),
                root: Child::EMPTY,
            }
        }

        fn add(&mut self, index: u64, cookie: u64) -> Result<Id, Full> {
            let entry = Entry::new(cookie, 0, Content::Same(0), 0, false);
            let Tree {
                nodes,
                entries,
                root,
            } = self;
            nodes.add_page(entries, root, OBJECT, index, entry)
        }

        fn remove(&mut self, id: Id) -> u64 {
            let entry = self
                .nodes
                .remove_page(&mut self.entries, &mut self.root, id);
            entry.cookie
        }

        fn find(&self, index: u64) -> Id {
            let leaf = self.nodes.leaf(&self.entries, self.root, index);
            leaf.map_or(0, |leaf| self.entries.find(leaf, index))
        }

        fn next(&self, index: u64) -> Option<(u64, Id)> {
            self.nodes.next(&self.entries, self.root, index)
        }

        /// Checks the tree. Returns its pages with their entries.
        fn check(&self) -> BTreeMap<u64, Id> {
            let mut all = BTreeMap::new();
            let counted = self
                .nodes
                .check(&self.entries, self.root, OBJECT, &mut |at, id| {
                    all.insert(at, id);
                });
            assert_eq!(counted, (self.nodes.len(), self.entries.nr_leaves()));
            assert_eq!(self.entries.len() as usize, all.len());
            self.entries.check();
            all
        }
    }

    /// Returns a random page number. Some of the numbers are small, and some are near the largest
    /// possible number.
    fn index(rng: &mut Rng) -> u64 {
        match rng.below(4) {
            0 => rng.below(40),
            1 => (1 << 20) + rng.below(300),
            2 => rng.next() >> rng.below(64),
            _ => u64::MAX - rng.below(40),
        }
    }

    /// Returns a damaged tree with a cycle: the root is its own child for page 5.
    fn circle() -> Tree {
        let mut tree = Tree::new(64);
        for index in [0, u64::MAX] {
            tree.add(index, 1).expect("cannot allocate a leaf");
        }
        let Part::Node(root) = tree.root.part() else {
            panic!("the root of a tree with two leaves is not a node");
        };
        let child = tree.nodes[root].child_of(5);
        tree.nodes[root].children[child] = tree.root;
        tree
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn finding_a_page_in_a_cyclic_page_tree_panics() {
        circle().find(5);
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn finding_the_next_page_in_a_cyclic_page_tree_panics() {
        circle().next(5);
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn adding_a_page_to_a_cyclic_page_tree_panics() {
        let _ = circle().add(5, 3);
    }

    #[test]
    fn page_tree_matches_a_map_model() {
        for_each_seed("page_tree_matches_a_map_model", 20, |seed| {
            let mut rng = Rng::new(seed);
            let mut tree = Tree::new(1 << 20);
            // Maps each page to its entry and cookie.
            let mut model = BTreeMap::new();
            for step in 1..2000 {
                let at = index(&mut rng);
                // Mostly add entries at first, and mostly remove them later.
                if rng.below(2000) > step {
                    model.entry(at).or_insert_with(|| {
                        let id = tree.add(at, step).unwrap();
                        assert_eq!(tree.entries.place(id), (OBJECT, at));
                        (id, step)
                    });
                } else if let Some((&at, _)) = model.range(at..).next() {
                    let (id, cookie) = model.remove(&at).unwrap();
                    assert_eq!(tree.remove(id), cookie);
                    assert!(tree.entries.get(id).is_none());
                }
                let entry = |at| model.get(&at).map_or(0, |(id, _)| *id);
                assert_eq!(tree.find(at), entry(at));
                let next = model.range(at..).next().map(|(at, (id, _))| (*at, *id));
                assert_eq!(tree.next(at), next);
                if step % 100 == 0 {
                    let mut found = [1; 64];
                    let first = at.min(u64::MAX - 63);
                    tree.nodes
                        .find_consecutive(&tree.entries, tree.root, first, &mut found);
                    assert!((0..64).all(|i| found[i as usize] == entry(first + i)));
                    let ids: BTreeMap<u64, Id> =
                        model.iter().map(|(at, (id, _))| (*at, *id)).collect();
                    assert_eq!(tree.check(), ids);
                    for &(id, cookie) in model.values() {
                        assert_eq!({ tree.entries[id].cookie }, cookie);
                    }
                    assert!(tree.nodes.len() < tree.entries.nr_leaves().max(1));
                }
            }
            for (id, _) in model.into_values() {
                tree.remove(id);
            }
            assert_eq!((tree.root, tree.nodes.len()), (Child::EMPTY, 0));
            assert_eq!((tree.nodes.bytes(), tree.entries.bytes()), (0, 0));
        });
    }

    #[test]
    fn a_failed_insert_leaves_the_page_tree_unchanged() {
        let mut tree = Tree::new(0);
        let id = tree.add(5, 1).unwrap();
        // The limit of nodes does not allow the node that would be the parent of both leaves.
        assert_eq!(tree.add(1 << 40, 2), Err(Full));
        assert_eq!(tree.check(), BTreeMap::from([(5, id)]));
    }
}
