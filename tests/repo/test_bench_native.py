# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The benchmark of native guests computes percentiles and lost pages correctly."""

from __future__ import annotations

from bench.vm.native import Row, dropped_rows, latency_rows, nonzero_rows, percentile


def values(rows: list[Row]) -> dict[str, float]:
    return {row.key: row.value for row in rows}


def test_percentile_uses_the_nearest_rank_method() -> None:
    numbers = list(range(1000, 0, -1))
    assert [percentile(numbers, of) for of in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]
    assert percentile([7], 0.5) == percentile([7], 0.999) == 7
    assert percentile([1, 2], 0.5) == 1


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
    # The printed table contains only reasons that occurred.
    assert "puts_dropped_nomem_2_guests" not in values(nonzero_rows(rows))
    assert "refused_limit_2_guests" not in values(nonzero_rows(rows))
    assert values(dropped_rows(1, {"puts": 0}))["lost_share_1_guests"] == 0
