# SPDX-License-Identifier: Apache-2.0 OR MIT
"""QEMU and a guest without the driver survive each fault of the daemon.

The daemon is absent, killed, stopped or restarted while the guest boots, reboots, is reset, paused
and continued, is queried over QMP, reads the configuration, and uses the device from user space.
Each step is bounded, so that a hang is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from userdriver import PROGRAM, UserDriver, files, info

from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.qmp import QmpError
from harness.session import Session
from harness.vm import Config, Tmem, Vm

PAGE_SIZE = 4096
BATCH_MAX = 64
POOLS_MAX = 256
CONFIG_LENGTH = 32

VERSION_1 = 1 << 32
INDIRECT_DESC = 1 << 28
EVENT_IDX = 1 << 29
RETAIN = 1 << 2  # offered with the property retain=on only
# Feature bits that the device must not offer: reserved bits, and LOG_ALL, PROTOCOL_FEATURES,
# ACCESS_PLATFORM and RING_PACKED.
NEVER_OFFERED = 0b1011 | 1 << 26 | 1 << 30 | 1 << 33 | 1 << 34

pytestmark = pytest.mark.usefixtures("qemu")


def device_vm(
    session: Session, kernel: Kernel, daemon: Daemon, name: str = "vm1", **more: Any
) -> Vm:
    tmem = more.pop("tmem", None) or Tmem(daemon.socket(name), num_queues=2)
    return session.vm(Config(kernel, name=name, tmem=tmem, files=files(), **more))


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


def check_config(vm: Vm, queues: int = 2) -> int:
    """Checks that the guest can read all fields of the configuration. Returns the generation."""
    seen = info(vm)
    assert seen["page_size"] == PAGE_SIZE
    assert seen["num_request_queues"] == queues
    assert seen["batch_max"] == BATCH_MAX
    assert seen["pools_max"] == POOLS_MAX
    assert seen["config_length"] >= CONFIG_LENGTH
    assert seen["reserved"] == 0
    assert seen["queues"] == queues + 1
    assert seen["features"] & VERSION_1
    assert seen["features"] & INDIRECT_DESC
    assert seen["features"] & EVENT_IDX
    assert not seen["features"] & NEVER_OFFERED
    assert bool(seen["features"] & RETAIN) == (os.environ.get("TMEM_RETAIN") == "on")
    return seen["generation"]


def absent(daemon: Daemon) -> None:
    """Does nothing, for the case of a daemon that never ran."""


def killed(daemon: Daemon) -> None:
    daemon.kill()


def stopped(daemon: Daemon) -> None:
    daemon.pause()


def restarted(daemon: Daemon) -> None:
    daemon.restart()


TROUBLES = pytest.mark.parametrize("trouble", [killed, stopped, restarted])


def heal(daemon: Daemon) -> None:
    """Makes the daemon serve again, whether it is stopped, has ended or never ran."""
    process = daemon._process
    if process is None or not process.alive():
        daemon.start()
    else:
        daemon.resume()


@pytest.mark.usefixtures("host_programs")
def test_guest_and_qemu_work_without_a_daemon(session: Session, kernel: Kernel) -> None:
    daemon = session.daemon("vm1")
    vm = device_vm(session, kernel, daemon)
    vm.start()
    assert check_config(vm) == 0
    query_qmp(vm)
    driver = UserDriver(vm)
    assert driver.generation() == 0
    query_qmp(vm)
    vm.pause()
    query_qmp(vm)
    assert vm.status() == "paused"
    vm.resume()
    driver.end()
    vm.reset()
    assert check_config(vm) == 0
    vm.reboot()
    assert check_config(vm) == 0
    daemon.start()
    driver = UserDriver(vm)
    driver.stored()
    assert driver.keep() == "hit"
    vm.quit()


@pytest.mark.usefixtures("host_programs")
@TROUBLES
def test_running_device_survives_daemon_faults(
    session: Session, kernel: Kernel, trouble: Callable[[Daemon], None]
) -> None:
    """If the daemon fails while the device runs, QMP and the guest continue to work."""
    daemon = session.daemon("vm1")
    daemon.start()
    vm = device_vm(session, kernel, daemon)
    vm.start()
    driver = UserDriver(vm)
    first = driver.stored()
    assert driver.keep() == "hit"

    trouble(daemon)
    query_qmp(vm)
    vm.guest.sh("true")
    mark = driver.ask_keep()
    query_qmp(vm)
    vm.pause()
    query_qmp(vm)
    vm.resume()
    vm.guest.sh("true")

    heal(daemon)
    # All these answers are right: whether the page's generation continues depends on the fault.
    assert driver.wait("keep ", after=mark).split()[1] in ("hit", "miss", "stale")
    second = driver.stored(other_than=0 if trouble is stopped else first)
    if trouble is not stopped:
        assert second != first
    assert driver.keep() == "hit"
    driver.end()

    trouble(daemon)
    vm.reset()
    check_config(vm)
    query_qmp(vm)
    vm.reboot()
    check_config(vm)
    heal(daemon)
    driver = UserDriver(vm)
    assert driver.stored() not in (first, second)
    vm.quit()


@pytest.mark.usefixtures("host_programs")
@TROUBLES
def test_guest_boots_and_resets_during_daemon_faults(
    session: Session, kernel: Kernel, trouble: Callable[[Daemon], None]
) -> None:
    """The daemon fails before the VM starts, and again while the guest drives the device."""
    daemon = session.daemon("vm1")
    daemon.start()
    trouble(daemon)
    vm = device_vm(session, kernel, daemon)
    vm.start()
    check_config(vm)
    query_qmp(vm)
    heal(daemon)
    driver = UserDriver(vm)
    first = driver.stored()

    trouble(daemon)
    # The device is reset while it runs, so QEMU has to stop a backend that may not answer.
    vm.reset()
    check_config(vm)
    heal(daemon)
    driver = UserDriver(vm)
    assert driver.stored() != first
    assert driver.keep() == "hit"
    trouble(daemon)
    vm.quit()


@pytest.mark.smoke
@pytest.mark.usefixtures("host_programs")
def test_generation_changes_on_reset_and_new_daemon(session: Session, kernel: Kernel) -> None:
    """A pause keeps the generation and a stored page. A reset, reboot or new daemon ends both."""
    daemon = session.daemon("vm1")
    daemon.start()
    vm = device_vm(session, kernel, daemon)
    vm.start()
    seen = []
    driver = UserDriver(vm)
    seen.append(driver.stored())
    vm.pause()
    vm.resume()
    assert driver.keep() == "hit"
    assert driver.stored() == seen[0]
    assert info(vm)["generation"] == seen[0]

    driver.end()
    driver = UserDriver(vm)
    seen.append(driver.stored())
    vm.reset()
    driver = UserDriver(vm)
    seen.append(driver.stored())
    vm.reboot()
    driver = UserDriver(vm)
    seen.append(driver.stored())
    daemon.restart()
    seen.append(driver.stored(other_than=seen[-1]))
    assert driver.keep() == "hit"
    assert len(set(seen)) == len(seen), f"a generation occurs twice: {[hex(one) for one in seen]}"
    vm.quit()


@pytest.mark.usefixtures("host_programs")
def test_stopped_daemon_answers_after_it_continues(session: Session, kernel: Kernel) -> None:
    """A request that waits for a stopped daemon is answered when the daemon continues."""
    daemon = session.daemon("vm1")
    daemon.start()
    vm = device_vm(session, kernel, daemon)
    vm.start()
    driver = UserDriver(vm)
    generation = driver.stored()
    daemon.pause()
    mark = driver.ask_keep()
    driver.wait("unanswered", after=mark)
    assert check_config(vm) == generation
    daemon.resume()
    driver.wait("answered", after=mark)
    assert driver.wait("keep ", after=mark) == "keep hit"
    assert driver.stored() == generation
    vm.quit()


@pytest.mark.usefixtures("host_programs")
def test_second_vm_on_a_socket_is_refused(session: Session, kernel: Kernel) -> None:
    """If two VMs use one socket, the second gets no cache, and the first keeps its stored page."""
    daemon = session.daemon("vm1")
    daemon.start()
    first = device_vm(session, kernel, daemon)
    first.start()
    driver = UserDriver(first)
    generation = driver.stored()
    tmem = Tmem(daemon.socket("vm1"), num_queues=2)
    second = device_vm(session, kernel, daemon, name="vm2", tmem=tmem)
    second.start()
    intruder = UserDriver(second)
    assert intruder.generation() == 0
    assert driver.keep() == "hit"
    assert driver.stored() == generation
    # The socket is free again when the first VM has ended.
    first.quit()
    assert intruder.stored() not in (0, generation)
    second.quit()


@pytest.mark.usefixtures("host_programs")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_register_accesses_do_no_harm(session: Session, kernel: Kernel, seed: int) -> None:
    """A guest that misuses its registers harms neither QEMU nor the device after a reset."""
    daemon = session.daemon("vm1")
    daemon.start()
    vm = device_vm(session, kernel, daemon)
    vm.start()
    vm.guest.sh(f"{PROGRAM} fuzz {seed} 4000", seconds=120)
    query_qmp(vm)
    check_config(vm)
    driver = UserDriver(vm)
    driver.stored()
    assert driver.keep() == "hit"
    vm.quit()


def test_default_queue_count_follows_the_vcpus(session: Session, kernel: Kernel) -> None:
    """Without num-queues there is one queue per vCPU, up to four; queue-size has an effect."""
    daemon = session.daemon("vm1")
    tmem = Tmem(daemon.socket("vm1"), queue_size=64)
    vm = device_vm(session, kernel, daemon, tmem=tmem, cpus=3)
    vm.start()
    check_config(vm, queues=3)
    seen = info(vm)
    assert {seen[f"queue_size_{queue}"] for queue in range(4)} == {64}
    vm.quit()
