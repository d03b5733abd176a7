# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Disk images, and how a VM sees them: read-only, throttled, with a name as serial."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.paths import HarnessError

SERIAL_MAX = 20  # of virtio-blk


@dataclass(frozen=True)
class Throttle:
    """Limits of a disk: requests and bytes a second, both directions together."""

    iops: int
    bytes_per_second: int

    def arguments(self) -> dict[str, int]:
        return {"iops-total": self.iops, "bps-total": self.bytes_per_second}


# A common cloud volume; the demo's disks.
CLOUD_VOLUME = Throttle(iops=3000, bytes_per_second=125_000_000)


@dataclass(frozen=True)
class Disk:
    """An image attached as virtio-blk; the guest finds it by `name` (its serial)."""

    name: str
    path: Path
    format: str = "raw"
    read_only: bool = False
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        if len(self.name) > SERIAL_MAX or not self.name.isalnum():
            raise HarnessError(f"disk name '{self.name}': up to {SERIAL_MAX} letters and digits")

    @property
    def node(self) -> str:
        """The block node that the device uses; what snapshots are taken of."""
        return f"{self.name}-image"

    def arguments(self) -> list[str]:
        """QEMU's options for it."""
        only = "on" if self.read_only else "off"
        option = f"driver={self.format},node-name={self.node},read-only={only}"
        out = ["-blockdev", f"driver=file,node-name={self.name}-file,filename={self.path},"
               f"read-only={only}", "-blockdev", f"{option},file={self.name}-file"]  # fmt: skip
        top = self.node
        if self.throttle:
            limits = "".join(
                f",x-{key}={value}" for key, value in self.throttle.arguments().items()
            )
            top = f"{self.name}-throttled"
            out += ["-object", f"throttle-group,id={self.name}-limits{limits}"]
            out += ["-blockdev", f"driver=throttle,node-name={top},file={self.node},"
                    f"throttle-group={self.name}-limits,read-only={only}"]  # fmt: skip
        device = f"virtio-blk-pci,drive={top},serial={self.name},id={self.name}"
        return [*out, "-device", device]


def blank(path: Path, size_bytes: int) -> Path:
    """A sparse raw image."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    return path


def ext4(path: Path, size_bytes: int, tree: Path | None = None, *options: str) -> Path:
    """A raw ext4 image, filled with a folder's contents if one is given.

    Options of the machine's mke2fs.conf do not matter: the features of a stock ext4
    are asked for, with 4 KiB blocks.
    """
    blank(path, size_bytes)
    command = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "root_owner=0:0", *options]
    if tree:
        command += ["-d", str(tree)]
    _run([*command, str(path)])
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stdout.strip()}")
