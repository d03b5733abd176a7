# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures the memory, page tables and processor time that processes of the host use.

If N processes map a page, the kernel counts 1/N of the page for each of them (PSS). The sum over
these processes is one page. This also applies to guest memory that QEMU and tmemd share, and to
pages that KSM merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from harness.paths import HarnessError

KIB = 1024


def _kib(path: Path, name: str) -> int:
    """Returns the bytes that a line such as "Pss:   12 kB" of a file states."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if not found:
        raise HarnessError(f"{path} has no line '{name}'")
    return int(found[1]) * KIB


def mapped_bytes(pids: Iterable[int]) -> int:
    """Returns the memory that the processes map.

    A page that several processes map counts once if `pids` contains all of them.
    """
    return sum(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids)


def page_table_bytes(pids: Iterable[int]) -> int:
    return sum(_kib(Path(f"/proc/{pid}/status"), "VmPTE") for pid in pids)


def processor_seconds(pid: int) -> float:
    """Returns the seconds that a process has used so far, in user and kernel mode."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # proc(5): utime and stime are fields 14 and 15, and the name is field 2.
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
