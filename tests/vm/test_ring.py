# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The put rings: slots are shared by the queues, and no put waits for another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import checksums, driver_vm, load, settle, stats
from test_driver import start_daemon

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("qemu", "host_programs")]

QUEUES = 4
CHUNK = "/mnt/chunk"
CHUNK_PAGES = 256  # these go to one queue


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


def test_a_lone_put_is_sent(session: Session, kernel: Kernel, module: Path) -> None:
    """At once when nothing is under way, else with the next answer; nothing follows it."""
    daemon = start_daemon(session)
    guest = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1"))).start()
    load(guest, "verify_every=0")
    guest.sh("dd if=/dev/urandom of=/mnt/a bs=4096 count=2; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    guest.sh("cat /mnt/a >/dev/null")
    before = settle(guest)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] >= 2

    guest.sh("cat /mnt/a >/dev/null")
    before = settle(guest)
    daemon.pause()
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    until(lambda: stats(guest)["requests_put"] > before["requests_put"], 10, "the first is sent")
    guest.sh("dd if=/dev/urandom of=/mnt/d bs=4096 count=2; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    waiting = stats(guest)
    assert waiting["puts"] - before["puts"] >= 4
    assert waiting["puts_stored"] == before["puts_stored"]
    daemon.resume()
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] == after["puts"] - before["puts"]
