# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Benchmarks. The Rust program tmem-bench is in src/, the benchmarks with guests are in vm/."""
