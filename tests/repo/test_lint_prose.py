# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tests/repo/lint-prose reports sentences that break one of its rules, and accepts other ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.paths import ROOT

LONG = "The guest " + "very " * 18 + "\n" + "very " * 15 + "often reads a page."
GOOD = {
    "page.md": "# Title\n\nThe daemon evicts a page. Who connects?\n\n```\n"
    + "x y " * 60
    + "\n```\n",
    "code.rs": "/// Returns the page, or `None`.\nfn f() {} // whoever\n",
    "code.py": '"""Waits for the guest."""\n',
}
BAD = {
    "long sentence.md": LONG,
    "wide line.md": "The daemon reads. " * 6,
    "word.md": "The daemon tells whoever asks.",
    "word in a table.md": "| a | the key is made anew |\n",
    "fragment.rs": "/// Of its lock.\nfn f() {}\n",
    "no actor.rs": "    // What is left goes back.\n",
    "block.c": "/*\n * The same.\n */\n",
    "docstring.py": 'def f() -> None:\n    """Who asks gets a page."""\n',
    "comment.py": "x = 1\n# A stranger connects.\n",
    "shell.sh": "# Somebody reads it.\n",
}


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tests/repo/lint-prose", path], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", GOOD)
def test_lint_prose_accepts_good_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(GOOD[name])
    done = lint(tmp_path / name)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", BAD)
def test_lint_prose_finds_each_bad_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(BAD[name])
    done = lint(tmp_path / name)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
