// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon: start, reload, stop, and accepting connections.
//!
//! Belongs here: creating the parts in their order and connecting them. Nothing else in the crate
//! depends on this directory.

pub(crate) mod accept;
pub(crate) mod lifecycle;
pub(crate) mod reload;
