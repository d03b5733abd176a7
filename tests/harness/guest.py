# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs commands in a guest, transfers files, and reads statistics, for tests."""

from __future__ import annotations

import os
import queue
import shlex
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.channel import EXIT_NO_JOB, EXIT_TIMED_OUT, Channel, ChannelClosed, Frame, Inbox, Type
from harness.paths import HarnessError
from harness.wait import WaitTimeout, scaled

OUTPUT_MAX_BYTES = 256 << 20  # limit of a command's output, so that no guest fills the host
FILE_CHUNK_BYTES = 128 << 10  # smaller than a frame's data, which also contain the path
# The agent in the guest kills a command at the command's time-out. The host waits this many seconds
# longer for the agent's report.
GRACE_SECONDS = 20.0
CHECK_SECONDS = 1.0  # pause between checks of QEMU and the console during a wait


class GuestTimeout(WaitTimeout):
    """A command in the guest took too long, or the guest does not answer."""


class CommandFailed(HarnessError):
    """A command in the guest ended with a status other than 0."""


@dataclass(frozen=True)
class Result:
    """Result of a command: its output and its exit status, or minus the signal that ended it."""

    command: str
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    def check(self) -> Result:
        if self.status != 0:
            tail = (self.stderr[-4096:] or self.stdout[-4096:]).decode(errors="replace")
            raise CommandFailed(f"guest: '{self.command}' ended with status {self.status}:\n{tail}")
        return self


@dataclass(frozen=True)
class DiskStat:
    """The fields of /sys/block/DEV/stat.

    A sector is 512 bytes, whatever the disk's block size is.
    """

    reads: int
    read_sectors: int
    writes: int
    write_sectors: int

    def __sub__(self, earlier: DiskStat) -> DiskStat:
        return DiskStat(
            self.reads - earlier.reads,
            self.read_sectors - earlier.read_sectors,
            self.writes - earlier.writes,
            self.write_sectors - earlier.write_sectors,
        )


class Job:
    """A command that is running in the guest."""

    def __init__(
        self, channel: Channel, check: Callable[[], None], command: str, seconds: float
    ) -> None:
        self.command = command
        self._channel = channel
        self._check = check
        self._seconds = scaled(seconds)
        self._end = time.monotonic() + self._seconds + scaled(GRACE_SECONDS)
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._size = 0
        self._result: Result | None = None
        self._number, self._inbox = channel.open()
        channel.send(Type.EXEC, self._number, int(self._seconds * 1000), command.encode())

    def done(self) -> bool:
        """Returns whether the command has ended, and takes the output that has arrived."""
        while self._result is None:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                return False
        return True

    def stdout(self) -> bytes:
        """Returns what the command has printed so far."""
        self.done()
        return b"".join(self._out)

    def kill(self, signal: int = 9) -> None:
        """Sends a signal to the command's process group."""
        self._channel.send(Type.KILL, self._number, signal)

    def wait(self) -> Result:
        """Waits for the command's end or time-out. Returns the result, whatever the status."""
        while self._result is None:
            left = self._end - time.monotonic()
            try:
                self._take(self._inbox.get(timeout=min(CHECK_SECONDS, max(0.0, left))))
                continue
            except queue.Empty:
                self._check()
            if left <= 0:
                self._channel.forget(self._number)
                raise GuestTimeout(
                    f"guest: the agent did not answer the command '{self.command}' "
                    f"after {self._seconds:g} s"
                )
        return self._result

    def _take(self, frame: Frame | None) -> None:
        if frame is None:
            self._channel.forget(self._number)
            raise ChannelClosed(f"guest: the channel closed during '{self.command}'")
        if frame.type == Type.STDOUT:
            self._out.append(frame.payload)
        elif frame.type == Type.STDERR:
            self._err.append(frame.payload)
        elif frame.type == Type.EXIT:
            self._finish(frame.arg)
        self._size += len(frame.payload)
        if self._size > OUTPUT_MAX_BYTES:
            self.kill()
            raise HarnessError(
                f"guest: '{self.command}' printed more than {OUTPUT_MAX_BYTES} bytes"
            )

    def _finish(self, arg: int) -> None:
        self._channel.forget(self._number)
        out, err = b"".join(self._out), b"".join(self._err)
        if arg & EXIT_NO_JOB:
            raise HarnessError(f"guest: '{self.command}' could not be started")
        if arg & EXIT_TIMED_OUT:
            tail = (out + err)[-4096:].decode(errors="replace")
            raise GuestTimeout(
                f"guest: '{self.command}' did not end within {self._seconds:g} s:\n{tail}"
            )
        self._result = Result(self.command, os.waitstatus_to_exitcode(arg & 0xFFFF), out, err)


class Guest:
    """The running system in a VM, accessed through its agent."""

    def __init__(self, channel: Channel, check: Callable[[], None]) -> None:
        """Takes the channel to the agent. `check` raises if QEMU ended or the kernel panicked."""
        self._channel = channel
        self._check = check
        self.boot_id = channel.boot_id

    def start(self, command: str, seconds: float = 30) -> Job:
        """Starts a shell command line, and returns its job. The guest kills it after `seconds`."""
        return Job(self._channel, self._check, command, seconds)

    def run(self, command: str, seconds: float = 30) -> Result:
        """Runs a shell command line and returns its result, whatever its status."""
        return self.start(command, seconds).wait()

    def sh(self, command: str, seconds: float = 30) -> str:
        """Runs a shell command line that must succeed; returns its stdout."""
        return self.run(command, seconds).check().text

    def put(self, path: str, content: bytes | Path, mode: int | None = None) -> None:
        """Writes a file in the guest. A Path is a file of the host, whose mode is kept."""
        if isinstance(content, Path):
            mode = content.stat().st_mode & 0o777 if mode is None else mode
            content = content.read_bytes()
        head = struct.pack("<I", 0o644 if mode is None else mode) + path.encode() + b"\0"
        for offset in range(0, len(content) or 1, FILE_CHUNK_BYTES):
            chunk = content[offset : offset + FILE_CHUNK_BYTES]
            self._ask(Type.PUT, offset, head + chunk, path)

    def get(self, path: str) -> bytes:
        """Returns the contents of a file in the guest, also of one in /proc or /sys."""
        parts: list[bytes] = []
        offset = 0
        request = struct.pack("<I", FILE_CHUNK_BYTES) + path.encode() + b"\0"
        while chunk := self._ask(Type.GET, offset, request, path):
            parts.append(chunk)
            offset += len(chunk)
            if offset > OUTPUT_MAX_BYTES:
                raise HarnessError(f"guest: {path} is larger than {OUTPUT_MAX_BYTES} bytes")
        return b"".join(parts)

    def _ask(self, kind: Type, arg: int, payload: bytes, path: str) -> bytes:
        number, inbox = self._channel.open()
        try:
            self._channel.send(kind, number, arg, payload)
            frame = self._wait_reply(inbox, path)
        finally:
            self._channel.forget(number)
        if frame.arg:
            raise CommandFailed(f"guest: {kind.name.lower()} {path}: {os.strerror(frame.arg)}")
        return frame.payload

    def _wait_reply(self, inbox: Inbox, path: str) -> Frame:
        try:
            frame = inbox.get(timeout=scaled(GRACE_SECONDS))
        except queue.Empty:
            raise GuestTimeout(f"guest: the agent did not answer the request for {path}") from None
        if frame is None:
            raise ChannelClosed(f"guest: the channel closed during the transfer of {path}")
        return frame

    def read(self, path: str) -> str:
        """Returns the stripped contents of a small text file in the guest."""
        return self.get(path).decode().strip()

    def disk(self, name: str) -> str:
        """Returns the block device (such as "vda") of the VM's disk with that name."""
        for device in self.sh("ls /sys/block").split():
            serial = f"/sys/block/{device}/serial"
            if device.startswith("vd") and self.read(serial) == name:
                return device
        raise HarnessError(f"guest: the VM has no disk '{name}'")

    def disk_stat(self, name: str) -> DiskStat:
        """Returns the numbers of requests and sectors since boot of the disk with that name."""
        fields = [int(word) for word in self.read(f"/sys/block/{self.disk(name)}/stat").split()]
        # Documentation/block/stat.rst lists the fields: reads, merged reads, sectors read, ticks,
        # then the same four values for writes.
        return DiskStat(fields[0], fields[2], fields[4], fields[6])

    def mount(self, name: str, where: str, kind: str = "ext4", options: str = "") -> None:
        """Mounts the disk with that name."""
        extra = f"-o {shlex.quote(options)}" if options else ""
        self.sh(f"mkdir -p {where} && mount -t {kind} {extra} /dev/{self.disk(name)} {where}", 60)

    def insmod(self, path: str, parameters: str = "") -> None:
        """Loads a module from a file in the guest; a failure shows the kernel's last messages."""
        done = self.run(f"insmod {path} {parameters}", 60)
        if done.status != 0:
            words = self.sh("dmesg | tail -n 20")
            raise CommandFailed(f"guest: insmod {path} {parameters}: {done.stderr!r}\n{words}")

    def drop_caches(self) -> None:
        """Writes back dirty pages, and evicts clean page cache and slab objects."""
        self.sh("sync && echo 3 >/proc/sys/vm/drop_caches", 120)

    def close(self) -> None:
        self._channel.close()
