# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests direct writes that fail midway, and the marks of files that were written directly."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import DM, WHERE, checksums, driver_guest, programs, set_parameter, settle, stats
from test_files import check_cached
from test_mounts import Mount, make

from harness.disk import FILE_SYSTEMS
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.session import Session
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DIRECTFAIL = "/bin/directfail"
SPECIAL = "/bin/special"
PROGRAMS = (DIRECTFAIL, DM, SPECIAL)
PAGE = 4096
SECTOR = 512
# Ways in which the program tests/guest/directfail.c writes directly.
WAYS = ("sync", "nowait", "aio", "io_uring")
# Exit status of directfail if the kernel reported an error before it wrote anything.
GAVE_UP = 3
OLD, NEW = b"A" * PAGE, b"B" * PAGE
# Number of files that a process has open for direct writes, like the tables of a database.
TABLES = 10_000
# Limit of the index in bytes. Marks of 2,048 neighbouring inode numbers take an XArray node of 584
# bytes, and nodes of higher levels. All marks together may take a quarter of the index. So the
# marks may use three nodes, and the test's files need more.
MARKS_ROOM_BYTES = 4 * (3 * 584)
MANY_MARKS = 6000
# Longest time until the driver has freed marks that are no longer needed. The driver
# repeats a sweep after 10 s if the first one freed too few marks.
SWEPT_SECONDS = 60.0


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    fs: str,
    *modules: str,
    parameters: str = "verify_every=0",
) -> Guest:
    return driver_guest(
        session,
        kernel,
        module,
        parameters=parameters,
        fs=FILE_SYSTEMS[fs],
        cpus=2,
        modules=[*(["xfs"] if fs == "xfs" else []), *modules],
        files=programs(*PROGRAMS),
    )


def drop(guest: Guest) -> None:
    """Evicts all clean pages."""
    guest.sh(f"sync; {SPECIAL} drain && echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)


def make_two_pages(guest: Guest, path: str) -> None:
    guest.put(path, OLD + OLD)
    drop(guest)


def check_new(guest: Guest, path: str) -> None:
    """Checks that reads return the contents of the disk, and that the file is cached again."""
    drop(guest)
    for _ in range(2):
        assert guest.get(path) == NEW + OLD, f"{path} does not read as the disk"
        drop(guest)
    before = stats(guest)["hits"]
    assert guest.get(path) == NEW + OLD
    assert stats(guest)["hits"] - before == 2, f"{path} is not cached again after the write"


@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_page_of_a_direct_write_that_faults_is_not_put(
    session: Session, kernel: Kernel, module: Path, fs: str
) -> None:
    """The driver does not put a page that was cached during a direct write that failed midway.

    The kernel leaves such a page clean although it is older than the disk. The write fails because
    its buffer cannot be read.
    """
    check_faults(boot(session, kernel, module, fs))


def check_faults(guest: Guest) -> None:
    """Checks that reads return the contents of the disk after direct writes that fail midway."""
    written = 0
    for way in WAYS:
        path = f"{WHERE}/{way}"
        make_two_pages(guest, path)
        done = guest.run(f"{DIRECTFAIL} {way} {path}", 120)
        print(done.text)
        if done.status == GAVE_UP:
            continue
        assert done.status == 0, done.text
        written += 1
        check_new(guest, path)
    assert written >= len(WAYS) - 1, (
        "more than one kind of direct write failed before it wrote a page"
    )


@pytest.mark.parametrize("fs", [pytest.param("ext4", marks=pytest.mark.smoke), "xfs"])
def test_page_of_a_direct_write_with_a_disk_error_is_not_put(
    session: Session, kernel: Kernel, module: Path, fs: str
) -> None:
    """The driver does not put a page that was cached during a direct write with a disk error.

    The write fails midway, because the second page on the disk cannot be written.
    """
    guest = boot(session, kernel, module, fs, "dm_mod", "dm_flakey")
    guest.sh(f"umount {WHERE}", 60)
    disk = f"/dev/{guest.disk('data')}"
    sectors = int(guest.read(f"/sys/class/block/{guest.disk('data')}/size"))
    whole = f"0 {sectors} linear '{disk} 0'"
    node = guest.sh(f"{DM} data {whole}").strip()
    guest.sh(f"mount -t {fs} {node} {WHERE}", 60)
    for way in ("sync", "aio"):
        path = f"{WHERE}/{way}"
        make_two_pages(guest, path)
        block = int(guest.sh(f"{SPECIAL} block {path} 1"))
        bad = block * (PAGE // SECTOR)
        after = bad + PAGE // SECTOR
        guest.sh(
            f"{DM} data 0 {bad} linear '{disk} 0' {bad} {after - bad} flakey"
            f" '{disk} {bad} 0 1 1 error_writes' {after} {sectors - after} linear '{disk} {after}'"
        )
        done = guest.run(f"{DIRECTFAIL} {way} {path} device", 120)
        print(done.text)
        assert done.status == 0, done.text
        assert "Input/output error" in done.text
        guest.sh(f"{DM} data {whole}")
        check_new(guest, path)


def many_open(guest: Guest, count: int) -> Job:
    """Starts a process that has `count` files open that it wrote directly."""
    guest.sh(f"mkdir -p {WHERE}/tables")
    tables = guest.start(f"exec {SPECIAL} tables {WHERE}/tables {count}", 600)
    until(lambda: b"ready" in tables.stdout() or tables.done(), 300, f"{count} files are written")
    assert not tables.done(), tables.wait().text
    return tables


def wait_swept(mount: Mount) -> None:
    until(lambda: mount.read("state") == "on", SWEPT_SECONDS, "the marks are swept")


def test_files_open_for_direct_writes_leave_other_files_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Other files stay cached while a process has 10,000 files open for direct writes."""
    guest = boot(session, kernel, module, "ext4")
    mount = Mount(guest, WHERE)
    sums = make(guest, WHERE)
    check_cached(guest, sums)
    tables = many_open(guest, TABLES)
    assert mount.read("state") == "on"
    check_cached(guest, sums)
    tables.kill()
    tables.wait()


def test_marks_of_closed_files_are_freed_when_mark_memory_is_full(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If there is no memory for further marks, the driver frees marks of closed files.

    If all marks belong to open files, the driver puts nothing, and reads return right bytes.
    """
    guest = boot(session, kernel, test_module, "ext4")
    mount = Mount(guest, WHERE)
    room = MARKS_ROOM_BYTES + stats(guest)["index_bytes"]
    sums = make(guest, WHERE)
    victim = f"{WHERE}/victim"
    guest.put(victim, OLD + OLD)
    check_cached(guest, sums)
    drop(guest)

    set_parameter(guest, "test_index_bytes", str(room))
    guest.sh(f"mkdir {WHERE}/closed && {SPECIAL} direct {WHERE}/closed {MANY_MARKS}", 300)
    wait_swept(mount)

    tables = many_open(guest, MANY_MARKS)
    assert mount.read("state").startswith("blocked: ")
    before = mount.count("puts")
    assert checksums(guest, list(sums)) == sums
    drop(guest)
    assert mount.count("puts") == before
    done = guest.run(f"{DIRECTFAIL} sync {victim}", 120)
    assert done.status == 0, done.text
    drop(guest)
    assert guest.get(victim) == NEW + OLD

    tables.kill()
    tables.wait()
    wait_swept(mount)
    set_parameter(guest, "test_index_bytes", "0")
    assert guest.get(victim) == NEW + OLD
    check_cached(guest, sums)
