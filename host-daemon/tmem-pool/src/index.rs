// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One tenant's keys: pool, object, index.
//!
//! Trees throughout, so that no operation has a worst case far from its usual one, and the guest
//! that chooses the ids cannot make look-ups long. An object or a pool is taken out in one step,
//! contents and all. An object without pages and a detached pool do not stay behind.

use crate::account::Account;
use crate::entry::{Entry, Gauges};
use crate::evict::Key;
use crate::pages::Pages;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Object {
    pub pages: Pages,
    pub gauges: Gauges,
}

#[derive(Debug, Default)]
pub(crate) struct PoolIndex {
    /// Tells this pool from a later one of the same id, for a put that began before.
    pub incarnation: u64,
    pub objects: BTreeMap<u64, Object>,
    pub gauges: Gauges,
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    pub pools: BTreeMap<u32, PoolIndex>,
    pub gauges: Gauges,
}

impl Index {
    #[cfg(test)]
    pub(crate) fn get(&self, key: Key) -> Option<&Entry> {
        self.pools
            .get(&key.pool)?
            .objects
            .get(&key.object)?
            .pages
            .get(key.index)
    }

    /// The pool must be there, the key must not.
    pub(crate) fn insert(&mut self, account: &Account, key: Key, entry: Entry) {
        let pool = self
            .pools
            .get_mut(&key.pool)
            .expect("the caller found the pool");
        let object = pool.objects.entry(key.object).or_insert_with(|| {
            account.objects.add(1);
            Object::default()
        });
        let gauges = entry.gauges();
        object.pages.insert(key.index, entry);
        object.gauges.add(gauges);
        pool.gauges.add(gauges);
        self.gauges.add(gauges);
        account.keys.add(1);
    }

    /// Removes the page if it is the wanted one, and its object if that was its last.
    pub(crate) fn remove_if(
        &mut self,
        account: &Account,
        key: Key,
        wanted: impl FnOnce(&Entry) -> bool,
    ) -> Option<Entry> {
        let pool = self.pools.get_mut(&key.pool)?;
        let object = pool.objects.get_mut(&key.object)?;
        object.pages.get(key.index).filter(|entry| wanted(entry))?;
        let entry = object.pages.remove(key.index)?;
        let gauges = entry.gauges();
        object.gauges.sub(gauges);
        pool.gauges.sub(gauges);
        self.gauges.sub(gauges);
        if object.pages.is_empty() {
            pool.objects.remove(&key.object);
            account.objects.sub(1);
        }
        account.keys.sub(1);
        Some(entry)
    }

    /// Takes a whole object out; its pages stay accounted until they are freed.
    pub(crate) fn detach_object(
        &mut self,
        account: &Account,
        pool_id: u32,
        id: u64,
    ) -> Option<Index> {
        let pool = self.pools.get_mut(&pool_id)?;
        let object = pool.objects.remove(&id)?;
        let gauges = object.gauges;
        pool.gauges.sub(gauges);
        self.gauges.sub(gauges);
        let objects = BTreeMap::from([(id, object)]);
        // It needs a pool's nodes around it until it is freed.
        account.pools.add(1);
        let pool = PoolIndex {
            incarnation: pool.incarnation,
            objects,
            gauges,
        };
        Some(Index {
            pools: BTreeMap::from([(pool_id, pool)]),
            gauges,
        })
    }

    /// Takes a whole pool out; like its pages it stays accounted until it is freed.
    pub(crate) fn detach_pool(&mut self, id: u32) -> Option<Index> {
        let pool = self.pools.remove(&id)?;
        let gauges = pool.gauges;
        self.gauges.sub(gauges);
        Some(Index {
            pools: BTreeMap::from([(id, pool)]),
            gauges,
        })
    }

    /// Takes out any page, and each pool and object that is found empty. None: nothing is left.
    pub(crate) fn pop(&mut self, account: &Account) -> Option<Entry> {
        loop {
            let (&pool_id, pool) = self.pools.first_key_value()?;
            let Some((&object_id, object)) = pool.objects.first_key_value() else {
                self.pools.remove(&pool_id);
                account.pools.sub(1);
                continue;
            };
            let index = object
                .pages
                .next(0, u64::MAX)
                .expect("an object has a page");
            let key = Key {
                pool: pool_id,
                object: object_id,
                index,
            };
            return self.remove_if(account, key, |_| true);
        }
    }
}
