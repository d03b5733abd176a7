# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The guest driver's list of sysfs files is complete, and lists no file that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from harness.paths import ROOT

DRIVER = ROOT / "guest-driver"
ABI = DRIVER / "ABI/sysfs-kernel-virtio_tmem"
SYSFS = "/sys/kernel/virtio_tmem"
PARAMETERS = "/sys/module/virtio_tmem/parameters"
MOUNT = f"{SYSFS}/mounts/<major:minor>"


def documented(text: str) -> dict[str, str]:
    """Returns the description of each sysfs file in the text of guest-driver/ABI/."""
    found: dict[str, str] = {}
    for block in re.split(r"\n\n+", text):
        fields = dict(re.findall(r"^(\w+):\t+(.+(?:\n\t\t.+)*)$", block, re.MULTILINE))
        if "What" in fields:
            assert fields["What"] not in found, (
                f"{fields['What']} has two entries in the ABI document"
            )
            found[fields["What"]] = fields.get("Description", "")
    return found


def sources() -> list[str]:
    """Returns the texts of the driver's C files that a normal build uses: all but testing/."""
    directories = (DRIVER, DRIVER / "core", DRIVER / "hooks")
    return [path.read_text() for directory in directories for path in sorted(directory.glob("*.c"))]


def counters() -> set[str]:
    text = (DRIVER / "core/stats_list.h").read_text()
    return set(re.findall(r"^TMEM_STAT\((\w+)\)$", text, re.MULTILINE))


def attributes() -> set[str]:
    found: set[str] = set()
    for source in sources():
        found |= set(re.findall(r"__ATTR_(?:RO|RW|WO)(?:_MODE)?\((\w+)[,)]", source))
    return found


def parameters() -> set[str]:
    found: set[str] = set()
    for source in sources():
        found |= set(re.findall(r"^module_param(?:_cb|_named)?\((\w+),", source, re.MULTILINE))
    return found


def last_names(files: dict[str, str], under: str) -> set[str]:
    return {Path(name).name for name in files if name.startswith(under + "/")}


def test_sysfs_files_and_their_documentation_match() -> None:
    files = documented(ABI.read_text())
    assert "puts" in counters() and "state" in attributes() and "deadline_ms" in parameters()
    files.pop(MOUNT)  # MOUNT is a directory, not a file
    assert last_names(files, SYSFS) == counters() | attributes()
    assert last_names(files, PARAMETERS) == parameters()
    assert all(name.startswith((SYSFS, PARAMETERS)) for name in files)
    for name in counters():
        assert f"{SYSFS}/stats/{name}" in files
    mounts = (DRIVER / "hooks/mounts.c").read_text()
    assert last_names(files, MOUNT) == set(re.findall(r"__ATTR_R[OW](?:_MODE)?\((\w+)[,)]", mounts))
    assert f"{SYSFS}/fs/<type>/enabled" in files


def test_each_sysfs_file_has_its_own_description() -> None:
    files = documented(ABI.read_text())
    empty = [name for name, text in files.items() if len(text.split()) < 4]
    assert not empty
    texts = list(files.values())
    assert len(set(texts)) == len(texts), "two sysfs files have the same description"


def test_parser_reads_names_and_descriptions() -> None:
    text = "What:\t\t/a\nDescription:\tOne\n\t\ttwo.\n\nWhat:\t\t/b\n"
    assert documented(text) == {"/a": "One\n\t\ttwo.", "/b": ""}
