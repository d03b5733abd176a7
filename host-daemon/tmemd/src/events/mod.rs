// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events for clients of the control interface: the queues of subscribers, and the rate limit on
//! the events that one VM can cause.
//!
//! Belongs here: the kinds of events and their delivery to subscribers. Out of scope: encoding an
//! event as a varlink reply, see `control/`.

pub mod bus;
pub(crate) mod limit;
