# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Serves the disks of native guests: one qemu-storage-daemon per disk, over vhost-user-blk.

The program and its libraries come from Debian 13, extracted into the cache and never installed. A
disk is opened with cache.direct. So no page of it is in the host's page cache, from where reads
would be faster than the throttle of the disk allows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from harness import toolchain
from harness.disk import Disk
from harness.paths import HarnessError
from harness.process import Process, tail
from harness.wait import until

SUITE = "trixie"
PROGRAM = "usr/bin/qemu-storage-daemon"
# Package of qemu-storage-daemon, and packages of the libraries that it loads.
PACKAGES = (
    "qemu-utils", "libaio1t64", "libatomic1", "libc6", "libffi8", "libfuse3-4", "libglib2\\.0-0t64",
    "libgmp10", "libgnutls30t64", "libhogweed6t64", "libidn2-0", "libnettle8t64", "libnuma1",
    "libp11-kit0", "libpcre2-8-0", "libtasn1-6", "libunistring5", "liburing2", "libzstd1", "zlib1g",
)  # fmt: skip
PAGE_BYTES = mmap.PAGESIZE


def program() -> Path:
    """Returns qemu-storage-daemon: TMEM_STORAGE_DAEMON, or the one in the cache."""
    if named := os.environ.get("TMEM_STORAGE_DAEMON"):
        return Path(named)
    return toolchain.programs("storage-daemon", SUITE, PACKAGES) / PROGRAM


def cached_bytes(path: Path) -> int:
    """Returns the number of bytes of a file that are in the host's page cache.

    mincore(2) returns correct values only for files that the caller owns or may write.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = path.stat().st_size
    pages = (size + PAGE_BYTES - 1) // PAGE_BYTES
    if not pages:
        return 0
    with open(path, "r+b") as file:
        at = libc.mmap(
            None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(),
            ctypes.c_long(0),
        )  # fmt: skip
    if at == ctypes.c_void_p(-1).value:
        raise HarnessError(f"{path}: mmap: {os.strerror(ctypes.get_errno())}")
    present = (ctypes.c_ubyte * pages)()
    status = libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), present)
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    if status:
        raise HarnessError(f"{path}: mincore: {os.strerror(ctypes.get_errno())}")
    return sum(byte & 1 for byte in present) * PAGE_BYTES


def forget_cached(path: Path) -> None:
    """Writes a file's dirty pages to the disk and drops its pages from the host's page cache."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Export:
    """One disk, served at a socket in `directory`."""

    def __init__(
        self, disk: Disk, directory: Path, *, direct: bool = True, processor: int | None = None
    ) -> None:
        self.disk = disk
        self.socket = directory / f"{disk.name}.sock"
        self.log = directory / f"{disk.name}.log"
        self._direct = direct
        self._processor = processor
        self._process: Process | None = None

    def command(self) -> list[str]:
        """Returns the storage daemon's command line."""
        disk = self.disk
        only = "on" if disk.read_only else "off"
        how = "cache.direct=on,aio=native" if self._direct else "cache.direct=off,aio=threads"
        driver = "host_device" if disk.path.is_block_device() else "file"
        # Each node needs the option, or else it ignores discards.
        discard = ",discard=unmap" if disk.discard else ""
        part = ",offset={},size={}".format(*disk.part) if disk.part else ""
        command = [
            str(program()),
            "--blockdev", f"driver={driver},node-name=file,filename={disk.path},read-only={only},"
            f"{how}{discard}",
            # A backing image inherits cache.direct from this node.
            "--blockdev", f"driver={disk.format},node-name=image,file=file,read-only={only},"
            f"cache.direct={'on' if self._direct else 'off'}{discard}{part}",
        ]  # fmt: skip
        top = "image"
        if disk.throttle:
            limits = "".join(
                f",x-{key}={value}" for key, value in disk.throttle.arguments().items()
            )
            top = "throttled"
            command += ["--object", f"throttle-group,id=limits{limits}"]
            command += ["--blockdev", f"driver=throttle,node-name={top},file=image,"
                        f"throttle-group=limits,read-only={only}{discard}"]  # fmt: skip
        writable = "off" if disk.read_only else "on"
        command += ["--export", f"type=vhost-user-blk,id={disk.name},node-name={top},"
                    f"writable={writable},addr.type=unix,addr.path={self.socket}"]  # fmt: skip
        return command

    def start(self) -> None:
        """Removes the disk's image from the host's page cache, and serves the disk."""
        forget_cached(self.disk.path)
        self.socket.unlink(missing_ok=True)
        name = f"storage daemon of {self.disk.name}"
        process = Process(name, self.command(), self.log, processor=self._processor)
        self._process = process

        def listening() -> bool:
            process.expect_alive()
            return self.socket.exists()

        until(listening, 20, f"{self.disk.name}: the storage daemon opens its socket")

    @property
    def process(self) -> Process:
        if not self._process:
            raise HarnessError(f"the storage daemon of {self.disk.name} was not started")
        return self._process

    def check_cache(self) -> None:
        """Raises if the host's page cache has pages of the disk, which would hide its throttle."""
        if cached := cached_bytes(self.disk.path):
            raise HarnessError(
                f"{self.disk.name}: the host's page cache has {cached} bytes of {self.disk.path}, "
                "so reads can be faster than the disk. Serve it with cache.direct=on."
            )

    def stop(self) -> None:
        """Ends the storage daemon. Raises if a throttled disk is in the host's page cache."""
        if not self._process:
            return
        self._process.kill()
        self._process = None
        if self.disk.throttle and not self.disk.in_memory:
            self.check_cache()

    def report(self) -> str:
        """Returns the end of the storage daemon's log."""
        return f"--- storage daemon of {self.disk.name}\n{tail(self.log)}"
