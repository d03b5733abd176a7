# SPDX-License-Identifier: Apache-2.0 OR MIT
"""One VM's figures agree, whoever tells them: guest, tmemctl, metrics, the guest's disk."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from driver import checksums, driver_vm, evict, load, settle
from test_driver import METADATA_SECTORS, read_sectors, tree_disk

from harness.kernel import Kernel
from harness.paths import host_binary
from harness.process import Process, tail
from harness.session import Session
from harness.vm import Tmem
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

PAGE_SECTORS = 8


def address(log: Path) -> str:
    """Where the exporter listens; "" while it does not."""
    found = re.search(r"http://\S+/metrics", tail(log))
    return found[0] if found else ""


def metric(text: str, name: str, *labels: str) -> float:
    """The VM's value; several samples are added up."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and all(label in line for label in ('vm="vm1"', *labels))
    ]
    assert values, f"{name} {labels} is missing"
    return sum(values)


def test_everybody_tells_the_same(session: Session, kernel: Kernel, module: Path) -> None:
    daemon = session.daemon("vm1", pool_size="128MiB")
    daemon.start()
    data, sums = tree_disk(session)
    vm = driver_vm(session, kernel, module, Tmem(daemon.socket("vm1")), disks=[data])
    guest = vm.start()
    load(guest, "verify_every=0")
    before = evict(guest, list(sums))
    sectors = read_sectors(guest)
    assert checksums(guest, list(sums)) == sums
    sectors = read_sectors(guest) - sectors
    after = settle(guest)

    log = session.folder / "exporter.log"
    command = [str(host_binary("tmem-exporter")), "--listen", "127.0.0.1:0"]
    exporter = Process("tmem-exporter", [*command, "--socket", str(daemon.control)], log)
    try:
        until(lambda: bool(address(log)), 20, "the exporter listens")
        with urllib.request.urlopen(address(log), timeout=60) as answer:
            metrics = answer.read().decode()
    finally:
        exporter.kill()
    [told] = daemon.stats()["vms"]

    # What the guest had from its own put ring never came to the host.
    assert told["hits"] == after["hits"] - after["ring_hits"] > 0
    assert told["puts"] == after["puts"]
    assert told["puts_refused"] == after["puts_refused"]
    assert told["misses"] == told["gets"] - told["hits"]
    assert told["disk_read_avoided_bytes"] == told["hits"] * 4096
    assert told["saved_bytes"] == told["pages"] * 4096 - told["charged_bytes"]
    for latency in ("put_latency", "get_latency"):
        assert sum(told[latency]["buckets"]) > 0 < told[latency]["sum_ns"]

    assert metric(metrics, "tmem_vm_hits_total") == told["hits"]
    assert metric(metrics, "tmem_vm_gets_total") == told["gets"]
    assert metric(metrics, "tmem_vm_puts_total") == told["puts"]
    assert metric(metrics, "tmem_vm_puts_refused_total") == told["puts_refused"]
    assert metric(metrics, "tmem_vm_evictions_total") == told["evictions"]
    gets = metric(metrics, "tmem_vm_request_duration_seconds_count", 'request="get"')
    assert gets == sum(told["get_latency"]["buckets"])

    # Each page of these files was a hit or was read from the disk.
    pages = sum(-(-len_of // 4096) for len_of in file_bytes(guest.sh("stat -c %s /mnt/f*")))
    hits = after["hits"] - before["hits"]
    read = (pages - hits) * PAGE_SECTORS
    assert read - PAGE_SECTORS <= sectors <= read + METADATA_SECTORS


def file_bytes(text: str) -> list[int]:
    return [int(line) for line in text.split()]
