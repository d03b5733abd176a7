# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures gets and puts at native speed.

Guests are user-mode Linux, so driver, daemon and disks run at the machine's own speed. In the same
run and in turns, each step also measures operations to compare with: a read from the page cache, a
read from a throttled disk, and a system call that does nothing. The clock is the TSC.
docs/benchmarks/history.md has the figures of an earlier run.

A kick is a write to an eventfd, an interrupt is a signal, and a system call switches between two
processes. There are no exits and no large folios, and a guest has one processor. All guests run on
one processor of the machine, tmemd and the disks' processes on another.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.vm.machine import (
    BATCH_BYTES,
    BENCH,
    DATA,
    PAGE_BYTES,
    SECONDS,
    SEED,
    UNCACHED,
    UNCACHED_KIND,
    Machine,
    make_image,
)
from bench.vm.output import Progress, table
from harness import disk, native
from harness.daemon import Daemon
from harness.disk import Disk
from harness.machine import pinning, polling_with_facts
from harness.native import NativeConfig
from harness.paths import TESTS, HarnessError, guest_program, host_binary
from harness.session import Session
from harness.vm import MIB

RAM_BYTES = 192 * MIB
POOL_BYTES = 512 * MIB  # memory of the pool for each guest
SET_BYTES = 288 * MIB  # size of the file, 1.5 times the RAM; RAM and pool together hold it
BLOCKS_BYTES = 64 * MIB  # size of the file whose blocks are read in random order
FILLER_BYTES = 4 * MIB  # size of a file that fills the put ring, so that gets reach the host
DATA_DISK_BYTES = 512 * MIB
OTHER_DISK_BYTES = 112 * MIB
GIB = 1 << 30
WINDOW_BYTES = 128 << 10  # default readahead of the kernel
GUESTS = (1, 2, 4)  # numbers of guests that read at the same time

# Numbers of repetitions, and of blocks that each repetition reads.
REPEAT_LATENCY = 9
PAGES = 2000
WINDOWS = 500
PAGES_PER_DISK_READ = 20
WINDOWS_PER_DISK_READ = 10
REPEAT_MICRO = 9
REPEAT_RECLAIM = 31
REPEAT_BURST = 5
GUEST_ROUNDS = 5

QUICK = 5  # divides all repetitions with --quick
STEPS = ("latency", "put", "burst", "guests")
# verify_every=0: a comparison of a hit would read the disk while a get is measured. retain=0: with
# retained pages, the driver would copy few of the evicted pages, and all steps measure copies.
PARAMETERS = "verify_every=0 retain=0"
# Parameters for measuring single gets. The deadline is so long that a reader waits for a late
# answer. Otherwise the reader would read the disk, and the time would not be that of a get.
PARAMETERS_LATENCY = f"{PARAMETERS} deadline_ms=1000"
HIT_SHARE_MIN = 0.99
SIZES = {"4k": "page of 4 KiB", "128k": "window of 128 KiB"}
WHERE = {"get": "from the pool", "cached": "from the page cache", "disk": "from the disk"}
COMMON = {"p50": 0.5, "p99": 0.99}
PERCENTILES = {**COMMON, "p999": 0.999}
REASONS = ("puts_dropped_", "puts_skipped_")
REFUSALS = "refused_"  # prefix of tmemd's counters of refused puts


@dataclass(frozen=True)
class Row:
    """A figure of the report. `met` tells whether it meets its target; None without a target."""

    key: str
    what: str
    value: float
    unit: str = "ratio"
    target: str = "reported"
    met: bool | None = None

    def cells(self) -> list[str]:
        if self.unit == "ratio":
            value = f"{self.value:.4f}"
        else:
            digits = 0 if self.value >= 100 or self.value == int(self.value) else 2
            value = f"{self.value:,.{digits}f}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return [self.what, self.key, value, self.unit, self.target, verdict]


def nonzero_rows(rows: list[Row]) -> list[Row]:
    """Returns the rows, without reasons for refused or skipped puts whose count is 0."""
    return [row for row in rows if row.value or not row.key.startswith(("puts_", REFUSALS))]


def percentile(values: Iterable[float], fraction: float) -> float:
    """Returns the value below or at which this fraction of the values is (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def parse_latency(text: str) -> dict[str, list[int]]:
    """Returns the ticks of each kind from the output of `bench latency`."""
    out = {}
    for line in text.splitlines():
        name, *ticks = line.split()
        out[name] = [int(word) for word in ticks]
    return out


def latency_rows(size: str, samples: dict[str, list[int]], ticks_per_us: float) -> list[Row]:
    """Returns the percentiles of gets and of the operations to compare with.

    The cost of an empty system call is subtracted from the times of reads of 4 KiB.
    """
    what = SIZES[size]
    us = {kind: [ticks / ticks_per_us for ticks in values] for kind, values in samples.items()}
    empty = percentile(us["empty"], 0.5)
    less = empty if size == "4k" else 0.0
    how = ", without the system call" if less else ""
    most = {"get_4k_p50_us": 15.0, "get_4k_p99_us": 60.0}
    rows = []
    for kind, where in WHERE.items():
        for name, fraction in PERCENTILES.items() if kind == "get" else COMMON.items():
            key = f"{kind}_{size}_{name}_us"
            value = percentile(us[kind], fraction) - less
            target, met = "reported", None
            if key in most:
                target, met = f"<= {most[key]:.0f}", value <= most[key]
            rows.append(Row(key, f"{what} {where}, {fraction:.1%}{how}", value, "µs", target, met))
    for name, fraction in COMMON.items():
        key = f"syscall_{size}_{name}_us"
        value = percentile(us["empty"], fraction)
        rows.append(
            Row(key, f"  empty system call, measured in the same run, {fraction:.1%}", value, "µs")
        )
    return rows


def dropped_rows(guests: int, change: dict[str, int]) -> list[Row]:
    """Returns rows with the numbers of pages that are not in the pool after their eviction.

    There is a row for each reason, and one with the share of all pages that could have been put.

    `change` has the growth of the driver's counters, and of tmemd's counters of refused puts.
    """
    refused = {name: value for name, value in change.items() if name.startswith(REFUSALS)}
    counts = {name: value for name, value in change.items() if name.startswith(REASONS)}
    lost = sum(counts.values()) + change.get("puts_refused", 0)
    offered = change["puts"] + sum(counts.values())
    text = f"{guests} guest{'s' if guests > 1 else ''}"
    rows = [
        Row(f"offered_{guests}_guests", f"{text}: pages offered to the driver", offered, "pages"),
        Row(
            f"lost_share_{guests}_guests",
            "  share of these pages that did not reach the pool",
            lost / offered if offered else 0.0,
        ),
    ]
    for name in (*sorted(counts), "puts_refused", *sorted(refused)):
        value = change.get(name, 0)
        rows.append(Row(f"{name}_{guests}_guests", f"  {name}", value, "pages"))
    return rows


def refusals(daemon: Daemon) -> dict[str, int]:
    """Returns the puts that tmemd has refused for all its VMs, by reason."""
    out: dict[str, int] = {}
    for vm in daemon.stats()["vms"]:
        for name, value in vm.items():
            if name.startswith(REFUSALS):
                out[name] = out.get(name, 0) + value
    return out


class HostPart:
    """Measures the growth of tmemd's statistics of a VM."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        stats = self._daemon.stats()
        vm = stats["vms"][0]
        return {
            "puts": vm["puts"],
            "gets": vm["gets"],
            "put_ns": vm["put_latency"]["sum_ns"],
            "get_ns": vm["get_latency"]["sum_ns"],
            "finalize_ns": stats["daemon"]["cpu_finalize_ms"] * 1e6,
        }

    def per_page(self, time: str, pages: str) -> float:
        """Returns nanoseconds for each page since this object was created."""
        now = self._now()
        return (now[time] - self._before[time]) / ((now[pages] - self._before[pages]) or math.nan)


class Bench:
    """One run of the benchmark: its disks, and the rows of its report."""

    def __init__(self, session: Session, progress: Progress, divisor: int = 1) -> None:
        self.session = session
        self.progress = progress
        self.divisor = divisor
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.ticks_per_us = 0.0
        self._files = {BENCH: guest_program(TESTS / "guest/bench.c")}
        native.build()
        progress.step("disks: ext4 and ext3, each of 3,000 IOPS and 125 MB/s")
        source = random.Random(SEED)
        sizes = {
            "set": SET_BYTES,
            "batch": BATCH_BYTES,
            "blocks": BLOCKS_BYTES,
            "filler": FILLER_BYTES,
        }
        self.data = make_image(session.directory / "data.img", DATA_DISK_BYTES, sizes, source)
        sizes = {"blocks": BLOCKS_BYTES, "batch": BATCH_BYTES}
        path = session.directory / "other.img"
        self.other = make_image(path, OTHER_DISK_BYTES, sizes, source, "-t", UNCACHED_KIND)

    def repetitions(self, count: int) -> int:
        return max(1, count // self.divisor)

    def make_reporter(self, what: str, repeat: int) -> Callable[[int], None]:
        return lambda number: self.progress.show(f"{what}: {number} of {repeat}")

    def add(self, rows: Iterable[Row]) -> None:
        """Appends rows and prints them at once."""
        new = list(rows)
        self.rows += new
        for row in nonzero_rows(new):
            self.progress.step("  " + "  ".join(cell for cell in row.cells()[1:] if cell))

    def start_daemon(self, *names: str) -> Daemon:
        size = f"{POOL_BYTES * len(names) // MIB}MiB"
        daemon = self.session.daemon(*names, pool_size=size)
        daemon.start()
        return daemon

    def boot_machine(
        self,
        name: str,
        daemon: Daemon,
        parameters: str = PARAMETERS,
        throttle: disk.Throttle | None = disk.CLOUD_VOLUME,
    ) -> Machine:
        """Boots a guest, mounts its disks, and returns the guest.

        Without `throttle`, the disks are in the page cache of the host.
        """
        images = (("data", self.data), ("other", self.other))
        config = NativeConfig(
            name=name,
            memory_bytes=RAM_BYTES,
            disks=[Disk(name, path, read_only=True, throttle=throttle) for name, path in images],
            tmem=daemon.socket(name),
            files=self._files,
            parameters=parameters,
            direct=throttle is not None,
        )
        machine = Machine(self.session.native_vm(config), True)
        machine.vm.start()
        machine.mount_uncached("other", UNCACHED)
        machine.guest.mount("data", DATA, options="ro")
        machine.wait_until_served()
        if not self.ticks_per_us:
            self._measure_clock(machine)
        return machine

    def _measure_clock(self, machine: Machine) -> None:
        speeds = []
        for _ in range(3):
            _, ticks, nanoseconds = machine.guest.sh(f"{BENCH} clock").split()
            speeds.append(int(ticks) / int(nanoseconds) * 1000)
        self.ticks_per_us = statistics.median(speeds)
        self.facts["guest_kernel"] = machine.guest.sh("uname -r").strip()

    @staticmethod
    def end(machine: Machine, daemon: Daemon | None = None) -> None:
        machine.vm.check_console()
        machine.vm.stop()
        if daemon:
            daemon.stop()

    def measure_latency(self) -> None:
        daemon = self.start_daemon("latency")
        machine = self.boot_machine("latency", daemon, PARAMETERS_LATENCY)
        repeat = self.repetitions(REPEAT_LATENCY)
        put_ns, finalize_ns = [], []
        for size, block_bytes, count, every in (
            ("4k", PAGE_BYTES, PAGES, PAGES_PER_DISK_READ),
            ("128k", WINDOW_BYTES, WINDOWS, WINDOWS_PER_DISK_READ),
        ):
            self.progress.step(f"gets, each a {SIZES[size]}, {repeat} times {count}")
            samples: dict[str, list[int]] = {}
            get_ns, wait_us, pages, hits = [], [], 0, 0
            for number in range(repeat):
                part = HostPart(daemon)
                self._evict(machine)
                put_ns.append(part.per_page("put_ns", "puts"))
                finalize_ns.append(part.per_page("finalize_ns", "puts"))
                part, before = HostPart(daemon), machine.counters()
                blocks = f"{count} {block_bytes} {number} {UNCACHED}/blocks {every}"
                text = machine.guest.sh(f"{BENCH} latency {DATA}/blocks {blocks}", SECONDS)
                for kind, ticks in parse_latency(text).items():
                    samples.setdefault(kind, []).extend(ticks)
                change = machine.counters(before)
                get_ns.append(part.per_page("get_ns", "gets"))
                wait_us.append(change["get_waits_ns"] / change["requests_get"] / 1000)
                pages += count * block_bytes // PAGE_BYTES
                hits += change["hits"] - change.get("ring_hits", 0)
                self.make_reporter("gets", repeat)(number + 1)
            if hits < pages * HIT_SHARE_MIN:
                raise HarnessError(
                    f"only {hits} of {pages} pages came from the pool, so the times are not those "
                    f"of gets: {machine.counters()}"
                )
            self.add(
                [
                    *latency_rows(size, samples, self.ticks_per_us),
                    Row(
                        f"get_{size}_wait_us",
                        "  time that a reader waits for the host, mean of the requests",
                        statistics.median(wait_us),
                        "µs",
                    ),
                    Row(
                        f"host_get_{size}_ns",
                        "  time of the host in such a request, for each page",
                        statistics.median(get_ns),
                        "ns",
                    ),
                    Row(f"get_{size}_hit_share", "  pages that came from the host", hits / pages),
                ]
            )
        self.add(
            [
                Row(
                    "host_put_ns",
                    "time of the host in a put, for each page",
                    statistics.median(put_ns),
                    "ns",
                ),
                Row(
                    "host_finalize_ns",
                    "  finalizing in the background: search for equal pages, lz4",
                    statistics.median(finalize_ns),
                    "ns",
                ),
            ]
        )
        self.end(machine, daemon)

    def _evict(self, machine: Machine) -> None:
        """Moves all pages of the measured file to the pool, and leaves none in the put ring."""
        machine.wait_until_served()
        before = machine.counters()
        pages = machine.guest.sh(f"{BENCH} evict {DATA}/blocks", SECONDS)
        machine.guest.sh(f"{BENCH} evict {DATA}/filler", SECONDS)
        change = machine.counters(before)
        # Pages that were in the page cache before are put in one burst. If the put ring was full
        # for some of them, the program reads and evicts these again.
        if change.get("puts_stored", 0) < int(pages):
            raise HarnessError(f"fewer than {pages.strip()} pages are stored: {change}")

    def measure_put(self) -> None:
        daemon = self.start_daemon("put")
        machine = self.boot_machine("put", daemon)
        repeat = self.repetitions(REPEAT_MICRO)
        self.progress.step(f"puts, {repeat} times")
        ticks = machine.run_micro_benchmarks(repeat, self.make_reporter("puts", repeat))
        ns = {name: value / self.ticks_per_us * 1000 for name, value in ticks.items()}
        rows = [
            Row(
                "put_ns_guest",
                "time of the driver in a put of a page that is not in the processor's cache",
                ns["put_cold"],
                "ns",
                "<= 900",
                ns["put_cold"] <= 900,
            ),
            Row(
                "put_off_ns",
                "  part of such a put during which interrupts are off",
                ns["put_off"],
                "ns",
                "<= 2000",
                ns["put_off"] <= 2000,
            ),
            Row("put_hot_ns", "  put of a page that is in the processor's cache", ns["put"], "ns"),
            Row(
                "copy_check_ns", "    copy and content check of such a put", ns["copy_check"], "ns"
            ),
            Row("copy_ns", "    a bare copy_page()", ns["copy"], "ns"),
        ]
        self.add(rows)
        self._reclaim(machine)
        self.end(machine, daemon)

    def _reclaim(self, machine: Machine) -> None:
        repeat = self.repetitions(REPEAT_RECLAIM)
        self.progress.step(f"reclaim of 1 MiB of clean pages, {repeat} times each")
        ticks: dict[str, list[float]] = {DATA: [], UNCACHED: []}
        machine.run_bench("drop")
        machine.settle()
        for number in range(repeat):
            for where in (DATA, UNCACHED) if number % 2 else (UNCACHED, DATA):
                ticks[where].append(machine.measure_drop(where) / (BATCH_BYTES // PAGE_BYTES))
        with_put, without = (
            statistics.median(ticks[where]) / self.ticks_per_us * 1000 for where in (DATA, UNCACHED)
        )
        self.add(
            [
                Row(
                    "reclaim_put_ns",
                    "time that the driver adds to the reclaim of a page",
                    with_put - without,
                    "ns",
                ),
                Row("reclaim_ns", "  reclaim without a put", without, "ns"),
            ]
        )

    def measure_burst(self) -> None:
        repeat = self.repetitions(REPEAT_BURST)
        self.progress.step(f"bursts: {SET_BYTES // MIB} MiB at the speed of memory, {repeat} times")
        names = [f"burst{number}" for number in range(repeat)]
        daemon = self.start_daemon(*names)
        eligible, lost, us = 0, 0, 0.0
        for number, name in enumerate(names):
            machine = self.boot_machine(name, daemon, throttle=None)
            machine.wait_until_served()
            before = machine.all_counters()
            us += machine.run_bench(f"seq {DATA}/set") / self.ticks_per_us
            machine.settle()
            after = machine.all_counters()
            eligible += after["puts_eligible"] - before["puts_eligible"]
            lost += after["puts_lost"] - before["puts_lost"]
            self.end(machine)
            self.make_reporter("bursts", repeat)(number + 1)
        daemon.stop()
        if not eligible:
            raise HarnessError("no page was evicted, so nothing was measured")
        share = lost / eligible
        self.add(
            [
                Row(
                    "burst_lost_fraction",
                    "part of the evicted pages that were lost, file read at the speed of memory",
                    share,
                    "ratio",
                    "<= 0.02",
                    share <= 0.02,
                ),
                Row("burst_evictions", "  pages evicted in a burst", eligible / repeat, "pages"),
                Row(
                    "burst_read_gib_per_s",
                    "  speed of that read",
                    repeat * SET_BYTES / GIB / (us / 1e6),
                    "GiB/s",
                ),
            ]
        )

    def measure_guests(self) -> None:
        rounds = self.repetitions(GUEST_ROUNDS)
        for count in GUESTS:
            self.progress.step(f"{count} guests re-read {SET_BYTES // MIB} MiB {rounds} times each")
            names = [f"guest{count}{number}" for number in range(count)]
            daemon = self.start_daemon(*names)
            machines = [self.boot_machine(name, daemon) for name in names]
            self._read_together(machines, 2)
            before = [machine.counters() for machine in machines]
            refused = refusals(daemon)
            seconds = self._read_together(machines, rounds)
            for machine in machines:
                machine.settle()
            change = {name: value - refused[name] for name, value in refusals(daemon).items()}
            for machine, old in zip(machines, before, strict=True):
                # Add up all counters, also those that did not grow, so that the results of all runs
                # have the same keys.
                for name, value in machine.all_counters().items():
                    change[name] = change.get(name, 0) + value - old.get(name, 0)
            rate = count * rounds * SET_BYTES / GIB / seconds
            what = "speed of all guests together"
            self.add(
                [
                    *dropped_rows(count, change),
                    Row(f"reread_{count}_guests_gib_per_s", f"  {what}", rate, "GiB/s"),
                    Row(
                        f"late_{count}_guests",
                        "  pages that the host did not return in time",
                        change["misses_late"] + change["misses_tripped"],
                        "pages",
                    ),
                ]
            )
            for machine in machines:
                self.end(machine)
            daemon.stop()

    @staticmethod
    def _read_together(machines: list[Machine], rounds: int) -> float:
        """Makes all guests read their file "set". Returns the seconds until all have finished."""
        script = f"for round in $(seq {rounds}); do {BENCH} seq {DATA}/set || exit 1; done"
        began = time.monotonic()
        jobs = [machine.guest.start(script, SECONDS) for machine in machines]
        for job in jobs:
            job.wait().check()
        return time.monotonic() - began

    def run(self, only: list[str]) -> None:
        with polling_with_facts() as facts:
            for name in STEPS:
                if not only or name in only:
                    getattr(self, f"measure_{name}")()
        self.facts |= facts
        self.progress.step("done")


def conditions(facts: dict[str, Any]) -> str:
    """Returns a line of text about the machine, its load and the guest."""
    return (
        f"{facts['processors']} processors, {facts['processor']}, Linux {facts['host_kernel']}; "
        f"load average {facts['load_1min_before']} before and {facts['load_1min_after']} after, "
        f"{facts['steal_share']:.1%} stolen, idle processors {facts['idle_processors']}; "
        f"guest {facts.get('guest_kernel', 'not measured')}"
    )


def report(rows: list[Row]) -> str:
    """Returns the table of all figures."""
    return table(
        [["", "key", "value", "unit", "target", ""], *(row.cells() for row in nonzero_rows(rows))]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="*", default=[], choices=STEPS, help="run only these steps", metavar="STEP"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"make only 1/{QUICK} of the repetitions, to test the benchmark",
    )


def run(options: argparse.Namespace) -> int:
    # A missing program is reported at once, not after minutes.
    host_binary("tmemd"), host_binary("tmemctl")
    with Session(pinning=pinning()) as session:
        bench = Bench(session, Progress(), QUICK if options.quick else 1)
        bench.run(options.only)
        print(f"\n{conditions(bench.facts)}\n\n{report(bench.rows)}")
    return 0
