# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Reverts memory, disk or both to an earlier state while the pool has later pages.

A guest must never read a page that is newer than its disk. test_driver.py and test_snapshot.py
cover savevm and loadvm; test_libvirt.py covers managed saves and reverts.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from driver import checksums, driver_vm, evict, load, start_daemon, stats, wait_state
from test_driver import overwrite, tree_disk
from test_migration import check_no_mismatch

from harness import migration, qcow2
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Number of files that the guest changes after the state to which the test reverts was saved.
CHANGED = 8


@dataclass
class World:
    """A caching VM on an overlay of a disk with known files."""

    daemon: Daemon
    vm: Vm
    guest: Guest
    sums: dict[str, str]
    image: Path

    @property
    def files(self) -> list[str]:
        return list(self.sums)

    def pool_pages(self) -> int:
        return int(self.daemon.stats()["pool"]["pages"])

    def overwrite_files(self) -> None:
        """Overwrites files and evicts them, and checks that the pool has their new pages."""
        changed = {path: overwrite(self.guest, path) for path in self.files[:CHANGED]}
        assert all(self.sums[path] != changed[path] for path in changed)
        evict(self.guest, list(changed))
        before = stats(self.guest)["hits"]
        assert checksums(self.guest, list(changed)) == changed
        assert stats(self.guest)["hits"] > before + 100
        evict(self.guest, list(changed))
        assert self.pool_pages() > 100

    def check_as_before(self, guest: Guest, known_hits: int) -> None:
        """Checks that all files have their earlier contents and that none comes from the pool.

        Also checks that the VM then caches again.
        """
        wait_state(guest, "on")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        assert checksums(guest, self.files) == self.sums
        assert stats(guest)["hits"] == known_hits
        evict(guest, self.files)
        assert checksums(guest, self.files) == self.sums
        assert stats(guest)["hits"] > known_hits + 100
        check_no_mismatch(guest)


@pytest.fixture
def world(session: Session, kernel: Kernel, module: Path) -> World:
    daemon = start_daemon(session)
    base, sums = tree_disk(session)
    image = qcow2.create(session.directory / "top.qcow2", base.path.stat().st_size, base.path)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[Disk("data", image, format="qcow2")],
        memory_bytes=192 * MIB,
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    evict(guest, list(sums))
    return World(daemon, vm, guest, sums, image)


def save_memory(world: World, path: Path) -> int:
    """Pauses the VM and saves its memory to a file; returns the guest's number of hits."""
    known = stats(world.guest)["hits"]
    world.guest.close()
    world.vm.pause()
    migration.save(world.vm, path)
    return known


def restore_memory(session: Session, world: World, path: Path) -> Guest:
    """Restores the VM's memory from the file `path` in another QEMU, and returns the guest."""
    vm = migration.launch_receiver(session, world.vm, world.vm.config.tmem)
    migration.restore(vm, path)
    until(lambda: world.daemon.list()["vms"][0]["connected"], 60, "QEMU finds the daemon")
    return vm.guest


def test_vm_restored_from_a_file_starts_with_an_empty_pool(session: Session, world: World) -> None:
    """A VM that is restored from a file finds no page, because the earlier QEMU has ended."""
    path = session.directory / "state"
    known = save_memory(world, path)
    assert world.pool_pages() > 100, "the pool has too few pages of the paused VM"
    world.vm.quit()
    until(lambda: world.pool_pages() == 0, 60, "the pool is empty")
    world.check_as_before(restore_memory(session, world, path), known)


def test_vm_reverted_to_a_snapshot_reads_no_newer_page(session: Session, world: World) -> None:
    """A VM that is reverted to a snapshot of memory and disk reads no page from after it.

    The memory is in a file. The disk's later changes are in an overlay, which is discarded.
    """
    path = session.directory / "state"
    known = save_memory(world, path)
    overlay = session.directory / "overlay.qcow2"
    snapshot = {
        "node-name": world.vm.config.disks[0].node,
        "snapshot-file": str(overlay),
        "snapshot-node-name": "overlay",
    }
    # Saving the memory made QEMU release the disk image. Resume the VM, so that QEMU uses the image
    # again and can take the snapshot.
    world.vm.resume()
    world.vm.pause()
    world.vm.qmp.execute("blockdev-snapshot-sync", snapshot)
    world.vm.resume()
    world.guest = world.vm.connect()
    world.overwrite_files()
    world.guest.close()
    world.vm.quit()
    assert overlay.stat().st_size > 4 * MIB, "the overlay is too small to hold the changes"
    world.check_as_before(restore_memory(session, world, path), known)


def test_boot_from_an_earlier_image_reads_no_newer_page(session: Session, world: World) -> None:
    """A VM that boots from an earlier disk image, with the same daemon, reads no newer page."""
    world.guest.sh("sync")
    world.vm.pause()
    copy = session.directory / "before.qcow2"
    shutil.copy(world.image, copy)
    world.vm.resume()
    world.overwrite_files()
    world.guest.sh("umount /mnt")
    world.guest.close()
    world.vm.quit()
    shutil.copy(copy, world.image)
    guest = world.vm.start()
    load(guest, "verify_every=0")
    world.check_as_before(guest, stats(guest)["hits"])
