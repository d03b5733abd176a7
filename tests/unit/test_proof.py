# SPDX-License-Identifier: Apache-2.0 OR MIT
"""bench-proof draws requests, resumes, computes intervals, predicts and reports correctly."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench_guest import PAGE_BYTES
from harness.paths import HarnessError
from harness.vm import MIB
from proof import disks, host_bytes, intervals, model, report
from proof.intervals import Estimate
from proof.results import Results
from proof.rivals import ARMS, POOL, RAM
from proof.run import MAKE
from proof.workloads import WITH, WITHOUT, RandomReread

pytestmark = pytest.mark.smoke


def test_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
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


def test_trace_has_each_request_once_and_the_share_of_writes() -> None:
    lines = disks.trace("/f", 4096, [3, 0] * 500, "s", write_share=0.2).splitlines()
    assert lines[:3] == ["fio version 2 iolog", "/f add", "/f open"] and lines[-1] == "/f close"
    requests = lines[3:-1]
    assert len(requests) == 1000
    assert {line.split()[2] for line in requests} == {"12288", "0"}
    assert 150 < sum(line.split()[1] == "write" for line in requests) < 250


def test_transactions_have_the_mix_of_sysbench() -> None:
    sql = disks.transactions(10_000, 3, 0, writes=True)
    assert sql.count("BEGIN;") == sql.count("COMMIT;") == 3
    assert len(re.findall(r"SELECT c FROM sbtest1 WHERE id=", sql)) == 30
    assert sql.count("BETWEEN") == 12
    assert sql.count("UPDATE") == 6
    assert sql.count("DELETE") == sql.count("INSERT") == 3
    assert "UPDATE" not in disks.transactions(10_000, 3, 0, writes=False)


def test_interrupted_run_continues_after_its_last_repetition(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    first = Results(path, {"quick": False})
    first.add("stream", {"title": "a stream"}, {WITH: {"seconds": 1.0}})
    again = Results(path, {"quick": False})
    assert again.repetitions("stream") == [{WITH: {"seconds": 1.0}}]
    again.add("stream", {"title": "a stream"}, {WITH: {"seconds": 2.0}})
    assert len(Results(path, {"quick": False}).repetitions("stream")) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["proof.json"]


def test_results_of_other_settings_are_not_continued(tmp_path: Path) -> None:
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


def test_smaller_cache_misses_more_and_whole_file_misses_nothing() -> None:
    zipf = disks.Zipf(2000, 0.6)
    found = [model.misses(pages, 3, zipf, 1000) for pages in (500, 1000, 2000)]
    assert found[0] > found[1] > found[2] == 0
    assert model.misses(500, 3, zipf, 1000, write_share=0.5) < found[0]


def synthetic(path: Path) -> Results:
    """Returns results whose times follow from known costs."""
    load = RandomReread(1)
    results = Results(path, {"guests": "synthetic"})
    work_us, disk_us, get_us, pages = 20.0, 500.0, 50.0, 36_000
    missed = model.misses(pages, 5, load.zipf, load.reads)
    work = load.reads * work_us
    for _ in range(5):
        results.add(
            model.ALL_IN_RAM, {}, {WITHOUT: {"seconds": work / 1e6, "disk_us": disk_us}}
        )  # fmt: skip
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
                "guest_cpu_s": 0.0,
                "tmemd_cpu_s": 0.0,
            },
        }
        results.add(model.CALIBRATION, {}, of)
    return results


def test_calibration_finds_the_costs_that_made_the_times(tmp_path: Path) -> None:
    found = model.calibrate(synthetic(tmp_path / "r.json"))
    assert found.work_us == pytest.approx(20)
    assert found.get_us == pytest.approx(50, rel=0.01)
    assert found.cache_pages == pytest.approx(36_000, rel=0.02)
    assert found.lost == 0
    assert found.lru_share == pytest.approx(1, rel=0.02)


def test_less_ram_takes_longer_and_the_limit_of_the_disk_bounds_the_time(tmp_path: Path) -> None:
    results = synthetic(tmp_path / "r.json")
    half = model.predict(results)[model.HALF]
    before = results.repetitions(model.CALIBRATION)[0]
    for arm in (WITH, WITHOUT):
        assert half[arm] > before[arm]["seconds"]
    assert half[WITHOUT] >= half["misses"] / 3000


def test_error_of_a_holdout_compares_prediction_and_measurement(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", {})
    results.add(model.HALF, {}, {WITHOUT: {"seconds": 4.0}, WITH: {"seconds": 2.0}})
    errors = model.errors({model.HALF: {WITHOUT: 5.0, WITH: 1.0}}, results)
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


def test_rival_with_fewer_host_bytes_is_named() -> None:
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


def test_every_workload_states_its_parameters() -> None:
    for name, make in MAKE.items():
        part = make()
        assert part.key == name
        assert part.repetitions >= 5
        assert part.parameters and part.title
    assert sum(make().seconds for make in MAKE.values()) < 40 * 60


def test_working_sets_exceed_ram_and_fit_ram_plus_pool() -> None:
    part = RandomReread(1)
    assert part.set_bytes == 1.5 * part.ram_bytes == 288 * MIB
