# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The man page of tmem-guest names all that `tmem-guest --help` names, and man accepts the page.

The crate tmem-manual tests the pages of the host's programs.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from harness.paths import ROOT

SOURCE = ROOT / "guest-driver/tools/tmem-guest.c"
PAGE = ROOT / "guest-driver/tools/tmem-guest.8"


def warnings(page: Path) -> str:
    """Returns the warnings of man and groff about a man page."""
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", page],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "80"},
    )
    return done.stderr if done.returncode == 0 else f"man failed: {done.stderr}"


def help_text() -> str:
    text = SOURCE.read_text().split("usage_text[] =\n")[1].split(";\n\nstatic", maxsplit=1)[0]
    return "".join(re.findall(r'"(.*)"', text)).replace("\\n", "\n")


def test_man_renders_the_tmem_guest_page_without_warnings(tmp_path: Path) -> None:
    assert warnings(PAGE) == ""
    broken = tmp_path / "broken.8"
    broken.write_text(PAGE.read_text() + ".nosuchrequest\n")
    assert warnings(broken) != ""


def test_manual_page_names_every_command_option_and_exit_status() -> None:
    page = PAGE.read_text().replace("\\-", "-")
    text = help_text()
    commands = re.findall(r"^  ([a-z]+) ", text, re.MULTILINE)
    options = set(re.findall(r"--[a-z]+", text))
    statuses = re.findall(r"(\d) [a-z]", text.split("Exit status:")[1])
    assert {"status", "drop"} <= set(commands) and {"--json", "--watch"} <= options
    assert statuses == ["0", "1", "2", "3", "4", "5"]
    terms = re.findall(r"^\.TP\n\.BR? (\S+)", page, re.MULTILINE)
    assert {*commands, *options, *statuses} <= set(terms)
