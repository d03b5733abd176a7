// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vhost-user back end: one connection and one device for each VM whose front end (VMM) is
//! connected.
//!
//! Belongs here: vhost-user messages and replies. Out of scope: the guest's requests on the
//! virtqueues, see `queue/`.

pub(crate) mod connection;
pub(crate) mod device;
pub(crate) mod reply;
