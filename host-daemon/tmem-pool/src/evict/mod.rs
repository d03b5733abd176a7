// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which page of a tenant goes first. One file for each policy.
//!
//! A policy orders one tenant's pages and knows nothing of other tenants, sizes or contents. It is
//! called under the tenant's lock, so each call takes bounded time.

mod fifo;

pub(crate) use fifo::Fifo;

/// Names one stay of a page in the tenant: grows with each put, never reused, not even after a
/// clear.
pub(crate) type Token = u64;

/// Where a page is found in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub object: u64,
    pub index: u64,
    pub pool: u32,
}

/// An order of eviction.
pub(crate) trait Policy: Send + std::fmt::Debug {
    /// A page was stored. `workingset` is the guest's hint that it was active there.
    fn insert(&mut self, token: Token, key: Key, workingset: bool);

    /// A page left: a hit, a flush, a replacement. An unknown token is ignored: the page may be one
    /// that was detached before the tenant was cleared.
    fn remove(&mut self, token: Token);

    /// Takes out the page that should go next. It may be one that was detached from the index and
    /// not freed yet.
    fn pop_victim(&mut self) -> Option<(Token, Key)>;

    /// Pages in it, for the invariants.
    fn len(&self) -> usize;

    /// The page of a token that is in it, for the invariants.
    fn key(&self, token: Token) -> Option<Key>;
}
