# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Supervises one tmemd as systemd does: Type=notify, WatchdogSec= and Restart=always of the unit.

The supervisor sends SIGKILL to a daemon that sends no heartbeat for the watchdog's period, or that
reports a hung thread. It restarts a daemon that has ended. It runs in a thread of its own while the
test continues.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field

from harness.daemon import Daemon
from harness.wait import Deadline, until

RESTART_SECONDS = 0.1  # the value of RestartSec= in tmemd's unit
MESSAGE_BYTES_MAX = 4096


@dataclass
class Supervisor:
    """Runs the daemon between start() and stop(); `period_seconds` is WatchdogSec=."""

    daemon: Daemon
    period_seconds: float
    kills: int = 0
    words: list[str] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _started: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def start(self) -> None:
        """Starts the daemon, and returns when it has reported that it is ready."""
        path = self.daemon.directory / "notify"
        path.unlink(missing_ok=True)
        ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ear.bind(str(path))
        micros = int(self.period_seconds * 1e6)
        self.daemon.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(micros)}
        # The supervisor's thread starts the daemons, because the kernel kills a process when the
        # thread that started it ends.
        self._thread = threading.Thread(target=self._run, args=(ear,), name="supervisor")
        self._thread.start()
        deadline = Deadline(30, "the supervised tmemd is ready")
        while not self._started.wait(0.05):
            self._check()
            deadline.check()

    def stop(self) -> None:
        """Stops the supervision, and then the daemon."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        self.daemon.stop()
        self._check()

    def wait_kills(self, number: int, seconds: float) -> None:
        """Waits until `number` daemons have been killed in total, and the next one serves."""

        def done() -> bool:
            self._check()
            return self.kills >= number and self._started.is_set()

        until(done, seconds, f"the supervisor ends {number} daemons")

    def _check(self) -> None:
        if self._failure:
            raise self._failure

    def _run(self, ear: socket.socket) -> None:
        try:
            with ear:
                while not self._stop.is_set():
                    self._run_one(ear)
                    self._started.clear()
        except BaseException as error:  # noqa: BLE001 - raised by _check()
            self._failure = error

    def _run_one(self, ear: socket.socket) -> None:
        """Runs one daemon from its start to its end."""
        self.daemon.start()
        last = time.monotonic()
        ear.settimeout(0.02)
        while not self._stop.is_set() and self.daemon.process.is_alive():
            word = ""
            try:
                word = ear.recv(MESSAGE_BYTES_MAX).decode().strip()
                self.words.append(word)
            except TimeoutError:
                pass
            if word == "READY=1":
                self._started.set()
            if word in ("READY=1", "WATCHDOG=1"):
                last = time.monotonic()
            if word == "WATCHDOG=trigger" or time.monotonic() - last > self.period_seconds:
                # Clear the event before `kills` grows, so that wait_kills() waits until the next
                # daemon is ready.
                self._started.clear()
                self.daemon.kill()
                self.kills += 1
        self._started.clear()
        self._stop.wait(RESTART_SECONDS)
        # Discard messages that the dead daemon sent before its end.
        ear.setblocking(False)
        while True:
            try:
                ear.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
