# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Demonstrates the cache with two virtual machines whose working sets do not fit their RAM.

Both VMs read files of an operating system over and over. Their disks are throttled to the speed of
a common cloud volume. The VMs run first without the device, then with it and one pool for both. A
table shows the difference. The demo compares the SHA-256 of every file in the guest with that on
the host, and fails at a difference. At last, an idle VM returns memory to the host.

The VMs run under QEMU. With --native they are user-mode Linux, which runs at the machine's own
speed, and returns no memory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.vm import idle
from bench.vm.output import Progress, size_text, table
from harness import disk, kernel, module, native
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Guest, Job
from harness.machine import EVERYWHERE, pinning
from harness.native import NativeConfig, NativeVm
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm


@dataclass(frozen=True)
class Sizes:
    """Sizes of each VM's RAM and working set, and of the pool that both VMs share."""

    ram_bytes: int
    set_bytes: int
    pool: str


SIZES = Sizes(256 * MIB, 400 * MIB, "512MiB")
# Sizes for native guests, in which opening a file costs more than reading it. With half of the
# working set of a VM in QEMU, the demo takes less than two minutes.
SIZES_NATIVE = Sizes(128 * MIB, 200 * MIB, "256MiB")
ROUNDS = 4
SHARED_FRACTION = 0.9  # fraction of each tree that all trees contain
TREES = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec", "/usr/share", "/usr/include")
# The trees contain no larger file, because it would be a tenth of the working set.
FILE_MAX_BYTES = 32 * MIB
SECTOR_BYTES = 512
SEED = 2026  # selects the files that the two trees do not share
# Software emulation runs the guest ten times slower than hardware, so its deadline is longer.
MODULE_PARAMETERS = "deadline_ms=200"
PHASE_SECONDS = 1500  # longest time of a phase
POLL_SECONDS = 0.2
NAMES = ("web1", "web2")

READ_ROUNDS = f"""
cd /data || exit 1
for round in $(seq {ROUNDS}); do
	find . -xdev -type f -print0 | xargs -0 cat >/dev/null || exit 1
	echo "$round"
done
"""
REMARK_NATIVE = """
The guests are user-mode Linux: a real kernel at the machine's own speed, with one processor each.
System calls and page faults of processes are much slower than on hardware."""
REMARK = """
Disk reads, hits and pool sizes are what a real host would see. Times are not: processors are
emulated here, about ten times slower than hardware, and disks are not slower."""
CHECKSUMS = "cd /data && find . -xdev -type f -print0 | xargs -0 sha256sum"


@dataclass
class Measured:
    """Results of one VM in one phase, which is a run with or without the device."""

    rounds: list[float] = field(default_factory=list)
    read_bytes: int = 0
    checksums_equal: bool = False
    # Counters of the driver; empty without the device.
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.rounds)


def walk() -> Iterator[tuple[Path, int]]:
    """Yields the regular files of this machine's operating system, each inode once."""
    seen = set()
    for tree in TREES:
        for directory, directories, names in os.walk(tree):
            directories.sort()
            for name in sorted(names):
                path = Path(directory, name)
                try:
                    status = path.lstat()
                except OSError:
                    continue
                regular = path.is_file() and not path.is_symlink()
                fresh = (status.st_dev, status.st_ino) not in seen
                if regular and fresh and 0 < status.st_size <= FILE_MAX_BYTES:
                    seen.add((status.st_dev, status.st_ino))
                    yield path, status.st_size


def choose(
    files: list[tuple[Path, int]],
    count: int = len(NAMES),
    set_bytes: int = SIZES.set_bytes,
    common: float = SHARED_FRACTION,
) -> list[list[Path]]:
    """Returns a list of files for each VM. All lists share the fraction `common` of their bytes."""
    order = list(files)
    random.Random(SEED).shuffle(order)
    source = iter(order)

    def take(limit_bytes: float) -> list[Path]:
        taken, size = [], 0
        while size < limit_bytes:
            entry = next(source, None)
            if entry is None:
                needed = size_text(set_bytes * (common + count * (1 - common)))
                raise HarnessError(
                    f"this machine's {', '.join(TREES)} are too small: "
                    f"the {count} working sets need files of {needed}"
                )
            taken.append(entry[0])
            size += entry[1]
        return taken

    shared = take(set_bytes * common)
    rests = [take(set_bytes * (1 - common)) for _ in range(count)]
    return [shared + rest for rest in rests]


class Trees:
    """A directory for each VM with copies of its files; a file of both VMs is copied only once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._done: dict[Path, tuple[Path, str]] = {}

    def stage(self, name: str, files: list[Path]) -> tuple[Path, dict[str, str]]:
        """Fills a VM's directory. Returns it, and each file's SHA-256 by its path in the guest."""
        sums = {}
        root = self._directory / name
        for path in files:
            relative = path.relative_to("/")
            target = root / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if path in self._done:
                copy, digest = self._done[path]
                os.link(copy, target)
            else:
                content = path.read_bytes()
                target.write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                self._done[path] = (target, digest)
            sums[f"./{relative}"] = digest
        return root, sums


def guest_sums(guest: Guest) -> dict[str, str]:
    lines = guest.sh(CHECKSUMS, PHASE_SECONDS).splitlines()
    return {path: digest for digest, _, path in (line.partition("  ") for line in lines)}


Machine = Vm | NativeVm


def read_bytes(vm: Machine) -> int:
    """Returns how many bytes the VM has read from its disk.

    For a native guest, its kernel counts them; for another one, QEMU does.
    """
    if isinstance(vm, NativeVm):
        return vm.guest.disk_stat("data").read_sectors * SECTOR_BYTES
    return int(vm.block_stat("data")["rd_bytes"])


def watch(
    jobs: dict[str, Job],
    vms: Mapping[str, Machine],
    out: dict[str, Measured],
    say: Callable[[str], None],
) -> None:
    """Shows the VMs' progress until all jobs are done, and records the seconds of each round.

    The host's clock is used, because the clock of an emulated guest is not reliable.
    """
    begin = dict.fromkeys(jobs, time.monotonic())
    running = True
    while running:
        running = not all(job.done() for job in jobs.values())
        parts = []
        for name, job in jobs.items():
            done = job.stdout().count(b"\n")
            if done > len(out[name].rounds):
                now = time.monotonic()
                out[name].rounds.append(now - begin[name])
                begin[name] = now
            read = size_text(read_bytes(vms[name]))
            parts.append(f"{name}: round {min(done + 1, ROUNDS)}/{ROUNDS}, {read} from disk")
        say("; ".join(parts))
        time.sleep(POLL_SECONDS)
    for job in jobs.values():
        job.wait().check()


def boot(vms: Mapping[str, Machine], cached: bool) -> None:
    """Boots the VMs, loads the driver if it is not built in, and mounts the trees."""
    for vm in vms.values():
        if isinstance(vm, Vm):
            vm.launch()
    for vm in vms.values():
        guest = vm.start() if isinstance(vm, NativeVm) else vm.connect()
        if cached:
            if isinstance(vm, Vm):
                guest.insmod("/virtio_tmem.ko", MODULE_PARAMETERS)
            state = guest.read("/sys/kernel/virtio_tmem/state")
            if state.split(":")[0] != "on":
                raise HarnessError(f"{vm.name}: the driver is '{state}', not on")
        guest.mount("data", "/data", options="ro")


def run_phase(
    vms: Mapping[str, Machine], sums: dict[str, dict[str, str]], cached: bool, progress: Progress
) -> dict[str, Measured]:
    """Boots the VMs, reads the trees ROUNDS times, and compares every checksum.

    Returns the figures of each VM by its name.
    """
    out = {name: Measured() for name in vms}
    boot(vms, cached)
    before = {name: read_bytes(vm) for name, vm in vms.items()}
    jobs = {name: vm.guest.start(READ_ROUNDS, PHASE_SECONDS) for name, vm in vms.items()}
    watch(jobs, vms, out, progress.show)
    for name, vm in vms.items():
        out[name].read_bytes = read_bytes(vm) - before[name]
        if cached:
            out[name].counters = module.counters(vm.guest)
    progress.show("comparing the SHA-256 of every file with the host's")
    with ThreadPoolExecutor() as pool:
        found = dict(zip(vms, pool.map(lambda vm: guest_sums(vm.guest), vms.values()), strict=True))
    for name in vms:
        out[name].checksums_equal = found[name] == sums[name]
    for vm in vms.values():
        vm.check_console()
    return out


def ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def total(of: list[Measured], counter: str) -> int:
    """Returns the sum of a driver's counter."""
    return sum(m.counters.get(counter, 0) for m in of)


def lost_fraction(of: list[Measured]) -> float:
    """Returns the part of the eligible evicted pages that the cache did not keep."""
    return total(of, "puts_lost") / (total(of, "puts_eligible") or 1)


def summary(plain: dict[str, Measured], tmem: dict[str, Measured]) -> str:
    """Returns a table that compares the results without the device (`plain`) and with it (`tmem`).

    The table has rows for each VM and for all VMs together.
    """
    head = ["", "all rounds", "last round", "disk reads", "hits", "lost", "checksums"]

    def row(label: str, of: list[Measured], cached: bool) -> list[str]:
        hits = total(of, "hits")
        return [
            label,
            f"{max(m.seconds for m in of):.1f} s",
            f"{max(m.rounds[-1] for m in of):.1f} s",
            size_text(sum(m.read_bytes for m in of)),
            f"{hits:,} = {size_text(hits * 4096)}" if cached else "-",
            f"{lost_fraction(of):.1%}" if cached else "-",
            "equal" if all(m.checksums_equal for m in of) else "DIFFER",
        ]

    rows = [head]
    for name, without in plain.items():
        rows.append(row(f"{name} without", [without], False))
        rows.append(row(f"{name} with", [tmem[name]], True))
    rows.append(row("both without", list(plain.values()), False))
    rows.append(row("both with", list(tmem.values()), True))
    return table(rows)


def pool_summary(pool: dict[str, Any]) -> str:
    pages, original, held = pool["pages"], pool["original_bytes"], pool["held_bytes"]
    unique = pool["payload_bytes"]
    return (
        f"pool: {pages:,} pages = {size_text(original)} kept in {size_text(held)} "
        f"({ratio(original, held)} to 1), of which {size_text(unique)} page data;\n"
        f"      {pool['shared_pages']:,} pages share their copy with an equal one, "
        f"{pool['same_filled_pages']:,} are of one value and take no data"
    )


def next_steps(daemon: Daemon, native_guests: bool) -> str:
    """Returns a text with commands to examine the VMs and the pool after the demo."""
    command = f"tests/bench/run demo {'--native ' if native_guests else ''}--keep"
    return f"""
Next steps:
  {command:<38}keeps both VMs and the pool until you press Enter, then:
    target/release/tmemctl --socket {daemon.control} list
    target/release/tmemctl --socket {daemon.control} stats
  tests/run-vm --help                   boots a VM and runs a command in it
  docs/ARCHITECTURE.md                  follows one page through the system
  README.md                             how to use it with your own VMs"""


class Machines:
    """Creates the VMs of a phase, under QEMU or native.

    The constructor builds the kernel and the programs that the VMs need.
    """

    def __init__(self, native_guests: bool) -> None:
        # Look for the programs first, so that a missing one is reported at once and not after
        # minutes.
        host_binary("tmemd"), host_binary("tmemctl")
        self._native = native_guests
        self.sizes = SIZES_NATIVE if native_guests else SIZES
        if native_guests:
            native.build()
        else:
            qemu_binary()
            self._kernel = kernel.prepare("6.12")
            self._driver = module.build(self._kernel)

    def make(
        self, session: Session, images: dict[str, Path], daemon: Daemon | None
    ) -> dict[str, Machine]:
        """Returns a VM for each image; with a daemon, the VMs have the device."""
        return {name: self._make(session, name, path, daemon) for name, path in images.items()}

    def _make(self, session: Session, name: str, image: Path, daemon: Daemon | None) -> Machine:
        disks = [Disk("data", image, read_only=True, throttle=disk.CLOUD_VOLUME)]
        socket = daemon.socket(name) if daemon else None
        if self._native:
            return session.native_vm(
                NativeConfig(name=name, memory_bytes=self.sizes.ram_bytes, disks=disks, tmem=socket)
            )
        return session.vm(
            Config(
                kernel=self._kernel,
                name=name,
                memory_bytes=self.sizes.ram_bytes,
                disks=disks,
                tmem=Tmem(socket) if socket else None,
                files={"/virtio_tmem.ko": self._driver} if socket else {},
            )
        )

    def make_idle(self, session: Session, image: Path, daemon: Daemon) -> Vm:
        """Returns a VM with the device and a balloon that returns memory to the host."""
        return session.vm(
            Config(
                kernel=self._kernel,
                name=idle.NAME,
                memory_bytes=idle.RAM_BYTES,
                disks=[Disk("data", image, read_only=True, throttle=disk.CLOUD_VOLUME)],
                tmem=Tmem(daemon.socket(idle.NAME)),
                files={"/virtio_tmem.ko": self._driver, **idle.files()},
                modules=["virtio_balloon"],
                arguments=idle.BALLOON,
            )
        )


def run(options: argparse.Namespace) -> int:
    native_guests = options.native
    progress = Progress()
    machines = Machines(native_guests)
    sizes = machines.sizes
    with Session(pinning=pinning() if native_guests else EVERYWHERE) as session:
        progress.step(
            f"two trees of {size_text(sizes.set_bytes)} from this machine's /usr, as ext4 disks"
        )
        sums, images = {}, {}
        chosen = choose(list(walk()), len(NAMES), sizes.set_bytes)
        trees = Trees(session.directory / "trees")
        for name, files in zip(NAMES, chosen, strict=True):
            tree, sums[name] = trees.stage(name, files)
            images[name] = disk.ext4(session.directory / f"{name}.img", 2 * sizes.set_bytes, tree)
        shutil.rmtree(session.directory / "trees")

        progress.step(
            f"no device: two VMs of {size_text(sizes.ram_bytes)} read their trees {ROUNDS} times"
        )
        vms = machines.make(session, images, None)
        plain = run_phase(vms, sums, False, progress)
        for vm in vms.values():
            vm.stop()

        progress.step(
            f"with device: two such VMs, and one pool of at most {sizes.pool} on the host"
        )
        tenants = [Tenant(name, trust_domain="demo") for name in NAMES]
        tenants += [] if native_guests else [Tenant(idle.NAME)]
        daemon = session.daemon(*tenants, pool_size=sizes.pool)
        daemon.start()
        vms = machines.make(session, images, daemon)
        tmem = run_phase(vms, sums, True, progress)
        pool = daemon.stats()["pool"]
        idle_vm = None
        if not native_guests:
            progress.step(f"an idle VM of {size_text(idle.RAM_BYTES)} returns memory to the host")
            if not options.keep:
                for vm in vms.values():
                    vm.stop()
            third = machines.make_idle(session, images[NAMES[0]], daemon)
            boot({idle.NAME: third}, True)
            idle_vm = idle.measure(third, daemon, progress.show)
            third.check_console()
        progress.step("done")

        print(f"\n{summary(plain, tmem)}\n\n{pool_summary(pool)}\n")
        if idle_vm:
            print(f"{idle_vm.summary()}")
        print(REMARK_NATIVE if native_guests else REMARK)
        print(next_steps(daemon, native_guests))
        if options.keep:
            input("\nThe VMs run. Press Enter to end them. ")
        equal = all(m.checksums_equal for m in (*plain.values(), *tmem.values()))
        if not equal:
            print("demo: FAILED: a file's SHA-256 differs from the host's", file=sys.stderr)
        return 0 if equal else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the VMs and the daemon running until you press Enter",
    )
    parser.add_argument(
        "--native", action="store_true", help="run the guests as user-mode Linux, not in QEMU"
    )
