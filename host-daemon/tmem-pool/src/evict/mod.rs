// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Eviction policies, one file each: they choose which page of a tenant is evicted next.
//!
//! A policy orders one tenant's pages and knows nothing of other tenants, sizes or contents. Its
//! queues run through the entries themselves. The policy is called under the tenant's lock, so each
//! call must take bounded time.
//!
//! A get removes its page, and the guest puts the page again when the guest evicts it again. So no
//! page is used while it is in a queue: a policy sees reuse as a put of a page that a get removed
//! not long ago. A page that a get retains leaves the policy's queues as well, and a reference
//! inserts it again as a put would.

mod adaptive_two_queue;
mod buckets;
mod fifo;
mod ghost;
mod lru;
pub(crate) mod queue;

use crate::config::PolicyKind;
use crate::index::{Chunks, Entries, Id};
use std::sync::Arc;

/// Properties of a page that is put, as far as a policy uses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Hash of the page's key. It differs between runs of the daemon.
    pub key_hash: u64,
    /// The guest's hint that the page was active in the guest.
    pub workingset: bool,
}

/// Reason why a page is removed from its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The guest got the page, which may be retained.
    Got,
    /// The policy chose the page for eviction.
    Evicted,
    /// The page was flushed or overwritten: its key has no content any more, or a new one.
    Dropped,
}

/// Returns a policy of this kind, without pages. The policy takes memory from `chunks`.
pub(crate) fn policy(kind: PolicyKind, chunks: &Arc<Chunks>) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Fifo => Box::new(fifo::Fifo::default()),
        PolicyKind::Lru => Box::new(lru::Lru::default()),
        PolicyKind::AdaptiveTwoQueue => Box::new(adaptive_two_queue::AdaptiveTwoQueue::new(
            Arc::clone(chunks),
        )),
    }
}

/// Eviction policy of one tenant.
pub(crate) trait Policy: Send + std::fmt::Debug {
    /// Adds an entry that is in no queue yet.
    fn insert(&mut self, entries: &mut Entries, id: Id, arrival: Arrival);

    /// Removes an entry. `key_hash` is used only if the page was got or evicted.
    fn remove(&mut self, entries: &mut Entries, id: Id, leave: Leave, key_hash: u64);

    /// Returns the entry of the page to evict next, which the caller then removes. The page may
    /// already be detached from the index.
    fn victim(&mut self, entries: &mut Entries) -> Option<Id>;

    /// Returns the memory in bytes that the policy holds in addition to the entries.
    fn bytes(&self) -> u64;

    /// Calls `page` with each entry of the policy's queues, and asserts that their links are
    /// consistent.
    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id));
}
