# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Delays the wake-ups of a native guest: `slow_waiters.py PID`, until its standard input ends.

A write to an eventfd wakes its waiters one after another. This program puts many waiters of its own
between the guest's epoll sets that wait for the same eventfd, so that a fault which depends on the
order of the wake-ups shows. The program is a separate process, because an epoll set names a
descriptor by its number: the guest's eventfd needs the same number in this process.
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


def move_up(number: int) -> int:
    """Moves a descriptor of this program above those of the guest; returns its new number."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD, FIRST)
    os.close(number)
    return moved


def copy(guest: int, number: int) -> int:
    """Returns a copy of a descriptor of the guest, which `guest` (a pidfd) refers to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (got := libc.syscall(SYS_PIDFD_GETFD, guest, number, 0)) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return move_up(got)


def watching_sets(pid: int) -> dict[int, dict[int, int]]:
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
    guest = move_up(os.pidfd_open(pid))
    waiters = select.epoll()
    ours = select.epoll.fromfd(move_up(os.dup(waiters.fileno())))
    waiters.close()
    found = watching_sets(pid)
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
