# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver learns the generation without reads of the configuration.

Generic vhost-user front ends do not notify the driver when a back end is lost or replaced, and a
read of the configuration then waits or ends the virtual machine. Here, the driver ignores the
notifications of QEMU's device (inject_config_deaf). A counter of the driver and kprobes in the
guest count reads of the configuration.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver import (
    Torture,
    checksums,
    driver_guest,
    evict,
    growth,
    is_on,
    seed,
    start_daemon,
    state,
    stats,
    wait_served,
    wait_state,
)
from liar import LIES_OF_GENERATIONS, T_GENERATION, T_GET, Liar
from test_core import check_works, reload
from test_driver import restart_at_random, tree_disk
from test_lies import check_reset

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

if TYPE_CHECKING:
    from shared_fixtures import Tree

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DEAF = "verify_every=0 inject_config_deaf=1"
TRACING = "/sys/kernel/tracing"
# Longest time from the start of a daemon to the first hit: the front end connects again after
# 0.1 s, the driver asks after up to a second, and a guest under TCG is slow.
BACK_SECONDS = scaled(10)
# Longest time until the driver notices in an idle guest that the back end is gone: the interval of
# reports (10 s), and the time limits of a report and of two GENERATION requests (1 s each).
NOTICE_SECONDS = scaled(20)
# Time in seconds for which a device is silent. The driver sends at most as many requests.
SILENT_SECONDS = 15
ALL_TYPES = range(256)


class ConfigReads:
    """Counts the reads of configurations of virtio devices in a guest, with kprobes."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        found = guest.sh("grep -w vp_get /proc/kallsyms").splitlines()
        probes = [f"p:config{number} 0x{line.split()[0]}" for number, line in enumerate(found)]
        guest.sh(f"mount -t tracefs none {TRACING} 2>/dev/null || true")
        for probe in probes:
            guest.sh(f"echo '{probe}' >>{TRACING}/kprobe_events")
        guest.sh(f"echo 1 >{TRACING}/events/kprobes/enable")

    def count(self) -> int:
        lines = self.guest.sh(f"cat {TRACING}/kprobe_profile").splitlines()
        return sum(int(line.split()[1]) for line in lines)


def test_configuration_is_read_at_set_up_and_after_notifications_only(tree: Tree) -> None:
    """The driver reads the configuration once when it is loaded, and once for each notification.

    QEMU notifies the driver of the start of the back end, which follows the set-up of the device.
    """
    daemon, guest, sums = tree.daemon, tree.guest, tree.sums
    reads = ConfigReads(guest)
    before = stats(guest)["config_reads"]
    assert 1 <= before <= 2
    files = dict(list(sums.items())[:4])
    evict(guest, list(files))
    daemon.pause()
    assert checksums(guest, list(files)) == files
    assert state(guest) == "tripped"
    time.sleep(12)  # longer than the interval of reports
    daemon.resume()
    wait_state(guest, "on")
    assert stats(guest)["config_reads"] == before
    assert reads.count() == 0
    daemon.restart()
    until(
        lambda: stats(guest)["config_reads"] == before + 2,
        60,
        "QEMU notifies of the loss of the back end and of the start of the next one",
    )
    wait_state(guest, "on")
    assert reads.count() > 0, "the kprobes do not see the reads of the configuration"
    reload(guest)
    assert 1 <= stats(guest)["config_reads"] <= 2


@pytest.mark.smoke
def test_replaced_daemon_is_found_without_notifications(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Hits come back after the daemon was killed, hung, or hung and replaced."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_guest(session, kernel, test_module, tmem, disks=[data], parameters=DEAF)
    reads = ConfigReads(guest)
    files = dict(list(sums.items())[:8])
    for trouble, remedy in (
        (daemon.kill, daemon.start),
        (daemon.pause, daemon.resume),
        (daemon.pause, daemon.restart),
    ):
        evict(guest, list(files))
        trouble()
        assert checksums(guest, list(files)) == files
        assert state(guest) == "tripped"
        before = stats(guest)
        remedy()
        began = time.monotonic()

        def hits(before: int = before["hits"]) -> bool:
            guest.sh("echo 1 >/proc/sys/vm/drop_caches")
            assert checksums(guest, list(files)) == files
            return stats(guest)["hits"] > before

        until(hits, BACK_SECONDS, "hits come back")
        print(f"hits {time.monotonic() - began:.1f} s after {remedy.__name__}")
        assert is_on(guest)
        changes = growth(before, stats(guest))["generation_changes"]
        assert changes == (remedy != daemon.resume)
        check_works(guest, files)
    assert stats(guest)["config_reads"] == 1
    assert reads.count() == 0


def test_killed_daemon_causes_no_wrong_byte_without_notifications(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    number = seed()
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_guest(session, kernel, test_module, tmem, cpus=2, parameters=DEAF)
    reads = ConfigReads(guest)
    torture = Torture(
        guest, f"--seed={number} --ops=6000 --jobs=2 --files=16 --size-max=524288", 600
    )
    kills = restart_at_random(daemon, torture, random.Random(number))
    torture.finish()
    wait_state(guest, "on")
    counters = stats(guest)
    print(f"the daemon was killed {kills} times", counters)
    assert kills >= 3
    assert counters["mismatches"] == 0
    assert counters["generation_changes"] > 1
    assert counters["config_reads"] == 1
    assert reads.count() == 0
    Torture(guest, "--scenario=plain").finish()
    assert stats(guest)["hits"] > counters["hits"]


def test_state_of_an_idle_guest_shows_that_the_daemon_is_gone(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    daemon = start_daemon(session)
    tmem = Tmem(daemon.socket("vm1"))
    guest = driver_guest(session, kernel, test_module, tmem, parameters=DEAF)
    for _ in range(2):
        daemon.kill()
        wait_state(guest, "tripped", NOTICE_SECONDS)
        assert stats(guest)["late"] == 0, "a reader waited for the daemon that is gone"
        daemon.start()
        wait_state(guest, "on")
    assert stats(guest)["config_reads"] == 1


def test_front_end_that_skips_requests_is_noticed_without_notifications(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If a front end skips the GENERATION requests that wait, the driver sends another one."""
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        tmem = Tmem(liar.path)
        guest = driver_guest(session, kernel, test_module, tmem, disks=[data], parameters=DEAF)
        evict(guest, list(sums))
        liar.silent = frozenset(ALL_TYPES)
        before = stats(guest)
        assert checksums(guest, list(sums)) == sums
        assert state(guest) == "tripped"
        asked = before["requests_generation"]
        until(
            lambda: stats(guest)["requests_generation"] >= asked + 3,
            60,
            "the driver asks again while it gets no answer",
        )
        liar.reconnect_and_skip()
        until(lambda: liar.skipped > 0, 60, "the device skips requests")
        wait_state(guest, "on", BACK_SECONDS)
        assert growth(before, stats(guest))["generation_changes"] == 1
        assert stats(guest)["config_reads"] == 1
        check_reset(guest, sums)


def test_wrong_answers_to_generation_requests_cause_no_harm(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver asks seldom, whatever a device answers or if it does not, and then works again."""
    data, sums = tree_disk(session)
    sums = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        tmem = Tmem(liar.path)
        guest = driver_guest(session, kernel, test_module, tmem, disks=[data], parameters=DEAF)
        for lie in LIES_OF_GENERATIONS:
            evict(guest, list(sums))
            told, before, began = liar.lies_told, stats(guest), time.monotonic()
            liar.silent, liar.lie = frozenset([T_GET]), lie
            assert checksums(guest, list(sums)) == sums
            until(lambda: liar.lies_told > told, 60, f"the driver asks: {lie}")  # noqa: B023
            if lie == "generation-other":
                until(
                    lambda: growth(before, stats(guest))["generation_changes"] > 0,  # noqa: B023
                    60,
                    "the driver uses another generation",
                )
            else:
                time.sleep(5)
                assert state(guest) == "tripped", f"wrong answer '{lie}'"
                assert growth(before, stats(guest))["generation_changes"] == 0
            liar.silent, liar.lie = frozenset(), ""
            asked = growth(before, stats(guest))["requests_generation"]
            assert asked <= time.monotonic() - began + 2, f"wrong answer '{lie}': {asked} requests"
            wait_state(guest, "on")
            check_works(guest, sums)
        evict(guest, list(sums))
        before = stats(guest)
        liar.silent = frozenset(ALL_TYPES)
        assert checksums(guest, list(sums)) == sums
        time.sleep(SILENT_SECONDS)
        asked = growth(before, stats(guest))["requests_generation"]
        assert 3 <= asked <= SILENT_SECONDS, f"{asked} requests"
        assert state(guest) == "tripped"
        waiting = liar.waiting_control_requests()
        assert waiting[T_GENERATION] >= 3
        # Reports are sent once a second until two GENERATION requests are late.
        assert waiting.total() - waiting[T_GENERATION] <= 3, waiting
        # All requests wait for answers now. The removal of the driver does not.
        reload(guest, until_state="o")
        liar.silent = frozenset()
        wait_state(guest, "on")
        wait_served(guest)
        check_works(guest, sums)
        assert stats(guest)["mismatches"] == 0
