# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Turns the file of results into tables, plots, and the page docs/benchmarks/proof.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo
from bench_guest import PAGE_BYTES
from harness.paths import HarnessError
from proof import intervals, model, plot
from proof.intervals import Estimate, Pair
from proof.results import Repetition
from proof.rivals import ARMS, CACHE, OVERLAPS, POOL, RAM, ZRAM
from proof.workloads import WITH, WITHOUT, Oltp

WIDTH = 100
LATE = ("misses_late", "misses_tripped")


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

    def met(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.at_least else value <= self.target

    def target_text(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.target:g}" if self.target else "reported"


IDLE = {"poll": "poll instead of halting", "halt": "halt"}
SPEEDUP = "time without / with the pool"
RATE = "transactions per second, with / without"
TIME = "time with / without"
FIGURES = (
    Figure("seq_reread_speedup", "seq_reread_1", f"sequential re-read, depth 1: {SPEEDUP}",
           WITHOUT, WITH, 5),
    Figure("seq_reread_8_speedup", "seq_reread_8", f"depth 8: {SPEEDUP}", WITHOUT, WITH),
    Figure("rand_reread_speedup", "rand_reread_1", f"Zipf random re-read, depth 1: {SPEEDUP}",
           WITHOUT, WITH, 8),
    Figure("rand_reread_8_speedup", "rand_reread_8", f"depth 8: {SPEEDUP}", WITHOUT, WITH),
    Figure("rand_reread_io_uring_speedup", "rand_reread_io_uring",
           f"depth 8 with io_uring, whose readers must not wait: {SPEEDUP}", WITHOUT, WITH),
    Figure("oltp_ro_speedup", "oltp_ro", f"SQLite OLTP, read-only: {RATE}", WITH, WITHOUT, 3),
    Figure("oltp_rw_ratio", "oltp_rw", f"SQLite OLTP, read-write: {RATE}", WITH, WITHOUT, 1),
    Figure("build_time_ratio", "build", f"compilation: {TIME}", WITH, WITHOUT),
    Figure("stream_ratio", "stream", f"stream that is never read again: {TIME}",
           WITH, WITHOUT, 1.03, at_least=False),
    Figure("stream_fast_ratio", "stream_fast", f"the same, disk without a limit: {TIME}",
           WITH, WITHOUT),
    Figure("write_ratio", "write", f"random overwrites: {TIME}", WITH, WITHOUT, 1.03,
           at_least=False),
    Figure("boot_ratio", "boot", f"boot of four clones: {TIME}", WITH, WITHOUT, 1.03,
           at_least=False),
    Figure("victim_p99_ratio", "victim", "victim's read p99, neighbour with / without the pool",
           WITH, WITHOUT, 1.1, at_least=False),
)  # fmt: skip
RIVAL_TARGETS = {RAM: 4.0, CACHE: 1.5, ZRAM: 3.0}
RIVALS_AT = 0.9  # overlap whose figures have targets
ERROR_MAX = 0.25


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


def rival_estimates(found: dict[str, Any]) -> Iterator[tuple[str, Estimate, float]]:
    """Yields the disk reads of each rival divided by those of this project, with their targets."""
    if part := _rival_part(found, RIVALS_AT):
        for arm, target in RIVAL_TARGETS.items():
            yield arm, intervals.ratio(_pairs(part, arm, POOL, "disk_mib")), target


def verdict(met: bool | None) -> str:
    return {None: "", True: "met", False: "**missed**"}[met]


def late_pages(part: dict[str, Any]) -> int:
    """Returns how many pages came too late, in all repetitions and arms."""
    of: list[Repetition] = part["repetitions"]
    found = (one.get(name, 0) for repetition in of for one in repetition.values() for name in LATE)
    return round(sum(found))


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
                verdict(figure.met(value.value)),
            ]
        )
    for arm, value, target in rival_estimates(found):
        name = {RAM: "ram", CACHE: "host_cache", ZRAM: "zram"}[arm]
        out.append(
            [
                f"`equal_bytes_vs_{name}`",
                f"disk reads of the arm / ours, overlap {RIVALS_AT:.0%}",
                f"≥ {target:g}",
                value.text(),
                verdict(value.value >= target),
            ]
        )
    if errors := found.get("prediction_errors"):
        worst = max(abs(value) for value in errors.values())
        out.append(
            [
                "`prediction_error`",
                "largest relative error of the hold-outs",
                f"≤ {ERROR_MAX}",
                f"{worst:.2f}",
                verdict(worst <= ERROR_MAX),
            ]
        )
    return out


def workload_rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns a table with each workload's values without the pool and with it."""
    out = [["workload", "figure", "without", "with", "repetitions", "lost", "late"]]
    for part in found["parts"].values():
        if "disk_mib" in part["figure"]:
            continue
        cells = []
        digits = 0 if part["figure"] == "p99_us" else 2
        for arm in (WITHOUT, WITH):
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
                str(late_pages(part)),
            ]
        )
    return out


def rival_rows(found: dict[str, Any], suffix: str) -> list[list[str]]:
    """Returns the table of one phase of all arms: "" only reads, "_writes" has 20 % writes."""
    out = [["overlap", "arm", "host bytes, peak", "disk reads", "arm / ours", "time"]]
    for overlap in OVERLAPS:
        if not (part := _rival_part(found, overlap)):
            continue
        of: list[Repetition] = part["repetitions"]
        for arm in ARMS:
            reads = intervals.middle([one[arm.key][f"disk_mib{suffix}"] for one in of])
            seconds = intervals.middle([one[arm.key][f"seconds{suffix}"] for one in of])
            peak = max(one[arm.key]["host_mib"] for one in of)
            by = intervals.ratio(_pairs(part, arm.key, POOL, f"disk_mib{suffix}"))
            out.append(
                [
                    f"{overlap:.0%}",
                    arm.what,
                    f"{peak:,.0f} MiB",
                    f"{reads.text(1)} MiB",
                    by.text() if arm.key != POOL else "",
                    f"{seconds.text()} s",
                ]
            )
    return out


def unequal(found: dict[str, Any]) -> list[str]:
    """Returns the arms that used fewer host bytes at their peak than this project's arm."""
    out = []
    for overlap in OVERLAPS:
        if part := _rival_part(found, overlap):
            peaks = {
                arm.key: max(one[arm.key]["host_mib"] for one in part["repetitions"])
                for arm in ARMS
            }
            for arm in ARMS:
                if arm.key not in (POOL, "pool_copy") and peaks[arm.key] < peaks[POOL]:
                    less = 1 - peaks[arm.key] / peaks[POOL]
                    out.append(f"{arm.what} at {overlap:.0%} ({less:.1%} less)")
    return out


def winners(found: dict[str, Any]) -> list[str]:
    """Returns a sentence for each overlap and phase that names the best arms."""
    names = {arm.key: arm.what for arm in ARMS}
    out = []
    for overlap in OVERLAPS:
        if not (part := _rival_part(found, overlap)):
            continue
        for suffix, load_text in (("", "only reads"), ("_writes", "20 % writes")):
            best = {}
            for figure in ("disk_mib", "seconds"):
                medians = {
                    arm.key: intervals.middle(
                        [one[arm.key][figure + suffix] for one in part["repetitions"]]
                    ).value
                    for arm in ARMS
                }
                best[figure] = names[min(medians, key=lambda key: medians[key])]
            out.append(
                f"{overlap:.0%} common, {load_text}: fewest disk reads with {best['disk_mib']}; "
                f"shortest time with {best['seconds']}."
            )
    return out


def text(found: dict[str, Any]) -> str:
    """Returns what the command prints at its end."""
    blocks = [demo.table([row[:1] + row[1:] for row in rows(found)])]
    blocks.append(demo.table(workload_rows(found)))
    for suffix, title in (("", "only reads"), ("_writes", "20 % writes")):
        table = rival_rows(found, suffix)
        if len(table) > 1:
            blocks.append(f"Equal host bytes, {title}\n{demo.table(table)}")
    blocks += winners(found)
    if less := unequal(found):
        blocks.append(f"Fewer host bytes than ours: {', '.join(less)}")
    return "\n\n".join(blocks)


def _markdown(table: list[list[str]]) -> str:
    head, *body = table
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _wrapped(paragraph: str, first: str = "") -> str:
    return textwrap.fill(
        paragraph, WIDTH, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def summary(found: dict[str, Any]) -> str:
    """Returns one paragraph with the figures that met or missed their targets."""
    met: list[str] = []
    missed: list[str] = []
    for figure, value in estimates(found):
        if figure.target is not None:
            (met if figure.met(value.value) else missed).append(f"`{figure.key}` {value.value:.2f}")
    for arm, value, target in rival_estimates(found):
        (met if value.value >= target else missed).append(
            f"`equal_bytes_vs_{arm}` {value.value:.1f}"
        )
    out = f"{len(met)} of {len(met) + len(missed)} targets are met"
    if met:
        out += f": {', '.join(met)}"
    return out + (f". Missed: {', '.join(missed)}." if missed else ".")


def _median(found: dict[str, Any], part: str, arm: str, figure: str) -> float:
    return intervals.middle(
        [one[arm].get(figure, 0) for one in found["parts"][part]["repetitions"]]
    ).value


def explanations(found: dict[str, Any]) -> list[str]:
    """Returns a sentence for each figure whose limit or cause the other figures show."""
    out = []
    parts = found["parts"]
    if "rand_reread_1" in parts and model.ALL_IN_RAM in parts:
        without = _median(found, "rand_reread_1", WITHOUT, "seconds")
        cached = _median(found, model.ALL_IN_RAM, WITHOUT, "seconds")
        out.append(
            f"`rand_reread_speedup`: a guest whose RAM holds the whole file needs {cached:.2f} s, "
            "most of it for system calls, which are slow in native guests. So no cache could reach "
            f"more than {without / cached:.1f} here."
        )
    if "oltp_ro" in parts:
        seconds = Oltp.count / _median(found, "oltp_ro", WITHOUT, "tps")
        busy = _median(found, "oltp_ro", WITHOUT, "guest_cpu_s")
        out.append(
            f"`oltp_ro_speedup`: the processor of the guest without the pool works for {busy:.2f} "
            f"s of {seconds:.2f} s. So no cache could reach more than {seconds / busy:.1f} here."
        )
    if "build" in parts:
        evicted = _median(found, "build", WITH, "puts_eligible")
        read = _median(found, "build", WITHOUT, "disk_read_bytes") / PAGE_BYTES
        out.append(
            f"`build_time_ratio`: the guest with the pool evicted {evicted:,.0f} pages in each "
            f"repetition, and the guest without it read {read:,.0f} pages from the disk. The "
            "working set barely fits the RAM, and the driver uses 1 % of it and 2 MiB. A cheap "
            "return of these pages does not outweigh that."
        )
    return out


def model_text(found: dict[str, Any]) -> str:
    """Returns the section about the model, or an empty text without its measurements."""
    predictions = found.get("predictions")
    if not predictions:
        return ""
    costs = predictions["calibration"]
    table = [["hold-out", "arm", "predicted", "measured", "error"]]
    errors = found.get("prediction_errors", {})
    for key in model.HOLDOUTS:
        if part := found["parts"].get(key):
            for arm in (WITHOUT, WITH):
                measured = intervals.middle([one[arm]["seconds"] for one in part["repetitions"]])
                table.append(
                    [
                        part["title"].removeprefix("hold-out: "),
                        f"{arm} the pool",
                        f"{predictions[key][arm]:.2f} s",
                        f"{measured.text()} s",
                        f"{errors[f'{key} {arm}']:+.0%}",
                    ]
                )
    parts = [
        "## Model",
        _wrapped(
            "The time of a random re-read is requests * work + misses * cost of a disk read or of "
            "a page from the pool, bounded by the disk's requests per second and by the host's "
            "processors. An LRU cache that sees the guest's requests gives the number of misses. "
            "Calibrated on native guests: work of a request "
            f"{costs['work_us']:.1f} µs, a disk read {costs['disk_us']:.0f} µs, a page from the "
            f"pool {costs['get_us']:.1f} µs, {costs['lost']:.1%} of the misses not in the pool, "
            f"an LRU cache of {costs['cache_pages'] * 4096 / 2**20:.0f} MiB, which is "
            f"{costs['lru_share']:.0%} of the guest's page cache. The program writes each "
            "prediction into the JSON file before it measures the hold-out."
        ),
        _markdown(table),
    ]
    if speedups := found.get("kvm_speedups"):
        kvm = [["cost of a get", *(f"disk read of {us} µs" for us in model.KVM_DISK_US)]]
        for get_us in model.KVM_GET_US:
            cells = [f"{one['speedup']:.1f}" for one in speedups if one["get_us"] == get_us]
            kvm.append([f"{get_us} µs", *cells])
        parts += [
            "### Predictions for hosts with KVM",
            _wrapped(
                "Predicted speedup of the Zipf random re-read on a host with KVM, where a read "
                f"from the page cache takes about {model.KVM_WORK_US} µs. It depends on the cost "
                "of a get, which no native guest can measure, and on the disk. `make bench-kvm` "
                "measures it."
            ),
            _markdown(kvm),
        ]
    return "\n\n".join(parts)


def page(found: dict[str, Any]) -> str:
    """Returns docs/benchmarks/proof.md."""
    machine = found["machine"]
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n"
        "<!-- Generated by make bench-proof from its JSON file; edit tests/proof/report.py. -->\n"
        "# What the pool gains, against every rival",
        _wrapped(
            "This page compares guests with the pool to equal guests without it, and the pool to "
            "other ways to use equally many bytes of the host. It is for operators who decide "
            "whether they need it, and for reviewers."
        ),
        _wrapped(f"**Result.** {summary(found)}"),
        "    make bench-proof                          # the report, and build/proof.json\n"
        "    make bench-proof ARGS='--only victim'     # one workload\n"
        "    make bench-proof ARGS=--quick             # one repetition, for a test",
        "![Time without and with the pool](../images/proof.svg)",
        "## Figures",
        _wrapped(
            f"Measured with {found['settings']['guests']} guests on "
            f"{machine['processors']} processors of {machine['processor']}, host kernel "
            f"{machine['host_kernel']}. Load average {machine['load_1min_before']} before and "
            f"{machine['load_1min_after']} after the run, {machine['steal_share']:.1%} of the "
            f"processor time stolen; idle processors {IDLE[machine['idle_processors']]}. "
            "Values are medians with their 95 % bootstrap intervals. The arms take turns in each "
            "repetition."
        ),
        _markdown(rows(found)),
        "\n".join(_wrapped(line, "- ") for line in explanations(found)),
        "## Workloads",
        _wrapped(
            "*Lost* is the share of evicted pages that did not reach the pool, *late* the number "
            "of pages that the host did not return within the deadline."
        ),
        _markdown(workload_rows(found)),
    ]
    if any(_rival_part(found, overlap) for overlap in OVERLAPS):
        parts += ["## Equal host bytes"]
        parts += [
            _wrapped(
                "Four guests are clones of one image. Each rival gets at least as many bytes of "
                "the host as the guests with the pool, their disks' processes and tmemd use "
                "together: PSS, page tables and the host's page cache of the images. Swap in zram "
                "is part of a guest's RAM. KSM cannot merge shared memory, so "
                "[density.md](density.md) compares it, on QEMU."
            ),
            "![Disk reads of each arm](../images/proof-rivals.svg)",
            "\n".join(_wrapped(line, "- ") for line in winners(found)),
        ]
        if less := unequal(found):
            parts.append(_wrapped(f"These arms had fewer bytes than ours: {', '.join(less)}."))
        for suffix, title in (("", "Only reads"), ("_writes", "With 20 % writes")):
            parts += [f"### {title}", _markdown(rival_rows(found, suffix))]
    if section := model_text(found):
        parts.append(section)
    parts += ["## Parameters"]
    for key, part in found["parts"].items():
        lines = [f"- **{part['title']}** (`{key}`)"]
        lines += [
            _wrapped(f"{name}: {value}", "  - ") for name, value in part["parameters"].items()
        ]
        parts.append("\n".join(lines))
    parts += ["## Limits", LIMITS]
    return "\n\n".join(parts) + "\n"


LIMITS = "\n".join(
    _wrapped(line, "- ")
    for line in (
        "Native guests are user-mode Linux with one processor. A system call takes 8 to 17 µs, "
        "which adds to every read(2) of both arms and makes speedups smaller. There are no exits "
        "and no large folios ([native.md](native.md)).",
        "The guests, tmemd and the disks' processes share the machine's processors.",
        "An interval of five or seven repetitions is a rough one.",
        "The host's page cache is above the limit of the disk: a control group limits what the "
        "processes of the disks read from it. Writes of that arm are not limited.",
    )
)


def write_page(found: dict[str, Any], path: Path) -> None:
    """Writes the page, its plots and, beside it, a copy of the results."""
    images = path.parent.parent / "images"
    images.mkdir(exist_ok=True)
    bars = [
        (figure.meaning.split(":")[0], value)
        for figure, value in estimates(found)
        if (figure.under == WITH and figure.over == WITHOUT) or figure.part.startswith("oltp")
    ]
    (images / "proof.svg").write_text(
        plot.bars("Speed with the pool / without it", "more is better; 1 is no gain", bars)
    )
    groups = []
    for overlap in OVERLAPS:
        if part := _rival_part(found, overlap):
            of = part["repetitions"]
            groups += [
                (
                    f"{overlap:.0%} common: {arm.what}",
                    intervals.middle([one[arm.key]["disk_mib"] for one in of]),
                )
                for arm in ARMS
            ]
    if groups:
        (images / "proof-rivals.svg").write_text(
            plot.bars("Disk reads at equal host bytes", "MiB, less is better; only reads", groups)
        )
    path.write_text(page(found))
    path.with_suffix(".json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def beside(found: dict[str, Any], native: dict[str, Any]) -> str:
    """Returns the figures of another kind of guest beside those of native guests."""
    other = dict(estimates(native))
    table = [["key", "measured", "native guests"]]
    for figure, value in estimates(found):
        table.append([figure.key, value.text(), other[figure].text() if figure in other else "-"])
    out = demo.table(table)
    if speedups := native.get("kvm_speedups"):
        values = [one["speedup"] for one in speedups if one["disk_us"] == model.THROTTLE_US]
        out += (
            f"\n\nPredicted rand_reread_speedup on KVM, for gets of {min(model.KVM_GET_US)} to "
            f"{max(model.KVM_GET_US)} µs: {min(values):.1f} to {max(values):.1f}"
        )
    return out
