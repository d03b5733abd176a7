# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares ways to swap the anonymous memory of native guests, at equal bytes of the host.

In one arm, the driver serves the swap area on the throttled disk, and tmemd has its pages. Another
arm imitates a pool with a disk in memory, which reads as fast as a get of the pool. Its writes have
the limits of the disk, because the kernel writes each page to the disk, too. The other arms do not
use the project: a disk, zram or zswap in the guest, and a disk on the host's zram.

The program needs root and a free /dev/zram0. It saves each repetition, and an interrupted run
continues with the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vm import disks, intervals
from bench.vm.host_bytes import used_bytes
from bench.vm.machine import DATA, SECONDS, SECTOR_BYTES
from bench.vm.output import Progress, table
from bench.vm.results import Measured, Repetition, Results
from harness import disk, native
from harness.daemon import Daemon
from harness.disk import Disk, Throttle
from harness.guest import Job
from harness.machine import pinning, polling_with_facts, processor_model
from harness.native import NativeConfig, NativeVm
from harness.paths import ROOT, TESTS, HarnessError, guest_program, host_binary
from harness.session import Session
from harness.vm import MIB

RESULTS = ROOT / "build/swap.json"
REPETITIONS = 3
ANON = "/bin/anon"
NOISE_PERCENT = 50  # lz4 compresses a page with this share of noise to about 52 %
STORED = 0.52
COUNT = 4000  # random operations in each of the two random phases
SPARE_BYTES = 64 * MIB  # room on a disk for swap slots that are not free yet
FEW = 4  # random operations of a process that only fills memory
RAM_BYTES = 128 * MIB
SIZES = (1.5, 2.0, 3.0, 4.0)  # sizes of the process, in multiples of RAM_BYTES
# A get of a page of 4 KiB from the pool takes 50 µs in a pinned native guest, and took 94 µs in
# guests that were not pinned (docs/benchmarks/history.md).
GETS_PER_SECOND, SLOW_GETS_PER_SECOND = 20_000, 10_600
# zram has the size of half of the RAM, which is the default of systemd's zram-generator. zram of
# the size of the RAM leaves a guest of 160 MiB so little memory that the kernel kills the process.
ZRAM_SHARE = 0.5
ZSWAP_PERCENT = 25  # part of the RAM for zswap, as much as the zram needs when it is full
DISK, GET, SLOW_GET, HOST_ZRAM = "disk", "get", "slow_get", "host_zram"
ZRAM, ZSWAP, POOL, FILES = "zram", "zswap", "pool", "files"
ARMS = {
    DISK: "disk of 3,000 IOPS and 125 MB/s, more RAM",
    GET: f"imitated pool, {GETS_PER_SECOND:,} gets per second",
    SLOW_GET: f"imitated pool, {SLOW_GETS_PER_SECOND:,} gets per second",
    HOST_ZRAM: "disk on the host's zram",
    ZRAM: "zram in the guest, more RAM",
    ZSWAP: "zswap in the guest, more RAM",
    POOL: "pool, swap on the throttled disk",
    FILES: "pool of file pages",
}
FAST, SLOW = "fast", "slow"  # swap areas: one in the host's memory, and the throttled disk
ENOUGH = 0.95  # the host's zram counts as equal to the pool from this fraction of its speed on
BACK_SHARE = 0.05  # fraction that the host may lack when the memory counts as returned


@dataclass(frozen=True)
class GetThrottle(Throttle):
    """Limits of the imitated pool: those of gets for reads, those of the disk for writes."""

    gets_per_second: int = GETS_PER_SECOND

    def arguments(self) -> dict[str, int]:
        return {
            "iops-read": self.gets_per_second,
            "iops-write": self.iops,
            "bps-write": self.bytes_per_second,
        }


class HostZram:
    """The host's /dev/zram0."""

    DEVICE, SYSFS = Path("/dev/zram0"), Path("/sys/block/zram0")

    def __init__(self, size_bytes: int) -> None:
        if not self.SYSFS.exists() or (self.SYSFS / "initstate").read_text().strip() != "0":
            raise HarnessError(f"{self.DEVICE} does not exist or is in use; this program needs it")
        (self.SYSFS / "comp_algorithm").write_text("lz4")
        (self.SYSFS / "disksize").write_text(str(size_bytes))

    def used_bytes(self) -> int:
        return int((self.SYSFS / "mm_stat").read_text().split()[2])

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since the last call."""
        found = int((self.SYSFS / "mm_stat").read_text().split()[4])
        (self.SYSFS / "mem_used_max").write_text("0")
        return found

    def reset(self) -> None:
        (self.SYSFS / "reset").write_text("1")


class Guest:
    """A native guest with the swap areas of an arm."""

    def __init__(self, vm: NativeVm, arm: str) -> None:
        self.vm = vm
        self.arm = arm

    def start(self) -> None:
        self.vm.start()
        guest = self.vm.guest
        if self.arm == ZSWAP:
            where = "/sys/module/zswap/parameters"
            guest.sh(
                # Linux 6.12 has several allocators, 7.3 has only zsmalloc.
                f"for pool in {where}/zpool*; do [ ! -e $pool ] || echo zsmalloc >$pool; done && "
                f"echo lz4 >{where}/compressor && "
                f"echo {ZSWAP_PERCENT} >{where}/max_pool_percent && echo Y >{where}/enabled"
            )
        if self.arm == ZRAM:
            guest.sh(
                "echo lz4 >/sys/block/zram0/comp_algorithm && "
                f"echo {int(self.vm.config.memory_bytes * ZRAM_SHARE)} "
                ">/sys/block/zram0/disksize && "
                "mkswap /dev/zram0 >/dev/null && swapon /dev/zram0"
            )
        # The kernel uses the area first that was added first.
        for one in self.vm.config.disks:
            self.add_area(one)

    def add_area(self, one: Disk) -> None:
        device = Path("/dev") / self.vm.guest.disk(one.name)
        discard = "-d" if one.discard else ""
        if one.discard:
            # Linux 6.12 frees slots in clusters, and discards them, only on a disk that does not
            # rotate (setup_clusters() in mm/swapfile.c). It takes virtio disks for rotating ones.
            self.vm.guest.sh(f"echo 0 >/sys/block/{device.name}/queue/rotational")
        self.vm.guest.sh(f"mkswap {device} >/dev/null && swapon {discard} {device}")

    def touch_ram(self) -> None:
        """Makes the host allocate most of the guest's RAM, so that no measurement includes it."""
        mib = self.vm.config.memory_bytes // MIB * 7 // 10
        self.vm.guest.sh(
            "mount -t tmpfs -o size=90% tmpfs /mnt && "
            f"head -c {mib}m /dev/zero >/mnt/touch && umount /mnt"
        )

    def warm(self) -> None:
        """Swaps once. From its first write on, the driver knows a swap area."""
        self.vm.guest.sh(self.command(SIZES[-1], FEW, 0), SECONDS)
        if self.arm == POOL:
            state = self.vm.guest.sh("cat /sys/kernel/virtio_tmem/mounts/swap-*/state").strip()
            if state != "on":
                raise HarnessError(f"{self.vm.name}: the driver does not serve the swap: {state}")

    def command(self, size: float, count: int, seed: int) -> str:
        return f"{ANON} {round(size * RAM_BYTES / MIB)} {NOISE_PERCENT} {count} {seed}"

    def run_process(self, size: float, count: int, seed: int) -> Measured:
        """Runs a process with `size` times RAM_BYTES, and returns its figures."""
        before = self.vm.guest.disk_stat(SLOW)
        text = self.vm.guest.sh(self.command(size, count, seed), SECONDS)
        disk_part = self.vm.guest.disk_stat(SLOW) - before
        return {
            **parse(text),
            "disk_read_mib": disk_part.read_sectors * SECTOR_BYTES / MIB,
            "disk_write_mib": disk_part.write_sectors * SECTOR_BYTES / MIB,
        }

    def start_process(self, size: float) -> Job:
        """Starts a process with `size` times RAM_BYTES, which holds its memory until it is killed.

        Returns when the process has written all of its memory.
        """
        job = self.vm.guest.start(f"exec {self.command(size, FEW, 1)} hold", SECONDS)
        while b"fault" not in job.stdout():
            if job.done():
                job.wait().check()
                raise HarnessError(f"{self.vm.name}: {ANON} ended before its memory was measured")
            time.sleep(0.05)
        return job

    def pids(self) -> list[int]:
        return [self.vm.process.pid, *(export.process.pid for export in self.vm.exports)]

    def end(self) -> None:
        self.vm.check_console()
        self.vm.stop()


def parse(text: str) -> Measured:
    """Returns the figures of a process, read from the output of the guest program anon."""
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    out: Measured = {}
    for name in ("fill", "sequential", "read", "write"):
        out[f"{name}_s"] = float(lines[name][1])
    random_s = out["read_s"] + out["write_s"]
    out["random_ops_per_s"] = 2 * float(lines["read"][0]) / random_s
    out["peak_s"] = out["fill_s"] + out["sequential_s"] + random_s
    out["major_faults"] = sum(float(lines[name][2]) for name in ("sequential", "read", "write"))
    out["fault_p50_us"], out["fault_p99_us"] = map(float, lines["fault"][1:])
    return out


class Wait:
    """Measures the time until the host has memory back, at most `seconds`.

    `used` returns the bytes that the host does not have back. `nothing` is its value when this
    object is created.
    """

    def __init__(self, used: Callable[[], int], seconds: float = 30) -> None:
        self._used = used
        self._seconds = seconds
        self.nothing = used()

    def begin(self) -> None:
        self._full = self._used()
        self._began = time.monotonic()

    def end(self) -> None:
        goal = self.nothing + (self._full - self.nothing) * BACK_SHARE
        while True:
            self._left = self._used()
            self._took = time.monotonic() - self._began
            if self._left <= goal or self._took >= self._seconds:
                return
            time.sleep(0.01)

    def figures(self, what: str) -> Measured:
        return {
            f"{what}_s": self._took,
            f"{what}_from_mib": self._full / MIB,
            f"{what}_to_mib": self._left / MIB,
        }


class Part:
    """A part of the benchmark: guests of all arms, which are measured in turns."""

    key: str
    title: str
    arms: tuple[str, ...]

    def __init__(self, session: Session, ends: contextlib.ExitStack) -> None:
        self.session = session
        self.ends = ends

    def prepare(self) -> None:
        raise NotImplementedError

    def measure(self, arm: str, repetition: int) -> Measured:
        raise NotImplementedError

    def make_memory_file(self, name: str, size_bytes: int) -> Path:
        """Returns an empty image in the host's memory, which the part's end removes."""
        path = Path(f"/dev/shm/tmem-swap-{os.getpid()}-{name}")
        self.ends.callback(path.unlink, missing_ok=True)
        return disk.blank(path, size_bytes)

    def make_throttled_disk(self, name: str) -> Disk:
        """Returns an empty disk with the limits of a cloud volume."""
        path = self.session.directory / f"{name}.img"
        image = disk.blank(path, round(SIZES[-1] * RAM_BYTES) + SPARE_BYTES)
        return Disk(SLOW, image, throttle=disk.CLOUD_VOLUME)

    def boot_guest(
        self,
        arm: str,
        number: int,
        share_bytes: int,
        area_bytes: int,
        daemon: Daemon | None = None,
    ) -> Guest:
        """Boots a guest of an arm, and returns it.

        `share_bytes` is the guest's part of the host memory beside its RAM, and `area_bytes` the
        size of its swap area in the host's memory. A guest with `daemon` has its pool.
        """
        name = f"{arm}{number}".replace("_", "")
        areas = [self.make_throttled_disk(name)]
        if arm in (GET, SLOW_GET):
            volume = disk.CLOUD_VOLUME
            gets = GETS_PER_SECOND if arm == GET else SLOW_GETS_PER_SECOND
            fast = Disk(
                FAST,
                self.make_memory_file(name, area_bytes),
                throttle=GetThrottle(volume.iops, volume.bytes_per_second, gets),
                discard=True,
                in_memory=True,
            )
            areas.insert(0, fast)
        if arm == HOST_ZRAM:
            part = (number * area_bytes, area_bytes)
            areas.insert(0, Disk(FAST, HostZram.DEVICE, part=part, discard=True))
        ram = RAM_BYTES if daemon or len(areas) > 1 else RAM_BYTES + share_bytes
        config = NativeConfig(
            name=name,
            memory_bytes=ram,
            disks=areas,
            files={ANON: guest_program(TESTS / "guest/anon.c")},
            tmem=daemon.socket(name) if daemon else None,
            parameters="swap=1" if daemon else "",
        )
        guest = Guest(self.session.native_vm(config), arm)
        guest.start()
        return guest

    def make_host_zram(self, size_bytes: int) -> HostZram:
        zram = HostZram(size_bytes)
        self.ends.callback(zram.reset)
        return zram


class Fleet(Part):
    """Guests whose processes grow beyond their RAM, one guest after the other."""

    guests: int
    memory_bytes: int  # host memory of an arm beside RAM_BYTES for each guest
    area_bytes: int  # size of a guest's swap area in the host's memory
    count = COUNT

    def prepare(self) -> None:
        self._zram = self.make_host_zram(self.guests * self.area_bytes)
        share = self.memory_bytes // self.guests
        names = [f"{POOL}{number}" for number in range(self.guests)]
        self._daemon = self.session.daemon(*names, pool_size=f"{self.memory_bytes // MIB}MiB")
        self._daemon.start()
        self._fleets = {
            arm: [
                self.boot_guest(
                    arm, number, share, self.area_bytes, self._daemon if arm == POOL else None
                )
                for number in range(self.guests)
            ]
            for arm in self.arms
        }
        for fleet in self._fleets.values():
            for guest in fleet:
                guest.touch_ram()
                guest.warm()

    def peaks(self, repetition: int) -> list[float]:
        """Returns the sizes of the processes, one after the other."""
        raise NotImplementedError

    def measure(self, arm: str, repetition: int) -> Measured:
        fleet = self._fleets[arm]
        self._zram.peak_bytes()
        sizes = self.peaks(repetition)
        found: dict[float, list[Measured]] = {size: [] for size in SIZES}
        for number, size in enumerate(sizes):
            guest = fleet[number % self.guests]
            found[size].append(
                guest.run_process(size, self.count, repetition * len(sizes) + number + 1)
            )
        out: Measured = {}
        for size, some in found.items():
            for name in some[0]:
                values = [one[name] for one in some]
                out[f"{name}_{size:g}"] = statistics.mean(values)
        pids = [pid for guest in fleet for pid in guest.pids()]
        if arm == POOL:
            pids.append(self._daemon.process.pid)
        out["host_mib"] = used_bytes(pids) / MIB
        if arm == HOST_ZRAM:
            out["host_zram_mib"] = self._zram.peak_bytes() / MIB
        return out


class One(Fleet):
    """One guest; the host's memory beside its RAM is too small for the largest process."""

    key = "one"
    title = "one guest"
    arms = (DISK, POOL, GET, SLOW_GET, HOST_ZRAM, ZRAM, ZSWAP)
    guests = 1
    memory_bytes = 128 * MIB
    area_bytes = round(memory_bytes / STORED / MIB) * MIB

    def peaks(self, repetition: int) -> list[float]:
        return list(SIZES)


class Eight(Fleet):
    """Eight guests; each process ends before that of the next guest starts."""

    key = "eight"
    title = "eight guests, staggered peaks"
    arms = (DISK, POOL, GET, HOST_ZRAM, ZRAM, ZSWAP)
    guests = 8
    memory_bytes = 256 * MIB
    area_bytes = 512 * MIB

    def peaks(self, repetition: int) -> list[float]:
        return [SIZES[(number + repetition) % len(SIZES)] for number in range(self.guests)]


class Back(Part):
    """Time until the host has memory back.

    It is measured after a process in the guest has ended ("freed_s"), and while the process lives
    and the host takes the memory ("taken_s").
    """

    key = "back"
    title = "time until the host has the memory back"
    arms = (HOST_ZRAM, FILES, ZRAM, ZSWAP, DISK)
    size = 3.0
    share_bytes = 128 * MIB
    area_bytes = 512 * MIB
    pool_bytes = 256 * MIB

    def prepare(self) -> None:
        self._zram = self.make_host_zram(self.area_bytes)
        self._guests = {
            arm: self.boot_guest(arm, 0, self.share_bytes, self.area_bytes)
            for arm in self.arms
            if arm != FILES
        }

    def measure(self, arm: str, repetition: int) -> Measured:
        if arm == FILES:
            return self._measure_taken_from_files(repetition)
        guest = self._guests[arm]
        if arm != HOST_ZRAM:
            wait = Wait(lambda: used_bytes(guest.pids()), seconds=5)
            wait.nothing = 0
            self._measure_freed(guest, wait)
            return wait.figures("freed")
        wait = Wait(self._zram.used_bytes)
        self._measure_freed(guest, wait)
        out = wait.figures("freed")
        # The host cannot shrink its zram. It has to ask the guest for the memory.
        wait = Wait(self._zram.used_bytes)
        job = guest.start_process(self.size)
        wait.begin()
        device = f"/dev/{guest.vm.guest.disk(FAST)}"
        guest.vm.guest.sh(f"swapoff {device} && blkdiscard {device}", SECONDS)
        wait.end()
        job.kill()
        job.wait()
        guest.vm.guest.sh(f"swapoff /dev/{guest.vm.guest.disk(SLOW)}")
        for area in guest.vm.config.disks:
            guest.add_area(area)
        return out | wait.figures("taken")

    def _measure_freed(self, guest: Guest, wait: Wait) -> None:
        """Ends a process in the guest and waits until its memory is back."""
        job = guest.start_process(self.size)
        wait.begin()
        job.kill()
        job.wait()
        wait.end()

    def _measure_taken_from_files(self, repetition: int) -> Measured:
        """Fills a pool with file pages, makes the pool smaller, and returns the times."""
        path = self.session.directory / "set.img"
        if not path.exists():
            disks.make_set_image(path, 4 * RAM_BYTES)
        name = f"pool{repetition}"
        daemon = self.session.daemon(name, pool_size=f"{self.pool_bytes // MIB}MiB")
        daemon.start()
        config = NativeConfig(
            name=name,
            memory_bytes=RAM_BYTES,
            disks=[Disk("data", path, read_only=True)],
            tmem=daemon.socket(name),
        )
        vm = self.session.native_vm(config)
        vm.start()
        vm.guest.mount("data", DATA, options="ro")
        for _ in range(2):
            vm.guest.sh(f"cat {DATA}/{disks.SET} >/dev/null", SECONDS)
        time.sleep(1)  # until the pool has compressed the last pages
        pids = [daemon.process.pid]
        wait = Wait(lambda: used_bytes(pids))
        held = daemon.stats()["pool"]["held_bytes"]
        wait.nothing = used_bytes(pids) - held
        wait.begin()
        daemon.call("SetPoolSize", size_bytes=1 * MIB)
        wait.end()
        vm.check_console()
        vm.stop()
        daemon.stop()
        return {**wait.figures("taken"), "held_mib": held / MIB}


PARTS: dict[str, type[Part]] = {part.key: part for part in (One, Eight, Back)}


def settings(quick: bool) -> dict[str, Any]:
    """Returns the settings that all repetitions in a file of results must have in common."""
    kernel = native.build()
    anon = guest_program(TESTS / "guest/anon.c")
    parameters = [
        RAM_BYTES, SIZES, COUNT, GETS_PER_SECOND, SLOW_GETS_PER_SECOND, ZRAM_SHARE, ZSWAP_PERCENT,
        *((part.memory_bytes, part.area_bytes, part.arms) for part in (One, Eight)),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:16]
    return {
        "quick": quick,
        "kernel": hashlib.sha256(kernel.read_bytes()).hexdigest()[:16],
        "anon": anon.name,
        "parameters": digest,
        "processor": processor_model(),
    }


def measure(results: Results, keys: list[str], repetitions: int, progress: Progress) -> None:
    """Measures the repetitions that are missing."""
    for key in keys:
        done = len(results.repetitions(key))
        if done >= repetitions:
            continue
        facts: dict[str, Any] = {}
        try:
            with polling_with_facts() as facts:
                _measure_part(results, key, done, repetitions, progress)
        finally:
            if measured := len(results.repetitions(key)) - done:
                results.add_machine({**facts, "part": key, "repetitions": measured})


def _measure_part(
    results: Results, key: str, done: int, repetitions: int, progress: Progress
) -> None:
    with contextlib.ExitStack() as ends, Session(pinning=pinning()) as session:
        part = PARTS[key](session, ends)
        progress.step(part.title)
        part.prepare()
        progress.step("  ready")
        for number in range(done, repetitions):
            found: Repetition = {}
            turn = number % len(part.arms)
            for arm in part.arms[turn:] + part.arms[:turn]:
                began = time.monotonic()
                found[arm] = part.measure(arm, number)
                progress.step(f"  {arm}: {time.monotonic() - began:.0f} s")
            session.check_consoles()
            results.add(key, {"title": part.title}, found)


def middle(found: list[Repetition], arm: str, name: str) -> float:
    return statistics.median(one[arm][name] for one in found)


def fleet_tables(found: list[Repetition], arms: tuple[str, ...]) -> Iterator[str]:
    """Yields a table for each figure, with the sizes as columns, and the verdict of the gate."""
    for name, what, digits in (
        ("peak_s", "time of a process until its last operation, s", 2),
        ("random_ops_per_s", "random operations per second", 0),
        ("fill_s", "time of the first write of all pages, s", 2),
        ("sequential_s", "time of the sequential read of 128 MiB, s", 2),
        ("fault_p50_us", "median of a fault that reads from swap, µs", 0),
        ("fault_p99_us", "99th percentile of such a fault, µs", 0),
        ("disk_read_mib", "read from the throttled disk, MiB", 0),
        ("disk_write_mib", "written to the throttled disk, MiB", 0),
    ):
        rows = [[what, *(f"{size:g} x RAM" for size in SIZES)]]
        for arm in arms:
            values = (middle(found, arm, f"{name}_{size:g}") for size in SIZES)
            rows.append([ARMS[arm], *(f"{value:,.{digits}f}" for value in values)])
        yield table(rows)
    rows = [["host memory of guests and disks, and peak of the host's zram, MiB", ""]]
    for arm in arms:
        text = f"{middle(found, arm, 'host_mib'):,.0f}"
        if arm == HOST_ZRAM:
            text += f" + {middle(found, arm, 'host_zram_mib'):,.0f}"
        rows.append([ARMS[arm], text])
    yield table(rows)
    rows = [["disk on the host's zram / other", *(f"{size:g} x RAM" for size in SIZES)]]
    for name, what, inverse in (
        ("random_ops_per_s", "random operations per second", False),
        ("peak_s", "speed of the whole process", True),
    ):
        for rival in (POOL, GET, SLOW_GET):
            if rival not in arms:
                continue
            cells = []
            for size in SIZES:
                key = f"{name}_{size:g}"
                pairs = [(one[HOST_ZRAM][key], one[rival][key]) for one in found]
                if inverse:
                    pairs = [(other, own) for own, other in pairs]
                estimate = intervals.ratio(pairs)
                verdict = "" if estimate.value >= ENOUGH else " below"
                cells.append(
                    f"{estimate.value:.2f} ({estimate.low:.2f}-{estimate.high:.2f}){verdict}"
                )
            rows.append([f"{what}; {ARMS[rival]}", *cells])
    yield table(rows)


def report(results: Results) -> str:
    out = []
    for key, part in PARTS.items():
        found = results.repetitions(key)
        if not found:
            continue
        out.append(f"{part.title}, {len(found)} repetitions")
        if issubclass(part, Fleet):
            out += fleet_tables(found, part.arms)
            continue
        rows = [["", "s", "from MiB", "to MiB"]]
        for arm in part.arms:
            for what in ("freed", "taken"):
                if f"{what}_s" in found[0][arm]:
                    names = (f"{what}_s", f"{what}_from_mib", f"{what}_to_mib")
                    values = (f"{middle(found, arm, name):,.2f}" for name in names)
                    rows.append([f"{ARMS[arm]}, {what}", *values])
        out.append(table(rows))
    return "\n\n".join(out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[], metavar="PART",
                        help=f"measure only these parts: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one repetition, to try the benchmark")
    parser.add_argument("--fresh", action="store_true", help="measure all repetitions again")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--report", action="store_true", help="measure nothing, only report")


def run(options: argparse.Namespace) -> int:
    host_binary("tmemd"), host_binary("tmemctl")
    found = settings(options.quick)
    results = Results(options.json or RESULTS, found, fresh=options.fresh)
    if not options.report:
        repetitions = 1 if options.quick else REPETITIONS
        measure(results, options.only or [*PARTS], repetitions, Progress())
    print(report(results))
    return 0
