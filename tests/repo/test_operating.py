# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The operator's guide names only existing commands, and quotes messages as they are."""

from __future__ import annotations

import re

from harness.paths import ROOT

GUIDE = (ROOT / "docs/operating.md").read_text()

# The constant parts of a message must have at least this length to be meaningful.
WORDS_MIN = 6
# Messages of libraries: serde's for an unknown key of a configuration file.
OF_LIBRARIES = {"unknown field"}


def sources() -> str:
    """Returns the text of the Rust sources and of QEMU's device.

    Rust strings over several lines are joined.
    """
    files = sorted((ROOT / "host-daemon").glob("*/src/**/*.rs"))
    files += sorted((ROOT / "qemu-dev/src").glob("**/*.c"))
    return re.sub(r"\\\n\s+", "", "".join(file.read_text() for file in files))


def test_quoted_messages_exist_in_the_programs() -> None:
    text = sources()
    table = GUIDE.split("## Troubleshooting")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        parts = [part.strip(" :") for part in re.split(r"…| N\b|\d+", message)]
        parts = [part for part in parts if len(part) >= WORDS_MIN]
        assert parts, f"the quoted message has too little fixed text: {message}"
        for part in parts:
            found = part in text or part in OF_LIBRARIES
            assert found, f"{message}: no program has the text {part!r}"


def test_tmemctl_commands_in_the_guide_exist() -> None:
    main = (ROOT / "host-daemon/tmemctl/src/lib.rs").read_text()
    enum = main.split("enum Command {")[1].split("\n}\n")[0]
    commands = {name.lower() for name in re.findall(r"^    ([A-Z][a-z]+)\b", enum, re.MULTILINE)}
    named = set(re.findall(r"`tmemctl ([a-z]+)", GUIDE))
    assert named and named <= commands, f"tmemctl lacks commands: {named - commands}"
