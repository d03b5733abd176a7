// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks of what all tenants share, and what a panic under one of them means: that nobody knows what
//! the store holds, so nobody may be answered out of it. The process ends at once.
//!
//! Everything in a pool is a copy: guests read from their disks until the process is back, empty.
//! Going on without the lock would risk wrong bytes; a panic at each use, as the language proposes,
//! would stop one queue of a guest after the other and leave a process that looks alive. A panic
//! under a tenant's own lock is that tenant's alone (tenant.rs), and one in the sweep leaves cold
//! pages as they are (pool.rs).

use std::sync::LockResult;

/// The guard, if what it guards is whole. `what`: it, for the log.
pub(crate) fn whole<G>(locked: LockResult<G>, what: &str) -> G {
    locked.unwrap_or_else(|_| {
        tracing::error!(
            "a bug in the engine: a panic left {what} unknown, and with it what all VMs have; the \
             process ends, since nobody may be answered from there"
        );
        std::process::abort()
    })
}

/// Ends the process because a structure that all tenants share contradicts itself. Going on could loop without end
/// under a lock that all tenants need, or hand out one page's memory twice.
#[cold]
pub(crate) fn broken(what: &str) -> ! {
    tracing::error!(
        "a bug in the engine, or a fault of this host's memory: {what} contradicts itself; the process ends, \
         since nobody may be answered from there"
    );
    std::process::abort()
}
