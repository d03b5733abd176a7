# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Parts of the tests that take about as long as each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .paths import TESTS

# What each test took; `--durations-to` writes it.
DURATIONS = TESTS / "durations.txt"
# Taken for a test that the list does not have yet, in seconds: a VM's boot, and a little work.
UNKNOWN_SECONDS = 15.0


def read(path: Path = DURATIONS) -> dict[str, float]:
    """Seconds by name, from lines of both."""
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            seconds, name = line.split(maxsplit=1)
            found[name] = float(seconds)
    return found


def write(path: Path, durations: dict[str, float]) -> None:
    """Tests that are there already keep their durations, unless they have new ones."""
    head = (
        "# SPDX-License-Identifier: Apache-2.0 OR MIT\n"
        "# Seconds of each test on two cores: written by pytest --durations-to\n"
    )
    merged = {**(read(path) if path.exists() else {}), **durations}
    lines = [f"{seconds:.0f} {name}\n" for name, seconds in sorted(merged.items())]
    path.write_text(head + "".join(lines))


def split(names: Iterable[str], durations: dict[str, float], parts: int) -> list[list[str]]:
    """The longest first, each to the part that has least: the same for the same names."""
    seconds = {name: durations.get(name, UNKNOWN_SECONDS) for name in names}
    found: list[list[str]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        part = min(range(parts), key=lambda number: (sums[number], number))
        found[part].append(name)
        # A part without weight would take all tests of none.
        sums[part] += max(seconds[name], 1.0)
    return found
