# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The device's guarantees for a guest while backends come, go, hang and misbehave."""

import signal
import time

import pytest

from machine import BACKEND_TIMEOUT_MS, IMPATIENT, wait_for

VERSION_1 = 1 << 32
EVENT_IDX = 1 << 29
INDIRECT_DESC = 1 << 28
PROTOCOL_FEATURES = 1 << 30
IN_ORDER = 1 << 35
RETAIN = 1 << 2
LATENCIES = 1 << 4
SWAP = 1 << 5
OFFERED = VERSION_1 | EVENT_IDX | INDIRECT_DESC | LATENCIES


def exercise(vm):
    """Performs actions of a guest and of a host. All must complete, also without a backend."""
    vm.driver_up()
    vm.config()
    vm.status()
    vm.qmp("stop")
    vm.status()
    vm.qmp("cont")
    vm.config()
    vm.qmp("system_reset")
    wait_for("the reset of the guest", lambda: vm.pci_read(4) & 2 == 0)
    vm.map()
    vm.status()
    vm.driver_up()
    vm.config()
    vm.reset()
    vm.driver_up()
    vm.status()
    vm.alive()


def test_device_works_without_a_backend(machine):
    vm = machine()
    exercise(vm)
    assert vm.config() == (0, 4096, 4, 64, 256)
    assert vm.status()["num-vqs"] == 5
    assert vm.status()["vhost-started"] is False


def test_features_are_the_same_with_and_without_backend(machine, backend):
    vm = machine()
    vm.driver_up()
    alone = vm.features()
    assert alone == OFFERED
    # This backend offers all feature bits but bit 33, among them VHOST_F_LOG_ALL and packed rings.
    backend("--features", hex((1 << 64) - 1 - (1 << 33)))
    vm.wait_generation(None)
    assert vm.features() == alone
    assert vm.config()[1:] == (4096, 4, 64, 256)


@pytest.mark.parametrize(
    ("option", "bit"),
    [("indirect_desc", INDIRECT_DESC), ("event_idx", EVENT_IDX), ("latencies", LATENCIES)],
)
def test_feature_is_not_offered_if_its_property_is_off(machine, backend, option, bit):
    vm = machine(device=f",{option}=off")
    vm.driver_up()
    assert vm.features() == OFFERED & ~bit
    # A backend needs only the features that the device offers.
    backend("--features", hex((OFFERED | PROTOCOL_FEATURES) & ~bit))
    vm.wait_generation(None)


def accepted(daemon):
    """Returns the features that QEMU acknowledged last, without those of vhost-user itself."""
    [*_, event] = daemon.wait("features", lambda event: event.get("request") == "SET_FEATURES")
    return event["value"] & ~PROTOCOL_FEATURES


@pytest.mark.parametrize("features", [OFFERED | IN_ORDER, (OFFERED | IN_ORDER) & ~LATENCIES])
def test_backend_without_the_latencies_feature_is_accepted(machine, backend, features):
    """The device offers LATENCIES, and accepts a backend with or without this feature."""
    daemon = backend("--features", hex(features | PROTOCOL_FEATURES))
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    assert accepted(daemon) == OFFERED & features
    vm.alive()


def test_virtio_f_in_order_is_negotiated(machine, backend):
    daemon = backend("--features", hex(OFFERED | IN_ORDER | PROTOCOL_FEATURES))
    vm = machine(device=",in_order=on")
    vm.driver_up()
    assert vm.features() == OFFERED | IN_ORDER
    vm.wait_generation(daemon.generation())
    assert accepted(daemon) == OFFERED | IN_ORDER


def test_backend_without_virtio_f_in_order_is_refused(machine, backend):
    vm = machine(device=",in_order=on")
    backend("--features", hex(OFFERED | PROTOCOL_FEATURES))
    message = "lacks the feature VIRTIO_F_IN_ORDER; set in_order=off"
    wait_for("the refusal of the backend in QEMU's log", lambda: message in vm.errors())


@pytest.mark.parametrize("retain", ["off", "on"])
def test_retain_feature_is_offered_only_with_retain_on(machine, backend, retain):
    """The device offers RETAIN with retain=on only, with and without a backend."""
    expected = OFFERED | (RETAIN if retain == "on" else 0)
    vm = machine(device=f",retain={retain}")
    vm.driver_up()
    assert vm.features() == expected
    daemon = backend("--features", hex(OFFERED | RETAIN | PROTOCOL_FEATURES))
    vm.wait_generation(daemon.generation())
    assert vm.features() == expected
    assert accepted(daemon) == expected
    names = vm.status()["host-features"]["dev-features"]
    assert any("VIRTIO_TMEM_F_RETAIN" in name for name in names) is (retain == "on")


def test_swap_feature_is_offered_only_with_swap_on(machine, backend):
    """The device offers SWAP with swap=on only. The backend does not need the feature."""
    vm = machine(device=",swap=on")
    vm.driver_up()
    assert vm.features() == OFFERED | SWAP
    names = vm.status()["host-features"]["dev-features"]
    assert any("VIRTIO_TMEM_F_SWAP" in name for name in names)
    daemon = backend("--features", hex(OFFERED | PROTOCOL_FEATURES))
    vm.wait_generation(daemon.generation())
    assert accepted(daemon) == OFFERED


def test_backend_without_the_retain_feature_is_refused_with_retain_on(machine, backend):
    vm = machine(device=",retain=on")
    daemon = backend("--features", hex(OFFERED | PROTOCOL_FEATURES))
    message = (
        "the backend lacks the feature VIRTIO_TMEM_F_RETAIN; "
        "set retain=off or update the backend (tmemd)"
    )
    line = f"vhost-user-tmem t0: backend refused: {message}\n"
    wait_for("the refusal of the backend in QEMU's log", lambda: line in vm.errors())
    assert vm.property("last-error") == message
    exercise(vm)
    assert vm.generation() == 0
    daemon.kill()
    daemon = backend("--features", hex(OFFERED | RETAIN | PROTOCOL_FEATURES))
    vm.wait_generation(daemon.generation())


def test_backend_without_the_retain_feature_is_accepted_by_default(machine, backend):
    daemon = backend("--features", hex(OFFERED | PROTOCOL_FEATURES))
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    assert accepted(daemon) == OFFERED


@pytest.mark.parametrize("bits", [0, EVENT_IDX, INDIRECT_DESC | LATENCIES])
def test_driver_may_accept_a_subset_of_the_features(machine, backend, bits):
    daemon = backend()
    vm = machine()
    vm.driver_up(accepted=VERSION_1 | bits)
    vm.wait_generation(daemon.generation())
    assert accepted(daemon) == VERSION_1 | bits & ~LATENCIES


def test_pci_ids_and_vector_count_are_as_specified(machine):
    vm = machine(device=",num-queues=3")
    assert vm.pci_read(0) == 0x107F1AF4
    assert vm.pci_read(8) >> 16 == 0x00FF
    offset = vm.pci_read(0x34) & 0xFF
    while vm.pci_read(offset) & 0xFF != 0x11:
        offset = vm.pci_read(offset) >> 8 & 0xFF
    vectors = (vm.pci_read(offset) >> 16 & 0x7FF) + 1
    assert vectors == 3 + 3


def test_generation_is_valid_when_the_driver_sets_driver_ok(machine, backend):
    daemon = backend()
    vm = machine()
    daemon.wait("handshake", lambda event: event.get("request") == "GET_CONFIG")
    vm.driver_up()
    # The generation must be valid at once: the guest may read it right after DRIVER_OK.
    assert vm.generation() == daemon.generation() != 0
    wait_for("the configuration interrupt", vm.config_interrupt)
    assert vm.status()["vhost-started"] is True


def test_late_backend_sets_the_generation_and_raises_an_interrupt(machine, backend):
    vm = machine()
    vm.driver_up()
    wait_for("the configuration interrupt after the start", vm.config_interrupt)
    assert vm.generation() == 0
    daemon = backend()
    wait_for("the configuration interrupt", vm.config_interrupt)
    assert vm.generation() == daemon.generation()


@pytest.mark.parametrize("up", [False, True])
def test_device_survives_repeated_backend_kills(machine, backend, up):
    vm = machine()
    if up:
        vm.driver_up()
    for _ in range(5):
        daemon = backend()
        daemon.wait("handshake", lambda event: event.get("request") == "GET_CONFIG")
        if up:
            vm.wait_generation(daemon.generation())
        daemon.kill()
        if up:
            vm.wait_generation(0)
            wait_for("the configuration interrupt", vm.config_interrupt)
        vm.status()
        vm.alive()


def test_qmp_queries_send_the_backend_no_message(machine, backend):
    """QMP queries of the device send its backend no message.

    Without patch 0004, QEMU sends GET_VRING_BASE to read an index, which stops the queue."""
    daemon = backend()
    vm = machine()
    vm.driver_up()
    assert vm.wait_generation(daemon.generation())
    before = daemon.requests()
    daemon.process.send_signal(signal.SIGSTOP)
    path = [entry["path"] for entry in vm.qmp("x-query-virtio") if entry["name"] == "virtio-tmem"]
    for queue in range(5):
        vm.qmp("x-query-virtio-queue-status", path=path[0], queue=queue)
        vm.qmp("x-query-virtio-vhost-queue-status", path=path[0], queue=queue)
    vm.status()
    daemon.process.send_signal(signal.SIGCONT)
    vm.qmp("stop")
    daemon.wait("the pause of the VM", lambda event: event.get("request") == "GET_VRING_BASE")
    assert daemon.requests()[len(before)] == "SET_VRING_ENABLE"
    vm.alive()


def test_pause_keeps_the_generation(machine, backend):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    before = vm.wait_generation(daemon.generation()) and vm.generation()
    wait_for("the configuration interrupt", vm.config_interrupt)
    vm.qmp("stop")
    assert vm.generation() == before
    assert vm.status()["vhost-started"] is False
    assert "RESET_DEVICE" not in daemon.requests()[-20:]
    vm.qmp("cont")
    assert vm.generation() == before
    wait_for("the configuration interrupt", vm.config_interrupt)
    assert vm.status()["vhost-started"] is True


def test_backend_lost_in_a_pause_is_replaced_on_resume(machine, backend):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    wait_for("the configuration interrupt", vm.config_interrupt)
    vm.qmp("stop")
    daemon.kill()
    vm.wait_generation(0)
    assert not vm.config_interrupt()
    second = backend()
    second.wait("handshake", lambda event: event.get("request") == "GET_CONFIG")
    assert "SET_MEM_TABLE" not in second.requests()
    vm.qmp("cont")
    wait_for("the configuration interrupt", vm.config_interrupt)
    assert vm.wait_generation(second.generation())


@pytest.mark.parametrize("how", ["driver", "system"])
def test_reset_makes_a_new_generation(machine, backend, how):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    first = vm.wait_generation(daemon.generation())
    resets = daemon.requests().count("RESET_DEVICE")
    if how == "driver":
        vm.reset()
        assert vm.generation() == 0
    else:
        vm.qmp("system_reset")
        wait_for("the reset of the guest", lambda: vm.pci_read(4) & 2 == 0)
        vm.map()
    daemon.wait(
        "the message RESET_DEVICE", lambda event: daemon.requests().count("RESET_DEVICE") > resets
    )
    vm.driver_up()
    assert vm.generation() == daemon.generation() != first


def test_loaded_vm_gets_a_new_generation(machine, backend, folder):
    daemon = backend()
    vm = machine()
    vm.driver_up()
    first = vm.wait_generation(daemon.generation())
    state = folder / "migration"
    vm.qmp("stop")
    vm.qmp("migrate", uri=f"exec:cat > {state}")
    wait_for("the completed migration", lambda: vm.qmp("query-migrate")["status"] == "completed")
    vm.close()
    vm = machine(more=["-incoming", "defer"])
    vm.qmp("migrate-incoming", uri=f"exec:cat {state}")
    wait_for("the completed migration", lambda: vm.qmp("query-migrate")["status"] == "completed")
    vm.qmp("cont")
    vm.map()
    assert vm.wait_generation(None)
    assert vm.generation() == daemon.generation() != first
    wait_for("the configuration interrupt", vm.config_interrupt)


def test_device_survives_a_backend_that_dies_at_each_message(machine, backend):
    """QEMU survives backends that die at their first message, at their fourth, and so on."""
    vm = machine()
    for message in range(1, 200, 3):
        daemon = backend("--die-at", str(message))
        vm.driver_up()
        wait_for(
            "the connection or the death of the backend",
            lambda daemon=daemon: daemon.process.poll() is not None or vm.generation(),
        )
        exercise(vm)
        survived = daemon.process.poll() is None
        daemon.kill()
        vm.wait_generation(0)
        if survived:
            break
    assert message > 60, (
        f"the device sent only {message} messages to the backend, the test needs more than 60"
    )


def test_device_survives_a_backend_that_closes_at_each_message(machine, backend):
    """QEMU survives a backend that closes the connection at every third message.

    The backend accepts the next connection at once.
    """
    vm = machine()
    for message in range(1, 80, 3):
        daemon = backend("--close-at", str(message))
        exercise(vm)
        daemon.kill()
        vm.wait_generation(0)


def test_migration_survives_a_backend_that_closes_at_each_message(machine, backend):
    """QEMU survives a backend that closes the connection at each message during a migration.

    QEMU allocates, reads and frees the dirty log between these messages.
    """
    vm = machine()
    # Fill memory with pages that are not zero, so that the migration takes some time.
    vm.command(f"memset {32 << 20:#x} {16 << 20:#x} 0x5a")
    # Read the stream slowly, so that the migration lasts as long as the test. max-bandwidth alone
    # allows 1 MiB/s, with which the migration ends before the test on a loaded machine.
    reader = 'while [ "$(head -c 8192 | wc -c)" -gt 0 ]; do sleep 0.1; done'
    vm.qmp("migrate", uri=f"exec:{reader}")
    wait_for("the end of the migration", lambda: vm.qmp("query-migrate")["status"] == "active")
    logged = 0
    for message in range(1, 80):
        daemon = backend("--close-at", str(message))
        exercise(vm)
        logged += daemon.requests().count("SET_LOG_BASE")
        daemon.kill()
        vm.wait_generation(0)
    assert logged > 0
    assert vm.qmp("query-migrate")["status"] == "active"
    daemon = backend()
    vm.driver_up()
    vm.wait_generation(daemon.generation())
    vm.qmp("migrate_cancel")
    wait_for("the cancelled migration", lambda: vm.qmp("query-migrate")["status"] == "cancelled")
    assert vm.wait_generation(daemon.generation())


@pytest.mark.parametrize("message", [2, 3, 5, 8, 12, 20, 25, 30, 36, 40, 44, 50, 56, 60, 64, 70])
def test_device_survives_a_backend_that_hangs_at_one_message(machine, backend, message):
    vm = machine(device=IMPATIENT)
    daemon = backend("--hang-at", str(message))
    while not [event for event in daemon.read() if event.get("event") == "hang"]:
        exercise(vm)
    start = time.monotonic()
    exercise(vm)
    print(f"{time.monotonic() - start:.2f} s with a hang at message {message}")
    daemon.process.send_signal(signal.SIGCONT)
    vm.wait_generation(None)
    exercise(vm)


def test_guest_does_not_wait_for_a_backend_that_never_answers(machine, backend):
    """A socket that accepts and never answers costs the guest no time at all."""
    daemon = backend()
    daemon.process.send_signal(signal.SIGSTOP)
    vm = machine(device=",backend-timeout-ms=1000000")
    exercise(vm)
    assert vm.generation() == 0
    daemon.process.send_signal(signal.SIGCONT)
    vm.wait_generation(None)
    assert vm.generation() == daemon.generation()


def test_reset_with_a_stopped_backend_ends_at_the_timeout(machine, backend):
    daemon = backend()
    vm = machine(device=IMPATIENT)
    vm.driver_up()
    assert vm.wait_generation(daemon.generation())
    daemon.process.send_signal(signal.SIGSTOP)
    # QEMU answers configuration reads and QMP queries without the backend.
    assert vm.generation() == daemon.generation()
    vm.status()
    vm.reset()
    assert f"no answer within {BACKEND_TIMEOUT_MS} ms" in vm.errors()
    vm.driver_up()
    assert vm.generation() == 0
    daemon.process.send_signal(signal.SIGCONT)
    vm.wait_generation(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--features", hex(VERSION_1 | EVENT_IDX | PROTOCOL_FEATURES)), "INDIRECT_DESC"),
        (("--features", hex(VERSION_1 | INDIRECT_DESC | PROTOCOL_FEATURES)), "EVENT_IDX"),
        (("--features", hex(EVENT_IDX | INDIRECT_DESC | PROTOCOL_FEATURES)), "VERSION_1"),
        (("--protocol-features", hex(0x209)), "PROTOCOL_F_RESET_DEVICE"),
        (("--protocol-features", hex(0x2201)), "PROTOCOL_F_REPLY_ACK"),
        (("--protocol-features", hex(0x2009)), "PROTOCOL_F_CONFIG"),
        (("--queues", "3"), "maximum number of queues"),
        (("--batch-max", "32"), "batch_max 32"),
        (("--pools-max", "1"), "pools_max 1"),
        (("--page-size", "65536"), "page_size 65536"),
    ],
)
def test_refusal_of_an_incompatible_backend_is_reported_once(machine, backend, arguments, message):
    vm = machine()
    daemon = backend(*arguments)
    # QEMU tries the handshake again, and does not report its failure again.
    wait_for(
        "a second connection attempt of QEMU",
        lambda: len([e for e in daemon.read() if e.get("event") == "connected"]) > 2,
    )
    wait_for(f"the message '{message}'", lambda: message in vm.errors())
    exercise(vm)
    assert vm.generation() == 0
    assert vm.errors().count("backend refused") == 1
    daemon.kill()
    backend()
    vm.wait_generation(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": ",num-queues=17"}, "num-queues=17 is more than 16"),
        ({"device": ",queue-size=100"}, "queue-size=100 is not a power of 2"),
        ({"device": ",queue-size=2048"}, "queue-size=2048"),
        ({"device": ",iommu_platform=on"}, "iommu_platform=on"),
        ({"device": ",packed=on"}, "packed=on"),
        ({"device": ",backend-timeout-ms=0"}, "backend-timeout-ms"),
        ({"memory": []}, "memory-backend-memfd,id=mem,size=64M,share=on"),
        (
            {
                "memory": ["-object", "memory-backend-memfd,id=mem,size=64M,share=off"],
                "machine": ",memory-backend=mem",
            },
            "share=on -machine memory-backend=mem",
        ),
        ({"chardev": "null,id=tmem"}, "is not a Unix socket"),
    ],
)
def test_invalid_options_are_refused(machine, options, message):
    with pytest.raises(ConnectionError) as caught:
        machine(**options)
    assert message in str(caught.value)


def test_memory_of_each_numa_node_must_be_shared(machine, backend):
    backend()
    memory = []
    for node in (0, 1):
        memory += ["-object", f"memory-backend-memfd,id=m{node},size=32M,share=on"]
        memory += ["-numa", f"node,nodeid={node},memdev=m{node}"]
    vm = machine(memory=memory)
    vm.driver_up()
    vm.wait_generation(None)
    vm.close()
    memory[1] = memory[1].replace("=on", "=off")
    with pytest.raises(ConnectionError) as caught:
        machine(memory=memory)
    assert "share=on" in str(caught.value)


@pytest.mark.parametrize("queues", [1, 16])
def test_queue_count_follows_num_queues(machine, backend, queues):
    backend()
    vm = machine(device=f",num-queues={queues},queue-size=1024")
    vm.driver_up()
    assert vm.config()[2] == queues
    assert vm.status()["num-vqs"] == queues + 1
    vm.wait_generation(None)


@pytest.mark.parametrize(("vcpus", "queues"), [(3, 3), (8, 4)])
def test_default_queue_count_follows_the_vcpus(machine, vcpus, queues):
    """Without num-queues there is one queue for each vCPU, up to four."""
    vm = machine(device=",queue-size=64", more=["-smp", str(vcpus)])
    vm.driver_up()
    assert vm.config()[2] == queues
    # The register shows the size of the queue that driver_up() has set up last.
    assert vm.read(vm.common + 24, 2) == 64


def add_again(vm):
    """Adds the device again. Returns False while the removed device still owns the chardev.

    It owns the chardev until the end of an RCU grace period.
    """
    try:
        vm.qmp("device_add", driver="vhost-user-tmem-pci", id="t1", addr="5", chardev="tmem")
    except RuntimeError as error:
        assert "already in use" in str(error)
        return False
    return True


@pytest.mark.parametrize("state", ["alone", "probing", "started", "lost"])
def test_device_can_be_unplugged_in_each_backend_state(machine, backend, state):
    vm = machine(board="pc")
    vm.driver_up()
    daemon = None
    if state != "alone":
        daemon = backend()
        vm.wait_generation(daemon.generation())
    if state == "probing":
        daemon.kill()
        vm.wait_generation(0)
        daemon = backend("--hang-at", "1")
        daemon.wait("the hang of the backend", lambda event: event.get("event") == "hang")
    if state == "lost":
        daemon.process.kill()
    vm.qmp("device_del", id="t0")
    # Eject slot 5, as the guest's ACPI code does after the request.
    vm.command("outl 0xae10 0")
    vm.command(f"outl 0xae08 {1 << 5:#x}")
    assert "t0" not in vm.hmp("info qtree")
    if state == "started":
        daemon.wait("the end of the connection", lambda event: event.get("event") == "disconnected")
    wait_for("the removal of the device", lambda: add_again(vm))
    if daemon:
        daemon.kill()
    second = backend()
    vm.map()
    vm.driver_up()
    assert vm.wait_generation(None)
    assert vm.generation() == second.generation()
