# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Kernels that require signatures or are locked down behave as docs/secure-boot.md says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import (
    DEADLINE_MS,
    HOOKS,
    MODULE,
    WHERE,
    checksums,
    driver_vm,
    evict,
    start_daemon,
    stats,
    wait_served,
)

from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import ROOT
from harness.session import Session
from harness.vm import Tmem

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

LOCKDOWN = "/sys/kernel/security/lockdown"
ENFORCE = "/sys/module/module/parameters/sig_enforce"
FILES = 4
FILE_BYTES = 1 << 20


def documented_messages() -> list[tuple[str, str]]:
    """Returns the messages of insmod and of the kernel from the table in docs/secure-boot.md."""
    text = (ROOT / "docs/secure-boot.md").read_text()
    lines = text.split("<!-- table: refusals -->\n", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    return [(row[2], row[3]) for row in rows]


def lock_down(guest: Guest, mode: str) -> None:
    guest.sh(
        f"mount -t securityfs securityfs /sys/kernel/security; echo {mode} >{LOCKDOWN}"
        f" && grep '\\[{mode}\\]' {LOCKDOWN}"
    )


def sign(kernel: Kernel, module: Path, directory: Path) -> Path:
    """Signs a copy of the module with a key that no kernel trusts, and returns the copy."""
    key, certificate, signed = directory / "key", directory / "certificate", directory / "signed.ko"
    command = [
        "openssl", "req", "-new", "-x509", "-nodes", "-subj", "/CN=nobody", "-newkey", "rsa:2048",
        "-keyout", str(key), "-outform", "DER", "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    tool = kernel.kdir / "scripts/sign-file"
    command = [str(tool), "sha256", str(key), str(certificate), str(module), str(signed)]
    subprocess.run(command, check=True)
    return signed


def test_refused_modules_log_the_documented_messages(
    session: Session,
    kernel: Kernel,
    module: Path,
    tmp_path: Path,
    expect_error: Callable[[Callable[[], object]], str],
) -> None:
    signed = sign(kernel, module, tmp_path)
    # The checks follow in an order in which none prevents the next: the lockdown lasts until the
    # next boot, so the checks without lockdown come first.
    (unsigned_row, unknown_row, locked_row, loads_row) = documented_messages()
    guest = driver_vm(session, kernel, module, None, files={"/signed.ko": signed}).start()

    def said(after: int) -> str:
        return "\n".join(guest.sh("dmesg").splitlines()[after:])

    def refused(path: str, row: tuple[str, str]) -> None:
        lines = len(guest.sh("dmesg").splitlines())
        assert row[0] in expect_error(lambda: guest.insmod(path))
        assert row[1] in said(lines)
        assert "virtio_tmem" not in guest.sh("cat /proc/modules")

    guest.insmod(MODULE)
    assert loads_row[1] in guest.sh("dmesg")
    assert int(guest.read("/proc/sys/kernel/tainted")) & (4096 | 8192) == 4096 | 8192
    guest.sh("rmmod virtio_tmem")
    lock_down(guest, "integrity")
    refused(MODULE, locked_row)
    guest.sh(f"echo 1 >{ENFORCE}")
    refused(MODULE, unsigned_row)
    refused("/signed.ko", unknown_row)


def test_mounts_after_a_lockdown_are_cached(session: Session, kernel: Kernel, module: Path) -> None:
    """The driver serves a file system that is mounted after the kernel is locked down.

    The module is loaded before the lockdown, because it is not signed with a trusted key.
    """
    daemon = start_daemon(session)
    guest = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), cpus=2).start()
    guest.insmod(MODULE, f"deadline_ms={DEADLINE_MS} verify_every=1")
    lock_down(guest, "confidentiality")
    guest.mount("data", WHERE)
    wait_served(guest)
    assert int(guest.read("/sys/kernel/virtio_tmem/hooks"), 16) & HOOKS == HOOKS

    files = [f"{WHERE}/{i}" for i in range(FILES)]
    for path in files:
        guest.sh(f"dd if=/dev/urandom of={path} bs={FILE_BYTES} count=1 2>/dev/null")
    guest.sh("sync")
    sums = checksums(guest, files)
    evict(guest, files)
    hits = stats(guest)["hits"]
    assert checksums(guest, files) == sums
    assert stats(guest)["hits"] - hits > FILES * FILE_BYTES // 4096 // 2

    done = guest.run("echo 1 >/sys/kernel/tracing/events/virtio_tmem/enable")
    assert done.status != 0 and b"Operation not permitted" in done.stderr
