# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Uses the device over virtio-mmio, where all queues share one interrupt.

Firecracker, libkrun and QEMU's machine microvm have this transport.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import WHERE, checksums, driver_vm, evict, load, start_daemon, stats, wait_state

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

FILES = [f"{WHERE}/{number}" for number in range(8)]
RETURN_SECONDS = 30


def create_mmio_vm(
    session: Session, kernel: Kernel, module: Path, socket: Path, num_queues: int
) -> Vm:
    """Creates a VM whose device has this number of request queues and uses virtio-mmio."""
    device = Tmem(socket, num_queues=num_queues).arguments()
    return driver_vm(
        session,
        kernel,
        module,
        None,
        machine="microvm,acpi=on,pcie=on",
        modules=["virtio_mmio"],
        tcg_threads="single",
        arguments=[
            # This machine has no clock with which the kernel could find out how fast the counter of
            # the processor is. With -icount, the kernel's other ways are precise enough.
            *("-icount", "shift=1"),
            *("-global", "virtio-mmio.force-legacy=off"),
            *(argument.replace("vhost-user-tmem-pci", "vhost-user-tmem") for argument in device),
        ],
    )


def test_device_works_over_virtio_mmio(session: Session, kernel: Kernel, module: Path) -> None:
    daemon = start_daemon(session)
    vm = create_mmio_vm(session, kernel, module, daemon.socket("vm1"), 4)
    guest = vm.start()
    load(guest)
    place = guest.sh("readlink -f /sys/bus/virtio/drivers/virtio_tmem/virtio*")
    assert "LNRO0005" in place, place
    for path in FILES:
        guest.sh(f"head -c 1048576 /dev/urandom >{path}")
    evict(guest, FILES)
    sums = checksums(guest, FILES)
    served = stats(guest)
    assert served["hits"] > 0
    # A lost interrupt makes an answer late.
    assert served["late"] < served["hits"] // 10, served
    generation = served["generation_changes"]
    daemon.restart()
    until(
        lambda: stats(guest)["generation_changes"] > generation,
        RETURN_SECONDS,
        "the driver finds the new daemon",
    )
    wait_state(guest, "on")
    evict(guest, FILES)
    before = stats(guest)
    assert checksums(guest, FILES) == sums
    after = stats(guest)
    assert after["hits"] > before["hits"]
    assert after["mismatches"] == 0
    vm.quit()


def test_device_with_fewer_queues_than_configured_is_used_over_virtio_mmio(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A queue that does not exist causes another error than with virtio-pci."""
    vm = create_mmio_vm(session, kernel, test_module, start_daemon(session).socket("vm1"), 3)
    guest = vm.start()
    load(guest, "inject_more_queues=1")
    log = guest.sh("dmesg", 60)
    assert "the host's VMM offers 3 request queues only" in log
    assert "virtqueues cannot be set up" not in log
    for path in FILES:
        guest.sh(f"head -c 1048576 /dev/urandom >{path}")
    evict(guest, FILES)
    sums = checksums(guest, FILES)
    evict(guest, FILES)
    assert checksums(guest, FILES) == sums
    counters = stats(guest)
    assert counters["hits"] > 0 and counters["mismatches"] == 0
    vm.quit()
