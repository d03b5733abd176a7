# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tests/vm/long.py ends at the first wrong byte, and its printed seed finds that byte again."""

from __future__ import annotations

import re

import long
import pytest

from harness.kernel import Kernel

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

BROKEN = "--duration=5m --file-systems=ext4 --without=forget"


def run(capsys: pytest.CaptureFixture[str], kernel: Kernel, arguments: str) -> tuple[str, str]:
    """Runs tests/vm/long.py, which must fail. Returns the seed and the command line that failed."""
    assert long.main([f"--kernels={kernel.series}", *arguments.split()]) == 1
    said = capsys.readouterr()
    assert "TORTURE MISMATCH" in said.err
    whole = re.search(r"^long: --seed=(\d+)$", said.out, re.MULTILINE)
    failed = re.search(r"^long: FAILED: .*: (torture .*)$", said.out, re.MULTILINE)
    assert whole and failed, said.out
    return whole[1], failed[1]


def test_seed_of_a_failed_run_repeats_the_failure(
    capsys: pytest.CaptureFixture[str], kernel: Kernel
) -> None:
    seed, failed = run(capsys, kernel, BROKEN)
    again, failed_again = run(capsys, kernel, f"{BROKEN} --seed={seed}")
    assert (again, failed_again) == (seed, failed)
