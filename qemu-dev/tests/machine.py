# SPDX-License-Identifier: Apache-2.0 OR MIT
"""QEMU with the device and no guest: the test acts as the driver, over QEMU's qtest protocol.

Every register access of a driver is one command. A test therefore decides exactly what the guest
does while the backend comes, goes or hangs. There is no firmware and no kernel, so a machine takes
0.2 s.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Factor of all time-outs; slow machines set TMEM_TIMEOUT_SCALE above 1.
SCALE = float(os.environ.get("TMEM_TIMEOUT_SCALE", "1"))
# Time-out of a QEMU command. If a command takes longer, QEMU is waiting for a backend, which is an
# error.
COMMAND_TIMEOUT_S = 20 * SCALE
# backend-timeout-ms for a backend that answers: long enough for answers on a loaded machine.
PATIENT_TIMEOUT_MS = int(5000 * SCALE)
# backend-timeout-ms in tests of backends that hang. After such a time-out, QEMU pauses for 20 times
# this time before it connects again, and the tests wait for the end of the pause.
BACKEND_TIMEOUT_MS = int(300 * SCALE)
IMPATIENT = f",backend-timeout-ms={BACKEND_TIMEOUT_MS}"

ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET = 1, 2, 4, 8, 64
BAR_ADDRESS = 0xE0000000
RING_ADDRESS = 0x100000
CONFIG = struct.Struct("<QIHHI12x")


class Timeout(AssertionError):
    """Raised when QEMU does not answer in time."""


class Line:
    """Socket that is read line by line. Each line must arrive within COMMAND_TIMEOUT_S."""

    def __init__(self, sock):
        self.sock = sock
        self.sock.settimeout(COMMAND_TIMEOUT_S)
        self.file = sock.makefile("rw", newline="\n")

    def send(self, text):
        self.file.write(text + "\n")
        self.file.flush()

    def receive(self):
        try:
            line = self.file.readline()
        except TimeoutError as error:
            raise Timeout(f"QEMU did not answer within {COMMAND_TIMEOUT_S} s") from error
        if not line:
            raise ConnectionError("QEMU closed the connection")
        return line.strip()


def wait_for(what, condition, seconds=COMMAND_TIMEOUT_S):
    """Polls until condition() is true, and returns its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Timeout(f"timeout: waited {seconds:g} s for {what}")
        time.sleep(0.01)


class Backend:
    """A backend process."""

    def __init__(self, path, *arguments):
        self.events = []
        self.rest = b""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "backend.py"), "--socket", str(path), *arguments],
            stdout=subprocess.PIPE,
        )
        self.wait("listening", lambda event: event.get("event") == "listening")

    def read(self):
        """Returns the events that the backend has printed so far, without waiting for more."""
        while select.select([self.process.stdout], [], [], 0)[0]:
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                break
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.events += map(json.loads, lines)
        return self.events

    def wait(self, what, condition):
        return wait_for(
            f"backend: {what}", lambda: [event for event in self.read() if condition(event)]
        )

    def be_slow(self, slow=True):
        """Toggles the backend's speed, and waits until the backend has confirmed it."""
        word = "slow" if slow else "quick"
        before = len([event for event in self.read() if event.get("event") == word])
        self.process.send_signal(signal.SIGUSR1)
        wait_for(
            f"backend: {word}",
            lambda: len([event for event in self.read() if event.get("event") == word]) > before,
        )

    def requests(self):
        return [event["request"] for event in self.read() if "request" in event]

    def generation(self):
        """Returns the generation that the backend reports now; waits for the first connection."""
        return self.wait("a generation", lambda event: "generation" in event)[-1]["generation"]

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Machine:
    """QEMU, its QMP and qtest connections, and a driver of the device."""

    def __init__(
        self,
        binary,
        folder,
        *,
        board="q35",
        driver="vhost-user-tmem-pci,addr=5",
        device_id=63,
        device="",
        machine="",
        memory=None,
        chardev=None,
        more=(),
    ):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        # Slot of the PCI device that the test's driver uses.
        self.slot = 5
        self.device_id = device_id
        self.events = []
        self.socket = self.folder / "tmem.sock"
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until close()
        if memory is None:
            memory = ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"]
            machine += ",memory-backend=mem"
        if chardev is None:
            chardev = f"socket,id=tmem,path={self.socket},reconnect-ms=20"
        if "tmem" in driver and "backend-timeout-ms" not in device:
            device += f",backend-timeout-ms={PATIENT_TIMEOUT_MS}"
        listeners = {}
        for name in ("qmp", "qtest"):
            listeners[name] = socket.socket(socket.AF_UNIX)
            (self.folder / name).unlink(missing_ok=True)
            listeners[name].bind(str(self.folder / name))
            listeners[name].listen(1)
            listeners[name].settimeout(COMMAND_TIMEOUT_S)
        self.process = subprocess.Popen(
            [
                str(binary),
                *("-machine", f"{board},accel=qtest{machine}", "-m", "64M", "-smp", "4"),
                *("-display", "none", "-nodefaults", "-no-user-config"),
                *("-L", "/usr/share/seabios", "-L", "/usr/share/qemu"),
                *("-qmp", f"unix:{self.folder}/qmp", "-qtest", f"unix:{self.folder}/qtest"),
                *("-qtest-log", "/dev/null"),
                *memory,
                *("-chardev", chardev),
                *("-device", f"{driver},id=t0,chardev=tmem{device}"),
                *more,
            ],
            stderr=self.stderr,
            stdin=subprocess.DEVNULL,
        )
        try:
            self.qmp_line = self.accept(listeners["qmp"])
            self.qtest = self.accept(listeners["qtest"])
            self.qmp_line.receive()
            self.qmp("qmp_capabilities")
        except ConnectionError as error:
            self.close()
            raise ConnectionError(self.errors()) from error
        except BaseException:
            self.close()
            raise
        finally:
            for listener in listeners.values():
                listener.close()
        self.common = self.isr = self.device_config = None
        self.doorbell = self.doorbell_bytes = None

    def accept(self, listener):
        wait_for(
            "QEMU to connect",
            lambda: select.select([listener], [], [], 0)[0] or self.process.poll() is not None,
        )
        if self.process.poll() is not None:
            raise ConnectionError
        return Line(listener.accept()[0])

    def errors(self):
        self.stderr.flush()
        self.stderr.seek(0)
        return self.stderr.read()

    def alive(self):
        assert self.process.poll() is None, self.errors()

    def close(self):
        self.process.kill()
        self.process.wait()

    # QMP

    def qmp(self, command, **arguments):
        self.qmp_line.send(json.dumps({"execute": command, "arguments": arguments}))
        while True:
            reply = json.loads(self.qmp_line.receive())
            if "event" in reply:
                self.events.append(reply)
            if "error" in reply:
                raise RuntimeError(reply["error"]["desc"])
            if "return" in reply:
                return reply["return"]

    def hmp(self, command):
        return self.qmp("human-monitor-command", **{"command-line": command})

    def path(self):
        """Returns the QOM path of the device."""
        [device] = [
            device for device in self.qmp("x-query-virtio") if device["name"] == "virtio-tmem"
        ]
        return device["path"]

    def tmem_events(self):
        """Returns the data of each VHOST_USER_TMEM_CHANGED event so far."""
        self.qmp("query-status")
        return [each["data"] for each in self.events if each["event"] == "VHOST_USER_TMEM_CHANGED"]

    def status(self):
        """Returns x-query-virtio-status of the device."""
        return self.qmp("x-query-virtio-status", path=self.path())

    def property(self, name):
        return self.qmp("qom-get", path=self.path(), property=name)

    # Registers

    def command(self, text):
        self.qtest.send(text)
        while True:
            reply = self.qtest.receive().split()
            if reply[0] == "OK":
                return int(reply[1], 0) if len(reply) > 1 else None
            assert reply[0] == "IRQ", reply

    def write(self, address, size, value):
        self.command(f"write{'_bw_l___q'[size]} {address:#x} {value:#x}")

    def read(self, address, size):
        return self.command(f"read{'_bw_l___q'[size]} {address:#x}")

    def pci_read(self, offset):
        self.command(f"outl 0xcf8 {0x80000000 | self.slot << 11 | offset:#x}")
        return self.command("inl 0xcfc")

    def pci_write(self, offset, value):
        self.command(f"outl 0xcf8 {0x80000000 | self.slot << 11 | offset & ~3:#x}")
        self.command(f"outl 0xcfc {value:#x}")

    def map(self):
        """Maps the modern virtio registers of the device, as firmware and PCI core do."""
        assert self.pci_read(0) == 0x10401AF4 + (self.device_id << 16)
        self.pci_write(0x20, BAR_ADDRESS)
        self.pci_write(0x24, 0)
        self.pci_write(0x04, 0x6)
        offset = self.pci_read(0x34) & 0xFF
        while offset:
            header = self.pci_read(offset)
            if header & 0xFF == 9:
                address = BAR_ADDRESS + self.pci_read(offset + 8)
                match header >> 24:
                    case 1:
                        self.common = address
                    case 2:
                        self.doorbell = address
                        self.doorbell_bytes = self.pci_read(offset + 16)
                    case 3:
                        self.isr = address
                    case 4:
                        self.device_config = address
            offset = header >> 8 & 0xFF

    # Driver

    def features(self):
        value = 0
        for half in (0, 1):
            self.write(self.common, 4, half)
            value |= self.read(self.common + 4, 4) << 32 * half
        return value

    def set_status(self, status):
        self.write(self.common + 20, 1, status)

    def get_status(self):
        return self.read(self.common + 20, 1)

    def config_generation(self):
        return self.read(self.common + 21, 1)

    def reset(self):
        self.set_status(0)
        assert self.get_status() == 0

    def driver_up(self, rings=RING_ADDRESS, accepted=None):
        """Initializes the device from reset to DRIVER_OK with all queues, like a driver's probe.

        The driver accepts all features that the device offers, or those in `accepted`.
        """
        if self.common is None:
            self.map()
        self.reset()
        self.set_status(ACKNOWLEDGE | DRIVER)
        features = self.features() if accepted is None else accepted
        for half in (0, 1):
            self.write(self.common + 8, 4, half)
            self.write(self.common + 12, 4, features >> 32 * half & 0xFFFFFFFF)
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK)
        assert self.get_status() & FEATURES_OK
        for queue in range(self.read(self.common + 18, 2)):
            self.place_ring(queue, rings + queue * 0x10000)
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)

    def place_ring(self, queue, base):
        """Sets the addresses of a queue's ring and enables the queue."""
        self.write(self.common + 22, 2, queue)
        for offset, part in ((32, 0), (40, 0x8000), (48, 0xC000)):
            self.write(self.common + offset, 4, base + part & 0xFFFFFFFF)
            self.write(self.common + offset + 4, 4, base + part >> 32)
        self.write(self.common + 28, 2, 1)

    def notify(self, queue):
        self.write(self.common + 22, 2, queue)
        offset = self.read(self.common + 30, 2) * self.doorbell_bytes
        self.write(self.doorbell + offset, 2, queue)

    def config(self):
        """Returns (generation, page_size, num_request_queues, batch_max, pools_max)."""
        data = b"".join(
            struct.pack("<I", self.read(self.device_config + offset, 4))
            for offset in range(0, 32, 4)
        )
        return CONFIG.unpack(data)

    def generation(self):
        return self.config()[0]

    def config_interrupt(self):
        """Returns whether there was a configuration interrupt since the last call."""
        return bool(self.read(self.isr, 1) & 2)

    def wait_generation(self, expected):
        """Waits until the guest sees this generation, or with None, any generation except 0."""
        return wait_for(
            f"generation {expected}",
            lambda: (
                (
                    (value := self.generation()) == expected
                    if expected is not None
                    else self.generation()
                )
                or None
            ),
        )
