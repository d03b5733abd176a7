# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots a VM for a developer: runs commands in it, or gives a prompt.

A blank or filled ext4 disk is mounted at /mnt unless --no-disk. With --daemon, a tmemd is started
and the device is attached. With --ko, the module is copied into the guest and loaded. At the
prompt, each line is a command in the guest. Lines that begin with a dot are commands of the harness
(.help). With --native, the guest is user-mode Linux with the driver built in.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from harness import disk, kernel, module
from harness.daemon import Daemon
from harness.guest import Guest
from harness.native import NativeConfig, NativeVm
from harness.paths import HarnessError
from harness.process import tail
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

HELP = """\
.put HOSTFILE GUESTFILE   .get GUESTFILE HOSTFILE   .console (its last lines)
.reset   .reboot   .pause   .resume   .hmp LINE (human monitor)
.stats   .kill   .stop   .cont   .restart (the daemon)   .quit"""

MODULE_PATH = "/virtio_tmem.ko"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/run-vm", description=__doc__)
    add = parser.add_argument
    add(
        "--native",
        action="store_true",
        help="run the guest as user-mode Linux instead of in QEMU; options for QEMU and for the "
        "module then have no effect",
    )
    add("--kernel", default="6.12", choices=sorted(kernel.NAMES), help="kernel series of the guest")
    add("--memory", default=256, type=int, metavar="MIB", help="guest memory in MiB")
    add("--cpus", default=1, type=int)
    add("--disk-size", default=512, type=int, metavar="MIB", help="size of the disk at /mnt")
    add("--tree", type=Path, help="copy this directory to the disk at /mnt")
    add("--no-disk", action="store_true")
    add("--throttle", action="store_true", help="make the disk as slow as a cloud volume")
    add("--ko", type=Path, help="module file to load; 'build' builds guest-driver/")
    add(
        "--test-module",
        action="store_true",
        help="with --ko build: include the module parameters for tests (TEST=1)",
    )
    add("--params", default="deadline_ms=200", help="module parameters of the driver")
    add(
        "--no-load",
        action="store_true",
        help=f"do not load the module, which is in the guest at {MODULE_PATH}",
    )
    add("--daemon", action="store_true", help="start tmemd and attach the device")
    add("--socket", type=Path, help="attach the device to the daemon at this socket")
    add("--pool-size", default="256MiB")
    add("--num-queues", type=int)
    add("--retain", action="store_true", help="let the device offer retained pages (retain=on)")
    add(
        "--file",
        action="append",
        default=[],
        metavar="HOST[:GUEST]",
        help="copy a file into the guest",
    )
    add("--modules", default="", help="further kernel modules to load, e.g. xfs")
    add("--cmdline", default="", help="parameters to add to the kernel's command line")
    add(
        "--tcg-threads",
        choices=("multi", "single"),
        help="thread mode of QEMU's TCG; default: the mode that the guest's kernel supports",
    )
    add(
        "--cmd",
        action="append",
        default=[],
        help="run this command in the guest and exit with its status",
    )
    add("--seconds", type=float, default=300, help="time-out of each command in seconds")
    add("--keep", action="store_true", help="keep the directory with images and logs")
    add("--verbose", action="store_true", help="print QEMU's command line and the guest's console")
    return parser.parse_args(arguments)


def build_vm(session: Session, options: argparse.Namespace) -> tuple[Vm | NativeVm, Daemon | None]:
    files: dict[str, Path] = {}
    for entry in options.file:
        host, _, guest = entry.partition(":")
        files[guest or f"/{Path(host).name}"] = Path(host)
    disks = []
    if not options.no_disk:
        image = disk.ext4(session.directory / "data.img", options.disk_size * MIB, options.tree)
        throttle = disk.CLOUD_VOLUME if options.throttle else None
        disks.append(disk.Disk("data", image, throttle=throttle))
    daemon = None
    socket = options.socket
    if options.daemon:
        daemon = session.daemon("vm1", pool_size=options.pool_size)
        daemon.start()
        socket = daemon.socket("vm1")
    if options.native:
        native = NativeConfig(
            memory_bytes=options.memory * MIB,
            disks=disks,
            tmem=socket,
            files=files,
            parameters=options.params,
            cmdline=options.cmdline,
        )
        return session.native_vm(native), daemon
    found = kernel.prepare(options.kernel)
    if options.ko:
        build = str(options.ko) == "build"
        ko = module.build(found, test=options.test_module) if build else options.ko
        files[MODULE_PATH] = ko
    tmem = None
    if socket:
        properties = {"retain": "on"} if options.retain else {}
        tmem = Tmem(socket, num_queues=options.num_queues, properties=properties)
    config = Config(
        kernel=found,
        memory_bytes=options.memory * MIB,
        cpus=options.cpus,
        disks=disks,
        tmem=tmem,
        modules=options.modules.split(),
        files=files,
        cmdline=options.cmdline,
        tcg_threads=options.tcg_threads,
    )
    return session.vm(config), daemon


def prepare_guest(guest: Guest, options: argparse.Namespace) -> None:
    """Mounts the disk and loads the module if the options request it. Runs after each boot."""
    if not options.no_disk:
        guest.mount("data", "/mnt")
    if options.ko and not options.no_load:
        guest.insmod(MODULE_PATH, options.params)


def run(guest: Guest, line: str, seconds: float) -> int:
    result = guest.run(line, seconds)
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    return result.status


class Prompt:
    """Reads lines from the terminal, and runs each in the guest or as a command of the harness."""

    def __init__(
        self, vm: Vm | NativeVm, daemon: Daemon | None, options: argparse.Namespace
    ) -> None:
        self._vm = vm
        self._daemon = daemon
        self._options = options

    def loop(self) -> None:
        while True:
            try:
                line = input(f"{self._vm.name}> ").strip()
            except EOFError:
                return
            if line in (".quit", ".exit"):
                return
            try:
                self._line(line)
            except (HarnessError, ValueError, OSError) as error:
                print(error, file=sys.stderr)

    def _line(self, line: str) -> None:
        if not line.startswith("."):
            if line and (status := run(self._vm.guest, line, self._options.seconds)):
                print(f"(status {status})", file=sys.stderr)
            return
        name, *words = shlex.split(line[1:])
        actions: dict[str, Callable[..., object]] = {
            "help": lambda: HELP,
            "put": lambda host, guest: self._vm.guest.put(guest, Path(host)),
            "get": lambda guest, host: Path(host).write_bytes(self._vm.guest.get(guest)),
            "console": lambda: tail(self._vm.console),
        }
        if isinstance(vm := self._vm, Vm):
            actions |= {
                "reset": lambda: prepare_guest(vm.reset(), self._options),
                "reboot": lambda: prepare_guest(vm.reboot(), self._options),
                "pause": vm.pause,
                "resume": vm.resume,
                "hmp": lambda *rest: vm.qmp.human(" ".join(rest)),
            }
        if daemon := self._daemon:
            actions |= {
                "stats": daemon.stats,
                "kill": daemon.kill,
                "stop": daemon.pause,
                "cont": daemon.resume,
                "restart": daemon.restart,
            }
        if name not in actions:
            raise HarnessError(f"unknown command '.{name}':\n{HELP}")
        try:
            answer = actions[name](*words)
        except TypeError as error:
            raise HarnessError(f".{name}: {error}") from error
        if answer is not None:
            print(answer)


def main() -> int:
    options = parse()
    with Session(keep=options.keep) as session:
        try:
            vm, daemon = build_vm(session, options)
            if options.verbose and isinstance(vm, Vm):
                print(shlex.join(vm.command()), file=sys.stderr)
            guest = vm.start()
            prepare_guest(guest, options)
            status = 0
            for line in options.cmd:
                if status := run(guest, line, options.seconds):
                    break
            if not options.cmd:
                print(f"{vm.name} is up in {session.directory}; .help for help")
                Prompt(vm, daemon, options).loop()
            if options.verbose:
                print(tail(vm.console), file=sys.stderr)
            vm.check_console()
        except HarnessError as error:
            print(f"{error}\n{session.report()}", file=sys.stderr)
            return 1
        if options.keep:
            print(f"the files of the session are kept in {session.directory}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
