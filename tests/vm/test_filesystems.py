# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs the torture program on each kind of ext4 and xfs that the driver serves.

test_torture.py runs more operations, but only on ext4 with default options. test_other_types.py has
the other types.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from driver import (
    DISK_BYTES,
    TORTURE,
    WHERE,
    Torture,
    driver_guest,
    driver_vm,
    load,
    seed,
    start_daemon,
    stats,
    wait_state,
)

from harness import disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import TESTS, guest_program
from harness.session import Session
from harness.vm import Config, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SCENARIOS = [
    "plain", "dirty", "split", "truncate", "punch", "direct", "bmap", "inode", "unmount", "fadvise",
    "swap",
]  # fmt: skip
SMALL = "--files=16 --size-max=524288"

# Kinds of random operations that soon find the fault of kernels whose FALLOC_FL_ZERO_RANGE is
# wrong. On Linux 7.2, 6 of 8 runs of 6,000 operations found it.
ZERO_ONLY = "read,write,zero,sync,truncate"
ZERO_OPERATIONS = 20_000

# File system of whose pages almost none is a block of 4 KiB of the disk, so that it has few hits.
UNALIGNED = "ext4-1k"
# File systems on which a file may have no page that is a block of 4 KiB of the disk.
SMALL_BLOCKS = (UNALIGNED, "xfs-1k")


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    name: str,
    parameters: str = "verify_every=0 swap=1",
    *,
    memory_bytes: int = 320 << 20,
) -> Guest:
    fs = disk.find(name)
    more: dict[str, Any] = {"cpus": 2, "memory_bytes": memory_bytes}
    if name != UNALIGNED:
        return driver_guest(session, kernel, module, parameters=parameters, fs=fs, **more)
    image = fs.make(session.directory / "data.img", DISK_BYTES)
    tmem = Tmem(start_daemon(session).socket("vm1"))
    vm = driver_vm(session, kernel, module, tmem, disks=[disk.Disk("data", image)], **more)
    guest = vm.start()
    # Do not wait for puts.
    load(guest, parameters, fs=fs, online=False)
    wait_state(guest, "on")
    return guest


def mount_arguments(name: str) -> str:
    """Returns the arguments with which the torture program can unmount and mount the disk."""
    fs = disk.find(name)
    options = f" --mount-options={fs.mount_options}" if fs.mount_options else ""
    return f"--device=/dev/vda --fstype={fs.kind}{options}"


def run_random_operations(guest: Guest, name: str, operations: int) -> None:
    arguments = f"--seed={seed()} --ops={operations} {SMALL} --jobs=2 --rounds=2"
    numbers = Torture(guest, f"{arguments} {mount_arguments(name)}", 900).finish()
    assert numbers["ops"] >= operations
    counters = stats(guest)
    print(counters)
    assert name == UNALIGNED or counters["hits"] > operations // 20
    assert counters["mismatches"] == 0
    wait_state(guest, "on")


def skip_unless_mountable(kernel: Kernel, name: str) -> None:
    series = tuple(int(part) for part in kernel.release.split(".")[:2])
    if disk.FILE_SYSTEMS[name].exchange and series < (6, 10):
        pytest.skip(f"Linux {kernel.series} has no XFS_IOC_EXCHANGE_RANGE")


@pytest.mark.smoke
def test_xfs_torture_finds_no_wrong_byte(session: Session, kernel: Kernel, module: Path) -> None:
    """Runs random operations and each scenario on xfs with default options."""
    guest = boot(session, kernel, module, "xfs")
    run_random_operations(guest, "xfs", 6_000)
    for scenario in (*SCENARIOS, "clone", "swapext"):
        numbers = Torture(guest, f"--scenario={scenario} {mount_arguments('xfs')}").finish()
        assert numbers["puts"] > 0, f"scenario {scenario} put no page, so it did not test the cache"


@pytest.mark.parametrize("name", sorted(disk.FILE_SYSTEMS))
def test_random_operations_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path, name: str
) -> None:
    skip_unless_mountable(kernel, name)
    guest = boot(session, kernel, module, name)
    run_random_operations(guest, name, 20_000)
    Torture(guest, f"--seed={seed()} --mode=versions --ops=5000 --mixed").finish()
    exchange = ["exchange"] if disk.FILE_SYSTEMS[name].exchange else []
    for scenario in (*SCENARIOS, *exchange):
        numbers = Torture(guest, f"--scenario={scenario} {mount_arguments(name)}").finish()
        assert name in SMALL_BLOCKS or numbers["puts"] > 0, (
            f"scenario {scenario} put no page, so it did not test the cache"
        )


@pytest.mark.parametrize("name", sorted(disk.FILE_SYSTEMS))
def test_hits_of_random_operations_match_the_disk(
    session: Session, kernel: Kernel, module: Path, name: str
) -> None:
    """The disk reads every hit as well, and the driver must find no difference."""
    skip_unless_mountable(kernel, name)
    guest = boot(session, kernel, module, name, "verify_every=1")
    run_random_operations(guest, name, 5_000)
    counters = stats(guest)
    assert name == UNALIGNED or counters["blocks_gets_equal"] > 100
    assert counters["verify_mismatches"] == 0


@pytest.mark.parametrize("name", ["ext4", "ext4-1k", "ext4-bigalloc", "ext4-nojournal", "xfs"])
def test_torture_omits_an_operation_that_the_stock_kernel_gets_wrong(
    session: Session, kernel: Kernel, name: str
) -> None:
    """Detects kernels whose FALLOC_FL_ZERO_RANGE is wrong without any module.

    See docs/upstream/kernel-faults.md.
    """
    fs = disk.FILE_SYSTEMS[name]
    data = disk.Disk("data", fs.make(session.directory / "data.img", DISK_BYTES))
    guest = session.vm(
        Config(
            kernel,
            disks=[data],
            files={TORTURE: guest_program(TESTS / "guest/torture.c")},
            modules=fs.modules,
        )
    ).start()
    guest.mount("data", WHERE, fs.kind, fs.mount_options)
    # The test uses the newest point release of a series, which may have a fix. So the
    # operation may be right on these kernels as well.
    may_be_wrong = kernel.series in ("7.2", "7.3") and fs.kind == "ext4"
    wrong = []
    for scenario, found, on_disk in (
        ("zero_grow", "version 1 written at offset 4096", "as expected"),
        ("zero_grow_write", "zeroes", "also wrong"),
    ):
        done = guest.run(f"{TORTURE} --scenario={scenario} {WHERE}", 60)
        print(done.text)
        assert done.status in ((0, 1) if may_be_wrong else (0,))
        wrong.append(done.status == 1)
        if wrong[-1]:
            assert re.search(rf"found: .*{found}\n  disk: .*{on_disk}", done.text)
    # The torture program detects the fault of the kernel and omits the operation from its random
    # operations. Otherwise they would find wrong bytes that are not the driver's fault.
    arguments = f"--seed={seed()} --ops={ZERO_OPERATIONS} {SMALL} --only={ZERO_ONLY} --no-evictor"
    done = guest.run(f"{TORTURE} {arguments} {WHERE}", 300)
    print(done.text)
    assert done.status == 0
    left_out = "FALLOC_FL_ZERO_RANGE" in done.text
    assert wrong == [left_out, left_out]
