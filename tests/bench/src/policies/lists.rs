// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Linked lists of keys for the simulated policies: a key is in at most one of `N` lists, and is
//! added and removed in constant time.

use super::requests::Key;

/// Stands for "no key" in links and "no list" in `list`.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    older: Key,
    newer: Key,
    list: u32,
}

/// `N` lists of keys, each in the order in which its keys were added.
pub struct Lists<const N: usize> {
    links: Vec<Link>,
    ends: [(Key, Key); N],
}

impl<const N: usize> Lists<N> {
    /// Creates empty lists for the keys from 0 to `keys` - 1.
    pub fn new(keys: usize) -> Self {
        let unlinked = Link {
            older: NONE,
            newer: NONE,
            list: NONE,
        };
        Lists {
            links: vec![unlinked; keys],
            ends: [(NONE, NONE); N],
        }
    }

    /// Returns the number of the list that has the key.
    pub fn list_of(&self, key: Key) -> Option<usize> {
        let list = self.links[key as usize].list;
        (list != NONE).then_some(list as usize)
    }

    /// Returns the oldest key of a list: the key that has been in the list longest.
    pub fn oldest(&self, list: usize) -> Option<Key> {
        let oldest = self.ends[list].0;
        (oldest != NONE).then_some(oldest)
    }

    /// Returns the next newer key in the list of `key`, or None if `key` is the newest.
    pub fn newer(&self, key: Key) -> Option<Key> {
        let newer = self.links[key as usize].newer;
        (newer != NONE).then_some(newer)
    }

    /// Adds a key, which must be in no list, to a list as its newest key.
    pub fn push(&mut self, list: usize, key: Key) {
        assert_eq!(self.list_of(key), None, "key {key} is already in a list");
        let newest = self.ends[list].1;
        self.links[key as usize] = Link {
            older: newest,
            newer: NONE,
            list: list as u32,
        };
        match newest {
            NONE => self.ends[list].0 = key,
            _ => self.links[newest as usize].newer = key,
        }
        self.ends[list].1 = key;
    }

    /// Removes a key from its list.
    pub fn remove(&mut self, key: Key) {
        let list = self.list_of(key).expect("the key is in no list");
        let Link { older, newer, .. } = self.links[key as usize];
        match older {
            NONE => self.ends[list].0 = newer,
            _ => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.ends[list].1 = older,
            _ => self.links[newer as usize].older = older,
        }
        self.links[key as usize].list = NONE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(lists: &Lists<2>, list: usize) -> Vec<Key> {
        let next = |key: &Key| lists.newer(*key);
        std::iter::successors(lists.oldest(list), next).collect()
    }

    #[test]
    fn lists_keep_the_order_in_which_keys_were_added() {
        let mut lists = Lists::<2>::new(6);
        (0..5).for_each(|key| lists.push(0, key));
        lists.push(1, 5);
        for key in [2, 0, 4] {
            lists.remove(key);
        }
        lists.push(0, 2);
        assert_eq!((keys(&lists, 0), keys(&lists, 1)), (vec![1, 3, 2], vec![5]));
        assert_eq!((lists.list_of(2), lists.list_of(0)), (Some(0), None));
    }
}
