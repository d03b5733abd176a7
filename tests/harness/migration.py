# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Moves a VM from one QEMU to another on this host, or through a file, step by step.

Each step is a separate call, so that a test can interfere in between. After the move, the harness
makes a new connection to the guest's agent. A program of the guest that must survive the move must
therefore not be a job of the old connection. Out of scope: checks of the state before and after a
migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm
from harness.wait import WaitTimeout, until

# Speed limit of a migration, 0 for none: the memory of a guest that writes all the time must be
# copied faster than the guest writes.
UNLIMITED = 0
# Longest pause at the end of a migration, for a guest under TCG on a loaded machine.
DOWNTIME_MS = 2000
# Speed limit with which a migration takes so long that a test can act during it.
SLOW_BYTES_PER_SECOND = 4 * MIB
ENDS = ("completed", "failed", "cancelled")
SECONDS = 120.0


def launch_receiver(session: Session, vm: Vm, tmem: Tmem | None, **changes: Any) -> Vm:
    """Launches a VM that waits for the state of `vm`, and returns it.

    The VM has the configuration of `vm` with the given changes.
    """
    config: Config = replace(vm.config, tmem=tmem, incoming=True, **changes)
    other = session.vm(config)
    other.launch()
    return other


def begin(
    source: Vm,
    target: Vm,
    *,
    bytes_per_second: int = UNLIMITED,
    downtime_ms: int = DOWNTIME_MS,
    capabilities: Sequence[str] = (),
) -> None:
    """Starts to move `source` into `target`; returns at once."""
    # Without the return path, the source would not notice a target that cannot take the state.
    for vm in (target, source):
        enable(vm, "return-path", *capabilities)
    uri = f"unix:{target.directory / 'migration'}"
    target.qmp.execute("migrate-incoming", {"uri": uri})
    set_speed(source, bytes_per_second, downtime_ms)
    source.qmp.execute("migrate", {"uri": uri})


def set_speed(source: Vm, bytes_per_second: int, downtime_ms: int = DOWNTIME_MS) -> None:
    limits = {"max-bandwidth": bytes_per_second, "downtime-limit": downtime_ms}
    source.qmp.execute("migrate-set-parameters", limits)


def enable(vm: Vm, *capabilities: str, state: bool = True) -> None:
    """Switches migration capabilities on or off."""
    wanted = [{"capability": name, "state": state} for name in capabilities]
    vm.qmp.execute("migrate-set-capabilities", {"capabilities": wanted})


def progress(vm: Vm) -> Mapping[str, Any]:
    """Returns the answer of this VM's QEMU to query-migrate."""
    return dict(vm.qmp.execute("query-migrate"))


def wait(vm: Vm, wanted: str, seconds: float = SECONDS) -> Mapping[str, Any]:
    """Waits until the migration has the state `wanted`. Returns the answer to query-migrate.

    Raises if the migration ends in another state.
    """
    found: Mapping[str, Any] = {}

    def reached() -> bool:
        nonlocal found
        found = progress(vm)
        status = found.get("status")
        if status in ENDS and status != wanted:
            raise HarnessError(f"{vm.name}: the migration is '{status}', not '{wanted}': {found}")
        return status == wanted

    try:
        until(reached, seconds, f"{vm.name}: the migration is '{wanted}'")
    except WaitTimeout as error:
        raise HarnessError(f"{error}; query-migrate returned {found}") from None
    return found


def wait_until_half_done(source: Vm) -> None:
    """Waits until a part of the memory has been copied."""

    def copied() -> bool:
        found = progress(source)
        if found.get("status") in ENDS:
            raise HarnessError(
                f"{source.name}: the migration ended before the awaited step: {found}"
            )
        return int(found.get("ram", {}).get("transferred", 0)) > SLOW_BYTES_PER_SECOND

    until(copied, SECONDS, f"{source.name}: a part of the memory is copied")


def wait_until_copied_once(source: Vm) -> None:
    """Waits until all memory was copied once, so that only pages written meanwhile remain."""

    def done() -> bool:
        found = progress(source)
        if found.get("status") in ENDS:
            raise HarnessError(
                f"{source.name}: the migration ended before the awaited step: {found}"
            )
        return int(found.get("ram", {}).get("dirty-sync-count", 0)) > 1

    until(done, SECONDS, f"{source.name}: all memory is copied once")


def move(source: Vm, target: Vm) -> Mapping[str, Any]:
    """Moves a VM from `source` to `target`, ends `source`, and connects to the guest.

    Returns QEMU's statistics of the migration.
    """
    begin(source, target)
    figures = wait(source, "completed")
    complete(source, target)
    return figures


def complete(source: Vm, target: Vm) -> None:
    """Waits until the guest runs in `target`, ends `source`, and connects to the guest."""
    until(lambda: target.status() == "running", SECONDS, f"{target.name} runs at the destination")
    source.quit()
    target.connect()


def save(vm: Vm, path: Path) -> None:
    """Writes the state of a paused VM to a file."""
    set_speed(vm, UNLIMITED)
    vm.qmp.execute("migrate", {"uri": f"file:{path}"})
    wait(vm, "completed")


def restore(target: Vm, path: Path) -> None:
    """Loads the state that save() wrote to `path` into `target`, and connects to the guest.

    launch_receiver() has launched `target`.
    """
    target.qmp.execute("migrate-incoming", {"uri": f"file:{path}"})
    wait(target, "completed")
    if target.status() != "running":
        target.qmp.execute("cont")
    target.connect()
