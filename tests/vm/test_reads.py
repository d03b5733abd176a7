# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the result and the wait of one read(2): partial hits, slow devices, no free requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    checksums,
    driver_guest,
    evict,
    growth,
    seed,
    set_parameter,
    settle,
    stats,
    wait_state,
)
from liar import Liar
from test_deadline import FILE, FILLER, evict_in_steps

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import scaled

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

MIB_PAGES = 256
SECTORS = 8  # number of sectors in a page
FILLER_MIB = 4  # larger than the put ring
# Number of sectors with the file's extents, which a file system may read besides its contents.
METADATA_SECTORS = 64
SILENT_SECONDS = 1e9
# Allowance for delays of a busy machine, in one read or in one of its waits. The driver counts only
# its own waits.
OWN_SECONDS = 5.0


def runs(generator: random.Random, pages: int) -> list[tuple[int, int]]:
    """Returns short and long runs of pages (first, count) with gaps between them."""
    found = []
    at = generator.randrange(3)
    while at < pages:
        count = min(generator.choice((1, 1, 2, 3, 16, 64, 100)), pages - at)
        found.append((at, count))
        at += count + generator.choice((1, 1, 2, 3, 16, 64, 100))
    return found


def direct_sum(guest: Guest, path: str) -> str:
    """Returns the sha256 of the disk's content."""
    return guest.sh(f"dd if={path} bs=1M iflag=direct 2>/dev/null | sha256sum").split()[0]


def evict_filler(guest: Guest, size_mib: int) -> dict[str, int]:
    """Evicts FILLER, whose pages replace those of FILE in the put ring. Returns the counters.

    Raises unless the index has most pages of both files.
    """
    found = evict_in_steps(guest, FILLER, FILLER_MIB)
    assert found["index_pages"] > (size_mib + FILLER_MIB) * MIB_PAGES * 9 // 10
    return found


@pytest.mark.parametrize("readahead_kib", [0, pytest.param(128, marks=pytest.mark.smoke), 4096])
def test_only_pages_missing_in_the_pool_are_read_from_disk(
    session: Session, kernel: Kernel, test_module: Path, readahead_kib: int
) -> None:
    """Exactly the pages of a file that the host does not return are read from the disk.

    Without readahead, these are the pages that are not held. Of a bio, the host returns the first
    or the last pages.
    """
    number = seed()
    size_mib = 6
    pages = size_mib * MIB_PAGES
    guest = driver_guest(session, kernel, test_module)
    empty = evict_in_steps(guest, FILLER, FILLER_MIB)["index_pages"]
    held = evict_in_steps(guest, FILE, size_mib)["index_pages"]
    for _ in range(5):  # a busy host may drop some puts
        if held - empty == pages:
            break
        held = evict_in_steps(guest, FILE, size_mib, create=False)["index_pages"]
    assert held - empty == pages
    # Write some runs of pages. The writes erase the blocks from the driver's index. The injected
    # fault "ring full" then makes the driver drop the puts of these pages.
    guest.sh(f"dd if={FILE} of=/tmp/copy bs=1M iflag=direct 2>/dev/null")
    lost = runs(random.Random(number), pages)
    guest.put(
        "/tmp/rewrite",
        "".join(
            f"dd if=/tmp/copy of={FILE} conv=notrunc bs=4096 skip={at} seek={at} count={count}\n"
            for at, count in lost
        ).encode(),
    )
    guest.sh("sh /tmp/rewrite 2>/dev/null; sync", 60)
    set_parameter(guest, "inject_ring_full", "1")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    set_parameter(guest, "inject_ring_full", "0")
    missing = sum(count for _, count in lost)
    before = settle(guest)
    assert before["index_pages"] - empty == pages - missing

    guest.sh(f"echo {readahead_kib} >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    sectors = guest.disk_stat("data").read_sectors
    found = guest.sh(f"sha256sum {FILE}", 60).split()[0]
    sectors = guest.disk_stat("data").read_sectors - sectors
    after = stats(guest)
    hits = after["hits"] - before["hits"]
    read = (pages - hits) * SECTORS
    assert read <= sectors <= read + METADATA_SECTORS
    if readahead_kib:
        assert 0 < hits <= pages - missing
    else:
        # On a busy machine some pages may be late. They are read from the disk, and their entries
        # are erased as well.
        assert hits + after["misses_late"] - before["misses_late"] == pages - missing
        assert after["index_pages"] == empty
    assert found == guest.sh("sha256sum /tmp/copy").split()[0] == direct_sum(guest, FILE)


def test_wait_of_one_large_read_is_bounded(session: Session, kernel: Kernel, module: Path) -> None:
    """One large read(2) waits at most 11 deadlines in total for a silent or slow device."""
    deadline_us = DEADLINE_MS * 1000
    bound_us = 11 * deadline_us
    size_mib = 16
    windows = size_mib * 8  # readahead windows of 128 KiB
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path))
        # The kernel reads the file in windows. In a large read(2), their size is the larger one of
        # read_ahead_kb and max_sectors_kb.
        queue = f"/sys/block/{guest.disk('data')}/queue"
        guest.sh(f"echo 128 >{queue}/read_ahead_kb; echo 128 >{queue}/max_sectors_kb")
        evict_in_steps(guest, FILE, size_mib)
        right = direct_sum(guest, FILE)
        # The device gives no answer, answers after 1.5 deadlines (late) and after 0.6 (in time).
        for delay in (SILENT_SECONDS, 1.5, 0.6):
            before = evict_filler(guest, size_mib)
            liar.delay_seconds = delay * deadline_us / 1e6
            began, ended = guest.sh(
                "cut -d' ' -f1 /proc/uptime;"
                f" dd if={FILE} of=/tmp/read bs={size_mib}M count=1 2>/dev/null;"
                " cut -d' ' -f1 /proc/uptime",
                120,
            ).split()
            after = stats(guest)
            grown = growth(before, after)
            took_us = (float(ended) - float(began)) * 1e6
            print(f"delay {delay}: the read took {took_us:.0f} us", grown)
            assert grown["trips"] == 1
            assert grown["misses_tripped"] > windows // 2 * 32, (
                "too few pages were read from the disk after the breaker opened"
            )
            # A reader waits for a window while the next one is in flight, too: both count.
            assert grown["waits_us"] <= 2 * bound_us
            assert 2 * deadline_us < took_us
            # Delays of the machine do not count as the driver's waits.
            assert after["wait_max_us"] < deadline_us + scaled(OWN_SECONDS) * 1e6
            assert took_us < bound_us + scaled(OWN_SECONDS) * 1e6
            assert guest.sh("sha256sum </tmp/read").split()[0] == right
            liar.delay_seconds = 0.0
            wait_state(guest, "on")
            evict_in_steps(guest, FILE, size_mib, create=False)


def test_other_readaheads_do_not_wait_if_one_holds_all_requests(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If one readahead uses up all requests, no other readahead waits for a silent device."""
    size_mib = 16
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path))
        queue = f"/sys/block/{guest.disk('data')}/queue"
        guest.sh(f"echo 8192 >{queue}/read_ahead_kb")
        evict_in_steps(guest, FILE, size_mib)
        right = direct_sum(guest, FILE)
        before = evict_filler(guest, size_mib)
        liar.delay_seconds = SILENT_SECONDS
        guest.sh(f"dd if={FILE} of=/tmp/read bs={size_mib}M count=1 2>/dev/null", 120)
        after = stats(guest)
        grown = growth(before, after)
        print(grown)
        assert grown["trips"] == 1
        assert 0 < grown["slow"] <= 2
        # The driver sends no probe before the device has answered the requests that it holds.
        assert wait_state(guest, "tripped")
        assert guest.sh("sha256sum </tmp/read").split()[0] == right
        liar.delay_seconds = 0.0
        wait_state(guest, "on")


def test_reader_with_a_full_queue_reads_the_disk_at_once(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If the queue is full of unanswered requests, a reader goes to the disk at once."""
    pages = 32  # pages of one readahead
    whole = "/mnt/whole"
    with Liar(session.directory / "liar") as liar:
        # The queue is so short that the requests of one readahead fill it. The guest has memory for
        # more than twice as many bounce pages as these requests need, so that the queue and not the
        # bounce pages run out.
        tmem = Tmem(liar.path, num_queues=1, queue_size=pages // 2)
        guest = driver_guest(session, kernel, module, tmem, memory_bytes=768 * MIB)
        for path in (FILE, whole):
            guest.sh(f"dd if=/dev/urandom of={path} bs=4096 count={pages} 2>/dev/null; sync")
        sums = checksums(guest, [FILE, whole])
        evict(guest, [FILE, whole])
        evict_in_steps(guest, FILLER, 8)
        # Read and evict every second page, so that it is in the put ring. Each of the other pages
        # then needs a request of its own.
        readahead = f"/sys/block/{guest.disk('data')}/queue/read_ahead_kb"
        guest.sh(f"echo 0 >{readahead}")
        read = f"dd if={FILE} of=/dev/null bs=4096 count=1 skip=$i 2>/dev/null"
        guest.sh(f"for i in $(seq 0 2 {pages - 1}); do {read}; done")
        guest.sh(f"echo 1 >/proc/sys/vm/drop_caches; echo 128 >{readahead}")
        before = settle(guest)

        liar.delay_seconds = SILENT_SECONDS
        guest.sh(f"dd if={FILE} of=/dev/null bs=128k count=1 2>/dev/null")
        assert checksums(guest, [FILE, whole]) == sums
        after = stats(guest)
        grown = growth(before, after)
        print(grown)
        assert grown["ring_hits"] == grown["misses_late"] == grown["requests_get"] == pages // 2
        assert grown["misses_queue"] == pages
        assert grown["slow"] == 1, (
            "not exactly one get was slow, so a reader waited although the queue was full"
        )
        liar.delay_seconds = 0.0
        evict(guest, [whole])
        before = evict_in_steps(guest, FILLER, 8)
        assert checksums(guest, [whole]) == {whole: sums[whole]}
        grown = growth(before, stats(guest))
        assert grown["hits"] + grown["misses_late"] == pages, (
            "not all pages were requested after the device answered, so the queue is still full"
        )
