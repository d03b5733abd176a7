# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the device and its quota in domains of a stock libvirtd, with tmemctl, hook and bridge.

If a test does not need a running guest, the VM stays paused and uses no processor time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import MODULE, checksums, evict, load, stats, wait_served, wait_state
from test_driver import overwrite, tree_disk

from harness import qcow2
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Guest
from harness.kernel import Kernel
from harness.libvirt import OWNER, Libvirt, Machine, can_mount, emulator_link, run
from harness.paths import ROOT, host_binary, qemu_binary
from harness.session import Session
from harness.wait import until

pytestmark = [
    pytest.mark.usefixtures("qemu", "host_programs"),
    pytest.mark.skipif(
        not can_mount(),
        reason="needs root, and mounts in a namespace, to replace libvirtd's directories",
    ),
]

UUID = "5ca1ab1e-0000-4000-8000-0123456789ab"
LABEL = "web_1-5ca1ab1e"
SCHEMA = ROOT / "docs/libvirt-metadata.rng"
NAMESPACE = "urn:virtio-tmem:cache:1"


@pytest.fixture
def libvirt(session: Session) -> Iterator[Libvirt]:
    libvirt = Libvirt(session.directory / "libvirt", session.directory / "tmemd0/control")
    libvirt.install_hook()
    libvirt.start()
    try:
        yield libvirt
    finally:
        libvirt.stop()


@pytest.fixture
def tree(session: Session) -> tuple[Disk, dict[str, str]]:
    return tree_disk(session)


@pytest.fixture
def machine(
    session: Session, kernel: Kernel, module: Path, tree: tuple[Disk, dict[str, str]]
) -> Machine:
    directory = session.directory / "vm"
    directory.mkdir()
    files = {MODULE: module}
    return Machine("web 1", UUID, kernel, directory, tree[0], files, emulator_link(directory))


def define(libvirt: Libvirt, machine: Machine) -> str:
    """Defines the domain twice: only the second time, libvirt sorts the devices that it added."""
    xml = machine.directory / "domain.xml"
    xml.write_text(machine.xml())
    libvirt.virsh("define", xml)
    xml.write_text(libvirt.config(machine.name))
    libvirt.virsh("define", xml)
    return libvirt.config(machine.name)


def meaning(element: ET.Element) -> tuple[object, ...]:
    """Returns a value of an XML element for comparisons.

    It ignores white space and the order of children and attributes.
    """
    children = sorted((meaning(child) for child in element), key=repr)
    text = (element.text or "").strip()
    return (element.tag, sorted(element.attrib.items()), text, children)


def arguments(xml: str) -> list[str]:
    """Returns the arguments that libvirt passes on to QEMU, in order."""
    name = "{http://libvirt.org/schemas/domain/qemu/1.0}arg"
    return [arg.attrib["value"] for arg in ET.fromstring(xml).iter(name)]


def test_detach_reverts_the_changes_of_attach(libvirt: Libvirt, machine: Machine) -> None:
    """attach makes exactly the intended changes of the XML, and detach reverts them."""
    before = define(libvirt, machine)
    options = (
        "--run-directory",
        machine.directory,
        "--limit",
        "64MiB",
        "--emulator",
        qemu_binary(),
    )

    shown = libvirt.tmemctl("attach", machine.name, *options, "--dry-run")
    printed = libvirt.tmemctl("attach", machine.name, *options, "--print-xml")
    assert libvirt.config(machine.name) == before, "--dry-run or --print-xml changed the domain"

    done = libvirt.tmemctl("attach", machine.name, *options)
    assert done.startswith(shown) and "the device is attached" in done
    attached = libvirt.config(machine.name)
    took, given = ET.fromstring(attached), ET.fromstring(printed)
    assert meaning(took) == meaning(given), "libvirt dropped a part of the XML that attach printed"
    assert arguments(attached) == arguments(printed)
    assert arguments(attached)[: len(arguments(before))] == arguments(before)
    for part in ("+    <source type='memfd'/>", "+    <access mode='shared'/>", "vhost-user-tmem"):
        assert part in shown
    # The diff of attach removes one line only, which names the emulator.
    assert [line for line in shown.splitlines() if re.match("-(?!--)", line)] == [
        f"-    <emulator>{machine.emulator}</emulator>"
    ]
    assert str(qemu_binary()) in attached

    again = libvirt.tmemctl("attach", UUID)
    assert "nothing to change" in again, "attach without options changed a setting"
    assert libvirt.config(machine.name) == attached
    changed = libvirt.tmemctl("attach", machine.name, *options, "--weight", "7", "--dry-run")
    assert [line for line in changed.splitlines() if re.match("[-+](?![-+])", line)] == [
        "+      <tmem:weight>7</tmem:weight>"
    ]

    assert "the device is detached" in libvirt.tmemctl("detach", machine.name)
    assert libvirt.config(machine.name) == before, "detach did not revert all changes of attach"
    assert "nothing to change" in libvirt.tmemctl("detach", machine.name)


def device_property(libvirt: Libvirt, machine: Machine, key: str) -> str | None:
    """Returns a property of the device in the domain's XML; None if it is left out."""
    device = arguments(libvirt.config(machine.name))[-1]
    return dict(part.split("=", 1) for part in device.split(",")[1:]).get(key)


def retain(libvirt: Libvirt, machine: Machine) -> str | None:
    return device_property(libvirt, machine, "retain")


def without_property(machine: Machine, key: str) -> Path:
    """Makes a script that stands for an older QEMU, whose device does not have a property."""
    old = machine.directory / "old"
    old.write_text(
        f"""#!/bin/sh
case "$*" in
*,help) {qemu_binary()} "$@" | grep -v {key} ;;
*) exec {qemu_binary()} "$@" ;;
esac
"""
    )
    old.chmod(0o755)
    return old


def test_attach_sets_retain_only_if_qemu_and_daemon_support_it(
    session: Session, libvirt: Libvirt, machine: Machine
) -> None:
    before = define(libvirt, machine)
    daemon = session.daemon()
    directory = ("--run-directory", daemon.directory)

    def attach(*words: str | Path) -> str:
        return libvirt.tmemctl("attach", machine.name, *words)

    done = attach(*directory)
    assert retain(libvirt, machine) is None
    assert "retained pages stay off: there is no control socket" in done

    daemon.start()
    assert "retained pages" not in attach()
    assert retain(libvirt, machine) == "on"
    attach("--retain", "off")
    assert retain(libvirt, machine) == "off"
    assert "nothing to change" in attach(), "attach without options changed the setting"

    old = without_property(machine, "retain")
    words = libvirt.expect_tmemctl_error(
        "attach", machine.name, "--emulator", old, "--retain", "on"
    )
    assert "no property retain" in words and "--emulator" in words
    attach("--emulator", old)
    assert retain(libvirt, machine) is None, (
        "attach kept retain although this QEMU does not have it, so the VM would not start"
    )
    assert "does not have the property" in attach()
    attach("--emulator", qemu_binary())
    assert retain(libvirt, machine) == "on"

    daemon.stop()
    assert "nothing to change" in attach(), "attach changed the setting although no daemon runs"
    libvirt.tmemctl("detach", machine.name)
    assert libvirt.config(machine.name) == before


def test_attach_sets_swap_only_if_qemu_has_the_property(libvirt: Libvirt, machine: Machine) -> None:
    define(libvirt, machine)

    def attach(*words: str | Path) -> str | None:
        libvirt.tmemctl("attach", machine.name, *words)
        return device_property(libvirt, machine, "swap")

    assert attach() is None
    assert attach("--swap", "on") == "on"
    assert attach("--limit", "1GiB") == "on", "another option changed the setting"
    old = without_property(machine, "swap")
    words = libvirt.expect_tmemctl_error("attach", machine.name, "--emulator", old)
    assert "no property swap" in words and "--swap off" in words
    assert attach("--emulator", old, "--swap", "off") is None


def test_attach_keeps_concurrent_changes_of_the_domain(libvirt: Libvirt, machine: Machine) -> None:
    """attach keeps a change that another program makes to the domain while attach runs.

    The test makes the change while attach runs the emulator to ask for its devices.
    """
    define(libvirt, machine)
    count = machine.directory / "count"
    emulator = machine.directory / "emulator"
    emulator.write_text(
        f"""#!/bin/sh
if [ "$*" = "-device vhost-user-tmem-pci,help" ]; then
    echo >>{count}
    title="change $(wc -l <{count})"
    virsh --connect '{libvirt.uri}' desc --config '{machine.name}' --title "$title" >&2
fi
exec {qemu_binary()} "$@"
"""
    )
    emulator.chmod(0o755)
    options = ("--run-directory", machine.directory, "--emulator", emulator, "--timeout", "60")
    libvirt.tmemctl("attach", machine.name, *options)
    changes = len(count.read_text())
    assert changes > 0
    assert f"<title>change {changes}</title>" in libvirt.config(machine.name)


def test_killed_test_run_leaves_no_process(session: Session, machine: Machine) -> None:
    """If a test run is killed, all its processes end, also QEMUs that libvirtd has started."""

    def there() -> list[int]:
        """Returns the processes whose command lines name this test's directory."""
        found = []
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            with contextlib.suppress(OSError):
                if str(session.directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    started = session.directory / "started"
    tests = os.fork()
    if tests == 0:
        try:
            libvirt = Libvirt(session.directory / "libvirt", session.directory / "control")
            libvirt.start()
            define(libvirt, machine)
            libvirt.virsh("start", machine.name, "--paused")
            libvirt.restart()
            libvirt.virsh("resume", machine.name)
            started.touch()
            signal.pause()
        except BaseException:  # noqa: BLE001 - its process ends here
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        until(lambda: started.exists() or os.waitpid(tests, os.WNOHANG)[0], 120, "a domain runs")
        assert started.exists()
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in there()]
        assert any(name.endswith(b"qemu-system-x86_64") for name in names), names
    finally:
        if started.exists():
            os.kill(tests, signal.SIGKILL)
            os.waitpid(tests, 0)
    until(lambda: not there(), 20, "no process of the run is left")


def test_misconfigurations_are_reported_with_a_remedy(libvirt: Libvirt, machine: Machine) -> None:
    before = define(libvirt, machine)
    words = libvirt.expect_tmemctl_error("attach", machine.name, "--emulator", "/bin/true")
    assert "/bin/true" in words and "vhost-user-tmem-pci" in words and "--emulator" in words
    words = libvirt.expect_tmemctl_error(
        "attach", machine.name, "--limit", "1MiB", "--reserve", "2MiB"
    )
    assert "1024 KiB" in words and "2048 KiB" in words
    words = libvirt.expect_tmemctl_error("attach", "nobody", status=5)
    assert '"nobody"' in words and "virsh list --all" in words
    words = libvirt.expect_tmemctl_error("quota", machine.name)
    assert "tmemctl attach" in words
    for command in ("attach", "detach"):
        # libvirt can add or remove the device only at the next start, so --live is refused.
        assert "--live" in libvirt.expect_tmemctl_error(command, machine.name, "--live", status=2)
    done = libvirt.tmemctl_run("attach", machine.name, "--limit", "1XiB")
    assert done.status == 2 and '"XiB"' in done.stderr
    assert libvirt.config(machine.name) == before


def check_restarts(libvirt: Libvirt, daemon: Daemon, guest: Guest, sums: dict[str, str]) -> None:
    """Checks that the VM has its cache and settings again after restarts of daemon and libvirtd."""
    # A killed daemon serves the VM again after its restart, with all settings of the VM.
    daemon.restart()
    (vm,) = daemon.list()["vms"]
    assert (vm["name"], vm["uuid"], vm["quota"]["limit_bytes"]) == (LABEL, UUID, 2 << 20)
    until(lambda: daemon.list()["vms"][0]["connected"], 60, "QEMU finds the new daemon")
    libvirt.tmemctl("quota", UUID, "--limit", "none", "--live")
    wait_state(guest, "on")
    wait_served(guest)
    check_hits(guest, sums)

    # A daemon that lost its VM store gets the VM when libvirtd restarts.
    daemon.terminate()
    assert list(daemon.directory.glob("*.sock")) == []
    (daemon.directory / f"vms/{UUID}.sock.json").unlink()
    daemon.start()
    assert daemon.list()["vms"] == []
    libvirt.restart()
    until(lambda: daemon.list()["vms"] != [], 20, "the hook has added the VM to the daemon")
    until(lambda: daemon.list()["vms"][0]["connected"], 60, "QEMU finds the socket again")

    # With the bridge, virsh can lower the VM's limit.
    libvirt.start_bridge()
    wait_state(guest, "on")
    wait_served(guest)
    check_hits(guest, sums)
    evict(guest, list(sums))
    assert daemon.stats()["vms"][0]["charged_bytes"] > 1 << 20
    live(libvirt, limit(1))
    until(
        lambda: daemon.stats()["vms"][0]["charged_bytes"] <= 1 << 20,
        10,
        "the VM holds no more than its new limit",
    )
    assert daemon.stats()["vms"][0]["evictions"] > 0


def metadata(libvirt: Libvirt, level: str) -> str:
    return libvirt.virsh("metadata", UUID, NAMESPACE, level)


def check_hits(guest: Guest, sums: dict[str, str]) -> None:
    """Checks that evicted pages come back from the host."""
    held = evict(guest, list(sums))["index_pages"]
    assert held > 0
    hits = stats(guest)["hits"]
    assert checksums(guest, list(sums)) == sums
    assert stats(guest)["hits"] - hits >= held // 2


@pytest.mark.smoke
def test_attached_domain_gets_hits_until_detach(
    session: Session, libvirt: Libvirt, machine: Machine, tree: tuple[Disk, dict[str, str]]
) -> None:
    """A domain with the device of `tmemctl attach` gets hits from the host until `detach`.

    The test also changes the quota of the running VM and restarts the services.
    """
    _, sums = tree
    daemon = session.daemon(pool_size="128MiB")
    before = define(libvirt, machine)
    daemon.start()
    libvirt.tmemctl(
        "attach", machine.name, "--run-directory", daemon.directory, "--reserve", "1MiB"
    )
    assert retain(libvirt, machine) == "on"

    assert daemon.list()["vms"] == []
    libvirt.virsh("start", machine.name)
    (vm,) = daemon.list()["vms"]
    assert (vm["name"], vm["uuid"]) == (LABEL, UUID), (
        "the hook added a VM with a wrong name or UUID to the daemon"
    )
    assert vm["quota"]["reserve_bytes"] == 1 << 20, (
        "the VM does not have the reserve of the domain's metadata"
    )
    socket = Path(vm["socket"])
    assert socket.owner() == OWNER, f"the socket belongs to {socket.owner()}, not to {OWNER}"
    guest = machine.connect()
    try:
        load(guest, "verify_every=0")
        check_hits(guest, sums)
        assert daemon.stats()["vms"][0]["hits"] > 0
        check_quota(libvirt, daemon, machine)

        check_restarts(libvirt, daemon, guest, sums)
    finally:
        guest.close()
    done = libvirt.tmemctl("detach", machine.name)
    assert "The domain runs: the change applies at its next start" in done
    assert daemon.stats()["vms"][0]["connected"], "detach disconnected the device of the running VM"
    libvirt.virsh("destroy", machine.name)
    assert daemon.list()["vms"] == [], (
        "the hook did not remove the VM from the daemon when it ended"
    )
    assert not socket.exists()
    assert list((daemon.directory / "vms").iterdir()) == []
    assert libvirt.config(machine.name) == before
    libvirt.virsh("start", machine.name)
    guest = machine.connect()
    try:
        assert guest.run("grep -l 0x003f /sys/bus/virtio/devices/*/device").status != 0
    finally:
        guest.close()


def check_quota(libvirt: Libvirt, daemon: Daemon, machine: Machine) -> None:
    """Checks changes of a running VM's quota by tmemctl and by virsh."""

    def quota() -> dict[str, int | None]:
        return dict(daemon.list()["vms"][0]["quota"])

    name = machine.name
    assert libvirt.tmemctl("quota", name, "--limit", "2MiB", "--live", "--config") == ""
    assert quota() == {"reserve_bytes": 1 << 20, "limit_bytes": 2 << 20, "weight": 100}
    for level in ("--live", "--config"):
        assert "limit          : 2048 KiB\n" in libvirt.tmemctl("quota", name, level)
        document = machine.directory / "metadata.xml"
        text = metadata(libvirt, level)
        document.write_text(text.replace("<cache", f'<cache xmlns="{NAMESPACE}"', 1))
        valid = run(["xmllint", "--noout", "--relaxng", SCHEMA, document])
        assert valid.status == 0, valid.stderr

    words = libvirt.expect_tmemctl_error("quota", name, "--limit", "512KiB", "--live")
    assert "512 KiB is below the reserve of 1024 KiB" in words
    words = libvirt.expect_tmemctl_error(
        "quota", name, "--limit", "none", "--reserve", "1TiB", "--live"
    )
    assert "1099511627776" in words, f"the daemon's refusal does not name the reserve: {words}"
    assert quota()["limit_bytes"] == 2 << 20
    assert "limit          : 2048 KiB\n" in libvirt.tmemctl("quota", name, "--live")

    # After a wrong change by virsh, `tmemctl quota` reports the fault and can correct it.
    wrong = "<cache><limit unit='XiB'>1</limit></cache>"
    libvirt.virsh("metadata", name, NAMESPACE, "--config", "--key", "tmem", "--set", wrong)
    assert '"XiB"' in libvirt.expect_tmemctl_error("quota", name, "--config")
    libvirt.tmemctl("quota", name, "--limit", "none", "--weight", "7", "--config")
    assert "limit          : unlimited\n" in libvirt.tmemctl("quota", name, "--config")
    assert "limit          : 2048 KiB\n" in libvirt.tmemctl("quota", name, "--live")
    document = machine.directory / "wrong.xml"
    document.write_text(wrong.replace("<cache", f'<cache xmlns="{NAMESPACE}"', 1))
    assert run(["xmllint", "--noout", "--relaxng", SCHEMA, document]).status != 0


def test_hook_stops_a_start_only_if_the_cache_is_required(
    session: Session, libvirt: Libvirt, machine: Machine
) -> None:
    """The hook stops a start only if the domain requires the cache, and never ends a running VM."""
    define(libvirt, machine)
    name = machine.name
    directory = session.directory / "tmemd0"
    attach = ("attach", name, "--run-directory", directory)
    libvirt.tmemctl(*attach, "--required", "yes")
    words = libvirt.expect_virsh_error("start", name)
    assert "cannot use the cache that it requires" in words and f"{directory}/control" in words

    daemon = session.daemon(Tenant(UUID, uuid=UUID), pool_size="8MiB")
    assert daemon.directory == directory
    daemon.start()
    libvirt.tmemctl(*attach, "--reserve", "1TiB")
    words = libvirt.expect_virsh_error("start", name)
    assert "refuses the VM's quota" in words and "1099511627776" in words
    libvirt.tmemctl(*attach, "--reserve", "0", "--trust-domain", "team")
    words = libvirt.expect_virsh_error("start", name)
    assert "in trust domain none" in words and "as the daemon's --vm or [[vm]] says" in words
    libvirt.tmemctl("attach", name, "--trust-domain", "none", "--run-directory", machine.directory)
    words = libvirt.expect_virsh_error("start", name)
    assert str(machine.directory) in words and "--run-directory" in words
    libvirt.tmemctl(*attach)
    private = machine.directory / "private.xml"
    private.write_text(libvirt.config(name).replace("mode='shared'", "mode='private'"))
    libvirt.virsh("define", private)
    words = libvirt.expect_virsh_error("start", name)
    assert "the domain's memory is not shared" in words and "tmemctl attach" in words
    libvirt.tmemctl(*attach)

    # A daemon that hangs delays a start by seconds only.
    daemon.pause()
    assert "did not answer within 2 s" in libvirt.expect_virsh_error("start", name)
    daemon.resume()
    libvirt.virsh("start", name, "--paused")
    daemon.kill()
    libvirt.restart()
    # The VM survived the restart of libvirtd without a running tmemd.
    assert libvirt.virsh("domstate", name).strip() == "paused"
    libvirt.virsh("destroy", name)

    libvirt.tmemctl(*attach, "--required", "no")
    libvirt.virsh("start", name, "--paused")
    assert libvirt.virsh("domstate", name).strip() == "paused"


def live(libvirt: Libvirt, cache: str, *levels: str) -> None:
    """Sets the quota in the domain's metadata with virsh, without tmemctl."""
    what = (NAMESPACE, "--key", "tmem", "--set", cache)
    libvirt.virsh("metadata", UUID, *what, *(levels or ("--live",)))


def limit(mib: int) -> str:
    return f"<cache><limit unit='MiB'>{mib}</limit></cache>"


def vm_of(daemon: Daemon) -> dict[str, Any]:
    """Returns the daemon's only VM, or an empty dict."""
    vms = daemon.list()["vms"]
    assert len(vms) <= 1
    return dict(vms[0]) if vms else {}


def follows(daemon: Daemon, mib: int, what: str, seconds: float = 10) -> None:
    """Waits until the daemon's VM has a limit of `mib` MiB."""

    def has() -> bool:
        vm = vm_of(daemon)
        return bool(vm) and vm["quota"]["limit_bytes"] == mib << 20

    until(has, seconds, what)


def shows(daemon: Daemon, part: str) -> None:
    """Waits until the problem that the daemon reports for the VM contains the text `part`."""
    until(
        lambda: part in (vm_of(daemon)["problem"] or ""), 10, f"the VM's problem contains '{part}'"
    )


def test_bridge_applies_quotas_after_any_service_restarts(
    session: Session, libvirt: Libvirt, machine: Machine
) -> None:
    """A quota set with virsh reaches the daemon, even if a service does not run at that time."""
    daemon = session.daemon(pool_size="128MiB")
    define(libvirt, machine)
    attach = ("attach", machine.name, "--run-directory", daemon.directory)
    libvirt.tmemctl(*attach, "--limit", "64MiB")
    # The VM starts while the daemon does not run. It gets its cache when the daemon runs.
    libvirt.start_bridge()
    libvirt.virsh("start", machine.name, "--paused")
    daemon.start()

    follows(daemon, 64, "the bridge tells the daemon of the VM")
    assert (vm_of(daemon)["name"], vm_of(daemon)["uuid"]) == (LABEL, UUID)
    until(lambda: vm_of(daemon)["connected"], 60, "QEMU finds the daemon")

    live(libvirt, limit(5))
    follows(daemon, 5, "the quota is that of virsh")
    live(libvirt, limit(6), "--config")
    live(libvirt, limit(7))
    follows(daemon, 7, "the new limit of the running VM applies")

    # A setting that is not valid is shown as a problem, and the last valid one stays.
    for wrong, part in [
        ("<cache><limit unit='XiB'>1</limit></cache>", '"XiB"'),
        ("<cache><limit>1</limit><reserve>2</reserve></cache>", "below the reserve of 2 KiB"),
        ("<cache><reserve unit='TiB'>1</reserve></cache>", "1099511627776"),
        ("<cache><trust_domain>team</trust_domain></cache>", "the VM is connected"),
    ]:
        live(libvirt, wrong)
        shows(daemon, part)
        assert vm_of(daemon)["quota"]["limit_bytes"] == 7 << 20
        shown = run([host_binary("tmemctl"), "--socket", daemon.control, "list"]).stdout
        assert f"{LABEL}: the requested settings are not in effect: " in shown and part in shown
        assert part in libvirt.bridge_log.read_text()
    live(libvirt, limit(8))
    follows(daemon, 8, "the corrected limit applies")
    assert vm_of(daemon)["problem"] is None

    # libvirtd refuses a migration to itself.
    words = libvirt.expect_virsh_error("migrate", "--live", "--unsafe", machine.name, libvirt.uri)
    assert "same host" in words


def test_vm_keeps_its_settings_after_restarts_of_all_services(
    session: Session, libvirt: Libvirt, machine: Machine
) -> None:
    """The VM has its settings again after the daemon, libvirtd and the VM are restarted in turn."""
    daemon = session.daemon(pool_size="128MiB")
    define(libvirt, machine)
    libvirt.tmemctl("attach", machine.name, "--run-directory", daemon.directory, "--limit", "6MiB")
    daemon.start()
    libvirt.start_bridge()
    libvirt.virsh("start", machine.name, "--paused")
    live(libvirt, limit(8))
    follows(daemon, 8, "the quota is that of virsh")

    daemon.kill()
    live(libvirt, limit(9))
    daemon.start()
    follows(daemon, 9, "the limit that changed while the daemon did not run")

    libvirt.restart()
    live(libvirt, limit(10))
    follows(daemon, 10, "the bridge finds the new libvirtd", 30)

    # A saved VM is removed from the daemon. When the VM is restored, it has its settings again.
    libvirt.virsh("managedsave", machine.name)
    assert vm_of(daemon) == {}
    assert not (daemon.directory / f"{UUID}.sock").exists()
    libvirt.virsh("start", machine.name, "--paused")
    follows(daemon, 10, "the new limit of the restored VM applies")
    until(lambda: vm_of(daemon)["connected"], 60, "the restored QEMU finds the daemon")

    libvirt.virsh("destroy", machine.name)
    assert vm_of(daemon) == {}
    libvirt.virsh("domrename", machine.name, "shop")
    libvirt.virsh("start", "shop", "--paused")
    follows(daemon, 6, "the limit of the next start applies")
    assert vm_of(daemon)["name"] == "shop"
    libvirt.virsh("destroy", "shop")
    assert vm_of(daemon) == {}


def test_ten_domains_have_their_own_sockets_and_quotas(
    session: Session, libvirt: Libvirt, machine: Machine
) -> None:
    """Each domain has its own socket and quota, and none is left at the end."""
    daemon = session.daemon(pool_size="128MiB")
    daemon.start()
    libvirt.start_bridge()
    uuids = [f"{UUID[:-2]}{number:02}" for number in range(10)]
    for number, uuid in enumerate(uuids):
        own = replace(
            machine, name=f"vm{number}", uuid=uuid, directory=machine.directory / f"{number}"
        )
        own.directory.mkdir()
        # Remove the disk, because ten VMs cannot write to one disk.
        xml = re.sub("<disk.*?</disk>", "", own.xml(memory_mib=128), flags=re.DOTALL)
        (own.directory / "domain.xml").write_text(xml)
        libvirt.virsh("define", own.directory / "domain.xml")
        options = ("--run-directory", daemon.directory, "--reserve", f"{number + 1}MiB")
        libvirt.tmemctl("attach", own.name, *options)
        libvirt.virsh("start", own.name, "--paused")

    def quotas() -> dict[str, int]:
        return {vm["name"]: vm["quota"]["reserve_bytes"] >> 20 for vm in daemon.list()["vms"]}

    assert quotas() == {f"vm{number}": number + 1 for number in range(10)}
    until(
        lambda: all(vm["connected"] for vm in daemon.list()["vms"]), 60, "all QEMUs are connected"
    )
    daemon.restart()
    for number in range(10):
        wish = f"<cache><reserve unit='MiB'>{10 - number}</reserve></cache>"
        what = (NAMESPACE, "--key", "tmem", "--set", wish)
        libvirt.virsh("metadata", f"vm{number}", *what, "--live")
    wanted = {f"vm{number}": 10 - number for number in range(10)}
    until(lambda: quotas() == wanted, 20, "the daemon has all quotas")
    until(
        lambda: all(vm["connected"] for vm in daemon.list()["vms"]), 60, "all QEMUs are connected"
    )
    for number in range(10):
        libvirt.virsh("destroy", f"vm{number}")
    assert daemon.list()["vms"] == []
    assert list(daemon.directory.glob("*.sock")) == []
    assert list((daemon.directory / "vms").iterdir()) == []


def test_restored_and_reverted_vms_read_no_newer_page(
    session: Session, libvirt: Libvirt, machine: Machine, tree: tuple[Disk, dict[str, str]]
) -> None:
    """A restored VM caches again; a reverted VM gets no page that it put after the snapshot."""
    disk, sums = tree
    image = qcow2.create(session.directory / "top.qcow2", disk.path.stat().st_size, disk.path)
    machine = replace(machine, disk=replace(disk, path=image, format="qcow2"))
    daemon = session.daemon(pool_size="128MiB")
    daemon.start()
    define(libvirt, machine)
    libvirt.tmemctl("attach", machine.name, "--run-directory", daemon.directory)

    def again() -> Guest:
        until(lambda: vm_of(daemon)["connected"], 60, "QEMU finds the daemon")
        guest = machine.connect()
        wait_state(guest, "on")
        wait_served(guest)
        return guest

    libvirt.virsh("start", machine.name)
    guest = machine.connect()
    try:
        load(guest, "verify_every=0")
        check_hits(guest, sums)
        guest.close()
        libvirt.virsh("managedsave", machine.name)
        assert vm_of(daemon) == {}
        libvirt.virsh("start", machine.name)
        guest = again()
        check_hits(guest, sums)

        evict(guest, list(sums))
        libvirt.virsh("snapshot-create-as", machine.name, "one")
        changed = {path: overwrite(guest, path) for path in list(sums)[:8]}
        evict(guest, list(changed))
        assert checksums(guest, list(changed)) == changed
        evict(guest, list(changed))
        guest.close()
        libvirt.virsh("snapshot-revert", machine.name, "one")
        guest = again()
        assert checksums(guest, list(sums)) == sums, (
            "a file differs from its contents at the time of the snapshot"
        )
        check_hits(guest, sums)
    finally:
        guest.close()


def test_local_migration_uses_two_sockets_and_moves_no_cached_page(
    session: Session, libvirt: Libvirt, machine: Machine, tree: tuple[Disk, dict[str, str]]
) -> None:
    """Migration between two libvirtds with one daemon uses two sockets and moves no cached page."""
    _, sums = tree
    daemon = session.daemon(pool_size="128MiB")
    daemon.start()
    other = Libvirt(session.directory / "other", daemon.control, "tmem-other")
    other.install_hook()
    other.start()
    try:
        for each in (libvirt, other):
            each.start_bridge()
        define(libvirt, machine)
        libvirt.tmemctl(
            "attach", machine.name, "--run-directory", daemon.directory, "--limit", "9MiB"
        )
        libvirt.virsh("start", machine.name)
        guest = machine.connect()
        load(guest, "verify_every=0")
        check_hits(guest, sums)
        evict(guest, list(sums))
        guest.close()
        sockets = [daemon.directory / f"{UUID}{which}.sock" for which in ("", "-b")]
        for at, to in ((libvirt, other), (other, libvirt)):
            machine = migrate(at, to, machine)
            assert at.virsh("list", "--uuid").split() == []
            vm = vm_of(daemon)
            assert (vm["name"], vm["uuid"]) == (LABEL, UUID), (
                "the daemon's VM does not have the name and UUID of the migrated VM"
            )
            sockets.reverse()
            assert vm["socket"] == str(sockets[0])
            assert sockets[0].exists() and not sockets[1].exists()
            renamed = f"VM {LABEL}+incoming is renamed to {LABEL}"
            assert renamed in daemon.log.read_text(), (
                "the log does not show that the VM was renamed after the migration"
            )
            until(lambda: vm_of(daemon)["connected"], 60, "QEMU has found the daemon")
            guest = machine.connect()
            wait_state(guest, "on")
            wait_served(guest)
            assert checksums(guest, list(sums)) == sums
            check_hits(guest, sums)
            guest.close()
            follows(daemon, 9, "the quota moves along with the VM")
    finally:
        other.stop()


def migrate(at: Libvirt, to: Libvirt, machine: Machine) -> Machine:
    """Migrates the VM. The QEMU at the destination has other paths for its sockets and logs."""
    arrived = replace(machine, directory=machine.directory / "then")
    arrived.directory.mkdir()
    xml = at.virsh("dumpxml", "--migratable", "--security-info", machine.name)
    for old, new in ((machine.agent, arrived.agent), (machine.console, arrived.console)):
        xml = xml.replace(str(old), str(new))
    (arrived.directory / "domain.xml").write_text(xml)
    at.virsh(
        *("migrate", "--live", "--unsafe", "--persistent", "--undefinesource"),
        *("--xml", arrived.directory / "domain.xml", machine.name, to.uri),
        *("--migrateuri", f"unix://{arrived.directory}/socket"),
    )
    return arrived
