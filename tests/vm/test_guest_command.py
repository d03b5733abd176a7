# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The command tmem-guest and the driver's device: dropping trees, policies, and who may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from driver import (
    WHERE,
    checksums,
    driver_vm,
    evict,
    load,
    stats,
)
from test_driver import FILE_BYTES, start_daemon, tree_disk

from harness.guest import Guest, Result
from harness.kernel import Kernel
from harness.paths import ROOT, guest_program
from harness.session import Session
from harness.vm import Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

COMMAND = "/bin/tmem-guest"
PAGES = FILE_BYTES // 4096  # of a file
# Exit statuses.
SOME, USAGE, NO_DRIVER, NOT_SERVED, NOT_OWNER = 1, 2, 3, 4, 5


def command() -> dict[str, Path]:
    return {COMMAND: guest_program(ROOT / "guest-driver/tools/tmem-guest.c")}


def say(guest: Guest, arguments: str) -> dict[str, Any]:
    """Runs the command with --json; it must succeed."""
    answer = json.loads(guest.sh(f"{COMMAND} --json {arguments}", 120))
    assert isinstance(answer, dict)
    return answer


def refused(guest: Guest, arguments: str, status: int, *words: str) -> Result:
    """The command must end with that status and say these words."""
    done = guest.run(f"{COMMAND} {arguments}", 60)
    text = done.stderr.decode()
    assert done.status == status, f"{arguments}: {done.status}, {text}"
    for word in words:
        assert word in text, f"{arguments}: {text}"
    return done


def start(session: Session, kernel: Kernel, module: Path) -> tuple[Guest, dict[str, str]]:
    """A guest with files, the module loaded, and the command."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(
        session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data], files=command()
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    return guest, sums


def held(guest: Guest, path: str) -> int:
    return int(say(guest, f"policy {path}")["pool_pages"])


@pytest.mark.smoke
def test_status_and_stats(session: Session, kernel: Kernel, module: Path) -> None:
    vm = driver_vm(session, kernel, module, None, files=command())
    guest = vm.start()
    refused(guest, "status", NO_DRIVER, "not loaded", "modprobe")
    refused(guest, "stats --json", NO_DRIVER, "not loaded")
    refused(guest, "drop /", NO_DRIVER, "not loaded")
    refused(guest, "", USAGE, "usage:")
    refused(guest, "policy", USAGE, "usage: tmem-guest policy")
    refused(guest, "stats --watch=0", USAGE, "usage:")
    for name in ("status", "stats", "drop", "policy"):
        assert guest.sh(f"{COMMAND} {name} --help").startswith(f"usage: tmem-guest {name}")

    # Loaded, no device: it says what is wrong, and that it is.
    load(guest, online=False)
    done = guest.run(f"{COMMAND} status --json")
    assert done.status == NO_DRIVER
    answer = json.loads(done.stdout)
    assert (answer["state"], answer["reason"]) == ("off", "no device")
    assert int(answer["hooks"], 16) > 0
    assert answer["version"] == guest.read("/sys/module/virtio_tmem/version")
    assert "no device" in guest.run(f"{COMMAND} status").text
    assert say(guest, "stats") == stats(guest)

    # One object a line, until it is ended.
    job = guest.start(f"{COMMAND} stats --watch=0.1 --json | head -n 3", 60)
    lines = job.wait().check().text.splitlines()
    assert len(lines) == 3
    assert all(json.loads(line).keys() == stats(guest).keys() for line in lines)


@pytest.mark.smoke
def test_never_and_default(session: Session, kernel: Kernel, module: Path) -> None:
    guest, sums = start(session, kernel, module)
    path, other = list(sums)[:2]
    evict(guest, [path, other])
    assert held(guest, path) > PAGES * 9 // 10
    assert held(guest, other) > PAGES * 9 // 10

    # What is held goes, of this file only; what is evicted from now on is not put.
    assert say(guest, f"policy {path} never") == {
        "files": 1,
        "never": 1,
        "default": 0,
        "cached_pages": 0,
        "pool_pages": 0,
        "errors": 0,
    }
    assert held(guest, other) > PAGES * 9 // 10
    before = stats(guest)
    after = evict(guest, [path])
    assert after["puts_dropped_policy"] - before["puts_dropped_policy"] == PAGES
    assert held(guest, path) == 0

    # Also after its inode was evicted, and when drop_caches emptied the pool.
    guest.sh("sync && echo 3 >/proc/sys/vm/drop_caches && echo 2 >/proc/sys/vm/drop_caches", 60)
    before = stats(guest)
    after = evict(guest, [path])
    assert after["puts_dropped_policy"] - before["puts_dropped_policy"] == PAGES
    assert held(guest, path) == 0
    guest.sh("echo Y >/sys/module/virtio_tmem/parameters/drop_caches_flush")
    guest.sh("echo 3 >/proc/sys/vm/drop_caches", 60)
    guest.sh("echo N >/sys/module/virtio_tmem/parameters/drop_caches_flush")
    assert say(guest, f"policy {path}")["never"] == 1

    # Back to the default; its contents were right all the time.
    assert say(guest, f"policy {path} default")["never"] == 0
    assert checksums(guest, [path]) == {path: sums[path]}
    for _ in range(20):  # the emptied pool is made anew at the host in the background
        evict(guest, [path])
        if held(guest, path):
            break
    assert held(guest, path) > PAGES * 9 // 10
    assert checksums(guest, [path]) == {path: sums[path]}


@pytest.mark.smoke
def test_a_policy_ends_with_its_file(session: Session, kernel: Kernel, module: Path) -> None:
    guest, sums = start(session, kernel, module)
    kept = next(iter(sums))
    guest.sh(f"{COMMAND} policy {kept} never")
    # The number of a deleted inode is the next one's: it begins with the default.
    numbers = set()
    for turn in range(3):
        path = f"{WHERE}/again{turn}"
        guest.sh(f"dd if=/dev/zero of={path} bs=64k count=1 2>/dev/null && sync")
        numbers.add(guest.sh(f"stat -c %i {path}").strip())
        assert say(guest, f"policy {path}")["default"] == 1
        assert say(guest, f"policy {path} never")["never"] == 1
        guest.sh(f"rm {path} && sync")
    assert len(numbers) < 3, "no inode number was used again"
    # Recursive; a link is neither followed nor counted.
    guest.sh(f"mkdir -p {WHERE}/d/e && ln -s {kept} {WHERE}/d/link && mkfifo {WHERE}/d/fifo")
    guest.sh(f"for i in 1 2 3; do echo $i >{WHERE}/d/$i; echo $i >{WHERE}/d/e/$i; done; sync")
    answer = say(guest, f"policy {WHERE}/d never")
    assert (answer["files"], answer["never"], answer["errors"]) == (6, 6, 0)
    guest.sh(f"echo new >{WHERE}/d/new")
    answer = say(guest, f"policy {WHERE}/d")
    assert (answer["never"], answer["default"]) == (6, 1)
    # Not on disk: gone with the mount.
    guest.sh(f"umount {WHERE}")
    guest.mount("data", WHERE)
    assert say(guest, f"policy {WHERE}/d {kept}")["never"] == 0


@pytest.mark.smoke
def test_who_may_and_what_cannot_be(session: Session, kernel: Kernel, module: Path) -> None:
    guest, sums = start(session, kernel, module)
    mine, other = list(sums)[:2]
    guest.sh(f"mkdir /tmp/bin && cp {COMMAND} /tmp/bin/t && chmod 755 /tmp /tmp/bin /tmp/bin/t")
    guest.sh("mkdir -p /etc && echo user:x:1000:1000::/:/bin/sh >/etc/passwd")
    guest.sh(f"chown 1000 {mine} && chmod 644 {mine} {other}")

    def as_user(arguments: str) -> Result:
        return guest.run(f"su user -c '/tmp/bin/t {arguments}'")

    assert guest.sh("su user -c 'id -u'").strip() == "1000"
    evict(guest, [other])
    was = held(guest, other)
    assert was > PAGES * 9 // 10
    for arguments in (f"policy {other} never", f"policy {other}", f"drop {other}"):
        done = as_user(arguments)
        assert done.status == NOT_OWNER, done
        assert other in done.stderr.decode() and "owner" in done.stderr.decode()
    assert held(guest, other) == was
    assert json.loads(as_user(f"--json policy {mine} never").check().text)["never"] == 1
    as_user(f"drop {mine}").check()

    refused(guest, f"drop {WHERE}/absent", SOME, "absent", "No such file")
    guest.sh(f"ln -s {mine} {WHERE}/link")
    refused(guest, f"drop {WHERE}/link", SOME, f"{WHERE}/link", "symbolic link")
    guest.sh(f"mkfifo {WHERE}/fifo")
    refused(guest, f"policy {WHERE}/fifo", SOME, "neither a file nor a directory")
    guest.sh("echo x >/tmp/file")
    refused(guest, "policy /tmp/file never", NOT_SERVED, "/tmp/file", "does not serve")
    # A mount below is not entered.
    guest.sh(f"mkdir {WHERE}/below && mount -t tmpfs none {WHERE}/below")
    guest.sh(f"echo x >{WHERE}/below/file")
    answer = say(guest, f"drop {WHERE}")
    assert answer["errors"] == 0 and answer["files"] == len(sums)
