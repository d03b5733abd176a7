# SPDX-License-Identifier: Apache-2.0 OR MIT
"""dkms, run as by a distribution, builds the module, and the guest's packages have their files.

packaging/check-packages installs the packages into clean systems.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import served
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


@pytest.mark.long
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


# Installs the headers of kernels into empty directories, which only this script sees, and runs the
# hook that Debian's packages of headers run. The first kernel can be built for, the second one has
# an interface that the driver does not know.
HEADERS = """
set -eu
tree=$1 version=$2 good=$3 changed=$4
for directory in /var/lib/dkms /usr/src /lib/modules; do mount -t tmpfs tmpfs $directory; done
cp -r "$tree" "/usr/src/virtio-tmem-$version"
add_headers() {
	build=/lib/modules/$1/build
	mkdir -p "$build/include"
	printf 'CONFIG_%s=y\\n' DYNAMIC_FTRACE_WITH_ARGS KPROBES TRACEPOINTS >"$build/.config"
	case $1 in *-rt-*) echo CONFIG_PREEMPT_RT=y >>"$build/.config" ;; esac
	printf 'modules:\\n\\t%s\\nclean:\\n' "$2" >"$build/Makefile"
}
add_headers "$good" 'echo int none\\; | $(CC) -c -x c - -o $(M)/virtio_tmem.ko'
add_headers "$changed" 'echo an interface has changed; exit 1'
dkms add "virtio-tmem/$version"
/etc/kernel/header_postinst.d/dkms "$good"
dkms status -k "$good" | grep -q installed || exit 3
/etc/kernel/header_postinst.d/dkms "$changed" || exit 4
"""
HOOK_FAILED = 4


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ("99.1.2-cloud-amd64", 0),
        ("6.100.1-cloud-amd64", 0),
        ("6.12.999+deb12-rt-amd64", 0),
        ("6.12.999+deb12-cloud-amd64", HOOK_FAILED),
    ],
)
def test_headers_of_a_kernel_that_is_not_served_are_installed_without_error(
    tmp_path: Path, changed: str, status: int
) -> None:
    """An interface that changed in a kernel of another series does not make apt fail.

    In a served series, the failed build is reported.
    """
    if os.geteuid():
        pytest.skip("must run as root, to mount directories")
    run("make", "-C", str(DRIVER), "dkms-tree", f"DEST={tmp_path}/tree")
    modules = Path("/lib/modules")
    # Another case, which runs at the same time, must not remove the directory meanwhile.
    lock = os.open(modules.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    missing = not modules.exists()
    modules.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", HEADERS, "sh",
             f"{tmp_path}/tree", version(), "6.12.998+deb12-cloud-amd64", changed],
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
    finally:
        if missing:
            modules.rmdir()
        os.close(lock)
    assert done.returncode == status, done.stdout


def test_dkms_builds_for_the_served_series_only(tmp_path: Path) -> None:
    """The list of series in dkms.conf is that of the driver's sources."""
    run("make", "-C", str(DRIVER), "dkms-tree", f"DEST={tmp_path}")
    conf = (tmp_path / "dkms.conf").read_text()
    assert "@" not in conf
    (pattern,) = re.findall(r'^BUILD_EXCLUSIVE_KERNEL="(.*)"$', conf, re.MULTILINE)
    rows = served.kernels()
    series = "|".join(row.series.replace(".", "[.]") for row in rows)
    assert pattern == f"^({series})[.]"
    for row in rows:
        assert re.search(pattern, f"{row.begins}1-cloud-amd64")
    for release in ("6.13.1-amd64", "16.1.1-amd64", "6.1", "6x1.2-amd64", "7.20.1-amd64"):
        assert not re.search(pattern, release)


def build(directory: Path, *environment: str) -> Path:
    """Builds the packages for guests, without touching the tree."""
    command = ["env", f"TMEM_PACKAGES_WORK={directory}/work", *environment]
    run(*command, f"{ROOT}/packaging/packages", "--guest", f"{directory}/built")
    return directory / "built"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("packages"))


@pytest.mark.long
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
    for name in ("README.md", "sysfs.md", "guest-support.md", "secure-boot.md"):
        document = f"./usr/share/doc/virtio-tmem-dkms/{name}"
        assert names & {document, f"{document}.gz"}
    assert not [name for name in names if name.endswith((".o", ".ko", ".mod.c"))]
    command = contents(packages, "virtio-tmem-guest")
    assert {"./usr/sbin/tmem-guest", "./usr/share/man/man8/tmem-guest.8.gz"} <= command
    unit = "systemd/system/tmem-guest-autosize.service"
    assert len([name for name in command if name.endswith(unit)]) == 1


def extract_scripts(packages: Path, directory: Path) -> Path:
    (package,) = packages.glob("virtio-tmem-dkms_*.deb")
    run("dpkg-deb", "-e", str(package), f"{directory}/control")
    return directory / "control"


@pytest.mark.parametrize("script", ["postinst", "prerm"])
def test_package_scripts_contain_the_version(packages: Path, tmp_path: Path, script: str) -> None:
    text = (extract_scripts(packages, tmp_path) / script).read_text()
    assert version() in text
    assert "#MODULE_VERSION#" not in text and "#DEBHELPER#" not in text


@pytest.mark.parametrize("built", [False, True])
def test_package_installation_warns_if_dkms_built_no_module(
    packages: Path, tmp_path: Path, built: bool
) -> None:
    """If DKMS built no module, the installation warns and names the package of kernel headers."""
    postinst = (extract_scripts(packages, tmp_path) / "postinst").read_text()
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
