# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests tmem-guest and /dev/virtio_tmem: dropping trees, policies, and permissions."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from driver import (
    SYSFS,
    WHERE,
    checksums,
    driver_vm,
    evict,
    kept_pages,
    load,
    set_parameter,
    settle,
    start_daemon,
    stats,
)
from test_driver import FILE_BYTES, tree_disk
from test_mounts import Mount

from harness import disk
from harness.guest import Guest, Result
from harness.kernel import Kernel
from harness.paths import ROOT, guest_program
from harness.session import Session
from harness.vm import MIB, Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

COMMAND = "/bin/tmem-guest"
PAGES = FILE_BYTES // 4096  # number of pages of a file
# Exit statuses of tmem-guest.
SOME, USAGE, NO_DRIVER, NOT_SERVED, NOT_OWNER, UNSUPPORTED = 1, 2, 3, 4, 5, 6


def command() -> dict[str, Path]:
    return {COMMAND: guest_program(ROOT / "guest-driver/tools/tmem-guest.c")}


def run_json(guest: Guest, arguments: str) -> dict[str, Any]:
    """Runs tmem-guest with --json, and returns its answer. The command must succeed."""
    answer = json.loads(guest.sh(f"{COMMAND} --json {arguments}", 120))
    assert isinstance(answer, dict)
    return answer


def expect_failure(guest: Guest, arguments: str, status: int, *words: str) -> Result:
    """Runs tmem-guest, which must fail with `status` and a message that contains the words."""
    done = guest.run(f"{COMMAND} {arguments}", 60)
    text = done.stderr.decode()
    assert done.status == status, (
        f"tmem-guest {arguments} ended with status {done.status}, not {status}: {text}"
    )
    for word in words:
        assert word in text, f"tmem-guest {arguments} did not print '{word}': {text}"
    return done


def start(session: Session, kernel: Kernel, module: Path) -> tuple[Guest, dict[str, str]]:
    """Boots a guest with files, loads the module, and installs tmem-guest."""
    daemon = start_daemon(session)
    data, sums = tree_disk(session)
    vm = driver_vm(
        session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data], files=command()
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    return guest, sums


def held_pages(guest: Guest) -> int:
    """Returns the number of pages that the pool of the mount has."""
    return Mount(guest, WHERE).count("held_pages")


def wait_held(guest: Guest, path: str) -> None:
    """Waits until the pages of a file are put. The pool is ready some time after it was emptied."""

    def is_held() -> bool:
        before = kept_pages(stats(guest))
        return kept_pages(evict(guest, [path])) - before > PAGES * 9 // 10

    until(is_held, 60, f"pages of {path} are put")


def test_status_and_stats_report_the_state_of_the_driver(
    session: Session, kernel: Kernel, module: Path
) -> None:
    vm = driver_vm(session, kernel, module, None, files=command())
    guest = vm.start()
    expect_failure(guest, "status", NO_DRIVER, "not loaded", "dkms autoinstall")
    expect_failure(guest, "stats --json", NO_DRIVER, "not loaded")
    expect_failure(guest, "drop /", NO_DRIVER, "not loaded")
    expect_failure(guest, "", USAGE, "usage:")
    expect_failure(guest, "policy", USAGE, "usage: tmem-guest policy")
    expect_failure(guest, "stats --watch=0", USAGE, "usage:")
    expect_failure(guest, "trial", USAGE, "usage: tmem-guest trial")
    expect_failure(guest, "trial 0", USAGE, "usage: tmem-guest trial")
    expect_failure(guest, "trial 1", NO_DRIVER, "not loaded")
    for name in ("status", "stats", "drop", "policy", "trial"):
        assert guest.sh(f"{COMMAND} {name} --help").startswith(f"usage: tmem-guest {name}")

    # Without a device, the module reports why the cache is off, and tmem-guest prints that.
    load(guest, online=False)
    done = guest.run(f"{COMMAND} status --json")
    assert done.status == NO_DRIVER
    answer = json.loads(done.stdout)
    assert (answer["state"], answer["reason"]) == ("off", "no device")
    assert int(answer["hooks"], 16) > 0
    assert answer["version"] == guest.read("/sys/module/virtio_tmem/version")
    assert "no device" in guest.run(f"{COMMAND} status").text
    counters = run_json(guest, "stats")
    assert counters.pop("lost_fraction") == 0
    assert counters == stats(guest)

    # With --watch, tmem-guest prints one JSON object per line until it is ended.
    job = guest.start(f"{COMMAND} stats --watch=0.1 --json | head -n 3", 60)
    lines = job.wait().check().text.splitlines()
    assert len(lines) == 3
    names = {*stats(guest), "lost_fraction"}
    assert all(json.loads(line).keys() == names for line in lines)


def test_never_policy_empties_the_pool_and_default_policy_allows_puts(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums = start(session, kernel, module)
    path, other = list(sums)[:2]
    evict(guest, [path, other])
    assert held_pages(guest) > 2 * PAGES * 9 // 10

    # The driver does not know which blocks belong to the file, so it drops all pages of the mount.
    # From then on, evicted pages of the file are not put.
    answer = run_json(guest, f"policy {path} never")
    assert (answer["files"], answer["never"], answer["default"], answer["errors"]) == (1, 1, 0, 0)
    assert held_pages(guest) == 0
    before = stats(guest)
    after = evict(guest, [path])
    assert after["puts_dropped_policy"] - before["puts_dropped_policy"] == PAGES
    assert held_pages(guest) == 0
    wait_held(guest, other)

    # The policy also survives the eviction of the inode, and a drop_caches that empties the pool.
    guest.sh("sync && echo 3 >/proc/sys/vm/drop_caches && echo 2 >/proc/sys/vm/drop_caches", 60)
    before = stats(guest)
    after = evict(guest, [path])
    assert after["puts_dropped_policy"] - before["puts_dropped_policy"] == PAGES
    guest.sh("echo Y >/sys/module/virtio_tmem/parameters/drop_caches_flush")
    guest.sh("echo 3 >/proc/sys/vm/drop_caches", 60)
    guest.sh("echo N >/sys/module/virtio_tmem/parameters/drop_caches_flush")
    assert run_json(guest, f"policy {path}")["never"] == 1

    # With the default policy, the pages of the file are put again.
    assert run_json(guest, f"policy {path} default")["never"] == 0
    assert checksums(guest, [path]) == {path: sums[path]}
    wait_held(guest, path)
    before = stats(guest)
    assert checksums(guest, [path]) == {path: sums[path]}
    assert stats(guest)["hits"] - before["hits"] > PAGES * 9 // 10


def test_policy_ends_when_its_file_is_deleted_or_unmounted(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums = start(session, kernel, module)
    first = next(iter(sums))
    guest.sh(f"{COMMAND} policy {first} never")
    # A new file whose inode number belonged to a deleted file has the default policy.
    numbers = set()
    for turn in range(3):
        path = f"{WHERE}/again{turn}"
        guest.sh(f"dd if=/dev/zero of={path} bs=64k count=1 2>/dev/null && sync")
        numbers.add(guest.sh(f"stat -c %i {path}").strip())
        assert run_json(guest, f"policy {path}")["default"] == 1
        assert run_json(guest, f"policy {path} never")["never"] == 1
        guest.sh(f"rm {path} && sync")
    assert len(numbers) < 3, "the file system reused no inode number, so nothing was tested"
    # tmem-guest sets the policy of all files below a directory. It neither follows nor counts
    # symbolic links.
    guest.sh(f"mkdir -p {WHERE}/d/e && ln -s {first} {WHERE}/d/link && mkfifo {WHERE}/d/fifo")
    guest.sh(f"for i in 1 2 3; do echo $i >{WHERE}/d/$i; echo $i >{WHERE}/d/e/$i; done; sync")
    answer = run_json(guest, f"policy {WHERE}/d never")
    assert (answer["files"], answer["never"], answer["errors"]) == (6, 6, 0)
    guest.sh(f"echo new >{WHERE}/d/new")
    answer = run_json(guest, f"policy {WHERE}/d")
    assert (answer["never"], answer["default"]) == (6, 1)
    # Policies are not stored on the disk, so they end with the mount.
    guest.sh(f"umount {WHERE}")
    guest.mount("data", WHERE)
    assert run_json(guest, f"policy {WHERE}/d {first}")["never"] == 0


def test_policies_survive_a_switched_off_mount(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A mount that is switched off and on keeps its policies, also those that are set meanwhile."""
    guest, sums = start(session, kernel, module)
    first, taken_back, meanwhile = list(sums)[:3]
    guest.sh(f"{COMMAND} policy {first} {taken_back} never")
    mount = Mount(guest, WHERE)
    mount.switch(False)
    assert run_json(guest, f"policy {meanwhile} never")["never"] == 1
    assert run_json(guest, f"policy {taken_back} default")["default"] == 1
    assert run_json(guest, f"policy {first}")["never"] == 1
    mount.switch(True)
    mount.wait()
    for path, never in ((first, 1), (meanwhile, 1), (taken_back, 0)):
        assert run_json(guest, f"policy {path}")["never"] == never, f"{path} has the wrong policy"
    for path in (first, meanwhile):
        before = stats(guest)
        after = evict(guest, [path])
        assert after["puts_dropped_policy"] - before["puts_dropped_policy"] == PAGES


def test_requests_without_permission_and_invalid_requests_are_refused(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums = start(session, kernel, module)
    mine, other = list(sums)[:2]
    guest.sh(f"mkdir /tmp/bin && cp {COMMAND} /tmp/bin/t && chmod 755 /tmp /tmp/bin /tmp/bin/t")
    guest.sh("mkdir -p /etc && echo user:x:1000:1000::/:/bin/sh >/etc/passwd")
    guest.sh(f"chown 1000 {mine} && chmod 644 {mine} {other}")

    def as_user(arguments: str) -> Result:
        return guest.run(f"su user -c '/tmp/bin/t {arguments}'")

    assert guest.sh("su user -c 'id -u'").strip() == "1000"
    evict(guest, [other])
    was = held_pages(guest)
    assert was > PAGES * 9 // 10
    for arguments in (f"policy {other} never", f"policy {other}", f"drop {other}"):
        done = as_user(arguments)
        assert done.status == NOT_OWNER, done
        assert other in done.stderr.decode() and "owner" in done.stderr.decode()
    assert held_pages(guest) == was
    assert json.loads(as_user(f"--json policy {mine} never").check().text)["never"] == 1
    as_user(f"drop {mine}").check()

    expect_failure(guest, f"drop {WHERE}/absent", SOME, "absent", "No such file")
    guest.sh(f"ln -s {mine} {WHERE}/link")
    expect_failure(guest, f"drop {WHERE}/link", SOME, f"{WHERE}/link", "symbolic link")
    guest.sh(f"mkfifo {WHERE}/fifo")
    expect_failure(guest, f"policy {WHERE}/fifo", SOME, "neither a file nor a directory")
    guest.sh("echo x >/tmp/file")
    expect_failure(guest, "policy /tmp/file never", NOT_SERVED, "/tmp/file", "does not serve")
    # tmem-guest does not enter a directory on which another file system is mounted.
    guest.sh(f"mkdir {WHERE}/below && mount -t tmpfs none {WHERE}/below")
    guest.sh(f"echo x >{WHERE}/below/file")
    answer = run_json(guest, f"drop {WHERE}")
    assert answer["errors"] == 0 and answer["files"] == len(sums)


def test_memory_of_policies_is_bounded(session: Session, kernel: Kernel, test_module: Path) -> None:
    guest, sums = start(session, kernel, test_module)
    guest.sh(f"mkdir {WHERE}/d && cd {WHERE}/d && for i in $(seq 400); do echo >$i; done; sync", 60)
    # Policies may use an eighth of this limit of the index, in bytes. That is enough for four
    # XArray nodes of 584 bytes. The lowest level has one node for the policies of 64 inode numbers,
    # and there are one or two higher levels.
    set_parameter(guest, "test_index_bytes", str(8 * 4 * 584))
    expect_failure(guest, f"policy {WHERE}/d never", SOME, f"{WHERE}/d/", "limit of policies")
    answer = run_json(guest, f"policy {WHERE}/d")
    assert 0 < answer["never"] <= 3 * 64
    # Setting the default policy frees all memory of the policies. Repeat it to find a leak.
    for _ in range(3):
        assert run_json(guest, f"policy {WHERE}/d default")["never"] == 0
        path = next(iter(sums))
        assert run_json(guest, f"policy {path} never")["never"] == 1
        guest.sh(f"{COMMAND} policy {path} default")
    expect_failure(guest, f"policy {WHERE}/d never", SOME, "limit of policies")
    assert run_json(guest, f"policy {WHERE}/d")["never"] == answer["never"]
    # The driver frees the policies of a file system at its unmount.
    guest.sh(f"umount {WHERE}", 60)
    guest.mount("data", WHERE)
    assert run_json(guest, f"policy {WHERE}/d")["never"] == 0
    assert run_json(guest, f"policy {WHERE}/d/1 never")["never"] == 1


SMALL_BYTES = 64 << 10
GROUPS, GROUP_FILES = 16, 16
# Number of pages of a tree, which has 16 MiB of data that do not compress.
TREE_PAGES = GROUPS * GROUP_FILES * SMALL_BYTES // 4096
POOL = "37MiB"  # pool for two trees, not for three


def test_trial_compares_a_load_with_and_without_the_cache(
    session: Session, kernel: Kernel, module: Path
) -> None:
    guest, sums = start(session, kernel, module)
    switch = f"{SYSFS}/fs/ext4/enabled"
    read = f"cat {' '.join(list(sums)[:2])} >/dev/null; echo 1 >/proc/sys/vm/drop_caches"
    load_job = guest.start(f"while [ ! -e /stop ]; do {read}; sleep 0.1; done", 180)

    # A trial that is interrupted leaves the cache on.
    expect_failure(guest, "trial 60 & sleep 3; kill -INT $!; wait $!", SOME, "the trial was ended")
    assert guest.read(switch) == "1"

    answer = run_json(guest, "trial 0.8")
    guest.sh("touch /stop")
    load_job.wait().check()
    assert guest.read(switch) == "1"
    reads = answer["disk_reads_mib_per_s"]
    assert reads["effect"] == -1, answer
    assert reads["off"][0] > 2 * reads["on"][1], answer
    assert answer["hits_percent"][0] > 80, answer

    # A type whose cache was off before stays off, and there is nothing to compare.
    for directory in guest.sh(f"ls {SYSFS}/fs").split():
        guest.sh(f"echo 0 >{SYSFS}/fs/{directory}/enabled")
    expect_failure(guest, "trial 1", NO_DRIVER, "of all types")


def make_three_trees(directory: Path, generator: random.Random) -> Path:
    for name in (f"{tree}/{group:02}" for tree in "abc" for group in range(GROUPS)):
        (directory / name).mkdir(parents=True)
        for number in range(GROUP_FILES):
            (directory / name / f"{number:02}").write_bytes(generator.randbytes(SMALL_BYTES))
    return directory


def read_tree(guest: Guest, name: str, *, drop: bool = False) -> None:
    """Reads and evicts all files of a tree, in groups that fit the put ring.

    With `drop`, tmem-guest drops the files, whose pages are then not put.
    """
    for group in range(GROUPS):
        path = f"{WHERE}/{name}/{group:02}"
        guest.sh(f"cat {path}/* >/dev/null", 60)
        if drop:
            answer = run_json(guest, f"drop {path}")
            assert (answer["files"], answer["errors"]) == (GROUP_FILES, 0)
            assert answer["cached_pages"] == TREE_PAGES // GROUPS
            assert answer["kept_pages"] == 0
            assert answer["bytes"] == 4096 * answer["cached_pages"]
        guest.sh("echo 1 >/proc/sys/vm/drop_caches", 60)
        settle(guest)


@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "control"])
def test_dropped_directory_tree_takes_no_pool_memory_of_other_files(
    session: Session, kernel: Kernel, module: Path, drop: bool
) -> None:
    """If the second of three trees is dropped, the pool has memory for the first and the third.

    The pool is too small for all three directory trees.
    """
    daemon = session.daemon("vm1", pool_size=POOL)
    daemon.start()
    tree = make_three_trees(session.directory / "trees", random.Random("three trees"))
    image = disk.ext4(session.directory / "data.img", 128 * MIB, tree)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        disks=[disk.Disk("data", image)],
        files=command(),
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    read_tree(guest, "a")
    read_tree(guest, "b", drop=drop)
    read_tree(guest, "c")

    before, sectors = stats(guest), guest.disk_stat("data").read_sectors
    guest.sh(f"cat {WHERE}/a/*/* >/dev/null", 120)
    hits = stats(guest)["hits"] - before["hits"]
    sectors = guest.disk_stat("data").read_sectors - sectors
    print(
        f"second read of tree a: {hits} of {TREE_PAGES} pages from the pool, {sectors} sectors read"
    )
    if drop:
        assert hits >= TREE_PAGES * 95 // 100
        assert sectors <= TREE_PAGES * 8 // 10
    else:
        assert hits <= TREE_PAGES // 2
        assert sectors >= TREE_PAGES * 8 // 2
    guest.sh(f"cd {WHERE} && find a b c -type f -exec sha256sum {{}} + >/tmp/sums", 120)
    for line in guest.get("/tmp/sums").decode().splitlines():
        digest, path = line.split()
        assert hashlib.sha256((tree / path).read_bytes()).hexdigest() == digest, (
            f"{path} has wrong contents"
        )
