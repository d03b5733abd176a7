# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Owns what a test, the demo or a shell starts, and ends all of it, last one first."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from harness.daemon import Daemon, Tenant
from harness.vm import Config, Vm


class Session:
    """A scratch folder with VMs and daemons; use it in a `with` statement.

    The folder's path is short: Unix sockets live in it (108 bytes).
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tmem-"))
        self._keep = keep
        self._members: list[Vm | Daemon] = []

    def daemon(
        self, *tenants: Tenant | str, pool_size: str = "64MiB", options: list[str] | None = None
    ) -> Daemon:
        """A tmemd for these VMs, not yet started."""
        named = [Tenant(entry) if isinstance(entry, str) else entry for entry in tenants]
        folder = self.folder / f"tmemd{len(self._members)}"
        daemon = Daemon(folder, named, pool_size, options or [])
        self._members.append(daemon)
        return daemon

    def vm(self, config: Config) -> Vm:
        """A VM, not yet started."""
        vm = Vm(config, self.folder / f"{config.name}-{len(self._members)}")
        self._members.append(vm)
        return vm

    def check_consoles(self) -> None:
        """Fails if any guest's kernel complained."""
        for member in self._members:
            if isinstance(member, Vm):
                member.check_console()

    def report(self) -> str:
        """State and last words of all."""
        return "\n".join(member.report() for member in self._members)

    def close(self) -> None:
        """Ends everything; each member's end is tried whatever the others did."""
        failures: list[BaseException] = []
        for member in reversed(self._members):
            try:
                member.stop()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        if failures:
            raise failures[0]

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
