// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tree of the index entries of an object's pages. It is a radix tree over page numbers.
//!
//! A node has up to 16 children, one for each value of four bits of the page number. The children
//! of a node of level 0 are entries. A node above level 0 with only one child is left out (as in a
//! Patricia tree, Morrison 1968). So pages that are far apart cost at most two nodes each, whatever
//! numbers a guest chooses. A look-up passes at most 13 nodes if page numbers have 51 bits, as in
//! the protocol. Neighbouring pages lie in one node, which suits readahead and reclaim. Walking a
//! range takes time in proportion to the number of pages in it.

use super::arena::{Arena, ArenaRecord, Full, Id};
use crate::heap::Zeroed;

/// Number of bits of the page number that a node uses to distinguish its children.
const NODE_BITS: u32 = 4;
const FANOUT: usize = 1 << NODE_BITS;

/// A node of a tree. The root of a tree has the `parent` 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Node {
    /// Number of the first page that can be below the node, and the node's level. The lowest four
    /// bits of that page number are 0, so the field stores the level in them.
    first_level: u64,
    parent: Id,
    /// Object to whose tree the node belongs.
    pub object: Id,
    children: [Id; FANOUT],
}

// A node must be small. There is about one node for each 15 pages, so 8 B more for a node would be
// half a byte more for each page.
const _: () = assert!(size_of::<Node>() == 80);
const LEVEL: u64 = FANOUT as u64 - 1;
/// Bound of the level of a tree's root: a number that is larger than the level of any node.
const LEVEL_END: u32 = u32::MAX;
const _: () = assert!(u64::BITS / NODE_BITS - 1 <= LEVEL as u32);

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

/// Place of an entry in a tree: the number of a node of level 0, and the number of the child in
/// that node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hook(u32);

impl Hook {
    /// Largest node number that a [`Hook`] can store. It is at least the largest number of keys of
    /// a tenant.
    pub(crate) const NODES_MAX: u32 = u32::MAX >> NODE_BITS;

    fn new(node: Id, child: usize) -> Hook {
        debug_assert!(node <= Hook::NODES_MAX && child < FANOUT);
        Hook(node << NODE_BITS | child as u32)
    }

    fn node(self) -> Id {
        self.0 >> NODE_BITS
    }

    fn child(self) -> usize {
        self.0 as usize % FANOUT
    }
}

/// All nodes of a tenant's trees. Each object names the root of its tree, where 0 means an empty
/// tree.
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

    /// Returns the level of the node. A node of level n distinguishes its children by four bits of
    /// the page number, from bit 4n on.
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
        self.children.iter().filter(|&&id| id != 0).count()
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
    /// Returns the node of level 0 whose range contains the page `index`, or None if the tree has
    /// no such node.
    fn leaf(&self, root: Id, index: u64) -> Option<Id> {
        let mut at = root;
        let mut above = LEVEL_END;
        while at != 0 {
            let node = &self[at];
            if !node.covers(index) {
                return None;
            }
            above = node.below(above);
            if node.level() == 0 {
                return Some(at);
            }
            at = node.children[node.child_of(index)];
        }
        None
    }

    /// Returns the entry of a page, or 0 if the page has no entry.
    pub(crate) fn find(&self, root: Id, index: u64) -> Id {
        self.leaf(root, index).map_or(0, |leaf| {
            let node = &self[leaf];
            node.children[node.child_of(index)]
        })
    }

    /// Looks up the entries of consecutive pages, beginning with page `index`, one for each element
    /// of `found`. Sets the elements of pages without an entry to 0. The number of the last page
    /// must not exceed u64::MAX.
    pub(crate) fn find_run(&self, root: Id, index: u64, found: &mut [Id]) {
        let mut done = 0;
        while done < found.len() {
            let index = index + done as u64;
            let child = index as usize % FANOUT;
            let nr = (FANOUT - child).min(found.len() - done);
            let part = &mut found[done..done + nr];
            match self.leaf(root, index) {
                Some(leaf) => part.copy_from_slice(&self[leaf].children[child..child + nr]),
                None => part.fill(0),
            }
            done += nr;
        }
    }

    /// Returns the tree's first page at or after `index`: its number and its entry. Returns None if
    /// there is no such page.
    pub(crate) fn next(&self, root: Id, index: u64) -> Option<(u64, Id)> {
        self.next_below(root, index, LEVEL_END)
    }

    /// Returns the first page at or after `index` in the subtree of the node `at`: its number and
    /// its entry. Returns None if there is no such page. Panics if the level of the node is not
    /// below `above`.
    fn next_below(&self, at: Id, index: u64, above: u32) -> Option<(u64, Id)> {
        if at == 0 {
            return None;
        }
        let node = &self[at];
        if index > node.last() {
            return None;
        }
        let index = index.max(node.first());
        let level = node.below(above);
        (node.child_of(index)..FANOUT).find_map(|child| {
            let id = node.children[child];
            if id != 0 && level == 0 {
                return Some((node.first() + child as u64, id));
            }
            self.next_below(id, index, level)
        })
    }

    /// Returns the object and the page number of the entry at this place of a tree.
    pub(crate) fn place(&self, hook: Hook) -> (Id, u64) {
        let node = &self[hook.node()];
        (node.object, node.first() + hook.child() as u64)
    }

    /// Adds an entry for a page that has none yet, and returns its place in the tree.
    ///
    /// # Errors
    /// There is no memory for a node. Then nothing changes.
    pub(crate) fn hang(
        &mut self,
        root: &mut Id,
        object: Id,
        index: u64,
        entry: Id,
    ) -> Result<Hook, Full> {
        let (mut parent, mut at) = (0, *root);
        let mut above = LEVEL_END;
        while at != 0 {
            let node = &mut self[at];
            if !node.covers(index) {
                break;
            }
            above = node.below(above);
            let child = node.child_of(index);
            if node.level() == 0 {
                debug_assert_eq!(node.children[child], 0, "page {index} already has an entry");
                node.children[child] = entry;
                return Ok(Hook::new(at, child));
            }
            (parent, at) = (at, node.children[child]);
        }
        let mut leaf = Node::new(0, index, parent, object);
        let child = leaf.child_of(index);
        leaf.children[child] = entry;
        let leaf = self.insert(leaf)?;
        let mut top = leaf;
        if at != 0 {
            // The tree already has a node where the new leaf belongs. Create a node that becomes
            // the parent of the leaf and of that node.
            top = match self.join(parent, at, leaf) {
                Ok(top) => top,
                Err(full) => {
                    self.remove(leaf);
                    return Err(full);
                }
            };
        }
        if parent == 0 {
            *root = top;
        } else {
            let parent = &mut self[parent];
            let child = parent.child_of(index);
            parent.children[child] = top;
        }
        Ok(Hook::new(leaf, child))
    }

    /// Creates a node below `parent` whose children are the nodes `a` and `b`.
    ///
    /// # Errors
    /// There is no memory for the node.
    fn join(&mut self, parent: Id, a: Id, b: Id) -> Result<Id, Full> {
        let firsts = [self[a].first(), self[b].first()];
        let differ = u64::BITS - 1 - (firsts[0] ^ firsts[1]).leading_zeros();
        let object = self[a].object;
        let mut node = Node::new(differ / NODE_BITS, firsts[0], parent, object);
        for (first, id) in firsts.into_iter().zip([a, b]) {
            let child = node.child_of(first);
            node.children[child] = id;
        }
        let id = self.insert(node)?;
        self[a].parent = id;
        self[b].parent = id;
        Ok(id)
    }

    /// Removes the entry at this place of the tree. Also removes nodes that are no longer needed.
    pub(crate) fn unhook(&mut self, root: &mut Id, hook: Hook) {
        let leaf = hook.node();
        let node = &mut self[leaf];
        debug_assert_ne!(node.children[hook.child()], 0);
        node.children[hook.child()] = 0;
        if node.nr_children() > 0 {
            return;
        }
        let leaf = self.remove(leaf);
        let (parent, first) = (leaf.parent, leaf.first());
        if parent == 0 {
            *root = 0;
            return;
        }
        let node = &mut self[parent];
        let child = node.child_of(first);
        node.children[child] = 0;
        if node.nr_children() > 1 {
            return;
        }
        let left = node.children.into_iter().find(|&id| id != 0);
        let left = left.expect("a node above level 0 has fewer than two children");
        let gone = self.remove(parent);
        let (parent, first) = (gone.parent, gone.first());
        self[left].parent = parent;
        if parent == 0 {
            *root = left;
        } else {
            let node = &mut self[parent];
            let child = node.child_of(first);
            node.children[child] = left;
        }
    }

    /// Walks the whole tree of an object, calls `page` with each entry, and asserts that the tree
    /// is consistent. Returns the number of nodes.
    pub(crate) fn check(&self, root: Id, object: Id, page: &mut impl FnMut(u64, Id, Hook)) -> u32 {
        if root == 0 {
            return 0;
        }
        assert_eq!(
            self[root].parent, 0,
            "the root of object {object}'s tree has a parent"
        );
        self.check_node(root, object, page)
    }

    fn check_node(&self, at: Id, object: Id, page: &mut impl FnMut(u64, Id, Hook)) -> u32 {
        let node = &self[at];
        assert_eq!(
            node.object, object,
            "node {at} in the tree of object {object} names the wrong object"
        );
        let least = if node.level() > 0 { 2 } else { 1 };
        assert!(
            node.nr_children() >= least,
            "node {at} has {} children, fewer than {least}",
            node.nr_children()
        );
        let mut nodes = 1;
        for (child, &id) in node.children.iter().enumerate().filter(|(_, id)| **id != 0) {
            if node.level() == 0 {
                page(node.first() + child as u64, id, Hook::new(at, child));
                continue;
            }
            let below = &self[id];
            assert_eq!(
                below.parent, at,
                "node {id} is a child of node {at} and names the wrong parent"
            );
            assert!(
                below.level() < node.level(),
                "node {id} of level {} is the child of a node of level {}",
                below.level(),
                node.level()
            );
            assert!(node.covers(below.first()) && node.child_of(below.first()) == child);
            nodes += self.check_node(id, object, page);
        }
        nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Chunks;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::BTreeMap;

    const OBJECT: Id = 7;

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
    fn circle() -> (Nodes, Id) {
        let mut nodes = Nodes::new(64, Chunks::some());
        let mut root = 0;
        for (index, entry) in [(0, 1), (u64::MAX, 2)] {
            nodes
                .hang(&mut root, OBJECT, index, entry)
                .expect("cannot allocate a node");
        }
        let child = nodes[root].child_of(5);
        nodes[root].children[child] = root;
        (nodes, root)
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn finding_a_page_in_a_cyclic_page_tree_panics() {
        let (nodes, root) = circle();
        nodes.find(root, 5);
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn finding_the_next_page_in_a_cyclic_page_tree_panics() {
        let (nodes, root) = circle();
        nodes.next(root, 5);
    }

    #[test]
    #[should_panic(expected = "is the child of a node of level")]
    fn adding_a_page_to_a_cyclic_page_tree_panics() {
        let (mut nodes, mut root) = circle();
        let _ = nodes.hang(&mut root, OBJECT, 5, 3);
    }

    #[test]
    fn page_tree_matches_a_map_model() {
        for_each_seed("page_tree_matches_a_map_model", 20, |seed| {
            let mut rng = Rng::new(seed);
            let mut nodes = Nodes::new(1 << 20, Chunks::some());
            let (mut root, mut hooks) = (0, BTreeMap::new());
            for step in 1..2000 {
                let at = index(&mut rng);
                // Mostly add entries at first, and mostly remove them later.
                if rng.below(2000) > step {
                    hooks.entry(at).or_insert_with(|| {
                        let hook = nodes.hang(&mut root, OBJECT, at, step as Id).unwrap();
                        assert_eq!(nodes.place(hook), (OBJECT, at));
                        (step as Id, hook)
                    });
                } else if let Some((&at, _)) = hooks.range(at..).next() {
                    let (_, hook) = hooks.remove(&at).unwrap();
                    nodes.unhook(&mut root, hook);
                }
                let entry = |at| hooks.get(&at).map_or(0, |(id, _)| *id);
                assert_eq!(nodes.find(root, at), entry(at));
                let next = hooks.range(at..).next().map(|(at, (id, _))| (*at, *id));
                assert_eq!(nodes.next(root, at), next);
                if step % 100 == 0 {
                    let mut found = [1; 64];
                    let first = at.min(u64::MAX - 63);
                    nodes.find_run(root, first, &mut found);
                    assert!((0..64).all(|i| found[i as usize] == entry(first + i)));
                    let mut all = BTreeMap::new();
                    let used = nodes.check(root, OBJECT, &mut |at, id, hook| {
                        all.insert(at, (id, hook));
                    });
                    assert_eq!((all, used), (hooks.clone(), nodes.len()));
                    assert!(used as usize <= 2 * hooks.len());
                }
            }
            for (_, hook) in hooks.into_values() {
                nodes.unhook(&mut root, hook);
            }
            assert_eq!((root, nodes.len(), nodes.bytes()), (0, 0, 0));
        });
    }

    #[test]
    fn a_failed_insert_leaves_the_page_tree_unchanged() {
        let mut nodes = Nodes::new(2, Chunks::some());
        let mut root = 0;
        let a = nodes.hang(&mut root, OBJECT, 5, 1).unwrap();
        // The limit of two nodes allows a second leaf, but not the node that would be the parent of
        // both leaves.
        assert_eq!(nodes.hang(&mut root, OBJECT, 1 << 40, 2), Err(Full));
        assert_eq!(
            nodes.check(root, OBJECT, &mut |at, id, hook| {
                assert_eq!((at, id, hook), (5, 1, a));
            }),
            1
        );
        assert_eq!(nodes.len(), 1);
    }
}
