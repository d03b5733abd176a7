# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Resources of the host that processes use: memory counted once, page tables, processor time.

A page that several processes map counts in each of them by its part (PSS). The sum over all these
processes is one page. This holds for guest memory that QEMU and tmemd share, and for pages that KSM
merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from harness.paths import HarnessError

KIB = 1024


def _kib(path: Path, name: str) -> int:
    """Returns the bytes of a line such as "Pss:   12 kB"."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if not found:
        raise HarnessError(f"{path} has no line '{name}'")
    return int(found[1]) * KIB


def mapped_bytes(pids: Iterable[int]) -> int:
    """Returns the memory that the processes map.

    A page counts once if all its mappers are given.
    """
    return sum(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids)


def page_table_bytes(pids: Iterable[int]) -> int:
    return sum(_kib(Path(f"/proc/{pid}/status"), "VmPTE") for pid in pids)


def processor_seconds(pid: int) -> float:
    """Returns the seconds that a process has used so far, in user and kernel mode."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # proc(5): utime and stime are fields 14 and 15, and the name is field 2.
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
