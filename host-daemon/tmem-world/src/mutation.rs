// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rules of SPEC.md that can be broken on purpose, to see that the simulator notices.
//!
//! A rule of the driver is broken in the model of the driver, a rule of the device around the real
//! daemon: what it answered is bent, or what it is asked. Never in the daemon itself.

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// A reset tells the device nothing: same generation, pages kept.
    GenerationKept,
    /// The device counts its generations.
    GenerationCounted,
    /// The device does not look at the generation of a request.
    GenerationUnchecked,
    /// The driver keeps its index when the generation changes.
    IndexKept,
    /// The driver sends what was put before it forgot everything.
    EpochIgnored,
    /// The driver never looks at the configuration again.
    ConfigIgnored,
    /// The device returns a page whatever cookie is asked for.
    CookieUnchecked,
    /// The driver gives two puts one cookie.
    CookieRepeated,
    /// The driver sends requests of one chunk to any queue.
    QueueAny,
    /// The device publishes two answers in another order.
    AnswersSwapped,
    /// A backend that was asked to stop writes an answer afterwards.
    DrainSkipped,
    /// A backend goes on after its front end has hung up.
    HangUpIgnored,
    /// The VMM does not ask the next backend for what the last one left.
    ReplaySkipped,
    /// The VMM loses what the device marked in the dirty log.
    DirtyLogLost,
    /// The VMM does not read the dirty log of a backend that is lost.
    LastLogUnread,
    /// A refused put leaves what was held before it.
    RefusedLeavesOld,
    /// A flush drops nothing.
    FlushIgnored,
    /// A hit leaves the page with the device.
    HitKeepsPage,
    /// The driver keeps the entry of a page that it asked for.
    EntryKeptAtGet,
    /// The driver keeps the entry of a put that was dropped or refused.
    EntryKeptAtDrop,
    /// The driver keeps the entries of what a direct write changed.
    EntryKeptAtDirectWrite,
    /// A put clears the mark of a file that nobody has open for writing any more.
    MarkClearedAtPut,
    /// A file system that becomes known late has no marks.
    LateMountUnmarked,
    /// The driver keeps the entries of what was truncated.
    EntryKeptAtTruncate,
    /// The driver takes pages that the device says it has not.
    MissTaken,
    /// The driver uses bounce pages again before the device gave them back.
    BounceReused,
    /// The driver waits for as long as it takes.
    DeadlineMissing,
    /// The driver uses a pool's id again.
    PoolIdReused,
    /// All VMs are one to the daemon.
    TenantsMixed,
    /// The device shows a page of another guest.
    NeighbourShown,
}

impl Mutation {
    /// All there are.
    pub const ALL: [Mutation; 30] = [
        Mutation::GenerationKept,
        Mutation::GenerationCounted,
        Mutation::GenerationUnchecked,
        Mutation::IndexKept,
        Mutation::EpochIgnored,
        Mutation::ConfigIgnored,
        Mutation::CookieUnchecked,
        Mutation::CookieRepeated,
        Mutation::QueueAny,
        Mutation::AnswersSwapped,
        Mutation::DrainSkipped,
        Mutation::HangUpIgnored,
        Mutation::ReplaySkipped,
        Mutation::DirtyLogLost,
        Mutation::LastLogUnread,
        Mutation::RefusedLeavesOld,
        Mutation::FlushIgnored,
        Mutation::HitKeepsPage,
        Mutation::EntryKeptAtGet,
        Mutation::EntryKeptAtDrop,
        Mutation::EntryKeptAtDirectWrite,
        Mutation::MarkClearedAtPut,
        Mutation::LateMountUnmarked,
        Mutation::EntryKeptAtTruncate,
        Mutation::MissTaken,
        Mutation::BounceReused,
        Mutation::DeadlineMissing,
        Mutation::PoolIdReused,
        Mutation::TenantsMixed,
        Mutation::NeighbourShown,
    ];

    /// By its name.
    #[must_use]
    pub fn named(name: &str) -> Option<Mutation> {
        Mutation::ALL.into_iter().find(|m| format!("{m:?}") == name)
    }
}
