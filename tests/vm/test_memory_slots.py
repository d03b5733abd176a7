# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Gives a VM that uses the device more memory, also of huge pages or in many memory slots."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driver import WHERE, Torture, driver_vm, load, seed, stats, wait_state

from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import MIB, Tmem, Vm
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DIMM_BYTES = 128 * MIB  # size of a memory block of the guest's kernel
ROUNDS = 3
PLUG_SECONDS = 60
# Event and status numbers of ACPI's _OST.
ACPI_CHECK, ACPI_EJECT, ACPI_SUCCESS = 1, 3, 0
HUGE_BYTES = 2 * MIB
VM_BYTES = 256 * MIB
# Sizes of two virtio-mem devices, whose slots have 1 GiB each.
COLD_BYTES, HOT_BYTES = 64 << 30, 2 << 30
OTHER_USER = 4242
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
MEMINFO = Path("/proc/meminfo")


def start_visible_daemon(session: Session) -> Daemon:
    """Starts a daemon whose memory map the test can read.

    Only root may read the memory map of a confined daemon. Without root, the daemon has no sandbox.
    """
    daemon = session.daemon("vm1", options=[] if os.geteuid() == 0 else ["--no-sandbox"])
    daemon.start()
    return daemon


def regions(daemon: Daemon) -> int:
    """Returns the number of the daemon's mappings of guest memory."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    return len(re.findall(r"memfd:memory-backend", maps))


def guest_is_done(vm: Vm, event: int) -> bool:
    """Returns whether the guest's ACPI has handled an event of the only slot in use.

    The test must not change the slot before that. If a guest ejects memory and sees other memory in
    the slot at once, it assumes that the ejection failed, and never uses the new memory.
    """
    status = vm.qmp.execute("query-acpi-ospm-status")[0]
    return (status["source"], status["status"]) == (event, ACPI_SUCCESS)


def huge_pages_free() -> int:
    """Returns the number of huge pages that are free and not reserved."""
    found = dict(re.findall(r"HugePages_(Free|Rsvd): +(\d+)", MEMINFO.read_text()))
    return int(found.get("Free", 0)) - int(found.get("Rsvd", 0))


@contextmanager
def reserve_huge_pages(count: int) -> Iterator[None]:
    """Adds huge pages to the host until the context ends. Skips the test if it cannot add them."""
    if os.geteuid() != 0 or not NR_HUGEPAGES.exists():
        pytest.skip("this host does not let the test reserve huge pages")
    if f"Hugepagesize: {HUGE_BYTES >> 10:>10} kB" not in MEMINFO.read_text():
        pytest.skip("the host's huge pages are not of 2 MiB")
    # Hold a lock, so that only one test at a time changes the number of huge pages.
    with NR_HUGEPAGES.open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        before = int(NR_HUGEPAGES.read_text())
        try:
            NR_HUGEPAGES.write_text(str(before + count))
            if int(NR_HUGEPAGES.read_text()) < before + count:
                pytest.skip(f"the host cannot reserve {count} huge pages")
            yield
        finally:
            NR_HUGEPAGES.write_text(str(before))


@pytest.fixture(params=["pages", "huge pages"])
def dimm(request: pytest.FixtureRequest) -> Iterator[dict[str, object]]:
    """Yields QEMU's options for the backend of the memory that a test plugs."""
    backend: dict[str, object] = {"qom-type": "memory-backend-memfd", "size": DIMM_BYTES}
    if request.param == "pages":
        yield backend
    else:
        with reserve_huge_pages(DIMM_BYTES // HUGE_BYTES):
            yield {**backend, "hugetlb": True}


def test_memory_hotplug_under_torture_causes_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path, dimm: dict[str, object]
) -> None:
    daemon = start_visible_daemon(session)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        arguments=["-m", "slots=2,maxmem=1G"],
    )
    guest = vm.start()
    # The guest must use plugged memory for movable pages only, so that it can be unplugged.
    guest.sh("echo online_movable >/sys/devices/system/memory/auto_online_blocks")
    load(guest)
    before = stats(guest)
    mapped = regions(daemon)
    assert mapped > 0
    memory = "awk '/^MemTotal/ {print $2}' /proc/meminfo"
    own_kib = int(guest.sh(memory))
    torture = Torture(guest, f"--seed={seed()} --ops=6000 --files=16 --size-max=262144", 600)
    free = huge_pages_free()
    rounds = 0
    while rounds < ROUNDS and not torture.job.done():
        rounds += 1
        vm.qmp.execute("object-add", {**dimm, "id": "more", "share": True})
        vm.qmp.execute("device_add", {"driver": "pc-dimm", "id": "dimm", "memdev": "more"})
        until(
            lambda: int(guest.sh(memory)) > own_kib,
            PLUG_SECONDS,
            "the guest uses the plugged memory",
        )
        until(
            lambda: guest_is_done(vm, ACPI_CHECK),
            PLUG_SECONDS,
            "the guest's ACPI has handled the plug",
        )
        assert regions(daemon) == mapped + 1, (
            "the daemon did not map exactly one more memory region after the plug"
        )
        mark = vm.qmp.events_seen()
        vm.qmp.execute("device_del", {"id": "dimm"})
        vm.qmp.wait_event("DEVICE_DELETED", scaled(PLUG_SECONDS), mark)
        until(
            lambda: guest_is_done(vm, ACPI_EJECT),
            PLUG_SECONDS,
            "the guest's ACPI has handled the eject",
        )
        until(lambda: regions(daemon) == mapped, PLUG_SECONDS, "the daemon has unmapped the memory")
        vm.qmp.execute("object-del", {"id": "more"})
        # No other test uses huge pages meanwhile, because this test holds the lock.
        if "hugetlb" in dimm:
            until(
                lambda: huge_pages_free() >= free,
                PLUG_SECONDS,
                "the host's huge pages are free again",
            )
    assert rounds > 0
    torture.finish()
    after = stats(guest)
    print(f"{rounds} times plugged and unplugged", after)
    assert after["generation_changes"] == before["generation_changes"], (
        "the generation changed, so the device reconnected to the daemon"
    )
    assert after["mismatches"] == 0
    assert after["hits"] > before["hits"]


def memory_slots(vm: Vm, device: str) -> int:
    """Returns the number of memory slots that QEMU has given a virtio-mem device."""
    children = vm.qmp.execute("qom-list", {"path": f"/machine/peripheral/{device}/virtio-backend"})
    return sum(child["name"].startswith("memslot-") for child in children)


def plug(vm: Vm, daemon: Daemon, device: str) -> None:
    """Lets the guest plug memory of a virtio-mem device, and waits until the daemon has mapped it.

    The memory is in one slot of the device.
    """
    before = regions(daemon)
    place = {"path": f"/machine/peripheral/{device}"}
    vm.qmp.execute("qom-set", {**place, "property": "requested-size", "value": DIMM_BYTES})
    until(
        lambda: vm.qmp.execute("qom-get", {**place, "property": "size"}) == DIMM_BYTES,
        PLUG_SECONDS,
        f"the guest has plugged memory of {device}",
    )
    until(
        lambda: regions(daemon) == before + 1, PLUG_SECONDS, f"the daemon maps a slot of {device}"
    )


def test_virtio_mem_uses_many_memory_slots(session: Session, kernel: Kernel, module: Path) -> None:
    """QEMU decides the slots of a cold-plugged device before it knows the daemon's limit.

    It takes a slot for each GiB, up to 256 slots. If the daemon's limit is lower, QEMU refuses the
    daemon for ever. If the limit is below 253, QEMU gives a device that is plugged later one slot.
    """
    daemon = start_visible_daemon(session)
    backend = "memory-backend-memfd,share=on,reserve=off"
    vm = driver_vm(
        session,
        kernel,
        module,
        None,
        modules=["virtio_mem"],
        # The order of the devices is that in which QEMU creates them.
        arguments=[
            *("-m", f"maxmem={VM_BYTES + COLD_BYTES + HOT_BYTES}B"),
            *("-object", f"{backend},id=cold-memory,size={COLD_BYTES}"),
            *("-object", f"{backend},id=hot-memory,size={HOT_BYTES}"),
            *("-device", "virtio-mem-pci,id=cold,memdev=cold-memory,dynamic-memslots=on"),
            *("-device", "pcie-root-port,id=port0"),
            *Tmem(daemon.socket("vm1")).arguments(),
        ],
    )
    guest = vm.start()
    guest.sh("echo online_movable >/sys/devices/system/memory/auto_online_blocks")
    load(guest)
    hot = {"driver": "virtio-mem-pci", "id": "hot", "memdev": "hot-memory", "bus": "port0"}
    vm.qmp.execute("device_add", {**hot, "dynamic-memslots": True})
    slots = {device: memory_slots(vm, device) for device in ("cold", "hot")}
    assert slots == {"cold": COLD_BYTES >> 30, "hot": HOT_BYTES >> 30}
    plug(vm, daemon, "cold")
    plug(vm, daemon, "hot")
    before = stats(guest)
    Torture(guest, f"--seed={seed()} --ops=1000 --files=16 --size-max=262144", 600).finish()
    after = stats(guest)
    assert after["mismatches"] == 0
    assert after["hits"] > before["hits"]
    vm.quit()


@contextmanager
def mount_hugetlbfs(directory: Path) -> Iterator[Path]:
    """Mounts a file system of huge pages in a new directory, until the context ends."""
    directory.mkdir()
    subprocess.run(
        ["mount", "-t", "hugetlbfs", "-o", f"pagesize={HUGE_BYTES}", "none", directory], check=True
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def shm_file() -> Iterator[Path]:
    """Yields an empty file on /dev/shm that only its owner may read and write."""
    descriptor, name = tempfile.mkstemp(prefix="tmem-", dir="/dev/shm")
    os.close(descriptor)
    yield Path(name)
    Path(name).unlink()


def check_memory(session: Session, kernel: Kernel, module: Path, backend: str) -> str:
    """Runs torture in a guest with the memory backend; returns the daemon's list of mappings."""
    daemon = start_visible_daemon(session)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        memory_bytes=VM_BYTES,
        memory_backend=f"{backend},share=on",
    )
    guest = vm.start()
    load(guest)
    mappings = Path(f"/proc/{daemon.process.pid}/smaps").read_text()
    Torture(guest, f"--seed={seed()} --ops=1000 --files=16 --size-max=262144", 600).finish()
    after = stats(guest)
    assert after["hits"] > 0 and after["mismatches"] == 0
    vm.stop()
    return mappings


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_cache_works_with_huge_page_memory(
    session: Session, kernel: Kernel, module: Path, kind: str
) -> None:
    directory = session.directory / "huge"
    with reserve_huge_pages(VM_BYTES // HUGE_BYTES), mount_hugetlbfs(directory):
        # QEMU creates a file without a name in the directory, with the mode 0600.
        memory = {"memfd": "memfd,hugetlb=on", "file": f"file,mem-path={directory}"}[kind]
        mappings = check_memory(session, kernel, module, f"memory-backend-{memory}")
    assert re.search(rf"KernelPageSize: +{HUGE_BYTES >> 10} kB", mappings), (
        "the daemon did not map huge pages"
    )
    assert (str(directory) in mappings) == (kind == "file")


def test_cache_works_with_a_memory_file_on_tmpfs(
    session: Session, kernel: Kernel, module: Path, shm_file: Path
) -> None:
    backend = f"memory-backend-file,mem-path={shm_file}"
    assert str(shm_file) in check_memory(session, kernel, module, backend)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_memory_file_of_another_user_is_refused_by_its_path(
    session: Session, kernel: Kernel, module: Path, shm_file: Path
) -> None:
    os.chown(shm_file, OTHER_USER, -1)
    daemon = start_visible_daemon(session)
    vm = driver_vm(
        session,
        kernel,
        module,
        Tmem(daemon.socket("vm1")),
        memory_backend=f"memory-backend-file,mem-path={shm_file},share=on",
    )
    guest = vm.start()
    load(guest, online=False)
    refusal = f'is in the file "{shm_file}", which its owner could truncate'
    until(
        lambda: refusal in daemon.log.read_text(),
        PLUG_SECONDS,
        "the daemon refuses the memory",
    )
    # The guest works without a cache.
    wait_state(guest, "offline")
    guest.sh(f"echo text >{WHERE}/f; sync; echo 3 >/proc/sys/vm/drop_caches; cat {WHERE}/f")
    assert stats(guest)["hits"] == 0
    vm.quit()
