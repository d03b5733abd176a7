# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Each rule of the specification has a number, and a row that names its code and its test."""

from __future__ import annotations

import re

import pytest
from named import is_test, is_there, names
from test_guest_docs import table

from harness.paths import ROOT

PAGE = ROOT / "proto/SPEC.md"
# Words with which a rule of each prefix begins. The prefix of limits is left out: limits describe
# this implementation and are no rules of the device.
ACTORS = {
    "DEV": "The device ",
    "DRV": "The driver ",
    "FE": "The front end ",
    "BE": "The back end ",
    "VMM": "The VMM ",
}
LIMIT = "LIM"
PREFIX = "|".join([*ACTORS, LIMIT])
RULE = re.compile(rf"\b(?:{PREFIX})-[1-9]\d*\b")
TABLES = ("device", "driver", "vhost-user", "limits")
COLUMNS_MAX = 100
WORD = re.compile(r"\b(?:MUST|SHOULD|MAY)\b")
# Texts that a row may have instead of a test; the reason follows.
EXCUSES = ("none: ", "MAY: ")


def prose() -> str:
    return PAGE.read_text().split("\n## Conformance\n")[0]


def bullets() -> list[str]:
    """Returns the rules: bullets that begin with a number."""
    return re.findall(rf"^- (\*\*(?:{PREFIX})-.*(?:\n  .*)*)", prose(), re.MULTILINE)


def is_limit(bullet: str) -> bool:
    return bullet.startswith(f"**{LIMIT}-")


def rules() -> list[str]:
    return [bullet.split("**")[1] for bullet in bullets()]


def rows() -> dict[str, tuple[str, str]]:
    all_rows = [row for name in TABLES for row in table(PAGE, name)]
    assert len({row[0] for row in all_rows}) == len(all_rows)
    return {rule: (kept, shown) for rule, kept, shown in all_rows}


def test_each_rule_has_one_number_and_one_table_row() -> None:
    found = rules()
    assert len(found) > 60
    assert len(set(found)) == len(found)
    assert set(found) == set(rows())
    assert set(RULE.findall(PAGE.read_text())) == set(found), (
        "the specification refers to a rule that it does not define"
    )


def test_each_requirement_has_a_number() -> None:
    for bullet in bullets():
        assert bool(WORD.search(bullet)) != is_limit(bullet), (
            f"a rule needs MUST or SHOULD, and a limit must have neither: {bullet}"
        )
    rest = prose()
    for bullet in bullets():
        rest = rest.replace(bullet, "")
    said = [line for line in rest.splitlines() if WORD.search(line)]
    assert len(said) == 1 and "RFC 2119" in said[0], (
        f"these lines outside of the rules have MUST or SHOULD: {said}"
    )


def test_each_rule_is_one_sentence_about_its_actor() -> None:
    for bullet in bullets():
        number, text = bullet.removeprefix("**").split("** ", 1)
        assert is_limit(bullet) or text.startswith(ACTORS[number.split("-")[0]]), (
            f"the rule does not begin with its actor: {bullet}"
        )
        assert text.endswith(".") and not re.search(r"[.!?]\s", text), (
            f"the rule is not one sentence: {bullet}"
        )


def test_lines_of_the_specification_are_wrapped() -> None:
    long = [
        line
        for line in PAGE.read_text().splitlines()
        if len(line) > COLUMNS_MAX and not line.startswith("|")
    ]
    assert not long


@pytest.mark.parametrize("rule", rules())
def test_code_and_test_of_each_rule_exist(rule: str) -> None:
    kept, shown = rows()[rule]
    assert names(kept), f"rule {rule}: the table names no code that keeps the rule"
    for path, name in names(kept):
        assert is_there(path, name), f"{path} does not define {name}"
    for path, name in names(shown):
        assert is_test(path, name), f"{path} has no test {name}"
    if not shown.startswith(EXCUSES):
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", shown) and names(shown)


def test_lookup_of_code_and_tests_finds_definitions_only() -> None:
    """A use of a name is not found, and a function that is no test is not found as a test."""
    spec = "tests/repo/test_spec.py"
    chain = "tmemd/src/queue/chain.rs"
    assert is_there(spec, "rules") and not is_there(spec, "rule")
    assert is_test(spec, "test_lookup_of_code_and_tests_finds_definitions_only") and not is_test(
        spec, "rules"
    )
    assert is_there(chain, "fill") and not is_test(chain, "fill")
    assert is_test(chain, "chain_reads_and_writes_cover_descriptors_of_any_length")
    core = "guest-driver/core"
    assert is_there(f"{core}/request.c", "take_page")
    assert not is_there(f"{core}/request.c", "tmem_send_drain"), (
        "a call in request.c was taken for a definition"
    )
    assert not is_there(f"{core}/core.h", "tmem_queue_of"), (
        "a declaration in core.h was taken for a definition"
    )
    assert not is_there("tmemd/src/absent.rs", "fill")
