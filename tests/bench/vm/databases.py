# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs database servers in a guest: MariaDB with sysbench, and PostgreSQL with pgbench.

The disk of the guest has a Debian system with the programs. A chroot of this machine fills the
databases, because that takes too long in a native guest.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.vm.machine import BATCH_BYTES, DATA, SEED, write_contents
from harness import disk
from harness.paths import ROOT, HarnessError
from harness.vm import MIB

SUITE = "trixie"
PACKAGES = ("mariadb-server", "sysbench", "postgresql")
SYSTEM = ROOT / "packaging/clean-system"
# Files of the system that no server reads.
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt")
MARIADB_ROWS = 1_900_000  # a row takes about 230 bytes on the disk
POSTGRES_SCALE = 28  # a unit of the scale takes about 15 MiB on the disk
SOCKET = "/tmp/mariadb.sock"
POSTGRES = "/var/lib/postgresql/17/main"


@dataclass(frozen=True)
class Server:
    """A database server, its benchmark, and the commands that use them in the system."""

    name: str
    fill: str  # command that fills the database while the server runs
    start: str
    is_ready: str
    stop: str
    buffered: str  # options of `start` that leave most of the RAM to the page cache
    load: str  # command that runs `count` transactions; `seed` is appended to it
    seed: str  # option of `load` that sets the seed of the random numbers
    files: str  # directory of the database

    def prepare_script(self) -> str:
        """Returns a script that fills the database."""
        wait = f"until {self.is_ready} >/dev/null 2>&1; do sleep 0.2; done"
        return f"set -e; {self.start} & {wait}; {self.fill}; {self.stop}; wait"


SYSBENCH = (
    f"sysbench --db-driver=mysql --mysql-socket={SOCKET} --mysql-user=root --rand-type=uniform "
    f"--table-size={MARIADB_ROWS} --threads=4"
)
AS_POSTGRES = "setpriv --reuid=postgres --regid=postgres --clear-groups"
MARIADB = Server(
    name="mariadb",
    fill=f"mariadb -S {SOCKET} -e 'CREATE DATABASE sbtest'; {SYSBENCH} oltp_read_write prepare",
    start=f"mariadbd --user=mysql --skip-networking --skip-grant-tables --socket={SOCKET} "
    # By default, the server reserves 8 TiB of addresses, which user-mode Linux does not have.
    "--pid-file=/tmp/mariadb.pid --innodb-buffer-pool-size-max=512M",
    is_ready=f"mariadb-admin -S {SOCKET} ping",
    stop="kill $(cat /tmp/mariadb.pid); while [ -e /tmp/mariadb.pid ]; do sleep 0.2; done",
    buffered="--innodb-buffer-pool-size=16M --innodb-flush-method=fsync",
    load=f"{SYSBENCH} --time=0 --events={{count}} {{load}} run",
    seed="--rand-seed=",
    files="var/lib/mysql",
)
POSTGRESQL = Server(
    name="postgresql",
    fill=f"{AS_POSTGRES} pgbench -h /tmp -q -i -s {POSTGRES_SCALE} postgres",
    start=f"{AS_POSTGRES} /usr/lib/postgresql/17/bin/postgres -D {POSTGRES} "
    "-c config_file=/etc/postgresql/17/main/postgresql.conf -c listen_addresses= -c ssl=off "
    "-c unix_socket_directories=/tmp -c external_pid_file=/tmp/postgresql.pid",
    is_ready=f"{AS_POSTGRES} pg_isready -h /tmp",
    stop="kill -INT $(cat /tmp/postgresql.pid); "
    "while [ -e /tmp/postgresql.pid ]; do sleep 0.2; done",
    buffered="-c shared_buffers=16MB",
    load=f"{AS_POSTGRES} pgbench -h /tmp -n -c 4 -t {{count}} {{load}} postgres",
    seed="--random-seed=",
    files="var/lib/postgresql",
)


def make_image(path: Path, server: Server) -> Path:
    """Creates an image with a Debian system and a full database, to which a guest changes its root.

    This needs root and the package mmdebstrap.
    """
    tree = path.with_suffix(".tree")
    tree.mkdir()
    _run(str(SYSTEM), "make", SUITE, str(tree), *PACKAGES)
    _run(str(SYSTEM), "run", str(tree), "/bin/sh", "-c", server.prepare_script())
    for name in UNUSED:
        shutil.rmtree(tree / name, ignore_errors=True)
    write_contents(tree / "batch", BATCH_BYTES, random.Random(SEED))
    used = subprocess.run(["du", "-sm", str(tree)], check=True, capture_output=True, text=True)
    disk.ext4(path, (int(used.stdout.split()[0]) * 5 // 4 + 256) * MIB, tree)
    shutil.rmtree(tree)
    return path


def _run(*command: str) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise HarnessError(f"{' '.join(command)} failed:\n{done.stdout[-4096:]}")


def in_system(command: str) -> str:
    """Returns a command of the guest that runs a shell command in the system of the disk."""
    quoted = command.replace("'", "'\\''")
    return f"chroot {DATA} /bin/sh -c 'export PATH=/usr/sbin:/usr/bin HOME=/tmp; {quoted}'"


def rate(text: str) -> float:
    """Returns the transactions per second that sysbench or pgbench prints."""
    found = re.search(r"transactions: +\d+ +\((\S+) per sec|^tps = (\S+) ", text, re.MULTILINE)
    if not found:
        raise HarnessError(f"the benchmark printed no rate: {text}")
    return float(found[1] or found[2])
