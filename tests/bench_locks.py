# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Measures what processors share in the guest driver: `make bench-locks`, docs/benchmarks/locks.md.

Eight control groups on four virtual processors read files that are larger than their memory, so
all of them reclaim, put and get pages at the same time. A kernel with lock statistics counts how
often each lock was taken, was found taken, and came from another processor. In a stock kernel, the
second step compares the processor time of kernel threads with and without the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench_guest import (
    BENCH,
    DATA,
    MODULE,
    PAGE_BYTES,
    PARAMETERS,
    SEED,
    Machine,
    machine_text,
    make_image,
)
from demo import Progress, table
from harness import kernel, module
from harness.daemon import Daemon
from harness.debug_kernel import LOCKSTAT
from harness.disk import Disk
from harness.kernel import Kernel
from harness.paths import ROOT, TESTS, HarnessError, guest_program, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem

PROCESSORS = 4
GROUPS = 8
# Memory limit of a control group. It reads a file of twice this size, so it reclaims meanwhile.
GROUP_BYTES = 12 * MIB
FILE_BYTES = 24 * MIB
BATCH_BYTES = 1 * MIB
# RAM of the guests. In a guest with GROUPS_RAM_BYTES, the groups' limits together are less than the
# RAM, so only groups reclaim. With KSWAPD_RAM_BYTES, groups have no limit, and kswapd reclaims.
GROUPS_RAM_BYTES = 384 * MIB
KSWAPD_RAM_BYTES = 160 * MIB
POOL_SIZE = "512MiB"
DISK_BYTES = 320 * MIB
ROUNDS = 4  # the first round fills the pool; later rounds get and put pages
SECONDS = 900  # longest time of a step; lock statistics make an emulated guest slow
CGROUPS = "/sys/fs/cgroup"
LOCK_STAT = "/proc/lock_stat"
PER_PAGES = 1000
KERNEL_LOCKS = 5  # number of locks of the kernel to report: those with the most contention

# Kernel threads by the beginning of their names.
THREADS = ("kswapd", "tmem_feeder", "rcu", "ksoftirqd", "kworker")

# A line of /proc/lock_stat: name, con-bounces, contentions, four waiting times, acq-bounces and
# acquisitions (Documentation/locking/lockstat.rst).
LINE = re.compile(
    r"^\s*(\S[^:\n]*?):\s+(\d+)\s+(\d+)(?:\s+[\d.]+){4}\s+(\d+)\s+(\d+)\s", re.MULTILINE
)
# Pattern of the number that lockdep appends to the name of a nested lock, or to a name that several
# locks have.
SUFFIX = re.compile(r"(?:[#/]\d+|-[WR])+$")
# Definitions of locks in the driver's source. The pattern captures the argument of the macro, after
# which lockdep names the lock.
LOCKS = re.compile(
    r"(?:spin_lock_init|init_waitqueue_head|mutex_init)\((&[^;]*)\);"
    r"|DEFINE_(?:SPINLOCK|MUTEX)\((\w+)\)"
)


@dataclass
class Lock:
    """Statistics of a lock, or of all locks with one name."""

    contentions: int = 0
    bounces: int = 0
    acquisitions: int = 0


def parse(text: str) -> dict[str, Lock]:
    """Returns the locks of /proc/lock_stat by name."""
    found: dict[str, Lock] = {}
    for name, _, contentions, bounces, acquisitions in LINE.findall(text):
        lock = found.setdefault(SUFFIX.sub("", name), Lock())
        lock.contentions += int(contentions)
        lock.bounces += int(bounces)
        lock.acquisitions += int(acquisitions)
    return found


def driver_locks() -> set[str]:
    """Returns the names of the driver's locks, as lockdep prints them."""
    names = set()
    for directory in ("core", "hooks"):
        for path in (ROOT / "guest-driver" / directory).glob("*.c"):
            for given, defined in LOCKS.findall(path.read_text()):
                names.add(defined or given)
    return names - {"lock"}  # locks of the kernel may have this name, too


def thread_times(text: str) -> Counter[str]:
    """Returns the processor time of kernel threads in ns, from lines of name and time."""
    times: Counter[str] = Counter()
    for line in text.splitlines():
        name, _, spent = line.rpartition(" ")
        for kind in THREADS:
            if name.startswith(kind):
                times[kind] += int(spent)
    return times


class Bench:
    def __init__(self, session: Session, progress: Progress) -> None:
        self.session = session
        self.progress = progress
        self.details: dict[str, object] = {}
        self.lines: list[list[str]] = []
        sizes = {f"group{number}": FILE_BYTES for number in range(GROUPS)}
        sizes["batch"] = BATCH_BYTES
        progress.step(f"disk with {GROUPS} files of {FILE_BYTES // MIB} MiB")
        self.data = make_image(
            session.directory / "data.img", DISK_BYTES, sizes, random.Random(SEED)
        )

    def machine(self, name: str, which: Kernel, memory_bytes: int, cached: bool) -> Machine:
        daemon: Daemon | None = None
        files = {BENCH: guest_program(TESTS / "guest/bench.c")}
        if cached:
            daemon = self.session.daemon(name, pool_size=POOL_SIZE)
            daemon.start()
            files[MODULE] = module.build(which)
        config = Config(
            kernel=which,
            name=name,
            memory_bytes=memory_bytes,
            cpus=PROCESSORS,
            disks=[Disk("data", self.data, read_only=True)],
            tmem=Tmem(daemon.socket(name), num_queues=PROCESSORS) if daemon else None,
            files=files,
            tcg_threads="multi",
        )
        machine = Machine(self.session.vm(config), cached)
        machine.vm.start()
        if cached:
            machine.guest.insmod(MODULE, f"{PARAMETERS} verify_every=0")
        machine.mount()
        machine.guest.sh(
            f"mount -t cgroup2 none {CGROUPS} && echo +memory >{CGROUPS}/cgroup.subtree_control"
        )
        return machine

    @staticmethod
    def load(machine: Machine, limit: str, rounds: int) -> None:
        """Makes all control groups read their files `rounds` times, at the same time."""
        readers = "\n".join(
            f"mkdir -p {CGROUPS}/{name} && echo {limit} >{CGROUPS}/{name}/memory.max &&"
            f" {{ sh -c 'echo $$ >{CGROUPS}/{name}/cgroup.procs;"
            f" for round in $(seq {rounds}); do {BENCH} seq {DATA}/{name} || exit 1; done'"
            f" >/dev/null || echo failed; }} &"
            for name in (f"group{number}" for number in range(GROUPS))
        )
        found = machine.guest.sh(f"{readers}\nwait", SECONDS)
        if found.strip():
            raise HarnessError(f"a reader process in the guest failed: {found}")
        machine.settle()

    def locks(self) -> None:
        """Counts acquisitions of locks in a kernel with lock statistics."""
        which = kernel.prepare(LOCKSTAT)
        self.progress.step(f"{GROUPS} groups that reclaim, Linux {which.release}")
        machine = self.machine("locks", which, GROUPS_RAM_BYTES, cached=True)
        before = machine.all_counters()
        machine.guest.sh(f"echo 0 >{LOCK_STAT}")
        self.load(machine, str(GROUP_BYTES), ROUNDS)
        locks = parse(machine.guest.sh(f"cat {LOCK_STAT}", SECONDS))
        after = machine.all_counters()
        grown = {name: after[name] - before[name] for name in after}
        offered = grown["puts"] + sum(
            value for name, value in grown.items() if name.startswith("puts_dropped_")
        )
        self.details["pages_offered"], self.details["gets"] = offered, grown["gets"]
        self.details["hits"] = grown["hits"]
        ours = {name: lock for name, lock in locks.items() if name in driver_locks()}
        offered_min = GROUPS * FILE_BYTES // PAGE_BYTES // 2
        if offered < offered_min or not ours:
            raise HarnessError(
                f"the guest offered {offered} pages to the host, expected at least {offered_min};"
                f" {LOCK_STAT} has {len(ours)} locks of the driver, expected at least one"
            )
        others = {name: lock for name, lock in locks.items() if name not in ours}
        busy = sorted(others, key=lambda name: -others[name].contentions)[:KERNEL_LOCKS]
        per = PER_PAGES / offered
        pages = f"{PER_PAGES:,} pages put"
        self.lines = [["lock", f"taken, for each {pages}", "from another processor", "found taken"]]
        figures: dict[str, dict[str, float]] = {}
        for name in (*sorted(ours, key=lambda name: -ours[name].bounces), *busy):
            lock = locks[name]
            row = {
                "acquisitions": round(lock.acquisitions * per, 2),
                "bounces": round(lock.bounces * per, 2),
                "contentions": round(lock.contentions * per, 3),
            }
            figures[name] = row
            mark = "" if name in ours else "kernel: "
            self.lines.append([mark + name, *(f"{value:,}" for value in row.values())])
        self.details["locks"] = figures
        self.details["driver_contentions"] = round(
            sum(lock.contentions for lock in ours.values()) * per, 3
        )
        self.details["driver_bounces"] = round(sum(lock.bounces for lock in ours.values()) * per, 2)
        machine.vm.check_console()
        machine.vm.stop()
        print(f"\n{offered:,} pages put, {grown['gets']:,} pages requested\n{table(self.lines)}\n")

    def threads(self) -> None:
        """Compares the processor time of kernel threads with and without the driver."""
        which = kernel.prepare("6.12")
        rows: dict[str, dict[str, float]] = {}
        for limit, ram_bytes in (
            (str(GROUP_BYTES), GROUPS_RAM_BYTES),
            ("max", KSWAPD_RAM_BYTES),
        ):
            for cached in (False, True):
                kind = "kswapd" if limit == "max" else "groups"
                name = f"{kind}-{'with' if cached else 'without'}"
                self.progress.step(f"processor time of kernel threads: {name}, {which.release}")
                machine = self.machine(name, which, ram_bytes, cached)
                before = self._times(machine)
                self.load(machine, limit, ROUNDS)
                spent = self._times(machine)
                spent.subtract(before)
                rows[name] = {thread: round(spent[thread] / 1e6, 1) for thread in THREADS}
                machine.vm.check_console()
                machine.vm.stop()
        self.details["threads_ms"] = rows
        head = ["processor time in ms", *rows]
        lines = [[thread, *(f"{row[thread]:,}" for row in rows.values())] for thread in THREADS]
        print(f"\n{table([head, *lines])}\n")

    @staticmethod
    def _times(machine: Machine) -> Counter[str]:
        """Returns the processor time of each kind of kernel thread until now, in ns."""
        script = (
            "for task in /proc/[0-9]*; do"
            " read -r name <$task/comm && read -r spent rest <$task/schedstat"
            ' && echo "$name $spent"; done 2>/dev/null; true'
        )
        return thread_times(machine.guest.sh(script, SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json",
        type=Path,
        help="write the figures to this file; default: the environment variable JSON",
    )
    parser.add_argument("--only", nargs="*", default=[], help="run only these steps: locks threads")
    arguments = parser.parse_args()
    json_path = arguments.json or (Path(os.environ["JSON"]) if os.environ.get("JSON") else None)
    try:
        # Look for the programs first, so that a missing one is reported at once and not after
        # minutes.
        qemu_binary(), host_binary("tmemd"), host_binary("tmemctl")
        with Session() as session:
            bench = Bench(session, Progress())
            steps: dict[str, Callable[[], None]] = {"locks": bench.locks, "threads": bench.threads}
            for name, step in steps.items():
                if not arguments.only or name in arguments.only:
                    step()
            print(machine_text())
            if json_path:
                out = bench.details | {"machine": machine_text()}
                json_path.write_text(json.dumps(out, indent=2) + "\n")
    except HarnessError as error:
        print(f"\nbench-locks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
