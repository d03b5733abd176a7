# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Records of disk blocks: what the driver knows of a block from bios is what the disk has.

The tests that compare records with the disk switch the present gets off, so that each page is read
by a bio.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    MODULE,
    WHERE,
    Torture,
    driver_guest,
    seed,
    set_parameter,
    stats,
    wait_state,
)

from harness import disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

NO_GETS = "test_hooks_off=readahead,read_folio"
SMALL = "--files=16 --size-max=524288"
OPERATIONS = 6_000
# Number of mounts of a run of the torture program with four rounds, at most.
MOUNTS_MAX = 8
SCENARIOS = [
    "plain", "dirty", "split", "truncate", "punch", "shift", "direct", "move_ext", "bmap",
    "evict_inode", "inode", "unmount", "swap",
]  # fmt: skip


def boot(
    session: Session, kernel: Kernel, module: Path, parameters: str, fs: str = "ext4"
) -> Guest:
    return driver_guest(
        session,
        kernel,
        module,
        parameters=f"verify_every=0 {parameters}",
        fs=disk.FILE_SYSTEMS[fs],
        cpus=2,
    )


def device(guest: Guest) -> str:
    return f"--device=/dev/{guest.disk('data')}"


def blocks(guest: Guest) -> dict[str, int]:
    return {name: value for name, value in stats(guest).items() if name.startswith("blocks_")}


def check_writes_are_seen_twice(guest: Guest) -> None:
    """Fails unless two other hooks see each write if the hook of submit_bio() is off.

    The kernel calls one of them when a bio is queued, and the other when a request is issued.
    """
    writes = 200
    command = f"dd if=/dev/urandom of={WHERE}/f bs=4k count={writes} oflag=direct conv=notrunc"

    def unseen() -> int:
        before = blocks(guest)["blocks_unseen"]
        guest.sh(f"{command} 2>/dev/null", 120)
        return blocks(guest)["blocks_unseen"] - before

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


@pytest.mark.smoke
@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_records_equal_the_disk(
    session: Session, kernel: Kernel, test_module: Path, fs: str
) -> None:
    """A page whose block a get would serve has the bytes that the disk returns."""
    guest = boot(session, kernel, test_module, f"blocks=shadow {NO_GETS}", fs)
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4"
    Torture(guest, f"{arguments} {device(guest)} --fstype={fs}", 900).finish()
    counters = blocks(guest)
    print(counters)
    assert counters["blocks_gets_wrong"] == 0
    assert counters["blocks_gets_equal"] > OPERATIONS // 10
    assert counters["blocks_read"] > 0 and counters["blocks_written"] > 0
    # A write that a mount began before its area was known counts as not seen.
    assert counters["blocks_unseen"] <= MOUNTS_MAX


@pytest.mark.smoke
def test_records_that_no_write_erases_differ_from_the_disk(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The comparison can fail: it finds records that were not erased."""
    guest = boot(session, kernel, test_module, f"blocks=shadow {NO_GETS} test_blocks_without=erase")
    Torture(guest, f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2", 900).finish()
    assert blocks(guest)["blocks_gets_wrong"] > 0


def test_veto_finds_no_wrong_byte_and_keeps_hits(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest = boot(session, kernel, module, "blocks=veto")
    Torture(guest, f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2", 900).finish()
    counters = stats(guest)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["puts_skipped_block"] > 0
    wait_state(guest, "on")


def test_bios_in_flight_delay_the_unload(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The module is unloaded and loaded under load, also without memory for bios."""
    guest = boot(session, kernel, test_module, f"blocks=shadow {NO_GETS} inject_nomem=5")
    torture = Torture(guest, f"--seed={seed()} --ops=12000 {SMALL} --jobs=2 --no-evictor", 900)
    for _ in range(4):
        until(lambda: blocks(guest)["blocks_read"] > 0, 60, "pages are recorded")
        guest.sh("rmmod virtio_tmem", 60)
        guest.insmod(MODULE, f"blocks=shadow {NO_GETS} inject_nomem=5")
        wait_state(guest, "on")
    until(lambda: blocks(guest)["blocks_nomem"] > 0, 60, "a read has no memory")
    set_parameter(guest, "inject_nomem", "1")
    until(lambda: blocks(guest)["blocks_unseen"] > 0, 60, "a write has no memory")
    set_parameter(guest, "inject_nomem", "0")
    before = blocks(guest)["blocks_read"]
    until(lambda: blocks(guest)["blocks_read"] > before, 60, "pages are recorded again")
    torture.finish()
    assert blocks(guest)["blocks_gets_wrong"] == 0


@pytest.mark.smoke
@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_gets_by_block_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path, fs: str
) -> None:
    """Random operations cause no wrong byte although no function of a file system is hooked.

    One read in eight is compared with the disk.
    """
    guest = boot(session, kernel, module, "blocks=on verify_every=8", fs)
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4"
    Torture(guest, f"{arguments} {device(guest)} --fstype={fs}", 900).finish()
    counters = stats(guest)
    print(counters)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["blocks_gets_equal"] > OPERATIONS // 100
    assert counters["verify_mismatches"] == 0
    assert counters["invalidations_block"] > 0
    assert counters["invalidations_truncate"] == counters["invalidations_direct"] == 0
    wait_state(guest, "on")


@pytest.mark.smoke
def test_scenarios_by_block_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Each change of a file that a hook had to report gives right bytes without the hook."""
    guest = boot(session, kernel, module, "blocks=on")
    for scenario in SCENARIOS:
        numbers = Torture(guest, f"--scenario={scenario} {device(guest)} --fstype=ext4").finish()
        assert numbers["puts"] > 0, f"scenario {scenario} put no page, so it did not test the cache"


def test_writes_without_the_hook_of_submit_bio_are_seen_twice(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    check_writes_are_seen_twice(boot(session, kernel, test_module, "blocks=on"))


def test_readers_by_block_never_see_an_older_version(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While others write a block, buffered or directly, readers see no older version of it."""
    guest = boot(session, kernel, module, "blocks=on")
    arguments = f"--seed={seed()} --mode=versions --ops=20000 --mixed"
    Torture(guest, f"{arguments} --readers=3 --direct-readers=1").finish()
    assert stats(guest)["hits"] > 100
