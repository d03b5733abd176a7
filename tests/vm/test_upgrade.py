# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Upgrades the daemon under running VMs: another program serves the same directories.

The old daemon gets SIGTERM, and the new one is started with the same sockets and VM store. The VMs
continue with a new generation, and their empty caches fill again.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from driver import LastingTorture, driver_vm, load, seed, stats, wait_state
from test_migration import check_no_mismatch, wait_until_grown

from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.paths import host_binary
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Names of two VMs: one of the daemon's configuration, and one that the test adds while the daemon
# runs, as libvirt's hook does.
FIXED, ADDED = "fixed", "added"
UUID = "7b2f0f6a-52a5-4dcd-8a7f-0f3d7f6b4f11"
RESERVE_BYTES = 4 << 20
LOAD = "--ops=1500 --jobs=1 --files=16 --size-max=262144"


def program(daemon: Daemon) -> Path:
    return Path(f"/proc/{daemon.process.pid}/exe").resolve()


def test_upgraded_daemon_serves_the_same_vms(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = session.daemon(FIXED, pool_size="128MiB")
    daemon.start()
    quota = {"reserve_bytes": RESERVE_BYTES, "limit_bytes": None, "weight": 100}
    socket = daemon.socket(ADDED)
    daemon.call("AddVm", vm={"uuid": UUID, "name": ADDED, "socket": str(socket), "quota": quota})
    guests, tortures = {}, {}
    for name in (FIXED, ADDED):
        vm = driver_vm(
            session,
            kernel,
            module,
            Tmem(daemon.socket(name)),
            name=name,
            memory_bytes=192 * MIB,
        )
        guests[name] = vm.start()
        load(guests[name], "verify_every=0")
        tortures[name] = LastingTorture(guests[name], seed(), LOAD)
    before = {}
    for name, guest in guests.items():
        wait_until_grown(guest, "hits", 10, f"{name} hits")
        before[name] = stats(guest)["generation_changes"]

    old = program(daemon)
    begun = time.monotonic()
    daemon.terminate()
    assert not socket.exists(), "the stopped daemon did not remove the VM's socket"
    # No earlier release exists yet, so the same program is started from another file.
    daemon.program = Path(shutil.copy(host_binary("tmemd"), session.directory / "tmemd-new"))
    daemon.start()
    assert old != program(daemon) == daemon.program
    vms = {vm["name"]: vm for vm in daemon.list()["vms"]}
    assert set(vms) == {FIXED, ADDED}, (
        "the new daemon does not serve exactly the configured and the added VM"
    )
    assert vms[ADDED]["quota"]["reserve_bytes"] == RESERVE_BYTES
    until(
        lambda: all(vm["connected"] for vm in daemon.list()["vms"]),
        60,
        "QEMU of both VMs has connected",
    )
    print(f"{time.monotonic() - begun:.2f} s until both are connected again")
    for name, guest in guests.items():
        wait_state(guest, "on")
        wait_until_grown(guest, "puts_stored", 10, f"{name}'s cache fills again")
        wait_until_grown(guest, "hits", 10, f"{name} hits again")
        assert stats(guest)["generation_changes"] > before[name]
        tortures[name].finish(guest)
        check_no_mismatch(guest)
