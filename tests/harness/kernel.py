# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Extracts stock Debian kernels with headers into the cache; nothing is installed.

A kernel is named by its series ("6.12" is the cloud kernel, "6.12-amd64" the one for all machines).
The first use fetches the newest packages of the suite. Later uses take the cached ones, so that a
developer's tests do not change unexpectedly (`tests/kernel prepare --update` fetches the newest
again).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import debug_kernel, toolchain
from harness.paths import HarnessError, cache_dir


@dataclass(frozen=True)
class Series:
    """The Debian suite of a kernel series, and its packages as patterns for whole names.

    `compiler` is a suite of harness.toolchain. It is set if the headers' programs and compiler need
    a newer Debian than the oldest one on which the tests run.
    """

    suite: str
    packages: tuple[str, ...]
    compiler: str | None = None
    tcg_threads: str = "multi"


SERIES = {
    "6.1": Series(
        "bookworm-security",
        (
            r"linux-image-6\.1\.0-[0-9]+-cloud-amd64-unsigned",
            r"linux-headers-6\.1\.0-[0-9]+-cloud-amd64",
            r"linux-headers-6\.1\.0-[0-9]+-common",
            r"linux-kbuild-6\.1",
        ),
    ),
    # The kernel for all machines has file systems that the cloud kernel lacks.
    **{
        series: Series(
            "bookworm-security",
            (
                rf"linux-image-6\.12\.[0-9]+[+]deb12-{flavour}-unsigned",
                rf"linux-headers-6\.12\.[0-9]+[+]deb12-{flavour}",
                r"linux-headers-6\.12\.[0-9]+[+]deb12-common",
                r"linux-kbuild-6\.12\.[0-9]+[+]deb12",
            ),
        )
        for series, flavour in (("6.12", "cloud-amd64"), ("6.12-amd64", "amd64"))
    },
    # Kernels of these series are split into several packages; linux-image- only depends on them.
    # For these series, one TCG thread must run all processors in turn. In a stock 7.2, one
    # processor patches the code of static keys and static calls. If TCG runs a second processor in
    # a thread of its own, it may execute the code meanwhile, and its task dies because no handler
    # accepts the int3 exception. This happens without any module loaded.
    **{
        series: Series(
            "trixie-backports",
            tuple(
                pattern.format(re.escape(series))
                for pattern in (
                    r"linux-base-{}\.[0-9]+[+]deb13-cloud-amd64",
                    r"linux-binary-{}\.[0-9]+[+]deb13-cloud-amd64",
                    r"linux-modules-{}\.[0-9]+[+]deb13-cloud-amd64",
                    r"linux-headers-{}\.[0-9]+[+]deb13-cloud-amd64",
                    r"linux-headers-{}\.[0-9]+[+]deb13-common",
                    r"linux-kbuild-{}\.[0-9]+[+]deb13",
                )
            ),
            compiler="trixie",
            tcg_threads="single",
        )
        for series in ("7.2", "7.3")
    },
}


# All names that prepare() accepts.
NAMES = (*SERIES, *debug_kernel.KINDS)


@dataclass(frozen=True)
class Kernel:
    """An extracted kernel. `release` is what `uname -r` prints in the guest."""

    series: str
    release: str
    root: Path

    @property
    def version(self) -> tuple[int, int]:
        """Returns the version as numbers: (6, 12) for a release of 6.12."""
        major, minor = self.release.split(".")[:2]
        return int(major), int(minor)

    @property
    def tcg_threads(self) -> str:
        """Returns the threading mode that QEMU's TCG may use for several virtual processors."""
        return SERIES[self.series].tcg_threads if self.series in SERIES else "multi"

    @property
    def vmlinuz(self) -> Path:
        """Returns the bootable image, from boot/ or, in newer packages, from lib/modules/."""
        for path in (self.root / f"boot/vmlinuz-{self.release}", self.modules / "vmlinuz"):
            if path.is_file():
                return path
        raise HarnessError(f"kernel {self.release}: {self.root} has no vmlinuz")

    @property
    def modules(self) -> Path:
        """Returns lib/modules/RELEASE, with kernel/, modules.dep and modules.builtin."""
        for lib in ("lib", "usr/lib"):
            path = self.root / lib / "modules" / self.release
            if (path / "kernel").is_dir():
                return path
        raise HarnessError(f"kernel {self.release}: {self.root} has no modules")

    @property
    def kdir(self) -> Path:
        """Returns the directory KDIR for `make -C KDIR M=...`."""
        return self.root / f"usr/src/linux-headers-{self.release}"

    def as_dict(self) -> dict[str, str]:
        return {
            "series": self.series,
            "release": self.release,
            "root": str(self.root),
            "vmlinuz": str(self.vmlinuz),
            "modules": str(self.modules),
            "kdir": str(self.kdir),
        }

    def module_files(self, names: Iterable[str]) -> list[Path]:
        """Returns the .ko files of the named modules, each after its dependencies.

        Modules that are built in need no file and are left out.
        """
        key = {_module_name(name): name for name in names}
        depends = self._depends()
        built_in = {
            _module_name(line) for line in (self.modules / "modules.builtin").read_text().split()
        }
        order: list[str] = []
        for wanted, given in key.items():
            if wanted in built_in:
                continue
            if wanted not in depends:
                raise HarnessError(f"kernel {self.release} has no module '{given}'")
            path, requires = depends[wanted]
            # modules.dep lists the nearest dependency first.
            for item in (*reversed(requires), path):
                if item not in order:
                    order.append(item)
        return [self.modules / item for item in order]

    def _depends(self) -> dict[str, tuple[str, list[str]]]:
        found: dict[str, tuple[str, list[str]]] = {}
        for line in (self.modules / "modules.dep").read_text().splitlines():
            path, _, requires = line.partition(":")
            found[_module_name(path)] = (path, requires.split())
        return found


def _module_name(path: str) -> str:
    name = re.sub(r"\.ko(\.(xz|gz|zst))?$", "", path.rsplit("/", 1)[-1])
    return name.replace("-", "_")


def prepare(series: str, *, update: bool = False) -> Kernel:
    """Returns the kernel of a series, fetched and extracted if it is not in the cache."""
    if series not in NAMES:
        raise HarnessError(f"unknown kernel series '{series}'; choose one of {', '.join(NAMES)}")
    base = cache_dir() / "kernel"
    base.mkdir(exist_ok=True)
    current = base / f"{series}.json"
    with open(base / f"{series}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not update and (kernel := _recorded_kernel(current)) and _is_current(kernel):
            return kernel
        kernel = (_build if series in debug_kernel.KINDS else _fetch)(series, base)
        record = {"series": series, "release": kernel.release, "root": kernel.root.name}
        scratch = current.with_suffix(".new")
        scratch.write_text(json.dumps(record) + "\n")
        scratch.replace(current)
        return kernel


def _recorded_kernel(current: Path) -> Kernel | None:
    if not current.is_file():
        return None
    record = json.loads(current.read_text())
    kernel = Kernel(record["series"], record["release"], current.parent / record["root"])
    return kernel if kernel.kdir.is_dir() else None


def _build(series: str, base: Path) -> Kernel:
    root = base / f"{series}-{debug_kernel.fingerprint(series)}"
    return Kernel(series, debug_kernel.build(series, root), root)


def _is_current(kernel: Kernel) -> bool:
    if kernel.series not in debug_kernel.KINDS:
        return True
    return kernel.root.name.endswith(debug_kernel.fingerprint(kernel.series))


def _fetch(series: str, base: Path) -> Kernel:
    spec = SERIES[series]
    debs = base / f"{series}.debs"
    shutil.rmtree(debs, ignore_errors=True)
    scratch = base / f"{series}.root"
    shutil.rmtree(scratch, ignore_errors=True)
    toolchain.fetch(spec.suite, spec.packages, debs, scratch)
    release = _release(scratch)
    root = base / release
    # Replace absolute paths in links and includes of the tree by the tree's final path.
    _relocate(scratch, root, release)
    if spec.compiler:
        tools = toolchain.prepare(spec.compiler)
        toolchain.wrap_programs(scratch / "usr/lib", root / "usr/lib", tools)
        variables = scratch / f"usr/src/linux-headers-{release}/.kernelvariables"
        variables.write_text(variables.read_text() + toolchain.kernel_variables(tools))
    shutil.rmtree(root, ignore_errors=True)
    scratch.rename(root)
    shutil.rmtree(debs)
    return Kernel(series, release, root)


def _release(root: Path) -> str:
    found = [path.parent.name for path in root.glob("**/lib/modules/*/kernel")]
    if len(found) != 1:
        raise HarnessError(f"expected one kernel under {root}, found {found or 'none'}")
    return found[0]


def _relocate(scratch: Path, final: Path, release: str) -> None:
    """Redirects the packages' absolute paths under /usr/src and /usr/lib to `final`."""
    moved = re.compile(r"(?<![\w.])/usr/(src|lib)/linux-")
    headers = scratch / f"usr/src/linux-headers-{release}"
    for name in ("Makefile", ".kernelvariables"):
        path = headers / name
        if path.is_file():
            path.write_text(moved.sub(rf"{final}/usr/\1/linux-", path.read_text()))
    for directory, directories, files in os.walk(scratch):
        for name in (*directories, *files):
            path = Path(directory) / name
            if not path.is_symlink():
                continue
            target = str(path.readlink())
            if target.startswith("/usr/"):
                path.unlink()
                path.symlink_to(f"{final}{target}")
    # Create modules.dep, which Debian's packages create only when they are installed.
    lib = next(scratch.glob("**/lib/modules")).parent.parent
    depmod = shutil.which("depmod") or "/sbin/depmod"
    subprocess.run([depmod, "-b", str(lib), release], check=True)
