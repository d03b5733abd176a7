# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures costs and gains of the guest driver: `make bench-guest`, docs/benchmarks/guest.md.

Two guests run at the same time on equal disks, one with the device and the driver and one without.
The benchmark measures them in turns, so that other load of the machine affects both. The figures
are ratios of medians. The guests measure time with the TSC, which runs at the host's rate in both.
Three more guests run with QEMU's -icount, where the TSC counts the instructions that the guest
executed. One of them uses retained pages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from demo import Progress, table
from harness import disk, kernel, module
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import DiskStat, Guest
from harness.kernel import Kernel
from harness.machine import processor_model
from harness.native import NativeVm
from harness.paths import TESTS, HarnessError, guest_program, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm
from harness.wait import until

SEED = 2026  # seed of the random file contents, reads and resampling
PAGE_BYTES = 4096
SECTOR_BYTES = 512

RAM_BYTES = 192 * MIB
POOL_SIZE = "512MiB"
STREAM_BYTES = 320 * MIB  # more than the RAM, so that most of it is evicted while it is read
SET_BYTES = 240 * MIB  # more than the RAM, less than RAM and pool
CACHED_BYTES = 32 * MIB  # small enough to stay in the page cache
BATCH_BYTES = 1 * MIB  # evicted in one step; fits the put ring, so every page is put
UNHOOKED_BYTES = 64 * MIB
DISK_BYTES = 768 * MIB
UNHOOKED_DISK_BYTES = 112 * MIB
TOUCH_MIB = 64  # memory that the guest allocates, which shrinks the page cache
RANDOM_READS = 3000  # reads per second of the throttled disk

# Numbers of repetitions. A stream takes about three seconds, other steps less.
REPEAT_STREAM = 20
REPEAT_REREAD = 7
REPEAT_UNHOOKED = 25
REPEAT_RECLAIM = 31
REPEAT_MICRO = 9
REPEAT_ICOUNT = 5  # few repetitions, because instruction counts hardly vary

RESAMPLES = 2000
STREAM_MAX = 1.05
UNHOOKED_MAX = 1.05
REREAD_INSTRUCTIONS_MAX = 18_500  # with retained pages
UNHOOKED_INSTRUCTIONS_MAX = 1.02  # close to 1, because counts hardly vary between runs
SECONDS = 300  # longest time of one step

ACCELERATOR = os.environ.get("TMEM_ACCEL", "tcg")  # the default of harness/vm.py
MODULE = "/virtio_tmem.ko"
TEST_MODULE = "/virtio_tmem_test.ko"
BENCH = "/bin/bench"
SYSFS = "/sys/kernel/virtio_tmem"
MICRO = "/sys/module/virtio_tmem/parameters/test_bench"
# Emulated guests are ten times slower than hardware, so deadline and polling time are longer.
PARAMETERS = "deadline_ms=200 spin_us=300"
# Parameters under -icount. The driver does not poll, because the instructions of polling depend on
# the host's speed and not on the driver's work.
PARAMETERS_ICOUNT = "deadline_ms=200 spin_us=0"
DATA, UNHOOKED = "/data", "/unhooked"
# The driver does not serve ext3. The kernel mounts it with the functions of ext4, which the driver
# redirects, so it is the file system without a cache that costs most.
UNHOOKED_KIND = "ext3"


def figure_text(value: float, unit: str) -> str:
    """Returns a figure with as many digits as its unit and size need."""
    if unit == "ratio":
        return f"{value:.4f}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


@dataclass(frozen=True)
class Row:
    """A figure of the report. `met` tells whether it meets its target; None without a target."""

    key: str
    what: str
    value: float
    unit: str = "ratio"
    target: str = "reported"
    met: bool | None = None
    interval: tuple[float, float] | None = None

    def cells(self) -> list[str]:
        low_high = f"{self.interval[0]:.3f}-{self.interval[1]:.3f}" if self.interval else ""
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        value = figure_text(self.value, self.unit)
        return [self.what, self.key, value, self.unit, low_high, self.target, verdict]


@dataclass
class Paired:
    """Ticks of one operation in the guests with and without the driver, measured in turns."""

    cached: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        """Returns the median with the driver divided by the median without."""
        return statistics.median(self.cached) / statistics.median(self.plain)

    def interval(self) -> tuple[float, float]:
        """Returns the 95 % interval of ratio(), by resampling the pairs (percentile bootstrap)."""
        source = random.Random(SEED)
        pairs = list(zip(self.cached, self.plain, strict=True))
        ratios = []
        for _ in range(RESAMPLES):
            some = source.choices(pairs, k=len(pairs))
            ratios.append(
                statistics.median(pair[0] for pair in some)
                / statistics.median(pair[1] for pair in some)
            )
        ratios.sort()
        return ratios[int(RESAMPLES * 0.025)], ratios[int(RESAMPLES * 0.975)]


def bounded(key: str, what: str, paired: Paired, most: float) -> Row:
    """Returns a row for a ratio whose 95 % interval must not exceed `most`."""
    interval = paired.interval()
    target = f"upper bound of 95 % <= {most}"
    return Row(key, what, paired.ratio(), target=target, met=interval[1] <= most, interval=interval)


def contents(path: Path, size_bytes: int, source: random.Random) -> None:
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
        contents(tree / name, file_bytes, source)
    disk.ext4(path, size_bytes, tree, *options)
    shutil.rmtree(tree)
    return path


def make_disks(directory: Path) -> tuple[Path, Path]:
    """Returns the ext4 image with the files, and an image of a file system that is not hooked."""
    source = random.Random(SEED)
    sizes = {"stream": STREAM_BYTES, "set": SET_BYTES, "cached": CACHED_BYTES, "batch": BATCH_BYTES}
    data = make_image(directory / "data.img", DISK_BYTES, sizes, source)
    sizes = {"file": UNHOOKED_BYTES, "batch": BATCH_BYTES}
    other = directory / "other.img"
    return data, make_image(other, UNHOOKED_DISK_BYTES, sizes, source, "-t", UNHOOKED_KIND)


class Machine:
    """A guest of the benchmark."""

    def __init__(self, vm: Vm | NativeVm, cached: bool, icount: bool = False) -> None:
        self.vm = vm
        self.cached = cached
        self.icount = icount

    @property
    def guest(self) -> Guest:
        return self.vm.guest

    def bench(self, arguments: str) -> int:
        """Runs the guest program bench (tests/guest/bench.c) and returns the ticks it prints."""
        return int(self.guest.sh(f"{BENCH} {arguments}", SECONDS).split()[1])

    def processor_ns(self, arguments: str) -> int:
        """Runs the guest program bench and returns the processor time in ns that it used.

        The time includes that of the kernel's threads kswapd0 and tmem_feeder. Under -icount a
        nanosecond is an instruction, so the result is the number of executed instructions.
        """

        def threads() -> int:
            find = "grep -lxE 'kswapd0|tmem_feeder' /proc/[0-9]*/comm"
            paths = self.guest.sh(f"{find} | sed s/comm/schedstat/ | xargs cat")
            return sum(int(line.split()[0]) for line in paths.splitlines())

        before = threads()
        own = int(self.guest.sh(f"{BENCH} {arguments}", SECONDS).split()[2])
        self.settle()
        return own + threads() - before

    def stat(self, name: str) -> int:
        return int(self.guest.read(f"{SYSFS}/stats/{name}"))

    def load(self, path: str) -> None:
        self.guest.insmod(path, PARAMETERS_ICOUNT if self.icount else PARAMETERS)

    def mount(self) -> None:
        self.guest.mount("data", DATA, options="ro")
        self.serve()

    def remount(self) -> None:
        """Remounts the disk, which removes its pages from the page cache and the pool."""
        self.guest.sh(f"umount {DATA}", SECONDS)
        self.mount()

    def serve(self) -> None:
        """Waits until the driver puts pages of the mount."""
        if not self.cached:
            return

        def served() -> bool:
            before = self.stat("puts")
            self.bench(f"seq {DATA}/batch")
            self.bench("drop")
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

    def drop(self) -> None:
        self.bench("drop")
        self.settle()

    def disk_stat(self) -> DiskStat:
        return self.guest.disk_stat("data")

    def dropped(self, where: str) -> int:
        """Returns the ticks to evict a file's pages, minus those of an eviction without pages."""
        self.bench(f"seq {where}/batch")
        before = self.stat("puts") if self.cached else 0
        ticks = self.bench("drop")
        if self.cached and where == DATA:
            all_put(self.stat("puts") - before)
        self.settle()
        return ticks - self.bench("drop")

    def micro(self, repeat: int, say: Callable[[int], None] | None = None) -> dict[str, float]:
        """Returns medians in ticks of the micro-benchmarks inside the driver.

        The cost of the loop and of reading the clock is subtracted.
        """
        runs: dict[str, list[float]] = {}
        for number in range(repeat):
            self.bench(f"seq {DATA}/cached")
            self.guest.sh(f"echo {DATA}/cached >{MICRO}", SECONDS)
            for line in self.guest.read(MICRO).splitlines():
                name, median, most, operations = line.split()
                runs.setdefault(name, []).append(int(median) / int(operations))
                runs.setdefault(f"{name}_max", []).append(int(most) / int(operations))
            if say:
                say(number + 1)
        out = {name: statistics.median(values) for name, values in runs.items()}
        for name in ("xa_load", "miss_inode", "miss_far", "miss_near"):
            out[name] -= out["empty"]
        return out

    def all_counters(self) -> dict[str, int]:
        """Returns all counters of the driver."""
        lines = self.guest.sh(f"cd {SYSFS}/stats && grep . *").splitlines()
        return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}

    def counters(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Returns the driver's counters that are not 0, or their growth since `before`."""
        old = before or {}
        now = self.all_counters()
        return {name: value - old.get(name, 0) for name, value in now.items() if value}


def all_put(puts: int) -> None:
    """Raises if too few pages were put. The put ring was full then, and the result is invalid."""
    if puts < BATCH_BYTES // PAGE_BYTES * 0.95:
        raise HarnessError(
            f"only {puts} of {BATCH_BYTES // PAGE_BYTES} pages were put: the put ring was full"
        )


class Both:
    """Two guests, one with the driver and one without it, which are measured in turns."""

    def __init__(self, cached: Machine, plain: Machine) -> None:
        self.cached = cached
        self.plain = plain

    def in_turns(
        self,
        repeat: int,
        measure: Callable[[Machine, int], float],
        say: Callable[[int], None] | None = None,
    ) -> Paired:
        """Runs `measure` in both guests `repeat` times, in alternating order."""
        out = Paired()
        for number in range(repeat):
            order = [(self.cached, out.cached), (self.plain, out.plain)]
            for machine, ticks in order if number % 2 else reversed(order):
                ticks.append(measure(machine, number))
            if say:
                say(number + 1)
        return out


class Bench:
    """One run of the benchmark. Each step appends its rows to the report's table."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session = session
        self.progress = progress
        self.rows: list[Row] = []
        self.shown = 0
        self.details: dict[str, object] = {}
        self.kernel: Kernel = kernel.prepare("6.12")
        self.release = module.build(self.kernel)
        self.test = module.build(self.kernel, test=True)
        progress.step("disks: ext4 of 3,000 IOPS and 125 MB/s, ext3 without a limit")
        self.data, self.other = make_disks(session.directory)

    def machine(
        self, name: str, daemon: Daemon | None, *, icount: bool, retain: bool = False
    ) -> Machine:
        properties = {"retain": "on" if retain else "off"}
        throttle = None if icount else disk.CLOUD_VOLUME
        config = Config(
            kernel=self.kernel,
            name=name,
            memory_bytes=RAM_BYTES,
            disks=[
                Disk("data", self.data, read_only=True, throttle=throttle),
                Disk("other", self.other, read_only=True),
            ],
            tmem=Tmem(daemon.socket(name), properties=properties) if daemon else None,
            files={
                MODULE: self.release,
                TEST_MODULE: self.test,
                BENCH: guest_program(TESTS / "guest/bench.c"),
            },
            tcg_threads="single" if icount else "multi",
            arguments=["-icount", "shift=0"] if icount else [],
        )
        return Machine(self.session.vm(config), daemon is not None, icount)

    def both(self, suffix: str, path: str, *, icount: bool) -> Both:
        """Boots a guest with the driver and one without it, and mounts their disks."""
        daemon = self.session.daemon(f"with{suffix}", pool_size=POOL_SIZE)
        daemon.start()
        pair = Both(
            self.machine(f"with{suffix}", daemon, icount=icount),
            self.machine(f"without{suffix}", None, icount=icount),
        )
        for machine in (pair.cached, pair.plain):
            self.start(machine, path)
        return pair

    def start(self, machine: Machine, path: str) -> None:
        """Boots a guest, loads the module at `path` if it has the device, and mounts both disks."""
        machine.vm.start()
        if machine.cached:
            machine.load(path)
        machine.guest.mount("other", UNHOOKED, UNHOOKED_KIND, "ro")
        machine.mount()

    def show_new(self) -> None:
        """Prints the figures of a step as soon as the step has ended."""
        for row in self.rows[self.shown :]:
            self.progress.step("  " + "  ".join(cell for cell in row.cells()[1:] if cell))
        self.shown = len(self.rows)

    def saying(self, what: str, repeat: int) -> Callable[[int], None]:
        return lambda number: self.progress.show(f"{what}: {number} of {repeat}")

    # The steps of the benchmark. Each step measures one operation.

    def stream(self, pair: Both) -> None:
        self.progress.step(f"stream of {STREAM_BYTES // MIB} MiB, {REPEAT_STREAM} times each")
        gets = 0

        def measure(machine: Machine, _: int) -> float:
            nonlocal gets
            machine.remount()
            before = machine.stat("gets") if machine.cached else 0
            ticks = machine.bench(f"seq {DATA}/stream")
            gets += machine.stat("gets") - before if machine.cached else 0
            return ticks

        paired = pair.in_turns(REPEAT_STREAM, measure, self.saying("stream", REPEAT_STREAM))
        if gets:
            raise HarnessError(
                f"the driver sent {gets} gets although the stream does not reuse pages"
            )
        what = "stream larger than RAM without reuse: time with / without the driver"
        self.rows.append(bounded("stream_ratio", what, paired, STREAM_MAX))

    def reread(self, pair: Both) -> None:
        self.progress.step(f"re-reads of {SET_BYTES // MIB} MiB, {REPEAT_REREAD} times each")
        sectors = Paired()
        cache_ticks: list[float] = []
        hits: list[int] = []
        # Read the file three times to fill RAM and pool. Meanwhile the driver compares its first
        # 1,000 hits with the disk. These reads of the disk must not be measured.
        for machine in (pair.cached, pair.plain):
            machine.remount()
            for _ in range(3):
                machine.bench(f"seq {DATA}/set")
        before_all = pair.cached.counters()

        def measure(machine: Machine, _: int) -> float:
            before, hits_before = machine.disk_stat(), 0
            if machine.cached:
                hits_before = machine.stat("hits")
            ticks = machine.bench(f"seq {DATA}/set")
            read = (machine.disk_stat() - before).read_sectors
            (sectors.cached if machine.cached else sectors.plain).append(read)
            if machine.cached:
                hits.append(machine.stat("hits") - hits_before)
            return ticks

        paired = pair.in_turns(REPEAT_REREAD, measure, self.saying("re-read", REPEAT_REREAD))
        self.details["reread_counters"] = moved = pair.cached.counters(before_all)
        total = Paired([float(sum(sectors.cached))], [float(sum(sectors.plain))])

        # Measure reads from the page cache of the same guest, to compare hits with them.
        pair.cached.bench(f"seq {DATA}/cached")
        pair.cached.bench(f"seq {DATA}/cached")
        for _ in range(REPEAT_REREAD):
            cache_ticks.append(pair.cached.bench(f"seq {DATA}/cached"))
        fraction = (statistics.median(cache_ticks) / CACHED_BYTES) / (
            statistics.median(paired.cached) / SET_BYTES
        )
        pool_share = statistics.median(hits) * PAGE_BYTES / SET_BYTES
        self.details["reread_pool_share"] = pool_share
        self.rows += [
            Row(
                "reread_sectors_ratio",
                "re-read of a set that fits RAM + pool: disk sectors with / without the driver",
                total.ratio(),
                target="<= 0.01",
                met=total.ratio() <= 0.01,
            ),
            Row(
                "reread_pagecache_fraction",
                f"  rate of the re-read / rate of the page cache ({pool_share:.0%} from the pool)",
                fraction,
                target=">= 0.3",
                met=fraction >= 0.3,
            ),
            Row(
                "reread_speedup",
                "  rate of the re-read with / without the driver",
                1 / paired.ratio(),
            ),
            Row(
                "put_pages_per_request",
                "  pages in one request for puts, mean",
                moved["puts"] / moved["requests_put"],
                "pages",
            ),
        ]

    def random_reads(self, pair: Both) -> None:
        self.progress.step(f"random reads of 4 KiB, {RANDOM_READS} times {REPEAT_REREAD} each")
        for machine in (pair.cached, pair.plain):
            machine.bench(f"rand {DATA}/set {RANDOM_READS} {SEED}")
        before = pair.cached.counters()
        paired = pair.in_turns(
            REPEAT_REREAD,
            lambda machine, number: machine.bench(f"rand {DATA}/set {RANDOM_READS} {number}"),
            self.saying("random reads", REPEAT_REREAD),
        )
        self.details["random_counters"] = pair.cached.counters(before)
        speedup = 1 / paired.ratio()
        low, high = paired.interval()
        self.rows.append(
            Row(
                "reread_rand_speedup",
                "random 4 KiB re-reads, disk of 3,000 IOPS: time without / with the driver",
                speedup,
                target=">= 2",
                met=speedup >= 2,
                interval=(1 / high, 1 / low),
            )
        )

    def reclaim(self, pair: Both) -> None:
        self.progress.step(f"reclaim of clean pages, {REPEAT_RECLAIM} times each")

        def dropped(machine: Machine, _: int) -> float:
            return machine.dropped(DATA)

        for machine in (pair.cached, pair.plain):
            machine.drop()
        drop = pair.in_turns(REPEAT_RECLAIM, dropped)

        def touched(machine: Machine, _: int) -> float:
            machine.bench(f"seq {DATA}/set")
            machine.settle()
            return machine.bench(f"touch {TOUCH_MIB}")

        touch = pair.in_turns(REPEAT_REREAD, touched, self.saying("reclaim", REPEAT_REREAD))
        self.rows += [
            Row(
                "reclaim_ratio",
                "reclaim of clean pages, all of them put: time with / without the driver",
                drop.ratio(),
                target="reported (TCG)",
                interval=drop.interval(),
            ),
            Row(
                "pressure_ratio",
                f"taking {TOUCH_MIB} MiB of memory from a full page cache: with / without",
                touch.ratio(),
                target="reported (TCG)",
                interval=touch.interval(),
            ),
        ]

    def unhooked(self, pair: Both) -> None:
        self.progress.step(f"a file system that is not hooked, {REPEAT_UNHOOKED} times each")

        def measure(machine: Machine, _: int) -> float:
            machine.drop()
            return machine.bench(f"seq {UNHOOKED}/file")

        for machine in (pair.cached, pair.plain):
            measure(machine, 0)
        paired = pair.in_turns(REPEAT_UNHOOKED, measure, self.saying("reading", REPEAT_UNHOOKED))
        what = "reading a file system that is not hooked: time with / without"
        self.rows.append(bounded("unhooked_ratio", what, paired, UNHOOKED_MAX))

    def micro_time(self, pair: Both) -> None:
        self.progress.step(f"look-ups that miss, {REPEAT_MICRO} times")
        machine = pair.cached
        machine.guest.sh("rmmod virtio_tmem", SECONDS)
        machine.load(TEST_MODULE)
        machine.serve()
        out = machine.micro(REPEAT_MICRO)
        self.details["micro_ticks"] = out
        worst = max(out[name] for name in ("miss_inode", "miss_far", "miss_near"))
        ratio = worst / out["xa_load"]
        self.rows.append(
            Row(
                "miss_ratio",
                "index miss of the most expensive kind / page cache look-up (xa_load): time",
                ratio,
                target="<= 2",
                met=ratio <= 2,
            )
        )

    def reread_retained(self, reread_once: Callable[[Machine, int], float]) -> float:
        """Returns the number of executed instructions per re-read of a retained page."""
        daemon = self.session.daemon("retain2", pool_size=POOL_SIZE)
        daemon.start()
        machine = self.machine("retain2", daemon, icount=True, retain=True)
        self.start(machine, TEST_MODULE)
        # The first read puts the pages, the second gets them, and the third is the first that
        # evicts retained pages.
        for _ in range(3):
            machine.bench(f"seq {DATA}/set")
        before = machine.counters()
        values = [reread_once(machine, number) for number in range(2)]
        self.details["icount_retained_counters"] = moved = machine.counters(before)
        if moved.get("refs", 0) < SET_BYTES // PAGE_BYTES:
            raise HarnessError(f"too few retained pages were evicted: {moved}")
        machine.vm.check_console()
        machine.vm.stop()
        return statistics.median(values)

    def instructions(self) -> None:
        if ACCELERATOR != "tcg":
            self.progress.step("guest instructions are counted under TCG only")
            return
        self.progress.step("guest instructions (QEMU -icount)")
        pair = self.both("2", TEST_MODULE, icount=True)
        out = pair.cached.micro(REPEAT_ICOUNT)
        self.details["micro_instructions"] = out
        worst = max(out[name] for name in ("miss_inode", "miss_far", "miss_near"))
        pages = BATCH_BYTES // PAGE_BYTES

        def dropped(where: str) -> Callable[[Machine, int], float]:
            return lambda machine, _: machine.dropped(where) / pages

        def reread_once(machine: Machine, _: int) -> float:
            return machine.processor_ns(f"seq {DATA}/set") / (SET_BYTES // PAGE_BYTES)

        for machine in (pair.cached, pair.plain):
            machine.remount()
            for _ in range(2):
                machine.bench(f"seq {DATA}/set")
        before = pair.cached.counters()
        reread = pair.in_turns(2, reread_once)
        self.details["icount_reread_counters"] = pair.cached.counters(before)
        retained = self.reread_retained(reread_once)
        for _ in range(2):
            pair.plain.bench(f"seq {DATA}/cached")
        from_cache = pair.plain.processor_ns(f"seq {DATA}/cached") / (CACHED_BYTES // PAGE_BYTES)
        for machine in (pair.cached, pair.plain):
            machine.drop()
        hooked = pair.in_turns(REPEAT_ICOUNT, dropped(DATA))
        other = pair.in_turns(REPEAT_ICOUNT, dropped(UNHOOKED))

        def read_unhooked(machine: Machine, _: int) -> float:
            machine.drop()
            return machine.processor_ns(f"seq {UNHOOKED}/file") / (UNHOOKED_BYTES // PAGE_BYTES)

        read = pair.in_turns(REPEAT_ICOUNT, read_unhooked)
        put = statistics.median(hooked.cached) - statistics.median(hooked.plain)
        unhooked = statistics.median(other.cached) - statistics.median(other.plain)
        beyond = out["put"] - out["copy_check"]
        self.rows += [
            Row(
                "miss_instructions_ratio",
                "index miss of the most expensive kind / page cache look-up: instructions",
                worst / out["xa_load"],
                target="<= 2",
                met=worst <= 2 * out["xa_load"],
            ),
            Row(
                "put_instructions",
                "a put without its copy and content check, median",
                beyond,
                "instructions",
                "reported",
            ),
            Row(
                "put_instructions_max",
                "  maximum: a put that wakes the feeder and grows the index",
                out["put_max"] - out["copy_check"],
                "instructions",
                "reported",
            ),
            Row(
                "put_copy_instructions",
                "  copy and content check of a put",
                out["copy_check"],
                "instructions",
                "reported",
            ),
            Row(
                "copy_instructions",
                "  a bare copy_page()",
                out["copy"],
                "instructions",
                "reported",
            ),
            Row(
                "reclaim_put_instructions",
                "reclaim of a page: instructions that the driver adds",
                put,
                "instructions",
                "reported",
            ),
            Row(
                "reclaim_instructions",
                "  reclaim of a page without the driver",
                statistics.median(hooked.plain),
                "instructions",
                "reported",
            ),
            Row(
                "reread_instructions",
                "re-read of a page with the driver: reclaim, put and get",
                statistics.median(reread.cached),
                "instructions",
                "reported",
            ),
            Row(
                "reread_retain_instructions",
                "  the same with retained pages: reclaim, reference and get",
                retained,
                "instructions",
                f"<= {REREAD_INSTRUCTIONS_MAX}",
                met=retained <= REREAD_INSTRUCTIONS_MAX,
            ),
            Row(
                "reread_instructions_without",
                "  re-read of a page without the driver, from disk",
                statistics.median(reread.plain),
                "instructions",
                "reported",
            ),
            Row(
                "pagecache_instructions",
                "  read of a page from the page cache",
                from_cache,
                "instructions",
                "reported",
            ),
            Row(
                "unhooked_instructions_ratio",
                "reading a file system that is not hooked: instructions with / without the driver",
                read.ratio(),
                target=f"<= {UNHOOKED_INSTRUCTIONS_MAX}",
                met=read.ratio() <= UNHOOKED_INSTRUCTIONS_MAX,
            ),
            Row(
                "unhooked_instructions",
                "  instructions that the driver adds to reclaim of a page",
                unhooked,
                "instructions",
                "reported",
            ),
        ]
        pair.cached.vm.check_console()
        pair.plain.vm.check_console()

    def run(self, only: list[str]) -> None:
        steps: dict[str, Callable[[Both], None]] = {
            "stream": self.stream,
            "reread": self.reread,
            "random": self.random_reads,
            "reclaim": self.reclaim,
            "unhooked": self.unhooked,
            "miss": self.micro_time,
        }
        wanted = [name for name in steps if not only or name in only]
        if wanted:
            pair = self.both("1", MODULE, icount=False)
            for name in wanted:
                steps[name](pair)
                self.show_new()
            for machine in (pair.cached, pair.plain):
                machine.vm.check_console()
                machine.vm.stop()
        if not only or "instructions" in only:
            self.instructions()
            self.show_new()
        self.progress.step("done")


def machine_text() -> str:
    """Returns a description of the machine that ran the benchmark."""
    return f"{os.cpu_count()} processors, {processor_model()}, Linux {platform.release()}"


REMARK = """
Processors are emulated (TCG) unless TMEM_ACCEL names another accelerator. Under TCG, guest code
takes about ten times as long as on hardware, but disk requests do not take longer. A copy of a page
counts as many instructions instead of one. Other instruction counts, sectors and event counts are
those of hardware. Times of guest code are not."""


def report(bench: Bench) -> str:
    head = ["", "key", "value", "unit", "95 %", "target", ""]
    return table([head, *(row.cells() for row in bench.rows)])


def write_json(path: Path, bench: Bench) -> None:
    out: dict[str, object] = {}
    for row in bench.rows:
        if not math.isfinite(row.value):
            raise HarnessError(
                f"{row.key} is {row.value}, which is not a finite number: {path} was not written"
            )
        out[row.key] = round(row.value, 5)
    out["intervals"] = {row.key: row.interval for row in bench.rows if row.interval}
    out["missed"] = [row.key for row in bench.rows if row.met is False]
    out["machine"] = machine_text()
    out["accelerator"] = ACCELERATOR
    out["kernel"] = bench.kernel.release
    out["details"] = bench.details
    path.write_text(json.dumps(out, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json",
        type=Path,
        help="write the figures to this file; default: the environment variable JSON",
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only these steps: stream reread random ..."
    )
    arguments = parser.parse_args()
    json_path = arguments.json or (Path(os.environ["JSON"]) if os.environ.get("JSON") else None)
    try:
        # Look for the programs first, so that a missing one is reported at once and not after
        # minutes.
        qemu_binary(), host_binary("tmemd"), host_binary("tmemctl")
        with Session() as session:
            bench = Bench(session, Progress())
            bench.run(arguments.only)
            print(f"\n{machine_text()}; guest {bench.kernel.release}\n\n{report(bench)}\n{REMARK}")
            if json_path:
                write_json(json_path, bench)
    except HarnessError as error:
        print(f"\nbench-guest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
