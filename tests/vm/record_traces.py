# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Records the traces in tests/traces with the real driver. pytest does not collect it as a test.

`TMEM_TRACES=DIR ./python -m pytest vm/record_traces.py` writes DIR/NAME.trace.zst for the names
that `-k` selects. The pool is larger than the data that the guest reads, so the host loses no page,
and the driver's admission filter puts all pages. A replay of the trace finds out which pages a
smaller pool would have lost. Random values have a fixed seed, but the moments at which reclaim
evicts pages differ from run to run.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import WHERE, Torture, driver_vm, load, settle, stats

from harness import disk, fio
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SEED = 2026
GUEST_BYTES = 128 * MIB  # RAM; the page cache gets about 60 MiB of it
DISK_BYTES = 512 * MIB
FIO = "/bin/fio"
SECONDS = 600


def compressible(generator: random.Random, size: int) -> bytes:
    """Returns blocks of 16 pages, each of random bytes followed by zeros in a random ratio."""
    parts = []
    while size > 0:
        noise = generator.choice((0, 512, 1024, 1500, 2048, 3072, 4096))
        pages = min(size // 4096, 16)
        parts += [generator.randbytes(noise) + bytes(4096 - noise) for _ in range(pages)]
        size -= pages * 4096
    return b"".join(parts)


def file_of(mib: int) -> Callable[[Path, random.Random], None]:
    def fill(directory: Path, generator: random.Random) -> None:
        (directory / "file").write_bytes(compressible(generator, mib * MIB))

    return fill


def trees(**files: int) -> Callable[[Path, random.Random], None]:
    """Fills directories with the given numbers of files, of 16 to 512 KiB each."""

    def fill(directory: Path, generator: random.Random) -> None:
        for name, number in files.items():
            (directory / name).mkdir()
            for nth in range(number):
                size = 16384 << generator.randrange(6)
                (directory / name / f"f{nth:04}").write_bytes(compressible(generator, size))

    return fill


def nothing(_directory: Path, _generator: random.Random) -> None:
    pass


def read_tree(guest: Guest, name: str) -> None:
    guest.sh(f"find {WHERE}/{name} -type f -print0 | xargs -0 cat >/dev/null", SECONDS)


def loop(guest: Guest) -> None:
    """Reads one file that is larger than the page cache from end to end, again and again."""
    for _ in range(4):
        guest.sh(f"cat {WHERE}/file >/dev/null", SECONDS)


def zipf(guest: Guest) -> None:
    """Reads single pages at random, a few of them much more often than most."""
    guest.sh(
        f"{FIO} --name=f --filename={WHERE}/file --rw=randread --random_distribution=zipf:0.8"
        f" --bs=4k --ioengine=psync --invalidate=0 --fadvise_hint=0 --number_ios=90000"
        f" --randseed={SEED} --eta=never --minimal",
        SECONDS,
    )


def mixed(guest: Guest) -> None:
    """Reads single pages of one file at random, and after each series all of another file."""
    for nth in range(3):
        guest.sh(
            f"{FIO} --name=f --filename={WHERE}/hot/f --rw=randread --bs=4k --ioengine=psync"
            f" --random_distribution=zipf:0.9 --invalidate=0 --fadvise_hint=0 --number_ios=24000"
            f" --randseed={SEED + nth} --eta=never --minimal",
            SECONDS,
        )
        guest.sh(f"cat {WHERE}/stream{nth} >/dev/null", SECONDS)


def fill_mixed(directory: Path, generator: random.Random) -> None:
    (directory / "hot").mkdir()
    (directory / "hot/f").write_bytes(compressible(generator, 80 * MIB))
    for nth in range(3):
        (directory / f"stream{nth}").write_bytes(compressible(generator, 64 * MIB))


def demo(guest: Guest) -> None:
    """Reads a tree that is larger than the page cache over and over."""
    for _ in range(3):
        read_tree(guest, "tree")


def three(guest: Guest) -> None:
    """Reads one tree in every round, one in every second round, and one in every fourth round."""
    for turn in range(8):
        for name, every in (("often", 1), ("sometimes", 2), ("seldom", 4)):
            if turn % every == 0:
                read_tree(guest, name)


def torture(guest: Guest) -> None:
    """Runs random file operations of two workers while a process evicts."""
    Torture(guest, f"--seed={SEED} --ops=8000 --files=16 --size-max=524288 --jobs=2").finish()


RUNS: dict[str, tuple[Callable[[Path, random.Random], None], Callable[[Guest], None]]] = {
    "loop": (file_of(128), loop),
    "zipf": (file_of(192), zipf),
    "mixed": (fill_mixed, mixed),
    "demo": (trees(tree=600), demo),
    "three": (trees(often=150, sometimes=250, seldom=250), three),
    "torture": (nothing, torture),
}


@pytest.mark.parametrize("name", RUNS)
def test_trace_is_recorded(session: Session, kernel: Kernel, module: Path, name: str) -> None:
    if "TMEM_TRACES" not in os.environ:
        pytest.skip("set TMEM_TRACES=DIR to record traces into DIR")
    fill, work = RUNS[name]
    directory = session.directory / "files"
    directory.mkdir()
    fill(directory, random.Random(SEED))
    image = disk.ext4(session.directory / "data.img", DISK_BYTES, directory)
    trace = session.directory / "trace"
    daemon = session.daemon("vm1", pool_size="512MiB", options=["--trace", str(trace)])
    daemon.start()
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        memory_bytes=GUEST_BYTES,
        disks=[Disk("data", image)],
        files={FIO: fio.program()} if work in (zipf, mixed) else {},
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    work(guest)
    print(settle(guest))
    print({key: value for key, value in stats(guest).items() if value})
    vm.stop()
    daemon.terminate()
    into = Path(os.environ["TMEM_TRACES"]) / f"{name}.trace.zst"
    subprocess.run(["zstd", "--ultra", "-22", "-q", "-f", str(trace), "-o", str(into)], check=True)
    print(trace.stat().st_size, into.stat().st_size)
