# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests files of special kinds. Some must not be cached, such as encrypted files and swap files.

Other files are cached, such as files below a loop device or overlayfs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MAX_MS,
    ONLINE_SECONDS,
    SYSFS,
    TORTURE,
    WHERE,
    Torture,
    checksums,
    driver_guest,
    evict,
    growth,
    kept_pages,
    seed,
    set_parameter,
    settle,
    stats,
    wait_state,
)
from test_driver import changed_content, overwrite

from harness import disk
from harness.disk import FILE_SYSTEMS, FileSystem
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import TESTS, HarnessError, guest_program
from harness.session import Session
from harness.vm import MIB
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SPECIAL = "/bin/special"
FILE_PAGES = 128  # number of pages of a file from changed_content()
SMALL_FILES = 8
SWAP_MIB = 8


def there(kernel: Kernel, *modules: str) -> list[str]:
    """Returns those of `modules` that the kernel has as files. Other ones may be built in."""
    found = []
    for name in modules:
        try:
            kernel.module_files([name])
        except HarnessError:
            continue
        found.append(name)
    return found


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    *,
    options: str = "",
    modules: Sequence[str] = (),
    mount: str = "",
    parameters: str = "verify_every=0",
) -> Guest:
    """Boots a guest with an ext4 of these features and the module loaded."""
    guest = driver_guest(
        session,
        kernel,
        module,
        parameters=parameters,
        fs=FileSystem("ext4", ("-O", options) if options else ()),
        cpus=2,
        modules=there(kernel, *modules),
        files={SPECIAL: guest_program(TESTS / "guest/special.c")},
    )
    if mount:
        guest.sh(f"mount -o remount,{mount} {WHERE}")
    return guest


def make(guest: Guest, path: str) -> dict[str, str]:
    content = changed_content(path)
    guest.put(path, content)
    guest.sh("sync")
    return {path: hashlib.sha256(content).hexdigest()}


def wait_mounts(guest: Guest) -> None:
    """Waits until the driver serves all mounts that it knows."""

    def served() -> bool:
        states = guest.sh(f"cat {SYSFS}/mounts/*/state").splitlines()
        return set(states) == {"on"}

    until(served, ONLINE_SECONDS, "all mounts are served")


def check_right(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that files read right also after their pages were evicted and read again."""
    for _ in range(3):
        assert checksums(guest, list(sums)) == sums
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
        settle(guest)


def check_not_cached(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that evicting and reading files causes no put and no hit, and no wrong byte."""
    settle(guest)
    before = stats(guest)
    for _ in range(2):
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
        assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert kept_pages(after) == kept_pages(before)
    assert after["hits"] == before["hits"]


def check_cached(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that evicted pages of files come back with right bytes from the cache."""
    evict(guest, list(sums))
    before = stats(guest)["hits"]
    assert checksums(guest, list(sums)) == sums
    assert stats(guest)["hits"] - before > len(sums) * FILE_PAGES // 2


def test_encrypted_files_are_not_put(session: Session, kernel: Kernel, module: Path) -> None:
    """The page cache has encrypted files in plain text, which the host must not get."""
    guest = boot(
        session, kernel, module, options="encrypt", modules=["ecb", "xts", "cts", "sha512_generic"]
    )
    guest.sh(f"mkdir {WHERE}/secret && {SPECIAL} encrypt {WHERE}/secret")
    plain = make(guest, f"{WHERE}/plain")
    check_cached(guest, plain)
    guest.sh(f"rm {WHERE}/plain")
    check_not_cached(guest, make(guest, f"{WHERE}/secret/f"))


def test_verity_files_are_not_cached(session: Session, kernel: Kernel, module: Path) -> None:
    """A file is cached until fs-verity is enabled for it. Then no page is put or got."""
    guest = boot(session, kernel, module, options="verity")
    sums = make(guest, f"{WHERE}/f")
    check_cached(guest, sums)
    assert evict(guest, list(sums))["index_pages"] >= FILE_PAGES // 2
    guest.sh(f"{SPECIAL} verity {WHERE}/f", 60)
    assert checksums(guest, list(sums)) == sums
    check_not_cached(guest, sums)


def test_quota_file_in_use_reads_no_old_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The kernel writes a quota file below its page cache, also while its pages are in the pool."""
    guest = boot(session, kernel, module, modules=["quota_v2"], mount="usrquota")
    path = f"{WHERE}/aquota.user"
    guest.sh(f"{SPECIAL} quotafile {path}")
    assert evict(guest, [path])["index_pages"] > 0
    guest.sh(f"{SPECIAL} quotaon {WHERE} {path}")
    owners = " ".join(str(owner) for owner in range(1000, 1040))
    guest.sh(f"cd {WHERE} && for i in {owners}; do echo $i >of$i && chown $i of$i; done; sync", 60)
    # Read the quota file while quotas are on.
    guest.sh(f"cat {path} >/dev/null; sync; echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    guest.sh(f"cat {path} >/dev/null")
    guest.sh(f"{SPECIAL} quotaoff {WHERE} {path} && sync")
    guest.sh(f"{SPECIAL} same {path}")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    guest.sh(f"{SPECIAL} same {path}")
    assert any(guest.get(path)[2048:]), "the kernel did not write to the quota file"


def switch_quota_off(guest: Guest, path: str, way: str) -> None:
    """Makes a quota file an ordinary file in a way in which the kernel keeps its cached pages."""
    guest.sh(f"mount -o remount,ro {WHERE}", 60)
    if way == "off":
        done = guest.run(f"{SPECIAL} quotaoff {WHERE} {path}")
        # Linux 6.1 switches the quotas off and returns an error nevertheless.
        assert done.status == 0 or b"Read-only file system" in done.stderr
        return
    # Without the module of the quota format, the kernel cannot resume the quotas.
    guest.sh("rmmod quota_v2")
    guest.sh(f"mount -o remount,rw {WHERE}", 60)


def check_former_quota_file(guest: Guest, way: str) -> None:
    """Checks that a former quota file is read from the disk.

    If writes do not erase their blocks from the index, its old bytes are read. Old bytes may come
    from entries of the time before the quotas, or from pages that were cached while the quotas were
    on. In the second case, the record of a page's block protects the page.
    """
    owners = " ".join(str(owner) for owner in range(1000, 1040))
    for off, cached in ((True, False), (False, False), (False, True)):
        # The kernel leaves a file immutable if its quotas cannot be resumed, so use another file.
        path = f"{WHERE}/{'without' if off else 'with'}{cached}"
        guest.sh(f"{SPECIAL} quotafile {path}")
        settle(guest)
        before = stats(guest)["index_pages"]
        assert evict(guest, [path])["index_pages"] > before
        guest.sh(f"{SPECIAL} quotaon {WHERE} {path}")
        if cached:
            guest.sh(f"cat {path} >/dev/null")
        set_parameter(guest, "test_blocks_without", "forget" if off else "")
        guest.sh(
            f"cd {WHERE} && for i in {owners}; do echo $i >of$i && chown $i of$i; done; sync", 60
        )
        switch_quota_off(guest, path, way)
        for _ in range(2):
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
            settle(guest)
            # If cached and direct reads differ, the program ends with status 1.
            assert guest.run(f"{SPECIAL} same {path}").status == off
            assert any(guest.get(path)[2048:]) != off
        guest.sh(f"mount -o remount,rw {WHERE}", 60)
        if way == "resume":
            guest.sh("insmod /modules/*quota_v2.ko")
        guest.sh(f"rm {WHERE}/of*")


@pytest.mark.parametrize("way", [pytest.param("off", marks=pytest.mark.smoke), "resume"])
def test_former_quota_file_reads_no_old_byte(
    session: Session, kernel: Kernel, test_module: Path, way: str
) -> None:
    """A quota file that becomes an ordinary file is read from the disk.

    The kernel has written its blocks below the page cache. If suspended quotas are switched off, or
    cannot be resumed, the kernel does not remove the file's pages from the page cache.
    """
    guest = boot(session, kernel, test_module, modules=["quota_v2"], mount="usrquota")
    set_parameter(guest, "deadline_ms", str(DEADLINE_MAX_MS))
    check_former_quota_file(guest, way)
    check_cached(guest, make(guest, f"{WHERE}/other"))


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_loop_device_on_a_cached_file_reads_no_old_byte(
    session: Session, kernel: Kernel, module: Path, direct: bool
) -> None:
    """Neither a cached file nor the file system of a loop device in this file reads old bytes."""
    number = seed()
    guest = boot(session, kernel, module, modules=["loop"])
    image = f"{WHERE}/image"
    guest.sh(f"truncate -s 96M {image} && mkdir /inner && losetup /dev/loop0 {image}")
    if direct:
        guest.sh(f"{SPECIAL} loop-direct /dev/loop0")
    # The inner file system is ext4 without a journal, which the guest's busybox can create.
    guest.sh("mke2fs -q -b 4096 /dev/loop0 && mount -t ext4 /dev/loop0 /inner", 120)
    before = stats(guest)
    arguments = "--ops=8000 --jobs=2 --files=16 --size-max=262144 --rounds=2"
    done = guest.run(
        f"{TORTURE} --seed={number} {arguments} --device=/dev/loop0 --fstype=ext4 /inner", 600
    )
    assert done.status == 0, (done.text[-4000:], stats(guest))
    outer = f"{WHERE}/beside"
    check_cached(guest, make(guest, outer))
    guest.sh("umount /inner && sync && losetup -d /dev/loop0", 60)
    guest.sh(f"{SPECIAL} same {image}", 120)
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    guest.sh(f"{SPECIAL} same {image}", 120)
    after = stats(guest)
    assert kept_pages(after) - kept_pages(before) > 1000
    assert after["mismatches"] == 0
    wait_state(guest, "on")


def test_large_direct_write_erases_all_held_pages(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A direct write to all of a file erases all its pages from the index. Direct reads do no harm.

    Direct and cached reads run at the same time.
    """
    guest = boot(session, kernel, module)
    path, mib = f"{WHERE}/large", 8
    for turn in range(3):
        new = f"{turn}".encode()
        content = b"".join(
            hashlib.shake_128(new + bytes([part])).digest(MIB) for part in range(mib)
        )
        guest.put("/tmp/new", content)
        option = "oflag=direct conv=notrunc" if turn else "conv=fsync"
        guest.sh(f"dd if=/tmp/new of={path} bs={mib}M count=1 {option} 2>/dev/null", 120)
        right = {path: hashlib.sha256(content).hexdigest()}
        assert checksums(guest, [path]) == right
        for _ in range(2):
            guest.sh(f"dd if={path} bs=1M count=4 of=/dev/null 2>/dev/null; sync")
            evict(guest, [path])
            assert checksums(guest, [path]) == right
        direct = guest.sh(f"dd if={path} bs={mib}M iflag=direct 2>/dev/null | sha256sum", 60)
        assert direct.split()[0] == right[path]
        evict(guest, [path])
    counters = stats(guest)
    assert counters["hits"] > mib * 256 // 2
    assert counters["invalidations_block"] > 0


def test_dontcache_pages_cause_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """RWF_DONTCACHE, which drops pages after their use, causes no wrong byte."""
    guest = boot(session, kernel, module)
    done = guest.run(f"{TORTURE} --scenario=dontcache {WHERE}", 120)
    if found := re.search(r"TORTURE SKIP: (.*)", done.text):
        pytest.skip(f"kernel {kernel.release}: {found[1]}")
    assert done.status == 0, done.text
    Torture(guest, "--scenario=dontcache").finish()
    assert stats(guest)["hits"] > 0


def test_swap_file_reads_no_old_byte(session: Session, kernel: Kernel, module: Path) -> None:
    """The kernel swaps to a file below its page cache, also while its pages are in the pool."""
    guest = boot(session, kernel, module)
    path = f"{WHERE}/swap"
    guest.sh(
        f"dd if=/dev/urandom of={path} bs=1M count={SWAP_MIB} 2>/dev/null; mkswap {path}; sync"
    )
    assert evict(guest, [path])["index_pages"] > 0
    before = stats(guest)
    guest.sh(f"swapon {path}")
    guest.sh(f"{SPECIAL} swap-out {SWAP_MIB * MIB // 2}", 60)
    assert growth(before, stats(guest))["invalidations_block"] > SWAP_MIB * 256 // 8
    guest.sh(f"cat {path} >/dev/null; echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)
    guest.sh(f"cat {path} >/dev/null; swapoff {path}", 60)
    for _ in range(2):
        guest.sh(f"{SPECIAL} same {path}")
        evict(guest, [path])


def test_fadvise_on_part_of_a_page_does_not_prevent_puts(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """fadvise(DONTNEED) for a part of a page drops no page, so it must not prevent any put."""
    guest = boot(session, kernel, module)
    path = f"{WHERE}/f"
    sums = make(guest, path)
    check_cached(guest, sums)
    # Start more processes than the guest has processors, so that one of them is always in the
    # middle of the fadvise call.
    advisers = [guest.start(f"exec {SPECIAL} advise {path} 100", 300) for _ in range(3)]
    for _ in range(3):
        before = kept_pages(settle(guest))
        assert kept_pages(evict(guest, [path])) - before >= FILE_PAGES * 9 // 10
    for adviser in advisers:
        assert not adviser.done(), adviser.wait().text
        adviser.kill()
        adviser.wait()
    assert checksums(guest, [path]) == sums


def test_mounts_of_one_file_system_share_one_cache(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """One file system mounted at three places has one cache, which lasts until the last unmount."""
    guest = boot(session, kernel, module)
    device = f"/dev/{guest.disk('data')}"
    again, bound = "/again", "/bound"
    guest.sh(f"mkdir {again} {bound} && mount -t ext4 {device} {again}")
    guest.sh(f"mount -o bind {WHERE} {bound}")
    places = (WHERE, again, bound)
    (digest,) = make(guest, f"{WHERE}/f").values()
    for place in places:
        check_cached(guest, {f"{place}/f": digest})
    # A change through each of the three mounts is visible through the other two.
    for number, place in enumerate(places):
        evict(guest, [f"{WHERE}/f"])
        content = changed_content(f"{number}")
        guest.put("/tmp/new", content)
        guest.sh(f"dd if=/tmp/new of={place}/f bs=4096 conv=notrunc 2>/dev/null")
        digest = hashlib.sha256(content).hexdigest()
        for other in places:
            check_cached(guest, {f"{other}/f": digest})
    # The driver frees the pool only at the last of the three unmounts.
    held = evict(guest, [f"{WHERE}/f"])["index_pages"]
    assert held >= FILE_PAGES // 2
    guest.sh(f"umount {WHERE} && umount {bound}")
    before = stats(guest)
    assert before["index_pages"] == held
    assert checksums(guest, [f"{again}/f"]) == {f"{again}/f": digest}
    assert stats(guest)["hits"] - before["hits"] > FILE_PAGES // 2
    evict(guest, [f"{again}/f"])
    guest.sh(f"umount {again}", 60)
    before = stats(guest)
    assert before["index_pages"] == 0
    guest.mount("data", WHERE)
    assert checksums(guest, [f"{WHERE}/f"]) == {f"{WHERE}/f": digest}
    assert stats(guest)["hits"] == before["hits"]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_overlayfs_files_are_cached_and_change_with_their_layers(
    session: Session, kernel: Kernel, module: Path, kind: str
) -> None:
    """Files of overlayfs are cached as files of the file system below, and show its changes."""
    if not there(kernel, "overlay"):
        pytest.skip(f"kernel {kernel.release} has no overlayfs")
    fs = disk.find(kind)
    guest = driver_guest(
        session, kernel, module,
        fs=fs, cpus=2, modules=["overlay", *there(kernel, *fs.modules)],
        files={SPECIAL: guest_program(TESTS / "guest/special.c")},
        parameters="verify_every=1",
    )  # fmt: skip
    lower, upper, work, merged = (f"{WHERE}/{name}" for name in ("lower", "upper", "work", "all"))
    guest.sh(f"mkdir {lower} {upper} {work} {merged}")
    (digest,) = make(guest, f"{lower}/image").values()
    make(guest, f"{lower}/kept")
    guest.sh(f"mount -t overlay none -o lowerdir={lower},upperdir={upper},workdir={work} {merged}")
    image = f"{merged}/image"

    # Reads and a memory mapping of a file of the lower layer get its pages from the cache.
    check_cached(guest, {image: digest})
    evict(guest, [image])
    before = stats(guest)["hits"]
    assert guest.sh(f"{SPECIAL} map {image} | sha256sum").split()[0] == digest
    assert stats(guest)["hits"] - before > FILE_PAGES // 2

    # At the first write, overlayfs copies the file to the upper layer. Reads return the new file,
    # and the file in the lower layer is unchanged.
    for number, flags in enumerate(("notrunc", "notrunc,fsync")):
        evict(guest, [image])
        content = changed_content(f"copied up {number}")
        guest.put("/tmp/new", content)
        guest.sh(f"dd if=/tmp/new of={image} bs=4096 conv={flags} 2>/dev/null")
        check_cached(guest, {image: hashlib.sha256(content).hexdigest()})
        check_cached(guest, {f"{lower}/image": digest})

    # A direct write bypasses the page cache while pages of the file are held.
    evict(guest, [image])
    content = changed_content("direct")
    guest.put("/tmp/new", content)
    guest.sh(f"dd if=/tmp/new of={image} bs=65536 oflag=direct conv=notrunc 2>/dev/null")
    assert checksums(guest, [image]) == {image: hashlib.sha256(content).hexdigest()}

    # After truncation or removal, no old page comes back under the same name.
    evict(guest, [image])
    guest.sh(f"rm {image} && truncate -s {len(content)} {image}")
    zeroes = hashlib.sha256(bytes(len(content))).hexdigest()
    for _ in range(2):
        assert evict(guest, [image]) and checksums(guest, [image]) == {image: zeroes}

    # Operations that need a block device below, or ext4's own calls, are tested without overlayfs.
    # Direct reclaim of overlayfs inodes fails in the stock kernel: docs/upstream/kernel-faults.md.
    arguments = (
        f"--seed={seed()} --ops=2000 --files=16 --size-max=524288"
        " --no-swap --no-remount --no-direct-reclaim"
    )
    Torture(guest, arguments, where=merged).finish()
    counters = stats(guest)
    assert counters["verified_hits"] > FILE_PAGES
    assert counters["mismatches"] + counters["verify_mismatches"] == 0


# Features of an ext4 (fs/ext4/ext4.h). The driver refuses file systems with the first one.
INCOMPAT_INLINE_DATA = 0x8000
INCOMPAT_EA_INODE = 0x0400


@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_files_of_one_page_are_cached_and_follow_changes(
    session: Session, kernel: Kernel, module: Path, fs: str
) -> None:
    """Small files come from the pool, also after other bytes, a shorter and a longer version."""
    guest = driver_guest(session, kernel, module, fs=FILE_SYSTEMS[fs])
    paths = [f"{WHERE}/small{number}" for number in range(SMALL_FILES)]
    for turn, size in enumerate((100, 4096, 4095, 1, 3000)):
        sums = {}
        for path in paths:
            content = changed_content(f"{path} {turn}")[:size]
            guest.put("/tmp/new", content)
            guest.sh(f"cat /tmp/new >{path}")
            sums[path] = hashlib.sha256(content).hexdigest()
        guest.sh("sync")
        evict(guest, paths)
        before = stats(guest)["hits"]
        assert checksums(guest, paths) == sums
        assert stats(guest)["hits"] - before == SMALL_FILES
    counters = stats(guest)
    assert counters["mismatches"] + counters["verify_mismatches"] == 0


def test_mounted_file_system_does_not_get_the_feature_inline_data(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The kernel refuses to add the feature, which the driver looks up only once for each mount."""
    guest = boot(session, kernel, module)
    done = guest.run(f"{SPECIAL} feature {WHERE} {INCOMPAT_EA_INODE}")
    if b"Inappropriate ioctl" in done.stderr:
        pytest.skip("this kernel cannot change features of a mounted ext4")
    assert done.status == 0, done.stderr
    done = guest.run(f"{SPECIAL} feature {WHERE} {INCOMPAT_INLINE_DATA}")
    assert done.status != 0
    assert b"not supported" in done.stderr


@pytest.mark.smoke
def test_journalled_data_reads_no_old_byte(session: Session, kernel: Kernel, module: Path) -> None:
    """A clean page of a file with data in the journal may be newer than its block."""
    guest = boot(session, kernel, module)
    # chattr +j works for a single file only if the file system has no delayed allocation.
    guest.sh(f"umount {WHERE}", 60)
    guest.mount("data", WHERE, "ext4", "nodelalloc")
    path = f"{WHERE}/f"
    sums = make(guest, path)
    wait_mounts(guest)
    check_cached(guest, sums)
    evict(guest, [path])
    guest.sh(f"{SPECIAL} journal {path}")
    check_right(guest, sums)
    sums = {path: overwrite(guest, path)}
    check_right(guest, sums)
    sums |= make(guest, f"{WHERE}/other")
    check_cached(guest, sums)
    guest.sh(f"umount {WHERE}", 60)
    guest.mount("data", WHERE, "ext4", "data=journal")
    check_right(guest, sums)
    sums |= make(guest, f"{WHERE}/third")
    wait_mounts(guest)
    evict(guest, list(sums))
    for changed in (path, f"{WHERE}/third"):
        sums[changed] = overwrite(guest, changed)
        check_right(guest, sums)
    # At the unmount, the journal is written to the blocks of the files.
    guest.sh(f"umount {WHERE}", 60)
    guest.mount("data", WHERE)
    check_right(guest, sums)


def test_pages_with_failed_writeback_are_not_put(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Pages whose writeback failed are not put: they are clean, but differ from the disk."""
    guest = boot(session, kernel, module, modules=["loop"])
    # The image of this disk is a sparse file on a file system that becomes full, so writes to new
    # blocks of the disk fail.
    guest.sh("mkdir /narrow /inner && mount -t tmpfs -o size=32m none /narrow")
    guest.sh("truncate -s 64M /narrow/image && losetup /dev/loop0 /narrow/image")
    guest.sh("mke2fs -q -b 4096 /dev/loop0 && mount -t ext4 /dev/loop0 /inner", 60)
    path = "/inner/f"
    sums = make(guest, path)
    wait_mounts(guest)
    check_cached(guest, sums)
    held = evict(guest, [path])["index_pages"]
    assert held >= FILE_PAGES // 2
    session.expect_trouble()  # metadata may be lost, too, which ext4 reports as an error
    guest.sh("dd if=/dev/zero of=/narrow/fill bs=64k 2>/dev/null; true", 60)
    before = stats(guest)
    guest.put("/tmp/new", changed_content("new"))
    guest.sh(f"dd if=/tmp/new of={path} bs=4096 seek=4096 conv=notrunc 2>/dev/null; sync", 60)
    assert "I/O error" in guest.sh("dmesg")
    guest.sh(f"cat {path} >/dev/null; echo 1 >/proc/sys/vm/drop_caches", 60)
    after = stats(guest)
    assert kept_pages(after) == kept_pages(before)
    assert after["index_pages"] <= held - FILE_PAGES // 2
    # Files that were written before still have right contents, which now come from the disk.
    old = guest.sh(f"dd if={path} bs=4096 count={FILE_PAGES} 2>/dev/null | sha256sum").split()[0]
    assert old == sums[path]
    assert stats(guest)["hits"] == after["hits"]
