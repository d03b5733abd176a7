// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rules of SPEC.md that can be broken on purpose, to check that the simulator detects each
//! broken rule.
//!
//! A rule of the driver is broken in the model of the driver. A rule of the device is broken around
//! the real daemon, by changing its answers or its requests. The daemon itself is never changed.

/// Rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// A reset does not reach the device, which keeps its generation and its pages.
    GenerationKept,
    /// The device counts its generations instead of drawing random ones.
    GenerationCounted,
    /// The device ignores the generation of a request.
    GenerationUnchecked,
    /// The driver keeps its index when the generation changes.
    IndexKept,
    /// The driver sends pages that were put before it last emptied its index.
    EpochIgnored,
    /// The driver never reads the configuration again.
    ConfigIgnored,
    /// The device returns a page whatever cookie the get names.
    CookieUnchecked,
    /// The driver gives two puts one cookie.
    CookieRepeated,
    /// The driver sends the requests of one chunk to several queues instead of one.
    QueueAny,
    /// The device publishes two answers in the wrong order.
    AnswersSwapped,
    /// A back end writes data of an answer after it has answered the message that stops the ring.
    DrainSkipped,
    /// A back end continues to serve a connection after the front end has hung up.
    HangUpIgnored,
    /// The VMM does not make the next back end replay the requests that the last one left
    /// unanswered.
    ReplaySkipped,
    /// The VMM loses the pages that the device marked in the dirty log.
    DirtyLogLost,
    /// The VMM does not read the dirty log of a lost back end.
    LastLogUnread,
    /// A refused put leaves the page that was held before it.
    RefusedLeavesOld,
    /// A flush drops nothing.
    FlushIgnored,
    /// A hit leaves the page in the device.
    HitKeepsPage,
    /// The driver keeps the entry of a page that it requested.
    EntryKeptAtGet,
    /// The driver keeps the entry of a put that was dropped or refused.
    EntryKeptAtDrop,
    /// The driver keeps the entries of pages that a direct write changed.
    EntryKeptAtDirectWrite,
    /// A put clears the mark of a file that has no writer any more.
    MarkClearedAtPut,
    /// A file system that is registered late has no marks.
    LateMountUnmarked,
    /// The driver keeps the entries of truncated pages.
    EntryKeptAtTruncate,
    /// The driver uses pages that the device answered as missing.
    MissTaken,
    /// The driver uses bounce pages again before the device has returned them.
    BounceReused,
    /// The driver's readers wait without a deadline.
    DeadlineMissing,
    /// The driver uses a pool's id again.
    PoolIdReused,
    /// The daemon treats all VMs as one tenant.
    TenantsMixed,
    /// The device writes the beginning of another guest's page into the buffer of a get.
    NeighbourShown,
    /// The driver sets bits of `retain` and sends REFs although the feature is not negotiated.
    RetainUnnegotiated,
    /// The driver keeps the retained entry of a page that is overwritten.
    RetainedKeptAtWrite,
    /// The driver keeps the retained entries of truncated pages.
    RetainedKeptAtTruncate,
    /// The driver keeps the retained entries of pages that a direct write changed.
    RetainedKeptAtDirectWrite,
    /// The driver keeps retained entries when the file system is unmounted.
    RetainedKeptAtUnmount,
    /// The driver keeps the retained entries of a get that was not answered in time.
    RetainedKeptAtDeadline,
    /// The driver neither erases the retained entry of a page that is overwritten, nor compares its
    /// content when it is evicted.
    RetainedUnchecked,
    /// A mark neither erases retained entries, nor keeps the driver from making them held.
    MarkIgnoredByRetained,
    /// An eviction makes an entry held that was erased after the eviction began.
    HeldAfterErase,
    /// The answer to a get adds an entry for each page that the device retains.
    EntryAddedAtAnswer,
    /// The driver lets the device retain the page that contains the end of a file.
    EndRetained,
    /// The driver sends REFs of an earlier generation.
    StaleRefSent,
    /// The driver keeps the entry of a page whose REF was answered with GONE.
    GoneIgnored,
    /// The device executes a REF whatever cookie it names.
    RefCookieUnchecked,
    /// The device keeps a page whose REF it answers with GONE.
    GoneKeepsPage,
    /// The device says of each hit that it retains the page.
    RetainedFlagAlways,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Mutation; 46] = [
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
        Mutation::RetainUnnegotiated,
        Mutation::RetainedKeptAtWrite,
        Mutation::RetainedKeptAtTruncate,
        Mutation::RetainedKeptAtDirectWrite,
        Mutation::RetainedKeptAtUnmount,
        Mutation::RetainedKeptAtDeadline,
        Mutation::RetainedUnchecked,
        Mutation::MarkIgnoredByRetained,
        Mutation::HeldAfterErase,
        Mutation::EntryAddedAtAnswer,
        Mutation::EndRetained,
        Mutation::StaleRefSent,
        Mutation::GoneIgnored,
        Mutation::RefCookieUnchecked,
        Mutation::GoneKeepsPage,
        Mutation::RetainedFlagAlways,
    ];

    /// Returns the mutation with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Mutation> {
        Mutation::ALL.into_iter().find(|m| format!("{m:?}") == name)
    }
}
