# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests direct writes that fail midway."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import DM, PATIENT, WHERE, driver_guest, programs, set_parameter, settle, stats
from test_mounts import Mount

from harness.disk import FILE_SYSTEMS
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session

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


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    fs: str,
    *modules: str,
) -> Guest:
    return driver_guest(
        session,
        kernel,
        module,
        parameters=f"verify_every=0 {PATIENT}",
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
    """Checks that reads return the contents of the disk."""
    for _ in range(3):
        drop(guest)
        assert guest.get(path) == NEW + OLD, f"{path} does not read as the disk"


def check_cached_again(guest: Guest, path: str) -> None:
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


def test_erased_record_protects_a_page_of_a_direct_write(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Negative control of test_page_of_a_direct_write_that_faults_is_not_put."""
    guest = boot(session, kernel, test_module, "ext4")
    set_parameter(guest, "test_blocks_without", "erase")
    with pytest.raises(AssertionError, match="does not read as the disk"):
        check_faults(guest)


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
        check_cached_again(guest, path)
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
    for way in ("sync", "aio"):
        # The driver uses no disk of which a write has failed, until its next mount.
        guest.sh(f"mount -t {fs} {node} {WHERE}", 60)
        Mount(guest, WHERE).wait("on")
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
        assert Mount(guest, WHERE).read("state").startswith("blocked: a write of the disk")
        guest.sh(f"umount {WHERE}", 60)
