# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A vhost-user backend that speaks only the control protocol and misbehaves on request.

The backend holds no pages and serves no ring. It is a separate process, so that a test can stop and
kill it. It can die, hang or refuse to answer at the n-th message that it receives, counted over all
connections. A test that varies n covers each moment of the device's life. SIGUSR1 makes the backend
slow; the next SIGUSR1 makes it fast again. SIGUSR2 makes it signal the error descriptor of queue 1,
like a backend that has stopped the queue.

With --write-at, SIGHUP makes the backend write a page of guest memory, mark the page in the dirty
log and kill itself.

The backend prints one line with a JSON object for each message, which the test reads.
"""

import argparse
import array
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

HEADER = struct.Struct("<III")
CONFIG = struct.Struct("<QIHHI12x")
REGION = struct.Struct("<QQQQ")
PAGE = 4096

NAMES = {
    1: "GET_FEATURES",
    2: "SET_FEATURES",
    3: "SET_OWNER",
    5: "SET_MEM_TABLE",
    6: "SET_LOG_BASE",
    8: "SET_VRING_NUM",
    9: "SET_VRING_ADDR",
    10: "SET_VRING_BASE",
    11: "GET_VRING_BASE",
    12: "SET_VRING_KICK",
    13: "SET_VRING_CALL",
    14: "SET_VRING_ERR",
    15: "GET_PROTOCOL_FEATURES",
    16: "SET_PROTOCOL_FEATURES",
    17: "GET_QUEUE_NUM",
    18: "SET_VRING_ENABLE",
    24: "GET_CONFIG",
    34: "RESET_DEVICE",
    36: "GET_MAX_MEM_SLOTS",
    37: "ADD_MEM_REG",
    38: "REM_MEM_REG",
}

VERSION_1 = 1 << 32
EVENT_IDX = 1 << 29
INDIRECT_DESC = 1 << 28
PROTOCOL_FEATURES = 1 << 30
LOG_ALL = 1 << 26

MQ = 1 << 0
LOG_SHMFD = 1 << 1
REPLY_ACK = 1 << 3
F_CONFIG = 1 << 9
F_RESET_DEVICE = 1 << 13


class Backend:
    """State of the backend process, which serves one connection at a time."""

    def __init__(self, args):
        self.args = args
        self.messages = 0
        self.generation = 0
        self.slow = False
        self.errors = {}  # error descriptors by queue
        self.memory = []  # (guest address, mapping)
        self.dirty_log = None

    def stop_queue(self, *_):
        self.log(event="error")
        os.eventfd_write(self.errors[1], 1)

    def keep_error(self, queue, fd):
        if queue in self.errors:
            os.close(self.errors[queue])
        self.errors[queue] = fd

    def map(self, request, payload, fds):
        """Maps guest memory and the dirty log."""
        if request == 5:
            (count,) = struct.unpack_from("<I", payload)
            self.memory = []
            for index, fd in zip(range(count), fds, strict=True):
                address, size, _, offset = REGION.unpack_from(payload, 8 + index * REGION.size)
                self.memory.append((address, mmap.mmap(fd, size, offset=offset)))
        if request == 6:
            size, offset = struct.unpack("<QQ", payload)
            self.dirty_log = mmap.mmap(fds[0], size, offset=offset)

    def write_and_die(self, *_):
        address = self.args.write_at
        for start, mapping in self.memory:
            if start <= address < start + len(mapping):
                mapping[address - start : address - start + PAGE] = bytes([0x22]) * PAGE
        page = address // PAGE
        self.dirty_log[page // 8] |= 1 << page % 8
        os.kill(os.getpid(), signal.SIGKILL)

    def toggle_slow(self, *_):
        self.slow = not self.slow
        self.log(event="slow" if self.slow else "quick")

    def send(self, conn, data):
        """Sends data at once, after the delay, or byte by byte with the delay before each byte."""
        if not self.slow:
            conn.sendall(data)
            return
        step = 1 if self.args.bytewise else len(data)
        for offset in range(0, len(data), step):
            time.sleep(self.args.delay_ms / 1000)
            conn.sendall(data[offset : offset + step])

    def new_generation(self):
        self.generation = int.from_bytes(os.urandom(8), "little") | 1

    def log(self, **what):
        print(json.dumps(what), flush=True)

    def misbehave(self):
        """Misbehaves if the command line requests it. Returns whether to close the connection."""
        if self.messages == self.args.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.messages == self.args.hang_at:
            self.log(event="hang")
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.messages == self.args.close_at

    def config(self):
        return CONFIG.pack(
            self.generation,
            self.args.page_size,
            0,
            self.args.batch_max,
            self.args.pools_max,
        )

    def answer(self, request, payload):
        """Returns the payload of the reply, or None if only REPLY_ACK requires a reply."""
        numbers = {
            1: self.args.features,
            6: 0,  # SET_LOG_BASE has a reply, also without REPLY_ACK
            15: self.args.protocol_features,
            17: self.args.queues,
        }
        if request in numbers:
            return struct.pack("<Q", numbers[request])
        if request == 11:
            index, _ = struct.unpack("<II", payload)
            return struct.pack("<II", index, 0)
        if request == 24:
            offset, size, flags = struct.unpack_from("<III", payload)
            data = self.config()[offset : offset + size].ljust(size, b"\0")
            return struct.pack("<III", offset, size, flags) + data
        if request == 34:
            self.new_generation()
        return None

    def serve(self, conn):
        self.new_generation()
        self.log(event="connected", generation=self.generation)
        while True:
            data, ancillary, _, _ = conn.recvmsg(HEADER.size, socket.CMSG_SPACE(64 * 4))
            values = array.array("i")
            for level, kind, fds in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    values.frombytes(fds)
            if len(data) < HEADER.size:
                self.log(event="disconnected")
                return
            request, flags, size = HEADER.unpack(data)
            payload = b""
            while len(payload) < size:
                payload += conn.recv(size - len(payload))
            if self.args.write_at:
                self.map(request, payload, values)
            if request == 14 and values:
                self.keep_error(payload[0], values.pop())
            for fd in values:
                os.close(fd)
            self.messages += 1
            self.log(
                message=self.messages,
                request=NAMES.get(request, request),
                generation=self.generation,
                **({"value": struct.unpack("<Q", payload)[0]} if request in (2, 16) else {}),
            )
            if self.misbehave():
                return
            reply = self.answer(request, payload)
            if reply is None and flags & 8:
                reply = struct.pack("<Q", 0)
            if reply is not None:
                self.send(conn, HEADER.pack(request, 1 | 4, len(reply)) + reply)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument(
        "--die-at",
        type=int,
        default=0,
        help="number of the message at which the backend kills itself",
    )
    parser.add_argument(
        "--hang-at",
        type=int,
        default=0,
        help="number of the message at which the backend stops itself (SIGSTOP)",
    )
    parser.add_argument(
        "--close-at",
        type=int,
        default=0,
        help="number of the message at which the backend closes the connection",
    )
    parser.add_argument(
        "--delay-ms", type=int, default=0, help="delay before each answer while it is slow"
    )
    parser.add_argument(
        "--bytewise", action="store_true", help="apply the delay to each byte of an answer"
    )
    parser.add_argument("--write-at", type=int, help="guest address that SIGHUP writes to")
    parser.add_argument("--queues", type=int, default=17)
    parser.add_argument("--page-size", type=int, default=4096)
    parser.add_argument("--batch-max", type=int, default=64)
    parser.add_argument("--pools-max", type=int, default=256)
    parser.add_argument(
        "--features",
        type=lambda text: int(text, 0),
        default=VERSION_1 | EVENT_IDX | INDIRECT_DESC | PROTOCOL_FEATURES | LOG_ALL,
    )
    parser.add_argument(
        "--protocol-features",
        type=lambda text: int(text, 0),
        default=MQ | LOG_SHMFD | REPLY_ACK | F_CONFIG | F_RESET_DEVICE,
    )
    args = parser.parse_args()

    listener = socket.socket(socket.AF_UNIX)
    Path(args.socket).unlink(missing_ok=True)
    listener.bind(args.socket)
    listener.listen(8)
    backend = Backend(args)
    signal.signal(signal.SIGUSR1, backend.toggle_slow)
    signal.signal(signal.SIGUSR2, backend.stop_queue)
    signal.signal(signal.SIGHUP, backend.write_and_die)
    backend.log(event="listening")
    while True:
        conn, _ = listener.accept()
        try:
            with conn:
                backend.serve(conn)
        except ConnectionError:
            backend.log(event="disconnected")


if __name__ == "__main__":
    sys.exit(main())
