# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Without a hook that right contents do not depend on, only hits or puts are lost.

test_torture.py and test_blocks_checks.py remove the checks that right contents depend on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    DISK_BYTES,
    DM,
    WHERE,
    driver_guest,
    evict,
    programs,
    set_parameter,
    settle,
    stats,
    wait_state,
)
from test_files import FILE_PAGES, SPECIAL, check_cached, make
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

OTHER = "/other"
OTHER_BYTES = 64 * MIB
# Guest commands that read files: by readahead, and page by page through a mapping.
READERS = ["cat", f"{SPECIAL} map"]


def boot(session: Session, kernel: Kernel, module: Path, *modules: str, **more: Path) -> Guest:
    """Boots a guest with an ext4 at /mnt that the driver serves, and a disk for each image."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    return driver_guest(
        session,
        kernel,
        module,
        cpus=2,
        disks=[Disk("data", image), *(Disk(name, path) for name, path in more.items())],
        modules=modules,
        files=programs(DM, SPECIAL),
    )


def wait_put(guest: Guest, path: str) -> None:
    """Waits until the driver puts the pages of a file. It puts none while it drains the disk."""

    def put() -> bool:
        before = stats(guest)["puts"]
        return evict(guest, [path])["puts"] - before > FILE_PAGES // 2

    until(put, 60, f"{path} is put")


def check_read_path(guest: Guest, reader: str) -> None:
    """Checks that a file is read from the disk while submit_bio() is not hooked, else the pool."""
    path = f"{WHERE}/f"
    (digest,) = make(guest, path).values()
    for off in (False, True, False):
        wait_put(guest, path)
        set_parameter(guest, "test_hooks_off", "bio" if off else "")
        before = stats(guest)
        found = guest.sh(f"{reader} {path} | sha256sum").split()[0]
        hits = stats(guest)["hits"] - before["hits"]
        set_parameter(guest, "test_hooks_off", "")
        assert found == digest
        assert hits == 0 if off else hits > FILE_PAGES // 2
        guest.sh(f"{SPECIAL} dontneed {path}")


@pytest.mark.parametrize("reader", READERS)
def test_each_read_path_needs_the_hook_of_submit_bio_for_hits(
    session: Session, kernel: Kernel, test_module: Path, reader: str
) -> None:
    """If submit_bio() is not hooked, reads come from the disk and have right bytes."""
    guest = boot(session, kernel, test_module)
    check_read_path(guest, reader)
    wait_state(guest, "on")


def check_fadvise(guest: Guest) -> None:
    """Checks that a file that fadvise(DONTNEED) drops is put only while the hook is off."""
    path = f"{WHERE}/f"
    make(guest, path)
    for off in (True, False):
        set_parameter(guest, "test_hooks_off", "fadvise" if off else "")
        guest.sh(f"cat {path} >/dev/null")
        before = settle(guest)
        guest.sh(f"{SPECIAL} dontneed {path}")
        after = settle(guest)
        put = after["puts"] + after["refs"] - before["puts"] - before["refs"]
        assert put > FILE_PAGES // 2 if off else put == 0


def test_pages_dropped_by_fadvise_are_put_only_without_the_fadvise_hook(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    check_fadvise(boot(session, kernel, test_module))


def test_mount_on_device_mapper_is_cached_only_with_the_mount_hook(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver must see a mount from its begin if it cannot drain the disk below."""
    other = disk.ext4(session.directory / "other.img", OTHER_BYTES)
    guest = boot(session, kernel, test_module, "dm_mod", other=other)
    device = f"/dev/{guest.disk('other')}"
    sectors = guest.read(f"/sys/class/block/{guest.disk('other')}/size")
    node = guest.sh(f"{DM} data 0 {sectors} linear '{device} 0'").strip()
    guest.sh(f"mkdir {OTHER} && mount -t ext4 {node} {OTHER}", 60)
    mount = Mount(guest, OTHER)
    mount.wait("on")
    check_cached(guest, make(guest, f"{OTHER}/f"))
    guest.sh(f"umount {OTHER}", 60)

    set_parameter(guest, "test_hooks_off", "mount")
    guest.sh(f"mount -t ext4 {node} {OTHER}", 60)

    def known() -> bool:
        evict(guest, [f"{OTHER}/f"])
        return guest.run(f"test -d {mount.path}").status == 0

    until(known, 60, "the driver knows the mount")
    assert not mount.read("state").startswith("on"), mount.read("state")
    evict(guest, [f"{OTHER}/f"])
    assert mount.count("puts") == mount.count("gets") == 0
    wait_state(guest, "on")
