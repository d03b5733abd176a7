# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests other users of ftrace in the guest, and a kernel that disabled ftrace.

Live patches replace functions that the driver hooks. In tests/guest/patch, live.ko is a live patch,
and patch.ko redirects a function with ftrace as a live patch does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    DISK_BYTES,
    DM,
    HOOK_BITS,
    MODULE,
    SYSFS,
    WHERE,
    Torture,
    checksums,
    driver_vm,
    evict,
    programs,
    seed,
    start_daemon,
    state,
    stats,
    wait_served,
    wait_state,
)
from test_driver import changed_content
from test_files import check_cached, check_not_cached, make

from harness import disk, module
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PATCH = "/patch.ko"
LIVE_PATCH = "/live.ko"
XFS = "/xfs"
# Functions of which the test applies a live patch.
PATCHED = ("submit_bio", "generic_shutdown_super")


def boot(session: Session, kernel: Kernel, ko: Path, *modules: str) -> Guest:
    """Boots a guest with an ext4 and an xfs, both mounted, without the driver."""
    daemon = start_daemon(session)
    data = disk.ext4(session.directory / "data.img", DISK_BYTES)
    xfs = disk.xfs(session.directory / "xfs.img", DISK_BYTES)
    patch = module.build_patch(kernel)
    vm = driver_vm(
        session,
        kernel,
        ko,
        Tmem(daemon.socket("vm1")),
        cpus=2,
        disks=[Disk("data", data), Disk("xfs", xfs)],
        modules=["xfs", *modules],
        files={
            PATCH: patch,
            LIVE_PATCH: patch.with_name("live.ko"),
            **programs(DM),
        },
        tcg_threads="single",
    )
    guest = vm.start()
    guest.mount("data", WHERE)
    guest.mount("xfs", XFS, "xfs")
    return guest


def load(guest: Guest) -> None:
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
    wait_state(guest, "on")
    wait_served(guest)


@pytest.mark.parametrize("function", ["submit_bio", "generic_fadvise"])
def test_patched_function_of_a_needed_hook_keeps_the_driver_off(
    session: Session, kernel: Kernel, test_module: Path, function: str
) -> None:
    """If a function that the driver needs is patched, nothing is cached, and the state says why."""
    guest = boot(session, kernel, test_module)
    guest.insmod(PATCH, f"function={function}")
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=0")
    wait_state(guest, "off: functions cannot be redirected: error -16: a live patch redirects one")
    check_not_cached(guest, make(guest, f"{WHERE}/f"))
    guest.sh("rmmod virtio_tmem && rmmod patch", 60)
    load(guest)
    check_cached(guest, make(guest, f"{WHERE}/f"))


@pytest.mark.parametrize(
    "function, missing", [("drop_slab", "drop_slab"), ("try_to_unmap_flush", "reclaim")]
)
def test_patched_function_of_an_optional_hook_leaves_the_driver_on(
    session: Session, kernel: Kernel, test_module: Path, function: str, missing: str
) -> None:
    """If a function that the driver does not need is patched, only its hook is missing."""
    guest = boot(session, kernel, test_module)
    guest.insmod(PATCH, f"function={function}")
    load(guest)
    assert f"cannot hook {function}: error -16" in guest.sh("dmesg")
    optional = HOOK_BITS["drop_slab"] | HOOK_BITS["reclaim"]
    hooks = int(guest.read(f"{SYSFS}/hooks"), 0)
    assert hooks & optional == optional - HOOK_BITS[missing], hex(hooks)
    check_cached(guest, make(guest, f"{WHERE}/f"))
    wait_state(guest, "on")
    guest.sh("rmmod virtio_tmem && rmmod patch", 60)


def test_hung_mount_does_not_delay_unload(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """rmmod does not wait for a mount(2) that waits for a disk without answers."""
    guest = boot(session, kernel, test_module, "dm_mod")
    load(guest)
    guest.sh(f"umount {XFS}", 60)
    device = guest.disk("xfs")
    sectors = guest.read(f"/sys/class/block/{device}/size")
    node = guest.sh(f"{DM} dead 0 {sectors} linear '/dev/{device} 0'").strip()
    guest.sh(f"{DM} dead suspend")
    mount = guest.start(f"echo $$ >/tmp/mount.pid; exec mount -t ext4 {node} {XFS}", 600)

    def asleep() -> bool:
        done = guest.run("cat /proc/$(cat /tmp/mount.pid)/stack")
        return "get_tree" in done.text

    until(asleep, 60, "mount waits for the disk")
    guest.sh("rmmod virtio_tmem", 60)
    assert not mount.done()
    guest.sh(f"{DM} dead 0 {sectors} linear '/dev/{device} 0'")
    assert mount.wait().status != 0, "mount accepted an xfs image as ext4"


def test_module_is_not_freed_after_the_kernel_disabled_ftrace(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """After the kernel disabled ftrace, the module stays in memory and caches nothing.

    Functions of the kernel still call the module, so its code must not be freed.
    """
    guest = boot(session, kernel, test_module)
    load(guest)
    sums = make(guest, f"{WHERE}/f")
    check_cached(guest, sums)
    guest.insmod(PATCH, "kill=1")
    unload = guest.start("rmmod virtio_tmem", 3600)
    until(
        lambda: "rmmod does not return" in guest.sh("dmesg"),
        60,
        "the kernel log says that rmmod does not return",
    )
    assert state(guest) == "off: the kernel gave up on ftrace; restart the guest"
    # Evictions, reads and invalidations still call the module's code.
    for _ in range(2):
        guest.sh("sync; echo 3 >/proc/sys/vm/drop_caches")
        assert checksums(guest, list(sums)) == sums
    guest.sh(f"echo 1 >{WHERE}/f && rm {WHERE}/f && umount {WHERE}", 60)
    guest.mount("data", WHERE)
    guest.sh(f"ls {WHERE}")
    assert not unload.done()


def switch_hooks(guest: Guest, on: bool) -> int:
    """Takes or releases the driver's hooks by sysfs. Returns the exit status of the write."""
    status = guest.run(f"echo {int(on)} >{SYSFS}/hooks_enabled", 120).status
    assert guest.read(f"{SYSFS}/hooks_enabled") == str(int(on and status == 0))
    return status


def wait_live_patch(guest: Guest) -> None:
    """Waits for the end of the live patch's transition, after which all tasks use the same code."""
    transition = "/sys/kernel/livepatch/live/transition"
    done = f"[ ! -e {transition} ] || [ $(cat {transition}) = 0 ]"
    until(lambda: guest.run(done).status == 0, 120, "the live patch's transition ends")


def test_live_patch_applies_while_the_hooks_are_released(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A live patch of a hooked function applies while the hooks are released.

    The driver takes the hooks again after the patch is removed.
    """
    guest = boot(session, kernel, test_module)
    load(guest)
    path = f"{WHERE}/f"
    check_cached(guest, make(guest, path))
    held = evict(guest, [path])["index_pages"]
    for function in PATCHED:
        patch = f"insmod {LIVE_PATCH} function={function}"
        assert "busy" in guest.run(patch).stderr.decode(), (
            "the kernel applied a live patch to a function that the driver redirects"
        )

        assert switch_hooks(guest, False) == 0
        assert state(guest).startswith("off: hooks are released; ")
        assert held > 0 and stats(guest)["index_pages"] == 0
        assert guest.sh(f"ls {SYSFS}/mounts") == ""
        guest.sh(patch)
        wait_live_patch(guest)
        # The hooks are released, so the driver does not see this change.
        content = changed_content(f"{function} is patched")
        guest.put(path, content)
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")

        assert switch_hooks(guest, True) != 0
        assert state(guest).startswith(
            "off: functions cannot be redirected: error -16: a live patch redirects one"
        )
        sums = {path: hashlib.sha256(content).hexdigest()}
        assert checksums(guest, [path]) == sums
        guest.sh("echo 0 >/sys/kernel/livepatch/live/enabled")
        wait_live_patch(guest)
        guest.sh("rmmod live")
        assert switch_hooks(guest, True) == 0
        wait_state(guest, "on")
        guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
        assert checksums(guest, [path]) == sums
        check_cached(guest, sums)
        held = evict(guest, [path])["index_pages"]
    guest.sh("rmmod virtio_tmem", 60)


def wait_until_some_held(guest: Guest, torture: Torture) -> None:
    until(
        lambda: stats(guest)["index_pages"] > 20 or torture.job.done(), 120, "some pages are held"
    )


def test_hooks_are_released_and_installed_again_under_load(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    guest = boot(session, kernel, test_module)
    load(guest)
    torture = Torture(guest, f"--seed={seed()} --ops=3000 --files=16 --size-max=262144", 600)
    rounds = 0
    while not torture.job.done() and rounds < 20:
        wait_until_some_held(guest, torture)
        assert switch_hooks(guest, False) == 0
        assert switch_hooks(guest, True) == 0
        rounds += 1
    torture.finish()
    assert rounds >= 2
    assert stats(guest)["mismatches"] == 0
    wait_state(guest, "on")


def test_hook_that_cannot_be_released_keeps_the_module_loaded(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If a hook cannot be released, the module cannot be unloaded."""
    guest = boot(session, kernel, test_module)
    load(guest)
    sums = make(guest, f"{WHERE}/f")
    guest.insmod(PATCH, "kill=1")
    assert guest.run(f"echo 0 >{SYSFS}/hooks_enabled", 120).status != 0
    assert state(guest) == "off: the kernel gave up on ftrace; restart the guest"
    assert guest.run("rmmod virtio_tmem").status != 0, (
        "rmmod unloaded the module although a hook could not be released"
    )
    guest.sh("sync; echo 3 >/proc/sys/vm/drop_caches")
    assert checksums(guest, list(sums)) == sums
