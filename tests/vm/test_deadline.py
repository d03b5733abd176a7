# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Readers wait for a slow host within bounds: one deadline per bio, and a budget in total."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MAX_MS,
    DEADLINE_MS,
    PARAMETERS,
    PATIENT,
    Hold,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    growth,
    load,
    programs,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_state,
)
from liar import T_GET, Liar

from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import TESTS, guest_program
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

HOG = "/bin/hog"
SLACK = "/bin/slack"
# Allowance for delays of a busy machine in one wait; much less than the timer slack of a reader.
OWN_SECONDS = 1.0
SILENT_SECONDS = 1e9
PAGES = 32  # pages of one readahead
PART_PAGES = 128  # TMEM_FETCH_PAGES_MAX of the driver
# Time in which the host answers one part of a read, in deadlines: less than 3/4, so that the driver
# requests the second part, and more than 1/2, so that its answer is late.
PART_DEADLINES = 0.6
FILE = "/mnt/striped"
FILLER = "/mnt/filler"


def evict_in_steps(
    guest: Guest, path: str, size_mib: int, *, create: bool = True
) -> dict[str, int]:
    """Evicts all pages of a file, in steps that fit the put ring. Returns the driver's counters.

    Creates the file first unless `create` is false.
    """
    counters = {}
    if create:
        guest.sh(f"dd if=/dev/urandom of={path} bs=1M count={size_mib} 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    for part in range(size_mib):
        guest.sh(
            f"dd if={path} of=/dev/null bs=1M count=1 skip={part} 2>/dev/null;"
            " echo 1 >/proc/sys/vm/drop_caches"
        )
        counters = settle(guest)
    return counters


def test_parts_of_a_read_share_one_deadline(session: Session, kernel: Kernel, module: Path) -> None:
    """A bio that is larger than a fetch is filled in parts, which share the bio's deadline.

    The host answers the first part in time. The answer to the second part comes less than a
    deadline after its request, but after the deadline of the bio.
    """
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(
            session, kernel, module, Tmem(liar.path), parameters=f"verify_every=0 {PATIENT}"
        )
        guest.sh(f"echo {2 * PART_PAGES * 4} >/sys/block/vda/queue/read_ahead_kb")
        evict_in_steps(guest, FILE, 1)
        sums = checksums(guest, [FILE])
        evict_in_steps(guest, FILE, 1, create=False)
        # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages
        # in the ring without the host.
        evict_in_steps(guest, FILLER, 4)
        liar.delay_seconds = PART_DEADLINES * DEADLINE_MAX_MS / 1000
        before = stats(guest)
        guest.sh(f"dd if={FILE} of=/dev/null bs={2 * PART_PAGES * 4}k count=1")
        grown = growth(before, stats(guest))
        print(grown)
        assert grown["hits"] == PART_PAGES and grown["fetches_late"] == 1
        # The late requests may have more than half of the bounce pages, which opens the breaker.
        assert grown["misses_late"] + grown["misses_bounce"] == PART_PAGES
        assert grown["misses_late"] > 0 and grown["trips"] <= 1
        liar.delay_seconds = 0.0
        assert checksums(guest, [FILE]) == sums


def test_silent_host_delays_a_read_until_its_deadline(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A silent host delays a reader until the deadline only, even with a timer slack of 5 s."""
    deadline_ms, slack_ms, reads = 20, 5000, 3
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_guest(session, kernel, module, tmem, files=programs(SLACK))
    guest.sh(f"echo 4 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    evict_in_steps(guest, FILE, 4)
    # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages in
    # the ring without the host.
    evict_in_steps(guest, FILLER, 4)
    # The read ends at the interrupt of the driver's timer. The guest must have no other work that
    # causes an interrupt.
    guest.sh("echo 0 >/proc/sys/vm/compaction_proactiveness")
    wait_state(guest, "on")
    daemon.pause()
    set_parameter(guest, "deadline_ms", str(deadline_ms))
    waits = []
    for read in range(reads):
        before = stats(guest)
        command = f"dd if={FILE} of=/dev/null bs=4k count=1 skip={read * 256} 2>/dev/null"
        # All in one command of the guest, so that its agent does not count.
        times = guest.sh(
            f"cut -d' ' -f1 /proc/uptime; {SLACK} {slack_ms} {command}; cut -d' ' -f1 /proc/uptime",
            60,
        ).split()
        assert growth(before, stats(guest))["fetches_late"] == 1
        waits.append(float(times[1]) - float(times[0]))
    print(waits)
    # A busy machine may delay one of the reads.
    assert sorted(waits)[reads // 2] < deadline_ms / 1000 + scaled(OWN_SECONDS)
    daemon.resume()
    wait_state(guest, "on")


def test_stopped_vm_gets_pages_again_soon_after_it_continues(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A guest whose clock jumps by 30 s during a get uses the cache again within 2 s.

    The reader waits for an answer while QEMU is stopped by a signal. The guest's clock continues,
    as in a frozen control group or a suspended host. The answer comes while QEMU is stopped.
    """
    stop_seconds, soon_seconds, tries = 30.0, 2.0, 5
    with Liar(session.directory / "liar") as liar:
        vm = driver_vm(session, kernel, module, Tmem(liar.path))
        guest = vm.start()
        load(guest, f"verify_every=0 {PATIENT}")
        guest.sh(f"echo 4 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
        evict_in_steps(guest, FILE, 4)
        # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages
        # in the ring without the host.
        evict_in_steps(guest, FILLER, 4)
        for page in range(tries):
            before = stats(guest)
            liar.delay_seconds = SILENT_SECONDS
            begun = seconds_since_boot(guest)
            read = f"dd if={FILE} of=/dev/null bs=4k count=1 skip={page * 64} 2>/dev/null"
            reader = guest.start(read, 60 + stop_seconds)
            until(lambda: liar.waiting_requests() > 0, 30, "the device has a request of the reader")
            vm.process.pause()
            liar.delay_seconds = 0.0
            until(lambda: liar.waiting_requests() == 0, 30, "the device answers all requests")
            time.sleep(stop_seconds)
            vm.process.resume()
            reader.wait().check()
            grown = growth(before, stats(guest))
            # On a slow machine, the reader's deadline may pass before the process is stopped.
            if grown["late"] == 0:
                break
        passed = seconds_since_boot(guest) - begun
        assert passed > stop_seconds / 2, "the guest's clock did not jump"

        begun = seconds_since_boot(guest)
        before = stats(guest)
        until(lambda: state(guest) == "on", 300, "the driver uses the cache again")
        guest.sh(f"dd if={FILE} of=/dev/null bs=4k count=1 skip={tries * 64} 2>/dev/null")
        assert growth(before, stats(guest))["hits"] == 1
        assert seconds_since_boot(guest) - begun < scaled(soon_seconds)


@pytest.mark.parametrize("readahead_kib", [0, 64])
def test_slow_answers_within_the_deadline_open_the_breaker(
    session: Session, kernel: Kernel, module: Path, readahead_kib: int
) -> None:
    """Answers that are slow but never late open the breaker, too; only fast ones close it."""
    deadline_ms, slow_seconds = 500, 0.18
    # The breaker's bucket as in core/breaker.c: it holds slow waits of ten deadlines, and a
    # fiftieth of that leaks away during each deadline.
    budget_us, leak = deadline_ms * 1000 * 10, 10 / 50
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path))
        set_parameter(guest, "deadline_ms", str(deadline_ms))
        evict_in_steps(guest, FILE, 6)
        # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages
        # in the ring without the host.
        before = evict_in_steps(guest, FILLER, 4)
        assert before["index_pages"] > 4 * 256
        sums = {
            FILE: guest.sh(f"dd if={FILE} bs=1M iflag=direct 2>/dev/null | sha256sum").split()[0]
        }

        guest.sh(f"echo {readahead_kib} >/sys/block/vda/queue/read_ahead_kb")
        # A fast answer to a probe does not close the breaker at once. Otherwise slow answers could
        # use up the next budget immediately.
        liar.delay_seconds = slow_seconds
        liar.quick_probes = True
        begun = float(guest.read("/proc/uptime").split()[0])
        assert checksums(guest, [FILE]) == sums
        elapsed_us = (float(guest.read("/proc/uptime").split()[0]) - begun) * 1e6
        after = stats(guest)
        grown = growth(before, after)
        print(elapsed_us, grown)
        assert grown["trips"] > 0
        assert grown["late"] < 3, (
            "too many answers were late, so slow answers alone did not open the breaker"
        )
        assert grown["misses_tripped"] > 0
        assert grown["slow"] * slow_seconds * 1e6 <= grown["waits_us"]
        assert budget_us <= grown["waits_us"]
        # Fetches of a readahead wait at the same time, which the bucket counts once.
        waited_us = min(grown["waits_us"], elapsed_us)
        assert waited_us <= budget_us + elapsed_us * leak + 2 * deadline_ms * 1000
        assert after["wait_max_us"] >= slow_seconds * 1e6

        # A probe whose answer is slow leaves the breaker open.
        liar.quick_probes = False
        assert state(guest) == "tripped"
        seen = liar.gets
        until(lambda: liar.gets >= seen + 2, 30, "the driver sends two probes")
        assert state(guest) == "tripped"
        liar.delay_seconds = 0.0
        wait_state(guest, "on")
        after = evict_in_steps(guest, FILE, 6, create=False)
        assert checksums(guest, [FILE]) == sums
        assert stats(guest)["requests_get"] > after["requests_get"]


def seconds_since_boot(guest: Guest) -> float:
    return float(guest.read("/proc/uptime").split()[0])


def wait_for_guest(guest: Guest, seconds: float) -> None:
    """Waits until the guest's clock has advanced by this time."""
    end = seconds_since_boot(guest) + seconds
    until(lambda: seconds_since_boot(guest) >= end, 60, f"{seconds} s have passed in the guest")


def test_reader_sends_no_request_after_its_deadline(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A reader that runs only after its deadline reads the disk, and the host counts as not late.

    The entries of the pages stay in the index.
    """
    daemon = start_daemon(session)
    guest = driver_guest(session, kernel, test_module, Tmem(daemon.socket("vm1")))
    guest.sh("echo 128 >/sys/block/vda/queue/read_ahead_kb")
    guest.sh(f"dd if=/dev/urandom of={FILE} bs=4096 count={PAGES}; sync")
    sums = checksums(guest, [FILE])
    before = evict(guest, [FILE])
    hold = Hold(guest, "fill")
    reader = guest.start(f"dd if={FILE} of=/dev/null bs=128k count=1", 60)
    hold.wait()
    wait_for_guest(guest, 2 * DEADLINE_MS / 1000)
    hold.release()
    reader.wait().check()
    after = stats(guest)
    grown = growth(before, after)
    assert grown["misses_late"] == PAGES
    assert grown["late"] == grown["requests_get"] == grown["hits"] == grown["trips"] == 0
    assert grown["fetches"] == 0 and grown["fetches_disk"] == 1
    assert after["index_pages"] == before["index_pages"]
    assert checksums(guest, [FILE]) == sums


def test_probe_that_is_answered_late_leaves_the_breaker_open(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A late answer to a probe does not close the breaker, even if the probe has waited for it."""
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, test_module, Tmem(liar.path))
        evict_in_steps(guest, FILE, 4)
        # The pages of the filler replace those of FILE in the put ring, from where the driver would
        # read them without the host.
        evict_in_steps(guest, FILLER, 4)
        # The device answers control requests. The driver sends no probe to a silent device.
        wait_state(guest, "on")
        liar.silent = frozenset({T_GET})
        # Three late gets of single pages open the breaker. They leave enough bounce pages for
        # probes.
        guest.sh("echo 0 >/sys/block/vda/queue/read_ahead_kb")
        guest.sh(f"dd if={FILE} of=/dev/null bs=4096 count=4", 60)
        assert state(guest) == "tripped"
        probe = Hold(guest, "probe")
        probe.wait()
        # The device answers the probe after its deadline, and only then does the probe continue.
        wait_for_guest(guest, DEADLINE_MS / 1000)
        liar.silent = frozenset()
        wait_for_guest(guest, DEADLINE_MS / 1000)
        # The next probe waits, too. There is one only if the breaker is still open.
        again = f"{PARAMETERS}/{probe.name}"
        guest.sh(f"echo 0 >{again}; sleep 0.1; echo 1 >{again}")
        probe.wait()
        assert state(guest) == "tripped"
        probe.release()
        wait_state(guest, "on")


def test_reader_that_is_scheduled_late_does_not_open_the_breaker(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Time that a reader waits for the guest's processor is no time that it waits for the host.

    A real-time task uses the only processor most of the time. A reader whose answer comes meanwhile
    continues only when that task sleeps.
    """
    deadline_ms, busy_ms, idle_ms = 400, 300, 30
    budget_seconds = deadline_ms / 1000 * 10  # of slow calls, before the breaker opens
    files = {HOG: guest_program(TESTS / "guest/hog.c")}
    guest = driver_guest(session, kernel, module, files=files)
    set_parameter(guest, "deadline_ms", str(deadline_ms))
    guest.sh("echo 4 >/sys/block/vda/queue/read_ahead_kb")
    evict_in_steps(guest, FILE, 12)
    # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages in
    # the ring without the host.
    before = evict_in_steps(guest, FILLER, 4)
    assert before["index_pages"] > 12 * 256
    guest.start(f"{HOG} {busy_ms} {idle_ms}", scaled(120))
    grown: dict[str, int] = {}
    waited = 0.0
    pages, passes = 100, 8
    # On a fast machine, the reader gets more pages while the real-time task sleeps.
    for part in itertools.chain(*[range(12 * 256 // pages)] * passes):
        if part == 0 and grown:
            evict_in_steps(guest, FILE, 12, create=False)
            evict_in_steps(guest, FILLER, 4, create=False)
        begun = seconds_since_boot(guest)
        guest.sh(f"dd if={FILE} of=/dev/null bs=4k count={pages} skip={part * pages}", scaled(60))
        waited += seconds_since_boot(guest) - begun
        grown = growth(before, stats(guest))
        if waited > 2 * budget_seconds:
            break
    print(waited, grown)
    assert waited > 2 * budget_seconds, "the real-time task delayed too few readers"
    assert grown["trips"] == grown["misses_tripped"] == 0
    assert grown["hits"] > pages
