// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest without a VM. It sends requests to a virtio-tmem daemon over vhost-user and checks the
//! answers.
//!
//! [`FakeGuest`] does the work of QEMU and of the transport part of a driver: shared memory,
//! virtqueues, and messages in QEMU's order. [`Model`] decides which answers are allowed.
//! [`Driver`] uses both and is a guest that follows the specification. [`fault`] contains the ways
//! in which a guest can violate the specification.
//!
//! Out of scope: code of the daemon or the engine. All rules in this crate come from
//! `proto/SPEC.md` alone.

pub mod content;
pub mod driver;
pub mod fault;
pub mod frontend;
pub mod memory;
pub mod model;
pub mod requests;
pub mod ring;
pub mod skip;

pub use content::Content;
pub use driver::{Driver, DriverConfig};
pub use frontend::{DeviceConfig, Done, FakeGuest, GuestConfig, GuestError, Vmm};
pub use memory::{DirtyLog, GuestRam, RamRegion};
pub use model::{Key, Model, Violation};
pub use requests::{Answer, Cut, Encoded, Page, PageAnswer, PutPage, Range, RefPage, Request};
pub use ring::{Buffer, Desc, DriverRing, RingError};
pub use skip::{Missing, skipped};

/// Makes `cargo test` compile the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
