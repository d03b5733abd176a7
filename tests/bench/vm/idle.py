# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures the memory that an idle guest costs the host, and how fast it reads its files again.

The guest reads all files of its disk. `tmem-guest autosize` then moves their pages to the pool, and
the balloon device returns the free memory to the host. For comparison, the guest also evicts as
many pages without the pool, and reads its files from the disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.vm.output import size_text
from harness import module
from harness.daemon import Daemon
from harness.paths import ROOT, HarnessError, guest_program
from harness.vm import MIB, Vm

NAME = "idle"
RAM_BYTES = 1024 * MIB
BALLOON = ["-device", "virtio-balloon-pci,free-page-reporting=on"]
COMMAND = "/bin/tmem-guest"
CGROUPS = "/sys/fs/cgroup"
READ = "cd /data && find . -xdev -type f -print0 | xargs -0 cat >/dev/null"
READ_SECONDS = 300.0  # longest time of a read of all files, and of the return of memory
# The guest reports free memory every 2 s. It has returned all when none follows in this time.
STEADY_SECONDS = 8.0
POLL_SECONDS = 0.5


@dataclass
class Idle:
    """Memory of the guest on the host, and times in which the guest reads all files again."""

    before_bytes: int
    after_bytes: int
    pool_bytes: int  # memory that the pool takes for the guest's pages
    hits: int
    pool_seconds: float
    disk_read_bytes: int  # bytes that the guest reads from the disk without the pool
    disk_seconds: float

    def summary(self) -> str:
        return (
            f"an idle guest of {size_text(RAM_BYTES)}, before and after tmem-guest autosize:\n"
            f"  its memory on the host  {size_text(self.before_bytes)}; then "
            f"{size_text(self.after_bytes)}, and {size_text(self.pool_bytes)} of the pool\n"
            f"  reads all files again   in {self.pool_seconds:.1f} s "
            f"({size_text(self.hits * 4096)} from the pool); "
            f"without the pool in {self.disk_seconds:.1f} s "
            f"({size_text(self.disk_read_bytes)} from the disk):\n"
            f"                          {self.disk_seconds / self.pool_seconds:.2f} times "
            "the disk's speed"
        )


def files() -> dict[str, Path]:
    """Returns the programs that the guest needs."""
    return {COMMAND: guest_program(ROOT / "guest-driver/tools/tmem-guest.c")}


def allocated_bytes(vm: Vm) -> int:
    """Returns the bytes that the host has allocated for a VM's memory."""
    for path in Path(f"/proc/{vm.process.pid}/fd").iterdir():
        if "memfd:memory-backend" in str(path.readlink()):
            return path.stat().st_blocks * 512
    raise HarnessError(f"{vm.name}: QEMU has no memfd")


def wait_until_steady(vm: Vm) -> int:
    """Waits until the guest returns no more memory. Returns the memory that is left in bytes."""
    last, since = allocated_bytes(vm), time.monotonic()
    end = since + READ_SECONDS
    while time.monotonic() < min(since + STEADY_SECONDS, end):
        time.sleep(POLL_SECONDS)
        if (now := allocated_bytes(vm)) < last:
            last, since = now, time.monotonic()
    return last


def measure(vm: Vm, daemon: Daemon, say: Callable[[str], None]) -> Idle:
    """Measures how a VM returns memory, and returns the figures.

    The driver of the VM is on, and the disk is mounted at /data.
    """

    def read_bytes() -> int:
        return int(vm.block_stat("data")["rd_bytes"])

    def read_again() -> float:
        begin = time.monotonic()
        vm.guest.sh(READ, READ_SECONDS)
        return time.monotonic() - begin

    guest = vm.guest
    guest.sh(f"mkdir -p /run && mount -t cgroup2 none {CGROUPS}")
    say("the guest reads its files")
    read_again()
    before_bytes, held_bytes = allocated_bytes(vm), daemon.stats()["pool"]["held_bytes"]
    say("the guest returns memory")
    answer = json.loads(
        guest.sh(f"{COMMAND} --json autosize --once={RAM_BYTES}", READ_SECONDS),
    )
    after_bytes = wait_until_steady(vm)
    pool_bytes = daemon.stats()["pool"]["held_bytes"] - held_bytes
    say("the guest reads its files again")
    hits = module.counters(guest)["hits"]
    pool_seconds = read_again()
    hits = module.counters(guest)["hits"] - hits
    say("the guest reads its files from the disk")
    guest.sh("echo 0 >/sys/kernel/virtio_tmem/fs/ext4/enabled")
    # The write fails if the kernel reclaims a little less.
    returned = int(answer["returned_bytes"])
    guest.run(f"echo '{returned} swappiness=0' >{CGROUPS}/memory.reclaim", READ_SECONDS)
    from_disk = read_bytes()
    disk_seconds = read_again()
    return Idle(
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        pool_bytes=pool_bytes,
        hits=hits,
        pool_seconds=pool_seconds,
        disk_read_bytes=read_bytes() - from_disk,
        disk_seconds=disk_seconds,
    )
