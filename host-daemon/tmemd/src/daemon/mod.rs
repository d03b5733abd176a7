// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon: start, reload, stop, and accepting connections.
//!
//! Belongs here: code that creates the parts of the daemon in their order and connects them.
//! Nothing else in the crate depends on this directory.

pub(crate) mod accept;
pub(crate) mod lifecycle;
pub(crate) mod reload;
