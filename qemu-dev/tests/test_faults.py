# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Faults of guests, backends and operators: the cost of each, and the error that it causes."""

import signal
import time

import pytest

from machine import (
    ACKNOWLEDGE,
    BACKEND_TIMEOUT_MS,
    DRIVER,
    IMPATIENT,
    NEEDS_RESET,
    SCALE,
    wait_for,
)

# Time-out of an operation in these tests, long enough for a loaded machine.
OPERATION_MS = int(1000 * SCALE)
ANSWER_MS = int(OPERATION_MS * 0.9)
RETRY_WAIT_FACTOR = 20  # RETRY_WAIT_FACTOR of the device

MQ, LOG_SHMFD, REPLY_ACK, CONFIG, RESET_DEVICE, MEM_SLOTS = (
    1 << bit for bit in (0, 1, 3, 9, 13, 15)
)
EVENT_INTERVAL_NS = 10**9  # minimum interval between QMP events of a device
PAGE = 4096
BASELINE_SLOTS = 8  # limit for a backend without CONFIGURE_MEM_SLOTS
DIMM_BYTES = 2 << 20
HOTPLUG = ["-m", "64M,slots=16,maxmem=1G"]
VERSION_1 = 1 << 32
RETAIN = 1 << 2
EVERY_FEATURE = (1 << 64) - 1 - (1 << 33)  # all features except for VIRTIO_F_ACCESS_PLATFORM
# Values of the property retain, and feature bits that the driver accepts.
RETAIN_AND_ACCEPTED = pytest.mark.parametrize(
    ("retain", "accepted"), [("off", VERSION_1), ("on", VERSION_1), ("on", VERSION_1 | RETAIN)]
)
# An address that is neither RAM nor a device: below the firmware, above the RAM.
NOWHERE = 0x80000000


def connections(daemon):
    return len([event for event in daemon.read() if event.get("event") == "connected"])


# Time-outs


@pytest.mark.parametrize("arguments", [(), ("--bytewise",)])
@pytest.mark.parametrize("operation", ["start", "stop", "reset", "plug"])
def test_one_deadline_covers_all_messages_of_an_operation(machine, backend, operation, arguments):
    """QEMU drops a backend that takes too long for an operation, but sends each byte in time."""
    delay_ms = ANSWER_MS if not arguments else OPERATION_MS // 10
    features = MQ | LOG_SHMFD | REPLY_ACK | CONFIG | RESET_DEVICE
    daemon = backend("--delay-ms", str(delay_ms), "--protocol-features", hex(features), *arguments)
    vm = machine(device=f",backend-timeout-ms={OPERATION_MS}", more=HOTPLUG)
    daemon.wait("handshake", lambda event: event.get("request") == "GET_CONFIG")
    wait_for("the handshake", lambda: vm.property("connected"))
    run = {
        "start": vm.driver_up,
        "stop": lambda: vm.qmp("stop"),
        "reset": vm.reset,
        "plug": lambda: plug(vm, "more"),
    }
    if operation != "start":
        vm.driver_up()
    daemon.be_slow()
    start = time.monotonic()
    run[operation]()
    elapsed_ms = (time.monotonic() - start) * 1000
    print(f"{operation}: {elapsed_ms:.0f} ms, {daemon.requests()[-1]}")
    assert elapsed_ms < 1.8 * OPERATION_MS
    vm.alive()


def test_slow_handshake_is_refused_after_the_timeout(machine, backend):
    daemon = backend("--delay-ms", str(ANSWER_MS))
    daemon.be_slow()
    vm = machine(device=f",backend-timeout-ms={OPERATION_MS}")
    daemon.wait("the probe", lambda event: event.get("request") == "GET_FEATURES")
    wait_for(
        "the refusal of the backend",
        lambda: vm.property("last-error").startswith("the backend did not answer"),
    )
    assert daemon.requests().count("SET_VRING_CALL") == 0


@pytest.mark.parametrize("operation", ["stop", "reset"])
def test_qemu_waits_before_it_reconnects_after_a_timeout(machine, backend, operation):
    """If a backend was too slow, QEMU waits before it connects again."""
    daemon = backend("--delay-ms", str(10 * BACKEND_TIMEOUT_MS))
    vm = machine(device=IMPATIENT)
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    asked = daemon.requests().count("GET_FEATURES")
    daemon.be_slow()
    start = time.monotonic()
    if operation == "stop":
        vm.qmp("stop")
    else:
        vm.reset()
    daemon.be_slow(False)
    assert vm.property("last-error") == f"the backend did not answer within {BACKEND_TIMEOUT_MS} ms"
    wait_for(
        "the next connection attempt of QEMU",
        lambda: daemon.requests().count("GET_FEATURES") > asked,
    )
    assert (time.monotonic() - start) * 1000 >= RETRY_WAIT_FACTOR * BACKEND_TIMEOUT_MS


# Memory


def plug(vm, name, share=True):
    vm.qmp(
        "object-add",
        **{"qom-type": "memory-backend-memfd", "id": name, "size": DIMM_BYTES, "share": share},
    )
    vm.qmp("device_add", driver="pc-dimm", id=f"{name}-dimm", memdev=name)


def test_hotplugged_memory_must_be_shared(machine, backend):
    vm = machine(more=HOTPLUG)
    with pytest.raises(RuntimeError, match="'alone' is not shared"):
        plug(vm, "alone", share=False)
    daemon = backend()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    with pytest.raises(RuntimeError, match="'served' is not shared"):
        plug(vm, "served", share=False)
    tables = daemon.requests().count("SET_MEM_TABLE")
    plug(vm, "shared")
    daemon.wait(
        "the memory table with the plugged memory",
        lambda event: daemon.requests().count("SET_MEM_TABLE") > tables,
    )
    assert vm.generation() == daemon.generation()


@pytest.mark.parametrize("first", [True, False], ids=["memory first", "device first"])
@pytest.mark.parametrize(
    "device",
    [
        "pc-dimm,memdev=more",
        "virtio-mem-pci,memdev=more",
        "virtio-mem-pci,memdev=more,dynamic-memslots=on",
    ],
)
def test_memory_of_the_command_line_must_be_shared(machine, device, first):
    memory = ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"]
    plugged = ["-object", "memory-backend-memfd,id=more,size=128M,share=off", "-device", device]
    with pytest.raises(ConnectionError) as caught:
        machine(
            machine=",memory-backend=mem",
            memory=memory + plugged if first else memory,
            more=HOTPLUG if first else HOTPLUG + plugged,
        )
    assert "'more' is not shared" in str(caught.value)
    assert "share=on" in str(caught.value)


def test_memory_slots_are_limited_also_without_a_connected_backend(machine, backend):
    """QEMU refuses memory that exceeds the backend's slots, also while no backend is connected."""
    features = MQ | LOG_SHMFD | REPLY_ACK | CONFIG | RESET_DEVICE
    daemon = backend("--protocol-features", hex(features))
    vm = machine(more=HOTPLUG)
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    daemon.kill()
    vm.wait_generation(0)
    with pytest.raises(RuntimeError, match="free memory slots"):
        for count in range(BASELINE_SLOTS + 1):
            plug(vm, f"m{count}")
    daemon = backend("--protocol-features", hex(features))
    vm.wait_generation(None)
    assert vm.generation() == daemon.generation()


# Guests


@pytest.mark.parametrize("where", [NOWHERE, (64 << 20) - 0x4000])
def test_rings_outside_of_memory_set_needs_reset_and_keep_the_backend(machine, backend, where):
    daemon = backend()
    vm = machine()
    wait_for("the handshake", lambda: vm.property("connected"))
    vm.driver_up(rings=where)
    wait_for("NEEDS_RESET", lambda: vm.get_status() & NEEDS_RESET)
    assert vm.generation() == 0
    vm.qmp("stop")
    vm.qmp("cont")
    assert vm.property("connected")
    vm.driver_up()
    assert vm.wait_generation(None)
    assert connections(daemon) == 1
    assert "backend refused" not in vm.errors()


def test_ring_outside_of_memory_after_a_pause_clears_the_generation(machine, backend):
    """A pause keeps the generation, unless a ring is outside of memory when the VM resumes."""
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    vm.qmp("stop")
    vm.place_ring(1, NOWHERE)
    assert vm.generation() == daemon.generation()
    vm.qmp("cont")
    wait_for("NEEDS_RESET", lambda: vm.get_status() & NEEDS_RESET)
    assert vm.generation() == 0
    vm.driver_up()
    assert vm.wait_generation(None)


def test_queue_size_set_after_the_addresses_does_not_abort_qemu(machine):
    """When a queue grows, QEMU caches its ring again: a read beyond the cache would abort QEMU."""
    vm = machine()
    vm.driver_up()
    vm.reset()
    vm.write(vm.common + 22, 2, 0)
    vm.write(vm.common + 24, 2, 16)
    for offset, part in ((32, 0), (40, 0x8000), (48, 0xC000)):
        vm.write(vm.common + offset, 4, 0x100000 + part)
        vm.write(vm.common + offset + 4, 4, 0)
    vm.write(vm.common + 28, 2, 1)
    vm.set_status(ACKNOWLEDGE | DRIVER)
    vm.qmp("x-query-virtio-queue-element", path=vm.path(), queue=0, index=200)
    vm.alive()


def test_virtio_config_generation_changes_with_the_config_space(machine, backend):
    """The configuration generation changes at once, also while a paused VM gets no interrupt."""
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    wait_for("the configuration interrupt", vm.config_interrupt)
    vm.qmp("stop")
    before = vm.config_generation()
    daemon.kill()
    vm.wait_generation(0)
    assert not vm.config_interrupt()
    assert vm.config_generation() != before


# Backends


def stop_queue(daemon):
    daemon.process.send_signal(signal.SIGUSR2)


def test_a_queue_that_stops_sets_needs_reset(machine, backend):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    wait_for("the configuration interrupt after the start", vm.config_interrupt)
    stop_queue(daemon)
    wait_for("NEEDS_RESET", lambda: vm.get_status() & NEEDS_RESET)
    assert vm.generation() == 0
    assert vm.config_interrupt()
    assert vm.status()["vhost-started"] is False
    assert "the device needs a reset: the backend stopped queue 1" in vm.errors()
    assert "the backend stopped queue 1" in vm.property("last-error")
    # The stopped queue does not start again after a pause, or when another backend connects.
    vm.qmp("stop")
    vm.qmp("cont")
    daemon.kill()
    daemon = backend()
    daemon.wait("the handshake", lambda event: event.get("request") == "GET_CONFIG")
    wait_for("the end of the handshake", lambda: vm.property("connected"))
    assert vm.generation() == 0
    assert vm.status()["vhost-started"] is False
    vm.driver_up()
    assert not vm.get_status() & NEEDS_RESET
    assert vm.wait_generation(None) == daemon.generation()


def test_resume_of_the_vm_clears_the_error_of_a_stopped_queue(machine, backend):
    """When the VM resumes, QEMU starts a queue again that stopped during the pause."""
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    vm.qmp("stop")
    stop_queue(daemon)
    daemon.wait(
        "the queue error in the log of the backend", lambda event: event.get("event") == "error"
    )
    # QEMU reads the error descriptor before it answers this query.
    vm.status()
    vm.qmp("cont")
    assert vm.status()["vhost-started"] is True
    assert vm.generation() == daemon.generation() != 0
    assert not vm.get_status() & NEEDS_RESET


def test_qemu_acknowledges_only_the_protocol_features_that_it_needs(machine, backend):
    # The backend offers all features except PAGEFAULT, DEVICE_STATE, and those that change the
    # meaning of messages in this test.
    offered = (1 << 17) - 1 & ~(1 << 8 | 1 << 14 | MEM_SLOTS | 1 << 16)
    daemon = backend("--protocol-features", hex(offered))
    machine()
    [event] = daemon.wait(
        "the features", lambda event: event.get("request") == "SET_PROTOCOL_FEATURES"
    )[:1]
    assert event["value"] == MQ | LOG_SHMFD | REPLY_ACK | CONFIG | RESET_DEVICE


# Operators


@pytest.mark.parametrize(
    "chardev",
    [
        "socket,id=tmem,host=127.0.0.1,port=1,reconnect-ms=1000",
        "socket,id=tmem,host=127.0.0.1,port=0,server=on,wait=off",
    ],
)
def test_tcp_chardev_is_refused(machine, chardev):
    with pytest.raises(ConnectionError) as caught:
        machine(chardev=chardev)
    assert "chardev 'tmem' is not a Unix socket" in str(caught.value)


def test_legacy_virtio_mmio_is_refused(machine):
    options = {"board": "microvm", "driver": "vhost-user-tmem"}
    with pytest.raises(ConnectionError) as caught:
        machine(**options)
    assert "virtio-mmio.force-legacy=false" in str(caught.value)
    machine(more=["-global", "virtio-mmio.force-legacy=false"], **options).alive()


def test_quitting_qemu_reports_no_lost_backend(machine, backend):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    vm.qmp("quit")
    vm.process.wait(20)
    assert "lost its backend" not in vm.errors()


# Migration


def arrived(vm):
    return wait_for(
        "the end of the migration",
        lambda: (
            (status := vm.qmp("query-migrate").get("status"))
            and status in ("completed", "failed")
            and status
        ),
    )


def test_destination_with_postcopy_uses_its_backend_after_the_migration(machine, backend, folder):
    """With the capability postcopy-ram, the destination uses its backend after the migration.

    This also holds if the migration did not use post-copy.
    """
    vm = machine()
    vm.driver_up()
    target = machine(path=folder / "target", more=["-incoming", "defer"])
    for each in (vm, target):
        capability = {"capability": "postcopy-ram", "state": True}
        each.qmp("migrate-set-capabilities", capabilities=[capability])
    target.qmp("migrate-incoming", uri=f"unix:{folder}/migration")
    vm.qmp("migrate", uri=f"unix:{folder}/migration")
    assert arrived(vm) == arrived(target) == "completed"
    daemon = backend(path=folder / "target")
    target.map()
    target.wait_generation(None)
    assert target.generation() == daemon.generation()


def test_vm_that_waits_for_a_migration_sends_its_backend_no_message(machine, backend, folder):
    daemon = backend(path=folder)
    target = machine(more=["-incoming", "defer"])
    capability = {"capability": "postcopy-ram", "state": True}
    daemon.wait(
        "a connection of QEMU to the backend", lambda event: event.get("event") == "connected"
    )
    # QEMU must not have requested the backend's features yet; otherwise it would refuse the
    # capability.
    target.qmp("migrate-set-capabilities", capabilities=[capability])
    assert daemon.requests() == []
    assert not target.property("connected")


def test_migration_stream_omits_the_generation(machine, backend, folder):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    generation = vm.wait_generation(daemon.generation()) and vm.generation()
    vm.qmp("migrate", uri=f"exec:cat >{folder}/state")
    assert arrived(vm) == "completed"
    state = (folder / "state").read_bytes()
    assert b"vhost-user-tmem" in state
    assert generation.to_bytes(8, "little") not in state
    vm.qmp("cont")
    assert vm.wait_generation(generation)


@RETAIN_AND_ACCEPTED
def test_migration_between_equal_retain_values_succeeds(machine, backend, folder, retain, accepted):
    """A destination with the same retain loads the state, whatever features the driver accepted."""
    vm = machine(device=f",retain={retain}")
    vm.driver_up(accepted=accepted)
    target = machine(
        path=folder / "target", device=f",retain={retain}", more=["-incoming", "defer"]
    )
    target.qmp("migrate-incoming", uri=f"unix:{folder}/migration")
    vm.qmp("migrate", uri=f"unix:{folder}/migration")
    assert arrived(vm) == arrived(target) == "completed"
    daemon = backend("--features", hex(EVERY_FEATURE), path=folder / "target")
    target.map()
    target.wait_generation(daemon.generation())
    [*_, event] = daemon.wait("features", lambda event: event.get("request") == "SET_FEATURES")
    assert event["value"] & (VERSION_1 | RETAIN) == accepted


@RETAIN_AND_ACCEPTED
def test_destination_with_a_different_retain_value_refuses_the_state(
    machine, folder, retain, accepted
):
    """QEMU refuses a different value of retain even if the driver did not accept the feature.

    Otherwise the guest would see other features after its next reset."""
    there = "off" if retain == "on" else "on"
    vm = machine(device=f",retain={retain}")
    vm.driver_up(accepted=accepted)
    target = machine(path=folder / "target", device=f",retain={there}", more=["-incoming", "defer"])
    for each in (vm, target):
        capability = {"capability": "return-path", "state": True}
        each.qmp("migrate-set-capabilities", capabilities=[capability])
    target.qmp("migrate-incoming", uri=f"unix:{folder}/migration", **{"exit-on-error": False})
    vm.qmp("migrate", uri=f"unix:{folder}/migration")
    assert arrived(vm) == arrived(target) == "failed"
    message = (
        f"vhost-user-tmem t0: the source has retain={retain} and the destination has "
        f"retain={there}. Start the destination with retain={retain}"
    )
    assert message in target.errors()
    assert vm.qmp("query-status")["running"]


def job(vm, command, **arguments):
    """Runs a QMP command that starts a job. Returns the error of the job, or None."""
    vm.qmp(command, **{"job-id": "job", **arguments})

    def ended():
        [state] = vm.qmp("query-jobs")
        return state if state["status"] == "concluded" else None

    error = wait_for(f"the end of {command}", ended).get("error")
    vm.qmp("job-dismiss", id="job")
    return error


def test_loaded_snapshot_must_have_the_same_retain(machine, folder):
    """QEMU compares retain with the loaded snapshot, not with a snapshot that it saved before."""
    image = str(folder / "image")
    vm = machine()
    assert not job(vm, "blockdev-create", options={"driver": "file", "filename": image, "size": 0})
    vm.qmp("blockdev-add", driver="file", filename=image, **{"node-name": "file"})
    qcow2 = {"driver": "qcow2", "file": "file"}
    assert not job(vm, "blockdev-create", options={**qcow2, "size": PAGE})
    for retain, error in (("off", None), ("on", "the source has retain=off")):
        vm.close()
        vm = machine(
            device=f",retain={retain}",
            more=[
                "-blockdev",
                f"driver=qcow2,node-name=disk,file.driver=file,file.filename={image}",
            ],
        )
        disk = {"vmstate": "disk", "devices": ["disk"]}
        assert not job(vm, "snapshot-save", tag=retain, **disk)
        assert not job(vm, "snapshot-load", tag=retain, **disk)
        assert bool(job(vm, "snapshot-load", tag="off", **disk)) == bool(error)
        assert not error or error in vm.errors()
    # After the refused snapshot, a snapshot with the same retain can be loaded.
    assert not job(vm, "snapshot-load", tag="on", **disk)


@pytest.mark.parametrize(
    ("driver", "device_id"),
    [
        ("vhost-user-tmem-pci", 63),
        ("vhost-user-blk-pci,disable-legacy=on,disable-modern=off", 2),
    ],
)
def test_pages_marked_by_a_lost_backend_are_migrated(machine, backend, folder, driver, device_id):
    page = 8 << 20
    daemon = backend("--write-at", str(page))
    vm = machine(driver=f"{driver},addr=5", device_id=device_id)
    vm.driver_up()
    vm.command(f"memset {page:#x} 4096 0x11")
    # Fill memory with pages that are not zero, so that the migration takes some time.
    vm.command(f"memset {32 << 20:#x} {16 << 20:#x} 0x5a")
    vm.qmp("migrate-set-parameters", **{"max-bandwidth": 65536})
    stream = folder / "state"
    stream.touch()
    vm.qmp("migrate", uri=f"exec:cat >{stream}")

    def copied(byte):
        return bytes([byte]) * 4096 in stream.read_bytes()

    wait_for("the first copy of the page", lambda: copied(0x11))
    # QEMU has sent the dirty log, but the backend's report of it may still be on its way.
    daemon.wait("the dirty log", lambda event: event.get("request") == "SET_LOG_BASE")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.process.wait(20)
    wait_for(
        "the loss of the backend",
        lambda: [
            each
            for each in vm.qmp("query-chardev")
            if each["label"] == "tmem" and each["filename"].startswith("disconnected:")
        ],
    )
    # The backend must be connected: vhost-user-blk of newer QEMUs does not let a VM migrate without
    # its backend.
    backend().wait(
        "the start of the device", lambda event: event.get("request") == "SET_VRING_KICK"
    )
    assert vm.qmp("query-migrate")["status"] == "active"
    vm.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
    assert arrived(vm) == "completed"
    assert copied(0x22)


@pytest.mark.parametrize("served", [True, False])
def test_background_snapshots_are_refused(machine, backend, folder, served):
    vm = machine()
    vm.driver_up()
    if served:
        vm.wait_generation(backend().generation())
    capability = {"capability": "background-snapshot", "state": True}
    try:
        vm.qmp("migrate-set-capabilities", capabilities=[capability])
    except RuntimeError as error:
        pytest.skip(f"this host has no background snapshots: {error}")
    try:
        vm.qmp("migrate", uri=f"exec:cat >{folder}/state")
    except RuntimeError as error:
        assert "background snapshots" in str(error)
    else:
        assert arrived(vm) == "failed"
        assert "background snapshots" in vm.qmp("query-migrate")["error-desc"]
    assert vm.qmp("query-status")["status"] == "running"


# Management


def test_properties_and_events_report_the_backend_state(machine, backend):
    vm = machine()
    path = vm.path()
    assert vm.property("connected") is False
    assert vm.property("generation") == 0
    assert vm.property("last-error") == "no backend has connected yet"
    daemon = backend("--batch-max", "1")
    wait_for("the refusal of the backend", lambda: "batch_max 1" in vm.property("last-error"))
    daemon.kill()
    vm.driver_up()
    daemon = backend()
    vm.wait_generation(daemon.generation())
    assert vm.property("connected") is True
    assert vm.property("generation") == daemon.generation()
    assert vm.property("last-error") == ""
    daemon.kill()
    vm.wait_generation(0)
    assert vm.property("connected") is False
    assert vm.property("last-error") == "the backend closed the connection"

    def events():
        # QEMU limits the rate of events by its clock, which only this command advances under qtest.
        vm.command(f"clock_step {EVENT_INTERVAL_NS}")
        return vm.tmem_events()

    # At most one event per second is sent, and the last state of a burst counts.
    lost = {
        "id": "t0",
        "qom-path": path,
        "connected": False,
        "generation": 0,
        "error": "the backend closed the connection",
    }
    wait_for("the event of the lost backend", lambda: events() and events()[-1] == lost)


def test_repeated_refusal_of_a_backend_sends_no_further_event(machine, backend):
    vm = machine()
    daemon = backend("--batch-max", "1")
    wait_for("further connection attempts of QEMU", lambda: connections(daemon) > 2)
    vm.command(f"clock_step {EVENT_INTERVAL_NS}")
    before = len(vm.tmem_events())
    assert before > 0
    attempts = connections(daemon)
    wait_for("further connection attempts of QEMU", lambda: connections(daemon) > attempts + 1)
    vm.command(f"clock_step {EVENT_INTERVAL_NS}")
    assert len(vm.tmem_events()) == before


def test_last_error_says_that_the_backend_closed_the_connection(machine, backend):
    vm = machine()
    backend("--close-at", "1")
    wait_for(
        "the error of the closed connection",
        lambda: vm.property("last-error") == "the backend closed the connection",
    )
