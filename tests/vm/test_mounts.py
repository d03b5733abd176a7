# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests switches and counters of single mounts in sysfs, and read-only and remounted mounts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from driver import (
    DISK_BYTES,
    PATIENT,
    SYSFS,
    TORTURE,
    WHERE,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    kept_pages,
    load,
    seed,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_served,
    wait_state,
)
from test_driver import FILE_BYTES, changed_content, overwrite, tree_disk
from test_files import FILE_PAGES, SPECIAL, check_cached

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import ROOT, TESTS, guest_program
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

OTHER = "/other"
FILES_LISTED = ROOT / "guest-driver/sysfs.md"
STARTS_SECONDS = 30.0
FILES = 4
# Number of files that are used as swap files, one after another.
SWAP_FILES = 8
# TMEM_FS_MAX of the driver. Further mounts are not served.
MOUNTS_MAX = 64
# Size of the images of file systems that the test mounts only to reach the limit of mounts.
LOOP_BYTES = 4 * MIB
# The smallest swap file that mkswap accepts has 10 pages; files of one page are not cached.
SWAP_BYTES = 64 << 10


class Mount:
    """A mount's directory in sysfs."""

    def __init__(self, guest: Guest, where: str) -> None:
        self.guest = guest
        device = guest.sh(f"awk '$5 == \"{where}\" {{ print $3 }}' /proc/self/mountinfo").strip()
        self.path = f"{SYSFS}/mounts/{device}"

    def read(self, name: str) -> str:
        return self.guest.read(f"{self.path}/{name}")

    def count(self, name: str) -> int:
        return int(self.read(name))

    def counts(self) -> dict[str, int]:
        return {name: self.count(name) for name in ("puts", "gets", "hits", "held_pages")}

    def switch(self, on: bool) -> None:
        self.guest.sh(f"echo {int(on)} >{self.path}/enabled")
        assert self.count("enabled") == on
        if not on:
            assert self.read("state") == "off"

    def wait(self, state_begins: str = "on") -> None:
        def found() -> bool:
            return self.read("state").startswith(state_begins)

        until(found, STARTS_SECONDS, f"{self.path} begins with '{state_begins}'")


def boot(session: Session, kernel: Kernel, module: Path, **more: Disk) -> Guest:
    """Boots a guest with an ext4 at /mnt. Each disk of `more` is mounted at its name."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    guest = driver_guest(
        session,
        kernel,
        module,
        cpus=2,
        disks=[Disk("data", image), *more.values()],
        files={SPECIAL: guest_program(TESTS / "guest/special.c")},
    )
    for name in more:
        guest.mount(name, f"/{name}")
    return guest


def made_content(path: str) -> bytes:
    """Returns the contents of the file that make() creates at `path`."""
    return changed_content(f"made {path}")


def make(guest: Guest, where: str) -> dict[str, str]:
    """Creates a few files; returns their sha256."""
    sums = {}
    for number in range(FILES):
        path = f"{where}/made{number}"
        content = made_content(path)
        guest.put(path, content)
        sums[path] = hashlib.sha256(content).hexdigest()
    guest.sh("sync")
    return sums


@pytest.mark.parametrize("fault", ["disk", "retained"])
def test_wrong_page_blocks_only_its_mount(
    session: Session, kernel: Kernel, test_module: Path, fault: str
) -> None:
    """A page that differs from the disk, or changed while it was retained, stops one mount only.

    Another mount is still cached, and the driver stays on. The mount is served again after it was
    unmounted.
    """
    daemon = start_daemon(session)
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(daemon.socket("vm1"), properties={"retain": "on"}),
        cpus=2,
        disks=[
            Disk("data", disk.ext4(session.directory / "data.img", DISK_BYTES)),
            Disk("other", disk.ext4(session.directory / "other.img", 64 * MIB)),
        ],
        files={SPECIAL: guest_program(TESTS / "guest/special.c")},
        parameters=f"{PATIENT} verify_every=0",
    )
    guest.mount("other", OTHER)
    session.expect_trouble()
    here, there = make(guest, WHERE), make(guest, OTHER)
    mount, beside = Mount(guest, WHERE), Mount(guest, OTHER)
    beside.wait()
    # The first eviction is of all files at once, which do not fit the put ring.
    for _ in range(2):
        evict(guest, [*here, *there])
    if fault == "disk":
        reason = "a page from the host differs from the disk"
        device, path = guest.disk("data"), next(iter(here))
        block = guest.sh(f"{SPECIAL} block {path} {FILE_PAGES // 2}").strip()
        # Without this check, the write does not erase the entry of the block.
        set_parameter(guest, "test_blocks_without", "forget")
        guest.sh(
            f"dd if=/dev/urandom of=/dev/{device} bs=4096 seek={block} count=1"
            " conv=notrunc oflag=direct 2>/dev/null"
        )
        set_parameter(guest, "test_blocks_without", "")
        set_parameter(guest, "verify_every", "1")
        guest.sh(f"cat {path} >/dev/null")
    else:
        reason = "a clean page changed while the host kept it"
        assert checksums(guest, list(here)) == here
        set_parameter(guest, "inject_retained_changed", "1")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        set_parameter(guest, "inject_retained_changed", "0")

    mount.wait(f"blocked: {reason}, block ")
    assert re.search(r"block \d+; check the file system and mount it again$", mount.read("state"))
    note = f"on: {mount.path.rpartition('/')[2]} is {mount.read('state')}"
    until(lambda: state(guest) == note, STARTS_SECONDS, f"the driver's state is '{note}'")
    until(lambda: mount.count("held_pages") == 0, STARTS_SECONDS, "the pool is emptied")
    assert f"{guest.disk('data')}: a page was wrong ({reason}" in guest.sh("dmesg")
    assert beside.read("state") == "on" and beside.count("held_pages") > 0
    counters = stats(guest)
    found = "verify_mismatches" if fault == "disk" else "retained_changed"
    assert counters["mismatches"] == counters[found] > 0

    # The mount takes no puts and gets, and the other mount goes on.
    before = mount.counts()
    for _ in range(2):
        evict(guest, list(here))
        guest.sh(f"for f in {WHERE}/made*; do {SPECIAL} same $f || exit 1; done")
    assert mount.counts() == before
    check_cached(guest, there)

    def reported() -> bool:
        driver = daemon.stats()["vms"][0]["driver"]
        return bool(driver["state"] == "on" and driver["mismatches"] > 0)

    until(reported, STARTS_SECONDS, "tmemd reports the mismatch")
    guest.sh(f"umount {WHERE}", 60)
    assert state(guest) == "on"
    guest.mount("data", WHERE)
    wait_served(guest)
    check_cached(guest, make(guest, WHERE))


def test_switched_off_mount_is_not_cached(session: Session, kernel: Kernel, module: Path) -> None:
    other = disk.ext4(session.directory / "other.img", 64 * MIB)
    guest = boot(session, kernel, module, other=Disk("other", other))
    here, there = make(guest, WHERE), make(guest, OTHER)
    both = [*here, *there]
    evict(guest, both)
    mount, beside = Mount(guest, WHERE), Mount(guest, OTHER)
    mount.wait()
    beside.wait()
    evict(guest, both)
    listed = set(guest.sh(f"ls {mount.path}").split())
    assert listed == set(re.findall(r"`mounts/<major:minor>/(\w+)`", FILES_LISTED.read_text()))

    held, held_beside = mount.count("held_pages"), beside.count("held_pages")
    assert min(held, held_beside) > FILES * FILE_PAGES // 2
    assert stats(guest)["index_pages"] == held + held_beside

    mount.switch(False)
    assert mount.count("held_pages") == 0, (
        "the driver still holds pages of the mount after it was switched off"
    )
    assert beside.count("held_pages") == held_beside
    counters = stats(guest)
    assert counters["index_pages"] == held_beside
    assert counters["invalidations_off"] >= held
    before, before_beside = mount.counts(), beside.counts()
    # Overwrite a file while its mount is switched off. If the driver had kept pages of the file,
    # they would be wrong.
    changed = next(iter(here))
    here[changed] = overwrite(guest, changed)
    for _ in range(2):
        assert checksums(guest, both) == {**here, **there}
        evict(guest, both)
    assert mount.counts() == before
    after_beside = beside.counts()
    for name in ("puts", "gets", "hits"):
        assert after_beside[name] > before_beside[name]

    mount.switch(True)
    mount.wait()
    assert mount.count("held_pages") == 0
    assert checksums(guest, list(here)) == here
    assert mount.counts() == before, "the first reads after the switch to on did put or get pages"
    check_cached(guest, here)
    after = mount.counts()
    assert after["hits"] - before["hits"] > FILES * FILE_PAGES // 2
    assert after["gets"] >= after["hits"]
    wait_state(guest, "on")


def test_switched_off_file_system_type_is_not_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    other = disk.ext4(session.directory / "other.img", 64 * MIB)
    guest = boot(session, kernel, module, other=Disk("other", other))
    sums = {**make(guest, WHERE), **make(guest, OTHER)}
    evict(guest, list(sums))
    types = guest.sh(f"ls {SYSFS}/fs").split()
    assert {"ext4", "xfs", *(fs.kind for fs in disk.OTHER_FILE_SYSTEMS.values())} <= set(types)
    assert stats(guest)["index_pages"] > 0

    guest.sh(f"echo 0 >{SYSFS}/fs/ext4/enabled")
    assert guest.read(f"{SYSFS}/fs/ext4/enabled") == "0"
    assert stats(guest)["index_pages"] == 0
    # The type's switch also applies to later mounts.
    guest.sh(f"umount {OTHER}")
    guest.mount("other", OTHER)
    settle(guest)
    before = stats(guest)
    for _ in range(2):
        assert checksums(guest, list(sums)) == sums
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    after = stats(guest)
    assert (kept_pages(after), after["hits"]) == (kept_pages(before), before["hits"])
    mounts = Mount(guest, WHERE), Mount(guest, OTHER)
    assert [mount.read("state") for mount in mounts] == ["off", "off"]

    # A mount that was itself switched off stays off when its type is switched on again.
    mounts[1].switch(False)
    guest.sh(f"echo 1 >{SYSFS}/fs/ext4/enabled")
    mounts[0].wait()
    assert mounts[1].read("state") == "off"
    here = {path: digest for path, digest in sums.items() if path.startswith(WHERE)}
    check_cached(guest, here)
    assert mounts[1].counts() == {"puts": 0, "gets": 0, "hits": 0, "held_pages": 0}
    refused = guest.run(f"echo maybe >{SYSFS}/fs/ext4/enabled")
    assert refused.status != 0


def test_open_sysfs_files_survive_unmount_and_unload(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Sysfs files may be open, being read or being written to at unmount and at module unload."""
    other = disk.ext4(session.directory / "other.img", 64 * MIB)
    guest = boot(session, kernel, module, other=Disk("other", other))
    sums = make(guest, OTHER)
    evict(guest, list(sums))
    path, kept = Mount(guest, OTHER).path, Mount(guest, WHERE).path
    # A guest shell opens two sysfs files and reads the first one. After the unmount has removed
    # both, a read of the second one fails.
    guest.sh(
        f'exec 3<{path}/state 4<{path}/puts && read -r said <&3 && [ "$said" = on ]'
        f" && umount {OTHER} && ! [ -e {path} ] && ! cat <&4 2>/dev/null",
        60,
    )
    busy = guest.start(
        f"while ! [ -e /tmp/stop ]; do for f in {SYSFS}/mounts/*/*; do cat $f; echo 0 >$f;"
        " echo 1 >$f; done >/dev/null 2>&1; done",
        300,
    )
    for _ in range(6):
        guest.mount("other", OTHER)
        guest.sh(f"cat {OTHER}/made* >/dev/null && echo 1 >/proc/sys/vm/drop_caches")
        guest.sh(f"umount {OTHER}", 60)
    guest.sh(f"exec 3<{kept}/hits && rmmod virtio_tmem && ! cat <&3 2>/dev/null", 120)
    guest.sh("touch /tmp/stop")
    busy.wait()
    guest.mount("other", OTHER)
    assert checksums(guest, list(sums)) == sums


def test_switching_a_mount_under_torture_causes_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    number = seed()
    guest = boot(session, kernel, module)
    evict(guest, list(make(guest, WHERE)))
    mount = Mount(guest, WHERE)
    mount.wait()
    guest.sh(f"rm {WHERE}/made*")
    job = guest.start(
        f"{TORTURE} --seed={number} --ops=12000 --jobs=2 --files=16 --size-max=524288 {WHERE}", 600
    )
    turns = 0
    while not job.done():
        guest.sh(f"echo {turns % 2} >{mount.path}/enabled")
        turns += 1
    done = job.wait()
    assert done.status == 0, (done.text[-4000:], stats(guest))
    counters = stats(guest)
    print(turns, counters)
    assert turns > 4
    assert counters["invalidations_off"] > 0
    assert counters["hits"] > 0
    assert counters["mismatches"] == 0
    mount.switch(False)
    mount.switch(True)
    mount.wait()
    check_cached(guest, make(guest, WHERE))


def test_swap_files_and_exchanged_blocks_leave_other_files_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Swap files and files with exchanged blocks read right bytes, and other files stay cached."""
    guest = boot(session, kernel, module)
    new, old = f"{WHERE}/new", f"{WHERE}/old"
    sums = make(guest, WHERE)
    for path in (new, old):
        guest.put(path, changed_content(path))
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    mount = Mount(guest, WHERE)
    swap_to(guest, [f"{WHERE}/swap{number}" for number in range(SWAP_FILES)])
    right = exchange(guest, new, old)
    assert mount.read("state") == "on"
    # The page cache has old pages of the second file, whose blocks were exchanged. If the driver
    # puts these pages at their eviction, the next read returns old bytes.
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    assert checksums(guest, list(right)) == right
    check_cached(guest, sums)


def test_pages_cached_before_their_mount_is_served_are_not_put(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver puts no page that was cached before it knew the mount.

    At first the mount exceeds the limit of served mounts. The driver serves it after another mount
    is unmounted. No hook saw the earlier changes of its files.
    """
    last, swapped, new, donor = "/last", "/last/swapped", "/last/new", "/last/donor"
    image = disk.ext4(session.directory / "last.img", 64 * MIB)
    guest = driver_guest(
        session,
        kernel,
        module,
        cpus=2,
        modules=["loop"],
        disks=[
            Disk("data", disk.ext4(session.directory / "data.img", DISK_BYTES)),
            Disk("last", image),
        ],
        files={SPECIAL: guest_program(TESTS / "guest/special.c")},
    )
    # Mount file systems until the driver serves its maximum, which includes the one at WHERE.
    guest.sh(
        "mkdir /loops && mount -t tmpfs none /loops && cd /loops"
        f" && for i in $(seq {MOUNTS_MAX - 1}); do truncate -s {LOOP_BYTES} i$i && mkdir m$i"
        " && d=$(losetup -f) && losetup $d i$i && mke2fs $d && mount -t ext4 $d m$i || exit 1;"
        " done >/dev/null",
        300,
    )
    guest.mount("last", last)
    mount = Mount(guest, last)
    for path in (swapped, new, donor):
        guest.put(path, changed_content(path))
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    assert guest.run(f"[ -e {mount.path} ]").status != 0, (
        "the driver serves a mount beyond the limit"
    )

    # Change files below the page cache while their pages are cached: by using a file as swap, and
    # by exchanging the blocks of two files.
    guest.sh(f"mkswap {swapped} >/dev/null && sync && cat {swapped} >/dev/null")
    guest.sh(f"swapon {swapped} && {SPECIAL} swap-out {FILE_BYTES // 2} && swapoff {swapped}", 120)
    right = exchange(guest, new, donor)

    guest.sh("umount /loops/m1", 60)

    def known() -> bool:
        guest.sh(f"echo x >{last}/x && sync && rm {last}/x")
        return guest.run(f"[ -e {mount.path} ]").status == 0 and mount.read("state") == "on"

    until(known, STARTS_SECONDS, "the driver serves the last mount")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    assert checksums(guest, list(right)) == right
    guest.sh(f"{SPECIAL} same {swapped}")
    check_cached(guest, make(guest, last))


def swap_to(guest: Guest, paths: list[str]) -> None:
    """Creates files and uses each as swap file for a moment."""
    guest.sh(
        f"for f in {' '.join(paths)}; do dd if=/dev/zero of=$f bs={SWAP_BYTES} count=1 2>/dev/null"
        " && mkswap $f >/dev/null && swapon $f && swapoff $f || exit 1; done",
        120,
    )


def exchange(guest: Guest, new: str, donor: str) -> dict[str, str]:
    """Exchanges the blocks of two files while pages of `donor` are cached.

    The cached pages stay as they were. The blocks that `donor` gets are marked as unwritten.
    Returns the SHA-256 of each file as the disk has it.
    """
    assert int(guest.sh(f"cat {donor} | wc -c")) == FILE_BYTES
    guest.sh(f"{SPECIAL} move-ext {new} {donor}")
    right = {new: changed_content(new), donor: bytes(FILE_BYTES)}
    return {path: hashlib.sha256(content).hexdigest() for path, content in right.items()}


def test_files_changed_while_their_mount_is_switched_off_read_right_bytes(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Blocks are exchanged before the mount is switched off, and until it is switched on."""
    guest = boot(session, kernel, module)
    mount = Mount(guest, WHERE)
    exchanged = [f"{WHERE}/exchanged{number}" for number in range(4)]
    for path in exchanged:
        guest.put(path, changed_content(path))
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    sums = exchange(guest, *exchanged[:2])
    old = [f"{WHERE}/old{number}" for number in range(SWAP_FILES)]
    swap_to(guest, old)
    mount.switch(False)
    guest.sh(f"rm {' '.join(old)}")
    sums |= exchange(guest, *exchanged[2:])
    mount.switch(True)
    mount.wait()
    # The page cache has old pages of exchanged files. If the driver puts them at their eviction,
    # the next read returns old bytes.
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    assert checksums(guest, list(sums)) == sums
    assert mount.read("state") == "on"


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_read_only_and_remounted_mounts_are_cached(
    session: Session, kernel: Kernel, module: Path, kind: str
) -> None:
    """A read-only mount is cached, and reads are right after remounts to rw and back to ro."""
    daemon = start_daemon(session)
    if kind == "ext4":
        data, _ = tree_disk(session)
    else:
        data = Disk("data", disk.xfs(session.directory / "data.img", DISK_BYTES))
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[data],
        modules=["xfs"] if kind == "xfs" else [],
    )
    guest = vm.start()
    guest.mount("data", WHERE, kind)
    guest.sh(f"rm -rf {WHERE}/f*")
    sums = make(guest, WHERE)
    guest.sh(f"umount {WHERE}")
    fs = disk.FileSystem(kind, mount_options="ro")
    load(guest, "verify_every=0", online=False, fs=fs)

    def puts() -> int:
        return evict(guest, list(sums))["puts"]

    until(lambda: puts() > 0, STARTS_SECONDS, "a read-only mount is served")
    mount = Mount(guest, WHERE)
    guest.sh(f"! touch {WHERE}/refused 2>/dev/null")
    check_cached(guest, sums)
    assert mount.count("hits") > 0

    evict(guest, list(sums))
    guest.sh(f"mount -o remount,rw {WHERE}")
    cut, gone, *changed = list(sums)
    for path in changed:
        sums[path] = overwrite(guest, path)
    guest.sh(f"truncate -s 10000 {cut} && rm {gone}")
    sums[cut] = hashlib.sha256(made_content(cut)[:10000]).hexdigest()
    sums.pop(gone)
    before = mount.count("puts")
    evict(guest, changed)
    assert mount.count("puts") > before
    guest.sh(f"sync && mount -o remount,ro {WHERE}")
    assert checksums(guest, list(sums)) == sums
    check_cached(guest, {path: sums[path] for path in changed})
    assert mount.read("state") == "on"
    assert stats(guest)["mismatches"] == 0
