# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares VMs that share a pool with VMs that have more RAM instead, at equal host memory.

`make bench-density` runs it, and docs/benchmarks/density.md has the results.

Four VMs read related directory trees over and over. With the device they have little RAM and share
one pool. Without the device, they get as much additional RAM as the pool and the daemon took. A
third kind of run has no device and uses KSM, which merges equal pages of private memory. Test runs
find out the RAM with which the VMs without the device take equally many bytes of the host. Runs
that took unequal bytes of the host are never compared by a ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path

import demo
from bench_guest import ACCELERATOR, machine_text
from demo import Progress, Trees, choose, guest_sums, size_text, table, walk
from harness import disk, kernel, module
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Job
from harness.host_use import mapped_bytes, page_table_bytes, processor_seconds
from harness.kernel import Kernel
from harness.ksm import Ksm
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

PAGE_BYTES = 4096
NAMES = ("web1", "web2", "web3", "web4")
# Size of a VM's tree. It is smaller than the demo's tree, because four emulated VMs share the
# processors of one machine.
TREE_BYTES = 256 * MIB
RAM_BYTES = 192 * MIB  # RAM of each VM with the device
# This size suffices for all pages of the four trees, because the pool stores equal files once, and
# compressed.
POOL_BYTES = 224 * MIB
WARM_ROUNDS = 1
ROUNDS = 2  # number of measured rounds
REPEAT = 3
# RAM that suffices for a VM's tree and its kernel, so that no file is read from the disk twice.
ROOM_BYTES = TREE_BYTES + 192 * MIB
# Runs are not compared if their host bytes differ by more than this fraction.
TOLERANCE = 0.03
CALIBRATIONS = 3  # attempts to set the RAM without the device to equal host bytes
# Size of QEMU's buffer for translated code. It is memory of the emulation and not of the VM, so it
# must not grow during a run.
TCG_BUFFER_BYTES = 64 * MIB
# The fastest scan that ksmtuned ever sets. Distributions use ksmtuned to control KSM.
KSM_PAGES, KSM_SLEEP_MS = 1250, 10
KSM_SECONDS = 120  # longest time for KSM to find all equal pages
PHASE_SECONDS = 1500  # longest time for all rounds of a phase
POLL_SECONDS = 0.5  # pause between measurements of the host's bytes

DAEMON, KSMD = "tmemd", "ksmd"
POOL_FIGURES = ("pages", "original_bytes", "held_bytes", "shared_pages")


@dataclass(frozen=True)
class Variant:
    """One way to use the host's memory.

    If `ram_bytes` is None, calibrate() sets it so that the VMs use as many bytes of the host as
    the VMs with the device.
    """

    key: str
    what: str
    ram_bytes: int | None
    cached: bool = False
    merged: bool = False

    @property
    def memory_backend(self) -> str:
        if self.cached:
            return "memory-backend-memfd,share=on"
        return f"memory-backend-ram,share=off,merge={'on' if self.merged else 'off'}"


DEVICE = Variant("device", "device and pool", RAM_BYTES, cached=True)
PLAIN = Variant("plain", "no device", None)
MERGED = Variant("ksm", "no device, KSM", None, merged=True)
ROOMY = Variant("ksm_room", "no device, KSM, RAM for all files", ROOM_BYTES, merged=True)
VARIANTS = (DEVICE, PLAIN, MERGED, ROOMY)


@dataclass
class Run:
    """Results of all VMs of a run together, in the measured rounds unless a field states more."""

    ram_bytes: int
    peak_bytes: int = 0  # peak of the host's memory, from the first read on
    settled_bytes: int = 0  # the host's memory at the end
    seconds: float = 0
    read_bytes: int = 0  # bytes read from disks
    warm_read_bytes: int = 0
    hits: int = 0
    saved_bytes: int = 0  # bytes that KSM had saved at the end of the run
    pool: dict[str, int] = field(default_factory=dict)
    processor_seconds: dict[str, float] = field(default_factory=dict)
    settle_seconds: float = 0  # time after the warm-up until KSM had merged all equal pages
    settle_processor_seconds: float = 0


class Fleet:
    """The VMs of one run, the daemon or KSM, and their use of the host."""

    def __init__(self, vms: dict[str, Vm], daemon: Daemon | None, ksm: Ksm | None) -> None:
        self.vms = vms
        self.daemon = daemon
        self.ksm = ksm
        self.peak_bytes = 0
        self._qemus = [vm.process.pid for vm in vms.values()]
        self._daemons = [daemon.process.pid] if daemon else []

    def now_bytes(self) -> int:
        """Returns the bytes of host memory that the VMs, the daemon with its pool, and KSM use."""
        pids = self._qemus + self._daemons
        own = self.ksm.own_bytes() if self.ksm else 0
        now = mapped_bytes(pids) + page_table_bytes(pids) + own
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def processors(self) -> dict[str, float]:
        out = {"qemu": sum(map(processor_seconds, self._qemus))}
        if self.daemon:
            out[DAEMON] = sum(map(processor_seconds, self._daemons))
        if self.ksm:
            out[KSMD] = processor_seconds(self.ksm.pid())
        return out

    def read_bytes(self) -> int:
        return sum(int(vm.block_stat("data")["rd_bytes"]) for vm in self.vms.values())

    def hits(self) -> int:
        if not self.daemon:
            return 0
        return sum(module.counters(vm.guest)["hits"] for vm in self.vms.values())


def read_trees(fleet: Fleet, rounds: int, say: Callable[[str], None]) -> float:
    """Makes all VMs read their trees `rounds` times. Returns the seconds until all have ended."""
    script = f"""
cd /data || exit 1
for round in $(seq {rounds}); do
	find . -xdev -type f -print0 | xargs -0 cat >/dev/null || exit 1
	echo "$round"
done"""
    begin = time.monotonic()
    jobs: list[Job] = [vm.guest.start(script, PHASE_SECONDS) for vm in fleet.vms.values()]
    # The list calls done() for each job, even after one that is not done, because done() also reads
    # the job's output.
    while not all([job.done() for job in jobs]):
        done = sum(job.stdout().count(b"\n") for job in jobs)
        say(f"{done} of {rounds * len(jobs)} rounds, host {size_text(fleet.now_bytes())}")
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - begin
    for job in jobs:
        job.wait().check()
    return seconds


class Bench:
    def __init__(self, session: Session, progress: Progress) -> None:
        self.session = session
        self.progress = progress
        self.kernel: Kernel = kernel.prepare("6.12")
        self._driver = module.build(self.kernel)
        self._images: dict[str, Path] = {}
        self._sums: dict[str, dict[str, str]] = {}
        self.runs: dict[str, list[Run]] = {variant.key: [] for variant in VARIANTS}

    def trees(self) -> None:
        directory = self.session.directory / "trees"
        trees = Trees(directory)
        for name, files in zip(NAMES, choose(list(walk()), len(NAMES), TREE_BYTES), strict=True):
            tree, self._sums[name] = trees.stage(name, files)
            path = self.session.directory / f"{name}.img"
            self._images[name] = disk.ext4(path, 2 * TREE_BYTES, tree)
        shutil.rmtree(directory)

    def run(self, variant: Variant, warm: int = WARM_ROUNDS, rounds: int = ROUNDS) -> Run:
        """Boots all VMs of a variant, makes them read their trees, and ends them."""
        assert variant.ram_bytes
        out = Run(variant.ram_bytes)
        with contextlib.ExitStack() as stack:
            ksm = stack.enter_context(Ksm(KSM_PAGES, KSM_SLEEP_MS)) if variant.merged else None
            daemon = None
            if variant.cached:
                tenants = [Tenant(name, trust_domain="density") for name in NAMES]
                daemon = self.session.daemon(*tenants, pool_size=f"{POOL_BYTES // MIB}MiB")
                daemon.start()
                stack.callback(daemon.stop)
            vms = {name: self._vm(name, variant, daemon) for name in NAMES}
            for vm in vms.values():
                stack.callback(vm.stop)
                vm.launch()
            for vm in vms.values():
                guest = vm.connect()
                if daemon:
                    guest.insmod("/virtio_tmem.ko", demo.MODULE_PARAMETERS)
                    if (state := guest.read("/sys/kernel/virtio_tmem/state")) != "on":
                        raise HarnessError(f"{vm.name}: the driver is '{state}', not on")
                guest.mount("data", "/data", options="ro")
            self._measure(out, Fleet(vms, daemon, ksm), warm, rounds)
            for vm in vms.values():
                vm.check_console()
        return out

    def _vm(self, name: str, variant: Variant, daemon: Daemon | None) -> Vm:
        assert variant.ram_bytes
        image = Disk("data", self._images[name], read_only=True, throttle=disk.CLOUD_VOLUME)
        return self.session.vm(
            Config(
                kernel=self.kernel,
                name=name,
                memory_bytes=variant.ram_bytes,
                memory_backend=variant.memory_backend,
                tcg_buffer_bytes=TCG_BUFFER_BYTES,
                disks=[image],
                tmem=Tmem(daemon.socket(name)) if daemon else None,
                files={"/virtio_tmem.ko": self._driver} if daemon else {},
            )
        )

    def _measure(self, out: Run, fleet: Fleet, warm: int, rounds: int) -> None:
        show = self.progress.show
        before = fleet.read_bytes()
        read_trees(fleet, warm, lambda text: show(f"warm-up: {text}"))
        out.warm_read_bytes = fleet.read_bytes() - before
        if fleet.ksm and rounds:
            show("KSM looks for equal pages")
            begin, used = time.monotonic(), fleet.processors()[KSMD]
            fleet.ksm.settle(KSM_SECONDS)
            out.settle_seconds = time.monotonic() - begin
            out.settle_processor_seconds = fleet.processors()[KSMD] - used
        before, hits_before, used_before = fleet.read_bytes(), fleet.hits(), fleet.processors()
        if rounds:
            out.seconds = read_trees(fleet, rounds, show)
        out.read_bytes = fleet.read_bytes() - before
        out.processor_seconds = {
            name: seconds - used_before[name] for name, seconds in fleet.processors().items()
        }
        out.hits = fleet.hits() - hits_before
        out.settled_bytes = fleet.now_bytes()
        out.peak_bytes = fleet.peak_bytes
        if fleet.ksm:
            out.saved_bytes = fleet.ksm.saved_bytes(PAGE_BYTES)
        if fleet.daemon:
            pool = fleet.daemon.stats()["pool"]
            out.pool = {key: pool[key] for key in POOL_FIGURES}
            if not self.runs[DEVICE.key]:
                self._compare(fleet.vms)

    def _compare(self, vms: dict[str, Vm]) -> None:
        """Raises if the SHA-256 of a file differs in the guest and on the host."""
        self.progress.show("comparing the SHA-256 of every file with the host's")
        for name, vm in vms.items():
            if guest_sums(vm.guest) != self._sums[name]:
                raise HarnessError(f"{name}: a file's SHA-256 differs from the host's")

    def calibrate(self, variant: Variant, wanted_bytes: int, first_bytes: int) -> Variant:
        """Returns the variant with RAM for which its VMs use `wanted_bytes` of the host at their
        peak.

        `first_bytes` is the RAM of the first attempt.
        """
        ram = first_bytes
        for _ in range(CALIBRATIONS):
            ram -= ram % MIB
            found = self.run(replace(variant, ram_bytes=ram), warm=1, rounds=0).peak_bytes
            self.progress.step(
                f"  {variant.what}: with {size_text(ram)} each, host {size_text(found)}; "
                f"wanted {size_text(wanted_bytes)}"
            )
            if abs(found - wanted_bytes) <= wanted_bytes * TOLERANCE / 3:
                break
            ram += (wanted_bytes - found) // len(NAMES)
        return replace(variant, ram_bytes=ram - ram % MIB)

    def all(self, repeat: int, variants: list[Variant]) -> None:
        step = self.progress.step
        step(f"{len(NAMES)} trees of {size_text(TREE_BYTES)} from this machine's /usr")
        self.trees()
        step(f"{DEVICE.what}: {len(NAMES)} VMs of {size_text(RAM_BYTES)}, {size_text(POOL_BYTES)}")
        self._note(DEVICE, self.run(DEVICE))
        first = self.runs[DEVICE.key][0]
        guess = RAM_BYTES + first.pool["held_bytes"] // len(NAMES)
        step("RAM without the device, for equal host bytes")
        ready = [DEVICE]
        for variant in variants:
            if variant.ram_bytes is None:
                variant = self.calibrate(variant, first.peak_bytes, guess)  # noqa: PLW2901
                guess = variant.ram_bytes or guess
            if variant is not DEVICE:
                ready.append(variant)
        for repetition in range(repeat):
            # Each repetition starts with another variant, so that other load of the machine affects
            # all variants alike.
            turn = repetition % len(ready)
            for variant in ready[turn:] + ready[:turn]:
                # The first repetition leaves out the device, which ran before the calibration. The
                # others leave out KSM with enough RAM, whose results hardly vary.
                if variant is (DEVICE if repetition == 0 else ROOMY):
                    continue
                self._note(variant, self.run(variant))

    def _note(self, variant: Variant, run: Run) -> None:
        self.runs[variant.key].append(run)
        self.progress.step(
            f"  {variant.what}, {size_text(run.ram_bytes)} each: {run.seconds:.1f} s, "
            f"{size_text(run.read_bytes)} from disk, host {size_text(run.peak_bytes)}"
        )


PEAK: Callable[[Run], float] = attrgetter("peak_bytes")
END: Callable[[Run], float] = attrgetter("settled_bytes")
READ: Callable[[Run], float] = attrgetter("read_bytes")
TIME: Callable[[Run], float] = attrgetter("seconds")


def middle(runs: list[Run], of: Callable[[Run], float]) -> float:
    return statistics.median(of(run) for run in runs)


def scatter(runs: list[Run], of: Callable[[Run], float], text: Callable[[float], str]) -> str:
    """Returns the median as text, with the least and the greatest value in brackets."""
    values = [of(run) for run in runs]
    if len(values) == 1:
        return text(values[0])
    return f"{text(statistics.median(values))} ({text(min(values))}-{text(max(values))})"


def equal(runs: list[Run], to: list[Run]) -> bool:
    """Returns whether two variants took equal bytes of the host, so that they can be compared."""
    ours, theirs = middle(runs, PEAK), middle(to, PEAK)
    return abs(ours - theirs) <= theirs * TOLERANCE


def ratio(runs: list[Run], device: list[Run], of: Callable[[Run], float]) -> float | None:
    """Returns the median of a value (`of`) of a variant, divided by the median with the device.

    Returns None if the variants took unequal bytes of the host, or if the divisor is 0.
    """
    low = middle(device, of)
    return middle(runs, of) / low if equal(runs, device) and low else None


def report(runs: dict[str, list[Run]]) -> str:
    device = runs[DEVICE.key]
    head = [
        "",
        "RAM each",
        "host bytes",
        "host bytes at the end",
        "disk reads",
        "reads / device's",
        "time",
        "time / device's",
    ]
    rows = [[*head, "processor: QEMUs", "tmemd or ksmd"]]
    for variant in VARIANTS:
        if not (some := runs[variant.key]):
            continue
        factors = [ratio(some, device, of) for of in (READ, TIME)]
        reads, times = ("-" if factor is None else f"{factor:.2f}" for factor in factors)
        row = [variant.what, size_text(some[0].ram_bytes), size_text(middle(some, PEAK))]
        row += [size_text(middle(some, END)), scatter(some, READ, size_text), reads]
        row += [scatter(some, TIME, seconds_text), times]
        row += [seconds_text(middle(some, lambda run: run.processor_seconds["qemu"]))]
        row += [seconds_text(middle(some, helper_seconds))]
        rows.append(row)
    return table(rows)


def helper_seconds(run: Run) -> float:
    """Returns the processor seconds of the daemon and of KSM."""
    return sum(run.processor_seconds.get(name, 0) for name in (DAEMON, KSMD))


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s"


def remarks(runs: dict[str, list[Run]]) -> str:
    pool = runs[DEVICE.key][-1].pool
    lines = [
        f"pool: {pool['pages']:,} pages = {size_text(pool['original_bytes'])} in "
        f"{size_text(pool['held_bytes'])}; hits in the measured rounds: "
        f"{middle(runs[DEVICE.key], lambda run: run.hits):,.0f}",
    ]
    for variant in (MERGED, ROOMY):
        if some := runs[variant.key]:
            lines.append(
                f"{variant.what}: {size_text(middle(some, lambda run: run.saved_bytes))} merged at "
                f"the end; before the measured rounds, KSM merged for "
                f"{seconds_text(middle(some, lambda run: run.settle_seconds))}, which took "
                f"{seconds_text(middle(some, lambda run: run.settle_processor_seconds))} of "
                "processor time"
            )
    unequal = [
        variant.what
        for variant in VARIANTS
        if runs[variant.key] and not equal(runs[variant.key], runs[DEVICE.key])
    ]
    if unequal:
        lines.append(
            f"no ratio for {' and '.join(unequal)}: host bytes differ by more than {TOLERANCE:.0%}"
        )
    return "\n".join([*lines, REMARK])


REMARK = """
Host bytes are the greatest sum of the memory of all QEMUs and of tmemd with its pool, of their page
tables and of KSM's records, at any time after the reads began. Processors are emulated (TCG) unless
TMEM_ACCEL names another accelerator: bytes, disk reads and hits are what hardware would see, but
times are not."""


def write_json(path: Path, runs: dict[str, list[Run]], release: str) -> None:
    device = runs[DEVICE.key]
    out = {
        "vms": len(NAMES),
        "tree_bytes": TREE_BYTES,
        "common": demo.SHARED_FRACTION,
        "pool_bytes": POOL_BYTES,
        "rounds": ROUNDS,
        "machine": machine_text(),
        "accelerator": ACCELERATOR,
        "kernel": release,
        "variants": {
            variant.key: {
                "ram_bytes": some[0].ram_bytes,
                "host_bytes_equal": equal(some, device),
                "read_bytes_by_device": ratio(some, device, READ),
                "seconds_by_device": ratio(some, device, TIME),
                "runs": [asdict(run) for run in some],
            }
            for variant in VARIANTS
            if (some := runs[variant.key])
        },
    }
    path.write_text(json.dumps(out, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json",
        type=Path,
        help="write the figures to this file; default: the environment variable JSON",
    )
    parser.add_argument(
        "--repeat", type=int, default=REPEAT, help="runs of each variant; default: %(default)s"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=[variant.key for variant in VARIANTS[1:]],
        default=[variant.key for variant in VARIANTS[1:]],
        help="variants to compare the device with",
    )
    arguments = parser.parse_args()
    json_path = arguments.json or (Path(os.environ["JSON"]) if os.environ.get("JSON") else None)
    try:
        # Look for the programs first, so that a missing one is reported at once and not after
        # minutes.
        qemu_binary(), host_binary("tmemd"), host_binary("tmemctl")
        chosen = [variant for variant in VARIANTS if variant.key in arguments.only]
        if any(variant.merged for variant in chosen):
            with Ksm(KSM_PAGES, KSM_SLEEP_MS):
                pass
        with Session() as session:
            bench = Bench(session, Progress())
            bench.all(arguments.repeat, chosen)
            print(f"\n{machine_text()}; guest {bench.kernel.release}\n\n{report(bench.runs)}\n")
            print(remarks(bench.runs))
            if json_path:
                write_json(json_path, bench.runs, bench.kernel.release)
    except HarnessError as error:
        print(f"\nbench-density: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
