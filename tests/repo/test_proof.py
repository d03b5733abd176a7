# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The comparison with rivals draws requests, resumes, counts host bytes and reports correctly."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.vm import disks, guests, host_bytes, intervals, proof, report
from bench.vm.fleet_loads import Neighbour
from bench.vm.guests import Host, Lab, Native, Qemu
from bench.vm.intervals import Estimate
from bench.vm.proof import MAKE, Run
from bench.vm.results import Measured, Results
from bench.vm.rivals import KSM, POOL, RAM, Fleet, Rivals
from bench.vm.workloads import WITH, WITHOUT, Workload, Write
from harness import native
from harness.disk import Disk
from harness.machine import EVERYWHERE
from harness.paths import HarnessError
from harness.vm import MIB


def test_ratio_of_medians_lies_in_its_confidence_interval() -> None:
    pairs = [(10.0, 2.0), (12.0, 2.0), (8.0, 2.0), (11.0, 4.0), (10.0, 1.0)]
    found = intervals.ratio(pairs)
    assert found.value == 5
    assert found.low < found.value < found.high
    assert intervals.ratio([(6.0, 3.0)]) == Estimate(2, 2, 2)
    assert intervals.middle([3.0, 1.0, 2.0]).value == 2


def test_zipf_draws_popular_blocks_most_often_and_repeats_for_a_seed() -> None:
    zipf = disks.Zipf(1000, 0.6)
    drawn = zipf.draw(50_000, "a")
    assert drawn == zipf.draw(50_000, "a") != zipf.draw(50_000, "b")
    assert set(drawn) <= set(range(1000))
    counts = [count for _, count in Counter(drawn).most_common()]
    total = sum((rank + 1) ** -0.6 for rank in range(1000))
    assert counts[0] == pytest.approx(50_000 / total, rel=0.2)
    # All seeds share the popular blocks.
    top = [block for block, _ in Counter(zipf.draw(50_000, "b")).most_common(5)]
    assert len(set(top) & {block for block, _ in Counter(drawn).most_common(10)}) >= 4


def test_fio_trace_has_each_request_once_and_the_given_write_share() -> None:
    lines = disks.trace("/f", 4096, [3, 0] * 500, "s", write_share=0.2).splitlines()
    assert lines[:3] == ["fio version 2 iolog", "/f add", "/f open"] and lines[-1] == "/f close"
    requests = lines[3:-1]
    assert len(requests) == 1000
    assert {line.split()[2] for line in requests} == {"12288", "0"}
    assert 150 < sum(line.split()[1] == "write" for line in requests) < 250


def test_results_measured_with_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    Results(path, {"tmemd": "a"}).add("stream", {}, {})
    with pytest.raises(HarnessError, match=r"other settings \(tmemd\)"):
        Results(path, {"tmemd": "b"})
    assert Results(path, {"tmemd": "b"}, fresh=True).repetitions("stream") == []


def make_rivals_results(host: type, of: dict[str, float]) -> dict[str, Any]:
    one = {
        arm: {
            "disk_mib": of.get(arm, 100.0),
            "disk_mib_writes": 50.0,
            "seconds": 1.0,
            "seconds_writes": 2.0,
            "host_mib": 700.0 if arm == POOL else 690.0 if arm == RAM else 710.0,
        }
        for arm in Rivals(0.9, host).arms
    }
    part = {"title": "t", "parameters": {}, "figure": "disk_mib", "repetitions": [one] * 5}
    return {"settings": {"guests": host.__name__}, "machine": [], "parts": {"rivals_90": part}}


def test_report_names_a_rival_that_uses_fewer_host_bytes() -> None:
    found = make_rivals_results(Native, {POOL: 20.0})
    assert [
        text.partition(" at ")[0]
        for text in report.arms_with_fewer_bytes(report.comparisons_by_overlap(found))
    ] == ["more RAM for the guests"]
    assert {arm: value.value for arm, value, _ in report.rival_estimates(found)}[RAM] == 5
    assert report.winners(found)[0].startswith(
        "90% common, only reads: fewest disk reads with this project"
    )


def test_ksm_is_compared_in_qemu_and_shown_beside_native_guests() -> None:
    assert Rivals(0.9, Qemu).arms == (POOL, RAM, KSM)
    native, qemu = (
        make_rivals_results(Native, {POOL: 20.0}),
        make_rivals_results(Qemu, {POOL: 20.0, KSM: 70.0}),
    )
    assert KSM not in native["parts"]["rivals_90"]["repetitions"][0]
    assert {row[0]: row[4] for row in report.rows(qemu)}["`equal_bytes_vs_ksm`"] == report.MET
    assert "equal_bytes_vs_ksm" in report.comparison_table(native, qemu)
    assert "were 3.50" in " ".join(report.page(native, qemu).split())
    assert "were 3.50" not in " ".join(report.page(native, None).split())


def test_qemu_memory_is_mergeable_for_the_ksm_arm_only() -> None:
    specs = [guests.Spec("vm1", 64 * MIB, (), merge=merge) for merge in (None, True, False)]
    assert [guests.memory_backend(spec) for spec in specs] == [
        "memory-backend-memfd,share=on",
        "memory-backend-ram,share=off,merge=on",
        "memory-backend-ram,share=off,merge=off",
    ]


def test_figure_that_misses_its_target_is_reported_as_missed() -> None:
    part = {
        "title": "t",
        "parameters": {},
        "figure": "seconds",
        "repetitions": [{WITH: {"seconds": 1.1}, WITHOUT: {"seconds": 1.0}}] * 5,
    }
    rows = report.rows({"parts": {"stream": part, "seq_reread_1": part}})
    assert {row[0]: row[4] for row in rows[1:]} == {
        "`seq_reread_speedup`": "**missed**",
        "`stream_ratio`": "**missed**",
    }


def test_target_inside_the_confidence_interval_is_neither_met_nor_missed() -> None:
    assert report.verdict(Estimate(6, 5, 7), 5) == report.MET
    assert report.verdict(Estimate(6, 4, 7), 5) == report.UNCLEAR
    assert report.verdict(Estimate(4, 3, 4.5), 5) == report.MISSED
    assert report.verdict(Estimate(1, 0.9, 1.03), 1.03, at_least=False) == report.MET
    assert report.verdict(Estimate(1, 0.9, 1.1), 1.03, at_least=False) == report.UNCLEAR
    assert report.verdict(Estimate(1.2, 1.1, 1.3), 1.03, at_least=False) == report.MISSED


class Part(Workload):
    """A part without guests, whose check fails if `wrong` is set."""

    key, title, parameters, repetitions = "stream", "t", {"a": 1}, 2

    def __init__(self, *, wrong: bool) -> None:
        self.wrong = wrong
        self.calls: list[str] = []

    def prepare(self, lab: Lab) -> None:
        self.calls.append("prepare")

    def measure(self, arm: str, repetition: int) -> Measured:
        self.calls.append(f"{arm} {repetition}")
        return {"seconds": 1.0}

    def check(self) -> None:
        self.calls.append("check")
        if self.wrong:
            raise HarnessError("wrong byte")

    def finish(self) -> None:
        self.calls.append("finish")


class NoHost:
    """A host that starts no guest."""

    what = "none"
    slowdown = 1.0
    pinning = EVERYWHERE


def measure(results: Results, part: Part, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(MAKE, part.key, lambda: part)
    Run(cast(Host, NoHost()), results, quick=False).all([part.key])
    return part.calls


def test_results_of_a_part_with_wrong_bytes_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "r.json", {})
    bad = Part(wrong=True)
    with pytest.raises(HarnessError, match="wrong byte"):
        measure(results, bad, monkeypatch)
    assert bad.calls[-2:] == ["check", "finish"]
    assert results.data["machine"] == []
    assert Results(tmp_path / "r.json", {}).repetitions("stream") == []
    # The next run measures and checks the part again.
    calls = measure(results, Part(wrong=False), monkeypatch)
    assert calls[0] == "prepare" and calls[-2:] == ["check", "finish"] and len(calls) == 7
    found = Results(tmp_path / "r.json", {})
    assert len(found.repetitions("stream")) == 2
    assert [run["parts"] for run in found.data["machine"]] == [["stream"]]
    assert measure(results, Part(wrong=False), monkeypatch) == []


def make_partial_results(*keys: str) -> dict[str, Any]:
    """Returns benchmark results that contain only the given parts. Each figure is 2.0."""
    figures = dict.fromkeys(
        ("seconds", "tps", "p99_us", "guest_cpu_s", "disk_mib", "disk_mib_writes", "seconds_writes",
         "host_mib", "noise_mib_per_s"), 2.0,
    )  # fmt: skip
    parts = {}
    for key in keys:
        part = MAKE[key]()
        parts[key] = {
            "title": part.title,
            "parameters": part.parameters,
            "figure": part.figure,
            "repetitions": [{arm: dict(figures) for arm in part.arms}] * 2,
        }
    return {"settings": {"guests": "no"}, "machine": [], "parts": parts}


@pytest.mark.parametrize("keys", [list(MAKE), []], ids=["all", "none"])
def test_page_shows_exactly_the_plots_that_were_written(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    page = tmp_path / "docs/benchmarks/proof.md"
    found = make_partial_results(*keys)
    report.write_page(found, None, page)
    assert report.text(found)
    images = {path.name for path in (tmp_path / "docs/images").glob("*")}
    assert images == set(re.findall(r"images/([\w-]+\.svg)", page.read_text()))


@pytest.mark.parametrize("counter", ["misses_late", "misses_tripped"])
def test_one_late_page_of_the_victim_vm_misses_its_target(counter: str) -> None:
    found = make_partial_results("victim")
    found["parts"]["victim"]["repetitions"][0][WITH][counter] = 1.0
    rows = {row[0]: row for row in report.rows(found)}
    assert rows["`victim_late_pages`"][4] == report.MISSED
    assert rows["`victim_p99_ratio`"][4] == report.MET


def test_peak_of_host_bytes_includes_samples_and_the_final_value() -> None:
    sampled = threading.Event()

    def now() -> int:
        if not sampled.is_set():
            sampled.set()
            return 7
        return 3

    peak = host_bytes.Peak(now)
    peak.PAUSE_SECONDS = 0.001
    with peak:
        assert sampled.wait(60)
    assert peak.bytes == 7
    peak = host_bytes.Peak(lambda: 5)
    with peak:
        pass
    assert peak.bytes == 5


def test_settings_change_with_the_programs_and_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linux = tmp_path / "linux"
    linux.write_text("one")
    monkeypatch.setattr(proof, "host_binary", lambda _: linux)
    host = cast(
        Host, SimpleNamespace(what="none", pinning=EVERYWHERE, programs=lambda: {"kernel": linux})
    )
    first = proof.settings(False, host)
    assert first == proof.settings(False, host)
    monkeypatch.setattr(Write, "writes", 7)
    second = proof.settings(False, host)
    assert [key for key in first if first[key] != second[key]] == ["parameters"]
    linux.write_text("two")
    assert proof.settings(False, host)["kernel"] != second["kernel"]


def test_disk_processes_of_a_fleet_are_selected_by_disk_name(tmp_path: Path) -> None:
    disks_of = [Disk("data", tmp_path / "a"), Disk("loads", tmp_path / "b")]
    vm = native.NativeVm(native.NativeConfig(disks=disks_of), tmp_path / "vm")
    for number, export in enumerate(vm.exports):
        export.__dict__["_process"] = SimpleNamespace(pid=100 + number)
    fleet = Fleet([cast(guests.Box, SimpleNamespace(vm=vm))])
    assert fleet.disk_processes() == [100, 101]
    assert fleet.disk_processes("data") == [100]


def test_neighbour_load_that_ends_before_the_victims_is_refused() -> None:
    job = SimpleNamespace(done=lambda: True, wait=lambda: SimpleNamespace(text="{}"))
    with pytest.raises(HarnessError, match="ended too early"):
        Neighbour._end_noise(cast(Any, job))


def test_unequal_neighbour_loads_are_refused() -> None:
    part = Neighbour()
    box = SimpleNamespace(sh=lambda _: "abc  set", vm=SimpleNamespace(name="n"))
    part.__dict__.update(_sum="abc", _victim=box, _neighbours={WITH: box})
    part._noise = {WITH: [60.0, 59.0], WITHOUT: [59.0, 58.0]}
    part.check()
    part._noise[WITHOUT] = [50.0, 51.0]
    with pytest.raises(HarnessError, match="not comparable"):
        part.check()


def test_host_bytes_include_descendants_and_count_shared_memory_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpid()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {own, child.pid} <= host_bytes.family([own])
            assert host_bytes.same_memory(own, own)
            assert not host_bytes.same_memory(own, child.pid)
            counted: list[int] = []
            monkeypatch.setattr(host_bytes, "page_table_bytes", lambda _: 0)

            def mapped_bytes(pids: list[int]) -> int:
                counted.extend(pids)
                return len(pids)

            monkeypatch.setattr(host_bytes, "mapped_bytes", mapped_bytes)
            assert host_bytes.used_bytes([own]) == len(counted) >= 2
            counted.clear()
            monkeypatch.setattr(host_bytes, "same_memory", lambda _one, _other: True)
            assert host_bytes.used_bytes([own]) == len(counted) == 1
        finally:
            child.kill()
