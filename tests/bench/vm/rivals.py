# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares ways to use equally many bytes of a host for the files of several guests.

The guests are clones: overlays on one base image. All arms run at the same time and are measured in
turns. The pool's guests boot first. Then each rival gets at least as many bytes as these guests,
their disks' processes and tmemd use together at their peak in the warm-up.

Native guests are compared with guests that have more RAM, swap in zram, or the host's page cache.
Guests in QEMU are compared with guests that have more RAM, with KSM and without it: KSM merges
private memory only, and the memory of native guests is shared. All guests in QEMU together need
5 GiB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vm import disks
from bench.vm.guests import (
    LOADS,
    REASONS,
    TOTALS,
    Box,
    Lab,
    Native,
    Qemu,
    Spec,
    fio_command,
    fio_report,
)
from bench.vm.host_bytes import (
    MemoryGroup,
    Peak,
    disk_read_bytes,
    family_seconds,
    swapped_bytes,
    used_bytes,
)
from bench.vm.machine import DATA
from bench.vm.results import Measured
from bench.vm.workloads import WARM_UPS, Workload
from harness import disk, storage
from harness.daemon import Daemon
from harness.disk import Disk, Throttle
from harness.ksm import Ksm
from harness.native import NativeVm
from harness.paths import HarnessError
from harness.vm import MIB, Vm

OVERLAPS = (0.0, 0.5, 0.9)
GUESTS = 4
RAM_BYTES = 128 * MIB
SET_BYTES = 192 * MIB
POOL_BYTES = 160 * MIB
COLD_MIB = 32  # anonymous memory that each guest writes once and never uses again
BLOCK_BYTES = 16 << 10
COUNT = 5000  # requests of each guest in each phase
THETA = 0.6
WRITE_SHARE = 0.2
PHASES = (0.0, WRITE_SHARE)
# A rival gets this much more host memory for each guest, because the guests with the pool may later
# use more than in the warm-up. The RAM of a rival's guests is also rounded up to 1 MiB.
SPARE_BYTES = 2 * MIB

POOL, COPY, RAM, ZRAM, CACHE, KSM = "pool", "pool_copy", "ram", "zram", "host_cache", "ksm"
NONE = "none"  # guests with the same RAM and without the pool; only `sizes` measures them
# The fastest scan that ksmtuned ever sets. Distributions use ksmtuned to control KSM.
KSM_PAGES, KSM_SLEEP_MS = 1250, 10
KSM_SECONDS = 120  # longest time for KSM to find all equal pages
# KSM frees memory during the warm-up. The guests with KSM boot again with more RAM if they use less
# than the fraction KSM_EQUAL of the host bytes of the pool's arm, at most KSM_BOOTS times.
KSM_BOOTS, KSM_EQUAL = 3, 0.99


@dataclass(frozen=True)
class Arm:
    """A way to use the host's memory."""

    key: str
    what: str
    hosts: tuple[type, ...] = (Native,)


ARMS = (
    Arm(POOL, "this project", (Native, Qemu)),
    Arm(COPY, "this project, without retained pages"),
    Arm(RAM, "more RAM for the guests", (Native, Qemu)),
    Arm(ZRAM, "more RAM, and swap in zram"),
    Arm(CACHE, "the host's page cache (cache=writeback)"),
    Arm(KSM, "more RAM, and KSM", (Qemu,)),
    Arm(NONE, "neither pool nor more memory", ()),
)


@dataclass
class Fleet:
    """The running guests of an arm (a way to use the host's memory)."""

    boxes: list[Box]
    daemon: Daemon | None = None
    group: MemoryGroup | None = None
    ksm: Ksm | None = None
    warm_bytes: int = 0  # peak of the host's bytes in the warm-up

    def disk_processes(self, *names: str) -> list[int]:
        """Returns the processes that serve the guests' disks, or only those with these names.

        QEMU serves its disks itself.
        """
        return [
            export.process.pid
            for box in self.boxes
            if isinstance(box.vm, NativeVm)
            for export in box.vm.exports
            if not names or export.disk.name in names
        ]

    def host_bytes(self) -> int:
        pids = [box.vm.process.pid for box in self.boxes] + self.disk_processes()
        if self.daemon:
            pids.append(self.daemon.process.pid)
        cached = self.group.cached_bytes() if self.group else 0
        return used_bytes(pids) + cached + (self.ksm.own_bytes() if self.ksm else 0)

    def read_bytes(self) -> int:
        """Returns the bytes read from the disks with the files, without the disks with requests."""
        vms = [box.vm for box in self.boxes if isinstance(box.vm, Vm)]
        in_qemu = sum(int(vm.block_stat("data")["rd_bytes"]) for vm in vms)
        return in_qemu + sum(disk_read_bytes(pid) for pid in self.disk_processes("data"))

    def guest_seconds(self) -> float:
        """Returns the processor time that the guests have used so far."""
        return sum(family_seconds(box.vm.process.pid) for box in self.boxes)

    def counters(self) -> dict[str, int]:
        if not self.daemon:
            return {}
        found = [box.all_counters() for box in self.boxes]
        names = [name for name in found[0] if name in TOTALS or name.startswith(REASONS)]
        return {name: sum(one[name] for one in found) for name in names}


def _load(guest: int, repetition: int, write_share: float) -> str:
    """Returns the name of the file with a guest's requests."""
    return f"guest{guest}-{repetition}-{write_share:g}"


class Rivals(Workload):
    """Workload that compares all arms, for guests whose files have a given part in common."""

    figure = "disk_mib"
    repetitions = 5
    seconds = 240
    compared = tuple(arm.key for arm in ARMS)  # arms that are measured, if the host can run them

    def __init__(
        self, overlap: float, host: type = Native, *, pool_bytes: int = POOL_BYTES
    ) -> None:
        self.overlap = overlap
        self.pool_bytes = pool_bytes
        self._use_arms(host)
        self.key = f"rivals_{round(overlap * 100)}"
        self.title = f"equal host bytes, {overlap:.0%} of the files common"
        self.parameters: dict[str, Any] = {
            "guests": GUESTS,
            "RAM with the pool": f"{RAM_BYTES // MIB} MiB each",
            "pool": f"{pool_bytes // MIB} MiB, one trust domain",
            "file": f"{SET_BYTES // MIB} MiB each, real contents of /usr; {overlap:.0%} common",
            "slack": f"each rival gets {SPARE_BYTES // MIB} MiB more for each guest than the "
            "guests with the pool use at their peak in the warm-up",
            "cold memory": f"{COLD_MIB} MiB of a tmpfs in each guest, never used again",
            "disk": "ext4 on a qcow2 overlay over one base image; 3,000 IOPS and 125 MB/s for each "
            "guest, and four times as much for all together with the host's page cache",
            "load": f"fio, {COUNT:,} requests of 16 KiB by each guest, psync, all at the same time",
            "distribution": f"Zipf, exponent {THETA}, equal in all guests",
        }
        self._zipf = disks.Zipf(SET_BYTES // BLOCK_BYTES, THETA)
        self.fleets: dict[str, Fleet] = {}
        self._ends: list[Callable[[], None]] = []

    def _use_arms(self, host: type) -> None:
        self.arms = tuple(arm.key for arm in ARMS if host in arm.hosts and arm.key in self.compared)

    def prepare(self, lab: Lab) -> None:
        self._lab = lab
        self._use_arms(type(lab.host))
        self._base, self._overlays = disks.make_clones(
            lab.directory / "images", GUESTS, SET_BYTES, self.overlap
        )
        storage.forget_cached(self._base)
        self._loads = disks.make_loads_image(lab.directory / "loads.img", self._requests())
        self._boot_arms()

    def _boot_arms(self) -> None:
        """Boots the guests of all arms. Those with the pool boot first."""
        pool = self._boot(POOL, RAM_BYTES)
        ours = pool.warm_bytes
        self._swapped = swapped_bytes()
        if isinstance(self._lab.host, Qemu):
            self._boot_in_qemu(pool)
            return
        # A guest fills all of its RAM with its page cache. So its RAM is about the host memory that
        # the guest and the processes of its disks use.
        more = -(-ours // GUESTS // MIB) * MIB + SPARE_BYTES
        whole = ours + GUESTS * SPARE_BYTES
        if COPY in self.arms:
            self._boot(COPY, RAM_BYTES)
        self._boot(RAM, more)
        self._boot(ZRAM, more)
        self._boot(CACHE, RAM_BYTES, whole)
        self.parameters["RAM without the pool"] = f"{more // MIB} MiB each"
        self.parameters["with the host's page cache"] = (
            f"RAM of {RAM_BYTES // MIB} MiB each; a control group limits guests, the processes "
            f"of their disks and the page cache of the images together to {whole // MIB} MiB"
        )

    def _boot_in_qemu(self, pool: Fleet) -> None:
        assert pool.daemon
        # QEMU itself takes equally much in all arms. So the rivals get the memory of tmemd as RAM.
        spare = used_bytes([pool.daemon.process.pid])
        more = RAM_BYTES + -(-spare // GUESTS // MIB) * MIB + SPARE_BYTES
        self._boot(RAM, more)
        self.parameters["RAM without the pool"] = f"{more // MIB} MiB each"
        stack = contextlib.ExitStack()
        self._ends.append(stack.close)
        ksm = stack.enter_context(Ksm(KSM_PAGES, KSM_SLEEP_MS))
        for boot in range(KSM_BOOTS):
            fleet = self._boot(KSM, more, ksm=ksm, suffix=str(boot))
            missing = pool.warm_bytes - fleet.warm_bytes
            if missing <= pool.warm_bytes * (1 - KSM_EQUAL) or boot == KSM_BOOTS - 1:
                break
            self._lab.end(fleet.boxes)
            more += -(-missing // GUESTS // MIB) * MIB
        ksm.pause()
        self.parameters["RAM with KSM"] = f"{more // MIB} MiB each"

    def _requests(self) -> dict[str, str]:
        out = {}
        for number in range(GUESTS):
            for repetition in (*WARM_UPS, *range(self.repetitions)):
                for share in PHASES:
                    name = _load(number, repetition, share)
                    blocks = self._zipf.draw(COUNT, name)
                    out[name] = disks.trace(
                        f"{DATA}/{disks.SET}", BLOCK_BYTES, blocks, name, write_share=share
                    )
        return out

    def _boot(
        self,
        arm: str,
        ram_bytes: int,
        memory_bytes: int = 0,
        *,
        ksm: Ksm | None = None,
        suffix: str = "",
    ) -> Fleet:
        """Boots and warms up the guests of an arm, and returns them.

        `suffix` distinguishes repeated boots.
        """
        lab = self._lab
        name = f"{arm}{suffix}"
        directory = lab.directory / name
        directory.mkdir()
        files = [directory / self._base.name]
        os.link(self._base, files[0])
        for overlay in self._overlays:
            files.append(Path(shutil.copyfile(overlay, directory / overlay.name)))
        fleet = self.fleets[arm] = Fleet([], ksm=ksm)
        throttle: Throttle | None = disk.CLOUD_VOLUME
        if arm == CACHE:
            if cached := storage.cached_bytes(self._base):
                raise HarnessError(
                    f"{cached} bytes of an earlier measurement are still in the host's page cache"
                )
            # All guests together have the limits of all disks, because they share the base image.
            one = disk.CLOUD_VOLUME
            fleet.group = MemoryGroup("tmem-proof")
            self._ends.append(fleet.group.remove)
            fleet.group.limit(memory_bytes)
            fleet.group.limit_reads(
                files[0], Throttle(one.iops * GUESTS, one.bytes_per_second * GUESTS)
            )
            throttle = None
        names = [f"{name}x{number}" for number in range(GUESTS)]
        if arm in (POOL, COPY):
            fleet.daemon = lab.start_daemon(*names, pool_bytes=self.pool_bytes, domain="clones")
        specs = [
            Spec(
                name,
                ram_bytes,
                (
                    Disk("data", path, format="qcow2", throttle=throttle),
                    Disk("loads", self._loads, read_only=True),
                ),
                fleet.daemon,
                parameters="retain=0" if arm == COPY else "",
                direct=arm != CACHE,
                merge=None if fleet.daemon else arm == KSM,
            )
            for name, path in zip(names, files[1:], strict=True)
        ]
        # Start the guests and the processes of their disks inside the control group.
        inside = fleet.group.inside() if fleet.group else contextlib.nullcontext()
        with inside:
            fleet.boxes += [lab.boot_guest(spec) for spec in specs]
        self._warm(arm, fleet)
        return fleet

    def _warm(self, arm: str, fleet: Fleet) -> None:
        cold = f"mount -t tmpfs tmpfs /mnt && head -c {COLD_MIB}m {DATA}/{disks.SET} >/mnt/cold"
        swap = (
            "echo lz4 >/sys/block/zram0/comp_algorithm && echo 128M >/sys/block/zram0/disksize && "
            "mkswap /dev/zram0 >/dev/null && swapon /dev/zram0 && echo 100 >/proc/sys/vm/swappiness"
        )
        for box in fleet.boxes:
            box.guest.mount("data", DATA)
            box.mount_loads()
            if arm == ZRAM:
                box.sh(swap)
            box.sh(cold)
        jobs = [box.start(f"cat {DATA}/{disks.SET} >/dev/null") for box in fleet.boxes]
        for job in jobs:
            job.wait().check()
        peak = Peak(fleet.host_bytes)
        with peak:
            for number in WARM_UPS:
                for share in PHASES:
                    self._run_phase(fleet, number, share)
        fleet.warm_bytes = peak.bytes

    def _run_phase(self, fleet: Fleet, repetition: int, write_share: float) -> float:
        """Runs the requests of all guests. Returns the seconds until all have ended."""
        commands = [
            fio_command(
                f"--read_iolog={LOADS}/{_load(number, repetition, write_share)} "
                "--replay_no_stall=1 --ioengine=psync --gtod_reduce=1 --end_fsync=1 "
                "--refill_buffers --buffer_compress_percentage=50"
            )
            for number in range(GUESTS)
        ]
        began = time.monotonic()
        jobs = [box.start(command) for box, command in zip(fleet.boxes, commands, strict=True)]
        reports = [fio_report(job.wait().check().text) for job in jobs]
        seconds = time.monotonic() - began
        done = sum(report[kind]["total_ios"] for report in reports for kind in ("read", "write"))
        if done != COUNT * GUESTS:
            raise HarnessError(f"fio made {done} requests, not {COUNT * GUESTS}")
        return seconds

    def measure(self, arm: str, repetition: int) -> Measured:
        fleet = self.fleets[arm]
        # The arm with the host's page cache leaves dirty pages. Writing them out would delay the
        # arm that is measured after it, which is always the same one.
        os.sync()
        before = fleet.counters()
        out: Measured = {}
        if fleet.ksm:
            fleet.ksm.resume()
            fleet.ksm.settle(KSM_SECONDS)
        peak = Peak(fleet.host_bytes)
        for share, suffix in ((0.0, ""), (WRITE_SHARE, "_writes")):
            read, busy = fleet.read_bytes(), fleet.guest_seconds()
            with peak:
                out[f"seconds{suffix}"] = self._run_phase(fleet, repetition, share)
            out[f"guest_cpu_s{suffix}"] = fleet.guest_seconds() - busy
            out[f"disk_mib{suffix}"] = (fleet.read_bytes() - read) / MIB
        if fleet.ksm:
            fleet.ksm.pause()
        out["host_mib"] = peak.bytes / MIB
        out["host_swap_mib"] = (swapped_bytes() - self._swapped) / MIB
        grown = {name: value - before[name] for name, value in fleet.counters().items()}
        return out | {name: value for name, value in grown.items() if value or name in TOTALS}

    def check(self) -> None:
        """Raises if RAM or pool of a guest has other bytes than its disk."""
        sums = f"sha256sum {DATA}/{disks.SET}"
        for arm in (arm for arm in (POOL, COPY) if arm in self.fleets):
            boxes = self.fleets[arm].boxes
            jobs = [box.start(f"sync; {sums}") for box in boxes]
            cached = [job.wait().check().text for job in jobs]
            for box in boxes:
                # Read from the disk: a new mount has no pages in RAM and none in the pool.
                box.sh(f"umount {DATA}")
                box.guest.mount("data", DATA, options="ro")
            jobs = [box.start(sums) for box in boxes]
            if cached != [job.wait().check().text for job in jobs]:
                raise HarnessError(
                    f"{self.key}, {arm}: the guest read wrong bytes from RAM or the pool"
                )

    def finish(self) -> None:
        for end in self._ends:
            end()
