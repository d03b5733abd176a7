# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Swap areas are cached in private pools, and freed slots leave the host."""

from __future__ import annotations

import ctypes
import fcntl
import signal
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    DM,
    HOOK_BITS,
    MODULE,
    SYSFS,
    WHERE,
    driver_guest,
    driver_vm,
    evict,
    growth,
    load,
    programs,
    seed,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_state,
)
from liar import T_FLUSH, T_PUT, Liar
from test_core import DRIVER, devices
from test_files import SPECIAL, check_cached, there
from test_mounts import Mount
from test_refused import CRYPTO, write

from harness import disk
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SWAPPER = "/bin/swapper"
FILES = "/files"  # where the file system of swap files is mounted
SWAP_BYTES = 512 * MIB
MEMORY_BYTES = 192 * MIB
# Memory of the torture program in MiB: more than the guest's.
TORTURE_MIB = 200
MARKED_MIB = 16
PAGE = 4096
# From linux/fs.h: an ioctl of /proc/PID/pagemap, and a category of pages.
PAGEMAP_SCAN = 0xC0606610
PAGE_IS_PRESENT = 1 << 3
REGIONS = 4096
# The pool reserves much more address space than this. Smaller mappings are threads' buffers, in
# which the pages of the last get stay.
POOL_BYTES_MIN = 1 << 30
CGROUPS = "/sys/fs/cgroup"
GROUP = f"{CGROUPS}/marked"
CRYPT_KEY = "00" * 64
# Time in seconds after which the bytes of freed slots are not at the host any more.
FREED_SECONDS = 5.0
FILE_MIB = 192  # size of most swap files
FIRST_MIB = 32  # size of a swap file that becomes full
READ_MIB = 4  # size of a swap file that is read: the put ring has space for it
# Memory of a process that was swapped out before the driver is loaded. Its slots are the first part
# of the swap area.
BASE_MIB = 128


class Swap:
    """The guest's disk "swap", or the block device or file `path`, that is used as a swap area.

    `number` is the number of swap areas that were there before.
    """

    def __init__(self, guest: Guest, path: str = "", number: int = 0) -> None:
        self.guest = guest
        self.device = path or f"/dev/{guest.disk('swap')}"
        if self.device.startswith("/dev/"):
            device = guest.read(f"/sys/block/{Path(self.device).name}/dev")
        else:
            device = Path(Mount(guest, str(Path(path).parent)).path).name
        self.path = f"{SYSFS}/mounts/swap-{device}-{number}"

    def make(self, mib: int) -> None:
        """Makes the file."""
        self.guest.sh(f"dd if=/dev/zero of={self.device} bs=1M count={mib} 2>/dev/null; sync", 120)

    def on(self) -> None:
        self.guest.sh(f"mkswap {self.device} >/dev/null && swapon {self.device}", 120)

    def off(self) -> None:
        self.guest.sh(f"swapoff {self.device}", 300)

    def exists(self) -> bool:
        return self.guest.run(f"test -d {self.path}").status == 0

    def serve(self) -> None:
        """Writes to the swap area until the driver serves it."""

        def served() -> bool:
            self.guest.run(f"timeout 5 {SWAPPER} mark unused 1", 30)
            return self.exists() and self.read("state") == "on"

        self.on()
        until(served, 60, f"the driver serves {self.device}")

    def read(self, name: str) -> str:
        return self.guest.read(f"{self.path}/{name}")

    def count(self, name: str) -> int:
        return int(self.read(name))


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    parameters: str,
    *,
    swap: str = "1",
    **more: Any,
) -> Guest:
    """Boots a guest with an ext4 at /mnt and a disk "swap"."""
    name = more.get("name", "vm1")
    data = disk.ext4(session.directory / f"{name}-data.img", DISK_BYTES)
    area = disk.blank(session.directory / f"{name}-swap.img", SWAP_BYTES)
    guest = driver_vm(
        session,
        kernel,
        module,
        more.pop("tmem"),
        memory_bytes=MEMORY_BYTES,
        cpus=2,
        disks=[Disk("data", data), Disk("swap", area), *more.pop("disks", ())],
        files=programs(SWAPPER, DM, SPECIAL),
        **more,
    ).start()
    load(guest, f"swap={swap} {parameters}")
    return guest


def guest_state_has(guest: Guest, text: str) -> bool:
    return text in state(guest)


def torture(guest: Guest, rounds: int) -> None:
    done = guest.run(f"{SWAPPER} {seed()} {TORTURE_MIB} {rounds}", 600)
    assert done.status == 0, f"{done.text}\n{state(guest)}\n{stats(guest)}"


def drop_swap_cache(guest: Guest) -> None:
    """Frees the pages of the process that mark() has started."""

    def dropped() -> bool:
        # The swap cache has the pages until reclaim finds them again. The put ring has space for
        # some of them. A write fails if reclaim finds fewer pages than it asks for.
        guest.run(
            f"for i in $(seq {MARKED_MIB}); do echo 1M >{GROUP}/memory.reclaim; sleep 0.1; done", 60
        )
        return int(guest.read(f"{GROUP}/memory.current")) < MARKED_MIB * MIB // 8

    until(dropped, 60, "the pages leave the swap cache")


def mark(guest: Guest, text: str) -> tuple[Job, int]:
    """Starts a process whose pages are swapped out, and not in memory.

    Returns its job and its process number.
    """
    guest.sh(
        f"mountpoint -q {CGROUPS} || mount -t cgroup2 cgroup {CGROUPS};"
        f" echo +memory >{CGROUPS}/cgroup.subtree_control; mkdir -p {GROUP}"
    )
    command = f"echo $$ >{GROUP}/cgroup.procs; exec {SWAPPER} mark {text} {MARKED_MIB}"
    job = guest.start(command, 600)
    until(lambda: b"marked" in job.stdout() or job.done(), 120, "the pages are swapped out")
    assert not job.done(), job.wait().text

    drop_swap_cache(guest)
    return job, int(guest.read(f"{GROUP}/cgroup.procs"))


class Region(ctypes.Structure):
    """struct page_region of the kernel: pages from `start` to `end`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "end", "categories")]


def present(pagemap: BinaryIO, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Returns ranges of addresses that are in memory: most of the daemon's address space is not.

    The kernel must be 6.7 or newer.
    """
    regions = (Region * REGIONS)()
    while first < end:
        scan = bytearray(
            struct.pack(
                "<12Q", 96, 0, first, end, 0, ctypes.addressof(regions), REGIONS, 0,
                0, PAGE_IS_PRESENT, 0, PAGE_IS_PRESENT,
            )
        )  # fmt: skip
        found = fcntl.ioctl(pagemap, PAGEMAP_SCAN, scan)
        yield from ((region.start, region.end) for region in regions[:found])
        first = struct.unpack("<12Q", scan)[4]


def pool_pages(daemon: Daemon, text: bytes) -> int:
    """Returns how often a text is in the memory of the daemon's pool."""
    found = 0
    proc = Path(f"/proc/{daemon.process.pid}")
    with (
        open(proc / "mem", "rb", 0) as memory,
        open(proc / "pagemap", "rb", 0) as pagemap,
    ):
        for line in (proc / "maps").read_text().splitlines():
            where, permissions, _, _, _, *name = line.split(maxsplit=5)
            first, end = (int(part, 16) for part in where.split("-"))
            guest = "memory-backend" in "".join(name)
            if not permissions.startswith("rw") or guest or end - first < POOL_BYTES_MIN:
                continue
            for begin, behind in present(pagemap, first, end):
                memory.seek(begin)
                left = behind - begin
                while left and (part := memory.read(min(left, 1 << 20))):
                    found += part.count(text)
                    left -= len(part)
    return found


def test_anonymous_memory_is_right_and_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = start_daemon(session)
    guest = boot(session, kernel, module, "verify_every=0", tmem=Tmem(daemon.socket("vm1")))
    swap = Swap(guest)
    swap.serve()
    assert int(guest.read(f"{SYSFS}/hooks"), 0) & HOOK_BITS["swap"]
    torture(guest, 600)
    figures = stats(guest)
    assert swap.count("puts") > 1000 and swap.count("hits") > 500, figures
    assert figures["mismatches"] == 0 and swap.read("state") == "on"

    # The module can be unloaded and loaded again while the swap area is used.
    job = guest.start(f"{SWAPPER} {seed()} {TORTURE_MIB} 600", 600)
    for _ in range(3):
        guest.sh("rmmod virtio_tmem", 120)
        guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0 swap=1")
        wait_state(guest, "on")
    done = job.wait()
    assert done.status == 0, done.text
    until(lambda: swap.exists() and swap.read("state") == "on", 60, "the swap area is served")

    # Each hit is compared with the disk.
    set_parameter(guest, "verify_every", "1")
    before = stats(guest)
    torture(guest, 200)
    grown = growth(before, stats(guest))
    assert grown["verified_hits"] > 100 and not grown["mismatches"], grown
    set_parameter(guest, "verify_every", "0")

    # swapoff reads all pages, and another swap area on the device has none of them.
    job, pid = mark(guest, "swapped_off")
    swap.off()
    until(lambda: not swap.exists(), 30, "the driver forgets the swap area")
    guest.sh(f"kill {pid}")
    job.wait()
    swap.serve()
    torture(guest, 100)
    swap.off()

    # A file system on the device is served, even if it is mounted at once.
    guest.sh(f"mke2fs -q -b {PAGE} {swap.device} && mkdir /other && mount {swap.device} /other")
    Mount(guest, "/other").wait("on")
    check_cached(guest, write(guest, "/other/f"))


@pytest.mark.parametrize("without", ["", "swap"])
def test_freed_slots_leave_the_host(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """Without the hooks of freed slots, the bytes stay."""
    daemon = start_daemon(session)
    guest = boot(session, kernel, test_module, "verify_every=0", tmem=Tmem(daemon.socket("vm1")))
    swap = Swap(guest)
    swap.serve()
    set_parameter(guest, "test_hooks_off", without)
    text = "residue0123456789"
    job, pid = mark(guest, text)
    settle(guest)
    pages = MARKED_MIB * MIB // PAGE
    held = swap.count("held_pages")
    assert held > pages * 3 // 4, f"{held} of {pages} pages: {stats(guest)}"
    assert pool_pages(daemon, text.encode()) > held // 2
    guest.sh(f"kill -9 {pid}")
    job.wait()
    time.sleep(scaled(FREED_SECONDS))
    left = swap.count("held_pages"), pool_pages(daemon, text.encode())
    if without:
        assert min(left) > held // 2
    else:
        assert left == (0, 0), stats(guest)
        assert stats(guest)["flushes_dropped"] == 0


def test_page_of_a_slot_freed_during_its_put_leaves_the_host(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The process ends while its pages are in the put ring."""
    daemon = start_daemon(session)
    guest = boot(session, kernel, module, "verify_every=0", tmem=Tmem(daemon.socket("vm1")))
    swap = Swap(guest)
    swap.serve()
    text = "inflight0123456789"
    daemon.pause()
    job, pid = mark(guest, text)
    guest.sh(f"kill -9 {pid}")
    job.wait()
    time.sleep(2)
    daemon.resume()
    time.sleep(scaled(FREED_SECONDS))
    assert (swap.count("held_pages"), pool_pages(daemon, text.encode())) == (0, 0), stats(guest)


class MarkedGuest:
    """A guest with a swap area whose host is a Liar, and a process whose pages the host has."""

    def __init__(self, session: Session, kernel: Kernel, module: Path, liar: Liar) -> None:
        self.liar = liar
        self.guest = boot(session, kernel, module, "verify_every=0", tmem=Tmem(liar.path))
        Swap(self.guest).serve()

    def mark(self, text: str) -> None:
        self.text = text
        self._job, self._pid = mark(self.guest, text)

    def held(self, more: str = "") -> int:
        """Returns the number of pages at the host, or only of those with `more` after the text."""
        return self.liar.pages_with((self.text + more).encode())

    def end(self) -> None:
        self.guest.sh(f"kill -9 {self._pid}")
        self._job.wait()

    def free_odd(self) -> None:
        """Has the process free every second page."""
        self.guest.sh(f"kill -USR1 {self._pid}")
        until(lambda: b"freed" in self._job.stdout(), 60, "the pages are freed")


@pytest.mark.parametrize("without", ["", "lost"])
def test_pool_whose_flush_the_host_refuses_is_emptied(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    with Liar(session.directory / "liar") as liar:
        marked = MarkedGuest(session, kernel, test_module, liar)
        marked.mark("refused0123456789")
        settle(marked.guest)
        held = marked.held()
        assert held > MARKED_MIB * MIB // PAGE // 2, stats(marked.guest)
        set_parameter(marked.guest, "test_blocks_without", without)
        liar.lie = "flush-refused"
        marked.end()
        time.sleep(scaled(FREED_SECONDS))
        assert liar.lies_told
        left = marked.held()
        assert left > held // 2 if without else not left, stats(marked.guest)


@pytest.mark.parametrize("without", ["", "behind"])
def test_pool_whose_slots_cannot_be_erased_in_time_is_emptied(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """The host answers no flush, and the freed slots are no neighbours."""
    with Liar(session.directory / "liar") as liar:
        marked = MarkedGuest(session, kernel, test_module, liar)
        marked.mark("behind0123456789")
        settle(marked.guest)
        held = marked.held("odd")
        assert held > MARKED_MIB * MIB // PAGE // 4, stats(marked.guest)
        set_parameter(marked.guest, "test_blocks_without", without)
        liar.silent = frozenset({T_FLUSH})
        marked.free_odd()
        time.sleep(scaled(FREED_SECONDS))
        left = marked.held("odd")
        assert left > held // 2 if without else not left, stats(marked.guest)


def test_flushes_wait_for_room_in_the_virtqueue(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    with Liar(session.directory / "liar") as liar:
        marked = MarkedGuest(session, kernel, test_module, liar)
        marked.mark("room0123456789")
        settle(marked.guest)
        held, odd = marked.held(), marked.held("odd")
        assert odd > MARKED_MIB * MIB // PAGE // 4, stats(marked.guest)
        # The slots may take too long for the driver, which then empties the pool.
        set_parameter(marked.guest, "test_blocks_without", "behind")
        set_parameter(marked.guest, "inject_vq_full", "2")
        marked.free_odd()
        until(lambda: not marked.held("odd"), 120, "the freed pages leave the host")
        assert stats(marked.guest)["flushes_dropped"] == 0
        # The pool was not emptied. A few pages may have been swapped in.
        assert marked.held() > (held - odd) // 2, stats(marked.guest)


@pytest.mark.parametrize("without", ["", "orphan"])
def test_page_that_the_host_stores_after_its_flush_leaves_the_host(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """The host answers the flush before the put of the page."""
    with Liar(session.directory / "liar") as liar:
        marked = MarkedGuest(session, kernel, test_module, liar)
        set_parameter(marked.guest, "test_blocks_without", without)
        liar.silent = frozenset({T_PUT, T_FLUSH})
        marked.mark("orphan0123456789")
        flushes = stats(marked.guest)["requests_flush"]
        marked.end()
        until(
            lambda: stats(marked.guest)["requests_flush"] > flushes, 30, "the driver erases slots"
        )
        liar.reverse = True
        liar.silent = frozenset()
        time.sleep(scaled(FREED_SECONDS))
        assert liar.reversed
        left = marked.held()
        assert left > 0 if without else not left, stats(marked.guest)


@pytest.mark.parametrize("without", ["", "private"])
def test_pages_are_not_shared_with_other_vms(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """Two VMs of a trust domain have equal pages. They are shared if the pool is not private."""
    daemon = start_daemon(
        session, Tenant("vm1", trust_domain="all"), Tenant("vm2", trust_domain="all")
    )
    guests = []
    for name in ("vm1", "vm2"):
        parameters = f"verify_every=0 test_blocks_without={without}"
        tmem = Tmem(daemon.socket(name))
        guest = boot(session, kernel, test_module, parameters, tmem=tmem, name=name)
        swap = Swap(guest)
        swap.serve()
        mark(guest, "equal")
        settle(guest)
        assert swap.count("held_pages") > MARKED_MIB * MIB // PAGE // 2, stats(guest)
        guests.append(guest)
    time.sleep(2)
    shared = daemon.stats()["pool"]["shared_pages"]
    assert shared > 1000 if without else shared < 100, daemon.stats()


def test_swap_on_a_logical_volume_is_right_and_cached(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The disk cannot be drained, and writes of the swap area were missed."""
    daemon = start_daemon(session)
    modules = there(kernel, *CRYPTO, "dm_mod", "dm_crypt")
    guest = boot(
        session,
        kernel,
        module,
        "verify_every=1",
        tmem=Tmem(daemon.socket("vm1")),
        modules=modules,
    )
    device, sectors = Swap(guest).device, SWAP_BYTES // 512
    volume = Swap(guest, guest.sh(f"{DM} volume 0 {sectors} linear '{device} 0'").strip())
    guest.sh("rmmod virtio_tmem", 120)
    volume.on()
    job = guest.start(f"{SWAPPER} {seed()} {TORTURE_MIB} 200", 600)
    until(lambda: guest.read("/proc/swaps").split()[-2] != "0", 120, "the guest swaps")
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=1 swap=1")
    done = job.wait()
    assert done.status == 0, done.text
    volume.off()
    volume.serve()
    torture(guest, 300)
    figures = stats(guest)
    assert volume.count("puts") > 1000 and volume.count("hits") > 300, figures
    assert not figures["mismatches"] and not figures["verify_mismatches"], figures
    text = "residue0123456789"
    job, pid = mark(guest, text)
    settle(guest)
    assert pool_pages(daemon, text.encode()) > MARKED_MIB * MIB // PAGE // 2
    guest.sh(f"kill -9 {pid}")
    job.wait()
    time.sleep(scaled(FREED_SECONDS))
    assert not pool_pages(daemon, text.encode()), stats(guest)
    volume.off()

    # dm-crypt encrypts what the disk gets, and the driver would show the clear text to the host.
    until(lambda: not volume.exists(), 30, "the driver forgets the volume")
    target = f"aes-xts-plain64 {CRYPT_KEY} 0 {device} 0"
    guest.sh(f"{DM} volume 0 {sectors} crypt '{target}'")
    volume.on()
    guest.run(f"timeout 10 {SWAPPER} mark refused 4", 30)
    until(partial(guest_state_has, guest, "uses the crypt target"), 30, "dm-crypt is refused")
    assert volume.count("puts") == 0 and "is not served" not in guest.sh("dmesg")


def test_swap_areas_that_are_not_served(session: Session, kernel: Kernel, module: Path) -> None:
    modules = there(kernel, "loop", "zram", "brd")
    daemon = start_daemon(session)
    guest = boot(
        session,
        kernel,
        module,
        "verify_every=0",
        tmem=Tmem(daemon.socket("vm1")),
        modules=modules,
    )
    guest.sh(f"truncate -s 64M {WHERE}/loop && losetup /dev/loop0 {WHERE}/loop")
    refused = {"/dev/loop0": "the disk is a loop device"}
    # Before 6.3, the kernel writes to such disks without a bio. zram needs a module for its
    # algorithm.
    if kernel.version < (6, 3):
        modules = []
    if "zram" in modules and not guest.run("echo 64M >/sys/block/zram0/disksize").status:
        refused["/dev/zram0"] = "the disk is md, multipath or in memory"
    if "brd" in modules:
        refused["/dev/ram0"] = "the disk is md, multipath or in memory"
    for path, reason in refused.items():
        number = guest.read(f"/sys/block/{Path(path).name}/dev")
        guest.sh(f"mkswap {path} >/dev/null && swapon {path}")
        guest.run(f"timeout 10 {SWAPPER} mark refused 4", 30)
        text = f"swap-{number}-0 is refused: {reason}"
        until(partial(guest_state_has, guest, text), 30, f"{path} is refused")
        guest.sh(f"swapoff {path}", 60)
        until(lambda: "refused" not in state(guest), 30, f"{path} is forgotten")

    assert stats(guest)["mismatches"] == 0


@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_swap_files_are_right_and_cached(
    session: Session, kernel: Kernel, module: Path, fs: str
) -> None:
    daemon = start_daemon(session)
    image = disk.find(fs).make(session.directory / "files.img", SWAP_BYTES)
    guest = boot(
        session,
        kernel,
        module,
        "",
        tmem=Tmem(daemon.socket("vm1")),
        disks=[Disk("files", image)],
        modules=there(kernel, *disk.find(fs).modules),
    )
    guest.mount("files", FILES, fs)
    file = Swap(guest, f"{FILES}/swap0")
    file.make(FILE_MIB)
    guest.sh("rmmod virtio_tmem", 120)
    file.on()
    base = guest.start(f"exec {SWAPPER} mark base {BASE_MIB}", 600)
    until(lambda: b"marked" in base.stdout() or base.done(), 300, "the slots are in use")
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0 swap=1")
    wait_state(guest, "on")

    text = "residue0123456789"
    pages = MARKED_MIB * MIB // PAGE
    guest.run(f"timeout 5 {SWAPPER} mark unused 1", 30)
    until(file.exists, 30, "the driver serves the file")
    guest.run(f"timeout 5 {SWAPPER} mark unused 1", 30)
    # The kernel moves pages to other frames meanwhile, because little memory is free.
    job, pid = mark(guest, text)
    settle(guest)
    held = file.count("held_pages")
    assert held > pages * 9 // 10, f"{held} of {pages} pages: {stats(guest)}"
    assert pool_pages(daemon, text.encode()) > held // 2
    guest.sh(f"kill -9 {pid}")
    job.wait()
    time.sleep(scaled(FREED_SECONDS))
    assert not pool_pages(daemon, text.encode()), stats(guest)
    guest.sh("kill -9 $(pidof swapper)")
    base.wait()
    torture(guest, 400)
    figures = stats(guest)
    assert file.count("puts") > 1000 and file.count("hits") > 300, figures
    assert not figures["mismatches"] and file.read("state") == "on", figures

    # Two swap files of a file system are two areas. The kernel fills the first one before it uses
    # the other. Each hit is compared with the disk.
    file.off()
    first = Swap(guest, f"{FILES}/swap1")
    first.make(FIRST_MIB)
    first.on()
    file = Swap(guest, file.device, 1)
    file.on()
    set_parameter(guest, "verify_every", "1")
    before, puts = stats(guest), first.count("puts")
    torture(guest, 200)
    grown = growth(before, stats(guest))
    assert grown["verified_hits"] > 100 and not grown["verify_mismatches"], grown
    assert first.count("puts") > puts and file.count("puts") > 100, stats(guest)
    file.off()
    first.off()
    time.sleep(scaled(FREED_SECONDS))
    assert file.count("held_pages") == first.count("held_pages") == 0
    guest.sh(f"umount {FILES}")
    until(lambda: not file.exists() and not first.exists(), 30, "the driver forgets the files")


@pytest.mark.parametrize("without", ["", "slots"])
def test_slots_of_a_merged_bio_that_are_no_neighbours(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """Blocks that are neighbours on the disk are not neighbours in the swap file."""
    if without and kernel.version < (7, 3):
        pytest.skip("the kernel does not merge bios of swap")
    daemon = start_daemon(session)
    image = disk.interleaved_fat(session.directory / "files.img", "SWAP", FILE_MIB * MIB)
    guest = boot(
        session,
        kernel,
        test_module,
        f"verify_every=0 test_blocks_without={without}",
        tmem=Tmem(daemon.socket("vm1")),
        disks=[Disk("files", image)],
        modules=there(kernel, *disk.find("vfat").modules),
    )
    guest.mount("files", FILES, "vfat")
    file = Swap(guest, f"{FILES}/SWAP")
    file.serve()
    done = guest.run(f"{SWAPPER} {seed()} {TORTURE_MIB} 600", 600)
    if without:
        # A page of another slot may also kill the program.
        assert "SWAP MISMATCH" in done.text or done.status == -signal.SIGSEGV, done.text
    else:
        assert done.status == 0, f"{done.text}\n{stats(guest)}"
    assert file.count("hits") > 100, stats(guest)


@pytest.mark.parametrize("without", ["", "bio_queue"])
def test_writes_of_slots_without_the_hook_of_submit_bio_are_seen(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """A page keeps its slot, so a changed page is written to a slot whose copy the host has."""
    daemon = start_daemon(session)
    guest = boot(
        session,
        kernel,
        test_module,
        f"verify_every=0 test_blocks_without={without}",
        tmem=Tmem(daemon.socket("vm1")),
    )
    swap = Swap(guest)
    swap.serve()
    job, pid = mark(guest, "changed0123456789")
    settle(guest)
    assert swap.count("held_pages") > MARKED_MIB * MIB // PAGE * 3 // 4, stats(guest)

    def change(version: int) -> None:
        """Has the process check, change and swap out its pages."""
        guest.sh(f"kill -USR2 {pid}")
        done = f"changed {version}".encode()
        until(lambda: done in job.stdout() or job.done(), 120, "the pages are changed")

    set_parameter(guest, "test_hooks_off", "bio")
    change(1)
    drop_swap_cache(guest)
    set_parameter(guest, "test_hooks_off", "")
    change(2)
    assert (b"SWAP MISMATCH" in job.stdout()) is bool(without), f"{job.stdout()!r} {stats(guest)}"
    assert job.done() is bool(without)


@pytest.mark.parametrize("without", ["", "swap_file"])
def test_reads_of_a_swap_file_get_no_old_byte(
    session: Session, kernel: Kernel, test_module: Path, without: str
) -> None:
    """The pool has pages of the file when the kernel swaps to it."""
    daemon = start_daemon(session)
    guest = boot(session, kernel, test_module, "verify_every=0", tmem=Tmem(daemon.socket("vm1")))
    file = Swap(guest, f"{WHERE}/swap")
    file.make(READ_MIB)
    file.serve()
    set_parameter(guest, "test_blocks_without", without)
    assert evict(guest, [file.device])["index_pages"] > READ_MIB * MIB // PAGE // 2
    guest.sh(f"{SPECIAL} swap-out {READ_MIB * MIB // 2}", 60)
    assert file.read("state") == "on"
    file.off()
    done = guest.run(f"{SPECIAL} same {file.device}", 60)
    assert ("MISMATCH" in done.text) is bool(without), f"{done.text}\n{stats(guest)}"
    assert done.status == bool(without)


@pytest.mark.parametrize(
    ("device", "parameters", "served"),
    [("off", "", False), ("on", "", True), ("on", "swap=0", False), ("off", "swap=1", True)],
)
def test_swap_is_served_only_if_an_administrator_wants_it(
    session: Session,
    kernel: Kernel,
    module: Path,
    *,
    device: str,
    parameters: str,
    served: bool,
) -> None:
    """The host's administrator sets a property of the device, the guest's one a parameter."""
    swap_image = disk.blank(session.directory / "swap.img", SWAP_BYTES)
    data = disk.ext4(session.directory / "data.img", DISK_BYTES)
    guest = driver_guest(
        session,
        kernel,
        module,
        Tmem(start_daemon(session).socket("vm1"), properties={"swap": device}),
        parameters=f"verify_every=0 {parameters}",
        disks=[Disk("data", data), Disk("swap", swap_image)],
        files=programs(SWAPPER),
    )
    swap = Swap(guest)
    assert not int(guest.read(f"{SYSFS}/hooks"), 0) & HOOK_BITS["swap"]
    if served:
        swap.serve()
    else:
        swap.on()
        guest.run(f"timeout 10 {SWAPPER} mark off 4", 30)
        assert not swap.exists()
    assert bool(int(guest.read(f"{SYSFS}/hooks"), 0) & HOOK_BITS["swap"]) is served


def test_device_without_swap_gets_no_page_of_a_served_swap_area(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The first device has swap=on. Then the driver uses the other one."""
    daemon = start_daemon(session, "vm1", "vm2")
    second = f"socket,id=tmem2,path={daemon.socket('vm2')},reconnect-ms=100"
    guest = boot(
        session,
        kernel,
        module,
        "verify_every=0",
        swap="-1",
        tmem=Tmem(daemon.socket("vm1"), properties={"swap": "on"}),
        arguments=["-chardev", second, "-device", "vhost-user-tmem-pci,chardev=tmem2"],
    )
    swap = Swap(guest)
    swap.serve()
    (first,), (other,) = devices(guest)
    guest.sh(f"echo {first} >{DRIVER}/unbind && echo {other} >{DRIVER}/bind", 60)
    wait_state(guest, "on")
    until(lambda: not swap.exists(), 30, "the driver forgets the swap area")
    mark(guest, "unwanted0123456789")
    settle(guest)
    assert not swap.exists() and not pool_pages(daemon, b"unwanted0123456789")


def test_host_without_private_pools_gets_no_page(
    session: Session, kernel: Kernel, module: Path
) -> None:
    with Liar(session.directory / "liar") as liar:
        liar.lie = "older"
        guest = boot(session, kernel, module, "verify_every=0", tmem=Tmem(liar.path))
        swap = Swap(guest)
        swap.on()

        def blocked() -> bool:
            guest.run(f"timeout 5 {SWAPPER} mark unused 1", 30)
            return swap.exists() and "the host has no private pools" in swap.read("state")

        until(blocked, 60, "the swap area is blocked")
        assert swap.count("puts") == 0
        # File systems are served as before.
        assert state(guest) == "on"


def test_admission_filter_does_not_refuse_pages_of_a_swap_area(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A slot gets other pages all the time, so the filter would learn nothing from them."""
    daemon = session.daemon("vm1", pool_size="16MiB")
    daemon.start()
    guest = boot(session, kernel, module, "verify_every=0", tmem=Tmem(daemon.socket("vm1")))
    Swap(guest).serve()
    before = stats(guest)
    torture(guest, 200)
    grown = growth(before, stats(guest))
    assert grown["misses_host"] > 1000, grown
    # The filter may refuse pages of files.
    assert grown["puts_skipped_admission"] < grown["puts"] // 20, grown
