# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests errors of a file system after which a clean page differs from the disk.

ext4 writes data to blocks that are marked as unwritten, and marks them as written afterwards (the
conversion). A test can stop the disk in between, so that the conversion fails after the data was
written.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from driver import (
    DM,
    PATIENT,
    WHERE,
    driver_guest,
    driver_vm,
    evict,
    load,
    programs,
    set_parameter,
    settle,
    start_daemon,
    wait_served,
    wait_state,
)
from test_files import check_cached
from test_mounts import Mount, make

from harness import disk
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SPECIAL = "/bin/special"
PAGE = 4096
SECTORS = PAGE // 512
PAGES = 16
NAME = "unwritten"
PATH = f"{WHERE}/{NAME}"
DATA = b"A" * PAGE
NO_JOURNAL = ("-O", "^has_journal")
# Delay of a write to the data block in fail_conversion(). It is longer than the test takes.
DELAY_MS = 60_000
WRITEBACK_SECONDS = 60.0
ABORT_SECONDS = 30.0
PARAMETERS = f"verify_every=0 {PATIENT}"


def make_image(session: Session, *options: str) -> Path:
    return disk.ext4(session.directory / "data.img", 256 * MIB, None, *options)


class Below:
    """An ext4 on a device-mapper device over the data disk, with a file of unwritten blocks.

    `guest` has mounted the disk, whose file is `image`, without device mapper.
    """

    def __init__(self, guest: Guest, image: Path) -> None:
        self.guest = guest
        self.image = image
        guest.sh(f"umount {WHERE}", 60)
        self.disk = f"/dev/{guest.disk('data')}"
        self.sectors = int(guest.read(f"/sys/class/block/{guest.disk('data')}/size"))
        self.node = guest.sh(f"{DM} data {self.whole_table()}").strip()
        self.mount()
        guest.sh(f"fallocate -l {PAGES * PAGE} {PATH} && sync")

    @staticmethod
    def boot(
        session: Session,
        kernel: Kernel,
        module: Path,
        *options: str,
        parameters: str = PARAMETERS,
    ) -> Below:
        image = make_image(session, *options)
        guest = driver_guest(
            session,
            kernel,
            module,
            parameters=parameters,
            cpus=2,
            disks=[disk.Disk("data", image)],
            modules=["dm_mod", "dm_delay"],
            files=programs(DM, SPECIAL),
        )
        return Below(guest, image)

    def mount(self) -> None:
        self.guest.sh(f"mount -t ext4 {self.node} {WHERE}", 60)
        wait_served(self.guest)

    def whole_table(self) -> str:
        return f"0 {self.sectors} linear '{self.disk} 0'"

    def table_except_blocks(self, targets: Mapping[int, str]) -> str:
        """Returns a device-mapper table: `targets` at their blocks of one page, else the disk."""
        table, at = [], 0
        for block, target in sorted(targets.items()):
            first = block * SECTORS
            table.append(f"{at} {first - at} linear '{self.disk} {at}' {first} {SECTORS} {target}")
            at = first + SECTORS
        return " ".join([*table, f"{at} {self.sectors - at} linear '{self.disk} {at}'"])

    def write(self, page: int, count: int = 1) -> None:
        self.guest.put("/tmp/data", DATA * count)
        self.guest.sh(f"dd if=/tmp/data of={PATH} bs={PAGE} seek={page} conv=notrunc 2>/dev/null")

    def write_back(self) -> Job:
        """Starts to write the file back while the disk does not answer. Returns the job."""
        writing = self.guest.start(f"exec sync {PATH}", 120)
        until(lambda: self.writeback_kib() > 0, WRITEBACK_SECONDS, "pages are written back")
        return writing

    def finish_write_back(self, table: str, writing: Job) -> None:
        self.guest.sh(f"{DM} data {table}")
        writing.wait()
        until(lambda: self.writeback_kib() == 0, WRITEBACK_SECONDS, "all pages are written back")

    def writeback_kib(self) -> int:
        return int(self.guest.sh("sed -n 's/^Writeback: *//p' /proc/meminfo").split()[0])


def extent_block(image: Path) -> int:
    """Returns the block with the file's extents, from the image of an unmounted disk."""
    done = subprocess.run(
        ["debugfs", "-R", f"stat /{NAME}", str(image)], check=True, capture_output=True, text=True
    )
    found = re.search(r"\(ETB0\):(\d+)", done.stdout)
    if not found:
        raise HarnessError(f"the dump shows no extent block: {done.stdout}")
    return int(found[1])


def drop_extents(below: Below, block: int) -> bool:
    guest = below.guest
    guest.sh(f"sync {below.node}; {SPECIAL} drain && echo 1 >/proc/sys/vm/drop_caches")
    return guest.run(f"{SPECIAL} cached {below.node} {block}").status == 1


def fail_conversion(below: Below) -> None:
    """Writes page 1 and makes its extents unreadable afterwards.

    The file system has no journal, which would hold the extents in memory.
    """
    guest = below.guest
    # Write every second page, so that the file has too many extents for its inode, and they are in
    # a block of their own.
    for page in range(0, PAGES, 2):
        below.write(page)
        guest.sh(f"sync {PATH}")
    data = int(guest.sh(f"{SPECIAL} block {PATH} 0")) + 1
    guest.sh(f"sync; umount {WHERE}", 60)
    extents = extent_block(below.image)
    below.mount()
    below.write(1)
    # Make the extents unreadable before the data are written: the conversion may begin before
    # finish_write_back() has loaded its table. The extents stay writable, because writing page 1
    # splits an extent. The target "delay" takes a device, an offset and a delay in ms each for
    # reads, writes and flushes.
    errors = guest.sh(f"{DM} errors 0 {SECTORS} error ''").strip()
    place = f"{below.disk} {extents * SECTORS} 0"
    unreadable = {extents: f"delay '{errors} 0 0 {place} {place}'"}
    place = f"{below.disk} {data * SECTORS}"
    delay = f"delay '{place} 0 {place} {DELAY_MS} {place} 0'"
    guest.sh(f"{DM} data {below.table_except_blocks({**unreadable, data: delay})}")
    writing = below.write_back()
    # The task that writes holds a reference to the block with the extents for a moment, so retry.
    until(lambda: drop_extents(below, extents), WRITEBACK_SECONDS, "the extents leave the cache")
    # Suspending the device of the target "delay" ends the delay.
    below.finish_write_back(below.table_except_blocks(unreadable), writing)
    print(guest.sh("dmesg | tail -n 4"))
    assert "map_blocks returned -5" in guest.sh("dmesg"), (
        "the conversion of the unwritten extent did not fail"
    )
    guest.sh(f"{DM} data {below.whole_table()}")


def read_after_failed_conversion(below: Below) -> bytes:
    """Returns page 1 as a reader finds it after a failed conversion and an eviction."""
    fail_conversion(below)
    guest = below.guest
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    guest.sh(f"dd if={PATH} of=/tmp/found bs={PAGE} skip=1 count=1 2>/dev/null")
    return guest.get("/tmp/found")


def test_page_with_a_failed_extent_conversion_is_not_read_from_the_pool(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """After a failed conversion of its block, a page reads as the disk.

    Such a page is clean and has the written data, which its block has, too. But the file reads as
    zeroes.
    """
    below = Below.boot(session, kernel, module, *NO_JOURNAL)
    assert read_after_failed_conversion(below) == bytes(PAGE)
    check_cached(below.guest, make(below.guest, WHERE))


def test_file_with_an_aborted_conversion_reads_as_the_disk(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If the journal is aborted between a write and its conversion, a file keeps old extents."""
    below = Below.boot(session, kernel, module)
    guest = below.guest
    session.expect_trouble()
    guest.sh(f"mount -o remount,errors=remount-ro {WHERE}", 60)
    below.write(0, PAGES)
    guest.sh(f"{DM} data suspend")
    writing = below.write_back()
    # An error, after which the file system is read-only, aborts the journal.
    trigger = f"/sys/fs/ext4/{below.node[5:]}/trigger_fs_error"
    aborting = guest.start(f"echo error >{trigger}", 120)
    # Wait only for the begin of the abort, because its end needs the stopped disk.
    until(
        lambda: "trigger_test_error" in guest.sh("dmesg"),
        ABORT_SECONDS,
        "the journal is aborted",
    )
    below.finish_write_back(below.whole_table(), writing)
    aborting.wait()
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    done = guest.run(f"{SPECIAL} same {PATH}")
    if b"Input/output error" in done.stderr:
        pytest.skip(f"Linux {kernel.series} refuses all reads after the abort")
    assert done.status == 0, "cached and direct reads differ"


# Size of the range that a test zeroes. Up to 32 KiB (s_extent_max_zeroout_kb), Linux 7.2 and 7.3
# write zeroes instead of converting extents, and so cannot fail for want of a block.
ZEROED_BYTES = 64 << 10
SMALL_BYTES = 64 * MIB


def zeroes_unaligned_edges(kernel: Kernel) -> bool:
    """Returns whether ext4 zeroes parts of cached blocks before it converts extents."""
    return (6, 12) <= kernel.version < (7, 3)


def make_small_image(session: Session, block: int) -> Path:
    """Creates an ext4 that is small enough to be filled, without blocks that are kept for root."""
    path = session.directory / "data.img"
    return disk.ext4(path, SMALL_BYTES, None, "-b", str(block), "-m0")


def check_failed_zero_range(guest: Guest, block: int) -> None:
    """Checks that the zeroes of a failed operation are not put.

    Without the comparison of a page with its record, they are put.
    """
    begin = block if block < PAGE else 100
    for off in (True, False) if block == PAGE else (False,):
        path = f"{WHERE}/{off}"
        guest.sh(f"{SPECIAL} scatter {path} && {SPECIAL} fill {WHERE}", 120)
        set_parameter(guest, "test_blocks_without", "equal" if off else "")
        evict(guest, [path])
        guest.sh(f"cat {path} >/dev/null")
        zero = guest.start(f"{SPECIAL} zero {path} {begin} {ZEROED_BYTES}", 120)
        assert zero.wait().text == "failed: No space left on device\n"
        for _ in range(2):
            guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
            settle(guest)
            # If cached and direct reads differ, the program ends with status 1.
            assert guest.run(f"{SPECIAL} same {path}").status == off
        guest.sh(f"rm {WHERE}/fill* && sync", 60)


@pytest.mark.parametrize("block", [pytest.param(1024, marks=pytest.mark.smoke), 4096])
def test_file_with_a_failed_zero_range_reads_no_old_byte(
    session: Session, kernel: Kernel, test_module: Path, block: int
) -> None:
    """The zeroes of an operation that failed on a full file system are not put.

    ext4 zeroes the edges of the range in the page cache, without making their pages dirty, before
    it converts the blocks. The conversion needs a block for the extent tree. The pages differ from
    the records of their blocks then. With blocks of 1 KiB, few pages have a record, so only the
    other size shows that the comparison is necessary.
    """
    if block == PAGE and not zeroes_unaligned_edges(kernel):
        pytest.skip(f"Linux {kernel.series} zeroes no part of a block before the conversion")
    # With retained pages, the driver finds a wrong page and blocks the mount.
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    vm = driver_vm(
        session,
        kernel,
        test_module,
        tmem,
        cpus=2,
        disks=[disk.Disk("data", make_small_image(session, block))],
        files=programs(SPECIAL),
    )
    guest = vm.start()
    load(guest, PARAMETERS, online=block == PAGE)
    wait_state(guest, "on")
    Mount(guest, WHERE).wait("on")
    check_failed_zero_range(guest, block)
