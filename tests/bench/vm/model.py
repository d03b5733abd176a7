# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Predicts the time of random re-reads from counts and measured costs.

    time = requests * work + misses * (cost of a disk read or of a page from the pool)

plus a bound by the disk's requests per second and by the host's processors. The number of misses
comes from an LRU cache of pages that sees the same requests as the guest. The size of that cache
and the costs are calibrated with three measurements: all in RAM, and RAM of two thirds of the file
with the pool and without it. The hold-outs are predicted before they are measured.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

from bench.vm import disks
from bench.vm.guests import Box, fio_command, fio_report
from bench.vm.machine import DATA, PAGE_BYTES, SEED
from bench.vm.results import Measured, Repetition
from bench.vm.workloads import (
    RAM_BYTES,
    SET_BYTES,
    WARM_UPS,
    WITH,
    WITHOUT,
    RandomReread,
)
from harness import disk
from harness.paths import HarnessError
from harness.vm import MIB

CALIBRATION, ALL_IN_RAM = "rand_reread_1", "model_all_in_ram"
HALF, MORE, TWO = "holdout_half_ram", "holdout_more_ram", "holdout_two_guests"
HOLDOUTS = (HALF, MORE, TWO)
MODEL_PARTS = (ALL_IN_RAM, *HOLDOUTS)
WRITE_SHARE = 0.2
PROCESSORS = os.cpu_count() or 1


class AllInRam(RandomReread):
    """Random re-read in a guest whose RAM holds the whole file."""

    arms = (WITHOUT,)
    ram_bytes = SET_BYTES + 160 * MIB
    repetitions = 5

    def __init__(self) -> None:
        super().__init__(1)
        self._disk_us = 0.0  # of the repetitions, not of the warm-up
        self.key = ALL_IN_RAM
        self.title = "model: all in RAM"
        self.seconds = 20

    def before(self, box: Box, repetition: int) -> None:
        # A slow rate keeps the disk below its limit, so this is the latency of an idle disk.
        report = box.fio(
            f"--rw=randread --bs={PAGE_BYTES} --filename={DATA}/{disks.SET} --direct=1 "
            "--ioengine=psync --rate_iops=400 --number_ios=400"
        )
        self._disk_us = report["read"]["clat_ns"]["mean"] / 1000

    def act(self, box: Box, repetition: int) -> Measured:
        return super().act(box, repetition) | {"disk_us": self._disk_us}


class OtherRam(RandomReread):
    """Random re-read with more or less RAM than in the calibration: a hold-out."""

    repetitions = 5

    def __init__(self, key: str, factor: float) -> None:
        self.ram_bytes = round(RAM_BYTES * factor)
        super().__init__(1)
        self.key = key
        self.title = f"hold-out: RAM * {factor:g}"
        self.seconds = 65


def half_ram() -> OtherRam:
    """Returns the hold-out with half of the RAM.

    An earlier version of the model was corrected after a trial of this hold-out.
    """
    return OtherRam(HALF, 0.5)


def more_ram() -> OtherRam:
    """Returns the hold-out with more RAM, which was never measured before the model was final."""
    return OtherRam(MORE, 1.25)


class TwoGuests(RandomReread):
    """Two guests at the same time, with 20 % writes: a hold-out."""

    writable = True
    write_share = WRITE_SHARE
    guests = 2
    sum_of = None
    repetitions = 5

    def __init__(self) -> None:
        super().__init__(1)
        self.key = TWO
        self.title = "hold-out: two guests, 20 % writes"
        self.seconds = 75
        self.parameters |= {"guests": "2 at the same time", "writes": f"{WRITE_SHARE:.0%}"}

    def command(self, repetition: int) -> str:
        more = "--end_fsync=1 --refill_buffers --buffer_compress_percentage=50"
        return fio_command(f"{self.trace(repetition)} {more}")

    def act(self, box: Box, repetition: int) -> Measured:
        box.sh(self.command(repetition))
        return {}

    def measure(self, arm: str, repetition: int) -> Measured:
        boxes = self.all_boxes[arm]
        for box in boxes:
            box.settle()
        jobs = [box.job(self.command(repetition)) for box in boxes]
        reports = [fio_report(job.wait().check().text) for job in jobs]
        for report in reports:
            if (made := sum(report[kind]["total_ios"] for kind in ("read", "write"))) != self.reads:
                raise HarnessError(f"fio made {made} requests, not {self.reads}")
        return {
            "seconds": max(
                max(report[kind]["runtime"] for kind in ("read", "write")) / 1000
                for report in reports
            )
        }


class Lru:
    """A cache of pages that evicts the page that was not used for the longest time."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._held: OrderedDict[int, None] = OrderedDict()

    def use(self, page: int) -> bool:
        """Uses a page; returns whether the cache had it."""
        if page in self._held:
            self._held.move_to_end(page)
            return True
        self._held[page] = None
        if len(self._held) > self._pages:
            self._held.popitem(last=False)
        return False


def misses(capacity: int, repetitions: int, zipf: disks.Zipf, reads: int,
           write_share: float = 0) -> float:  # fmt: skip
    """Returns how many reads of a repetition miss the guest's cache, on average over repetitions.

    Writes fill the cache and read nothing, because they replace whole pages.
    """
    cache = Lru(capacity)
    for page in range(zipf.blocks):
        cache.use(page)
    out = 0
    for number in itertools.chain(WARM_UPS, range(repetitions)):
        source = random.Random(f"{SEED}-{number}-writes")
        for page in zipf.draw(reads, str(number)):
            written = source.random() < write_share
            if not cache.use(page) and not written and number >= 0:
                out += 1
    return out / repetitions


@dataclass(frozen=True)
class Calibration:
    """Costs in microseconds for each request or page, and the size of the guest's page cache."""

    work_us: float  # a request whose page is in RAM
    disk_us: float  # a page from the idle disk, in addition
    get_us: float  # a page from the pool, in addition; includes the put of another page
    cpu_us: float  # processor time of guest and tmemd for a page from the pool, in addition
    cpu_work_us: float  # processor time of the guest for a request whose page is in RAM
    lost: float  # share of the misses that the pool does not have
    cache_pages: int  # size of the LRU cache that misses as often as the guest
    lru_share: float  # cache_pages / number of pages in the guest's page cache


Data = dict[str, Any]  # the contents of the file of results


def _repetitions(results: Data, key: str) -> list[Repetition]:
    found: list[Repetition] = results["parts"].get(key, {}).get("repetitions", [])
    return found


def _median(results: Data, key: str, arm: str, figure: str) -> float:
    found = _repetitions(results, key)
    if not found:
        raise HarnessError(f"the model needs the results of {key}: measure it first")
    return statistics.median(repetition[arm][figure] for repetition in found)


def calibrate(results: Data) -> Calibration:
    """Returns the costs that explain the calibration's measurements."""
    load = RandomReread(1)
    reads, count = load.reads, len(_repetitions(results, CALIBRATION))
    work = _median(results, ALL_IN_RAM, WITHOUT, "seconds") / reads * 1e6
    # Count disk requests and not bytes, because a request may read more pages than the reader
    # wants.
    missed = _median(results, CALIBRATION, WITHOUT, "disk_reads")
    cached = _median(results, CALIBRATION, WITH, "seconds") * 1e6
    hits = _median(results, CALIBRATION, WITH, "hits")
    if not hits:
        raise HarnessError(
            f"the model cannot be calibrated: {CALIBRATION} read no page from the pool"
        )
    from_disk = _median(results, CALIBRATION, WITH, "disk_reads")
    disk_us = _median(results, ALL_IN_RAM, WITHOUT, "disk_us")
    get_us = (cached - reads * work - from_disk * disk_us) / hits
    cpu_work = _median(results, ALL_IN_RAM, WITHOUT, "guest_cpu_s") / reads * 1e6
    cpu = sum(_median(results, CALIBRATION, WITH, name) for name in ("guest_cpu_s", "tmemd_cpu_s"))
    # A smaller cache misses more. Search for the size that misses as often as the guest.
    low, high = 0, load.zipf.blocks
    while high - low > load.zipf.blocks // 200:
        middle = (low + high) // 2
        if misses(middle, count, load.zipf, reads) > missed:
            low = middle
        else:
            high = middle
    return Calibration(
        work_us=work,
        disk_us=disk_us,
        get_us=get_us,
        cpu_us=max(0.0, cpu * 1e6 - reads * cpu_work) / hits,
        cpu_work_us=cpu_work,
        lost=from_disk / (hits + from_disk),
        cache_pages=high,
        lru_share=high * PAGE_BYTES / MIB / _median(results, CALIBRATION, WITHOUT, "cached_mib"),
    )


def _seconds(
    of: Calibration, load: RandomReread, missed: float, written: float = 0
) -> dict[str, float]:
    """Returns the predicted seconds without and with the pool.

    The limit of the disk counts all requests from the beginning, so work between them costs no
    time as long as the disk is at its limit.
    """
    iops = disk.CLOUD_VOLUME.iops
    work = load.reads * of.work_us
    lost = missed * of.lost
    got = (missed - lost) * of.get_us
    plain, pooled = missed + written, lost + written
    return {
        WITHOUT: max((work + missed * of.disk_us) / 1e6, plain / iops),
        WITH: max((work + got + lost * of.disk_us) / 1e6, pooled / iops),
    }


def predict(results: Data) -> dict[str, Any]:
    """Returns the predicted seconds of all hold-outs."""
    of = calibrate(results)
    out: dict[str, Any] = {"calibration": asdict(of)}
    for load in (half_ram(), more_ram()):
        added = (load.ram_bytes - RAM_BYTES) / PAGE_BYTES
        pages = max(1, round(of.cache_pages + added * of.lru_share))
        missed = misses(pages, load.repetitions, load.zipf, load.reads)
        out[load.key] = {"misses": missed, **_seconds(of, load, missed)}
    two = TwoGuests()
    two_misses = misses(of.cache_pages, two.repetitions, two.zipf, two.reads, WRITE_SHARE)
    written = two.reads * WRITE_SHARE
    seconds = _seconds(of, two, two_misses, written)
    busy = two.guests * (two.reads * of.cpu_work_us + two_misses * of.cpu_us) / 1e6 / PROCESSORS
    out[TWO] = {
        "misses": two_misses,
        WITHOUT: seconds[WITHOUT],
        WITH: max(seconds[WITH], busy),
    }
    return out


def write_seconds() -> float:
    """Returns the longest time in seconds in which a disk writes the pages of a guest of TwoGuests.

    It is shorter if the guest has written some pages more than once.
    """
    return TwoGuests().reads * WRITE_SHARE / disk.CLOUD_VOLUME.iops


def errors(results: Data) -> dict[str, float]:
    """Returns the relative errors of the predicted times, for the hold-outs that were measured."""
    out = {}
    predictions = results.get("predictions", {})
    for key in HOLDOUTS:
        for arm in (WITHOUT, WITH):
            if key in predictions and _repetitions(results, key):
                measured = _median(results, key, arm, "seconds")
                out[f"{key} {arm}"] = predictions[key][arm] / measured - 1
    return out


# Costs on a host with KVM that the predictions vary: a page from the pool, and a disk read.
KVM_WORK_US = 1.5  # pread(2) of a page in the page cache
KVM_GET_US = (15, 30, 60)
THROTTLE_US = 333  # of a disk of 3,000 IOPS
KVM_DISK_US = (100, THROTTLE_US, 1000)  # local SSD, limited volume, network volume


def kvm_speedups(results: Data) -> list[dict[str, float]]:
    """Returns the predicted speedups of a Zipf random re-read on hosts with KVM."""
    out = []
    of = calibrate(results)
    load = RandomReread(1)
    missed = misses(of.cache_pages, load.repetitions, load.zipf, load.reads)
    for get_us, disk_us in itertools.product(KVM_GET_US, KVM_DISK_US):
        work = load.reads * KVM_WORK_US
        lost = missed * of.lost
        pooled = work + (missed - lost) * get_us + lost * disk_us
        speedup = (work + missed * disk_us) / pooled
        out.append({"get_us": get_us, "disk_us": disk_us, "speedup": speedup})
    return out
