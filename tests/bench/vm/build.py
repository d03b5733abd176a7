# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compiles a part of Lua with Debian's GCC in a guest with little RAM.

A third guest, whose RAM holds the compiler and all files, shows how much of the time is not spent
on the disk. Under user-mode Linux that is mostly the creation of processes.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

from bench.vm.guests import Box, Lab
from bench.vm.machine import BATCH_BYTES, DATA, SEED, write_contents
from bench.vm.results import Measured
from bench.vm.workloads import WITH, WITHOUT, Paired
from harness import disk, toolchain
from harness.initramfs import busybox
from harness.paths import ROOT, HarnessError
from harness.vm import MIB

SUITE = "bookworm"
PACKAGES = (
    "gcc-12", "cpp-12", "libgcc-12-dev", "binutils", "binutils-x86-64-linux-gnu", "libbinutils",
    "libctf0", "libctf-nobfd0", "libgprofng0", "libjansson4", "libc6", "libc6-dev",
    "linux-libc-dev", "libisl23", "libmpc3", "libmpfr6", "libgmp10", "libzstd1", "zlib1g",
    "libgcc-s1", "libstdc\\+\\+6", "make",
)  # fmt: skip
SOURCE = "lua5.4"
OBJECTS = ("lcode.o", "ldo.o", "lparser.o", "ltable.o")
IMAGE_BYTES = 384 * MIB
PROBE = "all_in_ram"


def make_build_image(path: Path) -> Path:
    """Creates an image with the compiler and the source, to which a guest changes its root."""
    scratch = path.with_suffix(".scratch")
    tree = path.with_suffix(".tree")
    toolchain.fetch(SUITE, PACKAGES, scratch / "debs", tree)
    fetch = [str(ROOT / "scripts/debian-fetch"), "--source", "--suite", SUITE]
    fetch += ["--dest", str(scratch), SOURCE]
    if subprocess.run(fetch, check=False, stdout=subprocess.DEVNULL).returncode:
        raise HarnessError(f"the source of {SOURCE} cannot be fetched")
    (archive,) = scratch.glob("*.orig.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch / "source", filter="data")
    (source,) = (scratch / "source").iterdir()
    source.rename(tree / "src")
    for directory in ("bin", "dev", "proc", "tmp"):
        (tree / directory).mkdir(exist_ok=True)
    shutil.copy2(busybox(), tree / "bin/busybox")
    for name in ("sh", "rm"):
        (tree / "bin" / name).symlink_to("busybox")
    write_contents(tree / "batch", BATCH_BYTES, random.Random(SEED))
    disk.ext4(path, IMAGE_BYTES, tree)
    shutil.rmtree(tree)
    shutil.rmtree(scratch)
    return path


class Build(Paired):
    """Workload in which make compiles object files of Lua in a guest, again and again."""

    arms: tuple[str, ...] = (WITHOUT, WITH, PROBE)
    key = "build"
    title = "compilation with little RAM"
    seconds = 150
    repetitions = 5
    writable = True
    sum_of = None
    ram_bytes = 56 * MIB
    jobs = 1  # programs that make runs at the same time
    objects: tuple[str, ...] = OBJECTS

    def ram_of(self, arm: str) -> int:
        return 512 * MIB if arm == PROBE else self.ram_bytes

    def details(self) -> dict[str, Any]:
        return {
            "load": f"make -j{self.jobs} of {len(self.objects)} objects of Lua 5.4 with Debian "
            "12's GCC 12, -O2",
            "all in RAM": "a third guest of 512 MiB, without the pool",
        }

    def image(self, lab: Lab) -> Path:
        return lab.image("build", make_build_image)

    def warm(self, box: Box) -> None:
        box.sh(f"mount -t tmpfs tmpfs {DATA}/tmp && mount -t devtmpfs devtmpfs {DATA}/dev")
        self.act(box, -1)

    def prepare_repetition(self, box: Box, repetition: int) -> None:
        box.sh(f"rm -f {DATA}/src/src/*.o; sync")

    def act(self, box: Box, repetition: int) -> Measured:
        began = time.monotonic()
        make = f"/usr/bin/make -s -j{self.jobs} -C /src/src CC=gcc-12"
        box.sh(f"chroot {DATA} {make} {' '.join(self.objects)}")
        return {"seconds": time.monotonic() - began}
