# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests native guests, with which the benchmarks measure: user-mode Linux with the driver built in.

The kernel has no ftrace, kprobes and modules, and calls the driver's hooks itself. test_intree.py
tests these hooks one by one, and test_torture.py the checks of the driver.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from driver import (
    DISK_BYTES,
    PATIENT,
    TORTURE,
    WHERE,
    Torture,
    seed,
    settle,
    start_daemon,
    stats,
    wait_served,
    wait_state,
)
from test_swap import FREED_SECONDS, MARKED_MIB, PAGE, SWAPPER, Swap
from test_torture import SMALL

from bench.vm.machine import BENCH, DATA, Machine
from bench.vm.native import parse_latency, percentile
from harness import disk, storage
from harness.daemon import Daemon
from harness.guest import Guest, Job
from harness.machine import pinning
from harness.native import NativeConfig, NativeVm
from harness.paths import TESTS, HarnessError, guest_program
from harness.session import Session
from harness.vm import MIB
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("host_programs")

OPERATIONS = 100_000
MOUNT = "--device=/dev/vda --fstype=ext4"


def create_native_vm(
    session: Session,
    *,
    throttle: disk.Throttle | None = None,
    direct: bool = True,
    daemon: Daemon | None = None,
) -> NativeVm:
    """Creates a guest with an empty disk "data", and a device that `daemon` or a new one serves."""
    image = disk.ext4(session.directory / "data.img", DISK_BYTES)
    daemon = daemon or start_daemon(session)
    return session.native_vm(
        NativeConfig(
            disks=[disk.Disk("data", image, throttle=throttle)],
            tmem=daemon.socket("vm1"),
            files={TORTURE: guest_program(TESTS / "guest/torture.c")},
            parameters="verify_every=0",
            direct=direct,
        )
    )


def boot_native_guest(session: Session) -> Guest:
    """Boots a guest, mounts its disk and waits until the driver caches files."""
    guest = create_native_vm(session).start()
    guest.mount("data", WHERE)
    wait_state(guest, "on")
    wait_served(guest)
    return guest


def test_random_operations_find_no_wrong_byte(session: Session) -> None:
    """Random operations, evictions and unmounts cause no wrong byte, and the cache has hits."""
    guest = boot_native_guest(session)
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4 {MOUNT}"
    Torture(guest, arguments, 600).finish()
    counters = stats(guest)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["mismatches"] == 0
    for why in ("block", "unmount"):
        assert counters[f"invalidations_{why}"] > 0, f"no page was erased for the reason '{why}'"
    wait_state(guest, "on")


def test_memory_written_by_the_kernel_survives_swapping(session: Session) -> None:
    """Memory that the kernel writes keeps its content when it is swapped out and in.

    User-mode Linux has a fault here, which a patch of tests/native-kernel/patches corrects.
    """
    guest = boot_native_guest(session)
    Torture(guest, "--scenario=swapped_buffer").finish()


def is_marked(job: Job) -> bool:
    return b"marked" in job.stdout()


def test_only_freed_slots_leave_the_host(session: Session) -> None:
    """The built-in driver erases the slots of a process that ends, and no others."""
    vm = session.native_vm(
        NativeConfig(
            disks=[disk.Disk("swap", disk.blank(session.directory / "swap.img", DISK_BYTES))],
            tmem=start_daemon(session).socket("vm1"),
            files={SWAPPER: guest_program(TESTS / "guest/swapper.c")},
            parameters="swap=1 verify_every=0",
        )
    )
    guest = vm.start()
    swap = Swap(guest)
    swap.serve()
    pids = []
    for text in ("ends", "stays"):
        job = guest.start(f"{SWAPPER} mark {text} {MARKED_MIB}", 600)
        until(partial(is_marked, job), 60, "the pages are swapped out")
        pids.append(int(guest.sh("pidof swapper").split()[0]))
    # Reclaim drops the pages of both from the swap cache.
    guest.sh(f"{SWAPPER} {seed()} {vm.config.memory_bytes // MIB + 100} 10", 300)
    settle(guest)
    pages = MARKED_MIB * MIB // PAGE
    time.sleep(scaled(FREED_SECONDS))
    held = swap.count("held_pages")
    assert held > 2 * pages * 3 // 4, f"{held} of {2 * pages} pages: {stats(guest)}"
    guest.sh(f"kill -9 {pids[0]}")
    time.sleep(scaled(FREED_SECONDS))
    left = swap.count("held_pages")
    assert pages * 3 // 4 < left < pages * 5 // 4, f"{left} of {held}: {stats(guest)}"


def run_on(processor: int, pid: int) -> None:
    """Binds the threads of a process and its children to a processor."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {processor})
        for child in (thread / "children").read_text().split():
            run_on(processor, int(child))


def processors_of(pid: int) -> set[int]:
    """Returns the processors on which the threads of a process and its children may run."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found |= os.sched_getaffinity(int(thread.name))
        for child in (thread / "children").read_text().split():
            found |= processors_of(int(child))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_benchmarks_run_guests_on_one_processor_and_the_host_on_another() -> None:
    usable = os.sched_getaffinity(0)
    chosen = pinning()
    with Session(pinning=chosen) as session:
        daemon = start_daemon(session)
        vm = create_native_vm(session, daemon=daemon)
        guest = vm.start()
        guest.start("sleep 100", 120)
        assert processors_of(vm.process.pid) == {chosen.guests}
        assert processors_of(daemon.process.pid) == {chosen.host}
        assert processors_of(vm.exports[0].process.pid) == {chosen.host}
    assert chosen.guests != chosen.host
    assert os.sched_getaffinity(0) == usable


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_delayed_wake_up_loses_no_interrupt(session: Session) -> None:
    image = disk.blank(session.directory / "data.img", 4 * MIB)
    vm = session.native_vm(NativeConfig(disks=[disk.Disk("data", image)]))
    guest = vm.start()
    first, second, *_ = sorted(os.sched_getaffinity(0))
    run_on(first, vm.exports[0].process.pid)
    run_on(second, vm.process.pid)
    command = [sys.executable, str(TESTS / "vm/slow_waiters.py"), str(vm.process.pid)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as waiters:
        assert waiters.stdout
        assert waiters.stdout.readline() == "ready\n"
        reads = guest.start("dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct", 120)
        # If an interrupt is lost, a message to the guest would wake the guest. So send none, and
        # only wait for the output of the command.
        until(reads.done, 60, "the guest has read its disk")
        waiters.communicate()
    reads.wait().check()


def test_throttled_disk_bypasses_the_page_cache_of_the_host(session: Session) -> None:
    """Reads of a throttled disk take as long as its limits require, also of the same data again."""
    vm = create_native_vm(session, throttle=disk.CLOUD_VOLUME)
    guest = vm.start()
    size = 64 * MIB
    guest.sh(f"dd if=/dev/zero of=/dev/vda bs=1M count={size // MIB} 2>/dev/null", 60)
    for _ in range(2):
        guest.drop_caches()
        began = time.monotonic()
        guest.sh(f"dd if=/dev/vda of=/dev/null bs=1M count={size // MIB} 2>/dev/null", 60)
        took = time.monotonic() - began
        # The throttle does not delay a burst of a tenth of a second.
        assert took > 0.8 * size / disk.CLOUD_VOLUME.bytes_per_second - 0.1, took
        vm.exports[0].check_cache()


def test_disk_in_the_page_cache_of_the_host_is_reported(session: Session) -> None:
    """check_cache() raises for a disk whose image is in the host's page cache."""
    vm = create_native_vm(session, direct=False)
    guest = vm.start()
    guest.sh("dd if=/dev/vda of=/dev/null bs=1M count=16 2>/dev/null", 60)
    assert storage.cached_bytes(vm.exports[0].disk.path) >= 16 * MIB
    with pytest.raises(HarnessError, match="page cache has"):
        vm.exports[0].check_cache()


def test_disk_image_is_dropped_from_the_page_cache_of_the_host(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(8 * MIB))
    assert storage.cached_bytes(path) > 0
    storage.forget_cached(path)
    assert storage.cached_bytes(path) == 0


def test_benchmark_measures_gets_and_puts(session: Session) -> None:
    """The guest program of the benchmark gets evicted blocks from the pool, and measures puts."""
    daemon = start_daemon(session)
    tree = session.directory / "tree"
    tree.mkdir()
    for name in ("blocks", "cached"):
        (tree / name).write_bytes(random.Random(name).randbytes(4 * MIB))
    image = disk.ext4(session.directory / "data.img", 64 * MIB, tree)
    vm = session.native_vm(
        NativeConfig(
            disks=[disk.Disk("data", image)],
            tmem=daemon.socket("vm1"),
            files={BENCH: guest_program(TESTS / "guest/bench.c")},
            parameters=PATIENT,
        )
    )
    vm.start()
    machine = Machine(vm, cached=True)
    machine.guest.mount("data", DATA)
    wait_state(machine.guest, "on")

    def evict(name: str) -> int:
        return int(machine.guest.sh(f"{BENCH} evict {DATA}/{name}", 60))

    def served() -> bool:
        return evict("cached") > 0 and machine.stat("puts") > 0

    until(served, 60, "the driver serves the mount")
    assert evict("blocks") == 1024
    evict("cached")
    before = machine.counters()
    arguments = f"{DATA}/blocks 500 4096 1 {DATA}/cached 100"
    text = machine.guest.sh(f"{BENCH} latency {arguments}", 60)
    samples = parse_latency(text)
    counts = {kind: len(ticks) for kind, ticks in samples.items()}
    assert counts == {"get": 500, "cached": 500, "empty": 500, "disk": 5}
    assert machine.counters(before)["hits"] >= 500
    middle = {kind: percentile(ticks, 0.5) for kind, ticks in samples.items()}
    assert 0 < middle["empty"] < middle["cached"] < middle["get"], middle
    ticks = machine.run_micro_benchmarks(1, lambda _: None)
    assert 0 < ticks["copy"] < ticks["put"], ticks
    assert ticks["copy"] < ticks["put_cold"] and ticks["put_off"] < ticks["put_cold"], ticks
