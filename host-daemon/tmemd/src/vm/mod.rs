// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The VMs that the daemon serves: the state of one VM, the registry of all VMs, and the store from
//! which the daemon restores added VMs at its next start.
//!
//! Belongs here: data about a VM that outlives a single connection. Out of scope: the VM's
//! connection, see `vhost/`, and its virtqueues, see `queue/`.

pub(crate) mod quota;
pub(crate) mod recorder;
pub(crate) mod registry;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod swapped;
