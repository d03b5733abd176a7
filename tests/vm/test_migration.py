# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A caching VM moves between two QEMUs of this host, each with its own daemon.

The pool of the first daemon is not migrated. Pages of guest memory that this daemon writes are
migrated, which is the purpose of the dirty log. If a migration fails, is cancelled or is refused,
the VM stays at the source and keeps its cache. Out of scope: migration by libvirt, which
test_libvirt.py tests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from driver import (
    LastingTorture,
    checksums,
    driver_vm,
    evict,
    load,
    seed,
    start_daemon,
    state,
    stats,
    wait_state,
)
from test_driver import overwrite, tree_disk
from userdriver import UserDriver, files

from harness import migration
from harness.daemon import Daemon
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

VM = "vm1"
QUEUES = 2
# RAM of a VM. It is small, because two VMs run at a time and each migration copies all memory.
MEMORY_BYTES = 192 * MIB
LOAD = "--ops=1500 --jobs=2 --files=16 --size-max=262144"
REFUSED_SECONDS = 30.0


def device(daemon: Daemon, **properties: str) -> Tmem:
    return Tmem(daemon.socket(VM), num_queues=QUEUES, properties=properties)


def pages(daemon: Daemon) -> int:
    return int(daemon.stats()["pool"]["pages"])


def is_connected(daemon: Daemon) -> bool:
    (vm,) = daemon.list()["vms"]
    return bool(vm["connected"])


def boot_caching_vm(
    session: Session, kernel: Kernel, module: Path, daemon: Daemon, **more: object
) -> tuple[Vm, Guest]:
    vm = driver_vm(
        session, kernel, module, device(daemon), cpus=2, memory_bytes=MEMORY_BYTES, **more
    )
    guest = vm.start()
    load(guest, "verify_every=0")
    return vm, guest


def wait_until_grown(guest: Guest, name: str, by: int, what: str) -> None:
    before = stats(guest)[name]
    until(lambda: stats(guest)[name] >= before + by, 60, what)


def check_no_mismatch(guest: Guest) -> None:
    """Checks that no page came back from the pool with other bytes than were put."""
    counters = stats(guest)
    wrong = {name: counters[name] for name in ("mismatches", "misses_check") if counters[name]}
    assert not wrong, (wrong, state(guest))


def test_migrated_vm_starts_with_an_empty_cache_and_gets_hits_again(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """After each migration, the VM starts with an empty cache, fills it and has hits again."""
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    data, sums = tree_disk(session)
    vm, guest = boot_caching_vm(session, kernel, module, here, disks=[data])
    files = list(sums)
    for count, (source, target) in enumerate(((here, there), (there, here)), start=1):
        held = evict(guest, files)["index_pages"]
        assert held > 100
        assert pages(source) > 100 and pages(target) == 0
        before = stats(guest)
        arrived = migration.launch_receiver(session, vm, device(target))
        migration.move(vm, arrived)
        vm, guest = arrived, arrived.guest
        wait_state(guest, "on")
        until(partial(is_connected, target), 20, "the destination's daemon is connected")
        assert not is_connected(source) and pages(source) == 0, (
            "the source's daemon is still connected or has pages"
        )
        assert pages(target) == 0
        assert checksums(guest, files) == sums
        after = stats(guest)
        assert after["hits"] == before["hits"], (
            "the driver had hits at once, although its cache must be empty after the migration"
        )
        assert after["generation_changes"] > before["generation_changes"]
        # The guest writes new contents on each side of the migration and reads them on both sides.
        sums[files[count]] = overwrite(guest, files[count])
        evict(guest, files)
        assert checksums(guest, files) == sums
        assert stats(guest)["hits"] > after["hits"] + 100, "the VM has no hits at the destination"
        check_no_mismatch(guest)


@pytest.mark.parametrize("times", [3, 20])
def test_migration_under_torture_causes_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path, times: int
) -> None:
    """Migrations at random moments under load cause no wrong byte, and the cache works again."""
    number = seed()
    generator = random.Random(number)
    daemons = [start_daemon(session, VM), start_daemon(session, VM)]
    vm, guest = boot_caching_vm(session, kernel, module, daemons[0])
    torture = LastingTorture(guest, number, LOAD)
    figures = []
    for count in range(times):
        source, target = daemons[count % 2], daemons[(count + 1) % 2]
        wait_until_grown(guest, "puts_stored", 100, "the driver stores puts")
        wait_until_grown(guest, "hits", 10, "the driver gets hits")
        assert is_connected(source) and pages(target) == 0
        time.sleep(generator.uniform(0, 1))  # the test acts at random moments
        arrived = migration.launch_receiver(session, vm, device(target))
        figures.append(migration.move(vm, arrived))
        vm, guest = arrived, arrived.guest
        assert not torture.has_ended(guest), torture.finish(guest)
        assert pages(source) == 0
        wait_state(guest, "on")
        check_no_mismatch(guest)
    wait_until_grown(guest, "hits", 10, "the driver gets hits after the last migration")
    torture.finish(guest)
    counters = stats(guest)
    check_no_mismatch(guest)
    assert counters["generation_changes"] > times
    downtimes = sorted(int(each["downtime"]) for each in figures)
    print(f"{times} migrations, {downtimes} ms of downtime", counters)


def is_served(vm: Vm) -> bool:
    """Returns whether a daemon serves the VM: it is connected and has the guest's memory."""
    devices = {entry["name"]: entry["path"] for entry in vm.qmp.execute("x-query-virtio")}
    found = vm.qmp.execute("x-query-virtio-status", {"path": devices["virtio-tmem"]})
    return bool(found["vhost-started"])


def stop(daemon: Daemon) -> None:
    daemon.pause()


def die(daemon: Daemon) -> None:
    daemon.kill()


def replace(daemon: Daemon) -> None:
    daemon.restart()


# Speeds of a migration that copies all memory once and then does not finish. The first pass over
# the memory takes some seconds at the first speed. Pages that the guest writes meanwhile would take
# minutes at the second speed. They have random bytes: QEMU copies pages of zeros at once, and would
# finish if the guest is slow. QEMU finishes when it can copy the remaining pages within the allowed
# downtime, by the speed so far. So the test sets the shortest downtime. (With a downtime of 0, QEMU
# 10.0 finishes after the first pass without considering pages that were written meanwhile.)
FIRST_BYTES_PER_SECOND = 16 * MIB
THEN_BYTES_PER_SECOND = 64 << 10
SHORTEST_MS = 1
DIRTIER = (
    "dd if=/dev/urandom of=/tmp/random bs=1M count=20 2>/dev/null;"
    " while :; do cat /tmp/random >/tmp/junk; done"
)


def boot_user_driver(session: Session, kernel: Kernel, daemon: Daemon) -> tuple[Vm, UserDriver]:
    config = Config(kernel, VM, MEMORY_BYTES, cpus=2, tmem=device(daemon), files=files())
    vm = session.vm(config)
    vm.start()
    return vm, UserDriver(vm)


def copy_all_once(session: Session, vm: Vm, daemon: Daemon) -> Vm:
    """Starts a migration that has copied all memory once and does not finish soon.

    Returns the VM at the destination.
    """
    vm.guest.sh(f"setsid sh -c '{DIRTIER}' </dev/null >/dev/null 2>&1 & echo $! >/tmp/dirtier")
    until(lambda: vm.guest.run("test -s /tmp/junk").status == 0, 60, "the guest writes pages")
    target = migration.launch_receiver(session, vm, device(daemon))
    migration.begin(vm, target, bytes_per_second=FIRST_BYTES_PER_SECOND, downtime_ms=SHORTEST_MS)
    migration.wait_until_copied_once(vm)
    migration.set_speed(vm, THEN_BYTES_PER_SECOND, SHORTEST_MS)
    assert migration.progress(vm)["status"] == "active"
    return target


def copy_the_rest(vm: Vm, target: Vm) -> None:
    vm.guest.sh("kill -9 -$(cat /tmp/dirtier)")
    migration.set_speed(vm, migration.UNLIMITED)
    migration.wait(vm, "completed")
    migration.complete(vm, target)


@pytest.mark.smoke
def test_page_written_by_the_daemon_is_migrated(session: Session, kernel: Kernel) -> None:
    """A page that was copied before and that the daemon then writes is copied again.

    Only the daemon writes the page. The guest checks it after the migration. The torture program
    would hardly notice a missing copy, because the guest reads the daemon's answers at once.
    """
    daemons = [start_daemon(session, VM), start_daemon(session, VM)]
    vm, driver = boot_user_driver(session, kernel, daemons[0])
    generation = driver.wait_until_stored()
    for count in (1, 2):
        target = copy_all_once(session, vm, daemons[count % 2])
        assert driver.hold() == "held"
        copy_the_rest(vm, target)
        vm = target
        driver.use_vm(vm)
        assert driver.hold() == "held right"
        generation = driver.wait_until_stored(other_than=generation)


@pytest.mark.parametrize("trouble", [die, stop, replace])
def test_page_written_by_a_lost_daemon_is_migrated(
    session: Session, kernel: Kernel, trouble: Callable[[Daemon], None]
) -> None:
    """A page that the daemon wrote is copied even if QEMU loses the daemon before it reads the log.

    The daemon may also be replaced.
    """
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    vm, driver = boot_user_driver(session, kernel, here)
    driver.wait_until_stored()
    target = copy_all_once(session, vm, there)
    assert driver.hold() == "held"
    trouble(here)
    if trouble is replace:
        until(lambda: is_served(vm), 20, "QEMU has connected to the next daemon")
    else:
        # When the VM is paused and resumed, QEMU sends messages to the daemon. The daemon hangs, so
        # QEMU disconnects it.
        vm.pause()
        vm.resume()
        until(lambda: not is_served(vm), 20, "QEMU has lost its daemon")
    assert migration.progress(vm)["status"] == "active"
    copy_the_rest(vm, target)
    driver.use_vm(target)
    assert driver.hold() == "held right"


def test_page_written_by_a_daemon_started_during_migration_is_migrated(
    session: Session, kernel: Kernel
) -> None:
    """A page that a daemon writes is migrated if the daemon started during the migration.

    QEMU gives a new daemon the dirty log before the daemon may write.
    """
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    vm, driver = boot_user_driver(session, kernel, here)
    generation = driver.wait_until_stored()
    target = copy_all_once(session, vm, there)
    replace(here)
    driver.wait_until_stored(other_than=generation)
    assert driver.hold() == "held"
    assert is_served(vm) and migration.progress(vm)["status"] == "active"
    copy_the_rest(vm, target)
    driver.use_vm(target)
    assert driver.hold() == "held right"


def cancel(source: Vm, _target: Vm) -> None:
    source.qmp.execute("migrate_cancel")
    migration.wait(source, "cancelled")


def kill(source: Vm, target: Vm) -> None:
    target.stop()
    migration.wait(source, "failed")


@pytest.mark.parametrize("end", [cancel, kill])
def test_failed_migration_keeps_the_cache_of_the_source(
    session: Session, kernel: Kernel, module: Path, end: Callable[[Vm, Vm], None]
) -> None:
    """The VM keeps its cache if a migration fails or is cancelled, and the next one succeeds."""
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    vm, guest = boot_caching_vm(session, kernel, module, here)
    torture = LastingTorture(guest, seed(), LOAD)
    wait_until_grown(guest, "hits", 10, "the driver gets hits")
    changes = stats(guest)["generation_changes"]
    for _ in range(2):
        target = migration.launch_receiver(session, vm, device(there))
        migration.begin(vm, target, bytes_per_second=migration.SLOW_BYTES_PER_SECOND)
        migration.wait_until_half_done(vm)
        end(vm, target)
        target.stop()
        assert vm.status() == "running"
        wait_until_grown(guest, "hits", 10, "the driver gets hits after the ended migration")
        wait_until_grown(guest, "puts_stored", 10, "the driver puts after the ended migration")
        assert stats(guest)["generation_changes"] == changes, (
            "the failed or cancelled migration emptied the VM's cache"
        )
        assert not torture.has_ended(guest)
    arrived = migration.launch_receiver(session, vm, device(there))
    migration.move(vm, arrived)
    guest = arrived.guest
    wait_state(guest, "on")
    wait_until_grown(guest, "hits", 10, "the driver gets hits at the destination")
    torture.finish(guest)
    check_no_mismatch(guest)


def start_refused_migration(vm: Vm, target: Vm) -> str:
    """Starts a migration that `target` must refuse. Returns the log of the target's QEMU."""
    migration.begin(vm, target)
    migration.wait(vm, "failed")
    target.process.wait(REFUSED_SECONDS)
    return target.log.read_text(errors="replace")


def test_destination_with_another_device_is_refused(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """A destination whose queues or features differ reports that, and the VM stays at the
    source."""
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    data, sums = tree_disk(session)
    vm, guest = boot_caching_vm(session, kernel, module, here, disks=[data])
    held = evict(guest, list(sums))["index_pages"]
    changes = stats(guest)["generation_changes"]
    other = Tmem(there.socket(VM), num_queues=QUEUES + 1)
    for tmem, words in [
        (other, ["num-queues"]),
        (Tmem(there.socket(VM), num_queues=QUEUES, queue_size=64), ["queue-size"]),
        (device(there, event_idx="off"), ["eatures", "unsupported"]),
        (None, ["tmem"]),
    ]:
        target = migration.launch_receiver(session, vm, tmem)
        said = start_refused_migration(vm, target)
        assert all(word in said for word in words), f"the refusal lacks one of {words}: {said}"
        assert vm.status() == "running"
        assert not is_connected(there) or pages(there) == 0
    before = stats(guest)
    assert before["generation_changes"] == changes
    assert checksums(guest, list(sums)) == sums
    assert stats(guest)["hits"] - before["hits"] > held // 2, (
        "the failed or cancelled migration emptied the VM's cache"
    )
    check_no_mismatch(guest)


@pytest.mark.parametrize("trouble", [die, stop])
@pytest.mark.parametrize("which", ["source", "target"])
def test_dead_or_hung_daemon_does_not_stop_a_migration(
    session: Session,
    kernel: Kernel,
    module: Path,
    trouble: Callable[[Daemon], None],
    which: str,
) -> None:
    """A migration succeeds although a daemon dies or hangs. The VM only loses its cache."""
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    vm, guest = boot_caching_vm(session, kernel, module, here)
    torture = LastingTorture(guest, seed(), LOAD)
    wait_until_grown(guest, "hits", 10, "the driver gets hits")
    target = migration.launch_receiver(session, vm, device(there))
    until(lambda: is_connected(there), 20, "the destination's daemon is connected")
    migration.begin(vm, target, bytes_per_second=migration.SLOW_BYTES_PER_SECOND)
    migration.wait_until_half_done(vm)
    trouble(here if which == "source" else there)
    migration.set_speed(vm, migration.UNLIMITED)
    migration.wait(vm, "completed")
    migration.complete(vm, target)
    guest = target.guest
    assert not torture.has_ended(guest)
    if which == "target":
        there.stop()
        there.start()
    wait_state(guest, "on")
    wait_until_grown(guest, "hits", 10, "the driver gets hits again")
    torture.finish(guest)
    check_no_mismatch(guest)


POST_COPY = "postcopy-ram"


def test_post_copy_destination_is_served_after_all_memory_arrived(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """With post-copy, QEMU gives the destination's daemon the memory when all of it has arrived.

    The daemon cannot access memory that has not arrived yet.
    """
    here, there = start_daemon(session, VM), start_daemon(session, VM)
    vm, guest = boot_caching_vm(session, kernel, module, here)
    torture = LastingTorture(guest, seed(), LOAD)
    wait_until_grown(guest, "hits", 10, "the driver gets hits")

    target = migration.launch_receiver(session, vm, device(there))
    until(lambda: is_connected(there), 20, "the destination has connected to the daemon")
    migration.begin(
        vm,
        target,
        bytes_per_second=migration.SLOW_BYTES_PER_SECOND,
        capabilities=[POST_COPY],
    )
    migration.wait_until_half_done(vm)
    vm.qmp.execute("migrate-start-postcopy")
    until(lambda: target.status() == "running", 60, "the VM runs before its memory has arrived")
    assert migration.progress(vm)["status"] == "postcopy-active"
    assert not is_served(target)
    migration.set_speed(vm, migration.UNLIMITED)
    vm.qmp.execute("migrate-set-parameters", {"max-postcopy-bandwidth": migration.UNLIMITED})
    migration.wait(vm, "completed")
    migration.complete(vm, target)
    guest = target.guest
    until(lambda: is_served(target), 60, "QEMU has connected the daemon")
    wait_state(guest, "on")
    wait_until_grown(guest, "hits", 10, "the driver gets hits again")
    torture.finish(guest)
    check_no_mismatch(guest)
