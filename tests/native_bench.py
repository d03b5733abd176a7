# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Disks, daemons and guests that the steps of `make bench-native` use (bench_native.py,
bench_retain.py)."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench_guest import (
    BATCH_BYTES,
    BENCH,
    SEED,
    UNHOOKED,
    UNHOOKED_KIND,
    Machine,
    Row,
    make_image,
)
from demo import Progress
from harness import disk, native
from harness.daemon import Daemon
from harness.disk import Disk
from harness.host_use import processor_seconds
from harness.native import NativeConfig, NativeVm
from harness.paths import TESTS, guest_program
from harness.session import Session
from harness.vm import MIB
from harness.wait import until

RAM_BYTES = 192 * MIB
POOL_BYTES = 512 * MIB  # memory of the pool for each guest
SET_BYTES = 288 * MIB  # 1.5 times the RAM; it fits RAM and pool
CACHED_BYTES = 32 * MIB  # small enough to stay in the page cache
BLOCKS_BYTES = 64 * MIB  # this file is read in random order, in blocks of one size at a time
FILLER_BYTES = 4 * MIB  # fills the put ring with other pages, so no get is answered from it
DATA_DISK_BYTES = 512 * MIB
OTHER_DISK_BYTES = 112 * MIB
GIB = 1 << 30
REFUSALS = "refused_"  # prefix of tmemd's counters of refused puts
IDLE_SECONDS = 0.05  # tmemd is idle if it used no tick of 10 ms in this time
# Comparing hits with the disk is switched off: it would read the disk while a get is measured.
# Most steps measure copies: with retained pages, few evicted pages are copied.
PARAMETERS = "verify_every=0 retain=0"


def shown(rows: list[Row]) -> list[Row]:
    """Leaves out reasons for refused or skipped puts whose count is 0."""
    return [row for row in rows if row.value or not row.key.startswith(("puts_", REFUSALS))]


class NativeBench:
    """Disks, daemons and guests of one run, and the rows of its report."""

    def __init__(self, session: Session, progress: Progress, divisor: int = 1) -> None:
        self.session = session
        self.progress = progress
        self.divisor = divisor
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.ticks_per_us = 0.0
        self._shown = 0
        self._files = {BENCH: guest_program(TESTS / "guest/bench.c")}
        native.build()
        progress.step("disks: ext4 and ext3, each of 3,000 IOPS and 125 MB/s")
        source = random.Random(SEED)
        sizes = {
            "set": SET_BYTES,
            "cached": CACHED_BYTES,
            "batch": BATCH_BYTES,
            "blocks": BLOCKS_BYTES,
            "filler": FILLER_BYTES,
        }
        self.data = make_image(session.directory / "data.img", DATA_DISK_BYTES, sizes, source)
        sizes = {"blocks": BLOCKS_BYTES, "batch": BATCH_BYTES}
        path = session.directory / "other.img"
        self.other = make_image(path, OTHER_DISK_BYTES, sizes, source, "-t", UNHOOKED_KIND)

    def times(self, count: int) -> int:
        return max(1, count // self.divisor)

    def saying(self, what: str, repeat: int) -> Callable[[int], None]:
        return lambda number: self.progress.show(f"{what}: {number} of {repeat}")

    def add(self, rows: Iterable[Row]) -> None:
        """Appends rows and prints them at once."""
        self.rows += rows
        for row in shown(self.rows[self._shown :]):
            self.progress.step("  " + "  ".join(cell for cell in row.cells()[1:] if cell))
        self._shown = len(self.rows)

    def daemon(self, *names: str) -> Daemon:
        size = f"{POOL_BYTES * len(names) // MIB}MiB"
        daemon = self.session.daemon(*names, pool_size=size)
        daemon.start()
        return daemon

    def vm(
        self,
        name: str,
        daemon: Daemon | None,
        parameters: str = PARAMETERS,
        throttle: disk.Throttle | None = disk.CLOUD_VOLUME,
    ) -> NativeVm:
        """Creates a guest. Its disks without a throttle are in the host's page cache."""

        def of(disk_name: str, path: Path) -> Disk:
            return Disk(disk_name, path, read_only=True, throttle=throttle)

        config = NativeConfig(
            name=name,
            memory_bytes=RAM_BYTES,
            disks=[of("data", self.data), of("other", self.other)],
            tmem=daemon.socket(name) if daemon else None,
            files=self._files,
            parameters=parameters if daemon else "",
            direct=throttle is not None,
        )
        return self.session.native_vm(config)

    def machine(
        self,
        name: str,
        daemon: Daemon | None,
        parameters: str = PARAMETERS,
        throttle: disk.Throttle | None = disk.CLOUD_VOLUME,
    ) -> Machine:
        """Boots a guest and mounts its disks."""
        machine = Machine(self.vm(name, daemon, parameters, throttle), daemon is not None)
        machine.vm.start()
        machine.guest.mount("other", UNHOOKED, UNHOOKED_KIND, "ro")
        machine.mount()
        if not self.ticks_per_us:
            self._measure_clock(machine)
        return machine

    def _measure_clock(self, machine: Machine) -> None:
        speeds = []
        for _ in range(3):
            _, ticks, nanoseconds = machine.guest.sh(f"{BENCH} clock").split()
            speeds.append(int(ticks) / int(nanoseconds) * 1000)
        self.ticks_per_us = statistics.median(speeds)
        self.facts["tsc_mhz"] = round(self.ticks_per_us, 1)
        self.facts["guest_kernel"] = machine.guest.sh("uname -r").strip()

    @staticmethod
    def idle(daemon: Daemon) -> None:
        """Waits until tmemd has finished its background work."""

        def idle() -> bool:
            before = processor_seconds(daemon.process.pid)
            time.sleep(IDLE_SECONDS)
            return processor_seconds(daemon.process.pid) == before

        until(idle, 30, "tmemd has no background work")

    @staticmethod
    def end(machine: Machine, daemon: Daemon) -> None:
        machine.vm.check_console()
        machine.vm.stop()
        daemon.stop()
