# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests of parts of the harness that need no VM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import initramfs, toolchain, wait
from harness.kernel import Kernel
from harness.paths import HarnessError


def fake_kernel(root: Path) -> Kernel:
    modules = root / "lib/modules/1.0"
    (modules / "kernel").mkdir(parents=True)
    (modules / "modules.builtin").write_text("kernel/drivers/virtio/virtio_pci.ko\n")
    # A line of modules.dep has all dependencies of a module, the nearest first.
    (modules / "modules.dep").write_text(
        "kernel/c-top.ko: kernel/b.ko kernel/a.ko\nkernel/b.ko: kernel/a.ko\nkernel/a.ko:\n"
    )
    return Kernel("1", "1.0", root)


def test_kernel_modules_are_listed_after_their_dependencies(tmp_path: Path) -> None:
    kernel = fake_kernel(tmp_path)
    files = kernel.module_files(["virtio-pci", "c_top", "b"])
    assert [path.name for path in files] == ["a.ko", "b.ko", "c-top.ko"]
    with pytest.raises(HarnessError, match="no module 'absent'"):
        kernel.module_files(["absent"])


def test_programs_run_with_the_dynamic_loader_of_their_directory(tmp_path: Path) -> None:
    """Programs of a newer Debian run with that Debian's loader, which is stored beside them.

    The test uses the loader and the C library of this machine.
    """
    tools, scratch, final = (tmp_path / name for name in ("tools", "new", "kernel here"))
    loader = tools / toolchain.LOADER
    loader.parent.mkdir(parents=True)
    loader.symlink_to(Path("/lib64/ld-linux-x86-64.so.2").resolve())
    scratch.mkdir()
    source = b"""#include <stdio.h>
int main(int n, char **v) { return printf("%s %s %d", v[0], v[1], n) < 0; }"""
    command = ["gcc", "-x", "c", "-o", str(scratch / "tool"), "-"]
    subprocess.run(command, input=source, check=True)
    (scratch / "link").symlink_to("tool")
    (scratch / "lib.so.1").write_bytes((scratch / "tool").read_bytes())
    toolchain.wrap_programs(scratch, final, tools)
    scratch.rename(final)
    assert (final / "lib.so.1").read_bytes().startswith(b"\x7fELF")
    done = subprocess.run([final / "link", "a  b"], check=True, capture_output=True, text=True)
    assert done.stdout == f"{final}/link a  b 2"
    # If the loader beside the program is deleted, the program does not start. So it does not use
    # the machine's own loader, which the program file names.
    loader.unlink()
    assert subprocess.run([final / "tool"], check=False, capture_output=True).returncode != 0


def test_cpio_extracts_the_initramfs(tmp_path: Path) -> None:
    def make() -> bytes:
        archive = initramfs.Archive()
        archive.file("/usr/share/odd", b"12345", 0o640)
        archive.link("bin/sh", "busybox")
        archive.device("dev/console", 5, 1)
        return archive.bytes()

    assert make() == make()
    command = ["cpio", "--extract", "--make-directories", "--quiet", "--no-preserve-owner"]
    subprocess.run([*command, "--nonmatching", "dev/*"], input=make(), cwd=tmp_path, check=True)
    assert (tmp_path / "usr/share/odd").read_bytes() == b"12345"
    assert (tmp_path / "usr/share/odd").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "bin/sh").readlink() == Path("busybox")
    listing = subprocess.run(
        ["cpio", "--list", "--verbose", "--quiet"], input=make(), check=True, capture_output=True
    )
    assert b"5,   1" in listing.stdout


def test_wait_until_fails_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMEM_TIMEOUT_SCALE", "0.5")
    with pytest.raises(wait.WaitTimeout, match=r"condition not met within 0\.05 s: the sky falls"):
        wait.until(lambda: None, 0.1, "the sky falls")
    assert wait.until(lambda: 5, 0, "at once") == 5


def test_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A harness that is killed leaves no process behind."""
    script = (
        "import sys; from pathlib import Path; from harness.process import Process\n"
        "print(Process('sleeper', ['sleep', '1000'], Path(sys.argv[1])).pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], check=False, stdout=subprocess.PIPE
    )
    assert parent.returncode == -9
    status = Path(f"/proc/{int(parent.stdout)}/status")

    def gone() -> bool:
        return not status.exists() or "State:\tZ" in status.read_text()

    wait.until(gone, 10, "the orphan ends")
