# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Bounds of the driver: time without rescheduling, full index, pools to be freed."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    MODULE,
    PARAMETERS,
    SYSFS,
    WHERE,
    driver_guest,
    evict,
    limit_index,
    parameter,
    settle,
    start_daemon,
    stats,
    wait_served,
    wait_state,
)
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Number of instructions for which an operation of the index may keep a processor from other work.
# QEMU's -icount counts a nanosecond for each instruction of the guest, so load of the host has no
# effect on the operation.
SECTION_INSTRUCTIONS = 200_000
# Memory of the guest. Its index has space for the 40,960 leaves that testing/sections.c makes.
SECTIONS_RAM = 1024 * MIB
ROUNDS = 40  # mounts and unmounts
POOLS_FREED_MAX = 1024
# RAM of a guest whose hash table takes twice as much memory as ENTRY_BYTES, the limit of the
# entries. These are about 90 leaves, of which the evictor erases up to 33 at a time.
LARGE_RAM = 2048 * MIB
ENTRY_BYTES = 48 << 10
# Size of the part of a file that is read at a time, and maximum number of these parts.
PART_MIB, PARTS_MAX = 2, 20


def test_operations_of_the_index_reschedule_after_bounded_work(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Operations on many entries of the index keep the processor for short sections only.

    The operations erase a range of blocks, and a pool.
    """
    guest = driver_guest(
        session,
        kernel,
        test_module,
        memory_bytes=SECTIONS_RAM,
        tcg_threads="single",
        arguments=["-icount", "shift=0"],
    )
    # While the processor is idle, QEMU counts the time of the host, which may wake QEMU late.
    loop = guest.start("while :; do :; done", 600)
    guest.sh(f"echo 1 >{PARAMETERS}/test_sections", 300)
    assert not loop.done()
    text = parameter(guest, "test_sections")
    print(text)
    found = {
        name: (int(longest), int(total), int(entries))
        for name, longest, total, entries in (line.split() for line in text.splitlines())
    }
    assert found["range"][2] > 40_000 and found["sweep"][2] > 40_000
    assert found["range"][1] > 100 * SECTION_INSTRUCTIONS, "the range is erased at once"
    # A section delays the thread that measures in addition to the work of the kernel when it is
    # idle.
    bound = found["idle"][0] + SECTION_INSTRUCTIONS
    late = {name: longest for name, (longest, _, _) in found.items() if longest > bound}
    assert not late, f"sections of more than {bound} instructions: {late}"


def test_full_index_keeps_most_pages_of_a_large_file(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The evictor frees about 3/16 of the memory of the entries, which are in one bucket.

    It neither empties the bucket, nor counts the hash table as memory that it can free.
    """
    guest = driver_guest(session, kernel, test_module, memory_bytes=LARGE_RAM)
    guest.sh(
        f"dd if=/dev/zero of={WHERE}/large bs={PART_MIB}M count={PARTS_MAX} 2>/dev/null; sync", 120
    )
    table = limit_index(guest, ENTRY_BYTES)
    assert table > 1.9 * ENTRY_BYTES
    before = stats(guest)["index_evicted"]
    for part in range(PARTS_MAX):
        guest.sh(
            f"dd if={WHERE}/large of=/dev/null bs={PART_MIB}M skip={part} count=1 2>/dev/null;"
            " echo 1 >/proc/sys/vm/drop_caches",
            60,
        )
        settle(guest)
        if stats(guest)["index_evicted"] > before:
            break
    else:
        pytest.fail("the file does not fill the index")

    evicted = last = 0

    def ended() -> bool:
        nonlocal evicted, last
        last, evicted = evicted, stats(guest)["index_evicted"] - before
        return evicted == last > 0

    until(ended, 30, "the evictor has ended")
    pages = stats(guest)["index_pages"]
    assert pages > evicted, f"the evictor erased {evicted} pages and left {pages}"


def test_number_of_pools_that_wait_for_their_destruction_is_bounded(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    daemon = start_daemon(session)
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(daemon.socket("vm1")),
        disks=[
            Disk("data", disk.ext4(session.directory / "data.img", 64 * MIB)),
            Disk("other", disk.ext4(session.directory / "other.img", 64 * MIB)),
        ],
    )
    guest.mount("other", "/other")
    mount = Mount(guest, "/other")
    mount.wait()
    probe = "dd if=/dev/zero of=/other/f bs=64k count=1 2>/dev/null; sync"

    def held() -> bool:
        guest.sh(f"{probe}; echo 1 >/proc/sys/vm/drop_caches")
        return mount.count("held_pages") > 0

    until(held, 60, "the host has the pool of /other")
    daemon.pause()
    # The host does not destroy this pool, so the driver keeps the pools behind it.
    guest.sh("umount /other", 60)
    more = guest.run(f"echo {POOLS_FREED_MAX} >{PARAMETERS}/test_pools", 120)
    assert more.status != 0, "the driver makes pools although it cannot destroy former ones"
    assert int(parameter(guest, "test_pools_freed")) == POOLS_FREED_MAX
    daemon.resume()
    until(lambda: parameter(guest, "test_pools_freed") == "0", 60, "the host destroyed all pools")
    guest.sh(f"echo 1 >{PARAMETERS}/test_pools", 60)
    wait_state(guest, "on")


def test_former_pools_are_released_while_there_is_no_back_end(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    daemon = start_daemon(session)
    other = disk.ext4(session.directory / "other.img", 16 * MIB)
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(daemon.socket("vm1")),
        disks=[
            Disk("data", disk.ext4(session.directory / "data.img", 64 * MIB)),
            Disk("other", other),
        ],
    )
    guest.sh("mkdir /other")
    mount = "mount -t ext4 $(blkid -L other 2>/dev/null || echo /dev/vdb) /other"
    loop = f"for i in $(seq {ROUNDS}); do {mount} && umount /other || exit 1; done"

    # The pools are empty, so no unmount needs a walk through the index.
    sweeps = int(parameter(guest, "test_sweeps"))
    guest.sh(loop, 120)
    until(lambda: parameter(guest, "test_pools_freed") == "0", 30, "the host destroyed all pools")
    assert int(parameter(guest, "test_sweeps")) == sweeps

    daemon.kill()
    wait_state(guest, "offline")
    guest.sh(loop, 120)
    until(lambda: parameter(guest, "test_pools_freed") == "0", 10, "the driver released all pools")

    daemon.start()
    wait_state(guest, "on")
    wait_served(guest)


def test_unmount_frees_the_entries_in_the_background(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    guest = driver_guest(session, kernel, test_module)
    mount = Mount(guest, WHERE)
    assert guest.sh(f"stat -c %a {mount.path}/held_pages").strip() == "400"
    table = limit_index(guest, 1 * MIB)
    mount.wait("on")
    guest.sh("dd if=/dev/urandom of=/mnt/f bs=1M count=4 2>/dev/null; sync")
    held = evict(guest, ["/mnt/f"])["index_pages"]
    assert mount.count("held_pages") == held > 512
    before = stats(guest)["invalidations_unmount"]
    guest.sh("umount /mnt", 60)
    assert stats(guest)["invalidations_unmount"] - before == held
    until(lambda: stats(guest)["index_bytes"] == table, 10, "the memory of the entries is free")
    assert stats(guest)["index_pages"] == 0
    guest.sh(f"rmmod {Path(MODULE).stem}", 60)
    assert guest.run(f"test -e {SYSFS}").status != 0
