# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares the measured gains with the published ones: docs/benchmarks/seeds.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vm import intervals, output, plot
from bench.vm.intervals import Estimate
from bench.vm.report import (
    MET,
    QUICK,
    bullets,
    days_text,
    load_texts,
    machine_text,
    markdown,
    parameter_lines,
    verdict,
    wrap,
)
from bench.vm.results import Repetition
from bench.vm.workloads import WITH, WITHOUT

MORE = "more_ram"
PAGE_BYTES = 4096
ZCACHE_2010, ZCACHE_2013 = "zcache 2010, iozone", "zcache 2013"
DIRECTORY = "directory-level cleaning 2013"
NONE = "-"  # published figure of an experiment whose source gives none


@dataclass(frozen=True)
class Gain:
    """A gain of a published experiment, and what the benchmark measures for it."""

    experiment: str
    figure: str  # name of the figure in the results: seconds, or "tps"
    part: str  # key of the part of the results
    published: str = NONE
    target: float | None = None
    with_pool: str = ""  # name of the figure with the pool, if it differs

    def estimate(self, part: dict[str, Any], arm: str) -> Estimate | None:
        """Returns how many times as fast an arm is as the guest without the pool."""
        name = self.with_pool if arm == WITH and self.with_pool else self.figure
        of: list[Repetition] = part["repetitions"]
        if any(name not in one[arm] for one in of):
            return None
        pairs = [(one[WITHOUT][self.figure], one[arm][name]) for one in of]
        if self.figure == "tps":
            pairs = [(rate, without) for without, rate in pairs]
        return intervals.ratio(pairs)


def _iozone(part: str) -> Iterator[Gain]:
    disk = ", 500 IOPS" if part == "iozone_500" else ""
    published = {"read": ("2.5", 4.0), "random_read": ("3", 3.0)}
    for name in ("write", "rewrite", "read", "reread", "random_read", "random_write"):
        text, target = published.get(name, (NONE, None))
        title = f"{ZCACHE_2010}: {name.replace('_', ' ')}{disk}"
        yield Gain(title, name, part, text, None if disk else target)


GAINS = (
    *_iozone("iozone"),
    *_iozone("iozone_500"),
    Gain(f"{DIRECTORY}: re-read, the others stay", "kept", "directories"),
    Gain(f"{DIRECTORY}: re-read, the others dropped", "kept", "directories", "3.6", 3.7, "dropped"),
    Gain(f"{ZCACHE_2013}, kernbench: low load", "seconds", "kernbench_low", "1.003"),
    Gain(f"{ZCACHE_2013}, kernbench: middle load", "seconds", "kernbench_middle", "1.117", 1.117),
    Gain(f"{ZCACHE_2013}, kernbench: high load", "seconds", "kernbench_high", "1.239", 1.239),
    Gain("MariaDB, small buffer pool, read-only", "tps", "mariadb_ro"),
    Gain(f"{ZCACHE_2013}, OLTP: MariaDB, small buffer pool, read-write", "tps", "mariadb_rw",
         "1.34; 1.07", 1.34),
    Gain("MariaDB, small buffer pool, read-write, 500 IOPS", "tps", "mariadb_slow"),
    Gain("MariaDB, Debian's defaults, read-write", "tps", "mariadb_default"),
    Gain("PostgreSQL, pgbench -S", "tps", "postgresql_ro"),
    Gain("PostgreSQL, pgbench -N", "tps", "postgresql_rw"),
)  # fmt: skip


def _measured_gains(found: dict[str, Any]) -> Iterator[tuple[Gain, dict[str, Any]]]:
    """Yields the gains whose part was measured, with the part."""
    for gain in GAINS:
        if part := found["parts"].get(gain.part):
            yield gain, part


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of published and measured gains."""
    head = ["experiment", "published", "with the pool", "more RAM", "repetitions", "target"]
    out = [[*head, "result"]]
    for gain, part in _measured_gains(found):
        ours, more = gain.estimate(part, WITH), gain.estimate(part, MORE)
        assert ours
        target = gain.target
        out.append(
            [
                gain.experiment,
                gain.published,
                ours.text(),
                more.text() if more else NONE,
                str(len(part["repetitions"])),
                f"≥ {target:g}" if target else NONE,
                verdict(ours, target) if target else "",
            ]
        )
    return out


def _middle(part: dict[str, Any], arm: str, name: str) -> float | None:
    """Returns the median of a figure, or None if an arm does not have it."""
    of: list[Repetition] = part["repetitions"]
    if any(name not in one[arm] for one in of):
        return None
    return intervals.middle([one[arm][name] for one in of]).value


def value_rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of the values, disk reads and processor times that the gains come from."""
    out = [["experiment", "arm", "value", "disk reads", "guest's processor", "host memory"]]
    names = {WITHOUT: "without", WITH: "with the pool", MORE: "more RAM"}
    for gain, part in _measured_gains(found):
        for arm, title in names.items():
            name = gain.with_pool if arm == WITH and gain.with_pool else gain.figure
            value = _middle(part, arm, name)
            if value is None:
                continue
            prefix = "" if name == "seconds" else f"{name}_"
            unit = "transactions/s" if name == "tps" else "s"
            reads = _middle(part, arm, f"{prefix}disk_reads") or 0
            busy = _middle(part, arm, f"{prefix}guest_cpu_s") or 0
            host = _middle(part, arm, "host_mib") or 0
            out.append(
                [
                    gain.experiment if arm == WITHOUT else "",
                    title,
                    f"{value:,.2f} {unit}",
                    f"{reads:,.0f}",
                    f"{busy:.2f} s",
                    f"{host:,.0f} MiB",
                ]
            )
    return out


def bars(found: dict[str, Any]) -> dict[str, list[plot.Bar]]:
    """Returns the published and the measured gains of each experiment with a published one."""
    out = {}
    for gain, part in _measured_gains(found):
        if gain.published == NONE:
            continue
        published = [float(value) for value in gain.published.split("; ")]
        some = [
            plot.Bar("published", Estimate(value, value, value), plot.PUBLISHED)
            for value in published
        ]
        for arm, name, colour in (
            (WITH, "with the pool", plot.OURS),
            (MORE, "more RAM", plot.RIVAL),
        ):
            if value := gain.estimate(part, arm):
                some.append(plot.Bar(name, value, colour))
        out[gain.experiment] = some
    return out


def saved_text(found: dict[str, Any]) -> str:
    """Returns a sentence about the disk reads that the pool saves in OLTP, or an empty text."""
    part = found["parts"].get("mariadb_rw")
    if not part:
        return ""
    of: list[Repetition] = part["repetitions"]
    pairs = [(one[WITH]["disk_reads"], one[WITHOUT]["disk_reads"]) for one in of]
    left = intervals.ratio(pairs)
    read = (_middle(part, WITHOUT, "disk_read_bytes") or 0) / 2**20
    return (
        f"The OLTP experiment of 2013 saved 14 GB of disk reads, of an unknown total. Here the "
        f"pool saves {1 - left.value:.0%} ({1 - left.high:.0%} to {1 - left.low:.0%}) of the read "
        f"requests of the read-write load, which reads {read:,.0f} MiB in each repetition without "
        "the pool. The target is 60 %."
    )


def text(found: dict[str, Any]) -> str:
    """Returns the text that the program prints at its end."""
    return "\n\n".join([output.table(rows(found)), output.table(value_rows(found))])


def causes(found: dict[str, Any]) -> list[str]:
    """Returns a sentence for each experiment that gains less than was published."""
    out = []
    for gain, part in _measured_gains(found):
        ours = gain.estimate(part, WITH)
        if not ours or not gain.target or ours.value >= gain.target:
            continue
        name = gain.with_pool or gain.figure
        prefix = "" if gain.figure == "seconds" else f"{name}_"
        reads = _middle(part, WITHOUT, f"{prefix.replace(name, gain.figure)}disk_reads") or 0
        left = _middle(part, WITH, f"{prefix}disk_reads") or 0
        busy = _middle(part, WITH, f"{prefix}guest_cpu_s") or 0
        out.append(
            f"{gain.experiment}: {ours.value:.2f} instead of {gain.target:g}. The guest without "
            f"the pool sends {reads:,.0f} read requests to its disk, the guest with the pool "
            f"{left:,.0f}, and its processor is busy for {busy:.2f} s."
            + _thrashing_text(gain, part)
        )
    return out


def _thrashing_text(gain: Gain, part: dict[str, Any]) -> str:
    """Returns a sentence about a guest whose processes fill its RAM, or nothing."""
    if not gain.part.startswith("kernbench"):
        return ""
    pages = (_middle(part, WITHOUT, "disk_read_bytes") or 0) / PAGE_BYTES
    hits = _middle(part, WITH, "hits") or 0
    return (
        f" The former reads {pages:,.0f} pages, the latter gets {hits:,.0f}. The compilers fill "
        "the RAM, of which the driver takes 2 to 3 % and 2 MiB. The cache of 2013 also held "
        "anonymous memory."
    )


NOT_REPEATED = (
    "iozone itself: no archive that the build may use has it. fio runs its six patterns.",
    "The kernel compilation of kernbench takes too long in a native guest. GCC compiles files of "
    "Lua instead, with three numbers of jobs.",
    "The latency of 1 ms of network storage: a disk of 500 IOPS already takes 2 ms for each "
    "request of one reader.",
    "Swap at memory speed (zram, 2017): [swap](swap.md) compares ways to swap.",
    "The allocator for pages that compress to 75 % (xcfmalloc, 2011): [engine](engine.md) has the "
    "efficiency of the engine's allocator.",
    "zcache, a compressed cache of file pages in the guest's own RAM: Debian has none.",
)

LIMITS = (
    "The published figures come from other machines, disks, kernels and amounts of RAM, most of "
    "which are not stated. The publications give percentages of kernbench and OLTP, which the "
    "table shows as factors. So the table compares the kind of gain, not the systems.",
    "Native guests are user-mode Linux with one processor. A system call takes 4 µs with Linux "
    "7.3, and 6 to 17 µs with 6.12. Page faults and new processes are slow, too, in all arms. This "
    "makes gains smaller.",
    "The arm with more RAM gets as many MiB as the guest with the pool, the process of its disk "
    "and tmemd used more than those of the guest without it, after the warm-up.",
)


def page(found: dict[str, Any]) -> str:
    """Returns docs/benchmarks/seeds.md."""
    judged = [row for row in rows(found)[1:] if row[-1]]
    met = [f"{row[0]} {row[2].partition(' ')[0]}" for row in judged if row[-1] == MET]
    result = f"**Result.** {len(met)} of {len(judged)} targets are met"
    result += f" ({'; '.join(met)})." if met else "."
    first, *lines = parameter_lines(found)
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n"
        "<!-- Generated by tests/bench/run seeds --page; edit tests/bench/vm/seeds_report.py. -->\n"
        "# Published experiments, repeated",
        wrap(
            "This page repeats experiments that were published with earlier caches of this kind, "
            "and compares the gains. It is for reviewers, and for operators who know these "
            "figures."
        ),
        wrap(result),
        "    tests/bench/run seeds                     # 60 minutes, as root; build/seeds.json\n"
        "    tests/bench/run seeds --only iozone       # one workload\n"
        "    tests/bench/run seeds --quick             # one repetition, for a test",
        "## Gains",
        wrap(
            f"{machine_text(found)} {days_text(found)} A gain is how many times as fast as the "
            "guest without the pool a guest is: medians with their 95 % bootstrap "
            "intervals, which few repetitions make rough. A target is met if the whole interval "
            "meets it; the result is unclear if the interval contains the target."
        ),
        *load_texts(found),
    ]
    if found["settings"].get("quick"):
        parts.append(QUICK)
    if bars(found):
        parts.append("![Gains, published and measured](../images/seeds.svg)")
    parts.append(markdown(rows(found)))
    if saved := saved_text(found):
        parts.append(wrap(saved))
    if missing := [gain.experiment for gain in GAINS if gain.part not in found["parts"]]:
        parts += ["These experiments of the benchmark were not measured:", *bullets(missing)]
    if lines_less := causes(found):
        parts += ["## Gains below the target", *bullets(lines_less)]
    parts += [
        "## Values",
        wrap(
            "Medians of all repetitions. The host's memory is that of the guest, of the process of "
            "its disk, and of tmemd, at the end of a repetition. The processor's time includes the "
            "start of the program, which the time of iozone's patterns does not."
        ),
        markdown(value_rows(found)),
        "## Not repeated",
        *bullets(list(NOT_REPEATED)),
        "## Parameters",
        wrap(first),
        *bullets(lines),
        "## Limits",
        *bullets(list(LIMITS)),
    ]
    return "\n\n".join(parts) + "\n"


def write_page(found: dict[str, Any], path: Path) -> None:
    """Writes the page and its plot."""
    if groups := bars(found):
        image = plot.bars(
            "Gains of published experiments, repeated",
            "times as fast as the guest without the pool, or as many transactions per second",
            groups,
            ratios=True,
        )
        plot.write(path, "seeds", image)
    path.write_text(page(found))
