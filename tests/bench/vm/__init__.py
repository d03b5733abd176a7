# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Benchmarks with guests: `tests/bench/run demo`, `native`, `proof`, and more.

- `__main__` runs one of them; `output` prints and writes results.
- `machine` is a guest and the files that it reads.
- `demo` compares two VMs with and without the device.
- `native` measures single gets and puts in user-mode Linux.
- `proof` compares the pool with other uses of host memory (docs/benchmarks/proof.md):
  - `disks` makes images and requests, and `guests` boots guests.
  - `workloads`, `build` and `fleet_loads` are the loads that run with and without the pool.
  - `rivals` compares ways to use equal host bytes, which `host_bytes` counts.
  - `results` keeps the checked repetitions in a file.
  - `intervals`, `plot` and `report` make the page.
- `sizes` repeats the comparison of `rivals` with several sizes of the pool.
- `seeds` repeats published experiments with the parts of `proof` (docs/benchmarks/seeds.md):
  - `databases` makes images with a database server and its benchmark.
  - `seeds_report` makes the page.
"""
