# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Progress, tables and JSON files of the benchmarks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Progress:
    """Progress output: one line that is rewritten on a terminal, and separate lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begin = time.monotonic()

    def show(self, text: str) -> None:
        if self._terminal:
            print(f"\r\033[K  {text}", end="", file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        seconds = time.monotonic() - self._begin
        start = "\r\033[K" if self._terminal else ""
        print(f"{start}[{seconds:4.0f} s] {text}", file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Formats bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *right]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Replaces the file in one step, so that an interruption leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    scratch.replace(path)
