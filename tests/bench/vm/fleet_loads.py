# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Loads of several guests: clones that boot together, and a victim beside a noisy neighbour."""

from __future__ import annotations

import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from bench.vm import disks
from bench.vm.guests import LOADS, SECONDS, Box, Lab, Spec, Use, fio_command, fio_report
from bench.vm.machine import DATA, PAGE_BYTES
from bench.vm.results import Measured
from bench.vm.workloads import DISK, RAM_BYTES, WITH, WITHOUT, Workload, load_name, set_sum
from harness import disk
from harness.disk import Disk
from harness.guest import Job
from harness.paths import HarnessError
from harness.vm import MIB
from harness.wait import until

CLONES = 4
BOOT_BYTES = 64 * MIB  # files that a clone reads while it boots; they fit its RAM


class Boot(Workload):
    """Clones boot at the same time and read the same files once. The pool is empty at first."""

    key = "boot"
    title = f"boot of {CLONES} clones"
    seconds = 60
    _parameters: ClassVar = {
        "guests": f"{CLONES}, started at the same time",
        "RAM": f"{RAM_BYTES // MIB} MiB each",
        "pool": "256 MiB, empty",
        "disk": f"{DISK} each, the same image",
        "load": f"from the start of the guests until all have read {BOOT_BYTES // MIB} MiB of "
        "files, which fit their RAM",
    }

    def __init__(self) -> None:
        self.parameters = dict(self._parameters)

    def prepare(self, lab: Lab) -> None:
        self._lab = lab
        self._image = lab.image("boot", lambda path: disks.make_set_image(path, BOOT_BYTES))

    def measure(self, arm: str, repetition: int) -> Measured:
        lab = self._lab
        names = [f"{arm}{repetition}x{number}" for number in range(CLONES)]
        daemon = None
        if arm == WITH:
            daemon = lab.start_daemon(*names, pool_bytes=256 * MIB, domain="clones")
        data = Disk("data", self._image, read_only=True, throttle=disk.CLOUD_VOLUME)
        boxes = [lab.create(Spec(name, RAM_BYTES, (data,), daemon)) for name in names]
        for box in boxes:
            box.vm.prepare()

        def boot(box: Box) -> None:
            lab.boot(box)
            box.guest.mount("data", DATA, options="ro")
            box.sh(f"cat {DATA}/{disks.SET} >/dev/null")

        # The kernel kills a guest's process when the thread that started it ends. So the guests are
        # ended before the threads.
        with ThreadPoolExecutor(CLONES) as threads:
            began = time.monotonic()
            list(threads.map(boot, boxes))
            out = {"seconds": time.monotonic() - began}
            lab.end()
        return out


STARTED = "/tmp/started"  # file in the neighbour, which fio creates when its reads begin


class Neighbour(Workload):
    """A victim on the pool reads at a fixed rate while its neighbour re-reads a file.

    The neighbour's load is equal in both arms. The neighbour has the pool in only one of the arms.
    """

    key = "victim"
    title = "victim beside a noisy neighbour"
    seconds = 110
    figure = "p99_us"
    rate = 400
    reads = 2400
    theta = 0.6
    set_bytes = 240 * MIB
    noise_mib_per_s = 60
    noise_tolerance = 0.05
    _parameters: ClassVar = {
        "RAM": f"{RAM_BYTES // MIB} MiB each",
        "pool": "768 MiB for both",
        "disk": f"{DISK} each",
        "victim": "on the pool in both arms",
        "victim's load": f"fio, {reads} reads of 4 KiB, at most {rate} per second, psync, Zipf "
        f"with exponent {theta} over {set_bytes // MIB} MiB",
        "neighbour": f"fio, sequential re-read of {set_bytes // MIB} MiB, 128 KiB, at most "
        f"{noise_mib_per_s} MiB/s in both arms; it begins before the victim's reads and ends after "
        "them",
    }

    def __init__(self) -> None:
        self.parameters = dict(self._parameters)
        self._noise: dict[str, list[float]] = {arm: [] for arm in self.arms}

    def prepare(self, lab: Lab) -> None:
        path = lab.image(
            f"set{self.set_bytes // MIB}", lambda path: disks.make_set_image(path, self.set_bytes)
        )
        self._sum = set_sum(path)
        data = Disk("data", path, read_only=True, throttle=disk.CLOUD_VOLUME)
        daemon = lab.start_daemon("victim", WITH, pool_bytes=768 * MIB)
        requests = disks.make_loads_image(lab.directory / "loads.img", self._loads())
        loads = Disk("loads", requests, read_only=True)
        self._victim = lab.boot_guest(Spec("victim", RAM_BYTES, (data, loads), daemon))
        self._victim.mount_loads()
        self._neighbours = {
            WITH: lab.boot_guest(Spec(WITH, RAM_BYTES, (data,), daemon)),
            WITHOUT: lab.boot_guest(Spec(WITHOUT, RAM_BYTES, (data,), None)),
        }
        for box in (self._victim, *self._neighbours.values()):
            box.mount_set()
            for _ in range(2):
                box.sh(f"cat {DATA}/{disks.SET} >/dev/null")
            box.settle()

    @staticmethod
    def _load(arm: str, repetition: int) -> str:
        return f"{load_name(repetition)}-{arm}"

    def _loads(self) -> dict[str, str]:
        zipf = disks.Zipf(self.set_bytes // PAGE_BYTES, self.theta)
        out = {}
        for number in range(self.repetitions):
            for arm in self.arms:
                # The victim is the same guest in both arms, so each measurement reads other pages.
                name = self._load(arm, number)
                blocks = zipf.draw(self.reads, name)
                out[name] = disks.trace(f"{DATA}/{disks.SET}", PAGE_BYTES, blocks, name)
        return out

    def measure(self, arm: str, repetition: int) -> Measured:
        victim, neighbour = self._victim, self._neighbours[arm]
        for box in (victim, neighbour):
            box.settle()
        uses = Use(victim), Use(neighbour)
        noise = self._start_noise(neighbour)
        report = victim.run_fio(
            f"--read_iolog={LOADS}/{self._load(arm, repetition)} --replay_no_stall=1 "
            f"--ioengine=psync --thinktime={1_000_000 // self.rate}"
        )
        noisy = self._end_noise(noise)
        read = report["read"]
        if read["total_ios"] != self.reads:
            raise HarnessError(f"fio made {read['total_ios']} reads, not {self.reads}")
        own, other = (use.growth() for use in uses)
        self._noise[arm].append(noisy["read"]["bw"] / 1024)
        return {
            **own,
            "p99_us": read["clat_ns"]["percentile"]["99.000000"] / 1000,
            "p50_us": read["clat_ns"]["percentile"]["50.000000"] / 1000,
            "iops": read["iops"],
            "noise_mib_per_s": noisy["read"]["bw"] / 1024,
            "noise_s": noisy["read"]["runtime"] / 1000,
            "noise_disk_reads": other["disk_reads"],
        }

    def _start_noise(self, box: Box) -> Job:
        """Starts the neighbour's reads and returns when they have begun."""
        box.sh(f"rm -f {STARTED}")
        # Without "exec", the signal that ends fio would also end its shell, and the report be lost.
        job = box.start(
            "exec "
            + fio_command(
                f"--rw=read --bs=128k --filename={DATA}/{disks.SET} --ioengine=psync --time_based "
                f"--runtime={SECONDS} --rate={self.noise_mib_per_s}m "
                f"--exec_prerun='touch {STARTED}'"
            )
        )
        until(
            lambda: job.done() or box.guest.run(f"test -e {STARTED}").status == 0,
            60,
            "the neighbour's reads begin",
        )
        return job

    @staticmethod
    def _end_noise(job: Job) -> dict[str, Any]:
        """Ends the neighbour's reads, which must still run, and returns fio's report."""
        if job.done():
            raise HarnessError(f"the neighbour's reads ended too early: {job.wait().text}")
        job.kill(signal.SIGINT)
        return fio_report(job.wait().text)

    def check(self) -> None:
        """Raises if a guest has read a wrong byte, or if the neighbour's read rates differ.

        The rates with and without the pool may differ by at most `noise_tolerance`.
        """
        for box in (self._victim, self._neighbours[WITH]):
            found = box.sh(f"sha256sum {DATA}/{disks.SET}").split()[0]
            if found != self._sum:
                raise HarnessError(f"{self.key}, {box.vm.name}: the file's SHA-256 is wrong")
        with_pool, without = (statistics.median(self._noise[arm]) for arm in (WITH, WITHOUT))
        if abs(with_pool / without - 1) > self.noise_tolerance:
            raise HarnessError(
                f"{self.key}: the neighbour with the pool read {with_pool:.1f} MiB/s, the one "
                f"without it {without:.1f} MiB/s. The two measurements are not comparable: the "
                "machine is too busy for both rates."
            )
