// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which page of a tenant goes first. One file for each policy.
//!
//! A policy orders one tenant's pages and knows nothing of other tenants, sizes or contents. Its
//! queues run through the entries themselves. It is called under the tenant's lock, so each call
//! takes bounded time.
//!
//! A get takes its page out, and the guest puts it again when it has no room for it any more. So
//! nothing is ever used while it is in a queue: reuse shows as a put of a page that was got not
//! long ago.

mod buckets;
mod fifo;
mod ghost;
mod lru;
mod queue;
mod s3fifo;

use crate::config::PolicyKind;
use crate::index::{Chunks, Entries, Id};
use std::sync::Arc;

/// What is known of a page that was put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Of its key; another run has other ones.
    pub key_hash: u64,
    /// The guest's hint that it was active there.
    pub workingset: bool,
}

/// Why a page leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The guest got it.
    Got,
    /// The policy chose it.
    Evicted,
    /// Anything else: its key means nothing any more, or another content.
    Dropped,
}

/// A policy of this kind, without pages. It takes memory from `chunks`.
pub(crate) fn policy(kind: PolicyKind, chunks: &Arc<Chunks>) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Fifo => Box::new(fifo::Fifo::default()),
        PolicyKind::Lru => Box::new(lru::Lru::default()),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3Fifo::new(Arc::clone(chunks))),
    }
}

/// An order of eviction.
pub(crate) trait Policy: Send + std::fmt::Debug {
    /// An entry was made.
    fn insert(&mut self, entries: &mut Entries, id: Id, arrival: Arrival);

    /// An entry is about to be removed. The hash of its key is wanted for pages got and evicted
    /// only.
    fn remove(&mut self, entries: &mut Entries, id: Id, leave: Leave, key_hash: u64);

    /// The page that should go next, which the caller then removes. It may be one that was detached
    /// from the index.
    fn victim(&mut self, entries: &mut Entries) -> Option<Id>;

    /// Memory held beside the entries.
    fn bytes(&self) -> u64;

    /// Calls `page` with each entry in it, for the invariants.
    fn check(&self, entries: &Entries, page: &mut dyn FnMut(Id));
}
