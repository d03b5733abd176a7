# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Retained pages: a page that is evicted again unchanged needs no copy, and no byte is ever wrong.

The device of these guests has retain=on. Contents are compared with the files that the host wrote
to the disk.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from driver import (
    ONLINE_SECONDS,
    PATIENT,
    SETTLE_SECONDS,
    WHERE,
    Hold,
    Torture,
    checksums,
    driver_guest,
    evict,
    growth,
    programs,
    seed,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_blocked,
    wait_served,
    wait_state,
)
from liar import LIES_OF_REFS, Liar
from test_driver import FILE_BYTES, overwrite, tree_disk
from test_filesystems import mount_arguments
from test_guest_command import COMMAND, command
from test_mounts import Mount
from test_ring import hold_feeder
from test_torture import SMALL

from harness.disk import FILE_SYSTEMS
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PAGE = 4096
PAGES = FILE_BYTES // PAGE
# Number of files of a test. Their pages do not fit into the put ring, so gets reach the host.
FILES = 8
# Number of pages of a file in large folios.
FOLIOS_PAGES = 64
SPECIAL = "/bin/special"
TRACING = "/sys/kernel/tracing"
ADDED = f"{TRACING}/events/filemap/mm_filemap_add_to_page_cache"
DRIVER = "/sys/bus/virtio/drivers/virtio_tmem"
# The driver is in fallback above this number of GONE answers in the last 1,024.
GONE_MAX = 1024 // 16
# A driver in fallback uses retained pages again after this many gets, if the host loses none.
RECOVERY_GETS = 4096
CHANGED = "a clean page changed while the host kept it"


def device(socket: Path) -> Tmem:
    return Tmem(socket, properties={"retain": "on"})


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    tmem: Tmem | None = None,
    *,
    parameters: str = "verify_every=0",
    files: int = FILES,
    memory_bytes: int = 256 * MIB,
) -> tuple[Guest, dict[str, str]]:
    """Boots a guest that serves a disk with files; returns it and the SHA-256 of some files."""
    if tmem is None:
        tmem = device(start_daemon(session).socket("vm1"))
    data, sums = tree_disk(session)
    guest = driver_guest(
        session,
        kernel,
        module,
        tmem,
        parameters=f"{PATIENT} {parameters}",
        disks=[data],
        files={**programs(SPECIAL), **command()},
        memory_bytes=memory_bytes,
    )
    return guest, dict(list(sums.items())[:files])


def evict_file(guest: Guest, path: str) -> dict[str, int]:
    """Evicts the pages of one file with fadvise. Returns the driver's counters.

    The caller has set test_hooks_off=fadvise.
    """
    guest.sh(f"{SPECIAL} dontneed {path}", 60)
    settle(guest)
    return settle_refs(guest)


def drop(guest: Guest) -> dict[str, int]:
    """Evicts all clean pages, and returns the driver's counters when the host has answered."""
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches", 60)
    settle(guest)
    return settle_refs(guest)


def settle_refs(guest: Guest) -> dict[str, int]:
    """Waits until all references are sent and answered; returns the driver's counters."""
    counters: dict[str, int] = {}

    def settled() -> bool:
        nonlocal counters
        counters = stats(guest)
        ends = ("held", "gone", "unanswered", "dropped", "unneeded")
        return counters["refs"] == sum(counters[f"refs_{end}"] for end in ends)

    until(settled, SETTLE_SECONDS, "the host answers all references")
    return counters


def retain(guest: Guest, sums: dict[str, str]) -> dict[str, int]:
    """Evicts files one by one and reads them back, so that the host retains their pages.

    Returns the driver's counters.
    """
    evict(guest, list(sums))
    settle_refs(guest)
    assert checksums(guest, list(sums)) == sums
    counters = stats(guest)
    assert counters["index_retained_pages"] >= PAGES * len(sums) * 3 // 4, counters
    return counters


def check_right(guest: Guest, sums: dict[str, str]) -> Counter[str]:
    """Evicts and reads the files twice, and checks their bytes; returns the counters' growth."""
    before = stats(guest)
    for _ in range(2):
        drop(guest)
        assert checksums(guest, list(sums)) == sums
    wait_state(guest, "on")
    after = stats(guest)
    assert after["retained_changed"] == after["mismatches"] == 0
    return growth(before, after)


@pytest.mark.smoke
def test_unchanged_pages_need_no_copy_when_they_are_evicted_again(
    session: Session, kernel: Kernel, module: Path
) -> None:
    daemon = start_daemon(session)
    guest, sums = boot(session, kernel, module, device(daemon.socket("vm1")))
    before = retain(guest, sums)
    assert before["requests_get"] > 0
    for _ in range(2):
        after = drop(guest)
        grown = growth(before, after)
        # A page that was missed is copied.
        retained = before["index_retained_pages"]
        assert grown["refs"] == retained
        assert grown["puts"] <= PAGES * FILES - retained + FILES
        assert grown["refs_held"] + grown["refs_unneeded"] == retained
        assert grown["refs_held"] > retained // 2
        assert grown["requests_ref"] >= grown["refs_held"] // 64
        assert after["index_retained_pages"] == 0
        assert checksums(guest, list(sums)) == sums
        before = stats(guest)
        assert before["index_retained_pages"] >= retained * 9 // 10
        assert before["retained_changed"] == before["refs_gone"] == 0
    assert daemon.stats()["pool"]["retained_pages"] > 0


def test_full_batches_of_references_need_no_feeder_thread(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Full batches of references are sent and answered while the feeder thread does not run."""
    guest, sums = boot(session, kernel, test_module)
    before = retain(guest, sums)
    hold = hold_feeder(guest)  # evicts all clean pages

    def answered() -> bool:
        grown = growth(before, stats(guest))
        return grown["refs"] - grown["refs_held"] - grown["refs_unneeded"] < 64

    until(answered, SETTLE_SECONDS, "the host answers all full batches of references")
    hold.release()
    assert growth(before, settle_refs(guest))["refs"] >= before["index_retained_pages"]
    assert checksums(guest, list(sums)) == sums


@pytest.mark.smoke
def test_changed_retained_pages_are_put_as_copies(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A page that is written, truncated or punched while the host retains it is put as a copy."""
    guest, sums = boot(session, kernel, module)
    retain(guest, sums)
    written, cut, punched, removed = list(sums)[:4]

    held = stats(guest)["index_retained_pages"]
    sums[written] = overwrite(guest, written)
    assert stats(guest)["index_retained_pages"] <= held - PAGES * 3 // 4
    before = stats(guest)
    assert growth(before, drop(guest))["puts"] >= PAGES * 3 // 4
    check_right(guest, sums)

    content = bytearray(guest.get(cut))
    size = len(content)
    guest.sh(f"truncate -s {size // 2 + 100} {cut} && truncate -s {size} {cut}")
    content[size // 2 + 100 :] = bytes(size - size // 2 - 100)
    sums[cut] = hashlib.sha256(content).hexdigest()

    content = bytearray(guest.get(punched))
    guest.sh(f"{SPECIAL} punch {punched} 5000 20000")
    content[5000:25000] = bytes(20000)
    sums[punched] = hashlib.sha256(content).hexdigest()

    guest.sh(f"rm {removed}")
    del sums[removed]
    check_right(guest, sums)


def test_page_with_the_end_of_the_file_is_retained(
    session: Session, kernel: Kernel, module: Path
) -> None:
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, _ = boot(session, kernel, module, device(liar.path))
        others = [f"{WHERE}/f{number:02}" for number in range(8, 16)]
        for size in (10 * PAGE, 10 * PAGE + 100):
            path = f"{WHERE}/end{size}"
            guest.sh(f"head -c {size} /dev/urandom >{path} && sync")
            # Other files are put for the first time. They fill the put ring, so that the get of the
            # file reaches the host.
            evict(guest, [path, *others[:4]])
            del others[:4]
            before, allowed = stats(guest), liar.retainable
            guest.sh(f"cat {path} >/dev/null")
            grown = growth(before, stats(guest))
            pages = -(-size // PAGE)
            assert grown["hits"] == pages and grown["ring_hits"] == 0
            assert grown["index_retained_pages"] == grown["retained_hits"] == pages
            assert liar.retainable - allowed == pages
            grown = growth(before, drop(guest))
            assert (grown["refs"], grown["puts"]) == (pages, 0)
            # Bytes behind the old end of the file are zeroes.
            content = guest.get(path)
            guest.sh(f"truncate -s {11 * PAGE} {path}")
            assert guest.get(path) == content + bytes(11 * PAGE - size)
            drop(guest)
            assert guest.get(path) == content + bytes(11 * PAGE - size)


def test_no_reference_is_sent_for_written_dropped_or_refused_pages(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A write and an unmount erase retained entries. No reference follows fadvise or a policy."""
    guest, sums = boot(session, kernel, module)
    before = retain(guest, sums)
    direct, advised, never, *_ = list(sums)
    # Write directly the bytes that the file already has.
    guest.sh(f"dd if={direct} of=/tmp/b bs={PAGE} count=1 2>/dev/null")
    guest.sh(f"dd if=/tmp/b of={direct} bs={PAGE} count=1 oflag=direct conv=notrunc 2>/dev/null")
    after = stats(guest)
    assert before["index_retained_pages"] - after["index_retained_pages"] == 1
    guest.sh(f"{SPECIAL} dontneed {advised}", 60)
    grown = growth(after, settle_refs(guest))
    assert grown["refs"] == grown["puts"] == 0
    guest.sh(f"{COMMAND} policy {never} never", 60)
    last = stats(guest)
    grown = growth(last, drop(guest))
    assert grown["refs"] <= last["index_retained_pages"]
    assert grown["puts_dropped_policy"] >= PAGES * 3 // 4
    check_right(guest, sums)

    before = retain(guest, dict(list(sums.items())[3:]))
    guest.sh(f"umount {WHERE}", 60)
    after = settle_refs(guest)
    assert after["index_retained_pages"] == after["index_pages"] == 0
    assert after["refs"] == before["refs"]
    guest.sh(f"mount -t ext4 /dev/{guest.disk('data')} {WHERE}", 60)
    assert checksums(guest, list(sums)) == sums


def test_wrong_answers_to_references_cause_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """If the device does not answer a reference with HELD, the page is read from the disk."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, module, device(liar.path))
        for lie in LIES_OF_REFS:
            before = retain(guest, sums)
            liar.lie, told = lie, liar.lies_told
            grown = growth(before, drop(guest))
            liar.lie = ""
            counter = "refs_gone" if lie == "ref-gone" else "refs_unanswered"
            assert liar.lies_told > told and grown["refs_held"] == 0
            assert grown[counter] > before["index_retained_pages"] // 2, f"lie '{lie}': {grown}"
            sectors = guest.disk_stat("data").read_sectors
            assert checksums(guest, list(sums)) == sums
            assert guest.disk_stat("data").read_sectors - sectors >= grown[counter] * 8
            assert stats(guest)["misses_host"] == before["misses_host"]
            # Bind the device again: in a new generation the driver forgets these wrong answers, and
            # the host retains pages again.
            guest.sh(
                f"cd {DRIVER} && name=$(ls -d virtio*) && echo $name >unbind && echo $name >bind",
                60,
            )
            wait_state(guest, "on")
            wait_served(guest)


def test_page_that_the_host_does_not_retain_is_put_as_a_copy(
    session: Session, kernel: Kernel, module: Path
) -> None:
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, module, device(liar.path))
        before = evict(guest, list(sums))
        liar.lie = "forget"
        assert checksums(guest, list(sums)) == sums
        after = stats(guest)
        grown = growth(before, after)
        assert grown["hits"] > PAGES and liar.retainable > PAGES
        # Pages that were in the put ring stay retained, because no get of them reached the host.
        assert after["index_retained_pages"] <= grown["ring_hits"]
        check_right(guest, sums)


def test_page_that_the_host_does_not_retain_leaves_no_entry_if_later_pages_are_erased(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A get of two parts erases the entries of its first part, although its second one has none.

    The two parts are in neighbouring units of 64 blocks of the index. The entries of the second
    part are erased between the check whether they are in the index and the get.
    """
    part = 32
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, test_module, device(liar.path))
        guest.sh("for i in /sys/block/vd*/queue/read_ahead_kb; do echo 512 >$i; done")
        path = next(iter(sums))
        before = evict(guest, list(sums))
        assert before["index_retained_pages"] == 0
        # The second part begins with a block whose number is a multiple of 64.
        first = (part - int(guest.sh(f"{SPECIAL} place {path} 0")) // PAGE) % (2 * part)
        liar.lie = "forget"
        set_parameter(guest, "inject_erased_late", "2")
        read = f"bs={2 * part * PAGE} count=1 iflag=skip_bytes skip={first * PAGE}"
        guest.sh(f"dd if={path} of=/dev/null {read} 2>/dev/null", 60)
        set_parameter(guest, "inject_erased_late", "0")
        after = stats(guest)
        grown = growth(before, after)
        assert grown["gets"] == 2 * part and grown["hits"] == grown["misses_index"] == part
        assert liar.retainable == part
        assert after["index_retained_pages"] == 0
        liar.lie = ""
        check_right(guest, sums)


def test_driver_puts_copies_while_references_find_no_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Above 64 GONE answers of the last 1,024, the host retains only pages of a sample of gets."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, test_module, device(liar.path), files=12)
        retain(guest, sums)
        # While the hook for fadvise is off, POSIX_FADV_DONTNEED evicts the pages of one file, and
        # the driver puts them or sends references to them.
        set_parameter(guest, "test_hooks_off", "fadvise")
        liar.lie = "ref-gone"
        path = next(iter(sums))
        before = evict_file(guest, path)
        assert GONE_MAX < before["refs_gone"] <= PAGES
        liar.lie = ""

        assert checksums(guest, [path]) == {path: sums[path]}
        after = evict_file(guest, path)
        grown = growth(before, after)
        assert grown["puts"] >= PAGES // 2, grown
        assert grown["retained_hits"] <= PAGES // 2, grown

        # The references to the pages of the sample are answered with HELD, which ends the fallback.
        recovered = False
        for _ in range(RECOVERY_GETS // PAGES):
            assert checksums(guest, [path]) == {path: sums[path]}
            last, after = after, evict_file(guest, path)
            if recovered := growth(last, after)["refs"] >= PAGES * 3 // 4:
                break
        assert recovered, growth(before, after)
        set_parameter(guest, "test_hooks_off", "")
        before = retain(guest, sums)
        assert growth(before, drop(guest))["refs"] == before["index_retained_pages"]


def boot_with_small_index(
    session: Session, kernel: Kernel, module: Path
) -> tuple[Guest, dict[str, str], dict[str, int]]:
    """Boots a guest whose index has three quarters retained and one quarter held entries.

    Returns the guest, the SHA-256 of the files with retained pages, and the driver's counters. An
    eighth of the index's memory, which includes the table, is less than that of the retained
    entries.
    """
    # With little memory, the guest has a small index, which few files fill.
    guest, sums = boot(
        session,
        kernel,
        module,
        parameters="verify_every=0 admission=off",
        files=21,
        memory_bytes=160 * MIB,
    )
    evict(guest, list(sums))
    settle_refs(guest)
    some = dict(list(sums.items())[:16])
    assert checksums(guest, list(some)) == some
    before = stats(guest)
    retained = before["index_retained_pages"]
    held = before["index_pages"] - retained
    assert retained > 10 * PAGES and held > 4 * PAGES
    assert retained * 8 > before["index_bytes"] // 8
    return guest, some, before


def test_full_index_erases_retained_entries_first(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    guest, some, before = boot_with_small_index(session, kernel, test_module)
    retained = before["index_retained_pages"]
    set_parameter(guest, "test_index_bytes", str(before["index_bytes"]))
    # Put files for the first time, without evicting other files, until the index is full.
    set_parameter(guest, "test_hooks_off", "fadvise")
    for number in range(21, 24):
        guest.sh(f"cat {WHERE}/f{number} >/dev/null")
        evict_file(guest, f"{WHERE}/f{number}")
        if stats(guest)["retained_evicted"] > 0:
            break
    # The evictor frees 3/16 of the index's memory without the hash table.
    until(
        lambda: stats(guest)["retained_evicted"] > retained // 8,
        30,
        "the driver erases retained entries",
    )
    grown = growth(before, settle_refs(guest))
    assert grown["index_evicted"] == 0
    set_parameter(guest, "test_index_bytes", "0")
    # The pages whose entries were erased are copied.
    before = stats(guest)
    for path in some:
        after = evict_file(guest, path)
    assert growth(before, after)["puts"] > retained // 8
    assert checksums(guest, list(some)) == some
    wait_state(guest, "on")


def test_changed_retained_page_blocks_the_mount(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver blocks the mount of the page, and reports the page to the host."""
    daemon = start_daemon(session)
    guest, sums = boot(session, kernel, test_module, device(daemon.socket("vm1")))
    session.expect_trouble()
    retain(guest, sums)
    set_parameter(guest, "inject_retained_changed", "100")
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    wait_blocked(guest, CHANGED)
    after = stats(guest)
    assert 1 <= after["retained_changed"] <= PAGES * FILES // 100 + 1
    assert after["mismatches"] == after["retained_changed"]

    def reported() -> bool:
        driver = daemon.stats()["vms"][0]["driver"]
        return bool(driver["state"] == "on" and driver["mismatches"] > 0)

    until(reported, SETTLE_SECONDS, "tmemd reports the mismatch")
    assert checksums(guest, list(sums)) == sums


def test_read_gets_no_page_after_its_mount_was_blocked(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A wrong page of one file stops a read of another file, whose pages the host has returned.

    The control is a read beside which no page is wrong.
    """
    guest, sums = boot(session, kernel, test_module, files=2)
    session.expect_trouble()
    path, wrong = sums
    mount = Mount(guest, WHERE)
    for blocked in (False, True):
        evict(guest, [path, wrong])
        settle_refs(guest)
        assert checksums(guest, [wrong]) == {wrong: sums[wrong]}
        assert stats(guest)["index_retained_pages"] > 0
        read = Hold(guest, "fetch")
        job = guest.start(f"sha256sum {path}", 120)
        read.wait()
        if blocked:
            set_parameter(guest, "inject_retained_changed", "1")
            guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
            set_parameter(guest, "inject_retained_changed", "0")
            wait_blocked(guest, CHANGED)
        hits, sectors = mount.count("hits"), guest.disk_stat("data").read_sectors
        read.release()
        done = job.wait()
        assert done.text.split()[0] == sums[path]
        assert (mount.count("hits") > hits) != blocked
    assert guest.disk_stat("data").read_sectors - sectors >= PAGES * 3 // 4 * 8


def test_changed_retained_page_reveals_a_removed_check(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If a write does not erase entries, the driver finds a changed page at its eviction."""
    guest, sums = boot(session, kernel, test_module)
    session.expect_trouble()
    retain(guest, sums)
    set_parameter(guest, "test_blocks_without", "forget")
    path = next(iter(sums))
    sums[path] = overwrite(guest, path)
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches", 60)
    wait_blocked(guest, CHANGED)
    assert checksums(guest, list(sums)) == sums


def test_retained_page_is_not_requested(session: Session, kernel: Kernel, module: Path) -> None:
    """The entry of a page that was dropped stays retained, and a read of the page is no get.

    At the next eviction of the page, the driver sends a reference.
    """
    guest, sums = boot(session, kernel, module)
    path = next(iter(sums))
    before = retain(guest, {path: sums[path]})
    guest.sh(f"{SPECIAL} dontneed {path}", 60)
    assert checksums(guest, [path]) == {path: sums[path]}
    grown = growth(before, stats(guest))
    assert grown["gets"] == grown["refs"] == grown["index_retained_pages"] == 0, grown
    grown = growth(before, drop(guest))
    assert grown["refs"] == before["index_retained_pages"] and grown["retained_changed"] == 0
    assert checksums(guest, [path]) == {path: sums[path]}


def test_hole_punched_in_a_retained_page_keeps_the_cache_on(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A punch with blocks smaller than a page zeroes a part of a clean page.

    The page then differs from its record. It is not put, and does not count as changed: the cache
    stays on, and reads return the zeroes.
    """
    guest = driver_guest(
        session,
        kernel,
        module,
        device(start_daemon(session).socket("vm1")),
        fs=FILE_SYSTEMS["xfs-1k"],
        parameters=f"verify_every=0 {PATIENT}",
        cpus=2,
        files=programs(SPECIAL),
    )
    path = f"{WHERE}/f"
    content = bytearray(b"0123456789abcde\n" * (16 * PAGE // 16))
    guest.sh(f"yes 0123456789abcde | head -c {len(content)} >{path} && sync")
    evict(guest, [path])
    guest.sh(f"cat {path} >/dev/null")
    before = stats(guest)
    assert before["index_retained_pages"] == 16
    guest.sh(f"{SPECIAL} punch {path} {PAGE + 1024} 1024")
    content[PAGE + 1024 : PAGE + 2048] = bytes(1024)
    grown = growth(before, drop(guest))
    assert grown["refs"] == 15 and grown["retained_changed"] == 0, grown
    assert guest.get(path) == bytes(content)
    wait_state(guest, "on")
    assert drop(guest)["retained_changed"] == 0
    assert guest.get(path) == bytes(content)


def test_late_answers_to_references_do_not_erase_newer_puts(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The driver ignores answers GONE for pages that were written and put after the reference."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, test_module, device(liar.path))
        set_parameter(guest, "test_hooks_off", "fadvise")
        path = next(iter(sums))
        retain(guest, {path: sums[path]})
        # The last page is not written. So the object of these blocks (a part of the disk) keeps an
        # entry in the index, and the new pages have the same keys as the old ones. The driver frees
        # an object without entries, and the next one has another number.
        new = random.Random(path).randbytes((PAGES - 1) * PAGE)
        sums[path] = hashlib.sha256(new + guest.get(path)[len(new) :]).hexdigest()
        guest.put("/tmp/new", new)
        liar.lie = "ref-late"
        before = stats(guest)
        guest.sh(f"{SPECIAL} dontneed {path}", 60)
        guest.sh(f"dd if=/tmp/new of={path} bs={PAGE} conv=notrunc,fsync 2>/dev/null", 60)
        guest.sh(f"{SPECIAL} dontneed {path}", 60)
        grown = growth(before, stats(guest))
        assert grown["refs"] >= PAGES * 3 // 4 and grown["puts"] >= PAGES * 3 // 4
        assert grown["puts_stored"] == 0
        liar.lie = "ref-gone"
        settle(guest)
        grown = growth(before, settle_refs(guest))
        liar.lie = ""
        # The written pages were invalidated before the answer, so GONE does not count for them.
        assert grown["refs_unneeded"] >= grown["refs"] - 1 and grown["refs_gone"] <= 1
        before = stats(guest)
        assert checksums(guest, [path]) == {path: sums[path]}
        assert growth(before, stats(guest))["hits"] >= PAGES * 3 // 4
        check_right(guest, sums)


def test_reference_sent_after_a_newer_put_changes_no_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """If references come after newer puts of the same pages, the host keeps the newer pages."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, test_module, device(liar.path))
        path, other, pages = f"{WHERE}/few", next(iter(sums)), 40
        # The last page is not written. So the object of these blocks (a part of the disk) keeps an
        # entry in the index, and the new pages have the same keys as the old ones. The driver frees
        # an object without entries, and the next one has another number.
        written = pages - 1
        guest.sh(f"dd if=/dev/urandom of={path} bs={PAGE} count={pages} 2>/dev/null; sync")
        evict(guest, [path])
        guest.sh(f"cat {path} >/dev/null")
        assert stats(guest)["index_retained_pages"] == pages
        hold = hold_feeder(guest)  # evicts all clean pages
        before = stats(guest)
        assert before["refs"] == pages and before["requests_ref"] == 0
        new = f"conv=notrunc,fsync of={path} bs={PAGE} count={written}"
        guest.sh(f"dd if=/dev/urandom {new} 2>/dev/null")
        digest = checksums(guest, [path])
        # The pages of the second file fill the batch with the new pages of the first one, and the
        # batch is sent without the feeder.
        set_parameter(guest, "test_hooks_off", "fadvise")
        guest.sh(f"{SPECIAL} dontneed {path}; cat {other} >/dev/null; {SPECIAL} dontneed {other}")
        hold.release()
        settle(guest)
        after = settle_refs(guest)
        assert liar.outdated == after["refs_unneeded"] == written
        assert after["refs_gone"] == 0
        assert checksums(guest, [path]) == digest
        assert growth(after, stats(guest))["hits"] == pages
        check_right(guest, sums)


def test_late_answer_to_a_get_leaves_no_index_entry(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The entries of a get that is not answered in time are erased, and the answer adds none."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, module, device(liar.path))
        before = evict(guest, list(sums))
        liar.lie = "late"
        # After some late gets, the breaker opens. Pages that gets do not bring come from the disk.
        assert checksums(guest, list(sums)) == sums
        after = stats(guest)
        grown = growth(before, after)
        assert grown["misses_late"] > 0
        # Pages of the put ring stay retained, because no get reached the host.
        assert after["index_retained_pages"] <= grown["ring_hits"]
        path = next(iter(sums))
        sums[path] = overwrite(guest, path)
        gets, liar.lie = liar.gets, ""
        until(lambda: liar.gets > gets, SETTLE_SECONDS, "the host answers the gets")
        wait_state(guest, "on")
        assert stats(guest)["index_retained_pages"] <= after["index_retained_pages"]
        check_right(guest, sums)


def test_pages_whose_references_were_dropped_are_still_returned(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver drops references that the host does not take in time, and keeps the entries."""
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(session, kernel, module, device(liar.path), files=14)
        before = retain(guest, sums)
        liar.lie = "ref-late"
        guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
        dropped = growth(before, stats(guest))["refs_dropped"]
        liar.lie = ""
        settle(guest)
        after = settle_refs(guest)
        assert dropped > 0 and growth(before, after)["refs_gone"] == 0
        assert checksums(guest, list(sums)) == sums
        hits = growth(after, stats(guest))["hits"]
        assert hits >= before["index_retained_pages"]
        check_right(guest, sums)


def test_new_daemon_gets_no_reference_meant_for_the_previous_daemon(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A new generation erases retained entries, and drops references that wait to be sent."""
    daemon = start_daemon(session)
    guest, sums = boot(session, kernel, test_module, device(daemon.socket("vm1")))

    def replace_daemon() -> None:
        changes = stats(guest)["generation_changes"]
        daemon.kill()
        daemon.start()
        # The generation changes twice: at the end of the old daemon, and when the new one connects.
        until(
            lambda: stats(guest)["generation_changes"] >= changes + 2,
            ONLINE_SECONDS,
            "the driver uses the new daemon",
        )
        wait_state(guest, "on")

    before = retain(guest, sums)
    replace_daemon()
    after = drop(guest)
    assert growth(before, after)["refs"] == 0
    # The put ring has no room for all of these pages at once, so some of the puts are dropped.
    assert growth(before, after)["puts"] >= PAGES
    assert checksums(guest, list(sums)) == sums

    # The pages of this file do not fill the last batch.
    path = f"{WHERE}/part"
    guest.sh(f"dd if=/dev/urandom of={path} bs={PAGE} count={PAGES - 20} 2>/dev/null; sync")
    sums[path] = checksums(guest, [path])[path]
    # Evict the other files first, so that the put ring has room for the pages of this one.
    drop(guest)
    retain(guest, {path: sums[path]})
    hold = hold_feeder(guest)
    before = stats(guest)
    waiting = before["refs"] - before["refs_held"] - before["refs_unneeded"]
    assert 0 < waiting < 64
    replace_daemon()
    hold.release()
    grown = growth(before, settle_refs(guest))
    assert grown["refs_dropped"] == waiting and grown["requests_ref"] == 0, grown
    check_right(guest, sums)


def boot_with_retained_folios(
    session: Session, kernel: Kernel, module: Path
) -> tuple[Guest, str, bytearray, dict[int, int]]:
    """Boots a guest with an xfs, and makes the host retain the pages of a file in large folios.

    Returns the guest, path and content of the file, and the number of pages of each folio by its
    first page.
    """
    guest = driver_guest(
        session,
        kernel,
        module,
        device(start_daemon(session).socket("vm1")),
        fs=FILE_SYSTEMS["xfs"],
        parameters=f"verify_every=0 {PATIENT}",
        files=programs(SPECIAL),
    )
    path = f"{WHERE}/f"
    content = random.Random(path).randbytes(FOLIOS_PAGES * PAGE)
    guest.put(path, content)
    guest.sh("sync")
    evict(guest, [path])
    # The kernel makes large folios from the second readahead of a file on.
    guest.sh(f"echo 128 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    guest.sh(f"echo >{TRACING}/trace && echo 1 >{ADDED}/enable")
    assert guest.get(path) == content
    guest.sh(f"echo 0 >{ADDED}/enable")
    assert stats(guest)["index_retained_pages"] == FOLIOS_PAGES
    found = re.findall(r" ofs=(\d+) order=(\d+)", guest.get(f"{TRACING}/trace").decode())
    return guest, path, bytearray(content), {int(at) // PAGE: 1 << int(n) for at, n in found}


def test_hole_in_a_retained_folio_erases_only_the_page_of_the_hole(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A hole splits a large folio with retained pages. Only the page of the hole is erased."""
    guest, path, content, folios = boot_with_retained_folios(session, kernel, module)
    hole = next(first + 1 for first, pages in folios.items() if pages >= 4)
    before = stats(guest)
    guest.sh(f"{SPECIAL} punch {path} {hole * PAGE} {PAGE}")
    content[hole * PAGE : (hole + 1) * PAGE] = bytes(PAGE)
    grown = growth(before, drop(guest))
    assert grown["refs"] == FOLIOS_PAGES - 1 and grown["retained_changed"] == 0, grown
    assert guest.get(path) == content
    wait_state(guest, "on")


def test_no_reference_is_sent_for_a_folio_with_a_hwpoison_page(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver does not read a page with a memory error (hwpoison) when its folio is evicted.

    The program has a reference to the folio, so that the kernel cannot split it and leaves it in
    the page cache.
    """
    guest, path, content, folios = boot_with_retained_folios(session, kernel, module)
    first, pages = next(item for item in folios.items() if item[1] >= 4)
    before = stats(guest)
    done = guest.run(f"{SPECIAL} damage {path} {first + 1}")  # the kernel may end the program
    if b"MADV_HWPOISON" in done.stderr:
        pytest.skip(f"Linux {kernel.series} is built without CONFIG_MEMORY_FAILURE")
    guest.sh(f"{SPECIAL} cached {path} {first}")
    grown = growth(before, drop(guest))
    assert grown["refs"] == FOLIOS_PAGES - pages, grown
    assert grown["puts_skipped_folio"] >= pages and grown["puts"] == 0, grown
    assert guest.get(path) == content
    wait_state(guest, "on")


def test_driver_uses_retain_only_if_its_parameter_is_set(
    session: Session, kernel: Kernel, module: Path
) -> None:
    with Liar(session.directory / "liar", retain=True) as liar:
        guest, sums = boot(
            session, kernel, module, device(liar.path), parameters="verify_every=0 retain=N"
        )
        evict(guest, list(sums))
        assert checksums(guest, list(sums)) == sums
        counters = drop(guest)
        assert counters["hits"] > PAGES
        assert counters["refs"] == counters["retained_hits"] == liar.retainable == 0


@pytest.mark.parametrize("name", ["ext4", "xfs", "xfs-1k"])
def test_random_operations_with_retained_pages_find_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path, name: str
) -> None:
    guest = driver_guest(
        session,
        kernel,
        module,
        device(start_daemon(session).socket("vm1")),
        fs=FILE_SYSTEMS[name],
        cpus=2,
        memory_bytes=320 * MIB,
    )
    arguments = f"--seed={seed()} --ops=8000 {SMALL} --jobs=2 --rounds=2 {mount_arguments(name)}"
    Torture(guest, arguments, 900).finish()
    counters = settle_refs(guest)
    print(counters)
    assert counters["refs_held"] > 100
    assert counters["retained_changed"] == counters["mismatches"] == 0
    wait_state(guest, "on")
