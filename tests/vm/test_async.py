# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Gets by block that no task waits for: right bytes, bounded, and gone before the module is.

The device of most tests is a Liar, which answers late, never, out of order or wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MAX_MS,
    MODULE,
    PATIENT,
    WHERE,
    Hold,
    LastingTorture,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    growth,
    load,
    programs,
    seed,
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
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DRIVER = "/sys/bus/virtio/drivers/virtio_tmem"
NOWAIT = "/bin/nowait"
# First kernel whose reads with RWF_NOWAIT start readahead.
NOWAIT_SINCE = (6, 12)
FILES = 8
PAGES = 64  # pages of a file
# Evicted last, so that it replaces the other files in the put ring, which the driver reads itself.
FILLER = f"{WHERE}/filler"
FILLER_PAGES = 1024
# Time that unloading may take in addition to the deadline.
UNLOAD_SECONDS = 20.0


def boot(session: Session, kernel: Kernel, module: Path, liar: Liar, parameters: str = "") -> Guest:
    parameters = f"verify_every=0 {parameters}"
    return driver_guest(
        session,
        kernel,
        module,
        Tmem(liar.path),
        parameters=parameters,
        cpus=2,
        files=programs(NOWAIT),
    )


def make(guest: Guest) -> dict[str, str]:
    """Makes files, evicts their pages to the host, and returns their checksums.

    A file fits the put ring, so that no put is dropped.
    """
    sums: dict[str, str] = {}
    guest.sh(f"dd if=/dev/urandom of={FILLER} bs=4k count={FILLER_PAGES} 2>/dev/null; sync", 60)
    for number in range(FILES):
        path = f"{WHERE}/f{number}"
        guest.sh(f"dd if=/dev/urandom of={path} bs=4k count={PAGES} 2>/dev/null; sync", 60)
        sums |= checksums(guest, [path])
        guest.sh("echo 1 >/proc/sys/vm/drop_caches")
        settle(guest)
    evict(guest, [FILLER])
    return sums


def evict_again(guest: Guest, paths: list[str]) -> None:
    evict(guest, [*paths, FILLER])


def in_flight(counters: dict[str, int]) -> int:
    ended = sum(counters[f"fetches_{how}"] for how in ("answered", "late"))
    return counters["fetches"] - ended


def wait_ended(guest: Guest) -> None:
    until(lambda: in_flight(stats(guest)) == 0, 30, "all fetches have ended")


@pytest.mark.smoke
def test_pages_come_by_interrupt_or_from_the_disk(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A slow host fills reads by the interrupt, and a silent one leaves them to the disk."""
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, module, liar, PATIENT)
        sums = make(guest)
        liar.delay_seconds = 0.02
        before = stats(guest)
        assert checksums(guest, list(sums)) == sums
        wait_ended(guest)
        grown = growth(before, stats(guest))
        print(grown)
        assert grown["fetches_answered"] > 0 and grown["hits"] > PAGES
        assert grown["fetches_late"] == 0

        liar.delay_seconds = 0.0
        evict_again(guest, list(sums))
        set_parameter(guest, "deadline_ms", "50")
        wait_state(guest, "on")
        liar.silent = frozenset({T_GET})
        before = stats(guest)
        assert checksums(guest, list(sums)) == sums
        wait_ended(guest)
        grown = growth(before, stats(guest))
        print(grown)
        assert grown["fetches_late"] > 0 and grown["fetches_disk"] > 0
        assert state(guest) == "tripped"
        liar.silent = frozenset()
        wait_state(guest, "on")


def test_answers_out_of_order_end_their_own_reads(
    session: Session, kernel: Kernel, module: Path
) -> None:
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, module, liar, PATIENT)
        sums = make(guest)
        liar.reverse = True
        liar.delay_seconds = 0.01
        before = stats(guest)
        readers = [
            guest.start(f"dd if={path} bs=4k skip={at} count=16 2>/dev/null | sha256sum", 60)
            for path in sums
            for at in range(0, PAGES, 32)
        ]
        for reader in readers:
            reader.wait().check()
        assert checksums(guest, list(sums)) == sums
        wait_ended(guest)
        assert liar.reversed > 0
        assert growth(before, stats(guest))["hits"] > 0


def test_fetches_wait_for_bounce_pages(session: Session, kernel: Kernel, module: Path) -> None:
    """More reads than bounce pages allow come from the host, or from the disk at the deadline."""
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, module, liar, PATIENT)
        sums = make(guest)
        liar.delay_seconds = 0.05

        def read_all() -> dict[str, int]:
            before = stats(guest)
            readers = " & ".join(f"sha256sum {path}" for path in sums)
            lines = guest.sh(f"{readers} & wait", 60).splitlines()
            assert sorted(line.split()[0] for line in lines) == sorted(sums.values())
            wait_ended(guest)
            grown = growth(before, stats(guest))
            print(grown)
            return grown

        grown = read_all()
        assert grown["fetches_waited"] > 0
        assert grown["fetches_no_room"] == 0 and grown["misses_bounce"] == 0
        assert grown["hits"] == grown["gets"] > FILES * PAGES / 2

        liar.delay_seconds = 0.0
        evict_again(guest, list(sums))
        liar.silent = frozenset({T_GET})
        grown = read_all()
        assert grown["fetches_waited"] > 0 and grown["hits"] == grown["ring_hits"]
        # When the host answers, the driver has free requests and bounce pages again.
        liar.silent = frozenset()
        wait_state(guest, "on")
        evict_again(guest, list(sums))
        grown = read_all()
        assert grown["hits"] > FILES * PAGES / 2


def test_readers_that_must_not_wait_get_pages(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A read with RWF_NOWAIT starts a get, does not wait for it, and a later one has the page."""
    if kernel.version < NOWAIT_SINCE:
        pytest.skip(f"a read with RWF_NOWAIT starts no read of Linux {kernel.series}")
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, module, liar, PATIENT)
        sums = make(guest)
        path = next(iter(sums))
        liar.delay_seconds = 0.2
        before = stats(guest)
        print(guest.sh(f"{NOWAIT} {path} 16"))
        wait_ended(guest)
        grown = growth(before, stats(guest))
        print(grown)
        assert grown["hits"] > 0 and grown["fetches_answered"] > 0
        words = guest.sh(f"{NOWAIT} {path} 16").split()
        assert int(words[words.index("again") + 1]) == 0
        liar.delay_seconds = 0.0
        assert checksums(guest, list(sums)) == sums


@pytest.mark.parametrize("how", ["rmmod", "unbind"])
def test_silent_host_does_not_delay_unloading(
    session: Session, kernel: Kernel, module: Path, how: str
) -> None:
    """Module and device go away with reads in flight, which then come from the disk."""
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, module, liar, PATIENT)
        sums = make(guest)
        wait_state(guest, "on")
        liar.silent = frozenset({T_GET})
        readers = [guest.start(f"sha256sum {path}", 60) for path in sums]
        until(lambda: liar.waiting_requests() > 0, 30, "the device has requests")
        name = guest.sh(f"cd {DRIVER} && echo virtio*").split()[0]
        command = "rmmod virtio_tmem" if how == "rmmod" else f"echo {name} >{DRIVER}/unbind"
        guest.sh(command, DEADLINE_MAX_MS / 1000 + scaled(UNLOAD_SECONDS))
        for reader, digest in zip(readers, sums.values(), strict=True):
            assert reader.wait().check().text.split()[0] == digest
        liar.silent = frozenset()
        if how == "rmmod":
            guest.insmod(MODULE, "verify_every=0")
        else:
            guest.sh(f"echo {name} >{DRIVER}/bind", 60)
        wait_state(guest, "on")
        assert checksums(guest, list(sums)) == sums


def test_suspend_ends_reads_in_flight(session: Session, kernel: Kernel, module: Path) -> None:
    """At a suspend, reads in flight end without the silent host, and the index becomes empty."""
    with Liar(session.directory / "liar") as liar:
        vm = driver_vm(session, kernel, module, Tmem(liar.path), cpus=2)
        guest = vm.start()
        load(guest, f"verify_every=0 {PATIENT}")
        sums = make(guest)
        wait_state(guest, "on")
        liar.silent = frozenset({T_GET})
        before = stats(guest)
        for path in sums:
            guest.start(f"sha256sum {path} >/tmp/{Path(path).name}")
        until(lambda: liar.waiting_requests() > 0, 30, "the device has requests")
        assert in_flight(stats(guest)) > 0
        guest = vm.suspend()
        liar.silent = frozenset()
        wait_state(guest, "on")
        assert in_flight(stats(guest)) == 0
        assert stats(guest)["generation_changes"] == before["generation_changes"] + 1
        until(lambda: guest.run("pidof sha256sum").status != 0, 60, "the readers have ended")
        for path, digest in sums.items():
            assert guest.read(f"/tmp/{Path(path).name}").split()[0] == digest
        assert checksums(guest, list(sums)) == sums
        evict_again(guest, list(sums))
        hits = stats(guest)["hits"]
        assert checksums(guest, list(sums)) == sums
        assert stats(guest)["hits"] > hits


@pytest.mark.smoke
def test_read_that_a_write_overtakes_has_the_written_bytes(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A block that is written after the request for it comes from the disk.

    The write goes to the disk itself, because the file system would wait for the reader.
    """
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, test_module, liar, PATIENT)
        sums = make(guest)
        path = next(iter(sums))
        guest.sh(f"dd if={path} of=/tmp/old bs=4k count=1 iflag=direct 2>/dev/null")
        content = guest.get("/tmp/old")
        image = (session.directory / "data.img").read_bytes()
        place = image.find(content)
        assert place > 0 and place % 4096 == 0 and image.find(content, place + 1) < 0
        new = os.urandom(4096)
        guest.put("/tmp/new", new)
        disk = f"/dev/{guest.disk('data')}"
        hold = Hold(guest, "fetch")
        before = stats(guest)
        reader = guest.start(f"dd if={path} bs=4k count=1 2>/dev/null | sha256sum", 60)
        hold.wait()
        guest.sh(f"dd if=/tmp/new of={disk} bs=4k seek={place // 4096} oflag=direct 2>/dev/null")
        hold.release()
        read = reader.wait().check().text.split()[0]
        assert read != guest.sh("sha256sum /tmp/old").split()[0]
        assert read == guest.sh("sha256sum /tmp/new").split()[0]
        assert growth(before, stats(guest))["fetches_disk"] == 1


def test_reads_without_memory_come_from_the_disk(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    with Liar(session.directory / "liar") as liar:
        guest = boot(session, kernel, test_module, liar)
        sums = make(guest)
        set_parameter(guest, "inject_nomem", "1")
        before = stats(guest)
        assert checksums(guest, list(sums)) == sums
        grown = growth(before, stats(guest))
        set_parameter(guest, "inject_nomem", "0")
        assert grown["fetches_no_memory"] > 0 and grown["gets"] == 0


@pytest.mark.smoke
def test_host_that_stops_under_load_causes_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The torture finds no wrong byte and no error while the daemon stops and continues."""
    daemon = start_daemon(session)
    guest = driver_guest(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        parameters="verify_every=0",
        cpus=2,
    )
    torture = LastingTorture(guest, seed(), "--ops=1500 --files=16 --size-max=524288 --jobs=2")
    for _ in range(4):
        hits = stats(guest)["hits"]
        until(lambda hits=hits: stats(guest)["hits"] > hits, 120, "pages come from the host")  # type: ignore[misc]
        daemon.pause()
        # Slow answers may have opened the breaker before. No read is late then.
        wait_state(guest, "tripped", 120)
        daemon.resume()
        # Hits in the put ring do not show that the breaker has closed.
        wait_state(guest, "on")
    torture.finish(guest)
    wait_ended(guest)
    wait_state(guest, "on")
    assert stats(guest)["fetches_late"] > 0
