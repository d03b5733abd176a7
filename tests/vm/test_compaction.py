# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Pages that compaction has moved to other page frames are put when they are evicted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from driver import WHERE, checksums, driver_guest, growth, set_parameter, stats

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

FILE = f"{WHERE}/file"
OTHER = f"{WHERE}/other"
FILE_BYTES = 40 * MIB
PAGES = FILE_BYTES // 4096
# Compaction moves at least this many pages into the holes that the other file leaves.
MOVED_MIN = 1000


def moved_pages(guest: Guest) -> int:
    """Returns the number of pages that the guest has moved to other page frames."""
    lines = dict(line.split() for line in guest.read("/proc/vmstat").splitlines())
    return int(lines["pgmigrate_success"])


def evict_moved(guest: Guest) -> Counter[str]:
    """Makes the file, moves its pages, and evicts them. Returns the growth of the counters."""
    # tee writes the two files in turns, so that the free pages of one lie between the other's.
    guest.sh(f"head -c {FILE_BYTES} /dev/urandom | tee {FILE} >{OTHER}; sync; rm {OTHER}", 240)
    before = moved_pages(guest)
    guest.sh("echo 1 >/proc/sys/vm/compact_memory", 120)
    assert moved_pages(guest) - before > MOVED_MIN
    evicted = stats(guest)
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches", 60)
    return growth(evicted, stats(guest))


def test_moved_pages_are_put(session: Session, kernel: Kernel, test_module: Path) -> None:
    """The control leaves out the hook of page migration."""
    guest = driver_guest(session, kernel, test_module, parameters="verify_every=1")
    grown = evict_moved(guest)
    print(grown)
    assert grown["blocks_puts_equal"] > PAGES * 0.99
    assert checksums(guest, [FILE]) == checksums(guest, [FILE])

    set_parameter(guest, "test_hooks_off", "migrate")
    grown = evict_moved(guest)
    print(grown)
    assert grown["blocks_puts_equal"] < PAGES - MOVED_MIN / 2
