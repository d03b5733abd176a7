# SPDX-License-Identifier: Apache-2.0 OR MIT
"""dkms, run as by a distribution, builds the module, and the guest's packages have their files.

scripts/check-packages installs the packages into clean systems.
"""

from __future__ import annotations

import platform
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


def test_dkms_builds_and_installs_the_module(tmp_path: Path, kernel: Kernel) -> None:
    """Builds in separate directories, so that nothing of the machine changes."""
    name = f"virtio-tmem/{version()}"
    run("make", "-C", str(DRIVER), "dkms-tree", f"DEST={tmp_path}/src/{name.replace('/', '-')}")
    for directory in ("dkms", f"modules/{kernel.release}"):
        (tmp_path / directory).mkdir(parents=True)
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


def build(directory: Path, *environment: str) -> Path:
    """Builds the packages for guests, without touching the tree."""
    command = ["env", f"TMEM_PACKAGES_WORK={directory}/work", *environment]
    run(*command, f"{ROOT}/scripts/packages", "--guest", f"{directory}/built")
    return directory / "built"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("packages"))


def test_packages_are_reproducible(packages: Path, tmp_path: Path) -> None:
    """Directory, time zone and language of a build do not change the packages."""
    again = build(tmp_path / "other/directory", "TZ=Pacific/Auckland", "LC_ALL=C.UTF-8")
    built = sorted(packages.glob("*.deb"))
    assert len(built) >= 2
    for package in built:
        assert package.read_bytes() == (again / package.name).read_bytes(), (
            f"{package.name} differs between two builds"
        )


def contents(packages: Path, name: str) -> set[str]:
    (package,) = packages.glob(f"{name}_*.deb")
    return {line.split()[-1] for line in run("dpkg-deb", "-c", str(package)).splitlines()}


def test_packages_contain_the_files_of_the_build(packages: Path) -> None:
    source = f"./usr/src/virtio-tmem-{version()}"
    names = contents(packages, "virtio-tmem-dkms")
    for path in ("dkms.conf", "Kbuild", "Makefile", "proto/virtio_tmem.h", "core/ring.c"):
        assert f"{source}/{path}" in names
    for name in ("README.md", "sysfs-kernel-virtio_tmem", "guest-support.md", "secure-boot.md"):
        document = f"./usr/share/doc/virtio-tmem-dkms/{name}"
        assert names & {document, f"{document}.gz"}
    assert not [name for name in names if name.endswith((".o", ".ko", ".mod.c"))]
    command = contents(packages, "virtio-tmem-guest")
    assert {"./usr/sbin/tmem-guest", "./usr/share/man/man8/tmem-guest.8.gz"} <= command


def scripts(packages: Path, directory: Path) -> Path:
    (package,) = packages.glob("virtio-tmem-dkms_*.deb")
    run("dpkg-deb", "-e", str(package), f"{directory}/control")
    return directory / "control"


@pytest.mark.parametrize("script", ["postinst", "prerm"])
def test_package_scripts_contain_the_version(packages: Path, tmp_path: Path, script: str) -> None:
    text = (scripts(packages, tmp_path) / script).read_text()
    assert version() in text
    assert "#MODULE_VERSION#" not in text and "#DEBHELPER#" not in text


@pytest.mark.parametrize("built", [False, True])
def test_package_installation_warns_if_dkms_built_no_module(
    packages: Path, tmp_path: Path, built: bool
) -> None:
    """If DKMS built no module, the installation warns and names the package of kernel headers."""
    postinst = (scripts(packages, tmp_path) / "postinst").read_text()
    # Run only the project's part of the script: the part that dh-dkms adds would build the module
    # on this machine.
    own = "#!/bin/sh\nset -e\n" + postinst.split("# End automatically added section\n")[-1]
    (tmp_path / "postinst").write_text(own)
    fake = tmp_path / "bin"
    fake.mkdir()
    status = f"virtio-tmem/{version()}, {platform.release()}, x86_64: installed"
    (fake / "dkms").write_text(f"#!/bin/sh\necho '{status if built else ''}'\n")
    (fake / "modprobe").write_text("#!/bin/sh\n")
    for program in fake.iterdir():
        program.chmod(0o755)
    text = run("env", f"PATH={fake}:/usr/bin:/bin", "sh", f"{tmp_path}/postinst", "configure")
    assert ("THE MODULE WAS NOT BUILT" in text) == (not built)
    headers = Path(f"/lib/modules/{platform.release()}/build/include")
    if not built and not headers.exists():
        assert f"apt install linux-headers-{platform.release()}" in text
