// SPDX-License-Identifier: Apache-2.0 OR MIT
//! First in, first out: the page put longest ago goes first.
//!
//! Since a hit takes a page out and a later put brings it in again, this is least recently used as
//! far as the host can see. Tokens grow, so a tree by token is the queue; unlike a ring it never
//! has to be copied to grow, and a page leaves its middle at once.

use super::{Key, Policy, Token};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Fifo(BTreeMap<Token, Key>);

impl Policy for Fifo {
    fn insert(&mut self, token: Token, key: Key, _workingset: bool) {
        self.0.insert(token, key);
    }

    fn remove(&mut self, token: Token) {
        self.0.remove(&token);
    }

    fn pop_victim(&mut self) -> Option<(Token, Key)> {
        self.0.pop_first()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn key(&self, token: Token) -> Option<Key> {
        self.0.get(&token).copied()
    }
}
