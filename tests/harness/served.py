# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares the kernels that the driver's sources list as tested with those that Debian offers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.paths import ROOT, HarnessError

SOURCE = ROOT / "guest-driver/hooks/init.c"

# Debian 12, Debian 13 and their backports. The security archive may have a newer kernel than its
# suite.
SUITES = (
    "bookworm", "bookworm-security", "bookworm-backports",
    "trixie", "trixie-security", "trixie-backports",
)  # fmt: skip
# Pattern for the image of one release. Metapackages have no release in their name.
IMAGE = r"linux-image-[0-9]+\.[0-9]+\.[0-9]+[-+0-9a-z.]*-cloud-amd64(-unsigned)?"


@dataclass(frozen=True)
class Served:
    """A row of tested_kernels[].

    `begins` is the beginning of `uname -r`, and `series` like "6.1". `oldest` is the third number
    of the oldest point release that is served. `releases` are the point releases that were tested,
    as `uname -v` names them after the vendor.
    """

    begins: str
    series: str
    oldest: int
    vendor: str
    releases: tuple[str, ...]


def kernels(text: str | None = None) -> list[Served]:
    """Returns the rows of tested_kernels[] in the driver's sources."""
    text = SOURCE.read_text() if text is None else text
    body = text.split("tested_kernels[] = {", 1)[1].split("\n};", 1)[0]
    entry = (
        r'\{ "([^"]+)", KERNEL_VERSION\((\d+), (\d+), 0\), (\d+), "([^"]+)",\s+\{ ([^}]+) \} \},'
    )
    found = re.findall(entry, body)
    if not found or len(found) != body.count("KERNEL_VERSION"):
        raise HarnessError(
            f"{SOURCE.name}: tested_kernels[] has a row that this parser does not know"
        )
    return [
        Served(
            begins,
            f"{major}.{minor}",
            int(oldest),
            vendor,
            tuple(re.findall(r'"([^"]+)"', releases)),
        )
        for begins, major, minor, oldest, vendor, releases in found
    ]


def newest_image(suite: str) -> str:
    """Returns the name of the suite's newest kernel package."""
    command = [str(ROOT / "scripts/debian-fetch"), "--list", "--suite", suite, IMAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise HarnessError(f"{suite}: the package index cannot be read: {done.stderr.strip()}")
    return done.stdout.strip()


def compare(
    rows: Iterable[Served], newest: Callable[[str], str] = newest_image
) -> tuple[list[str], list[str]]:
    """Compares the newest kernel of each Debian suite with the rows of tested_kernels[].

    Returns a line of text for each suite, and the kernel series that no row has.
    """
    served = {row.series for row in rows if row.vendor == "Debian"}
    lines: list[str] = []
    missing: set[str] = set()
    for suite in SUITES:
        name = newest(suite)
        found = re.match(r"linux-image-(\d+\.\d+)\.", name)
        if not found:
            raise HarnessError(f"{suite}: '{name}' names no kernel series")
        series = found[1]
        if series not in served:
            missing.add(series)
        lines.append(f"{suite}: {series} {'served' if series in served else 'MISSING'} ({name})")
    return lines, sorted(missing)
