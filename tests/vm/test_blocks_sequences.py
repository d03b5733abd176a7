# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Changes of files that an enumeration of file system operations has missed before, with blocks=on.

The mode blocks=on hooks none of these operations. The control of the sequences that change only the
mapping of a file is the rule "a page of a file may be returned if its bytes are those of its last
transfer, and nobody has written this block since". The mode veto without the hooks of these
operations is this rule. It returns old bytes, because the file has another block by then.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import PATIENT, WHERE, Torture, driver_guest, programs, set_parameter, settle, stats
from test_direct_writes import boot as boot_direct
from test_direct_writes import check_faults
from test_files import boot as boot_files
from test_files import check_former_quota_file
from test_fs_errors import DATA as CONVERTED
from test_fs_errors import (
    NO_JOURNAL,
    PATH,
    SHUTDOWN_SECONDS,
    Below,
    check_failed_zero_range,
    full_image,
    page_after_failed_conversion,
    zeroes_unaligned_edges,
)
from test_fs_errors import PAGES as CONVERTED_PAGES

from harness.disk import FILE_SYSTEMS, Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

SPECIAL = "/bin/special"
PAGE = 4096
PAGES = 16
BLOCKS = f"verify_every=0 blocks=on {PATIENT}"
OLD = b"A" * PAGES * PAGE


def by_file(*hooks: str) -> str:
    """Returns the parameters of the control: the rule of the last transfer, without hooks."""
    return f"verify_every=0 blocks=veto {PATIENT} test_hooks_off={','.join(hooks)}"


def boot(session: Session, kernel: Kernel, module: Path, parameters: str, fs: str) -> Guest:
    return driver_guest(
        session,
        kernel,
        module,
        parameters=parameters,
        fs=FILE_SYSTEMS[fs],
        cpus=2,
        files=programs(SPECIAL),
    )


def drop(guest: Guest) -> None:
    guest.sh(f"sync; {SPECIAL} drain && echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)


def same(guest: Guest, path: str) -> bool:
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
    """Writes a file directly that shares its blocks, so that xfs gives it others."""
    source, path = f"{WHERE}/source", f"{WHERE}/clone"
    make_held(guest, source)
    guest.sh(f"{SPECIAL} clone {path} {source}")
    guest.get(path)
    drop(guest)
    guest.sh(
        f"dd if=/dev/zero of={path} bs={PAGE} count={PAGES} conv=notrunc oflag=direct 2>/dev/null"
    )
    assert same(guest, source)
    return same(guest, path)


def punch(guest: Guest) -> bool:
    """Removes blocks of a file whose pages were evicted."""
    path = f"{WHERE}/punched"
    make_held(guest, path)
    guest.sh(f"{SPECIAL} punch {path} {2 * PAGE} {4 * PAGE}")
    return same(guest, path)


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
        assert same(guest, changed) and same(guest, other)


def test_changes_of_the_mapping(session: Session, kernel: Kernel, module: Path) -> None:
    """Operations after which a file has other blocks, although nobody wrote the old ones."""
    guest = boot(session, kernel, module, BLOCKS, "xfs")
    assert write_shared_blocks(guest)
    assert punch(guest)
    write_from_mapping(guest)


def test_changes_of_the_mapping_are_missed_by_a_rule_for_files(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Negative control of test_changes_of_the_mapping."""
    guest = boot(session, kernel, test_module, by_file("direct", "truncate"), "xfs")
    assert not write_shared_blocks(guest)
    assert not punch(guest)


def test_failed_conversion(session: Session, kernel: Kernel, module: Path) -> None:
    below = Below.boot(session, kernel, module, *NO_JOURNAL, parameters=BLOCKS)
    assert page_after_failed_conversion(below) == bytes(PAGE)


def test_failed_conversion_is_missed_by_a_rule_for_files(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Negative control of test_failed_conversion."""
    below = Below.boot(session, kernel, test_module, *NO_JOURNAL, parameters=by_file("conversion"))
    assert page_after_failed_conversion(below) == CONVERTED


def abort_journal(session: Session, below: Below) -> bool:
    """Aborts the journal between a write and its conversion, so that the file keeps old extents.

    Returns whether reads then return what the disk has.
    """
    guest = below.guest
    session.expect_trouble()
    guest.sh(f"mount -o remount,errors=remount-ro {WHERE}", 60)
    below.write(0, CONVERTED_PAGES)
    guest.sh("/bin/dm data suspend")
    writing = below.write_back()
    # An error, after which the file system is read-only, aborts the journal.
    trigger = f"/sys/fs/ext4/{below.node[5:]}/trigger_fs_error"
    aborting = guest.start(f"echo error >{trigger}", 120)
    # Wait only for the begin of the abort, because its end needs the stopped disk.
    until(
        lambda: "trigger_test_error" in guest.sh("dmesg"),
        SHUTDOWN_SECONDS,
        "the journal is aborted",
    )
    below.go_on(below.whole(), writing)
    aborting.wait()
    guest.sh("echo 1 >/proc/sys/vm/drop_caches")
    settle(guest)
    done = guest.run(f"{SPECIAL} same {PATH}")
    assert done.status in (0, 1), done.text
    return done.status == 0


def test_aborted_journal(session: Session, kernel: Kernel, module: Path) -> None:
    assert abort_journal(session, Below.boot(session, kernel, module, parameters=BLOCKS))


def test_aborted_journal_is_missed_by_a_rule_for_files(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Negative control of test_aborted_journal."""
    parameters = by_file("conversion", "journal_abort", "fs_error")
    assert not abort_journal(
        session, Below.boot(session, kernel, test_module, parameters=parameters)
    )


@pytest.mark.parametrize("check", ["", "erase"])
def test_failed_direct_write(
    session: Session, kernel: Kernel, test_module: Path, check: str
) -> None:
    """Pages that were cached during a direct write are put only without the check `erase`."""
    guest = boot_direct(session, kernel, test_module, "ext4", parameters=BLOCKS)
    set_parameter(guest, "test_blocks_without", check)
    if not check:
        check_faults(guest)
        return
    with pytest.raises(AssertionError, match="does not read as the disk"):
        check_faults(guest)


def test_former_quota_file(session: Session, kernel: Kernel, test_module: Path) -> None:
    """The kernel writes a quota file below its page cache."""
    guest = boot_files(
        session, kernel, test_module, modules=["quota_v2"], mount="usrquota", parameters=BLOCKS
    )
    cases = ((True, False), (False, False), (False, True))
    check_former_quota_file(guest, "off", ("test_blocks_without", "forget"), cases)


def test_failed_zero_range(session: Session, kernel: Kernel, test_module: Path) -> None:
    """Zeroes in clean pages, which the disk does not have, are not put.

    They are without the comparison of a page with its record.
    """
    if not zeroes_unaligned_edges(kernel):
        pytest.skip(f"Linux {kernel.series} zeroes no part of a block before the conversion")
    guest = driver_guest(
        session,
        kernel,
        test_module,
        parameters=BLOCKS,
        cpus=2,
        disks=[Disk("data", full_image(session, PAGE))],
        files=programs(SPECIAL),
    )
    cases = ((True, False), (False, False))
    check_failed_zero_range(guest, PAGE, ("test_blocks_without", "equal"), cases)


@pytest.mark.parametrize("off", ["", "move_ext"])
def test_exchanged_extents(session: Session, kernel: Kernel, test_module: Path, off: str) -> None:
    """EXT4_IOC_MOVE_EXT exchanges blocks of files; a rule for files misses it."""
    parameters = by_file(off) if off else BLOCKS
    torture = Torture(boot(session, kernel, test_module, parameters, "ext4"), "--scenario=move_ext")
    if off:
        torture.must_mismatch()
    else:
        torture.finish()
