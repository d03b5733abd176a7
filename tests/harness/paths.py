# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Finds the checkout, the cache, and programs, which environment variables may name."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent


class HarnessError(Exception):
    """A program or file that the harness needs is missing, or an action failed or took too long."""


def cache_dir() -> Path:
    """Returns the project's cache directory, which the first call creates."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "virtio-tmem"
    path.mkdir(parents=True, exist_ok=True)
    return path


def qemu_binary() -> Path:
    """Returns the QEMU with the device: TMEM_QEMU, or the last one that qemu-dev/build built."""
    if named := os.environ.get("TMEM_QEMU"):
        if not Path(named).is_file():
            raise HarnessError(f"TMEM_QEMU={named}: no such file")
        return Path(named)
    script = ROOT / "qemu-dev/build"
    done = subprocess.run([script, "--print"], check=False, stdout=subprocess.PIPE, text=True)
    built = Path(done.stdout.strip())
    if done.returncode != 0 or not built.is_file():
        raise HarnessError("QEMU with the device is not built: run qemu-dev/build")
    return built


def host_binary(name: str) -> Path:
    """Returns a program of host-daemon: from TMEM_BIN_DIR, or else the newer of its two builds."""
    if directory := os.environ.get("TMEM_BIN_DIR"):
        path = Path(directory) / name
        if not path.is_file():
            raise HarnessError(f"TMEM_BIN_DIR={directory} has no {name}")
        return path
    target = ROOT / "target"
    found = [path for kind in ("release", "debug") if (path := target / kind / name).is_file()]
    if not found:
        raise HarnessError(f"{name} is not built: run make daemon, or set TMEM_BIN_DIR")
    return max(found, key=lambda path: path.stat().st_mtime)


def guest_program(source: Path, *flags: str) -> Path:
    """Returns a static program for the guest, which is compiled once for each content.

    Files NAME_*.c in the directory of NAME.c are further parts of the program.
    """
    command = ["gcc", "-static", "-O2", "-g0", "-Wall", "-Wextra", "-Werror", *flags]
    interfaces = [ROOT / "proto/virtio_tmem.h", ROOT / "guest-driver/virtio_tmem_ioctl.h"]
    headers = [*sorted(source.parent.glob("*.h")), *interfaces]
    digest = hashlib.sha256(repr(command).encode())
    parts = sorted(source.parent.glob(f"{source.stem}_*.c"))
    for path in (source, *parts, *headers):
        digest.update(path.read_bytes())
    directory = cache_dir() / "guest"
    directory.mkdir(exist_ok=True)
    program = directory / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        scratch = program.with_suffix(f".{os.getpid()}")
        includes = [f"-I{ROOT / 'proto'}"]
        files = [str(path) for path in (source, *parts)]
        subprocess.run([*command, *includes, *files, "-o", str(scratch)], check=True)
        scratch.replace(program)
    return program
