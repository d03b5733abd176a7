# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A device that is slow, silent or lying, for as long as it lasts and under load.

What each single lie leads to is in test_core; how long one readahead waits is in
test_deadline. Waits are bounded by counting them: each takes the driver's deadline at most.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from driver import Torture, checksums, driver_guest, evict, seed, settle, state, stats, wait_state
from liar import LIES_OF_GETS, LIES_OF_PUTS, T_LATENCIES, T_REPORT, Liar
from test_core import check_works, drop_pages, reload
from test_driver import tree_disk

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Of a device that is slow: well beyond the deadline, and beyond that of a put.
SLOW_SECONDS = scaled(0.5)
SILENT_SECONDS = 1e9
# Three readers that wait in vain open the breaker; a readahead asks for a few runs at once.
LATE_MAX = 3 * 4
# Kinds of lies that a load has to hear, and how often it is run for that: once is mostly enough.
TOLD_MIN, TURNS_MAX = 4, 5
LOAD = "--ops=4000 --jobs=2 --files=16 --size-max=262144"


def read_without_answers(guest: Guest, liar: Liar, sums: dict[str, str], delay: float) -> None:
    """What was held comes from the disk, and after the third late answer nobody waits."""
    before = evict(guest, list(sums))
    assert before["index_pages"] > 0
    # Out of the put ring, where it would be had without the device.
    liar.delay_seconds = delay
    assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert after["hits"] - before["hits"] == after["ring_hits"] - before["ring_hits"]
    assert 3 <= after["late"] - before["late"] <= LATE_MAX
    assert after["misses_late"] > before["misses_late"]
    assert after["trips"] == before["trips"] + 1
    assert state(guest) == "tripped"
    # But for probes, which nobody waits for.
    for _ in range(3):
        drop_pages(guest)
        assert checksums(guest, list(sums)) == sums
    last = stats(guest)
    assert last["misses_late"] == after["misses_late"]
    assert last["hits"] - after["hits"] == last["ring_hits"] - after["ring_hits"]
    assert state(guest) == "tripped", "answers that are late again do not close the breaker"


@pytest.mark.smoke
def test_slow_and_silent_device(session: Session, kernel: Kernel, module: Path) -> None:
    """Each answer is right and late, or none comes; the breaker opens, and closes afterwards."""
    data, sums = tree_disk(session)
    with Liar(session.folder / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        check_works(guest, sums)
        for delay in (SLOW_SECONDS, SILENT_SECONDS):
            read_without_answers(guest, liar, sums, delay)
            liar.delay_seconds = 0.0
            wait_state(guest, "on")
            settle(guest)
            assert checksums(guest, list(sums)) == sums
            check_works(guest, sums)
        # The module goes while the device holds requests and keeps silent, and comes back.
        evict(guest, list(sums))
        liar.delay_seconds = SILENT_SECONDS
        assert checksums(guest, list(sums)) == sums
        guest.sh("rmmod virtio_tmem", 60)
        liar.delay_seconds = 0.0
        assert checksums(guest, list(sums)) == sums
        reload(guest)
        check_works(guest, sums)
        assert stats(guest)["mismatches"] == 0


@pytest.mark.smoke
def test_lies_under_load(session: Session, kernel: Kernel, module: Path) -> None:
    """Lies of all kinds but about contents, in random turns, under random operations."""
    number = seed()
    generator = random.Random(number)
    lies = ("", *LIES_OF_GETS, *LIES_OF_PUTS, "late")
    with Liar(session.folder / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), cpus=2)
        told: set[str] = set()
        for turn in range(TURNS_MAX):
            torture = Torture(guest, f"--seed={number + turn} {LOAD}", 900)
            while not torture.job.done():
                before = liar.lies_told
                liar.lie = generator.choice(lies)
                liar.delay_seconds = generator.choice((0.0, 0.0, 0.0, SLOW_SECONDS))
                # As short on a slow machine, or it would hear fewer of them.
                end = time.monotonic() + 0.5
                while time.monotonic() < end and not torture.job.done():
                    if liar.lies_told > before:
                        told.add(liar.lie)
                        break
                    time.sleep(0.02)
            torture.finish()
            liar.lie, liar.delay_seconds = "", 0.0
            if len(told) >= TOLD_MIN:
                break
        counters = stats(guest)
        print(sorted(told), counters)
        assert len(told) >= TOLD_MIN, "lies were told, not only meant"
        assert counters["misses_answer"] + counters["puts_unanswered"] > 0
        assert counters["mismatches"] == 0
        # After a used element or two that cannot be, it works again as it should.
        wait_state(guest, "on")
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > counters["hits"]


@pytest.mark.smoke
def test_wrong_contents_under_load(session: Session, kernel: Kernel, module: Path) -> None:
    """One wrong page switches the cache off, and no reader has seen it."""
    number = seed()
    with Liar(session.folder / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), cpus=2)
        torture = Torture(guest, f"--seed={number} {LOAD}", 900)
        until(lambda: stats(guest)["hits"] > 20 or torture.job.done(), 120, "hits under load")
        assert not torture.job.done()
        liar.lie = "content"
        wait_state(guest, "poisoned: content check")
        torture.finish()
        counters = stats(guest)
        assert counters["mismatches"] == counters["misses_check"] > 0
        Torture(guest, "--scenario=plain").finish()
        after = stats(guest)
        assert (after["puts"], after["hits"]) == (counters["puts"], counters["hits"])


def test_device_older_than_the_driver(session: Session, kernel: Kernel, module: Path) -> None:
    """A request that the device does not know is made once, and all else goes on."""
    data, sums = tree_disk(session)
    with Liar(session.folder / "liar") as liar:
        liar.lie = "older"
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        # One each ten seconds.
        until(lambda: liar.asked[T_REPORT] >= 3, 60, "three reports")
        assert liar.asked[T_LATENCIES] == 1
        check_works(guest, sums)
        # Another device may know it.
        reload(guest)
        until(lambda: liar.asked[T_LATENCIES] == 2, 60, "the request is made again")
