# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A daemon that hangs is replaced after the watchdog's period, and no operation waits longer.

harness.supervisor takes the place of systemd. tmemd/tests/watchdog.rs tests which of the daemon's
threads count as hung.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driver import LastingTorture, Torture, driver_vm, load, seed, state, stats, wait_state
from test_memory_slots import ACPI_CHECK, guest_is_done

from harness import migration
from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.qmp import QmpError
from harness.session import Session
from harness.supervisor import Supervisor
from harness.vm import MIB, Tmem, Vm
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Watchdog's period in the test, a fifth of the unit's value, so that the test is short.
PERIOD_SECONDS = 2.0
# The default of backend-timeout-ms: the longest wait of one operation for a daemon that hangs.
BACKEND_TIMEOUT_SECONDS = 1.0
# Additional time of an operation on a busy machine.
OWN_SECONDS = 3.0
# Longest time that a guest takes to release a device that is unplugged.
GUEST_SECONDS = 30.0
HANGS = 3


def query_qmp(vm: Vm) -> None:
    """Sends all QMP queries of a virtio device; QEMU must answer each, even if with an error."""
    devices = {entry["name"]: entry["path"] for entry in vm.qmp.execute("x-query-virtio")}
    assert "virtio-tmem" in devices, devices
    path = devices["virtio-tmem"]
    status = vm.qmp.execute("x-query-virtio-status", {"path": path})
    assert status["device-id"] == 63
    for queue in range(status["num-vqs"]):
        place = {"path": path, "queue": queue}
        vm.qmp.execute("x-query-virtio-queue-status", place)
        for command in ("x-query-virtio-vhost-queue-status", "x-query-virtio-queue-element"):
            try:
                vm.qmp.execute(command, place)
            except QmpError:
                pass  # QEMU answers with an error if the guest has not started the device
    vm.qmp.human("info qtree")
    vm.qmp.human("info virtio")


@contextmanager
def supervise(daemon: Daemon) -> Iterator[Supervisor]:
    supervisor = Supervisor(daemon, scaled(PERIOD_SECONDS))
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def test_hung_daemon_is_replaced(session: Session, kernel: Kernel, module: Path) -> None:
    """A daemon stopped under load is replaced within its period, and the guest caches again."""
    daemon = session.daemon("vm1", pool_size="128MiB")
    with supervise(daemon) as supervisor:
        vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=2)
        guest = vm.start()
        load(guest, "verify_every=0")
        load_of_files = "--ops=2000 --jobs=2 --files=16 --size-max=262144"
        torture = LastingTorture(guest, seed(), load_of_files)
        took = []
        for number in range(1, HANGS + 1):
            before = stats(guest)
            until(lambda: stats(guest)["hits"] > before["hits"], 60, "the driver gets hits")  # noqa: B023
            assert supervisor.kills == number - 1, (
                "the supervisor killed a daemon that was not hung"
            )
            daemon.pause()
            begun = time.monotonic()
            supervisor.wait_kills(number, 2 * PERIOD_SECONDS + OWN_SECONDS)
            took.append(time.monotonic() - begun)
        numbers = torture.finish(guest)
        print("seconds until the next daemon serves, and counters:", took, numbers)
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


def unplug_memory(vm: Vm) -> None:
    mark = vm.qmp.events_seen()
    vm.qmp.execute("device_del", {"id": "dimm"})
    vm.qmp.wait_event("DEVICE_DELETED", scaled(GUEST_SECONDS), mark)


def unplug_device(vm: Vm) -> None:
    """Unplugs the device, as `tmemctl detach` makes libvirt do it."""
    mark = vm.qmp.events_seen()
    vm.qmp.execute("device_del", {"id": "tmem0"})
    vm.qmp.wait_event("DEVICE_DELETED", scaled(GUEST_SECONDS), mark)


def save(vm: Vm) -> None:
    vm.pause()
    migration.save(vm, vm.directory / "state")
    vm.resume()


OPERATIONS = [pause, query_qmp, plug_memory, unplug_memory, unplug_device, save, reset]


def prepare(vm: Vm, operation: Callable[[Vm], None]) -> None:
    """Prepares the VM for the operation: plugs the memory that unplug_memory() will unplug."""
    if operation is unplug_memory:
        vm.guest.sh("echo online_movable >/sys/devices/system/memory/auto_online_blocks")
        plug_memory(vm)
        until(
            lambda: guest_is_done(vm, ACPI_CHECK),
            GUEST_SECONDS,
            "the guest uses the plugged memory",
        )


def undo(vm: Vm, operation: Callable[[Vm], None]) -> None:
    """Reverts the effect of the operation on the VM, so that the guest caches again."""
    if operation is reset:
        load(vm.connect(), "verify_every=0")
    if operation is unplug_device:
        device = {"driver": "vhost-user-tmem-pci", "id": "tmem0", "chardev": "tmem"}

        def plugged() -> bool:
            try:
                vm.qmp.execute("device_add", device)
            except QmpError as error:
                # The removed device keeps its chardev for a moment after the unplug event, so
                # retry.
                assert "in use" in str(error), error
                return False
            return True

        until(plugged, GUEST_SECONDS, "the device is plugged again")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_waits_at_most_one_timeout_for_a_hung_daemon(
    session: Session, kernel: Kernel, module: Path, operation: Callable[[Vm], None]
) -> None:
    """An operation on a VM whose daemon has just hung waits for one time-out at most."""
    daemon = session.daemon("vm1", pool_size="128MiB")
    with supervise(daemon) as supervisor:
        vm = driver_vm(
            session,
            kernel,
            module,
            Tmem(daemon.socket("vm1")),
            memory_bytes=192 * MIB,
            # Devices in q35's own slots cannot be unplugged.
            machine="pc" if operation is unplug_device else "q35",
            arguments=["-m", "slots=2,maxmem=1G"],
        )
        guest = vm.start()
        load(guest, "verify_every=0")
        prepare(vm, operation)
        daemon.pause()
        begun = time.monotonic()
        operation(vm)
        took = time.monotonic() - begun
        print(f"{operation.__name__}: {took:.2f} s")
        assert took < BACKEND_TIMEOUT_SECONDS + scaled(OWN_SECONDS)
        supervisor.wait_kills(1, 2 * PERIOD_SECONDS + OWN_SECONDS)
        undo(vm, operation)
        guest = vm.guest
        wait_state(guest, "on")
        before = stats(guest)["hits"]
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > before
        vm.quit()


def test_hung_daemon_delays_the_end_of_a_migration_only_up_to_a_bound(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """At the end of a migration, a hung daemon delays the stop of the device only up to a bound."""
    here, there = session.daemon("vm1", pool_size="128MiB"), session.daemon("vm1")
    there.start()
    with supervise(here) as supervisor:
        tmem = Tmem(here.socket("vm1"))
        vm = driver_vm(session, kernel, module, tmem, memory_bytes=192 * MIB)
        load(vm.start(), "verify_every=0")
        target = migration.launch_receiver(session, vm, Tmem(there.socket("vm1")))
        migration.begin(vm, target, bytes_per_second=migration.SLOW_BYTES_PER_SECOND)
        migration.wait_until_half_done(vm)
        here.pause()
        begun = time.monotonic()
        migration.set_speed(vm, migration.UNLIMITED)
        downtime = int(migration.wait(vm, "completed")["downtime"]) / 1000
        print(
            f"the migration ended after {time.monotonic() - begun:.2f} s,"
            f" with {downtime:.2f} s of downtime"
        )
        assert downtime < BACKEND_TIMEOUT_SECONDS + scaled(OWN_SECONDS)
        migration.complete(vm, target)
        guest = target.guest
        wait_state(guest, "on")
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > 0
        supervisor.wait_kills(1, 2 * PERIOD_SECONDS + OWN_SECONDS)
