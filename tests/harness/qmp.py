# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Wraps QEMU's own QMP library in blocking calls, each with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from qemu.qmp import EventListener, ExecuteError, Message, QMPClient, QMPError

from harness.paths import HarnessError
from harness.wait import Deadline, WaitTimeout, scaled

T = TypeVar("T")


class QmpError(HarnessError):
    """QEMU answered a command with an error."""


class Qmp:
    """One QMP connection. It keeps all events since the connection began, in order."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._events: list[Message] = []
        self._arrived = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmp", daemon=True)
        self._thread.start()
        self._client = QMPClient(name)
        self._listener: asyncio.Task[None] | None = None
        try:
            self._call(self._connect(str(path)), 20, "QMP greeting")
        except (QMPError, WaitTimeout) as error:
            self.close()
            raise QmpError(f"{name}: cannot connect to QMP: {error}") from error

    async def _connect(self, path: str) -> None:
        await self._client.connect(path)
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        listener = EventListener()
        with self._client.listen(listener):
            async for event in listener:
                with self._arrived:
                    self._events.append(event)
                    self._arrived.notify_all()

    def _call(self, coroutine: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(scaled(seconds))
        except FutureTimeout:
            future.cancel()
            raise WaitTimeout(
                f"{self._name}: no answer to {what} within {scaled(seconds):g} s"
            ) from None

    def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, seconds: float = 10
    ) -> Any:
        """Runs a command and returns its answer; raises QmpError or WaitTimeout."""
        try:
            return self._call(
                self._client.execute(command, dict(arguments) if arguments else None),
                seconds,
                command,
            )
        except ExecuteError as error:
            raise QmpError(f"{self._name}: {command}: {error}") from error

    def human(self, line: str, seconds: float = 10) -> str:
        """Runs a command line of QEMU's human monitor, and returns its output.

        The monitor has operations that QMP does not have.
        """
        arguments = {"command-line": line}
        return str(self.execute("human-monitor-command", arguments, seconds))

    def events_seen(self) -> int:
        """Returns the number of events so far, as a mark for wait_event()."""
        with self._arrived:
            return len(self._events)

    def wait_event(self, name: str, seconds: float, after: int = 0) -> Message:
        """Waits for the first event of that name after the mark `after`, and returns it."""
        deadline = Deadline(seconds, f"{self._name}: event {name}")
        with self._arrived:
            while True:
                for event in self._events[after:]:
                    if event["event"] == name:
                        return event
                deadline.check()
                self._arrived.wait(deadline.left())

    def run_job(self, command: str, arguments: Mapping[str, object], seconds: float) -> None:
        """Runs a command that is a job (blockdev-create, snapshot-save) to its end."""
        job = str(arguments["job-id"])
        self.execute(command, arguments)
        deadline = Deadline(seconds, f"{self._name}: job {command}")
        mark = 0
        while True:
            with self._arrived:
                if len(self._events) == mark:
                    self._arrived.wait(min(0.2, deadline.left()))
                mark = len(self._events)
            found = [entry for entry in self.execute("query-jobs") if entry["id"] == job]
            if found and found[0]["status"] == "concluded":
                self.execute("job-dismiss", {"id": job})
                if error := found[0].get("error"):
                    raise QmpError(f"{self._name}: {command}: {error}")
                return
            deadline.check()

    def close(self) -> None:
        """Ends the connection and its thread, even if the connection failed or QEMU died."""

        async def disconnect() -> None:
            if self._listener:
                self._listener.cancel()
            await self._client.disconnect()

        try:
            self._call(disconnect(), 5, "disconnect")
        except Exception:  # noqa: BLE001 - QEMU may have died in any way
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(scaled(5))
