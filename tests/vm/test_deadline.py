# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What a reader waits for a host that does not answer: one deadline, however many requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    checksums,
    driver_vm,
    evict,
    load,
    set_parameter,
    settle,
    stats,
    wait_state,
)
from test_driver import start_daemon

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("qemu", "host_programs")]

PAGES = 32  # of one readahead
FILE = "/mnt/striped"
FILLER = "/mnt/filler"


def test_one_deadline_per_readahead(session: Session, kernel: Kernel, test_module: Path) -> None:
    """Every second page is held, so that one readahead needs many requests."""
    daemon = start_daemon(session)
    guest = driver_vm(session, kernel, test_module, Tmem(daemon.socket("vm1"))).start()
    load(guest, "verify_every=0")
    guest.sh("echo 128 >/sys/block/vda/queue/read_ahead_kb")
    guest.sh(f"dd if=/dev/urandom of={FILE} bs=4096 count={PAGES}; sync")
    sums = checksums(guest, [FILE])
    assert evict(guest, [FILE])["index_pages"] >= PAGES
    # Out of the put ring, where it would be had without the host.
    guest.sh(f"dd if=/dev/urandom of={FILLER} bs=1M count=16; sync")
    evict(guest, [FILLER])

    # Pages made dirty are no longer held, and their next put is dropped.
    guest.sh(f"dd if={FILE} of=/tmp/copy bs=4096 iflag=direct")
    for page in range(0, PAGES, 2):
        where = f"bs=4096 count=1 skip={page} seek={page}"
        guest.sh(f"dd if=/tmp/copy of={FILE} conv=notrunc {where}")
    set_parameter(guest, "inject_ring_full", "1")
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    set_parameter(guest, "inject_ring_full", "0")
    before = settle(guest)
    assert before["index_pages"] >= PAGES // 2

    daemon.pause()
    guest.sh(f"dd if={FILE} of=/dev/null bs=128k count=1")
    after = stats(guest)
    assert after["late"] - before["late"] == 1
    assert after["misses_late"] - before["misses_late"] == PAGES // 2
    assert after["trips"] == before["trips"]
    assert checksums(guest, [FILE]) == sums
    daemon.resume()
    wait_state(guest, "on")
