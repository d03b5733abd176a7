# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A daemon that hangs is replaced within the watchdog's period, and nobody waits for it longer.

The test plays systemd. What of the daemon's threads counts as hung is tmemd/tests/watchdog.rs's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driver import LastingTorture, Torture, driver_vm, load, seed, state, stats, wait_state
from test_device import query_qmp

from harness import migration
from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.session import Session
from harness.supervisor import Supervisor
from harness.vm import MIB, Tmem, Vm
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# A fifth of what the unit says: the test is to be short.
PERIOD_SECONDS = 2.0
# backend-timeout-ms's default: what a single operation may wait for a daemon that hangs.
BACKEND_TIMEOUT_SECONDS = 1.0
# What an operation takes besides, on a busy machine.
OWN_SECONDS = 3.0
HANGS = 3


@contextmanager
def supervised(daemon: Daemon) -> Iterator[Supervisor]:
    supervisor = Supervisor(daemon, scaled(PERIOD_SECONDS))
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


@pytest.mark.smoke
def test_hung_daemon_is_replaced(session: Session, kernel: Kernel, module: Path) -> None:
    """SIGSTOP under load: ended and started anew in its period, the guest caches again."""
    daemon = session.daemon("vm1", pool_size="128MiB")
    with supervised(daemon) as supervisor:
        vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=2)
        guest = vm.start()
        load(guest, "verify_every=0")
        load_of_files = "--ops=2000 --jobs=2 --files=16 --size-max=262144"
        torture = LastingTorture(guest, seed(), load_of_files)
        took = []
        for number in range(1, HANGS + 1):
            before = stats(guest)
            until(lambda: stats(guest)["hits"] > before["hits"], 60, "it hits")  # noqa: B023
            assert supervisor.kills == number - 1, "one that lives is left alone"
            daemon.pause()
            begun = time.monotonic()
            supervisor.wait_kills(number, 2 * PERIOD_SECONDS + OWN_SECONDS)
            took.append(time.monotonic() - begun)
        numbers = torture.finish(guest)
        print("until the next daemon serves, s:", took, numbers)
        assert max(took) < scaled(PERIOD_SECONDS + OWN_SECONDS)
        wait_state(guest, "on")
        before = stats(guest)
        assert before["mismatches"] == 0, state(guest)
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > before["hits"]
        vm.quit()


def pause(vm: Vm) -> None:
    vm.pause()
    vm.resume()


def reset(vm: Vm) -> None:
    vm.qmp.execute("system_reset")


def plug_memory(vm: Vm) -> None:
    backend = {"qom-type": "memory-backend-memfd", "id": "more", "size": 128 * MIB, "share": True}
    vm.qmp.execute("object-add", backend)
    vm.qmp.execute("device_add", {"driver": "pc-dimm", "id": "dimm", "memdev": "more"})


def save(vm: Vm) -> None:
    vm.pause()
    migration.save(vm, vm.folder / "state")
    vm.resume()


OPERATIONS = [pause, query_qmp, plug_memory, save, reset]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_host_side_operations_are_bounded(
    session: Session, kernel: Kernel, module: Path, operation: Callable[[Vm], None]
) -> None:
    """Each meets a daemon that has just stopped; none waits longer than for one answer."""
    daemon = session.daemon("vm1", pool_size="128MiB")
    with supervised(daemon) as supervisor:
        vm = driver_vm(
            session,
            kernel,
            module,
            Tmem(daemon.socket("vm1")),
            memory_bytes=192 * MIB,
            arguments=["-m", "slots=2,maxmem=1G"],
        )
        guest = vm.start()
        load(guest, "verify_every=0")
        daemon.pause()
        begun = time.monotonic()
        operation(vm)
        took = time.monotonic() - begun
        print(f"{operation.__name__}: {took:.2f} s")
        assert took < BACKEND_TIMEOUT_SECONDS + scaled(OWN_SECONDS)
        supervisor.wait_kills(1, 2 * PERIOD_SECONDS + OWN_SECONDS)
        if operation is reset:
            guest = vm.connect()
            load(guest, "verify_every=0")
        wait_state(guest, "on")
        before = stats(guest)["hits"]
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > before
        vm.quit()
