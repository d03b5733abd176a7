# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Builds fio for the guest from Debian's source package into the cache.

The program is static, because the packaged one needs two dozen libraries that a busybox guest does
not have.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from harness.paths import ROOT, HarnessError, cache_dir

SUITE = "bookworm"
# Options that keep all libraries of the build machine except the C library out of the program, so
# that each machine builds the same program.
CONFIGURE = (
    "--build-static", "--disable-native", "--disable-shm", "--disable-numa", "--disable-rdma",
    "--disable-rados", "--disable-rbd", "--disable-gfapi", "--disable-http", "--disable-pmem",
    "--disable-tcmalloc", "--disable-libnfs", "--disable-libzbc", "--disable-xnvme",
    "--disable-dfs",
)  # fmt: skip


def program() -> Path:
    """Returns the path of fio in the cache.

    The first call fetches and builds it, which takes one or two minutes.
    """
    directory = cache_dir() / "fio"
    directory.mkdir(exist_ok=True)
    built = directory / "fio"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_file():
            _build(directory, built)
    return built


def _build(directory: Path, built: Path) -> None:
    scratch = directory / "source"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    fetch = [str(ROOT / "scripts/debian-fetch"), "--source", "--suite", SUITE]
    fetch += ["--dest", str(scratch), "fio"]
    if subprocess.run(fetch, check=False, stdout=subprocess.DEVNULL).returncode != 0:
        raise HarnessError(f"fio: the source package of {SUITE} could not be fetched")
    # Build the archive without Debian's patches, which only change the documentation and the paths
    # of installed files.
    (archive,) = scratch.glob("fio_*.orig.tar.[gx]z")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    (tree,) = (path.parent for path in scratch.glob("*/configure"))
    # The variables of a caller's make must not reach this build.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment.pop("MFLAGS", None)
    for command in (
        ["./configure", *CONFIGURE],
        ["make", f"-j{os.cpu_count()}", "fio"],
        ["strip", "fio"],
    ):
        done = subprocess.run(
            command, check=False, cwd=tree, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise HarnessError(f"fio: {' '.join(command)} failed:\n{done.stdout[-4096:]}")
    (tree / "fio").replace(built)
    shutil.rmtree(scratch)
