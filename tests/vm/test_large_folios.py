# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver puts all pages of large folios, and gets parts of folios."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import (
    PATIENT,
    WHERE,
    Hold,
    Torture,
    checksums,
    driver_guest,
    growth,
    programs,
    settle,
    start_daemon,
    stats,
    wait_state,
)
from test_blocks_checks import GROUP, SPECIAL, make_group, omit_check, start_reclaim
from test_filesystems import boot

from harness import disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# First kernel series in which writes to each file system create folios of up to 2 MiB.
LARGE_WRITES = {"ext4": (6, 16), "xfs": (6, 6)}
# First kernel series in which the order of readahead grows with each window.
RA_ORDER_SINCE = (6, 17)
HUGE_ORDER = 9
HUGE_PAGES = 1 << HUGE_ORDER
HUGE_FILES = 8
PAGE = 4096
# Page in the middle of a huge folio.
WRITTEN = HUGE_PAGES // 2
# With this much memory, the put ring has space for the pages of a huge folio.
MEMORY_BYTES = 1 << 30
# Largest order of a folio of readahead, READAHEAD_ORDER_MAX of the driver.
STREAM_ORDER = 5
WINDOW_KIB = 8192
STREAM_MIB = 48

TRACING = "/sys/kernel/tracing"
REMOVED = f"{TRACING}/events/filemap/mm_filemap_delete_from_page_cache"
QUEUED = f"{TRACING}/events/block/block_bio_queue"
WRITE_MIB = 128
# A long bio, in sectors. Without large folios, bios have 256 pages.
LONG_SECTORS = 8192 * 8


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


def test_all_pages_of_a_folio_of_512_pages_are_put(
    session: Session, kernel: Kernel, module: Path, file_system: str
) -> None:
    """The driver puts each page of an evicted folio of 512 pages, and the file has right bytes."""
    guest = boot(session, kernel, module, file_system, memory_bytes=MEMORY_BYTES)
    paths = [f"/mnt/large{number}" for number in range(HUGE_FILES)]
    whole = []
    for path in paths:
        guest.sh(f"dd if=/dev/urandom of={path} bs=2M count=1 conv=fsync 2>/dev/null", 60)
        sums = checksums(guest, [path])
        before = settle(guest)
        watch_evictions(guest)
        guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
        grown = growth(before, settle(guest))
        orders = orders_evicted(guest, path)
        print(path, orders, grown["puts"], grown["puts_dropped_ring_full"])
        assert grown["puts"] + grown["puts_dropped_ring_full"] >= HUGE_PAGES
        if orders == [HUGE_ORDER]:
            whole.append(grown["puts"] >= HUGE_PAGES)
        assert checksums(guest, [path]) == sums
    assert len(whole) >= HUGE_FILES // 2 and whole.count(True) >= HUGE_FILES // 4
    wait_state(guest, "on")


def write_to_evicted(guest: Guest, path: str) -> tuple[list[int], int, bool]:
    """Writes to a block of a file after reclaim has removed its folio, and before it is put.

    Returns the orders of the file's folios, the number of puts, and whether a cached read returns
    the bytes of the disk.
    """
    guest.sh(
        f"echo $$ >{GROUP}/cgroup.procs;"
        f" dd if=/dev/urandom of={path} bs=2M count=1 conv=fsync 2>/dev/null"
    )
    place = int(guest.sh(f"{SPECIAL} place {path} {WRITTEN * PAGE}"))
    before = settle(guest)
    watch_evictions(guest)
    hold = Hold(guest, "free")
    job = start_reclaim(guest)
    hold.wait()
    guest.sh(
        f"dd if=/dev/zero of=/dev/{guest.disk('data')} bs={PAGE} seek={place // PAGE} count=1"
        " conv=notrunc oflag=direct 2>/dev/null"
    )
    hold.release()
    job.wait()
    puts = growth(before, settle(guest))["puts"]
    orders = orders_evicted(guest, path)
    return orders, puts, guest.run(f"{SPECIAL} same {path}").status == 0


def test_write_between_removal_and_put_reaches_a_page_of_a_huge_folio(
    session: Session, kernel: Kernel, test_module: Path, file_system: str
) -> None:
    """Reclaim puts each page of a folio of 512 pages but the one whose block was written."""
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"}),
        parameters=f"verify_every=0 {PATIENT}",
        fs=disk.find(file_system),
        cpus=2,
        memory_bytes=MEMORY_BYTES,
        files=programs(SPECIAL),
    )
    make_group(guest)
    for check in ("erase", ""):
        omit_check(guest, check)
        for number in range(HUGE_FILES):
            orders, puts, right = write_to_evicted(guest, f"{WHERE}/{check}{number}")
            print(check, orders, puts, right)
            if orders == [HUGE_ORDER]:
                break
        assert orders == [HUGE_ORDER]
        assert puts == HUGE_PAGES - (not check)
        assert right == (not check)


def test_all_pages_of_a_long_bio_are_recorded(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver records each page of a file that is written in bios of more than 32 MiB.

    The bios of ext4 have 8 MiB at most.
    """
    if kernel.version < LARGE_WRITES["xfs"]:
        pytest.skip(f"xfs of Linux {kernel.series} does not write in large folios")
    guest = boot(session, kernel, module, "xfs", memory_bytes=MEMORY_BYTES)
    guest.sh("cd /proc/sys/vm && echo 80 >dirty_ratio && echo 70 >dirty_background_ratio")
    guest.sh(f"echo >{TRACING}/trace && echo 1 >{QUEUED}/enable")
    before = stats(guest)
    guest.sh(f"dd if=/dev/urandom of={WHERE}/f bs=2M count={WRITE_MIB // 2} conv=fsync", 60)
    grown = growth(before, stats(guest))
    guest.sh(f"echo 0 >{QUEUED}/enable")
    trace = guest.get(f"{TRACING}/trace").decode()
    sectors = [int(count) for count in re.findall(r" W\w* \d+ \+ (\d+) \[", trace)]
    print(max(sectors), grown)
    assert max(sectors) >= LONG_SECTORS
    assert grown["blocks_written"] >= WRITE_MIB * 256


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


def test_folios_of_a_stream_are_not_larger_than_the_put_ring_can_take(
    session: Session, kernel: Kernel, module: Path, file_system: str
) -> None:
    """Readahead in windows of 8 MiB makes no folio of more than 32 pages."""
    guest = boot(session, kernel, module, file_system)
    guest.sh(f"echo {WINDOW_KIB} >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    path = "/mnt/stream"
    guest.sh(f"dd if=/dev/urandom of={path} bs=1M count={STREAM_MIB} 2>/dev/null; sync", 60)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    before = stats(guest)
    guest.sh(f"cat {path} >/dev/null")
    watch_evictions(guest)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    grown = growth(before, stats(guest))
    orders = orders_evicted(guest, path)
    print(grown, max(orders))
    assert grown["puts_eligible"] > STREAM_MIB * 256 * 0.9
    if kernel.version >= RA_ORDER_SINCE:
        assert max(orders) <= STREAM_ORDER
