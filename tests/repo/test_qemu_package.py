# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The files of QEMU's Debian package agree with qemu-dev/build, tmemctl and the AppArmor rules.

packaging/check-packages installs the package and starts QEMU.
"""

from __future__ import annotations

import re

from harness.paths import ROOT

QEMU = ROOT / "qemu-dev"
PROGRAM = "/usr/bin/qemu-system-x86_64-tmem"


def needed_packages() -> dict[str, set[str]]:
    """Returns the packages of each section of apt-packages."""
    sections: dict[str, set[str]] = {"": set()}
    section = ""
    for line in (QEMU / "apt-packages").read_text().splitlines():
        if line.startswith("# --"):
            section = line[2:]
            sections[section] = set()
        elif line and not line.startswith("#"):
            sections[section].add(line)
    return sections


def test_package_build_dependencies_are_those_of_the_full_build() -> None:
    control = (QEMU / "debian/control").read_text()
    field = control.split("Build-Depends:\n", 1)[1].split("\n\n", 1)[0]
    build = set(re.findall(r"^ ([\w.+-]+)", field, re.MULTILINE))
    sections = needed_packages()
    libraries = {name for name in sections[""] if name.endswith("-dev")} | sections["--full"]
    # A source package does not name libc6-dev, because every Debian build has it (build-essential).
    assert libraries - {"libc6-dev"} == {name for name in build if name.endswith("-dev")}


def test_qemu_build_options_name_each_feature_once() -> None:
    options: list[str] = []
    for name in ("common", "full"):
        lines = (QEMU / "configs" / name).read_text().splitlines()
        options += [line for line in lines if not line.startswith("#")]
    names = [re.sub(r"^--(enable|disable)-", "", option).split("=")[0] for option in options]
    assert len(names) == len(set(names))
    assert all(option.startswith("--") for option in options)
    full = [line for line in (QEMU / "configs/full").read_text().splitlines() if "--enable" in line]
    assert full == sorted(full)


def test_package_tmemctl_and_apparmor_name_the_same_qemu() -> None:
    rules = (QEMU / "debian/rules").read_text()
    assert "PROGRAM = qemu-system-x86_64\n" in rules
    assert "virtio-tmem-qemu/usr/bin/$(PROGRAM)-tmem" in rules
    source = (ROOT / "host-daemon/tmemctl/src/packaged.rs").read_text()
    assert f'pub const PATH: &str = "{PROGRAM}";' in source
    apparmor = (ROOT / "host-daemon/tmem-libvirt/apparmor/libvirt-qemu").read_text()
    assert f"  {PROGRAM} rmix,\n" in apparmor
    assert f"qemu={PROGRAM}\n" in (ROOT / "packaging/check-packages-inside").read_text()
    for page in ("docs/install.md", "docs/libvirt.md", "docs/qemu.md"):
        text = (ROOT / page).read_text()
        assert PROGRAM in text and "/usr/local/bin/qemu" not in text
