# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Fixtures that several VM tests share: `pytest_plugins = ["shared_fixtures"]` in a test module.

pytest has a plugin "fixtures" of its own, so this module has another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from driver import driver_vm, load, start_daemon
from test_driver import tree_disk

from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem, Vm


@dataclass
class Tree:
    """A guest whose driver serves a disk with a tree of files, and the sha256 of each file."""

    daemon: Daemon
    vm: Vm
    guest: Guest
    sums: dict[str, str]


@pytest.fixture
def tree(session: Session, kernel: Kernel, module: Path) -> Tree:
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0")
    return Tree(daemon, vm, guest, sums)
