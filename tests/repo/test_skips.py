# SPDX-License-Identifier: Apache-2.0 OR MIT
"""With --not-all-skipped, a run that skipped all tests fails and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import TESTS

SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="nothing can be mounted")
def test_that_is_skipped(): pass
"""
PASSED = "\ndef test_that_passes(): pass\n"


def run(directory: Path, text: str, *options: str) -> tuple[int, str]:
    (directory / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "conftest", *options]
    done = subprocess.run(
        [*command, directory / "test_it.py"],
        check=False, cwd=TESTS, env={"PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("text", "option", "status"),
    [(SKIPPED, True, 1), (SKIPPED, False, 0), (SKIPPED + PASSED, True, 0)],
    ids=["all", "not-asked", "one-ran"],
)
def test_run_that_skips_all_tests_fails(
    tmp_path: Path, text: str, option: bool, status: int
) -> None:
    done, out = run(tmp_path, text, *(["--not-all-skipped"] if option else []))
    assert done == status, out
    assert (
        "nothing was tested, all tests were skipped: Skipped: nothing can be mounted" in out
    ) == (PASSED not in text)
