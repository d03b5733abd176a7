# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Finds names of code and tests of the form `path::name` in a page, and checks that they exist.

A path is relative to the root of the tree, or to host-daemon/ if it begins with the name of a
crate. Out of scope: whether the named test shows what the page says.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from harness.paths import ROOT

NAME = re.compile(r"`([\w./-]+\.(?:c|h|rs|py))::(\w+)`")

# Pattern of a definition, by the suffix of the source file. The name to find is put in the braces.
DEFINITIONS = {
    ".rs": r"\b(?:fn|const|static|struct|enum|trait|type|mod) {}\b",
    ".py": r"^\s*(?:def|class) {}\b",
    # The definition of a C function begins in the first column. A prototype, which ends with a
    # semicolon, does not match.
    ".c": r"^(?:[a-z][^\n;=]*\b{0}\([^;]*?\n\{{|#define\s+{0}\b|[^\n]*\b{0}(?:\[\])? = \{{)",
}
DEFINITIONS[".h"] = DEFINITIONS[".c"]
TESTS = {
    ".rs": r"#\[test\]\n(?:\s*(?:#\[|//)[^\n]*\n)*\s*fn {}\(\)",
    ".py": r"^def {}\(",
}


def names(text: str) -> list[tuple[str, str]]:
    """Returns the path and the name of each `path::name` in a text, in order."""
    return NAME.findall(text)


def place(path: str) -> Path:
    return ROOT / "host-daemon" / path if path.startswith("tmem") else ROOT / path


@cache
def source(path: str) -> str:
    return place(path).read_text() if place(path).is_file() else ""


def has_match(path: str, name: str, patterns: dict[str, str]) -> bool:
    pattern = patterns.get(Path(path).suffix)
    return bool(pattern and re.search(pattern.format(name), source(path), re.MULTILINE))


def is_there(path: str, name: str) -> bool:
    return has_match(path, name, DEFINITIONS)


def is_test(path: str, name: str) -> bool:
    return has_match(path, name, TESTS) and (path.endswith(".rs") or name.startswith("test_"))
