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
