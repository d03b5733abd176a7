// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control interface: the varlink service and the statistics that it returns.
//!
//! Belongs here: decoding calls of clients, the permissions of the read-only socket, and building
//! replies. Out of scope: state of VMs, see `vm/`.

pub(crate) mod snapshot;
pub(crate) mod sources;
pub(crate) mod statistics;
pub(crate) mod varlink;
