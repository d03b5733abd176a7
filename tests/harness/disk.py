# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Creates disk images, and attaches them to a VM: read-only, throttled, with a serial number."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness import toolchain
from harness.paths import HarnessError

SERIAL_MAX = 20  # longest serial number of virtio-blk


@dataclass(frozen=True)
class Throttle:
    """Limits of a disk per second: number of requests and bytes, reads and writes together."""

    iops: int
    bytes_per_second: int

    def arguments(self) -> dict[str, int]:
        return {"iops-total": self.iops, "bps-total": self.bytes_per_second}


# Limits of a common cloud volume, used for the demo's disks.
CLOUD_VOLUME = Throttle(iops=3000, bytes_per_second=125_000_000)


@dataclass(frozen=True)
class Disk:
    """An image attached as virtio-blk; the guest finds it by `name` (its serial)."""

    name: str
    path: Path
    format: str = "raw"
    read_only: bool = False
    throttle: Throttle | None = None
    debug: bool = False  # whether Vm.qemu_io() can stop the disk's requests
    # Only native guests use the following fields.
    part: tuple[int, int] | None = None  # first byte and size of the part of the image to attach
    discard: bool = False  # whether the guest's discards reach the image
    in_memory: bool = False  # whether the image is on a file system in memory, such as tmpfs

    def __post_init__(self) -> None:
        if len(self.name) > SERIAL_MAX or not self.name.isalnum():
            raise HarnessError(
                f"disk name '{self.name}' is not 1 to {SERIAL_MAX} letters and digits"
            )

    @property
    def node(self) -> str:
        """Returns the block node that the device uses and that snapshots are taken of."""
        return f"{self.name}-image"

    def arguments(self) -> list[str]:
        """Returns QEMU's options for the disk."""
        only = "on" if self.read_only else "off"
        option = f"driver={self.format},node-name={self.node},read-only={only}"
        out = ["-blockdev", f"driver=file,node-name={self.name}-file,filename={self.path},"
               f"read-only={only}"]  # fmt: skip
        below = f"{self.name}-file"
        if self.debug:
            below = f"{self.name}-debug"
            out += ["-blockdev", f"driver=blkdebug,node-name={below},image={self.name}-file"]
        out += ["-blockdev", f"{option},file={below}"]
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
    """Creates a sparse raw image."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    return path


def ext4(path: Path, size_bytes: int, tree: Path | None = None, *options: str) -> Path:
    """Creates a raw ext4 image, filled with the contents of `tree` if it is given.

    The command names all features of a stock ext4 with 4 KiB blocks, so that the image does not
    depend on the machine's mke2fs.conf.
    """
    blank(path, size_bytes)
    command = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "root_owner=0:0", *options]
    if tree:
        command += ["-d", str(tree)]
    _run([*command, str(path)])
    return path


def xfs(path: Path, size_bytes: int, *options: str) -> Path:
    """Creates a raw xfs image with features that the oldest kernel under test can mount."""
    blank(path, size_bytes)
    _run(["mkfs.xfs", "-q", "-f", *options, str(path)])
    return path


# Packages of mkfs.xfs and its libraries, from a Debian release with version 6.15 or newer of
# mkfs.xfs, which can make zoned file systems.
ZONED_SUITE = "forky"
ZONED_PACKAGES = ("xfsprogs", "libblkid1", "libc6", "libinih1", "liburcu8(t64)?", "libuuid1")
ZONED_ZONE_BYTES = 16 << 20


def zoned_xfs(path: Path, size_bytes: int, zones: Path) -> Path:
    """Creates a zoned xfs, with the zones of its data in the image `zones`.

    Linux 6.15 and newer can mount it.
    """
    blank(path, size_bytes)
    root = toolchain.programs("xfsprogs", ZONED_SUITE, ZONED_PACKAGES)
    volume = f"zoned=1,rtdev={zones},rgsize={ZONED_ZONE_BYTES}"
    _run([str(root / "usr/sbin/mkfs.xfs"), "-q", "-f", "-r", volume, str(path)])
    return path


# Offsets in the superblock in bytes, and the bit that allows XFS_IOC_EXCHANGE_RANGE (Linux 6.10),
# from fs/xfs/libxfs/xfs_format.h. Older versions of mkfs.xfs cannot set the bit.
_XFS_SECTOR_BYTES = 512
_XFS_FEATURES_INCOMPAT_AT = 216
_XFS_CRC_AT = 224
_XFS_INCOMPAT_EXCHRANGE = 1 << 6


def xfs_allow_exchange(path: Path) -> None:
    """Allows the exchange of file ranges on an xfs image.

    Kernels before 6.10 then refuse to mount it.
    """
    with open(path, "r+b") as file:
        sector = bytearray(file.read(_XFS_SECTOR_BYTES))
        if sector[:4] != b"XFSB":
            raise HarnessError(f"{path} is not an xfs image")
        (features,) = struct.unpack_from(">I", sector, _XFS_FEATURES_INCOMPAT_AT)
        features |= _XFS_INCOMPAT_EXCHRANGE
        struct.pack_into(">I", sector, _XFS_FEATURES_INCOMPAT_AT, features)
        struct.pack_into("<I", sector, _XFS_CRC_AT, 0)
        struct.pack_into("<I", sector, _XFS_CRC_AT, _crc32c(sector))
        file.seek(0)
        file.write(sector)


def _crc32c(data: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def erofs(path: Path, tree: Path, *options: str) -> Path:
    """Creates an erofs image with the contents of `tree`."""
    _run(["mkfs.erofs", "-E", "legacy-compress", *options, str(path), str(tree)])
    return path


def interleaved_fat(path: Path, name: str, file_bytes: int) -> Path:
    """Creates a FAT32 with a file of zeroes whose even pages are in front of its odd ones."""
    blank(path, 2 * file_bytes)
    _run([*MKFS["vfat"], str(path)])
    with path.open("r+b") as file:
        boot = file.read(512)
        (reserved,) = struct.unpack_from("<H", boot, 14)
        (fat_sectors,) = struct.unpack_from("<I", boot, 36)
        data = (reserved + boot[16] * fat_sectors) * 512
        pages = file_bytes // 4096
        if data % 4096:
            raise HarnessError(f"the clusters of {path} begin at byte {data}")
        # Cluster 2 is the root directory. A cluster's entry has the number of the next one.
        clusters = [3 + page // 2 + page % 2 * (pages // 2) for page in range(pages)]
        entries = [0] * pages
        for cluster, behind in zip(clusters, [*clusters[1:], 0x0FFFFFFF], strict=True):
            entries[cluster - 3] = behind
        for fat in range(boot[16]):
            file.seek((reserved + fat * fat_sectors) * 512 + 4 * 3)
            file.write(struct.pack(f"<{pages}I", *entries))
        file.seek(data)
        entry = struct.pack(
            "<11sB8xH4xHI", name.encode().ljust(11), 0x20, 0, clusters[0], file_bytes
        )
        file.write(entry)
    return path


def btrfs(paths: list[Path], size_bytes: int, *options: str) -> None:
    """Creates a btrfs on several raw images of the same size."""
    for path in paths:
        blank(path, size_bytes)
    _run(["mkfs.btrfs", "-q", "-f", *options, *map(str, paths)])


# Modules of the guest that a file system of a type needs, unless they are built in.
MODULES = {
    "xfs": ("xfs",),
    "vfat": ("vfat", "nls_cp437", "nls_ascii"),
    "exfat": ("exfat",),
    "btrfs": ("btrfs",),
    "f2fs": ("crc32_generic", "f2fs"),
    "erofs": ("erofs",),
}

# Commands that make file systems, for types that have no function of their own here.
MKFS = {
    "ext2": ("mke2fs", "-q", "-F", "-t", "ext2", "-b", "4096", "-E", "root_owner=0:0"),
    "ext3": ("mke2fs", "-q", "-F", "-t", "ext3", "-b", "4096", "-E", "root_owner=0:0"),
    "vfat": ("mkfs.vfat", "-F", "32", "-s", "8"),
    "exfat": ("mkfs.exfat",),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
    "f2fs": ("mkfs.f2fs", "-q", "-f"),
}


@dataclass(frozen=True)
class FileSystem:
    """A kind of file system under test, with its options for mkfs and mount."""

    kind: str
    make_options: tuple[str, ...] = ()
    mount_options: str = ""
    # Operations that the torture program omits on this file system: stock kernels without any
    # module return wrong bytes after them, or the type does not support them.
    left_out: tuple[str, ...] = ()
    exchange: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        return MODULES.get(self.kind, ())

    def make(self, path: Path, size_bytes: int) -> Path:
        if self.kind == "xfs":
            xfs(path, size_bytes, *self.make_options)
            if self.exchange:
                xfs_allow_exchange(path)
            return path
        if self.kind in MKFS:
            blank(path, size_bytes)
            _run([*MKFS[self.kind], *self.make_options, str(path)])
            return path
        return ext4(path, size_bytes, None, *self.make_options)


# Kinds of ext4 and xfs that the driver serves, by the names that tests use.
FILE_SYSTEMS = {
    "ext4": FileSystem("ext4"),
    "ext4-1k": FileSystem("ext4", ("-b", "1024")),
    "ext4-writeback": FileSystem("ext4", mount_options="data=writeback"),
    "ext4-nojournal": FileSystem("ext4", ("-O", "^has_journal")),
    "ext4-bigalloc": FileSystem("ext4", ("-O", "bigalloc", "-C", "16384")),
    "xfs": FileSystem("xfs", ("-m", "reflink=1")),
    "xfs-1k": FileSystem("xfs", ("-b", "size=1024", "-m", "reflink=1")),
    "xfs-exchange": FileSystem("xfs", ("-m", "reflink=1"), exchange=True),
    "xfs-noreflink": FileSystem("xfs", ("-m", "reflink=0")),
}
# Other types that the driver serves, which fewer tests use.
OTHER_FILE_SYSTEMS = {
    "ext2": FileSystem("ext2"),
    "ext3": FileSystem("ext3"),
    "vfat": FileSystem("vfat"),
    # docs/upstream/kernel-faults.md describes the fault of direct reads.
    "exfat": FileSystem("exfat", left_out=("direct-read",)),
    # A swap file of a btrfs needs a flag that the torture program does not set.
    "btrfs": FileSystem("btrfs", left_out=("swap",)),
    "btrfs-dup": FileSystem("btrfs", ("-d", "dup"), left_out=("swap",)),
    # A swap file of an f2fs has to be pinned.
    "f2fs": FileSystem("f2fs", left_out=("swap",)),
}


def find(name: str) -> FileSystem:
    """Returns the file system that tests call `name`."""
    return FILE_SYSTEMS.get(name) or OTHER_FILE_SYSTEMS[name]


def omit_arguments(name: str) -> str:
    """Returns the torture program's arguments that omit some operations on a file system."""
    return " ".join(f"--no-{operation}" for operation in find(name).left_out)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)} failed: {done.stdout.strip()}")
