# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver puts a bounded number of pages of a large folio, and gets parts of folios."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import Torture, checksums, growth, settle, stats, wait_state
from test_filesystems import boot

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# First kernel series in which writes to each file system create folios of up to 2 MiB.
LARGE_WRITES = {"ext4": (6, 16), "xfs": (6, 6)}
HUGE_ORDER = 9
# Largest number of pages of a folio that the driver puts, TMEM_FOLIO_MAX_PAGES. The driver copies
# them with interrupts off.
PUT_MAX = 32
WINDOW_KIB = 8192
STREAM_MIB = 48

TRACING = "/sys/kernel/tracing"
REMOVED = f"{TRACING}/events/filemap/mm_filemap_delete_from_page_cache"


@pytest.fixture(params=["ext4", "xfs"])
def file_system(request: pytest.FixtureRequest, kernel: Kernel) -> str:
    name = str(request.param)
    if kernel.version < LARGE_WRITES[name]:
        pytest.skip(f"{name} of Linux {kernel.series} does not write in large folios")
    return name


def watch_evictions(guest: Guest) -> None:
    guest.sh(f"echo >{TRACING}/trace && echo 1 >{REMOVED}/enable")


def orders_evicted(guest: Guest, path: str) -> list[int]:
    """Returns the orders of a file's folios that left the page cache since watch_evictions()."""
    guest.sh(f"echo 0 >{REMOVED}/enable")
    ino = int(guest.sh(f"stat -c %i {path}"))
    trace = guest.get(f"{TRACING}/trace").decode()
    found = re.findall(r"ino ([0-9a-f]+) .*order=(\d+)", trace)
    return [int(order) for number, order in found if int(number, 16) == ino]


def test_put_of_a_512_page_folio_is_limited_to_32_pages(
    session: Session, kernel: Kernel, module: Path, file_system: str
) -> None:
    """The driver puts 32 pages of an evicted folio of 512 pages."""
    guest = boot(session, kernel, module, file_system)
    path = "/mnt/large"
    # The driver records the first 2,048 pages of a bio, so a bio must not have all pages.
    guest.sh(
        f"for i in $(seq 0 7); do dd if=/dev/urandom of={path} bs=2M count=1 seek=$i"
        " conv=notrunc,fsync 2>/dev/null; done",
        60,
    )
    sums = checksums(guest, [path])
    before = settle(guest)
    watch_evictions(guest)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)
    orders = orders_evicted(guest, path)
    assert orders.count(HUGE_ORDER) >= 4, f"fewer than 4 huge folios left the page cache: {orders}"
    bound = sum(min(1 << order, PUT_MAX) for order in orders)
    taken = stats(guest)["puts"] - before["puts"]
    # Pages of other files may be put as well, so the counter may grow by more than `bound`.
    assert bound // 2 <= taken <= bound + PUT_MAX
    # The file has right bytes. Some of its pages come from the pool, the others from the disk.
    assert checksums(guest, [path]) == sums
    wait_state(guest, "on")


@pytest.mark.parametrize("verify", [0, 1])
def test_changed_and_partly_held_folios_read_no_old_byte(
    session: Session, kernel: Kernel, module: Path, file_system: str, verify: int
) -> None:
    """Changes parts of large folios, and reads folios of which only a part is held."""
    guest = boot(session, kernel, module, file_system, f"verify_every={verify}")
    Torture(guest, "--scenario=large --size-max=8388608").finish()
    counters = stats(guest)
    assert counters["hits" if not verify else "verified_hits"] > 100
    assert counters["verify_mismatches"] == 0
    wait_state(guest, "on")


def test_pages_of_a_stream_are_put(
    session: Session, kernel: Kernel, module: Path, file_system: str
) -> None:
    """Readahead in windows of 8 MiB makes no folio of which the driver puts only a part."""
    guest = boot(session, kernel, module, file_system)
    guest.sh(f"echo {WINDOW_KIB} >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    path = "/mnt/stream"
    guest.sh(f"dd if=/dev/urandom of={path} bs=1M count={STREAM_MIB} 2>/dev/null; sync", 60)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    before = stats(guest)
    guest.sh(f"cat {path} >/dev/null && echo 1 >/proc/sys/vm/drop_caches", 60)
    grown = growth(before, stats(guest))
    print(grown)
    assert grown["puts_eligible"] > STREAM_MIB * 256 * 0.9
    assert grown["puts_skipped_large"] < grown["puts_eligible"] * 0.1
