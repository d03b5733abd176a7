# SPDX-License-Identifier: Apache-2.0 OR MIT
"""kswapd waits for the host while the put ring fills up, and only for a bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    PATIENT,
    WHERE,
    driver_vm,
    growth,
    load,
    set_parameter,
    settle,
    start_daemon,
    stats,
)

from harness import disk, module
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

RAM_BYTES = 192 * MIB
FILE_MIB = 320  # more than the RAM, so that kswapd evicts while the file is read
FILE = f"{WHERE}/file"
PATCH = "/patch.ko"
SPARSE_MIB = 400  # more than the RAM of any guest of these tests
# Longest wait of kswapd (PACE_US_MAX), and budget of all its waits (PACE_SHARE, PACE_BURST_US).
WAIT_SECONDS = 0.002
WAIT_SHARE = 4
WAIT_BURST_SECONDS = 0.020
# While the host takes no page, the pauses between waits of kswapd grow to this (PACE_PAUSE_MAX_MS).
PAUSE_SECONDS = 1.0
GROWING_PAUSES = 8  # pauses of 8 ms, 16 ms and so on that are shorter than PAUSE_SECONDS


def start(session: Session, kernel: Kernel, ko: Path, socket: Path) -> Guest:
    """Starts a guest that has more data on its disk than RAM."""
    tree = session.directory / "tree"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for number in range(FILE_MIB * 256):
            file.write(number.to_bytes(8, "little") * 512)
    image = disk.ext4(session.directory / "data.img", (FILE_MIB + 64) * MIB, tree)
    vm = driver_vm(
        session,
        kernel,
        ko,
        Tmem(socket),
        memory_bytes=RAM_BYTES,
        disks=[Disk("data", image)],
        files={PATCH: module.build_patch(kernel)},
    )
    guest = vm.start()
    load(guest, f"verify_every=0 {PATIENT}")
    return guest


def seconds(guest: Guest) -> float:
    """Returns the guest's time since its start."""
    return float(guest.read("/proc/uptime").split()[0])


def check_waits_for_silent_host(guest: Guest, daemon: Daemon) -> None:
    """Checks that kswapd waits for a host that takes no page, if the hook `reclaim` is on."""
    guest.sh(f"truncate -s {SPARSE_MIB}M {WHERE}/sparse")
    daemon.pause()
    waits = []
    for hooks_off in ("reclaim", ""):
        set_parameter(guest, "test_hooks_off", hooks_off)
        before = stats(guest)
        guest.sh(f"cat {WHERE}/sparse >/dev/null", 120)
        after = stats(guest)
        assert after["puts_dropped_ring_full"] > before["puts_dropped_ring_full"]
        waits.append(after["pace_waits"] - before["pace_waits"])
    daemon.resume()
    assert waits[0] == 0 and waits[1] > 0, waits


def test_kswapd_waits_while_the_ring_fills_up(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """kswapd waits for the host while it evicts, unless the hook `reclaim` is off."""
    daemon = start_daemon(session)
    guest = start(session, kernel, test_module, daemon.socket("vm1"))
    waits = []
    for hooks_off in ("reclaim", ""):
        set_parameter(guest, "test_hooks_off", hooks_off)
        before, began = settle(guest), seconds(guest)
        guest.sh(f"cat {FILE} >/dev/null", 120)
        after, ended = settle(guest), seconds(guest)
        print(ended - began, growth(before, after))
        timeouts = after["pace_timeouts"] - before["pace_timeouts"]
        budget = (ended - began) / WAIT_SHARE + WAIT_BURST_SECONDS + WAIT_SECONDS
        assert timeouts * WAIT_SECONDS <= budget
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


def test_kswapd_does_not_wait_where_it_may_hold_locks(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """kswapd does not wait in a call of try_to_unmap_flush() that reclaim itself did not make."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    daemon.pause()
    # drop_caches fills the put ring without kswapd, so kswapd would wait at its next chance.
    guest.sh(f"dd if={FILE} of=/dev/null bs=1M count=32 2>/dev/null")
    guest.drop_caches()
    before = stats(guest)
    assert before["puts_dropped_ring_full"] > 0
    guest.insmod(PATCH, "flush=1")
    assert stats(guest)["pace_waits"] == before["pace_waits"]
    daemon.resume()
