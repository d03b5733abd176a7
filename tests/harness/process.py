# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a child process in its own session, with output to a file.

The kernel kills the process when the thread that started it ends, so start processes from the main
thread. Signals go only to the pid for which this object waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.paths import HarnessError
from harness.wait import scaled, until

TAIL_BYTES = 8192  # a report shows this many bytes of the end of a log


def tail(path: Path, limit_bytes: int = TAIL_BYTES) -> str:
    """Returns the last bytes of a text file, or the reason why there are none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"({path.name}: {error.strerror})"


@contextmanager
def on_processor(processor: int | None) -> Iterator[None]:
    """Binds this thread and the children that it starts to a processor, until the context ends."""
    if processor is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Process:
    """A running program; `log` receives its stdout and stderr."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        *,
        processor: int | None = None,
    ) -> None:
        """Starts the program, which inherits `descriptors` with the same numbers.

        The program and its children run on `processor` only, or on all processors if it is None.
        """
        self.name = name
        self.command = [str(word) for word in command]
        self.log = log
        with open(log, "ab") as output, on_processor(processor):
            # setpriv executes the program in its own process, so its pid becomes the program's.
            self._child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment} if environment else None,
                pass_fds=descriptors,
            )
        # Wait until setpriv has executed the program. Only from then on does the kernel kill the
        # program when this thread ends.
        until(self._is_the_program, 10, f"{name} starts")

    @property
    def pid(self) -> int:
        return self._child.pid

    def set_group_nice(self, nice: int) -> None:
        """Sets the nice value of the scheduling group that the kernel makes for the session.

        Does nothing if the kernel makes no such groups, or if the user may not change the value.
        """
        with suppress(OSError):
            Path(f"/proc/{self.pid}/autogroup").write_text(str(nice))

    def status(self) -> int | None:
        """Returns None while the process runs, then its exit code or minus the ending signal."""
        return self._child.poll()

    def is_alive(self) -> bool:
        return self.status() is None

    def expect_alive(self) -> None:
        if not self.is_alive():
            raise HarnessError(
                f"{self.name} ended with status {self.status()}; {self.log.name}:\n{tail(self.log)}"
            )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to a process, which must still run."""
        self.expect_alive()
        self._child.send_signal(number)

    def pause(self) -> None:
        """Sends SIGSTOP, and waits until the kernel shows the process as stopped."""
        self.signal(signal.SIGSTOP)
        until(lambda: self._state() == "T", 10, f"{self.name} stops at SIGSTOP")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL if the process still runs, and returns when it has ended."""
        if self.is_alive():
            self._child.kill()
        self._child.wait(scaled(30))

    def terminate(self, seconds: float = 10) -> int:
        """Sends SIGTERM and returns the exit status.

        Kills the process and raises if it does not end.
        """
        if self.is_alive():
            self._child.send_signal(signal.SIGCONT)
            self._child.terminate()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Waits until the process ends by itself, and returns its status.

        Kills the process and raises if it does not end in time.
        """
        try:
            return self._child.wait(scaled(seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            raise HarnessError(
                f"{self.name} did not end within {scaled(seconds):g} s; "
                f"{self.log.name}:\n{tail(self.log)}"
            ) from None

    def resident_bytes(self) -> int:
        """Returns the resident memory in bytes, including shared mappings."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _is_the_program(self) -> bool:
        # The child's command line is first that of this Python process, then that of setpriv, and
        # at last that of the program.
        if not self.is_alive():
            return True
        shown = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        ours = Path("/proc/self/cmdline").read_bytes()
        return bool(shown) and shown != ours and not shown.startswith(b"setpriv\0")

    def _state(self) -> str:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]
