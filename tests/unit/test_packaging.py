# SPDX-License-Identifier: Apache-2.0 OR MIT
"""dkms, run as by a distribution, builds the module from the driver's source package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.kernel import Kernel
from harness.paths import ROOT

DRIVER = ROOT / "guest-driver"


def run(*command: str) -> str:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}"
    return done.stdout


def version() -> str:
    header = (DRIVER / "core/core.h").read_text()
    parts = [
        re.search(rf"TMEM_VERSION_{part}\t(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(found[1] for found in parts if found)


def test_dkms_builds_and_installs(tmp_path: Path, kernel: Kernel) -> None:
    """Builds in separate directories, so that nothing of the machine changes."""
    name = f"virtio-tmem/{version()}"
    run("make", "-C", str(DRIVER), "dkms-tree", f"DEST={tmp_path}/src/{name.replace('/', '-')}")
    for folder in ("dkms", f"modules/{kernel.release}"):
        (tmp_path / folder).mkdir(parents=True)
    dkms = shutil.which("dkms") or "/usr/sbin/dkms"
    run(
        dkms, "install", name, "--no-depmod",
        "--dkmstree", f"{tmp_path}/dkms", "--sourcetree", f"{tmp_path}/src",
        "--installtree", f"{tmp_path}/modules",
        "-k", kernel.release, "--kernelsourcedir", str(kernel.kdir),
    )  # fmt: skip
    (built,) = (tmp_path / "modules").glob("**/virtio_tmem.ko*")
    modinfo = run(shutil.which("modinfo") or "/sbin/modinfo", str(built))
    assert re.search(rf"^version: +{re.escape(version())}$", modinfo, re.MULTILINE)
    assert f"vermagic:       {kernel.release} " in modinfo


def test_package_contains_the_files_of_the_build(tmp_path: Path) -> None:
    run("make", "-C", str(DRIVER), "dkms-deb", f"DEST={tmp_path}")
    (package,) = tmp_path.glob("virtio-tmem-dkms_*_amd64.deb")
    source = f"./usr/src/virtio-tmem-{version()}"
    names = {line.split()[-1] for line in run("dpkg-deb", "-c", str(package)).splitlines()}
    for path in ("dkms.conf", "Kbuild", "Makefile", "proto/virtio_tmem.h", "core/ring.c"):
        assert f"{source}/{path}" in names
    assert "./usr/sbin/tmem-guest" in names
    for name in ("README.md", "sysfs-kernel-virtio_tmem", "guest-support.md", "secure-boot.md"):
        assert f"./usr/share/doc/virtio-tmem-dkms/{name}" in names
    assert not [name for name in names if name.endswith((".o", ".ko", ".mod.c"))]


@pytest.mark.parametrize("script", ["postinst", "prerm"])
def test_package_scripts_contain_the_version(tmp_path: Path, script: str) -> None:
    run("make", "-C", str(DRIVER), "dkms-deb", f"DEST={tmp_path}")
    (package,) = tmp_path.glob("*.deb")
    run("dpkg-deb", "-e", str(package), f"{tmp_path}/control")
    text = (tmp_path / "control" / script).read_text()
    assert version() in text
    assert "@" not in text
