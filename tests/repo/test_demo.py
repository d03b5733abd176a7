# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The demo computes working sets and prints its results, for guests under QEMU and native ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.vm import demo
from harness.paths import HarnessError
from harness.vm import MIB


def make_measured(read: int, hits: int) -> demo.Measured:
    counters = {"hits": hits, "puts_eligible": 400, "puts_lost": 100, "puts_skipped_off": 0}
    return demo.Measured([1.0, 2.0, 3.0, 4.0], read, True, counters)


@pytest.mark.parametrize("sizes", [demo.SIZES, demo.SIZES_NATIVE])
def test_demo_working_set_exceeds_ram_and_fits_ram_plus_pool(sizes: demo.Sizes) -> None:
    pool_bytes = int(sizes.pool.removesuffix("MiB")) * MIB
    assert sizes.set_bytes > 1.5 * sizes.ram_bytes
    assert sizes.set_bytes < sizes.ram_bytes + pool_bytes


def test_demo_working_sets_share_most_of_their_files() -> None:
    files = [(Path(f"/usr/share/{number}"), MIB) for number in range(400)]
    one, other = (set(tree) for tree in demo.choose(files, 2, 200 * MIB))
    assert abs(len(one) - 200) <= 1 and abs(len(other) - 200) <= 1
    assert len(one & other) == 200 * demo.SHARED_FRACTION
    with pytest.raises(HarnessError, match="too small"):
        demo.choose(files[:100], 2, 200 * MIB)


def test_table_contains_both_vms() -> None:
    plain = {name: make_measured(4 << 30, 0) for name in demo.NAMES}
    tmem = {name: make_measured(1 << 30, 262144) for name in demo.NAMES}
    text = demo.summary(plain, tmem)
    assert "262,144 = 1.00 GiB" in text and "both with" in text and "DIFFER" not in text
    assert "25.0%" in text
    tmem["web1"].checksums_equal = False
    assert "DIFFER" in demo.summary(plain, tmem)
