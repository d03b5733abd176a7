# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests errors of a file system after which a clean page differs from the disk.

ext4 writes data to blocks that are marked as unwritten, and marks them as written afterwards (the
conversion). A test can stop the disk in between, so that the conversion fails after the data was
written.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from driver import (
    DM,
    PATIENT,
    WHERE,
    Hold,
    driver_guest,
    evict,
    kept,
    programs,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_served,
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
SHUTDOWN_SECONDS = 30.0
EMPTIED_SECONDS = 30.0


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
        self.node = guest.sh(f"{DM} data {self.whole()}").strip()
        self.mount()
        guest.sh(f"fallocate -l {PAGES * PAGE} {PATH} && sync")

    @staticmethod
    def boot(
        session: Session,
        kernel: Kernel,
        module: Path,
        *options: str,
        parameters: str = "verify_every=0",
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

    def whole(self) -> str:
        return f"0 {self.sectors} linear '{self.disk} 0'"

    def except_blocks(self, targets: Mapping[int, str]) -> str:
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
        """Starts to write the file back while the disk does not answer."""
        writing = self.guest.start(f"exec sync {PATH}", 120)
        until(lambda: self.writeback_kib() > 0, WRITEBACK_SECONDS, "pages are written back")
        return writing

    def go_on(self, table: str, writing: Job) -> None:
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


def extents_dropped(below: Below, block: int) -> bool:
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
    # go_on() has loaded its table. They stay writable, because writing page 1 splits an extent. The
    # target "delay" takes a device, an offset and a delay in ms each for reads, writes and flushes.
    errors = guest.sh(f"{DM} errors 0 {SECTORS} error ''").strip()
    place = f"{below.disk} {extents * SECTORS} 0"
    unreadable = {extents: f"delay '{errors} 0 0 {place} {place}'"}
    place = f"{below.disk} {data * SECTORS}"
    delay = f"delay '{place} 0 {place} {DELAY_MS} {place} 0'"
    guest.sh(f"{DM} data {below.except_blocks({**unreadable, data: delay})}")
    writing = below.write_back()
    # The task that writes holds a reference to the block with the extents for a moment, so retry.
    until(lambda: extents_dropped(below, extents), WRITEBACK_SECONDS, "the extents leave the cache")
    # Suspending the device of the target "delay" ends the delay.
    below.go_on(below.except_blocks(unreadable), writing)
    print(guest.sh("dmesg | tail -n 4"))
    assert "map_blocks returned -5" in guest.sh("dmesg"), (
        "the conversion of the unwritten extent did not fail"
    )
    guest.sh(f"{DM} data {below.whole()}")


def page_after_failed_conversion(below: Below) -> bytes:
    """Returns page 1 as a reader finds it after a failed conversion and an eviction."""
    fail_conversion(below)
    guest = below.guest
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    guest.sh(f"dd if={PATH} of=/tmp/found bs={PAGE} skip=1 count=1 2>/dev/null")
    return guest.get("/tmp/found")


@pytest.mark.smoke
def test_page_with_a_failed_extent_conversion_is_not_put(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver does not put a page after a failed conversion of its block.

    Such a page is clean and has the written data, but the disk reads as zeroes.
    """
    below = Below.boot(session, kernel, module, *NO_JOURNAL)
    assert page_after_failed_conversion(below) == bytes(PAGE)
    check_cached(below.guest, make(below.guest, WHERE))


def test_failed_extent_conversion_reads_old_bytes_with_the_hook_off(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    below = Below.boot(session, kernel, test_module, *NO_JOURNAL)
    set_parameter(below.guest, "test_hooks_off", "conversion")
    assert page_after_failed_conversion(below) == DATA, (
        "the page was not read from the pool, so the test cannot detect the fault"
    )


def shut_down(below: Below) -> int:
    """Shuts the file system down between a write and its conversion.

    Returns the number of pages that were put afterwards.
    """
    guest = below.guest
    below.write(0, PAGES)
    guest.sh(f"{DM} data suspend")
    writing = below.write_back()
    shutting = guest.start(f"exec {SPECIAL} shutdown {WHERE}", 120)
    # Wait only for the begin of the shutdown, because its end may need the stopped disk.
    until(lambda: "shut down requested" in guest.sh("dmesg"), SHUTDOWN_SECONDS, "shutdown begins")
    below.go_on(below.whole(), writing)
    assert shutting.wait().status == 0
    settle(guest)
    before = kept(stats(guest))
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    return kept(settle(guest)) - before


@pytest.mark.parametrize(
    "hooks_off",
    [pytest.param("", marks=pytest.mark.smoke, id="all"), "journal_abort", "fs_error"],
)
def test_forced_shutdown_empties_the_pool_of_the_mount(
    session: Session, kernel: Kernel, test_module: Path, hooks_off: str
) -> None:
    """After a forced shutdown of ext4, the driver puts and holds no page of it.

    Two hooks report the shutdown, and each of them is sufficient.
    """
    below = Below.boot(session, kernel, test_module)
    guest, mount = below.guest, Mount(below.guest, WHERE)
    check_cached(guest, make(guest, WHERE))
    evict(guest, [f"{WHERE}/made0"])
    assert mount.count("held_pages") > 0
    set_parameter(guest, "test_hooks_off", hooks_off)
    assert shut_down(below) == 0
    assert mount.read("state") == "blocked: the file system had an error; unmount and check it"
    until(lambda: mount.count("held_pages") == 0, EMPTIED_SECONDS, "the pool is emptied")


def test_without_the_shutdown_hooks_pages_are_put_after_a_forced_shutdown(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Negative control of test_forced_shutdown_empties_the_pool_of_the_mount."""
    below = Below.boot(session, kernel, test_module)
    set_parameter(below.guest, "test_hooks_off", "journal_abort,fs_error")
    assert shut_down(below) > 0


# Size of the range that a test zeroes. Up to 32 KiB (s_extent_max_zeroout_kb), Linux 7.2 and 7.3
# write zeroes instead of converting extents, and so cannot fail for want of a block.
ZEROED_BYTES = 64 << 10
SMALL_BYTES = 64 * MIB


def zeroes_unaligned_edges(kernel: Kernel) -> bool:
    """Returns whether ext4 zeroes parts of cached blocks before it converts extents."""
    return (6, 12) <= kernel.version < (7, 3)


def full_image(session: Session, block: int) -> Path:
    """Creates an ext4 that is small enough to be filled, without blocks that are kept for root."""
    path = session.directory / "data.img"
    return disk.ext4(path, SMALL_BYTES, None, "-b", str(block), "-m0")


def check_failed_zero_range(
    guest: Guest,
    block: int,
    switch: tuple[str, str] = ("test_hooks_off", "truncate"),
    cases: Sequence[tuple[bool, bool]] = ((True, False), (False, False), (False, True)),
) -> None:
    """Checks that the zeroes of a failed operation are not put.

    `switch` is a parameter and its value with which they are put. `cases` says for each file if
    the value is set, and whether pages are evicted before the hook `truncate` marks the file.
    """
    begin = block if block < PAGE else 100
    for off, evicted in cases:
        path = f"{WHERE}/{off}{evicted}"
        guest.sh(f"{SPECIAL} scatter {path} && {SPECIAL} fill {WHERE}", 120)
        set_parameter(guest, switch[0], switch[1] if off else "")
        evict(guest, [path])
        guest.sh(f"cat {path} >/dev/null")
        hold = Hold(guest, "truncate") if evicted else None
        zero = guest.start(f"{SPECIAL} zero {path} {begin} {ZEROED_BYTES}", 120)
        if hold:
            # Evict the pages with zeroes before the driver marks the file.
            hold.wait()
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
            hold.release()
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
    it converts the blocks. The conversion needs a block for the extent tree. The driver marks the
    file when its pages were zeroed, so that a reader gets the old bytes from the disk.
    """
    if block == PAGE and not zeroes_unaligned_edges(kernel):
        pytest.skip(f"Linux {kernel.series} zeroes no part of a block before the conversion")
    # With retained pages, the driver finds the fault of a missing hook and blocks the mount.
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    guest = driver_guest(
        session,
        kernel,
        test_module,
        tmem,
        cpus=2,
        disks=[disk.Disk("data", full_image(session, block))],
        files=programs(SPECIAL),
        parameters=f"verify_every=0 {PATIENT}",
    )
    check_failed_zero_range(guest, block)


def test_only_punches_of_parts_of_cached_pages_mark_a_file(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A program that punches whole pages of an open file keeps the file's pages in the pool."""
    guest = driver_guest(
        session,
        kernel,
        test_module,
        disks=[disk.Disk("data", full_image(session, 1024))],
        files=programs(SPECIAL),
        parameters=PATIENT,
    )
    path = f"{WHERE}/punched"
    guest.sh(f"dd if=/dev/urandom of={path} bs=64k count=16 2>/dev/null; sync")
    writer = guest.start(f"sleep 1000 3<>{path}", 1000)
    put, marked = [], []
    for offset in (8 * PAGE, 16 * PAGE + PAGE // 2):
        guest.sh(f"cat {path} >/dev/null; {SPECIAL} punch {path} {offset} {PAGE}; sync")
        before = stats(guest)
        after = evict(guest, [path])
        put.append(after["puts"] + after["refs"] > before["puts"] + before["refs"])
        marked.append(after["puts_skipped_marked"] > before["puts_skipped_marked"])
    writer.kill()
    assert (put, marked) == ([True, False], [False, True])
