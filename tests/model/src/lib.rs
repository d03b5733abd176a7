// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest without a VM. It sends requests to a virtio-tmem daemon over vhost-user and checks the
//! answers.
//!
//! [`FakeGuest`] does the work of QEMU and of the transport part of a driver: shared memory,
//! virtqueues, and messages in QEMU's order. [`Model`] decides which answers are allowed.
//! [`Driver`] uses both and is a guest that follows the specification. [`fault`] contains the ways
//! in which a guest can violate the specification.
//!
//! [`daemon`] has daemons that run in the process of a test. Only this module uses the code of the
//! daemon and the engine. All rules of the guest and the oracle come from `proto/SPEC.md` alone, and
//! `tests/independence.rs` checks that they import nothing of the daemon.

pub mod content;
pub mod daemon;
pub mod driver;
pub mod fault;
pub mod frontend;
pub mod memory;
pub mod model;
pub mod requests;
pub mod ring;
pub mod skip;

pub use content::Content;
pub use daemon::{HeadlessDaemon, TestDaemon};
pub use driver::{Driver, DriverConfig};
pub use frontend::{DeviceConfig, Done, FakeGuest, GuestConfig, GuestError, Vmm};
pub use memory::{DirtyLog, GuestRam, RamRegion};
pub use model::{Model, SentRequest, Violation};
pub use requests::{Answer, Cut, Encoded, Key, Page, PageAnswer, PutPage, Range, RefPage, Request};
pub use ring::{Buffer, Desc, DriverRing, RingError};
pub use skip::{Missing, skipped};

/// Makes `cargo test` compile the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
