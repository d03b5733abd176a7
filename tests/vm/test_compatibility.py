# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Programs of the previous release work with programs of this tree, as docs/compatibility.md says.

scripts/previous-release builds the previous release, which takes some minutes at first. If its QEMU
device is that of this tree, there is one device to test.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from driver import checksums, driver_guest, driver_vm, evict, load, stats, wait_state
from test_driver import tree_disk
from test_figures import address

from harness.daemon import Daemon
from harness.kernel import Kernel
from harness.libvirt import Libvirt, Machine, can_mount, emulator_link
from harness.paths import ROOT, guest_program, host_binary, qemu_binary
from harness.process import Process
from harness.session import Session
from harness.vm import Tmem
from harness.wait import scaled, until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

DOCUMENT = ROOT / "docs/compatibility.md"
UUID = "7b2f0f6a-52a5-4dcd-8a7f-0f3d7f6b4f11"
FILES = 8
OLD, NEW = "old", "new"
# Each pair of a new and an old program.
PAIRS = [(OLD, NEW), (NEW, OLD)]
# Versions of driver, device and daemon. All other tests of this directory use three new programs.
TRIPLES = [
    (driver, device, daemon)
    for driver in (OLD, NEW)
    for device in (OLD, NEW)
    for daemon in (OLD, NEW)
    if (driver, device, daemon) != (NEW, NEW, NEW)
]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Release:
    """Programs of one version."""

    programs: Path
    module: Path
    qemu: Path
    # Source of tmem-guest: the packaged program needs the C library, which the guests lack.
    guest_source: Path

    def program(self, name: str) -> Path:
        directories = ("sbin", "bin", ".")
        return next(path for d in directories if (path := self.programs / d / name).exists())


@pytest.fixture(scope="module")
def releases(
    tmp_path_factory: pytest.TempPathFactory, kernel: Kernel, module: Path
) -> dict[str, Release]:
    packages = Path(run(ROOT / "scripts/previous-release").strip())
    root = tmp_path_factory.mktemp("previous")
    for package in packages.glob("*.deb"):
        run("dpkg-deb", "-x", package, root)
    (source,) = root.glob("usr/src/virtio-tmem-*")
    run("make", "-C", source, f"KDIR={kernel.kdir}")
    qemu = Path(run(ROOT / "scripts/previous-release", "--qemu").strip())
    commit = run(ROOT / "scripts/previous-release", "--commit").strip()
    tree = tmp_path_factory.mktemp("source")
    run(ROOT / "packaging/source-tree", "--commit", commit, tree)
    command = "guest-driver/tools/tmem-guest.c"
    old = Release(root / "usr", source / "virtio_tmem.ko", qemu, tree / command)
    new = Release(host_binary("tmemd").parent, module, qemu_binary(), ROOT / command)
    return {OLD: old, NEW: new}


def daemon_of(session: Session, release: Release) -> Daemon:
    daemon = session.daemon("vm1", pool_size="128MiB")
    daemon.program = release.program("tmemd")
    daemon.start()
    return daemon


@pytest.mark.parametrize(("command", "daemon"), PAIRS)
def test_tmemctl_controls_a_daemon_of_the_other_version(
    session: Session, releases: dict[str, Release], command: str, daemon: str
) -> None:
    served = daemon_of(session, releases[daemon])
    programs = releases[command]

    def ctl(*arguments: str) -> str:
        return run(programs.program("tmemctl"), "--socket", served.control, *arguments)

    assert "vm1" in ctl("list")
    vms = json.loads(ctl("--json", "stats"))["vms"]
    assert [vm["name"] for vm in vms] == ["vm1"]
    assert "hits" in ctl("stats", "vm1")
    ctl("pool", "--size", "64MiB")
    assert json.loads(ctl("--json", "pool"))["configured_bytes"] == 64 << 20
    ctl("freeze", "vm1")
    assert served.list()["vms"][0]["frozen"]
    ctl("thaw", "vm1")
    ctl("flush", "vm1")
    ctl("advise")
    versions = json.loads(ctl("--json", "version"))
    found = {name: run(releases[of].program(name), "--version").split()[-1] for name, of in
             (("tmemctl", command), ("tmemd", daemon))}  # fmt: skip
    assert versions == found


@pytest.mark.parametrize(("hook", "daemon"), PAIRS)
def test_libvirt_hook_adds_vms_to_a_daemon_of_the_other_version(
    session: Session, releases: dict[str, Release], hook: str, daemon: str
) -> None:
    served = daemon_of(session, releases[daemon])
    socket = served.directory / "web1.sock"
    domain = f"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
        <name>web1</name><uuid>{UUID}</uuid>
        <metadata><tmem:cache xmlns:tmem='urn:virtio-tmem:cache:1'><tmem:limit>1024</tmem:limit></tmem:cache></metadata>
        <memory unit='MiB'>64</memory>
        <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
        <qemu:commandline><qemu:arg value='-chardev'/>
        <qemu:arg value='socket,id=virtio-tmem,path={socket},reconnect-ms=1000'/>
        <qemu:arg value='-device'/>
        <qemu:arg value='vhost-user-tmem-pci,id=virtio-tmem0,chardev=virtio-tmem,bus=pcie.0,addr=0x1e'/>
        </qemu:commandline></domain>"""  # noqa: E501

    def event(*words: str) -> None:
        program = releases[hook].program("tmem-hook")
        command = [
            str(program),
            "--socket",
            str(served.control),
            "--owner",
            "none",
            "web1",
            *words,
            "-",
        ]
        done = subprocess.run(command, check=False, input=domain, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr

    event("prepare", "begin")
    vms = {vm["name"]: vm for vm in served.list()["vms"]}
    assert set(vms) == {"vm1", "web1"} and vms["web1"]["quota"]["limit_bytes"] == 1 << 20
    event("release", "end")
    assert {vm["name"] for vm in served.list()["vms"]} == {"vm1"}


@pytest.mark.parametrize(("exporter", "daemon"), PAIRS)
def test_exporter_reads_a_daemon_of_the_other_version(
    session: Session, releases: dict[str, Release], exporter: str, daemon: str
) -> None:
    served = daemon_of(session, releases[daemon])
    command: list[str | Path] = [
        str(releases[exporter].program("tmem-exporter")), "--web.listen-address", "127.0.0.1:0",
        "--socket", str(served.control),
    ]  # fmt: skip
    log = session.directory / "exporter.log"
    process = Process("tmem-exporter", command, log, {})

    def metrics() -> str | None:
        process.expect_alive()
        url = address(log)
        if not url:
            return None
        try:
            with urllib.request.urlopen(url, timeout=scaled(5)) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    try:
        text = until(metrics, 20, "the exporter answers")
    finally:
        process.kill()
    assert "\ntmem_up 1" in text
    assert 'tmem_vm_hit_pages_total{vm="vm1"} 0' in text
    version = run(releases[daemon].program("tmemd"), "--version").split()[-1]
    assert f'version="{version}"' in text


@pytest.fixture
def libvirt(session: Session) -> Iterator[Libvirt]:
    libvirt = Libvirt(session.directory / "libvirt", session.directory / "tmemd0/control")
    libvirt.start()
    try:
        yield libvirt
    finally:
        libvirt.stop()


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts in a namespace, for libvirtd")
@pytest.mark.parametrize("versions", PAIRS, ids="-".join)
def test_bridge_adds_vms_and_quotas_to_a_daemon_of_the_other_version(
    session: Session,
    kernel: Kernel,
    libvirt: Libvirt,
    releases: dict[str, Release],
    versions: tuple[str, str],
) -> None:
    """There is no hook here, so the daemon knows the domain from the bridge only."""
    bridge, daemon = versions
    served = daemon_of(session, releases[daemon])
    data, _ = tree_disk(session)
    emulator = emulator_link(session.directory)
    machine = Machine("web1", UUID, kernel, session.directory, data, {}, emulator)
    xml = session.directory / "domain.xml"
    xml.write_text(machine.xml())
    libvirt.virsh("define", xml)
    libvirt.tmemctl("attach", "web1", "--run-directory", served.directory, "--limit", "64MiB")
    libvirt.start_bridge(releases[bridge].program("tmem-libvirt"))
    libvirt.virsh("start", "web1", "--paused")

    def limit() -> int | None:
        found = [vm for vm in served.list()["vms"] if vm["uuid"] == UUID]
        return found[0]["quota"]["limit_bytes"] if found else None

    until(lambda: limit() == 64 << 20, 60, "the daemon serves the domain with its limit")
    quota = "<cache><limit unit='MiB'>5</limit></cache>"
    what = ("urn:virtio-tmem:cache:1", "--key", "tmem", "--set", quota)
    libvirt.virsh("metadata", UUID, *what, "--live")
    until(lambda: limit() == 5 << 20, 60, "the daemon has the new limit")


@pytest.mark.parametrize(("command", "driver"), PAIRS)
def test_guest_command_works_with_a_driver_of_the_other_version(
    session: Session, kernel: Kernel, releases: dict[str, Release], command: str, driver: str
) -> None:
    """The command shows state and counters, keeps a file out of the pool, and drops a tree."""
    served = daemon_of(session, releases[NEW])
    data, sums = tree_disk(session)
    files = list(sums)[:FILES]
    program = guest_program(releases[command].guest_source)
    guest = driver_guest(
        session, kernel, releases[driver].module, Tmem(served.socket("vm1")), disks=[data],
        files={"/bin/tmem-guest": program},
    )  # fmt: skip

    def say(arguments: str) -> dict[str, Any]:
        answer = json.loads(guest.sh(f"/bin/tmem-guest --json {arguments}", 120))
        assert isinstance(answer, dict)
        return answer

    state = say("status")
    assert (state["state"], state["version"]) == (
        "on",
        guest.read("/sys/module/virtio_tmem/version"),
    )
    evict(guest, files)
    # The answer of tmem-guest has lost_fraction in addition to the driver's counters.
    counters = say("stats")
    assert counters.pop("lost_fraction") == 0
    assert counters == stats(guest)
    assert say(f"policy {files[0]}")["pool_pages"] > 0
    assert say(f"policy {files[0]} never")["never"] == 1
    assert say(f"policy {files[0]}")["pool_pages"] == 0
    assert say(f"drop {Path(files[1]).parent}")["errors"] == 0
    assert say(f"policy {files[1]}")["pool_pages"] == 0
    assert checksums(guest, files) == {path: sums[path] for path in files}


@pytest.mark.parametrize("versions", TRIPLES, ids="-".join)
def test_mixed_versions_of_driver_device_and_daemon_work_together(
    session: Session,
    kernel: Kernel,
    releases: dict[str, Release],
    versions: tuple[str, str, str],
) -> None:
    driver, device, daemon = versions
    qemu = releases[device].qemu
    if device == OLD and qemu == releases[NEW].qemu:
        pytest.skip("the device is the same in both versions")
    served = daemon_of(session, releases[daemon])
    data, sums = tree_disk(session)
    files = list(sums)[:FILES]
    # Use retained pages, because the old and the new version know them.
    tmem = Tmem(served.socket("vm1"), properties={"retain": "on"})
    guest = driver_guest(session, kernel, releases[driver].module, tmem, disks=[data], qemu=qemu)
    before = evict(guest, files)
    assert before["puts_stored"] > 0
    assert checksums(guest, files) == {path: sums[path] for path in files}
    after = stats(guest)
    assert after["hits"] - before["hits"] >= before["index_pages"] * 9 // 10
    assert served.stats()["vms"][0]["hits"] > 0


def test_daemon_is_upgraded_and_downgraded_under_a_vm(
    session: Session, kernel: Kernel, module: Path, releases: dict[str, Release]
) -> None:
    """The VM and its quota stay: each daemon reads the VM store of the other one."""
    daemon = daemon_of(session, releases[OLD])
    socket = daemon.socket("added")
    quota = {"reserve_bytes": 4 << 20, "limit_bytes": None, "weight": 100}
    daemon.call("AddVm", vm={"uuid": UUID, "name": "added", "socket": str(socket), "quota": quota})
    data, sums = tree_disk(session)
    files = list(sums)[:FILES]
    vm = driver_vm(session, kernel, module, Tmem(socket), disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0")
    for version in (NEW, OLD):
        daemon.terminate()
        daemon.program = releases[version].program("tmemd")
        daemon.start()
        found = {vm["name"]: vm for vm in daemon.list()["vms"]}["added"]
        assert found["quota"]["reserve_bytes"] == 4 << 20, (
            f"the daemon of version {version} lost the VM's quota"
        )
        wait_state(guest, "on")
        held = evict(guest, files)
        assert checksums(guest, files) == {path: sums[path] for path in files}
        assert stats(guest)["hits"] > held["hits"], (
            f"the guest got no hits from the daemon of version {version}"
        )


def test_compatibility_table_names_both_versions() -> None:
    text = DOCUMENT.read_text()
    new = run(ROOT / "packaging/version").strip()
    commit = run(ROOT / "scripts/previous-release", "--commit").strip()
    changelog = subprocess.check_output(
        ["git", "-C", ROOT, "show", f"{commit}:debian/changelog"], text=True
    )
    old = changelog.split("(", 1)[1].split(")", 1)[0]
    assert new != old and new in text and old in text
