# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Builds the guest's initramfs from busybox, modules, the agent, and a test's own files.

The archive (cpio "newc") depends only on its contents: entries are sorted, without times and
owners.
"""

from __future__ import annotations

import lzma
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.kernel import Kernel
from harness.paths import TESTS, HarnessError, guest_program

# Modules for the devices of every VM of the harness. Kernel.module_files() leaves out modules that
# are built into the kernel.
BASE_MODULES = ("virtio_pci", "virtio_blk", "virtio_console")

INIT = """\
#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/ TERM=dumb
# The kernel command line may set TMEM_AGENT to the terminal of the agent.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
while read -r module; do
	insmod "/modules/$module" || echo "init: insmod $module failed"
done </modules/order
echo 'init: ready'
# The agent has to live as long as the guest.
while :; do
	/sbin/agent $TMEM_AGENT
	echo "init: the agent ended with status $?"
done
"""

DIRECTORIES = ("bin", "dev", "mnt", "modules", "proc", "root", "sbin", "sys", "tmp", "usr/bin")


class Archive:
    """A cpio archive that is being built. Paths are relative to the guest's root."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, bytes]] = {}

    def add_directory(self, path: str) -> None:
        path = path.strip("/")
        if not path or path in self._entries:
            return
        self.add_directory(_parent(path))
        self._entries[path] = (stat.S_IFDIR | 0o755, b"")

    def add_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.add_directory(_parent(path))
        self._entries[path.strip("/")] = (stat.S_IFREG | mode, content)

    def add_link(self, path: str, target: str) -> None:
        self.add_directory(_parent(path))
        self._entries[path.strip("/")] = (stat.S_IFLNK | 0o777, target.encode())

    def add_device(self, path: str, major: int, minor: int) -> None:
        """Adds a character device. Its entry holds the major and minor number as content."""
        self.add_directory(_parent(path))
        self._entries[path.strip("/")] = (stat.S_IFCHR | 0o600, bytes((major, minor)))

    def bytes(self) -> bytes:
        out = bytearray()
        for number, path in enumerate(sorted(self._entries), start=1):
            mode, content = self._entries[path]
            device = (0, 0)
            if stat.S_ISCHR(mode):
                device, content = (content[0], content[1]), b""
            _append(out, number, path, mode, content, device=device)
        _append(out, 0, "TRAILER!!!", 0)
        return bytes(out)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _append(
    out: bytearray,
    inode: int,
    path: str,
    mode: int,
    content: bytes = b"",
    *,
    device: tuple[int, int] = (0, 0),
) -> None:
    name = path.encode() + b"\0"
    # Fields: ino, mode, uid, gid, nlink, mtime, size, dev major and minor, rdev major and minor,
    # name length, checksum. See Documentation/driver-api/early-userspace of the kernel.
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name), 0)
    out += b"070701" + b"".join(b"%08x" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += content
    out += bytes(-len(out) % 4)


def busybox() -> Path:
    """Returns the machine's busybox, which must be linked statically."""
    path = Path("/bin/busybox")
    if not path.is_file() or b"/lib64/ld-linux" in path.read_bytes():
        raise HarnessError("/bin/busybox is missing or not static: apt-get install busybox-static")
    return path


def _module_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def build(
    kernel: Kernel | None,
    destination: Path,
    *,
    modules: Sequence[str] = (),
    files: Mapping[str, Path] | None = None,
) -> Path:
    """Writes the initramfs and returns its path.

    `modules` are loaded at boot with their dependencies; a kernel of None has no modules. `files`
    maps paths in the guest to files of the host, whose mode is kept.
    """
    archive = Archive()
    for directory in DIRECTORIES:
        archive.add_directory(directory)
    archive.add_device("dev/console", 5, 1)
    archive.add_file("init", INIT.encode(), 0o755)
    box = busybox()
    archive.add_file("bin/busybox", box.read_bytes(), 0o755)
    applets = subprocess.run([box, "--list-full"], check=True, stdout=subprocess.PIPE, text=True)
    for applet in applets.stdout.split():
        if applet != "bin/busybox":
            archive.add_link(applet, "/bin/busybox")
    archive.add_file("sbin/agent", guest_program(TESTS / "guest/agent.c").read_bytes(), 0o755)
    order = []
    for path in kernel.module_files((*BASE_MODULES, *modules)) if kernel else ():
        name = path.name.removesuffix(".xz")
        archive.add_file(f"modules/{name}", _module_bytes(path))
        order.append(name)
    archive.add_file("modules/order", "".join(f"{name}\n" for name in order).encode())
    for place, source in (files or {}).items():
        archive.add_file(place, source.read_bytes(), source.stat().st_mode & 0o777)
    destination.write_bytes(archive.bytes())
    return destination
