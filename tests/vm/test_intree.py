# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver built into an x86-64 kernel without ftrace, kprobes and modules: `--kernel intree`."""

from __future__ import annotations

import pytest
from driver import (
    DISK_BYTES,
    PARAMETERS,
    PATIENT,
    TORTURE,
    WHERE,
    Torture,
    seed,
    set_parameter,
    start_daemon,
    state,
    stats,
    wait_served,
    wait_state,
)
from test_selftest import BLIND
from test_torture import BROKEN, MOUNT, SCENARIOS, SMALL

from harness import debug_kernel, disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import TESTS, guest_program
from harness.session import Session
from harness.vm import Config, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs", "built_in")

OPERATIONS = 15_000


@pytest.fixture
def built_in(kernel: Kernel) -> None:
    if kernel.series != debug_kernel.INTREE:
        pytest.skip(f"Linux {kernel.series} does not have the driver built in: --kernel intree")


def boot(session: Session, kernel: Kernel, parameters: str, name: str = "ext4") -> Guest:
    """Boots a VM with the data disk mounted, and the driver's parameters on the command line."""
    fs = disk.FILE_SYSTEMS[name]
    image = fs.make(session.folder / "data.img", DISK_BYTES)
    words = parameters.split()
    config = Config(
        kernel,
        cpus=2,
        disks=[disk.Disk("data", image)],
        tmem=Tmem(start_daemon(session).socket("vm1")),
        files={TORTURE: guest_program(TESTS / "guest/torture.c")},
        cmdline=" ".join(f"virtio_tmem.{word}" for word in words),
    )
    guest = session.vm(config).start()
    guest.mount("data", WHERE, fs.kind, fs.mount_options)
    return guest


def served(session: Session, kernel: Kernel, parameters: str, name: str = "ext4") -> Guest:
    """Boots a VM whose driver caches."""
    guest = boot(session, kernel, f"deadline_ms=200 {parameters}", name)
    wait_state(guest, "on")
    wait_served(guest)
    return guest


def test_the_kernel_has_no_ftrace(session: Session, kernel: Kernel) -> None:
    guest = served(session, kernel, "verify_every=0")
    assert guest.run("test -e /sys/kernel/tracing/available_filter_functions").status != 0
    assert guest.run("test -e /proc/modules").status != 0
    assert guest.read(f"{PARAMETERS}/deadline_ms") == "200"


@pytest.mark.parametrize("parameter, words", BLIND)
def test_self_test_detects_each_missing_hook(
    session: Session, kernel: Kernel, parameter: str, words: str
) -> None:
    """The self-test finds a hook that the kernel does not call, and the cache stays off."""
    found = state(boot(session, kernel, parameter))
    assert found.startswith("off: self-test: ") and words in found, found


@pytest.mark.parametrize("name", ["ext4", "xfs"])
def test_random_operations_find_no_wrong_byte(session: Session, kernel: Kernel, name: str) -> None:
    """Runs workers, an evictor and unmount cycles, in which the cache must take part."""
    guest = served(session, kernel, "verify_every=10", name)
    kind = disk.FILE_SYSTEMS[name].kind
    mount = f"--device=/dev/vda --fstype={kind}"
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4 {mount}"
    Torture(guest, arguments, 900).finish()
    counters = stats(guest)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["mismatches"] == counters["verify_mismatches"] == 0
    wait_state(guest, "on")


def test_readers_never_see_an_older_version(session: Session, kernel: Kernel) -> None:
    guest = served(session, kernel, "verify_every=0")
    arguments = f"--seed={seed()} --mode=versions --ops=20000 --mixed"
    Torture(guest, f"{arguments} --readers=3 --direct-readers=1", 600).finish()
    wait_state(guest, "on")


def test_scenarios_find_no_wrong_byte(session: Session, kernel: Kernel) -> None:
    guest = served(session, kernel, "verify_every=0")
    for scenario in SCENARIOS:
        numbers = Torture(guest, f"--scenario={scenario} {MOUNT}").finish()
        assert numbers["puts"] > 0, f"{scenario} did not reach the cache"
    wait_state(guest, "on")


def test_scenario_without_its_hook_finds_a_wrong_byte(session: Session, kernel: Kernel) -> None:
    """Each call that the in-tree patches add to the kernel is needed.

    Without the call, the scenario finds a wrong byte.
    """
    guest = served(session, kernel, f"verify_every=0 {PATIENT}")
    for hooks, scenario in BROKEN:
        set_parameter(guest, "test_hooks_off", hooks)
        Torture(guest, f"--scenario={scenario} {MOUNT}").must_mismatch()
        set_parameter(guest, "test_hooks_off", "")
        guest.sh(f"umount {WHERE}; mount -t ext4 /dev/vda {WHERE}", 60)
        Torture(guest, f"--scenario={scenario} {MOUNT}").finish()
