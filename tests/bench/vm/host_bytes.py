# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Counts the host's memory of processes, and limits the host's page cache with a control group.

Both versions of cgroups work. The program needs the right to create them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.disk import Throttle
from harness.host_use import mapped_bytes, page_table_bytes
from harness.paths import HarnessError
from harness.wait import until

ROOT = Path("/sys/fs/cgroup")


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third one, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def family(pids: Iterable[int]) -> set[int]:
    """Returns these processes and their descendants.

    The processes of a native guest are processes of the host and map the guest's memory.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int(_stat(int(path.name))[1])
                children.setdefault(parent, []).append(int(path.name))
    out, todo = set(), list(pids)
    while todo:
        pid = todo.pop()
        out.add(pid)
        todo += children.get(pid, [])
    return out


def family_seconds(pid: int) -> float:
    """Returns the processor time of a process and of its descendants, also of those that ended.

    The processes of a native guest are processes of the host. The time of a process that has ended
    is in that of the parent that waited for it.
    """
    out = 0.0
    for member in family([pid]):
        with contextlib.suppress(OSError):
            # proc(5): utime, stime, cutime and cstime are fields 14 to 17.
            out += sum(map(int, _stat(member)[11:15])) / os.sysconf("SC_CLK_TCK")
    return out


SYS_KCMP, KCMP_VM = 312, 1  # numbers of the system call kcmp(2) on x86-64
LIBC = ctypes.CDLL(None, use_errno=True)


def same_memory(one: int, other: int) -> bool:
    """Returns whether two processes share their address space.

    The helper processes of a guest in user-mode Linux do.
    """
    found = LIBC.syscall(SYS_KCMP, one, other, KCMP_VM, 0, 0)
    if found < 0 and ctypes.get_errno() != errno.ESRCH:
        raise HarnessError(f"kcmp: {os.strerror(ctypes.get_errno())}")
    return bool(found == 0)


def used_bytes(pids: Iterable[int]) -> int:
    """Returns the memory and page tables of processes, with their descendants.

    A page that several processes map counts in parts (PSS). An address space counts once. Processes
    that end meanwhile count 0.
    """
    out = 0
    counted: list[int] = []
    for pid in sorted(family(pids)):
        if not any(same_memory(pid, other) for other in counted):
            counted.append(pid)
            try:
                out += mapped_bytes([pid]) + page_table_bytes([pid])
            except OSError:
                continue
            except HarnessError:
                if not _has_ended(pid):
                    raise
    return out


def _has_ended(pid: int) -> bool:
    """Returns whether a process has ended. A zombie has files in /proc, but no memory."""
    try:
        return _stat(pid)[0] in "ZX"
    except OSError:
        return True


def swapped_bytes() -> int:
    """Returns the swap space that the host uses."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return (found["SwapTotal"] - found["SwapFree"]) * 1024


class Peak:
    """Context that samples a number of bytes while it is active, and keeps the greatest one."""

    # A sample takes processor time that the guests would use, so there are only two each second.
    PAUSE_SECONDS = 0.5

    def __init__(self, now: Callable[[], int]) -> None:
        self.bytes = 0
        self._now = now

    def __enter__(self) -> None:
        self._end = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self._sampled = self._threads.submit(self._sample)

    def _sample(self) -> None:
        while not self._end.wait(self.PAUSE_SECONDS):
            self.bytes = max(self.bytes, self._now())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._threads.shutdown()
        self._sampled.result()
        self.bytes = max(self.bytes, self._now())


def disk_read_bytes(pid: int) -> int:
    """Returns the bytes that a process has read from block devices."""
    lines = dict(
        line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines()
    )  # proc(5)
    return int(lines["read_bytes"])


def whole_disk(path: Path) -> str:
    """Returns the numbers of the disk that holds a file, such as "254:0"."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not block.exists():
        raise HarnessError(f"{path} is not on a block device, so its reads cannot be limited")
    block = block.resolve()
    if (block / "partition").exists():
        block = block.parent
    return (block / "dev").read_text().strip()


class MemoryGroup:
    """A control group that limits all memory of its processes, and their disk reads.

    The memory includes the host's page cache of the files that they read, and guest memory, which
    the process of a disk may touch first. Only reads that miss the page cache reach the limit of
    the disk.
    """

    def __init__(self, name: str) -> None:
        own = f"{name}-{os.getpid()}"
        self._v2 = (ROOT / "cgroup.controllers").exists()
        if self._v2:
            (ROOT / "cgroup.subtree_control").write_text("+memory +io")
        self._memory = (ROOT if self._v2 else ROOT / "memory") / own
        self._disk = self._memory if self._v2 else ROOT / "blkio" / own
        try:
            for path in self._paths():
                path.mkdir()
        except OSError:
            self.remove()
            raise

    def _paths(self) -> set[Path]:
        return {self._memory, self._disk}

    def process_files(self) -> set[Path]:
        """Returns the files to which the pid of a process is written to move it into the group."""
        return {path / "cgroup.procs" for path in self._paths()}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Moves this process into the control group until the context ends.

        Children that the process starts meanwhile stay in the group.
        """
        before = self._own()
        for path in self.process_files():
            path.write_text(str(os.getpid()))
        try:
            yield
        finally:
            for path in before:
                (path / "cgroup.procs").write_text(str(os.getpid()))

    def _own(self) -> list[Path]:
        """Returns the control groups of this process."""
        out = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if self._v2 and not controllers:
                out.append(ROOT / path.lstrip("/"))
            elif not self._v2 and controllers in ("memory", "blkio"):
                out.append(ROOT / controllers / path.lstrip("/"))
        return out

    def limit(self, count_bytes: int, swap_bytes: int = 0) -> None:
        """Limits the memory, and the swap space. Without swap, only page cache is reclaimed."""
        if self._v2:
            (self._memory / "memory.swap.max").write_text(str(swap_bytes))
            (self._memory / "memory.max").write_text(str(count_bytes))
            return
        if not swap_bytes:
            (self._memory / "memory.swappiness").write_text("0")
        (self._memory / "memory.limit_in_bytes").write_text(str(count_bytes))
        if swap_bytes:
            both = self._memory / "memory.memsw.limit_in_bytes"
            both.write_text(str(count_bytes + swap_bytes))

    def charged_bytes(self) -> int:
        """Returns the bytes of memory that the control group uses, without swap space."""
        name = "memory.current" if self._v2 else "memory.usage_in_bytes"
        return int((self._memory / name).read_text())

    def swapped_bytes(self) -> int:
        """Returns the bytes of swap space that the control group uses."""
        if self._v2:
            return int((self._memory / "memory.swap.current").read_text())
        return self._number("memory.stat", "swap")

    def oom_kills(self) -> int:
        """Returns the number of processes that the kernel has killed because of the limit."""
        return self._number("memory.events" if self._v2 else "memory.oom_control", "oom_kill")

    def _number(self, file: str, name: str) -> int:
        """Returns a number of a file that has a name and a number in each line."""
        lines = (self._memory / file).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}[name]

    def limit_reads(self, path: Path, limits: Throttle) -> None:
        """Limits reads from the disk that holds this file."""
        device = whole_disk(path)
        iops, bps = limits.iops, limits.bytes_per_second
        if self._v2:
            (self._disk / "io.max").write_text(f"{device} riops={iops} rbps={bps}")
        else:
            (self._disk / "blkio.throttle.read_iops_device").write_text(f"{device} {iops}")
            (self._disk / "blkio.throttle.read_bps_device").write_text(f"{device} {bps}")

    def cached_bytes(self) -> int:
        """Returns the bytes of page cache that the control group uses, without guest memory."""
        files = self._number("memory.stat", "file" if self._v2 else "cache")
        return files - self._number("memory.stat", "shmem")

    def remove(self) -> None:
        """Removes the control group, whose processes must have ended."""

        def gone() -> bool:
            for path in self._paths():
                with contextlib.suppress(OSError):
                    path.rmdir()
            return not any(path.exists() for path in self._paths())

        until(gone, 20, f"{self._memory} has no process left")
