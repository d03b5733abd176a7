# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver stays off on a kernel that does not call a hook.

A module that was built for tests can hide the calls of a hook from the self-test at load, as if the
kernel did not make them. The cache must then be off, with a reason that names the hook, and all
bytes must be right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import MODULE, checksums, driver_vm, load, start_daemon, state, stats
from test_driver import tree_disk

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Parameter of the module that hides a hook, and a text that the driver's state must then contain.
BLIND = [
    ("test_hooks_off=selftest", "a function was not redirected"),
    ("test_selftest_blind=dirty", "writeback_dirty_folio"),
    ("test_selftest_blind=removed", "mm_filemap_delete_from_page_cache"),
    ("test_selftest_blind=free", "folios that are freed"),
    ("test_selftest_blind=unmount", "generic_shutdown_super"),
]


@pytest.mark.smoke
def test_self_test_detects_each_missing_hook(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(
        session,
        kernel,
        test_module,
        Tmem(daemon.socket("vm1")),
        disks=[data],
        tcg_threads="single",
    )
    guest = vm.start()
    load(guest, BLIND[0][0], online=False)
    for parameter, words in BLIND:
        if parameter != BLIND[0][0]:
            guest.sh("rmmod virtio_tmem", 60)
            guest.insmod(MODULE, parameter)
        found = state(guest)
        assert found.startswith("off: self-test: "), (parameter, found)
        assert words in found, (parameter, found)
        for _ in range(2):
            guest.drop_caches()
            first = dict(list(sums.items())[:2])
            assert checksums(guest, list(first)) == first
        counters = stats(guest)
        assert counters["puts"] + counters["hits"] == 0
    # Without a parameter that hides a hook, the module passes the self-test on the same kernel.
    guest.sh("rmmod virtio_tmem", 60)
    guest.sh("umount /mnt")
    load(guest, "verify_every=0")
