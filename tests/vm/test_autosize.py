# SPDX-License-Identifier: Apache-2.0 OR MIT
"""`tmem-guest autosize` returns page cache to the host, keeps it in the pool, and knows its limits.

The control law has tests in guest-driver/tests/autosize_test.c. Here it runs with short times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from driver import WHERE, checksums, driver_vm, growth, load, programs, settle, stats, wait_state
from test_guest_command import COMMAND, NO_DRIVER, SOME, UNSUPPORTED, USAGE, command, expect_failure
from test_reporting import BALLOON, ORDER, REPORTED_SECONDS, allocated_bytes

from harness import disk
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

RAM_BYTES = 512 * MIB
FILE, FILE_MIB = f"{WHERE}/file", 240
FILE_PAGES = FILE_MIB * 256
FLOOR_MIB = 32
METADATA_MIB = 40  # page cache of the disk itself, as metadata of file systems has it
RETURNED_MIB = 170  # less than FILE_MIB - FLOOR_MIB
CGROUPS = "/sys/fs/cgroup"
RECLAIM = "/bin/reclaim"
LOG, PID = "/tmp/autosize.log", "/tmp/autosize.pid"
# Every step is a large one, and the first pause is short.
SHORT = f"--boot=0 --idle=0 --pause=5 --floor={FLOOR_MIB}M"
CACHE_OFF = "the cache is not on (tmem-guest status shows the reason)"
NO_REPORTING = "the balloon device has no free page reporting, so the host takes no memory back"
SECONDS = 120.0  # longest time for the service to reach a state, on a loaded machine


def boot(
    session: Session, kernel: Kernel, module: Path, arguments: list[str]
) -> tuple[Daemon, Vm, Guest]:
    """Boots a guest whose page cache has all pages of FILE."""
    tree = session.directory / "tree"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for number in range(FILE_PAGES):
            file.write(number.to_bytes(8, "little") * 512)
    image = disk.ext4(session.directory / "data.img", (FILE_MIB + 64) * MIB, tree)
    daemon = session.daemon("vm1", pool_size="400MiB")
    daemon.start()
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        memory_bytes=RAM_BYTES,
        disks=[Disk("data", image)],
        arguments=arguments,
        modules=["virtio_balloon"],
        files={**command(), **programs(RECLAIM)},
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    guest.sh(f"mkdir -p /run {CGROUPS} && mount -t cgroup2 none {CGROUPS}")
    guest.sh(f"dd if=/dev/vda of=/dev/null bs=1M count={METADATA_MIB} 2>&1", 120)
    guest.sh(f"cat {FILE} >/dev/null", 120)
    return daemon, vm, guest


def start_autosize(guest: Guest, options: str = SHORT) -> None:
    guest.sh(f"{COMMAND} autosize {options} >{LOG} 2>&1 </dev/null & echo $! >{PID}")
    until(lambda: guest.run(f"{COMMAND} autosize --status").status == 0, SECONDS, "autosize runs")


def end_autosize(guest: Guest) -> None:
    guest.sh(f"kill $(cat {PID})")
    until(lambda: guest.run(f"{COMMAND} autosize --status").status, SECONDS, "autosize ends")


def status(guest: Guest) -> dict[str, Any]:
    found = json.loads(guest.sh(f"{COMMAND} --json autosize --status"))
    assert isinstance(found, dict)
    return found


def wait_reason(guest: Guest, reason: str) -> dict[str, Any]:
    """Waits until the service gives a reason; returns its status."""
    found: dict[str, Any] = {}

    def matches() -> bool:
        nonlocal found
        found = status(guest)
        return str(found["reason"]) == reason

    try:
        until(matches, SECONDS, f"autosize says '{reason}'")
    except HarnessError as error:
        raise AssertionError(f"{error}: {found}, {guest.sh(f'cat {LOG}')}") from None
    return found


def evicted_pages(guest: Guest) -> int:
    """Returns the number of file pages that the guest's kernel has evicted."""
    return int(guest.sh("grep '^pgsteal_file ' /proc/vmstat").split()[1])


def compaction_scanned_pages(guest: Guest) -> int:
    """Returns the number of pages that compaction has looked at."""
    return int(guest.sh("grep '^compact_migrate_scanned ' /proc/vmstat").split()[1])


def test_an_idle_guest_returns_page_cache_and_reads_it_from_the_pool(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon, vm, guest = boot(session, kernel, module, BALLOON)
    expect_failure(guest, "autosize --status", SOME, "does not run")
    for wrong in ("--once=", "--once=0", "--floor=1T", "--pause=0", "--order=10", "--idle=x", "x"):
        expect_failure(guest, f"autosize {wrong}", USAGE, "usage: tmem-guest autosize")
    expect_failure(guest, "status --status", USAGE, "usage: tmem-guest status")

    before, full, order = settle(guest), allocated_bytes(vm), guest.read(ORDER)
    scanned = compaction_scanned_pages(guest)
    answer = json.loads(guest.sh(f"{COMMAND} --json autosize --once=64M --floor={FLOOR_MIB}M"))
    assert answer["returned_bytes"] >= 64 * MIB and answer["why"] is None
    assert compaction_scanned_pages(guest) > scanned
    expect_failure(guest, f"autosize --once=8M --floor={RAM_BYTES}", SOME, "returned nothing")

    # --once leaves small blocks to be reported, which takes some time after its end.
    assert order != "4" and guest.read(ORDER) == "4"
    guest.sh(f"echo {order} >{ORDER}")
    scanned = compaction_scanned_pages(guest)
    once = f"autosize --once=8M --floor={FLOOR_MIB}M --order=9"
    assert json.loads(guest.sh(f"{COMMAND} --json {once}"))["returned_bytes"] >= 8 * MIB
    assert compaction_scanned_pages(guest) > scanned and guest.read(ORDER) == order
    scanned = compaction_scanned_pages(guest)
    start_autosize(guest)
    expect_failure(guest, f"autosize {SHORT}", SOME, "runs already")
    wait_reason(guest, "returning memory")
    assert guest.read(ORDER) == "4"
    # Every user may read the status.
    guest.sh("mkdir -p /etc && echo user:x:1000:1000::/:/bin/sh >/etc/passwd")
    guest.sh(f"mkdir /tmp/bin && cp {COMMAND} /tmp/bin/t && chmod 755 /tmp /tmp/bin /tmp/bin/t")
    assert "returned_bytes" in guest.sh("su user -c '/tmp/bin/t autosize --status'")
    until(
        lambda: allocated_bytes(vm) <= full - RETURNED_MIB * MIB, REPORTED_SECONDS, "memory returns"
    )
    found = wait_reason(guest, "the page cache has reached its floor")
    grown = growth(before, settle(guest))
    print(f"allocated: {full} before, {allocated_bytes(vm)} after; {found}; {grown}")
    assert answer["returned_bytes"] + found["returned_bytes"] >= RETURNED_MIB * MIB
    until(lambda: compaction_scanned_pages(guest) > scanned, SECONDS, "the service compacts memory")
    assert found["file_bytes"] >= FLOOR_MIB * MIB * 0.9
    assert grown["puts_lost"] <= grown["puts_eligible"] * 0.01
    # The pool does not keep metadata, and its eviction is no reason for a pause.
    assert grown["puts_skipped_metadata"] >= METADATA_MIB * 256 * 0.9
    assert "do not reach the pool" not in guest.read(LOG)

    # The pages come from the pool, and are right. That they come back makes the service pause.
    held = checksums(guest, [FILE])
    after = growth(before, stats(guest))
    assert after["hits"] >= grown["puts_eligible"] * 0.95
    print(guest.sh(f"cat {LOG}"))
    end_autosize(guest)
    assert guest.read(ORDER) == order
    expect_failure(guest, "autosize --status", SOME, "does not run")
    daemon.terminate()
    wait_state(guest, "offline")
    guest.drop_caches()
    assert checksums(guest, [FILE]) == held


def test_autosize_pauses_after_a_stall_and_stops_without_the_cache(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon, _, guest = boot(session, kernel, module, BALLOON)
    # Small steps, so that the page cache does not reach its floor before the stall.
    start_autosize(guest, "--boot=0 --idle=10000 --pause=5 --floor=32M")
    wait_reason(guest, "returning memory")
    group = f"{CGROUPS}/small"
    guest.sh(f"echo +memory >{CGROUPS}/cgroup.subtree_control; mkdir {group}")
    guest.sh(f"echo 8M >{group}/memory.max; truncate -s {2 * RAM_BYTES} {WHERE}/sparse")
    reader = guest.start(
        f"echo $$ >{group}/cgroup.procs; while :; do cat {WHERE}/sparse >/dev/null; done", 600
    )
    found = wait_reason(guest, "tasks waited for memory")
    assert found["state"] == "paused" and found["pause_seconds"] <= 5
    until(lambda: status(guest)["pause_seconds"] > 5, SECONDS, "the pause doubles")
    guest.sh(f"echo 1 >{group}/cgroup.kill")
    reader.wait()
    lines = guest.sh(f"cat {LOG}")
    print(lines)
    assert "stopped: tasks waited for memory; next try in 5 s" in lines

    daemon.terminate()
    wait_state(guest, "offline")
    wait_reason(guest, CACHE_OFF)
    before = evicted_pages(guest)
    expect_failure(guest, "autosize --once=8M", NO_DRIVER, "returned nothing")
    guest.sh("sleep 3")
    assert evicted_pages(guest) == before
    end_autosize(guest)


def test_autosize_needs_free_page_reporting(session: Session, kernel: Kernel, module: Path) -> None:
    _, _, guest = boot(session, kernel, module, ["-device", "virtio-balloon-pci"])
    start_autosize(guest)
    wait_reason(guest, NO_REPORTING)
    before = evicted_pages(guest)
    expect_failure(guest, "autosize --once=8M", SOME, "returned nothing")
    assert evicted_pages(guest) == before
    end_autosize(guest)
    answer = json.loads(guest.sh(f"{COMMAND} --json autosize --once=8M --without-reporting"))
    assert answer["returned_bytes"] >= 8 * MIB

    # The service says at its end what it has returned.
    start_autosize(guest, "--boot=0 --idle=10000 --floor=32M --without-reporting")
    wait_reason(guest, "returning memory")
    end_autosize(guest)
    assert "stopped: the service ends" in guest.sh(f"cat {LOG}")
    guest.sh(f"umount {CGROUPS}")
    expect_failure(guest, "autosize", UNSUPPORTED, "version 2 of control groups")
