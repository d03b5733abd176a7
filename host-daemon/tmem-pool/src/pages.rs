// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pages of one object, by index.
//!
//! Most files are small: a few pages live in a sorted vector that is as long as they need, more in
//! a B-tree, whose smallest node would cost a one-page file half a kilobyte.

use crate::entry::Entry;
use std::collections::BTreeMap;

/// Longer than this becomes a tree.
const FEW_MAX: usize = 8;
/// A tree that shrank to this becomes a vector again; lower, so that it does not go back and forth.
const FEW_AGAIN: usize = 4;

#[derive(Debug)]
pub(crate) enum Pages {
    Few(Vec<(u64, Entry)>),
    Many(BTreeMap<u64, Entry>),
}

impl Default for Pages {
    fn default() -> Pages {
        Pages::Few(Vec::new())
    }
}

impl Pages {
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Pages::Few(few) => few.is_empty(),
            Pages::Many(many) => many.is_empty(),
        }
    }

    pub(crate) fn get(&self, index: u64) -> Option<&Entry> {
        match self {
            Pages::Few(few) => few
                .iter()
                .find(|(at, _)| *at == index)
                .map(|(_, entry)| entry),
            Pages::Many(many) => many.get(&index),
        }
    }

    /// The index must not be there.
    pub(crate) fn insert(&mut self, index: u64, entry: Entry) {
        if let Pages::Few(few) = self
            && few.len() == FEW_MAX
        {
            *self = Pages::Many(few.drain(..).collect());
        }
        match self {
            Pages::Few(few) => {
                let at = few.partition_point(|(at, _)| *at < index);
                if few.len() == few.capacity() {
                    few.reserve_exact(few.len().max(1));
                }
                few.insert(at, (index, entry));
            }
            Pages::Many(many) => {
                let before = many.insert(index, entry);
                debug_assert!(before.is_none(), "index {index} was there already");
            }
        }
    }

    pub(crate) fn remove(&mut self, index: u64) -> Option<Entry> {
        match self {
            Pages::Few(few) => {
                let at = few.iter().position(|(at, _)| *at == index)?;
                let (_, entry) = few.remove(at);
                if few.len() <= few.capacity() / 4 {
                    few.shrink_to(few.len() * 2);
                }
                Some(entry)
            }
            Pages::Many(many) => {
                let entry = many.remove(&index)?;
                if many.len() <= FEW_AGAIN {
                    *self = Pages::Few(std::mem::take(many).into_iter().collect());
                }
                Some(entry)
            }
        }
    }

    /// The first page at or after an index, if it is not after `last`.
    pub(crate) fn next(&self, index: u64, last: u64) -> Option<u64> {
        match self {
            Pages::Few(few) => few.iter().map(|(at, _)| *at).find(|at| *at >= index),
            Pages::Many(many) => many.range(index..).next().map(|(at, _)| *at),
        }
        .filter(|at| *at <= last)
    }
}

impl Pages {
    /// All pages in order, for the invariants.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = (u64, &Entry)> + '_> {
        match self {
            Pages::Few(few) => Box::new(few.iter().map(|(at, entry)| (*at, entry))),
            Pages::Many(many) => Box::new(many.iter().map(|(at, entry)| (*at, entry))),
        }
    }

    #[cfg(test)]
    pub(crate) fn get_mut(&mut self, index: u64) -> Option<&mut Entry> {
        match self {
            Pages::Few(few) => few.iter_mut().find(|(at, _)| *at == index).map(|(_, e)| e),
            Pages::Many(many) => many.get_mut(&index),
        }
    }
}
