# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Checks that code and tests which pages name as `path::name` exist.

A path is relative to the tree; one that begins with the name of a crate is below host-daemon/. Out
of scope: whether a test shows what the page says, which only a reader can judge.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from harness.paths import ROOT

NAME = re.compile(r"`([\w./-]+\.(?:c|h|rs|py))::(\w+)`")

# Patterns of a definition in each language.
DEFINITIONS = {
    ".rs": r"\b(?:fn|const|static|struct|enum|trait|type|mod) {}\b",
    ".py": r"^\s*(?:def|class) {}\b",
    # Functions begin in the first column; a prototype ends on its line.
    ".c": r"^(?:[a-z][^\n;=]*\b{0}\([^;]*?\n\{{|#define\s+{0}\b|[^\n]*\b{0}(?:\[\])? = \{{)",
}
DEFINITIONS[".h"] = DEFINITIONS[".c"]
TESTS = {
    ".rs": r"#\[test\]\n(?:\s*(?:#\[|//)[^\n]*\n)*\s*fn {}\(\)",
    ".py": r"^def {}\(",
}


def names(text: str) -> list[tuple[str, str]]:
    """Returns all names in a text, in order."""
    return NAME.findall(text)


def place(path: str) -> Path:
    return ROOT / "host-daemon" / path if path.startswith("tmem") else ROOT / path


@cache
def source(path: str) -> str:
    return place(path).read_text() if place(path).is_file() else ""


def has(path: str, name: str, patterns: dict[str, str]) -> bool:
    pattern = patterns.get(Path(path).suffix)
    return bool(pattern and re.search(pattern.format(name), source(path), re.MULTILINE))


def is_there(path: str, name: str) -> bool:
    return has(path, name, DEFINITIONS)


def is_test(path: str, name: str) -> bool:
    return has(path, name, TESTS) and (path.endswith(".rs") or name.startswith("test_"))
