# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the patches, reports and reproducers for the kernel's lists (docs/upstream)."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness import debug_kernel, toolchain
from harness.paths import ROOT, HarnessError, cache_dir

UPSTREAM = ROOT / "docs/upstream"
REPRODUCERS = sorted((UPSTREAM / "reproducers").iterdir())
MAILS = sorted(UPSTREAM.glob("*.txt"))
# Longest line of a mail to the kernel's lists.
COLUMNS_MAX = 76


def kernel_files(names: list[str]) -> Path:
    """Returns a directory with these files of the kernel's source; the first call fetches them."""
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]
    root = cache_dir() / "patched-files" / digest
    root.parent.mkdir(exist_ok=True)
    if not root.is_dir():
        suite, package = debug_kernel.NEWER_SOURCE
        with tempfile.TemporaryDirectory(dir=root.parent) as directory:
            work = Path(directory)
            toolchain.fetch(suite, (package,), work / "debs", work / "deb")
            (archive,) = (work / "deb/usr/src").glob("linux-source-*.tar.xz")
            top = archive.name.removesuffix(".tar.xz")
            members = [f"{top}/{name}" for name in names]
            subprocess.run(["tar", "-xJf", str(archive), "-C", str(work), *members], check=True)
            (work / top).rename(root)
    return root


def test_patches_apply_to_the_newest_source_of_their_series(tmp_path: Path) -> None:
    """The patches of guest-driver/intree apply in their order, without fuzz."""
    patches = debug_kernel.patches()
    text = "".join(map(Path.read_text, patches))
    changed = set(re.findall(r"^--- a/(.*)", text, re.MULTILINE))
    changed -= set(re.findall(r"^--- /dev/null\n\+\+\+ b/(.*)", text, re.MULTILINE))
    try:
        files = kernel_files(sorted(changed))
    except HarnessError as error:
        pytest.skip(f"the kernel's source cannot be fetched: {error}")
    tree = tmp_path / "linux"
    shutil.copytree(files, tree)
    for path in patches:
        command = ["patch", "-d", str(tree), "-p1", "--forward", "--fuzz=0", "-i", str(path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{path.name}: {done.stdout}"


@pytest.mark.parametrize("source", REPRODUCERS, ids=lambda path: path.name)
def test_reproducers_compile_without_warnings(source: Path, tmp_path: Path) -> None:
    if source.suffix == ".c":
        command = ["cc", "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "a.out"), str(source)]
    else:
        command = ["sh", "-n", str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_reproducer_belongs_to_a_report() -> None:
    named = re.findall(r"^Reproducer: reproducers/(.*)", "".join(map(Path.read_text, MAILS)), re.M)
    assert sorted(named) == [path.name for path in REPRODUCERS]


def test_lines_of_mails_are_short() -> None:
    long = [
        f"{path.name}: {line}"
        for path in MAILS
        for line in path.read_text().splitlines()
        if len(line) > COLUMNS_MAX
    ]
    assert not long
