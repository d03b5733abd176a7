// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest memory: the memory table that a front end (VMM) sets, its mappings and the dirty log. Also
//! the cases in which the daemon must not access the memory any more.
//!
//! Belongs here: every access of the daemon to memory that a front end shares. Out of scope: the
//! vhost-user messages that pass the memory, see `vhost/`.

pub(crate) mod backing;
pub(crate) mod budget;
pub(crate) mod dirty_log;
pub(crate) mod files;
pub(crate) mod mapping;
pub(crate) mod peer;
pub(crate) mod sigbus;
pub(crate) mod table;
