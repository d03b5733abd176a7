# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Coherence by disk block: what the driver knows of a block from bios is what the disk has."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    MODULE,
    PATIENT,
    WHERE,
    Torture,
    driver_guest,
    programs,
    seed,
    set_parameter,
    settle,
    stats,
    wait_state,
)

from harness import disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SMALL = "--files=16 --size-max=524288"
SPECIAL = "/bin/special"
PAGE = 4096
PAGES = 16
OLD = b"A" * PAGES * PAGE


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    parameters: str = "verify_every=0",
    *,
    fs: str = "ext4",
    tmem: Tmem | None = None,
) -> Guest:
    return driver_guest(
        session,
        kernel,
        module,
        tmem,
        parameters=parameters,
        fs=disk.FILE_SYSTEMS[fs],
        cpus=2,
        files=programs(SPECIAL),
    )


def block_counters(guest: Guest) -> dict[str, int]:
    return {name: value for name, value in stats(guest).items() if name.startswith("blocks_")}


def check_writes_are_seen_twice(guest: Guest) -> None:
    """Fails unless two other hooks see each write if the hook of submit_bio() is off.

    The kernel calls one of them when a bio is queued, and the other when a request is issued.
    """
    writes = 200
    command = f"dd if=/dev/urandom of={WHERE}/f bs=4k count={writes} oflag=direct conv=notrunc"

    def unseen() -> int:
        before = block_counters(guest)["blocks_unseen"]
        guest.sh(f"{command} 2>/dev/null", 120)
        return block_counters(guest)["blocks_unseen"] - before

    unseen()  # allocates the blocks, so that later writes change no metadata
    assert unseen() == 0
    set_parameter(guest, "test_hooks_off", "bio")
    assert unseen() >= 2 * writes
    set_parameter(guest, "test_hooks_off", "")

    def put() -> bool:
        before = stats(guest)["puts"]
        guest.sh(f"cat {WHERE}/f >/dev/null && echo 1 >/proc/sys/vm/drop_caches", 60)
        return stats(guest)["puts"] > before

    until(put, 60, "the disk is drained, and pages are put again")


def test_bios_in_flight_delay_the_unload(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The module is unloaded and loaded under load, also without memory for bios."""
    guest = boot(session, kernel, test_module, "verify_every=8 inject_nomem=5")
    torture = Torture(guest, f"--seed={seed()} --ops=12000 {SMALL} --jobs=2 --no-evictor", 900)
    for _ in range(4):
        until(lambda: block_counters(guest)["blocks_read"] > 0, 60, "pages are recorded")
        guest.sh("rmmod virtio_tmem", 60)
        guest.insmod(MODULE, "verify_every=8 inject_nomem=5")
        wait_state(guest, "on")
    until(lambda: block_counters(guest)["blocks_nomem"] > 0, 60, "a read has no memory")
    set_parameter(guest, "inject_nomem", "1")
    until(lambda: block_counters(guest)["blocks_unseen"] > 0, 60, "a write has no memory")
    set_parameter(guest, "inject_nomem", "0")
    before = block_counters(guest)["blocks_read"]
    until(lambda: block_counters(guest)["blocks_read"] > before, 60, "pages are recorded again")
    torture.finish()
    assert block_counters(guest)["blocks_gets_wrong"] == 0


def test_writes_without_the_hook_of_submit_bio_are_seen_twice(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    check_writes_are_seen_twice(boot(session, kernel, test_module))


def drop(guest: Guest) -> None:
    guest.sh(f"sync; {SPECIAL} drain && echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)


def is_same(guest: Guest, path: str) -> bool:
    """Returns whether cached reads of a file return what the disk has, also after an eviction."""
    found = []
    for _ in range(2):
        found.append(guest.run(f"{SPECIAL} same {path}").status)
        drop(guest)
    assert set(found) <= {0, 1}
    return found == [0, 0]


def make_held(guest: Guest, path: str) -> None:
    guest.put(path, OLD)
    drop(guest)
    guest.get(path)
    drop(guest)
    before = stats(guest)["hits"]
    assert guest.get(path) == OLD
    assert stats(guest)["hits"] > before, f"{path} was not in the pool"
    drop(guest)


def write_shared_blocks(guest: Guest) -> bool:
    """Overwrites a file by direct I/O whose blocks another file has, so that xfs gives it others.

    Returns whether reads of the page cache then return the bytes of the disk.
    """
    source, path = f"{WHERE}/source", f"{WHERE}/clone"
    make_held(guest, source)
    guest.sh(f"{SPECIAL} clone {path} {source}")
    guest.get(path)
    drop(guest)
    guest.sh(
        f"dd if=/dev/zero of={path} bs={PAGE} count={PAGES} conv=notrunc oflag=direct 2>/dev/null"
    )
    assert is_same(guest, source)
    return is_same(guest, path)


def punch(guest: Guest) -> bool:
    """Removes blocks of a file whose pages were evicted.

    Returns whether reads of the page cache then return the bytes of the disk.
    """
    path = f"{WHERE}/punched"
    make_held(guest, path)
    guest.sh(f"{SPECIAL} punch {path} {2 * PAGE} {4 * PAGE}")
    return is_same(guest, path)


def write_from_mapping(guest: Guest) -> None:
    """Writes a file directly from the page cache of another file, and changes both afterwards."""
    source, path = f"{WHERE}/mapped", f"{WHERE}/written"
    make_held(guest, path)
    guest.sh(f"dd if=/dev/urandom of={source} bs={PAGE} count={PAGES} 2>/dev/null; sync {source}")
    content = guest.get(source)
    guest.sh(f"{SPECIAL} from-map {path} {source}")
    drop(guest)
    assert guest.get(path) == guest.get(source) == content
    drop(guest)
    for changed, other in ((source, path), (path, source)):
        guest.sh(f"dd if=/dev/zero of={changed} bs={PAGE} count=1 conv=notrunc 2>/dev/null")
        assert is_same(guest, changed) and is_same(guest, other)


def test_changes_of_the_mapping(session: Session, kernel: Kernel, module: Path) -> None:
    """Operations after which a file has other blocks, although nobody wrote the old ones."""
    guest = boot(session, kernel, module, f"verify_every=0 {PATIENT}", fs="xfs")
    assert write_shared_blocks(guest)
    assert punch(guest)
    write_from_mapping(guest)
