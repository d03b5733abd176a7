# SPDX-License-Identifier: Apache-2.0 OR MIT
"""README.md and docs/README.md are short, and their links, commands and picture are correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_guest_docs import check_links

from harness.paths import ROOT

README_LINES_MAX = 120
COLUMNS_MAX = 100
PAGES = [
    ROOT / name
    for name in (
        *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
        *(f"docs/{page}.md" for page in ("README", "comparison", "glossary", "install", "quotas")),
    )
]


def test_readme_length_and_width_are_limited() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES_MAX
    assert [line for line in lines if len(line) > COLUMNS_MAX] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_of_each_page_exist(page: Path) -> None:
    check_links(page)


def test_docs_index_links_every_page_of_docs() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert pages
    assert pages <= set(re.findall(r"\]\(([^)#]+)", index))


def test_tmemctl_commands_named_in_the_documentation_exist() -> None:
    main = (ROOT / "host-daemon/tmemctl/src/lib.rs").read_text()
    enum = main.split("enum Command {")[1].split("\n}\n")[0]
    commands = {name.lower() for name in re.findall(r"^    ([A-Z][a-z]+)\b", enum, re.MULTILINE)}
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"(?:`|^ *|; )tmemctl ([a-z]+)", page.read_text(), re.MULTILINE))
    assert {"attach", "list"} <= named <= commands, f"tmemctl lacks commands: {named - commands}"


def test_density_picture_shows_the_documented_figures() -> None:
    """The bars and labels of density.svg have the figures of docs/benchmarks/density.md."""
    picture = (ROOT / "docs/images/density.svg").read_text()
    measured = (ROOT / "docs/benchmarks/density.md").read_text()
    figures = re.findall(r">([\d,]+) MiB", picture)
    assert len(figures) == 8
    for figure in set(figures) - {"0"}:
        assert f"{figure} MiB" in measured
    widths = [int(width) for width in re.findall(r'<rect x="215".*?width="(\d+)"', picture)]
    reads = [int(figure.replace(",", "")) for figure in figures[4:]]
    # The bars have one pixel for 5 MiB. The last bar is a line, because its value is 0.
    assert widths[:3] == [round(read / 5) for read in reads[:3]] and reads[3] == 0
