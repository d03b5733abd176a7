// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names in a domain's XML and in QEMU's arguments.

/// Namespace of the metadata element with a VM's quota. `docs/libvirt-metadata.rng` is its schema.
pub const CACHE_NAMESPACE: &str = "urn:virtio-tmem:cache:1";
/// Prefix of [`CACHE_NAMESPACE`] in the XML that attach writes.
pub const CACHE_PREFIX: &str = "tmem";
/// Namespace of the metadata element in which attach records its changes. It differs from
/// [`CACHE_NAMESPACE`]. A user can therefore replace the quota with `virsh metadata --set` without
/// deleting the record.
pub const UNDO_NAMESPACE: &str = "urn:virtio-tmem:undo:1";
/// libvirt's namespace for arguments that libvirt passes to QEMU unchanged.
pub const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Default directory of the sockets at which the daemon serves VMs. The name of each socket is the
/// UUID of its VM with the suffix `.sock`.
pub const SOCKET_DIRECTORY: &str = "/run/virtio-tmem";

/// Name of the virtio-tmem device in QEMU.
pub const DEVICE: &str = "vhost-user-tmem-pci";
