# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a benchmark with guests: `python -m bench.vm NAME`, which tests/bench/run calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.vm import autosize, demo, native, proof, seeds, sizes, swap
from harness.paths import HarnessError

PROGRAMS = {
    "autosize": autosize,
    "demo": demo,
    "native": native,
    "proof": proof,
    "seeds": seeds,
    "sizes": sizes,
    "swap": swap,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/bench/run")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, program in PROGRAMS.items():
        command = commands.add_parser(name, description=program.__doc__)
        program.add_arguments(command)
    options = parser.parse_args(arguments)
    try:
        return int(PROGRAMS[options.name].run(options))
    except HarnessError as error:
        print(f"\n{options.name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
