# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Attacks of guests on QEMU: random accesses, and faults of QEMU's virtio and vhost code.

QEMU 10.0.13 of Debian has fixes of these faults.
"""

import random

import pytest

from machine import NEEDS_RESET, wait_for

BLOCK, RNG = 2, 4
LARGEST_QUEUE = 1024
# Number of random accesses, and values of the status at the steps of a driver's start.
ACCESSES, STATUSES = 4000, (0, 1, 3, 11, 15, 128)
RING = 0x100000
INDIRECT, AVAILABLE = 1 << 2, 1 << 7  # flags of a descriptor of a packed ring
# Address of the first plugged memory, and ACPI's registers to unplug it.
DIMM_ADDRESS = 4 << 30
DIMM_BYTES = 2 << 20
SELECT_SLOT, SLOT_FLAGS, EJECT = 0xA00, 0xA14, 1 << 3


def other_device(machine, slot, device_id, *options):
    """Creates a machine in which the test drives a virtio device other than vhost-user-tmem."""
    vm = machine(more=options)
    vm.slot, vm.device_id = slot, device_id
    vm.driver_up(rings=RING)
    return vm


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_register_accesses_do_no_harm(machine, backend, seed):
    """A guest that misuses its registers harms neither QEMU nor the device after a reset."""
    daemon = backend()
    vm = machine()
    vm.driver_up()
    assert vm.wait_generation(daemon.generation())
    generator = random.Random(seed)
    # The common registers include the status, and the addresses and sizes of the rings.
    regions = ((vm.common, 64), (vm.common, 64), (vm.device_config, 32), (vm.doorbell, 64))
    for _ in range(ACCESSES):
        base, length = generator.choice(regions)
        size = generator.choice((1, 2, 4))
        address = base + generator.randrange(0, length, size)
        match generator.randrange(8):
            case 0:
                vm.set_status(generator.choice(STATUSES))
            case 1 | 2 | 3:
                vm.write(address, size, generator.getrandbits(8 * size))
            case 4:
                vm.write(address, size, generator.randrange(4))
            case _:
                vm.read(address, size)
        daemon.read()  # so that the backend never waits until it can print an event
    vm.alive()
    vm.status()
    vm.driver_up()
    vm.wait_generation(None)
    assert vm.generation() == daemon.generation()


def test_devices_offer_the_largest_queue_size(machine):
    """QEMU sets up each queue with the largest size, which a driver can only make smaller."""
    vm = other_device(machine, 6, RNG, "-device", "virtio-rng-pci,addr=6,disable-legacy=on")
    vm.reset()
    assert vm.read(vm.common + 24, 2) == LARGEST_QUEUE


@pytest.mark.parametrize("length", [0, 1])
def test_invalid_indirect_table_in_a_packed_ring_sets_needs_reset(machine, length):
    """An indirect table of length 0 or 1 sets NEEDS_RESET, and QEMU neither aborts nor polls on."""
    vm = other_device(
        machine,
        6,
        BLOCK,
        *("-blockdev", "null-co,node-name=disk,size=1048576"),
        *("-device", "virtio-blk-pci,addr=6,disable-legacy=on,packed=on,drive=disk"),
    )
    vm.write(RING, 8, RING + 0x4000)
    vm.write(RING + 8, 4, length)
    vm.write(RING + 12, 2, 0)
    vm.write(RING + 14, 2, INDIRECT | AVAILABLE)
    vm.notify(0)
    wait_for("NEEDS_RESET", lambda: vm.get_status() & NEEDS_RESET)
    vm.alive()


def test_replaced_ring_memory_sets_needs_reset(machine, backend):
    """If the memory of a ring is unplugged and replaced by other memory, QEMU sets NEEDS_RESET."""
    daemon = backend()
    vm = machine(device=",num-queues=1", more=["-m", "64M,slots=2,maxmem=1G"])

    def plug(name):
        memory = {"qom-type": "memory-backend-memfd", "size": DIMM_BYTES, "share": True}
        vm.qmp("object-add", id=f"mem-{name}", **memory)
        vm.qmp("device_add", driver="pc-dimm", id=name, memdev=f"mem-{name}", addr=DIMM_ADDRESS)

    plug("first")
    vm.driver_up(rings=DIMM_ADDRESS)
    assert vm.wait_generation(daemon.generation())
    vm.qmp("device_del", id="first")
    vm.command(f"outl {SELECT_SLOT:#x} 0")
    vm.command(f"outb {SLOT_FLAGS:#x} {EJECT:#x}")
    wait_for("the memory to be unplugged", lambda: not vm.qmp("query-memory-devices"))
    plug("second")
    wait_for("NEEDS_RESET", lambda: vm.get_status() & NEEDS_RESET)
    vm.driver_up()
    vm.wait_generation(None)
    assert vm.generation() == daemon.generation()
