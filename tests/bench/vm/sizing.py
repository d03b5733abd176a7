# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures the cost of `tmem-guest autosize` for loads and for re-reads, in native guests.

All guests with the service have the pool. Native guests have no balloon, so their memory does not
return to the host. The costs for the guest are the same.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from bench.vm import disks, idle
from bench.vm.build import Build
from bench.vm.guests import Box, Lab, Native
from bench.vm.machine import DATA
from bench.vm.output import Progress
from bench.vm.results import Measured, Repetition
from bench.vm.workloads import SET_BYTES, WITH, Oltp, Paired, RandomReread
from harness.machine import polling_with_facts
from harness.session import Session
from harness.vm import MIB

AUTOSIZE = f"{idle.COMMAND} autosize --without-reporting"
SERVICE = "service"
RESTED, DROPPED = "rested", "dropped"  # arms of Wake: pages in the pool, and pages on the disk
CGROUPS = f"mkdir -p /run && mount -t cgroup2 none {idle.CGROUPS}"
Figures = dict[str, float]


def stalled_us(box: Box) -> float:
    """Returns the time in µs in which tasks of the guest have waited for memory."""
    some = box.sh("cat /proc/pressure/memory").split("\n", 1)[0]
    return float(some.rpartition("total=")[2])


class Sized(Paired):
    """A load in a guest with the service, and in a guest without it."""

    arms: tuple[str, ...] = (WITH, SERVICE)
    pooled: tuple[str, ...] = arms
    files = idle.files()

    def ram_of(self, arm: str) -> int:
        return self.ram_bytes

    def warm(self, box: Box) -> None:
        super().warm(box)
        if box.vm.name.startswith(SERVICE):
            box.sh(f"{CGROUPS} && {{ {AUTOSIZE} --boot=0 >/dev/null 2>&1 </dev/null & }}")

    def act(self, box: Box, repetition: int) -> Measured:
        stalled, began = stalled_us(box), time.monotonic()
        found = super().act(box, repetition)
        share = (stalled_us(box) - stalled) / 1e6 / (time.monotonic() - began)
        return {**found, "stalled_share": share}


class SizedReread(Sized, RandomReread):
    """Random re-read with the service and without it."""


class SizedOltp(Sized, Oltp):
    """Transactions with the service and without it."""


class SizedBuild(Sized, Build):
    """Compilation with the service and without it."""


class Wake(Paired):
    """A guest reads all files again, after their pages were kept, moved to the pool or dropped."""

    key = "wake"
    title = "all files read again after a long idle time"
    arms = (WITH, RESTED, DROPPED)
    pooled = (WITH, RESTED)
    ram_bytes = 512 * MIB
    files = idle.files()

    def warm(self, box: Box) -> None:
        super().warm(box)
        box.sh(CGROUPS)

    def prepare_repetition(self, box: Box, repetition: int) -> None:
        if box.vm.name.startswith(RESTED):
            box.sh(f"{AUTOSIZE} --once={2 * SET_BYTES} --floor=1M")
        elif box.vm.name.startswith(DROPPED):
            box.sh("echo 1 >/proc/sys/vm/drop_caches")

    def act(self, box: Box, repetition: int) -> Measured:
        began = time.monotonic()
        box.sh(f"cat {DATA}/{disks.SET} >/dev/null")
        return {"seconds": time.monotonic() - began}


def measure_part(part: Paired, progress: Progress) -> list[Repetition]:
    """Runs all repetitions of a part, whose arms take turns. Returns the figures."""
    progress.step(f"{part.title}; about {part.seconds * len(part.arms) / 60:.0f} min")
    host, found = Native(), []
    with (
        tempfile.TemporaryDirectory(prefix="tmem-sizing-") as images,
        polling_with_facts(),
        Session(pinning=host.pinning) as session,
    ):
        lab = Lab(host, session, Path(images))
        part.prepare(lab)
        for number in range(part.repetitions):
            turn = number % len(part.arms)
            arms = part.arms[turn:] + part.arms[:turn]
            found.append({arm: part.measure(arm, number) for arm in arms})
            values = (f"{arm} {found[-1][arm][part.figure]:,.3f}" for arm in part.arms)
            progress.step(f"  {part.figure}: {', '.join(values)}")
        part.check()
        lab.end()
    return found


def ratio(found: list[Repetition], figure: str, above: str, below: str) -> float:
    """Returns the median ratio of a figure in two arms of the same repetition."""
    return statistics.median(one[above][figure] / one[below][figure] for one in found)


def lost_share(found: list[Repetition], arm: str) -> float:
    """Returns the share of an arm's evicted pages that did not reach the pool."""
    evicted = sum(one[arm]["puts_eligible"] for one in found)
    return sum(one[arm].get("puts_lost", 0) for one in found) / max(evicted, 1)


def run(progress: Progress) -> Figures:
    """Measures all loads; returns the figures by their keys."""
    out: Figures = {}
    for key, part in {
        "reread": SizedReread(),
        "oltp_ro": SizedOltp(writes=False),
        "build": SizedBuild(),
    }.items():
        found = measure_part(part, progress)
        arms = (WITH, SERVICE) if part.figure == "tps" else (SERVICE, WITH)
        out[f"slowdown_{key}"] = ratio(found, part.figure, *arms)
        out[f"psi_some_percent_{key}"] = 100 * statistics.median(
            one[SERVICE]["stalled_share"] - one[WITH]["stalled_share"] for one in found
        )
        out[f"autosize_lost_fraction_{key}"] = lost_share(found, SERVICE)
    found = measure_part(Wake(), progress)
    out["wake_cached_ratio"] = ratio(found, "seconds", RESTED, WITH)
    out["wake_disk_ratio"] = ratio(found, "seconds", DROPPED, RESTED)
    return out
