# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Share of the evicted clean pages that have an equal record, so that they can be put."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import WHERE, driver_guest, growth, settle, stats

from harness import disk, fio
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

RAM_MIB, FILE_MIB, DISK_MIB = 192, 80, 1536
SHARE_MIN = 0.98
COUNTS_MAX = 100
FIO = "/bin/fio --invalidate=0 --thread --name=job --norandommap"
# Commands in the directory of the file "data". None of them deletes or truncates a file, because
# the event also shows the pages of such files.
LOADS = {
    "copy": "cp data a; cp a b; cp b c",
    "read": f"cat data a b c; {FIO} --rw=randread --bs=4k --filename=a --number_ios=6000; cat a b",
    "database": f"{FIO} --rw=randrw --bs=8k --filename=b --number_ios=4000 --fsync=8; cat a b",
    "build": f"mkdir source; {FIO} --rw=write --bs=4k --directory=source --nrfiles=2000"
    " --filesize=4k-64k --openfiles=16 --file_service_type=sequential --create_on_open=1"
    " --fallocate=none; cp -r source other; cat source/* >d; cat other/* >e",
}
EVENT = "/sys/kernel/tracing/events/filemap/mm_filemap_delete_from_page_cache"
HISTOGRAM = f"{EVENT}/hist"


def evicted_pages(guest: Guest) -> int:
    """Returns the number of pages that have left the page cache of the file system so far."""
    number = int(guest.sh(f"stat -c %d {WHERE}"))
    device = number >> 8 << 20 | number & 0xFF  # as the kernel stores it
    row = rf"s_dev: +{device}, order: +(\d+) }} hitcount: +(\d+)"
    rows = re.findall(row, guest.read(HISTOGRAM))
    return sum(int(folios) << int(order) for order, folios in rows)


def count_evicted(guest: Guest) -> tuple[int, dict[str, int]]:
    """Returns the number of evicted pages, and the driver's counters at the same moment.

    kswapd may still evict pages after a load has ended.
    """
    for _ in range(COUNTS_MAX):
        pages, counters = evicted_pages(guest), stats(guest)
        if evicted_pages(guest) == pages:
            return pages, counters
    raise HarnessError(f"kswapd has evicted pages between each of {COUNTS_MAX} counts")


def test_evicted_pages_have_an_equal_record(session: Session, kernel: Kernel, module: Path) -> None:
    """While reclaim runs, also the pages of long bios are recorded, and few records displaced."""
    image = disk.ext4(session.directory / "data.img", DISK_MIB * MIB)
    guest = driver_guest(
        session,
        kernel,
        module,
        cpus=2,
        memory_bytes=RAM_MIB * MIB,
        disks=[disk.Disk("data", image)],
        files={"/bin/fio": fio.program()},
    )
    guest.sh(f"echo 'hist:keys=s_dev,order' >{EVENT}/trigger")
    guest.sh(f"dd if=/dev/urandom of={WHERE}/data bs=1M count={FILE_MIB} && sync", 120)
    shares = {}
    for load, command in LOADS.items():
        pages, before = count_evicted(guest)
        guest.sh(f"cd {WHERE} && ({command}) >/dev/null", 600)
        settle(guest)
        total, after = count_evicted(guest)
        grown = growth(before, after)
        shares[load] = grown["blocks_puts_equal"] / (total - pages)
        print(f"{load}: {total - pages} pages, {shares[load]:.4f} equal, {dict(grown)}")
    assert min(shares.values()) >= SHARE_MIN, shares
