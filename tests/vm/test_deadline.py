# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Readers wait for a slow host within bounds: one deadline per readahead, and a budget in total."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from driver import (
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
    version,
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

NOWAIT = "/bin/nowait"
HOG = "/bin/hog"
SLACK = "/bin/slack"
# Allowance for delays of a busy machine in one wait; much less than the timer slack of a reader.
OWN_SECONDS = 1.0
SILENT_SECONDS = 1e9
PAGES = 32  # pages of one readahead
FILE = "/mnt/striped"
FILLER = "/mnt/filler"


def hold(guest: Guest, path: str, size_mib: int, *, create: bool = True) -> dict[str, int]:
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


@pytest.mark.smoke
def test_requests_of_a_readahead_share_one_deadline(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """All gets of one readahead share one deadline.

    The host has every second page of the file, so that one readahead needs many requests.
    """
    daemon = start_daemon(session)
    guest = driver_guest(session, kernel, test_module, Tmem(daemon.socket("vm1")))
    guest.sh("echo 128 >/sys/block/vda/queue/read_ahead_kb")
    guest.sh(f"dd if=/dev/urandom of={FILE} bs=4096 count={PAGES}; sync")
    sums = checksums(guest, [FILE])
    assert evict(guest, [FILE])["index_pages"] >= PAGES
    # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages in
    # the ring without the host.
    held = hold(guest, FILLER, 4)["index_pages"]

    # Write every second page. A page that becomes dirty is erased from the driver's index. The
    # injected fault "ring full" then makes the driver drop the puts of these pages.
    guest.sh(f"dd if={FILE} of=/tmp/copy bs=4096 iflag=direct")
    for page in range(0, PAGES, 2):
        where = f"bs=4096 count=1 skip={page} seek={page}"
        guest.sh(f"dd if=/tmp/copy of={FILE} conv=notrunc {where}")
    set_parameter(guest, "inject_ring_full", "1")
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches")
    set_parameter(guest, "inject_ring_full", "0")
    before = settle(guest)
    assert before["index_pages"] == held - PAGES // 2

    daemon.pause()
    guest.sh(f"dd if={FILE} of=/dev/null bs=128k count=1")
    after = stats(guest)
    assert after["late"] - before["late"] == 1
    assert after["misses_late"] - before["misses_late"] == PAGES // 2
    assert after["trips"] == before["trips"]
    assert checksums(guest, [FILE]) == sums
    daemon.resume()
    wait_state(guest, "on")


def test_timer_slack_of_a_reader_does_not_extend_its_deadline(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A reader with a timer slack of 5 s waits for a silent host until the deadline only."""
    deadline_ms, slack_ms, reads = 20, 5000, 3
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_guest(session, kernel, module, tmem, files=programs(SLACK))
    guest.sh(f"echo 4 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    hold(guest, FILE, 4)
    # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages in
    # the ring without the host.
    hold(guest, FILLER, 4)
    # A reader that sleeps continues at the next interrupt of the timer after its deadline. The
    # guest must have no other work that causes one.
    guest.sh("echo 0 >/proc/sys/vm/compaction_proactiveness")
    daemon.pause()
    set_parameter(guest, "deadline_ms", str(deadline_ms))
    waits_ms = []
    for read in range(reads):
        before = stats(guest)
        command = f"dd if={FILE} of=/dev/null bs=4k count=1 skip={read * 256}"
        guest.sh(f"{SLACK} {slack_ms} {command}", 60)
        grown = growth(before, stats(guest))
        assert grown["late"] == 1
        waits_ms.append(grown["waits_us"] / 1000)
    print(waits_ms)
    # A busy machine may delay one of the reads.
    assert sorted(waits_ms)[reads // 2] < deadline_ms + scaled(OWN_SECONDS) * 1000
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
        hold(guest, FILE, 4)
        # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages
        # in the ring without the host.
        hold(guest, FILLER, 4)
        for page in range(tries):
            before = stats(guest)
            liar.delay_seconds = SILENT_SECONDS
            read = f"dd if={FILE} of=/dev/null bs=4k count=1 skip={page * 64} 2>/dev/null"
            reader = guest.start(read, 60 + stop_seconds)
            until(lambda: liar.waiting() > 0, 30, "the device has a request of the reader")
            vm.process.pause()
            liar.delay_seconds = 0.0
            until(lambda: liar.waiting() == 0, 30, "the device answers all requests")
            time.sleep(stop_seconds)
            vm.process.resume()
            reader.wait().check()
            grown = growth(before, stats(guest))
            # On a slow machine, the reader's deadline may pass before the process is stopped.
            if grown["late"] == 0:
                break
        assert grown["waits_us"] > stop_seconds * 1e6 / 2, "the guest's clock did not jump"

        begun = seconds_since_boot(guest)
        before = stats(guest)
        until(lambda: state(guest) == "on", 300, "the driver uses the cache again")
        guest.sh(f"dd if={FILE} of=/dev/null bs=4k count=1 skip={tries * 64} 2>/dev/null")
        assert growth(before, stats(guest))["hits"] == 1
        assert seconds_since_boot(guest) - begun < scaled(soon_seconds)


def test_nowait_readers_do_not_wait_for_the_host(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Readers that must not sleep do not wait for the host, even if it would answer in time."""
    if version(kernel) < (6, 12):
        pytest.skip("Linux before 6.12 does not mark reads that must not sleep")
    pages = 1024
    with Liar(session.directory / "liar") as liar:
        files = {NOWAIT: guest_program(TESTS / "guest/nowait.c")}
        guest = driver_guest(session, kernel, module, Tmem(liar.path), files=files)
        held = hold(guest, FILE, pages // 256)["index_pages"]
        # Evict FILLER, which is larger than the put ring, so that the pages of FILE leave the ring.
        before = hold(guest, FILLER, 4)
        assert before["index_pages"] > held + pages * 9 // 10

        liar.delay_seconds = DEADLINE_MS / 1000 / 2
        gets = liar.gets
        print(guest.sh(f"{NOWAIT} {FILE} 64"))
        after = stats(guest)
        assert after["reads_nowait"] - before["reads_nowait"] >= pages // 64
        assert after["gets"] == before["gets"]
        assert liar.gets == gets
        # Readers that may sleep wait for the host. They get the pages that the program `nowait` did
        # not request.
        liar.delay_seconds = 0.0
        guest.sh(f"cat {FILE} >/dev/null")
        assert stats(guest)["hits"] > after["hits"] + pages // 2


def test_slow_answers_within_the_deadline_open_the_breaker(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Answers that are slow but never late open the breaker, too; only fast ones close it."""
    deadline_ms, slow_seconds = 500, 0.18
    # The breaker's bucket as in core/breaker.c: it holds slow waits of ten deadlines, and a
    # fiftieth of that leaks away during each deadline.
    budget_us, leak = deadline_ms * 1000 * 10, 10 / 50
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path))
        set_parameter(guest, "deadline_ms", str(deadline_ms))
        guest.sh("echo 64 >/sys/block/vda/queue/read_ahead_kb")
        hold(guest, FILE, 6)
        # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages
        # in the ring without the host.
        before = hold(guest, FILLER, 4)
        assert before["index_pages"] > 4 * 256
        sums = {
            FILE: guest.sh(f"dd if={FILE} bs=1M iflag=direct 2>/dev/null | sha256sum").split()[0]
        }

        # A fast answer to a probe does not close the breaker at once. Otherwise slow answers could
        # use up the next budget immediately.
        liar.delay_seconds = slow_seconds
        liar.quick_probes = True
        begun = float(guest.read("/proc/uptime").split()[0])
        assert checksums(guest, [FILE]) == sums
        elapsed_us = (float(guest.read("/proc/uptime").split()[0]) - begun) * 1e6
        after = stats(guest)
        grown = growth(before, after)
        assert grown["trips"] > 0
        assert grown["late"] < 3, (
            "too many answers were late, so slow answers alone did not open the breaker"
        )
        assert grown["misses_tripped"] > 0
        assert grown["slow"] * slow_seconds * 1e6 <= grown["waits_us"]
        assert budget_us <= grown["waits_us"]
        assert grown["waits_us"] <= budget_us + elapsed_us * leak + 2 * deadline_ms * 1000
        assert after["wait_max_us"] >= slow_seconds * 1e6

        # A probe whose answer is slow leaves the breaker open.
        liar.quick_probes = False
        assert state(guest) == "tripped"
        seen = liar.gets
        until(lambda: liar.gets >= seen + 2, 30, "the driver sends two probes")
        assert state(guest) == "tripped"
        liar.delay_seconds = 0.0
        wait_state(guest, "on")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        after = settle(guest)
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
    hold = Hold(guest, "get")
    reader = guest.start(f"dd if={FILE} of=/dev/null bs=128k count=1", 60)
    hold.wait()
    wait_for_guest(guest, 2 * DEADLINE_MS / 1000)
    hold.release()
    reader.wait().check()
    after = stats(guest)
    grown = growth(before, after)
    assert grown["misses_late"] == PAGES
    assert grown["late"] == grown["requests_get"] == grown["hits"] == grown["trips"] == 0
    assert after["index_pages"] == before["index_pages"]
    assert checksums(guest, [FILE]) == sums


def test_probe_that_is_answered_late_leaves_the_breaker_open(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A late answer to a probe does not close the breaker, even if the probe has waited for it."""
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, test_module, Tmem(liar.path))
        hold(guest, FILE, 4)
        # The pages of the filler replace those of FILE in the put ring, from where the driver would
        # read them without the host.
        hold(guest, FILLER, 4)
        # The device answers control requests. The driver sends no probe to a silent device.
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
    budget_us = deadline_ms * 1000 * 10  # of slow calls, before the breaker opens
    files = {HOG: guest_program(TESTS / "guest/hog.c")}
    guest = driver_guest(session, kernel, module, files=files)
    set_parameter(guest, "deadline_ms", str(deadline_ms))
    guest.sh("echo 4 >/sys/block/vda/queue/read_ahead_kb")
    hold(guest, FILE, 12)
    # Evict FILLER: its pages replace those of FILE in the put ring. The driver would read pages in
    # the ring without the host.
    before = hold(guest, FILLER, 4)
    assert before["index_pages"] > 12 * 256
    guest.start(f"{HOG} {busy_ms} {idle_ms}", scaled(120))
    grown: dict[str, int] = {}
    pages, passes = 100, 8
    # On a fast machine, the reader gets more pages while the real-time task sleeps.
    for part in itertools.chain(*[range(12 * 256 // pages)] * passes):
        if part == 0 and grown:
            hold(guest, FILE, 12, create=False)
            hold(guest, FILLER, 4, create=False)
        guest.sh(f"dd if={FILE} of=/dev/null bs=4k count={pages} skip={part * pages}", scaled(60))
        grown = growth(before, stats(guest))
        if grown["waits_us"] > 2 * budget_us:
            break
    assert grown["waits_us"] > 2 * budget_us, "the real-time task delayed too few readers"
    assert grown["trips"] == grown["misses_tripped"] == 0
    assert grown["hits"] > pages
