# SPDX-License-Identifier: Apache-2.0 OR MIT
"""kswapd and registered tasks wait for the host while the put ring fills up, and not for long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from driver import (
    PATIENT,
    WHERE,
    driver_vm,
    growth,
    load,
    programs,
    set_parameter,
    settle,
    start_daemon,
    stats,
)
from liar import Liar

from harness import disk, module
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

RAM_BYTES = 192 * MIB
FILE_MIB = 320  # more than the RAM, so that kswapd evicts while the file is read
FILE = f"{WHERE}/file"
PATCH = "/patch.ko"
LARGE_MIB = 400  # more than the RAM of any guest of these tests
# Longest wait of kswapd (PACE_US_MAX), and budget of all its waits (PACE_SHARE, PACE_BURST_US).
WAIT_SECONDS = 0.002
WAIT_SHARE = 4
WAIT_BURST_SECONDS = 0.020
# While the host takes no page, the pauses between waits of kswapd grow to this (PACE_PAUSE_MAX_MS).
PAUSE_SECONDS = 1.0
GROWING_PAUSES = 8  # pauses of 8 ms, 16 ms and so on that are shorter than PAUSE_SECONDS

RECLAIM = "/bin/reclaim"
CGROUPS = "/sys/fs/cgroup"
CACHED_MIB, RECLAIMED_MIB = 80, 56  # so few that kswapd does not run
PAGES_PER_MIB = 256
PACE_TASKS_MAX = 4
TASK_WAIT_SECONDS = 0.020  # longest wait of a registered task (PACE_TASK_US_MAX)
ANSWER_SECONDS = 0.010  # of a slow host
LATE_SECONDS = 0.100  # of a host that is much slower than any guest fills the put ring
EBUSY = 16


def start(session: Session, kernel: Kernel, ko: Path, socket: Path) -> Guest:
    """Starts a guest that has more data on its disk than RAM."""
    tree = session.directory / "tree"
    tree.mkdir()
    with (tree / "file").open("wb") as file:
        for number in range(FILE_MIB * 256):
            file.write(number.to_bytes(8, "little") * 512)
    image = disk.ext4(session.directory / "data.img", (FILE_MIB + 64) * MIB, tree)
    vm = driver_vm(
        session,
        kernel,
        ko,
        Tmem(socket),
        memory_bytes=RAM_BYTES,
        disks=[Disk("data", image)],
        files={PATCH: module.build_patch(kernel), **programs(RECLAIM)},
    )
    guest = vm.start()
    load(guest, f"verify_every=0 {PATIENT}")
    guest.sh(f"mkdir -p {CGROUPS} && mount -t cgroup2 none {CGROUPS}")
    return guest


def seconds(guest: Guest) -> float:
    """Returns the guest's time since its start."""
    return float(guest.read("/proc/uptime").split()[0])


def check_waits_for_silent_host(guest: Guest, daemon: Daemon) -> None:
    """Checks that kswapd waits for a host that takes no page, if the hook `reclaim` is on."""
    large = f"{WHERE}/large"
    guest.sh(f"dd if=/dev/zero of={large} bs=1M count={LARGE_MIB} conv=fsync 2>/dev/null", 300)
    daemon.pause()
    waits = []
    for hooks_off in ("reclaim", ""):
        set_parameter(guest, "test_hooks_off", hooks_off)
        before = stats(guest)
        guest.sh(f"cat {large} >/dev/null", 120)
        after = stats(guest)
        assert after["puts_dropped_ring_full"] > before["puts_dropped_ring_full"]
        waits.append(after["pace_waits"] - before["pace_waits"])
    daemon.resume()
    assert waits[0] == 0 and waits[1] > 0, waits


def test_kswapd_waits_while_the_ring_fills_up(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """kswapd waits for the host while it evicts, unless the hook `reclaim` is off."""
    daemon = start_daemon(session)
    guest = start(session, kernel, test_module, daemon.socket("vm1"))
    waits = []
    for hooks_off in ("reclaim", ""):
        set_parameter(guest, "test_hooks_off", hooks_off)
        before, began = settle(guest), seconds(guest)
        guest.sh(f"cat {FILE} >/dev/null", 120)
        after, ended = settle(guest), seconds(guest)
        print(ended - began, growth(before, after))
        timeouts = after["pace_timeouts"] - before["pace_timeouts"]
        budget = (ended - began) / WAIT_SHARE + WAIT_BURST_SECONDS + WAIT_SECONDS
        assert timeouts * WAIT_SECONDS <= budget
        waits.append(after["pace_waits"] - before["pace_waits"])
    assert waits[0] == 0 and waits[1] > 0


def test_a_silent_host_soon_delays_kswapd_only_once_a_second(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While the host takes no page, the pauses between waits of kswapd grow to a second."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    daemon.pause()
    before, began = stats(guest), seconds(guest)
    guest.sh(f"cat {FILE} >/dev/null", 120)
    after, ended = stats(guest), seconds(guest)
    daemon.resume()
    print(ended - began, growth(before, after))
    assert after["puts_dropped_ring_full"] > before["puts_dropped_ring_full"]
    waits = after["pace_waits"] - before["pace_waits"]
    assert 1 <= waits <= 1 + GROWING_PAUSES + (ended - began) / PAUSE_SECONDS
    assert after["pace_timeouts"] - before["pace_timeouts"] == waits


def test_kswapd_does_not_wait_where_it_may_hold_locks(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """kswapd does not wait in a call of try_to_unmap_flush() that reclaim itself did not make."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    daemon.pause()
    # drop_caches fills the put ring without kswapd, so kswapd would wait at its next chance.
    guest.sh(f"dd if={FILE} of=/dev/null bs=1M count=32 2>/dev/null")
    guest.drop_caches()
    before = stats(guest)
    assert before["puts_dropped_ring_full"] > 0
    guest.insmod(PATCH, "flush=1")
    assert stats(guest)["pace_waits"] == before["pace_waits"]
    daemon.resume()


def cache(guest: Guest) -> dict[str, int]:
    """Fills the page cache with a part of the file; returns the driver's counters."""
    guest.drop_caches()
    guest.sh(f"dd if={FILE} of=/dev/null bs=1M count={CACHED_MIB} 2>/dev/null", 120)
    return settle(guest)


def reclaim(guest: Guest, how: str, before: dict[str, int]) -> Counter[str]:
    """Reclaims a part of the page cache; returns the growth of the counters since `before`."""
    guest.sh(f"{RECLAIM} {how} {RECLAIMED_MIB}M", 120)
    grown = growth(before, stats(guest))
    print(how, grown)
    assert grown["puts_eligible"] > RECLAIMED_MIB * PAGES_PER_MIB * 0.9
    return grown


def test_task_registered_for_pacing_loses_few_pages_that_it_reclaims(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A registered task waits for a slow host in a write to memory.reclaim; other tasks do not.

    The host is slower for the others, so that they lose pages however slow the guest is.
    """
    with Liar(session.directory / "liar") as liar:
        guest = start(session, kernel, module, liar.path)
        lost = {}
        for how in ("plain", "closed", "child", "paced"):
            before = cache(guest)
            liar.delay_seconds = ANSWER_SECONDS if how == "paced" else LATE_SECONDS
            grown = reclaim(guest, how, before)
            liar.delay_seconds = 0.0
            dropped = grown["puts_dropped_ring_full"]
            lost[how] = dropped / (grown["puts"] + dropped)
            assert (grown["pace_waits"] > 0) == (how == "paced")
        print(lost)
        assert min(lost["plain"], lost["closed"], lost["child"]) > 0.2
        assert lost["paced"] < 0.02


def test_silent_host_delays_a_registered_task_for_a_bounded_time(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While the host takes no page, the pauses between waits of a registered task grow, too."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    before = cache(guest)
    daemon.pause()
    began = seconds(guest)
    grown = reclaim(guest, "paced", before)
    spent = seconds(guest) - began
    daemon.resume()
    assert grown["puts_dropped_ring_full"] > 0
    assert 1 <= grown["pace_waits"] <= 1 + GROWING_PAUSES + spent / PAUSE_SECONDS
    assert grown["pace_waits"] * TASK_WAIT_SECONDS < spent


def test_registered_task_does_not_wait_when_an_allocation_reclaims(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A registered task that reaches the limit of its control group may hold locks."""
    daemon = start_daemon(session)
    guest = start(session, kernel, module, daemon.socket("vm1"))
    group = f"{CGROUPS}/small"
    guest.sh(f"echo +memory >{CGROUPS}/cgroup.subtree_control; mkdir {group}")
    guest.sh(f"echo 16M >{group}/memory.max")
    before = settle(guest)
    daemon.pause()
    guest.sh(f"echo $$ >{group}/cgroup.procs; exec {RECLAIM} read {FILE}", 120)
    grown = growth(before, stats(guest))
    daemon.resume()
    print(grown)
    assert grown["puts_dropped_ring_full"] > 0
    assert grown["pace_waits"] == 0


def test_registrations_are_limited_and_end_with_the_device(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest = start(session, kernel, module, start_daemon(session).socket("vm1"))
    # The registrations of a process end with it, so the second process gets as many.
    for _ in range(2):
        answer = guest.sh(f"{RECLAIM} register").split()
        assert answer == [str(PACE_TASKS_MAX), str(EBUSY), "0"]
    guest.sh("mkdir -p /etc && echo user:x:1000:1000::/:/bin/sh >/etc/passwd")
    guest.sh(f"mkdir /tmp/bin && cp {RECLAIM} /tmp/bin/r && chmod 755 /tmp /tmp/bin /tmp/bin/r")
    done = guest.run("su user -c '/tmp/bin/r paced 1M'")
    assert done.status == 1 and "registration: Operation not permitted" in done.stderr.decode()
    guest.sh("rmmod virtio_tmem")
