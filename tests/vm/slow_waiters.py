# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Delays the wake-ups of a native guest: `slow_waiters.py PID`, until its standard input ends.

A write to an eventfd wakes its waiters one after another. This program puts many waiters of its own
between the guest's epoll sets that wait for the same eventfd, so an order that matters shows up. It
is a process of its own because a descriptor in an epoll set is known by its number, so the guest's
eventfd needs the same number here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import sys
from pathlib import Path

WAITERS = 400  # for each eventfd
FIRST = 100  # descriptors of this program begin here, above those of the guest
SYS_PIDFD_GETFD = 438


def high(number: int) -> int:
    """Moves a descriptor of this program above those of the guest; returns its new number."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD, FIRST)
    os.close(number)
    return moved


def copy(guest: int, number: int) -> int:
    """Returns a copy of a descriptor of the guest, which `guest` (a pidfd) refers to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (got := libc.syscall(SYS_PIDFD_GETFD, guest, number, 0)) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return high(got)


def watched(pid: int) -> dict[int, dict[int, int]]:
    """Returns the epoll sets that wait for each eventfd of the guest, and for which events.

    The first set of an eventfd is the kernel's, which is the oldest one.
    """
    links = {int(path.name): str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    out: dict[int, dict[int, int]] = {}
    for number in sorted(links):
        if "[eventpoll]" in links[number]:
            text = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
            for target, events in re.findall(r"tfd:\s*(\d+) events:\s*(\w+)", text):
                if "[eventfd]" in links[int(target)]:
                    out.setdefault(int(target), {})[number] = int(events, 16)
    return out


def main() -> None:
    pid = int(sys.argv[1])
    guest = high(os.pidfd_open(pid))
    waiters = select.epoll()
    ours = select.epoll.fromfd(high(os.dup(waiters.fileno())))
    waiters.close()
    found = watched(pid)
    if not found:
        sys.exit("the guest waits for no eventfd")
    for number, sets in found.items():
        eventfd = copy(guest, number)
        os.dup2(eventfd, number)
        _, *later = ((select.epoll.fromfd(copy(guest, of)), sets[of]) for of in sets)
        for other, _ in later:
            other.unregister(number)
        for _ in range(WAITERS):
            again = fcntl.fcntl(eventfd, fcntl.F_DUPFD, FIRST)
            ours.register(again, select.EPOLLIN | select.EPOLLET)
        for other, events in later:
            other.register(number, events)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
