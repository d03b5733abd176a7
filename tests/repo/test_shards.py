# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Each test is in exactly one shard, and no shard takes much longer than the others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness import shards

pytestmark = pytest.mark.smoke


def test_each_test_is_in_one_shard() -> None:
    rng = random.Random(1)
    durations = {f"vm/test_{i}": rng.expovariate(1 / 30) for i in range(90)}
    names = [*durations, "vm/test_new", "unit/test_new"]
    for parts in (1, 2, 7, len(names) + 1):
        found = shards.split(names, durations, parts)
        assert len(found) == parts
        assert sorted(name for part in found for name in part) == sorted(names)
        shuffled = rng.sample(names, len(names))
        assert shards.split(shuffled, durations, parts) == found, (
            "the shards depend on the order of the test names"
        )


def test_shards_take_equally_long() -> None:
    durations = {f"vm/long{i}": 300.0 for i in range(4)}
    durations |= {f"vm/short{i}": 10.0 for i in range(60)}
    for part in shards.split(durations, durations, 3):
        assert abs(sum(durations[name] for name in part) - 600) <= 10


def test_tests_without_duration_are_spread_evenly() -> None:
    durations = {f"unit/{i}": 0.0 for i in range(30)}
    assert [len(part) for part in shards.split(durations, durations, 3)] == [10, 10, 10]


def test_unmeasured_tests_keep_their_duration(tmp_path: Path) -> None:
    path = tmp_path / "durations.txt"
    shards.write(path, {"vm/a.py::a[x y]": 3.4, "vm/a.py::b": 5.0})
    shards.write(path, {"vm/a.py::b": 70.0})
    assert shards.read(path) == {"vm/a.py::a[x y]": 3.0, "vm/a.py::b": 70.0}
    assert shards.read()
