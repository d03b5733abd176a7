// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XML of a libvirt domain as virtio-tmem sees it: what it says of the device and of the quota,
//! and how both are put in and taken out. Text in, text out: no libvirt here, no files, no sockets.
//!
//! What is not the device's stays as it is, byte for byte. [`attach`] notes in the domain's metadata
//! what it changed, and [`detach`] takes back just that.

mod attach;
mod cache;
mod edit;
mod pci;
mod read;
mod size;
mod undo;

pub use attach::{Options, attach, detach, move_socket};
pub use cache::{Cache, WEIGHT_MAX};
pub use read::{Device, Domain};
pub use size::{parse_size, write_size};

use std::fmt;

/// Namespace of the metadata element that holds the quota; `docs/libvirt-metadata.rng` describes it.
pub const CACHE_NAMESPACE: &str = "urn:virtio-tmem:cache:1";
/// Prefix that stands for it in the XML that is written.
pub const CACHE_PREFIX: &str = "tmem";
/// Namespace of the metadata element that notes what [`attach`] changed. Of its own, so that who
/// replaces the quota with `virsh metadata --set` does not lose it.
pub const UNDO_NAMESPACE: &str = "urn:virtio-tmem:undo:1";
/// libvirt's namespace for what it passes to QEMU as it is.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Where the daemon's sockets for VMs are, each named after its VM's UUID.
pub const SOCKET_FOLDER: &str = "/run/virtio-tmem";

/// QEMU's name of the device.
pub const DEVICE: &str = "vhost-user-tmem-pci";

/// Why a domain cannot be read or changed: a sentence that names element and value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<roxmltree::Error> for Error {
    fn from(error: roxmltree::Error) -> Error {
        Error(format!("this is not the XML of a domain: {error}"))
    }
}
