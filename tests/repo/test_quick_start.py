# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The quick start of the README has few commands; packaging/check-host-inside runs the host's."""

from __future__ import annotations

import re

from harness.paths import ROOT

COMMANDS_MAX = 10


def steps() -> dict[int, str]:
    """Returns the commands of each numbered step."""
    text = (ROOT / "README.md").read_text().split("## Quick start\n")[1]
    block = text.split("```")[1]
    found = re.split(r"^# (\d+) .*\n", block, flags=re.MULTILINE)
    return {int(number): body for number, body in zip(found[1::2], found[2::2], strict=True)}


def commands(step: str) -> list[str]:
    """Returns the commands of a step. A loop over VMs counts its commands once for each VM."""
    joined = step.replace("\\\n", " ")
    if loop := re.search(r"for \w+ in (.*?); do (.*?); done", joined):
        joined = "\n".join([loop[2]] * len(loop[1].split()))
    return [part.strip() for part in re.split(r"&&|;|\n", joined) if part.strip()]


def test_quick_start_attaches_the_device_with_few_commands() -> None:
    found = steps()
    host = [command for number in (2, 3, 4) for command in commands(found[number])]
    assert len(host) <= COMMANDS_MAX, f"too many commands on the host: {host}"
    assert len([c for step in found.values() for c in commands(step)]) <= COMMANDS_MAX + 5
    # No compiler on the host: packages are built in the first step, on any machine.
    assert not [command for command in host if re.match(r"make|gcc|cargo|qemu-dev", command)]
    assert any(command.startswith("virsh start") for command in host)


def test_package_check_in_a_vm_runs_the_quick_start_commands() -> None:
    script = (ROOT / "packaging/check-packages").read_text()
    assert "/^# 2 /" in script and "/^# 5 /" in script and "quick-start" in script
    found = steps()
    assert "apt install" in found[2] and "tmemctl attach" in found[4]
    assert ". /root/quick-start" in (ROOT / "packaging/check-host-inside").read_text()
