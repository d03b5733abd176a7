# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Each promise of the threat model names existing code and tests."""

from __future__ import annotations

import re

import pytest
from named import is_test, is_there, names
from test_guest_docs import table

from harness.paths import ROOT

PAGE = ROOT / "docs/threat-model.md"
TABLES = ("guest-host", "guest-guest", "qemu", "local", "operator", "device", "disk")
CELL = r"`[\w./-]+::\w+`"


def promises() -> list[list[str]]:
    return [row for name in TABLES for row in table(PAGE, name)]


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0][:50])
def test_code_and_tests_of_each_promise_exist(row: list[str]) -> None:
    promise, by, shown = row
    assert promise
    for cell in (by, shown):
        assert re.fullmatch(rf"{CELL}(, {CELL})*", cell), f"the cell lists no names: {cell}"
    for path, name in names(by):
        assert is_there(path, name), f"{path} does not define {name}"
        assert not is_test(path, name), (
            f"{name} in {path} is a test; name the code that keeps the promise"
        )
    for path, name in names(shown):
        assert is_test(path, name), f"{path} has no test {name}"


def test_each_chapter_has_a_not_promised_paragraph() -> None:
    chapters = PAGE.read_text().split("\n## ")[1:]
    with_table = [chapter for chapter in chapters if re.search(r"<!-- table: ", chapter)]
    assert len(with_table) == len(TABLES) + 1
    for chapter in with_table:
        title = chapter.splitlines()[0]
        assert title == "Gaps" or "**Not promised.**" in chapter, (
            f"chapter '{title}' has no paragraph **Not promised.**"
        )


def test_tests_named_on_the_threat_model_page_are_in_its_tables() -> None:
    """All tests and functions that the page names are in its tables, where they are checked."""
    in_tables = {name for row in promises() for cell in row for name in names(cell)}
    assert set(names(PAGE.read_text())) == in_tables


def test_each_known_gap_has_a_description() -> None:
    rows = table(PAGE, "gaps")
    assert len(rows) > 5
    assert all(row[0] for row in rows)
