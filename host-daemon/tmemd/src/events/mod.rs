// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events for clients of the control interface: the subscriber queues, and the bound on the events
//! that one VM can cause.
//!
//! Belongs here: event kinds and their delivery to subscribers. Out of scope: encoding an event as
//! a varlink reply, see `control/`.

pub mod bus;
pub(crate) mod limit;
