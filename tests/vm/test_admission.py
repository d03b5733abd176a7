# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver keeps useful pages in the pool, despite streams that are read once or a small pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driver import (
    PARAMETERS,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    growth,
    limit_index,
    load,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_state,
)
from liar import Liar
from test_guest_command import COMMAND, command
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PAGES_MIB = 256
POOL = "24MiB"
USEFUL_MIB = 8
STREAM_MIB = 40
USEFUL = "/mnt/useful"
STREAMS = [f"/mnt/s{number}" for number in range(3)]
# The number of files is larger than the number of entries of the admission filter's table in this
# guest (2,048). An entry is for 64 neighbouring blocks, so each file of two pages has 64 blocks of
# its own. The pool has room for half of the files, and the put ring has room for the files of one
# directory.
DIRECTORIES = 36
DIRECTORY_FILES = 200
FILE_PAGES = 2
CLUSTER_BYTES = 64 * 4096
TREE_BYTES = 2500 * MIB
SMALL_POOL = "36MiB"


def read_and_drop(guest: Guest, path: str, size_mib: int) -> dict[str, int]:
    """Reads and evicts a file in steps that fit the put ring. Returns the driver's counters."""
    counters = {}
    for part in range(size_mib):
        guest.sh(
            f"dd if={path} of=/dev/null bs=1M count=1 skip={part} 2>/dev/null;"
            " echo 1 >/proc/sys/vm/drop_caches"
        )
        counters = settle(guest)
    return counters


def hits_after_stream(guest: Guest, stream: str) -> int:
    """Returns the hits in pages of the useful file, read after a stream was read once."""
    read_and_drop(guest, USEFUL, USEFUL_MIB)
    before = read_and_drop(guest, stream, STREAM_MIB)
    after = read_and_drop(guest, USEFUL, USEFUL_MIB)
    print(stream, growth(before, after))
    return after["hits"] - before["hits"]


def test_streams_do_not_displace_useful_pages(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = session.daemon("vm1", pool_size=POOL)
    daemon.start()
    guest = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1"))).start()
    # The files exist before the driver is loaded, so that it sees the streams for the first time.
    guest.mount("data", "/mnt")
    for path, size_mib in ((USEFUL, USEFUL_MIB), *((path, STREAM_MIB) for path in STREAMS)):
        guest.sh(f"dd if=/dev/urandom of={path} bs=1M count={size_mib} 2>/dev/null", 60)
    sums = checksums(guest, [USEFUL])
    guest.sh("sync; umount /mnt; echo 1 >/proc/sys/vm/drop_caches", 60)
    load(guest, "verify_every=0")
    useful = USEFUL_MIB * PAGES_MIB
    stream = STREAM_MIB * PAGES_MIB

    # Without the filter, the pages of the stream push the useful pages out of the pool.
    set_parameter(guest, "admission", "off")
    assert hits_after_stream(guest, STREAMS[0]) < useful // 2
    before = settle(guest)
    assert before["puts_skipped_admission"] == 0

    # The host lost useful pages, so the filter becomes active. It recognizes the useful pages,
    # which were evicted before, and does not put the pages of the next stream.
    set_parameter(guest, "admission", "adaptive")
    assert hits_after_stream(guest, STREAMS[1]) > useful * 3 // 4
    after = settle(guest)
    assert stream // 2 < after["puts_skipped_admission"] <= stream + PAGES_MIB
    # Pages of a stream that are evicted for the second time are put, because the filter has
    # remembered them.
    read_and_drop(guest, STREAMS[1], USEFUL_MIB)
    again = settle(guest)
    assert again["puts_skipped_admission"] == after["puts_skipped_admission"]

    # If the filter is switched off again, all pages of a stream are put. By now, the pool may keep
    # the useful pages by itself, because it has seen them several times.
    set_parameter(guest, "admission", "off")
    hits_after_stream(guest, STREAMS[2])
    last = settle(guest)
    assert last["puts_skipped_admission"] == after["puts_skipped_admission"]
    assert last["puts_stored"] - again["puts_stored"] >= stream
    assert checksums(guest, [USEFUL]) == sums


@pytest.mark.parametrize("verify_every", [0, 1])
def test_many_small_files_keep_their_hits(
    session: Session, kernel: Kernel, module: Path, verify_every: int
) -> None:
    """More files than the admission filter can remember keep their hits in a small pool.

    The files are read over and over, and each hit takes a page out of the pool. The test also runs
    with every hit compared with the disk.
    """
    tree = session.directory / "tree"
    for directory in range(DIRECTORIES):
        (tree / str(directory)).mkdir(parents=True)
        for file in range(DIRECTORY_FILES):
            (tree / str(directory) / str(file)).write_bytes(os.urandom(FILE_PAGES * 4096))
    options = ["-O", "bigalloc", "-C", str(CLUSTER_BYTES), "-N", "16384"]
    image = disk.ext4(session.directory / "small.img", TREE_BYTES, tree, *options)
    daemon = session.daemon("vm1", pool_size=SMALL_POOL)
    daemon.start()
    disks = [Disk("data", image)]
    guest = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), disks=disks).start()
    load(guest, f"verify_every={verify_every}")
    hits = []
    for _ in range(4 if verify_every else 5):
        before = settle(guest)
        for directory in range(DIRECTORIES):
            guest.sh(f"cat /mnt/{directory}/* >/dev/null; echo 1 >/proc/sys/vm/drop_caches")
            after = settle(guest)
        print(growth(before, after))
        hits.append(after["hits"] - before["hits"])
    assert after["puts_skipped_admission"], (
        "the admission filter skipped no page: the pool is too large for this test"
    )
    pages = DIRECTORIES * DIRECTORY_FILES * FILE_PAGES
    # In the first two rounds the filter learns that the pool is too small.
    assert min(hits[2:]) > pages * 2 // 5, hits


def test_full_index_engages_the_filter_only_without_hits(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If the index evicts fewer pages than gets return, all pages are put; otherwise not."""
    guest = driver_guest(session, kernel, test_module, parameters="verify_every=0")
    guest.sh(
        "for i in $(seq 100); do dd if=/dev/urandom of=/mnt/s$i bs=1M count=1 2>/dev/null; done;"
        " dd if=/dev/urandom of=/mnt/useful bs=1M count=1 2>/dev/null; sync",
        60,
    )
    # The index has memory for about 7,500 pages, and the first 40 files have 10,240.
    limit_index(guest, 80 << 10)
    counters: dict[str, int] = {}
    for number in range(1, 41):
        read_and_drop(guest, f"/mnt/s{number}", 1)
        counters = read_and_drop(guest, "/mnt/useful", 1)
    assert counters["index_evicted"] > 0
    assert counters["puts_skipped_admission"] == 0, counters
    for number in range(41, 101):
        counters = read_and_drop(guest, f"/mnt/s{number}", 1)
    assert counters["puts_skipped_admission"] > PAGES_MIB


def test_all_pages_are_put_while_the_pool_has_room(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While the pool has room, all evicted pages are put, even if all of them are new."""
    daemon = start_daemon(session)
    guest = driver_vm(
        session, kernel, module, Tmem(daemon.socket("vm1")), memory_bytes=256 * MIB
    ).start()
    load(guest, "verify_every=0")
    guest.sh("dd if=/dev/urandom of=/mnt/s0 bs=1M count=32 2>/dev/null; sync")
    for _ in range(2):
        counters = read_and_drop(guest, "/mnt/s0", 32)
    assert counters["puts_skipped_admission"] == 0
    assert counters["hits"] > 32 * PAGES_MIB // 2


def test_only_reused_pages_are_put_with_the_workingset_hint(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Only pages that were used again after they were read in are put with the workingset hint."""
    pages = PAGES_MIB
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path))
        guest.sh("for f in once twice; do dd if=/dev/urandom of=/mnt/$f bs=1M count=1; done; sync")
        for path, times in (("/mnt/once", 1), ("/mnt/twice", 3)):
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
            settle(guest)
            puts, hints = liar.puts, liar.puts_workingset
            # Read each page with a read(2) of its own. Pages that only readahead fetched do not
            # count as used.
            read = f"dd if={path} of=/dev/null bs=4096 2>/dev/null"
            guest.sh(f"for i in $(seq {times}); do {read}; done; echo 1 >/proc/sys/vm/drop_caches")
            settle(guest)
            assert liar.puts - puts >= pages
            hints = liar.puts_workingset - hints
            assert hints == 0 if times == 1 else hints >= pages * 9 // 10


def test_each_refusal_reason_has_its_own_counter(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Each reason not to put a page of a file has a counter, and only that counter grows."""
    daemon = start_daemon(session)
    image = disk.ext4(session.directory / "fine.img", 64 * MIB, None, "-b", "1024")
    disks = [
        Disk("data", disk.ext4(session.directory / "data.img", 64 * MIB)),
        Disk("fine", image),
    ]
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_vm(session, kernel, module, tmem, disks=disks, files=command()).start()
    guest.mount("fine", "/fine")
    load(guest, "verify_every=0")
    pages = 8 * PAGES_MIB
    guest.sh("dd if=/dev/urandom of=/mnt/never bs=1M count=2 2>/dev/null; truncate -s 2M /mnt/hole")
    guest.sh(f"dd if=/dev/urandom of=/mnt/large bs=4096 count={pages} 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    counters = settle(guest)

    def evict(path: str) -> dict[str, int]:
        """Returns the growth of the put counters while a file is read and evicted."""
        nonlocal counters
        guest.sh(f"cat {path} >/dev/null; echo 1 >/proc/sys/vm/drop_caches", 60)
        before, counters = counters, stats(guest)
        grown = {k: counters[k] - before[k] for k in counters if k.startswith("puts")}
        print(path, grown)
        # These counters are no reasons: they count pages that the host stored, or are sums. Pages
        # of metadata are evicted together with those of the file.
        others = ("puts_stored", "puts_eligible", "puts_lost", "puts_skipped_metadata")
        return {k: n for k, n in grown.items() if n and k not in others}

    fine = Mount(guest, "/fine")

    def fine_served() -> bool:
        guest.sh("dd if=/dev/zero of=/fine/probe bs=64k count=1 2>/dev/null; sync")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        return guest.run(f"grep -q ^on {fine.path}/state").status == 0

    until(fine_served, 30, "the driver serves /fine")
    # Write one block of the file's first page, which is not cached, without reading the others. The
    # page is clean after the sync, but the page cache does not have the contents of the others.
    guest.sh("dd if=/dev/urandom of=/fine/part bs=4096 count=3 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    guest.sh("dd if=/dev/zero of=/fine/part bs=1024 count=1 conv=notrunc 2>/dev/null; sync")
    counters = settle(guest)
    assert evict("/dev/null") == {"puts_skipped_folio": 1}

    guest.sh(f"{COMMAND} policy /mnt/never never")
    assert set(evict("/mnt/never")) == {"puts_dropped_policy"}
    # The pages of a hole were not transferred, so they have no record.
    assert set(evict("/mnt/hole")) == {"puts_skipped_block"}
    daemon.pause()
    assert set(evict("/mnt/large")) == {"puts", "puts_dropped_ring_full"}
    daemon.resume()
    counters = settle(guest)
    daemon.kill()
    wait_state(guest, "offline")
    counters = stats(guest)
    grown = evict("/mnt/large")
    assert set(grown) == {"puts_skipped_offline"}
    assert grown["puts_skipped_offline"] >= pages


def test_nothing_is_put_without_a_device(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The hooks put nothing while there is no device.

    The micro-benchmark inside the driver then reports that it measured nothing.
    """
    guest = driver_vm(session, kernel, test_module, None).start()
    load(guest, "verify_every=0", online=False)
    guest.sh("dd if=/dev/urandom of=/mnt/file bs=4096 count=4 2>/dev/null; sync")
    before = stats(guest)
    evict(guest, ["/mnt/file"])
    assert guest.run(f"echo 1 >{PARAMETERS}/test_bench", 120).status != 0
    grown = {k: n for k, n in growth(before, stats(guest)).items() if k.startswith("puts")}
    grown.pop("puts_skipped_metadata", None)
    assert grown == {"puts_skipped_offline": 4}
