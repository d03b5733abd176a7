# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Compares the pool with other uses of host memory: `make bench-proof`, docs/benchmarks/proof.md.

- `disks` makes images and requests, and `guests` boots guests.
- `workloads`, `build` and `fleet_loads` are the loads that run with and without the pool.
- `rivals` compares ways to use equal host bytes, which `host_bytes` counts.
- `model` predicts times.
- `run` measures, and `results` keeps the checked repetitions in a file.
- `intervals`, `plot` and `report` make the page.
"""
