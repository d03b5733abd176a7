# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Builds kernels with checks or a built-in driver.

The sources are Debian's. `tests/debug-kernel/base.config` has the options that the VMs need. A
fragment for each kind of kernel ("debug", "kcsan", "intree") adds or replaces options of the base.
The cache keeps the bootable image and a tree to build modules in. For a kernel with the driver
built in, it also keeps sources and objects, so that a change of the driver compiles only the
driver. A full build takes 13 minutes of one core.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from harness import toolchain
from harness.paths import ROOT, TESTS, HarnessError, cache_dir

# Suite and name of Debian's source package. Most tests of stock kernels use this series as well.
SOURCE = ("bookworm-security", r"linux-source-6\.12")

FRAGMENTS = TESTS / "debug-kernel"
CHECKING = ("debug", "kcsan")
# Source of the newest series, whose kernels have the driver built in.
NEWER_SOURCE = ("trixie-backports", r"linux-source-7\.3")
# This kernel contains the driver and its hooks, and has no ftrace and no modules.
INTREE = "intree"
INTREE_SERIES = "7.3"
KINDS = (*CHECKING, INTREE)

# Script that adds the driver and the patches for a kernel series to a kernel's source.
APPLY = ROOT / "guest-driver/intree/apply"


def fingerprint(kind: str) -> str:
    """Returns a hash of the files that a kernel is built from. It names the cached kernel."""
    return digest_of([*_base(kind), *(driver_sources() if kind == INTREE else [])])


def _base(kind: str) -> list[Path]:
    """Returns the files that a kernel is built from, except for the driver's sources."""
    return [*fragments(kind), *(patches() if kind == INTREE else [])]


def fragments(kind: str) -> list[Path]:
    """Returns a kernel kind's configuration fragments. The last one that sets an option counts."""
    return [FRAGMENTS / f"{name}.config" for name in ("base", kind)]


def digest_of(paths: Iterable[Path]) -> str:
    """Returns a hash of files of the checkout, and of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def driver_sources() -> list[Path]:
    """Returns the sources that APPLY copies into a kernel."""
    driver = ROOT / "guest-driver"
    directories = (driver, driver / "core", driver / "hooks", driver / "testing")
    found = [path for directory in directories for path in directory.glob("*.[ch]")]
    found = [path for path in found if not path.name.endswith(".mod.c")]
    return [*found, driver / "Kbuild", APPLY.parent / "Kconfig", ROOT / "proto/virtio_tmem.h"]


def patches() -> list[Path]:
    """Returns the patches of the hooks, in their order."""
    return sorted((APPLY.parent / INTREE_SERIES).glob("*.patch"))


def run(*command: str | Path) -> None:
    """Runs a step of a build; an error has the end of its output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(words)} failed:\n{done.stdout[-8192:]}")


def build(kind: str, root: Path) -> str:
    """Builds a kernel of this kind into `root`, in the layout of Debian's packages.

    Returns its release, as `uname -r` prints it.
    """
    work = cache_dir() / "kernel" / f"{kind}.work"
    source, out, ready = work / "source", work / "out", work / "ready"
    shutil.rmtree(root, ignore_errors=True)
    # The tree is made again if this hash changes. The hash leaves out the driver's sources: after a
    # change of these, only the driver is compiled again.
    state = digest_of(_base(kind))
    if not ready.is_file() or ready.read_text() != state:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        say(f"fetching the source of the kernel '{kind}'")
        unpack(work, *(NEWER_SOURCE if kind == INTREE else SOURCE))
        if kind == INTREE:
            run(APPLY, source)
        out.mkdir()
        ready.write_text(state)
    elif kind == INTREE:
        run(APPLY, "--driver-only", source)
    version = run_make(source, "kernelversion").strip()

    config = work / "all.config"
    options = merge(path.read_text() for path in fragments(kind))
    options["CONFIG_LOCALVERSION"] = f'"-tmem-{kind}"'
    config.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    arguments = [
        f"O={out}",
        f"KCONFIG_ALLCONFIG={config}",
        # The driver reads the vendor and the point release from `uname -v`, so the kernel has them
        # in the form of Debian's kernels.
        f"KBUILD_BUILD_TIMESTAMP=Debian {version}",
        "KBUILD_BUILD_USER=tmem",
        "KBUILD_BUILD_HOST=tests",
    ]
    run_make(source, *arguments, "allnoconfig")
    check_config(config, out / ".config")
    say(f"building Linux {version} '{kind}' into the cache: 13 minutes of one core at first")
    modular = options["CONFIG_MODULES"] == "y"
    targets = ["bzImage", "modules"] if modular else ["bzImage"]
    run_make(source, *arguments, f"-j{os.cpu_count() or 1}", *targets)
    release = run_make(source, *arguments, "-s", "kernelrelease").strip()

    (root / "boot").mkdir(parents=True)
    shutil.copy2(out / "arch/x86/boot/bzImage", root / f"boot/vmlinuz-{release}")
    modules = root / "lib/modules" / release
    (modules / "kernel").mkdir(parents=True)
    (modules / "modules.dep").touch()
    shutil.copy2(out / "modules.builtin", modules)
    headers = root / f"usr/src/linux-headers-{release}"
    headers.mkdir(parents=True)
    if modular:
        installer = f"$(srctree)/scripts/package/install-extmod-build {headers}"
        run_make(source, *arguments, "run-command", f"KBUILD_RUN_COMMAND={installer}")
    shutil.copy2(out / ".config", headers)
    if kind != INTREE:
        shutil.rmtree(work)
    return release


def merge(fragments: Iterable[str]) -> dict[str, str]:
    """Returns the options that configuration fragments set. An option's last value counts."""
    lines = "\n".join(fragments).splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("CONFIG_"))


def unpack(work: Path, suite: str, package: str) -> Path:
    """Fetches and extracts a source package; returns its tree, `work`/source."""
    toolchain.fetch(suite, (package,), work / "debs", work / "deb")
    (archive,) = (work / "deb/usr/src").glob("linux-source-*.tar.xz")
    source = work / "source"
    source.mkdir()
    subprocess.run(
        ["tar", "-xJf", str(archive), "-C", str(source), "--strip-components=1"], check=True
    )
    shutil.rmtree(work / "deb")
    shutil.rmtree(work / "debs")
    return source


def run_make(source: Path, *arguments: str) -> str:
    """Runs make in a kernel's source tree and returns its stdout."""
    # The variables of a caller's make (make check) must not reach the kernel's build.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment.pop("MFLAGS", None)
    command = ["make", "--no-print-directory", "-C", str(source), *arguments]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)} failed:\n{done.stderr[-8192:]}")
    return done.stdout


def check_config(wanted: Path, got: Path) -> None:
    """Raises if the configuration to build, `got`, lacks an option of `wanted`.

    `make olddefconfig` silently drops options whose dependencies are missing."""
    have = set(got.read_text().splitlines())
    asked = merge([wanted.read_text()])
    missing = [
        f"{name}=y" for name, value in asked.items() if f"{name}=y" not in have and value == "y"
    ]
    missing += [
        f"{name}=n" for name, value in asked.items() if f"{name}=y" in have and value == "n"
    ]
    if missing:
        raise HarnessError(
            "the kernel's configuration lacks requested options whose dependencies are not met: "
            f"{', '.join(missing)}"
        )


def say(text: str) -> None:
    """Prints the progress of a build."""
    print(f"tests/kernel: {text}", file=sys.stderr, flush=True)
