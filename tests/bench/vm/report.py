# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Turns the file of results into tables, plots, and the page docs/benchmarks/proof.md."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vm import build, intervals, output, plot
from bench.vm.intervals import Estimate, Pair
from bench.vm.machine import PAGE_BYTES
from bench.vm.results import Repetition
from bench.vm.rivals import ARMS, CACHE, COPY, KSM, OVERLAPS, POOL, RAM, ZRAM, Arm
from bench.vm.workloads import ALL_IN_RAM, WITH, WITHOUT, Oltp
from harness.paths import HarnessError

WIDTH = 100
LATE, OPEN = "misses_late", "misses_tripped"


@dataclass(frozen=True)
class Figure:
    """A figure that is compared with a target."""

    key: str
    part: str  # key of the part of the results that the figure is computed from
    meaning: str
    over: str  # arm whose value is divided by that of the arm `under`
    under: str
    target: float | None = None
    at_least: bool = True

    def verdict(self, value: Estimate) -> str:
        return "" if self.target is None else verdict(value, self.target, at_least=self.at_least)

    def target_text(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.target:g}" if self.target else "reported"

    def gain(self, value: Estimate) -> str:
        """Returns "loss" or "" if the whole interval is a loss or a gain, else "no gain shown"."""
        low, high = (value.low, value.high) if self.at_least else (-value.high, -value.low)
        even = 1 if self.at_least else -1
        return "loss" if high < even else "no gain shown" if low <= even else ""


MET, MISSED, UNCLEAR = "met", "**missed**", "**unclear**"


def verdict(value: Estimate, target: float, *, at_least: bool = True) -> str:
    """Returns MET if the whole interval meets the target, UNCLEAR if a part does, else MISSED."""
    ends = [end >= target if at_least else end <= target for end in (value.low, value.high)]
    return MET if all(ends) else UNCLEAR if any(ends) else MISSED


IDLE = {"poll": "poll instead of halting", "halt": "halt"}
SPEEDUP = "time without / with the pool"
RATE = "transactions per second, with / without"
TIME = "time with / without"
FIGURES = (
    Figure("seq_reread_speedup", "seq_reread_1", f"sequential re-read, depth 1: {SPEEDUP}",
           WITHOUT, WITH, 5),
    Figure("seq_reread_8_speedup", "seq_reread_8",
           f"sequential re-read, io_uring, depth 8: {SPEEDUP}", WITHOUT, WITH),
    Figure("rand_reread_speedup", "rand_reread_1", f"Zipf random re-read, depth 1: {SPEEDUP}",
           WITHOUT, WITH, 8),
    Figure("rand_reread_8_speedup", "rand_reread_8",
           f"Zipf random re-read, 8 threads: {SPEEDUP}", WITHOUT, WITH),
    Figure("rand_reread_io_uring_speedup", "rand_reread_io_uring",
           f"Zipf random re-read, io_uring, depth 8: {SPEEDUP}", WITHOUT, WITH),
    Figure("oltp_ro_speedup", "oltp_ro",
           f"SQLite with sysbench's table and read-only transactions: {RATE}", WITH, WITHOUT, 3),
    Figure("oltp_rw_ratio", "oltp_rw",
           f"SQLite with sysbench's table and read-write transactions: {RATE}", WITH, WITHOUT, 1),
    Figure("build_time_ratio", "build", f"compilation: {TIME}", WITH, WITHOUT, at_least=False),
    Figure("stream_ratio", "stream", f"stream that is never read again: {TIME}",
           WITH, WITHOUT, 1.03, at_least=False),
    Figure("stream_fast_ratio", "stream_fast", f"stream from a disk without a limit: {TIME}",
           WITH, WITHOUT, at_least=False),
    Figure("write_ratio", "write", f"random overwrites: {TIME}", WITH, WITHOUT, 1.03,
           at_least=False),
    Figure("boot_ratio", "boot", f"boot of four clones: {TIME}", WITH, WITHOUT, 1.03,
           at_least=False),
    Figure("victim_p99_ratio", "victim", "victim's read p99, neighbour with / without the pool",
           WITH, WITHOUT, 1.1, at_least=False),
)  # fmt: skip
RIVAL_TARGETS = {RAM: 4.0, CACHE: 1.5, ZRAM: 3.0, KSM: 3.0}
RIVALS_AT = 0.9  # overlap whose figures have targets


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise HarnessError(f"{path} does not exist: measure first")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _pairs(part: dict[str, Any], over: str, under: str, figure: str) -> list[Pair]:
    return [(one[over][figure], one[under][figure]) for one in part["repetitions"]]


def estimates(found: dict[str, Any]) -> Iterator[tuple[Figure, Estimate]]:
    """Yields the figures that were measured."""
    for figure in FIGURES:
        if part := found["parts"].get(figure.part):
            pairs = _pairs(part, figure.over, figure.under, part["figure"])
            yield figure, intervals.ratio(pairs)


def _rival_part(found: dict[str, Any], overlap: float) -> dict[str, Any] | None:
    part: dict[str, Any] | None = found["parts"].get(f"rivals_{round(overlap * 100)}")
    return part


def _arms(part: dict[str, Any]) -> list[Arm]:
    """Returns the arms of a comparison. They depend on the kind of guests."""
    return [arm for arm in ARMS if arm.key in part["repetitions"][0]]


def rival_estimates(found: dict[str, Any]) -> Iterator[tuple[str, Estimate, float]]:
    """Yields the disk reads of each rival divided by those of this project, with their targets."""
    if part := _rival_part(found, RIVALS_AT):
        for arm in _arms(part):
            if arm.key in RIVAL_TARGETS:
                value = intervals.ratio(_pairs(part, arm.key, POOL, "disk_mib"))
                yield arm.key, value, RIVAL_TARGETS[arm.key]


def victim_late(found: dict[str, Any]) -> int | None:
    """Returns how many pages the victim missed because the host was slow.

    Returns None without the victim's measurement.
    """
    part = found["parts"].get("victim")
    return missed_pages(part, LATE) + missed_pages(part, OPEN) if part else None


def missed_pages(part: dict[str, Any], counter: str) -> int:
    """Returns the sum of a counter of misses over all repetitions and arms."""
    of: list[Repetition] = part["repetitions"]
    return round(sum(one.get(counter, 0) for repetition in of for one in repetition.values()))


def lost_share(part: dict[str, Any], arm: str) -> float | None:
    """Returns the share of evicted pages that did not reach the pool, or None if not counted."""
    of: list[Repetition] = part["repetitions"]
    eligible = sum(one.get(arm, {}).get("puts_eligible", 0) for one in of)
    return sum(one[arm]["puts_lost"] for one in of) / eligible if eligible else None


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of all figures with targets."""
    out = [["key", "meaning", "target", "median (95 %)", "result"]]
    for figure, value in estimates(found):
        out.append(
            [
                f"`{figure.key}`",
                figure.meaning,
                figure.target_text(),
                value.text(),
                figure.verdict(value),
            ]
        )
    if (late := victim_late(found)) is not None:
        out.append(
            [
                "`victim_late_pages`",
                "the victim's pages that were late, or not requested because the circuit breaker "
                "was open, in all repetitions of both arms",
                "0",
                str(late),
                MISSED if late else MET,
            ]
        )
    for arm, value, target in rival_estimates(found):
        out.append(
            [
                f"`equal_bytes_vs_{arm}`",
                f"disk reads of the arm / ours, overlap {RIVALS_AT:.0%}",
                f"≥ {target:g}",
                value.text(),
                verdict(value, target),
            ]
        )
    return out


def workload_rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns a table with each workload's values without the pool and with it."""
    head = ["workload", "figure", "without", "with", "all in RAM", "repetitions", "lost"]
    out = [[*head, "late", "breaker open"]]
    for part in found["parts"].values():
        if "disk_mib" in part["figure"]:
            continue
        cells = []
        digits = 0 if part["figure"] == "p99_us" else 2
        for arm in (WITHOUT, WITH, build.PROBE):
            values = [one[arm][part["figure"]] for one in part["repetitions"] if arm in one]
            cells.append(intervals.middle(values).text(digits) if values else "-")
        lost = lost_share(part, WITH)
        out.append(
            [
                part["title"],
                {"seconds": "s", "tps": "transactions/s", "p99_us": "p99, µs"}[part["figure"]],
                *cells,
                str(len(part["repetitions"])),
                "-" if lost is None else f"{lost:.1%}",
                str(missed_pages(part, LATE)),
                str(missed_pages(part, OPEN)),
            ]
        )
    return out


def rival_rows(found: dict[str, Any], suffix: str) -> list[list[str]]:
    """Returns the table of one phase of all arms: "" only reads, "_writes" has 20 % writes."""
    out = [["overlap", "arm", "host bytes, peak", "disk reads", "arm / ours", "time"]]
    for overlap, part in comparisons_by_overlap(found).items():
        out += [[overlap, *cells] for cells in arm_rows(part, suffix)]
    return out


def arm_rows(part: dict[str, Any], suffix: str = "") -> Iterator[list[str]]:
    """Yields the cells of each arm of a comparison."""
    of: list[Repetition] = part["repetitions"]
    for arm in _arms(part):
        reads = intervals.middle([one[arm.key][f"disk_mib{suffix}"] for one in of])
        seconds = intervals.middle([one[arm.key][f"seconds{suffix}"] for one in of])
        peak = max(one[arm.key]["host_mib"] for one in of)
        by = ""
        if arm.key != POOL and POOL in of[0]:
            by = intervals.ratio(_pairs(part, arm.key, POOL, f"disk_mib{suffix}")).text()
        yield [
            arm.what,
            f"{peak:,.0f} MiB",
            f"{reads.text(1)} MiB",
            by,
            f"{seconds.text()} s",
        ]


def comparisons_by_overlap(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the comparisons with rivals by the overlap of the guests' files."""
    parts = {f"{overlap:.0%}": _rival_part(found, overlap) for overlap in OVERLAPS}
    return {overlap: part for overlap, part in parts.items() if part}


def busy_text(compared: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a sentence for each comparison that shows why more RAM may take less time."""
    out = []
    for name, part in compared.items():
        of = part["repetitions"]
        if not all(arm in of[0] and "guest_cpu_s" in of[0][arm] for arm in (POOL, RAM)):
            continue
        times = [
            statistics.median(one[arm][key] for one in of)
            for arm in (POOL, RAM)
            for key in ("guest_cpu_s", "seconds")
        ]
        out.append(
            "{}: the processor that the guests share was busy for {:.2f} of {:.2f} s with the pool,"
            " and for {:.2f} of {:.2f} s with more RAM.".format(name, *times)
        )
    return out


def arms_with_fewer_bytes(compared: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the arms that used fewer host bytes at their peak than this project's arm."""
    out = []
    for name, part in compared.items():
        arms = _arms(part)
        peaks = {
            arm.key: max(one[arm.key]["host_mib"] for one in part["repetitions"]) for arm in arms
        }
        for arm in arms:
            if arm.key not in (POOL, COPY) and peaks[arm.key] < peaks.get(POOL, 0):
                less = 1 - peaks[arm.key] / peaks[POOL]
                out.append(f"{arm.what} at {name} ({less:.1%} less)")
    return out


def swap_text(compared: Iterable[dict[str, Any]]) -> str:
    """Returns a sentence about the host's swap space, which the host bytes do not contain."""
    most = max(
        (
            one[arm].get("host_swap_mib", 0)
            for part in compared
            for one in part["repetitions"]
            for arm in one
        ),
        default=0,
    )
    if most < 1:
        return "The host swapped nothing out meanwhile."
    return (
        f"The host swapped up to {most:,.0f} MiB out meanwhile, which these bytes do not contain."
    )


def winners(found: dict[str, Any]) -> list[str]:
    """Returns a sentence for each overlap and phase that names the best arms."""
    names = {arm.key: arm.what for arm in ARMS}
    out = []
    for overlap, part in comparisons_by_overlap(found).items():
        for suffix, load_text in (("", "only reads"), ("_writes", "20 % writes")):
            best = {}
            for figure in ("disk_mib", "seconds"):
                medians = {
                    arm.key: intervals.middle(
                        [one[arm.key][figure + suffix] for one in part["repetitions"]]
                    ).value
                    for arm in _arms(part)
                }
                best[figure] = names[min(medians, key=lambda key: medians[key])]
            out.append(
                f"{overlap} common, {load_text}: fewest disk reads with {best['disk_mib']}; "
                f"shortest time with {best['seconds']}."
            )
    return out


def text(found: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """Returns the text that the program prints at its end.

    `other` has the results of the other kind of guests, native ones or QEMU's.
    """
    blocks = [output.table(rows(found)), output.table(workload_rows(found))]
    for suffix, title in (("", "only reads"), ("_writes", "20 % writes")):
        table = rival_rows(found, suffix)
        if len(table) > 1:
            blocks.append(f"Equal host bytes, {title}\n{output.table(table)}")
    blocks += winners(found)
    if less := arms_with_fewer_bytes(comparisons_by_overlap(found)):
        blocks.append(f"Fewer host bytes than ours: {', '.join(less)}")
    if other:
        blocks.append(
            f"Other guests: {other['settings']['guests']}\n{comparison_table(found, other)}"
        )
    return "\n\n".join(blocks)


def markdown(table: list[list[str]]) -> str:
    head, *body = table
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def wrap(paragraph: str, first: str = "") -> str:
    return textwrap.fill(
        paragraph, WIDTH, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def bullets(lines: list[str]) -> list[str]:
    """Returns the lines as one block of Markdown bullets, or [] if there is no line."""
    return ["\n".join(wrap(line, "- ") for line in lines)] if lines else []


def summary(found: dict[str, Any]) -> str:
    """Returns one paragraph with the figures that met or missed their targets."""
    groups: dict[str, list[str]] = {MET: [], MISSED: [], UNCLEAR: []}
    for key, _, _, value, judged in rows(found)[1:]:
        if judged in groups:
            groups[judged].append(f"{key} {value.partition(' ')[0]}")
    count = sum(map(len, groups.values()))
    out = f"{len(groups[MET])} of {count} targets are met"
    if groups[MET]:
        out += f": {', '.join(groups[MET])}"
    if groups[MISSED]:
        out += f". Missed: {', '.join(groups[MISSED])}"
    if groups[UNCLEAR]:
        out += f". The interval contains the target: {', '.join(groups[UNCLEAR])}"
    return out + "."


def losses(found: dict[str, Any]) -> list[str]:
    """Returns a sentence for each workload that the pool makes slower or does not make faster."""
    out = []
    for figure, value in estimates(found):
        if gain := figure.gain(value):
            out.append(f"{gain}: {figure.meaning}: {value.text()}.")
    return sorted(out)


def _median(found: dict[str, Any], part: str, arm: str, figure: str) -> float:
    """Returns the median of a figure of an arm in a part. A repetition without it counts 0."""
    return intervals.middle(
        [one[arm].get(figure, 0) for one in found["parts"][part]["repetitions"]]
    ).value


def explanations(found: dict[str, Any]) -> list[str]:
    """Returns sentences that explain figures by other figures, such as by reads of cached pages."""
    out = []
    parts = found["parts"]
    if "rand_reread_1" in parts and ALL_IN_RAM in parts:
        without = _median(found, "rand_reread_1", WITHOUT, "seconds")
        with_pool = _median(found, "rand_reread_1", WITH, "seconds")
        cached = _median(found, ALL_IN_RAM, WITHOUT, "seconds")
        out.append(
            f"`rand_reread_speedup`: a guest whose RAM holds the whole file needs {cached:.2f} s, "
            f"a guest with less RAM {without:.2f} s without the pool and {with_pool:.2f} s with it."
            f" The whole file in RAM is {without / cached:.1f} times as fast as no pool."
        )
    for key, name in (("oltp_ro", "oltp_ro_speedup"), ("oltp_rw", "oltp_rw_ratio")):
        if key in parts:
            seconds = Oltp.count / _median(found, key, WITHOUT, "tps")
            busy = _median(found, key, WITHOUT, "guest_cpu_s")
            out.append(
                f"`{name}`: the guest without the pool uses its processor for {busy:.2f} s of "
                f"{seconds:.2f} s. The pool can only shorten the rest."
            )
    if "oltp_ro" in parts or "oltp_rw" in parts:
        out.append(
            "OLTP: the program is SQLite, with the table and the transactions of sysbench. Neither "
            "sysbench nor a database server runs, and a server with a cache of its own gains less "
            "or nothing from the pool."
        )
    if "build" in parts:
        without = _median(found, "build", WITHOUT, "seconds")
        probe = _median(found, "build", build.PROBE, "seconds")
        with_pool = _median(found, "build", WITH, "seconds")
        evicted = _median(found, "build", WITH, "puts_eligible")
        read = _median(found, "build", WITHOUT, "disk_read_bytes") / PAGE_BYTES
        out.append(
            f"`build_time_ratio`: a guest whose RAM holds the compiler and all files needs "
            f"{probe:.2f} s, the guest without the pool {without:.2f} s, and the guest with it "
            f"{with_pool:.2f} s. So {probe / without:.0%} of the time without the pool is not "
            f"spent on missing pages. The guest without the pool read {read:,.0f} pages from the "
            f"disk in each repetition, the guest with it evicted {evicted:,.0f} pages."
        )
    if "victim" in parts:
        rates = [_median(found, "victim", arm, "noise_mib_per_s") for arm in (WITH, WITHOUT)]
        out.append(
            f"`victim_p99_ratio`: the neighbour read {rates[0]:.1f} MiB/s with the pool and "
            f"{rates[1]:.1f} MiB/s without it, from before the victim's first read until after its "
            "last one."
        )
    return out


def machine_text(found: dict[str, Any]) -> str:
    """Returns a sentence about the machine."""
    runs = found["machine"]
    if not runs:
        return f"Guests: {found['settings']['guests']}."
    last = runs[-1]
    return (
        f"Measured on {last['processors']} processors of {last['processor']}, host kernel "
        f"{last['host_kernel']}, whose idle processors {IDLE[last['idle_processors']]}. Guests: "
        f"{found['settings']['guests']}."
    )


def days_text(found: dict[str, Any]) -> str:
    """Returns a sentence with the dates of the runs."""
    days = sorted({run["date"] for run in found["machine"]})
    return f"Dates of the runs: {', '.join(days)}." if days else ""


QUICK = "The run was a quick one (`--quick`): a repeated run may give other figures."


def load_texts(found: dict[str, Any]) -> list[str]:
    """Returns a paragraph about the load of the machine in each run, or nothing without runs."""
    runs = found["machine"]
    if not runs:
        return []
    loads = "; ".join(
        f"{run['load_1min_before']} / {run['load_1min_after']}, {run['steal_share']:.1%}"
        for run in runs
    )
    times = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    return [
        wrap(
            f"The workloads were measured in {times}. Load average before / after, and stolen "
            f"processor time: {loads}."
        )
    ]


def ksm_text(other: dict[str, Any] | None) -> str:
    """Returns sentences about KSM, which needs guests in QEMU."""
    out = "KSM cannot merge shared memory, so `proof --kvm` compares it with guests in QEMU"
    for arm, value, _ in rival_estimates(other) if other else ():
        if arm == KSM and other:
            guests = other["settings"]["guests"]
            return f"{out}: disk reads with KSM / ours were {value.text()} ({guests})."
    return f"{out}. [An earlier comparison](history.md) with directory trees gave 4.9."


def parameter_lines(found: dict[str, Any]) -> list[str]:
    """Returns a line of parameters for each part, without those of a similar part before it."""
    out = ["A line has the parameters that differ from those of a similar load before it."]
    before: dict[str, dict[str, Any]] = {}
    for key, part in found["parts"].items():
        kind = key.partition("_")[0]
        same = before.get(kind, {})
        pairs = [
            f"{name}: {value}"
            for name, value in part["parameters"].items()
            if same.get(name) != value
        ]
        out.append(f"**{part['title']}**: {'; '.join(pairs)}")
        before[kind] = part["parameters"]
    return out


def page(found: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """Returns docs/benchmarks/proof.md. `other` has the results of guests in QEMU."""
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n"
        "<!-- Generated by tests/bench/run proof --page; edit tests/bench/vm/report.py. -->\n"
        "# Gains and losses of the pool, compared with its rivals",
        wrap(
            "This page compares guests with the pool to equal guests without it, and the pool to "
            "other ways to use equally many bytes of the host. It is for operators who decide "
            "whether they need it, and for reviewers."
        ),
        wrap(f"**Result.** {summary(found)}"),
        "    tests/bench/run proof                   # 40 minutes, as root; build/proof.json\n"
        "    tests/bench/run proof --only victim     # one workload\n"
        "    tests/bench/run proof --quick           # one repetition, for a test\n"
        "    tests/bench/run proof --kvm             # guests in QEMU, and the comparison with KSM",
    ]
    if speed_bars(found):
        parts.append("![Speed with the pool / without it](../images/proof.svg)")
    parts += [
        "## Figures",
        wrap(
            f"{machine_text(found)} Values are medians with their 95 % bootstrap intervals, of "
            "which five or seven repetitions give rough ones. The arms take turns in each "
            "repetition. A target is met if the whole interval meets it; the result is unclear if "
            "the interval contains the target."
        ),
        *load_texts(found),
        markdown(rows(found)),
        *bullets(explanations(found)),
    ]
    if lost := losses(found):
        parts += ["## Where the pool loses or gains nothing", *bullets(lost)]
    parts += [
        "## Workloads",
        wrap(
            "*Lost* is the share of evicted pages that did not reach the pool. *Late* is the "
            "number of pages that had not arrived by the deadline. *Breaker open* is the number of "
            "pages that the driver did not request because its circuit breaker was open. Both "
            "numbers count all repetitions of all arms."
        ),
        markdown(workload_rows(found)),
    ]
    if compared := comparisons_by_overlap(found):
        parts += [
            "## Equal host bytes",
            wrap(
                "Four guests are clones of one image. Each rival gets at least as many bytes of "
                "the host as the guests with the pool, their disks' processes and tmemd use "
                "together: PSS, page tables and the host's page cache of the images. Swap in zram "
                "is part of a guest's RAM. The peak is the largest of two samples per second. "
                f"{swap_text(compared.values())} The table has loads that only read. "
                f"{ksm_text(other)}"
            ),
            *bullets(winners(found)),
        ]
        if less := arms_with_fewer_bytes(compared):
            parts.append(wrap(f"These arms had fewer bytes than ours: {', '.join(less)}."))
        parts.append(markdown(rival_rows(found, "")))
        if busy := busy_text(compared):
            parts += [
                wrap(
                    "More RAM takes less time, although it reads more from the disks. Waits of "
                    "several guests for their disks overlap, and each guest has a limit of its own "
                    "for requests. Processor time does not overlap on one processor, and a page "
                    "from the pool costs more of it than one from RAM. Guests with processors of "
                    "their own were not measured."
                ),
                *bullets(busy),
            ]
    first, *lines = parameter_lines(found)
    parts += ["## Parameters", wrap(first), *bullets(lines), "## Limits", limits(found)]
    return "\n\n".join(parts) + "\n"


def limits(found: dict[str, Any]) -> str:
    """Returns the list of what the figures do not show."""
    placement = "The guests, tmemd and the disks' processes share the machine's processors."
    if found["settings"].get("pinned"):
        placement = (
            "All guests share one processor of the machine, and tmemd and the disks' processes "
            "share another one."
        )
    lines = (
        "Native guests are user-mode Linux with one processor. A system call takes 4 µs with Linux "
        "7.3, and 6 to 17 µs with 6.12. This adds to every read(2) of both arms and makes speedups "
        "smaller. There are no exits and no large folios.",
        placement,
        "In the arm with the host's page cache, hits in that cache do not count against the disk's "
        "limit: a control group limits only reads from the host's disk that holds the image. "
        "Writes of that arm are not limited.",
    )
    return "\n".join(wrap(line, "- ") for line in lines)


def speed_bars(found: dict[str, Any]) -> list[plot.Bar]:
    """Returns the figures of which more is better, each with the title of its workload."""
    return [
        plot.Bar(found["parts"][figure.part]["title"], value, plot.OURS)
        for figure, value in estimates(found)
        if (figure.under == WITH and figure.over == WITHOUT) or figure.part.startswith("oltp")
    ]


def write_page(found: dict[str, Any], other: dict[str, Any] | None, path: Path) -> None:
    """Writes the page and its plot."""
    if speeds := speed_bars(found):
        image = plot.bars(
            "Speed with the pool / without it",
            "times as fast, or times as many transactions per second; more is better",
            {"": speeds},
            ratios=True,
        )
        plot.write(path, "proof", image)
    path.write_text(page(found, other))


def comparison_table(found: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns the figures beside those of another kind of guests."""
    values = [
        {figure.key: value.text() for figure, value in estimates(of)}
        | {f"equal_bytes_vs_{arm}": value.text() for arm, value, _ in rival_estimates(of)}
        for of in (found, other)
    ]
    table = [["key", "measured", "other guests"]]
    for key in values[0] | values[1]:
        table.append([key, *(of.get(key, "-") for of in values)])
    return output.table(table)
