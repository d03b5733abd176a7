# SPDX-License-Identifier: Apache-2.0 OR MIT
"""VMs with the guest driver loaded, its counters, and tests/guest/torture.c in them."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from harness import disk
from harness.daemon import Daemon, Tenant
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.paths import TESTS, HarnessError, guest_program
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm
from harness.wait import scaled, until

MODULE = "/virtio_tmem.ko"
TORTURE = "/bin/torture"
DM = "/bin/dm"
SYSFS = "/sys/kernel/virtio_tmem"
PARAMETERS = "/sys/module/virtio_tmem/parameters"
WHERE = "/mnt"
# Bits of live hooks in sysfs, by their numbers in hooks/hooks.h: all but "selftest" are needed to
# serve ext4.
HOOKS_OF_EXT4 = 0xFFFF

# The driver's deadline in tests, scaled for slow machines. A host under TCG answers within it. If a
# page arrives later, the driver reads it from the disk.
DEADLINE_MAX_MS = 1000  # the module's maximum
DEADLINE_MS = min(DEADLINE_MAX_MS, int(scaled(200)))
# The longest deadline, for tests in which the driver must use a held page. With a short one, the
# driver would discard a wrong page that is late, and the test would not see the fault.
PATIENT = f"deadline_ms={DEADLINE_MAX_MS}"
DISK_BYTES = 512 * MIB
SETTLE_SECONDS = 30.0
# Longest time from a daemon's connection until the driver has created its pools.
ONLINE_SECONDS = 60.0
HELD_SECONDS = 60.0


def seed() -> int:
    """Returns the seed of this run, TMEM_SEED or a new one, and prints it."""
    named = os.environ.get("TMEM_SEED")
    value = int(named, 0) if named else random.SystemRandom().getrandbits(32)
    print(f"TMEM_SEED={value}")
    return value


def version(kernel: Kernel) -> tuple[int, ...]:
    """Returns the kernel's version as numbers, such as (6, 12)."""
    return tuple(int(part) for part in kernel.release.split("-")[0].split(".")[:2])


def start_daemon(session: Session, *tenants: Tenant | str) -> Daemon:
    daemon = session.daemon(*(tenants or ("vm1",)), pool_size="128MiB")
    daemon.start()
    return daemon


def driver_vm(session: Session, kernel: Kernel, module: Path, tmem: Tmem | None, **more: Any) -> Vm:
    """Creates a VM with the module, torture and a disk "data", by default a blank ext4."""
    files = {
        MODULE: module,
        TORTURE: guest_program(TESTS / "guest/torture.c"),
        **more.pop("files", {}),
    }
    name = more.get("name", "vm1")
    if "disks" not in more:
        image = disk.ext4(session.folder / f"{name}.img", DISK_BYTES)
        more["disks"] = [disk.Disk("data", image)]
    return session.vm(Config(kernel, tmem=tmem, files=files, **more))


def programs(*paths: str) -> dict[str, Path]:
    """Returns files for a guest: the programs of tests/guest by their paths in the guest."""
    return {path: guest_program(TESTS / f"guest/{Path(path).name}.c") for path in paths}


def load(
    guest: Guest,
    parameters: str = "",
    *,
    online: bool = True,
    fs: disk.FileSystem = disk.FILE_SYSTEMS["ext4"],
) -> None:
    """Mounts the data disk, loads the module and waits until it caches."""
    guest.mount("data", WHERE, fs.kind, fs.mount_options)
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} {parameters}")
    if online:
        wait_state(guest, "on")
        wait_served(guest)


def driver_guest(
    session: Session,
    kernel: Kernel,
    module: Path,
    tmem: Tmem | None = None,
    *,
    parameters: str = "verify_every=0",
    fs: disk.FileSystem = disk.FILE_SYSTEMS["ext4"],
    **more: Any,
) -> Guest:
    """Boots a VM whose driver caches. Its device is `tmem`, or belongs to a new daemon."""
    if tmem is None:
        tmem = Tmem(start_daemon(session).socket("vm1"))
    if "disks" not in more:
        image = fs.make(session.folder / "data.img", DISK_BYTES)
        more["disks"] = [disk.Disk("data", image)]
    more.setdefault("modules", ["xfs"] if fs.kind == "xfs" else [])
    guest = driver_vm(session, kernel, module, tmem, **more).start()
    load(guest, parameters, fs=fs)
    return guest


def wait_served(guest: Guest) -> None:
    """Waits until the mount takes puts.

    The driver learns of a file system from its first regular file, which a new file system does not
    have. It then creates a pool at the host in the background.
    """
    probe = f"{WHERE}/.served"

    def served() -> bool:
        guest.sh(
            f"dd if=/dev/zero of={probe} bs=64k count=1 2>/dev/null && sync"
            " && echo 1 >/proc/sys/vm/drop_caches"
        )
        return stats(guest)["puts"] > 0

    until(served, ONLINE_SECONDS, f"the driver serves {WHERE}")
    guest.sh(f"rm {probe} && sync")
    settle(guest)


def state(guest: Guest) -> str:
    return guest.read(f"{SYSFS}/state")


def is_on(guest: Guest) -> bool:
    """Returns whether the driver works.

    Its state may end with a note on an untested kernel release.
    """
    return state(guest).split(":")[0] == "on"


def wait_state(guest: Guest, begins: str, seconds: float = ONLINE_SECONDS) -> str:
    """Waits until the driver's state begins with `begins`; the error shows the actual state.

    A poisoned driver never leaves that state, so the wait for another state then fails at once.
    """
    last = ""

    def found() -> bool:
        nonlocal last
        last = state(guest)
        if last.startswith("poisoned") and not begins.startswith("poisoned"):
            raise HarnessError(f"the driver cannot reach the state '{begins}' any more")
        return last.startswith(begins)

    try:
        until(found, seconds, f"the driver's state begins with '{begins}'")
    except HarnessError as error:
        raise HarnessError(f"{error}; the state is '{last}'\n{stats(guest)}") from None
    return last


def set_parameter(guest: Guest, name: str, value: str) -> None:
    guest.sh(f"echo '{value}' >{PARAMETERS}/{name}")


class Hold:
    """Makes the next task that comes to a place of the module wait there (a test build only)."""

    def __init__(self, guest: Guest, place: str) -> None:
        self.guest = guest
        self.name = f"test_hold_{place}"
        set_parameter(guest, self.name, "1")

    def wait(self) -> None:
        """Waits until a task is held at the place."""

        def held() -> bool:
            return self.guest.read(f"{PARAMETERS}/{self.name}") == "2"

        until(held, HELD_SECONDS, f"a task is held at {self.name}")

    def release(self) -> None:
        set_parameter(self.guest, self.name, "0")


def stats(guest: Guest) -> dict[str, int]:
    """Returns all counters of the driver."""
    lines = guest.sh(f"cd {SYSFS}/stats && grep . *").splitlines()
    return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}


def growth(before: dict[str, int], after: dict[str, int]) -> Counter[str]:
    """Returns the change of each counter that changed, and 0 for all others."""
    return Counter(
        {name: after[name] - before[name] for name in after if after[name] != before[name]}
    )


def settle(guest: Guest) -> dict[str, int]:
    """Waits until the host has answered all puts; returns the counters."""
    counters: dict[str, int] = {}

    def settled() -> bool:
        nonlocal counters
        counters = stats(guest)
        answered = sum(counters[f"puts_{how}"] for how in ("stored", "refused", "unanswered"))
        return counters["puts"] == answered

    until(settled, SETTLE_SECONDS, "the host answers all puts")
    return counters


def evict(guest: Guest, files: list[str]) -> dict[str, int]:
    """Reads and evicts files, a few at a time, so that the put ring has room."""
    for path in files:
        guest.sh(f"cat {path} >/dev/null && sync && echo 1 >/proc/sys/vm/drop_caches", 60)
        settle(guest)
    return stats(guest)


def checksums(guest: Guest, files: list[str], seconds: float = 120) -> dict[str, str]:
    """Returns the sha256 of each file; they are read in order."""
    lines = guest.sh(f"sha256sum {' '.join(files)}", seconds).splitlines()
    return {path: digest for digest, path in (line.split() for line in lines)}


def verdict(guest: Guest, command: str, status: int, text: str) -> dict[str, int]:
    """Raises if torture found a wrong byte; returns the numbers of its last line."""
    if status != 0:
        raise HarnessError(
            f"'{command}' ended with {status}:\n{text[-6000:]}\n"
            f"state {state(guest)}\n{stats(guest)}"
        )
    last = text.strip().splitlines()[-1]
    assert last.startswith("TORTURE ") and last.endswith(" done ok"), last
    print(last)
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", last)}


class LastingTorture:
    """Runs torture again and again until finish().

    The runs outlive the connection to the guest's agent, which does not move with a VM. Each call
    therefore gets the guest as it is reachable then.
    """

    OUTPUT = "/tmp/torture.out"
    STATUS = "/tmp/torture.status"
    ENOUGH = "/tmp/torture.enough"
    SCRIPT = "/tmp/torture.sh"

    def __init__(self, guest: Guest, number: int, arguments: str) -> None:
        self.command = f"{TORTURE} --seed=$seed {arguments} {WHERE}"
        script = (
            f"seed={number}\n"
            f"while {self.command} >{self.OUTPUT} 2>&1; do\n"
            f"  [ ! -e {self.ENOUGH} ] || {{ echo 0 >{self.STATUS}; exit; }}\n"
            "  seed=$((seed + 1))\n"
            f"done\necho 1 >{self.STATUS}\n"
        )
        guest.put(self.SCRIPT, script.encode())
        guest.sh(f"rm -f {self.STATUS} {self.ENOUGH}")
        guest.sh(f"setsid sh {self.SCRIPT} </dev/null >/dev/null 2>&1 &")

    def ended(self, guest: Guest) -> bool:
        """Returns whether the runs have ended.

        Without finish() that means a wrong byte or a failure.
        """
        return guest.run(f"[ -s {self.STATUS} ]").status == 0

    def finish(self, guest: Guest, seconds: float = 300) -> dict[str, int]:
        """Waits for the end of the current run, and raises if any run found a wrong byte."""
        guest.sh(f"touch {self.ENOUGH}")
        until(lambda: self.ended(guest), seconds, "torture ends")
        text = guest.get(self.OUTPUT).decode(errors="replace")
        return verdict(guest, self.command, int(guest.read(self.STATUS)), text)


class Torture:
    """A run of torture in a guest, on files of the directory `where`."""

    def __init__(
        self, guest: Guest, arguments: str, seconds: float = 300, where: str = WHERE
    ) -> None:
        self.guest = guest
        self.command = f"{TORTURE} {arguments} {where}"
        self.job: Job = guest.start(self.command, seconds)

    def finish(self) -> dict[str, int]:
        """Raises if torture found a wrong byte; returns the numbers of its last line at the end."""
        done = self.job.wait()
        return verdict(self.guest, self.command, done.status, done.text)

    def must_mismatch(self) -> str:
        """Waits for the end, raises unless a wrong byte was found, and returns torture's report."""
        done = self.job.wait()
        assert done.status == 1, f"'{self.command}' ended with {done.status}:\n{done.text[-6000:]}"
        assert "TORTURE MISMATCH" in done.text, done.text[-6000:]
        return done.text
