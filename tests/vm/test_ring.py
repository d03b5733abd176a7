# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the put ring: the queues share its slots, and puts are sent in time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import (
    PATIENT,
    SYSFS,
    Hold,
    checksums,
    driver_guest,
    driver_vm,
    growth,
    load,
    settle,
    start_daemon,
    stats,
)

from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import ROOT
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

QUEUES = 4
CHUNK = "/mnt/chunk"
CHUNK_PAGES = 256  # number of adjacent pages that go to one queue
BATCH_PAGES = 64
BURSTS = 8  # number of bursts of CHUNK_PAGES: four times the slots of a guest of 256 MiB
OWN_MS = 1000.0  # longest delay by a busy machine; the host does not answer in these tests


def driver_constant(name: str) -> int:
    """Returns the value of a constant of the driver's core/core.h."""
    source = (ROOT / "guest-driver/core/core.h").read_text()
    found = re.search(rf"#define {name}\s+(\d+)", source)
    assert found
    return int(found[1])


IN_FLIGHT = driver_constant("TMEM_PUTS_IN_FLIGHT")
# Maximum numbers of flushes that wait to be sent, and that are in flight, in ranges of pages.
FLUSHES_WAIT = driver_constant("TMEM_FLUSH_PENDING")
FLUSHES_SENT = driver_constant("TMEM_FLUSHES_IN_FLIGHT") * BATCH_PAGES
MANY = "/mnt/many"
MANY_FILES = 600
MANY_AT_ONCE = 50  # number of files of two pages that fit the ring together


def test_one_queue_may_use_slots_from_the_share_of_other_queues(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """One queue may use more than its share of the slots while the host answers no put."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=QUEUES)
    vm = driver_vm(session, kernel, module, tmem, memory_bytes=256 * MIB)
    guest = vm.start()
    load(guest, f"verify_every=0 {PATIENT}")
    guest.sh(f"dd if=/dev/urandom of={CHUNK} bs=4096 count={CHUNK_PAGES}; sync")
    sums = checksums(guest, [CHUNK])
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    guest.sh(f"cat {CHUNK} >/dev/null")
    before = settle(guest)
    daemon.pause()
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    after = stats(guest)
    daemon.resume()
    assert after["puts"] - before["puts"] >= CHUNK_PAGES
    assert after["puts_dropped_ring_full"] == before["puts_dropped_ring_full"]
    settle(guest)
    # All pages come back with right bytes, although the queue used blocks of slots from the share
    # of other queues. On a busy machine some pages may be late; they come from the disk.
    assert checksums(guest, [CHUNK]) == sums
    grown = growth(after, stats(guest))
    assert grown["hits"] + grown["misses_late"] >= CHUNK_PAGES
    assert grown["hits"] >= CHUNK_PAGES // 2
    assert grown["mismatches"] == 0


def hold_feeder(guest: Guest) -> Hold:
    """Stops the feeder thread at its next run, and returns the hold.

    Makes two puts, which fill no batch, so that the feeder thread runs.
    """
    hold = Hold(guest, "feeder")
    guest.sh("dd if=/dev/urandom of=/mnt/two bs=4096 count=2 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    hold.wait()
    return hold


def wait_until_full_batches_are_answered(guest: Guest) -> dict[str, int]:
    """Waits until fewer than a batch of puts are unanswered; returns the driver's counters."""
    counters: dict[str, int] = {}

    def answered() -> bool:
        nonlocal counters
        counters = stats(guest)
        return counters["puts"] - counters["puts_stored"] < BATCH_PAGES

    what = (
        "the driver sends full batches, and the device answers them, while the driver's feeder "
        "thread is stopped"
    )
    until(answered, OWN_MS / 1000 * 10, what)
    return counters


def test_full_batches_and_their_answers_need_no_feeder_thread(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Full batches leave and their answers free slots while the feeder thread does not run.

    The guest puts more pages than the ring has slots, in several bursts.
    """
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=1)
    guest = driver_vm(session, kernel, test_module, tmem, memory_bytes=256 * MIB).start()
    load(guest, f"verify_every=0 {PATIENT}")
    paths = [f"/mnt/burst{number}" for number in range(BURSTS)]
    for path in paths:
        guest.sh(f"dd if=/dev/urandom of={path} bs=4096 count={CHUNK_PAGES} 2>/dev/null; sync")
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        settle(guest)
    sums = checksums(guest, paths)
    settle(guest)
    hold = hold_feeder(guest)
    before = stats(guest)
    for path in paths:
        guest.sh(f"cat {path} >/dev/null; echo 1 >/proc/sys/vm/drop_caches")
        after = wait_until_full_batches_are_answered(guest)
    grown = growth(before, after)
    assert grown["puts"] >= BURSTS * CHUNK_PAGES
    # The ring would have been full if answers had not freed slots.
    assert grown["puts_dropped_ring_full"] == 0
    hold.release()
    settle(guest)
    assert checksums(guest, paths) == sums


def test_a_flush_is_sent_before_a_later_put_of_its_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The host keeps pages that were put after a flush of them, although the feeder is stopped."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=1)
    guest = driver_vm(session, kernel, test_module, tmem, memory_bytes=256 * MIB).start()
    load(guest, f"verify_every=0 {PATIENT}")
    write = f"dd if=/dev/urandom of={CHUNK} bs=4096 count={CHUNK_PAGES} conv=notrunc 2>/dev/null"
    guest.sh(f"{write}; sync; echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    hold = hold_feeder(guest)
    before = stats(guest)
    guest.sh(f"{write}; sync; echo 1 >/proc/sys/vm/drop_caches")
    after = wait_until_full_batches_are_answered(guest)
    grown = growth(before, after)
    assert grown["invalidations_block"] >= CHUNK_PAGES and grown["puts"] >= CHUNK_PAGES
    assert grown["requests_flush"] >= 1
    hold.release()
    before = settle(guest)
    guest.sh(f"cat {CHUNK} >/dev/null")
    grown = growth(before, stats(guest))
    assert grown["misses_host"] == 0
    assert grown["hits"] + grown["misses_late"] >= CHUNK_PAGES


def drop_and_wait(guest: Guest) -> float:
    """Evicts pages, and returns the ms until the driver has sent another request of puts."""
    begun, sent = guest.sh(
        f"read n <{SYSFS}/stats/requests_put; m=$n; echo 1 >/proc/sys/vm/drop_caches;"
        " read begun rest </proc/uptime;"
        f" while [ $m = $n ]; do read m <{SYSFS}/stats/requests_put; done;"
        " read sent rest </proc/uptime; echo $begun $sent"
    ).split()
    return (float(sent) - float(begun)) * 1000


def test_partial_batches_are_sent_after_a_bounded_delay(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Puts that fill no batch are sent after a bounded time, even if the host does not answer."""
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=1)
    guest = driver_vm(session, kernel, module, tmem).start()
    load(guest, "verify_every=0")
    guest.sh("dd if=/dev/urandom of=/mnt/0 bs=4096 count=2 2>/dev/null; sync")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)

    # The two pages of this file fill no batch, and no later put follows that could complete it.
    guest.sh("cat /mnt/0 >/dev/null")
    before = settle(guest)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] >= 2

    # Stop the daemon, so that the host answers no further request.
    before = after
    daemon.pause()
    waits_ms = []
    for number in range(IN_FLIGHT):
        guest.sh(f"dd if=/dev/urandom of=/mnt/{number} bs=4096 count=2 2>/dev/null; sync")
        waits_ms.append(drop_and_wait(guest))
    print("partial batches were sent after", waits_ms, "ms")
    assert min(waits_ms[1:]) <= driver_constant("TMEM_PUT_DELAY_MS") + OWN_MS
    waiting = stats(guest)
    assert waiting["requests_put"] - before["requests_put"] >= IN_FLIGHT
    assert 2 * IN_FLIGHT <= waiting["puts"] - before["puts"] < BATCH_PAGES
    assert waiting["puts_stored"] == before["puts_stored"]
    daemon.resume()
    after = settle(guest)
    assert after["puts_stored"] - before["puts_stored"] == after["puts"] - before["puts"]


def test_dropped_flushes_are_counted_and_cause_no_old_page(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If the host does not answer, the driver drops flushes beyond a limit and counts them.

    The write of each file is a bio, which causes a flush. Reads find no old page, whether a flush
    was sent or dropped.
    """
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"), num_queues=1)
    guest = driver_guest(session, kernel, module, tmem)
    guest.sh(f"mkdir {MANY}")
    empty = settle(guest)["index_pages"]
    for first in range(1, MANY_FILES, MANY_AT_ONCE):
        some = f"$(seq {first} {first + MANY_AT_ONCE - 1})"
        guest.sh(
            f"for i in {some}; do printf %08192d $i >{MANY}/$i; done; sync;"
            " echo 1 >/proc/sys/vm/drop_caches"
        )
        settle(guest)
    before = stats(guest)
    assert before["index_pages"] - empty >= 2 * MANY_FILES * 9 // 10
    daemon.pause()
    # The host has the other page of each file still, so no flush has neighbouring pages.
    guest.sh("yes x | tr -d '\\n' | head -c 4096 >/tmp/x")
    guest.sh(
        f"for i in $(seq {MANY_FILES}); do dd if=/tmp/x of={MANY}/$i bs=4k conv=notrunc"
        " 2>/dev/null; done; sync",
        60,
    )
    after = stats(guest)
    daemon.resume()
    grown = growth(before, after)
    print(grown)
    assert before["index_pages"] - after["index_pages"] >= MANY_FILES * 9 // 10
    least = MANY_FILES * 9 // 10 - FLUSHES_WAIT - FLUSHES_SENT
    assert least <= grown["flushes_dropped"] <= MANY_FILES - FLUSHES_WAIT
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    assert int(guest.sh(f"cat {MANY}/* | tr -cd x | wc -c")) == MANY_FILES * 4096
