# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Keeps all measurements in one JSON file, which is written after each part of the benchmark.

A part is saved only after its guests' bytes were checked, so the file has no figures of a guest
that read wrong bytes. A run that was interrupted continues with the parts that the file does not
have. The file names the settings that it was measured with; a run with other settings does not
continue it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.vm.output import write_json
from harness.paths import HarnessError

Measured = dict[str, float]  # the figures of one measurement
Repetition = dict[str, Measured]  # measurements of one repetition, by arm


class Results:
    """The measurements of all workloads so far."""

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "machine": [], "parts": {}}
        if path.exists() and not fresh:
            self.data = json.loads(path.read_text())
            found = self.data["settings"]
            if found != settings:
                other = [key for key in settings if found.get(key) != settings[key]]
                raise HarnessError(
                    f"{path} was measured with other settings ({', '.join(other)}): "
                    "use --fresh to measure all again, or another --json FILE"
                )

    def repetitions(self, key: str) -> list[Repetition]:
        """Returns the saved repetitions of a part."""
        found: list[Repetition] = self.data["parts"].get(key, {}).get("repetitions", [])
        return found

    def add(self, key: str, about: dict[str, Any], *repetitions: Repetition) -> None:
        """Appends repetitions of a part and saves the file."""
        part = self.data["parts"].setdefault(key, {"repetitions": []})
        part.update(about)
        part["repetitions"] += repetitions
        self.save()

    def add_machine(self, facts: dict[str, Any]) -> None:
        """Appends facts about the machine during one run of the program, and saves the file."""
        self.data["machine"].append(facts)
        self.save()

    def save(self) -> None:
        write_json(self.path, self.data)
