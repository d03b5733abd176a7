# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver puts a bounded number of pages of a large folio, and gets whole folios only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import Torture, checksums, settle, stats, wait_state
from test_filesystems import boot

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# First kernel series in which writes to each file system create folios of up to 2 MiB.
LARGE_WRITES = {"ext4": (6, 16), "xfs": (6, 6)}
HUGE_ORDER = 9
# Largest number of pages of a folio that the driver puts, TMEM_FOLIO_MAX_PAGES, and its order. The
# driver copies them with interrupts off.
PUT_MAX, PUT_MAX_ORDER = 32, 5
# First kernel series in which readahead stores the order of a stream's folios with the open file,
# so that the driver can limit the order.
STREAMS_LIMITED = (6, 17)
PAGES = 16 * 256

CGROUPS = "/sys/fs/cgroup"
GROUP = f"{CGROUPS}/reader"
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
    guest.sh(f"dd if=/dev/urandom of={path} bs=16M count=1 2>/dev/null && sync", 60)
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


def reclaim_slowly(guest: Guest, mebibytes: int) -> None:
    """Reclaims pages that processes of GROUP have read, in steps that fit into the put ring."""
    for _ in range(mebibytes):
        # The write fails if the kernel could reclaim less than 1 MiB.
        guest.sh(f"echo 1M >{GROUP}/memory.reclaim 2>/dev/null || true", 60)
        settle(guest)


def test_folios_of_a_sequentially_read_file_are_put_completely(
    session: Session, kernel: Kernel, module: Path, file_system: str
) -> None:
    """Folios of a file that is read stay small enough to be put and got completely."""
    if kernel.version < STREAMS_LIMITED:
        pytest.skip(
            f"Linux {kernel.series} does not keep a folio order for sequential reads, "
            "so the driver cannot limit it"
        )
    guest = boot(session, kernel, module, file_system)
    path = "/mnt/large"
    guest.sh(f"dd if=/dev/urandom of={path} bs=16M count=1 2>/dev/null && sync", 60)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)
    # A readahead of 8 MiB allows folios of 2 MiB. For virtio-blk, it is the default of Linux 7.2.
    guest.sh("echo 8192 >/sys/block/vda/queue/read_ahead_kb")
    guest.sh(f"mkdir -p {CGROUPS} && mount -t cgroup2 none {CGROUPS} && mkdir {GROUP}")
    guest.sh(f"echo +memory >{CGROUPS}/cgroup.subtree_control")
    read = f"sh -c 'echo $$ >{GROUP}/cgroup.procs && sha256sum {path}'"
    expected = guest.sh(read, 60)
    watch_evictions(guest)
    reclaim_slowly(guest, 24)
    orders = orders_evicted(guest, path)
    assert sum(1 << order for order in orders) > PAGES * 9 // 10, orders
    assert max(orders) == PUT_MAX_ORDER, orders
    before = stats(guest)
    assert guest.sh(read, 60) == expected
    hits = stats(guest)["hits"] - before["hits"]
    assert hits > PAGES * 9 // 10


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
