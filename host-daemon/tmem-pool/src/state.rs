// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One tenant's keys, queue and counters: all that its lock guards, and every change to it.
//!
//! Nothing here compresses, hashes or looks at another tenant. What leaves is handed to the caller
//! in `freed`, who drops it when the lock is released. Each call is bounded: what may be long (an
//! object, a pool, everything) is detached in one step and reaped in small ones.

use crate::account::Account;
use crate::config::{
    EVICTIONS_PER_PUT_PAGE, KEY_METADATA_BYTES, OBJECT_METADATA_BYTES, PAGE_METADATA_CHARGE_BYTES,
    PAGE_SIZE, POOLS_PER_TENANT_MAX, QUEUE_METADATA_BYTES, STALE_SKIPS_MAX,
};
use crate::entry::{Entry, Gauges, Prepared};
use crate::error::{CreateError, NoPool};
use crate::evict::{Fifo, Key, Policy, Token};
use crate::index::{Index, PoolIndex};
use crate::stats::Counters;
use std::collections::VecDeque;

/// An object of at most so many pages is freed by the flush itself, a larger one behind.
pub(crate) const DETACH_PAGES_MIN: u32 = 16;

/// What was detached and is not freed yet.
#[derive(Debug)]
pub(crate) struct Dead {
    pub index: Index,
    /// The queue that goes with it, if everything was detached.
    pub policy: Option<Box<dyn Policy>>,
}

/// See the file's comment.
#[derive(Debug)]
pub(crate) struct State {
    pub index: Index,
    pub policy: Box<dyn Policy>,
    pub dead: VecDeque<Dead>,
    /// Of all that is in `dead`.
    pub detached: Gauges,
    pub limit_bytes: u64,
    pub keys_max: u64,
    pub counters: Counters,
    next_token: Token,
    next_incarnation: u64,
}

/// Why pages are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The tenant is over its own limit.
    Limit,
    /// The pool is over its size.
    Pool,
}

impl State {
    pub(crate) fn new(limit_bytes: u64, keys_max: u64) -> State {
        State {
            index: Index::default(),
            policy: Box::new(Fifo::default()),
            dead: VecDeque::new(),
            detached: Gauges::default(),
            limit_bytes,
            keys_max,
            counters: Counters::default(),
            next_token: 0,
            next_incarnation: 0,
        }
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.index.gauges.charged_bytes()
    }

    pub(crate) fn create_pool(&mut self, account: &Account, id: u32) -> Result<(), CreateError> {
        if self.index.pools.contains_key(&id) {
            return Err(CreateError::Exists);
        }
        if self.index.pools.len() >= POOLS_PER_TENANT_MAX {
            return Err(CreateError::Limit);
        }
        let incarnation = self.next_incarnation;
        self.next_incarnation += 1;
        self.index.pools.insert(
            id,
            PoolIndex {
                incarnation,
                ..PoolIndex::default()
            },
        );
        account.pools.add(1);
        Ok(())
    }

    /// Tells this pool from an earlier or later one of the same id.
    pub(crate) fn incarnation(&self, pool: u32) -> Result<u64, NoPool> {
        self.index
            .pools
            .get(&pool)
            .map(|pool| pool.incarnation)
            .ok_or(NoPool)
    }

    /// Stores a page over whatever was held under its key. False: refused, and nothing is held.
    pub(crate) fn put(
        &mut self,
        account: &Account,
        size_bytes: u64,
        put: NewPage,
        freed: &mut Vec<Entry>,
    ) -> bool {
        let NewPage {
            key,
            cookie,
            workingset,
            prepared,
        } = put;
        self.counters.puts += 1;
        if let Some(old) = self.index.remove_if(account, key, |_| true) {
            self.policy.remove(old.token);
            self.counters.replaced_pages += 1;
            freed.push(old);
        }
        let keys = u64::from(self.index.gauges.pages) + u64::from(self.detached.pages);
        let held_bytes = account.held_bytes()
            + KEY_METADATA_BYTES
            + QUEUE_METADATA_BYTES
            + OBJECT_METADATA_BYTES;
        let fits = keys < self.keys_max
            && held_bytes <= size_bytes
            && self.make_room(account, prepared.charge_bytes(), freed);
        if !fits {
            self.counters.puts_refused += 1;
            return false;
        }
        let token = self.next_token;
        self.next_token += 1;
        self.index
            .insert(account, key, Entry::new(prepared, cookie, token));
        self.policy.insert(token, key, workingset);
        true
    }

    /// Evicts this tenant's own pages until a charge fits under its limit, by as many as the
    /// largest page can need. False: it does not fit; the tenant is far over a limit that was
    /// lowered.
    fn make_room(&mut self, account: &Account, charge_bytes: u64, freed: &mut Vec<Entry>) -> bool {
        const {
            let largest = PAGE_METADATA_CHARGE_BYTES + PAGE_SIZE as u64;
            assert!(largest.div_ceil(PAGE_METADATA_CHARGE_BYTES) <= EVICTIONS_PER_PUT_PAGE as u64);
        }
        let Some(room_bytes) = self.limit_bytes.checked_sub(charge_bytes) else {
            return false;
        };
        for _ in 0..EVICTIONS_PER_PUT_PAGE {
            if self.charged_bytes() <= room_bytes {
                return true;
            }
            self.evict(account, 1, Reason::Limit, freed);
        }
        self.charged_bytes() <= room_bytes
    }

    /// Takes the page out if it is held with this cookie.
    pub(crate) fn take(&mut self, account: &Account, key: Key, cookie: u64) -> Option<Entry> {
        self.counters.gets += 1;
        let mut other_cookie = false;
        let entry = self.index.remove_if(account, key, |entry| {
            other_cookie = entry.cookie != cookie;
            !other_cookie
        });
        self.counters.cookie_mismatches += u64::from(other_cookie);
        if let Some(entry) = &entry {
            self.policy.remove(entry.token);
        }
        entry
    }

    /// Evicts up to `pages`. Returns the steps made; 0: there is nothing to evict.
    pub(crate) fn evict(
        &mut self,
        account: &Account,
        pages: usize,
        reason: Reason,
        freed: &mut Vec<Entry>,
    ) -> usize {
        let (mut evicted, mut skipped) = (0, 0);
        while evicted < pages && skipped < STALE_SKIPS_MAX {
            let Some((token, key)) = self.policy.pop_victim() else {
                break;
            };
            let Some(entry) = self
                .index
                .remove_if(account, key, |entry| entry.token == token)
            else {
                // Detached: it is freed with its object.
                skipped += 1;
                continue;
            };
            freed.push(entry);
            evicted += 1;
        }
        self.counters.evictions += evicted as u64;
        if reason == Reason::Limit {
            self.counters.evictions_limit += evicted as u64;
        }
        evicted.max(usize::from(skipped > 0))
    }

    /// Drops up to `pages_max` pages of `index ..= last`, or a whole object at once. True: there
    /// may be more.
    pub(crate) fn flush(
        &mut self,
        account: &Account,
        range: Range,
        pages_max: usize,
        freed: &mut Vec<Entry>,
    ) -> Result<bool, NoPool> {
        let Range {
            pool: pool_id,
            object: object_id,
            mut index,
            last,
        } = range;
        let pool = self.index.pools.get(&pool_id).ok_or(NoPool)?;
        let Some(object) = pool.objects.get(&object_id) else {
            return Ok(false);
        };
        if (index, last) == (0, u64::MAX) && object.gauges.pages > DETACH_PAGES_MIN {
            let detached = self.index.detach_object(account, pool_id, object_id);
            let detached = detached.expect("the object was found above");
            self.bury(account, detached, None);
            return Ok(false);
        }
        for _ in 0..pages_max {
            let pool = &self.index.pools[&pool_id];
            let next = pool
                .objects
                .get(&object_id)
                .and_then(|o| o.pages.next(index, last));
            let Some(at) = next else { return Ok(false) };
            index = at;
            let key = Key {
                pool: pool_id,
                object: object_id,
                index,
            };
            let entry = self.index.remove_if(account, key, |_| true);
            let entry = entry.expect("the page was found above");
            self.policy.remove(entry.token);
            self.counters.flushed_pages += 1;
            freed.push(entry);
        }
        Ok(true)
    }

    /// Ends a pool at once; its pages are freed behind.
    pub(crate) fn destroy_pool(&mut self, account: &Account, id: u32) -> Result<(), NoPool> {
        let detached = self.index.detach_pool(id).ok_or(NoPool)?;
        self.bury(account, detached, None);
        Ok(())
    }

    /// Ends all pools at once; their pages are freed behind.
    pub(crate) fn clear(&mut self, account: &Account) {
        let index = std::mem::take(&mut self.index);
        let policy = std::mem::replace(&mut self.policy, Box::new(Fifo::default()));
        self.bury(account, index, Some(policy));
    }

    fn bury(&mut self, account: &Account, index: Index, policy: Option<Box<dyn Policy>>) {
        // What holds nothing goes at once: a guest may make and end empty pools, and its VMM may
        // reset it, faster than anyone frees behind it. There are few pools.
        if index.gauges.pages == 0 && policy.as_ref().is_none_or(|policy| policy.len() == 0) {
            account.pools.sub(index.pools.len() as u64);
            return;
        }
        self.counters.flushed_pages += u64::from(index.gauges.pages);
        self.detached.add(index.gauges);
        self.dead.push_back(Dead { index, policy });
    }

    /// Frees up to `pages` of what was detached. Returns the steps made; 0: nothing is left.
    pub(crate) fn reap(
        &mut self,
        account: &Account,
        pages: usize,
        freed: &mut Vec<Entry>,
    ) -> usize {
        let mut steps = 0;
        while steps < pages {
            let Some(dead) = self.dead.front_mut() else {
                break;
            };
            steps += 1;
            if let Some(entry) = dead.index.pop(account) {
                dead.policy
                    .as_mut()
                    .unwrap_or(&mut self.policy)
                    .remove(entry.token);
                self.detached.sub(entry.gauges());
                freed.push(entry);
            } else if dead
                .policy
                .as_mut()
                .and_then(|policy| policy.pop_victim())
                .is_none()
            {
                self.dead.pop_front();
            }
        }
        steps
    }
}

/// A page to store.
pub(crate) struct NewPage {
    pub key: Key,
    pub cookie: u64,
    pub workingset: bool,
    pub prepared: Prepared,
}

/// Pages `index ..= last` of an object.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub pool: u32,
    pub object: u64,
    pub index: u64,
    pub last: u64,
}
