# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The guest driver's list of sysfs files is complete, and lists no file that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from harness.paths import ROOT

DRIVER = ROOT / "guest-driver"
MOUNT = "mounts/<major:minor>"


def documented_files() -> dict[str, str]:
    """Returns the description of each file in the table of guest-driver/sysfs.md."""
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", (DRIVER / "sysfs.md").read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a file has two rows in guest-driver/sysfs.md"
    return dict(rows)


def sources() -> list[str]:
    """Returns the texts of the driver's C files that a normal build uses: all but testing/."""
    directories = (DRIVER, DRIVER / "core", DRIVER / "hooks")
    return [path.read_text() for directory in directories for path in sorted(directory.glob("*.c"))]


def counters() -> set[str]:
    text = (DRIVER / "core/stats_list.h").read_text()
    found = re.findall(r"^TMEM_STAT\((\w+)\)$", text, re.MULTILINE)
    # A range of waits has a file for each power of two.
    return {re.sub(r"^get_waits_\d+us", "get_waits_<us>us", name) for name in found}


def attributes() -> set[str]:
    found: set[str] = set()
    for source in sources():
        found |= set(re.findall(r"__ATTR_(?:RO|RW|WO)(?:_MODE)?\((\w+)[,)]", source))
    return found


def test_sysfs_files_and_their_documentation_match() -> None:
    files = documented_files()
    assert "puts" in counters() and "state" in attributes()
    # Directories, not files.
    files.pop(MOUNT)
    files.pop("mounts/swap-<major:minor>-<number>")
    assert {Path(name).name for name in files} == counters() | attributes()
    assert all(f"stats/{name}" in files for name in counters())
    mounts = (DRIVER / "hooks/mounts.c").read_text()
    assert {Path(name).name for name in files if name.startswith(f"{MOUNT}/")} == set(
        re.findall(r"__ATTR_R[OW](?:_MODE)?\((\w+)[,)]", mounts)
    )
    assert "fs/<type>/enabled" in files


def test_each_sysfs_file_has_its_own_description() -> None:
    texts = list(documented_files().values())
    assert all(len(text.split()) >= 4 for text in texts)
    assert len(set(texts)) == len(texts), "two sysfs files have the same description"
