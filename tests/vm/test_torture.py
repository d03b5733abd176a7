# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Random and fixed operations on files never find an old byte, except if a check is removed.

Each run prints its seed; TMEM_SEED repeats it. The second half checks the tests themselves: without
a safety check or a hook of the driver, the same operations must find a wrong byte.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import (
    PATIENT,
    TORTURE,
    WHERE,
    Torture,
    driver_guest,
    evict,
    kept_pages,
    parameter,
    seed,
    set_parameter,
    state,
    stats,
    wait_blocked,
    wait_state,
)

from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Number of random operations of the main test, which takes half a minute. test_filesystems.py runs
# 20,000 on each file system, and `make shard NAME=long` runs for a given time.
OPERATIONS = 8_000
# Files are few and small, so that the same pages come and go often.
SMALL = "--files=16 --size-max=524288"
# Number of mounts of a run of the torture program with four rounds, at most.
MOUNTS_MAX = 8
# Period in which the tables of records are replaced, and how often they must be at least.
REPLACE_MS, REPLACED_MIN = 20, 20
# Arguments with which the torture program can unmount and mount the disk.
MOUNT = "--device=/dev/vda --fstype=ext4"

SCENARIOS = [
    "plain", "dirty", "split", "truncate", "punch", "shift", "direct", "move_ext", "bmap",
    "evict_inode", "inode", "unmount", "fadvise", "swap",
]  # fmt: skip

# Parameter that removes a safety check or a hook, its value, and the scenario that must
# then find a wrong byte.
BROKEN = [
    ("test_blocks_without", "forget", "direct"),
    ("test_blocks_without", "forget", "evict_inode"),
    ("test_blocks_without", "forget", "swap"),
    ("test_blocks_without", "erase", "bmap"),
    ("test_hooks_off", "fadvise", "fadvise"),
]

# Safety checks without which random operations soon find a wrong byte.
BROKEN_RANDOM = ["forget"]


def boot(session: Session, kernel: Kernel, module: Path, parameters: str, cpus: int = 2) -> Guest:
    return driver_guest(session, kernel, module, parameters=parameters, cpus=cpus)


@pytest.mark.smoke
def test_random_operations_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """Random operations, evictions and unmounts cause no wrong byte, and the cache has hits."""
    guest = boot(session, kernel, module, "verify_every=0 swap=1")
    arguments = f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 --rounds=4 {MOUNT}"
    numbers = Torture(guest, arguments, 900).finish()
    assert numbers["ops"] >= OPERATIONS
    counters = stats(guest)
    print(counters)
    assert counters["hits"] > OPERATIONS // 10
    assert counters["mismatches"] == 0
    for why in ("block", "unmount"):
        assert counters[f"invalidations_{why}"] > 0, f"no page was erased for the reason '{why}'"
    # A write that a mount began before its area was known counts as not seen.
    assert counters["blocks_unseen"] <= MOUNTS_MAX
    wait_state(guest, "on")


def test_readers_never_see_an_older_version_of_a_block(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """While others write a block, buffered or directly, readers see no older version of it."""
    guest = boot(session, kernel, module, "verify_every=0")
    arguments = f"--seed={seed()} --mode=versions --ops=20000 --mixed"
    Torture(guest, f"{arguments} --readers=3 --direct-readers=1").finish()
    counters = stats(guest)
    assert counters["hits"] > 100
    wait_state(guest, "on")


def test_tables_of_records_may_be_replaced_at_any_time(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Random operations cause no wrong byte while the tables are replaced all the time."""
    guest = boot(session, kernel, test_module, f"verify_every=0 test_replace_ms={REPLACE_MS}")
    Torture(guest, f"--seed={seed()} --ops={OPERATIONS} {SMALL} --jobs=2 {MOUNT}").finish()
    assert stats(guest)["hits"] > OPERATIONS // 100
    assert int(parameter(guest, "test_replaced")) > REPLACED_MIN
    wait_state(guest, "on")


@pytest.mark.smoke
def test_torture_scenarios_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest = boot(session, kernel, module, "verify_every=0")
    for scenario in SCENARIOS:
        numbers = Torture(guest, f"--scenario={scenario} {MOUNT}").finish()
        assert numbers["puts"] > 0, f"scenario {scenario} put no page, so it did not test the cache"
    wait_state(guest, "on")


@pytest.mark.smoke
def test_torture_scenario_finds_a_wrong_byte_if_a_check_is_removed(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Each check is needed: without it, its scenario finds a wrong byte."""
    # With retained pages, the driver itself would notice some faults and block the mount.
    guest = boot(session, kernel, test_module, f"verify_every=0 retain=N {PATIENT}")
    remount = "umount /mnt; mount -t ext4 /dev/vda /mnt"
    for name, value, scenario in BROKEN:
        set_parameter(guest, name, value)
        print(value, Torture(guest, f"--scenario={scenario} {MOUNT}").expect_mismatch())
        set_parameter(guest, name, "")
        # The remount removes wrong pages before the next run: it has a new super block and an empty
        # pool.
        guest.sh(remount, 60)
        Torture(guest, f"--scenario={scenario} {MOUNT}").finish()


def test_written_pages_are_erased_from_the_index_before_their_eviction(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The write of a block erases its entry, and a page that only becomes dirty does not."""
    guest = boot(session, kernel, test_module, "verify_every=0")
    path, pages = f"{WHERE}/f", 64
    write = f"dd if=/dev/zero of={path} bs=4096 count={pages} conv=notrunc"
    guest.sh(f"dd if=/dev/urandom of={path} bs=4096 count={pages} conv=fsync 2>/dev/null")
    for removed in (False, True):
        set_parameter(guest, "test_blocks_without", "forget" if removed else "")
        before = evict(guest, [path])
        assert before["index_pages"] >= pages
        guest.sh(f"echo 0 >/proc/sys/vm/dirty_writeback_centisecs; {write} 2>/dev/null")
        assert stats(guest)["index_pages"] >= before["index_pages"]
        guest.sh(f"sync {path}")
        after = stats(guest)
        forgotten = 0 if removed else pages
        assert before["index_pages"] - after["index_pages"] == forgotten
        assert after["invalidations_block"] - before["invalidations_block"] == forgotten


@pytest.mark.parametrize("check", BROKEN_RANDOM)
def test_random_operations_detect_each_removed_check(
    session: Session, kernel: Kernel, test_module: Path, check: str
) -> None:
    """Random operations find a wrong byte without a check that right contents depend on."""
    parameters = f"verify_every=0 retain=N {PATIENT} test_blocks_without={check}"
    guest = boot(session, kernel, test_module, parameters)
    arguments = f"--seed={seed()} --ops=50000 --files=16 --size-max=262144 --no-evictor"
    print(Torture(guest, arguments, 600).expect_mismatch())


def test_equal_seeds_give_equal_operations(session: Session, kernel: Kernel, module: Path) -> None:
    """Equal seeds give equal operations, with and without evictions: failures can be repeated."""
    guest = boot(session, kernel, module, "verify_every=0")
    runs = []
    for parameters in ("", "--no-evictor"):
        command = f"{TORTURE} --seed=77 --ops=1500 --jobs=2 {parameters} --replay=1:5 /mnt"
        lines = guest.sh(command, 120).splitlines()
        runs.append([line for line in lines if line.startswith("replay: ")])
        guest.sh("rmmod virtio_tmem || true", 60)
    assert len(runs[0]) > 10
    assert runs[0] == runs[1]


def test_dropped_puts_leave_no_old_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If the driver drops a put, because of a full ring or no memory, no old page remains."""
    faults = "inject_ring_full=3 inject_nomem=7"
    guest = boot(session, kernel, test_module, f"verify_every=0 {faults}")
    Torture(guest, f"--seed={seed()} --ops=5000 {SMALL} --jobs=2").finish()
    counters = stats(guest)
    assert counters["puts_dropped_ring_full"] > 100
    assert counters["puts_dropped_nomem"] > 100
    assert counters["hits"] > 100
    wait_state(guest, "on")


def test_corrupt_page_switches_the_cache_off(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If a page from the host is corrupt, the driver uses neither it nor later pages from there."""
    guest = boot(session, kernel, test_module, "verify_every=0 inject_corrupt=50")
    Torture(guest, f"--seed={seed()} --ops=3000 {SMALL} --jobs=2").finish()
    assert state(guest).startswith("poisoned: content check")
    counters = stats(guest)
    assert counters["mismatches"] > 0
    assert counters["misses_check"] > 0
    # The answer with the corrupt page may have had further pages, which were right and count as
    # hits.
    assert counters["hits"] < 50 + 2 * 64
    assert "check the host" in guest.sh("dmesg")


def test_verification_finds_a_removed_check(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Without a check, a comparison with the disk finds a wrong page, and blocks the mount."""
    guest = boot(session, kernel, test_module, "test_blocks_without=forget retain=N verify_every=1")
    Torture(guest, "--scenario=direct").finish()
    wait_blocked(guest, "a page from the host differs from the disk")
    # The mount stays blocked: the driver neither puts nor gets pages, and all bytes are right.
    before = stats(guest)
    Torture(guest, "--scenario=plain").finish()
    after = stats(guest)
    assert kept_pages(after) == kept_pages(before)
    assert after["hits"] == before["hits"]
    assert guest.run(f"{TORTURE} --scenario=direct /mnt").status == 0
