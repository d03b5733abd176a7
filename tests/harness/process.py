# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A child process in a session of its own, whose output goes to a file.

The kernel kills it when the thread that started it ends, so start processes from the
main thread. It is only ever signalled by the pid that this object waits for.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.paths import HarnessError
from harness.wait import scaled, until

TAIL_BYTES = 8192  # of a log, in a report


def tail(path: Path, limit_bytes: int = TAIL_BYTES) -> str:
    """The last bytes of a text file, or a word why there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"({path.name}: {error.strerror})"


class Process:
    """A running program; `log` gets its stdout and stderr."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = [str(word) for word in command]
        self.log = log
        with open(log, "ab") as output:
            # setpriv replaces itself by the program: the pid is the program's.
            self._child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment} if environment else None,
            )
        # Only then does it die with its parent.
        until(self._is_the_program, 10, f"{name} starts")

    @property
    def pid(self) -> int:
        return self._child.pid

    def status(self) -> int | None:
        """None while it runs, else its exit code, or minus the signal that ended it."""
        return self._child.poll()

    def alive(self) -> bool:
        return self.status() is None

    def expect_alive(self) -> None:
        if not self.alive():
            raise HarnessError(
                f"{self.name} ended with status {self.status()}; {self.log.name}:\n{tail(self.log)}"
            )

    def signal(self, number: signal.Signals) -> None:
        """Signals a process that must still run."""
        self.expect_alive()
        self._child.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP, and waits until the kernel shows it stopped."""
        self.signal(signal.SIGSTOP)
        until(lambda: self._state() == "T", 10, f"{self.name} stops at SIGSTOP")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Harmless when it already is."""
        if self.alive():
            self._child.kill()
        self._child.wait(scaled(30))

    def terminate(self, seconds: float = 10) -> int:
        """SIGTERM, waits, returns the exit status; kills and fails if it does not end."""
        if self.alive():
            self._child.send_signal(signal.SIGCONT)
            self._child.terminate()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Waits for its own end; kills and fails if that does not come."""
        try:
            return self._child.wait(scaled(seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            raise HarnessError(
                f"{self.name} did not end within {scaled(seconds):g} s; "
                f"{self.log.name}:\n{tail(self.log)}"
            ) from None

    def resident_bytes(self) -> int:
        """Resident memory, shared mappings included."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _is_the_program(self) -> bool:
        # At first it still shows our own command line, then setpriv's.
        if not self.alive():
            return True
        shown = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        ours = Path("/proc/self/cmdline").read_bytes()
        return bool(shown) and shown != ours and not shown.startswith(b"setpriv\0")

    def _state(self) -> str:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]
