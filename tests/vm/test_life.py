# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests a caching guest that crashes, runs out of memory, or loses processors."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    MODULE,
    TORTURE,
    WHERE,
    Torture,
    checksums,
    driver_vm,
    evict,
    growth,
    kept_pages,
    load,
    seed,
    start_daemon,
    stats,
    wait_state,
)
from test_driver import overwrite, tree_disk

from harness.kernel import Kernel
from harness.paths import TESTS, guest_program
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PRESSURE = "/bin/pressure"
# Two files of this size are twice the memory of the guest that writes them.
PRESSURE_MIB = 160
SMALL_GUEST = 160 * MIB
CPUS = 4


def crash(vm: Vm, how: str) -> None:
    """Crashes the guest's kernel, which then neither writes back pages nor unbinds the driver."""
    mark = vm.qmp.events_seen()
    vm.guest.start(f"echo {how} >/proc/sysrq-trigger")
    vm.qmp.wait_event("RESET", 60, mark)
    vm.connect()


@pytest.mark.parametrize(
    "how",
    [pytest.param("b", id="reset", marks=pytest.mark.smoke), pytest.param("c", id="panic")],
)
def test_boot_after_a_crash_reads_no_earlier_page(
    session: Session, kernel: Kernel, module: Path, how: str
) -> None:
    """After a crash and a reboot on the same disk, the guest gets no page from before the crash."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(
        session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data], cmdline="panic=1"
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    files = list(sums)
    first, second = files[:2]
    held = evict(guest, files)["index_pages"]
    assert held > 100
    assert daemon.stats()["pool"]["pages"] > 0
    sums[first] = overwrite(guest, first)

    guest.start(f"{TORTURE} --ops=100000 --files=16 --size-max=262144 {WHERE}", 300)
    before = kept_pages(stats(guest))
    until(lambda: kept_pages(stats(guest)) > before + 50, 60, "puts under load")
    if how == "c":
        vm.expect_trouble()
    crash(vm, how)

    # After the reboot, the guest changes a file in place before it loads the driver.
    guest = vm.guest
    guest.mount("data", WHERE)
    sums[second] = overwrite(guest, second)
    guest.drop_caches()
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
    wait_state(guest, "on")
    assert daemon.stats()["pool"]["pages"] == 0, (
        "the pool still has pages of the guest that was reset"
    )
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] == 0
    evict(guest, files)
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] > 100


def test_dirty_files_larger_than_memory_cause_no_oom_kill(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Writing and mapping files twice as large as memory causes no OOM kill and no wrong byte."""
    daemon = start_daemon(session)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        cpus=2,
        memory_bytes=SMALL_GUEST,
        files={PRESSURE: guest_program(TESTS / "guest/pressure.c")},
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    before = stats(guest)
    done = guest.run(f"{PRESSURE} {WHERE} {PRESSURE_MIB}", 600)
    assert done.status == 0, (done.text, done.stderr, stats(guest))
    after = stats(guest)
    print(growth(before, after))
    log = guest.sh("dmesg")
    assert "Out of memory" not in log and "oom-kill" not in log
    assert "page allocation failure" not in log
    # Pages were reclaimed and read again, and overwritten ones were erased.
    assert kept_pages(after) - kept_pages(before) > PRESSURE_MIB
    assert after["hits"] > before["hits"]
    assert after["invalidations_block"] > before["invalidations_block"]
    assert after["mismatches"] == 0
    wait_state(guest, "on")


def test_cpu_hotplug_under_load_causes_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Processors that go offline and online in random order, under load, cause no wrong byte."""
    number = seed()
    generator = random.Random(number)
    daemon = start_daemon(session)
    vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=CPUS)
    guest = vm.start()
    load(guest, "verify_every=0")
    arguments = f"--seed={number} --ops=8000 --jobs=2 --files=16 --size-max=262144"
    torture = Torture(guest, arguments, 600)
    changes = 0
    online = set(range(CPUS))
    while not torture.job.done():
        # The first processor of a PC cannot go offline.
        cpu = generator.randrange(1, CPUS)
        value = int(cpu not in online)
        guest.sh(f"echo {value} >/sys/devices/system/cpu/cpu{cpu}/online", 120)
        online ^= {cpu}
        changes += 1
        time.sleep(generator.uniform(0, 0.2))  # the test acts at random moments
    torture.finish()
    assert changes >= 10
    for cpu in set(range(CPUS)) - online:
        guest.sh(f"echo 1 >/sys/devices/system/cpu/cpu{cpu}/online", 120)
    counters = stats(guest)
    print(f"{changes} processors went offline or online", counters)
    assert counters["hits"] > 100
    assert counters["mismatches"] == 0
    wait_state(guest, "on")
    Torture(guest, "--scenario=plain").finish()
    assert stats(guest)["hits"] > counters["hits"]
