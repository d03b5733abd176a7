# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The benchmark of shared state reads the kernel's lock statistics and finds the driver's locks."""

from __future__ import annotations

from bench_locks import Lock, driver_locks, parse, thread_times

NUMBERS = "0.10 12.00 100.00 0.50"
STATISTICS = f"""\
lock_stat version 0.4
                              class name    con-bounces    contentions   waittime-min
                        &queue->ring_lock:      12      34 {NUMBERS}    1234    5678 {NUMBERS}
                        -----------------
                        &queue->ring_lock      34          [<000000001>] reserve+0x1/0x2
                      &queue->ring_lock/1:       0       1 {NUMBERS}       2       3 {NUMBERS}
                       &xa->xa_lock#7-W:         5       6 {NUMBERS}       7       8 {NUMBERS}
"""


def test_statistics_of_locks_with_the_same_name_are_summed() -> None:
    assert parse(STATISTICS) == {
        "&queue->ring_lock": Lock(contentions=35, bounces=1236, acquisitions=5681),
        "&xa->xa_lock": Lock(contentions=6, bounces=7, acquisitions=8),
    }


def test_lock_list_contains_the_locks_of_puts_and_gets() -> None:
    assert {
        "&queue->ring_lock",
        "&dev->block_lock",
        "&dev->get_lock",
        "&dev->admit->lock",
        "&tmem_buckets[i].lock",
        "pending_lock",
    } <= driver_locks()


def test_cpu_times_of_kernel_threads_are_summed_by_kind() -> None:
    text = "kswapd0 10\nrcu_preempt 3\nrcu_exp_gp_kth 4\nsh 99\nkworker/u8:1 5\nkworker/0:2 6\n"
    assert thread_times(text) == {"kswapd": 10, "rcu": 7, "kworker": 11}
