# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Without a hook that right contents do not depend on, only hits or puts are lost.

test_torture.py and test_filesystems.py switch off the hooks that right contents depend on.
"""

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

# Name of each hook for reads, and a guest command that reads files through it.
READERS = [("readahead", "cat"), ("read_folio", f"{SPECIAL} map")]


def check_read_path(guest: Guest, hook: str, reader: str) -> None:
    """Checks that a file is read from the disk while the hook is off, otherwise from the pool."""
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
    """If a hook for reads is off, reads of its kind come from the disk and have right bytes."""
    guest = boot(session, kernel, test_module)
    check_read_path(guest, hook, reader)
    wait_state(guest, "on")


def puts_of_an_open_file(guest: Guest) -> int:
    """Mounts the disk again, opens a file for writing, and returns how many of its pages are put.

    No other file of the mount has been opened before. So the driver can know the mount at the open
    only by the mount hook.
    """
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


def test_files_open_for_writing_are_put_only_with_the_mount_hook(
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
        "too few pages of the closed file were hits"
    )
