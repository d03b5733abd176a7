# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Loads of one guest, measured in turns in a guest with the pool and in one without it.

Both guests have the same RAM and equal, throttled disks. Each class states its parameters.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.vm import disks
from bench.vm.guests import LOADS, SQLITE, Box, Lab, Spec, Use
from bench.vm.machine import DATA, PAGE_BYTES
from bench.vm.results import Measured
from harness import disk
from harness.disk import Disk
from harness.paths import HarnessError
from harness.vm import MIB

RAM_BYTES = 192 * MIB
SET_BYTES = 288 * MIB  # size of the file, 1.5 times the RAM; RAM and pool together hold it
POOL_BYTES = 512 * MIB
STREAM_BYTES = 448 * MIB
WITH, WITHOUT = "with", "without"
DISK = "ext4 on a disk of 3,000 IOPS and 125 MB/s"
CONTENTS = "pages are all different, and lz4 halves them"


class Workload:
    """A load that several arms run in turns. A subclass measures one arm after the other."""

    key: str
    title: str
    arms: tuple[str, ...] = (WITHOUT, WITH)
    repetitions = 7
    seconds = 60.0  # estimate for all repetitions, on 2 processors
    parameters: dict[str, Any]
    # The figure that is compared; "seconds" (less is better) or a rate.
    figure = "seconds"

    def prepare(self, lab: Lab) -> None:
        """Makes images and boots guests."""
        raise NotImplementedError

    def measure(self, arm: str, repetition: int) -> Measured:
        """Measures one arm once, and returns its figures."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises if a guest has read a wrong byte."""

    def finish(self) -> None:
        """Ends the workload's other processes, after its guests and daemons have ended."""


class Paired(Workload):
    """A load in two guests, one with the pool and one without."""

    set_bytes = SET_BYTES
    ram_bytes = RAM_BYTES
    writable = False
    sqlite = False
    throttle: disk.Throttle | None = disk.CLOUD_VOLUME
    sum_of: str | None = disks.SET  # file whose checksum is compared at the end
    pooled: tuple[str, ...] = (WITH,)  # arms whose guests have the pool
    files: Mapping[str, Path] = {}  # more programs in the guests

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.parameters = {
            "RAM": f"{self.ram_bytes // MIB} MiB",
            "pool": f"{POOL_BYTES // MIB} MiB",
            "disk": DISK if self.throttle else "ext4, in the host's page cache",
            **self.details(),
        }

    def ram_of(self, arm: str) -> int:
        """Returns the RAM of an arm's guests."""
        return self.ram_bytes

    def details(self) -> dict[str, Any]:
        return {"file": f"{self.set_bytes // MIB} MiB; {CONTENTS}"}

    def image(self, lab: Lab) -> Path:
        name = f"set{self.set_bytes // MIB}"
        return lab.image(name, lambda path: disks.make_set_image(path, self.set_bytes))

    def prepare(self, lab: Lab) -> None:
        path = self.image(lab)
        if self.sum_of:
            self._sum = set_sum(path)
        loads = self.requests_by_name()
        if loads:
            requests = disks.make_loads_image(lab.directory / "loads.img", loads)
        daemon = lab.start_daemon(*self.pooled, pool_bytes=POOL_BYTES * len(self.pooled))
        for arm in self.arms:
            own = path
            if self.writable:
                own = lab.directory / f"{arm}.img"
                shutil.copyfile(path, own)
            images = [Disk("data", own, read_only=not self.writable, throttle=self.throttle)]
            if loads:
                images.append(Disk("loads", requests, read_only=True))
            spec = Spec(
                name=arm,
                ram_bytes=self.ram_of(arm),
                disks=tuple(images),
                daemon=daemon if arm in self.pooled else None,
                direct=self.throttle is not None,
                sqlite=self.sqlite,
                files=self.files,
            )
            box = lab.boot_guest(spec)
            box.mount_set(options="rw" if self.writable else "ro")
            if loads:
                box.mount_loads()
            self.boxes[arm] = box
            self.warm(box)
            box.settle()

    def requests_by_name(self) -> dict[str, str]:
        """Returns the requests of each repetition by their name, with those of the warm-up."""
        return {}

    def warm(self, box: Box) -> None:
        """Brings the guest into the state that all repetitions start from."""
        for _ in range(2):
            box.sh(f"cat {DATA}/{disks.SET} >/dev/null")

    def measure(self, arm: str, repetition: int) -> Measured:
        box = self.boxes[arm]
        self.prepare_repetition(box, repetition)
        box.settle()
        use = Use(box)
        out = self.act(box, repetition)
        return out | use.growth()

    def prepare_repetition(self, box: Box, repetition: int) -> None:
        """Prepares a repetition, outside of the measurement."""

    def act(self, box: Box, repetition: int) -> Measured:
        """Runs the load once and returns its figure."""
        raise NotImplementedError

    def check(self) -> None:
        if not self.sum_of:
            return
        for box in (self.boxes[arm] for arm in self.pooled if arm in self.boxes):
            found = box.sh(f"sha256sum {DATA}/{self.sum_of}").split()[0]
            if found != self._sum:
                raise HarnessError(f"{self.key}, {box.vm.name}: the file's SHA-256 is wrong")


def set_sum(path: Path) -> str:
    """Returns the SHA-256 of the file that the guests read (the set), from its ext4 image."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in disks.blocks(path):
            file.seek(block * PAGE_BYTES)
            digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()


PSYNC, URING = "psync", "io_uring"


class SequentialReread(Paired):
    """fio reads the file from beginning to end, again and again."""

    block_bytes = 128 << 10

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.engine = PSYNC if depth == 1 else URING
        self.key = f"seq_reread_{depth}"
        self.title = f"sequential re-read, {self.engine}, depth {depth}"
        self.seconds = 45
        super().__init__()

    def details(self) -> dict[str, Any]:
        return super().details() | {
            "load": f"fio, read, 128 KiB, {self.engine}, depth {self.depth}",
        }

    def act(self, box: Box, repetition: int) -> Measured:
        report = box.run_fio(
            f"--rw=read --bs={self.block_bytes} --filename={DATA}/{disks.SET} --gtod_reduce=1 "
            f"--ioengine={self.engine} --iodepth={self.depth}"
        )
        return {"seconds": _seconds(report, "read", self.set_bytes // self.block_bytes)}


def _seconds(report: dict[str, Any], kind: str, requests: int) -> float:
    """Returns the time of fio's job. Raises if the job did not make all requests."""
    if (made := report[kind]["total_ios"]) != requests:
        raise HarnessError(f"fio made {made} {kind}s, not {requests}")
    return float(report[kind]["runtime"] / 1000)


WARM_UPS = (-2, -1)


def load_name(repetition: int, thread: int = 0) -> str:
    """Returns the name of the file with the requests of a repetition, for one thread of fio."""
    return f"load{repetition}-{thread}"


def fio_trace(engine: str, depth: int, *names: str) -> str:
    """Returns fio's arguments to run the requests of files, with one thread for each file.

    Each file has a job of its own: Debian's fio 3.33 crashes if several jobs share a list of files.
    """
    options = f"--replay_no_stall=1 --gtod_reduce=1 --ioengine={engine} --iodepth={depth}"
    jobs = [f"--name={name} --read_iolog={LOADS}/{name}" for name in names]
    return " ".join([options, "--group_reporting", *jobs])


class RandomReread(Paired):
    """fio reads blocks of 4 KiB in a Zipf distribution.

    With io_uring, one thread has `depth` requests in flight. With psync, each of `depth` threads
    has one: glibc's POSIX AIO would run the requests of a file one after the other.
    """

    theta = 0.6
    reads = 20_000

    def __init__(self, depth: int = 1, engine: str = PSYNC) -> None:
        self.depth = depth
        self.engine = engine
        self.threads = depth if engine == PSYNC else 1
        self.key = f"rand_reread_{engine}" if engine == URING else f"rand_reread_{depth}"
        self._width = f"{self.threads} threads" if self.threads > 1 else f"depth {depth}"
        self.title = f"Zipf random re-read, {engine}, {self._width}"
        if self.reads % self.threads:
            raise HarnessError(f"{self.threads} threads cannot share {self.reads} reads evenly")
        self.seconds = 65
        self.zipf = disks.Zipf(self.set_bytes // PAGE_BYTES, self.theta)
        super().__init__()

    def details(self) -> dict[str, Any]:
        return super().details() | {
            "load": f"fio, {self.reads:,} reads of 4 KiB in each repetition, {self.engine}, "
            + self._width,
            "distribution": f"Zipf, exponent {self.theta}, popular pages spread over the file",
        }

    def warm(self, box: Box) -> None:
        box.sh(f"cat {DATA}/{disks.SET} >/dev/null")
        for number in WARM_UPS:
            self.act(box, number)

    def requests_by_name(self) -> dict[str, str]:
        path = f"{DATA}/{disks.SET}"
        out = {}
        for number in (*WARM_UPS, *range(self.repetitions)):
            blocks = self.zipf.draw(self.reads, str(number))
            for thread in range(self.threads):
                out[load_name(number, thread)] = disks.trace(
                    path,
                    PAGE_BYTES,
                    blocks[thread :: self.threads],
                    str(number),
                )
        return out

    def act(self, box: Box, repetition: int) -> Measured:
        names = [load_name(repetition, thread) for thread in range(self.threads)]
        trace = fio_trace(self.engine, self.depth // self.threads, *names)
        return {"seconds": _seconds(box.run_fio(trace), "read", self.reads)}


ALL_IN_RAM = "rand_reread_all_in_ram"


class AllInRam(RandomReread):
    """Random re-read in a guest whose RAM holds the whole file: the bound of any cache."""

    arms = (WITHOUT,)
    ram_bytes = SET_BYTES + 160 * MIB
    repetitions = 5

    def __init__(self) -> None:
        super().__init__()
        self.key = ALL_IN_RAM
        self.title = "Zipf random re-read, all in RAM"
        self.seconds = 20


class Oltp(Paired):
    """SQLite runs the transactions of sysbench's OLTP workloads on a table of 2 times the RAM."""

    figure = "tps"
    sqlite = True
    writable = True
    set_bytes = 2 * RAM_BYTES
    sum_of = None
    count = 400  # transactions of a repetition

    def __init__(self, *, writes: bool) -> None:
        self.writes = writes
        self.key = "oltp_rw" if writes else "oltp_ro"
        self.title = "SQLite OLTP, read-write" if writes else "SQLite OLTP, read-only"
        self.seconds = 90
        super().__init__()

    def details(self) -> dict[str, Any]:
        mix = "10 point and 4 range reads of 100 rows"
        if self.writes:
            mix += ", 2 updates, a delete and an insert; WAL, synchronous=FULL"
        return {
            "database": f"SQLite of Debian 12, {self.set_bytes // MIB} MiB, with the table and "
            "the transactions of sysbench's OLTP workloads; neither sysbench nor a database server "
            "runs",
            "load": f"{self.count} transactions in each repetition, one connection, cache of 8 MiB",
            "transaction": mix,
            "distribution": "uniform",
        }

    def image(self, lab: Lab) -> Path:
        return lab.image("database", lambda path: disks.make_database(path, self.set_bytes))

    def warm(self, box: Box) -> None:
        for _ in range(2):
            box.sh(f"cat {DATA}/db >/dev/null")
        self.act(box, -1)

    def requests_by_name(self) -> dict[str, str]:
        return {
            load_name(number): disks.transactions(
                self.set_bytes // disks.ROW_BYTES, self.count, number, writes=self.writes
            )
            for number in range(-1, self.repetitions)
        }

    def act(self, box: Box, repetition: int) -> Measured:
        began = time.monotonic()
        box.sh(f"{SQLITE} -bail {DATA}/db <{LOADS}/{load_name(repetition)} >/dev/null")
        return {"tps": self.count / (time.monotonic() - began)}

    def check(self) -> None:
        box = self.boxes[WITH]
        found = box.sh(f"echo 'PRAGMA quick_check;' | {SQLITE} {DATA}/db").strip()
        if found != "ok":
            raise HarnessError(f"{self.key}, {box.vm.name}: the database is damaged: {found}")


class Stream(Paired):
    """fio reads a file once, whose pages are neither in RAM nor in the pool."""

    set_bytes = STREAM_BYTES
    repetitions = 5

    def __init__(self, *, fast: bool = False) -> None:
        self.fast = fast
        self.key = "stream_fast" if fast else "stream"
        self.title = "stream, disk without a limit" if fast else "stream that is never read again"
        self.throttle = None if fast else disk.CLOUD_VOLUME
        self.seconds = 35 if fast else 65
        super().__init__()

    def details(self) -> dict[str, Any]:
        return super().details() | {"load": "fio, read, 128 KiB, psync, depth 1"}

    def warm(self, box: Box) -> None:
        self.act(box, -1)

    def prepare_repetition(self, box: Box, repetition: int) -> None:
        # Without a mount, the driver drops the file system's pages from the pool.
        box.sh(f"umount {DATA}")
        box.mount_set()

    def act(self, box: Box, repetition: int) -> Measured:
        report = box.run_fio(
            f"--rw=read --bs=128k --filename={DATA}/{disks.SET} --gtod_reduce=1 --ioengine=psync"
        )
        return {"seconds": _seconds(report, "read", self.set_bytes // (128 << 10))}


class Write(Paired):
    """fio overwrites random blocks of a file whose pages are in RAM and pool."""

    writable = True
    writes = 6000
    block_bytes = 16 << 10
    sum_of = None

    def __init__(self) -> None:
        self.key = "write"
        self.title = "random overwrites"
        self.seconds = 60
        super().__init__()

    def details(self) -> dict[str, Any]:
        return super().details() | {
            "load": f"fio, randwrite, {self.writes} blocks of 16 KiB, psync, fsync at the end"
        }

    def act(self, box: Box, repetition: int) -> Measured:
        report = box.run_fio(
            f"--rw=randwrite --bs={self.block_bytes} --filename={DATA}/{disks.SET} --ioengine=psync"
            f" --number_ios={self.writes} --norandommap --randrepeat=0 --randseed={repetition + 10}"
            " --end_fsync=1 --gtod_reduce=1"
            " --refill_buffers --buffer_compress_percentage=50"
        )
        return {"seconds": _seconds(report, "write", self.writes)}

    def check(self) -> None:
        box = self.boxes[WITH]
        compare_with_disk(box, f"sha256sum {DATA}/{disks.SET}")


def compare_with_disk(box: Box, digest: str) -> None:
    """Raises if a command that prints a digest of files finds other bytes on the disk than before.

    Before, the guest reads RAM and pool. The disk stays mounted read-only.
    """
    cached = box.sh(f"sync; {digest}")
    # Read from the disk: a new mount has no pages in RAM and none in the pool.
    box.sh(f"umount {DATA}")
    box.guest.mount("data", DATA, options="ro")
    if box.sh(digest) != cached:
        raise HarnessError(f"{box.vm.name}: the guest read wrong bytes from RAM or the pool")
