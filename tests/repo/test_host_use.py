# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Shared memory of several processes is counted once, and processor time is measured correctly."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

from harness.host_use import mapped_bytes, page_table_bytes, processor_seconds

SHARED_BYTES = 64 << 20
# Upper bound of the memory that a small Python process uses itself.
OWN_BYTES = 48 << 20

CHILD = f"""
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), {SHARED_BYTES})
try:
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages would need fewer page tables
except OSError:
    pass  # this kernel has no transparent huge pages
for page in range(0, {SHARED_BYTES}, 4096):
    memory[page] = 1
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_shared_by_two_processes_counts_once() -> None:
    file = os.memfd_create("shared")
    os.ftruncate(file, SHARED_BYTES)
    command = [sys.executable, "-c", CHILD, str(file)]
    children = [
        subprocess.Popen(
            command, pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout and child.stdout.readline() == "ready\n"
        pids = [child.pid for child in children]
        both = mapped_bytes(pids)
        assert SHARED_BYTES <= both < SHARED_BYTES + 2 * OWN_BYTES
        # Two processes map the shared memory, so half of it counts for each of them.
        assert mapped_bytes(pids[:1]) < SHARED_BYTES // 2 + OWN_BYTES
        # Each process has its own page tables: 8 bytes for each page.
        assert page_table_bytes(pids) >= 2 * SHARED_BYTES // mmap.PAGESIZE * 8
    finally:
        for child in children:
            child.kill()
            child.communicate()
        os.close(file)


def test_processor_time_of_a_process_is_measured() -> None:
    before = processor_seconds(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    # The kernel counts in ticks of 10 ms.
    assert 0.15 < processor_seconds(os.getpid()) - before < 0.6
