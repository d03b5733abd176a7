# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs the torture program for a given time: `make shard NAME=long DURATION=2h`.

Each turn uses a new VM with another file system or another kernel. The program runs random
operations on files, readers that must never see an older version of a page, and fixed scenarios. In
every other turn, the driver also reads each hit from the disk and compares it. Each run of the
program has a new seed, which is printed. The first failure ends all turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence

from driver import Torture, is_on, state, stats
from test_filesystems import SCENARIOS, SMALL, boot, mount_arguments

from harness import disk, module
from harness import kernel as kernels
from harness.paths import HarnessError
from harness.session import Session

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PROGRESS_SECONDS = 60.0
POLL_SECONDS = 0.2
# Numbers of operations of a run of the torture program. It takes a few minutes under emulation.
# This program ends only after a run, so it may end a few minutes later than requested.
RANDOM_OPERATIONS = 20_000
VERSIONS_OPERATIONS = 10_000
RUN_SECONDS = 1800.0  # a run that takes longer is treated as hung
# Module parameter that removes safety checks. Only a module that was built for tests has it.
WITHOUT = "test_blocks_without="


class Progress:
    """Measures the remaining time, and prints it every minute."""

    def __init__(self, seconds: float) -> None:
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.runs = 0
        self.operations = 0
        self.hits = 0
        self._next = self.start + PROGRESS_SECONDS

    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def tick(self, doing: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next += PROGRESS_SECONDS
        self.print_line(doing)

    def print_line(self, doing: str) -> None:
        gone, whole = time.monotonic() - self.start, self.end - self.start
        print(
            f"long: {gone / 60:.0f} of {whole / 60:.0f} min, {self.runs} runs, "
            f"{self.operations} operations, {self.hits} hits; {doing}",
            flush=True,
        )


def duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a duration; write a number and s, m, h or d, such as 2h"
        )
    return float(found[1]) * UNITS[found[2] or "s"]


def arguments_of_a_turn(name: str, generator: random.Random) -> Iterator[str]:
    """Yields the arguments of each run of the torture program in one VM, with a new seed."""
    yield (
        f"--seed={generator.getrandbits(32)} --ops={RANDOM_OPERATIONS} {SMALL} --jobs=2 "
        f"--rounds=3 {mount_arguments(name)}"
    )
    yield (
        f"--seed={generator.getrandbits(32)} --mode=versions --ops={VERSIONS_OPERATIONS} --mixed "
        "--readers=4 --direct-readers=2"
    )
    arguments = mount_arguments(name)
    for scenario in SCENARIOS:
        # Swap files on file systems with blocks of 1 KiB or with bigalloc need options of mkswap
        # and of the file that torture does not use.
        if scenario != "swap" or not re.search("1k|bigalloc", name):
            yield f"--seed={generator.getrandbits(32)} --scenario={scenario} {arguments}"


def can_mount(kernel: kernels.Kernel, name: str) -> bool:
    """Returns whether the kernel can mount this file system.

    An xfs that allows XFS_IOC_EXCHANGE_RANGE needs Linux 6.10.
    """
    series = tuple(int(part) for part in kernel.series.split("."))
    return not disk.FILE_SYSTEMS[name].exchange or series >= (6, 10)


def run_turn(
    kernel: kernels.Kernel,
    name: str,
    parameters: str,
    progress: Progress,
    generator: random.Random,
) -> None:
    """Runs the torture program in a new VM. Raises HarnessError or AssertionError at a fault."""
    where = f"kernel {kernel.release}, {name}, {parameters}"
    ko = module.build(kernel, test=WITHOUT in parameters)
    with Session() as session:
        command = "no command"
        try:
            guest = boot(session, kernel, ko, name, parameters)
            for arguments in arguments_of_a_turn(name, generator):
                if progress.is_over():
                    break
                command = f"torture {arguments}"
                print(f"long: {where}: {command}", flush=True)
                torture = Torture(guest, arguments, RUN_SECONDS)
                while not torture.job.done():
                    progress.tick(f"{where}: {command}")
                    time.sleep(POLL_SECONDS)
                numbers = torture.finish()
                progress.runs += 1
                progress.operations += numbers.get("ops", 0)
                progress.hits += numbers.get("hits", 0)
                counters = stats(guest)
                assert counters["mismatches"] + counters["verify_mismatches"] == 0, counters
                assert is_on(guest), state(guest)
            session.check_consoles()
        except (HarnessError, AssertionError):
            print(f"{session.report()}\nlong: FAILED: {where}: {command}", flush=True)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--duration",
        type=duration,
        default=duration("2h"),
        help="time to run, such as 90m; default: 2h",
    )
    parser.add_argument(
        "--kernels",
        default="6.12",
        help=f"kernel series, separated by commas; known: {', '.join(kernels.SERIES)}",
    )
    parser.add_argument(
        "--file-systems",
        default=",".join(disk.FILE_SYSTEMS),
        help="file systems, separated by commas; default: %(default)s",
    )
    parser.add_argument(
        "--seed",
        type=lambda text: int(text, 0),
        help="seed from which all seeds of the run are drawn",
    )
    parser.add_argument(
        "--without",
        metavar="NAMES",
        help="remove these checks, such as 'forget', to prove that a run finds a wrong byte",
    )
    options = parser.parse_args(arguments)
    names = options.file_systems.split(",")
    if unknown := set(names) - set(disk.FILE_SYSTEMS):
        parser.error(f"unknown file system {', '.join(sorted(unknown))}")
    prepared = [kernels.prepare(series) for series in options.kernels.split(",")]
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"long: --seed={seed}", flush=True)
    generator = random.Random(seed)
    progress = Progress(options.duration)
    turns = [
        (name, kernel)
        for name, kernel in itertools.product(names, prepared)
        if can_mount(kernel, name)
    ]
    if not turns:
        parser.error("no kernel mounts any of these file systems")
    generator.shuffle(turns)  # in random order, so that repeated short runs cover all turns
    for number, (name, kernel) in enumerate(itertools.cycle(turns)):
        if progress.is_over():
            break
        # In every second VM, the driver compares all hits with the disk. In the next pass through
        # `turns`, it does so in the other half of the VMs.
        parameters = f"verify_every={(number + number // len(turns)) % 2}"
        if options.without:
            parameters = f"verify_every=0 {WITHOUT}{options.without}"
        try:
            run_turn(kernel, name, parameters, progress, generator)
        except (HarnessError, AssertionError) as error:
            print(f"long: {error}", file=sys.stderr)
            return 1
    progress.print_line("no wrong byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
