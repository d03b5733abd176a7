# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The benchmark of native guests computes its percentiles, reasons and JSON values correctly."""

from __future__ import annotations

import json
import re

import pytest

from bench_guest import Row, figure_text
from bench_native import (
    conditions,
    dropped_rows,
    flat,
    latency_rows,
    parse_latency,
    percentile,
    report,
)
from harness.paths import HarnessError
from native_bench import shown

pytestmark = pytest.mark.smoke

FACTS = {
    "processors": 2,
    "processor": "a processor",
    "host_kernel": "6.1",
    "idle_processors": "poll",
    "load_1min_before": 0.5,
    "load_1min_after": 1.5,
    "steal_share": 0.012,
}


def values(rows: list[Row]) -> dict[str, float]:
    return {row.key: row.value for row in rows}


def test_percentile_uses_the_nearest_rank_method() -> None:
    numbers = list(range(1000, 0, -1))
    assert [percentile(numbers, of) for of in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]
    assert percentile([7], 0.5) == percentile([7], 0.999) == 7
    assert percentile([1, 2], 0.5) == 1


def test_benchmark_output_of_the_guest_is_parsed() -> None:
    assert parse_latency("get 5 6\nempty 1 2\ndisk\n") == {
        "get": [5, 6],
        "empty": [1, 2],
        "disk": [],
    }


def samples() -> dict[str, list[int]]:
    return {
        "get": [300] * 990 + [900] * 9 + [5000],
        "cached": [120] * 1000,
        "empty": [100] * 999 + [9000],
        "disk": [4000] * 50,
    }


def test_empty_system_call_time_is_subtracted_from_page_times_only() -> None:
    page, window = (values(latency_rows(size, samples(), 10.0)) for size in ("4k", "128k"))
    assert page["get_4k_p50_us"] == 20 and window["get_128k_p50_us"] == 30
    assert page["get_4k_p99_us"] == 20 and page["get_4k_p999_us"] == 80
    assert page["cached_4k_p50_us"] == 2 and page["disk_4k_p50_us"] == 390
    assert page["syscall_4k_p50_us"] == window["syscall_128k_p50_us"] == 10


def test_only_gets_of_4_kib_have_latency_targets() -> None:
    met = {row.key: row.met for row in latency_rows("4k", samples(), 10.0)}
    assert met["get_4k_p50_us"] is False and met["get_4k_p99_us"] is True
    assert all(row.met is None for row in latency_rows("128k", samples(), 10.0))


def test_pages_that_were_not_put_are_counted_by_reason() -> None:
    change = {
        "puts": 80,
        "puts_refused": 10,
        "refused_pool": 8,
        "refused_nursery": 2,
        "refused_limit": 0,
        "puts_stored": 70,
        "puts_dropped_ring_full": 15,
        "puts_skipped_admission": 5,
        "puts_dropped_nomem": 0,
        "hits": 999,
    }
    rows = dropped_rows(2, change)
    found = values(rows)
    assert found["offered_2_guests"] == 100
    assert found["lost_share_2_guests"] == 0.3
    assert found["puts_dropped_ring_full_2_guests"] == 15
    assert found["puts_refused_2_guests"] == 10
    assert found["refused_pool_2_guests"] == 8 and found["refused_limit_2_guests"] == 0
    assert "hits_2_guests" not in found and "puts_stored_2_guests" not in found
    # The JSON values contain every reason for a lost page, also with the count 0. The printed table
    # contains only reasons that occurred.
    assert found["puts_dropped_nomem_2_guests"] == 0
    assert "puts_dropped_nomem_2_guests" not in values(shown(rows))
    assert "refused_limit_2_guests" not in values(shown(rows))
    assert values(dropped_rows(1, {"puts": 0}))["lost_share_1_guests"] == 0


def test_json_report_is_a_flat_object() -> None:
    rows = [Row("a_us", "", 1.23456789, "µs", "<= 1", False), Row("b_s", "", 2, "s", "<= 3", True)]
    out = json.loads(json.dumps(flat(rows, FACTS)))
    assert out["a_us"] == 1.23457 and out["b_s"] == 2 and out["missed"] == "a_us"
    assert out["processor"] == "a processor"
    assert all(isinstance(value, str | int | float) for value in out.values())


def test_report_refuses_nan_and_duplicate_keys() -> None:
    with pytest.raises(HarnessError, match="a is nan"):
        flat([Row("a", "", float("nan"))], {})
    with pytest.raises(HarnessError, match="two figures have the key a"):
        flat([Row("a", "", 1), Row("a", "", 2)], {})


def test_report_has_units_targets_and_measurement_conditions() -> None:
    text = report([Row("a_us", "a time", 1.5, "µs", "<= 1", False)])
    assert re.search(r"a time +a_us +1\.50 +µs +<= 1 +MISSED", text)
    line = conditions(FACTS)
    assert "load average 0.5 before and 1.5 after" in line and "1.2% stolen" in line


@pytest.mark.parametrize(
    "value, unit, text",
    [(0.25, "ratio", "0.2500"), (64.0, "pages", "64"), (1.5, "s", "1.50"), (4864.2, "ns", "4,864")],
)
def test_decimal_places_depend_on_magnitude_and_unit(value: float, unit: str, text: str) -> None:
    assert figure_text(value, unit) == text
