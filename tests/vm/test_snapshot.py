# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A guest whose memory is reverted must not find pages that it put after the snapshot."""

from __future__ import annotations

import pytest
from userdriver import UserDriver, files

from harness import qcow2
from harness.disk import Disk
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")


def create_snapshot_vm(session: Session, kernel: Kernel, tmem: Tmem) -> Vm:
    image = qcow2.create(session.directory / "state.qcow2", 64 * MIB)
    disks = [Disk("state", image, format="qcow2")]
    return session.vm(Config(kernel, tmem=tmem, files=files(), disks=disks, memory_bytes=192 * MIB))


@pytest.mark.smoke
def test_loadvm_ends_the_generation(session: Session, kernel: Kernel) -> None:
    daemon = session.daemon("vm1")
    daemon.start()
    vm = create_snapshot_vm(session, kernel, Tmem(daemon.socket("vm1"), num_queues=1))
    vm.start()
    driver = UserDriver(vm)
    first = driver.wait_until_stored()
    vm.save("one")
    assert driver.wait_until_stored() == first
    assert driver.keep() == "hit", "the stored page was lost during savevm"
    vm.load("one")
    second = driver.wait_until_stored(other_than=first)
    assert driver.keep() == "hit"
    vm.load("one")
    assert driver.wait_until_stored(other_than=first) != second
    vm.quit()


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_savevm_and_loadvm_work_without_the_daemon(
    session: Session, kernel: Kernel, stopped: bool
) -> None:
    """savevm and loadvm work without the daemon, and the guest learns that its pages are gone."""
    daemon = session.daemon("vm1")
    daemon.start()
    vm = create_snapshot_vm(session, kernel, Tmem(daemon.socket("vm1"), num_queues=1))
    vm.start()
    driver = UserDriver(vm)
    first = driver.wait_until_stored()
    vm.save("with")
    if stopped:
        daemon.pause()
    else:
        daemon.kill()
    vm.save("without")
    vm.load("with")
    driver.wait("generation 0x0000000000000000")
    vm.load("without")
    if stopped:
        daemon.resume()
    else:
        daemon.start()
    second = driver.wait_until_stored(other_than=first)
    assert driver.keep() == "hit"
    vm.load("with")
    assert driver.wait_until_stored(other_than=first) != second
    vm.quit()
