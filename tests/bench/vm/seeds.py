# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Repeats published experiments with caches of this kind (docs/benchmarks/seeds.md).

Each load runs in three guests: without the pool, with the pool, and with additional RAM of the size
that the pool takes from the host. The program saves each workload after it has checked the bytes
that the guests read, so an interrupted run continues with the next one.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.vm import databases, disks, seeds_report
from bench.vm.build import Build
from bench.vm.databases import MARIADB, POSTGRESQL, Server, in_system, rate
from bench.vm.guests import Box, Lab, Use, fio_command, fio_report
from bench.vm.machine import BATCH_BYTES, DATA, SEED, write_contents
from bench.vm.proof import Parts, add_common_arguments, run_parts
from bench.vm.results import Measured
from bench.vm.rivals import Fleet
from bench.vm.workloads import CONTENTS, WITH, WITHOUT, Paired, compare_with_disk
from harness import disk
from harness.disk import CLOUD_VOLUME, Throttle
from harness.paths import ROOT, HarnessError, guest_program
from harness.vm import MIB

RESULTS = ROOT / "build/seeds.json"
MORE = seeds_report.MORE
SERVER_SECONDS = 3600  # longest time of a part with a database server
NETWORK_VOLUME = Throttle(iops=500, bytes_per_second=125_000_000)


class Seed(Paired):
    """A load of one guest that a published experiment used."""

    arms: tuple[str, ...] = (WITHOUT, WITH, MORE)
    writable = True
    sum_of = None

    def ram_of(self, arm: str) -> int:
        """Returns the RAM of an arm. Guests with and without the pool have booted before MORE."""
        ram_bytes = super().ram_of(arm)
        if arm != MORE:
            return ram_bytes
        spare = self._host_bytes(WITH) - self._host_bytes(WITHOUT)
        ram_bytes += -(-spare // MIB) * MIB
        self.parameters["RAM with the pool's host bytes"] = f"{ram_bytes // MIB} MiB"
        return ram_bytes

    def _host_bytes(self, arm: str) -> int:
        """Returns the host's memory of an arm: the guest, its disks' processes, and tmemd."""
        box = self.boxes[arm]
        return Fleet([box], box.spec.daemon).host_bytes()

    def measure(self, arm: str, repetition: int) -> Measured:
        found = super().measure(arm, repetition)
        return found | {"host_mib": self._host_bytes(arm) / MIB}

    def run_command(self, box: Box, name: str, command: str) -> tuple[str, Measured]:
        """Runs a command. Returns its output, its time, its disk reads, and its processor time."""
        use = Use(box)
        began = time.monotonic()
        text = box.sh(command)
        seconds = time.monotonic() - began
        grown = use.growth()
        return text, {name: seconds} | {
            f"{name}_{figure}": grown[figure] for figure in ("disk_reads", "guest_cpu_s")
        }


PATTERNS = {
    "write": "--rw=write --end_fsync=1",
    "rewrite": "--rw=write --end_fsync=1",
    "read": "--rw=read",
    "reread": "--rw=read",
    "random_read": "--rw=randread",
    "random_write": "--rw=randwrite --end_fsync=1",
}


class Iozone(Seed):
    """fio runs iozone's patterns one after the other. The first one creates the file."""

    figure = "read"
    # A system call of a native guest takes 10 µs, so sequential patterns have larger blocks than
    # iozone's default of 4 KiB.
    block_bytes = 128 << 10
    random_bytes = 4 << 10
    count = 6000  # requests of each random pattern

    def __init__(self, throttle: Throttle = CLOUD_VOLUME) -> None:
        self.throttle = throttle
        slow = throttle != CLOUD_VOLUME
        self.key = f"iozone_{throttle.iops}" if slow else "iozone"
        self.title = f"iozone's patterns, disk of {throttle.iops:,} IOPS"
        self.repetitions, self.seconds = (3, 380) if slow else (5, 260)
        super().__init__()
        self.parameters["disk"] = f"ext4 on a disk of {throttle.iops:,} IOPS and 125 MB/s"

    def details(self) -> dict[str, Any]:
        return super().details() | {
            "load": f"fio, psync, depth 1; sequential patterns with blocks of "
            f"{self.block_bytes >> 10} KiB, random ones with {self.count:,} blocks of "
            f"{self.random_bytes >> 10} KiB; fsync after writes",
        }

    def prepare_repetition(self, box: Box, repetition: int) -> None:
        box.sh(f"rm {DATA}/{disks.SET}; sync")

    def act(self, box: Box, repetition: int) -> Measured:
        out: Measured = {}
        for name, pattern in PATTERNS.items():
            at_random = name.startswith("random")
            block_bytes = self.random_bytes if at_random else self.block_bytes
            job = (
                f"--filename={DATA}/{disks.SET} --size={self.set_bytes} --bs={block_bytes} "
                f"--ioengine=psync --fallocate=none --gtod_reduce=1 --randseed={repetition + 10} "
                f"--refill_buffers --buffer_compress_percentage=50 {pattern}"
            )
            requests = self.set_bytes // block_bytes
            if at_random:
                requests = self.count
                job += f" --number_ios={requests} --norandommap --randrepeat=0"
            text, found = self.run_command(box, name, fio_command(job))
            report = fio_report(text)["write" if "write" in name else "read"]
            if report["total_ios"] != requests:
                raise HarnessError(f"{name}: fio made {report['total_ios']} of {requests} requests")
            # The time of fio's job does not contain the start of the program.
            out |= found | {name: report["runtime"] / 1000}
        return out

    def check(self) -> None:
        box = self.boxes[WITH]
        compare_with_disk(box, f"sha256sum {DATA}/{disks.SET}")


COMMAND = "tmem-guest"
FILE_BYTES = 8 << 10
FILES = 7680  # number of files in each of the three directories
FILES_TOGETHER = 128  # number of files in a subdirectory
DIRECTORIES = (1, 2, 3)
KEPT, DROPPED = "kept", "dropped"  # whether tmem-guest drops the other directories


def make_trees(path: Path) -> Path:
    """Creates an image with three directories of small files, and with tmem-guest."""
    source = random.Random(SEED)
    tree, scratch = path.with_suffix(".tree"), path.with_suffix(".scratch")
    tree.mkdir()
    for directory in DIRECTORIES:
        write_contents(scratch, FILES * FILE_BYTES, source)
        with scratch.open("rb") as data:
            for number in range(FILES):
                file = tree / f"{directory}/{number // FILES_TOGETHER}/{number % FILES_TOGETHER}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data.read(FILE_BYTES))
    scratch.unlink()
    write_contents(tree / "batch", BATCH_BYTES, source)
    shutil.copy2(guest_program(ROOT / "guest-driver/tools/tmem-guest.c"), tree / COMMAND)
    disk.ext4(path, len(DIRECTORIES) * FILES * FILE_BYTES + 128 * MIB, tree)
    shutil.rmtree(tree)
    return path


class Directories(Seed):
    """A guest reads three directories, and then the first one again. RAM holds two of them.

    In the guest with the pool, a second measurement drops the other directories with tmem-guest.
    """

    figure = KEPT
    key = "directories"
    title = "re-read of the first of three directories"
    seconds = 150
    repetitions = 5
    writable = False

    def details(self) -> dict[str, Any]:
        return {
            "files": f"{FILES:,} of {FILE_BYTES >> 10} KiB in each of three directories; "
            + CONTENTS,
            "load": "find -exec cat, after the page cache, inodes and dentries were dropped",
            "dropped": f"{COMMAND} drop for the second and the third directory, after each was "
            "read",
        }

    def image(self, lab: Lab) -> Path:
        return lab.image("directories", make_trees)

    def warm(self, box: Box) -> None:
        for _ in range(2):
            self._reread(box, KEPT)

    def act(self, box: Box, repetition: int) -> Measured:
        out = self._reread(box, KEPT)
        return out | (self._reread(box, DROPPED) if box.cached else {})

    def _reread(self, box: Box, name: str) -> Measured:
        """Returns the figures of the second reading of the first directory."""
        box.sh("echo 3 >/proc/sys/vm/drop_caches")
        box.settle()
        for directory in DIRECTORIES:
            box.sh(self._command(directory))
            if name == DROPPED and directory != DIRECTORIES[0]:
                box.sh(f"{DATA}/{COMMAND} drop {DATA}/{directory}")
        box.settle()
        return self.run_command(box, name, self._command(DIRECTORIES[0]))[1]

    @staticmethod
    def _command(directory: int) -> str:
        return f"find {DATA}/{directory} -type f -exec cat {{}} + >/dev/null"

    def check(self) -> None:
        box = self.boxes[WITH]
        compare_with_disk(box, f"cd {DATA}; find 1 2 3 -type f -exec cat {{}} + | sha256sum")


# Numbers of jobs of make. In a guest of 96 MiB without the pool, 2 jobs leave enough RAM to the
# compiler's files, 3 jobs read some of them again, and 4 jobs read them again and again.
KERNBENCH_JOBS = {"low": 2, "middle": 3, "high": 4}


class Kernbench(Seed, Build):
    """make compiles files of Lua with several jobs at the same time, as kernbench does."""

    seconds = 200
    repetitions = 3
    ram_bytes = 96 * MIB
    objects = (
        "lapi.o", "lcode.o", "ldebug.o", "ldo.o", "lgc.o", "llex.o", "lobject.o", "lparser.o",
        "lstrlib.o", "ltable.o", "ltablib.o", "lvm.o",
    )  # fmt: skip

    def __init__(self, load: str) -> None:
        self.jobs = KERNBENCH_JOBS[load]
        self.key = f"kernbench_{load}"
        self.title = f"compilation, make -j{self.jobs}"
        super().__init__()

    def details(self) -> dict[str, Any]:
        return {
            "load": f"make -j{self.jobs} of {len(self.objects)} objects of Lua 5.4 with Debian "
            "12's GCC 12, -O2"
        }

    def check(self) -> None:
        box = self.boxes[WITH]
        box.sh(f"umount {DATA}/tmp {DATA}/dev")
        compare_with_disk(box, f"find {DATA} -type f -exec cat {{}} + | sha256sum")


class Database(Seed):
    """The benchmark of a database server runs a number of transactions."""

    figure = "tps"
    repetitions = 5

    def __init__(
        self,
        key: str,
        server: Server,
        load: str,
        count: int,
        *,
        buffered: bool = True,
        ram_bytes: int = 256 * MIB,
        throttle: Throttle = CLOUD_VOLUME,
    ) -> None:
        self.key = key
        self.server = server
        self.throttle = throttle
        self.seconds = 240
        self.ram_bytes = ram_bytes
        self._load = server.load.format(load=load, count=count)
        self._options = server.buffered if buffered else ""
        self.title = f"{server.name}, {'small buffer pool' if buffered else 'defaults of Debian'}"
        self.title += f", {key.partition('_')[2]}, disk of {throttle.iops:,} IOPS"
        super().__init__()
        self.parameters["disk"] = f"ext4 on a disk of {throttle.iops:,} IOPS and 125 MB/s"

    def details(self) -> dict[str, Any]:
        return {
            "server": f"{self.server.name} of Debian 13, {self._options or 'default options'}",
            "load": self._load,
        }

    def image(self, lab: Lab) -> Path:
        name = self.server.name
        return lab.image(name, lambda path: databases.make_image(path, self.server))

    def warm(self, box: Box) -> None:
        box.sh(
            f"cd {DATA}; mount -t proc proc proc; mount -t devtmpfs devtmpfs dev; mkdir -p dev/shm;"
            " mount -t tmpfs tmpfs dev/shm; mount -t tmpfs -o mode=1777 tmpfs tmp"
        )
        box.guest.start(in_system(f"{self.server.start} {self._options}"), SERVER_SECONDS)
        box.sh(in_system(f"until {self.server.is_ready}; do sleep 0.2; done"))
        box.sh(f"find {DATA}/{self.server.files} -type f -exec cat {{}} + >/dev/null")
        self.act(box, -1)

    def act(self, box: Box, repetition: int) -> Measured:
        load = f"{self._load} {self.server.seed}{SEED + repetition}"
        text, found = self.run_command(box, self.figure, in_system(load))
        return found | {self.figure: rate(text)}

    def check(self) -> None:
        box = self.boxes[WITH]
        box.sh(in_system(self.server.stop))
        box.sh(f"cd {DATA}; umount dev/shm dev proc tmp")
        files = f"find {DATA}/{self.server.files} -type f -exec cat {{}} +"
        compare_with_disk(box, f"{files} | sha256sum")


MAKE: Parts = {
    "iozone": Iozone,
    "iozone_500": lambda: Iozone(NETWORK_VOLUME),
    "directories": Directories,
    **{f"kernbench_{load}": partial(Kernbench, load) for load in KERNBENCH_JOBS},
    "mariadb_ro": lambda: Database("mariadb_ro", MARIADB, "oltp_read_only", 600),
    "mariadb_rw": lambda: Database("mariadb_rw", MARIADB, "oltp_read_write", 400),
    "mariadb_slow": lambda: Database(
        "mariadb_slow", MARIADB, "oltp_read_write", 200, throttle=NETWORK_VOLUME
    ),
    # Server and buffer pool take 215 MiB. In a guest of 256 MiB, 5 MiB of RAM decide whether it
    # makes 80 transactions per second or 2.
    "mariadb_default": lambda: Database(
        "mariadb_default", MARIADB, "oltp_read_write", 400, buffered=False, ram_bytes=320 * MIB
    ),
    "postgresql_ro": lambda: Database("postgresql_ro", POSTGRESQL, "-S", 2000, ram_bytes=160 * MIB),
    "postgresql_rw": lambda: Database("postgresql_rw", POSTGRESQL, "-N", 300, ram_bytes=160 * MIB),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, MAKE)


def run(options: argparse.Namespace) -> int:
    found = run_parts(options, RESULTS, MAKE)
    print(seeds_report.text(found))
    if options.page:
        seeds_report.write_page(found, options.page)
    return 0
