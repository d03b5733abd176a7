# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The harness reports the guest's state correctly, and misses no fault of a guest or of QEMU."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable

import pytest

from harness import disk
from harness.guest import CommandFailed, Guest, GuestTimeout
from harness.kernel import Kernel
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Config, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu")


def test_guest_agent_runs_commands_and_transfers_files(session: Session, kernel: Kernel) -> None:
    guest = session.vm(Config(kernel)).start()
    result = guest.run("echo out; echo err >&2; exit 3")
    assert (result.status, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert guest.run("kill -9 $$").status == -9
    with pytest.raises(CommandFailed, match="ended with status 7"):
        guest.sh("exit 7")
    with pytest.raises(GuestTimeout, match="before"):
        guest.run("echo before; sleep 1000", seconds=1)
    # A command ends with its shell, even if a background process keeps the output open.
    assert guest.sh("sleep 1000 & echo started") == "started\n"

    content = random.Random(1).randbytes(700_001)
    guest.put("/tmp/file", content, mode=0o640)
    assert guest.sh("sha256sum </tmp/file").split()[0] == hashlib.sha256(content).hexdigest()
    assert guest.sh("stat -c %a /tmp/file") == "640\n"
    assert guest.get("/tmp/file") == content
    assert guest.run("cat /tmp/file").stdout == content
    guest.put("/tmp/file", b"")
    assert guest.get("/tmp/file") == b""
    with pytest.raises(CommandFailed, match="No such file"):
        guest.get("/absent")


def wait_until_idle(guest: Guest, vm: Vm) -> tuple[int, int]:
    """Waits until the disk is idle; returns sectors read (guest) and bytes read (QEMU)."""
    last = (-1, -1)

    def same() -> tuple[int, int] | None:
        nonlocal last
        was, last = last, (guest.disk_stat("data").read_sectors, vm.block_stat("data")["rd_bytes"])
        return last if was == last else None

    return until(same, 60, "the disk's counters stop changing")


def test_disks_have_the_given_contents_and_throttling(session: Session, kernel: Kernel) -> None:
    tree = session.directory / "tree"
    tree.mkdir()
    content = os.urandom(8 * MIB)
    (tree / "file").write_bytes(content)
    image = disk.ext4(session.directory / "data.img", 64 * MIB, tree)
    spare = disk.blank(session.directory / "spare.img", 16 * MIB)
    disks = [
        disk.Disk("spare", spare, read_only=True),
        disk.Disk("data", image, throttle=disk.CLOUD_VOLUME),
    ]
    vm = session.vm(Config(kernel, disks=disks))
    guest = vm.start()
    guest.mount("data", "/mnt")
    before, before_qemu = wait_until_idle(guest, vm)
    digest = guest.sh("sha256sum /mnt/file").split()[0]
    assert digest == hashlib.sha256(content).hexdigest()
    read, read_qemu = wait_until_idle(guest, vm)
    assert (read - before) * 512 >= len(content)
    assert read_qemu - before_qemu == (read - before) * 512
    guest.sh("sha256sum /mnt/file")
    # The second read finds the file in the page cache. The file system may have read a few blocks
    # of its metadata.
    again, again_qemu = wait_until_idle(guest, vm)
    assert (again - read) * 512 < len(content) // 100
    assert again_qemu - read_qemu == (again - read) * 512
    guest.drop_caches()
    guest.sh("sha256sum /mnt/file")
    assert guest.disk_stat("data").read_sectors - before >= 2 * len(content) // 512
    assert guest.disk_stat("spare").write_sectors == 0
    with pytest.raises(HarnessError, match="no disk 'other'"):
        guest.disk("other")


def test_guest_panic_is_reported(
    session: Session, kernel: Kernel, expect_error: Callable[[Callable[[], object]], str]
) -> None:
    vm = session.vm(Config(kernel))
    guest = vm.start()
    guest.sh("echo 1 >/proc/sys/kernel/sysrq")
    with pytest.raises(HarnessError, match="sysrq triggered crash"):
        guest.run("echo c >/proc/sysrq-trigger", seconds=600)
    assert "sysrq triggered crash" in expect_error(vm.check_console)
    assert "sysrq triggered crash" in session.report()
    vm.expect_trouble()
    vm.check_console()


def test_a_dead_qemu_is_reported(
    session: Session, kernel: Kernel, expect_error: Callable[[Callable[[], object]], str]
) -> None:
    vm = session.vm(Config(kernel, arguments=["-device", "no-such-device"]))
    message = expect_error(vm.start)
    assert "no-such-device" in message
    assert "status 1" in message


def test_a_qemu_that_aborts_at_boot_is_reported(
    session: Session, kernel: Kernel, expect_error: Callable[[Callable[[], object]], str]
) -> None:
    vm = session.vm(Config(kernel))
    vm.launch()
    vm.pause()
    # The signal ends QEMU before the channel to the agent exists, or while connect() waits for the
    # agent's answer.
    threading.Timer(0.5, vm.process.signal, [signal.SIGABRT]).start()
    assert "ended with status -6" in expect_error(vm.connect)
