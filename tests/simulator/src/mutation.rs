// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of SPEC.md that can be broken on purpose, to check that the simulator detects each broken
//! rule.
//!
//! If the broken rule is one of the driver, the model of the driver breaks it. If it is one of the
//! device, the simulator changes the answers or the requests of the real daemon. The daemon itself
//! is never changed.

/// Rule that the simulator breaks on purpose. One of the simulator's checks must then fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// A reset does not reach the device, which keeps its generation and its pages.
    GenerationKept,
    /// The device numbers its generations 1, 2, 3 instead of drawing random ones.
    GenerationCounted,
    /// The device ignores the generation of a request.
    GenerationUnchecked,
    /// The driver keeps its index when the generation changes.
    IndexKept,
    /// The driver sends pages that it copied to its put ring before it last emptied its index.
    EpochIgnored,
    /// The driver keeps its index when it learns of another generation from an answer.
    IndexKeptAtAnswer,
    /// The driver sends no GENERATION requests.
    GenerationUnasked,
    /// The device answers a GENERATION with the generation before the current one.
    GenerationOld,
    /// The device returns the page of a key even if the get names another cookie.
    CookieUnchecked,
    /// The driver gives several puts the same cookie.
    CookieRepeated,
    /// The driver sends the requests of one chunk to several queues instead of one.
    QueueAny,
    /// The device publishes two answers of a queue in the wrong order.
    AnswersSwapped,
    /// A back end writes page data of an answer after it has answered the message that stops the
    /// ring.
    DrainSkipped,
    /// A back end continues to serve a connection after the front end has hung up.
    HangUpIgnored,
    /// The VMM lets the next back end begin after the requests that the previous one left
    /// unanswered. These requests are not replayed and get no answer.
    ReplaySkipped,
    /// At a migration, the VMM loses the pages that the device marked in the dirty log.
    DirtyLogLost,
    /// At a migration, the VMM does not read the dirty log of a lost back end.
    LastLogUnread,
    /// When the device refuses a put, it keeps the page that it had under the key before.
    RefusedLeavesOld,
    /// The device answers a FLUSH without dropping the pages.
    FlushIgnored,
    /// The device keeps a page that it has returned to a get.
    HitKeepsPage,
    /// The driver keeps the index entry of a page that it requested.
    EntryKeptAtGet,
    /// The driver keeps the index entry of a put that was dropped or refused.
    EntryKeptAtDrop,
    /// The driver keeps the index entries of pages that a direct write changed.
    EntryKeptAtDirectWrite,
    /// A put clears the mark of a file that has no direct writer, although pages are still cached.
    MarkClearedAtPut,
    /// The driver learns of a mount late, and does not mark files that may have changed before.
    LateMountUnmarked,
    /// The driver keeps the index entries of truncated pages.
    EntryKeptAtTruncate,
    /// The driver uses the contents of pages that the device answered with MISS.
    MissTaken,
    /// The driver uses bounce pages again before the device has returned them.
    BounceReused,
    /// Readers in the guest wait without a deadline for the device's answer.
    DeadlineMissing,
    /// The driver uses the id of a destroyed pool for a new pool.
    PoolIdReused,
    /// The daemon treats all VMs as one tenant.
    TenantsMixed,
    /// The device writes the beginning of another guest's page into the buffer of a missed get.
    NeighbourShown,
    /// The driver sets bits of `retain` and sends REFs although the feature is not negotiated.
    RetainUnnegotiated,
    /// The driver keeps the retained index entry of a page that is overwritten.
    RetainedKeptAtWrite,
    /// The driver keeps the retained index entries of truncated pages.
    RetainedKeptAtTruncate,
    /// The driver keeps the retained index entries of pages that a direct write changed.
    RetainedKeptAtDirectWrite,
    /// The driver keeps retained index entries when the file system is unmounted.
    RetainedKeptAtUnmount,
    /// The driver keeps the retained index entries of a get that was not answered in time.
    RetainedKeptAtDeadline,
    /// The driver does not erase the retained index entry of a page that is overwritten. It does
    /// not compare the contents either when the page is evicted.
    RetainedUnchecked,
    /// Marking a file does not erase its retained index entries. When such a page is evicted, its
    /// entry still becomes a held entry: an entry whose page a get may request.
    MarkIgnoredByRetained,
    /// An eviction inserts a held entry for a page whose index entry was erased after the eviction
    /// began.
    HeldAfterErase,
    /// When the driver takes the answer to a get, it adds an index entry for each retained page.
    EntryAddedAtAnswer,
    /// The driver lets the device retain the page that contains the end of a file.
    EndRetained,
    /// The driver sends references (REF) of an earlier generation.
    StaleRefSent,
    /// The driver keeps the index entry of a page whose REF was answered with GONE.
    GoneIgnored,
    /// The device executes a REF (reference to a retained page) even if it names another cookie.
    RefCookieUnchecked,
    /// The device keeps a page whose REF it answers with GONE.
    GoneKeepsPage,
    /// The device answers each hit with the flag RETAINED, even if it does not retain the page.
    RetainedFlagAlways,
}

impl Mutation {
    /// All rules that can be broken on purpose.
    pub const ALL: [Mutation; 48] = [
        Mutation::GenerationKept,
        Mutation::GenerationCounted,
        Mutation::GenerationUnchecked,
        Mutation::IndexKept,
        Mutation::EpochIgnored,
        Mutation::IndexKeptAtAnswer,
        Mutation::GenerationUnasked,
        Mutation::GenerationOld,
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

    /// Returns the mutation (broken rule) with this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Mutation> {
        Mutation::ALL.into_iter().find(|m| format!("{m:?}") == name)
    }
}
