# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stops a VM at an instruction of the guest, through QEMU's GDB server."""

from __future__ import annotations

import socket
from pathlib import Path

from harness.paths import HarnessError
from harness.wait import WaitTimeout, scaled

REPLY_SECONDS = 20.0  # longest time until QEMU answers a packet
READ_MAX = 2048  # largest number of bytes that fits into a packet of QEMU
# Registers of x86-64, in the order of GDB's packet `g`, 8 bytes each.
REGISTERS = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi")


class Gdb:
    """A connection to QEMU's GDB server, which stops the VM. Works for a VM with one processor."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(scaled(REPLY_SECONDS))
        self._socket.connect(str(path))
        self._buffer = b""

    def close(self) -> None:
        """Ends the connection; QEMU then removes all breakpoints and lets the VM run."""
        self._send("D")
        self._reply()
        self._socket.close()

    def memory(self, address: int, size: int) -> bytes:
        """Returns bytes at a virtual address that the guest can access at the moment."""
        assert size <= READ_MAX
        return bytes.fromhex(self._ask(f"m{address:x},{size:x}"))

    def registers(self) -> dict[str, int]:
        """Returns the general registers of REGISTERS."""
        raw = bytes.fromhex(self._ask("g")[: len(REGISTERS) * 16])
        return {
            name: int.from_bytes(raw[8 * at : 8 * at + 8], "little")
            for at, name in enumerate(REGISTERS)
        }

    def set_breakpoint(self, address: int) -> None:
        """Stops the VM before the instruction at a virtual address."""
        self._expect_ok(f"Z0,{address:x},1")

    def clear_breakpoint(self, address: int) -> None:
        self._expect_ok(f"z0,{address:x},1")

    def resume(self) -> None:
        """Lets the VM run; wait() waits until it stops. step() leaves a breakpoint."""
        self._send("c")

    def step(self) -> None:
        """Executes one instruction."""
        self._send("s")
        self.wait(REPLY_SECONDS)

    def wait(self, seconds: float) -> None:
        """Waits until the VM stops at a breakpoint or after a step."""
        self._socket.settimeout(scaled(seconds))
        try:
            stop = self._reply()
        except TimeoutError:
            raise WaitTimeout(f"the VM did not stop at a breakpoint for {seconds:g} s") from None
        self._socket.settimeout(scaled(REPLY_SECONDS))
        if not stop.startswith(("T05", "S05")):
            raise HarnessError(f"QEMU's GDB server reports no breakpoint: {stop}")

    def _expect_ok(self, packet: str) -> None:
        if (reply := self._ask(packet)) != "OK":
            raise HarnessError(f"QEMU's GDB server answers '{reply}' to the packet {packet}")

    def _ask(self, packet: str) -> str:
        self._send(packet)
        return self._reply()

    def _send(self, packet: str) -> None:
        self._socket.sendall(f"${packet}#{sum(packet.encode()) % 256:02x}".encode())

    def _reply(self) -> str:
        """Returns the next packet without its frame, and acknowledges it."""
        while not (end := self._buffer.find(b"#") + 1) or len(self._buffer) < end + 2:
            more = self._socket.recv(4096)
            if not more:
                raise HarnessError("QEMU's GDB server has closed the connection")
            self._buffer += more
        packet, self._buffer = self._buffer[: end - 1], self._buffer[end + 2 :]
        self._socket.sendall(b"+")
        return packet.split(b"$", 1)[1].decode()
