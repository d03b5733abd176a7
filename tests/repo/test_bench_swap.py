# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The benchmark of swap reads its guest program's output, and decides the gate, correctly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.vm import swap
from bench.vm.results import Measured, Repetition, Results
from bench.vm.swap import GET, HOST_ZRAM, SIZES, Eight, GetThrottle, Wait, parse
from harness.disk import Disk
from harness.paths import TESTS, guest_program
from harness.storage import Export

OUTPUT = """fill 100 2.0 0
sequential 100 1.0 10
read 50 0.25 20
write 50 0.75 30
fault 12 80.5 400.0
"""


def test_figures_are_parsed_from_the_output_of_the_guest_program() -> None:
    found = parse(OUTPUT)
    assert found["random_ops_per_s"] == 100
    assert found["peak_s"] == 4
    assert found["major_faults"] == 60
    assert (found["fault_p50_us"], found["fault_p99_us"]) == (80.5, 400)


def test_the_guest_program_prints_all_phases() -> None:
    """It also ends with status 0, so it found its own bytes in its memory."""
    command = [str(guest_program(TESTS / "guest/anon.c")), "4", "50", "100", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = parse(done.stdout)
    assert found["random_ops_per_s"] > 0
    assert found["major_faults"] == 0


def make_repetition(host_zram: float) -> Repetition:
    def make_measured(factor: float) -> Measured:
        out = dict.fromkeys(("host_mib", "host_zram_mib"), 1.0)
        for size in SIZES:
            for name in parse(OUTPUT):
                out[f"{name}_{size:g}"] = 100 * (1 / factor if name.endswith("_s") else factor)
            out[f"random_ops_per_s_{size:g}"] = 100 * factor
            out[f"disk_read_mib_{size:g}"] = out[f"disk_write_mib_{size:g}"] = 0
        return out

    return {arm: make_measured(host_zram if arm == HOST_ZRAM else 1.0) for arm in Eight.arms}


@pytest.mark.parametrize(("speed", "below"), [(0.94, True), (0.96, False), (2.0, False)])
def test_the_report_marks_sizes_at_which_host_zram_is_slower(
    tmp_path: Path, speed: float, below: bool
) -> None:
    results = Results(tmp_path / "swap.json", {})
    results.add(Eight.key, {}, *[make_repetition(speed)] * 3)
    text = swap.report(results)
    assert f"{speed:.2f} (" in text
    assert ("below" in text) == below


def test_only_reads_of_the_imitated_pool_have_the_rate_of_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMEM_STORAGE_DAEMON", "qemu-storage-daemon")
    throttle = GetThrottle(3000, 125_000_000, 20_000)
    image = Disk(GET, tmp_path / "image", throttle=throttle, discard=True, in_memory=True)
    command = " ".join(Export(image, tmp_path).command())
    assert "x-iops-read=20000,x-iops-write=3000,x-bps-write=125000000" in command
    assert command.count("discard=unmap") == 3


def test_memory_counts_as_returned_only_when_it_is_nearly_all_back() -> None:
    left = [0, 100, 50, 6, 4]
    wait = Wait(lambda: left.pop(0), seconds=30)
    wait.begin()
    wait.end()
    assert not left
    assert wait.figures("freed")["freed_s"] > 0
