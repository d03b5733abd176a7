# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Four VMs with 1.5 times the host's memory take back what they have returned, at once.

The host is a control group of this machine. Its limit is the host's RAM, and its part of a swap
area is the host's swap. tmemd reads the group's memory as that of the host: a file with the values
of the group hides /proc/meminfo, as in a container.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import WHERE, checksums, driver_vm, load, programs, settle
from test_guest_command import COMMAND, command
from test_reporting import BALLOON, allocated_bytes

from bench.vm.host_bytes import MemoryGroup
from harness import disk
from harness.daemon import Daemon
from harness.guest import Guest, Job
from harness.kernel import Kernel
from harness.paths import host_binary, qemu_binary
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

ZRAM = Path("/sys/class/zram-control")
VMS, RAM_BYTES = 4, 256 * MIB
# RAM of the host for guests and the pool. The programs' own memory is added to it.
HOST_BYTES = VMS * RAM_BYTES * 2 // 3
FREE_MIN_BYTES = 16 * MIB
FILE, FILE_MIB = f"{WHERE}/file", 52
FLOOR_MIB = 8
# Memory that QEMU and the kernel take for pages that a guest uses: tables and translated code.
EXTRA_BYTES = 48 * MIB
CODE_BYTES = 32 * MIB
SWAP_BYTES = 1024 * MIB  # the group can use a part of it only
USE = "/bin/anon"
LEFT_MIB = 12  # memory that a guest leaves when it uses all that is available
NOISE_PERCENT = 10  # pages that the swap area can compress
RETURN_SECONDS = 60.0
USE_SECONDS = 300.0

# Keeps a swap area until stdin ends, also if the test is killed.
SWAP = f"""
set -e
number=$(cat {ZRAM}/hot_add)
device=/dev/zram$number
trap 'swapoff $device || true; echo $number >{ZRAM}/hot_remove' EXIT
echo {SWAP_BYTES} >/sys/block/zram$number/disksize
mkswap $device >/dev/null
swapon $device
echo ready
cat >/dev/null
"""


def why_not() -> str | None:
    """Returns the reason why these tests cannot run here, or None."""
    if os.geteuid() != 0:
        return "control groups and swap areas need root"
    if not ZRAM.exists():
        return "the kernel has no zram: modprobe zram"
    try:
        group = MemoryGroup("tmem-probe")
    except OSError as error:
        return f"no control group can be created: {error}"
    try:
        group.limit(64 * MIB, 64 * MIB)
    except OSError as error:
        return f"the memory of a control group cannot be limited: {error}"
    finally:
        group.remove()
    return None


class Host:
    """A control group that acts as a host, and the file that describes its memory to tmemd."""

    def __init__(self, directory: Path) -> None:
        self.group = MemoryGroup("tmem-host")
        self.limit_bytes = 1 << 40
        self.swap_bytes = 0
        self.meminfo = directory / "meminfo"
        self._directory = directory
        self._end = threading.Event()
        self._write()
        self._writer = threading.Thread(target=self._follow)
        self._writer.start()

    def _follow(self) -> None:
        while not self._end.wait(0.01):
            self._write()

    def _write(self) -> None:
        """Writes the file in one step and always with the same size: tmemd may read it now."""
        values = {
            "MemTotal": self.limit_bytes,
            "MemAvailable": self.available(),
            "SwapFree": self.swap_free(),
        }
        text = "".join(f"{name}: {count // 1024:16} kB\n" for name, count in values.items())
        with self.meminfo.open("r+b" if self.meminfo.exists() else "wb") as file:
            file.write(text.encode())

    def available(self) -> int:
        """Returns the memory that processes can still take. Page cache gives way to them."""
        used = self.group.charged_bytes() - self.group.cached_bytes()
        return max(0, self.limit_bytes - used)

    def swap_free(self) -> int:
        return max(0, self.swap_bytes - self.group.swapped_bytes())

    def limit(self, count_bytes: int, swap_bytes: int) -> None:
        self.group.limit(count_bytes, swap_bytes)
        self.limit_bytes, self.swap_bytes = count_bytes, swap_bytes

    def make_program(self, path: Path, before: str = "", around: str = "") -> Path:
        """Returns a script that runs a program in the control group."""
        out = self._directory / path.name
        join = "".join(f"echo $$ >{file}\n" for file in sorted(self.group.process_files()))
        out.write_text(f'#!/bin/sh\nset -e\n{join}{before}\nexec {around} {path} "$@"\n')
        out.chmod(0o755)
        return out

    def make_qemu(self) -> Path:
        return self.make_program(qemu_binary())

    def make_tmemd(self) -> Path:
        """Returns a tmemd that reads the group's memory. Its unit has the same OOM score."""
        hide = f"mount --bind {self.meminfo} /proc/meminfo"
        around = f'unshare --mount sh -ec \'{hide}; exec "$0" "$@"\''
        return self.make_program(host_binary("tmemd"), "echo 900 >/proc/self/oom_score_adj", around)

    def close(self) -> None:
        self._end.set()
        self._writer.join()
        self.group.remove()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Yields a host with a swap area. The host ends after the session of the test."""
    if reason := why_not():
        pytest.skip(reason)
    area = subprocess.Popen(
        ["sh", "-c", SWAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert area.stdin and area.stdout
    host = None
    try:
        assert area.stdout.readline() == "ready\n"
        host = Host(tmp_path)
        yield host
    finally:
        if host:
            host.close()
        area.stdin.close()
        assert area.wait(scaled(60)) == 0


def boot(
    session: Session, kernel: Kernel, module: Path, host: Host, options: list[str]
) -> tuple[Daemon, list[Vm], list[str]]:
    """Boots the VMs, which move the pages of their files to the pool and return the memory.

    Returns the daemon, the VMs, and the checksums of their files.
    """
    names = [f"vm{number}" for number in range(VMS)]
    daemon = session.daemon(*names, pool_size="256MiB", options=options)
    daemon.program = host.make_tmemd()
    daemon.start()
    vms, sums = [], []
    for name in names:
        tree = session.directory / f"tree-{name}"
        tree.mkdir()
        content = os.urandom(FILE_MIB * MIB)
        (tree / "file").write_bytes(content)
        sums.append(hashlib.sha256(content).hexdigest())
        image = disk.ext4(session.directory / f"{name}.img", (FILE_MIB + 24) * MIB, tree)
        vm = driver_vm(
            session,
            kernel,
            module,
            Tmem(daemon.socket(name)),
            name=name,
            qemu=host.make_qemu(),
            memory_bytes=RAM_BYTES,
            tcg_buffer_bytes=CODE_BYTES,
            disks=[disk.Disk("data", image)],
            arguments=BALLOON,
            modules=["virtio_balloon"],
            files={**command(), **programs(USE)},
        )
        vm.prepare()
        vms.append(vm)
    for vm in vms:
        vm.launch()
    for vm in vms:
        guest = vm.connect()
        load(guest, "verify_every=0")
        guest.sh("mkdir -p /run /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup")
    for vm in vms:
        once = f"{COMMAND} autosize --once={FILE_MIB}M --floor={FLOOR_MIB}M"
        vm.guest.sh(f"cat {FILE} >/dev/null; {once}", 120)
        settle(vm.guest)
    return daemon, vms, sums


def pool_bytes(daemon: Daemon) -> int:
    """Returns the memory that the pool uses."""
    return int(daemon.stats()["pool"]["held_bytes"])


def usable_mib(guest: Guest) -> int:
    """Returns the mebibytes that a process of a guest uses, nearly all that are available."""
    kib = int(guest.sh("awk '/^MemAvailable:/ { print $2 }' /proc/meminfo"))
    return kib // 1024 - LEFT_MIB


def use_everything(daemon: Daemon, vms: list[Vm], host: Host) -> tuple[int, list[Job]]:
    """Gives the host its limits, and lets all guests use their memory at once.

    Returns the memory that the pool had before, and the programs in the guests.
    """

    def resident() -> int:
        return sum(allocated_bytes(vm) for vm in vms)

    pool = pool_bytes(daemon)
    most = HOST_BYTES - pool - 2 * FREE_MIN_BYTES
    until(lambda: resident() <= most, RETURN_SECONDS, "the VMs return memory")
    unused = VMS * RAM_BYTES - resident()
    own = host.group.charged_bytes() - host.group.cached_bytes() - resident() - pool
    host.limit(HOST_BYTES + own, VMS * RAM_BYTES - HOST_BYTES + EXTRA_BYTES)
    free, swap = host.available(), host.swap_free()
    sizes = [usable_mib(vm.guest) for vm in vms]
    print(f"MiB: programs {own // MIB}, pool {pool // MIB}, unused {unused // MIB}")
    print(f"MiB: available {free // MIB}, swap {swap // MIB}, the guests use {sizes}")
    # The rule of docs/autosize.md holds, and would not hold without the pool's memory.
    assert unused <= free + pool + swap
    assert sum(sizes) * MIB > free + swap
    jobs = [
        vm.guest.start(f"{USE} {size} {NOISE_PERCENT} 4 {number} hold", USE_SECONDS)
        for number, (vm, size) in enumerate(zip(vms, sizes, strict=True))
    ]
    return pool, jobs


def test_vms_take_their_memory_back_at_once(
    host: Host, session: Session, kernel: Kernel, module: Path
) -> None:
    """The host has memory, swap and the pool for what the VMs use, and no process is killed."""
    options = ["--host-free-min", f"{FREE_MIN_BYTES}B", "--memory-pressure", "none"]
    daemon, vms, sums = boot(session, kernel, module, host, options)
    pool, jobs = use_everything(daemon, vms, host)

    def checked() -> bool:
        assert not any(job.done() for job in jobs), [job.stdout() for job in jobs]
        return all(b"fault" in job.stdout() for job in jobs)

    until(checked, USE_SECONDS, "the guests use their memory")
    seconds = [job.stdout().split()[2].decode() for job in jobs]
    print(f"s: {seconds}")
    left, swapped = pool_bytes(daemon), host.group.swapped_bytes()
    print(f"MiB: pool {left // MIB}, swapped {swapped // MIB}")
    assert left < pool // 2
    for vm, job, right in zip(vms, jobs, sums, strict=True):
        assert vm.status() == "running"
        job.kill()
        job.wait()
        assert checksums(vm.guest, [FILE]) == {FILE: right}
    assert host.group.oom_kills() == 0 and daemon.process.is_alive()


def test_kernel_kills_a_process_if_the_pool_keeps_its_memory(
    host: Host, session: Session, kernel: Kernel, module: Path
) -> None:
    """Without the pool's memory, the host cannot give the VMs theirs.

    The kernel kills the daemon first. It may then also kill a VM, because it does not wait until
    the daemon's memory is free.
    """
    daemon, vms, _ = boot(session, kernel, module, host, [])
    use_everything(daemon, vms, host)
    until(host.group.oom_kills, USE_SECONDS, "the kernel kills a process")
    until(lambda: not daemon.process.is_alive(), 20, "the kernel kills the daemon")
