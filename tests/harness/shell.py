# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots a VM for a developer: runs commands in it, or gives a prompt.

A blank ext4 disk is mounted at /mnt. With --daemon, a tmemd is started and the device is attached.
With --ko, the module is copied into the guest and loaded. At the prompt, each line is a command in
the guest. With --native, the guest is user-mode Linux with the driver built in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import disk, kernel, module
from harness.guest import Guest
from harness.native import NativeConfig, NativeVm
from harness.paths import HarnessError
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

MODULE_PATH = "/virtio_tmem.ko"
DISK_BYTES = 512 * MIB


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/run-vm", description=__doc__)
    add = parser.add_argument
    add(
        "--native",
        action="store_true",
        help="run the guest as user-mode Linux instead of in QEMU; --kernel, --cpus and --ko then "
        "have no effect",
    )
    add("--kernel", default="6.12", choices=sorted(kernel.NAMES), help="kernel series of the guest")
    add("--memory", default=256, type=int, metavar="MIB", help="guest memory in MiB")
    add("--cpus", default=1, type=int)
    add("--ko", type=Path, help="module file to load; 'build' builds guest-driver/")
    add("--params", default="deadline_ms=200", help="module parameters of the driver")
    add("--daemon", action="store_true", help="start tmemd and attach the device")
    add(
        "--cmd",
        action="append",
        default=[],
        help="run this command in the guest and exit with its status",
    )
    add("--seconds", type=float, default=300, help="time-out of each command in seconds")
    add("--keep", action="store_true", help="keep the directory with images and logs")
    return parser.parse_args()


def build_vm(session: Session, options: argparse.Namespace) -> Vm | NativeVm:
    disks = [disk.Disk("data", disk.ext4(session.directory / "data.img", DISK_BYTES))]
    socket = None
    if options.daemon:
        daemon = session.daemon("vm1", pool_size="256MiB")
        daemon.start()
        socket = daemon.socket("vm1")
    memory_bytes = options.memory * MIB
    if options.native:
        return session.native_vm(
            NativeConfig(
                memory_bytes=memory_bytes, disks=disks, tmem=socket, parameters=options.params
            )
        )
    found = kernel.prepare(options.kernel)
    files = {}
    if options.ko:
        files[MODULE_PATH] = module.build(found) if str(options.ko) == "build" else options.ko
    config = Config(
        kernel=found,
        memory_bytes=memory_bytes,
        cpus=options.cpus,
        disks=disks,
        tmem=Tmem(socket) if socket else None,
        files=files,
    )
    return session.vm(config)


def run(guest: Guest, line: str, seconds: float) -> int:
    result = guest.run(line, seconds)
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    return result.status


def prompt(guest: Guest, seconds: float) -> None:
    """Runs each line of standard input in the guest."""
    while True:
        try:
            if status := run(guest, input("guest> "), seconds):
                print(f"(status {status})", file=sys.stderr)
        except EOFError:
            return
        except HarnessError as error:
            print(error, file=sys.stderr)


def main() -> int:
    options = parse()
    with Session(keep=options.keep) as session:
        try:
            vm = build_vm(session, options)
            guest = vm.start()
            guest.mount("data", "/mnt")
            if options.ko and isinstance(vm, Vm):
                guest.insmod(MODULE_PATH, options.params)
            status = 0
            for line in options.cmd:
                if status := run(guest, line, options.seconds):
                    break
            if not options.cmd:
                print(f"the VM is up in {session.directory}")
                prompt(guest, options.seconds)
            vm.check_console()
        except HarnessError as error:
            print(f"{error}\n{session.report()}", file=sys.stderr)
            return 1
        if options.keep:
            print(f"the files of the session are kept in {session.directory}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
