# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The repeated experiments compare gains correctly, and each of them is on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.vm import seeds_report
from bench.vm.databases import rate
from bench.vm.seeds import MAKE
from bench.vm.seeds_report import GAINS, MORE
from bench.vm.workloads import WITH, WITHOUT
from harness.paths import HarnessError


def make_results(values: dict[str, float]) -> dict[str, Any]:
    """Returns results in which all figures of an arm have the same value."""
    parts = {}
    for key, make in MAKE.items():
        part = make()
        names = {name for gain in GAINS for name in (gain.figure, gain.with_pool) if name}
        names |= {f"{name}_disk_reads" for name in names} | {"disk_reads", "disk_read_bytes"}
        one = {arm: dict.fromkeys(names, values[arm]) for arm in part.arms}
        parts[key] = {
            "title": part.title,
            "parameters": part.parameters,
            "figure": part.figure,
            "repetitions": [one] * 3,
        }
    return {"settings": {"guests": "no"}, "machine": [], "parts": parts}


def test_gain_is_above_one_for_less_time_and_for_more_transactions() -> None:
    found = make_results({WITHOUT: 6.0, WITH: 2.0, MORE: 12.0})
    rows = {row[0]: row for row in seeds_report.rows(found)[1:]}
    read, oltp = (
        next(row for name, row in rows.items() if text in name)
        for text in ("iozone: read", "OLTP: MariaDB")
    )
    assert read[2].startswith("3.00") and read[3].startswith("0.50")
    assert oltp[2].startswith("0.33") and oltp[3].startswith("2.00")
    assert "saves 67%" in seeds_report.saved_text(found)


def test_each_part_has_a_gain_and_each_missed_target_a_cause() -> None:
    assert {gain.part for gain in GAINS} == set(MAKE)
    found = make_results({WITHOUT: 6.0, WITH: 6.0, MORE: 6.0})
    missed = [gain for gain in GAINS if gain.target]
    assert len(seeds_report.causes(found)) == len(missed) > 0
    page = seeds_report.page(found)
    assert all(gain.experiment in page for gain in GAINS)
    assert f"0 of {len(missed)} targets are met" in page
    assert seeds_report.text(found)


def test_report_names_the_experiments_that_were_not_measured() -> None:
    found = make_results({WITHOUT: 6.0, WITH: 2.0, MORE: 2.0})
    assert "were not measured" not in seeds_report.page(found)
    del found["parts"]["iozone_500"], found["parts"]["mariadb_rw"]
    missing = [gain.experiment for gain in GAINS if gain.part in ("iozone_500", "mariadb_rw")]
    section = seeds_report.page(found).partition("were not measured")[2].partition("\n## ")[0]
    assert section.count("\n- ") == len(missing) == 7


def test_rate_is_read_from_the_output_of_sysbench_and_pgbench() -> None:
    assert rate("    transactions:   600    (123.40 per sec.)\n") == 123.4
    assert rate("latency average = 1 ms\ntps = 45.6 (without initial connection time)\n") == 45.6
    with pytest.raises(HarnessError, match="no rate"):
        rate("FATAL: cannot connect")


@pytest.mark.parametrize("keys", [list(MAKE), ["postgresql_ro"]], ids=["all", "none published"])
def test_plot_has_each_repeated_experiment_with_a_published_gain(
    keys: list[str], tmp_path: Path
) -> None:
    found = make_results({WITHOUT: 6.0, WITH: 2.0, MORE: 2.0})
    found["parts"] = {key: found["parts"][key] for key in keys}
    page = tmp_path / "docs/benchmarks/seeds.md"
    page.parent.mkdir(parents=True)
    seeds_report.write_page(found, page)
    images = {path.name for path in (tmp_path / "docs/images").glob("*")}
    assert images == set(re.findall(r"images/([\w-]+\.svg)", page.read_text()))
    published = [gain.experiment for gain in GAINS if gain.published != "-" and gain.part in keys]
    assert [*seeds_report.bars(found)] == published
