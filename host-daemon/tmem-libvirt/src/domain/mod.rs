// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and edits the XML of a libvirt domain: the virtio-tmem device, the quota, and how attach
//! and detach add and remove them. Functions take text and return text. Out of scope: libvirt
//! calls, files and sockets.
//!
//! All other parts of the XML stay unchanged. [`attach`] records its changes in the domain's
//! metadata, and [`detach`] reverts only the recorded changes.

mod attach;
mod cache;
mod edit;
mod error;
mod names;
mod pci;
mod read;
mod size;
mod undo;

pub use attach::{Options, attach, detach, move_socket};
pub use cache::{Cache, WEIGHT_MAX};
pub use error::Error;
pub use names::{CACHE_NAMESPACE, CACHE_PREFIX, DEVICE, SOCKET_DIRECTORY};
pub use read::{Device, Domain};
pub use size::{parse_size, write_size};
