# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs tests/guest/tmemcfg.c in a guest: the device is used from user space, without the module.

The program writes its output to a file in the guest's memory. So the output is kept if the
connection to the guest's agent ends, and a reverted VM has the output from the time of the
snapshot.
"""

from __future__ import annotations

from pathlib import Path

from harness.paths import TESTS, HarnessError, guest_program
from harness.vm import Vm
from harness.wait import until

PROGRAM = "/tmemcfg"
LOG = "/tmp/tmemcfg.log"
PID = "/tmp/tmemcfg.pid"

# Longest time until QEMU has connected to a restarted daemon and the daemon has answered a request.
HEAL_SECONDS = 60.0


def files() -> dict[str, Path]:
    """Returns the program tmemcfg by its path in the guest, for Config.files."""
    return {PROGRAM: guest_program(TESTS / "guest/tmemcfg.c")}


class UserDriver:
    """The program tmemcfg that runs in a VM's guest."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        vm.guest.sh(f": >{LOG}; setsid {PROGRAM} >>{LOG} 2>&1 & echo $! >{PID}")
        self.wait("generation ")

    def lines(self) -> list[str]:
        """Returns all complete lines of its output."""
        text = self._vm.guest.get(LOG).decode()
        return text.split("\n")[:-1]

    def mark(self) -> int:
        """Returns the number of lines so far, for wait(after=...)."""
        return len(self.lines())

    def wait(self, line: str, after: int = 0, seconds: float = HEAL_SECONDS) -> str:
        """Waits for the first line after `after` that begins with `line`, and returns it."""
        return until(lambda: self._find(line, after), seconds, f"tmemcfg prints '{line}'")

    def _find(self, line: str, after: int) -> str | None:
        lines = self.lines()
        for found in lines:
            if found.startswith(("wrong", "tmemcfg:")):
                raise HarnessError(f"tmemcfg failed with '{found}'; its last lines: {lines[-12:]}")
        for found in lines[after:]:
            if found.startswith(line):
                return found
        return None

    def generation(self) -> int:
        """Returns the last generation that the program saw."""
        seen = [line for line in self.lines() if line.startswith("generation ")]
        return int(seen[-1].split()[1], 0)

    def wait_until_stored(self, other_than: int = 0) -> int:
        """Waits until a page is stored in a live generation; returns the generation.

        `other_than` is a generation that has ended.
        """

        def condition() -> int | None:
            self._find("wrong", 0)
            lines = [entry for entry in self.lines() if entry.startswith(("generation", "stored"))]
            if not lines or lines[-1] != "stored":
                return None
            found = self.generation()
            return found if found not in (0, other_than) else None

        return until(condition, HEAL_SECONDS, "tmemcfg stores a page in a new generation")

    def ask_keep(self) -> int:
        """Makes the program get its stored page. Returns the `after` of wait() for the answer."""
        mark = self.mark()
        self._vm.guest.sh(f"kill -USR1 $(cat {PID})")
        return mark

    def keep(self) -> str:
        """Gets the stored page, and returns "hit", "miss" or "stale".

        The page is then stored again.
        """
        return self.wait("keep ", after=self.ask_keep()).split()[1]

    def hold(self) -> str:
        """Gets the stored page into a buffer that the guest does not read; returns the result.

        The next call compares the buffer with the page that was stored.
        """
        mark = self.mark()
        self._vm.guest.sh(f"kill -USR2 $(cat {PID})")
        return until(
            lambda: self._find("held", mark) or self._find("not held", mark),
            HEAL_SECONDS,
            "tmemcfg holds a page",
        )

    def use_vm(self, vm: Vm) -> None:
        """Sets the VM to use, after a migration of the guest with the program to another QEMU."""
        self._vm = vm

    def end(self) -> None:
        """Sends SIGTERM, so that the program resets the device and ends."""
        mark = self.mark()
        self._vm.guest.sh(f"kill -TERM $(cat {PID})")
        self.wait("ended", after=mark)
