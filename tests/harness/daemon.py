# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Controls the tmemd under test: starts, kills, stops, continues, restarts and queries it."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.paths import HarnessError, host_binary
from harness.process import Process, tail
from harness.wait import scaled, until

INTERFACE = "io.virtiotmem.Control"
# Nice value of the daemon's scheduling group (see sched(7), "The autogroup feature"). Its weight is
# 9.3 times the default, about as large as CPUWeight= of the daemon's unit makes it.
GROUP_NICE = -10


@dataclass(frozen=True)
class Tenant:
    """A VM that tmemd serves. VMs with the same trust domain share equal pages."""

    name: str
    trust_domain: str | None = None
    uuid: str | None = None


@dataclass
class Daemon:
    """A tmemd process, with its sockets and log in `directory`."""

    directory: Path
    tenants: list[Tenant]
    pool_size: str = "64MiB"
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    program: Path | None = None  # program to run instead of the tmemd under test
    processor: int | None = None  # None: all processors
    _process: Process | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        return self.directory / "tmemd.log"

    @property
    def control(self) -> Path:
        return self.directory / "control"

    def socket(self, name: str) -> Path:
        """Returns the path of the VM's socket. The path stays the same while no daemon runs."""
        return self.directory / f"{name}.sock"

    @property
    def process(self) -> Process:
        if not self._process:
            raise HarnessError("tmemd was not started")
        return self._process

    def start(self) -> None:
        """Starts the daemon and waits until it serves."""
        if self._process and self._process.is_alive():
            raise HarnessError("tmemd is already running")
        command = [str(self.program or host_binary("tmemd")), "--pool-size", self.pool_size]
        command += ["--control", str(self.control)]
        # Keep the daemon from reacting to this machine's memory, which may be short.
        # tests/vm/test_pressure.py tests that reaction in a VM.
        if "--host-free-min" not in self.options:
            command += ["--host-free-min", "0B", "--memory-pressure", "none"]
        for tenant in self.tenants:
            more = f",trust_domain={tenant.trust_domain}" if tenant.trust_domain else ""
            more += f",uuid={tenant.uuid}" if tenant.uuid else ""
            command += ["--vm", f"socket={self.socket(tenant.name)},name={tenant.name}{more}"]
        command += self.options
        process = Process("tmemd", command, self.log, self.environment, processor=self.processor)
        self._process = process
        process.set_group_nice(GROUP_NICE)

        def serving() -> bool:
            process.expect_alive()
            return self._control("stats").returncode == 0

        until(serving, 20, "tmemd answers at its control socket")

    def kill(self) -> None:
        """Sends SIGKILL to the daemon."""
        self.process.kill()

    def pause(self) -> None:
        """Sends SIGSTOP: the daemon hangs, and its sockets stay open."""
        self.process.pause()

    def resume(self) -> None:
        """Sends SIGCONT, after which the daemon continues."""
        self.process.resume()

    def terminate(self) -> None:
        """Sends SIGTERM; the daemon must end with status 0."""
        if status := self.process.terminate():
            raise HarnessError(f"tmemd ended with status {status} after SIGTERM:\n{tail(self.log)}")

    def restart(self) -> None:
        """Kills the daemon with SIGKILL and starts another one in its place."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Ends the daemon, whether it runs, is stopped, or has ended."""
        if self._process:
            self._process.kill()

    def stats(self) -> Any:
        """Returns the output of `tmemctl stats --json`."""
        return self._json("stats")

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the control interface without tmemctl, and returns the answer."""
        request = {"method": f"{INTERFACE}.{method}", "parameters": parameters}
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(scaled(20))
            client.connect(str(self.control))
            client.sendall(json.dumps(request).encode() + b"\0")
            answer = b""
            while not answer.endswith(b"\0"):
                if not (part := client.recv(1 << 16)):
                    raise HarnessError(f"tmemd: {method}: the daemon closed the connection")
                answer += part
        found = json.loads(answer[:-1])
        if error := found.get("error"):
            raise HarnessError(f"tmemd: {method}: {error}: {found.get('parameters')}")
        return found.get("parameters", {})  # a method without results may leave them out

    def list(self) -> Any:
        """Returns the output of `tmemctl list --json`."""
        return self._json("list")

    def _json(self, command: str) -> Any:
        done = self._control(command)
        if done.returncode != 0:
            raise HarnessError(f"tmemctl {command}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def _control(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [host_binary("tmemctl"), "--socket", self.control, command, "--json"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(20),
        )

    def report(self) -> str:
        """Returns the state and the end of the log, for a failed test's report."""
        status = self._process.status() if self._process else None
        state = "running or not started" if status is None else f"ended with status {status}"
        return f"--- tmemd: {state}\n{tail(self.log)}"
