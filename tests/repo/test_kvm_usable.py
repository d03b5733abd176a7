# SPDX-License-Identifier: Apache-2.0 OR MIT
"""KVM is used only if a guest boots on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import kvm
from harness.kernel import Kernel
from harness.paths import TESTS


@pytest.mark.parametrize(
    "device, reason",
    [("/nonexistent/kvm", "cannot be opened"), ("/dev/null", "makes no virtual machine")],
)
def test_unusable_kvm_device_gives_a_reason(device: str, reason: str) -> None:
    assert reason in (kvm.no_vm(Path(device)) or "")


@pytest.fixture
def failing_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces QEMU by a program that prints "no such MSR" and fails. Returns its path."""
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\necho no such MSR >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("TMEM_QEMU", str(program))
    return program


def test_guest_that_does_not_boot_gives_a_reason(kernel: Kernel, failing_qemu: Path) -> None:
    reason = kvm.no_guest(kernel) or ""
    assert "does not boot" in reason and "no such MSR" in reason, reason


def test_run_without_kvm_skips_all_tests_and_says_so(failing_qemu: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--kvm", "vm/test_kvm.py", "vm/test_memory_slots.py"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"nothing was tested, all tests were skipped: .*KVM cannot be used", done.stdout
    )
    assert "passed" not in done.stdout.splitlines()[-1]
