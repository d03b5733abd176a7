# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Extracts a compiler of another Debian release into the cache, for kernels of that release.

A kernel's headers contain programs (objtool, modpost, ...) that need the C library and the compiler
of their release. They run without a chroot and without privileges. Each program is replaced by a
shell script of one line, which runs the program with the dynamic loader and the libraries of the
extracted release. So the programs work on any x86-64 machine, whatever C library it has.
"""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
from pathlib import Path

from harness.paths import ROOT, HarnessError, cache_dir

# Packages of the C compiler, and of the libraries that the compiler and the programs of a kernel's
# headers load.
PACKAGES = {
    "trixie": (
        "gcc-14-x86-64-linux-gnu", "cpp-14-x86-64-linux-gnu", "libgcc-14-dev",
        "binutils-x86-64-linux-gnu", "libbinutils", "libctf0", "libctf-nobfd0", "libsframe1",
        "libjansson4", "pahole", "libbpf1", "libdw1t64", "libelf1t64", "libc6", "libgcc-s1",
        "libstdc\\+\\+6", "libgmp10", "libisl23", "libmpc3", "libmpfr6", "libzstd1", "zlib1g",
        "liblzma5", "libbz2-1\\.0", "libssl3t64",
    ),
}  # fmt: skip

TRIPLE = "x86_64-linux-gnu"
LOADER = f"usr/lib/{TRIPLE}/ld-linux-x86-64.so.2"
# An ELF program requests its loader with these bytes, in its first page.
INTERPRETER = b"/lib64/ld-linux-x86-64.so.2\0"
PAGE_BYTES = 4096
REAL = ".elf"  # suffix of the original of a program that a script replaces


def prepare(suite: str) -> Path:
    """Returns the root of a suite's compiler, and fetches and extracts it if it is not cached."""
    base = cache_dir() / "toolchain"
    base.mkdir(exist_ok=True)
    root = base / suite
    with open(base / f"{suite}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _fetch(suite, base, root)
        return root


def _fetch(suite: str, base: Path, root: Path) -> None:
    debs, scratch = base / f"{suite}.debs", base / f"{suite}.root"
    for directory in (debs, scratch):
        shutil.rmtree(directory, ignore_errors=True)
    fetch(suite, PACKAGES[suite], debs, scratch)
    wrap_programs(scratch, root, root)
    # GCC looks for the assembler here first, and then in PATH.
    for directory in scratch.glob(f"usr/libexec/gcc/{TRIPLE}/*"):
        (directory / "as").symlink_to(root / f"usr/bin/{TRIPLE}-as")
    scratch.rename(root)
    shutil.rmtree(debs)


def fetch(suite: str, packages: tuple[str, ...], debs: Path, root: Path) -> None:
    """Fetches packages of a suite into `debs` and extracts them into `root`."""
    command = [str(ROOT / "scripts/debian-fetch"), "--suite", suite, "--dest", str(debs)]
    done = subprocess.run([*command, *packages], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise HarnessError(f"cannot fetch packages of {suite}: {' '.join(packages)}")
    for deb in done.stdout.split():
        subprocess.run(["dpkg", "-x", deb, str(root)], check=True)


def programs(name: str, suite: str, packages: tuple[str, ...]) -> Path:
    """Returns the root of a suite's packages in the cache, under `name`, with programs that run.

    The first call fetches and extracts them.
    """
    base = cache_dir() / name
    base.mkdir(exist_ok=True)
    root = base / suite
    with open(base / f"{suite}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            debs, scratch = base / f"{suite}.debs", base / f"{suite}.root"
            for directory in (debs, scratch):
                shutil.rmtree(directory, ignore_errors=True)
            fetch(suite, packages, debs, scratch)
            wrap_programs(scratch, root, root)
            scratch.rename(root)
            shutil.rmtree(debs)
    return root


def wrap_programs(scratch: Path, final: Path, toolchain: Path) -> None:
    """Makes all programs under `scratch` use the toolchain's loader. `scratch` is later renamed.

    `final` is its later name, which may be equal to `toolchain`.
    """
    libraries = f"{toolchain}/usr/lib/{TRIPLE}"
    for path in sorted(scratch.rglob("*")):
        if path.is_symlink() or not path.is_file() or ".so" in path.name:
            continue
        with open(path, "rb") as file:
            head = file.read(PAGE_BYTES)
        if not head.startswith(b"\x7fELF") or INTERPRETER not in head:
            continue
        path.rename(path.with_name(path.name + REAL))
        real = final / path.relative_to(scratch).with_name(path.name + REAL)
        words = [f"{toolchain}/{LOADER}", "--library-path", libraries, "--argv0"]
        # The loader passes the script's $0 to the program as its name, because programs look for
        # their parts relative to that path.
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$0" {shlex.quote(str(real))} "$@"\n')
        path.chmod(0o755)


def kernel_variables(toolchain: Path) -> str:
    """Returns lines for a header tree's .kernelvariables that select the toolchain's compiler."""
    tools = f"{toolchain}/usr/bin"
    return f"override CROSS_COMPILE = {tools}/{TRIPLE}-\noverride PAHOLE = {tools}/pahole\n"
