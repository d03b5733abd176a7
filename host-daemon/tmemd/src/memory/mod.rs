// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest memory: the memory table that a front end sets, its mappings, the dirty log, and the cases
//! in which that memory may no longer be touched.
//!
//! Belongs here: every access of the daemon to memory that a front end shares. Out of scope: the
//! vhost-user messages that pass the memory, see `vhost/`.

pub(crate) mod dirty_log;
pub(crate) mod mapping;
pub(crate) mod peer;
pub(crate) mod sigbus;
pub(crate) mod table;
