# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A guest of a benchmark, and the files that it reads.

The guest program bench (tests/guest/bench.c) measures in the guest, with the TSC.
"""

from __future__ import annotations

import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from harness import disk
from harness.guest import Guest
from harness.native import NativeVm
from harness.paths import HarnessError
from harness.vm import MIB, Vm
from harness.wait import until

SEED = 2026  # seed of the random file contents, reads and resampling
PAGE_BYTES = 4096
SECTOR_BYTES = 512
BATCH_BYTES = 1 * MIB  # pages evicted in one step; the put ring has space for all of them
SECONDS = 300  # longest time of one step

BENCH = "/bin/bench"
SYSFS = "/sys/kernel/virtio_tmem"
MICRO = "/sys/module/virtio_tmem/parameters/test_bench"
DATA, UNCACHED = "/data", "/uncached"
# The type of the file systems that a benchmark does not cache.
UNCACHED_KIND = "ext3"


def write_contents(path: Path, size_bytes: int, source: random.Random) -> None:
    """Writes a file of pages that are all different and that lz4 compresses to half their size."""
    with open(path, "wb") as file:
        for _ in range(size_bytes // MIB):
            noise = source.randbytes(MIB // 2)
            half = PAGE_BYTES // 2
            file.write(
                b"".join(noise[at : at + half] + bytes(half) for at in range(0, len(noise), half))
            )


def make_image(
    path: Path, size_bytes: int, files: dict[str, int], source: random.Random, *options: str
) -> Path:
    """Creates an ext4 image with files of these names and sizes in bytes."""
    tree = path.with_suffix(".tree")
    tree.mkdir()
    for name, file_bytes in files.items():
        write_contents(tree / name, file_bytes, source)
    disk.ext4(path, size_bytes, tree, *options)
    shutil.rmtree(tree)
    return path


class Machine:
    """A guest of the benchmark."""

    def __init__(self, vm: Vm | NativeVm, cached: bool) -> None:
        self.vm = vm
        self.cached = cached

    @property
    def guest(self) -> Guest:
        return self.vm.guest

    def run_bench(self, arguments: str) -> int:
        """Runs the guest program bench (tests/guest/bench.c) and returns the ticks it prints."""
        return int(self.guest.sh(f"{BENCH} {arguments}", SECONDS).split()[1])

    def stat(self, name: str) -> int:
        return int(self.guest.read(f"{SYSFS}/stats/{name}"))

    def wait_until_served(self) -> None:
        """Waits until the driver puts pages of the mount."""
        if not self.cached:
            return

        def served() -> bool:
            before = self.stat("puts")
            self.run_bench(f"seq {DATA}/batch")
            self.run_bench("drop")
            return self.stat("puts") > before

        until(served, 60, f"{self.vm.name}: the driver serves {DATA}")
        self.settle()

    def settle(self) -> None:
        """Waits until the host has answered all puts and all references to retained pages."""
        if not self.cached:
            return
        puts = ("stored", "refused", "unanswered")
        refs = ("held", "gone", "unanswered", "dropped", "unneeded")

        def settled() -> bool:
            now = self.all_counters()
            return now["puts"] == sum(now[f"puts_{end}"] for end in puts) and now["refs"] == sum(
                now[f"refs_{end}"] for end in refs
            )

        until(settled, 60, f"{self.vm.name}: the host answers all puts and references")

    def measure_drop(self, where: str) -> int:
        """Returns the ticks to evict a file's pages, minus those of an eviction without pages."""
        self.run_bench(f"seq {where}/batch")
        before = self.stat("puts") if self.cached else 0
        ticks = self.run_bench("drop")
        if self.cached and where == DATA:
            check_all_put(self.stat("puts") - before)
        self.settle()
        return ticks - self.run_bench("drop")

    def run_micro_benchmarks(self, repeat: int, say: Callable[[int], None]) -> dict[str, float]:
        """Returns medians in ticks of the micro-benchmarks inside the driver."""
        runs: dict[str, list[float]] = {}
        for number in range(repeat):
            self.guest.sh(f"echo 1 >{MICRO}", SECONDS)
            for line in self.guest.read(MICRO).splitlines():
                name, median = line.split()
                runs.setdefault(name, []).append(int(median))
            say(number + 1)
        return {name: statistics.median(values) for name, values in runs.items()}

    def mount_uncached(self, name: str, where: str) -> None:
        """Mounts a disk with a file system of the type UNCACHED_KIND, without the cache."""
        if self.cached:
            self.guest.sh(f"echo 0 >{SYSFS}/fs/{UNCACHED_KIND}/enabled")
        self.guest.mount(name, where, UNCACHED_KIND, "ro")

    def all_counters(self) -> dict[str, int]:
        """Returns all counters of the driver."""
        lines = self.guest.sh(f"cd {SYSFS}/stats && grep . *").splitlines()
        return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}

    def counters(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Returns the driver's counters that are not 0, or their growth since `before`."""
        old = before or {}
        now = self.all_counters()
        return {name: value - old.get(name, 0) for name, value in now.items() if value}


def check_all_put(puts: int) -> None:
    """Raises if too few pages were put. The put ring was full then, and the result is invalid."""
    if puts < BATCH_BYTES // PAGE_BYTES * 0.95:
        raise HarnessError(
            f"only {puts} of {BATCH_BYTES // PAGE_BYTES} pages were put: the put ring was full"
        )
