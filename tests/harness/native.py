# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs native guests: user-mode Linux with the driver built in, at the machine's own speed.

The kernel is Debian's source with the patches of guest-driver/intree, so it has no ftrace, kprobes
and modules. Patches of tests/native-kernel/patches, for the lab only, put guest memory into a
sealed memfd and use eventfds for interrupts, because tmemd accepts nothing else. The kernel process
itself is the vhost-user front end of the device and of the disks. It runs the programs of the guest
in other processes, which it stops for each system call with seccomp.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import initramfs
from harness.channel import Channel
from harness.debug_kernel import (
    APPLY,
    NEWER_SOURCE,
    check_config,
    digest_of,
    driver_sources,
    merge,
    patches,
    run,
    run_make,
    say,
    unpack,
)
from harness.disk import Disk
from harness.guest import Guest
from harness.machine import EVERYWHERE, Pinning
from harness.paths import TESTS, HarnessError, cache_dir
from harness.process import Process, tail
from harness.storage import Export
from harness.vm import MIB, TROUBLE
from harness.wait import Deadline

NATIVE_KERNEL = TESTS / "native-kernel"
CONFIGS = (NATIVE_KERNEL / "native.config", NATIVE_KERNEL / "7.3.config")
BINARIES_KEPT = 8  # number of built kernels that stay in the cache
# Number of source trees with objects in the cache, of 1.5 GB each, for branches with other patches.
TREES_KEPT = 4
BOOT_SECONDS = 60.0  # longest boot; it takes about 2 s on an idle machine
AGENT_READY = "agent: ready"  # message of tests/guest/agent.c when its terminal is open
# Pause between checks for AGENT_READY, and so the resolution with which a boot is measured.
READY_POLL_SECONDS = 0.01
DEVICE_ID_BLOCK = 2
DEVICE_ID_TMEM = 63
# Directories of drivers that this kernel does not need. Their sources are removed, except for
# Kconfig.
UNUSED = ("drivers/gpu", "drivers/net/ethernet", "drivers/net/wireless", "drivers/media",
          "drivers/staging", "drivers/infiniband", "drivers/iio", "sound")  # fmt: skip


# Series of the kernel. A system call takes two thirds of the time with its seccomp that it takes
# with ptrace of 6.12. A kernel for several processors is no option: processes crash and lose writes
# to memory mappings, also without the driver.
SERIES = "7.3"


def chosen_kernel() -> str:
    """Returns the path of a kernel that TMEM_NATIVE_KERNEL names, or SERIES."""
    return os.environ.get("TMEM_NATIVE_KERNEL", SERIES)


def build() -> Path:
    """Returns the chosen kernel: the one in the cache is built from these sources.

    The cache keeps the tree with its objects,
    so that a change of the driver only compiles the driver and links. The first build takes 5 to 13
    minutes of one core.
    """
    name = chosen_kernel()
    if name != SERIES:
        if not os.access(name, os.X_OK):
            raise HarnessError(f"TMEM_NATIVE_KERNEL: {name} is no program")
        return Path(name)
    base = cache_dir() / "kernel/native"
    base.mkdir(parents=True, exist_ok=True)
    sources = [*patches(), *_kernel_patches(), *CONFIGS]
    tree = base / digest_of(sources)
    linux = tree / f"linux-{digest_of(driver_sources())}"
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not linux.is_file():
            _build(base, tree, linux)
        os.utime(linux)
        return linux


def _kernel_patches() -> list[Path]:
    return sorted((NATIVE_KERNEL / "patches" / SERIES).glob("*.patch"))


def _build(base: Path, tree: Path, linux: Path) -> None:
    source, out = tree / "source", tree / "out"
    if not (tree / "ready").exists():
        trees = [path for path in base.iterdir() if path.is_dir()]
        trees.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in trees[TREES_KEPT - 1 :]:
            shutil.rmtree(old)
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        say("fetching the source of the native kernel")
        unpack(tree, *NEWER_SOURCE)
        for directory in UNUSED:
            for path in (source / directory).rglob("*.[ch]"):
                path.unlink()
        out.mkdir()
        run(APPLY, source)
        for patch in _kernel_patches():
            run("patch", "-d", source, "-p1", "--fuzz=0", "--quiet", "-i", patch)
        (tree / "ready").touch()
    run(APPLY, "--driver-only", source)
    config = tree / "all.config"
    options = merge(path.read_text() for path in CONFIGS)
    options["CONFIG_LOCALVERSION"] = '"-tmem-native"'
    config.write_text("".join(f"{option}={value}\n" for option, value in options.items()))
    arguments = ["ARCH=um", f"O={out}", f"KCONFIG_ALLCONFIG={config}"]
    if not (out / ".config").exists():
        run_make(source, *arguments, "allnoconfig")
        check_config(config, out / ".config")
    say("building the native kernel: minutes at first, later only seconds")
    run_make(source, *arguments, f"-j{os.cpu_count() or 1}", "linux")
    scratch = linux.with_suffix(".new")
    shutil.copy2(out / "linux", scratch)
    subprocess.run(["strip", "--strip-debug", str(scratch)], check=True)
    scratch.rename(linux)
    kept = sorted(tree.glob("linux-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[BINARIES_KEPT:]:
        path.unlink()


@dataclass(frozen=True)
class NativeConfig:
    """Configuration of a native guest.

    `tmem` is the socket of a tmemd that runs already, because the kernel connects only once.
    """

    name: str = "vm1"
    memory_bytes: int = 256 * MIB
    disks: Sequence[Disk] = ()
    tmem: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    parameters: str = ""  # parameters of the driver, such as "verify_every=0 deadline_ms=100"
    cmdline: str = ""
    direct: bool = True  # False: disks go through the host's page cache


class NativeGuest(Guest):
    """The running system in a native guest."""

    disk_names: Sequence[str] = ()

    def disk(self, name: str) -> str:
        """Returns the block device of a disk. Disks appear in the order of the command line."""
        if name not in self.disk_names:
            raise HarnessError(f"guest: the VM has no disk '{name}'")
        return f"vd{chr(ord('a') + self.disk_names.index(name))}"


class NativeVm:
    """A native guest in `directory`, which holds its sockets and logs. start() boots it."""

    def __init__(
        self, config: NativeConfig, directory: Path, pinning: Pinning = EVERYWHERE
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._processor = pinning.guests
        self.config = config
        self.name = config.name
        self.directory = directory
        self.console = directory / "console.log"
        self.exports = [
            Export(disk, directory, direct=config.direct, processor=pinning.host)
            for disk in config.disks
        ]
        self.boot_seconds = 0.0
        self._boot_files: tuple[Path, Path] | None = None
        self._process: Process | None = None
        self._guest: NativeGuest | None = None
        self._trouble_expected = False

    def prepare(self) -> tuple[Path, Path]:
        """Makes the kernel and the initramfs, so that start() need not do it; returns both."""
        if not self._boot_files:
            image = initramfs.build(None, self.directory / "initramfs", files=self.config.files)
            self._boot_files = build(), image
        return self._boot_files

    def command(self, agent: int) -> list[str]:
        """Returns the guest's command line; `agent` is the descriptor that leads to the agent."""
        config = self.config
        linux, image = self.prepare()
        # A kernel that is given by its path ignores arguments that it does not know.
        command = [
            str(linux), f"mem={config.memory_bytes // MIB}M", f"initrd={image}", "rdinit=/init",
            "con=null", "con0=null,fd:1", f"ssl0=fd:{agent}", "TMEM_AGENT=/dev/ttyS0",
            "loglevel=6", "oops=panic", "panic=-1", "seccomp=on",
        ]  # fmt: skip
        for export in self.exports:
            command.append(f"virtio_uml.device={export.socket}:{DEVICE_ID_BLOCK}")
        if config.tmem:
            command.append(f"virtio_uml.device={config.tmem}:{DEVICE_ID_TMEM}")
        command += [f"virtio_tmem.{word}" for word in config.parameters.split()]
        return [*command, *config.cmdline.split()]

    def start(self) -> NativeGuest:
        """Boots the guest; returns it when its agent answers."""
        for export in self.exports:
            export.start()
        ours, theirs = socket.socketpair()
        with theirs:
            command = self.command(theirs.fileno())
            began = time.monotonic()
            environment = {"TMPDIR": "/dev/shm"}
            self._process = Process(
                f"kernel of {self.name}",
                command,
                self.console,
                environment,
                [theirs.fileno()],
                processor=self._processor,
            )
        deadline = Deadline(BOOT_SECONDS, f"{self.name}: the guest's agent answers")
        # The terminal must not have more than 4 KiB of input when the agent opens it. UML would
        # then stop reading, and line_unthrottle() does not start it again (arch/um/drivers/line.c).
        while AGENT_READY not in self.console.read_text(errors="replace"):
            deadline.check()
            self._check_alive()
            time.sleep(READY_POLL_SECONDS)
        channel = Channel(ours, deadline, self._check_alive)
        self.boot_seconds = time.monotonic() - began
        self._guest = NativeGuest(channel, self._check_alive)
        self._guest.disk_names = [disk.name for disk in self.config.disks]
        return self._guest

    @property
    def process(self) -> Process:
        if not self._process:
            raise HarnessError(f"{self.name} was not started")
        return self._process

    @property
    def guest(self) -> NativeGuest:
        if not self._guest:
            raise HarnessError(f"{self.name} has no guest: it was not started")
        return self._guest

    def stop(self) -> None:
        """Ends the guest, whether or not it runs, and then its disks."""
        if self._guest:
            self._guest.close()
            self._guest = None
        if self._process:
            self._process.kill()
        for export in self.exports:
            export.stop()

    def expect_trouble(self) -> None:
        """Ignores oopses and warnings on the console from now on."""
        self._trouble_expected = True

    def check_console(self) -> None:
        """Raises if the guest's kernel reported a fault."""
        if self._trouble_expected or not self.console.exists():
            return
        text = self.console.read_text(errors="replace")
        if found := re.search(TROUBLE, text):
            start = text.rfind("\n", 0, found.start()) + 1
            raise HarnessError(
                f"{self.name}: the guest's console shows a fault:\n{text[start : start + 4096]}"
            )

    def _check_alive(self) -> None:
        self.process.expect_alive()
        if not self._trouble_expected:
            self.check_console()

    def report(self) -> str:
        """Returns the state and the ends of the logs, for a failed test's report."""
        state = "not started"
        if self._process:
            status = self._process.status()
            state = "running" if status is None else f"ended with status {status}"
        exports = "".join(f"{export.report()}\n" for export in self.exports)
        return f"{exports}--- {self.name}: kernel {state}; console\n{tail(self.console)}"
