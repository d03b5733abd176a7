# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Hooks that file contents do not depend on: without one of them, only its own purpose is lost.

test_torture and test_filesystems leave out the hooks that coherence depends on, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import WHERE, evict, set_parameter, settle, stats, wait_state
from test_files import FILE_PAGES, SPECIAL, boot, make

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Hooks of a way to read, and commands that read in that way.
READERS = [("readahead", "cat"), ("read_folio", f"{SPECIAL} map")]


def check_read_path(guest: Guest, hook: str, reader: str) -> None:
    """Reads a file from the pool if the hook is called, and from the disk if it is off."""
    path = f"{WHERE}/f"
    (digest,) = make(guest, path).values()
    for off in (True, False):
        set_parameter(guest, "test_hooks_off", hook if off else "")
        for _ in range(2):
            before = evict(guest, [path])
            found = guest.sh(f"{reader} {path} | sha256sum").split()[0]
            after = stats(guest)
            assert found == digest
            hits = after["hits"] - before["hits"]
            assert hits == 0 if off else hits > FILE_PAGES // 2


@pytest.mark.parametrize(("hook", "reader"), READERS)
def test_each_read_path_needs_its_hook_for_hits(
    session: Session, kernel: Kernel, test_module: Path, hook: str, reader: str
) -> None:
    """Without the hook, such reads come from the disk, and the host's pages do no harm."""
    guest = boot(session, kernel, test_module)
    check_read_path(guest, hook, reader)
    wait_state(guest, "on")


def puts_of_an_open_file(guest: Guest) -> int:
    """Opens a file for writing as the first of a mount; returns how many of its pages are put."""
    device = f"/dev/{guest.disk('data')}"
    path, other = f"{WHERE}/f", f"{WHERE}/other"
    guest.sh(f"umount {WHERE} && mount -t ext4 {device} {WHERE}", 60)
    pid = guest.sh(f"exec 3<>{path}; sleep 10000 >/dev/null 2>&1 & echo $!").strip()
    begun = stats(guest)["puts"]

    def served() -> bool:
        evict(guest, [other])
        return stats(guest)["puts"] > begun

    until(served, 60, f"the driver serves {WHERE}")
    before = settle(guest)["puts"]
    put = evict(guest, [path])["puts"] - before
    guest.sh(f"kill {pid}")
    return put


def test_mount_hook_allows_puts_of_open_files(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Without the mount hook, a file that is open for writing is not cached until its close."""
    guest = boot(session, kernel, test_module)
    make(guest, f"{WHERE}/f")
    make(guest, f"{WHERE}/other")
    assert puts_of_an_open_file(guest) > FILE_PAGES // 2
    set_parameter(guest, "test_hooks_off", "mount")
    assert puts_of_an_open_file(guest) == 0
    evict(guest, [f"{WHERE}/f"])
    before = evict(guest, [f"{WHERE}/f"])["hits"]
    assert evict(guest, [f"{WHERE}/f"])["hits"] - before > FILE_PAGES // 2, (
        "the file is not cached after it was closed"
    )
