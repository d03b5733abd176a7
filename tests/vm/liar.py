# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A vhost-user backend that serves puts and gets, and gives the wrong answers that a test chooses.

The class Liar takes the place of tmemd, which must never give such answers. It runs in a thread of
the test. The test chooses a wrong answer by its attribute `lie`, at any time, and reads the
recorded requests. The backend keeps pages in a dict and serves one connection after another.

Layouts are those of proto/virtio_tmem.h and of QEMU's docs/interop/vhost-user.rst.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from harness.wait import scaled, until

PAGE = 4096
POLL_MS = 2  # interval at which the backend polls the rings, in case a kick was lost

HEADER = struct.Struct("<III")
CONFIG = struct.Struct("<QIHHI12x")
REGION = struct.Struct("<QQQQ")
DESCRIPTOR = struct.Struct("<QIHH")
REQUEST = struct.Struct("<QHHIQ")
PUT_PAGE = struct.Struct("<QQQII")
GET_PAGE = struct.Struct("<QBB6x")
REF_PAGE = struct.Struct("<QQQ")
RANGE = struct.Struct("<QQQ")

# Features: VERSION_1, EVENT_IDX, INDIRECT_DESC, PROTOCOL_FEATURES. Protocol features: MQ,
# REPLY_ACK, CONFIG, RESET_DEVICE.
FEATURES = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 30
RETAIN = 1 << 2
PROTOCOL_FEATURES = 1 << 0 | 1 << 3 | 1 << 9 | 1 << 13
QUEUES = 17

NEXT, WRITE, INDIRECT = 1, 2, 4
T_PUT, T_GET, T_FLUSH, T_REF, T_POOL_CREATE, T_POOL_DESTROY = 1, 2, 3, 4, 16, 17
T_REPORT, T_LATENCIES, T_GENERATION = 18, 19, 20
OK, STALE, UNSUPPORTED, LIMIT, UNKNOWN_STATUS = 1, 2, 4, 6, 77
PUT_WORKINGSET = 1
STORED, REFUSED, HIT, MISS, HELD, GONE, UNKNOWN_RESULT = 65, 66, 67, 68, 69, 70, 99
GET_RETAINED = 1

LIES_OF_GETS = (
    "cookie", "short-nothing", "short-status", "short-results", "short-page", "long", "longest",
    "status", "result", "silent", "stale",
)  # fmt: skip
LIES_OF_PUTS = (
    "put-status", "put-short", "put-long", "put-result", "put-refused", "put-silent", "put-stale",
)  # fmt: skip
LIES_OF_REFS = ("ref-status", "ref-short", "ref-long", "ref-result", "ref-silent", "ref-gone")
LIES_OF_GENERATIONS = (
    "generation-status",
    "generation-short",
    "generation-long",
    "generation-zero",
    "generation-silent",
    "generation-other",
)
LIES_OF_POOLS = (
    "pool-status",
    "pool-short",
    "pool-long",
    "pool-silent",
    "pool-stale",
    "pool-limit",
)
# Further values of `lie`:
# - "content": the answer to a get is right except for the bytes of the page.
# - "forget": the device retains no page, although gets allow it.
# - "flush-refused": a flush drops nothing, and has an unknown status.
# - "late": gets are answered only after the test has set another lie, and long after the driver's
#   deadline. The answers are then wrong.
# - "ref-late": REF requests, and requests behind them in their queue, are answered only after the
#   test has set another lie.
# - "older": the device does not know the latency request.
# - "token": a used element has the number of a descriptor that no request uses.
# - "token-beyond": a used element has a number beyond the size of the queue.

# Time in seconds for which the lie "late" delays its wrong answer to a get. The driver must not get
# the answer before its deadline, so the time is scaled for slow machines and is at least five
# deadlines.
LATE_SECONDS = 1.0

DAMAGE = bytes(byte ^ 0xFF for byte in range(256))

Key = tuple[int, int, int]


@dataclass
class Ring:
    """State of a virtqueue. Values that QEMU has not set yet are 0 or -1."""

    size: int = 0
    # Addresses in QEMU of the descriptors, the used ring and the available ring.
    addresses: tuple[int, int, int] = (0, 0, 0)
    kick: int = -1
    call: int = -1
    enabled: bool = False
    next: int = 0  # number of entries taken from the available ring, mod 2^16
    skipped: int = 0  # number of entries that were taken without an answer, mod 2^16
    held: int = 0  # number of waiting requests that arrived while the lie was "late"
    arrived: deque[float] = field(default_factory=deque)  # arrival times of the waiting requests


@dataclass
class Chain:
    head: int
    readable: bytes
    writable: list[tuple[int, int]] = field(
        default_factory=list
    )  # pairs of guest address and length


class Liar:
    """The backend. It listens at `path` inside a `with` statement."""

    def __init__(self, path: Path, *, retain: bool = False) -> None:
        self.path = path
        self.features = FEATURES | (RETAIN if retain else 0)
        self.lie = ""
        self.lies_told = 0
        self.asked: Counter[int] = Counter()  # number of requests of each type
        self.gets = 0
        self.puts = 0  # number of pages put
        self.puts_workingset = 0  # number of pages put with the hint WORKINGSET
        self.retainable = 0  # number of pages that gets allowed to retain
        self.outdated = 0  # number of pages of REFs whose key has a page with another cookie
        self.delay_seconds = 0.0  # delay of each answer, even if it is right
        self.reverse = False  # True: requests of a queue that wait together are answered backwards
        self.reversed = 0  # number of answers that overtook an older request
        self.quick_probes = False  # True: gets with cookie 0, which are probes, are not delayed
        self.silent: frozenset[int] = frozenset()  # types of requests that are not answered
        self.skipped = 0  # number of requests that were skipped at reconnects
        self._leaving = threading.Event()
        self._silent_next: frozenset[int] = frozenset()
        # For each queue whose requests the next connection skips: number of entries of its
        # available ring.
        self._skip: dict[int, int] = {}
        self._pages: dict[Key, tuple[int, bytes]] = {}
        self._generation = 0
        self._regions: list[
            tuple[int, int, memoryview]
        ] = []  # each: guest address, address in QEMU, memory
        self._rings = [Ring() for _ in range(QUEUES)]
        self._errors: dict[int, int] = {}  # error descriptor of each queue
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._main, name="liar")

    def __enter__(self) -> Liar:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._listener.close()
        if self._error:
            raise self._error

    def waiting_requests(self) -> int:
        """Returns the number of requests that have arrived and are not answered yet."""
        return sum(len(ring.arrived) for ring in self._rings)

    def waiting_control_requests(self) -> Counter[int]:
        """Returns the number of waiting control requests of each type.

        The device must be silent, so that it answers none of them meanwhile.
        """
        ring = self._rings[0]
        descriptors, _, available = ring.addresses
        kinds: Counter[int] = Counter()
        for number in range((self._u16(available + 2)[0] - ring.next) & 0xFFFF):
            place = available + 4 + (ring.next + number) % ring.size * 2
            chain = self._read_chain(descriptors, self._u16(place)[0])
            kinds[REQUEST.unpack_from(chain.readable)[1]] += 1
        return kinds

    def reconnect_and_skip(self, silent: Iterable[int] = ()) -> None:
        """Closes the connection. The next connection never answers the requests that wait now.

        It does not answer later requests of the types `silent` either.
        """
        self._silent_next = frozenset(silent)
        self._leaving.set()
        until(lambda: not self._leaving.is_set(), 10, "the back end closes the connection")

    def pages_with(self, text: bytes) -> int:
        """Returns the number of pages that begin with a text."""
        return sum(page.startswith(text) for _, page in list(self._pages.values()))

    def stop_queue(self, queue: int) -> None:
        """Signals the queue's error descriptor, as tmemd does when it stops a queue."""
        os.eventfd_write(self._errors[queue], 1)

    # Connections and messages

    def _main(self) -> None:
        try:
            while not self._end.is_set():
                if select.select([self._listener], [], [], 0.1)[0]:
                    connection, _ = self._listener.accept()
                    with connection:
                        self._serve(connection)
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self._error = error

    def _serve(self, connection: socket.socket) -> None:
        self._reset()
        try:
            while not self._end.is_set():
                if self._leaving.is_set():
                    self._leave()
                    return
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                for ring in self._rings:
                    if ring.kick >= 0:
                        poll.register(ring.kick, select.POLLIN)
                ready = [number for number, _ in poll.poll(POLL_MS)]
                for number in ready:
                    if number != connection.fileno():
                        os.eventfd_read(number)
                if connection.fileno() in ready and not self._handle_message(connection):
                    return
                for ring in self._rings:
                    self._serve_ring(ring)
        except (ConnectionError, BrokenPipeError):
            pass  # QEMU ended or was reset; the next connection starts again
        finally:
            self._rings = [Ring() for _ in range(QUEUES)]
            self._regions = []

    def _leave(self) -> None:
        for index, ring in enumerate(self._rings):
            if ring.enabled and ring.kick >= 0:
                self._skip[index] = self._u16(ring.addresses[2] + 2)[0]
        self.silent = self._silent_next
        self._leaving.clear()

    def _reset(self) -> None:
        self._generation = int.from_bytes(os.urandom(8), "little") | 1
        self._pages = {}

    def _handle_message(self, connection: socket.socket) -> bool:
        data, ancillary, _, _ = connection.recvmsg(HEADER.size, socket.CMSG_SPACE(64 * 4))
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        if len(data) < HEADER.size:
            return False
        request, flags, size = HEADER.unpack(data)
        payload = b""
        while len(payload) < size:
            payload += connection.recv(size - len(payload))
        reply = self._answer(request, payload, list(fds))
        if reply is None and flags & 8:
            reply = struct.pack("<Q", 0)
        if reply is not None:
            connection.sendall(HEADER.pack(request, 1 | 4, len(reply)) + reply)
        return True

    def _answer(self, request: int, payload: bytes, fds: list[int]) -> bytes | None:
        """Handles a vhost-user message. Returns the reply, or None if the message has none."""
        if request == 24:  # GET_CONFIG
            offset, size, flags = struct.unpack_from("<III", payload)
            config = CONFIG.pack(self._generation, PAGE, 0, 64, 256)[offset : offset + size]
            return struct.pack("<III", offset, size, flags) + config.ljust(size, b"\0")
        if request == 11:  # GET_VRING_BASE
            index = struct.unpack_from("<I", payload)[0]
            base = self._rings[index].next
            self._rings[index] = Ring()
            return struct.pack("<II", index, base)
        numbers = {
            1: self.features,
            15: PROTOCOL_FEATURES,
            17: QUEUES,
        }  # GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM
        if request in numbers:
            return struct.pack("<Q", numbers[request])
        self._set(request, payload, fds)
        return None

    def _set(self, request: int, payload: bytes, fds: list[int]) -> None:
        ring = self._rings[payload[0]] if 8 <= request <= 18 and payload else Ring()
        if request == 34:  # RESET_DEVICE
            self._reset()
        elif request == 5:  # SET_MEM_TABLE
            self._regions = []
            for number, fd in enumerate(fds):
                guest, size, user, offset = REGION.unpack_from(payload, 8 + number * REGION.size)
                self._regions.append((guest, user, memoryview(mmap.mmap(fd, size, offset=offset))))
        elif request == 8:  # SET_VRING_NUM
            ring.size = struct.unpack_from("<II", payload)[1]
        elif request == 9:  # SET_VRING_ADDR
            ring.addresses = struct.unpack_from("<8xQQQ", payload)
        elif request == 10:  # SET_VRING_BASE
            ring.next = struct.unpack_from("<II", payload)[1]
            skip_to = self._skip.pop(payload[0], ring.next)
            ring.skipped = (skip_to - ring.next) & 0xFFFF
            ring.next = skip_to
            self.skipped += ring.skipped
        elif request == 12:  # SET_VRING_KICK
            ring.kick, fds = fds[0], []
        elif request == 13 and fds:  # SET_VRING_CALL
            ring.call, fds = fds[0], []
        elif request == 14 and fds:  # SET_VRING_ERR
            previous = self._errors.get(payload[0])
            self._errors[payload[0]], fds = fds[0], [] if previous is None else [previous]
        elif request == 18:  # SET_VRING_ENABLE
            ring.enabled = struct.unpack_from("<II", payload)[1] == 1
        for fd in fds:
            os.close(fd)

    # Guest memory and rings

    def _memory(self, address: int, length: int, *, user: bool = False) -> memoryview:
        for guest, qemu, memory in self._regions:
            offset = address - (qemu if user else guest)
            if offset >= 0 and offset + length <= len(memory):
                return memory[offset : offset + length]
        raise AssertionError(
            f"the driver named {length} bytes at {address:#x}, outside of guest memory"
        )

    def _u16(self, address: int) -> memoryview:
        """Returns a view of an aligned 16-bit value, such as a ring's index.

        An access to the view is a single memory access.
        """
        return self._memory(address, 2, user=True).cast("H")

    def _serve_ring(self, ring: Ring) -> None:
        if not ring.enabled or ring.kick < 0:
            return
        descriptors, used, available = ring.addresses
        limit = self._u16(available + 2)[0]
        if self.lie == "late":
            ring.held = (limit - ring.next) & 0xFFFF
        now = time.monotonic()
        ring.arrived.extend([now] * (((limit - ring.next) & 0xFFFF) - len(ring.arrived)))
        done = 0
        numbers = [(ring.next + n) & 0xFFFF for n in range((limit - ring.next) & 0xFFFF)]
        if self.reverse and not self.silent and numbers:
            # Wait until all of them are due, so that none is left out.
            if ring.arrived[-1] + self.delay_seconds > now:
                return
            self.reversed += len(numbers) - 1
            numbers.reverse()
        for number in numbers:
            place = available + 4 + number % ring.size * 2
            chain = self._read_chain(descriptors, self._u16(place)[0])
            kind = REQUEST.unpack_from(chain.readable)[1]
            if (kind, self.lie) in ((T_GET, "late"), (T_REF, "ref-late")) or kind in self.silent:
                break
            late = ring.held > 0 and kind == T_GET
            delay = scaled(LATE_SECONDS) if late else self._delay(chain, kind)
            if ring.arrived[0] + delay > now:
                break
            lie = "content" if late else self.lie
            length = self._execute(chain, lie)
            head = chain.head
            if lie in ("token", "token-beyond") and kind == T_GET:
                head = head + ring.size // 2
                head = head % ring.size if lie == "token" else head + ring.size
                self.lies_told += 1
            place = (ring.next - ring.skipped) & 0xFFFF
            element = used + 4 + place % ring.size * 8
            self._memory(element, 8, user=True)[:] = struct.pack("<II", head, length)
            ring.next = (ring.next + 1) & 0xFFFF
            ring.arrived.popleft()
            ring.held = max(0, ring.held - 1)
            self._u16(used + 2)[0] = (place + 1) & 0xFFFF
            done += 1
        # Set avail_event, so that the driver kicks when it adds the next entry.
        self._u16(used + 4 + ring.size * 8)[0] = ring.next
        if done and ring.call >= 0:
            os.eventfd_write(ring.call, 1)

    def _delay(self, chain: Chain, kind: int) -> float:
        cookie_at = REQUEST.size + 16
        cookie = chain.readable[cookie_at : cookie_at + 8]
        probe = kind == T_GET and self.quick_probes and not any(cookie)
        return 0.0 if probe else self.delay_seconds

    def _read_chain(self, table: int, head: int) -> Chain:
        descriptor = DESCRIPTOR.unpack(self._memory(table + head * 16, 16, user=True))
        user, number = True, head
        chain = Chain(head, b"")
        if descriptor[2] & INDIRECT:
            table, user, number = descriptor[0], False, 0
        readable = []
        while True:
            where, length, flags, following = DESCRIPTOR.unpack(
                self._memory(table + number * 16, 16, user=user)
            )
            if flags & WRITE:
                chain.writable.append((where, length))
            else:
                readable.append(bytes(self._memory(where, length)))
            if not flags & NEXT:
                break
            number = following
        chain.readable = b"".join(readable)
        return chain

    def _write(self, chain: Chain, content: bytes) -> None:
        offset = 0
        for where, length in chain.writable:
            part = content[offset : offset + length]
            self._memory(where, len(part))[:] = part
            offset += len(part)

    # Requests. Each method returns the length for the used element.

    def _execute(self, chain: Chain, lie: str) -> int:
        _, kind, count, pool, _ = REQUEST.unpack_from(chain.readable)
        body = chain.readable[REQUEST.size :]
        self.asked[kind] += 1
        if kind == T_PUT:
            return self._put(chain, body, count, pool, lie)
        if kind == T_GET:
            self.gets += 1
            return self._get(chain, body, count, pool, lie)
        if kind == T_REF:
            return self._ref(chain, body, count, pool, lie)
        refused = kind == T_FLUSH and lie == "flush-refused"
        self.lies_told += refused
        if kind == T_FLUSH and not refused:
            self._flush(body, count, pool)
        if kind == T_POOL_DESTROY:
            self._pages = {key: page for key, page in self._pages.items() if key[0] != pool}
        if kind == T_POOL_CREATE and lie in LIES_OF_POOLS:
            return self._answer_pool(chain, lie)
        if kind == T_GENERATION:
            return self._tell_generation(chain, lie)
        flags = int.from_bytes(body[:4], "little") if kind == T_POOL_CREATE else 0
        known = lie != "older" or (kind != T_LATENCIES and not flags)
        status = UNKNOWN_STATUS if refused else OK if known else UNSUPPORTED
        self._write(chain, bytes([status]) + bytes(7))
        return 8

    def _tell_generation(self, chain: Chain, lie: str) -> int:
        self.lies_told += lie in LIES_OF_GENERATIONS
        status = UNKNOWN_STATUS if lie == "generation-status" else OK
        generation = self._generation
        if lie == "generation-zero":
            generation = 0
        elif lie == "generation-other":
            generation = int.from_bytes(os.urandom(8), "little") | 1
        elif lie in LIES_OF_GENERATIONS:
            # Another generation, so that a test notices if the driver uses the answer.
            generation ^= 2
        if lie == "generation-silent":
            ((where, _),) = chain.writable
            self._memory(where + 8, 8)[:] = struct.pack("<Q", generation)
        else:
            self._write(chain, bytes([status]) + bytes(7) + struct.pack("<Q", generation))
        return {"generation-short": 15, "generation-long": 17}.get(lie, 16)

    def _answer_pool(self, chain: Chain, lie: str) -> int:
        self.lies_told += 1
        status = {"pool-status": UNKNOWN_STATUS, "pool-stale": STALE, "pool-limit": LIMIT}
        if lie != "pool-silent":
            self._write(chain, bytes([status.get(lie, OK)]) + bytes(7))
        return {"pool-short": 7, "pool-long": 9}.get(lie, 8)

    def _put(self, chain: Chain, body: bytes, count: int, pool: int, lie: str) -> int:
        for number in range(count):
            object_, index, cookie, flags, _ = PUT_PAGE.unpack_from(body, number * PUT_PAGE.size)
            start = count * PUT_PAGE.size + number * PAGE
            self.puts += 1
            self.puts_workingset += flags & PUT_WORKINGSET
            self._pages[pool, object_, index] = (cookie, body[start : start + PAGE])
        length = 8 + count
        if lie not in LIES_OF_PUTS:
            self._write(chain, bytes([OK]) + bytes(7) + bytes([STORED] * count))
            return length
        self.lies_told += 1
        if lie == "put-silent":
            return length
        status = {"put-status": UNKNOWN_STATUS, "put-stale": STALE}.get(lie, OK)
        result = {"put-result": UNKNOWN_RESULT, "put-refused": REFUSED}.get(lie, STORED)
        self._write(chain, bytes([status]) + bytes(7) + bytes([result] * count))
        return {"put-short": 8, "put-long": length + 1}.get(lie, length)

    def _get(self, chain: Chain, body: bytes, count: int, pool: int, lie: str) -> int:
        retain = REQUEST.unpack_from(chain.readable)[4]
        object_, index = struct.unpack_from("<QQ", body)
        wanted = struct.unpack_from(f"<{count}Q", body, 16)
        results, pages = [], []
        hits = 0
        for number, cookie in enumerate(wanted):
            key = (pool, object_, index + number)
            stored, page = self._pages.pop(key, (0, bytes(PAGE)))
            hit = cookie != 0 and stored == cookie
            hits += hit
            self.retainable += retain >> number & 1
            retained = hit and retain >> number & 1 and lie != "forget"
            if retained:
                self._pages[key] = (stored, page)
            results.append(
                [cookie if hit else 0, HIT if hit else MISS, GET_RETAINED if retained else 0]
            )
            pages.append(page)
        length = 8 + count * (GET_PAGE.size + PAGE)
        status = OK
        if hits and (lie in LIES_OF_GETS or lie == "content"):
            self.lies_told += 1
            # Each wrong answer also has a wrong page, so that a test notices if the driver uses the
            # answer.
            spared = count - 1 if lie == "short-page" else 0
            pages = [page if i < spared else page.translate(DAMAGE) for i, page in enumerate(pages)]
            if lie == "silent":
                return length
            if lie == "cookie":
                results = [[cookie + 1, *rest] for cookie, *rest in results]
            if lie == "result":
                results = [[cookie, UNKNOWN_RESULT, flags] for cookie, _, flags in results]
            status = {"status": UNKNOWN_STATUS, "stale": STALE}.get(lie, OK)
            length = {
                "short-nothing": 0,
                "short-status": 8,
                "short-results": 8 + count * GET_PAGE.size,
                "short-page": length - 1,
                "long": length + 1,
                "longest": 0xFFFFFFFF,
            }.get(lie, length)
        head = bytes([status]) + bytes(7) + b"".join(GET_PAGE.pack(*each) for each in results)
        self._write(chain, head + b"".join(pages))
        return length

    def _ref(self, chain: Chain, body: bytes, count: int, pool: int, lie: str) -> int:
        results = []
        for number in range(count):
            object_, index, cookie = REF_PAGE.unpack_from(body, number * REF_PAGE.size)
            key = (pool, object_, index)
            if lie in LIES_OF_REFS:
                self._pages.pop(key, None)
            stored = self._pages.get(key, (0, b""))[0]
            held = stored == cookie
            self.outdated += stored not in (0, cookie)
            results.append(HELD if held else GONE)
        length = 8 + count
        if lie in LIES_OF_REFS:
            self.lies_told += 1
            if lie == "ref-silent":
                return length
            result = {"ref-gone": GONE, "ref-result": UNKNOWN_RESULT}.get(lie, HELD)
            results = [result] * count
        status = UNKNOWN_STATUS if lie == "ref-status" else OK
        self._write(chain, bytes([status]) + bytes(7) + bytes(results))
        return {"ref-short": 8, "ref-long": length + 1}.get(lie, length)

    def _flush(self, body: bytes, count: int, pool: int) -> None:
        for number in range(count):
            object_, index, nr_pages = RANGE.unpack_from(body, number * RANGE.size)
            end = index + nr_pages if nr_pages else 1 << 64
            for key in [key for key in self._pages if key[:2] == (pool, object_)]:
                if index <= key[2] < end:
                    del self._pages[key]
