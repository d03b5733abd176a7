# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a separate stock libvirtd, which does not touch the machine's own libvirt.

libvirtd runs in a mount namespace with private directories of libvirt. Its sockets are visible
outside, too. The QEMUs that libvirtd starts are no children of the tests and outlive libvirtd.
libvirtd and the QEMUs therefore run in a pid namespace. However the tests end, the kernel ends that
namespace and all processes in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5
from xml.sax.saxutils import escape

from harness import initramfs
from harness.channel import Channel
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.process import Process, tail
from harness.vm import BOOT_SECONDS, TROUBLE
from harness.wait import Deadline, scaled, until

# The domains have no cgroups, labels or owners, because the machine may be a container, and because
# the kernel and disk files must keep their owners.
QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
dynamic_ownership = 0
remember_owner = 0
stdio_handler = "file"
"""

# User that owns the VM sockets, different from the daemon's user. QEMU runs as root in these tests
# and may connect to every socket.
OWNER = "libvirt-qemu"

# Directories of libvirtd on the machine. Each is replaced by a private one.
DIRECTORIES = (
    "/etc/libvirt",
    "/run/libvirt",
    "/var/lib/libvirt",
    "/var/log/libvirt",
    "/var/cache/libvirt",
)


@dataclass(frozen=True)
class Run:
    """Exit status and output of a program that has ended."""

    status: int
    stdout: str
    stderr: str


def run(command: list[str | Path], stdin: str | None = None) -> Run:
    """Runs a program until it ends, and returns its status and output."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, input=stdin, timeout=scaled(60)
    )
    return Run(done.returncode, done.stdout, done.stderr)


# Command that runs a program in namespaces of its own for mounts, processes and the host name. If
# unshare ends, the kernel ends the program and all other processes of the pid namespace.
NAMESPACES = (
    *("unshare", "--mount", "--propagation", "private", "--uts"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)


def can_mount() -> bool:
    """Returns whether this process may mount over directories in its own namespaces."""
    return run([*NAMESPACES, "mount", "--bind", "/etc", "/etc"]).status == 0


def child(pid: int) -> int | None:
    """Returns the only child of a process, or None."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(pids[0]) if pids else None


class Libvirt:
    """libvirtd, and virsh and tmemctl that talk to it. `control` is tmemd's control socket.

    `host` is the host name that this libvirtd sees. It migrates only to a libvirtd with another
    name.
    """

    def __init__(self, directory: Path, control: Path, host: str = "tmem-host") -> None:
        self.directory = directory
        self.host = host
        self.log = directory / "libvirtd.log"
        self.uri = f"qemu+unix:///system?socket={directory}/sockets/libvirt-sock"
        self._control = control
        self._namespaces: Process | None = None
        self._process: Process | None = None
        self._bridge: Process | None = None

    def install_hook(self) -> None:
        """Installs tmem-hook.

        Call it before start(), because libvirtd looks for hooks when it starts.
        """
        path = self.directory / "etc-libvirt/hooks/qemu.d/virtio-tmem"
        path.parent.mkdir(parents=True, exist_ok=True)
        hook = host_binary("tmem-hook").resolve()
        path.write_text(f'#!/bin/sh\nexec {hook} --socket {self._control} --owner {OWNER} "$@"\n')
        path.chmod(0o755)

    def start(self) -> None:
        """Starts libvirtd and waits until it answers."""
        for program in ("libvirtd", "virsh", "unshare", "nsenter"):
            if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
                raise HarnessError(f"{program} is not installed: run scripts/deps test as root")
        sockets = self.directory / "sockets"
        sockets.mkdir(parents=True, exist_ok=True)
        conf = self.directory / "libvirtd.conf"
        conf.write_text(
            f'unix_sock_dir = "{sockets}"\nauth_unix_rw = "none"\nauth_unix_ro = "none"\n'
            f'host_uuid = "{uuid5(NAMESPACE_DNS, self.host)}"\n'
        )
        command: list[str | Path] = [
            *("nsenter", "--target", str(self._enter()), "--mount", "--uts", "--pid"),
            *("libvirtd", "-f", conf, "-p", self.directory / "libvirtd.pid"),
        ]
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self._process = process = Process("libvirtd", command, self.log, {"PATH": path})

        def answers() -> bool:
            process.expect_alive()
            # Run "list", because "version" would fail on a host without an installed QEMU.
            return self._virsh("list").status == 0

        try:
            until(answers, 60, "libvirtd answers")
        except HarnessError as error:
            raise HarnessError(f"{error}\n{self.report()}") from None

    def _enter(self) -> int:
        """Creates the namespaces once, and returns the pid of their first process."""
        if self._namespaces is None:
            script = [f"hostname {self.host}"]
            for place in DIRECTORIES:
                own = self.directory / place.strip("/").replace("/", "-")
                own.mkdir(parents=True, exist_ok=True)
                script.append(f"mkdir -p {place} && mount --bind {own} {place}")
            (self.directory / "etc-libvirt/qemu.conf").write_text(QEMU_CONF)
            # This `sleep` is process 1 of the pid namespace and becomes the parent of QEMUs whose
            # libvirtd has ended. It ignores SIGCHLD so that ended QEMUs do not remain as zombies.
            script.append("exec env --ignore-signal=CHLD sleep infinity")
            command = [*NAMESPACES, "sh", "-ec", " && ".join(script)]
            log = self.directory / "namespaces.log"
            self._namespaces = Process("libvirtd's namespaces", command, log)
        namespaces = self._namespaces

        def first() -> int | None:
            namespaces.expect_alive()
            pid = child(namespaces.pid)
            sleeps = pid and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
            return pid if sleeps else None

        return until(first, 20, "libvirtd's directories are mounted")

    @property
    def bridge_log(self) -> Path:
        return self.directory / "tmem-libvirt.log"

    def start_bridge(self, program: Path | None = None) -> None:
        """Starts tmem-libvirt on the read-only socket, and waits until it follows libvirt.

        `program` is a tmem-libvirt of another version.
        """
        socket = f"{self.directory}/sockets/libvirt-sock-ro"
        command: list[str | Path] = [
            program or host_binary("tmem-libvirt"),
            *("--connect", f"qemu+unix:///system?socket={socket}"),
            *("--socket", self._control, "--owner", OWNER),
        ]
        self._bridge = bridge = Process("tmem-libvirt", command, self.bridge_log)

        def follows() -> bool:
            bridge.expect_alive()
            return "following libvirt" in self.bridge_log.read_text()

        until(follows, 20, "tmem-libvirt follows libvirt")

    def restart(self) -> None:
        """Restarts libvirtd, which leaves its domains running."""
        if self._process and (libvirtd := child(self._process.pid)):
            os.kill(libvirtd, signal.SIGTERM)
            self._process.wait(20)
        self.start()
        # libvirtd reconnects to its domains in the background, and a command to a domain's monitor
        # waits for that. `virsh destroy` does not wait: it kills QEMU, so that the reconnect ends
        # the domain, and then fails because the domain has ended.
        for uuid in self.virsh("list", "--uuid").split():
            self.virsh("qemu-monitor-command", uuid, "--hmp", "info status")

    def _virsh(self, *words: str | Path, stdin: str | None = None) -> Run:
        return run(["virsh", "--quiet", "--connect", self.uri, *words], stdin)

    def virsh(self, *words: str | Path, stdin: str | None = None) -> str:
        """Runs virsh and returns its output; raises with its error message if it fails."""
        done = self._virsh(*words, stdin=stdin)
        if done.status != 0:
            raise HarnessError(f"virsh {words} failed: {done.stderr}\n{self.report()}")
        return done.stdout

    def expect_virsh_error(self, *words: str) -> str:
        """Runs virsh, which must fail, and returns its error message."""
        done = self._virsh(*words)
        if done.status == 0:
            raise HarnessError(f"virsh {words} succeeded and should have failed: {done.stdout}")
        return done.stderr

    def tmemctl_run(self, command: str, domain: str, *words: str | Path) -> Run:
        return run(
            [host_binary("tmemctl"), "--socket", self._control, command, "--connect", self.uri,
             domain, *words]
        )  # fmt: skip

    def tmemctl(self, command: str, domain: str, *words: str | Path) -> str:
        """Runs tmemctl and returns its output; raises with its error message if it fails."""
        done = self.tmemctl_run(command, domain, *words)
        if done.status != 0 or done.stderr:
            raise HarnessError(
                f"tmemctl {command} {words} ended with status {done.status}: {done.stderr}"
            )
        return done.stdout

    def expect_tmemctl_error(
        self, command: str, domain: str, *words: str | Path, status: int = 6
    ) -> str:
        """Runs tmemctl, requires that it exits with `status`, and returns its error message."""
        done = self.tmemctl_run(command, domain, *words)
        if done.status != status:
            raise HarnessError(
                f"tmemctl {command} {words} ended with status {done.status}, not {status}: "
                f"{done.stdout}"
            )
        return done.stderr

    def config(self, domain: str) -> str:
        """Returns the XML with which libvirt will start the domain next, as libvirt writes it."""
        return self.virsh("dumpxml", "--inactive", domain)

    def stop(self) -> None:
        """Ends the bridge, all domains and then libvirtd."""
        if self._bridge:
            self._bridge.kill()
        try:
            if self._process and self._process.is_alive():
                for uuid in self._virsh("list", "--uuid").stdout.split():
                    self._virsh("destroy", uuid)
        finally:
            for process in (self._namespaces, self._process):
                if process:
                    process.kill()

    def report(self) -> str:
        """Returns the ends of the logs, for a failed test's report."""
        domains = sorted((self.directory / "var-log-libvirt").glob("qemu/*.log"))
        logs = [self.log, self.bridge_log, *domains]
        return "\n".join(f"--- {path.name}\n{tail(path)}" for path in logs)


@dataclass(frozen=True)
class Machine:
    """A domain to define: a TCG guest of the harness, with agent, console and one disk."""

    name: str
    uuid: str
    kernel: Kernel
    directory: Path
    disk: Disk
    files: dict[str, Path]
    emulator: Path

    @property
    def console(self) -> Path:
        return self.directory / "console.log"

    @property
    def agent(self) -> Path:
        return self.directory / "agent"

    def xml(self, memory_mib: int = 256) -> str:
        """Returns the domain's XML.

        QEMU gets the directories of its firmware as extra arguments.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        image = initramfs.build(self.kernel, self.directory / "initramfs", files=self.files)
        # no_timer_check: on a busy machine, TCG delays the ticks that the check at boot waits for.
        command = "console=ttyS0 loglevel=6 oops=panic panic=0 tsc=reliable no_timer_check"
        directories = ("/usr/share/seabios", "/usr/share/qemu")
        arguments = "".join(
            f"<qemu:arg value='-L'/><qemu:arg value='{directory}'/>" for directory in directories
        )
        return f"""
<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{self.name}</name>
  <uuid>{self.uuid}</uuid>
  <title>not to be touched &amp; kept</title>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{escape(str(self.kernel.vmlinuz))}</kernel>
    <initrd>{escape(str(image))}</initrd>
    <cmdline>{command}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='maximum'><feature policy='disable' name='la57'/></cpu>
  <on_poweroff>destroy</on_poweroff>
  <devices>
    <emulator>{escape(str(self.emulator))}</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <serial type='file'><source path='{escape(str(self.console))}'/></serial>
    <channel type='unix'>
      <source mode='bind' path='{escape(str(self.agent))}'/>
      <target type='virtio' name='tmem.agent'/>
    </channel>
    <disk type='file' device='disk'>
      <driver name='qemu' type='{self.disk.format}'/>
      <source file='{escape(str(self.disk.path))}'/>
      <target dev='vda' bus='virtio'/>
      <serial>{self.disk.name}</serial>
    </disk>
  </devices>
  <qemu:commandline>{arguments}</qemu:commandline>
</domain>
"""

    def connect(self) -> Guest:
        """Waits until the agent in the guest answers, and returns the guest."""
        deadline = Deadline(BOOT_SECONDS, f"{self.name}: the guest's agent answers")
        until(self.agent.exists, 20, f"{self.name}: QEMU opens the agent's socket")
        return Guest(Channel(self.agent, deadline, self._check), self._check)

    def _check(self) -> None:
        if self.console.exists():
            text = self.console.read_text(errors="replace")
            if found := TROUBLE.search(text):
                raise HarnessError(
                    f"{self.name}: the guest's console shows a fault:\n"
                    f"{text[found.start() :][:4096]}"
                )


def emulator_link(directory: Path) -> Path:
    """Creates a link to the emulator under another name, and returns it."""
    link = directory / "qemu-system-x86_64"
    link.symlink_to(qemu_binary())
    return link
