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
from harness.vm import Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

FILES = [f"{WHERE}/{number}" for number in range(8)]
RETURN_SECONDS = 30


def test_device_works_over_virtio_mmio(session: Session, kernel: Kernel, module: Path) -> None:
    daemon = start_daemon(session)
    device = Tmem(daemon.socket("vm1"), num_queues=4).arguments()
    vm = driver_vm(
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
