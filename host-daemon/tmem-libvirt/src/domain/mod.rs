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
mod pci;
mod read;
mod size;
mod undo;

pub use attach::{Options, attach, detach, move_socket};
pub use cache::{Cache, WEIGHT_MAX};
pub use read::{Device, Domain};
pub use size::{parse_size, write_size};

/// Namespace of the metadata element with a VM's quota. `docs/libvirt-metadata.rng` is its schema.
pub const CACHE_NAMESPACE: &str = "urn:virtio-tmem:cache:1";
/// Prefix of [`CACHE_NAMESPACE`] in the XML that this crate writes.
pub const CACHE_PREFIX: &str = "tmem";
/// Namespace of the metadata element in which [`attach`] records its changes. It differs from
/// [`CACHE_NAMESPACE`]. A user can therefore replace the quota with `virsh metadata --set` without
/// deleting the record.
pub const UNDO_NAMESPACE: &str = "urn:virtio-tmem:undo:1";
/// libvirt's namespace for arguments that libvirt passes to QEMU unchanged.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Default directory of the sockets at which the daemon serves VMs. The name of each socket is the
/// UUID of its VM with the suffix `.sock`.
pub const SOCKET_FOLDER: &str = "/run/virtio-tmem";

/// Name of the virtio-tmem device in QEMU.
pub const DEVICE: &str = "vhost-user-tmem-pci";

/// Reason why a domain's XML cannot be read or changed: a sentence that names the element and its
/// value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

impl From<roxmltree::Error> for Error {
    fn from(error: roxmltree::Error) -> Error {
        Error(format!("this is not the XML of a domain: {error}"))
    }
}
