# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The guest's memory in QEMU: huge pages, and how long others wait while a part is discarded."""

import re
import subprocess
from pathlib import Path

import pytest

from machine import RING_ADDRESS, wait_for

HUGE_PAGE_BYTES = 2 << 20

# The virtio balloon: device id, and the queue of reports of a balloon without free page hints.
BALLOON, REPORTS = 5, 3
BALLOON_SLOT = 6
# Range that the test reports. Both ends lie within huge pages.
REPORT_ADDRESS, REPORT_BYTES = 0x1010000, 40 << 20
DEVICE_WRITES = 2  # flag of a descriptor


def report(vm, address, length):
    """Reports a range of free memory in one descriptor, and waits until QEMU has used it."""
    ring = RING_ADDRESS + REPORTS * 0x10000
    vm.write(ring, 8, address)
    vm.write(ring + 8, 4, length)
    vm.write(ring + 12, 4, DEVICE_WRITES)
    vm.write(ring + 0x8002, 2, 1)
    vm.notify(REPORTS)
    wait_for("the report to be used", lambda: vm.read(ring + 0xC002, 2) == 1)


@pytest.mark.parametrize("size", ["64M", "66M"])
@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_shared_memory_can_be_mapped_with_huge_pages(machine, folder, kind, size):
    """QEMU requests huge pages for shared memory and aligns its mapping to their size.

    Whether the kernel then uses huge pages depends on shmem_enabled, or on the mount option `huge`
    of a tmpfs.
    """
    path = f",mem-path={folder}/memory" if kind == "file" else ""
    backend = f"memory-backend-{kind},id=mem,size={size},share=on{path}"
    options = ["-object", backend]
    vm = machine(memory=options, machine=",memory-backend=mem", more=("-m", size))
    maps = Path(f"/proc/{vm.process.pid}/smaps").read_text()
    name = rf"{folder}/memory" if kind == "file" else "/memfd:memory-backend-memfd"
    mapping = rf"^([0-9a-f]+)-\S+ rw-s [^\n]* {re.escape(name)}.*?^VmFlags:(.*?)$"
    found = re.search(mapping, maps, re.MULTILINE | re.DOTALL)
    assert found, f"QEMU has no mapping of {name}"
    assert int(found[1], 16) % HUGE_PAGE_BYTES == 0, f"the mapping begins at {found[1]}"
    assert "hg" in found[2].split(), "QEMU requests no huge pages"


def test_a_reported_range_is_discarded_in_pieces(machine, folder):
    """A guest that reports much memory at once makes nobody wait for more than 2 MiB of it.

    A process that touches the memory, as the daemon does, waits until fallocate() has returned.
    """
    vm = machine(
        more=(
            "-device",
            f"virtio-balloon-pci,addr={BALLOON_SLOT},disable-legacy=on,free-page-reporting=on",
        )
    )
    vm.slot, vm.device_id = BALLOON_SLOT, BALLOON
    vm.driver_up()
    log = folder / "strace"
    with subprocess.Popen(
        ["strace", "-qq", "-e", "trace=fallocate", "-o", log, "-p", str(vm.process.pid)]
    ) as strace:
        status = Path(f"/proc/{vm.process.pid}/status")
        wait_for("strace", lambda: f"TracerPid:\t{strace.pid}\n" in status.read_text())
        report(vm, REPORT_ADDRESS, REPORT_BYTES)
        strace.terminate()
    lengths = [int(each) for each in re.findall(r"PUNCH_HOLE.*, (\d+)\) += 0", log.read_text())]
    assert sum(lengths) == REPORT_BYTES
    assert max(lengths) == HUGE_PAGE_BYTES
