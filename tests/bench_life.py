# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures the cost of a killed daemon and of a migration for a VM with the device.

It prints medians and ranges. VMs with and without the device are measured in turns, so that other
load of the machine affects both. docs/benchmarks/life.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from driver import WHERE, driver_vm, load, stats, wait_state

from bench_guest import machine_text
from harness import kernel as kernels
from harness import migration
from harness import module as modules
from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import until

MEMORY_BYTES = 192 * MIB
POOL_SIZE = "256MiB"
# Number and size of the files that the guest reads over and over. They do not fit its memory.
FILES, FILE_MIB = 12, 16
# reconnect-ms of the chardev: the value that `tmemctl attach` sets, and a tenth of it.
RECONNECT_MS = (1000, 100)
ROUNDS = 7
SECONDS = 60.0


def reads(guest: Guest) -> None:
    """Starts a loop that reads more than the guest's memory, so that pages are always evicted."""
    fill = f"dd if=/dev/urandom of={WHERE}/f$i bs=1M count={FILE_MIB} 2>/dev/null"
    guest.sh(f"for i in $(seq {FILES}); do {fill}; done; sync", 300)
    loop = f"while :; do cat {WHERE}/f* >/dev/null; done"
    guest.sh(f"setsid sh -c '{loop}' </dev/null >/dev/null 2>&1 &")


class Bench:
    def __init__(self, session: Session, rounds: int) -> None:
        self.session = session
        self.rounds = rounds
        self.kernel: Kernel = kernels.prepare("6.12")
        self.module = modules.build(self.kernel)
        self.figures: dict[str, list[float]] = {}

    def note(self, key: str, value: float) -> None:
        self.figures.setdefault(key, []).append(value)
        print(f"bench-life: {key} {value:g}", file=sys.stderr, flush=True)

    def daemon(self) -> Daemon:
        daemon = self.session.daemon("vm1", pool_size=POOL_SIZE)
        daemon.start()
        return daemon

    def vm(self, tmem: Tmem | None) -> Vm:
        vm = driver_vm(
            self.session, self.kernel, self.module, tmem, cpus=1, memory_bytes=MEMORY_BYTES
        )
        guest = vm.start()
        if tmem:
            load(guest, "verify_every=0")
        else:
            guest.mount("data", WHERE)
        return vm

    def kills(self, reconnect_ms: int) -> None:
        """Kills the daemon and starts another one.

        Measures the times until the new daemon serves, until QEMU has connected to it, and until it
        has answered a put and a hit.
        """
        daemon = self.daemon()
        vm = self.vm(Tmem(daemon.socket("vm1"), reconnect_ms=reconnect_ms))
        reads(vm.guest)
        for _ in range(self.rounds):
            until(lambda: figure(daemon, "hits") > 0, SECONDS, "the daemon counts a hit")
            begun = time.monotonic()
            daemon.restart()
            key = f"kill_ms_{reconnect_ms}"
            self.note(f"{key}_serves", (time.monotonic() - begun) * 1e3)
            for what, reached in [
                ("connected", lambda: figure(daemon, "connections") > 0),
                ("put", lambda: figure(daemon, "puts") > 0),
                ("hit", lambda: figure(daemon, "hits") > 0),
            ]:
                self.note(f"{key}_{what}", until_ms(begun, what, reached))
        vm.stop()
        daemon.stop()

    def migrations(self) -> None:
        """Migrates a VM with the device and one without it, in turn, to another QEMU and back."""
        daemons = [self.daemon(), self.daemon()]
        places = [Tmem(daemon.socket("vm1"), num_queues=1) for daemon in daemons]
        for busy in (False, True):
            name = "busy" if busy else "idle"
            for tmems, which in ((places, "with"), ([None, None], "without")):
                vm = self.vm(tmems[0])
                if busy:
                    reads(vm.guest)
                for count in range(self.rounds):
                    if busy and which == "with":
                        hits = stats(vm.guest)["hits"]
                        until(
                            lambda g=vm.guest, h=hits: stats(g)["hits"] > h + 1000,  # type: ignore[misc]
                            SECONDS,
                            "the daemon counts a hit",
                        )
                    target = migration.receiver(self.session, vm, tmems[(count + 1) % 2])
                    found = migration.move(vm, target)
                    vm = target
                    if which == "with":
                        wait_state(vm.guest, "on")
                    key = f"migrate_{name}_{which}"
                    self.note(f"{key}_ms", float(found["total-time"]))
                    self.note(f"{key}_downtime_ms", float(found["downtime"]))
                    self.note(f"{key}_mib", float(found["ram"]["transferred"]) / MIB)
                vm.stop()

    def report(self) -> str:
        rows = []
        for key, values in self.figures.items():
            middle = statistics.median(values)
            rows.append(f"| `{key}` | {middle:.0f} | {min(values):.0f} to {max(values):.0f} |")
        for name in ("idle", "busy"):
            for what in ("ms", "downtime_ms", "mib"):
                pair = [self.figures.get(f"migrate_{name}_{w}_{what}") for w in ("with", "without")]
                if pair[0] and pair[1]:
                    ratio = statistics.median(pair[0]) / max(1.0, statistics.median(pair[1]))
                    rows.append(f"| `migrate_{name}_{what}_ratio` | {ratio:.2f} | |")
        return "\n".join(["| key | median | range |", "| --- | --- | --- |", *rows])


def figure(daemon: Daemon, name: str) -> int:
    (vm,) = daemon.call("Stats", name="vm1")["vms"]
    return int(vm[name])


def until_ms(begun: float, what: str, reached: Callable[[], bool]) -> float:
    """Returns milliseconds from `begun` until `reached`. Polls without a pause, for short times.

    `what` names the state in the error if it is not reached in time.
    """
    while not reached():
        if time.monotonic() - begun > SECONDS:
            raise HarnessError(f"the VM did not reach the state {what!r} within {SECONDS} s")
    return (time.monotonic() - begun) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="*", default=["kills", "migrations"])
    parser.add_argument("--json", type=Path, help="write all figures to this file as JSON")
    arguments = parser.parse_args()
    try:
        qemu_binary(), host_binary("tmemd"), host_binary("tmemctl")
        with Session() as session:
            bench = Bench(session, arguments.rounds)
            if "kills" in arguments.only:
                for reconnect_ms in RECONNECT_MS:
                    bench.kills(reconnect_ms)
            if "migrations" in arguments.only:
                bench.migrations()
            print(f"\n{machine_text()}; guest {bench.kernel.release}\n\n{bench.report()}")
            if arguments.json:
                arguments.json.write_text(json.dumps(bench.figures, indent=2) + "\n")
    except HarnessError as error:
        print(f"\nbench-life: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
