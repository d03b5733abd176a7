// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Poison policy: what happens after a panic under a lock whose data all tenants share. The
//! contents of the store are then unknown, so no guest may be answered from it. The process ends at
//! once.
//!
//! Every page in a pool is a copy. So guests read from their disks until the process has restarted
//! with an empty pool. Two other reactions to the panic would be worse. If threads continued,
//! guests could get wrong bytes. If each use of the lock panicked, as is common with the standard
//! library's locks, the guests' queues would stop one after the other. The process would still seem
//! alive.
//!
//! A panic under a tenant's own lock concerns that tenant only (tenant_shared.rs). A thread that
//! panics while it recompresses a page leaves the page as it was, and holds no lock (sweep.rs).

use std::sync::LockResult;

/// Returns the guard of a lock, or ends the process if a panic has poisoned the lock. `what` is the
/// name of the guarded data, for the log.
pub(crate) fn guard_or_abort<G>(locked: LockResult<G>, what: &str) -> G {
    locked.unwrap_or_else(|_| {
        tracing::error!(
            "a bug in the engine: a panic left {what}, which all VMs share, in an unknown \
             state; the process ends, so that no guest gets wrong bytes"
        );
        std::process::abort()
    })
}

/// Ends the process because `what`, a structure that all tenants share, is inconsistent. If the
/// process continued, it could loop without end under a lock that all tenants need, or use the same
/// memory for two pages.
#[cold]
pub(crate) fn abort_inconsistent(what: &str) -> ! {
    tracing::error!(
        "a bug in the engine, or a fault of this host's memory: {what}, which all VMs share, is \
         inconsistent; the process ends, so that no guest gets wrong bytes"
    );
    std::process::abort()
}
