# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A VM moves from one QEMU to another on this host, or through a file, step by step.

Each step is a call of its own, so that a test can break in between. The guest's agent is
connected anew on the other side; what runs in the guest has to be detached from it.
Never here: what has to hold before and after.
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

# Memory of a guest that writes all the time has to be copied faster than it writes.
UNLIMITED = 0
# A guest under TCG, on a loaded machine, rests as long for the last of it.
DOWNTIME_MS = 2000
# Slow enough to do something meanwhile.
SLOW_BYTES_PER_SECOND = 4 * MIB
ENDS = ("completed", "failed", "cancelled")
SECONDS = 120.0


def receiver(session: Session, vm: Vm, tmem: Tmem | None, **changes: Any) -> Vm:
    """The same machine, launched, that waits for the state of `vm`; with changes, if any."""
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
    # Without word from the other side, one that could not take the state is not noticed.
    for vm in (target, source):
        enable(vm, "return-path", *capabilities)
    uri = f"unix:{target.folder / 'migration'}"
    target.qmp.execute("migrate-incoming", {"uri": uri})
    set_speed(source, bytes_per_second, downtime_ms)
    source.qmp.execute("migrate", {"uri": uri})


def set_speed(source: Vm, bytes_per_second: int, downtime_ms: int = DOWNTIME_MS) -> None:
    limits = {"max-bandwidth": bytes_per_second, "downtime-limit": downtime_ms}
    source.qmp.execute("migrate-set-parameters", limits)


def enable(vm: Vm, *capabilities: str, state: bool = True) -> None:
    """Switches capabilities of migration on, or off."""
    wanted = [{"capability": name, "state": state} for name in capabilities]
    vm.qmp.execute("migrate-set-capabilities", {"capabilities": wanted})


def progress(vm: Vm) -> Mapping[str, Any]:
    """query-migrate, as this side sees it."""
    return dict(vm.qmp.execute("query-migrate"))


def wait(vm: Vm, wanted: str, seconds: float = SECONDS) -> Mapping[str, Any]:
    """Waits until the migration is in that state; another end of it is a failure."""
    found: Mapping[str, Any] = {}

    def reached() -> bool:
        nonlocal found
        found = progress(vm)
        status = found.get("status")
        if status in ENDS and status != wanted:
            raise HarnessError(f"{vm.name}: the migration is '{status}', not '{wanted}': {found}")
        return status == wanted

    try:
        until(reached, seconds, f"{vm.name}: its migration is '{wanted}'")
    except WaitTimeout as error:
        raise HarnessError(f"{error}; it is {found}") from None
    return found


def half_done(source: Vm) -> None:
    """Waits until some of the memory has been copied."""

    def copied() -> bool:
        found = progress(source)
        if found.get("status") in ENDS:
            raise HarnessError(f"{source.name}: the migration has ended: {found}")
        return int(found.get("ram", {}).get("transferred", 0)) > SLOW_BYTES_PER_SECOND

    until(copied, SECONDS, f"{source.name}: some memory is copied")


def first_pass(source: Vm) -> None:
    """Waits until all memory was copied once, and is left with what was written meanwhile."""

    def done() -> bool:
        found = progress(source)
        if found.get("status") in ENDS:
            raise HarnessError(f"{source.name}: the migration has ended: {found}")
        return int(found.get("ram", {}).get("dirty-sync-count", 0)) > 1

    until(done, SECONDS, f"{source.name}: all memory is copied once")


def move(source: Vm, target: Vm) -> Mapping[str, Any]:
    """Moves it, ends the QEMU that it leaves, and connects to the guest. Returns the figures."""
    begin(source, target)
    figures = wait(source, "completed")
    arrive(source, target)
    return figures


def arrive(source: Vm, target: Vm) -> None:
    """The guest runs in `target`: `source` is ended."""
    until(lambda: target.status() == "running", SECONDS, f"{target.name} runs where it arrived")
    source.quit()
    target.connect()


def save(vm: Vm, path: Path) -> None:
    """Writes the state of a VM that rests to a file."""
    set_speed(vm, UNLIMITED)
    vm.qmp.execute("migrate", {"uri": f"file:{path}"})
    wait(vm, "completed")


def restore(target: Vm, path: Path) -> None:
    """Lets a receiver go on from such a file, and connects to the guest."""
    target.qmp.execute("migrate-incoming", {"uri": f"file:{path}"})
    wait(target, "completed")
    if target.status() != "running":
        target.qmp.execute("cont")
    target.connect()
