# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Builds the guest driver's module from a copy of its sources, and reads the driver's counters."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import ROOT, HarnessError, cache_dir

MODULE = "virtio_tmem.ko"
PATCH = "tests/guest/patch"
SUFFIXES = (".c", ".h", ".S", ".mk")
NAMES = ("Makefile", "Kbuild")
BUILDS_KEPT = 16  # newest builds to keep for each kernel


def counters(guest: Guest) -> dict[str, int]:
    """Returns the driver's counters: guest-driver/sysfs.md describes them."""
    lines = guest.sh("cd /sys/kernel/virtio_tmem/stats && grep . *").splitlines()
    return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}


def build(kernel: Kernel, *, test: bool = False) -> Path:
    """Returns the driver's module for a kernel, or the file that the variable TMEM_KO names.

    With `test`, the module has test-only parameters.
    """
    if named := os.environ.get("TMEM_KO"):
        if not Path(named).is_file():
            raise HarnessError(f"TMEM_KO={named}: no such file")
        return Path(named)
    return _build(kernel, _sources(), "guest-driver", MODULE, test=test)


def build_patch(kernel: Kernel) -> Path:
    """Builds the two modules of tests/guest/patch, which redirect functions as the driver does.

    Returns the path of patch.ko. The other module, live.ko, is in the same directory.
    """
    sources = sorted((ROOT / PATCH).iterdir())
    return _build(kernel, sources, PATCH, "patch.ko")


def _build(
    kernel: Kernel, sources: list[Path], source_directory: str, name: str, *, test: bool = False
) -> Path:
    digest = hashlib.sha256(f"{kernel.root.name} {test}".encode())
    for path in sources:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    base = cache_dir() / "module" / kernel.release
    base.mkdir(parents=True, exist_ok=True)
    directory = base / (digest.hexdigest()[:16] + ("-test" if test else ""))
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = directory / source_directory / name
        if not module.is_file():
            shutil.rmtree(directory, ignore_errors=True)
            _compile(kernel, directory, sources, module, test)
            _forget_old(base)
        os.utime(directory)
        return module


def _sources() -> list[Path]:
    """Returns all sources of the module, which a build copies with their directory layout."""
    found = [ROOT / "proto/virtio_tmem.h"]
    for path in (ROOT / "guest-driver").rglob("*"):
        generated = path.name.endswith(".mod.c") or "build" in path.relative_to(ROOT).parts
        wanted = path.suffix in SUFFIXES or path.name in NAMES
        if wanted and not generated and path.is_file():
            found.append(path)
    return sorted(found)


def _compile(
    kernel: Kernel, directory: Path, sources: list[Path], module: Path, test: bool
) -> None:
    for path in sources:
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    if module.name == MODULE:
        command = ["make", "-C", str(module.parent), f"KDIR={kernel.kdir}"]
    else:
        command = ["make", "-C", str(kernel.kdir), f"M={module.parent}", "modules"]
    if test:
        command.append("TEST=1")
    # The variables of a caller's make (make check) must not reach the kernel's build.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment.pop("MFLAGS", None)
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    if done.returncode != 0 or not module.is_file():
        raise HarnessError(f"{' '.join(command)} failed:\n{done.stdout[-8192:]}")


def _forget_old(base: Path) -> None:
    directories = sorted((path for path in base.iterdir() if path.is_dir()), key=_age, reverse=True)
    for path in directories[BUILDS_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    return path.stat().st_mtime
