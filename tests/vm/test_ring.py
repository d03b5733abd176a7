# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The put rings: slots are shared by the queues, and no put waits for another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import checksums, driver_vm, load, settle, stats
from test_driver import start_daemon

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("qemu", "host_programs")]

QUEUES = 4
CHUNK = "/mnt/chunk"
CHUNK_PAGES = 256  # these go to one queue
BATCH_PAGES = 64


def test_slots_are_shared(session: Session, kernel: Kernel, module: Path) -> None:
    """One queue takes more than its part of the slots, while nothing is answered."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=QUEUES)
    guest = driver_vm(session, kernel, module, tmem, memory_bytes=256 * MIB).start()
    load(guest, "verify_every=0")
    guest.sh(f"dd if=/dev/urandom of={CHUNK} bs=4096 count={CHUNK_PAGES}; sync")
    sums = checksums(guest, [CHUNK])
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    guest.sh(f"cat {CHUNK} >/dev/null")
    before = settle(guest)
    daemon.pause()
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    after = stats(guest)
    daemon.resume()
    assert after["puts"] - before["puts"] >= CHUNK_PAGES
    assert after["puts_dropped_ring_full"] == before["puts_dropped_ring_full"]
    settle(guest)
    # All of them come back, also those that have other pages' blocks as neighbours.
    assert checksums(guest, [CHUNK]) == sums
    assert stats(guest)["hits"] - after["hits"] >= CHUNK_PAGES
    assert stats(guest)["mismatches"] == 0


def wait_requests(guest: Guest, number: int) -> None:
    until(lambda: stats(guest)["requests_put"] >= number, 10, f"{number} requests of puts")


def test_puts_do_not_wait(session: Session, kernel: Kernel, module: Path) -> None:
    """Puts that fill no batch are sent after a while, whether the host is idle or not."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=1)
    guest = driver_vm(session, kernel, module, tmem).start()
    load(guest, "verify_every=0")
    guest.sh("dd if=/dev/urandom of=/mnt/0 bs=4096 count=2 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)

    # Nothing follows the last one, which would take it along.
    guest.sh("cat /mnt/0 >/dev/null")
    before = settle(guest)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] >= 2

    # The host answers nothing.
    before = after
    daemon.pause()
    for number in (1, 2):
        guest.sh(f"dd if=/dev/urandom of=/mnt/{number} bs=4096 count=2 2>/dev/null; sync")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        wait_requests(guest, before["requests_put"] + number)
    waiting = stats(guest)
    assert 4 <= waiting["puts"] - before["puts"] < BATCH_PAGES
    assert waiting["puts_stored"] == before["puts_stored"]
    daemon.resume()
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] == after["puts"] - before["puts"]
