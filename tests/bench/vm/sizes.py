# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures disk reads against the size of the pool, with the pool and with its rivals.

The guests, their load and the rivals are those of `proof` (rivals.py). At each size, each rival
gets at least as many bytes of the host as the guests with a pool of this size use.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from bench.vm import intervals, output, plot, report
from bench.vm.guests import Native
from bench.vm.host_bytes import swapped_bytes
from bench.vm.intervals import Estimate
from bench.vm.proof import Parts, Run, add_common_arguments, settings
from bench.vm.results import Results
from bench.vm.rivals import ARMS, CACHE, GUESTS, NONE, POOL, RAM, RAM_BYTES, ZRAM, Rivals
from harness.paths import ROOT, host_binary
from harness.vm import MIB

RESULTS = ROOT / "build/sizes.json"
OVERLAP = 0.5
SIZES_MIB = (40, 80, 120, 160, 200)


class AtSize(Rivals):
    """Guests with a pool of a given size, and rivals with as many bytes of the host."""

    seconds = 150
    compared = (POOL, RAM, ZRAM, CACHE)

    def __init__(self, size_mib: int) -> None:
        super().__init__(OVERLAP, pool_bytes=size_mib * MIB)
        self.key = f"pool_{size_mib}"
        self.title = f"pool of {size_mib} MiB"


class WithoutPool(Rivals):
    """Guests with the same RAM as those with the pool, and nothing else."""

    seconds = 45

    def __init__(self) -> None:
        super().__init__(OVERLAP)
        self.key = f"pool_{NONE}"
        self.title = "no pool"
        self.parameters["RAM"] = self.parameters.pop("RAM with the pool")
        del self.parameters["pool"], self.parameters["slack"]

    def _use_arms(self, host: type) -> None:
        self.arms = (NONE,)

    def _boot_arms(self) -> None:
        self._boot(NONE, RAM_BYTES)
        self._swapped = swapped_bytes()


MAKE: Parts = {
    f"pool_{NONE}": WithoutPool,
    **{f"pool_{size_mib}": partial(AtSize, size_mib) for size_mib in SIZES_MIB},
}
NAMES = {arm.key: arm.what for arm in ARMS}


def _measured(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the parts with a pool by their size in MiB."""
    parts = {size_mib: found["parts"].get(f"pool_{size_mib}") for size_mib in SIZES_MIB}
    return {size_mib: part for size_mib, part in parts.items() if part}


def _value(part: dict[str, Any], arm: str, figure: str) -> Estimate:
    return intervals.middle([one[arm][figure] for one in part["repetitions"]])


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of the loads that only read."""
    out = [["pool", "arm", "host bytes, peak", "disk reads", "arm / ours", "time"]]
    if part := found["parts"].get(f"pool_{NONE}"):
        out += [["none", *cells] for cells in report.arm_rows(part)]
    for size_mib, part in _measured(found).items():
        out += [[f"{size_mib} MiB", *cells] for cells in report.arm_rows(part)]
    return out


def _series(values: list[str]) -> str:
    return " and ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)


def summary(found: dict[str, Any]) -> str:
    """Returns sentences that compare the pool with the best rival at each size."""
    measured = _measured(found)
    if not measured:
        return "No size of the pool was measured."
    ratios: dict[str, list[str]] = {}
    for figure in ("disk_mib", "seconds"):
        for part in measured.values():
            ours = _value(part, POOL, figure).value
            best = min(_value(part, arm, figure).value for arm in (RAM, ZRAM, CACHE))
            ratios.setdefault(figure, []).append(f"{ours / best:.2f}")
    sizes = _series([str(size_mib) for size_mib in measured])
    return (
        f"With a pool of {sizes} MiB, the guests read {_series(ratios['disk_mib'])} times as much "
        "from their disks as with the rival that reads least. They took "
        f"{_series(ratios['seconds'])} times as long as with the fastest rival."
    )


def image(found: dict[str, Any]) -> str:
    """Returns the plot of the loads that only read."""
    measured = _measured(found)
    some = [
        plot.Curve(
            NAMES[arm],
            [(size_mib, _value(part, arm, "disk_mib")) for size_mib, part in measured.items()],
            ours=arm == POOL,
        )
        for arm in (POOL, RAM, ZRAM, CACHE)
    ]
    part = found["parts"].get(f"pool_{NONE}")
    return plot.curves(
        f"Disk reads of {GUESTS} guests, {OVERLAP:.0%} of their files common",
        (
            "size of the pool in MiB; each rival gets at least the same host memory",
            "MiB read from the disks; less is better",
        ),
        some,
        (NAMES[NONE], _value(part, NONE, "disk_mib")) if part else None,
    )


def page(found: dict[str, Any]) -> str:
    """Returns docs/benchmarks/sizes.md."""
    first, *lines = report.parameter_lines(found)
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n"
        "<!-- Generated by tests/bench/run sizes --page; edit tests/bench/vm/sizes.py. -->\n"
        "# Disk reads against the size of the pool",
        report.wrapped(
            "This page shows how much four guests read from their disks with pools of several "
            "sizes, and with other uses of the same host memory. It is for operators who choose "
            "the size of a pool."
        ),
        report.wrapped(f"**Result.** {summary(found)}"),
        "    tests/bench/run sizes                     # 15 minutes, as root; build/sizes.json\n"
        f"    tests/bench/run sizes --only pool_{SIZES_MIB[0]}      # one size\n"
        "    tests/bench/run sizes --quick             # one repetition, for a test",
        "![Disk reads against the size of the pool](../images/sizes.svg)",
        "## Figures",
        report.wrapped(
            f"{report.machine_text(found)} {report.days_text(found)} Values are medians with "
            "their 95 % bootstrap intervals. The arms take turns in each repetition. The guests, "
            "the load and the rivals are those of [proof](proof.md#equal-host-bytes), which says "
            f"how host bytes are counted. {report.swap_text(found['parts'].values())} The table "
            "and the plot have loads that only read."
        ),
        *report.load_texts(found),
    ]
    if found["settings"].get("quick"):
        parts.append(report.QUICK)
    by_size = {f"{size_mib} MiB": part for size_mib, part in _measured(found).items()}
    if less := report.unequal(by_size):
        parts.append(report.wrapped(f"These arms had fewer bytes than ours: {', '.join(less)}."))
    parts += [
        report.markdown(rows(found)),
        "## Parameters",
        report.wrapped(first),
        *report.bullets(lines),
        "## Limits",
        report.limits(found),
    ]
    return "\n\n".join(parts) + "\n"


def write_page(found: dict[str, Any], path: Path) -> None:
    """Writes the page and its plot."""
    plot.write(path, "sizes", image(found))
    path.write_text(page(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, MAKE)


def run(options: argparse.Namespace) -> int:
    path = options.json or RESULTS
    if not options.report:
        host_binary("tmemctl")
        host = Native()
        results = Results(path, settings(options.quick, host, MAKE), fresh=options.fresh)
        Run(host, results, options.quick, MAKE).all(options.only or [*MAKE])
    found = report.load(path)
    print(f"{output.table(rows(found))}\n\n{summary(found)}")
    if options.page:
        write_page(found, options.page)
    return 0
