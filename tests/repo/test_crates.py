# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tests/repo/lint-crates finds licences, duplicates and vulnerabilities that the rules forbid."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.paths import ROOT

pytestmark = pytest.mark.long

RULES = ROOT / "deny.toml"
DATABASE = "https://github.com/RustSec/advisory-db"
ADVISORY = """```toml
[advisory]
id = "RUSTSEC-2099-0001"
package = "zeroize"
date = "2026-01-01"

[versions]
patched = []
```

# A fault that the test made up

It affects all versions.
"""


def lint(directory: Path, rules: str, database: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script with `rules`. git finds the repository `database` at the address of the
    database of vulnerabilities.
    """
    config = directory / "deny.toml"
    section = "[advisories]\n"
    assert section in rules
    config.write_text(rules.replace(section, f'{section}db-path = "{directory}/fetched"\n'))
    git = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{database}.insteadOf",
        "GIT_CONFIG_VALUE_0": DATABASE,
    }
    return subprocess.run(
        [ROOT / "tests/repo/lint-crates", "--config", config],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **git},
    )


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """Returns the path of a database that does not exist."""
    return tmp_path / "nowhere"


def test_rules_hold_without_the_database_of_vulnerabilities(tmp_path: Path, nowhere: Path) -> None:
    done = lint(tmp_path, RULES.read_text(), nowhere)
    assert done.returncode == 0, done.stdout
    assert "licenses ok" in done.stdout and "sources ok" in done.stdout
    assert "known vulnerabilities are not checked" in done.stdout


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('    { crate = "virt", allow = ["LGPL-2.1-or-later"] },\n', "virt v0.4"),
        ('    "Zlib",\n', "Zlib"),
        (
            '    { crate = "bitflags@1", reason = "vmm-sys-util 0.15 of rust-vmm" },\n',
            "2 duplicate entries for crate 'bitflags'",
        ),
    ],
)
def test_crates_need_their_rules(tmp_path: Path, nowhere: Path, line: str, part: str) -> None:
    rules = RULES.read_text()
    assert line in rules
    done = lint(tmp_path, rules.replace(line, ""), nowhere)
    assert done.returncode != 0 and part in done.stdout, done.stdout


def test_superfluous_exception_is_an_error(tmp_path: Path, nowhere: Path) -> None:
    rules = RULES.read_text().replace("skip = [\n", 'skip = [\n    { crate = "libc@9" },\n')
    done = lint(tmp_path, rules, nowhere)
    assert done.returncode != 0 and "libc" in done.stdout, done.stdout


def test_vulnerable_crate_is_an_error(tmp_path: Path) -> None:
    database = tmp_path / "database"
    advisory = database / "crates/zeroize/RUSTSEC-2099-0001.md"
    advisory.parent.mkdir(parents=True)
    advisory.write_text(ADVISORY)
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "."],
        ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "A fault"],
    ):
        subprocess.run(["git", "-C", database, *command], check=True)
    done = lint(tmp_path, RULES.read_text(), database)
    assert done.returncode != 0, done.stdout
    assert "RUSTSEC-2099-0001" in done.stdout and "zeroize" in done.stdout
