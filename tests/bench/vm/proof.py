# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares guests with the pool to guests without it, and to other uses of equal host memory.

The program saves each workload after it has checked the bytes that the guests read, so an
interrupted run continues with the next one. The guests are user-mode Linux, or VMs with --kvm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from bench.vm import report
from bench.vm.build import Build
from bench.vm.fleet_loads import Boot, Neighbour
from bench.vm.guests import Host, Lab, Native, Qemu
from bench.vm.output import Progress
from bench.vm.results import Measured, Repetition, Results
from bench.vm.rivals import OVERLAPS, Rivals
from bench.vm.workloads import (
    ALL_IN_RAM,
    URING,
    AllInRam,
    Oltp,
    RandomReread,
    SequentialReread,
    Stream,
    Workload,
    Write,
)
from harness.machine import EVERYWHERE, polling_with_facts, processor_model
from harness.paths import ROOT, HarnessError, host_binary
from harness.session import Session

# Results of native guests, and of guests in QEMU. A report of one kind shows figures of the other.
RESULTS, RESULTS_KVM = ROOT / "build/proof.json", ROOT / "build/proof-kvm.json"
QUICK_REPETITIONS = 1
Parts = dict[str, Callable[[], Workload]]  # the parts of a benchmark by their keys
MAKE: Parts = {
    "seq_reread_1": lambda: SequentialReread(1),
    "seq_reread_8": lambda: SequentialReread(8),
    "rand_reread_1": lambda: RandomReread(1),
    "rand_reread_8": lambda: RandomReread(8),
    "rand_reread_io_uring": lambda: RandomReread(8, URING),
    ALL_IN_RAM: AllInRam,
    "oltp_ro": lambda: Oltp(writes=False),
    "oltp_rw": lambda: Oltp(writes=True),
    "build": Build,
    "stream": Stream,
    "stream_fast": lambda: Stream(fast=True),
    "write": Write,
    "boot": Boot,
    "victim": Neighbour,
    **{f"rivals_{round(overlap * 100)}": partial(Rivals, overlap) for overlap in OVERLAPS},
}


def settings(quick: bool, host: Host, parts: Parts = MAKE) -> dict[str, Any]:
    """Returns the settings that all repetitions in a file of results must have in common."""
    parameters = {name: make().parameters for name, make in parts.items()}
    return {
        "quick": quick,
        "guests": host.what,
        "pinned": host.pinning != EVERYWHERE,
        "tmemd": digest(host_binary("tmemd")),
        **{name: digest(path) for name, path in host.programs().items()},
        "parameters": hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:16],
        "processor": processor_model(),
    }


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class Run:
    """One run over all parts."""

    def __init__(self, host: Host, results: Results, quick: bool, parts: Parts = MAKE) -> None:
        self._parts = parts
        self._host = host
        self._results = results
        self._quick = quick
        self._progress = Progress()

    def missing(self, workload: Workload) -> int:
        """Returns how many repetitions of a workload are missing."""
        count = QUICK_REPETITIONS if self._quick else workload.repetitions
        return max(0, count - len(self._results.repetitions(workload.key)))

    def all(self, names: list[str]) -> None:
        """Measures all parts, even if some of them fail. Then raises if a part has failed."""
        parts = [part for name in names if self.missing(part := self._parts[name]())]
        left = sum(map(self._estimate, parts))
        measured: list[str] = []
        failures: list[str] = []
        facts: dict[str, Any] = {}
        try:
            with (
                tempfile.TemporaryDirectory(prefix="tmem-proof-") as images,
                polling_with_facts() as facts,
            ):
                for part in parts:
                    self._progress.step(f"{part.title}; about {left / 60:.0f} min left")
                    try:
                        self._run_part(part, Path(images))
                        measured.append(part.key)
                    except HarnessError as error:
                        failures.append(f"{part.key}: {error}")
                        self._progress.step(f"  failed: {error}")
                    left -= self._estimate(part)
        finally:
            # Save the facts about the machine also if a part failed, because the parts that were
            # measured before are in the results.
            if measured:
                today = date.today().isoformat()
                self._results.add_machine({**facts, "date": today, "parts": measured})
        if failures:
            raise HarnessError("\n".join(failures))

    def _estimate(self, part: Workload) -> float:
        seconds = part.seconds * self._host.slowdown
        return seconds / (part.repetitions if self._quick else 1)

    def _run_part(self, part: Workload, images: Path) -> None:
        began = time.monotonic()
        try:
            with Session(pinning=self._host.pinning) as session:
                lab = Lab(self._host, session, images)
                try:
                    self._measure(part, lab, began)
                finally:
                    lab.end()
        finally:
            # Finish the part when the session has ended all guests and daemons, also if lab.end()
            # failed.
            part.finish()
        self._progress.step(f"  took {time.monotonic() - began:.0f} s")

    def _measure(self, part: Workload, lab: Lab, began: float) -> None:
        part.prepare(lab)
        self._progress.step(f"  ready after {time.monotonic() - began:.0f} s")
        done = len(self._results.repetitions(part.key))
        all_found: list[Repetition] = []
        for number in range(done, done + self.missing(part)):
            # The arms run in turns, and each repetition begins with another arm.
            turn = number % len(part.arms)
            found: Repetition = {}
            for arm in part.arms[turn:] + part.arms[:turn]:
                self._progress.show(f"repetition {number + 1}, {arm}")
                found[arm] = part.measure(arm, number)
            self._say(part, found)
            all_found.append(found)
        # Figures of a guest that has read a wrong byte are not saved.
        part.check()
        about = {"title": part.title, "parameters": part.parameters, "figure": part.figure}
        self._results.add(part.key, about, *all_found)

    def _say(self, part: Workload, found: Repetition) -> None:
        def text(measured: Measured) -> str:
            out = f"{measured[part.figure]:,.3f}"
            if late := measured.get("misses_late"):
                out += f" ({late:.0f} late)"
            if missed := measured.get("misses_tripped"):
                out += f" ({missed:.0f} not requested, breaker open)"
            if measured.get("puts_lost"):
                out += f" (lost {measured['puts_lost'] / measured['puts_eligible']:.1%})"
            return out

        words = ", ".join(f"{arm} {text(found[arm])}" for arm in part.arms)
        self._progress.step(f"  {part.figure}: {words}")


def add_common_arguments(parser: argparse.ArgumentParser, parts: Parts) -> None:
    """Adds the arguments of all benchmarks that measure part by part."""
    parser.add_argument("--only", nargs="*", choices=[*parts], default=[], metavar="WORKLOAD",
                        help=f"run only these workloads: {', '.join(parts)}")  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one repetition of each workload, to try the benchmark",
    )
    parser.add_argument("--fresh", action="store_true", help="measure all repetitions again")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument(
        "--page", type=Path, help="write the report to this file, and its plots to ../images"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, only report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, MAKE)
    parser.add_argument(
        "--kvm",
        action="store_true",
        help="run the guests in QEMU with KVM, or with TCG where no guest boots on KVM",
    )


def run_parts(
    options: argparse.Namespace, path: Path, parts: Parts, make_host: Callable[[], Host] = Native
) -> dict[str, Any]:
    """Measures the repetitions that a file of results lacks, and returns all its results.

    With --report, only reads the file.
    """
    path = options.json or path
    if not options.report:
        host_binary("tmemctl")
        host = make_host()
        results = Results(path, settings(options.quick, host, parts), fresh=options.fresh)
        Run(host, results, options.quick, parts).all(options.only or [*parts])
    return report.load(path)


def run(options: argparse.Namespace) -> int:
    own, other = (RESULTS_KVM, RESULTS) if options.kvm else (RESULTS, RESULTS_KVM)
    found = run_parts(options, own, MAKE, Qemu if options.kvm else Native)
    beside = report.load(other) if other.exists() else None
    print(report.text(found, beside))
    if options.page:
        report.write_page(found, beside, options.page)
    return 0
