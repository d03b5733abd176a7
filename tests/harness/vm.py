# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a virtual machine: QEMU with a stock kernel, its QMP, its console and the guest's agent."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import initramfs
from harness.channel import Channel, ChannelClosed
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import HarnessError, qemu_binary
from harness.process import Process, tail
from harness.qmp import Qmp, QmpError
from harness.wait import Deadline, until

MIB = 1 << 20
END_SECONDS = 20.0  # longest time from the close of QEMU's sockets until its exit
BOOT_SECONDS = 90.0  # longest boot; a cloud kernel takes about 3 s under TCG on an idle machine

# Messages on the console that fail a test. Reports of KCSAN are left out, because it also reports
# races of the kernel itself. test_debug_kernel.py checks its reports about the module.
TROUBLE = re.compile(
    r"Kernel panic|BUG: (?!KCSAN)|Oops|general protection|WARNING: |rcu_\w+ detected stalls"
    r"|blocked for more than|soft lockup|Bad page state|Internal error|EXT4-fs error"
    r"|XFS .*[Cc]orruption|INFO: trying to register non-static key"
    # The driver found that a page changed although its retained entry was still there.
    r"|a page was wrong \(a clean page changed"
)


@dataclass(frozen=True)
class Tmem:
    """The virtio-tmem device of a VM. `socket` is tmemd's socket; tmemd need not run.

    With TMEM_RETAIN=on, the device has retain=on unless `properties` sets retain.
    """

    socket: Path
    num_queues: int | None = None
    queue_size: int | None = None
    reconnect_ms: int = 100
    properties: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        device = "vhost-user-tmem-pci,id=tmem0,chardev=tmem"
        if self.num_queues is not None:
            device += f",num-queues={self.num_queues}"
        if self.queue_size is not None:
            device += f",queue-size={self.queue_size}"
        properties = dict(self.properties)
        if retain := os.environ.get("TMEM_RETAIN"):
            properties.setdefault("retain", retain)
        device += "".join(f",{key}={value}" for key, value in properties.items())
        chardev = f"socket,id=tmem,path={self.socket},reconnect-ms={self.reconnect_ms}"
        return ["-chardev", chardev, "-device", device]


@dataclass(frozen=True)
class Config:
    """Configuration of a VM."""

    kernel: Kernel
    name: str = "vm1"
    memory_bytes: int = 256 * MIB
    cpus: int = 1
    disks: Sequence[Disk] = ()
    tmem: Tmem | None = None
    modules: Sequence[str] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    cmdline: str = ""
    machine: str = "q35"
    tcg_threads: str | None = None  # "multi" or "single"; None: the mode that the kernel supports
    tcg_buffer_bytes: int | None = (
        None  # size of the buffer for translated code; None: QEMU's default
    )
    accelerator: str | None = None  # QEMU's accelerator; None: TMEM_ACCEL, or tcg if it is not set
    memory_backend: str = "memory-backend-memfd,share=on"
    incoming: bool = False  # True: wait for the state of another QEMU instead of booting
    arguments: Sequence[str] = ()
    qemu: Path | None = None  # QEMU to run instead of the one under test


class Vm:
    """A VM in `directory`, which holds its sockets and logs. start() boots it."""

    def __init__(self, config: Config, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.name = config.name
        self.console = directory / "console.log"
        self.log = directory / "qemu.log"
        self.directory = directory
        self._initramfs: Path | None = None
        self._process: Process | None = None
        self._qmp: Qmp | None = None
        self._guest: Guest | None = None
        self._trouble_expected = False

    # Starting and ending

    def prepare(self) -> Path:
        """Makes the initramfs, so that start() need not do it; returns its path."""
        config = self.config
        if not self._initramfs:
            self._initramfs = initramfs.build(
                config.kernel,
                self.directory / "initramfs",
                modules=config.modules,
                files=config.files,
            )
        return self._initramfs

    def command(self) -> list[str]:
        """Returns QEMU's command line."""
        config = self.config
        accelerator = config.accelerator or os.environ.get("TMEM_ACCEL", "tcg")
        if accelerator == "tcg":
            threads = config.tcg_threads or config.kernel.tcg_threads
            # la57 is off because a fifth level of page tables only costs time under TCG.
            buffer = f",tb-size={config.tcg_buffer_bytes // MIB}" if config.tcg_buffer_bytes else ""
            processor = ["-accel", f"tcg,thread={threads}{buffer}", "-cpu", "max,la57=off"]
        else:
            processor = ["-accel", accelerator, "-cpu", "host"]
        image = self.prepare()
        # no_timer_check: the kernel's check of the timer may fail on a busy machine, because the
        # emulated timer is late.
        fixed = "console=ttyS0 loglevel=6 oops=panic panic=0 tsc=reliable no_timer_check"
        cmdline = f"{fixed} {config.cmdline}"
        size = config.memory_bytes
        qemu = config.qemu or qemu_binary()
        command = [
            str(qemu), "-name", config.name, "-nodefaults", "-no-user-config",
            "-display", "none", "-machine", f"{config.machine},memory-backend=ram", *processor,
            "-smp", str(config.cpus), "-m", f"{size // MIB}M",
            "-object", f"{config.memory_backend},id=ram,size={size}",
            "-L", "/usr/share/seabios", "-L", "/usr/share/qemu",
            "-kernel", str(config.kernel.vmlinuz), "-initrd", str(image), "-append", cmdline,
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-qmp", f"unix:{self.directory / 'qmp'},server=on,wait=off",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,path={self.directory / 'agent'},server=on,wait=off",
            "-device", "virtserialport,chardev=agent,name=tmem.agent",
        ]  # fmt: skip
        for disk in config.disks:
            command += disk.arguments()
        if config.tmem:
            command += config.tmem.arguments()
        if config.incoming:
            command += ["-incoming", "defer"]
        return [*command, *config.arguments]

    def launch(self) -> None:
        """Starts QEMU and connects QMP; the guest boots meanwhile."""
        if self._process and self._process.is_alive():
            raise HarnessError(f"{self.name} is already running")
        for name in ("qmp", "agent"):
            (self.directory / name).unlink(missing_ok=True)
        self._process = process = Process(f"QEMU of {self.name}", self.command(), self.log)

        def listening() -> bool:
            process.expect_alive()
            return (self.directory / "qmp").exists() and (self.directory / "agent").exists()

        until(listening, 20, f"{self.name}: QEMU opens its sockets")

        def greeted() -> Qmp | None:
            # QEMU refuses connections between its bind(2) and listen(2), and while it ends because
            # it has rejected its options. In the latter case QEMU's own message is more useful.
            process.expect_alive()
            try:
                return Qmp(self.directory / "qmp", self.name)
            except QmpError:
                return None

        self._qmp = until(greeted, 20, f"{self.name}: QEMU accepts a QMP connection")

    def start(self) -> Guest:
        """Launches and boots the VM; returns the guest when its agent answers."""
        self.launch()
        return self.connect()

    def connect(self, seconds: float = BOOT_SECONDS) -> Guest:
        """Connects to the guest's agent after a boot, a reset or a loadvm. Returns the guest."""
        if self._guest:
            self._guest.close()
            self._guest = None
        deadline = Deadline(seconds, f"{self.name}: the guest's agent answers")
        try:
            channel = Channel(self.directory / "agent", deadline, self._check_alive)
        except ChannelClosed:
            # QEMU has closed the agent's socket because it ends. Its own message is more useful.
            self.process.wait(END_SECONDS)
            self.process.expect_alive()
            raise
        self._guest = Guest(channel, self._check_alive)
        return self._guest

    def _check_alive(self) -> None:
        self.process.expect_alive()
        if not self._trouble_expected:
            self.check_console()

    def quit(self) -> None:
        """Ends QEMU by QMP; its exit status must be 0."""
        self.qmp.execute("quit")
        if status := self.process.wait(20):
            raise HarnessError(f"{self.name}: QEMU ended with status {status}:\n{tail(self.log)}")
        self.stop()

    def stop(self) -> None:
        """Ends QEMU, whether it runs, is stopped, or has ended."""
        if self._guest:
            self._guest.close()
            self._guest = None
        if self._process:
            self._process.kill()
        if self._qmp:
            self._qmp.close()
            self._qmp = None

    # Parts of the VM

    @property
    def process(self) -> Process:
        if not self._process:
            raise HarnessError(f"{self.name} was not started")
        return self._process

    @property
    def qmp(self) -> Qmp:
        if not self._qmp:
            raise HarnessError(
                f"{self.name} has no QMP connection: the VM was not started, or has ended"
            )
        return self._qmp

    @property
    def guest(self) -> Guest:
        if not self._guest:
            raise HarnessError(
                f"{self.name} has no connection to its guest: the VM has not booted, or was reset"
            )
        return self._guest

    # Life cycle of the machine

    def reboot(self) -> Guest:
        """Reboots the guest, and returns it when its agent answers."""
        before = self.guest.boot_id
        mark = self.qmp.events_seen()
        self.guest.start("reboot -f")
        self.qmp.wait_event("RESET", 30, mark)
        guest = self.connect()
        if guest.boot_id == before:
            raise HarnessError(f"{self.name}: the guest did not boot again after the reset")
        return guest

    def suspend(self) -> Guest:
        """Suspends the guest to RAM, wakes it up, and returns it when its agent answers.

        QEMU tells the guest about each connection to the agent's port. While the guest resumes,
        such a message can crash virtio_console of Linux 6.12, and virtio_console of Linux 7.3 loses
        it. So the connection stays until the guest has resumed, and is replaced afterwards.
        """
        resumed = f"resumed {secrets.token_hex(8)}"
        mark = self.qmp.events_seen()
        self.guest.start(f"echo mem >/sys/power/state; echo {resumed} >/dev/console")
        self.qmp.wait_event("SUSPEND", 30, mark)
        self.qmp.execute("system_wakeup")
        self.qmp.wait_event("WAKEUP", 30, mark)

        def has_resumed() -> bool:
            self._check_alive()
            return resumed in self.console.read_text(errors="replace")

        until(has_resumed, BOOT_SECONDS, f"{self.name}: the guest has resumed")
        return self.connect()

    def pause(self) -> None:
        """Runs QMP's stop: vCPUs and devices pause."""
        self.qmp.execute("stop")

    def resume(self) -> None:
        """Resumes the VM with QMP's command cont."""
        self.qmp.execute("cont")

    def status(self) -> str:
        """Returns QMP's run state: "running", "paused", "internal-error", ..."""
        return str(self.qmp.execute("query-status")["status"])

    def save(self, tag: str, seconds: float = 120) -> None:
        """Saves a snapshot into the first writable qcow2 disk, as savevm does."""
        self._snapshot("snapshot-save", tag, seconds)

    def load(self, tag: str, seconds: float = 120) -> Guest:
        """Loads a snapshot, as loadvm does, resumes the guest, and returns it."""
        if self._guest:
            self._guest.close()
            self._guest = None
        self.qmp.execute("stop")
        self._snapshot("snapshot-load", tag, seconds)
        self.qmp.execute("cont")
        return self.connect()

    def _snapshot(self, command: str, tag: str, seconds: float) -> None:
        disks = [disk for disk in self.config.disks if disk.format == "qcow2"]
        nodes = [disk.node for disk in disks if not disk.read_only]
        if not nodes:
            raise HarnessError(f"{self.name}: {command} needs a VM with a writable qcow2 disk")
        arguments = {
            "job-id": f"{command}-{tag}",
            "tag": tag,
            "vmstate": nodes[0],
            "devices": nodes,
        }
        self.qmp.run_job(command, arguments, seconds)

    # Statistics and checks

    def block_stat(self, name: str) -> dict[str, Any]:
        """Returns QEMU's own counters of a disk (rd_bytes, rd_operations, wr_bytes, ...)."""
        for entry in self.qmp.execute("query-blockstats"):
            if name in str(entry.get("qdev", "")).split("/"):
                return dict(entry["stats"])
        raise HarnessError(f"{self.name}: no disk '{name}' in query-blockstats")

    def qemu_io(self, name: str, command: str) -> None:
        """Runs a command of qemu-io on a disk.

        For a disk with `debug`, "break write_aio TAG" stops the next write, and "resume TAG"
        continues it.
        """
        device = f"/machine/peripheral/{name}/virtio-backend"
        arguments = {"command-line": f'qemu-io -d {device} "{command}"'}
        if said := self.qmp.execute("human-monitor-command", arguments).strip():
            raise HarnessError(f"{self.name}: qemu-io {command}: {said}")

    def expect_trouble(self) -> None:
        """Ignores oopses and warnings on the console from now on."""
        self._trouble_expected = True

    def check_console(self) -> None:
        """Raises if the guest's kernel reported a fault."""
        if self._trouble_expected or not self.console.exists():
            return
        text = self.console.read_text(errors="replace")
        if found := TROUBLE.search(text):
            start = text.rfind("\n", 0, found.start()) + 1
            raise HarnessError(
                f"{self.name}: the guest's console shows a fault:\n{text[start : start + 4096]}"
            )

    def report(self) -> str:
        """Returns the command line, state and log ends, for a failed test's report."""
        state = "not started"
        if self._process:
            status = self._process.status()
            state = "running" if status is None else f"ended with status {status}"
        return (
            f"--- {self.name}: QEMU {state}\n{tail(self.log)}\n"
            f"--- {self.name}: console\n{tail(self.console)}"
        )
