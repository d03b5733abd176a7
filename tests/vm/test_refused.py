# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver refuses to serve file systems on encrypted or verified devices.

It also refuses file systems whose geometry was not tested.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    DM,
    MODULE,
    driver_guest,
    programs,
    settle,
    state,
    wait_state,
)
from test_driver import changed_content
from test_files import check_cached, there
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

INNER = "/inner"
SECTOR = 512
BLOCK = 4096
OTHER_BYTES = 64 * MIB
SECTORS = OTHER_BYTES // SECTOR
ZONES_BYTES = 1 << 30
ZONED_SINCE = (6, 15)
# A key for AES-256 in XTS mode, in hexadecimal; its value does not matter.
KEY = "0123456789abcdef" * 8
CRYPTO = ("xts", "ecb", "aes_generic", "sha256_generic")
CRYPT_REASON = "dm-0 uses the crypt target; allow_encrypted=1"


def boot(session: Session, kernel: Kernel, module: Path, *modules: str, **more: Path) -> Guest:
    """Boots a guest with an ext4 at /mnt that the driver serves, and a disk for each image."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    return driver_guest(
        session,
        kernel,
        module,
        cpus=2,
        disks=[Disk("data", image), *(Disk(name, path) for name, path in more.items())],
        modules=there(kernel, *CRYPTO, *modules),
        files=programs(DM),
    )


def reload(guest: Guest, parameters: str) -> None:
    guest.sh("rmmod virtio_tmem", 60)
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0 {parameters}")
    wait_state(guest, "on")


def write(guest: Guest, path: str) -> dict[str, str]:
    content = changed_content(path)
    guest.put(path, content)
    guest.sh("sync")
    return {path: hashlib.sha256(content).hexdigest()}


def wait_until_known(guest: Guest) -> Mount:
    """Waits until the driver knows the mount at INNER.

    It learns of an xfs when a page of one of its files is read.
    """
    mount = Mount(guest, INNER)
    path = guest.sh(f"find {INNER} -type f -size +8k").split()[0]

    def there_is() -> bool:
        guest.sh(f"cat {path} >/dev/null && sync && echo 1 >/proc/sys/vm/drop_caches", 60)
        settle(guest)
        return guest.run(f"test -d {mount.path}").status == 0

    until(there_is, 60, f"the driver knows {INNER}")
    return mount


def check_refused(guest: Guest, reason: str) -> None:
    """Checks that the driver refuses the file system at INNER with `reason`, and puts no page."""
    mount = wait_until_known(guest)
    mount.wait("refused: ")
    assert reason in mount.read("state")
    number = mount.path.rpartition("/")[2]
    assert f"{number} is refused: " in state(guest) and reason in state(guest)
    assert state(guest).startswith("on: "), "the file system at /mnt is not served"
    assert mount.count("puts") == mount.count("gets") == 0
    # Switching the mount off and on in sysfs does not change the refusal.
    mount.switch(False)
    mount.switch(True)
    mount.wait("refused: ")
    assert wait_until_known(guest).count("puts") == 0


def check_served(guest: Guest) -> None:
    path = f"{INNER}/served"
    check_cached(guest, write(guest, path))
    assert Mount(guest, INNER).read("state") == "on"
    guest.sh(f"rm {path}")


def unmount_inner(guest: Guest) -> None:
    """Unmounts the file system at INNER and checks that the driver's `state` no longer names it."""
    guest.sh(f"umount {INNER}", 60)
    assert state(guest) == "on"


def test_encrypted_devices_are_refused(session: Session, kernel: Kernel, module: Path) -> None:
    other = disk.blank(session.directory / "other.img", OTHER_BYTES)
    guest = boot(session, kernel, module, "dm_mod", "dm_crypt", "raid1", "loop", other=other)
    device = f"/dev/{guest.disk('other')}"
    secret = guest.sh(f"{DM} secret 0 {SECTORS} crypt 'aes-xts-plain64 {KEY} 0 {device} 0'").strip()
    guest.sh(
        f"mkdir {INNER} && mke2fs -q -b {BLOCK} {secret} && mount -t ext4 {secret} {INNER}", 60
    )
    write(guest, f"{INNER}/f")
    check_refused(guest, CRYPT_REASON)
    unmount_inner(guest)

    # The driver refuses a device if a part of its table, or of the table of a device below, is
    # encrypted.
    half = SECTORS // 2
    linear = guest.sh(
        f"{DM} upper 0 {half} linear '{device} 0' {half} {half} linear '{secret} {half}'"
    ).strip()
    guest.sh(f"mke2fs -q -b {BLOCK} {linear} && mount -t ext4 {linear} {INNER}", 60)
    write(guest, f"{INNER}/f")
    check_refused(guest, CRYPT_REASON)
    unmount_inner(guest)

    # Assemble an md array without a superblock through sysfs.
    number = guest.read(f"/sys/block/{linear.rpartition('/')[2]}/dev")
    name = linear.rpartition("/")[2]
    guest.sh(
        "echo md7 >/sys/module/md_mod/parameters/new_array && cd /sys/block/md7/md &&"
        " echo none >metadata_version && echo raid1 >level && echo 1 >raid_disks &&"
        f" echo {OTHER_BYTES // 1024} >component_size && echo {number} >new_dev &&"
        f" echo 0 >dev-{name}/slot && echo active >array_state"
    )
    guest.sh(f"mount -t ext4 /dev/md7 {INNER}", 60)
    check_refused(guest, CRYPT_REASON)
    unmount_inner(guest)

    # Mount a loop device whose file is on the encrypted disk.
    guest.sh(f"mount -t ext4 /dev/md7 {INNER}", 60)
    guest.sh(f"truncate -s 16M {INNER}/image && losetup /dev/loop0 {INNER}/image")
    guest.sh("mkdir /loop && mke2fs -q /dev/loop0 && mount -t ext4 /dev/loop0 /loop", 60)
    write(guest, "/loop/f")
    until(lambda: "7:0 is refused: " in state(guest), 30, "the loop device is refused")
    guest.sh("umount /loop && losetup -d /dev/loop0", 60)

    # The driver also refuses file systems that are mounted when it is loaded. The parameter
    # allow_encrypted=1 allows them.
    reload(guest, "")
    check_refused(guest, CRYPT_REASON)
    # The driver cannot drain an md array, so it must see the mount from its begin.
    reload(guest, "allow_encrypted=1")
    guest.sh(f"umount {INNER}; mount -t ext4 /dev/md7 {INNER}", 60)
    wait_until_known(guest).wait("on")
    check_served(guest)


def verity_tree(data: bytes) -> tuple[bytes, str]:
    """Returns the hash tree of dm-verity, version 1 without salt, and its root hash."""
    levels = [data]
    while len(levels[-1]) > BLOCK:
        below = levels[-1]
        hashes = b"".join(
            hashlib.sha256(below[at : at + BLOCK]).digest() for at in range(0, len(below), BLOCK)
        )
        levels.append(hashes + bytes(-len(hashes) % BLOCK))
    return b"".join(reversed(levels[1:])), hashlib.sha256(levels[-1]).hexdigest()


def test_file_systems_on_dm_verity_are_refused(
    session: Session, kernel: Kernel, module: Path
) -> None:
    tree = session.directory / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(changed_content("f"))
    image = disk.ext4(session.directory / "other.img", 16 * MIB, tree)
    hashes, root = verity_tree(image.read_bytes())
    (session.directory / "hashes.img").write_bytes(hashes)
    guest = boot(
        session,
        kernel,
        module,
        "dm_mod",
        "dm_verity",
        other=image,
        hashes=session.directory / "hashes.img",
    )
    data, tree_device = (f"/dev/{guest.disk(name)}" for name in ("other", "hashes"))
    blocks = image.stat().st_size // BLOCK
    node = guest.sh(
        f"{DM} proved 0 {blocks * BLOCK // SECTOR} verity"
        f" '1 {data} {tree_device} {BLOCK} {BLOCK} {blocks} 0 sha256 {root} -'"
    ).strip()
    guest.sh(f"mkdir {INNER} && mount -t ext4 -o ro,noload {node} {INNER}", 60)
    check_refused(guest, "dm-0 uses the verity target; allow_encrypted=1")
    unmount_inner(guest)


def test_devices_with_integrity_tags_are_refused(
    session: Session, kernel: Kernel, module: Path
) -> None:
    other = disk.blank(session.directory / "other.img", OTHER_BYTES)
    guest = boot(session, kernel, module, "dm_integrity", other=other)
    device = f"/dev/{guest.disk('other')}"
    # The disk has no superblock of dm-integrity, so the kernel formats it. A quarter of the disk is
    # left for the integrity tags.
    node = guest.sh(
        f"{DM} tagged 0 {SECTORS // 4 * 3} integrity"
        f" '{device} 0 - D 2 internal_hash:sha256 recalculate'"
    ).strip()
    guest.sh(f"mkdir {INNER} && mke2fs -q -b {BLOCK} {node} && mount -t ext4 {node} {INNER}", 60)
    write(guest, f"{INNER}/f")
    check_refused(guest, "dm-0 uses the integrity target; allow_encrypted=1")
    unmount_inner(guest)


def test_dm_linear_targets_are_served(session: Session, kernel: Kernel, module: Path) -> None:
    """The driver serves a linear target on a linear target, also if another disk is encrypted."""
    other = disk.blank(session.directory / "other.img", OTHER_BYTES)
    guest = boot(session, kernel, module, "dm_mod", "dm_crypt", other=other)
    device = f"/dev/{guest.disk('other')}"
    half = SECTORS // 2
    lower = guest.sh(f"{DM} lower 0 {half} linear '{device} 0'").strip()
    upper = guest.sh(f"{DM} upper 0 {half} linear '{lower} 0'").strip()
    guest.sh(f"{DM} swap 0 {half} crypt 'aes-xts-plain64 {KEY} 0 {device} {half}'")
    guest.sh(f"mkdir {INNER} && mke2fs -q -b {BLOCK} {upper} && mount -t ext4 {upper} {INNER}", 60)
    check_served(guest)
    assert state(guest) == "on"


def test_untested_block_sizes_and_realtime_xfs_are_refused(
    session: Session, kernel: Kernel, module: Path
) -> None:
    two = disk.ext4(session.directory / "two.img", OTHER_BYTES, None, "-b", "2048")
    real = disk.blank(session.directory / "real.img", OTHER_BYTES)
    xfs = disk.xfs(session.directory / "xfs.img", DISK_BYTES, "-r", f"rtdev={real}")
    guest = boot(session, kernel, module, "xfs", two=two, xfs=xfs, real=real)
    nodes = {name: f"/dev/{guest.disk(name)}" for name in ("two", "xfs", "real")}
    guest.sh(f"mkdir {INNER} && mount -t ext4 {nodes['two']} {INNER}", 60)
    write(guest, f"{INNER}/f")
    check_refused(guest, "blocks of 2048 bytes are not tested; allow_untested=1")
    unmount_inner(guest)
    guest.sh(f"mount -t xfs -o rtdev={nodes['real']} {nodes['xfs']} {INNER}", 60)
    write(guest, f"{INNER}/f")
    check_refused(guest, "a realtime or zoned xfs is not tested; allow_untested=1")
    reload(guest, "allow_untested=1")
    wait_until_known(guest).wait("on")
    check_served(guest)


def test_ext4_that_may_store_files_in_inodes_is_served(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Reads of small files in inodes are no bios, and other files have blocks."""
    data = disk.ext4(session.directory / "inline.img", OTHER_BYTES, None, "-O", "inline_data")
    guest = boot(session, kernel, module, inline=data)
    guest.sh(f"mkdir {INNER} && mount -t ext4 /dev/{guest.disk('inline')} {INNER}", 60)
    small = f"{INNER}/small"
    write(guest, f"{INNER}/f")
    wait_until_known(guest).wait("on")
    for content in (b"old\n", b"new\n", changed_content(small), b"small again\n"):
        guest.put(small, content)
        for _ in range(2):
            guest.sh("sync; echo 3 >/proc/sys/vm/drop_caches")
            assert guest.get(small) == content
    check_served(guest)


def test_zoned_xfs_is_refused(session: Session, kernel: Kernel, module: Path) -> None:
    if kernel.version < ZONED_SINCE:
        pytest.skip(f"Linux {kernel.series} has no zoned xfs")
    zones = disk.blank(session.directory / "zones.img", ZONES_BYTES)
    xfs = disk.zoned_xfs(session.directory / "xfs.img", DISK_BYTES, zones)
    guest = boot(session, kernel, module, "xfs", xfs=xfs, zones=zones)
    nodes = {name: f"/dev/{guest.disk(name)}" for name in ("xfs", "zones")}
    guest.sh(f"mkdir {INNER} && mount -t xfs -o rtdev={nodes['zones']} {nodes['xfs']} {INNER}", 60)
    write(guest, f"{INNER}/f")
    check_refused(guest, "a realtime or zoned xfs is not tested; allow_untested=1")
