# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests of the harness that need no VM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import wait


def test_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A harness that is killed leaves no process behind."""
    script = (
        "import sys; from pathlib import Path; from harness.process import Process\n"
        "print(Process('sleeper', ['sleep', '1000'], Path(sys.argv[1])).pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], check=False, stdout=subprocess.PIPE
    )
    assert parent.returncode == -9
    status = Path(f"/proc/{int(parent.stdout)}/status")

    def gone() -> bool:
        return not status.exists() or "State:\tZ" in status.read_text()

    wait.until(gone, 10, "the orphan ends")
