# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the driver built into an x86-64 kernel without ftrace, kprobes and modules.

The kernel is Linux 7.3 (`--kernel intree`). The patches of guest-driver/intree add calls of the
hooks to it. For each of these calls, a test fails if the call is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    DM,
    HOOKS,
    PARAMETERS,
    SYSFS,
    TORTURE,
    WHERE,
    Torture,
    checksums,
    evict,
    growth,
    programs,
    seed,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_served,
    wait_state,
)
from test_blocks import check_writes_are_seen_twice
from test_files import SPECIAL, check_cached, make
from test_filesystems import SCENARIOS as XFS_SCENARIOS
from test_filesystems import mount_arguments
from test_hooks import READERS, check_fadvise, check_read_path
from test_pace import check_waits_for_silent_host
from test_selftest import BLIND
from test_torture import SCENARIOS, SMALL

from harness import debug_kernel, disk
from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Config, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs", "built_in")

PAGE = 4096
OPERATIONS = 15_000
ABSENT = ("FTRACE", "FUNCTION_TRACER", "KPROBES", "LIVEPATCH", "MODULES", "TRACEPOINTS")


@pytest.fixture
def built_in(kernel: Kernel) -> None:
    if kernel.series != debug_kernel.INTREE:
        pytest.skip(f"Linux {kernel.series} has no built-in driver: use --kernel intree")


def boot(
    session: Session,
    kernel: Kernel,
    parameters: str,
    name: str = "ext4",
    *,
    image: Path | None = None,
    files: Mapping[str, Path] | None = None,
    daemon: Daemon | None = None,
) -> Guest:
    """Boots a VM with the data disk mounted, and the driver's parameters on the command line."""
    fs = disk.FILE_SYSTEMS[name]
    image = image or fs.make(session.directory / "data.img", DISK_BYTES)
    words = parameters.split()
    config = Config(
        kernel,
        cpus=2,
        disks=[disk.Disk("data", image)],
        tmem=Tmem((daemon or start_daemon(session)).socket("vm1")),
        files=files or programs(TORTURE, SPECIAL),
        cmdline=" ".join(f"virtio_tmem.{word}" for word in words),
    )
    guest = session.vm(config).start()
    guest.mount("data", WHERE, fs.kind, fs.mount_options)
    return guest


def boot_served(
    session: Session,
    kernel: Kernel,
    parameters: str = "verify_every=0",
    name: str = "ext4",
    daemon: Daemon | None = None,
) -> Guest:
    """Boots a VM, and waits until the built-in driver caches files of the data disk."""
    parameters = f"deadline_ms={DEADLINE_MS} {parameters}"
    guest = boot(session, kernel, parameters, name, daemon=daemon)
    wait_state(guest, "on")
    wait_served(guest)
    return guest


def test_all_hooks_are_live_without_ftrace(session: Session, kernel: Kernel) -> None:
    """The self-test passes on a kernel without tracing, and all hooks are live."""
    guest = boot_served(session, kernel)
    config = set(guest.sh("zcat /proc/config.gz").splitlines())
    assert "CONFIG_VIRTIO_TMEM=y" in config
    assert config.isdisjoint(f"CONFIG_{name}=y" for name in ABSENT)
    for path in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing", "/proc/modules"):
        assert guest.run(f"test -e {path}").status != 0, f"the kernel has {path}"
    assert guest.read(f"{PARAMETERS}/deadline_ms") == str(DEADLINE_MS)
    live = int(guest.read(f"{SYSFS}/hooks"), 0)
    assert live & HOOKS == HOOKS, f"a hook is not live: {live:#x}"


def test_evicted_files_are_read_back_from_the_pool(session: Session, kernel: Kernel) -> None:
    """Evicted files are read back with right bytes, and mostly not from the disk."""
    guest = boot_served(session, kernel)
    files = [f"{WHERE}/f{number}" for number in range(16)]
    for path in files:
        guest.sh(f"dd if=/dev/urandom of={path} bs=1M count=1 conv=fsync 2>/dev/null", 60)
    sums = checksums(guest, files)
    before = evict(guest, files)
    read = guest.disk_stat("data")
    assert checksums(guest, files) == sums
    pages = len(files) * MIB // PAGE
    change = growth(before, stats(guest))
    assert change["hits"] > pages * 9 // 10
    sectors = (guest.disk_stat("data") - read).read_sectors
    assert sectors < pages * 8 // 10  # a page has 8 sectors
    assert change["mismatches"] == 0


def test_kswapd_waits_for_a_silent_host(session: Session, kernel: Kernel) -> None:
    """kswapd waits while the host takes no page, unless the hook `reclaim` is off."""
    daemon = start_daemon(session)
    check_waits_for_silent_host(boot_served(session, kernel, daemon=daemon), daemon)


# The first entry is for a module: a built-in driver redirects no function.
@pytest.mark.parametrize("parameter, words", BLIND[1:])
def test_self_test_detects_each_missing_hook(
    session: Session, kernel: Kernel, parameter: str, words: str
) -> None:
    """The self-test finds a hook that the kernel does not call, and the cache stays off."""
    guest = boot(session, kernel, parameter)
    found = state(guest)
    assert found.startswith("off: self-test: ") and words in found, found
    guest.sh(f"dd if=/dev/urandom of={WHERE}/f bs=64k count=16 conv=fsync 2>/dev/null")
    guest.drop_caches()
    assert stats(guest)["puts"] == 0


def test_released_hooks_can_be_installed_again(session: Session, kernel: Kernel) -> None:
    """Releasing and taking the hooks during the torture program causes no wrong byte.

    Afterwards the cache has hits again.
    """
    guest = boot_served(session, kernel)
    torture = Torture(guest, f"--seed={seed()} --ops=6000 {SMALL} --jobs=2", 600)
    for _ in range(5):
        guest.sh(f"echo 0 >{SYSFS}/hooks_enabled", 60)
        assert state(guest).startswith("off: hooks are released")
        before = settle(guest)["puts"]
        guest.sh("sleep 0.2; echo 1 >/proc/sys/vm/drop_caches")
        assert stats(guest)["puts"] == before
        guest.sh(f"echo 1 >{SYSFS}/hooks_enabled", 60)
        wait_state(guest, "on")
    torture.finish()
    wait_served(guest)
    check_cached(guest, make(guest, f"{WHERE}/f"))


@pytest.mark.parametrize("name", ["ext4", "xfs"])
def test_random_operations_find_no_wrong_byte(session: Session, kernel: Kernel, name: str) -> None:
    """Random operations, evictions and unmounts cause no wrong byte, and the cache has hits."""
    guest = boot_served(session, kernel, "verify_every=10", name)
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4"
    numbers = Torture(guest, f"{arguments} {mount_arguments(name)}", 900).finish()
    assert numbers["ops"] >= OPERATIONS
    counters = stats(guest)
    print(counters)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["verified_hits"] > 100
    assert counters["mismatches"] == counters["verify_mismatches"] == 0
    for why in ("block", "unmount"):
        assert counters[f"invalidations_{why}"] > 0, f"no page was erased for the reason '{why}'"
    wait_state(guest, "on")


def test_writes_without_the_hook_of_submit_bio_are_seen_twice(
    session: Session, kernel: Kernel
) -> None:
    check_writes_are_seen_twice(boot_served(session, kernel))


@pytest.mark.parametrize(
    "name, scenarios",
    [("ext4", SCENARIOS), ("xfs", [*XFS_SCENARIOS, "clone", "swapext"])],
    ids=["ext4", "xfs"],
)
def test_torture_scenarios_find_no_wrong_byte(
    session: Session, kernel: Kernel, name: str, scenarios: list[str]
) -> None:
    guest = boot_served(session, kernel, name=name)
    for scenario in scenarios:
        numbers = Torture(guest, f"--scenario={scenario} {mount_arguments(name)}").finish()
        assert numbers["puts"] > 0, f"scenario {scenario} put no page, so it did not test the cache"
    assert stats(guest)["hits"] > 0
    wait_state(guest, "on")


def test_missing_submit_bio_fadvise_and_drop_slab_hooks_cost_only_hits(
    session: Session, kernel: Kernel
) -> None:
    """Without the hooks of submit_bio(), fadvise() or drop_slab(), all bytes are right.

    Without the hook of drop_slab(), drop_caches does not empty the pool.
    """
    guest = boot_served(session, kernel)
    for reader in READERS:
        check_read_path(guest, reader)
    check_fadvise(guest)
    make(guest, f"{WHERE}/other")
    set_parameter(guest, "drop_caches_flush", "1")
    for off in (True, False):
        set_parameter(guest, "test_hooks_off", "drop_slab" if off else "")
        assert evict(guest, [f"{WHERE}/other"])["index_pages"] > 0
        guest.sh("echo 3 >/proc/sys/vm/drop_caches")
        assert (stats(guest)["index_pages"] > 0) == off


def test_file_systems_on_device_mapper_are_refused(session: Session, kernel: Kernel) -> None:
    """Without kprobes, the driver cannot examine device-mapper disks, so it refuses all of them."""
    image = disk.ext4(session.directory / "data.img", 256 * MIB)
    guest = boot(session, kernel, "verify_every=0", image=image, files=programs(DM))
    wait_state(guest, "on")
    wait_served(guest)
    guest.sh(f"umount {WHERE}", 60)
    sectors = guest.read(f"/sys/class/block/{guest.disk('data')}/size")
    node = guest.sh(f"{DM} data 0 {sectors} linear '/dev/{guest.disk('data')} 0'").strip()
    guest.sh(f"mount -t ext4 {node} {WHERE}", 60)
    before = stats(guest)
    evict(guest, list(make(guest, f"{WHERE}/f")))
    assert "cannot be examined" in state(guest)
    assert growth(before, stats(guest))["puts"] == 0
