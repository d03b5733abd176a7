# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Steps of `make bench-native` that compare retained pages with copies (docs/benchmarks/native.md).

With retained pages, the pool keeps a page that a guest gets, and the driver sends a reference
instead of a copy when the guest evicts the page again. The step "retain" compares the speed and the
processor time of re-reads. The step "pools" compares the disk reads in pools that are too small,
because a full pool evicts retained pages first."""

from __future__ import annotations

import statistics

from bench_guest import DATA, PAGE_BYTES, Both, Machine, Row
from harness.host_use import processor_seconds
from harness.paths import HarnessError
from harness.vm import MIB
from native_bench import GIB, PARAMETERS, SET_BYTES, NativeBench

PARAMETERS_RETAIN = "verify_every=0"
ARMS = {"copies": PARAMETERS, "retained": PARAMETERS_RETAIN}
REPEAT_REREAD = 9

# Sizes of the pool in the step "pools", as parts of the memory that the working set needs.
POOL_SHARES = (0.25, 0.5, 1.0, 1.5)
POOL_ROUNDS = 5
# Number of pages of a round of random reads: about half of the file's pages.
RANDOM_READS = 40_000
LOADS = {
    "loop": "the file from beginning to end",
    "random": "pages at random places",
}
# The disk reads of two guests with copies differ by less than this part of the pages that they
# read: the order of eviction depends on the time at which answers arrive.
NEVER_WORSE_MAX = 0.01


def retain(bench: NativeBench) -> None:
    """Compares re-reads with retained pages and with copies, in two guests in turns."""
    repeat = bench.times(REPEAT_REREAD)
    bench.progress.step(f"re-reads with retained pages and with copies, {repeat} times each")
    daemon = bench.daemon("retaining", "copying")
    pair = Both(
        bench.machine("retaining", daemon, PARAMETERS_RETAIN), bench.machine("copying", daemon)
    )
    for machine in (pair.cached, pair.plain):
        for _ in range(2):
            machine.bench(f"seq {DATA}/set")
    host_ns: dict[str, list[float]] = {}
    guest_ns: dict[str, list[float]] = {}
    growths: dict[str, dict[str, int]] = {}

    def measure(machine: Machine, _: int) -> float:
        bench.idle(daemon)
        name, pids = machine.vm.name, (daemon.process.pid, machine.vm.process.pid)
        counters = machine.all_counters()
        before = [processor_seconds(pid) for pid in pids]
        ticks = machine.bench(f"seq {DATA}/set")
        machine.settle()
        bench.idle(daemon)
        host, guest = (
            (processor_seconds(pid) - old) * 1e9 * PAGE_BYTES / SET_BYTES
            for pid, old in zip(pids, before, strict=True)
        )
        host_ns.setdefault(name, []).append(host)
        guest_ns.setdefault(name, []).append(guest)
        change = growths.setdefault(name, {})
        for key, value in machine.all_counters().items():
            change[key] = change.get(key, 0) + value - counters.get(key, 0)
        return ticks

    paired = pair.in_turns(repeat, measure, bench.saying("re-read", repeat))
    rates = [
        SET_BYTES / GIB / (statistics.median(ticks) / bench.ticks_per_us / 1e6)
        for ticks in (paired.cached, paired.plain)
    ]
    host, guest = (
        {name: statistics.median(values) for name, values in of.items()}
        for of in (host_ns, guest_ns)
    )
    change = growths["retaining"]
    if change["refs_held"] < change["puts"]:
        raise HarnessError(f"too few pages were retained for a comparison: {change}")
    host_ratio = host["retaining"] / host["copying"]
    guest_ratio = guest["retaining"] / guest["copying"]
    bench.add(
        [
            Row(
                "seq_reread_retain_gib_per_s",
                "speed of a re-read with retained pages",
                rates[0],
                "GiB/s",
                ">= 1.5",
                rates[0] >= 1.5,
            ),
            Row("seq_reread_copy_gib_per_s", "  with copies, in turns", rates[1], "GiB/s"),
            Row("host_ns_per_reread", "  tmemd, for each page", host["retaining"], "ns"),
            Row("host_ns_per_copied_reread", "    with copies", host["copying"], "ns"),
            Row(
                "host_retain_ratio",
                "    with retained pages / with copies",
                host_ratio,
                "ratio",
                "<= 0.35",
                host_ratio <= 0.35,
            ),
            Row("guest_ns_per_reread", "  guest kernel, for each page", guest["retaining"], "ns"),
            Row("guest_ns_per_copied_reread", "    with copies", guest["copying"], "ns"),
            Row(
                "guest_retain_ratio",
                "    with retained pages / with copies",
                guest_ratio,
                "ratio",
                "<= 0.6",
                guest_ratio <= 0.6,
            ),
            Row(
                "retain_lost_fraction",
                "  eligible pages that were lost",
                change["puts_lost"] / change["puts_eligible"],
            ),
        ]
    )
    pair.plain.vm.check_console()
    pair.plain.vm.stop()
    bench.end(pair.cached, daemon)


def read(machine: Machine, load: str, number: int) -> None:
    """Makes a guest read for one round of a load. Random reads differ by the round's number."""
    reads = f"seq {DATA}/set" if load == "loop" else f"rand {DATA}/set {RANDOM_READS} {number}"
    machine.bench(reads)


def needed_bytes(bench: NativeBench, load: str) -> int:
    """Returns the pool memory that copies of the load's working set use in a large pool."""
    daemon = bench.daemon("large")
    machine = bench.machine("large", daemon)
    for number in range(POOL_ROUNDS):
        read(machine, load, number)
    machine.settle()
    bench.idle(daemon)
    needed = int(daemon.stats()["vms"][0]["charged_bytes"])
    bench.end(machine, daemon)
    return needed


def disk_share(bench: NativeBench, load: str, arm: str, pool_bytes: int) -> float:
    """Returns the part of the pages that a guest reads from its disk in the steady state."""
    name = f"{load}-{arm}-{pool_bytes // MIB}"
    daemon = bench.session.daemon(name, pool_size=str(pool_bytes))
    daemon.start()
    machine = bench.machine(name, daemon, ARMS[arm])
    rounds = bench.times(POOL_ROUNDS)
    for number in range(2):
        read(machine, load, number)
    disk, counters = machine.disk_stat(), machine.all_counters()
    for number in range(2, 2 + rounds):
        read(machine, load, number)
    machine.settle()
    sectors = (machine.disk_stat() - disk).read_sectors
    retained = machine.all_counters()["refs"] - counters["refs"]
    if (retained > 0) != (arm == "retained"):
        raise HarnessError(f"{name}: the guest sent {retained} references to retained pages")
    bench.end(machine, daemon)
    pages = SET_BYTES // PAGE_BYTES if load == "loop" else RANDOM_READS
    return sectors * 512 / PAGE_BYTES / (rounds * pages)


def pools(bench: NativeBench) -> None:
    """Compares the disk reads with retained pages and with copies in pools of several sizes."""
    for load, what in LOADS.items():
        bench.progress.step(f"disk reads in pools of several sizes; reads of {what}")
        needed = needed_bytes(bench, load)
        bench.add([Row(f"{load}_needed_mib", f"pool that {load} reads need", needed / MIB, "MiB")])
        for share in POOL_SHARES:
            found = {arm: disk_share(bench, load, arm, int(needed * share)) for arm in ARMS}
            percent, more = round(share * 100), found["retained"] - found["copies"]
            bench.add(
                [
                    Row(
                        f"{load}_{percent}_disk_copies",
                        f"{load} reads, {percent} % of the needed pool: pages from the disk",
                        found["copies"],
                    ),
                    Row(
                        f"{load}_{percent}_disk_retained",
                        "  with retained pages",
                        found["retained"],
                    ),
                    Row(
                        f"{load}_{percent}_disk_more",
                        "  more than with copies, as a part of all pages that the guest reads",
                        more,
                        "ratio",
                        f"<= {NEVER_WORSE_MAX}",
                        more <= NEVER_WORSE_MAX,
                    ),
                ]
            )


STEPS = {"retain": retain, "pools": pools}
