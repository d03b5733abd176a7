# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Each safety check of coherence by disk block is necessary.

A sequence of steps reads right bytes, and wrong ones if the test removes one check with the
parameter test_blocks_without. Where no wrong byte can be forced, a counter or a state shows the
difference. A sequence stops tasks at places in the driver, and transfers at places below it, so
that its result does not depend on time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import (
    DISK_BYTES,
    DM,
    MODULE,
    PATIENT,
    SYSFS,
    WHERE,
    Hold,
    driver_guest,
    driver_vm,
    growth,
    kept_pages,
    load,
    parameter,
    programs,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_blocked,
    wait_state,
)
from test_guest_command import COMMAND, command
from test_mounts import Mount

from harness import disk
from harness.disk import Disk
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SPECIAL = "/bin/special"
OTHER = "/other"
THIRD = "/third"
DRIVER = "/sys/bus/virtio/drivers/virtio_tmem"
CGROUPS = "/sys/fs/cgroup"
GROUP = f"{CGROUPS}/readers"
PAGE = 4096
SECTOR = 512
OLD, NEW = b"A" * PAGE, bytes(PAGE)
PARAMETERS = f"verify_every=0 {PATIENT}"
OTHER_BYTES = 64 * MIB
# Time in ms for which a disk keeps a read, longer than the test takes.
DELAY_MS = 600_000
IO_SECONDS = 60.0
# Time in which a task that waits for nothing ends. It is shorter than that of soft lockups.
WAIT_SECONDS = 5.0
# Size of the pieces of a direct write in bytes, no multiple of a sector. Linux 6.18 allows them.
PIECE = 256
PIECES_SINCE = (6, 18)
# Number of pages whose transfer needs several allocations for the state of one bio.
LONG_PAGES = 1024
# Attempts to make a file with a certain place on the disk.
FILES_MAX = 16
# Physical memory that the guest uses as a disk, and the size of a disk with zones.
PMEM = "memmap=48M!64M"
ZONED_MIB = 64
FILE_BYTES = 1 * MIB


def boot(session: Session, kernel: Kernel, module: Path, *modules: str, **more: Path) -> Guest:
    """Boots a guest with an ext4 at /mnt and a disk for each image of `more`.

    The host retains no page, because the driver would find some faults when it puts the page again.
    """
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    return driver_guest(
        session,
        kernel,
        module,
        tmem,
        parameters=PARAMETERS,
        cpus=2,
        disks=[Disk("data", image), *(Disk(name, path) for name, path in more.items())],
        modules=modules,
        files={**programs(SPECIAL, DM), **command()},
    )


def drop(guest: Guest) -> None:
    """Evicts all clean pages."""
    guest.sh(f"sync; {SPECIAL} drain && echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)


def evict(guest: Guest, path: str) -> None:
    """Evicts the first page of a file, to which a task of the kernel may have a reference."""

    def gone() -> bool:
        drop(guest)
        return guest.run(f"{SPECIAL} cached {path} 0").status == 1

    until(gone, IO_SECONDS, f"{path} leaves the page cache")


def omit_check(guest: Guest, check: str) -> None:
    set_parameter(guest, "test_blocks_without", check)


class File:
    """A file whose pages are in the pool, and not in the page cache."""

    made = 0

    def __init__(self, guest: Guest, where: str, device: str, pages: int = 1) -> None:
        self.guest = guest
        self.device = device
        self.mount = Mount(guest, where)
        self.mount.wait("on")
        File.made += 1
        self.path = f"{where}/file{File.made}"
        guest.put(self.path, OLD * pages)
        guest.sh("sync")
        self.offset = int(guest.sh(f"{SPECIAL} place {self.path} 0"))
        self.hold(pages)

    def hold(self, pages: int) -> None:
        """Reads the file and evicts it, so that the pool has its pages."""
        before = kept_pages(stats(self.guest))
        self.read()
        evict(self.guest, self.path)
        assert kept_pages(stats(self.guest)) - before >= pages, f"{self.path} was not put"

    def read(self) -> bytes:
        return self.guest.get(self.path)

    def start_read(self) -> Job:
        return self.guest.start(f"cat {self.path}", 120)

    def write(self, page: int = 0) -> Job:
        """Starts to write zeroes to a block of the file, below the file system. Returns the job."""
        at = self.offset // PAGE + page
        return self.guest.start(
            f"dd if=/dev/zero of={self.device} bs={PAGE} seek={at} count=1 conv=notrunc"
            " oflag=direct 2>/dev/null",
            120,
        )


def check_each(guest: Guest, sequences: dict[str, Callable[[], bytes]]) -> None:
    """Checks that sequences read new bytes, and old ones without the check that is their key."""
    for check, sequence in sequences.items():
        for removed in (True, False):
            omit_check(guest, check if removed else "")
            found = sequence()
            print(check, removed, found[:1])
            assert found == (OLD if removed else NEW), f"{check}, removed: {removed}"
    omit_check(guest, "")


def write_and_read(file: File) -> bytes:
    assert file.write().wait().status == 0
    return file.read()


def put_during_write(file: File) -> bytes:
    """Reads and evicts a page while a write of its block is on its way to the disk."""
    hold = Hold(file.guest, "submit")
    job = file.write()
    hold.wait()
    assert file.read() == OLD
    evict(file.guest, file.path)
    hold.release()
    assert job.wait().status == 0
    return file.read()


def write_during_get(file: File) -> bytes:
    """Writes a block after the host has returned its page, and before the driver uses the page."""
    hold = Hold(file.guest, "fetch")
    reader = file.start_read()
    hold.wait()
    assert file.write().wait().status == 0
    hold.release()
    reader.wait()
    evict(file.guest, file.path)
    return file.read()


class Freed:
    """A page of a file that has left the page cache, and is held before it is put and freed."""

    def __init__(self, file: File) -> None:
        assert file.read() == OLD
        self.hold = Hold(file.guest, "free")
        self.job = file.guest.start("echo 1 >/proc/sys/vm/drop_caches", 120)
        self.hold.wait()
        assert file.guest.run(f"{SPECIAL} cached {file.path} 0").status == 1, "the page is cached"

    def free(self) -> None:
        self.hold.release()
        assert self.job.wait().status == 0


def write_before_put(file: File) -> bytes:
    """Writes a block after its page has left the page cache, and before the page is put."""
    freed = Freed(file)
    assert file.write().wait().status == 0
    freed.free()
    return file.read()


def write_and_read_before_put(file: File) -> bytes:
    """Writes a block, and reads it to another page, before the page with the old bytes is put."""
    freed = Freed(file)
    assert file.write().wait().status == 0
    assert file.read() == NEW
    freed.free()
    # Drop the new page without a put.
    file.guest.sh(f"{SPECIAL} dontneed {file.path}", 60)
    return file.read()


def write_during_put(file: File) -> bytes:
    """Puts a page while a write of its block is on its way to the disk."""
    freed = Freed(file)
    hold = Hold(file.guest, "submit")
    job = file.write()
    hold.wait()
    freed.free()
    hold.release()
    assert job.wait().status == 0
    return file.read()


def test_checks_of_pages_that_are_put_after_they_left_the_page_cache(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The time between removal and put needs no check of its own for right bytes.

    A write in this time erases the record, and the bytes of the page differ from a later one.
    """
    guest = boot(session, kernel, test_module)
    device = f"/dev/{guest.disk('data')}"
    check_each(
        guest,
        {
            "erase": lambda: write_before_put(File(guest, WHERE, device)),
            "erase,in_flight": lambda: write_during_put(File(guest, WHERE, device)),
            "equal": lambda: write_and_read_before_put(File(guest, WHERE, device)),
        },
    )


def test_policy_waits_for_puts(session: Session, kernel: Kernel, test_module: Path) -> None:
    """When tmem-guest has set the policy "never", no put of a page of the file is under way."""
    guest = boot(session, kernel, test_module)
    device = f"/dev/{guest.disk('data')}"
    for check in ("grace", ""):
        omit_check(guest, check)
        file = File(guest, WHERE, device)
        freed = Freed(file)
        forbid, put = Hold(guest, "forbid"), Hold(guest, "put")
        policy = guest.start(f"{COMMAND} policy {file.path} never", 60)
        forbid.wait()
        freed.hold.release()
        put.wait()
        forbid.release()
        if check:
            assert policy.wait().status == 0
        else:
            time.sleep(WAIT_SECONDS)
            assert not policy.done()
        put.release()
        assert freed.job.wait().status == policy.wait().status == 0
        until(lambda: is_put(guest, device), IO_SECONDS, "the pool takes puts again")


def is_put(guest: Guest, device: str) -> bool:
    """Returns whether a page of a new file is put."""
    try:
        File(guest, WHERE, device)
    except AssertionError:
        return False
    return True


def test_policy_reaches_pages_that_have_left_the_page_cache(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """No page of a file with the policy "never" is put, also if it was evicted before."""
    guest = boot(session, kernel, test_module)
    device = f"/dev/{guest.disk('data')}"
    for check, puts in (("policy", 1), ("", 0)):
        omit_check(guest, check)
        file = File(guest, WHERE, device)
        freed = Freed(file)
        guest.sh(f"{COMMAND} policy {file.path} never", 60)
        # The pool takes puts again when a page of another file was put.
        until(lambda: is_put(guest, device), IO_SECONDS, "the pool takes puts again")
        before = settle(guest)
        freed.free()
        assert growth(before, settle(guest))["puts"] == puts, check
    # Such pages lose their hints when they leave the page cache.
    for check, puts in (("leave", 1), ("", 0)):
        omit_check(guest, check)
        assert file.read() == OLD
        before = stats(guest)
        evict(guest, file.path)
        assert growth(before, stats(guest))["puts"] == puts, check


def write_without_device(file: File) -> bytes:
    """Writes a block whose page is in the page cache, while the driver has no device."""
    guest = file.guest
    assert file.read() == OLD
    name = guest.sh(f"cd {DRIVER} && echo virtio*").split()[0]
    guest.sh(f"echo {name} >{DRIVER}/unbind", 60)
    assert file.write().wait().status == 0
    guest.sh(f"echo {name} >{DRIVER}/bind", 60)
    wait_state(guest, "on")
    evict(guest, file.path)
    return file.read()


@pytest.mark.smoke
def test_checks_of_writes_and_gets(session: Session, kernel: Kernel, test_module: Path) -> None:
    """Writes that meet puts and gets of their block."""
    guest = boot(session, kernel, test_module)
    device = f"/dev/{guest.disk('data')}"
    check_each(
        guest,
        {
            "forget": lambda: write_and_read(File(guest, WHERE, device)),
            "in_flight": lambda: put_during_write(File(guest, WHERE, device)),
            "get_seq": lambda: write_during_get(File(guest, WHERE, device)),
            "erase": lambda: write_without_device(File(guest, WHERE, device)),
        },
    )
    # A get after the records of a write were erased, and before the index entries are.
    for check, hits in (("get_written", 1), ("", 0)):
        omit_check(guest, check)
        file = File(guest, WHERE, device)
        hold = Hold(guest, "write")
        job = file.write()
        hold.wait()
        before = stats(guest)
        assert file.read() == OLD
        assert growth(before, stats(guest))["hits"] == hits
        hold.release()
        assert job.wait().status == 0
    # A page of a file, with other bytes than its block.
    file = File(guest, WHERE, device)
    for check, found in (("", OLD), ("equal", NEW)):
        omit_check(guest, check)
        assert file.read() == OLD
        set_parameter(guest, "test_page_zeroed", file.path)
        evict(guest, file.path)
        assert file.read() == found
    # Each character of the verdicts is one case: p if the page is put, - if it is refused. The page
    # becomes dirty, in this order: never; before its write; during its write; after its write;
    # after writes to two blocks at the same time; never, but another write of its block begins and
    # ends meanwhile.
    for check, verdicts in (
        ("", "p-----"),
        ("dirty", "pppp--"),
        ("latest", "p---p-"),
        ("write_seq", "p----p"),
    ):
        omit_check(guest, check)
        set_parameter(guest, "test_blocks_dirty", "1")
        assert guest.read("/sys/module/virtio_tmem/parameters/test_blocks_dirty") == verdicts


def test_writes_of_other_blocks_rarely_keep_a_block_from_the_pool(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A block counts as written only if two counters, by different hashes, say so."""
    guest = boot(session, kernel, test_module)
    refused = {}
    for check in ("second_hash", ""):
        omit_check(guest, check)
        set_parameter(guest, "test_blocks_in_flight", "1")
        refused[check] = int(parameter(guest, "test_blocks_in_flight"))
    print(refused)
    assert refused[""] <= 1 < refused["second_hash"]


def write_of_former_area(guest: Guest, other: str, third: str) -> bytes:
    """Unmounts and mounts a file system while a write to its disk is in flight.

    The blocks have other numbers then, because a third file system has taken theirs.
    """
    device = f"/dev/{guest.disk(other)}"
    guest.mount(other, OTHER)
    file = File(guest, OTHER, device)
    hold = Hold(guest, "submit")
    job = file.write()
    hold.wait()
    guest.sh(f"umount {OTHER}", 60)
    guest.mount(third, THIRD)
    Mount(guest, THIRD).wait("on")
    guest.mount(other, OTHER)
    file.mount.wait("on")
    file.hold(1)
    hold.release()
    assert job.wait().status == 0
    found = file.read()
    guest.sh(f"umount {OTHER}; umount {THIRD}", 60)
    return found


def test_writes_erase_their_blocks_after_another_mount(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A write erases its blocks at its end, also if the file system was mounted again meanwhile."""
    images = {
        name: disk.ext4(session.directory / f"{name}.img", OTHER_BYTES)
        for name in ("other", "third")
    }
    guest = boot(session, kernel, test_module, **images)
    check_each(guest, {"former": lambda: write_of_former_area(guest, "other", "third")})


def make_group(guest: Guest) -> None:
    """Makes a control group whose pages start_reclaim() can evict."""
    guest.sh(
        f"mount -t cgroup2 none {CGROUPS} && echo +memory >{CGROUPS}/cgroup.subtree_control"
        f" && mkdir {GROUP}"
    )


def start_reclaim(guest: Guest) -> Job:
    """Starts to evict the pages that the group has read or written, and returns the job.

    This eviction does not take the lock s_umount of the file system.
    """
    return guest.start(f"echo 64M >{GROUP}/memory.reclaim", 120)


def put_after_unmount(guest: Guest) -> bytes:
    """Frees a page after its file system was unmounted and its block numbers have another owner.

    Both file systems have the same contents, except for the block of the file.
    """
    left, right = (f"/dev/{guest.disk(name)}" for name in ("left", "right"))
    sectors = OTHER_BYTES // SECTOR
    first, second = (
        guest.sh(f"{DM} {name} 0 {sectors} linear '{device} 0'").strip()
        for name, device in (("first", left), ("second", right))
    )
    guest.sh(
        f"mke2fs -q -b {PAGE} {first} && mkdir -p {OTHER} && mount -t ext4 {first} {OTHER}", 60
    )
    file = File(guest, OTHER, first)
    guest.sh(f"umount {OTHER} && dd if={first} of={second} bs=1M conv=fsync 2>/dev/null", 60)
    guest.sh(
        f"dd if=/dev/zero of={second} bs={PAGE} seek={file.offset // PAGE} count=1 conv=fsync"
        " 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches"
    )
    guest.sh(f"mount -t ext4 {first} {OTHER}", 60)
    file.mount.wait("on")
    guest.sh(f"echo $$ >{GROUP}/cgroup.procs; cat {file.path} >/dev/null")
    hold = Hold(guest, "free")
    job = start_reclaim(guest)
    hold.wait()
    assert guest.run(f"{SPECIAL} cached {file.path} 0").status == 1, "the page is cached"
    guest.sh(f"umount {OTHER}", 60)
    guest.sh(f"mount -t ext4 {second} {OTHER}", 60)
    Mount(guest, OTHER).wait("on")
    hold.release()
    job.wait()
    found = file.read()
    guest.sh(f"umount {OTHER}", 60)
    return found


def test_block_numbers_are_used_again_without_records(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A page of a former file system is not put for the one that has its block numbers now."""
    images = {
        name: disk.blank(session.directory / f"{name}.img", OTHER_BYTES)
        for name in ("left", "right")
    }
    guest = boot(session, kernel, test_module, "dm_mod", **images)
    make_group(guest)
    check_each(guest, {"numbers": lambda: put_after_unmount(guest)})


def test_sampled_reads_are_compared_with_the_disk(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A read of the sample gets the bytes of the disk, and a difference blocks the mount."""
    guest = boot(session, kernel, test_module)
    file = File(guest, WHERE, f"/dev/{guest.disk('data')}", 4)
    set_parameter(guest, "verify_every", "1")
    before = stats(guest)
    assert file.read() == OLD * 4
    grown = growth(before, stats(guest))
    assert grown["verified_hits"] == grown["blocks_gets_equal"] == 4
    assert grown["verify_mismatches"] == 0
    file.mount.wait("on")

    file.hold(4)
    omit_check(guest, "forget")
    assert file.write().wait().status == 0
    assert file.read() == NEW + OLD * 3
    assert growth(before, stats(guest))["verify_mismatches"] == 1
    wait_blocked(guest, "a page from the host differs from the disk")


def start_zeroing(file: File, pages: int) -> Job:
    """Starts to zero the first pages of a file by one command below the file system.

    Returns the job.
    """
    command = f"{SPECIAL} zeroout {file.device} {file.offset} {pages * PAGE}"
    return file.guest.start(command, 120)


def test_long_writes_erase_only_their_blocks(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A command that zeroes a range erases its blocks. Meanwhile, others are put and got."""
    guest = boot(session, kernel, test_module)
    device = f"/dev/{guest.disk('data')}"
    file, other = File(guest, WHERE, device, 4), File(guest, WHERE, device)
    hold = Hold(guest, "submit")
    job = start_zeroing(file, 2)
    hold.wait()
    before = stats(guest)
    assert other.read() == OLD
    other.hold(1)
    assert growth(before, stats(guest))["hits"] == 1
    # The disk still has the old bytes. They must not be in the pool when it has the new ones.
    assert file.read() == OLD * 4
    evict(guest, file.path)
    hold.release()
    assert job.wait().status == 0
    assert file.read() == NEW * 2 + OLD * 2


def test_pages_without_memory_for_their_state_are_not_recorded(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """An allocation of states for a long bio fails: at first, in the middle, or at the end."""
    other = disk.xfs(session.directory / "other.img", DISK_BYTES)
    guest = boot(session, kernel, test_module, "xfs", other=other)
    guest.mount("other", OTHER, "xfs")
    device = f"/dev/{guest.disk('other')}"
    file = File(guest, OTHER, device, LONG_PAGES)
    for every in (1, 2, 3):
        set_parameter(guest, "inject_nomem_states", str(every))
        before = stats(guest)
        guest.put("/tmp/long", OLD * LONG_PAGES)
        guest.sh(
            f"dd if=/tmp/long of={file.path} bs={LONG_PAGES * PAGE} conv=notrunc,fsync 2>/dev/null"
        )
        drop(guest)
        grown = growth(before, stats(guest))
        print(every, grown["blocks_nomem"], grown["puts"])
        assert grown["blocks_nomem"] > 0
        assert grown["blocks_written"] == LONG_PAGES - grown["blocks_nomem"]
        assert file.read() == OLD * LONG_PAGES
        drop(guest)
        # A direct write is not recorded, so it needs no states.
        before = stats(guest)
        guest.sh(
            f"dd if=/dev/zero of={device} bs={LONG_PAGES * PAGE} count=1 conv=notrunc 2>/dev/null"
            f" oflag=direct,seek_bytes seek={file.offset}"
        )
        assert growth(before, stats(guest))["blocks_nomem"] == 0
        assert file.read() == NEW * LONG_PAGES
    set_parameter(guest, "inject_nomem_states", "0")

    # A short write needs no other memory than its own state, which may take the last memory.
    set_parameter(guest, "inject_nomem_write", "1")
    before = stats(guest)
    guest.sh(f"dd if=/tmp/long of={file.path} bs={4 * PAGE} count=1 conv=notrunc,fsync 2>/dev/null")
    grown = growth(before, stats(guest))
    assert grown["blocks_nomem"] == 0 and grown["blocks_written"] == 4, grown


def write_by_command(file: File) -> bytes:
    file.guest.sh(f"{SPECIAL} scsi {file.device} {file.offset}")
    return file.read()


def check_pieces(guest: Guest, device: str, allowed: bool) -> None:
    """Writes four blocks from pieces, whose places cannot be counted in sectors."""
    for removed in (True, False):
        file = File(guest, OTHER, device, 4)
        assert int(guest.sh(f"{SPECIAL} place {file.path} {3 * PAGE}")) == file.offset + 3 * PAGE
        omit_check(guest, "bytes" if removed else "")
        said = guest.sh(f"{SPECIAL} pieces {device} {file.offset} {4 * PAGE} {PIECE}")
        omit_check(guest, "")
        assert said == ("" if allowed else "failed: Invalid argument\n")
        if not allowed:
            return
        assert file.read() == (NEW + OLD * 3 if removed else NEW * 4)


def test_checks_of_commands_and_places(session: Session, kernel: Kernel, test_module: Path) -> None:
    """Writes by SCSI commands, from odd buffers, and to blocks that no page is aligned to."""
    small = disk.ext4(session.directory / "small.img", OTHER_BYTES, None, "-b", "1024")
    guest = boot(session, kernel, test_module, "sd_mod", "scsi_debug", small=small)
    device = "/dev/sda"
    guest.sh(f"mkdir {OTHER} && mke2fs -q -b {PAGE} {device}")
    guest.sh(f"mount -t ext4 {device} {OTHER}", 60)
    check_each(guest, {"passthrough": lambda: write_by_command(File(guest, OTHER, device))})
    check_pieces(guest, device, kernel.version >= PIECES_SINCE)
    guest.sh(f"umount {OTHER}", 60)

    guest.mount("small", OTHER)
    Mount(guest, OTHER).wait("on")
    check_whole_blocks(guest)


def test_write_that_the_disk_cannot_take_does_not_stop_the_cache(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A user can cause an error of a direct write, on a disk whose requests must have no gaps."""
    if kernel.version < PIECES_SINCE:
        pytest.skip(f"Linux {kernel.series} submits no such write")
    guest = boot(session, kernel, test_module, "null_blk")
    device = "/dev/nullb0"
    guest.sh(
        "rmmod null_blk; insmod /modules/null_blk.ko nr_devices=1 gb=1 memory_backed=1"
        f" bs={PAGE} virt_boundary=1"
    )
    guest.sh(f"mkdir {OTHER} && mke2fs -q -b {PAGE} {device} {OTHER_BYTES // PAGE}", 60)
    guest.sh(f"mount -t ext4 {device} {OTHER}", 60)
    file = File(guest, OTHER, device)
    for removed in (False, True):
        omit_check(guest, "inval" if removed else "")
        said = guest.sh(f"{SPECIAL} pieces {device} {file.offset} {PAGE} {SECTOR}")
        assert said == "failed: Invalid argument\n"
        blocked = file.mount.read("state").startswith("blocked: a write of the disk failed")
        assert blocked == removed


def replace_tables(guest: Guest) -> None:
    """Replaces the tables of records once more at least, and then not any more."""
    before = int(parameter(guest, "test_replaced"))
    set_parameter(guest, "test_replace_ms", "50")

    def replaced() -> int:
        return int(parameter(guest, "test_replaced")) - before

    until(lambda: replaced() > 1, IO_SECONDS, "the tables are replaced")
    set_parameter(guest, "test_replace_ms", "0")
    # The number is odd while they are being replaced.
    until(lambda: (replaced() + before) % 2 == 0, IO_SECONDS, "the last replacement ends")


def get_across_tables(file: File, check: str) -> bytes:
    """Replaces the tables and writes the block during a get.

    The read of a clone makes a record in the new tables, with the same number as the get's record
    had in the old ones.
    """
    guest = file.guest
    clone = f"{file.path}-clone"
    guest.sh(f"{SPECIAL} clone {clone} {file.path}; sync")
    replace_tables(guest)
    hold = Hold(guest, "fetch")
    reader = file.start_read()
    hold.wait()
    omit_check(guest, check)
    replace_tables(guest)
    assert file.write().wait().status == 0
    assert guest.get(clone) == NEW
    hold.release()
    reader.wait()
    return file.read()


def test_gets_do_not_outlive_the_tables_of_records(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    other = disk.xfs(session.directory / "other.img", DISK_BYTES)
    guest = boot(session, kernel, test_module, "xfs", other=other)
    guest.mount("other", OTHER, "xfs")
    device = f"/dev/{guest.disk('other')}"
    for check, found in (("renew", OLD), ("", NEW)):
        file = File(guest, OTHER, device)
        assert get_across_tables(file, check) == found, f"without: {check}"
        omit_check(guest, "")


def get_across_drain(vm: Vm, file: File, drain_first: bool) -> tuple[bytes, bytes, bytes]:
    """Drains the disk again between the look-up of a page in the pool and the get.

    Before the drain has erased all pages, a page with old bytes is put, and the block is written.
    Returns what three readers get of the written block: during the drain; with a look-up before the
    drain; and after it. `drain_first`: the drain ends before the second reader continues, because
    a get takes the page from the pool.
    """
    guest = vm.guest
    clone = f"{file.path}-clone"
    guest.sh(f"{SPECIAL} clone {clone} {file.path}; sync")
    file.hold(1)
    fill, drain = Hold(guest, "choice"), Hold(guest, "drain")
    reader = file.start_read()
    fill.wait()
    vm.qemu_io("other", "break write_aio held")
    set_parameter(guest, "test_hooks_off", "bio")
    writer = file.write()
    drain.wait()
    set_parameter(guest, "test_hooks_off", "")
    before = kept_pages(stats(guest))
    assert guest.get(clone) == OLD
    evict(guest, clone)
    assert kept_pages(stats(guest)) > before
    vm.qemu_io("other", "resume held")
    assert writer.wait().status == 0
    during = guest.get(clone)
    if not drain_first:
        fill.release()
        reader.wait()
    drain.release()
    file.mount.wait("on")
    guest.sh(f"{SPECIAL} dontneed {clone}")
    after = guest.get(clone)
    fill.release()
    return during, reader.wait().stdout, after


def test_gets_do_not_outlive_the_interval_of_their_area(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A reader does not get bytes that are older than those that another reader has seen."""
    data = disk.ext4(session.directory / "data.img", DISK_BYTES)
    other = disk.xfs(session.directory / "other.img", DISK_BYTES)
    vm = driver_vm(
        session,
        kernel,
        test_module,
        Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"}),
        cpus=2,
        disks=[Disk("data", data), Disk("other", other, debug=True)],
        modules=["xfs"],
        files=programs(SPECIAL),
    )
    guest = vm.start()
    load(guest, PARAMETERS)
    guest.mount("other", OTHER, "xfs")
    device = f"/dev/{guest.disk('other')}"
    for at, check in enumerate(("served", "fill_epoch", "drained", "")):
        omit_check(guest, check)
        found = get_across_drain(vm, File(guest, OTHER, device), check == "drained")
        print(check, [bytes[:1] for bytes in found])
        assert [bytes == OLD for bytes in found] == [at == reader for reader in range(3)]


def make_unaligned_file(guest: Guest) -> str:
    """Makes a file of one page, and returns its path. On the disk, the page is not aligned."""
    for _ in range(FILES_MAX):
        File.made += 1
        path = f"{OTHER}/file{File.made}"
        guest.put(f"{OTHER}/filler{File.made}", b"x" * 1024)
        guest.put(path, OLD)
        guest.sh("sync")
        if int(guest.sh(f"{SPECIAL} place {path} 0")) % PAGE:
            return path
    raise AssertionError(f"all of {FILES_MAX} files begin at a multiple of {PAGE}")


def check_whole_blocks(guest: Guest) -> None:
    """Evicts a page that lies in two blocks of 4 KiB, whose record would be of the first one."""
    for removed in (True, False):
        omit_check(guest, "whole" if removed else "")
        path = make_unaligned_file(guest)
        evict(guest, path)
        before = kept_pages(stats(guest))
        assert guest.get(path) == OLD
        evict(guest, path)
        assert kept_pages(stats(guest)) - before == removed


class Stripes:
    """An ext4 at OTHER on a striped volume, whose second disk can be changed."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.left, self.right = (f"/dev/{guest.disk(name)}" for name in ("left", "right"))
        self.sectors = OTHER_BYTES // SECTOR
        slow = guest.sh(f"{DM} slow {self.whole_table()}").strip()
        self.node = guest.sh(
            f"{DM} top 0 {2 * self.sectors} striped '2 {PAGE // SECTOR} {self.left} 0 {slow} 0'"
        ).strip()
        guest.sh(f"mkdir {OTHER} && mke2fs -q -b {PAGE} {self.node}", 60)
        self.mount()

    def mount(self) -> None:
        self.guest.sh(f"mount -t ext4 {self.node} {OTHER}", 60)

    def whole_table(self) -> str:
        return f"0 {self.sectors} linear '{self.right} 0'"

    def set_table(self, table: str) -> None:
        self.guest.sh(f"{DM} slow {table}", 60)

    def change_block(self, at: int, target: str) -> None:
        """Gives a block of the second disk, which begins at sector `at`, another target."""
        after = at + PAGE // SECTOR
        self.set_table(
            f"0 {at} linear '{self.right} 0' {at} {PAGE // SECTOR} {target}"
            f" {after} {self.sectors - after} linear '{self.right} {after}'"
        )

    def make_file(self) -> tuple[File, int]:
        """Returns a file of two pages, one on each disk, and the sector of the second one."""
        for _ in range(FILES_MAX):
            # Another file in between makes the next one begin on the other disk.
            self.guest.put(f"{OTHER}/filler{File.made}", OLD)
            file = File(self.guest, OTHER, self.node, 2)
            if file.offset // PAGE % 2 == 0:
                return file, file.offset // PAGE // 2 * (PAGE // SECTOR)
        raise AssertionError(f"all of {FILES_MAX} files begin on the second disk")

    def overwrite(self, file: File) -> None:
        """Writes the same bytes to the blocks of a file."""
        self.guest.sh(
            f"cat {file.path} >/tmp/same"
            f" && dd if=/tmp/same of={file.path} bs={2 * PAGE} conv=notrunc,fsync 2>/dev/null"
        )

    def write_below(self, disk: str, at: int) -> None:
        """Writes zeroes to a block of a disk below the volume, which the driver does not see."""
        self.guest.sh(
            f"dd if=/dev/zero of={disk} bs={PAGE} seek={at // (PAGE // SECTOR)} count=1"
            " conv=notrunc oflag=direct 2>/dev/null"
        )

    def dirty_after_write(self) -> bytes:
        """Makes a page dirty whose block has other bytes than the driver saw, and cleans it.

        Such a page had changed before it became dirty, while the disk read it.
        """
        file, at = self.make_file()
        self.overwrite(file)
        self.write_below(self.left, at)
        set_parameter(self.guest, "test_page_dirtied", file.path)
        evict(self.guest, file.path)
        return file.read()[:PAGE]

    def read_during_write(self) -> bytes:
        """Writes the first page of a file during a read that has transferred only this page."""
        file, at = self.make_file()
        # The driver erases the pages from the pool, so that they are read from the disks.
        self.overwrite(file)
        self.guest.sh(f"{SPECIAL} dontneed {file.path}")
        place = f"{self.right} {at}"
        self.change_block(at, f"delay '{place} {DELAY_MS} {place} 0'")
        before = self.guest.disk_stat("left").reads
        reader = file.start_read()

        def half_read() -> bool:
            waits = self.guest.read(f"/sys/block/{self.node[5:]}/inflight").split()[0]
            return waits == "1" and self.guest.disk_stat("left").reads > before

        until(half_read, IO_SECONDS, "the first page is read, and the second one is not")
        assert file.write().wait().status == 0
        self.set_table(self.whole_table())
        assert reader.wait().stdout == OLD * 2
        evict(self.guest, file.path)
        found = file.read()
        assert found[PAGE:] == OLD
        return found[:PAGE]

    def write_after_failure(self) -> bytes:
        """Changes a block by a write that has failed, as a disk does after a time-out."""
        file, at = self.make_file()
        self.change_block(at, f"flakey '{self.right} {at} 0 1 1 error_writes'")
        assert file.write(1).wait().status != 0
        self.set_table(self.whole_table())
        assert file.read() == OLD * 2
        evict(self.guest, file.path)
        self.write_below(self.right, at)
        return file.read()[PAGE:]

    def write_beside_submit_bio(self) -> bytes:
        file, _ = self.make_file()
        set_parameter(self.guest, "test_hooks_off", "bio")
        assert file.write().wait().status == 0
        set_parameter(self.guest, "test_hooks_off", "")
        return file.read()[:PAGE]


def test_checks_of_transfers_on_a_striped_volume(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A write across a stripe against a read, a write that fails and happens later, and others."""
    images = {
        name: disk.blank(session.directory / f"{name}.img", OTHER_BYTES)
        for name in ("left", "right")
    }
    guest = boot(session, kernel, test_module, "dm_mod", "dm_delay", "dm_flakey", **images)
    stripes = Stripes(guest)
    check_each(guest, {"read_seq": stripes.read_during_write, "dirty": stripes.dirty_after_write})
    # The driver cannot drain a volume, and does not use it any more until it is unmounted.
    for check, sequence, why in (
        ("failed", stripes.write_after_failure, "a write of the disk failed"),
        ("bio_queue", stripes.write_beside_submit_bio, "the driver does not see all writes"),
    ):
        check_each(guest, {check: sequence})
        assert Mount(guest, OTHER).read("state").startswith(f"blocked: {why}")
        guest.sh(f"umount {OTHER}", 60)
        stripes.mount()
    stripes.make_file()


def test_area_starts_with_a_drain(session: Session, kernel: Kernel, test_module: Path) -> None:
    """A write that began before the driver was loaded reaches the disk after a put of its block."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    vm = driver_vm(
        session,
        kernel,
        test_module,
        tmem,
        cpus=2,
        disks=[Disk("data", image, debug=True)],
        files=programs(SPECIAL),
    )
    guest = vm.start()
    guest.mount("data", WHERE)
    device = guest.disk("data")

    def held() -> bool:
        return guest.read(f"/sys/block/{device}/inflight").split()[1] == "1"

    for removed in (True, False):
        path = f"{WHERE}/{removed}"
        guest.put(path, OLD)
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
        block = int(guest.sh(f"{SPECIAL} block {path} 0"))
        vm.qemu_io("data", "break write_aio held")
        writer = guest.start(
            f"dd if=/dev/zero of=/dev/{device} bs={PAGE} seek={block} count=1 conv=notrunc"
            " oflag=direct 2>/dev/null",
            120,
        )
        until(held, IO_SECONDS, "the disk has the write")
        check = "test_blocks_without=drain" if removed else ""
        guest.insmod(MODULE, f"{PARAMETERS} {check}")
        wait_state(guest, "on")
        mount = Mount(guest, WHERE)
        reader = guest.start(f"cat {path}", 120)
        if removed:
            mount.wait("on")
            assert reader.wait().stdout == OLD
            evict(guest, path)
            assert stats(guest)["puts"] > 0
        else:
            assert mount.read("state") == "starting"
        vm.qemu_io("data", "resume held")
        assert writer.wait().status == 0
        reader.wait()
        mount.wait("on")
        evict(guest, path)
        assert guest.get(path) == (OLD if removed else NEW)
        guest.sh("rmmod virtio_tmem", 60)


def test_drain_of_a_slow_disk_delays_reads_for_a_bounded_time(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A drain waits for a request that takes long, but gives up, so that other requests go on."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1")),
        cpus=2,
        disks=[Disk("data", image, debug=True)],
        files=programs(SPECIAL),
    )
    guest = vm.start()
    guest.mount("data", WHERE)
    device = guest.disk("data")
    paths = [f"{WHERE}/{name}" for name in ("written", "read")]
    for path in paths:
        guest.put(path, OLD)
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    vm.qemu_io("data", "break write_aio held")
    writer = guest.start(
        f"dd if=/dev/zero of={paths[0]} bs={PAGE} count=1 conv=notrunc oflag=direct", 120
    )
    until(
        lambda: guest.read(f"/sys/block/{device}/inflight").split()[1] == "1",
        IO_SECONDS,
        "the disk has the write",
    )
    guest.insmod(MODULE, PARAMETERS)
    wait_state(guest, "on")
    # This read waits for the drain, which gives up.
    assert guest.get(paths[1]) == OLD
    mount = Mount(guest, WHERE)
    assert not writer.done() and mount.read("state") == "starting"
    vm.qemu_io("data", "resume held")
    assert writer.wait().status == 0
    mount.wait("on")
    evict(guest, paths[1])
    assert guest.get(paths[1]) == OLD


def test_mounts_are_served_after_the_self_test(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A mount that is made during a self-test which then fails is not known to the driver.

    Otherwise the driver would not see that it is unmounted, and take another one for it later.
    """
    other = disk.ext4(session.directory / "other.img", OTHER_BYTES)
    vm = driver_vm(
        session,
        kernel,
        test_module,
        Tmem(start_daemon(session).socket("vm1")),
        cpus=2,
        disks=[
            Disk("data", disk.ext4(session.directory / "data.img", DISK_BYTES)),
            Disk("other", other),
        ],
    )
    guest = vm.start()
    guest.mount("data", WHERE)
    held = "/sys/module/virtio_tmem/parameters/test_hold_selftest"

    def waits() -> bool:
        return guest.run(f"grep -q 2 {held}").status == 0

    for stopped in ("N", "Y"):
        job = guest.start(
            f"insmod {MODULE} test_selftest_blind=dirty test_hold_selftest=1"
            f" test_fs_stopped={stopped}",
            120,
        )
        until(waits, IO_SECONDS, "the self-test waits")
        guest.mount("other", OTHER)
        guest.sh(f"cat {OTHER}/* >/dev/null 2>&1; echo x >{OTHER}/x; sync")
        set_parameter(guest, "test_hold_selftest", "0")
        assert job.wait().status == 0
        wait_state(guest, "off")
        guest.sh(f"umount {OTHER}", 60)
        mounts = guest.sh(f"ls {SYSFS}/mounts").split()
        guest.sh("rmmod virtio_tmem", 60)
        assert (mounts != []) == (stopped == "N"), mounts


def test_unmount_removes_the_area(session: Session, kernel: Kernel, test_module: Path) -> None:
    """The driver ignores writes to a disk that was unmounted, and counts them without the hook."""
    other = disk.ext4(session.directory / "other.img", OTHER_BYTES)
    guest = boot(session, kernel, test_module, other=other)
    last = OTHER_BYTES // PAGE - 1
    for off in ("", "unmount"):
        guest.mount("other", OTHER)
        Mount(guest, OTHER).wait("on")
        set_parameter(guest, "test_hooks_off", off)
        guest.sh(f"umount {OTHER}", 60)
        before = stats(guest)
        set_parameter(guest, "test_hooks_off", "bio")
        guest.sh(
            f"dd if=/dev/zero of=/dev/{guest.disk('other')} bs={PAGE} seek={last} count=1"
            " conv=notrunc oflag=direct 2>/dev/null"
        )
        set_parameter(guest, "test_hooks_off", "")
        assert (growth(before, stats(guest))["blocks_unseen"] > 0) == (off == "unmount")


def test_disk_that_was_not_released_keeps_the_module_of_its_scsi_host(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver does not see an unmount while it releases its hooks, and still has the disk.

    A function of scsi_debug releases the last reference to its host.
    """
    guest = boot(session, kernel, test_module, "sd_mod", "scsi_debug")
    guest.sh(f"mkdir {OTHER} && mke2fs -q /dev/sda && mount -t ext4 /dev/sda {OTHER}", 60)
    Mount(guest, OTHER).wait("on")
    set_parameter(guest, "test_hooks_off", "unmount")
    guest.sh(f"umount {OTHER}", 60)
    assert guest.run("rmmod scsi_debug").status != 0
    guest.sh("rmmod virtio_tmem && rmmod scsi_debug", 60)


def bypass_page_cache(guest: Guest, path: str) -> None:
    """Writes a file of a disk that is memory, without a bio."""
    guest.sh(f"{SPECIAL} dax {path} on; echo 2 >/proc/sys/vm/drop_caches")
    guest.sh(f"{SPECIAL} store {path}")
    guest.sh(f"{SPECIAL} dax {path} off; echo 2 >/proc/sys/vm/drop_caches")


def swap_out(guest: Guest, path: str) -> None:
    """Writes a file by swapping. Linux 6.1 does this without a bio if the disk is memory."""
    guest.sh(f"swapon {path} && {SPECIAL} swap-out {FILE_BYTES // 2} && swapoff {path}", 60)


@pytest.mark.parametrize("kind", ["dax", "rw_page", "zoned"])
def test_disks_with_writes_that_are_no_bios_are_refused(
    session: Session, kernel: Kernel, test_module: Path, kind: str
) -> None:
    """Without the refusal, a write that is no bio leads to wrong bytes.

    No wrong byte of a zoned disk is known: after an operation on zones, the driver erases all. But
    a block's place may be known only at the end of its write, so these disks are refused, too.
    """
    if kind == "rw_page" and kernel.version >= (6, 3):
        pytest.skip(f"Linux {kernel.series} has no ->rw_page")
    modules = {"dax": ("nd_pmem", "nd_e820"), "rw_page": ("brd",), "zoned": ("null_blk",)}[kind]
    device = {"dax": "/dev/pmem0", "rw_page": "/dev/ram0", "zoned": "/dev/nullb0"}[kind]
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"})
    guest = driver_guest(
        session,
        kernel,
        test_module,
        tmem,
        parameters=PARAMETERS,
        modules=modules,
        files=programs(SPECIAL),
        cmdline=PMEM if kind == "dax" else "",
    )
    blocks = ""
    if kind == "zoned":
        # The zone that must be written in sequence is behind the file system.
        guest.sh(
            "rmmod null_blk; insmod /modules/null_blk.ko nr_devices=1 gb=1 memory_backed=1 zoned=1"
            f" zone_size={ZONED_MIB} zone_nr_conv=1"
        )
        blocks = str(ZONED_MIB * MIB // PAGE)
    guest.sh(f"mkdir {OTHER} && mke2fs -q -b {PAGE} {device} {blocks}", 60)
    path = f"{OTHER}/file"
    for removed in (True, False):
        omit_check(guest, "visible" if removed else "")
        guest.sh(f"mount -t ext4 {device} {OTHER}", 60)
        guest.put(path, OLD * (FILE_BYTES // PAGE))
        if kind == "rw_page":
            guest.sh(f"mkswap {path}")
        mount = Mount(guest, OTHER)
        mount.wait("on" if removed else "blocked: the disk has writes that are no bios")
        drop(guest)
        guest.get(path)
        drop(guest)
        assert (mount.count("held_pages") >= FILE_BYTES // PAGE // 2) == removed
        if kind == "dax":
            bypass_page_cache(guest, path)
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        elif kind == "rw_page":
            swap_out(guest, path)
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        wrong = removed and kind != "zoned"
        assert guest.run(f"{SPECIAL} same {path}").status == wrong
        guest.sh(f"umount {OTHER}", 60)
