# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The benchmark of pool sizes compares the pool with its rivals, and shows its plot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.vm import sizes
from bench.vm.rivals import NONE, POOL, RAM


def make_results(*keys: str) -> dict[str, Any]:
    """Returns results of `sizes`: rivals read 100 MiB, ours 200 MiB minus the size of the pool."""
    parts = {}
    for key in keys:
        part = sizes.MAKE[key]()
        size_mib = key.removeprefix("pool_")
        one = {
            arm: {
                "disk_mib": 200.0 - float(size_mib) if arm == POOL else 100.0,
                "seconds": 3.0 if arm == POOL else 2.0,
                "host_mib": 700.0 if arm != RAM else 690.0,
            }
            for arm in part.arms
        }
        about = {"title": part.title, "parameters": part.parameters, "figure": part.figure}
        parts[key] = {**about, "repetitions": [one] * 5}
    return {"settings": {"guests": "no"}, "machine": [], "parts": parts}


def test_sizes_compare_the_pool_with_its_best_rival_at_each_size() -> None:
    found = make_results("pool_none", "pool_40", "pool_160")
    assert sizes.summary(found) == (
        "With a pool of 40 and 160 MiB, the guests read 1.60 and 0.40 times as much from their "
        "disks as with the rival that reads least. They took 1.50 and 1.50 times as long as with "
        "the fastest rival."
    )
    assert [row[0] for row in sizes.rows(found)] == ["pool", "none"] + ["40 MiB"] * 4 + [
        "160 MiB"
    ] * 4
    assert "more RAM for the guests at 160 MiB (1.4% less)" in " ".join(sizes.page(found).split())


def test_each_size_has_its_pool_and_only_one_part_has_no_pool() -> None:
    parts = [make() for make in sizes.MAKE.values()]
    assert [part.key for part in parts] == [*sizes.MAKE]
    assert [part.parameters.get("pool") for part in parts] == [None] + [
        f"{size_mib} MiB, one trust domain" for size_mib in sizes.SIZES_MIB
    ]
    assert [part.key for part in parts if NONE in part.arms] == ["pool_none"]


@pytest.mark.parametrize("keys", [list(sizes.MAKE), ["pool_40"]], ids=["all", "one"])
def test_page_of_sizes_shows_the_plot_that_was_written(keys: list[str], tmp_path: Path) -> None:
    page = tmp_path / "docs/benchmarks/sizes.md"
    page.parent.mkdir(parents=True)
    sizes.write_page(make_results(*keys), page)
    images = {path.name for path in (tmp_path / "docs/images").iterdir()}
    assert images == set(re.findall(r"images/([\w-]+\.svg)", page.read_text()))
