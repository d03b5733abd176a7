# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Under a real systemd, the unit of the daemon behaves as docs/operating.md describes.

The sandbox of the guest's service tmem-guest-autosize permits what the service needs, and no more.

The tests are skipped, with the reason, if systemd cannot run as process 1 of its own namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import systemd
from harness.daemon import Daemon
from harness.paths import ROOT, host_binary
from harness.process import tail
from harness.systemd import Systemd
from harness.wait import scaled, until

pytestmark = [pytest.mark.usefixtures("host_programs")]

SOURCES = ROOT / "host-daemon/tmemd"
UNIT = "tmemd.service"
RUN = "/run/virtio-tmem"
CONFIG = "etc/virtio-tmem/tmemd.toml"
WATCHDOG_SECONDS = 10.0  # WatchdogSec= of the unit
# Time in seconds that a restart or a stop of the daemon may take on a busy machine, in addition to
# the watchdog's time. A large value hides no error: after a failed restart the daemon never runs,
# and systemd reports the result of a stop.
OWN_SECONDS = 20.0
# Time for which a test counts the restarts of a daemon that cannot start.
STORM_SECONDS = 60
QEMU_USER = 64055
CAPABILITIES = {"chown": 0, "fowner": 3, "sys_resource": 24}
AUTOSIZE = ROOT / "debian/virtio-tmem-guest.tmem-guest-autosize.service"
AUTOSIZE_UNIT = "tmem-guest-autosize.service"
AUTOSIZE_LOG = "/run/autosize.log"
# Largest allowed results of `systemd-analyze security` for units, from 0 (safe) to 10 (unsafe).
EXPOSURE_MAX = {
    SOURCES / UNIT: 3.2,
    AUTOSIZE: 1.3,
}
VM = {
    "uuid": "6f9619ff-8b86-d011-b42d-00c04fc964ff",
    "name": "added",
    "socket": f"{RUN}/added.sock",
    "quota": {"reserve_bytes": 4 << 20, "limit_bytes": None, "weight": 100},
}


def autosize_paths() -> dict[str, str]:
    """Returns the paths that `tmem-guest autosize` writes to, by their names in its source."""
    source = (ROOT / "guest-driver/tools/tmem-guest_autosize.c").read_text()
    found = re.findall(
        r'^#define\s+(RECLAIM|REPORTING|COMPACT|RUN)\s+"(.*)"$', source, re.MULTILINE
    )
    assert len(found) == 4, found
    paths = dict(found)
    paths["REPORTING"] += "/page_reporting_order"
    paths["RUN"] += "/new"
    return paths


# Paths that the sandbox of tmem-guest-autosize.service must keep read-only.
READ_ONLY = ["/etc/new", "/run/new", "/proc/sys/vm/swappiness", "/sys/fs/cgroup/cgroup.procs"]


def probe() -> str:
    """Returns a script that prints the paths that it can open for writing, and its privileges.

    It writes nothing, so the host's kernel does not act.
    """
    paths = " ".join([*autosize_paths().values(), *READ_ONLY])
    return (
        f"for path in {paths}; do (: >>$path) 2>/dev/null && echo can write $path; done\n"
        "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status\n"
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systemd]:
    if reason := systemd.why_not():
        pytest.skip(f"this machine cannot run a separate systemd: {reason}")
    host = Systemd(tmp_path_factory.mktemp("systemd") / "host")
    # Install the files where docs/install.md and the Debian package install them.
    shutil.copy(SOURCES / UNIT, host.units)
    for program in ("tmemd", "tmemctl"):
        shutil.copy(host_binary(program), host.directory / "sbin" / program)
    sysusers = (SOURCES / "virtio-tmem.sysusers").read_text()
    host.write("etc/sysusers.d/virtio-tmem.conf", sysusers)
    # The daemon does not react to the memory of this machine, which may be short.
    host.write(CONFIG, 'pool_size = "64MiB"\nhost_free_min = "0B"\nmemory_pressure = "none"\n')
    # No journal runs under this systemd, so the daemon logs to a file.
    log = "append:/run/tmemd.log"
    text = f"[Service]\nStandardOutput={log}\nStandardError={log}\n"
    host.write("etc/systemd/system/tmemd.service.d/log.conf", text)
    shutil.copy(AUTOSIZE, host.units / AUTOSIZE_UNIT)
    # This systemd runs in namespaces, not in a VM.
    text = (
        "[Unit]\nConditionVirtualization=\n[Service]\nRestart=no\n"
        "ExecStart=\nExecStart=/bin/sh /etc/probe\n"
        f"StandardOutput=append:{AUTOSIZE_LOG}\nStandardError=append:{AUTOSIZE_LOG}\n"
    )
    host.write(f"etc/systemd/system/{AUTOSIZE_UNIT}.d/probe.conf", text)
    host.write("etc/probe", probe())
    try:
        host.start()
        host.run_checked("systemd-sysusers", "/etc/sysusers.d/virtio-tmem.conf")
        yield host
    finally:
        host.stop()


@pytest.fixture
def daemon(host: Systemd) -> Iterator[Daemon]:
    """Starts the daemon's unit, which an earlier test may have stopped, and yields the daemon."""
    done = host.run("systemctl", "start", UNIT)
    assert done.returncode == 0, done.stdout + tail(host.path("/run/tmemd.log"))
    yield Daemon(host.path(RUN), [])
    print(tail(host.path("/run/tmemd.log")))


def main_pid(host: Systemd) -> int:
    """Returns the daemon's pid, in systemd's pid namespace."""
    return int(host.show(UNIT, "MainPID"))


def status(host: Systemd) -> dict[str, str]:
    text = host.run_checked("cat", f"/proc/{main_pid(host)}/status")
    return dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))


def signal_daemon(host: Systemd, number: signal.Signals) -> None:
    host.run_checked("systemctl", "kill", f"--signal={number.name}", "--kill-who=main", UNIT)


def wait_until_restarted(host: Systemd, old: int, seconds: float) -> float:
    """Waits until a daemon with another pid than `old` serves. Returns the seconds that it took."""
    begun = time.monotonic()

    def serves() -> bool:
        new = main_pid(host)
        return new not in (0, old) and host.show(UNIT, "ActiveState") == "active"

    until(serves, seconds, "systemd has started another daemon")
    return time.monotonic() - begun


def test_systemctl_start_returns_when_the_daemon_accepts_connections(
    host: Systemd, daemon: Daemon
) -> None:
    """`systemctl start` returns when the daemon's sockets exist, because of Type=notify."""
    host.run_checked("systemctl", "stop", UNIT)
    host.run_checked("systemctl", "start", UNIT)
    assert daemon.control.is_socket()
    assert daemon.stats()["pool"]["size_bytes"] == 64 << 20
    assert host.show(UNIT, "ActiveState") == "active"
    # systemd reports that the unit's watchdog is active.
    assert host.show(UNIT, "WatchdogUSec") == f"{WATCHDOG_SECONDS:.0f}s"
    # With another signal, a hung daemon could continue and write to guest memory.
    assert host.show(UNIT, "WatchdogSignal") == str(int(signal.SIGKILL))
    # The daemon's control group is beside machine.slice, which has the VMs.
    assert host.show(UNIT, "ControlGroup") == f"/{UNIT}"
    assert host.show(UNIT, "CPUWeight") == "1000"
    assert host.show(UNIT, "LimitMEMLOCK") == "infinity"
    assert int(host.show(UNIT, "WatchdogTimestampMonotonic")) > 0


def test_daemon_has_only_the_privileges_of_its_unit(host: Systemd, daemon: Daemon) -> None:
    user = host.run_checked("id", "--user", "virtio-tmem")
    group = host.run_checked("id", "--group", "virtio-tmem")
    found = status(host)
    assert set(found["Uid"].split()) == {user} and set(found["Gid"].split()) == {group}
    wanted = 1 << CAPABILITIES["chown"] | 1 << CAPABILITIES["fowner"]
    for name in ("CapEff", "CapPrm", "CapBnd"):
        assert int(found[name], 16) == wanted, f"{name} of the daemon is {found[name]}"
    assert int(found["CapAmb"], 16) == 0, (
        "the daemon could pass on capabilities to a program that it starts"
    )
    assert found["NoNewPrivs"] == "1" and found["Seccomp"] == "2"
    directory = daemon.directory.stat()
    assert (str(directory.st_uid), str(directory.st_gid), directory.st_mode & 0o777) == (
        user,
        group,
        0o755,
    )
    assert daemon.control.stat().st_mode & 0o777 == 0o660
    pid = main_pid(host)
    # The daemon's network and mount namespaces differ from systemd's.
    assert host.run_checked("readlink", f"/proc/{pid}/ns/net") != host.run_checked(
        "readlink", "/proc/1/ns/net"
    )
    mounts = host.run_checked("cat", f"/proc/{pid}/mountinfo").splitlines()
    writable = {m.split()[4] for m in mounts if m.split()[5].startswith("rw")}
    assert RUN in writable and not writable & {"/", "/usr/bin", "/home", "/root"}
    limits = host.run_checked("cat", f"/proc/{pid}/limits")
    assert re.search(r"Max core file size +0 +0 ", limits)
    # The test checks the daemon's limits only if process 1, this systemd, may raise limits.
    own = host.run_checked("grep", "CapEff", "/proc/1/status").split()[1]
    if int(own, 16) & 1 << CAPABILITIES["sys_resource"]:
        assert re.search(r"Max locked memory +unlimited +unlimited ", limits)
        assert re.search(r"Max open files +65536 +65536 ", limits)


def test_daemon_is_the_first_victim_of_the_oom_killer(host: Systemd, daemon: Daemon) -> None:
    """The kernel prefers the daemon, and systemd starts it again after the kernel has ended it."""
    old = main_pid(host)
    assert host.run_checked("cat", f"/proc/{old}/oom_score_adj") == "900"
    assert host.show(UNIT, "OOMPolicy") == "continue"
    # The score of a process whose memory is a part p of the host's is 2/3 * (1000 + 1000 p), and
    # the adjustment is added to 1000 p. A VM has a higher score only with more than 90 % of the
    # host's memory.
    score = int(host.run_checked("cat", f"/proc/{old}/oom_score"))
    assert score >= (1000 + 900) * 2 // 3, score
    signal_daemon(host, signal.SIGKILL)
    wait_until_restarted(host, old, OWN_SECONDS)
    assert host.run_checked("cat", f"/proc/{main_pid(host)}/oom_score_adj") == "900"


def test_daemon_sees_no_sockets_of_other_services(host: Systemd, daemon: Daemon) -> None:
    """In /run, the daemon sees its own directory, the journal's and the notification socket."""
    directory = host.path("/run/dbus")
    directory.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as bus:
        bus.bind(str(directory / "system_bus_socket"))
        (directory / "system_bus_socket").chmod(0o666)
        host.run_checked("systemctl", "restart", UNIT)
        sockets = ["find", "/run", "-type", "s"]
        there = set(host.run_checked(*sockets).splitlines())
        assert {"/run/dbus/system_bus_socket", f"{RUN}/control"} <= there
        enter = ["nsenter", "--target", str(main_pid(host)), "--mount", "--root"]
        seen = set(host.run_checked(*enter, *sockets).splitlines())
        others = {
            path for path in seen if not re.match(f"{RUN}/|/run/systemd/(notify$|journal/)", path)
        }
        assert f"{RUN}/control" in seen and not others, (
            f"the daemon does not see its own socket, or sees sockets of other services: {others}"
        )
        # The daemon cannot create files in /run.
        assert host.run(*enter, "touch", "/run/more").returncode != 0
    (directory / "system_bus_socket").unlink()


@pytest.mark.long
def test_systemd_replaces_a_hung_daemon(host: Systemd, daemon: Daemon) -> None:
    """After SIGSTOP, systemd misses the heartbeat, sends SIGKILL and starts another daemon."""
    old, before = main_pid(host), int(host.show(UNIT, "NRestarts"))
    # A daemon that runs normally is not restarted.
    time.sleep(WATCHDOG_SECONDS + 1)
    assert main_pid(host) == old
    signal_daemon(host, signal.SIGSTOP)
    took = wait_until_restarted(host, old, 2 * WATCHDOG_SECONDS + OWN_SECONDS)
    print(f"{took:.2f} s from SIGSTOP until the next daemon serves")
    assert WATCHDOG_SECONDS / 2 < took < WATCHDOG_SECONDS + scaled(OWN_SECONDS)
    assert int(host.show(UNIT, "NRestarts")) == before + 1
    daemon.stats()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_systemd_restarts_a_killed_daemon_with_its_vms(
    host: Systemd, daemon: Daemon, number: signal.Signals
) -> None:
    """Added VMs are served again after a restart, at sockets that their QEMUs' users own."""
    daemon.call("AddVm", vm={**VM, "owner": QEMU_USER, "group": QEMU_USER})
    socket = host.path(f"{RUN}/added.sock")
    # Restart more often than systemd allows by default: the unit has no limit of restarts.
    for _ in range(6):
        old, inode = main_pid(host), socket.stat().st_ino
        signal_daemon(host, number)
        wait_until_restarted(host, old, OWN_SECONDS)
        assert socket.stat().st_uid == socket.stat().st_gid == QEMU_USER
        assert socket.stat().st_ino != inode, (
            "the socket was not created again, so nothing listens at it"
        )
        assert [vm["name"] for vm in daemon.list()["vms"]] == [VM["name"]]
    daemon.call("RemoveVm", uuid=VM["uuid"], socket=VM["socket"])


@pytest.mark.long
def test_systemd_does_not_restart_the_daemon_again_and_again(host: Systemd, daemon: Daemon) -> None:
    """After an error of the configuration or of an option, systemd does not start the daemon again.
    After another failed start, it starts the daemon a few times a minute, until a start succeeds.
    """
    host.run_checked("systemctl", "stop", UNIT)
    path = host.path(CONFIG)
    text = path.read_text()
    units = host.path("/etc/systemd/system")
    start = "ExecStart=/usr/sbin/tmemd"
    unit = host.path(f"/usr/lib/systemd/system/{UNIT}").read_text()
    assert f"{start}\n" in unit
    taken = host.path(f"{RUN}/taken")
    # Each of these units differs from the daemon's unit in its options only.
    others = {
        "option.service": "--no-such-option",
        "taken.service": f"--config /etc/virtio-tmem/good.toml --control {RUN}/taken "
        "--control-read-only none",
    }
    for name, options in others.items():
        (units / name).write_text(unit.replace(start, f"{start} {options}", 1))
    good = host.path("/etc/virtio-tmem/good.toml")
    good.write_text(text)
    path.write_text(f"pool_sizes = 1\n{text}")
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(taken))
            taken.chmod(0o666)
            other.listen()
            host.run_checked("systemctl", "daemon-reload")
            host.run_checked("systemctl", "start", "--no-block", UNIT, *others)
            # The test measures what happens in this time, so it cannot wait for an event.
            time.sleep(STORM_SECONDS)
            restarts = {name: int(host.show(name, "NRestarts")) for name in [UNIT, *others]}
            print(f"restarts within {STORM_SECONDS} s: {restarts}")
            for name, status in [(UNIT, 78), ("option.service", 2)]:
                assert restarts[name] == 0, restarts
                assert host.show(name, "ActiveState") == "failed"
                assert host.show(name, "ExecMainStatus") == str(status)
            doctor = host.run("tmemctl", "doctor").stdout
            assert "the daemon ended with status 78" in doctor, doctor
            assert "tmemd --check-config" in doctor, doctor
            # A start takes at most 1 s, and the next one follows after 5 s to 10 s.
            assert STORM_SECONDS / 12 < restarts["taken.service"] <= STORM_SECONDS / 5, restarts
        # The socket has no listener any more, so the next start succeeds without an operator.
        until(
            lambda: host.show("taken.service", "ActiveState") == "active",
            OWN_SECONDS,
            "the daemon has started",
        )
    finally:
        for name in others:
            host.run("systemctl", "stop", name)
            (units / name).unlink()
        good.unlink()
        path.write_text(text)
        host.run_checked("systemctl", "daemon-reload")
        host.run("systemctl", "reset-failed")
    host.run_checked("systemctl", "start", UNIT)


def test_sockets_get_the_configured_users_and_groups(host: Systemd, daemon: Daemon) -> None:
    """Sockets get the groups and users that the configuration names.

    The daemon is no member of these groups. A reload works although the sandbox prevents the
    daemon from looking up the names again.
    """
    path, names = host.path(CONFIG), host.path("/etc/sysusers.d/given.conf")
    text = path.read_text()
    names.write_text("g tmem-admin -\ng tmem-metrics -\nu qemu - QEMU\n")
    host.run_checked("systemd-sysusers", "/etc/sysusers.d/given.conf")
    given = (
        f'{text}control_group = "tmem-admin"\n'
        f'control_read_only = "{RUN}/control-ro"\ncontrol_read_only_group = "tmem-metrics"\n'
        f'[[vm]]\nname = "own"\nsocket = "{RUN}/own.sock"\nowner = "qemu"\n'
    )
    try:
        path.write_text(given)
        host.run_checked("systemctl", "restart", UNIT)
        old = main_pid(host)
        for name, whose in [
            ("control", "virtio-tmem tmem-admin 660"),
            ("control-ro", "virtio-tmem tmem-metrics 660"),
            ("own.sock", "qemu virtio-tmem 660"),
        ]:
            assert host.run_checked("stat", "--format=%U %G %a", f"{RUN}/{name}") == whose
        path.write_text(given.replace("64MiB", "48MiB"))
        host.run_checked("systemctl", "reload", UNIT)
        until(
            lambda: daemon.stats()["pool"]["size_bytes"] == 48 << 20,
            10,
            "the pool has its new size",
        )
        assert main_pid(host) == old
    finally:
        path.write_text(text)
        host.run_checked("systemctl", "restart", UNIT)


def test_delay_of_restarts_grows_where_systemd_supports_it() -> None:
    """systemd before 254 ignores these keys, so no test with Debian 12's systemd covers them."""
    unit = (SOURCES / UNIT).read_text()
    longest = re.search(r"^RestartSteps=[1-9]\d*\nRestartMaxDelaySec=(\d+)s$", unit, re.MULTILINE)
    assert longest and f"up to {longest[1]} s" in (ROOT / "docs/operating.md").read_text()


def test_systemd_does_not_restart_a_daemon_that_it_stopped(host: Systemd, daemon: Daemon) -> None:
    """After `systemctl stop`, the daemon ends with success, and systemd does not restart it."""
    begun = time.monotonic()
    host.run_checked("systemctl", "stop", UNIT)
    assert time.monotonic() - begun < scaled(OWN_SECONDS)
    assert host.show(UNIT, "ActiveState") == "inactive"
    assert host.show(UNIT, "Result") == "success"
    assert not daemon.control.exists()


def test_sandbox_of_autosize_permits_only_what_the_service_needs(host: Systemd) -> None:
    for path in READ_ONLY[2:]:
        assert host.path(path).exists()
    host.run_checked("systemctl", "start", AUTOSIZE_UNIT)
    until(
        lambda: host.show(AUTOSIZE_UNIT, "ActiveState") != "active", OWN_SECONDS, "the probe ends"
    )
    text = host.path(AUTOSIZE_LOG).read_text()
    assert host.show(AUTOSIZE_UNIT, "Result") == "success", text
    # A host without version 2 of control groups has no memory.reclaim.
    wanted = {
        path
        for path in autosize_paths().values()
        if path.endswith("/new") or host.path(path).exists()
    }
    assert len(wanted) >= 2
    assert set(re.findall(r"^can write (\S+)$", text, re.MULTILINE)) == wanted, text
    found = dict(re.findall(r"^(\w+):\s*(\w+)$", text, re.MULTILINE))
    # Process 1, this systemd, may lack the capability in a container.
    own = host.run_checked("grep", "CapEff", "/proc/1/status").split()[1]
    resource = int(own, 16) & 1 << CAPABILITIES["sys_resource"]
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == resource, text
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2"), text


@pytest.mark.parametrize("source", EXPOSURE_MAX, ids=lambda path: path.stem)
def test_systemd_exposure_rating_of_the_unit_is_below_its_limit(
    tmp_path: Path, source: Path
) -> None:
    """systemd-analyze's exposure rating of the unit does not exceed its bound."""
    unit = tmp_path / source.name.removeprefix("virtio-tmem-guest.")
    shutil.copy(source, unit)
    done = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--no-pager",
            f"--threshold={int(EXPOSURE_MAX[source] * 10)}",
            unit,
        ],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "err"},
    )
    assert done.returncode == 0, done.stdout
