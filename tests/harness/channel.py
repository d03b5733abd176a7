# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The host's end of the channel to the guest's agent (tests/guest/agent.c): frames over a socket.

A connection starts with a PING whose random nonce must come back. All bytes before that PONG are
left over from an earlier boot or connection, and are skipped.
"""

from __future__ import annotations

import enum
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.paths import HarnessError
from harness.wait import Deadline

MAGIC = 0x31414D54
HEADER = struct.Struct("<IIIIQ")  # fields: magic, type, id, length, arg
PAYLOAD_MAX = 256 << 10  # size of the agent's buffer, and so of a frame's data
PING_SECONDS = 0.25  # pause between attempts, because a guest loses a ping before its agent runs


class Type(enum.IntEnum):
    """Frame types; see agent.c for their arguments."""

    PING = 1
    EXEC = 2
    PUT = 3
    GET = 4
    KILL = 5
    PONG = 16
    STDOUT = 17
    STDERR = 18
    EXIT = 19
    REPLY = 20


EXIT_TIMED_OUT = 1 << 32
EXIT_NO_JOB = 1 << 33


class ChannelClosed(HarnessError):
    """QEMU or the host closed the channel before an answer arrived."""


@dataclass(frozen=True)
class Frame:
    type: int
    arg: int
    payload: bytes


Inbox = queue.SimpleQueue[Frame | None]


class Channel:
    """One connection to a guest's agent; any thread may send and wait."""

    def __init__(
        self, host_end: Path | socket.socket, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        """Connects and waits for the agent; `check` raises if the agent can no longer answer.

        `host_end` is the path of QEMU's socket, or a socket that is connected to a native guest.
        """
        self._send_lock = threading.Lock()  # held while one frame is sent
        self._inbox_lock = threading.Lock()  # guards _inboxes, _next_id and _closed
        self._inboxes: dict[int, Inbox] = {}
        self._next_id = secrets.randbits(30)
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX) if isinstance(host_end, Path) else host_end
        try:
            if isinstance(host_end, Path):
                self._socket.connect(str(host_end))
            self.boot_id, rest = self._synchronise(deadline, check)
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(None)
        self._reader = threading.Thread(
            target=self._read_frames, args=(rest,), name="agent channel", daemon=True
        )
        self._reader.start()

    def _synchronise(self, deadline: Deadline, check: Callable[[], None]) -> tuple[str, bytes]:
        nonce = secrets.randbits(64)
        mark = HEADER.pack(MAGIC, Type.PONG, 0, 0, nonce)
        head, tail = mark[:12], mark[16:]
        data = b""
        self._socket.settimeout(PING_SECONDS)
        while True:
            deadline.check()
            check()
            try:
                self._socket.sendall(HEADER.pack(MAGIC, Type.PING, 0, 0, nonce))
                received = self._socket.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                received = b""
            if not received:
                raise ChannelClosed("QEMU closed the agent's channel")
            data += received
            at = data.find(tail)
            if at < 16 or data[at - 16 : at - 4] != head:
                continue
            (length,) = struct.unpack_from("<I", data, at - 4)
            end = at + 8 + length
            if len(data) >= end:
                return data[at + 8 : end].decode().strip(), data[end:]

    def _read_frames(self, data: bytes) -> None:
        buffer = bytearray(data)
        try:
            while True:
                while len(buffer) >= HEADER.size:
                    magic, kind, number, length, arg = HEADER.unpack_from(buffer)
                    if magic != MAGIC or length > PAYLOAD_MAX:
                        # The frame before was cut off, which only a reset of the guest causes.
                        # The caller connects again after a reset.
                        return
                    if len(buffer) < HEADER.size + length:
                        break
                    payload = bytes(buffer[HEADER.size : HEADER.size + length])
                    del buffer[: HEADER.size + length]
                    self._deliver(number, Frame(kind, arg, payload))
                received = self._socket.recv(1 << 18)
                if not received:
                    return
                buffer += received
        except OSError:
            return
        finally:
            with self._inbox_lock:
                self._closed = True
                for inbox in self._inboxes.values():
                    inbox.put(None)

    def _deliver(self, number: int, frame: Frame) -> None:
        with self._inbox_lock:
            if inbox := self._inboxes.get(number):
                inbox.put(frame)

    def open(self) -> tuple[int, Inbox]:
        """Returns a new request id and the queue of its answers.

        None in the queue means that the channel is closed.
        """
        inbox: Inbox = queue.SimpleQueue()
        with self._inbox_lock:
            if self._closed:
                raise ChannelClosed("the agent's channel is closed")
            self._next_id += 1
            self._inboxes[self._next_id] = inbox
            return self._next_id, inbox

    def forget(self, number: int) -> None:
        """Drops all further answers to the request with this id."""
        with self._inbox_lock:
            self._inboxes.pop(number, None)

    def send(self, kind: Type, number: int, arg: int, payload: bytes = b"") -> None:
        if len(payload) > PAYLOAD_MAX:
            raise HarnessError(
                f"a frame has {len(payload)} bytes of data; the maximum is {PAYLOAD_MAX}"
            )
        frame = HEADER.pack(MAGIC, kind, number, len(payload), arg) + payload
        with self._send_lock:
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise ChannelClosed(f"cannot send to the agent: {error.strerror}") from error

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has already closed the socket
        self._socket.close()
        self._reader.join(5)
