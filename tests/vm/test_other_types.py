# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the types of file systems other than ext4 and xfs that the driver serves."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    MODULE,
    WHERE,
    Torture,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    growth,
    load,
    programs,
    seed,
    set_parameter,
    start_daemon,
    stats,
    wait_state,
)
from test_filesystems import SMALL
from test_guest_command import NOT_SERVED, command, expect_failure
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SPECIAL = "/usr/bin/special"
FILES = 8
FILE_PAGES = 64
OPERATIONS = 1_000
PAGE = 4096
OTHER = "/other"


def run_torture(guest: Guest, name: str, operations: int) -> None:
    """Runs random operations on a file system, and unmounts and mounts it once."""
    fs = disk.find(name)
    arguments = (
        f"--seed={seed()} --ops={operations} {SMALL} --jobs=2 --rounds=2"
        f" {disk.omit_arguments(name)} --device=/dev/{guest.disk(serial(name))} --fstype={fs.kind}"
    )
    Torture(guest, arguments, 600, f"/{name}").finish()


def serial(name: str) -> str:
    """Returns the name of the disk with a file system, which has letters and digits only."""
    return name.replace("-", "")


def test_torture_finds_no_wrong_byte(session: Session, kernel: Kernel, module: Path) -> None:
    """Runs random operations on each type, at last with a comparison of each hit with the disk.

    Every other type is mounted before the module is loaded.
    """
    # Debian's cloud kernels have no f2fs. The kernel for all machines is used for f2fs only.
    types = {
        name: fs
        for name, fs in disk.OTHER_FILE_SYSTEMS.items()
        if (name == "f2fs") == kernel.series.endswith("-amd64")
    }
    disks = [
        Disk(serial(name), fs.make(session.directory / f"{name}.img", DISK_BYTES))
        for name, fs in types.items()
    ]
    guest = driver_vm(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1")),
        disks=disks,
        modules=list(dict.fromkeys(name for fs in types.values() for name in fs.modules)),
        cpus=2,
        memory_bytes=400 * MIB,
    ).start()
    for name in list(types)[::2]:
        guest.mount(serial(name), f"/{name}", types[name].kind)
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS}")
    wait_state(guest, "on")
    for name in list(types)[1::2]:
        guest.mount(serial(name), f"/{name}", types[name].kind)
    for name in types:
        guest.sh(f"echo page >/{name}/file && sync")
        wait_mount(guest, f"/{name}")
        set_parameter(guest, "verify_every", "0")
        before = stats(guest)
        run_torture(guest, name, OPERATIONS)
        Torture(
            guest, f"--seed={seed()} --mode=versions --ops=500 --mixed", 300, f"/{name}"
        ).finish()
        hits = stats(guest)["hits"] - before["hits"]
        set_parameter(guest, "verify_every", "1")
        run_torture(guest, name, OPERATIONS // 2)
        counters = growth(before, stats(guest))
        print(name, hits, counters)
        assert hits > OPERATIONS // 20
        assert counters["puts"] > 0
        assert counters["blocks_gets_equal"] > 100
        assert counters["mismatches"] + counters["verify_mismatches"] == 0
        mount = Mount(guest, f"/{name}")
        guest.sh(f"umount /{name}", 60)
        assert guest.run(f"[ -e {mount.path} ]").status != 0


def contents(text: str) -> bytes:
    """Returns the contents of a file whose name is `text`: half of each page is compressible."""
    generator = random.Random(text)
    return b"".join(
        generator.randbytes(PAGE // 2) + bytes([number]) * (PAGE // 2)
        for number in range(FILE_PAGES)
    )


def wait_mount(guest: Guest, where: str) -> Mount:
    """Waits until the driver serves a mount of which a page has been read or written."""
    mount = Mount(guest, where)
    until(lambda: guest.run(f"[ -e {mount.path} ]").status == 0, 30, f"the driver knows {where}")
    mount.wait()
    return mount


def check_hits(guest: Guest, sums: dict[str, str]) -> int:
    """Checks files twice after their pages were evicted, and returns the hits of these reads."""
    hits = 0
    for _ in range(2):
        before = evict(guest, list(sums))["hits"]
        assert checksums(guest, list(sums)) == sums
        hits += stats(guest)["hits"] - before
    return hits


@pytest.mark.parametrize("options", ["", "-zlz4"], ids=["plain", "compressed"])
def test_files_of_erofs_are_cached_unless_they_are_compressed(
    session: Session, kernel: Kernel, module: Path, options: str
) -> None:
    """Also reads the files through an overlayfs, which has no pages of its own."""
    tree = session.directory / "tree"
    tree.mkdir()
    sums = {}
    for number in range(FILES):
        content = contents(f"f{number}")
        (tree / f"f{number}").write_bytes(content)
        sums[f"f{number}"] = hashlib.sha256(content).hexdigest()
    image = disk.erofs(session.directory / "data.img", tree, *options.split())
    fs = disk.FileSystem("erofs")
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1")),
        disks=[Disk("data", image, read_only=True)],
        modules=[*fs.modules, "overlay"],
        cpus=2,
    )
    guest = vm.start()
    load(guest, "verify_every=0", fs=fs, online=False)
    wait_state(guest, "on")
    guest.sh(f"cat {WHERE}/f0 >/dev/null")
    mount = wait_mount(guest, WHERE)
    for every in ("0", "1"):
        set_parameter(guest, "verify_every", every)
        hits = check_hits(guest, {f"{WHERE}/{name}": digest for name, digest in sums.items()})
        if not options:
            assert hits > FILES * FILE_PAGES // 2
    guest.sh(f"mkdir /empty /merged && mount -t overlay -o lowerdir={WHERE}:/empty none /merged")
    hits = check_hits(guest, {f"/merged/{name}": digest for name, digest in sums.items()})
    if not options:
        assert hits > FILES * FILE_PAGES // 2
    counters = stats(guest)
    assert counters["mismatches"] + counters["verify_mismatches"] == 0
    guest.sh(f"umount /merged {WHERE}")
    assert guest.run(f"[ -e {mount.path} ]").status != 0


def make(guest: Guest, where: str, text: str) -> dict[str, str]:
    """Creates a few files, and returns their sha256."""
    sums = {}
    for number in range(FILES):
        content = contents(f"{text}{number}")
        guest.put(f"{where}/{text}{number}", content)
        sums[f"{where}/{text}{number}"] = hashlib.sha256(content).hexdigest()
    guest.sh("sync")
    return sums


def boot_btrfs(session: Session, kernel: Kernel, module: Path) -> Guest:
    """Boots a guest with a btrfs on two disks: each has every other 64 KiB of the data."""
    images = [session.directory / f"{name}.img" for name in ("one", "two")]
    disk.btrfs(images, DISK_BYTES, "-d", "raid0", "-m", "single")
    fs = disk.FileSystem("btrfs", mount_options="device=/dev/vda,device=/dev/vdb")
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1")),
        disks=[Disk("data", images[0]), Disk("two", images[1])],
        modules=fs.modules,
        files=programs(SPECIAL),
        cpus=2,
    )
    guest = vm.start()
    load(guest, "verify_every=0", fs=fs, online=False)
    wait_state(guest, "on")
    return guest


def test_btrfs_on_several_disks_is_cached_on_one_of_them(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Moves the btrfs away from the disk that is cached, and uses that disk for an ext4."""
    guest = boot_btrfs(session, kernel, module)
    sums = make(guest, WHERE, "first")
    mount = wait_mount(guest, WHERE)
    pages = 2 * FILES * FILE_PAGES
    assert pages // 5 < check_hits(guest, sums) < pages * 4 // 5
    (cached,) = set(re.findall(r"BTRFS info \(device (vd[ab])", guest.sh("dmesg")))

    # Data that moves to another disk is right, and is not cached any more.
    guest.sh(f"{SPECIAL} btrfs-remove {WHERE} /dev/{cached}", 120)
    assert check_hits(guest, sums) == 0

    # Another file system on the old disk has no area until the btrfs gives up its own.
    guest.sh(f"mke2fs -q /dev/{cached} && mkdir {OTHER}", 60)
    guest.sh(f"mount -t ext4 /dev/{cached} {OTHER}", 60)
    others = make(guest, OTHER, "other")
    assert check_hits(guest, others) == 0
    assert "has used the disk" in Mount(guest, OTHER).read("state")
    guest.sh(f"umount {OTHER}")

    # When the data is back on the old disk, it is cached there, and no byte is one of the ext4.
    left = {"vda": "vdb", "vdb": "vda"}[cached]
    guest.sh(f"{SPECIAL} btrfs-add {WHERE} /dev/{cached}", 60)
    guest.sh(f"{SPECIAL} btrfs-remove {WHERE} /dev/{left}", 120)
    set_parameter(guest, "verify_every", "1")
    assert check_hits(guest, sums) > FILES * FILE_PAGES
    counters = stats(guest)
    assert counters["mismatches"] + counters["verify_mismatches"] == 0
    # btrfs splits reads between its disks. The driver must not cause a warning of the kernel.
    assert "WARNING:" not in guest.sh("dmesg")
    guest.sh(f"umount {WHERE}")
    assert guest.run(f"[ -e {mount.path} ]").status != 0


def test_policies_of_files_are_refused_if_inode_numbers_change(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A file of vfat has no number that names it for as long as it exists."""
    guest = driver_guest(session, kernel, module, fs=disk.find("vfat"), files=command())
    make(guest, WHERE, "f")
    expect_failure(guest, f"policy {WHERE}/f0 never", NOT_SERVED, "policies")
