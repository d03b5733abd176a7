# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Each event of the driver's tracepoints is in tracefs, and its fields have the right values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    checksums,
    driver_vm,
    evict,
    load,
    programs,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_state,
)
from test_driver import tree_disk

from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = [pytest.mark.usefixtures("qemu", "host_programs")]

SPECIAL = "/bin/special"
PAGE = 4096
TRACING = "/sys/kernel/tracing"
EVENTS = f"{TRACING}/events/virtio_tmem"


def trace_on(guest: Guest, buffer_kib: int = 8192) -> None:
    guest.sh(f"echo {buffer_kib} >{TRACING}/buffer_size_kb && echo 1 >{EVENTS}/enable")


def clear(guest: Guest) -> None:
    guest.sh(f"echo >{TRACING}/trace")


def events(guest: Guest, name: str) -> list[dict[str, str]]:
    """Returns the fields of each event of this name since the last clear().

    The key "" has all text after the event's name.
    """
    found = []
    for line in guest.get(f"{TRACING}/trace").decode().splitlines():
        match = re.search(rf": {name}: (.*)$", line)
        if match:
            fields = dict(word.split("=", 1) for word in match[1].split() if "=" in word)
            found.append(fields | {"": match[1]})
    return found


def boot(session: Session, kernel: Kernel, module: Path) -> tuple[Guest, dict[str, str], Daemon]:
    """Boots a guest that serves a disk with files; returns it, their SHA-256 and the daemon."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[data],
        files=programs(SPECIAL),
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    return guest, sums, daemon


def evict_and_list_blocks(guest: Guest, path: str) -> set[int]:
    """Evicts all pages of a file; returns the numbers of its blocks of 4 KiB on the disk."""
    pages = -(-int(guest.sh(f"stat -c %s {path}")) // PAGE)
    places = guest.sh(
        f"for i in $(seq 0 {PAGE} {(pages - 1) * PAGE}); do {SPECIAL} place {path} $i; done", 60
    )
    guest.sh("sync && echo 3 >/proc/sys/vm/drop_caches", 60)
    settle(guest)
    return {int(place) // PAGE for place in places.split()}


def test_put_and_get_events_match_the_counters(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums, _ = boot(session, kernel, module)
    path = next(iter(sums))
    pool = guest.disk("data")
    blocks = evict_and_list_blocks(guest, path)
    trace_on(guest)
    before = stats(guest)
    after = evict(guest, [path])
    puts = [put for put in events(guest, "tmem_put") if int(put["block"]) in blocks]
    assert all(put["pool"] == pool for put in puts)
    taken = [put for put in puts if put["reason"] == "puts"]
    assert 100 < len(taken) <= after["puts"] - before["puts"]
    assert {put["workingset"] for put in puts} <= {"0", "1"}

    clear(guest)
    before = stats(guest)
    assert checksums(guest, [path]) == {path: sums[path]}
    after = stats(guest)
    gets = [get for get in events(guest, "tmem_get") if int(get["block"]) in blocks]
    assert sum(int(get["wanted"]) for get in gets) == after["gets"] - before["gets"] > 100
    assert sum(int(get["hits"]) for get in gets) == after["hits"] - before["hits"] > 100
    assert all(get["pool"] == pool for get in gets)
    # No reader waits longer than the deadline. The bound has another second, because `wait_us`
    # includes copying and checking the pages.
    assert all(int(get["wait_us"]) <= (DEADLINE_MS + scaled(1.0) * 1000) * 1000 for get in gets)
    assert any(int(get["wait_us"]) > 0 for get in gets)


def test_invalidate_events_match_the_counters(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums, _ = boot(session, kernel, module)
    path, other = list(sums)[:2]
    pool = guest.disk("data")
    blocks = evict_and_list_blocks(guest, path)

    # A write erases the held pages of its blocks.
    evict(guest, [path])
    trace_on(guest)
    before = stats(guest)
    guest.sh(f"dd if=/dev/zero of={path} bs=64k count=1 conv=notrunc oflag=direct 2>/dev/null")
    after = stats(guest)
    cut = after["invalidations_block"] - before["invalidations_block"]
    gone = [gone for gone in events(guest, "tmem_invalidate") if int(gone["pages"])]
    assert {event["reason"] for event in gone} == {"invalidations_block"}
    assert all(event["pool"] == pool for event in gone)
    assert all({int(event["first"]), int(event["last"])} <= blocks for event in gone)
    assert sum(int(event["pages"]) for event in gone) == cut == 65536 // PAGE
    assert cut == before["index_pages"] - after["index_pages"]

    # An unmount causes only one event, which has the number of all erased pages.
    evict(guest, [other])
    held = stats(guest)["index_pages"]
    clear(guest)
    guest.sh("umount /mnt", 60)
    (all_gone,) = [
        event
        for event in events(guest, "tmem_invalidate")
        if event["reason"] == "invalidations_unmount"
    ]
    assert all_gone["pool"] == pool
    assert int(all_gone["pages"]) == held > 100


def test_breaker_and_reset_are_traced(session: Session, kernel: Kernel, test_module: Path) -> None:
    guest, sums, daemon = boot(session, kernel, test_module)
    evict(guest, list(sums)[:12])
    # Set the readahead to 128 KiB, the default of Linux 6.12. With the 8 MiB of Linux 7.2, too few
    # readaheads would be late to open the breaker.
    guest.sh("echo 128 >/sys/block/vda/queue/read_ahead_kb")
    trace_on(guest)

    daemon.pause()
    try:
        for path in list(sums)[:8]:
            guest.sh(f"cat {path} >/dev/null", 60)
            if state(guest) == "tripped":
                break
        assert state(guest) == "tripped", stats(guest)
        assert [event[""] for event in events(guest, "tmem_breaker")] == ["open"]
    finally:
        daemon.resume()
    wait_state(guest, "on")
    until(
        lambda: [event[""] for event in events(guest, "tmem_breaker")] == ["open", "closed"],
        10,
        "the breaker's second event",
    )

    # If the put ring is full, the event has that as the reason why a page was not put.
    set_parameter(guest, "inject_ring_full", "1")
    clear(guest)
    last = list(sums)[-1]
    guest.sh(f"cat {last} >/dev/null; echo 1 >/proc/sys/vm/drop_caches", 60)
    reasons = {put["reason"] for put in events(guest, "tmem_put")}
    assert reasons == {"puts_dropped_ring_full"}
    set_parameter(guest, "inject_ring_full", "0")


def test_poison_events_name_the_page(session: Session, kernel: Kernel, test_module: Path) -> None:
    guest, sums, _ = boot(session, kernel, test_module)
    path = next(iter(sums))
    blocks = evict_and_list_blocks(guest, path)
    evict(guest, [path])
    trace_on(guest)
    set_parameter(guest, "inject_corrupt", "1")
    assert checksums(guest, [path]) == {path: sums[path]}
    poisons = events(guest, "tmem_poison")
    assert poisons and len(poisons) == stats(guest)["mismatches"]
    assert all(int(poison["block"]) in blocks for poison in poisons)
    assert all("reason=content check" in poison[""] for poison in poisons)
    wait_state(guest, "poisoned")
