# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Demonstrates the main job with two virtual machines whose working sets do not fit their RAM.

Both read an operating-system tree over and over from a disk that is throttled to a cloud volume,
first without the device, then with it and one pool for both. A table shows the difference. The
SHA-256 of every file is compared with the host's, and any difference fails the demo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import disk, kernel, module
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Guest, Job
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

RAM_BYTES = 256 * MIB
WORKING_SET_BYTES = 400 * MIB
POOL_SIZE = "512MiB"
ROUNDS = 4
SHARED_FRACTION = 0.9  # fraction of each tree that all trees contain
TREES = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec", "/usr/share", "/usr/include")
FILE_MAX_BYTES = 32 * MIB  # larger files are left out: one would be a tenth of the working set
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
REMARK = """
Disk reads, hits and pool sizes are what a real host would see. Times are not: CPUs are emulated
here, some ten times slower than hardware, and disks are not."""
CHECKSUMS = "cd /data && find . -xdev -type f -print0 | xargs -0 sha256sum"


@dataclass
class Measured:
    """Results of one VM in one phase."""

    rounds: list[float] = field(default_factory=list)
    read_bytes: int = 0
    checksums_equal: bool = False
    gets: int = 0
    hits: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.rounds)


class Progress:
    """Progress output: one line that is rewritten on a terminal, and separate lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begin = time.monotonic()

    def show(self, text: str) -> None:
        if self._terminal:
            print(f"\r\033[K  {text}", end="", file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        seconds = time.monotonic() - self._begin
        start = "\r\033[K" if self._terminal else ""
        print(f"{start}[{seconds:4.0f} s] {text}", file=sys.stderr, flush=True)


def walk() -> Iterator[tuple[Path, int]]:
    """Yields the regular files of this machine's operating system, each inode once."""
    seen = set()
    for tree in TREES:
        for folder, folders, names in os.walk(tree):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
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
    files: list[tuple[Path, int]], count: int = len(NAMES), set_bytes: int = WORKING_SET_BYTES
) -> list[list[Path]]:
    """Returns working sets. Each shares SHARED_FRACTION of its bytes with all others."""
    order = list(files)
    random.Random(SEED).shuffle(order)
    source = iter(order)

    def take(limit_bytes: float) -> list[Path]:
        taken, size = [], 0
        while size < limit_bytes:
            entry = next(source, None)
            if entry is None:
                own = count * (1 - SHARED_FRACTION)
                needed = size_text(set_bytes * (SHARED_FRACTION + own))
                raise HarnessError(
                    f"this machine's {', '.join(TREES)} are too small: "
                    f"the {count} working sets need files of {needed}"
                )
            taken.append(entry[0])
            size += entry[1]
        return taken

    common = take(set_bytes * SHARED_FRACTION)
    rests = [take(set_bytes * (1 - SHARED_FRACTION)) for _ in range(count)]
    return [common + rest for rest in rests]


class Trees:
    """Copies of the files in a directory for each VM; a file of both VMs is copied once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[Path, tuple[Path, str]] = {}

    def stage(self, name: str, files: list[Path]) -> tuple[Path, dict[str, str]]:
        """Returns the directory, and each file's SHA-256 by its path in the guest."""
        sums = {}
        root = self._folder / name
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


def stat(guest: Guest, name: str) -> int:
    return int(guest.read(f"/sys/kernel/virtio_tmem/stats/{name}"))


def watch(
    jobs: dict[str, Job], vms: dict[str, Vm], out: dict[str, Measured], say: Callable[[str], None]
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
            read = size_text(vms[name].block_stat("data")["rd_bytes"])
            parts.append(f"{name}: round {min(done + 1, ROUNDS)}/{ROUNDS}, {read} from disk")
        say("; ".join(parts))
        time.sleep(POLL_SECONDS)
    for job in jobs.values():
        job.wait().check()


def phase(
    vms: dict[str, Vm], sums: dict[str, dict[str, str]], cached: bool, progress: Progress
) -> dict[str, Measured]:
    """Boots the VMs, reads the trees ROUNDS times, and then compares every checksum."""
    out = {name: Measured() for name in vms}
    for vm in vms.values():
        vm.launch()
    for vm in vms.values():
        guest = vm.connect()
        if cached:
            guest.insmod("/virtio_tmem.ko", MODULE_PARAMETERS)
            state = guest.read("/sys/kernel/virtio_tmem/state")
            if state.split(":")[0] != "on":
                raise HarnessError(f"{vm.name}: the driver is '{state}', not on")
        guest.mount("data", "/data", options="ro")
    before = {name: vm.block_stat("data")["rd_bytes"] for name, vm in vms.items()}
    jobs = {name: vm.guest.start(READ_ROUNDS, PHASE_SECONDS) for name, vm in vms.items()}
    watch(jobs, vms, out, progress.show)
    for name, vm in vms.items():
        out[name].read_bytes = vm.block_stat("data")["rd_bytes"] - before[name]
        if cached:
            out[name].gets, out[name].hits = stat(vm.guest, "gets"), stat(vm.guest, "hits")
    progress.show("comparing the SHA-256 of every file with the host's")
    with ThreadPoolExecutor() as pool:
        found = dict(zip(vms, pool.map(lambda vm: guest_sums(vm.guest), vms.values()), strict=True))
    for name in vms:
        out[name].checksums_equal = found[name] == sums[name]
    for vm in vms.values():
        vm.check_console()
    return out


def size_text(count: float) -> str:
    """Formats bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *right]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def summary(plain: dict[str, Measured], tmem: dict[str, Measured]) -> str:
    """Returns the comparison, for each VM and in total."""
    head = ["", "all rounds", "last round", "disk reads", "hits", "checksums"]

    def row(label: str, of: list[Measured], cached: bool) -> list[str]:
        hits = sum(m.hits for m in of)
        return [
            label,
            f"{max(m.seconds for m in of):.1f} s",
            f"{max(m.rounds[-1] for m in of):.1f} s",
            size_text(sum(m.read_bytes for m in of)),
            f"{hits:,} = {size_text(hits * 4096)}" if cached else "-",
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


def write_json(
    path: Path, plain: dict[str, Measured], tmem: dict[str, Measured], pool: dict[str, Any]
) -> None:
    keys = ("pages", "original_bytes", "held_bytes", "shared_pages")
    report = {
        "vms": [
            {
                "name": name,
                "ram_bytes": RAM_BYTES,
                "seconds_without": round(plain[name].seconds, 2),
                "seconds_with": round(tmem[name].seconds, 2),
                "disk_read_bytes_without": plain[name].read_bytes,
                "disk_read_bytes_with": tmem[name].read_bytes,
                "gets": tmem[name].gets,
                "hits": tmem[name].hits,
                "checksums_equal": plain[name].checksums_equal and tmem[name].checksums_equal,
            }
            for name in plain
        ],
        "pool": {key: pool[key] for key in keys},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def around(daemon: Daemon, vms: dict[str, Vm]) -> str:
    """Returns a text with commands to examine the VMs and the pool after the demo."""
    return f"""
How to look around:
  TMEM_KEEP=1 make demo                 keeps both VMs and the pool until you press Enter, then:
    host-daemon/target/release/tmemctl --socket {daemon.control} list
    host-daemon/target/release/tmemctl --socket {daemon.control} stats
  tests/run-vm --help                   boots a VM and runs a command in it
  docs/ARCHITECTURE.md                  follows one page through the system
  README.md                             how to use it with your own VMs"""


def run(json_path: Path | None, keep: bool) -> int:
    progress = Progress()
    # A missing program is reported at once, not after minutes.
    qemu_binary(), host_binary("tmemd"), host_binary("tmemctl")
    guest_kernel = kernel.prepare("6.12")
    driver = module.build(guest_kernel)
    with Session() as session:
        progress.step(
            f"two trees of {size_text(WORKING_SET_BYTES)} from this machine's /usr, as ext4 disks"
        )
        sums, images = {}, {}
        trees = Trees(session.folder / "trees")
        for name, files in zip(NAMES, choose(list(walk())), strict=True):
            tree, sums[name] = trees.stage(name, files)
            images[name] = disk.ext4(session.folder / f"{name}.img", 2 * WORKING_SET_BYTES, tree)
        shutil.rmtree(session.folder / "trees")

        def machines(daemon: Daemon | None) -> dict[str, Vm]:
            return {
                name: session.vm(
                    Config(
                        kernel=guest_kernel,
                        name=name,
                        memory_bytes=RAM_BYTES,
                        disks=[
                            Disk("data", images[name], read_only=True, throttle=disk.CLOUD_VOLUME)
                        ],
                        tmem=Tmem(daemon.socket(name)) if daemon else None,
                        files={"/virtio_tmem.ko": driver} if daemon else {},
                    )
                )
                for name in NAMES
            }

        progress.step(
            f"without: two VMs of {size_text(RAM_BYTES)}, each reads its tree {ROUNDS} times"
        )
        vms = machines(None)
        plain = phase(vms, sums, False, progress)
        for vm in vms.values():
            vm.stop()

        progress.step(f"with: the same, and one pool of at most {POOL_SIZE} on the host for both")
        tenants = [Tenant(name, trust_domain="demo") for name in NAMES]
        daemon = session.daemon(*tenants, pool_size=POOL_SIZE)
        daemon.start()
        vms = machines(daemon)
        tmem = phase(vms, sums, True, progress)
        pool = daemon.stats()["pool"]
        progress.step("done")

        print(f"\n{summary(plain, tmem)}\n\n{pool_summary(pool)}\n{REMARK}")
        print(around(daemon, vms))
        if json_path:
            write_json(json_path, plain, tmem, pool)
        if keep:
            input("\nThe VMs run. Press Enter to end them. ")
        equal = all(m.checksums_equal for m in (*plain.values(), *tmem.values()))
        if not equal:
            print("demo: FAILED: a file's SHA-256 differs from the host's", file=sys.stderr)
        return 0 if equal else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, help="write the figures to this file; also JSON=PATH make demo"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the VMs and the daemon running until Enter"
    )
    arguments = parser.parse_args()
    json_path = arguments.json or (Path(os.environ["JSON"]) if os.environ.get("JSON") else None)
    try:
        return run(json_path, arguments.keep or bool(os.environ.get("TMEM_KEEP")))
    except HarnessError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
