# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests a host that runs short of a resource. The host is a VM, so that no other process uses it.

tmemd runs in this VM as on any host. It reads the VM's available memory, and the time for which
tasks of a control group wait for memory. A simulated guest fills the pool (tmemd's example `fill`).
The VM's kernel has one free operation of AIO, or none. VMs of this host are processes that have the
memory of a VM and a connection to the daemon (tmemd's example `regrow`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.disk import Disk
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.paths import ROOT, host_binary
from harness.session import Session
from harness.vm import Config
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

MIB = 1 << 20
MEMORY = 768 * MIB
POOL = 256
FILLED = 160
GROUP = "/sys/fs/cgroup/machine"
# The daemon's unit has the same score.
OOM_SCORE = "echo 900 >/proc/self/oom_score_adj"


@pytest.fixture(scope="module")
def fill() -> Path:
    """Returns the program that fills a pool, which cargo builds."""
    return build_example("fill")


def build_example(name: str) -> Path:
    """Builds an example program of tmemd and returns its path."""
    command = ["cargo", "build", "--locked", "-p", "tmemd", "--example", name]
    command += ["--message-format", "json", "--manifest-path", str(ROOT / "Cargo.toml")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    built = [json.loads(line).get("executable") for line in done.stdout.splitlines()]
    (program,) = filter(None, built)
    return Path(program)


def libraries(*programs: Path) -> dict[str, Path]:
    """Returns the shared libraries that the programs need, by their paths."""
    found = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], check=True, stdout=subprocess.PIPE, text=True)
        found.update(re.findall(r"(/\S+) \(0x", listed.stdout))
    return {path: Path(os.path.realpath(path)) for path in found}


class Host:
    """The VM that acts as a host, and in it a daemon whose pool a simulated guest fills."""

    def __init__(
        self,
        session: Session,
        kernel: Kernel,
        fill: Path,
        arguments: str,
        before: str = "",
        *,
        aio_operations: int | None = None,
        more: tuple[Path, ...] = (),
        swap_bytes: int = 0,
        vms: int = 0,
    ) -> None:
        tmemd = host_binary("tmemd")
        programs = (tmemd, fill, *more)
        files = {f"/bin/{program.name}": program for program in programs} | libraries(*programs)
        disks = []
        if swap_bytes:
            image = session.directory / "swap.img"
            with image.open("wb") as file:
                file.truncate(swap_bytes)
            # mkswap warns that a program of the host should not use a sparse file for swap.
            subprocess.run(["mkswap", image], check=True, capture_output=True)
            disks.append(Disk("swap", image))
        config = Config(kernel, memory_bytes=MEMORY, cpus=2, files=files, disks=disks)
        self.guest: Guest = session.vm(config).start()
        if swap_bytes:
            self.guest.sh(f"swapon /dev/{self.guest.disk('swap')}")
        self.guest.sh("mkdir -p /run /big; mount -t tmpfs -o size=100% tmpfs /big")
        if before:
            self.guest.sh(before)
        if aio_operations is not None:
            self.guest.sh(f"echo {aio_operations} >/proc/sys/fs/aio-max-nr")
        command = f"tmemd --pool-size {POOL}MiB --control /run/control {arguments}"
        names = ["vm", *(f"vm{number}" for number in range(vms))]
        command += "".join(f" --vm socket=/run/{name}.sock,name={name}" for name in names)
        command = f"{join_command(before)} exec {command} 2>&1"
        self.daemon = self.guest.start(f"{OOM_SCORE}; {command}", 1200)
        until(
            lambda: self.guest.run("test -S /run/control").status == 0,
            60,
            "tmemd has its control socket",
        )
        self.filler: Job = self.guest.start(
            f"{join_command(before)} exec fill /run/vm.sock /run/control {FILLED} 2>&1", 1200
        )
        until(lambda: bool(self.lines()), 300, "the pool is full")

    def lines(self) -> list[str]:
        """Returns the lines that the filler (tmemd's example `fill`) has printed."""
        assert not self.filler.done(), self.filler.stdout().decode()
        return self.filler.stdout().decode().splitlines(keepends=True)

    def pool(self) -> dict[str, Any]:
        """Returns the statistics of the pool from the last complete line of the filler's output."""
        whole = [line for line in self.lines() if line.endswith("\n")]
        figures: dict[str, Any] = json.loads(whole[-1])
        return figures

    def available(self) -> int:
        """Returns the bytes that the kernel reports as available."""
        return int(self.guest.sh("awk '/^MemAvailable:/ { print $2 }' /proc/meminfo")) << 10


def join_command(before: str) -> str:
    """Returns a command that moves the shell into the control group, if there is one."""
    return f"echo $$ >{GROUP}/cgroup.procs;" if before else ""


def test_pool_shrinks_when_host_memory_is_short(
    session: Session, kernel: Kernel, fill: Path
) -> None:
    """The pool shrinks when less than `--host-free-min` is available, and grows again later."""
    free_min = 200
    host = Host(session, kernel, fill, f"--host-free-min {free_min}MiB --memory-pressure none")
    full = host.pool()
    assert full["size_bytes"] == full["configured_bytes"] == POOL * MIB
    assert full["payload_bytes"] >= FILLED * MIB
    # The file takes so much memory that half of the minimum would remain if the pool did not
    # shrink.
    taken = host.available() - free_min * MIB // 2
    host.guest.sh(f"dd if=/dev/zero of=/big/file bs=64k count={taken >> 16} 2>&1", 120)
    until(
        lambda: host.available() >= free_min * MIB * 9 // 10,
        60,
        "the host has the minimum of available memory",
    )
    # The filler prints the pool's statistics five times a second only, so wait for them.
    enough = full["held_bytes"] - free_min * MIB // 3
    until(
        lambda: host.pool()["held_bytes"] <= enough, 60, "the pool released a third of the minimum"
    )
    given = host.pool()
    print(full, given, sep="\n")
    assert given["host_shrinks"] > 0
    assert given["size_bytes"] < full["size_bytes"]
    assert given["payload_bytes"] > 0, "the pool released all pages, more than the host needed"
    host.guest.sh("rm /big/file")
    until(lambda: host.pool()["host_grows"] > 0, 60, "the pool grows again")


def test_pool_shrinks_under_memory_pressure_of_its_cgroup(
    session: Session, kernel: Kernel, fill: Path
) -> None:
    """The pool shrinks when tasks of the daemon's control group wait for memory.

    The host has enough available memory.
    """
    make = (
        f"mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup;"
        f"echo +memory >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p {GROUP}"
    )
    watch = f"--host-free-min 1MiB --memory-pressure {GROUP}/memory.pressure"
    host = Host(session, kernel, fill, watch, make)
    full = host.pool()
    assert full["host_shrinks"] == 0
    held = int(host.guest.sh(f"cat {GROUP}/memory.current"))
    assert held >= full["held_bytes"], (
        "the daemon's control group is charged less memory than the pool uses"
    )
    # If the group uses more memory than this limit, the kernel makes its tasks wait until memory is
    # released.
    host.guest.sh(f"echo {held + 16 * MIB} >{GROUP}/memory.high")
    dd = "dd if=/dev/zero of=/big/file bs=64k count=1024 2>&1"
    taker = host.guest.start(f"echo $$ >{GROUP}/cgroup.procs; exec {dd}", 300)
    until(taker.done, 120, "dd has written its file in spite of the limit")
    assert taker.wait().status == 0
    given = host.pool()
    print(full, given, sep="\n")
    assert given["host_shrinks"] > 0
    assert given["size_bytes"] < full["size_bytes"]
    until(
        lambda: host.pool()["held_bytes"] < full["held_bytes"] - 32 * MIB,
        60,
        "the pool holds 32 MiB less",
    )


def test_burst_ends_no_process_but_the_daemon(session: Session, kernel: Kernel, fill: Path) -> None:
    """A process takes three quarters of a full pool, as fast as it can.

    The pool gives way in time, or the kernel ends the daemon, but it ends no other process. Which
    of the two happens depends on how fast the VM's processors release memory.
    """
    take = build_example("take")
    watch = "--host-free-min 1MiB --memory-pressure none"
    host = Host(session, kernel, fill, watch, more=(take,))
    # Without the pool's memory, the process cannot have so much, but it can with it.
    taken = host.available() // MIB + FILLED * 3 // 4
    taker = host.guest.start(f"exec take {taken} 0 2>&1", 300)
    until(taker.done, 240, "the process has the memory")
    print(taker.stdout().decode(), killed_processes(host.guest), sep="\n")
    assert taker.wait().status == 0, "the process that needs memory was ended"
    assert killed_processes(host.guest) in ([], ["tmemd"])


def test_four_vms_take_their_memory_back_at_once(
    session: Session, kernel: Kernel, fill: Path
) -> None:
    """Four VMs with 1.5 times the host's memory use all of it at once, and no process is ended.

    The host has available memory, the pool and swap for that, as docs/autosize.md requires. A fifth
    VM gets pages from the pool meanwhile, and the test prints how long that takes.
    """
    regrow, reader, vms = build_example("regrow"), build_example("reader"), 4
    each = MEMORY * 3 // 2 // vms // MIB
    # Without the arguments for pressure, the daemon has its defaults. The swap has a margin.
    swap_bytes = MEMORY * 3 // 2
    host = Host(
        session, kernel, fill, "", more=(regrow, reader), swap_bytes=swap_bytes, vms=vms + 1
    )
    jobs = [
        host.guest.start(f"exec regrow /run/vm{number}.sock {each} /run/go 2>&1", 600)
        for number in range(vms)
    ]
    until(lambda: all(job.stdout() for job in jobs), 120, "the VMs are connected")
    gets = host.guest.start(f"exec reader /run/vm{vms}.sock 2>&1", 600)
    until(lambda: gets.stdout().count(b"\n") >= 5, 120, "the fifth VM gets pages")
    quiet = gets.stdout().decode()
    full = host.pool()
    host.guest.sh("touch /run/go")

    def have_it() -> bool:
        assert not any(job.done() for job in jobs), [job.stdout().decode() for job in jobs]
        return all(job.stdout().count(b"\n") == 2 for job in jobs)

    until(have_it, 300, "the VMs have their memory")
    given = host.pool()
    busy = gets.stdout().decode()[len(quiet) :]
    print("gets before:", quiet, "gets meanwhile:", busy, sep="\n")
    print(*(job.stdout().decode() for job in jobs), full, given, sep="\n")
    assert not gets.done(), busy
    assert killed_processes(host.guest) == []
    assert given["held_bytes"] < full["held_bytes"] // 2
    # The rule holds, and would not hold without the pool's memory and swap.
    unused = vms * each * MIB
    assert full["host_available_bytes"] < unused
    assert unused <= sum(
        full[name] for name in ("host_available_bytes", "held_bytes", "host_swap_free_bytes")
    )


def killed_processes(guest: Guest) -> list[str]:
    """Returns the names of the processes that the kernel has ended because memory was used up."""
    names = re.findall(r"Out of memory: Killed process \d+ \((\S+)\)", guest.sh("dmesg"))
    count = int(guest.sh("awk '/^oom_kill / { print $2 }' /proc/vmstat"))
    assert count == len(names), (count, names)
    return names


@pytest.mark.parametrize("operations", [1, 0])
def test_daemon_serves_guests_when_aio_is_used_up(
    session: Session, kernel: Kernel, fill: Path, operations: int
) -> None:
    """The daemon needs one operation of the kernel's AIO, and uses io_uring if there is none."""
    host = Host(
        session, kernel, fill, "--host-free-min 0 --memory-pressure none", aio_operations=operations
    )
    assert int(host.guest.sh("cat /proc/sys/fs/aio-nr")) == operations
    # Without interrupts, the guest would not have filled the pool.
    assert host.pool()["payload_bytes"] >= FILLED * MIB
    log = host.daemon.stdout().decode()
    assert ("interrupts of guests use io_uring" in log) == (operations == 0), log
