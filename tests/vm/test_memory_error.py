# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A memory error in a clean page is as harmless at its eviction as without the driver.

The driver copies or checks an evicted page, so it reads memory that the kernel alone does not read.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from driver import (
    SETTLE_SECONDS,
    WHERE,
    driver_vm,
    evict,
    growth,
    load,
    set_parameter,
    settle,
    start_daemon,
    stats,
    wait_state,
)

from harness.gdb import READ_MAX, Gdb
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem, Vm
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PAGE = 4096
PAGES = 16
PATH = f"{WHERE}/f"
# The kernel's copy that survives a memory error, on processors with fast string operations (ERMS),
# and its instruction that reads the page, `rep movsb`.
COPY = "copy_mc_enhanced_fast_string"
REP_MOVSB = b"\xf3\xa4"
COPY_BYTES = 64
# Largest number of calls of the kernel's copy while the page cache is dropped.
CALLS_MAX = 200
# With this processor, Linux treats a machine check as on Intel's servers. QEMU's own default is an
# AMD processor that cannot recover from one.
INTEL = "max,la57=off,vendor=GenuineIntel,family=6,model=85,stepping=4"
# Registers of the machine check of a load from damaged memory, as QEMU reports one to a guest when
# the host's memory is damaged: bank 9; valid, uncorrected, enabled, with a physical address, action
# required, data load; a machine check in progress whose instruction can be restarted.
BANK = 9
STATUS = 1 << 63 | 1 << 61 | 1 << 60 | 1 << 59 | 1 << 58 | 1 << 56 | 1 << 55 | 0x134
MCG_STATUS = 7
MISC_PHYSICAL = 0x8C


def boot(
    session: Session,
    kernel: Kernel,
    module: Path,
    retain: str,
    **more: Any,
) -> tuple[Vm, Guest, bytes]:
    """Boots a guest with one file in its page cache, whose pages the host has if it retains them.

    Returns the VM, the guest and the content of the file.
    """
    tmem = Tmem(start_daemon(session).socket("vm1"), properties={"retain": retain})
    vm = driver_vm(session, kernel, module, tmem, **more)
    guest = vm.start()
    load(guest, "verify_every=0")
    content = random.Random(PATH).randbytes(PAGES * PAGE)
    guest.put(PATH, content)
    guest.sh("sync")
    evict(guest, [PATH])
    assert guest.get(PATH) == content
    assert stats(guest)["index_retained_pages"] == (PAGES if retain == "on" else 0)
    return vm, guest, content


def corrupted_kib(guest: Guest) -> int | None:
    """Returns the memory that the kernel no longer uses because of errors.

    Returns None if the kernel is built without CONFIG_MEMORY_FAILURE.
    """
    found = re.search(rb"^HardwareCorrupted: +(\d+) kB", guest.get("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) if found else None


def wait_corrupted(guest: Guest, pages: int) -> None:
    """Waits until the kernel no longer uses `pages` damaged pages, if it reports them."""
    until(
        lambda: corrupted_kib(guest) in (None, pages * PAGE // 1024),
        SETTLE_SECONDS,
        "the kernel stops using the damaged memory",
    )


def check_lost(guest: Guest, content: bytes, before: dict[str, int], pages: int) -> None:
    """Checks that `pages` pages were not put because of errors, and the others were.

    The retained entry of such a page stays valid, because it equals the disk.
    """
    after = settle(guest)
    grown = growth(before, after)
    assert grown["puts_dropped_memory_error"] == pages, grown
    assert grown["puts"] + grown["refs"] == PAGES - pages, grown
    retained = pages if before["index_retained_pages"] else 0
    assert after["index_retained_pages"] == retained
    held = before["index_pages"] - before["index_retained_pages"]
    assert after["index_pages"] - retained == held + PAGES - pages, "a page with an error is held"
    wait_corrupted(guest, pages)
    assert guest.get(PATH) == content
    assert growth(after, stats(guest))["hits"] == PAGES - pages
    wait_state(guest, "on")


@pytest.mark.parametrize("retain", ["off", "on"])
def test_page_with_an_injected_memory_error_is_not_put(
    session: Session, kernel: Kernel, test_module: Path, retain: str
) -> None:
    _, guest, content = boot(session, kernel, test_module, retain)
    before = stats(guest)
    set_parameter(guest, "inject_memory_error", "1")
    # The kernel stops using a damaged page in the background, after the page is free. It kills a
    # process that gets the page before. So no process starts until then, and the agent itself,
    # whose memory is locked, evicts the pages.
    guest.put("/proc/sys/vm/drop_caches", b"1")
    wait_corrupted(guest, PAGES)
    set_parameter(guest, "inject_memory_error", "0")
    check_lost(guest, content, before, PAGES)


def wait_copy(gdb: Gdb, function: int, content: bytes) -> int:
    """Waits until the guest calls the copy for a page of the file; returns the page's address.

    The breakpoint of the function is set. The kernel also copies pages of processes with it.
    """
    begins = {content[at : at + READ_MAX] for at in range(0, len(content), PAGE)}
    for _ in range(CALLS_MAX):
        gdb.wait(60)
        source = gdb.registers()["rsi"]
        if gdb.memory(source, READ_MAX) in begins:
            return source
        gdb.clear_breakpoint(function)
        gdb.step()
        gdb.set_breakpoint(function)
        gdb.resume()
    pytest.fail("the driver does not copy the pages of the file with the kernel's function")


@pytest.mark.parametrize("retain", ["off", "on"])
def test_machine_check_during_the_copy_of_an_evicted_page_loses_only_the_page(
    session: Session, kernel: Kernel, module: Path, retain: str
) -> None:
    """Stops the guest before the instruction that reads the page, and raises a machine check."""
    path = session.directory / "gdb"
    arguments = ("-cpu", INTEL, "-gdb", f"unix:{path},server=on,wait=off")
    # With mitigations, the kernel warns that they are incomplete on this processor.
    vm, guest, content = boot(
        session, kernel, module, retain, arguments=arguments, cmdline="mitigations=off"
    )
    if guest.run("test -d /sys/devices/system/machinecheck").status:
        pytest.skip(f"Linux {kernel.series} is built without CONFIG_X86_MCE")
    assert re.search(r"^flags.*\berms\b", guest.read("/proc/cpuinfo"), re.MULTILINE)
    function = int(guest.sh(f"grep -w {COPY} /proc/kallsyms", 120).split()[0], 16)
    before = stats(guest)
    gdb = Gdb(path)
    gdb.set_breakpoint(function)
    gdb.resume()
    job = guest.start("echo 1 >/proc/sys/vm/drop_caches", 120)
    source = wait_copy(gdb, function, content)
    at = function + gdb.memory(function, COPY_BYTES).index(REP_MOVSB)
    gdb.clear_breakpoint(function)
    gdb.set_breakpoint(at)
    gdb.resume()
    gdb.wait(60)
    physical = int(vm.qmp.human(f"gva2gpa {source:#x}").split()[1], 16)
    vm.qmp.human(f"mce 0 {BANK} {STATUS:#x} {MCG_STATUS} {physical:#x} {MISC_PHYSICAL:#x}")
    gdb.clear_breakpoint(at)
    gdb.close()
    job.wait().check()
    check_lost(guest, content, before, 1)
