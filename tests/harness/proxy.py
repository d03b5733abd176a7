# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs vhost-proxy between a native guest and tmemd, so that the guest survives the daemon.

The proxy (tests/model/src/bin/vhost-proxy.rs) connects to tmemd again and again, as VMMs
do that forward everything. It counts and fails configuration reads after the driver's probe.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.paths import HarnessError, host_binary
from harness.process import Process, tail
from harness.wait import until


class VhostProxy:
    """A proxy in `directory` for the socket `tmemd` of a daemon."""

    def __init__(self, directory: Path, tmemd: Path, *, skips_in_flight: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.socket = directory / "proxy.sock"
        self.log = directory / "proxy.log"
        option = ["--skip"] if skips_in_flight else []
        program = str(host_binary("vhost-proxy"))
        self._command = [program, str(self.socket), str(tmemd), *option]
        self._process: Process | None = None

    def start(self) -> None:
        """Starts the proxy, which serves one guest, and waits until it is connected to tmemd."""
        self._process = Process("vhost-proxy", self._command, self.log)
        until(lambda: self.counts().get("connected"), 20, "the proxy is connected to tmemd")

    def end_probe(self) -> None:
        """Lets each configuration read from now on fail."""
        Path(f"{self.socket}.probed").touch()

    def counts(self) -> dict[str, int]:
        """Returns the last counts that the proxy has printed."""
        if not self._process:
            raise HarnessError("vhost-proxy was not started")
        self._process.expect_alive()
        lines = self.log.read_text().splitlines()
        found = [line for line in lines if line.startswith("{") and line.endswith("}")]
        counts: dict[str, int] = json.loads(found[-1]) if found else {}
        return counts

    def stop(self) -> None:
        if self._process:
            self._process.kill()

    def report(self) -> str:
        """Returns the end of the log, for a failed test's report."""
        return f"--- vhost-proxy\n{tail(self.log)}"
