# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Statistics of a VM from the driver, tmemctl, the exporter and the disk agree with each other."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

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
# Names of the driver's counters of gets, one for each range of the time that the readers waited.
WAITS = [*(f"get_waits_{1 << bucket}us" for bucket in range(15)), "get_waits_longer"]


def address(log: Path) -> str:
    """Returns the exporter's address, or "" until it listens."""
    found = re.search(r"http://\S+/metrics", tail(log))
    return found[0] if found else ""


def metric(text: str, name: str, *labels: str) -> float:
    """Returns the value of a metric of the VM. Adds up the samples if there are several."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and all(label in line for label in ('vm="vm1"', *labels))
    ]
    assert values, f"the exporter has no sample {name} {labels}"
    return sum(values)


def test_figures_agree_in_guest_daemon_and_metrics(
    session: Session, kernel: Kernel, module: Path
) -> None:
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

    # The driver sends its counters to the daemon every ten seconds.
    def reported() -> bool:
        [vm] = daemon.stats()["vms"]
        latency = (vm["driver"] or {}).get("get_latency")
        return latency is not None and latency["buckets"] == [after[name] for name in WAITS]

    until(reported, 30, "the driver reports its last get")

    log = session.directory / "exporter.log"
    command = [str(host_binary("tmem-exporter")), "--web.listen-address", "127.0.0.1:0"]
    exporter = Process("tmem-exporter", [*command, "--socket", str(daemon.control)], log)
    try:
        until(lambda: bool(address(log)), 20, "the exporter listens")
        with urllib.request.urlopen(address(log), timeout=60) as answer:
            metrics = answer.read().decode()
    finally:
        exporter.kill()
    [served] = daemon.stats()["vms"]

    # The host does not count hits in the guest's own put ring. If its answer was too late, the host
    # counts a hit, and the driver a miss.
    hits = after["hits"] - after["ring_hits"]
    assert 0 < hits <= served["hits"] <= hits + after["misses_late"]
    assert served["puts"] == after["puts"]
    assert served["puts_refused"] == after["puts_refused"]
    assert served["misses"] == served["gets"] - served["hits"]
    assert served["disk_read_avoided_bytes"] == served["hits"] * 4096
    assert served["saved_bytes"] == served["pages"] * 4096 - served["charged_bytes"]
    for latency in ("put_latency", "get_latency"):
        assert sum(served[latency]["buckets"]) > 0 < served[latency]["sum_ns"]

    assert metric(metrics, "tmem_vm_hit_pages_total") == served["hits"]
    assert metric(metrics, "tmem_vm_get_pages_total") == served["gets"]
    assert metric(metrics, "tmem_vm_put_pages_total") == served["puts"]
    assert metric(metrics, "tmem_vm_put_refused_pages_total") == served["puts_refused"]
    assert metric(metrics, "tmem_vm_evicted_pages_total") == served["evictions"]
    gets = metric(metrics, "tmem_vm_request_duration_seconds_count", 'request="get"')
    assert gets == sum(served["get_latency"]["buckets"])
    check_waits_agree(served, after, metrics)
    assert metric(metrics, "tmem_vm_driver_get_pages_total") == served["driver"]["gets"]
    assert metric(metrics, "tmem_vm_driver_hit_pages_total") == served["driver"]["hits"]

    # Each page of these files was a hit or was read from the disk.
    pages = sum(-(-len_of // 4096) for len_of in file_bytes(guest.sh("stat -c %s /mnt/f*")))
    hits = after["hits"] - before["hits"]
    read = (pages - hits) * PAGE_SECTORS
    assert read - PAGE_SECTORS <= sectors <= read + METADATA_SECTORS


def check_waits_agree(served: dict[str, Any], after: dict[str, int], metrics: str) -> None:
    # The daemon's histogram has all get requests, and the driver's has those for which a reader
    # waited when they began.
    seen = served["driver"]["get_latency"]
    assert seen["buckets"] == [after[name] for name in WAITS]
    assert 0 < sum(seen["buckets"]) <= after["requests_get"]
    assert after["requests_get"] == sum(served["get_latency"]["buckets"])
    assert seen["sum_ns"] == after["get_waits_ns"] > 0
    assert after["waits_us"] > 0
    assert sum(served["wait_latency"]["buckets"]) > 0 < served["wait_latency"]["sum_ns"]
    name = "tmem_vm_driver_get_duration_seconds"
    assert metric(metrics, f"{name}_count") == sum(seen["buckets"])
    assert metric(metrics, f"{name}_sum") == pytest.approx(seen["sum_ns"] / 1e9)


def file_bytes(text: str) -> list[int]:
    return [int(line) for line in text.split()]
