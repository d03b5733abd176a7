# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Driver, QEMU and daemon together return evicted pages with right bytes.

The first tests read evicted files. The other tests cause events of the guest, the VM, the module
and the daemon. The tests compare contents with the files that the host created. If a disk changed
while the driver could not see it, reads must return the disk's contents.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver import (
    DEADLINE_MS,
    MODULE,
    Torture,
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
    wait_state,
)

from harness import disk, qcow2
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import scaled

if TYPE_CHECKING:
    from shared_fixtures import Tree

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

FILES = 24
FILE_BYTES = 512 << 10  # 128 pages, so that a file fits into the put ring
# Number of sectors with inodes, extents, bitmaps and directories that a file system may read in
# addition to contents.
METADATA_SECTORS = 512
# Time in seconds after which a read counts as hung, even on a slow machine.
HANG_SECONDS = 20.0


def make_tree(directory: Path, generator: random.Random) -> dict[str, str]:
    """Creates files whose contents are half noise, half text.

    Returns the SHA-256 of each file by its path in the guest.
    """
    directory.mkdir()
    sums = {}
    for number in range(FILES):
        noise = generator.randbytes(FILE_BYTES // 2)
        text = b"".join(b"%016x line of file %d\n" % (i, number) for i in range(FILE_BYTES // 32))
        content = (noise + text)[: FILE_BYTES - number]  # the files end at different offsets
        (directory / f"f{number:02}").write_bytes(content)
        sums[f"/mnt/f{number:02}"] = hashlib.sha256(content).hexdigest()
    return sums


def tree_disk(session: Session, name: str = "data") -> tuple[Disk, dict[str, str]]:
    """Returns a disk with the files of make_tree(), and their SHA-256.

    Two disks with the same `name` have equal files.
    """
    directory = session.directory / f"tree-{name}"
    sums = make_tree(directory, random.Random(name))
    return Disk("data", disk.ext4(session.directory / f"{name}.img", 64 * MIB, directory)), sums


def changed_content(path: str) -> bytes:
    return hashlib.shake_128(path.encode()).digest(FILE_BYTES)


def overwrite(guest: Guest, path: str) -> str:
    """Overwrites a file in place, without new blocks; returns the sha256 of the new contents."""
    content = changed_content(path)
    guest.put("/tmp/new", content)
    guest.sh(f"dd if=/tmp/new of={path} bs=4096 conv=notrunc,fsync 2>/dev/null && rm /tmp/new", 60)
    return hashlib.sha256(content).hexdigest()


def read_sectors(guest: Guest) -> int:
    return guest.disk_stat("data").read_sectors


@pytest.mark.smoke
def test_evicted_files_are_read_back_from_the_pool(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    guest = driver_guest(session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data])

    before = evict(guest, list(sums))
    pages = sum(-(-(FILE_BYTES - number) // 4096) for number in range(FILES))
    assert before["index_pages"] >= pages * 9 // 10, (
        "fewer than 90 % of the evicted pages are in the index"
    )
    held = before["index_pages"]
    assert daemon.stats()["pool"]["pages"] >= held

    sectors = read_sectors(guest)
    assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert after["hits"] - before["hits"] >= held * 9 // 10
    missed = pages - (after["hits"] - before["hits"])
    assert read_sectors(guest) - sectors <= METADATA_SECTORS + missed * 8
    assert missed <= pages // 10
    assert after["misses_check"] + after["misses_answer"] == 0
    # A get takes the page out of the pool, because the guest has the page again. Hits in the
    # guest's own put ring do not reach the pool.
    taken = after["requests_get"] and after["hits"] - after["ring_hits"]
    assert taken > 0
    assert daemon.stats()["pool"]["pages"] <= held - taken + pages // 10


@pytest.mark.parametrize("shared", [True, False], ids=["one-domain", "own-domains"])
def test_equal_files_are_stored_once_per_trust_domain(
    session: Session, kernel: Kernel, module: Path, shared: bool
) -> None:
    domain = "trusting" if shared else None
    daemon = start_daemon(session, Tenant("vm1", domain), Tenant("vm2", domain))
    data, sums = tree_disk(session)
    held = {}
    guests = {}
    for name in ("vm1", "vm2"):
        vm = driver_vm(
            session,
            kernel,
            module,
            Tmem(daemon.socket(name)),
            name=name,
            disks=[Disk("data", data.path, read_only=True)],
            memory_bytes=192 * MIB,
        )
        guests[name] = vm.start()
        guests[name].sh("mkdir -p /mnt && mount -t ext4 -o ro,noload /dev/vda /mnt", 60)
        guests[name].insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
        wait_state(guests[name], "on")
        held[name] = evict(guests[name], list(sums))["index_pages"]
        assert held[name] > 0

    pool = daemon.stats()["pool"]
    total = held["vm1"] + held["vm2"]
    assert pool["pages"] >= total
    different = pool["blobs"] + pool["same_filled_pages"]
    if shared:
        # The pool has one copy of each page that both guests have put. Pages that only one of the
        # guests has put add to the number of copies.
        assert different <= total - min(held.values()) * 9 // 10
    else:
        assert different >= total
        assert pool["shared_pages"] == 0
    for guest in guests.values():
        assert checksums(guest, list(sums)) == sums
        assert stats(guest)["hits"] > 0


def test_cache_survives_a_pause_but_no_module_reload_or_reboot(tree: Tree) -> None:
    daemon, vm, guest, sums = tree.daemon, tree.vm, tree.guest, tree.sums
    first, second, *_ = files = list(sums)
    held = evict(guest, files)["index_pages"]

    vm.pause()
    vm.resume()
    sectors = read_sectors(guest)
    assert checksums(guest, files[:12]) == {path: sums[path] for path in files[:12]}
    kept = stats(guest)
    assert kept["hits"] >= held // 3
    assert kept["generation_changes"] == 1
    assert read_sectors(guest) - sectors <= METADATA_SECTORS

    # While the module is unloaded, the file is overwritten. The module must find no page from
    # before when it is loaded again.
    evict(guest, files)
    guest.sh("rmmod virtio_tmem", 60)
    sums[first] = overwrite(guest, first)
    guest.drop_caches()
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
    wait_state(guest, "on")
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] == 0

    # The guest reboots and overwrites files before it loads the driver. The driver must find no
    # page from before the reboot.
    evict(guest, files)
    guest = vm.reboot()
    guest.mount("data", "/mnt")
    sums[second] = overwrite(guest, second)
    guest.drop_caches()
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
    wait_state(guest, "on")
    assert daemon.stats()["pool"]["pages"] == 0
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] == 0
    evict(guest, files)
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] > 0


def test_vm_loaded_from_a_snapshot_reads_the_disk_of_the_snapshot(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = start_daemon(session)
    image = qcow2.create(session.directory / "data.qcow2", 128 * MIB)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[Disk("data", image, format="qcow2")],
        memory_bytes=192 * MIB,
    )
    guest = vm.start()
    guest.sh("mke2fs -q -b 4096 /dev/vda", 60)
    load(guest, "verify_every=0")
    old = b"".join(b"old %27d\n" % i for i in range(FILE_BYTES // 32))
    guest.put("/mnt/f", old)
    was = hashlib.sha256(old).hexdigest()
    assert evict(guest, ["/mnt/f"])["index_pages"] > 100
    vm.save("before")

    new = overwrite(guest, "/mnt/f")
    assert evict(guest, ["/mnt/f"])["index_pages"] > 100
    assert checksums(guest, ["/mnt/f"]) == {"/mnt/f": new}
    assert stats(guest)["hits"] > 100
    evict(guest, ["/mnt/f"])

    # The index of the restored guest has entries for the old pages, but the pool has the new pages.
    guest = vm.load("before")
    assert checksums(guest, ["/mnt/f"]) == {"/mnt/f": was}
    wait_state(guest, "on")
    assert stats(guest)["hits"] == 0
    assert evict(guest, ["/mnt/f"])["index_pages"] > 100
    assert checksums(guest, ["/mnt/f"]) == {"/mnt/f": was}
    assert stats(guest)["hits"] > 100


def restart_at_random(daemon: Daemon, torture: Torture, generator: random.Random) -> int:
    """Kills and restarts the daemon at random moments until the torture program has ended.

    Returns the number of kills.
    """
    kills = 0
    while not torture.job.done():
        time.sleep(generator.uniform(0.05, 2.5))  # the test acts at random moments
        daemon.kill()
        time.sleep(generator.uniform(0, 0.5))
        daemon.start()
        kills += 1
    return kills


@pytest.mark.smoke
def test_killed_daemon_causes_no_wrong_byte_under_torture(
    session: Session, kernel: Kernel, module: Path
) -> None:
    number = seed()
    daemon = start_daemon(session)
    guest = driver_guest(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=2)
    torture = Torture(
        guest, f"--seed={number} --ops=8000 --jobs=2 --files=16 --size-max=524288", 600
    )
    kills = restart_at_random(daemon, torture, random.Random(number))
    numbers = torture.finish()
    counters = stats(guest)
    print(f"the daemon was killed {kills} times", counters)
    assert kills >= 3
    assert numbers["longest_read_us"] < scaled(HANG_SECONDS) * 1e6
    assert counters["mismatches"] == 0
    assert counters["generation_changes"] > 1
    assert counters["hits"] > 0
    # The cache works again after the last restart of the daemon.
    wait_state(guest, "on")
    before = stats(guest)["hits"]
    Torture(guest, "--scenario=plain").finish()
    assert stats(guest)["hits"] > before


@pytest.mark.smoke
def test_hung_daemon_opens_the_breaker(tree: Tree) -> None:
    """If the daemon hangs, gets are misses and the breaker opens. It closes when answers return."""
    daemon, guest, sums = tree.daemon, tree.guest, tree.sums
    files = list(sums)
    evict(guest, files)

    wait_state(guest, "on")
    daemon.pause()
    sectors = read_sectors(guest)
    assert checksums(guest, files[:12]) == {path: sums[path] for path in files[:12]}
    assert read_sectors(guest) > sectors, (
        "nothing was read from the disk while the daemon was stopped"
    )
    counters = stats(guest)
    # The breaker opens after three readers have waited until the deadline, and then no reader
    # waits. The readahead of one reader may send several requests at once.
    assert 3 <= counters["late"] <= 3 * 4
    assert counters["trips"] == 1
    assert counters["hits"] == 0
    assert state(guest) == "tripped"
    # The guest overwrites a file of which the daemon still holds old pages. Reads must return the
    # new contents.
    changed = files[-1]
    sums[changed] = overwrite(guest, changed)
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    late = stats(guest)["late"]
    assert checksums(guest, files) == sums, "a file has wrong contents while the breaker is open"
    assert stats(guest)["late"] <= late + 1, "more than one get was late while the breaker was open"

    daemon.resume()
    wait_state(guest, "on")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    assert checksums(guest, files) == sums
    before = stats(guest)
    assert before["mismatches"] == 0
    evict(guest, files[:4])
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] > before["hits"]


def test_driver_starts_when_a_daemon_appears(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Without a daemon the driver reports that it waits. It starts when a daemon connects."""
    daemon = session.daemon("vm1")
    data, sums = tree_disk(session)
    vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0", online=False)
    files = list(sums)[:6]
    assert state(guest).startswith("offline: ")
    for _ in range(2):
        guest.sh(f"cat {' '.join(files)} >/dev/null; echo 1 >/proc/sys/vm/drop_caches")
    assert stats(guest)["puts"] == 0
    daemon.start()
    wait_state(guest, "on")
    evict(guest, files)
    assert checksums(guest, files) == {path: sums[path] for path in files}
    assert stats(guest)["hits"] > 0


def patch_module(module: Path, session: Session, old: bytes, new: bytes) -> Path:
    """Returns a copy of the module file in which the string `old` is replaced by `new`."""
    content = module.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    path = session.directory / "patched.ko"
    path.write_bytes(content.replace(old, new))
    return path


def test_unknown_kernel_gets_no_cache(session: Session, kernel: Kernel, module: Path) -> None:
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    stranger = patch_module(module, session, b"\0Debian\0", b"\0Nobody\0")
    vm = driver_vm(session, kernel, stranger, Tmem(daemon.socket("vm1")), disks=[data])
    guest = vm.start()
    load(guest, online=False)
    files = list(sums)[:6]
    said = state(guest)
    assert said.startswith("off: ")
    assert kernel.release in said
    assert "allow_untested=1" in said
    assert said in guest.sh("dmesg").replace("virtio_tmem: ", ""), (
        "the kernel log lacks the reason that `state` gives"
    )
    guest.sh(f"cat {' '.join(files)} >/dev/null; echo 1 >/proc/sys/vm/drop_caches")
    assert checksums(guest, files) == {path: sums[path] for path in files}
    assert stats(guest)["puts"] == 0

    guest.sh("rmmod virtio_tmem", 60)
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} allow_untested=1")
    wait_state(guest, "on")
    evict(guest, files)
    assert stats(guest)["puts"] > 0


def test_virtio_f_in_order_is_negotiated_if_the_kernel_supports_it(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The device offers VIRTIO_F_IN_ORDER, and kernels that support this feature accept it."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), properties={"in_order": "on"})
    guest = driver_guest(session, kernel, module, tmem, cpus=2)
    bits = guest.sh("cat /sys/bus/virtio/drivers/virtio_tmem/virtio*/features").strip()
    print("features", bits)
    # The file has one character for each feature bit. VERSION_1 (32) is accepted, packed rings (34)
    # are not.
    assert (bits[32], bits[34]) == ("1", "0")
    Torture(guest, "--scenario=plain").finish()
    counters = stats(guest)
    assert counters["hits"] > 0
    assert counters["mismatches"] == 0


def test_unserved_file_systems_are_not_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Files of tmpfs are not cached."""
    daemon = start_daemon(session)
    data, _ = tree_disk(session)
    guest = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data]).start()
    load(guest, "verify_every=0")
    guest.sh("mkdir /ram && mount -t tmpfs none /ram")
    settle(guest)
    before = kept_pages(stats(guest))
    content = changed_content("ram")
    guest.put("/ram/f", content)
    for _ in range(2):
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
        found = checksums(guest, ["/ram/f"])["/ram/f"]
        assert found == hashlib.sha256(content).hexdigest()
    guest.sh("umount /ram")
    # The guest's commands are files of other file systems, so reading them causes no put. Only
    # pages of /mnt may have been put.
    assert kept_pages(stats(guest)) == before
    assert stats(guest)["hits"] == 0


def test_drop_caches_empties_the_pool_only_with_drop_caches_flush(tree: Tree) -> None:
    """drop_caches puts evicted pages. With drop_caches_flush, values 2 and 3 empty the pool."""
    guest, sums = tree.guest, tree.sums
    files = list(sums)[:4]
    held = evict(guest, files)["index_pages"]
    assert held > 100
    # The pool keeps pages of a file whose inode the kernel has removed from memory.
    inodes = set(guest.sh(f"stat -c %i {' '.join(files)}").split())
    trace = "/sys/kernel/tracing"
    guest.sh(f"echo 1 >{trace}/events/ext4/ext4_evict_inode/enable")
    # The kernel evicts an inode that was used recently only at a later write to drop_caches.
    guest.sh("for i in 1 2 3 4; do echo 2 >/proc/sys/vm/drop_caches; done")
    log = guest.get(f"{trace}/trace").decode()
    assert inodes <= set(re.findall(r"ext4_evict_inode: dev \S+ ino (\d+)", log))
    before = stats(guest)
    assert before["index_pages"] >= held
    assert checksums(guest, files) == {path: sums[path] for path in files}
    assert stats(guest)["hits"] - before["hits"] >= held * 9 // 10
    held = evict(guest, files)["index_pages"]
    set_parameter(guest, "drop_caches_flush", "1")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    assert stats(guest)["index_pages"] >= held
    guest.sh("echo 3 >/proc/sys/vm/drop_caches")
    before = stats(guest)
    assert before["index_pages"] == 0
    assert checksums(guest, files) == {path: sums[path] for path in files}
    assert stats(guest)["hits"] == before["hits"]
