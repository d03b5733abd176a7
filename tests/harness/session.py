# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Owns the processes of a test, the demo or a shell. Ends them in the reverse order of creation."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from harness.daemon import Daemon, Tenant
from harness.machine import EVERYWHERE, Pinning
from harness.native import NativeConfig, NativeVm
from harness.vm import Config, Vm


class Session:
    """A scratch directory with VMs and daemons; use it in a `with` statement.

    The directory's path is short, because the path of a Unix socket has 107 bytes at most.
    `pinning` names the processors of daemons and native guests.
    """

    def __init__(self, *, keep: bool = False, pinning: Pinning = EVERYWHERE) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tmem-"))
        self._keep = keep
        self._pinning = pinning
        self._members: list[Vm | NativeVm | Daemon] = []

    def daemon(
        self, *tenants: Tenant | str, pool_size: str = "64MiB", options: list[str] | None = None
    ) -> Daemon:
        """Returns a tmemd for these VMs. The caller starts it."""
        named = [Tenant(entry) if isinstance(entry, str) else entry for entry in tenants]
        directory = self.directory / f"tmemd{len(self._members)}"
        daemon = Daemon(directory, named, pool_size, options or [], processor=self._pinning.host)
        self._members.append(daemon)
        return daemon

    def vm(self, config: Config) -> Vm:
        """Returns a VM. The caller starts it."""
        vm = Vm(config, self.directory / f"{config.name}-{len(self._members)}")
        self._members.append(vm)
        return vm

    def native_vm(self, config: NativeConfig) -> NativeVm:
        """Returns a native guest. The caller starts it."""
        directory = self.directory / f"{config.name}-{len(self._members)}"
        vm = NativeVm(config, directory, self._pinning)
        self._members.append(vm)
        return vm

    def expect_trouble(self) -> None:
        """Ignores oopses, warnings and wrong pages on the consoles of all present guests."""
        for member in self._members:
            if isinstance(member, Vm | NativeVm):
                member.expect_trouble()

    def check_consoles(self) -> None:
        """Raises if the kernel of any guest reported a fault."""
        for member in self._members:
            if isinstance(member, Vm | NativeVm):
                member.check_console()

    def report(self) -> str:
        """Returns the state and the end of the logs of each VM and daemon."""
        return "\n".join(member.report() for member in self._members)

    def close(self) -> None:
        """Ends all VMs and daemons, also if an error occurs while one of them ends."""
        failures: list[BaseException] = []
        for member in reversed(self._members):
            try:
                member.stop()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)
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
