# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tests/guest/tmemcfg.c in a guest: the device used from user space, without the module.

The program writes its lines to a file in the guest, so that they outlive the control
channel, and go back in time with the guest's memory as the program itself does.
"""

from __future__ import annotations

from pathlib import Path

from harness.paths import TESTS, HarnessError, guest_program
from harness.vm import Vm
from harness.wait import until

PROGRAM = "/tmemcfg"
LOG = "/tmp/tmemcfg.log"
PID = "/tmp/tmemcfg.pid"

# Until a daemon that came back is connected, started and has answered.
HEAL_SECONDS = 60.0


def files() -> dict[str, Path]:
    """For Config.files."""
    return {PROGRAM: guest_program(TESTS / "guest/tmemcfg.c")}


def info(vm: Vm) -> dict[str, int]:
    """Registers and configuration as the guest sees them."""
    lines = vm.guest.sh(f"{PROGRAM} info").splitlines()
    return {key: int(value, 0) for key, value in (line.split() for line in lines)}


class UserDriver:
    """The program brought up in the VM's guest."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        vm.guest.sh(f": >{LOG}; setsid {PROGRAM} run >>{LOG} 2>&1 & echo $! >{PID}")
        self.wait("generation ")

    def lines(self) -> list[str]:
        """All that it said, whole lines only."""
        text = self._vm.guest.get(LOG).decode()
        return text.split("\n")[:-1]

    def mark(self) -> int:
        """How many lines there were; for wait(after=...)."""
        return len(self.lines())

    def wait(self, line: str, after: int = 0, seconds: float = HEAL_SECONDS) -> str:
        """The first line behind `after` that begins so."""
        return until(lambda: self._find(line, after), seconds, f"tmemcfg says '{line}'")

    def _find(self, line: str, after: int) -> str | None:
        lines = self.lines()
        for found in lines:
            if found.startswith(("wrong", "tmemcfg:")):
                raise HarnessError(f"tmemcfg: {found}, after {lines[-12:]}")
        for found in lines[after:]:
            if found.startswith(line):
                return found
        return None

    def generation(self) -> int:
        """The last one that it saw."""
        seen = [line for line in self.lines() if line.startswith("generation ")]
        return int(seen[-1].split()[1], 0)

    def stored(self, other_than: int = 0) -> int:
        """Waits until a page is stored in a live generation; returns the generation.

        `other_than` is a generation that is over.
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
        """Makes it get the page it stored; returns the mark for the answer."""
        mark = self.mark()
        self._vm.guest.sh(f"kill -USR1 $(cat {PID})")
        return mark

    def keep(self) -> str:
        """Gets the stored page: "hit", "miss" or "stale". It is stored again then."""
        return self.wait("keep ", after=self.ask_keep()).split()[1]

    def hold(self) -> str:
        """Gets the stored page and does not look at it, and says so; the next call looks."""
        mark = self.mark()
        self._vm.guest.sh(f"kill -USR2 $(cat {PID})")
        return until(
            lambda: self._find("held", mark) or self._find("not held", mark),
            HEAL_SECONDS,
            "tmemcfg holds a page",
        )

    def moved(self, vm: Vm) -> None:
        """The guest, and the program in it, is in another QEMU."""
        self._vm = vm

    def end(self) -> None:
        """SIGTERM: it resets the device and ends."""
        mark = self.mark()
        self._vm.guest.sh(f"kill -TERM $(cat {PID})")
        self.wait("ended", after=mark)
