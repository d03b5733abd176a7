# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Fixtures: the QEMU under test, and machines and backends that end with their test."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from machine import Backend, Machine

BUILD = Path(__file__).resolve().parent.parent / "build"


@pytest.fixture(scope="session")
def qemu():
    """Returns the QEMU that the variable QEMU names, or the one of qemu-dev/build.

    The latter is built if it does not exist.
    """
    if "QEMU" in os.environ:
        return os.environ["QEMU"]
    return subprocess.run(
        [BUILD], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]


@pytest.fixture
def folder():
    """Creates a directory with a short path: the name of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="tmem") as path:
        yield Path(path)


@pytest.fixture
def machine(qemu, folder):
    """Creates machines that end with the test."""
    machines = []

    def make(path=folder, **options):
        machines.append(Machine(qemu, path, **options))
        return machines[-1]

    yield make
    for each in machines:
        each.close()


@pytest.fixture
def backend(folder):
    """Starts backend processes on the machine's socket."""
    backends = []

    def start(*arguments, path=folder):
        backends.append(Backend(path / "tmem.sock", *arguments))
        return backends[-1]

    yield start
    for each in backends:
        each.kill()
