// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hash table that finds the objects of a tenant. It grows and shrinks by one bucket at a time
//! (buckets.rs), so that no request waits while all objects are moved to a larger table.
//!
//! A bucket has the first object of a list, and each object's record has the next one. The table
//! has two buckets for each object, so a look-up of an unknown object reads half a record on average,
//! and a list seldom has more than a few objects. If there is no memory for another bucket, the
//! lists become longer, and no object is lost.

use super::Object;
use super::arena::{Arena, Id};
use super::buckets::{Buckets, parent};
use super::chunks::Chunks;
use crate::heap::prefetch;
use std::ptr;
use std::sync::Arc;

/// Number of buckets for each object. An object adds this many buckets.
const BUCKETS_PER_OBJECT: usize = 2;

/// Number of buckets for each object at which the table shrinks. It is larger than the number of
/// buckets to which the table grows, so that the table does not grow and shrink alternately. A
/// removed object removes as many buckets, so that the table is never larger.
const SHRINK_AT: usize = 4;

#[derive(Debug)]
pub(super) struct ObjectMap {
    /// First object of each bucket's list, or 0 if the list is empty.
    first: Buckets<Id>,
    len: usize,
}

impl ObjectMap {
    /// Creates a table without objects, which takes memory from `chunks`.
    pub(super) fn new(chunks: &Arc<Chunks>) -> ObjectMap {
        ObjectMap {
            first: Buckets::new(Arc::clone(chunks)),
            len: 0,
        }
    }

    /// Returns the number of objects in the table.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the memory of the table in bytes, without the objects.
    pub(super) fn bytes(&self) -> u64 {
        self.first.bytes()
    }

    /// Returns the object with this hash for which `same` returns true, or None if there is none.
    pub(super) fn find(
        &self,
        objects: &Arena<Object>,
        hash: u64,
        same: impl Fn(&Object) -> bool,
    ) -> Option<Id> {
        let mut id = self.first[self.first.bucket_of(hash)?];
        while id != 0 && !same(&objects[id]) {
            id = objects[id].chain;
        }
        (id != 0).then_some(id)
    }

    /// Prepares the table for one more object. Returns false if the table has no memory at all.
    pub(super) fn create_first_buckets(&mut self) -> bool {
        if self.first.len() == 0 {
            self.first.create_first_buckets();
        }
        self.first.len() > 0
    }

    /// Adds an object with this hash. The caller has called [`begin`](Self::begin), which returned
    /// true. `hash_of` returns the hash of any object of the table.
    pub(super) fn insert(
        &mut self,
        objects: &mut Arena<Object>,
        hash: u64,
        id: Id,
        hash_of: impl Fn(&Object) -> u64,
    ) {
        self.push(objects, hash, id);
        self.len += 1;
        for _ in 0..BUCKETS_PER_OBJECT {
            if self.len * BUCKETS_PER_OBJECT > self.first.len() {
                self.split(objects, &hash_of);
            }
        }
    }

    /// Removes an object, which the table has under this hash.
    pub(super) fn remove(&mut self, objects: &mut Arena<Object>, hash: u64, id: Id) {
        let bucket = self.first.bucket_of(hash);
        let bucket = bucket.expect("an object that is not detached is not in the empty map");
        let next = objects[id].chain;
        let mut at = self.first[bucket];
        if at == id {
            self.first[bucket] = next;
        } else {
            while objects[at].chain != id {
                at = objects[at].chain;
                assert!(at != 0, "an object that is not detached is not in the map");
            }
            objects[at].chain = next;
        }
        self.len -= 1;
        if self.len == 0 {
            self.first.clear();
        }
        for _ in 0..SHRINK_AT {
            if self.len * SHRINK_AT < self.first.len() {
                self.join(objects);
            }
        }
    }

    fn push(&mut self, objects: &mut Arena<Object>, hash: u64, id: Id) {
        let bucket = self.first.bucket_of(hash);
        let bucket = bucket.expect("an object is added to a map without buckets");
        objects[id].chain = std::mem::replace(&mut self.first[bucket], id);
    }

    /// Adds a bucket, which gets its objects from the bucket's parent. Does nothing if there is no
    /// memory.
    fn split(&mut self, objects: &mut Arena<Object>, hash_of: &impl Fn(&Object) -> u64) {
        let len = self.first.len();
        self.first.push(0);
        if self.first.len() == len {
            return;
        }
        let mut id = std::mem::take(&mut self.first[parent(len)]);
        while id != 0 {
            let object = &objects[id];
            let (next, hash) = (object.chain, hash_of(object));
            self.push(objects, hash, id);
            id = next;
        }
        // Prefetch an object of the list that the next new object splits.
        let next = self.first[parent(len + 1)];
        if next != 0 {
            prefetch(ptr::from_ref(&objects[next]).cast());
        }
    }

    /// Removes the last bucket, whose objects move to the bucket's parent.
    fn join(&mut self, objects: &mut Arena<Object>) {
        let Some(moved) = self.first.pop() else {
            return;
        };
        let parent = parent(self.first.len());
        if moved == 0 {
            return;
        }
        let mut last = moved;
        while objects[last].chain != 0 {
            last = objects[last].chain;
        }
        objects[last].chain = std::mem::replace(&mut self.first[parent], moved);
    }

    /// Asserts that the object is in the list of its bucket.
    pub(super) fn check(&self, objects: &Arena<Object>, hash: u64, id: Id) {
        let found = self.find(objects, hash, |object| ptr::eq(object, &objects[id]));
        assert_eq!(
            found,
            Some(id),
            "the map does not find object {id} under its hash"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fail;
    use crate::index::buckets::BUCKETS_MIN;
    use crate::tests::rng::Rng;

    /// Largest number of objects in the list of a bucket. With half an object for each bucket on
    /// the average, one list in 10^12 has more than 12 objects.
    const LIST_MAX: usize = 12;

    struct Model {
        map: ObjectMap,
        objects: Arena<Object>,
        ids: Vec<Id>,
    }

    fn hash_of(object: &Object) -> u64 {
        Rng::new(object.nr).next()
    }

    impl Model {
        fn new() -> Model {
            let chunks = Chunks::some();
            Model {
                map: ObjectMap::new(&chunks),
                objects: Arena::new(1 << 20, chunks),
                ids: Vec::new(),
            }
        }

        fn add(&mut self) {
            let object = Object {
                nr: self.ids.len() as u64,
                ..Object::default()
            };
            let hash = hash_of(&object);
            let id = self.objects.insert(object).unwrap();
            assert!(self.map.create_first_buckets());
            self.map.insert(&mut self.objects, hash, id, hash_of);
            self.ids.push(id);
        }

        fn remove_last(&mut self) {
            let id = self.ids.pop().unwrap();
            let hash = hash_of(&self.objects[id]);
            self.map.remove(&mut self.objects, hash, id);
            self.objects.remove(id);
        }

        /// Returns the objects of each bucket.
        fn lists(&self) -> Vec<Vec<Id>> {
            let list = |nr| {
                let next = |&id: &Id| Some(self.objects[id].chain).filter(|&id| id != 0);
                std::iter::successors(Some(self.map.first[nr]).filter(|&id| id != 0), next)
            };
            (0..self.map.first.len())
                .map(|nr| list(nr).collect())
                .collect()
        }

        fn check(&self) {
            for &id in &self.ids {
                self.map
                    .check(&self.objects, hash_of(&self.objects[id]), id);
            }
            let listed: usize = self.lists().iter().map(Vec::len).sum();
            assert_eq!((listed, self.map.len()), (self.ids.len(), self.ids.len()));
        }
    }

    /// Counts the work of the operations that change the table: each adds two buckets or
    /// removes four at most, changes the lists of five buckets at most, and no list is long.
    #[test]
    fn each_change_of_the_object_map_does_a_bounded_amount_of_work() {
        const OBJECTS: usize = if cfg!(miri) { 200 } else { 1500 };
        let mut model = Model::new();
        model.add();
        let mut before = model.lists();
        for step in 1..2 * OBJECTS - 1 {
            if step < OBJECTS {
                model.add();
            } else {
                model.remove_last();
            }
            let after = model.lists();
            assert!(
                after.len().abs_diff(before.len()) <= SHRINK_AT,
                "step {step} changed the number of buckets from {} to {}",
                before.len(),
                after.len()
            );
            let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert!(changed <= 5, "step {step} changed {changed} buckets");
            let longest = after.iter().map(Vec::len).max();
            assert!(longest <= Some(LIST_MAX), "a list has {longest:?} objects");
            before = after;
        }
        assert_eq!(before.len(), BUCKETS_MIN);
        model.check();
        model.remove_last();
        assert_eq!((model.map.bytes(), model.objects.bytes()), (0, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "adds 200,000 objects")]
    fn lists_of_a_large_object_map_are_short() {
        let mut model = Model::new();
        (0..200_000).for_each(|_| model.add());
        assert_eq!(model.map.first.len(), model.map.len() * BUCKETS_PER_OBJECT);
        let longest = model.lists().iter().map(Vec::len).max();
        assert!(longest <= Some(LIST_MAX), "a list has {longest:?} objects");
        model.check();
    }

    #[test]
    #[cfg_attr(miri, ignore = "adds 20,000 objects")]
    fn an_object_map_that_cannot_grow_keeps_its_objects() {
        let mut model = Model::new();
        model.map.create_first_buckets();
        // All chunks of index memory are taken, so that no bucket can be added.
        let chunks = Arc::new(Chunks::reserve(0).unwrap());
        while chunks.take().is_some() {}
        model.map = ObjectMap::new(&chunks);
        (0..1000).for_each(|_| model.add());
        assert_eq!(model.map.first.len(), BUCKETS_MIN);
        model.check();
        (0..1000).for_each(|_| model.remove_last());
        fail::one_in(1, 1);
        let begun = model.map.create_first_buckets();
        fail::one_in(0, 1);
        assert!(!begun, "the map began without memory");
    }
}
