# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Waits for a condition with a time limit. TMEM_TIMEOUT_SCALE multiplies all time limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from harness.paths import HarnessError

T = TypeVar("T")

POLL_SECONDS = 0.02  # pause between polls; most actions of a guest take longer


class WaitTimeout(HarnessError):
    """A condition was not true within its time limit."""


def scaled(seconds: float) -> float:
    """Returns a time-out in seconds, multiplied by TMEM_TIMEOUT_SCALE (for slow machines)."""
    return seconds * float(os.environ.get("TMEM_TIMEOUT_SCALE", "1"))


class Deadline:
    """The end of a time limit. `what` names the awaited event, for the error message."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = scaled(seconds)
        self.what = what
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Returns the seconds left, or 0 when the deadline has passed."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        if self.left() == 0:
            raise WaitTimeout(f"timeout: condition not met within {self.seconds:g} s: {self.what}")


def until(condition: Callable[[], T | None], seconds: float, what: str) -> T:
    """Polls until `condition` returns a true value, and returns that value."""
    deadline = Deadline(seconds, what)
    while True:
        if found := condition():
            return found
        deadline.check()
        time.sleep(POLL_SECONDS)
