// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of SPEC.md that can be broken on purpose, to check that the simulator detects each broken
//! rule.
//!
//! If the broken rule is one of the driver, the model of the driver breaks it. If it is one of the
//! device, the simulator changes the answers or the requests of the real daemon. The daemon itself
//! is never changed.

macro_rules! mutations {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// Rule that the simulator breaks on purpose. One of the simulator's checks must then fail.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Mutation {
            $($(#[$doc])+ $name,)+
        }

        impl Mutation {
            /// All rules that can be broken on purpose.
            pub const ALL: &[Mutation] = &[$(Mutation::$name,)+];

            /// Returns the mutation (broken rule) with this name, if there is one.
            #[must_use]
            pub fn named(name: &str) -> Option<Mutation> {
                let mut all = Mutation::ALL.iter().copied();
                all.find(|mutation| format!("{mutation:?}") == name)
            }
        }
    };
}

mutations! {
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
    /// The driver keeps the index entries of blocks that a write touches.
    EntryKeptAtWrite,
    /// The driver keeps the records of blocks that a write touches.
    RecordKeptAtWrite,
    /// The driver puts a page while a write of its block is in flight.
    PutDuringWrite,
    /// The driver uses the answer to a get although a write of the block has begun since.
    GetDuringWrite,
    /// The driver records a read although a write of the block began or ended meanwhile.
    ReadRecordedOverWrite,
    /// The driver records a write that has failed.
    FailureRecorded,
    /// The driver continues after a write that has failed, although the disk may execute it later.
    FailureForgotten,
    /// The driver puts an evicted page for the block of its hint, without a comparison with the
    /// record.
    HintTrusted,
    /// The driver uses a disk before all writes have ended that it did not see begin.
    UndrainedStart,
    /// The driver keeps its records over a hibernation, whose image is written after the snapshot of
    /// the memory.
    RecordKeptOverResume,
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
    /// The driver keeps the retained index entry of a block that a write touches.
    RetainedKeptAtWrite,
    /// The driver keeps retained index entries when the file system is unmounted.
    RetainedKeptAtUnmount,
    /// The driver keeps the retained index entries of a get that was not answered in time.
    RetainedKeptAtDeadline,
    /// The driver does not erase the retained index entry of a block that a write touches. It does
    /// not compare the contents either when a page of the block is evicted.
    RetainedUnchecked,
    /// When the driver takes the answer to a get, it adds an index entry for each retained page.
    EntryAddedAtAnswer,
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
