# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Plots are valid, equal for equal values, and no bar covers a label."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.vm import plot
from bench.vm.intervals import Estimate
from bench.vm.plot import Bar, Curve
from harness.paths import ROOT, TESTS

SVG = "{http://www.w3.org/2000/svg}"
IMAGES = sorted((ROOT / "docs/images").glob("*.svg"))


def bars() -> str:
    return plot.bars(
        "Title < & >",
        "s",
        {"few": [Bar("one", Estimate(1, 1, 1), plot.OURS)],
         "many": [Bar("a much longer name than one", Estimate(800, 700, 950)),
                  Bar("two", Estimate(300, 200, 310))]},
    )  # fmt: skip


def curves() -> str:
    points = [(40.0, Estimate(9, 8, 10)), (80.0, Estimate(3, 3, 3))]
    return plot.curves(
        "t", ("MiB", "reads"), [Curve("ours", points, ours=True), Curve("other", points)],
        ("none", Estimate(12, 11, 13)),
    )  # fmt: skip


@pytest.mark.parametrize("draw", [bars, curves])
def test_image_is_valid_described_and_equal_for_equal_values(draw: Any) -> None:
    image = draw()
    assert image == draw()
    root = ElementTree.fromstring(image)
    assert root.get("role") == "img" and root.get("aria-labelledby") == "title desc"
    assert root[0].get("id") == "title" and root[1].get("id") == "desc"
    assert not re.search(r"20\d\d-|matplotlib\.org", image)
    values = {bars: "many: two: 300.0 (200.0-310.0)", curves: "other: 40: 9.0 (8.0-10.0), 80: 3.0"}
    assert values[draw] in (root[1].text or "")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_published_image_is_valid_and_on_a_page(path: Path) -> None:
    ElementTree.fromstring(path.read_text())
    pages = [ROOT / "README.md", *(ROOT / "docs/benchmarks").glob("*.md")]
    assert any(f"images/{path.name})" in page.read_text() for page in pages)


def test_neither_bars_nor_intervals_cover_the_labels() -> None:
    root = ElementTree.fromstring(bars())
    drawn = [
        [float(x) for x in re.findall(r"[ML] ([\d.]+)", element.get("d", ""))]
        for element in root.iter(f"{SVG}path")
        if re.search(f"{plot.OURS}|{plot.RIVAL}|stroke-width: 1.2", element.get("style", ""))
    ]
    starts, ends = [min(xs) for xs in drawn if xs], [max(xs) for xs in drawn if xs]
    texts = {element.text: element for element in root.iter(f"{SVG}text")}
    for name in ("one", "two", "a much longer name than one"):
        assert "text-anchor: end" in texts[name].get("style", "")
        assert float(texts[name].get("x", "")) < min(starts)
    # The bar of 800 has an interval up to 950, where its label begins.
    assert float(texts["800.0"].get("x", "")) > max(ends)
    assert len(drawn) >= 5


def test_benchmarks_start_without_matplotlib() -> None:
    check = "import sys, bench.vm.__main__; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=TESTS)
