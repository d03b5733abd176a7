// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Index of one tenant's keys. A key consists of the numbers of a pool, an object and a page.
//!
//! Each object has a tree of its pages (tree.rs), with the entries in the tree's leaves
//! (leaves.rs). The index finds an object by a seeded hash of the numbers of its pool and of the
//! object. So the guest, which chooses these numbers, cannot make look-ups slow. Records have
//! numbers (arena.rs), because several structures refer to them. The number of an entry contains
//! that of its leaf. When a policy evicts the page, the index finds the object and the pool of the
//! page through the leaf.
//!
//! An object, a pool or the whole index is detached in constant time. From then on no page of the
//! detached part is found under its key, and these pages count in `detached` instead of `gauges`.
//! Callers free detached parts later, entry by entry. An object is freed with its last page. A
//! detached pool without objects is freed by the next search for detached pages.
//!
//! If there is no memory, the index returns an error and leaves everything as it was. It never
//! aborts the process.

mod arena;
mod buckets;
mod chunks;
pub(crate) mod entry;
mod leaves;
mod map;
mod tree;

pub(crate) use arena::{Full, Id};
pub(crate) use buckets::{BUCKETS_MIN, Buckets, parent};
pub(crate) use chunks::Chunks;
pub(crate) use leaves::Entries;

use crate::heap::Zeroed;
use arena::{Arena, ArenaRecord};
use entry::{Entry, Gauges};
use leaves::leaf_of;
use map::ObjectMap;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use tree::{Child, Nodes};
use twox_hash::XxHash3_64;

/// Key of a page: the numbers of its pool, its object and the page, as the guest uses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub object: u64,
    pub index: u64,
    pub pool: u32,
}

/// Reference to a pool of the tenant, named by its record and its serial number. It is valid until
/// the pool is detached, and never refers to a later pool with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolRef {
    id: Id,
    serial: u64,
    pub sharing: Sharing,
}

/// Which pages may share their bytes with equal pages of a pool. The values are integers because a
/// pool's record may be zeroed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Sharing {
    /// Pages of all tenants of the trust domain, in pools of this kind.
    #[default]
    Domain = 0,
    /// Pages of the same tenant, in pools of this kind.
    Tenant = 1,
}

#[derive(Clone, Debug, Default)]
struct Pool {
    nr: u32,
    detached: bool,
    sharing: Sharing,
    serial: u64,
    /// First object in the list of the pool's objects.
    objects: Id,
    /// Next pool in the list of detached pools or, in a free record, the next free record.
    next: Id,
    gauges: Gauges,
}

// The fields that look-ups read are the first, so that they are rarely in two cache lines.
#[derive(Clone, Debug, Default)]
#[repr(C)]
struct Object {
    nr: u64,
    /// Record of the object's pool. 0 means that the object was detached (dropped as a whole)
    /// without its pool.
    pool: Id,
    /// Next object in the list of the same bucket of `Index::map`, or 0.
    chain: Id,
    /// The object's tree of pages.
    root: Child,
    /// Previous and next object in the list of the pool's objects. If the object was detached
    /// without its pool, they are links of the list of such objects.
    prev: Id,
    next: Id,
    gauges: Gauges,
}

// An object must be small: PAGE_METADATA_CHARGE_BYTES covers one for each page.
const _: () = assert!(size_of::<Object>() == 56);

// SAFETY: all fields of a pool record are integers, or have a value that is the integer 0. So all
// bits zero is a valid value.
unsafe impl Zeroed for Pool {}
// SAFETY: all fields of an object record are integers, for which all bits zero is a valid value.
unsafe impl Zeroed for Object {}

impl ArenaRecord for Pool {
    fn next_free(&self) -> Id {
        self.next
    }

    fn set_free(&mut self, next: Id) {
        self.next = next;
    }
}

impl ArenaRecord for Object {
    fn next_free(&self) -> Id {
        self.next
    }

    fn set_free(&mut self, next: Id) {
        // A free record has the pool 0, so that it is never taken for the record of a live object.
        *self = Object {
            next,
            ..Object::default()
        };
    }
}

/// Index of a tenant's pages: finds the entry of a page by its key.
#[derive(Debug)]
pub(crate) struct Index {
    /// Sums over all pages that are not detached (dropped with their object or pool, and not freed
    /// yet).
    pub gauges: Gauges,
    /// Sums over all pages that are detached: dropped with their object or pool, and not freed yet.
    pub detached: Gauges,
    pub entries: Entries,
    nodes: Nodes,
    objects: Arena<Object>,
    pools: Arena<Pool>,
    /// Record of each live pool, by the number of the pool.
    live: BTreeMap<u32, Id>,
    /// Hash table that finds objects by pool and number. It has the objects of all pools, also of
    /// detached pools. An object that was detached without its pool is not in the table.
    map: ObjectMap,
    /// Object that the last look-up found, or 0. The next request is often for a page of that
    /// object.
    last: Cell<Id>,
    /// Leaf that the last call of `find` or `insert` used, or 0. The next page of a request is
    /// often in that leaf.
    last_leaf: Cell<Id>,
    chunks: Arc<Chunks>,
    seed: u64,
    next_serial: u64,
    detached_pools: Id,
    detached_objects: Id,
}

impl Index {
    /// Creates an empty index for up to `keys_max` pages, including dropped pages that are not
    /// freed yet. The seed must be unknown to the guest.
    pub(crate) fn new(seed: u64, keys_max: u32, chunks: &Arc<Chunks>) -> Index {
        Index {
            gauges: Gauges::default(),
            detached: Gauges::default(),
            entries: Entries::new(keys_max, chunks),
            // The trees have fewer nodes than leaves, and a leaf has at least one page.
            nodes: Arena::new(keys_max, Arc::clone(chunks)),
            objects: Arena::new(keys_max, Arc::clone(chunks)),
            pools: Arena::new(u32::MAX, Arc::clone(chunks)),
            live: BTreeMap::new(),
            map: ObjectMap::new(chunks),
            last: Cell::new(0),
            last_leaf: Cell::new(0),
            chunks: Arc::clone(chunks),
            seed,
            next_serial: 0,
            detached_pools: 0,
            detached_objects: 0,
        }
    }

    /// Returns the number of live pools.
    pub(crate) fn nr_pools(&self) -> usize {
        self.live.len()
    }

    /// Returns the memory of the index in bytes. The map of live pools is not included, because a
    /// tenant has few pools.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.bytes()
            + self.nodes.bytes()
            + self.objects.bytes()
            + self.pools.bytes()
            + self.map.bytes()
    }

    // ---- pools --------------------------------------------------------------------------------

    /// Returns the live pool with this number, or None if there is none.
    pub(crate) fn pool(&self, nr: u32) -> Option<PoolRef> {
        self.live.get(&nr).map(|&id| PoolRef {
            id,
            serial: self.pools[id].serial,
            sharing: self.pools[id].sharing,
        })
    }

    /// Returns whether the pool for which this reference was created is still live.
    pub(crate) fn is_live(&self, pool: PoolRef) -> bool {
        // Compare serial numbers, because the pool's record may be free, or may belong to another
        // pool by now. No two pools of a tenant have the same serial number.
        self.pools.get(pool.id).is_some_and(|record| {
            record.serial == pool.serial && self.live.get(&record.nr) == Some(&pool.id)
        })
    }

    /// Creates an empty pool with a number that no live pool has.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn create_pool(&mut self, nr: u32, sharing: Sharing) -> Result<(), Full> {
        debug_assert!(!self.live.contains_key(&nr));
        let serial = self.next_serial;
        let id = self.pools.insert(Pool {
            nr,
            sharing,
            serial,
            ..Pool::default()
        })?;
        self.next_serial += 1;
        self.live.insert(nr, id);
        Ok(())
    }

    /// Detaches a live pool: its pages are no longer found, and are freed later. A pool without
    /// objects is freed at once.
    pub(crate) fn detach_pool(&mut self, pool: PoolRef) {
        let id = pool.id;
        self.live.remove(&self.pools[id].nr);
        let record = &mut self.pools[id];
        if record.objects == 0 {
            self.pools.remove(id);
            return;
        }
        record.detached = true;
        record.next = self.detached_pools;
        self.detached_pools = id;
        let gauges = record.gauges;
        self.gauges.sub(gauges);
        self.detached.add(gauges);
    }

    /// Detaches all pools: no page of the tenant is found any more, and the pages are freed later.
    pub(crate) fn detach_all(&mut self) {
        while let Some((&nr, _)) = self.live.first_key_value() {
            let pool = self
                .pool(nr)
                .expect("the list of live pools names a pool that is not live");
            self.detach_pool(pool);
        }
    }

    // ---- objects ------------------------------------------------------------------------------

    fn hash(seed: u64, pool: Id, nr: u64) -> u64 {
        let mut key = [0; 12];
        key[..4].copy_from_slice(&pool.to_le_bytes());
        key[4..].copy_from_slice(&nr.to_le_bytes());
        XxHash3_64::oneshot_with_seed(seed, &key)
    }

    fn object(&self, pool: PoolRef, nr: u64) -> Option<Id> {
        let same = |object: &Object| object.nr == nr && object.pool == pool.id;
        // Try the object that the last look-up found. Its record may be free or detached by now.
        // Such records have the pool 0, which no live object has.
        let last = self.last.get();
        if last != 0 && self.objects.get(last).is_some_and(same) {
            return Some(last);
        }
        let hash = Index::hash(self.seed, pool.id, nr);
        let found = self.map.find(&self.objects, hash, same);
        self.last.set(found.unwrap_or(0));
        found
    }

    fn new_object(&mut self, pool: PoolRef, nr: u64) -> Result<Id, Full> {
        let hash = Index::hash(self.seed, pool.id, nr);
        if !self.map.create_first_buckets() {
            return Err(Full);
        }
        let id = self.objects.insert(Object {
            nr,
            pool: pool.id,
            ..Object::default()
        })?;
        let seed = self.seed;
        let hash_of = |object: &Object| Index::hash(seed, object.pool, object.nr);
        self.map.insert(&mut self.objects, hash, id, hash_of);
        self.link(id);
        Ok(id)
    }

    fn head(&mut self, pool: Id) -> &mut Id {
        if pool == 0 {
            &mut self.detached_objects
        } else {
            &mut self.pools[pool].objects
        }
    }

    /// Adds an object to the list of its pool or, if the object has no pool, to the list of
    /// detached objects.
    fn link(&mut self, id: Id) {
        let pool = self.objects[id].pool;
        let next = std::mem::replace(self.head(pool), id);
        self.objects[id].prev = 0;
        self.objects[id].next = next;
        if next != 0 {
            self.objects[next].prev = id;
        }
    }

    fn unlink(&mut self, id: Id) {
        let Object {
            pool, prev, next, ..
        } = self.objects[id];
        if prev == 0 {
            *self.head(pool) = next;
        } else {
            self.objects[prev].next = next;
        }
        if next != 0 {
            self.objects[next].prev = prev;
        }
    }

    /// Removes an object from the hash table, so that no look-up finds it any more.
    fn unmap(&mut self, id: Id) {
        let Object { pool, nr, .. } = self.objects[id];
        let hash = Index::hash(self.seed, pool, nr);
        self.map.remove(&mut self.objects, hash, id);
    }

    /// Returns the number of pages of an object, or 0 if the pool does not have the object.
    pub(crate) fn object_pages(&self, pool: PoolRef, nr: u64) -> u32 {
        self.object(pool, nr)
            .map_or(0, |id| self.objects[id].gauges.pages)
    }

    /// Detaches an object, if the pool has it: its pages are no longer found, and are freed later.
    /// Returns the number of the object's pages, or 0 if the pool does not have the object.
    pub(crate) fn detach_object(&mut self, pool: PoolRef, nr: u64) -> u32 {
        let Some(id) = self.object(pool, nr) else {
            return 0;
        };
        self.unmap(id);
        self.unlink(id);
        self.objects[id].pool = 0;
        self.link(id);
        let gauges = self.objects[id].gauges;
        self.pools[pool.id].gauges.sub(gauges);
        self.gauges.sub(gauges);
        self.detached.add(gauges);
        gauges.pages
    }

    // ---- pages --------------------------------------------------------------------------------

    /// Returns the entry of a page, or 0 if the page has no entry.
    pub(crate) fn find(&self, pool: PoolRef, object: u64, index: u64) -> Id {
        let leaf = self
            .object(pool, object)
            .and_then(|object| self.leaf(object, index));
        leaf.map_or(0, |leaf| self.entries.find(leaf, index))
    }

    /// Returns the leaf of an object's tree whose range contains the page `index`, or None if the
    /// tree has no such leaf.
    fn leaf(&self, object: Id, index: u64) -> Option<Id> {
        if let Some(leaf) = self.last_leaf(object, index) {
            return Some(leaf);
        }
        let root = self.objects[object].root;
        let leaf = self.nodes.leaf(&self.entries, root, index);
        self.last_leaf.set(leaf.unwrap_or(0));
        leaf
    }

    /// Returns the leaf that was used last, if it is the leaf of this page. Its record may be free
    /// by now, or may belong to another tree.
    fn last_leaf(&self, object: Id, index: u64) -> Option<Id> {
        let leaf = self.last_leaf.get();
        let is_leaf = self.entries.is_leaf_of(leaf, object, index);
        is_leaf.then_some(leaf)
    }

    /// Looks up the entries of consecutive pages, beginning with page `index`, one for each element
    /// of `found`. Sets the elements of pages without an entry to 0. The number of the last page
    /// must not exceed u64::MAX.
    pub(crate) fn find_consecutive(
        &self,
        pool: PoolRef,
        object: u64,
        index: u64,
        found: &mut [Id],
    ) {
        match self.object(pool, object) {
            Some(id) => {
                let root = self.objects[id].root;
                self.nodes
                    .find_consecutive(&self.entries, root, index, found);
            }
            None => found.fill(0),
        }
    }

    /// Returns the object's first page at or after `index`: its number and its entry. Returns None
    /// if there is no such page.
    pub(crate) fn next(&self, pool: PoolRef, object: u64, index: u64) -> Option<(u64, Id)> {
        let id = self.object(pool, object)?;
        self.nodes.next(&self.entries, self.objects[id].root, index)
    }

    /// Adds an entry for a page that the live pool does not have yet.
    ///
    /// # Errors
    /// There is no memory, or the tenant already has its largest number of keys. Then nothing
    /// changes.
    pub(crate) fn insert(
        &mut self,
        pool: PoolRef,
        object: u64,
        index: u64,
        entry: Entry,
    ) -> Result<Id, Full> {
        let gauges = entry.gauges();
        let object = match self.object(pool, object) {
            Some(object) => object,
            None => self.new_object(pool, object)?,
        };
        let added = if let Some(leaf) = self.last_leaf(object, index) {
            self.entries.add(leaf, index, entry)
        } else {
            let mut root = self.objects[object].root;
            let (nodes, entries) = (&mut self.nodes, &mut self.entries);
            let added = nodes.add_page(entries, &mut root, object, index, entry);
            self.objects[object].root = root;
            added
        };
        if let Ok(id) = added {
            self.last_leaf.set(leaf_of(id));
            self.count(object, |sum| sum.add(gauges));
        } else if self.objects[object].root == Child::EMPTY {
            self.free_object(object);
        }
        added
    }

    /// Removes the entry of a page, whether the page is detached (dropped, not freed yet) or not.
    /// Frees the page's object, too, if the object becomes empty. Returns the entry.
    pub(crate) fn remove(&mut self, id: Id) -> Entry {
        let (object, _) = self.entries.place(id);
        let mut root = self.objects[object].root;
        let entry = self.nodes.remove_page(&mut self.entries, &mut root, id);
        self.objects[object].root = root;
        let gauges = entry.gauges();
        self.count(object, |sum| sum.sub(gauges));
        if root == Child::EMPTY {
            self.free_object(object);
        }
        entry
    }

    /// Applies a change to all sums that include the pages of an object: those of the object, of
    /// its pool and of the index.
    fn count(&mut self, object: Id, change: impl Fn(&mut Gauges)) {
        let object = &mut self.objects[object];
        change(&mut object.gauges);
        let mut detached = true;
        if object.pool != 0 {
            let pool = &mut self.pools[object.pool];
            change(&mut pool.gauges);
            detached = pool.detached;
        }
        change(if detached {
            &mut self.detached
        } else {
            &mut self.gauges
        });
    }

    /// Frees an object without pages.
    fn free_object(&mut self, id: Id) {
        if self.objects[id].pool != 0 {
            self.unmap(id);
        }
        self.unlink(id);
        self.objects.remove(id);
    }

    /// Changes the entry of a page with `change`, and updates all sums that include the page.
    pub(crate) fn change(&mut self, id: Id, change: impl FnOnce(&mut Entry)) {
        let entry = &mut self.entries[id];
        let before = entry.gauges();
        change(entry);
        let after = entry.gauges();
        let (object, _) = self.entries.place(id);
        self.count(object, |sum| {
            sum.sub(before);
            sum.add(after);
        });
    }

    /// Returns the key of a page, or None if the page is detached (dropped, and not freed yet).
    pub(crate) fn key(&self, id: Id) -> Option<Key> {
        let (object, index) = self.entries.place(id);
        let object = &self.objects[object];
        if object.pool == 0 || self.pools[object.pool].detached {
            return None;
        }
        Some(Key {
            pool: self.pools[object.pool].nr,
            object: object.nr,
            index,
        })
    }

    /// Returns any detached page (one that was dropped with its object or pool, and is not freed
    /// yet). Frees the empty detached pools that it finds, and adds 1 to `steps` for each. Returns
    /// None if there is no detached page, or if `steps` has reached `steps_max`.
    pub(crate) fn any_detached(&mut self, steps: &mut usize, steps_max: usize) -> Option<Id> {
        while *steps < steps_max {
            let mut object = self.detached_objects;
            if object == 0 {
                let pool = self.detached_pools;
                if pool == 0 {
                    return None;
                }
                object = self.pools[pool].objects;
                if object == 0 {
                    self.detached_pools = self.pools[pool].next;
                    self.pools.remove(pool);
                    *steps += 1;
                    continue;
                }
            }
            let root = self.objects[object].root;
            let (_, id) = self.nodes.next(&self.entries, root, 0).expect(
                "a detached object has no page: it should have been freed with its last page",
            );
            return Some(id);
        }
        None
    }

    /// Empties the index without reading its contents, which are unknown after a panic.
    pub(crate) fn abandon(&mut self, keys_max: u32) {
        let next_serial = self.next_serial + 1;
        *self = Index::new(self.seed, keys_max, &Arc::clone(&self.chunks));
        // Continue with the next serial number, so that no reference to an old pool is valid for a
        // new one.
        self.next_serial = next_serial;
    }

    /// Returns the memory from which the index takes chunks of 32 KiB.
    pub(crate) fn chunks(&self) -> &Arc<Chunks> {
        &self.chunks
    }

    /// Returns whether an object or a pool is detached: dropped, and not freed yet.
    pub(crate) fn has_detached(&self) -> bool {
        self.detached_objects != 0 || self.detached_pools != 0
    }

    /// Returns the key of a page of a live pool. The page need not exist.
    pub(crate) fn key_of(&self, pool: PoolRef, object: u64, index: u64) -> Key {
        Key {
            pool: self.pools[pool.id].nr,
            object,
            index,
        }
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the hash of a key for the eviction policy. Equal keys have equal hashes, which the
    /// guest cannot predict.
    pub(crate) fn key_hash(&self, key: Key) -> u64 {
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(&key.pool.to_le_bytes());
        bytes[4..12].copy_from_slice(&key.object.to_le_bytes());
        bytes[12..].copy_from_slice(&key.index.to_le_bytes());
        XxHash3_64::oneshot_with_seed(self.seed, &bytes)
    }

    // ---- invariants ---------------------------------------------------------------------------

    /// Recounts all sums of the index, and calls `page` with each entry and the kind of its pool,
    /// which is not known of an object that was detached without its pool.
    ///
    /// # Panics
    /// If the index contradicts itself.
    pub(crate) fn check(&self, mut page: impl FnMut(Id, &Entry, Option<Sharing>)) {
        let (mut objects, mut nodes, mut leaves, mut pages) = (0, 0, 0, 0);
        let mut check_list = |head: Id, pool: Id| {
            let (mut sum, mut prev, mut id) = (Gauges::default(), 0, head);
            let sharing = (pool != 0).then(|| self.pools[pool].sharing);
            while id != 0 {
                let object = &self.objects[id];
                assert_eq!(
                    (object.pool, object.prev),
                    (pool, prev),
                    "object {} has a wrong pool or a wrong link to the object before it",
                    object.nr
                );
                let mut in_object = Gauges::default();
                let (entries, root) = (&self.entries, object.root);
                let counted = self.nodes.check(entries, root, id, &mut |_, entry_id| {
                    let entry = &self.entries[entry_id];
                    in_object.add(entry.gauges());
                    pages += 1;
                    page(entry_id, entry, sharing);
                });
                nodes += counted.0;
                leaves += counted.1;
                assert!(
                    in_object.pages > 0,
                    "object {} has no page and was not freed",
                    object.nr
                );
                assert_eq!(
                    in_object, object.gauges,
                    "the sums of object {} differ from the recount of its pages",
                    object.nr
                );
                sum.add(in_object);
                if pool != 0 {
                    let hash = Index::hash(self.seed, pool, object.nr);
                    self.map.check(&self.objects, hash, id);
                }
                objects += 1;
                (prev, id) = (id, object.next);
            }
            sum
        };
        let (mut live, mut detached, mut pools) = (Gauges::default(), Gauges::default(), 0);
        for (&nr, &id) in &self.live {
            let pool = &self.pools[id];
            assert!(
                pool.nr == nr && !pool.detached,
                "the list of live pools names pool {} under number {nr}, or the pool is detached",
                pool.nr
            );
            let sum = check_list(pool.objects, id);
            assert_eq!(
                sum, pool.gauges,
                "the sums of pool {nr} differ from the recount of its pages"
            );
            live.add(sum);
            pools += 1;
        }
        let mut id = self.detached_pools;
        while id != 0 {
            let pool = &self.pools[id];
            assert!(
                pool.detached,
                "pool {} is in the list of detached pools and is not detached",
                pool.nr
            );
            let sum = check_list(pool.objects, id);
            assert_eq!(
                sum, pool.gauges,
                "the sums of detached pool {} differ from the recount of its pages",
                pool.nr
            );
            detached.add(sum);
            pools += 1;
            id = pool.next;
        }
        detached.add(check_list(self.detached_objects, 0));
        assert_eq!(
            (live, detached),
            (self.gauges, self.detached),
            "the index's sums over live and detached pages differ from the recount"
        );
        self.entries.check();
        let counted = (pools, objects, nodes, leaves, pages);
        let held = (
            self.pools.len(),
            self.objects.len(),
            self.nodes.len(),
            self.entries.nr_leaves(),
            self.entries.len(),
        );
        assert_eq!(
            counted, held,
            "the recounted numbers of pools, objects, nodes, leaves and entries differ from the numbers of records"
        );
        let mut by_itself = 0;
        let mut id = self.detached_objects;
        while id != 0 {
            by_itself += 1;
            id = self.objects[id].next;
        }
        assert_eq!(
            self.map.len() as u32,
            objects - by_itself,
            "the number of objects in the table differs from the number of objects in the pools"
        );
    }
}

#[cfg(test)]
mod tests;
