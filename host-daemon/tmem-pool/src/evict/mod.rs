// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Eviction policies, one file each: they choose which page of a tenant is evicted next.
//!
//! A policy orders one tenant's pages and knows nothing of other tenants, sizes or contents. Its
//! queues are linked lists through the index entries. The engine calls the policy under the
//! tenant's lock, so each call must take bounded time.
//!
//! A get removes its page, and the guest puts the page again when it evicts the page from its page
//! cache. So no page is used while it is in a queue. A policy recognizes reuse by a put of a page
//! that a get removed a short time ago. A page that a get retains in the pool leaves the policy's
//! queues as well. A reference (REF) inserts it again as a put would.

mod adaptive_two_queue;
mod duel;
mod ghost;
mod lru;
pub(crate) mod queue;
mod sample;

use crate::config::PolicyKind;
use crate::index::entry::Content;
use crate::index::{Chunks, Entries, Id, Index};
use std::sync::Arc;

/// Properties of a page that the guest puts, as far as an eviction policy uses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Hash of the page's key. The hash of a key differs between runs of the daemon.
    pub key_hash: u64,
    /// Hint of the guest: true if the page was active in the guest's page cache.
    pub workingset: bool,
}

/// Reason why a page is removed from the queues of an eviction policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// A get has returned the page to the guest, and has removed it from the pool or retained it.
    Got,
    /// The policy chose the page for eviction.
    Evicted,
    /// The page was flushed or overwritten, so that its key has no content any more, or has new
    /// content.
    Dropped,
}

/// Function that returns how many pages of a trust domain share a content, 1 for a content of one
/// page. Evicting one of several pages with equal content frees no stored bytes.
pub(crate) type References<'a> = &'a dyn Fn(Content) -> u32;

/// [`References`] for evictions that must not depend on pages of other tenants.
pub(crate) fn unshared(_: Content) -> u32 {
    1
}

/// Returns an eviction policy of this kind for a tenant without pages. `seed` determines which pages
/// the policy keeps if it keeps some by their hashes. The policy takes memory from `chunks`.
pub(crate) fn policy(kind: PolicyKind, seed: u64, chunks: &Arc<Chunks>) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(lru::Lru::default()),
        PolicyKind::AdaptiveTwoQueue => Box::new(adaptive_two_queue::AdaptiveTwoQueue::new(
            seed,
            Arc::clone(chunks),
        )),
    }
}

/// Eviction policy of one tenant.
pub(crate) trait Policy: Send + std::fmt::Debug {
    /// Adds the entry of a page that is in no queue yet.
    fn insert(&mut self, entries: &mut Entries, id: Id, arrival: Arrival);

    /// Removes an entry from its queue. `key_hash` is used only if `leave` is `Got` or `Evicted`.
    fn remove(&mut self, entries: &mut Entries, id: Id, leave: Leave, key_hash: u64);

    /// Notes a get of a page that the tenant does not have.
    fn record_miss(&mut self, _key_hash: u64) {}

    /// Notes that the guest flushed a page, which the tenant need not have.
    fn record_flush(&mut self, _key_hash: u64) {}

    /// Prefetches the memory that [`insert`](Self::insert) and [`remove`](Self::remove) read for a
    /// key.
    fn prefetch(&self, _key_hash: u64) {}

    /// Returns the entry of the page to evict next. The caller then removes the entry. The page may
    /// already be detached (dropped in one step with its object or pool, and not freed yet).
    fn victim(&mut self, index: &mut Index, references: References<'_>) -> Option<Id>;

    /// Returns whether the policy keeps a fixed part of the pages now, so that the number of hits is
    /// in proportion to the memory. Otherwise it evicts the oldest pages first.
    fn hits_are_proportional(&self) -> bool {
        false
    }

    /// Returns the memory in bytes that the policy takes in addition to the entries.
    fn bytes(&self) -> u64;

    /// Calls `page` with each entry of the policy's queues, and asserts that the links of the
    /// queues are consistent.
    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id));
}
