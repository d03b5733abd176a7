# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver's memory follows the guest's RAM when it is hot-plugged or taken by a balloon.

It does not follow RAM from which the kernel itself cannot allocate.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from driver import (
    PARAMETERS,
    driver_vm,
    evict,
    load,
    start_daemon,
    stats,
    wait_served,
    wait_state,
)

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Longest time until the device was set up for another size of RAM: the size has to last for 10 s,
# and the driver looks every 10 s.
RESET_SECONDS = 90
# Size of a file that is read again, which fits the put ring.
FILE_MIB, PAGES_MIB = 2, 256
# The index also has one entry of 8 bytes for each page of RAM, because the device retains pages.
RETAIN_DIVISOR = 512
# Time in seconds for which a test changes RAM: more than the 20 s after which the driver would
# reset the device if RAM had changed only once.
CHANGING_SECONDS = 45
# RAM, part of it that only movable pages may use, and factor by which the size of RAM that counts
# may exceed the rest (KERNEL_RAM_FACTOR).
MOVABLE_RAM_MIB, MOVABLE_MIB, KERNEL_RAM_FACTOR = 2048, 1700, 4


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    mib: int,
    arguments: list[str],
    *modules: str,
    cmdline: str = "",
) -> tuple[Vm, Guest]:
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1")),
        memory_bytes=mib * MIB,
        arguments=arguments,
        modules=list(modules),
        cmdline=cmdline,
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    return vm, guest


def ram(guest: Guest) -> int:
    return int(guest.sh("grep ^MemTotal: /proc/meminfo").split()[1]) * 1024


def kernel_ram(guest: Guest) -> int:
    """Returns the RAM from which the kernel can allocate its own memory."""
    text = guest.read("/proc/zoneinfo")
    zones = re.findall(r"zone +(\w+)\n.*?\bmanaged +(\d+)", text, re.DOTALL)
    return sum(int(pages) * 4096 for name, pages in zones if name != "Movable")


def bound_for(ram_bytes: int) -> int:
    """Returns the documented limit of the driver's memory for a size of RAM, in bytes."""
    return ram_bytes // 100 + 2 * MIB + ram_bytes // RETAIN_DIVISOR


def bound(guest: Guest) -> int:
    """Returns the documented limit of the driver's memory in bytes."""
    return bound_for(ram(guest))


def uptime(guest: Guest) -> float:
    return float(guest.read("/proc/uptime").split()[0])


def limit(guest: Guest) -> int:
    return int(guest.read(f"{PARAMETERS}/test_index_limit"))


def read_and_evict(guest: Guest) -> dict[str, int]:
    guest.sh("cat /mnt/f >/dev/null")
    evict(guest, ["/mnt/f"])
    return stats(guest)


def check_hits(guest: Guest) -> None:
    guest.sh(f"dd if=/dev/urandom of=/mnt/f bs=1M count={FILE_MIB} 2>/dev/null; sync")

    def all_hits() -> bool:
        # Pages for which the put ring had no space are put after this reading.
        before = read_and_evict(guest)["hits"]
        return read_and_evict(guest)["hits"] - before > FILE_MIB * PAGES_MIB * 9 // 10

    # The tables of records follow a little later than the device.
    until(all_hits, RESET_SECONDS, "the pool has the pages of the file")


def test_memory_follows_hot_plugged_ram(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    vm, guest = boot(session, kernel, test_module, 256, ["-m", "slots=2,maxmem=2G"])
    before, limit_before = stats(guest), limit(guest)
    guest.sh("echo online >/sys/devices/system/memory/auto_online_blocks")
    more = {"qom-type": "memory-backend-memfd", "size": 768 * MIB, "id": "more", "share": True}
    vm.qmp.execute("object-add", more)
    vm.qmp.execute("device_add", {"driver": "pc-dimm", "id": "dimm", "memdev": "more"})
    until(lambda: ram(guest) > 900 * MIB, 60, "the guest uses the new memory")
    # The limit follows at once. The put ring and the bounce pages follow after a reset.
    assert limit(guest) > limit_before + 700 * MIB // 100
    until(lambda: stats(guest)["device_resets"] == 1, RESET_SECONDS, "the device is set up again")
    wait_state(guest, "on")
    wait_served(guest)
    after = stats(guest)
    assert after["memory_bytes"] > before["memory_bytes"] + 2 * MIB
    assert after["memory_bytes"] <= bound(guest)
    check_hits(guest)


def test_memory_follows_a_balloon(session: Session, kernel: Kernel, test_module: Path) -> None:
    balloon = ["-device", "virtio-balloon-pci,id=balloon"]
    vm, guest = boot(session, kernel, test_module, 1024, balloon, "virtio_balloon")
    assert stats(guest)["memory_bytes"] > 300 * MIB // 100 + 2 * MIB
    vm.qmp.execute("balloon", {"value": 256 * MIB})
    until(lambda: ram(guest) < 260 * MIB, 120, "the balloon has taken the memory")
    until(
        lambda: stats(guest)["memory_bytes"] <= bound(guest),
        RESET_SECONDS,
        "the driver's memory is within its limit for the smaller RAM",
    )
    wait_state(guest, "on")
    wait_served(guest)
    assert stats(guest)["device_resets"] == 1
    check_hits(guest)


def test_reset_waits_until_ram_keeps_its_size(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A balloon that changes its size all the time causes no reset until it stops."""
    balloon = ["-device", "virtio-balloon-pci,id=balloon"]
    vm, guest = boot(session, kernel, test_module, 1024, balloon, "virtio_balloon")
    vm.qmp.execute("balloon", {"value": 256 * MIB})
    until(lambda: ram(guest) < 260 * MIB, 120, "the balloon has taken the memory")
    end = uptime(guest) + CHANGING_SECONDS
    for mib in itertools.cycle([*range(257, 448), *range(448, 257, -1)]):
        last = ram(guest)
        vm.qmp.execute("balloon", {"value": mib * MIB})
        until(lambda: ram(guest) != last, 10, "the size of RAM changes")  # noqa: B023
        assert stats(guest)["device_resets"] == 0, "a reset while RAM changes"
        if uptime(guest) > end:
            break
    until(lambda: stats(guest)["device_resets"] == 1, RESET_SECONDS, "the device is set up again")
    wait_state(guest, "on")


def test_memory_does_not_follow_ram_for_movable_pages(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver's memory is in the kernel's own zones, and takes a small part of them only."""
    _, guest = boot(
        session,
        kernel,
        test_module,
        MOVABLE_RAM_MIB,
        [],
        cmdline=f"movablecore={MOVABLE_MIB}M",
    )
    counted = KERNEL_RAM_FACTOR * kernel_ram(guest)
    assert counted < ram(guest) * 3 // 4, "too little RAM is for movable pages only"
    counters = stats(guest)
    most = counters["memory_bytes"] - counters["index_bytes"] + limit(guest)
    assert bound_for(counted) * 3 // 4 < most <= bound_for(counted)
