# SPDX-License-Identifier: GPL-2.0-or-later
# Devices of the small test binary: the devices that the VM tests and the demo use, and
# vhost-user-blk, with which qemu-dev/tests tests a patch of all vhost-user devices.
CONFIG_Q35=y
CONFIG_I440FX=y
CONFIG_MICROVM=y
CONFIG_PCIE_PORT=y
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_BLK=y
CONFIG_VIRTIO_NET=y
CONFIG_VIRTIO_RNG=y
CONFIG_VIRTIO_SERIAL=y
CONFIG_VIRTIO_BALLOON=y
CONFIG_VIRTIO_MEM=y
CONFIG_VHOST_USER_BLK=y
CONFIG_VHOST_USER_RNG=y
CONFIG_VHOST_USER_TMEM=y
CONFIG_SERIAL_ISA=y
CONFIG_ISA_DEBUG=y
CONFIG_PVPANIC_ISA=y
