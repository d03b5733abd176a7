// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data path: worker threads that take requests from virtqueues and execute them.
//!
//! Belongs here: waiting for kicks, scheduling queues, reading descriptor chains, executing
//! requests and notifying the guest. Out of scope: setting a queue up, see `vhost/device.rs`.

pub(crate) mod chain;
pub(crate) mod drained;
pub(crate) mod epoll;
pub(crate) mod event_loop;
pub(crate) mod execute;
pub(crate) mod notifier;
mod notifier_ring;
pub(crate) mod poller;
pub(crate) mod polling;
pub mod request;
pub(crate) mod run_queue;
pub(crate) mod slice;
pub(crate) mod uring;
pub(crate) mod vring;
pub(crate) mod worker;
