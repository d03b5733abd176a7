# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a real systemd as process 1 of its own namespaces, with this host's programs.

The root directory of this systemd is a tmpfs with the host's /usr, which is read-only. Two
directories are replaced: /usr/sbin, and the directory of systemd's units. The latter has the units
of a test, and empty targets that these units name. So systemd starts nothing else, and no file of
the host is written. The tests must run as root and must be able to mount a cgroup2.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.paths import HarnessError
from harness.process import tail
from harness.wait import scaled, until

TARGETS = ["sysinit", "basic", "multi-user", "network", "shutdown", "local-fs", "umount", "final"]
NAMESPACES = ["--mount", "--pid", "--cgroup", "--net", "--ipc", "--uts"]
# Command that runs a shell script as process 1 of new namespaces. The script ends when its caller
# ends, and all processes that it started end with it.
SCRIPT = ["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-c"]

# The argument $1 is a directory with etc/, sbin/ and units/, and an empty root/.
ROOT_SCRIPT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1/root"
cd "$1/root"
mkdir -p usr etc var/tmp root home proc sys run tmp dev/shm
for dir in bin lib lib64 share; do
    [ -d /usr/$dir ] || continue
    mkdir usr/$dir
    mount --rbind /usr/$dir usr/$dir
    mount -o remount,bind,ro usr/$dir
    ln -s usr/$dir $dir
done
ln -s usr/sbin sbin
cp -a "$1/sbin" usr/sbin
cp -a "$1/etc/." etc
mount --bind "$1/units" usr/lib/systemd/system
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
for device in null zero full random urandom tty; do
    touch dev/$device
    mount --bind /dev/$device dev/$device
done
ln -s /proc/self/fd dev/fd
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
exec chroot . /usr/bin/env -i container=tests PATH=/usr/bin:/usr/sbin \
    /lib/systemd/systemd --system --log-target=console --log-level=info --show-status=0
"""

PROBE = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/probe
rmdir /sys/fs/cgroup/probe
"""


def why_not() -> str | None:
    """Returns the reason why systemd cannot run here, or None."""
    if os.geteuid() != 0:
        return "namespaces and a control group of its own need root"
    if not Path("/lib/systemd/systemd").exists():
        return "there is no /lib/systemd/systemd"
    done = subprocess.run(
        [*SCRIPT, PROBE],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return f"no namespaces with a cgroup2: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Systemd:
    """One systemd, which runs between start() and stop(); `directory` belongs to it."""

    directory: Path
    _process: subprocess.Popen[bytes] | None = None
    pid: int = 0  # pid of systemd as the tests see it

    def __post_init__(self) -> None:
        for name in ("etc/systemd/system", "sbin", "units", "root"):
            (self.directory / name).mkdir(parents=True)
        for name in TARGETS:
            (self.units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        self.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        self.write("etc/group", "root:x:0:\n")
        self.write("etc/nsswitch.conf", "passwd: files\ngroup: files\n")
        self.write("etc/machine-id", "")
        text = "[Unit]\nDefaultDependencies=no\nRequires=basic.target\n"
        (self.units / "default.target").write_text(text)

    @property
    def units(self) -> Path:
        return self.directory / "units"

    @property
    def log(self) -> Path:
        return self.directory / "systemd.log"

    def write(self, name: str, text: str) -> None:
        """Writes a file below systemd's root directory, before systemd starts."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def path(self, name: str) -> Path:
        """Returns the path of a file below systemd's root directory, while systemd runs."""
        return Path(f"/proc/{self.pid}/root") / name.lstrip("/")

    def start(self) -> None:
        """Starts systemd and waits until it answers."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [*SCRIPT, ROOT_SCRIPT, "sh", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process

        def answers() -> bool:
            if process.poll() is not None:
                raise HarnessError(
                    f"systemd ended with status {process.returncode}:\n{tail(self.log)}"
                )
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if not children:
                return False
            self.pid = int(children[0])
            return self.run("systemctl", "is-active", "--quiet", "basic.target").returncode == 0

        until(answers, 30, "systemd has reached its basic target")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in systemd's namespaces, and returns its status and output."""
        enter = ["nsenter", "--target", str(self.pid), *NAMESPACES, "--root", "--wd"]
        return subprocess.run(
            [*enter, *command],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=scaled(60),
        )

    def run_checked(self, *command: str) -> str:
        """Runs a command in systemd's namespaces, which must succeed, and returns its output."""
        done = self.run(*command)
        if done.returncode != 0:
            raise HarnessError(
                f"{' '.join(command)} failed: {done.stdout.strip()}\n{tail(self.log)}"
            )
        return done.stdout.strip()

    def show(self, unit: str, key: str) -> str:
        """Returns a property of a unit."""
        return self.run_checked("systemctl", "show", unit, f"--property={key}", "--value")

    def stop(self) -> None:
        """Ends systemd and all processes that it has started."""
        if self._process and self._process.poll() is None:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
