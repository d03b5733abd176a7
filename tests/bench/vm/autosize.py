# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures the memory that guests with `tmem-guest autosize` return, and its cost for them.

Two guests under QEMU read their files and are idle afterwards, the second one after the first. Half
of the files are the same in both. The first guest then reads its files again: from the pool, from
its page cache, and from the disk. Its emulated processor limits these times.

With --native, loads of native guests run with and without the service (sizing.py).
"""

from __future__ import annotations

import argparse
import time

from bench.vm import sizing
from bench.vm.demo import Trees, boot, choose, walk
from bench.vm.idle import (
    BALLOON,
    CGROUPS,
    COMMAND,
    READ,
    READ_SECONDS,
    allocated_bytes,
    files,
)
from bench.vm.output import Progress, size_text, table
from harness import disk, kernel, module
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

NAMES = ("first", "second")
RAM_BYTES = 1024 * MIB
SET_BYTES = 700 * MIB
COMMON = 0.5  # fraction of each guest's files that the other guest has, too
POOL = "2GiB"
IDLE_SECONDS = 180.0
FREED, FREED_BYTES = "/tmp/freed", 300 * MIB
REPORT_SECONDS = 40.0  # time in which the guest reports freed memory, see docs/autosize.md
ENABLED = "/sys/kernel/virtio_tmem/fs/ext4/enabled"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kernel", default="6.12", choices=kernel.SERIES, help="kernel of the guests in QEMU"
    )
    command.add_argument("--native", action="store_true", help="measure loads of native guests")


def read_all(vm: Vm) -> float:
    """Reads all files of a guest; returns the seconds."""
    begin = time.monotonic()
    vm.guest.sh(READ, READ_SECONDS)
    return time.monotonic() - begin


def wait(seconds: float, what: str, progress: Progress) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        progress.show(f"{what}: {left:.0f} s left")
        time.sleep(min(1.0, left))


def measure_idle(vm: Vm, daemon: Daemon, progress: Progress) -> tuple[int, int, int]:
    """Lets a guest read its files and be idle. Returns its memory before and after, in bytes.

    The third value is the memory that the pool takes for its pages.
    """
    guest, held = vm.guest, daemon.stats()["pool"]["held_bytes"]
    guest.sh(f"mkdir -p /run && mount -t cgroup2 none {CGROUPS}")
    guest.sh(f"{COMMAND} autosize >/tmp/autosize.log 2>&1 </dev/null &")
    progress.step(f"{vm.name}: reads {size_text(SET_BYTES)}")
    read_all(vm)
    before = allocated_bytes(vm)
    wait(IDLE_SECONDS, f"{vm.name} is idle", progress)
    after = allocated_bytes(vm)
    status = guest.sh(f"{COMMAND} autosize --status").strip().replace("\n", "; ")
    progress.step(f"{vm.name}: {size_text(before)}, then {size_text(after)}; {status}")
    held = daemon.stats()["pool"]["held_bytes"] - held
    tenant = next(tenant for tenant in daemon.stats()["vms"] if tenant["name"] == vm.name)
    forms = ("pages", "nursery_pages", "shared_pages", "compressed_bytes")
    pages = ", ".join(f"{form} {tenant[form]}" for form in forms)
    progress.step(f"{vm.name}: {size_text(held)} of the pool; {pages}")
    return before, after, held


def measure_freed_share(vm: Vm, progress: Progress) -> float:
    """Returns the share of freed memory that reaches the host within REPORT_SECONDS."""
    guest = vm.guest
    guest.sh(f"dd if=/dev/zero of={FREED} bs=1M count={FREED_BYTES // MIB} 2>&1", READ_SECONDS)
    full = allocated_bytes(vm)
    guest.sh(f"rm {FREED}")
    wait(REPORT_SECONDS, f"{vm.name} reports free memory", progress)
    return (full - allocated_bytes(vm)) / FREED_BYTES


def measure_reads(vm: Vm, progress: Progress) -> tuple[float, float, float]:
    """Returns the seconds of a read of all files from the pool, the page cache and the disk."""
    guest = vm.guest
    progress.step(f"{vm.name}: reads its files again")
    guest.sh("kill $(pidof tmem-guest)")
    pool = read_all(vm)
    cached = read_all(vm)
    guest.sh(f"echo 0 >{ENABLED}; echo 3 >/proc/sys/vm/drop_caches")
    return pool, cached, read_all(vm)


def measure_emulated(series: str, progress: Progress) -> dict[str, float]:
    """Measures guests in QEMU; returns the figures by their keys."""
    chosen = kernel.prepare(series)
    driver = module.build(chosen)
    with Session() as session:
        progress.step(f"two trees of {size_text(SET_BYTES)} from this machine's /usr, half common")
        staged = Trees(session.directory / "trees")
        images = {}
        for name, names in zip(NAMES, choose(list(walk()), 2, SET_BYTES, COMMON), strict=True):
            tree, _ = staged.stage(name, names)
            images[name] = disk.ext4(session.directory / f"{name}.img", 2 * SET_BYTES, tree)
        tenants = [Tenant(name, trust_domain="all") for name in NAMES]
        daemon = session.daemon(*tenants, pool_size=POOL)
        daemon.start()
        vms = {
            name: session.vm(
                Config(
                    kernel=chosen,
                    name=name,
                    memory_bytes=RAM_BYTES,
                    disks=[Disk("data", image, read_only=True, throttle=disk.CLOUD_VOLUME)],
                    tmem=Tmem(daemon.socket(name)),
                    files={"/virtio_tmem.ko": driver, **files()},
                    modules=["virtio_balloon"],
                    arguments=BALLOON,
                )
            )
            for name, image in images.items()
        }
        found = {}
        for name, vm in vms.items():
            boot({name: vm}, True)
            if name == NAMES[0]:
                new_share = measure_freed_share(vm, progress)
            found[name] = measure_idle(vm, daemon, progress)
        counters = module.counters(vms["first"].guest)
        if not counters["puts_eligible"]:
            raise HarnessError("first: autosize has put no page into the pool")
        share = measure_freed_share(vms["second"], progress)
        pool_s, cached_s, disk_s = measure_reads(vms["first"], progress)

    before, after, held = found["first"]
    both = [sum(values) for values in zip(*found.values(), strict=True)]
    return {
        "returned_fraction": after / before,
        "net_fraction": (after + held) / before,
        "net_fraction_common": (both[1] + both[2]) / both[0],
        "fpr_share": new_share,
        "fpr_share_used": share,
        "autosize_lost_fraction": counters["puts_lost"] / counters["puts_eligible"],
        "wake_cached_ratio": pool_s / cached_s,
        "wake_disk_ratio": disk_s / pool_s,
    }


MEANINGS = {
    "returned_fraction": ("memory on the host, after / before", "≤ 0.40"),
    "net_fraction": ("the same with the pool's memory for the guest", "≤ 0.70"),
    "net_fraction_common": ("the same for two guests, half of their files common", "≤ 0.50"),
    "fpr_share": (f"freed memory that is back in {REPORT_SECONDS:.0f} s, new guest", "≥ 0.95"),
    "fpr_share_used": ("the same in a guest whose free memory is scattered", "reported"),
    "autosize_lost_fraction": ("evicted pages that did not reach the pool", "≤ 0.01"),
    "wake_cached_ratio": ("files read again: pool / page cache", "≤ 2"),
    "wake_disk_ratio": ("files read again: disk / pool", "≥ 3"),
    "slowdown": ("time with the service / without it", "≤ 1.03"),
    "psi_some_percent": ("time in which tasks waited for memory, more than without it", "≤ 0.5"),
}


def run(options: argparse.Namespace) -> int:
    progress = Progress()
    found = sizing.run(progress) if options.native else measure_emulated(options.kernel, progress)
    progress.step("done")
    cells = [["key", "meaning", "value", "target"]]
    for key, value in found.items():
        meaning = MEANINGS[max(filter(key.startswith, MEANINGS), key=len)]
        cells.append([key, meaning[0], f"{value:.3f}", meaning[1]])
    print("\n" + table(cells))
    return 0
