# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Splits the tests into parts of similar duration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .paths import TESTS

# File with the duration of each test. `pytest --durations-to` writes it.
DURATIONS = TESTS / "durations.txt"
# Assumed duration of a test that is not in the file: the boot of a VM, and a little work.
UNKNOWN_SECONDS = 15.0


def read(path: Path = DURATIONS) -> dict[str, float]:
    """Returns the duration of each test in seconds, by name; each line of the file has one test."""
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            seconds, name = line.split(maxsplit=1)
            found[name] = float(seconds)
    return found


def write(path: Path, durations: dict[str, float]) -> None:
    """Writes the durations. Tests without a new duration keep their old one."""
    head = (
        "# SPDX-License-Identifier: Apache-2.0 OR MIT\n"
        "# Seconds of each test on two cores: written by pytest --durations-to\n"
    )
    merged = {**(read(path) if path.exists() else {}), **durations}
    lines = [f"{seconds:.0f} {name}\n" for name, seconds in sorted(merged.items())]
    path.write_text(head + "".join(lines))


def split(names: Iterable[str], durations: dict[str, float], parts: int) -> list[list[str]]:
    """Assigns tests, longest first, to the part with the smallest sum.

    The result depends only on the names and durations.
    """
    seconds = {name: durations.get(name, UNKNOWN_SECONDS) for name in names}
    found: list[list[str]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        part = min(range(parts), key=lambda number: (sums[number], number))
        found[part].append(name)
        # Count at least one second for each test. Otherwise all tests that take no time would be in
        # one part.
        sums[part] += max(seconds[name], 1.0)
    return found
