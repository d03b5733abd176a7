# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The page about the guest driver's tests names only existing tests, and every hook has one."""

from __future__ import annotations

import re

from test_abi import DRIVER
from test_guest_docs import code, table

from harness import kernel
from harness.paths import ROOT, TESTS

PAGE = ROOT / "docs/guest-tests.md"
NAME = r"`(test_\w+)::(test_\w+)`"


def vm_tests() -> set[tuple[str, str]]:
    """Returns the file and function of each VM test."""
    return {
        (path.stem, name)
        for path in (TESTS / "vm").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_each_row_of_the_test_table_names_existing_tests() -> None:
    there = vm_tests()
    rows = table(PAGE, "tests")
    assert len(rows) > 30
    for what, test, kernels in rows:
        if test.startswith("`make "):
            (target,) = re.findall(r"`make ([\w-]+)", test)
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        named = re.findall(NAME, test)
        assert named and set(named) <= there, (
            f"row '{what}': some of its tests do not exist: {named}"
        )
        assert set(re.findall(r"\b[67]\.\d+\b", kernels)) <= {*kernel.SERIES, "6.10"}


def test_each_hook_has_a_test() -> None:
    source = (DRIVER / "hooks/state.c").read_text()
    names = re.findall(r'^\t\[TMEM_HOOK_\w+\] = "(\w+)",$', source, re.MULTILINE)
    assert len(names) > 10
    rows = {code(row[0]): row[1] for row in table(PAGE, "hooks")}
    assert sorted(rows) == sorted(names)
    there = vm_tests()
    for hook, text in rows.items():
        named = re.findall(NAME, text)
        assert named, f"hook {hook}: the page names no test"
        for file, name in named:
            assert (file, name) in there, f"hook {hook}: the test {file}::{name} does not exist"
            text_of_file = (TESTS / f"vm/{file}.py").read_text()
            # drop_slab has a switch of its own, drop_caches_flush, by which its test names it.
            mark = "drop_caches_flush" if hook == "drop_slab" else rf"\b{hook}\b"
            assert re.search(mark, text_of_file), f"{file} does not switch off the hook {hook}"


def test_each_test_named_on_the_page_exists() -> None:
    named = set(re.findall(NAME, PAGE.read_text()))
    assert len(named) > 30
    assert named <= vm_tests()


def test_each_row_of_the_race_table_names_existing_tests_and_mutations() -> None:
    there = vm_tests()
    source = (ROOT / "tests/simulator/src/mutation.rs").read_text()
    rules = set(re.findall(r"^    (\w+),$", source, re.MULTILINE))
    rows = table(PAGE, "races")
    assert len(rows) > 10
    for race, tests, broken in rows:
        named = re.findall(NAME, tests)
        assert named and set(named) <= there, (
            f"race '{race}': some of its tests do not exist: {named}"
        )
        assert set(re.findall(r"`(\w+)`", broken)) <= rules, (
            f"race '{race}': the table names an unknown mutation in {broken}"
        )
