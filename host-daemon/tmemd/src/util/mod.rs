// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Building blocks without knowledge of VMs: eventfds, rate limiters and latency histograms.
//!
//! Belongs here: code that several directories of the crate use, and that uses none of them. Out of
//! scope: the actions that a rate limiter admits or rejects.

pub(crate) mod event_fd;
pub(crate) mod histogram;
pub(crate) mod log_limit;
pub(crate) mod rate_limit;
pub(crate) mod request_rate;
