# SPDX-License-Identifier: Apache-2.0 OR MIT
"""fio, a test program of another project, writes and verifies data on a cached file system.

Each block that fio writes has a header with a number derived from its seed. fio therefore
recognizes a block of an earlier run with another seed as wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    DEADLINE_MAX_MS,
    WHERE,
    driver_guest,
    seed,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_state,
)

from harness import disk, fio
from harness.guest import Guest, Result
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

FIO = "/bin/fio"
FILE_SYSTEMS = ["ext4", "xfs"]
# fio must not tell the kernel to drop the file, because that is an invalidation, and no page would
# come back from the cache. fio's state is not saved, because the seed determines each run.
COMMON = (
    "--name=f --size=12m --fallocate=none --invalidate=0 --verify=crc32c --verify_fatal=1"
    " --verify_state_save=0 --eta=never --minimal"
)
# Ways to read and write; the last one uses a shared mapping.
RUNS = [
    "--ioengine=psync --rw=randwrite --bs=4k",
    "--ioengine=io_uring --iodepth=16 --rw=randwrite --bs=16k --verify_backlog=64",
    "--ioengine=psync --rw=randrw --bs=4k-64k --bs_unaligned --verify_backlog=32",
    "--ioengine=mmap --rw=randwrite --bs=8k",
]
DIRECT = "--ioengine=io_uring --iodepth=8 --rw=randwrite --bs=8k --direct=1"
# Options with which fio verifies, through the page cache, the blocks that it wrote directly.
BUFFERED = "--ioengine=psync --rw=randwrite --bs=8k --verify_only"


def boot(
    session: Session, kernel: Kernel, module: Path, name: str, tmem: Tmem | None = None
) -> Guest:
    fs, files = disk.FILE_SYSTEMS[name], {FIO: fio.program()}
    return driver_guest(session, kernel, module, tmem, fs=fs, cpus=2, files=files)


def run(guest: Guest, arguments: str) -> Result:
    return guest.run(f"cd {WHERE} && {FIO} {COMMON} {arguments} 2>&1", 300)


def check_right(done: Result) -> None:
    assert done.status == 0 and "verify:" not in done.text, done.text[-4000:]


def evict_all(guest: Guest) -> None:
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)


@pytest.mark.parametrize("name", FILE_SYSTEMS)
def test_fio_verification_finds_no_stale_page(
    session: Session, kernel: Kernel, module: Path, name: str
) -> None:
    """fio overwrites files with buffered, mapped and asynchronous writes and verifies every block.

    Meanwhile pages are evicted.
    """
    number = seed()
    guest = boot(session, kernel, module, name)
    evictor = guest.start(
        "while :; do sync; echo 1 >/proc/sys/vm/drop_caches; sleep 0.1; done", 900
    )
    for turn, arguments in enumerate(RUNS * 2):
        check_right(run(guest, f"--randseed={number + turn} {arguments}"))
    evictor.kill()
    evictor.wait()
    # Write directly, and verify by reads through the page cache.
    for turn in range(2):
        draw = f"--randseed={number + 100 + turn}"
        evict_all(guest)
        check_right(run(guest, f"{draw} {DIRECT} --do_verify=0"))
        check_right(run(guest, f"{draw} {BUFFERED}"))
        evict_all(guest)
        before = stats(guest)["hits"]
        check_right(run(guest, f"{draw} {BUFFERED}"))
        assert stats(guest)["hits"] > before, "no page comes back after a direct write"
    counters = stats(guest)
    print(counters)
    assert counters["hits"] > 1000
    assert counters["mismatches"] == 0
    wait_state(guest, "on")


def test_fio_verification_finds_a_stale_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If writes do not erase their blocks from the index, fio finds a stale page."""
    # With retained pages, the driver may find the fault when it puts the page again.
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    guest = boot(session, kernel, test_module, "ext4", tmem)
    check_right(run(guest, f"--randseed=1 {RUNS[0]}"))
    evict_all(guest)
    set_parameter(guest, "test_blocks_without", "forget")
    # Set the longest deadline. With a shorter one, the driver could discard the stale page as late,
    # and fio would not find it.
    set_parameter(guest, "deadline_ms", str(DEADLINE_MAX_MS))
    check_right(run(guest, f"--randseed=2 {DIRECT} --do_verify=0"))
    done = run(guest, f"--randseed=2 {BUFFERED}")
    assert done.status != 0, stats(guest)
    assert "verify: bad" in done.text, done.text[-4000:]
