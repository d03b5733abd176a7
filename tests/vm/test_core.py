# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the driver's core under faults of memory, the daemon, the device and the machine.

No byte may be wrong: contents are compared with the files that the host wrote to the disk. Each
test also reads the counter of the check that must detect its fault. This shows that no other check
detected the fault. For example, an answer with a wrong cookie must be counted as such, and must not
reach the content check.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from driver import (
    DEADLINE_MS,
    MODULE,
    SYSFS,
    WHERE,
    checksums,
    driver_guest,
    driver_vm,
    evict,
    growth,
    is_on,
    limit_index,
    load,
    programs,
    set_parameter,
    settle,
    start_daemon,
    state,
    stats,
    wait_state,
)
from liar import LIES_OF_GETS, LIES_OF_POOLS, LIES_OF_PUTS, Liar
from shared_fixtures import Tree
from test_driver import FILE_BYTES, tree_disk
from test_mounts import Mount

from harness import disk
from harness.daemon import Daemon
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import ROOT
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DEADLINE = f"deadline_ms={DEADLINE_MS} verify_every=0"
DRIVER = "/sys/bus/virtio/drivers/virtio_tmem"
SPECIAL = "/bin/special"
PAGES = FILE_BYTES // 4096  # number of pages of a file
# Pages of the file by which wait_served() finds that a mount is served. The pool has them until
# their blocks are written.
SERVED_PAGES = 16
# A file of this size has more pages than the index of a guest with 160 MiB of RAM has room for.
LARGE_FILE_MIB = 2560
# A swap file that can hold an image of the guest's memory, and its beginning, which is cached.
SWAP_FILE_BYTES = 256 * MIB
SWAP_CACHED_MIB = 8


def reload(guest: Guest, parameters: str = "", *, until_state: str = "on") -> None:
    """Unloads the module if it is loaded, and loads it."""
    guest.sh("if grep -q ^virtio_tmem /proc/modules; then rmmod virtio_tmem; fi", 60)
    guest.insmod(MODULE, f"{DEADLINE} {parameters}")
    wait_state(guest, until_state)


def drop_pages(guest: Guest) -> None:
    """Makes the guest's kernel evict all clean pages."""
    guest.sh("sync; echo 1 >/proc/sys/vm/drop_caches", 60)


def check_works(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that evicted pages have right bytes and come from the host and from the put ring."""
    before = evict(guest, list(sums))
    assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert after["hits"] - before["hits"] > PAGES * len(sums) // 2
    assert after["ring_hits"] - before["ring_hits"] < after["hits"] - before["hits"]


def budget(guest: Guest) -> int:
    """Returns the driver's memory limit in bytes: 1 % of RAM and 2 MiB."""
    kib = int(guest.sh("grep ^MemTotal: /proc/meminfo").split()[1])
    return kib * 1024 // 100 + 2 * MIB


def devices(guest: Guest) -> tuple[list[str], list[str]]:
    """Returns the names of the tmem devices that the driver is bound to, and of all others."""
    names = guest.sh("grep -l 0x003f /sys/bus/virtio/devices/*/device").split()
    found = sorted(path.split("/")[-2] for path in names)
    bound = [name for name in found if guest.run(f"test -e {DRIVER}/{name}").status == 0]
    return bound, [name for name in found if name not in bound]


def test_driver_without_a_device_puts_nothing(
    session: Session, kernel: Kernel, module: Path
) -> None:
    data, sums = tree_disk(session)
    guest = driver_vm(session, kernel, module, None, disks=[data]).start()
    guest.mount("data", "/mnt")
    for _ in range(2):
        reload(guest, until_state="off")
        assert state(guest) == "off: no device"
        for _ in range(2):
            assert checksums(guest, list(sums)[:8]) == dict(list(sums.items())[:8])
            drop_pages(guest)
        counters = stats(guest)
        assert counters["puts"] == counters["gets"] == counters["index_pages"] == 0
        assert counters["blocks_read"] == 0, "the driver recorded reads without a device"
        assert counters["memory_bytes"] < budget(guest) // 8, (
            "the driver allocated rings or bounce pages without a device"
        )
    guest.sh("rmmod virtio_tmem")
    assert guest.run(f"test -e {SYSFS}").status != 0
    assert guest.sh("grep tmem /proc/slabinfo || true") == ""


def test_second_device_is_refused_until_the_first_is_removed(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The driver refuses a second device as busy, and uses it after the first one is removed."""
    daemon = start_daemon(session, "vm1", "vm2")
    data, sums = tree_disk(session)
    files = dict(list(sums.items())[:8])
    second = f"socket,id=tmem2,path={daemon.socket('vm2')},reconnect-ms=100"
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[data],
        arguments=["-chardev", second, "-device", "vhost-user-tmem-pci,chardev=tmem2"],
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    (first,), (other,) = devices(guest)
    assert (
        f"{other}: the device is not used: this guest has a virtio-tmem device already"
        in guest.sh("dmesg")
    )
    refused = guest.run(f"echo {other} >{DRIVER}/bind")
    assert refused.status != 0
    assert b"busy" in refused.stderr
    check_works(guest, files)

    held = evict(guest, list(files))
    assert held["index_pages"] > PAGES
    guest.sh(f"echo {first} >{DRIVER}/unbind", 60)
    assert state(guest) == "off: no device"
    assert stats(guest)["index_pages"] == 0
    assert stats(guest)["memory_bytes"] < held["memory_bytes"] // 8
    assert checksums(guest, list(files)) == files
    guest.sh(f"echo {other} >{DRIVER}/bind")
    wait_state(guest, "on")
    check_works(guest, files)
    assert devices(guest) == ([other], [first])


def trip(guest: Guest, daemon: Daemon, sums: dict[str, str]) -> None:
    """Stops the daemon, so that readers reach the deadline and the breaker opens."""
    before = stats(guest)
    wait_state(guest, "on")
    daemon.pause()
    assert checksums(guest, list(sums)) == sums
    after = stats(guest)
    assert after["trips"] == before["trips"] + 1
    assert after["late"] - before["late"] >= 3
    assert state(guest) == "tripped"


def test_device_with_fewer_queues_than_configured_is_used(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """A generic front end may offer fewer queues than the daemon's configuration says."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(daemon.socket("vm1"), num_queues=3),
        disks=[data],
        parameters="verify_every=0 inject_more_queues=1",
    )
    assert "the host's VMM offers 3 request queues only" in guest.sh("dmesg", 60)
    check_works(guest, sums)
    reload(guest, "inject_more_queues=1")
    check_works(guest, sums)
    assert stats(guest)["mismatches"] == 0


def test_injected_faults_and_limits_cause_no_wrong_byte(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Injected faults, exceeded limits and late answers cause no wrong byte and no leak."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    files = dict(list(sums.items())[:8])
    vm = driver_vm(session, kernel, test_module, Tmem(daemon.socket("vm1")), disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0")

    # While the breaker is open, the guest reads files from the disk, and the entries of their pages
    # stay in the index. If a put of such a page is dropped, it must erase the entry. Late answers
    # must release their bounce pages; otherwise the four rounds would use up all bounce pages.
    for fault in ("ring_full", "nomem", "ring_full", "nomem"):
        evict(guest, list(files))
        trip(guest, daemon, files)
        before = stats(guest)
        assert before["index_pages"] > PAGES * 4, (
            "too few pages are in the index for the injected fault to have an effect"
        )
        set_parameter(guest, f"inject_{fault}", "1")
        drop_pages(guest)
        after = stats(guest)
        dropped = f"puts_dropped_{fault}"
        assert after[dropped] - before[dropped] >= PAGES * len(files)
        assert after["puts"] == before["puts"]
        assert after["index_pages"] <= SERVED_PAGES
        set_parameter(guest, f"inject_{fault}", "0")
        daemon.resume()
        wait_state(guest, "on")
        sectors = guest.disk_stat("data").read_sectors
        assert checksums(guest, list(files)) == files
        assert guest.disk_stat("data").read_sectors - sectors >= PAGES * len(files) * 8
        assert stats(guest)["hits"] == after["hits"]
        check_works(guest, files)
    counters = stats(guest)
    assert counters["misses_bounce"] + counters["mismatches"] == 0

    check_index_limit(guest, sums)
    check_cookies(guest, sums)
    check_corruption(guest, files)


def test_index_limit_holds_while_all_processors_change_the_index(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """Processors that enter and erase entries at the same time never exceed the index's limit.

    Afterwards, all memory has been returned to the limit, on whichever processor it was taken.
    """
    # The limit in bytes is less than half of the memory that the entries of all files need.
    processors, files, limit = 4, 400, 14 << 10
    guest = driver_guest(
        session,
        kernel,
        test_module,
        parameters="verify_every=0 admission=off",
        cpus=processors,
    )
    directories = [f"/mnt/{number}" for number in range(processors)]
    for directory in directories:
        guest.sh(
            f"mkdir {directory} && cd {directory} && for i in $(seq {files}); do"
            " dd if=/dev/zero of=$i bs=8192 count=1 2>/dev/null; done; sync",
            120,
        )
    table = limit_index(guest, limit)
    before = stats(guest)
    # Each task drops files of all directories while the other tasks read and drop files.
    readers = "\n".join(
        f"(for round in $(seq 4); do cat {directory}/* >/dev/null;"
        " echo 1 >/proc/sys/vm/drop_caches; done) &"
        for directory in directories
    )
    job = guest.start(f"{readers}\nwait", 300)
    most = 0
    while not job.done():
        most = max(most, stats(guest)["index_bytes"])
    job.wait().check()
    grown = growth(before, settle(guest))
    assert table + limit // 2 < most <= table + limit
    assert grown["puts"] > processors * files
    assert grown["puts_dropped_index_full"] > 0 and grown["index_evicted"] > 0

    guest.sh(f"echo 0 >{SYSFS}/fs/ext4/enabled", 60)
    until(lambda: stats(guest)["index_bytes"] == table, 10, "the index has released all its memory")
    assert stats(guest)["index_pages"] == 0


def check_index_limit(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that the index stays within its memory limit by dropping its oldest entries."""
    reload(guest, "admission=off")
    empty = stats(guest)["memory_bytes"]
    ((name,), _) = devices(guest)
    guest.sh(f"echo {name} >{DRIVER}/unbind", 60)
    table = stats(guest)["memory_bytes"]
    guest.sh(f"echo {name} >{DRIVER}/bind")
    wait_state(guest, "on")
    limit = 12288  # limit of the index in bytes; entries of all files need three times as much
    set_parameter(guest, "test_index_bytes", str(table + limit))
    for path in sums:
        counters = evict(guest, [path])
        assert counters["memory_bytes"] <= empty + limit
    assert counters["puts_dropped_index_full"] > 0
    assert counters["index_evicted"] > 0
    assert 0 < counters["index_pages"] < PAGES * len(sums) // 2
    last = list(sums)[-1:]
    # Evict the last file again. If the index became full at its first eviction, some entries of
    # this file could not be stored. Now the index has room.
    before = evict(guest, last)
    assert checksums(guest, last) == {last[0]: sums[last[0]]}
    assert growth(before, stats(guest))["hits"] > PAGES // 4, (
        "too few pages of the file that was evicted last were hits"
    )
    assert checksums(guest, list(sums)) == sums

    guest.sh("umount /mnt", 60)
    until(lambda: stats(guest)["memory_bytes"] == empty, 10, "the index has released all memory")
    guest.mount("data", "/mnt")
    set_parameter(guest, "test_index_bytes", "0")
    check_works(guest, sums)


def check_cookies(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that the driver drops all entries when it has used all cookies, and starts again."""
    reload(guest, "test_cookies=500")
    held = []
    for path in sums:
        held.append(evict(guest, [path])["index_pages"])
        wait_state(guest, "on")
    counters = stats(guest)
    assert counters["puts_dropped_cookies"] > 0
    assert counters["invalidations_generation"] > PAGES
    assert counters["generation_changes"] == 1
    assert PAGES < max(held) <= 500
    assert checksums(guest, list(sums)) == sums
    for path in list(sums)[:8]:
        evict(guest, [path])
        wait_state(guest, "on")
        assert checksums(guest, [path]) == {path: sums[path]}
    after = stats(guest)
    assert after["mismatches"] == 0
    assert after["hits"] - counters["hits"] > PAGES
    assert after["invalidations_generation"] > counters["invalidations_generation"]


def check_corruption(guest: Guest, files: dict[str, str]) -> None:
    """Checks that a corrupted page switches the cache off until the module is loaded again."""
    reload(guest)
    evict(guest, list(files))
    set_parameter(guest, "inject_corrupt", "100")
    assert checksums(guest, list(files)) == files
    set_parameter(guest, "inject_corrupt", "0")
    counters = stats(guest)
    assert counters["misses_check"] == counters["mismatches"] > 0
    assert state(guest).startswith("poisoned: content check")
    drop_pages(guest)
    assert checksums(guest, list(files)) == files
    after = stats(guest)
    assert (after["puts"], after["hits"]) == (counters["puts"], counters["hits"])
    # The cache stays off after the device is unbound from the driver and bound again.
    ((name,), _) = devices(guest)
    guest.sh(f"echo {name} >{DRIVER}/unbind && echo {name} >{DRIVER}/bind", 60)
    assert state(guest).startswith("poisoned: content check")
    reload(guest)
    check_works(guest, files)


# Configuration of mke2fs for a file whose blocks are allocated as written ones, without writing
# them.
LARGE_FILE_CONFIG = """
[fs_types]
ext4 = {{
    features = has_journal,extent,huge_file,flex_bg,metadata_csum,64bit,dir_nlink,extra_isize
    inode_size = 256
    make_hugefiles = true
    num_hugefiles = 1
    hugefiles_name = file
    hugefiles_digits = 0
    hugefiles_size = {mib}M
    hugefiles_slack = 64M
    zero_hugefiles = false
}}
"""


def make_large_disk(session: Session, mib: int) -> Disk:
    """Creates a disk with a file of `mib` MiB, whose image takes little disk space."""
    config = session.directory / "mke2fs.conf"
    config.write_text(LARGE_FILE_CONFIG.format(mib=mib))
    image = disk.blank(session.directory / "large.img", (mib + mib // 16 + 256) * MIB)
    # With few inodes, the guest writes little when it initializes their tables.
    options = ["-b", "4096", "-N", "16384", "-J", "size=8", "-E", "root_owner=0:0"]
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", *options, str(image)],
        env={**os.environ, "MKE2FS_CONFIG": str(config)},
        check=True,
    )
    return Disk("large", image)


@pytest.mark.parametrize(
    ("memory", "retain"),
    [(160 * MIB, "off"), (160 * MIB, "on"), (3072 * MIB, "off")],
    ids=["small", "retaining", "large"],
)
def test_driver_memory_is_bounded(
    session: Session, kernel: Kernel, module: Path, memory: int, retain: str
) -> None:
    """The driver's memory is bounded in guests of all sizes, also when the index is full.

    With retained pages, the driver may use an entry for each page of RAM in addition, and does so.
    """
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    large = [] if memory > 256 * MIB else [make_large_disk(session, LARGE_FILE_MIB)]
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(
            daemon.socket("vm1"),
            num_queues=1 if memory < 256 * MIB else 16,
            properties={"retain": retain},
        ),
        disks=[data, *large],
        memory_bytes=memory,
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    basic = limit = budget(guest)
    if retain == "on":
        limit += memory // 512
        ((name,), _) = devices(guest)
        guest.sh(f"echo {name} >{DRIVER}/unbind && echo {name} >{DRIVER}/bind", 60)
        wait_state(guest, "on")
    assert stats(guest)["memory_bytes"] <= limit * 3 // 4, (
        "the driver's memory leaves less than a quarter of the limit for the index"
    )
    # The files do not fit into the put rings of the large guest, so pages come from the host.
    check_works(guest, sums)
    if memory < 256 * MIB:
        # The file has more pages than the driver's index has room for.
        guest.mount("large", "/large")
        job = guest.start("while cat /large/file >/dev/null; do :; done", 300)
        most = 0

        def full() -> bool:
            nonlocal most
            counters = stats(guest)
            assert counters["memory_bytes"] <= limit
            most = max(most, counters["memory_bytes"])
            return counters["index_evicted"] > 0

        until(full, 240, "the index is full")
        job.kill()
        job.wait()
        assert most > basic or retain == "off"
    assert stats(guest)["memory_bytes"] <= limit
    assert checksums(guest, list(sums)) == sums


def slab_bytes(guest: Guest, cache: str) -> int:
    """Returns the bytes of a slab cache, including the unused ones."""
    slabs, order = (
        int(guest.sh(f"cat /sys/kernel/slab/{cache}/{name}").split()[0])
        for name in ("slabs", "order")
    )
    return slabs * 4096 << order


def test_held_page_costs_the_documented_index_bytes(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A held page uses TMEM_INDEX_PAGE_BYTES of memory, by the driver's and the slab's counts."""
    source = (ROOT / "guest-driver/core/leaf.h").read_text()
    found = re.search(r"#define TMEM_INDEX_PAGE_BYTES\s+(\d+)", source)
    assert found
    stated = int(found[1])
    guest = driver_guest(session, kernel, module)
    before = stats(guest)
    slab_before = slab_bytes(guest, "tmem_leaf_64")
    # The file is read in steps that fit into the put ring, so that each page is put and each leaf
    # of the index is full.
    mib = 128
    guest.sh(f"dd if=/dev/zero of=/mnt/large bs=1M count={mib} 2>/dev/null; sync", 120)
    guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
    read = "dd if=/mnt/large of=/dev/null bs=1M count=1 skip=$i 2>/dev/null"
    drop = "echo 1 >/proc/sys/vm/drop_caches"
    answered = "$(($(cat puts_stored) + $(cat puts_refused) + $(cat puts_unanswered)))"
    settled = f"until [ $(cat puts) -eq {answered} ]; do :; done"
    step = f"{read}; {drop}; {settled}"
    guest.sh(f"cd {SYSFS}/stats; i=0; while [ $i -lt {mib} ]; do {step}; i=$((i+1)); done", 300)
    after = settle(guest)
    pages = after["index_pages"] - before["index_pages"]
    assert pages > mib * 256 * 9 // 10
    counted = (after["index_bytes"] - before["index_bytes"]) / pages
    allocated = (slab_bytes(guest, "tmem_leaf_64") - slab_before) / pages
    print(f"{pages} pages, {counted:.2f} bytes counted, {allocated:.2f} allocated for leaves")
    assert 8 < counted <= stated
    assert 8 < allocated <= stated


def slab_use(guest: Guest, prefix: str) -> int:
    """Returns the bytes of the used objects in the slab caches whose names begin with `prefix`."""
    lines = guest.sh(f"grep ^{prefix} /proc/slabinfo").splitlines()
    return sum(int(line.split()[1]) * int(line.split()[3]) for line in lines)


# Size of a file whose pages are used one by one, and their distance. Each is in a leaf of its own,
# and few leaves share an XArray node.
SCATTERED_MIB, SCATTERED_DISTANCE_MIB = 60 << 10, 16
SCATTERED_PAGES = SCATTERED_MIB // SCATTERED_DISTANCE_MIB
SCATTERED_PART = 256  # number of pages that are read before they are evicted
# Share of the slabs' growth that may differ from the bytes that the driver counts, for nodes of the
# page cache.
SLAB_DIFFERENCE = 0.05
# Free objects that the slab allocator may keep and count as used. Linux 7.3 kept up to 187 kB of
# XArray nodes in this test.
SLAB_KEPT_BYTES = 256 << 10


def test_index_counts_all_xarray_nodes_of_scattered_pages(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The counted memory of the index equals that of the slabs, so its limit holds.

    A page that is far from others on the disk has a leaf and an XArray node of its own.
    """
    guest = driver_guest(
        session,
        kernel,
        test_module,
        parameters="verify_every=0 admission=off",
        memory_bytes=1024 * MIB,
        disks=[tree_disk(session)[0], make_large_disk(session, SCATTERED_MIB)],
    )
    guest.mount("large", "/large")
    guest.sh(f"echo 0 >/sys/block/{guest.disk('large')}/queue/read_ahead_kb")
    mount = Mount(guest, "/large")
    mount.wait("on")
    table = limit_index(guest, 16 * MIB)

    def used() -> int:
        # Dropping inodes frees the nodes of their page cache, which come from the same slab cache.
        guest.sh("sync; echo 3 >/proc/sys/vm/drop_caches; sleep 0.2", 120)
        settle(guest)
        return slab_use(guest, "tmem_") + slab_use(guest, "radix_tree_node")

    def fill() -> tuple[int, int]:
        """Returns the growth of the slabs and of the counted memory for the pages of the file."""
        mount.wait("on")
        slabs, counted = used(), stats(guest)["index_bytes"]
        for first in range(0, SCATTERED_PAGES, SCATTERED_PART):
            guest.sh(
                f"i={first}; while [ $i -lt {min(first + SCATTERED_PART, SCATTERED_PAGES)} ]; do"
                " dd if=/large/file of=/dev/null bs=4k count=1"
                f" skip=$((i * {SCATTERED_DISTANCE_MIB * 256})) 2>/dev/null; i=$((i + 1)); done;"
                " echo 1 >/proc/sys/vm/drop_caches",
                120,
            )
            settle(guest)
        return used() - slabs, stats(guest)["index_bytes"] - counted

    slabs, counted = fill()
    print(f"slabs grew by {slabs} bytes, the counted memory by {counted}")
    assert counted > SCATTERED_PAGES * (576 + 64) * 9 // 10
    assert abs(slabs - counted) < SLAB_DIFFERENCE * slabs + SLAB_KEPT_BYTES

    limit = counted // 2
    assert limit_index(guest, limit) == table
    slabs, counted = fill()
    print(f"with a limit of {limit}: slabs grew by {slabs} bytes, the counted memory by {counted}")
    assert limit // 2 < counted <= limit
    assert slabs < limit * (1 + 2 * SLAB_DIFFERENCE)

    guest.sh("umount /large /mnt", 60)
    until(lambda: stats(guest)["index_bytes"] == table, 10, "the index has released all its memory")
    guest.sh("rmmod virtio_tmem", 60)  # a module for tests reports memory that stays counted


def tell_lie(guest: Guest, liar: Liar, lie: str, sums: dict[str, str]) -> Counter[str]:
    """Makes the device give the wrong answer `lie`. Returns the growth of the driver's counters.

    The guest evicts files if the lie is about puts, and reads evicted files otherwise.
    """
    told = liar.lies_told
    if lie in LIES_OF_PUTS:
        drop_pages(guest)
        before = settle(guest)
        liar.lie = lie
        evict(guest, list(sums))
        assert stats(guest)["index_pages"] <= SERVED_PAGES, (
            "pages that the device did not store are in the index"
        )
    else:
        before = evict(guest, list(sums))
        liar.lie = lie
    assert checksums(guest, list(sums)) == sums, f"wrong answer '{lie}': a file has wrong contents"
    liar.lie = ""
    assert liar.lies_told > told
    return growth(before, stats(guest))


def test_each_wrong_answer_of_the_device_is_caught_by_its_check(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """No wrong answer is used, no byte is wrong, and the intended check catches each lie."""
    data, sums = tree_disk(session)
    files = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        check_works(guest, files)
        for lie in (*LIES_OF_GETS, *LIES_OF_PUTS):
            grown = tell_lie(guest, liar, lie, files)
            print(lie, grown)
            assert is_on(guest), (
                f"wrong answer '{lie}': the driver's state is '{state(guest)}', not 'on'"
            )
            if lie in LIES_OF_PUTS:
                why = "puts_refused" if lie == "put-refused" else "puts_unanswered"
                assert grown[why] == grown["puts"] > 0, f"wrong answer '{lie}': {grown}"
                assert grown["puts_stored"] == 0, (
                    f"wrong answer '{lie}': the driver counts stored pages"
                )
            else:
                assert grown["misses_answer"] > 0, (
                    f"wrong answer '{lie}': no wrong answer is counted"
                )
                assert grown["hits"] == grown["ring_hits"] or lie == "short-page", (
                    f"wrong answer '{lie}': the driver used a page from the device"
                )
            assert grown["mismatches"] == 0, f"wrong answer '{lie}': a content check failed"
            # The device gives right answers again, and the driver must use them.
            check_works(guest, files)

        # Answers that come after the deadline are wrong here. The driver must not use them.
        told = liar.lies_told
        for _ in range(3):
            evict(guest, list(files))
            liar.lie = "late"
            assert checksums(guest, list(files)) == files
            assert state(guest) == "tripped"
            liar.lie = ""
            wait_state(guest, "on")
            assert checksums(guest, list(files)) == files
            check_works(guest, files)
        assert liar.lies_told >= told + 3 * 3
        assert stats(guest)["misses_bounce"] == 0

        # A used element that names no request stops the queue, and not the guest.
        for lie in ("token", "token-beyond"):
            told = liar.lies_told
            evict(guest, list(files))
            liar.lie = lie
            assert checksums(guest, list(files)) == files
            liar.lie = ""
            assert liar.lies_told > told
            drop_pages(guest)
            assert checksums(guest, list(files)) == files
            reload(guest)
            check_works(guest, files)

        # The device's answers to gets are right except for the bytes of the page.
        grown = tell_lie(guest, liar, "content", files)
        assert grown["mismatches"] == grown["misses_check"] > 0
        assert state(guest).startswith("poisoned: content check")
        drop_pages(guest)
        assert checksums(guest, list(files)) == files
        reload(guest)
        check_works(guest, files)


def read_until(guest: Guest, sums: dict[str, str], counter: str) -> None:
    """Evicts and reads files until the counter grows. Raises if a byte is wrong."""
    before = stats(guest)[counter]

    def grown() -> bool:
        drop_pages(guest)
        assert checksums(guest, list(sums)) == sums
        return stats(guest)[counter] > before

    until(grown, 60, f"{counter} grows")


def test_pools_with_contradictory_answers_get_no_puts(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A pool gets no puts until the device has confirmed it with an answer that is not
    contradictory."""
    data, sums = tree_disk(session)
    files = dict(list(sums.items())[:8])
    with Liar(session.directory / "liar") as liar:
        guest = driver_guest(session, kernel, module, Tmem(liar.path), disks=[data])
        for lie in LIES_OF_POOLS:
            guest.sh("umount /mnt", 60)
            told, before = liar.lies_told, stats(guest)
            liar.lie = lie
            guest.mount("data", "/mnt")

            read_until(guest, files, "puts_dropped_pool")
            while liar.lies_told == told:  # the wait in read_until() bounds this loop
                read_until(guest, files, "puts_dropped_pool")
            drop_pages(guest)
            assert checksums(guest, list(files)) == files
            after = stats(guest)
            assert (after["puts"], after["hits"]) == (before["puts"], before["hits"]), (
                f"wrong answer '{lie}': the driver put pages or had hits"
            )
            assert after["index_pages"] == 0, f"wrong answer '{lie}': the index has pages"
            liar.lie = ""
        # The driver repeats the request to create the pool without any action of the test.
        read_until(guest, files, "puts")
        check_works(guest, files)
        assert stats(guest)["mismatches"] == 0


def test_suspend_empties_the_cache(tree: Tree) -> None:
    """At a suspend the driver drops all entries of its index. It starts again at the resume."""
    daemon, vm, guest = tree.daemon, tree.vm, tree.guest
    files = dict(list(tree.sums.items())[:8])
    evict(guest, list(files))
    assert daemon.stats()["pool"]["pages"] > PAGES
    before = stats(guest)
    guest = vm.suspend()
    wait_state(guest, "on")
    after = stats(guest)
    assert after["index_pages"] == 0
    assert after["generation_changes"] == before["generation_changes"] + 1
    assert daemon.stats()["pool"]["pages"] == 0
    assert checksums(guest, list(files)) == files
    assert stats(guest)["hits"] == before["hits"]
    check_works(guest, files)
    guest.sh("rmmod virtio_tmem", 60)


def test_hibernation_empties_the_cache(session: Session, kernel: Kernel, module: Path) -> None:
    """The driver's index is empty from the preparation of a hibernation until the guest resumes."""
    if kernel.version >= (7, 3):
        pytest.skip("Linux 7.3 loses the agent's port in hibernation, also without the driver")
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    files = dict(list(sums.items())[:8])
    swap = Disk("swap", disk.blank(session.directory / "swap.img", 512 * MIB))
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[data, swap],
        cmdline="hibernate=nocompress",
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    # Without swap space, the kernel prepares hibernation and then fails. The generation of the
    # device stays the same.
    evict(guest, list(files))
    before = stats(guest)
    assert before["index_pages"] > PAGES
    assert guest.run("echo disk >/sys/power/state").status != 0
    wait_state(guest, "on")
    after = stats(guest)
    assert after["index_pages"] == 0
    assert after["generation_changes"] == before["generation_changes"] + 2
    assert checksums(guest, list(files)) == files
    assert stats(guest)["hits"] == before["hits"]
    check_works(guest, files)

    device = guest.disk("swap")
    guest.sh(f"mkswap /dev/{device} && swapon /dev/{device}")
    # The write to `resume` tells the kernel which swap device to use for the image. It fails,
    # because the kernel also tries to resume from an image, which does not exist yet.
    guest.run(f"cat /sys/class/block/{device}/dev >/sys/power/resume")
    guest.sh("echo test_resume >/sys/power/disk")
    evict(guest, list(files))
    before = stats(guest)
    assert before["index_pages"] > PAGES
    done = guest.run("echo disk >/sys/power/state", 300)
    # Before Linux 6.4, test_resume fails after the image is written, because the swap is in use.
    assert (done.status == 0) == (kernel.version >= (6, 4)), done
    wait_state(guest, "on")
    after = stats(guest)
    # The guest has the counters from the hibernation image. The driver had emptied its index before
    # the image was made.
    assert after["index_pages"] == 0
    assert after["puts"] == before["puts"]
    assert checksums(guest, list(files)) == files
    assert stats(guest)["hits"] == before["hits"]
    check_works(guest, files)
    guest.sh("rmmod virtio_tmem", 60)


def test_hibernation_to_a_swap_file_leaves_no_old_page(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The image overwrites blocks whose pages are in the cache of the guest that continues.

    The kernel writes the image after it has saved the memory with the driver's records.
    """
    if kernel.version >= (7, 3):
        pytest.skip("Linux 7.3 loses the agent's port in hibernation, also without the driver")
    if kernel.version >= (7, 2):
        pytest.skip("Linux 7.2 overwrites none of the pages in the cache; the reason is not known")
    if kernel.version < (6, 4):
        pytest.skip("Linux 6.1 does not load the image, and swapoff then never ends")
    guest = driver_guest(
        session,
        kernel,
        test_module,
        Tmem(start_daemon(session).socket("vm1"), properties={"retain": "off"}),
        files=programs(SPECIAL),
        cmdline="hibernate=nocompress",
    )
    path, device = f"{WHERE}/swap", guest.disk("data")
    # Keep the page cache in the image.
    guest.sh(f"echo test_resume >/sys/power/disk; echo {SWAP_FILE_BYTES} >/sys/power/image_size")
    guest.sh(f"fallocate -l {SWAP_FILE_BYTES} {path}")
    for removed in (True, False):
        set_parameter(guest, "test_blocks_without", "resume" if removed else "")
        guest.sh(
            f"dd if=/dev/urandom of={path} bs=1M count={SWAP_CACHED_MIB} conv=notrunc 2>/dev/null;"
            f" mkswap {path} && sync && swapon {path}"
        )
        guest.sh(f"{SPECIAL} block {path} 0 >/sys/power/resume_offset")
        guest.run(f"cat /sys/class/block/{device}/dev >/sys/power/resume")
        evict(guest, [path])
        guest.sh(f"dd if={path} of=/dev/null bs=1M count={SWAP_CACHED_MIB} 2>/dev/null")
        guest.sh("echo disk >/sys/power/state", 300)
        wait_state(guest, "on")
        Mount(guest, WHERE).wait("on")
        guest.sh(f"swapoff {path}", 60)
        drop_pages(guest)
        settle(guest)
        # If cached and direct reads differ, the program ends with status 1.
        assert guest.run(f"{SPECIAL} same {path}", 120).status == removed


def test_module_unloads_under_load_and_with_a_silent_daemon(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """The module can be unloaded at any time, under load and while the daemon does not answer."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=2, disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0")
    job = guest.start(
        f"while :; do cat {' '.join(sums)} >/dev/null; echo 1 >/proc/sys/vm/drop_caches; done", 120
    )
    for _ in range(5):
        until(lambda: stats(guest)["hits"] > 50, 60, "the driver gets hits")
        reload(guest)

    def reported() -> dict[str, Any] | None:
        """Returns the driver's report, or None until a report lists the installed hooks.

        The driver sends its first report before it installs the hooks.
        """
        (vm1,) = daemon.stats()["vms"]
        driver: dict[str, Any] | None = vm1["driver"]
        hooks = int(guest.read(f"{SYSFS}/hooks"), 0)
        whole = driver and driver["state"] == "on" and driver["hooks"] == hooks
        return driver if whole else None

    driver = until(reported, 30, "the daemon knows of the driver, and of its hooks")
    assert driver["kernel"] == kernel.release
    assert driver["version"] == guest.read("/sys/module/virtio_tmem/version")
    assert 0 < driver["memory_bytes"] <= budget(guest)
    # Puts, flushes and gets are in flight when the daemon stops.
    until(lambda: stats(guest)["hits"] > 50, 60, "the driver gets hits")
    daemon.pause()
    guest.sh("rmmod virtio_tmem", 60)
    daemon.resume()
    job.kill()
    job.wait()
    assert checksums(guest, list(sums)) == sums
    reload(guest)
    settle(guest)
    check_works(guest, sums)
