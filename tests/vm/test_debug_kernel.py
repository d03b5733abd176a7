# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs the torture program on kernels that check themselves: `--kernel debug` and `--kernel kcsan`.

A report of lockdep, KASAN or another checker on the console fails any test (TROUBLE in
harness/vm.py). This file also reads the reports of kmemleak and KCSAN about leaks and data races.
The last test makes the driver commit a fault of each kind and checks that the kernel reports it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    MODULE,
    PARAMETERS,
    SYSFS,
    WHERE,
    Torture,
    driver_vm,
    load,
    seed,
    set_parameter,
    stats,
    wait_state,
)
from test_guest_command import COMMAND, SOME, command

from harness import debug_kernel, disk
from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, TROUBLE, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs", "checking")

# RAM of a guest. The checkers need it for shadow memory, quarantine, and records of locks and
# allocations.
MEMORY_BYTES = 768 * MIB
# Numbers of operations of the torture program. They are so small that the build of the kernel and
# the tests of this file finish in the time of a shard.
OPERATIONS = 3_000
VERSIONS = 1_000
# Number of times that the test changes all settings, and of hits between two changes.
TURNS = 8
HITS = 50
# Scenarios of the torture program, without slow ones and without unmounting, which the random
# operations do as well.
SCENARIOS = ["plain", "dirty", "truncate", "punch", "direct", "inode", "fadvise"]
SMALL = "--files=16 --size-max=262144"
# Operations on more data than the driver's put ring keeps, so that hits come from the host.
LARGE_OPERATIONS = 1_000
LARGE = "--files=24 --size-max=2097152"
# kmemleak reports unreferenced objects that are at least 5 s old (MSECS_MIN_AGE).
LEAK_AGE_SECONDS = 6
LEAK_SECONDS = 60.0
KMEMLEAK = "/sys/kernel/debug/kmemleak"
KCSAN = "/sys/kernel/debug/kcsan"
# KCSAN watches one of `skip_watch` memory accesses, for `udelay_task` µs. The kernel's defaults are
# 4,000 and 80 µs, which are meant for machines that run longer and faster.
KCSAN_SETTINGS = {"skip_watch": 400, "udelay_task": 200}
# A stack frame in the module, or in a module that is no longer loaded.
OUR_FRAME = re.compile(r"\[virtio_tmem\]|\] 0x[0-9a-f]+$", re.MULTILINE)
# One report of KCSAN, between lines of "=".
RACE = re.compile(r"BUG: KCSAN: .*?(?=={20,}|\Z)", re.DOTALL)
# A line about an access in a report of KCSAN. The group has the first two lines of its stack.
STACK = re.compile(r"(?:read|write|race)\b[^\n]*:\n((?:[^\n]*\n){2})")

# Faults that the module parameter test_bug commits, for each kind of kernel, and the kernel's
# reports. After the last fault of "debug", lockdep switches itself off.
FAULTS = {
    "debug": {
        "sleep": "BUG: sleeping function called from invalid context",
        "order": "WARNING: possible circular locking dependency",
        "overflow": "BUG: KASAN: slab-out-of-bounds in bug_overflow",
    },
    "kcsan": {"race": "BUG: KCSAN: data-race in race"},
}


@pytest.fixture
def checking(kernel: Kernel) -> None:
    if kernel.series not in debug_kernel.CHECKING:
        pytest.skip(
            f"Linux {kernel.series} has no debugging checks; use --kernel debug or --kernel kcsan"
        )


class Machine:
    """A VM with the driver loaded, and the reports of its kernel."""

    def __init__(
        self,
        session: Session,
        kernel: Kernel,
        module: Path,
        name: str = "ext4",
    ) -> None:
        self.fs = disk.FILE_SYSTEMS[name]
        self.daemon: Daemon = session.daemon("vm1", pool_size="128MiB")
        self.daemon.start()
        image = self.fs.make(session.directory / "data.img", DISK_BYTES)
        self.vm: Vm = driver_vm(
            session,
            kernel,
            module,
            # With retain=on, the driver runs both its paths: it copies pages at their first
            # eviction, and sends references at later ones.
            Tmem(self.daemon.socket("vm1"), properties={"retain": "on"}),
            cpus=2,
            memory_bytes=MEMORY_BYTES,
            disks=[disk.Disk("data", image)],
            files=command(),
        )
        self.guest: Guest = self.vm.start()
        if kernel.series == "kcsan":
            for setting, value in KCSAN_SETTINGS.items():
                self.guest.sh(f"echo {value} >/sys/module/kcsan/parameters/{setting}")
            self.guest.sh(f"echo on >{KCSAN}")
        load(self.guest, "verify_every=100", fs=self.fs)

    @property
    def mount_arguments(self) -> str:
        """Returns the arguments with which the torture program can unmount and mount the disk."""
        return f"--device=/dev/vda --fstype={self.fs.kind}"

    def start_random_operations(
        self, operations: int, files: str = SMALL, more: str = ""
    ) -> Torture:
        return Torture(
            self.guest, f"--seed={seed()} --ops={operations} {files} --jobs=2 {more}", 900
        )

    def leaks(self) -> str:
        """Returns kmemleak's report about the module."""
        if self.guest.run(f"test -e {KMEMLEAK}").status != 0:
            return ""
        self.guest.sh(f"echo scan >{KMEMLEAK}; echo scan >{KMEMLEAK}", 300)
        reports = self.guest.sh(f"cat {KMEMLEAK}", 60).split("unreferenced object")
        return "".join(report for report in reports if OUR_FRAME.search(report))

    def races(self) -> list[str]:
        """Returns KCSAN's reports about the module, or about functions that it called directly."""
        console = self.vm.console.read_text(errors="replace").replace("\r", "")
        found = RACE.findall(console)
        print(f"{len(found)} races: {[report.splitlines()[0] for report in found]}")
        return [
            report
            for report in found
            if any("[virtio_tmem]" in head for head in STACK.findall(report))
        ]

    def check_nothing_found(self) -> None:
        print(stats(self.guest))
        wait_state(self.guest, "on")
        self.guest.sh(f"sleep {LEAK_AGE_SECONDS}")  # kmemleak does not report younger objects
        assert self.leaks() == ""
        assert self.races() == []
        self.vm.check_console()


@pytest.mark.parametrize("name", ["ext4", "xfs"])
def test_torture_triggers_no_kernel_report(
    session: Session, kernel: Kernel, module: Path, name: str
) -> None:
    """Runs random operations, and scenarios of the torture program."""
    machine = Machine(session, kernel, module, name)
    machine.start_random_operations(
        OPERATIONS, more=f"--rounds=2 {machine.mount_arguments}"
    ).finish()
    machine.start_random_operations(LARGE_OPERATIONS, LARGE).finish()
    print(counters := stats(machine.guest))
    assert counters["hits"] - counters["ring_hits"] > LARGE_OPERATIONS // 4
    assert counters["refs_held"] > 0 and counters["retained_changed"] == 0
    Torture(
        machine.guest, f"--seed={seed()} --mode=versions --ops={VERSIONS} --mixed", 900
    ).finish()
    assert stats(machine.guest)["hits"] > OPERATIONS // 20
    for scenario in SCENARIOS + (["move_ext"] if name == "ext4" else []):
        Torture(machine.guest, f"--scenario={scenario} {machine.mount_arguments}").finish()
    machine.guest.sh(
        f"dd if=/dev/zero of={WHERE}/swap bs=64k count=16 2>/dev/null && mkswap {WHERE}/swap"
        f" && swapon {WHERE}/swap && swapoff {WHERE}/swap && rm {WHERE}/swap",
        60,
    )
    machine.check_nothing_found()


def test_replaced_daemons_and_devices_trigger_no_kernel_report(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Replaces the daemon and the device, so that generations end and their memory is freed."""
    machine = Machine(session, kernel, module)
    guest = machine.guest
    torture = machine.start_random_operations(LARGE_OPERATIONS, LARGE)
    for _ in range(2):
        before = stats(guest)["hits"]
        until(lambda seen=before: stats(guest)["hits"] > seen, 120, "the driver gets hits")  # type: ignore[misc]
        machine.daemon.kill()
        machine.daemon.start()
        wait_state(guest, "on")
    driver = "/sys/bus/virtio/drivers/virtio_tmem"
    device = guest.sh(f"basename $(ls -d {driver}/virtio*)").strip()
    for _ in range(2):
        guest.sh(f"echo {device} >{driver}/unbind; echo {device} >{driver}/bind", 120)
        wait_state(guest, "on")
    torture.finish()
    machine.check_nothing_found()


def test_changed_switches_and_parameters_trigger_no_kernel_report(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Uses switches, parameters, counters, events and tmem-guest while files come and go."""
    machine = Machine(session, kernel, module)
    guest = machine.guest
    trace = "/sys/kernel/tracing/events/virtio_tmem/enable"
    # tmem-guest may fail because a file was removed meanwhile, so its status is ignored.
    turn = f"""
        set -e
        grep -r . {SYSFS} >/dev/null
        echo 1 >{trace}
        echo off >{PARAMETERS}/admission
        echo 1 >{PARAMETERS}/verify_every
        echo 1 >{PARAMETERS}/deadline_ms
        {COMMAND} policy {WHERE} never >/dev/null || test $? = {SOME}
        echo Y >{PARAMETERS}/drop_caches_flush
        echo 3 >/proc/sys/vm/drop_caches
        echo 0 >{SYSFS}/fs/ext4/enabled
        grep -r . {SYSFS} >/dev/null
        echo 0 >{trace}
        echo adaptive >{PARAMETERS}/admission
        echo 100 >{PARAMETERS}/verify_every
        echo 1 >{SYSFS}/fs/ext4/enabled
        for mount in {SYSFS}/mounts/*; do
            echo 0 >$mount/enabled
            echo 1 >$mount/enabled
        done
        {COMMAND} drop {WHERE} >/dev/null || test $? = {SOME}
        {COMMAND} policy {WHERE} default >/dev/null || test $? = {SOME}
        echo N >{PARAMETERS}/drop_caches_flush
        echo {DEADLINE_MS} >{PARAMETERS}/deadline_ms
    """
    torture = machine.start_random_operations(LARGE_OPERATIONS, LARGE)
    for _ in range(TURNS):
        before = stats(guest)["hits"]
        until(
            lambda seen=before: stats(guest)["hits"] > seen + HITS or torture.job.done(),  # type: ignore[misc]
            120,
            "the driver gets hits",
        )
        guest.sh(turn, 120)
        wait_state(guest, "on")  # the short deadline may have opened the breaker
    torture.finish()
    machine.check_nothing_found()


def test_module_reloads_trigger_no_kernel_report(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Loads and unloads the module under load, and checks that it leaves no memory allocated."""
    machine = Machine(session, kernel, module)
    guest = machine.guest
    torture = machine.start_random_operations(OPERATIONS // 2)
    for _ in range(3):
        until(lambda: stats(guest)["puts"] > 0 or torture.job.done(), 120, "the driver puts pages")
        guest.sh("rmmod virtio_tmem", 120)
        guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS}")
        wait_state(guest, "on")
    torture.finish()
    machine.check_nothing_found()


def test_each_kernel_checker_reports_its_injected_fault(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Each checker of the kernel reports a fault that the driver commits on purpose."""
    machine = Machine(session, kernel, test_module)
    machine.vm.expect_trouble()

    def console() -> str:
        return machine.vm.console.read_text(errors="replace")

    def commit(fault: str) -> None:
        set_parameter(machine.guest, "test_bug", fault)

    if kernel.series == "debug":
        commit("leak")
        until(lambda: "bug_leak" in machine.leaks(), LEAK_SECONDS, "kmemleak reports the leak")
        assert not TROUBLE.search(console())
    for fault, report in FAULTS[kernel.series].items():
        before = len(console())
        commit(fault)
        until(lambda words=report: words in console(), 60, f"'{report}' on the console")  # type: ignore[misc]
        if fault == "race":
            assert machine.races() != []
        else:
            assert TROUBLE.search(console(), before)
