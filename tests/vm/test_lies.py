# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests a device that is slow, silent or gives wrong answers for a long time, under load.

test_core.py tests the effect of each kind of wrong answer, and test_deadline.py the wait of one
readahead. The tests here count waits instead of measuring them, because each wait takes the
driver's deadline at most.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from driver import (
    WHERE,
    Torture,
    checksums,
    driver_guest,
    evict,
    kept_pages,
    seed,
    set_parameter,
    settle,
    state,
    stats,
    wait_served,
    wait_state,
)
from liar import (
    LIES_OF_GETS,
    LIES_OF_PUTS,
    T_FLUSH,
    T_GENERATION,
    T_GET,
    T_LATENCIES,
    T_PUT,
    T_REF,
    T_REPORT,
    Liar,
)
from test_core import DRIVER, check_works, devices, drop_pages, reload
from test_driver import tree_disk

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Delay of a slow device: much longer than the deadline of gets, and longer than the delay of puts
# that fill no batch.
SLOW_SECONDS = scaled(0.5)
SILENT_SECONDS = 1e9
# Maximum number of late requests until the breaker opens: three late readaheads open it, and each
# of them sends up to four requests at once.
LATE_MAX = 3 * 4
# Minimum number of kinds of wrong answers that the load must meet, and maximum number of runs of
# the load for that. One run usually suffices.
TOLD_MIN, TURNS_MAX = 4, 5
# The driver resets a device at most once in 60 s (RESET_PERIOD_S). The first reset takes some time.
RESET_PERIOD_SECONDS = 50
SET_UP_ATTEMPTS = 6  # SETUP_RETRIES of the driver
STATUS_FAILED = 0x80  # VIRTIO_CONFIG_S_FAILED
LOAD = "--ops=4000 --jobs=2 --files=16 --size-max=262144"


def read_without_answers(guest: Guest, liar: Liar, sums: dict[str, str], delay: float) -> None:
    """Checks that files are read from the disk while the device does not answer in time.

    After the third late answer no reader waits.
    """
    before = evict(guest, list(sums))
    assert before["index_pages"] > 0
    # While the device does not answer in time, the driver gets only pages that are still in the put
    # ring. All other pages come from the disk.
    liar.delay_seconds = delay
    assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert after["hits"] - before["hits"] == after["ring_hits"] - before["ring_hits"]
    assert 3 <= after["late"] - before["late"] <= LATE_MAX
    assert after["misses_late"] > before["misses_late"]
    assert after["trips"] == before["trips"] + 1
    assert state(guest) == "tripped"
    # The breaker is open, so the driver sends only probes, for which no reader waits.
    for _ in range(3):
        drop_pages(guest)
        assert checksums(guest, list(sums)) == sums
    last = stats(guest)
    assert last["misses_late"] == after["misses_late"]
    assert last["hits"] - after["hits"] == last["ring_hits"] - after["ring_hits"]
    assert state(guest) == "tripped", "the breaker is not open although all answers are late"


def test_slow_or_silent_device_opens_the_breaker(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If right answers are late or missing, the breaker opens. It closes when answers are fast."""
    data, sums = tree_disk(session)
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        check_works(guest, sums)
        for delay in (SLOW_SECONDS, SILENT_SECONDS):
            read_without_answers(guest, liar, sums, delay)
            liar.delay_seconds = 0.0
            wait_state(guest, "on")
            settle(guest)
            assert checksums(guest, list(sums)) == sums
            check_works(guest, sums)
        # The module is unloaded while the device holds requests without answering, and is loaded
        # again.
        evict(guest, list(sums))
        liar.delay_seconds = SILENT_SECONDS
        assert checksums(guest, list(sums)) == sums
        guest.sh("rmmod virtio_tmem", 60)
        liar.delay_seconds = 0.0
        assert checksums(guest, list(sums)) == sums
        reload(guest)
        check_works(guest, sums)
        assert stats(guest)["mismatches"] == 0


def test_wrong_answers_under_load_cause_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Wrong answers under load cause no wrong byte: all kinds except "content", in random order."""
    number = seed()
    generator = random.Random(number)
    lies = ("", *LIES_OF_GETS, *LIES_OF_PUTS, "late")
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), cpus=2)
        told: set[str] = set()
        for turn in range(TURNS_MAX):
            torture = Torture(guest, f"--seed={number + turn} {LOAD}", 900)
            while not torture.job.done():
                before = liar.lies_told
                liar.lie = generator.choice(lies)
                liar.delay_seconds = generator.choice((0.0, 0.0, 0.0, SLOW_SECONDS))
                # The time until the next lie is not scaled for slow machines, because a run would
                # then meet fewer lies.
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
        assert len(told) >= TOLD_MIN, (
            f"the load received only {len(told)} kinds of wrong answers, not {TOLD_MIN}"
        )
        assert counters["misses_answer"] + counters["puts_unanswered"] > 0
        assert counters["mismatches"] == 0
        # The cache works after all wrong answers.
        wait_state(guest, "on")
        Torture(guest, "--scenario=plain").finish()
        assert stats(guest)["hits"] > counters["hits"]


@pytest.mark.smoke
def test_wrong_contents_under_load_switch_the_cache_off(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """One wrong page switches the cache off, and no reader sees it."""
    number = seed()
    with Liar(session.directory / "liar") as liar:
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
        assert (kept_pages(after), after["hits"]) == (kept_pages(counters), counters["hits"])


def uptime(guest: Guest) -> float:
    return float(guest.read("/proc/uptime").split()[0])


def request_counters(counters: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in counters.items() if name.startswith("requests_")}


def test_device_with_a_stopped_queue_is_reset(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver resets a device that needs a reset, but at most once a minute.

    Until the reset, the cache is off and the driver sends no request.
    """
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        liar.stop_queue(1)
        until(lambda: stats(guest)["device_resets"] == 1, 60, "the device is reset")
        first = uptime(guest)
        check_reset(guest, sums)
        evict(guest, list(sums))
        # The driver asks a silent device for its generation every second.
        liar.silent = frozenset([T_GET, T_GENERATION])
        assert checksums(guest, list(sums)) == sums
        wait_state(guest, "tripped")
        liar.stop_queue(1)
        wait_state(guest, "offline: the device needs a reset")
        liar.silent = frozenset()
        sent = request_counters(stats(guest))
        assert checksums(guest, list(sums)) == sums

        def reset_again() -> bool:
            counters = stats(guest)
            if counters["device_resets"] == 2:
                return True
            assert request_counters(counters) == sent, "the driver sends requests"
            return False

        until(reset_again, 120, "the device is reset again")
        assert uptime(guest) - first > RESET_PERIOD_SECONDS
        wait_state(guest, "on")
        wait_served(guest)
        check_works(guest, sums)


def kernel_log(guest: Guest) -> str:
    return guest.sh("dmesg", 60)


def test_set_up_that_fails_after_a_reset_is_repeated(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, test_module, Tmem(liar.path), disks=[data])
        set_parameter(guest, "inject_nomem_device", "1")
        liar.stop_queue(1)
        wait_state(guest, "off: the device could not be set up")
        # Two attempts fail.
        until(lambda: "next attempt in 4 s" in kernel_log(guest), 60, "the driver tries again")
        assert checksums(guest, list(sums)) == sums
        set_parameter(guest, "inject_nomem_device", "0")
        check_reset(guest, sums)
        (name,), _ = devices(guest)
        status = int(guest.sh(f"cat /sys/bus/virtio/devices/{name}/status"), 16)
        assert status & STATUS_FAILED == 0, "the device was not reset after the failed set-ups"


def test_set_up_after_a_reset_is_repeated_a_bounded_number_of_times(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The attempts end, and an administrator can then bind the device again."""
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, test_module, Tmem(liar.path), disks=[data])
        set_parameter(guest, "inject_nomem_device", "1")
        liar.stop_queue(1)
        failed = f"{SET_UP_ATTEMPTS} attempts to set up the device after a reset have failed"
        # The attempts take 1 + 2 + 4 + ... + 32 s in a module that was built for tests.
        until(lambda: failed in kernel_log(guest), 180, "the driver gives up")
        assert kernel_log(guest).count("next attempt in") == SET_UP_ATTEMPTS
        set_parameter(guest, "inject_nomem_device", "0")
        _, (name,) = devices(guest)
        guest.sh(f"echo {name} >{DRIVER}/bind", 60)
        check_reset(guest, sums)


def test_driver_sends_latencies_only_if_the_device_offers_them(
    session: Session, kernel: Kernel, module: Path
) -> None:
    data, sums = tree_disk(session)
    with Liar(session.directory / "liar") as liar:
        tmem = Tmem(liar.path, properties={"latencies": "off"})
        guest = driver_guest(session, kernel, module, tmem, disks=[data])
        # The driver sends one report every ten seconds.
        until(lambda: liar.asked[T_REPORT] >= 3, 60, "the driver has sent three statistics reports")
        assert liar.asked[T_LATENCIES] == 0
        check_works(guest, sums)


def test_request_unknown_to_the_device_is_sent_once(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A request that the device does not know is sent once, and everything else works."""
    data, sums = tree_disk(session)
    with Liar(session.directory / "liar") as liar:
        liar.lie = "older"
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        # The driver sends one report every ten seconds.
        until(lambda: liar.asked[T_REPORT] >= 3, 60, "the driver has sent three statistics reports")
        assert liar.asked[T_LATENCIES] == 1
        check_works(guest, sums)
        # After a reload, the driver sends the latency request again: the device may be another one.
        reload(guest)
        until(lambda: liar.asked[T_LATENCIES] == 2, 60, "the request is sent again")


def leave_unanswered(guest: Guest, liar: Liar, kind: int, sums: dict[str, str]) -> None:
    """Makes the driver send requests of a type, which the device does not answer."""
    paths = list(sums)
    evict(guest, paths)
    if kind == T_REF:
        # The host retains the pages that are read back.
        assert checksums(guest, paths) == sums
        assert stats(guest)["index_retained_pages"] > 0
    liar.silent = frozenset([kind])
    if kind == T_GET:
        assert checksums(guest, paths) == sums
    elif kind == T_FLUSH:
        guest.sh(f"cp {paths[0]} /tmp/copy; dd if=/tmp/copy of={paths[0]} conv=notrunc,fsync", 60)
    elif kind == T_PUT:
        # Pages that the host has retained are not put.
        guest.sh(f"dd if=/dev/urandom of={WHERE}/new bs=64k count=4 2>/dev/null", 60)
        drop_pages(guest)
    elif kind == T_REF:
        drop_pages(guest)
    until(lambda: liar.waiting_requests() > 0, 60, f"the device has requests of type {kind}")


def check_reset(guest: Guest, sums: dict[str, str]) -> None:
    """Waits until the driver has reset the device once, and checks that it then works."""
    until(lambda: stats(guest)["device_resets"] == 1, 60, "the driver resets the device")
    wait_state(guest, "on")
    wait_served(guest)
    before = stats(guest)
    check_works(guest, sums)
    after = stats(guest)
    assert after["misses_bounce"] == before["misses_bounce"]
    assert after["device_resets"] == 1


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([T_GET], id="gets"),
        pytest.param([T_PUT, T_FLUSH, T_REF, T_REPORT], id="others"),
    ],
)
def test_device_that_skips_requests_at_a_reconnect_is_reset(
    session: Session, kernel: Kernel, module: Path, kinds: list[int]
) -> None:
    """A device that never answers requests of an earlier generation is reset once.

    The large readahead of the gets has most bounce pages at the device. Until the reset, they are
    lost, and the breaker opens.
    """
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar", retain=True) as liar:
        tmem = Tmem(liar.path, properties={"retain": "on"})
        guest = driver_guest(session, kernel, module, tmem, disks=[data])
        guest.sh(f"echo 512 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
        for kind in kinds:
            leave_unanswered(guest, liar, kind, sums)
            skipped = liar.skipped
            liar.reconnect_and_skip()
            until(lambda: liar.skipped > skipped, 60, "the device skips requests")  # noqa: B023
            check_reset(guest, sums)
            # Requests that the reset took back are lost.
            settle(guest)
            reload(guest)
            wait_served(guest)
            check_works(guest, sums)


def test_device_that_does_not_answer_is_not_reset(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A device that is slow, hangs, or has no back end is not reset."""
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    path = session.directory / "liar"

    def not_reset(seconds: float = 15.0) -> None:
        """Checks that the driver does not reset the device in more time than it needs for that."""
        time.sleep(seconds)
        assert stats(guest)["device_resets"] == 0

    with Liar(path) as liar:
        guest = driver_guest(session, kernel, module, Tmem(path), disks=[data])
        evict(guest, list(sums))
        liar.delay_seconds = SLOW_SECONDS
        assert checksums(guest, list(sums)) == sums
        not_reset()
        liar.delay_seconds = SILENT_SECONDS
        assert checksums(guest, list(sums)) == sums
        not_reset()
    wait_state(guest, "offline: no backend")
    not_reset()
    path.unlink()
    with Liar(path) as liar:
        wait_state(guest, "on")
        wait_served(guest)
        # The device skips requests at a reconnect, and then hangs.
        leave_unanswered(guest, liar, T_GET, sums)
        liar.reconnect_and_skip(range(256))
        not_reset()
        # When it answers again, only the skipped requests are missing.
        liar.silent = frozenset()
        check_reset(guest, sums)
