# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The AppArmor rules for libvirt's QEMUs parse in the place where they are installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.paths import ROOT

RULES = ROOT / "host-daemon/tmem-libvirt/apparmor/libvirt-qemu"
STOCK = Path("/etc/apparmor.d")
UUID = "5ca1ab1e-0000-4000-8000-0123456789ab"


def parse(directory: Path, rules: str) -> subprocess.CompletedProcess[str]:
    """Parses an AppArmor profile for a VM, with `rules` as the administrator's local rules.

    The profile is one as libvirt's virt-aa-helper writes it. It is not loaded into the kernel.
    """
    (directory / "local/abstractions").mkdir(parents=True)
    for part in ("abstractions", "tunables", "abi"):
        if (STOCK / part).exists():
            (directory / part).symlink_to(STOCK / part)
    (directory / "local/abstractions/libvirt-qemu").write_text(rules)
    template = (STOCK / "libvirt/TEMPLATE.qemu").read_text()
    profile = directory / f"libvirt-{UUID}"
    profile.write_text(template.replace("LIBVIRT_TEMPLATE", f"libvirt-{UUID}"))
    command = ["apparmor_parser", "--skip-kernel-load", "--skip-cache", "--debug"]
    return subprocess.run(
        [*command, "--base", directory, profile], check=False, capture_output=True, text=True
    )


def test_apparmor_parser_accepts_the_rules(tmp_path: Path) -> None:
    done = parse(tmp_path, RULES.read_text())
    assert done.returncode == 0, done.stderr
    socket = [line for line in done.stdout.splitlines() if "run/virtio-tmem/*.sock" in line]
    assert len(socket) == 1 and "rw" in socket[0], done.stdout


def test_apparmor_parser_refuses_a_broken_rule(tmp_path: Path) -> None:
    """apparmor_parser reports an error if a comma is missing in the rules."""
    assert parse(tmp_path, RULES.read_text().replace(" rw,", " rw")).returncode != 0
