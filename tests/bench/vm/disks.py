# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Makes the files of the guests: images, databases, clones of an image, and traces of requests.

Everything depends on a fixed seed, so all compared configurations (arms) and all runs read the same
places.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.vm import demo
from bench.vm.machine import BATCH_BYTES, PAGE_BYTES, SEED, UNCACHED_KIND, write_contents
from harness import disk, storage
from harness.paths import HarnessError
from harness.vm import MIB

SET = "set"  # the file that most workloads read
# Cluster size of qcow2 overlays. With extended_l2, QEMU allocates parts of 4 KiB of a cluster.
CLUSTER_BYTES = 128 << 10
OWN_UNIT_BYTES = 1 * MIB  # size of a part of a file, which one clone or all clones have


def make_set_image(path: Path, set_bytes: int) -> Path:
    """Creates an ext4 image with a file of pages that are all different and that lz4 halves."""
    source = random.Random(SEED)
    tree = path.with_suffix(".tree")
    tree.mkdir()
    for name, file_bytes in ((SET, set_bytes), ("batch", BATCH_BYTES)):
        write_contents(tree / name, file_bytes, source)
    return _pack(path, set_bytes * 5 // 4 + 32 * MIB, tree)


def _pack(path: Path, size_bytes: int, tree: Path) -> Path:
    disk.ext4(path, size_bytes, tree)
    shutil.rmtree(tree)
    return path


def make_loads_image(path: Path, loads: dict[str, str]) -> Path:
    """Creates an image with the requests of all repetitions, which the guest mounts at LOADS.

    The guest does not cache it (Machine.mount_uncached()), so reading requests does not use the
    pool.
    """
    tree = path.with_suffix(".tree")
    tree.mkdir()
    for name, text in loads.items():
        (tree / name).write_text(text)
    size = sum(map(len, loads.values()))
    disk.ext4(path, size + size // 4 + 16 * MIB, tree, "-t", UNCACHED_KIND)
    shutil.rmtree(tree)
    return path


# The table of sysbench's OLTP workloads.
SCHEMA = """
CREATE TABLE sbtest1(id INTEGER PRIMARY KEY, k INTEGER NOT NULL, c CHAR(120) NOT NULL,
  pad CHAR(60) NOT NULL);
"""
ROW_BYTES = 214  # bytes of a row in the table and its index; sets the number of rows


def _digits(source: random.Random, groups: int) -> str:
    return "-".join(f"{source.randrange(10**11):011d}" for _ in range(groups))


def make_database(path: Path, set_bytes: int) -> Path:
    """Creates an image with a SQLite database of this size."""
    rows = set_bytes // ROW_BYTES
    source = random.Random(SEED)
    tree = path.with_suffix(".tree")
    tree.mkdir()
    with sqlite3.connect(tree / "db") as base:
        base.executescript(f"PRAGMA page_size={PAGE_BYTES}; PRAGMA journal_mode=OFF; {SCHEMA}")
        values = (
            (row, source.randrange(rows), _digits(source, 10), _digits(source, 5))
            for row in range(1, rows + 1)
        )
        base.executemany("INSERT INTO sbtest1 VALUES(?,?,?,?)", values)
        base.execute("CREATE INDEX k_1 ON sbtest1(k)")
    base.close()
    write_contents(tree / "batch", BATCH_BYTES, source)
    return _pack(path, set_bytes + set_bytes // 2 + 64 * MIB, tree)


SETTINGS = """PRAGMA locking_mode=EXCLUSIVE;
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
PRAGMA cache_size=-8192;
PRAGMA mmap_size=0;
"""
POINTS = 10
RANGE = 100


def transactions(rows: int, count: int, repetition: int, *, writes: bool) -> str:
    """Returns SQL for `count` transactions of sysbench's oltp_read_only or oltp_read_write.

    Identifiers are distributed evenly (--rand-type=uniform).
    """
    source = random.Random(f"{SEED}-{repetition}")

    def place() -> int:
        return source.randrange(1, rows - RANGE)

    out = [SETTINGS]
    for _ in range(count):
        out.append("BEGIN;")
        out += [f"SELECT c FROM sbtest1 WHERE id={place()};" for _ in range(POINTS)]
        for columns, more in (
            ("c", ""),
            ("SUM(k)", ""),
            ("c", " ORDER BY c"),
            ("DISTINCT c", " ORDER BY c"),
        ):
            first = place()
            where = f"id BETWEEN {first} AND {first + RANGE - 1}"
            out.append(f"SELECT {columns} FROM sbtest1 WHERE {where}{more};")
        if writes:
            text, gone = _digits(source, 10), place()
            out.append(f"UPDATE sbtest1 SET k=k+1 WHERE id={place()};")
            out.append(f"UPDATE sbtest1 SET c='{text}' WHERE id={place()};")
            out.append(f"DELETE FROM sbtest1 WHERE id={gone};")
            pad = _digits(source, 5)
            key = source.randrange(rows)
            out.append(f"INSERT INTO sbtest1 VALUES({gone},{key},'{text}','{pad}');")
        out.append("COMMIT;")
    return "\n".join(out) + "\n"


class Zipf:
    """Draws blocks of a file; the n-th most popular one with a probability of 1 / n ** theta.

    Popular blocks are spread over the file. fio's own Zipf generator is not used: with the same
    seed, all its runs make the same requests, and with other seeds, other blocks are popular.
    """

    def __init__(self, blocks: int, theta: float) -> None:
        self.blocks = blocks
        self.theta = theta
        self._order = list(range(blocks))
        random.Random(SEED).shuffle(self._order)
        weights = ((rank + 1) ** -theta for rank in range(blocks))
        self._sums = list(itertools.accumulate(weights))

    def draw(self, count: int, seed: str) -> list[int]:
        source = random.Random(f"{SEED}-{seed}")
        return source.choices(self._order, cum_weights=self._sums, k=count)


def trace(path: str, block_bytes: int, blocks: list[int], seed: str, write_share: float = 0) -> str:
    """Returns requests for fio's --read_iolog, some of them writes."""
    source = random.Random(f"{SEED}-{seed}-writes")
    lines = ["fio version 2 iolog", f"{path} add", f"{path} open"]
    for block in blocks:
        verb = "write" if source.random() < write_share else "read"
        lines.append(f"{path} {verb} {block * block_bytes} {block_bytes}")
    return "\n".join([*lines, f"{path} close"]) + "\n"


# Images of clones: guests whose disks are overlays on one base image.


def _file_pages(order: random.Random) -> Iterator[bytes]:
    """Yields real pages: files of this machine's operating system, each padded to whole pages."""
    files = [path for path, _ in demo.walk()]
    order.shuffle(files)
    for path in files:
        data = path.read_bytes()
        data += bytes(-len(data) % PAGE_BYTES)
        yield data


class Contents:
    """A stream of real file contents, from which each caller gets other bytes."""

    def __init__(self) -> None:
        self._pages = _file_pages(random.Random(SEED))
        self._rest = b""

    def take(self, count_bytes: int) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while size < count_bytes:
            data = next(self._pages, None)
            if data is None:
                raise HarnessError("this machine's /usr is too small for the clones")
            parts.append(data)
            size += len(data)
        whole = b"".join(parts)
        self._rest = whole[count_bytes:]
        return whole[:count_bytes]


def make_clones(
    directory: Path, count: int, set_bytes: int, overlap: float
) -> tuple[Path, list[Path]]:
    """Creates a base image and an overlay for each guest, which hold a file of real contents.

    A part of the file's units is in the base image and equal in all guests. Each overlay has the
    other units with contents of its own.
    """
    source = Contents()
    units = set_bytes // OWN_UNIT_BYTES
    directory.mkdir(parents=True)
    base = directory / "base.img"
    tree = directory / "tree"
    tree.mkdir()
    # mkfs allocates no blocks for zeros, so fill the file with "x". _fill() writes the contents.
    (tree / SET).write_bytes(b"x" * set_bytes)
    _pack(base, set_bytes + set_bytes // 4 + 32 * MIB, tree)
    at = blocks(base)
    if len(at) != set_bytes // PAGE_BYTES:
        raise HarnessError(f"{SET} has {len(at)} blocks in {base}, not {set_bytes // PAGE_BYTES}")
    own = sorted(random.Random(SEED).sample(range(units), round(units * (1 - overlap))))
    _fill(base, at, (unit for unit in range(units) if unit not in own), source)
    overlays = []
    for number in range(count):
        full = directory / f"full{number}.img"
        shutil.copyfile(base, full)
        _fill(full, at, own, source)
        overlay = directory / f"own{number}.qcow2"
        how = f"cluster_size={CLUSTER_BYTES},extended_l2=on"
        raw = ("-F", "raw", overlay.name)
        _qemu_img(directory, "create", "-q", "-f", "qcow2", "-o", how, "-b", full.name, *raw)
        # This copies only the clusters into the overlay in which the two backing files differ.
        _qemu_img(directory, "rebase", "-q", "-b", base.name, *raw)
        full.unlink()
        overlays.append(overlay)
    return base, overlays


def _fill(path: Path, at: list[int], units: Iterable[int], source: Contents) -> None:
    """Writes contents from `source` into units of a file whose blocks in the image are `at`."""
    pages = OWN_UNIT_BYTES // PAGE_BYTES
    with open(path, "r+b") as file:
        for unit in units:
            data = source.take(OWN_UNIT_BYTES)
            for page in range(pages):
                file.seek(at[unit * pages + page] * PAGE_BYTES)
                file.write(data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])


def blocks(path: Path) -> list[int]:
    """Returns the block numbers of the file that guests read (SET) in an ext4 image, in order."""
    command = ["debugfs", "-R", f"blocks /{SET}", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def _qemu_img(directory: Path, *arguments: str) -> None:
    program = storage.program().with_name("qemu-img")
    done = subprocess.run(
        [program, *arguments], check=False, cwd=directory, capture_output=True, text=True
    )
    if done.returncode:
        raise HarnessError(f"qemu-img {' '.join(arguments)}: {done.stderr.strip()}")
