# SPDX-License-Identifier: Apache-2.0 OR MIT
"""bench-proof draws requests, resumes, computes intervals, predicts and reports correctly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.vm import disks, guests, host_bytes, intervals, model, plot, proof, report
from bench.vm import rivals as rivals_part
from bench.vm.fleet_loads import Neighbour
from bench.vm.guests import Host, Lab
from bench.vm.intervals import Estimate
from bench.vm.machine import PAGE_BYTES
from bench.vm.proof import MAKE, Run
from bench.vm.results import Measured, Results
from bench.vm.rivals import ARMS, CACHE, POOL, RAM, Fleet, Rivals
from bench.vm.workloads import WITH, WITHOUT, RandomReread, Workload, Write
from harness import initramfs, native
from harness.daemon import Daemon
from harness.disk import Disk
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Config


def test_ratio_of_medians_lies_in_its_confidence_interval() -> None:
    pairs = [(10.0, 2.0), (12.0, 2.0), (8.0, 2.0), (11.0, 4.0), (10.0, 1.0)]
    found = intervals.ratio(pairs)
    assert found.value == 5
    assert found.low < found.value < found.high
    assert intervals.ratio([(6.0, 3.0)]) == Estimate(2, 2, 2)
    assert intervals.middle([3.0, 1.0, 2.0]).value == 2


def test_ratio_by_zero_is_infinite() -> None:
    assert intervals.ratio([(5.0, 0.0)] * 5).value == float("inf")


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


def test_transactions_have_the_statement_mix_of_sysbench() -> None:
    sql = disks.transactions(10_000, 3, 0, writes=True)
    assert sql.count("BEGIN;") == sql.count("COMMIT;") == 3
    assert len(re.findall(r"SELECT c FROM sbtest1 WHERE id=", sql)) == 30
    assert sql.count("BETWEEN") == 12
    assert sql.count("UPDATE") == 6
    assert sql.count("DELETE") == sql.count("INSERT") == 3
    assert "UPDATE" not in disks.transactions(10_000, 3, 0, writes=False)


def test_interrupted_benchmark_continues_after_its_last_repetition(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    first = Results(path, {"quick": False})
    first.add("stream", {"title": "a stream"}, {WITH: {"seconds": 1.0}})
    again = Results(path, {"quick": False})
    assert again.repetitions("stream") == [{WITH: {"seconds": 1.0}}]
    again.add("stream", {"title": "a stream"}, {WITH: {"seconds": 2.0}})
    assert len(Results(path, {"quick": False}).repetitions("stream")) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["proof.json"]


def test_results_measured_with_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    Results(path, {"tmemd": "a"}).add("stream", {}, {})
    with pytest.raises(HarnessError, match=r"other settings \(tmemd\)"):
        Results(path, {"tmemd": "b"})
    assert Results(path, {"tmemd": "b"}, fresh=True).repetitions("stream") == []


def test_lru_evicts_the_page_that_was_not_used_for_the_longest_time() -> None:
    cache = model.Lru(2)
    assert [cache.use(page) for page in (1, 2, 1, 3, 2, 1)] == [
        False, False, True, False, False, False,
    ]  # fmt: skip
    assert [cache.use(page) for page in (2, 1)] == [True, True]


def test_modelled_misses_decrease_to_zero_as_the_cache_grows() -> None:
    zipf = disks.Zipf(2000, 0.6)
    found = [model.misses(pages, 3, zipf, 1000) for pages in (500, 1000, 2000)]
    assert found[0] > found[1] > found[2] == 0
    assert model.misses(500, 3, zipf, 1000, write_share=0.5) < found[0]


def synthetic(path: Path) -> dict[str, Any]:
    """Returns results whose times follow from known costs."""
    load = RandomReread(1)
    results = Results(path, {"guests": "synthetic"})
    work_us, disk_us, get_us, pages = 20.0, 500.0, 50.0, 36_000
    missed = model.misses(pages, 5, load.zipf, load.reads)
    work = load.reads * work_us
    for _ in range(5):
        results.add(
            model.ALL_IN_RAM,
            {},
            {WITHOUT: {"seconds": work / 1e6, "disk_us": disk_us, "guest_cpu_s": 0.9 * work / 1e6}},
        )
        of = {
            WITHOUT: {
                "seconds": (work + missed * disk_us) / 1e6,
                "disk_reads": missed,
                "cached_mib": pages * PAGE_BYTES / MIB,
            },
            WITH: {
                "seconds": (work + missed * get_us) / 1e6,
                "disk_reads": 0,
                "hits": missed,
                "guest_cpu_s": (0.9 * work + missed * 30) / 1e6,
                "tmemd_cpu_s": missed * 5 / 1e6,
            },
        }
        results.add(model.CALIBRATION, {}, of)
    return results.data


def test_calibration_recovers_the_costs_behind_synthetic_times(tmp_path: Path) -> None:
    found = model.calibrate(synthetic(tmp_path / "r.json"))
    assert found.work_us == pytest.approx(20)
    assert found.get_us == pytest.approx(50, rel=0.01)
    assert found.cache_pages == pytest.approx(36_000, rel=0.02)
    assert found.cpu_work_us == pytest.approx(18)
    assert found.cpu_us == pytest.approx(35)
    assert found.lost == 0
    assert found.lru_share == pytest.approx(1, rel=0.02)


def test_predicted_time_grows_with_less_ram_and_respects_the_disk_limit(tmp_path: Path) -> None:
    results = synthetic(tmp_path / "r.json")
    half = model.predict(results)[model.HALF]
    before = results["parts"][model.CALIBRATION]["repetitions"][0]
    for arm in (WITH, WITHOUT):
        assert half[arm] > before[arm]["seconds"]
    assert half[WITHOUT] >= half["misses"] / 3000


def test_holdout_error_compares_prediction_and_measurement(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", {})
    results.add(model.HALF, {}, {WITHOUT: {"seconds": 4.0}, WITH: {"seconds": 2.0}})
    results.note("predictions", {model.HALF: {WITHOUT: 5.0, WITH: 1.0}})
    errors = model.errors(results.data)
    assert errors == {f"{model.HALF} without": 0.25, f"{model.HALF} with": -0.5}


def rivals(key: str, of: dict[str, float]) -> dict[str, Any]:
    one = {
        arm.key: {
            "disk_mib": of.get(arm.key, 100.0),
            "disk_mib_writes": 50.0,
            "seconds": 1.0,
            "seconds_writes": 2.0,
            "host_mib": 700.0 if arm.key == POOL else 690.0 if arm.key == RAM else 710.0,
        }
        for arm in ARMS
    }
    part = {"title": "t", "parameters": {}, "figure": "disk_mib", "repetitions": [one] * 5}
    return {"parts": {key: part}}


def test_report_names_a_rival_that_uses_fewer_host_bytes() -> None:
    found = rivals("rivals_90", {POOL: 20.0})
    assert [text.partition(" at ")[0] for text in report.unequal(found)] == [
        "more RAM for the guests"
    ]
    assert {arm: value.value for arm, value, _ in report.rival_estimates(found)}[RAM] == 5
    assert report.winners(found)[0].startswith(
        "90% common, only reads: fewest disk reads with this project"
    )


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


def test_calibration_without_pool_hits_is_refused(tmp_path: Path) -> None:
    data = synthetic(tmp_path / "r.json")
    for one in data["parts"][model.CALIBRATION]["repetitions"]:
        one[WITH]["hits"] = 0
    with pytest.raises(HarnessError, match="read no page from the pool"):
        model.calibrate(data)


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


def test_failed_benchmark_part_does_not_prevent_later_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "r.json", {})
    bad, good = Part(wrong=True), Part(wrong=False)
    good.key = "write"
    monkeypatch.setitem(MAKE, "stream", lambda: bad)
    monkeypatch.setitem(MAKE, "write", lambda: good)
    with pytest.raises(HarnessError, match="stream: wrong byte"):
        Run(cast(Host, NoHost()), results, quick=False).all(["stream", "write"])
    assert list(results.data["parts"]) == ["write"]
    assert results.data["machine"][0]["parts"] == ["write"]


def test_part_is_finished_even_if_a_guest_fails_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: Lab) -> None:
        raise HarnessError("console")

    monkeypatch.setattr(Lab, "end", end)
    part = Part(wrong=False)
    with pytest.raises(HarnessError, match="console"):
        measure(Results(tmp_path / "r.json", {}), part, monkeypatch)
    assert part.calls[-1] == "finish"


def partial(*keys: str) -> dict[str, Any]:
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


@pytest.mark.parametrize("key", [*MAKE, None])
def test_report_and_markdown_page_accept_results_with_one_part_or_none(
    key: str | None, tmp_path: Path
) -> None:
    found = partial(*([key] if key else []))
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    page = tmp_path / "docs/benchmarks/proof.md"
    report.write_page(found, page)
    assert report.text(found)
    # The page shows each plot that was written, and no other one.
    images = {path.name for path in (tmp_path / "docs/images").iterdir()}
    assert images == set(re.findall(r"images/([\w-]+\.svg)", page.read_text()))


def predicted(key: str, with_pool: float, without_pool: float) -> dict[str, Any]:
    """Returns results with a measured hold-out and its predicted seconds."""
    found = partial(key)
    found["predictions"] = {
        "calibration": dict.fromkeys(model.Calibration.__dataclass_fields__, 1.0),
        key: {WITH: with_pool, WITHOUT: without_pool},
    }
    return found


def test_report_states_the_error_of_a_measured_prediction() -> None:
    assert "+50%" in report.page(predicted(model.HALF, 3.0, 2.0))


def test_report_explains_a_low_prediction_for_two_guests() -> None:
    assert "until its fsync" in report.page(predicted(model.TWO, 1.0, 2.0))
    assert "until its fsync" not in report.page(predicted(model.TWO, 1.9, 2.0))


def test_plot_bars_of_all_workloads_have_different_names() -> None:
    names = [name for name, _ in report.speed_bars(partial(*MAKE))]
    assert len(names) == len(set(names)) >= 7
    assert "</svg>" in plot.bars("no bars", "", [])


@pytest.mark.parametrize("counter", ["misses_late", "misses_tripped"])
def test_one_late_page_of_the_victim_vm_misses_its_target(counter: str) -> None:
    found = partial("victim")
    found["parts"]["victim"]["repetitions"][0][WITH][counter] = 1.0
    rows = {row[0]: row for row in report.rows(found)}
    assert rows["`victim_late_pages`"][4] == report.MISSED
    assert rows["`victim_p99_ratio`"][4] == report.MET


def test_late_pages_and_pages_missed_at_an_open_breaker_have_separate_columns() -> None:
    found = partial("stream")
    of = found["parts"]["stream"]["repetitions"][:1]
    of[0][WITH] |= {"misses_late": 2.0, "misses_tripped": 3.0}
    found["parts"]["stream"]["repetitions"] = of
    head, row = report.workload_rows(found)
    columns = dict(zip(head, row, strict=True))
    assert (columns["late"], columns["breaker open"]) == ("2", "3")


def test_report_has_the_load_of_each_run() -> None:
    found = partial("stream")
    one = {"load_1min_before": 0.5, "load_1min_after": 2.0, "steal_share": 0.01}
    found["machine"] = [one, one]
    text = " ".join(" ".join(report.load_texts(found)).split())
    assert "in 2 runs." in text
    assert text.count("0.5 / 2.0, 1.0%") == 2


def test_report_names_a_workload_that_the_pool_slows_down() -> None:
    found = partial("stream", "rand_reread_io_uring")
    for one in found["parts"]["stream"]["repetitions"]:
        one[WITH]["seconds"] = 3.0
    lines = report.losses(found)
    assert lines[0].startswith("loss: stream")
    assert lines[1].startswith("no gain shown: Zipf random re-read, io_uring")


def test_comparison_with_ksm_uses_results_of_bench_density() -> None:
    found = partial("rivals_90")
    assert "make bench-density" in report.ksm_row(found)[4]
    runs = {"ksm": [9.0, 12.0], "device": [3.0, 3.0]}
    variants = {
        key: {"host_bytes_equal": True, "runs": [{"read_bytes": value} for value in values]}
        for key, values in runs.items()
    }
    found["density"] = report.density({"accelerator": "tcg", "variants": variants})
    assert report.ksm_row(found)[3:] == ["3.50 (3.00-4.00)", report.MET]
    found["density"]["equal"] = False
    assert report.ksm_row(found)[3] == "not comparable"


def test_threads_split_the_requests_of_a_repetition() -> None:
    part = RandomReread(8)
    loads = part.loads()
    assert len(loads) == 8 * (part.repetitions + 2)
    of = [loads[f"load0-{thread}"].splitlines()[3:-1] for thread in range(8)]
    assert sum(map(len, of)) == part.reads
    single = RandomReread(1).loads()["load0-0"].splitlines()[3:-1]
    assert [line for group in zip(*of, strict=True) for line in group] == single
    assert part.trace(0).count("--name=") == 8 and "--iodepth=1 " in part.trace(0)


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


def test_processor_time_includes_ended_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    before = host_bytes.family_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert host_bytes.family_seconds(os.getpid()) - before >= 0.15


def test_benchmark_qemu_guest_with_a_daemon_has_retain_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "_files", lambda _: {})
    host = object.__new__(guests.Qemu)
    host.__dict__.update(_kernel=None, _driver=tmp_path, _accelerator="tcg")
    configs: list[Config] = []
    session = SimpleNamespace(vm=configs.append)
    daemon = Daemon(tmp_path, [])
    for some in (daemon, None):
        host.create(cast(Session, session), guests.Spec("vm1", 64 * MIB, (), some))
    assert configs[0].tmem and configs[0].tmem.properties == {"retain": "on"}
    assert configs[1].tmem is None


def test_settings_change_with_the_programs_and_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linux = tmp_path / "linux"
    linux.write_text("one")
    monkeypatch.setattr(proof, "host_binary", lambda _: linux)
    host = cast(Host, SimpleNamespace(what="none", programs=lambda: {"kernel": linux}))
    first = proof.settings(False, host)
    assert first == proof.settings(False, host)
    monkeypatch.setattr(Write, "writes", 7)
    second = proof.settings(False, host)
    assert [key for key in first if first[key] != second[key]] == ["parameters"]
    linux.write_text("two")
    assert proof.settings(False, host)["kernel"] != second["kernel"]


def test_cgroup_is_removed_if_its_limits_cannot_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[bool] = []

    def limit(_: int) -> None:
        raise OSError("no controller")

    group = SimpleNamespace(limit=limit, remove=lambda: removed.append(True))
    monkeypatch.setattr(rivals_part, "MemoryGroup", lambda _: group)
    part = Rivals(0.9)
    base = tmp_path / "base.img"
    base.touch()
    part.__dict__.update(_lab=SimpleNamespace(directory=tmp_path), _base=base, _overlays=[])
    with pytest.raises(OSError, match="no controller"):
        part._boot(CACHE, 64 * MIB, 64 * MIB)
    part.finish()
    assert removed == [True]


def test_disk_processes_of_a_fleet_are_selected_by_disk_name(tmp_path: Path) -> None:
    disks_of = [Disk("data", tmp_path / "a"), Disk("loads", tmp_path / "b")]
    vm = native.NativeVm(native.NativeConfig(disks=disks_of), tmp_path / "vm")
    for number, export in enumerate(vm.exports):
        export.__dict__["_process"] = SimpleNamespace(pid=100 + number)
    fleet = Fleet([cast(guests.Box, SimpleNamespace(vm=vm))])
    assert fleet.fronts() == [100, 101]
    assert fleet.fronts("data") == [100]


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


def test_native_guest_builds_its_kernel_and_initramfs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def note(name: str) -> Path:
        made.append(name)
        return tmp_path / name

    monkeypatch.setattr(native, "build", lambda: note("linux"))
    monkeypatch.setattr(initramfs, "build", lambda *_, **__: note("initramfs"))
    vm = native.NativeVm(native.NativeConfig(), tmp_path / "vm")
    vm.prepare()
    assert sorted(made) == ["initramfs", "linux"]
    assert vm.command(3)[0] == str(tmp_path / "linux")
    assert len(made) == 2


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


def test_every_workload_has_parameters_and_five_repetitions() -> None:
    for name, make in MAKE.items():
        part = make()
        assert part.key == name
        assert part.repetitions >= 5
        assert part.parameters and part.title
    assert sum(make().seconds for make in MAKE.values()) < 40 * 60


def test_benchmark_working_sets_exceed_ram_and_fit_ram_plus_pool() -> None:
    part = RandomReread(1)
    assert part.set_bytes == 1.5 * part.ram_bytes == 288 * MIB
