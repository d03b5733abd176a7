# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Describes the machine that runs a benchmark, and chooses the processors of its processes.

The module also keeps processors from halting while a benchmark runs.

In a virtual machine, a processor that halts exits to the hypervisor, and its next wake-up takes
tens of microseconds. Guests, daemon and disks of a benchmark wake each other up for each request,
so these exits would dominate the figures. The kernel polls instead while the latency limit of
/dev/cpu_dma_latency is 0 (Documentation/power/pm_qos_interface.rst).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pinning:
    """Processors of a benchmark: one for all guests, one for tmemd and the disks' processes.

    None stands for all processors.
    """

    guests: int | None = None
    host: int | None = None


EVERYWHERE = Pinning()


def pinning() -> Pinning:
    """Returns two processors that this process may use, or EVERYWHERE if there is only one.

    A native guest and its tracing process take turns for each system call of the guest. On two
    processors, each turn waits for a wake-up of the other processor, so a system call costs 12 or
    66 µs, as the scheduler places them.
    """
    usable = sorted(os.sched_getaffinity(0))
    return Pinning(usable[0], usable[1]) if len(usable) > 1 else EVERYWHERE


LATENCY_LIMIT = Path("/dev/cpu_dma_latency")
IDLE_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")


def processor_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _host_times() -> tuple[float, float]:
    """Returns the ticks of all processors since boot, and how many the hypervisor took away."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return float(sum(fields)), float(fields[7])  # proc(5): the eighth field is "steal"


@contextmanager
def idle_polling() -> Iterator[str]:
    """Lets idle processors poll until the context ends.

    Yields how processors idle: "poll", or "halt" if this user may not change it or if the kernel
    has no driver for idle processors, which then ignores the limit.
    """
    if not IDLE_DRIVER.exists() or IDLE_DRIVER.read_text().strip() == "none":
        yield "halt"
        return
    try:
        limit = LATENCY_LIMIT.open("wb", buffering=0)
    except OSError:
        yield "halt"
        return
    with limit:
        # The kernel drops the limit when the file is closed. The value has 32 bits.
        limit.write(bytes(4))
        yield "poll"


@contextmanager
def polling_with_facts() -> Iterator[dict[str, Any]]:
    """Lets idle processors poll, and yields facts about the machine.

    The facts are complete when the context ends, also by an exception: load averages, and the share
    of the processor time that the hypervisor took away meanwhile.
    """
    load, times = os.getloadavg()[0], _host_times()
    with idle_polling() as idle:
        facts: dict[str, Any] = {
            "processor": processor_model(),
            "processors": os.cpu_count(),
            # Without the suffix, which names the builder of the kernel and not its version.
            "host_kernel": platform.release().partition("-")[0],
            "idle_processors": idle,
            "load_1min_before": round(load, 2),
        }
        try:
            yield facts
        finally:
            total, stolen = (now - then for now, then in zip(_host_times(), times, strict=True))
            facts["load_1min_after"] = round(os.getloadavg()[0], 2)
            facts["steal_share"] = round(stolen / total, 4) if total else 0.0
