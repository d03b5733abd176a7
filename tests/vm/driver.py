# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots VMs with the guest driver, reads the driver's counters, and runs the torture program.

The torture program (tests/guest/torture.c) changes and reads files, and checks every byte.
"""

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
from harness.module import counters
from harness.paths import ROOT, TESTS, HarnessError, guest_program
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm
from harness.wait import scaled, until

MODULE = "/virtio_tmem.ko"
TORTURE = "/bin/torture"
DM = "/bin/dm"
SYSFS = "/sys/kernel/virtio_tmem"
PARAMETERS = "/sys/module/virtio_tmem/parameters"
WHERE = "/mnt"
# Bit of each hook in the sysfs file "hooks", in the order of enum tmem_hook.
HOOK_BITS = {
    name.lower(): 1 << number
    for number, name in enumerate(
        re.findall(
            r"^\tTMEM_HOOK_(\w+),", (ROOT / "guest-driver/hooks/hooks.h").read_text(), re.MULTILINE
        )
    )
}
# Bits that are set when all hooks are installed.
HOOKS = sum(
    HOOK_BITS[name]
    for name in (
        "removed",
        "free",
        "dirty",
        "mount",
        "unmount",
        "fadvise",
        "drop_slab",
        "reclaim",
        "migrate",
        "bio",
    )
)

# The driver's deadline in tests, scaled for slow machines. It is long enough for an answer to a
# guest under TCG. If a page arrives later, the driver reads it from the disk.
DEADLINE_MAX_MS = 1000  # the maximum of the module's parameter deadline_ms
DEADLINE_MS = min(DEADLINE_MAX_MS, int(scaled(200)))
# Module parameter for tests that expect a wrong page. The deadline is the longest one, because the
# driver discards pages that are late, and the test would then not find the fault.
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
    """Creates a VM with the module, the torture program and a disk "data" with an empty ext4.

    `more` has fields of Config, for example other disks.
    """
    files = {
        MODULE: module,
        TORTURE: guest_program(TESTS / "guest/torture.c"),
        **more.pop("files", {}),
    }
    name = more.get("name", "vm1")
    if "disks" not in more:
        image = disk.ext4(session.directory / f"{name}.img", DISK_BYTES)
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
    """Mounts the data disk, loads the module and waits until the driver caches the disk's files."""
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
    """Boots a VM, loads the driver, and returns the guest when the driver caches files.

    Without `tmem`, also starts a daemon.
    """
    if tmem is None:
        # With retained pages, the driver could find the fault of a removed check first, and block
        # the mount before the test finds a wrong byte.
        properties = {"retain": "off"} if "test_blocks_without" in parameters else {}
        tmem = Tmem(start_daemon(session).socket("vm1"), properties=properties)
    if "disks" not in more:
        image = fs.make(session.directory / "data.img", DISK_BYTES)
        more["disks"] = [disk.Disk("data", image)]
    more.setdefault("modules", list(fs.modules))
    guest = driver_vm(session, kernel, module, tmem, **more).start()
    load(guest, parameters, fs=fs)
    return guest


def wait_served(guest: Guest) -> None:
    """Waits until the driver puts pages of the mount.

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
    """Waits until the driver's state begins with `begins`, and returns the state.

    The message of an error has the state. A poisoned driver never leaves that state, so the wait
    for another state then fails at once. The wait for "on" fails if the driver has found a wrong
    page and blocks its mount.
    """
    last = ""

    def found() -> bool:
        nonlocal last
        last = state(guest)
        if last.startswith("poisoned") and not begins.startswith("poisoned"):
            raise HarnessError(
                f"the driver is poisoned and can no longer reach the state '{begins}'"
            )
        if begins == "on" and stats(guest)["mismatches"]:
            raise HarnessError(f"the driver has found a wrong page; the state is '{last}'")
        return last.startswith(begins)

    try:
        until(found, seconds, f"the driver's state begins with '{begins}'")
    except HarnessError as error:
        raise HarnessError(f"{error}; the state is '{last}'\n{stats(guest)}") from None
    return last


def wait_blocked(guest: Guest, reason: str) -> None:
    """Waits until the driver blocks a mount because a page was wrong, and stays on."""

    def blocked() -> bool:
        return f"blocked: {reason}" in guest.sh(f"cat {SYSFS}/mounts/*/state")

    until(blocked, ONLINE_SECONDS, f"a mount is blocked: {reason}")
    assert is_on(guest)


def parameter(guest: Guest, name: str) -> str:
    """Returns the value of a parameter of the module."""
    return guest.read(f"{PARAMETERS}/{name}")


def set_parameter(guest: Guest, name: str, value: str) -> None:
    guest.sh(f"echo '{value}' >{PARAMETERS}/{name}")


class Hold:
    """Makes the next task that reaches a named place in the driver's code wait there.

    Only a module that was built for tests has such places.
    """

    def __init__(self, guest: Guest, place: str) -> None:
        self.guest = guest
        self.name = f"test_hold_{place}"
        set_parameter(guest, self.name, "1")

    def wait(self) -> None:
        """Waits until a task has reached the named place and waits there."""

        def held() -> bool:
            return self.guest.read(f"{PARAMETERS}/{self.name}") == "2"

        until(held, HELD_SECONDS, f"a task waits at {self.name}")

    def release(self) -> None:
        set_parameter(self.guest, self.name, "0")


def stats(guest: Guest) -> dict[str, int]:
    """Returns all counters of the driver."""
    return counters(guest)


def limit_index(guest: Guest, limit: int) -> int:
    """Empties the index and the page cache, and gives entries `limit` bytes of memory.

    Returns the memory of the empty index in bytes, which has only its hash table.
    """
    switch = f"{SYSFS}/fs/ext4/enabled"
    guest.sh(f"echo 0 >{switch}; echo 1 >/proc/sys/vm/drop_caches", 60)
    until(lambda: stats(guest)["index_pages"] == 0, 10, "the index is empty")
    table = stats(guest)["index_bytes"]
    guest.sh(f"echo 1 >{switch}")
    set_parameter(guest, "test_index_bytes", str(table + limit))
    return table


def kept_pages(counters: dict[str, int]) -> int:
    """Returns the number of evicted pages that the driver has put or referred to by a REF.

    With retain=on, a page that is evicted again unchanged is not put again.
    """
    return counters["puts"] + counters["refs"]


def growth(before: dict[str, int], after: dict[str, int]) -> Counter[str]:
    """Returns the change of each counter that changed, and 0 for every other counter."""
    return Counter(
        {name: after[name] - before[name] for name in after if after[name] != before[name]}
    )


def settle(guest: Guest) -> dict[str, int]:
    """Waits until the host has answered all puts; returns the driver's counters."""
    counters: dict[str, int] = {}

    def settled() -> bool:
        nonlocal counters
        counters = stats(guest)
        answered = sum(counters[f"puts_{how}"] for how in ("stored", "refused", "unanswered"))
        return counters["puts"] == answered

    until(settled, SETTLE_SECONDS, "the host answers all puts")
    return counters


def evict(guest: Guest, files: list[str]) -> dict[str, int]:
    """Reads and evicts files one by one: each fits the put ring. Returns the driver's counters."""
    for path in files:
        guest.sh(f"cat {path} >/dev/null && sync && echo 1 >/proc/sys/vm/drop_caches", 60)
        settle(guest)
    return stats(guest)


def checksums(guest: Guest, files: list[str], seconds: float = 120) -> dict[str, str]:
    """Reads files in the given order, and returns the SHA-256 of each."""
    lines = guest.sh(f"sha256sum {' '.join(files)}", seconds).splitlines()
    return {path: digest for digest, path in (line.split() for line in lines)}


def check_result(guest: Guest, command: str, status: int, text: str) -> dict[str, int]:
    """Returns the numbers of the last line that the torture program printed.

    Raises if the program found a wrong byte (`status` is not 0).
    """
    if status != 0:
        raise HarnessError(
            f"'{command}' ended with status {status}:\n{text[-6000:]}\n"
            f"state {state(guest)}\n{stats(guest)}"
        )
    last = text.strip().splitlines()[-1]
    assert last.startswith("TORTURE ") and last.endswith(" done ok"), last
    print(last)
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", last)}


class LastingTorture:
    """Runs the torture program in a VM again and again until finish().

    The runs continue while the VM is migrated, which ends the connection to the guest's agent. So
    each method gets a Guest with a connection that works at that time.
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

    def has_ended(self, guest: Guest) -> bool:
        """Returns whether the runs have ended.

        Before finish() they end only because of a wrong byte or another failure.
        """
        return guest.run(f"[ -s {self.STATUS} ]").status == 0

    def finish(self, guest: Guest, seconds: float = 300) -> dict[str, int]:
        """Waits for the end of the current run, and returns the numbers of its last line.

        Raises if any run found a wrong byte.
        """
        guest.sh(f"touch {self.ENOUGH}")
        until(lambda: self.has_ended(guest), seconds, "the torture program ends")
        text = guest.get(self.OUTPUT).decode(errors="replace")
        return check_result(guest, self.command, int(guest.read(self.STATUS)), text)


class Torture:
    """A run of the torture program in a guest, on files of the directory `where`."""

    def __init__(
        self, guest: Guest, arguments: str, seconds: float = 300, where: str = WHERE
    ) -> None:
        self.guest = guest
        self.command = f"{TORTURE} {arguments} {where}"
        self.job: Job = guest.start(self.command, seconds)

    def finish(self) -> dict[str, int]:
        """Waits for the end of the run and returns the numbers of its last line of output.

        Raises if the program found a wrong byte.
        """
        done = self.job.wait()
        return check_result(self.guest, self.command, done.status, done.text)

    def expect_mismatch(self) -> str:
        """Waits for the end of the run, which must find a wrong byte, and returns its output."""
        done = self.job.wait()
        assert done.status == 1, (
            f"'{self.command}' ended with status {done.status}, not 1:\n{done.text[-6000:]}"
        )
        assert "TORTURE MISMATCH" in done.text, done.text[-6000:]
        return done.text
