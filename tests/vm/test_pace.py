# SPDX-License-Identifier: Apache-2.0 OR MIT
"""kswapd waits for the host while the put ring fills up, and only for a bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import PATIENT, driver_vm, growth, load, set_parameter, settle, start_daemon, stats

from harness import disk
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("qemu", "host_programs")]

RAM_BYTES = 192 * MIB
FILE_MIB = 320  # more than the RAM, so that kswapd evicts while the file is read
FILE = "/mnt/file"
# While the host takes no page, the pauses between waits of kswapd grow to this (PACE_PAUSE_MAX).
PAUSE_SECONDS = 1.0
GROWING_PAUSES = 8  # pauses of 8 ms, 16 ms and so on that are shorter than PAUSE_SECONDS


def start(session: Session, kernel: Kernel, module: Path, socket: Path) -> Guest:
    """Starts a guest that has more data on its disk than RAM."""
    tree = session.directory / "tree"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for number in range(FILE_MIB * 256):
            file.write(number.to_bytes(8, "little") * 512)
    image = disk.ext4(session.directory / "data.img", (FILE_MIB + 64) * MIB, tree)
    vm = driver_vm(
        session, kernel, module, Tmem(socket), memory_bytes=RAM_BYTES, disks=[Disk("data", image)]
    )
    guest = vm.start()
    load(guest, f"verify_every=0 {PATIENT}")
    return guest


def seconds(guest: Guest) -> float:
    """Returns the guest's time since its start."""
    return float(guest.read("/proc/uptime").split()[0])


def test_kswapd_waits_while_the_ring_fills_up(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """kswapd waits for the host while it evicts, and does not without the hook `reclaim`."""
    daemon = start_daemon(session)
    guest = start(session, kernel, test_module, daemon.socket("vm1"))
    waits = []
    for hooks_off in ("reclaim", ""):
        set_parameter(guest, "test_hooks_off", hooks_off)
        before = settle(guest)
        guest.sh(f"cat {FILE} >/dev/null", 120)
        after = settle(guest)
        print(growth(before, after))
        waits.append(after["pace_waits"] - before["pace_waits"])
    assert waits[0] == 0 and waits[1] > 0


def test_a_silent_host_soon_delays_kswapd_only_once_a_second(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While the host takes no page, the pauses between waits of kswapd grow to a second."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    daemon.pause()
    before, began = stats(guest), seconds(guest)
    guest.sh(f"cat {FILE} >/dev/null", 120)
    after, ended = stats(guest), seconds(guest)
    daemon.resume()
    print(ended - began, growth(before, after))
    assert after["puts_dropped_ring_full"] > before["puts_dropped_ring_full"]
    waits = after["pace_waits"] - before["pace_waits"]
    assert 1 <= waits <= 1 + GROWING_PAUSES + (ended - began) / PAUSE_SECONDS
    assert after["pace_timeouts"] - before["pace_timeouts"] == waits
